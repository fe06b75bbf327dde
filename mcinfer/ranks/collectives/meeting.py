"""How ranks of one machine that were started apart become a group: they meet at a socket named by their key.

::

    rank i  ── {rank, size} ───────────────────────────────────────────► rank 0, which listens
    rank i  ◄── the group's memory, sockets to the others, their pidfds ── once all have come

Rank 0 listens in a folder that is this user's alone, so that another user who knows the key cannot take the
name. The kernel says which process and user each side is of (`SO_PEERCRED`), so no pid is taken on trust.
Rank 0 opens the pidfds and hands them on. An error of one rank here is sent to all that have come.

Ownership: the name's lock is rank 0's until all have come. The next group of this key removes the name of a
rank 0 that was killed.
"""

import contextlib
import errno
import hashlib
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcinfer.config import MAX_RANKS
from mcinfer.errors import (
    CollectiveTimeoutError,
    InvalidInputError,
    McinferError,
    ProtocolError,
    RankDiedError,
    shortened,
)
from mcinfer.private import (
    fill_streams,
    open_private,
    opened_folder,
    take_lock,
    temporary_places,
)
from mcinfer.ranks.collectives.base import DEFAULT_TIMEOUT, ENDS
from mcinfer.ranks.collectives.shm import Shared, ShmGroup, inherit
from mcinfer.shm.descriptors import close_all, peer_credentials, send, take_packet

_PAUSE = 0.02
"""Seconds between two attempts to connect: the system does not show when a process begins to listen."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What another folder would not change."""

_MAX_BYTES = 1 << 16
_MAX_DESCRIPTORS = 253  # of one packet (unix(7))
_LONGEST_WAIT = 86400.0
_VERDICT = 1.0
"""Seconds that the others wait longer than rank 0: its error names the ranks that are missing."""


class _Deadline:
    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._end = time.monotonic() + timeout

    def milliseconds(self, more: float = 0.0) -> float:
        """What is left, and some seconds more, for poll(2)."""
        return 1000 * min(max(self._end + more - time.monotonic(), 0.0), _LONGEST_WAIT)


def join(key: str, rank: int, size: int, *, timeout: float = DEFAULT_TIMEOUT) -> ShmGroup:
    """Make ranks that were started apart a group; see `mcinfer.ranks.collectives.join`."""
    if size > MAX_RANKS:
        raise InvalidInputError(f"size: got {size}, expected at most {MAX_RANKS} ranks")
    fill_streams()
    deadline = _Deadline(timeout)
    if size == 1:
        return _share([], size, timeout)
    while True:
        faults: list[str] = []
        if rank == 0:
            with _named(key, size) as listener:
                if listener is not None:
                    return _lead(listener, key, size, deadline)
        end = _connected(key, faults)
        if end is not None:
            with end:
                group = _call(end, rank, size, deadline)
            if group is not None:
                return group
        if not deadline.milliseconds():
            if rank == 0:
                raise InvalidInputError(f"key: got {key!r}, which another group uses")
            raise CollectiveTimeoutError(
                f"no rank 0 of the group {key!r} was there within {timeout:g} s"
                + (f" ({'; '.join(faults)})" if faults else "")
            )
        time.sleep(_PAUSE)


# The folder, and the name in it.


def _folders() -> list[str]:
    """Where this user's groups may meet, first choice first.

    Ranks may have different variables: what all have comes before TMPDIR.
    """
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    places = temporary_places(runtime, f"/run/user/{user}", "/tmp")  # noqa: S108 it is checked
    return [f"{place}/mcinfer-groups-{user}" for place in places]


