"""The I/O thread's wait: what ends it, and when it ends by itself.

It ends for messages, unless another thread takes them meanwhile, for what the pool adds (the ends of workers'
processes, and their requests to connect), for the wake-up, and at the time that was planned.
"""

import math
import select
from contextlib import suppress
from time import monotonic

from mcinfer.wakeup import WakeUp

LONGEST_WAIT = 86400.0
"""Seconds of one wait: waking for nothing once a day costs nothing, and it takes no more than 24 days."""


class Watch:
    """A poll set and a time. The lock that guards the pool guards this, but where it says otherwise.

    Attributes:
        wakes_at: When the wait ends by itself, of `time.monotonic`: what is due before has to wake it.
        wakeup: Ends the wait now; for any thread, and any finalizer.
    """

    def __init__(self) -> None:
        """Nothing is waited for before `open`, but `wakeup` may be set.

        Raises:
            OSError: No descriptor is left.
        """
        self.wakes_at = math.inf
        self.wakeup = WakeUp()

    def open(self, socket: int) -> None:
        """Make the poll set.

        Args:
            socket: The descriptor that says whether messages are there.

        Raises:
            OSError: No descriptor is left; nothing is left open.
        """
        poll = select.epoll()
        poll.register(self.wakeup.fd, select.EPOLLIN)
        poll.register(socket, select.EPOLLIN)
        self._poll = poll
        self._socket = socket

    def close(self) -> None:
        """Nobody waits any more."""
        self._poll.close()

    def add(self, fd: int) -> None:
        """Have the wait end when this descriptor is readable."""
        self._poll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Do not wait for this descriptor any more.

        Raises:
            OSError: It was not waited for.
        """
        self._poll.unregister(fd)

    def listen(self, to_messages: bool) -> None:
        """Wait for messages, too, or leave them to another thread; also without the lock."""
        with suppress(ValueError, OSError):  # the pool was closed meanwhile, which answers all jobs
            self._poll.modify(self._socket, select.EPOLLIN if to_messages else 0)

    def plan(self, due: float) -> float:
        """Have the wait end when something is due; the seconds until then."""
        planned, now = self.wakes_at, monotonic()
        self.wakes_at = due
        if now < planned < due:
            # To wake for nothing once is cheaper than to be woken for each request's deadline.
            self.wakes_at = planned
        return max(0.0, min(self.wakes_at - now, LONGEST_WAIT))

    def wait(self, seconds: float) -> tuple[bool, list[int]]:
        """Wait, without the lock: whether it was woken, and all descriptors that are readable."""
        ready = [fd for fd, _ in self._poll.poll(seconds)]
        woken = self.wakeup.fd in ready
        if woken:
            self.wakeup.clear()
        return woken, ready
