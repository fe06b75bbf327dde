"""Tensors as the protocol has them, in JSON and in bytes, and as arrays.

Bytes are little-endian and in C order; an element of type BYTES is its length (uint32) and its bytes.
Sources: inference_rest.md of https://github.com/kserve/open-inference-protocol, and Triton's extension for
binary tensors (docs/protocol/extension_binary_data.md of https://github.com/triton-inference-server/server).
"""

import struct
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.protocol import MAX_MESSAGE_BYTES
from mcinfer.serve.documents import InputDocument
from mcinfer.specs import ELEMENT_TYPES, STRING, TensorSpec

_FLOATS = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bfloat16": "BF16"}

DATATYPES = {kind: _FLOATS.get(kind, kind.upper()) for kind in ELEMENT_TYPES} | {STRING: "BYTES"}
"""By element type, the protocol's name, or our own where it has none: ``FLOAT8_E4M3FN``."""

MAX_DEPTH = 100
"""How deep the JSON of a tensor may be nested; Triton has the same limit."""


@dataclass(frozen=True, slots=True)
class TensorHead:
    """An input of a request, whose type and shape are such as the model takes.

    Attributes:
        spec: The model's input.
        given: What the request says of it.

    Raises:
        InvalidInputError: Its type or shape is another.
    """

    spec: TensorSpec
    given: InputDocument

    def __post_init__(self) -> None:
        if self.given.datatype != (expected := DATATYPES[self.spec.element_type]):
            raise self.wrong(f"got datatype {self.given.datatype[:99]!r}, expected {expected}")
        # NumPy has no array of the last kind, even without elements.
        shape = self.given.shape
        if not self.spec.admits(shape) or prod(filter(None, shape)) >= 1 << 58:
            raise self.wrong(f"got shape {[*shape]}, expected {shape_of(self.spec)}")

    def said(self) -> str:
        """What came, and what was expected, in words."""
        given = self.given
        kind, got, expected = given.datatype, [*given.shape], shape_of(self.spec)
        return f"input '{self.spec.name}': got {kind} {got}, expected {kind} {expected}"

    def wrong(self, why: str) -> InvalidInputError:
        return InvalidInputError(f"input {self.spec}: {why}")

    def check(self, got: int, what: str = "elements", each: int = 1) -> None:
        """Raise `InvalidInputError` unless there are so many elements, or bytes of `each`."""
        if got != (expected := prod(self.given.shape) * each):
            shape = [*self.given.shape]
            raise self.wrong(f"got {got} {what} for shape {shape}, expected {expected}")

    def check_bytes(self, got: int) -> None:
        """Raise `InvalidInputError` unless it has so many bytes, or of strings no more than a message has."""
        if self.spec.element_type != STRING:
            self.check(got, "bytes", self.spec.dtype.itemsize)
        elif got > MAX_MESSAGE_BYTES:
            raise self.wrong(f"got {got} bytes of strings, expected at most {MAX_MESSAGE_BYTES}")

    @property
    def shareable(self) -> bool:
        """Whether it can lie in shared memory: strings cannot."""
        return self.spec.element_type != STRING


def shape_of(spec: TensorSpec) -> list[int]:
    """The shape as the protocol has it: -1 for a size that only a request decides."""
    return [size if isinstance(size, int) else -1 for size in spec.shape]


