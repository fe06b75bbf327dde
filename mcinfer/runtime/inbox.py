"""How callers reach the loop. Any thread calls it.

::

    callers ── requests, allocations, questions ──► Inbox ──► the loop's turn ──► Admission
    callers ◄── their own locks ── the loop

An `Inbox` is all of the loop that a caller's thread touches. A caller appends what it wants, rings the bell
if the loop sleeps, and waits on a lock of its own (`Outcome`). So an exception anywhere in a caller leaves
garbage, not damage. After a fork the child has no loop and must not touch the sockets: every entry point
compares the pid.
"""

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, NoReturn, TypeVar

from mcinfer.config import Device, Limits
from mcinfer.errors import (
    REFUSALS,
    ClosedError,
    McinferError,
    PredictTimeoutError,
    QueueFullError,
)
from mcinfer.locks import Lock
from mcinfer.requests.planner import Place
from mcinfer.requests.request import Outcome, Request
from mcinfer.runtime.admission import Admission, Allocation, refuse
from mcinfer.runtime.delivery import Delivery
from mcinfer.scheduler.dispatch import RequestTable
from mcinfer.shm.arena import Arena, SharedBlock, Slot
from mcinfer.shm.descriptors import WakeUp, eventfd_write

T = TypeVar("T")

CLOSING = "the master is closing: it finishes what it has, and takes no more"
NOT_STARTED = "the master is not started: call start(), or use it in a with statement"

_CALLER_PATIENCE = 5.0  # seconds past its deadline that a caller waits for the loop
_LOOP_PATIENCE = 60.0  # seconds that a question to the loop waits for its answer


class Question(Outcome[T]):
    """A function for the loop to call."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function = function

    def make(self) -> None:
        try:
            self.set(self._function())
        except Exception as exc:
            self.settle(exc)


class Doors:
    """Whether a master takes calls: any thread may ask.

    Attributes:
        pid: Of the process that made the master.
        start_claims: Not empty until the master is started.
        opened: Whether there is what answers calls.
        closing: Whether it was asked to close.
        finished: Whether nothing is left, and nothing will be started.
        failure: Why it could not be started, or has failed.
        table: The requests.
        refused: How many requests were refused in callers' threads, by reason.
    """

    def __init__(self, limits: Limits) -> None:
        self.refused = dict.fromkeys(REFUSALS, 0)
        # A signal's handler may be refused as well, and wait for the loop, which has counts of its own.
        self._refusing = Lock()
        self.start_claims = [True]
        self.opened = self.closing = self.finished = False
        self.failure: McinferError | None = None
        self.table: RequestTable
        self._limits = limits
        self.pid = os.getpid()

    def claim_start(self) -> None:
        """Raise `ClosedError` unless this is the first start, before any `close`."""
        self.check_process()
        if not take(self.start_claims) or self.closing:
            raise ClosedError("a master can be started once; make a new one")

    def refuse_start(self, failure: McinferError) -> NoReturn:
        """Raise this failure, and report it from now on."""
        self.failure, self.finished = failure, True
        raise failure

    @property
    def state(self) -> str:
        """The state in words; "ready" once there is what answers calls."""
        if self.is_forked:
            return f"of process {self.pid}"
        if self.finished:
            return "closed" if self.failure is None else "failed"
        if self.start_claims:
            return "not started"
        return "closing" if self.closing else "ready" if self.opened else "starting"

    def check_open(self, *, for_request: bool = False) -> None:
        """Raise `ClosedError` unless calls are taken; `for_request`, `QueueFullError` if none has a place."""
        if not self.opened or self.closing or os.getpid() != self.pid:
            self.check_process()
            if self.finished:
                raise ClosedError("the master is closed")
            raise ClosedError(CLOSING if self.closing else NOT_STARTED)
        limits = self._limits
        full = for_request and self.table.in_flight >= limits.queue
        if full and limits.when_queue_full == "raise":
            self.table.check_room(limits, 0)

    def note_refusal(self, error: McinferError) -> None:
        """Count a request that this error refuses, once, in any caller's thread; no other error counts."""
        reason, error.refusal = error.refusal, None
        if reason and not self.is_forked:
            with self._refusing:
                self.refused[reason] += 1

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the master's: then nothing here answers calls."""
        return os.getpid() != self.pid

    def check_process(self) -> None:
        if self.is_forked:
            raise ClosedError(
                f"this master belongs to process {self.pid}; process {os.getpid()} was forked from it "
                "and needs a master of its own"
            )


