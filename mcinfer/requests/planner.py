"""From a user's call to a request: checks, layout and encoding happen once for each set of shapes.

::

    Call ── its inputs' shapes ──► plan (one look-up) ──► two frames: memory for inputs, and for outputs
         ── copied in (rows a to b of a shard are an offset) ──► Request ──► the queue (the loop)

There is one algorithm, wherever tensors lie. A *place* gives memory, views and copies: the host's arena here,
that of a device by the `Place` which the queue opens for it. Inputs that workers can read where they lie have
no part in a frame.

Plans keep unused frames. So steady traffic reuses memory that is warm in every process, and references that
are encoded and bound in the workers. Idle frames are limited in number and bytes, and freed when memory is
short (`IdleFrames.release`). Any thread may call a planner: each access to shared state is one step of
the interpreter.
"""

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from math import prod
from operator import attrgetter
from time import monotonic
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mcinfer import sharding
from mcinfer.config import Device, Limits
from mcinfer.errors import QueueFullError, is_refusal
from mcinfer.logs import PoolLog
from mcinfer.protocol import TensorRef, encode_references, part_of_joined
from mcinfer.requests.forks import forks
from mcinfer.requests.frames import (
    Frame,
    IdleFrames,
    Lease,
    Plan,
    Side,
    Ticket,
    is_leased,
    make_frame,
)
from mcinfer.requests.inputs import InputReader
from mcinfer.requests.request import Call, OutcomeFuture, Owner, Request
from mcinfer.requests.splitting import SplitState
from mcinfer.requests.tensors import (
    LARGE_BYTES,
    Arrays,
    Copier,
    Layout,
    copy_in,
    lay_input,
    lay_output,
    string_rows,
)
from mcinfer.requests.weights import WeightStore
from mcinfer.shm.arena import Arena, SharedBlock, Slot, align
from mcinfer.specs import STRING, ModelSpec, TensorSpec, check_whole_bytes
from mcinfer.statistics import CardStatistics

__tracebackhide__ = is_refusal

_shape = attrgetter("shape")

Allocate = Callable[[Sequence[int], float], list[Slot]]
"""Gets slots of so many bytes, within so many seconds: from the loop, which owns the memory."""

Spot = tuple[int, int]
"""Block and offset."""

Texts = tuple[str | bytes, ...]

_MAX_PLANS = 256

_MAX_PLAN_BYTES = 32 << 20  # estimated, for all plans and their idle frames
_REFERENCE_BYTES = 600  # estimate for one tensor of one shard, in a plan or in a frame

_MAX_IDLE_FRAMES = 64
_MAX_IDLE_BYTES = 64 << 20
_MAX_IDLE_REFERENCES = 512
"""Limits of one plan, each for inputs and for outputs; one frame of any size is always kept."""


class Place(Protocol):
    """The memory of a device, for inputs that lie there and outputs that stay there; any thread may call it.

    `mcinfer.cards.tensors.CardMemory` says what its methods do. The arena, and whether every worker reaches
    that memory, are the loop's. An input that lies there has the `shape` and `nbytes` of an array, its place
    as `base`, and `on_host`, which gives a copy as a NumPy array.
    """

    arena: Arena
    is_reached: bool

    def read(self, value: Any, spec: TensorSpec) -> Any: ...
    def empty(self, spec: TensorSpec, shape: tuple[int, ...], timeout: float) -> Any: ...
    def bring(
        self, arrays: list[Any], plan: Plan, call: Call, timeout: float
    ) -> tuple["dict[int, Spot]", Lease | None]: ...
    def request(self, *given: Any) -> Request: ...
    def upload(self, specs: Sequence[TensorSpec], arrays: Arrays, timeout: float) -> Arrays: ...
    def statistics(self) -> CardStatistics: ...
    def release(self) -> None: ...


class Inbox(Owner, Protocol):
    """The part of `mcinfer.runtime.inbox.Inbox` that requests need; the last two methods are for places."""

    def may_wait(self) -> bool: ...
    def enter(self, request: Request, *, wait: bool) -> None: ...
    def await_answer(self, request: Request) -> None: ...
    def place(self, device: Device) -> Place: ...
    def allocate(
        self, sizes: Sequence[int], timeout: float, arena: Arena, block: SharedBlock | None
    ) -> list[Slot]: ...
    def repeat(self, call: Callable[[], bool]) -> None: ...


