"""Tests of mcinfer/scheduler/dispatch.py: which worker gets a run, how many, and which has the whole CPU."""

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

import pytest

from mcinfer.errors import ProtocolError
from mcinfer.protocol import MAX_RUNS
from mcinfer.scheduler.dispatch import AHEAD_SECONDS, SHORT_RUN, WIDE_RUN
from tests.orders import (
    SIGKILL,
    SIGSEGV,
    Order,
    Pool,
    Release,
    SendRun,
    Settle,
    build,
    predict,
    ready_pool,
    reply,
    restarted,
)


def wide_pool(workers: int = 2, seconds: float = WIDE_RUN, **options: Any) -> Pool:
    """A pool whose worker 0 has had a run of so many seconds on its own cores."""
    builds = [replace(build(i), wide_cores=(0, 1)) for i in range(workers)]
    pool = ready_pool(workers, builds, **options)
    assert pool.handle_request(0.0, 1, (1,), 10.0, may_be_wide=True) == [predict(0, (1, 0))]
    pool.handle_message(1.0, 0, reply(1, seconds=seconds))
    return pool


def is_wide(orders: Sequence[Order]) -> list[bool]:
    return [order.wide for order in orders if isinstance(order, SendRun)]


def test_request_that_comes_alone_has_the_whole_cpu_and_others_have_their_part() -> None:
    pool = wide_pool(3)
    assert is_wide(pool.handle_request(1.0, 2, (1,), 10.0, may_be_wide=True)) == [True]
    assert is_wide(pool.handle_request(1.0, 3, (1,), 10.0, may_be_wide=True)) == [False]
    pool.handle_message(2.0, 0, replace(reply(2), wide=True))
    assert is_wide(pool.handle_request(2.0, 4, (1,), 10.0, may_be_wide=True)) == [False]
    pool.handle_message(3.0, 0, replace(reply(4), wide=True))  # which it was not to be
    pool.handle_message(3.0, 1, reply(3))
    assert is_wide(pool.handle_request(3.0, 5, (1, 1), 10.0, may_be_wide=True)) == [False, False]
    assert [w.wide for w in pool.lifecycle.statistics()] == [1, 0, 0]


def test_worker_that_did_not_take_the_whole_cpu_is_not_counted() -> None:
    pool = wide_pool()
    assert is_wide(pool.handle_request(1.0, 2, (1,), 10.0, may_be_wide=True)) == [True]
    pool.handle_message(2.0, 0, reply(2))
    assert [(w.runs, w.wide) for w in pool.lifecycle.statistics()] == [(2, 0), (0, 0)]


def test_short_runs_and_those_of_a_check_keep_their_part_of_the_cpu() -> None:
    pool = wide_pool(seconds=0.9 * WIDE_RUN)
    assert is_wide(pool.handle_request(1.0, 2, (1,), 10.0, may_be_wide=True)) == [False]
    pool = wide_pool()
    assert is_wide(pool.handle_request(1.0, 2, (1,), 10.0)) == [False]


def test_run_is_wide_once_no_two_requests_have_met_for_a_while() -> None:
    pool, widths, seconds = wide_pool(), [], 2 * WIDE_RUN
    for request in (2, 3):
        pool.handle_request(1.0, request, (1,), 10.0, may_be_wide=True)
    for worker, request in enumerate((2, 3)):
        pool.handle_message(1.0, worker, reply(request, seconds=0.0))
    for request in range(4, 64):
        now = 1.0 + (request - 3) * seconds
        widths += is_wide(pool.handle_request(now, request, (1,), 10.0, may_be_wide=True))
        answer = replace(reply(request, seconds=seconds), wide=widths[-1])
        pool.handle_message(now + seconds, 0, answer)
    assert widths.index(True) > 10
    assert all(widths[-15:])


def test_worker_whose_wide_runs_become_short_goes_back_to_its_part() -> None:
    pool, widths = wide_pool(), []
    for request in range(2, 20):
        widths += is_wide(pool.handle_request(request, request, (1,), 10.0, may_be_wide=True))
        answer = replace(reply(request, seconds=WIDE_RUN / 4), wide=widths[-1])
        pool.handle_message(request + 0.5, 0, answer)
    assert widths[0]
    assert not any(widths[-3:])


def test_request_whose_worker_died_runs_again_on_its_part_of_the_cpu() -> None:
    pool = wide_pool()
    assert is_wide(pool.handle_request(1.0, 2, (1,), 10.0, may_be_wide=True)) == [True]
    assert is_wide(pool.handle_died(2.0, 0, SIGSEGV)) == [False]


