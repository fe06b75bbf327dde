"""Who waits for a place in the queue, or for memory; the loop's thread owns it.

Callers wait in one line for places, and in one for each arena, first come, first served. They have a
time-out, after which they are refused. Where users keep the memory, others may pass the first that waits.

Idle frames keep memory for the next requests of their shapes: warm, but for shapes that may never come
again. So the memory of an arena is bounded by the most that was in use lately, and a margin.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence, Sized
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, TypeVar

from mcinfer.errors import REFUSALS, ClosedError, McinferError, PredictError, QueueFullError
from mcinfer.requests.frames import IdleFrames
from mcinfer.requests.request import Outcome, Request
from mcinfer.scheduler.dispatch import Entry
from mcinfer.scheduler.scheduler import Scheduler
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


class Allocation(Outcome[list[Slot]]):
    """A caller that waits for memory; with a block, if it has made one because the arena needed it."""

    __slots__ = ("block", "called", "line", "sizes", "timeout")

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
        self.called = monotonic()
        self.timeout = timeout

    def value(self) -> list[Slot]:
        """The slots; they are the caller's alone: the loop may still hold this object."""
        slots = super().value()
        del self._value
        return slots


W = TypeVar("W", Request, Allocation)


class Line(ABC, Generic[W]):
    """Callers that wait for something, first come, first served; for the loop's thread alone.

    Attributes:
        waiting: The first one first.
        due: When the time of one of them is over, or earlier.
    """

    def __init__(self) -> None:
        self.waiting: deque[W] = deque()
        self.due = math.inf

    @abstractmethod
    def attempt(self, item: W, has_waited: bool = True) -> bool:
        """Serve or refuse one; False while it must wait. If it has not waited yet, it joins the line."""

    @abstractmethod
    def full(self, item: W) -> McinferError:
        """The error of one whose time was over before its turn."""

    def may_pass(self) -> bool:
        """Whether others may pass the first one."""
        return False

    def wait(self, item: W, has_waited: bool) -> bool:
        """Let one wait, unless its time is over."""
        end = item.called + item.timeout
        if end <= monotonic():
            return False
        if not has_waited:
            self.waiting.append(item)
            self.due = min(self.due, end)
        return True

    def serve(self) -> None:
        """Serve the first ones, and those that may pass them."""
        passed = 0
        while passed < len(self.waiting):
            if self.attempt(self.waiting[passed]):
                del self.waiting[passed]
            elif self.may_pass():
                passed += 1
            else:
                return

    def refuse_late(self, now: float) -> None:
        """Refuse those whose time is over."""
        if now < self.due:
            return
        for item in [w for w in self.waiting if w.called + w.timeout <= now]:
            self.waiting.remove(item)
            self.refuse(item, self.full(item))
        self.due = min((w.called + w.timeout for w in self.waiting), default=math.inf)

    def refuse(self, item: W, error: McinferError) -> None:
        refuse(item, error)

    def refuse_all(self, reason: str) -> None:
        while self.waiting:
            refuse(self.waiting.popleft(), ClosedError(reason))


class MemoryLine(Line[Allocation]):
    """The callers that wait for one arena's memory.

    Args:
        arena: Whose memory it is.
        release_idle: Frees what nothing uses at present; whether there was any.
        requests: The requests in flight, which will free memory.
    """

    def __init__(self, arena: Arena, release_idle: Callable[[], bool], requests: Sized) -> None:
        super().__init__()
        self.arena = arena
        self._release_idle = release_idle
        self._requests = requests
        self._last_release = 0.0

    def look(self, now: float) -> None:
        """Give those who wait the memory that was freed."""
        if self.arena.reclaim():
            self._last_release = now
        self.serve()
        self.refuse_late(now)
        self.arena.wanted = bool(self.waiting)

    def attempt(self, item: Allocation, has_waited: bool = True) -> bool:
        error: Exception
        block, item.block = item.block, None
        is_next = has_waited or block is not None or not self.waiting or self.may_pass()
        try:
            if block is not None:
                self.arena.add(block)
            if not is_next:
                raise self.full(item)
            try:
                slots = self.arena.allocate_all(item.sizes)
            except QueueFullError:
                if not self._release_idle():
                    raise
                slots = self.arena.allocate_all(item.sizes)
        except OSError as exc:
            error = PredictError(f"no shared memory can be had: {exc}")
        except (McinferError, BlockNeededError) as exc:
            error = exc.with_traceback(None)  # which would hold what holds the error
        else:
            if self.arena.crowded and self._release_idle():
                self.arena.reclaim()
            item.set(slots)
            return True
        if isinstance(error, QueueFullError) and self.wait(item, has_waited):
            self.arena.wanted = True
            return False
        item.settle(error)
        return True

    def full(self, item: Allocation) -> McinferError:
        return self.arena.full(sum(item.sizes))

    def may_pass(self) -> bool:
        """Whether users keep the memory that the first caller waits for."""
        quiet = monotonic() - max(self.waiting[0].called, self._last_release)
        return quiet > _PATIENCE or not self._requests