@contextlib.contextmanager
def _opened(folder: str, *, make: bool = False) -> Iterator[Path]:
    """The path, by a descriptor, of a folder that no other user can enter or replace; else `OSError`."""
    with opened_folder(os.path.dirname(folder)) as place:
        own = place / os.path.basename(folder)
        while True:
            if make:
                with contextlib.suppress(FileExistsError):
                    own.mkdir(0o700)
            try:
                fd = open_private(own)
                break
            except FileNotFoundError:
                if not make:  # else another process has removed it
                    raise
    try:
        yield Path(f"/proc/self/fd/{fd}")  # its own path may be too long for a socket's
    finally:
        os.close(fd)


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _fault(folder: str, exc: OSError) -> str:
    """Why a folder cannot be used; raises what is not the folder's."""
    if exc.errno in _EXHAUSTED:
        raise exc
    return f"{folder}: {exc.strerror}"


@contextlib.contextmanager
def _named(key: str, size: int) -> Iterator[socket.socket | None]:
    """A socket that listens in the first folder that can be used; None if another one has the name."""
    with contextlib.ExitStack() as stack:
        faults = []
        for folder in _folders():
            try:
                opened = stack.enter_context(_opened(folder, make=True))
                break
            except OSError as exc:
                faults.append(_fault(folder, exc))
        else:
            raise OSError(
                f"no folder for the group's socket: {'; '.join(faults)}; XDG_RUNTIME_DIR or TMPDIR can "
                "name one, the same for all ranks"
            )
        path, lock = opened / _name(key), opened / f"{_name(key)}.lock"
        held = None
        with contextlib.suppress(FileNotFoundError):  # another rank 0 has just removed the folder
            held = take_lock(lock)
        if held is None:
            yield None
            return
        stack.callback(os.close, held)
        stack.callback(_remove, path, lock, folder)
        path.unlink(missing_ok=True)  # of a rank 0 that was killed
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(path))
        listener.listen(size)
        listener.setblocking(False)
        yield listener


def _remove(path: Path, lock: Path, folder: str) -> None:
    path.unlink(missing_ok=True)
    lock.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other groups use it
        os.rmdir(folder)


def _connected(key: str, faults: list[str]) -> socket.socket | None:
    """A socket to the rank 0 that listens; None if there is none, and why folders cannot be used.

    A place that cannot be used has none: rank 0 passes over it too.
    """
    for folder in _folders():
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _opened(folder) as opened:
                end.setblocking(False)
                end.connect(str(opened / _name(key)))
            return end
        except BaseException as exc:
            end.close()
            # It does not listen yet, or too many wait to be accepted there.
            if isinstance(exc, FileNotFoundError | ConnectionRefusedError | BlockingIOError):
                continue
            if not isinstance(exc, OSError):
                raise
            faults.append(_fault(folder, exc))
    return None


# Rank 0.


def _lead(listener: socket.socket, key: str, size: int, deadline: _Deadline) -> ShmGroup:
    """Rank 0's group, once all others have come and been sent what they need for theirs, or the error."""
    came: dict[int, socket.socket] = {}  # by descriptor
    try:
        ends = _gather(listener, came, key, size, deadline)
        return _share(ends, size, deadline.timeout)
    except (McinferError, OSError) as exc:
        name, text = type(exc).__name__, str(exc)
        if name not in ENDS:
            name = RankDiedError.__name__
            text = f"rank 0 (pid {os.getpid()}) left before the group was complete: {text}"
        for end in came.values():
            _send(end, {"error": name, "text": shortened(text)})
        raise
    finally:
        for end in came.values():
            end.close()


