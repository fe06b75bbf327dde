"""From a user's arrays to tensor references, and from replies back to arrays.

::

    inputs ── check ──► plan (cached by shapes) ──► one slot: rows a to b are an offset ──► Job
    replies ──► Job.take (checked against what was asked for) ──► Job.result: views of the output slots

Ownership: a `Job` holds the memory of its inputs and outputs (slots, or the user's own arrays in shared
memory) until the pool lets it go, which is when no worker can write to it any more. The arrays
that `Job.result` gives hold the output slots from then on. An input that lies in shared memory already is
borrowed: the user must not change it before the answer.
"""

import errno
import os
import reprlib
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcinfer import sharding
from mcinfer.copier import Copier
from mcinfer.errors import InvalidInputError, PredictError, ProtocolError
from mcinfer.fields import TensorRef
from mcinfer.futures import HelpedFuture
from mcinfer.protocol import encode_predict, encode_tensors
from mcinfer.sharding import JoinError, OutputJoin, Plan
from mcinfer.shm.arena import Arena, Slot, align
from mcinfer.shm.block import Block
from mcinfer.specs import ELEMENT_TYPES, STRING, ModelSpec, TensorSpec, tensor_bytes
from mcinfer.splitting import Known
from mcinfer.tensors import (
    Layout,
    as_input,
    copy_in,
    join_parts,
    lay_input,
    lay_output,
    string_rows,
    unpack,
)
from mcinfer.weights import WeightStore, WeightVersion

Arrays = dict[str, NDArray[Any]]
Inputs = Mapping[str, Any] | Sequence[Any]

