"""Tests of mcinfer/runtime/delivery.py: the thread that runs user code, one call after another."""

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from functools import partial
from time import monotonic

import pytest

from mcinfer.runtime.delivery import Delivery
from tests.planned_requests import A_POOL
from tests.process.waiting import wait_until

PATIENCE = 20.0


@pytest.fixture
def delivery() -> Iterator[Delivery]:
    made = Delivery(A_POOL)
    made.start()
    yield made
    made.close()
    made.wait(PATIENCE)
    assert not [t for t in threading.enumerate() if t.name == "mcinfer-delivery"]


def finish(delivery: Delivery) -> None:
    """Wait until the calls so far were made."""
    made = threading.Event()
    delivery.put(made.set)
    assert made.wait(PATIENCE)


def test_calls_are_made_one_after_another_in_its_thread_also_those_from_before() -> None:
    seen: list[object] = []
    delivery = Delivery(A_POOL)
    delivery.put(lambda: seen.append(threading.get_ident() == delivery.ident))
    assert seen == []
    delivery.start()
    for number in range(100):
        delivery.put(partial(seen.append, number))
    delivery.close()
    delivery.wait(PATIENCE)
    assert seen == [True, *range(100)]


@pytest.mark.parametrize("raised", [KeyError("theirs"), SystemExit(3)], ids=repr)
def test_call_that_raises_or_exits_is_logged_and_the_next_is_made(
    delivery: Delivery, caplog: pytest.LogCaptureFixture, raised: BaseException
) -> None:
    def fail() -> None:
        raise raised

    delivery.put(fail)
    finish(delivery)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("mcinfer.master", "ERROR")
    assert record.exc_info is not None
    assert record.exc_info[1] is raised


class Refusing(logging.Handler):
    """A user's handler that raises."""

    def handle(self, _: logging.LogRecord) -> bool:
        raise SystemExit


def test_handler_that_raises_does_not_end_the_thread(delivery: Delivery) -> None:
    log, handler = logging.getLogger("mcinfer.master"), Refusing()
    log.addHandler(handler)
    try:
        delivery.log(logging.WARNING, "something")
        delivery.put(lambda: 1 // 0)
        finish(delivery)
    finally:
        log.removeHandler(handler)


def test_exception_that_another_thread_raises_in_it_is_logged_and_ends_nothing(
    delivery: Delivery, caplog: pytest.LogCaptureFixture
) -> None:
    finish(delivery)
    thread, raised = ctypes.c_ulong(delivery.ident), ctypes.py_object(SystemExit)

    def is_logged() -> bool:  # within a call, the exception is that call's
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, raised)
        delivery.put(partial(int, 0))
        return (
            "a pool on cpu:0: an exception was raised in the thread of callbacks" in caplog.messages
        )

    wait_until(is_logged)
    finish(delivery)


def test_records_are_logged_with_their_pool_values_and_failures(
    delivery: Delivery, caplog: pytest.LogCaptureFixture
) -> None:
    failure = ValueError("no")
    delivery.log(logging.ERROR, "%s of %s", 1, 2, failure=failure)
    finish(delivery)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "a pool on cpu:0: 1 of 2")
    assert record.exc_info is not None
    assert record.exc_info[1] is failure


def test_call_that_does_not_return_does_not_hold_up_the_end() -> None:
    delivery, go = Delivery(A_POOL), threading.Event()
    delivery.start()
    delivery.put(go.wait)
    delivery.close()
    delivery.wait(0.01)
    go.set()
    delivery.wait(PATIENCE)


def test_waiting_in_the_thread_itself_returns_at_once(delivery: Delivery) -> None:
    start = monotonic()
    delivery.put(lambda: delivery.wait(PATIENCE))
    finish(delivery)
    assert monotonic() - start < PATIENCE / 2


@pytest.mark.parametrize("_", range(10))
def test_after_the_end_calls_are_made_by_the_caller_and_none_is_lost(_: int) -> None:
    delivery, seen, begin = Delivery(A_POOL), list[int](), threading.Barrier(2)
    delivery.start()

    def put() -> None:
        begin.wait()
        for number in range(20):
            delivery.put(partial(seen.append, number))

    thread = threading.Thread(target=put)
    thread.start()
    begin.wait()
    delivery.close()
    thread.join()
    delivery.wait(PATIENCE)
    assert sorted(seen) == [*range(20)]


def test_fork_makes_its_calls_itself(delivery: Delivery) -> None:
    finish(delivery)
    child = os.fork()
    if not child:
        seen: list[int] = []
        delivery.put(lambda: seen.append(1))
        os._exit(0 if seen == [1] else 1)
    assert os.waitpid(child, 0)[1] == 0
