"""CANCEL messages: a worker's thread waits at their own socket, so a run prepares nothing for them.

Ownership: each side has one end of a pair of sockets, and closes it.
"""

import socket
import struct

from mcinfer.errors import ProtocolError

_CANCEL = struct.Struct("<QI")
"""Request and shard."""

# A number, since operations on enumerations cost more than the calls they are for; and no signal, since a
# program may have SIGPIPE end it.
_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Cancels:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        """Take the socket over; see `pair` and `inherited`."""
        self._end = end

    @classmethod
    def pair(cls) -> "tuple[Cancels, Cancels]":
        """The master's end, and the one that a worker is to be started with.

        Raises:
            OSError: No descriptor is left.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def inherited(cls, fd: int) -> "Cancels":
        """The worker's end, of a descriptor that it was started with."""
        end = socket.socket(fileno=fd)
        end.set_inheritable(False)
        return cls(end)

    @property
    def fd(self) -> int:
        """The descriptor."""
        return self._end.fileno()

    def send(self, request: int, shard: int) -> None:
        """Say that a run is to be stopped, or skipped. Never waits.

        Raises:
            OSError: The worker has spoilt its end, or does not read it.
        """
        self._end.send(_CANCEL.pack(request, shard), _FLAGS)

    def wait(self) -> tuple[int, int] | None:
        """The next request and shard, however long that takes; None when the master's end is closed.

        Raises:
            ProtocolError: It is no such message.
        """
        data = self._end.recv(_CANCEL.size + 1)
        if not data:
            return None
        if len(data) != _CANCEL.size:
            raise ProtocolError(f"Cancel: got {len(data)} bytes, expected {_CANCEL.size}")
        request, shard = _CANCEL.unpack(data)
        return request, shard

    def close(self) -> None:
        """Give the descriptor up."""
        self._end.close()
