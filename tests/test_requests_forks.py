"""Tests of mcinfer/requests/forks.py: threads at once; tests/process/test_forks.py has the forks."""

import gc
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mcinfer.shm.arena import Arena
from tests.planned_requests import DECLARED, PLAIN, W, planner_of, request_of

THREADS = 4


@pytest.fixture(name="busy")
def _busy() -> Iterator[None]:
    """Threads switch, and garbage is collected, as often as possible."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(3, 1, 1)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


class Garbage:
    """Its end runs Python code, in which threads may switch."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        for _ in range(100):
            pass


@pytest.mark.usefixtures("busy")
def test_threads_that_make_frames_at_once_do_not_disturb_each_other() -> None:
    arenas = [Arena(1 << 28) for _ in range(THREADS)]
    planners = [planner_of(PLAIN, arena) for arena in arenas]
    forks = planners[0].place._forks
    for planner in planners:
        planner.place._forks = forks
    failures: list[BaseException] = []

    def make(number: int) -> None:
        try:
            for rows in range(1, 150):
                forks._most = 0  # look for those that are gone each time
                Garbage()
                x = np.ones((rows, 3), np.float32)
                request_of(planners[number], [x, W], 2, DECLARED, 0.0)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for arena in arenas:
        arena.close()
