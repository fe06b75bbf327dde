"""Tests of mcinfer/scheduler/workers.py: how workers start, end, hang and are replaced."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mcinfer.config import Limits, Timeouts
from mcinfer.errors import BuildError, MissingDependencyError, WorkerDiedError
from mcinfer.protocol import Build, BuildFinish, Error, Exit, Preparing, WorkerState, state_after
from mcinfer.scheduler.scheduler import KILLED_ENDS
from mcinfer.scheduler.workers import (
    LONGEST_START,
    SHORTEST_PROBE,
    STACKS_SECONDS,
    Lifecycle,
    PoolRules,
    Worker,
    describe_exit,
)
from tests import orders
from tests.orders import (
    BUILT,
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
    Recorded,
    Recorder,
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
    ready_pool,
    restarted,
    text,
)

RESTART = replace(orders.RESTART, budget=2)


class Workers(Recorded):
    """A lifecycle without requests; what happens to workers returns the orders that it led to."""

    def __init__(self, builds: Sequence[Build], **options: Any) -> None:
        recorder = Recorder()
        names = ("start", "finish_build", "fail_build", "handle_time", "kill")
        lifecycle = Lifecycle(builds, recorder, PoolRules(limits=Limits(), **options))
        super().__init__(lifecycle, recorder, (*names, "advance", "announce", "close"))


def new_workers(workers: int, **options: Any) -> Workers:
    """Workers that have their process, and have connected."""
    given = {"timeouts": TIMEOUTS, "restart": RESTART, **options}
    pool = Workers([build(i) for i in range(workers)], **given)
    for w in pool.workers:
        assert pool.start(w) == [StartWorker(worker=w.index)]
        connect(pool, w, 100 + w.index)
    return pool


def connect(pool: Workers, w: Worker, pid: int, now: float = 0.0) -> None:
    """Its process runs and loads the model."""
    pool.note_start(w, pid, now)
    w.state = WorkerState.BUILDING


def finish(pool: Workers, w: Worker, now: float = 0.0, message: BuildFinish = BUILT) -> list[Order]:
    w.state = state_after(w.state, type(message))
    orders: list[Order] = pool.finish_build(w, message, now)
    return orders


def fail(pool: Workers, w: Worker, text: str, kind: str = "build") -> list[Order]:
    message = Error(kind=kind, text=text)
    w.state = state_after(w.state, type(message))
    orders: list[Order] = pool.fail_build(w, message, 1.0)
    return orders


def ready_workers(workers: int, **options: Any) -> Workers:
    pool = new_workers(workers, **options)
    actions = [finish(pool, w) for w in pool.workers]
    assert actions[-1] == [PoolStarted()]
    assert pool.started
    return pool


def end(pool: Workers, w: Worker, now: float, how: str = describe_exit(0)) -> list[Order]:
    """Its process ends, and that is acted on."""
    return pool.since(_end, pool, w, now, how)


def _end(pool: Workers, w: Worker, now: float, how: str) -> None:
    pool.note_end(w, how, now)
    pool.finish_start()
    pool.advance(now)


def come_back(pool: Workers, w: Worker, now: float) -> list[Order]:
    """It is due to be started again, and loads the model."""
    assert pool.handle_time(w, now) == [StartWorker(worker=w.index)]
    connect(pool, w, 200 + w.index)
    return [*finish(pool, w, now), *pool.advance(now)]


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
    pool = new_workers(3)
    finish(pool, pool.workers[0])
    assert fail(pool, pool.workers[1], "one", kinds[0]) == [Send(worker=1, message=Exit())]
    _, told = fail(pool, pool.workers[2], "two", kinds[1])
    assert isinstance(told, PoolStarted)
    assert type(told.error) is expected
    assert str(told.error) == "worker 1 (cpu:1, pid 101): one; worker 2 (cpu:2, pid 102): two"
    assert end(pool, pool.workers[1], 2.0) == []


def test_missing_package_is_named_once_though_one_worker_has_ended_already() -> None:
    pool = new_workers(2)
    fail(pool, pool.workers[0], "install it", "missing")
    assert end(pool, pool.workers[0], 1.0) == []
    _, started = fail(pool, pool.workers[1], "install it", "missing")
    assert isinstance(started, PoolStarted)
    assert str(started.error) == "workers 0 and 1: install it"


def test_worker_that_does_not_get_on_has_no_more_time_and_none_has_time_without_end() -> None:
    pool = new_workers(1)
    [w] = pool.workers
    [latest] = [due + LONGEST_START for due in pool.due_times()]
    pool.extend_start(w, Preparing(seconds=1.0, written=5), 20.0)
    pool.extend_start(w, Preparing(seconds=1.0, written=5), 30.0)
    pool.extend_start(w, Preparing(seconds=0.5, written=9), 30.0)
    assert pool.due_times() == [50.0]
    for hours in range(1, 9):
        now = hours * 3600.0
        pool.extend_start(w, Preparing(seconds=now, written=9 + hours), now)
    assert pool.due_times() == [latest]


def test_start_fails_with_the_error_of_the_build_though_the_worker_was_killed_after_it() -> None:
    pool = new_workers(2)
    first, second = pool.workers
    fail(pool, first, "no memory")
    assert first.kill_at < math.inf
    assert pool.handle_time(first, first.kill_at) == [AskForStacks(worker=0)]
    assert first.kill_at < math.inf
    assert pool.handle_time(first, first.kill_at) == [KillWorker(worker=0)]
    _, started = fail(pool, second, "nor here")
    assert isinstance(started, PoolStarted)
    assert "no memory" in str(started.error)


# Ending.


def test_successor_of_a_worker_with_many_runs_begins_with_one() -> None:
    pool = ready_workers(1)
    [w] = pool.workers
    w.usual_seconds, w.capacity = 0.001, 4
    end(pool, w, 1.0, "killed by SIGSEGV")
    come_back(pool, w, 1.0)
    assert (w.usual_seconds, w.capacity) == (math.inf, 1)


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
    pool = ready_workers(1, restart=replace(RESTART, **policy))
    [w] = pool.workers
    now, found = 0.0, []
    for number, (seconds, answers) in enumerate(lived):
        if number and seconds is not None:
            connect(pool, w, 200)
            finish(pool, w, now)
            assert not pool.circuit_open
        w.answers = answers
        now += seconds or 0.0
        pool.note_end(w, "killed by SIGKILL", now)
        [due] = pool.due_times()
        found.append(due - now)
        now = due
        if number < len(lived) - 1:
            assert pool.handle_time(w, now) == [StartWorker(worker=0)]
    assert found == pytest.approx(delays)
    assert pool.circuit_open


def kill_all(pool: Workers, now: float) -> None:
    for w in pool.workers:
        pool.note_end(w, "killed by SIGKILL", now)


def test_circuit_is_open_while_a_probe_starts_and_closed_by_the_first_that_is_ready() -> None:
    pool = ready_workers(2, restart=replace(RESTART, budget=0))
    first, second = pool.workers
    kill_all(pool, 1.0)
    text = (
        "no worker serves, the restart budget is spent, and {}: "
        "each of workers 0 and 1 killed by SIGKILL"
    )
    assert str(pool.outage(1.3)) == text.format("the next start is in 0.7 s")
    assert pool.handle_time(first, 2.0) == [StartWorker(worker=0)]
    connect(pool, first, 200)
    assert pool.circuit_open
    assert pool.health(2.0).state == "failed"
    assert str(pool.outage(2.0)) == text.format("a start is under way")
    finish(pool, first, 2.5)
    assert not pool.circuit_open
    assert (pool.health(2.5).state, pool.health(2.5).serving) == ("degraded", 1)
    come_back(pool, second, 2.5)
    assert pool.health(2.5).state == "ready"


def test_probe_that_grows_while_it_loads_is_not_replaced() -> None:
    pool = ready_workers(1, restart=replace(RESTART, budget=0, max_memory_bytes=1000))
    [w] = pool.workers
    kill_all(pool, 1.0)
    pool.handle_time(w, 2.0)
    connect(pool, w, 200)
    pool.recycle_if_due(w, 1001)
    assert pool.advance(2.0) == []
    finish(pool, w, 3.0)
    assert pool.advance(3.0) == []
    assert w.serves
    pool.recycle_if_due(w, 1001)
    assert pool.advance(3.0) == [Send(worker=0, message=Exit())]


# Replacing.


@pytest.mark.parametrize(("answers", "own_bytes"), [(3, 0), (0, 1001)])
def test_worker_that_has_answered_or_grown_enough_is_replaced(answers: int, own_bytes: int) -> None:
    restart = replace(RESTART, max_requests=3, max_memory_bytes=1000)
    pool = ready_workers(1, restart=restart)
    [w] = pool.workers
    w.answers = 2
    pool.recycle_if_due(w, 1000)
    assert pool.advance(1.0) == []
    w.answers = answers
    pool.recycle_if_due(w, own_bytes)
    assert pool.advance(1.0) == [Send(worker=0, message=Exit())]
    end(pool, w, 1.0)
    come_back(pool, w, 1.0)
    assert w.answers == 0


def test_worker_to_be_recycled_serves_on_while_the_fresh_process_of_another_does_not_start() -> (
    None
):
    pool = ready_workers(2, restart=replace(RESTART, budget=0, max_memory_bytes=1000))
    first, second = pool.workers
    for w in pool.workers:
        pool.recycle_if_due(w, 1001)
    assert pool.advance(1.0) == [Send(worker=0, message=Exit())]
    end(pool, first, 1.0)
    pool.handle_time(first, 1.0)
    assert end(pool, first, 1.0, "exited with status 1") == []
    assert first.budget.spent
    assert pool.advance(1.5) == []
    assert second.serves
    assert come_back(pool, first, 1.0 + RESTART.backoff_limit) == [Send(worker=1, message=Exit())]


def test_worker_past_its_budget_is_replaced_before_those_that_serve() -> None:
    pool = ready_workers(2, restart=replace(RESTART, budget=0))
    first, second = pool.workers
    pool.note_end(second, "killed by SIGKILL", 1.0)
    pool.replace(pool.workers, asked_for=True)
    assert pool.advance(1.0) == [StartWorker(worker=1)]
    assert first.serves
    connect(pool, second, 200)
    assert finish(pool, second, 2.0) == []
    assert pool.advance(2.0) == [Send(worker=0, message=Exit())]


@pytest.mark.parametrize("answers", [0, 1])
def test_worker_that_does_not_end_to_be_replaced_is_killed_and_says_so(answers: int) -> None:
    pool = ready_workers(1, restart=replace(RESTART, budget=0))
    [w] = pool.workers
    w.answers = answers
    pool.replace(pool.workers, asked_for=True)
    assert pool.advance(1.0) == [Send(worker=0, message=Exit())]
    assert pool.handle_time(w, 1.0 + TIMEOUTS.close) == [AskForStacks(worker=0)]
    assert pool.handle_time(w, 7.0) == [KillWorker(worker=0)]
    assert end(pool, w, 7.0, "killed by SIGKILL") == []
    assert w.last_error.endswith("did not stop in time")
    assert come_back(pool, w, 7.0) == [WorkersRestarted()]


def test_replaced_worker_may_take_as_long_as_it_likes_and_its_end_is_planned_all_the_same() -> None:
    endless = Timeouts(close=math.inf)
    pool = ready_workers(1, timeouts=endless, restart=replace(RESTART, budget=0))
    [w] = pool.workers
    pool.replace(pool.workers, asked_for=True)
    assert pool.advance(1.0) == [Send(worker=0, message=Exit())]
    assert end(pool, w, 7.0) == []
    assert not w.last_error
    assert not pool.circuit_open
    assert come_back(pool, w, 7.0) == [WorkersRestarted()]


# Health.


def test_worker_with_unlimited_time_to_stop_a_run_is_well() -> None:
    pool = ready_workers(1, timeouts=Timeouts(cancel_grace=math.inf))
    assert pool.health(1.0).state == "ready"


def test_health_is_told_once_for_each_change() -> None:
    pool = ready_workers(2)
    [told] = pool.announce(1.0)
    assert isinstance(told, Announce)
    assert (told.health.state, told.health.serving) == ("ready", 2)
    assert pool.announce(2.0) == []
    pool.note_end(pool.workers[0], "killed by SIGKILL", 3.0)
    [told] = pool.announce(3.0)
    assert isinstance(told, Announce)
    assert (told.health.state, told.health.serving) == ("degraded", 1)
    # That it is about to be started is nothing new.
    pool.handle_time(pool.workers[0], 3.0)
    assert pool.announce(3.0) == []
    pool.close(4.0, 5.0)
    assert pool.announce(4.0) == []


def test_probe_under_way_has_a_new_budget_when_its_worker_is_replaced() -> None:
    pool = ready_workers(1, restart=replace(RESTART, budget=1))
    [w] = pool.workers
    pool.note_end(w, "killed by SIGKILL", 1.0)
    pool.handle_time(w, 1.0)
    pool.note_end(w, "killed by SIGKILL", 1.0)
    assert w.budget.spent
    pool.handle_time(w, 2.0)
    connect(pool, w, 200)
    pool.replace(pool.workers, asked_for=True)
    assert pool.advance(2.0) == []
    assert not pool.circuit_open
    # What it loads may be what it could not load before: a start of the new budget, and no answer yet.
    assert end(pool, w, 3.0, "killed by SIGKILL") == []
    assert come_back(pool, w, 3.0) == [WorkersRestarted()]


def test_health_of_a_pool_that_replaces_a_worker_is_told_as_planned() -> None:
    pool = new_workers(2)
    for w in pool.workers:
        finish(pool, w)
    pool.announce(1.0)
    pool.replace(pool.workers[:1])
    pool.advance(1.0)
    [told] = pool.announce(1.0)
    assert isinstance(told, Announce)
    assert (told.health.state, told.planned) == ("degraded", True)
    pool.kill(pool.workers[1], "breaks the protocol")
    [told] = pool.announce(1.0)
    assert isinstance(told, Announce)
    assert (told.health.serving, told.planned) == (0, False)


# In a pool, with requests.


def test_second_death_in_the_first_build_fails_the_start() -> None:
    pool = new_pool(1)
    pool.handle_message(1.0, 0, hello(0))
    pool.handle_died(2.0, 0, SIGKILL)
    assert pool.handle_time(2.0) == [StartWorker(worker=0)]
    pool.handle_started(1.0, 0, 200)
    actions = pool.handle_died(3.0, 0, describe_exit(1))
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
def test_worker_that_comes_back_with_another_model_serves_nobody(field: str) -> None:
    pool = ready_pool(2)
    pool.handle_died(1.0, 1, SIGKILL)
    pool.handle_time(1.0)
    pool.handle_started(1.0, 1, 201)
    pool.handle_message(1.0, 1, hello(1))
    other: Any = "another" if field == "model" else (("other", "float32", (4,)),)
    actions = pool.handle_message(1.0, 1, replace(built(), **{field: other}))
    assert actions == [KillWorker(worker=1)]
    assert "are not those of the others" in pool.lifecycle.statistics()[1].last_error


def test_model_that_does_not_load_again_counts_against_the_budget_and_is_told() -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=1))
    pool.handle_died(1.0, 0, SIGSEGV)
    pool.handle_time(1.0)
    pool.handle_started(1.0, 0, 200)
    pool.handle_message(1.0, 0, hello(0))
    assert pool.handle_message(1.0, 0, build_error()) == [Send(worker=0, message=Exit())]
    pool.handle_request(1.0, 1, (1,), 10.0)
    actions = pool.handle_died(1.5, 0, describe_exit(0))
    assert outline(actions) == [Failed(1, WorkerDiedError), Release(request=1)]
    assert "pid 200) exited with status 0 after: no such file" in text(actions)


def test_worker_that_could_not_load_the_model_and_does_not_end_says_why_it_could_not() -> None:
    pool = ready_pool(1)
    pool.handle_died(1.0, 0, SIGSEGV)
    pool.handle_time(1.0)
    pool.handle_started(1.0, 0, 200)
    pool.handle_message(1.0, 0, hello(0))
    pool.handle_message(1.0, 0, build_error())
    end_hung(pool, 1.0 + TIMEOUTS.cancel_grace, 0)
    pool.handle_died(3.0, 0, SIGKILL)
    cause = "worker 0 (cpu:0, pid 200): did not stop in time after: no such file"
    assert pool.lifecycle.statistics()[0].last_error.endswith(f"killed by SIGKILL after: {cause}")


def test_worker_that_does_not_exit_is_killed_then_abandoned() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_close(1.0, 5.0)
    pool.handle_died(1.1, 1, describe_exit(0))
    assert pool.next_time() == 6.0
    end_hung(pool, 6.0, 0)
    abandoned_at = 1.0 + 5.0 + TIMEOUTS.close + KILLED_ENDS
    assert pool.next_time() == abandoned_at
    assert pool.handle_time(abandoned_at) == [PoolClosed(abandoned=(0,))]
    assert pool.next_time() == math.inf
    assert pool.handle_died(50.0, 0, SIGKILL) == [Release(request=1)]


def test_workers_that_still_load_are_killed_when_the_pool_closes() -> None:
    pool = new_pool(3)
    finish_build(pool, 0)
    pool.handle_message(1.0, 1, hello(1))
    assert pool.handle_close(2.0, 5.0) == [
        Send(worker=0, message=Exit()),
        KillWorker(worker=1),
        KillWorker(worker=2),
    ]
    # What they sent before they were killed.
    assert pool.handle_message(2.0, 1, built()) == []
    assert pool.handle_message(2.0, 2, hello(2)) == []
    assert pool.handle_died(2.1, 1, SIGKILL) == []
    assert pool.handle_died(2.1, 2, SIGKILL) == []
    assert pool.handle_died(2.1, 0, describe_exit(0)) == [PoolClosed()]


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


def replaced(scheduler: Pool, worker: int, now: float) -> list[Order]:
    """The worker, told to end, does so, and a fresh one comes; what its BUILD_FINISH led to."""
    assert scheduler.is_exiting(worker)
    assert scheduler.handle_died(now, worker, describe_exit(0)) == []
    return restarted(scheduler, worker, now)


def test_workers_are_replaced_one_after_another_and_none_takes_from_the_budget() -> None:
    pool = ready_pool(3, restart=replace(RESTART, budget=0))
    for _ in range(3):
        assert pool.handle_restart(1.0) == [Send(worker=0, message=Exit())]
        assert replaced(pool, 0, 2.0) == [Send(worker=1, message=Exit())]
        assert replaced(pool, 1, 2.0) == [Send(worker=2, message=Exit())]
        assert replaced(pool, 2, 2.0) == [WorkersRestarted()]
    assert [w.restarts for w in pool.lifecycle.statistics()] == [3, 3, 3]
    assert [w.last_error for w in pool.lifecycle.statistics()] == ["", "", ""]


def test_replacing_ends_with_an_error_when_a_fresh_worker_fails_and_the_rest_stays() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0))
    pool.handle_restart(1.0)
    pool.handle_died(1.0, 0, describe_exit(0))
    pool.handle_time(1.0)
    pool.handle_started(1.0, 0, 300)
    pool.handle_message(1.0, 0, hello(0))
    assert pool.handle_message(1.0, 0, build_error()) == [Send(worker=0, message=Exit())]
    [told] = pool.handle_died(2.0, 0, describe_exit(0))
    assert isinstance(told, WorkersRestarted)
    assert isinstance(told.error, WorkerDiedError)
    assert "no such file" in str(told.error)
    assert restarted(pool, 0, 2.0 + RESTART.backoff_limit) == []
    assert (pool.lifecycle.health(0.0).serving, pool.lifecycle.statistics()[1].restarts) == (2, 0)


def test_worker_to_be_recycled_that_crashes_has_no_new_budget() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0, max_memory_bytes=1000))
    assert pool.handle_own_memory(1.0, 0, 1001) == [Send(worker=0, message=Exit())]
    assert pool.handle_own_memory(1.0, 1, 1001) == []  # it is to be replaced next
    assert pool.handle_died(2.0, 1, SIGSEGV) == []
    pool.handle_died(2.0, 0, describe_exit(0))
    assert restarted(pool, 0, 2.0) == []
    assert pool.next_time() == 2.0 + RESTART.backoff_limit


def test_health_says_what_a_worker_that_is_away_is_doing() -> None:
    pool = ready_pool(1)

    def reason(now: float = 1.0) -> str:
        health = pool.health(now)
        assert (health.state, health.serving, len(health.reasons)) == ("degraded", 0, 1)
        return str(health.reasons[0])

    pool.handle_restart(1.0)
    assert reason() == "worker 0 (cpu:0, pid 100) is being replaced"
    pool.handle_died(1.0, 0, describe_exit(0))
    pool.handle_time(1.0)
    pool.handle_started(1.0, 0, 200)
    assert reason() == "worker 0 (cpu:0, pid 200) is starting (spawned)"
    pool.handle_message(1.0, 0, hello(0))
    assert reason() == "worker 0 (cpu:0, pid 200) is starting (building)"
    pool.handle_message(1.0, 0, build_error())
    assert reason() == "worker 0 (cpu:0, pid 200) is ending: no such file"
    pool.handle_died(1.0, 0, describe_exit(0))
    restarted(pool, 0, 1.0)
    pool.handle_died(2.0, 0, SIGKILL)
    assert reason(2.0).startswith("worker 0 (cpu:0) starts again in 0.5 s: worker 0")
    restarted(pool, 0, 2.5)
    pool.handle_killed(0, "breaks the protocol")
    assert reason() == "worker 0 (cpu:0, pid 200) is being ended: breaks the protocol"
