"""More requests than a pool is to take on: refused, or waiting for their turn; and nobody starves."""

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar

import pytest

from mcinfer import ClosedError, Limits, Master, QueueFullError, ReadyTimeoutError
from mcinfer.statistics import RequestTrace
from tests.process.models import FakeModel, assert_answers, rows
from tests.process.scripts import PREAMBLE, Program
from tests.process.waiting import pids, running, stop, wait_until

ONE_ROW = 2 * 4 * 4
"""Bytes of a request for one row of the usual model, and of its answer."""

ONE = Limits(queue=1, when_queue_full="wait")

CALLER: ContextVar[str] = ContextVar("CALLER", default="nobody")


@contextmanager
def stopped(master: Master) -> Iterator[None]:
    """Its only worker stands still meanwhile, and what it was given with it."""
    [pid] = pids(master)
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def in_line(master: Master) -> int:
    """How many callers wait for room in the queue."""
    return len(master._loop._line)


@contextmanager
def waiting(
    master: Master, place: int, function: Callable[[], object]
) -> Iterator["Future[object]"]:
    """A caller in a thread of its own, at that place of the line."""
    with running(function) as outcome:
        wait_until(lambda: in_line(master) == place)
        yield outcome


# Refusing.


def test_request_beyond_the_limit_is_refused_and_leaves_nothing(fake_model: FakeModel) -> None:
    with Master(fake_model(), 1, engine="fake", verify="never", limits=Limits(queue=2)) as master:
        with stopped(master):
            futures = [master.submit(rows(1)) for _ in range(2)]
            used = master.statistics().memory_used_bytes
            for call in (master.submit, master.predict):
                with pytest.raises(QueueFullError, match=r"Limits\.queue\) is 2"):
                    call(rows(1))
            with pytest.raises(QueueFullError):
                asyncio.run(master.predict_async(rows(1)))
            statistics = master.statistics()
            assert (statistics.accepted, statistics.memory_used_bytes) == (2, used)
        for future in futures:
            assert_answers(future.result(5.0), rows(1))
        assert_answers(master.predict(rows(1)), rows(1))


def test_request_beyond_the_limit_in_bytes_is_refused_and_a_large_one_goes_alone(
    fake_model: FakeModel,
) -> None:
    limits = Limits(queue_bytes=10 * ONE_ROW)
    with Master(fake_model(), 1, engine="fake", verify="never", limits=limits) as master:
        assert_answers(master.predict(rows(1000)), rows(1000))
        with stopped(master):
            first = master.submit(rows(7))
            with pytest.raises(QueueFullError, match=r"this one has 128: .*queue_bytes\) is 320"):
                master.submit(rows(4))
            second = master.submit(rows(3))
            assert master.statistics().in_flight_bytes == 10 * ONE_ROW
        assert_answers(first.result(5.0), rows(7))
        assert_answers(second.result(5.0), rows(3))
        assert master.statistics().in_flight_bytes == 0


# Waiting.


def test_callers_wait_for_room_and_are_admitted_first_come_first_served(
    fake_model: FakeModel,
) -> None:
    traces: list[tuple[str, RequestTrace]] = []

    def hook(trace: RequestTrace) -> None:
        traces.append((CALLER.get(), trace))

    def ask(name: str, function: Callable[..., object]) -> object:
        CALLER.set(name)
        outcome = function(rows(2))
        return outcome.result(10.0) if isinstance(outcome, Future) else outcome

    with Master(fake_model(), 1, engine="fake", verify="never", limits=ONE, trace=hook) as master:
        with stopped(master):
            master.submit(rows(1))
            threads = []
            for place, name in enumerate("abcdef", 1):
                call = master.predict if place % 2 else master.submit
                thread = threading.Thread(target=ask, args=(name, call))
                thread.start()
                threads.append(thread)
                wait_until(lambda n=place: in_line(master) == n)  # type: ignore[misc]
            assert master.statistics().accepted == 1
        for thread in threads:
            thread.join()
        assert in_line(master) == 0
        assert master.statistics().succeeded == 7
        wait_until(lambda: len(traces) == 7)
    traces.sort(key=lambda told: told[1].request)
    assert [name for name, _ in traces] == ["nobody", *"abcdef"]
    # Never more than one was under way, and each had waited since its call.
    for (_, before), (_, after) in itertools.pairwise(traces):
        assert after.called < before.settled <= after.queued


