"""Models of the kinds that exporters and editors write, cut whole: from a file to checked slices."""

import resource
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from mcinfer.ranks.slicing import rules
from mcinfer.ranks.slicing.graphs import Graph, View, infer
from mcinfer.ranks.slicing.pipeline import cut_stages
from mcinfer.ranks.slicing.placements import REPLICATED, Sharded
from mcinfer.ranks.slicing.slicer import SliceReport, slice_model
from tests.lockstep import check_ranks, operators
from tests.text_models import text_model

LAYERS = "{ [first] wide = MatMul(x, up)  [relu] positive = Relu(wide)  [second] y = MatMul(positive, down) }"
LAYER_WEIGHTS = {"up": (64, 128), "down": (128, 64)}


def sliced(model: ModelProto, folder: Path, *, tensor: int = 1, pipeline: int = 1) -> SliceReport:
    onnx.save(model, folder / "model.onnx")
    return slice_model(folder / "model.onnx", folder / "slices", tensor=tensor, pipeline=pipeline)


# Shapes that a model declares.


@pytest.mark.parametrize(
    "declared", ["float[1,128] wide", "float[batch,32] wide, float[5] positive"]
)
def test_declared_shapes_that_are_wrong_do_not_make_wrong_slices(
    tmp_path: Path, declared: str
) -> None:
    text = f"(float[batch,64] x) => (float[batch,64] y) <{declared}> {LAYERS}"
    report = sliced(text_model(text, LAYER_WEIGHTS), tmp_path, tensor=2, pipeline=2)
    assert report.check.state == "passed"
    assert sum(rank.weight_bytes for rank in report.ranks) <= 1.02 * report.weight_bytes


def test_symbols_of_declared_shapes_do_not_hide_sizes_from_the_balance() -> None:
    declared = ", ".join(f"float[s77,256] {name}{n}" for n in range(4) for name in "mr")
    body = "  ".join(
        f"m{n} = MatMul({f'r{n - 1}' if n else 'x'}, w{n})  r{n} = Relu(m{n})" for n in range(4)
    )
    text = f"(float[s77,256] x) => (float[s77,256] r3) <{declared}> {{ {body} }}"
    model = text_model(text, {f"w{n}": (256, 256) for n in range(4)})
    values = infer(model)
    assert values.shapes["m1"] == (1, 256)
    assert values.bytes("m1") == 1024
    assert [stage.bytes_received for stage in cut_stages(model, 2, values)] == [0, 1024]


@pytest.mark.parametrize(
    ("operator", "opset"),
    [("LayerNormalization", 16), ("com.microsoft.FastGelu", 17), ("com.microsoft.NhwcMaxPool", 17)],
)
def test_operators_of_onnx_runtime_alone_have_types(operator: str, opset: int) -> None:
    text = f"(float[batch,8] x) => (float[batch,8] y) {{ h = {operator}(x)  y = Relu(h) }}"
    values = infer(text_model(text, opset=opset))
    assert values.is_sendable("h")
    assert values.shapes.get("h") == (None if "NhwcMaxPool" in operator else (1, 8))


def test_work_is_balanced_before_weights() -> None:
    """Four layers with large weights, then six with small ones on more rows."""
    names = ["x", "m0", "m1", "m2", "m3", "rows", *(f"m{n}" for n in range(4, 10))]
    body = [
        f"{made} = " + (f"Reshape({x}, shape)" if made == "rows" else f"MatMul({x}, w{made[1:]})")
        for x, made in pairwise(names)
    ]
    text = f"(float[256,256] x) => (float[1024,64] m9) {{ {' '.join(body)} }}"
    shape = {"shape": np.array([-1, 64])}
    sizes = {f"w{n}": (256, 256) if n < 4 else (64, 64) for n in range(10)}
    first, second = cut_stages(text_model(text, sizes | shape), 2)
    assert [node.output[0] for node in first.model.graph.node] == ["m0", "m1", "m2"]
    assert 0.5 < first.operations / (first.operations + second.operations) < 0.6


def test_error_of_a_full_disk_names_the_folder_and_leaves_nothing(tmp_path: Path) -> None:
    text = f"(float[1,64] x) => (float[1,64] y) {LAYERS}"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    onnx.save(text_model(text, LAYER_WEIGHTS), tmp_path / "model.onnx")
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))
    try:
        with pytest.raises(OSError, match="slices"):
            slice_model(tmp_path / "model.onnx", tmp_path / "slices", tensor=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]


# Functions.


def test_weights_that_functions_take_are_cut(tmp_path: Path) -> None:
    body = f"""<domain: "own", opset_import: ["": 17]> Mlp (x, up, down) => (y) {LAYERS}"""
    text = """(float[batch,64] x) => (float[batch,64] y)
    { [one] z = own.Mlp(x, up, down)  [two] y = own.Mlp(z, up, down) }"""
    report = sliced(text_model(text, LAYER_WEIGHTS, functions=body), tmp_path, tensor=2)
    assert report.check.state == "passed"
    assert {weight.name for weight in report.stages[0].sharded} == {"up", "down"}


# Attention, of queries, keys and values that MatMuls make.


def attention(keys: int) -> ModelProto:
    """Four heads of queries, each of eight numbers, and so many of keys and values."""
    weights = {"wq": (32, 32), "wk": (32, 8 * keys), "wv": (32, 8 * keys), "wo": (32, 32)}
    text = f"""(float[batch,6,32] x, float[1,4,6,6] bias) => (float[batch,6,32] y) {{
        q = MatMul(x, wq)  k = MatMul(x, wk)  v = MatMul(x, wv)
        h = Attention<q_num_heads=4, kv_num_heads={keys}>(q, k, v, bias)  y = MatMul(h, wo)
    }}"""
    return text_model(text, weights, opset=23)


@pytest.mark.parametrize("keys", [4, 2])
def test_attention_of_onnx_is_cut_by_heads(keys: int) -> None:
    report = check_ranks(attention(keys))
    assert {weight.name for weight in report.sharded} == {"wq", "wk", "wv", "wo"}
    assert operators(report) == {"AllReduce": 1}


def test_attention_whose_keys_have_too_few_heads_is_not_cut() -> None:
    model = attention(2)
    graph = Graph(model, infer(model))
    [number] = [at for at, node in enumerate(graph.nodes) if node.op_type == "Attention"]
    forms = [(REPLICATED,)] * 4
    refused = rules.cut(View(graph, number, 4), 0, Sharded(2, (32,)), forms)
    assert refused == "4 heads, of keys 2, cannot be cut in 4"


def test_pad_of_some_axes_runs_whole() -> None:
    text = """(float[3,64] x) => (float[5,64] y) {
        wide = MatMul(x, up)  padded = Pad(wide, pads, , axes)  y = MatMul(padded, down)
    }"""
    weights = LAYER_WEIGHTS | {"pads": np.array([1, 1]), "axes": np.array([0])}
    assert check_ranks(text_model(text, weights, opset=18)).collectives
