"""Workers that die, hang or stop: what becomes of their requests, of the others', and of the pool."""

import math
import os
import random
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from mcinfer import (
    BuildError,
    Master,
    PredictError,
    PredictTimeoutError,
    RestartPolicy,
    Timeouts,
    WorkerDiedError,
)
from mcinfer.requests.request import Arrays
from tests.process.models import FakeModel, act, assert_answers, rows
from tests.process.waiting import all_gone, busy_pid, pids, states, wait_for_states, wait_until

SLOW = -1.0
"""What the first number of a request is for the act that a test is about."""

GENEROUS = RestartPolicy(budget=1000, backoff=0.0)
NO_BUDGET = RestartPolicy(budget=0, backoff_limit=3600.0)


def test_worker_killed_twice_while_building_fails_the_start_with_both_deaths(
    fake_model: FakeModel,
) -> None:
    master = Master(fake_model(build="sleep:60"), 1, engine="fake", verify="never")
    outcome: Future[None] = Future()

    def start() -> None:
        try:
            master.start()
        except BuildError as exc:
            outcome.set_exception(exc)

    starting = threading.Thread(target=start)
    starting.start()
    for restarts in range(2):
        wait_until(lambda n=restarts: master.statistics().workers[0].restarts == n)  # type: ignore[misc]
        wait_for_states(master, "building")
        os.kill(pids(master)[0], signal.SIGKILL)
    starting.join()
    with pytest.raises(BuildError) as caught:
        outcome.result(timeout=5.0)
    assert str(caught.value).count("killed by SIGKILL while building") == 2


