"""The master's shell: carries out what the scheduler decides, and tells it what happened.

::

    any thread ── submit ──► [lock: scheduler ► send] ─────────────► worker sockets
    I/O thread ── one wait for: messages, pidfds of all workers, the wake-up descriptor, the next due time
                  └─► [lock: receive, deaths, time ► scheduler ► actions] ──► settle futures, lock released
    a caller that waits ── takes the messages itself, one caller at a time, in the place of the I/O thread

Rules of ownership: one lock guards the scheduler, the socket and the process table. Whoever takes
it carries out the actions of its event before letting go, so actions never overtake each other. Futures
are settled with the lock released; those that users have added callbacks to in the I/O thread alone, one after
another, since callbacks are user code.

Ctrl-C raises in the main thread, between any two instructions: whatever changes shared state there is
inside `HeldInterrupts`.

ZeroMQ's descriptor is edge-triggered, and sending may use up its sign of a message that has come:
whoever sends then receives what is there, or wakes the I/O thread, which does.

After a fork the child has no I/O thread and must not touch the sockets: every entry compares the pid.
"""

import atexit
import logging
import math
import os
import select
import threading
from collections import deque
from collections.abc import Sequence
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
from mcinfer.errors import (
    ClosedError,
    McinferError,
    ProtocolError,
    QueueFullError,
    ReadyTimeoutError,
    WorkerDiedError,
)
from mcinfer.fleet import Fleet, UnreachableError, memory_limits
from mcinfer.interrupts import HeldInterrupts
from mcinfer.machine import usable_memory
from mcinfer.protocol import Build, BuildFinish, Error, Message, Reply
from mcinfer.roster import describe_exit
from mcinfer.scheduler import Scheduler
from mcinfer.shard_queue import ShardId
from mcinfer.shm.arena import Arena
from mcinfer.staging import Arrays, Job
from mcinfer.statistics import Health, Statistics
from mcinfer.tracing import TraceHook
from mcinfer.waiting_line import WaitingLine
from mcinfer.wakeup import WakeUp

_log = logging.getLogger("mcinfer.master")

_LONGEST_WAIT = 86400.0
"""Seconds of one wait: waking for nothing once a day costs nothing, and it takes no more than 24 days."""

_LAST_OUTPUT = 1.0
"""Seconds that a closing master gives to what its workers printed last."""

_MOST_MESSAGES = 256
"""That are taken in one go: deaths and time must have their turn, however much a worker sends."""

_MEMORY_LOOKS = 1.0
"""Seconds between two looks at how much memory workers have, where the policy asks for it."""

_MOST_NOTES = 100
"""Different ones that are logged."""

_INTERRUPT_LOOKS = 0.1
"""Seconds that an interrupt may have to wait for a caller that waits for its turn."""

_CONNECTING_LOOKS = 0.1
"""Seconds between two looks for descriptors that a worker's connection needs."""

_HEALTH_LOOKS = 0.2
"""Seconds between two looks of `wait_ready` at what no event tells of: processes that are stopped."""

_LEVELS = {"degraded": logging.WARNING, "failed": logging.ERROR}


