"""One request: the places of its tensors, its workers' answers, its outcome, and the future of that.

::

    Planner ──► Request(plan, inputs, outputs) ──► loop ──► workers write into the outputs' memory
    replies ──► Request.take (checked against what was asked for) ──► Request.value: arrays over that memory

Ownership: a request holds a `Lease` on the memory of its inputs and one on that of its outputs. The loop
holds the request until no worker can read or write that memory; the arrays that `value` gives hold the
outputs' lease from then on. When the last holder of a lease is gone, in any thread, its memory goes back to
its plan. An input that lies in shared memory already is borrowed: the user must not change it before the
answer.
"""

import errno
import reprlib
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import _base as states
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from math import prod
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar, cast
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import McinferError, PredictError, ProtocolError
from mcinfer.locks import Lock
from mcinfer.protocol import PREDICT, PREDICT_HEAD, TensorRef, encode_numbers, encode_references
from mcinfer.requests.frames import Lease, Plan, Views, is_leased
from mcinfer.requests.splitting import SplitState, Splitter
from mcinfer.requests.tensors import Arrays, Inputs, join_parts, outputs_of_no_rows
from mcinfer.requests.weights import WeightVersion
from mcinfer.sharding import JoinError
from mcinfer.specs import STRING, TensorSpec, tensor_bytes

T = TypeVar("T")

NO_WEIGHTS = WeightVersion(number=0)

_NO_REFERENCES = encode_references(())

_FAILURES = (McinferError, MemoryError, OSError, TypeError, ValueError)
"""What making a result may raise; anything else, as of a signal's handler, is no error of the request."""

_MOST_ANSWERED = 64
"""References of answers that a plan remembers at most, or one more answer."""

Parts = Mapping[tuple[int, str], NDArray[Any]]
"""By shard and name, parts of outputs in blocks of workers' own."""


@dataclass(slots=True)
class Call:
    """What a caller wants: one request, as `Master` has checked it, except for its inputs.

    Attributes:
        inputs: By name, or in the model's order.
        splitter: Knows how its batch is split.
        split_state: What is known of that, for these weights.
        weights: The version that it runs with; none after the call, since errors that are kept hold it.
        pieces: Most shards that it is cut into.
        joins: Whether it may go in one run with others.
        start: When the call came, of `time.monotonic`; `timeout` seconds count from then on.
        timeout: Seconds.
        priority: Among requests that wait for a worker.
        outputs: Names of the outputs to return; None is all.
        outputs_on: The place (`mcinfer.requests.planner.Place`) for the outputs; None is the host's.
        context: Of the caller, if the request is traced.
        offer: Called before each wait with a function that ends it, which any thread may call.
        apart: Whether it is a run of a look: whole, and not joined with others.
        limited: Whether there must be a place in the queue for it; not for a part of an accepted request.
        keeps: Whether its inputs may be needed again after its pieces.
        rows: Rows of each shard, once it is cut.
    """

    inputs: Inputs
    splitter: Splitter
    split_state: SplitState
    weights: WeightVersion
    pieces: int
    joins: bool
    start: float
    timeout: float
    priority: int = 0
    outputs: Sequence[str] | None = None
    outputs_on: Any = None
    context: Context | None = None
    offer: Callable[[Callable[[], object]], object] | None = None
    apart: bool = False
    limited: bool = True
    keeps: bool = False
    rows: tuple[int, ...] = ()

    @property
    def may_be_rescued(self) -> bool:
        """Whether it is in pieces, and may run whole if these fail."""
        return self.split_state.rescues and len(self.rows) > 1


