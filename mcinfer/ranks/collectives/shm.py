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

A group is *inherited*: the process that starts the ranks makes the memory and the eventfds (`Shared`),
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
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcinfer.checks import check_seconds
from mcinfer.config import MAX_RANKS
from mcinfer.errors import InvalidInputError, RankDiedError, shortened
from mcinfer.locks import Turn
from mcinfer.private import new_memory
from mcinfer.process import how_it_ended
from mcinfer.ranks.collectives.base import DEFAULT_TIMEOUT, Collective, Group, closing, end_error
from mcinfer.ranks.collectives.operations import Signature, cell_of, difference, text_in
from mcinfer.shm.arena import align
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
_ENLARGING = Turn()


class Shared:
    """What the ranks of a group inherit: the memory, and an eventfd from and to each other rank.

    The process that starts the ranks makes it.
    """

    def __init__(self, size: int) -> None:
        """Raises OSError: No descriptor is left, or files may not be as large as the sparse memory."""
        self._size = size
        self._owned = [_new_memory()]
        try:
            for _ in range(size * (size - 1)):
                self._owned.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except BaseException:
            self.close()
            raise

    def fds(self, rank: int) -> list[int]:
        """The descriptors of a rank, for `inherit`; they stay this object's."""
        memory, *eventfds = self._owned
        pairs = [*zip(permutations(range(self._size), 2), eventfds, strict=True)]
        incoming = [fd for (_, to), fd in pairs if to == rank]
        outgoing = [fd for (source, _), fd in pairs if source == rank]
        return [memory, *incoming, *outgoing]

    def close(self) -> None:
        """Let all go, as no rank is to be started any more."""
        close_all(self._owned)
        self._owned.clear()


def _new_memory() -> int:
    """A sparse memfd: its size takes no memory, though it counts against the limit for files."""
    memory = new_memory("mcinfer-group")
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

_HEAD_BYTES = 8  # a message's stream, or the number of a step
_PLACE_BYTES = 8
_WORDS_BYTES = 112
_CELL_BYTES = _HEAD_BYTES + _PLACE_BYTES + _WORDS_BYTES
_RING = 64
"""Messages to one rank that can wait until it looks."""

_REPORTED = _RING // 2
"""Messages that a rank takes before it says so."""

_ABOUT = struct.Struct(
    "<II64s"
)  # a rank's pid, the length of its last words, the groups it has left
_ABOUT_BYTES = 16 << 10

# Counts in an eventfd: what the writer did since the reader read it last.
_ARRIVED = 1
_SENT = 1 << 16
_TAKEN = 1 << 32
_LEFT = 1 << 48
_FIELD = (1 << 16) - 1


@lru_cache
def _body_of(text: str, place: int = 0) -> bytes:
    """What a rank runs, in words, and where its memory lies, if that has to agree."""
    return place.to_bytes(_PLACE_BYTES, "little") + cell_of(text, _WORDS_BYTES)


_BARRIER = _body_of("barrier")


