"""Changes right messages, in bytes and in structure, to those that an intruder would send."""

import random
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from mcinfer.protocol import PREDICT, PREDICT_HEAD, REPLY, REPLY_HEAD

CORPUS = Path(__file__).parent / "corpus"

_MAX_CHANGES = 4
_KEYS = ("id", "request", "shard", "outputs", "inputs", "seconds", "kind", "text", "block", "size")
_HOSTILE: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 4, 5, 7, 12, 13, 64, 127, 128, 255, 2**31 - 1, 2**31, 2**32, 2**62),
    *(2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63), -(2**63) + 1),
    *(0.0, -0.0, -1.0, 1e308, float("nan"), float("inf"), float("-inf"), None, True, False),
    *("", b"", "\ud800", "\0", "x" * 300, b"\xff" * 40, "string", "float32", "int4"),
    *([], {}, [None], [0] * 65, [2**63 - 1] * 64, [[]] * 20, [[[[[[]]]]]], {"": {}}, {"id": 2}),
    *([0, 2**62], [2**32, 2**32], [2**62, 2**62, 2**62], [1] * 64),
    *(msgpack.ExtType(0, b""), msgpack.ExtType(5, b"\0" * 16), msgpack.Timestamp(0, 0)),
)
_PIECES = (b"\xc0", b"\x91" * 600, b"\xdd\xff\xff\xff\xff", b"\xdf\0\0\1\0", b"\xc1")
_NESTS = (b"\x91", b"\x81\xa2id", b"\xdc\0\1")


def corpus() -> list[bytes]:
    """All messages in the folder, by name."""
    return [path.read_bytes() for path in sorted(CORPUS.glob("*.msgpack"))]


def mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A message like this one; now and then the same."""
    for _ in range(rng.randrange(_MAX_CHANGES)):
        data = rng.choice(_MUTATORS)(rng, data, others)
    return data


def _change_bytes(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Bytes changed, cut, inserted, spliced, repeated or nested."""
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    match rng.randrange(6):
        case 0:
            middle = rng.randbytes(1) if data[start:] else b""
            return data[:start] + middle + data[start + 1 :]
        case 1:
            return data[:start] + data[end:] if rng.random() < 0.5 else data[:end]
        case 2:
            return data[:start] + rng.choice((*_PIECES, rng.randbytes(8))) + data[start:]
        case 3:
            other = rng.choice(others)
            return data[:start] + other[rng.randrange(len(other) + 1) :]
        case 4:
            end = min(end, start + 20)
            return data[:end] + data[start:end] * rng.randrange(1, 40) + data[end:]
        case _:
            return rng.choice(_NESTS) * rng.choice((1, 400, 2000)) + data


def _replace_value(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Another value at some place of the message's tree."""
    content = _read(data)
    if content is None:
        return data
    place = _any_place(rng, content)
    if place is not None:
        holder, key = place
        old = holder[key]
        if type(old) is int and rng.random() < 0.4:
            holder[key] = old + rng.choice((-64, -8, -1, 1, 4, 8, 16, 64))
        elif rng.random() < 0.2 and (other := _read(rng.choice(others))) is not None:
            found = _any_place(rng, other)
            holder[key] = found[0][found[1]] if found is not None else other
        else:
            holder[key] = rng.choice(_HOSTILE)
    return _write(content, data)


def _change_keys(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A field that is missing, unknown, or there twice."""
    content = _read(data)
    if type(content) is not dict or not content:
        return data
    match rng.randrange(3):
        case 0:
            del content[rng.choice([*content])]
        case 1:
            content[rng.choice((*_KEYS, 5, b"id"))] = rng.choice(_HOSTILE)
        case _:
            written = _write(content, data)
            again = msgpack.packb(rng.choice(_KEYS)) + msgpack.packb(rng.randrange(-1, 14))
            return bytes([written[0] + 1 & 0xFF]) + written[1:] + again
    return _write(content, data)


_MUTATORS = (*(_change_bytes,) * 7, _change_keys, *(_replace_value,) * 8)


def _read(data: bytes) -> Any:
    """The content of a message, as a map also for those with a head; None if it cannot be read."""
    try:
        if data[0] == PREDICT:
            *head, size, wide = PREDICT_HEAD.unpack_from(data)
            body = data[PREDICT_HEAD.size :]
            parts = map(_unpack, (body[:size], body[size:]))
            names = ("id", "request", "shard", "weights", "wide", "inputs", "outputs")
            return dict(zip(names, (*head, wide, *parts), strict=True))
        if data[0] == REPLY:
            outputs = _unpack(data[REPLY_HEAD.size :] or b"\x90")
            fields = ("id", "request", "shard", "seconds", "wide", "outputs")
            return dict(zip(fields, (*REPLY_HEAD.unpack_from(data), outputs), strict=True))
        return _unpack(data)
    except Exception:  # it was made unreadable before
        return None


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")


def _write(content: Any, data: bytes) -> bytes:
    try:
        with suppress(KeyError, TypeError, struct.error):  # then as a map after all
            return _with_head(content)
        return _pack(content)
    except (OverflowError, ValueError):  # a sum past what MessagePack can say
        return data


def _with_head(content: Any) -> bytes:
    """Raise KeyError for a message that has none."""
    if content["id"] == PREDICT:
        inputs = _pack(content["inputs"])
        head = (content["request"], content["shard"], content["weights"], len(inputs))
        return (
            PREDICT_HEAD.pack(PREDICT, *head, content["wide"]) + inputs + _pack(content["outputs"])
        )
    if content["id"] == REPLY:
        said = (REPLY, *(content[name] for name in ("request", "shard", "seconds", "wide")))
        outputs = content["outputs"]
        return REPLY_HEAD.pack(*said) + (b"" if outputs == [] else _pack(outputs))
    raise KeyError(content["id"])


def _pack(content: Any) -> bytes:
    return bytes(msgpack.packb(content, unicode_errors="surrogatepass"))


def _any_place(rng: random.Random, content: Any) -> tuple[Any, Any] | None:
    """Some place in a tree, each as likely: what holds it, and its key there."""
    places: list[tuple[Any, Any]] = []
    todo = [content]
    while todo:
        holder = todo.pop()
        if not isinstance(holder, (dict, list)):
            return None
        keys = holder if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            places.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                todo.append(holder[key])
    return rng.choice(places) if places else None
