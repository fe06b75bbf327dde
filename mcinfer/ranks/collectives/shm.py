"""Collectives between ranks of one machine, through shared memory.

::

    rank 0                                                               rank 1
    writes its part into its region ──────┐   one memfd:   ┌────── writes its part into its region
    writes its cell: what it runs ────────┴──► memory.py ◄─┴────── writes its cell
    writes the eventfd of each other one ─────────────────► poll
    waits in poll(2) for the others' eventfds, their pidfds and the deadline at once; never spins
    compares all cells ──► reads the others' parts ──► writes its output

A *step* is one such meeting of all ranks. Small operations take one: a rank copies its part into memory for
even or for odd steps, and reduces the parts of all for itself. That memory is written again two steps later,
when all have read it. Large operations take two steps. Their parts lie in shared memory from the start, and
after the first step each rank reduces its share into a result that all read after the second. So a caller
may write its part again as soon as an operation has returned.

The order of memory needs no fence: what a rank writes before it writes an eventfd (eventfd(2)) is seen by the
rank that has read that eventfd; a cell or a part is never read on the word of shared memory alone.

Messages between two ranks go another way: the sender writes a cell into a ring and the receiver's eventfd.

Ownership: a group owns its descriptors until `close` or an error; arrays keep their memory alive.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcinfer.checks import check_seconds
from mcinfer.errors import InvalidInputError, RankDiedError, shortened
from mcinfer.process import how_it_ended
from mcinfer.ranks.collectives.base import DEFAULT_TIMEOUT, Collective, Group, closing, end_error
from mcinfer.ranks.collectives.bootstrap import Member, Membership, bootstrap
from mcinfer.ranks.collectives.memory import (
    END_TEXT,
    RING,
    Area,
    Control,
    Place,
    Windows,
    large_part,
    result,
    slot,
    small_part,
    transfers,
)
from mcinfer.ranks.collectives.operations import (
    CANCELLED,
    FAILED,
    FAILURES,
    Signature,
    cell,
    difference,
    epoch_of,
    reduction,
    text_of,
)
from mcinfer.ranks.collectives.rendezvous import meet

_LARGE_BYTES = 256 << 10
"""From here on an operation takes two steps: to share the work, and not to copy, gains more (measured)."""

# Counts in an eventfd: what the writer did since the reader read it last.
_ARRIVAL = 1
_MESSAGE = 1 << 16
_ACKNOWLEDGEMENT = 1 << 32
_END = 1 << 48
_FIELD = (1 << 16) - 1

_SHARED = ("all_reduce", "all_gather")
"""Operations whose large outputs all ranks share."""

_LONGEST_WAIT = 86400.0


def join_sockets(
    rank: int,
    size: int,
    sockets: Sequence[socket.socket],
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> "ShmGroup":
    """Make ranks that a star of sockets connects a group. The sockets are the caller's again afterwards.

    Args:
        rank: This rank's number.
        size: How many ranks there are.
        sockets: Connected SOCK_SEQPACKET sockets: in rank 0 those to ranks 1, 2, …; in others the one to
            rank 0.
        timeout: Seconds to wait for the others, here and in each operation.

    Raises what `mcinfer.ranks.collectives.join` does.
    """
    check_seconds("timeout", timeout)
    membership = bootstrap(rank, size, sockets, timeout)
    if membership is None:
        raise InvalidInputError(f"rank: got {rank}, which is no member of the group")
    return ShmGroup(membership, timeout)


class Shared:
    """What the ranks of a group inherit from the process that starts them; closed with `close`."""

    def __init__(self, size: int) -> None:
        """Raises OSError: no descriptor is left."""
        self._ends: list[list[socket.socket]] = [[] for _ in range(size)]
        try:
            for rank in range(1, size):  # a star around rank 0
                hub, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._ends[0].append(hub)
                self._ends[rank].append(end)
        except OSError:
            self.close()
            raise

    def fds(self, rank: int) -> list[int]:
        """The descriptors that a rank inherits, for `inherit`."""
        return [end.fileno() for end in self._ends[rank]]

    def close(self) -> None:
        for end in (end for ends in self._ends for end in ends):
            end.close()


def make_shared(size: int) -> Shared:
    """What a group of so many ranks needs, for the process that starts them; `OSError` as the system says."""
    return Shared(size)


def inherit(
    rank: int, size: int, fds: Sequence[int], *, timeout: float = DEFAULT_TIMEOUT
) -> "ShmGroup":
    """Join the group by the descriptors of `Shared.fds`, which are this function's from now on."""
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(socket.socket(fileno=fd)) for fd in fds]
        return join_sockets(rank, size, ends, timeout=timeout)


