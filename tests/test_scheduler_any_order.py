"""A pool whose workers answer, fail, die and hang in any order, beside a model of what must hold."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mcinfer.config import Limits, RestartPolicy
from mcinfer.errors import ClosedError, McinferError, QueueFullError, WorkerDiedError
from mcinfer.protocol import (
    MAX_RUNS,
    Build,
    BuildFinish,
    Cancel,
    Error,
    Exit,
    Message,
    Predict,
    Reply,
    WorkerState,
)
from mcinfer.runtime.supervision import Sharing
from mcinfer.scheduler.dispatch import AHEAD_SECONDS, SHORT_RUN
from mcinfer.scheduler.queue import ShardId
from mcinfer.scheduler.scheduler import MAX_TRIES
from mcinfer.scheduler.workers import MAX_STOPPED, Stop
from mcinfer.statistics import RequestTrace
from tests.conversations import Conversation
from tests.orders import (
    RESTART,
    SIGKILL,
    SIGSEGV,
    TIMEOUTS,
    AskForStacks,
    KillWorker,
    Order,
    Pool,
    PoolClosed,
    PoolStarted,
    Release,
    Send,
    SendRun,
    Settle,
    StartWorker,
    WorkersRestarted,
    build,
    build_error,
    built,
    error,
    hello,
    reply,
)

QUEUE_LIMIT = 9
MAX_BYTES = 40
MAX_ROWS = 4


@dataclass
class _Process:
    """What a worker's process is to the model: messages on their way to it and from it."""

    deaf: bool = False
    alive: bool = True
    asked: bool = False  # for its stacks
    killed: bool = False
    conversation: Conversation = field(default_factory=Conversation)
    inbox: deque[Message] = field(default_factory=deque)
    outbox: deque[Message] = field(default_factory=deque)
    planned: bool = False  # killed for another's sake
    cancels: deque[ShardId] = field(default_factory=deque)  # of a socket of their own
    cancelled: set[ShardId] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        """Whether its death can be noticed: by itself, or killed."""
        return self.killed or not self.alive

    def say(self, message: Message) -> None:
        self.conversation.advance(message)
        self.outbox.append(message)


@dataclass
class _Asked:
    """What is known of a request from outside."""

    deadline: float
    rows: tuple[int, ...]
    join: tuple[str, int] | None
    due: float
    called: float
    size: int
    replies: dict[int, Reply] = field(default_factory=dict)
    given: Counter[int] = field(default_factory=Counter)
    settled: bool = False
    released: bool = False

    @property
    def shards(self) -> int:
        return len(self.rows)

    @property
    def runs(self) -> int:
        """How often a worker was given any of it."""
        return self.given.total()


JOINS = st.tuples(st.sampled_from("aaab"), st.integers(1, MAX_ROWS - 1))
_Asking = tuple[int, float, int, tuple[str, int] | None, int]
"""Shards, seconds, priority, with what it may be joined, and bytes."""


