"""Several requests as one run of the engine: gather their rows, run, scatter the answers.

Ownership: the joined tensors lie in one scratch block of the worker, as large as the largest joined run
needs, and runs are bound onto it (cached by shapes). Each run holds its block: if a larger one takes its
place, it lives until the runs that are begun on it are finished. The members' tensors belong to the master;
this code reads and writes them only during a call.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import Buffer, Engine, Run, array_over
from mcinfer.errors import ProtocolError
from mcinfer.shm.arena import align
from mcinfer.shm.block import Block
from mcinfer.specs import ELEMENT_TYPES, tensor_bytes

_MAX_RUNS = 64
"""Most bound runs that are kept; the least recently used goes first."""

Member = tuple[Sequence[Buffer], Sequence[Buffer]]
"""Inputs and outputs of one request."""

_Tensor = tuple[str, str, tuple[int, ...]]
"""Name, element type and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRun:
    """A run bound onto scratch memory, with the joined inputs and outputs."""

    run: Run
    scratch: Block
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]

    def gather(self, members: Sequence[Member], axes: Sequence[int | None]) -> None:
        """Copy the members' rows into the joined inputs."""
        for i, (joined, axis) in enumerate(zip(self.inputs, axes, strict=True)):
            if axis is None:
                ctypes.memmove(joined.address, members[0][0][i].address, joined.size)
            else:
                _copy(joined, [inputs[i] for inputs, _ in members], axis, gather=True)

    def scatter(self, members: Sequence[Member], axes: Sequence[int]) -> None:
        """Copy each member's rows out of the joined outputs."""
        for i, (joined, axis) in enumerate(zip(self.outputs, axes, strict=True)):
            _copy(joined, [outputs[i] for _, outputs in members], axis, gather=False)


class JoinedRuns:
    """The joined runs of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scratch: Block | None = None
        self._runs: OrderedDict[tuple[int, tuple[_Tensor, ...]], JoinedRun] = OrderedDict()

    def bound(
        self,
        members: Sequence[Member],
        axes: tuple[Sequence[int | None], Sequence[int]],
        weights: Sequence[Buffer] = (),
        version: int = 0,
    ) -> JoinedRun:
        """The run for the rows of these members together; `version` identifies the weights.

        Raises:
            ProtocolError: The tensors do not fit together.
            InvalidInputError, PredictError: The engine does not take them.
        """
        tensors = [_joined(members, axes, side) for side in (0, 1)]
        parts = tuple(tensor for side in tensors for tensor in side)
        key = (version, parts)
        found = self._runs.get(key)
        if found is not None:
            self._runs.move_to_end(key)
            return found
        sizes = [tensor_bytes(kind, prod(shape)) for _, kind, shape in parts]
        total = sum(map(align, sizes))
        if self._scratch is None or self._scratch.size < total:
            self.close()
            self._scratch = Block.create(0, max(total, 1))
            self._scratch.close()  # the mapping stays
        scratch = self._scratch
        buffers, at = [], 0
        for (name, kind, shape), size in zip(parts, sizes, strict=True):
            place = scratch.address + at
            buffers.append(
                Buffer(name=name, element_type=kind, shape=shape, address=place, size=size)
            )
            at += align(size)
        inputs, outputs = buffers[: len(tensors[0])], buffers[len(tensors[0]) :]
        joined = JoinedRun(
            run=self._engine.bind([*inputs, *weights], outputs),
            scratch=scratch,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
        )
        self._runs[key] = joined
        if len(self._runs) > _MAX_RUNS:
            self._runs.popitem(last=False)
        return joined

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
    members: Sequence[Member],
    axes: tuple[Sequence[int | None], Sequence[int]],
    side: int,
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
