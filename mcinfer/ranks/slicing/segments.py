"""Cut one rank's slice at its collective nodes, into segments that a runtime without collectives can run.

::

    slice      x ── MatMul ── AllReduce ── Add ── MatMul ── AllReduce ── y
    steps      [ segment 0 ]  exchange  [ segment 1 ]      exchange
    phase            0            0           1                1

A node's phase is the number of collectives that must run before it. So each segment does all that can be
done before its phase's exchanges, and the exchanges of a phase run one after another, in the order of the
file. Thus ranks run the same exchanges in the same order if their slices have the same collectives in the
same order.

Collective nodes that are read:

* ``com.microsoft::AllReduce`` (sum) and ``AllGather`` (``group_size``, ``axis``), as in ONNX Runtime's
  sources (``onnxruntime/core/graph/contrib_ops/collective_defs.cc``);
* TensorRT's ``DistCollective`` in any domain: ``collective_operation``, ``reduce_op``, ``root``,
  ``nb_rank``, ``group_size``, ``groups`` (operator reference of TensorRT 11). It gathers and scatters along
  axis 0. NVIDIA's ``polygraphy multi-device shard`` writes such nodes.

A segment's file has its nodes and initialisers. Initialisers with external data name the same files as the
slice does, so the folder of the slice is the folder of the segments' external data.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from mcinfer.errors import BuildError
from mcinfer.ranks.slicing.graphs import (
    BITS,
    drawing,
    inferred,
    known_stand_ins,
    label,
    like_input,
    resized_input,
    subgraphs,
    tensor_spec,
    values_used,
    with_inner,
    without_graph,
)
from mcinfer.ranks.slicing.plans import (
    METADATA_KEY,
    Exchange,
    ExchangeKind,
    RankPlan,
    Reduction,
    Segment,
)
from mcinfer.specs import ModelSpec

_KINDS: tuple[ExchangeKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_REDUCTIONS: dict[str, Reduction] = {"sum": "sum", "max": "max", "avg": "mean"}


def cut_segments(model_path: str | Path, folder: str | Path) -> RankPlan:
    """Cut a slice; write its segments and its plan (`PLAN_FILE`) into a folder that exists.

    Raises:
        BuildError: The file is no ONNX model, or has a collective that cannot be run, or collectives and
            random numbers; with the node's name.
    """
    model = _loaded(model_path)
    try:
        return _Cut(model).write(Path(folder))
    except BuildError as exc:
        raise BuildError(f"{model_path}: {exc}") from None


def _loaded(path: str | Path) -> ModelProto:
    try:
        return onnx.load(str(path), load_external_data=False)
    except (OSError, DecodeError) as exc:
        raise BuildError(f"{path}: {exc}") from exc


def rounding(slices: Iterable[Path]) -> tuple[str, int] | None:
    """The node of some slices that quantises values to the fewest bits, and these; None if there is none."""
    found = []
    for path in slices:
        model = _loaded(path)
        kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
        for node in with_inner(model.graph.node):
            if "Quantize" in node.op_type or node.op_type.startswith("QLinear"):
                zero_point = "".join(node.input[2:3]) if node.op_type == "QuantizeLinear" else ""
                bits = BITS.get(kinds.get(zero_point, TensorProto.UINT8), 8)
                found.append((label(node), bits))
    return min(found, key=lambda item: item[1], default=None)


# Nodes.


def _is_collective(node: NodeProto) -> bool:
    if node.op_type == "DistCollective":
        return True
    return node.domain == "com.microsoft" and node.op_type in ("AllReduce", "AllGather", "AllToAll")


def _described(node: NodeProto) -> str:
    return f"{node.op_type} {(node.name or next(iter(node.output), ''))!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collective:
    """The meaning of a collective node; `ranks` is None if the node does not say how many there are."""

    kind: ExchangeKind
    operation: Reduction = "sum"
    axis: int = 0
    root: int = 0
    ranks: int | None = None


def _collective(node: NodeProto) -> _Collective:
    values = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    if not node.input or len(node.input) != len(node.output) or "" in (*node.input, *node.output):
        raise BuildError(
            f"{_described(node)} has the inputs {[*node.input]} and the outputs {[*node.output]}, "
            "expected one output for each input"
        )
    if node.op_type == "DistCollective":
        return _dist_collective(node, values)
    if node.op_type == "AllReduce":
        _only_attributes(node, values, ())
        return _Collective(kind="all_reduce")
    if node.op_type == "AllGather":
        _only_attributes(node, values, ("group_size", "axis"))
        # The defaults are those of the operator's schema.
        return _Collective(
            kind="all_gather", axis=values.get("axis", 1), ranks=values.get("group_size", 1)
        )
    raise BuildError(f"{_described(node)} is not supported, expected AllReduce or AllGather")


def _only_attributes(node: NodeProto, values: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [name for name in values if name not in known]
    if unknown:
        raise BuildError(
            f"{_described(node)} has the attributes {unknown}, expected none but {[*known]}"
        )


def _dist_collective(node: NodeProto, values: Mapping[str, Any]) -> _Collective:
    known = ("collective_operation", "reduce_op", "root", "nb_rank", "group_size", "groups")
    _only_attributes(node, values, known)
    wanted, reduction = (
        _text(values.get(name, b"none")) for name in ("collective_operation", "reduce_op")
    )
    kind = next((kind for kind in _KINDS if kind == wanted), None)
    if kind is None:
        raise BuildError(
            f"{_described(node)} has collective_operation {wanted!r}, expected one of {[*_KINDS]}"
        )
    reduces = kind in ("all_reduce", "reduce_scatter")
    if reduces and reduction not in _REDUCTIONS:
        raise BuildError(
            f"{_described(node)} has reduce_op {reduction!r}, expected one of {[*_REDUCTIONS]}"
        )
    root = values.get("root", -1) if kind == "broadcast" else 0
    if root < 0:
        raise BuildError(f"{_described(node)} has root {root}, expected a rank")
    # Each of the three says how many ranks there are; 0 and 1 stand for all.
    groups = [*values.get("groups", ())]
    sizes = {values.get("nb_rank", 1), values.get("group_size", 0), len(groups)} - {0, 1}
    if len(sizes) > 1 or groups != [*range(len(groups))]:
        raise BuildError(
            f"{_described(node)} has nb_rank {values.get('nb_rank', 1)}, group_size "
            f"{values.get('group_size', 0)} and groups {groups}, expected all ranks of the stage"
        )
    return _Collective(
        kind=kind,
        operation=_REDUCTIONS[reduction] if reduces else "sum",
        root=root,
        ranks=next(iter(sizes), None),
    )


def _text(value: Any) -> str:
    return value.decode().lower() if isinstance(value, bytes) else str(value)


# The cut.


@dataclass(slots=True)
class _Phase:
    """What runs between two rounds of collectives, then the collectives."""

    nodes: list[NodeProto] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)


class _Cut:
    def __init__(self, model: ModelProto) -> None:
        self._model = model
        graph = model.graph
        self._initialisers = {
            *(tensor.name for tensor in graph.initializer),
            *(sparse.values.name for sparse in graph.sparse_initializer),
        }
        self._inputs = {
            value.name: value for value in graph.input if value.name not in self._initialisers
        }
        self._outputs = [value.name for value in graph.output]
        self._makers = {name: node for node in graph.node for name in node.output if name}
        self._refuse_inner_collectives()
        self._place = self._metadata()
        self._collectives = {
            id(node): _collective(node) for node in graph.node if _is_collective(node)
        }
        self._tensor = self._ranks_of_a_stage()
        self._refuse_random_numbers()
        self._constants = {*self._initialisers}
        self._phases: list[_Phase] = [_Phase()]
        self._sort_into_phases()

    def _refuse_inner_collectives(self) -> None:
        inside = [
            (inner, f"a subgraph of {_described(node)}")
            for node in self._model.graph.node
            for graph in subgraphs(node)
            for inner in with_inner(graph.node)
        ]
        for function in self._model.functions:
            where = f"the function {function.name!r}"
            inside += [(inner, where) for inner in with_inner(function.node)]
        for inner, where in inside:
            if _is_collective(inner):
                raise BuildError(
                    f"{_described(inner)} is in {where}, expected collectives in the main graph alone"
                )

    def _refuse_random_numbers(self) -> None:
        """Ranks with collectives would draw different ones, with a seed too once one rank missed a run."""
        if not self._collectives:
            return
        tensors = {tensor.name: tensor for tensor in self._model.graph.initializer}
        functions = (function.node for function in self._model.functions)
        for nodes in (self._live_nodes(), *functions):
            random = drawing(nodes, tensors)
            if random is not None:
                raise BuildError(
                    f"node {label(random)} draws random numbers, which would differ between the ranks; "
                    "expected none in a slice with collectives"
                )

    def _metadata(self) -> RankPlan | None:
        """The rank's place, without steps, if the slice says it."""
        for item in self._model.metadata_props:
            if item.key == METADATA_KEY:
                what = f"metadata {METADATA_KEY}"
                try:
                    return RankPlan.from_json(json.loads(item.value), what)
                except ValueError as exc:
                    raise BuildError(f"{what}: {exc}") from exc
        return None

    def _ranks_of_a_stage(self) -> int | None:
        """From the metadata, or else from the nodes, which must all say the same."""
        ranks = None if self._place is None else self._place.tensor
        source = f"metadata {METADATA_KEY}"
        said = [
            (node, self._collectives[id(node)])
            for node in self._model.graph.node
            if id(node) in self._collectives
        ]
        for node, collective in said:
            if collective.ranks is not None:
                if ranks not in (None, collective.ranks):
                    raise BuildError(
                        f"{_described(node)} is for {collective.ranks} ranks, expected {ranks} as in "
                        f"{source}"
                    )
                ranks, source = collective.ranks, _described(node)
        for node, collective in said:
            if ranks is not None and collective.root >= ranks:
                raise BuildError(
                    f"{_described(node)} has root {collective.root}, expected one of {ranks} ranks"
                )
        return ranks

    def _live_nodes(self) -> list[NodeProto]:
        """The nodes that an output or a collective needs, in the order of the file."""
        nodes = self._model.graph.node
        wanted = {*self._outputs}
        live = []
        for node in reversed(nodes):
            if id(node) in self._collectives or not wanted.isdisjoint(node.output):
                wanted.update(values_used(node))
                live.append(node)
        return live[::-1]

    def _sort_into_phases(self) -> None:
        ready = dict.fromkeys((*self._initialisers, *self._inputs), 0)
        for node in self._live_nodes():
            reads = values_used(node)
            missing = [name for name in reads if name not in ready]
            if missing:
                raise BuildError(
                    f"{_described(node)} reads {missing}, which no node before it makes"
                )
            phase = max((ready[name] for name in reads), default=0)
            collective = self._collectives.get(id(node))
            if collective is not None:
                self._phase(phase).exchanges += self._exchanges(node, collective, phase)
                phase += 1
            elif self._constants.issuperset(reads):
                self._constants.update(node.output)
            else:
                self._phase(phase).nodes.append(node)
            ready.update(dict.fromkeys((name for name in node.output if name), phase))

    def _phase(self, number: int) -> _Phase:
        while len(self._phases) <= number:
            self._phases.append(_Phase())
        return self._phases[number]

    @staticmethod
    def _exchanges(node: NodeProto, found: _Collective, phase: int) -> list[Exchange]:
        return [
            Exchange(
                node=node.name or output,
                phase=phase,
                kind=found.kind,
                operation=found.operation,
                axis=found.axis,
                root=found.root,
                input=given,
                output=output,
            )
            for given, output in zip(node.input, node.output, strict=True)
        ]

    # Writing.

    def write(self, folder: Path) -> RankPlan:
        types = _infer(self._model, self._collectives)
        steps: list[Segment | Exchange] = []
        exchanged = {item.output for phase in self._phases for item in phase.exchanges}
        # Outputs that no node of any phase makes. Those that are inputs need no segment: the rank has them.
        made = {name for phase in self._phases for node in phase.nodes for name in node.output}
        constant = [
            name for name in self._outputs if name not in made | exchanged | self._inputs.keys()
        ]
        later: list[set[str]] = [{*self._outputs}]
        for phase in reversed(self._phases[1:]):
            needed = {name for node in phase.nodes for name in self._variables(node)}
            later.insert(0, later[0] | needed | {item.input for item in phase.exchanges})
        for number, phase in enumerate(self._phases):
            own = {name for node in phase.nodes for name in node.output}
            given = {item.input for item in phase.exchanges}
            outputs = [
                name
                for node in phase.nodes
                for name in node.output
                if name in later[number] or name in given
            ]
            outputs += sorted(given & self._constants - own)
            if number == 0:
                outputs += constant
            if outputs:
                outputs = [*dict.fromkeys(outputs)]
                steps.append(self._write_segment(folder, number, phase.nodes, outputs, types))
            steps += phase.exchanges
        plan = self._plan(steps)
        plan.write(folder)
        return plan

    def _variables(self, node: NodeProto) -> list[str]:
        return [name for name in values_used(node) if name not in self._constants]

    def _write_segment(
        self,
        folder: Path,
        number: int,
        nodes: Sequence[NodeProto],
        outputs: Sequence[str],
        types: Mapping[str, ValueInfoProto],
    ) -> Segment:
        reads = {name for node in nodes for name in values_used(node)} | {*outputs}
        copied = self._constant_nodes(reads)
        initialisers = {
            name for node in copied for name in values_used(node) if name in self._initialisers
        }
        initialisers |= reads & self._initialisers
        own = {name for node in nodes for name in node.output}
        inputs = sorted(
            (reads - own - self._constants), key=lambda name: (name not in self._inputs, name)
        )
        segment = without_graph(self._model)
        del segment.metadata_props[:]
        graph = segment.graph
        graph.name = f"segment {number} of {self._model.graph.name}"
        graph.input.extend(self._value(name, types) for name in inputs)
        graph.output.extend(self._value(name, types, typed=False) for name in outputs)
        graph.node.extend([*copied, *nodes])
        graph.initializer.extend(
            item for item in self._model.graph.initializer if item.name in initialisers
        )
        graph.sparse_initializer.extend(
            item
            for item in self._model.graph.sparse_initializer
            if item.values.name in initialisers
        )
        file = f"segment{number}.onnx"
        onnx.save(segment, str(folder / file))
        return Segment(file=file, phase=number, inputs=tuple(inputs), outputs=tuple(outputs))

    def _constant_nodes(self, names: Iterable[str]) -> list[NodeProto]:
        """The nodes that compute these values from initialisers alone, in the order of the file."""
        wanted = {*names} & self._constants
        found = []
        for node in reversed(self._model.graph.node):
            if self._constants.issuperset(node.output) and not wanted.isdisjoint(node.output):
                wanted.update(values_used(node))
                found.append(node)
        return found[::-1]

    def _value(
        self, name: str, types: Mapping[str, ValueInfoProto], *, typed: bool = True
    ) -> ValueInfoProto:
        known = self._inputs.get(name) or types.get(name)
        if known is not None:
            return known
        if typed:
            raise BuildError(
                f"the type of {name!r} is unknown, which {_described(self._makers[name])} makes; an "
                "entry in the graph's value_info would say it"
            )
        return ValueInfoProto(name=name)

    def _plan(self, steps: Sequence[Segment | Exchange]) -> RankPlan:
        if self._place is not None:
            made = {spec.name for spec in self._place.spec.outputs}
            made_here = tuple(name for name in self._outputs if name in made)
            return replace(self._place, made=made_here, steps=tuple(steps))
        graph = self._model.graph
        return RankPlan(
            rank=None,
            tensor=self._tensor,
            pipeline=1,
            spec=ModelSpec(
                inputs=tuple(map(tensor_spec, self._inputs.values())),
                outputs=tuple(map(tensor_spec, graph.output)),
            ),
            receives={},
            sends={},
            made=tuple(self._outputs),
            steps=tuple(steps),
        )


