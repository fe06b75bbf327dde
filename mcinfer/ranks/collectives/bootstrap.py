"""How ranks of one machine become a group: the exchange of descriptors over a star of sockets.

::

    rank i  ── JOIN: an eventfd for each other member ──────────────────────────► the hub (rank 0 of the star)
    rank i  ◄── WELCOME: the group's memory, the others' eventfds and pidfds, a socket of the group's own star

The kernel says which process has sent each packet (SCM_CREDENTIALS of unix(7)), so no pid is taken on trust,
and a process of another user is refused. The hub opens the pidfds (pidfd_open(2)) and hands them on: a
member can wait for the end of each other one, whatever pid namespaces they are in.

Ownership: `Membership` owns its descriptors. For a moment, the hub holds the square of the ranks in
descriptors.
"""

import contextlib
import errno
import json
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from mcinfer.ranks.collectives.memory import REGION
from mcinfer.shm.descriptors import CREDENTIALS, close_all, send

_MAX_BYTES = 1 << 16
_INTEGERS = struct.Struct("=i")
_ANCILLARY = socket.CMSG_SPACE(CREDENTIALS.size) + socket.CMSG_SPACE(253 * _INTEGERS.size)
_LONGEST_WAIT = 86400.0
_VERDICT = 1.0
"""Seconds that the others wait longer than the hub: its error names the ranks that are missing."""

_ENLARGING = threading.Lock()

_ERRORS = {
    kind.__name__: kind
    for kind in (CollectiveTimeoutError, InvalidInputError, ProtocolError, RankDiedError)
}


class Deadline:
    """The end of a wait of so many seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._end = time.monotonic() + timeout

    def milliseconds(self, more: float = 0.0) -> float:
        """What is left, and some seconds more, for poll(2)."""
        left = self._end + more - time.monotonic()
        return 1000 * min(max(left, 0.0), _LONGEST_WAIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Another rank of a group, and the descriptors that are held for it.

    Attributes:
        rank: Its number in the group.
        pid: Its process, as the hub sees it.
        pidfd: Readable when the process has ended.
        incoming: The eventfd that it writes and this rank reads.
        outgoing: The eventfd that this rank writes and it reads.
    """

    rank: int
    pid: int
    pidfd: int
    incoming: int
    outgoing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a rank holds of its group.

    Attributes:
        rank: Its number in the group.
        size: How many members there are.
        memory: The memfd that all share: ``size + 1`` regions.
        others: The other members, by rank.
        star: Sockets to the others in rank 0, the socket to rank 0 in the others.
    """

    rank: int
    size: int
    memory: int
    others: tuple[Member, ...]
    star: tuple[socket.socket, ...]

    def close(self) -> None:
        os.close(self.memory)
        for other in self.others:
            close_all([other.pidfd, other.incoming, other.outgoing])
        for end in self.star:
            end.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packet:
    fields: dict[str, Any]
    descriptors: list[int]
    pid: int
    uid: int


def bootstrap(
    rank: int,
    size: int,
    sockets: Sequence[socket.socket],
    timeout: float,
    members: Sequence[int] | None = None,
) -> Membership | None:
    """Make some ranks of a star a group; all ranks of the star call this. The sockets stay the caller's.

    Args:
        rank: This rank's number in the star.
        size: How many ranks the star has.
        sockets: In rank 0 those to ranks 1, 2, …; in others the one to rank 0. SOCK_SEQPACKET.
        timeout: Seconds to wait for the other ranks.
        members: The ranks that are to be the group, in their new order; by default all.

    Returns:
        None in a rank that is no member.

    Raises what `mcinfer.ranks.collectives.join` does.
    """
    chosen = tuple(range(size)) if members is None else tuple(members)
    expected = 1 if rank else size - 1
    if not 0 <= rank < size <= MAX_RANKS:
        raise InvalidInputError(
            f"rank, size: got {rank} of {size}, expected a rank below the size, and no more than {MAX_RANKS}"
        )
    if len(sockets) != expected:
        raise InvalidInputError(
            f"sockets: got {len(sockets)}, expected {expected} in rank {rank} of {size}"
        )
    deadline = Deadline(timeout)
    with contextlib.ExitStack() as stack:
        for end in sockets:
            stack.enter_context(_with_credentials(end))
        incoming = [
            os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            for other in chosen
            if rank in chosen and other != rank
        ]
        failed = stack.enter_context(contextlib.ExitStack())  # unwound unless the group is made
        failed.callback(close_all, incoming)
        fields = {"rank": rank, "size": size, "members": chosen}
        if rank:
            _send(sockets[0], fields, incoming)
            welcome = _wait_for_hub(sockets[0], deadline)
        else:
            welcome = _be_hub(sockets, fields, incoming, deadline)
        if rank not in chosen:
            close_all(welcome.descriptors)
            return None
        failed.pop_all()
        return _membership(chosen.index(rank), len(chosen), welcome, incoming)


@contextlib.contextmanager
def _with_credentials(end: socket.socket) -> Iterator[None]:
    """Have the kernel attach the sender's pid and user to each packet, in both directions."""
    before = end.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    try:
        yield
    finally:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, before)


