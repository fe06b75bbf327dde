"""The interface of a group of ranks, and of the collective operations between them.

::

    Group ── all_reduce, all_gather, … : one call, arrays copied in and out
      └───── prepare_all_reduce, … ──► Collective: fixed memory (MPI-4 calls it persistent), for many calls

All ranks of a group call the same operations in the same order, with the same shapes and dtypes. A rank that
died, an operation that differs or a time-out is an error in every rank, and closes the group.

Ownership: a `Collective` owns its two arrays, or the group does; they are valid until the group is closed,
also while views of them live.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Self

from numpy.typing import DTypeLike, NDArray

from mcinfer.errors import PredictError

Operation = Literal["sum", "max", "mean"]

DEFAULT_TIMEOUT = 300.0
"""Seconds that a rank waits for the others in one operation. A death is noticed at once, not only then."""


class PeerFailedError(PredictError):
    """A rank called `Group.fail` in the place of an operation; the group stays usable.

    Attributes:
        cancelled: Whether that run was cancelled, and did not fail.
    """

    def __init__(self, text: str, *, cancelled: bool = False) -> None:
        super().__init__(text)
        self.cancelled = cancelled


class Collective(ABC):
    """One operation on fixed memory, made once and run many times.

    Attributes:
        input: This rank's part; written before `run`, and free to be written again when `run` has returned.
            C-contiguous.
        output: The result after `run`, unchanged until the next `run` of this object. C-contiguous. It may
            be the same memory as `input`, and may be shared by the ranks: do not write to it.
    """

    input: NDArray[Any]
    output: NDArray[Any]

    @abstractmethod
    def run(self) -> None:
        """Take part in the operation, and return when `output` has the result.

        Raises:
            RankDiedError: A rank died; names the rank, its pid, and how it ended.
            CollectiveTimeoutError: Ranks did not take part in time; names them.
            InvalidInputError: Ranks run different operations, shapes or dtypes; names two of them.
            PeerFailedError: A rank called `Group.fail`.
            ClosedError: The group is closed.
        """


class Group(ABC):
    """Ranks 0 to ``size - 1``, as one of them sees the group. One thread calls the methods.

    Every operation raises what `Collective.run` raises. After any of these errors but `PeerFailedError` the
    group is closed.

    Attributes:
        rank: This process's number.
        size: How many ranks there are.
        timeout: Seconds that one operation waits for the other ranks.
    """

    rank: int
    size: int
    timeout: float = DEFAULT_TIMEOUT

    # Operations on any arrays.

    @abstractmethod
    def all_reduce(self, array: NDArray[Any], operation: Operation = "sum") -> NDArray[Any]:
        """Element by element, the sum, maximum or mean over all ranks, bit-identical in each. A new array."""

    @abstractmethod
    def all_gather(self, array: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        """The arrays of all ranks, joined along an axis in the order of the ranks. A new array."""

    @abstractmethod
    def reduce_scatter(
        self, array: NDArray[Any], axis: int = 0, operation: Operation = "sum"
    ) -> NDArray[Any]:
        """This rank's part, along an axis that `size` divides, of what `all_reduce` gives. A new array."""

    @abstractmethod
    def broadcast(self, array: NDArray[Any], root: int = 0) -> NDArray[Any]:
        """The array of one rank; the others give any array of that shape and dtype. A new array."""

    @abstractmethod
    def send(self, array: NDArray[Any], to: int) -> None:
        """Send to one rank, which calls `recv`. `array` may be written again after the return."""

    @abstractmethod
    def recv(self, shape: Sequence[int], dtype: DTypeLike, source: int) -> NDArray[Any]:
        """Receive what one rank sends. A new array."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called it."""

    @abstractmethod
    def fail(self, text: str, *, cancelled: bool = False) -> None:
        """Take part in the next operation, whatever it is, with a failure: it raises in all other ranks.

        The text names this rank. Returns when all ranks have arrived; the group stays usable.
        """

    # Operations on fixed memory. All ranks make them in the same order.

    @abstractmethod
    def prepare_all_reduce(
        self, shape: Sequence[int], dtype: DTypeLike, operation: Operation = "sum"
    ) -> Collective:
        """`all_reduce` of arrays of this shape and dtype."""

    @abstractmethod
    def prepare_all_gather(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0
    ) -> Collective:
        """`all_gather` of arrays that have this shape in every rank."""

    @abstractmethod
    def prepare_reduce_scatter(
        self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0, operation: Operation = "sum"
    ) -> Collective:
        """`reduce_scatter` of arrays of this shape and dtype."""

    @abstractmethod
    def prepare_broadcast(
        self, shape: Sequence[int], dtype: DTypeLike, root: int = 0
    ) -> Collective:
        """`broadcast`; only the root writes `input`."""

    @abstractmethod
    def prepare_transfer(
        self, shape: Sequence[int], dtype: DTypeLike, source: int, to: int
    ) -> Collective:
        """`send` and `recv` between two ranks, which alone call this, in the same order as each other.

        `run` in the source returns at once; in the other rank it waits. The source writes `input` again only
        when it knows, by later operations, that the other rank does not read `output` any more.
        """

    # The group itself.

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> "Group | None":
        """A group of some ranks, numbered anew in this order; None in a rank that is none of them.

        All ranks of this group call it, in the same order. Errors of one do not close the other, but a dead
        rank ends every group that it is in.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group: operations of others that wait for this rank end with `RankDiedError`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
