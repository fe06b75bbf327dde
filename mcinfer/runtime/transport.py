"""Message transport between a master and its workers: one interface, two implementations.

::

    "zeromq"      a ROUTER in the master, a DEALER in each worker. They meet at one listening socket
                  that has no name: each worker inherits a handle to it, and connects by that.
    "socketpair"  one SOCK_SEQPACKET pair (unix(7)) for each worker, which inherits its end.

Only this file imports zmq. The master never blocks in a send and never lingers; a worker has one peer and
may do both. One thread at a time uses a `MasterTransport` or a `WorkerTransport`. Its owner

    registers fds, and worker_fd(index) after each add, for EPOLLIN; unregisters those of take_ended
    waits without sleeping unless may_sleep(), notes ready descriptors, and receives until None
    after the end of a worker's process: receives its last messages, and calls remove(index)

ZeroMQ disconnects a peer that sends a frame of more than `MAX_MESSAGE_BYTES`. libzmq ends the whole process
if it has no descriptor for a connection that it accepts (src/ipc_listener.cpp). So only a process that
holds the handle can connect, and a descriptor must be free for a worker before it is started.

A message that is too large for one packet of a socket pair goes as a sealed memfd: a mark, then a packet
with the descriptor. A worker that sends too much waits for its master (SO_SNDBUF).
"""

import errno
import fcntl
import os
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

import zmq

from mcinfer.protocol import MAX_MESSAGE_BYTES
from mcinfer.shm.descriptors import close_all, take_packet

_MAX_QUEUED = 10_000
_MAX_RECEIVED = 16  # messages of one peer that wait in ZeroMQ

# As plain numbers: operations on enumerations cost more than the calls they are for.
_SEND_MORE = int(zmq.SNDMORE | zmq.DONTWAIT)
_DONT_WAIT = int(zmq.DONTWAIT)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)

# As it is in the C extension: what wraps it costs as much again.
_send = zmq.backend.Socket.send
_PACKET_DONT_WAIT = int(socket.MSG_DONTWAIT)
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)  # a program may have SIGPIPE end it
_PACKET_BYTES = 1 << 16  # largest message for one packet, below every system's SO_SNDBUF
_BUFFER_BYTES = 1 << 20  # SO_SNDBUF; the system may give less (net.core.wmem_max)
_MARK = b"\xc1"  # A descriptor follows this packet; messages of one byte go as one

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SendError(OSError):
    """The peer is gone, or does not accept messages."""


class MasterTransport(ABC):
    """The master's side. A peer is known by bytes that this object chose; `fds` are to be polled."""

    fds: Sequence[int] = ()

    @abstractmethod
    def add(self, index: int) -> int:
        """The descriptor that a new worker's process must inherit, for `connect`; it stays this object's.

        Call `started` when the process has it, `remove` if there is none.
        """

    def started(self, index: int) -> None:  # noqa: B027 nothing, where nothing is to be done
        """The worker's process has inherited its descriptor."""

    @abstractmethod
    def remove(self, index: int) -> None:
        """The worker's process has ended, or was not started: close its `worker_fd`."""

    def worker_fd(self, index: int) -> int | None:  # noqa: ARG002 for those that have one
        """The descriptor to poll for this worker's messages (level-triggered); None if `fds` are enough."""
        return None

    def note_ready(self, fds: Iterable[int]) -> None:  # noqa: B027 likewise
        """These descriptors are readable; those of others are ignored.

        Each gives at most one message to `receive` until it is noted again. So a silent worker costs no
        system call, and no worker can keep the others from being heard.
        """

    def take_ended(self) -> list[int]:
        """The `worker_fd` of workers that have closed their end, each once: poll them no more."""
        return []

    @abstractmethod
    def send(self, peer: bytes, data: bytes) -> None:
        """Send a message without waiting.

        Raises:
            SendError: The peer is gone or does not read, or no descriptor is left for a large message.
        """

    @abstractmethod
    def receive(self) -> tuple[bytes, bytes] | None:
        """The next message and its peer; None when there is nothing more.

        A message of several parts comes as an empty one.
        """

    def may_sleep(self) -> bool:
        """Whether polling the descriptors now misses no message; else call `receive` first."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Close at once, without waiting for messages to leave."""


