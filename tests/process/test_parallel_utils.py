"""`ParallelPredictUtils`: the four calls, on real workers."""

from typing import Any

import numpy as np
import pytest

from mcinfer import (
    ClosedError,
    InvalidInputError,
    ParallelPredictUtils,
    PredictError,
)
from tests.process.models import AFFINE, FakeModel, OnnxModel, act, assert_answers, rows
from tests.process.waiting import all_gone

TWO_BY_TWO = {
    "inputs": (["x", "float32", ["batch", 4]], ["t", "float32", []]),
    "outputs": (
        ["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}],
        ["u", "float32", [], {"from": "t", "scale": 10}],
    ),
}


def test_four_calls_answer_each_device_in_order(onnx_model: OnnxModel) -> None:
    utils = ParallelPredictUtils(onnx_model(AFFINE), 2)
    utils.build_model()
    for _ in range(3):
        first, second = utils.run_predict([[rows(2)["x"]], [rows(3, 100.0)["x"]]])
        assert_answers({"y": first[0]}, rows(2))
        assert_answers({"y": second[0]}, rows(3, 100.0))
    workers = [worker.pid for worker in utils.statistics().workers if worker.pid is not None]
    utils.finalize()
    utils.finalize()
    assert all_gone(workers)
    with pytest.raises(ClosedError):
        utils.run_predict([[rows(2)["x"]], [rows(2)["x"]]])


def test_outputs_come_in_the_models_order_whichever_is_done_first(fake_model: FakeModel) -> None:
    model = fake_model(when={"7": "sleep:0.3"}, **TWO_BY_TWO)
    with ParallelPredictUtils(model, 3, engine="fake") as utils:
        # The first set takes longest.
        sets = [[act(float(i))["x"], np.float32(i)] for i in (7, 8, 9)]
        for i, (y, u) in zip((7, 8, 9), utils.run_predict(sets), strict=True):
            assert_answers({"y": y}, act(float(i)))
            assert u == 10.0 * i
        by_name = [{"t": np.float32(1.0), **rows(1)}] * 3
        assert [len(outputs) for outputs in utils.run_predict(by_name)] == [2, 2, 2]


def test_other_than_one_set_per_device_is_refused(fake_model: FakeModel) -> None:
    one = rows(1)["x"]
    bad: list[Any] = [[], [[one]], [[one]] * 3, {"x": one, "z": one}]
    with ParallelPredictUtils(fake_model(), 2, device_ids=[1, 0], engine="fake") as utils:
        assert [worker.device for worker in utils.statistics().workers] == ["cpu:1", "cpu:0"]
        for inputs in bad:
            with pytest.raises(InvalidInputError, match="one per device: 2"):
                utils.run_predict(inputs)
        assert utils.statistics().accepted == 0


@pytest.mark.parametrize("place", [0, 1])
def test_error_of_one_device_does_not_reach_the_next_call(
    fake_model: FakeModel, place: int
) -> None:
    model = fake_model(when={"-1": "fail", "5": "sleep:60"})
    with ParallelPredictUtils(model, 2, engine="fake") as utils:
        wrong = rows(1)["x"]
        for bad, error in (
            (act(-1.0)["x"], PredictError),
            (wrong.astype(np.int64), InvalidInputError),
            (wrong[:, :2], InvalidInputError),
        ):
            # Answers are awaited in the devices' order.
            other = 4.0 if place == 1 and error is PredictError else 5.0
            sets = [[act(other)["x"]], [act(other)["x"]]]
            sets[place] = [bad]
            with pytest.raises(error):
                utils.run_predict(sets)
            first, second = utils.run_predict([[rows(2)["x"]], [rows(3)["x"]]])
            assert_answers({"y": first[0]}, rows(2))
            assert_answers({"y": second[0]}, rows(3))
        assert [worker.restarts for worker in utils.statistics().workers] == [0, 0]


def test_predict_splits_the_batch_and_answers_as_it_was_asked(fake_model: FakeModel) -> None:
    with ParallelPredictUtils(fake_model(**TWO_BY_TWO), 2, engine="fake") as utils:
        first = utils.predict(
            [rows(5)["x"], 2.0], output_axes={"u": None}
        )  # whole, and in two pieces
        assert_answers({"y": first[0]}, rows(5))
        assert sum(worker.completed for worker in utils.statistics().workers) == 3
        before = [worker.completed for worker in utils.statistics().workers]
        listed = utils.predict([rows(5)["x"], 2.0], output_axes={"u": None})
        assert isinstance(listed, list)
        assert_answers({"y": listed[0]}, rows(5))
        named = utils.predict({"t": 2.0, **rows(5)}, output_axes={"u": None})
        assert isinstance(named, dict)
        assert [*named] == ["y", "u"]
        np.testing.assert_array_equal(named["y"], listed[0])
        after = [worker.completed for worker in utils.statistics().workers]
        assert [b - a for a, b in zip(before, after, strict=True)] == [2, 2]


def test_calls_out_of_order_are_refused(fake_model: FakeModel) -> None:
    utils = ParallelPredictUtils(fake_model(), 1, engine="fake")
    with pytest.raises(ClosedError, match="build_model"):
        utils.run_predict([[rows(1)["x"]]])
    with pytest.raises(ClosedError, match="build_model"):
        utils.predict([rows(1)["x"]])
    utils.build_model()
    with pytest.raises(ClosedError):
        utils.build_model()
    assert_answers({"y": utils.run_predict([[rows(1)["x"]]])[0][0]}, rows(1))
    utils.finalize()
    with pytest.raises(ClosedError):
        utils.build_model()
