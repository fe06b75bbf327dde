"""A worker's runs: messages' references become tensors, tensors are bound, and what is bound is kept.

::

    PREDICT ─────────► layout (version, bytes of the body) ──► BoundRun, in the master's blocks
    PREDICT_JOINED ──► gather rows ──► BoundRun, in scratch memory ──► scatter rows    (a `StagedRun`)
    outputs without a place ──► `OutputBlocks`: copied to a block that the master maps ──► REPLY

Ownership: the blocks belong to the master; `drop_block` comes before one is closed. Joined tensors lie in one
scratch block of the worker, as large as the largest joined run needs, and runs are bound onto it (cached by
shapes). If a larger one takes its place, the runs that were bound onto it go with it: one runs at a time. The
members' tensors are the master's; this code reads and writes them only during a run. A block of outputs
belongs to the master from the REPLY that names it until PREDICT returns it.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, count
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import BoundRun, Buffer, Engine, Produced, StagedRun, Strings, array_over
from mcinfer.errors import PredictError, ProtocolError
from mcinfer.protocol import (
    MAX_REMEMBERED,
    REPLY,
    REPLY_HEAD,
    PredictJoined,
    Reply,
    TensorRef,
    UpdateWeights,
    decode_body,
    encode,
)
from mcinfer.shm.arena import AttachedBlocks, align
from mcinfer.shm.block import Block
from mcinfer.shm.lifeline import Lifeline
from mcinfer.specs import ELEMENT_TYPES, STRING, tensor_bytes

_MAX_LAYOUTS = 1024
_MAX_LAYOUT_BYTES = 4 << 20
"""Most bound layouts that are kept, and most bytes of their keys; the least recently used go first."""

_LEAST_BYTES = 1 << 12
_LARGEST_ROUNDED = 64 << 20
"""Bytes of a block for outputs at least, and up to which it has a power of two."""

_MAX_BODIES = 256
"""Replies' bodies that are remembered at most."""

_MAX_RUNS = 64
"""Most bound runs that are kept; the least recently used goes first."""

Member = tuple[Sequence[Buffer], Sequence[Buffer]]
"""Inputs and outputs of one request."""

_Tensor = tuple[str, str, tuple[int, ...]]
"""Name, element type and shape."""


_Layout = tuple[int, int, bytes]
"""The version of the weights, bytes of the inputs' references, and the body of PREDICT."""


