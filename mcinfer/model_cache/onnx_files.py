"""What can be known of an ONNX file without loading it: its initialisers, operators, and external data.

The file is mapped and walked field by field (`mcinfer.model_cache.wire`), by the field numbers of onnx.proto.
Weights are stepped over by their length, so that a file of gigabytes costs no more than its graph does. The
package `onnx` is not needed, nor is any of the file copied.
"""

import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod

from mcinfer.errors import BuildError
from mcinfer.model_cache import wire
from mcinfer.model_cache.wire import MalformedError, bytes_tag, mapped_model, number_tag
from mcinfer.specs import ELEMENT_TYPES, STRING

_MAX_SIZE = (1 << 63) - 1
_MAX_DEPTH = 100
"""Messages within messages: what protobuf's own readers allow, so that no model has more."""

_MAX_DIMENSIONS = 1000
"""Dimensions of a tensor: NumPy has 64 at most, and a file of nothing but sizes is read for minutes."""

_FIRST_OVERRIDABLE = 4
"""The first IR version in which initialisers need not be inputs (onnx.proto, `GraphProto.initializer`)."""

_MAX_MATCHES = 5

_MAIN_DOMAIN = "ai.onnx"
"""ONNX's own operators; a file may leave the name empty as well."""

_BITS = {element.onnx: element.bits for element in ELEMENT_TYPES.values()}

_IR_VERSION, _PRODUCER, _PRODUCER_VERSION = number_tag(1), bytes_tag(2), bytes_tag(3)  # ModelProto
_GRAPH, _OPSET = bytes_tag(7), bytes_tag(8)  # ModelProto
_DOMAIN, _VERSION = bytes_tag(1), number_tag(2)  # OperatorSetIdProto
_OPERATOR, _OPERATOR_DOMAIN = bytes_tag(4), bytes_tag(7)  # NodeProto
_INITIALIZER, _INPUT, _OUTPUT = bytes_tag(5), bytes_tag(11), bytes_tag(12)  # GraphProto
_DIMS, _DIMS_PACKED = number_tag(1), bytes_tag(1)  # TensorProto
_DATA_TYPE, _NAME = number_tag(2), bytes_tag(8)  # TensorProto
_EXTERNAL_DATA, _DATA_LOCATION = bytes_tag(13), number_tag(14)  # TensorProto
_EXTERNAL = 1  # TensorProto.DataLocation
_KEY, _VALUE = bytes_tag(1), bytes_tag(2)  # StringStringEntryProto
_INPUT_NAME, _INPUT_TYPE = bytes_tag(1), bytes_tag(2)  # ValueInfoProto
_TENSOR_TYPE = bytes_tag(1)  # TypeProto
_ELEM_TYPE, _SHAPE = number_tag(1), bytes_tag(2)  # TypeProto.Tensor
_DIM, _DIM_VALUE = bytes_tag(1), number_tag(1)  # TensorShapeProto

_NODE, _TENSOR = "NodeProto", "TensorProto"
_HOLDS = {
    "ModelProto": {_GRAPH: "GraphProto", bytes_tag(25): "FunctionProto"},
    "FunctionProto": {bytes_tag(7): _NODE, bytes_tag(11): "AttributeProto"},
    "GraphProto": {
        bytes_tag(1): _NODE,
        _INITIALIZER: _TENSOR,
        bytes_tag(15): "SparseTensorProto",
    },
    _NODE: {bytes_tag(5): "AttributeProto"},
    "AttributeProto": {
        bytes_tag(5): _TENSOR,
        bytes_tag(6): "GraphProto",
        bytes_tag(10): _TENSOR,
        bytes_tag(11): "GraphProto",
        bytes_tag(22): "SparseTensorProto",
        bytes_tag(23): "SparseTensorProto",
    },
    "SparseTensorProto": {bytes_tag(1): _TENSOR, bytes_tag(2): _TENSOR},
}
"""The fields of each message through which nodes and tensors are reached, and what they hold."""

