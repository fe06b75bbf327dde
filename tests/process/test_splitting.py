"""How real models are split: learned from the first request, checked, never guessed.

Each request is compared with one session of ONNX Runtime that has the whole batch.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer import (
    InvalidInputError,
    Master,
    PredictError,
    PredictTimeoutError,
    RequestTrace,
    RestartPolicy,
    Split,
)
from tests.process.models import AFFINE, FakeModel, OnnxModel, assert_answers, rows
from tests.process.scripts import ROOT, run_documented
from tests.process.waiting import pids, wait_until
from tests.split_models import (
    ANCHORS,
    NO_NAMES,
    PADDLE,
    Arrays,
    alone,
    assert_equal,
    mixing,
    onnx,
    random,
    rename,
)

GENEROUS = RestartPolicy(budget=1000, backoff=0.01, backoff_limit=0.05)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have learned is not known here."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("MCINFER_CACHE", str(folder))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged as a warning about requests."""
    caplog.set_level(logging.WARNING, "mcinfer.master")
    return lambda: [r.getMessage() for r in caplog.records if "request" in r.getMessage()]


def runs(master: Master) -> list[int]:
    return [worker.runs for worker in master.statistics().workers]


def is_split(master: Master, inputs: Arrays) -> bool:
    """Whether a request runs on both workers."""
    before = runs(master)
    master.predict(inputs)
    return all(after > was for was, after in zip(before, runs(master), strict=True))


# Models that nothing is declared of.

SILERO = onnx("""(float[?, ?] input, float[2, ?, 3] state) => (float[?, 1] output, float[?, ?, ?] stateN)
<float two = {2.0}> {
    output = ReduceMean <axes = [1], keepdims = 1> (input)
    stateN = Mul(state, two)
}""")
AS_LONG_AS_A_SCALAR = onnx("""(float[batch, 4] x, float n) => (float[batch, found] y)
<float zero = {0.0}, float one = {1.0}> {
    mean = ReduceMean <axes = [1], keepdims = 1> (x)
    steps = Range(zero, n, one)
    y = Add(mean, steps)
}""")


def silero(count: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    return {"input": random((count, 5), seed), "state": random((2, count, 3), seed + 1)}


def test_output_whose_batch_is_not_its_first_axis_is_joined_there(onnx_model: OnnxModel) -> None:
    path = onnx_model(SILERO)
    with Master(path, 2) as master:
        for count in (4, 5, 6):
            assert_equal(master.predict(silero(count, count)), alone(path, silero(count, count)))
        assert master.split == Split(
            inputs={"input": 0, "state": 1},
            outputs={"output": 0, "stateN": 1},
            known="learned",
            checked=True,
            rows=4,
            difference=master.split.difference,
        )
        assert is_split(master, silero(6))


def test_output_of_equal_parts_is_not_returned_once_for_all(onnx_model: OnnxModel) -> None:
    path = onnx_model(SILERO)
    equal = {"input": np.ones((6, 5), np.float32), "state": np.ones((2, 6, 3), np.float32)}
    with Master(path, 2) as master:
        for axes in (None, {"input": 0, "state": 1}):
            answer = master.predict(equal, batch_axes=axes)
            assert answer["stateN"].shape == (2, 6, 3)


def test_axes_of_outputs_may_be_said(onnx_model: OnnxModel) -> None:
    path = onnx_model(SILERO)
    axes: dict[str, Any] = {
        "batch_axes": {"input": 0, "state": 1},
        "output_axes": {"output": 0, "stateN": 1},
    }
    with Master(path, 2, verify="never", **axes) as master:
        assert is_split(master, silero(4))  # also the first
        assert_equal(master.predict(silero(5)), alone(path, silero(5)))
        assert master.split.known == "said"
        assert not master.split.checked
    with Master(path, 2) as master:
        first = master.predict(silero(4), **axes)
        assert_equal(first, alone(path, silero(4)))
        assert_equal(master.predict(silero(5), **axes), alone(path, silero(5)))


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        pytest.param(PADDLE, 4, id="Paddle"),
        pytest.param(("-1", "-1", "-1", "-1"), 2, id="minus one"),
    ],
)
def test_model_without_names_is_split_from_the_second_request_on(
    onnx_model: OnnxModel, sizes: tuple[str, ...], count: int
) -> None:
    path = onnx_model(NO_NAMES)
    rename(path, dict(zip("abcd", sizes, strict=True)))
    with Master(path, 2) as master:
        first = {"x": random((count, 3, 7))}
        assert_equal(master.predict(first), alone(path, first))
        assert is_split(master, {"x": random((4, 3, 6))})
        later = {"x": random((5, 3, 9), 2)}
        assert_equal(master.predict(later), alone(path, later))


