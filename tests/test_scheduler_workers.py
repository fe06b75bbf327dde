"""Tests of mcinfer/scheduler/workers.py: workers' lives alone, without requests. Time is a number.

What they are to requests is in test_scheduler.py, and so is any order of events.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mcinfer.config import Limits, RestartPolicy, Timeouts
from mcinfer.errors import BuildError, MissingDependencyError
from mcinfer.protocol import Build, BuildFinish, Error, Exit, Preparing, WorkerState, state_after
from mcinfer.scheduler.workers import (
    LONGEST_START,
    SHORTEST_PROBE,
    PoolRules,
    Worker,
    WorkerLives,
    describe_exit,
)
from tests import orders
from tests.orders import (
    BUILT,
    SLAB,
    TIMEOUTS,
    Announce,
    AskForStacks,
    KillWorker,
    Order,
    PoolStarted,
    Recorded,
    Recorder,
    Send,
    ShareSlab,
    StartWorker,
    WorkersRestarted,
    build,
)

RESTART = replace(orders.RESTART, budget=2)


class Lives(Recorded):
    """Workers' lives; what happens to them returns the orders that it led to."""

    def __init__(self, builds: Sequence[Build], **options: Any) -> None:
        recorder = Recorder()
        names = ("start", "build", "finish_build", "fail_build", "handle_time", "kill")
        lives = WorkerLives(builds, recorder, PoolRules(limits=Limits(), **options))
        super().__init__(lives, recorder, (*names, "advance", "announce", "close"))


def new_lives(workers: int, **options: Any) -> Lives:
    """Workers that have their process, and have connected."""
    given = {"timeouts": TIMEOUTS, "restart": RESTART, **options}
    lives = Lives([build(i) for i in range(workers)], **given)
    for w in lives.workers:
        assert lives.start(w, 0.0) == [StartWorker(worker=w.index)]
        connect(w, 100 + w.index)
    return lives


def connect(w: Worker, pid: int) -> None:
    w.pid = pid
    w.state = WorkerState.CONNECTED
    w.state = WorkerState.BUILDING


def finish(lives: Lives, w: Worker, now: float = 0.0, message: BuildFinish = BUILT) -> list[Order]:
    w.state = state_after(w.state, type(message))
    orders: list[Order] = lives.finish_build(w, message, now)
    return orders


def fail(lives: Lives, w: Worker, text: str, kind: str = "build") -> list[Order]:
    message = Error(kind=kind, text=text)
    w.state = state_after(w.state, type(message))
    orders: list[Order] = lives.fail_build(w, message, 1.0)
    return orders


def ready_lives(workers: int, **options: Any) -> Lives:
    lives = new_lives(workers, **options)
    actions = [finish(lives, w) for w in lives.workers]
    assert actions[-1] == [PoolStarted()]
    assert lives.started
    return lives


def end(lives: Lives, w: Worker, now: float, how: str = describe_exit(0)) -> list[Order]:
    """Its process ends, and that is acted on."""
    return lives.since(_end, lives, w, now, how)


def _end(lives: Lives, w: Worker, now: float, how: str) -> None:
    lives.bury(w, how, now)
    lives.part(w, now)
    lives.finish_start()
    lives.advance(now)


def come_back(lives: Lives, w: Worker, now: float) -> list[Order]:
    """It is due to be started again, and loads the model."""
    assert lives.handle_time(w, now) == [StartWorker(worker=w.index)]
    connect(w, 200 + w.index)
    return [*finish(lives, w, now), *lives.advance(now)]


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
    lives = new_lives(3)
    finish(lives, lives.workers[0])
    assert fail(lives, lives.workers[1], "one", kinds[0]) == [Send(worker=1, message=Exit())]
    _, told = fail(lives, lives.workers[2], "two", kinds[1])
    assert isinstance(told, PoolStarted)
    assert type(told.error) is expected
    assert str(told.error) == "worker 1 (cpu:1, pid 101): one; worker 2 (cpu:2, pid 102): two"
    assert end(lives, lives.workers[1], 2.0) == []