_Visit = Callable[[int, int], None]
"""Called with the bounds of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """A constant of the model's main graph.

    Attributes:
        name: As in the model.
        onnx_type: Its element type's number in ONNX (`TensorProto.DataType`).
        shape: Empty for a scalar.
        external: Whether its elements lie in another file.
    """

    name: str
    onnx_type: int
    shape: tuple[int, ...]
    external: bool = False

    @property
    def bytes(self) -> int:
        """That its elements take, as its shape says; 0 for strings, and types that are not known."""
        bits = min(prod(self.shape), _MAX_SIZE) * _BITS.get(self.onnx_type, 0)
        return min((bits + 7) // 8, _MAX_SIZE)


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


# ONNX's messages.


def _location(data: mmap.mmap, first: int, last: int) -> str | None:
    """Where a tensor's data lies, if not in the model itself."""
    location, external = "", False
    for tag, value, end in wire.fields(data, first, last):
        if tag == _DATA_LOCATION:
            external = value == _EXTERNAL
        elif tag == _EXTERNAL_DATA:
            key, text = wire.texts(data, (value, end), _KEY, _VALUE)
            if key == "location":
                location = text
    if external and not location:
        raise MalformedError(f"external data without a location at byte {first}")
    return location if external else None


def _walk(
    data: mmap.mmap,
    message: str,
    bounds: tuple[int, int],
    visits: Mapping[str, _Visit],
    depth: int = 1,
) -> None:
    """Visit all messages of these kinds within a message, at any depth."""
    if depth > _MAX_DEPTH:
        raise MalformedError(
            f"more than {_MAX_DEPTH} messages within each other at byte {bounds[0]}"
        )
    holds = _HOLDS[message]
    for tag, first, last in wire.fields(data, *bounds):
        held = holds.get(tag)
        if held is None:
            continue
        visit = visits.get(held)
        if visit is not None:
            visit(first, last)
        if held != _TENSOR:
            _walk(data, held, (first, last), visits, depth + 1)


def _initializer(data: mmap.mmap, first: int, last: int) -> Initializer:
    name, onnx_type, external = "", 0, False
    shape: list[int] = []
    for tag, value, end in wire.fields(data, first, last):
        if tag == _DIMS:
            shape.append(value)
        elif tag == _DIMS_PACKED:
            at = value
            while at < end and len(shape) <= _MAX_DIMENSIONS:
                size, at = wire.varint(data, at, end)
                shape.append(size)
        elif tag == _DATA_TYPE:
            onnx_type = value
        elif tag == _NAME:
            name = wire.text(data, value, end)
        elif tag == _DATA_LOCATION:
            external = value == _EXTERNAL
        if len(shape) > _MAX_DIMENSIONS:
            raise MalformedError(
                f"a tensor of more than {_MAX_DIMENSIONS} dimensions at byte {first}"
            )
    if shape and max(shape) > _MAX_SIZE:
        raise MalformedError(f"initialiser {name!r} with a negative size at byte {first}")
    return Initializer(name=name, onnx_type=onnx_type, shape=tuple(shape), external=external)


def _graph_fields(data: mmap.mmap) -> Iterator[tuple[int, int, int]]:
    for tag, first, last in wire.fields(data, 0, len(data)):
        if tag == _GRAPH:  # all of them together are one graph
            yield from wire.fields(data, first, last)


