"""Slices in files: ONNX models with collective operators, for other programs and from them.

`mcinfer slice` writes such files, and MindSpore Lite's programs load them, also those of others. The slicer
itself does not read them. Collective operators that are read:

* ``com.microsoft::AllReduce`` (sum) and ``AllGather`` (``group_size``, ``axis``), as in ONNX Runtime's
  sources (``onnxruntime/core/graph/contrib_ops/collective_defs.cc``);
* TensorRT's ``DistCollective`` in any domain: ``collective_operation``, ``reduce_op``, ``root``,
  ``nb_rank``, ``group_size``, ``groups`` (operator reference of TensorRT 11). It gathers and scatters along
  axis 0. NVIDIA's ``polygraphy multi-device shard`` writes such nodes.

The folder of a slice is the folder of its segments' external data.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from mcinfer.errors import BuildError
from mcinfer.model_cache.onnx_files import scan
from mcinfer.ranks.slicing.graphs import (
    inferred,
    initialisers,
    known_stand_ins,
    like_input,
    resized_input,
    subgraphs,
    tensor_spec,
    with_inner,
)
from mcinfer.ranks.slicing.plans import METADATA_KEY, Exchange, ExchangeKind, RankPlan, Reduction
from mcinfer.ranks.slicing.segments import RankGraph, described
from mcinfer.specs import ModelSpec

_DOMAIN = "com.microsoft"

_KINDS: tuple[ExchangeKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_REDUCTIONS: dict[str, Reduction] = {"sum": "sum", "max": "max", "avg": "mean"}


def write_slice(graph: RankGraph, plan: RankPlan, path: Path) -> None:
    """Write a rank's graph into a file; its exchanges are sums and gathers alone."""
    model = as_model(graph, plan.tensor or 1)
    model.metadata_props.add(key=METADATA_KEY, value=json.dumps(plan.to_json()))
    path.write_bytes(model.SerializeToString(deterministic=True))


def as_model(graph: RankGraph, ranks: int) -> ModelProto:
    """The graph as a model with operators of ONNX Runtime's in the place of sums and gathers over ranks."""
    model = ModelProto()
    model.CopyFrom(graph.model)
    del model.graph.node[:]
    for item in graph.items():
        node = model.graph.node.add()
        if isinstance(item, NodeProto):
            node.CopyFrom(item)
            continue
        node.op_type, node.domain, node.name = "AllReduce", _DOMAIN, item.node
        node.input.append(item.input)
        node.output.append(item.output)
        if item.kind == "all_gather":
            node.op_type = "AllGather"
            attributes = {"group_size": ranks, "axis": item.axis}
            node.attribute.extend(helper.make_attribute(*each) for each in attributes.items())
    if graph.exchanges and all(x.domain != _DOMAIN for x in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    return model


def cut_segments(model_path: str | Path, folder: str | Path) -> RankPlan:
    """Cut a slice at its collectives; write its segments and its plan into a folder that exists.

    Raises:
        BuildError: The file is no ONNX model, or has a collective that cannot be run, or collectives and
            random numbers; with the node's name.
    """
    try:
        model = onnx.load(str(model_path), load_external_data=False)
        graph, place = _read(model)
        random, _ = scan(model_path).random
        if random and graph.exchanges:  # with a seed, too, ranks would differ once one missed a run
            raise BuildError(
                f"{random} draws random numbers, which would differ between the ranks; expected none in a "
                "slice with collectives"
            )
        return graph.write_segments(place, Path(folder))
    except (BuildError, OSError, DecodeError) as exc:
        raise BuildError(f"{model_path}: {exc}") from None


def _read(model: ModelProto) -> tuple[RankGraph, RankPlan]:
    """The graph of a rank, and the rank's plan without steps; the model is changed."""
    _refuse_inner_collectives(model)
    collectives = filter(_is_collective, model.graph.node)
    found = {"".join(node.output[:1]): _collective(node) for node in collectives}
    place = _metadata(model)
    tensor = _ranks_of_a_stage(found.values(), place)
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
    return _without_collectives(model, found), place


def _without_collectives(model: ModelProto, found: Mapping[str, "_Collective"]) -> RankGraph:
    types = _infer(model, found)
    del model.graph.value_info[:]
    model.graph.value_info.extend(types.values())
    exchanges: list[tuple[int, Exchange]] = []
    at = 0
    while at < len(model.graph.node):
        node = model.graph.node[at]
        if _is_collective(node):
            exchanges += [(at, exchange) for exchange in found[node.output[0]].exchanges]
            del model.graph.node[at]
        else:
            at += 1
    return RankGraph(model=model, exchanges=exchanges)


def _metadata(model: ModelProto) -> RankPlan | None:
    """The rank's place, without steps, if the slice says it."""
    what = f"metadata {METADATA_KEY}"
    for item in model.metadata_props:
        if item.key == METADATA_KEY:
            try:
                return RankPlan.from_json(json.loads(item.value), what)
            except ValueError as exc:
                raise BuildError(f"{what}: {exc}") from exc
    return None


def _ranks_of_a_stage(found: Iterable["_Collective"], place: RankPlan | None) -> int | None:
    """From the metadata, or else from the nodes, which must all say the same."""
    ranks = None if place is None else place.tensor
    source = f"metadata {METADATA_KEY}"
    for collective in found:
        if collective.ranks is not None:
            if ranks not in (None, collective.ranks):
                raise BuildError(
                    f"{collective.label} is for {collective.ranks} ranks, expected {ranks} as in {source}"
                )
            ranks, source = collective.ranks, collective.label
    for collective in found:
        root = collective.exchanges[0].root
        if ranks is not None and root >= ranks:
            raise BuildError(f"{collective.label} has root {root}, expected one of {ranks} ranks")
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


def _infer(model: ModelProto, found: Mapping[str, "_Collective"]) -> dict[str, ValueInfoProto]:
    """Types, and shapes where known, of the graph's values.

    Sizes that the file declares may be those of the whole model, so only the element types of `value_info`
    count, for values that the inference does not know.
    """

    def stand_ins(node: NodeProto, constants: Mapping[str, TensorProto]) -> Iterable[NodeProto]:
        if not _is_collective(node):
            return known_stand_ins(node, constants)
        collective, places = found[node.output[0]], range(len(node.input))
        kind, axis = collective.exchanges[0].kind, collective.exchanges[0].axis
        if kind in ("all_reduce", "broadcast"):
            return [made for at in places for made in like_input(node, at, at)]
        if kind == "all_gather" and collective.ranks is not None:
            return [
                helper.make_node("Concat", [given] * collective.ranks, [output], axis=axis)
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
    return node.domain == _DOMAIN and node.op_type in ("AllReduce", "AllGather", "AllToAll")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collective:
    """What a collective node means.

    Attributes:
        label: How a message names it.
        exchanges: One for each of its inputs.
        ranks: None if the node does not say how many there are.
    """

    label: str
    exchanges: Sequence[Exchange]
    ranks: int | None


def _collective(node: NodeProto) -> _Collective:
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
    return _Collective(label=described(node), exchanges=exchanges, ranks=ranks)


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
