"""More requests than a pool accepts: they are refused, or wait for their turn."""

import asyncio
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

from mcinfer import ClosedError, InvalidInputError, Limits, Master, QueueFullError, Timeouts
from mcinfer.config import INLINE
from mcinfer.inline import InlinePool
from mcinfer.statistics import RequestTrace, Statistics
from tests.process.models import FakeModel, act, assert_answers, fake_master, rows
from tests.process.scripts import PREAMBLE, Program
from tests.process.waiting import in_line, no_run, pids, running, stop, wait_until

ONE = Limits(queue=1, when_queue_full="wait")

SMALL = Limits(memory_bytes=1 << 20, when_full="raise")

BOTH = pytest.mark.parametrize("devices", [1, INLINE])

CALLER: ContextVar[str] = ContextVar("CALLER", default="main")


@contextmanager
def stopped(master: Master) -> Iterator[None]:
    """Its only worker stands still meanwhile, and what it was given with it."""
    if isinstance(master._loop, InlinePool):
        with no_run(master._loop):
            yield
        return
    [pid] = pids(master)
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def waiting(
    master: Master, place: int, function: Callable[[], object]
) -> Iterator["Future[object]"]:
    """A caller in a thread of its own, at that place of the line."""
    with running(function) as outcome:
        wait_until(lambda: in_line(master) == place)
        yield outcome


# Refusing.


@BOTH
def test_request_beyond_the_limit_is_refused_and_leaves_nothing(
    fake_model: FakeModel, devices: Any
) -> None:
    with fake_master(fake_model(), devices, limits=Limits(queue=2)) as master:
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
            assert counted(statistics) == {"queue_full": 3}
        for future in futures:
            assert_answers(future.result(20.0), rows(1))
        assert_answers(master.predict(rows(1)), rows(1))


def counted(statistics: Statistics) -> dict[str, int]:
    """How many requests were refused, by the reasons of which there were any."""
    return {reason: number for reason, number in statistics.refused.items() if number}


def test_refused_requests_are_counted_once_by_their_reasons(fake_model: FakeModel) -> None:
    with fake_master(fake_model(), 1, limits=SMALL) as master:
        for call in (master.predict, master.submit):
            with pytest.raises(InvalidInputError, match="do not fit"):
                call(rows(1 << 17))
        held = master.allocate({"x": (1 << 16, 4)})
        for call in (master.predict, master.submit):
            with pytest.raises(QueueFullError, match="memory_bytes"):
                call(rows(1))
        with pytest.raises(QueueFullError):
            asyncio.run(master.predict_async(rows(1)))
        del held
        master.predict(rows(1))
        statistics = master.statistics()
        assert counted(statistics) == {"too_large": 2, "memory": 3}
        assert "refused before: 3 memory, 2 too_large" in str(statistics)
        assert (statistics.accepted, statistics.failed) == (1, 0)


