import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from mcinfer.errors import InvalidInputError
from mcinfer.ranks.slicing.graphs import Graph, infer, tensor_bytes
from mcinfer.ranks.slicing.placements import Placement
from mcinfer.ranks.slicing.search import ChoiceSearch, Costs
from mcinfer.ranks.slicing.slicer import write_slices
from mcinfer.ranks.slicing.tensor import (
    CollectiveNode,
    ShardedWeight,
    StageReport,
    TensorSlices,
    WholeWeight,
    slice_tensor,
    slices_of,
)
from tests.lockstep import models_of, run_slices, run_whole

BUILD_UNET = Path(__file__).parents[1] / "examples" / "sd_dual_core" / "build_unet.py"

Array = NDArray[Any]
Shape = Sequence[int | str]


class Net:
    """Builds a model; `x` is its first input."""

    def __init__(self, *shape: int | str, dtype: str = "float32", opset: int = 17) -> None:
        self.rng = np.random.default_rng(0)
        self.dtype = np.dtype(dtype)
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.input("x", *shape)

    def input(self, name: str, *shape: int | str, dtype: str = "") -> str:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype) if dtype else self.dtype)
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """The output's name, or a list of them."""
        domain, _, name = kind.rpartition("::")
        names = [f"{name}_{len(self.nodes)}.{index}" for index in range(outputs)]
        node = helper.make_node(
            name, inputs, names, name=f"{name}_{len(self.nodes)}", domain=domain, **attributes
        )
        self.nodes.append(node)
        return names[0] if outputs == 1 else names

    def weight(self, *shape: int, std: float = 0.0, mean: float = 0.0) -> str:
        std = std or shape[0] ** -0.5
        values = self.rng.standard_normal(shape) * std + mean
        return self.constant(values.astype(self.dtype), f"weight_{len(self.weights)}")

    def constant(self, values: Any, name: str = "", *, as_node: bool = False) -> str:
        array = np.asarray(values)
        if as_node:
            return str(self.op("Constant", value=numpy_helper.from_array(array)))
        name = name or f"constant_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int, as_node: bool = False) -> str:
        return self.constant(np.array(values, np.int64), as_node=as_node)

    def number(self, value: float) -> str:
        return self.constant(np.array(value, self.dtype))

    def linear(self, x: str, rows: int, columns: int) -> str:
        y = self.op("MatMul", x, self.weight(rows, columns))
        return str(self.op("Add", y, self.weight(columns, std=0.1)))

    def gelu(self, x: str) -> str:
        inner = self.op("Erf", self.op("Div", x, self.number(2**0.5)))
        half = self.op("Mul", x, self.op("Add", inner, self.number(1)))
        return str(self.op("Mul", half, self.number(0.5)))

    def layer_norm(self, x: str, width: int, *, decomposed: bool = False) -> str:
        scale, bias = self.weight(width, std=0.1, mean=1), self.weight(width, std=0.1)
        if not decomposed:
            return str(self.op("LayerNormalization", x, scale, bias, axis=-1))
        centred = self.op("Sub", x, self.op("ReduceMean", x, axes=[-1]))
        squares = self.op("ReduceMean", self.op("Pow", centred, self.number(2)), axes=[-1])
        spread = self.op("Sqrt", self.op("Add", squares, self.number(1e-5)))
        normed = self.op("Mul", self.op("Div", centred, spread), scale)
        return str(self.op("Add", normed, bias))

    def model(self, *outputs: str, shapes: Sequence[Shape | None] = ()) -> ModelProto:
        kind = helper.np_dtype_to_tensor_dtype(self.dtype)
        shapes = shapes or [None] * len(outputs)
        results = [
            helper.make_tensor_value_info(name, kind, shape)
            for name, shape in zip(outputs, shapes, strict=True)
        ]
        graph = helper.make_graph(self.nodes, "net", self.inputs, results, self.weights)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets)
        model.ir_version = 10
        return model


class Cut(NamedTuple):
    """What was cut, and the bytes of the weights of the whole and of each rank."""

    sharded: Sequence[ShardedWeight]
    whole: Sequence[WholeWeight]
    collectives: Sequence[CollectiveNode]
    weight_bytes: int
    rank_bytes: int


def check(
    model: ModelProto, ranks: int = 2, *, slices: TensorSlices | None = None, **sizes: int
) -> Cut:
    """Ranks give the same bits, and what the whole model gives; symbols have size 3 unless given."""
    rng = np.random.default_rng(1)
    feeds: dict[str, Array] = {}
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


# Perceptrons.


def mlp(*, gelu: bool = False, dtype: str = "float32", layers: int = 4) -> ModelProto:
    net = Net("batch", 64, dtype=dtype)
    x = "x"
    for _ in range(layers):
        x = net.linear(x, 64, 64)
        x = net.gelu(x) if gelu else net.op("Relu", x)
    return net.model(x)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("gelu", [False, True])
def test_perceptron_needs_one_reduction_for_two_layers(ranks: int, gelu: bool) -> None:
    report = check(mlp(gelu=gelu), ranks)
    assert operators(report) == {"AllReduce": 2}
    assert report.rank_bytes <= report.weight_bytes * (1 / ranks + 0.1)


def test_biases_are_worth_no_collective_and_weights_need_no_data() -> None:
    model = mlp()
    for weight in model.graph.initializer:
        weight.ClearField("raw_data")
        weight.dims[:] = [2048 for _ in weight.dims]
        weight.data_location = TensorProto.EXTERNAL
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 2048
    slices = slice_tensor(model, 4)
    assert operators(slices.report) == {"AllReduce": 2}
    weights = {recipe.source.name: recipe.source for recipe in slices.recipes[0]}
    assert sum(map(tensor_bytes, weights.values())) == 4 * (2048 + 1) * 2048 * 4


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_precision_is_kept(dtype: str) -> None:
    assert operators(check(mlp(dtype=dtype))) == {"AllReduce": 2}


