"""Requests that busy workers are given ahead, where runs are short."""

import math
import os
import signal
from concurrent.futures import wait as wait_for_futures

from mcinfer import Master, Timeouts
from tests.process.models import FakeModel, act, assert_answers, fake_master, rows
from tests.process.waiting import pids, states, wait_for_states, wait_until


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
