"""The files of an ONNX model, and what they show without loading the model.

Only regular files are opened: a pipe waits for its writer, a device has no end, and opening one may have
side effects. If a file grows meanwhile, only its first size is read.

The model's file is mapped and read in protobuf's wire format
(https://protobuf.dev/programming-guides/encoding/). Weights are skipped by their length, so a file of
gigabytes costs no more than its graph. The package `onnx` is no substitute: every worker looks at its model,
and for one of 1.07 GB `onnx.load` takes 2.4 s and 1,050 MB of each process's own memory, beside 0.5 s for its
import, where this takes 0.05 s and no memory. Files may be hostile, so each length is checked.
"""

import mmap
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.model_cache.protobuf import MalformedError, ProtoMessage, encode_field
from mcinfer.specs import ELEMENT_TYPES, STRING, Dimension

IR_SUFFIX = ".xml"
"""How the files of OpenVINO's own format, the IR, are named; OpenVINO finds the weights by it."""

_IR = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?<net\b")
"""How a graph in that format begins."""

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
    """The status of a file, which is not opened; BuildError if it is not a regular file."""
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
    """A descriptor of a file, closed at the end, and its status; BuildError if it is not a regular file."""
    check_regular(path)
    # Not blocking: by now a pipe may be in its place.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        info = os.fstat(descriptor)
        _check_kind(os.fspath(path), info)
        yield descriptor, info
    finally:
        os.close(descriptor)


def bytes_at(path: str | os.PathLike[str], at: int, count: int) -> bytes | None:
    """Some of a file's bytes; None for what cannot be read, or is no regular file."""
    with suppress(OSError, BuildError), open_regular(path) as (descriptor, _):
        return os.pread(descriptor, count, at)
    return None


def looks_like(path: str | os.PathLike[str]) -> str:
    """What a file that is no model is by its beginning; empty if it may be anything, or cannot be read."""
    start = bytes_at(path, 0, _LOOK_BYTES)
    if start is None:
        return ""
    if not start:
        return "an empty file"
    for pattern, what in _LOOKS.items():
        if re.match(pattern, start, re.DOTALL | re.IGNORECASE):
            return what
    if len(start) > 8 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32:
        return "safetensors, which are weights without a graph"
    with suppress(UnicodeDecodeError):  # the end of the text may be cut within a character
        text = start[:-3].decode() if len(start) == _LOOK_BYTES else start.decode()
        return "text" if all(c.isprintable() or c in "\t\n\r" for c in text) else ""
    return ""


_LOOK_BYTES = 1024

_LOOKS = {
    rb"version https://git-lfs": "a pointer of Git LFS (git lfs pull fetches the file itself)",
    rb"\s*(\xef\xbb\xbf\s*)?<(!doctype html|html|head)\b": "an HTML page",
    rb"PK\x03\x04.*/data\.pkl": "a PyTorch checkpoint (torch.onnx.export makes a model of it)",
    rb"PK\x03\x04": "a zip archive",
    rb"\x1f\x8b": "a gzip file",
    rb"\x80[\x02-\x05]": "a pickle, such as an old PyTorch checkpoint",
}


def chunks(descriptor: int, size: int) -> Iterator[memoryview]:
    """The first `size` bytes of a file, or all if it has fewer, in parts that share one buffer."""
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(size, 1))))
    at = 0
    while at < size and (count := os.preadv(descriptor, [buffer[: size - at]], at)):
        yield buffer[:count]
        at += count


def read_small(what: str, path: str, most_bytes: int) -> bytes:
    """The content of a file; InvalidInputError, of `what`, if it cannot be read or is larger than that."""
    try:
        with open_regular(path) as (descriptor, info):
            if info.st_size > most_bytes:
                raise InvalidInputError(
                    f"{what}: got {info.st_size} bytes, expected at most {most_bytes}"
                )
            return b"".join(bytes(chunk) for chunk in chunks(descriptor, info.st_size))
    except (OSError, BuildError) as exc:
        raise InvalidInputError(f"{what}: {exc}") from exc