def test_missing_package_is_named_once_though_one_worker_has_ended_already() -> None:
    lives = new_lives(2)
    fail(lives, lives.workers[0], "install it", "missing")
    assert end(lives, lives.workers[0], 1.0) == []
    _, started = fail(lives, lives.workers[1], "install it", "missing")
    assert isinstance(started, PoolStarted)
    assert str(started.error) == "workers 0 and 1: install it"


def test_worker_that_does_not_get_on_has_no_more_time_and_none_has_time_without_end() -> None:
    lives = new_lives(1)
    [w] = lives.workers
    [latest] = [due + LONGEST_START for due in lives.due_times()]
    lives.extend_start(w, Preparing(seconds=1.0, written=5), 20.0)
    lives.extend_start(w, Preparing(seconds=1.0, written=5), 30.0)
    lives.extend_start(w, Preparing(seconds=0.5, written=9), 30.0)
    assert lives.due_times() == [50.0]
    for hours in range(1, 9):
        now = hours * 3600.0
        lives.extend_start(w, Preparing(seconds=now, written=9 + hours), now)
    assert lives.due_times() == [latest]


def test_start_fails_with_the_error_of_the_build_though_the_worker_was_killed_after_it() -> None:
    lives = new_lives(2)
    first, second = lives.workers
    fail(lives, first, "no memory")
    assert first.kill_at < math.inf
    assert lives.handle_time(first, first.kill_at) == [AskForStacks(worker=0)]
    assert first.kill_at < math.inf
    assert lives.handle_time(first, first.kill_at) == [KillWorker(worker=0)]
    _, started = fail(lives, second, "nor here")
    assert isinstance(started, PoolStarted)
    assert "no memory" in str(started.error)


# Ending.


def test_successor_of_a_worker_with_many_runs_begins_with_one() -> None:
    lives = ready_lives(1)
    [w] = lives.workers
    w.usual_seconds, w.capacity = 0.001, 4
    end(lives, w, 1.0, "killed by SIGSEGV")
    come_back(lives, w, 1.0)
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
    lives = ready_lives(1, restart=replace(RESTART, **policy))
    [w] = lives.workers
    now, found = 0.0, []
    for number, (seconds, answers) in enumerate(lived):
        if number and seconds is not None:
            connect(w, 200)
            finish(lives, w, now)
            assert not lives.circuit_open
        w.answers = answers
        now += seconds or 0.0
        lives.bury(w, "killed by SIGKILL", now)
        [due] = lives.due_times()
        found.append(due - now)
        now = due
        if number < len(lived) - 1:
            assert lives.handle_time(w, now) == [StartWorker(worker=0)]
    assert found == pytest.approx(delays)
    assert lives.circuit_open


def kill_all(lives: Lives, now: float) -> None:
    for w in lives.workers:
        lives.bury(w, "killed by SIGKILL", now)


def test_circuit_is_open_while_a_probe_starts_and_closed_by_the_first_that_is_ready() -> None:
    lives = ready_lives(2, restart=replace(RESTART, budget=0))
    first, second = lives.workers
    kill_all(lives, 1.0)
    text = (
        "no worker serves, the restart budget is spent, and {}: "
        "each of workers 0 and 1 killed by SIGKILL"
    )
    assert str(lives.outage(1.3)) == text.format("the next start is in 0.7 s")
    assert lives.handle_time(first, 2.0) == [StartWorker(worker=0)]
    connect(first, 200)
    assert lives.circuit_open
    assert lives.health(2.0).state == "failed"
    assert str(lives.outage(2.0)) == text.format("a start is under way")
    finish(lives, first, 2.5)
    assert not lives.circuit_open
    assert (lives.health(2.5).state, lives.health(2.5).serving) == ("degraded", 1)
    come_back(lives, second, 2.5)
    assert lives.health(2.5).state == "ready"


