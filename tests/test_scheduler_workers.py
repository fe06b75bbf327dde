"""Tests of mcinfer/scheduler/workers.py: how workers start, end, hang and are replaced."""

import math
from dataclasses import replace
from typing import Any

import pytest

from mcinfer.config import Limits, Timeouts
from mcinfer.errors import BuildError, MissingDependencyError, WorkerDiedError
from mcinfer.protocol import Error, Exit, Preparing
from mcinfer.scheduler.scheduler import KILLED_ENDS
from mcinfer.scheduler.workers import (
    LONGEST_START,
    MAX_STOPPED,
    SHORTEST_PROBE,
    STACKS_SECONDS,
)
from tests.orders import (
    EXITED,
    RESTART,
    SIGKILL,
    SIGSEGV,
    TIMEOUTS,
    Announce,
    AskForStacks,
    Failed,
    KillWorker,
    Order,
    Pool,
    PoolClosed,
    PoolStarted,
    Release,
    Send,
    StartWorker,
    WorkersRestarted,
    build,
    build_error,
    built,
    end_hung,
    error,
    finish_build,
    hello,
    new_pool,
    outline,
    predict,
    ready_pool,
    reply,
    restarted,
    started_again,
    text,
)


def fail_build(
    pool: Pool, worker: int, text: str = "no such file", kind: str = "build", now: float = 1.0
) -> list[Order]:
    """The worker connects and cannot load the model; what its ERROR led to."""
    pool.handle_message(now, worker, hello(worker))
    orders: list[Order] = pool.handle_message(now, worker, Error(kind=kind, text=text))
    return orders


def answer(pool: Pool, now: float, request: int) -> list[Order]:
    """A request comes and is answered; what the answer led to."""
    pool.handle_request(now, request, (1,), 10.0)
    orders: list[Order] = pool.handle_message(now, 0, reply(request))
    return orders


# Starting.


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("missing", "missing"), MissingDependencyError),
        (("missing", "build"), BuildError),
        (("build", "build"), BuildError),
    ],
)
def test_package_is_missing_when_all_that_failed_lack_it(
    kinds: tuple[str, str], expected: type[Exception]
) -> None:
    pool = new_pool(3)
    finish_build(pool, 0)
    assert fail_build(pool, 1, "one", kinds[0]) == [Send(worker=1, message=Exit())]
    _, found = fail_build(pool, 2, "two", kinds[1])
    assert isinstance(found, PoolStarted)
    assert type(found.error) is expected
    assert str(found.error) == "worker 1 (cpu:1, pid 101): one; worker 2 (cpu:2, pid 102): two"


def test_missing_package_is_named_once_though_one_worker_has_ended_already() -> None:
    pool = new_pool(2)
    fail_build(pool, 0, "install it", "missing")
    assert pool.handle_died(1.0, 0, EXITED) == []
    assert text(fail_build(pool, 1, "install it", "missing")) == "workers 0 and 1: install it"


def test_worker_whose_process_is_not_started_yet_holds_no_failure_up_and_has_all_of_its_time() -> (
    None
):
    pool = Pool([build(0), build(1)], timeouts=TIMEOUTS, restart=RESTART, limits=Limits())
    pool.handle_start(0.0)
    pool.handle_started(0.0, 0, 100)
    finish_build(pool, 0)
    assert pool.next_time() == math.inf
    assert pool.health(1.0).reasons == ("worker 1 (cpu:1) is to be started",)
    pool.handle_started(9.0, 1, 101)
    assert pool.next_time() == 9.0 + TIMEOUTS.start
    assert finish_build(pool, 1, 9.0) == [PoolStarted()]

    pool = Pool([build(0), build(1)], timeouts=TIMEOUTS, restart=RESTART, limits=Limits())
    pool.handle_start(0.0)
    pool.handle_started(0.0, 0, 100)
    assert text(fail_build(pool, 0)) == "worker 0 (cpu:0, pid 100): no such file"


