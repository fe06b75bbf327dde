"""Tests of mcinfer/ranks/slicing/pipeline.py: stages, run one after another, give what the model gives."""

from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, parser

from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.ranks.slicing.graphs import tensor_bytes
from mcinfer.ranks.slicing.pipeline import Stage, cut_stages
from tests.pipeline_stages import Arrays, check_stages

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def model_of(
    nodes: list[NodeProto],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: list[str],
    constants: Arrays,
    **attributes: Any,
) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, *value) for name, value in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, **attributes)
    typed = onnx.shape_inference.infer_shapes(model)
    for value in typed.graph.output:
        if not value.type.tensor_type.elem_type:  # as an exporter would say
            value.CopyFrom(helper.make_tensor_value_info(value.name, FLOAT, None))
    model.graph.ClearField("output")
    model.graph.output.extend(typed.graph.output)
    return model


def mlp(widths: list[int], seed: int = 0) -> ModelProto:
    """MatMuls of these widths, one after another."""
    rng = np.random.default_rng(seed)
    nodes, constants, value = [], {}, "x"
    for at, (wide, next_wide) in enumerate(pairwise(widths)):
        weight = rng.standard_normal((wide, next_wide)) / np.sqrt(wide)
        constants[f"w{at}"] = weight.astype(np.float32)
        nodes += [
            helper.make_node("MatMul", [value, f"w{at}"], [f"m{at}"]),
            helper.make_node("Tanh", [f"m{at}"], [f"t{at}"]),
        ]
        value = f"t{at}"
    return model_of(nodes, {"x": (FLOAT, ["batch", widths[0]])}, [value], constants)


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


def test_skip_connection_is_sent_from_its_maker_to_each_user() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["early"]),
        helper.make_node("MatMul", ["early", "b"], ["middle"]),
        helper.make_node("MatMul", ["middle", "c"], ["late"]),
        helper.make_node("Add", ["late", "early"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    constants = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in "abc"}
    model = model_of(nodes, {"x": (FLOAT, ["batch", 64])}, ["y"], constants)
    cut = cut_stages(model, 3)
    assert cut[0].sends == {"early": (1, 2)}
    assert cut[1].sends == {"middle": (2,)}
    assert cut[2].receives == {"early": 0, "middle": 1}
    check_stages(model, cut, rows(2, 64))


def test_weight_of_two_stages_is_in_both_and_a_change_of_it_too() -> None:
    nodes = [
        helper.make_node("Transpose", ["w"], ["turned"]),
        helper.make_node("MatMul", ["x", "turned"], ["a"]),
        helper.make_node("MatMul", ["a", "turned"], ["b"]),
    ]
    constants = {"w": np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)}
    model = model_of(nodes, {"x": (FLOAT, [2, 16])}, ["b"], constants)
    cut = cut_stages(model, 2)
    assert [operators(stage) for stage in cut] == [["Transpose", "MatMul"]] * 2
    assert cut[1].receives == {"a": 0}
    check_stages(model, cut, rows(2, 16))