class Runs:
    """The runs of a worker's engine, and the versions of its weights. One thread executes them."""

    def __init__(self, engine: Engine, blocks: AttachedBlocks) -> None:
        self.engine = engine
        self._blocks = blocks
        # By layout: the run, the blocks of its tensors, and its outputs.
        self._bound: OrderedDict[
            _Layout, tuple[BoundRun, frozenset[int | None], tuple[TensorRef, ...]]
        ] = OrderedDict()
        self._bound_bytes = 0  # of the layouts
        self._joined = JoinedRuns(engine)
        self._weights: dict[int, tuple[Buffer, ...]] = {0: ()}

    def single(
        self, version: int, size: int, body: bytes
    ) -> tuple[BoundRun, tuple[TensorRef, ...]]:
        """The run of a PREDICT, and the places of its outputs.

        Args:
            version: Of the weights.
            size: Bytes of the inputs' references, with which the body begins.
            body: Of PREDICT.

        Raises:
            ProtocolError: The body is no references, or they name what is not there.
            InvalidInputError, PredictError: The engine does not take them.
        """
        key = (version, size, body)
        found = self._bound.get(key)
        if found is not None:
            self._bound.move_to_end(key)
            return found[0], found[2]
        inputs, outputs = decode_body(body, size)
        weights = self._weights_of(version)
        resolved = [
            Strings(name=reference[0], shape=reference[2], values=reference[4])
            if reference[1] == STRING
            else self._buffer(reference)
            for reference in inputs
        ]
        run = self.engine.bind([*resolved, *weights], [*map(self._buffer, outputs)])
        if not any(isinstance(item, Strings) for item in resolved):
            blocks = frozenset(reference[3] for part in (inputs, outputs) for reference in part)
            self._bound[key] = (run, blocks, outputs)
            self._bound_bytes += len(body)
            while len(self._bound) > _MAX_LAYOUTS or self._bound_bytes > _MAX_LAYOUT_BYTES:
                (_, _, oldest), _ = self._bound.popitem(last=False)
                self._bound_bytes -= len(oldest)
        return run, outputs

    def joined(self, message: PredictJoined) -> tuple[BoundRun, tuple[TensorRef, ...]]:
        """The run of several requests as one batch, which writes all outputs; raises as `single` does."""
        members = [
            ([*map(self._buffer, member["inputs"])], [*map(self._buffer, member["outputs"])])
            for member in message.members
        ]
        weights = self._weights_of(message.weights)
        axes = (message.input_axes, message.output_axes)
        return self._joined.staged(members, axes, weights, message.weights), ()

    def _buffer(self, reference: TensorRef) -> Buffer:
        name, element_type, shape, number, offset = reference
        size = tensor_bytes(element_type, prod(shape))
        block = None if number is None else self._blocks.find(number)
        if block is None or offset + size > block.size:
            raise ProtocolError(f"tensor {name!r} does not lie in block {number}: {reference}")
        place = block.address + offset
        return Buffer(
            name=name,
            element_type=element_type,
            shape=shape,
            address=place,
            size=size,
            device=block.device,
        )

    def _weights_of(self, version: int) -> tuple[Buffer, ...]:
        weights = self._weights.get(version)
        if weights is None:
            raise ProtocolError(f"version {version} of the weights is not known")
        return self.engine.placed(version, weights)

    def take_weights(self, message: UpdateWeights) -> None:
        """Add a version of the weights, and drop those that no request will name any more."""
        self._weights[message.version] = tuple(map(self._buffer, message.tensors))
        oldest = message.oldest
        for version in [version for version in self._weights if 0 < version < oldest]:
            del self._weights[version]
        for layout in [layout for layout in self._bound if 0 < layout[0] < oldest]:
            self._drop(layout)
        self._joined.forget(oldest)
        self.engine.forget(oldest)

    def drop_block(self, number: int) -> None:
        """Drop the runs with tensors in the master's block of this number, which is to be closed."""
        for layout, (_, blocks, _) in [*self._bound.items()]:
            if number in blocks:
                self._drop(layout)

    def _drop(self, layout: _Layout) -> None:
        del self._bound[layout]
        self._bound_bytes -= len(layout[2])

    def close(self) -> None:
        self._bound.clear()
        self._joined.close()


