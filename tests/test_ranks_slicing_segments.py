"""Tests of mcinfer/ranks/slicing/segments.py: a slice is cut at collectives, its parts give the whole."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import NodeProto, helper

from mcinfer.errors import BuildError
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.ranks.slicing.plans import Exchange, RankPlan, Segment
from mcinfer.ranks.slicing.segments import cut_segments, write_segments
from mcinfer.specs import ModelSpec
from tests.sliced_models import (
    all_gather,
    all_reduce,
    attention,
    dist_collective,
    mlp,
    place,
    save,
    value,
)

Arrays = dict[str, NDArray[Any]]


def floats(values: Any) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def cut_all(slices: Sequence[Path], folder: Path) -> list[tuple[RankPlan, Path]]:
    cut = []
    for rank, path in enumerate(slices):
        target = folder / f"rank{rank}"
        target.mkdir()
        cut.append((cut_segments(path, target), target))
    return cut


def exchanged(step: Exchange, parts: Sequence[NDArray[Any]], rank: int) -> NDArray[Any]:
    """What a collective gives one of the ranks."""
    if step.kind == "all_gather":
        return np.concatenate(parts, step.axis)
    if step.kind == "broadcast":
        return parts[step.root]
    stacked = np.stack(parts)
    reduced: NDArray[Any] = getattr(stacked, step.operation)(axis=0)
    return np.split(reduced, len(parts), step.axis)[rank] if "scatter" in step.kind else reduced


def run_all(slices: Sequence[Path], folder: Path, inputs: Arrays) -> list[Arrays]:
    """Each rank's outputs, one process running the steps of all ranks side by side."""
    plans = cut_all(slices, folder)
    values = [dict(inputs) for _ in plans]
    for steps in zip(*(plan.steps for plan, _ in plans), strict=True):
        if isinstance(steps[0], Exchange):
            parts = [values[rank][step.input] for rank, step in enumerate(steps)]
            for rank, step in enumerate(steps):
                values[rank][step.output] = exchanged(step, parts, rank)
            continue
        for rank, step in enumerate(steps):
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.add_session_config_entry(FOLDER_KEY, str(slices[rank].parent))
            path = plans[rank][1] / step.file
            session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            assert [item.name for item in session.get_inputs()] == [*step.inputs]
            assert [item.name for item in session.get_outputs()] == [*step.outputs]
            feeds = {name: values[rank][name] for name in step.inputs}
            values[rank].update(zip(step.outputs, session.run(None, feeds), strict=True))
    return [{name: value[name] for name in plans[0][0].made} for value in values]


def assert_close(found: NDArray[Any], expected: NDArray[Any]) -> None:
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_segments_of_an_mlp_give_what_the_whole_model_gives(
    tmp_path: Path, ranks: int, external: bool
) -> None:
    model = mlp(tmp_path, ranks, external=external)
    x = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    found = run_all(model.slices, tmp_path, {"x": x})
    for outputs in found:
        assert_close(outputs["y"], model.expected({"x": x})[0])


def test_each_collective_ends_a_phase(tmp_path: Path) -> None:
    plan = cut_segments(mlp(tmp_path, 2).slices[0], tmp_path)
    kinds = [type(step).__name__ for step in plan.steps]
    assert kinds == ["Segment", "Exchange"] * 3 + ["Segment"]
    assert [step.phase for step in plan.steps if isinstance(step, Exchange)] == [0, 1, 2]
    second = plan.steps[2]
    assert isinstance(second, Segment)
    # The residual x1 and its use lie in two phases, so x is carried to the first of them alone.
    assert second.inputs == ("x", "sum0")
    assert second.outputs == ("x1", "part1")


