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
    pools,
    spread_of,
    under,
)
from mcinfer.bench.report import OTHERS, QUANTILES, Load, Report
from mcinfer.bench.texts import remarks
from tests.bench_reports import report, small, turn, way

LOAD = Load(batch=2, clients=4)
OPEN = Load(batch=1, clients=64, rate=50.0)


def figures_of(made: Report, name: str) -> Figures:
    (load,) = made.loads()
    return next(figures for figures in under(made, load) if figures.way.name == name)


def test_figures_are_those_of_each_repeat() -> None:
    figures = figures_of(small(session=[100.0, 120.0, 90.0]), "session")
    assert (figures.rows.middle, figures.rows.low, figures.rows.high) == (200, 180, 240)
    assert figures.latency(1.0) == Spread((5 / 100, 5 / 120, 5 / 90))
    assert figures.sound
    # The speed-up is that within each repeat: the machine was half as fast in the second one.
    made = small(session=[100.0, 50.0, 80.0], sharded=[200.0, 100.0, 160.0])
    assert figures_of(made, "sharded").speedup == Spread((2.0, 2.0, 2.0))
    made = small(session=[100.0], sharded=[200.0, 300.0])
    assert figures_of(made, "sharded").speedup == Spread((2.0,))
    # It is over the best baseline of the load, whichever that is.
    made = small(session=[100.0], threads=[400.0], sharded=[200.0])
    assert [figures_of(made, name).speedup.middle for name in ("session", "sharded")] == [0.25, 0.5]
    assert not figures_of(small(sharded=[100.0]), "sharded").speedup.known
    turns = {("session", LOAD): [turn(10.0, failed=1)], ("sharded", LOAD): [turn(100.0)]}
    made = report([way("session"), way("sharded")], turns)
    assert not figures_of(made, "sharded").speedup.known  # the baseline fails


def test_speedup_is_the_same_in_the_table_and_in_the_gain() -> None:
    made = small(session=[100.0, 90.0], threads=[120.0, 130.0], sharded=[150.0, 160.0])
    gain = best_gain(made)
    assert gain is not None
    assert gain.speedup == figures_of(made, gain.way.name).speedup == Spread((150 / 120, 160 / 130))


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


def test_efficiency_is_over_so_many_times_the_pool_of_one() -> None:
    ways = [way(f"pool-{n}", role="scaling", workers=n) for n in (4, 1)]
    turns = {
        ("pool-4", LOAD): [turn(300.0), turn(160.0)],
        ("pool-1", LOAD): [turn(100.0), turn(50.0)],
    }
    found = pools(report(ways, turns))
    assert [pool.way.workers for pool in found] == [1, 4]
    assert found[1].speedup == Spread((0.75, 0.8))
    alone = report(ways[:1], {("pool-4", LOAD): [turn()]})
    assert not pools(alone)[0].speedup.known


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


def test_machine_is_busy_if_others_use_it_or_repeats_differ() -> None:
    def is_busy(others: float, *rates: float) -> bool:
        made = small(session=rates)
        said = remarks(replace(made, machine={**made.machine, OTHERS: others}))
        return any("The machine was busy" in text for text in said)

    assert not is_busy(0.5, 100.0, 110.0)
    assert is_busy(2.0, 100.0, 110.0)
    assert is_busy(0.0, 100.0, 150.0)
