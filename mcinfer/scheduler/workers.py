"""The workers of a pool: how they start, end, hang, and are replaced. Pure, for the scheduler.

* In the first start a build error is final, and a worker that dies is started once more; all failures are
  reported together.
* A worker that dies after an answer is started again at once, without limit, and has a fresh budget. One that
  dies before it was ready, or without an answer, is started again the first time at once, then with
  back-off, within a budget per window of time. Past the budget, each start is a probe, at the longest
  back-off. A probe that is ready serves, with a fresh budget; if it dies without an answer within the longest
  back-off from then on, the next is a probe again.
* While every worker is past its budget, the pool's circuit is open: requests fail at once, with the cause.
* The master asks a worker that hangs for its stacks and kills it a moment later.
* Workers are replaced one at a time, those past their budget first; one that serves, while all others serve.
* A process that is ended for a fault of none of its own (it was asked to end, or cannot go on without another
  worker) costs nothing of the budget, and no run of it is blamed.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import Protocol

from mcinfer.config import Limits, RestartPolicy, Timeouts
from mcinfer.errors import (
    BuildError,
    ClosedError,
    McinferError,
    MissingDependencyError,
    RankDiedError,
    WorkerDiedError,
    say_once,
)
from mcinfer.protocol import (
    Build,
    BuildFinish,
    Error,
    Exit,
    Message,
    Preparing,
    WorkerState,
    state_after,
)
from mcinfer.scheduler.queue import ShardId
from mcinfer.statistics import Health, HealthState, WorkerStatistics

MAX_FIRST_DEATHS = 2  # of a worker's processes, before one has the model

LONGEST_START = 4 * 3600.0
"""Seconds that a start may take in all, however much progress a worker reports."""

MAX_TEXT = 4000  # characters of a worker's error that are kept
MAX_STOPPED = 5  # looks in a row, a second apart, that find a worker with runs stopped
STACKS_SECONDS = 0.2  # between asking a worker that hangs for its stacks, and its end

SHORTEST_PROBE = 0.1
"""Seconds between a death and a start past the budget, at the least: no policy makes that a busy loop."""

IN_COMMON = ("inputs", "outputs", "weights", "model")
"""What all workers report alike."""

_STARTING = (WorkerState.SPAWNED, WorkerState.CONNECTED, WorkerState.BUILDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRules:
    """What the user wants of a pool.

    Attributes:
        tracing: Whether the entries of settled requests say what became of their shards.
    """

    timeouts: Timeouts
    restart: RestartPolicy
    limits: Limits
    max_batch_size: int = 1
    max_delay: float = 0.0
    tracing: bool = False


@dataclass(slots=True, eq=False)
class Run:
    """What a worker gets at once.

    Attributes:
        members: Request and shard of each.
        sent: When it got them.
        wide: Whether it may use the cores of all workers.
        stop_by: When it must have ended, since no caller waits for it any more; infinite before.
    """

    members: tuple[ShardId, ...]
    sent: float
    wide: bool = False
    stop_by: float = math.inf


class Stop(Enum):
    """How a worker's process is to end; the next one begins with NONE."""

    NONE = auto()
    AFTER_RUNS = auto()
    """It ends after its last answer, to be replaced."""
    KILLED = auto()
    """It will be killed, or was; messages that it sent before may still come."""
    HUNG = auto()
    """As KILLED, because it did not stop a run that no caller waits for: none of the others is to blame."""


@dataclass(slots=True)
class Start:
    """How a worker's process comes to have its model, and what went wrong with that.

    Attributes:
        latest: When it must have the model, even if it reports progress.
        progress: What it reported last: seconds and bytes.
        succeeded: Whether a process of the worker had the model once.
        deaths: How those ended that died before the first success.
        failure: Why there is no success.
        lacks: Whether that is because a package is missing.
    """

    latest: float = math.inf
    progress: tuple[float, int] = (-1.0, -1)
    succeeded: bool = False
    deaths: list[str] = field(default_factory=list)
    failure: str | None = None
    lacks: bool = False