def test_collectives_that_are_ready_in_one_phase_follow_one_segment(tmp_path: Path) -> None:
    model = attention(tmp_path, 2)
    plan = cut_segments(model.slices[0], tmp_path)
    kinds = [type(step).__name__ for step in plan.steps]
    assert kinds == ["Segment", "Exchange", "Exchange", "Segment"]
    x = np.random.default_rng(1).normal(size=(2, 3, 16)).astype(np.float32)
    for outputs in run_all(model.slices, tmp_path, {"x": x}):
        for found, expected in zip(outputs.values(), model.expected({"x": x}), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize(
    ("operation", "attributes", "expected"),
    [
        ("all_reduce", {"reduce_op": "sum", "nb_rank": 2}, lambda a, b: [a + b] * 2),
        ("ALL_REDUCE", {"reduce_op": "MAX"}, lambda a, b: [np.maximum(a, b)] * 2),
        ("all_reduce", {"reduce_op": "avg", "groups": [0, 1]}, lambda a, b: [(a + b) / 2] * 2),
        ("all_gather", {"group_size": 2}, lambda a, b: [np.concatenate([a, b])] * 2),
        ("broadcast", {"root": 1}, lambda _, b: [b] * 2),
        (
            "reduce_scatter",
            {"reduce_op": "max", "nb_rank": 2},
            lambda a, b: np.split(np.maximum(a, b), 2),
        ),
    ],
)
def test_dist_collective_is_read(
    tmp_path: Path, operation: str, attributes: dict[str, Any], expected: Callable[..., Any]
) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["scaled"]),
        dist_collective("scaled", "joined", operation, **attributes),
        helper.make_node("Identity", ["joined"], ["y"]),
    ]
    slices = [
        save(
            tmp_path / f"model{rank}.onnx",
            nodes,
            [value("x", 4, 3)],
            [value("y", None, 3)],
            {"scale": floats([rank + 1])},
        )
        for rank in range(2)
    ]
    x = np.arange(12, dtype=np.float32).reshape(4, 3) - 5
    for found, wanted in zip(run_all(slices, tmp_path, {"x": x}), expected(x, 2 * x), strict=True):
        np.testing.assert_array_equal(found["y"], wanted)


def test_model_without_collectives_is_one_segment(tmp_path: Path) -> None:
    model = mlp(tmp_path, 2)
    plan = cut_segments(model.whole, tmp_path)
    assert [type(step).__name__ for step in plan.steps] == ["Segment"]
    assert (plan.rank, plan.tensor, plan.pipeline) == (None, None, 1)


def test_operator_of_another_domain_is_no_collective(tmp_path: Path) -> None:
    """A library of the user's own may run it."""
    own = helper.make_node("AllReduce", ["x"], ["y"], domain="own")
    path = save(tmp_path / "model.onnx", [own], [value("x", 2)], [value("y", 2)], {})
    assert [type(step).__name__ for step in cut_segments(path, tmp_path).steps] == ["Segment"]


def test_outputs_that_no_segment_makes_are_delivered_too(tmp_path: Path) -> None:
    """A collective's result, a constant; and collectives of an input and of constants."""
    nodes = [
        helper.make_node("Neg", ["w"], ["constant"]),
        all_reduce("x", "total"),
        all_gather("w", "gathered", 2, 0),
        all_reduce("constant", "negative"),
    ]
    names = ("total", "gathered", "negative", "constant")
    slices = [
        save(
            tmp_path / f"model{rank}.onnx",
            nodes,
            [value("x", 2)],
            [value(name, None) for name in names],
            {"w": floats([rank, 1])},
        )
        for rank in range(2)
    ]
    for rank, found in enumerate(run_all(slices, tmp_path, {"x": floats([3, 4])})):
        assert [found[name].tolist() for name in names] == [
            [6, 8],
            [0, 1, 1, 1],
            [-1, -2],
            [-rank, -1],
        ]


def test_constants_are_copied_and_not_carried(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["w"], ["turned"]),
        helper.make_node("MatMul", ["x", "turned"], ["part"]),
        all_reduce("part", "sum"),
        helper.make_node("MatMul", ["sum", "turned"], ["y"]),
    ]
    weights = {"w": np.eye(4, dtype=np.float32)}
    path = save(tmp_path / "model0.onnx", nodes, [value("x", 1, 4)], [value("y", 1, 4)], weights)
    plan = cut_segments(path, tmp_path)
    segments = [step for step in plan.steps if isinstance(step, Segment)]
    assert [step.outputs for step in segments] == [("part",), ("y",)]
    assert [step.inputs for step in segments] == [("x",), ("sum",)]


