"""The arrays of an input file, which may be far larger than memory: read by rows, in order.

::

    .npz, stored       ── at its place in the file, with the check sum of all up to there
    .npz, compressed   ── through the decompressor, in order; whole where the rows do not lie in order
    .npy               ── at its place in the file

An array is taken as bytes ``[outer, rows, inner]``: the sizes before the axis that it is cut along, that
axis, and the sizes after it with the element's. In Fortran's order it is so with its axes reversed.
"""

import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.large_batches.positioned import read_at, stamp

_CHECKED_BYTES = 64 << 20
"""Archives of so much content are read through before any work: damage is found then, not within it."""

_BLOCK_BYTES = 1 << 20
_MAGIC_BYTES = 6
_NPY_MAGIC = b"\x93NUMPY"

_LOCAL_HEADER_BYTES = 30
_LOCAL_LENGTHS = struct.Struct("<HH")
_LOCAL_LENGTHS_AT = 26
"""APPNOTE.TXT of PKWARE, 4.3.7: lengths of the name and of the extra field, which follow the header."""


Rows = Callable[[int, int], NDArray[Any]]
"""Gives the rows from the first number to before the second."""


class Content(Protocol):
    """The bytes of an array.

    Attributes:
        in_order: Whether to read them in another order takes far longer.
    """

    in_order: bool

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Read from that byte of the array on."""

    def check(self) -> None:
        """Compare the check sum, if there is one, of what is not going to be read in order."""


class _PlacedContent:
    """Bytes that lie in the file as they are."""

    in_order = False

    def __init__(
        self, descriptor: int, start: int, size: int, sums: tuple[int, int] | None
    ) -> None:
        """Take where they lie.

        Args:
            descriptor: Of the file.
            start: Where they begin in it.
            size: How many they are.
            sums: CRC-32 of what comes before them, and of that and all of them; None if nobody knows.
        """
        self._descriptor = descriptor
        self._start = start
        self._size = size
        self._sums = sums
        self._summed = 0

    def fill(self, buffer: memoryview, offset: int) -> None:
        self._check(offset)
        read_at(self._descriptor, buffer, self._start + offset)
        if offset == self._summed:
            self._sum(buffer)

    def check(self) -> None:
        self._check(self._size)

    def _check(self, stop: int) -> None:
        """Sum up to that byte: what work that was interrupted has read already may be damaged."""
        if self._sums is None or stop <= self._summed:
            return
        block = memoryview(bytearray(_BLOCK_BYTES))
        while self._summed < stop:
            part = block[: stop - self._summed]
            read_at(self._descriptor, part, self._start + self._summed)
            self._sum(part)

    def _sum(self, data: memoryview) -> None:
        if self._sums is None or not len(data):
            return
        running, expected = zlib.crc32(data, self._sums[0]), self._sums[1]
        self._sums = (running, expected)
        self._summed += len(data)
        if self._summed == self._size and running != expected:
            raise zipfile.BadZipFile(f"Bad CRC-32 of the {self._size} bytes at {self._start}")


class _PackedContent:
    """Bytes that have to be decompressed in order."""

    in_order = True

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, header_bytes: int) -> None:
        """Take which member of an archive holds them, after so many others."""
        self._archive = archive
        self._info = info
        self._header_bytes = header_bytes
        self._file: IO[bytes] | None = None
        self._at = 0

    def fill(self, buffer: memoryview, offset: int) -> None:
        wanted = self._header_bytes + offset
        if self._file is None or self._at > wanted:
            self.close()
            self._file, self._at = self._archive.open(self._info), 0
        while self._at < wanted:
            self._at += len(self._take(min(_BLOCK_BYTES, wanted - self._at)))
        done = 0
        while done < len(buffer):
            part = self._take(min(_BLOCK_BYTES, len(buffer) - done))
            buffer[done : done + len(part)] = part
            done += len(part)
        self._at += done
        if self._at == self._info.file_size:
            self._file.read(1)  # finds the end, and with it the check sum

    def check(self) -> None:
        """It is compared at the end, which is always read."""

    def _take(self, most: int) -> bytes:
        data = b"" if self._file is None else self._file.read(most)
        if not data:
            raise EOFError(f"{self._info.filename} ends too early")
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array in a file, which is open for as long as it is read.

    Attributes:
        path: Of the file.
        dtype: As stored; strings are of NumPy's types of text.
        shape: Likewise.
        fortran: Whether the first axis is the fastest.
        content: Its bytes.
    """

    path: Path
    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    fortran: bool
    content: Content

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return prod(self.shape) * self.dtype.itemsize

    def whole(self) -> NDArray[Any]:
        """All of it.

        Raises:
            InvalidInputError: The file is damaged.
        """
        slowest = len(self.shape) - 1 if self.fortran else 0
        return self._read(slowest, 0, self.shape[slowest] if self.shape else 1)

    def rows(self, axis: int) -> Rows:
        """Reads its rows along an axis, which are to be asked for in order; raises as `whole`."""
        sizes, turned = self._order(axis)
        if prod(sizes[:turned]) != 1:
            if self.content.in_order:
                array, before = self.whole(), (slice(None),) * axis
                return lambda start, stop: array[(*before, slice(start, stop))]
            with _told(self.path):
                self.content.check()
        return partial(self._read, axis)

    def _order(self, axis: int) -> tuple[tuple[int, ...], int]:
        """The sizes as they lie in memory, the slowest first, and the axis among them."""
        if not self.fortran:
            return self.shape, axis
        return self.shape[::-1], len(self.shape) - 1 - axis

    def _read(self, axis: int, start: int, stop: int) -> NDArray[Any]:
        sizes, axis = self._order(axis) if self.shape else ((1,), 0)
        outer, count = prod(sizes[:axis]), sizes[axis]
        inner_bytes = prod(sizes[axis + 1 :]) * self.dtype.itemsize
        shape = (*sizes[:axis], stop - start, *sizes[axis + 1 :]) if self.shape else ()
        with _told(self.path):
            data = np.empty((outer, (stop - start) * inner_bytes), np.uint8)
            for i in range(outer if data.size else 0):
                self.content.fill(data[i].data, (i * count + start) * inner_bytes)
            array: NDArray[Any] = np.ndarray(shape, self.dtype, data.reshape(-1).data)
        return array.T if self.fortran else array


