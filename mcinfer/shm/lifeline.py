"""The socket pair between a master and one worker: it carries descriptors, and its hang-up shows an end.

All messages but the first go over the transport (`mcinfer.runtime.transport`). A worker's watcher only polls
its end for hang-up and never reads it: a read would consume descriptors.
"""

import errno
import select
import socket
import struct

from mcinfer.errors import ProtocolError
from mcinfer.shm.descriptors import close_all, receive, send

_HEADER = struct.Struct("<qQ")  # block number, size in bytes
_GREETING_BYTES = 1 << 20
_MOST_TOKEN = 512
"""Bytes of a token; one of a card's block has fewer."""


class Lifeline:
    """One end, which owns its socket.

    Sends never block: a worker that does not read must not hold up the others.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple["Lifeline", socket.socket]:
        """The master's end, and the socket that is to be passed to the worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def inherited(cls, fd: int) -> "Lifeline":
        """The worker's end, from the descriptor that its process inherited."""
        end = socket.socket(fileno=fd)
        end.set_inheritable(False)
        return cls(end)

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def greet(self, text: bytes) -> None:
        """Send the first message: what the worker needs to know before its imports.

        Raises:
            OSError: It is too long; or the other side is gone.
        """
        if len(text) > _GREETING_BYTES:
            what = f"a greeting of {len(text)} bytes, expected at most {_GREETING_BYTES}"
            raise OSError(errno.EMSGSIZE, what)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _GREETING_BYTES)
        self._socket.send(text, socket.MSG_DONTWAIT)

    def greeting(self) -> bytes:
        """Receive the first message; empty if the master is gone."""
        return self._socket.recv(_GREETING_BYTES)

    def send_block(self, number: int, size: int, fd: int, token: bytes = b"") -> None:
        """Hand over a block's descriptor; the sender keeps its own.

        `token` is what a process needs besides to open a block on a card (`mcinfer.cards.cuda`).

        Raises:
            OSError: The other side is gone, or does not read (BlockingIOError).
        """
        send(self._socket, _HEADER.pack(number, size) + token, [fd])

    def receive_block(self, number: int, timeout: float = 0.0) -> tuple[int, int, bytes]:
        """Take the next block that the other side has handed over.

        Args:
            number: The block's number.
            timeout: Seconds to wait for it. 0 is enough if it was sent before a message that has come.

        Returns:
            Size in bytes; a descriptor, now the caller's; the token, empty for a block in host memory.

        Raises:
            ProtocolError: It did not come, or another block or thing came.
            OSError: This process has no descriptor left, which is not the other side's fault; the block
                is lost.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(timeout * 1000):
            raise ProtocolError(f"the descriptor of block {number} did not come")
        try:
            data, fds = receive(self._socket, _HEADER.size + _MOST_TOKEN)
        except ConnectionError as exc:
            raise ProtocolError(f"lifeline: {exc}") from exc
        if len(data) >= _HEADER.size and len(fds) == 1:
            other, size = _HEADER.unpack_from(data)
            if other == number:
                return size, fds[0], data[_HEADER.size :]
        close_all(fds)
        raise ProtocolError(
            f"lifeline: got {len(data)} bytes and {len(fds)} descriptors, expected block {number}"
        )

    def hang_up(self) -> None:
        """End both directions, which a poll of either end shows."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
