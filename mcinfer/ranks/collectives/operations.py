"""What all backends work with: an operation's signature, its cell, and its reduction in NumPy.

A *signature* is an operation with checked arguments. A *cell* says the same in bytes that are equal in all
ranks which run the same; backends send cells to find ranks that do not.
"""

import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.specs import STRING, element_type_name

Operation = Literal["sum", "max", "mean"]
_REDUCTIONS = get_args(Operation)
_UFUNCS = {"sum": np.add, "mean": np.add, "max": np.maximum}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One operation; ranks that run it together have equal signatures.

    Attributes:
        kind: The name of the method.
        shape: Of each rank's part.
        dtype: In native byte order.
        size: How many ranks the group has.
        operation: Of a reduction.
        axis: Of a gather or scatter, 0 or more.
        root: The rank that sends, in a broadcast or transfer.
        to: The rank that receives, in a transfer.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    size: int
    operation: Operation | None = None
    axis: int | None = None
    root: int | None = None
    to: int | None = None

    @classmethod
    def of(
        cls, kind: str, shape: Sequence[int], dtype: DTypeLike, size: int, **rest: Any
    ) -> "Signature":
        """A signature; InvalidInputError if an argument does not fit the others: names it."""
        found = cls(
            kind=kind,
            shape=tuple(map(int, shape)),
            dtype=np.dtype(dtype).newbyteorder("="),
            size=size,
            **rest,
        )
        found._check()
        return found if found.axis is None else replace(found, axis=found.axis % len(found.shape))

    def _check(self) -> None:
        if element_type_name(self.dtype) == STRING:
            raise InvalidInputError(f"dtype: got {self.dtype}, expected one of a fixed size")
        if any(length < 0 for length in self.shape):
            raise InvalidInputError(f"shape: got {self.shape}, expected sizes of 0 or more")
        if self.operation is not None:
            _check_reduction(self.operation, self.dtype)
        if self.axis is not None:
            if not -len(self.shape) <= self.axis < len(self.shape):
                raise InvalidInputError(f"axis: got {self.axis} for an array of shape {self.shape}")
            if self.kind == "reduce_scatter" and self.shape[self.axis] % self.size:
                raise InvalidInputError(
                    f"axis: got {self.axis} of shape {self.shape}, expected a size that {self.size} ranks "
                    "divide"
                )
        for name, rank in (("root", self.root), ("to", self.to)):
            if rank is not None and not 0 <= rank < self.size:
                raise InvalidInputError(f"{name}: got rank {rank} of a group of {self.size}")
        if self.to is not None and self.to == self.root:
            raise InvalidInputError(f"to: got rank {self.to}, which is the sending rank itself")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def output_shape(self) -> tuple[int, ...]:
        if self.axis is None:
            return self.shape
        sizes = [*self.shape]
        if self.kind == "all_gather":
            sizes[self.axis] *= self.size
        else:
            sizes[self.axis] //= self.size
        return tuple(sizes)

    def part(self, array: NDArray[Any], rank: int) -> NDArray[Any]:
        """A rank's part, along the axis, of the whole array: what is gathered, or is to be scattered."""
        axis = self.axis or 0
        length = array.shape[axis] // self.size
        return array[(slice(None),) * axis + (slice(rank * length, (rank + 1) * length),)]

    def scatter(self, whole: NDArray[Any], parts: NDArray[Any]) -> None:
        """Copy each rank's part of the whole array."""
        for rank, part in enumerate(parts):
            part[...] = self.part(whole, rank)

    def gather(self, parts: NDArray[Any], whole: NDArray[Any]) -> None:
        """Copy the ranks' parts to their places in the whole array."""
        for rank, part in enumerate(parts):
            self.part(whole, rank)[...] = part

    def __str__(self) -> str:
        words = [self.kind]
        if self.operation is not None:
            words.append(self.operation)
        words.append(f"{element_type_name(self.dtype)}{[*self.shape]}")
        if self.axis is not None:
            words.append(f"along axis {self.axis}")
        if self.root is not None:
            words.append(f"from rank {self.root}")
        if self.to is not None:
            words.append(f"to rank {self.to}")
        return " ".join(words)


