"""The loop: one thread owns the workers of a master and all shared state.

::

    callers ── inbox (a deque) ──► loop ── events ──► Scheduler (pure) ── orders ──► loop: send, kill, settle
                                    │ one wait for: messages, pidfds of all workers, the bell, what is due
    callers ◄── their own locks ────┤
    callbacks, trace hooks, logs ◄──┴── Delivery (a thread)

Rules of ownership: only the loop's thread touches the scheduler, the processes, the sockets, the record of
shared memory and the accepted requests, so these need no lock. A caller appends to the inbox, writes to an
eventfd (the *bell*) if the loop sleeps, and waits on a lock of its own (`Outcome`). An exception anywhere
in a caller leaves garbage, not damage: Python runs signal handlers in the main thread, which is never the
loop. The loop runs no user code, and takes no lock that user code can hold.

After a fork the child has no loop and must not touch the sockets: every entry point compares the pid.
"""

import atexit
import logging
import math
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from itertools import count
from time import monotonic
from typing import Any, TypeVar
from weakref import ref

from mcinfer.config import Device, Limits, RestartPolicy, Timeouts
from mcinfer.errors import (
    BuildError,
    ClosedError,
    McinferError,
    PredictError,
    PredictTimeoutError,
    ProtocolError,
    QueueFullError,
    ReadyTimeoutError,
)
from mcinfer.machine import oom_kills, usable_memory
from mcinfer.private import ModelInMemory, model_name
from mcinfer.protocol import (
    MAX_NOTES,
    REPLY,
    REPLY_HEAD,
    Build,
    BuildFinish,
    Error,
    Message,
    Preparing,
    Reply,
)
from mcinfer.requests.frames import IdleFrames
from mcinfer.requests.request import Follower, Outcome, Promise, Request
from mcinfer.runtime.connections import Connections, UnreachableError
from mcinfer.runtime.delivery import Delivery
from mcinfer.runtime.memory import ROOM_INTERVAL, Allocation, IdleMemory, MemoryLine
from mcinfer.runtime.worker_process import WorkerProcess
from mcinfer.scheduler.balance import Balance
from mcinfer.scheduler.dispatch import Entry, trace_of
from mcinfer.scheduler.queue import ShardId
from mcinfer.scheduler.scheduler import Scheduler
from mcinfer.shm.arena import Arena, SharedBlock, Slot
from mcinfer.shm.descriptors import WakeUp
from mcinfer.statistics import Health, Statistics, TraceHook, WorkerStatistics

T = TypeVar("T")

_log = logging.getLogger("mcinfer.master")

_MAX_MESSAGES = 256  # in one turn: one worker must not delay the others
_LONGEST_WAIT = 86400.0  # seconds of one wait: epoll takes no more than 24 days
_MEMORY_INTERVAL = 1.0  # seconds between two checks of workers' memory
_HEALTH_INTERVAL = 0.2  # seconds between two checks of `wait_ready`
_CALLER_PATIENCE = 5.0  # seconds past its deadline that a caller waits for the loop
_LOOP_PATIENCE = 60.0  # seconds that a question to the loop waits for its answer
_LAST_OUTPUT = 1.0  # seconds for workers' last output, and for callbacks, at the close
_MAX_NOTES = 100  # different notes that are logged

_NOT_STARTED = "the master is not started: call start(), or use it in a with statement"
_CLOSING = "the master is closing: it finishes what it has, and takes no more"

_LEVELS = {"degraded": logging.WARNING, "failed": logging.ERROR}