def test_probe_that_grows_while_it_loads_is_not_replaced() -> None:
    lives = ready_lives(1, restart=replace(RESTART, budget=0, max_memory_bytes=1000))
    [w] = lives.workers
    kill_all(lives, 1.0)
    lives.handle_time(w, 2.0)
    connect(w, 200)
    lives.retire_if_worn(w, 1001)
    assert lives.advance(2.0) == []
    finish(lives, w, 3.0)
    assert lives.advance(3.0) == []
    assert w.serves
    lives.retire_if_worn(w, 1001)
    assert lives.advance(3.0) == [Send(worker=0, message=Exit())]


# Replacing.


@pytest.mark.parametrize(("answers", "own_bytes"), [(3, 0), (0, 1001)])
def test_worn_worker_is_replaced(answers: int, own_bytes: int) -> None:
    restart = replace(RESTART, max_requests=3, max_memory_bytes=1000)
    lives = ready_lives(1, restart=restart)
    [w] = lives.workers
    w.answers = 2
    lives.retire_if_worn(w, 1000)
    assert lives.advance(1.0) == []
    w.answers = answers
    lives.retire_if_worn(w, own_bytes)
    assert lives.advance(1.0) == [Send(worker=0, message=Exit())]
    end(lives, w, 1.0)
    come_back(lives, w, 1.0)
    assert w.answers == 0


def test_worn_worker_serves_on_while_the_fresh_process_of_another_does_not_start() -> None:
    lives = ready_lives(2, restart=replace(RESTART, budget=0, max_memory_bytes=1000))
    first, second = lives.workers
    for w in lives.workers:
        lives.retire_if_worn(w, 1001)
    assert lives.advance(1.0) == [Send(worker=0, message=Exit())]
    end(lives, first, 1.0)
    lives.handle_time(first, 1.0)
    assert end(lives, first, 1.0, "exited with status 1") == []
    assert first.is_given_up
    assert lives.advance(1.5) == []
    assert second.serves
    assert come_back(lives, first, 1.0 + RESTART.backoff_limit) == [Send(worker=1, message=Exit())]


def test_worker_past_its_budget_is_replaced_before_those_that_serve() -> None:
    lives = ready_lives(2, restart=replace(RESTART, budget=0))
    first, second = lives.workers
    lives.bury(second, "killed by SIGKILL", 1.0)
    lives.replace(lives.workers, asked_for=True)
    assert lives.advance(1.0) == [StartWorker(worker=1)]
    assert first.serves
    connect(second, 200)
    assert finish(lives, second, 2.0) == []
    assert lives.advance(2.0) == [Send(worker=0, message=Exit())]


@pytest.mark.parametrize("answers", [0, 1])
def test_worker_that_does_not_end_to_be_replaced_is_killed_and_says_so(answers: int) -> None:
    lives = ready_lives(1, restart=replace(RESTART, budget=0))
    [w] = lives.workers
    w.answers = answers
    lives.replace(lives.workers, asked_for=True)
    assert lives.advance(1.0) == [Send(worker=0, message=Exit())]
    assert lives.handle_time(w, 1.0 + TIMEOUTS.close) == [AskForStacks(worker=0)]
    assert lives.handle_time(w, 7.0) == [KillWorker(worker=0)]
    assert end(lives, w, 7.0, "killed by SIGKILL") == []
    assert w.last_error.endswith("did not stop in time")
    assert come_back(lives, w, 7.0) == [WorkersRestarted()]


def test_replaced_worker_may_take_as_long_as_it_likes_and_its_end_is_planned_all_the_same() -> None:
    endless = Timeouts(close=math.inf)
    lives = ready_lives(1, timeouts=endless, restart=replace(RESTART, budget=0))
    [w] = lives.workers
    lives.replace(lives.workers, asked_for=True)
    assert lives.advance(1.0) == [Send(worker=0, message=Exit())]
    assert end(lives, w, 7.0) == []
    assert not w.last_error
    assert not lives.circuit_open
    assert come_back(lives, w, 7.0) == [WorkersRestarted()]


# Health.


