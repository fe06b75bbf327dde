"""The model in the user's own process: `Master(model, devices="inline")`, without workers and messages.

::

    predict ──► checks ──► a free lane: its engine runs here, in the caller's thread ──► arrays
    submit  ──► checks, copies ──► queue: priorities, joins ──► a thread, with a lane ──► future
    the keeper, a thread ──► deadlines, which end runs through the engine, and the close

A *lane* is an engine that one thread at a time runs; all are twins, on one loaded model. `InlinePool` is in
the place of the loop and its workers, `InlineAnswers` in that of the planner, for the same `Master`.

Ownership: one lock guards all state; it is held for no run and for no code of a user's. A run cannot be
killed: one that does not stop keeps its lane, and its session.

A signal's handler may interrupt a caller at any call, and raise, or call a method itself. So the lock is
reentrant, callers change state by single steps, and leave the queue to the threads of the pool.
"""

import atexit
import itertools
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from operator import attrgetter
from time import monotonic, perf_counter
from typing import Any
from weakref import ref

import numpy as np

from mcinfer.config import INLINE, Device, EngineOptions, PoolPlan
from mcinfer.engines.adapters import described, open_engine
from mcinfer.engines.base import Buffer, Engine, EngineRequest, RunCancelledError
from mcinfer.engines.preparation import readable_content
from mcinfer.errors import (
    BuildError,
    ClosedError,
    McinferError,
    PredictError,
    PredictTimeoutError,
    QueueFullError,
    is_refusal,
)
from mcinfer.locks import Lock
from mcinfer.logs import PoolLog
from mcinfer.machine import check_tasks
from mcinfer.private import ModelInMemory
from mcinfer.process import check_threads
from mcinfer.protocol import BuildFinish
from mcinfer.requests.frames import ShapePlan
from mcinfer.requests.inputs import InputReader
from mcinfer.requests.request import NO_WEIGHTS, Call, Outcome, OutcomeFuture, pick
from mcinfer.requests.splitting import SplitState
from mcinfer.requests.tensors import Arrays, Copier, join_parts, outputs_of_no_rows, parts_of
from mcinfer.requests.weights import WeightStore, WeightVersion
from mcinfer.runtime.delivery import Delivery, call_trace_hook, make_call
from mcinfer.runtime.inbox import Doors
from mcinfer.scheduler.dispatch import Ending, Entry, RequestTable, Tally
from mcinfer.scheduler.joining import Joining
from mcinfer.scheduler.queue import ShardQueue
from mcinfer.scheduler.workers import Counts, PoolRules
from mcinfer.sharding import JoinError
from mcinfer.shm.arena import ALIGNMENT, Slot
from mcinfer.specs import ModelSpec, TensorSpec, check_whole_bytes, specs_of
from mcinfer.statistics import ROW_BOUNDS, Health, Statistics, TraceHook, WorkerStatistics

__tracebackhide__ = is_refusal

_QUICK = 0.0001
"""Seconds of a run that an event loop makes by itself: to hand it to a thread takes as long."""
_STEP = 1.1  # factor, for each run, towards the median of their seconds: a late one says little
_LATE_SECONDS = 5.0  # past its deadline that a caller waits for the keeper
_LAST_SECONDS = 1.0  # for the ends of threads, and for callbacks, at the close
_LONGEST_WAIT = 86400.0  # seconds of one wait: Python takes no more than some years
_MAX_PLANS = 256

_shape = attrgetter("shape")


class Job(Outcome[Arrays]):
    """A call on its way.

    Attributes:
        entry: That of the pool's table, which gives it a number there.
        lane: Once it runs.
        here: Whether it runs in its caller's thread.
    """

    __slots__ = ("answers", "arrays", "call", "entry", "here", "lane", "plan", "weights")

    def __init__(
        self, answers: "InlineAnswers", call: Call, arrays: Sequence[Any], plan: ShapePlan
    ) -> None:
        super().__init__()
        self.answers = answers
        self.call: Any = call
        self.arrays = arrays
        self.plan = plan
        self.weights = call.weights
        self.entry = Entry(-1, plan.cut.rows, plan.size, call.start, 0.0, call.timeout)
        self.lane: Any = None
        self.here = False

    def wait(self, timeout: float | None = None) -> bool:
        return self.settled or self.answers.pool.await_answer(self, timeout)

    def release(self) -> None:
        """It is settled, and no run reads its inputs, and its weights, any more: a future may be kept."""
        self.arrays, self.weights, self.call = (), NO_WEIGHTS, None


