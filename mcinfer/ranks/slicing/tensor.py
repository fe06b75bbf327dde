"""Tensor slices: one ONNX graph becomes one graph for each rank, with parts of the weights and exchanges.

::

    model ──► Graph ──► Search ──► a Choice for each node ──► _Writer ──► one graph for all ranks
              shapes    rules and costs                          │
                                                                 └──► a recipe for each weight of each rank

The graphs of the ranks have the same nodes and differ in initialisers alone. A value keeps its name where it
is whole; parts and terms of a sum have names of their own. Terms of float16 and bfloat16 are computed and
summed in float32, since they may be larger than these types allow where the sum is not. Weights are not
copied here: a recipe says which rows of which initialiser a rank has, and `mcinfer.ranks.slicing.weights`
copies them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from mcinfer.ranks.slicing import rules
from mcinfer.ranks.slicing.graphs import (
    RUNTIME_DOMAIN,
    Graph,
    Values,
    View,
    captured,
    infer,
    label,
    own_names,
    subgraphs,
    tensor_bytes,
    with_inner,
    without_graph,
)
from mcinfer.ranks.slicing.placements import (
    PARTIAL,
    REPLICATED,
    Dims,
    Placement,
    Sharded,
    gathered_order,
    local_dims,
    ranges,
)
from mcinfer.ranks.slicing.rules import RULES, WEIGHTS, Choice
from mcinfer.ranks.slicing.search import ChoiceSearch, Costs
from mcinfer.ranks.slicing.weights import Recipe

_MANY = 32
"""Weights that are listed in a report one by one have at least so many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedWeight:
    """A weight of which each rank has a part.

    Attributes:
        blocks: Sizes of the blocks of the axis, each of which is cut over the ranks.
        bytes: Of the whole weight.
        rank_bytes: Of the part of one rank.
        nodes: The nodes that take it.
    """

    name: str
    axis: int
    blocks: tuple[int, ...]
    bytes: int
    rank_bytes: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeWeight:
    """A weight that every rank has, and why it is not cut."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveNode:
    """A collective that every rank runs once in a run.

    Attributes:
        operator: ``AllReduce`` or ``AllGather``.
        value: Its result, the whole value.
        node: The node that takes the value first.
        reason: Why that node needs it whole, if the node could not run on parts.
        bytes: Of the whole value; None if its shape is not known before a run.
    """

    operator: str
    value: str
    node: str
    reason: str
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """How one pipeline stage is cut over its ranks.

    Attributes:
        sharded: Weights of which each rank has a part.
        whole: Weights that each rank has, with at least 32 elements.
        collectives: That its ranks run in one run, in this order.
        collective_bytes: The estimate for the results of all of them.
    """

    sharded: Sequence[ShardedWeight] = ()
    whole: Sequence[WholeWeight] = ()
    collectives: Sequence[CollectiveNode] = ()
    collective_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlices:
    """The slices of one model.

    Attributes:
        model: That of every rank, without initialisers; with nodes of ONNX Runtime's for the exchanges.
        recipes: For each rank, its initialisers.
        report: What was cut.
    """

    model: ModelProto
    recipes: tuple[tuple[Recipe, ...], ...]
    report: StageReport


def slice_tensor(model: ModelProto, size: int, values: Values | None = None) -> TensorSlices:
    """Cut one model into slices for `size` ranks, joined by exchanges. Every rank has the whole outputs.

    The model is not changed, and no weights are read but small constants, which may be shapes. The ranks'
    outputs are bit-identical to each other, and equal to the model's but for rounding.

    Args:
        model: The model; its external data need not be loaded.
        size: How many ranks, at least 1; one has the model as it is.
        values: What `infer` found for it, or for a model of which it is a part, if that is known already.

    Raises:
        BuildError: The graph is not sound.
    """
    if size == 1:
        whole = ModelProto()
        whole.CopyFrom(model)
        del whole.graph.initializer[:]
        recipes = tuple(Recipe(name=t.name, source=t) for t in model.graph.initializer)
        return TensorSlices(model=whole, recipes=(recipes,), report=StageReport())
    graph = Graph(model, infer(model) if values is None else values)
    return slices_of(graph, size, ChoiceSearch(graph, Costs(graph, size)).run())


def slices_of(graph: Graph, size: int, choices: Sequence[Choice]) -> TensorSlices:
    """The slices for one choice for each node, whichever they are."""
    return _Writer(graph, size, choices).write()


@dataclass(slots=True)
class _Writer:
    """Writes the graph of the ranks, node by node.

    Attributes:
        graph: The whole graph.
        size: How many ranks.
        choices: By node.
        nodes: Of the ranks' graph so far.
        there: The names in the ranks' graph, by value and how it is there.
        given: How each node gave its outputs.
        constants: The initialisers of the ranks so far, by name: source and how it is cut.
        added: Constants that slicing adds, for each rank.
        types: Types and shapes of the values in the ranks' graph.
        names: That are taken.
        collectives: For the report, as `collective_bytes` is.
        wide: Narrow floats as float32, by their names.
    """

    graph: Graph
    size: int
    choices: Sequence[Choice]
    nodes: list[NodeProto] = field(default_factory=list)
    there: dict[tuple[str, Placement], str] = field(default_factory=dict)
    given: dict[str, Placement] = field(default_factory=dict)
    constants: dict[str, tuple[str, Placement]] = field(default_factory=dict)
    added: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    types: dict[str, tuple[int, Dims]] = field(default_factory=dict)
    collectives: list[CollectiveNode] = field(default_factory=list)
    collective_bytes: int = 0
    names: set[str] = field(default_factory=set)
    wide: dict[str, str] = field(default_factory=dict)

    def write(self) -> TensorSlices:
        graph = self.graph
        self.names.update(graph.inputs, graph.outputs, graph.constants, graph.derived, graph.uses)
        self.names.update(name for node in graph.nodes for name in node.output)
        for node in with_inner(graph.model.graph.node):  # new names must not hide those inside
            self.names.update(*map(own_names, subgraphs(node)))
        for number, choice in enumerate(self.choices):
            self._write_node(View(graph, number, self.size), choice)
        for name in graph.outputs:
            self._fetch(name, REPLICATED, None)
        recipes = tuple(self._recipes(rank) for rank in range(self.size))
        return TensorSlices(model=self._model(), recipes=recipes, report=self._report())

    # Nodes.

    def _write_node(self, view: View, choice: Choice) -> None:
        inputs = []
        has_terms = choice.bias is not None or PARTIAL in choice.gives
        for index, name in enumerate(view.inputs):
            written = ""
            if name and index not in choice.vectors and index != choice.bias:
                written = self._fetch(name, choice.needs[index], view)
                if has_terms and choice.needs[index] != PARTIAL:
                    written = self._widened(written, name)
            inputs.append(written)
        for index, vector in choice.vectors.items():
            inputs += [""] * (index + 1 - len(inputs))
            kind = self.graph.element_type(view.inputs[index]) if view.has(index) else 0
            dtype = np.int32 if kind == TensorProto.INT32 else np.int64
            inputs[index] = self._constant(f"{view.outputs[0]}.sizes", np.array(vector, dtype))
        for index, patch in choice.patches.items():
            inputs[index] = self._patched(inputs[index], view, index, patch)
        for name in captured(view.node):
            if self.graph.is_constant(name) or name in self.given:
                self._fetch(name, REPLICATED, view)
        while inputs and not inputs[-1]:
            inputs.pop()

        node = NodeProto()
        node.CopyFrom(view.node)
        node.input[:] = inputs
        kept = [item for item in view.node.attribute if item.name not in choice.attributes]
        del node.attribute[:]
        node.attribute.extend(kept)
        changed = choice.attributes.items()
        node.attribute.extend(
            helper.make_attribute(*item) for item in changed if item[1] is not None
        )
        node.output[:] = map(self._output, view.outputs, choice.gives)
        self.nodes.append(node)
        if choice.bias is not None:
            node.output[0] = self._unique(f"{view.outputs[0]}.partial")
            self._add_bias(view, choice.bias, choice.bias_axis, node.output[0])
        elif choice.scale is not None:
            node.output[0] = self._unique(f"{view.outputs[0]}.part")
            scale = self._constant(f"{view.outputs[0]}.scale", np.array(choice.scale, np.int64))
            self._node("Mul", [node.output[0], scale], view.outputs[0])

    def _output(self, name: str, placement: Placement) -> str:
        if not name:
            return ""
        self.given[name] = placement
        return self._have(name, placement)

    def _add_bias(self, view: View, index: int, along: int | None, partial: str) -> None:
        """The sum of the ranks' terms, and then, once, the bias."""
        name = view.outputs[0]
        self._type(partial, name, PARTIAL)
        total = self._unique(f"{name}.sum")
        self._type(total, name, PARTIAL)
        self._exchange(name, partial, total, view)
        bias = self._widened(self._fetch(view.inputs[index], REPLICATED, view), view.inputs[index])
        beta = view.attribute("beta", 1.0)
        if view.operator == "Gemm" and beta != 1.0:
            kind = helper.tensor_dtype_to_np_dtype(self._kind_of_terms(name))
            factor = self._constant(f"{name}.beta", np.array(beta, kind))
            bias = self._node("Mul", [bias, factor], self._unique(f"{name}.bias"))
        if along is not None:
            shape = [-1 if axis == along else 1 for axis in range(len(view.output_dims()))]
            wanted = self._constant(f"{name}.bias_shape", np.array(shape, np.int64))
            bias = self._node("Reshape", [bias, wanted], self._unique(f"{name}.bias"))
        self._narrowed(name, lambda written: self._node("Add", [total, bias], written))

    # Terms of narrow floats.

    def _kind_of_terms(self, name: str) -> int:
        """The type of a value's terms; 0 if it is unknown."""
        return TensorProto.FLOAT if self.graph.is_narrow(name) else self.graph.element_type(name)

    def _widened(self, written: str, name: str) -> str:
        """A value for a node that gives terms: narrow floats as float32."""
        if not self.graph.is_narrow(name):
            return written
        if written not in self.wide:
            wide = self._unique(f"{written}.float32")
            self.wide[written] = self._node("Cast", [written], wide, to=TensorProto.FLOAT)
        return self.wide[written]

    def _narrowed(self, name: str, make: Callable[[str], object]) -> None:
        """Make a value of its terms, by its own name; narrow floats by another one, and then narrow."""
        if not self.graph.is_narrow(name):
            make(name)
            return
        wide = self._unique(f"{name}.float32")
        self._type(wide, name, PARTIAL)
        make(wide)
        self._node("Cast", [wide], name, to=self.graph.element_type(name))

    def _patched(self, written: str, view: View, index: int, patch: Mapping[int, int]) -> str:
        """A vector that a run makes, with other elements at some positions."""
        name = view.inputs[index]
        dims = self.graph.dims(name) or (None,)
        length = dims[0] if isinstance(dims[0], int) else len(view.output_dims())
        which = np.array([position in patch for position in range(length)])
        values = np.array([patch.get(position, 0) for position in range(length)], np.int64)
        condition = self._constant(f"{name}.which", which)
        sizes = self._constant(f"{name}.sizes", values)
        return self._node("Where", [condition, sizes, written], self._unique(f"{name}.part"))

    def _node(
        self, op: str, inputs: list[str], output: str, domain: str | None = None, **attributes: int
    ) -> str:
        node = helper.make_node(op, inputs, [output], name=f"{output}/{op}", domain=domain)
        node.attribute.extend(helper.make_attribute(*item) for item in attributes.items())
        self.nodes.append(node)
        return output

    # Values.

    def _fetch(self, name: str, need: Placement, view: View | None) -> str:
        """The name of a value in the ranks' graph, as it is needed; written first if it is not there."""
        if self.graph.is_constant(name):
            return self._fetch_constant(name, need)
        if (name, need) in self.there:
            return self.there[name, need]
        if name not in self.given:
            self._have(name, REPLICATED)  # an input
        elif (name, REPLICATED) not in self.there:
            self._make_whole(name, view)
        if isinstance(need, Sharded):
            self._cut(name, need, self._have(name, need))
        return self.there[name, need]

    def _make_whole(self, name: str, view: View | None) -> None:
        placement = self.given[name]
        part = self.there[name, placement]
        if not isinstance(placement, Sharded):
            self._narrowed(name, lambda sum_: self._exchange(name, part, sum_, view))
        elif len(placement.blocks) == 1:
            self._exchange(name, part, name, view, placement)
        else:
            joined = self._unique(f"{name}.joined")
            self._type(joined, name, REPLICATED)
            self._exchange(name, part, joined, view, placement)
            order = np.array(gathered_order(placement.blocks, self.size), np.int64)
            index = self._constant(f"{name}.order", order)
            self._node("Gather", [joined, index], name, axis=placement.axis)
        self._have(name, REPLICATED)

    def _reason(self, name: str, placement: Sharded, view: View | None) -> str:
        """Why a node does not run on the value as it is; empty if that only costs more."""
        if view is None or name not in view.inputs:
            return ""
        forms = [
            None
            if self.graph.is_constant(other)
            else tuple(form for value, form in self.there if value == other) or (REPLICATED,)
            for other in view.inputs
        ]
        refused = rules.cut(view, view.inputs.index(name), placement, forms)
        return refused if isinstance(refused, str) else ""

    def _cut(self, name: str, need: Sharded, written: str) -> None:
        """This rank's part of a whole value."""
        positions = [
            np.array([at for span in ranges(need.blocks, self.size, rank) for at in range(*span)])
            for rank in range(self.size)
        ]
        index = self._constant(f"{name}.positions", *positions)
        self._node("Gather", [name, index], written, axis=need.axis)

    def _exchange(
        self, name: str, part: str, whole: str, view: View | None, cut: Sharded | None = None
    ) -> None:
        """Gather the parts of a value; or sum its terms, if it is not cut."""
        named = "AllReduce" if cut is None else "AllGather"
        attributes = {} if cut is None else {"group_size": self.size, "axis": cut.axis}
        self._node(named, [part], whole, RUNTIME_DOMAIN, **attributes)
        dims, own = self.graph.dims(name), self.graph.element_type(name)
        kind = own if cut else self._kind_of_terms(name)
        sizes = [dim for dim in dims or () if isinstance(dim, int)]
        known = dims is not None and len(sizes) == len(dims) and kind
        count = tensor_bytes(TensorProto(dims=sizes, data_type=kind)) if known else None
        wider = 1 + (kind != own)
        self.collective_bytes += self.graph.values.bytes(name) * wider if count is None else count
        self.collectives.append(
            CollectiveNode(
                operator=named,
                value=name,
                node=label(view.node) if view else "the model's output",
                reason=self._reason(name, cut, view) if cut else "",
                bytes=count,
            )
        )

    def _have(self, name: str, placement: Placement) -> str:
        """Name a value as it is there: a whole one by its own name."""
        written = name
        if isinstance(placement, Sharded):
            written = self._unique(f"{name}.part")
        elif placement == PARTIAL:
            written = self._unique(f"{name}.partial")
        self.there[name, placement] = written
        self._type(written, name, placement)
        return written

    def _type(self, written: str, name: str, placement: Placement) -> None:
        dims, kind = self.graph.dims(name), self.graph.element_type(name)
        if placement == PARTIAL:
            kind = self._kind_of_terms(name)
        if dims is not None and kind:
            self.types[written] = (kind, local_dims(dims, placement, self.size))

    def _unique(self, name: str) -> str:
        found, number = name, 1
        while found in self.names:
            number += 1
            found = f"{name}.{number}"
        self.names.add(found)
        return found

    # Constants.

    def _fetch_constant(self, name: str, need: Placement) -> str:
        if (name, need) in self.there:
            return self.there[name, need]
        written = self._have(name, need)
        if name not in self.graph.derived:
            self.constants[written] = (name, need)
            return written
        derived = self.graph.derived[name]
        source = need.at(derived.axes[need.axis]) if isinstance(need, Sharded) else need
        node = NodeProto()
        node.CopyFrom(derived.node)
        node.input[:] = [self._fetch_constant(derived.source, source)]
        node.output[:] = [written]
        if written != name:
            node.name = f"{written}/{node.op_type}"
        self.nodes.append(node)
        return written

    def _constant(self, name: str, *arrays: NDArray[Any]) -> str:
        """A constant that slicing adds: one array for all ranks, or one for each."""
        written = self._unique(name)
        self.added[written] = [*arrays] if len(arrays) > 1 else [*arrays] * self.size
        return written

    def _recipes(self, rank: int) -> tuple[Recipe, ...]:
        found = []
        for name, (source, placement) in self.constants.items():
            tensor = self.graph.constants[source]
            if isinstance(placement, Sharded):
                held = ranges(placement.blocks, self.size, rank)
                found.append(Recipe(name=name, source=tensor, axis=placement.axis, ranges=held))
            else:
                found.append(Recipe(name=name, source=tensor))
        for name, arrays in self.added.items():
            found.append(Recipe(name=name, source=numpy_helper.from_array(arrays[rank])))
        return tuple(found)

    # Results.

    def _model(self) -> ModelProto:
        source = self.graph.model
        graph = GraphProto(name=source.graph.name, doc_string=source.graph.doc_string)
        graph.node.extend(self.nodes)
        graph.input.extend(x for x in source.graph.input if x.name in self.graph.inputs)
        graph.output.extend(source.graph.output)
        graph.sparse_initializer.extend(source.graph.sparse_initializer)
        declared = {*self.graph.inputs, *self.graph.outputs, *self.constants}
        graph.value_info.extend(
            helper.make_tensor_value_info(name, kind, dims)
            for name, (kind, dims) in self.types.items()
            if name not in declared
        )
        model = without_graph(source)
        model.graph.CopyFrom(graph)
        if self.collectives and all(x.domain != RUNTIME_DOMAIN for x in model.opset_import):
            model.opset_import.append(helper.make_opsetid(RUNTIME_DOMAIN, 1))
        return model

    def _report(self) -> StageReport:
        users: dict[str, list[tuple[View, int]]] = {}
        for number, node in enumerate(self.graph.nodes):
            view = View(self.graph, number, self.size)
            for index, name in enumerate((*node.input, *captured(node))):
                if name and self.graph.is_constant(name):
                    root = self.graph.source(name, REPLICATED)[0]
                    users.setdefault(root, []).append((view, index))
        sharded, whole = [], []
        for source, placement in self.constants.values():
            size, own_users = tensor_bytes(self.graph.constants[source]), users.get(source, [])
            if isinstance(placement, Sharded):
                weight = ShardedWeight(
                    name=source,
                    axis=placement.axis,
                    blocks=placement.blocks,
                    bytes=size,
                    rank_bytes=size // self.size,
                    nodes=tuple(label(view.node) for view, _ in own_users),
                )
                sharded.append(weight)
            elif prod(self.graph.constants[source].dims) >= _MANY:
                reason = self._why_whole(own_users)
                whole.append(WholeWeight(name=source, bytes=size, reason=reason))
        return StageReport(
            sharded=tuple(sharded),
            whole=tuple(whole),
            collectives=tuple(self.collectives),
            collective_bytes=self.collective_bytes,
        )

    def _why_whole(self, users: list[tuple[View, int]]) -> str:
        for view, index in users:
            if view.operator not in RULES:
                return f"{label(view.node)} runs whole"
            if index not in WEIGHTS.get(view.operator, ()):
                return f"{label(view.node)} runs on whole values"
            refused = self._refusals(view, index)
            if refused:
                return f"{label(view.node)}: {refused}"
        return "cutting it would cost more than it saves"

    def _refusals(self, view: View, index: int) -> str:
        """Why no axis of a weight can be cut; empty if one could be."""
        found = []
        for axis, size in enumerate(view.dims(index)):
            if isinstance(size, int) and size > 1:
                cut = rules.cut(view, index, Sharded(axis, (size,)), [None] * len(view.inputs))
                if isinstance(cut, Choice):
                    return ""
                found.append(cut)
        divided = [reason for reason in found if reason.endswith(f"not divisible by {self.size}")]
        return "; ".join(dict.fromkeys(divided or found))
