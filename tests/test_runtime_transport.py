"""Tests of mcinfer/runtime/transport.py: one contract for both transports, in one process."""

import contextlib
import errno
import fcntl
import gc
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from mcinfer.config import TRANSPORTS
from mcinfer.protocol import MAX_MESSAGE_BYTES
from mcinfer.runtime.folder import RuntimeFolder
from mcinfer.runtime.transport import (
    MasterTransport,
    SendError,
    SocketPairMaster,
    WorkerTransport,
    ZeroMQMaster,
    connect,
)

PATIENCE = 40.0
LARGE = 1 << 16
"""Bytes of the largest message that is one packet of a socket pair."""

T = TypeVar("T")
Joined = tuple[MasterTransport, WorkerTransport]


def open_master(kind: str) -> MasterTransport:
    if kind == "socketpair":
        return SocketPairMaster()
    with RuntimeFolder() as folder:
        return ZeroMQMaster(*folder.listen())


def join(master: MasterTransport, index: int = 0) -> WorkerTransport:
    """A worker of this process, with a copy of the descriptor that a process of its own would inherit."""
    kind = "zeromq" if isinstance(master, ZeroMQMaster) else "socketpair"
    worker = connect(kind, os.dup(master.add(index)))
    master.started(index)
    return worker


def received(master: MasterTransport, *indices: int) -> tuple[bytes, bytes]:
    """The next message, as the module's text says how it is waited for; of these workers, or of the first."""
    fds = [*master.fds]
    fds += [fd for index in indices or (0,) if (fd := master.worker_fd(index)) is not None]
    until = time.monotonic() + PATIENCE
    while (message := master.receive()) is None:
        ready, _, _ = select.select(fds, [], [], max(0.0, until - time.monotonic()))
        assert ready
        master.note_ready(ready)
    return message


def heard(worker: WorkerTransport) -> bytes:
    """The worker's next message, without blocking in `wait`."""
    while (data := worker.receive()) is None:
        assert select.select([worker.fd], [], [], PATIENCE)[0]
    return data


def greet(master: MasterTransport, worker: WorkerTransport, index: int = 0) -> bytes:
    """Make the two know each other; the worker's name."""
    worker.send(b"hello")
    peer, data = received(master, index)
    assert data == b"hello"
    return peer


def eventually(condition: Callable[[], T]) -> T:
    until = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < until
    return result


@pytest.fixture(params=TRANSPORTS)
def master(request: pytest.FixtureRequest) -> Iterator[MasterTransport]:
    gc.collect()  # what earlier tests left is not to go now
    before = len(os.listdir("/proc/self/fd"))
    master = open_master(request.param)
    yield master
    master.close()
    gc.collect()
    eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


@pytest.fixture
def joined(master: MasterTransport) -> Iterator[Joined]:
    worker = join(master)
    yield master, worker
    worker.close()


# The contract.


def test_messages_pass_both_ways_in_order(joined: Joined) -> None:
    master, worker = joined
    peer = greet(master, worker)
    for number in range(100):
        master.send(peer, b"%d" % number)
    assert [worker.wait() for _ in range(100)] == [b"%d" % number for number in range(100)]
    for number in range(100):
        worker.send(b"%d" % number)
    seen = [received(master) for _ in range(100)]
    assert seen == [(peer, b"%d" % number) for number in range(100)]


