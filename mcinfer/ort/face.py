"""A tiny model with another model's face: its inputs, outputs and description, and nothing of its content.

ONNX Runtime's Python layer takes what it says of a session from a native session, and programs reach for that
one (``session._sess``). A native session of a face says of inputs, outputs and metadata what one of the model
would, and takes a few kilobytes. It cannot run: each output comes from a node that has nothing to give, and
whose name, which the runtime puts into its error, says what to call instead.

The bytes follow onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto); the package onnx is not
needed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from onnxruntime.capi import onnxruntime_pybind11_state as native

from mcinfer.model_cache.protobuf import encode_field
from mcinfer.specs import ELEMENT_TYPES, Dimension, ModelDescription, TensorSpec

NOT_RUNNABLE = (
    "this session only describes its model: run it by the methods of mcinfer.ort.InferenceSession"
)
"""The name of the nodes of a face."""

NOTHING_SAID = ModelDescription()

_IR_VERSION = 10  # the first with four-bit types
_OPSET = 21  # the first with four-bit types
_NO_FLOAT = (
    encode_field(1, b"type")
    + encode_field(14, encode_field(1, encode_field(1, ELEMENT_TYPES["float32"].onnx)))
    + encode_field(20, 13)
)
"""The attribute of a node whose output is an optional value of type float that there is not."""


_MODEL_FIELDS = {"producer_name": 2, "domain": 4, "description": 6}
_GRAPH_FIELDS = {"graph_name": 2, "graph_description": 10}
_VERSION_FIELD = 5
_NO_VERSION = (1 << 63) - 1  # how the runtime says that a model has none
_TYPE_OF_INT = 2  # in AttributeProto.AttributeType, where 13 is a type's


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
    nodes = [
        _node("Optional", "empty", "", "mcinfer/empty", _NO_FLOAT),
        _node("OptionalGetElement", NOT_RUNNABLE, "mcinfer/empty", "mcinfer/taken"),
    ]
    for spec in outputs:
        if spec.name not in passed:
            to = encode_field(3, ELEMENT_TYPES[spec.element_type].onnx)
            to = encode_field(1, b"to") + to + encode_field(20, _TYPE_OF_INT)
            nodes.append(_node("Cast", f"cast {spec.name}", "mcinfer/taken", spec.name, to))
    graph = b"".join(encode_field(1, node) for node in nodes)
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


def tiny_session(model: bytes) -> Any:
    """A native session of the runtime's on a model that is made here."""
    session = native.InferenceSession(native.SessionOptions(), model, False, False)
    session.initialize_session([], [], set())
    return session


def _node(operator: str, name: str, source: str, target: str, attribute: bytes = b"") -> bytes:
    node = encode_field(1, _bytes(source)) if source else b""
    node += encode_field(2, _bytes(target)) + encode_field(3, _bytes(name))
    node += encode_field(4, _bytes(operator))
    return node + encode_field(5, attribute) if attribute else node


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
