"""Tests of mcinfer/ranks/slicing/segments.py: a slice is cut at collectives, its parts give the whole."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from mcinfer.errors import BuildError
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.ranks.slicing.plans import Exchange, RankPlan, Segment
from mcinfer.ranks.slicing.segments import cut_segments, write_segments
from mcinfer.specs import ModelSpec
from tests.sliced_models import attention, mlp, place, save, save_ranks
from tests.text_models import text_model

Arrays = dict[str, NDArray[Any]]


def floats(values: Any) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def exchanged(step: Exchange, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """What a sum or a gather gives each of the ranks."""
    if step.kind == "all_gather":
        return np.concatenate(parts, step.axis)
    total: NDArray[Any] = np.sum(parts, axis=0)
    return total


def run_all(slices: Sequence[Path], folder: Path, inputs: Arrays) -> list[Arrays]:
    """Each rank's outputs, one process running the steps of all ranks side by side."""
    folders = [folder / f"rank{rank}" for rank in range(len(slices))]
    for target in folders:
        target.mkdir()
    plans = [cut_segments(path, target) for path, target in zip(slices, folders, strict=True)]
    values = [dict(inputs) for _ in plans]
    for steps in zip(*(plan.steps for plan in plans), strict=True):
        if isinstance(steps[0], Exchange):
            parts = [values[rank][step.input] for rank, step in enumerate(steps)]
            for rank, step in enumerate(steps):
                values[rank][step.output] = exchanged(step, parts)
            continue
        for rank, step in enumerate(steps):
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.add_session_config_entry(FOLDER_KEY, str(slices[rank].parent))
            path = folders[rank] / step.file
            session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            assert [item.name for item in session.get_inputs()] == [*step.inputs]
            assert [item.name for item in session.get_outputs()] == [*step.outputs]
            feeds = {name: values[rank][name] for name in step.inputs}
            values[rank].update(zip(step.outputs, session.run(None, feeds), strict=True))
    return [{name: value[name] for name in plans[0].made} for value in values]


def kinds(plan: RankPlan) -> list[str]:
    return [type(step).__name__ for step in plan.steps]


def assert_close(found: NDArray[Any], expected: NDArray[Any]) -> None:
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_each_collective_ends_a_phase(tmp_path: Path) -> None:
    model = mlp(tmp_path, 2)
    plan = cut_segments(model.slices[0], tmp_path)
    assert kinds(plan) == ["Segment", "Exchange"] * 3 + ["Segment"]
    assert [step.phase for step in plan.steps if isinstance(step, Exchange)] == [0, 1, 2]
    second = plan.steps[2]
    assert isinstance(second, Segment)
    # The residual x1 and its use lie in two phases, so x is carried to the first of them alone.
    assert second.inputs == ("x", "sum0")
    assert second.outputs == ("x1", "part1")
    plan = cut_segments(model.whole, tmp_path)
    assert kinds(plan) == ["Segment"]
    assert (plan.rank, plan.tensor, plan.pipeline) == (None, None, 1)


def test_collectives_that_are_ready_in_one_phase_follow_one_segment(tmp_path: Path) -> None:
    model = attention(tmp_path, 2)
    plan = cut_segments(model.slices[0], tmp_path)
    assert kinds(plan) == ["Segment", "Exchange", "Exchange", "Segment"]
    x = np.random.default_rng(1).normal(size=(2, 3, 16)).astype(np.float32)
    for outputs in run_all(model.slices, tmp_path, {"x": x}):
        for found, expected in zip(outputs.values(), model.expected({"x": x}), strict=True):
            assert_close(found, expected)


def test_outputs_that_no_segment_makes_are_delivered_too(tmp_path: Path) -> None:
    """A collective's result, a constant; and collectives of an input and of constants."""
    names = ("total", "gathered", "negative", "constant")
    text = f"""(float[2] x) => ({", ".join(f"float[?] {name}" for name in names)}) {{
        constant = Neg(w)  total = AllReduce(x)  gathered = AllGather<group_size=2, axis=0>(w)
        negative = AllReduce(constant)
    }}"""
    slices = save_ranks(tmp_path, text, [{"w": floats([rank, 1])} for rank in range(2)])
    for rank, found in enumerate(run_all(slices, tmp_path, {"x": floats([3, 4])})):
        expected = [[6, 8], [0, 1, 1, 1], [-1, -2], [-rank, -1]]
        assert [found[name].tolist() for name in names] == expected


def test_constants_are_copied_and_not_carried(tmp_path: Path) -> None:
    text = """(float[1,4] x) => (float[1,4] y) {
        turned = Transpose(w)  part = MatMul(x, turned)  sum = AllReduce(part)  y = MatMul(sum, turned)
    }"""
    path = save(tmp_path / "model0.onnx", text, {"w": np.eye(4, dtype=np.float32)})
    segments = [step for step in cut_segments(path, tmp_path).steps if isinstance(step, Segment)]
    assert [step.outputs for step in segments] == [("part",), ("y",)]
    assert [step.inputs for step in segments] == [("x",), ("sum",)]


