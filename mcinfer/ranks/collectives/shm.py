"""Collectives between ranks of one machine, through shared memory.

::

    rank 0                                                                  rank 1
    writes its part ──────────────────► one sparse memfd, ◄──────────────── writes its part
    writes its cell: what it runs ────► which all map ◄──────────────────── writes its cell
    writes rank 1's eventfd ─────────────────────────────────────────────► poll(2)
    waits in poll(2) for the others' eventfds, the ends of processes and the deadline at once; never spins
    compares all cells ──► reads the others' parts ──► writes its output

A *step* is one such meeting of all ranks. Small operations take one: a rank copies its part into memory for
even or for odd steps, and reduces the parts of all for itself. That memory is written again two steps later,
when all have read it. Large operations take two steps. Their parts lie in shared memory from the start, and
after the first step each rank reduces its share into a result that all read after the second. So a caller
may write its part again as soon as an operation has returned.

Each rank has a cell for even and one for odd steps of each group; all others compare them with their own.
Messages between two ranks go another way: their cells wait in a ring for each rank and each other one. The
order of memory needs no fence: what a rank writes before it writes an eventfd (eventfd(2)) is seen by the
rank that has read that eventfd; a cell or a part is never read on the word of shared memory alone.

A group is *inherited*: the process that starts the ranks makes the memory and the eventfds (`make_shared`),
and each rank inherits its own (`inherit`). Ranks that were started apart give each other the same: see
`mcinfer.ranks.collectives.meeting`.

Ownership: a group owns its descriptors until `close` or an error; arrays keep their memory alive. Subgroups
use the cells of the group that they are of, and have a part of the memory to themselves.
"""

import errno
import mmap
import os
import resource
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcinfer.checks import check_seconds
from mcinfer.config import MAX_RANKS
from mcinfer.errors import CollectiveTimeoutError, InvalidInputError, RankDiedError, shortened
from mcinfer.process import how_it_ended
from mcinfer.ranks.collectives.base import DEFAULT_TIMEOUT, Collective, Group, closing, end_error
from mcinfer.ranks.collectives.operations import Signature, difference
from mcinfer.shm.descriptors import close_all

_LARGE_BYTES = 256 << 10
"""From here on an operation takes two steps: to share the work, and not to copy, gains more (measured)."""

_SHARED = ("all_reduce", "all_gather")
"""Operations whose large outputs all ranks share."""

_LONGEST_WAIT = 86400.0

# What a group of ranks inherits.

_GROUP_BYTES = 1 << 53
_MAX_GROUPS = 1 << 9  # the whole one, and subgroups
_FILE_BYTES = _GROUP_BYTES * _MAX_GROUPS
_ENLARGING = threading.Lock()


class Shared:
    """What the ranks of a group inherit: the memory, and an eventfd from and to each other rank."""

    def __init__(self, size: int) -> None:
        """Raises OSError: No descriptor is left, or files may not be as large as the sparse memory."""
        self._size = size
        self._owned: list[int] = []
        try:
            self._memory = self._own(_new_memory())
            self._eventfds = {
                pair: self._own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
                for pair in permutations(range(size), 2)
            }
        except BaseException:
            self.close()
            raise

    def _own(self, fd: int) -> int:
        self._owned.append(fd)
        return fd

    def fds(self, rank: int) -> list[int]:
        """The descriptors of a rank, for `inherit`; they stay this object's."""
        others = [other for other in range(self._size) if other != rank]
        return [
            self._memory,
            *(self._eventfds[other, rank] for other in others),
            *(self._eventfds[rank, other] for other in others),
        ]

    def close(self) -> None:
        """Let all go, as no rank is to be started any more."""
        close_all(self._owned)
        self._owned.clear()


def make_shared(size: int) -> Shared:
    """What a group of so many ranks inherits, made by the process that starts them; raises OSError."""
    return Shared(size)


