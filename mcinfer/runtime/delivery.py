"""The thread that runs user code: callbacks of futures, trace hooks, handlers of log records.

The loop never runs user code, since such code may wait for its own locks, or for ever. The loop puts its
calls into a queue, and wakes the thread (by `queue.SimpleQueue`, whose `put` is safe anywhere, also in a
finalizer). A callback that does not return delays other callbacks, and nothing else.

Another thread (`PyThreadState_SetAsyncExc`), or a user's trace function, may raise an exception in this one
between two calls. A call leaves the queue once it was made, so none is lost.
"""

import logging
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from functools import partial
from time import monotonic
from typing import Any
from weakref import ref

from mcinfer.errors import McinferError, PredictError
from mcinfer.logs import PoolLog
from mcinfer.process import becomes_readable
from mcinfer.requests.request import OutcomeFuture, Request
from mcinfer.scheduler.dispatch import Entry, trace_of
from mcinfer.shm.descriptors import WakeUp
from mcinfer.statistics import TraceHook

_GATHER_SECONDS = 0.02  # seconds that calls of `trace` wait for others

_REPEAT_SECONDS = 0.01  # seconds between two calls of `repeat`


class Delivery:
    """The queue and its thread. Any thread may call any method; only `wait` waits.

    Calls made before `start` wait for it. `ident` is the identifier of the running thread. `log` has the
    records about the pool.
    """

    def __init__(self, log: PoolLog) -> None:
        self._log = log
        self._calls: deque[Callable[[], object]] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asleep = False
        self._traces: deque[Callable[[], object]] = deque()
        self._repeated: deque[Callable[[], bool]] = deque()
        self._traces_due = math.inf
        self._next_repeat = 0.0
        self._thread: threading.Thread | None = None
        self._ended = WakeUp()
        self._closing = self._done = False
        self.ident = 0
        self._pid = os.getpid()

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name="mcinfer-delivery", daemon=True)
        thread.start()
        self._thread = thread

    def put(self, call: Callable[[], object]) -> None:
        """Have a call made, after those before it. After the thread's end, it is made here."""
        if os.getpid() != self._pid:
            make_call(
                call, self._log
            )  # what else waits is for the process that this was forked from
            return
        self._calls.append(call)
        if self._asleep:
            self._bell.put(None)
        if self._done:
            self._drain()

    def repeat(self, call: Callable[[], bool]) -> None:
        """Have a call made again and again, with others in between, until it returns True or raises.

        The thread does not end before that.
        """
        self._repeated.append(call)
        self.put(_nothing)

    def trace(self, call: Callable[[], object]) -> None:
        """Have a call made soon, together with others: to wake a thread for each costs more than the call."""
        self._traces.append(call)
        if self._traces_due == math.inf:
            self._traces_due = monotonic() + _GATHER_SECONDS
            self.put(_nothing)

    def log(
        self, level: int, text: str, *values: object, failure: BaseException | None = None
    ) -> None:
        self.put(partial(self._log.log, level, text, *values, failure=failure))

    def close(self) -> None:
        """End the thread, after the calls that are queued."""
        self._closing = True
        self.put(_nothing)

    def wait(self, seconds: float) -> None:
        """After `close`: wait for the thread's end, for at most so many seconds."""
        if self._thread is None or threading.get_ident() == self.ident:
            return  # others' callbacks wait behind it
        if becomes_readable(self._ended.fd, seconds):
            self._thread.join(seconds)

    def _run(self) -> None:
        self.ident = threading.get_ident()
        while not self._done:
            try:
                self._serve()
                self._done = True
            except BaseException:  # raised from outside; without a traceback, which would hold this
                self.log(logging.ERROR, "an exception was raised in the thread of callbacks")
        self._drain()
        self.ident = 0  # another thread may have it from now on
        self._ended.set()

    def _serve(self) -> None:
        """Make calls until `close`."""
        while True:
            repeat = self._next_repeat if self._repeated else math.inf
            due = min(self._traces_due, repeat)
            left = due - monotonic()
            if left <= 0:
                make_call(self._make_repeated if due == repeat else self._make_traces, self._log)
            elif self._calls:
                make_call(self._calls[0], self._log)
                self._calls.popleft()
            elif self._closing and not self._repeated:
                return
            else:
                self._asleep = True
                if not self._calls:
                    with suppress(queue.Empty):
                        self._bell.get(timeout=None if left == math.inf else left)
                self._asleep = False

    def _make_repeated(self) -> None:
        for _ in range(len(self._repeated)):
            call = self._repeated.popleft()
            if not call():
                self._repeated.append(call)
        self._next_repeat = monotonic() + _REPEAT_SECONDS

    def _make_traces(self) -> None:
        self._traces_due = math.inf  # before they are made: who comes now gathers anew
        while self._traces:
            make_call(self._traces.popleft(), self._log)

    def _drain(self) -> None:
        while True:
            try:
                call = self._calls.popleft()
            except IndexError:
                self._make_traces()
                return
            make_call(call, self._log)


def _nothing() -> None:
    """Only wakes the thread."""


def make_call(call: Callable[[], object], log: PoolLog) -> None:
    try:
        call()
    except BaseException as exc:
        # Also SystemExit and its like, and what a handler of the log raises: others wait behind it.
        with suppress(BaseException):
            log.log(logging.ERROR, "%r failed", call, failure=exc)


def prepare(future: "ref[OutcomeFuture[Any]]") -> None:
    """Make a future's result, if its user still has the future."""
    found = future()
    if found is not None:
        found.prepare()


def call_trace_hook(
    log: PoolLog,
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
        context.run(hook, trace_of(entry, error, joined, log.label))
    except BaseException as exc:
        # Also SystemExit and its like: others wait behind it.
        log.log(logging.ERROR, "the trace hook failed", failure=exc)