def test_worker_that_does_not_get_on_has_no_more_time_and_none_has_time_without_end() -> None:
    pool = new_pool(1)
    pool.handle_message(0.0, 0, hello(0))
    latest = pool.next_time() + LONGEST_START
    for now, seconds, written in ((20.0, 1.0, 5), (30.0, 1.0, 5), (30.0, 0.5, 9)):
        pool.handle_message(now, 0, Preparing(seconds=seconds, written=written))
    assert pool.next_time() == 50.0
    for hours in range(1, 9):
        now = hours * 3600.0
        pool.handle_message(now, 0, Preparing(seconds=now, written=9 + hours))
    assert pool.next_time() == latest


def test_start_fails_with_the_error_of_the_build_though_the_worker_was_killed_after_it() -> None:
    pool = new_pool(2)
    fail_build(pool, 0, "no memory")
    end_hung(pool, 1.0 + TIMEOUTS.cancel_grace, 0)
    assert "no memory" in text(fail_build(pool, 1, "nor here", now=3.0))


def test_second_death_in_the_first_build_fails_the_start() -> None:
    pool = new_pool(1)
    pool.handle_message(1.0, 0, hello(0))
    pool.handle_died(2.0, 0, SIGKILL)
    assert pool.handle_time(2.0) == [StartWorker(worker=0)]
    pool.handle_started(1.0, 0, 200)
    actions = pool.handle_died(3.0, 0, "exited with status 1")
    assert outline(actions) == [Failed(None, BuildError)]
    assert text(actions) == (
        "worker 0 (cpu:0, pid 100) killed by SIGKILL while building; "
        "worker 0 (cpu:0, pid 200) exited with status 1 while spawned"
    )


def test_slow_start_is_killed_and_fails_the_start() -> None:
    pool = new_pool(2)
    finish_build(pool, 0)
    pool.handle_message(1.0, 1, hello(1))
    assert pool.next_time() == 30.0
    assert pool.handle_time(30.0) == [AskForStacks(worker=1)]
    actions = pool.handle_time(30.0 + STACKS_SECONDS)
    assert outline(actions) == [KillWorker(worker=1), Failed(None, BuildError)]
    assert text(actions) == ("worker 1 (cpu:1, pid 101): not ready within 30 s (it was building)")


@pytest.mark.parametrize("field", ["outputs", "model"])
def test_worker_that_comes_back_with_another_model_does_not_serve(field: str) -> None:
    pool = ready_pool(2)
    pool.handle_died(1.0, 1, SIGKILL)
    now = started_again(pool, 1)
    pool.handle_message(now, 1, hello(1))
    other: Any = "another" if field == "model" else (("other", "float32", (4,)),)
    actions = pool.handle_message(now, 1, replace(built(), **{field: other}))
    assert actions == [KillWorker(worker=1)]
    assert "are not those of the others" in pool.lifecycle.statistics()[1].last_error


# Restarts.


STARTING = (None, 0)
"""A life that ends before the worker is ready."""


@pytest.mark.parametrize(
    ("policy", "lived", "delays"),
    [
        pytest.param({}, [(0.0, 0), *[STARTING] * 99], [0, 0.5, *[1] * 98], id="never ready again"),
        pytest.param(
            {}, [(at, 0) for at in (0.0, 1.0, 60.5, 1.0, 0.5)], [0, 0.5, 0, 0.5, 1], id="the window"
        ),
        pytest.param(
            {"budget": 0}, [*[(1.0, 1)] * 100, (1.0, 0)], [*[0] * 100, 1], id="after an answer"
        ),
        pytest.param(
            {}, [(1.0, 0), STARTING, STARTING] * 2, [0, 0.5, 1, 0, 0.5, 1], id="well for a while"
        ),
        pytest.param(
            {"budget": 5},
            [(1.0, 0), *[STARTING] * 5, *[(0.9, 0)] * 10],
            [0, 0.5, *[1] * 14],
            id="ready and dead at once",
        ),
        pytest.param(
            {"budget": 0, "backoff": 0.0, "backoff_limit": 0.0},
            [(1.0, 0)] * 2,
            [SHORTEST_PROBE] * 2,
            id="no busy loop whatever the policy says",
        ),
    ],
)
def test_worker_that_died_starts_again_after(
    policy: dict[str, Any], lived: list[tuple[float | None, int]], delays: list[float]
) -> None:
    """`lived` has the seconds of each life once the worker was ready, and its answers."""
    pool = ready_pool(1, restart=replace(RESTART, **{"budget": 2, **policy}))
    now, found = 0.0, []
    for number, (seconds, answers) in enumerate(lived):
        if number:
            assert pool.handle_time(now) == [StartWorker(worker=0)]
            pool.handle_started(now, 0, 200)
        if number and seconds is not None:
            finish_build(pool, 0, now)
            assert not pool.lifecycle.circuit_open
        if answers:
            answer(pool, now, number)
        now += seconds or 0.0
        pool.handle_died(now, 0, SIGKILL)
        due = pool.next_time()
        found.append(due - now)
        now = due
    assert found == pytest.approx(delays)
    assert pool.lifecycle.circuit_open


