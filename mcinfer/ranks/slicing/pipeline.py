"""Cutting a model into pipeline stages: parts of its graph that run one after another.

::

    the nodes in order   n0 n1 n2 | n3 n4 | n5 …      stage 0 | stage 1 | …
    a value              made in one stage, sent from there to every later stage that uses it
    a weight             in every stage that uses it
    inputs of the model  in every stage: they need not be sent

Nodes that only compute with constants, or small ones with the model's inputs, belong to no stage: each stage
that needs such a node has a copy. Other small computations (of shapes, mostly) are copied too, where the
stage has their inputs anyway.

Where the cuts are best: `_Costs` has the load of each run of nodes, which is its share of the model's
operations, or of its weights over `_WEIGHTS_PER_WORK` if that is larger, and a price for the bytes that it
receives. The cuts with the least sum of the largest load and all prices are found by dynamic programming, for
each bound of the load in turn.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from mcinfer.errors import InvalidInputError
from mcinfer.model_cache.onnx_files import RANDOM_OPERATORS, TRAINING_INPUT
from mcinfer.ranks.slicing.graphs import (
    MAIN_DOMAINS,
    Values,
    infer,
    ordered_nodes,
    qualified,
    subgraphs,
    tensor_bytes,
    values_used,
    without_graph,
)

_MAX_POSITIONS = 256
"""Places for cuts that are compared; in a graph with more nodes, those with the fewest bytes live."""

_WEIGHTS_PER_WORK = 1.5
"""A stage of an equal share of the work may have half more than an equal share of the weights.

