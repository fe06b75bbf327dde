"""Tests of mcinfer/answers.py: who answers what, and what trace hooks are told."""

import logging
import threading
from concurrent.futures import CancelledError
from contextvars import ContextVar, copy_context
from typing import Any

import numpy as np
import pytest

from mcinfer.answers import Answers
from mcinfer.errors import ClosedError, McinferError, PredictError
from mcinfer.shm.arena import Arena
from mcinfer.specs import ModelSpec, TensorSpec
from mcinfer.staging import Job, Stager
from mcinfer.tracing import RequestTrace

CALLER: ContextVar[str] = ContextVar("CALLER", default="nobody")
MODEL = ModelSpec(
    inputs=(TensorSpec(name="x", dtype=np.dtype("float32"), shape=("batch", 2)),),
    outputs=(TensorSpec(name="y", dtype=np.dtype("float32"), shape=("batch", 2)),),
)


@pytest.fixture(name="stager")
def _stager() -> Any:
    arena = Arena(1 << 20, wake=lambda: None, dropped=lambda _: None)
    yield Stager(MODEL, arena, 1, ())
    arena.close()


def staged(stager: Stager, number: int, *, watched: bool = False) -> Job:
    """A job as `Master` makes it, whose shard was answered, and whose outputs are all 1."""
    job = stager.stage({"x": np.ones((1, 2), np.float32)}, 1, None, 0.0, joinable=False)
    job.number = number
    job.future.awaited = True
    if watched:
        job.future.add_done_callback(lambda _: None)
    job.context = copy_context()
    job.take(0, (), lambda _: pytest.fail("no block is the worker's"), 0)
    return job


def traced(number: int, error: McinferError | None = None) -> RequestTrace:
    return RequestTrace(
        request=number,
        outcome="succeeded" if error is None else "failed",
        error=error,
        rows=1,
        called=1.0,
        queued=2.0,
        settled=3.0,
        joined=3.0,
        shards=(),
    )


class Book:
    """Answers, and what they told of."""

    def __init__(self) -> None:
        self.woken = 0
        self.answered = 0
        self.traces: list[tuple[RequestTrace, str]] = []
        self.answers = Answers(wake=self.wake, answered=self.answer, trace=self.trace)

    def wake(self) -> None:
        self.woken += 1

    def answer(self) -> None:
        self.answered += 1

    def trace(self, trace: RequestTrace) -> None:
        self.traces.append((trace, CALLER.get()))


def test_futures_with_callbacks_are_answered_in_their_turn_and_others_at_once(
    stager: Stager,
) -> None:
    book = Book()
    plain, watched = staged(stager, 0), staged(stager, 1, watched=True)
    book.answers.add(watched, None)
    book.answers.add(plain, None)
    book.answers.give()
    assert plain.future.done()
    assert not watched.future.done()
    assert (book.woken, book.answered) == (1, 1)
    book.answers.give_public()
    assert [*watched.future.result()] == ["y"]
    assert book.answered == 2


def test_hook_is_told_once_after_the_answer_in_the_context_of_the_call(stager: Stager) -> None:
    seen = []

    def hook(trace: RequestTrace) -> None:
        seen.append((trace, CALLER.get(), job.future.done()))

    answers = Answers(wake=lambda: None, answered=lambda: None, trace=hook)
    CALLER.set("me")
    job = staged(stager, 5)
    CALLER.set("another")
    answers.add(job, None, traced(5))
    answers.give()
    answers.give_public()
    [(trace, caller, done)] = seen
    assert (caller, done) == ("me", True)
    assert (trace.request, trace.outcome, trace.settled) == (5, "succeeded", 3.0)
    assert trace.joined > 3.0


def test_hook_is_told_of_failures(stager: Stager) -> None:
    book = Book()
    error = ClosedError("closed")
    job = staged(stager, 0)
    book.answers.add(job, error, traced(0, error))
    book.answers.give()
    assert job.future.exception() is error
    [(trace, _)] = book.traces
    assert (trace.outcome, trace.error) == ("failed", error)


def test_hook_is_told_of_what_was_cancelled(stager: Stager) -> None:
    book = Book()
    job = staged(stager, 0)
    assert job.future.cancel()
    book.answers.add(job, ClosedError("cancelled"), traced(0, ClosedError("cancelled")))
    book.answers.give()
    book.answers.give_public()
    with pytest.raises(CancelledError):
        job.future.result()
    assert len(book.traces) == 1


@pytest.mark.parametrize("raised", [PredictError("shards do not join"), MemoryError("none left")])
def test_answer_that_cannot_be_joined_is_a_failure_in_its_trace(
    stager: Stager, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    def result(_: Job) -> None:
        raise raised

    book = Book()
    job = staged(stager, 0)
    monkeypatch.setattr(Job, "result", result)
    book.answers.add(job, None, traced(0))
    book.answers.give()
    assert job.future.exception() is raised
    [(trace, _)] = book.traces
    assert trace.outcome == "failed"
    assert isinstance(trace.error, PredictError)
    assert str(raised) in str(trace.error)


def test_hook_that_raises_is_logged_and_others_are_answered(
    stager: Stager, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(_: RequestTrace) -> None:
        raise KeyError("of the user's")

    answers = Answers(wake=lambda: None, answered=lambda: None, trace=hook)
    jobs = [staged(stager, number) for number in range(2)]
    for job in jobs:
        answers.add(job, None, traced(job.number))
    with caplog.at_level(logging.ERROR, "mcinfer.master"):
        answers.give()
    assert all(job.future.result() for job in jobs)
    assert [record.getMessage() for record in caplog.records] == ["the trace hook failed"] * 2


def test_callback_that_wants_to_end_the_thread_does_not(
    stager: Stager, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(_: object) -> None:
        raise SystemExit

    book = Book()
    jobs = [staged(stager, number) for number in range(2)]
    jobs[0].future.add_done_callback(leave)
    for job in jobs:
        book.answers.add(job, None, traced(job.number))
    book.answers.give()
    book.answers.give_public()
    assert jobs[1].future.result()
    assert len(book.traces) == 2
    assert "wants to end this thread" in caplog.text


def test_nothing_is_told_of_what_is_not_traced(stager: Stager) -> None:
    book = Book()
    book.answers.add(staged(stager, 0), None)
    book.answers.give()
    assert (book.answered, book.traces) == (1, [])


def test_after_the_end_any_thread_answers_users(stager: Stager) -> None:
    book = Book()
    before, after = (staged(stager, number, watched=True) for number in range(2))
    book.answers.add(before, None)
    book.answers.give()
    book.answers.end()
    assert before.future.done()
    book.answers.add(after, None)
    thread = threading.Thread(target=book.answers.give)
    thread.start()
    thread.join()
    assert after.future.done()


def test_last_resort_fails_all_that_is_not_answered(stager: Stager) -> None:
    book = Book()
    failure = ClosedError("the master failed")
    jobs = [staged(stager, number, watched=True) for number in range(4)]
    for job in jobs[:3]:
        book.answers.add(job, None)
    book.answers.give()  # three wait for the users' thread
    book.answers.give_public()
    book.answers.add(jobs[3], None)
    more = staged(stager, 5)
    book.answers.fail_all([jobs[0], more], failure)
    assert jobs[0].future.exception() is None
    assert jobs[3].future.exception() is failure
    assert more.future.exception() is failure
