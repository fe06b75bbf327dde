"""Tests of mcinfer/statistics.py."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.scheduler.dispatch import Tally
from mcinfer.statistics import Health, Histogram, Statistics, WorkerStatistics

BOUNDS = st.lists(st.floats(-1e6, 1e6), unique=True, max_size=8).map(sorted)
VALUES = st.lists(st.floats(-2e6, 2e6), max_size=30)


def counted(bounds: tuple[float, ...], *values: float) -> Histogram:
    tally = Tally(bounds)
    for value in values:
        tally.add(value)
    return tally.snapshot()


@given(BOUNDS, VALUES)
def test_every_value_is_counted_once_in_its_class(bounds: list[float], values: list[float]) -> None:
    histogram = counted(tuple(bounds), *values)
    edges = (-math.inf, *bounds, math.inf)
    for (low, high), count in zip(pairwise(edges), histogram.counts, strict=True):
        assert count == sum(low < value <= high for value in values)
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(math.fsum(values), abs=1e-3)


@given(BOUNDS, VALUES, st.floats(0.0, 1.0))
def test_as_many_values_as_a_quantile_says_are_below_its_bound(
    bounds: list[float], values: list[float], fraction: float
) -> None:
    bound = counted(tuple(bounds), *values).quantile(fraction)
    if not values:
        assert math.isnan(bound)
        return
    assert sum(value <= bound for value in values) >= fraction * len(values)
    lower = [edge for edge in bounds if edge < bound]
    if lower:
        below = sum(value <= lower[-1] for value in values)
        assert below == 0 or below < fraction * len(values)


def test_text_of_a_snapshot_is_a_table_of_a_few_lines() -> None:
    worker = WorkerStatistics(
        index=0,
        device="cpu:0",
        pid=4711,
        state="ready",
        restarts=0,
        runs=12,
        completed=12,
        failed=1,
        busy_seconds=1.25,
        providers=("fake",),
        last_error="",
    )
    gone = replace(worker, index=10, device="cpu:10", pid=None, state="gone", restarts=3)
    now = Statistics(
        accepted=16,
        succeeded=12,
        failed=1,
        cancelled=1,
        in_flight=2,
        in_flight_bytes=64,
        queued=1,
        queued_shards=1,
        latency=counted((0.001, 0.01), *[0.0005] * 11, 0.005),
        batch_sizes=counted((1.0,)),
        memory_bytes=96_000_000,
        memory_used_bytes=1_500_000,
        weights_version=0,
        health=Health(state="degraded", reasons=("worker 10 is gone",), serving=1, workers=2),
        workers=(worker, gone),
    )
    assert str(now) == repr(now)
    assert str(now).splitlines() == [
        "degraded: 1 of 2 workers serve; worker 10 is gone",
        "16 requests: 12 succeeded, 1 failed, 1 cancelled, 2 in flight, 1 of them queued; half within 1 ms, "
        "99 % within 10 ms",
        "1.5 MB of shared memory in use, 96.0 MB reserved",
        "worker  device  pid   state  restarts  runs  failed  busy s",
        "0       cpu:0   4711  ready  0         12    1       1.250",
        "10      cpu:10  -     gone   3         12    1       1.250",
    ]
    assert "within" not in repr(replace(now, latency=counted((0.001,))))
