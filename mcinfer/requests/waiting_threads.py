"""Threads that wait on behalf of code that must not, such as an event loop.

They are daemons: a call that waits for memory must not delay the end of the interpreter, which waits for
the threads of `concurrent.futures`.
"""

import math
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from mcinfer.errors import McinferError, PredictError
from mcinfer.locks import Lock

_MAX_THREADS = 8  # calls beyond these wait for a thread, first come first served

LATE_SECONDS = 1.0
"""Seconds that a task, or `close`, waits for a thread that should be done."""

_T = TypeVar("_T")


class WaitingThreads:
    """Threads that end when no call waits. Any thread may call any method."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        # Reentrant: a signal's handler, or a finalizer, may interrupt a method and call `close`.
        self._lock = Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._pid = os.getpid()

    def submit(self, call: Callable[[], _T]) -> "Future[_T]":
        """Make this call in a thread, after `close` in this one; return a future of its result or error.

        Raises:
            PredictError: No thread can be started.
        """
        future: Future[_T] = Future()
        run = partial(_make, call, future)
        with self._lock:
            closed = self._closed
            if not closed:
                if len(self._threads) < _MAX_THREADS:
                    thread = threading.Thread(target=self._run, name="mcinfer-wait", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError as exc:
                        raise PredictError(f"no thread to wait in can be had: {exc}") from exc
                    self._threads.append(thread)
                self._calls.append(run)
        if closed:
            run()
        return future

    async def answer(self, call: Callable[[], _T], deadline: float, failure: McinferError) -> _T:
        """The result of a call in a thread; `failure` is raised at the deadline, of `time.monotonic`.

        A thread cannot be cancelled: a future that the call returns after the end of this is cancelled.
        """
        import asyncio  # `mcinfer.master` says why not above

        waiting = self.submit(call)
        seconds = None if deadline == math.inf else max(0.0, deadline - monotonic())
        try:
            async with asyncio.timeout(seconds) as limit:
                return await asyncio.wrap_future(waiting)
        except BaseException as exc:
            waiting.add_done_callback(_cancel_late)
            if isinstance(exc, TimeoutError) and limit.expired():
                raise failure from exc
            raise
        finally:
            del waiting, failure  # an error that the user keeps must not hold what came of it

    def close(self, *, wait: bool) -> None:
        """Let the threads end after their calls; with `wait`, wait a second for that.

        A call that has its answer may be in a handler of the log, which does not return.
        """
        if os.getpid() != self._pid:
            return  # a fork has no such threads, and one of the parent's may have held the lock
        with self._lock:
            self._closed = True
            threads = [*self._threads]
        end = monotonic() + LATE_SECONDS
        for thread in threads if wait else ():
            if thread is not threading.current_thread():  # a finalizer may close, in any thread
                thread.join(max(0.0, end - monotonic()))

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._threads.remove(threading.current_thread())
                    return
                call = self._calls.popleft()
            call()
            del call  # it holds its arguments


def _make(call: Callable[[], _T], future: "Future[_T]") -> None:
    """Make a call for a future."""
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(call())
    except BaseException as exc:
        future.set_exception(exc)
    finally:
        del future  # the error's traceback has this


def _cancel_late(waiting: "Future[Any]") -> None:
    if not waiting.cancelled() and waiting.exception() is None:
        result = waiting.result()
        if isinstance(result, Future):
            result.cancel()
