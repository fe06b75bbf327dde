"""Messages between a master and its workers: a ROUTER in the master, a DEALER in each worker, of ZeroMQ.

They meet at one listening socket that has no name. A Unix socket gets its address by a path: mcinfer binds it
in a private folder and removes path and folder at once. The socket and a *handle* to its file (O_PATH of
open(2)) remain. A process that inherits the handle connects through ``/proc/self/fd``; other processes have
no address, and a crash leaves nothing behind.

Only this file imports zmq. The master never blocks in a send and never lingers; a worker has one peer and
may do both. One thread at a time uses a `MasterTransport` or a `WorkerTransport`. Its owner

    registers fd for EPOLLIN
    waits without sleeping unless may_sleep(), and receives until None

ZeroMQ disconnects a peer that sends a frame of more than `MAX_MESSAGE_BYTES`. libzmq ends the whole process
if it has no descriptor for a connection that it accepts (src/ipc_listener.cpp). So only a process that
holds the handle can connect, and a descriptor must be free for a worker before it is started.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

import zmq

from mcinfer.private import PrivateFolder
from mcinfer.protocol import MAX_MESSAGE_BYTES

_MAX_WAITING = 4096
"""Connections that are not accepted yet; the system may allow fewer (net.core.somaxconn)."""

_MAX_QUEUED = 10_000
_MAX_RECEIVED = 16  # messages of one peer that wait in ZeroMQ

# As plain numbers: operations on enumerations cost more than the calls they are for.
_SEND_MORE = int(zmq.SNDMORE | zmq.DONTWAIT)
_DONT_WAIT = int(zmq.DONTWAIT)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)

# As it is in the C extension: what wraps it costs as much again.
_send = zmq.backend.Socket.send


class UnreachableError(OSError):
    """A worker is gone, or does not accept messages: it must be killed."""


def runtime_folder() -> PrivateFolder:
    """A private folder, in ``$XDG_RUNTIME_DIR`` if that can be used."""
    return PrivateFolder(os.environ.get("XDG_RUNTIME_DIR"), named_by="XDG_RUNTIME_DIR or TMPDIR")


def _listen() -> tuple[socket.socket, int]:
    """A listening socket, and the handle by which to connect; the caller owns both."""
    with runtime_folder() as folder, ExitStack() as opened:
        path = folder.opened / "s"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        opened.callback(listener.close)
        listener.bind(str(path))
        listener.listen(_MAX_WAITING)
        handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        opened.pop_all()
        return listener, handle


class MasterTransport:
    """The master's side, a ROUTER: peers are known by the identity that ZeroMQ gave their connection.

    Attributes:
        fd: The descriptor to poll. It becomes readable when something may have changed, and not again until
            `receive` has returned None (ZMQ_FD is edge-triggered, see zmq_getsockopt(3)); a `send` may use
            that up.
        handle: The descriptor that a worker's process must inherit, for `WorkerTransport`.

    Raises:
        OSError: The system has no descriptor or folder left.
    """

    def __init__(self) -> None:
        listener, self.handle = _listen()
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
            self._socket.setsockopt(zmq.RCVHWM, _MAX_RECEIVED)
            self._socket.setsockopt(zmq.USE_FD, listener.fileno())
            self._socket.bind("ipc://mcinfer")  # libzmq wants an address, and does not use it
            listener.detach()
            self.fd = int(self._socket.getsockopt(zmq.FD))
            self._poll = [(self._socket, _READABLE)]
            self._drained = False
        except zmq.ZMQError as exc:
            listener.close()
            self.close()
            raise OSError(exc.errno, f"cannot make a ZeroMQ socket: {exc}") from exc

    def send(self, peers: Sequence[bytes], data: bytes) -> None:
        """Send a message to each of these without waiting.

        Raises:
            UnreachableError: One of them is gone or does not read; those after it have got nothing.
        """
        self._drained = False
        try:
            for peer in peers:
                _send(self._socket, peer, _SEND_MORE)
                _send(self._socket, data, _DONT_WAIT)
        except zmq.ZMQError as exc:
            raise UnreachableError(str(exc)) from exc

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next message and its peer; None when there is nothing more.

        A message of several parts comes as an empty one.
        """
        if not zmq.zmq_poll(self._poll, 0):
            self._drained = True
            return None
        peer = self._socket.recv(_DONT_WAIT)
        frame = self._socket.recv(_DONT_WAIT, copy=False)
        if not frame.more:
            return peer, frame.bytes
        while frame.more:
            frame = self._socket.recv(_DONT_WAIT, copy=False)
        return peer, b""

    def may_sleep(self) -> bool:
        """Whether polling the descriptor now misses no message; else call `receive` first."""
        if not self._drained and not zmq.zmq_poll(self._poll, 0):
            self._drained = True
        return self._drained

    def close(self) -> None:
        """Close at once, without waiting for messages to leave."""
        self._context.destroy(linger=0)
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class WorkerTransport:
    """A worker's side, a DEALER, which connects in the background.

    `handle` is the master's `MasterTransport.handle`, which the worker inherited and owns until `close`. `fd`
    becomes readable with a message; `receive` all before polling it.
    """

    def __init__(self, handle: int) -> None:
        os.set_inheritable(handle, False)
        self._handle = handle
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.connect(f"ipc:///proc/self/fd/{handle}")
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def send(self, data: bytes) -> None:
        """Send a message, without a time limit."""
        _send(self._socket, data)

    def wait(self) -> bytes:
        """The next message, without a time limit."""
        data: bytes = self._socket.recv()
        return data

    def receive(self) -> bytes | None:
        """The next message, or None when there is nothing more."""
        if not int(self._socket.getsockopt(_EVENTS)) & _READABLE:
            return None
        return self._socket.recv(_DONT_WAIT)

    def may_receive(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _READABLE)

    def close(self) -> None:
        """Close; sent messages get a second to leave."""
        self._socket.close()
        self._context.term()
        os.close(self._handle)