def _new_memory() -> int:
    """A sparse memfd: its size takes no memory, though it counts against the limit for files."""
    memory = os.memfd_create("mcinfer-group", os.MFD_CLOEXEC)
    try:
        with _ENLARGING:  # the limit is the whole process's
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            if hard != resource.RLIM_INFINITY and hard < _FILE_BYTES:
                raise OSError(
                    errno.EFBIG,
                    f"the group's memory is a sparse file of {_FILE_BYTES} bytes, and the limit is {hard} "
                    "(ulimit -f)",
                )
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
                os.ftruncate(memory, _FILE_BYTES)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    except BaseException:
        os.close(memory)
        raise
    return memory


def inherit(
    rank: int,
    size: int,
    fds: Sequence[int],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    pidfds: Sequence[int] = (),
) -> "ShmGroup":
    """Join a group by the descriptors of `Shared.fds`. Waits for no other rank.

    Args:
        rank: This rank's number.
        size: How many ranks there are.
        fds: This group's from now on.
        timeout: Seconds to wait for the others in each operation.
        pidfds: Of the other ranks' processes, in their order, so that errors can say how one ended; this
            group's from now on.

    Raises:
        InvalidInputError: The arguments do not fit each other.
    """
    check_seconds("timeout", timeout)
    others = [other for other in range(size) if other != rank]
    if not 0 <= rank < size <= MAX_RANKS or len(fds) != 2 * size - 1:
        raise InvalidInputError(
            f"rank, size, fds: got rank {rank} of {size} and {len(fds)} descriptors, expected a rank below "
            f"the size, at most {MAX_RANKS} ranks, and {2 * size - 1} descriptors"
        )
    for fd in fds:
        os.set_inheritable(fd, False)
    peers = [
        _Peer(rank=other, incoming=incoming, outgoing=outgoing, pidfd=pidfd)
        for other, incoming, outgoing, pidfd in zip(
            others, fds[1:size], fds[size:], pidfds or [-1] * len(others), strict=True
        )
    ]
    try:
        return ShmGroup(_Wire(rank, peers, fds[0]), [*range(size)], timeout)
    except BaseException:
        close_all([fd for fd in (*fds, *pidfds) if fd >= 0])
        raise


# Cells, and what else ranks know of each other.

_BODY = struct.Struct("<Q8s104s")  # place, digest of the text, text
_TEXT_IN_CELL = 104
_HEAD_BYTES = 8  # a message's stream, or the number of a step
_NO_STREAM = b"\xff" * _HEAD_BYTES
_CELL_BYTES = _HEAD_BYTES + _BODY.size
_RING = 64
"""Messages to one rank that can wait until it looks."""

_ABOUT = struct.Struct(
    "<II64s"
)  # a rank's pid, the bytes of what it says when it leaves, what it left
_ABOUT_BYTES = 16 << 10

# Counts in an eventfd: what the writer did since the reader read it last.
_ARRIVED = 1
_SENT = 1 << 16
_TAKEN = 1 << 32
_LEFT = 1 << 48
_FIELD = (1 << 16) - 1


def _body_of(text: str, place: int = 0) -> bytes:
    """What a rank runs, in words, and where its memory lies, if that has to agree."""
    encoded = text.encode()
    digest = blake2b(encoded, digest_size=8).digest()
    return _BODY.pack(place, digest, encoded[:_TEXT_IN_CELL])


def _text_of(cell: bytes) -> str:
    return cell[-_TEXT_IN_CELL:].rstrip(b"\0").decode(errors="replace")


