"""Workers that break the protocol: what the fault matrix has no row for."""

from pathlib import Path

import pytest

from mcinfer import PredictError
from tests.process.hostile_worker import GIANT_BYTES, become
from tests.process.models import FakeModel, assert_answers, fake_master, rows

PATIENCE = 40.0
OPEN = (["y", "float32", ["found", 4], {"from": "x", "scale": 2, "add": 1}],)
"""An output of unknown shape, so that it comes in the worker's own block."""


def killed(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if text.endswith("it is ended")]


def test_worker_that_takes_no_block_is_replaced_and_its_request_answered(
    fake_model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    become(tmp_path, monkeypatch, "no blocks")
    with fake_master(fake_model(), 1) as master:
        assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))
        assert master.statistics().workers[0].restarts == 1
    assert [text.count("does not take a block") for text in killed(caplog)] == [1]


def test_slab_that_was_not_asked_for_ends_its_worker_and_is_given_to_none(
    fake_model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    become(tmp_path, monkeypatch, "unasked slab")
    with fake_master(fake_model(), 1) as master:
        assert_answers(master.predict(rows(2), timeout=PATIENCE), rows(2))
    [text] = killed(caplog)
    assert "breaks the protocol: slab (-5, 4096) was not asked for" in text


def test_result_of_a_terabyte_fails_its_request_and_takes_no_memory(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(tmp_path, monkeypatch, "giant block")
    with (
        fake_master(fake_model(outputs=OPEN), 1) as master,
        pytest.raises(PredictError, match=rf"'y' has {GIANT_BYTES} bytes"),
    ):
        master.predict(rows(4), timeout=PATIENCE)
