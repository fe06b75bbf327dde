"""Ranks that are processes: what the others get when one is killed, stopped, or ends."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.process.scripts import Program
from tests.process.waiting import stop

RANK = """
import os, signal, sys
import numpy as np
from mcinfer.ranks.collectives import join

key, rank, size, timeout = sys.argv[1], *map(int, sys.argv[2:])
group = join(key, rank, size, timeout=50)
group.timeout = timeout

def say(*values):
    print(*values, flush=True)

def attempt(operation):
    try:
        operation()
    except Exception as exc:
        say(f"{type(exc).__name__}: {exc}")
        try:
            group.barrier()
        except Exception as exc:
            say(f"{type(exc).__name__}: {exc}")
    else:
        say("no error")

say("joined", group.all_reduce(np.full(3, rank + 1)).tolist())
"""


Ranks = Callable[..., list[Program]]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Starts a program for each text, which `RANK` precedes; they are one group, which works."""
    key = f"{os.getpid()} {request.node.name}"
    with ExitStack() as stack:

        def start(*texts: str, timeout: int = 50) -> list[Program]:
            size = len(texts)
            programs = [
                stack.enter_context(Program(RANK + text, key, rank, size, timeout))
                for rank, text in enumerate(texts)
            ]
            for program in programs:
                assert program.line() == f"joined {[size * (size + 1) // 2] * 3}"
            return programs

        yield start


BARRIER = "attempt(group.barrier)"
IDLE = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
say("idle")
signal.sigwait({signal.SIGUSR1})
"""


def assert_all_say(programs: list[Program], first: str) -> None:
    for program in programs:
        assert program.line() == first
        assert program.line() == f"ClosedError: the group is closed: {first.partition(': ')[2]}"
        assert program.wait().status == 0


def test_killed_rank_is_an_error_in_all_that_wait_for_it(ranks: Ranks) -> None:
    # Each waits in another operation: none gets as far as to be compared.
    first, second, third, fourth = ranks(
        "attempt(group.prepare_all_reduce((500_000,), np.float32).run)",
        IDLE,
        "attempt(lambda: group.recv((2,), np.int8, 1))",
        "attempt(lambda: group.all_gather(np.ones(3)))",
    )
    assert second.line() == "idle"
    second.send_signal(signal.SIGKILL)
    text = f"RankDiedError: rank 1 (pid {second.pid}) killed by SIGKILL"
    assert_all_say([first, third, fourth], text)


def test_rank_that_ends_without_close_is_an_error(ranks: Ranks) -> None:
    first, second = ranks(BARRIER, "sys.exit(5)")
    assert first.line() == f"RankDiedError: rank 1 (pid {second.pid}) exited with status 5"


def test_stopped_rank_is_an_error_after_the_time_limit(ranks: Ranks) -> None:
    first, second, third = ranks(IDLE + BARRIER, IDLE + BARRIER, IDLE + BARRIER, timeout=1)
    assert [program.line() for program in (first, second, third)] == ["idle"] * 3
    stop(second.pid)
    for program in (first, second, third):
        program.send_signal(signal.SIGUSR1)
    text = (
        f"CollectiveTimeoutError: barrier: rank 1 (pid {second.pid}) did not take part within 1 s"
    )
    assert_all_say([first, third], text)
    second.send_signal(signal.SIGCONT)
    # All have arrived at its barrier by now, but the group is no more.
    assert second.line() == "no error"
    assert second.wait().status == 0


def test_interrupted_rank_is_an_error_in_the_others(ranks: Ranks) -> None:
    first, second = ranks(BARRIER, "say('waits'); group.recv((1,), np.int8, 0)")
    assert second.line() == "waits"
    second.send_signal(signal.SIGINT)
    # Where the signal meets it, it leaves the group, or ends.
    line = first.line()
    assert line.startswith(f"RankDiedError: rank 1 (pid {second.pid}) ")
    assert "KeyboardInterrupt" in second.wait().err
