"""Events in, actions out. No sockets, threads, clocks or processes here.

The loop reports events (a request or a message came, a worker died, time passed) and carries out the
returned actions, in order. The rules:

* Every request settles exactly once.
* A shard whose worker died goes to another; one that has killed two workers fails, or five while kills come
  from outside: they hit idle workers, too, or workers that run different requests. The death of a worker that
  was ended because it shared memory with one that died does not count.
* A bad request fails alone. Requests that were joined to one run and failed, or lost their worker, run
  again apart.
* With measured speeds, a shard is reserved for its preferred worker while that one serves. If it waits long,
  another worker that is not much slower and has nothing else to do steals it.
* A worker with short runs gets more runs ahead. If the current run then takes long, the runs behind it
  also go to other workers, with other memory for their outputs; late answers are ignored.
* A deadline that passes settles the request at once; then CANCEL, a grace period, and a kill.
* If nothing waits and workers have room, `assign` takes a request and `take_reply` its answer, by the same
  rules as `handle_request` and `handle_message`, which handle all other cases.
* A request's memory is released when no worker can write to it: each worker that got a shard of it has
  answered or is dead.
"""

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from mcinfer.config import Limits, RestartPolicy, Timeouts
from mcinfer.errors import (
    ClosedError,
    InvalidInputError,
    McinferError,
    PredictError,
    PredictTimeoutError,
    ProtocolError,
    QueueFullError,
)
from mcinfer.protocol import (
    MAX_RUNS,
    Build,
    BuildFinish,
    Cancel,
    Error,
    Hello,
    Message,
    Preparing,
    Reply,
    WorkerState,
)
from mcinfer.scheduler.actions import (
    Action,
    HealthChanged,
    PoolClosed,
    Release,
    SendPredict,
    Settle,
)
from mcinfer.scheduler.balance import Balance
from mcinfer.scheduler.queue import Affinity, Joinable, ShardId, ShardQueue
from mcinfer.scheduler.workers import (
    MAX_DEATHS,
    MAX_TEXT,
    Run,
    Worker,
    WorkerLives,
)
from mcinfer.sharding import Shares
from mcinfer.statistics import (
    LATENCY_BOUNDS,
    ROW_BOUNDS,
    Health,
    Histogram,
    RequestTrace,
    ShardTrace,
)

SHORT_RUN = 0.01  # seconds: workers with runs up to this get runs ahead
AHEAD_SECONDS = 0.003  # seconds that the runs ahead of a worker may take, unless it is one run
LONG_RUN = 5 * SHORT_RUN  # seconds after which the runs behind a run also go elsewhere
KILLED_ENDS = 10.0  # seconds that a killed process may take to end
UNBOUNDED_RUN = 600.0  # seconds for a cancelled run without a deadline
MAX_ATTEMPTS = 8  # runs of a shard that are answered as cancelled, though they were not
LONG_WAIT = 2.0
"""Times what a worker needs for its part of a request, after which others may steal a shard that waits for
it; but none that would need longer than that itself."""

MAX_KILLS = 5
"""Workers killed by SIGKILL that a shard may meet while kills come from outside."""

KILLS_SECONDS = 60.0
"""Seconds after a kill that came from outside in which others are taken to come from there as well; and
between two kills that hit different requests, so that no single one can be to blame."""

_FORGETTING = 0.9  # factor, for each run, of an earlier longer run's duration


Outcome = Literal["succeeded", "failed", "cancelled"]

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
        timeout: Seconds from `called` to `deadline`.
        rows: Rows of each shard.
        size: Bytes of its tensors.
        answered: By shard, whether its reply came.
        attempts: By shard, how often a worker got it.
        unanswered: How many shards have no reply yet.
        deaths: By shard, how each worker ended that died on it, or may have; in words.
        crashes: By shard, how many of these were not killed by SIGKILL.
        late: By shard, how many workers still have it although it was queued again.
        closed: When it was settled.
        begun: Whether a worker got any shard of it.
        outstanding: How many shards workers have: they may be writing to the request's memory.
        runs: The fields of a `ShardTrace` for each answered shard, if requests are traced or workers
            measured.
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
    deaths: dict[int, list[str]] = field(default_factory=dict)
    crashes: dict[int, int] = field(default_factory=dict)
    late: dict[int, int] = field(default_factory=dict)
    closed: float = 0.0
    settled: bool = False
    begun: bool = False
    outstanding: int = 0
    runs: list[tuple[Any, ...]] = field(default_factory=list)


