"""Tests of mcinfer/scheduler/scheduler.py: what becomes of requests, from their limit to the drained pool."""

import math
import tracemalloc

import pytest

from mcinfer.config import Limits
from mcinfer.errors import ClosedError, PredictTimeoutError, ProtocolError, QueueFullError
from mcinfer.protocol import Cancel, Exit, Message
from mcinfer.scheduler.dispatch import UNBOUNDED_RUN, Entry, RequestTable
from tests.orders import (
    EXITED,
    SIGKILL,
    TIMEOUTS,
    Failed,
    PoolClosed,
    Release,
    Send,
    Settle,
    build_error,
    built,
    end_hung,
    error,
    hello,
    outline,
    predict,
    ready_pool,
    reply,
    text,
)

JOIN = ("key", 1)


def test_request_beyond_the_queue_limit_is_refused_and_changes_nothing() -> None:
    pool = ready_pool(1, limits=Limits(queue=2, queue_bytes=8))
    pool.handle_request(0.0, 1, (1,), 10.0, size=4)
    with pytest.raises(QueueFullError, match=r"requests with 4 bytes .* this one has 5"):
        pool.handle_request(0.0, 2, (1,), 10.0, size=5)
    pool.handle_request(0.0, 2, (1, 1, 1, 1, 1), 10.0)
    with pytest.raises(QueueFullError, match=r"2 requests .* the limit \(Limits.queue\) is 2"):
        pool.handle_request(0.0, 3, (1,), 10.0)
    assert (pool.table.accepted, pool.table.in_flight, len(pool.queue)) == (2, 2, 5)
    pool.handle_message(1.0, 0, reply(1))
    assert pool.handle_request(1.0, 3, (1,), 10.0) == []


def test_request_that_runs_out_of_time_settles_then_its_worker_is_killed_after_the_grace() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 1, (1, 1, 1), 10.0)
    pool.handle_message(1.0, 0, reply(1, 0))
    assert pool.next_time() == 10.0
    assert pool.handle_time(9.99) == []
    actions = pool.handle_time(10.0)
    assert outline(actions) == [
        Failed(1, PredictTimeoutError),
        Send(worker=0, message=Cancel(request=1, shard=2)),
        Send(worker=1, message=Cancel(request=1, shard=1)),
    ]
    assert text(actions) == (
        "no answer within 10 s: shard 1 ran on worker 1 (cpu:1, pid 101), "
        "shard 2 ran on worker 0 (cpu:0, pid 100)"
    )
    assert pool.next_time() == 11.0
    assert pool.handle_message(10.5, 0, error(1, 2, "cancelled")) == []
    assert pool.handle_time(10.99) == []
    end_hung(pool, 11.0, 1)
    assert pool.handle_died(11.1, 1, SIGKILL) == [Release(request=1)]
    assert "did not stop in time" in pool.lifecycle.statistics()[1].last_error


def test_request_that_runs_out_of_time_in_the_queue_says_that_it_waited() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 100.0)
    pool.handle_request(0.0, 2, (1,), 10.0)
    actions = pool.handle_time(10.0)
    assert outline(actions) == [Failed(2, PredictTimeoutError), Release(request=2)]
    assert text(actions) == "no answer within 10 s: shard 0 waited for a worker"
    assert len(pool.queue) == 0


def test_cancelled_run_without_a_deadline_does_not_keep_its_worker_for_ever() -> None:
    """It did: a restart of all workers then never came to its end."""
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), math.inf)
    pool.handle_cancel(0.5, 1)
    end_hung(pool, 0.5 + UNBOUNDED_RUN + TIMEOUTS.cancel_grace, 0)


def test_message_that_may_not_come_is_refused_and_changes_nothing() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    messages: list[Message] = [hello(0), built(), reply(2), error(1, 1), build_error(), Exit()]
    for message in messages:
        with pytest.raises(ProtocolError):
            pool.handle_message(1.0, 0, message)
    assert pool.handle_message(2.0, 0, reply(1))[0] == Settle(request=1)
    assert pool.lifecycle.statistics()[0].failed == 0


def test_pool_that_drains_holds_no_request() -> None:
    pool = ready_pool(2, max_batch_size=8, max_delay=4.0)
    for request in (1, 2):
        assert pool.handle_request(0.0, request, (1,), 100.0, join=JOIN) == []
    assert pool.handle_drain(1.0, math.inf) == [predict(0, (1, 0), (2, 0))]
    actions = pool.handle_request(1.0, 3, (1,), 100.0, join=JOIN, limited=False)
    assert actions == [predict(1, (3, 0))]


def test_deadlines_of_answered_requests_do_not_pile_up() -> None:
    table = RequestTable()
    table.accept(Entry(-1, (1,), 0, 0.0, 0.0, 1000.0))
    tracemalloc.start()
    try:
        for number in range(10_000):
            entry = Entry(number, (1,), 0, 0.0, 0.0, 2000.0)
            table.accept(entry)
            table.close(entry, "succeeded", 0.0)
            del table.entries[number]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000  # bytes: a tenth of all of them
    assert table.next_deadline() == 1000.0


def test_pool_that_drains_takes_nothing_more_and_ends_with_its_last_answer() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 1, (1, 1, 1), 10.0)
    assert pool.handle_drain(1.0, math.inf) == []
    with pytest.raises(ClosedError, match="it finishes what it has"):
        pool.handle_request(1.0, 2, (1,), 10.0)
    with pytest.raises(ClosedError):
        pool.handle_restart(1.0)
    assert pool.health(1.0).state == "closing"
    assert pool.health(1.0).reasons == ("1 requests are still to be answered",)
    assert pool.handle_message(2.0, 0, reply(1, 0)) == [predict(0, (1, 2))]
    assert pool.handle_message(2.0, 1, reply(1, 1)) == []
    assert pool.handle_message(3.0, 0, reply(1, 2)) == [
        Settle(request=1),
        Release(request=1),
        Send(worker=0, message=Exit()),
        Send(worker=1, message=Exit()),
    ]
    assert pool.handle_died(3.1, 0, EXITED) == []
    assert pool.handle_died(3.1, 1, EXITED) == [PoolClosed()]
    assert pool.health(4.0).state == "closed"