def test_successor_of_a_worker_with_many_runs_begins_with_one() -> None:
    pool = ready_pool(1)
    answer(pool, 0.0, 1)
    assert len(pool.handle_request(0.0, 2, (1,) * 4, 10.0)) == 4
    pool.handle_died(1.0, 0, SIGSEGV)
    assert len(restarted(pool, 0)) == 1


def test_circuit_is_open_while_a_probe_starts_and_closed_by_the_first_that_is_ready() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0))
    for worker in (0, 1):
        pool.handle_died(1.0, worker, SIGKILL)
    outage = (
        "no worker serves, the restart budget is spent, and {}: "
        "each of workers 0 and 1 killed by SIGKILL"
    )
    with pytest.raises(WorkerDiedError) as refused:
        pool.handle_request(1.3, 1, (1,), 10.0)
    assert str(refused.value) == outage.format("the next start is in 0.7 s")
    assert len(pool.handle_time(2.0)) == 2
    pool.handle_started(2.0, 0, 200)
    assert pool.health(2.0).state == "failed"
    with pytest.raises(WorkerDiedError) as refused:
        pool.handle_request(2.0, 2, (1,), 10.0)
    assert str(refused.value) == outage.format("a start is under way")
    assert (refused.value.refusal, pool.table.accepted) == ("no_worker", 0)
    finish_build(pool, 0, 2.5)
    assert (pool.health(2.5).state, pool.health(2.5).serving) == ("degraded", 1)
    pool.handle_started(2.5, 1, 201)
    finish_build(pool, 1, 2.5)
    assert pool.health(2.5).state == "ready"


def test_end_that_is_no_fault_of_the_worker_costs_nothing_and_blames_no_run() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0))
    pool.handle_request(0.0, 1, (1, 1), 10.0)
    pool.handle_killed(1, "it uses what worker 0 has made", planned=True)
    assert pool.handle_died(1.0, 1, SIGKILL) == []
    assert not pool.table.entries[1].deaths
    assert restarted(pool, 1) == [predict(1, (1, 1))]
    assert pool.health(1.0).state == "ready"


def test_model_that_does_not_load_again_counts_against_the_budget_and_is_named() -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=1))
    pool.handle_died(1.0, 0, SIGSEGV)
    now = started_again(pool, 0)
    pool.handle_message(now, 0, hello(0))
    assert pool.handle_message(now, 0, build_error()) == [Send(worker=0, message=Exit())]
    pool.handle_request(now, 1, (1,), 10.0)
    actions = pool.handle_died(now + 0.5, 0, EXITED)
    assert outline(actions) == [Failed(1, WorkerDiedError), Release(request=1)]
    assert "pid 200) exited with status 0 after: no such file" in text(actions)


def test_worker_that_could_not_load_the_model_and_does_not_end_says_why_it_could_not() -> None:
    pool = ready_pool(1)
    pool.handle_died(1.0, 0, SIGSEGV)
    now = started_again(pool, 0)
    pool.handle_message(now, 0, hello(0))
    pool.handle_message(now, 0, build_error())
    end_hung(pool, now + TIMEOUTS.cancel_grace, 0)
    pool.handle_died(now + TIMEOUTS.cancel_grace + 1.0, 0, SIGKILL)
    cause = "worker 0 (cpu:0, pid 200): did not stop in time after: no such file"
    assert pool.lifecycle.statistics()[0].last_error.endswith(f"killed by SIGKILL after: {cause}")


# Closing.


