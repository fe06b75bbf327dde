"""Outcomes and their futures, with those of the standard library for comparison."""

import asyncio
import concurrent.futures._base as futures_base
import gc
import logging
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from time import monotonic
from types import CodeType, FunctionType
from typing import Any, ClassVar, TypeVarTuple

import pytest

from mcinfer.requests.request import Outcome, OutcomeFuture
from mcinfer.runtime.delivery import Delivery
from tests.planned_requests import A_POOL
from tests.process.waiting import wait_until

PATIENCE = 20.0

Ts = TypeVarTuple("Ts")

Settle = Callable[[Outcome[int]], None]


class Number(Outcome[int]):
    """An outcome of a number."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int = 7) -> None:
        super().__init__()
        self.number = number

    def value(self) -> int:
        number = self.number
        self = None  # type: ignore[assignment] # an error would hold it
        if number < 0:
            raise ValueError("negative")
        return number


class Owner:
    """A loop of nothing: it cancels what is not settled, in the thread that asks."""

    def __init__(self) -> None:
        self.delivery = Delivery(A_POOL)
        self.delivery.start()

    def cancel(self, outcome: Outcome[Any]) -> bool:
        if outcome.settled:
            return False
        outcome.settle(cancelled=True)
        return True

    def forget(self, outcome: Outcome[Any]) -> None:
        self.cancel(outcome)

    def check_process(self) -> None:
        pass

    def check_wait(self) -> None:
        pass

    def deliver(self, call: Callable[[], object]) -> None:
        self.delivery.put(call)

    def finish(self) -> None:
        """Return once all calls were made that came before."""
        made = threading.Event()
        self.deliver(made.set)
        assert made.wait(PATIENCE)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.delivery.close()
    owner.delivery.wait(PATIENCE)


def futures(owner: Owner, count: int) -> list[OutcomeFuture[int]]:
    return [OutcomeFuture(Number(number), owner) for number in range(count)]


def succeed(outcome: Outcome[int]) -> None:
    outcome.settle()


def fail(outcome: Outcome[int]) -> None:
    outcome.settle(ValueError("no"))


def cancel(outcome: Outcome[int]) -> None:
    outcome.settle(cancelled=True)


def blocked(count: int, outcome: Outcome[Any]) -> None:
    """Return once so many threads wait for an outcome."""
    wait_until(lambda: len(outcome._locks) >= count)


# Waiting.


def test_all_who_wait_have_the_result_and_who_comes_later(owner: Owner) -> None:
    (future,) = futures(owner, 1)
    with ThreadPoolExecutor(5) as pool:
        results = [pool.submit(future.result, timeout) for timeout in (None, None, PATIENCE)]
        failures = [pool.submit(future.exception, timeout) for timeout in (None, 1e300)]
        blocked(5, future.outcome)
        future.outcome.settle()
        assert [result.result(PATIENCE) for result in results] == [0, 0, 0]
        assert [failure.result(PATIENCE) for failure in failures] == [None, None]
    assert future.result() == future.result(timeout=0) == future.result(timeout=-1) == 0
    assert (future.done(), future.cancelled(), future.running()) == (True, False, False)
    assert "state=finished" in repr(future)


@pytest.mark.parametrize("timeout", [0, -1, 0.05])
def test_time_that_is_over_leaves_nothing_behind(owner: Owner, timeout: float) -> None:
    (future,) = futures(owner, 1)
    for call in (future.result, future.exception):
        start = monotonic()
        with pytest.raises(TimeoutError):
            call(timeout)
        assert timeout <= monotonic() - start < PATIENCE
    assert not future.outcome.wait(timeout)
    assert future.outcome._locks == []
    assert "state=pending" in repr(future)
    future.outcome.settle()
    assert future.result(timeout=0) == 0


class Interruption(BaseException):
    """What a signal's handler raises."""


@contextmanager
def interrupted() -> Iterator[None]:
    """The handler of an alarm raises."""

    def raise_it(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Interruption

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_signal_at_any_moment_of_waiting_leaves_nothing_held(owner: Owner) -> None:
    """Also between two instructions, where a Condition would stay locked."""
    for attempt in range(100):
        (future,) = futures(owner, 1)
        with interrupted(), pytest.raises(Interruption):  # noqa: PT012 it comes in one of them
            signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + attempt % 100))
            while True:
                assert not future.outcome.wait(0.0 if attempt % 2 else 0.01)
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(future.result, PATIENCE)
            called = threading.Event()
            future.add_done_callback(lambda _, called=called: called.set())  # type: ignore[misc]
            future.outcome.settle()
            assert later.result(PATIENCE) == 0
            assert future.result(timeout=0) == 0
            assert called.wait(PATIENCE)