def external_files(model: Path, folder: Path | None, locations: Sequence[str]) -> list[Path]:
    """The files of a model's external data, by the rules of ONNX Runtime (1.29 to 1.31).

    Args:
        model: Absolute path of the model.
        folder: Absolute path of the folder of the data, if it is not the model's.
        locations: As written in the model.

    Returns:
        Their paths, in the same order; links are not resolved.

    Raises:
        BuildError: A file is missing, is not a regular file, or is outside of the folder (absolute path,
            ``..`` or a link). If the model itself is a link, as in the caches of model hubs, the folder of
            its target is allowed as well.
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
    """A model's file and those of its weights (ONNX, IR); raises as `scan` and `external_files`."""
    return [model, *external_files(model, folder, ir_weights(model) or scan(model).external)]


def ir_weights(model: Path) -> tuple[str, ...]:
    """The name of the file beside an OpenVINO IR (``.xml``) that has its weights; none for other models."""
    weights = model.with_suffix(".bin")
    return (weights.name,) if model.suffix == IR_SUFFIX and os.path.lexists(weights) else ()


# ONNX's messages, by the field numbers of onnx.proto.

_MAX_SIZE = (1 << 63) - 1
_MAX_DEPTH = 100  # depth of nested messages that protobuf's own readers allow, so no model has more

_MAX_DIMENSIONS = 1000
"""Dimensions of a tensor: NumPy has 64 at most, and reading a file of nothing but sizes takes minutes."""

_MAIN_DOMAIN = "ai.onnx"  # ONNX's own operators; a file may also leave the name empty

RANDOM_OPERATORS = frozenset(
    {
        *(("ai.onnx", name) for name in ("Bernoulli", "Multinomial", "RandomNormal")),
        *(("ai.onnx", f"Random{name}") for name in ("NormalLike", "Uniform", "UniformLike")),
        ("com.microsoft", "Sampling"),
    }
)
"""Operators that draw random numbers, by domain and type."""

_ALL = range(1 << 10)

SIZED_BY = {
    ("ai.onnx", name): operands
    for names, operands in (
        ("Compress NonMaxSuppression NonZero Unique StringSplit ImageDecoder", _ALL),
        ("SequenceAt SequenceConstruct SequenceErase SequenceInsert SequenceMap", _ALL),
        ("ConcatFromSequence SplitToSequence Range", _ALL),
        ("ConstantOfShape HammingWindow HannWindow BlackmanWindow", range(1)),
        ("CenterCropPad Expand OneHot Pad Reshape Split Tile TopK Upsample", range(1, 2)),
        ("Resize", range(2, 4)),
        ("Slice", range(1, 5)),
    )
    for name in names.split()
} | {
    ("com.microsoft", name): _ALL
    for name in ("BeamSearch", "GreedySearch", "RemovePadding", "Sampling", "Unique")
}
"""By domain and type, the inputs of an operator whose values say how large its results are."""

_OF_SHAPE = frozenset({("ai.onnx", "Shape"), ("ai.onnx", "Size")})

_KNOWN_DOMAINS = frozenset(
    {"ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft"}
)
"""Others' operators may give results of any size."""

TRAINING_INPUT = {
    ("ai.onnx", "Dropout"): 2,
    ("com.microsoft", "BiasDropout"): 4,
    ("com.microsoft", "BitmaskDropout"): 2,
    ("com.microsoft", "BitmaskBiasDropout"): 4,
}
"""Operators that draw random numbers in training alone, and which of their inputs may say so."""

_NUMBER = re.compile(r"[0-9]{1,20}")
"""An offset or a length of external data, which ONNX writes as text."""

_BITS = {element.onnx: element.bits for element in ELEMENT_TYPES.values()}

_MAX_LABEL = 100  # characters of a node's name in a message

