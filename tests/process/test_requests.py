"""Requests: those that do not fit are refused before anything is sent, others are answered."""

from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from mcinfer import InvalidInputError, Master
from mcinfer.config import INLINE
from tests.process.models import (
    FakeModel,
    OnnxModel,
    SharedMaster,
    act,
    assert_answers,
    fake_master,
    rows,
)

TOTAL = """
<ir_version: 8, opset_import: ["": 17]>
total (float[batch, 4] x) => (float[batch, 4] y, float total) {
    y = Identity(x)
    total = ReduceSum <keepdims = 0> (x)
}
"""
TWO_INPUTS = (["x", "float32", ["batch", 4]], ["t", "float32", []])
TWO_OUTPUTS = (
    ["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}],
    ["u", "float32", [], {"from": "t", "scale": 10}],
)

X = rows(3)["x"]


@pytest.fixture(scope="module", params=[2, INLINE])
def master(request: pytest.FixtureRequest, shared_master: SharedMaster) -> Master:
    return shared_master(request.param)


def test_request_that_does_not_fit_is_refused_and_nothing_is_sent(master: Master) -> None:
    bad: dict[str, Any] = {
        r"unknown \['z'\], missing \['x'\]": {"z": X},
        "'x' has dtype float64, expected float32": {"x": X.astype(np.float64)},
        "'x' has size 3 in dimension 1, expected 4": {"x": X[:, :3]},
        "got 2, expected 1": [X, X],
        "got ndarray, expected a mapping": X,
    }
    before = master.statistics()
    for words, inputs in bad.items():
        for ask in (master.predict, master.submit):
            with pytest.raises(InvalidInputError, match=words):
                ask(inputs)
    for timeout in (-1.0, float("nan"), True):
        with pytest.raises(InvalidInputError, match="timeout"):
            master.predict([X], timeout=timeout)
    wrong: Any
    for wrong in (1.0, "1", True, None):
        for ask in (master.predict, master.submit):
            with pytest.raises(InvalidInputError, match=r"^priority: got"):
                ask([X], priority=wrong)
    for wrong in (0, -1, 1.5, "1", True):
        with pytest.raises(InvalidInputError, match=r"^shards: got"):
            master.predict([X], shards=wrong)
    with pytest.raises(InvalidInputError, match="ahead: got 0"):
        master.map([], ahead=0)
    after = master.statistics()
    assert after.accepted == before.accepted
    assert after.memory_used_bytes == before.memory_used_bytes
    assert_answers(master.predict([X]), {"x": X})


def runs(master: Master) -> int:
    return sum(worker.completed for worker in master.statistics().workers)


def test_batch_of_any_size_is_answered_row_by_row(master: Master) -> None:
    """Also batches that do not divide, are smaller than the pool, or are cut in a given number of pieces."""
    two = 1 if master._plan.inline else 2
    for count, shards, pieces in (
        *((1, None, 1), (2, None, two), (7, None, two), (64, None, two)),
        *((6, 1, 1), (6, 5, 5), (6, 100, 6)),
    ):
        before = runs(master)
        assert_answers(master.predict(rows(count), shards=shards), rows(count))
        assert runs(master) - before == pieces


def test_scalar_goes_to_every_worker(fake_model: FakeModel) -> None:
    with fake_master(
        fake_model(inputs=TWO_INPUTS, outputs=TWO_OUTPUTS), 2, output_axes={"u": None}
    ) as master:
        for scalar in (np.float32(3.0), np.array(3.0, np.float32), 3.0, 3):
            outputs = master.predict({**rows(5), "t": scalar})
            assert [*outputs] == ["y", "u"]
            assert_answers({"y": outputs["y"]}, rows(5))
            assert outputs["u"].shape == ()
            assert outputs["u"] == 30.0
        assert [worker.completed for worker in master.statistics().workers] == [4, 4]


def test_output_that_differs_between_workers_is_named_and_requests_run_whole_then(
    onnx_model: OnnxModel, caplog: pytest.LogCaptureFixture
) -> None:
    same = {"total": None}
    with Master(onnx_model(TOTAL), 2, verify="never", output_axes=same) as master:
        assert master.predict(act(1.0, 4))["total"] == 8.0  # that of each half, as was said
        for _ in range(2):
            assert master.predict(rows(4))["total"] == rows(4)["x"].sum()
        assert "'total' is to be the same from every worker: worker" in caplog.text
        assert not master.split.splits
        assert "'total'" in master.split.reason


@pytest.mark.parametrize("devices", [2, INLINE])
def test_strings_go_in_and_come_out(fake_model: FakeModel, devices: Any) -> None:
    model = fake_model(
        inputs=(["words", "string", ["batch", 2]],),
        outputs=(["same", "string", ["batch", 2], {"from": "words"}],),
    )
    words = np.array([["", "café"], ["雪", "\N{GRINNING FACE}"], ["a\0b", "x" * 1000]])
    long = np.array([["é" * 375_000] * 2], dtype=object)
    with fake_master(model, devices) as master:
        for given in (words, words.astype(object), words.tolist()):
            same = master.predict({"words": given})["same"]
            assert same.dtype == object
            assert same.tolist() == words.tolist()
        assert (master.predict({"words": long}, timeout=40.0)["same"] == long).all()
        with pytest.raises(InvalidInputError, match=r"'words'.*float64.*string"):
            master.predict({"words": np.zeros((2, 2))})


def test_callbacks_are_called_in_the_order_of_the_answers(fake_model: FakeModel) -> None:
    with fake_master(fake_model(), 1) as master:
        for _ in range(30):
            called: SimpleQueue[int] = SimpleQueue()
            for i in range(3):
                done = partial(lambda i, put, _: put(i), i, called.put)
                master.submit(rows(1)).add_done_callback(done)
            assert [called.get(timeout=20.0) for _ in range(3)] == [0, 1, 2]
