"""The requests that a pool has accepted: what waits, what runs, what is due, what became of each.

Pure bookkeeping for the scheduler: it decides nothing and knows no worker. A request is *open* until it is
closed with its outcome, and stays in the book until no worker has a shard of it any more.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from mcinfer.scheduler.queue import Joinable, ShardId, ShardQueue
from mcinfer.statistics import LATENCY_BOUNDS, Tally

Outcome = Literal["succeeded", "failed", "cancelled"]

TracedRun = tuple[int, int, str, int | None, int, float, float, float]
"""Shard, worker, device, pid, attempts, when sent and answered, seconds of the run: see `ShardTrace`."""


@dataclass(slots=True)
class Entry:
    """One request.

    Attributes:
        number: The request's.
        called: When the call came.
        queued: When it was accepted.
        timeout: Seconds that the caller gave it from the call on.
        deadline: When these are over.
        rows: Of each shard.
        size: Bytes of its tensors.
        answered: By shard, whether its reply came.
        attempts: By shard, how often a worker was given it.
        unanswered: Shards without a reply.
        deaths: By shard, the stories of the workers that died on it, where some did, or may have.
        late: By shard, how many workers still have it that it was taken from.
        closed: When it was answered.
        settled: Whether it was answered.
        begun: Whether a worker was given any of it.
        outstanding: Shards that a worker has, which may be writing to the request's memory.
        runs: Of the shards that were answered, where that is traced.
    """

    number: int
    called: float
    queued: float
    timeout: float
    deadline: float
    rows: tuple[int, ...]
    size: int
    answered: list[bool]
    attempts: list[int]
    unanswered: int
    deaths: dict[int, list[str]]
    late: dict[int, int]
    closed: float = 0.0
    settled: bool = False
    begun: bool = False
    outstanding: int = 0
    runs: list[TracedRun] = field(default_factory=list)


class RequestTable:
    """The book.

    Attributes:
        accepted: Requests so far: always the sum of the four counts after it.
        succeeded: Of them, answered with a result.
        failed: Of them, answered with an error.
        cancelled: Of them, cancelled.
        in_flight: Of them, open.
        in_flight_bytes: Of their tensors.
        not_begun: Of them, those of which no worker was given anything yet.
        latency: Seconds from a call to its answer, where that was a result.
        queue: The shards that wait for a worker.
        entries: By number, the requests in the book.
    """

    def __init__(self, max_rows: int) -> None:
        """An empty book; shards are joined to runs of up to so many rows."""
        self.accepted = 0
        self.succeeded = 0
        self.failed = 0
        self.cancelled = 0
        self.in_flight = 0
        self.in_flight_bytes = 0
        self.not_begun = 0
        self.latency = Tally(LATENCY_BOUNDS)
        self.queue = ShardQueue(max_rows)
        self.entries: dict[int, Entry] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: int) -> Entry:
        return self.entries[number]

    def open(self) -> Iterator[Entry]:
        """The requests that were not answered yet."""
        return iter([entry for entry in self.entries.values() if not entry.settled])

    def find_open(self, number: int) -> Entry | None:
        """The request of that number, if it was not answered yet."""
        entry = self.entries.get(number)
        return None if entry is None or entry.settled else entry

    # Accepting, and the queue.

    def accept(
        self,
        number: int,
        rows: tuple[int, ...],
        called: float,
        now: float,
        timeout: float,
        size: int,
    ) -> Entry:
        """Enter a request of so many rows in each shard; its shards are not queued yet."""
        shards = len(rows)
        deadline = called + timeout
        answered, attempts = [False] * shards, [0] * shards
        entry = Entry(
            number, called, now, timeout, deadline, rows, size, answered, attempts, shards, {}, {}
        )
        self.entries[number] = entry
        self.accepted += 1
        self.in_flight += 1
        self.in_flight_bytes += size
        self.not_begun += 1
        if len(self._deadlines) > 2 * self.in_flight + 64:
            # The answered ones must not outnumber the open ones: a long time-out keeps them for long.
            self._deadlines = [item for item in self._deadlines if self.find_open(item[1])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, number))
        return entry

    def enqueue(self, entry: Entry, priority: int, join: Joinable | None) -> None:
        """Queue all its shards; `join` is for a request of one shard."""
        for shard in range(len(entry.answered)):
            self.queue.add((entry.number, shard), priority, join)

    def take_run(self, now: float, *, ahead: bool = False) -> tuple[ShardId, ...]:
        """Take the shards of the next run off the queue, for a worker; none while there is none to give."""
        members = self.queue.take(now, ahead=ahead)
        for number, shard in members:
            entry = self.entries[number]
            entry.outstanding += 1
            entry.attempts[shard] += 1
            if not entry.begun:
                entry.begun = True
                self.not_begun -= 1
        return members

    # Deadlines.

    def next_deadline(self) -> float:
        """The earliest of the open requests; infinite where there is none."""
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

    def close(self, entry: Entry, outcome: Outcome, now: float) -> None:
        """The request is answered; what is queued of it is forgotten."""
        entry.settled = True
        entry.closed = now
        self.in_flight -= 1
        self.in_flight_bytes -= entry.size
        self.not_begun -= not entry.begun
        if self.queue.items:
            for shard in range(len(entry.answered)):
                self.queue.discard((entry.number, shard))
        match outcome:
            case "succeeded":
                self.succeeded += 1
                self.latency.add(now - entry.called)
            case "failed":
                self.failed += 1
            case "cancelled":
                self.cancelled += 1

    def give_up(self) -> None:
        """All that is open has failed, and the book is closed."""
        self.failed += self.in_flight
        self.in_flight = self.in_flight_bytes = self.not_begun = 0

    def strike(self, entry: Entry) -> bool:
        """Take it out of the book if it is answered and no worker has a shard of it; whether it was."""
        if not entry.settled or entry.outstanding:
            return False
        del self.entries[entry.number]
        return True
