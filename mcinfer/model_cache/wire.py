"""Protobuf's wire format (https://protobuf.dev/programming-guides/encoding/), read from a mapped file.

A message is walked field by field; what nobody asks for is stepped over by its length, and the file is not
copied. Whoever wrote the file may mean harm, so every length is checked against where its message ends.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from mcinfer.errors import BuildError
from mcinfer.model_cache.files import open_regular

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_TAG = (1 << 32) - 1
_MAX_VARINT = (1 << 64) - 1
_MAX_VARINT_BYTES = 10


class MalformedError(Exception):
    """The bytes are no ONNX model; says what was found, and at which byte."""


def number_tag(field: int) -> int:
    """The tag of a field that holds a number."""
    return field << 3 | _VARINT


def bytes_tag(field: int) -> int:
    """The tag of a field that holds text, bytes, a message or packed numbers."""
    return field << 3 | _LENGTH


def varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, without a sign, and where it ends.

    Raises:
        MalformedError: There is none before `end`.
    """
    value = shift = 0
    for place in range(at, min(end, at + _MAX_VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MAX_VARINT, place + 1
        shift += 7
    raise MalformedError(f"a number cut short or of more than 64 bits at byte {at}")


def fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields of the message in bytes `at` to `end`, in the file's order.

    Yields:
        The field's tag, then its value and where it ends if it is a number, or else the bounds of
        its bytes.

    Raises:
        MalformedError: These bytes are no message.
    """
    while at < end:
        start = at
        tag = data[at]
        if tag < 0x80:  # nearly always, and a call takes longer than all the rest
            at += 1
        else:
            tag, at = varint(data, at, end)
        if not 8 <= tag <= _MAX_TAG:
            raise MalformedError(f"field number {tag >> 3} at byte {start}")
        kind = tag & 7
        if kind in _FIXED_BYTES:
            value = _FIXED_BYTES[kind]
        elif kind not in (_VARINT, _LENGTH):
            raise MalformedError(f"wire type {kind} at byte {start}")
        elif at < end and data[at] < 0x80:  # as above
            value, at = data[at], at + 1
        else:
            value, at = varint(data, at, end)
        if kind == _VARINT:
            yield tag, value, at
            continue
        first, at = at, at + value
        if at > end:
            raise MalformedError(
                f"a field of {value} bytes where {end - first} are left at byte {start}"
            )
        yield tag, first, at


def text(data: mmap.mmap, first: int, last: int) -> str:
    """The text in bytes `first` to `last`."""
    try:
        return data[first:last].decode()
    except UnicodeDecodeError:
        raise MalformedError(f"a name that is not UTF-8 at byte {first}") from None


def texts(data: mmap.mmap, bounds: tuple[int, int], *tags: int) -> tuple[str, ...]:
    """The text fields of these tags; empty where there is none, and the last where there are several."""
    found = dict.fromkeys(tags, "")
    for tag, first, last in fields(data, *bounds):
        if tag in found:
            found[tag] = text(data, first, last)
    return tuple(found.values())


def has(data: mmap.mmap, bounds: tuple[int, int], *tags: int) -> bool:
    """Whether a message has a field of the first tag that holds a message with one of the next, and so on."""
    return not tags or any(
        tag == tags[0] and has(data, (first, last), *tags[1:])
        for tag, first, last in fields(data, *bounds)
    )


@contextmanager
def mapped_model(path: str | os.PathLike[str]) -> Iterator[mmap.mmap]:
    """An ONNX file's bytes, as long as the context lasts.

    The file must not be made shorter meanwhile: the kernel ends a process that reads a mapping past its
    file's end.

    Raises:
        BuildError: It is empty or no regular file, or the context was left with a `MalformedError`.
        OSError: It cannot be opened.
    """
    with open_regular(path) as (descriptor, info):
        if not info.st_size:
            raise BuildError(f"{os.fspath(path)}: got an empty file, expected an ONNX model")
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    with data:
        try:
            yield data
        except MalformedError as exc:
            raise BuildError(f"{os.fspath(path)}: got {exc}, expected an ONNX model") from None