def test_worker_killed_in_its_part_of_a_batch_costs_no_row(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    model = fake_model(when={"-8": f"once:{tmp_path / 'long'}:hang:60"})
    inputs = rows(6, first=-8.0)
    with Master(model, 3, engine="fake", verify="never") as master:
        answer: Future[Arrays] = Future()
        asking = threading.Thread(target=lambda: answer.set_result(master.predict(inputs)))
        asking.start()
        wait_until((tmp_path / "long").exists)
        wait_for_states(master, "busy", "ready", "ready")
        os.kill(busy_pid(master), signal.SIGKILL)
        assert_answers(answer.result(timeout=10.0), inputs)
        asking.join()


def test_request_that_kills_two_workers_is_given_up_and_named(fake_model: FakeModel) -> None:
    with Master(fake_model(when={"-1": "segfault"}), 2, engine="fake", verify="never") as master:
        first, second = pids(master)
        with pytest.raises(WorkerDiedError) as caught:
            master.submit(act(SLOW)).result(timeout=10.0)
        text = str(caught.value)
        assert f"worker 0 (cpu:0, pid {first}) killed by SIGSEGV" in text
        assert f"worker 1 (cpu:1, pid {second}) killed by SIGSEGV" in text
        # The pool serves on, at first with nobody, then with those that were started again.
        assert_answers(master.predict(rows(4)), rows(4))
        wait_for_states(master, "ready", "ready")
        assert_answers(master.predict(rows(4)), rows(4))


def test_exit_status_of_a_worker_that_ends_itself_is_told(fake_model: FakeModel) -> None:
    with (
        Master(fake_model(when={"-1": "exit"}), 2, engine="fake", verify="never") as master,
        pytest.raises(WorkerDiedError, match=r"exited with status 3.*exited with status 3"),
    ):
        master.predict(act(SLOW))


def test_stopped_worker_is_timed_out_at_the_deadline_then_replaced(
    fake_model: FakeModel,
) -> None:
    timeouts = Timeouts(cancel_grace=0.7)
    with Master(fake_model(), 1, engine="fake", verify="never", timeouts=timeouts) as master:
        (stopped,) = pids(master)
        os.kill(stopped, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(PredictTimeoutError, match=rf"cpu:0, pid {stopped}"):
            master.predict(rows(2), timeout=0.3)
        waited = time.monotonic() - start
        assert 0.3 <= waited < 0.3 + 0.7
        assert not all_gone([stopped])
        wait_until(lambda: all_gone([stopped]))
        assert_answers(master.predict(rows(2), timeout=10.0), rows(2))
        (worker,) = master.statistics().workers
        assert worker.restarts == 1
        assert "did not stop in time" in worker.last_error


def test_run_that_ends_when_cancelled_keeps_its_worker(fake_model: FakeModel) -> None:
    with Master(fake_model(when={"-1": "sleep:60"}), 1, engine="fake", verify="never") as master:
        before = pids(master)
        with pytest.raises(PredictTimeoutError, match=r"no answer within 0\.2 s"):
            master.predict(act(SLOW), timeout=0.2)
        assert_answers(master.predict(rows(2)), rows(2))
        assert pids(master) == before
        assert master.statistics().workers[0].restarts == 0


def test_future_that_is_cancelled_stops_its_run_and_keeps_its_worker(
    fake_model: FakeModel,
) -> None:
    with Master(fake_model(when={"-1": "sleep:60"}), 1, engine="fake", verify="never") as master:
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
    with Master(
        model, 1, engine="fake", verify="never", timeouts=Timeouts(cancel_grace=0.2)
    ) as master:
        future = master.submit(act(SLOW), timeout=1.0)
        wait_until(hangs.exists)
        hung = busy_pid(master)
        assert future.cancel()
        assert_answers(master.predict(rows(1), timeout=10.0), rows(1))
        assert all_gone([hung])


@pytest.mark.parametrize("how", ["sleep:60", "invalid"])
def test_request_beside_one_that_goes_wrong_is_not_affected(
    fake_model: FakeModel, how: str
) -> None:
    model = fake_model(when={"-1": how, "1": "sleep:0.6"})
    timeouts = Timeouts(cancel_grace=0.1)
    with Master(model, 3, engine="fake", verify="never", timeouts=timeouts) as master:
        beside = master.submit(act(1.0, 2))
        wait_for_states(master, "busy", "ready", "ready")
        neighbour = busy_pid(master)
        wrong = master.submit(act(SLOW), timeout=0.2 if how[0] in "hs" else 5.0)
        assert isinstance(
            wrong.exception(timeout=10.0),
            (WorkerDiedError, PredictTimeoutError, PredictError, ValueError),
        )
        assert_answers(beside.result(timeout=10.0), act(1.0, 2))
        assert neighbour in pids(master)


def test_killed_workers_cost_no_request_and_no_row(fake_model: FakeModel) -> None:
    # A request that two kills hit is given up by design, so a kill waits until the one
    # that the last kill hit, which goes first, must have been answered.
    between = 12
    with Master(
        fake_model(run="sleep:0.01"), 3, engine="fake", verify="never", restart=GENEROUS
    ) as master:
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
    with Master(model, 2, engine="fake", verify="never", restart=NO_BUDGET) as master:
        queued = [master.submit(act(SLOW)) for _ in range(4)]
        for future in queued:
            with pytest.raises(WorkerDiedError, match="SIGSEGV"):
                future.result(timeout=5.0)
        wait_for_states(master, "gone", "gone")
        start = time.monotonic()
        with pytest.raises(
            WorkerDiedError,
            match=r"no worker serves.* next start is in 3\d{3}\.\d s: worker 0.*worker 1",
        ):
            master.predict(rows(1), timeout=math.inf)
        assert time.monotonic() - start < 0.5
        statistics = master.statistics()
        assert [worker.pid for worker in statistics.workers] == [None, None]
        assert (statistics.in_flight, statistics.queued_shards) == (0, 0)


def test_pool_serves_with_those_that_are_left(fake_model: FakeModel) -> None:
    with Master(fake_model(), 2, engine="fake", verify="never", restart=NO_BUDGET) as master:
        os.kill(pids(master)[0], signal.SIGKILL)
        wait_for_states(master, "gone", "ready")
        assert_answers(master.predict(rows(7)), rows(7))
        assert [worker.completed for worker in master.statistics().workers] == [0, 1]


def test_model_that_is_gone_when_a_worker_is_started_again_is_told(
    fake_model: FakeModel,
) -> None:
    model = fake_model()
    restart = RestartPolicy(budget=2, backoff=0.01, backoff_limit=3600.0)
    with Master(model, 1, engine="fake", verify="never", restart=restart) as master:
        model.unlink()
        os.kill(pids(master)[0], signal.SIGKILL)
        wait_until(lambda: master.statistics().workers[0].restarts == 2)
        wait_until(lambda: states(master) == ["gone"])
        with pytest.raises(WorkerDiedError, match=model.name):
            master.predict(rows(1), timeout=10.0)
