"""Ctrl-C at a bad moment: held back until shared state is whole again."""

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
_SIGINT = int(signal.SIGINT)


class HeldInterrupts:
    """A with statement in which SIGINT does not raise; it does on leaving, if one came.

    Python runs signal handlers in the main thread, between any two of its instructions. A
    `KeyboardInterrupt` there could leave the scheduler and the free lists half changed, for threads that
    were not interrupted. In other threads, and where SIGINT has no Python handler, this does nothing.
    """

    __slots__ = ("_came", "_handler")

    def __enter__(self) -> None:
        self._came = False
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        if threading.current_thread() is threading.main_thread():
            handler = _get_handler(_SIGINT)
            if callable(handler):
                self._handler = handler
                _set_handler(_SIGINT, self._hold)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handler is not None:
            _set_handler(_SIGINT, self._handler)
            if self._came:
                self._handler(_SIGINT, inspect.currentframe())

    def _hold(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True
