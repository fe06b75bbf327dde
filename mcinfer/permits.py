"""Who may begin a run: permits that a master gives, and that its worker takes.

The master gives one permit for each run that it sends; the worker takes one before each run it begins. The
master can take the last one back: then the worker, when it comes to that run, finds none and skips it. Each
permit is one packet on a pair of sockets whose receiving end both sides hold, so it is received once,
and both sides know who owns the run, also when the other one is stopped or dead.

Not an eventfd, which would be one descriptor for two: its flag for not waiting is shared, so a worker could
have its master wait. Here each call says that it does not.

Ownership: each side has descriptors of its own, and closes them.
"""

import socket

_PERMIT = b"1"
_DONT_WAIT = int(
    socket.MSG_DONTWAIT
)  # operations on enumerations cost more than the calls they are for


class Permits:
    """One side. No method waits."""

    def __init__(self, receiving: socket.socket, sending: socket.socket | None = None) -> None:
        """Take the ends over; see `create` and `inherited`."""
        self._receiving = receiving
        self._sending = sending

    @classmethod
    def create(cls) -> "Permits":
        """The master's side of new permits, of which there are none yet.

        Raises:
            OSError: No descriptor is left.
        """
        return cls(*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))

    @classmethod
    def inherited(cls, fd: int) -> "Permits":
        """The worker's side, of a descriptor that it was started with."""
        end = socket.socket(fileno=fd)
        end.set_inheritable(False)
        return cls(end)

    @property
    def fd(self) -> int:
        """The descriptor that the worker is to be given."""
        return self._receiving.fileno()

    def give(self) -> None:
        """One more; the master's alone.

        Raises:
            OSError: The worker has spoilt its end, or takes none.
        """
        if self._sending is not None:
            self._sending.send(_PERMIT, _DONT_WAIT)

    def take(self) -> bool:
        """One less; False if there is none."""
        try:
            return self._receiving.recv(1, _DONT_WAIT) == _PERMIT
        except OSError:
            return False

    def close(self) -> None:
        """Give the descriptors up."""
        self._receiving.close()
        if self._sending is not None:
            self._sending.close()
