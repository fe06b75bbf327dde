"""The thread that runs users' code: callbacks of futures, trace hooks, handlers of log records.

The loop never does, since such code may wait for locks of its own, or for ever. What it has to say goes
into a queue (`queue.SimpleQueue`, whose `put` may be called anywhere, also in a finalizer); a callback that
does not return holds up other callbacks, and nothing else.
"""

import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from mcinfer.wakeup import WakeUp

_log = logging.getLogger("mcinfer.master")


class Delivery:
    """The queue and its thread. Any thread may call any method; none waits but `wait`.

    Attributes:
        ident: Of the thread, once it runs.
    """

    def __init__(self) -> None:
        """No thread before `start`; what is put until then waits for it.

        Raises:
            OSError: No descriptor is left.
        """
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = WakeUp()
        self._done = False
        self.ident = 0
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="mcinfer-delivery", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this one: others' callbacks wait behind it."""
        return threading.get_ident() == self.ident

    def put(self, call: Callable[[], object]) -> None:
        """Have a call made, after those before it. Where there is no thread any more, it is made here."""
        self._calls.put(call)
        if self._done or os.getpid() != self._pid:
            self._drain()

    def log(
        self, level: int, text: str, *values: object, failure: BaseException | None = None
    ) -> None:
        """Have something logged, as `logging.Logger.log` would."""
        self.put(partial(_log.log, level, text, *values, exc_info=failure))

    def close(self) -> None:
        """End the thread, once it has made the calls that are there."""
        self._calls.put(None)

    def wait(self, seconds: float) -> None:
        """After `close`: wait for its end, but no longer than so many seconds."""
        if self._thread is None or self.is_current:
            return
        ended = select.poll()
        ended.register(self._ended.fd, select.POLLIN)
        if ended.poll(seconds * 1000):
            self._thread.join(seconds)

    def _run(self) -> None:
        self.ident = threading.get_ident()
        while (call := self._calls.get()) is not None:
            _make(call)
            del call  # it holds what it was about
        self._done = True
        self._drain()
        self._ended.set()

    def _drain(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None:
                _make(call)


def _make(call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException:
        # Also SystemExit and its like, and what a handler of the log raises: others wait behind it.
        with suppress(BaseException):
            _log.exception("%r failed", call)