def test_worker_with_unlimited_time_to_stop_a_run_is_well() -> None:
    lives = ready_lives(1, timeouts=Timeouts(cancel_grace=math.inf))
    assert lives.health(1.0).state == "ready"


def test_health_is_told_once_for_each_change() -> None:
    lives = ready_lives(2)
    [told] = lives.announce(1.0)
    assert isinstance(told, Announce)
    assert (told.health.state, told.health.serving) == ("ready", 2)
    assert lives.announce(2.0) == []
    lives.bury(lives.workers[0], "killed by SIGKILL", 3.0)
    [told] = lives.announce(3.0)
    assert isinstance(told, Announce)
    assert (told.health.state, told.health.serving) == ("degraded", 1)
    # That it is about to be started is nothing new.
    lives.handle_time(lives.workers[0], 3.0)
    assert lives.announce(3.0) == []
    lives.close(4.0, 5.0)
    assert lives.announce(4.0) == []


def test_probe_under_way_has_a_new_budget_when_its_worker_is_replaced() -> None:
    lives = ready_lives(1, restart=replace(RESTART, budget=1))
    [w] = lives.workers
    lives.bury(w, "killed by SIGKILL", 1.0)
    lives.handle_time(w, 1.0)
    lives.bury(w, "killed by SIGKILL", 1.0)
    assert w.budget.spent
    lives.handle_time(w, 2.0)
    connect(w, 200)
    lives.replace(lives.workers, asked_for=True)
    assert lives.advance(2.0) == []
    assert not lives.circuit_open
    # What it loads may be what it could not load before: a start of the new budget, and no answer yet.
    assert end(lives, w, 3.0, "killed by SIGKILL") == []
    assert come_back(lives, w, 3.0) == [WorkersRestarted()]


def test_health_of_a_pool_that_replaces_a_worker_is_told_as_planned() -> None:
    lives = new_lives(2)
    for w in lives.workers:
        finish(lives, w)
    lives.announce(1.0)
    lives.replace(lives.workers[:1])
    lives.advance(1.0)
    [told] = lives.announce(1.0)
    assert isinstance(told, Announce)
    assert (told.health.state, told.planned) == ("degraded", True)
    lives.kill(lives.workers[1], "breaks the protocol")
    [told] = lives.announce(1.0)
    assert isinstance(told, Announce)
    assert (told.health.serving, told.planned) == (0, False)


# Workers of one card, with one slab of weights.

MADE = replace(BUILT, slab=SLAB)


def card_lives(workers: int, *, restart: RestartPolicy = RESTART) -> Lives:
    """Workers of one card that have connected: the first is the leader of the others."""
    lives = Lives(
        [build(i, card=workers) for i in range(workers)], timeouts=TIMEOUTS, restart=restart
    )
    for w in lives.workers:
        assert lives.start(w, 0.0) == [StartWorker(worker=w.index)]
    return lives


def greet(lives: Lives, w: Worker, now: float = 0.0) -> list[Order]:
    """Its process connects; what the master sends it."""
    w.pid = 100 + w.index
    w.state = WorkerState.CONNECTED
    orders: list[Order] = lives.build(w, now)
    return orders


def made(lives: Lives, w: Worker, now: float = 0.0) -> list[Order]:
    """The leader has the model, and has made the slab."""
    return finish(lives, w, now, MADE)


def given(w: Worker) -> list[Order]:
    """What a follower gets: the slab, then BUILD."""
    message = replace(w.build, slab=SLAB[0])
    return [ShareSlab(worker=w.index, leader=0), Send(worker=w.index, message=message)]


def ready_card(workers: int, *, restart: RestartPolicy = RESTART) -> Lives:
    lives = card_lives(workers, restart=restart)
    for w in lives.workers:
        greet(lives, w)
    made(lives, lives.workers[0])
    for w in lives.workers[1:]:
        finish(lives, w)
    assert lives.started
    return lives


def die(lives: Lives, w: Worker, now: float, code: int = -9) -> list[Order]:
    return end(lives, w, now, describe_exit(code))