def test_worker_that_dies_of_wide_runs_has_no_more_of_them() -> None:
    pool, widths = wide_pool(), []
    for request in range(2, 12, 2):  # of each two, its process dies in the first
        now = float(request)
        widths += is_wide(pool.handle_request(now, request, (1,), 10.0, may_be_wide=True))
        pool.handle_died(now, 0, SIGKILL)
        pool.handle_message(now, 1, reply(request))
        restarted(pool, 0)
        assert not any(is_wide(pool.handle_request(now, request + 1, (1,), 10.0, may_be_wide=True)))
        pool.handle_message(now + 0.5, 0, reply(request + 1, seconds=WIDE_RUN))
    assert widths == [True, True, False, False, False]


def test_request_that_others_wait_behind_has_a_part_of_the_cpu() -> None:
    pool = wide_pool(1, max_batch_size=2, max_delay=1.0)
    join = ("k", 1)
    assert pool.handle_request(2.0, 2, (1,), 10.0, join=join, may_be_wide=True) == []
    assert is_wide(pool.handle_time(3.5)) == [True]
    pool.handle_message(4.0, 0, replace(reply(2), wide=True))
    assert pool.handle_request(5.0, 3, (1,), 10.0, join=join, may_be_wide=True) == []
    assert is_wide(pool.handle_request(5.0, 4, (1,), 10.0, join=join, may_be_wide=True)) == [False]


def pool_of_short_runs(workers: int = 1, *, seconds: float = SHORT_RUN, tensor: int = 1) -> Pool:
    """A pool whose workers have each answered a run of so many seconds; the test's requests begin at 10."""
    pool = ready_pool(workers, tensor=tensor)
    pool.handle_request(0.0, 0, (1,) * workers, 10.0)
    for worker in range(workers):
        pool.handle_message(seconds, worker, reply(0, worker, seconds=seconds))
    return pool


def ask(pool: Pool, now: float, *requests: int, timeout: float = 10.0) -> list[Order]:
    """Requests of one shard each come."""
    return [a for request in requests for a in pool.handle_request(now, request, (1,), timeout)]


@pytest.mark.parametrize(
    ("seconds", "capacity"),
    [(0.25, 1), (0.011, 1), (SHORT_RUN, 2), (0.001, 4), (0.0002, MAX_RUNS), (0.0, MAX_RUNS)],
)
def test_worker_holds_as_many_runs_as_take_some_milliseconds(seconds: float, capacity: int) -> None:
    pool = pool_of_short_runs(seconds=seconds)
    given = ask(pool, 1.0, *range(10, 30))
    assert given == [predict(0, (request, 0)) for request in range(10, 10 + capacity)]
    assert pool.workers[0].runs[0].members == ((10, 0),)
    assert pool.handle_message(1.0 + seconds, 0, reply(10, seconds=seconds)) == [
        Settle(request=10),
        Release(request=10),
        predict(0, (10 + capacity, 0)),
    ]


def test_of_workers_with_as_many_runs_the_one_that_began_first_is_given_the_next() -> None:
    """It is likely to be free first: requests wait as they would in one line for both."""
    pool = ready_pool(2)
    for worker in (0, 1):
        ask(pool, 0.0, worker)
    for worker in (0, 1):
        pool.handle_message(0.001, worker, reply(worker, seconds=0.001))
    assert ask(pool, 1.0, 10) == [predict(0, (10, 0))]
    assert ask(pool, 1.001, 11) == [predict(1, (11, 0))]
    pool.handle_message(1.001, 0, reply(10, seconds=0.001))
    assert ask(pool, 1.0015, 12) == [predict(0, (12, 0))]
    assert ask(pool, 1.0016, 13) == [predict(1, (13, 0))]


def test_seconds_that_a_worker_says_are_no_more_than_there_were() -> None:
    pool = ready_pool(1)
    ask(pool, 0.0, 1)
    pool.handle_answer(0.5, 0, 1, 0, 1e308)
    assert pool.lifecycle.statistics()[0].busy_seconds <= 0.5


def test_answer_of_a_run_that_cannot_have_begun_is_refused() -> None:
    pool = ready_pool(1, concurrent=2)
    ask(pool, 0.0, 1)
    pool.handle_message(0.001, 0, reply(1, seconds=0.001))
    assert len(ask(pool, 1.0, *range(10, 20))) == 5  # two at once, and as many ahead as take 3 ms
    with pytest.raises(ProtocolError, match=r"\(12, 0\), expected \(10, 0\) or \(11, 0\)"):
        pool.handle_message(1.0, 0, reply(12))
    pool.handle_message(1.001, 0, reply(11, seconds=0.001))
    assert pool.handle_message(1.001, 0, reply(12, seconds=0.001))[0] == Settle(request=12)


def test_group_of_ranks_answers_in_order_whatever_it_says() -> None:
    pool = ready_pool(1, pipeline=2, concurrent=3)
    assert len(ask(pool, 0.0, 1, 2, 3, 4)) == 3
    with pytest.raises(ProtocolError, match=r"\(2, 0\), expected \(1, 0\) in"):
        pool.handle_message(1.0, 0, reply(2))


