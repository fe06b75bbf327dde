"""Locks that a signal's handler may interrupt: they are left as they were, whatever the handler raises."""

import signal
import threading
from contextlib import suppress

import pytest

from mcinfer.locks import Lock, Turn
from tests.interrupts import Interrupted

_EVERY = 0.001  # seconds between two signals
_COUNT = 300


@pytest.mark.parametrize("depth", [1, 2])
def test_exception_of_a_handler_never_leaves_it_held(depth: int) -> None:
    lock: Lock = Turn() if depth == 1 else Lock()
    armed, came = False, 0

    def handler(*_: object) -> None:
        nonlocal armed, came
        if armed:
            armed, came = False, came + 1
            raise Interrupted

    def take_it_again_and_again() -> None:
        nonlocal armed
        armed = True
        while True:
            with lock:
                if depth > 1:
                    with lock:
                        pass

    before = signal.signal(signal.SIGVTALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, _EVERY, _EVERY)
        while came < _COUNT:
            with suppress(Interrupted):
                take_it_again_and_again()
            assert not lock._is_owned(), came
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_turn_is_refused_to_the_thread_that_has_it_and_others_wait() -> None:
    turn, order = Turn(), list[str]()

    def other() -> None:
        with turn:
            order.append("other")

    thread = threading.Thread(target=other)
    with turn:
        thread.start()
        with (
            pytest.raises(RuntimeError, match="called what it has interrupted"),
            turn,
        ):
            pass
        order.append("first")
    thread.join(20.0)
    assert order == ["first", "other"]
