"""Learning how a batch is split: a wrapper around requests, which answers a call or hands it on.

::

    Master.predict ──► Learner.try_answer ── this call shows something ──► whole on one worker: the answer
            │                      │                              └──► in pieces: compared with it
            │                      └── None: Planner.answer_call
            └── its pieces failed ──► Learner.rescue ──► whole on one worker

What is known, and what a comparison shows, is in `mcinfer.requests.splitting`; the cache keeps what has been
learned. Here are the calls: which of them to compare, the runs of a comparison, and their time.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from numpy.typing import NDArray

from mcinfer.errors import ClosedError, McinferError, PredictError
from mcinfer.model_cache.split_records import SplitRecord
from mcinfer.requests.planner import Planner
from mcinfer.requests.request import Call, OutcomeFuture
from mcinfer.requests.splitting import Known, OutgrownError, Splitter, Verify, answers_of
from mcinfer.requests.tensors import Arrays
from mcinfer.requests.waiting_threads import WaitingThreads
from mcinfer.sharding import Axes, JoinError, SaidAxes, Split
from mcinfer.specs import ModelSpec

_log = logging.getLogger("mcinfer.master")

_MAX_SPLITTERS = 64  # sets of axes that calls say, of which it is remembered what was learned

_CHECK_SECONDS = 10.0
_CHECK_FACTOR = 10.0
"""Each further run of a check has so many seconds, and so many times what the first took."""


class Learner:
    """How the batch of one model is split, learned from its calls. Any thread may call it.

    Args:
        model: Its inputs and outputs.
        planner: Makes and answers requests.
        threads: Where comparisons run that no caller waits for.
        said: The axes that the user says for all calls.
        verify: How much is checked; see `Master`.
        engine: The name of the engine: records are kept apart by it.
        identity: Of the model; empty if it cannot be identified.
        whole: Why requests run whole unless the user says what to split; empty if nothing speaks against it.
        most_joined: Most rows of a joined run; 1 if runs are not joined.
        advised: The number of workers, if mcinfer chose it: then a request that is faster on one is logged.

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
        most_joined: int,
        advised: int,
    ) -> None:
        self._model = model
        self._planner = planner
        self._threads = threads
        self._said = said
        self._verify: Verify = verify
        self._engine = engine
        self._identity = "" if verify == "never" else identity
        self._whole = whole
        self._most_joined = most_joined
        self._advised = advised
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
            recorded=record.read(),
            record=record.write,
        )

    # Calls.

    def teaches(self, call: Call) -> bool:
        """Whether this call will show how its batch is split."""
        if call.pieces <= 1:
            return False
        call.inputs = arrays = self._planner.arrays(call.inputs)
        shapes = tuple(array.shape for array in arrays)
        return not call.splitter.busy and call.splitter.teaches(call.known, shapes)

    def try_answer(self, call: Call) -> Arrays | None:
        """Answer a call from which something can be learned; None for any other.

        Raises:
            CancelledError: What `call.offer` got was called.
            McinferError: As `Master.predict`.
        """
        if self.teaches(call):
            return self._answer_whole(call)
        if call.pieces > 1 or call.joins:
            call.splitter.warn_if_whole()
        return None

    def submit(self, call: Call, *, wait: bool = True) -> OutcomeFuture[Arrays]:
        """Queue a call, as `Planner.submit`; it may show, with others, whether such calls can be joined."""
        if call.known.open and (call.pieces > 1 or call.joins):
            call.splitter.warn_if_whole()
        future = self._planner.submit(call, wait=wait)
        self.offer(call)
        return future

    def may_rescue(self, call: Call, failure: PredictError) -> bool:
        """Whether a call that failed may still be answered: it is to be compared first, or cut no more."""
        cut = call.known.split.checked and len(call.rows) > 1
        return isinstance(failure, OutgrownError) or (cut and not isinstance(failure, JoinError))

    def rescue(self, call: Call, failure: PredictError) -> Arrays | None:
        """Answer a call that failed by a whole run; None if that fails, too."""
        if not self.may_rescue(call, failure):
            return None
        outgrown = isinstance(failure, OutgrownError)
        call.limited = call.limited and outgrown
        return self._answer_whole(call, None if outgrown else failure)

    def relearn(self, call: Call) -> Split:
        """Learn from a call alone, and forget what was known; see `Master.learn`."""
        arrays = self._planner.host_arrays(call.inputs, call.timeout)
        rechecks, runs = call.weights.rechecks, _Runs(self._planner, call, self._advise)
        return call.splitter.relearn(rechecks, arrays, runs.pieces, runs, call.timeout)

    def _answer_whole(self, call: Call, failure: PredictError | None = None) -> Arrays | None:
        """Answer a call by a whole run, and learn from it.

        After the failure of its pieces the answer alone shows enough; None if there is none.
        """
        splitter, runs = call.splitter, _Runs(self._planner, call, self._advise)
        if call.offer is not None:
            call.offer(runs.cancel)
        arrays = self._planner.host_arrays(call.inputs, call.timeout)
        try:
            if failure is None:
                # If it has outgrown a split, there is to be time for its pieces, too.
                runs.share = 0.5 if call.known.splits else 1.0
                answer = splitter.answer(call.known, arrays, runs.pieces, runs, runs.in_pieces)
            else:
                (answer,) = answers_of(runs, [arrays])
                splitter.withdraw(f"a piece of a batch fails where the whole runs ({failure})")
        except McinferError:
            if call.cancelled:
                raise CancelledError from None
            if failure is None:
                raise
            return None
        if call.outputs is not None:
            answer = {name: answer[name] for name in call.outputs}
        if call.outputs_on is not None:
            specs = {spec.name: spec for spec in self._model.outputs}
            wanted = [specs[name] for name in answer]
            answer = call.outputs_on.upload(wanted, answer, call.timeout)
        return answer

    def offer(self, call: Call) -> None:
        """Compare some queued calls, each by itself, with one joined run of all, once they may show it."""
        most = self._most_joined
        if not call.joins or call.known.most_joined >= most or call.outputs_on is not None:
            return
        if self._verify == "never" or not 0 < sum(call.rows) < most:  # more are never joined
            return
        runs = _Runs(self._planner, replace(call), None)
        arrays = self._planner.host_arrays(call.inputs, call.timeout)
        offered = call.splitter.offer(call.known, call.weights.number, arrays, most)
        if offered is not None:
            learn = call.splitter.learn_from_offers
            self._threads.submit(partial(learn, call.known, offered, runs))

    def _advise(self, whole: float, in_pieces: float) -> None:
        """Say that one worker is faster, if a request's pieces took longer than its whole run on one."""
        workers = self._advised
        if workers > 1 and in_pieces > whole:
            self._advised = 0
            _log.info(
                "a request took %.3g ms whole on one worker, and %.3g ms in pieces on %d workers: shards=1 "
                "is faster for single requests of this size",
                *(1e3 * whole, 1e3 * in_pieces, workers),
            )