@dataclass(slots=True, kw_only=True, eq=False)
class _Peer:
    """Another rank, as this one knows it by what it has read of its eventfd and pidfd.

    Attributes:
        incoming: The eventfd that it writes and this rank reads.
        outgoing: The eventfd that this rank writes and it reads.
        pidfd: Readable when its process has ended; -1 if this rank has none.
        outbox: Where the ring of messages to it begins.
        inbox: Where the ring of its messages to this rank begins.
        ahead: The steps, of all groups that both are in, at which it is further than this rank.
        sent: The messages that this rank has sent it.
        acknowledged: How many of them it has taken, as far as it has said.
        came: The messages that it has sent this rank.
        taken: How many of them this rank has taken.
        reported: How many of them this rank has said that it has taken.
        waiting: By stream, those that were taken before an operation wanted them.
        left: What it said when it left the whole group.
        closed: The numbers of the groups that it has left, as bits.
        died: Its process has ended.
    """

    rank: int
    incoming: int
    outgoing: int
    pidfd: int
    outbox: int = 0
    inbox: int = 0
    ahead: int = 0
    sent: int = 0
    acknowledged: int = 0
    came: int = 0
    taken: int = 0
    reported: int = 0
    waiting: dict[bytes, deque[bytes]] = field(default_factory=dict)
    left: str | None = None
    closed: int = 0
    died: bool = False


