"""Conveniences: forms of arguments, and calls that save a user a loop."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from mcinfer import (
    ClosedError,
    InvalidInputError,
    Master,
    McinferError,
    ModelNotFoundError,
    PredictError,
)
from tests.process.models import AFFINE, FakeModel, OnnxModel, act, assert_answers, rows
from tests.process.waiting import pids, wait_until

TWO_OUTPUTS = """<ir_version: 8, opset_import: ["": 17]>
two (float[batch, 4] x) => (float[batch, 4] minus, float[batch, 4] twice) {
    minus = Neg(x)
    twice = Add(x, x)
}
"""
FAILS = -1.0


def test_what_the_model_is_like_is_known_after_start_and_the_error_says_so(
    fake_model: FakeModel,
) -> None:
    with pytest.raises(ClosedError, match=r"call start\(\)"):
        _ = Master(fake_model(), 1, engine="fake").inputs


@pytest.mark.parametrize("devices", [[0], "cpu"])
def test_devices_may_be_a_name_or_numbers(
    fake_model: FakeModel, devices: str | list[int | str]
) -> None:
    with Master(fake_model(), devices, engine="fake", verify="never") as master:
        assert_answers(master.predict(rows(4)), rows(4))


def test_model_that_is_not_there_is_found_out_before_any_worker_starts(tmp_path: Path) -> None:
    master = Master(tmp_path / "none.onnx", 2)
    with pytest.raises(ModelNotFoundError, match=r"none\.onnx") as caught:
        master.start()
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, McinferError)
    assert repr(master).endswith("failed>")


def test_model_may_be_given_itself(
    onnx_model: OnnxModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a worker that is started again finds it; no file is written."""
    model = onnx_model(AFFINE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Master(model.read_bytes(), 1) as master:
        data = rows(3)
        expected = master.predict(data)
        first = pids(master)
        os.kill(first[0], signal.SIGKILL)
        wait_until(lambda: pids(master) not in ([], first))
        for name, array in master.predict(data).items():
            np.testing.assert_array_equal(array, expected[name])
        assert [*tmp_path.iterdir()] == [model]
        assert "given as bytes" in repr(master)


def test_model_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="model: got int, expected a path, bytes or"):
        Master(5)  # type: ignore[arg-type]


def test_task_may_hold_the_pool(fake_model: FakeModel) -> None:
    async def use() -> Master:
        async with Master(fake_model(), 2, engine="fake", verify="never") as master:
            assert_answers(await master.predict_async(rows(4)), rows(4))
            return master

    assert repr(asyncio.run(use())).endswith("closed>")


# Some outputs.


def test_only_the_outputs_that_are_asked_for_come_in_that_order(onnx_model: OnnxModel) -> None:
    x = np.random.default_rng(0).standard_normal((4, 4), np.float32)
    with Master(onnx.load(onnx_model(TWO_OUTPUTS)), 2) as master:
        for outputs in (["twice"], ["twice", "minus"]):
            for _ in range(2):  # the first one learns
                answer = master.predict([x], outputs=outputs)
                assert [*answer] == outputs
                np.testing.assert_array_equal(answer["twice"], x + x)
        assert [*master.submit([x], outputs=["minus"]).result(10)] == ["minus"]
        assert [*asyncio.run(master.predict_async([x], outputs=["minus"]))] == ["minus"]
        assert [*master.predict([x[:0]], outputs=["twice"])] == ["twice"]
        assert [*master.predict([x])] == ["minus", "twice"]
        wrong: Any
        for wrong in ("twice", ["thrice"], 3):
            with pytest.raises(InvalidInputError, match=r"outputs: got .*minus.*twice"):
                master.predict([x], outputs=wrong)


# Many requests.


def test_answers_come_in_order_and_no_more_requests_are_taken_than_allowed(
    fake_model: FakeModel,
) -> None:
    taken = 0

    def requests() -> Iterator[dict[str, np.ndarray]]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield act(float(number))

    with Master(fake_model(), 2, engine="fake", verify="never") as master:
        for number, answer in enumerate(master.map(requests(), ahead=3)):
            assert_answers(answer, act(float(number)))
            assert taken <= number + 3
    assert taken == 40


def test_failure_ends_the_answers_and_cancels_what_is_in_flight(fake_model: FakeModel) -> None:
    model = fake_model(when={f"{FAILS:g}": "fail", "7": "sleep:30"})
    with Master(model, 2, engine="fake", verify="never") as master:
        answers = master.map([act(1.0), act(FAILS), act(7.0), act(7.0)])
        assert_answers(next(answers), act(1.0))
        with pytest.raises(PredictError):
            next(answers)
        assert [*answers] == []
        wait_until(lambda: master.statistics().cancelled == 2)


# Warm workers.


def test_every_worker_has_run_after_warm_up(onnx_model: OnnxModel) -> None:
    x = np.random.default_rng(0).standard_normal((4, 4), np.float32)
    with Master(onnx_model(TWO_OUTPUTS), 2) as master:
        master.warm_up([x[:1]])
        assert all(worker.runs for worker in master.statistics().workers)
        master.warm_up([x])
        assert master.split.checked
