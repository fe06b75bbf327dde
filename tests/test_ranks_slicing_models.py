"""Models of the kinds that exporters and editors write, cut whole: from a file to checked slices."""

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from mcinfer.ranks.slicing import rules
from mcinfer.ranks.slicing.graphs import Graph, View, infer
from mcinfer.ranks.slicing.pipeline import cut_stages
from mcinfer.ranks.slicing.placements import REPLICATED, Sharded
from mcinfer.ranks.slicing.slicer import SliceReport, slice_model
from mcinfer.ranks.slicing.tensor import StageReport, slice_tensor
from tests.lockstep import models_of, run_slices, run_whole

Shape = Sequence[int | str]


def value(name: str, *shape: int | str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def weight(name: str, *shape: int) -> TensorProto:
    values = np.random.default_rng(len(name)).standard_normal(shape) / shape[0] ** 0.5
    return numpy_helper.from_array(values.astype(np.float32), name)


def model_of(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    weights: Sequence[TensorProto],
    *,
    opset: int = 17,
    **fields: Any,
) -> ModelProto:
    functions = fields.pop("functions", [])
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights, **fields)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    opsets += [helper.make_opsetid("package", 1)] if functions else []
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def two_layers(x: str = "x", y: str = "y") -> list[NodeProto]:
    return [
        helper.make_node("MatMul", [x, "up"], ["wide"], "first"),
        helper.make_node("Relu", ["wide"], ["positive"], "relu"),
        helper.make_node("MatMul", ["positive", "down"], [y], "second"),
    ]


LAYER_WEIGHTS = [weight("up", 64, 128), weight("down", 128, 64)]


def sliced(model: ModelProto, folder: Path, *, tensor: int = 1, pipeline: int = 1) -> SliceReport:
    onnx.save(model, folder / "model.onnx")
    return slice_model(folder / "model.onnx", folder / "slices", tensor=tensor, pipeline=pipeline)


def cut(model: ModelProto, ranks: int) -> StageReport:
    """What is cut, of slices that give what the model gives; symbols have size 2."""
    rng = np.random.default_rng(0)
    feeds = {}
    for item in model.graph.input:
        shape = [dim.dim_value or 2 for dim in item.type.tensor_type.shape.dim]
        feeds[item.name] = rng.standard_normal(shape).astype(np.float32)
    slices = slice_tensor(model, ranks)
    expected = run_whole(model, feeds)
    for found in run_slices(models_of(slices), feeds):
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)
    return slices.report


# Shapes that a model declares.


@pytest.mark.parametrize(
    "declared",
    [[value("wide", 1, 128)], [value("wide", "batch", 32), value("positive", 5)]],
    ids=["fixed batch", "other sizes"],
)
def test_declared_shapes_that_are_wrong_do_not_make_wrong_slices(
    tmp_path: Path, declared: list[ValueInfoProto]
) -> None:
    sides = [value("x", "batch", 64)], [value("y", "batch", 64)]
    model = model_of(two_layers(), *sides, LAYER_WEIGHTS, value_info=declared)
    report = sliced(model, tmp_path, tensor=2, pipeline=2)
    assert report.check.state == "passed"
    assert sum(rank.weight_bytes for rank in report.ranks) <= 1.02 * report.weight_bytes


def test_symbols_of_declared_shapes_do_not_hide_sizes_from_the_balance() -> None:
    nodes, weights, x = [], [], "x"
    for number in range(4):
        nodes.append(helper.make_node("MatMul", [x, f"w{number}"], [f"m{number}"]))
        nodes.append(helper.make_node("Relu", [f"m{number}"], [f"r{number}"]))
        weights.append(weight(f"w{number}", 256, 256))
        x = f"r{number}"
    declared = [value(name, "s77", 256) for node in nodes[:-1] for name in node.output]
    sides = [value("x", "s77", 256)], [value(x, "s77", 256)]
    model = model_of(nodes, *sides, weights, value_info=declared)
    values = infer(model)
    assert values.shapes["m1"] == (1, 256)
    assert values.bytes("m1") == 1024
    assert [stage.bytes_received for stage in cut_stages(model, 2, values)] == [0, 1024]


@pytest.mark.parametrize(
    ("name", "domain", "opset"),
    [
        ("LayerNormalization", "", 16),
        ("FastGelu", "com.microsoft", 17),
        ("NhwcMaxPool", "com.microsoft", 17),
    ],
)
def test_operators_of_onnx_runtime_alone_have_types(name: str, domain: str, opset: int) -> None:
    nodes = [
        helper.make_node(name, ["x"], ["h"], domain=domain),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    model = model_of(nodes, [value("x", "batch", 8)], [value("y", "batch", 8)], [], opset=opset)
    values = infer(model)
    assert values.is_sendable("h")
    assert values.shapes.get("h") == (None if name == "NhwcMaxPool" else (1, 8))


def test_work_is_balanced_before_weights() -> None:
    # Four layers with large weights, then six with small ones on more rows.
    nodes, weights, x = [], [], "x"
    for number in range(10):
        width = 256 if number < 4 else 64
        if number == 4:
            weights.append(numpy_helper.from_array(np.array([-1, width]), "shape"))
            nodes.append(helper.make_node("Reshape", [x, "shape"], ["rows"]))
            x = "rows"
        weights.append(weight(f"w{number}", width, width))
        nodes.append(helper.make_node("MatMul", [x, f"w{number}"], [f"m{number}"]))
        x = f"m{number}"
    sides = [value("x", 256, 256)], [value(x, 1024, 64)]
    first, second = cut_stages(model_of(nodes, *sides, weights), 2)
    assert [node.output[0] for node in first.model.graph.node] == ["m0", "m1", "m2"]
    assert 0.5 < first.operations / (first.operations + second.operations) < 0.6


def test_error_of_a_full_disk_names_the_folder(tmp_path: Path) -> None:
    onnx.save(
        model_of(two_layers(), [value("x", 1, 64)], [value("y", 1, 64)], LAYER_WEIGHTS),
        tmp_path / "model.onnx",
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))
    try:
        with pytest.raises(OSError, match="slices"):
            slice_model(tmp_path / "model.onnx", tmp_path / "slices", tensor=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]