def test_followers_wait_for_the_slab_without_a_time_limit_and_then_get_it() -> None:
    lives = card_lives(3)
    leader, first, last = lives.workers
    assert greet(lives, first) == []
    assert greet(lives, leader) == [Send(worker=0, message=leader.build)]
    assert lives.due_times() == [TIMEOUTS.start, TIMEOUTS.start]  # the leader's and the last one's
    assert made(lives, leader, 20.0) == given(first)
    assert first.start.due == 20.0 + TIMEOUTS.start
    assert greet(lives, last, 25.0) == given(last)
    assert finish(lives, first) == []
    assert finish(lives, last) == [PoolStarted()]


def test_without_a_slab_each_worker_of_the_card_loads_the_weights_and_is_on_its_own() -> None:
    lives = card_lives(2)
    leader, follower = lives.workers
    greet(lives, follower)
    greet(lives, leader)
    alone = replace(build(1), device="cuda:0", card_workers=2)
    assert finish(lives, leader) == [Send(worker=1, message=alone)]
    assert finish(lives, follower) == [PoolStarted()]
    assert die(lives, leader, 1.0) == []
    assert follower.serves
    assert come_back(lives, leader, 1.0) == []


def test_leader_that_cannot_load_the_model_fails_the_start_of_its_card() -> None:
    lives = card_lives(3)
    for w in lives.workers[::-1]:
        greet(lives, w)
    _, told = fail(lives, lives.workers[0], "no such file")
    assert isinstance(told, PoolStarted)
    assert str(told.error) == "worker 0 (cuda:0, pid 100): no such file"


def test_leaders_death_ends_its_followers_at_no_cost_to_their_budgets() -> None:
    lives = ready_card(3)
    leader, *followers = lives.workers
    for death in range(4):  # more than the budget of a worker
        now = 100.0 * death
        assert die(lives, leader, now) == [KillWorker(worker=1), KillWorker(worker=2)]
        for w in followers:
            assert die(lives, w, now) == []
            assert (w.restart_at, w.budget.spent, len(w.budget.starts)) == (now, False, 0)
            assert lives.handle_time(w, now) == [StartWorker(worker=w.index)]
            assert greet(lives, w, now) == []
        assert (
            lives.health(now)
            .reasons[1]
            .startswith(
                "worker 1 (cuda:0, pid 101) waits for worker 0 (cuda:0), which loads the weights"
            )
        )
        assert lives.handle_time(leader, now) == [StartWorker(worker=0)]
        greet(lives, leader, now)
        assert made(lives, leader, now) == [*given(followers[0]), *given(followers[1])]
        for w in followers:
            finish(lives, w)
        assert all(w.serves for w in lives.workers)


def test_next_slab_is_made_when_the_last_one_is_gone() -> None:
    lives = ready_card(3)
    leader, first, last = lives.workers
    die(lives, leader, 1.0)
    assert lives.handle_time(leader, 1.0) == [StartWorker(worker=0)]
    assert greet(lives, leader, 1.0) == []
    assert leader.start.due == math.inf
    assert die(lives, last, 2.0) == []
    assert die(lives, first, 3.0) == [Send(worker=0, message=leader.build)]
    assert leader.start.due == 3.0 + TIMEOUTS.start


def test_leader_is_replaced_together_with_its_followers_and_after_them() -> None:
    lives = ready_card(2)
    leader, follower = lives.workers
    lives.replace(lives.workers, asked_for=True)
    assert lives.advance(1.0) == [Send(worker=1, message=Exit())]
    assert die(lives, follower, 1.0, 0) == [Send(worker=0, message=Exit())]
    assert lives.handle_time(follower, 1.0) == [StartWorker(worker=1)]
    assert greet(lives, follower, 1.0) == []  # the old slab is not for it
    assert die(lives, leader, 1.0, 0) == []
    assert lives.handle_time(leader, 1.0) == [StartWorker(worker=0)]
    greet(lives, leader, 1.0)
    assert made(lives, leader, 2.0) == given(follower)
    finish(lives, follower)
    assert lives.advance(2.0) == [WorkersRestarted()]
    assert not leader.budget.starts
    assert not follower.budget.starts


