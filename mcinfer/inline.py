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
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, perf_counter
from typing import Any, NoReturn
from weakref import ref

from mcinfer.config import INLINE, Device, EngineOptions, PoolPlan
from mcinfer.engines.adapters import open_engine
from mcinfer.engines.base import Engine, EngineRequest, RunCancelledError
from mcinfer.engines.preparation import described, readable_content
from mcinfer.errors import (
    BuildError,
    ClosedError,
    McinferError,
    PredictError,
    PredictTimeoutError,
    QueueFullError,
    ReadyTimeoutError,
    WorkerDiedError,
    is_refusal,
)
from mcinfer.logs import PoolLog
from mcinfer.machine import check_tasks
from mcinfer.private import ModelInMemory
from mcinfer.process import check_threads
from mcinfer.protocol import BuildFinish
from mcinfer.requests.direct import InlineAnswers, Job
from mcinfer.requests.request import Outcome, pick
from mcinfer.requests.tensors import Arrays
from mcinfer.runtime.delivery import Delivery, call_trace_hook, make_call, preparing
from mcinfer.runtime.inbox import Doors
from mcinfer.scheduler.dispatch import Ending, Entry, RequestTable, Tally
from mcinfer.scheduler.joining import Joining
from mcinfer.scheduler.queue import ShardQueue
from mcinfer.scheduler.workers import IN_COMMON, PoolRules
from mcinfer.specs import ModelSpec
from mcinfer.statistics import ROW_BOUNDS, Health, Statistics, TraceHook, WorkerStatistics

__tracebackhide__ = is_refusal

