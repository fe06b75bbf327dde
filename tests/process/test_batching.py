"""Requests that are joined to one run, and which request goes next, with real processes."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from mcinfer import EngineOptions, Master
from mcinfer.config import INLINE
from mcinfer.requests.tensors import Arrays
from mcinfer.statistics import WorkerStatistics
from tests.process.models import (
    FakeModel,
    Inputs,
    SharedMaster,
    act,
    assert_answers,
    fake_master,
    rows,
)
from tests.process.waiting import busy_pid, pids, wait_for_states, wait_until

BUSY = -1.0
"""The first number of the request that keeps a worker busy until it is cancelled."""

BRIEF = 1e-6
"""A `max_delay` with which the next run takes all that wait, and no request waits while a worker is free."""


def acts(bad: str = "fail") -> dict[str, str]:
    return {"-1": "sleep:600", "-2": bad}


@contextmanager
def kept_busy(master: Master) -> Iterator[None]:
    """The only worker is at a run as long as the block lasts; what is asked in it waits."""
    busy = master.submit(act(BUSY))
    busy_pid(master)
    yield
    assert busy.cancel()


@pytest.fixture(scope="module", params=[1, INLINE])
def batching(request: pytest.FixtureRequest, shared_master: SharedMaster) -> Master:
    """One worker, up to 8 rows in a run."""
    when = {"-1": "sleep:600", "-2": "sleep:0.3"}
    options = {"max_batch_size": 8, "max_delay": BRIEF}
    return shared_master(request.param, acts={"when": when}, **options)


def submit_together(master: Master, *requests: Inputs, **options: Any) -> list[Future[Arrays]]:
    """Submit these while the only worker is busy, so that they may go together afterwards."""
    with kept_busy(master):
        return [master.submit(inputs, **options) for inputs in requests]


def assert_all_answered(futures: list[Future[Arrays]], requests: list[Inputs]) -> None:
    for future, inputs in zip(futures, requests, strict=True):
        assert_answers(future.result(timeout=20.0), inputs)


def the_worker(master: Master) -> WorkerStatistics:
    (worker,) = master.statistics().workers
    return worker


# Joining.


def test_requests_that_waited_for_the_worker_go_as_one_run(
    batching: Master, caplog: pytest.LogCaptureFixture
) -> None:
    assert_answers(
        batching.submit(rows(0)).result(20.0), rows(0)
    )  # which says nothing of the others
    assert "not joined" not in caplog.text
    requests = [rows(1, first=10.0 * i) for i in range(8)]
    before, worker = batching.statistics(), the_worker(batching)
    futures = submit_together(batching, *requests)
    assert_all_answered(futures, requests)
    futures.clear()
    assert the_worker(batching).runs == worker.runs + 1
    assert the_worker(batching).completed == worker.completed + 8
    statistics = batching.statistics()
    assert (statistics.succeeded, statistics.cancelled) == (
        before.succeeded + 8,
        before.cancelled + 1,
    )
    assert (statistics.in_flight, statistics.queued_shards) == (0, 0)
    wait_until(lambda: batching.statistics().memory_used_bytes == 0)


def test_requests_whose_run_no_message_could_carry_go_apart(
    fake_model: FakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    names, requests = [f"{number:04000}" for number in range(20)], 20
    model = fake_model(
        inputs=[[name, "float32", ["batch", 1]] for name in names],
        outputs=[["y", "float32", ["batch", 1], {"from": names[0], "scale": 2, "add": 1}]],
    )
    with fake_master(model, 1, max_batch_size=4096, max_delay=BRIEF) as master:
        futures = [
            master.submit(dict.fromkeys(names, np.full((1, 1), value, np.float32)))
            for value in range(requests)
        ]
        for value, future in enumerate(futures):
            assert future.result(20.0)["y"] == 2 * value + 1
        assert the_worker(master).runs == requests
    assert "do not fit one message" in caplog.text


# Those that fail.


def test_run_whose_callers_all_cancelled_is_stopped_and_its_worker_is_kept(
    batching: Master,
) -> None:
    before, runs, cancelled = (
        pids(batching),
        the_worker(batching).runs,
        batching.statistics().cancelled,
    )
    futures = submit_together(batching, rows(1), act(BUSY), rows(2))
    wait_until(lambda: batching.statistics().queued_shards == 0)
    wait_for_states(batching, "busy")
    assert all(future.cancel() for future in futures)
    wait_for_states(batching, "ready")
    assert pids(batching) == before
    assert batching.statistics().cancelled == cancelled + 4
    assert the_worker(batching).runs == runs
    assert_answers(batching.predict(rows(3), timeout=20.0), rows(3))


# Waiting for company.


def test_held_requests_cost_no_time_while_no_worker_is_ready(fake_model: FakeModel) -> None:
    with fake_master(fake_model(when=acts()), 1, max_batch_size=8, max_delay=0.01) as master:
        with kept_busy(master):
            future = master.submit(rows(1))
            before = time.process_time()
            until = time.monotonic() + 0.5
            wait_until(lambda: time.monotonic() > until)
            assert time.process_time() - before < 0.25
        assert_answers(future.result(timeout=20.0), rows(1))


# Priorities.

Name = TypeVar("Name")


def note_ends(order: list[Name], names: Sequence[Name], futures: Sequence[Future[Arrays]]) -> None:
    """Have the futures' names put down in the order in which they are answered."""

    def note(name: Name, _: Future[Arrays]) -> None:
        order.append(name)

    for name, future in zip(names, futures, strict=True):
        future.add_done_callback(partial(note, name))


def test_request_of_a_higher_priority_overtakes_all_that_wait(batching: Master) -> None:
    order: list[str] = []
    with kept_busy(batching):
        names = [*(f"low {i}" for i in range(20)), "high"]
        # Of as many rows as a run may have, so that each is a run.
        futures = [batching.submit(rows(8), priority=int(name == "high")) for name in names]
        note_ends(order, names, futures)
    wait_until(lambda: len(order) == 21)
    assert order == ["high", *names[:20]]


# What else may be said.


def test_workers_are_pinned_to_the_cores_that_were_chosen(fake_model: FakeModel) -> None:
    cores = sorted(os.sched_getaffinity(0))
    chosen = [[cores[-1]], cores]
    options = EngineOptions(cores=chosen)
    with fake_master(fake_model(), 2, options=options) as master:
        assert [os.sched_getaffinity(pid) for pid in pids(master)] == [{*item} for item in chosen]
        assert_answers(master.predict(rows(3)), rows(3))
