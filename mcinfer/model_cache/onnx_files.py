"""The files of an ONNX model, and what they show without loading the model.

Only regular files are opened: a pipe waits for its writer, a device has no end, and opening one may have
side effects. If a file grows meanwhile, only its first size is read.

The model's file is mapped and walked field by field, in protobuf's wire format
(https://protobuf.dev/programming-guides/encoding/) and by the field numbers of onnx.proto. Weights are
skipped by their length, so a file of gigabytes costs no more than its graph. The package `onnx` is no
substitute: every worker looks at its model, and for one of 1.07 GB `onnx.load` takes 2.4 s and 1,050 MB of
each process's own memory, beside 0.5 s for its import, where this takes 0.05 s and no memory. Files may be
hostile, so each length is checked against the end of its message.
"""

import mmap
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from pathlib import Path

from mcinfer.errors import BuildError
from mcinfer.specs import ELEMENT_TYPES, STRING

# Any file.

_CHUNK_BYTES = 1 << 20

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """The status of a file, which is not opened for that.

    Raises:
        BuildError: It is no regular file, or its name is none that a file can have.
        OSError: There is none, or it cannot be reached.
    """
    try:
        info = os.stat(path)
    except ValueError as exc:  # a zero in the path
        raise BuildError(f"{os.fspath(path)!r}: {exc}, expected the path of a file") from exc
    _check_kind(os.fspath(path), info)
    return info


def _check_kind(name: str, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "something else")
        raise BuildError(f"{name}: got {kind}, expected a regular file")


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor of a file, closed at the end, and the file's status.

    Raises:
        BuildError: It is no regular file.
        OSError: It cannot be opened.
    """
    check_regular(path)
    # Not blocking: by now a pipe may be in its place.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        info = os.fstat(descriptor)
        _check_kind(os.fspath(path), info)
        yield descriptor, info
    finally:
        os.close(descriptor)


def chunks(descriptor: int, size: int) -> Iterator[memoryview]:
    """The first `size` bytes of a file, or all if it has fewer, in parts that share one buffer."""
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(size, 1))))
    at = 0
    while at < size and (count := os.preadv(descriptor, [buffer[: size - at]], at)):
        yield buffer[:count]
        at += count


def external_files(model: Path, folder: Path | None, locations: Sequence[str]) -> list[Path]:
    """The files of a model's external data, by the rules of ONNX Runtime (1.29 to 1.31).

    Args:
        model: Absolute path of the model.
        folder: Absolute path of the folder of the data, if it is not the model's.
        locations: As written in the model.

    Returns:
        Their paths, in the same order; links are not resolved.

    Raises:
        BuildError: One is missing, is no regular file, or lies outside of the folder: by an absolute path, by
            ``..`` or through a link. Where the model itself is a link, as in the caches of model hubs, its
            target's folder is allowed as well.
    """
    base = model.parent if folder is None else folder
    allowed = [os.path.realpath(base)]
    target = os.path.realpath(model)
    if folder is None and os.path.exists(target):  # that of a memfd does not exist
        allowed.append(os.path.dirname(target))
    paths = []
    for location in locations:
        path = base / location
        try:
            real = Path(os.path.realpath(path))
            if os.path.isabs(location) or not any(map(real.is_relative_to, allowed)):
                raise BuildError(
                    f"{model}: got external data at {location!r}, expected a relative path that "
                    f"stays within {base}"
                )
            _check_kind(f"{model}: external data {path}", os.stat(path))
        except (OSError, ValueError) as exc:  # a zero in the path is a ValueError
            reason = exc.strerror if isinstance(exc, OSError) else exc  # not the path once more
            raise BuildError(f"{model}: external data {path} cannot be read: {reason}") from exc
        paths.append(path)
    return paths


def model_files(model: Path, folder: Path | None = None) -> list[Path]:
    """An ONNX model's file and those of its external data.

    Raises:
        BuildError: As `scan` and `external_files`.
        OSError: The model cannot be opened.
    """
    return [model, *external_files(model, folder, scan(model).external)]


# Protobuf's wire format.

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_TAG = (1 << 32) - 1
_MAX_VARINT = (1 << 64) - 1
_MAX_VARINT_BYTES = 10


class _MalformedError(Exception):
    """The bytes are no ONNX model; says what was found, and at which byte."""


def _number(number: int) -> int:
    """The tag of a field that holds a number."""
    return number << 3 | _VARINT


def _bytes(number: int) -> int:
    """The tag of a field that holds text, bytes, a message or packed numbers."""
    return number << 3 | _LENGTH


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """The unsigned number at `at`, and where it ends."""
    value = shift = 0
    for place in range(at, min(end, at + _MAX_VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MAX_VARINT, place + 1
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
        if not 8 <= tag <= _MAX_TAG:
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


def _has(data: mmap.mmap, bounds: tuple[int, int], *tags: int) -> bool:
    """Whether a message has a field of the first tag that holds a message with one of the next, and so on."""
    return not tags or any(
        tag == tags[0] and _has(data, (first, last), *tags[1:])
        for tag, first, last in _fields(data, *bounds)
    )


# ONNX's messages.

_MAX_SIZE = (1 << 63) - 1
_MAX_DEPTH = 100
"""Messages within messages: what protobuf's own readers allow, so that no model has more."""

