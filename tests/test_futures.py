import gc
import math
import threading
import weakref
from concurrent.futures import CancelledError, Future
from time import monotonic

import pytest

from mcinfer.futures import HelpedFuture


def helped_by(help_answer: object) -> HelpedFuture[int]:
    future: HelpedFuture[int] = HelpedFuture()
    future.help = help_answer  # type: ignore[assignment]
    return future


def test_waiting_for_the_result_helps_first_and_as_long_as_there_is_time() -> None:
    seen: list[float] = []
    lates: list[bool] = []

    def help_answer(future: Future[int], deadline: float, late: bool) -> None:
        seen.append(deadline)
        lates.append(late)
        assert isinstance(future, HelpedFuture)
        assert future.answer(7, None, here=False)

    assert helped_by(help_answer).result() == 7
    assert helped_by(help_answer).result(timeout=50) == 7
    assert helped_by(help_answer).exception(timeout=50) is None
    known = helped_by(help_answer)
    known.awaited = True  # by who made it
    assert known.result(timeout=50) == 7
    assert lates == [True, True, True, False]
    assert seen[0] == math.inf
    assert all(45 < deadline - monotonic() <= 50 for deadline in seen[1:])


def test_result_that_is_there_or_is_not_waited_for_needs_no_help() -> None:
    future = helped_by(lambda *_: pytest.fail("it is done"))
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    future.answer(7, None, here=True)
    assert future.result() == future.result(timeout=0) == 7


def test_what_help_takes_is_not_waited_for_once_more() -> None:
    start = monotonic()
    future = helped_by(lambda _, deadline, _late: threading.Event().wait(deadline - monotonic()))
    with pytest.raises(TimeoutError):
        future.result(timeout=0.2)
    assert 0.2 <= monotonic() - start < 0.35


def test_future_with_a_callback_of_users_is_answered_where_it_belongs_alone() -> None:
    called: list[int] = []
    future: HelpedFuture[int] = HelpedFuture()
    future.awaited = True
    future.add_own_callback(lambda _: called.append(1))
    assert not future.bound
    future.add_done_callback(lambda _: called.append(2))
    assert future.bound
    assert not future.answer(7, None, here=False)
    assert not future.done()
    assert called == []
    assert future.answer(7, None, here=True)
    assert called == [1, 2]


def test_callback_that_comes_while_it_is_answered_runs_in_the_thread_that_adds_it() -> None:
    """However the two meet: the callback runs once, and never in the thread that answers."""
    for _ in range(300):
        future: HelpedFuture[int] = HelpedFuture()
        future.awaited = True
        begin = threading.Barrier(2)
        places: list[int] = []
        answered: list[bool] = []

        def answer(future: HelpedFuture[int] = future, answered: list[bool] = answered) -> None:
            begin.wait(5)  # noqa: B023 joined below
            answered.append(future.answer(7, None, here=False))

        thread = threading.Thread(target=answer)
        thread.start()
        begin.wait(5)
        future.add_done_callback(lambda _, places=places: places.append(threading.get_ident()))  # type: ignore[misc]
        thread.join()
        if not answered[0]:
            assert places == []
            future.answer(7, None, here=True)
        assert places == [threading.get_ident()]


def test_future_that_nobody_waits_for_is_answered_where_callbacks_belong() -> None:
    future: HelpedFuture[int] = HelpedFuture()
    assert not future.answer(7, None, here=False)
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    assert future.answer(7, None, here=False)
    assert future.result() == 7


def test_cancelled_future_stays_cancelled() -> None:
    future: HelpedFuture[int] = HelpedFuture()
    future.awaited = True
    assert future.cancel()
    assert future.answer(7, None, here=False)
    with pytest.raises(CancelledError):
        future.result()


def test_error_that_is_raised_does_not_keep_the_future() -> None:
    future: HelpedFuture[int] = HelpedFuture()
    future.answer(None, ValueError("no"), here=True)
    gone = weakref.ref(future)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no") as caught:
            future.result()
        del future
        caught.value.__traceback__ = None
        assert gone() is None
    finally:
        gc.enable()