class Pools(RuleBasedStateMachine):
    """A shell with workers that answer, fail, die, hang, and are slow, in any order."""

    # What is drawn for each example.
    joins = False
    pipeline, concurrent = 1, 1
    shares, makes = False, True
    max_delay, seconds = 0.0, 0.001
    limits = Limits()
    at_once = 1

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.scheduler = Pool([], timeouts=TIMEOUTS, restart=RESTART, limits=Limits())
        self.sharing = Sharing()
        self.processes: dict[int, _Process] = {}
        self.running: dict[int, deque[tuple[ShardId, ...]]] = {}
        self.began: dict[int, float] = {}
        self.events = 0
        self.requests: dict[int, _Asked] = {}
        self.errors: dict[int, str] = {}
        self.poison: set[int] = set()
        self.deaths = Counter[ShardId]()  # of workers that had begun it
        self.started: bool | None = None
        self.is_draining = self.is_closing = self.is_closed = self.deaf_next = False
        self.to_replace: dict[int, _Process] | None = None
        self.died_at: dict[int, float] = {}

    @initialize(
        workers=st.integers(1, 3),
        start_at_once=st.sampled_from([True, True, True, True, True, False]),
        restart=st.builds(
            partial(replace, RESTART, max_memory_bytes=MAX_BYTES),
            budget=st.sampled_from([0, 1, 4, 99]),
            max_requests=st.sampled_from([None, None, None, None, 1, 3]),
        ),
        drawn=st.fixed_dictionaries(
            {
                "joins": st.sampled_from([False, False, False, True]),
                "max_delay": st.sampled_from([0.0, 0.3, 2.0]),
                "seconds": st.sampled_from([0.0, 0.001, 0.001, 0.01, 0.25]),
                "limits": st.builds(
                    partial(Limits, queue=QUEUE_LIMIT),
                    queue_bytes=st.sampled_from([None, None, None, MAX_BYTES]),
                ),
                "pipeline": st.sampled_from([1, 1, 1, 2, 3]),
                "concurrent": st.sampled_from([1, 1, 2, 3]),
                "shares": st.sampled_from([False, False, True]),
                "makes": st.sampled_from([True, True, True, False]),
            }
        ),
    )
    def start(
        self, workers: int, start_at_once: bool, restart: RestartPolicy, drawn: dict[str, Any]
    ) -> None:
        vars(self).update(drawn)
        self.at_once = self.concurrent if self.pipeline == 1 else 1
        self.scheduler = Pool(
            [build(i, self.pipeline) for i in range(workers)],
            timeouts=TIMEOUTS,
            restart=restart,
            limits=self.limits,
            max_batch_size=MAX_ROWS if self.joins else 1,
            max_delay=self.max_delay,
            tracing=True,
        )
        self.carry_out(self.scheduler.handle_start(self.now))
        if start_at_once:
            self.play()
            assert self.started
            self.request(workers)  # and it is known how long runs take
            self.play()

    # What the shell does.

    def carry_out(self, actions: Sequence[Order]) -> None:
        self.events += 1
        pending, start_failed = deque(actions), False
        while pending:
            match pending.popleft():
                case StartWorker(worker=worker):
                    assert worker not in self.processes
                    assert not self.is_closing
                    if self.scheduler.workers[worker].budget.spent:
                        probe = self.died_at[worker] + RESTART.backoff_limit
                        assert self.now >= probe, "a start past the budget that is too early"
                    self.sharing.order(worker)
                    pending += self.start_next()
                case SendRun(worker=worker, members=members):
                    self.check_run(worker, members)
                    runs = self.running.setdefault(worker, deque())
                    if not runs:
                        self.began[worker] = self.now
                    runs.append(members)
                    request, shard = members[0]
                    message = Predict(request=request, shard=shard, inputs=(), outputs=())
                    self.processes[worker].inbox.append(message)
                case Send(worker=worker, message=Cancel() as message):
                    self.note_cancel(worker, message)
                    self.processes[worker].cancels.append((message.request, message.shard))
                case Send(worker=worker, message=Exit()) if self.sharing.hold_exit(worker):
                    self.end_users()
                case Send(worker=worker, message=message):
                    self.processes[worker].inbox.append(message)
                case AskForStacks(worker=worker):
                    assert not self.processes[worker].asked, "asked for its stacks twice"
                    self.processes[worker].asked = True
                case KillWorker(worker=worker):
                    if worker in self.processes:
                        self.processes[worker].killed = True
                    else:
                        assert self.sharing.withdraw(worker)
                        pending += self.scheduler.handle_died(self.now, worker, "was not started")
                case Settle(request=request, error=exc):
                    asked = self.requests[request]
                    assert not asked.settled, "settled twice"
                    asked.settled = True
                    self.errors[request] = str(exc)
                    if exc is None:
                        assert len(asked.replies) == asked.shards
                    trace = self.scheduler.recorder.traces[request]
                    self.check_trace(asked, request, exc, trace)
                case Release(request=request):
                    asked = self.requests[request]
                    assert asked.settled, "released before it was settled"
                    assert not asked.released, "released twice"
                    assert request not in self.written(), "released while a worker may write"
                    asked.released = True
                case PoolStarted(error=exc):
                    assert self.started is None, "started twice"
                    self.started = exc is None
                    if exc is not None:
                        # After what was decided before it, which may be to start a worker.
                        start_failed = True
                        pending += self.scheduler.handle_close(self.now, 1.0)
                case WorkersRestarted(error=exc):
                    assert self.to_replace is not None, "no caller waits for that"
                    before, self.to_replace = self.to_replace, None
                    if exc is None:
                        assert not any(
                            self.processes.get(index) is old for index, old in before.items()
                        )
                case PoolClosed(abandoned=abandoned):
                    assert self.is_closing or self.is_draining or start_failed
                    assert not self.is_closed, "closed twice"
                    assert sorted(self.processes) == [*abandoned]
                    self.is_closed = True
        drained = self.is_draining and not self.open()
        self.is_closing = self.is_closing or start_failed or drained

    def check_trace(
        self, asked: _Asked, request: int, exc: McinferError | None, trace: RequestTrace
    ) -> None:
        """Fail unless this is what became of the request, as seen from outside."""
        assert (trace.request, trace.error, trace.rows) == (request, exc, sum(asked.rows))
        assert (trace.outcome == "succeeded") == (exc is None)
        assert trace.called == asked.called
        assert trace.called <= trace.queued <= trace.settled == self.now
        assert sorted(run.shard for run in trace.shards) == sorted(asked.replies)
        for run in trace.shards:
            assert trace.queued <= run.sent <= run.answered <= trace.settled
            assert run.attempts == asked.given[run.shard]
            assert run.rows == asked.rows[run.shard]
            assert run.run_seconds == min(asked.replies[run.shard].seconds, run.answered - run.sent)

    def end_users(self) -> None:
        for user in self.sharing.users:
            if not self.scheduler.is_exiting(user):
                self.processes[user].killed = self.processes[user].planned = True
                self.scheduler.handle_killed(user, "it uses what another has made", planned=True)

    def start_next(self) -> list[Order]:
        """Start those that may; all may at once where they do not share their weights."""
        led_to: list[Order] = []
        self.sharing.apart |= not self.shares
        while (worker := self.sharing.next()) is not None:
            process = self.processes[worker] = _Process(deaf=self.deaf_next)
            self.deaf_next = False
            led_to += self.scheduler.handle_started(self.now, worker, 100 + worker)
            process.say(hello(worker))
        return led_to

    def check_run(self, worker: int, members: tuple[ShardId, ...]) -> None:
        """Fail unless these may go now, and together."""
        ahead = [*self.running.get(worker, ())]
        if ahead:
            assert len(ahead) < min(MAX_RUNS, self.scheduler.workers[worker].capacity)
            if len(ahead) >= self.depth:
                joining = self.scheduler.joining
                delays = self.max_delay > 0 and not (self.is_draining or self.is_closing)
                assert not (joining.joins and (joining.share > 1 or delays))
                usual = self.scheduler.workers[worker].usual_seconds
                assert self.now - self.began[worker] <= usual + AHEAD_SECONDS
            assert not any(map(self.deaths.get, members)), (
                "beside others, where a worker died on it"
            )
        assert not self.processes[worker].killed
        assert not self.processes[worker].asked
        assert len({*members}) == len(members)
        others = [run for runs in self.running.values() for run in runs]
        at_work = {member for run in others for member in run}
        for request, shard in members:
            asked = self.requests[request]
            assert not asked.settled
            assert shard not in asked.replies
            assert (request, shard) not in at_work
            if len(members) > 1:
                assert asked.runs == 0, "a shard that had its turn goes alone"
            asked.given[shard] += 1
        if len(members) > 1:
            joins = [asked.join for asked in map(self.asked, members) if asked.join is not None]
            assert len(joins) == len(members)
            assert len({key for key, _ in joins}) == 1
            assert sum(rows for _, rows in joins) <= MAX_ROWS

    def note_cancel(self, worker: int, message: Cancel) -> None:
        """Fail unless the run is not wanted any more, or a request that was joined in it is out of time."""
        key = (message.request, message.shard)
        [run] = [run for run in self.running[worker] if run[0] == key]
        settled = [asked for asked in map(self.asked, run) if asked.settled]
        if len(settled) < len(run):
            assert any(asked.deadline <= self.now for asked in settled), "others want this run"

    @property
    def depth(self) -> int:
        """How many runs a worker works on at a time."""
        return self.at_once if self.pipeline == 1 else self.pipeline + 1

    def asked(self, member: ShardId) -> _Asked:
        return self.requests[member[0]]

    def written(self) -> set[int]:
        """The requests that a worker has a shard of."""
        return {r for runs in self.running.values() for run in runs for r, _ in run}

    @property
    def circuit_open(self) -> bool:
        return all(w.budget.spent for w in self.scheduler.workers)

    def open(self) -> set[int]:
        return {number for number, asked in self.requests.items() if not asked.settled}

    def deliver(self, worker: int) -> None:
        """The oldest message of the worker reaches the scheduler."""
        message = self.processes[worker].outbox.popleft()
        run: tuple[ShardId, ...] = ()
        if self.running.get(worker) and isinstance(message, (Reply, Error)):
            key = (message.request, message.shard)
            begun = [*self.running[worker]][: self.at_once]
            [run] = [run for run in begun if run[0] == key]
            self.running[worker].remove(run)
            self.began[worker] = self.now
            if isinstance(message, Reply):
                for request, shard in run:
                    self.requests[request].replies[shard] = message
        before = self.open()
        self.carry_out(self.scheduler.handle_message(self.now, worker, message))
        if isinstance(message, BuildFinish) and self.shares and worker == self.sharing.maker:
            self.sharing.note_made(self.makes)
            self.carry_out(self.start_next())
        settled = before - self.open()
        if getattr(message, "kind", "") == "cancelled":
            assert not settled
        elif run:
            # All that were joined are answered, or none: it is not known which of them was to blame.
            wanted = {request for request, _ in run}
            many = len(run) > 1
            assert settled <= wanted
            assert not many or settled == (before & wanted if isinstance(message, Reply) else set())

    def end(self, worker: int) -> None:
        """The end of the worker's process is noticed; what it sent before and was not read is lost."""
        process = self.processes.pop(worker)
        self.died_at[worker] = self.now
        runs, before = self.running.pop(worker, deque()), self.open()
        blamed: set[int] = set()
        if self.sharing.note_end(worker):
            self.end_users()
        if not (process.planned or process.asked):
            # Else the end of another worker is to blame, or the run that did not stop.
            for run in [*runs][: self.depth]:
                self.deaths.update(run)
                blamed |= {member[0] for member in run if self.deaths[member] == MAX_TRIES}
        how = SIGKILL if process.killed else SIGSEGV
        self.carry_out(self.scheduler.handle_died(self.now, worker, how))
        if (maker := self.sharing.take_exit()) is not None:
            self.processes[maker].inbox.append(Exit())
        self.carry_out(self.start_next())
        # The circuit may be closed again by now: a worker that is to be replaced has a new budget.
        lost = {n for n in before - self.open() if "budget is spent" not in self.errors[n]}
        assert lost <= blamed or self.is_closing

    def work(self, worker: int, fail: str | None = None) -> None:
        """The worker's main loop goes one step on: end its run, or take its next message."""
        process = self.processes[worker]
        if process.conversation.runs:
            begun = [*process.conversation.runs][: self.at_once]
            request, shard = key = begun[self.events % len(begun)]
            if key in process.cancelled:
                process.cancelled.discard(key)
                fail = "cancelled"
            elif request in self.poison:
                process.alive = False
                return
            answer = reply(request, shard, seconds=self.seconds)
            process.say(answer if fail is None else error(request, shard, fail))
        elif process.inbox:
            while process.inbox:  # all that is there: runs wait in the worker
                message = process.inbox.popleft()
                process.conversation.advance(message)
                if isinstance(message, Build):
                    process.say(built(self.at_once) if fail is None else build_error())
                elif isinstance(message, Exit):
                    process.alive = False

    def hear(self, worker: int) -> None:
        """The worker's canceller takes the next; one that comes after the answer is kept."""
        process = self.processes[worker]
        process.cancelled.add(process.cancels.popleft())

    def idle(self, worker: int) -> bool:
        process = self.processes[worker]
        at_work = process.inbox or process.conversation.runs
        return process.deaf or process.ended or not at_work

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.scheduler.handle_time(self.now))
        due = self.scheduler.next_time()
        assert due > self.now, "something that was due was not done"
        assert self.scheduler.due == due
        health = self.scheduler.health(self.now)
        if health.state not in ("starting", "closing", "closed"):
            last = self.scheduler.announced[-1]
            assert (last.state, last.serving) == (health.state, health.serving)

    def play(self) -> None:
        """Workers follow their messages, and time passes, until nothing happens any more."""
        for _ in range(2000):
            busy = False
            for worker in [*self.processes]:
                process = self.processes[worker]
                if process.outbox:
                    self.deliver(worker)
                elif process.ended:
                    self.end(worker)
                elif process.cancels and not process.deaf:
                    self.hear(worker)
                elif not self.idle(worker):
                    self.work(worker)
                else:
                    continue
                busy = True
            due = self.scheduler.next_time()
            if not busy and due == math.inf:
                return
            if not busy:
                self.pass_time(max(0.0, due - self.now))
        raise AssertionError("the pool never comes to rest")

    # What may happen. Few rules that do much: Hypothesis leaves some rules out of each run.

    @rule(
        requests=st.lists(
            st.tuples(
                st.sampled_from([1, 1, 1, 2, 5]),
                st.sampled_from([20.0, 3.0, 0.4, 0.03, 0.0, math.inf]),
                st.sampled_from([0, 0, 1, -1]),
                st.none() | JOINS | JOINS,
                st.sampled_from([0, 1, 15, MAX_BYTES + 1]),
            ),
            max_size=8,
        ),
        choices=st.lists(st.integers(0, 11), min_size=1, max_size=12),
        fail=st.sampled_from([None, None, "predict", "invalid"]),
    )
    def pool_goes_on(self, requests: list[_Asking], choices: list[int], fail: str | None) -> None:
        """Requests come, and some of what is under way comes to pass; one run or build may fail."""
        for asking in requests if self.started else ():
            self.request(*asking)
        for choice in choices:
            alive = self.processes.items()
            steps = [partial(self.deliver, w) for w, p in alive if p.outbox]
            steps += [partial(self.end, w) for w, p in alive if p.ended]
            steps += [partial(self.hear, w) for w, p in alive if p.cancels and not p.deaf]
            steps += [partial(self.work, w, fail) for w in self.processes if not self.idle(w)]
            if steps:
                step = steps[choice % len(steps)]
                step()
                fail = None if step.func == self.work else fail

    def request(
        self,
        shards: int,
        timeout: float = 20.0,
        priority: int = 0,
        join: tuple[str, int] | None = None,
        size: int = 0,
    ) -> None:
        number = len(self.requests)
        join = join if self.joins else None
        rows = (2,) * shards if join is None else (join[1],)
        due = self.now + min(self.max_delay, timeout / 2)
        taken = sum(self.requests[n].size for n in self.open())
        most = math.inf if self.limits.queue_bytes is None else self.limits.queue_bytes
        limited = number % 4 > 0
        ends = self.is_closing or (self.is_draining and limited)
        full = len(self.open()) >= self.limits.queue or (taken and taken + size > most)
        full = full and limited
        asked = _Asked(self.now + timeout, rows, join, due, self.now, size)
        self.requests[number] = asked
        options: dict[str, Any] = {
            "size": size,
            "priority": priority,
            "join": join,
            "limited": limited,
        }
        try:
            actions = self.scheduler.handle_request(self.now, number, rows, timeout, **options)
        except ClosedError:
            del self.requests[number]
            assert ends
            return
        except QueueFullError:
            del self.requests[number]
            assert full
            return
        except WorkerDiedError:
            del self.requests[number]
            assert self.circuit_open
            return
        assert not full
        assert not ends
        assert not self.circuit_open
        self.carry_out(actions)

    @precondition(lambda self: self.started)
    @rule(
        shards=st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=1, max_size=6),
        is_slow=st.booleans(),
        order=st.lists(st.integers(0, 5), max_size=12),
    )
    def all_is_well(self, shards: list[int], is_slow: bool, order: list[int]) -> None:
        """Requests come, runs may take long, and workers answer."""
        for count in shards:
            self.request(count)
        if is_slow:
            self.pass_time(2 * SHORT_RUN)
            self.request(1)  # which is put behind none of them
        for choice in order:
            steps = [w for w, p in self.processes.items() if p.outbox or not self.idle(w)]
            if steps:
                worker = steps[choice % len(steps)]
                process = self.processes[worker]
                if process.outbox:
                    self.deliver(worker)
                elif process.cancels and choice % 2:
                    self.hear(worker)
                else:
                    self.work(worker)

    @rule(
        trouble=st.sampled_from(
            [
                *("dies", "dies", "dies", "all die", "hangs", "next hangs", "poison", "poison"),
                *("cancel", "cancel", "close"),
                *("drain", "restart", "restart", "restart", "grows", "stopped"),
            ]
        ),
        which=st.integers(0, 11),
    )
    def trouble_comes(self, trouble: str, which: int) -> None:
        """A worker dies, or never says anything again; a caller cancels, or closes the pool."""
        alive = [process for process in self.processes.values() if process.alive]
        if trouble == "dies" and alive:
            alive[which % len(alive)].alive = False
        elif trouble == "all die":
            for worker in [*self.processes]:
                self.processes[worker].alive = False
                self.end(worker)
        elif trouble == "hangs" and alive:
            alive[which % len(alive)].deaf = True
        elif trouble == "next hangs":
            self.deaf_next = True
        elif trouble == "poison" and self.requests:
            self.poison.add(len(self.requests) - 1 - which % len(self.requests))
        elif trouble == "cancel" and self.requests:
            number = len(self.requests) - 1 - which % len(self.requests)
            self.carry_out(self.scheduler.handle_cancel(self.now, number))
            assert self.requests[number].settled
        elif trouble == "close" and which < 3 and not self.is_closing:
            self.close(float(which))
        elif trouble == "drain" and which < 6 and self.started and not self.is_closing:
            self.is_draining = True
            seconds = math.inf if which < 3 else float(which)
            self.carry_out(self.scheduler.handle_drain(self.now, seconds))
        else:
            self.workers_are_replaced(trouble, which)

    def workers_are_replaced(self, trouble: str, which: int) -> None:
        """A caller wants new processes, or one has grown."""
        if trouble == "restart" and self.started:
            before = self.to_replace
            try:
                # One that is replaced already is not replaced twice; another caller may wait for the same.
                serving = [w.index for w in self.scheduler.workers if w.serves]
                self.to_replace = {**(before or {}), **{w: self.processes[w] for w in serving}}
                self.carry_out(self.scheduler.handle_restart(self.now))
            except ClosedError:
                assert self.is_closing or self.is_draining
                self.to_replace = before
        elif trouble == "stopped" and self.processes:
            worker = [*self.processes][which % len(self.processes)]
            for _ in range(1 + which % MAX_STOPPED):
                self.carry_out(self.scheduler.handle_standing(worker, stopped=True))
        elif trouble == "grows" and self.processes:
            worker = [*self.processes][which % len(self.processes)]
            size = MAX_BYTES + which % 2
            self.carry_out(self.scheduler.handle_own_memory(self.now, worker, size))

    @rule(seconds=st.sampled_from([None, 0.0, 0.005, 0.06, 0.3, 1.0, 5.0, 40.0]))
    def time_passes(self, seconds: float | None) -> None:
        """So many seconds, or until something is due."""
        due = self.scheduler.next_time()
        wait = 0.0 if due == math.inf else max(0.0, due - self.now)
        self.pass_time(wait if seconds is None else seconds)

    def close(self, timeout: float) -> None:
        self.is_closing = True
        self.carry_out(self.scheduler.handle_close(self.now, timeout))
        assert all(asked.settled for asked in self.requests.values())

    # What always holds.

    @invariant()
    def shell_looks_in_time(self) -> None:
        due = self.scheduler.next_time()
        assert self.scheduler.due <= due

    @invariant()
    def pool_is_steady_when_all_serve_and_none_is_replaced(self) -> None:
        announced, lifecycle = self.scheduler.announced, self.scheduler.lifecycle
        if not (self.is_draining or self.is_closing):
            ready = bool(announced) and announced[-1].state == "ready"
            assert lifecycle.is_steady == (ready and not lifecycle.is_replacing)

    @invariant()
    def every_request_is_counted_once(self) -> None:
        s = self.scheduler
        assert s.table.accepted == len(self.requests)
        assert (
            s.table.accepted
            == s.table.succeeded + s.table.failed + s.table.cancelled + s.table.in_flight
        )
        assert s.table.in_flight == len(self.open())

    @invariant()
    def every_open_shard_is_answered_running_or_queued(self) -> None:
        open_requests = {n: self.requests[n] for n in self.open()}
        shards = sum(asked.shards - len(asked.replies) for asked in open_requests.values())
        given = [run for runs in self.running.values() for run in runs]
        running = sum(request in open_requests for run in given for request, _ in run)
        assert len(self.scheduler.queue) == shards - running

    @invariant()
    def nothing_waits_while_a_worker_is_ready_but_what_is_held_for_others(self) -> None:
        ready = [w for w in self.scheduler.workers if w.state is WorkerState.READY]
        free = [self.processes[w.index] for w in ready]
        # Or it has a place beside other runs, unless one that goes beside none comes first.
        alone = any(map(self.deaths.get, self.scheduler.queue.items))
        is_free = any(not (process.killed or process.asked) for process in free)
        if not (is_free or (self.has_place() and not alone)):
            return
        due = self.scheduler.next_time()
        if (wait := self.scheduler.joining.due) < math.inf:
            assert self.joins
            assert self.scheduler.due <= due <= wait
            return
        rows = Counter[str]()
        for asked in map(self.asked, self.scheduler.queue.items):
            assert asked.join is not None
            assert asked.due > self.now
            assert asked.runs == 0
            rows[asked.join[0]] += asked.join[1]
            assert due < math.inf
            assert due <= asked.due
        assert all(count < MAX_ROWS for count in rows.values())

    def has_place(self) -> bool:
        """Whether a worker executes fewer runs than it could."""
        busy = [w for w in self.scheduler.workers if w.state is WorkerState.BUSY and w.serves]
        return any(len(w.runs) < w.concurrent for w in busy)

    @invariant()
    def memory_is_held_as_long_as_a_worker_may_write_it(self) -> None:
        written = self.written()
        for number, asked in self.requests.items():
            assert asked.released == (asked.settled and number not in written)

    @invariant()
    def workers_have_the_runs_that_they_were_given(self) -> None:
        for w in self.scheduler.workers:
            given = [*self.running.get(w.index, ())]
            assert [run.members for run in w.runs] == given
            assert len(given) <= MAX_RUNS

    @invariant()
    def run_that_no_caller_waits_for_ends_in_time_or_its_worker_does(self) -> None:
        for w in self.scheduler.workers:
            if w.state is WorkerState.BUSY and not w.is_killed:
                assert w.kill_at == min([w.end_by, *(run.stop_by for run in w.runs)])
                for run in w.begun():
                    assert run.stop_by < math.inf or not self.scheduler.table.is_over(run)

    @invariant()
    def health_is_that_of_the_workers(self) -> None:
        health = self.scheduler.health(self.now)
        workers = self.scheduler.workers
        fit = [w for w in workers if w.serves]
        for w in workers:
            has_it = w.state in (WorkerState.READY, WorkerState.BUSY)
            process = self.processes.get(w.index)
            assert not w.serves or (has_it and process and not process.killed)
        assert (health.workers, health.serving) == (len(workers), 0 if self.is_closed else len(fit))
        if self.is_closed:
            assert (health.state, health.reasons) == ("closed", ())
        elif self.is_closing or self.is_draining:
            assert health.state == "closing"
        elif not self.started:
            assert health.state == "starting"
        else:
            soon = self.now + TIMEOUTS.cancel_grace / 2
            slow = {w.index for w in fit if w.kill_at <= soon}
            wrong = [w for w in workers if not w.serves or w.index in slow]
            assert len(health.reasons) == len(wrong)
            for w, reason in zip(wrong, health.reasons, strict=True):
                what = "worker" if self.pipeline == 1 else "group"
                assert reason.startswith(f"{what} {w.index} ")
                assert f"({w.build.device}" in reason
            broken = "failed" if self.circuit_open else "degraded"
            assert health.state == (broken if wrong else "ready")

    @invariant()
    def circuit_is_open_while_no_worker_serves_and_no_start_within_the_budget_is_left(self) -> None:
        if self.circuit_open:
            assert not self.open()
            assert not any(w.serves for w in self.scheduler.workers)
        for w in self.scheduler.workers:
            assert not (w.budget.spent and (w.serves or w.stop is Stop.AFTER_RUNS))

    @invariant()
    def worker_that_died_is_always_started_again(self) -> None:
        if self.started and not self.is_closing:
            for w in self.scheduler.workers:
                assert w.state is not WorkerState.GONE or w.restart_at < math.inf

    @invariant()
    def one_worker_at_a_time_is_replaced(self) -> None:
        assert sum(w.stop is Stop.AFTER_RUNS for w in self.scheduler.workers) <= 1

    @invariant()
    def statistics_add_up(self) -> None:
        table = self.scheduler.table
        waiting = [self.requests[number] for number in self.open()]
        assert table.in_flight_bytes == sum(asked.size for asked in waiting)
        assert table.not_begun == sum(asked.runs == 0 for asked in waiting)
        assert table.latency.snapshot().count == table.succeeded
        runs = sum(w.runs for w in self.scheduler.lifecycle.statistics())
        assert self.scheduler.batch_sizes.snapshot().count == runs

    @invariant()
    def no_request_is_open_after_its_deadline_was_acted_on(self) -> None:
        due = self.scheduler.next_time()
        for number in self.open():
            if self.requests[number].deadline < math.inf:
                assert due < math.inf
                assert due <= self.requests[number].deadline

    def teardown(self) -> None:
        self.play()
        # Only who said so waits for ever: a worker may hang, and nothing else end the request.
        finite = [asked for asked in self.requests.values() if asked.deadline < math.inf]
        assert all(asked.settled for asked in finite)
        if self.to_replace is not None:
            assert not all(asked.settled for asked in self.requests.values())
        if self.started and not self.is_closing and not self.open():
            assert self.scheduler.health(self.now).state == "ready", "the pool did not heal"
        if not self.is_closing:
            self.close(1.0)
            self.play()
        assert self.to_replace is None
        assert self.is_closed
        assert all(asked.settled and asked.released for asked in self.requests.values())
        assert self.scheduler.next_time() == math.inf
        assert (self.scheduler.table.in_flight, len(self.scheduler.queue)) == (0, 0)
        assert not self.scheduler.table.entries
        assert all(w.state is WorkerState.GONE and not w.runs for w in self.scheduler.workers)


Pools.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)
test_any_order_of_events_settles_and_releases_every_request_once = Pools.TestCase
