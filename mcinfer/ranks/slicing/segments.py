"""The graph of one rank: nodes, and exchanges between them, cut into segments that a runtime can run.

::

    graph      x ── MatMul ── all_reduce ── Add ── MatMul ── all_reduce ── y
    steps      [ segment 0 ]   exchange   [ segment 1 ]      exchange
    phase            0             0            1                1

The slicer makes such graphs, and `mcinfer.ranks.slicing.slice_files` reads them from files. A step's phase is
the number of exchanges that must run before it. So each segment does all that can be done before its phase's
exchanges, and the exchanges of a phase run one after another, in the order of the graph. Thus ranks run the
same exchanges in the same order if their graphs have the same exchanges in the same order.

A segment's file has its nodes and initialisers. Initialisers with external data name the same files as those
of the graph do.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

from mcinfer.errors import BuildError
from mcinfer.ranks.slicing.graphs import (
    BITS,
    initialisers,
    label,
    values_used,
    with_inner,
    without_graph,
)
from mcinfer.ranks.slicing.plans import Exchange, RankPlan, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGraph:
    """What one rank runs.

    Attributes:
        model: Has all but the exchanges. The types in its `value_info` are those of this rank's values.
        exchanges: In their order, each with the number of nodes before it.
    """

    model: ModelProto
    exchanges: Sequence[tuple[int, Exchange]] = ()

    def items(self) -> Iterator[NodeProto | Exchange]:
        """Nodes and exchanges, in their order."""
        waiting = [*self.exchanges][::-1]
        for number, node in enumerate(self.model.graph.node):
            while waiting and waiting[-1][0] <= number:
                yield waiting.pop()[1]
            yield node
        yield from (exchange for _, exchange in reversed(waiting))

    def write_segments(self, place: RankPlan, folder: Path) -> RankPlan:
        """Write the segments and the plan into a folder that exists.

        Args:
            place: The plan, without steps.
            folder: Of the segments. Their external data are read from where the model's own are.

        Raises:
            BuildError: A node takes what none before it makes, or a value that passes from one segment to
                another has no known type.
        """
        plan = replace(place, steps=tuple(_Cut(self).steps(folder)))
        plan.write(folder)
        return plan


def rounding(segments: Iterable[Path]) -> tuple[str, int] | None:
    """The node that quantises values to the fewest bits, and these; None if no segment has such a node."""
    found = []
    for path in segments:
        model = onnx.load(str(path), load_external_data=False)
        kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
        for node in with_inner(model.graph.node):
            if "Quantize" in node.op_type or node.op_type.startswith("QLinear"):
                zero_point = "".join(node.input[2:3]) if node.op_type == "QuantizeLinear" else ""
                bits = BITS.get(kinds.get(zero_point, TensorProto.UINT8), 8)
                found.append((label(node), bits))
    return min(found, key=lambda item: item[1], default=None)


def described(item: NodeProto | Exchange) -> str:
    """How a message names a node or an exchange, with its operator first."""
    if isinstance(item, Exchange):
        return f"{item.kind} {item.node!r}"
    return f"{item.op_type} {(item.name or next(iter(item.output), ''))!r}"


@dataclass(slots=True)
class _Phase:
    """What runs between two rounds of exchanges, then the exchanges."""

    nodes: list[NodeProto] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)


def _is_typed(value: ValueInfoProto) -> bool:
    return value.type.WhichOneof("value") is not None


class _Cut:
    """A rank's graph in phases. What initialisers alone make is copied to where it is needed."""

    def __init__(self, graph: RankGraph) -> None:
        self._graph = graph
        self._model = graph.model
        parts = graph.model.graph
        self._initialisers = initialisers(parts)
        self._inputs = {x.name: x for x in parts.input if x.name not in self._initialisers}
        self._outputs = [value.name for value in parts.output]
        typed = (*filter(_is_typed, parts.output), *parts.value_info, *self._inputs.values())
        self._types = {value.name: value for value in typed}
        self._symbols = {
            dim.dim_param for value in parts.input for dim in value.type.tensor_type.shape.dim
        }
        self._constants = {*self._initialisers}
        self._phases = [_Phase()]
        self._sort_into_phases()

    def _needed(self) -> list[NodeProto | Exchange]:
        """The exchanges, and the nodes that an output or an exchange needs, in their order."""
        wanted = {*self._outputs}
        found: list[NodeProto | Exchange] = []
        for item in reversed([*self._graph.items()]):
            if isinstance(item, Exchange):
                wanted.add(item.input)
                found.append(item)
            elif not wanted.isdisjoint(item.output):
                wanted.update(values_used(item))
                found.append(item)
        return found[::-1]

    def _sort_into_phases(self) -> None:
        ready = dict.fromkeys((*self._initialisers, *self._inputs), 0)
        for item in self._needed():
            reads = item.inputs if isinstance(item, Exchange) else values_used(item)
            missing = [name for name in reads if name not in ready]
            if missing:
                raise BuildError(
                    f"{described(item)} reads {missing}, which no node before it makes"
                )
            phase = max((ready[name] for name in reads), default=0)
            if phase == len(self._phases):
                self._phases.append(_Phase())
            if isinstance(item, Exchange):
                self._phases[phase].exchanges.append(replace(item, phase=phase))
                ready[item.output] = phase + 1
                continue
            if self._constants.issuperset(reads):
                self._constants.update(item.output)
            else:
                self._phases[phase].nodes.append(item)
            ready.update(dict.fromkeys(filter(None, item.output), phase))

    def steps(self, folder: Path) -> Iterator[Segment | Exchange]:
        """Write the segments, each into a file of its own."""
        exchanged = {item.output for phase in self._phases for item in phase.exchanges}
        # Outputs that no node of any phase makes. Those that are inputs need no segment: the rank has them.
        made = {name for phase in self._phases for node in phase.nodes for name in node.output}
        made |= exchanged | self._inputs.keys()
        constant = [name for name in self._outputs if name not in made]
        later: list[set[str]] = [{*self._outputs}]
        for phase in reversed(self._phases[1:]):
            needed = {name for node in phase.nodes for name in values_used(node)}
            later.insert(0, later[0] | needed | {item.input for item in phase.exchanges})
        for number, phase in enumerate(self._phases):
            own = [name for node in phase.nodes for name in node.output]
            given = {item.input for item in phase.exchanges}
            outputs = [name for name in own if name in later[number] or name in given]
            outputs += sorted((given & self._constants) - {*own})
            if number == 0:
                outputs += constant
            if outputs:
                outputs = [*dict.fromkeys(outputs)]
                yield self._write(folder, number, phase.nodes, outputs)
            yield from phase.exchanges

    def _write(
        self, folder: Path, number: int, nodes: Sequence[NodeProto], outputs: Sequence[str]
    ) -> Segment:
        source = self._model.graph
        reads = {name for node in nodes for name in values_used(node)} | {*outputs}
        copied = self._constant_nodes(reads)
        taken = reads.union(*map(values_used, copied))
        own = {name for node in nodes for name in node.output}
        inputs = sorted(
            reads - own - self._constants, key=lambda name: (name not in self._inputs, name)
        )
        segment = without_graph(self._model)
        del segment.metadata_props[:]
        graph = segment.graph
        graph.name = f"segment {number} of {source.name}"
        graph.node.extend([*copied, *nodes])
        graph.input.extend(map(self._typed, inputs))
        graph.output.extend(ValueInfoProto(name=name) for name in outputs)
        graph.initializer.extend(x for x in source.initializer if x.name in taken)
        graph.sparse_initializer.extend(
            x for x in source.sparse_initializer if x.values.name in taken
        )
        file = f"segment{number}.onnx"
        onnx.save(segment, str(folder / file))
        return Segment(file=file, phase=number, inputs=tuple(inputs), outputs=tuple(outputs))

    def _constant_nodes(self, names: Iterable[str]) -> list[NodeProto]:
        """The nodes that compute these values from initialisers alone, in their order."""
        wanted = {*names} & self._constants
        found = []
        for node in reversed(self._model.graph.node):
            if self._constants.issuperset(node.output) and not wanted.isdisjoint(node.output):
                wanted.update(values_used(node))
                found.append(node)
        return found[::-1]

    def _typed(self, name: str) -> ValueInfoProto:
        """A value as an input, without the symbols that shape inference made up."""
        if name not in self._types:
            maker = next(
                item
                for item in self._graph.items()
                if name in (item.outputs if isinstance(item, Exchange) else item.output)
            )
            raise BuildError(
                f"the type of {name!r} is unknown, which {described(maker)} makes; an entry in the "
                "graph's value_info would say it"
            )
        value = ValueInfoProto()
        value.CopyFrom(self._types[name])
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param not in self._symbols:
                dim.ClearField("dim_param")
        return value
