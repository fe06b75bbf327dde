"""One output of a large batch: its parts, as they come in, one after another in a file of raw elements.

Whether they are to be joined is known before the first comes, or guessed as `mcinfer.sharding.join_axis` does
for shards: an output joins along its first axis if every part has the same multiple of its rows there. All
parts of one that does not join must be equal, and the first is kept.

Strings are as wide as the longest of their part, 4 bytes a character.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mcinfer.large_batches.positioned import read_at, write_at
from mcinfer.sharding import JoinError, OutputJoin, Shape
from mcinfer.specs import STRING, element_type_name, numpy_dtype

_BLOCK_BYTES = 1 << 20
_CHARACTER_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What is in the file: all that is needed to go on with it.

    Attributes:
        element_type: A key of `mcinfer.specs.ELEMENT_TYPES`.
        shape: Of the first part.
        axis: Along which the parts join; None where they do not.
        ratio: Sizes along that axis for one unit of the batch.
        alike: Whether all parts were equal so far.
        bytes: How much of the file counts.
        widths: Characters of each part's strings; none for other types.
    """

    element_type: str
    shape: Shape
    axis: int | None
    ratio: int
    alike: bool = True
    bytes: int = 0
    widths: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As JSON can say it."""
        return asdict(self)

    @classmethod
    def of_json(cls, said: dict[str, Any]) -> Self:
        """What `as_json` made; TypeError, LookupError or ValueError of what it did not."""
        shape, widths = tuple(map(int, said["shape"])), tuple(map(int, said["widths"]))
        return cls(**{**said, "shape": shape, "widths": widths})

    def dtype(self, width: int | None = None) -> "np.dtype[Any]":
        """As stored: of strings that wide, or of the widest."""
        if self.element_type == STRING:
            return np.dtype(f"<U{max(self.widths) if width is None else width}")
        return numpy_dtype(self.element_type)

    def whole_shape(self, units: int) -> Shape:
        """Of the joined output, for a batch of so many units."""
        if self.axis is None:
            return self.shape
        return (*self.shape[: self.axis], self.ratio * units, *self.shape[self.axis + 1 :])

    def whole_bytes(self, units: int) -> int:
        """Likewise."""
        return prod(self.whole_shape(units)) * self.dtype().itemsize


class GrowingOutput:
    """One output. How far it is, its caller knows; its file stays the caller's.

    Attributes:
        name: As in the model.
    """

    def __init__(self, name: str, join: OutputJoin, file: int) -> None:
        """Take how its parts come together, and a descriptor of its file."""
        self.name = name
        self._join = join
        self._file = file

    def add(self, before: Grown | None, array: NDArray[Any], units: int) -> Grown:
        """Write the next part.

        Args:
            before: What is in the file; None before the first part.
            array: What the model gave.
            units: Of the batch, that it is for.

        Returns:
            What is in the file then.

        Raises:
            JoinError: It does not go together with those before it.
            OSError: It cannot be written.
        """
        element_type = element_type_name(array.dtype)
        if element_type == STRING:  # in a type that can be stored without pickling
            array = array.astype(np.str_)
        if before is None:
            grown = self._begin(array, element_type, units)
        else:
            grown = self._follow(before, array, element_type, units)
            if grown.axis is None:
                return grown
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        write_at(self._file, data.data, grown.bytes)
        width = (array.itemsize // _CHARACTER_BYTES,) if element_type == STRING else ()
        return replace(grown, bytes=grown.bytes + data.size, widths=(*grown.widths, *width))

    def _begin(self, array: NDArray[Any], element_type: str, units: int) -> Grown:
        axis = 0 if self._join.guessed else self._join.axis
        ratio = None if axis is None else _ratio(array.shape, axis, units)
        if ratio is None or (ratio == 0 and self._join.guessed):
            axis = None
        return Grown(
            element_type=element_type, shape=tuple(array.shape), axis=axis, ratio=ratio or 0
        )

    def _follow(self, grown: Grown, array: NDArray[Any], element_type: str, units: int) -> Grown:
        """What is known with one part more, which is not written yet."""
        fits = (
            grown.axis is not None
            and len(array.shape) == len(grown.shape)
            and array.shape[grown.axis] == grown.ratio * units
            and _without(array.shape, grown.axis) == _without(grown.shape, grown.axis)
        )
        alike = self._join.axis is None and grown.alike and self._equals_first(grown, array)
        if element_type != grown.element_type or not (fits or alike):
            got = f"{element_type}{[*array.shape]}"
            first = f"{grown.element_type}{[*grown.shape]}"
            raise JoinError(self._difference(got, first))
        return replace(grown, axis=grown.axis if fits else None, alike=alike)

    def _difference(self, got: str, first: str) -> str:
        if self._join.axis is not None:
            return (
                f"output {self.name!r} is {got} in one request and {first} in the first, which do not "
                f"join along axis {self._join.axis}"
            )
        values = f"other values of {got}" if got == first else got
        return (
            f"output {self.name!r} has no batch dimension and differs between requests: {values} "
            f"after {first}; --devices 1 and a --batch of all rows have it run in one piece"
        )

    def remark(self, grown: Grown, parts: str) -> str | None:
        """What may be wrong with it for all that is known, where it is of several parts.

        Args:
            grown: All of it.
            parts: How many parts, in words.
        """
        if grown.axis is None:
            return (
                f"output {self.name!r} has no batch dimension: it was the same in all {parts}, "
                f"one is written"
            )
        if self._join.guessed and grown.ratio != 1:
            return (
                f"output {self.name!r} is taken to have {grown.ratio} rows for each row of the batch: "
                f"those of each of the {parts} lie together"
            )
        return None

    def _equals_first(self, grown: Grown, array: NDArray[Any]) -> bool:
        """Whether a part is as the first; a NaN equals a NaN."""
        if array.shape != grown.shape:
            return False
        flat, at = array.reshape(-1), 0
        for block in self._read(0, flat.size, grown.dtype(grown.widths[0] if grown.widths else 0)):
            part = flat[at : at + block.size]
            if not np.array_equal(part, block, equal_nan=part.dtype.kind not in "Ubiu"):
                return False
            at += block.size
        return True

    def blocks(self, grown: Grown, units: Sequence[int]) -> Iterator[NDArray[Any]]:
        """The joined output in C order, for parts of so many units each, in blocks of about a MB."""
        dtype = grown.dtype()
        for offset, count, stored in self._segments(grown, units):
            for block in self._read(offset, count, stored):
                yield block if block.dtype == dtype else block.astype(dtype)

    def _segments(
        self, grown: Grown, units: Sequence[int]
    ) -> Iterator[tuple[int, int, "np.dtype[Any]"]]:
        """Where what follows one another lies in the file: byte, elements, dtype."""
        if grown.axis is None:
            first = grown.widths[0] if grown.widths else 0
            yield 0, prod(grown.shape), grown.dtype(first)
            return
        outer = prod(grown.shape[: grown.axis])
        inner = grown.ratio * prod(grown.shape[grown.axis + 1 :])
        if outer == 1 and not grown.widths:  # they follow one another already
            yield 0, inner * sum(units), grown.dtype()
            return
        dtypes = [grown.dtype(width) for width in grown.widths] or [grown.dtype()] * len(units)
        for i in range(outer):
            start = 0
            for count, dtype in zip(units, dtypes, strict=True):
                segment = count * inner
                yield start + i * segment * dtype.itemsize, segment, dtype
                start += outer * segment * dtype.itemsize

    def _read(self, offset: int, count: int, dtype: "np.dtype[Any]") -> Iterator[NDArray[Any]]:
        """So many elements from that byte of the file on, in blocks."""
        most = max(1, _BLOCK_BYTES // dtype.itemsize)
        for done in range(0, count, most):
            block = np.empty(min(most, count - done), dtype)
            read_at(self._file, block.view(np.uint8).data, offset + done * dtype.itemsize)
            yield block


def _ratio(shape: Shape, axis: int, units: int) -> int | None:
    """Sizes along the axis for each unit, where it is the same for all."""
    if axis >= len(shape) or units == 0 or shape[axis] % units:
        return None
    return shape[axis] // units


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])
