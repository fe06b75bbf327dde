"""ONNX graphs, read for cutting: nodes, constants, types and shapes. No weights are loaded."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from math import prod
from statistics import median
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from mcinfer.errors import BuildError
from mcinfer.ranks.slicing.placements import REPLICATED, Dim, Dims, Placement, Sharded
from mcinfer.specs import ELEMENT_TYPES, STRING, TensorSpec, numpy_dtype

MAIN_DOMAINS = ("", "ai.onnx")
RUNTIME_DOMAIN = "com.microsoft"
"""Of ONNX Runtime's own operators."""

BITS = {kind.onnx: kind.bits for kind in ELEMENT_TYPES.values()}
"""By the number of an element type; 0 for strings."""

_SMALL = 1024
"""Constants of at most so many elements may be shapes, so their values are read."""

_SEARCHED = 1 << 16
"""Constants of at most so many elements are searched for infinities."""

ASSUMED_BATCH = 1
ASSUMED_SIZE = 64
"""Sizes in place of symbols, where an example of a shape is needed: along the first axis, and along others.
No result depends on them: they only choose among cuts."""

_SENDABLE = {element.onnx for name, element in ELEMENT_TYPES.items() if name != STRING}
_INTEGERS = {TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL}
_MAX_SHAPE_ELEMENTS = 256
_GUESSED_BITS = 32
_GUESSED_BYTES = 1 << 20

_COLLECTIVES = ("AllReduce", "AllGather", "AllToAll", "Distributed", "Nccl")

# Operators whose outputs ONNX's shape inference does not know: those with the first input's shape, and, by
# their first output, those with its type and its number of axes.
_LIKE_FIRST_INPUT = {
    **dict.fromkeys(
        (
            *("BiasAdd", "BiasGelu", "BiasSoftmax", "FastGelu", "Gelu", "GroupNorm", "QuickGelu"),
            *("GroupQueryAttention", "MultiHeadAttention", "RotaryEmbedding", "SkipGroupNorm"),
        ),
        (0,),
    ),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), (0, 3)),
}
_LIKE_ITS_TYPE = frozenset(
    [
        *("Attention", "BiasSplitGelu", "FusedConv", "FusedGemm", "MatMulNBits", "NhwcConv"),
        *("NhwcFusedConv", "NhwcMaxPool"),
    ]
)


def operator(node: NodeProto) -> str:
    """The operator's name, with the domain if it is not ONNX's own."""
    return str(node.op_type) if node.domain in MAIN_DOMAINS else f"{node.domain}::{node.op_type}"


def qualified(node: NodeProto) -> tuple[str, str]:
    """The operator's domain, by which tables name it, and its type."""
    return node.domain or MAIN_DOMAINS[-1], node.op_type


def label(node: NodeProto) -> str:
    """How a message names a node."""
    return f"{node.name or node.output[0]} ({operator(node)})"


def is_collective(node: NodeProto) -> bool:
    """Whether ranks run it together: TensorRT's in any domain, and others that are not ONNX's own."""
    if node.op_type == "DistCollective":
        return True
    return node.op_type.startswith(_COLLECTIVES) and node.domain not in MAIN_DOMAINS