_MAX_DIMENSIONS = 1000
"""Dimensions of a tensor: NumPy has 64 at most, and a file of nothing but sizes is read for minutes."""

_MAIN_DOMAIN = "ai.onnx"
"""ONNX's own operators; a file may leave the name empty as well."""

_BITS = {element.onnx: element.bits for element in ELEMENT_TYPES.values()}

_IR_VERSION, _PRODUCER, _PRODUCER_VERSION = _number(1), _bytes(2), _bytes(3)  # ModelProto
_GRAPH, _OPSET = _bytes(7), _bytes(8)  # ModelProto
_DOMAIN, _VERSION = _bytes(1), _number(2)  # OperatorSetIdProto
_OPERATOR, _OPERATOR_DOMAIN = _bytes(4), _bytes(7)  # NodeProto
_INITIALIZER, _INPUT, _OUTPUT = _bytes(5), _bytes(11), _bytes(12)  # GraphProto
_DIMS, _DIMS_PACKED = _number(1), _bytes(1)  # TensorProto
_DATA_TYPE, _NAME = _number(2), _bytes(8)  # TensorProto
_EXTERNAL_DATA, _DATA_LOCATION = _bytes(13), _number(14)  # TensorProto
_EXTERNAL = 1  # TensorProto.DataLocation
_KEY, _VALUE = _bytes(1), _bytes(2)  # StringStringEntryProto
_INPUT_NAME, _INPUT_TYPE = _bytes(1), _bytes(2)  # ValueInfoProto
_TENSOR_TYPE = _bytes(1)  # TypeProto
_ELEM_TYPE, _SHAPE = _number(1), _bytes(2)  # TypeProto.Tensor
_DIM, _DIM_VALUE = _bytes(1), _number(1)  # TensorShapeProto

