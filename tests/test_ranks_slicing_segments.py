"""Tests of mcinfer/ranks/slicing/segments.py: a slice is cut at collectives.

What the segments give together is tested where ranks run them, in test_ranks_slices.py.
"""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from mcinfer.errors import BuildError
from mcinfer.ranks.slicing.plans import Exchange, RankPlan, Segment
from mcinfer.ranks.slicing.segments import cut_segments, write_segments
from mcinfer.specs import ModelSpec
from tests.sliced_models import mlp, place, save
from tests.text_models import text_model


def kinds(plan: RankPlan) -> list[str]:
    return [type(step).__name__ for step in plan.steps]


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
    text = """(float[2] x) => (float[2] y) {
        a = Neg(x)  b = Abs(x)  sum = AllReduce(a)  total = AllReduce(b)  y = Add(sum, total)
    }"""
    plan = cut_segments(save(tmp_path / "model0.onnx", text), tmp_path)
    assert kinds(plan) == ["Segment", "Exchange", "Exchange", "Segment"]


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
    text = """(float[2,2] x) => (float[2,2] y) {
        [turned] part = com.microsoft.Inverse(x)  sum = AllReduce(part)  y = Add(part, sum)
    }"""
    path = save(tmp_path / "model0.onnx", text)
    with pytest.raises(BuildError, match="the type of 'part' is unknown, which Inverse 'turned'"):
        cut_segments(path, tmp_path)