def test_name_that_stands_for_two_sizes_is_no_error(onnx_model: OnnxModel) -> None:
    """ONNX Runtime takes such a model; exporters of Paddle write "?" wherever they know nothing."""
    path = onnx_model(onnx("(float[n, 3, n] x) => (float[n, 3, n] y) { y = Relu(x) }"))
    with Master(path, 2) as master:
        for count in (4, 5):
            x = {"x": random((count, 3, 7))}
            assert_equal(master.predict(x), alone(path, x))


# Outputs that do not join.

SELECTED = onnx("""(float[batch, 4] x) => (int64[num_selected, 2] selected) <float zero = {0.0}> {
    positive = Greater(x, zero)
    where = NonZero(positive)
    selected = Transpose <perm = [1, 0]> (where)
}""")


def test_index_of_a_row_in_the_batch_is_never_that_in_a_piece(onnx_model: OnnxModel) -> None:
    path = onnx_model(SELECTED)
    with Master(path, 2) as master:
        for count in (4, 6, 4):
            x = {"x": np.abs(random((count, 4), count)) - np.float32(0.2)}
            assert_equal(master.predict(x), alone(path, x))
        assert not master.split.splits


# Axes that are said.


def test_axis_that_is_said_is_the_one_that_outputs_join_along(onnx_model: OnnxModel) -> None:
    path = onnx_model(onnx("(float[?, ?] x) => (float[?, ?] y) { y = Relu(x) }"))
    with Master(path, 2) as master:
        for seed in range(3):
            x = {"x": random((4, 8), seed)}
            assert_equal(master.predict(x, batch_axes={"x": 1}), alone(path, x))


def test_fixed_batch_of_one_along_another_axis_needs_the_outputs_axis(
    onnx_model: OnnxModel,
) -> None:
    path = onnx_model(onnx("(float[1, 1, 6] x) => (float[1, 1, 6] y) { y = Relu(x) }"))
    x = {"x": random((1, 8, 6))}
    with Master(path, 2) as master:
        with pytest.raises(InvalidInputError, match=r"output 'y'.*output_axes=\{'y': 0\}"):
            master.predict(x, batch_axes={"x": 1})
        answer = master.predict(x, batch_axes={"x": 1}, output_axes={"y": 1})
        np.testing.assert_array_equal(answer["y"], np.maximum(x["x"], 0))
        assert sum(runs(master)) == 8


def test_fixed_first_dimension_is_no_batch_unless_that_is_said(onnx_model: OnnxModel) -> None:
    path = onnx_model(onnx("(float[3, 8, 8] image) => (float[3, 8, 8] y) { y = Relu(image) }"))
    six = {"image": random((6, 8, 8))}
    with Master(path, 2) as master:
        with pytest.raises(
            InvalidInputError, match=r"'image' has size 6 in dimension 0, expected 3"
        ):
            master.predict(six)
        axes: dict[str, Any] = {"batch_axes": {"image": 0}, "output_axes": {"y": 0}}
        np.testing.assert_array_equal(master.predict(six, **axes)["y"], np.maximum(six["image"], 0))


