from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from mcinfer.ranks.slicing.tensor import slice_tensor, slices_of
from tests.lockstep import check_ranks, models_of, operators, run_slices, run_whole
from tests.process.scripts import run_example
from tests.text_models import text_model

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


# Perceptrons.


def mlp(*, gelu: bool = False, layers: int = 4) -> ModelProto:
    net = Net("batch", 64)
    x = "x"
    for _ in range(layers):
        x = net.linear(x, 64, 64)
        x = net.gelu(x) if gelu else net.op("Relu", x)
    return net.model(x)


@pytest.mark.parametrize(
    ("ranks", "gelu", "sums"),
    [(1, False, {}), (2, True, {"AllReduce": 2}), (4, False, {"AllReduce": 2})],
)
def test_perceptron_needs_one_reduction_for_two_layers(
    ranks: int, gelu: bool, sums: dict[str, int]
) -> None:
    report = check_ranks(mlp(gelu=gelu), ranks)
    assert operators(report) == sums
    assert report.rank_bytes <= report.weight_bytes * (1 / ranks + 0.1 * (ranks > 1))


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


def opposite(*shape: int) -> Array:
    """A weight that takes the first half of its rows and the second one almost away from each other."""
    weight = 4 + np.random.default_rng(0).standard_normal(shape) * 0.01
    weight[shape[0] // 2 :] *= -1
    return weight.astype(np.float32)


@pytest.mark.parametrize(
    "body",
    [
        "y = MatMul(h, down)",
        "y = Gemm<beta=2.0>(h, down, bias)",
        """a = MatMul(h, down)  b = MatMul(h, more)  c = Add(a, b)  d = Neg(c)
           e = Mul(d, half)  y = Add(e, bias)""",
        "a = Mul(h, terms)  y = ReduceSum(a, last)",
        "turned = Transpose<perm=[1,0,2,3]>(down)  y = Conv(h, turned, bias)",
    ],
)
def test_terms_that_float16_cannot_hold_give_their_sum(body: str) -> None:
    image = (3, 3) if "Conv" in body else ()
    kernel = (1, 1) if image else ()
    weights = {
        "up": np.eye(128).reshape(128, 128, *kernel),
        "down": opposite(128, 128, *kernel),
        "more": opposite(128, 128),
        "terms": opposite(128),
        "bias": np.linspace(-0.2, 0.2, 128),
        "half": 0.5,
    }
    used = {k: np.asarray(w, np.float16) for k, w in weights.items() if k in body or k == "up"}
    text = f"""(float16{[2, 128, *image]} x) => (float16[] y) {{
        u = {"Conv" if image else "MatMul"}(x, up)  h = Relu(u)  {body}
    }}"""
    model = text_model(text, used | ({"last": np.array([-1])} if "last" in body else {}))
    feeds = {"x": np.full((2, 128, *image), 300, np.float16)}
    slices = slice_tensor(model, 2)
    assert operators(slices.report) == {"AllReduce": 1}
    expected = run_whole(model, feeds)["y"]
    for found in run_slices(models_of(slices), feeds):
        assert found["y"].dtype == np.float16
        np.testing.assert_allclose(found["y"], expected, rtol=2e-2, atol=0.5)


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
    factors = np.full(width if is_large else (2, 1), factor, np.float32)
    weights = {"up": (128, size), "down": opposite(size, width), "more": (size, width)}
    text = f"""(float[batch,128] x{", float[2,1] z" if given == "input" else ""}) => (float[] y) {{
        u = MatMul(x, up)  h = Relu(u)  a = MatMul(h, down)  b = {kind}(a, z)
        c = MatMul(h, more)  y = Add(b, c)
    }}"""
    model = text_model(text, weights | ({} if given == "input" else {"z": factors}))
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 128)).astype(np.float32)}
    if given == "input":
        feeds["z"] = factors
    slices = slice_tensor(model, 2)
    assert slices.report.sharded
    expected = run_whole(model, feeds)["y"]
    assert np.isinf(expected).all()
    for found in run_slices(models_of(slices), feeds):
        np.testing.assert_array_equal(found["y"], expected)


def test_weight_of_a_type_that_numpy_lacks_is_cut() -> None:
    net = Net("batch", 128)
    table = net.weight(128, 128)
    halves = numpy_helper.to_array(net.weights[0]).view(np.uint32) >> 16
    net.weights[0] = TensorProto(
        name=table, data_type=TensorProto.BFLOAT16, dims=[128, 128],
        raw_data=halves.astype(np.uint16).tobytes(),
    )  # fmt: skip
    report = check_ranks(
        net.model(net.op("MatMul", "x", net.op("Cast", table, to=TensorProto.FLOAT)))
    )
    assert [(weight.name, weight.rank_bytes) for weight in report.sharded] == [(table, 128 * 128)]