def test_worker_that_does_not_exit_is_killed_then_abandoned() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_close(1.0, 5.0)
    pool.handle_died(1.1, 1, EXITED)
    assert pool.next_time() == 6.0
    end_hung(pool, 6.0, 0)
    abandoned_at = 1.0 + 5.0 + TIMEOUTS.close + KILLED_ENDS
    assert pool.next_time() == abandoned_at
    assert pool.handle_time(abandoned_at) == [PoolClosed(abandoned=(0,))]
    assert pool.next_time() == math.inf
    assert pool.handle_died(50.0, 0, SIGKILL) == [Release(request=1)]


def test_worker_that_hangs_has_no_more_time_because_the_pool_closes() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 1, (1, 1), 10.0)
    pool.handle_time(10.0)
    pool.handle_close(10.5, 60.0)
    assert pool.next_time() == 10.0 + TIMEOUTS.cancel_grace
    # One that stops in time has all the time to end.
    pool.handle_message(10.6, 1, error(1, 1, "cancelled"))
    assert pool.handle_time(11.0) == [AskForStacks(worker=0)]
    assert pool.workers[1].kill_at == 10.5 + 60.0


def test_worker_that_stays_stopped_with_a_run_is_ended_and_another_has_the_run() -> None:
    pool = ready_pool(2)
    pool.handle_request(1.0, 1, (1,), 60.0)
    for _ in range(MAX_STOPPED - 1):
        assert pool.handle_standing(0, stopped=True) == []
    assert pool.handle_standing(0, stopped=False) == []  # it was continued
    for _ in range(MAX_STOPPED - 1):
        assert pool.handle_standing(0, stopped=True) == []
    assert pool.handle_standing(0, stopped=True) == [KillWorker(worker=0)]
    assert pool.handle_standing(0, stopped=True) == []
    assert predict(1, (1, 0)) in pool.handle_died(6.0, 0, SIGKILL)
    restarted(pool, 0)
    pool.handle_request(7.0, 2, (1,), 60.0)
    for _ in range(MAX_STOPPED - 1):  # the next process has as many looks
        assert pool.handle_standing(0, stopped=True) == []
    assert pool.handle_standing(0, stopped=True) == [KillWorker(worker=0)]


def test_worker_that_is_stopped_idle_or_answers_meanwhile_goes_on() -> None:
    pool = ready_pool(1)
    for request in range(1, 9):
        assert pool.handle_standing(0, stopped=True) == []
        pool.handle_request(1.0, request, (1,), 60.0)
        for _ in range(MAX_STOPPED - 1):
            assert pool.handle_standing(0, stopped=True) == []
        assert len(pool.handle_message(1.0, 0, reply(request))) == 2


# Replacing.


@pytest.mark.parametrize("grows", [False, True])
def test_worker_that_has_answered_or_grown_enough_is_replaced(grows: bool) -> None:
    pool = ready_pool(1, restart=replace(RESTART, max_requests=3, max_memory_bytes=1000))
    for request in (1, 2):
        assert len(answer(pool, 1.0, request)) == 2
    assert pool.handle_own_memory(1.0, 0, 1000) == []
    ends = pool.handle_own_memory(1.0, 0, 1001) if grows else answer(pool, 1.0, 3)
    assert ends[-1] == Send(worker=0, message=Exit())
    pool.handle_died(1.0, 0, EXITED)
    restarted(pool, 0)
    assert len(answer(pool, 1.0, 4)) == 2


def test_probe_that_grows_while_it_loads_is_not_replaced() -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=0, max_memory_bytes=1000))
    pool.handle_died(1.0, 0, SIGKILL)
    pool.handle_time(2.0)
    pool.handle_started(2.0, 0, 200)
    assert pool.handle_own_memory(2.0, 0, 1001) == []
    assert finish_build(pool, 0, 3.0) == []
    assert pool.handle_own_memory(3.0, 0, 1001) == [Send(worker=0, message=Exit())]


def test_worker_to_be_recycled_serves_on_while_the_next_process_of_another_does_not_start() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0, max_memory_bytes=1000))
    assert pool.handle_own_memory(1.0, 0, 1001) == [Send(worker=0, message=Exit())]
    assert pool.handle_own_memory(1.0, 1, 1001) == []
    pool.handle_died(1.0, 0, EXITED)
    assert pool.handle_time(1.0) == [StartWorker(worker=0)]
    assert pool.handle_died(1.0, 0, "exited with status 1") == []
    assert pool.workers[1].serves
    assert restarted(pool, 0) == [Send(worker=1, message=Exit())]


