"""Pools over each transport."""

import os
import signal

import numpy as np
import pytest

from mcinfer import InvalidInputError, Master, RestartPolicy
from mcinfer.config import TRANSPORTS, TransportKind
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
    with Master(onnx_model(SAME_TEXT), 1, verify="never", transport=transport) as master:
        for size in (10, 3_000_000, 10):
            texts = np.array([["é" * (size // 8)] * 4], dtype=object)
            (answer,) = master.predict({"x": texts}, timeout=PATIENCE).values()
            assert (answer == texts).all()


def test_unknown_transport_is_refused(fake_model: FakeModel) -> None:
    with pytest.raises(InvalidInputError, match=r"^transport: got 'tcp'"):
        Master(fake_model(), 1, engine="fake", transport="tcp")  # type: ignore[arg-type]
