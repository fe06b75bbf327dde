"""Types and shapes of a graph's values, and estimates of what a node costs.

The estimates only choose among cuts; no result depends on them. Symbols get small sizes, and what is not
known is guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from mcinfer.ranks.slicing.graphs import BITS, MAIN_DOMAINS, dims_of, inferred, ordered_nodes
from mcinfer.specs import ELEMENT_TYPES, STRING

ASSUMED_BATCH = 1
ASSUMED_SIZE = 64
"""Sizes in place of symbols: along the first axis, and along others."""

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
        fixed = _fixed(self.types[name])
        return tensor.elem_type in _INTEGERS or (fixed is not None and prod(fixed) <= 1)

    def bytes(self, name: str) -> int:
        if name not in self.shapes:
            return self.typical_bytes
        kind = self.types[name].type.tensor_type.elem_type if name in self.types else 0
        bits: int = prod(self.shapes[name]) * BITS.get(kind, _GUESSED_BITS)
        return (bits + 7) // 8


def infer(model: ModelProto) -> Values:
    """Types and shapes of all values of the main graph, as far as they follow from the model.

    Args:
        model: With small constants in place; it is not changed.

    Raises:
        BuildError: The graph is not sound.
    """
    graph = model.graph
    given = {value.name for value in (*graph.input, *graph.initializer)}
    given |= {sparse.values.name for sparse in graph.sparse_initializer}
    nodes = ordered_nodes(graph.node, given, [value.name for value in graph.output])
    types = {
        tensor.name: helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in graph.initializer
    }
    types |= inferred(model, nodes=nodes, declared=(*graph.value_info, *graph.output))
    sizes: dict[str, int] = {}
    inputs = [_copied(value) for value in graph.input]
    for value in inputs:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                size = ASSUMED_SIZE if axis else ASSUMED_BATCH
                dim.dim_value = sizes.setdefault(dim.dim_param, size) if dim.dim_param else size
    # Declared sizes may not fit these, and hide what inference finds; it knows nothing of other domains.
    foreign = {name for node in nodes if node.domain not in MAIN_DOMAINS for name in node.output}
    declared = [_copied(value) for value in graph.value_info if value.name in foreign]
    for value in declared:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    shapes: dict[str, tuple[int, ...]] = {}
    examples = inferred(model, nodes=nodes, inputs=inputs, declared=declared)
    for value in (*examples.values(), *types.values()):
        if value.name not in shapes and (shape := _fixed(value)) is not None:
            shapes[value.name] = shape
    known = Values(types=types, shapes=shapes, typical_bytes=_GUESSED_BYTES)
    made = [known.bytes(name) for node in graph.node for name in node.output if name in shapes]
    return replace(known, typical_bytes=int(median(made))) if made else known


def _copied(value: ValueInfoProto) -> ValueInfoProto:
    copy = ValueInfoProto()
    copy.CopyFrom(value)
    return copy


def drop_false_shapes(model: ModelProto) -> None:
    """Remove from `value_info` what contradicts the model: a runtime warns of it, but a cut would be wrong.

    It comes from models that were edited after their export, such as to have a free batch.
    """
    found = inferred(model)
    symbols = {
        dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim
    }
    true = [
        value
        for value in model.graph.value_info
        if value.name not in found or not _contradicts(value, found[value.name], symbols)
    ]
    model.graph.ClearField("value_info")
    model.graph.value_info.extend(true)


def _contradicts(value: ValueInfoProto, found: ValueInfoProto, symbols: set[str]) -> bool:
    declared, inferred = value.type.tensor_type, found.type.tensor_type
    if inferred.elem_type and declared.elem_type != inferred.elem_type:
        return True
    if not declared.HasField("shape") or not inferred.HasField("shape"):
        return False
    if len(declared.shape.dim) != len(inferred.shape.dim):
        return True
    return any(
        one.HasField("dim_value")
        and (
            one.dim_value != other.dim_value
            if other.HasField("dim_value")
            else bool(other.dim_param) and other.dim_param in symbols
        )
        for one, other in zip(declared.shape.dim, inferred.shape.dim, strict=True)
    )


def _fixed(value: ValueInfoProto) -> tuple[int, ...] | None:
    """A shape without symbols, or None."""
    dims = dims_of(value)
    sizes = tuple(dim for dim in dims or () if isinstance(dim, int))
    return sizes if dims is not None and len(sizes) == len(dims) else None


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