class OutputBlocks:
    """The worker's own blocks, for outputs without a place, or of another shape than their place.

    The master decides which of them are kept: it returns those to be filled again, and drops the others. One
    thread at a time calls `reply`; another one may call the rest meanwhile.

    Args:
        engine: Whose outputs they are.
        lifeline: Hands new blocks over.
        rank: Of a group of so many `ranks`: `-number % ranks` of each of its blocks.
    """

    def __init__(self, engine: Engine, lifeline: Lifeline, rank: int, ranks: int) -> None:
        self._engine = engine
        self._lifeline = lifeline
        self._numbers = count(2 * ranks + rank, ranks)  # -1 is that of a slab
        self._made: dict[int, Block] = {}
        self._free: list[Block] = []
        self._bodies: dict[tuple[Any, ...], bytes] = {}

    def reply(
        self,
        head: tuple[int, int, float, bool],
        produced: Sequence[Produced | Strings],
        bound: tuple[TensorRef, ...],
    ) -> bytes:
        """The REPLY to a run, to be sent before the next one is made.

        What the engine produced by itself is copied to one block: the smallest that is large enough.

        Args:
            head: Of the run: request, shard, seconds, and whether it was wide.
            produced: What `BoundRun.execute` has returned, some at least.
            bound: The places of the run's outputs.

        Raises:
            PredictError: No message can hold it.
            OSError: There is no memory, or no descriptor left.
        """
        places, size = [], 0
        for item in produced:
            places.append(size)
            if isinstance(item, Produced):
                size += align(item.size)
        block = self._take(size) if size else None  # else no block: all tensors are empty
        if block is not None:
            for item, place in zip(produced, places, strict=True):
                if isinstance(item, Produced):
                    ctypes.memmove(block.address + place, item.address, item.size)
        number = 0 if block is None else block.number
        key = (number, bound, *[item.name for item in produced], *[i.shape for i in produced])
        body = self._bodies.get(key)
        if body is None:
            try:
                outputs = self._references(produced, places, number, bound)
                reply = Reply(request=0, shard=0, seconds=0.0, outputs=outputs)
                body = encode(reply)[REPLY_HEAD.size :]
            except ProtocolError as exc:
                if block is not None:
                    self._free.append(
                        block
                    )  # also a new one, which is handed over when it is named
                text = f"the answer does not fit a message to the master: {exc}"
                raise PredictError(text) from exc
            if len(self._bodies) == _MAX_BODIES:
                self._bodies.clear()
            if len(body) <= MAX_REMEMBERED and not any(isinstance(i, Strings) for i in produced):
                self._bodies[key] = body
        if block is not None and block.fd >= 0:  # it is new
            self._lifeline.send_block(block.number, block.size, block.fd)
            block.close()  # the mapping stays
            self._made[block.number] = block
        return REPLY_HEAD.pack(REPLY, *head) + body

    def _references(
        self,
        produced: Sequence[Produced | Strings],
        places: Sequence[int],
        number: int,
        bound: Sequence[TensorRef],
    ) -> tuple[TensorRef, ...]:
        """References to all outputs, in the model's order; of a rank, to those that it gives."""
        gives = self._engine.gives
        found = {ref[0]: ref for ref in bound if gives is None or ref[0] in gives}
        for item, place in zip(produced, places, strict=True):
            if isinstance(item, Strings):
                found[item.name] = (item.name, STRING, item.shape, None, item.values)
            else:
                found[item.name] = (item.name, item.element_type, item.shape, number, place)
        names = [spec.name for spec in self._engine.spec.outputs]
        return tuple(found[name] for name in names if name in found)

    def _take(self, size: int) -> Block:
        """A block for an answer of so many bytes, which is the master's now."""
        large = [block for block in self._free.copy() if block.size >= size]
        if large:
            found = min(large, key=lambda block: block.size)
            self._free.remove(found)
            return found
        # Answers of about this size are to fit as well.
        rounded = (
            size if size > _LARGEST_ROUNDED else max(_LEAST_BYTES, 1 << (size - 1).bit_length())
        )
        return Block.create(-next(self._numbers), rounded)

    def take_back(self, numbers: Sequence[int]) -> None:
        """These blocks may be filled again; others are of other ranks."""
        self._free += [self._made[number] for number in numbers if number in self._made]

    def drop(self, number: int) -> None:
        """The master has closed its side."""
        self._made.pop(number, None)


