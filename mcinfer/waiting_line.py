"""Callers that wait for room, first come first served."""

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from mcinfer.interrupts import HeldInterrupts


class WaitingLine:
    """A line of threads; the first of it is called whenever there may be room. `len` is how many wait.

    The lock that guards what they wait for guards the line as well.
    """

    def __init__(self, lock: threading.Lock) -> None:
        """Nobody waits yet."""
        self._lock = lock
        self._waiting: deque[threading.Event] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def call_next(self) -> None:
        """There may be room, or nothing to wait for any more; the lock is held."""
        if self._waiting:
            self._waiting[0].set()

    def wait(self, enter: Callable[[bool], bool], deadline: float) -> None:
        """Stand in the line until `enter` has been called with success; the lock is not held.

        Args:
            enter: Called with the lock held when it is this thread's turn, or its time is over, with whether
                that is so. It says whether it succeeded; the second time it must, or raise.
            deadline: Of `time.monotonic`.
        """
        turn = threading.Event()
        turn.set()
        try:
            with HeldInterrupts(), self._lock:
                self._waiting.append(turn)
            while True:
                turn.wait(min(max(0.0, deadline - monotonic()), threading.TIMEOUT_MAX))
                turn.clear()
                with HeldInterrupts(), self._lock:
                    late = monotonic() >= deadline
                    if (late or self._waiting[0] is turn) and enter(late):
                        return
        finally:
            with HeldInterrupts(), self._lock:
                if turn in self._waiting:  # unless an interrupt came before anything else
                    self._waiting.remove(turn)
                self.call_next()
