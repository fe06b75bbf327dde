"""Workers that die, hang or stop: what becomes of their requests, of the others', and of the pool."""

import math
import os
import signal
import threading
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from pathlib import Path

import pytest

from mcinfer import Master, Timeouts, WorkerDiedError
from mcinfer.requests.tensors import Arrays
from tests.process.models import FakeModel, act, assert_answers, fake_master, rows
from tests.process.waiting import all_gone, busy_pid, pids, states, wait_for_states, wait_until

SLOW = -1.0
"""The first number of the request that a test is about."""


def test_worker_killed_in_its_part_of_a_batch_costs_no_row(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    model = fake_model(when={"-8": f"once:{tmp_path / 'long'}:hang:60"})
    inputs = rows(6, first=-8.0)
    with fake_master(model, 2) as master:
        answer: Future[Arrays] = Future()
        asking = threading.Thread(target=lambda: answer.set_result(master.predict(inputs)))
        asking.start()
        wait_until((tmp_path / "long").exists)
        wait_for_states(master, "busy", "ready")
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
        # The pool still serves, at first without a worker, then with those that were started again.
        assert_answers(master.predict(rows(4)), rows(4))
        wait_for_states(master, "ready", "ready")
        assert_answers(master.predict(rows(4)), rows(4))


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


# Requests that a busy worker has ahead, where runs are short.


def warm_up(master: Master) -> None:
    """Have each worker answer a run, so that it is known that runs are short."""
    while min(worker.completed for worker in master.statistics().workers) < 1:
        wait_for_futures([master.submit(rows(1)) for _ in range(8)], timeout=20.0)


def test_requests_beside_a_run_that_hangs_are_answered_by_the_other_worker(
    fake_model: FakeModel,
) -> None:
    model = fake_model(when={"-1": "hang:60"})
    with fake_master(model, 2, timeouts=Timeouts(cancel_grace=0.1, close=0.2)) as master:
        warm_up(master)
        # All at once: some are given ahead behind the one that hangs.
        hung = master.submit(act(-1.0), timeout=20.0)
        beside = [master.submit(rows(1, first=float(i))) for i in range(20)]
        for i, future in enumerate(beside):
            assert_answers(future.result(timeout=20.0), rows(1, first=float(i)))
        assert not hung.done()
        hung.cancel()


def test_requests_behind_a_worker_that_is_stopped_are_taken_back(fake_model: FakeModel) -> None:
    model = fake_model(when={"-1": "stop"})
    with fake_master(model, 2, timeouts=Timeouts(cancel_grace=0.1, close=0.2)) as master:
        warm_up(master)
        stopped = master.submit(act(-1.0), timeout=math.inf)
        beside = [master.submit(rows(1, first=float(i))) for i in range(20)]
        for i, future in enumerate(beside):
            assert_answers(future.result(timeout=20.0), rows(1, first=float(i)))
        assert not stopped.done()
        for pid in pids(master):
            os.kill(pid, signal.SIGCONT)
        assert_answers(stopped.result(timeout=20.0), act(-1.0))
        wait_for_states(master, "ready", "ready")


def test_worker_killed_with_one_given_ahead_costs_neither(fake_model: FakeModel) -> None:
    with fake_master(fake_model(run="sleep:0.005"), 2) as master:
        warm_up(master)
        futures = [master.submit(rows(1, first=float(i))) for i in range(40)]
        os.kill(busy_pid_of_any(master), signal.SIGKILL)
        for i, future in enumerate(futures):
            assert_answers(future.result(timeout=20.0), rows(1, first=float(i)))
        wait_for_states(master, "ready", "ready")


def busy_pid_of_any(master: Master) -> int:
    wait_until(lambda: "busy" in states(master))
    found = [w.pid for w in master.statistics().workers if w.state == "busy" and w.pid]
    return found[0] if found else pids(master)[0]