# Callbacks.


@pytest.mark.parametrize(
    "raised", [KeyError("theirs"), SystemExit(3), KeyboardInterrupt()], ids=repr
)
def test_callback_that_raises_or_exits_stops_neither_callbacks_nor_who_waits(
    owner: Owner, caplog: pytest.LogCaptureFixture, raised: BaseException
) -> None:
    def leave(_: object) -> None:
        raise raised

    one, other = futures(owner, 2)
    called: list[int] = []
    for future in (one, other):
        future.add_done_callback(lambda _: called.append(0))
        future.add_done_callback(leave)
        future.add_done_callback(lambda _: called.append(1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait, [one, other], PATIENCE)
        while not other._waiting:
            pass
        one.outcome.settle()
        other.outcome.settle()
        assert waiting.result(PATIENCE).not_done == set()
    assert called == [0, 1, 0, 1]
    assert [(r.name, r.levelno) for r in caplog.records] == [
        ("concurrent.futures", logging.ERROR)
    ] * 2


def test_callback_that_comes_while_it_is_settled_runs_once(owner: Owner) -> None:
    for _ in range(100):
        (future,) = futures(owner, 1)
        begin = threading.Barrier(2)
        called: list[bool] = []

        def settle(
            outcome: Outcome[int] = future.outcome, begin: threading.Barrier = begin
        ) -> None:
            begin.wait()
            outcome.settle()

        thread = threading.Thread(target=settle)
        thread.start()
        begin.wait()
        future.add_done_callback(lambda _, called=called: called.append(True))  # type: ignore[misc]
        thread.join()
        owner.finish()
        assert called == [True]


# concurrent.futures and asyncio.


def names_in(code: CodeType) -> set[str]:
    nested = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*nested)


def test_private_names_that_the_standard_library_uses_of_futures_are_ours() -> None:
    """Those that Python 3.11 to 3.14 use; a later one that uses another has it named here."""
    modules = (vars(futures_base), vars(asyncio.futures), vars(futures_base._AcquireFutures))
    functions = [f for names in modules for f in names.values() if isinstance(f, FunctionType)]
    used = set[str]().union(*(names_in(function.__code__) for function in functions))
    private = {name for name in used & {*dir(Future())} if re.match("_[a-z]", name)}
    assert private == {"_condition", "_state", "_waiters"}
    assert private <= vars(OutcomeFuture).keys()


@pytest.mark.parametrize(
    ("when", "before", "during", "done"),
    [
        (ALL_COMPLETED, [succeed], [fail, cancel], 3),
        (ALL_COMPLETED, [fail, cancel], [succeed], 3),
        (ALL_COMPLETED, [succeed], [succeed], 2),
        (FIRST_COMPLETED, [], [cancel], 1),
        (FIRST_COMPLETED, [succeed], [], 1),
        (FIRST_EXCEPTION, [fail], [], 1),
        (FIRST_EXCEPTION, [succeed], [fail], 2),
        (FIRST_EXCEPTION, [cancel], [succeed], 2),
    ],
)
def test_wait_is_as_with_the_standard_librarys(
    owner: Owner, when: str, before: list[Settle], during: list[Settle], done: int
) -> None:
    given = futures(owner, 3)
    for future, how in zip(given, before, strict=False):
        how(future.outcome)
    # One that is to be over with its time leaves as many undone as there are.
    ends = when == FIRST_COMPLETED or done == 3 or fail in (*before, *during)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait, given, PATIENCE if ends else 0.2, when)
        if during:
            while not all(future.done() or future._waiters for future in given):
                pass
        owner.finish()
        assert not during or not waiting.done()
        for future, how in zip(given[len(before) :], during, strict=False):
            how(future.outcome)
            owner.finish()
        result = waiting.result(PATIENCE)
    assert result.done == set(given[:done])
    assert result.not_done == set(given[done:])


