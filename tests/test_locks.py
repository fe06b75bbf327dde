"""The lock that a signal's handler may interrupt: it is left as it was, whatever the handler raises."""

import signal
from contextlib import suppress

from mcinfer.locks import Lock
from tests.interrupts import Interrupted

_EVERY = 0.001  # seconds between two signals
_COUNT = 300


def test_exception_of_a_handler_never_leaves_it_held() -> None:
    lock, armed, came = Lock(), False, 0

    def handler(*_: object) -> None:
        nonlocal armed, came
        if armed:
            armed, came = False, came + 1
            raise Interrupted

    def take_it_again_and_again() -> None:
        nonlocal armed
        armed = True
        while True:
            with lock, lock:
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
