"""Protobuf's wire format (https://protobuf.dev/programming-guides/encoding/): fields by their numbers.

Files may be hostile, so each length is checked.
"""

import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_TAG = (1 << 32) - 1
_MAX_VARINT = (1 << 64) - 1
_MAX_VARINT_BYTES = 10


class MalformedError(Exception):
    """The bytes are not such a message; the text says what was found, and at which byte."""


def read_varint(data: mmap.mmap | bytes, at: int, end: int) -> tuple[int, int]:
    """The unsigned number at `at`, and where it ends."""
    value = shift = 0
    for place in range(at, min(end, at + _MAX_VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MAX_VARINT, place + 1
        shift += 7
    raise MalformedError(f"a number cut short or of more than 64 bits at byte {at}")


class ProtoMessage:
    """The fields of the message in bytes `first` to `last`, by their numbers.

    Where a field that is not repeated comes more than once, the last one counts, as in protobuf's readers.
    """

    def __init__(self, data: mmap.mmap | bytes, first: int, last: int) -> None:
        self.data = data
        self.first = first
        # By tag, which is field number and wire type: a number and where it ends, or bounds of bytes.
        self._fields: dict[int, list[tuple[int, int]]] = {}
        at = first
        while at < last:
            start = at
            tag = data[at]
            if tag < 0x80:  # nearly always, and a call takes longer than all the rest
                at += 1
            else:
                tag, at = read_varint(data, at, last)
            if not 8 <= tag <= _MAX_TAG:
                raise MalformedError(f"field number {tag >> 3} at byte {start}")
            kind = tag & 7
            if kind in _FIXED_BYTES:
                value = _FIXED_BYTES[kind]
            elif kind not in (_VARINT, _LENGTH):
                raise MalformedError(f"wire type {kind} at byte {start}")
            elif at < last and data[at] < 0x80:  # as above
                value, at = data[at], at + 1
            else:
                value, at = read_varint(data, at, last)
            if kind != _VARINT:
                if value > last - at:
                    raise MalformedError(
                        f"a field of {value} bytes where {last - at} are left at byte {start}"
                    )
                value, at = at, at + value
            self._fields.setdefault(tag, []).append((value, at))

    def numbers(self, field: int) -> list[int]:
        return [value for value, _ in self._fields.get(field << 3 | _VARINT, ())]

    def all_numbers(self, field: int, most: int = sys.maxsize) -> list[int]:
        """Those of a repeated field, packed or not; where there are more than `most`, at least one more."""
        numbers = self.numbers(field)
        for at, end in self.parts(field):
            while at < end and len(numbers) <= most:
                value, at = read_varint(self.data, at, end)
                numbers.append(value)
        return numbers

    def number(self, field: int) -> int:
        return (self.numbers(field) or [0])[-1]

    def parts(self, field: int) -> Sequence[tuple[int, int]]:
        """The bounds of texts, messages or packed numbers."""
        return self._fields.get(field << 3 | _LENGTH, ())

    def text(self, field: int, errors: str = "strict") -> str:
        for bounds in self.parts(field)[-1:]:
            return self._decoded(bounds, errors)
        return ""

    def texts(self, field: int) -> list[str]:
        return [self._decoded(bounds, "strict") for bounds in self.parts(field)]

    def _decoded(self, bounds: tuple[int, int], errors: str) -> str:
        try:
            return self.data[slice(*bounds)].decode(errors=errors)
        except UnicodeDecodeError:
            raise MalformedError(f"a name that is not UTF-8 at byte {bounds[0]}") from None

    def messages(self, *fields: int) -> Iterator["ProtoMessage"]:
        """The messages in the first field; with more fields, those within them."""
        field, *inner = fields
        for bounds in self.parts(field):
            message = ProtoMessage(self.data, *bounds)
            yield from message.messages(*inner) if inner else (message,)

    def with_parts(self, others: Mapping[int, Sequence[bytes]]) -> bytes:
        """The message's bytes, with other texts or messages in these fields; grouped by field."""
        data, written = self.data, []
        for tag, values in self._fields.items():
            if tag & 7 == _LENGTH and tag >> 3 in others:
                continue
            for value, end in values:
                if tag & 7 == _VARINT:
                    written.append(encode_field(tag >> 3, value))
                elif tag & 7 == _LENGTH:
                    written.append(encode_field(tag >> 3, data[value:end]))
                else:
                    written.append(_encoded(tag) + data[value:end])
        for number, parts in others.items():
            written += [encode_field(number, part) for part in parts]
        return b"".join(written)


def encode_field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _encoded(number << 3 | _VARINT) + _encoded(value)
    return _encoded(number << 3 | _LENGTH) + _encoded(len(value)) + value


def _encoded(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