Work alone sets how many runs a second end, and weights need only fit: where they lie at opposite ends of a
model, such as in the UNet of examples/sd_dual_core, to balance both alike gives two stages 40 % and 60 % of
the work.
"""

_MAX_BOUNDS = 64
"""Bounds of the load that are tried."""

_OPERATIONS_PER_BYTE = 32
"""The price of a byte that is sent: one core multiplies and adds so often while it copies a byte twice."""

_OPERATIONS_PER_VALUE = 200_000
"""The price of a value that is sent, whatever its size: some microseconds."""


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
class Stage:
    """One part of a model.

    Attributes:
        model: Its inputs are inputs of the whole model and the values it receives; its outputs are the
            values it sends and outputs of the whole model. Tensors are those of the whole model.
        receives: By value, the stage that makes it.
        sends: By value, the stages that use it.
        operations: The estimate of its multiplications and additions.
        bytes_received: The estimate for one run.
    """

    model: ModelProto
    receives: Mapping[str, int]
    sends: Mapping[str, tuple[int, ...]]
    operations: int
    bytes_received: int


def cut_stages(model: ModelProto, stages: int, values: Values | None = None) -> list[Stage]:
    """Cut a model into stages that run one after another.

    Args:
        model: External data need not be loaded. Small constants are in place.
        stages: How many, at least 1.
        values: What `infer` found, if it is known already.

    Raises:
        InvalidInputError: The model cannot be cut into so many stages.
        BuildError: The graph is not sound.
    """
    graph = _Graph(model, infer(model) if values is None else values)
    if stages > max(len(graph.starts), 1):
        raise InvalidInputError(
            f"pipeline: got {stages} stages, but the model can be cut into {len(graph.starts)} at most: "
            "so many nodes depend on its inputs"
        )
    cuts = _best_cuts(_Costs(graph), stages) if stages > 1 else [len(graph.order)]
    stage_of: dict[int, int] = {}
    for number, (first, last) in enumerate(zip([0, *cuts], cuts, strict=False)):
        stage_of |= dict.fromkeys(graph.order[first:last], number)
    return _built(graph, stage_of, stages)


# The graph.


class _Graph:
    """A model's main graph: its nodes by number, in an order in which they can run.

    Attributes:
        nodes: Those that some output needs.
        uses: By node, the values that it takes.
        makers: By value, its node.
        weights: By name, the bytes of an initialiser.
        inputs: Of the model, without initialisers.
        bases: By node that belongs to no stage, the initialisers that it needs, also through other nodes.
        order: The other nodes.
        starts: The places in `order` where a stage may begin: not at a node that is copied rather than sent.
    """

    def __init__(self, model: ModelProto, values: Values) -> None:
        self.model, self.values = model, values
        graph = model.graph
        self.weights = {tensor.name: tensor_bytes(tensor) for tensor in graph.initializer}
        for sparse in graph.sparse_initializer:
            self.weights[sparse.values.name] = tensor_bytes(sparse.values) + tensor_bytes(
                sparse.indices
            )
        self.inputs = [v.name for v in graph.input if v.name not in self.weights]
        self.outputs = [value.name for value in graph.output]
        self.nodes = ordered_nodes(graph.node, {*self.inputs, *self.weights}, self.outputs)
        self.uses = [values_used(node) for node in self.nodes]
        self.makers = {
            name: at for at, node in enumerate(self.nodes) for name in node.output if name
        }
        self.bases: dict[int, frozenset[str]] = {}
        self._find_bases()
        self.order = [at for at in range(len(self.nodes)) if at not in self.bases]
        self.starts = [place for place, at in enumerate(self.order) if not self.is_small(at)]

    def _find_bases(self) -> None:
        inputs = {*self.inputs}
        constant: set[int] = set()
        for at, node in enumerate(self.nodes):
            makers = {self.makers[name] for name in self.uses[at] if name in self.makers}
            if not _is_repeatable(node) or not makers <= self.bases.keys():
                continue
            if makers <= constant and not inputs.intersection(self.uses[at]):
                constant.add(at)
            elif not self.is_small(at):
                continue
            own = {name for name in self.uses[at] if name in self.weights}
            self.bases[at] = frozenset(own.union(*(self.bases[maker] for maker in makers)))

    def is_small(self, at: int) -> bool:
        """Whether a node may run in several stages: it computes a shape, or alike."""
        node = self.nodes[at]
        if node.op_type in ("Shape", "Size") and node.domain in MAIN_DOMAINS:
            return True
        names = filter(None, (*node.output, *self.uses[at]))
        return _is_repeatable(node) and all(map(self.values.is_like_a_shape, names))

    def operations(self, at: int) -> int:
        """About how many multiplications and additions a node takes, without its subgraphs; at least 1."""
        node = self.nodes[at]
        shapes = [self.values.shapes.get(name) for name in node.input]
        made = self.values.shapes.get(node.output[0]) if node.output else None
        products = _products(node, shapes, made)
        if products is None and made is None:
            return max(1, 2 * (sum(self.weights.get(name, 0) for name in self.uses[at]) // 4))
        elements = prod(made) if made is not None else 0
        return max(1, 2 * (products or 0) + _OPERATIONS_PER_ELEMENT * elements)


def _is_repeatable(node: NodeProto) -> bool:
    """Whether a node gives the same each time, and is simple enough to be in several stages."""
    draws = qualified(node) in RANDOM_OPERATORS or qualified(node) in TRAINING_INPUT
    known = node.domain in MAIN_DOMAINS and not draws
    return known and not any(True for _ in subgraphs(node))


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


# Where to cut.


class _Costs:
    """What each run of nodes costs, between any two of the positions where a cut may be.

    Attributes:
        positions: Numbers of nodes in `_Graph.order` before which a cut may be; the first is 0, the last is
            the number of nodes.
        load: By first and last position: the share of the operations, or of the weights, which count less.
        price: By first and last position: what the values that it receives cost, in the unit of the load.
        possible: Whether all that it receives can be sent.
    """

    def __init__(self, graph: _Graph) -> None:
        at_position = {node: place for place, node in enumerate(graph.order)}
        uses: dict[str, list[int]] = defaultdict(list)  # of initialisers, and of values of stages
        for place, node in enumerate(graph.order):
            needs = (graph.bases.get(graph.makers.get(x, -1), {x}) for x in graph.uses[node])
            for name in set().union(*needs):
                uses[name].append(place)
        work = [0, *accumulate(map(graph.operations, graph.order))]
        sent = [
            (name, at_position[graph.makers[name]], places)
            for name, places in uses.items()
            if graph.makers.get(name) in at_position
        ]
        self.positions = [*_starts(graph, work, sent), len(graph.order)]
        weights, received, values, stuck = (_RunNeeds(self.positions) for _ in range(4))
        for name, places in uses.items():
            if name in graph.weights:
                weights.add(graph.weights[name], -1, places)
        for name, maker, places in sent:
            if graph.values.is_sendable(name):
                received.add(graph.values.bytes(name), maker, places)
                values.add(1, maker, places)
            else:
                stuck.add(1, maker, places)
        done = np.array(work)[self.positions]
        total_work, all_weights = work[-1], weights.sums()
        self.load: NDArray[np.float64] = np.maximum(
            (done[None, :] - done[:, None]) / max(total_work, 1),
            all_weights / max(int(all_weights[0, -1]), 1) / _WEIGHTS_PER_WORK,
        )
        prices = _OPERATIONS_PER_BYTE * received.sums() + _OPERATIONS_PER_VALUE * values.sums()
        self.price: NDArray[np.float64] = prices / max(total_work, 1)
        self.possible: NDArray[np.bool_] = stuck.sums() == 0


class _RunNeeds:
    """Sums over what the nodes of a run need from outside of it, for all pairs of positions at once."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = positions
        size = len(positions) + 1
        self._steps: NDArray[np.int64] = np.zeros((size, size), np.int64)

    def add(self, amount: int, maker: int, places: Sequence[int]) -> None:
        """Count something once in each run that has one of the places, and begins after the maker."""
        before = maker
        for place in places:
            # In runs that begin after `before`, and at `place` at the latest, this is the first use.
            after, past = np.searchsorted(self._positions, (before, place), side="right")
            self._steps[after, past] += amount
            self._steps[past, past] -= amount
            before = place

    def sums(self) -> NDArray[np.int64]:
        """By first and last position."""
        sums: NDArray[np.int64] = self._steps.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
        return sums


