"""Calls that this process answers itself: checked, cut into runs, and computed on the callers' arrays.

::

    InlineAnswers ──► Job: a call, its arrays, its plan ──► the pool: when, and in which thread
    `mcinfer.inline.InlinePool` ──► InlineAnswers.compute: a run of joined jobs, or of each piece

It is in the place of `mcinfer.requests.planner`, without memory that others read and without messages.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mcinfer import sharding
from mcinfer.engines.base import Buffer, Engine, RunCancelledError
from mcinfer.errors import PredictError, is_refusal
from mcinfer.logs import PoolLog
from mcinfer.protocol import BuildFinish
from mcinfer.requests.frames import Lease, make_frame
from mcinfer.requests.inputs import InputReader
from mcinfer.requests.request import NO_WEIGHTS, Call, Outcome, OutcomeFuture, Owner, pick
from mcinfer.requests.splitting import SplitState
from mcinfer.requests.tensors import Arrays, Copier, join_parts, split_rows
from mcinfer.requests.weights import WeightStore, WeightVersion
from mcinfer.scheduler.dispatch import Entry
from mcinfer.sharding import Cut, JoinError
from mcinfer.shm.arena import ALIGNMENT, Slot
from mcinfer.specs import ModelSpec, TensorSpec, check_whole_bytes, specs_of

__tracebackhide__ = is_refusal

_MAX_PLANS = 256

_NOT_ACCEPTED = Entry(-1, (), 0, 0.0, 0.0, 0.0)

_shape = attrgetter("shape")


@dataclass(slots=True)
class DirectPlan:
    """Requests of one set of shapes.

    Attributes:
        size: Bytes of the inputs, and of outputs of known shapes.
        apart: Why they are not joined with others; empty if they may be.
        alike: What those of them that may be joined have in common.
    """

    cut: Cut
    size: int
    apart: str
    alike: tuple[object, ...]


class Job(Outcome[Arrays]):
    """A call on its way.

    Attributes:
        entry: That of the pool's table, once it is accepted.
        lane: Once it runs.
        here: Whether it runs in its caller's thread.
    """

    __slots__ = ("answers", "arrays", "call", "entry", "here", "join", "lane", "plan", "weights")

    def __init__(
        self, answers: "InlineAnswers", call: Call, arrays: Sequence[Any], plan: DirectPlan
    ) -> None:
        super().__init__()
        self.answers = answers
        self.call = call
        self.arrays = arrays
        self.plan = plan
        self.weights = call.weights
        self.join: tuple[Any, int] | None = None
        self.entry: Entry = _NOT_ACCEPTED
        self.lane: Any = None
        self.here = False

    def wait(self, timeout: float | None = None) -> bool:
        return self.settled or self.answers.pool.await_answer(self, timeout)

    def release(self) -> None:
        """No run reads its inputs, and its weights, any more."""
        self.arrays, self.weights = (), NO_WEIGHTS


class Pool(Owner, Protocol):
    """When jobs run, and in which thread: `mcinfer.inline.InlinePool`."""

    def answer(self, job: Job, *, wait: bool = True) -> bool: ...
    def await_answer(self, job: Job, timeout: float | None) -> bool: ...
    def enter(self, job: Job, *, wait: bool) -> None: ...
    def is_quick(self) -> bool: ...


class InlineAnswers(InputReader):
    """Answers the calls of one model in this process; see `mcinfer.requests.planner.Planner`.

    Attributes:
        pool: Runs the jobs.
        weights: The replaceable weights of the model.
    """

    def __init__(
        self, pool: Pool, model: ModelSpec, built: BuildFinish, max_rows: int, log: PoolLog
    ) -> None:
        check_whole_bytes((*model.inputs, *model.outputs))
        super().__init__(model, log, max_rows, built.ragged)
        self.pool = pool
        self._copier = Copier(len(os.sched_getaffinity(0)))
        self.weights = WeightStore(specs_of(built.weights), _slots, self._copier)
        self._outputs = tuple(spec.name for spec in model.outputs)
        self._plans: dict[tuple[Any, ...], DirectPlan] = {}

    def answer_call(self, call: Call) -> Arrays:
        """Answer a call; raises as `Planner.answer_call`."""
        job = self._job(call, self.arrays(call.inputs))
        try:
            if not job.settled:
                self.pool.answer(job)
            if job.was_cancelled:
                raise CancelledError
            return job.result()
        finally:
            del job  # the error that this may raise must not hold what holds it

    def submit(self, call: Call, *, wait: bool = True) -> OutcomeFuture[Arrays]:
        """Queue a call; without `wait`, it is of an event loop, which runs by itself what takes no time."""
        # What is cut in pieces may run again as a whole, from copies.
        if not wait and call.pieces == 1 and self.pool.is_quick():
            job = self._job(call, self.arrays(call.inputs))
            if job.settled or self.pool.answer(job, wait=False):
                return OutcomeFuture(job, self.pool)
        copies = self.copies(call.inputs)
        if call.keeps:
            call.inputs = copies
        job = self._job(call, copies)
        if not job.settled:
            if self._max_rows > 1 and call.joins and call.split_state.splits:
                job.join = self._join(job)
            try:
                self.pool.enter(job, wait=wait)
            except BaseException:  # also Ctrl-C
                self.pool.forget(job)
                raise
        return OutcomeFuture(job, self.pool)

    def allocate(
        self, shapes: Mapping[str, Sequence[int]], timeout: float, place: object = None
    ) -> Arrays:
        """Arrays in ordinary memory, which are lent as those in shared memory are."""
        del timeout, place

        def empty(spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[Any]:
            lease = Lease()
            lease.frame = make_frame(_slots([prod(shape) * spec.dtype.itemsize])[0])
            lease.__array_interface__ = lease.frame.interface
            memory: Any = np.asarray(cast("Any", lease))
            return np.ndarray(shape, spec.dtype, memory)

        return self.empty_inputs(shapes, empty)

    def close(self) -> None:
        """End the threads that copy, and free replaced weights."""
        self._copier.close()
        self.weights.close()

    def _input(self, value: Any, spec: TensorSpec, element_type: str) -> Any:
        array = super()._input(value, spec, element_type)
        return array if array.dtype.isnative else array.astype(spec.dtype)

    def _job(self, call: Call, arrays: list[Any]) -> Job:
        state = None if call.apart else call.split_state
        pieces = call.pieces if call.split_state.split.settled else 1
        shapes = tuple(map(_shape, arrays))
        key = (shapes, pieces, 0 if state is None else state.number)
        plan = self._plans.get(key) or self._new_plan(key, shapes, pieces, state)
        call.rows = plan.cut.rows
        job = Job(self, call, arrays, plan)
        if not plan.cut.rows:  # needs no run
            outputs = zip(self._model.outputs, plan.cut.outputs, strict=True)
            value = {spec.name: np.empty(o.shape or (), spec.dtype) for spec, o in outputs}
            job.set(pick(value, call.outputs))
        return job

    def _new_plan(
        self, key: Any, shapes: tuple[Any, ...], pieces: int, state: SplitState | None
    ) -> DirectPlan:
        split = None if state is None else state.split
        cut = sharding.cut_batch(self._model, shapes, pieces, split)
        known = [
            (spec, join.shape)
            for spec, join in zip(self._model.outputs, cut.outputs, strict=True)
            if join.shape is not None
        ]
        sizes = [(s, shape) for s, shape in zip(self._model.inputs, shapes, strict=True)] + known
        apart = ""
        if self._max_rows > 1:
            apart = self._why_apart(cut, is_checked=split is not None and split.checked)
        size = sum(prod(shape) * spec.dtype.itemsize for spec, shape in sizes)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        plan = self._plans[key] = DirectPlan(cut, size, apart, self._alike(shapes, cut))
        return plan

    def _join(self, job: Job) -> tuple[Any, int] | None:
        if job.plan.apart:
            self._note_apart(job.plan.apart)
            return None
        key = self._join_key(job.arrays, job.plan.cut, job.plan.alike, job.weights.number)
        return None if key is None else (key, job.plan.cut.rows[0])

    # Runs.

    def compute(self, engine: Engine, jobs: Sequence[Job]) -> list[Arrays]:
        """The answers of one run, whose jobs may be joined, or of one for each piece of a job."""
        job = jobs[0]
        weights = _buffers(job.weights) if job.weights.number else ()
        if len(jobs) > 1:
            return self._compute_joined(engine, jobs, weights)
        if len(job.plan.cut.rows) == 1:
            return [dict(zip(self._outputs, engine.compute(job.arrays, weights), strict=False))]
        cut, found = job.plan.cut, []
        parts = [
            split_rows(
                array, part.axis, [0 if part.axis is None else s[part.axis] for s in part.shapes]
            )
            for array, part in zip(job.arrays, cut.inputs, strict=True)
        ]
        for shard in zip(*parts, strict=True):
            if job.settled:
                raise RunCancelledError("no caller waits for it any more")
            found.append(engine.compute(shard, weights))
        names = [f"run {i}" for i in range(len(found))]
        try:
            rows = zip(self._model.outputs, cut.outputs, zip(*found, strict=True), strict=True)
            return [{spec.name: join_parts(spec, o, shards, names) for spec, o, shards in rows}]
        except JoinError as exc:
            job.call.splitter.withdraw(str(exc))
            raise

    def _compute_joined(
        self, engine: Engine, jobs: Sequence[Job], weights: Sequence[Buffer]
    ) -> list[Arrays]:
        cut = jobs[0].plan.cut
        inputs = [
            job_arrays[0] if axis is None else np.concatenate(job_arrays, axis)
            for axis, *job_arrays in zip(cut.input_axes, *(j.arrays for j in jobs), strict=True)
        ]
        values = engine.compute(inputs, weights)
        answers: list[Arrays] = [{} for _ in jobs]
        for i, (name, value) in enumerate(zip(self._outputs, values, strict=True)):
            axis, start = cut.outputs[i].axis or 0, 0
            for answer, job in zip(answers, jobs, strict=True):
                shape = job.plan.cut.outputs[i].shape or ()
                stop = start + shape[axis]
                part = value[(slice(None),) * axis + (slice(start, stop),)]
                if part.shape != shape:
                    job.plan.apart = f"output {name!r} has another shape than the model declares"
                    raise PredictError(job.plan.apart)
                answer[name] = part.copy()
                start = stop
        return answers


def _slots(sizes: Sequence[int], timeout: float = 0.0) -> list[Slot]:
    """Pieces of ordinary memory; there is no waiting for it."""
    del timeout
    slots = []
    for size in sizes:
        memory = np.empty(size + ALIGNMENT, np.uint8)
        start = -memory.__array_interface__["data"][0] % ALIGNMENT
        memory = memory[start : start + size]
        slots.append(Slot(0, 0, size, memory.__array_interface__["data"][0], memory))
    return slots


def _buffers(version: WeightVersion) -> list[Buffer]:
    """Replaced weights where a run reads them; the version holds their memory."""
    return [
        Buffer(
            name=name,
            element_type=reference[1],
            shape=reference[2],
            address=version.slots[name].address,
            size=version.slots[name].size,
        )
        for name, reference in version.tensors.items()
    ]
