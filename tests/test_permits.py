"""Tests of mcinfer/permits.py: each permit is taken once, by one side, and nobody waits."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from mcinfer.permits import Permits


def test_as_many_are_taken_as_were_given() -> None:
    permits = Permits.create()
    assert not permits.take()
    permits.give()
    permits.give()
    assert [permits.take() for _ in range(3)] == [True, True, False]
    permits.close()


def test_each_is_taken_once_however_many_want_it() -> None:
    ours = Permits.create()
    theirs = Permits.inherited(os.dup(ours.fd))
    for _ in range(200):
        ours.give()
    with ThreadPoolExecutor(4) as pool:
        taken = [*pool.map(lambda i: (ours if i % 2 else theirs).take(), range(400))]
    assert sum(taken) == 200
    ours.close()
    theirs.close()


def test_descriptor_is_not_handed_to_programs_unasked() -> None:
    permits = Permits.create()
    assert not os.get_inheritable(permits.fd)
    theirs = Permits.inherited(os.dup(permits.fd))
    assert not os.get_inheritable(theirs.fd)
    theirs.close()
    permits.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        permits.give()


def test_other_side_cannot_have_anybody_wait() -> None:
    permits = Permits.create()
    theirs = socket.socket(fileno=os.dup(permits.fd))
    os.set_blocking(theirs.fileno(), True)
    assert not permits.take()
    for _ in range(1000):  # what it gives is nobody's
        try:
            theirs.send(b"1", socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
    permits.give()
    assert [permits.take(), permits.take()] == [True, False]
    theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError, match="pipe"):
        permits.give()
    assert not permits.take()
    theirs.close()
    permits.close()
