"""What to do next: events in, actions out. No sockets, threads, clocks or processes here.

The master's shell reports what happened (a request came, a message came, a worker died, time
passed) and carries out the actions it is given, in order. The rules:

* Every request settles exactly once.
* A shard whose worker died goes to another; one that has killed two workers is given up.
* A bad request fails alone; its worker lives on. Requests that were joined to one run and failed, or
  lost their worker, run again apart.
* Where runs are short, a busy worker is given one more ahead, so that it does not wait for the next;
  behind a run that then is long it is taken back.
* A deadline that passes settles the request at once; then CANCEL, a grace period, and a kill.
* A worker that dies is started again, with back-off and within a budget; the others serve meanwhile.
* A request's memory is released when no worker can write to it any more: all that were given a
  shard of it have answered, or are known dead.
"""

import math
import signal
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from mcinfer.actions import (
    Action,
    KillWorker,
    PoolClosed,
    PoolStarted,
    Release,
    Send,
    SendPredict,
    Settle,
    StartWorker,
    TakeBack,
)
from mcinfer.config import RestartPolicy, Timeouts
from mcinfer.errors import (
    BuildError,
    ClosedError,
    InvalidInputError,
    McinferError,
    MissingDependencyError,
    PredictError,
    PredictTimeoutError,
    ProtocolError,
    QueueFullError,
    WorkerDiedError,
)
from mcinfer.ledger import Entry, Ledger, Outcome
from mcinfer.protocol import (
    MOST_RUNS,
    Build,
    BuildFinish,
    Cancel,
    Conversation,
    Error,
    Exit,
    Hello,
    Message,
    Preparing,
    Reply,
    WorkerState,
)
from mcinfer.shard_queue import Joinable, ShardId
from mcinfer.statistics import WorkerStatistics

SHORT_RUN = 0.01
"""Seconds: where runs take no longer, the time between two of them counts."""

LONG_RUN = 5 * SHORT_RUN
"""Seconds: a run that goes on for so long loses what was given behind it."""

_FORGETTING = 0.9
"""What is left, after each run, of what a longer one before it says of the next."""

MOST_DEATHS = 2
"""A shard, or a first build, that has killed this many workers is given up."""


@dataclass(slots=True, eq=False)
class _Run:
    members: tuple[ShardId, ...]  # none: it was taken back, and is to be skipped
    asked_back: bool = False


@dataclass(slots=True)
class _Worker:
    index: int
    device: str
    build: Build
    conversation: Conversation = field(default_factory=lambda: Conversation(state=WorkerState.GONE))
    runs: deque[_Run] = field(default_factory=deque)
    began: float = 0.0
    usual_seconds: float = math.inf
    pid: int | None = None
    ready_by: float | None = None
    kill_at: float | None = None
    killed: bool = False
    restart_at: float | None = None
    given_up: bool = False
    starts: deque[float] = field(default_factory=deque)
    started_before: bool = False
    build_deaths: list[str] = field(default_factory=list)
    build_failure: str | None = None
    lacks_package: bool = False
    restarts: int = 0
    runs_done: int = 0
    completed: int = 0
    failed: int = 0
    busy_seconds: float = 0.0
    providers: tuple[str, ...] = ()
    last_error: str = ""

    @property
    def state(self) -> WorkerState:
        return self.conversation.state

    @property
    def name(self) -> str:
        pid = "" if self.pid is None else f", pid {self.pid}"
        return f"worker {self.index} ({self.device}{pid})"


