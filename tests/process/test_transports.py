"""Pools over each transport: the life of workers, what they send, and who may not be served."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from mcinfer import InvalidInputError, Master, RestartPolicy
from mcinfer.config import TRANSPORTS, TransportKind
from tests.process.hostile_worker import become
from tests.process.models import FakeModel, OnnxModel, assert_answers, fake_master, rows
from tests.process.waiting import pids, wait_until

PATIENCE = 40.0
SAME_TEXT = """
<ir_version: 8, opset_import: ["": 17]>
texts (string[batch, 4] x) => (string[batch, 4] y) { y = Identity(x) }
"""

both = pytest.mark.parametrize("transport", TRANSPORTS)


@both
def test_pool_starts_answers_survives_a_death_and_closes(
    fake_model: FakeModel, transport: TransportKind
) -> None:
    policy = RestartPolicy(backoff=0.0)
    with fake_master(fake_model(), 2, restart=policy, transport=transport) as master:
        assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))
        first = pids(master)[0]
        os.kill(first, signal.SIGKILL)
        assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))
        wait_until(lambda: first not in pids(master))
        master.wait_ready(PATIENCE)
        futures = [master.submit(rows(2), timeout=PATIENCE) for _ in range(50)]
        for future in futures:
            assert_answers(future.result(), rows(2))
        master.restart_workers(PATIENCE)
        assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))


@both
def test_strings_of_any_size_come_back(onnx_model: OnnxModel, transport: TransportKind) -> None:
    """They travel in messages, there and back."""
    with Master(onnx_model(SAME_TEXT), 1, verify="never", transport=transport) as master:
        for size in (10, 3_000_000, 10):
            texts = np.array([["é" * (size // 8)] * 4], dtype=object)
            (answer,) = master.predict({"x": texts}, timeout=PATIENCE).values()
            assert (answer == texts).all()


@both
def test_worker_that_breaks_the_protocol_is_replaced_and_its_request_answered(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: TransportKind
) -> None:
    """Also one that says, in the first place, what it may without an end."""
    become(tmp_path, monkeypatch, "flood_preparing", "flood", "big_error")
    with fake_master(fake_model(), 3, transport=transport) as master:
        workers = pids(master)
        for count in (6, 3):
            assert_answers(master.predict(rows(count), timeout=PATIENCE), rows(count))
        wait_until(lambda: sum(w.restarts for w in master.statistics().workers) == 2)
        master.wait_ready(PATIENCE)
        assert len({*workers} & {*pids(master)}) == 1


@pytest.mark.parametrize("value", ["tcp", None, ["zeromq"]])
def test_transport_that_there_is_none_of_is_refused(fake_model: FakeModel, value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"^transport: got .* 'zeromq' or 'socketpair'$"):
        Master(fake_model(), 1, engine="fake", transport=value)  # type: ignore[arg-type]