def test_collective_that_gives_a_constant_again_is_in_no_segment(tmp_path: Path) -> None:
    nodes = [all_reduce("x", "w"), helper.make_node("Add", ["x", "w"], ["y"])]
    weights = {"w": np.ones(4, np.float32)}
    path = save(tmp_path / "model0.onnx", nodes, [value("x", 4)], [value("y", 4)], weights)
    for step in cut_segments(path, tmp_path).steps:
        if isinstance(step, Segment):
            segment = onnx.load(tmp_path / step.file)
            assert [node.op_type for node in segment.graph.node] == ["Add"]


def test_random_numbers_beside_collectives_are_refused_with_the_node(tmp_path: Path) -> None:
    """Ranks that draw them would not agree."""
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("RandomUniform", [], [name], name="noise", shape=[2])],
            name,
            [],
            [value(name, 2)],
        )
        for name in ("then", "else")
    }
    nodes = [
        helper.make_node("If", ["yes"], ["drawn"], **branches),
        helper.make_node("Add", ["x", "drawn"], ["part"]),
        all_reduce("part", "y"),
    ]
    yes = {"yes": np.array(True)}
    path = save(tmp_path / "model0.onnx", nodes, [value("x", 2)], [value("y", 2)], yes)
    with pytest.raises(BuildError, match=r"node 'noise' \(RandomUniform\) draws random numbers"):
        cut_segments(path, tmp_path)

    path = save(tmp_path / "model0.onnx", nodes[:2], [value("x", 2)], [value("part", 2)], yes)
    (segment,) = cut_segments(path, tmp_path).steps
    assert isinstance(segment, Segment)
    assert segment.outputs == ("part",)


def test_output_that_a_later_segment_takes_has_its_type_as_an_output(tmp_path: Path) -> None:
    """Such as a value that a stage sends, and uses itself after a sum."""
    early = helper.make_node("Neg", ["x"], ["early"])
    late = helper.make_node("Add", ["early", "sum"], ["y"])
    outputs = [value("early", 2), value("y", 2)]
    nodes = [early, all_reduce("early", "sum"), late]
    model = onnx.load(save(tmp_path / "model.onnx", nodes, [value("x", 2)], outputs, {}))
    model.graph.value_info.append(value("sum", 2))
    place = RankPlan(rank=0, tensor=2, pipeline=1, spec=ModelSpec(inputs=(), outputs=()), made=())
    first, _, second = write_segments(model, place, tmp_path).steps
    assert isinstance(second, Segment)
    assert first.outputs == ("early",)
    assert second.inputs == ("early", "sum")
    taken = onnx.load(tmp_path / second.file).graph.input
    assert [x.type.tensor_type.elem_type for x in taken] == [onnx.TensorProto.FLOAT] * 2


def test_subgraph_reads_values_of_an_earlier_phase(tmp_path: Path) -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(op, ["early", "sum"], [f"{name}_out"])],
            name,
            [],
            [value(f"{name}_out", 2)],
        )
        for name, op in (("then", "Add"), ("else", "Sub"))
    }
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["early"]),
        all_reduce("x", "sum"),
        helper.make_node("ReduceMin", ["sum"], ["least"], keepdims=0),
        helper.make_node("Greater", ["least", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], **branches),
    ]
    weights = {"two": floats(2), "zero": floats(0)}
    slices = [
        save(tmp_path / f"model{rank}.onnx", nodes, [value("x", 2)], [value("y", 2)], weights)
        for rank in range(2)
    ]
    for name, x, y in (("a", [1, 2], [4, 8]), ("b", [-1, 2], [0, 0])):
        folder = tmp_path / name
        folder.mkdir()
        for found in run_all(slices, folder, {"x": floats(x)}):
            assert found["y"].tolist() == y


def test_plan_survives_its_file(tmp_path: Path) -> None:
    metadata = place(3, ["y"], ["batch", 16], tensor=2, pipeline=2, receives={"x": 1})
    metadata["inputs"].append(["ids", "int64", [None]])
    nodes = [all_reduce("x", "sum"), helper.make_node("Relu", ["sum"], ["y"])]
    x, y = (value(name, "batch", 16) for name in "xy")
    path = save(tmp_path / "model3.onnx", nodes, [x], [y], {}, metadata=metadata)
    plan = cut_segments(path, tmp_path)
    assert RankPlan.read(tmp_path) == plan
    assert (plan.rank, plan.tensor, plan.pipeline) == (3, 2, 2)
    assert plan.receives == {"x": 1}
    assert plan.made == ("y",)
    assert str(plan.spec.inputs[1]) == "ids: int64[?]"


