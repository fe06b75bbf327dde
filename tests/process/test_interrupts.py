"""Ctrl-C in a notebook: the call is interrupted, the master and other threads' calls are not."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from mcinfer import Master, Timeouts
from mcinfer.interrupts import HeldInterrupts
from tests.process.models import FakeModel

INTERRUPTS = 150


@contextmanager
def interruptions(seed: int) -> Iterator[threading.Event]:
    """Sends SIGINT to this process at odd moments, until it has sent enough or is left."""
    left, enough = threading.Event(), threading.Event()

    def interrupt() -> None:
        chance = random.Random(seed)  # noqa: S311 nothing secret
        for _ in range(INTERRUPTS):
            if left.wait(chance.uniform(0.0005, 0.004)):
                return
            os.kill(os.getpid(), signal.SIGINT)
        enough.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield enough
    finally:
        left.set()
        thread.join()


@pytest.mark.parametrize("seed", [1, 2])
def test_interrupted_calls_leave_a_whole_pool(fake_model: FakeModel, seed: int) -> None:
    # A shard that an interrupt had lost would show as a time-out, a lost free list as full memory.
    timeouts = Timeouts(predict=20.0)
    interrupted, answered, failures = 0, 0, []
    with Master(fake_model(), 2, engine="fake", verify="never", timeouts=timeouts) as master:
        before = [worker.pid for worker in master.statistics().workers]
        stop = threading.Event()

        def other() -> None:
            rows = np.full((3, 4), 7, np.float32)
            while not stop.is_set():
                try:
                    assert np.all(master.predict([rows])["y"] == 15)
                except BaseException as exc:
                    failures.append(exc)
                    return

        thread = threading.Thread(target=other)
        thread.start()
        try:
            with interruptions(seed) as enough:
                while not enough.is_set():
                    try:
                        rows = np.full((2, 4), answered, np.float32)
                        assert np.all(master.predict([rows])["y"] == 2 * answered + 1)
                        answered += 1
                    except KeyboardInterrupt:
                        interrupted += 1
        except KeyboardInterrupt:
            interrupted += 1  # the last one came late
        finally:
            stop.set()
            thread.join()
        assert not failures
        assert interrupted > INTERRUPTS // 4
        for _ in range(20):
            assert np.all(master.predict([np.ones((2, 4), np.float32)])["y"] == 3)
        statistics = master.statistics()
        assert [worker.pid for worker in statistics.workers] == before
        assert statistics.in_flight == 0
        assert statistics.queued_shards == 0
        assert statistics.memory_used_bytes <= 4096


def test_held_interrupt_comes_when_the_section_is_left() -> None:
    whole = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 where it comes is what is tested
        with HeldInterrupts():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                whole = True
        whole = False
    assert whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested_sections_hold_until_the_outermost_is_left() -> None:
    inner_left = False
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():  # noqa: PT012 as above
        with HeldInterrupts():
            os.kill(os.getpid(), signal.SIGINT)
        inner_left = True
    assert inner_left


def test_other_threads_do_not_touch_the_handler() -> None:
    seen = []

    def look() -> None:
        with HeldInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