_MOST_PLANS = 256
_MOST_PLACEMENTS = 256
_MOST_COMMON_BYTES = 4096
"""Of inputs that every row has in common: they are compared by value, so larger ones keep requests apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedPlan:
    """A plan with its memory laid out; the same for all requests of the same shapes."""

    plan: Plan
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    size: int
    placements: dict[object, "_Placement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """A request's tensors at certain places, which steady traffic comes back to.

    Attributes:
        outputs: By shard, where outputs of known shapes are to be written.
        messages: By shard, inputs and outputs as PREDICT carries them.
        blocks: Numbers of the blocks that the references speak of.
    """

    outputs: tuple[tuple[TensorRef, ...], ...]
    messages: tuple[bytes, ...]
    blocks: frozenset[int]


_NO_WEIGHTS = WeightVersion(number=0)

_Part = tuple[NDArray[Any] | TensorRef, Block | None]
"""A shard's part of an output: an array, or where it lies in a block of the worker's."""


class Job:
    """One request on its way.

    Attributes:
        future: What the caller waits on: outputs by name, in the model's order.
        number: The request's number, once it has one.
        shards: How many pieces it is cut in.
        join: What it has in common with those that may go in one run with it, and its rows; None for
            one that goes alone.
        rows: Of each piece; 1 where nothing is cut.
        size: Bytes of its inputs, and of its outputs of known shapes.
        context: Of the call that made it, where that is traced.
        weights: The version of the weights that it runs with.
        contradicted: Called with the reason where its parts do not join, if there is one to call.
    """

    __slots__ = (
        "_answered",
        "_arena",
        "_held",
        "_keep",
        "_model",
        "_opened",
        "_parts",
        "_placement",
        "_released",
        "_slots",
        "_staged",
        "_workers",
        "context",
        "contradicted",
        "future",
        "join",
        "number",
        "rows",
        "shards",
        "size",
        "weights",
    )

    def __init__(
        self,
        model: ModelSpec,
        staged: _StagedPlan,
        arena: Arena,
        placement: _Placement,
        keep: list[object],
        slots: Mapping[str, Slot],
        weights: WeightVersion,
        opened: set[str],
    ) -> None:
        """Made by `Stager.stage` alone, with slots for the outputs whose shapes are known."""
        self.future: HelpedFuture[Arrays] = HelpedFuture()
        self.number = -1
        self.join: tuple[Hashable, int] | None = None
        self.shards = len(placement.messages)
        self.rows = staged.plan.rows
        self.size = staged.size
        self.context: Context | None = None
        self._model = model
        self._staged = staged
        self._arena = arena
        self._placement = placement
        self._keep = keep
        self.weights = weights
        self._slots = slots
        self._opened = opened
        self._workers: dict[int, int] = {}
        self.contradicted: Callable[[str], None] | None = None
        self._parts: dict[tuple[int, str], _Part] = {}
        self._held: deque[Block] = deque()  # of workers, until the answer
        self._answered = False
        self._released = False

    @property
    def blocks(self) -> frozenset[int]:
        """Numbers of the blocks that its references speak of."""
        return self._placement.blocks

    def message(self, shard: int) -> bytes:
        """The PREDICT of a shard, for a worker that has the blocks."""
        tensors = self._placement.messages[shard]
        return encode_predict(self.number, shard, self.weights.number, tensors)

    @property
    def axes(self) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
        """Of a job that may be joined: the batch's axis in each input and output."""
        plan = self._staged.plan
        return plan.input_axes, tuple(join.axis or 0 for join in plan.outputs)

    def tensors(self, shard: int) -> bytes:
        """The shard's tensors, as messages carry them."""
        return self._placement.messages[shard]

    def take(
        self,
        shard: int,
        outputs: Sequence[TensorRef],
        fetch: Callable[[int], Block],
        worker: int,
    ) -> None:
        """Check a reply's references, and get what lies in the worker's own blocks.

        Args:
            shard: Which shard was answered.
            outputs: The reply's references; none, where all are where they were asked for.
            fetch: Gets a block of the worker's by its number; what it raises comes through.
            worker: The index of the one that has sent it.

        Raises:
            ProtocolError: They are not what was asked for.
            OSError: They cannot be had, which the worker cannot help: more bytes than the shared memory
                may have (EFBIG), or this process has no memory or descriptor left. The job is as before.
        """
        self._workers[shard] = worker
        asked = self._placement.outputs[shard]
        if len(asked) == len(self._model.outputs) and (not outputs or outputs == asked):
            return
        expected = {reference[0]: reference for reference in asked}
        if [reference[0] for reference in outputs] != [spec.name for spec in self._model.outputs]:
            raise ProtocolError(
                f"reply with outputs {reprlib.repr([ref[0] for ref in outputs])}, expected "
                f"{[spec.name for spec in self._model.outputs]}"
            )
        parts: dict[tuple[int, str], _Part] = {}
        blocks: dict[int, Block] = {}
        opened: list[str] = []
        left = self._arena.limit
        try:
            for spec, reference in zip(self._model.outputs, outputs, strict=True):
                name, element_type, shape = reference[:3]
                if element_type != spec.element_type:
                    raise ProtocolError(f"reply with {reprlib.repr(reference)}, expected {spec}")
                place = expected.get(name)
                if place == reference:
                    continue
                if place is not None:
                    if place[2] == shape:
                        raise ProtocolError(
                            f"reply with {reprlib.repr(reference)}, expected {reprlib.repr(place)}"
                        )
                    opened.append(name)  # its shape is another one than the model declares
                size = tensor_bytes(spec.element_type, prod(shape))
                parts[shard, name] = _find(spec, reference, size, left, blocks, fetch)
                left -= size
        except BaseException:
            while blocks:  # the exception's traceback would hold the mappings of what is left here
                blocks.popitem()[1].close()
            raise
        self._opened.update(opened)
        self._parts.update(parts)
        self._held.extend(blocks.values())
        if self._answered:
            self._close_held()  # it was given up, and the worker has answered all the same

    def answered(self) -> None:
        """Nobody asks for `result` any more."""
        self._answered = True
        self._close_held()
        self._forget()

    def released(self) -> None:
        """No worker can write to its memory any more."""
        self._released = True
        self._forget()

    def _close_held(self) -> None:
        while self._held:
            with suppress(IndexError):  # another thread was faster
                self._held.popleft().close()

    def _forget(self) -> None:
        """Let go of all memory: an error that the user keeps may hold this job by its traceback."""
        if self._answered and self._released:
            self._keep, self._slots, self._parts = [], {}, {}
            self.weights = _NO_WEIGHTS

    def result(self) -> Arrays:
        """The outputs by name, once every shard was taken.

        Raises:
            PredictError: The shards' parts do not join, an output without a batch dimension
                differs between them, or there is no memory for a copy of what a worker made.
        """
        outputs: Arrays = {}
        crowded = self._arena.crowded
        try:
            for spec, join, layout in zip(
                self._model.outputs, self._staged.plan.outputs, self._staged.outputs, strict=True
            ):
                slot = self._slots.get(spec.name)
                elsewhere = self._parts and any(
                    (shard, spec.name) in self._parts for shard in range(self.shards)
                )
                if slot is None or layout is None or elsewhere or not layout.contiguous:
                    parts = [self._part(shard, spec, join, layout) for shard in range(self.shards)]
                    workers = [f"worker {self._workers[shard]}" for shard in range(self.shards)]
                    array = join_parts(spec, join, parts, workers)
                else:
                    array = unpack(memoryview(slot.memory), spec, join.shape or ())
                # Results that a user collects must not take the memory that requests need.
                outputs[spec.name] = array.copy() if slot is not None and crowded else array
        except JoinError as exc:
            if self.contradicted is not None:
                self.contradicted(str(exc))
            raise
        return outputs

    def _part(
        self, shard: int, spec: TensorSpec, join: OutputJoin, layout: Layout | None
    ) -> NDArray[Any]:
        """What a shard gave of an output."""
        part = self._parts.get((shard, spec.name))
        if part is not None:
            return _copy(spec, part)
        if layout is None or join.shapes is None:
            raise PredictError(
                f"output {spec.name!r} did not come from worker {self._workers[shard]}"
            )
        memory = memoryview(self._slots[spec.name].memory)
        return unpack(memory[layout.offsets[shard] :], spec, join.shapes[shard])


