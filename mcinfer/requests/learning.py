"""Learning how a batch is split: a wrapper around requests, which answers a call or hands it on.

::

    Master.predict ──► Learner.try_answer ── nothing is known yet ──► whole on one worker: the answer
            │                      │                            └──► in pieces: compared with it
            │                      └── None: Planner.answer_call
            └── its pieces failed ──► Learner.rescue ──► whole on one worker

What is known, and what a comparison shows, is in `mcinfer.requests.splitting`; the cache keeps what has been
learned. Here are the calls: the runs of a look, and their time.
"""

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import ClosedError, McinferError, PredictError
from mcinfer.model_cache.split_records import SplitRecord
from mcinfer.requests.planner import Planner
from mcinfer.requests.request import Call, OutcomeFuture
from mcinfer.requests.splitting import Known, Splitter, Verify, answers_of
from mcinfer.requests.tensors import Arrays
from mcinfer.requests.waiting_threads import WaitingThreads
from mcinfer.sharding import Axes, SaidAxes, Split
from mcinfer.specs import ModelSpec

_MAX_SPLITTERS = 64  # sets of axes that calls say, of which it is remembered what was learned

_LOOK_SECONDS = 3.0
_LOOK_FACTOR = 10.0
"""Each further run of a look has so many seconds, and so many times what the first took."""


class Learner:
    """How the batch of one model is split, learned from its calls. Any thread may call it.

    Args:
        model: Its inputs and outputs.
        planner: Makes and answers requests.
        threads: Where looks run that no caller waits for.
        said: The axes that the user says for all calls.
        verify: How much is checked; see `Master`.
        engine: The name of the engine: records are kept apart by it.
        identity: Of the model; empty if it cannot be identified.
        whole: Why requests run whole unless the user says what to split; empty if nothing speaks against it.
        ragged: A node whose result's size depends on its data; empty if there is none.
        joins: Whether requests may be joined.

    Raises:
        InvalidInputError: The model has no such input, output or axis as the user says.
    """

    def __init__(
        self,
        model: ModelSpec,
        planner: Planner,
        threads: WaitingThreads,
        *,
        said: SaidAxes,
        verify: Verify,
        engine: str,
        identity: str,
        whole: str,
        ragged: str,
        joins: bool,
    ) -> None:
        self._model = model
        self._planner = planner
        self._threads = threads
        self._said = said
        self._verify: Verify = verify
        self._engine = engine
        self._identity = "" if verify == "never" else identity
        self._whole = whole
        self._ragged = ragged
        self._joins = joins
        self._splitters: dict[str, Splitter] = {}
        self.splitter = self._new_splitter(said)

    def splitter_for(self, batch_axes: Axes | None, output_axes: Axes | None) -> Splitter:
        """What knows how to split by these axes of one call; they override those for all calls."""
        call = SaidAxes.of(batch_axes, output_axes)
        # Values as text: what is no axis may not be hashable either, and True is not 1.
        key = repr([sorted(axes.items(), key=repr) for axes in (call.inputs, call.outputs)])
        splitter = self._splitters.get(key)
        if splitter is None:
            said = SaidAxes(
                inputs={**self._said.inputs, **call.inputs},
                outputs={**self._said.outputs, **call.outputs},
            )
            splitter = self._new_splitter(said)
            if len(self._splitters) >= _MAX_SPLITTERS:
                self._splitters.clear()
            self._splitters[key] = splitter
        return splitter

    def _new_splitter(self, said: SaidAxes) -> Splitter:
        about = {"engine": self._engine, "inputs": dict(said.inputs), "outputs": dict(said.outputs)}
        said.check(self._model)
        record = SplitRecord(self._identity, about)
        return Splitter(
            self._model,
            said,
            verify=self._verify,
            whole=self._whole,
            ragged=self._ragged,
            recorded=record.read(),
            record=record.write,
        )

    # Calls.

    def try_answer(self, call: Call) -> Arrays | None:
        """Answer a call by the look at it, if that is due and no other call has begun it; else None.

        Raises:
            CancelledError: What `call.offer` got was called.
            McinferError: As `Master.predict`.
        """
        if self.may_look(call):
            arrays = self._planner.host_arrays(call.inputs, call.timeout)
            if call.splitter.begin(call.known):
                return self._answer_whole(call, arrays)
        if call.pieces > 1 or call.joins:
            call.splitter.warn_if_whole()
        return None

    def may_look(self, call: Call) -> bool:
        """Whether `try_answer` may answer this call, which takes several runs."""
        if call.known.settled or call.splitter.busy or not (call.pieces > 1 or self._joins):
            return False
        call.inputs = arrays = self._planner.arrays(call.inputs)
        return all(0 not in array.shape for array in arrays)

    def submit(self, call: Call, *, wait: bool = True) -> OutcomeFuture[Arrays]:
        """Queue a call, as `Planner.submit`; the first that may be joined is looked at, in a thread."""
        if call.known.open and call.joins:
            call.splitter.warn_if_whole()
            if call.outputs_on is None and self.may_look(call):
                self._look_beside(call)
        return self._planner.submit(call, wait=wait)

    def rescue(self, call: Call, failure: PredictError) -> Arrays | None:
        """Answer a call whose pieces failed by a whole run, and split no more; None if that fails, too."""
        if not self.may_rescue(call):
            return None
        runs = self._runs(replace(call, limited=False, context=None))  # its trace was announced
        try:
            (answer,) = answers_of(runs, [self._planner.host_arrays(call.inputs, call.timeout)])
        except McinferError:
            if call.cancelled:
                raise CancelledError from None
            return None
        call.splitter.withdraw(f"the pieces of a batch fail where the whole runs ({failure})")
        return self._as_asked(call, answer)

    def may_rescue(self, call: Call) -> bool:
        """Whether a call that failed was split, and may run whole."""
        return call.known.rescues and len(call.rows) > 1

    def relearn(self, call: Call) -> Split:
        """Learn from a call alone, and forget what was known; see `Master.learn`."""
        arrays = self._planner.host_arrays(call.inputs, call.timeout)
        updated = call.weights.number > 0
        return call.splitter.relearn(updated, arrays, self._runs(call), call.timeout)

    def _look_beside(self, call: Call) -> None:
        """Look at a call that is answered by itself."""
        arrays = [*map(np.array, self._planner.host_arrays(call.inputs, call.timeout))]
        beside = replace(call, joins=False, context=None)

        def look() -> None:
            if call.splitter.begin(call.known):
                self._answer_whole(beside, arrays)

        with suppress(PredictError):  # no thread can be had: another call is looked at
            self._threads.submit(look)

    def _answer_whole(self, call: Call, arrays: Sequence[NDArray[Any]]) -> Arrays:
        """Answer a call by a whole run, and look at it; its splitter's look has begun."""
        runs = self._runs(call)
        try:
            answer = call.splitter.look(arrays, runs, runs.in_pieces)
        except McinferError:
            if call.cancelled:
                raise CancelledError from None
            raise
        return self._as_asked(call, answer)

    def _runs(self, call: Call) -> "_Runs":
        runs = _Runs(self._planner, call)
        if call.offer is not None:
            call.offer(runs.cancel)
        return runs

    def _as_asked(self, call: Call, answer: Arrays) -> Arrays:
        """The outputs that a call wants, where it wants them."""
        if call.outputs is not None:
            answer = {name: answer[name] for name in call.outputs}
        if call.outputs_on is not None:
            specs = {spec.name: spec for spec in self._model.outputs}
            wanted = [specs[name] for name in answer]
            answer = call.outputs_on.upload(wanted, answer, call.timeout)
        return answer