def test_leader_that_dies_in_its_build_is_started_once_more_while_followers_wait() -> None:
    lives = card_lives(2)
    leader, follower = lives.workers
    greet(lives, follower)
    greet(lives, leader)
    assert die(lives, leader, 1.0) == []
    assert not follower.doomed
    assert lives.handle_time(leader, 1.0) == [StartWorker(worker=0)]
    greet(lives, leader, 1.0)
    assert made(lives, leader, 2.0) == given(follower)


def test_circuit_opens_when_the_leader_is_past_its_budget_and_closes_with_its_next_slab() -> None:
    lives = ready_card(2, restart=replace(RESTART, budget=0))
    leader, follower = lives.workers
    die(lives, leader, 1.0)
    assert lives.circuit_open
    assert "the next start is in 1.0 s" in str(lives.outage(1.0))
    die(lives, follower, 1.0)
    assert lives.handle_time(leader, 2.0) == [StartWorker(worker=0)]
    greet(lives, leader, 2.0)
    made(lives, leader, 2.0)
    assert not lives.circuit_open


def test_close_ends_a_leader_after_its_followers_or_all_at_once_without_time() -> None:
    lives = ready_card(3)
    assert lives.close(1.0, 5.0) == [Send(worker=1, message=Exit()), Send(worker=2, message=Exit())]
    assert die(lives, lives.workers[1], 1.0, 0) == []
    assert die(lives, lives.workers[2], 1.0, 0) == [Send(worker=0, message=Exit())]
    lives = ready_card(2)
    assert lives.close(1.0, 0.0) == [Send(worker=0, message=Exit()), Send(worker=1, message=Exit())]
    assert [lives.handle_time(w, 1.0) for w in lives.workers] == [
        [KillWorker(worker=0)],
        [KillWorker(worker=1)],
    ]


def test_leader_has_the_time_of_the_close_and_no_more_after_its_followers() -> None:
    lives = ready_card(2)
    leader, follower = lives.workers
    assert lives.close(1.0, 3.0) == [Send(worker=1, message=Exit())]
    assert lives.due_times() == [4.0, 4.0]
    lives.hasten_close(2.0, 1.0)
    assert die(lives, follower, 2.5, 0) == [Send(worker=0, message=Exit())]
    assert lives.due_times() == [3.0]
    assert lives.handle_time(leader, 3.0) == [AskForStacks(worker=0)]


def test_leader_that_can_make_no_slab_any_more_starts_again_within_its_budget() -> None:
    lives = ready_card(2)
    leader, follower = lives.workers
    now = 1.0
    die(lives, leader, now)
    die(lives, follower, now)
    full = replace(BUILT, notes=("the card is full",))
    for _ in range(RESTART.budget):
        now += 2.0
        for w in lives.workers:
            if w.restart_at < math.inf:
                lives.handle_time(w, now)
                greet(lives, w, now)
        assert finish(lives, leader, now, full) == [KillWorker(worker=0)]
        die(lives, leader, now)
        assert leader.last_error.endswith(
            "its card's weights are not shared any more: the card is full"
        )
        assert not follower.counts.restarts > 1
    assert leader.budget.spent
    now = leader.restart_at
    lives.handle_time(leader, now)
    greet(lives, leader, now)
    alone = replace(follower.build, shares_weights=False)
    assert finish(lives, leader, now, full) == [Send(worker=1, message=alone)]


def test_workers_of_different_cards_have_leaders_of_their_own() -> None:
    builds = [replace(build(i), device=f"cuda:{i % 2}", shares_weights=True) for i in range(4)]
    lives = Lives(builds, timeouts=TIMEOUTS, restart=RESTART)
    assert [w.leader and w.leader.index for w in lives.workers] == [None, None, 0, 1]
