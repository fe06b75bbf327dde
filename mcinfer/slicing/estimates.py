"""Types and shapes of a graph's values, and estimates of what a node costs.

The estimates only choose among cuts; no result depends on them. Symbols get small sizes, and what is not
known is guessed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from mcinfer.specs import ELEMENT_TYPES, STRING

ASSUMED_BATCH = 1
ASSUMED_SIZE = 64
"""Sizes in place of symbols: along the first axis, and along others."""

MAIN_DOMAINS = ("", "ai.onnx")

_BITS = {element.onnx: element.bits for element in ELEMENT_TYPES.values()}
_SENDABLE = {element.onnx for name, element in ELEMENT_TYPES.items() if name != STRING}
_INTEGERS = {TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL}
_MAX_SHAPE_ELEMENTS = 256
_GUESSED_BITS = 32
_GUESSED_BYTES = 1 << 20

_OPERATIONS_PER_ELEMENT = 16
"""An element of an operator that is bound by memory takes as long as so many multiplications."""

_CONVOLUTIONS = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3, "NhwcFusedConv": 1}
_MATRIX_PRODUCTS = {
    *("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulInteger", "MatMulIntegerToFloat"),
    *("DynamicQuantizeMatMul", "QLinearMatMul", "MatMulNBits", "QGemm"),
}
_RECURRENT = {"LSTM", "GRU", "RNN"}
_ATTENTION = {"Attention", "MultiHeadAttention", "GroupQueryAttention"}

_LIKE_FIRST_INPUT = {
    *("Attention", "BiasAdd", "BiasGelu", "BiasSoftmax", "BiasSplitGelu", "FastGelu", "FusedConv"),
    *("FusedGemm", "FusedMatMul", "Gelu", "GroupNorm", "GroupQueryAttention", "LayerNormalization"),
    *(
        "MatMulNBits",
        "MultiHeadAttention",
        "NhwcConv",
        "NhwcMaxPool",
        "QuickGelu",
        "RotaryEmbedding",
    ),
    *("SimplifiedLayerNormalization", "SkipGroupNorm", "SkipLayerNormalization"),
    "SkipSimplifiedLayerNormalization",
}
"""ONNX Runtime's own operators, which the package onnx does not know: outputs have the first input's type."""


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def values_used(node: NodeProto) -> list[str]:
    """The values that a node takes, each once: its inputs, and those that its subgraphs take from outside."""
    used = dict.fromkeys(name for name in node.input if name)
    for graph in subgraphs(node):
        used |= dict.fromkeys(_captured(graph))
    return [*used]


def _captured(graph: GraphProto) -> Iterator[str]:
    own = {value.name for value in graph.input}
    own |= {tensor.name for tensor in graph.initializer}
    own |= {tensor.values.name for tensor in graph.sparse_initializer}
    for node in graph.node:
        yield from (name for name in values_used(node) if name not in own)
        own |= {*node.output}
    yield from (value.name for value in graph.output if value.name not in own)


def tensor_bytes(tensor: TensorProto) -> int:
    """Bytes of a tensor's elements, by its shape; 0 for strings."""
    bits: int = prod(tensor.dims) * _BITS.get(tensor.data_type, _GUESSED_BITS)
    return (bits + 7) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What is known of the values of a graph.

    Attributes:
        types: By name, type and shape with the model's symbols.
        shapes: By name, an example of a shape, in which symbols have the assumed sizes.
        typical_bytes: Size of a value of unknown shape.
    """

    types: dict[str, ValueInfoProto]
    shapes: dict[str, tuple[int, ...]]
    typical_bytes: int

    def is_sendable(self, name: str) -> bool:
        """Whether it is known to be a tensor of elements of a fixed size."""
        info = self.types.get(name)
        return info is not None and info.type.tensor_type.elem_type in _SENDABLE

    def is_like_a_shape(self, name: str) -> bool:
        """Whether it is known to be a few integers, or one number."""
        shape = self.shapes.get(name)
        if shape is None or prod(shape) > _MAX_SHAPE_ELEMENTS or name not in self.types:
            return False
        tensor = self.types[name].type.tensor_type
        fixed = _shape(self.types[name])
        return tensor.elem_type in _INTEGERS or (fixed is not None and prod(fixed) <= 1)

    def bytes(self, name: str) -> int:
        if name not in self.shapes:
            return self.typical_bytes
        kind = self.types[name].type.tensor_type.elem_type if name in self.types else 0
        bits: int = prod(self.shapes[name]) * _BITS.get(kind, _GUESSED_BITS)
        return (bits + 7) // 8


def infer(model: ModelProto) -> Values:
    """Types and shapes of all values of the main graph, as far as they follow from the model.

    Args:
        model: With small constants in place; it is not changed.
    """
    symbolic = _inferred(model)
    assumed = ModelProto()
    assumed.CopyFrom(model)
    sizes: dict[str, int] = {}
    for value in assumed.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.WhichOneof("value") != "dim_value":
                size = ASSUMED_SIZE if axis else ASSUMED_BATCH
                dim.dim_value = sizes.setdefault(dim.dim_param, size) if dim.dim_param else size
    for value in (*assumed.graph.output, *assumed.graph.value_info):
        value.type.tensor_type.ClearField("shape")  # the symbols' sizes may not fit
    types = {
        tensor.name: onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in model.graph.initializer
    }
    types |= {value.name: value for value in _values(symbolic.graph)}
    shapes: dict[str, tuple[int, ...]] = {}
    for value in (*_values(_inferred(assumed).graph), *types.values()):
        if value.name not in shapes and (shape := _shape(value)) is not None:
            shapes[value.name] = shape
    known = Values(types=types, shapes=shapes, typical_bytes=_GUESSED_BYTES)
    made = [
        known.bytes(name) for node in model.graph.node for name in node.output if name in shapes
    ]
    return Values(
        types=types, shapes=shapes, typical_bytes=int(median(made)) if made else _GUESSED_BYTES
    )


def _values(graph: GraphProto) -> Iterator[ValueInfoProto]:
    yield from graph.value_info
    yield from graph.input
    yield from graph.output


def _shape(value: ValueInfoProto) -> tuple[int, ...] | None:
    """A shape without symbols, or None."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    sizes = [d.dim_value if d.WhichOneof("value") == "dim_value" else -1 for d in tensor.shape.dim]
    return None if -1 in sizes else tuple(sizes)