def _starts(
    graph: _Graph, work: Sequence[int], sent: Iterable[tuple[str, int, Sequence[int]]]
) -> list[int]:
    """All places for cuts, or in each of many parts of about equal work that with the fewest bytes live."""
    if len(graph.starts) <= _MAX_POSITIONS:
        return graph.starts
    count = len(graph.order)
    steps = [0] * (count + 1)
    for name, maker, places in sent:
        amount = graph.values.bytes(name)
        steps[maker + 1] += amount
        steps[places[-1] + 1] -= amount
    live = np.cumsum(steps)
    best: dict[int, int] = {}
    first, *others = graph.starts
    for place in others:
        part = int(_MAX_POSITIONS * (place / count + work[place] / work[-1]) / 2)
        if part not in best or live[place] < live[best[part]]:
            best[part] = place
    return [first, *best.values()]


def _best_cuts(costs: _Costs, stages: int) -> list[int]:
    """The last position of each stage, in numbers of nodes."""
    size = len(costs.positions)
    valid = costs.possible & (np.arange(size)[:, None] < np.arange(size)[None, :])
    best: tuple[float, list[int]] | None = None
    for bound in _bounds(costs.load[valid]):
        prices = np.where(valid & (costs.load <= bound), costs.price, np.inf)
        found = _cheapest(prices, stages)
        if found is None:
            continue
        paid, ends = found
        largest = max(costs.load[i, j] for i, j in zip([0, *ends], ends, strict=False))
        if best is None or largest + paid < best[0]:
            best = (largest + paid, ends)
    if best is None:
        raise InvalidInputError(
            f"pipeline: got {stages} stages, but the model cannot be cut into so many: between its nodes "
            "are values that cannot be sent, such as strings, sequences, or some of unknown type"
        )
    return [costs.positions[end] for end in best[1]]