class Outcome(Generic[T]):
    """The result of a request, a start or a restart: the loop sets it once, and any thread may wait for it.

    A waiting caller has a lock of its own, which the loop releases. So a signal at any moment, in a caller or
    in a handler, leaves no lock held that another thread needs.

    Attributes:
        settled: Whether it is set.
        future: The future of a submitted request, until it is settled.
    """

    __slots__ = ("_locks", "_value", "error", "future", "settled", "was_cancelled")

    def __init__(self) -> None:
        self._locks: list[Any] = []
        self.settled = False
        self.error: BaseException | None = None
        self.was_cancelled = False
        self.future: OutcomeFuture[T] | None = None

    def settle(self, error: BaseException | None = None, *, cancelled: bool = False) -> None:
        """Set it, and wake who waits; for the loop alone, once."""
        self.set_ending(error, cancelled=cancelled)
        self.wake()

    def set_ending(self, error: BaseException | None, *, cancelled: bool) -> None:
        """Set it; `wake` is to follow."""
        self.error = error
        self.was_cancelled = cancelled
        self.settled = True

    def wake(self) -> None:
        """Wake all waiting threads, and what else the future has to announce it to."""
        for lock in tuple(self._locks):
            lock.release()
        future, self.future = self.future, None  # or they would hold each other
        if future is not None:
            future.announce()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most so many seconds; whether it is set."""
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
        """The result after settlement; raises the error of a failure."""
        error = self.error
        try:
            if error is not None:
                raise error
            return self.value()
        finally:
            # The error's traceback must not hold what holds the error.
            self = error = None  # type: ignore[assignment]

    def set(self, value: T) -> None:
        """Settle it with a value; for the loop alone, once."""
        self._value: T | None = value
        self.settle()

    def value(self) -> T:
        """The result of a success; None if it was only settled."""
        return getattr(self, "_value", None)  # type: ignore[return-value]


# Futures.


class Owner(Protocol):
    """The part of `mcinfer.runtime.inbox.Inbox` that futures need."""

    def cancel(self, outcome: Outcome[Any]) -> bool: ...
    def forget(self, outcome: Outcome[Any]) -> None: ...
    def check_process(self) -> None: ...
    def check_wait(self) -> None: ...
    def deliver(self, call: Callable[[], object]) -> None: ...


class _Gate:
    """The `Condition` of a future, as `concurrent.futures.wait` and `as_completed` use it.

    They count the futures that are done and add a waiter to each, and must see the same state in both steps.
    But the loop may settle the outcome in between, and takes no lock. So the holder of the gate keeps seeing
    the state of the moment when it took the gate. What is settled does not change any more, and has no lock:
    at a fork, another thread may hold it.
    """

    def __init__(self, outcome: Outcome[Any], owner: Owner) -> None:
        self._outcome = outcome
        self._owner = owner
        self._lock: Any = Lock()
        self._seen = False

    @property
    def settled(self) -> bool:
        return self._seen if self._lock._is_owned() else self._outcome.settled

    def acquire(self) -> None:
        if self.settled:
            return
        self._owner.check_wait()
        self._lock.__enter__()
        self._seen = False

    def release(self) -> None:
        if self._lock._is_owned():
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Waiters(list[Any]):
    """The waiters that `concurrent.futures.wait` and `as_completed` add to a future, until it calls them."""

    def __init__(self, future: "OutcomeFuture[Any]") -> None:
        super().__init__()
        self._future = ref(future)

    def append(self, waiter: Any) -> None:
        """Add a waiter, for the gate's holder; notify it of an outcome that is set meanwhile."""
        future = self._future()
        if future is None or future._condition.settled:
            return  # it counts it as done, and must not count it again
        super().append(waiter)
        if future.done():
            future.owner.deliver(future.notify)

    def remove(self, waiter: Any) -> None:
        with suppress(ValueError):  # it was called, or was not to be
            super().remove(waiter)