class RequestTable:
    """All requests that are open, or whose memory a worker may still use.

    Attributes:
        accepted: Requests so far: always the sum of the four counts after it.
        not_begun: Open requests of which no worker has got a shard yet.
        latency: Seconds from a call to its answer, for results.
    """

    def __init__(self, max_rows: int) -> None:
        self.accepted = 0
        self.succeeded = 0
        self.failed = 0
        self.cancelled = 0
        self.in_flight = 0
        self.in_flight_bytes = 0
        self._most_bytes = 0
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
        return iter([entry for entry in self.entries.values() if not entry.settled])

    def find_open(self, number: int) -> Entry | None:
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
        """Enter a request; its shards are not queued yet."""
        shards, deadline = len(rows), called + timeout
        answered, attempts = [False] * shards, [0] * shards
        entry = Entry(
            number, called, now, timeout, deadline, rows, size, answered, attempts, shards
        )
        self.entries[number] = entry
        self.accepted += 1
        self.in_flight += 1
        self.in_flight_bytes = taken = self.in_flight_bytes + size
        if taken > self._most_bytes:
            self._most_bytes = taken
        self.not_begun += 1
        if len(self._deadlines) > 2 * self.in_flight + 64:
            # The answered ones must not outnumber the open ones: a long time-out keeps them for long.
            self._deadlines = [item for item in self._deadlines if self.find_open(item[1])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, number))
        return entry

    def take_run(
        self,
        now: float,
        *,
        ahead: bool = False,
        worker: int | None = None,
        steal: bool = False,
    ) -> tuple[ShardId, ...]:
        """Take the shards of the next run off the queue, as `ShardQueue.take`; none if none may go."""
        members = self.queue.take(now, ahead=ahead, worker=worker, steal=steal)
        for number, shard in members:
            entry = self.entries[number]
            entry.outstanding += 1
            entry.attempts[shard] += 1
            if not entry.begun:
                entry.begun = True
                self.not_begun -= 1
        return members

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

    def close(self, entry: Entry, outcome: Outcome, now: float) -> None:
        """Settle a request and drop its queued shards."""
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
        """Count all open requests as failed, at the end."""
        self.failed += self.in_flight
        self.in_flight = self.in_flight_bytes = self.not_begun = 0

    def strike(self, entry: Entry) -> bool:
        """Remove a request that is settled and that no worker has; whether it was removed."""
        if not entry.settled or entry.outstanding:
            return False
        del self.entries[entry.number]
        return True