class WorkerTransport(ABC):
    """A worker's side. `fd` becomes readable with a message; `receive` all before polling it."""

    fd: int

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Send a message, without a time limit; `OSError`: the master is gone."""

    @abstractmethod
    def wait(self) -> bytes:
        """The next message, without a time limit; `OSError`: the master is gone."""

    @abstractmethod
    def receive(self) -> bytes | None:
        """The next message, or None when there is nothing more."""

    @abstractmethod
    def close(self) -> None:
        """Close; sent messages get a second to leave."""


def connect(kind: str, fd: int) -> WorkerTransport:
    """A worker's side of the transport, by the descriptor that the worker inherited; it owns that."""
    return ZeroMQWorker(fd) if kind == "zeromq" else SocketPairWorker(fd)


# ZeroMQ.


class ZeroMQMaster(MasterTransport):
    """A ROUTER: peers are known by the identity that ZeroMQ gave their connection.

    Its descriptor becomes readable when something may have changed, and not again until `receive` has
    returned None (ZMQ_FD is edge-triggered, see zmq_getsockopt(3)); a `send` may use that up.

    Args:
        listener: A listening stream socket, to which workers connect; owned from now on.
        handle: A descriptor of its file (O_PATH), by which they connect; likewise.
    """

    def __init__(self, listener: socket.socket, handle: int) -> None:
        self._handle = handle
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
            self.fds = (int(self._socket.getsockopt(zmq.FD)),)
            self._poll = [(self._socket, _READABLE)]
            self._drained = False
        except zmq.ZMQError as exc:
            listener.close()
            self.close()
            raise OSError(exc.errno, f"cannot make a ZeroMQ socket: {exc}") from exc

    def add(self, index: int) -> int:  # noqa: ARG002 of the contract
        return self._handle

    def remove(self, index: int) -> None:
        """ZeroMQ itself notices the end of the connection."""

    def send(self, peer: bytes, data: bytes) -> None:
        self._drained = False
        try:
            _send(self._socket, peer, _SEND_MORE)
            _send(self._socket, data, _DONT_WAIT)
        except zmq.ZMQError as exc:
            raise SendError(exc.errno, str(exc)) from exc

    def receive(self) -> tuple[bytes, bytes] | None:
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
        if not self._drained and not zmq.zmq_poll(self._poll, 0):
            self._drained = True
        return self._drained

    def close(self) -> None:
        self._context.destroy(linger=0)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class ZeroMQWorker(WorkerTransport):
    """A DEALER, which connects in the background."""

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
        _send(self._socket, data)

    def wait(self) -> bytes:
        data: bytes = self._socket.recv()
        if self._handle >= 0:
            self._give_up_handle()
        return data

    def receive(self) -> bytes | None:
        if not int(self._socket.getsockopt(_EVENTS)) & _READABLE:
            return None
        return self._socket.recv(_DONT_WAIT)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._give_up_handle()

    def _give_up_handle(self) -> None:
        """Close the handle after the connection, so that no code in this process can connect again."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


# Socket pairs.


class _Packets:
    """Messages of any size over one end of a pair, which this object owns."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._marked = False

    def send(self, data: bytes) -> None:
        if 1 < len(data) <= _PACKET_BYTES:
            self.end.send(data, _NO_SIGNAL)
            return
        fd = os.memfd_create("mcinfer-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self.end.send(_MARK, _NO_SIGNAL)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", fd))]
            self.end.sendmsg([_MARK], rights, _NO_SIGNAL)
        finally:
            os.close(fd)

    def receive(self, flags: int = 0) -> bytes | None:
        """The next message; None if it is not there (whole) and the end does not block."""
        try:
            if not self._marked:
                data = self.end.recv(_PACKET_BYTES + 1, flags)
                if 1 < len(data) <= _PACKET_BYTES:
                    return data
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "the other side has closed")
                if data != _MARK:
                    return b""
                self._marked = True
            data, descriptors, cut_off = take_packet(self.end, 1, flags)
        except BlockingIOError:
            return None
        self._marked = False
        try:
            return _contents(descriptors[0]) if len(descriptors) == 1 and not cut_off else b""
        finally:
            close_all(descriptors)


