"""Tests of mcinfer/runtime/admission.py: what goes back to the system, and who waits for memory."""

import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from mcinfer.requests.frames import IdleFrames
from mcinfer.requests.planner import Planner
from mcinfer.requests.tensors import Arrays
from mcinfer.runtime.admission import SPARE_BYTES, Admission, Allocation, IdleMemory
from mcinfer.shm.arena import Arena
from tests.orders import ready_pool
from tests.planned_requests import (
    LIMIT,
    MIB,
    known,
    model,
    never,
    place,
    planner_of,
    references,
    request_of,
)

ROW = MIB
WIDE = model({"x": ("uint8", ["batch", ROW])}, {"y": ("uint8", ["batch", ROW])})
DECLARED = known(WIDE)


class Pool:
    """An arena with the frames of a planner, and what looks at them."""

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.arena = Arena(4096 * MIB, dropped=self.dropped.append)
        self.planner: Planner = planner_of(WIDE, self.arena)
        self.idle = IdleMemory(self.arena)
        self.now = 100.0
        self.most = 0

    def answer(self, rows: int, first: int = 1) -> Arrays:
        """A request of so many MiB, and its answer of as many."""
        inputs = [np.full((rows, ROW), first, np.uint8)]
        request = request_of(self.planner, inputs, 1, DECLARED, 0.0)
        self.most = max(self.most, request.size)
        [read], [written] = references(request, 0)
        place(self.arena, written)[:] = place(self.arena, read)
        request.take(0, (), never, 0, LIMIT)
        request.settle()
        request.release()
        return request.result()

    def look(self) -> None:
        """Look at once."""
        self.idle.note_growth(self.now)
        self.idle.look(self.now, self.planner.place.idle, 0, self.most)
        self.most = 0

    def rest(self, seconds: float) -> int:
        """Look whenever that is due, for so long; how often."""
        self.idle.note_growth(self.now)
        end, looks = self.now + seconds, 0
        while self.idle.due <= end:
            self.now = self.idle.due
            self.look()
            looks += 1
        self.now = end
        return looks


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.arena.close()


def test_memory_of_many_shapes_is_bounded_by_the_most_in_use_at_a_time(pool: Pool) -> None:
    for rows in range(1, 26):
        pool.answer(rows % 20 + 1, rows)
        pool.rest(0.3)
    pool.rest(3.0)
    assert pool.arena.size <= 2 * 20 * MIB + SPARE_BYTES
    assert pool.dropped
    assert (pool.answer(7, 3)["y"] == 3).all()


def test_one_large_request_is_forgotten_after_half_a_minute(pool: Pool) -> None:
    pool.answer(100)
    pool.rest(10.0)
    assert pool.arena.size >= 200 * MIB  # the next one may come
    looks = pool.rest(60.0)
    assert (pool.arena.size, pool.arena.used) == (0, 0)
    assert looks <= 35
    assert pool.idle.due == math.inf


def test_large_requests_memory_is_kept_though_little_is_in_use(pool: Pool) -> None:
    nothing = IdleFrames()
    small = pool.arena.allocate(1)
    large = pool.arena.allocate(201 * MIB)
    pool.idle.note_growth(pool.now)
    pool.idle.look(pool.now, nothing, 0, 0)
    del large
    for _ in range(10):
        pool.now += 1.0
        pool.idle.look(pool.now, nothing, 0, 0)
    assert pool.arena.size > 201 * MIB
    assert small.block == 0


def test_what_comes_again_within_half_a_minute_keeps_its_memory(pool: Pool) -> None:
    first = pool.answer(100)["y"].ctypes.data
    for number in range(6):
        pool.rest(12.0)
        y = pool.answer(100, number)["y"]
        assert (y == number).all()
        assert y.ctypes.data == first
        del y


def test_frames_that_were_in_use_since_the_last_look_stay(pool: Pool) -> None:
    shapes = range(1, 21)  # 420 MiB for all of them
    for _ in range(3):
        for rows in shapes:
            pool.answer(rows)
        pool.look()
        assert pool.planner.place.idle.bytes == 2 * sum(shapes) * MIB
        pool.now += 1.0


def test_pool_that_has_little_to_give_back_is_not_woken(pool: Pool) -> None:
    for rows in range(1, 5):
        pool.answer(rows)
    assert pool.arena.size <= SPARE_BYTES
    assert pool.rest(1000.0) == 0


def test_memory_that_users_hold_wakes_the_loop_twice_a_minute_at_most(pool: Pool) -> None:
    kept = [pool.answer(rows) for rows in range(30, 36)]
    pool.rest(60.0)
    assert pool.rest(600.0) <= 20
    assert all((answer["y"] == 1).all() for answer in kept)
    kept.clear()
    pool.rest(61.0)
    assert pool.arena.size <= SPARE_BYTES


def test_callers_that_are_refused_at_once_delay_nothing_for_one_that_waits() -> None:
    dropped: list[int] = []
    arena = Arena(64 * MIB, dropped=dropped.append)
    pool = ready_pool(1)
    admission = Admission(cast("Any", pool), arena, IdleFrames())
    pool.handle_request(0.0, 0, (1,), 10.0)  # whose end is to free memory
    held = arena.allocate_all([64 * MIB])
    line = admission.memory[None]
    admission.allocate(waiting := Allocation(line, [MIB], 60.0))
    assert not waiting.settled
    due = admission.due
    for _ in range(3):
        admission.allocate(refused := Allocation(line, [MIB], 0.0))
        assert refused.error is not None
    assert admission.due == due
    del held
    admission.look(due)
    assert waiting.settled
    assert waiting.error is None
    del waiting
    arena.close()
