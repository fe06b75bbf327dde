"""Tests of mcinfer/runtime/transport.py: master and worker in one process."""

import errno
import gc
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcinfer.protocol import MAX_MESSAGE_BYTES
from mcinfer.runtime.transport import (
    MasterTransport,
    UnreachableError,
    WorkerTransport,
)
from tests.process.waiting import wait_until

PATIENCE = 40.0
LARGE = 1 << 16

Joined = tuple[MasterTransport, WorkerTransport]


def join(master: MasterTransport) -> WorkerTransport:
    """A worker of this process, with a copy of the handle that a process of its own would inherit."""
    return WorkerTransport(os.dup(master.handle))


def received(master: MasterTransport) -> tuple[bytes, bytes]:
    """The next message, as the module's text says how it is waited for."""
    until = time.monotonic() + PATIENCE
    while (message := master.receive()) is None:
        assert select.select([master.fd], [], [], max(0.0, until - time.monotonic()))[0]
    return message


def heard(worker: WorkerTransport) -> bytes:
    """The worker's next message, without blocking in `wait`."""
    while (data := worker.receive()) is None:
        assert select.select([worker.fd], [], [], PATIENCE)[0]
    return data


def greet(master: MasterTransport, worker: WorkerTransport) -> bytes:
    """Make the two know each other; the worker's name."""
    worker.send(b"hello")
    peer, data = received(master)
    assert data == b"hello"
    return peer


@pytest.fixture
def master() -> Iterator[MasterTransport]:
    gc.collect()  # what earlier tests left is not to go now
    before = len(os.listdir("/proc/self/fd"))
    master = MasterTransport()
    yield master
    master.close()
    gc.collect()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == before)


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
        master.send([peer], b"%d" % number)
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
        master.send([peer], data)
        assert worker.wait() == data
        master.send([peer], data)
        assert heard(worker) == data
        worker.send(data)
        assert received(master) == (peer, data)


def test_owner_that_asks_before_it_sleeps_misses_no_message(joined: Joined) -> None:
    master, worker = joined
    peer = greet(master, worker)
    for number in range(100):
        worker.send(b"from %d" % number)
        master.send([peer], b"to %d" % number)
        if master.may_sleep():
            assert select.select([master.fd], [], [], PATIENCE)[0]
        assert received(master) == (peer, b"from %d" % number)
        assert worker.wait() == b"to %d" % number


def test_peer_that_is_gone_cannot_be_sent_to(master: MasterTransport) -> None:
    worker = join(master)
    peer = greet(master, worker)
    worker.close()

    def refused() -> bool:
        try:
            master.send([peer], b"xy")
            master.receive()
        except UnreachableError:
            return True
        return False

    wait_until(refused)


def test_what_a_worker_said_last_comes_though_it_is_gone(master: MasterTransport) -> None:
    worker = join(master)
    peer = greet(master, worker)
    master.send([peer], b"not read")
    worker.send(b"last words")
    worker.close()
    assert received(master) == (peer, b"last words")


def test_peer_that_does_not_read_is_refused_more_and_nobody_waits(joined: Joined) -> None:
    master, worker = joined
    peer = greet(master, worker)

    def send_many() -> None:
        for _ in range(100_000):
            master.send([peer], bytes(1000))

    with pytest.raises(UnreachableError) as caught:
        send_many()
    assert str(caught.value) == os.strerror(errno.EAGAIN)
    other = join(master)
    master.send([greet(master, other)], b"for the other")
    assert other.wait() == b"for the other"
    other.close()


def test_master_closes_at_once_though_nobody_read() -> None:
    master = MasterTransport()
    worker = join(master)
    peer = greet(master, worker)
    for _ in range(5):
        master.send([peer], bytes(10_000_000))
    master.close()
    worker.close()


def test_worker_closes_though_the_master_is_gone() -> None:
    master = MasterTransport()
    worker = join(master)
    worker.send(b"to nobody")
    master.close()
    worker.close()


ANOTHER_PROCESS = """
import sys
from mcinfer.runtime.transport import WorkerTransport
worker = WorkerTransport(int(sys.argv[1]))
worker.send(b"hello")
worker.send(worker.wait() * 2)
worker.close()
"""


def test_process_that_inherits_the_descriptor_is_joined(master: MasterTransport) -> None:
    fd = master.handle
    assert not os.get_inheritable(fd)
    command = [sys.executable, "-c", ANOTHER_PROCESS, str(fd)]
    with subprocess.Popen(command, pass_fds=[fd]) as process:
        peer, data = received(master)
        assert data == b"hello"
        master.send([peer], bytes(100_000))
        assert received(master) == (peer, bytes(200_000))
    assert process.returncode == 0


def test_socket_has_no_address_that_a_stranger_could_connect_to(
    master: MasterTransport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    other = MasterTransport()
    assert [*tmp_path.iterdir()] == []
    path = os.readlink(f"/proc/self/fd/{other.handle}")
    assert path.startswith(str(tmp_path))
    assert path.endswith(" (deleted)")
    with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(FileNotFoundError):
        stranger.connect(path.removesuffix(" (deleted)"))
    other.close()
    assert master.receive() is None