def _membership(rank: int, size: int, welcome: _Packet, incoming: Sequence[int]) -> Membership:
    """Sort the descriptors of a WELCOME, which are in the order that `_welcomes` gives them."""
    rest = iter(welcome.descriptors)
    memory = next(rest)
    star = tuple(
        socket.socket(fileno=next(rest)) for _ in range(min(size - 1, 1) if rank else size - 1)
    )
    numbers = [number for number in range(size) if number != rank]
    outgoing = [next(rest) for _ in numbers]
    pidfds = [next(rest) for _ in numbers]
    others = tuple(
        Member(
            rank=number,
            pid=welcome.fields["pids"][number],
            pidfd=pidfd,
            incoming=theirs,
            outgoing=ours,
        )
        for number, pidfd, theirs, ours in zip(numbers, pidfds, incoming, outgoing, strict=True)
    )
    return Membership(rank=rank, size=size, memory=memory, others=others, star=star)


# The hub.


def _be_hub(
    sockets: Sequence[socket.socket],
    fields: dict[str, Any],
    incoming: Sequence[int],
    deadline: Deadline,
) -> _Packet:
    """Collect what all ranks give, and send each member its part; the hub's own part."""
    own = _Packet(
        fields=fields,
        descriptors=[os.dup(fd) for fd in incoming],
        pid=os.getpid(),
        uid=os.geteuid(),
    )
    joined = [own]
    try:
        try:
            _collect(sockets, joined, deadline)
        except McinferError as exc:
            send_error(sockets, exc)
            raise
        by_rank = {packet.fields["rank"]: packet for packet in joined}
        return _welcome_all(sockets, by_rank, fields["members"])
    finally:
        for packet in joined:
            close_all(packet.descriptors)


def _collect(sockets: Sequence[socket.socket], joined: list[_Packet], deadline: Deadline) -> None:
    poll = select.poll()
    missing = {end.fileno(): (end, number) for number, end in enumerate(sockets, 1)}
    for fd in missing:
        poll.register(fd, select.POLLIN)
    while missing:
        events = poll.poll(deadline.milliseconds())
        if not events:
            ranks = ", ".join(f"rank {number}" for _, number in missing.values())
            raise CollectiveTimeoutError(
                f"the group was not complete within {deadline.timeout:g} s: {ranks} did not join"
            )
        for fd, _ in events:
            poll.unregister(fd)
            end, number = missing.pop(fd)
            packet = _receive(end, f"rank {number}")
            joined.append(packet)
            _check_join(packet, number, joined[0])


def _check_join(packet: _Packet, number: int, own: _Packet) -> None:
    if packet.uid != own.uid:
        raise ProtocolError(
            f"rank {number} (pid {packet.pid}) is of user {packet.uid}, and rank 0 of user {own.uid}"
        )
    got = {name: packet.fields.get(name) for name in ("rank", "size", "members")}
    expected = {"rank": number, "size": own.fields["size"], "members": [*own.fields["members"]]}
    if got != expected:
        raise InvalidInputError(
            f"the ranks do not fit: rank 0 (pid {own.pid}) expects rank {number} of a group of "
            f"{expected['size']} with members {expected['members']}, but pid {packet.pid} says it is rank "
            f"{got['rank']} of {got['size']} with members {got['members']}"
        )
    members = own.fields["members"]
    wanted = len(members) - 1 if number in members else 0
    if len(packet.descriptors) != wanted:
        raise ProtocolError(
            f"rank {number}: got {len(packet.descriptors)} descriptors, expected {wanted}"
        )


