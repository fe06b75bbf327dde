"""Workers that were taken over, and strangers at the socket: how little they can do to a master."""

import logging
import os
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from mcinfer import Master, McinferError, PredictError, PredictTimeoutError, Timeouts
from mcinfer.protocol import MOST_MESSAGE_BYTES, VERSION, Hello, encode
from tests.process.hostile_worker import GIANT_BYTES, become
from tests.process.models import FakeModel, assert_answers, rows

PATIENCE = 10.0
SOON = 0.5
MOST_GROWTH_BYTES = 100 << 20
OPEN = (["y", "float32", ["found", 4], {"from": "x", "scale": 2, "add": 1}],)
"""An output whose shape is not known before the run, so that it comes in the worker's own block."""

TO_KNOWN_PLACES = (
    "twice",
    "wrong_shape",
    "wrong_request",
    "garbage",
    "wide",
    "hello_again",
    "flood",
    "flood_preparing",
    "forged_block:masters",
    "forged_block:overlap",
)
TO_OWN_BLOCKS = (
    "forged_block:unknown",
    "forged_block:masters",
    "forged_block:negative_offset",
    "forged_block:huge_offset",
    "forged_block:past_end",
    "forged_block:overflow",
    "forged_block:zero_size",
    "unsealed",
    "file",
    "descriptors",
    "cut_lifeline",
)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize(
    ("kind", "known"),
    [(kind, True) for kind in TO_KNOWN_PLACES] + [(kind, False) for kind in TO_OWN_BLOCKS],
)
def test_request_of_a_hostile_worker_is_answered_by_an_honest_one(
    fake_model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    known: bool,
) -> None:
    become(tmp_path, monkeypatch, kind)
    before = resident()
    with Master(fake_model() if known else fake_model(outputs=OPEN), 1, engine="fake") as master:
        for count in (4, 3):
            assert_answers(master.predict(rows(count), timeout=PATIENCE), rows(count))
    assert resident() < before + MOST_GROWTH_BYTES
    texts = [record.getMessage() for record in caplog.records]
    broken = [t for t in texts if "breaks the protocol" in t and t.endswith("it is killed")]
    assert len(broken) <= 1, "each message of a worker that is to be killed was logged"
    assert (kind == "flood_preparing") == (not broken)


@pytest.mark.parametrize("kind", ["late", "silent", "huge"])
def test_request_that_a_worker_does_not_answer_is_timed_out_and_the_pool_serves(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    become(tmp_path, monkeypatch, kind)
    before = resident()
    timeouts = Timeouts(cancel_grace=0.2)
    with Master(fake_model(), 1, engine="fake", timeouts=timeouts) as master:
        start = time.monotonic()
        with pytest.raises(PredictTimeoutError):
            master.predict(rows(4), timeout=SOON)
        assert time.monotonic() - start < SOON + 2.0
        assert_answers(master.predict(rows(3), timeout=PATIENCE), rows(3))
    assert resident() < before + MOST_GROWTH_BYTES


def test_result_of_a_terabyte_fails_its_request_and_takes_no_memory(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(tmp_path, monkeypatch, "giant_block")
    before = resident()
    with Master(fake_model(outputs=OPEN), 1, engine="fake") as master:
        with pytest.raises(PredictError, match=rf"'y' has {GIANT_BYTES} bytes"):
            master.predict(rows(4), timeout=PATIENCE)
        assert resident() < before + MOST_GROWTH_BYTES


def test_block_that_changes_while_it_is_read_is_a_result_that_changes_no_more(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(tmp_path, monkeypatch, "changing_block")
    with Master(fake_model(outputs=OPEN), 1, engine="fake") as master:
        result = master.predict(rows(4), timeout=PATIENCE)["y"]
        assert result.shape == (2 << 20, 4)  # the worker's word, as its values are
        first = result.tobytes()
        assert np.array_equal(np.frombuffer(first, np.uint8), result.view(np.uint8).ravel())


def test_worker_that_spoils_its_permits_costs_no_request(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(tmp_path, monkeypatch, "cut_permits")
    with Master(fake_model(), 1, engine="fake") as master:
        for count in (4, 3):
            assert_answers(master.predict(rows(count), timeout=PATIENCE), rows(count))


def test_pool_of_hostile_workers_alone_fails_requests_and_closes(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(tmp_path, monkeypatch, "garbage", only_first=False)
    with Master(fake_model(), 2, engine="fake") as master:
        start = time.monotonic()
        with pytest.raises(McinferError):
            master.predict(rows(4), timeout=PATIENCE)
        assert time.monotonic() - start < PATIENCE


def test_stranger_without_the_token_is_ignored_whatever_it_sends(
    fake_model: FakeModel, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    before = resident()
    with Master(fake_model(), 2, engine="fake") as master:
        (path,) = [p for p in runtime_dir.glob("mcinfer-*/*") if p.is_socket()]
        pid = master.statistics().workers[0].pid
        assert pid is not None
        records = len(caplog.records)
        for message in (
            os.urandom(1000),
            encode(Hello(version=VERSION, pid=pid, token="0" * 32)),
            bytes(MOST_MESSAGE_BYTES),
            bytes(MOST_MESSAGE_BYTES + 1),
        ):
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.connect(f"ipc://{path}")
                stranger.setsockopt(zmq.LINGER, 1000)
                stranger.send(message)
            assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(f"ipc://{path}")
            stranger.setsockopt(zmq.LINGER, 0)
            for _ in range(20_000):
                stranger.send(b"flood")
            assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))
        assert [worker.restarts for worker in master.statistics().workers] == [0, 0]
        assert len(caplog.records) == records
    assert resident() < before + MOST_GROWTH_BYTES