def opposite(net: Net, *shape: int) -> str:
    """A weight that takes the first half of its rows and the second one almost away from each other."""
    weight = np.full(shape, 4.0) + net.rng.standard_normal(shape) * 0.01
    weight[shape[0] // 2 :] *= -1
    return net.constant(weight.astype(net.dtype))


@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "chain", "ReduceSum", "Conv"])
def test_terms_that_float16_cannot_hold_give_their_sum(kind: str) -> None:
    image = (3, 3) if kind == "Conv" else ()
    kernel = (1, 1) if kind == "Conv" else ()
    net = Net(2, 128, *image, dtype="float16")
    up = np.eye(128, dtype=np.float16).reshape(128, 128, *kernel)
    h = net.op("Relu", net.op("Conv" if image else "MatMul", "x", net.constant(up)))
    bias = net.weight(128, std=0.1)
    if kind == "Conv":
        down = opposite(net, 128, 128, *kernel)
        turned = net.op("Transpose", down, perm=[1, 0, 2, 3])
        y = net.op("Conv", h, turned, bias)
    elif kind == "Gemm":
        y = net.op("Gemm", h, opposite(net, 128, 128), bias, beta=2.0)
    elif kind == "ReduceSum":
        y = net.op("ReduceSum", net.op("Mul", h, opposite(net, 128)), net.ints(-1))
    else:
        y = net.op("MatMul", h, opposite(net, 128, 128))
    if kind == "chain":
        y = net.op("Neg", net.op("Add", y, net.op("MatMul", h, opposite(net, 128, 128))))
        y = net.op("Add", net.op("Mul", y, net.number(0.5)), bias)
    model = net.model(y)
    feeds = {"x": np.full((2, 128, *image), 300, np.float16)}
    slices = slice_tensor(model, 2)
    assert operators(slices.report) == {"AllReduce": 1}
    expected = run_whole(model, feeds)[y]
    for found in run_slices(models_of(slices), feeds):
        assert found[y].dtype == np.float16
        np.testing.assert_allclose(found[y], expected, rtol=2e-2, atol=0.5)


@pytest.mark.parametrize(
    ("kind", "factor", "given"),
    [
        *(("Div", 0.0, given) for given in ("input", "constant")),
        *(("Mul", np.inf, given) for given in ("input", "constant", "large constant")),
    ],
)
def test_sum_that_becomes_infinite_is_made_before(kind: str, factor: float, given: str) -> None:
    """Its terms would be infinities of both signs, which have no sum."""
    is_large = given == "large constant"
    size, width = (1024, 2048) if is_large else (128, 128)
    net = Net("batch", 128)
    h = net.op("Relu", net.linear("x", 128, size))
    factors = np.full(width if is_large else (2, 1), factor, np.float32)
    other = net.input("z", 2, 1) if given == "input" else net.constant(factors)
    y = net.op(kind, net.op("MatMul", h, opposite(net, size, width)), other)
    y = net.op("Add", y, net.op("MatMul", h, net.weight(size, width)))
    model = net.model(y)
    feeds = {"x": net.rng.standard_normal((2, 128)).astype(np.float32)}
    if given == "input":
        feeds["z"] = factors
    slices = slice_tensor(model, 2)
    assert slices.report.sharded
    expected = run_whole(model, feeds)[y]
    assert np.isinf(expected).all()
    for found in run_slices(models_of(slices), feeds):
        np.testing.assert_array_equal(found[y], expected)


@pytest.mark.parametrize(("rows", "sums"), [(128, 1), (144, 2)])
def test_sum_is_made_before_a_product_with_a_constant_that_is_too_large_to_be_read(
    rows: int, sums: int
) -> None:
    net = Net(rows, 64)
    h = net.op("Relu", net.linear("x", 64, 4096))
    factors = net.constant(np.ones((rows, 512), np.float32))
    y = net.op("Mul", net.op("MatMul", h, net.weight(4096, 512)), factors)
    y = net.op("Add", y, net.op("MatMul", h, net.weight(4096, 512)))
    assert operators(check(net.model(y))) == {"AllReduce": sums}


def test_weight_of_a_type_that_numpy_lacks_is_cut() -> None:
    net = Net("batch", 128)
    table = net.weight(128, 128)
    halves = numpy_helper.to_array(net.weights[0]).view(np.uint32) >> 16
    net.weights[0] = TensorProto(
        name=table, data_type=TensorProto.BFLOAT16, dims=[128, 128],
        raw_data=halves.astype(np.uint16).tobytes(),
    )  # fmt: skip
    report = check(net.model(net.op("MatMul", "x", net.op("Cast", table, to=TensorProto.FLOAT))))
    assert [(weight.name, weight.rank_bytes) for weight in report.sharded] == [(table, 128 * 128)]


def test_weight_that_is_no_raw_data_is_cut() -> None:
    net = Net("batch", 64)
    table = net.weight(64, 64)
    values = numpy_helper.to_array(net.weights[0]).ravel().tolist()
    net.weights[0] = helper.make_tensor(table, TensorProto.FLOAT, [64, 64], values)
    assert not net.weights[0].raw_data
    assert check(net.model(net.op("MatMul", "x", table))).sharded


def test_weight_whose_size_the_ranks_do_not_divide_is_cut_along_the_other_axis() -> None:
    net = Net("batch", 63)
    model = net.model(net.linear(net.op("Relu", net.linear("x", 63, 64)), 64, 63))
    report = check(model)
    assert [(weight.axis, weight.blocks) for weight in report.sharded] == [
        (1, (64,)),
        (0, (64,)),
        (0, (64,)),
    ]


