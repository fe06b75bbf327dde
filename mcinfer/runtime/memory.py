"""Who gets memory next, and which memory goes back to the system; the loop's thread owns both.

Callers wait in one line for each arena, first come, first served. A caller makes an `Allocation`, puts it
into the loop's inbox and waits for it there.

Idle frames keep memory for the next requests of their shapes: warm, but for shapes that may never come
again. So the memory of an arena is bounded by the most that was in use lately, and a margin.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence, Sized
from contextlib import suppress
from time import monotonic

from mcinfer.errors import ClosedError, McinferError, PredictError, QueueFullError
from mcinfer.requests.frames import IdleFrames
from mcinfer.requests.request import Promise
from mcinfer.shm.arena import Arena, BlockNeededError, SharedBlock, Slot

ROOM_INTERVAL = 0.001
"""Seconds between two checks for freed memory, while a caller waits for it."""

_PATIENCE = 10.0  # seconds without freed memory before others pass the first waiting caller


SPARE_BYTES = 96 << 20
"""Bytes of an arena beyond those in use that are kept without a time limit: a block of the least size, and
what blocks are rounded up by."""

_LOOK_INTERVAL = 1.0  # seconds between two looks while there is idle memory to give back
_REST_INTERVAL = 30.0  # and while users hold all of it, whose end sends no event
_PERIOD = 15.0
"""What was in use counts for one to two periods of so many seconds."""


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


class IdleMemory:
    """Gives memory that is not in use back to the system: for the loop's thread, which calls it now and then.

    A frame that was in use since the last look stays, so a program that goes on as before pays nothing.

    Attributes:
        due: When to look next; infinite while there is nothing that could be given back.
    """

    def __init__(self, arena: Arena) -> None:
        self.due = math.inf
        self._arena = arena
        self._most = [0, 0]  # bytes in use, in this period and in the one before
        self._period_end = 0.0

    def note_growth(self, now: float) -> None:
        """The arena may have more blocks than before."""
        if self.due == math.inf and self._arena.size > SPARE_BYTES:
            self.due = now + _LOOK_INTERVAL

    def look(self, now: float, frames: IdleFrames, in_flight: int, most_in_flight: int) -> None:
        """Give back what was not in use for a while.

        Args:
            now: The time.
            frames: The idle frames.
            in_flight: Bytes of the requests in flight.
            most_in_flight: The most that these had since the last look.
        """
        arena = self._arena
        idle_bytes = frames.bytes
        in_use = arena.used - idle_bytes
        if now >= self._period_end:
            self._most = [0, self._most[0] if now < self._period_end + _PERIOD else 0]
            self._period_end = now + _PERIOD
        self._most[0] = max(self._most[0], in_use, in_use - in_flight + most_in_flight)
        most = max(self._most) + SPARE_BYTES
        arena.trim(most)
        unused = frames.unused(now) if arena.size > most else []
        while unused and arena.size > most:
            idle, ticket = unused.pop()
            with suppress(ValueError):  # it is in use again
                idle.remove(ticket)
            del ticket
            arena.trim(most)
        size = arena.size
        if size <= SPARE_BYTES:
            self.due = math.inf
            return
        is_idle = size > in_use + SPARE_BYTES and (size <= most or idle_bytes > 0)
        self.due = now + (_LOOK_INTERVAL if is_idle or in_flight else _REST_INTERVAL)