class InputFile:
    """An .npz or .npy file, open for reading; a context manager.

    Attributes:
        path: Of the file.
        stamp: See `mcinfer.large_batches.positioned.stamp`.
    """

    def __init__(self, path: Path) -> None:
        """Open it, and read what its arrays are like.

        Raises:
            InvalidInputError: It is neither, or it is damaged.
            OSError: It cannot be read.
        """
        self.path = path
        self._arrays: dict[str, StoredArray] = {}
        self._single: StoredArray | None = None
        with ExitStack() as stack:
            self._file = stack.enter_context(open(path, "rb", opener=_open_at_once))
            descriptor = self._file.fileno()
            self.stamp = stamp(descriptor, f"--input: {path}")
            with _told(path):
                magic = os.pread(descriptor, _MAGIC_BYTES, 0)
                if magic == _NPY_MAGIC:
                    self._single = self._read_npy(descriptor)
                else:
                    archive = stack.enter_context(zipfile.ZipFile(self._file))
                    self._read_npz(archive, descriptor)
            self._stack = stack.pop_all()

    def arrays(self, inputs: Sequence[str]) -> Mapping[str, StoredArray]:
        """The arrays by name.

        Args:
            inputs: The names of the model's inputs: an .npy file holds the only one.

        Raises:
            InvalidInputError: There are several, and one array without a name.
        """
        if self._single is None:
            return self._arrays
        if len(inputs) != 1:
            raise InvalidInputError(
                f"--input: {self.path} holds one array, expected an .npz file with {[*inputs]}"
            )
        return {inputs[0]: self._single}

    def check_unchanged(self) -> None:
        """Fail if somebody has written to the file since it was opened.

        Raises:
            InvalidInputError: It is not what it was.
        """
        if stamp(self._file.fileno(), f"--input: {self.path}") != self.stamp:
            raise InvalidInputError(f"--input: {self.path} changed while it was read")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _read_npy(self, descriptor: int) -> StoredArray:
        fortran, shape, dtype = _read_header(self._file)
        start, size = self._file.tell(), prod(shape) * dtype.itemsize
        if start + size > self.stamp["size"]:
            raise EOFError(f"the file has {self.stamp['size']} bytes, expected {start + size}")
        content = _PlacedContent(descriptor, start, size, None)
        return StoredArray(
            path=self.path, dtype=dtype, shape=shape, fortran=fortran, content=content
        )

    def _read_npz(self, archive: zipfile.ZipFile, descriptor: int) -> None:
        infos = {info.filename: info for info in archive.infolist()}
        if sum(info.file_size for info in infos.values()) <= _CHECKED_BYTES:
            damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"Bad CRC-32 for file {damaged!r}")
        for name, info in infos.items():
            with archive.open(info) as member:
                fortran, shape, dtype = _read_header(member)
                header_bytes = member.tell()
            expected = header_bytes + prod(shape) * dtype.itemsize
            if expected != info.file_size:
                raise ValueError(f"{name} has {info.file_size} bytes, expected {expected}")
            self._arrays[name.removesuffix(".npy")] = StoredArray(
                path=self.path,
                dtype=dtype,
                shape=shape,
                fortran=fortran,
                content=_content(archive, info, descriptor, header_bytes),
            )