def test_weight_that_cannot_be_cut_is_whole_and_the_report_says_why() -> None:
    net = Net("batch", 63)
    report = check(net.model(net.linear("x", 63, 65)))
    assert not report.sharded
    assert report.whole[0].reason == (
        "MatMul_0 (MatMul): axis 0 of 63 is not divisible by 2; axis 1 of 65 is not divisible by 2"
    )


def test_weight_that_is_small_beside_its_activations_is_whole() -> None:
    net = Net(4096, 32)
    report = check(net.model(net.linear("x", 32, 32)))
    assert not report.collectives
    assert report.whole[0].reason == "cutting it would cost more than it saves"


@pytest.mark.parametrize(("transposed", "alpha", "beta"), [(0, 1.0, 1.0), (1, 0.5, 2.0)])
def test_gemm_adds_its_bias_once(transposed: int, alpha: float, beta: float) -> None:
    net = Net("batch", 64)
    x = "x"
    for rows, columns in ((64, 128), (128, 64)):
        shape = (columns, rows) if transposed else (rows, columns)
        x = net.op(
            "Gemm", x, net.weight(*shape, std=0.1), net.weight(columns, std=1.0),
            transB=transposed, alpha=alpha, beta=beta,
        )  # fmt: skip
        x = net.op("Relu", x) if rows == 64 else x
    report = check(net.model(x))
    assert operators(report) == {"AllReduce": 1}
    assert [weight.axis for weight in report.sharded] == ([0, 0, 1] if transposed else [1, 0, 0])


def test_gemm_with_a_transposed_input() -> None:
    net = Net(64, "batch")
    x = net.op("Gemm", "x", net.weight(64, 64), transA=1)
    assert check(net.model(x)).sharded


@pytest.mark.parametrize(
    ("node", "attributes"), [("Transpose", {"perm": [1, 0]}), ("Cast", {"to": 1}), ("Identity", {})]
)
def test_weight_behind_another_node_is_cut(node: str, attributes: dict[str, Any]) -> None:
    net = Net("batch", 64)
    x = "x"
    for _ in range(2):
        weight = net.op(node, net.weight(64, 64), **attributes)
        x = net.op("Relu", net.op("MatMul", x, weight))
    report = check(net.model(x))
    assert len(report.sharded) == 2
    assert operators(report) == {"AllReduce": 1}


def test_weight_in_a_constant_node_is_cut() -> None:
    net = Net("batch", 64)
    weights = net.rng.standard_normal((64, 64)).astype(np.float32)
    x = net.op("MatMul", "x", net.constant(weights, as_node=True))
    report = check(net.model(net.op("Relu", x)))
    assert len(report.sharded) == 1
    assert report.rank_bytes * 2 == 64 * 64 * 4


def test_weight_that_is_an_overridable_input_is_cut() -> None:
    net = Net("batch", 64)
    model = net.model(net.op("MatMul", "x", net.weight(64, 64)))
    model.graph.input.append(helper.make_tensor_value_info("weight_0", TensorProto.FLOAT, [64, 64]))
    slices = slice_tensor(model, 2)
    assert [x.name for x in slices.model.graph.input] == ["x"]
    assert slices.report.sharded


def test_tied_weight_is_right_and_counted_once() -> None:
    net = Net("batch", "tokens", 128)
    table = net.weight(128, 128)
    x = net.op("MatMul", "x", table)
    x = net.op("MatMul", net.op("Relu", x), net.op("Transpose", table, perm=[1, 0]))
    report = check(net.model(x))
    assert len(report.sharded) == 1
    assert report.rank_bytes <= report.weight_bytes * 0.6


def test_embedding_that_is_also_the_output_projection() -> None:
    net = Net("batch", "tokens", 64)
    net.inputs.clear()
    table = net.weight(512, 64)
    x = net.op("Gather", table, net.input("ids", "batch", "tokens", dtype="int64"))
    x = net.layer_norm(net.linear(x, 64, 64), 64)
    x = net.op("MatMul", x, net.op("Transpose", table, perm=[1, 0]))
    report = check(net.model(x))
    assert sum(weight.name == table for weight in report.sharded) == 1


def test_residual_sums_share_a_reduction() -> None:
    net = Net("batch", 64)
    one = net.op("MatMul", net.op("Relu", net.linear("x", 64, 128)), net.weight(128, 64))
    other = net.op("MatMul", net.op("Tanh", net.linear("x", 64, 128)), net.weight(128, 64))
    x = net.op("Add", "x", net.op("Add", one, other))
    assert operators(check(net.model(x))) == {"AllReduce": 1}


# Encoders.


