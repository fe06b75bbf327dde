"""Tests of the line of callers that wait for room."""

import threading
import time

from mcinfer.waiting_line import WaitingLine

PATIENCE = 20.0


class Room:
    """Places, taken first come first served."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.line = WaitingLine(self.lock)
        self.free = 0
        self.order: list[int] = []
        self.late: list[int] = []

    def enter(self, number: int, timeout: float = PATIENCE) -> threading.Thread:
        """A thread that wants a place; it stands in the line when this returns."""
        before = len(self.line)

        def attempt(late: bool) -> bool:
            if self.free:
                self.free -= 1
                self.order.append(number)
                return True
            if late:
                self.late.append(number)
            return late

        thread = threading.Thread(
            target=lambda: self.line.wait(attempt, time.monotonic() + timeout)
        )
        thread.start()
        deadline = time.monotonic() + PATIENCE
        while len(self.line) <= before and thread.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return thread

    def leave(self, count: int = 1) -> None:
        with self.lock:
            self.free += count
            self.line.call_next()


def test_places_are_given_in_the_order_of_the_line() -> None:
    room = Room()
    threads = [room.enter(i) for i in range(6)]
    room.leave(2)
    for _ in range(4):
        room.leave()
    for thread in threads:
        thread.join(PATIENCE)
    assert room.order == [*range(6)]
    assert len(room.line) == 0


def test_one_call_is_enough_for_as_many_as_there_is_room_for() -> None:
    room = Room()
    threads = [room.enter(i) for i in range(5)]
    room.leave(5)
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(room.order) == [*range(5)]


def test_one_whose_time_is_over_goes_and_the_next_is_called() -> None:
    room = Room()
    hasty = room.enter(0, timeout=0.05)
    patient = room.enter(1)
    hasty.join(PATIENCE)
    assert room.late == [0]
    room.leave()
    patient.join(PATIENCE)
    assert room.order == [1]


def test_one_behind_whose_time_is_over_does_not_wait_for_those_before() -> None:
    room = Room()
    patient = room.enter(0)
    hasty = room.enter(1, timeout=0.05)
    hasty.join(PATIENCE)
    assert room.late == [1]
    room.leave()
    patient.join(PATIENCE)
    assert room.order == [0]
