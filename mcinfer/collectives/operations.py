"""What all backends have in common: an operation's signature, its cell, and its reduction in NumPy.

A *signature* is an operation with checked arguments. A *cell* says the same in bytes that are equal in all
ranks which run the same; backends send cells to find ranks that do not.
"""

import os
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcinfer.collectives.base import Collective, Group, Operation
from mcinfer.errors import (
    ClosedError,
    CollectiveTimeoutError,
    InvalidInputError,
    McinferError,
    RankDiedError,
)
from mcinfer.specs import STRING, element_type_name

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
        cls,
        kind: str,
        shape: Sequence[int],
        dtype: DTypeLike,
        size: int,
        *,
        operation: Operation | None = None,
        axis: int | None = None,
        root: int | None = None,
        to: int | None = None,
    ) -> "Signature":
        """A signature whose arguments fit each other.

        Raises:
            InvalidInputError: One does not fit; names it.
        """
        found = np.dtype(dtype).newbyteorder("=")
        if element_type_name(found) == STRING:
            raise InvalidInputError(f"dtype: got {found}, expected one of a fixed size")
        sizes = tuple(map(int, shape))
        if any(length < 0 for length in sizes):
            raise InvalidInputError(f"shape: got {sizes}, expected sizes of 0 or more")
        if operation is not None:
            _check_reduction(operation, found)
        if axis is not None:
            axis = _checked_axis(axis, sizes, size if kind == "reduce_scatter" else 1)
        for name, rank in (("root", root), ("to", to)):
            if rank is not None and not 0 <= rank < size:
                raise InvalidInputError(f"{name}: got rank {rank} of a group of {size}")
        if to is not None and to == root:
            raise InvalidInputError(f"to: got rank {to}, which is the sending rank itself")
        return cls(
            kind=kind,
            shape=sizes,
            dtype=found,
            size=size,
            operation=operation,
            axis=axis,
            root=root,
            to=to,
        )

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


def _checked_axis(axis: int, shape: tuple[int, ...], divisor: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise InvalidInputError(f"axis: got {axis} for an array of shape {shape}")
    axis %= len(shape)
    if shape[axis] % divisor:
        raise InvalidInputError(
            f"axis: got {axis} of shape {shape}, expected a size that {divisor} ranks divide"
        )
    return axis


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


# Groups.

_ENDS: dict[str, type[McinferError]] = {
    kind.__name__: kind for kind in (RankDiedError, CollectiveTimeoutError, InvalidInputError)
}


def end_error(text: str) -> McinferError | None:
    """The error that another rank left the group with, from what it said; None if it only closed it."""
    name, _, rest = text.partition("\n")
    return _ENDS.get(name, RankDiedError)(rest) if name else None


class SignatureGroup(Group):
    """A group that makes all its operations from signatures."""

    _cause: str | None = None  # why it is closed

    @abstractmethod
    def _run_once(self, signature: Signature, array: NDArray[Any]) -> NDArray[Any]:
        """Run an operation of all ranks on a copy of the array; a new array."""

    @abstractmethod
    def _prepare(self, signature: Signature) -> Collective:
        """An operation of all ranks on fixed memory."""

    @abstractmethod
    def _prepare_transfer(self, signature: Signature, root: int, to: int) -> Collective:
        """An operation of two ranks, of which this is one."""

    @abstractmethod
    def leave(self, text: str, cause: str) -> None:
        """Close the group, and have the others get the text, for `end_error`."""

    def all_reduce(self, array: NDArray[Any], operation: Operation = "sum") -> NDArray[Any]:
        return self._once("all_reduce", array, operation=operation)

    def all_gather(self, array: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        return self._once("all_gather", array, axis=axis)

    def reduce_scatter(
        self, array: NDArray[Any], axis: int = 0, operation: Operation = "sum"
    ) -> NDArray[Any]:
        return self._once("reduce_scatter", array, axis=axis, operation=operation)

    def broadcast(self, array: NDArray[Any], root: int = 0) -> NDArray[Any]:
        return self._once("broadcast", array, root=root)

    def prepare_all_reduce(
        self, shape: Sequence[int], dtype: DTypeLike, operation: Operation = "sum"
    ) -> Collective:
        return self._prepare(self._signature("all_reduce", shape, dtype, operation=operation))

    def prepare_all_gather(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0
    ) -> Collective:
        return self._prepare(self._signature("all_gather", shape, dtype, axis=axis))

    def prepare_reduce_scatter(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0, operation: Operation = "sum"
    ) -> Collective:
        return self._prepare(
            self._signature("reduce_scatter", shape, dtype, axis=axis, operation=operation)
        )

    def prepare_broadcast(
        self, shape: Sequence[int], dtype: DTypeLike, root: int = 0
    ) -> Collective:
        return self._prepare(self._signature("broadcast", shape, dtype, root=root))

    def prepare_transfer(
        self, shape: Sequence[int], dtype: DTypeLike, source: int, to: int
    ) -> Collective:
        signature = self._signature("transfer", shape, dtype, root=source, to=to)
        if self.rank not in (source, to):
            raise InvalidInputError(
                f"source, to: got {source} and {to} in rank {self.rank}, which is neither"
            )
        return self._prepare_transfer(signature, source, to)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, by this rank or by an error."""
        return self._cause is not None

    def close(self) -> None:
        if self._cause is None:
            self.leave("", "this rank closed it")

    def _break(self, exc: BaseException) -> None:
        """Close the group because of an error, which the others get too."""
        if self._cause is None:
            name, text = type(exc).__name__, str(exc)
            if name not in _ENDS:
                text = f"rank {self.rank} (pid {os.getpid()}) left the group: {name}: {exc}"
            self.leave(f"{name}\n{text}", text)

    def _members(self, ranks: Sequence[int]) -> list[int]:
        """The ranks of a subgroup, checked."""
        members = [*map(int, ranks)]
        if not members or {*members} - {*range(self.size)} or len({*members}) != len(members):
            raise InvalidInputError(
                f"ranks: got {members}, expected different ranks below {self.size}"
            )
        return members

    def _once(self, kind: str, array: NDArray[Any], **rest: Any) -> NDArray[Any]:
        return self._run_once(self._signature(kind, array.shape, array.dtype, **rest), array)

    def _signature(
        self, kind: str, shape: Sequence[int], dtype: DTypeLike, **rest: Any
    ) -> Signature:
        self._check_open()
        return Signature.of(kind, shape, dtype, self.size, **rest)

    def _check_open(self) -> None:
        if self._cause is not None:
            raise ClosedError(f"the group is closed: {self._cause}")
