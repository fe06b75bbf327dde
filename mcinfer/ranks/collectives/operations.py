"""What all backends work with: an operation with checked arguments, and its reduction in NumPy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
            if self.operation not in _REDUCTIONS:
                raise InvalidInputError(
                    f"operation: got {self.operation!r}, expected one of {[*_REDUCTIONS]}"
                )
            if self.operation != "max" and self.dtype.kind == "b":
                raise InvalidInputError(
                    f"operation: got {self.operation!r} of bool, expected 'max'"
                )
            if self.operation == "mean" and self.dtype.kind in "iu":
                raise InvalidInputError(
                    f"dtype: got {self.dtype} for a mean, expected a floating-point type: a mean of "
                    "integers is none"
                )
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

    def work(
        self, parts: Sequence[NDArray[Any]], output: NDArray[Any], rank: int
    ) -> Callable[[], object]:
        """A function for what a rank does with the parts of all, for itself alone."""
        if self.root == rank:
            return lambda: None
        if self.root is not None:
            return partial(np.copyto, output, parts[self.root])
        if self.kind == "all_gather":
            return partial(np.concatenate, parts, axis=self.axis, out=output)
        if self.kind == "reduce_scatter":
            parts = [self.part(part, rank) for part in parts]
        return _reduction(parts, output, self.operation or "sum")

    def share(
        self, parts: Sequence[NDArray[Any]], output: NDArray[Any], rank: int
    ) -> Callable[[], object]:
        """A rank's share of the work on an output that all share, of an all-gather or all-reduce."""
        if self.kind == "all_gather":
            return partial(np.copyto, self.part(output, rank), parts[rank])
        count = output.size
        share = slice(count * rank // self.size, count * (rank + 1) // self.size)
        own = [part.reshape(-1)[share] for part in parts]
        return _reduction(own, output.reshape(-1)[share], self.operation or "sum")

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


def _is_narrow(dtype: "np.dtype[Any]") -> bool:
    """Whether sums lose too much in this type: floats of 16 bits or fewer, also those of ml_dtypes."""
    return dtype.itemsize <= 2 and (dtype.kind == "f" or "float" in dtype.name)


def _reduction(
    parts: Sequence[NDArray[Any]], out: NDArray[Any], operation: Operation
) -> Callable[[], object]:
    """A function that reduces the parts, in their order, to `out`.

    Sums of narrow floats are made in float32. Overflows are infinities, without a warning.
    """
    ufunc = _UFUNCS[operation]
    if len(parts) == 1:
        return partial(np.copyto, out, parts[0])
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


_DIGEST_BYTES = 8


def cell_of(text: str, size: int) -> bytes:
    """What a rank runs, in words, as so many bytes: a digest of all, and what fits behind it."""
    encoded = text.encode()
    digest = blake2b(encoded, digest_size=_DIGEST_BYTES).digest()
    return (digest + encoded)[:size].ljust(size, b"\0")


def text_in(cell: bytes) -> str:
    """The words of `cell_of`."""
    return cell[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")


def difference(operations: Mapping[int, str]) -> InvalidInputError:
    """The error for ranks that do not all run the same, from what each runs: the same text in every rank."""
    first, *others = sorted(operations)
    other = next((rank for rank in others if operations[rank] != operations[first]), others[0])
    one, two = operations[first], operations[other]
    verb = (
        "run different operations"
        if one != two
        else "prepared their operations in different orders"
    )
    return InvalidInputError(f"ranks {verb}: rank {first}: {one}; rank {other}: {two}")
