"""A descriptor that any thread, and any finalizer, can make readable."""

import os
import weakref


class WakeUp:
    """An eventfd (eventfd(2)) that lives as long as this object, whoever still holds it.

    It is not closed before: a finalizer may call `set` at any moment, and must never write to a
    descriptor whose number has passed to another file.

    Attributes:
        fd: To poll for reading.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: No descriptor is left.
        """
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.fd)

    def set(self) -> None:
        """Make it readable. Takes no lock and never waits."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make it unreadable; called by who saw it readable."""
        os.eventfd_read(self.fd)