class _Call(Promise[T]):
    """A function for the loop to call."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function = function

    def make(self) -> None:
        try:
            self.set(self._function())
        except Exception as exc:
            self.settle(exc)


class Loop:
    """The workers of one master, their requests, and the thread that owns both.

    Attributes:
        arena: The shared memory of tensors.
        model: The model, if it is in memory; closed when no worker is started any more.
        frames: Memory of it that is not in use.
        finished: Whether no worker is left, and none will be started.
        serving: How many workers are ready or busy.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Build]],
        *,
        timeouts: Timeouts,
        restart: RestartPolicy,
        limits: Limits,
        memory_bytes: int,
        max_batch_size: int = 1,
        max_delay: float = 0.0,
        trace: "ref[TraceHook] | None" = None,
        balance: Balance | None = None,
        seeds_on_one: bool = False,
        worker: type[WorkerProcess] = WorkerProcess,
    ) -> None:
        self._groups = (
            groups  # for each worker, the builds of its ranks: one, unless a model is cut
        )
        self._builds = builds = [ranks[0] for ranks in groups]
        self._timeouts = timeouts
        self._limits = limits
        self._trace = trace
        self._balance = balance
        self._pid = os.getpid()
        self._scheduler = Scheduler(
            builds,
            self,
            self,
            timeouts=timeouts,
            restart=restart,
            limits=limits,
            max_batch_size=max_batch_size,
            max_delay=max_delay,
            tracing=trace is not None,
            balance=balance,
            seeds_on_one=seeds_on_one,
        )
        self._table = self._scheduler.table
        self._block_numbers = count()
        self.arena = Arena(memory_bytes, dropped=self._detach, numbers=self._block_numbers)
        self._connections = Connections(groups, self._block, limits, worker)
        devices = _some(build.device for ranks in groups for build in ranks)
        self._delivery = Delivery(f"{model_name(builds[0].model)} on {devices}")
        self.model: ModelInMemory | None = None
        self.frames = IdleFrames()
        self._bell = WakeUp()
        self._ended = WakeUp()
        self._asleep = False
        self._readable = True  # whether there may be messages
        self._inbox: deque[Request | _Call[Any] | Allocation] = deque()
        self._requests: dict[int, Request] = {}
        self._next_number = 0
        self._line: deque[Request] = deque()  # for a place in the queue
        self._line_due = math.inf  # when the time of one of them is over, or earlier
        self._memory = MemoryLine(self.arena, self.frames.release, self._requests)
        self._lines = {self.arena: self._memory}  # and one for each card
        self._idle = IdleMemory(self.arena)
        self._cards: dict[Device, Any] = {}
        self._reached: dict[int, frozenset[str]] = {}  # by worker, the cards that it reaches
        self._due = 0.0
        self._news: deque[Callable[[], None]] = deque()  # what orders have led to
        self._memory_look = math.inf if restart.max_memory_bytes is None else 0.0
        self._pidfds: set[int] = set()
        self._notes: set[str] = set()
        self._lost_at: float | None = None  # when the pool ceased to be ready, until it is again
        self._oom_kills: dict[int, int] = {}  # by worker: at its start
        self._start_claims = [True]
        self._run_claims = [True]
        self._close_asked = False
        self._abandoned = False
        self._thread: threading.Thread | None = None
        self._ident = 0
        self._started = Promise[BuildFinish]()
        self._restarted: Promise[None] | None = None
        self._failure: McinferError | None = None
        self.finished = False
        self._gone = False
        self.serving = 0

    # Life, for any thread.

    def claim_start(self) -> None:
        """Raise `ClosedError` unless this is the first start, before any `close`."""
        self._check_process()
        if not _take(self._start_claims) or self._close_asked:
            raise ClosedError("a master can be started once; make a new one")

    def refuse_start(self, failure: McinferError) -> None:
        """Raise this failure, and report it from now on."""
        self._failure = failure
        self.finished = self._gone = True
        raise failure

    def start(self) -> BuildFinish:
        """Start all workers, wait until they have the model, and return its description.

        Raises:
            BuildError: A worker could not load it, or the system has no descriptor or thread left; no
                process is left.
            ClosedError: The loop was closed meanwhile; no process is left.
        """
        try:
            self._open()
        except (OSError, RuntimeError) as exc:  # no descriptor, or no thread
            raise BuildError(f"no pool can be opened: {exc}") from exc
        try:
            if self._close_asked:
                raise ClosedError("the master was closed while it was starting")
            self._ask(self._start_workers)
            self._started.wait()
            return self._started.result()
        except BaseException:
            self.close(None if self._started.settled else 0.0)
            raise

    def _open(self) -> None:
        """Open the transport and start the threads; all or nothing."""
        with ExitStack() as opened:
            self._connections.open()
            self._transport = self._connections.transport
            opened.callback(self._connections.close, 0.0)
            opened.callback(self._connections.close_socket)
            self._poll = select.epoll()
            opened.callback(self._poll.close)
            self._poll.register(self._bell.fd, select.EPOLLIN)
            self._poll.register(self._transport.fd, select.EPOLLIN)
            self._plain_fds = frozenset((self._bell.fd, self._transport.fd))
            atexit.register(self.close)
            opened.callback(atexit.unregister, self.close)
            opened.callback(self._delivery.close)
            self._delivery.start()
            thread = threading.Thread(target=self._run, name="mcinfer-loop", daemon=True)
            try:
                thread.start()
                self._thread = thread
                opened.pop_all()
            except BaseException:
                if not _take(self._run_claims):
                    # Ctrl-C, and the thread runs: it closes all of this.
                    self._thread = thread
                    self.finished = True
                    self._bell.set()
                    opened.pop_all()
                raise

    def close(self, timeout: float | None = None, *, drain: bool = False) -> None:
        """End all workers; see `Master.close`."""
        if self.is_forked:
            return
        self._close_asked = True
        thread = self._thread
        if thread is None:
            self.finished = True
            return
        try:
            if drain:
                self._post(_Call(partial(self._drain, math.inf if timeout is None else timeout)))
            else:
                self._post(_Call(partial(self._end, timeout)))
            if self.may_wait():
                self._wait_for_end(thread)
        except BaseException:
            if drain:
                self.close()  # Ctrl-C: who waits for requests to be answered does not any more
            raise

    def _wait_for_end(self, thread: threading.Thread) -> None:
        """Wait until the loop has closed everything.

        `Thread.join` alone will not do: after one that a signal's handler interrupts, Python 3.11 takes the
        thread for ended, and the next one does not wait (`_wait_for_tstate_lock` in its threading.py).
        """
        ended = select.poll()
        ended.register(self._ended.fd, select.POLLIN)
        ended.poll()
        thread.join()
        self._delivery.wait(_LAST_OUTPUT)

    def abandon(self) -> None:
        """Ask the loop to close everything, without waiting: for finalizers."""
        self._abandoned = True
        if not self.is_forked:
            self._bell.set()

    def check_open(self, *, for_request: bool = False) -> None:
        """Raise `ClosedError` unless calls are taken; `for_request`, `QueueFullError` if none has a place."""
        if self._thread is None or self._close_asked or os.getpid() != self._pid:
            self._check_process()
            if self.finished:
                raise ClosedError("the master is closed")
            raise ClosedError(_CLOSING if self._close_asked else _NOT_STARTED)
        limits = self._limits
        full = for_request and self._table.in_flight >= limits.queue
        if full and limits.when_queue_full == "raise":
            self._scheduler.check_room(0)

    @property
    def state(self) -> str:
        """The state in words, without asking the loop."""
        if self.is_forked:
            return f"of process {self._pid}"
        if self.finished:
            return "closed" if self._failure is None else "failed"
        if self._start_claims:
            return "not started"
        if self._close_asked or not self._started.settled:
            return "closing" if self._close_asked else "starting"
        workers = len(self._builds)
        return "ready" if self.serving == workers else f"{self.serving} of {workers} workers serve"

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the master's: then it has no loop."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        if self.is_forked:
            raise ClosedError(
                f"this master belongs to process {self._pid}; process {os.getpid()} was forked from it "
                "and needs a master of its own"
            )

    def check_wait(self) -> None:
        """Raise an error where the calling thread would wait in vain.

        Raises:
            McinferError: It is the loop's: the collector runs a finalizer there.
            ClosedError: This process was forked from the master's.
        """
        self._check_process()
        if threading.get_ident() == self._ident:
            raise McinferError(
                "called by a finalizer in mcinfer's own thread, where nothing may wait"
            )

    def may_wait(self) -> bool:
        """Whether the calling thread may wait for answers: not in a callback, which others wait behind."""
        return threading.get_ident() not in (self._ident, self._delivery.ident)

    # Requests, for any thread.

    def enter(self, request: Request, *, wait: bool) -> None:
        """Queue a request; with `wait`, return only when it has a place in the queue.

        Raises:
            ClosedError: The master is closed.
            QueueFullError: Too many requests are in flight, and were until the time was over.
        """
        if wait:
            limits = self._limits
            near = self._table.in_flight + len(self._inbox) >= limits.queue
            if near or self._line or limits.queue_bytes is not None:
                self.check_wait()
                request.entered = Promise[None]()
        self._inbox.append(request)
        if self._asleep:
            self._ring()
        if self._gone:
            self._refuse_inbox()
        entered = request.entered
        if entered is None:
            return
        try:
            entered.wait(request.called + request.timeout - monotonic() + _CALLER_PATIENCE)
            if not entered.settled:
                raise QueueFullError("the loop did not answer in time")
            entered.result()
        except BaseException:
            self.forget(request)
            raise

    def forget(self, request: Request) -> None:
        """Cancel a request without waiting for that."""
        self._post(_Call(partial(self._cancel, request)))

    def await_answer(self, request: Request) -> None:
        """Wait until a request is settled.

        Raises:
            PredictTimeoutError: The loop hangs.
        """
        patience = request.called + request.timeout - monotonic() + _CALLER_PATIENCE
        if not request.wait(patience):
            self.forget(request)
            if not request.wait(_CALLER_PATIENCE):
                raise PredictTimeoutError(
                    f"no answer within {request.timeout:g} s: the loop does not answer"
                )

    def cancel(self, outcome: Outcome[Any]) -> bool:
        """Cancel a request; False if it was settled before."""
        if self.is_forked:
            return False
        call = _Call(partial(self._cancel, outcome))
        self._post(call)
        if threading.get_ident() == self._ident:
            return True  # a finalizer that the collector runs in the loop
        self._await(call)
        return outcome.was_cancelled

    def deliver(self, call: Callable[[], object]) -> None:
        """Have the delivery thread make a call."""
        self._delivery.put(call)

    def allocate(
        self,
        sizes: Sequence[int],
        timeout: float,
        arena: Arena | None = None,
        block: SharedBlock | None = None,
    ) -> list[Slot]:
        """Slots of shared memory of so many bytes, all or none; `arena` is that of a card, None the host's.

        Raises:
            QueueFullError: The memory is in use, and was until the time was over.
            InvalidInputError, ClosedError: As `Arena.allocate_all`.
            PredictError: The system has no memory or descriptor left.
            McinferError: As `check_wait`.
            BlockNeededError: The card's arena needs a block: make one, and come again with it.
        """
        self.check_wait()
        line = self._memory if arena is None else self._lines[arena]
        wanted = Allocation(line, sizes, timeout, block)
        try:
            self._post(wanted)
            if not wanted.wait(timeout + _CALLER_PATIENCE) and self._gone:
                self._refuse_inbox()
        except BaseException:
            wanted.deadline = -math.inf  # nothing is to wait behind it
            raise
        try:
            if not wanted.settled:
                raise QueueFullError("the loop did not answer in time")
            return wanted.result()
        finally:
            # Or the error's traceback, this frame and it would hold each other, and memory.
            del wanted, block

    def card(self, device: Device) -> Any:
        """A card's memory for tensors (`CardMemory`); the first call opens the card in this process.

        Raises:
            MissingDependencyError: The package cuda-bindings is not installed.
            BuildError: There is no such card, or no driver.
            ClosedError: The master is closed.
        """
        memory = self._cards.get(device)
        if memory is None:
            from mcinfer.cards.tensors import (
                open_memory,
            )  # where a tensor, or an argument, names a card

            opened = open_memory(
                device,
                self._limits.memory_bytes,
                self.allocate,
                self._delivery.repeat,
                self._detach,
                self._block_numbers,
            )
            memory = self._ask(partial(self._add_card, device, opened))
        return memory

    def _ring(self) -> None:
        os.eventfd_write(self._bell.fd, 1)  # which lives as long as the loop's object

    def _post(self, item: "_Call[Any] | Allocation") -> None:
        self._inbox.append(item)
        if self._asleep:
            self._ring()
        if self._gone:
            self._refuse_inbox()

    def _ask(self, function: Callable[[], T]) -> T:
        """Call a function in the loop, and wait for its result or error."""
        if self._thread is None or self._gone:
            return function()
        self.check_wait()
        call = _Call(function)
        self._post(call)
        self._await(call)
        return call.result()

    def _await(self, call: Outcome[Any]) -> None:
        end = monotonic() + _LOOP_PATIENCE
        while not call.wait(1.0):
            if self._gone:
                self._refuse_inbox()
            elif monotonic() >= end:
                raise McinferError(f"the loop did not answer within {_LOOP_PATIENCE:g} s")

    # Health, for any thread.

    def statistics(self, weights_version: int) -> Statistics:
        self._check_process()
        return self._ask(partial(self._take_statistics, weights_version))

    def health(self) -> Health:
        self._check_process()
        return self._ask(self._take_health)

    def wait_ready(self, timeout: float) -> Health:
        """See `Master.wait_ready`."""
        self._check_process()
        end = monotonic() + timeout
        pause = Promise[None]()
        while True:
            health = self._ask(self._take_health)
            left = end - monotonic()
            if health.state == "ready":
                return health
            if self._start_claims:
                raise ClosedError(_NOT_STARTED)
            if self.finished or health.state in ("closing", "closed"):
                raise ClosedError(f"the master does not become ready any more: {health}")
            if left <= 0:
                raise ReadyTimeoutError(f"not ready within {timeout:g} s: {health}")
            pause.wait(min(left, _HEALTH_INTERVAL))

    def restart_workers(self, timeout: float) -> None:
        """See `Master.restart_workers`."""
        end = monotonic() + timeout
        restarted: Promise[None] | None = None
        try:
            while True:
                before, restarted = self._ask(self._restart)
                if restarted is not None or before is None:
                    break
                if not before.wait(end - monotonic()):  # another call's
                    raise ReadyTimeoutError(f"not all workers were replaced within {timeout:g} s")
            if restarted is None or not restarted.wait(end - monotonic()):
                raise ReadyTimeoutError(f"not all workers were replaced within {timeout:g} s")
            restarted.result()
        finally:
            if restarted is not None:
                self._post(_Call(partial(self._forget_restart, restarted)))

    # From here on: the loop's thread alone.

    def _run(self) -> None:
        if not _take(self._run_claims):
            return
        self._ident = threading.get_ident()
        try:
            while not self.finished:
                self._turn()
        except BaseException as exc:  # a bug here must not leave callers waiting or workers running
            self._delivery.log(logging.CRITICAL, "the loop failed", failure=exc)
            self._collapse(exc)
        finally:
            try:
                self._tear_down()
            finally:
                self._ident = 0  # another thread may have it from now on
                self._ended.set()
                atexit.unregister(self.close)

    def _turn(self) -> None:
        """Handle all that has come; wait once if that was nothing."""
        while self._news:
            self._news.popleft()()
        inbox = self._inbox
        count = len(inbox)
        while count:
            # It counts as in the inbox until it counts as in flight.
            item = inbox[0]
            if isinstance(item, Request):
                self._enter(item)
            elif isinstance(item, _Call):
                item.make()
            else:
                self._allocate(item)
            del item
            inbox.popleft()
            count -= 1
        if self._readable:
            self._receive()
        scheduler, now = self._scheduler, monotonic()
        if now >= self._due or now >= scheduler.due:
            self._look(now)
        if self._line:
            self._admit()
        if self._readable or inbox or self._news or self.finished:
            return
        self._asleep = True
        if inbox or not self._transport.may_sleep():
            self._asleep = False
            self._readable = True
            return
        wait = min(self._due, scheduler.due) - monotonic()
        ready = self._poll.poll(min(wait, _LONGEST_WAIT) if wait > 0 else 0)
        self._asleep = False
        if len(ready) == 1 and ready[0][0] in self._plain_fds:
            if ready[0][0] == self._bell.fd:
                os.eventfd_read(self._bell.fd)
                if self._abandoned:
                    self._end(None)
        elif ready:
            self._look_at_descriptors([fd for fd, _ in ready])
        self._readable = len(ready) > 1 or (bool(ready) and ready[0][0] != self._bell.fd)

    def _look(self, now: float) -> None:
        """Do what is due, and note when the next thing is."""
        if self._scheduler.due <= now:
            self._scheduler.handle_time(now)
        if self._memory_look <= now:
            self._look_at_memory(now)
        for line in self._lines.values():
            if line.waiting:
                line.serve(now)
        self._idle.note_growth(now)
        if self._idle.due <= now:
            self._give_back(now)
        if self._line_due <= now:
            self._refuse_late(now)
        self._due = min(self._memory_look, self._idle.due, self._line_due)
        if any(line.waiting for line in self._lines.values()):
            self._due = min(self._due, monotonic() + ROOM_INTERVAL)

    def _refuse_late(self, now: float) -> None:
        """Refuse requests whose time is over while they wait for a place."""
        for request in [r for r in self._line if r.called + r.timeout <= now]:
            self._line.remove(request)
            try:
                self._scheduler.check_room(request.size)
                raise QueueFullError("the queue was full until the time was over")
            except QueueFullError as exc:
                self._refuse(request, exc)
        self._line_due = min((r.called + r.timeout for r in self._line), default=math.inf)

    # Callers.

    def _enter(self, request: Request) -> None:
        if request.settled:
            return
        if self._line and request is not self._line[0] and request.limited:
            self._wait_for_place(request)
            return
        if self.finished:
            self._refuse(request, ClosedError("the master is closed"))
            return
        number, now = self._next_number, monotonic()
        request.number = number
        self._requests[number] = request
        try:
            self._scheduler.handle_request(
                now,
                number,
                request.rows,
                request.timeout,
                called=request.called,
                size=request.size,
                priority=request.priority,
                join=request.join,
                preferred=request.preferred,
                limited=request.limited,
            )
        except McinferError as exc:
            del self._requests[number]
            is_full = isinstance(exc, QueueFullError)
            if is_full and request.waits and request.called + request.timeout > now:
                self._wait_for_place(request)
            else:
                self._refuse(request, exc)
            return
        self._next_number = number + 1
        if request.entered is not None:
            request.entered.settle()

    def _wait_for_place(self, request: Request) -> None:
        if not self._line or request is not self._line[0]:  # the first one is looked at again
            if not request.waits:
                self._refuse(request, QueueFullError("others wait already for room in the queue"))
                return
            self._line.append(request)
        self._line_due = min(self._line_due, request.called + request.timeout)
        self._due = min(self._due, self._line_due)

    def _refuse(self, request: Request, error: McinferError, *, cancelled: bool = False) -> None:
        if not request.settled:
            request.settle(error, cancelled=cancelled)
        request.release()
        if request.entered is not None and not request.entered.settled:
            request.entered.settle(error)

    def _admit(self) -> None:
        """Give free places to callers that wait for one."""
        with suppress(QueueFullError):
            while self._line:
                request = self._line[0]
                if not request.settled:
                    if not self.finished:
                        self._scheduler.check_room(request.size)
                    self._enter(request)
                self._line.popleft()

    def _cancel(self, outcome: Outcome[Any]) -> None:
        if outcome.settled or not isinstance(outcome, Request):
            return
        # By identity: the number of one that waits for a place is that of the next that gets one.
        if self._requests.get(outcome.number) is outcome:
            self._scheduler.handle_cancel(monotonic(), outcome.number)
            return
        if outcome in self._line:
            self._line.remove(outcome)
        self._refuse(outcome, ClosedError("the request was cancelled"), cancelled=True)

    def _add_card(self, device: Device, memory: Any) -> Any:
        if self.finished:
            raise ClosedError("the master is closed")
        if device not in self._cards:
            self._lines[memory.arena] = MemoryLine(memory.arena, lambda: False, self._requests)
            memory.is_reached = self._is_reached(device)
            self._cards[device] = memory
        return self._cards[device]

    def _is_reached(self, device: Device) -> bool:
        """Whether every worker can be given a card's memory, as far as they have said what they reach."""
        return all(str(device) in cards for cards in self._reached.values())

    def _block(self, number: int) -> SharedBlock | None:
        """A block of the master's, by its number."""
        found = (line.arena.block(number) for line in self._lines.values())
        return next((block for block in found if block is not None), None)

    def _allocate(self, wanted: Allocation) -> None:
        if not wanted.settled and wanted.line.take(wanted):
            self._due = min(self._due, monotonic() + ROOM_INTERVAL)
        self._idle.note_growth(monotonic())
        self._due = min(self._due, self._idle.due)

    def _give_back(self, now: float) -> None:
        """Give memory that was not in use for a while back to the system."""
        table = self._table
        self._idle.look(now, self.frames, table.in_flight_bytes, table.take_peak())

    # Life.

    def _start_workers(self) -> None:
        if not self.finished:
            self._scheduler.handle_start(monotonic())

    def _drain(self, seconds: float) -> None:
        self._scheduler.handle_drain(monotonic(), seconds)
        self._refuse_line(_CLOSING)

    def _end(self, seconds: float | None) -> None:
        seconds = self._timeouts.close if seconds is None else seconds
        self._scheduler.handle_close(monotonic(), seconds)
        self._refuse_line("the master is closed")

    def _refuse_line(self, reason: str) -> None:
        while self._line:
            self._refuse(self._line.popleft(), ClosedError(reason))

    def _refuse_inbox(self) -> None:
        """The loop has ended: refuse what came too late. Any thread may call it."""
        while self._inbox:
            try:
                item = self._inbox.popleft()
            except IndexError:
                return
            if isinstance(item, Request):
                self._refuse(item, ClosedError("the master is closed"))
            elif isinstance(item, _Call):
                item.make()
            else:
                item.settle(ClosedError("the master is closed"))

    def _collapse(self, exc: BaseException) -> None:
        """A fault of mcinfer: end all workers, fail all requests."""
        self._failure = ClosedError(f"the master failed: {exc!r}")
        self.finished = True
        requests = [*self._requests.values()]
        self._requests.clear()
        for request in requests:
            if not request.settled:
                self._refuse(request, self._failure)
        self._table.give_up()
        processes = [*self._connections.processes.items()]
        for _, process in processes:
            process.kill()
        end = monotonic() + _LAST_OUTPUT
        for index, process in processes:
            if all(_ends(child.pidfd, end) for child in process.ranks):
                self._connections.remove(index)
                process.reap()

    def _tear_down(self) -> None:
        """Close sockets and descriptors at the end, even if one of these fails."""
        self.finished = True
        self.serving = 0
        self._asleep = False  # so that no caller rings: a finalizer may call after the bell's own
        with ExitStack() as last:  # what was entered last comes first
            last.callback(self._delivery.close)
            last.callback(self._leave_cards)
            if self.model is not None:
                last.callback(self.model.close)
            last.callback(self._refuse_all)
            last.callback(self._connections.close, _LAST_OUTPUT)
            for line in self._lines.values():
                last.callback(line.arena.close)
            last.callback(self._poll.close)
            last.callback(self._connections.close_socket)

    def _leave_cards(self) -> None:
        """Have the memory of cards given back once their work is done."""
        for memory in self._cards.values():
            self._delivery.put(memory.leave)

    def _refuse_all(self) -> None:
        """Answer all callers that still wait."""
        closed = ClosedError("the master was closed")
        self._refuse_line("the master is closed")
        for line in self._lines.values():
            line.refuse()
        if self._restarted is not None and not self._restarted.settled:
            self._restarted.settle(closed)
        if not self._started.settled:
            self._started.settle(self._failure or closed)
        self._gone = True
        self._refuse_inbox()

    def _restart(self) -> "tuple[Promise[None] | None, Promise[None] | None]":
        """Begin to replace all workers: the restart in progress, or the one that was begun."""
        before = self._restarted
        if before is not None and not before.settled:
            return before, None
        restarted = Promise[None]()
        self._restarted = restarted
        try:
            self._scheduler.handle_restart(monotonic())
        except McinferError:
            restarted.settle()
            raise
        return None, restarted

    def _forget_restart(self, restarted: "Promise[None]") -> None:
        """The caller of the restart does not wait any more: replace no further workers."""
        if restarted is self._restarted:
            self._restarted = None  # its error's traceback leads to the master
            if not restarted.settled:
                self._scheduler.handle_restart_abandoned()
                restarted.settle()

    # How it is.

    def _take_health(self) -> Health:
        """The scheduler's health, corrected by the state of the processes."""
        health = self._scheduler.health(monotonic())
        if self._failure is not None:
            return replace(health, state="failed", reasons=(str(self._failure),), serving=0)
        if self.finished:
            return replace(health, state="closed", reasons=(), serving=0)
        wrong = {
            index: text
            for index, text in self._connections.standings().items()
            if self._scheduler.workers[index].serves
        }
        if not wrong:
            return health
        reasons = [f"{self._scheduler.workers[index].name} {text}" for index, text in wrong.items()]
        return replace(
            health,
            state="degraded" if health.state == "ready" else health.state,
            reasons=(*health.reasons, *reasons),
            serving=health.serving - len(wrong),
        )

    def _take_statistics(self, weights_version: int) -> Statistics:
        table = self._table
        idle = self.frames.bytes
        return Statistics(
            accepted=table.accepted,
            succeeded=table.succeeded,
            failed=table.failed,
            cancelled=table.cancelled,
            in_flight=table.in_flight,
            in_flight_bytes=table.in_flight_bytes,
            queued=table.not_begun,
            queued_shards=len(self._scheduler.queue),
            latency=table.latency.snapshot(),
            batch_sizes=self._scheduler.batch_sizes.snapshot(),
            memory_bytes=self.arena.size,
            memory_used_bytes=max(0, self.arena.used - idle),
            weights_version=weights_version,
            health=self._take_health(),
            workers=self._take_worker_statistics(),
            cards=tuple(memory.statistics() for memory in self._cards.values()),
        )

    def _take_worker_statistics(self) -> tuple[WorkerStatistics, ...]:
        """One entry for each process; the ranks of a group share what the scheduler knows of the group."""
        found = []
        for w in self._scheduler.lives.statistics():
            if self._balance is not None:
                w = replace(w, rows_per_second=self._balance.rows_per_second(w.index))
            process = self._connections.processes.get(w.index)
            pids = [w.pid, *(child.pid for child in process.ranks[1:])] if process else []
            for rank in range(len(self._groups[w.index])):
                index, device = self._connections.label(w.index, rank)
                pid = pids[rank] if rank < len(pids) else None
                found.append(replace(w, index=index, device=device, pid=pid, rank=rank))
        return tuple(found)

    # Processes.

    def _look_at_descriptors(self, ready: Sequence[int]) -> None:
        """Handle ready descriptors: the bell, and processes that ended."""
        if self._bell.fd in ready:
            self._bell.clear()
            if self._abandoned:
                self._end(None)
        if not self._pidfds.isdisjoint(ready):
            now = monotonic()
            # By index: the death of a card's leader comes before those that follow from it.
            for index, process in sorted(self._connections.processes.items()):
                ended = [child for child in process.ranks if child.pidfd in ready]
                for child in ended:
                    self._poll.unregister(child.pidfd)
                    self._pidfds.discard(child.pidfd)
                if ended:
                    process.note_ends(ended, asked=self._scheduler.is_exiting(index))
                    if self._pidfds.isdisjoint(child.pidfd for child in process.ranks):
                        self._bury(index, now)
                    elif process.killed and not self._scheduler.workers[index].doomed:
                        self._scheduler.handle_killed(index, "")

    def _look_at_memory(self, now: float) -> None:
        """Report how much memory each worker has, where the policy limits it."""
        self._memory_look = now + _MEMORY_INTERVAL
        for index, process in [*self._connections.processes.items()]:
            with suppress(OSError):
                size = process.own_bytes()
                self._scheduler.handle_own_memory(now, index, size)

    def _bury(self, index: int, now: float) -> None:
        """A worker's process has ended."""
        process = self._connections.processes[index]
        self._receive()  # its last messages
        self._connections.remove(index)
        stacks = process.stacks()
        how, statuses = process.reap()
        if not process.peers and self._limits.worker_memory_bytes is not None:
            how += f" (it may have {self._limits.worker_memory_bytes} bytes of memory of its own)"
        killed = statuses == {-signal.SIGKILL}
        if killed and oom_kills() > self._oom_kills.get(index, 0):
            how += (
                "; the out-of-memory killer ended a process of this container (control group) meanwhile, "
                f"which may have {usable_memory()} bytes of memory"
            )
        expected = self._scheduler.is_exiting(index)
        level = logging.INFO if expected and not stacks else logging.WARNING
        where = f"; where it was:\n{stacks}" if stacks else ""
        self._delivery.log(level, "%s %s%s", self._scheduler.workers[index].name, how, where)
        self._scheduler.handle_died(now, index, how, killed=killed)

    # What comes.

    def _receive(self) -> bool:
        """Handle the messages that are there, or the first of very many; whether there were any."""
        if self.finished:
            return False
        receive, peers = self._transport.receive, self._connections.peers
        for taken in range(_MAX_MESSAGES):
            received = receive()
            if received is None:
                self._readable = False
                return taken > 0
            peer, data = received
            process = peers.get(peer)
            is_head = len(data) == REPLY_HEAD.size and data[0] == REPLY
            if is_head and process is not None and not process.outlawed:
                self._take_reply(process.index, *REPLY_HEAD.unpack(data)[1:])
                continue
            index, message = self._connections.read(peer, data)
            if index is not None and message is not None:
                self._handle_message(index, message, monotonic())
        return True

    def _take_reply(self, index: int, number: int, shard: int, seconds: float) -> None:
        """Take the head of a REPLY, not checked yet: all outputs are in their places."""
        now = monotonic()
        request = self._requests.get(number)
        try:
            if request is None or not request.is_laid_out(shard):
                reply = Reply(request=number, shard=shard, outputs=(), seconds=seconds)
                self._handle_message(index, reply, now)
                return
            self._scheduler.handle_answer(now, index, number, shard, seconds)
        except ProtocolError as exc:
            self._outlaw(index, f"breaks the protocol: {exc}")
        if self._line:
            self._admit()

    def _handle_message(self, index: int, message: Message | ProtocolError, now: float) -> None:
        try:
            if isinstance(message, ProtocolError):
                raise message
            if isinstance(message, Reply):
                message = self._take(index, message)
            elif isinstance(message, BuildFinish) and message.slab is not None:
                message = self._take_slab(index, message, message.slab)
            self._scheduler.handle_message(now, index, message)
        except ProtocolError as exc:
            self._outlaw(index, f"breaks the protocol: {exc}")
            return
        except Exception as exc:  # what one worker sends must not end the service of the others
            self._delivery.log(logging.ERROR, "a message could not be handled", failure=exc)
            self._outlaw(index, f"sent what could not be handled: {exc!r}")
            return
        if isinstance(message, Preparing):
            size = f"{message.written / 1e6:.0f} MB"
            name = model_name(self._builds[index].model)
            text = f"preparing {name}: {size} written, {message.seconds:.0f} s"
            self._connections.output.show(text)
        elif isinstance(message, BuildFinish | Error):
            self._connections.output.show("")
        if isinstance(message, BuildFinish):
            self._note(message.notes)
            self._reached[index] = frozenset(message.reaches)
            for device, memory in self._cards.items():
                memory.is_reached = self._is_reached(device)
        if self._line:
            self._admit()
        if isinstance(message, Error) and message.traceback:
            name = self._scheduler.workers[index].name
            self._delivery.log(logging.DEBUG, "%s: %s", name, message.traceback)

    def _note(self, notes: Sequence[str]) -> None:
        """Log what a worker reports of the model's load, each note once."""
        for note in notes:
            if note not in self._notes and len(self._notes) < _MAX_NOTES:
                self._notes.add(note)
                self._delivery.log(logging.WARNING, "%s", note)

    def _take_slab(self, index: int, message: BuildFinish, slab: tuple[int, int]) -> BuildFinish:
        """Get the weights on a card that a worker has made for others; none without a descriptor left."""
        try:
            self._connections.take_slab(index, slab)
        except OSError as exc:
            note = f"the workers of a card do not share its weights: {exc}"
            return replace(message, slab=None, notes=(*message.notes, note)[-MAX_NOTES:])
        return message

    def _take(self, index: int, reply: Reply) -> Message:
        """Have the requests check the reply, and get the blocks that the worker made for it.

        Returns:
            The reply, or the run's failure if this process has no memory for the outputs.
        """
        members = self._scheduler.running(index)
        if not members or members[0] != (reply.request, reply.shard):
            return reply  # the scheduler will say what is wrong with it
        if self._scheduler.is_late(index):
            for number in {reference[3] for reference in reply.outputs}:
                if number is not None and number < 0:
                    with suppress(OSError):  # which the worker cannot help
                        # It is the next on the lifeline, and in the way of others.
                        self._connections.fetch(index, number).close()
            return reply
        if len(members) > 1 and reply.outputs:
            raise ProtocolError(
                "reply with outputs to a joined run, whose outputs all have a place"
            )
        try:
            for number, shard in members:
                fetch = partial(self._connections.fetch, index)
                self._requests[number].take(shard, reply.outputs, fetch, index, self.arena.limit)
        except (OSError, MemoryError) as exc:
            text = f"the master cannot take the answer: {exc!r}"
            return Error(request=reply.request, shard=reply.shard, kind="predict", text=text)
        return reply

    # Orders of the scheduler. What fails in one is an event of the next turn.

    def send_run(self, worker: int, members: Sequence[ShardId], fresh: bool) -> None:
        given = []
        for number, shard in members:
            request = self._requests[number]
            request.workers[shard] = worker
            given.append((request, shard))
        try:
            self._connections.send_run(worker, given, fresh=fresh)
        except UnreachableError as exc:
            self._note_unreachable(worker, exc)

    def send(self, worker: int, message: Message) -> None:
        try:
            self._connections.send(worker, message)
        except UnreachableError as exc:
            self._note_unreachable(worker, exc)

    def share_slab(self, worker: int, leader: int) -> None:
        try:
            self._connections.share_slab(worker, leader)
        except UnreachableError as exc:
            self._note_unreachable(worker, exc)

    def _note_unreachable(self, worker: int, exc: UnreachableError) -> None:
        process, reason = self._connections.processes[worker], str(exc)

        def end() -> None:
            if self._connections.processes.get(worker) is process:
                self._outlaw(worker, reason)

        self._news.append(end)

    def release(self, request: int) -> None:
        # And its memory, once it is answered and no view of it is left.
        self._requests.pop(request).release()

    def kill_worker(self, worker: int) -> None:
        self._connections.kill(worker)

    def pool_started(self, error: McinferError | None) -> None:
        specs = self._scheduler.lives.specs
        if error is None and specs is not None:
            self.serving = self._scheduler.serving  # a first request comes at once
            self._started.set(specs)
        else:
            self._failure = error
            self._news.append(partial(self._end, None))

    def workers_restarted(self, error: McinferError | None) -> None:
        if self._restarted is not None and not self._restarted.settled:
            self._restarted.settle(error)

    def pool_closed(self, abandoned: Sequence[int]) -> None:
        for worker in abandoned:
            name = self._scheduler.workers[worker].name
            self._delivery.log(logging.ERROR, "%s does not end, not even killed", name)
        self.finished = True

    def announce(self, health: Health, planned: bool) -> None:
        """Log a change; the end of a loss is a warning as the loss is, and says how long it was."""
        self.serving = health.serving
        now = monotonic()
        level = logging.INFO if planned else _LEVELS.get(health.state, logging.INFO)
        if health.state == "ready" and self._lost_at is not None:
            how_long, self._lost_at = now - self._lost_at, None
            text = str(health).removeprefix("ready")
            self._delivery.log(logging.WARNING, "ready again, after %.1f s%s", how_long, text)
            return
        if level > logging.INFO and self._lost_at is None:
            self._lost_at = now
        self._delivery.log(level, "%s", health)

    def settle(self, entry: Entry, error: McinferError | None) -> None:
        request = self._requests[entry.number]
        future = request.future
        request.copies = self.arena.crowded
        request.settle(error, cancelled=entry.ending == "cancelled")
        if self._trace is not None:
            hook, context = self._trace(), request.context
            if hook is not None and context is not None:
                # A queued call must not hold a result, unless its parts are still to be joined: here, or
                # by a caller without a future.
                is_bare = request.error is not None or request.is_simple
                held = request.error if is_bare else request
                joins = not is_bare and future is not None
                call = partial(_call_trace_hook, hook, context, entry, monotonic(), held, joins)
                (self._delivery.put if joins else self._delivery.trace)(call)
        elif future is not None and error is None and (self.arena.crowded or not request.is_simple):
            # What it holds must not wait until its user asks for it.
            self._delivery.put(partial(_prepare, ref(future)))

    def _outlaw(self, worker: int, reason: str) -> None:
        """End a worker that broke the protocol or cannot be reached; its death is reported as any other."""
        if self._connections.processes[worker].outlawed:
            return
        name = self._scheduler.workers[worker].name
        self._delivery.log(logging.ERROR, "%s %s; it is ended", name, reason)
        self._scheduler.handle_killed(worker, reason)
        self._connections.processes[worker].outlawed = True
        self._connections.kill(worker)

    def ask_for_stacks(self, worker: int) -> None:
        """Log that a worker hangs, and ask it for its stacks."""
        process = self._connections.processes.get(worker)
        if process is None:
            return
        standing = self._connections.standings().get(worker, "")
        also = f", and {standing}" if standing else ""
        what = self._scheduler.workers[worker].last_error
        self._delivery.log(logging.ERROR, "%s%s; it is ended", what, also)
        process.ask_for_stacks()

    def _detach(self, number: int) -> None:
        """The arena has dropped a block: workers unmap it too."""
        for worker in [*self._connections.processes]:
            if not self._scheduler.is_exiting(worker):
                try:
                    self._connections.detach(worker, number)
                except UnreachableError as exc:
                    self._outlaw(worker, str(exc))

    def start_worker(self, worker: int) -> None:
        """Carry out the order."""
        try:
            process = self._connections.start(worker)
        except Exception as exc:  # also of what is no OSError: `sys.executable` may be None
            self._note_no_start(worker, f"could not be started: {exc}")
            return
        try:
            for child in process.ranks:
                self._poll.register(child.pidfd, select.EPOLLIN)
        except OSError as exc:  # /proc/sys/fs/epoll/max_user_watches, or no memory
            process.kill()
            self._connections.remove(worker)
            process.reap()
            self._note_no_start(worker, f"could not be watched: {exc}")
            return
        self._pidfds.update(child.pidfd for child in process.ranks)
        self._oom_kills[worker] = oom_kills()
        self._news.append(partial(self._note_start, worker, process.pid))

    def _note_start(self, worker: int, pid: int) -> None:
        self._scheduler.handle_started(worker, pid)
        self._delivery.log(logging.INFO, "%s started", self._scheduler.workers[worker].name)

    def _note_no_start(self, worker: int, how: str) -> None:
        self._news.append(lambda: self._scheduler.handle_died(monotonic(), worker, how))


