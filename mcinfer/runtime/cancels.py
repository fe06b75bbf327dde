"""CANCEL messages: a thread of the worker waits for them at their own socket, so a run prepares nothing.

Ownership: each side has one end of a pair of sockets, and closes it.
"""

import socket
import struct
from typing import Self

from mcinfer.errors import ProtocolError

_CANCEL = struct.Struct("<QI")  # request and shard

# A number, since operations on enumerations cost more than the calls they are for; and no signal, since a
# program may have SIGPIPE end it.
_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Cancels:
    """One end of the pair; it owns the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """The master's end, and the worker's, which the worker inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def inherited(cls, fd: int) -> Self:
        end = socket.socket(fileno=fd)
        end.set_inheritable(False)
        return cls(end)

    @property
    def fd(self) -> int:
        return self._end.fileno()

    def send(self, request: int, shard: int) -> None:
        """Never waits; `OSError`: the worker has closed its end, or does not read it."""
        self._end.send(_CANCEL.pack(request, shard), _FLAGS)

    def wait(self) -> tuple[int, int] | None:
        """The next request and shard, without a time limit; None when the master's end is closed.

        Raises:
            ProtocolError: The message has another size.
        """
        data = self._end.recv(_CANCEL.size + 1)
        if not data:
            return None
        if len(data) != _CANCEL.size:
            raise ProtocolError(f"Cancel: got {len(data)} bytes, expected {_CANCEL.size}")
        request, shard = _CANCEL.unpack(data)
        return request, shard

    def hang_up(self) -> None:
        """End both directions for all that hold either end: a child that the user forked may hold one."""
        self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()