class Places(Line[Request]):
    """The requests that wait for a place in the queue.

    Attributes:
        refused: How many were refused here, by reason.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.refused = dict.fromkeys(REFUSALS, 0)
        self._scheduler = scheduler
        self._next_number = 0

    def attempt(self, item: Request, has_waited: bool = True) -> bool:
        if item.settled:
            return True
        number, now = self._next_number, monotonic()
        try:
            if self.waiting and item.limited and not has_waited:
                raise QueueFullError("others wait already for room in the queue")
            item.number = number
            about = (item.rows, item.size, item.called, now, item.timeout, item.may_be_wide)
            entry = Entry(number, *about, item.priority, item.join, item.limited, item)
            self._scheduler.handle_request(now, entry)
        except McinferError as exc:
            is_full = isinstance(exc, QueueFullError)
            if is_full and item.waits and self.wait(item, has_waited):
                return False
            self.refuse(item, exc)
            return True
        self._next_number = number + 1
        if item.entered is not None:
            item.entered.settle()
        return True

    def full(self, item: Request) -> McinferError:
        try:
            self._scheduler.check_room(item.size)
        except QueueFullError as exc:
            return exc
        return QueueFullError("the queue was full until the time was over")

    def refuse(self, item: Request, error: McinferError) -> None:
        # Before its caller has it, who would count it, too.
        reason, error.refusal = error.refusal, None
        if reason:
            self.refused[reason] += 1
        refuse(item, error)

    def cancel(self, outcome: Outcome[Any]) -> None:
        if outcome.settled or not isinstance(outcome, Request):
            return
        # By identity: the number of one that waits for a place is that of the next that gets one.
        entry = self._scheduler.table.entries.get(outcome.number)
        if entry is not None and entry.request is outcome:
            self._scheduler.handle_cancel(monotonic(), outcome.number)
            return
        if outcome in self.waiting:
            self.waiting.remove(outcome)
        refuse(outcome, ClosedError("the request was cancelled"), cancelled=True)

    def fail_all(self, error: McinferError) -> None:
        """A fault of mcinfer: fail all requests."""
        for entry in [*self._scheduler.table.entries.values()]:
            if not entry.request.settled:
                refuse(entry.request, error)


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

        The requests in flight have so many bytes, and had at most so many since the last look.
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


class Admission:
    """Who waits for a place in the queue, or for memory; for the loop's thread alone.

    Attributes:
        places: The requests.
        memory: The lines for memory.
        due: When to look next, or earlier, unless it is earlier for `places`.
    """

    def __init__(self, scheduler: Scheduler, arena: Arena, frames: IdleFrames) -> None:
        self.scheduler = scheduler
        self.places = Places(scheduler)
        self.due = math.inf
        self._frames = frames
        # By arena: None is the host's, the others are those of devices.
        self.memory: dict[Arena | None, MemoryLine] = {
            None: MemoryLine(arena, frames.release, scheduler.table.entries)
        }
        self._idle = IdleMemory(arena)

    def look(self, now: float) -> None:
        """Do what is due, and note when the next thing is."""
        for line in self.memory.values():
            if line.waiting:
                line.look(now)
        self._idle.note_growth(now)
        if self._idle.due <= now:
            # Give memory that was not in use for a while back to the system.
            table = self.scheduler.table
            self._idle.look(now, self._frames, table.in_flight_bytes, table.take_peak())
        self.places.refuse_late(now)
        self.due = math.inf
        self._note_due()

    def _note_due(self) -> None:
        # Never later than before: or who waits would wait while others come.
        self.due = min(self.due, self._idle.due)
        if any(line.waiting for line in self.memory.values()):
            self.due = min(self.due, monotonic() + ROOM_INTERVAL)

    def allocate(self, wanted: Allocation) -> None:
        if not wanted.settled:
            wanted.line.attempt(wanted, has_waited=False)
        self._idle.note_growth(monotonic())
        self._note_due()

    def add_arena(self, arena: Arena) -> None:
        """Callers may wait for this memory, too."""
        self.memory[arena] = MemoryLine(arena, lambda: False, self.scheduler.table.entries)

    @property
    def arenas(self) -> list[Arena]:
        return [line.arena for line in self.memory.values()]

    def block(self, number: int) -> SharedBlock | None:
        """A block of the master's, by its number."""
        found = (arena.block(number) for arena in self.arenas)
        return next((block for block in found if block is not None), None)

    def refuse_all(self) -> None:
        """The master is closed: refuse all who still wait."""
        lines: list[Line[Any]] = [self.places, *self.memory.values()]
        for line in lines:
            line.refuse_all("the master is closed")


def refuse(outcome: Request | Allocation, error: McinferError, *, cancelled: bool = False) -> None:
    """Settle what was not accepted, or not served."""
    if not outcome.settled:
        # Without its traceback, which would hold the outcome.
        outcome.settle(error.with_traceback(None), cancelled=cancelled)
    if isinstance(outcome, Request):
        outcome.release()
        if outcome.entered is not None and not outcome.entered.settled:
            outcome.entered.settle(error)