def test_rows_of_a_model_for_one_row_are_so_many_runs(onnx_model: OnnxModel) -> None:
    path = onnx_model(AFFINE.replace("batch", "1"))
    with Master(path, 2) as master:
        assert_answers(master.predict(rows(4)), rows(4))
        assert_answers(master.submit(rows(3)).result(timeout=10.0), rows(3))
        assert sum(runs(master)) == 7


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"batch_axes": {"z": 0}}, "batch_axes: got unknown input 'z'"),
        (
            {"batch_axes": {"x": 2}},
            r"batch_axes\['x'\]: got 2, expected None or an axis from 0 to 1",
        ),
        (
            {"output_axes": {"x": 0}},
            r"output_axes: got unknown output 'x', expected one of \['y'\]",
        ),
        ({"output_axes": {"y": True}}, r"output_axes\['y'\]: got True"),
        ({"output_axes": ["y"]}, "output_axes: got .*expected a mapping of outputs"),
        ({"verify": "later"}, "verify: got 'later', expected 'first', 'always' or 'never'"),
    ],
)
def test_axes_that_the_model_does_not_have_are_refused(
    onnx_model: OnnxModel, axes: dict[str, Any], words: str
) -> None:
    path = onnx_model(AFFINE)
    with pytest.raises(InvalidInputError, match=words):
        Master(path, 2, **axes).start()
    if "verify" not in axes:
        with Master(path, 2) as master, pytest.raises(InvalidInputError, match=words):
            master.predict(rows(2), **axes)


def test_axis_that_is_said_wrong_is_found_out(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]]
) -> None:
    path = onnx_model(
        onnx("(float[a, b] x) => (float[b, a] y) { y = Transpose <perm = [1, 0]> (x) }")
    )
    with Master(path, 2, batch_axes={"x": 0}, output_axes={"y": 0}) as master:
        for seed in range(3):
            x = {"x": random((4, 4), seed)}
            assert_equal(master.predict(x), alone(path, x))
        assert not master.split.splits
    assert len(warnings()) == 1
    assert "'y'" in warnings()[0]


def test_other_shape_than_was_said_is_an_error_that_names_it(onnx_model: OnnxModel) -> None:
    path = onnx_model(SELECTED)
    axes: dict[str, Any] = {
        "batch_axes": {"x": 0},
        "output_axes": {"selected": 1},
        "verify": "never",
    }
    x = {"x": np.concatenate([-np.ones((2, 4), np.float32), np.ones((2, 4), np.float32)])}
    with Master(path, 2, **axes) as master:
        with pytest.raises(
            PredictError,
            match=r"output 'selected' joins along axis 1.*expected \[0, \?\] from worker \d .*got \[8, 2\]",
        ):
            master.predict(x)
        assert_equal(master.predict(x), alone(path, x))  # whole, from now on


# Rows that depend on each other.


@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        ("softmax", "batch"),
        ("output of the number", "?"),
    ],
)
def test_model_that_mixes_its_rows_runs_whole(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]], name: str, symbol: str
) -> None:
    path = onnx_model(mixing(name, symbol))
    with Master(path, 2) as master:
        for seed in range(3):
            x = {"x": random((4, 4), seed)}
            assert_equal(master.predict(x), alone(path, x))
        assert not master.split.splits
        assert not is_split(master, {"x": random((4, 4))})
    assert len(warnings()) == 1
    assert "requests run whole, on one worker" in warnings()[0]
    assert "output 'y'" in warnings()[0] or "output 'z'" in warnings()[0]


def test_random_model_is_split_only_where_its_symbols_say_so(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]]
) -> None:
    body = "({x} x) => ({y} y) {{ noise = RandomNormalLike(x)\n y = Add(x, noise) }}"
    declared = onnx_model(onnx(body.format(x="float[batch, 4]", y="float[batch, 4]")))
    with Master(declared, 2) as master:
        assert master.predict(rows(4))["y"].shape == (4, 4)
        assert master.split.splits
        assert not master.split.checked
        assert is_split(master, rows(4))
    unknown = onnx_model(onnx(body.format(x="float[?, 4]", y="float[?, 4]")))
    with Master(unknown, 2) as master:
        assert master.predict(rows(4))["y"].shape == (4, 4)
        assert not is_split(master, rows(4))
    assert ["without a check" in text for text in warnings()] == [True, False]