@dataclass(slots=True, eq=False)
class _Lane:
    engine: Engine
    jobs: Sequence[Job] = ()
    caller: int = 0  # the thread that runs it, if that is its caller's
    began: float = 0.0
    stop_by: float = math.inf  # of a run that no caller waits for any more


class InlinePool(Doors):
    """The session of a master in its own process, its lanes and threads. Any thread may call it.

    Args:
        model: Its path.
        engine: Name of the engine.
        options: Of the engine.
        plan: How many runs there are at once, at most, and how many threads one has.
        rules: What the user wants of the pool.
        log: Has the records about the pool.
        trace: The trace hook.

    Attributes:
        at_once: Into how many pieces a request is cut: they would run one after another.
        model: The model, if it is in memory; closed at the end.
        line: Those whose callers wait for a place among the requests, in their order.
    """

    at_once = 1

    def __init__(
        self,
        model: str,
        engine: str,
        options: EngineOptions,
        plan: PoolPlan,
        rules: PoolRules,
        log: PoolLog,
        trace: "ref[TraceHook] | None",
    ) -> None:
        super().__init__(rules.limits)
        share = plan.processes[0].share
        device = Device("cpu", 0)
        self._request = EngineRequest(model=model, device=device, options=options, share=share)
        self._engine_name = engine
        self._rules = rules
        self._most_lanes = plan.threads
        self._trace = trace
        self._log = log
        self._lock: Any = Lock()
        self._work = threading.Condition(self._lock)  # for the threads
        self._keeper = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)  # a run, or the pool
        self._delivery = Delivery(log)
        self._own: set[int] = set()  # the threads of the pool that make callbacks
        self._calls: deque[Callable[[], object]] = deque()
        self._may_call, self._calling = threading.Lock(), 0  # the thread that makes them
        self.model: ModelInMemory | None = None
        self._close_at = self._end_at = math.inf  # of draining, of closing
        self._threads: list[threading.Thread] = []
        self._lanes: list[_Lane] = []
        self._look_at = math.inf
        self._seen = 0  # requests, at the last look
        self.table = RequestTable()
        self._numbers = itertools.count()
        self._queue = ShardQueue(rules.max_batch_size)
        self._joining = Joining(rules.max_batch_size, plan.threads, waits=not rules.max_delay)
        self._news: deque[Job] = deque()  # jobs that the queue is to take in, or to drop
        self.line: deque[Job] = deque()
        self._batch_sizes = Tally(ROW_BOUNDS)
        self._usual = 0.0  # seconds of a run; 0 before the first
        self._counts = Counts()
        self._last_error = ""
        self._providers: tuple[str, ...] = ()
        self._waiting = 0  # callers, for the end of a run

    @property
    def inbox(self) -> "InlinePool":
        """As that of a loop: here no thread is between."""
        return self

    supervision = inbox

    # Life.

    def start(self) -> BuildFinish:
        """Load the model, and return its description; raises as `Loop.start`."""
        check_threads("a Master")
        try:
            # ONNX Runtime may wait without an end where it cannot start one (1.32).
            check_tasks(self._most_lanes + self._request.threads)
            self._delivery.start()
            engine, built = self._load()
        except McinferError as exc:
            self.refuse_start(exc)
        except (OSError, RuntimeError) as exc:  # no descriptor, or no thread
            self.refuse_start(BuildError(f"no pool can be opened: {exc}"))
        with self._lock:
            if self.closing:
                engine.close()
                raise ClosedError("the master was closed while it was starting")
            count = self._most_lanes if type(engine).twin is not Engine.twin else 1
            self._lanes = [*map(_Lane, (*[engine.twin() for _ in range(1, count)], engine))]
            self._providers = built.providers
            atexit.register(self.close)
            self.opened = True
            try:
                for target in (self._keep, *[self._serve] * len(self._lanes)):
                    thread = threading.Thread(target=target, name="mcinfer-inline", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            except RuntimeError as exc:
                self._end()
                self.refuse_start(BuildError(f"no pool can be opened: {exc}"))
        return built

    def _load(self) -> tuple[Engine, BuildFinish]:
        began = perf_counter()
        request = replace(self._request, content=readable_content(self._request))
        engine = open_engine(self._engine_name, request)
        try:
            facts = described(engine, request)
        except BaseException:
            engine.close()
            raise
        for note in facts["notes"]:
            self._log.warning("%s", note)
        return engine, BuildFinish(**facts, seconds=perf_counter() - began)

    def planner(self, model: ModelSpec, built: BuildFinish) -> "InlineAnswers":
        """What answers the requests of this model, which `start` has loaded."""
        return InlineAnswers(self, model, built, self._rules.max_batch_size, self._log)

    def close(self, timeout: float | None = None, *, drain: bool = False) -> None:
        """See `Master.close`."""
        if self.is_forked:
            return
        seconds = self._rules.timeouts.close if timeout is None else timeout
        with self._lock:
            self.closing = True
            if not self.opened or self.finished:
                self.finished = True
                self._delivery.close()
            elif drain:
                limit = math.inf if timeout is None else monotonic() + timeout
                self._close_at = min(self._close_at, limit)
            else:
                self._close_at = -math.inf
                # A run that is cancelled gets a moment at least: to leave its thread is worse.
                self._end_at = min(self._end_at, monotonic() + max(seconds, _LAST_SECONDS))
            self._keeper.notify()
            if not self.may_wait() or (self._leave_lane() and drain):
                return
            try:
                while not self.finished:
                    self._wait(math.inf)
            except BaseException:
                if drain:  # Ctrl-C: who waits for requests to be answered does not any more
                    self.close()
                raise
        for thread in () if self._lanes else self._threads:
            if thread is not threading.current_thread():
                thread.join(_LAST_SECONDS)
        self._delivery.wait(_LAST_SECONDS)

    def abandon(self) -> None:
        """Close without waiting: for finalizers."""
        if self.opened and not self.is_forked:
            with suppress(RuntimeError):  # at the interpreter's end, which closes it
                threading.Thread(target=self.close, daemon=True).start()

    def _keep(self) -> None:
        """The keeper: ends requests that are late, and the pool."""
        while not self.finished:
            try:
                with self._lock:
                    self._look(monotonic())
            except BaseException as exc:  # raised from outside; a traceback would hold this
                self._go_on("the keeper", repr(exc))

    def _go_on(self, who: str, raised: str) -> None:
        self._log.log(logging.ERROR, f"%s was raised in {who} of the pool, which goes on", raised)
        with (
            self._lock
        ):  # an ended wait may have left its place, where the next notice would be lost
            self._keeper.notify_all()
            self._work.notify_all()

    def _look(self, now: float) -> None:
        for entry in [*self.table.overdue(now)]:
            job = entry.request
            what = "waited for a worker" if job.lane is None else f"ran on {INLINE}"
            text = ", ".join((f"no answer within {entry.timeout:g} s: it {what}", *self._late()))
            self._settle(job, PredictTimeoutError(text), now)
        self._look_at = min(self._close_at, self.table.next_deadline())
        if self.closing and (self._close_at <= now or not self.table.in_flight):
            self._end_at = min(self._end_at, now + self._rules.timeouts.close)
            for entry in [*self.table.entries.values()]:
                self._settle(entry.request, ClosedError("the master was closed"), now)
            if self._end_at <= now or not any(lane.jobs for lane in self._lanes):
                self._end()
                return
            self._look_at = self._end_at
        elif self._look_at == math.inf and self.table.accepted != self._seen:
            # While requests come, the next one would wake it.
            self._look_at = now + self._rules.timeouts.predict
        self._seen = self.table.accepted
        self._keeper.wait(min(self._look_at - now, _LONGEST_WAIT))

    def _end(self) -> None:
        self.finished = self.closing = True
        if not any(lane.jobs for lane in self._lanes):
            for lane in self._lanes:
                lane.engine.close()
            self._lanes = []
        for condition in (self._work, self._ended):
            condition.notify_all()
        if self.model is not None:
            self.model.close()
        self._delivery.close()
        atexit.unregister(self.close)

    # Requests.

    def answer(self, job: Job, *, wait: bool = True) -> bool:
        """Settle a call: run it in this thread if a lane is free, or wait for a thread that runs it.

        Without `wait`, do so only if a lane is free at once; whether it is settled.
        """
        offer = job.call.offer
        try:
            self.enter(job, here=not self._lock._is_owned(), wait=wait)
            if offer is not None:
                offer(partial(self.cancel, job))
            if job.here:
                self._run(job.lane)
            elif wait and not job.wait(job.entry.deadline - monotonic() + _LATE_SECONDS):
                raise PredictTimeoutError(f"no answer within {job.entry.timeout:g} s")
        except BaseException as exc:  # also Ctrl-C, between any two calls
            if job.lane is not None and job.here and job in job.lane.jobs:
                self._take_back(job.lane, (), exc, 0.0)
            self.cancel(job)
            raise
        return job.settled

    def is_quick(self) -> bool:
        """Whether a run takes no longer than to hand it to another thread."""
        return 0.0 < self._usual < _QUICK and self._lane_here() is not None

    def _next_lane(self) -> _Lane | None:
        for lane in self._lanes:
            if not lane.jobs:
                return lane
        return None

    def _lane_here(self) -> _Lane | None:
        """The lane for a call that need not queue."""
        return None if self._news or self._queue.items else self._next_lane()

    def _leave_lane(self) -> bool:
        """Whether a signal's handler calls, in a run of its thread; others get a twin of its lane then."""
        me = threading.get_ident()
        own = next((lane for lane in self._lanes if lane.jobs and lane.caller == me), None)
        if own is not None and type(own.engine).twin is not Engine.twin:
            self._lanes[self._lanes.index(own)] = _Lane(own.engine.twin())
            self._work.notify()
        return own is not None

    def await_answer(self, job: Job, timeout: float | None) -> bool:
        """`Outcome.wait`, which a signal's handler may call while its thread holds the lock, or a lane."""
        is_inside = self._lock._is_owned()
        with self._lock:
            self._leave_lane()
            end = math.inf if timeout is None or not is_inside else monotonic() + timeout
            while is_inside and not job.settled and monotonic() < end:
                self._wait(end - monotonic())
        return job.settled or Outcome.wait(job, 0.0 if is_inside else timeout)

    def enter(self, job: Job, *, here: bool = False, wait: bool = True) -> None:
        """Accept a call, and queue it; `here`, if a lane is free and none waits, give it that lane.

        With `here`, and without `wait`, nothing is done if no lane is free.

        Raises:
            ClosedError: The master is closed.
            QueueFullError: Too many requests are in flight; with `wait`, and were until the time was over.
        """
        call = job.call
        with self._lock:
            if self.finished or (self.closing and call.limited):
                self.check_open()
                raise ClosedError("the master is closed")
            limits = self._rules.limits
            if call.limited and (
                self.line or self.table.in_flight >= limits.queue or limits.queue_bytes
            ):
                self._await_room(job, wait and limits.when_queue_full == "wait")
            now, caller, entry = monotonic(), threading.get_ident(), job.entry
            entry.number, entry.queued = next(self._numbers), now
            lane = self._lane_here() if here else None
            if lane is not None:
                job.here, job.lane = True, lane
                lane.caller, lane.jobs = caller, (job,)
            elif here and not wait:
                return
            entry.request = job
            self.table.accept(entry)
            if entry.deadline < self._look_at:
                self._look_at = entry.deadline
                self._keeper.notify()
            if lane is not None:
                self._give(lane, lane.jobs, now)
            else:
                self._news.append(job)
                self._work.notify()
            if self.finished:  # a signal's handler has closed it meanwhile: no thread is left
                self._settle(job, ClosedError("the master was closed"), now)

    def _await_room(self, job: Job, wait: bool) -> None:
        end = job.call.start + job.call.timeout
        self.line.append(job)
        try:
            while True:
                try:
                    self.table.check_room(self._rules.limits, job.plan.size)
                    if self.line[0] is job:
                        return
                    raise QueueFullError("other calls wait for a place among the requests")
                except QueueFullError:
                    if not wait or not self.may_wait() or monotonic() >= end:
                        raise
                self._wait(end - monotonic())
                self.check_open()
        finally:
            self.line.remove(job)
            self._ended.notify_all()  # there may be a place for the next one, too

    def _wait(self, seconds: float) -> None:
        """Wait for the end of a run, or of the pool; the lock is held, and not meanwhile."""
        self._waiting += 1
        try:
            self._ended.wait(min(seconds, _LONGEST_WAIT))
        finally:
            self._waiting -= 1

    def _serve(self) -> None:
        """A thread of the pool: run what waits."""
        me = threading.get_ident()
        if len(self._lanes) > 1:  # a callback that waits must leave a thread to what it waits for
            self._own.add(me)
        while not self.finished:
            try:
                with self._lock:
                    lane = self._take_next()
                if lane is not None:
                    self._run(lane)
                    del lane  # or callbacks would run with what it held
            except BaseException as exc:  # as in `_keep`
                self._go_on("a thread", repr(exc))
            if me in self._own:
                self._make_calls()
        self._own.discard(me)  # another thread may have it from now on

    def _take_next(self) -> _Lane | None:
        """Give a lane what waits; None after a wait, since none was free or nothing could go."""
        now, lane = monotonic(), self._next_lane()
        while self._news:
            job = self._news.popleft()
            shard, call = (job.entry.number, 0), job.call
            if job.settled:
                self._queue.discard(shard)
            else:
                due = call.start + min(self._rules.max_delay, call.timeout / 2)
                key, rows = job.entry.join or (None, 0)
                self._queue.add(shard, call.priority, key, rows, due)
        self._queue.end_holding(now)
        if lane is not None and (shards := self._queue.take(most=partial(self._most, now))):
            lane.caller = 0
            self._give(lane, [self.table.entries[n].request for n, _ in shards], now)
            return lane
        if not self.finished:
            due = math.inf
            if lane is not None and self._queue.items:  # else none waits for company any more
                due = min(self._queue.next_due(), self._joining.due)
            self._work.wait(min(due - now, _LONGEST_WAIT))
        return None

    def _most(self, now: float, waiting: int, full: bool) -> int:
        """How many of the requests that may be joined are to go; see `Joining.take`."""
        return self._joining.take(waiting, self.table.in_flight, now, full=full)

    def _give(self, lane: _Lane, jobs: Sequence[Job], now: float) -> None:
        lane.began, lane.stop_by = now, math.inf
        lane.engine.arm()
        for job in jobs:
            job.lane = lane
            job.entry.attempts[0] += 1
            if not job.entry.begun:
                job.entry.begun = True
                self.table.not_begun -= 1
        lane.jobs = jobs

    def _run(self, lane: _Lane) -> None:
        values: Sequence[Arrays] = ()
        error: BaseException | None = None
        began = perf_counter()
        try:
            values = lane.jobs[0].answers.compute(lane.engine, lane.jobs)
        except BaseException as exc:
            error = exc
            if not isinstance(exc, Exception):
                raise
        finally:
            self._take_back(lane, values, error, perf_counter() - began)
            del error  # its traceback has this frame

    def _take_back(
        self, lane: _Lane, values: Sequence[Arrays], error: BaseException | None, seconds: float
    ) -> None:
        """A run has ended: settle its requests, or have those that were joined run again apart."""
        now = monotonic()
        with self._lock:
            jobs, lane.jobs = lane.jobs, ()
            if error is None:
                usual = self._usual * (_STEP if seconds > self._usual else 1 / _STEP)
                self._usual = usual or seconds
                is_joined = len(jobs) > 1
                runs = (sum(j.entry.rows[0] for j in jobs),) if is_joined else jobs[0].entry.rows
                for rows in runs:
                    self._batch_sizes.add(rows)
                if jobs[0].entry.join is not None:
                    in_flight = self.table.in_flight
                    self._joining.learn(runs[0], len(jobs), seconds, in_flight, now)
                self._counts.runs += len(runs)
                self._counts.completed += len(jobs) if is_joined else len(runs)
                self._counts.busy_seconds += seconds
            elif not isinstance(error, RunCancelledError):
                self._counts.failed += len(jobs)
                self._last_error = str(error)
            for i, job in enumerate(jobs):
                if error is None:
                    if self._trace is not None:
                        entry = job.entry
                        place = 0, INLINE, self.pid, entry.attempts[0]
                        times = lane.began, now, seconds
                        entry.runs += [(k, *place, *times, n) for k, n in enumerate(entry.rows)]
                    self._settle(job, None, now, values[i])
                elif len(jobs) > 1 and not job.settled:
                    job.lane = None
                    self._queue.add_first((job.entry.number, 0))
                    continue
                else:
                    self._settle(job, _told(error), now)
                job.release()
            if self._queue.items or self._news:
                self._work.notify()
            if self._waiting or self.closing:
                self._keeper.notify()
                self._ended.notify_all()

    def _settle(
        self,
        job: Job,
        error: McinferError | None,
        now: float,
        value: Arrays | None = None,
        ending: Ending = "failed",
    ) -> None:
        """Answer a call, unless it is answered; the lock is held."""
        entry, lane = job.entry, job.lane
        if entry.number not in self.table.entries:
            return
        # Those that wait look once the lock is free.
        if self._waiting:
            self._ended.notify_all()
        if self.closing:
            self._keeper.notify()  # it may be the last
        if error is None:
            ending, job._value = "succeeded", pick(value or {}, job.call.outputs)
        elif lane is None:
            self._news.append(job)
            self._work.notify()
        elif job in lane.jobs and all(one.settled for one in lane.jobs if one is not job):
            lane.stop_by = now + self._rules.timeouts.cancel_grace
            lane.engine.cancel()
        # Ctrl-C may come after each of these steps, of which the others are done then by `cancel`.
        if entry.ending is None:
            self.table.close(entry, ending, now)
        if error is not None:
            error.refusal = None  # the request was accepted
        if not job.settled:
            job.settle(error, cancelled=ending == "cancelled")
        self.table.entries.pop(entry.number, None)
        entry.request = None  # which holds it
        if self._trace is not None:
            hook = self._trace()
            if hook is not None and job.call.context is not None:
                given = self._log, hook, job.call.context, entry, now, error, False
                self._delivery.trace(partial(call_trace_hook, *given))
        if lane is None:
            job.release()

    def cancel(self, outcome: Outcome[Any]) -> bool:
        """Cancel a call; False if it was settled before."""
        if isinstance(outcome, Job) and not self.is_forked:
            with self._lock:
                error = ClosedError("the request was cancelled")
                self._settle(outcome, error, monotonic(), ending="cancelled")
                self._work.notify()  # Ctrl-C may have come before that
        return outcome.was_cancelled

    def forget(self, outcome: Outcome[Any]) -> None:
        self.cancel(outcome)

    check_wait = Doors.check_process

    def may_wait(self) -> bool:
        return threading.get_ident() not in (self._delivery.ident, self._calling)

    def deliver(self, call: Callable[[], object]) -> None:
        """Have a call made: by this thread after its run if it is of the pool, else by one for that."""
        if self.is_forked:
            self._delivery.put(call)  # made here: what else waits is the other process's
            return
        self._calls.append(call)
        if threading.get_ident() not in self._own:
            self._delivery.put(self._make_calls)

    def _make_calls(self) -> None:
        """Make those of callbacks, one after another: here, unless another thread is at it."""
        while self._calls and self._may_call.acquire(blocking=False):
            try:
                self._calling = threading.get_ident()
                while self._calls:
                    make_call(self._calls.popleft(), self._log)
            finally:
                self._calling = 0
                self._may_call.release()

    # How it is.

    def _late(self) -> list[str]:
        now = monotonic()
        late = [now - one.began for one in self._lanes if one.jobs and one.stop_by <= now]
        return [f"{INLINE}: a run of {seconds:.3g} s did not stop in time" for seconds in late]

    def health(self) -> Health:
        self.check_process()
        with self._lock:
            state, reasons = self.state, self._late()
            serving = int(self.opened and not self.finished and len(reasons) < len(self._lanes))
            if self.failure is not None:
                reasons = [str(self.failure)]
            elif state == "closing" and self.table.in_flight:
                reasons.insert(0, f"{self.table.in_flight} requests are still to be answered")
            elif state == "ready" and reasons:
                state = "degraded"
            elif state == "not started":
                state = "starting"
        found: Any = state
        return Health(state=found, reasons=tuple(reasons), serving=serving, workers=1)

    def statistics(self, weights_version: int) -> Statistics:
        self.check_process()
        with self._lock:
            state = "gone" if self.finished or self.start_claims else "building"
            if self.opened and not self.finished:
                state = "busy" if any(lane.jobs for lane in self._lanes) else "ready"
            worker = WorkerStatistics(
                index=0,
                device=INLINE,
                pid=self.pid,
                state=state,
                concurrent=max(1, len(self._lanes)),
                providers=self._providers,
                last_error=self._last_error,
                **asdict(self._counts),
            )
            return Statistics(
                **self.table.counts(),
                queued_shards=sum(e.request.lane is None for e in self.table.entries.values()),
                batch_sizes=self._batch_sizes.snapshot(),
                memory_bytes=0,
                memory_used_bytes=0,
                weights_version=weights_version,
                refused={**self.refused},
                health=self.health(),
                workers=(worker,),
                join_gain=self._joining.gain,
            )


class InlineAnswers(InputReader):
    """Answers the calls of one model in this process, in the place of `mcinfer.requests.planner.Planner`.

    Calls are checked, cut into runs, and computed on the callers' arrays.

    Attributes:
        pool: Runs the jobs.
        weights: The replaceable weights of the model.
    """

    def __init__(
        self, pool: InlinePool, model: ModelSpec, built: BuildFinish, max_rows: int, log: PoolLog
    ) -> None:
        check_whole_bytes((*model.inputs, *model.outputs))
        super().__init__(model, log, max_rows, built.ragged)
        self.pool = pool
        self._copier = Copier(len(os.sched_getaffinity(0)))
        self.weights = WeightStore(specs_of(built.weights), _slots, self._copier)
        self._outputs = tuple(spec.name for spec in model.outputs)
        self._plans: dict[tuple[Any, ...], ShapePlan] = {}

    def answer_call(self, call: Call) -> Arrays:
        """Answer a call; raises as `Planner.answer_call`."""
        job = self._job(call, self.arrays(call.inputs))
        try:
            if not job.settled:
                self.pool.answer(job)
            if job.was_cancelled:
                raise CancelledError
            return job.result()
        finally:
            del job  # the error that this may raise must not hold what holds it

    def submit(self, call: Call, *, wait: bool = True) -> OutcomeFuture[Arrays]:
        """Queue a call; without `wait`, it is of an event loop, which runs by itself what takes no time."""
        # What is cut in pieces may run again as a whole, from copies.
        if not wait and call.pieces == 1 and self.pool.is_quick():
            job = self._job(call, self.arrays(call.inputs))
            if job.settled or self.pool.answer(job, wait=False):
                return OutcomeFuture(job, self.pool)
        copies = self.copies(call.inputs)
        if call.keeps:
            call.inputs = copies
        job = self._job(call, copies)
        if not job.settled:
            if self._max_rows > 1 and call.joins and call.split_state.splits:
                job.entry.join = self._join(copies, job.plan, job.weights)
            try:
                self.pool.enter(job, wait=wait)
            except BaseException:  # also Ctrl-C
                self.pool.forget(job)
                raise
        return OutcomeFuture(job, self.pool)

    def allocate(
        self, shapes: Mapping[str, Sequence[int]], timeout: float, place: object = None
    ) -> Arrays:
        """Arrays in ordinary memory, where runs read inputs anyway."""
        del timeout, place
        return self.empty_inputs(shapes, lambda spec, shape: np.empty(shape, spec.dtype))

    def close(self) -> None:
        """End the threads that copy, and free replaced weights."""
        self._copier.close()
        self.weights.close()

    def _input(self, value: Any, spec: TensorSpec, element_type: str) -> Any:
        array = super()._input(value, spec, element_type)
        return array if array.dtype.isnative else array.astype(spec.dtype)

    def _job(self, call: Call, arrays: list[Any]) -> Job:
        state = None if call.apart else call.split_state
        pieces = call.pieces if call.split_state.split.settled else 1
        shapes = tuple(map(_shape, arrays))
        key = (shapes, pieces, 0 if state is None else state.number)
        plan = self._plans.get(key) or self._new_plan(key, shapes, pieces, state)
        call.rows = plan.cut.rows
        job = Job(self, call, arrays, plan)
        if not plan.cut.rows:  # needs no run
            job.set(pick(outputs_of_no_rows(self._model, plan.cut), call.outputs))
        return job

    def _new_plan(
        self, key: Any, shapes: tuple[Any, ...], pieces: int, state: SplitState | None
    ) -> ShapePlan:
        cut, apart, alike = self._cut(shapes, pieces, state)
        specs = (*self._model.inputs, *self._model.outputs)
        known = (*shapes, *[join.shape for join in cut.outputs])
        size = sum(
            prod(shape) * spec.dtype.itemsize
            for spec, shape in zip(specs, known, strict=True)
            if shape is not None
        )
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        plan = self._plans[key] = ShapePlan(cut, size, apart, alike)
        return plan

    # Runs.

    def compute(self, engine: Engine, jobs: Sequence[Job]) -> list[Arrays]:
        """The answers of one run, whose jobs may be joined, or of one for each piece of a job."""
        job = jobs[0]
        weights = _buffers(job.weights) if job.weights.number else ()
        if len(jobs) > 1:
            return self._compute_joined(engine, jobs, weights)
        if len(job.plan.cut.rows) == 1:
            return [dict(zip(self._outputs, engine.compute(job.arrays, weights), strict=False))]
        cut, found = job.plan.cut, []
        for shard in zip(*map(parts_of, job.arrays, cut.inputs), strict=True):
            if job.settled:
                raise RunCancelledError("no caller waits for it any more")
            found.append(engine.compute(shard, weights))
        names = [f"run {i}" for i in range(len(found))]
        try:
            rows = zip(self._model.outputs, cut.outputs, zip(*found, strict=True), strict=True)
            return [{spec.name: join_parts(spec, o, shards, names) for spec, o, shards in rows}]
        except JoinError as exc:
            job.call.splitter.withdraw(str(exc))
            raise

    def _compute_joined(
        self, engine: Engine, jobs: Sequence[Job], weights: Sequence[Buffer]
    ) -> list[Arrays]:
        cut = jobs[0].plan.cut
        inputs = [
            job_arrays[0] if axis is None else np.concatenate(job_arrays, axis)
            for axis, *job_arrays in zip(cut.input_axes, *(j.arrays for j in jobs), strict=True)
        ]
        values = engine.compute(inputs, weights)
        answers: list[Arrays] = [{} for _ in jobs]
        for i, (name, value) in enumerate(zip(self._outputs, values, strict=True)):
            axis, start = cut.outputs[i].axis or 0, 0
            for answer, job in zip(answers, jobs, strict=True):
                shape = job.plan.cut.outputs[i].shape or ()
                stop = start + shape[axis]
                part = value[(slice(None),) * axis + (slice(start, stop),)]
                if part.shape != shape:
                    job.plan.apart = f"output {name!r} has another shape than the model declares"
                    raise PredictError(job.plan.apart)
                answer[name] = part.copy()
                start = stop
        return answers


def _told(error: BaseException) -> McinferError:
    """The error that the caller of a failed run gets."""
    if isinstance(error, McinferError) and not isinstance(error, RunCancelledError):
        return error.with_traceback(None)
    return PredictError(str(error) or repr(error))


def _slots(sizes: Sequence[int], timeout: float = 0.0) -> list[Slot]:
    """Pieces of ordinary memory; there is no waiting for it."""
    del timeout
    slots = []
    for size in sizes:
        memory = np.empty(size + ALIGNMENT, np.uint8)
        start = -memory.__array_interface__["data"][0] % ALIGNMENT
        memory = memory[start : start + size]
        slots.append(Slot(0, 0, size, memory.__array_interface__["data"][0], memory))
    return slots


def _buffers(version: WeightVersion) -> list[Buffer]:
    """Replaced weights where a run reads them; the version holds their memory."""
    return [
        Buffer(
            name=name,
            element_type=reference[1],
            shape=reference[2],
            address=version.slots[name].address,
            size=version.slots[name].size,
        )
        for name, reference in version.tensors.items()
    ]