def join(key: str, rank: int, size: int, *, timeout: float = DEFAULT_TIMEOUT) -> "ShmGroup":
    """Make ranks that were started apart a group; see `mcinfer.ranks.collectives.join`."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(end) for end in meet(key, rank, size, timeout)]
        return join_sockets(rank, size, sockets, timeout=timeout)


@dataclass(slots=True)
class _Peer:
    """Another rank, as this one knows it by what it has read of its eventfd and pidfd.

    Attributes:
        number: In messages: its rank in the group that a subgroup is of.
        cells: Where its cells of even and of odd steps are.
        arrivals: The steps at which it has arrived.
        messages: Those that it has sent to this rank.
        acknowledged: Those of this rank that it has taken.
        sent: Messages of this rank to it.
        slot_free: How many of them it must have taken before `send` may write again.
        taken: Messages that this rank has taken from it.
        reported: How many of them it has been sent an acknowledgement of.
    """

    rank: int
    number: int
    member: Member
    cells: tuple[slice, slice]
    arrivals: int = 0
    messages: int = 0
    acknowledged: int = 0
    died: bool = False
    ended: bool = False
    sent: int = 0
    slot_free: int = 0
    taken: int = 0
    reported: int = 0

    def __str__(self) -> str:
        return f"rank {self.number} (pid {self.member.pid})"


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
        self._cell = cell(str(signature))
        self._slots = slots  # for even and odd steps
        self._works = works
        self._has_part = signature.root is None or signature.root == group.rank

    def run(self) -> None:
        group = self._group
        parity = (group._steps + 1) & 1
        if self._has_part:
            np.copyto(self._slots[parity], self.input)
        group.meet(self._cell)
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
        self._cell = cell(str(signature), place=place)
        self._end = cell(f"{signature} (second step)", place=place)
        self._work = work

    def run(self) -> None:
        self._group.meet(self._cell)
        self._work()
        self._group.meet(self._end)


class _Transfer(Collective):
    """One array from a rank to another, in memory that both map."""

    def __init__(
        self, group: "ShmGroup", signature: Signature, place: Place, root: int, to: int
    ) -> None:
        self.input = self.output = group._windows.array(
            root, place, signature.shape, signature.dtype
        )
        self._group = group
        self._signature = str(signature)
        self._place = place.number
        self._is_source = group.rank == root
        self._peer = group._peer(to if self._is_source else root)
        self._epoch = -1

    def run(self) -> None:
        group = self._group
        if self._epoch != group._epoch:
            self._epoch = group._epoch
            self._cell = cell(self._signature, place=self._place, epoch=self._epoch)
        if self._is_source:
            group._await_room(self._peer, self._signature, 0)
            group._post(self._peer, self._cell)
        else:
            peer = self._peer
            group._take(peer, self._cell)
            if peer.taken - peer.reported >= RING // 2:
                group._acknowledge(peer)


class ShmGroup(Group):
    """A group of ranks on one machine; see `join_sockets`. Errors call rank r of it ``numbers[r]``."""

    def __init__(
        self, membership: Membership, timeout: float, numbers: Sequence[int] | None = None
    ) -> None:
        # The membership is this object's from now on, even if this call fails.
        super().__init__()
        self.rank = membership.rank
        self.size = membership.size
        self.timeout = timeout
        self._membership = membership
        try:
            self._control = Control(membership.memory, self.size)
        except (OSError, ValueError):
            membership.close()
            raise
        self._windows = Windows(membership.memory)
        self._numbers = [*range(self.size)] if numbers is None else numbers
        self._peers: list[_Peer] = [
            _Peer(
                rank=other.rank,
                number=self._numbers[other.rank],
                member=other,
                cells=self._control.step_cells(other.rank),
            )
            for other in membership.others
        ]
        self._outgoing = [other.outgoing for other in membership.others]
        self._incoming = {peer.member.incoming: peer for peer in self._peers}
        self._pidfds = {peer.member.pidfd: peer for peer in self._peers}
        self._poll = select.poll()
        for fd in (*self._incoming, *self._pidfds):
            self._poll.register(fd, select.POLLIN)
        self._cells = self._control.step_cells(self.rank)
        self._their_cells = [[peer.cells[parity] for peer in self._peers] for parity in (0, 1)]
        self._steps = 0
        self._alarm = False  # a peer has died, or left the group
        self._prepared = Area()
        own = [(self.rank, peer.rank) for peer in self._peers]
        own += [(peer.rank, self.rank) for peer in self._peers]
        self._transfers = {(root, to): transfers(to, self.size) for root, to in own}

    # Operations on any arrays.

    def send(self, array: NDArray[Any], to: int) -> None:
        """Send to one rank, which calls `recv`. `array` may be written again after the return.

        One array waits in shared memory for the other rank; a second `send` waits until it was received.
        """
        signature = self._signature("send", array.shape, array.dtype, root=self.rank, to=to)
        peer = self._peer(to)
        self._await_room(peer, str(signature), peer.slot_free)
        np.copyto(self._slot(signature, to), array)
        self._post(peer, cell(str(signature), epoch=self._epoch))
        peer.slot_free = peer.sent

    def recv(self, shape: Sequence[int], dtype: DTypeLike, source: int) -> NDArray[Any]:
        signature = self._signature("send", shape, dtype, root=source, to=self.rank)
        peer = self._peer(source)
        self._take(peer, cell(str(signature), epoch=self._epoch))
        result = self._slot(signature, self.rank).copy()
        self._acknowledge(peer)
        return result

    def fail(self, text: str, *, cancelled: bool = False) -> None:
        self._check_open()
        kind = CANCELLED if cancelled else FAILED
        self._control.write_text(self.rank, (self._steps + 1) & 1, shortened(text))
        self._arrive(cell("fail", kind))
        self._begin_epoch()

    # The group itself.

    @closing
    def _subgroup(self, members: Sequence[int]) -> "ShmGroup | None":
        star = self._membership.star
        membership = bootstrap(self.rank, self.size, star, self.timeout, members)
        if membership is None:
            return None
        return ShmGroup(membership, self.timeout, [self._numbers[rank] for rank in members])

    # Steps: meetings of all ranks.

    @closing
    def check(self) -> None:
        """Raise if a rank has died or left with an error; the group is closed then."""
        self._check_open()
        self._look(0.0)
        if self._alarm:
            self._raise_end([])

    def meet(self, packed: bytes) -> None:
        self._arrive(packed)
        parity = self._steps & 1
        control = self._control.map
        for place in self._their_cells[parity]:
            if control[place] != packed:
                cells = {peer.rank: control[peer.cells[parity]] for peer in self._peers}
                self._raise_difference(
                    packed, cells, lambda peer: self._control.read_text(peer.rank, parity)
                )

    @closing
    def _arrive(self, packed: bytes) -> None:
        """Come to the next step, and return when all ranks have, whatever they run there."""
        self._check_open()
        step = self._steps = self._steps + 1
        self._control.map[self._cells[step & 1]] = packed
        for fd in self._outgoing:
            os.eventfd_write(fd, _ARRIVAL)
        for peer in self._peers:
            if peer.arrivals < step:
                self._await_step(step, packed)
                break

    def _await_step(self, step: int, packed: bytes) -> None:
        deadline = time.monotonic() + self.timeout
        while late := [peer for peer in self._peers if peer.arrivals < step]:
            if self._alarm:
                self._raise_end(late)
            if not self._look(deadline):
                raise self._too_late(text_of(packed), late)

    def _begin_epoch(self) -> None:
        super()._begin_epoch()
        for peer in self._peers:
            while peer.taken < peer.messages and epoch_of(self._next_message(peer)) < self._epoch:
                peer.taken += 1
            self._acknowledge(peer)

    # Messages between two ranks.

    def _post(self, peer: _Peer, packed: bytes) -> None:
        self._control.map[self._control.message_cell(self.rank, peer.rank, peer.sent)] = packed
        peer.sent += 1
        os.eventfd_write(peer.member.outgoing, _MESSAGE)

    @closing
    def _await_room(self, peer: _Peer, text: str, free: int) -> None:
        """Return once the peer has taken as many messages as `free`, and its ring has room for one more."""
        self._check_open()
        free = max(free, peer.sent - RING + 1)
        self._look(0.0)  # a sender notices ends, too
        deadline = time.monotonic() + self.timeout
        self._check_peers(peer)
        while peer.acknowledged < free:
            if not self._look(deadline):
                raise self._too_late(text, [peer])
            self._check_peers(peer)

    @closing
    def _take(self, peer: _Peer, packed: bytes) -> None:
        """Return when the peer's next message has come, if it has this cell; it is not acknowledged yet."""
        self._check_open()
        if peer.messages == peer.taken:
            deadline = time.monotonic() + self.timeout
            while peer.messages == peer.taken:
                self._check_peers(peer)
                if not self._look(deadline):
                    raise self._too_late(text_of(packed), [peer])
        got = self._next_message(peer)
        if got != packed:
            raise difference({peer.rank: got, self.rank: packed})
        peer.taken += 1

    def _next_message(self, peer: _Peer) -> bytes:
        """The cell of the peer's next message."""
        return self._control.map[self._control.message_cell(peer.rank, self.rank, peer.taken)]

    def _acknowledge(self, peer: _Peer) -> None:
        count = peer.taken - peer.reported
        if count:
            peer.reported = peer.taken
            os.eventfd_write(peer.member.outgoing, count * _ACKNOWLEDGEMENT)

    def _check_peers(self, peer: _Peer) -> None:
        """Raise if a message to or from the peer can no longer be: a rank is gone, or waits in `fail`."""
        if self._alarm:
            self._raise_end([peer])
        step = self._steps + 1
        for other in self._peers:
            if other.arrivals >= step:
                kind = self._control.map[other.cells[step & 1].start]
                if kind in FAILURES:
                    self.meet(cell("send or recv"))

    # Waiting.

    def _look(self, deadline: float) -> bool:
        """Wait for any news of the peers, and note it; False if the deadline has passed without any."""
        wait = min(deadline - time.monotonic(), _LONGEST_WAIT)
        events = self._poll.poll(wait * 1000 if wait > 0 else 0)
        for fd, _ in events:
            peer = self._incoming.get(fd)
            if peer is None:
                self._note_death(self._pidfds[fd])
            else:
                self._note_news(peer)
        return bool(events) or wait > _LONGEST_WAIT / 2

    def _note_news(self, peer: _Peer) -> None:
        news = os.eventfd_read(peer.member.incoming)
        peer.arrivals += news & _FIELD
        if news > _FIELD:
            peer.messages += news // _MESSAGE & _FIELD
            peer.acknowledged += news // _ACKNOWLEDGEMENT & _FIELD
            if news >= _END:
                peer.ended = self._alarm = True

    def _note_death(self, peer: _Peer) -> None:
        peer.died = self._alarm = True
        self._poll.unregister(peer.member.pidfd)
        try:
            self._note_news(peer)  # what it did last
        except BlockingIOError:
            return

    def _raise_end(self, late: Sequence[_Peer]) -> None:
        """Raise for a peer that died or ended the group; for one that only closed it, if it is late."""
        for peer in self._peers:
            if peer.died and not peer.ended:
                how = how_it_ended(peer.member.pid, peer.member.pidfd)
                raise RankDiedError(f"{peer} {how}")
        for peer in self._peers:
            if peer.ended:
                exc = end_error(self._control.read_text(peer.rank, END_TEXT))
                if exc is not None:
                    raise exc
        for peer in late:
            if peer.ended:
                raise RankDiedError(f"{peer} closed the group")

    # The end.

    def leave(self, text: str, cause: str) -> None:
        self._cause = cause
        self._control.write_text(self.rank, END_TEXT, shortened(text))
        for fd in self._outgoing:
            os.eventfd_write(fd, _END)
        self._kept.clear()
        self._windows.clear()
        self._control.map.close()
        self._membership.close()

    # Making operations.

    def _slot(self, signature: Signature, to: int) -> NDArray[Any]:
        """The memory of `send`, in the second half of the channel."""
        place = slot(to, self.size, signature.nbytes)
        root = signature.root if signature.root is not None else self.rank
        return self._windows.array(root, place, signature.shape, signature.dtype)

    def _prepare(self, signature: Signature) -> Collective:
        return self._make(signature, self._prepared.take, self._prepared.take)

    def _prepare_transfer(self, signature: Signature, root: int, to: int) -> Collective:
        place = self._transfers[root, to].take(signature.nbytes)
        return _Transfer(self, signature, place, root, to)

    def _make_once(self, signature: Signature) -> Collective:
        return self._make(signature, large_part, result)

    def _make(
        self,
        signature: Signature,
        take_part: Callable[[int], Place],
        take_result: Callable[[int], Place],
    ) -> Collective:
        """An operation, whose memory lies where these functions say if the operation is large."""
        shape, dtype = signature.output_shape, signature.dtype
        nbytes = prod(shape) * dtype.itemsize
        is_root = signature.root == self.rank
        output: NDArray[Any]
        if max(nbytes, signature.nbytes) < _LARGE_BYTES:
            mine: NDArray[Any] = np.zeros(signature.shape, dtype)
            output = mine if is_root else np.empty(shape, dtype)
            parts = [self._parts(signature, small_part(parity)) for parity in (0, 1)]
            works = [self._work(signature, every, output) for every in parts]
            slots = [every[self.rank] for every in parts]
            return _Small(self, signature, (mine, output), slots, works)
        place = take_part(signature.nbytes)
        every = self._parts(signature, place)
        if signature.kind in _SHARED:
            output = self._windows.array(0, take_result(nbytes), shape, dtype)
            work = self._shared_work(signature, every, output)
        else:
            output = every[self.rank] if is_root else np.empty(shape, dtype)
            work = self._work(signature, every, output)
        return _Large(self, signature, place.number, (every[self.rank], output), work)

    def _parts(self, signature: Signature, place: Place) -> list[NDArray[Any]]:
        """The parts of all ranks, at this place in each region."""
        return [
            self._windows.array(rank, place, signature.shape, signature.dtype)
            for rank in range(self.size)
        ]

    def _work(
        self, signature: Signature, parts: Sequence[NDArray[Any]], output: NDArray[Any]
    ) -> Callable[[], None]:
        """What this rank does with all parts, for itself alone."""
        if signature.root is not None:
            is_root = signature.root == self.rank
            return _copier([] if is_root else [(output, parts[signature.root])])
        if signature.kind == "all_gather":
            ranks = range(self.size)
            return _copier([(signature.part(output, rank), parts[rank]) for rank in ranks])
        if signature.kind == "reduce_scatter":
            parts = [signature.part(part, self.rank) for part in parts]
        return reduction(parts, output, signature.operation or "sum")

    def _shared_work(
        self, signature: Signature, parts: Sequence[NDArray[Any]], output: NDArray[Any]
    ) -> Callable[[], None]:
        """This rank's share of the work on an output that all ranks share."""
        if signature.kind == "all_gather":
            return _copier([(signature.part(output, self.rank), parts[self.rank])])
        count = output.size
        share = slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)
        own = [part.reshape(-1)[share] for part in parts]
        return reduction(own, output.reshape(-1)[share], signature.operation or "sum")


def _copier(copies: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> Callable[[], None]:
    """A function that copies arrays to arrays."""

    def copy() -> None:
        for to, source in copies:
            np.copyto(to, source)

    return copy
