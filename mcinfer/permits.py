"""Who may begin a run: one count that a master and one of its workers share.

The master gives one permit for each run that it sends; the worker takes one before each run it begins. The
master can take the last one back: then the worker, when it comes to that run, finds none and skips it. Each
permit is taken once (eventfd(2) with EFD_SEMAPHORE: a read is atomic), so both sides know who owns the
run, also when the other one is stopped or dead.

Ownership: each side has a descriptor of its own, and closes it.
"""

import os


class Permits:
    """One side of the count. No method waits."""

    def __init__(self, fd: int) -> None:
        """Take a descriptor over; see `create`."""
        self.fd = fd

    @classmethod
    def create(cls) -> "Permits":
        """A new count, of none.

        Raises:
            OSError: No descriptor is left.
        """
        return cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE))

    def give(self) -> None:
        """One more."""
        os.eventfd_write(self.fd, 1)

    def take(self) -> bool:
        """One less; False if there is none."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Give the descriptor up."""
        os.close(self.fd)
