"""How real models are split: learned from the first request, checked, never guessed.

Each request is compared with one session of ONNX Runtime that has the whole batch.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from mcinfer import InvalidInputError, Limits, Master, RequestTrace, Split
from mcinfer.config import INLINE
from tests.process.models import AFFINE, OnnxModel, rows
from tests.process.scripts import ROOT, run_documented
from tests.process.waiting import wait_until

Arrays = Mapping[str, NDArray[Any]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have learned how the same models split."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("MCINFER_CACHE", str(folder))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings about requests in the log."""
    caplog.set_level(logging.WARNING, "mcinfer.master")
    return lambda: [r.getMessage() for r in caplog.records if "request" in r.getMessage()]


def onnx(body: str) -> str:
    """An ONNX model in text format."""
    return f'<ir_version: 9, opset_import: ["": 17]>\nm {body}'


def alone(path: Path, inputs: Arrays) -> dict[str, NDArray[Any]]:
    """What one session answers."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(inputs)), strict=True))


def assert_equal(got: Arrays, want: Arrays) -> None:
    assert [*got] == [*want]
    for name, array in want.items():
        assert got[name].shape == array.shape, name
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def random(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


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


def silero(count: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    return {"input": random((count, 5), seed), "state": random((2, count, 3), seed + 1)}


def test_split_is_learned_from_the_first_request_and_recorded_for_the_next_master(
    onnx_model: OnnxModel,
) -> None:
    """Also where an output's batch is not its first axis, and where the queue has one place."""
    path = onnx_model(SILERO)
    traces: list[RequestTrace] = []
    limits = Limits(queue=1, when_queue_full="raise")
    with Master(path, 2, limits=limits, trace=traces.append) as master:
        for count in (4, 5, 6):
            assert_equal(master.predict(silero(count, count)), alone(path, silero(count, count)))
        # One request is one trace, also the first, of which pieces were compared with the whole.
        wait_until(lambda: len(traces) == 3)
        # Nothing but their sizes says that both inputs are cut together: made rows of another number agree.
        assert [len(trace.shards) for trace in traces] == [1, 2, 2]
        learned = Split(
            inputs={"input": 0, "state": 1},
            outputs={"output": 0, "stateN": 1},
            known="learned",
            checked=True,
            rows=4,
            difference=master.split.difference,
        )
        assert master.split == learned
        assert is_split(master, silero(6))
    with Master(path, 1) as master:  # also with one worker
        assert master.split.known == "recorded"
        assert (master.split.inputs, master.split.outputs) == (learned.inputs, learned.outputs)
        split = master.learn(silero(8))
        assert (split.checked, split.rows) == (True, 8)
        assert split == master.split
        assert "input   state   axis 1" in str(split)
        with pytest.raises(InvalidInputError, match="missing"):
            master.learn({"input": silero(4)["input"]})


# Rows that depend on each other.

NEEDS_ROWS = onnx("""(float[batch, 4] x) => (float[batch, 4] y)
<int64[1] zero = {0}, int64[1] one = {1}, float none = {0.0}> {
    first = Slice(x, zero, one, one)
    need = ReduceMax <axes = [0], keepdims = 0> (first)
    count = Cast <to = 7> (need)
    last = Sub(count, one)
    row = Gather <axis = 0> (x, last)
    nothing = Mul(row, none)
    y = Add(x, nothing)
}""")
"""Fails with fewer rows than the first element of a row says."""


def needing(need: int, count: int) -> dict[str, NDArray[np.float32]]:
    x = random((count, 4), need)
    x[:, 0] = need
    return {"x": x}


def test_piece_that_fails_where_the_whole_runs_is_answered_by_the_whole(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]]
) -> None:
    path = onnx_model(NEEDS_ROWS)
    with Master(path, 2) as master:
        for need in (1, 3):
            assert_equal(master.predict(needing(need, 4)), {"y": needing(need, 4)["x"]})
            assert master.split.splits == (need == 1)
        answer = asyncio.run(master.predict_async(needing(3, 4)))
        assert_equal(answer, {"y": needing(3, 4)["x"]})
    assert len(warnings()) == 1
    assert "the pieces of a batch fail where the whole runs" in warnings()[0]
    with Master(path, 2) as master:  # the record is gone
        assert master.split.known == "declared"


HITS = onnx("""(float[batch, 6] image) => (float[SIZE] scores) <float ten = {10.0}> {
    hit = Greater(image, ten)
    where = NonZero(hit)
    indices = Transpose <perm = [1, 0]> (where)
    scores = GatherND(image, indices)
}""")
"""As many scores as the data have hits."""


def images(*hits: int) -> dict[str, NDArray[np.float32]]:
    """For each row, so many hits of their own numbers."""
    image = np.zeros((len(hits), 6), np.float32)
    for row, count in enumerate(hits):
        image[row, :count] = 20 + 10 * row + np.arange(count)
    return {"image": image}


