"""Log records on their way to their handlers.

Handlers are user code, which may wait for locks of its own, or ask how the pool is. So what is said, by
whichever thread and with the pool's lock held, is logged by one thread, without it.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

_log = logging.getLogger("mcinfer.master")


class Records:
    """What was said and is not logged yet. No method waits, but `log` for the handlers."""

    def __init__(self, *, wake: Callable[[], None]) -> None:
        """Begin with none.

        Args:
            wake: Has the thread that logs call `log` soon.
        """
        self._wake = wake
        self._records: deque[tuple[int, str, Sequence[object], BaseException | None]] = deque()

    def add(
        self, level: int, text: str, *values: object, failure: BaseException | None = None
    ) -> None:
        """Have something logged, as `logging.Logger.log` would, unless nobody listens to this level."""
        if not _log.isEnabledFor(level):
            return
        self._records.append((level, text, values, failure))
        self._wake()

    def log(self) -> None:
        """Log what was said; no lock may be held."""
        while self._records:
            level, text, values, failure = self._records.popleft()
            with suppress(Exception):  # of a handler; logging itself raises nothing
                _log.log(level, text, *values, exc_info=failure)
