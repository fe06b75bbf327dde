"""Tests of mcinfer/bench/views/figures.py."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.bench.report import QUANTILES, Load, Report
from mcinfer.bench.turns import nearest_rank
from mcinfer.bench.views.figures import (
    LoadFigures,
    Spread,
    compared_loads,
    latency,
    percentile,
    pools,
    spread_of,
    under,
    way_figures,
)
from tests.bench_reports import large, report, small, turn, way

LOAD = Load(batch=2, clients=4)
OPEN = Load(batch=1, clients=64, rate=50.0)


def figures_of(made: Report, name: str) -> LoadFigures:
    (load,) = compared_loads(made)
    return next(figures for figures in under(made, load) if figures.way == name)


@given(st.lists(st.floats(allow_nan=True), max_size=8))
def test_spread_holds_all_that_is_known(values: list[float]) -> None:
    known = [value for value in values if not math.isnan(value)]
    spread = spread_of(values)
    assert spread.known == bool(known)
    assert spread.count == len(known)
    if known and not {math.inf, -math.inf} <= set(known):
        assert (spread.low, spread.high) == (min(known), max(known))
        assert spread.low <= spread.middle <= spread.high


def test_figures_are_the_middle_repeat_with_the_least_and_the_greatest() -> None:
    figures = figures_of(small(session=[100.0, 120.0, 90.0]), "session")
    assert figures.requests == Spread(100.0, 90.0, 120.0, 3)
    assert figures.rows == Spread(200.0, 180.0, 240.0, 3)
    assert figures.cores == Spread(2.0, 2.0, 2.0, 3)
    assert figures.longest == Spread(5 / 100, 5 / 120, 5 / 90, 3)
    assert figures.sound


def test_speedup_is_taken_within_each_repeat() -> None:
    # The machine was half as quick in the second repeat, for both.
    made = small(session=[100.0, 50.0, 80.0], sharded=[200.0, 100.0, 160.0])
    assert figures_of(made, "sharded").speedup == Spread(2.0, 2.0, 2.0, 3)
    assert figures_of(made, "session").speedup == Spread(1.0, 1.0, 1.0, 3)


def test_speedup_counts_the_repeats_that_both_have() -> None:
    made = small(session=[100.0], sharded=[200.0, 300.0])
    assert figures_of(made, "sharded").speedup == Spread(2.0, 2.0, 2.0, 1)


def test_speedup_without_the_reference_is_not_known() -> None:
    assert not figures_of(small(threads=[100.0]), "threads").speedup.known
    assert not figures_of(small(session=[0.0], threads=[100.0]), "threads").speedup.known


def test_requests_that_fail_count_as_never_answered() -> None:
    half = replace(turn(50.0, slowest=1.0), failed=100)  # 100 of 200
    assert latency(half, 0.99) == math.inf
    assert latency(half, 1.0) == math.inf
    # Half of all is all of those that were answered.
    assert latency(half, 0.5) == half.latency(1.0)
    assert latency(half, 0.0) == half.latency(0.0)


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


def test_open_loop_that_was_not_kept_up_with_is_no_feat() -> None:
    made = report(
        [way("session"), way("sharded")],
        {
            ("session", OPEN): [turn(20.0, slowest=0.1)],
            ("sharded", OPEN): [turn(40.0, slowest=0.05, unfinished=20, run_seconds=0.01)],
        },
    )
    figures = figures_of(made, "sharded")
    assert not figures.sound
    assert (figures.answered, figures.unfinished, figures.made) == (80, 20, 100)
    assert figures.p90.middle == figures.p99.middle == figures.longest.middle == math.inf
    assert not figures.speedup.known
    assert not figures.overhead.known
    assert figures_of(made, "session").sound


def test_open_loop_whose_queue_grew_is_no_feat_although_all_was_answered() -> None:
    late = turn(40.0, kept_up=False, run_seconds=0.01)
    made = report(
        [way("session"), way("sharded")],
        {
            ("session", OPEN): [turn(20.0)] * 2,
            ("sharded", OPEN): [turn(50.0, run_seconds=0.01), late],
        },
    )
    figures = figures_of(made, "sharded")
    assert (figures.behind, figures.sound) == (1, False)
    assert not figures.speedup.known
    assert figures.overhead.count == 1


@pytest.mark.parametrize(("fraction", "least"), [(0.5, 1), (0.9, 10), (0.99, 100), (0.999, 1000)])
def test_percentile_is_of_so_many_requests_at_least(fraction: float, least: int) -> None:
    enough = turn(float(least), seconds=1.0)
    assert percentile([enough], fraction) == spread_of([enough.latency(fraction)])
    few = turn(least - 1.0, seconds=1.0)
    assert not percentile([few], fraction).known
    assert percentile([enough, few], fraction).known == (few.requests == 0)


@given(st.sampled_from([q for q in QUANTILES if 0.5 < q < 1]), st.integers(1, 3000))
def test_percentile_is_known_where_it_is_not_the_slowest(fraction: float, made: int) -> None:
    # Latencies that tell which request they are of.
    ordered = [float(n) for n in range(1, made + 1)]
    kept = tuple(nearest_rank(ordered, quantile) for quantile in QUANTILES)
    spread = percentile([replace(turn(), requests=made, latencies=kept)], fraction)
    assert spread.known == (nearest_rank(ordered, fraction) < made)


def test_cores_of_a_short_turn_are_not_known() -> None:
    made = report([way("session")], {("session", LOAD): [turn(seconds=0.5), turn(seconds=0.4)]})
    assert not figures_of(made, "session").cores.known
    made = report([way("session")], {("session", LOAD): [turn(seconds=0.5)]})
    assert figures_of(made, "session").cores.middle == 2.0


def test_errors_are_told_once() -> None:
    turns = [turn(failed=1, error=text) for text in ("b", "a", "b", "")]
    made = report([way("session")], {("session", LOAD): turns})
    assert figures_of(made, "session").errors == ("b", "a")


def test_being_quicker_than_what_fails_is_no_speedup() -> None:
    made = report(
        [way("session"), way("sharded")],
        {("session", LOAD): [turn(10.0, failed=1)], ("sharded", LOAD): [turn(100.0)]},
    )
    assert not figures_of(made, "sharded").speedup.known


def test_way_that_answered_nothing_has_no_figures_but_zero_throughput() -> None:
    figures = figures_of(small(session=[0.0, 0.0]), "session")
    assert figures.rows == Spread(0.0, 0.0, 0.0, 2)
    assert not figures.p50.known
    assert not figures.overhead.known
    assert not figures.sound


def test_overhead_is_mean_latency_less_the_engine() -> None:
    taken = turn(100.0, run_seconds=0.002)
    made = report([way("sharded")], {("sharded", LOAD): [taken]})
    overhead = figures_of(made, "sharded").overhead
    assert overhead.middle == pytest.approx(taken.mean_latency - 0.002)


def test_start_and_memory_are_spread_over_the_repeats() -> None:
    figures = way_figures(way("sharded", workers=4))
    assert (figures.pss.low, figures.pss.middle, figures.pss.high) == (190e6, 191e6, 192e6)
    assert figures.start.count == 3
    assert figures.processes == Spread(4, 4, 4, 3)
    assert not way_figures(way("sharded", repeats=0)).start.known


def test_efficiency_is_over_so_many_times_the_pool_of_one() -> None:
    ways = [way(f"pool-{n}", role="scaling", workers=n) for n in (4, 1)]
    made = report(
        ways,
        {
            ("pool-4", LOAD): [turn(300.0), turn(160.0)],
            ("pool-1", LOAD): [turn(100.0), turn(50.0)],
        },
    )
    found = pools(made)
    assert [pool.workers for pool in found] == [1, 4]
    assert found[0].efficiency == Spread(1.0, 1.0, 1.0, 2)
    assert (found[1].efficiency.low, found[1].efficiency.high) == (0.75, 0.8)


def test_efficiency_without_the_pool_of_one_is_not_known() -> None:
    made = report([way("pool-2", role="scaling", workers=2)], {("pool-2", LOAD): [turn()]})
    assert not pools(made)[0].efficiency.known


def test_pools_are_not_among_the_ways_that_are_compared() -> None:
    made = large()
    assert len(compared_loads(made)) == 11
    assert not {f.way for load in compared_loads(made) for f in under(made, load)} & {"pool-1"}
