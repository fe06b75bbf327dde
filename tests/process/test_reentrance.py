"""Code of users within calls of the master: handlers of signals and of the log, trace hooks, forks."""

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from typing import Any
from weakref import ref

import pytest

from mcinfer import (
    ClosedError,
    InvalidInputError,
    Limits,
    Master,
    PredictError,
    QueueFullError,
    RestartPolicy,
    Timeouts,
    WorkerDiedError,
)
from mcinfer.config import INLINE
from tests.process.models import FakeModel, Inputs, act, assert_answers, fake_master, rows
from tests.process.waiting import pids, settle, wait_for_states, wait_until

BAD = -1.0
"""The first number of the request that a test is about."""

PATIENCE = 40.0


@contextmanager
def sigterm(seconds: float, handler: Callable[[], object]) -> Iterator[None]:
    """This process gets SIGTERM after so many seconds, and calls the handler."""
    before = signal.signal(signal.SIGTERM, lambda *_: handler())
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
        timer.join()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("workers", [1, 2])
def test_failed_requests_free_their_memory_at_once(fake_model: FakeModel, workers: int) -> None:
    limits = Limits(memory_bytes=4 << 20)
    model = fake_model(when={"-1": "fail"})

    async def fail_async(master: Master) -> None:
        with pytest.raises(PredictError):
            await master.predict_async(act(BAD, 50_000))

    with ExitStack() as stack:
        gc.disable()
        stack.callback(gc.enable)
        master = stack.enter_context(fake_master(model, workers, limits=limits))
        kept = []
        for _ in range(4):
            with pytest.raises(PredictError) as caught:
                master.predict(act(BAD, 100_000), timeout=PATIENCE)
            kept.append(caught)  # nor does an error that the user keeps hold it
            asyncio.run(fail_async(master))
            wait_until(lambda: master.statistics().memory_used_bytes == 0)
        assert len(kept) == 4


@pytest.mark.parametrize("devices", [1, INLINE])
def test_requests_that_are_refused_hold_no_inputs(fake_model: FakeModel, devices: Any) -> None:
    async def ask(inputs: Inputs) -> None:
        with pytest.raises(QueueFullError):
            await master.predict_async(inputs, timeout=0.05)

    def submit(inputs: Inputs) -> None:
        with pytest.raises(QueueFullError):
            master.submit(inputs, timeout=0.05)

    limits = Limits(queue=1, when_queue_full="wait")
    model = fake_model(when={"-1": "sleep:60"})
    with ExitStack() as stack:
        gc.disable()
        stack.callback(gc.enable)
        master = stack.enter_context(fake_master(model, devices, limits=limits))
        held = master.submit(act(BAD))
        calls: list[Callable[[Inputs], None]] = [submit, lambda inputs: asyncio.run(ask(inputs))]
        for call in calls:
            inputs = rows(1)
            array = ref(inputs["x"])
            call(inputs)
            del inputs
            wait_until(lambda array=array: array() is None)  # type: ignore[misc]
        assert held.cancel()


@pytest.mark.parametrize("devices", [1, INLINE])
def test_handler_of_a_signal_may_close_the_master_in_any_call(
    fake_model: FakeModel, devices: Any
) -> None:
    master = fake_master(fake_model(), devices).start()
    with sigterm(0.05, master.close), suppress(ClosedError):
        while master.health().state != "closed":
            master.statistics()
            master.predict(rows(2))
    assert master.health().state == "closed"


@pytest.mark.parametrize("devices", [1, INLINE])
def test_handler_of_a_signal_may_drain_while_its_thread_waits_for_an_answer(
    fake_model: FakeModel, devices: Any
) -> None:
    master = fake_master(fake_model(when={"-1": "sleep:0.4"}), devices).start()
    with sigterm(0.1, lambda: master.close(drain=True)):
        assert_answers(master.predict(act(BAD), timeout=PATIENCE), act(BAD))
    # A handler cannot wait for a run of its own thread.
    wait_until(lambda: master.health().state == "closed")