def test_worker_past_its_budget_is_replaced_before_those_that_serve() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0))
    pool.handle_died(1.0, 1, SIGKILL)
    assert pool.handle_restart(1.0) == [StartWorker(worker=1)]
    assert pool.workers[0].serves
    pool.handle_started(1.0, 1, 200)
    assert finish_build(pool, 1, 2.0) == [Send(worker=0, message=Exit())]


def test_worker_that_started_first_is_replaced_first() -> None:
    """It may have made the weights that the others use, and that end with it."""
    pool = ready_pool(2)
    pool.handle_died(1.0, 0, SIGKILL)
    restarted(pool, 0)
    assert pool.handle_restart(2.0) == [Send(worker=1, message=Exit())]


@pytest.mark.parametrize("answers", [0, 1])
def test_worker_that_does_not_end_to_be_replaced_is_killed_and_says_so(answers: int) -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=0))
    for request in range(answers):
        answer(pool, 0.0, request)
    assert pool.handle_restart(1.0) == [Send(worker=0, message=Exit())]
    end_hung(pool, 1.0 + TIMEOUTS.close, 0)
    assert pool.handle_died(7.0, 0, SIGKILL) == []
    assert pool.workers[0].last_error.endswith("did not stop in time")
    assert restarted(pool, 0) == [WorkersRestarted()]


def test_replaced_worker_may_take_as_long_as_it_likes_and_its_end_is_planned_all_the_same() -> None:
    endless = Timeouts(close=math.inf)
    pool = ready_pool(1, timeouts=endless, restart=replace(RESTART, budget=0))
    assert pool.handle_restart(1.0) == [Send(worker=0, message=Exit())]
    assert pool.handle_died(7.0, 0, EXITED) == []
    assert not pool.workers[0].last_error
    assert restarted(pool, 0) == [WorkersRestarted()]


def test_probe_under_way_has_a_new_budget_when_its_worker_is_replaced() -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=1))
    for now in (1.0, 1.0):
        pool.handle_died(now, 0, SIGKILL)
        pool.handle_time(now)
    assert pool.lifecycle.circuit_open
    assert pool.handle_time(2.0) == [StartWorker(worker=0)]
    pool.handle_started(2.0, 0, 200)
    assert pool.handle_restart(2.0) == []
    assert not pool.lifecycle.circuit_open
    # What it loads may be what it could not load before: a start of the new budget, and no answer yet.
    assert pool.handle_died(3.0, 0, SIGKILL) == []
    assert restarted(pool, 0) == [WorkersRestarted()]


def replaced(scheduler: Pool, worker: int, now: float) -> list[Order]:
    """The worker was asked to end and does so, and the next one comes; what its BUILD_FINISH led to."""
    assert scheduler.is_exiting(worker)
    assert scheduler.handle_died(now, worker, EXITED) == []
    return restarted(scheduler, worker)


def test_workers_are_replaced_one_after_another_and_none_takes_from_the_budget() -> None:
    pool = ready_pool(3, restart=replace(RESTART, budget=0))
    for _ in range(3):
        assert pool.handle_restart(1.0) == [Send(worker=0, message=Exit())]
        assert replaced(pool, 0, 2.0) == [Send(worker=1, message=Exit())]
        assert replaced(pool, 1, 2.0) == [Send(worker=2, message=Exit())]
        assert replaced(pool, 2, 2.0) == [WorkersRestarted()]
    assert [w.restarts for w in pool.lifecycle.statistics()] == [3, 3, 3]
    assert [w.last_error for w in pool.lifecycle.statistics()] == ["", "", ""]


def test_worker_that_was_ended_with_another_one_is_not_replaced_again() -> None:
    pool = ready_pool(3)
    assert pool.handle_restart(1.0) == [Send(worker=0, message=Exit())]
    pool.handle_killed(1, "it uses what worker 0 has made", planned=True)
    assert pool.handle_died(2.0, 1, SIGKILL) == []
    assert restarted(pool, 1) == []
    assert replaced(pool, 0, 2.0) == [Send(worker=2, message=Exit())]
    assert replaced(pool, 2, 2.0) == [WorkersRestarted()]
    assert [w.restarts for w in pool.lifecycle.statistics()] == [1, 1, 1]