@pytest.mark.parametrize("size", [0, LARGE, LARGE + 1, MAX_MESSAGE_BYTES])
def test_message_of_any_size_comes_whole(joined: Joined, size: int) -> None:
    master, worker = joined
    peer = greet(master, worker)
    data = (b"\xc1" + os.urandom(999)) * (size // 1000 + 1)
    data = data[:size]
    for _ in range(2):
        master.send(peer, data)
        assert worker.wait() == data
        master.send(peer, data)
        assert heard(worker) == data
        worker.send(data)
        assert received(master) == (peer, data)


def test_owner_that_asks_before_it_sleeps_misses_no_message(joined: Joined) -> None:
    master, worker = joined
    peer = greet(master, worker)
    for number in range(100):
        worker.send(b"from %d" % number)
        master.send(peer, b"to %d" % number)
        if master.may_sleep():
            fds = master.fds or [master.worker_fd(0) or -1]
            ready, _, _ = select.select(fds, [], [], PATIENCE)
            assert ready
        assert received(master) == (peer, b"from %d" % number)
        assert worker.wait() == b"to %d" % number


def test_peer_that_is_gone_cannot_be_sent_to(master: MasterTransport) -> None:
    worker = join(master)
    peer = greet(master, worker)
    worker.close()

    def refused() -> bool:
        try:
            master.send(peer, b"xy")
            master.receive()
        except SendError:
            return True
        return False

    eventually(refused)


def test_worker_that_was_removed_cannot_be_sent_to_and_its_place_is_free(
    master: MasterTransport,
) -> None:
    first = join(master)
    peer = greet(master, first)
    first.close()
    master.remove(0)
    second = join(master)
    other = greet(master, second)
    assert other != peer
    master.send(other, b"for the second")
    assert second.wait() == b"for the second"
    second.close()


def test_what_a_worker_said_last_comes_though_it_is_gone(master: MasterTransport) -> None:
    worker = join(master)
    peer = greet(master, worker)
    master.send(peer, b"not read")
    worker.send(b"last words")
    worker.close()
    assert received(master) == (peer, b"last words")


def test_peer_that_does_not_read_is_refused_more_and_nobody_waits(joined: Joined) -> None:
    master, worker = joined
    peer = greet(master, worker)

    def send_many() -> None:
        for _ in range(100_000):
            master.send(peer, bytes(1000))

    with pytest.raises(SendError) as caught:
        send_many()
    assert caught.value.errno == errno.EAGAIN
    other = join(master, 1)
    master.send(greet(master, other, 1), b"for the other")
    assert other.wait() == b"for the other"
    other.close()


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_master_closes_at_once_though_nobody_read(kind: str) -> None:
    master = open_master(kind)
    worker = join(master)
    peer = greet(master, worker)
    for _ in range(5):
        master.send(peer, bytes(10_000_000))
    master.close()
    worker.close()


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_worker_closes_though_the_master_is_gone(kind: str) -> None:
    master = open_master(kind)
    worker = join(master)
    worker.send(b"to nobody")
    master.close()
    worker.close()


ANOTHER_PROCESS = """
import sys
from mcinfer.runtime.transport import connect
worker = connect(sys.argv[1], int(sys.argv[2]))
worker.send(b"hello")
worker.send(worker.wait() * 2)
worker.close()
"""


def test_process_that_inherits_the_descriptor_is_joined(master: MasterTransport) -> None:
    kind = "zeromq" if isinstance(master, ZeroMQMaster) else "socketpair"
    fd = master.add(0)
    assert not os.get_inheritable(fd)
    command = [sys.executable, "-c", ANOTHER_PROCESS, kind, str(fd)]
    with subprocess.Popen(command, pass_fds=[fd]) as process:
        master.started(0)
        peer, data = received(master)
        assert data == b"hello"
        master.send(peer, bytes(100_000))
        assert received(master) == (peer, bytes(200_000))
    assert process.returncode == 0
    master.remove(0)


# ZeroMQ.


@pytest.fixture
def zeromq() -> Iterator[MasterTransport]:
    master = open_master("zeromq")
    yield master
    master.close()


def test_message_of_several_parts_is_an_empty_one(zeromq: MasterTransport) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"ipc:///proc/self/fd/{zeromq.add(0)}")
    stranger.send_multipart([b"one", b"two"])
    stranger.send_multipart([b"alone"])
    assert received(zeromq)[1] == b""
    assert received(zeromq)[1] == b"alone"
    stranger.close()
    context.term()