# What a request shows, and what it does not.


def test_requests_of_equal_rows_or_one_row_decide_nothing(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]]
) -> None:
    with Master(onnx_model(AFFINE), 2) as master:
        for x in (rows(1), {"x": np.ones((4, 4), np.float32)}, rows(1)):
            assert_answers(master.predict(x), x)
            assert not master.split.checked
        assert sum(runs(master)) == 3
        assert_answers(master.predict(rows(4)), rows(4))
        assert master.split.checked
        assert master.split.known == "declared"
        assert is_split(master, {"x": np.ones((4, 4), np.float32)})
    assert len(warnings()) == 1
    assert "its rows are equal" in warnings()[0]


def test_request_that_is_looked_at_is_traced_once(onnx_model: OnnxModel) -> None:
    traces: list[RequestTrace] = []
    with Master(onnx_model(AFFINE), 2, trace=traces.append) as master:
        master.predict(rows(4))
        master.predict(rows(4))
    assert [len(trace.shards) for trace in traces] == [1, 2]


def test_time_of_a_request_that_is_looked_at_is_that_of_the_call(fake_model: FakeModel) -> None:
    with Master(fake_model(run="sleep:60"), 2, engine="fake") as master:
        with pytest.raises(PredictTimeoutError, match=r"within 0\.3 s"):
            master.predict(rows(4), timeout=0.3)
        with pytest.raises(PredictTimeoutError, match=r"within 0\.3 s"):
            asyncio.run(master.predict_async(rows(4), timeout=0.3))


def test_what_was_learned_is_recorded_for_the_next_master(onnx_model: OnnxModel) -> None:
    path = onnx_model(SILERO)
    with Master(path, 2) as master:
        master.predict(silero(4))
        learned = master.split
    with Master(path, 2) as master:
        assert master.split.known == "recorded"
        assert (master.split.inputs, master.split.outputs) == (learned.inputs, learned.outputs)
        assert is_split(master, silero(4))  # the first already
    changed = onnx_model(SILERO.replace("2.0", "3.0"))
    with Master(changed, 2) as master:
        assert master.split.known == "unknown"  # another model
    with Master(path, 2, batch_axes={"input": 1}) as master:
        assert master.split.known == "said"  # another question


@pytest.mark.parametrize("content", [b'{"inputs": {}}'])
def test_damaged_record_is_none(onnx_model: OnnxModel, tmp_path: Path, content: bytes) -> None:
    path = onnx_model(SILERO)
    with Master(path, 2) as master:
        master.predict(silero(4))
    (record,) = (tmp_path / "cache" / "splits").iterdir()
    record.write_bytes(content)
    with Master(path, 2) as master:
        assert not master.split.checked
        assert_equal(master.predict(silero(4)), alone(path, silero(4)))
        assert master.split.known == "learned"


def test_model_that_mixes_is_recorded_too_and_says_so_again(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]]
) -> None:
    path = onnx_model(mixing("mean", "batch"))
    for count in (4, 1):  # whole, two pieces, and whole again, which shows that it is not random
        with Master(path, 2) as master:
            master.predict({"x": random((4, 4))})
            assert sum(runs(master)) == count
    assert len(warnings()) == 2


def test_cache_that_cannot_be_used_costs_nothing_but_learning_again(
    onnx_model: OnnxModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "file"))
    path = onnx_model(SILERO)
    for _ in range(2):
        with Master(path, 2) as master:
            assert not master.split.checked
            assert_equal(master.predict(silero(4)), alone(path, silero(4)))
            assert master.split.known == "learned"


