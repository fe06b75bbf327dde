"""One piece of memory without a name, mapped by several processes.

A block is a memfd: it has no file in ``/dev/shm``, the size of ``/dev/shm`` does not limit it, and the
kernel frees it when the last descriptor and mapping are gone, even after a crash. It is sealed, so no
process can shrink it while another one reads (which would raise SIGBUS there).

Ownership: the `Block` owns the descriptor until `close`. The mapping lives as long as any object made by
`memory`: its reference count ends it, never a call.
"""

import ctypes
import fcntl
import functools
import mmap
import os

from mcinfer.config import Device
from mcinfer.errors import ProtocolError
from mcinfer.private import new_memory


@functools.lru_cache(maxsize=1024)
def _bytes_type(size: int) -> "type[ctypes.Array[ctypes.c_char]]":
    # ctypes itself keeps an array type only while something of that type lives.
    return ctypes.c_char * size


class Block:
    """A sealed memfd of `size` bytes, and this process's mapping of it; messages name its `number`."""

    __slots__ = ("_map", "address", "fd", "number", "size")

    device: Device | None = None  # a card's block has one, and a token (`mcinfer.cards.cuda`)
    token: bytes = b""

    def __init__(self, number: int, size: int, fd: int) -> None:
        # The descriptor is this object's from now on, even if it cannot be mapped.
        self.number = number
        self.size = size
        self.fd = fd
        try:
            self._map = mmap.mmap(fd, size)
        except (OSError, ValueError):
            self.close()
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, number: int, size: int) -> "Block":
        """Make a new block of zeros; pages take memory only once they are touched."""
        return cls(number, size, new_memory("mcinfer", size))

    @classmethod
    def attach(cls, number: int, size: int, fd: int) -> "Block":
        """Map a block that another process made; the descriptor is this object's from now on.

        Raises:
            ProtocolError: It has another size, cannot be written, or could be shrunk.
            OSError: This process has no memory or descriptor left.
        """
        try:
            _check(number, size, fd)
        except BaseException:
            os.close(fd)
            raise
        try:
            return cls(number, size, fd)
        except PermissionError as exc:
            raise ProtocolError(f"block {number}: got one that cannot be written: {exc}") from exc

    def memory(self, offset: int, size: int) -> "ctypes.Array[ctypes.c_char]":
        """Bytes of the block as a ctypes array, whose views keep the mapping alive."""
        return _bytes_type(size).from_buffer(self._map, offset)

    def __del__(self) -> None:
        self.close()  # as in a worker that is a thread of this process

    def close(self) -> None:
        """Close the descriptor; the mapping ends with its last view."""
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)


def _check(number: int, size: int, fd: int) -> None:
    """Raise `ProtocolError` unless the descriptor is a block of that size."""
    # First the seals: reading the size of another kind of file may wait for its file system.
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise ProtocolError(
            f"block {number}: got a file that is no memfd, expected {size} bytes sealed against shrinking"
        ) from exc
    actual = os.fstat(fd).st_size
    if not seals & fcntl.F_SEAL_SHRINK or actual != size or size == 0:
        raise ProtocolError(
            f"block {number}: got {actual} bytes with seals {seals:#x}, expected {size} bytes "
            "sealed against shrinking"
        )
