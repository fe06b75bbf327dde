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

from mcinfer.scheduler.joining import PATIENCE, Joining

Cost = Callable[[int], float]
"""Seconds of a run with so many requests."""


def simulate(
    joining: Joining,
    cost: Cost,
    callers: int,
    pause: float = 0.0,
    until: int = 6_000,
    start: float = 0.0,
) -> tuple[float, list[int]]:
    """When so many were answered, from `start` on, and the requests of each run.

    `pause`: seconds from the end of a run until the last of its callers asks again.
    """
    now, free, waiting, number, sizes = start, joining.at_once, 0, callers, list[int]()
    asks, ends = [(start, i) for i in range(callers)], list[tuple[float, int, int]]()
    answered, longest = 0, max(map(cost, range(1, callers + 1)))
    while answered < until:
        now = max(now, min(joining.due, *(events[0][0] for events in (asks, ends) if events)))
        while asks and asks[0][0] <= now:
            heappop(asks)
            waiting += 1
        while ends and ends[0][0] <= now:
            _, _, done = heappop(ends)
            joining.learn(done, done, cost(done), callers - len(asks), now)
            free, answered = free + 1, answered + done
            for i in range(done):
                heappush(asks, (now + pause * (i + 1) / done, number := number + 1))
        while free and waiting:
            taken = joining.take(waiting, callers - len(asks), now)
            assert 0 <= taken <= waiting
            if not taken:
                assert now < joining.due <= now + PATIENCE * longest
                break
            waiting, free, number = waiting - taken, free - 1, number + 1
            sizes.append(taken)
            heappush(ends, (now + cost(taken), number, taken))
    return now, sizes


def linear(fixed: float) -> Cost:
    """A part of the seconds for one request, 1, is for the run, the rest for each request."""
    return lambda requests: fixed + (1 - fixed) * requests


@settings(max_examples=12)
@given(
    callers=st.integers(1, 40),
    at_once=st.integers(1, 4),
    most=st.integers(2, 16),
    fixed=st.floats(0.0, 1.0),
    power=st.floats(0.5, 1.2),
    pause=st.floats(0.0, 0.5),
)
def test_joining_is_never_slower_than_going_apart(
    callers: int, at_once: int, most: int, fixed: float, power: float, pause: float
) -> None:
    def cost(requests: int) -> float:
        return float(fixed + (1 - fixed) * requests**power)

    apart, _ = simulate(Joining(1, at_once), cost, callers, pause)
    joined, _ = simulate(Joining(most, at_once), cost, callers, pause)
    assert joined <= 1.05 * apart  # mostly of the first comparison


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("pause", [0.0, 0.2])
def test_runs_have_even_shares_where_joining_pays(at_once: int, pause: float) -> None:
    joining, cost = Joining(16, at_once), linear(0.5)
    least, most = 16 // (at_once + 1), 16 // at_once  # with a share that gathers, and without
    apart, _ = simulate(Joining(1, at_once), cost, 16, pause, until=8_000)
    joined, sizes = simulate(joining, cost, 16, pause, until=8_000)
    together = [size for size in sizes if size > 1]
    assert sum(size for size in together if least <= size <= most) >= 0.9 * sum(together)
    assert least / cost(least) < 1.1 * joining.gain
    assert joined < 1.1 * apart / joining.gain


def test_comparisons_take_little() -> None:
    bad, good = (lambda requests: requests**1.1), linear(0.5)
    apart, _ = simulate(Joining(1), bad, 8, until=20_000)
    joining = Joining(16)
    joined, _ = simulate(joining, bad, 8, until=20_000)
    assert joining.gain < 1
    assert joined < 1.015 * apart
    joined, _ = simulate(Joining(16), good, 8, until=20_000)
    assert joined < 1.03 * (20_000 / 8) * good(8)


def test_request_of_an_only_caller_goes_at_once() -> None:
    joining = Joining(16)
    simulate(joining, linear(0.5), 8)
    assert joining.share == 4
    for _ in range(64):
        joining.learn(1, 1, 1.0, 1, 0.0)
    assert joining.share == 1
    assert joining.take(1, 1, 0.0) == 1


def test_verdict_follows_a_cost_that_changes() -> None:
    joining, now = Joining(16), 0.0
    for cost, joins in ((linear(0.5), True), (linear(0.0), False), (linear(0.5), True)):
        now, _ = simulate(joining, cost, 8, until=40_000, start=now)
        assert joining.joins == joins
    assert joining.gain == pytest.approx(8 / 4.5, rel=0.1)


def test_callers_that_go_away_are_waited_for_no_longer_than_a_part_of_a_run() -> None:
    joining = Joining(16)
    simulate(joining, linear(0.5), 8)
    assert joining.take(1, 1, 0.0) == 0
    assert 0 < joining.due <= PATIENCE * linear(0.5)(8)
    assert joining.take(1, 1, 0.5 * joining.due) == 0
    assert joining.take(1, 1, joining.due) == 1
    assert joining.due == math.inf


def test_comparison_is_not_led_astray_by_a_lull() -> None:
    joining, now = Joining(16), 0.0
    for answers in range(20, 80):  # more and more of a turn
        now, _ = simulate(joining, linear(0.5), 8, until=answers, start=now + 1e6)
        assert math.isnan(joining.gain) or joining.gain == pytest.approx(8 / 4.5, rel=0.1)
    assert joining.gain > 1


def test_more_callers_lead_to_a_comparison_at_once() -> None:
    joining = Joining(16)
    now, _ = simulate(joining, lambda requests: requests if requests < 16 else 8, 8, until=90_000)
    assert not joining.joins
    simulate(joining, lambda requests: requests if requests < 16 else 8, 32, start=now)
    assert joining.joins


def test_runs_without_rows_for_requests_that_are_settled_are_learned_from() -> None:
    joining = Joining(16)
    for number in range(4_000):
        joining.learn(0, 1 + number % 2, 0.01, 0, 0.01 * number)
    assert not math.isnan(joining.gain)