def test_always_compares_every_request_and_never_none(onnx_model: OnnxModel) -> None:
    path = onnx_model(AFFINE)
    with Master(path, 2, verify="always") as master:
        for count in range(1, 4):
            assert_answers(master.predict(rows(4)), rows(4))
            assert sum(runs(master)) == 3 * count
    with Master(path, 2, verify="never") as master:
        assert_answers(master.predict(rows(4)), rows(4))
        assert runs(master) == [1, 1]
        assert not master.split.checked


def test_always_finds_a_model_that_mixes_for_some_values_only(onnx_model: OnnxModel) -> None:
    path = onnx_model(
        onnx("""(float[batch, 4] x) => (float[batch, 4] y) <float limit = {100.0}> {
            over = Sub(x, limit)
            large = Relu(over)
            sum = ReduceMax <axes = [0], keepdims = 1> (large)
            y = Add(x, sum)
        }""")
    )
    with Master(path, 2, verify="always") as master:
        for first in (0.0, 200.0, 300.0):
            assert_equal(master.predict(rows(4, first)), alone(path, rows(4, first)))
        assert not master.split.splits


def test_never_believes_symbols_but_joins_nothing_that_they_do_not_tell(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]]
) -> None:
    path = onnx_model(ANCHORS)
    image = {"image": random((4, 3, 6))}
    with Master(path, 2, verify="never") as master:
        for _ in range(2):
            assert_equal(master.predict(image), alone(path, image))
        assert master.split.unjoined == ("anchors",)
        assert runs(master) == [2, 0]
    assert len(warnings()) == 1
    assert "'anchors'" in warnings()[0]
    assert "output_axes" in warnings()[0]
    with Master(path, 2, verify="never", output_axes={"anchors": None}) as master:
        assert_equal(master.predict(image), alone(path, image))
        assert runs(master) == [1, 1]


def test_learn_is_on_demand_and_anew(onnx_model: OnnxModel) -> None:
    path = onnx_model(SILERO)
    with Master(path, 1) as master:  # also with one worker
        split = master.learn(silero(4))
        assert split.checked
        assert split == master.split
        assert "input   state   axis 1" in str(split)
        assert split.rows == 4
        again = master.learn(silero(6))
        assert again.rows == 6
        with pytest.raises(InvalidInputError, match="missing"):
            master.learn({"input": silero(4)["input"]})
    with Master(path, 2) as master:
        assert is_split(master, silero(4))


def test_whole_run_that_fails_is_answered_by_pieces_that_were_declared(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]]
) -> None:
    """As where one device has not the memory for all rows: here a run takes two rows, no more."""
    text = """({x} x) => ({y} y) <int64[2] two = {{2, 4}}, float none = {{0.0}}> {{
        sum = ReduceSum <keepdims = 0> (x)
        nothing = Mul(sum, none)
        whole = Cast <to = 7> (nothing)
        shape = Add(two, whole)
        y = Reshape(x, shape)
    }}"""
    declared = onnx_model(onnx(text.format(x="float[batch, 4]", y="float[batch, 4]")))
    with Master(declared, 2) as master:
        for _ in range(2):
            np.testing.assert_array_equal(master.predict(rows(4))["y"], rows(4)["x"])
        assert not master.split.checked
    assert len(warnings()) == 1
    assert "without a check" in warnings()[0]
    unknown = onnx_model(onnx(text.format(x="float[?, 4]", y="float[?, 4]")))
    with Master(unknown, 2) as master:
        with pytest.raises(PredictError, match="Reshape"):
            master.predict(rows(4))
        assert not master.split.splits


@pytest.mark.parametrize("ask", ["predict", "predict_async"])
def test_piece_that_fails_where_the_whole_runs_is_answered_by_the_whole(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]], ask: str
) -> None:
    """Of what the pieces of the first request have not shown: that one needs two rows."""
    path = onnx_model(
        onnx("""(float[batch, 4] x) => (float[batch, 4] y)
        <int64[1] two = {2}, int64[1] zero = {0}, float none = {0.0}> {
            most, at = TopK <axis = 0> (x, two)
            some = ReduceSum <keepdims = 0> (most)
            nothing = Mul(some, none)
            y = Add(x, nothing)
        }""")
    )

    def answer(x: Arrays) -> Arrays:
        if ask == "predict":
            return master.predict(x)
        return asyncio.run(master.predict_async(x))

    with Master(path, 2) as master:
        for count in (4, 2, 4):
            assert_answers_identity(answer(rows(count)), rows(count))
        assert not master.split.splits
    assert len(warnings()) == 1
    assert "a piece of a batch fails where the whole runs" in warnings()[0]