def test_replacing_ends_with_an_error_when_a_fresh_worker_fails_and_the_rest_stays() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0))
    pool.handle_restart(1.0)
    pool.handle_died(1.0, 0, EXITED)
    pool.handle_time(1.0)
    pool.handle_started(1.0, 0, 300)
    pool.handle_message(1.0, 0, hello(0))
    assert pool.handle_message(1.0, 0, build_error()) == [Send(worker=0, message=Exit())]
    [found] = pool.handle_died(2.0, 0, EXITED)
    assert isinstance(found, WorkersRestarted)
    assert isinstance(found.error, WorkerDiedError)
    assert "no such file" in str(found.error)
    assert restarted(pool, 0) == []
    assert (pool.lifecycle.health(0.0).serving, pool.lifecycle.statistics()[1].restarts) == (2, 0)


def test_worker_to_be_recycled_that_crashes_has_no_new_budget() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0, max_memory_bytes=1000))
    assert pool.handle_own_memory(1.0, 0, 1001) == [Send(worker=0, message=Exit())]
    assert pool.handle_own_memory(1.0, 1, 1001) == []  # it is to be replaced next
    assert pool.handle_died(2.0, 1, SIGSEGV) == []
    pool.handle_died(2.0, 0, EXITED)
    assert restarted(pool, 0) == []
    assert pool.next_time() == 2.0 + RESTART.backoff_limit


# Health.


def test_worker_with_unlimited_time_to_stop_a_run_is_well() -> None:
    assert ready_pool(1, timeouts=Timeouts(cancel_grace=math.inf)).health(1.0).state == "ready"


def test_health_is_announced_once_for_each_change() -> None:
    pool = ready_pool(2)
    pool.handle_own_memory(2.0, 0, 1)  # any event
    pool.handle_died(3.0, 0, SIGKILL)
    pool.handle_time(3.0)  # that it is about to be started is nothing new
    found = [(health.state, health.serving) for health in pool.announced]
    assert found == [("starting", 1), ("ready", 2), ("degraded", 1)]


def test_health_of_a_pool_that_replaces_a_worker_is_announced_as_planned() -> None:
    pool = ready_pool(2, restart=replace(RESTART, max_memory_bytes=1000))
    pool.handle_own_memory(1.0, 0, 1001)
    pool.handle_killed(1, "breaks the protocol")
    pool.handle_own_memory(1.0, 0, 1001)
    found = [order for order in pool.recorder.orders if isinstance(order, Announce)][-2:]
    assert [(order.health.serving, order.planned) for order in found] == [(1, True), (0, False)]


def test_health_says_what_a_worker_that_is_away_is_doing() -> None:
    pool = ready_pool(1)

    def reason(now: float = 1.0) -> str:
        health = pool.health(now)
        assert (health.state, health.serving, len(health.reasons)) == ("degraded", 0, 1)
        return str(health.reasons[0])

    pool.handle_restart(1.0)
    assert reason() == "worker 0 (cpu:0, pid 100) is being replaced"
    pool.handle_died(1.0, 0, EXITED)
    pool.handle_time(1.0)
    pool.handle_started(1.0, 0, 200)
    assert reason() == "worker 0 (cpu:0, pid 200) is starting (spawned)"
    pool.handle_message(1.0, 0, hello(0))
    assert reason() == "worker 0 (cpu:0, pid 200) is starting (building)"
    pool.handle_message(1.0, 0, build_error())
    assert reason() == "worker 0 (cpu:0, pid 200) is ending: no such file"
    pool.handle_died(1.0, 0, EXITED)
    restarted(pool, 0)
    pool.handle_died(2.0, 0, SIGKILL)
    assert reason(2.0).startswith("worker 0 (cpu:0) starts again in 0.5 s: worker 0")
    restarted(pool, 0)
    pool.handle_killed(0, "breaks the protocol")
    assert reason() == "worker 0 (cpu:0, pid 200) is being ended: breaks the protocol"
