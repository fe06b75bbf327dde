"""The master's shell: the threads that run a pool, and the callers that wait for it.

::

    any thread ── submit ──► [lock: Pool] ──► settle futures, lock released
    I/O thread ── one wait for: messages, pidfds of all workers, the wake-up descriptor, the next due time
                  └─► [lock: Pool] ──► settle futures, log, lock released
    a caller that waits ── takes the messages itself, one caller at a time, in the place of the I/O thread

Rules of ownership: a supervisor owns the pool and the one lock that guards it, the I/O thread, and the watch
that this one waits with. What is done with the lock held is the pool's, and never waits. Futures are settled
with the lock released; those that users have added callbacks to in the I/O thread alone, one after another,
since callbacks are user code. Records are logged there, too, since handlers are.

Ctrl-C raises in the main thread, between any two instructions: whatever changes shared state there is
inside `HeldInterrupts`.

After a fork the child has no I/O thread and must not touch the sockets: every entry compares the pid.
"""

import atexit
import logging
import math
import os
import select
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from time import monotonic

from mcinfer.answers import Answers
from mcinfer.config import Limits, RestartPolicy, Timeouts
from mcinfer.errors import (
    ClosedError,
    McinferError,
    QueueFullError,
    ReadyTimeoutError,
)
from mcinfer.interrupts import HeldInterrupts
from mcinfer.pool import Pool
from mcinfer.protocol import Build, BuildFinish
from mcinfer.records import Records
from mcinfer.shm.arena import Arena
from mcinfer.staging import Arrays, Job
from mcinfer.statistics import Health, Statistics
from mcinfer.tracing import TraceHook
from mcinfer.transport import TransportKind
from mcinfer.waiting_line import WaitingLine
from mcinfer.wakeup import WakeUp
from mcinfer.watch import LONGEST_WAIT, Watch

_LAST_OUTPUT = 1.0
"""Seconds that a closing master gives to what its workers printed last."""

_INTERRUPT_LOOKS = 0.1
"""Seconds that an interrupt may have to wait for a caller that waits for its turn."""

_HEALTH_LOOKS = 0.2
"""Seconds between two looks of `wait_ready` at what no event tells of: processes that are stopped."""


