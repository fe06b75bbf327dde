"""The memory that a group of ranks on one machine shares, as one of them maps it.

::

    memfd, sparse    [ control │           region of rank 0            │ region of rank 1 │ … ]
    control          for each rank: the cells of two steps, three texts, a ring of cells per receiving rank
    region           [ fixed memory │ small parts │ a large part │ its result │ a channel to each other rank ]
    channel          [ transfers │ the array of `send` ]

A region begins at ``(rank + 1) << 40``, and its pages take memory once they are touched. A *place* is where
something lies in a region. Fixed memory is handed out in all ranks in the same order, so its place is the
same in each. A window around a place is mapped when the first array over it is made.

Ownership: a window lives as long as arrays over it, whatever becomes of the group.
"""

import mmap
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.ranks.collectives.operations import CELL_BYTES

REGION = 1 << 40
"""Bytes of address space of a region, and of the control pages before the first."""

# Control pages.

_TEXT = struct.Struct("<I")  # its bytes
_TEXT_BYTES = 16 << 10
_TEXTS = 4096
_RINGS = 64 << 10
END_TEXT = 2
"""The number of the text that says why a rank left; texts 0 and 1 are of failures in even and odd steps."""

RING = 64
"""Messages to one rank that can wait to be taken."""


class Control:
    """The control pages of all ranks, in one mapping, of which each rank writes its own part."""

    def __init__(self, fd: int, size: int) -> None:
        self._stride = _RINGS + size * RING * CELL_BYTES
        self.map = mmap.mmap(fd, size * self._stride)

    def step_cells(self, rank: int) -> tuple[slice, slice]:
        """Where a rank's cells of even and of odd steps are, in `map`."""
        start = rank * self._stride
        middle, end = start + CELL_BYTES, start + 2 * CELL_BYTES
        return slice(start, middle), slice(middle, end)

    def message_cell(self, rank: int, to: int, number: int) -> slice:
        """Where the cell of a message from a rank to another is, in `map`."""
        start = rank * self._stride + _RINGS + (to * RING + number % RING) * CELL_BYTES
        return slice(start, start + CELL_BYTES)

    def write_text(self, rank: int, number: int, text: str) -> None:
        start = rank * self._stride + _TEXTS + number * _TEXT_BYTES
        encoded = text.encode(errors="replace")[: _TEXT_BYTES - _TEXT.size]
        _TEXT.pack_into(self.map, start, len(encoded))
        start += _TEXT.size
        self.map[start : start + len(encoded)] = encoded

    def read_text(self, rank: int, number: int) -> str:
        start = rank * self._stride + _TEXTS + number * _TEXT_BYTES
        (length,) = _TEXT.unpack_from(self.map, start)
        start += _TEXT.size
        return self.map[start : start + length].decode(errors="replace")


# Places.

_ALIGNMENT = 64
_FIRST_WINDOW = 4 << 20
_SMALL = REGION >> 1
_LARGE = (REGION >> 1) + (REGION >> 3)
_RESULT = (REGION >> 1) + (REGION >> 2)
_CHANNELS = (REGION >> 1) + (REGION >> 2) + (REGION >> 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something lies in a region: in a window of it, which is mapped as a whole."""

    window: int
    length: int
    offset: int

    @property
    def number(self) -> int:
        """For cells; never 0, which says that there is no place to compare."""
        return self.window + self.offset + 1


class Area:
    """A part of a region, from which memory is handed out for ever, in windows that double in size."""

    def __init__(self, start: int = 0, length: int = _SMALL) -> None:
        self._end = start + length
        self._window = start
        self._length = _FIRST_WINDOW
        self._used = 0

    def take(self, nbytes: int) -> Place:
        wanted = max((nbytes + _ALIGNMENT - 1) & -_ALIGNMENT, _ALIGNMENT)
        while self._used + wanted > self._length:
            if self._window + 3 * self._length > self._end:
                raise _too_large(nbytes)
            self._window += self._length
            self._length *= 2
            self._used = 0
        place = Place(window=self._window, length=self._length, offset=self._used)
        self._used += wanted
        return place


MAX_SMALL_BYTES = _FIRST_WINDOW >> 1


def small_part(parity: int) -> Place:
    """Memory for this rank's part of a small operation, in an even or odd step."""
    return Place(window=_SMALL, length=_FIRST_WINDOW, offset=parity * MAX_SMALL_BYTES)


def large_part(nbytes: int) -> Place:
    """Memory for this rank's part of a large operation that is run once."""
    return _start_of(_LARGE, nbytes, REGION >> 3)


def result(nbytes: int) -> Place:
    """Memory for the result of a large operation that is run once; rank 0's is used."""
    return _start_of(_RESULT, nbytes, REGION >> 3)


def transfers(to: int, size: int) -> Area:
    """The memory for transfers to a rank."""
    start, half = _channel(to, size)
    return Area(start, half)


def slot(to: int, size: int, nbytes: int) -> Place:
    """The memory for one array that is sent to a rank."""
    start, half = _channel(to, size)
    return _start_of(start + half, nbytes, half)


def _channel(to: int, size: int) -> tuple[int, int]:
    """The start of the channel to a rank, and the length of each half."""
    half = (REGION - _CHANNELS) // size // 2 & -mmap.ALLOCATIONGRANULARITY
    return _CHANNELS + to * 2 * half, half


def _start_of(start: int, nbytes: int, most: int) -> Place:
    """The start of an area, in a window that later arrays use again."""
    length = _FIRST_WINDOW
    while length < nbytes:
        length *= 2
    if length > most:
        raise _too_large(nbytes)
    return Place(window=start, length=length, offset=0)


def _too_large(nbytes: int) -> InvalidInputError:
    return InvalidInputError(f"shape: {nbytes} bytes do not fit the memory of a group")


class Windows:
    """This rank's mappings of all regions."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._maps: dict[tuple[int, int, int], mmap.mmap] = {}

    def array(
        self, rank: int, place: Place, shape: tuple[int, ...], dtype: "np.dtype[Any]"
    ) -> NDArray[Any]:
        """The array at a place of a rank's region."""
        key = (rank, place.window, place.length)
        window = self._maps.get(key)
        if window is None:
            start = (rank + 1) * REGION + place.window
            window = self._maps[key] = mmap.mmap(self._fd, place.length, offset=start)
        return np.ndarray(shape, dtype, window, place.offset)

    def clear(self) -> None:
        """Let all go; each ends with the last array over it."""
        self._maps.clear()
