"""Tests of mcinfer/scheduler/joining.py, in a simulation of callers that wait for their answers.

A run of some requests, of a row each, takes what a cost says. Each caller asks again a while after its
answer.
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcinfer.scheduler.joining import PATIENCE, REST, Joining

Cost = Callable[[int], float]
"""Seconds of a run with so many requests."""


def simulate(
    joining: Joining, cost: Cost, callers: int, pause: float = 0.0, until: int = 4_000
) -> tuple[float, list[int]]:
    """Seconds for so many answers, and the requests of each run.

    `pause`: seconds from the end of a run until the last of its callers asks again.
    """
    now, free, waiting, number, sizes = 0.0, joining.at_once, 0, callers, list[int]()
    asks, ends = [(0.0, i) for i in range(callers)], list[tuple[float, int, int]]()
    while sum(sizes) < until:
        now = max(now, min(joining.due, *(events[0][0] for events in (asks, ends) if events)))
        while asks and asks[0][0] <= now:
            heappop(asks)
            waiting += 1
        while ends and ends[0][0] <= now:
            _, _, done = heappop(ends)
            joining.learn(done, done, cost(done), callers - len(asks))
            free += 1
            for i in range(done):
                heappush(asks, (now + pause * (i + 1) / done, number := number + 1))
        while free and waiting:
            taken = joining.take(waiting, callers - len(asks), now)
            assert 0 <= taken <= waiting
            if not taken:
                assert now < joining.due <= now + PATIENCE * max(map(cost, sizes))
                break
            waiting, free, number = waiting - taken, free - 1, number + 1
            sizes.append(taken)
            heappush(ends, (now + cost(taken), number, taken))
    return now, sizes


def linear(fixed: float) -> Cost:
    """A part of the seconds for one request, 1, is for the run, the rest for each request."""
    return lambda requests: fixed + (1 - fixed) * requests


@settings(max_examples=20)
@given(
    callers=st.integers(1, 40),
    at_once=st.integers(1, 4),
    most=st.integers(2, 16),
    fixed=st.floats(0.0, 1.0),
    power=st.floats(0.5, 1.2),
    pause=st.floats(0.0, 0.3),
)
def test_joining_is_never_slower_than_going_apart(
    callers: int, at_once: int, most: int, fixed: float, power: float, pause: float
) -> None:
    def cost(requests: int) -> float:
        return float(fixed + (1 - fixed) * requests**power)

    apart, _ = simulate(Joining(1, at_once), cost, callers, pause)
    joined, _ = simulate(Joining(most, at_once), cost, callers, pause)
    assert joined <= 1.03 * apart


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("pause", [0.0, 0.2])
def test_runs_have_even_shares_where_joining_pays(at_once: int, pause: float) -> None:
    joining = Joining(16, at_once)
    apart, _ = simulate(Joining(1, at_once), linear(0.5), 16, pause)
    joined, sizes = simulate(joining, linear(0.5), 16, pause)
    even = 16 // at_once
    assert sizes.count(1) <= 0.015 * sum(sizes)  # the comparisons
    assert sum(size for size in sizes if abs(size - even) <= 1) >= 0.9 * sum(sizes)
    assert joining.gain == pytest.approx(even / (0.5 + 0.5 * even), rel=0.1)
    assert joined < 1.1 * apart / joining.gain


def test_requests_go_apart_where_a_row_costs_more_in_company() -> None:
    joining = Joining(16)
    _, sizes = simulate(joining, lambda requests: requests**1.1, 8, until=20_000)
    assert joining.gain < 1
    assert sum(size for size in sizes if size > 1) <= 0.015 * sum(sizes)  # the comparisons


def test_request_of_an_only_caller_goes_at_once() -> None:
    joining = Joining(16)
    simulate(joining, linear(0.5), 8)
    assert joining.share == 8
    for _ in range(64):
        joining.learn(1, 1, 1.0, 1)
    assert joining.share == 1
    assert joining.take(1, 1, 0.0) == 1


def test_verdict_follows_a_cost_that_changes() -> None:
    joining = Joining(16)
    for cost, joins in ((linear(0.5), True), (linear(0.0), False), (linear(0.5), True)):
        simulate(joining, cost, 8, until=2 * REST[1])
        assert joining.joins == joins
    assert joining.gain == pytest.approx(8 / 4.5)


def test_callers_that_go_away_are_waited_for_no_longer_than_a_part_of_a_run() -> None:
    joining = Joining(16)
    simulate(joining, linear(0.5), 8)
    assert joining.take(1, 1, 0.0) == 0
    assert joining.due == pytest.approx(PATIENCE * 4.5, rel=0.1)
    assert joining.take(1, 1, 0.5 * joining.due) == 0
    assert joining.take(1, 1, joining.due) == 1
    assert joining.due == math.inf
