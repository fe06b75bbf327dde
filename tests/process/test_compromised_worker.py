"""Workers that were taken over, and what they can do to a master."""

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from mcinfer import (
    Master,
    PredictError,
    PredictTimeoutError,
    RestartPolicy,
    Timeouts,
)
from tests.process.hostile_worker import GIANT_BYTES, become
from tests.process.models import FakeModel, assert_answers, fake_master, rows
from tests.process.waiting import wait_until

PATIENCE = 40.0
SOON = 0.5
MAX_GROWTH_BYTES = 100 << 20
OPEN = (["y", "float32", ["found", 4], {"from": "x", "scale": 2, "add": 1}],)
"""An output of unknown shape, so that it comes in the worker's own block."""

BREAK_THE_PROTOCOL = (
    *("flood", "big_error", "sparse_lie", "unsealed", "descriptors", "forged_block:masters"),
)
NOT_KILLED = ("flood_preparing", "talking", "many_connections")


@pytest.fixture
def _memory_stays() -> Iterator[None]:
    """Fail a test if the peak memory of this process grows by much."""
    gc.collect()
    before, most, done = resident(), [0], threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], resident())

    watch = threading.Thread(target=look)
    watch.start()
    yield
    done.set()
    watch.join()
    assert most[0] < before + MAX_GROWTH_BYTES


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def killed(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in texts(caplog) if text.endswith("it is ended")]


def ask_until_restarted(master: Master, restarts: int) -> None:
    """Send requests until a hostile worker had a part of one, and another worker has its place."""
    until = time.monotonic() + PATIENCE
    while sum(w.restarts for w in master.statistics().workers) < restarts:
        assert_answers(master.predict(rows(4), timeout=PATIENCE, shards=2), rows(4))
        assert time.monotonic() < until


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("_memory_stays")
def test_requests_of_hostile_workers_are_answered_by_an_honest_one(
    fake_model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    become(tmp_path, monkeypatch, "", *BREAK_THE_PROTOCOL)
    policy = RestartPolicy(budget=100, backoff=0.0)
    model = fake_model(outputs=OPEN)
    with fake_master(model, 2, restart=policy, output_axes={"y": 0}) as master:
        for number, kind in enumerate(BREAK_THE_PROTOCOL, 1):
            ask_until_restarted(master, number)
            master.wait_ready(PATIENCE)
            wait_until(lambda: len(killed(caplog)) >= number)  # noqa: B023 at once
            broken = killed(caplog)
            assert len(broken) == number, kind  # one, whatever else it sent
            assert "breaks the protocol" in broken[-1], kind
    assert max(map(len, texts(caplog))) < 5000


def test_worker_that_takes_no_block_is_replaced_and_its_request_answered(
    fake_model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    become(tmp_path, monkeypatch, "no_blocks")
    with fake_master(fake_model(), 1) as master:
        assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))
        assert master.statistics().workers[0].restarts == 1
    assert [text.count("does not take a block") for text in killed(caplog)] == [1]


@pytest.mark.usefixtures("_memory_stays")
def test_part_of_another_shape_is_answered_by_a_whole_run_and_nothing_is_joined_after_it(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply is allowed: ONNX Runtime only warns of outputs that are not as declared."""
    become(tmp_path, monkeypatch, "", "open_rank")
    with fake_master(fake_model(outputs=OPEN), 2, output_axes={"y": 0}) as master:
        for _ in range(10):
            master.predict(rows(4), timeout=PATIENCE, shards=2)
        assert not master.split.splits
        assert "output 'y' joins along axis 0" in master.split.reason
        assert "worker" in master.split.reason


@pytest.mark.usefixtures("_memory_stays")
def test_what_does_no_harm_costs_no_worker(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(tmp_path, monkeypatch, *NOT_KILLED)
    with fake_master(fake_model(), len(NOT_KILLED)) as master:
        for count in (6, 3):
            assert_answers(master.predict(rows(count), timeout=PATIENCE), rows(count))
        assert [worker.restarts for worker in master.statistics().workers] == [0, 0, 0]


def test_slab_that_was_not_asked_for_ends_its_worker_and_is_given_to_none(
    fake_model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    become(tmp_path, monkeypatch, "unasked_slab")
    with fake_master(fake_model(), 1) as master:
        assert_answers(master.predict(rows(2), timeout=PATIENCE), rows(2))
    [text] = killed(caplog)
    assert "breaks the protocol: slab (-5, 4096) was not asked for" in text


@pytest.mark.usefixtures("_memory_stays")
def test_request_that_a_worker_does_not_answer_is_timed_out_and_the_pool_serves(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(tmp_path, monkeypatch, "huge", "deaf")
    timeouts = Timeouts(cancel_grace=0.2)
    with fake_master(fake_model(), 1, timeouts=timeouts) as master:
        for kind in (1, 2):
            with pytest.raises(PredictTimeoutError):
                master.predict(rows(4), timeout=SOON)
            wait_until(lambda: master.statistics().workers[0].restarts == kind)  # noqa: B023 at once
            master.wait_ready(PATIENCE)
        assert_answers(master.predict(rows(3), timeout=PATIENCE), rows(3))


@pytest.mark.usefixtures("_memory_stays")
def test_result_of_a_terabyte_fails_its_request_and_takes_no_memory(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(tmp_path, monkeypatch, "giant_block")
    with (
        fake_master(fake_model(outputs=OPEN), 1) as master,
        pytest.raises(PredictError, match=rf"'y' has {GIANT_BYTES} bytes"),
    ):
        master.predict(rows(4), timeout=PATIENCE)


def test_block_that_changes_while_it_is_read_is_a_result_that_changes_no_more(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(tmp_path, monkeypatch, "changing_block")
    with fake_master(fake_model(outputs=OPEN), 1) as master:
        result = master.predict(rows(4), timeout=PATIENCE)["y"]
        # The shape that the worker gave; or its block was refused, and another worker has answered.
        assert result.shape in ((2 << 20, 4), (4, 4))
        first = result.tobytes()
        assert np.array_equal(np.frombuffer(first, np.uint8), result.view(np.uint8).ravel())


def test_processes_that_a_worker_left_behind_are_not_listened_to(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(tmp_path, monkeypatch, "", "heir")
    with fake_master(fake_model(), 2) as master:
        ask_until_restarted(master, 1)
        master.wait_ready(PATIENCE)
        assert_answers(master.predict(rows(4), timeout=PATIENCE, shards=2), rows(4))
