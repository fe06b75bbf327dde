"""Futures that those who wait for them help to answer.

A caller that only sleeps in `Future.result` has two threads change places for each answer: the one that takes
the message wakes the one that waits. Here the caller takes messages itself while it waits.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any, TypeVar

_T = TypeVar("_T")


class HelpedFuture(Future[_T]):
    """A future, with help for its answer from `result` and `exception`.

    Its callbacks are user code, and are to run in one thread alone. So it is answered there, unless somebody
    waits for it, and it has none. (Were one that nobody waits for answered anywhere, a callback that submits
    again and adds itself would often find that one done, and be called within itself.)

    Attributes:
        awaited: Whether somebody waits for it, or is going to.
        help: Called before waiting for it, with this future, a deadline (of `time.monotonic`), and whether
            it was not awaited before: returns when it is done, the time is over, or there is nothing to help
            with. None: nobody helps yet.
    """

    def __init__(self) -> None:
        """Not done."""
        super().__init__()
        self.help: Callable[[Future[_T], float, bool], None] | None = None
        self.awaited = False
        self._watched = False
        self._answering = threading.Lock()

    @property
    def bound(self) -> bool:
        """Whether it is to be answered in the thread for callbacks of users."""
        return self._watched or not self.awaited

    def add_done_callback(self, fn: Callable[[Future[_T]], Any]) -> None:
        """As that of every future."""
        with self._answering:
            self._watched = True
        super().add_done_callback(fn)

    def add_own_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        """Add a callback that may run in any thread."""
        super().add_done_callback(fn)

    def answer(self, result: _T | None, failure: BaseException | None, *, here: bool) -> bool:
        """Set what came of it, unless it was cancelled.

        Args:
            result: If nothing failed.
            failure: What did.
            here: Whether this is the thread for callbacks of users.

        Returns:
            False if it is `bound` to that thread, and this is another one: it is as before.
        """
        if here:
            self._set(result, failure)
            return True
        with self._answering:
            if self.bound:
                return False
            self._set(result, failure)  # which calls no code of users
        return True

    def _set(self, result: Any, failure: BaseException | None) -> None:
        # False: the caller cancelled it, and is not waiting.
        if self.set_running_or_notify_cancel():
            if failure is None:
                self.set_result(result)
            else:
                self.set_exception(failure)

    def result(self, timeout: float | None = None) -> _T:
        """As that of every future."""
        try:
            return super().result(self._helped(timeout))
        finally:
            # The error that this may raise must not hold what holds it.
            self = None  # type: ignore[assignment]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As that of every future."""
        return super().exception(self._helped(timeout))

    def _helped(self, timeout: float | None) -> float | None:
        """Help, and say how much of the time is left."""
        late, self.awaited = not self.awaited, True
        help_answer = self.help
        if help_answer is None or self.done():
            return timeout
        if timeout is None:
            help_answer(self, math.inf, late)
            return None
        deadline = monotonic() + timeout
        if timeout > 0:
            help_answer(self, deadline, late)
        return max(0.0, deadline - monotonic())