class OutcomeFuture(Future[T]):
    """A future that reads an outcome; `concurrent.futures.wait` and `as_completed` take it as any other.

    It has no Condition: an exception between two instructions can leave a Condition locked for ever.
    The names with one underscore are those that `concurrent.futures` uses (CPython 3.11 to 3.14,
    Lib/concurrent/futures/_base.py). `Future.__init__` is not called: most futures need no Condition, which
    costs as much as all the rest.
    """

    def __init__(self, outcome: Outcome[T], owner: Owner) -> None:
        self.outcome = outcome
        self.owner = owner
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self._waiting: _Waiters | None = None
        self._resume: Callable[[], object] | None = None
        if not outcome.settled:
            outcome.future = self

    @property
    def _condition(self) -> Any:  # type: ignore[override]
        return self.__dict__.setdefault("_gate", _Gate(self.outcome, self.owner))

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
        if not self.outcome.settled:
            self.owner.check_process()
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
        return self.prepare()

    async def answer(self) -> T:
        """The result, for a task of asyncio; cancelling the task cancels the request.

        The loop resumes the task by `call_soon_threadsafe`, which is short and takes no lock of a user's
        with the event loops of asyncio and uvloop; the delivery thread does so for others, which may.
        """
        import asyncio  # `mcinfer.master` says why not above

        events = asyncio.get_running_loop()
        resumed = events.create_future()
        resume = partial(_resume, events, resumed)
        if type(events).__module__.partition(".")[0] not in ("asyncio", "uvloop"):
            resume = partial(self.owner.deliver, resume)
        self._resume = resume
        try:
            if not self.outcome.settled:  # else the loop may not have seen what resumes
                await resumed
            return self.outcome.result()
        except BaseException:
            if not self.outcome.settled:
                self.owner.forget(self.outcome)
            raise
        finally:
            self._resume = None
            # The error that this may raise must not hold what holds it.
            self = resume = resumed = events = None  # type: ignore[assignment]

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

    def prepare(self) -> BaseException | None:
        """Make the result, before its user asks for it, and return the error of a failure."""
        outcome = self.outcome
        if outcome.settled and outcome.error is None and not outcome.was_cancelled:
            try:
                outcome.result()  # joining the parts may fail
            except _FAILURES as exc:
                return exc.with_traceback(None)  # which would hold this, and the outcome
        return outcome.error

    def announce(self) -> None:
        """The outcome is set; for the loop."""
        resume = self._resume
        if resume is not None:
            resume()
        if self._callbacks or self._waiting:
            self.owner.deliver(self.notify)

    def notify(self) -> None:
        """Call the callbacks and the waiters: where the owner delivers."""
        while (callback := _next(self._callbacks)) is not None:
            try:
                callback(self)
            except BaseException as exc:
                text = "exception calling callback for %r"
                if not isinstance(exc, Exception):
                    text = "a callback of %r wants to end this thread, which it cannot"
                with suppress(BaseException):  # of a handler of the log: others wait behind it
                    states.LOGGER.exception(text, self)
        # Without the gate, which a signal may have left with a thread that waited.
        while self._waiting and (waiter := _next(self._waiting)) is not None:
            if self.outcome.was_cancelled:
                waiter.add_cancelled(self)
            elif self.prepare() is not None:
                waiter.add_exception(self)
            else:
                waiter.add_result(self)


def _resume(events: Any, resumed: Any) -> None:
    """Resume the task that awaits this future of its event loop; in any thread."""
    with suppress(RuntimeError):  # the event loop is closed
        events.call_soon_threadsafe(_set, resumed)


def _set(resumed: Any) -> None:
    if not resumed.done():  # the task may be cancelled
        resumed.set_result(None)


def _next(calls: list[T]) -> T | None:
    """Take the first; after the delivery thread's end, several threads may come at once."""
    try:
        return calls.pop(0)
    except IndexError:
        return None


# Requests.


