"""Tests of mcinfer/ranks/slicing/pipeline.py: stages, run one after another, give what the model gives."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto, TensorProto, helper

from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.ranks.slicing.graphs import tensor_bytes
from mcinfer.ranks.slicing.pipeline import Stage, cut_stages
from tests.lockstep import Arrays, check_stages
from tests.text_models import text_model


def simple(body: str, outputs: str = "y", weights: str = "", width: int = 64) -> ModelProto:
    """A graph of float32[batch, width] values, with square weights."""
    made = ", ".join(f"float[batch,{width}] {name}" for name in outputs.split())
    shapes = dict.fromkeys(weights, (width, width))
    return text_model(f"(float[batch,{width}] x) => ({made}) {{ {body} }}", shapes, opset=21)


def mlp(widths: list[int]) -> ModelProto:
    """MatMuls of these widths, one after another."""
    count = len(widths) - 1
    body = "  ".join(
        f"m{at} = MatMul({f't{at - 1}' if at else 'x'}, w{at})  t{at} = Tanh(m{at})"
        for at in range(count)
    )
    weights = {f"w{at}": sizes for at, sizes in enumerate(pairwise(widths))}
    sides = f"(float[batch,{widths[0]}] x) => (float[batch,{widths[-1]}] t{count - 1})"
    return text_model(f"{sides} {{ {body} }}", weights, opset=21)


def rows(count: int, width: int) -> Arrays:
    return {"x": np.random.default_rng(1).standard_normal((count, width)).astype(np.float32)}


def weights_of(stage: Stage) -> set[str]:
    return {tensor.name for tensor in stage.model.graph.initializer}


def operators(stage: Stage) -> list[str]:
    return [node.op_type for node in stage.model.graph.node]


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_equal_layers_are_distributed_equally(stages: int) -> None:
    model = mlp([32] * 7)
    cut = cut_stages(model, stages)
    assert [sum(map(tensor_bytes, stage.model.graph.initializer)) for stage in cut] == [
        6 // stages * 32 * 32 * 4
    ] * stages
    check_stages(model, cut, rows(2, 32))


@pytest.mark.parametrize(
    ("widths", "first_weights"),
    [
        ([64, 512, 512, 512, 64], {"w0", "w1"}),
        ([512, 512, 512, 64, 512], {"w0"}),
        ([64, 64, 64, 512, 512], {"w0", "w1", "w2"}),
    ],
)
def test_largest_stage_is_as_small_as_can_be(widths: list[int], first_weights: set[str]) -> None:
    model = mlp(widths)
    first, second = cut_stages(model, 2)
    assert weights_of(first) == first_weights
    check_stages(model, [first, second], rows(3, widths[0]))


def test_of_equal_loads_the_cut_with_the_fewest_bytes_is_taken() -> None:
    # The same operations on both sides of any of the cuts; the value is narrow in one place.
    model = mlp([512, 512, 2, 512, 512])
    first, second = cut_stages(model, 2)
    (sent,) = first.sends
    assert sent in ("m1", "t1")
    assert second.bytes_received == 2 * 4
    assert second.receives == {sent: 0}


def test_weight_of_two_stages_is_in_both_and_a_change_of_it_too() -> None:
    body = "turned = Transpose(w)  a = MatMul(x, turned)  y = MatMul(a, turned)"
    model = simple(body, weights="w")
    cut = cut_stages(model, 2)
    assert [operators(stage) for stage in cut] == [["Transpose", "MatMul"]] * 2
    assert cut[1].receives == {"a": 0}
    check_stages(model, cut, rows(2, 64))


def test_shape_of_a_received_value_is_computed_again_and_not_sent() -> None:
    text = """(float[batch,64] x) => (float[batch,8,8] y) <int64[1] zero = {0}, int64[2] rest = {8, 8}> {
        u = MatMul(x, a)  shape = Shape(u)  size = Gather(shape, zero)  v = MatMul(u, b)
        wanted = Concat<axis=0>(size, rest)  y = Reshape(v, wanted)
    }"""
    model = text_model(text, {"a": (64, 64), "b": (64, 64)}, opset=21)
    cut = cut_stages(model, 2)
    assert cut[1].receives == {"u": 0}
    assert {"Shape", "Gather", "Concat"} <= {*operators(cut[1])}
    check_stages(model, cut, rows(3, 64))


def test_random_numbers_are_drawn_once() -> None:
    body = """noise = RandomUniform<shape=[1], seed=1.0>()  u = MatMul(x, a)  v = Add(u, noise)
        w = MatMul(v, b)  y = Sub(w, noise)"""
    model = simple(body, weights="ab")
    cut = cut_stages(model, 2)
    assert [operators(stage).count("RandomUniform") for stage in cut] == [1, 0]
    assert cut[1].receives["noise"] == 0


def test_value_that_a_subgraph_takes_from_outside_is_received() -> None:
    text = """(float[batch,8] x, bool flag) => (float[batch,8] y) {
        a = Tanh(x)  b = Sin(a)  c = Cos(b)
        y = If(flag) <
            then_branch = t () => (float[batch,8] p) { q = Add(a, c)  p = Mul(q, x) },
            else_branch = e () => (float[batch,8] r) { r = Identity(c) }
        >
    }"""
    model = text_model(text, opset=21)
    cut = cut_stages(model, 4)
    assert cut[3].receives == {"a": 0, "c": 2}
    assert {value.name for value in cut[3].model.graph.input} == {"x", "flag", "a", "c"}
    for flag in (True, False):
        check_stages(model, cut, {**rows(2, 8), "flag": np.array(flag)})


def test_nodes_in_any_order_are_sorted_and_an_initialiser_that_is_an_input_is_a_weight() -> None:
    model = mlp([8] * 5)
    nodes = [*model.graph.node][::-1]
    model.graph.ClearField("node")
    model.graph.node.extend(nodes)
    model.graph.input.append(helper.make_tensor_value_info("w1", TensorProto.FLOAT, [8, 8]))
    cut = cut_stages(model, 2)
    assert [[v.name for v in stage.model.graph.input] for stage in cut] == [["x"], [*cut[0].sends]]
    check_stages(model, cut, rows(2, 8))


def test_strings_are_not_cut_apart() -> None:
    body = "a = Tanh(x)  text = Cast<to=8>(a)  b = Cast<to=1>(text)  y = Tanh(b)"
    model = simple(body, width=4)
    cut = cut_stages(model, 3)
    assert [operators(stage) for stage in cut] == [["Tanh"], ["Cast", "Cast"], ["Tanh"]]
    with pytest.raises(InvalidInputError, match="cannot be sent, such as strings"):
        cut_stages(model, 4)
    with pytest.raises(InvalidInputError, match="but the model can be cut into 4 at most"):
        cut_stages(mlp([8] * 3), 5)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ("y = Tanh(lost)", r"y \(Tanh\) takes 'lost', which nothing makes"),
        ("y = Tanh(y)", r"nodes need each other: y \(Tanh\)"),
        ("x = Tanh(x)", "value 'x' is made twice"),
        ("z = Tanh(x)", "output 'y' is made by no node"),
    ],
)
def test_graph_that_is_not_sound_is_refused(node: str, text: str) -> None:
    with pytest.raises(BuildError, match=text):
        cut_stages(text_model(f"(float[1] x) => (float[1] y) {{ {node} }}"), 2)


def test_many_nodes_are_cut_at_the_places_with_few_bytes() -> None:
    """In a graph of more nodes than are compared, a stage still ends where one value is live."""
    ends = ["x", *(f"v{block}" for block in range(119)), "y"]
    body = "".join(  # each block has a skip connection over its four nodes
        f"a{v} = Tanh({x})  b{v} = Sin(a{v})  c{v} = Cos(b{v})  {v} = Add(c{v}, {x})\n"
        for x, v in pairwise(ends)
    )
    model = simple(body, width=4)
    cut = cut_stages(model, 4)
    assert [len(stage.receives) for stage in cut] == [0, 1, 1, 1]
    sizes = [len(stage.model.graph.node) for stage in cut]
    assert max(sizes) <= 1.1 * min(sizes)
    check_stages(model, cut, rows(1, 4))


# Any graph.

UNARY = ("Tanh", "Sin", "Neg", "Sigmoid")


@st.composite
def graphs(draw: st.DrawFn) -> tuple[ModelProto, int]:
    """A DAG of float32[batch, 4] values with skip connections of any length, and shared weights."""
    values, body = ["x", "x2"], ""
    for at in range(draw(st.integers(2, 24))):
        name, first = f"v{at}", draw(st.sampled_from(values))
        kind = draw(st.sampled_from(("unary", "add", "matmul", "shape", "turned")))
        if kind == "unary":
            body += f"{name} = {draw(st.sampled_from(UNARY))}({first})\n"
        elif kind == "add":
            body += f"{name} = Add({first}, {draw(st.sampled_from(values))})\n"
        elif kind == "shape":
            body += f"{name}s = Shape({draw(st.sampled_from(values))})\n"
            body += f"{name} = Reshape({first}, {name}s)\n"
        else:
            weight = f"w{draw(st.integers(0, 3))}"
            if kind == "turned":
                body += f"{name}t = Transpose({weight})\n"
                weight = f"{name}t"
            body += f"{name} = MatMul({first}, {weight})\n"
        values.append(name)
    outputs = draw(st.lists(st.sampled_from(values[2:]), min_size=1, max_size=3, unique=True))
    weights = {f"w{n}": np.eye(4, k=n - 1, dtype=np.float32) + 0.5 for n in range(4)}
    used = {name: array for name, array in weights.items() if f"{name})" in body}
    made = ", ".join(f"float[batch,4] {name}" for name in outputs)
    text = f"(float[batch,4] x, float[batch,4] x2) => ({made}) {{ {body} }}"
    return text_model(text, used, opset=21), draw(st.integers(1, 5))


def is_cut_off(node: NodeProto) -> bool:
    """Whether a stage may begin with it."""
    return node.op_type not in ("Shape", "Transpose")


@settings(max_examples=40)
@given(graphs())
def test_stages_of_any_graph_give_what_the_graph_gives(case: tuple[ModelProto, int]) -> None:
    model, stages = case
    (whole,) = cut_stages(model, 1)
    if sum(map(is_cut_off, whole.model.graph.node)) < stages:
        with pytest.raises(InvalidInputError, match="at most"):
            cut_stages(model, stages)
        return
    cut = cut_stages(model, stages)
    assert len(cut) == stages
    for number, stage in enumerate(cut):
        assert stage.model.graph.node
        onnx.checker.check_model(stage.model)
        for name, source in stage.receives.items():
            assert source < number
            assert number in cut[source].sends[name]
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((3, 4)).astype(np.float32) for name in ("x", "x2")}
    check_stages(model, cut, inputs)
