"""Conveniences: forms of arguments, and calls that save a user a loop."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcinfer import (
    InvalidInputError,
    Limits,
    Master,
    McinferError,
    ModelNotFoundError,
    PredictError,
)
from mcinfer.config import INLINE
from tests.process.models import FakeModel, SharedMaster, act, assert_answers, rows
from tests.process.waiting import wait_until

FAILS = -1.0


def test_model_that_is_not_there_is_found_out_before_any_worker_starts(tmp_path: Path) -> None:
    master = Master(tmp_path / "none.onnx", 2)
    with pytest.raises(ModelNotFoundError, match=r"none\.onnx") as caught:
        master.start()
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, McinferError)
    assert repr(master).endswith("failed>")
    with pytest.raises(InvalidInputError, match="model: got int, expected a path, bytes or"):
        Master(5)  # type: ignore[arg-type]


# Some outputs.


@pytest.mark.parametrize("devices", [2, INLINE])
def test_only_the_outputs_that_are_asked_for_come_in_that_order(
    fake_model: FakeModel, devices: Any
) -> None:
    x = rows(4)["x"]
    minus = ["minus", "float32", ["batch", 4], {"from": "x", "scale": -1}]
    twice = ["twice", "float32", ["batch", 4], {"from": "x", "scale": 2}]
    with Master(fake_model(outputs=(minus, twice)), devices, engine="fake") as master:
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


@pytest.fixture(scope="module", params=[[1, 0], INLINE])
def mapping(request: pytest.FixtureRequest, shared_master: SharedMaster) -> Master:
    return shared_master(request.param, acts={"when": {f"{FAILS:g}": "fail", "70": "sleep:30"}})


def test_answers_come_in_order_and_no_more_requests_are_taken_than_allowed(mapping: Master) -> None:
    taken = 0

    def requests() -> Iterator[dict[str, np.ndarray]]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield act(float(number))

    for number, answer in enumerate(mapping.map(requests(), ahead=3)):
        assert_answers(answer, act(float(number)))
        assert taken <= number + 3
    assert taken == 40


def test_failure_ends_the_answers_and_cancels_what_is_in_flight(mapping: Master) -> None:
    answers = mapping.map([act(1.0), act(FAILS), act(70.0), act(70.0)])
    assert_answers(next(answers), act(1.0))
    with pytest.raises(PredictError):
        next(answers)
    assert [*answers] == []
    wait_until(lambda: mapping.statistics().cancelled == 2)


# Warm workers.


@pytest.mark.parametrize("devices", [2, INLINE])
def test_every_worker_has_run_after_warm_up(fake_model: FakeModel, devices: Any) -> None:
    limits = Limits(queue=1, when_queue_full="raise")  # one place is enough to learn how to split
    with Master(fake_model(), devices, engine="fake", limits=limits) as master:
        master.warm_up(rows(1))
        assert all(worker.runs for worker in master.statistics().workers)
        master.warm_up(rows(4))
        assert master.split.checked or devices == INLINE  # which has no need to cut a batch
