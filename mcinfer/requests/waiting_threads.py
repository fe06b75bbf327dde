"""Threads that wait on behalf of code that must not, such as an event loop.

They are daemons: a call that waits for memory must not delay the end of the interpreter, which waits for
the threads of `concurrent.futures`.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_MAX_THREADS = 8
"""Calls beyond these wait for a thread, first come first served."""

_IDLE_SECONDS = 1.0
"""After which a thread that has nothing to do ends."""

_T = TypeVar("_T")


class WaitingThreads:
    """A few threads, while they are needed. Any thread may call any method."""

    def __init__(self) -> None:
        """No thread yet."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Of one thread again: a signal's handler, or a finalizer, may come in the middle and close this.
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0  # calls that wait for a thread, or have one
        self._closed = False
        self._pid = os.getpid()

    def submit(self, call: Callable[[], _T]) -> "Future[_T]":
        """Make this call in a thread, after `close` in this one; return a future of its result or error."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(result)

        with self._lock:
            closed = self._closed
            if not closed:
                self._unfinished += 1
                if len(self._threads) < min(self._unfinished, _MAX_THREADS):
                    name = f"mcinfer-wait-{len(self._threads)}"
                    thread = threading.Thread(target=self._run, name=name, daemon=True)
                    thread.start()
                    self._threads.append(thread)
                self._calls.put(run)
        if closed:
            run()
        return future

    def close(self, *, wait: bool) -> None:
        """End the threads once their calls have ended.

        Args:
            wait: Whether to wait for that; then see that the calls do end, before.
        """
        if os.getpid() != self._pid:
            return  # after a fork there are no threads, and the lock may be held by one that there was
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            for _ in threads:
                self._calls.put(None)
        for thread in threads if wait else ():
            if thread is not threading.current_thread():  # a finalizer may close, in any
                thread.join()

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._closed or not self._calls.empty():
                        continue  # one has just come
                    self._threads.remove(threading.current_thread())
                return
            if call is None:
                return
            call()
            del call  # it holds what it was about, which is not this thread's
            with self._lock:
                self._unfinished -= 1