class _Wire:
    """What this rank has of the others, for a group and all its subgroups.

    Attributes:
        rank: This rank's number.
        peers: The others, by rank.
        memory: That of all groups.
        control: Its begin: the texts, messages and cells of steps of all ranks.
        alarm: A peer has died, or left.
        cause: Why the groups are closed.
        groups: Those that are to let go what they hold when this is closed.
    """

    def __init__(self, rank: int, peers: Sequence[_Peer], memory: int) -> None:
        self.rank = rank
        self.peers = peers
        self.memory = memory
        self.cause: str | None = None
        self.alarm = False
        self.groups: list[ShmGroup] = []
        self._closed = 0
        self._poll = select.poll()
        self._by_fd: dict[int, _Peer] = {}
        for peer in peers:
            for fd in (peer.incoming, peer.pidfd):
                if fd >= 0:
                    self._by_fd[fd] = peer
                    self._poll.register(fd, select.POLLIN)
        size = self._size = len(peers) + 1
        self._stride = _ABOUT_BYTES + size * _RING * _CELL_BYTES
        self.control = mmap.mmap(memory, size * (self._stride + _MAX_GROUPS * 2 * _CELL_BYTES))
        for peer in peers:  # in the pages of the one that writes
            ours, theirs = rank * self._stride, peer.rank * self._stride
            peer.outbox = ours + _ABOUT_BYTES + peer.rank * _RING * _CELL_BYTES
            peer.inbox = theirs + _ABOUT_BYTES + rank * _RING * _CELL_BYTES
        self._say("")

    def step_cells(self, group: int, rank: int) -> tuple[slice, slice]:
        """Where a rank's cells of even and of odd steps of a group are, in `control`."""
        start = self._size * self._stride + (group * self._size + rank) * 2 * _CELL_BYTES
        middle = start + _CELL_BYTES
        return slice(start, middle), slice(middle, middle + _CELL_BYTES)

    def post(self, peer: _Peer, cell: bytes, group: int, timeout: float) -> bool:
        """Send a message; False if there was no room for it within the time."""
        if peer.sent - peer.acknowledged >= _RING:
            deadline = time.monotonic() + timeout
            while peer.sent - peer.acknowledged >= _RING:
                self.raise_ends(group, [peer])
                if not self.look(deadline):
                    return False
        start = peer.outbox + peer.sent % _RING * _CELL_BYTES
        self.control[start : start + _CELL_BYTES] = cell
        peer.sent += 1
        os.eventfd_write(peer.outgoing, _SENT)
        return True

    def take(self, peer: _Peer, stream: bytes) -> bytes | None:
        """The cell of the peer's next message in a stream, if it has come."""
        if peer.taken == peer.came and not peer.waiting:
            return None
        if peer.waiting and (queue := peer.waiting.get(stream)):
            return queue.popleft()
        while peer.taken < peer.came:
            start = peer.inbox + peer.taken % _RING * _CELL_BYTES
            cell = self.control[start : start + _CELL_BYTES]
            peer.taken += 1
            count = peer.taken - peer.reported
            if count >= _RING // 2:
                os.eventfd_write(peer.outgoing, count * _TAKEN)
                peer.reported = peer.taken
            if cell.startswith(stream):
                return cell
            peer.waiting.setdefault(cell[:_HEAD_BYTES], deque()).append(cell)
        return None

    def look(self, deadline: float) -> bool:
        """Wait for any news of the peers, and note it; False if the deadline has passed without any."""
        wait = min(deadline - time.monotonic(), _LONGEST_WAIT)
        events = self._poll.poll(wait * 1000 if wait > 0 else 0)
        for fd, _ in events:
            peer = self._by_fd[fd]
            if fd == peer.pidfd:
                peer.died = self.alarm = True
                self._poll.unregister(fd)
            try:
                news = os.eventfd_read(peer.incoming)
            except BlockingIOError:  # it did nothing before it ended
                continue
            peer.ahead += news & _FIELD
            if news > _FIELD:
                peer.came += news // _SENT & _FIELD
                if peer.came - peer.taken >= _RING // 2:  # it may wait for room
                    self.take(peer, _NO_STREAM)
                peer.acknowledged += news // _TAKEN & _FIELD
                if news >= _LEFT:
                    _, text, peer.closed = self._said(peer)
                    self.alarm = True
                    if peer.closed & 1:
                        peer.left = text
        return bool(events) or wait > _LONGEST_WAIT / 2

    def _say(self, text: str) -> None:
        start = self.rank * self._stride
        encoded = text.encode(errors="replace")[: _ABOUT_BYTES - _ABOUT.size]
        closed = self._closed.to_bytes(_MAX_GROUPS // 8, "little")
        _ABOUT.pack_into(self.control, start, os.getpid(), len(encoded), closed)
        start += _ABOUT.size
        self.control[start : start + len(encoded)] = encoded

    def _said(self, peer: _Peer) -> tuple[int, str, int]:
        """A rank's pid, 0 if it has not begun, its text, and the groups that it has left, as bits."""
        start = peer.rank * self._stride
        pid, length, closed = _ABOUT.unpack_from(self.control, start)
        start += _ABOUT.size
        text = self.control[start : start + length].decode(errors="replace")
        return pid, text, int.from_bytes(closed, "little")

    def name(self, peer: _Peer) -> str:
        """A rank in words."""
        pid, *_ = self._said(peer)
        return f"rank {peer.rank} (pid {pid})" if pid else f"rank {peer.rank}"

    def raise_ends(self, group: int, late: Sequence[_Peer], past: Container[_Peer] = ()) -> None:
        """Raise for a peer that died or left with an error, unless it is `past` what this rank waits for.

        Raise for one that only closed this group, or the whole one, if it is late.
        """
        if not self.alarm:
            return
        peers = [peer for peer in self.peers if peer not in past]
        for peer in peers:
            if peer.died and peer.left is None:
                how = how_it_ended(self._said(peer)[0], peer.pidfd)
                raise RankDiedError(f"{self.name(peer)} {how}")
        for peer in peers:
            exc = end_error(peer.left or "")
            if exc is not None:
                raise exc
        for peer in late:
            if peer.closed & (1 << group | 1):
                raise RankDiedError(f"{self.name(peer)} closed the group")

    def leave(self, group: int, text: str = "") -> None:
        """Say that this rank has left a group; the whole one with a text that the others get."""
        self._closed |= 1 << group
        self._say(shortened(text))
        for peer in self.peers:
            os.eventfd_write(peer.outgoing, _LEFT)

    def close(self, text: str, cause: str) -> None:
        """Leave the whole group."""
        self.cause = cause
        self.leave(0, text)
        for group in self.groups:
            group.let_go()
        self.groups.clear()
        for peer in self.peers:
            close_all([fd for fd in (peer.incoming, peer.outgoing, peer.pidfd) if fd >= 0])
        self.control.close()
        os.close(self.memory)


# Memory.

_ALIGNMENT = 64
_SMALL = 1 << 40  # the cells come first
_FIRST_WINDOW = 4 << 20
_ONCE = 1 << 49
_PREPARED = 1 << 50
_PAIRS = 1 << 52
_PAIR = 1 << 40

_Place = tuple[mmap.mmap, int, int]
"""A mapping, an offset in it, and a number that is the same in all ranks; never 0, which is no place."""


class Area:
    """A part of a group's memory, handed out for ever, in windows that double in size; each is mapped once.

    All ranks that use it take the same sizes in the same order, and so get the same places.
    """

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd = fd
        self._end = start + length
        self._start = start
        self._length = _FIRST_WINDOW
        self._used = 0
        self._window: mmap.mmap | None = None

    def take(self, nbytes: int) -> _Place:
        wanted = max((nbytes + _ALIGNMENT - 1) & -_ALIGNMENT, _ALIGNMENT)
        while self._used + wanted > self._length:
            self._start += self._length
            self._length *= 2
            self._used = 0
            self._window = None
            if self._start + self._length > self._end:
                raise _too_large(nbytes)
        if self._window is None:
            self._window = mmap.mmap(self._fd, self._length, offset=self._start)
        place = (self._window, self._used, self._start + self._used + 1)
        self._used += wanted
        return place


def _too_large(nbytes: int) -> InvalidInputError:
    return InvalidInputError(f"shape: {nbytes} bytes do not fit the memory of a group")


class _Memory:
    """The memory of a group, as one rank maps it.

    ::

        [ the whole group's: `_Wire.control` │ parts of small operations, even and odd │
          an operation that is run once, its result │
          prepared operations │ from each rank to each other one: the array of `send`, transfers ]
    """

    def __init__(self, fd: int, size: int, start: int) -> None:
        self._fd = fd
        self._size = size
        self._start = start
        self._windows: dict[int, mmap.mmap] = {}  # by their start
        self.forget()

    def forget(self) -> None:
        """Hand out the memory of prepared operations anew."""
        self.prepared = Area(self._fd, self._start + _PREPARED, _PREPARED)
        self._transfers: dict[int, Area] = {}

    def close(self) -> None:
        """Keep no window; each ends with the last array over it."""
        self._windows.clear()
        self.forget()

    def small(self, parity: int, rank: int) -> _Place:
        """A rank's part of a small operation, in an even or odd step."""
        window = self._window(self._start + _SMALL, 2 * self._size * _LARGE_BYTES)
        return window, (parity * self._size + rank) * _LARGE_BYTES, 0

    def once(self, nbytes: int) -> _Place:
        """The parts of an operation that is run once."""
        return self._reused(self._start + _ONCE, nbytes, _ONCE // 2)

    def result(self, nbytes: int) -> _Place:
        """What ranks copy after the last step of such an operation, while parts of the next are written."""
        return self._reused(self._start + _ONCE + _ONCE // 2, nbytes, _ONCE // 2)

    def slot(self, rank: int, to: int, nbytes: int) -> _Place:
        """An array that is sent."""
        return self._reused(self._pair(rank, to), nbytes, _PAIR // 2)

    def transfers(self, rank: int, to: int) -> Area:
        start = self._pair(rank, to) + _PAIR // 2
        if start not in self._transfers:
            self._transfers[start] = Area(self._fd, start, _PAIR // 2)
        return self._transfers[start]

    def _pair(self, rank: int, to: int) -> int:
        return self._start + _PAIRS + (rank * self._size + to) * _PAIR

    def _reused(self, start: int, nbytes: int, most: int) -> _Place:
        if nbytes > most:
            raise _too_large(nbytes)
        return self._window(start, max(_FIRST_WINDOW, 1 << (nbytes - 1).bit_length())), 0, start

    def _window(self, start: int, length: int) -> mmap.mmap:
        found = self._windows.get(start)
        if found is None or len(found) < length:
            found = self._windows[start] = mmap.mmap(self._fd, length, offset=start)
        return found


# Operations on fixed memory.


class _Small(Collective):
    """An operation of all ranks in one step; the parts are copied into memory for that step."""

    def __init__(
        self,
        group: "ShmGroup",
        signature: Signature,
        arrays: tuple[NDArray[Any], NDArray[Any]],
        slots: Sequence[NDArray[Any]],
        works: Sequence[Callable[[], None]],
    ) -> None:
        self.input, self.output = arrays
        self._group = group
        self._body = _body_of(str(signature))
        self._slots = slots  # for even and odd steps
        self._works = works
        self._has_part = signature.root is None or signature.root == group.rank

    def run(self) -> None:
        group = self._group
        parity = group._steps & 1
        if self._has_part:
            np.copyto(self._slots[parity], self.input)
        group._step(self._body)
        self._works[parity]()


class _Large(Collective):
    """An operation of all ranks in two steps; the parts lie in shared memory."""

    def __init__(
        self,
        group: "ShmGroup",
        signature: Signature,
        place: int,
        arrays: tuple[NDArray[Any], NDArray[Any]],
        work: Callable[[], None],
    ) -> None:
        self.input, self.output = arrays
        self._group = group
        self._body = _body_of(str(signature), place)
        self._end = _body_of(f"{signature} (second step)", place)
        self._work = work

    def run(self) -> None:
        self._group._step(self._body)
        self._work()
        self._group._step(self._end)


class _Transfer(Collective):
    """One array from a rank to another, in memory that both map."""

    def __init__(
        self, group: "ShmGroup", signature: Signature, place: _Place, root: int, to: int
    ) -> None:
        window, offset, number = place
        self.input = self.output = np.ndarray(signature.shape, signature.dtype, window, offset)
        self._cell = group._message(str(signature), place=number)
        self._move = group._give if group.rank == root else group._take
        self._peer = group._by_rank[to if group.rank == root else root]

    def run(self) -> None:
        self._move(self._peer, self._cell)


# A group uses two streams: messages of one do not wait behind those of the other.
_MESSAGES, _ACKNOWLEDGEMENTS, _STREAMS = range(3)


class ShmGroup(Group):
    """A group of ranks on one machine; see `inherit`. Errors name ranks by the group that was inherited."""

    def __init__(
        self, wire: _Wire, members: Sequence[int], timeout: float, number: int = 0
    ) -> None:
        """`members` are ranks of the wire; each subgroup has another `number`, the same in all ranks."""
        super().__init__()
        self.rank = members.index(wire.rank)
        self.size = len(members)
        self.timeout = timeout
        peers = {peer.rank: peer for peer in wire.peers}
        self._wire = wire
        self._by_rank = {place: peers[one] for place, one in enumerate(members) if one in peers}
        self._peers = [*self._by_rank.values()]
        self._number = number
        self._streams = [(number * _STREAMS + one).to_bytes(8, "little") for one in range(_STREAMS)]
        self._memory = _Memory(wire.memory, self.size, number * _GROUP_BYTES)
        theirs = [wire.step_cells(number, peer.rank) for peer in self._peers]
        self._own_cells = wire.step_cells(number, wire.rank)
        self._their_cells = [[cells[parity] for cells in theirs] for parity in (0, 1)]
        self._steps = 0
        self._subgroups = 0
        self._unread: set[int] = set()  # those that have not said that they read the last `send`
        self._left: str | None = None
        self._barrier = _body_of("barrier")
        wire.groups.append(self)

    @property
    def cause(self) -> str | None:
        return self._wire.cause or self._left

    # Operations on any arrays.

    def send(self, array: NDArray[Any], to: int) -> None:
        """Send to one rank, which calls `recv`. `array` may be written again after the return.

        One array waits in shared memory for the other rank; a second `send` waits until it was received.
        """
        signature = self._signature("send", array.shape, array.dtype, root=self.rank, to=to)
        peer = self._by_rank[to]
        if to in self._unread:
            self._take(peer, self._message("received", _ACKNOWLEDGEMENTS), _ACKNOWLEDGEMENTS)
        np.copyto(self._slot(signature, self.rank, to), array)
        self._give(peer, self._message(str(signature)))
        self._unread.add(to)

    def recv(self, shape: Sequence[int], dtype: DTypeLike, source: int) -> NDArray[Any]:
        signature = self._signature("send", shape, dtype, root=source, to=self.rank)
        peer = self._by_rank[source]
        self._take(peer, self._message(str(signature)))
        result = self._slot(signature, source, self.rank).copy()
        self._post(peer, self._message("received", _ACKNOWLEDGEMENTS))
        return result

    def _slot(self, signature: Signature, root: int, to: int) -> NDArray[Any]:
        window, offset, _ = self._memory.slot(root, to, signature.nbytes)
        return np.ndarray(signature.shape, signature.dtype, window, offset)

    # Steps: meetings of all ranks.

    def meet(self, text: str) -> None:
        self._step(_body_of(text))

    def barrier(self) -> None:
        self._step(self._barrier)

    @closing
    def _step(self, body: bytes) -> None:
        """Return when all ranks have come to this step with this cell."""
        if self._wire.cause is not None or self._left is not None:
            self._check_open()
        parity = self._steps & 1
        self._steps += 1
        cell = self._steps.to_bytes(_HEAD_BYTES, "little") + body
        control = self._wire.control
        control[self._own_cells[parity]] = cell
        for peer in self._peers:
            os.eventfd_write(peer.outgoing, _ARRIVED)
            peer.ahead -= 1
        self._await_step(body)
        for place in self._their_cells[parity]:
            if control[place] != cell:
                raise self._different_steps(cell, parity)

    def _await_step(self, body: bytes) -> None:
        wire = self._wire
        deadline = 0.0
        while late := [peer for peer in self._peers if peer.ahead < 0]:
            deadline = deadline or time.monotonic() + self.timeout
            if wire.alarm:
                # What ranks do after they have come is the next operation's matter.
                wire.raise_ends(self._number, late, {*self._peers}.difference(late))
            if not wire.look(deadline):
                raise self._late(_text_of(body), late)

    def _different_steps(self, cell: bytes, parity: int) -> InvalidInputError:
        texts = {self._wire.rank: _text_of(cell)}
        for peer, place in zip(self._peers, self._their_cells[parity], strict=True):
            got = self._wire.control[place]
            is_here = got[:_HEAD_BYTES] == cell[:_HEAD_BYTES]
            texts[peer.rank] = _text_of(got) if is_here else "an operation of another group"
        return difference(texts)

    # Messages between two ranks.

    def _message(self, text: str, stream: int = _MESSAGES, *, place: int = 0) -> bytes:
        return self._streams[stream] + _body_of(text, place)

    @closing
    def _give(self, peer: _Peer, cell: bytes) -> None:
        """Send a cell to one rank; a sender notices ends, too."""
        self._check_open()
        self._wire.look(0.0)
        self._wire.raise_ends(self._number, [peer])
        self._post(peer, cell)

    @closing
    def _take(self, peer: _Peer, cell: bytes, stream: int = _MESSAGES) -> None:
        """Return when the peer's next cell of this stream has come, if it is this one."""
        self._check_open()
        wire, name = self._wire, self._streams[stream]
        deadline = 0.0
        while (got := wire.take(peer, name)) is None:
            deadline = deadline or time.monotonic() + self.timeout
            wire.raise_ends(self._number, [peer])
            if not wire.look(deadline):
                raise self._late(_text_of(cell), [peer])
        if got != cell:
            raise difference({peer.rank: _text_of(got), wire.rank: _text_of(cell)})

    def _post(self, peer: _Peer, cell: bytes) -> None:
        if not self._wire.post(peer, cell, self._number, self.timeout):
            raise self._late(_text_of(cell), [peer])

    def _late(self, text: str, late: Sequence[_Peer]) -> CollectiveTimeoutError:
        return self._too_late(text, [self._wire.name(peer) for peer in late])

    @closing
    def check(self) -> None:
        """Raise if a rank has died or left with an error; the group is closed then."""
        self._check_open()
        self._wire.look(0.0)
        self._wire.raise_ends(self._number, [])

    # The group itself.

    @closing
    def _subgroup(self, members: Sequence[int]) -> "ShmGroup | None":
        if self._number:
            raise InvalidInputError("ranks: got a subgroup's, expected those of the whole group")
        self.meet(f"subgroup {[*members]}")
        self._subgroups += 1
        if self._subgroups == _MAX_GROUPS:
            raise InvalidInputError(f"ranks: a group has at most {_MAX_GROUPS - 1} subgroups")
        if self.rank not in members:
            return None
        return ShmGroup(self._wire, members, self.timeout, self._subgroups)

    def forget(self) -> None:
        self.meet("forget")
        for peer in self._peers:  # messages that did not run here
            self._wire.take(peer, _NO_STREAM)
            for stream in self._streams:
                peer.waiting.pop(stream, None)
        self._unread.clear()
        self._memory.forget()
        self.meet("forget (second step)")  # from here on there are new ones

    def leave(self, text: str, cause: str) -> None:
        if self._number and not text:
            self._left = cause
            self._wire.groups.remove(self)
            self._wire.leave(self._number)
            self.let_go()
        else:
            self._wire.close(text, cause)

    def let_go(self) -> None:
        """Keep no memory; arrays keep theirs."""
        self._kept.clear()
        self._memory.close()

    # Making operations.

    def _prepare(self, signature: Signature) -> Collective:
        return self._make(signature, self._memory.prepared.take, self._memory.prepared.take)

    def _make_once(self, signature: Signature) -> Collective:
        return self._make(signature, self._memory.once, self._memory.result)

    def _prepare_transfer(self, signature: Signature, root: int, to: int) -> Collective:
        place = self._memory.transfers(root, to).take(signature.nbytes)
        return _Transfer(self, signature, place, root, to)

    def _make(
        self,
        signature: Signature,
        take_parts: Callable[[int], _Place],
        take_result: Callable[[int], _Place],
    ) -> Collective:
        """An operation, whose memory lies where these functions say if the operation is large."""
        shape, dtype = signature.output_shape, signature.dtype
        nbytes = prod(shape) * dtype.itemsize
        is_root = signature.root == self.rank
        ranks = range(self.size)
        output: NDArray[Any]
        if max(nbytes, signature.nbytes) < _LARGE_BYTES:
            mine: NDArray[Any] = np.zeros(signature.shape, dtype)
            output = mine if is_root else np.empty(shape, dtype)
            parts = [
                [_array(signature, *self._memory.small(parity, rank)[:2]) for rank in ranks]
                for parity in (0, 1)
            ]
            works = [signature.work(every, output, self.rank) for every in parts]
            return _Small(
                self, signature, (mine, output), [every[self.rank] for every in parts], works
            )
        stride = (signature.nbytes + _ALIGNMENT - 1) & -_ALIGNMENT
        window, offset, number = take_parts(self.size * stride)
        every = [_array(signature, window, offset + rank * stride) for rank in ranks]
        if signature.kind in _SHARED:
            output = np.ndarray(shape, dtype, *take_result(nbytes)[:2])
            work = signature.share(every, output, self.rank)
        else:
            output = every[self.rank] if is_root else np.empty(shape, dtype)
            work = signature.work(every, output, self.rank)
        return _Large(self, signature, number, (every[self.rank], output), work)


def _array(signature: Signature, window: mmap.mmap, offset: int) -> NDArray[Any]:
    return np.ndarray(signature.shape, signature.dtype, window, offset)
