"""The open requests, and which worker gets which of their shards next. Pure, for the scheduler.

* A request that comes while nothing waits is given to workers at once, as far as they have room. The queue
  has the shards that must wait.
* Idle workers come first, always in the same order, so that their pages stay warm; then those that are likely
  to be free first.
* A worker with short runs gets more runs ahead, which wait there. None is put behind a run that its worker
  may be killed for, or that has gone on for longer than is usual there.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from mcinfer.config import Limits
from mcinfer.errors import McinferError, QueueFullError
from mcinfer.protocol import MAX_RUNS, WorkerState
from mcinfer.scheduler.joining import Joining
from mcinfer.scheduler.queue import ShardId, ShardQueue
from mcinfer.scheduler.workers import PoolRules, Run, Stop, Worker
from mcinfer.statistics import LATENCY_BOUNDS, ROW_BOUNDS, Histogram, RequestTrace, ShardTrace

SHORT_RUN = 0.01  # seconds: workers with runs up to this get runs ahead
AHEAD_SECONDS = 0.003  # seconds that the runs ahead of a worker may take, unless it is one run
WIDE_RUN = 0.0003  # seconds that a run takes on its worker's own cores, from which on others help
MAX_WIDE_DEATHS = 2  # processes in a row that may die in a wide run, before a worker has none
APART_RUNS = 20  # runs' time that no two requests may have met for, before one has the whole CPU
UNBOUNDED_RUN = 600.0  # seconds for a cancelled run without a deadline

_FORGETTING = 0.9  # factor, for each run, of an earlier longer run's duration

Ending = Literal["succeeded", "failed", "cancelled"]
"""How a request was settled."""

_TRACED = tuple(item.name for item in fields(ShardTrace))


class Tally:
    """Counts values for a `Histogram` with these upper bounds, ascending."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Histogram:
        return Histogram(bounds=self._bounds, counts=tuple(self._counts), total=self._total)


@dataclass(slots=True)
class Entry:
    """One request.

    Attributes:
        number: No other has it.
        rows: Rows of each shard.
        size: Bytes of its tensors.
        called: When its caller came.
        queued: When it came here.
        timeout: Seconds from `called` to `deadline`.
        may_be_wide: Whether its one shard may have the whole CPU if it is alone.
        priority: Higher ones go first.
        join: For one shard that may go in one run with others of the same key: the key, and its rows.
        limited: Whether there must be room for it (`check_room`), and the pool may not be draining; not for a
            part of a request that was accepted.
        request: What the sink knows it by.
        attempts: By shard, how often a worker got it.
        unanswered: How many shards have no reply yet.
        deaths: By shard, how each worker ended that died on it, or may have; in words.
        closed: When it was settled.
        ending: How it was settled; None before.
        begun: Whether a worker got any shard of it.
        outstanding: How many shards workers have: they may be writing to the request's memory.
        runs: The fields of a `ShardTrace` for each answered shard, if requests are traced.
    """

    number: int
    rows: tuple[int, ...]
    size: int
    called: float
    queued: float
    timeout: float
    may_be_wide: bool = False
    priority: int = 0
    join: tuple[Hashable, int] | None = None
    limited: bool = True
    request: Any = None
    deadline: float = field(init=False)
    attempts: list[int] = field(init=False)
    unanswered: int = field(init=False)
    deaths: dict[int, list[str]] = field(default_factory=dict)
    closed: float = 0.0
    ending: Ending | None = None
    begun: bool = False
    outstanding: int = 0
    runs: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.deadline = self.called + self.timeout
        self.unanswered = len(self.rows)
        self.attempts = [0] * self.unanswered

    def end(self, now: float) -> float:
        """Until when a run of it may go on once it is settled: as long as the caller gave it."""
        return self.deadline if self.deadline < math.inf else now + UNBOUNDED_RUN


