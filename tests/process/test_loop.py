"""The loop: callers beside one another, faults in it, and waits that must end."""

import logging
import math
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import psutil
import pytest

from mcinfer import (
    BuildError,
    ClosedError,
    Limits,
    McinferError,
    PredictTimeoutError,
    QueueFullError,
    Timeouts,
)
from mcinfer.requests.request import OutcomeFuture
from tests.process.models import FakeModel, act, assert_answers, fake_master, rows
from tests.process.waiting import (
    call_in_loop,
    in_line,
    loop_of,
    pids,
    running,
    settle,
    stop,
    wait_until,
)

PATIENCE = 40.0
ONE_ROW = 2 * 4 * 4
"""Bytes of a request for one row of the usual model, and of its answer."""


# Callers beside one another.


def test_caller_whose_time_is_over_in_the_line_makes_way_at_once(fake_model: FakeModel) -> None:
    limits = Limits(queue_bytes=4 * ONE_ROW, when_queue_full="wait")
    with fake_master(fake_model(), 2, limits=limits) as master:
        [first, _] = pids(master)
        stop(first)
        stuck = master.submit(rows(1))
        with (
            running(lambda: master.predict(rows(4), shards=1, timeout=0.5)) as large,
            suppress(QueueFullError),
        ):
            wait_until(lambda: in_line(master) == 1)
            with running(lambda: master.predict(rows(1), shards=1, timeout=PATIENCE)) as small:
                wait_until(lambda: in_line(master) == 2)
                with pytest.raises(QueueFullError):
                    large.result(PATIENCE)
                assert_answers(small.result(PATIENCE), rows(1))  # type: ignore[arg-type]
        assert not stuck.done()
        os.kill(first, signal.SIGCONT)
        assert_answers(stuck.result(PATIENCE), rows(1))


# Waits.


def test_answer_of_a_loop_that_stands_still_is_an_error_and_never_an_array(
    fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcinfer.runtime.inbox._CALLER_PATIENCE", 0.1)
    with fake_master(fake_model(), 1) as master:
        master.predict(rows(1))
        goes_on = threading.Event()
        call_in_loop(master, lambda: goes_on.wait(PATIENCE))
        try:
            with pytest.raises(PredictTimeoutError, match="loop"):
                master.predict(rows(1), timeout=0.1)
        finally:
            goes_on.set()
        assert_answers(master.predict(rows(1)), rows(1))


def test_draining_pool_ends_when_the_last_request_is_cancelled_and_its_worker_hangs(
    fake_model: FakeModel,
) -> None:
    timeouts = Timeouts(predict=float("inf"), close=0.2)
    with fake_master(fake_model(), 1, timeouts=timeouts) as master:
        stop(pids(master)[0])
        future = master.submit(rows(1))
        with running(lambda: master.close(drain=True)) as closed:
            wait_until(lambda: master.health().state == "closing")
            future.cancel()
            try:
                closed.result(PATIENCE)
            finally:
                master.close(0.0)


@pytest.mark.parametrize(
    ("name", "runs", "error", "words"),
    [
        ("loop", True, KeyboardInterrupt(), None),
        ("loop", False, KeyboardInterrupt(), None),
        ("delivery", True, KeyboardInterrupt(), None),
        ("loop", False, RuntimeError("can't start new thread"), "new thread"),
    ],
)
def test_start_leaves_nothing_if_a_thread_fails_to_start_or_is_interrupted(
    fake_model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    runs: bool,
    error: BaseException,
    words: str | None,
) -> None:
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == f"mcinfer-{name}":
            if runs:
                start(thread)
            raise type(error)(*error.args)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    master = fake_master(fake_model(), 1)
    with pytest.raises(BuildError if words else KeyboardInterrupt, match=words):
        master.start()
    with pytest.raises(ClosedError):
        master.predict(rows(1))


def test_futures_that_were_dropped_hold_no_memory_while_a_callback_does_not_return(
    fake_model: FakeModel,
) -> None:
    enough = threading.Event()
    limits = Limits(memory_bytes=1 << 20, when_full="wait")
    with fake_master(fake_model(), 1, limits=limits) as master:
        master.submit(rows(1)).add_done_callback(lambda _: enough.wait(PATIENCE))
        try:
            for _ in range(6):  # of 320 KB each, and as much for the answer
                future = master.submit(rows(20_000), timeout=PATIENCE / 2)
                wait_until(future.done)
                del future
        finally:
            enough.set()


def test_caller_that_is_interrupted_while_it_waits_for_memory_holds_up_no_other(
    fake_model: FakeModel,
) -> None:
    limits = Limits(memory_bytes=1 << 20, when_full="wait")
    with fake_master(fake_model(), 2, limits=limits) as master:
        [first, _] = pids(master)
        stop(first)
        stuck = master.submit(rows(1))
        held = master.allocate({"x": (40_000, 4)})

        def handler(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, handler)
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            master.predict(rows(15_000), shards=1, timeout=math.inf)
        timer.join()
        signal.signal(signal.SIGUSR1, before)
        assert_answers(master.predict(rows(100), shards=1, timeout=PATIENCE), rows(100))
        assert not stuck.done()
        del held
        os.kill(first, signal.SIGCONT)
        assert_answers(stuck.result(PATIENCE), rows(1))


# Locks that others hold.


def test_lock_of_the_logging_module_holds_up_no_restart(fake_model: FakeModel) -> None:
    with fake_master(fake_model(), 1) as master:
        [pid] = pids(master)
        held, enough = threading.Event(), threading.Event()

        def hold() -> None:
            lock = logging._lock  # type: ignore[attr-defined]
            with lock:  # as dictConfig does while it makes a user's handlers
                held.set()
                enough.wait(PATIENCE)

        with running(hold):
            assert held.wait(PATIENCE)
            try:
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: pids(master) not in ([], [pid]))
                assert not enough.is_set()
            finally:
                enough.set()
        master.wait_ready(PATIENCE)


