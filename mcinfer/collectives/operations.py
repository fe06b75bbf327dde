"""What an operation is, in words and in NumPy: its arguments checked, its text, and its reductions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcinfer.collectives.base import Operation
from mcinfer.errors import InvalidInputError
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
                ufunc(first, second, out)
            else:
                np.copyto(total, first)
                ufunc(total, second, total)
            for part in rest:
                ufunc(total, part, total)
            if operation == "mean":
                np.divide(total, len(parts), total)
            if total is not out:
                np.copyto(out, total, casting="unsafe")

    return reduce
