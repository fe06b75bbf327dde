"""Requests that are joined to one run, and which request goes next, with real processes."""

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from mcinfer import (
    BuildError,
    ClosedError,
    EngineOptions,
    InvalidInputError,
    Master,
    PredictError,
    PredictTimeoutError,
    RestartPolicy,
    Timeouts,
    WorkerDiedError,
)
from mcinfer.requests.request import Arrays
from mcinfer.scheduler.queue import PATIENCE
from mcinfer.statistics import WorkerStatistics
from tests.process.models import AFFINE, FakeModel, Inputs, OnnxModel, act, assert_answers, rows
from tests.process.waiting import busy_pid, pids, wait_for_states, wait_until

BUSY = -1.0
"""The first number of the request that keeps a worker busy until it is cancelled."""

BAD = -2.0
"""That of the request that a test is about."""

GENEROUS = RestartPolicy(budget=1000, backoff=0.0)


def acts(bad: str = "fail") -> dict[str, str]:
    return {"-1": "sleep:600", "-2": bad}


@contextmanager
def kept_busy(master: Master) -> Iterator[None]:
    """The only worker is at a run as long as the block lasts; what is asked in it waits."""
    busy = master.submit(act(BUSY))
    busy_pid(master)
    yield
    assert busy.cancel()


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


def test_requests_that_waited_for_the_worker_go_as_one_run(fake_model: FakeModel) -> None:
    requests = [rows(1, first=10.0 * i) for i in range(8)]
    with Master(
        fake_model(when=acts()), 1, engine="fake", verify="never", max_batch_size=8
    ) as master:
        assert_all_answered(submit_together(master, *requests), requests)
        assert (the_worker(master).runs, the_worker(master).completed) == (1, 8)
        statistics = master.statistics()
        assert (statistics.accepted, statistics.succeeded, statistics.cancelled) == (9, 8, 1)
        assert (statistics.in_flight, statistics.queued_shards) == (0, 0)


def test_requests_of_several_rows_go_as_few_runs_as_fit(fake_model: FakeModel) -> None:
    requests = [rows(count, first=100.0 * i) for i, count in enumerate([3, 4, 2, 8, 1, 5, 9])]
    with Master(
        fake_model(when=acts()), 1, engine="fake", verify="never", max_batch_size=8
    ) as master:
        assert_all_answered(submit_together(master, *requests), requests)
        # 3 + 4, then 2 + 1 + 5, and each alone: as many as a run has, and more.
        assert (the_worker(master).runs, the_worker(master).completed) == (4, 7)


def test_requests_are_not_joined_unless_that_is_asked_for(fake_model: FakeModel) -> None:
    requests = [rows(1, first=10.0 * i) for i in range(4)]
    with Master(fake_model(when=acts()), 1, engine="fake", verify="never") as master:
        assert_all_answered(submit_together(master, *requests), requests)
        assert (the_worker(master).runs, the_worker(master).completed) == (4, 4)


def test_requests_of_other_sizes_are_joined_with_their_like(fake_model: FakeModel) -> None:
    model = fake_model(
        inputs=(["x", "float32", ["batch", "seq"]],),
        outputs=(["y", "float32", ["batch", "seq"], {"from": "x", "scale": 2, "add": 1}],),
        when=acts(),
    )
    requests = [{"x": np.full((1 + i % 2, 4 + i % 3), float(i), np.float32)} for i in range(12)]
    with Master(model, 1, engine="fake", verify="never", max_batch_size=64) as master:
        assert_all_answered(submit_together(master, *requests), requests)
        assert (the_worker(master).runs, the_worker(master).completed) == (3, 12)