def test_random_numbers_beside_collectives_are_refused_with_the_node(tmp_path: Path) -> None:
    """Ranks that draw them would not agree."""
    text = """(float[2] x) => (float[2] END) {
        drawn = If(yes) <
            then_branch = t () => (float[2] p) { [noise] p = RandomUniform<shape=[2]>() },
            else_branch = e () => (float[2] q) { [noise] q = RandomUniform<shape=[2]>() }>
        part = Add(x, drawn)  LAST
    }"""
    beside = text.replace("END", "y").replace("LAST", "y = AllReduce(part)")
    path = save(tmp_path / "model0.onnx", beside, {"yes": True})
    with pytest.raises(BuildError, match=r"node 'noise' \(RandomUniform\) draws random numbers"):
        cut_segments(path, tmp_path)

    alone = text.replace("END", "part").replace("LAST", "")
    (segment,) = cut_segments(save(path, alone, {"yes": True}), tmp_path).steps
    assert isinstance(segment, Segment)
    assert segment.outputs == ("part",)


def test_output_that_a_later_segment_takes_has_its_type_as_an_output(tmp_path: Path) -> None:
    """Such as a value that a stage sends, and uses itself after a sum."""
    model = text_model("""(float[2] x) => (float[2] early, float[2] y) <float[2] sum> {
        early = Neg(x)  sum = AllReduce(early)  y = Add(early, sum)
    }""")
    place = RankPlan(rank=0, tensor=2, pipeline=1, spec=ModelSpec(inputs=(), outputs=()), made=())
    first, _, second = write_segments(model, place, tmp_path).steps
    assert isinstance(second, Segment)
    assert first.outputs == ("early",)
    assert second.inputs == ("early", "sum")
    taken = onnx.load(tmp_path / second.file).graph.input
    assert [x.type.tensor_type.elem_type for x in taken] == [onnx.TensorProto.FLOAT] * 2


def test_subgraph_reads_values_of_an_earlier_phase(tmp_path: Path) -> None:
    text = """(float[2] x) => (float[2] y) {
        early = Mul(x, two)  sum = AllReduce(x)
        least = ReduceMin<keepdims=0>(sum)  positive = Greater(least, zero)
        y = If(positive) <
            then_branch = t () => (float[2] p) { p = Add(early, sum) },
            else_branch = e () => (float[2] q) { q = Sub(early, sum) }>
    }"""
    slices = save_ranks(tmp_path, text, [{"two": floats(2), "zero": floats(0)}] * 2)
    for name, x, y in (("a", [1, 2], [4, 8]), ("b", [-1, 2], [0, 0])):
        folder = tmp_path / name
        folder.mkdir()
        for found in run_all(slices, folder, {"x": floats(x)}):
            assert found["y"].tolist() == y


def test_plan_survives_its_file(tmp_path: Path) -> None:
    metadata = place(3, ["y"], ["batch", 16], tensor=2, pipeline=2, receives={"x": 1})
    metadata["inputs"].append(["ids", "int64", [None]])
    text = "(float[batch,16] x) => (float[batch,16] y) { sum = AllReduce(x)  y = Relu(sum) }"
    plan = cut_segments(save(tmp_path / "model3.onnx", text, metadata=metadata), tmp_path)
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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            """[around] y = Loop(times, ) <body = b (int64 step, bool go) => (bool on, float[4] sum)
                { [summing] sum = AllReduce(x)  on = Identity(go) }>""",
            "'summing' is in a subgraph of Loop 'around'",
        ),
        ("[swap] y = com.microsoft.AllToAll(x)", "AllToAll 'swap' is not supported"),
        (
            """[first] big = AllGather<group_size=2, axis=0>(x)
               [next] y = AllGather<group_size=4, axis=0>(big)""",
            "'next' is for 4 ranks, expected 2 as in AllGather 'first'",
        ),
        ('DIST"all_reduce", reduce_op="prod">(x)', "has reduce_op 'prod'"),
        ('DIST"broadcast", root=2, nb_rank=2>(x)', "has root 2, expected one of 2 ranks"),
        (
            "[early] y = Relu(z)  z = AllReduce(x)",
            r"Relu 'early' reads \['z'\], which no node before it makes",
        ),
    ],
)
def test_collective_that_cannot_be_run_is_refused_by_its_name(
    tmp_path: Path, body: str, message: str
) -> None:
    body = body.replace("DIST", "y = DistCollective<collective_operation=")
    text = f"(float[4] x) => (float[?] y) {{ {body} }}"
    path = save(tmp_path / "model0.onnx", text, {"times": np.int64(2)})
    with pytest.raises(BuildError, match=message) as raised:
        cut_segments(path, tmp_path)
    assert str(path) in str(raised.value)


def test_value_of_unknown_type_needs_a_declaration(tmp_path: Path) -> None:
    """An operator that the package onnx does not know makes a value that crosses segments."""
    text = """(float[2,2] x) => (float[2,2] y) DECLARED {
        [turned] part = com.microsoft.Inverse(x)  sum = AllReduce(part)  y = Add(part, sum)
    }"""
    path = save(tmp_path / "model0.onnx", text.replace("DECLARED", ""))
    with pytest.raises(BuildError, match="the type of 'part' is unknown, which Inverse 'turned'"):
        cut_segments(path, tmp_path)
    save(path, text.replace("DECLARED", "<float[400,2] part, float[400,2] sum>"))
    found = run_all([path, path], tmp_path, {"x": floats([[1, 2], [3, 4]])})
    assert found[0]["y"].shape == (2, 2)
