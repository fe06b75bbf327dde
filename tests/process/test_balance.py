"""Rows by the measured speed of workers, with real processes."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from mcinfer import InvalidInputError, Master
from mcinfer.statistics import RequestTrace
from tests.process.models import FakeModel, assert_answers, fake_master, rows
from tests.process.waiting import wait_until

ROWS = 32
ROW_SECONDS = 0.002


class Slowed:
    """A model whose rows take as long on each worker as is said, and what became of its requests."""

    def __init__(self, fake_model: FakeModel, folder: Path, *seconds: float) -> None:
        self._place = folder / "seconds"
        for worker, each in enumerate(seconds):
            self.slow_down(worker, each)
        self.path = fake_model(row_seconds=str(self._place))
        self.traces: list[RequestTrace] = []

    def slow_down(self, worker: int, seconds: float) -> None:
        """Each row takes so many seconds there from now on; in one step, as runs read it."""
        new = self._place.with_name("new")
        new.write_text(str(seconds), encoding="utf-8")
        new.rename(f"{self._place}{worker}")

    def predict(self, master: Master, count: int, shards: int | None = None) -> list[RequestTrace]:
        """What became of so many requests, one after another."""
        before = len(self.traces)
        for i in range(count):
            inputs = rows(ROWS, float(i))
            assert_answers(master.predict(inputs, shards=shards), inputs)
        wait_until(lambda: len(self.traces) == before + count)
        return self.traces[before:]


def over_ideal(trace: RequestTrace) -> float:
    """How many times as long as with exact shares of its rows, by the speeds that its own runs have shown."""
    ideal = trace.rows / sum(run.rows / run.run_seconds for run in trace.shards)
    return max(run.run_seconds for run in trace.shards) / ideal


def rows_by_worker(trace: RequestTrace) -> dict[int, int]:
    return {run.worker: run.rows for run in trace.shards}


def test_worker_slowed_to_a_third_gets_fewer_rows_and_batches_take_what_they_need(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    slowed = Slowed(fake_model, tmp_path, ROW_SECONDS, ROW_SECONDS)
    with fake_master(slowed.path, 2, balance="measured", trace=slowed.traces.append) as master:
        assert [w.rows_per_second for w in master.statistics().workers] == [None, None]
        slowed.predict(master, 2)
        slowed.slow_down(1, 3 * ROW_SECONDS)
        slowed.predict(master, 5)
        even = slowed.predict(master, 1, shards=2)
        measured = slowed.predict(master, 5)
        # Other work on the machine may disturb some of them: then the next ones count.
        while median(map(over_ideal, measured[-5:])) > 1.15:
            assert len(measured) < 100
            measured += slowed.predict(master, 1)
        fast, slow = (w.rows_per_second for w in master.statistics().workers)
    assert all(rows_by_worker(trace) == {0: 16, 1: 16} for trace in even)
    assert median(map(over_ideal, even)) > 1.3
    assert fast is not None
    assert slow is not None
    assert 1.5 < fast / slow < 6


def test_request_that_does_not_fit_leaves_what_measures_a_worker_to_the_next(
    fake_model: FakeModel,
) -> None:
    with fake_master(fake_model(), 2, balance="measured") as master:
        for i in range(3):
            master.predict(rows(ROWS, float(i)))
        balance = master._balance
        assert balance is not None
        wait_until(lambda: balance.shares is not None)
        assert balance.shares is not None
        balance.give_back(replace(balance.shares, probe=0))
        with pytest.raises(InvalidInputError):
            master.predict({"x": np.zeros((ROWS, 1, 1), np.float32)})
        shares = balance.take_shares()
        assert shares is not None
        assert shares.probe == 0


def test_unknown_balance_is_refused(fake_model: FakeModel) -> None:
    with pytest.raises(InvalidInputError, match=r"^balance: got 'fair', expected 'even' or 'mea"):
        Master(fake_model(), 1, engine="fake", balance="fair")  # type: ignore[arg-type]