def tensor_bytes(tensor: TensorProto) -> int:
    """Bytes of its elements, four-bit ones packed; 0 for strings and unknown types."""
    return int(prod(tensor.dims) * BITS.get(tensor.data_type, 0) + 7) // 8


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def with_inner(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes, with those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from with_inner(graph.node)


def initialisers(graph: GraphProto) -> set[str]:
    """The names of a graph's initialisers, sparse ones included."""
    sparse = (tensor.values for tensor in graph.sparse_initializer)
    return {tensor.name for tensor in (*graph.initializer, *sparse)}


def own_names(graph: GraphProto) -> set[str]:
    """The values that a graph defines, without those of subgraphs."""
    names = initialisers(graph) | {value.name for value in graph.input}
    return names.union(*(node.output for node in graph.node))


def captured(node: NodeProto) -> list[str]:
    """Names that the subgraphs of a node use without defining them."""
    found: dict[str, None] = {}
    for graph in subgraphs(node):
        used = [name for inner in graph.node for name in values_used(inner)]
        used += [value.name for value in graph.output]
        own = own_names(graph)
        found.update((name, None) for name in used if name not in own)
    return [*found]


def values_used(node: NodeProto) -> list[str]:
    """The values that a node takes, each once: its inputs, and those that its subgraphs take from outside."""
    return [*dict.fromkeys(filter(None, (*node.input, *captured(node))))]


def ordered_nodes(
    nodes: Iterable[NodeProto], given: set[str], outputs: Sequence[str]
) -> list[NodeProto]:
    """The nodes that outputs need, each after those that it needs; in the file's order where that is one.

    Args:
        nodes: Of a main graph.
        given: Its inputs and initialisers.
        outputs: Its outputs.

    Raises:
        BuildError: A value is made twice, or by no node, or nodes need each other.
    """
    listed = [*nodes]
    makers: dict[str, int] = {}
    for at, node in enumerate(listed):
        for name in filter(None, node.output):
            if name in given or makers.setdefault(name, at) != at:
                raise BuildError(f"value {name!r} is made twice, by {label(node)} as well")
    needs: list[list[int]] = []
    for node in listed:
        for name in values_used(node):
            if name not in makers and name not in given:
                raise BuildError(f"{label(node)} takes {name!r}, which nothing makes")
        needs.append([makers[name] for name in values_used(node) if name in makers])
    lost = [name for name in outputs if name not in makers and name not in given]
    if lost:
        raise BuildError(f"output {lost[0]!r} is made by no node")
    sequence: Sequence[int] = range(len(listed))
    if any(need >= at for at, each in enumerate(needs) for need in each):
        try:
            sequence = [*TopologicalSorter(dict(enumerate(needs))).static_order()]
        except CycleError as exc:
            cycle = " → ".join(label(listed[at]) for at in exc.args[1])
            raise BuildError(f"nodes need each other: {cycle}") from None
    wanted = {makers[name] for name in outputs if name in makers}
    for at in reversed(sequence):
        if at in wanted:
            wanted.update(needs[at])
    return [listed[at] for at in sequence if at in wanted]


def without_graph(model: ModelProto) -> ModelProto:
    """A copy, with an empty graph; initialisers need not be inputs in it."""
    fields = {field.name: value for field, value in model.ListFields()}
    for name in ("graph", "training_info", "ir_version"):
        fields.pop(name, None)
    return ModelProto(ir_version=max(model.ir_version, 4), **fields)


# Types and shapes.


def dims_of(value: ValueInfoProto) -> Dims | None:
    """A tensor's shape; None if even the number of axes is unknown."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in tensor.shape.dim
    )


def tensor_spec(value: ValueInfoProto) -> TensorSpec:
    """An input or output of a model; BuildError if it is no tensor of a type that is known here."""
    names = {kind.onnx: name for name, kind in ELEMENT_TYPES.items()}
    kind = value.type.tensor_type.elem_type
    if kind not in names:
        raise BuildError(f"{value.name!r} is no tensor of one of {[*ELEMENT_TYPES]}")
    return TensorSpec(name=value.name, dtype=numpy_dtype(names[kind]), shape=dims_of(value) or ())


StandIns = Callable[[NodeProto, Mapping[str, TensorProto]], Iterable[NodeProto]]


def inferred(
    model: ModelProto,
    *,
    nodes: Iterable[NodeProto] | None = None,
    inputs: Iterable[ValueInfoProto] | None = None,
    declared: Iterable[ValueInfoProto] = (),
    stand_ins: "StandIns | None" = None,
) -> dict[str, ValueInfoProto]:
    """Types of the values of the main graph by ONNX's shape inference; the declared ones if it fails.

    Unknown sizes of inputs get symbols, so that the inference can follow them.

    Args:
        model: Not changed; weights need no data.
        nodes: In place of the model's, each after those that it needs.
        inputs: In place of the model's.
        declared: Types that are taken as they are.
        stand_ins: What has the types of a node, for operators that ONNX does not know.
    """
    source = model.graph
    initialisers = {tensor.name: tensor for tensor in source.initializer}
    graph = GraphProto(name="types", sparse_initializer=source.sparse_initializer)
    for value in source.input if inputs is None else inputs:
        if value.name not in initialisers:
            graph.input.append(value)
            for axis, dim in enumerate(graph.input[-1].type.tensor_type.shape.dim):
                if not dim.HasField("dim_value") and not dim.dim_param:
                    dim.dim_param = f"{value.name}.{axis}"
    for tensor in initialisers.values():
        is_external = tensor.data_location == TensorProto.EXTERNAL
        if prod(tensor.dims) <= _SMALL and not is_external:
            graph.initializer.append(tensor)
        else:
            info = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(info)
    for node in source.node if nodes is None else nodes:
        graph.node.extend((stand_ins or known_stand_ins)(node, initialisers))
    types = {value.name: value for value in declared}
    graph.output.extend(types.get(v.name, ValueInfoProto(name=v.name)) for v in source.output)
    outputs = {value.name for value in source.output}
    graph.value_info.extend(value for name, value in types.items() if name not in outputs)
    bare = without_graph(model)
    bare.graph.CopyFrom(graph)
    try:
        graph = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError):
        graph = bare.graph  # what is declared has to do
    return {
        value.name: value
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.WhichOneof("value") is not None
    }


def known_stand_ins(node: NodeProto, constants: Mapping[str, TensorProto]) -> Iterable[NodeProto]:
    """Nodes of ONNX whose outputs have the types of this node's."""
    name = node.op_type
    is_foreign = node.domain == RUNTIME_DOMAIN
    if name in ("GroupNormalization", "SimplifiedLayerNormalization"):
        return like_input(node, 0, 0)
    if name == "LayerNormalization" and len(node.output) == 1:
        return like_input(node, 0, 0)  # before opset 17, ONNX Runtime's own
    if is_foreign and name in _LIKE_FIRST_INPUT:
        places = [at for at in _LIKE_FIRST_INPUT[name] if at < len(node.output)]
        return [made for at in places if node.output[at] for made in like_input(node, 0, at)]
    if is_foreign and name in _LIKE_ITS_TYPE:
        return resized_input(node, 0)
    if is_foreign and name == "FusedMatMul":
        transposed = {item.name for item in node.attribute if item.i}
        first = "...km" if "transA" in transposed else "...mk"
        second = "nk" if "transB" in transposed else "kn"
        weight = constants.get(node.input[1])
        if weight is None or len(weight.dims) > 2:  # the inference knows no ellipsis without axes
            second = f"...{second}"
        equation = f"{first},{second}->...mn"
        if transposed & {"transA", "transB"}:
            return [helper.make_node("Einsum", node.input, node.output, equation=equation)]
        return [helper.make_node("MatMul", node.input, node.output)]
    return [node]


def like_input(node: NodeProto, given: int, output: int) -> list[NodeProto]:
    """A node whose output has the type and the shape of an input."""
    return [helper.make_node("Identity", [node.input[given]], [node.output[output]])]


def resized_input(node: NodeProto, place: int) -> list[NodeProto]:
    """Nodes whose output has the type of an input, and as many axes, of unknown sizes."""
    given, made = node.input[place], node.output[place]
    return [
        helper.make_node("Shape", [given], [f"{made}/shape"]),
        helper.make_node("Abs", [f"{made}/shape"], [f"{made}/sizes"]),
        helper.make_node("Reshape", [given, f"{made}/sizes"], [made]),
    ]


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
    given = initialisers(graph) | {value.name for value in graph.input}
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
    symbols = {dim for value in model.graph.input for dim in dims_of(value) or ()} - {None}
    true = [
        value
        for value in model.graph.value_info
        if value.name not in found or not _contradicts(value, found[value.name], symbols)
    ]
    model.graph.ClearField("value_info")
    model.graph.value_info.extend(true)


def _contradicts(value: ValueInfoProto, found: ValueInfoProto, symbols: set[Dim]) -> bool:
    kind = found.type.tensor_type.elem_type
    if kind and value.type.tensor_type.elem_type != kind:
        return True
    declared, inferred = dims_of(value), dims_of(found)
    if declared is None or inferred is None:
        return False
    return len(declared) != len(inferred) or any(
        isinstance(one, int) and (one != other if isinstance(other, int) else other in symbols)
        for one, other in zip(declared, inferred, strict=True)
    )


def _fixed(value: ValueInfoProto) -> tuple[int, ...] | None:
    """A shape without symbols, or None."""
    dims = dims_of(value)
    sizes = tuple(dim for dim in dims or () if isinstance(dim, int))
    return sizes if dims is not None and len(sizes) == len(dims) else None


# A graph to be cut over ranks.


@dataclass(frozen=True, slots=True)
class Derived:
    """A value that one node makes of a constant.

    Attributes:
        node: A Transpose, Cast or Identity.
        source: Its input: a constant, or derived from one.
        axes: For each axis of the value, the one of the source.
    """

    node: NodeProto
    source: str
    axes: tuple[int, ...]


class Graph:
    """The graph of a model, to be cut over ranks.

    The outputs of `Constant` nodes become initialisers. So does an input that has an initialiser as its
    default: the weights of a slice cannot be replaced.

    Attributes:
        model: As given; not changed.
        values: What is known of them; those of a larger model will do.
        nodes: In the model's order, without those that make constants, or `derived` ones.
        constants: Initialisers by name; data may be external.
        derived: Values that are a constant in other clothes, such as a transposed weight, by name.
        inputs: Names of the inputs that a caller gives.
        outputs: Names.
        uses: For each value, the numbers of the nodes that take it, also inside of a subgraph.
    """

    def __init__(self, model: ModelProto, values: Values) -> None:
        self.model, self.values = model, values
        self._types = values.types
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.opset = max(
            (item.version for item in model.opset_import if item.domain in MAIN_DOMAINS),
            default=1,
        )
        self.nodes: list[NodeProto] = []
        for node in model.graph.node:
            tensor = _constant(node)
            if tensor is None:
                self.nodes.append(node)
            else:
                self.constants[tensor.name] = tensor
        self.inputs = [x.name for x in model.graph.input if x.name not in self.constants]
        self.outputs = [x.name for x in model.graph.output]
        self.derived: dict[str, Derived] = {}
        self._derive()
        self.uses: dict[str, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for name in values_used(node):
                self.uses.setdefault(name, []).append(number)

    def dims(self, name: str) -> Dims | None:
        """The shape of a value; None if even the number of axes is unknown."""
        if name in self.constants:
            return tuple(self.constants[name].dims)
        return dims_of(self._types[name]) if name in self._types else None

    def element_type(self, name: str) -> int:
        """The number of the element type; 0 if it is unknown, or the value is no tensor."""
        if name in self.constants:
            return int(self.constants[name].data_type)
        return int(self._types[name].type.tensor_type.elem_type) if name in self._types else 0

    def is_narrow(self, name: str) -> bool:
        """Whether it is of floats of 16 bits: terms of a sum may be larger than these, if it is not."""
        return self.element_type(name) in (TensorProto.FLOAT16, TensorProto.BFLOAT16)

    def integers(self, name: str) -> tuple[int, ...] | None:
        """The elements of a small constant of integers, flat; None for any other value."""
        tensor = self.constants.get(name)
        if tensor is None or tensor.data_type not in (TensorProto.INT32, TensorProto.INT64):
            return None
        numbers = self.numbers(name)
        return None if numbers is None else tuple(int(number) for number in numbers)

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """The elements of a small constant, flat; None for any other value."""
        array = self._elements(name, _SMALL)
        return None if array is None else tuple(array.flat)

    def is_finite(self, name: str) -> bool:
        """Whether a constant has finite elements alone; False if these are not in the model, or too many."""
        array = self._elements(name, _SEARCHED)
        return array is not None and bool(np.isfinite(array).all())

    def _elements(self, name: str, most: int) -> NDArray[Any] | None:
        """Those of a constant, if they are in the model, and no more than so many."""
        tensor = self.constants.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return None
        if prod(tensor.dims) > most or BITS.get(tensor.data_type, 0) < 8:
            return None
        return numpy_helper.to_array(tensor)

    def is_constant(self, name: str) -> bool:
        return name in self.constants or name in self.derived

    def source(self, name: str, placement: Placement) -> tuple[str, Placement]:
        """The initialiser that a constant value is made of, and how it is cut for the value to be cut so."""
        while name in self.derived:
            derived = self.derived[name]
            if isinstance(placement, Sharded):
                placement = placement.at(derived.axes[placement.axis])
            name = derived.source
        return name, placement

    def _derive(self) -> None:
        """Move the nodes that only transpose or cast a large constant from `nodes` to `derived`."""
        nodes = []
        for node in self.nodes:
            name = operator(node)
            source = node.input[0] if len(node.input) == 1 else ""
            root = TensorProto()
            if name in ("Cast", "Identity", "Transpose") and self.is_constant(source):
                root = self.constants[self.source(source, REPLICATED)[0]]
            if prod(root.dims) <= _SMALL or BITS.get(root.data_type, 0) < 8:
                nodes.append(node)
                continue
            axes = list(range(len(root.dims)))
            if name == "Transpose":
                given = [list(item.ints) for item in node.attribute if item.name == "perm"]
                axes = given[0] if given else axes[::-1]
            self.derived[node.output[0]] = Derived(node, source, tuple(axes))
        self.nodes = nodes


def axis_of(value: int, rank: int) -> int:
    """The axis that a number means, which counts from the last one if it is negative."""
    return value + rank if value < 0 else value


class View:
    """A node with the shapes of its inputs and outputs."""

    def __init__(self, graph: Graph, number: int, ranks: int) -> None:
        self.graph = graph
        self.node: NodeProto = graph.nodes[number]
        self.ranks = ranks
        self.operator = operator(self.node)
        self.inputs = tuple(self.node.input)
        self.outputs = tuple(self.node.output)
        self._attributes = {item.name: item for item in self.node.attribute}
        self._dims = [graph.dims(name) if name else () for name in self.inputs]

    def dims(self, index: int) -> Dims:
        """The shape of an input; a shape without axes for one that is not given or not known."""
        dims = self._dims[index] if index < len(self._dims) else ()
        return () if dims is None else dims

    def output_dims(self) -> Dims:
        return self.graph.dims(self.outputs[0]) or ()

    def ranks_known(self) -> bool:
        """Whether the number of axes of every input and output is known."""
        return None not in self._dims and all(
            self.graph.dims(name) is not None for name in self.outputs if name
        )

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and bool(self.inputs[index])

    def attribute(self, name: str, default: Any) -> Any:
        item = self._attributes.get(name)
        return default if item is None else helper.get_attribute_value(item)

    def integers(self, index: int) -> tuple[int, ...] | None:
        return self.graph.integers(self.inputs[index]) if self.has(index) else None

    def argument(self, name: str, index: int) -> tuple[int, ...] | None:
        """What later opsets take as an input and earlier ones as an attribute; None if it is not constant."""
        if self.has(index):
            return self.integers(index)
        given = self.attribute(name, None)
        return None if given is None else tuple(given)


def _constant(node: NodeProto) -> TensorProto | None:
    """The tensor that a `Constant` node makes; None for another node, strings and sparse tensors."""
    if operator(node) != "Constant" or len(node.attribute) != 1:
        return None
    [attribute] = node.attribute
    given, kind = helper.get_attribute_value(attribute), attribute.name.removesuffix("s")
    tensor = TensorProto()
    if kind == "value":
        tensor.CopyFrom(given)
    elif kind in ("value_int", "value_float"):
        dtype = np.int64 if kind == "value_int" else np.float32
        tensor = numpy_helper.from_array(np.array(given, dtype))
    else:
        return None
    tensor.name = node.output[0]
    return tensor