OpenPlace = Callable[[Device, int | None, Inbox, Callable[[int], None], Iterator[int]], Place]
"""Opens a device's memory for the tensors of one pool.

It gets the device, the most bytes of all blocks (None is half of what is free), the queue, what is to be
called in the loop with the number of each block that was closed, and the numbers of new blocks.
"""


class HostPlace:
    """The host's shared memory as a place: frames for requests, and arrays of users. Any thread may call it.

    Args:
        arena: The memory, which the loop owns.
        allocate: Gets slots of it.
        idle: What finds the frames that are not in use.
    """

    def __init__(self, arena: Arena, allocate: Allocate, idle: IdleFrames) -> None:
        self.allocate = allocate
        self.idle = idle
        self._arena = arena
        self._forks = forks()

    def find(self, array: NDArray[Any]) -> Spot | None:
        """Where an array lies in this memory, if workers can read it there."""
        flags = array.flags
        if not (is_leased(array) and flags.c_contiguous and flags.aligned and array.dtype.isnative):
            return None
        return self._arena.find(array.__array_interface__["data"][0], array.nbytes)

    def empty(self, spec: TensorSpec, shape: tuple[int, ...], timeout: float) -> NDArray[Any]:
        """An array of undefined content, in memory that workers read in place."""
        (slot,) = self.allocate([prod(shape) * spec.dtype.itemsize], timeout)
        frame = make_frame(slot)
        self._forks.add(frame)
        memory = np.asarray(cast("Any", lease(frame, deque(maxlen=0))))
        return np.ndarray(shape, spec.dtype, memory)

    def lease(
        self, plan: Plan, timeout: float, *, with_outputs: bool = True
    ) -> tuple[Lease | None, Lease | None]:
        """Frames for the inputs, if they need one, and for the outputs, if any has a known shape."""
        inputs, outputs = plan.inputs, plan.outputs
        reads = writes = None
        for_reads, for_writes = inputs.is_laid, outputs.is_laid and with_outputs
        if not self._arena.wanted:  # not past those who wait for memory
            try:
                if for_reads:
                    reads = inputs.idle.pop().frame
            except IndexError:
                pass
            try:
                if for_writes:
                    writes = outputs.idle.pop().frame
            except IndexError:
                pass
        if writes is not None and self._forks.held:  # after it was taken: so it was before the fork
            writes = None
        while (for_reads and reads is None) or (for_writes and writes is None):
            new_reads, new_writes = for_reads and reads is None, for_writes and writes is None
            sizes = [inputs.size] * new_reads + [outputs.size] * new_writes
            in_hand = reads is not None or writes is not None
            try:
                slots = self.allocate(sizes, 0.0 if in_hand else timeout)
            except QueueFullError:
                if timeout <= 0 or not in_hand:
                    raise
                # Not with one in hand: two requests that each held one would wait for each other.
                reads = writes = None
                continue
            if new_reads:
                reads = _input_frame(plan, slots[0])
            if new_writes:
                writes = output_frame(plan, slots[-1])
                self._forks.add(writes, outputs.idle)
        return (
            None if reads is None else lease(reads, inputs.idle),
            None if writes is None else lease(writes, outputs.idle),
        )


