"""Ranks as threads of the test's process: fast, and their errors are at hand."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

from mcinfer.ranks.collectives.base import Group
from mcinfer.ranks.collectives.shm import Shared, inherit

T = TypeVar("T")


def in_threads(size: int, body: Callable[[int], T]) -> list[T | Exception]:
    """What the body returns or raises in each rank; all call it at once."""

    def attempt(rank: int) -> T | Exception:
        try:
            return body(rank)
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(attempt, range(size))]


def run_ranks(
    size: int, body: Callable[[Group], T], *, timeout: float = 30.0
) -> list[T | Exception]:
    """What the body returns or raises in each rank of a group of the backend shm, which all inherit."""
    with closing(Shared(size)) as shared:
        fds = [[*map(os.dup, shared.fds(rank))] for rank in range(size)]

    def join(rank: int) -> T:
        with inherit(rank, size, fds[rank], timeout=timeout) as group:
            return body(group)

    return in_threads(size, join)


def results(size: int, body: Callable[[Group], T]) -> list[T]:
    """What the body returns in each rank; its error is the test's."""
    found: list[T] = []
    for outcome in run_ranks(size, body):
        if isinstance(outcome, Exception):
            raise outcome
        found.append(outcome)
    return found