def test_worker_that_starts_again_has_the_runs_at_once_that_it_then_says() -> None:
    pool = ready_pool(1, concurrent=3)
    pool.handle_died(1.0, 0, SIGKILL)
    restarted(pool, 0)
    assert ask(pool, 2.0, 1, 2) == [predict(0, (1, 0))]


def test_pipeline_gets_a_run_for_each_stage_and_one_more_however_long_they_take() -> None:
    scheduler = ready_pool(1, pipeline=2)
    rows = (1,) * 5
    assert scheduler.handle_request(0.0, 0, rows, 60.0) == [predict(0, (0, i)) for i in range(3)]
    assert scheduler.handle_message(2.0, 0, reply(0, 0, 2.0)) == [predict(0, (0, 3))]
    assert scheduler.handle_message(3.0, 0, reply(0, 1, 2.0)) == [predict(0, (0, 4))]


def test_pipelines_get_their_first_runs_before_one_of_them_gets_its_second() -> None:
    scheduler = ready_pool(2, pipeline=2)
    given = scheduler.handle_request(0.0, 0, (1,) * 3, 60.0)
    assert given == [predict(0, (0, 0)), predict(1, (0, 1)), predict(0, (0, 2))]


def test_nothing_is_put_behind_a_run_that_takes_longer_than_usual() -> None:
    pool = pool_of_short_runs(2, seconds=0.001)
    assert ask(pool, 1.0, 10, 11, 12) == [
        predict(0, (10, 0)),
        predict(1, (11, 0)),
        predict(0, (12, 0)),
    ]
    late = 1.0 + 0.001 + 1.01 * AHEAD_SECONDS
    assert ask(pool, late, 13) == []
    assert pool.handle_message(late, 1, reply(11, seconds=0.001))[-1] == predict(1, (13, 0))
    # What is behind it stays there.
    assert pool.handle_time(2.0) == []
    assert pool.handle_message(2.0, 0, reply(10)) == [Settle(request=10), Release(request=10)]
    assert [run.members for run in pool.workers[0].runs] == [((12, 0),)]
    assert pool.handle_died(2.0, 0, SIGKILL) == []
    assert pool.handle_message(2.0, 1, reply(13))[-1] == predict(1, (12, 0))


def busy_pool(callers: int, until: float = 50.0, **options: Any) -> tuple[Pool, list[int]]:
    """A pool of two workers after so many seconds, and how many requests its last runs had.

    Each caller asks again a tenth of a second after an answer, or a bit later where a run answered several. A
    run takes half a second, and half a second for each request.
    """
    pool = ready_pool(2, max_batch_size=8, **options)
    asks, ends, sizes, now = [(0.0, i) for i in range(callers)], list[Any](), list[int](), 0.0
    while now < until:
        now = min(pool.due, *(events[0][0] for events in (asks, ends) if events))
        orders: list[Order] = []
        if now == pool.due:
            orders = pool.handle_time(now)
            assert now < pool.due
        elif ends and ends[0][0] == now:
            _, worker, members, seconds = heappop(ends)
            orders = pool.handle_message(now, worker, reply(members[0][0], 0, seconds))
            for i, (request, _) in enumerate(members):
                heappush(asks, (now + 0.1 + 0.01 * i, request + callers))
        else:
            _, request = heappop(asks)
            orders = pool.handle_request(now, request, (1,), math.inf, join=("k", 1))
        for order in orders:
            if isinstance(order, SendRun):
                seconds = 0.5 + 0.5 * len(order.members)
                sizes.append(len(order.members))
                heappush(ends, (now + seconds, order.worker, order.members, seconds))
    return pool, sizes[-20:]


def test_workers_share_the_requests_of_callers_evenly_where_joining_pays() -> None:
    pool, sizes = busy_pool(8, 900.0)
    assert pool.joining.gain > 1.2
    assert {*sizes} <= {2, 3, 4}


@pytest.mark.parametrize("callers", [1, 2])
def test_requests_of_few_callers_wait_for_no_company(callers: int) -> None:
    pool, sizes = busy_pool(callers)
    assert sizes == [1] * 20
    latency = pool.table.latency.snapshot()
    assert latency.total == pytest.approx(latency.count)


def test_request_whose_company_does_not_come_goes_after_a_tenth_of_a_run() -> None:
    pool, _ = busy_pool(8, 900.0)
    for now in (901.0, 902.0, 903.0):
        for w in pool.workers:
            for run in list(w.runs):
                pool.handle_message(now, w.index, reply(run.members[0][0], 0, 2.5))
    assert pool.handle_request(910.0, 100_000, (1,), 20.0, join=("k", 1)) == []
    assert 910.1 < pool.due < 910.25
    assert pool.handle_time(pool.due) == [predict(0, (100_000, 0))]
    assert pool.handle_request(911.0, 100_001, (1,), 20.0, join=("k", 1)) == []
    pool.handle_cancel(911.1, 100_001)
    assert pool.handle_time(pool.due) == []
    assert pool.due > 920.0
