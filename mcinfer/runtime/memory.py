"""Who gets memory next: callers wait in one line for each arena, first come, first served.

The loop's thread owns the arenas and their lines. A caller makes an `Allocation`, puts it into the loop's
inbox and waits for it there.
"""

from collections import deque
from collections.abc import Callable, Sequence, Sized
from time import monotonic

from mcinfer.errors import ClosedError, McinferError, PredictError, QueueFullError
from mcinfer.requests.request import Promise
from mcinfer.shm.arena import Arena, BlockNeededError, SharedBlock, Slot

ROOM_INTERVAL = 0.001
"""Seconds between two checks for freed memory, while a caller waits for it."""

_PATIENCE = 10.0  # seconds without freed memory before others pass the first waiting caller


class Allocation(Promise[list[Slot]]):
    """A caller that waits for memory; with a block, if it has made one because the arena needed it."""

    __slots__ = ("block", "deadline", "line", "since", "sizes")

    def __init__(
        self,
        line: "MemoryLine",
        sizes: Sequence[int],
        timeout: float,
        block: SharedBlock | None = None,
    ) -> None:
        super().__init__()
        self.line = line
        self.block = block
        self.sizes = sizes
        self.since = monotonic()
        self.deadline = self.since + timeout

    def value(self) -> list[Slot]:
        """The slots; they are the caller's alone: the loop may still hold this object."""
        slots = super().value()
        del self._value
        return slots


class MemoryLine:
    """The callers that wait for one arena's memory; for the loop's thread alone.

    Args:
        arena: Whose memory it is.
        release_idle: Frees what nothing uses at present; whether there was any.
        requests: The requests in flight, which will free memory.
    """

    def __init__(self, arena: Arena, release_idle: Callable[[], bool], requests: Sized) -> None:
        self.arena = arena
        self._release_idle = release_idle
        self._requests = requests
        self._line: deque[Allocation] = deque()
        self._last_release = 0.0

    @property
    def waiting(self) -> bool:
        """Whether a caller waits."""
        return bool(self._line)

    def take(self, wanted: Allocation) -> bool:
        """Settle it with slots or an error, or let it wait; whether it waits."""
        if wanted.block is not None or not self._line or self._may_pass():
            error = self._try(wanted)
            if error is None:
                return False
            if not isinstance(error, QueueFullError) or wanted.deadline <= monotonic():
                wanted.settle(error)
                return False
        self._line.append(wanted)
        self.arena.wanted = True
        return True

    def serve(self, now: float) -> None:
        """Give those who wait the memory that was freed."""
        if self.arena.reclaim():
            self._last_release = now
        passed: deque[Allocation] = deque()
        while self._line:
            wanted = self._line[0]
            error = self._try(wanted)
            if error is not None and wanted.deadline <= now:
                wanted.settle(error)
            elif isinstance(error, QueueFullError):
                may_pass = self._may_pass()
                passed.append(self._line.popleft())
                if may_pass:
                    continue
                break
            elif error is not None:
                wanted.settle(error)
            self._line.popleft()
        self._line.extendleft(reversed(passed))
        for wanted in [w for w in self._line if w.deadline <= now]:
            self._line.remove(wanted)
            wanted.settle(self.arena.full(sum(wanted.sizes)))
        self.arena.wanted = bool(self._line)

    def refuse(self) -> None:
        """Refuse all who still wait: the master is closed."""
        while self._line:
            self._line.popleft().settle(ClosedError("the master is closed"))

    def _try(self, wanted: Allocation) -> Exception | None:
        """Settle it if there is memory; else return the reason."""
        try:
            block, wanted.block = wanted.block, None
            if block is not None:
                self.arena.add(block)
            try:
                slots = self.arena.allocate_all(wanted.sizes)
            except QueueFullError:
                if not self._release_idle():
                    raise
                slots = self.arena.allocate_all(wanted.sizes)
        except OSError as exc:
            return PredictError(f"no shared memory can be had: {exc}")
        except (McinferError, BlockNeededError) as exc:
            return exc.with_traceback(None)  # which would hold what holds the error
        if self.arena.crowded and self._release_idle():
            self.arena.reclaim()
        wanted.set(slots)
        return None

    def _may_pass(self) -> bool:
        """Whether others may pass the first caller that waits, because users keep that memory."""
        quiet = monotonic() - max(self._line[0].since, self._last_release)
        return quiet > _PATIENCE or not self._requests
