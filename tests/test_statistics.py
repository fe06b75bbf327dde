"""Tests of mcinfer/statistics.py."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.scheduler.scheduler import Tally
from mcinfer.statistics import LATENCY_BOUNDS, ROW_BOUNDS, Health, Histogram

BOUNDS = st.lists(st.floats(-1e6, 1e6), unique=True, max_size=8).map(sorted)
VALUES = st.lists(st.floats(-2e6, 2e6), max_size=30)


def counted(bounds: tuple[float, ...], *values: float) -> Histogram:
    tally = Tally(bounds)
    for value in values:
        tally.add(value)
    return tally.snapshot()


@pytest.mark.parametrize("bounds", [LATENCY_BOUNDS, ROW_BOUNDS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert all(low < high for low, high in pairwise(bounds))


def test_bounds_cover_what_they_count() -> None:
    assert (LATENCY_BOUNDS[0], LATENCY_BOUNDS[-1]) == pytest.approx((1e-4, 500.0))
    assert (ROW_BOUNDS[0], ROW_BOUNDS[-1]) == (1.0, 4096.0)


def test_value_on_a_bound_belongs_to_its_class() -> None:
    histogram = counted((1.0, 2.0), 0.5, 1.0, 1.5, 2.0, 2.5)
    assert histogram == Histogram(bounds=(1.0, 2.0), counts=(2, 2, 1), total=7.5)
    assert histogram.count == 5


def test_snapshot_does_not_change() -> None:
    tally = Tally((1.0,))
    before = tally.snapshot()
    tally.add(0.5)
    assert before == Histogram(bounds=(1.0,), counts=(0, 0), total=0.0)
    assert tally.snapshot().counts == (1, 0)


@pytest.mark.parametrize(
    ("fraction", "bound"),
    [(0.0, 1.0), (0.2, 1.0), (0.21, 2.0), (0.5, 2.0), (0.8, 2.0), (0.99, math.inf)],
)
def test_quantile_is_the_bound_of_its_class(fraction: float, bound: float) -> None:
    assert counted((0.1, 1.0, 2.0), 0.5, 1.5, 1.5, 1.5, 9.0).quantile(fraction) == bound


def test_quantile_of_nothing_is_no_number() -> None:
    assert math.isnan(counted((1.0, 2.0)).quantile(0.5))


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


def test_health_is_told_in_one_line() -> None:
    assert str(Health(state="ready", reasons=(), serving=2, workers=2)) == (
        "ready: 2 of 2 workers serve"
    )
    assert str(Health(state="degraded", reasons=("one", "two"), serving=1, workers=3)) == (
        "degraded: 1 of 3 workers serve; one; two"
    )