class Scheduler:
    """The state of a pool and its requests. Methods return the actions to carry out, in order.

    `now` is float seconds on any monotonic clock, the same for all calls. With `tracing`, settled requests
    carry a `RequestTrace`. With a `balance`, it learns from them how fast workers are. `seeds_on_one` is for
    `WorkerLives`.
    """

    def __init__(
        self,
        builds: Sequence[Build],
        *,
        timeouts: Timeouts,
        restart: RestartPolicy,
        limits: Limits,
        max_batch_size: int = 1,
        max_delay: float = 0.0,
        tracing: bool = False,
        balance: Balance | None = None,
        seeds_on_one: bool = False,
    ) -> None:
        self.lives = WorkerLives(
            builds, timeouts=timeouts, restart=restart, seeds_on_one=seeds_on_one
        )
        self.workers = self.lives.workers
        self._overlaps = any(w.depth > 1 for w in self.workers)
        self._timeouts = timeouts
        self._limits = limits
        self._killed_outside = -math.inf  # when a worker was last, by no request's fault
        self._last_kill: tuple[float, set[int]] = (-math.inf, set())  # and the requests that it hit
        self._draining: float | None = None
        self._closing: float | None = None
        self._closed = False
        self._max_delay = max_delay
        self._joins = max_batch_size > 1
        self._tracing = tracing
        self._balance = balance
        self._shares: Shares | None = None
        self._order = self.workers  # the fastest first, as far as that is known
        self._keeps_runs = tracing or balance is not None
        self._wears = restart.max_requests is not None
        self.table = RequestTable(max_batch_size)
        self.batch_sizes = Tally(ROW_BOUNDS)

    # What the shell and the statistics may ask.

    @property
    def serving(self) -> int:
        return sum(w.serves for w in self.workers)

    def serving_workers(self) -> list[int]:
        """The indices of the workers that take requests."""
        return [w.index for w in self.workers if w.serves]

    def health(self, now: float) -> Health:
        health = self.lives.health(now)
        if self._closed:
            return replace(health, state="closed", reasons=(), serving=0)
        if self._closing is not None or self._draining is not None:
            left = self.table.in_flight
            reasons = (f"{left} requests are still to be answered",) if left else ()
            return replace(health, state="closing", reasons=(*reasons, *health.reasons))
        return health

    def running(self, worker: int) -> tuple[ShardId, ...]:
        """Request and shard of each member of the worker's current run."""
        runs = self.workers[worker].runs
        return runs[0].members if runs else ()

    def is_late(self, worker: int) -> bool:
        """Whether the worker's current run was given to others as well, so that its answer is ignored."""
        runs = self.workers[worker].runs
        return bool(runs) and runs[0].late

    def is_exiting(self, worker: int) -> bool:
        """Whether the worker was asked to end."""
        return self._closing is not None or self.workers[worker].state is WorkerState.EXITING

    def next_time(self) -> float | None:
        """When `handle_time` is due next; None if nothing waits for a time."""
        times = [self.table.next_deadline(), *self.lives.due_times()]
        times += [w.began + LONG_RUN for w in self.workers if self._holds_back(w)]
        if any(w.is_free for w in self.workers):
            times.append(self.table.queue.next_due())
        if self._draining is not None:
            times.append(self._draining)
        if self._closing is not None and not self._closed:
            times.append(self._closing)
        return min((time for time in times if time < math.inf), default=None)

    # Events.

    def handle_start(self, now: float) -> list[Action]:
        return [action for w in self.workers for action in self.lives.start(w, now)]

    def handle_started(self, worker: int, pid: int) -> None:
        self.workers[worker].pid = pid

    def handle_request(
        self,
        now: float,
        request: int,
        rows: tuple[int, ...],
        timeout: float,
        *,
        called: float | None = None,
        size: int = 0,
        priority: int = 0,
        join: tuple[Hashable, int] | None = None,
        preferred: Sequence[int] = (),
        limited: bool = True,
    ) -> list[Action]:
        """A request came.

        Args:
            now: The time.
            request: Its number.
            rows: Rows of each shard.
            timeout: Seconds for its answer.
            called: When these begin; None is `now`.
            size: Bytes of its tensors.
            priority: Higher ones go first.
            join: For one shard that may be joined with others of the same key: the key, and its weight (see
                `Joinable`).
            preferred: By shard, the index of its preferred worker; empty if there is none.
            limited: Whether there must be room for it (`check_room`), and the pool may not be draining; not
                for a part of a request that was accepted.

        Raises:
            ClosedError: The pool is closed.
            QueueFullError: `Limits.queue` or `Limits.queue_bytes` is reached.
        """
        if self._closing is not None or self._closed or not self.lives.started:
            raise ClosedError("the master is closed")
        if self._draining is not None and limited:
            raise ClosedError("the master is closing: it finishes what it has, and takes no more")
        if limited:
            self.check_room(size)
        called = now if called is None else called
        entry = self.table.accept(request, rows, called, now, timeout, size)
        if self.lives.circuit_open:
            return self._fail(entry, self.lives.outage(now), now)
        # Waiting for company takes no more than half of the time that there is.
        due = called + min(self._max_delay, timeout / 2)
        joinable = None if join is None else Joinable(key=join[0], rows=join[1], due=due)
        for shard in range(len(rows)):
            affinity = self._affinity(shard, rows, preferred, now) if preferred else None
            self.table.queue.add((request, shard), priority, joinable, affinity)
        return self.dispatch(now)

    def _affinity(
        self, shard: int, rows: Sequence[int], preferred: Sequence[int], now: float
    ) -> Affinity | None:
        """That a shard is reserved for its preferred worker; None if that one is away or never measured."""
        balance, worker = self._balance, preferred[shard]
        preferred_one = self.workers[worker]
        if balance is None or preferred_one.spare or not preferred_one.serves:
            return None
        if balance.rows_per_second(worker) is None:
            return None
        # The worker may run others of the request before this one.
        own = sum(part for part, other in zip(rows, preferred, strict=True) if other == worker)
        wait = LONG_WAIT * balance.seconds(worker, own)
        thieves = tuple(
            w.index
            for w in self.workers
            if w.index != worker and balance.seconds(w.index, rows[shard]) <= wait
        )
        return Affinity(worker=worker, until=now + wait, thieves=thieves)

    def check_room(self, size: int) -> None:
        """Raise `QueueFullError` unless a request with so many bytes of tensors can be accepted now."""
        in_flight, most = self.table.in_flight, self._limits.queue
        if in_flight >= most:
            raise QueueFullError(
                f"{in_flight} requests are queued or running, the limit (Limits.queue) is {most}"
            )
        taken, most_bytes = self.table.in_flight_bytes, self._limits.queue_bytes
        if most_bytes is not None and taken and taken + size > most_bytes:
            raise QueueFullError(
                f"requests with {taken} bytes of tensors are queued or running, and this one has {size}: "
                f"the limit (Limits.queue_bytes) is {most_bytes}"
            )

    def handle_cancel(self, now: float, request: int) -> list[Action]:
        entry = self.table.find_open(request)
        if entry is None:
            return []
        error = ClosedError("the request was cancelled")
        return [*self._fail(entry, error, now, "cancelled"), *self._finish_draining(now)]

    def handle_killed(self, worker: int, reason: str) -> None:
        """The loop has killed the worker; its death will be reported."""
        self.lives.kill(self.workers[worker], reason)

    def handle_own_memory(self, now: float, worker: int, size: int) -> list[Action]:
        """The worker's process has so many bytes of memory of its own."""
        self.lives.retire_if_worn(self.workers[worker], size)
        return self.lives.advance(now)

    def handle_restart(self, now: float) -> list[Action]:
        """Replace all workers, one after another; `WorkersRestarted` follows.

        Raises:
            ClosedError: The pool is closed.
        """
        if self._closing is not None or self._draining is not None or not self.lives.started:
            raise ClosedError("the master is closed")
        self.lives.replace(self.workers, asked_for=True)
        return [*self.lives.advance(now), *self.lives.announce(now)]

    def handle_restart_abandoned(self) -> None:
        """The caller of `handle_restart` does not wait any more: replace no further workers."""
        self.lives.forget_replacing()

    def handle_message(self, now: float, worker: int, message: Message) -> list[Action]:
        """A worker sent a message.

        Raises:
            ProtocolError: The message may not come now. Nothing was changed; the loop must kill the worker.
        """
        w = self.workers[worker]
        if not isinstance(message, (Hello, Preparing, BuildFinish, Reply, Error)):
            raise ProtocolError(f"{type(message).__name__} is not for a worker to send")
        before = w.state
        w.conversation.advance(message)
        actions: list[Action] = []
        match message:
            case Hello():
                return [] if self._closing is not None else self.lives.build(w, now)
            case Preparing():
                self.lives.extend_start(w, message, now)
                return []
            case BuildFinish():
                actions += self.lives.finish_build(w, message, now)
            case Error(request=None):
                actions += self.lives.fail_build(w, message, now)
            case Reply() | Error():
                if before in (WorkerState.BUSY, WorkerState.EXITING) and not w.doomed:
                    w.kill_at = w.end_by
                actions += self._handle_answer(w, message, now)
                if self.lives.calm and self._draining is None:
                    return [*actions, *self.dispatch(now)]
        actions += [*self.lives.advance(now), *self.dispatch(now)]
        return [*actions, *self.lives.announce(now), *self._finish_draining(now)]

    def handle_died(
        self, now: float, worker: int, how: str, *, killed: bool = False
    ) -> list[Action]:
        """The worker's process ended, or could not be started; `how`, in words; `killed`: by SIGKILL."""
        w = self.workers[worker]
        runs, w.runs = w.runs, deque()
        if killed and not w.doomed and w.state in (WorkerState.READY, WorkerState.BUSY):
            self._note_kill(now, {request for run in runs for request, _ in run.members})
        story = self.lives.bury(w, how, now)
        actions: list[Action] = []
        blames = not w.bereft and bool(runs) and not runs[0].late
        if blames and all(run.late for run in [*runs][1:]):
            w.failed += len(runs[0].members)
            for run in [*runs][1:]:
                actions += self._forget_late(run)
            actions += self._handle_lost_run(w, runs[0], story, now, killed=killed)
        else:
            # It is not known which it was at, since an answer may have been lost with it: none is blamed, and
            # each runs apart from the others.
            for run in reversed(runs):
                w.failed += len(run.members)
                actions += self._run_again(run, suspect=not w.bereft)
        actions += [*self.lives.part(w, now), *self.lives.finish_start()]
        if self._closing is None and self.lives.circuit_open:
            for entry in self.table.open():
                actions += self._fail(entry, self.lives.outage(now), now)
        actions += self.lives.advance(now)
        actions += [*self.dispatch(now), *self.lives.announce(now)]
        return [*actions, *self._finish_draining(now), *self._finish_closing()]

    def _note_kill(self, now: float, hit: set[int]) -> None:
        """Kills come from outside if they hit idle workers, or different requests within a short time."""
        before, hit_before = self._last_kill
        self._last_kill = now, hit
        if not hit or (now < before + KILLS_SECONDS and hit.isdisjoint(hit_before)):
            self._killed_outside = now

    def handle_time(self, now: float) -> list[Action]:
        """Act on everything that was due by `now`."""
        actions: list[Action] = []
        for entry in self.table.overdue(now):
            actions += self._handle_deadline(entry, now)
        for w in self.workers:
            if self._holds_back(w) and w.began + LONG_RUN <= now:
                actions += self._send_elsewhere(w)
            actions += self.lives.handle_time(w, now)
        actions += [*self.dispatch(now), *self.lives.announce(now)]
        if self._draining is not None and self._draining <= now:
            actions += self.handle_close(now, self._timeouts.close)
        actions += self._finish_draining(now)
        if self._closing is not None and self._closing <= now:
            actions += self._finish_closing(abandon=True)
        return actions

    def next_turn(self) -> float:
        """When a held shard, runs behind a long one, or a run to be skipped are due."""
        dues = [self.table.queue.next_due()]
        for w in self.workers:
            if self._holds_back(w):
                dues.append(w.began + LONG_RUN)
            if w.kill_at is not None:
                dues.append(w.kill_at)
        return min(dues)

    def handle_close(self, now: float, timeout: float) -> list[Action]:
        """End the pool: requests in flight fail, and workers get `timeout` seconds to exit."""
        end = now + timeout + self._timeouts.close + KILLED_ENDS
        if self._closing is not None or self._closed:
            if self._closing is not None and not self._closed and end < self._closing:
                self._closing = end
                self.lives.hasten_close(now, timeout)
            return []
        # A killed process that has not ended this long after is stuck in the kernel.
        self._closing = end
        self._draining = None
        actions: list[Action] = []
        for entry in self.table.open():
            actions += self._fail(entry, ClosedError("the master was closed"), now)
        actions += [*self.lives.close(now, timeout), HealthChanged(health=self.health(now))]
        return [*actions, *self._finish_closing()]

    def handle_drain(self, now: float, timeout: float) -> list[Action]:
        """End the pool when all accepted requests are answered, or after so many seconds."""
        if self._closing is not None or self._closed:
            return []
        self._draining = now + timeout
        self._max_delay = 0.0  # no more requests come that could join those that are held
        self.table.queue.end_holding(now)
        actions: list[Action] = [HealthChanged(health=self.health(now)), *self.dispatch(now)]
        return [*actions, *self._finish_draining(now)]

    def _finish_draining(self, now: float) -> list[Action]:
        if self._draining is None or self.table.in_flight:
            return []
        return self.handle_close(now, self._timeouts.close)

    # Requests.

    def dispatch(self, now: float) -> list[Action]:
        """Give queued shards to ready workers, always in the same order so that pages stay warm."""
        actions: list[Action] = []
        queue = self.table.queue
        if not queue.items:
            return actions
        if queue.reserved:
            actions += self._give_reserved(now)
        for w in self._order:
            if w.is_free and not w.runs and not queue.reserved:
                members = self.table.take_run(now)
                if not members:
                    return actions
                actions.append(self._give(w, members, now))
        if self.table.queue and (self._overlaps or not self._joins):
            actions += self._give_ahead(now)
        return actions

    def _give_reserved(self, now: float) -> list[Action]:
        """Give queued shards to ready workers while some are reserved for one worker."""
        actions: list[Action] = []
        queue = self.table.queue
        for index in [*queue.reserved]:
            if not self.workers[index].serves:
                queue.release(index)
        # Workers without reserved shards go first, so that others have time for theirs. Stealing is the last.
        order = sorted(self._order, key=lambda w: w.index in queue.reserved)
        for steal in (False, True):
            for w in order:
                if w.is_free and not w.runs:
                    members = self.table.take_run(now, worker=w.index, steal=steal)
                    if members:
                        actions.append(self._give(w, members, now))
        return actions

    def _give(self, w: Worker, members: tuple[ShardId, ...], now: float) -> Action:
        if not w.runs:
            w.began = now
        fresh = False
        for request, shard in members:
            entry = self.table[request]
            fresh = fresh or entry.late.get(shard, 0) > 0
            if shard in entry.deaths:
                w.alone = True  # it may die of it: nothing is put behind
        w.runs.append(Run(members, now))
        w.conversation.begin_run(*members[0])
        return SendPredict(worker=w.index, members=members, fresh=fresh)

    def _give_ahead(self, now: float) -> list[Action]:
        """Give queued shards to busy workers with short runs, the soonest free first."""
        actions: list[Action] = []
        queue = self.table.queue
        idle: set[int] = set()  # those for which nothing waits
        while queue.items:
            w = min(
                (w for w in self._order if w.index not in idle and self._takes(w, now)),
                key=_load,
                default=None,
            )
            if w is None:
                break
            reserved = bool(queue.reserved)
            members = self.table.take_run(now, ahead=True, worker=w.index if reserved else None)
            if members:
                actions.append(self._give(w, members, now))
            elif reserved:
                idle.add(w.index)
            else:
                break
        return actions

    def _takes(self, w: Worker, now: float) -> bool:
        """Whether it may get one more run: not behind a run that it may be killed, or die, for."""
        runs = len(w.runs)
        if (
            runs >= w.capacity
            or w.doomed
            or w.retiring
            or w.spare
            or w.alone
            or w.kill_at is not None
        ):
            return False
        state = w.conversation.state
        if runs == 0:
            return state is WorkerState.READY
        if runs >= self._room(w, now) or w.runs[-1].late:
            return False
        return state is WorkerState.BUSY

    def _room(self, w: Worker, now: float) -> int:
        """How many runs it may have: none waits behind one that takes long, or that may be joined."""
        long = bool(w.runs) and now - w.began > SHORT_RUN
        return w.depth if long or self._joins else w.capacity

    def _holds_back(self, w: Worker) -> bool:
        """Whether shards wait behind its current runs that no other worker has."""
        return len(w.runs) > w.depth and not w.runs[-1].late and w.state is WorkerState.BUSY

    def _send_elsewhere(self, w: Worker) -> list[Action]:
        """Queue the runs again that wait behind a long one."""
        w.usual_seconds, w.capacity = math.inf, w.depth
        actions: list[Action] = []
        for run in [*w.runs][: w.depth - 1 : -1]:
            if run.late:
                continue
            run.late = True
            actions += self._cancel_run(w, run)
            for request, shard in run.members:
                entry = self.table[request]
                if not entry.settled:
                    entry.late[shard] = entry.late.get(shard, 0) + 1
                    self.table.queue.add_first((request, shard))
        return actions

    # The request path where nothing waits.

    def assign(
        self,
        now: float,
        number: int,
        rows: tuple[int, ...],
        called: float,
        timeout: float,
        size: int,
        preferred: Sequence[int] = (),
    ) -> list[Worker] | None:
        """Give a request to workers at once, a shard to each, if nothing waits; else use `handle_request`.

        Shards with preferred workers go to these, or nothing is done.

        Returns:
            By shard, the worker; None if nothing was done.
        """
        if self._joins or self.table.queue.items or not self.lives.calm:
            return None
        if self._closing is not None or self._draining is not None:
            return None
        count, limits = len(rows), self._limits
        if self.table.in_flight >= limits.queue or limits.queue_bytes is not None:
            return None
        if preferred:
            if not self._preferred_are_free(preferred, now):
                return None
            chosen = [self.workers[index] for index in preferred]
        elif count == 1:
            best = None
            least = MAX_RUNS
            for w in self._order:
                runs = len(w.runs)
                sooner = runs < least or (0 < runs == least and best and w.began < best.began)
                if sooner and self._takes(w, now):
                    best, least = w, runs
            if best is None:
                return None
            chosen = [best]
        else:
            chosen = self._choose(count, now)
            if len(chosen) < count:
                return None
        entry = self.table.accept(number, rows, called, now, timeout, size)
        entry.begun = True
        entry.outstanding = count
        self.table.not_begun -= 1
        for shard, w in enumerate(chosen):
            if not w.runs:
                w.began = now
            entry.attempts[shard] = 1
            w.runs.append(Run(((number, shard),), now))
            w.conversation.begin_run(number, shard)
        return chosen

    def _preferred_are_free(self, preferred: Sequence[int], now: float) -> bool:
        """Whether the preferred workers of shards can have them at once, one each."""
        balance = self._balance
        return (
            balance is not None
            and len({*preferred}) == len(preferred)
            and all(self._takes(self.workers[index], now) for index in preferred)
            and all(balance.rows_per_second(index) is not None for index in preferred)
        )

    def _choose(self, count: int, now: float) -> list[Worker]:
        """The workers that `dispatch` would give so many shards to; fewer if they have no more room."""
        order = self._order
        loads = [(*_load(w), place) for place, w in enumerate(order) if self._takes(w, now)]
        heapq.heapify(loads)
        chosen: list[Worker] = []
        while loads and len(chosen) < count:
            load, began, place = loads[0]
            w = order[place]
            chosen.append(w)
            if load + 1 < self._room(w, now):
                heapq.heapreplace(loads, (load + 1, began if load else now, place))
            else:
                heapq.heappop(loads)
        return chosen

    def take_reply(
        self, worker: int, number: int, shard: int, seconds: float, now: float
    ) -> Entry | None:
        """A run has ended well, with all outputs in their places.

        Returns:
            The request's entry, which is settled and removed from the table after its last shard; None if
            nothing was done: use `handle_message`.
        """
        w = self.workers[worker]
        runs = w.runs
        if not runs or w.conversation.state is not WorkerState.BUSY or w.doomed:
            return None
        run = runs[0]
        if run.late or run.members != ((number, shard),) or w.kill_at is not None or self._wears:
            return None
        entry = self.table.entries[number]
        calm = self.lives.calm and self._draining is None
        if entry.settled or not calm or not 0.0 <= seconds < math.inf:
            return None
        if entry.unanswered == 1 and entry.outstanding > 1:
            # Another worker has a shard of it late: its memory is not to be released yet.
            return None
        if len(runs) > 1 and self._is_over(runs[1]):
            return None
        runs.popleft()
        w.alone = False
        w.conversation.end_run()
        w.began = now
        w.answers += 1
        w.runs_done += 1
        w.completed += 1
        self._learn_seconds(w, seconds)
        seconds = max(0.0, min(seconds, now - run.sent))  # the worker's word, as far as it can be
        w.busy_seconds += seconds
        self.batch_sizes.add(entry.rows[shard])
        entry.outstanding -= 1
        entry.answered[shard] = True
        entry.unanswered -= 1
        if self._keeps_runs:
            attempts, rows = entry.attempts[shard], entry.rows[shard]
            entry.runs.append(
                (shard, w.index, w.device, w.pid, attempts, run.sent, now, seconds, rows)
            )
        if not entry.unanswered:
            if self._balance is not None:
                self._learn_speeds(self._balance, entry, now)
            self.table.close(entry, "succeeded", now)
            self.table.strike(entry)
        return entry

    def _learn_seconds(self, w: Worker, seconds: float) -> None:
        """Learn how long the worker's runs take, and so how many it may hold."""
        usual = 0.0 if w.usual_seconds == math.inf else w.usual_seconds
        usual = max(seconds, _FORGETTING * usual)
        w.usual_seconds = usual
        if usual > SHORT_RUN:
            w.capacity = w.depth
        elif usual * (MAX_RUNS - 1) <= AHEAD_SECONDS:
            w.capacity = MAX_RUNS
        else:
            w.capacity = max(w.depth + 1, 1 + int(AHEAD_SECONDS / usual))

    def _learn_speeds(self, balance: Balance, entry: Entry, now: float) -> None:
        """Learn from an answered request how fast its workers are; one worker alone shows nothing."""
        found: dict[int, tuple[int, float]] = {}
        for _, worker, *_, seconds, rows in entry.runs:
            before = found.get(worker, (0, 0.0))
            found[worker] = before[0] + rows, before[1] + seconds
        if len(found) > 1:
            balance.learn(found, now)
            shares = balance.shares
            if shares is not None and shares is not self._shares:
                self._shares = shares
                weights = dict(zip(shares.workers, shares.weights, strict=True))
                self._order = sorted(self.workers, key=lambda w: -weights.get(w.index, 0.0))

    # Answers.

    def _handle_answer(self, w: Worker, message: Reply | Error, now: float) -> list[Action]:
        run = w.runs.popleft()
        members, w.began = run.members, now
        w.alone = False
        w.answers += len(members)
        if self._wears:
            self.lives.retire_if_worn(w)
        if w.runs and not w.doomed and w.state is WorkerState.BUSY and self._is_over(w.runs[0]):
            # It is to skip what was cancelled, which has the time that it had.
            ends = [self._end_of(self.table[request], now) for request, _ in w.runs[0].members]
            late = w.runs[0].late
            w.kill_at = (now if late else max([now, *ends])) + self._timeouts.cancel_grace
        if run.late:
            return self._forget_late(run)
        if isinstance(message, Error):
            return self._handle_failed_run(w, run, message, now)
        # The worker's word, as far as it can be.
        seconds = max(0.0, min(message.seconds, now - run.sent))
        self._learn_seconds(w, message.seconds)
        w.runs_done += 1
        w.completed += len(members)
        w.busy_seconds += seconds
        actions: list[Action] = []
        rows = 0
        for request, shard in members:
            entry = self.table[request]
            entry.outstanding -= 1
            rows += entry.rows[shard]
            if not entry.settled:
                entry.answered[shard] = True
                entry.unanswered -= 1
                if self._keeps_runs:
                    entry.runs.append(
                        (
                            *(shard, w.index, w.device, w.pid, entry.attempts[shard]),
                            *(run.sent, now, seconds, entry.rows[shard]),
                        )
                    )
                if entry.unanswered:
                    continue
                if self._balance is not None:
                    self._learn_speeds(self._balance, entry, now)
                actions.append(self._settle(entry, None, now, "succeeded"))
            actions += self._release_if_done(entry)
        self.batch_sizes.add(rows)
        return actions

    def _forget_late(self, run: Run) -> list[Action]:
        """A late run has ended, with or without an answer."""
        actions: list[Action] = []
        for request, shard in run.members:
            entry = self.table[request]
            entry.outstanding -= 1
            if not entry.settled:
                entry.late[shard] -= 1
            actions += self._release_if_done(entry)
        return actions

    def _settle(
        self, entry: Entry, error: McinferError | None, now: float, outcome: Outcome
    ) -> Settle:
        self.table.close(entry, outcome, now)
        trace = trace_of(entry, error, outcome) if self._tracing else None
        return Settle(
            request=entry.number, error=error, cancelled=outcome == "cancelled", trace=trace
        )

    def _handle_failed_run(self, w: Worker, run: Run, message: Error, now: float) -> list[Action]:
        """A run failed or was cancelled; joined shards run again apart, so that only the bad one fails."""
        members = run.members
        if message.kind != "cancelled":
            w.failed += len(members)
            w.last_error = message.text[:MAX_TEXT]
        if len(members) > 1:
            return self._run_again(run)
        [(request, shard)] = members
        entry = self.table[request]
        if message.kind == "cancelled" and 1 < entry.attempts[shard] <= MAX_ATTEMPTS:
            # Of an earlier run that it was late or joined in: the CANCEL came after the answer.
            return self._run_again(run)
        entry.outstanding -= 1
        if entry.settled:
            return self._release_if_done(entry)
        kind = InvalidInputError if message.kind == "invalid" else PredictError
        return self._fail(entry, kind(f"{w.name}: {message.text}"), now)

    def _run_again(self, run: Run, *, suspect: bool = False) -> list[Action]:
        """Queue the members of an unanswered run again, each by itself and before others.

        With `suspect`, a worker may have died of the run: nothing may wait behind it.
        """
        if run.late:
            return self._forget_late(run)
        actions: list[Action] = []
        for request, shard in reversed(run.members):
            entry = self.table[request]
            entry.outstanding -= 1
            if entry.settled:
                actions += self._release_if_done(entry)
                continue
            if suspect:
                entry.deaths.setdefault(shard, [])
            self.table.queue.add_first((request, shard))
        return actions

    def _fail(
        self, entry: Entry, error: McinferError, now: float, outcome: Outcome = "failed"
    ) -> list[Action]:
        """Settle with an error, and cancel runs that no request needs any more."""
        actions: list[Action] = [self._settle(entry, error, now, outcome)]
        for w, run in self._runs_for(entry):
            if self._is_over(run):
                actions += self._cancel_run(w, run)
                # A run that does not stop may not keep its worker past the request's deadline.
                if run is w.runs[0] and w.kill_at is None:
                    w.kill_at = self._end_of(entry, now) + self._timeouts.cancel_grace
        return [*actions, *self._release_if_done(entry)]

    def _end_of(self, entry: Entry, now: float) -> float:
        """Until when a run of a settled request may go on: as long as the caller gave it."""
        return entry.deadline if entry.deadline < math.inf else now + UNBOUNDED_RUN

    def _runs_for(self, entry: Entry) -> list[tuple[Worker, Run]]:
        return [
            (w, run)
            for w in self.workers
            for run in w.runs
            if any(request == entry.number for request, _ in run.members)
        ]

    def _is_over(self, run: Run) -> bool:
        """Whether no request needs this run any more."""
        return run.late or all(self.table[request].settled for request, _ in run.members)

    def _cancel_run(self, w: Worker, run: Run) -> list[Action]:
        if w.state is not WorkerState.BUSY:
            return []
        request, shard = run.members[0]
        return [w.send(Cancel(request=request, shard=shard))]

    def _release_if_done(self, entry: Entry) -> list[Action]:
        return [Release(request=entry.number)] if self.table.strike(entry) else []

    def _handle_lost_run(
        self, w: Worker, run: Run, story: str, now: float, *, killed: bool
    ) -> list[Action]:
        """A worker died in a run: give it to another, or give up a shard that has killed two workers.

        Joined shards run again apart, and none of them is blamed yet. While kills come from outside, a shard
        that has met nothing else is given up only after more of them.
        """
        if len(run.members) != 1:
            return self._run_again(run)
        [(request, shard)] = run.members
        entry = self.table[request]
        entry.outstanding -= 1
        if entry.settled:
            return self._release_if_done(entry)
        stories = entry.deaths.setdefault(shard, [])
        stories.append(story)
        crashes = entry.crashes[shard] = entry.crashes.get(shard, 0) + (not killed)
        from_outside = not crashes and now < self._killed_outside + KILLS_SECONDS
        if len(stories) < (MAX_KILLS if from_outside else MAX_DEATHS):
            self.table.queue.add_first((request, shard))
            return []
        deaths = "; ".join(stories)
        error = w.death_error(
            f"shard {shard} of {len(entry.answered)} was given up after {len(stories)} workers died "
            f"on it: {deaths}"
        )
        return self._fail(entry, error, now)

    def _handle_deadline(self, entry: Entry, now: float) -> list[Action]:
        """Its time is over. Requests that were joined with it run again apart: this one may be what hangs."""
        runs = self._runs_for(entry)
        places = {
            shard: f"{'ran on' if run is w.runs[0] else 'waited at'} {w.name}"
            for w, run in runs
            for request, shard in run.members
            if request == entry.number
        }
        where = [
            f"shard {i} {places.get(i, 'waited for a worker')}"
            for i, answered in enumerate(entry.answered)
            if not answered
        ]
        if not self.serving:
            where += self.lives.health(now).reasons
        error = PredictTimeoutError(f"no answer within {entry.timeout:g} s: {', '.join(where)}")
        for w, run in runs:
            if run is w.runs[0] and not w.doomed:
                # From when it was noticed: a run that was not asked to stop yet has its grace.
                grace = now + self._timeouts.cancel_grace
                w.kill_at = grace if w.kill_at is None else min(w.kill_at, grace)
        actions = self._fail(entry, error, now)
        for w, run in runs:
            if not self._is_over(run):
                actions += self._cancel_run(w, run)
        return actions

    def _finish_closing(self, *, abandon: bool = False) -> list[Action]:
        """Report the end when the last worker is gone, or when the others cannot be killed."""
        if self._closing is None or self._closed:
            return []
        left = tuple(w.index for w in self.workers if w.state is not WorkerState.GONE)
        if left and not abandon:
            return []
        self._closed = True
        return [HealthChanged(health=self.health(0.0)), PoolClosed(abandoned=left)]


def _load(w: Worker) -> tuple[int, float]:
    """How soon a worker is likely to be free: its number of runs, and when the current one began."""
    return len(w.runs), w.began if w.runs else 0.0


def trace_of(
    entry: Entry,
    error: McinferError | None = None,
    outcome: Outcome = "succeeded",
    joined: float | None = None,
) -> RequestTrace:
    """The trace of a settled request; `joined` is when its outputs were joined, if that is known."""
    return RequestTrace(
        request=entry.number,
        outcome=outcome,
        error=error,
        rows=sum(entry.rows),
        called=entry.called,
        queued=entry.queued,
        settled=entry.closed,
        joined=entry.closed if joined is None else joined,
        shards=tuple(
            ShardTrace(**dict(zip(_TRACED, run, strict=True))) for run in sorted(entry.runs)
        ),
    )