def _find(
    spec: TensorSpec,
    reference: TensorRef,
    size: int,
    most: int,
    blocks: dict[int, Block],
    fetch: Callable[[int], Block],
) -> _Part:
    """What lies in a reply, or where it lies in a block of the worker's, which is fetched once."""
    number, place = reference[3:]
    if size == 0:
        array = np.empty(len(place) if spec.element_type == STRING else 0, spec.dtype)
        array[:] = place if spec.element_type == STRING else ()
        return _shaped(array, reference), None
    if number is None or number >= 0:
        raise ProtocolError(f"reply with {spec.name!r} in a block that is not the worker's own")
    if number not in blocks:
        blocks[number] = fetch(number)
    # By its number, not a name of this frame, which an exception's traceback would hold.
    if place + size > blocks[number].size:
        raise ProtocolError(f"reply with {reprlib.repr(reference)} past its block's end")
    if size > most:
        # The copy is this process's own memory: a worker must not say how much of it.
        raise OSError(
            errno.EFBIG,
            f"output {spec.name!r} has {size} bytes, expected at most {most} of outputs whose shapes "
            "are not known before the run (Limits.memory_bytes)",
        )
    if place + size > (written := blocks[number].written):
        # Nor may it say so where it has none itself, in the holes of a file.
        raise ProtocolError(
            f"reply with {reprlib.repr(reference)} in a block of which {written} bytes were written"
        )
    return reference, blocks[number]


def _copy(spec: TensorSpec, part: _Part) -> NDArray[Any]:
    """A part of an output, as an array that no worker can change.

    A copy, since a mapping kept for each result would keep a descriptor for each.
    """
    what, block = part
    if block is None:
        return cast("NDArray[Any]", what)
    reference = cast("TensorRef", what)
    shape = reference[2]
    try:
        copy = np.empty(tensor_bytes(spec.element_type, prod(shape)), np.uint8)
        block.read_into(copy.data, reference[4])
    except (OSError, MemoryError) as exc:
        raise PredictError(f"output {spec.name!r} cannot be taken from its worker: {exc}") from exc
    return _shaped(unpack(copy.data, spec, (prod(shape),)), reference)


def _shaped(array: NDArray[Any], reference: TensorRef) -> NDArray[Any]:
    """The array in the shape that a reply says.

    Raises:
        ProtocolError: No array can have it: too many dimensions, or sizes too large beside one of 0.
    """
    try:
        return array.reshape(reference[2])
    except ValueError as exc:
        raise ProtocolError(f"reply with {reprlib.repr(reference)}: {exc}") from exc


