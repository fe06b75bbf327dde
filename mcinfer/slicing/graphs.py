"""One ONNX graph, read for cutting: its nodes, constants, shapes and element types. No weights are loaded.

The outputs of `Constant` nodes become initialisers. So does an input that has an initialiser as its default:
the weights of a slice cannot be replaced.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)

from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.slicing.placements import REPLICATED, Dims, Placement, Sharded
from mcinfer.specs import ELEMENT_TYPES

BITS = {kind.onnx: kind.bits for kind in ELEMENT_TYPES.values()}
"""By the number of an element type; 0 for strings."""

_SMALL = 1024
"""Constants of at most so many elements may be shapes, so their values are read."""

RANDOM = frozenset(
    [
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    ]
)
_COLLECTIVES = ("AllReduce", "AllGather", "AllToAll", "DistCollective", "Distributed", "Nccl")

# What has outputs of the first input's shape, for ONNX's shape inference, which does not know.
_LIKE_FIRST_INPUT = {
    "com.microsoft::BiasGelu": (0,),
    "com.microsoft::FastGelu": (0,),
    "com.microsoft::Gelu": (0,),
    "com.microsoft::GroupQueryAttention": (0,),
    "com.microsoft::MultiHeadAttention": (0,),
    "com.microsoft::QuickGelu": (0,),
    "com.microsoft::RotaryEmbedding": (0,),
    "com.microsoft::SkipLayerNormalization": (0, 3),
    "com.microsoft::SkipSimplifiedLayerNormalization": (0, 3),
    "GroupNormalization": (0,),
    "SimplifiedLayerNormalization": (0,),
}


def operator(node: NodeProto) -> str:
    """The operator's name, with the domain if it is not ONNX's own."""
    own = node.domain in ("", "ai.onnx")
    return str(node.op_type) if own else f"{node.domain}::{node.op_type}"


def label(node: NodeProto) -> str:
    """How a message names a node."""
    return f"{node.name or node.output[0]} ({operator(node)})"


def tensor_bytes(tensor: TensorProto) -> int:
    return int(prod(tensor.dims) * BITS.get(tensor.data_type, 0) + 7) // 8


def loaded(tensor: TensorProto, folder: Path | None) -> TensorProto:
    """The tensor with its data in it.

    Raises:
        InvalidInputError: The data are external, and `folder`, that of the model, is None.
        BuildError: The data cannot be read.
    """
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor
    if folder is None:
        raise InvalidInputError(
            f"folder: got None, expected the model's folder: the data of {tensor.name!r} are external"
        )
    copy = TensorProto()
    copy.CopyFrom(tensor)
    try:
        onnx.external_data_helper.load_external_data_for_tensor(copy, str(folder))
    except (OSError, ValueError, onnx.checker.ValidationError) as exc:
        raise BuildError(f"model: the data of {tensor.name!r} cannot be read: {exc}") from exc
    copy.data_location = TensorProto.DEFAULT
    del copy.external_data[:]
    return copy


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


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
    """The graph of a model, to be cut.

    Attributes:
        model: As given; not changed.
        nodes: In the model's order, without those that make constants, or `derived` ones.
        constants: Initialisers by name; data may be external.
        derived: Values that are a constant in other clothes, such as a transposed weight, by name.
        inputs: Names of the inputs that a caller gives.
        outputs: Names.
        uses: For each value, the numbers of the nodes that take it, also inside of a subgraph.
    """

    def __init__(self, model: ModelProto, folder: Path | None) -> None:
        self.model = model
        self._folder = folder
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.opset = max(
            (item.version for item in model.opset_import if item.domain in ("", "ai.onnx")),
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
        for nodes in (self.nodes, *(function.node for function in model.functions)):
            _check(nodes)
        self._numbers: dict[str, tuple[float, ...] | None] = {}
        self._values = self._infer()
        self.derived: dict[str, Derived] = {}
        self._derive()
        self.uses: dict[str, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for name in dict.fromkeys((*node.input, *captured(node))):
                self.uses.setdefault(name, []).append(number)

    def dims(self, name: str) -> Dims | None:
        """The shape of a value; None if even the number of axes is unknown."""
        if name in self.constants:
            return tuple(self.constants[name].dims)
        tensor = self._tensor_type(name)
        if tensor is None or not tensor.HasField("shape"):
            return None
        return tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            for dim in tensor.shape.dim
        )

    def element_type(self, name: str) -> int:
        """The number of the element type; 0 if it is unknown, or the value is no tensor."""
        if name in self.constants:
            return int(self.constants[name].data_type)
        tensor = self._tensor_type(name)
        return int(tensor.elem_type) if tensor is not None else 0

    def integers(self, name: str) -> tuple[int, ...] | None:
        """The elements of a small constant of integers, flat; None for any other value."""
        tensor = self.constants.get(name)
        if tensor is None or tensor.data_type not in (TensorProto.INT32, TensorProto.INT64):
            return None
        numbers = self.numbers(name)
        return None if numbers is None else tuple(int(number) for number in numbers)

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """The elements of a small constant, flat; None for any other value."""
        if name not in self._numbers:
            tensor = self.constants.get(name)
            if tensor is None or prod(tensor.dims) > _SMALL or BITS.get(tensor.data_type, 0) < 8:
                self._numbers[name] = None
            else:
                self._numbers[name] = tuple(
                    numpy_helper.to_array(loaded(tensor, self._folder)).flat
                )
        return self._numbers[name]

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
            if name not in ("Cast", "Identity", "Transpose") or not self.is_constant(source):
                nodes.append(node)
                continue
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

    def _tensor_type(self, name: str) -> onnx.TypeProto.Tensor | None:
        value = self._values.get(name)
        return value.tensor_type if value is not None and value.HasField("tensor_type") else None

    def _infer(self) -> dict[str, onnx.TypeProto]:
        """Types of values by ONNX's shape inference, on a copy of the model without its weights."""
        source = self.model.graph
        graph = GraphProto(name="shapes")
        for value in source.input:
            if value.name not in self.constants:
                graph.input.append(value)
                _name_sizes(graph.input[-1])
        for tensor in self.constants.values():
            if prod(tensor.dims) <= _SMALL and tensor.data_type != TensorProto.STRING:
                # Only integers can be shapes; other data are not looked at.
                integers = tensor.data_type in (TensorProto.INT32, TensorProto.INT64)
                if integers or tensor.data_location != TensorProto.EXTERNAL:
                    graph.initializer.append(loaded(tensor, self._folder))
                    continue
            graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
        for node in self.nodes:
            graph.node.extend(_stand_ins(node, self.constants))
        graph.output.extend(source.output)
        graph.value_info.extend(source.value_info)
        model = ModelProto(ir_version=max(self.model.ir_version, 4), graph=graph)
        model.opset_import.extend(self.model.opset_import)
        model.functions.extend(self.model.functions)
        try:
            inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as exc:
            raise BuildError(f"model: its shapes could not be inferred: {exc}") from exc
        return {
            value.name: value.type
            for value in (*inferred.value_info, *inferred.output, *inferred.input)
        }


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

    def output_dims(self, index: int = 0) -> Dims:
        return self.graph.dims(self.outputs[index]) or ()

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