class Supervisor:
    """The processes, the socket and the I/O thread of one master."""

    def __init__(
        self,
        builds: Sequence[Build],
        *,
        timeouts: Timeouts,
        restart: RestartPolicy,
        limits: Limits,
        memory_bytes: int,
        max_batch_size: int = 1,
        max_delay: float = 0.0,
        trace: TraceHook | None = None,
    ) -> None:
        """Take what is to be run; nothing starts before `start`."""
        self._scheduler = Scheduler(
            builds,
            timeouts=timeouts,
            restart=restart,
            limits=limits,
            max_batch_size=max_batch_size,
            max_delay=max_delay,
            tracing=trace is not None,
        )
        self._builds = builds
        self._timeouts = timeouts
        self._limits = limits
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._jobs: dict[int, Job] = {}
        self._next_number = 0
        self._line = WaitingLine(self._lock)
        self._changed = threading.Event()  # another one after each change
        self._restarting = threading.Lock()
        self._restarted: Future[None] = Future()
        self._next_look = math.inf if restart.max_memory_bytes is None else 0.0
        self._connecting: list[int] = []
        self._records: deque[tuple[int, str, Sequence[object], BaseException | None]] = deque()
        self._notes: set[str] = set()
        self._started: Future[BuildFinish] = Future()
        self._thread: threading.Thread | None = None
        self._ended = WakeUp()
        self._wakes_at = math.inf
        self._answers = Answers(wake=self._wake_io_thread, answered=self._wake_driver, trace=trace)
        self._start_called = False
        self._abandoned = False
        self._finished = False
        self._torn_down = False
        self._failure: McinferError | None = None
        self._wakeup = WakeUp()
        self._driving = threading.Lock()
        self._driver = 0
        self._driver_wakeup = WakeUp()
        self.arena = Arena(
            memory_bytes,
            wake=self._wakeup.set,
            transient=lambda: bool(self._jobs),
            dropped=self._detach,
        )
        most_memory = memory_limits(builds, limits.worker_memory_bytes, usable_memory())
        self._fleet = Fleet(builds, self.arena, most_memory)

    # Life.

    def claim_start(self) -> None:
        """Raise `ClosedError` unless this is the first start, and it was not closed before."""
        self._check_process()
        with HeldInterrupts(), self._lock:
            if self._start_called or self._finished:
                raise ClosedError("a master can be started once; make a new one")
            self._start_called = True

    def refuse_start(self, failure: McinferError) -> None:
        """There is nothing to start: raise this, and say so from now on."""
        with HeldInterrupts(), self._lock:
            self._failure = failure
            self._finished = True
            self._tell_change()
        raise failure

    def start(self) -> BuildFinish:
        """Start all workers, wait until they have the model, and say what the model is like.

        Raises:
            BuildError: A worker could not load it; no process is left.
            ClosedError: It was closed meanwhile; likewise.
            OSError: The system has no descriptor, thread or folder left for it.
        """
        with ExitStack() as opened:
            with HeldInterrupts():
                self._fleet.open()
                opened.callback(self._fleet.close, 0.0)
                opened.callback(self._fleet.close_socket)
            self._poll = select.epoll()
            opened.callback(self._poll.close)
            self._poll.register(self._wakeup.fd, select.EPOLLIN)
            self._poll.register(self._fleet.fd, select.EPOLLIN)
            self._driver_poll = self._new_driver_poll()
            atexit.register(self.close)
            opened.callback(atexit.unregister, self.close)
            thread = threading.Thread(target=self._run, name="mcinfer-io", daemon=True)
            with HeldInterrupts(), self._lock:
                self._check_not_closed()
                thread.start()
                self._thread = thread
                opened.pop_all()
        try:
            with HeldInterrupts():
                with self._lock:
                    self._check_not_closed()
                    self._carry_out(self._scheduler.handle_start(monotonic()))
                self._answers.give()
            self._wakeup.set()
            return self._started.result()
        except BaseException:
            self.close(0.0 if not self._started.done() else None)
            raise

    def close(self, timeout: float | None = None, *, drain: bool = False) -> None:
        """End all workers; in-flight requests fail with `ClosedError`. May be called again.

        Args:
            timeout: Seconds for workers to end by themselves; None is `Timeouts.close`. With `drain`, seconds
                for requests to be answered; None is as long as they have, each its own time-out.
            drain: Whether what was accepted is answered first; nothing more is.
        """
        if os.getpid() != self._pid:
            return
        try:
            with HeldInterrupts():
                with self._lock:
                    if self._thread is None:
                        self._finished = True
                        return
                    if drain:
                        seconds = math.inf if timeout is None else timeout
                        self._carry_out(self._scheduler.handle_drain(monotonic(), seconds))
                        self._line.call_next()
                        self._tell_change()
                    else:
                        self._close(self._timeouts.close if timeout is None else timeout)
                    if self._driver == threading.get_ident():
                        # A signal's handler, in a call that waits for its answer, which others must read.
                        self._take_messages_back()
                self._answers.give()
                self._wakeup.set()
            if self.may_wait():
                self._wait_for_end(self._thread)
        except BaseException:
            if drain:
                self.close()  # Ctrl-C: who waits for requests to be answered does not any more
            raise

    def _wait_for_end(self, thread: threading.Thread) -> None:
        """Wait until the I/O thread has given everything up.

        Not by `Thread.join` alone: one that a signal's handler interrupts has Python 3.11 believe that the
        thread has ended, so that the next one does not wait (`_wait_for_tstate_lock` in its threading.py).
        """
        ended = select.poll()
        ended.register(self._ended.fd, select.POLLIN)
        ended.poll()
        thread.join()

    def _check_not_closed(self) -> None:
        """For the start, which another thread's `close` may overtake; the lock is held."""
        if self._finished:
            raise ClosedError("the master was closed while it was starting")

    def abandon(self) -> None:
        """Ask the I/O thread to close everything: for finalizers, so it takes no lock and never waits."""
        self._abandoned = True
        if os.getpid() == self._pid:
            self._wakeup.set()

    def check_open(self) -> None:
        """Raise `ClosedError` unless requests can be taken here."""
        self._check_process()
        if self._finished:
            raise ClosedError("the master is closed")
        if self._thread is None:
            raise ClosedError(
                "the master is not started: call start(), or use it in a with statement"
            )

    def _check_process(self) -> None:
        """Raise `ClosedError` in a fork: its copy of the lock may be held by a thread it does not have."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this master belongs to process {self._pid}; process {os.getpid()} was forked from it "
                "and needs a master of its own"
            )

    def may_wait(self) -> bool:
        """Whether the calling thread may wait for answers: not in a callback, which others wait behind."""
        here = threading.current_thread() is self._thread
        return not here and not self._answers.is_telling()

    # Requests.

    @property
    def serving(self) -> int:
        """How many workers are ready or busy."""
        return self._scheduler.serving

    def check_room(self) -> None:
        """Raise `QueueFullError` if no request would be taken now, and none may wait for its turn."""
        if self._limits.when_queue_full == "raise":
            self._scheduler.check_room(0)

    def submit(
        self, job: Job, start: float, timeout: float, priority: int = 0, *, wait: bool = False
    ) -> None:
        """Queue a job, to be answered within `timeout` seconds of `start`; its future says how.

        Args:
            job: What to do.
            start: When the call came.
            timeout: Seconds from then on.
            priority: Before those of a lower one.
            wait: Whether to wait while the queue is full.

        Raises:
            ClosedError: The master is closed.
            QueueFullError: Too many requests are in flight, and were until the time was over.
        """
        entered = False
        with HeldInterrupts():
            with self._lock:
                if not self._line:
                    entered = self._try_to_enter(job, start, timeout, priority, wait=wait)
            self._answers.give()
        if not entered:
            if not wait:
                raise QueueFullError("others wait already for room in the queue")
            deadline = start + timeout
            self._line.wait(
                lambda late: self._try_to_enter(job, start, timeout, priority, wait=not late),
                deadline,
            )
            with HeldInterrupts():
                self._answers.give()

    def _try_to_enter(
        self, job: Job, start: float, timeout: float, priority: int, *, wait: bool
    ) -> bool:
        """Queue a job; whether there was room. Raises, unless it may wait; the lock is held."""
        try:
            self._enter(job, start, timeout, priority)
        except QueueFullError:
            if wait:
                return False
            raise
        return True

    def _enter(self, job: Job, start: float, timeout: float, priority: int) -> None:
        if self._finished:
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
        job.future.help = self.help_answer
        job.future.add_own_callback(partial(self._on_done, job.number))
        self._carry_out(actions)
        self._receive()
        # Its deadline and where it was put are all that it can bring forward.
        if min(start + timeout, self._scheduler.next_turn()) < self._wakes_at:
            self._hurry()

    def help_answer(self, future: "Future[Arrays]", deadline: float) -> None:
        """While its answer is waited for, take the messages in the place of the I/O thread, if nobody does.

        That saves two changes of thread for each answer. When this one has come, or the time is over, it
        gives them back.

        Args:
            future: Of a job that was submitted.
            deadline: On the monotonic clock.
        """
        driving = False
        if os.getpid() != self._pid or not self.may_wait():
            return
        # A signal's handler, in a call that takes the messages already.
        within = self._driver == threading.get_ident()
        try:
            with HeldInterrupts():
                driving = not (within or future.done()) and self._driving.acquire(blocking=False)
                if driving:
                    self._driver = threading.get_ident()
                    with suppress(ValueError, OSError):  # the pool was closed meanwhile
                        self._poll.modify(self._fleet.fd, 0)
            # One of its own: that of the call around this one is in use.
            poll = self._new_driver_poll() if within else self._driver_poll
            while (driving or within) and not future.done() and not self._torn_down:
                left = deadline - monotonic()
                if left <= 0:
                    break
                self._drive(poll, left)
        finally:
            # An error that the future holds must not hold it by its traceback.
            del future
            if within:
                self._driver_wakeup.set()  # what the call around this one waits for may have come
            if driving:
                # In this order: Ctrl-C can be raised after each call, and the first is the one that counts.
                try:
                    self._take_messages_back()
                finally:
                    self._driver = 0
                    self._driving.release()

    def _take_messages_back(self) -> None:
        """Have the I/O thread wait for messages again, in the place of a caller."""
        # The pool may have been closed meanwhile, which answers the job as well.
        with suppress(ValueError, OSError):
            self._poll.modify(self._fleet.fd, select.EPOLLIN)

    def _new_driver_poll(self) -> select.poll:
        """What a caller that takes the messages waits for."""
        poll = select.poll()
        poll.register(self._fleet.fd, select.POLLIN)
        poll.register(self._driver_wakeup.fd, select.POLLIN)
        return poll

    def _drive(self, poll: select.poll, seconds: float) -> None:
        """One wait for messages, in a caller's thread; the I/O thread keeps deaths and time."""
        most = None if seconds == math.inf else min(seconds, _LONGEST_WAIT) * 1000
        for fd, _ in poll.poll(most):
            if fd == self._driver_wakeup.fd:
                self._driver_wakeup.clear()
        with HeldInterrupts():
            with self._lock:
                self._receive()
            self._answers.give()

    def _on_done(self, number: int, future: "Future[Arrays]") -> None:
        """A future is done; if its caller cancelled it, the run is to stop.

        It must not hold the job: a future that a user keeps would keep the job's memory.
        """
        if not future.cancelled() or os.getpid() != self._pid:
            return
        with HeldInterrupts():
            with self._lock:
                self._carry_out(self._scheduler.handle_cancel(monotonic(), number))
                self._receive()
                self._hurry()
            self._answers.give()

    def _hurry(self) -> None:
        """Wake the I/O thread if something is due before it would wake by itself."""
        due = self._scheduler.next_time()
        if due is not None and due < self._wakes_at:
            self._wakeup.set()

    def statistics(self, weights_version: int) -> Statistics:
        """A snapshot.

        Args:
            weights_version: Of the weights, which are not this one's concern.

        Raises:
            ClosedError: This process was forked from the master's.
        """
        self._check_process()
        size, used = self.arena.size, self.arena.used
        with HeldInterrupts(), self._lock:
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
                memory_bytes=size,
                memory_used_bytes=used,
                weights_version=weights_version,
                health=self._health(),
                workers=self._scheduler.statistics(),
            )

    # Health.

    def health(self) -> Health:
        """How the pool is now.

        Raises:
            ClosedError: This process was forked from the master's.
        """
        self._check_process()
        with HeldInterrupts(), self._lock:
            return self._health()

    def _health(self) -> Health:
        """What the scheduler knows, and what only the system can tell; the lock is held."""
        health = self._scheduler.health(monotonic())
        if self._failure is not None:
            return replace(health, state="failed", reasons=(str(self._failure),), serving=0)
        if self._finished:
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

    def wait_ready(self, timeout: float) -> Health:
        """Wait until every worker serves.

        Raises:
            ReadyTimeoutError: Not all did in time.
            WorkerDiedError: One was given up, so that they never will.
            ClosedError: The master is closed, or was not started.
        """
        self._check_process()
        deadline = monotonic() + timeout
        while True:
            with HeldInterrupts(), self._lock:
                health = self._health()
                lost = self._scheduler.given_up
                changed = self._changed
            left = deadline - monotonic()
            if health.state == "ready":
                return health
            if not self._start_called:
                raise ClosedError(
                    "the master is not started: call start(), or use it in a with statement"
                )
            if self._finished or health.state in ("closing", "closed"):
                raise ClosedError(f"the master does not become ready any more: {health}")
            if lost:
                raise WorkerDiedError(f"the master does not become ready by itself: {health}")
            if left <= 0:
                raise ReadyTimeoutError(f"not ready within {timeout:g} s: {health}")
            changed.wait(min(left, _HEALTH_LOOKS))

    def restart_workers(self, timeout: float) -> None:
        """Replace every worker's process by a fresh one, one after another.

        Raises:
            ReadyTimeoutError: They were not all replaced in time; the rest stays as it is.
            WorkerDiedError: A fresh one could not load the model, and was given up; likewise.
            ClosedError: The master is closed, or was not started.
        """
        deadline = monotonic() + timeout
        late = ReadyTimeoutError(f"not all workers were replaced within {timeout:g} s")
        mine = False
        try:
            while not mine:
                left = deadline - monotonic()
                if left < 0:
                    raise late
                with HeldInterrupts():
                    mine = self._restarting.acquire(timeout=min(left, _INTERRUPT_LOOKS))
            with HeldInterrupts():
                with self._lock:
                    self._restarted = Future()
                    self._carry_out(self._scheduler.handle_restart(monotonic()))
                self._wakeup.set()
            try:
                self._restarted.result(min(deadline - monotonic(), threading.TIMEOUT_MAX))
            except TimeoutError:
                raise late from None
        finally:
            if mine:
                with HeldInterrupts():
                    with self._lock:
                        self._scheduler.handle_restart_abandoned()
                    self._restarting.release()

    # The log.

    def _say(
        self, level: int, text: str, *values: object, failure: BaseException | None = None
    ) -> None:
        """Have the I/O thread log something: handlers are user code, which may ask how the pool is."""
        if not _log.isEnabledFor(level):
            return
        self._records.append((level, text, values, failure))
        if threading.current_thread() is not self._thread:
            self._wakeup.set()

    def _log_records(self) -> None:
        """Log what there is to say; no lock is held."""
        while self._records:
            level, text, values, failure = self._records.popleft()
            with suppress(Exception):  # of a handler; logging itself raises nothing
                _log.log(level, text, *values, exc_info=failure)

    # The I/O thread.

    def _run(self) -> None:
        try:
            while not self._finished:
                self._turn()
        except BaseException as exc:  # a bug here must not leave callers waiting or workers running
            self._say(logging.CRITICAL, "the I/O thread failed", failure=exc)
            self._collapse(exc)
        finally:
            try:
                self._tear_down()
            finally:
                self._ended.set()
                atexit.unregister(self.close)

    def _turn(self) -> None:
        """One wait, and all that it brought."""
        with self._lock:
            due = self._scheduler.next_time()
            planned, now = self._wakes_at, monotonic()
            self._wakes_at = min(self._next_look, math.inf if due is None else due)
            if self._connecting:
                self._wakes_at = min(self._wakes_at, now + _CONNECTING_LOOKS)
            if now < planned < self._wakes_at:
                # To wake for nothing once is cheaper than to be woken for each request's deadline.
                self._wakes_at = planned
        timeout = max(0.0, min(self._wakes_at - now, _LONGEST_WAIT))
        events = self._poll.poll(timeout)
        woken = [fd for fd, _ in events]
        if self._wakeup.fd in woken:
            self._wakeup.clear()
            self.arena.reclaim()
        with self._lock:
            now = monotonic()
            self._receive()
            for index, process in [*self._fleet.processes.items()]:
                if process.pidfd in woken:
                    self._bury(index, now)
                elif process.lifeline.fd in woken:
                    self._poll.unregister(process.lifeline.fd)
                    if process.lifeline.was_asked():
                        self._connecting.append(index)
            self._let_connect()
            self._look_at_memory(now)
            due = self._scheduler.next_time()
            if due is not None and due <= now:
                self._carry_out(self._scheduler.handle_time(now))
            if self._abandoned:
                self._close(self._timeouts.close)
            self._receive()
        self._answers.give()
        self._answers.give_public()
        self._log_records()

    def _receive(self) -> None:
        """The messages that are there; where they do not end, the rest in the I/O thread's next turn."""
        if self._torn_down:
            return
        for _ in range(_MOST_MESSAGES):
            received = self._fleet.receive()
            if received is None:
                return
            index, message = received
            if index is not None:
                self._handle_message(index, message, monotonic())
        self._wakeup.set()

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
            self._say(logging.ERROR, "a message could not be handled", failure=exc)
            self._outlaw(index, f"sent what could not be handled: {exc!r}")
            return
        if isinstance(message, BuildFinish):
            self._tell(index, message.notes)
        self._carry_out(actions)
        if not isinstance(message, Reply) or self._scheduler.next_turn() < self._wakes_at:
            self._hurry()
        if isinstance(message, Error) and message.traceback:
            self._say(logging.DEBUG, "%s: %s", self._scheduler.name(index), message.traceback)

    def _tell(self, index: int, notes: Sequence[str]) -> None:
        """Log what there is to know of how a worker loaded the model, unless another one said so too."""
        for note in notes:
            if note not in self._notes and len(self._notes) < _MOST_NOTES:
                self._notes.add(note)
                self._say(logging.WARNING, "%s: %s", self._builds[index].model, note)

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
                self._jobs[request].take(shard, reply.outputs, partial(self._fleet.fetch, index))
        except (OSError, MemoryError) as exc:
            text = f"the master cannot take the answer: {exc!r}"
            return Error(request=reply.request, shard=reply.shard, kind="predict", text=text)
        return reply

    def _let_connect(self) -> None:
        """Let workers connect as soon as there are descriptors for that."""
        waiting, self._connecting = self._connecting, []
        for index in waiting:
            process = self._fleet.processes.get(index)
            if (
                process is not None
                and not process.may_connect
                and not self._fleet.let_connect(index)
            ):
                self._connecting.append(index)

    def _look_at_memory(self, now: float) -> None:
        """Where the policy asks for it, see which worker has grown too large."""
        if now < self._next_look:
            return
        self._next_look = now + _MEMORY_LOOKS
        for index, process in [*self._fleet.processes.items()]:
            with suppress(OSError):
                size = process.own_bytes()
                self._carry_out(self._scheduler.handle_own_memory(now, index, size))

    def _bury(self, index: int, now: float) -> None:
        """A worker's process has ended."""
        process = self._fleet.remove(index)
        self._poll.unregister(process.pidfd)
        with suppress(OSError):  # it had asked to connect
            self._poll.unregister(process.lifeline.fd)
        # What it had begun it had taken the permit for; the answer before that may have been lost with it.
        ahead_begun = self._scheduler.has_ahead(index) and not process.permits.take()
        stacks = process.stacks()
        how = describe_exit(process.reap())
        if process.peer is None and self._limits.worker_memory_bytes is not None:
            how += f" (it may have {self._limits.worker_memory_bytes} bytes of memory of its own)"
        expected = self._scheduler.is_exiting(index)
        level = logging.INFO if expected and not stacks else logging.WARNING
        where = f"; where it was:\n{stacks}" if stacks else ""
        self._say(level, "%s %s%s", self._scheduler.name(index), how, where)
        self._carry_out(self._scheduler.handle_died(now, index, how, ahead_begun=ahead_begun))

    # Actions.

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Do what the scheduler says, in order; the lock is held. `Answers.give` is to follow without it."""
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
                    self._line.call_next()
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
        """Wake those who wait for the pool to be ready; the lock is held."""
        self._changed.set()
        self._changed = threading.Event()

    def _turn_over(self, action: Action) -> list[Action]:
        """Carry out what concerns the whole pool; what is to be done next."""
        match action:
            case PoolStarted(error=error):
                return self._finish_start(error)
            case HealthChanged(health=health, planned=planned):
                level = logging.INFO if planned else _LEVELS.get(health.state, logging.INFO)
                self._say(level, "%s", health)
            case WorkersRestarted(error=error):
                _settle(self._restarted, error)
            case PoolClosed(abandoned=abandoned):
                for worker in abandoned:
                    name = self._scheduler.name(worker)
                    self._say(logging.ERROR, "%s does not end, not even killed", name)
                self._finished = True
        self._tell_change()
        return []

    def _wake_io_thread(self) -> None:
        """There are futures to answer that users hold; in its own turn the I/O thread looks by itself."""
        if self.may_wait():
            self._wakeup.set()

    def _wake_driver(self) -> None:
        """A future was settled: if the driver waits for it, in another thread, it must look."""
        if self._driver not in (0, threading.get_ident()):
            self._driver_wakeup.set()

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
        self._say(logging.ERROR, "%s %s; it is killed", self._scheduler.name(worker), reason)
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
        self._say(logging.ERROR, "%s%s; it is killed", self._scheduler.last_error(worker), also)
        process.ask_for_stacks()

    def _detach(self, number: int) -> None:
        """The arena has dropped a block."""
        if self._thread is None or os.getpid() != self._pid:
            return
        with self._lock:
            for worker in [*self._fleet.processes]:
                if not self._scheduler.is_exiting(worker):
                    try:
                        self._fleet.detach(worker, number)
                    except UnreachableError as exc:
                        self._outlaw(worker, str(exc))
        self._wakeup.set()

    def _start_worker(self, worker: int) -> list[Action]:
        """Start a worker's process; what is to be done next."""
        try:
            process = self._fleet.start(worker)
        except OSError as exc:
            how = f"could not be started: {exc}"
            return self._scheduler.handle_died(monotonic(), worker, how)
        self._poll.register(process.pidfd, select.EPOLLIN)
        self._poll.register(process.lifeline.fd, select.EPOLLIN)
        self._scheduler.handle_started(worker, process.pid)
        self._say(logging.INFO, "%s started", self._scheduler.name(worker))
        return []

    def _finish_start(self, error: McinferError | None) -> list[Action]:
        """The scheduler knows whether the pool is up; what is to be done next."""
        specs = self._scheduler.specs
        if error is None and specs is not None:
            self._started.set_result(specs)
            self._tell_change()
            return []
        self._failure = error
        return self._scheduler.handle_close(monotonic(), self._timeouts.close)

    def _close(self, timeout: float) -> None:
        self._carry_out(self._scheduler.handle_close(monotonic(), timeout))

    def _collapse(self, exc: BaseException) -> None:
        """Last resort: end everything, answer everyone."""
        failure = ClosedError(f"the master failed: {exc!r}")
        with self._lock:
            self._finished = True
            self._failure = self._failure or failure
            for process in self._fleet.processes.values():
                process.kill()
            jobs = [*self._jobs.values()]
            self._jobs.clear()
        self._answers.fail_all(jobs, failure)

    def _tear_down(self) -> None:
        """After the last worker: give up sockets, descriptors and the folder."""
        with self._lock:
            self._torn_down = True
            self._fleet.close_socket()
            self._poll.close()
            self._line.call_next()
            self._tell_change()
            _settle(self._restarted, ClosedError("the master was closed"))
        self.arena.close()
        self._fleet.close(_LAST_OUTPUT)
        self._answers.end()
        self._log_records()
        if not self._started.done():
            self._started.set_exception(self._failure or ClosedError("the master was closed"))


def _settle(future: "Future[None]", error: McinferError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