@dataclass(slots=True)
class Budget:
    """How often a worker may be started again, and how soon.

    Attributes:
        starts: When it was started again, within the policy's window.
        spent: No start is left, and no probe (a start past the budget) has had the model yet.
        trial_end: Until when a death makes it `spent` at once: a probe has just had the model.
    """

    policy: RestartPolicy
    starts: deque[float] = field(default_factory=deque)
    spent: bool = False
    trial_end: float = -math.inf

    @property
    def probe_delay(self) -> float:
        """Seconds between a death and a probe, and for which a probe must live to be well."""
        return max(self.policy.backoff_limit, SHORTEST_PROBE)

    def renew(self) -> None:
        self.spent = False
        self.trial_end = -math.inf
        self.starts.clear()

    def begin_trial(self, now: float) -> None:
        """A probe has the model."""
        self.renew()
        self.trial_end = now + self.probe_delay

    def next_start(self, now: float) -> float:
        """When to start again after a death without an answer; it takes one start."""
        while self.starts and self.starts[0] <= now - self.policy.window:
            self.starts.popleft()
        earlier = len(self.starts)
        # Once spent, a worker stays so, however many starts have left the window: else the circuit would
        # close, and requests wait, with no worker that serves.
        self.spent = self.spent or earlier >= self.policy.budget or now < self.trial_end
        if self.spent:
            return now + self.probe_delay
        self.starts.append(now + self.policy.delay(earlier))
        return self.starts[-1]


@dataclass(slots=True)
class Counts:
    """What a worker's processes have done together; see `WorkerStatistics`."""

    restarts: int = 0
    runs: int = 0
    wide: int = 0
    completed: int = 0
    failed: int = 0
    busy_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Worker:
    """One worker's place in the pool; it stays through restarts of the process.

    A group of ranks is one worker here: it starts, runs, ends and restarts as a whole. Its `pid` is that of
    rank 0.

    Attributes:
        state: The process's place in `TRANSITIONS`.
        stop: How the process is to end.
        kill_at: When to kill it unless it has its model, has answered or has ended by then; infinite if there
            is no reason, as the rest.
        is_planned: Whether its end is no fault of its own, and costs nothing.
        end_by: When it must have ended, if it was asked to.
        restart_at: When to start the next one.
        answers: How many shards the process has answered, with a result or an error.
        stopped: How often in a row it was seen stopped by a signal, with runs; and `answers` then.
        runs: What it has to run, in the order in which runs begin; see `begun`.
        began: When the current run began, or the latest, as far as can be known.
        usual_seconds: How long its runs take.
        wide_deaths: How many processes in a row have died in a wide run, with no answer of one between.
        capacity: How many runs it may have at a time.
        depth: How many runs it works on at a time; only those above that number wait behind others.
        concurrent: How many runs it executes at once, each of which it may answer first. A pipeline has one,
            and a larger depth: its ranks answer in the order of the runs.
        last_error: What went wrong last.
    """

    index: int
    build: Build
    budget: Budget
    capacity: int
    depth: int
    state: WorkerState = WorkerState.GONE
    pid: int | None = None
    stop: Stop = Stop.NONE
    kill_at: float = math.inf
    is_planned: bool = False
    end_by: float = math.inf
    restart_at: float = math.inf
    answers: int = 0
    stopped: tuple[int, int] = (0, 0)
    runs: deque[Run] = field(default_factory=deque)
    began: float = 0.0
    usual_seconds: float = math.inf
    wide_deaths: int = 0
    concurrent: int = 1
    start: Start = field(default_factory=Start)
    counts: Counts = field(default_factory=Counts)
    providers: tuple[str, ...] = ()
    last_error: str = ""

    @property
    def is_killed(self) -> bool:
        """Whether the process will be killed, or was."""
        return self.stop in (Stop.KILLED, Stop.HUNG)

    @property
    def is_to_start(self) -> bool:
        """Whether its process was ordered, and does not run yet."""
        return self.state is WorkerState.SPAWNED and self.pid is None

    @property
    def death_error(self) -> type[WorkerDiedError]:
        """The class of the error of a request that it died on."""
        return RankDiedError if self.build.ranks > 1 else WorkerDiedError

    @property
    def serves(self) -> bool:
        """Whether it takes requests, now or after its current run."""
        ready = self.state in (WorkerState.READY, WorkerState.BUSY)
        return ready and self.stop is Stop.NONE

    def begun(self) -> list[Run]:
        """The runs that it executes; those behind them have not begun."""
        return [*islice(self.runs, self.concurrent)]

    def find_begun(self, request: int | None, shard: int | None) -> Run | None:
        """The run of these, if it can have ended by now."""
        member = request, shard
        return next((run for run in self.begun() if run.members[0] == member), None)

    def note_kill(self, reason: str) -> None:
        """It is being killed. Messages that it sent before may come until its death is reported."""
        self.stop = Stop.KILLED
        self.last_error = reason

    def plan_restart(self, death: str, now: float) -> None:
        """Choose when to start it again after a death of its own; `death`, in words.

        Never, if that was the last try of its first start, which has failed by then.
        """
        if self.start.succeeded and self.answers:
            # It loads and runs the model. Another worker that cannot, keeps its back-off.
            self.budget.renew()
            self.restart_at = now
        elif self.start.succeeded:
            self.restart_at = self.budget.next_start(now)
        elif self.start.failure is None:  # else it was reported
            self.start.deaths.append(death)
            if len(self.start.deaths) < MAX_FIRST_DEATHS:
                self.restart_at = now
            else:
                self.start.failure = "; ".join(self.start.deaths)

    @property
    def name(self) -> str:
        pid = "" if self.pid is None else f", pid {self.pid}"
        ranks = self.build.ranks
        what = f"worker {self.index}" if ranks == 1 else f"group {self.index} of {ranks} ranks"
        return f"{what} ({self.build.device}{pid})"