def describe_exit(code: int) -> str:
    """A process's end in words; a negative code is the number of the signal that killed it."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _agree(one: BuildFinish, other: BuildFinish) -> bool:
    """Whether two workers have the same model; one of them may have it as it is, and the other prepared."""
    names = ("inputs", "outputs", "weights", "model")
    alike = all(getattr(one, name) == getattr(other, name) for name in names)
    return alike and (one.prepared == other.prepared or "" in (one.prepared, other.prepared))


class Scheduler:
    """The state of a pool and its requests. Every method returns what is to be done, in order.

    `now` is float seconds on any monotonic clock, the same for all calls.
    """

    def __init__(
        self,
        builds: Sequence[Build],
        *,
        timeouts: Timeouts,
        restart: RestartPolicy,
        queue_limit: int,
        max_batch_size: int = 1,
        max_delay: float = 0.0,
    ) -> None:
        """Take what each worker is to load and where; nothing starts before `handle_start`.

        Args:
            builds: One for each worker.
            timeouts: How long to wait for what.
            restart: When a worker that died is started again.
            queue_limit: Requests accepted and not yet answered.
            max_batch_size: Rows of a run that requests may be joined to.
            max_delay: Seconds that a request may wait for others to join it.
        """
        self._workers = [_Worker(i, build.device, build) for i, build in enumerate(builds)]
        self._timeouts = timeouts
        self._restart = restart
        self._queue_limit = queue_limit
        self._started = False
        self._closing: float | None = None
        self._closed = False
        self._specs: BuildFinish | None = None
        self._max_delay = max_delay
        self._joins = max_batch_size > 1
        self.ledger = Ledger(max_batch_size)

    # What the shell and the statistics may ask.

    @property
    def specs(self) -> BuildFinish | None:
        """What the first worker said of the model; None before."""
        return self._specs

    @property
    def serving(self) -> int:
        """How many workers are ready or busy."""
        return sum(w.state in (WorkerState.READY, WorkerState.BUSY) for w in self._workers)

    def running(self, worker: int) -> tuple[ShardId, ...]:
        """Request and shard of all that the worker's run is for; none while it is at none."""
        runs = self._workers[worker].runs
        return runs[0].members if runs else ()

    def is_exiting(self, worker: int) -> bool:
        """Whether the worker was told to end, so that its end is no surprise."""
        told = self._workers[worker].state is WorkerState.EXITING
        return told or self._closing is not None

    def name(self, worker: int) -> str:
        """How texts speak of a worker: its index, device and pid."""
        return self._workers[worker].name

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """A snapshot of every worker."""
        return tuple(
            WorkerStatistics(
                index=w.index,
                device=w.device,
                pid=w.pid,
                state=str(w.state),
                restarts=w.restarts,
                runs=w.runs_done,
                completed=w.completed,
                failed=w.failed,
                busy_seconds=w.busy_seconds,
                providers=w.providers,
                last_error=w.last_error,
            )
            for w in self._workers
        )

    def next_time(self) -> float | None:
        """When `handle_time` is due next; None while nothing waits for a time."""
        times = [self.ledger.next_deadline()]
        for worker in self._workers:
            due = (worker.ready_by, worker.kill_at, worker.restart_at)
            times.extend(time for time in due if time is not None)
            if self._may_ask_back(worker):
                times.append(worker.began + LONG_RUN)
        if any(w.state is WorkerState.READY and not w.killed for w in self._workers):
            times.append(self.ledger.queue.next_due())
        if self._closing is not None and not self._closed:
            times.append(self._closing)
        return min((time for time in times if time < math.inf), default=None)

    # Events.

    def handle_start(self, now: float) -> list[Action]:
        """The pool is to start: all workers at once."""
        return [action for w in self._workers for action in self._start_worker(w, now)]

    def handle_started(self, worker: int, pid: int) -> None:
        """The worker's process exists."""
        self._workers[worker].pid = pid

    def handle_request(
        self,
        now: float,
        request: int,
        shards: int,
        timeout: float,
        *,
        priority: int = 0,
        join: tuple[Hashable, int] | None = None,
    ) -> list[Action]:
        """A request came.

        Args:
            now: When.
            request: Its number.
            shards: How many pieces it has.
            timeout: Seconds within which it is to be answered.
            priority: Those of a higher one go first.
            join: For one shard that may go with others in one run: a key that they have in common, and
                its rows.

        Raises:
            ClosedError: The pool is closed.
            QueueFullError: As many requests as allowed are in flight.
        """
        if self._closing is not None or self._closed or not self._started:
            raise ClosedError("the master is closed")
        if self.ledger.in_flight >= self._queue_limit:
            raise QueueFullError(
                f"{self.ledger.in_flight} requests are queued or running, the limit (Limits.queue) is "
                f"{self._queue_limit}"
            )
        entry = self.ledger.accept(request, shards, now + timeout, timeout)
        if all(worker.given_up for worker in self._workers):
            return self._fail(entry, self._nobody_left())
        # Waiting for company takes no more than half of the time that there is.
        due = now + min(self._max_delay, timeout / 2)
        joinable = None if join is None else Joinable(key=join[0], rows=join[1], due=due)
        self.ledger.enqueue(entry, priority, joinable)
        return self._dispatch(now)

    def handle_cancel(self, request: int) -> list[Action]:
        """The caller does not want the answer any more."""
        entry = self.ledger.find_open(request)
        if entry is None:
            return []
        return self._fail(entry, ClosedError("the request was cancelled"), "cancelled")

    def handle_killed(self, worker: int, reason: str) -> None:
        """The shell has killed the worker on its own account; its death will be reported."""
        self._workers[worker].killed = True
        self._workers[worker].last_error = reason

    def handle_message(self, now: float, worker: int, message: Message) -> list[Action]:
        """A worker sent a message.

        Raises:
            ProtocolError: It may not come now. Nothing was changed; the shell is to kill the worker.
        """
        w = self._workers[worker]
        if not isinstance(message, (Hello, Preparing, BuildFinish, Reply, Error)):
            raise ProtocolError(f"{type(message).__name__} is not for a worker to send")
        before = w.state
        if isinstance(message, Reply) and w.runs and not w.runs[0].members:
            raise ProtocolError("Reply to a run that was taken back")
        w.conversation.advance(message)
        match message:
            case Hello():
                return [] if self._closing is not None else [self._send(w, w.build)]
            case Preparing():
                # A model that takes long is not a worker that hangs.
                w.ready_by = None if w.ready_by is None else now + self._timeouts.start
            case BuildFinish():
                return self._handle_build_finish(w, message, now)
            case Error(request=None):
                return self._handle_build_error(w, message, now)
            case Reply() | Error():
                w.kill_at = None if before is WorkerState.BUSY else w.kill_at
                return [*self._handle_answer(w, message, now), *self._dispatch(now)]
        return []

    def handle_died(
        self, now: float, worker: int, how: str, *, ahead_begun: bool = False
    ) -> list[Action]:
        """The worker's process ended, or could not be started.

        Args:
            now: When that was noticed.
            worker: Which.
            how: In words.
            ahead_begun: Whether it had begun the run that it was given ahead (see `has_ahead`), so that
                the one before had ended, and only its answer was lost.
        """
        w = self._workers[worker]
        story = f"{w.name} {how}"
        state, runs = w.state, w.runs
        w.conversation = Conversation(state=WorkerState.GONE)
        w.runs, w.usual_seconds = deque(), math.inf
        w.pid = w.ready_by = w.kill_at = None
        reason = w.last_error if w.killed or state is WorkerState.EXITING else ""
        actions: list[Action] = []
        if runs:
            running = runs.pop() if ahead_begun else runs.popleft()
            for run in runs:  # it died on none of these
                actions += self._run_again(run.members)
            w.failed += len(running.members)
            actions += self._handle_lost_run(running.members, story)
        if self._closing is None:
            w.last_error = f"{story} after: {reason}" if reason else story
            if not self._started and not w.started_before:
                actions += self._handle_death_in_start(w, state, story, now)
            else:
                actions += self._plan_restart(w, now)
        return [*actions, *self._dispatch(now), *self._finish_closing()]

    def handle_time(self, now: float) -> list[Action]:
        """Time passed: act on everything that was due by `now`."""
        actions: list[Action] = []
        for entry in self.ledger.overdue(now):
            actions += self._handle_deadline(entry, now)
        for w in self._workers:
            if w.ready_by is not None and w.ready_by <= now:
                w.ready_by = None
                actions += self._handle_slow_start(w)
            if self._may_ask_back(w) and w.began + LONG_RUN <= now:
                w.runs[-1].asked_back = True
                w.usual_seconds = math.inf
                actions.append(TakeBack(worker=w.index))
            if w.kill_at is not None and w.kill_at <= now:
                w.kill_at = None
                actions.append(self._kill(w, f"{w.name}: did not stop in time"))
            if w.restart_at is not None and w.restart_at <= now:
                w.restart_at = None
                w.restarts += 1
                actions += self._start_worker(w, now)
        actions += self._dispatch(now)
        if self._closing is not None and self._closing <= now:
            actions += self._finish_closing(abandon=True)
        return actions

    def handle_taken_back(self, now: float, worker: int) -> list[Action]:
        """`TakeBack` worked: the worker will not begin the run that it was given ahead."""
        run = self._workers[worker].runs[-1]
        members, run.members = run.members, ()
        return [*self._run_again(members), *self._dispatch(now)]

    def has_ahead(self, worker: int) -> bool:
        """Whether the worker was given a run ahead that was not taken back."""
        runs = self._workers[worker].runs
        return len(runs) > 1 and bool(runs[-1].members)

    def next_turn(self) -> float:
        """When the first is due of what may follow an answer or a new request.

        That is: what is held for others to join, what was given ahead, and what is to be skipped.
        """
        dues = [self.ledger.queue.next_due()]
        for w in self._workers:
            if self._may_ask_back(w):
                dues.append(w.began + LONG_RUN)
            if w.kill_at is not None:
                dues.append(w.kill_at)
        return min(dues)

    def handle_close(self, now: float, timeout: float) -> list[Action]:
        """The pool is to end: what is in flight fails, workers get `timeout` seconds to exit."""
        if self._closing is not None or self._closed:
            return []
        # A killed process that has not ended this long after is stuck in the kernel.
        self._closing = now + timeout + self._timeouts.close + 1.0
        actions: list[Action] = []
        for entry in self.ledger.open():
            actions += self._fail(entry, ClosedError("the master was closed"))
        for w in self._workers:
            w.restart_at = w.ready_by = None
            if w.state in (WorkerState.READY, WorkerState.BUSY):
                actions.append(self._send(w, Exit()))
                w.kill_at = now + timeout
            elif w.state is WorkerState.EXITING:
                w.kill_at = now + timeout
            elif w.state is not WorkerState.GONE:
                actions.append(KillWorker(worker=w.index))
        return [*actions, *self._finish_closing()]

    # Requests.

    def _dispatch(self, now: float) -> list[Action]:
        """Give queued shards to ready workers, the lowest index first so that pages stay warm."""
        actions: list[Action] = []
        if not self.ledger.queue:
            return actions
        for w in self._workers:
            if w.state is WorkerState.READY and not w.killed:
                members = self.ledger.take_run(now)
                if not members:
                    return actions
                actions.append(self._give(w, members, now))
        if self.ledger.queue and not self._joins:
            actions += self._give_ahead(now)
        return actions

    def _give(self, w: _Worker, members: tuple[ShardId, ...], now: float) -> Action:
        if not w.runs:
            w.began = now
        w.runs.append(_Run(members))
        w.conversation.begin_run(*members[0])
        return SendPredict(worker=w.index, members=members)

    def _give_ahead(self, now: float) -> list[Action]:
        """Give queued shards to busy workers whose runs are short, those that will be done first."""
        actions: list[Action] = []
        for w in sorted(self._workers, key=lambda w: w.began):
            if not self._takes_ahead(w, now):
                continue
            members = self.ledger.take_run(now, ahead=True)
            if not members:
                break
            actions.append(self._give(w, members, now))
        return actions

    def _takes_ahead(self, w: _Worker, now: float) -> bool:
        """Whether it may be given one more: not where it may be killed, or die, for the one it is at."""
        if w.state is not WorkerState.BUSY or len(w.runs) >= MOST_RUNS or not w.runs[0].members:
            return False
        if w.usual_seconds > SHORT_RUN or now - w.began > SHORT_RUN:
            return False
        suspect = any(self.ledger[request].deaths[shard] for request, shard in w.runs[0].members)
        return not (w.killed or suspect) and w.kill_at is None

    def _may_ask_back(self, w: _Worker) -> bool:
        """Whether it was given one behind the run that it is at, which was not asked for yet."""
        return len(w.runs) > 1 and not w.runs[-1].asked_back and w.state is WorkerState.BUSY

    def _handle_answer(self, w: _Worker, message: Reply | Error, now: float) -> list[Action]:
        run = w.runs.popleft()
        members, w.began = run.members, now
        if w.runs and w.state is WorkerState.BUSY and self._is_over(w.runs[0]):
            # It is to skip what was taken back; what was cancelled has the time that it had.
            deadlines = [self.ledger[request].deadline for request, _ in w.runs[0].members]
            w.kill_at = max([now, *deadlines]) + self._timeouts.cancel_grace
        if isinstance(message, Error):
            return self._handle_failed_run(w, members, message)
        usual = 0.0 if w.usual_seconds == math.inf else w.usual_seconds
        w.usual_seconds = max(message.seconds, _FORGETTING * usual)
        w.runs_done += 1
        w.completed += len(members)
        w.busy_seconds += message.seconds
        actions: list[Action] = []
        for request, shard in members:
            entry = self.ledger[request]
            entry.outstanding -= 1
            if not entry.settled:
                entry.answered[shard] = True
                entry.unanswered -= 1
                if entry.unanswered:
                    continue
                self.ledger.close(entry, "succeeded")
                actions.append(Settle(request=request))
            actions += self._release_if_done(entry)
        return actions

    def _handle_failed_run(
        self, w: _Worker, members: tuple[ShardId, ...], message: Error
    ) -> list[Action]:
        """A run failed or was cancelled; what was joined runs again apart, so that the bad fail alone."""
        if message.kind != "cancelled":
            w.failed += len(members)
            w.last_error = message.text
        if len(members) > 1:
            return self._run_again(members)
        actions: list[Action] = []
        for request, _ in members:
            entry = self.ledger[request]
            entry.outstanding -= 1
            if entry.settled:
                actions += self._release_if_done(entry)
                continue
            kind = InvalidInputError if message.kind == "invalid" else PredictError
            actions += self._fail(entry, kind(f"{w.name}: {message.text}"))
        return actions

    def _run_again(self, members: tuple[ShardId, ...]) -> list[Action]:
        """Queue the members of a run again, each by itself and before others."""
        actions: list[Action] = []
        for request, shard in reversed(members):
            entry = self.ledger[request]
            entry.outstanding -= 1
            if entry.settled:
                actions += self._release_if_done(entry)
            else:
                self.ledger.queue.add_first((request, shard))
        return actions

    def _fail(self, entry: Entry, error: McinferError, outcome: Outcome = "failed") -> list[Action]:
        """Settle with an error; runs that are for nobody any more are asked to stop."""
        self.ledger.close(entry, outcome)
        actions: list[Action] = [Settle(request=entry.number, error=error)]
        for w, run in self._runs_for(entry):
            if self._is_over(run):
                actions += self._cancel_run(w, run)
                # A run that does not stop may not keep its worker past the request's deadline.
                if run is w.runs[0] and w.kill_at is None:
                    w.kill_at = entry.deadline + self._timeouts.cancel_grace
        return [*actions, *self._release_if_done(entry)]

    def _runs_for(self, entry: Entry) -> list[tuple[_Worker, _Run]]:
        """The runs that are for this request, among others."""
        return [
            (w, run)
            for w in self._workers
            for run in w.runs
            if any(request == entry.number for request, _ in run.members)
        ]

    def _is_over(self, run: _Run) -> bool:
        """Whether nobody waits for this run any more."""
        return all(self.ledger[request].settled for request, _ in run.members)

    def _cancel_run(self, w: _Worker, run: _Run) -> list[Action]:
        if w.state is not WorkerState.BUSY:
            return []
        return [self._send(w, Cancel(request=run.members[0][0]))]

    def _release_if_done(self, entry: Entry) -> list[Action]:
        return [Release(request=entry.number)] if self.ledger.strike(entry) else []

    def _handle_lost_run(self, members: tuple[ShardId, ...], story: str) -> list[Action]:
        """A worker died in a run: to another one, or give it up if it is a killer.

        Of several that were joined nobody knows which it was: they run apart, and none is blamed yet.
        """
        if len(members) != 1:
            return self._run_again(members)
        [(request, shard)] = members
        entry = self.ledger[request]
        entry.outstanding -= 1
        if entry.settled:
            return self._release_if_done(entry)
        entry.deaths[shard].append(story)
        if len(entry.deaths[shard]) < MOST_DEATHS:
            self.ledger.queue.add_first((request, shard))
            return []
        deaths = "; ".join(entry.deaths[shard])
        error = WorkerDiedError(
            f"shard {shard} of {len(entry.answered)} was given up after {MOST_DEATHS} workers died "
            f"on it: {deaths}"
        )
        return self._fail(entry, error)

    def _handle_deadline(self, entry: Entry, now: float) -> list[Action]:
        """Its time is over. Those that were joined with it run again apart: it may be what hangs."""
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
        error = PredictTimeoutError(f"no answer within {entry.timeout:g} s: {', '.join(where)}")
        for w, run in runs:
            if run is w.runs[0]:
                # From when it was noticed: a run that was not asked to stop yet has its grace.
                grace = now + self._timeouts.cancel_grace
                w.kill_at = grace if w.kill_at is None else min(w.kill_at, grace)
        actions = self._fail(entry, error)
        for w, run in runs:
            if not self._is_over(run):
                actions += self._cancel_run(w, run)
        return actions

    # Workers.

    def _send(self, w: _Worker, message: Message) -> Send:
        w.conversation.advance(message)
        return Send(worker=w.index, message=message)

    def _kill(self, w: _Worker, reason: str) -> KillWorker:
        """Kill a worker. Until its death is reported, messages may come that it sent before."""
        w.killed = True
        w.last_error = reason
        return KillWorker(worker=w.index)

    def _start_worker(self, w: _Worker, now: float) -> list[Action]:
        w.conversation = Conversation(state=WorkerState.SPAWNED)
        w.killed = False
        w.ready_by = now + self._timeouts.start
        w.starts.append(now)
        return [StartWorker(worker=w.index)]

    def _handle_build_finish(self, w: _Worker, message: BuildFinish, now: float) -> list[Action]:
        w.ready_by = None
        w.providers = message.providers
        if self._specs is None:
            self._specs = message
        elif not _agree(message, self._specs):
            w.build_failure = (
                f"{w.name}: its model's content, inputs, outputs or weights are not those of the "
                "others"
            )
            return [self._kill(w, w.build_failure), *self._finish_start()]
        elif not self._specs.prepared:
            self._specs = message
        w.started_before = True
        return [*self._finish_start(), *self._dispatch(now)]

    def _handle_build_error(self, w: _Worker, message: Error, now: float) -> list[Action]:
        """The model does not load: final in the first start, a death like others afterwards."""
        w.ready_by = None
        w.last_error = message.text
        w.build_failure = f"{w.name}: {message.text}"
        w.lacks_package = message.kind == "missing"
        w.kill_at = now + self._timeouts.cancel_grace
        return [self._send(w, Exit()), *self._finish_start()]

    def _handle_slow_start(self, w: _Worker) -> list[Action]:
        story = f"{w.name}: not ready within {self._timeouts.start:g} s (it was {w.state})"
        w.build_failure = story
        return [self._kill(w, story), *self._finish_start()]

    def _handle_death_in_start(
        self, w: _Worker, state: WorkerState, story: str, now: float
    ) -> list[Action]:
        """Before its first model was ready: once is bad luck, twice is the model's doing."""
        if w.build_failure is not None:
            return []  # it was told
        w.build_deaths.append(f"{story} while {state}")
        if len(w.build_deaths) < MOST_DEATHS:
            w.restart_at = now
            return []
        w.build_failure = "; ".join(w.build_deaths)
        return self._finish_start()

    def _finish_start(self) -> list[Action]:
        """When every worker has either its model or a failure, say which."""
        if self._started or self._closing is not None:
            return []
        if not all(w.started_before or w.build_failure for w in self._workers):
            return []
        failed = [w for w in self._workers if w.build_failure is not None]
        failures = [w.build_failure or "" for w in failed]
        if failures:
            lacking = all(w.lacks_package for w in failed)
            kind = MissingDependencyError if lacking else BuildError
            return [PoolStarted(error=kind("; ".join(failures)))]
        self._started = True
        return [PoolStarted()]

    def _plan_restart(self, w: _Worker, now: float) -> list[Action]:
        while w.starts and w.starts[0] <= now - self._restart.window:
            w.starts.popleft()
        earlier = len(w.starts)
        # The first start of all is no restart.
        earlier -= 1 if w.restarts < earlier else 0
        if earlier < self._restart.budget:
            w.restart_at = now + self._restart.delay(earlier)
            return []
        w.given_up = True
        if not all(other.given_up for other in self._workers):
            return []
        return [
            action
            for entry in self.ledger.open()
            for action in self._fail(entry, self._nobody_left())
        ]

    def _nobody_left(self) -> WorkerDiedError:
        stories = "; ".join(w.last_error for w in self._workers)
        return WorkerDiedError(f"no worker is left and the restart budget is spent: {stories}")

    def _finish_closing(self, *, abandon: bool = False) -> list[Action]:
        """When the last worker is gone, or those left cannot be killed, the pool is closed."""
        if self._closing is None or self._closed:
            return []
        left = tuple(w.index for w in self._workers if w.state is not WorkerState.GONE)
        if left and not abandon:
            return []
        self._closed = True
        return [PoolClosed(abandoned=left)]
