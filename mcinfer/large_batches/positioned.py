"""Reading and writing at places in files, whole or not at all, and telling files apart."""

import hashlib
import os
import stat
from typing import Any

from mcinfer.errors import InvalidInputError

_END_BYTES = 1 << 16


def read_at(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Fill a buffer of bytes with what a file holds from there on.

    Raises:
        EOFError: The file ends before.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise EOFError(
                f"the file ends at byte {offset + done}, expected {offset + len(buffer)} bytes"
            )
        done += count


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of some bytes to a file from there on."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def stamp(descriptor: int, what: str) -> dict[str, Any]:
    """What tells a file from others, and from what it is after a change, read in no time.

    The digest is of both ends, so that a change shows where the time was set back. The end of an .npz file
    holds the check sums of all its arrays.

    Args:
        descriptor: Of the file.
        what: To call it by.

    Returns:
        Size, time of the last change, and digest, as JSON can say them.

    Raises:
        InvalidInputError: It is no regular file.
    """
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        raise InvalidInputError(f"{what} is not a regular file")
    digest = hashlib.sha256()
    for start in (0, max(0, info.st_size - _END_BYTES)):
        digest.update(os.pread(descriptor, _END_BYTES, start))
    return {"size": info.st_size, "mtime_ns": info.st_mtime_ns, "sha256": digest.hexdigest()}