@pytest.mark.parametrize("devices", [2, INLINE])
def test_handler_of_a_signal_may_wait_for_an_answer_while_its_thread_does(
    fake_model: FakeModel, devices: Any
) -> None:
    """Whichever answer comes first: the one that was interrupted, or that of the handler."""
    model = fake_model(when={"-1": "sleep:0.3", "2": "sleep:0.6"})
    with fake_master(model, devices) as master:
        calls: list[Callable[[Inputs], Inputs]] = [
            partial(master.predict, timeout=PATIENCE, shards=1),
            lambda inputs: master.submit(inputs).result(PATIENCE),
        ]
        for ask, inner in product(calls, (1.0, 2.0)):
            answer: Future[Inputs] = Future()
            with sigterm(0.1, partial(settle, answer, partial(ask, act(inner)))):
                assert_answers(ask(act(BAD)), act(BAD))
            assert_answers(answer.result(0.0), act(inner))


def test_handler_of_a_signal_may_be_refused_while_its_thread_counts_a_refusal(
    fake_model: FakeModel,
) -> None:
    class Interrupted(dict[Any, int]):
        def __setitem__(self, reason: Any, count: int) -> None:
            super().__setitem__(reason, count)
            if reason == "invalid":
                os.kill(os.getpid(), signal.SIGTERM)

    def ask() -> None:
        with pytest.raises(WorkerDiedError):
            master.predict(rows(1), timeout=PATIENCE)
        handled.append(master.statistics().refused["no_worker"])

    handled: list[int] = []
    restart = RestartPolicy(budget=0, backoff_limit=PATIENCE)
    with fake_master(fake_model(when={"-1": "kill"}), 1, restart=restart) as master:
        with pytest.raises(WorkerDiedError):
            master.predict(act(BAD), timeout=PATIENCE)
        master._inbox.refused = Interrupted(master._inbox.refused)
        before = signal.signal(signal.SIGTERM, lambda *_: ask())
        try:
            with pytest.raises(InvalidInputError):
                master.predict({})
        finally:
            signal.signal(signal.SIGTERM, before)
        assert handled == [1]


def test_handler_of_the_log_may_ask_how_the_pool_is(fake_model: FakeModel) -> None:
    class Asks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            asked.append((record.getMessage(), master.health(), master.statistics()))

    asked: list[object] = []
    handler = Asks(logging.WARNING)
    logging.getLogger("mcinfer.master").addHandler(handler)
    try:
        with fake_master(fake_model(), 2) as master:
            os.kill(pids(master)[0], signal.SIGKILL)
            wait_until(lambda: len(asked) >= 2)  # the death, and the change of health
            wait_for_states(master, "ready", "ready")
            assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))
    finally:
        logging.getLogger("mcinfer.master").removeHandler(handler)


def test_master_that_was_made_before_a_fork_is_not_started_after_it(fake_model: FakeModel) -> None:
    master = fake_master(fake_model(), 1)
    assert in_fork(master.start) == "ClosedError"
    with master:
        assert_answers(master.predict(rows(1)), rows(1))
        assert in_fork(lambda: master.wait_ready(1.0)) == "ClosedError"


def in_fork(call: Callable[[], object]) -> str:
    """The name of what the call raises in a forked process; empty if it does not."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            name = b""
            try:
                call()
            except BaseException as exc:
                name = type(exc).__name__.encode()
            os.write(writing, name)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as end:
        name = end.read()
    os.waitpid(pid, 0)
    return name.decode()


def test_second_close_may_be_less_patient_than_the_first(fake_model: FakeModel) -> None:
    model = fake_model(when={"-1": "hang:60"})
    master = fake_master(model, 1, timeouts=Timeouts(close=3600.0)).start()
    hung = master.submit(act(BAD))
    wait_for_states(master, "busy")
    closing = threading.Thread(target=master.close)
    closing.start()
    with pytest.raises(ClosedError):
        hung.result(PATIENCE)
    master.close(0.0)
    closing.join()