@BOTH
def test_wrong_requests_of_many_threads_are_all_counted(
    fake_model: FakeModel, devices: Any
) -> None:
    wrong: list[Any] = [{"y": rows(1)["x"]}, {"x": np.zeros((1, 5), np.float32)}, [1, 2]]

    def ask(call: Callable[..., object]) -> None:
        for inputs in wrong * 40:
            with pytest.raises(InvalidInputError):
                call(inputs)

    with fake_master(fake_model(when={"-2": "invalid"}), devices) as master:
        calls = [master.predict, master.submit] * 4
        threads = [threading.Thread(target=ask, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(InvalidInputError):
            master.predict(rows(1), outputs=["x"])
        with pytest.raises(InvalidInputError):  # from a run
            master.predict(act(-2))
        statistics = master.statistics()
        assert counted(statistics) == {"invalid": 40 * len(wrong) * len(calls) + 1}
        assert (statistics.accepted, statistics.failed) == (1, 1)


# Waiting.


@BOTH
def test_callers_wait_for_room_and_are_admitted_first_come_first_served(
    fake_model: FakeModel, devices: Any
) -> None:
    traces: list[tuple[str, RequestTrace]] = []

    def hook(trace: RequestTrace) -> None:
        traces.append((CALLER.get(), trace))

    def ask(name: str, function: Callable[..., object]) -> object:
        CALLER.set(name)
        outcome = function(rows(2))
        return outcome.result(20.0) if isinstance(outcome, Future) else outcome

    with fake_master(fake_model(), devices, limits=ONE, trace=hook) as master:
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
    traces.sort(key=lambda item: item[1].request)
    assert [name for name, _ in traces] == ["main", *"abcdef"]
    # Never more than one was under way, and each had waited since its call.
    for (_, before), (_, after) in itertools.pairwise(traces):
        assert after.called < before.settled <= after.queued


def test_caller_that_waits_in_vain_is_refused_at_its_own_time_out(fake_model: FakeModel) -> None:
    with fake_master(fake_model(), 1, limits=ONE) as master:
        with stopped(master):
            first = master.submit(rows(1))
            with waiting(master, 1, lambda: master.predict(rows(1), timeout=30.0)) as patient:
                # Behind one that waits for longer.
                with pytest.raises(QueueFullError, match=r"Limits\.queue\) is 1"):
                    master.predict(rows(1), timeout=0.3)
                assert in_line(master) == 1
                with pytest.raises(QueueFullError):
                    master.submit(rows(1), timeout=0.0)
                os.kill(pids(master)[0], signal.SIGCONT)
                assert_answers(patient.result(20.0), rows(1))  # type: ignore[arg-type]
        assert_answers(first.result(20.0), rows(1))
        statistics = master.statistics()
        assert (statistics.accepted, statistics.succeeded) == (2, 2)
        wait_until(lambda: master.statistics().memory_used_bytes <= 4096)


def test_callers_that_wait_are_freed_by_close(fake_model: FakeModel) -> None:
    with fake_master(fake_model(), 1, limits=ONE) as master:
        stop(pids(master)[0])
        first = master.submit(rows(1))
        with (
            waiting(master, 1, lambda: master.predict(rows(1))) as one,
            waiting(master, 2, lambda: master.submit(rows(1))) as two,
            waiting(master, 3, lambda: master.predict(rows(1))) as three,
        ):
            master.close(0.0)
            for outcome in (first, one, two, three):
                assert isinstance(outcome.exception(20.0), ClosedError)


@BOTH
def test_callback_does_not_wait_for_room(fake_model: FakeModel, devices: Any) -> None:
    limits = Limits(queue=2, when_queue_full="wait")
    outcome: Future[QueueFullError] = Future()
    endless = Timeouts(predict=math.inf)  # a call that waited would not return
    with fake_master(fake_model(), devices, limits=limits, timeouts=endless) as master:

        def fill(_: object) -> None:
            with stopped(master):
                try:
                    for _ in range(3):
                        master.submit(rows(1))
                except QueueFullError as exc:
                    outcome.set_result(exc)

        with stopped(master):
            master.submit(rows(1)).add_done_callback(fill)
        outcome.result(20.0)
        wait_until(lambda: master.statistics().succeeded == 3)


@BOTH
def test_event_loop_goes_on_while_its_tasks_wait_for_room(
    fake_model: FakeModel, devices: Any
) -> None:
    with fake_master(fake_model(), devices, limits=ONE) as master:

        async def ask() -> None:
            with stopped(master):
                tasks = [asyncio.create_task(master.predict_async(rows(n))) for n in (1, 2, 3)]
                cancelled = asyncio.create_task(master.predict_async(rows(4)))
                while in_line(master) < 3:
                    await asyncio.sleep(0.005)
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
                while in_line(master) > 2 and devices != INLINE:  # there a thread goes on to wait
                    await asyncio.sleep(0.005)
                assert not any(task.done() for task in tasks)
            for count, task in enumerate(tasks, 1):
                assert_answers(await asyncio.wait_for(task, 20.0), rows(count))

        asyncio.run(ask())
        # That thread may have run it before its future could be cancelled.
        assert master.statistics().succeeded in (3, 3 + (devices == INLINE))


def test_ctrl_c_while_waiting_leaves_the_line_in_order(fake_model: FakeModel) -> None:
    text = """
import threading
limits = mcinfer.Limits(queue=1, when_queue_full="wait")
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never", limits=limits) as master:
    def standing(count):
        while len(master._loop.admission.places.waiting) != count:
            time.sleep(0.002)
    def ask():
        master.predict(X, timeout=40.0)
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
    say(statistics.accepted, statistics.succeeded, len(master._loop.admission.places.waiting))
"""
    with Program(PREAMBLE + text, fake_model()) as program:
        assert program.line() == "all wait"
        program.interrupt()
        assert program.line() == "2 wait"
        assert program.line() == "3 3 0"
        ended = program.wait()
        assert (ended.status, ended.err) == (0, "")
