"""Collectives between ranks of one machine, through shared memory.

::

    rank 0                                                               rank 1
    writes its part into its region ─┐   one memfd, sparse:            ┌─ writes its part into its region
    writes its cell: what it runs    ├─► [control][region 0][region 1] ◄┤
    rings: eventfd of each other ────┘                                 └─ …
    waits in poll(2): the eventfds of all others, their pidfds, the deadline; never spins
    compares the cells of all ──► reads the others' parts ──► writes its output

A *step* is one such meeting of all ranks. Small operations take one step: each rank reads all parts and
reduces them for itself. Large ones take two: each rank reduces its share into a result that all then read.

The order of memory needs no fence: what a rank writes before it writes an eventfd (eventfd(2)) is seen by the
rank that has read that eventfd; a cell or a part is never read on the word of shared memory alone.

Regions: rank r's begins at ``(r + 1) << 40``. Fixed memory for `Collective` is handed out in all ranks in the
same order, so its place is the same in each, and is part of the cell. Windows of a region are mapped when an
operation is made.

Ownership: a group owns its descriptors until `close` or an error; windows live as long as arrays over them.
"""

import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcinfer.collectives.base import (
    DEFAULT_TIMEOUT,
    Collective,
    Group,
    Operation,
    PeerFailedError,
)
from mcinfer.collectives.bootstrap import REGION, Member, Membership, bootstrap
from mcinfer.collectives.operations import Signature, reduction
from mcinfer.config import check_seconds
from mcinfer.errors import (
    ClosedError,
    CollectiveTimeoutError,
    InvalidInputError,
    McinferError,
    RankDiedError,
    shortened,
)
from mcinfer.process import how_it_ended

_LARGE_BYTES = 256 << 10
"""From here on an operation takes two steps: to share the work gains more than a step costs (measured)."""

# Counts in an eventfd: what the writer did since the reader read it last.
_ARRIVAL = 1
_MESSAGE = 1 << 16
_ACKNOWLEDGEMENT = 1 << 32
_END = 1 << 48
_FIELD = (1 << 16) - 1

# Control pages of each rank: cells of two steps, texts, and a ring of cells for each rank that it sends to.
_CELL = struct.Struct("<B3xIQ8s104s")  # kind, epoch, place, digest of the text, text
_OPERATION, _FAILED, _CANCELLED = 1, 2, 3
_FAILURES = (_FAILED, _CANCELLED)
_TEXT = struct.Struct("<I")  # its bytes
_TEXT_BYTES = 16 << 10
_TEXTS = 4096
_END_TEXT = 2  # texts 0 and 1 are of the steps' failures
_RINGS = 64 << 10
_RING = 64  # cells

# Areas of a region.
_ALIGNMENT = 64
_FIRST_WINDOW = 4 << 20
_PREPARED = REGION >> 1
_STAGING = (REGION >> 1, (REGION >> 1) + (REGION >> 3))
_RESULT = (REGION >> 1) + (REGION >> 2)
_CHANNELS = (REGION >> 1) + (REGION >> 2) + (REGION >> 3)

_MAX_KEPT = 64
"""One-shot operations whose views are kept for the next call."""

_LONGEST_WAIT = 86400.0
_ENDS: dict[str, type[McinferError]] = {
    kind.__name__: kind for kind in (RankDiedError, CollectiveTimeoutError, InvalidInputError)
}


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

    Raises:
        InvalidInputError: The ranks do not fit together; says which two, and how.
        CollectiveTimeoutError: A rank did not come in time; names it.
        RankDiedError: A rank hung up.
        ProtocolError: Another program or another user is at the other end.
        OSError: No descriptor is left.
    """
    check_seconds("timeout", timeout)
    membership = bootstrap(rank, size, sockets, timeout)
    if membership is None:
        raise InvalidInputError(f"rank: got {rank}, which is no member of the group")
    return ShmGroup(membership, timeout)


# Memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where memory lies in a region: in a window of it, which is mapped as a whole."""

    window: int
    length: int
    offset: int