def test_shape_of_a_received_value_is_computed_again_and_not_sent() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["u"]),
        helper.make_node("Shape", ["u"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["size"]),
        helper.make_node("MatMul", ["u", "b"], ["v"]),
        helper.make_node("Concat", ["size", "rest"], ["wanted"], axis=0),
        helper.make_node("Reshape", ["v", "wanted"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    constants: Arrays = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in "ab"}
    constants |= {"zero": np.array([0]), "rest": np.array([8, 8])}
    model = model_of(nodes, {"x": (FLOAT, ["batch", 64])}, ["y"], constants)
    cut = cut_stages(model, 2)
    assert cut[1].receives == {"u": 0}
    assert {"Shape", "Gather", "Concat"} <= {*operators(cut[1])}
    check_stages(model, cut, rows(3, 64))


def test_random_numbers_are_drawn_once() -> None:
    nodes = [
        helper.make_node("RandomUniform", [], ["noise"], shape=[1], seed=1.0),
        helper.make_node("MatMul", ["x", "a"], ["u"]),
        helper.make_node("Add", ["u", "noise"], ["v"]),
        helper.make_node("MatMul", ["v", "b"], ["w"]),
        helper.make_node("Sub", ["w", "noise"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    constants = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in "ab"}
    model = model_of(nodes, {"x": (FLOAT, ["batch", 64])}, ["y"], constants)
    cut = cut_stages(model, 2)
    assert [operators(stage).count("RandomUniform") for stage in cut] == [1, 0]
    assert cut[1].receives["noise"] == 0


def test_value_that_a_subgraph_takes_from_outside_is_received() -> None:
    model = parser.parse_model(
        """
        <ir_version: 10, opset_import: ["": 21]>
        g (float[batch,8] x, bool flag) => (float[batch,8] y) {
            a = Tanh(x)
            b = Sin(a)
            c = Cos(b)
            y = If(flag) <
                then_branch = t () => (float[batch,8] p) { q = Add(a, c)  p = Mul(q, x) },
                else_branch = e () => (float[batch,8] r) { r = Identity(c) }
            >
        }"""
    )
    cut = cut_stages(model, 4)
    assert cut[3].receives == {"a": 0, "c": 2}
    assert {value.name for value in cut[3].model.graph.input} == {"x", "flag", "a", "c"}
    for flag in (True, False):
        check_stages(model, cut, {**rows(2, 8), "flag": np.array(flag)})


def test_outputs_may_be_made_in_any_stage() -> None:
    nodes = [
        helper.make_node("Tanh", ["x"], ["early"]),
        helper.make_node("Sin", ["early"], ["b"]),
        helper.make_node("Cos", ["b"], ["late"]),
        helper.make_node("Add", ["one", "one"], ["constant"]),
        helper.make_node("Neg", ["late"], ["nobody"]),
    ]
    outputs = ["late", "early", "constant"]
    model = model_of(nodes, {"x": (FLOAT, ["batch", 4])}, outputs, {"one": np.ones(2, np.float32)})
    cut = cut_stages(model, 3)
    made = [value.name for stage in cut for value in stage.model.graph.output]
    assert sorted(made) == ["b", "constant", "early", "late"]
    assert not any("Neg" in operators(stage) for stage in cut)  # no output needs it
    check_stages(model, cut, rows(2, 4))


def test_types_behind_operators_of_onnxruntime_are_known() -> None:
    nodes = [
        helper.make_node("FastGelu", ["x"], ["a"], domain="com.microsoft"),
        helper.make_node("FastGelu", ["a"], ["b"], domain="com.microsoft"),
        helper.make_node("Tanh", ["b"], ["y"]),
    ]
    model = model_of(nodes, {"x": (FLOAT, ["batch", 4])}, ["y"], {})
    check_stages(model, cut_stages(model, 3), rows(2, 4))


def test_nodes_in_any_order_are_sorted() -> None:
    model = mlp([8] * 5)
    nodes = [*model.graph.node][::-1]
    model.graph.ClearField("node")
    model.graph.node.extend(nodes)
    check_stages(model, cut_stages(model, 4), rows(2, 8))


def test_initialiser_that_is_an_input_too_is_a_weight() -> None:
    model = mlp([8, 8, 8])
    model.graph.input.append(helper.make_tensor_value_info("w1", FLOAT, [8, 8]))
    cut = cut_stages(model, 2)
    assert [[v.name for v in stage.model.graph.input] for stage in cut] == [["x"], [*cut[0].sends]]
    check_stages(model, cut, rows(2, 8))


def test_strings_are_not_cut_apart() -> None:
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("Cast", ["a"], ["text"], to=TensorProto.STRING),
        helper.make_node("Cast", ["text"], ["b"], to=FLOAT),
        helper.make_node("Tanh", ["b"], ["y"]),
    ]
    model = model_of(nodes, {"x": (FLOAT, [2, 4])}, ["y"], {})
    cut = cut_stages(model, 3)
    assert [operators(stage) for stage in cut] == [["Tanh"], ["Cast", "Cast"], ["Tanh"]]
    with pytest.raises(InvalidInputError, match="cannot be sent, such as strings"):
        cut_stages(model, 4)


def test_more_stages_than_nodes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="but the model can be cut into 4 at most"):
        cut_stages(mlp([8] * 3), 5)


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        (["lost"], ["y"], r"y \(Tanh\) takes 'lost', which nothing makes"),
        (["y"], ["y"], r"nodes need each other: y \(Tanh\)"),
        (["x"], ["x"], "value 'x' is made twice"),
        (["x"], ["z"], "output 'y' is made by no node"),
    ],
)
def test_graph_that_is_not_sound_is_refused(
    inputs: list[str], outputs: list[str], text: str
) -> None:
    graph = helper.make_graph(
        [helper.make_node("Tanh", inputs, outputs)],
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, [1])],
        [helper.make_tensor_value_info("y", FLOAT, [1])],
    )
    with pytest.raises(BuildError, match=text):
        cut_stages(helper.make_model(graph), 2)


def test_many_nodes_are_cut_at_the_places_with_few_bytes() -> None:
    """In a graph of more nodes than are compared, a stage still ends where one value is live."""
    nodes, value = [], "x"
    for block in range(120):  # each block has a skip connection over its four nodes
        names = [f"b{block}_{at}" for at in range(4)]
        nodes += [
            helper.make_node("Tanh", [value], [names[0]]),
            helper.make_node("Sin", [names[0]], [names[1]]),
            helper.make_node("Cos", [names[1]], [names[2]]),
            helper.make_node("Add", [names[2], value], [names[3]]),
        ]
        value = names[3]
    model = model_of(nodes, {"x": (FLOAT, ["batch", 4])}, [value], {})
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
    width = 4
    values, nodes = ["x", "x2"], []
    constants: Arrays = {}
    for at in range(draw(st.integers(2, 24))):
        name, first = f"v{at}", draw(st.sampled_from(values))
        kind = draw(st.sampled_from(("unary", "add", "matmul", "shape", "turned")))
        if kind == "unary":
            nodes.append(helper.make_node(draw(st.sampled_from(UNARY)), [first], [name]))
        elif kind == "add":
            nodes.append(helper.make_node("Add", [first, draw(st.sampled_from(values))], [name]))
        elif kind == "shape":
            other = draw(st.sampled_from(values))
            nodes.append(helper.make_node("Shape", [other], [f"{name}s"]))
            nodes.append(helper.make_node("Reshape", [first, f"{name}s"], [name]))
        else:
            weight = f"w{draw(st.integers(0, 3))}"
            constants.setdefault(weight, np.eye(width, k=len(weight), dtype=np.float32) + 0.5)
            if kind == "turned":
                nodes.append(helper.make_node("Transpose", [weight], [f"{name}t"]))
                weight = f"{name}t"
            nodes.append(helper.make_node("MatMul", [first, weight], [name]))
        values.append(name)
    outputs = draw(st.lists(st.sampled_from(values[2:]), min_size=1, max_size=3, unique=True))
    inputs: dict[str, tuple[int, list[Any]]] = {
        name: (FLOAT, ["batch", width]) for name in values[:2]
    }
    return model_of(nodes, inputs, outputs, constants), draw(st.integers(1, 5))


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