class RequestTable:
    """All requests that are open, or whose memory a worker may still use.

    Attributes:
        accepted: Requests so far: always the sum of the four counts after it.
        not_begun: Open requests of which no worker has got a shard yet.
        latency: Seconds from a call to its answer, for results.
    """

    def __init__(self) -> None:
        self.accepted = 0
        self.succeeded = 0
        self.failed = 0
        self.cancelled = 0
        self.in_flight = 0
        self.in_flight_bytes = 0
        self._most_bytes = 0
        self.not_begun = 0
        self.latency = Tally(LATENCY_BOUNDS)
        self.entries: dict[int, Entry] = {}
        self._deadlines: list[tuple[float, int]] = []

    def open(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.ending is None]

    def find_open(self, number: int) -> Entry | None:
        entry = self.entries.get(number)
        return entry if entry is not None and entry.ending is None else None

    # Accepting.

    def accept(self, entry: Entry) -> None:
        """Enter a request; its shards are not queued yet."""
        self.entries[entry.number] = entry
        self.accepted += 1
        self.in_flight += 1
        self.in_flight_bytes = taken = self.in_flight_bytes + entry.size
        if taken > self._most_bytes:
            self._most_bytes = taken
        self.not_begun += 1
        if len(self._deadlines) > 2 * self.in_flight + 64:
            # The answered ones must not outnumber the open ones: a long time-out keeps them for long.
            self._deadlines = [item for item in self._deadlines if self.find_open(item[1])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (entry.deadline, entry.number))

    def check_room(self, limits: Limits, size: int) -> None:
        """Raise `QueueFullError` unless a request with so many bytes of tensors can be accepted now."""
        if self.in_flight >= limits.queue:
            raise QueueFullError(
                f"{self.in_flight} requests are queued or running, the limit (Limits.queue) is "
                f"{limits.queue}"
            )
        taken, most_bytes = self.in_flight_bytes, limits.queue_bytes
        if most_bytes is not None and taken and taken + size > most_bytes:
            raise QueueFullError(
                f"requests with {taken} bytes of tensors are queued or running, and this one has {size}: "
                f"the limit (Limits.queue_bytes) is {most_bytes}"
            )

    def take_peak(self) -> int:
        """The most that `in_flight_bytes` was since the last call."""
        peak, self._most_bytes = self._most_bytes, self.in_flight_bytes
        return peak

    # Deadlines.

    def next_deadline(self) -> float:
        while self._deadlines and not self.find_open(self._deadlines[0][1]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def overdue(self, now: float) -> Iterator[Entry]:
        """The open requests whose deadline has passed, each once."""
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = self.find_open(heapq.heappop(self._deadlines)[1])
            if entry is not None:
                yield entry

    # Endings.

    def is_over(self, run: Run) -> bool:
        """Whether no request needs this run any more."""
        return all(self.entries[request].ending is not None for request, _ in run.members)

    def close(self, entry: Entry, ending: Ending, now: float) -> None:
        """Settle a request."""
        entry.ending = ending
        entry.closed = now
        self.in_flight -= 1
        self.in_flight_bytes -= entry.size
        self.not_begun -= not entry.begun
        match ending:
            case "succeeded":
                self.succeeded += 1
                self.latency.add(now - entry.called)
            case "failed":
                self.failed += 1
            case "cancelled":
                self.cancelled += 1

    def counts(self) -> dict[str, Any]:
        """Fields of `mcinfer.statistics.Statistics`."""
        return {
            "accepted": self.accepted,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "cancelled": self.cancelled,
            "in_flight": self.in_flight,
            "in_flight_bytes": self.in_flight_bytes,
            "queued": self.not_begun,
            "latency": self.latency.snapshot(),
        }

    def give_up(self) -> None:
        self.entries.clear()
        self.failed += self.in_flight
        self.in_flight = self.in_flight_bytes = self.not_begun = 0


class RequestSink(Protocol):
    """What the scheduler orders about requests; see the rules of orders in `scheduler.py`."""

    def send_run(self, worker: int, run: Run, /) -> None:
        """Send the worker a run; the first of its members stands for it in messages."""

    def settle(self, entry: Entry, error: McinferError | None, /) -> None:
        """Answer the request with the outputs of its shards, or with an error; see `Entry.ending`."""

    def release(self, entry: Entry, /) -> None:
        """Free the memory of the request, which has left the table: no worker can write to it any more."""


class Dispatch:
    """Gives the shards of a table's requests to workers.

    Attributes:
        queue: The shards that wait.
        joining: Whether requests are joined, and wait for company.
        batch_sizes: Rows of each answered run.
        max_delay: Seconds that a request may wait for others to be joined with.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        table: RequestTable,
        sink: RequestSink,
        rules: PoolRules,
    ) -> None:
        self.queue = ShardQueue(rules.max_batch_size)
        self.batch_sizes = Tally(ROW_BOUNDS)
        self.max_delay = rules.max_delay
        self._workers = workers
        self._table = table
        self._sink = sink
        self.joining = Joining(rules.max_batch_size, waits=not rules.max_delay)
        self._met = -math.inf  # when a request came last while another one was in flight

    def enter(self, entry: Entry, now: float) -> None:
        """Give the shards of a new request to workers, or have them wait; see `Scheduler.handle_request`."""
        if self._table.in_flight > 1:
            self._met = now
        queue, request, given = self.queue, entry.number, []
        gathers = self._gathers
        waits = gathers or bool(queue.items)
        for shard in range(len(entry.rows)):
            w = None if waits else self._next_worker(now)
            if w is not None:
                given.append((w, self._give(w, ((request, shard),), now)))
                continue
            waits = True  # nor is there one for the next shard
            # Waiting for company takes no more than half of the time that there is.
            due = entry.called + min(self.max_delay, entry.timeout / 2) if gathers else now
            queue.add((request, shard), entry.priority, *(entry.join or (None, 0)), due)
        for w, run in given:
            self._sink.send_run(w.index, run)
        if queue.items:
            self.go_on(now)

    def go_on(self, now: float) -> None:
        """Give queued shards to workers, as far as these have room."""
        queue, joining, given = self.queue, self.joining, []
        queue.end_holding(now)

        def most(waiting: int, full: bool) -> int:
            return joining.take(waiting, self._table.in_flight, now, full=full)

        while queue.items and (w := self._next_worker(now)) is not None:
            members = queue.take(beside=bool(w.runs), most=most)
            if not members:
                break
            given.append((w, self._give(w, members, now)))
        if joining.due <= now:
            joining.due = math.inf  # what waited for company is gone, or its worker
        for w, run in given:
            self._sink.send_run(w.index, run)

    @property
    def _gathers(self) -> bool:
        """Whether requests wait for others, so that workers get no runs ahead."""
        return self.joining.joins and (self.joining.share > 1 or self.max_delay > 0)

    @property
    def due(self) -> float:
        """When `go_on` is due, though nothing has come; infinite if there is no such time."""
        return min(self.queue.next_due(), self.joining.due)

    def note_workers(self) -> None:
        """Workers may have come or gone."""
        self.joining.at_once = max(1, sum(w.depth for w in self._workers if w.serves))

    def runs_for(self, entry: Entry) -> list[tuple[Worker, Run]]:
        """The runs with shards of a request, and whose they are."""
        return [
            (w, run)
            for w in self._workers
            for run in w.runs
            if any(request == entry.number for request, _ in run.members)
        ]

    # Choosing a worker.

    def _next_worker(self, now: float) -> Worker | None:
        """The worker that gets the next run; None if none has room."""
        best, least, began = None, MAX_RUNS, math.inf
        for w in self._workers:
            runs = len(w.runs)
            if runs > least or (runs == least and w.began >= began) or runs >= w.capacity:
                continue
            if w.stop is not Stop.NONE:
                continue
            # Beside a run that is to stop others may begin; none waits for it.
            if w.kill_at < math.inf and not 0 < runs < w.concurrent:
                continue
            if not runs:
                if w.state is WorkerState.READY:
                    return w
                continue
            if w.state is not WorkerState.BUSY:
                continue
            # None waits behind one that takes longer than usual, or that may be joined.
            if runs < w.depth or not (
                self._gathers or now - w.began > w.usual_seconds + AHEAD_SECONDS
            ):
                best, least, began = w, runs, w.began
        return best

    # Giving it a run.

    def _give(self, w: Worker, members: tuple[ShardId, ...], now: float) -> Run:
        """Note that a worker gets these shards as its next run, which is to be sent."""
        run = Run(members, now)
        for request, shard in members:
            entry = self._table.entries[request]
            entry.outstanding += 1
            entry.attempts[shard] += 1
            if not entry.begun:
                entry.begun = True
                self._table.not_begun -= 1
        if not w.runs:
            w.began = now
            # So short a run gains nothing from more threads.
            if w.usual_seconds >= WIDE_RUN and w.build.wide_cores:
                run.wide = self._is_alone(w, members, now)
        w.runs.append(run)
        w.state = WorkerState.BUSY
        return run

    def _is_alone(self, w: Worker, members: tuple[ShardId, ...], now: float) -> bool:
        """Whether a worker's next run is to have the whole CPU: nothing else of the pool needs a part of it.

        Nor is likely to during the run: requests that come at random meet now and then.
        Not the first run of all, nor one that a worker may have died of, nor those of a worker that dies of
        wide runs, such as for lack of memory.
        """
        if len(members) > 1 or self.queue.items or w.usual_seconds == math.inf:
            return False
        if w.wide_deaths >= MAX_WIDE_DEATHS or now - self._met < APART_RUNS * w.usual_seconds:
            return False
        entry = self._table.entries[members[0][0]]
        if not entry.may_be_wide or len(entry.rows) > 1 or entry.attempts[0] > 1:
            return False
        return not any(o.runs for o in self._workers if o is not w and o.build.wide_cores)

    # Learning.

    def learn_run(self, w: Worker, run: Run, seconds: float, now: float) -> None:
        """Learn from an answered run how long the worker's take, and so how many it may hold."""
        rows, may_join = 0, not run.wide
        for request, shard in run.members:
            entry = self._table.entries[request]
            rows += entry.rows[shard]
            may_join &= entry.join is not None
        self.batch_sizes.add(rows)
        if may_join:
            self.joining.learn(rows, len(run.members), seconds, self._table.in_flight, now)
        usual = 0.0 if w.usual_seconds == math.inf else w.usual_seconds
        # Of a wide run it is known only that a core alone takes longer.
        usual = max(2 * seconds if run.wide else seconds, _FORGETTING * usual)
        w.usual_seconds = usual
        if usual > SHORT_RUN:
            w.capacity = w.depth
        else:
            ahead = int(AHEAD_SECONDS / max(usual, AHEAD_SECONDS / MAX_RUNS))
            w.capacity = min(max(w.depth + 1, w.concurrent + ahead), MAX_RUNS)


def trace_of(
    entry: Entry, error: McinferError | None = None, joined: float | None = None, label: str = ""
) -> RequestTrace:
    """The trace of a settled request with the error that its caller gets.

    `joined` is when its outputs were joined, if that is known.
    """
    ending = entry.ending or "failed"
    return RequestTrace(
        request=entry.number,
        outcome="failed" if error is not None and ending == "succeeded" else ending,
        error=error,
        rows=sum(entry.rows),
        called=entry.called,
        queued=entry.queued,
        settled=entry.closed,
        joined=entry.closed if joined is None else joined,
        shards=tuple(
            ShardTrace(**dict(zip(_TRACED, run, strict=True))) for run in sorted(entry.runs)
        ),
        label=label,
    )