class _Runs:
    """Runs requests whole, for one look at `call`, all at once.

    The first run is the answer to `call` and has its time; its duration limits the others, which are not
    traced.
    """

    def __init__(self, planner: Planner, call: Call) -> None:
        self._planner = planner
        self._call = call
        self._first_seconds: float | None = None
        self._futures: list[Future[Arrays]] = []

    def __call__(self, requests: Sequence[Sequence[NDArray[Any]]]) -> list[Arrays | McinferError]:
        """Run all at once and wait; a failed run has its error in the place of an answer."""
        began = monotonic()
        call = replace(self._part(), pieces=1, apart=True)
        if self._first_seconds is not None:
            most = _LOOK_SECONDS + _LOOK_FACTOR * self._first_seconds
            left = min(max(0.0, call.start + call.timeout - began), most)
            call = replace(call, start=began, timeout=left, context=None, limited=False)
        try:
            begun = [self._begin(replace(call, inputs=arrays)) for arrays in requests]
            outcomes = [*map(_outcome, begun)]
        finally:
            self._stop()
        if self._first_seconds is None:
            self._first_seconds = monotonic() - began
        return outcomes

    def in_pieces(self, known: Known) -> Arrays:
        """Run the request split, in the time that is left; raise the error of a failure."""
        pieces = max(2, self._call.pieces)
        parts = replace(self._part(), known=known, pieces=pieces, limited=False)
        outcome = _outcome(self._begin(parts))  # which does not begin what was cancelled
        if isinstance(outcome, McinferError):
            raise outcome
        return outcome

    def _part(self) -> Call:
        """The call as a run of the look: of all rows alike, with all outputs, on the host."""
        return replace(self._call, outputs=None, outputs_on=None, keeps=False)

    def _begin(self, call: Call) -> "Future[Arrays] | McinferError":
        """Begin a run that `cancel` stops."""
        if self._call.cancelled:
            return ClosedError("the request was cancelled")
        try:
            future = self._planner.submit(call)
        except McinferError as exc:
            return exc
        self._futures.append(future)
        if self._call.cancelled:
            future.cancel()
        return future

    def cancel(self) -> None:
        """Stop the current runs and all later ones."""
        self._call.cancelled = True
        self._stop()

    def _stop(self) -> None:
        with suppress(IndexError):  # the thread of the runs and another one may be here at once
            while True:
                self._futures.pop().cancel()


def _outcome(begun: "Future[Arrays] | McinferError") -> Arrays | McinferError:
    if isinstance(begun, McinferError):
        return begun
    try:
        return begun.result()
    except McinferError as exc:
        return exc
    except CancelledError:
        return ClosedError("the request was cancelled")