def encoder(
    *,
    heads: int = 4,
    width: int = 64,
    layers: int = 2,
    packed: str = "",
    shapes: str = "constants",
    decomposed: bool = False,
    opset: int = 17,
) -> ModelProto:
    """BERT's layers; `packed` says how one weight for queries, keys and values is taken apart."""
    net = Net("batch", "tokens", width, opset=opset)
    mask = net.input("mask", "batch", 1, 1, "tokens")
    size = width // heads
    x = "x"

    def reshape(y: str, *sizes: int) -> str:
        if shapes == "constants":
            return str(net.op("Reshape", y, net.ints(*sizes)))
        if shapes == "nodes":
            return str(net.op("Reshape", y, net.ints(*sizes, as_node=True)))
        whole = net.op("Shape", y if shapes == "shape of itself" else "x")
        first = [
            net.op(
                "Unsqueeze", net.op("Gather", whole, net.constant(np.int64(i)), axis=0), net.ints(0)
            )
            for i in (0, 1)
        ]
        return str(net.op("Reshape", y, net.op("Concat", *first, net.ints(*sizes[2:]), axis=0)))

    def split_heads(y: str) -> str:
        return str(net.op("Transpose", reshape(y, 0, 0, heads, size), perm=[0, 2, 1, 3]))

    for _ in range(layers):
        if packed == "split":
            qkv = net.linear(x, width, 3 * width)
            parts = net.op("Split", qkv, net.ints(width, width, width), outputs=3, axis=-1)
            q, k, v = (split_heads(part) for part in parts)
        elif packed == "slice":
            qkv = net.linear(x, width, 3 * width)
            q, k, v = (
                split_heads(
                    net.op(
                        "Slice", qkv, net.ints(i * width), net.ints((i + 1) * width), net.ints(2)
                    )
                )
                for i in range(3)
            )
        elif packed == "reshape":
            qkv = reshape(net.linear(x, width, 3 * width), 0, 0, 3, heads, size)
            moved = net.op("Transpose", qkv, perm=[2, 0, 3, 1, 4])
            q, k, v = (net.op("Gather", moved, net.constant(np.int64(i)), axis=0) for i in range(3))
        elif packed == "interleaved":
            qkv = reshape(net.linear(x, width, 3 * width), 0, 0, heads, 3 * size)
            moved = net.op("Transpose", qkv, perm=[0, 2, 1, 3])
            q, k, v = net.op("Split", moved, outputs=3, axis=3)
        else:
            q, k, v = (split_heads(net.linear(x, width, width)) for _ in range(3))
        scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = net.op("Add", net.op("Div", scores, net.number(size**0.5)), mask)
        mixed = net.op("MatMul", net.op("Softmax", scores, axis=-1), v)
        y = reshape(net.op("Transpose", mixed, perm=[0, 2, 1, 3]), 0, 0, width)
        y = net.op("Add", x, net.linear(y, width, width))
        x = net.layer_norm(y, width, decomposed=decomposed)
        y = net.linear(net.gelu(net.linear(x, width, 4 * width)), 4 * width, width)
        x = net.layer_norm(net.op("Add", y, x), width, decomposed=decomposed)
    return net.model(x, shapes=[["batch", "tokens", width]])


@pytest.mark.parametrize(
    ("packed", "ranks"),
    [("", 2), ("", 4), ("split", 4), ("slice", 2), ("reshape", 4), ("interleaved", 2)],
)
def test_encoder_layer_needs_two_reductions(ranks: int, packed: str) -> None:
    report = check(encoder(packed=packed), ranks, batch=2, tokens=5)
    assert operators(report) == {"AllReduce": 4}
    assert report.rank_bytes <= report.weight_bytes * (1 / ranks + 0.1)


def test_packed_weights_are_cut_by_thirds() -> None:
    report = check(encoder(packed="split", layers=1))
    assert (64, 64, 64) in [weight.blocks for weight in report.sharded]


@pytest.mark.parametrize(
    ("shapes", "packed"),
    [("nodes", ""), ("shape of the input", ""), ("shape of itself", "reshape")],
)
def test_encoder_whose_shapes_are_computed(shapes: str, packed: str) -> None:
    report = check(encoder(shapes=shapes, packed=packed))
    assert operators(report) == {"AllReduce": 4}


def test_reshape_to_the_size_of_an_axis_that_is_cut_no_more() -> None:
    net = Net(1, 256)
    x = net.op("Reshape", net.linear("x", 256, 256), net.ints(1, 16, 16))
    x = net.op("Relu", net.op("Reshape", x, net.ints(-1, 0)))
    x = net.linear(net.op("Reshape", x, net.ints(1, 256)), 256, 256)
    report = check(net.model(x))
    assert operators(report) == {"AllReduce": 1}


def test_layer_norm_in_single_operations() -> None:
    assert operators(check(encoder(decomposed=True))) == {"AllReduce": 4}


def test_heads_that_the_ranks_do_not_divide_are_whole_and_the_report_says_why() -> None:
    report = check(encoder(heads=6, width=60, layers=1), 4)
    reasons = [node.reason for node in report.collectives]
    assert "axis 2 of [batch, tokens, 60], cut in 4, is no cut of [batch, tokens, 6, 10]" in reasons
    assert report.sharded


def test_attention_of_onnx_runtime_is_cut_by_heads() -> None:
    net = Net("batch", "tokens", 64)
    q, k, v = (net.linear("x", 64, 64) for _ in range(3))
    x = net.op("com.microsoft::MultiHeadAttention", q, k, v, num_heads=4)
    x = net.linear(x, 64, 64)
    skip = net.op("com.microsoft::SkipLayerNormalization", x, "x", net.weight(64), net.weight(64))
    x = net.op("com.microsoft::FusedMatMul", skip, net.weight(128, 64), transB=1)
    x = net.op("com.microsoft::BiasGelu", x, net.weight(128))
    x = net.op("com.microsoft::FusedMatMul", x, net.weight(128, 64), alpha=0.5)
    report = check(net.model(x))
    assert operators(report) == {"AllReduce": 2}
    assert report.rank_bytes <= report.weight_bytes * 0.6