def _check_reduction(operation: Operation, dtype: "np.dtype[Any]") -> None:
    if operation not in _REDUCTIONS:
        raise InvalidInputError(f"operation: got {operation!r}, expected one of {[*_REDUCTIONS]}")
    if operation != "max" and dtype.kind == "b":
        raise InvalidInputError(f"operation: got {operation!r} of bool, expected 'max'")
    if operation == "mean" and dtype.kind in "iu":
        raise InvalidInputError(
            f"dtype: got {dtype} for a mean, expected a floating-point type: a mean of integers is none"
        )


def _is_narrow(dtype: "np.dtype[Any]") -> bool:
    """Whether sums lose too much in this type: floats of 16 bits or fewer, also those of ml_dtypes."""
    return dtype.itemsize <= 2 and (dtype.kind == "f" or "float" in dtype.name)


def reduction(
    parts: Sequence[NDArray[Any]], out: NDArray[Any], operation: Operation
) -> Callable[[], None]:
    """A function that reduces the parts, in their order, to `out`; sums of narrow floats are made in float32.

    It is made once and called often: the arrays are bound. Overflows are infinities, without a warning.
    """
    ufunc = _UFUNCS[operation]
    if len(parts) == 1:
        return lambda: np.copyto(out, parts[0])
    total = out
    if operation != "max" and _is_narrow(out.dtype):
        total = np.empty(out.shape, np.float32)
    first, second, *rest = parts

    def reduce() -> None:
        with np.errstate(all="ignore"):
            if total is out:
                ufunc(first, second, out=out)
            else:
                np.copyto(total, first)
                ufunc(total, second, out=total)
            for part in rest:
                ufunc(total, part, out=total)
            if operation == "mean":
                np.divide(total, len(parts), out=total)
            if total is not out:
                np.copyto(out, total, casting="unsafe")

    return reduce


# Cells.

_CELL = struct.Struct("<B3xIQ8s104s")  # kind, epoch, place, digest of the text, text
_TEXT_IN_CELL = 104
CELL_BYTES = _CELL.size
OPERATION, FAILED, CANCELLED, END = 1, 2, 3, 4
FAILURES = (FAILED, CANCELLED)


def cell(text: str, kind: int = OPERATION, place: int = 0, epoch: int = 0) -> bytes:
    """A cell: what a rank runs, in words, and where its memory lies, if that has to agree."""
    encoded = text.encode()
    digest = blake2b(encoded, digest_size=8).digest()
    return _CELL.pack(kind, epoch, place, digest, encoded[:_TEXT_IN_CELL])


def text_of(packed: bytes) -> str:
    """What a cell says, in words."""
    return bytes(_CELL.unpack(packed)[4]).rstrip(b"\0").decode(errors="replace")


def kind_of(packed: bytes) -> int:
    return packed[0]


def epoch_of(packed: bytes) -> int:
    return int(_CELL.unpack(packed)[1])


def place_of(packed: bytes) -> int:
    return int(_CELL.unpack(packed)[2])


def difference(cells: Mapping[int, bytes]) -> InvalidInputError:
    """The error for cells by rank that are not all equal: the same in every rank."""
    first, *others = sorted(cells)
    other = next(rank for rank in others if cells[rank] != cells[first])
    one, two = text_of(cells[first]), text_of(cells[other])
    verb = (
        "run different operations"
        if one != two
        else "prepared their operations in different orders"
    )
    return InvalidInputError(f"ranks {verb}: rank {first}: {one}; rank {other}: {two}")


# Waiting for what poll(2) cannot wait for.

_YIELDS = 1000
_LONGEST_PAUSE = 1e-3


def until(is_done: Callable[[], object], timeout: float) -> bool:
    """Ask until something is done, at first with the CPU given up in between, then after growing pauses.

    Returns:
        False if it was not done in so many seconds.
    """
    deadline = time.monotonic() + timeout
    rounds = 0
    while not is_done():
        rounds += 1
        if rounds <= _YIELDS:
            os.sched_yield()
        elif time.monotonic() >= deadline:
            return False
        else:
            time.sleep(min(_LONGEST_PAUSE, 1e-5 * (rounds - _YIELDS)))
    return True