_EXTERNAL = 1  # TensorProto.DataLocation
_MODEL, _GRAPH, _NODE, _TENSOR = "ModelProto", "GraphProto", "NodeProto", "TensorProto"
_ATTRIBUTE, _FUNCTION, _SPARSE = "AttributeProto", "FunctionProto", "SparseTensorProto"
_GRAPH_OF_MODEL, _INITIALIZER = 7, 5
_TENSOR_RAW, _TENSOR_OUTSIDE, _TENSOR_LOCATION = 9, 13, 14
_HOLDS = {
    _MODEL: {_GRAPH_OF_MODEL: _GRAPH, 25: _FUNCTION},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _GRAPH: {1: _NODE, _INITIALIZER: _TENSOR, 15: _SPARSE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
}
"""The fields of each message that lead to nodes and tensors, and what they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """A constant of the model.

    Attributes:
        name: As in the model.
        onnx_type: Number of the element type in ONNX (`TensorProto.DataType`).
        shape: Empty for a scalar.
        location: The other file that its elements are in, if any.
        offset: Where they begin in that file, in bytes.
        length: Their bytes in that file; None if the model does not say.
    """

    name: str
    onnx_type: int
    shape: tuple[int, ...]
    location: str = ""
    offset: int = 0
    length: int | None = None

    @property
    def bytes(self) -> int:
        """Size of its elements by its shape; 0 for strings and unknown types."""
        bits = min(prod(self.shape), _MAX_SIZE) * _BITS.get(self.onnx_type, 0)
        return min((bits + 7) // 8, _MAX_SIZE)


@dataclass(slots=True, kw_only=True)
class OnnxFile:
    """What `scan` found.

    Attributes:
        ir_version: 0 if the file does not say.
        producer: The program that wrote the model, and its version; empty if the file does not say.
        metadata: The model's own properties.
        opsets: Versions of the operator sets, by domain.
        inputs: Names of the main graph's inputs.
        unranked: Inputs and outputs of the main graph that may have any number of dimensions.
        initializers: Those of the main graph, by name, without sparse ones.
        inner: Names of the initialisers of subgraphs, which may also be those of the main graph.
        constants: Number of other tensors: of nodes (Constant), subgraphs, functions; two for a sparse one.
        weight_bytes: Bytes of the elements of all tensors.
        external_bytes: The part of `weight_bytes` in other files.
        places: These files, as written in the model, of tensors anywhere: in subgraphs, attributes and
            functions too.
        operators: Number of nodes by domain and type. A subgraph or function counts once, however often it
            runs.
        random: The label of the first node that may draw random numbers; empty if none does.
        ragged: The label of a node whose result's size depends on its data; empty if there is none.
        fixed: Names of values that do not depend on the inputs' data: constants, and what follows from
            shapes.
        functions: Domains and names of the model's own functions.
    """

    ir_version: int = 0
    producer: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    opsets: dict[str, int] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)
    unranked: set[str] = field(default_factory=set)
    initializers: dict[str, Initializer] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)
    constants: int = 0
    weight_bytes: int = 0
    external_bytes: int = 0
    places: set[str] = field(default_factory=set)
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)
    random: str = ""
    ragged: str = ""
    fixed: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)

    @property
    def external(self) -> tuple[str, ...]:
        """`places`, sorted."""
        return tuple(sorted(self.places))


def scan(path: str | os.PathLike[str]) -> OnnxFile:
    """Look through an ONNX file, which must not be made shorter meanwhile.

    The file is mapped, and the kernel ends a process that reads a mapping past its file's end.

    Raises:
        BuildError: The file is not an ONNX model, or no regular file.
        OSError: The file cannot be opened.
    """
    with _mapped(path) as data:
        return _scan(ProtoMessage(data, 0, len(data)))


@contextmanager
def _mapped(path: str | os.PathLike[str]) -> Iterator[mmap.mmap]:
    """The bytes of a file; `BuildError` if it is empty, or turns out to be malformed."""
    with open_regular(path) as (descriptor, info):
        if not info.st_size:
            raise BuildError(f"{os.fspath(path)}: got an empty file, expected an ONNX model")
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    with data:
        try:
            yield data
        except MalformedError as exc:
            got = looks_like(path) or exc
            raise BuildError(f"{os.fspath(path)}: got {got}, expected an ONNX model") from None


Shapes = dict[str, tuple[Dimension, ...]]
"""By the name of an input or output."""


def declared_shapes(path: str | os.PathLike[str]) -> tuple[Shapes, Shapes]:
    """The shapes of the main graph's inputs, and of its outputs, that declare one; raises as `scan`."""
    sides: tuple[Shapes, Shapes] = ({}, {})
    with _mapped(path) as data:
        for graph in ProtoMessage(data, 0, len(data)).messages(_GRAPH_OF_MODEL):
            for shapes, field_number in zip(sides, (11, 12), strict=True):
                for value in graph.messages(field_number):
                    for shape in value.messages(2, 1, 2):
                        sizes = (size.text(2) or _size(size) for size in shape.messages(1))
                        shapes[value.text(1)] = tuple(sizes)
    return sides


def openvino_shapes(
    path: str | os.PathLike[str], sizes: Mapping[str, int] = {}
) -> tuple[Shapes, Shapes]:
    """`declared_shapes` of an ONNX model; nothing of an OpenVINO IR, which has none.

    Args:
        path: Of the model.
        sizes: Of symbolic dimensions, which take the places of their names.

    Raises:
        BuildError: The file is neither, the files of its weights are not where they may be, or no input has
            a dimension of such a name.
    """
    check_regular(path)
    model = Path(path).absolute()
    inputs: Shapes = {}
    outputs: Shapes = {}
    if _IR.match(bytes_at(path, 0, _LOOK_BYTES) or b""):
        if model.suffix != IR_SUFFIX:  # by which its weights are found
            raise BuildError(
                f"{path}: got an OpenVINO IR, expected a path that ends with {IR_SUFFIX!r}"
            )
        external_files(model, None, ir_weights(model))
    else:
        try:
            model_files(model)
            inputs, outputs = declared_shapes(path)
        except BuildError as exc:
            hint = "" if "external data" in str(exc) else ", or an OpenVINO IR (.xml)"
            raise BuildError(f"{exc}{hint}") from exc
    names = {size for shape in inputs.values() for size in shape if isinstance(size, str)}
    if unknown := [name for name in sizes if name not in names]:
        raise BuildError(f"free_dimensions: got {unknown}, expected some of {sorted(names)}")

    def fixed(size: Dimension) -> Dimension:
        return sizes.get(size, size) if isinstance(size, str) else size

    for side in (inputs, outputs):
        side |= {name: tuple(map(fixed, shape)) for name, shape in side.items()}
    return inputs, outputs


def _size(dimension: ProtoMessage) -> int | None:
    sizes = dimension.numbers(1)
    return sizes[-1] if sizes and sizes[-1] <= _MAX_SIZE else None  # negative ones are larger


def _scan(model: ProtoMessage) -> OnnxFile:
    if not model.parts(_GRAPH_OF_MODEL):
        raise MalformedError("no graph")
    found = OnnxFile(
        ir_version=model.number(1), producer=f"{model.text(2)} {model.text(3)}".strip()
    )
    found.functions = {
        (f.text(10, "replace") or _MAIN_DOMAIN, f.text(1, "replace")) for f in model.messages(25)
    }
    found.metadata = {entry.text(1): entry.text(2) for entry in model.messages(14)}
    for opset in model.messages(8):
        found.opsets[opset.text(1) or _MAIN_DOMAIN] = opset.number(2)
    for graph in model.messages(_GRAPH_OF_MODEL):  # several graphs are one graph in parts
        found.inputs.update(value.text(1) for value in graph.messages(11))
        for value in (*graph.messages(11), *graph.messages(12)):
            kinds = [*value.messages(2, 1)]  # tensor types
            if kinds and not any(kind.parts(2) for kind in kinds):
                found.unranked.add(value.text(1))
    _walk(model, _MODEL, found, 1)
    found.constants -= len(found.initializers)
    return found


def _walk(message: ProtoMessage, kind: str, found: OnnxFile, depth: int) -> None:
    """Note the nodes and tensors in a message, at any depth."""
    if depth > _MAX_DEPTH:
        raise MalformedError(
            f"more than {_MAX_DEPTH} messages within each other at byte {message.first}"
        )
    if kind == _NODE:
        operator = message.text(7, "replace") or _MAIN_DOMAIN, message.text(4, "replace")
        found.operators[operator] += 1
        if not found.random and _may_draw(message, operator):
            found.random = _label(message, operator)
        _note_sizes(message, operator, found)
    elif kind == _GRAPH:  # its nodes come first
        found.fixed.update(tensor.text(8) for tensor in message.messages(_INITIALIZER))
    elif kind == _FUNCTION:  # it has names of its own
        found.fixed.clear()
    for number, held in _HOLDS[kind].items():
        for inner in message.messages(number):
            if held != _TENSOR:
                _walk(inner, held, found, depth + 1)
                continue
            tensor = _tensor(inner)
            found.constants += 1  # the caller subtracts the initialisers
            found.weight_bytes += tensor.bytes
            if tensor.location:
                found.places.add(tensor.location)
                found.external_bytes += tensor.bytes
            if kind == _GRAPH and number == _INITIALIZER:
                if depth == 2:
                    found.initializers[tensor.name] = tensor
                else:
                    found.inner.add(tensor.name)


def _may_draw(node: ProtoMessage, operator: tuple[str, str]) -> bool:
    """Whether a node may draw random numbers: exporters for inference leave the input for training out."""
    says = TRAINING_INPUT.get(operator)
    return operator in RANDOM_OPERATORS or (says is not None and any(node.texts(1)[says:][:1]))


def _note_sizes(node: ProtoMessage, operator: tuple[str, str], found: OnnxFile) -> None:
    """Note whether the size of a node's result depends on data, and what depends on none."""
    inputs, outputs = node.texts(1), [name for name in node.texts(2) if name]
    given = [name for name in inputs if name]
    holds = any(True for attribute in node.messages(5) for _ in attribute.messages(6))
    is_fixed = all(name in found.fixed for name in given) and not holds
    sized = SIZED_BY.get(operator, ())
    if operator[0] not in _KNOWN_DOMAINS and operator not in found.functions:
        sized = _ALL
    depends = any(i in sized and name not in found.fixed for i, name in enumerate(inputs) if name)
    if depends or operator == (_MAIN_DOMAIN, "Loop"):  # whose condition ends it
        found.ragged = found.ragged or _label(node, operator)
    if operator in _OF_SHAPE or (is_fixed and operator not in RANDOM_OPERATORS):
        found.fixed.update(outputs)
    else:
        found.fixed.difference_update(outputs)


def _label(node: ProtoMessage, operator: tuple[str, str]) -> str:
    name = node.text(3, "replace")
    return f"node {name[:_MAX_LABEL]!r} ({operator[1]})" if name else f"a node {operator[1]}"


def _tensor(tensor: ProtoMessage) -> Initializer:
    name, shape = tensor.text(8), tensor.all_numbers(1, _MAX_DIMENSIONS)
    place: dict[str, Any] = {}
    if len(shape) > _MAX_DIMENSIONS:
        raise MalformedError(
            f"a tensor of more than {_MAX_DIMENSIONS} dimensions at byte {tensor.first}"
        )
    if shape and max(shape) > _MAX_SIZE:
        raise MalformedError(f"initialiser {name!r} with a negative size at byte {tensor.first}")
    if tensor.number(_TENSOR_LOCATION) == _EXTERNAL:
        entries = {e.text(1): e.text(2) for e in tensor.messages(_TENSOR_OUTSIDE)}
        place["location"] = entries.get("location")
        if not place["location"]:
            raise MalformedError(f"external data without a location at byte {tensor.first}")
        for key in [key for key in ("offset", "length") if key in entries]:
            if not _NUMBER.fullmatch(entries[key]):
                got = reprlib.repr(entries[key])
                raise MalformedError(f"external data with {key} {got} at byte {tensor.first}")
            place[key] = min(int(entries[key]), _MAX_SIZE)
    return Initializer(name=name, onnx_type=tensor.number(2), shape=tuple(shape), **place)


# What is added to a file.

_FIRST_OVERRIDABLE = 4
"""The first IR version in which initialisers need not be inputs (onnx.proto, `GraphProto.initializer`)."""


def added_inputs(model: OnnxFile, names: Sequence[str]) -> bytes:
    """The bytes to append to a model's file to make initialisers inputs, which a run may then override.

    Protobuf's readers merge a second `graph` into the first, so the model's own bytes stay as they are.

    Args:
        model: What `scan` found in the file.
        names: Names of initialisers of the main graph, each once.

    Returns:
        A `ModelProto` with a graph of these inputs only; empty if they are inputs already.

    Raises:
        BuildError: A name is unknown or of strings, or the model's IR version is too old.
    """
    if not names:
        return b""
    expected, known = "", model.initializers
    unknown = [name for name in names if name not in known]
    if model.ir_version < _FIRST_OVERRIDABLE:
        expected = (
            f"got IR version {model.ir_version}, expected {_FIRST_OVERRIDABLE} or more: convert the model "
            "with a newer exporter"
        )
    elif unknown:
        expected = (
            f"got {unknown}, expected names of the main graph's initialisers, such as "
            f"{reprlib.repr([*known])}"
        )
    elif texts := [n for n in names if known[n].onnx_type == ELEMENT_TYPES[STRING].onnx]:
        expected = f"got {texts} of strings, expected tensors of numbers"
    if expected:
        raise BuildError(f"variable_weights: {expected}")
    graph = b""
    for weight in [known[name] for name in names if name not in model.inputs]:
        shape = b"".join(encode_field(1, encode_field(1, size)) for size in weight.shape)
        tensor = encode_field(1, weight.onnx_type) + encode_field(2, shape)
        kind = encode_field(2, encode_field(1, tensor))
        graph += encode_field(11, encode_field(1, weight.name.encode()) + kind)  # ValueInfoProto
    return encode_field(_GRAPH_OF_MODEL, graph) if graph else b""


# What is taken out of a file.


def without_weights(path: str | os.PathLike[str], least_bytes: int) -> bytes:
    """A model whose large initialisers are external data, at their places in the model's own file.

    So a model can be parsed without its weights, wherever they lie. The location is the file's name.

    Args:
        path: An ONNX model, which must not be made shorter meanwhile.
        least_bytes: Least size of an initialiser that is left out. Elements that are no raw data stay.

    Returns:
        A `ModelProto`.

    Raises:
        BuildError: The file is not an ONNX model, or no regular file.
        OSError: The file cannot be opened.
    """
    with _mapped(path) as data:
        location = os.path.basename(os.fspath(path)).encode()
        model = ProtoMessage(data, 0, len(data))
        if not model.parts(_GRAPH_OF_MODEL):
            raise MalformedError("no graph")
        graphs = []
        for graph in model.messages(_GRAPH_OF_MODEL):
            tensors = [_outside(t, location, least_bytes) for t in graph.messages(_INITIALIZER)]
            graphs.append(graph.with_parts({_INITIALIZER: tensors}))
        return model.with_parts({_GRAPH_OF_MODEL: graphs})


def _outside(tensor: ProtoMessage, location: bytes, least_bytes: int) -> bytes:
    """A `TensorProto` whose elements, if they are that many bytes, are at a place in a file."""
    first, last = (tensor.parts(_TENSOR_RAW) or [(0, 0)])[-1]
    if last - first < least_bytes:
        return tensor.with_parts({})
    place = {b"location": location, b"offset": b"%d" % first, b"length": b"%d" % (last - first)}
    entries = [encode_field(1, key) + encode_field(2, value) for key, value in place.items()]
    shorter = tensor.with_parts({_TENSOR_RAW: [], _TENSOR_OUTSIDE: entries})
    return shorter + encode_field(_TENSOR_LOCATION, _EXTERNAL)