def take(claims: list[bool]) -> bool:
    """Whether the calling thread is the first to take this."""
    try:
        return claims.pop()
    except IndexError:
        return False


class Inbox(Doors):
    """How callers reach the loop: any thread may call it.

    Attributes:
        items: What has come, for the loop.
        bell: Wakes the loop.
        asleep: Whether the loop sleeps, or is about to.
        gone: Whether the loop has ended: what comes is refused here.
        loop_thread: The identifier of the loop's thread.
        places: The memory of devices that is open.
        admission: Whose lines callers would wait in; set before the loop is open.
    """

    def __init__(
        self, limits: Limits, delivery: Delivery, open_place: Callable[[Device], Place]
    ) -> None:
        super().__init__(limits)
        self.items: deque[Request | Question[Any] | Allocation] = deque()
        self.bell = WakeUp()
        self.asleep = False
        self.gone = False
        self.loop_thread = 0
        self.admission: Admission
        self._delivery = delivery
        self._open_place = open_place
        # By worker, the devices whose memory it reaches.
        self._reached: dict[int, frozenset[str]] = {}
        self.places: dict[Device, Place] = {}

    def check_wait(self) -> None:
        """Raise an error where the calling thread would wait in vain.

        Raises:
            McinferError: It is the loop's: the collector runs a finalizer there.
            ClosedError: This process was forked from the master's.
        """
        self.check_process()
        if threading.get_ident() == self.loop_thread:
            raise McinferError(
                "called by a finalizer in mcinfer's own thread, where nothing may wait"
            )

    def may_wait(self) -> bool:
        """Whether the calling thread may wait for answers: not in a callback, which others wait behind."""
        return threading.get_ident() not in (self.loop_thread, self._delivery.ident)

    # What callers want.

    def enter(self, request: Request, *, wait: bool) -> None:
        """Queue a request; with `wait`, return only when it has a place in the queue.

        Raises:
            ClosedError: The master is closed.
            QueueFullError: Too many requests are in flight, and were until the time was over.
        """
        if wait:
            limits = self._limits
            near = self.table.in_flight + len(self.items) >= limits.queue
            if near or self.admission.places.waiting or limits.queue_bytes is not None:
                self.check_wait()
                request.entered = Outcome[None]()
        self.items.append(request)
        if self.asleep:
            self.ring()
        if self.gone:
            self.refuse()
        entered = request.entered
        if entered is None:
            return
        try:
            entered.wait(request.called + request.timeout - monotonic() + _CALLER_PATIENCE)
            if not entered.settled:
                raise QueueFullError("the loop did not answer in time")
            entered.result()
        except BaseException:
            self.forget(request)
            raise
        finally:
            del request, entered  # which hold the error, and its traceback this

    def forget(self, outcome: Outcome[Any]) -> None:
        """Cancel a request without waiting for that."""
        if not self.is_forked:
            self.post(Question(partial(self.admission.places.cancel, outcome)))

    def await_answer(self, request: Request) -> None:
        """Wait until a request is settled.

        Raises:
            PredictTimeoutError: The loop hangs.
        """
        patience = request.called + request.timeout - monotonic() + _CALLER_PATIENCE
        if not request.wait(patience):
            self.forget(request)
            if not request.wait(_CALLER_PATIENCE):
                raise PredictTimeoutError(
                    f"no answer within {request.timeout:g} s: the loop does not answer"
                )

    def cancel(self, outcome: Outcome[Any]) -> bool:
        """Cancel a request; False if it was settled before."""
        if self.is_forked:
            return False
        call = Question(partial(self.admission.places.cancel, outcome))
        self.post(call)
        if threading.get_ident() == self.loop_thread:
            return True  # a finalizer that the collector runs in the loop
        self.wait_for(call)
        return outcome.was_cancelled

    def deliver(self, call: Callable[[], object]) -> None:
        """Have the delivery thread make a call."""
        self._delivery.put(call)

    def repeat(self, call: Callable[[], bool]) -> None:
        """Have the delivery thread make a call until it returns True."""
        self._delivery.repeat(call)

    def allocate(
        self,
        sizes: Sequence[int],
        timeout: float,
        arena: Arena | None = None,
        block: SharedBlock | None = None,
    ) -> list[Slot]:
        """Slots of shared memory of so many bytes, all or none; `arena` is a place's, None the host's.

        Raises:
            MemoryFullError: The memory is in use, and was until the time was over.
            QueueFullError: The loop did not answer in time.
            InvalidInputError, ClosedError: As `Arena.allocate_all`.
            PredictError: The system has no memory or descriptor left.
            McinferError: As `check_wait`.
            BlockNeededError: The place's arena needs a block: make one, and come again with it.
        """
        self.check_wait()
        wanted = Allocation(self.admission.memory[arena], sizes, timeout, block)
        try:
            self.post(wanted)
            wanted.wait(timeout + _CALLER_PATIENCE)
        except BaseException:
            wanted.timeout = -math.inf  # nothing is to wait behind it
            raise
        try:
            if not wanted.settled:
                raise QueueFullError("the loop did not answer in time")
            return wanted.result()
        finally:
            # Or the error's traceback, this frame and it would hold each other, and memory.
            del wanted, block

    def place(self, device: Device) -> Place:
        """A device's memory for tensors; the first call opens the device in this process.

        Raises:
            MissingDependencyError: A package is not installed.
            BuildError: There is no such device, or no driver.
            ClosedError: The master is closed.
        """
        found = self.places.get(device)
        return found or self.ask(partial(self._add_place, device, self._open_place(device)))

    def _add_place(self, device: Device, opened: Place) -> Place:
        if self.finished:
            raise ClosedError("the master is closed")
        if device not in self.places:
            self.admission.add_arena(opened.arena)
            self.places[device] = opened
            self.note_reach()
        return self.places[device]

    def note_reach(self, worker: int | None = None, devices: Sequence[str] = ()) -> None:
        """A worker says whose memory it reaches: each place learns whether all workers reach it."""
        if worker is not None:
            self._reached[worker] = frozenset(devices)
        for device, place in self.places.items():
            place.is_reached = all(str(device) in reached for reached in self._reached.values())

    def ring(self) -> None:
        eventfd_write(self.bell.fd, 1)  # which lives as long as the loop's object

    def post(self, item: "Question[Any] | Allocation") -> None:
        self.items.append(item)
        if self.asleep:
            self.ring()
        if self.gone:
            self.refuse()

    def ask(self, function: Callable[[], T]) -> T:
        """Call a function in the loop, and wait for its result or error; raises as `check_wait`."""
        self.check_process()
        if not self.opened or self.gone:
            return function()
        self.check_wait()
        call = Question(function)
        self.post(call)
        self.wait_for(call)
        return call.result()

    def wait_for(self, call: Outcome[Any]) -> None:
        if not call.wait(_LOOP_PATIENCE):
            raise McinferError(f"the loop did not answer within {_LOOP_PATIENCE:g} s")

    def refuse(self) -> None:
        """The loop has ended: refuse what came too late."""
        while self.items:
            try:
                item = self.items.popleft()
            except IndexError:
                return
            if isinstance(item, Question):
                item.make()
            else:
                refuse(item, ClosedError("the master is closed"))