@pytest.mark.parametrize("size", ["batch", pytest.param("?", marks=pytest.mark.thorough)])
def test_rows_of_a_detector_go_to_the_caller_that_they_are_of(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]], size: str
) -> None:
    path = onnx_model(HITS.replace("SIZE", size))
    with Master(path, 1, max_batch_size=8, max_delay=0.05) as master:
        for _ in range(3):
            for future in [master.submit(images(1)) for _ in range(8)]:
                assert len(future.result()["scores"]) == 1
        master.predict(images(1, 1, 1, 1))
        for _ in range(5):
            two, none = master.submit(images(2)), master.submit(images(0))
            assert [*two.result()["scores"]] == [20, 21]
            assert len(none.result()["scores"]) == 0
    apart = [text for text in warnings() if "not joined" in text]
    assert len(apart) == 1
    assert "NonZero" in apart[0]


@pytest.mark.parametrize("size", ["hits", pytest.param("batch", marks=pytest.mark.thorough)])
def test_counts_that_were_one_for_each_row_once_are_not_expected_again(
    onnx_model: OnnxModel, size: str
) -> None:
    path = onnx_model(HITS.replace("SIZE", size))
    with Master(path, 2) as master:
        for hits in ([1] * 8, [3, 1, 1, 0, 2, 0, 0, 1], [1] * 4):
            assert_equal(master.predict(images(*hits)), alone(path, images(*hits)))


def test_first_request_of_one_row_shows_how_later_ones_split(onnx_model: OnnxModel) -> None:
    with Master(onnx_model(AFFINE), 2) as master:
        master.predict(rows(1))
        assert master.split.splits
        assert is_split(master, rows(4))


@pytest.mark.parametrize("devices", [1, INLINE])
def test_first_of_many_small_requests_shows_that_they_may_be_joined(
    onnx_model: OnnxModel, devices: Any
) -> None:
    with Master(onnx_model(AFFINE), devices, max_batch_size=8, max_delay=0.01) as master:
        assert_equal(master.submit(rows(1)).result(), {"y": rows(1)["x"] * 2 + 1})
        wait_until(lambda: master.split.settled)
        assert master.split.splits
        before = sum(runs(master))
        futures = [master.submit(rows(1, first)) for first in range(8)]
        for first, future in enumerate(futures):
            assert_equal(future.result(), {"y": rows(1, first)["x"] * 2 + 1})
        assert sum(runs(master)) < before + 8


def test_warm_up_of_one_row_joins_none_of_its_runs(onnx_model: OnnxModel) -> None:
    with Master(onnx_model(AFFINE), 2, max_batch_size=8, max_delay=60.0) as master:
        master.warm_up(rows(1), timeout=50.0)
        assert min(runs(master)) > 0
        assert master.split.splits


# What the caller does with its arrays meanwhile.


def test_arrays_that_change_after_the_first_wait_are_not_read_again(onnx_model: OnnxModel) -> None:
    """Pieces fail, so the request runs as a whole, from the inputs as they came."""

    async def ask(master: Master) -> Arrays:
        inputs = needing(3, 4)
        task = asyncio.create_task(master.predict_async(inputs))
        await asyncio.sleep(0)  # until its first wait
        inputs["x"][:] = -1
        return await task

    with Master(onnx_model(NEEDS_ROWS), 2) as master:
        master.predict(needing(1, 4))
        assert master.split.splits
        assert_equal(asyncio.run(ask(master)), {"y": needing(3, 4)["x"]})
        assert not master.split.splits


# Random models.


def noise(seed: str) -> str:
    return onnx(f"""(float[batch, 4] x) => (float[batch, 4] y) {{
        n = RandomNormalLike <{seed}> (x)
        y = Add(x, n)
    }}""")


def test_random_model_runs_whole_on_any_worker_which_draws_for_itself(
    onnx_model: OnnxModel, warnings: Callable[[], list[str]]
) -> None:
    path, zero = onnx_model(noise("seed = 1.0")), np.zeros((4, 4), np.float32)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    draws = [session.run(None, {"x": zero})[0] for _ in range(20)]
    with Master(path, 2) as master:
        [warning] = warnings()
        assert "RandomNormalLike draws random numbers, and each worker draws for itself" in warning
        answers = [
            future.result()["y"] for future in [master.submit({"x": zero}) for _ in range(8)]
        ]
        master.warm_up({"x": zero}, timeout=10.0)
        assert min(runs(master)) >= 1
    for answer in answers:
        assert any(np.allclose(answer, draw, rtol=1e-5, atol=1e-6) for draw in draws)
    assert warnings() == [warning]


@pytest.mark.thorough
def test_program_of_the_documentation_prints_what_it_says(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "splitting.md").read_text(encoding="utf-8")
    program, rest = text.split("```python\n", 1)[1].split("```\n", 1)
    said = [line.removeprefix("    ") for line in rest.strip("\n").split("\n\n")[0].splitlines()]
    onnx_model(AFFINE).rename(tmp_path / "model.onnx")
    assert run_documented(program, tmp_path).splitlines() == said