_MODEL, _NODE, _TENSOR = "ModelProto", "NodeProto", "TensorProto"
_HOLDS = {
    _MODEL: {_GRAPH: "GraphProto", _bytes(25): "FunctionProto"},
    "FunctionProto": {_bytes(7): _NODE, _bytes(11): "AttributeProto"},
    "GraphProto": {_bytes(1): _NODE, _INITIALIZER: _TENSOR, _bytes(15): "SparseTensorProto"},
    _NODE: {_bytes(5): "AttributeProto"},
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
"""The fields of each message through which nodes and tensors are reached, and what they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """A constant of the model.

    Attributes:
        name: As in the model.
        onnx_type: Its element type's number in ONNX (`TensorProto.DataType`).
        shape: Empty for a scalar.
        location: Place of its elements if they lie in another file.
    """

    name: str
    onnx_type: int
    shape: tuple[int, ...]
    location: str = ""

    @property
    def bytes(self) -> int:
        """Size of its elements by its shape; 0 for strings, and types that are not known."""
        bits = min(prod(self.shape), _MAX_SIZE) * _BITS.get(self.onnx_type, 0)
        return min((bits + 7) // 8, _MAX_SIZE)


@dataclass(slots=True, kw_only=True)
class OnnxFile:
    """What `scan` found.

    Attributes:
        ir_version: 0 if the file does not say.
        producer: What wrote the model, and its version; empty if the file does not say.
        opsets: Versions of the operator sets, by domain.
        inputs: The names of the main graph's inputs.
        unranked: Inputs and outputs of the main graph that may have any number of dimensions.
        initializers: Those of the main graph, by name; sparse ones are not among them.
        constants: How many other tensors there are: of nodes (Constant), subgraphs, functions; of sparse
            ones both.
        weight_bytes: Bytes of the elements of all tensors.
        external_bytes: The part of `weight_bytes` that lies in other files.
        places: Where those lie, as written in the file. Tensors anywhere in the model count: in subgraphs,
            attributes and functions too.
        operators: How many nodes there are by domain and type: subgraphs and functions count once each,
            however often they run.
    """

    ir_version: int = 0
    producer: str = ""
    opsets: dict[str, int] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)
    unranked: set[str] = field(default_factory=set)
    initializers: dict[str, Initializer] = field(default_factory=dict)
    constants: int = 0
    weight_bytes: int = 0
    external_bytes: int = 0
    places: set[str] = field(default_factory=set)
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def external(self) -> tuple[str, ...]:
        """`places`, sorted."""
        return tuple(sorted(self.places))


def scan(path: str | os.PathLike[str]) -> OnnxFile:
    """Look through an ONNX file.

    The file must not be made shorter meanwhile: it is mapped, and the kernel ends a process that
    reads a mapping past its file's end.

    Raises:
        BuildError: It is not an ONNX model, or no regular file.
        OSError: It cannot be opened.
    """
    with open_regular(path) as (descriptor, info):
        if not info.st_size:
            raise BuildError(f"{os.fspath(path)}: got an empty file, expected an ONNX model")
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    found = OnnxFile()
    nodes: Counter[tuple[bytes, bytes]] = Counter()
    with data:
        try:
            if not _has(data, (0, len(data)), _GRAPH):
                raise _MalformedError("no graph")
            _walk(data, _MODEL, (0, len(data)), found, nodes)
        except _MalformedError as exc:
            raise BuildError(f"{os.fspath(path)}: got {exc}, expected an ONNX model") from None
    for (domain, operator), count in nodes.items():
        kind = domain.decode(errors="replace") or _MAIN_DOMAIN, operator.decode(errors="replace")
        found.operators[kind] += count
    found.producer = found.producer.strip()
    found.constants -= len(found.initializers)
    return found


def _walk(
    data: mmap.mmap,
    message: str,
    bounds: tuple[int, int],
    found: OnnxFile,
    nodes: Counter[tuple[bytes, bytes]],
    depth: int = 1,
) -> None:
    """Note what a message has in it, at any depth, and its nodes by domain and type.

    Several graphs of one model are one graph in parts.
    """
    if depth > _MAX_DEPTH:
        raise _MalformedError(
            f"more than {_MAX_DEPTH} messages within each other at byte {bounds[0]}"
        )
    holds = _HOLDS[message]
    is_node, operator, domain = message == _NODE, b"", b""
    for tag, first, last in _fields(data, *bounds):
        held = holds.get(tag)
        if held is None and is_node:
            if tag == _OPERATOR:
                operator = data[first:last]
            elif tag == _OPERATOR_DOMAIN:
                domain = data[first:last]
        elif held == _TENSOR:
            tensor = _tensor(data, first, last)
            _note_tensor(found, tensor)
            if depth == 2 and tag == _INITIALIZER and message == "GraphProto":
                found.initializers[tensor.name] = tensor
        elif held is not None:
            _walk(data, held, (first, last), found, nodes, depth + 1)
        elif depth == 1:
            _note_of_model(data, tag, first, last, found)
        elif depth == 2 and tag in (_INPUT, _OUTPUT) and message == "GraphProto":
            _note_value(data, tag, (first, last), found)
    if is_node:
        nodes[domain, operator] += 1


def _note_tensor(found: OnnxFile, tensor: Initializer) -> None:
    found.constants += 1  # less the initialisers, which are counted by their names
    found.weight_bytes += tensor.bytes
    if tensor.location:
        found.places.add(tensor.location)
        found.external_bytes += tensor.bytes


def _note_of_model(data: mmap.mmap, tag: int, value: int, end: int, found: OnnxFile) -> None:
    if tag == _IR_VERSION:
        found.ir_version = value
    elif tag in (_PRODUCER, _PRODUCER_VERSION):
        found.producer += f" {_text(data, value, end)}"
    elif tag == _OPSET:
        domain, version = "", 0
        for inner, first, last in _fields(data, value, end):
            if inner == _DOMAIN:
                domain = _text(data, first, last)
            elif inner == _VERSION:
                version = first
        found.opsets[domain or _MAIN_DOMAIN] = version


def _note_value(data: mmap.mmap, tag: int, bounds: tuple[int, int], found: OnnxFile) -> None:
    """An input or output of the main graph."""
    name = ""
    for inner, first, last in _fields(data, *bounds):
        if inner == _INPUT_NAME:
            name = _text(data, first, last)
    if tag == _INPUT:
        found.inputs.add(name)
    kind = (_INPUT_TYPE, _TENSOR_TYPE)
    if _has(data, bounds, *kind) and not _has(data, bounds, *kind, _SHAPE):
        found.unranked.add(name)


def _tensor(data: mmap.mmap, first: int, last: int) -> Initializer:
    name, location, onnx_type, external = "", "", 0, False
    shape: list[int] = []
    for tag, value, end in _fields(data, first, last):
        if tag == _DIMS:
            shape.append(value)
        elif tag == _DIMS_PACKED:
            at = value
            while at < end and len(shape) <= _MAX_DIMENSIONS:
                size, at = _varint(data, at, end)
                shape.append(size)
        elif tag == _DATA_TYPE:
            onnx_type = value
        elif tag == _NAME:
            name = _text(data, value, end)
        elif tag == _DATA_LOCATION:
            external = value == _EXTERNAL
        elif tag == _EXTERNAL_DATA:
            key = text = ""
            for inner, *inside in _fields(data, value, end):
                if inner == _KEY:
                    key = _text(data, *inside)
                elif inner == _VALUE:
                    text = _text(data, *inside)
            if key == "location":
                location = text
        if len(shape) > _MAX_DIMENSIONS:
            raise _MalformedError(
                f"a tensor of more than {_MAX_DIMENSIONS} dimensions at byte {first}"
            )
    if shape and max(shape) > _MAX_SIZE:
        raise _MalformedError(f"initialiser {name!r} with a negative size at byte {first}")
    if external and not location:
        raise _MalformedError(f"external data without a location at byte {first}")
    return Initializer(
        name=name,
        onnx_type=onnx_type,
        shape=tuple(shape),
        location=location if external else "",
    )


# What is added to a file.

_FIRST_OVERRIDABLE = 4
"""The first IR version in which initialisers need not be inputs (onnx.proto, `GraphProto.initializer`)."""

_MAX_MATCHES = 5


def added_inputs(model: OnnxFile, names: Sequence[str]) -> bytes:
    """What to append to a model's file to make initialisers inputs, which a run may then override.

    Protobuf's readers merge a second `graph` into the first, so the model's own bytes stay as they are.

    Args:
        model: What `scan` found in the file.
        names: Names of initialisers of the main graph, each once.

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


def _value_info(initializer: Initializer) -> bytes:
    """The `ValueInfoProto` of an input that an initialiser is the default of."""
    shape = b"".join(_field(_DIM, _field(_DIM_VALUE, size)) for size in initializer.shape)
    tensor = _field(_ELEM_TYPE, initializer.onnx_type) + _field(_SHAPE, shape)
    return _field(_INPUT_NAME, initializer.name.encode()) + _field(
        _INPUT_TYPE, _field(_TENSOR_TYPE, tensor)
    )


def _field(tag: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _encoded(tag) + _encoded(value)
    return _encoded(tag) + _encoded(len(value)) + value


def _encoded(value: int) -> bytes:
    """A number without a sign."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