def _text_of(cell: bytes) -> str:
    return text_in(cell[-_WORDS_BYTES:])


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
        taken: The messages from it that this rank has taken.
        waiting: By stream, those of them that no operation has wanted yet.
        closed: The numbers of the groups that it has left, as bits.
        left: What it said when it left the whole group.
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
    taken: int = 0
    waiting: dict[bytes, deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    closed: int = 0
    left: str = ""
    died: bool = False


class _Wire:
    """What this rank has of the others, for a group and all its subgroups.

    Attributes:
        rank: This rank's number.
        peers: The others, by rank.
        memory: That of all groups.
        control: Its begin: the texts, messages and cells of steps of all ranks.
        alarm: A peer has died, or left.
        groups: Those that are closed with this.
    """

    def __init__(self, rank: int, peers: Sequence[_Peer], memory: int) -> None:
        self.rank = rank
        self.peers = peers
        self.memory = memory
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

    def put(self, peer: _Peer, cell: bytes) -> None:
        """Send a message, for which there is room."""
        start = peer.outbox + peer.sent % _RING * _CELL_BYTES
        self.control[start : start + _CELL_BYTES] = cell
        peer.sent += 1
        os.eventfd_write(peer.outgoing, _SENT)

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
                came = peer.taken + (news // _SENT & _FIELD)
                while peer.taken < came:  # so that there is room for others
                    start = peer.inbox + peer.taken % _RING * _CELL_BYTES
                    cell = self.control[start : start + _CELL_BYTES]
                    peer.waiting[cell[:_HEAD_BYTES]].append(cell)
                    peer.taken += 1
                    if not peer.taken % _REPORTED:
                        os.eventfd_write(peer.outgoing, _REPORTED * _TAKEN)
                peer.acknowledged += news // _TAKEN & _FIELD
                if news >= _LEFT:
                    _, peer.left, peer.closed = self._said(peer)
                    self.alarm = True
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

    def raise_ends(self, group: int, late: Sequence[_Peer], awaited: Sequence[_Peer] = ()) -> None:
        """Raise for a peer that died or left with an error, or that is late and closed this group, or all.

        What the `awaited` that are not late do after they have come is the next operation's matter.
        """
        if not self.alarm:
            return
        past = {*awaited}.difference(late)
        peers = [peer for peer in self.peers if peer not in past]
        for peer in peers:
            if peer.died and not peer.closed & 1:
                how = how_it_ended(self._said(peer)[0])
                raise RankDiedError(f"{self.name(peer)} {how}")
        for peer in peers:
            exc = end_error(peer.left)
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
        self.leave(0, text)
        for group in self.groups:
            group.let_go(cause)
        self.groups.clear()
        for peer in self.peers:
            close_all([fd for fd in (peer.incoming, peer.outgoing, peer.pidfd) if fd >= 0])
        self.control.close()
        os.close(self.memory)


# Memory.

# The parts of a group's memory, each an `Area`; first come the cells of the whole group, `_Wire.control`.
_SMALL = 1 << 40  # the parts of small operations, for even and odd steps
_ONCE = 1 << 49  # the parts of an operation that is run once
_RESULT = _ONCE + (1 << 48)  # what ranks copy at its end, while parts of the next one are written
_PREPARED = 1 << 50
_PAIRS = 1 << 52  # from each rank to each other one: the array of `send`, then transfers
_PAIR = 1 << 40
_FIRST_WINDOW = 4 << 20

_Place = tuple[mmap.mmap, int, int]
"""A mapping, an offset in it, and a number that is the same in all ranks; never 0, which is no place."""


class Area:
    """A part of a group's memory, which ranks map window by window: for what is handed out, or for one array.

    All ranks that use it take the same sizes in the same order, and so get the same places.
    """

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd = fd
        self._start = start
        self._end = start + length
        self._length = _FIRST_WINDOW
        self._used = 0
        self._window: mmap.mmap | None = None

    def take(self, nbytes: int) -> _Place:
        """Hand out memory for ever, in windows that double in size."""
        wanted = align(max(nbytes, 1))
        while self._used + wanted > self._length:
            self._start += self._length
            self._length *= 2
            self._used = 0
            self._window = None
        place = self._map(self._length, nbytes), self._used, self._start + self._used + 1
        self._used += wanted
        return place

    def reuse(self, nbytes: int) -> _Place:
        """The same memory for each array, in one window that grows."""
        length = max(self._length, 1 << (nbytes - 1).bit_length())
        return self._map(length, nbytes), 0, self._start

    def _map(self, length: int, nbytes: int) -> mmap.mmap:
        if self._start + length > self._end:
            raise InvalidInputError(f"shape: {nbytes} bytes do not fit the memory of a group")
        if self._window is None or len(self._window) < length:
            self._window = mmap.mmap(self._fd, length, offset=self._start)
            self._length = length  # after an error, smaller arrays still have a window
        return self._window


# Operations.

# A group uses two streams: messages of one do not wait behind those of the other.
_MESSAGES, _ACKNOWLEDGEMENTS, _STREAMS = range(3)


class ShmGroup(Group):
    """A group of ranks on one machine; see `inherit`. Errors name ranks by the group that was inherited."""

    def __init__(
        self, wire: _Wire, members: Sequence[int], timeout: float, number: int = 0
    ) -> None:
        """`members` are ranks of the wire; each subgroup has another `number`, the same in all ranks."""
        super().__init__(members.index(wire.rank), len(members), timeout)
        peers = {peer.rank: peer for peer in wire.peers}
        self._wire = wire
        self._by_rank = {place: peers[one] for place, one in enumerate(members) if one in peers}
        self._peers = [*self._by_rank.values()]
        self._number = number
        self._streams = [(number * _STREAMS + one).to_bytes(8, "little") for one in range(_STREAMS)]
        self._areas: dict[int, Area] = {}  # by their start
        theirs = [wire.step_cells(number, peer.rank) for peer in self._peers]
        self._own_cells = wire.step_cells(number, wire.rank)
        self._their_cells = [[cells[parity] for cells in theirs] for parity in (0, 1)]
        self._steps = 0
        self._subgroups = 0
        self._unread: set[int] = set()  # those that have not said that they read the last `send`
        wire.groups.append(self)

    # Operations on any arrays.

    def send(self, array: NDArray[Any], to: int) -> None:
        """Send to one rank, which calls `recv`. `array` may be written again after the return.

        One array waits in shared memory for the other rank; a second `send` waits until it was received.
        """
        signature = self._signature("send", array.shape, array.dtype, root=self.rank, to=to)
        peer = self._by_rank[to]
        if to in self._unread:
            self._take(peer, self._message("received", _ACKNOWLEDGEMENTS))
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
        area = self._area(_PAIRS + (root * self.size + to) * _PAIR, _PAIR // 2)
        return _array(signature, area.reuse(signature.nbytes))

    # Steps: meetings of all ranks.

    def meet(self, text: str) -> None:
        self._step(_body_of(text))

    def barrier(self) -> None:
        self._step(_BARRIER)

    @closing
    def _step(self, body: bytes) -> None:
        """Return when all ranks have come to this step with this cell."""
        if self.cause is not None:
            self._check_open()
        parity = self._steps & 1
        self._steps += 1
        cell = self._steps.to_bytes(_HEAD_BYTES, "little") + body
        control = self._wire.control
        control[self._own_cells[parity]] = cell
        for peer in self._peers:
            os.eventfd_write(peer.outgoing, _ARRIVED)
            peer.ahead -= 1
        deadline = 0.0
        while late := [peer for peer in self._peers if peer.ahead < 0]:
            deadline = self._look(deadline, cell, late, self._peers)
        for place in self._their_cells[parity]:
            if control[place] != cell:
                raise self._different_steps(cell, parity)

    def _look(
        self, deadline: float, cell: bytes, late: Sequence[_Peer], awaited: Sequence[_Peer] = ()
    ) -> float:
        """Wait for news, as some are late for what a cell says; the deadline, from now on if it is 0."""
        deadline = deadline or time.monotonic() + self.timeout
        self._wire.raise_ends(self._number, late, awaited)
        if not self._wire.look(deadline):
            raise self._too_late(_text_of(cell), [*map(self._wire.name, late)])
        return deadline

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
    def _take(self, peer: _Peer, cell: bytes) -> None:
        """Return when the peer's next cell of this stream has come, if it is this one."""
        self._check_open()
        came = peer.waiting[cell[:_HEAD_BYTES]]
        deadline = 0.0
        while not came:
            deadline = self._look(deadline, cell, [peer])
        got = came.popleft()
        if got != cell:
            raise difference({peer.rank: _text_of(got), self._wire.rank: _text_of(cell)})

    def _post(self, peer: _Peer, cell: bytes) -> None:
        """Send a cell once there is room for it."""
        deadline = 0.0
        while peer.sent - peer.acknowledged >= _RING:
            deadline = self._look(deadline, cell, [peer])
        self._wire.put(peer, cell)

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
            for stream in self._streams:
                peer.waiting.pop(stream, None)
        self._unread.clear()
        self._areas.clear()
        self.meet("forget (second step)")  # from here on there are new ones

    def leave(self, text: str, cause: str) -> None:
        if self._number and not text:
            self._wire.groups.remove(self)
            self._wire.leave(self._number)
            self.let_go(cause)
        else:
            self._wire.close(text, cause)

    def let_go(self, cause: str) -> None:
        """Be closed, and keep no memory; arrays keep theirs."""
        self.cause = cause
        self._kept.clear()
        self._areas.clear()

    # Making operations.

    def _area(self, start: int, length: int) -> Area:
        """A part of the memory, by its start in that of this group."""
        if start not in self._areas:
            whole = self._number * _GROUP_BYTES
            self._areas[start] = Area(self._wire.memory, whole + start, length)
        return self._areas[start]

    def _prepare(self, signature: Signature) -> Collective:
        take = self._area(_PREPARED, _PREPARED).take
        return self._make(signature, take, take)

    def _make_once(self, signature: Signature) -> Collective:
        parts, result = (self._area(start, _RESULT - _ONCE) for start in (_ONCE, _RESULT))
        return self._make(signature, parts.reuse, result.reuse)

    def _prepare_transfer(self, signature: Signature, root: int, to: int) -> Collective:
        """An array in memory that both ranks map."""
        start = _PAIRS + (root * self.size + to) * _PAIR + _PAIR // 2
        place = self._area(start, _PAIR // 2).take(signature.nbytes)
        array = _array(signature, place)
        cell = self._message(str(signature), place=place[2])
        move, other = (self._give, to) if self.rank == root else (self._take, root)
        return Collective((array, array), partial(move, self._by_rank[other], cell))

    def _make(
        self,
        signature: Signature,
        take_parts: Callable[[int], _Place],
        take_result: Callable[[int], _Place],
    ) -> Collective:
        """An operation of all ranks; its memory lies where these functions say if it is large."""
        shape, dtype = signature.output_shape, signature.dtype
        nbytes = prod(shape) * dtype.itemsize
        if max(nbytes, signature.nbytes) < _LARGE_BYTES:
            return self._make_small(signature)
        stride = align(signature.nbytes)
        place = take_parts(self.size * stride)
        parts = [_array(signature, place, rank * stride) for rank in range(self.size)]
        mine = output = parts[self.rank]
        if signature.kind in _SHARED:
            output = np.ndarray(shape, dtype, *take_result(nbytes)[:2])
            work = signature.share(parts, output, self.rank)
        else:
            if signature.root != self.rank:
                output = np.empty(shape, dtype)
            work = signature.work(parts, output, self.rank)
        first, second = (
            _body_of(f"{signature}{step}", place[2]) for step in ("", " (second step)")
        )

        def run() -> None:
            self._step(first)
            work()
            self._step(second)

        return Collective((mine, output), run)

    def _make_small(self, signature: Signature) -> Collective:
        """An operation in one step; the parts are copied into memory for that step."""
        mine: NDArray[Any] = np.zeros(signature.shape, signature.dtype)
        output = mine
        if signature.root != self.rank:
            output = np.empty(signature.output_shape, signature.dtype)
        place = self._area(_SMALL, _SMALL).reuse(2 * self.size * _LARGE_BYTES)
        parts = [_array(signature, place, n * _LARGE_BYTES) for n in range(2 * self.size)]
        every = parts[: self.size], parts[self.size :]  # for even and odd steps
        works = [signature.work(one, output, self.rank) for one in every]
        gives = signature.root in (None, self.rank)
        body = _body_of(str(signature))

        def run() -> None:
            parity = self._steps & 1
            if gives:
                np.copyto(every[parity][self.rank], mine)
            self._step(body)
            works[parity]()

        return Collective((mine, output), run)


def _array(signature: Signature, place: _Place, more: int = 0) -> NDArray[Any]:
    """An array of one rank at a place, or so many bytes behind it."""
    window, offset, _ = place
    return np.ndarray(signature.shape, signature.dtype, window, offset + more)
