"""Reading and writing at places in files, whole or not at all, and telling files apart."""

import hashlib
import os
import stat
from collections.abc import Sequence
from typing import Any

from mcinfer.errors import InvalidInputError

_WHOLE_BYTES = 64 << 20
"""Of files up to this size the digest is of all that is in them."""

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 64


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

    Of a large file the digest is of samples, its ends among them; the end of an .npz file holds the check
    sums of all its arrays. Times are left out: they change where the content does not, and the other way
    round.

    Args:
        descriptor: Of the file.
        what: To call it by.

    Returns:
        Size and digest, as JSON can say them.

    Raises:
        InvalidInputError: It is no regular file.
    """
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        raise InvalidInputError(f"{what} is not a regular file")
    digest = hashlib.sha256()
    for start in _sampled(info.st_size):
        digest.update(os.pread(descriptor, _SAMPLE_BYTES, start))
    return {"size": info.st_size, "sha256": digest.hexdigest()}


def _sampled(size: int) -> Sequence[int]:
    """Where the samples of a file begin: all one after another, or some at equal distances."""
    if size <= _WHOLE_BYTES:
        return range(0, size, _SAMPLE_BYTES)
    last = size - _SAMPLE_BYTES
    return [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
