"""Learning how a batch is split: a wrapper around requests, which answers a call or hands it on.

::

    Master.predict ──► Learner.try_answer ── nothing is known yet ──► whole on one worker: the answer
            │                      │                            └──► in pieces: compared with it
            │                      └── None: Planner.answer_call
            └── its pieces failed ──► Learner.rescue ──► whole on one worker

What is known, and what a comparison shows, is in `mcinfer.requests.splitting`; here are the calls.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any

from mcinfer.errors import McinferError, PredictError, is_refusal
from mcinfer.logs import PoolLog
from mcinfer.model_cache.split_records import SplitRecord
from mcinfer.requests.comparing import Batch
from mcinfer.requests.inputs import Answers
from mcinfer.requests.request import Call, OutcomeFuture
from mcinfer.requests.splitting import SplitState, Splitter, Verify
from mcinfer.requests.tensors import Arrays
from mcinfer.requests.waiting_threads import WaitingThreads
from mcinfer.sharding import Axes, SaidAxes, Split
from mcinfer.specs import ModelSpec

__tracebackhide__ = is_refusal

_MAX_SPLITTERS = 64  # sets of axes that calls say, of which it is remembered what was learned

_LOOK_SECONDS = 3.0
_LOOK_FACTOR = 10.0
"""Each further run of a look has so many seconds, and so many times what the first took."""


@dataclass(kw_only=True, eq=False)
class Learner:
    """How the batch of one model is split, learned from its calls. Any thread may call it.

    Raises `InvalidInputError` if the model has no such input, output or axis as the user says.

    Attributes:
        planner: Makes and answers requests.
        threads: Where looks run that no caller waits for.
        said: The axes that the user says for all calls.
        engine: The name of the engine: records are kept apart by it.
        identity: Of the model; empty if it cannot be identified.
        joins: Whether requests may be joined.
        log: Has the records about the pool.
        verify: See `Splitter`, as for `whole` and `ragged`.
        splitter: Of all calls that say no axes.
    """

    model: ModelSpec
    planner: Answers
    threads: WaitingThreads
    said: SaidAxes
    engine: str
    identity: str
    joins: bool
    verify: Verify
    log: PoolLog
    whole: str = ""
    ragged: str = ""
    splitter: Splitter = field(init=False)
    _splitters: dict[tuple[bool, str], Splitter] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.splitter = self._new_splitter(self.said)

    def splitter_for(
        self, batch_axes: Axes | None, output_axes: Axes | None, updated: bool
    ) -> Splitter:
        """What knows how to split by these axes of one call; they override those for all calls.

        There is another one for replaced weights (`updated`), of which nothing is recorded.
        """
        call = SaidAxes.of(batch_axes, output_axes)
        says_nothing = not (call.inputs or call.outputs)
        if says_nothing and self.splitter.updated == updated:
            return self.splitter
        # Values as text: what is no axis may not be hashable either, and True is not 1.
        text = repr([sorted(axes.items(), key=repr) for axes in (call.inputs, call.outputs)])
        splitter = self._splitters.get((updated, text))
        if splitter is None:
            said = SaidAxes(
                inputs={**self.said.inputs, **call.inputs},
                outputs={**self.said.outputs, **call.outputs},
            )
            before = self.splitter if says_nothing else self._splitters.get((False, text))
            splitter = self._new_splitter(said, updated, before.withdrawn if before else "")
            if len(self._splitters) >= _MAX_SPLITTERS:
                self._splitters.clear()
            self._splitters[updated, text] = splitter
        if says_nothing and updated:
            self.splitter = splitter
        return splitter

    def _new_splitter(
        self, said: SaidAxes, updated: bool = False, whole: str = "", *, anew: bool = False
    ) -> Splitter:
        said.check(self.model)
        about = {"engine": self.engine, "inputs": dict(said.inputs), "outputs": dict(said.outputs)}
        is_recorded = self.verify != "never" and not updated
        record = SplitRecord(self.identity if is_recorded else "", about)
        return Splitter(
            self.model,
            said,
            self.log,
            verify=self.verify,
            whole=whole or self.whole,
            ragged=self.ragged,
            updated=updated,
            recorded=None if anew else record.read(self.model),
            record=record.write,
        )

    # Calls.

    def try_answer(self, call: Call) -> Arrays | None:
        """Answer a call by the look at it, if that is due and no other call has begun it; else None.

        Raises:
            CancelledError: What `call.offer` got was called.
            McinferError: As `Master.predict`.
        """
        if call.pieces == 1 and not self.joins:
            return None
        if self.may_look(call) and (answer := self._look(call)) is not None:
            return answer
        if call.pieces > 1 or call.joins:
            call.splitter.warn_if_whole()
        return None

    def may_look(self, call: Call) -> bool:
        """Whether `try_answer` may answer this call, which takes several runs."""
        is_open = not (call.split_state.split.settled or call.splitter.busy)
        if not is_open or not (call.pieces > 1 or self.joins):
            return False
        call.inputs = arrays = self.planner.arrays(call.inputs)
        return all(0 not in array.shape for array in arrays)

    def submit(self, call: Call, *, wait: bool = True) -> OutcomeFuture[Arrays]:
        """Queue a call, as `Planner.submit`; the first that may be joined is looked at, in a thread."""
        if not call.split_state.splits and call.joins:
            call.splitter.warn_if_whole()
            if call.outputs_on is None and self.may_look(call):
                copies = self.planner.host_copies(call)
                beside = replace(call, inputs=copies, joins=False, context=None)
                with suppress(PredictError):  # no thread can be had: another call is looked at
                    self.threads.submit(partial(self._look, beside))
        return self.planner.submit(call, wait=wait)

    def rescue(self, call: Call, failure: PredictError) -> Arrays | None:
        """Answer a call whose pieces failed by a whole run, and split no more; None if that fails, too."""
        if not call.may_be_rescued:
            return None
        try:
            run = _Runs(self.planner, call, limited=False, context=None)  # its trace was announced
            answer = run(run.arrays)
        except McinferError:
            return None
        call.splitter.withdraw(f"the pieces of a batch fail where the whole runs ({failure})")
        return self._as_asked(call, answer)

    def relearn(self, call: Call) -> Split:
        """Learn from a call alone, and forget what was known; see `Master.learn`."""
        before = call.splitter
        if before.is_decided:
            return before.state.split
        run = _Runs(self.planner, call)
        splitter = self._new_splitter(before.said, before.updated, anew=True)
        splitter.learn(run.arrays, run, before)
        for key, other in [*self._splitters.items()]:
            if other is before:
                self._splitters[key] = splitter
        if self.splitter is before:
            self.splitter = splitter
        return splitter.state.split

    def _look(self, call: Call) -> Arrays | None:
        """Answer a call by a whole run, and look at it; None if another call is looked at."""
        run = _Runs(self.planner, call)
        answer = call.splitter.look(run.arrays, run, run.in_pieces)
        return None if answer is None else self._as_asked(call, answer)

    def _as_asked(self, call: Call, answer: Arrays) -> Arrays:
        """The outputs that a call wants, where it wants them."""
        names = [*answer] if call.outputs is None else call.outputs
        if call.outputs_on is not None:
            wanted = [spec for spec in self.model.outputs if spec.name in names]
            answer = call.outputs_on.upload(wanted, answer, call.timeout)
        return {name: answer[name] for name in names}


class _Runs:
    """Runs requests whole, one after another, for one look at `call`, whose inputs are `arrays`.

    The first run is the answer to `call` and has its time; its duration limits the others, which are not
    traced. Where the call is cancelled, the run that goes on ends with `CancelledError`, and so do all later.
    """

    def __init__(self, planner: Answers, call: Call, **changes: Any) -> None:
        self.arrays = planner.host_arrays(call)
        self._planner = planner
        # All rows alike, with all outputs, on the host.
        whole = replace(call, outputs=None, outputs_on=None, keeps=False)
        self._call = replace(whole, **changes)
        self._seconds: float | None = None

    def __call__(self, arrays: Batch) -> Arrays:
        began = monotonic()
        run = replace(self._call, inputs=arrays, pieces=1, apart=True)
        if self._seconds is not None:
            left = max(0.0, run.start + run.timeout - began)
            most = _LOOK_SECONDS + _LOOK_FACTOR * self._seconds
            run = replace(run, start=began, timeout=min(left, most), context=None, limited=False)
        answer = self._planner.answer_call(run)
        if self._seconds is None:
            self._seconds = monotonic() - began
        return answer

    def in_pieces(self, state: SplitState) -> Arrays:
        """Run the request split, in the time that is left."""
        pieces = max(2, self._call.pieces)
        return self._planner.answer_call(
            replace(self._call, split_state=state, pieces=pieces, limited=False)
        )