class JoinedRuns:
    """The joined runs of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scratch: Block | None = None
        # Each with the joined inputs and outputs that it is bound to, in one list.
        self._runs: OrderedDict[
            tuple[int, tuple[_Tensor, ...]], tuple[BoundRun, tuple[Buffer, ...]]
        ] = OrderedDict()

    def staged(
        self,
        members: Sequence[Member],
        axes: tuple[Sequence[int | None], Sequence[int]],
        weights: Sequence[Buffer] = (),
        version: int = 0,
    ) -> StagedRun:
        """The run of these members, bound to scratch memory: it gathers their rows, runs, and scatters.

        `version` identifies the weights.

        Raises:
            ProtocolError: The tensors do not fit together.
            InvalidInputError, PredictError: The engine does not take them.
        """
        key = (version, (*_joined(members, axes, 0), *_joined(members, axes, 1)))
        count = len(axes[0])
        if key in self._runs:
            self._runs.move_to_end(key)
        else:
            self._runs[key] = self._bind(key[1], count, weights)
            if len(self._runs) > _MAX_RUNS:
                self._runs.popitem(last=False)
        run, buffers = self._runs[key]

        def gather() -> None:
            for i, (joined, axis) in enumerate(zip(buffers[:count], axes[0], strict=True)):
                if axis is None:
                    ctypes.memmove(joined.address, members[0][0][i].address, joined.size)
                else:
                    _copy(joined, [inputs[i] for inputs, _ in members], axis, gather=True)

        def scatter(produced: Sequence[Produced | Strings]) -> Sequence[Produced | Strings]:
            if produced:  # the run must have written all it gives
                names = [item.name for item in produced]
                raise PredictError(f"outputs {names} have other shapes than the model declares")
            gives = self._engine.gives
            for i, (joined, axis) in enumerate(zip(buffers[count:], axes[1], strict=True)):
                if gives is None or joined.name in gives:
                    _copy(joined, [outputs[i] for _, outputs in members], axis, gather=False)
            return ()

        return StagedRun(gather, run, scatter)

    def _bind(
        self, tensors: Sequence[_Tensor], inputs: int, weights: Sequence[Buffer]
    ) -> tuple[BoundRun, tuple[Buffer, ...]]:
        """A run on the scratch memory, which grows first if it must, and its tensors there."""
        sizes = [tensor_bytes(kind, prod(shape)) for _, kind, shape in tensors]
        total = sum(map(align, sizes))
        if self._scratch is None or self._scratch.size < total:
            self.close()
            self._scratch = Block.create(0, max(total, 1))
            self._scratch.close()  # the mapping stays
        places = accumulate(map(align, sizes), initial=self._scratch.address)
        buffers = tuple(
            Buffer(name=name, element_type=kind, shape=shape, address=place, size=size)
            for (name, kind, shape), size, place in zip(tensors, sizes, places, strict=False)
        )
        return self._engine.bind([*buffers[:inputs], *weights], buffers[inputs:]), buffers

    def forget(self, oldest: int) -> None:
        """Drop the runs with weights below the version `oldest`, which no request will name any more."""
        for version, parts in [*self._runs]:
            if 0 < version < oldest:
                del self._runs[version, parts]

    def close(self) -> None:
        """Drop the bound runs, and with the last of them the memory that they are bound to."""
        self._runs.clear()
        self._scratch = None


def _joined(
    members: Sequence[Member], axes: tuple[Sequence[int | None], Sequence[int]], side: int
) -> list[_Tensor]:
    """Name, element type and shape of the joined inputs (side 0) or outputs (side 1)."""
    lists = [member[side] for member in members]
    if any(len(tensors) != len(axes[side]) for tensors in lists):
        raise ProtocolError("the members of a joined run differ in their tensors")
    joined = []
    for axis, *tensors in zip(axes[side], *lists, strict=True):
        first = tensors[0]
        if axis is not None and axis >= len(first.shape):
            raise ProtocolError(f"tensor {first.name!r} has no axis {axis} to be joined along")
        whole = {(t.name, t.element_type, _with_rows(t.shape, axis, 0)) for t in tensors}
        if len(whole) > 1:
            raise ProtocolError(f"tensors {first.name!r} of a joined run do not fit together")
        rows = 0 if axis is None else sum(tensor.shape[axis] for tensor in tensors)
        joined.append((first.name, first.element_type, _with_rows(first.shape, axis, rows)))
    return joined


def _with_rows(shape: tuple[int, ...], axis: int | None, rows: int) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], rows, *shape[axis + 1 :])


def _copy(joined: Buffer, parts: Sequence[Buffer], axis: int, *, gather: bool) -> None:
    """Copy all parts into the joined tensor (gather), or the joined tensor into its parts."""
    if prod(joined.shape[:axis]) == 1:  # the parts are contiguous
        place = joined.address
        for part in parts:
            into, out_of = (place, part.address) if gather else (part.address, place)
            ctypes.memmove(into, out_of, part.size)
            place += part.size
        return
    whole, start = _array(joined), 0
    for part in parts:
        stop = start + part.shape[axis]
        rows = whole[(slice(None),) * axis + (slice(start, stop),)]
        if gather:
            rows[...] = _array(part)
        else:
            _array(part)[...] = rows
        start = stop


def _array(buffer: Buffer) -> NDArray[Any]:
    """An array over the buffer. Only the width of an element matters for copies: NumPy lacks some types."""
    width = ELEMENT_TYPES[buffer.element_type].bits // 8
    return array_over(buffer, np.dtype("c16" if width == 16 else f"u{width}"))