def test_callers_wait_for_room_in_bytes(fake_model: FakeModel) -> None:
    limits = Limits(queue_bytes=10 * ONE_ROW, when_queue_full="wait")
    with (
        Master(fake_model(), 1, engine="fake", verify="never", limits=limits) as master,
        stopped(master),
    ):
        first = master.submit(rows(8))
        with (
            waiting(master, 1, lambda: master.predict(rows(50))) as large,
            waiting(master, 2, lambda: master.predict(rows(1))) as small,
        ):
            # There would be room for the small one, but it is not its turn.
            assert master.statistics().accepted == 1
            os.kill(pids(master)[0], signal.SIGCONT)
            assert_answers(first.result(5.0), rows(8))
            assert_answers(large.result(5.0), rows(50))  # type: ignore[arg-type]
            assert_answers(small.result(5.0), rows(1))  # type: ignore[arg-type]


def test_caller_that_waits_in_vain_is_refused_at_its_own_time_out(fake_model: FakeModel) -> None:
    with Master(fake_model(), 1, engine="fake", verify="never", limits=ONE) as master:
        with stopped(master):
            first = master.submit(rows(1))
            with waiting(master, 1, lambda: master.predict(rows(1), timeout=30.0)) as patient:
                # Behind one that waits for longer.
                start = time.monotonic()
                with pytest.raises(QueueFullError, match=r"Limits\.queue\) is 1"):
                    master.predict(rows(1), timeout=0.3)
                assert 0.3 <= time.monotonic() - start < 1.5
                assert in_line(master) == 1
                with pytest.raises(QueueFullError):
                    master.submit(rows(1), timeout=0.0)
                os.kill(pids(master)[0], signal.SIGCONT)
                assert_answers(patient.result(5.0), rows(1))  # type: ignore[arg-type]
        assert_answers(first.result(5.0), rows(1))
        statistics = master.statistics()
        assert (statistics.accepted, statistics.succeeded) == (2, 2)
        wait_until(lambda: master.statistics().memory_used_bytes <= 4096)


def test_callers_that_wait_are_freed_by_close(fake_model: FakeModel) -> None:
    with Master(fake_model(), 1, engine="fake", verify="never", limits=ONE) as master:
        stop(pids(master)[0])
        first = master.submit(rows(1))
        with (
            waiting(master, 1, lambda: master.predict(rows(1))) as one,
            waiting(master, 2, lambda: master.submit(rows(1))) as two,
            waiting(master, 3, lambda: master.predict(rows(1))) as three,
        ):
            master.close(0.0)
            for outcome in (first, one, two, three):
                assert isinstance(outcome.exception(5.0), ClosedError)


def test_callback_does_not_wait_for_room(fake_model: FakeModel) -> None:
    limits = Limits(queue=2, when_queue_full="wait")
    outcome: Future[float] = Future()
    with Master(fake_model(), 1, engine="fake", verify="never", limits=limits) as master:

        def fill(_: object) -> None:
            with stopped(master):
                start = time.monotonic()
                try:
                    for _ in range(3):
                        master.submit(rows(1))
                except QueueFullError:
                    outcome.set_result(time.monotonic() - start)

        with stopped(master):
            master.submit(rows(1)).add_done_callback(fill)
        assert outcome.result(5.0) < 1.0
        wait_until(lambda: master.statistics().succeeded == 3)


