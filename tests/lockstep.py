"""Runs the slices of a model in one process: all ranks in lock step, or stages one after another.

Each rank's graph is cut at its collectives, which NumPy computes; what lies between runs in ONNX Runtime.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from mcinfer.ranks.slicing.graphs import BITS, values_used
from mcinfer.ranks.slicing.pipeline import Stage
from mcinfer.ranks.slicing.tensor import (
    CollectiveNode,
    ShardedWeight,
    StageReport,
    TensorSlices,
    WholeWeight,
    slice_tensor,
)
from mcinfer.ranks.slicing.weights import Recipe

Arrays = dict[str, NDArray[Any]]


def models_of(slices: TensorSlices) -> list[ModelProto]:
    """The models of all ranks, with their weights in memory."""
    models = []
    for recipes in slices.recipes:
        model = ModelProto()
        model.CopyFrom(slices.model)
        model.graph.initializer.extend(map(_tensor, recipes))
        models.append(model)
    return models


def _tensor(recipe: Recipe) -> TensorProto:
    source = recipe.source
    tensor = TensorProto(name=recipe.name, data_type=source.data_type, dims=source.dims)
    # As bytes, since NumPy lacks some types.
    raw = source.raw_data or numpy_helper.from_array(numpy_helper.to_array(source)).raw_data
    array = np.frombuffer(raw, f"V{BITS[source.data_type] // 8}").reshape(source.dims)
    if recipe.ranges is not None:
        taken = [array.take(range(*span), recipe.axis) for span in recipe.ranges]
        array = np.concatenate(taken, recipe.axis)
    tensor.dims[:] = array.shape
    tensor.raw_data = array.tobytes()
    return tensor


def run_whole(model: ModelProto, feeds: Mapping[str, NDArray[Any]]) -> Arrays:
    """The outputs of a model by name."""
    names = [x.name for x in model.graph.output]
    return dict(zip(names, _session(model).run(names, dict(feeds)), strict=True))


def run_slices(models: Sequence[ModelProto], feeds: Mapping[str, NDArray[Any]]) -> list[Arrays]:
    """The outputs of every rank by name."""
    for model in models:
        onnx.checker.check_model(_without_collectives(model))
    values = [dict(feeds) for _ in models]
    waiting: list[int] = []
    for number, node in enumerate(models[0].graph.node):
        if node.op_type not in ("AllReduce", "AllGather"):
            waiting.append(number)
            continue
        _run(models, waiting, number, values)
        waiting = []
        parts = [own[node.input[0]] for own in values]
        assert len({part.shape for part in parts}) == 1
        if node.op_type == "AllReduce":
            whole = np.sum(np.stack(parts), axis=0, dtype=parts[0].dtype)
        else:
            attributes = {item.name: item.i for item in node.attribute}
            assert attributes["group_size"] == len(models)
            whole = np.concatenate(parts, attributes["axis"])
        for own in values:
            own[node.output[0]] = whole
    _run(models, waiting, len(models[0].graph.node), values)
    names = [x.name for x in models[0].graph.output]
    return [{name: own[name] for name in names} for own in values]


class Cut(NamedTuple):
    """What was cut, and the bytes of the weights of the whole and of each rank."""

    sharded: Sequence[ShardedWeight]
    whole: Sequence[WholeWeight]
    collectives: Sequence[CollectiveNode]
    weight_bytes: int
    rank_bytes: int


def check_ranks(
    model: ModelProto, ranks: int = 2, *, slices: TensorSlices | None = None, **sizes: int
) -> Cut:
    """Ranks give the same bits, and what the whole model gives; symbols have size 3 unless given."""
    rng = np.random.default_rng(1)
    feeds: Arrays = {}
    for x in model.graph.input:
        tensor = x.type.tensor_type
        shape = [dim.dim_value or sizes.get(dim.dim_param, 3) for dim in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if dtype.kind == "i":
            feeds[x.name] = rng.integers(0, 16, shape).astype(dtype)
        else:
            feeds[x.name] = rng.standard_normal(shape).astype(dtype)
    before = model.SerializeToString(deterministic=True)
    slices = slices or slice_tensor(model, ranks)
    assert model.SerializeToString(deterministic=True) == before
    models = models_of(slices)
    found = run_slices(models, feeds)
    for name, expected in run_whole(model, feeds).items():
        got = found[0][name]
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        tolerance = {"float64": 1e-10, "float32": 1e-5, "float16": 5e-3}[got.dtype.name]
        assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()
        for other in found[1:]:
            assert other[name].tobytes() == got.tobytes()
    rank_bytes = {_bytes(rank) for rank in models}
    assert len(rank_bytes) == 1
    report = slices.report
    return Cut(report.sharded, report.whole, report.collectives, _bytes(model), rank_bytes.pop())


def _bytes(model: ModelProto) -> int:
    return sum(numpy_helper.to_array(x).nbytes for x in model.graph.initializer)


def operators(report: Cut | StageReport) -> dict[str, int]:
    return Counter(node.operator for node in report.collectives)


def check_stages(model: ModelProto, stages: Sequence[Stage], inputs: Arrays) -> None:
    """The stages give what the model gives, bit by bit; each gets what earlier ones send to it alone."""
    made: Arrays = {}
    for number, stage in enumerate(stages):
        given = {}
        for value in stage.model.graph.input:
            if value.name not in inputs:
                assert number in stages[stage.receives[value.name]].sends[value.name]
            given[value.name] = inputs[value.name] if value.name in inputs else made[value.name]
        made |= run_whole(stage.model, given)
    for name, expected in run_whole(model, inputs).items():
        np.testing.assert_array_equal(made[name], expected, name)


def _run(
    models: Sequence[ModelProto], numbers: Sequence[int], until: int, values: list[Arrays]
) -> None:
    """Run some consecutive nodes in each rank; `values` gets what later nodes, or the caller, take."""
    if not numbers:
        return
    nodes = [models[0].graph.node[number] for number in numbers]
    later = _inputs(models[0].graph.node[until:]) | {x.name for x in models[0].graph.output}
    made = {name for node in nodes for name in node.output if name}
    outputs = sorted(made & later)
    if not outputs:
        return
    needed = _inputs(nodes) - made
    for model, own in zip(models, values, strict=True):
        graph = GraphProto(name="segment")
        graph.node.extend(model.graph.node[number] for number in numbers)
        graph.initializer.extend(x for x in model.graph.initializer if x.name in needed)
        feeds = {name: own[name] for name in sorted(needed) if name in own}
        graph.input.extend(
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in feeds.items()
        )
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        segment = ModelProto(ir_version=model.ir_version, graph=graph)
        segment.opset_import.extend(model.opset_import)
        own.update(zip(outputs, _session(segment).run(outputs, feeds), strict=True))


def _inputs(nodes: Sequence[NodeProto]) -> set[str]:
    return {name for node in nodes for name in values_used(node)}


def _without_collectives(model: ModelProto) -> ModelProto:
    """For the checker, which does not know them: each is an Identity. Shapes are not checked."""
    checked = ModelProto()
    checked.CopyFrom(model)
    for node in checked.graph.node:
        if node.op_type in ("AllReduce", "AllGather"):
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
    for output in checked.graph.output:
        output.type.tensor_type.shape.SetInParent()
    return checked


def _session(model: ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