class _Area:
    """A part of a region, from which fixed memory is handed out in windows that double in size."""

    def __init__(self, start: int, length: int) -> None:
        self._end = start + length
        self._window = start
        self._length = _FIRST_WINDOW
        self._used = 0

    def take(self, nbytes: int) -> _Place:
        """Memory for ever."""
        wanted = max(_aligned(nbytes), _ALIGNMENT)
        while self._used + wanted > self._length:
            if self._window + 3 * self._length > self._end:
                raise InvalidInputError(f"shape: {nbytes} bytes do not fit a group's memory")
            self._window += self._length
            self._length *= 2
            self._used = 0
        place = _Place(window=self._window, length=self._length, offset=self._used)
        self._used += wanted
        return place


def _staging(start: int, nbytes: int) -> _Place:
    """Memory at the start of an area, which the next caller uses again."""
    length = _FIRST_WINDOW
    while length < nbytes:
        length *= 2
    return _Place(window=start, length=length, offset=0)


class _Memory:
    """This rank's mappings of the group's memfd."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._windows: dict[tuple[int, int, int], mmap.mmap] = {}
        self.control_bytes = _RINGS + size * _RING * _CELL.size
        self.control = mmap.mmap(fd, size * self.control_bytes)

    def array(
        self, rank: int, place: _Place, shape: tuple[int, ...], dtype: "np.dtype[Any]"
    ) -> NDArray[Any]:
        """The array at a place of a rank's region."""
        key = (rank, place.window, place.length)
        window = self._windows.get(key)
        if window is None:
            start = (rank + 1) * REGION + place.window
            window = self._windows[key] = mmap.mmap(self._fd, place.length, offset=start)
        return np.ndarray(shape, dtype, window, place.offset)

    def forget(self) -> None:
        """Let the windows go; each ends with the last array over it."""
        self._windows.clear()
        self.control.close()


def _aligned(nbytes: int) -> int:
    return (nbytes + _ALIGNMENT - 1) & -_ALIGNMENT


def _cell(text: str, kind: int = _OPERATION, place: int = 0, epoch: int = 0) -> bytes:
    encoded = text.encode()
    return _CELL.pack(
        kind, epoch, place, blake2b(encoded, digest_size=8).digest(), encoded[: _CELL.size - 24]
    )


class _Peer:
    """Another rank, as this one knows it by what it has read of its eventfd and pidfd."""

    __slots__ = (
        "acknowledged",
        "arrivals",
        "cells",
        "died",
        "ended",
        "incoming",
        "messages",
        "outgoing",
        "pid",
        "pidfd",
        "rank",
        "reported",
        "ring",
        "sent",
        "slot_free",
        "taken",
        "their_ring",
    )

    def __init__(self, member: Member, own: int, control_bytes: int) -> None:
        self.rank = member.rank
        self.pid = member.pid
        self.pidfd = member.pidfd
        self.incoming = member.incoming
        self.outgoing = member.outgoing
        self.arrivals = 0  # the steps at which it has arrived
        self.messages = 0  # those that it has sent to this rank
        self.acknowledged = 0  # those of this rank that it has taken
        self.died = False
        self.ended = False
        self.sent = 0  # messages of this rank to it
        self.slot_free = 0  # how many of them it must have taken before `send` may write again
        self.taken = 0  # messages that this rank has taken from it
        self.reported = 0  # how many of them it has been sent an acknowledgement of
        start = member.rank * control_bytes
        self.cells = _step_cells(start)
        self.ring = own * control_bytes + _RINGS + member.rank * _RING * _CELL.size
        self.their_ring = start + _RINGS + own * _RING * _CELL.size

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"


def _step_cells(start: int) -> tuple[slice, slice]:
    return slice(start, start + _CELL.size), slice(start + _CELL.size, start + 2 * _CELL.size)


# Operations on fixed memory.