def _inferred(model: ModelProto) -> ModelProto:
    """The model with inferred types and shapes, also behind operators that the package onnx does not know."""
    while True:
        try:
            model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        except onnx.shape_inference.InferenceError:  # what is known so far has to do
            return model
        types = {value.name: value.type.tensor_type.elem_type for value in _values(model.graph)}
        types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
        guessed = False
        for node in model.graph.node:
            if node.op_type not in _LIKE_FIRST_INPUT or not node.input or not node.output:
                continue
            kind = types.get(node.input[0], 0)
            if kind and not types.get(node.output[0], 0):
                types[node.output[0]] = kind
                info = onnx.helper.make_tensor_value_info(node.output[0], kind, None)
                model.graph.value_info.append(info)
                guessed = True
        if not guessed:
            return model


def operations(node: NodeProto, values: Values, weight_elements: int) -> int:
    """About how many multiplications and additions a node takes; at least 1.

    Args:
        node: Its subgraphs are not looked at.
        values: Of the graph.
        weight_elements: Elements of the weights that it takes: these count where shapes are not known.
    """
    shapes = [values.shapes.get(name) for name in node.input]
    made = values.shapes.get(node.output[0]) if node.output else None
    products = _products(node, shapes, made)
    if products is None and made is None:
        return max(1, 2 * weight_elements)
    elements = prod(made) if made is not None else 0
    return max(1, 2 * (products or 0) + _OPERATIONS_PER_ELEMENT * elements)


def _products(
    node: NodeProto, shapes: Sequence[tuple[int, ...] | None], made: tuple[int, ...] | None
) -> int | None:
    """How many products of two elements an operator sums; None where it is no such one, or not known."""
    kind, first = node.op_type, shapes[0] if shapes else None
    if kind == "ConvTranspose" and first and len(shapes) > 1 and shapes[1]:
        return prod(first) * prod(shapes[1][1:])
    if made is None:
        return None
    place = _CONVOLUTIONS.get(kind)
    if place is not None and len(shapes) > place and shapes[place]:
        return prod(made) * prod((shapes[place] or ())[1:])
    if kind in _MATRIX_PRODUCTS and first:
        swapped = any(a.name == "transA" and a.i for a in node.attribute)
        return prod(made) * first[0 if swapped else -1]
    if kind in _RECURRENT and first and len(shapes) > 2:
        return prod(first[:2]) * sum(prod(shape) for shape in shapes[1:3] if shape)
    if kind in _ATTENTION and first and len(first) > 1:
        return 2 * prod(made) * first[-2]
    return None
