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
from collections.abc import Mapping

from mcinfer.collectives.bootstrap import Deadline, call_second_hub, peek_join, send_error
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


def meet(key: str, rank: int, size: int, timeout: float) -> list[socket.socket]:
    """The sockets of a star of ranks, which are the caller's: in rank 0 to ranks 1, 2, …; else to rank 0.

    Raises what `mcinfer.collectives.join` does.
    """
    if size == 1:
        return []
    deadline = Deadline(timeout)
    if rank == 0:
        return _gather(key, size, deadline)
    end = _connect(key, deadline)
    if end is None:
        raise CollectiveTimeoutError(
            f"no rank 0 of the group {key!r} was there within {timeout:g} s"
        )
    return [end]


def _address(key: str) -> str:
    digest = hashlib.sha256(f"{os.geteuid()} {key}".encode()).hexdigest()
    return f"\0mcinfer-group-{digest[:32]}"


def _connect(key: str, deadline: Deadline) -> socket.socket | None:
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
        if not deadline.milliseconds():
            return None
        time.sleep(_PAUSE)


def _listen(key: str, size: int, deadline: Deadline) -> socket.socket:
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
            if end := _connect(key, Deadline(0.0)):
                stack.enter_context(end)
                call_second_hub(end, size, deadline)
        if not deadline.milliseconds():
            raise InvalidInputError(f"key: got {key!r}, which another group uses")


def _gather(key: str, size: int, deadline: Deadline) -> list[socket.socket]:
    """In rank 0, the sockets of ranks 1, 2, …, once all have connected."""
    listener = _listen(key, size, deadline)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    ends: dict[int, socket.socket] = {}  # what has connected, by descriptor
    ranks: dict[int, int] = {}  # of those that have said their rank
    try:
        while len(ranks) < size - 1:
            events = poll.poll(deadline.milliseconds())
            if not events:
                missing = sorted({*range(1, size)} - {*ranks.values()})
                raise CollectiveTimeoutError(
                    f"the group {key!r} of {size} ranks was not complete within {deadline.timeout:g} s: no "
                    f"{', '.join(f'rank {rank}' for rank in missing)} came"
                )
            for fd, _ in events:
                if fd == listener.fileno():
                    end = _accepted(listener)
                    if end is not None:
                        ends[end.fileno()] = end
                        poll.register(end, select.POLLIN)
                elif fd in ranks:
                    raise RankDiedError(f"rank {ranks[fd]} hung up before the group was complete")
                else:
                    joined = {rank: ends[other] for other, rank in ranks.items()}
                    ranks[fd] = _rank_of(ends[fd], size, joined)
                    poll.modify(fd, 0)  # from now on only its end is news
        joined = {rank: ends.pop(fd) for fd, rank in ranks.items()}
        return [joined[rank] for rank in range(1, size)]
    except McinferError as exc:
        send_error([*ends.values()], exc)
        raise
    finally:
        listener.close()
        for end in ends.values():
            end.close()


def _accepted(listener: socket.socket) -> socket.socket | None:
    """What has connected, unless it is gone again, or of another user, who must not disturb."""
    try:
        end, _ = listener.accept()
    except BlockingIOError:
        return None
    if peer_credentials(end)[1] == os.geteuid():
        return end
    end.close()
    return None


def _rank_of(end: socket.socket, size: int, joined: Mapping[int, socket.socket]) -> int:
    """The rank that a process says it is, if that fits."""
    pid, _ = peer_credentials(end)
    rank, said = peek_join(end, f"pid {pid}")
    if said != size:
        raise InvalidInputError(
            f"size: rank 0 (pid {os.getpid()}) expects {size} ranks, rank {rank} (pid {pid}) expects {said}"
        )
    if not 0 <= rank < size:
        raise ProtocolError(f"pid {pid} says it is rank {rank} of {size}")
    if rank == 0 or rank in joined:
        other = peer_credentials(joined[rank])[0] if rank else os.getpid()
        raise InvalidInputError(
            f"rank: pids {other} and {pid} are both rank {rank} of one group; does another group have "
            "the same key?"
        )
    return rank