_QUICK = 0.0001
"""Seconds of a run that an event loop makes by itself: to hand it to a thread takes as long."""
_STEP = 1.1  # factor, for each run, towards the median of their seconds: a late one says little
_LATE_SECONDS = 5.0  # past its deadline that a caller waits for the keeper
_LAST_SECONDS = 1.0  # for the ends of threads, and for callbacks, at the close
_LONGEST_WAIT = 86400.0  # seconds of one wait: Python takes no more than some years


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
        self._lock: Any = threading.RLock()
        self._work = threading.Condition(self._lock)  # for the threads
        self._keeper = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)  # a run, or the pool
        self._delivery = Delivery(log)
        self._delivers = False
        self._own: set[int] = set()  # the threads of the pool that make callbacks
        self._calls: deque[Callable[[], object]] = deque()
        self._may_call, self._calling = threading.Lock(), 0  # the thread that makes them
        self.failure: McinferError | None = None
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
        self._jobs: dict[int, Job] = {}
        self.line: deque[Job] = deque()
        self._batch_sizes = Tally(ROW_BOUNDS)
        self._usual = 0.0  # seconds of a run; 0 before the first
        self._restarts = self._runs = self._completed = self._failed = 0
        self._busy_seconds = 0.0
        self._last_error = ""
        self._built: BuildFinish | None = None
        self._replacing = 0
        self._waiting = 0  # callers, for the end of a run

    @property
    def inbox(self) -> "InlinePool":
        """As that of a loop: here no thread is between."""
        return self

    supervision = inbox

    # Life.

    def refuse_start(self, failure: McinferError) -> NoReturn:
        self.failure, self.finished = failure, True
        raise failure

    def start(self) -> BuildFinish:
        """Load the model, and return its description; raises as `Loop.start`."""
        check_threads("a Master")
        try:
            # ONNX Runtime may wait without an end where it cannot start one (1.32).
            check_tasks(self._most_lanes + self._request.threads)
            engine, built = self._load()
        except OSError as exc:
            self.refuse_start(BuildError(f"no pool can be opened: {exc}"))
        except McinferError as exc:
            self.refuse_start(exc)
        with self._lock:
            if self.closing:
                engine.close()
                raise ClosedError("the master was closed while it was starting")
            self._open_lanes(engine, built)
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

        def report(state: Mapping[str, Any]) -> None:
            self._show(preparing(self._log.label, state["written"], state["seconds"]))

        engine = open_engine(self._engine_name, request, report)
        try:
            facts = described(engine, request)
        except BaseException:
            engine.close()
            raise
        self._show("")
        for note in facts["notes"]:
            self._log.warning("%s", note)
        return engine, BuildFinish(**facts, seconds=perf_counter() - began)

    def _show(self, text: str) -> None:
        if text or self._delivers:
            self.deliver(partial(self._delivery.show, text))

    def _open_lanes(self, engine: Engine, built: BuildFinish) -> None:
        count = self._most_lanes if type(engine).twin is not Engine.twin else 1
        twins = [engine.twin() for _ in range(1, count)]
        self._lanes = [*map(_Lane, (*twins, engine))]
        self._built = built

    def planner(self, model: ModelSpec, built: BuildFinish) -> InlineAnswers:
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
        if self._delivers:
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
                text = "%s was raised in the keeper of the pool, which goes on"
                self._log.log(logging.ERROR, text, repr(exc))

    def _look(self, now: float) -> None:
        for entry in [*self.table.overdue(now)]:
            job = self._jobs[entry.number]
            what = "waited for a worker" if job.lane is None else f"ran on {INLINE}"
            text = ", ".join((f"no answer within {entry.timeout:g} s: it {what}", *self._late()))
            self._settle(job, PredictTimeoutError(text), now)
        self._look_at = min(self._close_at, self.table.next_deadline())
        if self.closing and (self._close_at <= now or not self._jobs):
            self._end_at = min(self._end_at, now + self._rules.timeouts.close)
            for job in [*self._jobs.values()]:
                self._settle(job, ClosedError("the master was closed"), now)
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
        try:
            self.enter(job, here=not self._lock._is_owned(), wait=wait)
            if job.call.offer is not None:
                job.call.offer(partial(self.cancel, job))
            if job.here:
                self._run(job.lane)
            elif wait and not job.wait(job.entry.deadline - monotonic() + _LATE_SECONDS):
                raise PredictTimeoutError(f"no answer within {job.call.timeout:g} s")
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
            if not lane.jobs and not self._replacing:
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
            now, number, caller = monotonic(), next(self._numbers), threading.get_ident()
            entry = job.entry = Entry(
                number, job.plan.cut.rows, job.plan.size, call.start, now, call.timeout
            )
            lane = self._lane_here() if here else None
            if lane is not None:
                job.here, job.lane = True, lane
                lane.caller, lane.jobs = caller, (job,)
            elif here and not wait:
                return
            self._jobs[number] = job
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
                text = "%s was raised in a thread of the pool, which goes on"
                self._log.log(logging.ERROR, text, repr(exc))
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
                key, rows = job.join or (None, 0)
                self._queue.add(shard, call.priority, key, rows, due)
        self._queue.end_holding(now)
        if lane is not None and (shards := self._queue.take(most=partial(self._most, now))):
            lane.caller = 0
            self._give(lane, [self._jobs[number] for number, _ in shards], now)
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
                if jobs[0].join is not None:
                    in_flight = self.table.in_flight
                    self._joining.learn(runs[0], len(jobs), seconds, in_flight, now)
                self._runs += len(runs)
                self._completed += len(jobs) if is_joined else len(runs)
                self._busy_seconds += seconds
            elif not isinstance(error, RunCancelledError):
                self._failed += len(jobs)
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
            self._jobs.pop(entry.number, None)
            return
        if error is None:
            ending, job._value = "succeeded", pick(value or {}, job.call.outputs)
        elif lane is None:
            self._news.append(job)
            self._work.notify()
            job.release()
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
        self._jobs.pop(entry.number, None)
        self.table.entries.pop(entry.number, None)
        if self._waiting:
            self._ended.notify_all()
        if self.closing:
            self._keeper.notify()  # it may have been the last
        if self._trace is not None:
            hook = self._trace()
            if hook is not None and job.call.context is not None:
                given = self._log, hook, job.call.context, entry, now, error, False
                self._start_delivery()
                self._delivery.trace(partial(call_trace_hook, *given))

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
            self._start_delivery()
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

    def _start_delivery(self) -> None:
        with self._lock:
            if not self._delivers:
                self._delivers = True
                self._delivery.start()

    # How it is.

    @property
    def state(self) -> str:
        """The state in words."""
        if self.is_forked:
            return f"of process {self.pid}"
        if self.finished:
            return "closed" if self.failure is None else "failed"
        if self.start_claims:
            return "not started"
        return "closing" if self.closing else "ready" if self.opened else "starting"

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

    def restart_workers(self, timeout: float) -> None:
        """Open the model anew, and go over to it once no run is under way."""
        end = monotonic() + timeout
        try:
            engine, built = self._load()
        except (McinferError, OSError) as exc:
            raise WorkerDiedError(f"{INLINE}: {exc}") from exc
        try:
            if any(getattr(built, name) != getattr(self._built, name) for name in IN_COMMON):
                raise WorkerDiedError(
                    f"{INLINE}: its model's content, inputs, outputs or weights are not those of before"
                )
            with self.no_run(), self._lock:
                self._leave_lane()
                while any(lane.jobs for lane in self._lanes):
                    left = end - monotonic()
                    if left <= 0:
                        raise ReadyTimeoutError(
                            f"not all workers were replaced within {timeout:g} s"
                        )
                    self._wait(left)
                self.check_open()
                for lane in self._lanes:
                    lane.engine.close()
                self._open_lanes(engine, built)
                self._restarts += 1
        except BaseException:
            engine.close()
            raise

    @contextmanager
    def no_run(self) -> Iterator[None]:
        """No run begins meanwhile."""
        with self._lock:
            self._replacing += 1
        try:
            yield
        finally:
            with self._lock:
                self._replacing -= 1
                self._work.notify_all()

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
                restarts=self._restarts,
                runs=self._runs,
                completed=self._completed,
                failed=self._failed,
                busy_seconds=self._busy_seconds,
                providers=() if self._built is None else self._built.providers,
                last_error=self._last_error,
            )
            return Statistics(
                **self.table.counts(),
                queued_shards=sum(job.lane is None for job in self._jobs.values()),
                batch_sizes=self._batch_sizes.snapshot(),
                memory_bytes=0,
                memory_used_bytes=0,
                weights_version=weights_version,
                refused={**self.refused},
                health=self.health(),
                workers=(worker,),
                join_gain=self._joining.gain,
            )


def _told(error: BaseException) -> McinferError:
    """The error that the caller of a failed run gets."""
    if isinstance(error, McinferError) and not isinstance(error, RunCancelledError):
        return error.with_traceback(None)
    return PredictError(str(error) or repr(error))
