"""The arrays of an input file, which may be far larger than memory: read by rows, in order.

::

    .npz, stored       ── at its place in the file, with the check sum of all up to there
    .npz, compressed   ── through the decompressor, in order; whole where the rows do not lie in order
    .npy               ── at its place in the file

An array is taken as bytes ``[outer, rows, inner]``: the sizes before the axis that it is cut along, that
axis, and the sizes after it with the element's. In Fortran's order it is so with its axes reversed.
"""

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.large_batches.contents import Content, Tell, member, nobody, placed
from mcinfer.large_batches.positioned import stamp

_CHECKED_BYTES = 64 << 20
"""Archives of so much content are read through before any work: damage is found then, not within it."""

_OF_ANOTHER_PACKAGE = 2
"""What `numpy.dtype.isbuiltin` is then."""

_MAGIC_BYTES = 6
_NPY_MAGIC = b"\x93NUMPY"

Rows = Callable[[int, int], NDArray[Any]]
"""Gives the rows from the first number to before the second."""


class DamagedInputError(InvalidInputError):
    """The content of the input file cannot be what was written there: what came of it is no better."""


def lacks(dtype: "np.dtype[Any]") -> bool:
    """Whether a type is one that NumPy itself lacks, and its files cannot name."""
    return dtype.isbuiltin == _OF_ANOTHER_PACKAGE


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

    def read_as(self, dtype: "np.dtype[Any] | None") -> Self:
        """The same as of that type, where NumPy, which lacks it, has stored it as so many bytes each."""
        raw = self.dtype.kind == "V" and self.dtype.names is None and self.dtype.subdtype is None
        if dtype is None or not raw or not lacks(dtype) or dtype.itemsize != self.dtype.itemsize:
            return self
        return replace(self, dtype=dtype)

    def bytes_before(self, axis: int, row: int) -> int:
        """How many have to be read in order before that row: all, where rows do not lie in order."""
        sizes, turned = self._order(axis)
        if prod(sizes[:turned]) != 1:
            return self.nbytes
        return row * prod(sizes[turned + 1 :]) * self.dtype.itemsize

    def rows(self, axis: int, first: int = 0, tell: Tell = nobody) -> Rows:
        """Reads its rows along an axis, which are to be asked for in order; raises as `whole`.

        Args:
            axis: Of the array.
            first: The row that is asked for first.
            tell: Is told how far reading is of what comes before it.
        """
        sizes, turned = self._order(axis)
        if self.content.in_order and prod(sizes[:turned]) != 1:
            array, before = self.whole(), (slice(None),) * axis
            return lambda start, stop: array[(*before, slice(start, stop))]
        with _told(self.path):
            self.content.skip(self.bytes_before(axis, first), tell)
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
            InvalidInputError: It is neither, or it is damaged or cannot be opened.
            OSError: It cannot be read.
        """
        self.path = path
        self._arrays: dict[str, StoredArray] = {}
        self._single: StoredArray | None = None
        with ExitStack() as stack:
            try:
                self._file = stack.enter_context(open(path, "rb", opener=_open_at_once))
            except OSError as exc:
                raise InvalidInputError(f"--input: {path}: {exc.strerror}") from exc
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
        content = placed(descriptor, start, size)
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
            with archive.open(info) as file:
                fortran, shape, dtype = _read_header(file)
                header_bytes = file.tell()
            expected = header_bytes + prod(shape) * dtype.itemsize
            if expected != info.file_size:
                raise ValueError(f"{name} has {info.file_size} bytes, expected {expected}")
            self._arrays[name.removesuffix(".npy")] = StoredArray(
                path=self.path,
                dtype=dtype,
                shape=shape,
                fortran=fortran,
                content=member(archive, info, descriptor, header_bytes),
            )


def _open_at_once(path: str, flags: int) -> int:
    """Not blocking: it may be a pipe that nobody writes to."""
    return os.open(path, flags | os.O_NONBLOCK)


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
        DamagedInputError: In the place of whatever NumPy, zipfile, zlib and their like raise.
        InvalidInputError: The file has become shorter.
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
        error = InvalidInputError if isinstance(exc, EOFError) else DamagedInputError
        raise error(f"--input: {path} is not {kind}: {exc}") from exc
