"""A descriptor that any thread, and any finalizer, can make readable."""

import os


class WakeUp:
    """An eventfd (eventfd(2)) that lives as long as this object.

    A finalizer may call `set` at any moment, also one that runs after this object's own, in a cycle that is
    collected: then it does nothing, and never writes to a descriptor whose number has passed to another file.

    Attributes:
        fd: To poll for reading; -1 once it is closed.
    """

    __slots__ = ("__weakref__", "fd")

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: No descriptor is left.
        """
        self.fd = -1
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        """Close it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def set(self) -> None:
        """Make it readable. Takes no lock and never waits."""
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make it unreadable; called by who saw it readable."""
        os.eventfd_read(self.fd)
