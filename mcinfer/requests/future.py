"""The future of a submitted request, which reads the request's outcome.

It has no Condition, unlike `concurrent.futures.Future`: an exception between two instructions can leave a
Condition locked for ever.
"""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import _base as states
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol, TypeVar
from weakref import ref

from mcinfer.errors import raised_by_handler
from mcinfer.requests.request import Outcome

T = TypeVar("T")


class Owner(Protocol):
    """The part of the loop that futures need."""

    def cancel(self, outcome: "Outcome[Any]") -> bool:
        """Cancel a request; False if it was settled before."""

    def check_wait(self) -> None:
        """Raise an error where the calling thread would wait in vain."""

    def deliver(self, call: Callable[[], object]) -> None:
        """Have the delivery thread make a call."""


class _Gate:
    """The `Condition` of a future, as `concurrent.futures.wait` and `as_completed` use it.

    They count the futures that are done and add a waiter to each, and must see the same state in both steps.
    But the loop may settle the outcome in between, and takes no lock. So the holder of the gate keeps seeing
    the state of the moment when it took the gate.
    """

    def __init__(self, outcome: Outcome[Any]) -> None:
        self._outcome = outcome
        self._lock: Any = threading.RLock()
        self._seen = False

    @property
    def settled(self) -> bool:
        return self._seen if self._lock._is_owned() else self._outcome.settled

    def acquire(self) -> None:
        seen = self.settled
        self._lock.acquire()
        self._seen = seen

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Waiters(list[Any]):
    """The waiters that `concurrent.futures.wait` and `as_completed` add to a future.

    `to_call` has those that do not know the outcome yet.
    """

    def __init__(self, future: "OutcomeFuture[Any]") -> None:
        super().__init__()
        self._future = ref(future)
        self.to_call: list[Any] = []

    def append(self, waiter: Any) -> None:
        """Add a waiter, for the gate's holder; notify it of an outcome that is set meanwhile."""
        super().append(waiter)
        future = self._future()
        if future is None or future._condition.settled:
            return  # it counts it as done, and must not count it again
        self.to_call.append(waiter)
        if future.done():
            future.owner.deliver(future.notify)

    def remove(self, waiter: Any) -> None:
        super().remove(waiter)
        with suppress(ValueError):
            self.to_call.remove(waiter)


class OutcomeFuture(Future[T]):
    """A future that reads an outcome; `concurrent.futures.wait` and `as_completed` take it as any other.

    The names with one underscore are those that `concurrent.futures` uses (CPython 3.11 to 3.14,
    Lib/concurrent/futures/_base.py). `Future.__init__` is not called: most futures need no Condition, which
    costs as much as all the rest.
    """

    def __init__(self, outcome: Outcome[T], owner: Owner) -> None:
        self.outcome = outcome
        self.owner = owner
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self._waiting: _Waiters | None = None
        if not outcome.settled:
            outcome.future = self

    @property
    def is_awaited(self) -> bool:
        return bool(self._callbacks or (self._waiting is not None and self._waiting.to_call))

    @property
    def _condition(self) -> Any:  # type: ignore[override]
        return self.__dict__.setdefault("_gate", _Gate(self.outcome))

    @property
    def _state(self) -> str:  # type: ignore[override]
        if not self._condition.settled:
            return states.PENDING
        if self.outcome.was_cancelled:
            return states.CANCELLED_AND_NOTIFIED
        return states.FINISHED

    @property
    def _waiters(self) -> Any:  # type: ignore[override]
        if self._waiting is None:
            self._waiting = self.__dict__.setdefault("_lazy_waiters", _Waiters(self))
        return self._waiting

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "finished" if self.done() else "pending"
        return f"<{type(self).__name__} at {id(self):#x} state={state}>"

    def done(self) -> bool:
        return self.outcome.settled

    def running(self) -> bool:
        """Always False: a request can be cancelled until it is done."""
        return False

    def cancelled(self) -> bool:
        return self.outcome.was_cancelled

    def cancel(self) -> bool:
        """Cancel the request, also during its run; False if it is done."""
        if self.outcome.settled:
            return self.outcome.was_cancelled
        return self.owner.cancel(self.outcome)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """As that of every future; a thread of mcinfer's calls the callbacks, one after another."""
        self._callbacks.append(fn)
        if self.outcome.settled:
            self.owner.deliver(self.notify)

    def result(self, timeout: float | None = None) -> T:
        try:
            self._await(timeout)
            return self.outcome.result()
        finally:
            # The error that this may raise must not hold what holds it.
            self = None  # type: ignore[assignment]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await(timeout)
        return self._failure()

    def _await(self, timeout: float | None) -> None:
        outcome = self.outcome
        try:
            if not outcome.settled:
                self.owner.check_wait()
                end = None if timeout is None else monotonic() + timeout
                while not outcome.wait(None if end is None else end - monotonic()):
                    if end is not None and monotonic() >= end:
                        raise TimeoutError
            if outcome.was_cancelled:
                raise CancelledError
        finally:
            self = outcome = None  # type: ignore[assignment]

    def _failure(self) -> BaseException | None:
        outcome = self.outcome
        if outcome.settled and outcome.error is None and not outcome.was_cancelled:
            try:
                outcome.result()  # joining the parts may fail
            except Exception as exc:
                if raised_by_handler(exc):
                    raise
                return exc.with_traceback(None)  # which would hold this, and the outcome
        return outcome.error

    def announce(self) -> None:
        if self.is_awaited:
            self.owner.deliver(self.notify)

    def prepare(self) -> None:
        self._failure()

    def notify(self) -> None:
        """Call the callbacks and the waiters: in the delivery thread."""
        while (callback := _next(self._callbacks)) is not None:
            try:
                callback(self)
            except BaseException as exc:
                text = "exception calling callback for %r"
                if not isinstance(exc, Exception):
                    text = "a callback of %r wants to end this thread, which it cannot"
                with suppress(BaseException):  # of a handler of the log: others wait behind it
                    states.LOGGER.exception(text, self)
        waiting = self._waiting
        # Without the gate, which a signal may have left with a thread that waited.
        while waiting is not None and (waiter := _next(waiting.to_call)) is not None:
            if self.outcome.was_cancelled:
                waiter.add_cancelled(self)
            elif self._failure() is not None:
                waiter.add_exception(self)
            else:
                waiter.add_result(self)


def _next(calls: list[T]) -> T | None:
    """Take the first; after the delivery thread's end, several threads may come at once."""
    try:
        return calls.pop(0)
    except IndexError:
        return None