@pytest.mark.parametrize("early", [True, False])
def test_event_loop_awaits_results_failures_and_cancellations(owner: Owner, early: bool) -> None:
    async def gather() -> list[Any]:
        good, bad, gone = futures(owner, 3)
        settles: list[Callable[[], object]] = [
            good.outcome.settle,
            partial(fail, bad.outcome),
            gone.cancel,
        ]
        if early:
            for settle in settles:
                settle()
        wrapped = [asyncio.wrap_future(future) for future in (good, bad, gone)]
        if not early:
            for settle in settles:
                await asyncio.sleep(0)
                settle()
        async with asyncio.timeout(PATIENCE):
            return await asyncio.gather(*wrapped, return_exceptions=True)

    good, bad, gone = asyncio.run(gather())
    assert good == 0
    assert isinstance(bad, ValueError)
    assert isinstance(gone, asyncio.CancelledError)


def test_task_that_is_cancelled_cancels_the_request(owner: Owner) -> None:
    (future,) = futures(owner, 1)

    async def give_up() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.wrap_future(future)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    owner.finish()
    assert future.cancelled()


def new_event_loop(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "uvloop":
        loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
        return loop
    return Own() if kind == "a user's" else asyncio.new_event_loop()


class Own(asyncio.SelectorEventLoop):
    """A user's event loop, which runs code of its own in the thread that wakes it."""

    wakers: ClassVar[list[str]] = []

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self.wakers.append(threading.current_thread().name)
        return super().call_soon_threadsafe(callback, *args, context=context)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("settle", [succeed, fail])
def test_task_goes_on_while_a_callback_does_not_return(
    owner: Owner, kind: str, settle: Settle
) -> None:
    (future,), go = futures(owner, 1), threading.Event()

    async def ask() -> Any:
        owner.deliver(go.wait)
        asyncio.get_running_loop().call_soon(
            threading.Thread(target=settle, args=(future.outcome,)).start
        )
        async with asyncio.timeout(PATIENCE):
            return await future.answer()

    with asyncio.Runner(loop_factory=partial(new_event_loop, kind)) as runner:
        try:
            if settle is fail:
                with pytest.raises(ValueError, match="no"):
                    runner.run(ask())
            else:
                assert runner.run(ask()) == 0
        finally:
            go.set()
        assert runner.run(future_of(owner).answer()) == 7


def future_of(owner: Owner) -> OutcomeFuture[int]:
    """A future that is done before anything asks for it."""
    future = OutcomeFuture(Number(), owner)
    future.outcome.settle()
    return future


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_event_loop_that_was_closed_does_not_hurt_who_settles(owner: Owner, kind: str) -> None:
    (future,) = futures(owner, 1)
    events = new_event_loop(kind)
    answer = future.answer()
    events.call_soon(answer.send, None)
    events.call_soon(events.stop)
    events.run_forever()
    events.close()
    future.outcome.settle()
    answer.close()
    assert future.result(timeout=0) == 0


def test_event_loop_of_a_users_own_is_called_by_the_delivery_thread(owner: Owner) -> None:
    (future,) = futures(owner, 1)
    Own.wakers.clear()

    async def ask() -> int:
        asyncio.get_running_loop().call_soon(future.outcome.settle)
        return await future.answer()

    with asyncio.Runner(loop_factory=partial(new_event_loop, "a user's")) as runner:
        assert runner.run(ask()) == 0
    assert Own.wakers[0] == "mcinfer-delivery"


# Memory.


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("settle", [succeed, fail, cancel])
def test_settled_request_goes_without_a_collector(owner: Owner, settle: Settle) -> None:
    future = OutcomeFuture(Number(), owner)
    future.add_done_callback(lambda _: None)
    gone: list[Callable[[], object]] = [weakref.ref(future), weakref.ref(future.outcome)]
    settle(future.outcome)
    wait([future], PATIENCE)
    owner.finish()
    owner.finish()  # the thread holds a call until it has the next
    outcome = future.outcome
    del future
    assert gone[0]() is None
    del outcome
    assert gone[1]() is None


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("number", [7, -1])
def test_error_that_is_kept_keeps_neither_future_nor_request(owner: Owner, number: int) -> None:
    future = OutcomeFuture(Number(number), owner)
    with pytest.raises(TimeoutError) as late:
        future.result(timeout=0)
    future.outcome.settle(ValueError("no") if number > 0 else None)
    future.prepare()
    errors = [late.value, future.exception()]
    for _ in range(2):
        try:
            future.result()
        except ValueError as exc:
            errors.append(exc.with_traceback(exc.__traceback__ and exc.__traceback__.tb_next))
    gone: list[Callable[[], object]] = [weakref.ref(future), weakref.ref(future.outcome)]
    del future, late
    assert [ref() for ref in gone] == [None, None]
    assert len(errors) == 4