class Supervisor:
    """The pool of one master, its lock and its I/O thread."""

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
        transport: TransportKind = "zeromq",
    ) -> None:
        """Take what is to be run; nothing starts before `start`."""
        self._timeouts = timeouts
        self._limits = limits
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._line = WaitingLine(self._lock)
        self._restarting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = WakeUp()
        self._answers = Answers(wake=self._wake_io_thread, answered=self._wake_driver, trace=trace)
        self._records = Records(wake=self._wake_io_thread)
        self._start_called = False
        self._abandoned = False
        self._watch = Watch()
        self._driving = threading.Lock()
        self._driver = 0
        self._driver_wakeup = WakeUp()
        self.arena = Arena(
            memory_bytes,
            wake=self._watch.wakeup.set,
            transient=lambda: self._pool.has_jobs(),
            dropped=self._detach,
        )
        self._pool = Pool(
            builds,
            self.arena,
            timeouts=timeouts,
            restart=restart,
            limits=limits,
            max_batch_size=max_batch_size,
            max_delay=max_delay,
            tracing=trace is not None,
            transport=transport,
            answers=self._answers,
            records=self._records,
            watch=self._watch,
            room=self._line.call_next,
            done=self._on_done,
        )

    # Life.

    def claim_start(self) -> None:
        """Raise `ClosedError` unless this is the first start, and it was not closed before."""
        self._check_process()
        with HeldInterrupts(), self._lock:
            if self._start_called or self._pool.finished:
                raise ClosedError("a master can be started once; make a new one")
            self._start_called = True

    def refuse_start(self, failure: McinferError) -> None:
        """There is nothing to start: raise this, and say so from now on."""
        with HeldInterrupts(), self._lock:
            self._pool.finish(failure)
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
                self._pool.open()
                opened.callback(self._pool.close, 0.0)
                opened.callback(self._pool.close_socket)
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
                    self._pool.start()
                self._answers.give()
            self._watch.wakeup.set()
            return self._pool.started.result()
        except BaseException:
            self.close(0.0 if not self._pool.started.done() else None)
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
                        self._pool.finish()
                        return
                    if drain:
                        self._pool.drain(math.inf if timeout is None else timeout)
                    else:
                        self._pool.end(self._timeouts.close if timeout is None else timeout)
                    if self._driver == threading.get_ident():
                        # A signal's handler, in a call that waits for its answer, which others must read.
                        self._watch.listen(True)
                self._answers.give()
                self._watch.wakeup.set()
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
        if self._pool.finished:
            raise ClosedError("the master was closed while it was starting")

    def abandon(self) -> None:
        """Ask the I/O thread to close everything: for finalizers, so it takes no lock and never waits."""
        self._abandoned = True
        if os.getpid() == self._pid:
            self._watch.wakeup.set()

    def check_open(self) -> None:
        """Raise `ClosedError` unless requests can be taken here."""
        self._check_process()
        if self._pool.finished:
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
        return self._pool.serving

    def check_room(self) -> None:
        """Raise `QueueFullError` if no request would be taken now, and none may wait for its turn."""
        if self._limits.when_queue_full == "raise":
            self._pool.check_room()

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
            self._pool.enter(job, start, timeout, priority)
        except QueueFullError:
            if wait:
                return False
            raise
        job.future.help = self._help_answer
        return True

    def _help_answer(self, future: "Future[Arrays]", deadline: float, late: bool) -> None:
        """While its answer is waited for, take the messages in the place of the I/O thread, if nobody does.

        That saves two changes of thread for each answer. When this one has come, or the time is over, it
        gives them back. Of submitted requests, only for one that is alone: where many wait, the I/O thread
        takes all their answers in one go.

        Args:
            future: Of a job that was submitted.
            deadline: On the monotonic clock.
            late: Whether nobody was known to wait for it when it was submitted.
        """
        driving = False
        if late and self._pool.in_flight > 1 and self._driver != threading.get_ident():
            return
        if os.getpid() != self._pid or not self.may_wait():
            return
        # A signal's handler, in a call that takes the messages already.
        within = self._driver == threading.get_ident()
        try:
            with HeldInterrupts():
                driving = not (within or future.done()) and self._driving.acquire(blocking=False)
                if driving:
                    self._driver = threading.get_ident()
                    self._watch.listen(False)
            # One of its own: that of the call around this one is in use.
            poll = self._new_driver_poll() if within else self._driver_poll
            while (driving or within) and not future.done() and not self._pool.closed:
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
                    self._watch.listen(True)
                finally:
                    self._driver = 0
                    self._driving.release()

    def _new_driver_poll(self) -> select.poll:
        """What a caller that takes the messages waits for."""
        poll = select.poll()
        poll.register(self._pool.fd, select.POLLIN)
        poll.register(self._driver_wakeup.fd, select.POLLIN)
        return poll

    def _drive(self, poll: select.poll, seconds: float) -> None:
        """One wait for messages, in a caller's thread; the I/O thread keeps deaths and time."""
        most = None if seconds == math.inf else min(seconds, LONGEST_WAIT) * 1000
        for fd, _ in poll.poll(most):
            if fd == self._driver_wakeup.fd:
                self._driver_wakeup.clear()
        with HeldInterrupts():
            with self._lock:
                self._pool.receive()
            self._answers.give()

    def _on_done(self, number: int, future: "Future[Arrays]") -> None:
        """A future is done; if its caller cancelled it, the run is to stop.

        It must not hold the job: a future that a user keeps would keep the job's memory.
        """
        if not future.cancelled() or os.getpid() != self._pid:
            return
        with HeldInterrupts():
            with self._lock:
                self._pool.cancel(number)
            self._answers.give()

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
            return self._pool.statistics(
                memory_bytes=size, memory_used_bytes=used, weights_version=weights_version
            )

    # Health.

    def health(self) -> Health:
        """How the pool is now.

        Raises:
            ClosedError: This process was forked from the master's.
        """
        self._check_process()
        with HeldInterrupts(), self._lock:
            return self._pool.health()

    def wait_ready(self, timeout: float) -> Health:
        """Wait until every worker serves.

        Raises:
            ReadyTimeoutError: Not all did in time.
            ClosedError: The master is closed, or was not started.
        """
        self._check_process()
        deadline = monotonic() + timeout
        while True:
            with HeldInterrupts(), self._lock:
                health = self._pool.health()
                changed = self._pool.changed
            left = deadline - monotonic()
            if health.state == "ready":
                return health
            if not self._start_called:
                raise ClosedError(
                    "the master is not started: call start(), or use it in a with statement"
                )
            if self._pool.finished or health.state in ("closing", "closed"):
                raise ClosedError(f"the master does not become ready any more: {health}")
            if left <= 0:
                raise ReadyTimeoutError(f"not ready within {timeout:g} s: {health}")
            changed.wait(min(left, _HEALTH_LOOKS))

    def restart_workers(self, timeout: float) -> None:
        """Replace every worker's process by a fresh one, one after another.

        Raises:
            ReadyTimeoutError: They were not all replaced in time; the rest stays as it is.
            WorkerDiedError: A fresh one could not load the model within its budget of starts; likewise.
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
                    self._pool.restart_workers()
                self._watch.wakeup.set()
            try:
                self._pool.restarted.result(min(deadline - monotonic(), threading.TIMEOUT_MAX))
            except TimeoutError:
                raise late from None
        finally:
            if mine:
                with HeldInterrupts():
                    with self._lock:
                        self._pool.abandon_restart()
                    self._restarting.release()

    # The I/O thread.

    def _run(self) -> None:
        try:
            while not self._pool.finished:
                self._turn()
        except BaseException as exc:  # a bug here must not leave callers waiting or workers running
            self._records.add(logging.CRITICAL, "the I/O thread failed", failure=exc)
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
            seconds = self._watch.plan(self._pool.next_look())
        woken, ready = self._watch.wait(seconds)
        if woken:
            self.arena.reclaim()
        with self._lock:
            self._pool.look(ready)
            if self._abandoned:
                self._pool.end(self._timeouts.close)
            self._pool.receive()
        self._answers.give()
        self._answers.give_public()
        self._records.log()

    def _wake_io_thread(self) -> None:
        """There are futures to answer, or records to log; in its own turn the I/O thread looks by itself."""
        if threading.current_thread() is not self._thread:
            self._watch.wakeup.set()

    def _wake_driver(self) -> None:
        """A future was settled: if the driver waits for it, in another thread, it must look."""
        if self._driver not in (0, threading.get_ident()):
            self._driver_wakeup.set()

    def _detach(self, number: int) -> None:
        """The arena has dropped a block."""
        if self._thread is None or os.getpid() != self._pid:
            return
        with self._lock:
            self._pool.detach(number)

    def _collapse(self, exc: BaseException) -> None:
        """Last resort: end everything, answer everyone."""
        failure = ClosedError(f"the master failed: {exc!r}")
        with self._lock:
            jobs = self._pool.collapse(failure)
        self._answers.fail_all(jobs, failure)

    def _tear_down(self) -> None:
        """After the last worker: give up sockets, descriptors and the folder."""
        with self._lock:
            self._pool.close_socket()
        self.arena.close()
        self._pool.close(_LAST_OUTPUT)
        self._answers.end()
        self._records.log()
        if not self._pool.started.done():
            failure = self._pool.failure or ClosedError("the master was closed")
            self._pool.started.set_exception(failure)
