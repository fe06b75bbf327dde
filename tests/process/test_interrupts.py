"""Ctrl-C in a notebook: the call is interrupted, the master and other threads' calls are not."""

import os
import signal
import threading

import pytest

from mcinfer.interrupts import HeldInterrupts
from tests.process.models import FakeModel
from tests.process.scripts import PREAMBLE, Program

INTERRUPTS = 150

# In a process of its own: an interrupt that comes late must not end the test run.
INTERRUPTED = """
import random, threading

interrupts, seed = int(sys.argv[2]), int(sys.argv[3])
enough = threading.Event()

def interrupt():
    chance = random.Random(seed)
    for _ in range(interrupts):
        time.sleep(chance.uniform(0.0005, 0.004))
        os.kill(os.getpid(), signal.SIGINT)
    enough.set()

def insist(call):
    # Signals are raised between any two instructions, so also in an except clause.
    while True:
        try:
            return call()
        except KeyboardInterrupt:
            pass

def predict(value, rows=2):
    x = np.full((rows, 4), value, np.float32)
    assert np.all(master.predict([x])["y"] == 2 * value + 1), "a wrong answer"

def other():
    while not stop.is_set():
        try:
            predict(7, 3)
        except BaseException as exc:
            failures.append(repr(exc))
            return

def interrupted_calls():
    global answered, interrupted
    while not enough.is_set():
        try:
            predict(answered)
            answered += 1
        except KeyboardInterrupt:
            interrupted += 1

# A shard that an interrupt had lost would show as a time-out, a lost free list as full memory.
timeouts = mcinfer.Timeouts(predict=20.0)
failures, stop, interrupted, answered = [], threading.Event(), 0, 0
with mcinfer.Master(sys.argv[1], 2, engine="fake", verify="never", timeouts=timeouts) as master:
    before = [worker.pid for worker in master.statistics().workers]
    others, interrupter = threading.Thread(target=other), threading.Thread(target=interrupt)
    others.start()
    interrupter.start()
    insist(interrupted_calls)
    insist(interrupter.join)
    insist(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    stop.set()
    others.join()
    assert not failures, failures
    assert interrupted > interrupts // 4, interrupted
    for _ in range(20):
        predict(1)
    statistics = master.statistics()
    assert [worker.pid for worker in statistics.workers] == before
    assert (statistics.in_flight, statistics.queued_shards) == (0, 0), statistics
    assert statistics.memory_used_bytes <= 4096, statistics
say("whole")
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_interrupted_calls_leave_a_whole_pool(fake_model: FakeModel, seed: int) -> None:
    with Program(PREAMBLE + INTERRUPTED, fake_model(), INTERRUPTS, seed) as program:
        ended = program.wait(50.0)
    assert (ended.status, ended.out, ended.err) == (0, "whole\n", "")


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
