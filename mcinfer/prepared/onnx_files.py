"""What can be known of an ONNX file without loading it: its initialisers, and where external data lies.

The file is mapped and its wire format walked (https://protobuf.dev/programming-guides/encoding/); field
numbers are those of onnx.proto. Weights are stepped over by their length, so that a file of gigabytes
costs no more than its graph does. The package `onnx` is not needed, nor is any of the file copied.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches

from mcinfer.errors import BuildError
from mcinfer.prepared.files import open_regular
from mcinfer.specs import ELEMENT_TYPES, STRING

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MOST_TAG = (1 << 32) - 1
_MOST_VARINT = (1 << 64) - 1
_MOST_VARINT_BYTES = 10
_MOST_SIZE = (1 << 63) - 1
_MOST_DEPTH = 100
"""Messages within messages: what protobuf's own readers allow, so that no model has more."""

_MOST_DIMENSIONS = 1000
"""Dimensions of a tensor: NumPy has 64 at most, and a file of nothing but sizes is read for minutes."""

_FIRST_OVERRIDABLE = 4
"""The first IR version in which initialisers need not be inputs (onnx.proto, `GraphProto.initializer`)."""

_MOST_MATCHES = 5


def _number(field: int) -> int:
    """The tag of a field that holds a number."""
    return field << 3 | _VARINT


def _bytes(field: int) -> int:
    """The tag of a field that holds text, bytes, a message or packed numbers."""
    return field << 3 | _LENGTH


_IR_VERSION, _GRAPH = _number(1), _bytes(7)  # ModelProto
_INITIALIZER, _INPUT = _bytes(5), _bytes(11)  # GraphProto
_DIMS, _DIMS_PACKED, _DATA_TYPE, _NAME = _number(1), _bytes(1), _number(2), _bytes(8)  # TensorProto
_EXTERNAL_DATA, _DATA_LOCATION = _bytes(13), _number(14)  # TensorProto
_EXTERNAL = 1  # TensorProto.DataLocation
_KEY, _VALUE = _bytes(1), _bytes(2)  # StringStringEntryProto
_INPUT_NAME, _INPUT_TYPE = _bytes(1), _bytes(2)  # ValueInfoProto
_TENSOR_TYPE = _bytes(1)  # TypeProto
_ELEM_TYPE, _SHAPE = _number(1), _bytes(2)  # TypeProto.Tensor
_DIM, _DIM_VALUE = _bytes(1), _number(1)  # TensorShapeProto

_TENSOR = "TensorProto"
_HOLDS = {
    "ModelProto": {_GRAPH: "GraphProto", _bytes(25): "FunctionProto"},
    "FunctionProto": {_bytes(7): "NodeProto", _bytes(11): "AttributeProto"},
    "GraphProto": {_bytes(1): "NodeProto", _INITIALIZER: _TENSOR, _bytes(15): "SparseTensorProto"},
    "NodeProto": {_bytes(5): "AttributeProto"},
    "AttributeProto": {
        _bytes(5): _TENSOR,
        _bytes(6): "GraphProto",
        _bytes(10): _TENSOR,
        _bytes(11): "GraphProto",
        _bytes(22): "SparseTensorProto",
        _bytes(23): "SparseTensorProto",
    },
    "SparseTensorProto": {_bytes(1): _TENSOR, _bytes(2): _TENSOR},
}
"""The fields of each message through which tensors are reached, and what they hold."""


