"""Tests of mcinfer/runtime/cancels.py: the worker waits for CANCEL messages, the master never waits."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mcinfer.errors import ProtocolError
from mcinfer.runtime.cancels import Cancels

Ends = tuple[Cancels, Cancels]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = Cancels.pair()
    worker = Cancels.inherited(os.dup(theirs.fd))
    theirs.close()
    yield ours, worker
    ours.close()
    worker.close()


def test_runs_are_cancelled_one_after_another_until_the_master_is_gone(ends: Ends) -> None:
    master, worker = ends
    runs = [(0, 0), (2**64 - 1, 2**32 - 1), (7, 3)]
    for request, shard in runs:
        master.send(request, shard)
    assert [worker.wait() for _ in runs] == runs
    master.close()
    assert worker.wait() is None


def test_hang_up_ends_the_wait_though_a_forked_child_holds_the_masters_end(ends: Ends) -> None:
    master, worker = ends
    copy = os.dup(master.fd)
    master.hang_up()
    assert worker.wait() is None
    os.close(copy)


def test_programs_do_not_inherit_the_descriptors(ends: Ends) -> None:
    assert not any(os.get_inheritable(end.fd) for end in ends)


def test_worker_that_does_not_read_or_is_gone_does_not_hold_up_the_master(ends: Ends) -> None:
    master, worker = ends
    os.set_blocking(worker.fd, True)  # a worker cannot change this for the master
    with pytest.raises(BlockingIOError):  # noqa: PT012 as soon as the worker's end is full
        while True:
            master.send(1, 2)
    assert worker.wait() == (1, 2)
    worker.close()
    with pytest.raises(ConnectionError):
        master.send(1, 2)


@pytest.mark.parametrize("data", [b"x", bytes(13)], ids=len)
def test_message_of_another_size_is_a_protocol_error(data: bytes) -> None:
    raw, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = Cancels(end)
    with raw:
        raw.send(data)
        with pytest.raises(ProtocolError, match="expected 12"):
            worker.wait()
    worker.close()


WITHOUT_SIGPIPE = """
import signal
from mcinfer.runtime.cancels import Cancels
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
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
    assert ended.stdout == "Broken pipe\n"
