"""Plans of requests, the memory that waits on them, and the right to use it.

::

    Plan ── a side for the inputs, one for the outputs ──► Side.idle: frames that are not in use
    a request ── Lease ──► Frame: a slot, its references, encoded, and views of it
    the last reference to a lease goes ──► Ticket ──► back to Side.idle

Ownership: the holders of a `Lease` (a request, and NumPy arrays over the memory) own its frame. Idle frames
belong to their side; `IdleFrames` finds them all where room must be made.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from mcinfer.protocol import TensorRef, encode_references
from mcinfer.requests.tensors import Layout
from mcinfer.sharding import Cut
from mcinfer.shm.arena import Slot
from mcinfer.specs import ModelSpec

Views = tuple[tuple[str, tuple[int, ...], np.dtype[Any], int], ...]
"""Name, shape, type and start of arrays in one piece of memory."""

_SMALL_BYTES = 1 << 16
"""Up to here a copy takes less than to get the interpreter's lock back, which NumPy's gives away."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Frame:
    """Memory for the inputs, or the outputs, of one request of a plan.

    Attributes:
        blocks: The number of the slot's block.
        bodies: By shard, the references to it as PREDICT carries them.
        references: By shard, the same references, not encoded.
        views: Arrays to copy inputs into, if each input is one array.
        raw: By view, its bytes, if it is small and the type one of Python's buffers; else None.
        interface: The memory as NumPy's array interface describes it.
    """

    slot: Slot
    blocks: frozenset[int]
    bodies: tuple[bytes, ...]
    references: tuple[tuple[TensorRef, ...], ...]
    views: tuple[NDArray[Any], ...]
    raw: tuple[memoryview | None, ...]
    interface: dict[str, Any]


class Ticket(ref["Lease"]):
    """Notices the end of a lease, and knows the frame.

    `idle_since` is set when it is first seen among idle ones: each lease has a new ticket.
    """

    __slots__ = ("frame", "idle_since")

    frame: Frame
    idle_since: float


class Lease:
    """The right to a frame's memory: when the last reference is gone, the frame goes back.

    NumPy arrays over its array interface hold it, and so do all views of them. The end of a lease runs no
    Python code, so no signal's handler can interrupt it.

    Attributes:
        frame: Of a worker's own block: the lease alone holds it.
    """

    __slots__ = ("__array_interface__", "__weakref__", "frame", "ticket")

    __array_interface__: dict[str, Any]
    frame: Frame
    ticket: Ticket


def make_frame(
    slot: Slot,
    references: tuple[tuple[TensorRef, ...], ...] = (),
    views: tuple[NDArray[Any], ...] = (),
) -> Frame:
    interface = {
        "version": 3,
        "typestr": "|u1",
        "shape": (slot.size,),
        "data": (slot.address, False),
    }
    bodies = tuple(map(encode_references, references))
    raw = tuple(map(_raw, views))
    return Frame(slot, frozenset((slot.block,)), bodies, references, views, raw, interface)


def _raw(view: NDArray[Any]) -> memoryview | None:
    is_small = 0 < view.nbytes <= _SMALL_BYTES and view.dtype.isbuiltin == 1
    return view.data.cast("B") if is_small else None


def is_leased(array: Any) -> bool:
    """Whether an array is a view of a frame (NumPy makes views of views those of one array), or on a card."""
    base = array.base
    in_frame = isinstance(base, np.ndarray) and isinstance(base.base, Lease)
    return in_frame or type(array) is not np.ndarray


@dataclass(slots=True, eq=False)
class Side:
    """The inputs, or the outputs, of a plan.

    Attributes:
        layouts: Each tensor's; None for strings, and for outputs whose shape is not known before the run.
        starts: Bytes from the start of the frame to each tensor in it.
        size: Bytes of the frame.
        is_laid: Whether some tensor lies in the frame.
        is_simple: Whether each tensor is one array in the frame.
        idle: Frames that are not in use.
    """

    layouts: tuple[Layout | None, ...]
    starts: tuple[int, ...]
    size: int
    is_laid: bool
    is_simple: bool
    idle: "deque[Ticket]"


@dataclass(slots=True, eq=False)
class ShapePlan:
    """What follows from the shapes of a request; the same for all requests that have them.

    Attributes:
        cut: Rows of each shard, and how inputs and outputs are cut and joined.
        size: Bytes of all tensors of known shapes.
        apart: Why its requests cannot join one run with others; empty if they can.
        alike: What requests that may join one run have in common of their shapes: all sizes but the batch's.
    """

    cut: Cut
    size: int
    apart: str
    alike: tuple[object, ...]


@dataclass(slots=True, eq=False)
class Plan(ShapePlan):
    """That, and where the tensors lie.

    Attributes:
        model: Whose requests they are.
        opened: Outputs that had another shape than the model declares, of all its plans: they are not laid
            out before the run.
        cost: Estimated bytes of this process's memory for it and its idle frames.
        lays_all: Whether all outputs lie in their frame.
        simple_outputs: The outputs, if each is one array in its frame.
        answers: By what replies said, the number of the worker's own block with all outputs, and these there;
            None if its requests' values are never just views.
    """

    model: ModelSpec
    opened: set[str]
    shapes: tuple[tuple[int, ...], ...]
    inputs: Side
    outputs: Side
    cost: int
    lays_all: bool
    simple_outputs: Views | None
    answers: dict[tuple[TensorRef, ...], tuple[int, Views]] | None


class IdleFrames:
    """Frames that are not in use, of all plans for one arena, also of plans that are forgotten.

    Any thread may call it: each access is one step of the interpreter.
    """

    def __init__(self) -> None:
        self._sides: list[ref[deque[Ticket]]] = []

    def add(self, idle: "deque[Ticket]") -> None:
        """Register where frames of a new plan wait; it lives as long as a frame that may come back to it."""
        self._sides.append(ref(idle, self._sides.remove))

    def _all(self) -> "list[deque[Ticket]]":
        return [idle for found in [*self._sides] if (idle := found()) is not None]

    @property
    def bytes(self) -> int:
        """Bytes of shared memory in them."""
        return sum(t.frame.slot.size for idle in self._all() for t in idle.copy())

    def release(self) -> bool:
        """Free them: memory is short. Whether there were any."""
        had_any = self.bytes > 0
        for idle in self._all():
            idle.clear()
        return had_any

    def unused(self, now: float) -> "list[tuple[deque[Ticket], Ticket]]":
        """Those that have been idle since an earlier call: where each is, the longest idle last."""
        found = []
        for idle in self._all():
            for ticket in idle.copy():
                if hasattr(ticket, "idle_since"):
                    found.append((idle, ticket))
                else:
                    ticket.idle_since = now
        return sorted(found, key=lambda item: item[1].idle_since, reverse=True)