@pytest.mark.parametrize("ranks", [2, 4])
def test_decoder_with_rotated_positions_and_shared_keys(ranks: int) -> None:
    width, heads, shared, size = 64, 8, 4, 8
    net = Net("batch", "tokens", width)
    cosines, sines = net.input("cos", "tokens", size), net.input("sin", "tokens", size)

    def norm(x: str) -> str:
        squares = net.op("ReduceMean", net.op("Pow", x, net.number(2)), axes=[-1])
        root = net.op("Sqrt", net.op("Add", squares, net.number(1e-6)))
        return str(net.op("Mul", net.op("Div", x, root), net.weight(width, mean=1)))

    def heads_of(x: str, count: int) -> str:
        y = net.op("MatMul", x, net.weight(width, count * size))
        y = net.op("Reshape", y, net.ints(0, 0, count, size))
        return str(net.op("Transpose", y, perm=[0, 2, 1, 3]))

    def rotated(x: str) -> str:
        half, end = net.ints(size // 2), net.ints(1 << 40)
        first = net.op("Slice", x, net.ints(0), half, net.ints(3))
        last = net.op("Slice", x, half, end, net.ints(3), net.ints(1))
        turned = net.op("Concat", net.op("Neg", last), first, axis=-1)
        return str(net.op("Add", net.op("Mul", x, cosines), net.op("Mul", turned, sines)))

    def repeated(x: str) -> str:
        whole = net.op("Shape", x)
        first, last = (
            net.op("Slice", whole, net.ints(start), net.ints(stop), net.ints(0))
            for start, stop in ((0, 2), (2, 4))
        )
        wide = net.op("Concat", first, net.ints(heads // shared), last, axis=0)
        y = net.op("Expand", net.op("Unsqueeze", x, net.ints(2)), wide)
        rows = net.op("Slice", whole, net.ints(0), net.ints(1), net.ints(0))
        shape = net.op("Concat", rows, net.ints(heads), last, axis=0)
        return str(net.op("Reshape", y, shape))

    y = norm("x")
    q, k = rotated(heads_of(y, heads)), repeated(rotated(heads_of(y, shared)))
    v = repeated(heads_of(y, shared))
    shares = net.op("Softmax", net.op("MatMul", q, net.op("Transpose", k, perm=[0, 1, 3, 2])))
    mixed = net.op("Transpose", net.op("MatMul", shares, v), perm=[0, 2, 1, 3])
    mixed = net.op("Reshape", mixed, net.ints(0, 0, width))
    x = net.op("Add", "x", net.op("MatMul", mixed, net.weight(width, width)))
    y = norm(x)
    gate = net.op("MatMul", y, net.weight(width, 128))
    gate = net.op("Mul", gate, net.op("Sigmoid", gate))
    y = net.op("Mul", gate, net.op("MatMul", y, net.weight(width, 128)))
    x = net.op("Add", x, net.op("MatMul", y, net.weight(128, width)))
    report = check(net.model(x), ranks, batch=2, tokens=5)
    assert operators(report) == {"AllReduce": 2}
    assert report.rank_bytes <= report.weight_bytes * (1 / ranks + 0.1)


# Images.


def residual_block(norm: str = "instance", opset: int = 20) -> ModelProto:
    """As in a UNet: norm, SiLU, convolution, time, norm, SiLU, convolution, sum."""
    net = Net("batch", 32, 8, 8, opset=21 if norm == "group" else opset)
    time = net.input("time", 1, 64)

    def group_norm(x: str) -> str:
        scale, bias = net.weight(32, 1, 1, mean=1), net.weight(32, 1, 1)
        if norm == "group":
            flat = [net.op("Reshape", y, net.ints(32)) for y in (scale, bias)]
            return str(net.op("GroupNormalization", x, *flat, num_groups=8))
        y = net.op("Reshape", x, net.ints(0, 8, -1))
        ones, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
        y = net.op("InstanceNormalization", y, net.constant(ones), net.constant(zeros))
        shape = net.ints(0, 32, 8, 8) if norm == "instance" else net.op("Shape", x)
        y = net.op("Reshape", y, shape)
        return str(net.op("Add", net.op("Mul", y, scale), bias))

    def silu(x: str) -> str:
        return str(net.op("Mul", x, net.op("Sigmoid", x)))

    def convolve(x: str) -> str:
        kernel = net.weight(32, 32, 3, 3, std=1 / 17)
        return str(net.op("Conv", x, kernel, net.weight(32), pads=[1, 1, 1, 1]))

    y = convolve(silu(group_norm("x")))
    bias = net.op("Reshape", net.linear(silu(time), 64, 32), net.ints(1, 32, 1, 1))
    y = convolve(silu(group_norm(net.op("Add", y, bias))))
    return net.model(net.op("Add", "x", y), shapes=[["batch", 32, 8, 8]])


@pytest.mark.parametrize("norm", ["instance", "instance by shape", "group"])
def test_residual_block_is_cut_by_channels(norm: str) -> None:
    report = check(residual_block(norm), 2)
    assert operators(report) == {"AllReduce": 1}
    assert report.rank_bytes <= report.weight_bytes * 0.6


def test_depthwise_convolution_is_cut_between_groups() -> None:
    net = Net("batch", 32, 8, 8)
    x = net.op("Conv", "x", net.weight(64, 32, 1, 1), net.weight(64))
    x = net.op("Relu", x)
    x = net.op("Conv", x, net.weight(64, 1, 3, 3), net.weight(64), group=64, pads=[1, 1, 1, 1])
    x = net.op("Clip", x, net.number(0), net.number(6))
    x = net.op("Conv", x, net.weight(32, 64, 1, 1), net.weight(32))
    report = check(net.model(x), 4)
    assert operators(report) == {"AllReduce": 1}
    assert len([weight for weight in report.sharded if len(weight.nodes) == 1]) == 5


def test_convolutions_in_groups_and_transposed() -> None:
    net = Net("batch", 32, 8, 8)
    x = net.op("Conv", "x", net.weight(64, 32, 3, 3), net.weight(64))
    x = net.op("Conv", net.op("Relu", x), net.weight(128, 16, 3, 3), group=4)
    x = net.op("BatchNormalization", x, *(net.weight(128, mean=2, std=0.1) for _ in range(4)))
    x = net.op("MaxPool", x, kernel_shape=[2, 2])
    x = net.op("ConvTranspose", x, net.weight(128, 32, 2, 2), net.weight(32), strides=[2, 2])
    x = net.op("Flatten", net.op("GlobalAveragePool", x))
    report = check(net.model(net.op("Gemm", x, net.weight(64, 32), transB=1)))
    assert len({weight.name for weight in report.sharded if weight.bytes > 4000}) == 4


@pytest.mark.parametrize("by", ["scales", "sizes"])
def test_resize_keeps_channels_cut(by: str) -> None:
    net = Net("batch", 32, 4, 4)
    x = net.op("Conv", "x", net.weight(64, 32, 3, 3), pads=[1, 1, 1, 1])
    if by == "scales":
        factors = net.constant(np.array([1, 1, 2, 2], np.float32))
        x = net.op("Resize", x, "", factors, mode="nearest")
    else:
        sizes = net.op("Concat", net.op("Shape", x, start=0, end=2), net.ints(8, 8), axis=0)
        x = net.op("Resize", x, "", "", sizes, mode="nearest")
    x = net.op("Conv", x, net.weight(32, 64, 3, 3), pads=[1, 1, 1, 1])
    assert len(check(net.model(x)).sharded) == 2


def test_unet_of_the_example(tmp_path: Path) -> None:
    path = tmp_path / "unet.onnx"
    subprocess.run([sys.executable, BUILD_UNET, "--output", path, "--size", "tiny"], check=True)
    model = onnx.load(path)
    report = check(model, 4, batch=2)
    assert report.rank_bytes <= report.weight_bytes * 0.35


# What stays whole.


def test_quantised_matmuls_are_whole() -> None:
    net = Net("batch", 64)
    weights = net.rng.integers(-100, 100, (64, 64)).astype(np.int8)
    quantised, scale, zero = net.op("DynamicQuantizeLinear", "x", outputs=3)
    x = net.op("MatMulInteger", quantised, net.constant(weights, "quantised"), zero)
    x = net.op("Mul", net.op("Cast", x, to=1), scale)
    report = check(net.model(x))
    assert not report.collectives
    assert [(weight.name, weight.reason) for weight in report.whole] == [
        ("quantised", "MatMulInteger_1 (MatMulInteger) runs whole")
    ]


def test_softmax_over_a_cut_axis_gets_it_whole() -> None:
    net = Net("batch", 512)
    x = net.op("Softmax", net.linear("x", 512, 512), axis=-1)
    (collective,) = check(net.model(x)).collectives
    assert collective.operator == "AllGather"
    assert collective.reason == "Softmax joins the positions of axis 1"
    assert collective.node.endswith("(Softmax)")


def test_subgraphs_get_whole_values() -> None:
    net = Net("batch", 64)
    x = net.op("Relu", net.linear("x", 64, 64))
    table = net.weight(64, 64)
    branches = []
    for name, kind in (("then_branch", "Tanh"), ("else_branch", "Abs")):
        inner = [
            helper.make_node("MatMul", [x, table], [f"{name}.y"]),
            helper.make_node(kind, [f"{name}.y"], [f"{name}.z"]),
        ]
        result = helper.make_tensor_value_info(f"{name}.z", TensorProto.FLOAT, None)
        branches.append((name, helper.make_graph(inner, name, [], [result])))
    positive = net.op("Greater", net.op("ReduceSum", "x", keepdims=0), net.number(0))
    y = net.op("If", positive, **dict(branches))
    report = check(net.model(net.linear(y, 64, 64)))
    assert {weight.name for weight in report.whole} >= {table}
    assert report.sharded


def test_values_that_are_outputs_are_whole_and_keep_their_names() -> None:
    net = Net("batch", 64)
    middle = net.op("Relu", net.linear("x", 64, 64))
    model = net.model(middle, net.linear(middle, 64, 64))
    assert [x.name for x in slice_tensor(model, 2).model.graph.output] == [
        x.name for x in model.graph.output
    ]
    check(model)


def test_one_rank_has_the_whole_model() -> None:
    report = check(mlp(), 1)
    assert not report.collectives
    assert report.rank_bytes == report.weight_bytes


DRAWS = """
    <ir_version: 10, opset_import: ["": 17, "com.microsoft": 1, "own": 1]>
    g (float[batch, 64] x, bool train) => (float[batch, 64] y)
    <bool yes = {{1}}, bool no = {{0}}, float half = {{0.5}}, float[64] bias = {{{bias}}}>
    {{ never = Constant <value = bool {{0}}> ()  r = Relu(x)  {body} }}
"""
FUNCTION = """
    <domain: "own", opset_import: ["": 17]> drawn (a) => (b) { b = RandomUniformLike(a) }
"""


def drawing_model(body: str) -> ModelProto:
    text = DRAWS.format(body=body, bias=", ".join(["0"] * 64))
    return onnx.parser.parse_model(text + FUNCTION * ("own" in body))


@pytest.mark.parametrize(
    "body",
    [
        "y = RandomNormalLike(r)",
        "y = RandomNormalLike <seed = 1.0> (r)",
        "y = Bernoulli <seed = 1.0> (r)",
        "m = Multinomial <sample_size = 64, seed = 1.0> (r)  y = Cast <to = 1> (m)",
        "y = Dropout(r, half, yes)",
        "y = Dropout(r, half, train)",
        "y = com.microsoft.BitmaskDropout(r, half, yes)",
        "y = com.microsoft.BiasDropout(r, bias, , half, yes)",
        "y = com.microsoft.BitmaskBiasDropout(r, bias, , half, train)",
        """y = If(train) <then_branch = t () => (float[batch, 64] p) { p = Relu(r) },
                          else_branch = e () => (float[batch, 64] q) { q = Dropout(r, half, yes) }>""",
        "y = own.drawn(r)",
    ],
)
def test_model_that_draws_random_numbers_is_refused_with_the_node(
    tmp_path: Path, body: str
) -> None:
    """Also with a seed: a run that one rank skips, such as a cancelled one, sets it apart for good."""
    onnx.save(drawing_model(body), tmp_path / "model.onnx")
    with pytest.raises(InvalidInputError, match=r"node (Random|Bern|Multi|Dro|Bi).* draws random"):
        write_slices(tmp_path / "model.onnx", tmp_path, tensor=2)


@pytest.mark.parametrize(
    "body",
    [
        "y = Dropout(r)",
        "y = Dropout(r, half)",
        "y = Dropout(r, half, no)",
        "y = Dropout(r, half, never)",
        "y = com.microsoft.BiasDropout(r, bias, , half)",
        """y = If(train) <then_branch = t () => (float[batch, 64] p) { p = Relu(r) },
                          else_branch = e () => (float[batch, 64] q)
                          { off = Constant <value = bool {0}> ()  q = Dropout(r, half, off) }>""",
    ],
)
def test_dropout_that_does_not_train_draws_nothing(tmp_path: Path, body: str) -> None:
    onnx.save(drawing_model(body), tmp_path / "model.onnx")
    assert write_slices(tmp_path / "model.onnx", tmp_path, tensor=2).ranks


def test_external_weights_are_not_loaded(tmp_path: Path) -> None:
    onnx.save(encoder(packed="reshape"), tmp_path / "model.onnx", save_as_external_data=True,
              location="weights", size_threshold=1024)  # fmt: skip
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert any(x.data_location == TensorProto.EXTERNAL for x in model.graph.initializer)
    (tmp_path / "weights").unlink()
    found, loaded = slice_tensor(model, 2), slice_tensor(encoder(packed="reshape"), 2)
    assert found.model.graph.node == loaded.model.graph.node
    for one, other in zip(found.recipes[1], loaded.recipes[1], strict=True):
        assert (one.name, one.axis, one.ranges) == (other.name, other.axis, other.ranges)


def test_ranks_have_the_same_nodes_and_types_of_all_collectives() -> None:
    slices = slice_tensor(encoder(), 2)
    typed = {x.name for x in slices.model.graph.value_info}
    typed |= {x.name for x in slices.model.graph.output}
    collectives = [node for node in slices.model.graph.node if node.domain == "com.microsoft"]
    assert collectives
    for node in collectives:
        assert {*node.input, *node.output} <= typed


def test_report_has_the_bytes_of_collectives_whose_shape_is_known() -> None:
    net = Net(8, 512)
    report = check(net.model(net.linear(net.op("Relu", net.linear("x", 512, 512)), 512, 512)))
    assert [node.bytes for node in report.collectives] == [8 * 512 * 4]


# Any graph, cut in any way.


class AnyCosts(Costs):
    """Costs that lead to any way through the graph: all ways are right."""

    def __init__(self, graph: Graph, ranks: int, rng: np.random.Generator) -> None:
        super().__init__(graph, ranks)
        self._rng = rng
        self._drawn: dict[tuple[str, Placement], float] = {}

    def kept(self, name: str, placement: Placement) -> float:
        return self._draw(name, placement)

    def collective(self, name: str, placement: Placement) -> float:
        return self._draw(name, placement)

    def _draw(self, name: str, placement: Placement) -> float:
        if (name, placement) not in self._drawn:
            self._drawn[name, placement] = float(self._rng.normal(1, 2))
        return self._drawn[name, placement]


def random_net(rng: np.random.Generator) -> ModelProto:
    """A chain of tensors [batch, tokens, width] in double precision, of which later operations take any."""
    width = int(rng.choice([16, 24, 32]))
    net = Net("batch", 4, width, dtype="float64")
    values = ["x"]

    def any_value() -> str:
        return values[-1 if rng.random() < 0.6 else int(rng.integers(len(values)))]

    def heads(x: str, count: int) -> str:
        y = net.op("Reshape", x, net.ints(0, 4, count, -1))
        return str(net.op("Transpose", y, perm=[0, 2, 1, 3]))

    def merge(x: str) -> str:
        y = net.op("Transpose", x, perm=[0, 2, 1, 3])
        return str(net.op("Reshape", y, net.ints(0, 4, width)))

    def perceptron(x: str) -> str:
        inner = int(rng.choice([16, 30, 48]))
        return net.linear(net.op("Tanh", net.linear(x, width, inner)), inner, width)

    def packed(x: str) -> str:
        y = net.linear(x, width, 2 * width)
        if rng.random() < 0.5:
            value, gate = net.op("Split", y, net.ints(width, width), outputs=2, axis=-1)
        else:
            value, gate = (
                net.op("Slice", y, net.ints(i * width), net.ints((i + 1) * width), net.ints(-1))
                for i in (0, 1)
            )
        return str(net.op("Mul", value, net.op("Sigmoid", gate)))

    def attention(x: str) -> str:
        count = int(rng.choice([2, 4, 8]))
        q, k, v = (heads(net.op("MatMul", x, net.weight(width, width)), count) for _ in range(3))
        scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 1, 3, 2]))
        return merge(net.op("MatMul", net.op("Softmax", scores, axis=-1), v))

    def joined(x: str) -> str:
        y = net.op("Concat", x, any_value(), axis=int(rng.choice([1, 2])))
        if rng.random() < 0.5:
            return str(net.op("Slice", y, net.ints(0, 0), net.ints(4, width), net.ints(1, 2)))
        starts = net.ints(0, 0)
        return str(net.op("Relu", net.op("Slice", y, starts, net.ints(4, width), net.ints(1, 2))))

    def rows(x: str) -> str:
        flat = net.op("Reshape", x, net.ints(-1, width))
        y = net.op(
            "Gemm", flat, net.weight(width, width), net.weight(width), transB=int(rng.integers(2))
        )
        whole = net.op("Shape", x)
        return str(net.op("Reshape", net.op("LeakyRelu", y), whole))

    def spread(x: str) -> str:
        mean = net.op("ReduceMean", x, axes=[int(rng.choice([1, 2]))], keepdims=1)
        return str(net.op("Sub", x, net.op("Expand", mean, net.op("Shape", x))))

    def squeezed(x: str) -> str:
        y = net.op("Unsqueeze", x, net.ints(int(rng.integers(4))))
        y = net.op("Mul", y, net.number(0.5))
        return str(net.op("Reshape", y, net.ints(-1, 4, width)))

    def summed(x: str) -> str:
        total = net.op("ReduceSum", x, net.ints(int(rng.choice([1, 2]))), keepdims=1)
        return str(net.op("Add", x, net.op("Tanh", total)))

    made = [perceptron, packed, attention, joined, rows, spread, squeezed, summed]
    made += [lambda x: net.layer_norm(x, width, decomposed=bool(rng.integers(2)))]
    made += [lambda x: str(net.op("Add", x, any_value())), lambda x: str(net.op("Neg", x))]
    made += [lambda x: str(net.op("MatMul", x, net.weight(width, width)))] * 2
    length = int(rng.integers(3, 9))
    while len(values) < length:
        values.append(made[int(rng.integers(len(made)))](any_value()))
    outputs = dict.fromkeys([values[-1], any_value()])
    outputs.pop("x", None)
    return net.model(*outputs)


