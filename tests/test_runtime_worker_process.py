"""Tests of mcinfer/runtime/worker_process.py: the master never waits to send CANCEL."""

import socket
import subprocess
import sys

import pytest

from mcinfer.protocol import Cancel, decode
from mcinfer.runtime.worker_process import send_cancel

MESSAGE = Cancel(request=2**62, shard=1)


def test_worker_that_does_not_read_or_is_gone_does_not_hold_up_the_master() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(True)  # a worker cannot change this for the master
        with pytest.raises(BlockingIOError):  # noqa: PT012 as soon as the worker's end is full
            while True:
                send_cancel(ours, MESSAGE)
        assert decode(theirs.recv(64)) == MESSAGE
        theirs.close()
        with pytest.raises(ConnectionError):
            send_cancel(ours, MESSAGE)


WITHOUT_SIGPIPE = """
import signal, socket
from mcinfer.protocol import Cancel
from mcinfer.runtime.worker_process import send_cancel
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
theirs.close()
try:
    send_cancel(ours, Cancel(request=1, shard=0))
except OSError as exc:
    print(exc.strerror)
"""


def test_program_that_wants_to_end_by_sigpipe_does_not_by_a_worker() -> None:
    command = [sys.executable, "-c", WITHOUT_SIGPIPE]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "Broken pipe\n"
