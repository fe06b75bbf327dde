"""The bytes of an array in a file: at their place, or to be decompressed in order.

What comes before the bytes that are wanted is read as well where there is a check sum of all.
"""

import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import IO, Protocol

from mcinfer.large_batches.positioned import read_at

_BLOCK_BYTES = 1 << 20

_LOCAL_HEADER_BYTES = 30
_LOCAL_LENGTHS = struct.Struct("<HH")
_LOCAL_LENGTHS_AT = 26
"""APPNOTE.TXT of PKWARE, 4.3.7: lengths of the name and of the extra field, which follow the header."""

Tell = Callable[[int], None]
"""Is told of so many bytes more that are read only to come to what is wanted."""


def nobody(_count: int) -> None:
    """For those whom nobody watches."""


class Content(Protocol):
    """The bytes of an array.

    Attributes:
        in_order: Whether to read them in another order takes far longer.
    """

    in_order: bool

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Read from that byte of the array on."""

    def skip(self, stop: int, tell: Tell) -> None:
        """Go on to that byte of the array: of what comes before it, at least the check sum is needed."""


class _Placed:
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
        self.skip(offset, nobody)
        read_at(self._descriptor, buffer, self._start + offset)
        if offset == self._summed:
            self._sum(buffer)

    def skip(self, stop: int, tell: Tell) -> None:
        # What work that was interrupted has read already may be damaged.
        if self._sums is None or stop <= self._summed:
            return
        block = memoryview(bytearray(_BLOCK_BYTES))
        while self._summed < stop:
            part = block[: stop - self._summed]
            read_at(self._descriptor, part, self._start + self._summed)
            self._sum(part)
            tell(len(part))

    def _sum(self, data: memoryview) -> None:
        if self._sums is None or not len(data):
            return
        running, expected = zlib.crc32(data, self._sums[0]), self._sums[1]
        self._sums = (running, expected)
        self._summed += len(data)
        if self._summed == self._size and running != expected:
            raise zipfile.BadZipFile(f"Bad CRC-32 of the {self._size} bytes at {self._start}")


class _Packed:
    """Bytes that have to be decompressed in order."""

    in_order = True

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, header_bytes: int) -> None:
        """Take which member of an archive holds them, after so many others."""
        self._archive = archive
        self._info = info
        self._header_bytes = header_bytes
        self._file: IO[bytes] | None = None
        self._at = 0

    def skip(self, stop: int, tell: Tell) -> None:
        wanted = self._header_bytes + stop
        if self._file is None or self._at > wanted:
            self.close()
            self._file, self._at = self._archive.open(self._info), 0
        while self._at < wanted:
            count = len(self._take(min(_BLOCK_BYTES, wanted - self._at)))
            self._at += count
            tell(count)

    def fill(self, buffer: memoryview, offset: int) -> None:
        self.skip(offset, nobody)
        done = 0
        while done < len(buffer):
            part = self._take(min(_BLOCK_BYTES, len(buffer) - done))
            buffer[done : done + len(part)] = part
            done += len(part)
        self._at += done
        if self._file is not None and self._at == self._info.file_size:
            self._file.read(1)  # finds the end, and with it the check sum

    def _take(self, most: int) -> bytes:
        data = b"" if self._file is None else self._file.read(most)
        if not data:
            raise zipfile.BadZipFile(f"{self._info.filename} ends too early")
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def placed(descriptor: int, start: int, size: int) -> Content:
    """So many bytes that lie in a file from there on, and have no check sum."""
    return _Placed(descriptor, start, size, None)


def member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, descriptor: int, header_bytes: int
) -> Content:
    """The bytes of a member of an archive, after so many others; the descriptor is of the archive's file."""
    if info.compress_type != zipfile.ZIP_STORED:
        return _Packed(archive, info, header_bytes)
    header = os.pread(descriptor, _LOCAL_HEADER_BYTES, info.header_offset)
    start = info.header_offset + len(header)
    start += sum(_LOCAL_LENGTHS.unpack_from(header, _LOCAL_LENGTHS_AT))
    before = bytearray(header_bytes)
    read_at(descriptor, memoryview(before), start)
    sums = (zlib.crc32(before), info.CRC)
    return _Placed(descriptor, start + header_bytes, info.file_size - header_bytes, sums)