class WorkerSink(Protocol):
    """What the scheduler orders about workers, and its news of the pool; see `scheduler.py`."""

    def start_worker(self, worker: int, /) -> None:
        """Start this worker's process, when it may; `Scheduler.handle_started` or `handle_died` follows."""

    def send(self, worker: int, message: Message, /) -> None: ...

    def ask_for_stacks(self, worker: int, /) -> None:
        """The worker hangs and will be killed: make it write its stacks first, if it still can."""

    def kill_worker(self, worker: int, /) -> None: ...

    def announce(self, health: Health, planned: bool, /) -> None:
        """The pool's state or its number of serving workers changed; `planned`: by a replacement alone."""

    def pool_started(self, error: McinferError | None, /) -> None:
        """Every worker is ready, or the start failed: `Scheduler.handle_close` follows."""

    def workers_restarted(self, error: McinferError | None, /) -> None:
        """All workers were replaced, or one could not be (error)."""

    def pool_closed(self, abandoned: tuple[int, ...], /) -> None:
        """No worker is left, but for those that did not end in time although they were killed."""


class Lifecycle:
    """How all workers of a pool start, end and are replaced.

    Attributes:
        is_steady: Whether an answer changes nothing here: all workers were well in the last report, and none
            is being replaced.
        specs: What the first worker reported of the model; None before.
        started: Whether all workers had the model once.
        closing: Whether the pool is ending, so that no worker is started or replaced.
    """

    def __init__(self, builds: Sequence[Build], sink: WorkerSink, rules: PoolRules) -> None:
        self._sink = sink
        self.workers = [
            Worker(i, build, Budget(rules.restart), capacity=build.depth, depth=build.depth)
            for i, build in enumerate(builds)
        ]
        self.specs: BuildFinish | None = None
        self.started = False
        self.closing = False
        self._timeouts = rules.timeouts
        self._restart = rules.restart
        self._to_replace: deque[Worker] = deque()
        self._replacing: Worker | None = None
        # By worker, the process that a caller wants replaced.
        self._asked_for: dict[int, int | None] = {}
        self._announced: tuple[HealthState, int] = ("starting", 0)
        self.is_steady = False

    # Questions.

    @property
    def circuit_open(self) -> bool:
        """Whether requests fail at once: no worker serves, and none has a start left within its budget."""
        return all(w.budget.spent for w in self.workers)

    def outage(self, now: float) -> WorkerDiedError:
        """The error of a request while the circuit is open."""
        dues = [w.restart_at for w in self.workers]
        if max(dues) < math.inf:
            probe = f"the next start is in {max(0.0, min(dues) - now):.1f} s"
        else:
            probe = "a start is under way"
        stories = say_once(w.last_error for w in self.workers)
        return self.workers[0].death_error(
            f"no worker serves, the restart budget is spent, and {probe}: {stories}"
        )

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        return tuple(
            WorkerStatistics(
                index=w.index,
                device=w.build.device,
                pid=w.pid,
                state=str(w.state),
                providers=w.providers,
                last_error=w.last_error,
                concurrent=w.concurrent,
                **asdict(w.counts),
            )
            for w in self.workers
        )

    def health(self, now: float) -> Health:
        reasons = tuple(filter(None, (self._why_not(w, now) for w in self.workers)))
        state: HealthState = "degraded" if reasons else "ready"
        if not self.started:
            state = "starting"
        elif self.circuit_open:
            state = "failed"
        serving = sum(w.serves for w in self.workers)
        return Health(state=state, reasons=reasons, serving=serving, workers=len(self.workers))

    def _why_not(self, w: Worker, now: float) -> str:
        """Why a worker does not serve, or may not; empty if it does."""
        after = f": {w.last_error}" if w.last_error and not self.closing else ""
        if w.state is WorkerState.GONE:
            if w.restart_at == math.inf:
                return f"{w.name} is not started"
            wait = f"{max(0.0, w.restart_at - now):.1f} s"
            if w.budget.spent:
                budget = f"{self._restart.budget} restarts within {self._restart.window:g} s"
                return f"{w.name} is past its budget of {budget}, next start in {wait}{after}"
            return f"{w.name} starts again in {wait}{after}"
        if w.is_killed:
            return f"{w.name} is being ended{after}"
        if w.stop is Stop.AFTER_RUNS:
            return f"{w.name} is being replaced"
        if w.is_to_start:
            return f"{w.name} is to be started{after}"
        if w.state in _STARTING:
            return f"{w.name} is starting ({w.state}){after}"
        if w.state is WorkerState.EXITING:
            return f"{w.name} is ending{after}"
        # Most stop at once: nothing is wrong before half of the time for it is over.
        if w.kill_at < math.inf and w.kill_at - now <= self._timeouts.cancel_grace / 2:
            return f"{w.name} has not stopped a run that no caller waits for any more"
        return ""

    def announce(self, now: float) -> None:
        """Report the pool's health, if it changed since the last report."""
        health, before = self.health(now), self._announced
        if not self.closing:
            self._announced = (health.state, health.serving)
        self.is_steady = self._announced[0] == "ready" and not self.is_replacing
        if self._announced != before:
            planned = all(w.serves or w is self._replacing for w in self.workers)
            self._sink.announce(health, planned)

    # Starting.

    def start(self, w: Worker) -> None:
        w.state, w.stop = WorkerState.SPAWNED, Stop.NONE
        w.answers, w.stopped = 0, (0, 0)
        w.restart_at = math.inf
        self._sink.start_worker(w.index)

    def note_start(self, w: Worker, pid: int, now: float) -> None:
        """Its process runs: from now on it has time to load the model, and more while it reports progress."""
        w.pid = pid
        w.kill_at = now + self._timeouts.start
        w.start.latest = w.kill_at + LONGEST_START
        w.start.progress = (-1.0, -1)

    def send(self, w: Worker, message: Message) -> None:
        w.state = state_after(w.state, type(message))
        self._sink.send(w.index, message)

    def finish_build(self, w: Worker, message: BuildFinish, now: float) -> None:
        if w.is_killed:
            return
        w.kill_at = math.inf
        w.providers = message.providers
        # The ranks of a group answer in order.
        w.concurrent = message.concurrent if w.build.ranks == 1 else 1
        w.capacity = w.depth = max(w.build.depth, w.concurrent)
        if self.specs is None:
            self.specs = message
        elif any(getattr(message, name) != getattr(self.specs, name) for name in IN_COMMON):
            w.start.failure = (
                f"{w.name}: its model's content, inputs, outputs or weights are not those of the "
                "others"
            )
            self.kill(w, w.start.failure)
            self.finish_start()
            return
        if w.budget.spent:
            w.budget.begin_trial(now)
        w.start.succeeded = True
        self.finish_start()

    def fail_build(self, w: Worker, message: Error, now: float) -> None:
        """The model does not load: final in the first start, later a death like others."""
        w.last_error = message.text[:MAX_TEXT]
        w.start.failure = f"{w.name}: {w.last_error}"
        w.start.lacks = message.kind == "missing"
        w.kill_at = now + self._timeouts.cancel_grace
        self.send(w, Exit())
        self.finish_start()

    def extend_start(self, w: Worker, message: Preparing, now: float) -> None:
        """Give a start that makes progress more time."""
        progress = (message.seconds, message.written)
        if progress > w.start.progress and not w.is_killed:
            w.start.progress = progress
            w.kill_at = min(now + self._timeouts.start, w.start.latest)

    def finish_start(self) -> None:
        """Report the first start when every worker has its model, or all that run have that or a failure."""
        if self.started or self.closing:
            return
        if not all(w.start.succeeded or w.start.failure or w.is_to_start for w in self.workers):
            return
        failed = [w.start for w in self.workers if w.start.failure is not None]
        if failed:
            kind = MissingDependencyError if all(start.lacks for start in failed) else BuildError
            self.closing = True
            self._sink.pool_started(kind(say_once(start.failure or "" for start in failed)))
        elif not any(w.is_to_start for w in self.workers):
            self.started = True
            self._sink.pool_started(None)

    # Ending.

    def kill(self, w: Worker, reason: str) -> None:
        w.note_kill(reason)
        self._sink.kill_worker(w.index)

    def note_standing(self, w: Worker, *, stopped: bool) -> None:
        """How a look found its process. One that stays stopped has its runs given to others."""
        times, answers = w.stopped
        times = (times if answers == w.answers else 0) + 1 if stopped and w.runs else 0
        w.stopped = times, w.answers
        if times == MAX_STOPPED and not w.is_killed:
            self.kill(w, f"{w.name}: stopped by a signal")

    def end_when_idle(self, w: Worker, now: float, seconds: float) -> None:
        """Ask a worker to end after its last answer, within so many seconds."""
        w.is_planned = True
        w.end_by = now + seconds
        w.kill_at = min(w.end_by, w.kill_at)  # no later, if it does not stop a run
        self.send(w, Exit())

    def handle_time(self, w: Worker, now: float) -> None:
        if w.restart_at <= now:
            w.counts.restarts += 1
            self.start(w)
        elif w.kill_at <= now:
            w.kill_at = math.inf
            if not w.is_killed:
                reason = "did not stop in time"
                if w.state in _STARTING:
                    reason = f"not ready within {self._timeouts.start:g} s (it was {w.state})"
                elif w.state is WorkerState.EXITING and not w.is_planned:
                    reason += f" after: {w.last_error}"  # the model did not load
                self._end_hung(w, f"{w.name}: {reason}", now)
                return
            self._sink.kill_worker(w.index)
            if not w.start.succeeded:
                w.start.failure = w.start.failure or w.last_error
                self.finish_start()

    def _end_hung(self, w: Worker, reason: str, now: float) -> None:
        """End a worker that hangs: get its stacks, then kill it, even if it answers in between."""
        w.note_kill(reason)
        w.stop = Stop.HUNG
        w.kill_at = now + STACKS_SECONDS
        self._sink.ask_for_stacks(w.index)

    def note_end(self, w: Worker, how: str, now: float) -> str:
        """A worker's process is gone: note it, and plan the next; return its end in words."""
        story = f"{w.name} {how}"
        cause = w.last_error if w.is_killed or w.state is WorkerState.EXITING else ""
        planned, w.is_planned = w.is_planned, False  # also if it had to be killed at the end
        before = w.state
        w.state = WorkerState.GONE
        w.usual_seconds, w.capacity = math.inf, w.depth
        w.pid = None
        w.kill_at = w.end_by = math.inf
        if w.stop is Stop.AFTER_RUNS:
            w.stop = Stop.NONE  # there is nothing left to replace
        if self.closing:
            return story
        if w in self._to_replace and w.index not in self._asked_for:
            self._to_replace.remove(w)  # what was to be recycled is gone; its budget stays as it is
        if planned:
            w.restart_at = now + (w.budget.probe_delay if w.budget.spent else 0.0)
            return story
        w.last_error = f"{story} after: {cause}" if cause else story
        w.plan_restart(f"{story} while {before}", now)
        return story

    # Replacing.

    @property
    def is_replacing(self) -> bool:
        return self._replacing is not None or bool(self._to_replace)

    def replace(self, workers: Sequence[Worker], *, asked_for: bool = False) -> None:
        """Plan to replace these processes in turn (`advance`); `asked_for`: a caller waits for it."""
        for w in workers:
            if asked_for:
                self._asked_for[w.index] = w.pid
            if w not in self._to_replace and w is not self._replacing:
                self._to_replace.append(w)
                self.is_steady = False

    def forget_replacing(self) -> None:
        self._asked_for.clear()
        self._to_replace.clear()

    def recycle_if_due(self, w: Worker, own_bytes: int = 0) -> None:
        """Plan to replace a worker that has answered, or grown, as much as the policy allows."""
        most_answers, most_bytes = self._restart.max_requests, self._restart.max_memory_bytes
        is_due = most_answers is not None and w.answers >= most_answers
        if w.budget.spent:
            return  # a probe in progress; a later check decides
        if is_due or (most_bytes is not None and own_bytes > most_bytes):
            self.replace([w])

    def advance(self, now: float) -> None:
        """Continue the replacements as far as possible now."""
        while not self.closing:
            w = self._replacing or self._begin_replacing()
            if w is None:
                return
            if w.stop is Stop.AFTER_RUNS and w.state is WorkerState.READY:
                self.end_when_idle(w, now, self._timeouts.close)
            if not (w.serves or w.budget.spent):
                return
            self._replacing = None
            if w.index not in self._asked_for:
                continue
            del self._asked_for[w.index]
            if w.budget.spent:
                self.forget_replacing()
                self._sink.workers_restarted(WorkerDiedError(w.last_error))
            elif not self._asked_for:
                self._sink.workers_restarted(None)

    def _begin_replacing(self) -> Worker | None:
        """Take the next worker that may be replaced now: the failure of one must not end the service.

        The one that was started first goes first: others may use the weights that it made, and end with it.
        """
        waiting = self._to_replace
        w = min(waiting, key=lambda w: (not w.budget.spent, w.start.latest), default=None)
        if w is None or not all(
            o.serves or (o.budget.spent and not w.serves) for o in self.workers if o is not w
        ):
            return None
        self._to_replace.remove(w)
        self._replacing = w
        if w.budget.spent or w.state is WorkerState.GONE:
            w.budget.renew()
        if w.state is WorkerState.GONE:
            w.counts.restarts += 1
            self.start(w)
        elif w.stop is Stop.NONE and w.pid == self._asked_for.get(w.index, w.pid):
            # Else it was replaced since then, such as with another one that it cannot go on without.
            w.stop = Stop.AFTER_RUNS
        return w

    # Closing.

    def close(self, now: float, seconds: float) -> None:
        """End all workers; they get so many seconds to end by themselves, or less if that was said before."""
        self.closing = True
        if self._asked_for:
            self._sink.workers_restarted(ClosedError("the master was closed"))
        self.forget_replacing()
        for w in self.workers:
            w.restart_at = math.inf
            if w.state is WorkerState.GONE:
                continue
            if w.is_killed:
                self._sink.kill_worker(w.index)
            elif w.state in (WorkerState.READY, WorkerState.BUSY):
                self.end_when_idle(w, now, seconds)
            elif w.state is WorkerState.EXITING:
                w.end_by = min(now + seconds, w.end_by)
                w.kill_at = min(now + seconds, w.kill_at)
            else:
                self.kill(w, w.last_error)
            # One that had no time to end does not hang.
            if seconds == 0:
                w.stop = Stop.KILLED