# Finalizers that the collector runs in the loop.


def test_finalizer_in_the_loop_that_would_wait_is_refused_at_once(fake_model: FakeModel) -> None:
    limits = Limits(queue=1, when_queue_full="wait", when_full="wait")
    with fake_master(fake_model(when={"-1": "sleep:600"}), 1, limits=limits) as master:
        assert_answers(master.predict(rows(1)), rows(1))  # so that memory for one more is at hand
        future = master.submit(act(-1.0))
        calls: list[Callable[[], object]] = [
            lambda: master.submit(rows(1)),
            lambda: master.allocate({"x": (3, 4)}),
            lambda: future.result(PATIENCE),
        ]
        for call in calls:
            outcome: Future[object] = Future()
            call_in_loop(master, partial(settle, outcome, call))
            with pytest.raises(McinferError):
                outcome.result(PATIENCE)
            assert not future.done()
        assert future.cancel()


def test_loop_that_fails_leaves_no_caller_waiting_and_no_process(
    fake_model: FakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of mcinfer itself: here a call that ends the loop's thread, after it has settled a request."""
    caplog.set_level(logging.CRITICAL + 1, "mcinfer.master")  # a record would hold the traceback
    with fake_master(fake_model(run="sleep:30"), 2) as master, ThreadPoolExecutor(1) as caller:
        workers = pids(master)
        first, *waiting = [master.submit(act(1.0)) for _ in range(9)]
        assert isinstance(first, OutcomeFuture)
        outcome, once = first.outcome, [SystemExit()]
        answer = caller.submit(first.result, 2 * PATIENCE)
        wait_until(lambda: bool(outcome._locks), PATIENCE)

        def fail() -> None:
            if once:
                loop_of(master).inbox.admission.places.cancel(outcome)
                raise once.pop()

        call_in_loop(master, fail)
        with pytest.raises(CancelledError):
            answer.result(PATIENCE)
        for future in waiting:
            with pytest.raises(ClosedError, match="the master failed"):
                future.result(PATIENCE)
        wait_until(lambda: not any(map(psutil.pid_exists, workers)), PATIENCE)
        statistics = master.statistics()
        assert (statistics.in_flight, statistics.in_flight_bytes, statistics.failed) == (0, 0, 8)
        assert statistics.health.state == "failed"
        with pytest.raises(ClosedError, match="is closed"):
            master.restart_workers()


def test_finalizer_of_a_master_whose_loop_has_failed_does_nothing_of_the_loops(
    fake_model: FakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mcinfer.master")
    master = fake_master(fake_model(), 1).start()
    loop, once = loop_of(master), [SystemExit()]

    def fail() -> None:
        if once:
            raise once.pop()

    call_in_loop(master, fail)
    wait_until(lambda: loop.inbox.gone)
    loop.abandon()
    master.close()
    here = threading.current_thread().name
    assert not [record for record in caplog.records if record.threadName == here]
    caplog.clear()  # one holds the traceback
