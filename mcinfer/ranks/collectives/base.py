"""The interface of a group of ranks, and of the collective operations between them.

::

    Group ── all_reduce, all_gather, … : one call, arrays copied in and out
      └───── prepare_all_reduce, … ──► Collective: fixed memory (MPI-4 calls it persistent), for many calls

All ranks of a group call the same operations in the same order, with the same shapes and dtypes. A rank that
died, an operation that differs or a time-out is an error in every rank, and closes the group.

A backend brings what moves the bytes. The checks of arguments, the comparison of what ranks run, and what
closes a group are the same for all, and are here.

Ownership: a `Collective` owns its two arrays, or the group does; they are valid until the group is closed,
also while views of them live.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Self, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcinfer.errors import (
    ClosedError,
    CollectiveTimeoutError,
    InvalidInputError,
    McinferError,
    PredictError,
    ProtocolError,
    RankDiedError,
)
from mcinfer.ranks.collectives.operations import Operation, Signature

DEFAULT_TIMEOUT = 300.0
"""Seconds that a rank waits for the others in one operation. A death is noticed at once, not only then."""

_MAX_KEPT = 64
"""One-shot operations whose memory is kept for the next call."""

_F = TypeVar("_F", bound=Callable[..., Any])


class PeerFailedError(PredictError):
    """Another rank broke the group off (`Group.break_off`)."""


ENDS: dict[str, type[McinferError]] = {
    kind.__name__: kind
    for kind in (
        RankDiedError,
        CollectiveTimeoutError,
        InvalidInputError,
        ProtocolError,
        PeerFailedError,
    )
}
"""Errors of one rank that the others get as such, by name."""


class Collective:
    """One operation on fixed memory, made once by a group's method and run many times.

    Attributes:
        input: This rank's part; written before `run`, and free to be written again when `run` has returned.
            C-contiguous.
        output: The result after `run`, unchanged until the next `run` of this object. C-contiguous. It may
            be the same memory as `input`, and may be shared by the ranks: do not write to it.
    """

    def __init__(self, arrays: tuple[NDArray[Any], NDArray[Any]], run: Callable[[], None]) -> None:
        self.input, self.output = arrays
        self._run = run

    def run(self) -> None:
        """Take part in the operation, and return when `output` has the result.

        Raises:
            RankDiedError: A rank died; names the rank, its pid, and how it ended.
            CollectiveTimeoutError: Ranks did not take part in time; names them.
            InvalidInputError: Ranks run different operations, shapes or dtypes; names two of them.
            PeerFailedError: A rank called `Group.break_off`.
            ClosedError: The group is closed.
        """
        self._run()


def end_error(text: str) -> McinferError | None:
    """The error that another rank left the group with, from what it said; None if it only closed it."""
    name, _, rest = text.partition("\n")
    return ENDS.get(name, RankDiedError)(rest) if name else None


def closing(method: _F) -> _F:
    """A method of a group after whose errors the group is closed."""

    @wraps(method)
    def closed_after_errors(group: "Group", /, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(group, *args, **kwargs)
        except BaseException as exc:
            found = group.translated(exc)
            group.close_for(found)
            if found is exc:
                raise
            raise found from exc

    return cast("_F", closed_after_errors)


class Group(ABC):
    """Ranks 0 to ``size - 1``, as one of them sees the group. One thread calls the methods.

    Every operation raises what `Collective.run` raises. After any of these errors the group is closed, in all
    ranks. Arrays are any; results are new arrays.

    Attributes:
        rank: This process's number.
        size: How many ranks there are.
        timeout: Seconds that one operation waits for the other ranks.
        cause: Why it is closed, by this rank or by an error; None if it is not.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.cause: str | None = None
        self._kept: dict[Signature, Collective] = {}

    # Operations on any arrays.

    def all_reduce(self, array: NDArray[Any], operation: Operation = "sum") -> NDArray[Any]:
        """Element by element, the sum, maximum or mean over all ranks, bit-identical in each."""
        return self._run_once("all_reduce", array, operation=operation)

    def all_gather(self, array: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        """The arrays of all ranks, joined along an axis in the order of the ranks."""
        return self._run_once("all_gather", array, axis=axis)

    def reduce_scatter(
        self, array: NDArray[Any], axis: int = 0, operation: Operation = "sum"
    ) -> NDArray[Any]:
        """This rank's part, along an axis that `size` divides, of what `all_reduce` gives."""
        return self._run_once("reduce_scatter", array, axis=axis, operation=operation)

    def broadcast(self, array: NDArray[Any], root: int = 0) -> NDArray[Any]:
        """The array of one rank; the others give any array of that shape and dtype."""
        return self._run_once("broadcast", array, root=root)

    @abstractmethod
    def send(self, array: NDArray[Any], to: int) -> None:
        """Send to one rank, which calls `recv`. `array` may be written again after the return."""

    @abstractmethod
    def recv(self, shape: Sequence[int], dtype: DTypeLike, source: int) -> NDArray[Any]:
        """Receive what one rank sends."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.meet("barrier")

    # Operations on fixed memory. All ranks make them in the same order.

    def prepare_all_reduce(
        self, shape: Sequence[int], dtype: DTypeLike, operation: Operation = "sum"
    ) -> Collective:
        """`all_reduce` of arrays of this shape and dtype."""
        return self._prepare(self._signature("all_reduce", shape, dtype, operation=operation))

    def prepare_all_gather(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0
    ) -> Collective:
        """`all_gather` of arrays that have this shape in every rank."""
        return self._prepare(self._signature("all_gather", shape, dtype, axis=axis))

    def prepare_reduce_scatter(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0, operation: Operation = "sum"
    ) -> Collective:
        """`reduce_scatter` of arrays of this shape and dtype."""
        how = {"axis": axis, "operation": operation}
        return self._prepare(self._signature("reduce_scatter", shape, dtype, **how))

    def prepare_broadcast(
        self, shape: Sequence[int], dtype: DTypeLike, root: int = 0
    ) -> Collective:
        """`broadcast`; only the root writes `input`."""
        return self._prepare(self._signature("broadcast", shape, dtype, root=root))

    def prepare_transfer(
        self, shape: Sequence[int], dtype: DTypeLike, source: int, to: int
    ) -> Collective:
        """`send` and `recv` between two ranks, which alone call this, in the same order as each other.

        `run` in the source returns at once; in the other rank it waits. The source writes `input` again only
        when it knows, by later operations, that the other rank does not read `output` any more.
        """
        signature = self._signature("transfer", shape, dtype, root=source, to=to)
        if self.rank not in (source, to):
            raise InvalidInputError(
                f"source, to: got {source} and {to} in rank {self.rank}, which is neither"
            )
        return self._prepare_transfer(signature, source, to)

    # The group itself.

    def subgroup(self, ranks: Sequence[int]) -> Self | None:
        """A group of some ranks, numbered anew in this order; None in a rank that is none of them.

        All ranks of this group call it, in the same order. An error closes both.
        """
        members = [*map(int, ranks)]
        if not members or {*members} - {*range(self.size)} or len({*members}) != len(members):
            raise InvalidInputError(
                f"ranks: got {members}, expected different ranks below {self.size}"
            )
        return self._subgroup(members)

    @abstractmethod
    def forget(self) -> None:
        """Use the memory of all operations that were prepared for others; all ranks call this at once.

        They must not be run any more, and their arrays change. A transfer that only its source has run is
        void.
        """

    @property
    def is_closed(self) -> bool:
        """Whether it is closed."""
        return self.cause is not None

    def close(self) -> None:
        """Leave the group: operations of others that wait for this rank end with `RankDiedError`."""
        if self.cause is None:
            self.leave("", "this rank closed it")

    def break_off(self, text: str) -> None:
        """This rank failed for good: `PeerFailedError` with this text in all ranks that wait, or will."""
        self.close_for(PeerFailedError(text))

    def close_for(self, exc: BaseException) -> None:
        """Close the group because of an error, which the others get too."""
        if self.cause is None:
            name, text = type(exc).__name__, str(exc)
            if name not in ENDS:
                text = f"rank {self.rank} (pid {os.getpid()}) left the group: {name}: {exc}"
            self.leave(f"{name}\n{text}", text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What a backend brings.

    @abstractmethod
    def meet(self, text: str) -> None:
        """Return when all ranks have come to this step with this text."""

    @abstractmethod
    def leave(self, text: str, cause: str) -> None:
        """Close the group because of a `cause`, and have the others get the text, for `end_error`."""

    @abstractmethod
    def _subgroup(self, members: Sequence[int]) -> Self | None:
        """`subgroup`, of members that were checked."""

    @abstractmethod
    def _prepare(self, signature: Signature) -> Collective:
        """An operation of all ranks on fixed memory."""

    @abstractmethod
    def _prepare_transfer(self, signature: Signature, root: int, to: int) -> Collective:
        """An operation of two ranks, of which this is one."""

    def _make_once(self, signature: Signature) -> Collective:
        """An operation of all ranks, for calls on any arrays."""
        return self._prepare(signature)

    def translated(self, exc: BaseException) -> BaseException:
        """An error of the backend's library as one of ours."""
        return exc

    # What backends share.

    def _run_once(self, kind: str, array: NDArray[Any], **rest: Any) -> NDArray[Any]:
        """Run an operation of all ranks on a copy of the array."""
        signature = self._signature(kind, array.shape, array.dtype, **rest)
        collective = self._kept.get(signature)
        if collective is None:
            if len(self._kept) == _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            collective = self._kept[signature] = self._make_once(signature)
        if signature.root in (None, self.rank):
            np.copyto(collective.input, array)
        collective.run()
        # A root's output may be its part, which others write over once they are at their next operation.
        result = array if signature.root == self.rank else collective.output
        return np.array(result, signature.dtype, order="C")

    def _signature(
        self, kind: str, shape: Sequence[int], dtype: DTypeLike, **rest: Any
    ) -> Signature:
        self._check_open()
        return Signature.of(kind, shape, dtype, self.size, **rest)

    def _check_open(self) -> None:
        if self.cause is not None:
            raise ClosedError(f"the group is closed: {self.cause}")

    def _too_late(self, text: str, late: Sequence[object]) -> CollectiveTimeoutError:
        names = ", ".join(map(str, late)) or "another rank"
        return CollectiveTimeoutError(
            f"{text}: {names} did not take part within {self.timeout:g} s"
        )