class _Runs:
    """Runs requests whole, for one check of `call`, all at once.

    The first run is the answer to `call` and has its time, or that `share` of it; its duration limits the
    others, which are not traced, and `advise` gets both. Without `advise`, the call has its answer already,
    and its time counts from the first run on.
    """

    def __init__(
        self, planner: Planner, call: Call, advise: Callable[[float, float], None] | None
    ) -> None:
        self._planner = planner
        self._call = call
        self._advise = advise
        self._first_seconds: float | None = None
        self._futures: list[Future[Arrays]] = []
        self.pieces = max(2, call.pieces)  # as many as later requests have
        self.share = 1.0

    def __call__(self, requests: Sequence[Sequence[NDArray[Any]]]) -> list[Arrays | McinferError]:
        """Run all at once and wait; a failed run has its error in the place of an answer."""
        began = monotonic()
        first = self._first_seconds is None
        is_answer = first and self._advise is not None
        if first and not is_answer:
            self._call = replace(self._call, start=began)
        start, timeout = self._call.start, self._call.timeout
        if first:
            timeout *= self.share
        else:
            most = _CHECK_SECONDS + _CHECK_FACTOR * (self._first_seconds or 0.0)
            start, timeout = began, min(max(0.0, start + timeout - began), most)
        call = replace(
            self._part(),
            pieces=1,
            start=start,
            timeout=timeout,
            apart=True,
            context=self._call.context if is_answer else None,
            limited=is_answer and self._call.limited,
        )
        try:
            begun = [self._begin(replace(call, inputs=arrays)) for arrays in requests]
            outcomes = [*map(_outcome, begun)]
        finally:
            self._stop()
        seconds = monotonic() - began
        if first:
            self._first_seconds = seconds
        elif len(requests) > 1 and self._advise is not None:
            self._advise(self._first_seconds or 0.0, seconds)
        return outcomes

    def in_pieces(self, known: Known) -> Arrays:
        """Run the request split, in the time that is left; raise the error of a failure."""
        parts = replace(self._part(), known=known, pieces=self.pieces, limited=False)
        outcome = _outcome(self._begin(parts))  # which does not begin what was cancelled
        if isinstance(outcome, McinferError):
            raise outcome
        return outcome

    def _part(self) -> Call:
        """The call as a run of the check: of all rows alike, with all outputs, on the host."""
        return replace(self._call, balance=None, outputs=None, outputs_on=None, keeps=False)

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
