"""How ranks of one machine that were started apart find each other: by a key that all have.

Rank 0 listens at an abstract address (unix(7)) that is made from the key and the user, and the others
connect. The kernel says which user each side is of (`SO_PEERCRED`). What connects says what rank it is by
the packet that begins `mcinfer.collectives.bootstrap`, which is only looked at here.

Ownership: the caller closes the sockets. The address is free again when all have connected, so the next group
may have the same key.
"""

import contextlib
import errno
import hashlib
import os
import select
import socket
import time

from mcinfer.collectives.bootstrap import call_second_hub, peek_join, send_error
from mcinfer.errors import (
    CollectiveTimeoutError,
    InvalidInputError,
    McinferError,
    ProtocolError,
    RankDiedError,
)
from mcinfer.shm.descriptors import peer_credentials

_PAUSE = 0.02
"""Seconds between two attempts to connect: the system does not show when a process begins to listen."""

_LONGEST_WAIT = 86400.0


def meet(key: str, rank: int, size: int, timeout: float) -> list[socket.socket]:
    """The sockets of a star of ranks, which are the caller's: in rank 0 to ranks 1, 2, …; else to rank 0.

    Raises what `mcinfer.collectives.join` does.
    """
    if size == 1:
        return []
    deadline = time.monotonic() + timeout
    if rank:
        end = _connect(key, deadline)
        if end is None:
            raise CollectiveTimeoutError(
                f"no rank 0 of the group {key!r} was there within {timeout:g} s"
            )
        return [end]
    return _Gathering(key, size, deadline, timeout).run(key, deadline, timeout)


def _address(key: str) -> str:
    digest = hashlib.sha256(f"{os.geteuid()} {key}".encode()).hexdigest()
    return f"\0mcinfer-group-{digest[:32]}"


def _connect(key: str, deadline: float) -> socket.socket | None:
    """A socket to the rank 0 that listens; None if there is none in time."""
    while True:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            end.setblocking(False)
            end.connect(_address(key))
            pid, uid = peer_credentials(end)
            if uid != os.geteuid():
                raise ProtocolError(
                    f"the group {key!r} is of user {uid} (pid {pid}), and this rank of user {os.geteuid()}"
                )
        except (BlockingIOError, ConnectionRefusedError):
            end.close()  # too many wait to be accepted, or no process listens
        except BaseException:
            end.close()
            raise
        else:
            return end
        if time.monotonic() >= deadline:
            return None
        time.sleep(_PAUSE)


def _listen(key: str, size: int, deadline: float, timeout: float) -> socket.socket:
    while True:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(_address(key))
            listener.listen(size)
            listener.setblocking(False)
        except OSError as exc:
            listener.close()
            if exc.errno != errno.EADDRINUSE:
                raise
        else:
            return listener
        # Either a second group has this key, or another one has just come together.
        with contextlib.ExitStack() as stack:
            if end := _connect(key, 0.0):
                stack.enter_context(end)
                call_second_hub(end, size, deadline, timeout)
        if time.monotonic() >= deadline:
            raise InvalidInputError(f"key: got {key!r}, which another group uses")


class _Gathering:
    """Rank 0's sockets while the others connect."""

    def __init__(self, key: str, size: int, deadline: float, timeout: float) -> None:
        self._size = size
        self._joined: dict[int, socket.socket] = {}  # by rank
        # By descriptor, those that have not said their rank.
        self._waiting: dict[int, socket.socket] = {}
        self._listener = _listen(key, size, deadline, timeout)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)

    def run(self, key: str, deadline: float, timeout: float) -> list[socket.socket]:
        """The sockets of ranks 1, 2, …, once all have connected."""
        try:
            while len(self._joined) < self._size - 1:
                wait = min(deadline - time.monotonic(), _LONGEST_WAIT)
                events = self._poll.poll(wait * 1000 if wait > 0 else 0)
                if not events:
                    missing = {*range(1, self._size)} - {*self._joined}
                    raise CollectiveTimeoutError(
                        f"the group {key!r} of {self._size} ranks was not complete within {timeout:g} s: no "
                        f"{', '.join(f'rank {rank}' for rank in sorted(missing))} came"
                    )
                for fd, _ in events:
                    self._note(fd)
        except BaseException as exc:
            if isinstance(exc, McinferError):
                send_error([*self._waiting.values(), *self._joined.values()], exc)
            for end in self._joined.values():
                end.close()
            raise
        finally:
            self._listener.close()
            for end in self._waiting.values():
                end.close()
        return [self._joined[rank] for rank in range(1, self._size)]

    def _note(self, fd: int) -> None:
        if fd == self._listener.fileno():
            self._accept()
        elif fd in self._waiting:
            end = self._waiting[fd]
            rank = self._rank_of(end)
            self._joined[rank] = self._waiting.pop(fd)
            self._poll.modify(fd, 0)  # from now on only its end is news
        else:
            rank = next(rank for rank, end in self._joined.items() if end.fileno() == fd)
            raise RankDiedError(f"rank {rank} hung up before the group was complete")

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except BlockingIOError:
            return
        if peer_credentials(end)[1] != os.geteuid():
            end.close()  # a process of another user must not disturb
            return
        self._waiting[end.fileno()] = end
        self._poll.register(end, select.POLLIN)

    def _rank_of(self, end: socket.socket) -> int:
        """The rank that a process says it is, if that fits."""
        pid, _ = peer_credentials(end)
        rank, size = peek_join(end, f"pid {pid}")
        if size != self._size:
            raise InvalidInputError(
                f"size: rank 0 (pid {os.getpid()}) expects {self._size} ranks, "
                f"rank {rank} (pid {pid}) expects {size}"
            )
        if not 0 <= rank < size:
            raise ProtocolError(f"pid {pid} says it is rank {rank} of {size}")
        if rank == 0 or rank in self._joined:
            other = peer_credentials(self._joined[rank])[0] if rank else os.getpid()
            raise InvalidInputError(
                f"rank: pids {other} and {pid} are both rank {rank} of one group; does another group have "
                "the same key?"
            )
        return rank