# Types of the values.


def _infer(model: ModelProto, collectives: Mapping[int, _Collective]) -> dict[str, ValueInfoProto]:
    """Types, and shapes where known, of the graph's values.

    Sizes that the file declares may be those of the whole model, so only the element types of `value_info`
    count, for values that the inference does not know.
    """
    graph = model.graph

    def stand_ins(node: NodeProto, constants: Mapping[str, TensorProto]) -> Iterable[NodeProto]:
        if id(node) not in collectives:
            return known_stand_ins(node, constants)
        collective, places = collectives[id(node)], range(len(node.input))
        if collective.kind in ("all_reduce", "broadcast"):
            return [made for at in places for made in like_input(node, at, at)]
        if collective.kind == "all_gather" and collective.ranks is not None:
            return [
                helper.make_node(
                    "Concat", [given] * collective.ranks, [output], axis=collective.axis
                )
                for given, output in zip(node.input, node.output, strict=True)
            ]
        return [made for at in places for made in resized_input(node, at)]

    found = inferred(model, stand_ins=stand_ins)
    symbols = {size.dim_param for value in graph.input for size in value.type.tensor_type.shape.dim}
    for value in found.values():
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param not in symbols:  # made up by the inference
                size.ClearField("dim_param")
    for value in (*graph.value_info, *graph.output):
        element_type = value.type.tensor_type.elem_type
        if value.name not in found and element_type:
            found[value.name] = helper.make_tensor_value_info(value.name, element_type, None)
    return found
