"""Signals at a bad moment: held back until shared state is whole again."""

import importlib
import inspect
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# What the signal module wraps: its conversions to enumerations cost more than the call itself.
_raw = importlib.import_module("_signal")
_set_handler: Callable[[int, Any], Any] = _raw.signal
_get_handler: Callable[[int], Any] = _raw.getsignal

_HELD = tuple(
    int(number)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGALRM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )
)
"""Those whose handlers programs have raise exceptions, or close what they use: Ctrl-C, the end of a
service, a time limit."""

_Handler = Callable[[int, FrameType | None], Any]


class HeldInterrupts:
    """A with statement in which no handler of the user's runs; those that are due run on leaving.

    Python runs signal handlers in the main thread, between any two of its instructions. A
    `KeyboardInterrupt` there could leave the scheduler and the free lists half changed, for threads that
    were not interrupted; a handler that closes the master would wait for a lock that it interrupted the owner
    of. In other threads, and where a signal has no Python handler, this does nothing.
    """

    __slots__ = ("_came", "_handlers", "_holds")

    def __enter__(self) -> None:
        self._came: list[int] = []
        self._handlers: dict[int, _Handler] = {}
        self._holds = False
        if threading.current_thread() is threading.main_thread():
            for number in _HELD:
                handler = _get_handler(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _set_handler(number, self._hold)
            # Last: a handler that raises before is as one that raised before this statement.
            self._holds = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._handlers:
            return
        self._holds = False
        for number, handler in self._handlers.items():
            _set_handler(number, handler)
        self._deliver()

    def _deliver(self) -> None:
        """Run the handlers of what came: all, whatever the first ones raise."""
        while self._came:
            number = self._came.pop(0)
            try:
                self._handlers[number](number, inspect.currentframe())
            except BaseException:
                self._deliver()
                raise

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if not self._holds:
            # Another handler raised while this one's was set, or set back: put that right.
            _set_handler(number, self._handlers[number])
            self._handlers[number](number, frame)
        elif number not in self._came:
            self._came.append(number)
