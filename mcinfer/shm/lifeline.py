"""The socket pair between a master and one worker: it carries descriptors; its hang-up shows an end.

Each side holds one end. Messages are `SOCK_SEQPACKET`, so a descriptor and the number of its block stay
together. Everything else goes over the transport (`mcinfer.runtime.transport`).

A worker's watcher only polls its end for hang-up and never reads it: a read would consume descriptors.
"""

import os
import select
import socket
import struct

from mcinfer.errors import ProtocolError
from mcinfer.shm.descriptors import close_all, receive, send

_HEADER = struct.Struct("<qQ")  # block number, size in bytes
_GREETING_BYTES = 1 << 20
_MAX_EARLY = 4
"""Most blocks, each with a descriptor, that are kept before a message names them."""


class Lifeline:
    """One end, which owns its socket.

    The master's end never blocks: a worker that does not read must not hold up the others.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received: dict[int, tuple[int, int]] = {}

    @classmethod
    def pair(cls) -> tuple["Lifeline", socket.socket]:
        """The master's end, and the socket to pass to the worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def inherited(cls, fd: int) -> "Lifeline":
        """The worker's end; its process inherited the descriptor."""
        end = socket.socket(fileno=fd)
        end.set_inheritable(False)
        return cls(end)

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def greet(self, text: bytes) -> None:
        """Send the first message, which the worker needs before its imports."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _GREETING_BYTES)
        self._socket.send(text, socket.MSG_DONTWAIT)

    def greeting(self) -> bytes:
        """Receive the first message; empty if the master is gone."""
        return self._socket.recv(_GREETING_BYTES)

    def send_block(self, number: int, size: int, fd: int) -> None:
        """Pass a block's descriptor on; the sender keeps its own. Raises as `send` does."""
        send(self._socket, _HEADER.pack(number, size), [fd])

    def receive_block(self, number: int, timeout: float = 0.0) -> tuple[int, int]:
        """The size and descriptor of a block from the other side; the caller owns the descriptor.

        Up to four blocks that come before it are kept for later. With a timeout of 0, a descriptor that was
        sent before a message is here when the message is.

        Raises:
            ProtocolError: It did not come, or is not a block.
            OSError: This process has no descriptor left; the block is lost.
        """
        while number not in self._received:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(timeout * 1000):
                raise ProtocolError(f"the descriptor of block {number} did not come")
            try:
                data, fds = receive(self._socket, _HEADER.size)
            except ConnectionError as exc:
                raise ProtocolError(f"lifeline: {exc}") from exc
            if len(data) != _HEADER.size or len(fds) != 1:
                close_all(fds)
                raise ProtocolError(
                    f"lifeline: got {len(data)} bytes and {len(fds)} descriptors, expected "
                    f"{_HEADER.size} and 1"
                )
            (other, size), fd = _HEADER.unpack(data), fds[0]
            if other in self._received:
                os.close(fd)
                raise ProtocolError(f"lifeline: got block {other} twice")
            if other != number and len(self._received) == _MAX_EARLY:
                os.close(fd)
                raise ProtocolError(
                    f"lifeline: got block {other} after {[*self._received]}, expected {number}"
                )
            self._received[other] = (size, fd)
        return self._received.pop(number)

    def close(self) -> None:
        for _, fd in self._received.values():
            os.close(fd)
        self._received.clear()
        self._socket.close()
