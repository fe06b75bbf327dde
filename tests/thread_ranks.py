"""Ranks as threads of the test's process, joined by socket pairs: fast, and their errors are at hand."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

from mcinfer.ranks.collectives.base import Group
from mcinfer.ranks.collectives.shm import join_sockets

T = TypeVar("T")


def star(stack: ExitStack, size: int) -> list[list[socket.socket]]:
    """By rank, the sockets of a star; rank 0 is in its middle."""
    ends: list[list[socket.socket]] = [[]]
    for _ in range(1, size):
        hub, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends[0].append(stack.enter_context(hub))
        ends.append([stack.enter_context(other)])
    return ends


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
    """What the body returns or raises in each rank of a group of the backend shm, which all join first."""
    with ExitStack() as stack:
        ends = star(stack, size)

        def join(rank: int) -> T:
            with join_sockets(rank, size, ends[rank], timeout=30.0) as group:
                group.timeout = timeout
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
