"""`ParallelPredictUtils`: the four calls, on real workers."""

import json
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from mcinfer import ClosedError, InvalidInputError, ParallelPredictUtils, PredictError
from tests.process.models import FakeModel, act, assert_answers, rows
from tests.process.waiting import all_gone, wait_until

TWO_BY_TWO = {
    "inputs": (["x", "float32", ["batch", 4]], ["t", "float32", []]),
    "outputs": (
        ["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}],
        ["u", "float32", [], {"from": "t", "scale": 10}],
    ),
}


@pytest.fixture(scope="module")
def utils(
    checked_together: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> ParallelPredictUtils:
    """Two devices; a run of rows that begin with 7 takes its time, one of 5 does not end, one of -1 fails."""
    path = tmp_path_factory.mktemp("utils") / "model.json"
    when = {"7": "sleep:0.3", "5": "sleep:60", "-1": "fail"}
    path.write_text(json.dumps({"when": when, **TWO_BY_TWO}), encoding="utf-8")
    return checked_together.enter_context(ParallelPredictUtils(path, 2, engine="fake"))


def test_outputs_come_in_the_models_order_whichever_is_done_first(
    utils: ParallelPredictUtils,
) -> None:
    sets = [[act(float(i))["x"], np.float32(i)] for i in (7, 8)]  # the first set takes longest
    for i, (y, u) in zip((7, 8), utils.run_predict(sets), strict=True):
        assert_answers({"y": y}, act(float(i)))
        assert u == 10.0 * i
    by_name = [{"t": np.float32(1.0), **rows(1)}] * 2
    assert [len(outputs) for outputs in utils.run_predict(by_name)] == [2, 2]


def test_other_than_one_set_per_device_is_refused(utils: ParallelPredictUtils) -> None:
    one = rows(1)["x"]
    bad: list[Any] = [[], [[one]], [[one]] * 3, {"x": one, "z": one}]
    before = utils.statistics().accepted
    for inputs in bad:
        with pytest.raises(InvalidInputError, match="one per device: 2"):
            utils.run_predict(inputs)
    assert utils.statistics().accepted == before


@pytest.mark.parametrize("place", [0, 1])
def test_error_of_one_device_does_not_reach_the_next_call(
    utils: ParallelPredictUtils, place: int
) -> None:
    one, t = rows(1)["x"], np.float32(0.0)
    for bad, error in (
        (act(-1.0)["x"], PredictError),
        (one.astype(np.int64), InvalidInputError),
        (one[:, :2], InvalidInputError),
    ):
        # Answers are awaited in the devices' order.
        other = act(4.0 if place == 1 and error is PredictError else 5.0)["x"]
        sets = [[other, t], [other, t]]
        sets[place] = [bad, t]
        with pytest.raises(error):
            utils.run_predict(sets)
        first, second = utils.run_predict([[rows(2)["x"], t], [rows(3)["x"], t]])
        assert_answers({"y": first[0]}, rows(2))
        assert_answers({"y": second[0]}, rows(3))
    assert [worker.restarts for worker in utils.statistics().workers] == [0, 0]


def test_predict_splits_the_batch_and_answers_as_it_was_asked(utils: ParallelPredictUtils) -> None:
    utils.predict([rows(5)["x"], 2.0], output_axes={"u": None})  # whole, and in two pieces
    # Before it, a run was cancelled that may not have ended yet: nothing is given to its worker meanwhile.
    wait_until(lambda: {worker.state for worker in utils.statistics().workers} == {"ready"})
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


@pytest.mark.parametrize("batch", [1, "batch"])
def test_arrays_of_the_sample_fit_where_sizes_of_one_alone_differ(
    fake_model: FakeModel, batch: int | str
) -> None:
    model = fake_model(
        inputs=(["x", "float32", [batch, 2, 3]], ["t", "float32", [1]]),
        outputs=(
            ["y", "float32", [batch, 2, 3], {"from": "x", "scale": 2}],
            ["u", "float32", [1], {"from": "t", "scale": 10}],
        ),
    )
    sample = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    with ParallelPredictUtils(model, 2, engine="fake") as utils:
        sets: list[Any] = [
            [sample[0], np.float32(1)],
            {"t": np.full((1, 1), 2, np.float32), "x": sample[1]},
        ]
        for row, (y, u) in zip(sample, utils.run_predict(sets), strict=True):
            np.testing.assert_array_equal(y, 2 * row[None])
            assert u.shape == (1,)
        y, _ = utils.predict([sample[1].tolist(), 3])
        np.testing.assert_array_equal(y, 2 * sample[1:])
        for wrong in (sample[0].T, sample[0, 0], np.zeros((3, 2), np.float32), [[1, 2], [3]]):
            with pytest.raises(InvalidInputError, match="'x'"):
                utils.predict([wrong, 3])


def test_free_sizes_of_the_model_are_those_of_the_array_without_its_sizes_of_one(
    fake_model: FakeModel,
) -> None:
    model = fake_model(
        inputs=(["x", "float32", [1, "h", 2, 3]],),
        outputs=(["y", "float32", [1, "h", 2, 3], {"from": "x", "scale": 2}],),
    )
    sample = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    with ParallelPredictUtils(model, 1, engine="fake") as utils:
        for given in (sample, sample[0]):
            (y,) = utils.predict([given])
            np.testing.assert_array_equal(y, 2 * given.reshape(1, -1, 2, 3))


def test_four_calls_answer_each_device_and_are_refused_out_of_order(fake_model: FakeModel) -> None:
    utils = ParallelPredictUtils(fake_model(), 2, device_ids=[1, 0], engine="fake")
    sets = [[rows(2)["x"]], [rows(3, 100.0)["x"]]]
    with pytest.raises(ClosedError, match="build_model"):
        utils.run_predict(sets)
    with pytest.raises(ClosedError, match="build_model"):
        utils.predict(sets[0])
    utils.build_model()
    assert [worker.device for worker in utils.statistics().workers] == ["cpu:1", "cpu:0"]
    with pytest.raises(ClosedError):
        utils.build_model()
    for _ in range(3):
        first, second = utils.run_predict(sets)
        assert_answers({"y": first[0]}, rows(2))
        assert_answers({"y": second[0]}, rows(3, 100.0))
    workers = [worker.pid for worker in utils.statistics().workers if worker.pid is not None]
    utils.finalize()
    utils.finalize()
    assert all_gone(workers)
    with pytest.raises(ClosedError):
        utils.run_predict(sets)
    with pytest.raises(ClosedError):
        utils.build_model()