def test_event_loop_goes_on_while_its_tasks_wait_for_room(fake_model: FakeModel) -> None:
    with Master(fake_model(), 1, engine="fake", verify="never", limits=ONE) as master:

        async def ask() -> None:
            with stopped(master):
                tasks = [asyncio.create_task(master.predict_async(rows(n))) for n in (1, 2, 3)]
                while in_line(master) < 2:
                    await asyncio.sleep(0.005)
                assert not any(task.done() for task in tasks)
            for count, task in enumerate(tasks, 1):
                assert_answers(await asyncio.wait_for(task, 5.0), rows(count))

        asyncio.run(ask())
        assert master.statistics().succeeded == 3


def test_task_that_is_cancelled_while_it_waits_leaves_the_others_their_turn(
    fake_model: FakeModel,
) -> None:
    with Master(fake_model(), 1, engine="fake", verify="never", limits=ONE) as master:

        async def ask() -> None:
            with stopped(master):
                first = asyncio.create_task(master.predict_async(rows(1)))
                await asyncio.sleep(0)
                given_up = asyncio.create_task(master.predict_async(rows(2)))
                while in_line(master) < 1:
                    await asyncio.sleep(0.005)
                behind = asyncio.create_task(master.predict_async(rows(3)))
                while in_line(master) < 2:
                    await asyncio.sleep(0.005)
                given_up.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await given_up
            assert_answers(await asyncio.wait_for(first, 5.0), rows(1))
            assert_answers(await asyncio.wait_for(behind, 5.0), rows(3))

        asyncio.run(ask())
        statistics = master.statistics()
        # What its thread still queued was cancelled, unless a worker was faster.
        assert statistics.succeeded - 2 in (0, 1)
        assert (statistics.failed, statistics.in_flight) == (0, 0)
        assert statistics.accepted == statistics.succeeded + statistics.cancelled


def test_ctrl_c_while_waiting_leaves_the_line_in_order(fake_model: FakeModel) -> None:
    text = """
import threading
limits = mcinfer.Limits(queue=1, when_queue_full="wait")
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never", limits=limits) as master:
    def standing(count):
        while len(master._loop._line) != count:
            time.sleep(0.002)
    def ask():
        master.predict(X, timeout=10.0)
    def come():
        standing(2)
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
        standing(3)
        say("all wait")
    [pid] = [worker.pid for worker in master.statistics().workers]
    os.kill(pid, signal.SIGSTOP)
    first = master.submit(X)
    threads = [threading.Thread(target=ask), threading.Thread(target=come)]
    threads[0].start()
    standing(1)
    threads[1].start()
    try:
        master.predict(X)
    except KeyboardInterrupt:
        standing(2)
        say("2 wait")
    os.kill(pid, signal.SIGCONT)
    for thread in threads:
        thread.join()
    statistics = master.statistics()
    say(statistics.accepted, statistics.succeeded, len(master._loop._line))
"""
    with Program(PREAMBLE + text, fake_model()) as program:
        assert program.line() == "all wait"
        program.interrupt()
        assert program.line() == "2 wait"
        assert program.line() == "3 3 0"
        ended = program.wait(timeout=5.0)
        assert (ended.status, ended.err) == (0, "")


def test_workers_are_restarted_and_memory_is_given_while_the_queue_is_full(
    fake_model: FakeModel,
) -> None:
    limits = Limits(queue=2)
    with Master(fake_model(), 1, engine="fake", verify="never", limits=limits) as master:
        with stopped(master):
            waiting = [master.submit(rows(1)) for _ in range(2)]
            with pytest.raises(QueueFullError):
                master.submit(rows(1))
            with pytest.raises(ReadyTimeoutError):
                master.restart_workers(timeout=0.05)
            assert master.allocate({"x": (1, 4)})["x"].shape == (1, 4)
        for future in waiting:
            assert_answers(future.result(10.0), rows(1))
