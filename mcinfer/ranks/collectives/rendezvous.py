"""How ranks of one machine that were started apart find each other: by a key that all have.

Rank 0 listens at a socket whose name is made from the key, in a folder that is this user's alone, so that
another user who knows the key cannot take the name. The others connect. The kernel says which user each side
is of (`SO_PEERCRED`). What connects says what rank it is by the packet that begins
`mcinfer.ranks.collectives.bootstrap`, which is only looked at here.

Ownership: the caller closes the sockets. Rank 0 removes the name when all have connected, so the next group
may have the same key; the name of a rank 0 that was killed stays until the next one with this key comes.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping

from mcinfer.errors import (
    CollectiveTimeoutError,
    InvalidInputError,
    McinferError,
    ProtocolError,
    RankDiedError,
)
from mcinfer.private import open_private, opened_folder, temporary_places
from mcinfer.ranks.collectives.bootstrap import Deadline, call_second_hub, peek_join, send_error
from mcinfer.shm.descriptors import peer_credentials

_PAUSE = 0.02
"""Seconds between two attempts to connect: the system does not show when a process begins to listen,
or lets a lock go."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What another folder would not change."""


def meet(key: str, rank: int, size: int, timeout: float) -> list[socket.socket]:
    """The sockets of a star of ranks, which are the caller's: in rank 0 to ranks 1, 2, …; else to rank 0.

    Raises what `mcinfer.ranks.collectives.join` does.
    """
    if size == 1:
        return []
    deadline = Deadline(timeout)
    if rank == 0:
        with _listening(key, size, deadline) as listener:
            return _gather(listener, key, size, deadline)
    return [_connect(key, deadline)]


def _folders() -> list[str]:
    """Where the sockets of this user's groups may be, first choice first.

    Ranks may have different variables: what all have comes before TMPDIR.
    """
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    places = temporary_places(runtime, f"/run/user/{user}", "/tmp")  # noqa: S108 it is checked
    return [f"{place}/mcinfer-groups-{user}" for place in places]


@contextlib.contextmanager
def _opened(folder: str, *, make: bool = False) -> Iterator[int]:
    """A descriptor of a folder that no other user can enter or replace; else `PermissionError`."""
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
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(folder: str, deadline: Deadline) -> Iterator[int]:
    """A descriptor of a folder in which no other process takes or removes a name; it is made if need be.

    A process that is stopped may hold the lock for ever.
    """
    while True:
        with _opened(folder, make=True) as fd:
            is_locked = _lock(fd)
            if is_locked and os.fstat(fd).st_nlink:  # else another process has removed it
                yield fd
                return
        if not is_locked:
            if not deadline.milliseconds():
                raise CollectiveTimeoutError(
                    f"{folder}: another process did not let its lock go within {deadline.timeout:g} s"
                )
            time.sleep(_PAUSE)


def _lock(fd: int) -> bool:
    """Lock a folder; False if another process has it locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _path(fd: int, key: str) -> str:
    """Of a group's socket in an open folder, whose own path may be too long for one."""
    return f"/proc/self/fd/{fd}/{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _connected(path: str) -> socket.socket | None:
    """A socket to the rank 0 that listens there; None if there is none."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.setblocking(False)
        end.connect(path)
    except BaseException as exc:
        end.close()
        if isinstance(exc, ConnectionRefusedError | FileNotFoundError):
            return None
        raise
    return end


def _connect(key: str, deadline: Deadline) -> socket.socket:
    """A socket to the rank 0 that listens, once there is one.

    A place that cannot be used has none: rank 0 passes over it too.
    """
    while True:
        faults = []
        for folder in _folders():
            try:
                with _opened(folder) as fd:
                    if end := _connected(_path(fd, key)):
                        return end
            except FileNotFoundError:
                continue
            except OSError as exc:
                faults.append(_fault(folder, exc))
        if not deadline.milliseconds():
            raise CollectiveTimeoutError(
                f"no rank 0 of the group {key!r} was there within {deadline.timeout:g} s"
                + (f" ({'; '.join(faults)})" if faults else "")
            )
        time.sleep(_PAUSE)


def _fault(folder: str, exc: OSError) -> str:
    """Why a folder cannot be used; raises what is not the folder's."""
    if exc.errno in _EXHAUSTED or isinstance(exc, McinferError):
        raise exc
    return f"{folder}: {exc.strerror}"


@contextlib.contextmanager
def _listening(key: str, size: int, deadline: Deadline) -> Iterator[socket.socket]:
    """A socket that listens in the first folder that can be used; its name ends before it does."""
    faults = []
    for folder in _folders():
        try:
            with _locked(folder, deadline):
                break
        except OSError as exc:
            faults.append(_fault(folder, exc))
    else:
        raise OSError(
            f"no folder for the group's socket: {'; '.join(faults)}; XDG_RUNTIME_DIR can name one"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        while not _take_name(listener, folder, key, size, deadline):
            if not deadline.milliseconds():
                raise InvalidInputError(f"key: got {key!r}, which another group uses")
            time.sleep(_PAUSE)
        try:
            yield listener
        finally:
            # Other groups use the folder, or the time is over: the next group of this key tidies up.
            with contextlib.suppress(OSError), _locked(folder, deadline) as fd:
                os.unlink(_path(fd, key))
                os.rmdir(folder)


def _take_name(
    listener: socket.socket, folder: str, key: str, size: int, deadline: Deadline
) -> bool:
    """Have it listen; False if another one has the name."""
    with _locked(folder, deadline) as fd:
        path = _path(fd, key)
        try:
            end = _connected(path)
        except BlockingIOError:  # too many wait to be accepted there
            return False
        if end is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a rank 0 that was killed
            listener.bind(path)
            listener.listen(size)
            listener.setblocking(False)
            return True
    # Either a second group has this key, or another one has just come together.
    with end:
        call_second_hub(end, size, deadline)
    return False


def _gather(
    listener: socket.socket, key: str, size: int, deadline: Deadline
) -> list[socket.socket]:
    """In rank 0, the sockets of ranks 1, 2, …, once all have connected."""
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