def test_requests_with_another_value_in_common_are_not_mixed(fake_model: FakeModel) -> None:
    model = fake_model(
        inputs=(["x", "float32", ["batch", 4]], ["t", "float32", [2]]),
        outputs=(["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}],),
        when=acts(),
    )
    common = [np.array([0, i % 2], np.float32) for i in range(8)]
    with Master(model, 1, engine="fake", verify="never", max_batch_size=64) as master:
        busy = master.submit({**act(BUSY), "t": common[0]})
        busy_pid(master)
        futures = [master.submit({**rows(1, first=i), "t": t}) for i, t in enumerate(common)]
        busy.cancel()
        assert_all_answered(futures, [rows(1, first=i) for i in range(8)])
        assert the_worker(master).runs == 2


def test_batch_that_is_not_the_first_axis_is_joined(fake_model: FakeModel) -> None:
    model = fake_model(
        inputs=(["x", "float32", [3, "batch"]],),
        outputs=(["y", "float32", [3, "batch"], {"from": "x", "scale": 2, "add": 1}],),
        run="sleep:0.2",
    )
    requests = [
        {"x": np.arange(3.0 * n, dtype=np.float32).reshape(3, n) + 50 * n} for n in (1, 2, 1, 3)
    ]
    with Master(
        model, 1, engine="fake", verify="never", max_batch_size=64, max_delay=5.0
    ) as master:
        futures = [master.submit(inputs) for inputs in requests]
        futures.append(master.submit({"x": np.zeros((3, 60), np.float32)}))  # now there are enough
        assert_all_answered(futures[:4], requests)
        assert the_worker(master).runs < 5


def test_predict_as_one_piece_is_joined_as_well(fake_model: FakeModel) -> None:
    requests = [rows(1, first=10.0 * i) for i in range(4)]
    with (
        Master(
            fake_model(when=acts()), 1, engine="fake", verify="never", max_batch_size=8
        ) as master,
        ThreadPoolExecutor(4) as pool,
    ):
        with kept_busy(master):
            futures = [pool.submit(master.predict, inputs, shards=1) for inputs in requests]
            wait_until(lambda: master.statistics().queued_shards == 4)
        assert_all_answered(futures, requests)
        assert (the_worker(master).runs, the_worker(master).completed) == (1, 4)


def test_answers_of_a_joined_run_leave_no_memory_behind(fake_model: FakeModel) -> None:
    requests = [rows(2, first=10.0 * i) for i in range(4)]
    with Master(
        fake_model(when=acts()), 1, engine="fake", verify="never", max_batch_size=8
    ) as master:
        futures = submit_together(master, *requests)
        assert_all_answered(futures, requests)
        futures.clear()
        wait_until(lambda: master.statistics().memory_used_bytes == 0)


def test_onnx_model_answers_mixed_rows_of_many_threads_right(onnx_model: OnnxModel) -> None:
    threads, each = 8, 25
    together = threading.Barrier(threads)

    with Master(onnx_model(AFFINE), 2, max_batch_size=16, max_delay=0.05, verify="never") as master:

        def ask(thread: int) -> None:
            chance = random.Random(thread)  # noqa: S311 no secret
            requests = [
                rows(chance.randint(1, 5), first=1e4 * thread + 100.0 * i) for i in range(each)
            ]
            together.wait()
            assert_all_answered([master.submit(inputs) for inputs in requests], requests)

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(ask, thread) for thread in range(threads)]:
                done.result(timeout=30.0)
        statistics = master.statistics()
        assert statistics.accepted == statistics.succeeded == threads * each
        workers = statistics.workers
        assert sum(worker.completed for worker in workers) == threads * each
        assert sum(worker.runs for worker in workers) < threads * each
        assert sum(worker.failed for worker in workers) == 0


# Those that fail.


@pytest.mark.parametrize(
    ("fault", "error"), [("fail", PredictError), ("invalid", InvalidInputError)]
)
def test_bad_request_fails_alone_and_its_neighbours_are_answered(
    fake_model: FakeModel, fault: str, error: type[Exception]
) -> None:
    requests = [act(BAD) if i == 3 else rows(1, first=10.0 * i) for i in range(8)]
    with Master(
        fake_model(when=acts(fault)), 1, engine="fake", verify="never", max_batch_size=8
    ) as master:
        before = pids(master)
        futures = submit_together(master, *requests)
        bad = futures.pop(3)
        with pytest.raises(error, match="told"):
            bad.result(timeout=20.0)
        assert_all_answered(futures, requests[:3] + requests[4:])
        assert pids(master) == before
        # Together they failed, then each went by itself.
        worker = the_worker(master)
        assert (worker.runs, worker.completed, worker.failed) == (7, 7, 9)
        assert (master.statistics().succeeded, master.statistics().failed) == (7, 1)


def test_request_that_kills_its_worker_takes_no_neighbour_with_it(fake_model: FakeModel) -> None:
    requests = [act(BAD) if i == 1 else rows(1, first=10.0 * i) for i in range(4)]
    model = fake_model(when=acts("kill"))
    with Master(
        model, 1, engine="fake", verify="never", max_batch_size=8, restart=GENEROUS
    ) as master:
        futures = submit_together(master, *requests)
        bad = futures.pop(1)
        with pytest.raises(WorkerDiedError, match="2 workers died on it"):
            bad.result(timeout=20.0)
        assert_all_answered(futures, [requests[0], *requests[2:]])
        assert the_worker(master).restarts == 3


def test_neighbours_of_a_killer_are_answered_where_workers_are_many(fake_model: FakeModel) -> None:
    model = fake_model(when=acts("segfault"))
    requests = [act(BAD) if i % 10 == 5 else rows(1, first=10.0 * i) for i in range(30)]
    with Master(
        model, 3, engine="fake", verify="never", max_batch_size=8, max_delay=0.05, restart=GENEROUS
    ) as master:
        futures = [master.submit(inputs) for inputs in requests]
        for i, (future, inputs) in enumerate(zip(futures, requests, strict=True)):
            if i % 10 == 5:
                with pytest.raises(WorkerDiedError):
                    future.result(timeout=30.0)
            else:
                assert_answers(future.result(timeout=30.0), inputs)
        assert (master.statistics().succeeded, master.statistics().failed) == (27, 3)


def test_neighbours_of_a_request_cancelled_in_their_run_are_answered(
    fake_model: FakeModel,
) -> None:
    requests = [act(BAD), rows(1), rows(2)]
    model = fake_model(when=acts("sleep:2"))
    with Master(model, 1, engine="fake", verify="never", max_batch_size=8) as master:
        futures = submit_together(master, *requests)
        wait_until(lambda: master.statistics().queued_shards == 0)
        assert futures[1].cancel()
        with pytest.raises(CancelledError):
            futures[1].result(timeout=0.0)
        assert_answers(futures[0].result(timeout=20.0), requests[0])
        assert_answers(futures[2].result(timeout=20.0), requests[2])
        assert (the_worker(master).runs, the_worker(master).restarts) == (1, 0)


def test_run_that_nobody_wants_any_more_is_stopped_and_its_worker_lives_on(
    fake_model: FakeModel,
) -> None:
    model = fake_model(when=acts("sleep:600"))
    with Master(model, 1, engine="fake", verify="never", max_batch_size=8) as master:
        before = pids(master)
        futures = submit_together(master, rows(1), act(BAD), rows(2))
        wait_until(lambda: master.statistics().queued_shards == 0)
        wait_for_states(master, "busy")
        assert all(future.cancel() for future in futures)
        wait_for_states(master, "ready")
        assert pids(master) == before
        assert (master.statistics().cancelled, the_worker(master).runs) == (4, 0)
        assert_answers(master.predict(rows(3), timeout=10.0), rows(3))


@pytest.mark.parametrize("fault", ["sleep:600", "hang:600"], ids=["can stop", "hears nothing"])
def test_request_without_an_end_runs_out_of_time_alone(fake_model: FakeModel, fault: str) -> None:
    timeouts = Timeouts(cancel_grace=0.2)
    model = fake_model(when=acts(fault))
    with Master(
        model,
        1,
        engine="fake",
        verify="never",
        max_batch_size=8,
        timeouts=timeouts,
        restart=GENEROUS,
    ) as master:
        with kept_busy(master):
            before = master.submit(rows(1))
            bad = master.submit(act(BAD), timeout=2.0)
            after = master.submit(rows(2))
        wait_until(lambda: master.statistics().queued_shards == 0)
        with pytest.raises(PredictTimeoutError, match="ran on worker 0"):
            bad.result(timeout=20.0)
        assert_answers(before.result(timeout=20.0), rows(1))
        assert_answers(after.result(timeout=20.0), rows(2))
        assert the_worker(master).restarts == fault.startswith("hang")


def test_pool_that_closes_in_a_joined_run_tells_all(fake_model: FakeModel) -> None:
    model = fake_model(when=acts("sleep:600"))
    with Master(model, 1, engine="fake", verify="never", max_batch_size=8) as master:
        futures = submit_together(master, rows(1), act(BAD), rows(2))
        wait_until(lambda: master.statistics().queued_shards == 0)
    for future in futures:
        with pytest.raises(ClosedError):
            future.result(timeout=0.0)


def test_every_request_of_a_mixed_crowd_comes_to_its_own_end(fake_model: FakeModel) -> None:
    threads, each = 6, 40

    with Master(
        fake_model(when=acts(), run="sleep:0.001"),
        2,
        engine="fake",
        verify="never",
        max_batch_size=16,
    ) as master:

        def ask(thread: int) -> tuple[int, int]:
            """How many failed, and were cancelled."""
            chance = random.Random(thread)  # noqa: S311 no secret
            bad: list[Future[Arrays]] = []
            good: list[tuple[Future[Arrays], Inputs]] = []
            cancelled = 0
            for i in range(each):
                kind = chance.random()
                if kind < 0.1:
                    bad.append(master.submit(act(BAD, chance.randint(1, 3))))
                    continue
                inputs = rows(chance.randint(1, 9), first=1e4 * thread + 100.0 * i)
                future = master.submit(inputs, priority=chance.randint(-1, 1))
                if kind < 0.2 and future.cancel():
                    cancelled += 1
                else:
                    good.append((future, inputs))
            for future, inputs in good:
                assert_answers(future.result(timeout=30.0), inputs)
            for future in bad:
                with pytest.raises(PredictError):
                    future.result(timeout=30.0)
            return len(bad), cancelled

        with ThreadPoolExecutor(threads) as pool:
            ends = [*pool.map(ask, range(threads))]
        statistics = master.statistics()
        failed, cancelled = (sum(counts) for counts in zip(*ends, strict=True))
        assert statistics.failed == failed
        assert statistics.succeeded + statistics.cancelled == threads * each - failed
        # One that is cancelled as its answer comes is counted as answered.
        assert statistics.cancelled <= cancelled
        assert statistics.in_flight == 0
        assert all(worker.restarts == 0 for worker in statistics.workers)


# Waiting for company.


def test_lone_request_waits_for_others_as_long_as_was_said_and_no_longer(
    fake_model: FakeModel,
) -> None:
    with Master(
        fake_model(), 1, engine="fake", verify="never", max_batch_size=8, max_delay=0.3
    ) as master:
        start = time.monotonic()
        future = master.submit(rows(1))
        assert_answers(future.result(timeout=10.0), rows(1))
        assert time.monotonic() - start >= 0.3


def test_requests_that_fill_a_run_wait_for_nobody(fake_model: FakeModel) -> None:
    with Master(
        fake_model(), 1, engine="fake", verify="never", max_batch_size=4, max_delay=600.0
    ) as master:
        requests = [rows(1), rows(2), rows(1)]
        assert_all_answered([master.submit(inputs) for inputs in requests], requests)
        assert (the_worker(master).runs, the_worker(master).completed) == (1, 3)


def test_request_in_haste_is_answered_before_its_deadline(fake_model: FakeModel) -> None:
    with Master(
        fake_model(), 1, engine="fake", verify="never", max_batch_size=8, max_delay=600.0
    ) as master:
        assert_answers(master.submit(rows(1), timeout=2.0).result(timeout=20.0), rows(1))
        assert_answers(master.predict(rows(2), timeout=2.0, shards=1), rows(2))


def test_request_that_cannot_be_joined_does_not_wait_behind_those_that_do(
    fake_model: FakeModel,
) -> None:
    with Master(
        fake_model(), 1, engine="fake", verify="never", max_batch_size=4, max_delay=600.0
    ) as master:
        held = master.submit(rows(1))
        assert_answers(master.predict(rows(2), timeout=10.0), rows(2))
        assert_answers(master.submit(rows(4)).result(timeout=10.0), rows(4))
        assert not held.done()
        assert master.submit(rows(3)).result(timeout=10.0)
        assert_answers(held.result(timeout=10.0), rows(1))


def test_request_is_sent_when_due_though_an_answer_came_meanwhile(
    fake_model: FakeModel,
) -> None:
    """What is held is due at a time that the answer, which makes its worker ready, does not bring forward."""
    model = fake_model(when={"-2": "sleep:0.3"})
    with (
        Master(model, 1, engine="fake", verify="never", max_batch_size=8, max_delay=1.0) as master,
        ThreadPoolExecutor(1) as pool,
    ):
        driving = pool.submit(master.predict, act(BAD))
        busy_pid(master)
        held = master.submit(rows(1))
        assert_answers(driving.result(timeout=10.0), act(BAD))
        assert_answers(held.result(timeout=10.0), rows(1))


def test_held_requests_cost_no_time_while_no_worker_is_ready(fake_model: FakeModel) -> None:
    with Master(
        fake_model(when=acts()), 1, engine="fake", verify="never", max_batch_size=8, max_delay=0.01
    ) as master:
        with kept_busy(master):
            future = master.submit(rows(1))
            before = time.process_time()
            until = time.monotonic() + 0.5
            wait_until(lambda: time.monotonic() > until)
            assert time.process_time() - before < 0.25
        assert_answers(future.result(timeout=10.0), rows(1))


# Priorities.

Name = TypeVar("Name")


def note_ends(order: list[Name], names: Sequence[Name], futures: Sequence[Future[Arrays]]) -> None:
    """Have the futures' names put down in the order in which they are answered."""

    def note(name: Name, _: Future[Arrays]) -> None:
        order.append(name)

    for name, future in zip(names, futures, strict=True):
        future.add_done_callback(partial(note, name))


def test_request_of_a_higher_priority_overtakes_all_that_wait(fake_model: FakeModel) -> None:
    order: list[str] = []
    with Master(fake_model(when=acts()), 1, engine="fake", verify="never") as master:
        with kept_busy(master):
            names = [*(f"low {i}" for i in range(20)), "high"]
            futures = [master.submit(rows(1), priority=int(name == "high")) for name in names]
            note_ends(order, names, futures)
        wait_until(lambda: len(order) == 21)
    assert order == ["high", *names[:20]]


def test_request_of_a_low_priority_is_served_in_its_turn(fake_model: FakeModel) -> None:
    order: list[int] = []
    with Master(fake_model(when=acts()), 1, engine="fake", verify="never") as master:
        with kept_busy(master):
            priorities = [-1, *[5] * 20]
            futures = [master.submit(rows(1), priority=priority) for priority in priorities]
            note_ends(order, priorities, futures)
        wait_until(lambda: len(order) == 21)
    assert order.index(-1) == PATIENCE


@pytest.mark.parametrize("most", [1, 4])
def test_request_of_a_low_priority_is_served_under_an_endless_flood(
    fake_model: FakeModel, most: int
) -> None:
    served, over = threading.Event(), threading.Semaphore(0)

    def again(_: "Future[Arrays]") -> None:
        if served.is_set():
            over.release()
        else:
            master.submit(rows(1), priority=9).add_done_callback(again)

    with Master(
        fake_model(when=acts()), 1, engine="fake", verify="never", max_batch_size=most
    ) as master:
        try:
            for _ in range(20):
                master.submit(rows(1), priority=9).add_done_callback(again)
            low = master.submit({"x": rows(1)["x"]}, priority=-9)
            assert_answers(low.result(timeout=10.0), rows(1))
        finally:
            served.set()
        for _ in range(20):
            assert over.acquire(timeout=10.0)


def test_priority_is_for_predict_and_its_async_twin_too(fake_model: FakeModel) -> None:
    order: list[str] = []

    def ask(name: str, priority: int) -> None:
        assert_answers(master.predict(rows(1), priority=priority), rows(1))
        order.append(name)

    with (
        Master(
            fake_model(when={"-1": "sleep:600", "-2": "sleep:0.3"}),
            1,
            engine="fake",
            verify="never",
        ) as master,
        ThreadPoolExecutor(2) as pool,
    ):
        with kept_busy(master):
            low = pool.submit(ask, "low", 0)
            wait_until(lambda: master.statistics().queued_shards == 1)
            between = master.submit(act(BAD), priority=1)
            high = pool.submit(ask, "high", 2)
            wait_until(lambda: master.statistics().queued_shards == 3)
        for future in (low, high, between):
            future.result(timeout=10.0)
        assert order == ["high", "low"]
        answer = asyncio.run(master.predict_async(rows(4), priority=3, shards=1))
        assert_answers(answer, rows(4))


@pytest.mark.parametrize("priority", [1.0, "1", True, None])
def test_priority_that_is_no_number_is_refused(fake_model: FakeModel, priority: Any) -> None:
    with Master(fake_model(), 1, engine="fake", verify="never") as master:
        for ask in (master.predict, master.submit):
            with pytest.raises(InvalidInputError, match=r"^priority: got"):
                ask(rows(1), priority=priority)
        assert master.statistics().accepted == 0
        assert master.statistics().memory_used_bytes == 0


# What else may be said.


def test_predict_is_cut_in_as_many_pieces_as_is_said(fake_model: FakeModel) -> None:
    with Master(fake_model(), 2, engine="fake", verify="never") as master:
        for shards, pieces in ((1, 1), (2, 2), (5, 5), (100, 6), (None, 2)):
            before = sum(worker.completed for worker in master.statistics().workers)
            assert_answers(master.predict(rows(6), shards=shards), rows(6))
            after = sum(worker.completed for worker in master.statistics().workers)
            assert after - before == pieces


@pytest.mark.parametrize("shards", [0, -1, 1.5, "1", True])
def test_number_of_pieces_that_makes_no_sense_is_refused(
    fake_model: FakeModel, shards: Any
) -> None:
    with Master(fake_model(), 1, engine="fake", verify="never") as master:
        with pytest.raises(InvalidInputError, match=r"^shards: got"):
            master.predict(rows(1), shards=shards)
        assert master.statistics().accepted == 0


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_batch_size_that_makes_no_sense_is_refused(fake_model: FakeModel, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^max_batch_size: got"):
        Master(fake_model(), 1, engine="fake", verify="never", max_batch_size=value)


@pytest.mark.parametrize("value", [-0.1, float("nan"), "1", True, None])
def test_delay_that_is_no_time_is_refused(fake_model: FakeModel, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^max_delay: got"):
        Master(fake_model(), 1, engine="fake", verify="never", max_delay=value)


def test_workers_are_pinned_to_the_cores_that_were_chosen(fake_model: FakeModel) -> None:
    cores = sorted(os.sched_getaffinity(0))
    chosen = [[cores[-1]], cores, [cores[0]]]
    options = EngineOptions(cores=chosen)
    with Master(fake_model(), 3, engine="fake", verify="never", options=options) as master:
        assert [os.sched_getaffinity(pid) for pid in pids(master)] == [{*item} for item in chosen]
        assert_answers(master.predict(rows(3)), rows(3))


def test_cores_that_cannot_be_had_fail_the_start_and_are_named(fake_model: FakeModel) -> None:
    options = EngineOptions(cores=[[100_000]])
    with pytest.raises(BuildError, match=r"worker 0: cores: got \[100000\], expected some of"):
        Master(fake_model(), 1, engine="fake", verify="never", options=options).start()


@pytest.mark.parametrize("threads", [1, 2])
def test_real_engine_takes_threads_for_operators_side_by_side(
    onnx_model: OnnxModel, threads: int
) -> None:
    options = EngineOptions(threads=1, inter_op_threads=threads)
    with Master(onnx_model(AFFINE), 1, options=options, max_batch_size=4) as master:
        requests = [rows(1, first=float(i)) for i in range(10)]
        assert_all_answered([master.submit(inputs) for inputs in requests], requests)
