"""One output of a large batch: its parts, as they come in, one after another in a file of raw elements.

How they come together is known before the first: they follow one another along an axis, or all are the same
and the first is kept. A part may have any size along that axis.

Strings are as wide as the longest of their part, 4 bytes a character.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mcinfer.large_batches.positioned import read_at, write_at
from mcinfer.requests.tensors import difference
from mcinfer.sharding import JoinError, Shape
from mcinfer.specs import STRING, element_type_name, numpy_dtype

_BLOCK_BYTES = 1 << 20
_CHARACTER_BYTES = 4

Run = tuple[int, int, int]
"""Parts that are alike: the size along the axis, the characters of the strings, how many parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What is in the file: all that is needed to go on with it.

    Attributes:
        element_type: A key of `mcinfer.specs.ELEMENT_TYPES`.
        shape: Of the first part.
        axis: Along which the parts follow one another; None: all are the same, and one is kept.
        runs: What parts are kept.
        bytes: How much of the file counts.
    """

    element_type: str
    shape: Shape
    axis: int | None
    runs: tuple[Run, ...] = ()
    bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """As JSON can say it."""
        return asdict(self)

    @classmethod
    def of_json(cls, said: dict[str, Any]) -> Self:
        """What `as_json` made; TypeError, LookupError or ValueError of what it did not."""
        runs = tuple((int(size), int(width), int(count)) for size, width, count in said["runs"])
        return cls(**{**said, "shape": tuple(map(int, said["shape"])), "runs": runs})

    def dtype(self, width: int | None = None) -> "np.dtype[Any]":
        """As stored: of strings that wide, or of the widest."""
        if self.element_type == STRING:
            if width is None:
                width = max(width for _, width, _ in self.runs)
            return np.dtype(f"<U{width}")
        return numpy_dtype(self.element_type)

    @property
    def whole_shape(self) -> Shape:
        """Of all parts together."""
        if self.axis is None:
            return self.shape
        total = sum(size * count for size, _, count in self.runs)
        return (*self.shape[: self.axis], total, *self.shape[self.axis + 1 :])

    @property
    def whole_bytes(self) -> int:
        """Likewise."""
        return prod(self.whole_shape) * self.dtype().itemsize

    def with_part(self, array: NDArray[Any]) -> Self:
        """With one part more, which is written at the end."""
        width = array.itemsize // _CHARACTER_BYTES if self.element_type == STRING else 0
        run = (1 if self.axis is None else array.shape[self.axis], width, 1)
        runs = self.runs
        if runs and runs[-1][:2] == run[:2]:
            run, runs = (*run[:2], runs[-1][2] + 1), runs[:-1]
        return replace(self, bytes=self.bytes + array.nbytes, runs=(*runs, run))


class GrowingOutput:
    """One output. How far it is, its caller knows; its file stays the caller's.

    Attributes:
        name: As in the model.
    """

    def __init__(self, name: str, axis: int | None, file: int) -> None:
        """Take along which axis its parts follow one another, and a descriptor of its file.

        Args:
            name: As in the model.
            axis: None: all parts are the same.
            file: Its file's descriptor.
        """
        self.name = name
        self._axis = axis
        self._file = file

    def add(self, before: Grown | None, array: NDArray[Any]) -> Grown:
        """Write the next part.

        Args:
            before: What is in the file; None before the first part.
            array: What the model gave.

        Returns:
            What is in the file then.

        Raises:
            JoinError: It does not go together with those before it.
            OSError: It cannot be written.
        """
        element_type = element_type_name(array.dtype)
        if element_type == STRING:  # in a type that can be stored without pickling
            array = array.astype(np.str_)
        grown = before or Grown(
            element_type=element_type, shape=tuple(array.shape), axis=self._axis
        )
        self._check(grown, array, element_type)
        if before is not None and self._axis is None:
            return before
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        write_at(self._file, data.data, grown.bytes)
        return grown.with_part(array)

    def _check(self, grown: Grown, array: NDArray[Any], element_type: str) -> None:
        """Raise `JoinError` unless a part goes together with the first."""
        axis, shape, first = self._axis, array.shape, grown.shape
        how, fits = "is to be the same in all requests", shape == first
        if axis is not None:
            how = f"is joined along axis {axis}"
            fits = axis < len(first) == len(shape)
            fits = fits and _without(shape, axis) == _without(first, axis)
        if element_type != grown.element_type or not fits:
            raise JoinError(
                f"output {self.name!r} {how}: got {element_type}{[*shape]} from one request, "
                f"{grown.element_type}{[*first]} from the first"
            )
        if axis is None and grown.runs:
            same, far = difference(array, self._first(grown))
            if not same:
                raise JoinError(
                    f"output {self.name!r} {how}: one gave other values than the first, up to {far:.2g} "
                    f"of the largest element apart"
                )

    def remark(self, grown: Grown, requests: int) -> str | None:
        """What is to be known of it, where it is of several requests."""
        if grown.axis is not None:
            return None
        return (
            f"output {self.name!r} has no batch dimension: it was the same in all {requests} requests, one "
            f"is written"
        )

    def _first(self, grown: Grown) -> NDArray[Any]:
        """All that is in the file, where it is one part."""
        blocks = [np.empty(0, grown.dtype()), *self.blocks(grown)]
        return np.concatenate(blocks).reshape(grown.shape)

    def blocks(self, grown: Grown) -> Iterator[NDArray[Any]]:
        """The joined output in C order, in blocks of about a MB."""
        dtype = grown.dtype()
        for offset, count, stored in _segments(grown):
            for block in self._read(offset, count, stored):
                yield block if block.dtype == dtype else block.astype(dtype)

    def _read(self, offset: int, count: int, dtype: "np.dtype[Any]") -> Iterator[NDArray[Any]]:
        """So many elements from that byte of the file on, in blocks."""
        most = max(1, _BLOCK_BYTES // dtype.itemsize)
        for done in range(0, count, most):
            block = np.empty(min(most, count - done), dtype)
            read_at(self._file, block.view(np.uint8).data, offset + done * dtype.itemsize)
            yield block


def _segments(grown: Grown) -> Iterator[tuple[int, int, "np.dtype[Any]"]]:
    """Where what follows one another lies in the file: byte, elements, dtype."""
    axis = grown.axis or 0
    outer, inner = prod(grown.shape[:axis]), prod(grown.shape[axis + 1 :])
    if grown.axis is None or (outer == 1 and grown.element_type != STRING):
        yield 0, prod(grown.whole_shape), grown.dtype()  # they follow one another already
        return
    for i in range(outer):
        start = 0
        for size, width, count in grown.runs:
            dtype, segment = grown.dtype(width), size * inner
            for _ in range(count):
                yield start + i * segment * dtype.itemsize, segment, dtype
                start += outer * segment * dtype.itemsize


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])
