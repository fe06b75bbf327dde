"""Tests of mcinfer/bench/figures.py."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.bench.figures import (
    Figures,
    Spread,
    best_gain,
    gains,
    latency,
    percentile,
    spread_of,
    under,
)
from mcinfer.bench.report import QUANTILES, Load, Report
from tests.bench_reports import report, small, turn, way

LOAD = Load(batch=2, clients=4)
OPEN = Load(batch=1, clients=64, rate=50.0)


def figures_of(made: Report, name: str) -> Figures:
    (load,) = made.loads
    return next(figures for figures in under(made, load) if figures.way.name == name)


def test_figures_are_those_of_each_repeat() -> None:
    figures = figures_of(small(session=[100.0, 120.0, 90.0]), "session")
    assert (figures.rows.middle, figures.rows.low, figures.rows.high) == (200, 180, 240)
    assert figures.latency(1.0) == Spread((5 / 100, 5 / 120, 5 / 90))
    assert figures.sound


FAILING = {("session", LOAD): [turn(10.0, failed=1)], ("sharded", LOAD): [turn(100.0)]}


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        # Within each repeat: the machine was half as fast in the second one.
        (small(session=[100.0, 50.0], sharded=[200.0, 100.0]), (2.0, 2.0)),
        (small(session=[100.0], sharded=[200.0, 300.0]), (2.0,)),
        (small(session=[100.0], threads=[400.0], sharded=[200.0]), (0.5,)),  # the best baseline
        (small(sharded=[100.0]), ()),
        (report([way("session"), way("sharded")], FAILING), ()),
    ],
)
def test_speedup_is_over_the_best_baseline_within_each_repeat(
    made: Report, expected: tuple[float, ...]
) -> None:
    assert figures_of(made, "sharded").speedup == Spread(expected)


@given(st.sampled_from(QUANTILES), st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_unanswered_requests_never_make_a_latency_look_better(
    fraction: float, answered: int, failed: int, unfinished: int
) -> None:
    whole = turn(float(answered), seconds=1.0)
    lossy = replace(whole, failed=failed, unfinished=unfinished)
    if answered == failed == unfinished == 0:
        assert math.isnan(latency(lossy, fraction))
    elif answered == 0:
        assert latency(lossy, fraction) == math.inf
    else:
        assert latency(lossy, fraction) >= latency(whole, fraction)
        if fraction * (answered + failed + unfinished) > answered * (1 + 1e-9):
            assert latency(lossy, fraction) == math.inf


@pytest.mark.parametrize("late", [{"unfinished": 20}, {"kept_up": False}])
def test_open_loop_that_was_not_kept_up_with_is_no_gain(late: dict[str, int]) -> None:
    behind = turn(40.0, slowest=0.05, run_seconds=0.01, **late)  # type: ignore[arg-type]
    turns = {("session", OPEN): [turn(20.0, slowest=0.1)], ("sharded", OPEN): [behind]}
    made = report([way("session"), way("sharded")], turns)
    figures = figures_of(made, "sharded")
    assert not figures.sound
    assert not figures.speedup.known
    assert not figures.overhead.known
    assert figures_of(made, "session").sound
    assert gains(made) == ()


@pytest.mark.parametrize(("fraction", "least"), [(0.5, 1), (0.9, 10), (0.99, 100)])
def test_percentile_is_of_so_many_requests_at_least(fraction: float, least: int) -> None:
    enough = turn(float(least), seconds=1.0)
    assert percentile([enough], fraction) == spread_of([enough.latency(fraction)])
    few = turn(least - 1.0, seconds=1.0)
    assert not percentile([few], fraction).known
    assert percentile([enough, few], fraction).known == (few.requests == 0)


@pytest.mark.parametrize(
    ("session", "threads", "sharded", "clear"),
    [
        ([100.0, 100.0], [90.0, 90.0], [120.0, 130.0], 1),
        ([100.0, 100.0], [90.0, 90.0], [120.0, 99.0], 0),
        ([100.0, 100.0], [125.0, 130.0], [120.0, 130.0], 0),  # the best baseline counts
        ([100.0, 100.0], [90.0, 90.0], [80.0, 90.0], -1),
        ([100.0], [90.0], [200.0], 0),  # the spread is not known
    ],
)
def test_gain_is_clear_where_each_repeat_is_better_than_the_best_baseline(
    session: list[float], threads: list[float], sharded: list[float], clear: int
) -> None:
    gain = best_gain(small(session=session, threads=threads, sharded=sharded))
    assert gain is not None
    assert (gain.way.name, gain.clear) == ("sharded", clear)


def test_gain_in_an_open_loop_is_that_of_the_median_latency() -> None:
    ways = [way("session"), way("concurrent")]
    turns = {
        (name, OPEN): [turn(50.0, slowest=s), turn(50.0, slowest=s)]
        for name, s in (("session", 0.3), ("concurrent", 0.1))
    }
    gain = best_gain(report(ways, turns))
    assert gain is not None
    assert gain.speedup.values == pytest.approx((3.0, 3.0))