# Functions.


def test_weights_that_functions_take_are_cut(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 17)]
    body = helper.make_function("package", "Mlp", ["x", "up", "down"], ["y"], two_layers(), opsets)
    calls = [
        helper.make_node("Mlp", ["x", "up", "down"], ["z"], "one", domain="package"),
        helper.make_node("Mlp", ["z", "up", "down"], ["y"], "two", domain="package"),
    ]
    sides = [value("x", "batch", 64)], [value("y", "batch", 64)]
    model = model_of(calls, *sides, LAYER_WEIGHTS, functions=[body])
    report = sliced(model, tmp_path, tensor=2)
    assert report.check.state == "passed"
    assert {weight.name for weight in report.stages[0].sharded} == {"up", "down"}


# Attention, of queries, keys and values that MatMuls make.

HEADS, SIZE, TOKENS = 4, 8, 6


def attention(
    kind: str, keys: int, *, axes: int = 3, bias: Shape = (), **attributes: Any
) -> ModelProto:
    nodes, weights = [], [weight("wo", HEADS * SIZE, 32)]
    inputs = [value("x", "batch", TOKENS, 32)]
    names = {}
    for name, heads in (("q", HEADS), ("k", keys), ("v", keys)):
        weights.append(weight(f"w{name}", 32, heads * SIZE))
        nodes.append(helper.make_node("MatMul", ["x", f"w{name}"], [f"{name}0"]))
        names[name] = f"{name}0"
        if axes == 4:
            shape = np.array([0, TOKENS, heads, SIZE])
            weights.append(numpy_helper.from_array(shape, f"{name}_shape"))
            nodes.append(helper.make_node("Reshape", [f"{name}0", f"{name}_shape"], [f"{name}1"]))
            nodes.append(
                helper.make_node("Transpose", [f"{name}1"], [f"{name}2"], perm=[0, 2, 1, 3])
            )
            names[name] = f"{name}2"
    given = [names["q"], names["k"], names["v"]]
    if bias:
        inputs.append(value("bias", *bias))
        given.append("bias")
    domain, _, operator = kind.rpartition("::")
    nodes.append(helper.make_node(operator, given, ["h"], "heads", domain=domain, **attributes))
    joined = "h"
    if axes == 4:
        weights.append(numpy_helper.from_array(np.array([0, 0, -1]), "joined"))
        nodes.append(helper.make_node("Transpose", ["h"], ["h1"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", ["h1", "joined"], ["h2"]))
        joined = "h2"
    nodes.append(helper.make_node("MatMul", [joined, "wo"], ["y"]))
    return model_of(nodes, inputs, [value("y", "batch", TOKENS, 32)], weights, opset=23)


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("keys", [HEADS, HEADS // 2])
@pytest.mark.parametrize("bias", [(), (TOKENS, TOKENS), (1, HEADS, TOKENS, TOKENS)], ids=str)
def test_attention_of_onnx_is_cut_by_heads(axes: int, keys: int, bias: Shape) -> None:
    counts: dict[str, Any] = {"q_num_heads": HEADS, "kv_num_heads": keys} if axes == 3 else {}
    report = cut(attention("Attention", keys, axes=axes, bias=bias, **counts), 2)
    assert {weight.name for weight in report.sharded} == {"wq", "wk", "wv", "wo"}
    assert [node.operator for node in report.collectives] == ["AllReduce"]


def test_attention_whose_keys_have_too_few_heads_is_not_cut() -> None:
    model = attention("Attention", 2, q_num_heads=HEADS, kv_num_heads=2)
    graph = Graph(model, infer(model))
    [number] = [at for at, node in enumerate(graph.nodes) if node.op_type == "Attention"]
    forms = [(REPLICATED,)] * 3
    refused = rules.cut(View(graph, number, 4), 0, Sharded(2, (HEADS * SIZE,)), forms)
    assert refused == "4 heads, of keys 2, cannot be cut in 4"


def test_pad_of_some_axes_runs_whole() -> None:
    pads, axes = np.array([1, 1]), np.array([0])
    constants = [numpy_helper.from_array(pads, "pads"), numpy_helper.from_array(axes, "axes")]
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["wide"]),
        helper.make_node("Pad", ["wide", "pads", "", "axes"], ["padded"]),
        helper.make_node("MatMul", ["padded", "down"], ["y"]),
    ]
    sides = [value("x", 3, 64)], [value("y", 5, 64)]
    report = cut(model_of(nodes, *sides, [*LAYER_WEIGHTS, *constants], opset=18), 2)
    assert len(report.collectives) >= 1