class Request(Outcome[Arrays]):
    """One request in flight; only `Planner` makes requests.

    What a `Call` says of itself (its start is `called` here, its outputs `wanted`) is not said again.

    Attributes:
        number: The loop's, once it has the request.
        rows: Rows of each shard; 1 if nothing is cut.
        size: Bytes of its inputs, and of its outputs of known shapes.
        waits: Whether it may wait for a place in the queue.
        may_be_wide: Whether it may have the whole CPU if it is alone: not in a check of how it splits.
        join: The key that it shares with requests that may join one run with it, and its rows; None for one
            that runs alone.
        blocks: Numbers of the blocks of its references.
        is_laid_out: Whether PREDICT gives the place of every output: then a reply may have no outputs.
        copies: Whether to copy its value to ordinary memory, since shared memory is short.
        contradicted: Called with the reason if its parts do not join.
        entered: Set when it has a place in the queue, if a caller waits for that.
        workers: By shard, the index of the worker that answered it.
    """

    def __init__(
        self,
        plan: Plan,
        call: Call,
        inputs: Sequence[object],
        input_bodies: Sequence[bytes],
        outputs: Lease | None,
        blocks: frozenset[int],
    ) -> None:
        self._locks = []
        self.settled = self.was_cancelled = False
        self.error = self.future = None
        self.number = -1
        self.rows = plan.cut.rows
        self.size = plan.size
        self.called, self.timeout = call.start, call.timeout
        self.priority = call.priority
        self.waits = False
        self.limited = call.limited
        self.may_be_wide = not call.apart
        self.join: tuple[Hashable, int] | None = None
        self.context = call.context
        self.weights = call.weights
        self.blocks = blocks
        self.contradicted: Callable[[str], None] = call.splitter.withdraw
        self.entered: Outcome[None] | None = None
        self._model = plan.model
        self._plan = plan
        self._inputs = inputs
        self._input_bodies = input_bodies
        self._outputs = outputs
        self.is_laid_out = plan.lays_all and outputs is not None
        self._asked: Sequence[tuple[TensorRef, ...]] = ((),) * len(self.rows)
        self._output_bodies: Sequence[bytes] = (_NO_REFERENCES,) * len(self.rows)
        if outputs is not None:
            frame = outputs.ticket.frame
            self._asked, self._output_bodies = frame.references, frame.bodies
        self.copies = False
        self._views = plan.simple_outputs
        self._parts: Parts | None = None
        self.workers: dict[int, int] = {}
        self._value = None
        self.wanted = call.outputs

    def preset(self) -> None:
        """Answer a batch of no rows, which needs no run."""
        self._value = pick(outputs_of_no_rows(self._model, self._plan.cut), self.wanted)
        self.settled = True

    # For the loop.

    @property
    def is_simple(self) -> bool:
        """Whether its value is only a view: no part needs copying or joining."""
        return self._parts is None and self._views is not None

    @property
    def axes(self) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
        """The batch's axis in each input and output, for a request that may be joined."""
        cut = self._plan.cut
        return cut.input_axes, tuple(join.axis or 0 for join in cut.outputs)

    def message(self, shard: int, returned: Sequence[int] = (), *, wide: bool = False) -> bytes:
        """The PREDICT of a shard, with the numbers of blocks that are `returned` to the worker."""
        inputs, outputs = self._input_bodies[shard], self._output_bodies[shard]
        run = (self.number, shard, self.weights.number)
        head = PREDICT_HEAD.pack(PREDICT, *run, len(inputs), wide, len(returned))
        return head + (encode_numbers(returned) if returned else b"") + inputs + outputs

    def tensors(self, shard: int) -> tuple[bytes, bytes]:
        """The shard's tensors, as PREDICT_JOINED carries them."""
        return self._input_bodies[shard], self._output_bodies[shard]

    def take(
        self,
        shard: int,
        outputs: tuple[TensorRef, ...],
        lend: Callable[[int], Lease],
        worker: int,
        limit: int,
    ) -> None:
        """Check a reply's references, and take the tensors in the worker's own blocks.

        Args:
            shard: The answered shard.
            outputs: The reply's references, without some or all of those that are in their places.
            lend: Leases a block of the worker's by its number; its exceptions come through.
            worker: The worker's index.
            limit: Most bytes of tensors in the worker's blocks.

        Raises:
            ProtocolError: They are not those that were asked for.
            OSError: This process does not take them: more bytes than `limit` (EFBIG), or it has no memory or
                descriptor left. The request is as before.
        """
        self.workers[shard] = worker
        if not outputs and self.is_laid_out:
            return
        answers = self._plan.answers
        if answers is not None and (answer := answers.get(outputs)) is not None:
            lease = lend(answer[0])
            if not self.settled:  # else it failed before this answer
                self._outputs, self._views = lease, answer[1]
            return
        asked = self._asked[shard]
        expected = {reference[0]: reference for reference in asked}
        given = {reference[0]: reference for reference in outputs}
        names = [spec.name for spec in self._model.outputs]
        # Those that a reply leaves out are in their places: ranks name only what they give.
        whole = [found for name in names if (found := given.get(name) or expected.get(name))]
        in_order = [name for name in names if name in given]
        if len(whole) < len(names) or [reference[0] for reference in outputs] != in_order:
            raise ProtocolError(
                f"reply with outputs {reprlib.repr([ref[0] for ref in outputs])}, expected {names}"
            )
        parts: dict[tuple[int, str], NDArray[Any]] = {}
        blocks: dict[int, NDArray[Any]] = {}
        views: Views = ()
        left = limit
        for spec, reference in zip(self._model.outputs, whole, strict=True):
            name, element_type, shape = reference[:3]
            if element_type != spec.element_type:
                raise ProtocolError(f"reply with {reprlib.repr(reference)}, expected {spec}")
            place = expected.get(name)
            if place == reference:
                continue
            if place is not None and place[2] == shape:
                raise ProtocolError(
                    f"reply with {reprlib.repr(reference)}, expected {reprlib.repr(place)}"
                )
            size = tensor_bytes(spec.element_type, prod(shape))
            parts[shard, name] = _part(spec, reference, size, left, blocks, lend)
            left -= size
            if size:
                views += ((name, shape, spec.dtype, reference[4]),)
        # Their shapes are others than the model declares.
        self._plan.opened.update(name for _, name in parts if name in expected)
        if parts and not self.settled:  # else it failed before this answer
            self._parts = {**(self._parts or {}), **parts}
        is_whole = len(blocks) == len(self.rows) == 1 and len(views) == len(names)
        if answers is not None and is_whole and not asked:
            if len(answers) * len(outputs) > _MOST_ANSWERED:
                answers.clear()
            answers[outputs] = next(iter(blocks)), views

    def release(self) -> None:
        """No worker can read or write its memory any more."""
        self._inputs = ()
        self.weights = NO_WEIGHTS
        if self.error is not None or self.was_cancelled:
            self._outputs = None
            self._parts = {}

    # For callers.

    def taken(self, index: int) -> NDArray[Any] | None:
        """An array over the memory to which this input was copied as a whole; it keeps that memory.

        None where it was not copied so. Not for an input that is borrowed or on a device; to be called before
        the request is queued.
        """
        lease = next((one for one in self._inputs if type(one) is Lease), None)
        side, dtype = self._plan.inputs, self._model.inputs[index].dtype
        layout = side.layouts[index]
        if lease is None or layout is None or not layout.contiguous:
            return None
        memory: Any = np.asarray(cast("Any", lease))
        return np.ndarray(self._plan.shapes[index], dtype, memory, side.starts[index])

    def let_go(self) -> None:
        """Drop the result: the caller has it."""
        self._value = None

    def value(self) -> Arrays:
        """The outputs by name, in the model's order. Two threads that come at once may both make it.

        Raises:
            PredictError: The shards' parts do not join, or an output without a batch dimension
                differs between them.
        """
        # Read before the value: another thread may make it, and drop these then.
        outputs, parts = self._outputs, self._parts
        value = self._value
        if value is not None:
            return value
        simple = self._views
        if simple is not None and parts is None and outputs is not None:
            memory: Any = np.asarray(outputs)
            value = {
                name: np.ndarray(shape, dtype, memory, start)
                for name, shape, dtype, start in simple
            }
            if self.copies:
                # Results that a user collects must not take the memory that requests need.
                value = {name: array.copy() for name, array in value.items()}
        else:
            try:
                if self.error is not None:
                    raise self.error
                value = self._join(parts or {}, outputs)
            except _FAILURES as exc:
                self.error, self._outputs, self._parts = exc, None, {}
                # The frames of its traceback hold memory, and this, which holds the error.
                exc.__traceback__ = self = outputs = parts = None  # type: ignore[assignment]
                raise
        if self.wanted is not None:
            value = pick(value, self.wanted)
        self._value = value
        self._outputs = None
        if self._parts:
            self._parts = {}
        return value

    def _join(self, parts: Parts, outputs: Lease | None) -> Arrays:
        value: Arrays = {}
        memory: Any = None if outputs is None else np.asarray(cast("Any", outputs))
        shards, side = range(len(self.rows)), self._plan.outputs
        try:
            for i, spec in enumerate(self._model.outputs):
                join, layout, start = self._plan.cut.outputs[i], side.layouts[i], side.starts[i]
                layout = None if memory is None else layout
                elsewhere = any((shard, spec.name) in parts for shard in shards)
                if layout is not None and layout.contiguous and not elsewhere:
                    array = np.ndarray(join.shape or (), spec.dtype, memory, start)
                else:
                    pieces = []
                    for shard in shards:
                        part = parts.get((shard, spec.name))
                        if part is not None:
                            pieces.append(part)
                        elif layout is None or join.shapes is None:
                            worker = self.workers[shard]
                            raise PredictError(
                                f"output {spec.name!r} did not come from worker {worker}"
                            )
                        else:
                            place = start + layout.offsets[shard]
                            pieces.append(np.ndarray(join.shapes[shard], spec.dtype, memory, place))
                    workers = [f"worker {self.workers[shard]}" for shard in shards]
                    array = join_parts(spec, join, pieces, workers)
                value[spec.name] = array.copy() if self.copies and is_leased(array) else array
        except JoinError as exc:
            self.contradicted(str(exc))
            raise
        return value