def assert_answers_identity(outputs: Arrays, inputs: Arrays) -> None:
    np.testing.assert_array_equal(outputs["y"], inputs["x"])


def test_output_that_loses_a_dimension_with_the_rows_is_not_joined(onnx_model: OnnxModel) -> None:
    path = onnx_model(onnx("(float[?, 1, 3] x) => (float[?, 3] y) { y = Squeeze(x) }"))
    with Master(path, 2) as master:
        four, two = {"x": random((4, 1, 3))}, {"x": random((2, 1, 3))}
        assert_equal(master.predict(four), alone(path, four))
        with pytest.raises(PredictError, match=r"output 'y' joins along axis 0.*got \[3\]"):
            master.predict(two)
        assert_equal(master.predict(two), alone(path, two))


def test_worker_that_is_killed_in_the_check_costs_no_request(fake_model: FakeModel) -> None:
    model = fake_model(run="sleep:0.3")
    with Master(model, 2, engine="fake", restart=GENEROUS) as master:
        answers: list[Any] = []
        caller = threading.Thread(target=lambda: answers.append(master.predict(rows(4))))
        caller.start()
        wait_until(lambda: sum(runs(master)) == 1, timeout=30.0)  # the whole run has ended
        for pid in pids(master):
            os.kill(pid, signal.SIGKILL)
        caller.join(60.0)
        assert_answers(answers[0], rows(4))
        assert_answers(master.predict(rows(4)), rows(4))


def test_input_that_kills_in_the_check_fails_alone(fake_model: FakeModel) -> None:
    model = fake_model(when={"-1": "kill"})
    with Master(model, 2, engine="fake", restart=GENEROUS) as master:
        with pytest.raises(Exception, match="died"):
            master.predict(rows(4, first=-1.0))
        master.wait_ready()
        assert_answers(master.predict(rows(4)), rows(4))
        assert master.split.checked


def test_many_callers_are_answered_right_while_one_learns(onnx_model: OnnxModel) -> None:
    path = onnx_model(SILERO)
    failures: list[BaseException] = []

    with Master(path, 2) as master:

        def ask(thread: int) -> None:
            try:
                for i in range(10):
                    x = silero(2 + (thread + i) % 5, 100 * thread + i)
                    got = master.predict(x)
                    np.testing.assert_array_equal(got["stateN"], x["state"] * 2)
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert not failures
        assert master.split.checked
        statistics = master.statistics()
        assert statistics.failed == 0
        assert statistics.in_flight == 0


def test_tasks_of_an_event_loop_learn_without_stopping_it(fake_model: FakeModel) -> None:
    model = fake_model(run="sleep:0.2")

    async def ask(master: Master) -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        assert_answers(await master.predict_async(rows(4)), rows(4))
        ticking.cancel()
        return ticks

    with Master(model, 2, engine="fake") as master:
        assert asyncio.run(ask(master)) > 5
        assert master.split.checked
        assert sum(runs(master)) == 3


def test_task_that_is_cancelled_while_it_learns_stops_its_runs(fake_model: FakeModel) -> None:
    model = fake_model(run="sleep:30")

    async def ask(master: Master) -> None:
        task = asyncio.create_task(master.predict_async(rows(4)))
        while not master.statistics().in_flight:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Master(model, 2, engine="fake") as master:
        asyncio.run(ask(master))
        wait_until(lambda: not master.statistics().in_flight, timeout=10.0)
        assert master.statistics().cancelled == 1


