"""Answers that callers wait for: a request's outcome, and the future of a submitted request.

The loop sets an outcome once; everything else only reads it. A caller that waits has a lock of its own, which
the loop releases. So a signal at any moment, in a caller or in a handler, leaves nothing held that another
thread needs: not so the Condition of `concurrent.futures.Future`, which an exception between two instructions
can leave locked for good.
"""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import _base as states
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

T = TypeVar("T")

_CANCELLED = "cancelled"


class Owner(Protocol):
    """What serves futures: the loop."""

    def cancel(self, outcome: "Outcome[Any]") -> bool:
        """Cancel a request; False if it was settled before."""

    def check_wait(self) -> None:
        """Raise an error where the calling thread would wait in vain."""

    def deliver(self, call: Callable[[], object]) -> None:
        """Have the delivery thread make a call."""


class Outcome(Generic[T]):
    """What becomes of a request, a start, a restart: set once, by the loop; any thread may wait for it.

    Attributes:
        settled: Whether it is set.
        error: Why it failed, if it did.
        was_cancelled: Whether it was cancelled before it was settled.
        future: Of a submitted request, until it is settled.
    """

    __slots__ = ("_locks", "error", "future", "settled", "was_cancelled")

    def __init__(self) -> None:
        """Not set."""
        self._locks: list[Any] = []
        self.settled = False
        self.error: BaseException | None = None
        self.was_cancelled = False
        self.future: OutcomeFuture[T] | None = None

    def settle(self, error: BaseException | None = None, *, cancelled: bool = False) -> None:
        """Set it and wake all that wait; for the loop alone, once."""
        self.error = error
        self.was_cancelled = cancelled
        self.settled = True
        for lock in tuple(self._locks):
            lock.release()
        future, self.future = self.future, None  # or they would hold each other
        if future is not None and future.is_awaited:
            future.owner.deliver(future.notify)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most so many seconds; whether it is."""
        if self.settled:
            return True
        lock = threading.Lock()
        lock.acquire()
        self._locks.append(lock)
        # The loop may have settled it before it could see the lock.
        try:
            if not self.settled:
                most = threading.TIMEOUT_MAX
                lock.acquire(timeout=most if timeout is None else min(max(timeout, 0.0), most))
        finally:
            if not self.settled:
                self._locks.remove(lock)
        return self.settled

    def result(self) -> T:
        """What came of it, once it is settled; raises what it failed with. Any thread may call it."""
        error = self.error
        try:
            if error is not None:
                raise error
            return self.value()
        finally:
            # The error's traceback must not hold what holds the error.
            self = error = None  # type: ignore[assignment]

    def value(self) -> T:
        """What came of it where it did not fail."""
        raise NotImplementedError


class _Gate:
    """What `concurrent.futures.wait` and `as_completed` hold while they look at a future.

    They count what is done and add a waiter to each future, which must see the same: the loop may settle the
    outcome in between, and takes no lock. So what the holder saw first stays what it sees.

    """

    def __init__(self, outcome: Outcome[Any]) -> None:
        self._outcome = outcome
        self._lock: Any = threading.RLock()
        self._seen = False

    @property
    def settled(self) -> bool:
        """Whether the outcome was, when the calling thread took the gate; is, where it did not."""
        return self._seen if self._lock._is_owned() else self._outcome.settled

    def acquire(self) -> None:
        """Take it, and see; a signal's handler may do so in the middle, and sees the same."""
        seen = self.settled
        self._lock.acquire()
        self._seen = seen

    def release(self) -> None:
        """Let others take it."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Waiters(list[Any]):
    """What `concurrent.futures.wait` and `as_completed` add to a future.

    Attributes:
        to_call: Those that have not heard of the outcome, and do not know it from before.
    """

    def __init__(self, future: "OutcomeFuture[Any]") -> None:
        super().__init__()
        self._future = ref(future)
        self.to_call: list[Any] = []

    def append(self, waiter: Any) -> None:
        """Add one, by who has the gate; see to it that it hears of an outcome that is set meanwhile."""
        super().append(waiter)
        future = self._future()
        if future is None or future._condition.settled:
            return  # it counts it as done, and must not count it again
        self.to_call.append(waiter)
        if future.done():
            future.owner.deliver(future.notify)

    def remove(self, waiter: Any) -> None:
        """Take one out."""
        super().remove(waiter)
        with suppress(ValueError):
            self.to_call.remove(waiter)


class OutcomeFuture(Future[T]):
    """A future that reads an outcome; `concurrent.futures.wait` and `as_completed` take it as any other.

    The names with one underscore are those that the functions of `concurrent.futures` use (CPython 3.11 to
    3.14, Lib/concurrent/futures/_base.py).

    Attributes:
        outcome: What it reads.
        owner: Cancels, and has callbacks called.
    """

    def __init__(self, outcome: Outcome[T], owner: Owner) -> None:
        """Not by `Future.__init__`: most futures need no Condition, which costs as much as all the rest."""
        self.outcome = outcome
        self.owner = owner
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self._waiting: _Waiters | None = None
        if not outcome.settled:
            outcome.future = self

    @property
    def is_awaited(self) -> bool:
        """Whether there is a callback or a waiter to call."""
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
        """As that of every future."""
        state = "cancelled" if self.cancelled() else "finished" if self.done() else "pending"
        return f"<{type(self).__name__} at {id(self):#x} state={state}>"

    def done(self) -> bool:
        """As that of every future."""
        return self.outcome.settled

    def running(self) -> bool:
        """Whether it cannot be cancelled any more: never, while it is not done."""
        return False

    def cancelled(self) -> bool:
        """As that of every future."""
        return self.outcome.was_cancelled

    def cancel(self) -> bool:
        """Cancel the request, also one whose run is going on; False if it is done."""
        if self.outcome.settled:
            return self.outcome.was_cancelled
        return self.owner.cancel(self.outcome)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """As that of every future; it is called in a thread of mcinfer's, one after another."""
        self._callbacks.append(fn)
        if self.outcome.settled:
            self.owner.deliver(self.notify)

    def result(self, timeout: float | None = None) -> T:
        """As that of every future."""
        try:
            self._await(timeout)
            return self.outcome.result()
        finally:
            # The error that this may raise must not hold what holds it.
            self = None  # type: ignore[assignment]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As that of every future."""
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
                return exc.with_traceback(None)  # which would hold this, and the outcome
        return outcome.error

    def prepare(self) -> None:
        """Make the result before its user asks for it: in the delivery thread."""
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
    """The first, which is taken out; after the delivery thread's end several threads may come at once."""
    try:
        return calls.pop(0)
    except IndexError:
        return None