def test_damaged_plan_is_refused(tmp_path: Path) -> None:
    plan = cut_segments(mlp(tmp_path, 2).slices[0], tmp_path)
    text = plan.to_json()
    for damage in ({"version": 2}, {"steps": [{"file": "a"}]}, {"inputs": None}):
        with pytest.raises(BuildError, match="rank plan: got"):
            RankPlan.from_json(text | damage)
    with pytest.raises(BuildError, match="rank plan: got version None"):
        RankPlan.from_json(json.loads("[]"))
    for content in (json.dumps(text)[:-9], "[" * 100_000):
        (tmp_path / "plan.json").write_text(content)
        with pytest.raises(BuildError, match=r"plan\.json"):
            RankPlan.read(tmp_path)


def loop_around(node: NodeProto) -> NodeProto:
    body = helper.make_graph(
        [node, helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [
            helper.make_tensor_value_info("step", onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("on", onnx.TensorProto.BOOL, []), value("sum", 4)],
    )
    return helper.make_node("Loop", ["times", ""], ["y"], name="around", body=body)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([loop_around(all_reduce("x", "sum"))], "'reduce x' is in a subgraph of Loop 'around'"),
        (
            [helper.make_node("AllToAll", ["x"], ["y"], name="swap", domain="com.microsoft")],
            "AllToAll 'swap' is not supported",
        ),
        (
            [all_gather("x", "big", 2, 0), all_gather("big", "y", 4, 0)],
            "'gather big' is for 4 ranks, expected 2 as in AllGather 'gather x'",
        ),
        ([dist_collective("x", "y", "all_reduce", reduce_op="prod")], "has reduce_op 'prod'"),
        ([dist_collective("x", "y", "gather")], "has collective_operation 'gather'"),
        ([dist_collective("x", "y", "broadcast")], "has root -1, expected a rank"),
        (
            [dist_collective("x", "y", "broadcast", root=2, nb_rank=2)],
            "has root 2, expected one of 2 ranks",
        ),
        (
            [dist_collective("x", "y", "all_gather", groups=[1, 2])],
            r"groups \[1, 2\], expected all ranks of the stage",
        ),
        ([dist_collective("x", "y", "all_gather", colour=1)], r"the attributes \['colour'\]"),
        (
            [helper.make_node("Relu", ["z"], ["y"], name="early"), all_reduce("x", "z")],
            r"Relu 'early' reads \['z'\], which no node before it makes",
        ),
    ],
)
def test_collective_that_cannot_be_run_is_refused_by_its_name(
    tmp_path: Path, nodes: list[NodeProto], message: str
) -> None:
    weights = {"times": np.array(2, np.int64)}
    path = save(tmp_path / "model0.onnx", nodes, [value("x", 4)], [value("y", None)], weights)
    with pytest.raises(BuildError, match=message) as raised:
        cut_segments(path, tmp_path)
    assert str(path) in str(raised.value)


def test_value_of_unknown_type_needs_a_declaration(tmp_path: Path) -> None:
    """An operator that the package onnx does not know makes a value that crosses segments."""
    nodes = [
        helper.make_node("Inverse", ["x"], ["part"], domain="com.microsoft"),
        all_reduce("part", "sum"),
        helper.make_node("Add", ["part", "sum"], ["y"]),
    ]
    path = save(tmp_path / "model0.onnx", nodes, [value("x", 2, 2)], [value("y", 2, 2)], {})
    with pytest.raises(BuildError, match="the type of 'part' is unknown, which Inverse 'part'"):
        cut_segments(path, tmp_path)
    model = onnx.load(path)
    model.graph.value_info.extend([value("part", 400, 2), value("sum", 400, 2)])
    onnx.save(model, path)
    found = run_all([path, path], tmp_path, {"x": floats([[1, 2], [3, 4]])})
    assert found[0]["y"].shape == (2, 2)


def test_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model0.onnx"
    with pytest.raises(BuildError, match=r"model0\.onnx"):
        cut_segments(path, tmp_path)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(BuildError, match=r"model0\.onnx"):
        cut_segments(path, tmp_path)