def _gather(
    listener: socket.socket,
    came: dict[int, socket.socket],
    key: str,
    size: int,
    deadline: _Deadline,
) -> list[socket.socket]:
    """The sockets of ranks 1, 2, …, once all have said which they are; `came` gets all that connect."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    ranks: dict[int, int] = {}  # of those that have said theirs, by descriptor
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
                with contextlib.suppress(BlockingIOError):  # it is gone again
                    end, _ = listener.accept()
                    if peer_credentials(end)[1] != os.geteuid():
                        end.close()  # another user must not disturb
                    else:
                        came[end.fileno()] = end
                        poll.register(end, select.POLLIN)
            elif fd in ranks:
                raise RankDiedError(f"rank {ranks[fd]} hung up before the group was complete")
            else:
                joined = {rank: came[other] for other, rank in ranks.items()}
                ranks[fd] = _rank_of(came[fd], size, joined)
                poll.modify(fd, 0)  # from now on only its end is news
    return [came[fd] for fd in sorted(ranks, key=ranks.__getitem__)]


def _rank_of(end: socket.socket, size: int, joined: dict[int, socket.socket]) -> int:
    """The rank that a process says it is, if that fits."""
    pid, _ = peer_credentials(end)
    fields, descriptors = _receive(end, f"pid {pid}")
    close_all(descriptors)
    rank, said = fields.get("rank"), fields.get("size")
    if not isinstance(rank, int) or not isinstance(said, int):
        raise ProtocolError(f"pid {pid}: got rank {rank!r} of {said!r}, expected two integers")
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


def _share(ends: list[socket.socket], size: int, timeout: float) -> ShmGroup:
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(contextlib.closing(Shared(size)))
        pidfds: list[int] = []
        for rank, pid in enumerate([os.getpid(), *(peer_credentials(end)[0] for end in ends)]):
            try:
                pidfds.append(os.pidfd_open(pid))
            except ProcessLookupError as exc:
                text = f"rank {rank} (pid {pid}) ended before the group was complete"
                raise RankDiedError(text) from exc
            stack.callback(os.close, pidfds[-1])
        # Nothing fails after the first of the others has its share.
        own: list[int] = []
        try:
            own.extend(map(os.dup, (*shared.fds(0), *pidfds[1:])))
        except OSError:
            close_all(own)
            raise
        group = inherit(0, size, own[: 2 * size - 1], timeout=timeout, pidfds=own[2 * size - 1 :])
        for rank, end in enumerate(ends, 1):
            _send(end, {}, [*shared.fds(rank), *pidfds[:rank], *pidfds[rank + 1 :]])
        return group


# The others.


def _call(end: socket.socket, rank: int, size: int, deadline: _Deadline) -> ShmGroup | None:
    """A rank's group, from rank 0; None if this is rank 0 itself, and the other one is gone."""
    if peer_credentials(end)[1] != os.geteuid():
        raise ProtocolError(f"rank 0 is of another user, and this rank of user {os.geteuid()}")
    _send(end, {"rank": rank, "size": size})
    poll = select.poll()
    poll.register(end, select.POLLIN)
    if not poll.poll(deadline.milliseconds(_VERDICT)):
        raise CollectiveTimeoutError(
            f"rank 0 did not complete the group within {deadline.timeout:g} s"
        )
    try:
        _, fds = _receive(end, "rank 0")
    except RankDiedError:
        if rank == 0:
            return None
        raise
    own = len(fds) - (size - 1)
    return inherit(rank, size, fds[:own], timeout=deadline.timeout, pidfds=fds[own:])


# Packets.


def _send(end: socket.socket, fields: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Send a packet, unless the other side is gone: this side sees that when it next receives."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        send(end, json.dumps(fields).encode(), descriptors or ())


def _receive(end: socket.socket, sender: str) -> tuple[dict[str, Any], list[int]]:
    """One packet that has come, and its descriptors; raises the error that a packet carries."""
    wanted = (end, _MAX_BYTES, socket.MSG_DONTWAIT, _MAX_DESCRIPTORS)
    try:
        data, fds, cut_off = take_packet(*wanted)
    except ConnectionResetError:
        # The other side closed before it read all. What it sent comes after this error.
        data, fds, cut_off = take_packet(*wanted)
    try:
        if not data:
            raise RankDiedError(f"{sender} hung up before the group was complete")
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise ProtocolError(f"{sender}: got {data[:40]!r}, expected a packet of a rank")
        if cut_off:
            raise ProtocolError(
                f"{sender}: its packet was cut off: too long, or no descriptor is left here"
            )
        if "error" in fields:
            raise ENDS.get(str(fields["error"]), ProtocolError)(str(fields.get("text")))
    except McinferError:
        close_all(fds)
        raise
    return fields, fds