class _Collective(Collective):
    """An operation of all ranks: a step, this rank's share of the work, and in a large one a second step."""

    def __init__(
        self,
        group: "ShmGroup",
        signature: Signature,
        place: int,
        arrays: tuple[NDArray[Any], NDArray[Any]],
        work: Callable[[], None],
        *,
        is_large: bool,
    ) -> None:
        self.input, self.output = arrays
        self._group = group
        self._cell = _cell(str(signature), place=place)
        self._end = _cell(f"{signature} (second step)", place=place) if is_large else None
        self._work = work

    def run(self) -> None:
        self._group._meet(self._cell)
        self._work()
        if self._end is not None:
            self._group._meet(self._end)


class _Transfer(Collective):
    """One array from a rank to another, in memory that both map."""

    def __init__(
        self, group: "ShmGroup", signature: Signature, place: _Place, root: int, to: int
    ) -> None:
        self.input = self.output = group._memory.array(
            root, place, signature.shape, signature.dtype
        )
        self._group = group
        self._signature = str(signature)
        self._place = place.window + place.offset + 1
        self._is_source = group.rank == root
        self._peer = group._peer(to if self._is_source else root)
        self._epoch = -1

    def run(self) -> None:
        group = self._group
        if self._epoch != group._epoch:
            self._epoch = group._epoch
            self._cell = _cell(self._signature, place=self._place, epoch=self._epoch)
        if self._is_source:
            group._await_room(self._peer, self._signature, 0)
            group._post(self._peer, self._cell)
        else:
            group._take(self._peer, self._cell)