def captured(node: NodeProto) -> list[str]:
    """Names that the subgraphs of a node use without defining them."""
    found: dict[str, None] = {}
    for graph in subgraphs(node):
        own = {x.name for x in (*graph.input, *graph.initializer)}
        own.update(name for inner in graph.node for name in inner.output)
        used = [name for inner in graph.node for name in (*inner.input, *captured(inner))]
        used += [x.name for x in graph.output]
        found.update((name, None) for name in used if name and name not in own)
    return [*found]


def _constant(node: NodeProto) -> TensorProto | None:
    """The tensor that a `Constant` node makes; None for another node, strings and sparse tensors."""
    if operator(node) != "Constant" or len(node.attribute) != 1:
        return None
    attribute = node.attribute[0]
    tensor = TensorProto()
    if attribute.name == "value":
        tensor.CopyFrom(attribute.t)
        tensor.name = node.output[0]
    elif attribute.name in ("value_int", "value_ints"):
        values = np.array(helper.get_attribute_value(attribute), np.int64)
        tensor = numpy_helper.from_array(values, node.output[0])
    elif attribute.name in ("value_float", "value_floats"):
        numbers = np.array(helper.get_attribute_value(attribute), np.float32)
        tensor = numpy_helper.from_array(numbers, node.output[0])
    else:
        return None
    return tensor


def _check(nodes: Iterable[NodeProto]) -> None:
    """Refuse what would differ between ranks, and models that are slices already."""
    for node in nodes:
        attributes = {attribute.name for attribute in node.attribute}
        if node.op_type in RANDOM and "seed" not in attributes:
            raise InvalidInputError(
                f"model: node {label(node)} draws random numbers, which would differ between ranks; "
                "expected an attribute seed"
            )
        if node.op_type.startswith(_COLLECTIVES) and node.domain not in ("", "ai.onnx"):
            raise InvalidInputError(
                f"model: node {label(node)} is a collective, expected a model that is not sliced yet"
            )
        for graph in subgraphs(node):
            _check(graph.node)


def _name_sizes(value: onnx.ValueInfoProto) -> None:
    """Give the unknown sizes of an input symbols, so that inference can follow them."""
    if not value.type.HasField("tensor_type"):
        return
    for axis, dim in enumerate(value.type.tensor_type.shape.dim):
        if not dim.HasField("dim_value") and not dim.dim_param:
            dim.dim_param = f"{value.name}.{axis}"


def _stand_ins(node: NodeProto, constants: Mapping[str, TensorProto]) -> Sequence[NodeProto]:
    """Nodes of ONNX whose outputs have the shapes of this node's."""
    name = operator(node)
    if name in _LIKE_FIRST_INPUT:
        return [
            helper.make_node("Identity", node.input[:1], [node.output[index]])
            for index in _LIKE_FIRST_INPUT[name]
            if index < len(node.output) and node.output[index]
        ]
    if name == "com.microsoft::FusedMatMul":
        return _stand_in_of_matmul(node, constants)
    return [node]


def _stand_in_of_matmul(
    node: NodeProto, constants: Mapping[str, TensorProto]
) -> Sequence[NodeProto]:
    """For a FusedMatMul, which may transpose its operands."""
    transposed = {item.name for item in node.attribute if item.i}
    first, second = node.input
    nodes: list[NodeProto] = []
    if "transB" in transposed and second in constants:
        axes = list(range(len(constants[second].dims)))
        second = f"{node.output[0]}/transposed"
        perm = [*axes[:-2], axes[-1], axes[-2]]
        nodes.append(helper.make_node("Transpose", node.input[1:], [second], perm=perm))
        transposed.remove("transB")
    if transposed & {"transA", "transB"}:
        one = "...km" if "transA" in transposed else "...mk"
        two = "...nk" if "transB" in transposed else "...kn"
        equation = f"{one},{two}->...mn"
        nodes.append(helper.make_node("Einsum", [first, second], node.output, equation=equation))
    else:
        nodes.append(helper.make_node("MatMul", [first, second], node.output))
    return nodes