class _MalformedError(Exception):
    """The bytes are no ONNX model; says what was found, and at which byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """A constant of the model's main graph.

    Attributes:
        name: As in the model.
        onnx_type: Its element type's number in ONNX (`TensorProto.DataType`).
        shape: Empty for a scalar.
    """

    name: str
    onnx_type: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFile:
    """What `scan` found.

    Attributes:
        ir_version: 0 if the file does not say.
        inputs: The names of the main graph's inputs.
        initializers: Those of the main graph, by name; sparse ones are not among them.
        external: Where external data lies, as written in the file: sorted, each place once. Of
            tensors anywhere in the model: in subgraphs, attributes and functions too.
    """

    ir_version: int
    inputs: frozenset[str]
    initializers: dict[str, Initializer]
    external: tuple[str, ...]


# The wire format.


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, without a sign, and where it ends."""
    value = shift = 0
    for place in range(at, min(end, at + _MOST_VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MOST_VARINT, place + 1
        shift += 7
    raise _MalformedError(f"a number cut short or of more than 64 bits at byte {at}")


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields of the message in bytes `at` to `end`, in the file's order.

    Yields:
        The field's tag, then its value and where it ends if it is a number, or else the bounds of
        its bytes.
    """
    while at < end:
        start = at
        tag = data[at]
        if tag < 0x80:  # nearly always, and a call takes longer than all the rest
            at += 1
        else:
            tag, at = _varint(data, at, end)
        if not 8 <= tag <= _MOST_TAG:
            raise _MalformedError(f"field number {tag >> 3} at byte {start}")
        kind = tag & 7
        if kind in _FIXED_BYTES:
            value = _FIXED_BYTES[kind]
        elif kind not in (_VARINT, _LENGTH):
            raise _MalformedError(f"wire type {kind} at byte {start}")
        elif at < end and data[at] < 0x80:  # as above
            value, at = data[at], at + 1
        else:
            value, at = _varint(data, at, end)
        if kind == _VARINT:
            yield tag, value, at
            continue
        first, at = at, at + value
        if at > end:
            raise _MalformedError(
                f"a field of {value} bytes where {end - first} are left at byte {start}"
            )
        yield tag, first, at


def _text(data: mmap.mmap, first: int, last: int) -> str:
    try:
        return data[first:last].decode()
    except UnicodeDecodeError:
        raise _MalformedError(f"a name that is not UTF-8 at byte {first}") from None


def _texts(data: mmap.mmap, bounds: tuple[int, int], *tags: int) -> tuple[str, ...]:
    """The text fields of these tags; empty where there is none, and the last where there are several."""
    found = dict.fromkeys(tags, "")
    for tag, first, last in _fields(data, *bounds):
        if tag in found:
            found[tag] = _text(data, first, last)
    return tuple(found.values())


@contextmanager
def _mapped(path: str | os.PathLike[str]) -> Iterator[mmap.mmap]:
    with open_regular(path) as (descriptor, info):
        if not info.st_size:
            raise BuildError(f"{os.fspath(path)}: got an empty file, expected an ONNX model")
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    with data:
        yield data


# ONNX's messages.


def _location(data: mmap.mmap, first: int, last: int) -> str | None:
    """Where a tensor's data lies, if not in the model itself."""
    location, external = "", False
    for tag, value, end in _fields(data, first, last):
        if tag == _DATA_LOCATION:
            external = value == _EXTERNAL
        elif tag == _EXTERNAL_DATA:
            key, text = _texts(data, (value, end), _KEY, _VALUE)
            if key == "location":
                location = text
    if external and not location:
        raise _MalformedError(f"external data without a location at byte {first}")
    return location if external else None


def _find_external(
    data: mmap.mmap, message: str, bounds: tuple[int, int], found: set[str], depth: int = 1
) -> None:
    """Add to `found` the locations of all external tensors within a message."""
    if depth > _MOST_DEPTH:
        raise _MalformedError(
            f"more than {_MOST_DEPTH} messages within each other at byte {bounds[0]}"
        )
    holds = _HOLDS[message]
    for tag, first, last in _fields(data, *bounds):
        held = holds.get(tag)
        if held is None:
            continue
        if held != _TENSOR:
            _find_external(data, held, (first, last), found, depth + 1)
        elif (location := _location(data, first, last)) is not None:
            found.add(location)


def _initializer(data: mmap.mmap, first: int, last: int) -> Initializer:
    name, onnx_type = "", 0
    shape: list[int] = []
    for tag, value, end in _fields(data, first, last):
        if tag == _DIMS:
            shape.append(value)
        elif tag == _DIMS_PACKED:
            at = value
            while at < end and len(shape) <= _MOST_DIMENSIONS:
                size, at = _varint(data, at, end)
                shape.append(size)
        elif tag == _DATA_TYPE:
            onnx_type = value
        elif tag == _NAME:
            name = _text(data, value, end)
        if len(shape) > _MOST_DIMENSIONS:
            raise _MalformedError(
                f"a tensor of more than {_MOST_DIMENSIONS} dimensions at byte {first}"
            )
    if shape and max(shape) > _MOST_SIZE:
        raise _MalformedError(f"initialiser {name!r} with a negative size at byte {first}")
    return Initializer(name=name, onnx_type=onnx_type, shape=tuple(shape))


def _model(data: mmap.mmap) -> OnnxFile:
    ir_version = 0
    graphs: list[tuple[int, int]] = []
    for tag, value, end in _fields(data, 0, len(data)):
        if tag == _IR_VERSION:
            ir_version = value
        elif tag == _GRAPH:
            graphs.append((value, end))
    if not graphs:
        raise _MalformedError("no graph")
    inputs: set[str] = set()
    initializers: dict[str, Initializer] = {}
    for bounds in graphs:  # all of them together are one graph
        for tag, first, last in _fields(data, *bounds):
            if tag == _INPUT:
                inputs.update(_texts(data, (first, last), _INPUT_NAME))
            elif tag == _INITIALIZER:
                initializer = _initializer(data, first, last)
                initializers[initializer.name] = initializer
    external: set[str] = set()
    _find_external(data, "ModelProto", (0, len(data)), external)
    return OnnxFile(
        ir_version=ir_version,
        inputs=frozenset(inputs),
        initializers=initializers,
        external=tuple(sorted(external)),
    )


def scan(path: str | os.PathLike[str]) -> OnnxFile:
    """Look through an ONNX file.

    The file must not be made shorter meanwhile: it is mapped, and the kernel ends a process that
    reads a mapping past its file's end.

    Raises:
        BuildError: It is not an ONNX model, or no regular file.
        OSError: It cannot be opened.
    """
    with _mapped(path) as data:
        try:
            return _model(data)
        except _MalformedError as exc:
            raise BuildError(f"{os.fspath(path)}: got {exc}, expected an ONNX model") from None


# What is added to a file.


def _encoded(value: int) -> bytes:
    """A number without a sign."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _field(tag: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _encoded(tag) + _encoded(value)
    return _encoded(tag) + _encoded(len(value)) + value


def _value_info(initializer: Initializer) -> bytes:
    """The `ValueInfoProto` of an input that an initialiser is the default of."""
    shape = b"".join(_field(_DIM, _field(_DIM_VALUE, size)) for size in initializer.shape)
    tensor = _field(_ELEM_TYPE, initializer.onnx_type) + _field(_SHAPE, shape)
    return _field(_INPUT_NAME, initializer.name.encode()) + _field(
        _INPUT_TYPE, _field(_TENSOR_TYPE, tensor)
    )


def _check_overridable(model: OnnxFile, names: Sequence[str]) -> None:
    if model.ir_version < _FIRST_OVERRIDABLE:
        raise BuildError(
            f"variable_weights {[*names]}: got IR version {model.ir_version}, "
            f"expected {_FIRST_OVERRIDABLE} or more: convert the model with a newer exporter"
        )
    known = model.initializers
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    if unknown:
        close = [
            match for name in unknown[:_MOST_MATCHES] for match in get_close_matches(name, known)
        ]
        hint = f"such as {close[:_MOST_MATCHES]}" if close else f"of which there are {len(known)}"
        raise BuildError(
            f"variable_weights: got {unknown}, expected names of the main graph's initialisers, {hint}"
        )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise BuildError(
            f"variable_weights: got {repeated} more than once, expected each name once"
        )
    strings = [name for name in names if known[name].onnx_type == ELEMENT_TYPES[STRING].onnx]
    if strings:
        raise BuildError(f"variable_weights: got {strings} of strings, expected tensors of numbers")


def added_inputs(model: OnnxFile, names: Sequence[str]) -> bytes:
    """What to append to a model's file to make initialisers inputs, which a run may then override.

    Protobuf's readers merge a second `graph` into the first, so the model's own bytes stay as they are.

    Args:
        model: What `scan` found in the file.
        names: Of initialisers of the main graph, each once.

    Returns:
        A `ModelProto` with a graph of these inputs only; nothing if they are inputs already.

    Raises:
        BuildError: A name is unknown, comes twice or is of strings, or the model's IR version is too old.
    """
    if names:
        _check_overridable(model, names)
    missing = [model.initializers[name] for name in names if name not in model.inputs]
    graph = b"".join(_field(_INPUT, _value_info(initializer)) for initializer in missing)
    return _field(_GRAPH, graph) if graph else b""