def test_interrupted_check_leaves_the_master_as_it_was(fake_model: FakeModel) -> None:
    model = fake_model(run="sleep:0.5")
    with Master(model, 2, engine="fake") as master:
        timer = threading.Timer(0.7, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()

        def learn_for_ever() -> None:
            while True:
                master.learn(rows(4))

        with pytest.raises(KeyboardInterrupt):
            learn_for_ever()
        timer.join()
        wait_until(lambda: not master.statistics().in_flight, timeout=10.0)
        assert_answers(master.predict(rows(4)), rows(4))
        assert master.learn(rows(4)).checked


def test_program_of_the_documentation_prints_what_it_says(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "splitting.md").read_text(encoding="utf-8")
    program, rest = text.split("```python\n", 1)[1].split("```\n", 1)
    said = [line.removeprefix("    ") for line in rest.strip("\n").split("\n\n")[0].splitlines()]
    onnx_model(AFFINE).rename(tmp_path / "model.onnx")
    assert run_documented(program, tmp_path).splitlines() == said


# Requests that are joined.


def ask_all(master: Master, requests: list[dict[str, NDArray[Any]]]) -> list[Arrays]:
    return [future.result(timeout=30.0) for future in [master.submit(x) for x in requests]]


def batches(master: Master) -> int:
    """The most rows of one run so far."""
    return max(w.completed - w.runs for w in master.statistics().workers)


def some(count: int) -> Iterator[dict[str, NDArray[np.float32]]]:
    for seed in range(count):
        yield {"x": random((1, 4), seed)}


def test_requests_are_joined_once_two_have_shown_that_it_is_right(onnx_model: OnnxModel) -> None:
    path = onnx_model(onnx("(float[?, 4] x) => (float[?, 4] y) { y = Relu(x) }"))
    with Master(path, 1, max_batch_size=8, max_delay=0.05) as master:
        for x, answer in zip(some(4), ask_all(master, [*some(4)]), strict=True):
            np.testing.assert_array_equal(answer["y"], np.maximum(x["x"], 0))
        wait_until(lambda: master.split.checked, timeout=10.0)
        assert master.split.splits
        for x, answer in zip(some(8), ask_all(master, [*some(8)]), strict=True):
            np.testing.assert_array_equal(answer["y"], np.maximum(x["x"], 0))
        assert batches(master) > 0


@pytest.mark.parametrize("name", ["output of the maximum"])
def test_requests_of_a_model_that_mixes_are_never_joined(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]], name: str
) -> None:
    path = onnx_model(mixing(name, "batch"))
    with Master(path, 1, max_batch_size=8, max_delay=0.01) as master:
        for _ in range(3):
            for x, answer in zip(some(6), ask_all(master, [*some(6)]), strict=True):
                assert_equal(answer, alone(path, x))
        wait_until(lambda: master.split.known == "learned", timeout=10.0)
        assert not master.split.splits
        for x, answer in zip(some(6), ask_all(master, [*some(6)]), strict=True):
            assert_equal(answer, alone(path, x))
        assert batches(master) == 0
    assert len(warnings()) == 1


def test_model_that_cannot_be_joined_says_why_once(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]]
) -> None:
    path = onnx_model(AS_LONG_AS_A_SCALAR)
    with Master(path, 1, max_batch_size=8, verify="never") as master:
        for _ in range(2):
            ask_all(master, [{**x, "n": np.array(3.0, np.float32)} for x in some(3)])
        assert batches(master) == 0
    assert warnings() == [
        "requests are not joined to one run: the shape of output 'y' is not known before the run"
    ]


def test_what_predict_has_shown_is_enough_for_joining(onnx_model: OnnxModel) -> None:
    with Master(onnx_model(AFFINE), 2, max_batch_size=8, max_delay=0.05) as master:
        master.predict(rows(4))
        assert master.split.checked
        requests = [rows(1, first=float(i)) for i in range(16)]
        for x, answer in zip(requests, ask_all(master, requests), strict=True):
            assert_answers(dict(answer), x)
        assert batches(master) > 0