class Stager:
    """Checks and stages requests for one model. Any thread may call it.

    Attributes:
        weights: Those of the model that can be replaced.
        apart: Why requests could not go in one run with others; empty as long as none could not.
    """

    def __init__(
        self,
        model: ModelSpec,
        arena: Arena,
        max_rows: int = 1,
        weights: Sequence[TensorSpec] = (),
    ) -> None:
        """Take what the model is like, and where tensors are to lie; the arena stays the caller's.

        Args:
            model: Its inputs and outputs.
            arena: For the tensors.
            max_rows: Of a run that requests may be joined to.
            weights: Those that can be replaced.
        """
        self._max_rows = max_rows
        self._model = model
        self._arena = arena
        self._copier = Copier(len(os.sched_getaffinity(0)))
        self.weights = WeightStore(weights, arena, self._copier)
        self._specs = (*model.inputs, *model.outputs)
        self._names = tuple(spec.name for spec in model.inputs)
        self._has_strings = any(spec.element_type == STRING for spec in model.inputs)
        self._types = tuple((spec, spec.element_type) for spec in model.inputs)
        self._plans: OrderedDict[object, _StagedPlan] = OrderedDict()
        self.apart = ""
        self._opened: set[str] = set()
        """Outputs that had another shape than the model declares: they are not laid out before the run."""

    def stage(
        self,
        inputs: Inputs,
        pieces: int,
        known: Known | None,
        timeout: float,
        *,
        joinable: bool = False,
    ) -> Job:
        """Check a request, cut it, and bring its inputs into shared memory.

        Args:
            inputs: By name, or in the model's order.
            pieces: Into how many shards to cut it at most.
            known: How; None is whole.
            timeout: Seconds to wait for memory.
            joinable: Whether it may go in one run with others, if it is of one shard.

        Raises:
            InvalidInputError: It does not fit the model; names the input.
            QueueFullError: No shared memory was free in time.
        """
        weights = self.weights.current
        arrays = self.arrays(inputs)
        staged = self._plan(arrays, pieces, known)
        if not staged.plan.rows:
            nowhere = _Placement(outputs=(), messages=(), blocks=frozenset())
            job = Job(self._model, staged, self._arena, nowhere, [], {}, weights, self._opened)
            empty = zip(self._model.outputs, staged.plan.outputs, strict=True)
            job.future.set_result({s.name: np.empty(j.shape or (), s.dtype) for s, j in empty})
            return job
        places = [
            None if layout is None else self._find(array, layout)
            for array, layout in zip(arrays, staged.inputs, strict=True)
        ]
        copied = [
            layout
            for layout, place in zip(staged.inputs, places, strict=True)
            if layout is not None and place is None
        ]
        laid_out = {
            spec.name: layout
            for spec, layout in zip(self._model.outputs, staged.outputs, strict=True)
            if layout is not None
        }
        sizes = [layout.size for layout in laid_out.values()]
        if copied:
            sizes.append(sum(align(layout.size) for layout in copied))
        slots = self._arena.allocate_all(sizes, timeout)
        # What lies in shared memory already is the caller's, and is held until nobody reads it.
        keep: list[object] = [
            a for a, place in zip(arrays, places, strict=True) if place is not None
        ]
        if copied:
            keep.append(slots[-1])
            self._copy(arrays, staged, slots[-1], places)
        outputs = dict(zip(laid_out, slots, strict=False))
        placement = self._place(arrays, staged, places, outputs)
        job = Job(self._model, staged, self._arena, placement, keep, outputs, weights, self._opened)
        if self._has_strings:
            job.size += sum(map(len, placement.messages))  # they travel in these
        if joinable and self._max_rows > 1:
            job.join = self._join(arrays, staged, weights)
        return job

    def close(self) -> None:
        """End the threads that copy, and let go of replaced weights."""
        self._copier.close()
        self.weights.close()

    def allocate(self, shapes: Mapping[str, Sequence[int]]) -> Arrays:
        """Arrays in shared memory for inputs of these shapes; see `Master.allocate`."""
        specs = {spec.name: spec for spec in self._model.inputs}
        arrays: Arrays = {}
        for name, given in shapes.items():
            if name not in specs:
                raise InvalidInputError(
                    f"shapes: unknown input {name!r}, expected some of {[*specs]}"
                )
            spec = specs[name]
            try:
                shape = tuple(index(size) for size in given)
            except TypeError as exc:
                raise InvalidInputError(
                    f"shapes: got {given!r} for {name!r}, expected {spec}"
                ) from exc
            bits = ELEMENT_TYPES[spec.element_type].bits
            if bits % 8 or not bits:
                raise InvalidInputError(
                    f"shapes: input {spec} cannot lie in shared memory as an array"
                )
            if (spec.shape and len(shape) != len(spec.shape)) or min(shape, default=0) < 0:
                raise InvalidInputError(f"shapes: got {list(shape)} for {name!r}, expected {spec}")
            slot = self._arena.allocate(prod(shape) * spec.dtype.itemsize)
            arrays[name] = np.ndarray(shape, spec.dtype, memoryview(slot.memory))
        return arrays

    def arrays(self, inputs: Inputs) -> list[NDArray[Any]]:
        """The inputs of a request as arrays of the model's types, in its order; shapes are not looked at.

        Raises:
            InvalidInputError: One is missing, unknown or of another type; names it.
        """
        if isinstance(inputs, Mapping):
            if inputs.keys() != set(self._names):
                unknown = [name for name in inputs if name not in self._names]
                missing = [name for name in self._names if name not in inputs]
                raise InvalidInputError(
                    f"inputs: {f'unknown {unknown}, ' if unknown else ''}"
                    f"{f'missing {missing}, ' if missing else ''}expected {[*self._names]}"
                )
            values = [inputs[name] for name in self._names]
        elif isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
            if len(inputs) != len(self._names):
                raise InvalidInputError(
                    f"inputs: got {len(inputs)}, expected {len(self._names)}: {[*self._names]}"
                )
            values = [*inputs]
        else:
            raise InvalidInputError(
                f"inputs: got {type(inputs).__name__}, expected a mapping by name or a sequence of "
                f"{[*self._names]}"
            )
        return [as_input(v, s, t) for v, (s, t) in zip(values, self._types, strict=True)]

    def _plan(
        self, arrays: Sequence[NDArray[Any]], pieces: int, known: Known | None
    ) -> _StagedPlan:
        shapes = tuple(array.shape for array in arrays)
        key = (shapes, pieces, 0 if known is None else known.number, len(self._opened))
        staged = self._plans.get(key)
        if staged is None:
            split = None if known is None else known.split
            plan = sharding.plan(self._model, shapes, pieces, split)
            inputs = tuple(
                lay_input(spec, shape, cut)
                for spec, shape, cut in zip(self._model.inputs, shapes, plan.inputs, strict=True)
            )
            outputs = tuple(
                None if spec.name in self._opened else lay_output(spec, join)
                for spec, join in zip(self._model.outputs, plan.outputs, strict=True)
            )
            staged = _StagedPlan(
                plan=plan,
                inputs=inputs,
                outputs=outputs,
                size=sum(layout.size for layout in (*inputs, *outputs) if layout is not None),
                placements={},
            )
            self._plans[key] = staged
            if len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        return staged

    def _join(
        self, arrays: Sequence[NDArray[Any]], staged: _StagedPlan, weights: WeightVersion
    ) -> tuple[Hashable, int] | None:
        """The key of requests that one run can answer together, and this one's rows.

        They agree in all sizes but the batch's, in the values of what all rows have in common, and in the
        version of the weights.
        """
        plan = staged.plan
        opened = [s.name for s in self._model.outputs if s.name in self._opened]
        why = sharding.why_apart(self._model, plan)
        if opened:
            why = f"the shape of output {opened[0]!r} is not known before the run"
        if why:
            self.apart = self.apart or why
            return None
        if plan.rows[0] >= self._max_rows:
            return None
        common = [a for a, cut in zip(arrays, plan.inputs, strict=True) if cut.axis is None]
        if sum(array.nbytes for array in common) > _MOST_COMMON_BYTES:
            return None
        sizes = tuple(
            shape if axis is None else (*shape[:axis], -1, *shape[axis + 1 :])
            for shape, axis in zip((a.shape for a in arrays), plan.input_axes, strict=True)
        )
        values = tuple(array.astype(array.dtype.newbyteorder("=")).tobytes() for array in common)
        return (sizes, plan.input_axes, values, weights.number), plan.rows[0]

    def _copy(
        self,
        arrays: Sequence[NDArray[Any]],
        staged: _StagedPlan,
        slot: Slot,
        places: list[tuple[int, int] | None],
    ) -> None:
        """Copy the inputs that have no place in shared memory into the slot, one after another."""
        memory, at = memoryview(slot.memory), 0
        for i, (array, layout) in enumerate(zip(arrays, staged.inputs, strict=True)):
            if layout is None or places[i] is not None:
                continue
            place = memory[at : at + layout.size]
            spec, cut = self._model.inputs[i], staged.plan.inputs[i]
            copy_in(array, spec, cut, layout, place, self._copier)
            places[i] = (slot.block, slot.offset + at)
            at += align(layout.size)

    def _find(self, array: NDArray[Any], layout: Layout) -> tuple[int, int] | None:
        """Where the array lies in shared memory already, if it does, and as workers need it."""
        if array.base is None:
            return None  # memory of its own, in ordinary memory
        flags = array.flags
        if not (
            layout.contiguous and flags.c_contiguous and flags.aligned and array.dtype.isnative
        ):
            return None
        return self._arena.find(array.__array_interface__["data"][0], array.nbytes)

    def _place(
        self,
        arrays: Sequence[NDArray[Any]],
        staged: _StagedPlan,
        places: Sequence[tuple[int, int] | None],
        outputs: Mapping[str, Slot],
    ) -> _Placement:
        """The references of a request, made once for the same places."""
        slots = [(slot.block, slot.offset) for slot in outputs.values()]
        key = (*places, *slots)
        placement = staged.placements.get(key)
        if placement is not None:
            return placement
        inputs = self._references(arrays, staged, places)
        written = [self._lay_out(staged, outputs, shard) for shard in range(len(inputs))]
        placement = _Placement(
            outputs=tuple(written),
            messages=tuple(map(encode_tensors, inputs, written)),
            blocks=frozenset(place[0] for place in [*places, *slots] if place is not None),
        )
        if None not in places:  # strings travel by value: there the places are not all there is
            if len(staged.placements) >= _MOST_PLACEMENTS:
                staged.placements.clear()
            staged.placements[key] = placement
        return placement

    def _lay_out(
        self, staged: _StagedPlan, slots: Mapping[str, Slot], shard: int
    ) -> tuple[TensorRef, ...]:
        """Where a shard's outputs are to be written."""
        references: list[TensorRef] = []
        for spec, join, layout in zip(
            self._model.outputs, staged.plan.outputs, staged.outputs, strict=True
        ):
            slot = slots.get(spec.name)
            if slot is not None and layout is not None and join.shapes is not None:
                place = slot.offset + layout.offsets[shard]
                references.append(
                    (spec.name, spec.element_type, join.shapes[shard], slot.block, place)
                )
        return tuple(references)

    def _references(
        self,
        arrays: Sequence[NDArray[Any]],
        staged: _StagedPlan,
        places: Sequence[tuple[int, int] | None],
    ) -> list[tuple[TensorRef, ...]]:
        shards: list[list[TensorRef]] = [[] for _ in staged.plan.rows]
        for i, (spec, element_type) in enumerate(self._types):
            cut, layout, place = staged.plan.inputs[i], staged.inputs[i], places[i]
            for shard, references in enumerate(shards):
                shape = cut.shapes[shard]
                if layout is None or place is None:
                    values = string_rows(arrays[i], cut, shard)
                    references.append((spec.name, STRING, shape, None, values))
                else:
                    block, start = place
                    offset = start + layout.offsets[shard]
                    references.append((spec.name, element_type, shape, block, offset))
        return [tuple(references) for references in shards]