def _enlarge(memory: int, size: int) -> None:
    """Give a memfd its size, which takes no memory yet, though it counts against the limit for files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hard != resource.RLIM_INFINITY and size > hard:
        raise OSError(
            errno.EFBIG,
            f"the group's memory is a sparse file of {size} bytes, and the limit is {hard} (ulimit -f)",
        )
    if soft == resource.RLIM_INFINITY or size <= soft:
        os.ftruncate(memory, size)
        return
    with _ENLARGING:  # the limit is the whole process's
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            os.ftruncate(memory, size)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _welcome_all(
    sockets: Sequence[socket.socket], joined: dict[int, _Packet], members: Sequence[int]
) -> _Packet:
    """Send each rank its WELCOME; the hub's own, whose descriptors are the caller's."""
    with contextlib.ExitStack() as stack:
        memory = _own(stack, os.memfd_create("mcinfer-group", os.MFD_CLOEXEC))
        _enlarge(memory, (len(members) + 1) * REGION)
        pids = [joined[rank].pid for rank in members]
        pidfds = [_own(stack, _pidfd(pid, rank)) for pid, rank in zip(pids, members, strict=True)]
        pairs = []
        for _ in members[1:]:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pairs.append([stack.enter_context(end).fileno() for end in pair])
        fields = {"pids": pids}
        own = _Packet(fields=fields, descriptors=[], pid=0, uid=0)
        for rank in sorted(joined, reverse=True):  # the hub last: nothing fails after it
            descriptors: list[int] = []
            if rank in members:
                index = members.index(rank)
                star = [pair[0] for pair in pairs] if index == 0 else [pairs[index - 1][1]]
                # Each member gave its eventfds in the order of the other members.
                outgoing = [
                    joined[other].descriptors[index if index < place else index - 1]
                    for place, other in enumerate(members)
                    if other != rank
                ]
                others = [pidfds[place] for place in range(len(members)) if place != index]
                descriptors = [memory, *star, *outgoing, *others]
            if rank:
                _send(sockets[rank - 1], fields, descriptors)
            else:
                own.descriptors.extend(os.dup(fd) for fd in descriptors)
        return own


def _own(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _pidfd(pid: int, rank: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as exc:
        raise RankDiedError(f"rank {rank} (pid {pid}) ended before the group was complete") from exc


# Packets.


def send_error(ends: Sequence[socket.socket], exc: McinferError) -> None:
    """Have the error raised in the ranks that wait for this one, as far as they are still there."""
    for end in ends:
        with contextlib.suppress(OSError, RankDiedError):
            _send(end, {"error": type(exc).__name__, "text": shortened(str(exc))})


def peek_join(end: socket.socket, sender: str) -> tuple[int, int]:
    """The rank and size that the packet says which has come; it stays to be received."""
    try:
        data = end.recv(_MAX_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except ConnectionResetError:
        data = b""
    if not data:
        raise RankDiedError(f"{sender} hung up before the group was complete")
    fields = _fields(data, sender)
    rank, size = fields.get("rank"), fields.get("size")
    if isinstance(rank, int) and isinstance(size, int):
        return rank, size
    raise ProtocolError(f"{sender}: got rank {rank!r} of {size!r}, expected two integers")


def call_second_hub(end: socket.socket, size: int, deadline: Deadline) -> None:
    """Another hub serves this group: have it raise an error in all ranks, and raise it here."""
    _send(end, {"rank": 0, "size": size, "members": [*range(size)]})
    close_all(_wait_for_hub(end, deadline).descriptors)


def _wait_for_hub(end: socket.socket, deadline: Deadline) -> _Packet:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    if not poll.poll(deadline.milliseconds(_VERDICT)):
        raise CollectiveTimeoutError(
            f"rank 0 did not complete the group within {deadline.timeout:g} s"
        )
    packet = _receive(end, "rank 0")
    if packet.uid != os.geteuid():
        close_all(packet.descriptors)
        raise ProtocolError(
            f"rank 0 (pid {packet.pid}) is of user {packet.uid}, and this rank of user {os.geteuid()}"
        )
    return packet


def _send(end: socket.socket, fields: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    try:
        send(end, json.dumps(fields).encode(), descriptors)
    except (BrokenPipeError, ConnectionResetError) as exc:
        raise RankDiedError(f"a rank hung up while the group was made: {exc}") from exc


def _receive(end: socket.socket, sender: str) -> _Packet:
    """One packet that has come, and its sender by the kernel; raises the error that a packet carries."""
    descriptors: list[int] = []
    pid, uid = 0, -1
    flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    try:
        data, ancillary, cut_off, _ = end.recvmsg(_MAX_BYTES, _ANCILLARY, flags)
    except ConnectionResetError:
        # The other side closed before it read all. What it sent comes after this error.
        data, ancillary, cut_off, _ = end.recvmsg(_MAX_BYTES, _ANCILLARY, flags)
    for level, kind, packed in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.extend(fd for (fd,) in _INTEGERS.iter_unpack(packed))
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, uid, _ = CREDENTIALS.unpack(packed)
    try:
        if not data:
            raise RankDiedError(f"{sender} hung up before the group was complete")
        fields = _fields(data, sender)
        if cut_off & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise ProtocolError(
                f"{sender}: its packet was cut off: too long, or no descriptor is left here"
            )
        if "error" in fields:
            raise _ERRORS.get(fields["error"], ProtocolError)(str(fields.get("text")))
    except McinferError:
        close_all(descriptors)
        raise
    return _Packet(fields=fields, descriptors=descriptors, pid=pid, uid=uid)


def _fields(data: bytes, sender: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as exc:
        raise ProtocolError(f"{sender}: got {data[:40]!r}, expected a packet of a rank") from exc
    if not isinstance(fields, dict):
        raise ProtocolError(f"{sender}: got {data[:40]!r}, expected a packet of a rank")
    return fields