def _open_at_once(path: str, flags: int) -> int:
    """Not blocking: it may be a pipe that nobody writes to."""
    return os.open(path, flags | os.O_NONBLOCK)


def _content(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, descriptor: int, header_bytes: int
) -> Content:
    if info.compress_type != zipfile.ZIP_STORED:
        return _PackedContent(archive, info, header_bytes)
    header = os.pread(descriptor, _LOCAL_HEADER_BYTES, info.header_offset)
    start = info.header_offset + len(header)
    start += sum(_LOCAL_LENGTHS.unpack_from(header, _LOCAL_LENGTHS_AT))
    before = bytearray(header_bytes)
    read_at(descriptor, memoryview(before), start)
    sums = (zlib.crc32(before), info.CRC)
    return _PlacedContent(descriptor, start + header_bytes, info.file_size - header_bytes, sums)


def _read_header(file: IO[bytes]) -> tuple[bool, tuple[int, ...], "np.dtype[Any]"]:
    """What a file in the format .npy says: whether in Fortran's order, shape, dtype.

    See numpy.lib.format. Version 3 is for fields with names beyond Latin-1, which no model takes.
    """
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"got version {version} of the format .npy, expected (1, 0) or (2, 0)")
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be read, since that may run what is in them")
    if any(size < 0 for size in shape):
        raise ValueError(f"got shape {shape}, expected sizes of 0 or more")
    # The order says nothing of arrays with one dimension, which NumPy stores as either.
    return fortran and len(shape) > 1, shape, dtype


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Say which file it is that cannot be read.

    Raises:
        InvalidInputError: In the place of whatever NumPy, zipfile, zlib and their like raise.
        McinferError: There is not enough memory.
        OSError: The system's own errors, as they are.
    """
    try:
        yield
    except InvalidInputError:
        raise
    except MemoryError as exc:
        raise McinferError(f"--input: {path}: {exc}") from exc
    except Exception as exc:
        if isinstance(exc, OSError) and exc.errno is not None:
            raise
        kind = "an .npy file" if path.suffix == ".npy" else "an .npz file"
        raise InvalidInputError(f"--input: {path} is not {kind}: {exc}") from exc