class Planner(InputReader):
    """Checks and lays out requests for one model, queues them, and waits for their answers.

    Attributes:
        place: The host's memory.
        weights: The replaceable weights of the model.

    Raises:
        BuildError: An input or output has elements of less than a byte; names it.
    """

    def __init__(
        self,
        model: ModelSpec,
        place: HostPlace,
        queue: Inbox,
        *,
        limits: Limits = Limits(),
        max_rows: int = 1,
        weights: Sequence[TensorSpec] = (),
        ragged: str = "",
        log: PoolLog,
    ) -> None:
        check_whole_bytes((*model.inputs, *model.outputs))
        super().__init__(model, log, max_rows, ragged)
        self.place = place
        self._queue = queue
        self._limits = limits
        self._copier = Copier(len(os.sched_getaffinity(0)))
        self.weights = WeightStore(weights, place.allocate, self._copier)
        self._has_strings = any(spec.element_type == STRING for spec in model.inputs)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        """By shapes, pieces, the number of what is known of the split, how many outputs are opened, and the
        numbers of inputs that lie elsewhere."""
        self._opened: set[str] = set()
        """Outputs that had another shape than the model declares: they are not laid out before the run."""

    # A call.

    def answer_call(self, call: Call) -> Arrays:
        """Answer a call.

        Raises:
            CancelledError: What `call.offer` got was called.
            McinferError: As `Master.predict`.
        """
        request: Request | None = None
        try:
            request = self._begin(call, may_wait=True)
            self._queue.enter(request, wait=False)
            if call.offer is not None:
                call.offer(partial(self._queue.cancel, request))
            self._queue.await_answer(request)
            if request.was_cancelled:
                raise CancelledError
            answer = request.result()
            request.let_go()  # a trace hook may still have to hear of it
            return answer
        except BaseException:
            # Ctrl-C while waiting: the workers need not go on.
            if request is not None and not request.settled:
                self._queue.forget(request)
            raise
        finally:
            del request  # the error that this may raise must not hold what holds it

    def submit(self, call: Call, *, wait: bool = True) -> OutcomeFuture[Arrays]:
        """Queue a call; without `wait`, raise `QueueFullError` where it would wait for room."""
        request = self._begin(call, may_wait=self._queue.may_wait(), wait=wait)
        future = OutcomeFuture(request, self._queue)
        if call.keeps and call.may_be_rescued:
            call.inputs = self.copies(call.inputs, request.taken)
        try:
            if not request.settled:  # a batch of no rows is answered already
                self._queue.enter(request, wait=wait)
            return future
        finally:
            del request, future  # the error of one that is refused has this in its traceback

    def _begin(self, call: Call, *, may_wait: bool, wait: bool = True) -> Request:
        """The request of a call, with its inputs where workers can read them."""
        limits = self._limits
        patience = 0.0
        if wait and may_wait and limits.when_full == "wait":
            patience = max(0.0, call.start + call.timeout - monotonic())
        request = self.request(call, patience)
        request.waits = may_wait and limits.when_queue_full == "wait"
        call.rows = request.rows
        return request

    def request(self, call: Call, timeout: float) -> Request:
        """Check a call, cut it, and bring its inputs to where workers can read them.

        Inputs on a device that are cut along an inner axis go through the host, and so do outputs for a
        device that are joined by copying, or whose shapes are not known before the run. `timeout` seconds are
        there to wait for memory.

        Raises:
            InvalidInputError: It does not fit the model; names the input.
            MemoryFullError: No shared memory was free in time.
            PredictTimeoutError: What is queued on a device before a tensor that goes through the host took
                too long.
        """
        arrays = self.arrays(call.inputs)
        pieces = call.pieces if call.split_state.split.settled else 1
        target: Place | None = call.outputs_on
        on_device = target
        found: dict[int, Spot] = {}
        for i, array in enumerate(arrays):
            if array.base is None:
                continue
            if type(array) is not np.ndarray:
                on_device = array.base
            elif (spot := self.place.find(array)) is not None:
                found[i] = spot
        state = None if call.apart else call.split_state
        shapes = tuple(map(_shape, arrays))
        version = 0 if state is None else state.number
        key: tuple[Any, ...] = (shapes, pieces, version, len(self._opened))
        plan = self._plans.get(key) or self._new_plan(key, shapes, pieces, state)
        make: Callable[..., Request] = Request if target is None else target.request
        if not plan.cut.rows:
            request = make(plan, call, (), (), None, frozenset())
            request.preset()
            return request
        outputs: Lease | None = None
        if found or on_device is not None:
            layouts = plan.inputs.layouts
            found = {i: at for i, at in found.items() if (lay := layouts[i]) and lay.contiguous}
            if on_device is not None:
                end = monotonic() + timeout
                brought, outputs = on_device.bring(arrays, plan, call, timeout)
                found |= brought
                timeout = max(0.0, end - monotonic())
            if found:
                key = (*key, *sorted(found))
                plan = self._plans.get(key) or self._new_plan(key, shapes, pieces, state, found)
            if target is not None:  # its value is never just a view for NumPy
                plan = replace(plan, simple_outputs=None, answers=None)
        join = None
        if call.joins and on_device is None and state is not None and state.splits:
            join = self._join(arrays, plan, call.weights)
        held, written = self.place.lease(plan, timeout, with_outputs=outputs is None)
        outputs = outputs or written
        try:
            if plan.inputs.is_simple and held is not None:
                frame = held.ticket.frame
                for view, raw, array in zip(frame.views, frame.raw, arrays, strict=True):
                    if raw and array.flags.c_contiguous and array.dtype is view.dtype:
                        raw[:] = array.data.cast("B")
                    elif view.nbytes < LARGE_BYTES:
                        np.copyto(view, array, "equiv")
                    else:
                        self._copier.copy(view, array)
                keep: Sequence[object] = (held,)
                bodies: Sequence[bytes] = frame.bodies
                blocks = frame.blocks
            else:
                keep, bodies, blocks = self._place(arrays, plan, found, held)
        except BaseException:
            if held is not None:
                # The copier's threads may still write to this frame: it goes with their views.
                del held.ticket
            raise
        if outputs is not None:
            theirs = outputs.ticket.frame.blocks
            blocks = blocks if theirs <= blocks else blocks | theirs
        request = make(plan, call, keep, bodies, outputs, blocks)
        if self._has_strings:
            request.size += sum(map(len, bodies))  # they travel in these
        if on_device is not None:
            sizes = [arrays[i].nbytes for i in found if type(arrays[i]) is not np.ndarray]
            request.size += sum(sizes)
        request.join = join
        return request

    def close(self) -> None:
        """End the threads that copy, and free replaced weights and idle frames."""
        self._copier.close()
        self.weights.close()
        for key in [*self._plans]:
            self._forget(key)

    def _forget(self, key: tuple[Any, ...]) -> None:
        """Forget a plan, and free its idle frames; only `IdleFrames` finds those that come back later."""
        plan = self._plans.pop(key, None)
        if plan is not None:
            plan.inputs.idle.clear()
            plan.outputs.idle.clear()

    def allocate(
        self, shapes: Mapping[str, Sequence[int]], timeout: float, place: Place | None = None
    ) -> Arrays:
        """Arrays in shared memory, or in another place."""
        where = place or self.place
        return self.empty_inputs(shapes, lambda spec, shape: where.empty(spec, shape, timeout))

    def read_on(self, device: Device, value: Any, spec: TensorSpec) -> Any:
        return self._queue.place(device).read(value, spec)

    # Plans.

    def _new_plan(
        self,
        key: tuple[Any, ...],
        shapes: tuple[tuple[int, ...], ...],
        pieces: int,
        state: SplitState | None,
        found: Collection[int] = (),
    ) -> Plan:
        """Lay out a request; `found` inputs lie elsewhere, and have no place in a frame."""
        cut, apart, alike = self._cut(shapes, pieces, state)
        inputs = tuple(
            lay_input(spec, shape, part)
            for spec, shape, part in zip(self._model.inputs, shapes, cut.inputs, strict=True)
        )
        outputs = tuple(
            None if spec.name in self._opened else lay_output(spec, join)
            for spec, join in zip(self._model.outputs, cut.outputs, strict=True)
        )
        laid = [None if i in found else layout for i, layout in enumerate(inputs)]
        shards = len(cut.rows)
        reads, writes = self._side(inputs, laid, shards), self._side(outputs, outputs, shards)
        frames = 1 + (reads.idle.maxlen or 0) + (writes.idle.maxlen or 0)
        rows = zip(self._model.outputs, cut.outputs, writes.starts, strict=True)
        views = tuple((spec.name, join.shape or (), spec.dtype, at) for spec, join, at in rows)
        plan = Plan(
            model=self._model,
            opened=self._opened,
            cut=cut,
            shapes=shapes,
            inputs=reads,
            outputs=writes,
            size=sum(layout.size for layout in (*laid, *outputs) if layout is not None),
            cost=_REFERENCE_BYTES * frames * max(len(inputs), len(outputs)) * max(1, shards),
            apart=apart,
            alike=alike,
            lays_all=None not in outputs,
            simple_outputs=views if writes.is_simple else None,
            answers={},
        )
        plans = self._plans
        plans[key] = plan
        while len(plans) > 1 and (
            len(plans) > _MAX_PLANS or sum(p.cost for p in [*plans.values()]) > _MAX_PLAN_BYTES
        ):
            self._forget(next(iter([*plans]), ()))
        return plan

    # Frames.

    def _place(
        self,
        arrays: Sequence[NDArray[Any]],
        plan: Plan,
        found: Mapping[int, Spot],
        held: Lease | None,
    ) -> tuple[list[object], Sequence[bytes], frozenset[int]]:
        """The holders of the inputs' memory, their references by shard, and the blocks of these."""
        # What workers read in place is the caller's, and is held until no worker reads it.
        keep = [*(arrays[i] for i in found), *([] if held is None else [held])]
        places: list[Spot | None] = []
        texts: dict[int, Sequence[Texts]] = {}
        side = plan.inputs
        rows = zip(plan.model.inputs, plan.cut.inputs, side.layouts, side.starts, strict=True)
        for i, (spec, cut, layout, start) in enumerate(rows):
            place = found.get(i)
            if layout is None:
                texts[i] = string_rows(arrays[i], cut)
            elif place is None and held is not None:
                slot = held.ticket.frame.slot
                part = memoryview(slot.memory)[start : start + layout.size]
                copy_in(arrays[i], spec, cut, layout, part, self._copier)
                place = slot.block, slot.offset + start
            places.append(place)
        references = _input_references(plan, places, texts)
        blocks = frozenset(place[0] for place in places if place is not None)
        return keep, tuple(map(encode_references, references)), blocks

    # Dynamic batching.

    def _why_apart(self, cut: sharding.Cut, *, is_checked: bool) -> str:
        for spec in self._model.outputs:
            if spec.name in self._opened:
                return f"the shape of output {spec.name!r} is not known before the run"
        apart = super()._why_apart(cut, is_checked=is_checked)
        if not apart and self._part(cut) * self._max_rows > cut.rows[0]:
            apart = "so many tensors of so many requests do not fit one message"
        return apart

    def _part(self, cut: sharding.Cut) -> float:
        """How much of the message of a joined run a request takes."""
        inputs, outputs = (
            tuple((s.name, s.element_type, c.shapes[0] if c.shapes else (), 0, 0) for s, c in rows)
            for rows in (
                zip(self._model.inputs, cut.inputs, strict=True),
                zip(self._model.outputs, cut.outputs, strict=True),
            )
        )
        return part_of_joined(inputs, outputs)

    def _side(
        self, layouts: tuple[Layout | None, ...], laid: Sequence[Layout | None], shards: int
    ) -> Side:
        """The side of a plan with these layouts, of which those in `laid` share a frame."""
        starts, size = [], 0
        for layout in laid:
            starts.append(size)
            size += 0 if layout is None else align(layout.size)
        by_references = _MAX_IDLE_REFERENCES // max(len(layouts) * shards, 1)
        most = max(1, min(_MAX_IDLE_FRAMES, _MAX_IDLE_BYTES // max(size, 1), by_references))
        is_laid = any(layout is not None for layout in laid)
        is_simple = all(layout is not None and layout.contiguous for layout in laid)
        idle = deque[Ticket](maxlen=most)
        self.place.idle.add(idle)
        return Side(layouts, tuple(starts), size, is_laid, is_simple, idle)


def lease(frame: Frame, idle: "deque[Ticket]") -> Lease:
    """Lease a frame, which goes to `idle` afterwards."""
    held = Lease()
    held.__array_interface__ = frame.interface
    held.ticket = ticket = Ticket(held, idle.append)
    ticket.frame = frame
    return held


def _input_frame(plan: Plan, slot: Slot) -> Frame:
    if not plan.inputs.is_simple:
        return make_frame(slot)
    places = [(slot.block, slot.offset + start) for start in plan.inputs.starts]
    references = _input_references(plan, places, {})
    memory: Any = memoryview(slot.memory)
    rows = zip(plan.model.inputs, plan.shapes, plan.inputs.starts, strict=True)
    views = tuple(np.ndarray(shape, spec.dtype, memory, start) for spec, shape, start in rows)
    return make_frame(slot, references, views)


def output_frame(plan: Plan, slot: Slot) -> Frame:
    """A frame for the outputs, in any place; its references are by shard."""
    shards: list[list[TensorRef]] = [[] for _ in plan.cut.rows]
    side = plan.outputs
    rows = zip(plan.model.outputs, plan.cut.outputs, side.layouts, side.starts, strict=True)
    for spec, join, layout, start in rows:
        if layout is not None and join.shapes is not None:
            places = [slot.offset + start + offset for offset in layout.offsets]
            for references, shape, place in zip(shards, join.shapes, places, strict=True):
                references.append((spec.name, spec.element_type, shape, slot.block, place))
    return make_frame(slot, tuple(map(tuple, shards)))


def _input_references(
    plan: Plan, places: Sequence[Spot | None], texts: Mapping[int, Sequence[Texts]]
) -> tuple[tuple[TensorRef, ...], ...]:
    """By shard; strings have no place and travel in the references."""
    shards: list[list[TensorRef]] = [[] for _ in plan.cut.rows]
    for i, (spec, place) in enumerate(zip(plan.model.inputs, places, strict=True)):
        cut, layout = plan.cut.inputs[i], plan.inputs.layouts[i]
        for shard, references in enumerate(shards):
            shape = cut.shapes[shard]
            if layout is not None and place is not None:
                offset = place[1] + layout.offsets[shard]
                references.append((spec.name, spec.element_type, shape, place[0], offset))
            elif i in texts:
                references.append((spec.name, STRING, shape, None, texts[i][shard]))
    return tuple(map(tuple, shards))
