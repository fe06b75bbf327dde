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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
)

from mcinfer.errors import BuildError
from mcinfer.slicing.graphs import RANDOM, subgraphs
from mcinfer.slicing.plans import (
    VERSION,
    Exchange,
    ExchangeKind,
    RankPlan,
    Reduction,
    Segment,
    model_spec,
)
from mcinfer.specs import ELEMENT_TYPES, ModelSpec, TensorSpec, numpy_dtype

METADATA_KEY = "mcinfer.slice"
"""The slice's metadata property with its place among the ranks."""

_KINDS: tuple[ExchangeKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_REDUCTIONS: dict[str, Reduction] = {"sum": "sum", "max": "max", "avg": "mean"}
_LARGEST_SHAPE_BYTES = 1 << 10
"""Larger initialisers are no shapes: the inference of types does without their content."""


def cut_segments(model_path: str | Path, folder: str | Path) -> RankPlan:
    """Cut a slice; write its segments and its plan (`PLAN_FILE`) into a folder that exists.

    Raises:
        BuildError: The file is no ONNX model, or has a collective that cannot be run; with the node's name.
    """
    path = Path(model_path)
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (OSError, DecodeError) as exc:
        raise BuildError(f"{path}: {exc}") from exc
    try:
        return _Cut(model).write(Path(folder))
    except BuildError as exc:
        raise BuildError(f"{path}: {exc}") from None


# Nodes.


def _is_collective(node: NodeProto) -> bool:
    if node.op_type == "DistCollective":
        return True
    return node.domain == "com.microsoft" and node.op_type in ("AllReduce", "AllGather", "AllToAll")


def _described(node: NodeProto) -> str:
    return f"{node.op_type} {(node.name or next(iter(node.output), ''))!r}"


def _with_subgraphs(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _with_subgraphs(graph.node)


def _initialisers(graph: GraphProto) -> dict[str, Any]:
    """Dense and sparse ones, by name."""
    found: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
    return found | {tensor.values.name: tensor for tensor in graph.sparse_initializer}


def _reads(node: NodeProto) -> list[str]:
    """The values that a node reads, with those that its subgraphs take from outside; each once."""
    found = dict.fromkeys(name for name in node.input if name)
    for graph in subgraphs(node):
        own = {value.name for value in graph.input} | {*_initialisers(graph)}
        own.update(name for inner in graph.node for name in inner.output)
        inside = [name for inner in graph.node for name in _reads(inner)]
        outside = [*inside, *(value.name for value in graph.output)]
        found.update(dict.fromkeys(name for name in outside if name not in own))
    return [*found]


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
        self._initialisers = _initialisers(graph)
        self._inputs = {
            value.name: value for value in graph.input if value.name not in self._initialisers
        }
        self._outputs = [value.name for value in graph.output]
        self._makers = {name: node for node in graph.node for name in node.output if name}
        self._refuse_inner_collectives()
        self._about = self._metadata()
        self._collectives = {
            id(node): _collective(node) for node in graph.node if _is_collective(node)
        }
        self._tensor = self._ranks_of_a_stage()
        self._constants: set[str] = set(self._initialisers)
        self._phases: list[_Phase] = [_Phase()]
        self._sort_into_phases()

    def _refuse_inner_collectives(self) -> None:
        for node in self._model.graph.node:
            for inner in _with_subgraphs(n for graph in subgraphs(node) for n in graph.node):
                if _is_collective(inner):
                    raise BuildError(
                        f"{_described(inner)} is in a subgraph of {_described(node)}, expected "
                        "collectives in the main graph alone"
                    )
        for function in self._model.functions:
            for inner in _with_subgraphs(function.node):
                if _is_collective(inner):
                    raise BuildError(
                        f"{_described(inner)} is in the function {function.name!r}, expected "
                        "collectives in the main graph alone"
                    )

    def _metadata(self) -> dict[str, Any] | None:
        for item in self._model.metadata_props:
            if item.key == METADATA_KEY:
                try:
                    value: dict[str, Any] = json.loads(item.value)
                except ValueError as exc:
                    raise BuildError(f"metadata {METADATA_KEY}: {exc}") from exc
                if value.get("version") != VERSION:
                    raise BuildError(
                        f"metadata {METADATA_KEY}: got version {value.get('version')!r}, "
                        f"expected {VERSION}"
                    )
                return value
        return None

    def _ranks_of_a_stage(self) -> int | None:
        """From the metadata, or else from the nodes, which must all say the same."""
        ranks: int | None = None if self._about is None else self._about["tensor"]
        source = f"metadata {METADATA_KEY}"
        for node in self._model.graph.node:
            said = self._collectives.get(id(node))
            if said is None or said.ranks is None:
                continue
            if ranks is not None and said.ranks != ranks:
                raise BuildError(
                    f"{_described(node)} is for {said.ranks} ranks, expected {ranks} as in {source}"
                )
            ranks, source = said.ranks, _described(node)
        for node in self._model.graph.node:
            said = self._collectives.get(id(node))
            if said is not None and ranks is not None and said.root >= ranks:
                raise BuildError(
                    f"{_described(node)} has root {said.root}, expected one of {ranks} ranks"
                )
        return ranks

    def _live_nodes(self) -> list[NodeProto]:
        """The nodes that an output or a collective needs, in the order of the file."""
        nodes = self._model.graph.node
        wanted = {*self._outputs}
        live = []
        for node in reversed(nodes):
            if id(node) in self._collectives or not wanted.isdisjoint(node.output):
                wanted.update(_reads(node))
                live.append(node)
        return live[::-1]

    def _sort_into_phases(self) -> None:
        ready = dict.fromkeys((*self._initialisers, *self._inputs), 0)
        for node in self._live_nodes():
            reads = _reads(node)
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
            elif node.op_type not in RANDOM and self._constants.issuperset(reads):
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
        # Outputs that no node of any phase makes: constants, and inputs that are passed on.
        made = {name for phase in self._phases for node in phase.nodes for name in node.output}
        passed_on = [name for name in self._outputs if name not in made | exchanged]
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
                outputs += passed_on
            if outputs:
                outputs = [*dict.fromkeys(outputs)]
                steps.append(self._write_segment(folder, number, phase.nodes, outputs, types))
            steps += phase.exchanges
        plan = self._plan(steps)
        plan.write(folder)
        return plan

    def _variables(self, node: NodeProto) -> list[str]:
        return [name for name in _reads(node) if name not in self._constants]

    def _write_segment(
        self,
        folder: Path,
        number: int,
        nodes: Sequence[NodeProto],
        outputs: Sequence[str],
        types: Mapping[str, ValueInfoProto],
    ) -> Segment:
        reads = {name for node in nodes for name in _reads(node)} | {*outputs}
        copied = self._constant_nodes(reads)
        initialisers = {
            name for node in copied for name in _reads(node) if name in self._initialisers
        }
        initialisers |= reads & {*self._initialisers}
        own = {name for node in nodes for name in node.output}
        inputs = sorted(
            (reads - own - self._constants), key=lambda name: (name not in self._inputs, name)
        )
        segment = ModelProto()
        segment.ir_version = self._model.ir_version
        segment.opset_import.extend(self._model.opset_import)
        segment.functions.extend(self._model.functions)
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
                wanted.update(_reads(node))
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
        about = self._about
        if about is None:
            graph = self._model.graph
            return RankPlan(
                rank=None,
                tensor=self._tensor,
                pipeline=1,
                spec=ModelSpec(
                    inputs=tuple(_tensor_spec(value) for value in self._inputs.values()),
                    outputs=tuple(_tensor_spec(value) for value in graph.output),
                ),
                receives={},
                sends={},
                made=tuple(self._outputs),
                steps=tuple(steps),
            )
        try:
            spec = model_spec(about)
            return RankPlan(
                rank=about["rank"],
                tensor=about["tensor"],
                pipeline=about["pipeline"],
                spec=spec,
                receives=dict(about["receives"]),
                sends={name: tuple(ranks) for name, ranks in about["sends"].items()},
                made=tuple(item.name for item in spec.outputs if item.name in self._outputs),
                steps=tuple(steps),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise BuildError(f"metadata {METADATA_KEY}: got a damaged one: {exc!r}") from exc


def _tensor_spec(value: ValueInfoProto) -> TensorSpec:
    names = {item.onnx: name for name, item in ELEMENT_TYPES.items()}
    tensor = value.type.tensor_type
    if tensor.elem_type not in names:
        raise BuildError(f"{value.name!r} is no tensor of one of {[*ELEMENT_TYPES]}")
    shape = tuple(
        size.dim_value if size.HasField("dim_value") else size.dim_param or None
        for size in tensor.shape.dim
    )
    return TensorSpec(name=value.name, dtype=numpy_dtype(names[tensor.elem_type]), shape=shape)


# Types of the values.


def _infer(model: ModelProto, collectives: Mapping[int, _Collective]) -> dict[str, ValueInfoProto]:
    """Types, and shapes where known, of the graph's values.

    Shape inference does not know collectives. It gets a copy of the graph with nodes of the same types in
    their places, and without large initialisers. Sizes that the file declares may be those of the whole
    model, so only the element types of `value_info` count, for values that the inference does not know.
    """
    graph = model.graph
    bare = ModelProto()
    bare.ir_version = model.ir_version
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    bare.graph.name = graph.name or "slice"
    known = {item.name for item in graph.initializer}
    bare.graph.input.extend(value for value in graph.input if value.name not in known)
    for tensor in graph.initializer:
        if _is_shape(tensor):
            bare.graph.initializer.append(tensor)
        else:
            bare.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    bare.graph.sparse_initializer.extend(graph.sparse_initializer)
    for node in graph.node:
        if id(node) in collectives:
            bare.graph.node.extend(_stand_ins(node, collectives[id(node)], bare.graph))
        else:
            bare.graph.node.append(node)
    bare.graph.output.extend(ValueInfoProto(name=value.name) for value in graph.output)
    inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    symbols = {size.dim_param for value in graph.input for size in value.type.tensor_type.shape.dim}
    found = {}
    for value in (*inferred.value_info, *inferred.output):
        if value.type.WhichOneof("value") is not None:
            for size in value.type.tensor_type.shape.dim:
                if size.dim_param not in symbols:  # made up by the inference
                    size.ClearField("dim_param")
            found[value.name] = value
    for value in (*graph.value_info, *graph.output):
        element_type = value.type.tensor_type.elem_type
        if value.name not in found and element_type:
            found[value.name] = helper.make_tensor_value_info(value.name, element_type, None)
    return found


def _is_shape(tensor: TensorProto) -> bool:
    external = tensor.data_location == TensorProto.EXTERNAL
    return not external and int(np.prod(tensor.dims)) * 8 <= _LARGEST_SHAPE_BYTES


def _stand_ins(node: NodeProto, collective: _Collective, graph: GraphProto) -> Iterator[NodeProto]:
    """Nodes whose outputs have the types of the collective's."""
    for given, output in zip(node.input, node.output, strict=True):
        if collective.kind in ("all_reduce", "broadcast"):
            yield helper.make_node("Identity", [given], [output])
        elif collective.kind == "all_gather" and collective.ranks is not None:
            yield helper.make_node(
                "Concat", [given] * collective.ranks, [output], axis=collective.axis
            )
        else:  # another shape, which is left open
            shape = f"shape of {output}"
            graph.input.append(helper.make_tensor_value_info(shape, TensorProto.INT64, [None]))
            yield helper.make_node("Reshape", [given, shape], [output])