def from_json(head: TensorHead) -> NDArray[Any]:
    """An input's values in JSON, nested or flat, as an array; null stands for NaN, which JSON lacks.

    Raises:
        InvalidInputError: There are more or fewer values, or values of another kind.
    """
    data, depth = head.given.data, 1
    if not isinstance(data, list):
        raise head.wrong(f"got {str(data)[:100]!r} as data, expected an array")
    while data and type(data[0]) is list and {*map(type, data)} == {list}:
        data, depth = [*chain.from_iterable(data)], depth + 1
        if depth > MAX_DEPTH:
            raise head.wrong(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")
    kind, array = head.spec.element_type, None
    if kind == STRING:
        if {*map(type, data)} <= {str, bytes}:
            array = np.fromiter(data, object, len(data))
    else:
        array = _numbers(data, kind, head.spec.dtype)
    if array is None:
        raise head.wrong(f"expected {kind} as data")
    head.check(array.size)
    return array.reshape(head.given.shape)


def _numbers(data: list[Any], kind: str, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The values as an array; None if one is no number of this kind.

    NumPy does not choose the array's type: for texts it would be as wide as the longest of them.
    """
    try:
        total = sum(data)  # a whole number if all are; by far the fastest look at each
    except TypeError:
        total = None
    if kind == "bool":
        return np.array(data, dtype) if {*map(type, data)} <= {bool} else None
    if "int" in kind:
        if type(total) is not int:
            return None
        try:
            wide = np.array(data, np.uint64 if kind[0] == "u" else np.int64)
        except OverflowError:
            return None
        array = wide.astype(dtype, copy=False)
        return array if array is wide or np.array_equal(array, wide) else None
    if total is None and not {*map(type, data)} <= {int, float, bool, type(None)}:
        return None
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        return np.array(data, dtype if dtype.char in "efd" else np.float64).astype(
            dtype, copy=False
        )


def from_bytes(head: TensorHead, data: bytes | memoryview) -> NDArray[Any]:
    """The tensor that the bytes are: an array over them, but of strings.

    Raises:
        InvalidInputError: They are too few or too many.
    """
    head.check_bytes(len(data))
    if head.spec.element_type != STRING:
        return np.frombuffer(data, head.spec.dtype).reshape(head.given.shape)
    values: list[bytes] = []
    place, most, data = 0, prod(head.given.shape), bytes(data)
    while place < len(data) and len(values) <= most:
        start = place + 4
        length = struct.unpack_from("<I", data, place)[0] if start <= len(data) else len(data)
        place = start + length
        values.append(data[start:place])
    if place != len(data):
        raise head.wrong(f"its {len(data)} bytes are not {most} strings, each after its length")
    head.check(len(values))
    return np.fromiter(values, object, len(values)).reshape(head.given.shape)


def bytes_of(array: NDArray[Any]) -> memoryview:
    """An array's elements as bytes: a view of them, but of strings."""
    if array.dtype.kind in "OUST":
        encoded = [v.encode() if isinstance(v, str) else bytes(v) for v in array.ravel().tolist()]
        return memoryview(b"".join(struct.pack("<I", len(v)) + v for v in encoded))
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")


def json_of(name: str, array: NDArray[Any]) -> Any:
    """An output's elements for JSON, flat, in C order; NaN and infinity become null.

    Raises:
        InvalidInputError: JSON has no such values.
    """
    if array.dtype.kind in "OUST":
        try:
            return [v if isinstance(v, str) else bytes(v).decode() for v in array.ravel().tolist()]
        except UnicodeDecodeError as exc:
            text = f"output {name!r} is not UTF-8: ask for it as binary data"
            raise InvalidInputError(text).refusing(None) from exc  # the request was accepted
    if array.dtype.kind == "c":
        text = f"output {name!r} is complex: ask for it as binary data"
        raise InvalidInputError(text).refusing(None)
    if array.dtype.isbuiltin != 1 or array.dtype == np.float16:  # of ml_dtypes
        array = array.astype(np.float32)
    return np.ascontiguousarray(array).reshape(-1)


def raw_shape(spec: TensorSpec, size: int) -> list[int]:
    """The shape of a tensor of which only its bytes came: one row, if two of its sizes are free.

    Raises:
        InvalidInputError: So many bytes do not tell the shape.
    """
    shape = shape_of(spec)
    if shape.count(-1) > 1:
        shape[0] = abs(shape[0])
    if spec.element_type == STRING:
        if shape[:1] not in ([], [1], [-1]) or any(size != 1 for size in shape[1:]):
            text = f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
            raise InvalidInputError(f"{text}, it has {spec}")
        return [1] * len(shape)
    if shape.count(-1) > 1:
        text = f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one"
        raise InvalidInputError(f"{text} variable-sized dimension: {spec}")
    row = abs(prod(shape)) * spec.dtype.itemsize
    return [size // (row or 1) if n == -1 else n for n in shape]