SMALL: dict[str, tuple[str, dict[str, tuple[int, ...]], list[tuple[str, int]]]] = {
    "the other axis where the ranks do not divide one": (
        """(float[batch,63] x) => (float[] y)
           { a = MatMul(x, u)  b = Add(a, v)  c = Relu(b)  d = MatMul(c, w)  y = Add(d, z) }""",
        {"u": (63, 64), "v": (64,), "w": (64, 63), "z": (63,)},
        [("u", 1), ("v", 0), ("w", 0)],
    ),
    "a bias that Gemm adds once": (
        """(float[batch,64] x) => (float[] y) {
               a = Gemm<transB=1, alpha=0.5, beta=2.0>(x, u, v)  b = Relu(a)
               turned = Transpose<perm=[1,0]>(w)  y = Gemm<beta=2.0>(b, turned, z)
           }""",
        {"u": (128, 64), "v": (128,), "w": (64, 128), "z": (64,)},
        [("u", 0), ("v", 0), ("w", 1)],
    ),
    "residual sums that share a reduction": (
        """(float[batch,64] x) => (float[] y) {
               a = MatMul(x, r)  b = Relu(a)  c = MatMul(b, s)
               d = MatMul(x, u)  e = Tanh(d)  f = MatMul(e, w)  g = Add(c, f)  y = Add(x, g)
           }""",
        {"r": (64, 128), "s": (128, 64), "u": (64, 128), "w": (128, 64)},
        [("r", 1), ("s", 0), ("u", 1), ("w", 0)],
    ),
    "a reshape to the size of an axis that is cut no more": (
        """(float[1,256] x) => (float[] y)
           <int64[3] s = {1,16,16}, int64[2] t = {-1,0}, int64[2] v = {1,256}> {
               a = MatMul(x, u)  b = Reshape(a, s)  c = Reshape(b, t)  d = Relu(c)
               e = Reshape(d, v)  y = MatMul(e, w)
           }""",
        {"u": (256, 256), "w": (256, 256)},
        [("u", 1), ("w", 0)],
    ),
    "a table that is also the output's": (
        """(int64[batch,tokens] ids) => (float[] y) {
               a = Gather(w, ids)  turned = Transpose<perm=[1,0]>(w)  y = MatMul(a, turned)
           }""",
        {"w": (512, 64)},
        [("w", 1)],
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_graphs_need_one_reduction(name: str) -> None:
    text, weights, sharded = SMALL[name]
    report = check_ranks(text_model(text, weights))
    assert [(weight.name, weight.axis) for weight in report.sharded] == sharded
    assert operators(report) == {"AllReduce": 1}


def test_weight_that_cannot_be_cut_is_whole_and_the_report_says_why() -> None:
    net = Net("batch", 63)
    report = check_ranks(net.model(net.linear("x", 63, 65)))
    assert not report.sharded
    assert report.whole[0].reason == (
        "MatMul_0 (MatMul): axis 0 of 63 is not divisible by 2; axis 1 of 65 is not divisible by 2"
    )


def test_weight_that_is_small_beside_its_activations_is_whole() -> None:
    net = Net(4096, 32)
    report = check_ranks(net.model(net.linear("x", 32, 32)))
    assert not report.collectives
    assert report.whole[0].reason == "cutting it would cost more than it saves"


# Encoders.


def encoder(
    *,
    heads: int = 4,
    width: int = 64,
    layers: int = 2,
    packed: str = "",
    shapes: str = "constants",
    decomposed: bool = False,
) -> ModelProto:
    """BERT's layers; `packed` says how one weight for queries, keys and values is taken apart."""
    net = Net("batch", "tokens", width)
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
    ("ranks", "how"),
    [
        (2, {}),
        (4, {"packed": "split"}),
        (2, {"packed": "slice"}),
        (4, {"packed": "reshape", "shapes": "shape of itself"}),
        (2, {"packed": "interleaved", "shapes": "nodes"}),
        (4, {"shapes": "shape of the input", "decomposed": True}),
    ],
)
def test_encoder_layer_needs_two_reductions(ranks: int, how: dict[str, Any]) -> None:
    report = check_ranks(encoder(**how), ranks, batch=2, tokens=5)
    assert operators(report) == {"AllReduce": 4}
    assert report.rank_bytes <= report.weight_bytes * (1 / ranks + 0.1)
    if how.get("packed") == "split":
        assert (64, 64, 64) in [weight.blocks for weight in report.sharded]


def test_heads_that_the_ranks_do_not_divide_are_whole_and_the_report_says_why() -> None:
    report = check_ranks(encoder(heads=6, width=60, layers=1), 4)
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
    report = check_ranks(net.model(x))
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
    report = check_ranks(net.model(x), ranks, batch=2, tokens=5)
    assert operators(report) == {"AllReduce": 2}
    assert report.rank_bytes <= report.weight_bytes * (1 / ranks + 0.1)


# Images.


@pytest.mark.thorough
def test_unet_of_the_example(tmp_path: Path) -> None:
    path = tmp_path / "unet.onnx"
    run_example("sd_dual_core/build_unet.py", "--output", str(path), "--size", "tiny")
    model = onnx.load(path)
    report = check_ranks(model, 4, batch=2)
    assert report.rank_bytes <= report.weight_bytes * 0.35


# What stays whole.


def test_quantised_matmuls_are_whole() -> None:
    net = Net("batch", 64)
    weights = net.rng.integers(-100, 100, (64, 64)).astype(np.int8)
    quantised, scale, zero = net.op("DynamicQuantizeLinear", "x", outputs=3)
    x = net.op("MatMulInteger", quantised, net.constant(weights, "quantised"), zero)
    x = net.op("Mul", net.op("Cast", x, to=1), scale)
    report = check_ranks(net.model(x))
    assert not report.collectives
    assert [(weight.name, weight.reason) for weight in report.whole] == [
        ("quantised", "MatMulInteger_1 (MatMulInteger) runs whole")
    ]


def test_softmax_over_a_cut_axis_gets_it_whole() -> None:
    net = Net("batch", 512)
    x = net.op("Softmax", net.linear("x", 512, 512), axis=-1)
    (collective,) = check_ranks(net.model(x)).collectives
    assert collective.operator == "AllGather"
    assert collective.reason == "Softmax joins the positions of axis 1"
    assert collective.node.endswith("(Softmax)")


def test_subgraphs_get_whole_values() -> None:
    text = """(float[batch,64] x) => (float[] z) {
        a = MatMul(x, u)  h = Relu(a)  total = ReduceSum<keepdims=0>(x)  positive = Greater(total, zero)
        y = If(positive) <
            then_branch = t () => (float[] p2) { p = MatMul(h, table)  p2 = Tanh(p) },
            else_branch = e () => (float[] q2) { q = MatMul(h, table)  q2 = Abs(q) }>
        z = MatMul(y, w)
    }"""
    weights = {"u": (64, 64), "table": (64, 64), "w": (64, 64), "zero": np.float32(0)}
    report = check_ranks(text_model(text, weights))
    assert {weight.name for weight in report.whole} >= {"table"}
    assert report.sharded


def test_model_that_draws_random_numbers_is_refused_with_the_node(tmp_path: Path) -> None:
    """Also with a seed: a run that one rank skips, such as a cancelled one, sets it apart for good."""
    text = "(float[batch,64] x) => (float[batch,64] y) { y = RandomNormalLike<seed = 1.0>(x) }"
    onnx.save(text_model(text), tmp_path / "model.onnx")
    with pytest.raises(InvalidInputError, match=r"node RandomNormalLike.* draws random"):
        write_slices(tmp_path / "model.onnx", tmp_path, tensor=2)


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


class RandomNet(Net):
    """A chain of values, of which later operations take any."""

    def __init__(self, rng: np.random.Generator, *shape: int | str, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.draws = rng
        self.values = ["x"]

    def any_value(self) -> str:
        late = self.draws.random() < 0.6
        return self.values[-1 if late else int(self.draws.integers(len(self.values)))]

    def drawn(self, made: Sequence[Callable[[str], str]], most: int) -> None:
        for _ in range(int(self.draws.integers(2, most))):
            self.values.append(made[int(self.draws.integers(len(made)))](self.any_value()))


def random_net(rng: np.random.Generator) -> ModelProto:
    """Tensors [batch, tokens, width] in double precision."""
    width = int(rng.choice([16, 24, 32]))
    net = RandomNet(rng, "batch", 4, width, dtype="float64")
    any_value = net.any_value

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
    net.drawn(made, 8)
    outputs = dict.fromkeys([net.values[-1], any_value()])
    outputs.pop("x", None)
    return net.model(*outputs)


def random_image_net(rng: np.random.Generator) -> ModelProto:
    """Convolutions and what lies between them, on images [batch, channels, 4, 4]."""
    channels = int(rng.choice([8, 16]))
    net = RandomNet(rng, "batch", channels, 4, 4, opset=21)
    any_value = net.any_value

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
    net.drawn(made, 7)
    return net.model(net.values[-1])


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
        check_ranks(model, slices=slices_of(graph, ranks, choices))
    check_ranks(model, ranks)