def test_socket_has_no_address_that_a_stranger_could_connect_to(
    zeromq: MasterTransport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    other = open_master("zeromq")
    assert [*tmp_path.iterdir()] == []
    path = os.readlink(f"/proc/self/fd/{other.add(0)}")
    assert path.startswith(str(tmp_path))
    assert path.endswith(" (deleted)")
    with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(FileNotFoundError):
        stranger.connect(path.removesuffix(" (deleted)"))
    other.close()
    assert zeromq.receive() is None


def test_worker_gives_the_handle_up_when_it_is_connected(zeromq: MasterTransport) -> None:
    handle = os.dup(zeromq.add(0))
    worker = connect("zeromq", handle)
    peer = greet(zeromq, worker)
    zeromq.send(peer, b"connected")
    assert worker.wait() == b"connected"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
    worker.close()


# Socket pairs.


class Pair:
    """A master, and the bare end that a worker which was taken over has."""

    def __init__(self) -> None:
        self.master = SocketPairMaster()
        self.end = socket.socket(fileno=os.dup(self.master.add(0)))
        self.master.started(0)
        self.fd = self.master.worker_fd(0)

    def hand_over(self, *descriptors: int) -> None:
        self.end.send(b"\xc1")
        packed = b"".join(struct.pack("=i", fd) for fd in descriptors)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if packed else []
        self.end.sendmsg([b"\xc1"], rights)
        for fd in descriptors:
            os.close(fd)


@pytest.fixture
def pair() -> Iterator[Pair]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    pair = Pair()
    yield pair
    pair.master.close()
    pair.end.close()
    assert len(os.listdir("/proc/self/fd")) == before


def memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("message", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

NO_MESSAGES: dict[str, Callable[[], list[int]]] = {
    "none": list,
    "two": lambda: [memfd(10, SEALS), memfd(10, SEALS)],
    "more than any packet": lambda: [memfd(10, SEALS) for _ in range(9)],
    "not sealed": lambda: [memfd(10, fcntl.F_SEAL_SHRINK)],
    "too large": lambda: [memfd(MAX_MESSAGE_BYTES + 1, SEALS)],
    "a terabyte": lambda: [memfd(1 << 40, SEALS)],
    "pipe that nobody writes to": lambda: [_pipe()],
    "file": lambda: [os.open(__file__, os.O_RDONLY)],
}


@pytest.mark.parametrize("what", NO_MESSAGES)
def test_descriptor_that_is_no_sealed_message_is_an_empty_one(pair: Pair, what: str) -> None:
    pair.hand_over(*NO_MESSAGES[what]())
    pair.end.send(b"after it")
    assert received(pair.master)[1] == b""
    assert received(pair.master)[1] == b"after it"


def test_packet_that_is_larger_than_any_is_an_empty_message(pair: Pair) -> None:
    pair.end.send(bytes(LARGE + 1))
    pair.end.send(bytes(LARGE * 2))
    assert received(pair.master)[1] == b""
    assert received(pair.master)[1] == b""


def test_descriptors_that_nobody_asked_for_are_not_taken(pair: Pair) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", pair.end.fileno()))]
    before = len(os.listdir("/proc/self/fd"))
    pair.end.sendmsg([b"with one"], rights)
    assert received(pair.master)[1] == b"with one"
    assert len(os.listdir("/proc/self/fd")) == before


def test_mark_without_a_descriptor_holds_nobody_up(pair: Pair) -> None:
    other = join(pair.master, 1)
    pair.end.send(b"\xc1")
    other.send(b"from the other")
    assert received(pair.master, 0, 1)[1] == b"from the other"
    pair.master.note_ready([pair.fd or 0])
    assert pair.master.receive() is None
    other.close()


def test_worker_that_floods_waits_and_keeps_nobody_from_being_heard(pair: Pair) -> None:
    pair.end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            pair.end.send(bytes(1000))
    other = join(pair.master, 1)
    other.send(b"from the other")
    pair.master.note_ready([fd for index in (0, 1) if (fd := pair.master.worker_fd(index))])
    assert [pair.master.receive() for _ in range(3)][1:] == [(b"2", b"from the other"), None]
    other.close()


def test_end_is_said_once_after_all_that_was_sent(pair: Pair) -> None:
    pair.end.send(b"last words")
    pair.end.close()
    assert pair.fd is not None
    assert received(pair.master)[1] == b"last words"
    assert pair.master.take_ended() == []
    pair.master.note_ready([pair.fd])
    assert pair.master.receive() is None
    assert pair.master.take_ended() == [pair.fd]
    pair.master.note_ready([pair.fd])
    assert pair.master.receive() is None
    assert pair.master.take_ended() == []


def test_worker_whose_master_is_gone_is_told() -> None:
    master = SocketPairMaster()
    worker = join(master)
    master.close()
    assert worker.receive() is None
    with pytest.raises(ConnectionError):
        worker.wait()
    with pytest.raises(ConnectionError):
        worker.send(b"to nobody")
    worker.close()


WITHOUT_SIGPIPE = """
import os, signal
from mcinfer.runtime.cancels import Cancels
from mcinfer.runtime.transport import SendError, SocketPairMaster
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
master = SocketPairMaster()
master.add(0)
master.started(0)
for size in (2, 100_000):
    try:
        master.send(b"1", bytes(size))
    except SendError as exc:
        print(exc.strerror)
ours, theirs = Cancels.pair()
theirs.close()
try:
    ours.send(1, 0)
except OSError as exc:
    print(exc.strerror)
"""


def test_program_that_wants_to_end_by_sigpipe_does_not_by_a_worker() -> None:
    command = [sys.executable, "-c", WITHOUT_SIGPIPE]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "Broken pipe\n" * 3


def test_pair_that_cannot_be_made_is_an_os_error() -> None:
    master = SocketPairMaster()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            master.add(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert master.worker_fd(0) is None
    master.close()
