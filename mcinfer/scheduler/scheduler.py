"""Events in, orders out. No sockets, threads, clocks or processes here.

The loop reports events: a request or a message came, a worker died, time passed. The scheduler notes what
follows and gives orders to two sinks, `RequestSink` and `WorkerSink`: the loop, and in tests a list. An order
is the last thing that is done about what it concerns: its worker, its run or its request is whole by then. It
returns nothing, does not fail, and does not call the scheduler. What goes wrong with it (a process that does
not start, a worker that cannot be reached) is an event of a later turn.

The rules:

* Every request settles exactly once.
* Shards go to workers as `Dispatch` says: at once where nothing waits.
* A shard whose worker died goes to another; once `MAX_TRIES` workers that had begun it have died, it fails.
  The death of a worker that was ended for no fault of its own, or for another run that did not stop, does
  not count.
* A bad request fails alone. Requests that were joined to one run and failed, or lost their worker, run
  again apart; those that were executed at once by a worker that died do not run beside each other again.
* A deadline that passes settles the request at once; then CANCEL, a grace period, and a kill.
* A request's memory is released when no worker can write to it: each worker that got a shard of it has
  answered or is dead.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal

from mcinfer.errors import (
    ClosedError,
    InvalidInputError,
    McinferError,
    PredictError,
    PredictTimeoutError,
    ProtocolError,
    refused_by_runtime,
)
from mcinfer.protocol import (
    Build,
    BuildFinish,
    Cancel,
    Error,
    Hello,
    Message,
    Preparing,
    Reply,
    WorkerState,
    state_after,
)
from mcinfer.scheduler.dispatch import Dispatch, Ending, Entry, RequestSink, RequestTable
from mcinfer.scheduler.queue import ShardId
from mcinfer.scheduler.workers import (
    MAX_TEXT,
    Lifecycle,
    PoolRules,
    Run,
    Stop,
    Worker,
    WorkerSink,
)
from mcinfer.statistics import Health

KILLED_ENDS = 10.0  # seconds that a killed process may take to end
MAX_ATTEMPTS = 8  # runs of a shard that are answered as cancelled, though they were not

MAX_TRIES = 3  # workers that may die on a shard

_RUN_ERRORS: Mapping[str, Callable[[str], McinferError]] = {
    "invalid": InvalidInputError,
    "refused": refused_by_runtime,
}
"""By the kind of ERROR; of others it is `PredictError`."""


class Scheduler:
    """The state of a pool and its requests. Methods named `handle_` take events.

    `now` is float seconds on any monotonic clock, the same for all calls.

    Attributes:
        due: When `handle_time` is due next, or earlier.
    """

    def __init__(
        self,
        builds: Sequence[Build],
        requests: RequestSink,
        workers: WorkerSink,
        rules: PoolRules,
    ) -> None:
        self._sink = requests
        self._worker_sink = workers
        self.lifecycle = Lifecycle(builds, workers, rules)
        self.workers = self.lifecycle.workers
        self.due = math.inf
        self._timeouts = rules.timeouts
        self._limits = rules.limits
        self._phase: Literal["open", "draining", "closing", "closed"] = "open"
        self._phase_end = math.inf  # of draining, or of closing
        self._traces = rules.tracing
        self._recycles = rules.restart.max_requests is not None
        self.table = RequestTable()
        self._dispatch = Dispatch(self.workers, self.table, requests, rules)
        self.queue = self._dispatch.queue
        self.batch_sizes = self._dispatch.batch_sizes
        self.joining = self._dispatch.joining

    # What the shell and the statistics may ask.

    def health(self, now: float) -> Health:
        health = self.lifecycle.health(now)
        if self._phase == "closed":
            return replace(health, state="closed", reasons=(), serving=0)
        if self._phase != "open":
            left = self.table.in_flight
            reasons = (f"{left} requests are still to be answered",) if left else ()
            return replace(health, state="closing", reasons=(*reasons, *health.reasons))
        return health

    def is_exiting(self, worker: int) -> bool:
        """Whether the worker was asked to end."""
        return self.lifecycle.closing or self.workers[worker].state is WorkerState.EXITING

    def next_time(self) -> float:
        """When `handle_time` is due next; infinite if nothing waits for a time."""
        requests = min(self.table.next_deadline(), self._dispatch.due)
        workers = (time for w in self.workers for time in (w.kill_at, w.restart_at))
        return min(requests, self._phase_end, *workers)

    # Events.

    def handle_start(self, now: float) -> None:
        for w in self.workers:
            self.lifecycle.start(w)
        self._go_on(now)

    def handle_started(self, now: float, worker: int, pid: int) -> None:
        self.lifecycle.note_start(self.workers[worker], pid, now)
        self._go_on(now)

    def handle_request(self, now: float, entry: Entry) -> None:
        """A request came.

        Raises:
            ClosedError: The pool is closed.
            QueueFullError: `Limits.queue` or `Limits.queue_bytes` is reached.
            WorkerDiedError: No worker serves, and none has a start left within its budget.
        """
        if self.lifecycle.closing or not self.lifecycle.started:
            raise ClosedError("the master is closed")
        if self._phase == "draining" and entry.limited:
            raise ClosedError("the master is closing: it finishes what it has, and takes no more")
        table, limits = self.table, self._limits
        if entry.limited and (table.in_flight >= limits.queue or limits.queue_bytes is not None):
            self.check_room(entry.size)
        if not self.lifecycle.is_steady and self.lifecycle.circuit_open:
            raise self.lifecycle.outage(now).refusing("no_worker")
        table.accept(entry)
        if entry.deadline < self.due:
            self.due = entry.deadline
        self._dispatch.enter(entry, now)
        if self.queue.items:
            self.due = min(self.due, self._dispatch.due)

    def check_room(self, size: int) -> None:
        """Raise `QueueFullError` unless a request with so many bytes of tensors can be accepted now."""
        self.table.check_room(self._limits, size)

    def handle_cancel(self, now: float, request: int) -> None:
        entry = self.table.find_open(request)
        if entry is not None:
            self._fail(entry, ClosedError("the request was cancelled"), now, "cancelled")
            self._go_on(now)

    def handle_killed(self, worker: int, reason: str, *, planned: bool = False) -> None:
        """The loop has killed the worker, `planned` for no fault of its own; its death will be reported."""
        w = self.workers[worker]
        w.note_kill(reason)
        w.is_planned |= planned

    def handle_own_memory(self, now: float, worker: int, size: int) -> None:
        """The worker's process has so many bytes of memory of its own."""
        self.lifecycle.recycle_if_due(self.workers[worker], size)
        self._go_on(now)

    def handle_standing(self, worker: int, *, stopped: bool) -> None:
        """A look at the worker's process, one each second in which it has runs: is it stopped by a signal?"""
        self.lifecycle.note_standing(self.workers[worker], stopped=stopped)

    def handle_restart(self, now: float) -> None:
        """Replace all workers, one after another; `workers_restarted` follows.

        Raises:
            ClosedError: The pool is closed.
        """
        if self._phase != "open" or not self.lifecycle.started:
            raise ClosedError("the master is closed")
        self.lifecycle.replace(self.workers, asked_for=True)
        self._go_on(now)

    def handle_message(self, now: float, worker: int, message: Message) -> None:
        """A worker sent a message.

        Raises:
            ProtocolError: The message may not come now. Nothing was changed; the loop must kill the worker.
        """
        w = self.workers[worker]
        match message:
            case Reply():
                about = message.seconds, message.wide
                self.handle_answer(now, worker, message.request, message.shard, *about)
                return
            case Error() if w.runs or message.request is not None:
                self.handle_answer(now, worker, message.request, message.shard, 0.0, False, message)
                return
            case Hello() | Preparing() | BuildFinish() | Error():
                w.state = state_after(w.state, type(message))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a worker to send")
        match message:
            case Hello():
                if not self.lifecycle.closing:
                    self.lifecycle.send(w, w.build)
            case Preparing():
                self.lifecycle.extend_start(w, message, now)
            case BuildFinish():
                self.lifecycle.finish_build(w, message, now)
            case Error():
                self.lifecycle.fail_build(w, message, now)
        self._go_on(now)

    def handle_answer(
        self,
        now: float,
        worker: int,
        request: int | None,
        shard: int | None,
        seconds: float,
        wide: bool = False,
        error: Error | None = None,
    ) -> None:
        """One of a worker's current runs has ended after so many seconds, or failed with this error.

        `wide`: it had the whole CPU, as it might.

        Raises:
            ProtocolError: As `handle_message`.
        """
        w = self.workers[worker]
        runs, concurrent = w.runs, w.concurrent
        if not 0.0 <= seconds < math.inf:
            raise ProtocolError(f"seconds: got {seconds}, expected a finite number, 0 or more")
        if runs and runs[0].members[0] == (request, shard):
            run = runs.popleft()
        else:
            found = w.find_begun(request, shard)
            if found is None:
                kind = Reply if error is None else Error
                state_after(w.state, kind)
                expected = " or ".join(str(run.members[0]) for run in w.begun()) or "none"
                raise ProtocolError(
                    f"{kind.__name__} for request and shard {(request, shard)}, expected {expected} in "
                    f"state {w.state}"
                )
            run = found
            runs.remove(run)
        if w.kill_at < math.inf and not w.is_killed:
            w.kill_at = min([w.end_by, *(left.stop_by for left in runs)])
        if not runs and w.state is WorkerState.BUSY:
            w.state = WorkerState.READY
        elif len(runs) >= concurrent:
            self._limit(w, runs[concurrent - 1], now)
        members, w.began = run.members, now
        w.answers += len(members)
        if self._recycles:
            self.lifecycle.recycle_if_due(w)
        if error is not None:
            self._handle_failed_run(w, run, error, now)
        else:
            if run.wide:
                run.wide = wide
                if wide:
                    w.wide_deaths = 0
                    w.counts.wide += 1
            # The worker's word, as far as it can be.
            seconds = min(seconds, now - run.sent)
            self._dispatch.learn_run(w, run, seconds, now)
            w.counts.runs += 1
            w.counts.completed += len(members)
            w.counts.busy_seconds += seconds
            for number, part in members:
                entry = self.table.entries[number]
                entry.outstanding -= 1
                if entry.ending is None:
                    entry.unanswered -= 1
                    if self._traces:
                        place = w.index, w.build.device, w.pid, entry.attempts[part]
                        times = run.sent, now, seconds
                        entry.runs.append((part, *place, *times, entry.rows[part]))
                    if not entry.unanswered:
                        self.table.close(entry, "succeeded", now)
                        self._sink.settle(entry, None)
                if entry.ending is not None and not entry.outstanding:
                    del self.table.entries[number]
                    self._sink.release(entry)
        if not self.lifecycle.is_steady or self._phase != "open":
            self._go_on(now)
        elif self.queue.items:
            self._dispatch.go_on(now)
            self.due = min(self.due, self._dispatch.due)

    def handle_died(self, now: float, worker: int, how: str) -> None:
        """The worker's process ended, or could not be started; `how`, in words."""
        w = self.workers[worker]
        # A pipeline has begun as many as it works on.
        is_blamed = w.stop is not Stop.HUNG and not w.is_planned
        begun = [*islice(w.runs, w.depth)] if is_blamed else []
        runs, w.runs = w.runs, deque()
        w.wide_deaths += bool(runs and runs[0].wide)
        story = self.lifecycle.note_end(w, how, now)
        for run in reversed(runs):
            w.counts.failed += len(run.members)
            if run in begun:
                for member in run.members:
                    self._count_death(w, member, story, now)
            self._run_again(run)
        self.lifecycle.finish_start()
        if not self.lifecycle.closing and self.lifecycle.circuit_open:
            for entry in self.table.open():
                self._fail(entry, self.lifecycle.outage(now), now)
        self._go_on(now)

    def handle_time(self, now: float) -> None:
        """Act on everything that was due by `now`."""
        for entry in self.table.overdue(now):
            self._handle_deadline(entry, now)
        for w in self.workers:
            self.lifecycle.handle_time(w, now)
        if self._phase == "draining" and self._phase_end <= now:
            self._close(now)
        self._go_on(now)

    def handle_close(self, now: float, timeout: float | None = None) -> None:
        """End the pool: requests in flight fail, and workers get so many seconds to exit.

        None is `Timeouts.close`. A second call can only shorten the time.
        """
        self._close(now, timeout)
        self._go_on(now)

    def _close(self, now: float, timeout: float | None = None) -> None:
        if self._phase == "closed":
            return
        seconds = self._timeouts.close if timeout is None else timeout
        # A killed process that has not ended this long after is stuck in the kernel.
        end = now + seconds + self._timeouts.close + KILLED_ENDS
        self._phase_end = min(end, self._phase_end) if self._phase == "closing" else end
        self._phase = "closing"
        for entry in self.table.open():
            self._fail(entry, ClosedError("the master was closed"), now)
        self.lifecycle.close(now, seconds)
        self._worker_sink.announce(self.health(now), False)

    def handle_drain(self, now: float, timeout: float) -> None:
        """End the pool when all accepted requests are answered, or after so many seconds."""
        if self._phase in ("closing", "closed"):
            return
        self._phase, self._phase_end = "draining", now + timeout
        self._dispatch.max_delay = 0.0  # no more requests come that could join those that are held
        self.queue.end_holding(math.inf)
        self._worker_sink.announce(self.health(now), False)
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Do what any event may make possible: replace a worker, give out shards, report, end."""
        self.lifecycle.advance(now)
        self._dispatch.note_workers()
        self._dispatch.go_on(now)
        self.lifecycle.announce(now)
        if self._phase == "draining" and not self.table.in_flight:
            self._close(now)
        if self._phase == "closing":
            left = tuple(w.index for w in self.workers if w.state is not WorkerState.GONE)
            if self._phase_end <= now or not left:  # some may not end, though they were killed
                self._phase, self._phase_end = "closed", math.inf
                self._worker_sink.announce(self.health(now), False)
                self._worker_sink.pool_closed(left)
        self.due = self.next_time()

    # Answers.

    def _limit(self, w: Worker, run: Run, now: float, *, is_overdue: bool = False) -> None:
        """If a run that has begun is overdue, it has a grace; if no request needs it, also their time."""
        if run.stop_by < math.inf or not (is_overdue or self.table.is_over(run)):
            return
        ends = (
            ()
            if is_overdue
            else [self.table.entries[request].end(now) for request, _ in run.members]
        )
        run.stop_by = max([now, *ends]) + self._timeouts.cancel_grace
        if not w.is_killed:
            w.kill_at = min(run.stop_by, w.kill_at)
            self.due = min(self.due, w.kill_at)

    def _handle_failed_run(self, w: Worker, run: Run, message: Error, now: float) -> None:
        """A run failed or was cancelled; joined shards run again apart, so that only the bad one fails."""
        members = run.members
        if message.kind != "cancelled":
            w.counts.failed += len(members)
            w.last_error = message.text[:MAX_TEXT]
        request, shard = members[0]
        # A CANCEL of an earlier run that it was joined in may have come after the answer.
        again = (
            message.kind == "cancelled"
            and 1 < self.table.entries[request].attempts[shard] <= MAX_ATTEMPTS
        )
        if again or len(members) > 1:
            self._run_again(run)
        elif (entry := self._give_back(request)) is not None:
            make = _RUN_ERRORS.get(message.kind, PredictError)
            self._fail(entry, make(f"{w.name}: {message.text}"), now)

    def _run_again(self, run: Run) -> None:
        """Queue the members of an unanswered run again, each by itself and before others."""
        for request, shard in reversed(run.members):
            entry = self._give_back(request)
            if entry is not None:
                self.queue.add_first((request, shard), alone=shard in entry.deaths)

    def _fail(
        self,
        entry: Entry,
        error: McinferError,
        now: float,
        ending: Ending = "failed",
        *,
        is_overdue: bool = False,
    ) -> None:
        """Settle with an error, and cancel runs that no request needs any more.

        `is_overdue`: and those that others were joined in, and run again apart: this one may be what hangs.
        """
        self.table.close(entry, ending, now)
        for shard in range(len(entry.rows)):
            self.queue.discard((entry.number, shard))
        self._sink.settle(entry, error)
        for w, run in self._dispatch.runs_for(entry):
            if is_overdue or self.table.is_over(run):
                if w.state is WorkerState.BUSY:
                    request, shard = run.members[0]
                    self.lifecycle.send(w, Cancel(request=request, shard=shard))
                if run in w.begun():
                    self._limit(w, run, now, is_overdue=is_overdue)
        self._release_if_done(entry)

    def _give_back(self, request: int) -> Entry | None:
        """A worker that had a shard of a request has it no more; the request, if it is still open."""
        entry = self.table.entries[request]
        entry.outstanding -= 1
        if entry.ending is None:
            return entry
        self._release_if_done(entry)
        return None

    def _release_if_done(self, entry: Entry) -> None:
        """Forget a settled request that no worker has."""
        if entry.ending is not None and not entry.outstanding:
            del self.table.entries[entry.number]
            self._sink.release(entry)

    def _count_death(self, w: Worker, member: ShardId, story: str, now: float) -> None:
        """A worker died on a shard, or on another that it had begun: give it up after the last try."""
        request, shard = member
        entry = self.table.find_open(request)
        if entry is None:
            return
        stories = entry.deaths.setdefault(shard, [])
        stories.append(story)
        if len(stories) == MAX_TRIES:
            text = f"shard {shard} of {len(entry.rows)} was given up after {MAX_TRIES} workers died on it"
            self._fail(entry, w.death_error(f"{text}: {'; '.join(stories)}"), now)

    def _handle_deadline(self, entry: Entry, now: float) -> None:
        places = {
            shard: f"{'ran on' if run in w.begun() else 'waited at'} {w.name}"
            for w, run in self._dispatch.runs_for(entry)
            for request, shard in run.members
            if request == entry.number
        }
        waiting = [i for i in range(len(entry.rows)) if (entry.number, i) in self.queue.items]
        places |= dict.fromkeys(waiting, "waited for a worker")
        where = [f"shard {i} {place}" for i, place in sorted(places.items())]
        if not any(w.serves for w in self.workers):
            where += self.lifecycle.health(now).reasons
        error = PredictTimeoutError(f"no answer within {entry.timeout:g} s: {', '.join(where)}")
        self._fail(entry, error, now, is_overdue=True)
