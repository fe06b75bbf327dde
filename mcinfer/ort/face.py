"""A tiny model with another model's face: its inputs, outputs and description, and nothing of its content.

ONNX Runtime's Python layer takes what it says of a session from a native session, and programs reach for that
one (``session._sess``). A native session of a face says of inputs, outputs and metadata what one of the model
would, and takes a few kilobytes. It cannot run: each output comes from a node that has nothing to give, and
whose name, which the runtime puts into its error, says what to call instead.

The bytes follow onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto); the package onnx is not
needed.
"""

from collections.abc import Mapping, Sequence

from mcinfer.model_cache.protobuf import encode_field
from mcinfer.specs import ELEMENT_TYPES, Dimension, ModelDescription, TensorSpec

NOT_RUNNABLE = (
    "this session only describes its model: run it by the methods of mcinfer.ort.InferenceSession"
)
"""The name of the nodes of a face."""

NOTHING_SAID = ModelDescription()

_IR_VERSION = 10  # the first with four-bit types
_OPSET = 21  # likewise
_FLOAT = ELEMENT_TYPES["float32"].onnx

_CAST = frozenset(
    name
    for name in ELEMENT_TYPES
    if name.startswith(("bfloat", "float8", "int4", "uint4", "float4"))
)
"""Types that ONNX does not allow in an optional, so that they are cast from one of float32."""

_MODEL_FIELDS = {"producer_name": 2, "domain": 4, "description": 6}
_GRAPH_FIELDS = {"graph_name": 2, "graph_description": 10}
_VERSION_FIELD = 5
_NO_VERSION = (1 << 63) - 1  # how the runtime says that a model has none
_TYPE_OF_TYPE, _TYPE_OF_INT = 13, 2  # AttributeProto.AttributeType


def face(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    description: ModelDescription = NOTHING_SAID,
) -> bytes:
    """The bytes of a `ModelProto` with these inputs and outputs.

    Args:
        inputs: In the model's order.
        outputs: In the model's order.
        description: What the model says of itself.
    """
    about = description.about
    passed = {spec.name for spec in inputs}  # an input may be an output as it is
    graph = b"".join(
        encode_field(1, node)
        for number, spec in enumerate(outputs)
        if spec.name not in passed
        for node in _nodes(spec, f"{number}")
    )
    graph += _texts(about, _GRAPH_FIELDS)
    graph += b"".join(encode_field(11, _value(spec)) for spec in inputs)
    graph += b"".join(encode_field(12, _value(spec)) for spec in outputs)
    model = encode_field(1, _IR_VERSION) + _texts(about, _MODEL_FIELDS)
    version = int(about.get("version", _NO_VERSION))
    if version != _NO_VERSION:
        model += encode_field(_VERSION_FIELD, version % (1 << 64))
    model += encode_field(7, graph) + encode_field(8, encode_field(2, _OPSET))
    for key, text in description.properties.items():
        model += encode_field(14, encode_field(1, _bytes(key)) + encode_field(2, _bytes(text)))
    return model


def _nodes(spec: TensorSpec, number: str) -> list[bytes]:
    """Nodes that would make an output from an optional value that there is not."""
    name, element_type = spec.name, ELEMENT_TYPES[spec.element_type].onnx
    cast = spec.element_type in _CAST
    empty = f"mcinfer/{number}/empty"
    taken = f"mcinfer/{number}/taken" if cast else name
    kind = encode_field(1, encode_field(1, _FLOAT if cast else element_type))
    optional = encode_field(14, kind) + encode_field(20, _TYPE_OF_TYPE)
    nodes = [
        _node("Optional", f"empty {number}", None, empty, "type", optional),
        _node("OptionalGetElement", f"{NOT_RUNNABLE} ({number})", empty, taken),
    ]
    if cast:
        to = encode_field(3, element_type) + encode_field(20, _TYPE_OF_INT)
        nodes.append(_node("Cast", f"cast {number}", taken, name, "to", to))
    return nodes


def _node(
    operator: str,
    name: str,
    source: str | None,
    target: str,
    attribute: str = "",
    value: bytes = b"",
) -> bytes:
    node = b"" if source is None else encode_field(1, _bytes(source))
    node += encode_field(2, _bytes(target)) + encode_field(3, _bytes(name))
    node += encode_field(4, _bytes(operator))
    if attribute:
        node += encode_field(5, encode_field(1, _bytes(attribute)) + value)
    return node


def _value(spec: TensorSpec) -> bytes:
    """The `ValueInfoProto` of an input or output."""
    shape = b"".join(encode_field(1, _dimension(size)) for size in spec.shape)
    kind = encode_field(1, ELEMENT_TYPES[spec.element_type].onnx) + encode_field(2, shape)
    return encode_field(1, _bytes(spec.name)) + encode_field(2, encode_field(1, kind))


def _dimension(size: Dimension) -> bytes:
    if size is None:
        return b""
    return encode_field(1, size) if isinstance(size, int) else encode_field(2, _bytes(size))


def _texts(values: Mapping[str, str], fields: Mapping[str, int]) -> bytes:
    return b"".join(
        encode_field(field, _bytes(values[name]))
        for name, field in fields.items()
        if values.get(name)
    )


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