class ShmGroup(Group):
    """A group of ranks on one machine; see `join_sockets`."""

    def __init__(self, membership: Membership, timeout: float) -> None:
        # The membership is this object's from now on, even if this call fails.
        self.rank = membership.rank
        self.size = membership.size
        self.timeout = timeout
        self._cause: str | None = None  # why it is closed
        self._membership = membership
        try:
            self._memory = _Memory(membership.memory, self.size)
        except (OSError, ValueError):
            membership.close()
            raise
        stride = self._memory.control_bytes
        self._peers = [_Peer(other, self.rank, stride) for other in membership.others]
        self._outgoing = [peer.outgoing for peer in self._peers]
        self._incoming = {peer.incoming: peer for peer in self._peers}
        self._pidfds = {peer.pidfd: peer for peer in self._peers}
        self._poll = select.poll()
        for fd in (*self._incoming, *self._pidfds):
            self._poll.register(fd, select.POLLIN)
        self._cells = _step_cells(self.rank * stride)
        self._their_cells = [[peer.cells[parity] for peer in self._peers] for parity in (0, 1)]
        self._steps = 0
        self._epoch = 0  # the steps at which a rank failed: messages of an earlier one are void
        self._alarm = False  # a peer has died, or left the group
        self._prepared = _Area(0, _PREPARED)
        self._transfers = {
            (root, to): _Area(*_channel(to, self.size)) for root, to in self._own_channels()
        }
        self._kept: dict[tuple[Signature, int], _Collective] = {}

    # Operations on any arrays.

    def all_reduce(self, array: NDArray[Any], operation: Operation = "sum") -> NDArray[Any]:
        return self._run_once("all_reduce", array, operation=operation)

    def all_gather(self, array: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        return self._run_once("all_gather", array, axis=axis)

    def reduce_scatter(
        self, array: NDArray[Any], axis: int = 0, operation: Operation = "sum"
    ) -> NDArray[Any]:
        return self._run_once("reduce_scatter", array, axis=axis, operation=operation)

    def broadcast(self, array: NDArray[Any], root: int = 0) -> NDArray[Any]:
        return self._run_once("broadcast", array, root=root)

    def send(self, array: NDArray[Any], to: int) -> None:
        """Send to one rank, which calls `recv`. `array` may be written again after the return.

        One array waits in shared memory for the other rank; a second `send` waits until it was received.
        """
        self._check_open()
        signature = self._signature("send", array.shape, array.dtype, root=self.rank, to=to)
        peer = self._peer(to)
        self._await_room(peer, str(signature), peer.slot_free)
        np.copyto(self._slot(signature, to), array)
        self._post(peer, _cell(str(signature), epoch=self._epoch))
        peer.slot_free = peer.sent

    def recv(self, shape: Sequence[int], dtype: DTypeLike, source: int) -> NDArray[Any]:
        self._check_open()
        signature = self._signature("send", shape, dtype, root=source, to=self.rank)
        peer = self._peer(source)
        self._take(peer, _cell(str(signature), epoch=self._epoch))
        result = self._slot(signature, self.rank).copy()
        self._acknowledge(peer)
        return result

    def barrier(self) -> None:
        self._meet(_BARRIER)

    def fail(self, text: str, *, cancelled: bool = False) -> None:
        self._check_open()
        kind = _CANCELLED if cancelled else _FAILED
        self._write_text((self._steps + 1) & 1, shortened(text))
        self._arrive(_cell("fail", kind))
        self._begin_epoch()

    # Operations on fixed memory.

    def prepare_all_reduce(
        self, shape: Sequence[int], dtype: DTypeLike, operation: Operation = "sum"
    ) -> Collective:
        return self._prepare(self._signature("all_reduce", shape, dtype, operation=operation))

    def prepare_all_gather(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0
    ) -> Collective:
        return self._prepare(self._signature("all_gather", shape, dtype, axis=axis))

    def prepare_reduce_scatter(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0, operation: Operation = "sum"
    ) -> Collective:
        return self._prepare(
            self._signature("reduce_scatter", shape, dtype, axis=axis, operation=operation)
        )

    def prepare_broadcast(
        self, shape: Sequence[int], dtype: DTypeLike, root: int = 0
    ) -> Collective:
        return self._prepare(self._signature("broadcast", shape, dtype, root=root))

    def prepare_transfer(
        self, shape: Sequence[int], dtype: DTypeLike, source: int, to: int
    ) -> Collective:
        """`send` and `recv` between two ranks, without a copy; see `Group.prepare_transfer`.

        `run` in the source waits only if 64 earlier messages were not received.
        """
        self._check_open()
        signature = self._signature("transfer", shape, dtype, root=source, to=to)
        area = self._transfers.get((source, to))
        if area is None:
            raise InvalidInputError(
                f"source, to: got {source} and {to} in rank {self.rank}, which is neither"
            )
        return _Transfer(self, signature, area.take(signature.nbytes), source, to)

    # The group itself.

    def subgroup(self, ranks: Sequence[int]) -> "ShmGroup | None":
        members = [*map(int, ranks)]
        if not members or {*members} - {*range(self.size)} or len({*members}) != len(members):
            raise InvalidInputError(
                f"ranks: got {members}, expected different ranks below {self.size}"
            )
        self._meet(_cell(f"subgroup {members}"))
        star = self._membership.star
        try:
            membership = bootstrap(self.rank, self.size, star, self.timeout, members)
        except BaseException as exc:
            self._break(exc)
            raise
        return None if membership is None else ShmGroup(membership, self.timeout)

    def close(self) -> None:
        if self._cause is None:
            self._leave("", "", "this rank closed it")

    # Steps: meetings of all ranks.

    def _meet(self, cell: bytes) -> None:
        """Return when all ranks have come to this step with this cell."""
        self._arrive(cell)
        control = self._memory.control
        for place in self._their_cells[self._steps & 1]:
            if control[place] != cell:
                self._raise_difference()

    def _arrive(self, cell: bytes) -> None:
        """Come to the next step, and return when all ranks have, whatever they run there."""
        if self._cause is not None:
            self._check_open()
        step = self._steps = self._steps + 1
        try:
            self._memory.control[self._cells[step & 1]] = cell
            for fd in self._outgoing:
                os.eventfd_write(fd, _ARRIVAL)
            for peer in self._peers:
                if peer.arrivals < step:
                    self._await_step(step, cell)
                    break
        except BaseException as exc:
            self._break(exc)
            raise

    def _await_step(self, step: int, cell: bytes) -> None:
        deadline = time.monotonic() + self.timeout
        while late := [peer for peer in self._peers if peer.arrivals < step]:
            if self._alarm:
                self._raise_end(late)
            if not self._look(deadline):
                raise self._too_late(_text_of(cell), late)

    def _raise_difference(self) -> NoReturn:
        """Raise what the cells of this step say: a rank failed, or two run different operations."""
        parity = self._steps & 1
        control = self._memory.control
        cells = {peer.rank: control[peer.cells[parity]] for peer in self._peers}
        for peer in self._peers:
            kind = cells[peer.rank][0]
            if kind in _FAILURES:
                text = self._read_text(peer.rank, parity)
                self._begin_epoch()
                is_cancelled = kind == _CANCELLED
                verb = "was cancelled" if is_cancelled else "failed"
                raise PeerFailedError(f"{peer} {verb}: {text}", cancelled=is_cancelled)
        cells[self.rank] = control[self._cells[parity]]
        other = next(rank for rank in sorted(cells) if cells[rank] != cells[0])
        first, second = _text_of(cells[0]), _text_of(cells[other])
        cause = "run different operations" if first != second else "prepared operations differently"
        exc = InvalidInputError(f"ranks {cause}: rank 0: {first}; rank {other}: {second}")
        self._break(exc)
        raise exc

    def _begin_epoch(self) -> None:
        """Forget what ranks sent before the failure that all have seen."""
        self._epoch += 1
        for peer in self._peers:
            while peer.taken < peer.messages and self._message(peer)[1] < self._epoch:
                peer.taken += 1
            self._acknowledge(peer)

    # Messages between two ranks.

    def _post(self, peer: _Peer, cell: bytes) -> None:
        place = peer.ring + peer.sent % _RING * _CELL.size
        self._memory.control[place : place + _CELL.size] = cell
        peer.sent += 1
        os.eventfd_write(peer.outgoing, _MESSAGE)

    def _await_room(self, peer: _Peer, text: str, free: int) -> None:
        """Return once the peer has taken as many messages as `free`, and its ring has room for one more."""
        self._check_open()
        free = max(free, peer.sent - _RING + 1)
        try:
            self._look(0.0)  # a sender notices ends, too
            deadline = time.monotonic() + self.timeout
            self._check_peers(peer)
            while peer.acknowledged < free:
                if not self._look(deadline):
                    raise self._too_late(text, [peer])
                self._check_peers(peer)
        except PeerFailedError:
            raise
        except BaseException as exc:
            self._break(exc)
            raise

    def _take(self, peer: _Peer, cell: bytes) -> None:
        """Return when the peer's next message has come, if it has this cell."""
        if self._cause is not None:
            self._check_open()
        try:
            if peer.messages == peer.taken:
                deadline = time.monotonic() + self.timeout
                while peer.messages == peer.taken:
                    self._check_peers(peer)
                    if not self._look(deadline):
                        raise self._too_late(_text_of(cell), [peer])
            place = peer.their_ring + peer.taken % _RING * _CELL.size
            got = self._memory.control[place : place + _CELL.size]
            if got != cell:
                raise InvalidInputError(
                    f"ranks run different operations: rank {peer.rank}: {_text_of(got)}; "
                    f"rank {self.rank}: {_text_of(cell)}"
                )
        except PeerFailedError:
            raise
        except BaseException as exc:
            self._break(exc)
            raise
        peer.taken += 1
        if peer.taken - peer.reported >= _RING // 2:
            self._acknowledge(peer)

    def _message(self, peer: _Peer) -> tuple[Any, ...]:
        """The fields of the cell of the peer's next message."""
        place = peer.their_ring + peer.taken % _RING * _CELL.size
        return _CELL.unpack_from(self._memory.control, place)

    def _acknowledge(self, peer: _Peer) -> None:
        count = peer.taken - peer.reported
        if count:
            peer.reported = peer.taken
            os.eventfd_write(peer.outgoing, count * _ACKNOWLEDGEMENT)

    def _check_peers(self, peer: _Peer) -> None:
        """Raise if a message to or from the peer can no longer be: a rank is gone, or waits in `fail`."""
        if self._alarm:
            self._raise_end([peer])
        step = self._steps + 1
        for other in self._peers:
            if other.arrivals >= step:
                kind = self._memory.control[other.cells[step & 1].start]
                if kind in _FAILURES:
                    self._meet(_cell("send or recv"))

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
        news = os.eventfd_read(peer.incoming)
        peer.arrivals += news & _FIELD
        if news > _FIELD:
            peer.messages += news // _MESSAGE & _FIELD
            peer.acknowledged += news // _ACKNOWLEDGEMENT & _FIELD
            if news >= _END:
                peer.ended = self._alarm = True

    def _note_death(self, peer: _Peer) -> None:
        peer.died = self._alarm = True
        self._poll.unregister(peer.pidfd)
        try:
            self._note_news(peer)  # what it did last
        except BlockingIOError:
            return

    def _raise_end(self, late: Sequence[_Peer]) -> None:
        """Raise for a peer that died or ended the group; for one that only closed it, if it is late."""
        for peer in self._peers:
            if peer.died and not peer.ended:
                raise RankDiedError(f"{peer} {how_it_ended(peer.pid, peer.pidfd)}")
        for peer in self._peers:
            if peer.ended:
                name, text = self._read_end(peer)
                if name:
                    raise _ENDS.get(name, RankDiedError)(text)
        for peer in late:
            if peer.ended:
                raise RankDiedError(f"{peer} closed the group")

    def _too_late(self, text: str, late: Sequence[_Peer]) -> CollectiveTimeoutError:
        names = ", ".join(map(str, late))
        return CollectiveTimeoutError(
            f"{text}: {names} did not take part within {self.timeout:g} s"
        )

    # The end.

    def _check_open(self) -> None:
        if self._cause is not None:
            raise ClosedError(f"the group is closed: {self._cause}")

    def _break(self, exc: BaseException) -> None:
        """Close the group because of an error, which the others get too."""
        if self._cause is not None:
            return
        name, text = type(exc).__name__, str(exc)
        if name not in _ENDS:
            text = f"rank {self.rank} (pid {os.getpid()}) left the group: {name}: {exc}"
        self._leave(name, text, text)

    def _leave(self, name: str, text: str, cause: str) -> None:
        self._cause = cause
        self._write_text(_END_TEXT, f"{name}\n{shortened(text)}")
        for fd in self._outgoing:
            os.eventfd_write(fd, _END)
        self._kept.clear()
        self._memory.forget()
        self._membership.close()

    def _read_end(self, peer: _Peer) -> tuple[str, str]:
        """The name of the error and its text; both empty if the peer only closed the group."""
        name, _, rest = self._read_text(peer.rank, _END_TEXT).partition("\n")
        return name, rest

    def _write_text(self, number: int, text: str) -> None:
        start = self.rank * self._memory.control_bytes + _TEXTS + number * _TEXT_BYTES
        encoded = text.encode(errors="replace")[: _TEXT_BYTES - _TEXT.size]
        _TEXT.pack_into(self._memory.control, start, len(encoded))
        start += _TEXT.size
        self._memory.control[start : start + len(encoded)] = encoded

    def _read_text(self, rank: int, number: int) -> str:
        start = rank * self._memory.control_bytes + _TEXTS + number * _TEXT_BYTES
        (length,) = _TEXT.unpack_from(self._memory.control, start)
        start += _TEXT.size
        return self._memory.control[start : start + length].decode(errors="replace")

    # Making operations.

    def _signature(
        self, kind: str, shape: Sequence[int], dtype: DTypeLike, **rest: Any
    ) -> Signature:
        return Signature.of(kind, shape, dtype, self.size, **rest)

    def _peer(self, rank: int) -> _Peer:
        for peer in self._peers:
            if peer.rank == rank:
                return peer
        raise InvalidInputError(f"rank: got {rank}, expected another one of {self.size}")

    def _own_channels(self) -> list[tuple[int, int]]:
        ranks = [peer.rank for peer in self._peers]
        return [(self.rank, other) for other in ranks] + [(other, self.rank) for other in ranks]

    def _slot(self, signature: Signature, to: int) -> NDArray[Any]:
        """The memory of `send`, in the second half of the channel."""
        start, half = _channel(to, self.size)
        place = _staging(start + half, signature.nbytes)
        root = signature.root if signature.root is not None else self.rank
        return self._memory.array(root, place, signature.shape, signature.dtype)

    def _prepare(self, signature: Signature) -> _Collective:
        self._check_open()
        here = self._prepared.take(signature.nbytes)
        number = here.window + here.offset + 1
        return self._make(signature, here, self._prepared.take, number)

    def _run_once(
        self, kind: str, array: NDArray[Any], *, root: int | None = None, **rest: Any
    ) -> NDArray[Any]:
        self._check_open()
        signature = self._signature(kind, array.shape, array.dtype, root=root, **rest)
        # The staging memory of one step is written again two steps later, when all have read it.
        parity = (self._steps + 1) & 1
        collective = self._kept.get((signature, parity))
        if collective is None:
            if len(self._kept) == _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            here = _staging(_STAGING[parity], signature.nbytes)
            collective = self._make(signature, here, lambda nbytes: _staging(_RESULT, nbytes), 0)
            self._kept[signature, parity] = collective
        if root is None or root == self.rank:
            np.copyto(collective.input, array)
        collective.run()
        return collective.output.copy()

    def _make(
        self, signature: Signature, here: _Place, take: Callable[[int], _Place], number: int
    ) -> _Collective:
        """An operation whose parts lie at this place, and the result, if it is large, where `take` says."""
        shape, dtype = signature.shape, signature.dtype
        parts = [self._memory.array(rank, here, shape, dtype) for rank in range(self.size)]
        mine = parts[self.rank]
        nbytes = prod(signature.output_shape) * dtype.itemsize
        is_large = nbytes >= _LARGE_BYTES and signature.kind in ("all_reduce", "all_gather")
        output: NDArray[Any]
        if is_large:
            output = self._memory.array(0, take(nbytes), signature.output_shape, dtype)
        elif signature.root == self.rank:
            output = mine
        else:
            output = np.empty(signature.output_shape, dtype)
        work = self._work(signature, parts, output, is_large=is_large)
        return _Collective(self, signature, number, (mine, output), work, is_large=is_large)

    def _work(
        self,
        signature: Signature,
        parts: Sequence[NDArray[Any]],
        output: NDArray[Any],
        *,
        is_large: bool,
    ) -> Callable[[], None]:
        """What this rank does between the steps."""
        if signature.root is not None:
            source = parts[signature.root]
            return _copier([] if source is output else [(output, source)])
        if signature.kind == "all_gather":
            ranks = [self.rank] if is_large else range(self.size)
            copies = [(signature.part(output, rank), parts[rank]) for rank in ranks]
            return _copier(copies)
        operation = signature.operation or "sum"
        if signature.kind == "reduce_scatter":
            own = [signature.part(part, self.rank) for part in parts]
            return reduction(own, output, operation)
        if is_large:
            count = output.size
            share = slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)
            own = [part.reshape(-1)[share] for part in parts]
            return reduction(own, output.reshape(-1)[share], operation)
        return reduction(parts, output, operation)


_BARRIER = _cell("barrier")


def _copier(copies: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> Callable[[], None]:
    """A function that copies arrays to arrays."""

    def copy() -> None:
        for to, source in copies:
            np.copyto(to, source)

    return copy


def _channel(to: int, size: int) -> tuple[int, int]:
    """Where a rank's region has the channel to another rank: its start, and the length of each half."""
    half = (REGION - _CHANNELS) // size // 2 & -mmap.ALLOCATIONGRANULARITY
    return _CHANNELS + to * 2 * half, half


def _text_of(cell: bytes) -> str:
    """What a cell says, in words."""
    return bytes(_CELL.unpack(cell)[4]).rstrip(b"\0").decode(errors="replace")
