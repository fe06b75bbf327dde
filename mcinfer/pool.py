"""What runs with the lock held: events in, what the scheduler decides carried out.

::

    a caller ── enter, cancel ─────────────────┐                   ┌─► Fleet: send, start, kill
    who takes the messages ── receive ─────────┼─► Scheduler ──────┼─► Answers, Records: for the owner to give
    I/O thread ── look (deaths, time) ─────────┤   (pure)          │   and to log when it has let the lock go
    start, drain, end, restart_workers ────────┘                   └─► `started`, `restarted`, `changed`

Rules of ownership: a `Pool` owns the scheduler, the fleet, and the jobs that were accepted and whose memory
is not let go yet. It has no lock and no thread: its owner's lock guards every method, but for those that say
otherwise. None but `close` waits. Each carries out all that follows from its event before it returns, so
actions never overtake each other. Nothing here calls user code: futures and records are left to the owner,
which calls `Answers.give` after each method that may settle something, with the lock released.

ZeroMQ's descriptor is edge-triggered, and sending may use up its sign of a message that has come:
whoever sends then receives what is there, or wakes the I/O thread, which does.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from time import monotonic

from mcinfer.actions import (
    Action,
    DumpStacks,
    HealthChanged,
    KillWorker,
    PoolClosed,
    PoolStarted,
    Release,
    Send,
    SendPredict,
    Settle,
    StartWorker,
    TakeBack,
    WorkersRestarted,
)
from mcinfer.answers import Answers
from mcinfer.config import Limits, RestartPolicy, Timeouts
from mcinfer.errors import ClosedError, McinferError, ProtocolError
from mcinfer.fleet import Fleet, UnreachableError, memory_limits
from mcinfer.machine import usable_memory
from mcinfer.protocol import Build, BuildFinish, Error, Message, Reply
from mcinfer.records import Records
from mcinfer.roster import describe_exit
from mcinfer.scheduler import Scheduler
from mcinfer.shard_queue import ShardId
from mcinfer.shm.arena import Arena
from mcinfer.staging import Arrays, Job
from mcinfer.statistics import Health, Statistics
from mcinfer.transport import TransportKind
from mcinfer.watch import Watch

_MOST_MESSAGES = 256
"""That are taken in one go: deaths and time must have their turn, however much a worker sends."""

_MEMORY_LOOKS = 1.0
"""Seconds between two looks at how much memory workers have, where the policy asks for it."""

_MOST_NOTES = 100
"""Different ones that are logged."""

_LEVELS = {"degraded": logging.WARNING, "failed": logging.ERROR}


class Pool:
    """The workers of one master, and what they were given to do. See the module's text for who may call it.

    Attributes:
        fd: Of the socket, to wait for messages; from `open` on.
        started: Answered with what the model is like, once all workers have it. Where they never will, the
            owner is to fail it, with `failure`, when all is given up.
        restarted: Of the last `restart_workers`: done when all are replaced, or one could not be.
        changed: Set, and in its place another one, whenever the pool is in another state than before.
        finished: Whether no worker is left, and none will be started: nothing is taken any more.
        closed: Whether nothing is sent or received any more.
        failure: Why there is no pool, where it failed.
    """

    def __init__(
        self,
        builds: Sequence[Build],
        arena: Arena,
        *,
        timeouts: Timeouts,
        restart: RestartPolicy,
        limits: Limits,
        max_batch_size: int,
        max_delay: float,
        tracing: bool,
        transport: TransportKind,
        answers: Answers,
        records: Records,
        watch: Watch,
        room: Callable[[], None],
        done: Callable[[int, "Future[Arrays]"], None],
    ) -> None:
        """Take what is to be run; nothing is opened before `open`.

        Args:
            builds: For each worker.
            arena: Where the memory of the jobs lies.
            timeouts: How long to wait for what.
            restart: When a worker that died is started again.
            limits: How much is taken on.
            max_batch_size: Rows of one run that requests may be joined to.
            max_delay: Seconds that a request may wait for others to join it.
            tracing: Whether a settled request is to have a trace.
            transport: What messages to and from workers go by.
            answers: Takes what is settled.
            records: Takes what is to be logged.
            watch: The I/O thread's, for what it has to wait for.
            room: Called when one more request may be taken, or none will be any more.
            done: Called with the number of a request that was entered and its future, when that is done:
                by whoever answers or cancels it, without the lock.
        """
        self._scheduler = Scheduler(
            builds,
            timeouts=timeouts,
            restart=restart,
            limits=limits,
            max_batch_size=max_batch_size,
            max_delay=max_delay,
            tracing=tracing,
        )
        most_memory = memory_limits(builds, limits.worker_memory_bytes, usable_memory())
        self._fleet = Fleet(builds, arena, most_memory, transport)
        self._builds = builds
        self._timeouts = timeouts
        self._limits = limits
        self._answers = answers
        self._records = records
        self._watch = watch
        self._room = room
        self._done = done
        self._jobs: dict[int, Job] = {}
        self._next_number = 0
        self._memory_look = math.inf if restart.max_memory_bytes is None else 0.0
        self._notes: set[str] = set()
        self.started: Future[BuildFinish] = Future()
        self.restarted: Future[None] = Future()
        self.changed = threading.Event()
        self.finished = False
        self.closed = False
        self.failure: McinferError | None = None

    # Life.

    def open(self) -> None:
        """Open what workers need, and the watch.

        Raises:
            OSError: The system has no descriptor, thread or folder left for it; nothing is left open.
        """
        with ExitStack() as opened:
            self._fleet.open()
            opened.callback(self._fleet.close, 0.0)
            opened.callback(self._fleet.close_socket)
            self._watch.open(self._fleet.fd)
            opened.pop_all()
        self.fd = self._fleet.fd

    def start(self) -> None:
        """Start all workers: `started` is settled, or the pool is `finished` with a `failure`."""
        self._carry_out(self._scheduler.handle_start(monotonic()))

    def drain(self, seconds: float) -> None:
        """Take nothing more, answer what was accepted within so many seconds, then end all workers."""
        self._carry_out(self._scheduler.handle_drain(monotonic(), seconds))
        self._room()
        self._tell_change()

    def end(self, seconds: float) -> None:
        """End all workers, which have so many seconds for it; what is in flight fails with `ClosedError`."""
        self._carry_out(self._scheduler.handle_close(monotonic(), seconds))

    def finish(self, failure: McinferError | None = None) -> None:
        """There is no worker, and there will be none."""
        self.failure = self.failure or failure
        self.finished = True
        self._tell_change()

    def collapse(self, failure: McinferError) -> list[Job]:
        """Last resort: kill every worker. The jobs that nothing will be heard of any more."""
        self.finish(failure)
        for process in self._fleet.processes.values():
            process.kill()
        jobs = [*self._jobs.values()]
        self._jobs.clear()
        return jobs

    def close_socket(self) -> None:
        """Nothing is sent or received any more; processes that are left lose their lifelines."""
        self.closed = True
        self._fleet.close_socket()
        self._watch.close()
        self._room()
        self._tell_change()
        _settle(self.restarted, ClosedError("the master was closed"))

    def close(self, seconds: float) -> None:
        """After `close_socket`, without the lock: as `Fleet.close`, which waits."""
        self._fleet.close(seconds)

    # Requests.

    @property
    def serving(self) -> int:
        """How many workers are ready or busy; also without the lock."""
        return self._scheduler.serving

    def check_room(self) -> None:
        """Raise `QueueFullError` if no request would be taken now; also without the lock."""
        self._scheduler.check_room(0)

    @property
    def in_flight(self) -> int:
        """Requests that are not answered yet; also without the lock."""
        return self._scheduler.ledger.in_flight

    def has_jobs(self) -> bool:
        """Whether there is memory that will be let go by itself; also without the lock."""
        return bool(self._jobs)

    def enter(self, job: Job, start: float, timeout: float, priority: int) -> None:
        """Queue a job.

        Args:
            job: What to do.
            start: When the call came.
            timeout: Seconds from then on.
            priority: Before those of a lower one.

        Raises:
            ClosedError: The pool is finished, or takes nothing more.
            QueueFullError: Too many requests are in flight.
        """
        if self.finished:
            raise ClosedError("the master is closed")
        job.number = self._next_number
        self._jobs[job.number] = job
        now = monotonic()
        try:
            actions = self._scheduler.handle_request(
                now,
                job.number,
                job.rows,
                timeout,
                called=start,
                size=job.size,
                client=threading.get_ident(),
                priority=priority,
                join=job.join,
            )
        except McinferError:
            del self._jobs[job.number]
            raise
        self._next_number += 1
        job.future.add_own_callback(partial(self._done, job.number))
        self._carry_out(actions)
        self.receive()
        # Its deadline and where it was put are all that it can bring forward.
        if min(start + timeout, self._scheduler.next_turn()) < self._watch.wakes_at:
            self._hurry()

    def cancel(self, number: int) -> None:
        """The future of a request was cancelled: its run is to stop."""
        self._carry_out(self._scheduler.handle_cancel(monotonic(), number))
        self.receive()
        self._hurry()

    def _hurry(self) -> None:
        """Wake the I/O thread if something is due before it would wake by itself."""
        due = self._scheduler.next_time()
        if due is not None and due < self._watch.wakes_at:
            self._watch.wakeup.set()

    # How it is.

    def health(self) -> Health:
        """What the scheduler knows, and what only the system can tell."""
        health = self._scheduler.health(monotonic())
        if self.failure is not None:
            return replace(health, state="failed", reasons=(str(self.failure),), serving=0)
        if self.finished:
            return replace(health, state="closed", reasons=(), serving=0)
        wrong = {
            index: text
            for index, text in self._fleet.standings().items()
            if self._scheduler.serves(index)
        }
        if not wrong:
            return health
        reasons = [f"{self._scheduler.name(index)} {text}" for index, text in wrong.items()]
        return replace(
            health,
            state="degraded" if health.state == "ready" else health.state,
            reasons=(*health.reasons, *reasons),
            serving=health.serving - len(wrong),
        )

    def statistics(
        self, *, memory_bytes: int, memory_used_bytes: int, weights_version: int
    ) -> Statistics:
        """A snapshot, with what is not this one's concern given."""
        ledger = self._scheduler.ledger
        return Statistics(
            accepted=ledger.accepted,
            succeeded=ledger.succeeded,
            failed=ledger.failed,
            cancelled=ledger.cancelled,
            in_flight=ledger.in_flight,
            in_flight_bytes=ledger.in_flight_bytes,
            queued=ledger.not_begun,
            queued_shards=len(ledger.queue),
            latency=ledger.latency.snapshot(),
            batch_sizes=self._scheduler.batch_sizes.snapshot(),
            memory_bytes=memory_bytes,
            memory_used_bytes=memory_used_bytes,
            weights_version=weights_version,
            health=self.health(),
            workers=self._scheduler.statistics(),
        )

    def restart_workers(self) -> None:
        """Replace every worker's process by a fresh one, one after another; `restarted` says when."""
        self.restarted = Future()
        self._carry_out(self._scheduler.handle_restart(monotonic()))

    def abandon_restart(self) -> None:
        """Whoever asked for the restart waits no more: what was not replaced yet stays as it is."""
        self._scheduler.handle_restart_abandoned()

    # What the I/O thread looks after.

    def next_look(self) -> float:
        """When `look` is to be called, if nothing ends the wait before."""
        due = self._scheduler.next_time()
        return min(self._memory_look, math.inf if due is None else due)

    def look(self, ready: Sequence[int]) -> None:
        """After a wait, which gave these descriptors: take messages, deaths, and all that is due."""
        now = monotonic()
        self.receive()
        for index, process in [*self._fleet.processes.items()]:
            if process.pidfd in ready:
                self._bury(index, now)
        self._look_at_memory(now)
        due = self._scheduler.next_time()
        if due is not None and due <= now:
            self._carry_out(self._scheduler.handle_time(now))

    def _look_at_memory(self, now: float) -> None:
        """Where the policy asks for it, see which worker has grown too large."""
        if now < self._memory_look:
            return
        self._memory_look = now + _MEMORY_LOOKS
        for index, process in [*self._fleet.processes.items()]:
            with suppress(OSError):
                size = process.own_bytes()
                self._carry_out(self._scheduler.handle_own_memory(now, index, size))

    def _bury(self, index: int, now: float) -> None:
        """A worker's process has ended."""
        process = self._fleet.remove(index)
        self._watch.remove(process.pidfd)
        # What it had begun it had taken the permit for; the answer before that may have been lost with it.
        ahead_begun = self._scheduler.has_ahead(index) and not process.permits.take()
        stacks = process.stacks()
        how = describe_exit(process.reap())
        if process.peer is None and self._limits.worker_memory_bytes is not None:
            how += f" (it may have {self._limits.worker_memory_bytes} bytes of memory of its own)"
        expected = self._scheduler.is_exiting(index)
        level = logging.INFO if expected and not stacks else logging.WARNING
        where = f"; where it was:\n{stacks}" if stacks else ""
        self._records.add(level, "%s %s%s", self._scheduler.name(index), how, where)
        self._carry_out(self._scheduler.handle_died(now, index, how, ahead_begun=ahead_begun))

    # What comes.

    def receive(self) -> None:
        """The messages that are there; where they do not end, the rest in the I/O thread's next turn."""
        if self.closed:
            return
        for _ in range(_MOST_MESSAGES):
            received = self._fleet.receive()
            if received is None:
                return
            index, message = received
            if index is not None:
                self._handle_message(index, message, monotonic())
        self._watch.wakeup.set()

    def _handle_message(self, index: int, message: Message | ProtocolError, now: float) -> None:
        """What a worker sent."""
        try:
            if isinstance(message, ProtocolError):
                raise message
            if isinstance(message, Reply):
                message = self._take(index, message)
            actions = self._scheduler.handle_message(now, index, message)
        except ProtocolError as exc:
            self._outlaw(index, f"breaks the protocol: {exc}")
            return
        except Exception as exc:  # what one worker sends must not end the service of the others
            self._records.add(logging.ERROR, "a message could not be handled", failure=exc)
            self._outlaw(index, f"sent what could not be handled: {exc!r}")
            return
        if isinstance(message, BuildFinish):
            self._tell(index, message.notes)
        self._carry_out(actions)
        if not isinstance(message, Reply) or self._scheduler.next_turn() < self._watch.wakes_at:
            self._hurry()
        if isinstance(message, Error) and message.traceback:
            name = self._scheduler.name(index)
            self._records.add(logging.DEBUG, "%s: %s", name, message.traceback)

    def _tell(self, index: int, notes: Sequence[str]) -> None:
        """Log what there is to know of how a worker loaded the model, unless another one said so too."""
        for note in notes:
            if note not in self._notes and len(self._notes) < _MOST_NOTES:
                self._notes.add(note)
                self._records.add(logging.WARNING, "%s: %s", self._builds[index].model, note)

    def _take(self, index: int, reply: Reply) -> Message:
        """Have the jobs check the reply, and get the blocks that the worker made for it.

        Returns:
            The reply, or, where this process cannot take what is in it, the run's failure.
        """
        members = self._scheduler.running(index)
        if not members or members[0] != (reply.request, reply.shard):
            return reply  # the scheduler will say what is wrong with it
        if len(members) > 1 and reply.outputs:
            raise ProtocolError(
                "reply with outputs to a joined run, whose outputs all have a place"
            )
        try:
            for request, shard in members:
                fetch = partial(self._fleet.fetch, index)
                self._jobs[request].take(shard, reply.outputs, fetch, index)
        except (OSError, MemoryError) as exc:
            text = f"the master cannot take the answer: {exc!r}"
            return Error(request=reply.request, shard=reply.shard, kind="predict", text=text)
        return reply

    # Actions.

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Do what the scheduler says, in order."""
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case SendPredict(worker=worker, members=members):
                    self._send_run(worker, members)
                case TakeBack(worker=worker):
                    process = self._fleet.processes.get(worker)
                    if process is not None and process.permits.take():
                        pending += self._scheduler.handle_taken_back(monotonic(), worker)
                case Settle(request=request, error=error, trace=trace):
                    self._answers.add(self._jobs[request], error, trace)
                    self._room()
                case Release(request=request):
                    # And its memory, once it is answered and nobody holds a view of it.
                    self._jobs.pop(request).released()
                case Send(worker=worker, message=message):
                    self._send(worker, message)
                case StartWorker(worker=worker):
                    pending += self._start_worker(worker)
                case DumpStacks(worker=worker):
                    self._ask_for_stacks(worker)
                case KillWorker(worker=worker):
                    self._fleet.kill(worker)
                case action:
                    pending += self._turn_over(action)

    def _tell_change(self) -> None:
        """Wake those who wait for the pool to be ready."""
        self.changed.set()
        self.changed = threading.Event()

    def _turn_over(self, action: Action) -> list[Action]:
        """Carry out what concerns the whole pool; what is to be done next."""
        match action:
            case PoolStarted(error=error):
                return self._finish_start(error)
            case HealthChanged(health=health, planned=planned):
                level = logging.INFO if planned else _LEVELS.get(health.state, logging.INFO)
                self._records.add(level, "%s", health)
            case WorkersRestarted(error=error):
                _settle(self.restarted, error)
            case PoolClosed(abandoned=abandoned):
                for worker in abandoned:
                    name = self._scheduler.name(worker)
                    self._records.add(logging.ERROR, "%s does not end, not even killed", name)
                self.finished = True
        self._tell_change()
        return []

    def _send(self, worker: int, message: Message) -> None:
        try:
            self._fleet.send(worker, message)
        except UnreachableError as exc:
            self._outlaw(worker, str(exc))

    def _send_run(self, worker: int, members: Sequence[ShardId]) -> None:
        try:
            self._fleet.send_run(
                worker, [(self._jobs[request], shard) for request, shard in members]
            )
        except UnreachableError as exc:
            self._outlaw(worker, str(exc))

    def _outlaw(self, worker: int, reason: str) -> None:
        """End a worker that cannot be worked with; its death is reported as any other."""
        name = self._scheduler.name(worker)
        self._records.add(logging.ERROR, "%s %s; it is killed", name, reason)
        self._scheduler.handle_killed(worker, reason)
        self._fleet.processes[worker].outlawed = True
        self._fleet.kill(worker)

    def _ask_for_stacks(self, worker: int) -> None:
        """A worker hangs: say so, and have it say where, as far as it can."""
        process = self._fleet.processes.get(worker)
        if process is None:
            return
        standing = self._fleet.standings().get(worker, "")
        also = f", and {standing}" if standing else ""
        what = self._scheduler.last_error(worker)
        self._records.add(logging.ERROR, "%s%s; it is killed", what, also)
        process.ask_for_stacks()

    def detach(self, number: int) -> None:
        """The arena has dropped a block: workers that have it are to do so, too."""
        for worker in [*self._fleet.processes]:
            if not self._scheduler.is_exiting(worker):
                try:
                    self._fleet.detach(worker, number)
                except UnreachableError as exc:
                    self._outlaw(worker, str(exc))
        self._watch.wakeup.set()

    def _start_worker(self, worker: int) -> list[Action]:
        """Start a worker's process; what is to be done next."""
        try:
            process = self._fleet.start(worker)
        except OSError as exc:
            how = f"could not be started: {exc}"
            return self._scheduler.handle_died(monotonic(), worker, how)
        self._watch.add(process.pidfd)
        self._scheduler.handle_started(worker, process.pid)
        self._records.add(logging.INFO, "%s started", self._scheduler.name(worker))
        return []

    def _finish_start(self, error: McinferError | None) -> list[Action]:
        """The scheduler knows whether the pool is up; what is to be done next."""
        specs = self._scheduler.specs
        if error is None and specs is not None:
            self.started.set_result(specs)
            self._tell_change()
            return []
        self.failure = error
        return self._scheduler.handle_close(monotonic(), self._timeouts.close)


def _settle(future: "Future[None]", error: McinferError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