def _contents(fd: int) -> bytes:
    """The content of a sealed memfd; empty if it is none, or too large.

    To read a pipe, or a file of a slow file system, would block.
    """
    with suppress(OSError):
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS:
            size = os.fstat(fd).st_size
            if size <= MAX_MESSAGE_BYTES:
                return os.pread(fd, size, 0)
    return b""


class _Pair(_Packets):
    """The master's end of one, and the worker's until its process has it."""

    def __init__(self, peer: bytes) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        self.peer = peer
        self.fd = ours.fileno()
        self.reset = False
        self.ended = False
        ours.setblocking(False)
        for end in (ours, self.theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


class SocketPairMaster(MasterTransport):
    def __init__(self) -> None:
        self._pairs: dict[int, _Pair] = {}
        self._by_fd: dict[int, _Pair] = {}
        self._by_peer: dict[bytes, _Pair] = {}
        self._ready: deque[_Pair] = deque()
        self._ended: list[int] = []
        self._added = 0

    def add(self, index: int) -> int:
        self._added += 1
        pair = _Pair(b"%d" % self._added)
        self._pairs[index] = self._by_fd[pair.fd] = self._by_peer[pair.peer] = pair
        return pair.theirs.fileno()

    def started(self, index: int) -> None:
        self._pairs[index].theirs.close()

    def remove(self, index: int) -> None:
        pair = self._pairs.pop(index)
        del self._by_fd[pair.fd], self._by_peer[pair.peer]
        with suppress(ValueError):
            self._ended.remove(pair.fd)
        pair.ended = True
        pair.end.close()
        pair.theirs.close()

    def worker_fd(self, index: int) -> int | None:
        pair = self._pairs.get(index)
        return None if pair is None else pair.fd

    def note_ready(self, fds: Iterable[int]) -> None:
        for fd in fds:
            pair = self._by_fd.get(fd)
            if pair is not None:
                self._ready.append(pair)

    def take_ended(self) -> list[int]:
        ended, self._ended = self._ended, []
        return ended

    def send(self, peer: bytes, data: bytes) -> None:
        pair = self._by_peer.get(peer)
        if pair is None:
            raise SendError(errno.EHOSTUNREACH, "Host unreachable")
        try:
            pair.send(data)
        except OSError as exc:
            raise SendError(exc.errno, exc.strerror) from exc

    def receive(self) -> tuple[bytes, bytes] | None:
        while self._ready:
            pair = self._ready.popleft()
            if pair.ended:
                continue
            try:
                data = pair.receive()
            except OSError:
                # A peer that closed without reading all gives an error first, then its last messages.
                pair.ended, pair.reset = pair.reset, True
                if pair.ended:
                    self._ended.append(pair.fd)
                else:
                    self._ready.append(pair)
                continue
            if data is not None:
                return pair.peer, data
        return None

    def close(self) -> None:
        for index in [*self._pairs]:
            self.remove(index)


class SocketPairWorker(WorkerTransport):
    def __init__(self, fd: int) -> None:
        end = socket.socket(fileno=fd)
        end.set_inheritable(False)
        self._packets = _Packets(end)
        self.fd = fd

    def send(self, data: bytes) -> None:
        self._packets.send(data)

    def wait(self) -> bytes:
        return self._packets.receive() or b""

    def receive(self) -> bytes | None:
        with suppress(ConnectionError):  # that the master is gone, the watcher sees
            return self._packets.receive(_PACKET_DONT_WAIT)
        return None

    def close(self) -> None:
        self._packets.end.close()
