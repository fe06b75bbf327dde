"""Tests of mcinfer/statistics.py."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.scheduler.scheduler import Tally
from mcinfer.statistics import Histogram

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
