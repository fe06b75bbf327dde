"""Who waits for a place in the queue, or for memory; the loop's thread owns it.

Callers wait in one line for places, and in one for each arena, first come, first served. They have a
time-out, after which they are refused. Where users keep the memory, others may pass the first that waits.

Idle frames keep memory for the next requests of their shapes: warm, but for shapes that may never come
again. So the memory of an arena is bounded by the most that was in use lately, and a margin.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence, Sized
from contextlib import suppress
from time import monotonic
from typing import Any

from mcinfer.errors import ClosedError, McinferError, PredictError, QueueFullError
from mcinfer.requests.frames import IdleFrames
from mcinfer.requests.request import Outcome, Promise, Request
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


class Admission:
    """Who waits for a place in the queue, or for memory; for the loop's thread alone.

    Args:
        scheduler: Whose queue it is.
        arena: The shared memory of tensors.
        frames: The memory of it that is not in use.

    Attributes:
        requests: The accepted requests, by number.
        places: The requests that wait for a place in the queue.
        due: When to look next, or earlier.
    """

    def __init__(self, scheduler: Scheduler, arena: Arena, frames: IdleFrames) -> None:
        self.scheduler = scheduler
        self.requests: dict[int, Request] = {}
        self.places: deque[Request] = deque()
        self.due = math.inf
        self._frames = frames
        self._next_number = 0
        self._places_due = math.inf  # when the time of one of them is over, or earlier
        self._memory = MemoryLine(arena, frames.release, self.requests)
        self._lines = {arena: self._memory}  # and one for each card
        self._idle = IdleMemory(arena)

    def look(self, now: float) -> None:
        """Do what is due, and note when the next thing is."""
        for line in self._lines.values():
            if line.waiting:
                line.serve(now)
        self._idle.note_growth(now)
        if self._idle.due <= now:
            # Give memory that was not in use for a while back to the system.
            table = self.scheduler.table
            self._idle.look(now, self._frames, table.in_flight_bytes, table.take_peak())
        if self._places_due <= now:
            self._refuse_late(now)
        self.due = min(self._idle.due, self._places_due)
        if any(line.waiting for line in self._lines.values()):
            self.due = min(self.due, monotonic() + ROOM_INTERVAL)

    # Places in the queue.

    def enter(self, request: Request) -> None:
        if request.settled:
            return
        if self.places and request is not self.places[0] and request.limited:
            self._wait_for_place(request)
            return
        number, now = self._next_number, monotonic()
        request.number = number
        self.requests[number] = request
        try:
            self.scheduler.handle_request(
                now,
                number,
                request.rows,
                request.timeout,
                called=request.called,
                size=request.size,
                priority=request.priority,
                join=request.join,
                preferred=request.preferred,
                limited=request.limited,
            )
        except McinferError as exc:
            del self.requests[number]
            is_full = isinstance(exc, QueueFullError)
            if is_full and request.waits and request.called + request.timeout > now:
                self._wait_for_place(request)
            else:
                refuse(request, exc)
            return
        self._next_number = number + 1
        if request.entered is not None:
            request.entered.settle()

    def _wait_for_place(self, request: Request) -> None:
        if not self.places or request is not self.places[0]:  # the first one is looked at again
            if not request.waits:
                refuse(request, QueueFullError("others wait already for room in the queue"))
                return
            self.places.append(request)
        self._places_due = min(self._places_due, request.called + request.timeout)
        self.due = min(self.due, self._places_due)

    def admit(self) -> None:
        """Give free places to callers that wait for one."""
        with suppress(QueueFullError):
            while self.places:
                request = self.places[0]
                if not request.settled:
                    self.scheduler.check_room(request.size)
                    self.enter(request)
                self.places.popleft()

    def cancel(self, outcome: Outcome[Any]) -> None:
        if outcome.settled or not isinstance(outcome, Request):
            return
        # By identity: the number of one that waits for a place is that of the next that gets one.
        if self.requests.get(outcome.number) is outcome:
            self.scheduler.handle_cancel(monotonic(), outcome.number)
            return
        if outcome in self.places:
            self.places.remove(outcome)
        refuse(outcome, ClosedError("the request was cancelled"), cancelled=True)

    def _refuse_late(self, now: float) -> None:
        """Refuse requests whose time is over while they wait for a place."""
        for request in [r for r in self.places if r.called + r.timeout <= now]:
            self.places.remove(request)
            try:
                self.scheduler.check_room(request.size)
                raise QueueFullError("the queue was full until the time was over")
            except QueueFullError as exc:
                refuse(request, exc)
        self._places_due = min((r.called + r.timeout for r in self.places), default=math.inf)

    def refuse_places(self, reason: str) -> None:
        while self.places:
            refuse(self.places.popleft(), ClosedError(reason))

    # Memory.

    def line(self, arena: Arena | None) -> "MemoryLine":
        """The line for an arena of `add_arena`, or for the shared memory."""
        return self._memory if arena is None else self._lines[arena]

    def add_arena(self, arena: Arena) -> None:
        """Callers may wait for this memory, too."""
        self._lines[arena] = MemoryLine(arena, lambda: False, self.requests)

    @property
    def arenas(self) -> list[Arena]:
        return [*self._lines]

    def block(self, number: int) -> SharedBlock | None:
        """A block of the master's, by its number."""
        found = (arena.block(number) for arena in self._lines)
        return next((block for block in found if block is not None), None)

    def allocate(self, wanted: Allocation) -> None:
        if not wanted.settled and wanted.line.take(wanted):
            self.due = min(self.due, monotonic() + ROOM_INTERVAL)
        self._idle.note_growth(monotonic())
        self.due = min(self.due, self._idle.due)

    def fail_all(self, error: McinferError) -> None:
        """A fault of mcinfer: fail all requests."""
        requests = [*self.requests.values()]
        self.requests.clear()
        for request in requests:
            if not request.settled:
                refuse(request, error)

    def refuse_all(self) -> None:
        """The master is closed: refuse all who still wait."""
        self.refuse_places("the master is closed")
        for line in self._lines.values():
            line.refuse()


def refuse(request: Request, error: McinferError, *, cancelled: bool = False) -> None:
    """Settle a request that was not accepted."""
    if not request.settled:
        request.settle(error, cancelled=cancelled)
    request.release()
    if request.entered is not None and not request.entered.settled:
        request.entered.settle(error)
