"""Workers that die, hang or stop: what becomes of their requests, of the others', and of the pool."""

import math
import os
import random
import signal
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from mcinfer import RestartPolicy, Timeouts, WorkerDiedError
from mcinfer.requests.request import Arrays
from tests.process.models import FakeModel, act, assert_answers, fake_master, rows
from tests.process.waiting import all_gone, busy_pid, pids, wait_for_states, wait_until

SLOW = -1.0
"""What the first number of a request is for the act that a test is about."""

GENEROUS = RestartPolicy(budget=1000, backoff=0.0)
NO_BUDGET = RestartPolicy(budget=0, backoff_limit=3600.0)


def test_worker_killed_in_its_part_of_a_batch_costs_no_row(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    model = fake_model(when={"-8": f"once:{tmp_path / 'long'}:hang:60"})
    inputs = rows(6, first=-8.0)
    with fake_master(model, 3) as master:
        answer: Future[Arrays] = Future()
        asking = threading.Thread(target=lambda: answer.set_result(master.predict(inputs)))
        asking.start()
        wait_until((tmp_path / "long").exists)
        wait_for_states(master, "busy", "ready", "ready")
        os.kill(busy_pid(master), signal.SIGKILL)
        assert_answers(answer.result(timeout=20.0), inputs)
        asking.join()


def test_request_that_kills_two_workers_is_given_up_and_named(fake_model: FakeModel) -> None:
    with fake_master(fake_model(when={"-1": "segfault"}), 2) as master:
        first, second = pids(master)
        with pytest.raises(WorkerDiedError) as caught:
            master.submit(act(SLOW)).result(timeout=20.0)
        text = str(caught.value)
        assert f"worker 0 (cpu:0, pid {first}) killed by SIGSEGV" in text
        assert f"worker 1 (cpu:1, pid {second}) killed by SIGSEGV" in text
        # The pool serves on, at first with nobody, then with those that were started again.
        assert_answers(master.predict(rows(4)), rows(4))
        wait_for_states(master, "ready", "ready")
        assert_answers(master.predict(rows(4)), rows(4))


def test_future_that_is_cancelled_stops_its_run_and_keeps_its_worker(fake_model: FakeModel) -> None:
    with fake_master(fake_model(when={"-1": "sleep:60"}), 1) as master:
        before = pids(master)
        running, queued = master.submit(act(SLOW)), master.submit(act(SLOW))
        wait_for_states(master, "busy")
        assert running.cancel()
        assert queued.cancel()
        assert_answers(master.predict(rows(2)), rows(2))
        assert pids(master) == before
        statistics = master.statistics()
        assert (statistics.cancelled, statistics.succeeded, statistics.failed) == (2, 1, 0)


def test_run_that_is_cancelled_and_hangs_does_not_keep_its_worker_past_its_deadline(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    hangs = tmp_path / "hangs"
    model = fake_model(when={"-1": f"once:{hangs}:hang:60"})
    with fake_master(model, 1, timeouts=Timeouts(cancel_grace=0.2)) as master:
        future = master.submit(act(SLOW), timeout=3.0)
        wait_until(hangs.exists)
        hung = busy_pid(master)
        assert future.cancel()
        assert_answers(master.predict(rows(1), timeout=20.0), rows(1))
        assert all_gone([hung])


def test_killed_workers_cost_no_request_and_no_row(fake_model: FakeModel) -> None:
    # A request that two kills hit is given up by design, so a kill waits until the one
    # that the last kill hit, which goes first, must have been answered.
    between = 12
    with fake_master(fake_model(run="sleep:0.01"), 3, restart=GENEROUS) as master:
        chance = random.Random(7)  # noqa: S311 no secret
        over = threading.Event()
        kills = 0

        def kill() -> None:
            nonlocal kills
            answered = 0
            while not over.wait(0.1):
                now = master.statistics().succeeded
                if now < answered + between:
                    continue
                alive = pids(master)
                if alive:
                    os.kill(chance.choice(alive), signal.SIGKILL)
                    kills += 1
                    answered = master.statistics().succeeded

        killer = threading.Thread(target=kill)
        killer.start()
        inputs = [rows(chance.randint(1, 9), first=100.0 * i) for i in range(200)]
        try:
            for start in range(0, 200, 20):
                futures = [master.submit(item) for item in inputs[start : start + 20]]
                for item, future in zip(inputs[start : start + 20], futures, strict=True):
                    assert_answers(future.result(timeout=20.0), item)
        finally:
            over.set()
            killer.join()
        assert kills >= 2
        statistics = master.statistics()
        assert (statistics.accepted, statistics.succeeded) == (200, 200)


def test_requests_fail_at_once_while_no_worker_serves(fake_model: FakeModel) -> None:
    model = fake_model(when={"-1": "segfault"})
    with fake_master(model, 2, restart=NO_BUDGET) as master:
        queued = [master.submit(act(SLOW)) for _ in range(4)]
        for future in queued:
            with pytest.raises(WorkerDiedError, match="SIGSEGV"):
                future.result(timeout=20.0)
        wait_for_states(master, "gone", "gone")
        with pytest.raises(
            WorkerDiedError,
            match=r"no worker serves.* next start is in 3\d{3}\.\d s: worker 0.*worker 1",
        ):
            master.predict(rows(1), timeout=math.inf)
        statistics = master.statistics()
        assert [worker.pid for worker in statistics.workers] == [None, None]
        assert (statistics.in_flight, statistics.queued_shards) == (0, 0)


def test_pool_serves_with_those_that_are_left(fake_model: FakeModel) -> None:
    with fake_master(fake_model(), 2, restart=NO_BUDGET) as master:
        os.kill(pids(master)[0], signal.SIGKILL)
        wait_for_states(master, "gone", "ready")
        assert_answers(master.predict(rows(7)), rows(7))
        assert [worker.completed for worker in master.statistics().workers] == [0, 1]
