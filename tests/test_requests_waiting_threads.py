"""Tests of threads that wait in the place of others."""

import asyncio
import math
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from functools import partial
from time import monotonic

import pytest

from mcinfer.errors import PredictTimeoutError
from mcinfer.requests.waiting_threads import WaitingThreads
from tests.process.waiting import wait_until

PATIENCE = 20.0
LATE = PredictTimeoutError("the thread is held up")


@pytest.fixture
def threads() -> Iterator[WaitingThreads]:
    made = WaitingThreads()
    yield made
    made.close(wait=True)


def running() -> int:
    return sum(thread.name.startswith("mcinfer-wait") for thread in threading.enumerate())


def test_call_is_answered_by_its_result_or_its_exception(threads: WaitingThreads) -> None:
    assert threads.submit(lambda: 5).result(PATIENCE) == 5
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(PATIENCE)


def test_neither_a_task_nor_the_end_waits_for_a_thread_that_is_held_up(
    threads: WaitingThreads,
) -> None:
    go = threading.Event()
    with pytest.raises(PredictTimeoutError, match="held up"):
        asyncio.run(threads.answer(go.wait, monotonic(), LATE))
    held = WaitingThreads()
    blocked = held.submit(go.wait)
    held.close(wait=True)
    assert not blocked.done()
    go.set()
    assert blocked.result(PATIENCE)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(threads.answer(lambda: 1 // 0, math.inf, LATE))
    assert asyncio.run(threads.answer(lambda: 5, monotonic() + PATIENCE, LATE)) == 5


def test_threads_end_with_their_calls_and_hold_nothing(threads: WaitingThreads) -> None:
    class Thing:
        pass

    thing = Thing()
    alive = weakref.ref(thing)
    threads.submit(partial(id, thing)).result(PATIENCE)
    del thing
    wait_until(lambda: alive() is None)
    wait_until(lambda: running() == 0)
    assert threads.submit(lambda: 5).result(PATIENCE) == 5


def test_calls_beyond_the_threads_are_made_in_their_turn(threads: WaitingThreads) -> None:
    go, order = threading.Event(), list[int]()
    blocked = [threads.submit(lambda: go.wait(PATIENCE)) for _ in range(8)]
    late = [threads.submit(lambda i=i: order.append(i)) for i in range(20)]  # type: ignore[misc]
    dropped = threads.submit(lambda: order.append(99))
    assert running() == 8
    assert dropped.cancel()
    go.set()
    assert all(future.result(PATIENCE) for future in blocked)
    for future in late:
        future.result(PATIENCE)
    with pytest.raises(CancelledError):
        dropped.result(PATIENCE)
    assert sorted(order) == [*range(20)]
    wait_until(lambda: running() == 0)


def test_call_after_the_end_is_made_by_the_caller() -> None:
    threads = WaitingThreads()
    threads.submit(lambda: None).result(PATIENCE)
    threads.close(wait=True)
    threads.close(wait=True)
    assert running() == 0
    here = threading.get_ident()
    assert threads.submit(threading.get_ident).result(0) == here
    assert running() == 0


def test_call_may_close_what_it_runs_in() -> None:
    threads = WaitingThreads()
    assert threads.submit(lambda: threads.close(wait=True)).result(PATIENCE) is None
    wait_until(lambda: running() == 0)