def _model(data: mmap.mmap) -> OnnxFile:
    versions = [value for tag, value, _ in wire.fields(data, 0, len(data)) if tag == _IR_VERSION]
    if not wire.has(data, (0, len(data)), _GRAPH):
        raise MalformedError("no graph")
    inputs: set[str] = set()
    initializers: dict[str, Initializer] = {}
    for tag, first, last in _graph_fields(data):
        if tag == _INPUT:
            inputs.update(wire.texts(data, (first, last), _INPUT_NAME))
        elif tag == _INITIALIZER:
            initializer = _initializer(data, first, last)
            initializers[initializer.name] = initializer
    external: set[str] = set()

    def find_external(first: int, last: int) -> None:
        location = _location(data, first, last)
        if location is not None:
            external.add(location)

    _walk(data, "ModelProto", (0, len(data)), {_TENSOR: find_external})
    return OnnxFile(
        ir_version=versions[-1] if versions else 0,
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
    with mapped_model(path) as data:
        return _model(data)


# What is in it, for a user to read.


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxContents:
    """What `contents` found.

    Attributes:
        ir_version: 0 if the file does not say.
        producer: What wrote the model, and its version; empty if the file does not say.
        opsets: Versions of the operator sets, by domain.
        operators: How many nodes there are by domain and type, those with the most first: subgraphs and
            functions count once each, however often they run.
        weights: Initialisers of the main graph, sparse ones not among them.
        constants: All other tensors: of nodes (Constant), subgraphs, functions; of sparse ones both.
        weight_bytes: Of the elements of all of them.
        external_bytes: Of them, those that lie in other files.
        external: Where, as in `OnnxFile`.
        unranked: Inputs and outputs of the main graph that may have any number of dimensions.
    """

    ir_version: int
    producer: str
    opsets: dict[str, int]
    operators: dict[tuple[str, str], int]
    weights: int
    constants: int
    weight_bytes: int
    external_bytes: int
    external: tuple[str, ...]
    unranked: frozenset[str]


def _opsets(data: mmap.mmap) -> dict[str, int]:
    found = {}
    for tag, *bounds in wire.fields(data, 0, len(data)):
        if tag == _OPSET:
            domain, version = "", 0
            for inner, value, end in wire.fields(data, *bounds):
                if inner == _DOMAIN:
                    domain = wire.text(data, value, end)
                elif inner == _VERSION:
                    version = value
            found[domain or _MAIN_DOMAIN] = version
    return found


def _unranked(data: mmap.mmap) -> Iterator[str]:
    for tag, *value in _graph_fields(data):
        bounds, kind = (value[0], value[1]), (_INPUT_TYPE, _TENSOR_TYPE)
        is_tensor = tag in (_INPUT, _OUTPUT) and wire.has(data, bounds, *kind)
        if is_tensor and not wire.has(data, bounds, *kind, _SHAPE):
            yield from wire.texts(data, bounds, _INPUT_NAME)


def contents(path: str | os.PathLike[str]) -> OnnxContents:
    """Look through an ONNX file for what a user wants to know of it.

    Raises:
        BuildError: As `scan`.
        OSError: Likewise.
    """
    operators: Counter[tuple[str, str]] = Counter()
    tensors: list[Initializer] = []

    def count(first: int, last: int) -> None:
        operator, domain = wire.texts(data, (first, last), _OPERATOR, _OPERATOR_DOMAIN)
        operators[domain or _MAIN_DOMAIN, operator] += 1

    def keep(first: int, last: int) -> None:
        tensors.append(_initializer(data, first, last))

    with mapped_model(path) as data:
        model = _model(data)
        _walk(data, "ModelProto", (0, len(data)), {_NODE: count, _TENSOR: keep})
        producer = wire.texts(data, (0, len(data)), _PRODUCER, _PRODUCER_VERSION)
        return OnnxContents(
            ir_version=model.ir_version,
            producer=" ".join(producer).strip(),
            opsets=_opsets(data),
            operators=dict(operators.most_common()),
            weights=len(model.initializers),
            constants=len(tensors) - len(model.initializers),
            weight_bytes=sum(tensor.bytes for tensor in tensors),
            external_bytes=sum(tensor.bytes for tensor in tensors if tensor.external),
            external=model.external,
            unranked=frozenset(_unranked(data)),
        )


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
            match for name in unknown[:_MAX_MATCHES] for match in get_close_matches(name, known)
        ]
        hint = f"such as {close[:_MAX_MATCHES]}" if close else f"of which there are {len(known)}"
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