def _bounds(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Some of the loads, ascending, with the largest: enough for a good balance."""
    different = np.unique(loads)
    step = max(1, -(-len(different) // _MAX_BOUNDS))
    return different[::-1][::step][::-1]


def _cheapest(prices: NDArray[np.float64], stages: int) -> tuple[float, list[int]] | None:
    """The least sum of the prices of so many runs, one after another, and where each ends."""
    reached = prices[0]  # by its end, the sum of the runs so far
    choices = []
    for _ in range(stages - 1):
        sums = reached[:, None] + prices
        choices.append(sums.argmin(axis=0))
        reached = sums.min(axis=0)
    if not np.isfinite(reached[-1]):
        return None
    ends = [len(prices) - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return float(reached[-1]), ends[::-1]


# The stages.


def _built(graph: _Graph, stage_of: Mapping[int, int], stages: int) -> list[Stage]:
    members: list[set[int]] = [set() for _ in range(stages)]
    for node, number in stage_of.items():
        members[number].add(node)
    receives = [_completed(graph, stage_of, *each) for each in enumerate(members)]
    made: list[list[str]] = [[] for _ in range(stages)]  # outputs of the model
    for name in graph.outputs:
        maker = graph.makers.get(name, -1)
        holders = [number for number, nodes in enumerate(members) if maker in nodes]
        number = stage_of.get(maker, holders[0] if holders else stages - 1)
        if maker in graph.bases and not holders:
            _copy(graph, members[number], maker)
        made[number].append(name)
    sends: list[dict[str, list[int]]] = [{} for _ in range(stages)]
    for number, values in enumerate(receives):
        for name, source in values.items():
            sends[source].setdefault(name, []).append(number)
    return [
        _stage(
            graph, number, sorted(members[number]), receives[number], sends[number], made[number]
        )
        for number in range(stages)
    ]


def _completed(
    graph: _Graph, stage_of: Mapping[int, int], number: int, nodes: set[int]
) -> dict[str, int]:
    """Add to a stage the nodes that it is to have copies of; returns what it receives, and from where."""
    wanted: dict[str, int] = {}  # values of earlier stages, by their nodes
    for node in sorted(nodes):
        for name in graph.uses[node]:
            maker = graph.makers.get(name)
            if maker is None:
                continue
            if maker in graph.bases:
                _copy(graph, nodes, maker)
            elif stage_of[maker] != number:
                wanted[name] = maker
    firm = {name for name, maker in wanted.items() if not graph.is_small(maker)}

    @cache
    def can_copy(node: int) -> bool:
        """Whether all that the node needs is in the stage, or can be copied as well."""
        return graph.is_small(node) and all(
            name in firm or maker in graph.bases or can_copy(maker)
            for name in graph.uses[node]
            if (maker := graph.makers.get(name)) is not None
        )

    receives = {}
    for name in sorted(wanted, key=wanted.__getitem__):
        if can_copy(wanted[name]):
            _copy(graph, nodes, wanted[name], firm)
        else:
            receives[name] = stage_of[wanted[name]]
    return receives


def _copy(
    graph: _Graph, nodes: set[int], node: int, received: Container[str] = frozenset()
) -> None:
    """Add a node to a stage, with those that it needs."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes.add(node)
            needed = (name for name in graph.uses[node] if name not in received)
            waiting += [graph.makers[name] for name in needed if name in graph.makers]


def _stage(
    graph: _Graph,
    number: int,
    nodes: Sequence[int],
    receives: Mapping[str, int],
    sends: Mapping[str, Sequence[int]],
    made: Sequence[str],
) -> Stage:
    used = {name for node in nodes for name in graph.uses[node]} | {*made}
    values = {name for node in nodes for name in graph.nodes[node].output} | used
    whole = graph.model
    model = without_graph(whole)
    part = model.graph
    part.name = f"{whole.graph.name or 'graph'}_stage{number}"
    part.node.extend(graph.nodes[node] for node in nodes)
    part.initializer.extend(t for t in whole.graph.initializer if t.name in used)
    part.sparse_initializer.extend(
        t for t in whole.graph.sparse_initializer if t.values.name in used
    )
    inputs = {value.name: value for value in whole.graph.input}
    part.input.extend(inputs[name] for name in graph.inputs if name in used)
    part.input.extend(graph.values.types[name] for name in receives)
    outputs = {value.name: value for value in whole.graph.output}
    sent = sorted(sends, key=graph.makers.__getitem__)
    part.output.extend(
        outputs.get(name, graph.values.types[name]) for name in dict.fromkeys((*sent, *made))
    )
    listed = {value.name for value in (*part.input, *part.output)}
    part.value_info.extend(v for v in whole.graph.value_info if v.name in values - listed)
    part.quantization_annotation.extend(
        a for a in whole.graph.quantization_annotation if a.tensor_name in values
    )
    part.metadata_props.extend(whole.graph.metadata_props)
    return Stage(
        model=model,
        receives=dict(receives),
        sends={name: tuple(sends[name]) for name in sent},
        operations=sum(map(graph.operations, nodes)),
        bytes_received=sum(map(graph.values.bytes, receives)),
    )
