"""The slice of one rank: a model with collective nodes, cut there into segments that a runtime can run.

::

    nodes      x ── MatMul ── AllReduce ── Add ── MatMul ── AllReduce ── y
    steps      [ segment 0 ]  exchange   [ segment 1 ]     exchange
    phase            0            0            1               1

A step's phase is the number of exchanges that must run before it. So each segment does all that can be done
before its phase's exchanges, and the exchanges of a phase run one after another, in the order of the graph.
Thus ranks run the same exchanges in the same order if their slices have the same collectives in the same
order. A segment's file has its nodes and initialisers. Initialisers with external data name the same files as
those of the slice do.

`mcinfer slice` writes slices into files, and MindSpore Lite's programs load them, also those of others. The
slicer itself does not read them. Collective operators that are read:

* ``com.microsoft::AllReduce`` (sum) and ``AllGather`` (``group_size``, ``axis``), as in ONNX Runtime's
  sources (``onnxruntime/core/graph/contrib_ops/collective_defs.cc``);
* TensorRT's ``DistCollective`` in any domain: ``collective_operation``, ``reduce_op``, ``root``,
  ``nb_rank``, ``group_size``, ``groups`` (operator reference of TensorRT 11). It gathers and scatters along
  axis 0. NVIDIA's ``polygraphy multi-device shard`` writes such nodes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from mcinfer.errors import BuildError
from mcinfer.model_cache.onnx_files import scan
from mcinfer.ranks.slicing.graphs import (
    BITS,
    RUNTIME_DOMAIN,
    inferred,
    initialisers,
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
    """Cut a slice at its collectives; write its segments and its plan into a folder that exists.

    Raises:
        BuildError: The file is no ONNX model, or has a collective that cannot be run, or collectives and
            random numbers; with the node's name.
    """
    try:
        model = onnx.load(str(model_path), load_external_data=False)
        place = _read(model)
        random = scan(model_path).random
        if random and any(map(_is_collective, model.graph.node)):
            # With a seed, too, ranks would differ once one missed a run.
            raise BuildError(
                f"{random} draws random numbers, which would differ between the ranks; expected none in a "
                "slice with collectives"
            )
        return write_segments(model, place, Path(folder))
    except (BuildError, OSError, DecodeError) as exc:
        raise BuildError(f"{model_path}: {exc}") from None


def write_segments(model: ModelProto, place: RankPlan, folder: Path) -> RankPlan:
    """Write the segments of a slice and its plan into a folder that exists.

    Args:
        model: The slice. The types in its `value_info` are those of this rank's values.
        place: The plan, without steps.
        folder: Of the segments. Their external data are read from where the model's own are.

    Raises:
        BuildError: A node takes what none before it makes, or a value that passes from one segment to
            another has no known type.
    """
    plan = replace(place, steps=tuple(_Cut(model).steps(folder)))
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


class _Cut:
    """A rank's graph in phases. What initialisers alone make is copied to where it is needed."""

    def __init__(self, model: ModelProto) -> None:
        self._model = model
        parts = model.graph
        self._items: list[NodeProto | Exchange] = []
        for node in parts.node:
            self._items += _collective(node)[0] if _is_collective(node) else [node]
        self._initialisers = initialisers(parts)
        self._inputs = {x.name: x for x in parts.input if x.name not in self._initialisers}
        self._outputs = [value.name for value in parts.output]
        values = (*parts.output, *parts.value_info, *self._inputs.values())
        self._types = {x.name: x for x in values if x.type.WhichOneof("value") is not None}
        self._symbols = {
            dim.dim_param for value in parts.input for dim in value.type.tensor_type.shape.dim
        }
        self._constants = {*self._initialisers}
        # By phase: what runs before its exchanges, and these.
        self._nodes: list[list[NodeProto]] = [[]]
        self._exchanges: list[list[Exchange]] = [[]]
        self._sort_into_phases()

    def _needed(self) -> list[NodeProto | Exchange]:
        """The exchanges, and the nodes that an output or an exchange needs, in their order."""
        wanted = {*self._outputs}
        found: list[NodeProto | Exchange] = []
        for item in reversed(self._items):
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
            if phase == len(self._nodes):
                self._nodes.append([])
                self._exchanges.append([])
            if isinstance(item, Exchange):
                self._exchanges[phase].append(replace(item, phase=phase))
                ready[item.output] = phase + 1
                continue
            if self._constants.issuperset(reads):
                self._constants.update(item.output)
            else:
                self._nodes[phase].append(item)
            ready.update(dict.fromkeys(filter(None, item.output), phase))

    def steps(self, folder: Path) -> Iterator[Segment | Exchange]:
        """Write the segments, each into a file of its own."""
        # Outputs that no node of any phase makes. Those that are inputs need no segment: the rank has them.
        made = {name for nodes in self._nodes for node in nodes for name in node.output}
        made.update(item.output for items in self._exchanges for item in items)
        constant = [name for name in self._outputs if name not in made | self._inputs.keys()]
        later: list[set[str]] = [{*self._outputs}]
        for nodes, exchanges in zip(self._nodes[:0:-1], self._exchanges[:0:-1], strict=True):
            needed = {name for node in nodes for name in values_used(node)}
            later.insert(0, later[0] | needed | {item.input for item in exchanges})
        for number, nodes in enumerate(self._nodes):
            own = [name for node in nodes for name in node.output]
            given = {item.input for item in self._exchanges[number]}
            outputs = [name for name in own if name in later[number] or name in given]
            outputs += sorted((given & self._constants) - {*own})
            if number == 0:
                outputs += constant
            if outputs:
                yield self._write(folder, number, nodes, [*dict.fromkeys(outputs)])
            yield from self._exchanges[number]

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
        for node in reversed(self._items):
            if isinstance(node, Exchange):
                continue
            if self._constants.issuperset(node.output) and not wanted.isdisjoint(node.output):
                wanted.update(values_used(node))
                found.append(node)
        return found[::-1]

    def _typed(self, name: str) -> ValueInfoProto:
        """A value as an input, without the symbols that shape inference made up."""
        if name not in self._types:
            maker = next(
                item
                for item in self._items
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


# Slices in files.


def _read(model: ModelProto) -> RankPlan:
    """The rank's plan without steps; the model's `value_info` gets the types of this rank's values."""
    _refuse_inner_collectives(model)
    place = _metadata(model)
    tensor = _ranks_of_a_stage([*filter(_is_collective, model.graph.node)], place)
    names = tuple(value.name for value in model.graph.output)
    if place is None:
        weights = initialisers(model.graph)
        inputs = (x for x in model.graph.input if x.name not in weights)
        spec = ModelSpec(
            inputs=tuple(map(tensor_spec, inputs)),
            outputs=tuple(map(tensor_spec, model.graph.output)),
        )
        place = RankPlan(rank=None, tensor=tensor, pipeline=1, spec=spec, made=names)
    else:
        made = {spec.name for spec in place.spec.outputs}
        place = replace(place, made=tuple(name for name in names if name in made))
    types = _infer(model)
    del model.graph.value_info[:]
    model.graph.value_info.extend(types.values())
    return place


def _metadata(model: ModelProto) -> RankPlan | None:
    """The rank's place, without steps, if the slice says it."""
    what = f"metadata {METADATA_KEY}"
    for item in model.metadata_props:
        if item.key == METADATA_KEY:
            try:
                return RankPlan.from_json(json.loads(item.value), what)
            except (ValueError, RecursionError) as exc:
                raise BuildError(f"{what}: {exc}") from exc
    return None


def _ranks_of_a_stage(nodes: Iterable[NodeProto], place: RankPlan | None) -> int | None:
    """From the metadata, or else from the collectives, which must all say the same."""
    ranks = None if place is None else place.tensor
    source = f"metadata {METADATA_KEY}"
    meanings = [(described(node), *_collective(node)) for node in nodes]
    for name, _, own in meanings:
        if own is not None:
            if ranks not in (None, own):
                raise BuildError(f"{name} is for {own} ranks, expected {ranks} as in {source}")
            ranks, source = own, name
    for name, exchanges, _ in meanings:
        root = exchanges[0].root
        if ranks is not None and root >= ranks:
            raise BuildError(f"{name} has root {root}, expected one of {ranks} ranks")
    return ranks


def _refuse_inner_collectives(model: ModelProto) -> None:
    inside = [
        (inner, f"a subgraph of {described(node)}")
        for node in model.graph.node
        for graph in subgraphs(node)
        for inner in with_inner(graph.node)
    ]
    for function in model.functions:
        where = f"the function {function.name!r}"
        inside += [(inner, where) for inner in with_inner(function.node)]
    for inner, where in inside:
        if _is_collective(inner):
            raise BuildError(
                f"{described(inner)} is in {where}, expected collectives in the main graph alone"
            )


def _infer(model: ModelProto) -> dict[str, ValueInfoProto]:
    """Types, and shapes where known, of the graph's values.

    Sizes that the file declares may be those of the whole model, so only the element types of `value_info`
    count, for values that the inference does not know.
    """

    def stand_ins(node: NodeProto, constants: Mapping[str, TensorProto]) -> Iterable[NodeProto]:
        if not _is_collective(node):
            return known_stand_ins(node, constants)
        (exchange, *_), ranks = _collective(node)
        places = range(len(node.input))
        if exchange.kind in ("all_reduce", "broadcast"):
            return [made for at in places for made in like_input(node, at, at)]
        if exchange.kind == "all_gather" and ranks is not None:
            return [
                helper.make_node("Concat", [given] * ranks, [output], axis=exchange.axis)
                for given, output in zip(node.input, node.output, strict=True)
            ]
        return [made for at in places for made in resized_input(node, at)]

    types = inferred(model, stand_ins=stand_ins)
    for value in (*model.graph.value_info, *model.graph.output):
        element_type = value.type.tensor_type.elem_type
        if value.name not in types and element_type:
            types[value.name] = helper.make_tensor_value_info(value.name, element_type, None)
    return types


# Collective nodes.


def _is_collective(node: NodeProto) -> bool:
    if node.op_type == "DistCollective":
        return True
    return node.domain == RUNTIME_DOMAIN and node.op_type in ("AllReduce", "AllGather", "AllToAll")


def _collective(node: NodeProto) -> tuple[list[Exchange], int | None]:
    """What a collective node means, one exchange for each input; and the number of ranks, if it says it."""
    values = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    if not node.input or len(node.input) != len(node.output) or "" in (*node.input, *node.output):
        raise BuildError(
            f"{described(node)} has the inputs {[*node.input]} and the outputs {[*node.output]}, "
            "expected one output for each input"
        )
    ranks: int | None = None
    meaning: dict[str, Any] = {"kind": "all_reduce"}
    if node.op_type == "DistCollective":
        meaning, ranks = _dist_collective(node, values)
    elif node.op_type == "AllReduce":
        _only_attributes(node, values, ())
    elif node.op_type == "AllGather":
        _only_attributes(node, values, ("group_size", "axis"))
        # The defaults are those of the operator's schema.
        meaning = {"kind": "all_gather", "axis": values.get("axis", 1)}
        ranks = values.get("group_size", 1)
    else:
        raise BuildError(f"{described(node)} is not supported, expected AllReduce or AllGather")
    exchanges = [
        Exchange(node=node.name or output, input=given, output=output, **meaning)
        for given, output in zip(node.input, node.output, strict=True)
    ]
    return exchanges, ranks


def _only_attributes(node: NodeProto, values: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [name for name in values if name not in known]
    if unknown:
        raise BuildError(
            f"{described(node)} has the attributes {unknown}, expected none but {[*known]}"
        )


def _dist_collective(
    node: NodeProto, values: Mapping[str, Any]
) -> tuple[dict[str, Any], int | None]:
    """What an `Exchange` says, by its fields; and the number of ranks."""
    known = ("collective_operation", "reduce_op", "root", "nb_rank", "group_size", "groups")
    _only_attributes(node, values, known)
    wanted, reduction = (
        _text(values.get(name, b"none")) for name in ("collective_operation", "reduce_op")
    )
    kind = next((kind for kind in _KINDS if kind == wanted), None)
    if kind is None:
        raise BuildError(
            f"{described(node)} has collective_operation {wanted!r}, expected one of {[*_KINDS]}"
        )
    reduces = kind in ("all_reduce", "reduce_scatter")
    if reduces and reduction not in _REDUCTIONS:
        raise BuildError(
            f"{described(node)} has reduce_op {reduction!r}, expected one of {[*_REDUCTIONS]}"
        )
    root = values.get("root", -1) if kind == "broadcast" else 0
    if root < 0:
        raise BuildError(f"{described(node)} has root {root}, expected a rank")
    # Each of the three says how many ranks there are; 0 and 1 stand for all.
    groups = [*values.get("groups", ())]
    sizes = {values.get("nb_rank", 1), values.get("group_size", 0), len(groups)} - {0, 1}
    if len(sizes) > 1 or groups != [*range(len(groups))]:
        raise BuildError(
            f"{described(node)} has nb_rank {values.get('nb_rank', 1)}, group_size "
            f"{values.get('group_size', 0)} and groups {groups}, expected all ranks of the stage"
        )
    operation = _REDUCTIONS[reduction] if reduces else "sum"
    meaning = {"kind": kind, "operation": operation, "root": root}
    return meaning, next(iter(sizes), None)


def _text(value: Any) -> str:
    return value.decode().lower() if isinstance(value, bytes) else str(value)
