"""The ZeroMQ sockets, and the only file that imports zmq: a ROUTER in the master, a DEALER in a worker.

The master never blocks on sending and never lingers; a worker, which has one peer, may. `fd` becomes
readable when something may have changed, and not again until `receive` has said that there is nothing
more (ZMQ_FD is edge-triggered, see zmq_getsockopt(3)); so drain after every wake-up and every send.

Connections come in by *doors*, one for each worker that is awaited: a path that takes connections of that
worker's process alone, and that is gone once it has said who it is. For libzmq ends the whole process when
it finds no descriptor for a connection that it accepts (src/ipc_listener.cpp): while workers serve, there is
nothing to connect to. A door cannot be given up altogether before its worker's end, since libzmq ends the
connections of an address that is unbound.

ZeroMQ cuts a peer off that sends a frame of more than `MOST_MESSAGE_BYTES`.

Ownership: one lock of the owner's guards a socket; ZeroMQ allows threads to share one that way.
"""

import os
from contextlib import suppress

import zmq

from mcinfer.protocol import MOST_MESSAGE_BYTES

_MOST_QUEUED = 10_000
_MOST_RECEIVED = 16
"""Messages of one peer that wait to be read: it has no more than a few to say at a time."""

# As plain numbers: operations on ZeroMQ's enumerations cost more than the calls they are for.
_SEND_MORE = int(zmq.SNDMORE | zmq.DONTWAIT)
_DONT_WAIT = int(zmq.DONTWAIT)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)


class SendError(OSError):
    """The peer is gone, or does not take what it is sent."""


class Router:
    """The master's socket: peers are known by the identity that ZeroMQ gave their connection."""

    def __init__(self) -> None:
        """Make the socket; nobody can connect before `open_door`.

        Raises:
            OSError: It cannot be made.
        """
        self._doors: set[str] = set()
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
            self._socket.setsockopt(zmq.SNDHWM, _MOST_QUEUED)
            self._socket.setsockopt(zmq.RCVHWM, _MOST_RECEIVED)
            self.fd = int(self._socket.getsockopt(zmq.FD))
        except zmq.ZMQError as exc:
            self.close()
            raise OSError(exc.errno, f"cannot make a ZeroMQ socket: {exc}") from exc

    def open_door(self, endpoint: str, pid: int) -> None:
        """Let a process connect.

        Args:
            endpoint: ``ipc://`` and a path of at most 107 bytes, which no other open door has.
            pid: Whose connections are taken; those of processes that had an earlier door are as well, all
                others end at once.

        Raises:
            OSError: The endpoint cannot be bound.
        """
        try:
            self._socket.setsockopt(zmq.IPC_FILTER_PID, pid)
            self._socket.bind(endpoint)
        except zmq.ZMQError as exc:
            raise OSError(exc.errno, f"cannot bind {endpoint}: {exc}") from exc
        self._doors.add(endpoint)

    def shut_door(self, endpoint: str) -> None:
        """Nobody can connect there any more; connections that are there stay."""
        with suppress(OSError):  # it is shut
            os.unlink(endpoint.removeprefix("ipc://"))

    def remove_door(self, endpoint: str) -> None:
        """Give a door up, open or shut, with all connections that came by it."""
        if endpoint in self._doors:
            self._doors.remove(endpoint)
            self.shut_door(endpoint)
            with suppress(zmq.ZMQError):
                self._socket.unbind(endpoint)

    def send(self, peer: bytes, data: bytes) -> None:
        """Send a message without waiting.

        Raises:
            SendError: The peer is gone or its queue is full.
        """
        try:
            self._socket.send(peer, _SEND_MORE)
            self._socket.send(data, _DONT_WAIT)
        except zmq.ZMQError as exc:
            raise SendError(exc.errno, str(exc)) from exc

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next message and its peer; None when there is nothing more.

        A message of more than one part is no message of ours: it is returned as an empty one.
        """
        if not int(self._socket.getsockopt(_EVENTS)) & _READABLE:
            return None
        parts = self._socket.recv_multipart(_DONT_WAIT)
        return (parts[0], parts[1]) if len(parts) == 2 else (parts[0], b"")

    def close(self) -> None:
        """Close at once; nothing that was not sent is waited for."""
        for endpoint in self._doors:
            self.shut_door(endpoint)
        self._context.destroy(linger=0)


class Dealer:
    """A worker's socket."""

    def __init__(self, endpoint: str) -> None:
        """Connect; ZeroMQ does so in the background."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        self._socket.connect(endpoint)
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def send(self, data: bytes) -> None:
        """Send a message to the master."""
        self._socket.send(data)

    def wait(self) -> bytes:
        """The next message, however long it takes: the watcher ends the process with the master."""
        return self._socket.recv()

    def receive(self) -> bytes | None:
        """The next message, or None when there is nothing more."""
        if not int(self._socket.getsockopt(_EVENTS)) & _READABLE:
            return None
        return self._socket.recv(_DONT_WAIT)

    def close(self) -> None:
        """Close; what was sent gets a second to leave."""
        self._socket.close()
        self._context.term()
