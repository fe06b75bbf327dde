"""Tests of mcinfer/scheduler/balance.py: how fast workers are, and what they get. Time is a number."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcinfer.scheduler.balance import AVERAGED, PROBE_INTERVAL, SUDDEN, TOLERANCE, Balance
from mcinfer.sharding import Shares

SPEEDS = st.lists(st.floats(1.0, 100.0), min_size=2, max_size=6)


def shares_of(balance: Balance) -> Shares:
    assert balance.shares is not None
    return balance.shares


def probe_of(balance: Balance) -> Shares:
    """The shares of a request that gets a row to measure a worker."""
    shares = balance.take_shares()
    assert shares is not None
    assert shares.probe is not None
    return shares


class Workers:
    """Workers that take as long as their speeds say, and a batch of so many rows again and again.

    Attributes:
        speeds: By worker, its rows a second.
        now: The time.
        seen: The different shares so far.
    """

    def __init__(self, speeds: Sequence[float], rows: int = 1000) -> None:
        self.speeds = [*speeds]
        self.rows = rows
        self.now = 100.0
        self.balance = Balance(len(speeds))
        self.balance.serve(range(len(speeds)))
        self.seen: list[Shares | None] = [None]

    def batch(self, noise: Mapping[int, float] | None = None, size: float = 1.0) -> dict[int, int]:
        """Answer one batch; `noise` are factors of run times by worker, `size` is that of a row.

        Returns:
            The rows of each worker.
        """
        shares = self.balance.take_shares()
        if shares is None:
            given = dict.fromkeys(range(len(self.speeds)), self.rows)
        else:
            rows, workers = shares.cut(self.rows)
            given = dict(zip(workers, rows, strict=True))
        seconds = {
            worker: rows * size / self.speeds[worker] * (noise or {}).get(worker, 1.0)
            for worker, rows in given.items()
        }
        self.now += max(seconds.values())
        self.balance.learn({w: (given[w], seconds[w]) for w in given}, self.now)
        if self.balance.shares != self.seen[-1]:
            self.seen.append(self.balance.shares)
        return given

    @property
    def longer(self) -> float:
        """How many times the ideal a batch is expected to take, but for whole rows."""
        total = sum(self.speeds)
        weights = shares_of(self.balance).weights
        return max(w * total / speed for w, speed in zip(weights, self.speeds, strict=True))


@given(SPEEDS)
def test_first_batch_shows_the_speeds(speeds: list[float]) -> None:
    workers = Workers(speeds)
    workers.batch()
    assert workers.longer == pytest.approx(1.0)
    assert workers.balance.rows_per_second(0) == pytest.approx(speeds[0])
    assert workers.balance.seconds(1, 7) == pytest.approx(7 / speeds[1])


@given(SPEEDS, st.integers(0, 5), st.sampled_from([1 / 8, 1 / 3, 0.8, 1.0, 1.5, 3.0]))
def test_changed_speed_soon_has_what_fits(speeds: list[float], which: int, factor: float) -> None:
    workers = Workers(speeds)
    for _ in range(AVERAGED):
        workers.batch()
    workers.speeds[which % len(speeds)] *= factor
    for _ in range(6 * AVERAGED):
        workers.batch()
    assert workers.longer <= 1 + 2 * TOLERANCE
    assert len(workers.seen) <= 2 + 4 * AVERAGED


@given(SPEEDS, st.lists(st.floats(0.99, 1.01), min_size=10, max_size=60))
def test_shares_stay_while_speeds_hardly_change(speeds: list[float], noise: list[float]) -> None:
    """Each average stays within 1 % of the speed: with the one of the first batch, within the tolerance."""
    workers = Workers(speeds)
    for i, factor in enumerate(noise):
        workers.batch({i % len(speeds): factor})
    assert len(workers.seen) == 2


@given(SPEEDS, st.integers(0, 5), st.sampled_from([0.01, 1.3, 100.0]))
def test_single_run_far_off_changes_little(speeds: list[float], which: int, factor: float) -> None:
    workers = Workers(speeds)
    for _ in range(AVERAGED):
        workers.batch()
    workers.batch({which % len(speeds): factor})
    # Each average goes at most so far: one up, all others down, or the other way round.
    most = 1 + (SUDDEN - 1) / AVERAGED
    least = 1 - (1 - 1 / SUDDEN) / AVERAGED
    assert workers.longer <= most / least + 1e-9


@given(SPEEDS, st.lists(st.sampled_from([0.01, 1.0, 100.0]), min_size=2, max_size=30))
def test_rows_of_any_size_show_the_same_speeds(speeds: list[float], sizes: list[float]) -> None:
    workers = Workers(speeds)
    for size in sizes:
        workers.batch(size=size)
    assert len(workers.seen) == 2
    assert workers.longer == pytest.approx(1.0)


def test_worker_without_rows_keeps_its_speed_while_rows_change_their_size() -> None:
    """Or it would seem the fastest as soon as rows become larger, and get nearly all of them."""
    workers = Workers([100.0, 100.0, 1.0], rows=9)
    workers.batch()
    weights = shares_of(workers.balance).weights
    for _ in range(20):
        assert 2 not in workers.batch(size=0.001)
    workers.batch(size=1.0)
    assert shares_of(workers.balance).weights == weights


def test_worker_without_rows_is_measured_again_and_gets_rows_when_it_has_become_faster() -> None:
    workers = Workers([100.0, 1.0], rows=8)
    workers.batch()
    measured = workers.now
    assert workers.batch() == {0: 8}
    while workers.now < measured + PROBE_INTERVAL:
        assert workers.batch() == {0: 8}
    # Its first run took 8 s: one of a twentieth of the time since then is allowed.
    while workers.now < measured + 20 * 8.0:
        assert workers.batch() == {0: 8}
    workers.speeds[1] = 100.0
    assert workers.batch() == {0: 7, 1: 1}
    for _ in range(3 * AVERAGED):
        workers.now += PROBE_INTERVAL
        workers.batch()
    assert workers.batch() == {0: 4, 1: 4}


def test_slow_worker_spends_at_most_a_twentieth_of_the_time_on_being_measured() -> None:
    workers = Workers([1000.0, 1.0], rows=100)
    workers.batch()
    begin, busy = workers.now, 0.0
    while workers.now < begin + 4_000.0:
        rows = workers.batch().get(1, 0)
        busy += rows / workers.speeds[1]
        workers.now += 0.5
    assert 0 < busy <= 0.06 * (workers.now - begin)


def test_batch_of_one_row_measures_nothing_again() -> None:
    workers = Workers([100.0, 1.0], rows=8)
    workers.batch()
    workers.now += 1000.0
    workers.batch()
    shares = probe_of(workers.balance)
    assert shares.probe == 1
    assert shares.cut(1) == ((1,), (0,))
    workers.balance.give_back(shares)
    assert workers.batch() == {0: 7, 1: 1}


def test_one_of_many_requests_measures_a_worker_again() -> None:
    """Or all callers of a moment would wait for a slow worker, one after another."""
    workers = Workers([100.0, 1.0], rows=8)
    workers.batch()
    workers.now += 1000.0
    workers.batch()
    shares = probe_of(workers.balance)
    assert workers.balance.take_shares() == replace(shares, probe=None)
    # It takes long, or fails: another one follows when as much time has passed as before the first.
    measured = workers.now
    while workers.now < measured + 20 * 8.0:
        assert workers.batch() == {0: 8}
        workers.now += 1.0
    workers.batch()
    assert probe_of(workers.balance).workers == (0, 1)


def test_worker_that_was_away_keeps_its_speed() -> None:
    workers = Workers([100.0, 100.0, 20.0], rows=110)
    assert workers.batch() == dict.fromkeys(range(3), 110)
    workers.balance.serve([0, 1])
    assert shares_of(workers.balance).cut(110) == ((55, 55), (0, 1))
    workers.now += 1000.0
    workers.balance.serve([0, 1, 2])
    assert workers.batch() == {0: 50, 1: 50, 2: 10}


def test_worker_that_was_never_measured_is_taken_for_one_like_the_others() -> None:
    balance = Balance(3)
    balance.serve([0, 1])
    balance.learn({0: (10, 1.0), 1: (30, 1.0)}, 0.0)
    balance.serve([0, 1, 2])
    shares = probe_of(balance)
    assert shares.weights == pytest.approx((1 / 6, 3 / 6, 2 / 6))
    assert shares.probe == 2
    assert shares.cut(2)[1] == (1, 2)
    assert balance.rows_per_second(2) is None
    assert balance.seconds(2, 5) == 0.0
    balance.learn({2: (5, 1.0)}, 1.0)
    assert balance.take_shares() == shares_of(balance)


def test_speeds_stay_finite_whatever_noise_there_is_for_long() -> None:
    workers = Workers([100.0, 100.0, 100.0], rows=30)
    for i in range(3000):
        workers.batch({i % 3: 100.0} if i % 4 == 0 else None)
    speeds = workers.balance._speeds.values()
    assert sum(speeds) == pytest.approx(len(speeds))


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.tuples(st.integers(0, 3), st.integers(1, 10**6), st.floats(0.0, 1e6)),
                min_size=1,
                max_size=4,
            ),
            st.sets(st.integers(0, 3)),
            st.floats(0.0, 1e5),
        ),
        max_size=12,
    )
)
def test_whatever_is_measured_shares_are_of_those_that_serve_and_make_one(
    events: list[tuple[list[tuple[int, int, float]], set[int], float]],
) -> None:
    balance, now = Balance(4), 0.0
    for runs, serving, passed in events:
        now += passed
        balance.learn({worker: (rows, seconds) for worker, rows, seconds in runs}, now)
        balance.serve(sorted(serving))
        shares = balance.shares
        assert (shares is None) == (len(serving) < 2 or not balance._speeds.keys() & serving)
        if shares is not None:
            assert shares.workers == tuple(sorted(serving))
            assert all(0 < weight < 1 for weight in shares.weights)
            assert math.isclose(sum(shares.weights), 1.0)
            assert sum(shares.cut(17)[0]) == 17
