"""Tests of mcinfer/permits.py: each permit is taken once, by one side."""

import os
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
    theirs = Permits(os.dup(ours.fd))
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
    permits.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        permits.give()