def random_image_net(rng: np.random.Generator) -> ModelProto:
    """Convolutions and what lies between them, on images [batch, channels, 4, 4]."""
    channels = int(rng.choice([8, 16]))
    net = Net("batch", channels, 4, 4, opset=21)
    values = ["x"]

    def any_value() -> str:
        return values[-1 if rng.random() < 0.6 else int(rng.integers(len(values)))]

    def convolve(x: str, before: int, after: int, groups: int = 1) -> str:
        kernel = net.weight(after, before // groups, 3, 3, std=(9 * before / groups) ** -0.5)
        bias = [net.weight(after)] if rng.random() < 0.7 else []
        return str(net.op("Conv", x, kernel, *bias, pads=[1] * 4, group=groups))

    def block(x: str) -> str:
        inner = int(rng.choice([8, 14, 32]))
        return convolve(net.op("Relu", convolve(x, channels, inner)), inner, channels)

    def grouped(x: str) -> str:
        y = convolve(x, channels, 2 * channels)
        y = convolve(y, 2 * channels, 2 * channels, int(rng.choice([2, 4, 2 * channels])))
        return convolve(y, 2 * channels, channels)

    def norm(x: str) -> str:
        groups = int(rng.choice([2, 4, 8]))
        if rng.random() < 0.5:
            scale, bias = net.weight(channels, mean=1), net.weight(channels)
            return str(net.op("GroupNormalization", x, scale, bias, num_groups=groups))
        y = net.op("Reshape", x, net.ints(0, groups, -1))
        y = net.op("InstanceNormalization", y, net.weight(groups, mean=1), net.weight(groups))
        return str(net.op("Reshape", y, net.op("Shape", x)))

    def skip(x: str) -> str:
        y = net.op("Concat", x, any_value(), axis=1)
        if rng.random() < 0.5:
            y = net.op("Reshape", y, net.ints(0, 4, -1))
            y = net.op("InstanceNormalization", y, net.weight(4, mean=1), net.weight(4))
            y = net.op("Reshape", y, net.ints(0, 2 * channels, 4, 4))
        return convolve(y, 2 * channels, channels)

    def tokens(x: str) -> str:
        y = net.op("Transpose", net.op("Reshape", x, net.ints(0, channels, -1)), perm=[0, 2, 1])
        y = net.linear(net.op("Gelu", net.linear(y, channels, 32)), 32, channels)
        y = net.op("Transpose", y, perm=[0, 2, 1])
        return str(net.op("Add", x, net.op("Reshape", y, net.op("Shape", x))))

    def scaled(x: str) -> str:
        factors = net.constant(np.array([1, 1, 2, 2], np.float32))
        y = net.op("Resize", x, "", factors, mode="nearest")
        return str(net.op("AveragePool", y, kernel_shape=[2, 2], strides=[2, 2]))

    made = [block, grouped, norm, skip, tokens, scaled]
    made += [lambda x: convolve(x, channels, channels), lambda x: str(net.op("Tanh", x))]
    made += [lambda x: str(net.op("Add", x, any_value()))]
    length = int(rng.integers(3, 8))
    while len(values) < length:
        values.append(made[int(rng.integers(len(made)))](any_value()))
    return net.model(values[-1])


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1 << 32),
    ranks=st.sampled_from([2, 3, 4]),
    make=st.sampled_from([random_net, random_image_net]),
)
def test_any_way_to_cut_any_graph_is_right(
    seed: int, ranks: int, make: Callable[[np.random.Generator], ModelProto]
) -> None:
    rng = np.random.default_rng(seed)
    model = make(rng)
    graph = Graph(model, infer(model))
    for _ in range(2):
        choices = ChoiceSearch(graph, AnyCosts(graph, ranks, rng)).run()
        check(model, slices=slices_of(graph, ranks, choices))
    check(model, ranks)