def pick(outputs: Arrays, names: Sequence[str] | None) -> Arrays:
    """Some of the outputs, in the order of the names; None is all."""
    return outputs if names is None else {name: outputs[name] for name in names}


def _part(
    spec: TensorSpec,
    reference: TensorRef,
    size: int,
    most: int,
    blocks: dict[int, NDArray[Any]],
    lend: Callable[[int], Lease],
) -> NDArray[Any]:
    """A part from a reply: its data, or an array over a block of the worker's, which is leased once."""
    shape, number, place = reference[2:]
    dtype = spec.dtype
    if size == 0:
        texts = place if spec.element_type == STRING else ()
        memory, place = np.empty(len(texts), dtype), 0
        memory[:] = texts
    elif number is None or number >= 0:
        raise ProtocolError(f"reply with {spec.name!r} in a block that is not the worker's own")
    else:
        if number not in blocks:
            blocks[number] = np.asarray(cast("Any", lend(number)))
        memory = blocks[number]
        if place + size > memory.nbytes:
            raise ProtocolError(f"reply with {reprlib.repr(reference)} past its block's end")
        if size > most:
            # A worker must not say how much memory of this process its answers take.
            raise OSError(
                errno.EFBIG,
                f"output {spec.name!r} has {size} bytes, expected at most {most} of outputs whose shapes "
                "are not known before the run (Limits.memory_bytes)",
            )
        memory = memory[place : place + size].view(dtype)
    try:
        return memory.reshape(shape)
    except ValueError as exc:  # no array can have that shape
        raise ProtocolError(f"reply with {reprlib.repr(reference)}: {exc}") from exc