def _some(devices: Iterable[str]) -> str:
    """The devices in words that fit a line of the log."""
    different = [*dict.fromkeys(devices)]
    return ", ".join(different if len(different) <= 4 else [*different[:2], "…", different[-1]])


def _ends(pidfd: int, by: float) -> bool:
    """Wait for the end of a process until then; whether it has ended."""
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(max(0.0, by - monotonic()) * 1000))


def _take(claims: list[bool]) -> bool:
    """Whether the calling thread is the first to take this."""
    try:
        return claims.pop()
    except IndexError:
        return False


def _prepare(future: "ref[Follower]") -> None:
    """Make a future's result, if its user still has the future."""
    found = future()
    if found is not None:
        found.prepare()


def _call_trace_hook(
    hook: TraceHook,
    context: Context,
    entry: Entry,
    joined: float,
    outcome: Request | BaseException | None,
    joins: bool,
) -> None:
    """Call the trace hook, in the delivery thread; `joined` is when the result was complete."""
    error = outcome.error if isinstance(outcome, Request) else outcome
    if isinstance(outcome, Request) and joins:
        with suppress(Exception):  # it is the request's error then
            outcome.value()
        joined, error = monotonic(), outcome.error
    if error is not None and not isinstance(error, McinferError):
        error = PredictError(f"the answers could not be joined: {error!r}")
    try:
        context.run(hook, trace_of(entry, error, joined))
    except BaseException:
        # Also SystemExit and its like: others wait behind it.
        _log.exception("the trace hook failed")
