"""Tests of mcinfer/scheduler.py: events in, actions out. Time is a number."""

import math
import signal
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from mcinfer.actions import (
    Action,
    DumpStacks,
    HealthChanged,
    KillWorker,
    PoolClosed,
    PoolStarted,
    Release,
    Send,
    SendPredict,
    Settle,
    StartWorker,
    TakeBack,
    WorkersRestarted,
)
from mcinfer.config import Limits, RestartPolicy, Timeouts
from mcinfer.errors import (
    BuildError,
    ClosedError,
    InvalidInputError,
    McinferError,
    PredictError,
    PredictTimeoutError,
    ProtocolError,
    QueueFullError,
    WorkerDiedError,
)
from mcinfer.protocol import (
    VERSION,
    Build,
    BuildFinish,
    Cancel,
    Conversation,
    Error,
    Exit,
    Hello,
    Message,
    Predict,
    Preparing,
    Reply,
    WorkerState,
)
from mcinfer.roster import STACKS_SECONDS, describe_exit
from mcinfer.scheduler import LONG_RUN, SHORT_RUN, Scheduler
from mcinfer.shard_queue import ShardId
from mcinfer.statistics import Health
from mcinfer.tracing import RequestTrace, ShardTrace

TIMEOUTS = Timeouts(start=30.0, predict=10.0, cancel_grace=1.0, close=5.0)
RESTART = RestartPolicy(budget=3, window=60.0, backoff=0.5, backoff_limit=1.0)
SIGSEGV = describe_exit(-signal.SIGSEGV)
SIGKILL = describe_exit(-signal.SIGKILL)
SPECS = (("x", "float32", ("batch", 3)),)
QUEUE_LIMIT = 9
MOST_BYTES = 40
MOST_ROWS = 4


def build(index: int) -> Build:
    return Build(
        model="/model.onnx",
        engine="fake",
        device=f"cpu:{index}",
        cores=(index,),
        shared=False,
        threads=None,
        inter_op_threads=None,
        allow_fallback=False,
        session_config={},
        provider_options={},
    )


def hello(worker: int) -> Hello:
    return Hello(version=VERSION, pid=100 + worker, token="secret")  # noqa: S106


def built() -> BuildFinish:
    return BuildFinish(inputs=SPECS, outputs=SPECS, providers=("CPU",), seconds=0.1)


def build_error(text: str = "no such file") -> Error:
    return Error(kind="build", text=text)


def reply(request: int, shard: int = 0, seconds: float = 0.25) -> Reply:
    return Reply(request=request, shard=shard, outputs=(), seconds=seconds)


def error(request: int, shard: int = 0, kind: str = "predict") -> Error:
    return Error(request=request, shard=shard, kind=kind, text="bad news")


def predict(worker: int, *members: ShardId) -> SendPredict:
    """One run for these requests and shards."""
    return SendPredict(worker=worker, members=members)


class Pool(Scheduler):
    """A scheduler whose announcements are put aside, so that lists of actions speak of the rest.

    Attributes:
        told: The pool's health, as often as another was announced.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: list[Health] = []

    def handle_message(self, now: float, worker: int, message: Message) -> list[Action]:
        return self._put_aside(super().handle_message(now, worker, message))

    def handle_died(
        self, now: float, worker: int, how: str, *, ahead_begun: bool = False
    ) -> list[Action]:
        return self._put_aside(super().handle_died(now, worker, how, ahead_begun=ahead_begun))

    def handle_time(self, now: float) -> list[Action]:
        return self._put_aside(super().handle_time(now))

    def handle_cancel(self, now: float, request: int) -> list[Action]:
        return self._put_aside(super().handle_cancel(now, request))

    def handle_restart(self, now: float) -> list[Action]:
        return self._put_aside(super().handle_restart(now))

    def handle_own_memory(self, now: float, worker: int, size: int) -> list[Action]:
        return self._put_aside(super().handle_own_memory(now, worker, size))

    def handle_drain(self, now: float, timeout: float) -> list[Action]:
        return self._put_aside(super().handle_drain(now, timeout))

    def handle_close(self, now: float, timeout: float) -> list[Action]:
        return self._put_aside(super().handle_close(now, timeout))

    def _put_aside(self, actions: list[Action]) -> list[Action]:
        self.told += [action.health for action in actions if isinstance(action, HealthChanged)]
        return [action for action in actions if not isinstance(action, HealthChanged)]


def new_pool(
    workers: int,
    *,
    timeouts: Timeouts = TIMEOUTS,
    restart: RestartPolicy = RESTART,
    limits: Limits = Limits(),
    max_batch_size: int = 1,
    max_delay: float = 0.0,
    tracing: bool = False,
) -> Pool:
    """A pool whose workers all have their process, and have said nothing yet."""
    scheduler = Pool(
        [build(i) for i in range(workers)],
        timeouts=timeouts,
        restart=restart,
        limits=limits,
        max_batch_size=max_batch_size,
        max_delay=max_delay,
        tracing=tracing,
    )
    assert scheduler.handle_start(0.0) == [StartWorker(worker=i) for i in range(workers)]
    for i in range(workers):
        scheduler.handle_started(i, 100 + i)
    return scheduler


def finish_build(scheduler: Pool, worker: int, now: float = 0.0) -> list[Action]:
    """The worker connects and loads the model; what its BUILD_FINISH led to."""
    assert scheduler.handle_message(now, worker, hello(worker)) == [
        Send(worker=worker, message=build(worker))
    ]
    return scheduler.handle_message(now, worker, built())


def ready_pool(
    workers: int,
    *,
    timeouts: Timeouts = TIMEOUTS,
    restart: RestartPolicy = RESTART,
    limits: Limits = Limits(),
    max_batch_size: int = 1,
    max_delay: float = 0.0,
    tracing: bool = False,
) -> Pool:
    """A pool that has started at time 0."""
    scheduler = new_pool(
        workers,
        timeouts=timeouts,
        restart=restart,
        limits=limits,
        max_batch_size=max_batch_size,
        max_delay=max_delay,
        tracing=tracing,
    )
    actions = [finish_build(scheduler, i) for i in range(workers)]
    assert actions == [[] for _ in range(workers - 1)] + [[PoolStarted()]]
    return scheduler


def restarted(scheduler: Pool, worker: int, now: float) -> list[Action]:
    """The worker's restart is due: it starts and loads; what its BUILD_FINISH led to."""
    assert scheduler.handle_time(now) == [StartWorker(worker=worker)]
    scheduler.handle_started(worker, 200 + worker)
    return finish_build(scheduler, worker, now)


def end_hung(scheduler: Pool, now: float, worker: int) -> None:
    """The worker is found to hang: it is asked where it is, and killed a moment later."""
    assert scheduler.handle_time(now) == [DumpStacks(worker=worker)]
    due = scheduler.next_time()
    assert due is not None
    assert now < due <= now + STACKS_SECONDS
    assert scheduler.handle_time(now + STACKS_SECONDS) == [KillWorker(worker=worker)]


@dataclass(frozen=True)
class Failed:
    """A Settle with an error, or a failed start: exceptions compare by identity, so by their type."""

    request: int | None
    error: type[McinferError]


def outline(actions: Sequence[Action]) -> list[Action | Failed]:
    """The actions, with their errors as `Failed`."""
    shown: list[Action | Failed] = []
    for action in actions:
        if isinstance(action, Settle) and action.error is not None:
            shown.append(Failed(action.request, type(action.error)))
        elif isinstance(action, PoolStarted) and action.error is not None:
            shown.append(Failed(None, type(action.error)))
        else:
            shown.append(action)
    return shown


def text(actions: Sequence[Action]) -> str:
    """The text of the only error among the actions."""
    (exc,) = [a.error for a in actions if isinstance(a, (Settle, PoolStarted)) and a.error]
    return str(exc)


# Giving out shards.


def test_shards_go_to_the_lowest_ready_workers_and_the_rest_waits() -> None:
    pool = ready_pool(2)
    assert pool.handle_request(0.0, 7, (1, 1, 1), 10.0) == [
        predict(0, (7, 0)),
        predict(1, (7, 1)),
    ]
    assert len(pool.ledger.queue) == 1
    assert [w.state for w in pool.statistics()] == ["busy", "busy"]


def test_worker_that_answers_gets_the_next_shard() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 7, (1, 1, 1), 10.0)
    assert pool.handle_message(1.0, 1, reply(7, 1)) == [predict(1, (7, 2))]
    assert len(pool.ledger.queue) == 0


def test_request_settles_once_all_its_shards_are_answered_and_is_released() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 7, (1, 1), 10.0)
    assert pool.handle_message(1.0, 1, reply(7, 1)) == []
    assert pool.handle_message(2.0, 0, reply(7, 0)) == [
        Settle(request=7),
        Release(request=7),
    ]
    assert (pool.ledger.accepted, pool.ledger.succeeded, pool.ledger.in_flight) == (1, 1, 0)
    first, second = pool.statistics()
    assert (first.completed, first.failed, first.busy_seconds) == (1, 0, 0.25)
    assert (second.completed, second.failed, second.busy_seconds) == (1, 0, 0.25)


def test_requests_are_served_in_the_order_in_which_they_came() -> None:
    pool = ready_pool(1)
    for request in (1, 2, 3):
        pool.handle_request(0.0, request, (1,), 10.0)
    for request in (1, 2):
        actions = pool.handle_message(1.0, 0, reply(request))
        assert actions[-1] == predict(0, (request + 1, 0))


def test_request_beyond_the_queue_limit_is_refused_and_changes_nothing() -> None:
    pool = ready_pool(1, limits=Limits(queue=2))
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_request(0.0, 2, (1, 1, 1, 1, 1), 10.0)
    with pytest.raises(QueueFullError, match=r"2 requests .* the limit \(Limits.queue\) is 2"):
        pool.handle_request(0.0, 3, (1,), 10.0)
    assert (pool.ledger.accepted, pool.ledger.in_flight, len(pool.ledger.queue)) == (2, 2, 5)
    pool.handle_message(1.0, 0, reply(1))
    assert pool.handle_request(1.0, 3, (1,), 10.0) == []


def test_request_before_the_start_is_refused() -> None:
    pool = new_pool(1)
    with pytest.raises(ClosedError):
        pool.handle_request(0.0, 1, (1,), 10.0)


# Bad requests.


@pytest.mark.parametrize(
    ("kind", "expected"), [("invalid", InvalidInputError), ("predict", PredictError)]
)
def test_bad_request_fails_alone_and_its_worker_serves_on(
    kind: str, expected: type[McinferError]
) -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_request(0.0, 2, (1,), 10.0)
    actions = pool.handle_message(1.0, 0, error(1, kind=kind))
    assert outline(actions) == [
        Failed(1, expected),
        Release(request=1),
        predict(0, (2, 0)),
    ]
    assert text(actions) == "worker 0 (cpu:0, pid 100): bad news"
    assert (pool.ledger.failed, pool.ledger.in_flight) == (1, 1)
    assert pool.statistics()[0].last_error == "bad news"


def test_failed_shard_cancels_the_others_and_memory_waits_for_them() -> None:
    pool = ready_pool(3)
    pool.handle_request(0.0, 1, (1, 1, 1, 1, 1), 10.0)
    assert outline(pool.handle_message(1.0, 1, error(1, 1))) == [
        Failed(1, PredictError),
        Send(worker=0, message=Cancel(request=1)),
        Send(worker=2, message=Cancel(request=1)),
    ]
    assert len(pool.ledger.queue) == 0
    assert pool.handle_message(2.0, 2, reply(1, 2)) == []
    assert pool.handle_message(3.0, 0, error(1, 0, "cancelled")) == [Release(request=1)]
    assert (pool.ledger.accepted, pool.ledger.failed, pool.ledger.in_flight) == (1, 1, 0)
    assert [w.failed for w in pool.statistics()] == [0, 1, 0]


# Deaths.


def test_shard_of_a_dead_worker_goes_to_another_before_all_that_waits() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 1, (1, 1), 10.0)
    pool.handle_request(0.0, 2, (1,), 10.0)
    assert pool.handle_died(1.0, 0, SIGSEGV) == []
    assert len(pool.ledger.queue) == 2
    assert pool.handle_message(2.0, 1, reply(1, 1)) == [predict(1, (1, 0))]
    assert pool.handle_message(3.0, 1, reply(1, 0)) == [
        Settle(request=1),
        Release(request=1),
        predict(1, (2, 0)),
    ]


def test_shard_of_a_dead_worker_goes_to_an_idle_one_at_once() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 1, (1,), 10.0)
    assert pool.handle_died(1.0, 0, SIGSEGV) == [predict(1, (1, 0))]
    dead, _ = pool.statistics()
    assert (dead.state, dead.pid, dead.failed) == ("gone", None, 1)
    assert dead.last_error == "worker 0 (cpu:0, pid 100) killed by SIGSEGV"


def test_shard_that_killed_two_workers_is_given_up() -> None:
    pool = ready_pool(3)
    pool.handle_request(0.0, 1, (1, 1), 10.0)
    assert pool.handle_died(1.0, 1, SIGSEGV) == [predict(2, (1, 1))]
    actions = pool.handle_died(2.0, 2, describe_exit(3))
    assert outline(actions) == [
        Failed(1, WorkerDiedError),
        Send(worker=0, message=Cancel(request=1)),
    ]
    assert text(actions) == (
        "shard 1 of 2 was given up after 2 workers died on it: "
        "worker 1 (cpu:1, pid 101) killed by SIGSEGV; "
        "worker 2 (cpu:2, pid 102) exited with status 3"
    )
    assert pool.handle_message(3.0, 0, reply(1, 0)) == [Release(request=1)]


def test_deaths_on_two_shards_of_a_request_do_not_add_up() -> None:
    pool = ready_pool(4)
    pool.handle_request(0.0, 1, (1, 1), 10.0)
    assert pool.handle_died(1.0, 0, SIGSEGV) == [predict(2, (1, 0))]
    assert pool.handle_died(1.0, 1, SIGSEGV) == [predict(3, (1, 1))]
    pool.handle_message(2.0, 2, reply(1, 0))
    assert pool.handle_message(2.0, 3, reply(1, 1))[0] == Settle(request=1)


def test_shard_may_kill_the_same_worker_twice() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    assert pool.handle_died(1.0, 0, SIGSEGV) == []
    assert restarted(pool, 0, 1.0) == [predict(0, (1, 0))]
    actions = pool.handle_died(2.0, 0, SIGKILL)
    assert outline(actions) == [Failed(1, WorkerDiedError), Release(request=1)]
    assert "pid 100) killed by SIGSEGV; worker 0 (cpu:0, pid 200) killed by SIGKILL" in text(
        actions
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exited with status 0"), (-11, "killed by SIGSEGV"), (-200, "killed by signal 200")],
)
def test_end_of_a_process_is_told_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


# Deadlines.


def test_request_that_runs_out_of_time_settles_then_its_worker_is_killed_after_the_grace() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 1, (1, 1, 1), 10.0)
    pool.handle_message(1.0, 0, reply(1, 0))
    assert pool.next_time() == 10.0
    assert pool.handle_time(9.99) == []
    actions = pool.handle_time(10.0)
    assert outline(actions) == [
        Failed(1, PredictTimeoutError),
        Send(worker=0, message=Cancel(request=1)),
        Send(worker=1, message=Cancel(request=1)),
    ]
    assert text(actions) == (
        "no answer within 10 s: shard 1 ran on worker 1 (cpu:1, pid 101), "
        "shard 2 ran on worker 0 (cpu:0, pid 100)"
    )
    assert pool.next_time() == 11.0
    assert pool.handle_message(10.5, 0, error(1, 2, "cancelled")) == []
    assert pool.handle_time(10.99) == []
    end_hung(pool, 11.0, 1)
    assert pool.handle_died(11.1, 1, SIGKILL) == [Release(request=1)]
    assert "did not stop in time" in pool.statistics()[1].last_error


def test_request_that_runs_out_of_time_in_the_queue_says_that_it_waited() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 100.0)
    pool.handle_request(0.0, 2, (1,), 10.0)
    actions = pool.handle_time(10.0)
    assert outline(actions) == [Failed(2, PredictTimeoutError), Release(request=2)]
    assert text(actions) == "no answer within 10 s: shard 0 waited for a worker"
    assert len(pool.ledger.queue) == 0


def test_grace_counts_from_when_the_deadline_was_noticed() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    assert outline(pool.handle_time(15.0)) == [
        Failed(1, PredictTimeoutError),
        Send(worker=0, message=Cancel(request=1)),
    ]
    assert pool.next_time() == 16.0


def test_answer_within_the_grace_keeps_the_worker() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_time(10.0)
    assert pool.handle_message(10.5, 0, error(1, kind="cancelled")) == [Release(request=1)]
    assert pool.next_time() is None
    assert pool.handle_time(100.0) == []
    assert pool.handle_request(100.0, 2, (1,), 10.0) == [predict(0, (2, 0))]
    assert pool.statistics()[0].failed == 0


def test_late_reply_only_releases() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_time(10.0)
    assert pool.handle_message(10.5, 0, reply(1)) == [Release(request=1)]
    assert (pool.ledger.accepted, pool.ledger.succeeded, pool.ledger.failed) == (1, 0, 1)


def test_worker_whose_reply_crosses_its_kill_gets_no_more_shards() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_request(0.0, 2, (1,), 99.0)
    pool.handle_time(10.0)
    end_hung(pool, 11.0, 0)
    assert pool.handle_message(11.0, 0, reply(1)) == [Release(request=1)]
    assert pool.handle_died(11.1, 0, SIGKILL) == []
    assert restarted(pool, 0, 11.1) == [predict(0, (2, 0))]


def test_request_without_a_deadline_waits_for_no_time() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), math.inf)
    assert pool.next_time() is None
    pool.handle_request(0.0, 2, (1,), 5.0)
    assert pool.next_time() == 5.0


def test_deadlines_of_answered_requests_wake_nobody() -> None:
    pool = ready_pool(1)
    for request in range(1000):
        pool.handle_request(0.0, request, (1,), 10.0)
        pool.handle_message(0.0, 0, reply(request))
    assert pool.next_time() is None


# Cancelling.


def test_cancelled_request_settles_and_stops_its_runs() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1, 1), 10.0)
    assert outline(pool.handle_cancel(0.5, 1)) == [
        Failed(1, ClosedError),
        Send(worker=0, message=Cancel(request=1)),
    ]
    assert (
        pool.ledger.cancelled,
        pool.ledger.failed,
        pool.ledger.in_flight,
        len(pool.ledger.queue),
    ) == (1, 0, 0, 0)
    assert pool.handle_cancel(0.5, 1) == []
    assert pool.handle_message(1.0, 0, error(1, kind="cancelled")) == [Release(request=1)]


def test_cancelled_request_that_waits_is_released_at_once() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_request(0.0, 2, (1,), 10.0)
    assert outline(pool.handle_cancel(0.5, 2)) == [Failed(2, ClosedError), Release(request=2)]
    actions = pool.handle_message(1.0, 0, reply(1))
    assert actions == [Settle(request=1), Release(request=1)]


def test_cancel_of_an_unknown_request_is_nothing() -> None:
    assert ready_pool(1).handle_cancel(0.5, 9) == []


def test_cancelled_run_that_does_not_stop_is_killed_at_its_deadline() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_cancel(0.5, 1)
    assert pool.handle_time(10.0) == []
    assert pool.next_time() == 11.0
    end_hung(pool, 11.0, 0)
    assert pool.handle_died(11.0, 0, SIGKILL) == [Release(request=1)]


# Restarts.


def test_dead_worker_is_started_again_at_once_then_with_growing_delays() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=5))
    due = []
    now = 1.0
    for _ in range(5):
        assert pool.handle_died(now, 0, SIGSEGV) == []
        restart_at = pool.next_time()
        assert restart_at is not None
        due.append(restart_at - now)
        now = restart_at
        assert restarted(pool, 0, now) == []
    assert due == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert pool.statistics()[0].restarts == 5


def test_worker_that_spent_its_budget_comes_back_later_and_the_others_serve() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=1))
    pool.handle_died(1.0, 0, SIGSEGV)
    restarted(pool, 0, 1.0)
    assert pool.handle_died(2.0, 0, SIGSEGV) == []
    assert pool.next_time() == 2.0 + RESTART.backoff_limit
    assert pool.serving == 1
    assert pool.handle_request(2.0, 1, (1,), 10.0) == [predict(1, (1, 0))]
    assert restarted(pool, 0, 3.0) == []
    assert pool.serving == 2


def test_restarts_before_the_window_do_not_count() -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=1, window=60.0))
    pool.handle_died(1.0, 0, SIGSEGV)
    restarted(pool, 0, 1.0)
    pool.handle_died(61.0, 0, SIGSEGV)
    assert pool.next_time() == 61.0
    restarted(pool, 0, 61.0)
    pool.handle_died(120.0, 0, SIGSEGV)
    assert pool.next_time() == 120.0 + RESTART.backoff_limit


def test_first_start_is_no_restart() -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=1))
    pool.handle_died(0.5, 0, SIGSEGV)
    assert pool.next_time() == 0.5


def test_requests_fail_at_once_while_all_workers_are_past_their_budget() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0))
    pool.handle_request(0.0, 1, (1, 1, 1), 10.0)
    assert pool.handle_died(1.0, 0, SIGSEGV) == []
    actions = pool.handle_died(2.0, 1, describe_exit(9))
    assert outline(actions) == [Failed(1, WorkerDiedError), Release(request=1)]
    assert text(actions) == (
        "no worker serves, the restart budget is spent, and the next start is in 0.0 s: "
        "worker 0 (cpu:0, pid 100) killed by SIGSEGV; worker 1 (cpu:1, pid 101) exited with status 9"
    )
    assert outline(pool.handle_request(2.0, 2, (1, 1, 1, 1), 10.0)) == [
        Failed(2, WorkerDiedError),
        Release(request=2),
    ]
    assert (
        pool.ledger.accepted,
        pool.ledger.failed,
        pool.ledger.in_flight,
        len(pool.ledger.queue),
    ) == (2, 2, 0, 0)


def test_requests_fail_at_once_while_a_probe_starts_and_are_taken_once_it_is_ready() -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=0))
    pool.handle_died(1.0, 0, SIGSEGV)
    assert pool.handle_time(2.0) == [StartWorker(worker=0)]
    pool.handle_started(0, 200)
    actions = pool.handle_request(2.0, 1, (1,), 10.0)
    assert outline(actions) == [Failed(1, WorkerDiedError), Release(request=1)]
    assert "a start is under way: worker 0 (cpu:0, pid 100) killed by SIGSEGV" in text(actions)
    assert finish_build(pool, 0, 2.5) == []
    assert pool.handle_request(2.5, 2, (1,), 10.0) == [predict(0, (2, 0))]
    assert [health.state for health in pool.told[-2:]] == ["failed", "ready"]


def test_requests_that_kill_every_probe_open_the_circuit_again_and_no_others_wait() -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=0))
    pool.handle_died(0.0, 0, SIGSEGV)
    for request in range(0, 10, 2):
        now = float(1 + request)
        assert restarted(pool, 0, now) == []
        assert pool.handle_request(now, request, (1,), 10.0) == [predict(0, (request, 0))]
        assert pool.handle_request(now, request + 1, (1,), 10.0) == []
        assert outline(pool.handle_died(now + 1.0, 0, SIGSEGV)) == [
            *(Failed(request, WorkerDiedError), Release(request=request)),
            *(Failed(request + 1, WorkerDiedError), Release(request=request + 1)),
        ]
        assert pool.next_time() == now + 1.0 + RESTART.backoff_limit


def test_requests_wait_for_a_worker_that_comes_back() -> None:
    pool = ready_pool(1)
    pool.handle_died(1.0, 0, SIGSEGV)
    assert pool.handle_request(1.0, 1, (1,), 10.0) == []
    assert restarted(pool, 0, 1.0) == [predict(0, (1, 0))]


def test_model_that_does_not_load_again_counts_against_the_budget_and_is_told() -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=1))
    pool.handle_died(1.0, 0, SIGSEGV)
    pool.handle_time(1.0)
    pool.handle_started(0, 200)
    pool.handle_message(1.0, 0, hello(0))
    assert pool.handle_message(1.0, 0, build_error()) == [Send(worker=0, message=Exit())]
    pool.handle_request(1.0, 1, (1,), 10.0)
    actions = pool.handle_died(1.5, 0, describe_exit(0))
    assert outline(actions) == [Failed(1, WorkerDiedError), Release(request=1)]
    assert "pid 200) exited with status 0 after: no such file" in text(actions)


def test_worker_whose_model_changed_on_disk_is_killed_and_gets_no_shard() -> None:
    pool = ready_pool(1)
    pool.handle_died(1.0, 0, SIGSEGV)
    pool.handle_request(1.0, 1, (1,), 10.0)
    pool.handle_time(1.0)
    pool.handle_started(0, 200)
    pool.handle_message(1.0, 0, hello(0))
    assert pool.handle_message(1.0, 0, replace(built(), inputs=())) == [KillWorker(worker=0)]
    assert pool.handle_request(1.0, 2, (1,), 10.0) == []
    assert pool.handle_died(1.1, 0, SIGKILL) == []
    assert "are not those of the others" in pool.statistics()[0].last_error


# Starting.


def test_pool_has_started_when_every_worker_has_its_model() -> None:
    pool = new_pool(2)
    assert pool.specs is None
    assert finish_build(pool, 1) == []
    assert pool.specs == built()
    assert finish_build(pool, 0) == [PoolStarted()]
    assert pool.next_time() is None
    assert pool.serving == 2
    assert pool.statistics()[0].providers == ("CPU",)


def test_build_errors_are_told_together_when_all_have_answered() -> None:
    pool = new_pool(3)
    for worker in range(3):
        pool.handle_message(1.0, worker, hello(worker))
    assert pool.handle_message(1.0, 0, build_error("no such file")) == [
        Send(worker=0, message=Exit())
    ]
    assert pool.handle_message(1.0, 1, built()) == []
    actions = pool.handle_message(1.0, 2, build_error("bad magic"))
    assert outline(actions) == [Send(worker=2, message=Exit()), Failed(None, BuildError)]
    assert text(actions) == (
        "worker 0 (cpu:0, pid 100): no such file; worker 2 (cpu:2, pid 102): bad magic"
    )


def test_build_error_waits_for_the_workers_that_still_load() -> None:
    pool = new_pool(2)
    pool.handle_message(1.0, 0, hello(0))
    pool.handle_message(1.0, 0, build_error())
    assert pool.handle_died(1.1, 0, describe_exit(0)) == []
    assert outline(finish_build(pool, 1)) == [Failed(None, BuildError)]


def test_failed_start_is_told_once() -> None:
    pool = new_pool(1)
    pool.handle_message(1.0, 0, hello(0))
    assert Failed(None, BuildError) in outline(pool.handle_message(1.0, 0, build_error()))
    assert pool.handle_died(1.1, 0, describe_exit(0)) == []


def test_worker_that_does_not_exit_after_its_build_error_is_killed() -> None:
    pool = new_pool(2)
    pool.handle_message(1.0, 0, hello(0))
    pool.handle_message(1.0, 0, build_error())
    assert pool.next_time() == 2.0
    end_hung(pool, 2.0, 0)


def test_death_in_the_first_build_is_tried_once_more() -> None:
    pool = new_pool(1)
    pool.handle_message(1.0, 0, hello(0))
    assert pool.handle_died(2.0, 0, SIGKILL) == []
    assert pool.next_time() == 2.0
    assert restarted(pool, 0, 2.0) == [PoolStarted()]


def test_second_death_in_the_first_build_fails_the_start() -> None:
    pool = new_pool(1)
    pool.handle_message(1.0, 0, hello(0))
    pool.handle_died(2.0, 0, SIGKILL)
    assert pool.handle_time(2.0) == [StartWorker(worker=0)]
    pool.handle_started(0, 200)
    actions = pool.handle_died(3.0, 0, describe_exit(1))
    assert outline(actions) == [Failed(None, BuildError)]
    assert text(actions) == (
        "worker 0 (cpu:0, pid 100) killed by SIGKILL while building; "
        "worker 0 (cpu:0, pid 200) exited with status 1 while spawned"
    )


def test_process_that_cannot_be_started_fails_the_start_after_one_more_try() -> None:
    pool = Pool([build(0)], timeouts=TIMEOUTS, restart=RESTART, limits=Limits())
    pool.handle_start(0.0)
    assert pool.handle_died(0.0, 0, "could not be started: no memory") == []
    assert pool.handle_time(0.0) == [StartWorker(worker=0)]
    actions = pool.handle_died(0.0, 0, "could not be started: no memory")
    assert outline(actions) == [Failed(None, BuildError)]
    assert "worker 0 (cpu:0) could not be started: no memory" in text(actions)


def test_slow_start_is_killed_and_fails_the_start() -> None:
    pool = new_pool(2)
    finish_build(pool, 0)
    pool.handle_message(1.0, 1, hello(1))
    assert pool.next_time() == 30.0
    assert pool.handle_time(30.0) == [DumpStacks(worker=1)]
    actions = pool.handle_time(30.0 + STACKS_SECONDS)
    assert outline(actions) == [KillWorker(worker=1), Failed(None, BuildError)]
    assert text(actions) == ("worker 1 (cpu:1, pid 101): not ready within 30 s (it was building)")


def test_worker_that_gets_on_with_preparing_has_more_time_to_start() -> None:
    pool = new_pool(1)
    pool.handle_message(1.0, 0, hello(0))
    for now in (25.0, 50.0):
        assert pool.handle_message(now, 0, Preparing(seconds=now, written=1)) == []
    assert pool.handle_time(79.0) == []
    assert pool.next_time() == 80.0
    assert pool.handle_time(80.0) == [DumpStacks(worker=0)]
    # What it sent before it was killed makes it no younger.
    assert pool.handle_message(80.1, 0, Preparing(seconds=80.0, written=1)) == []
    assert outline(pool.handle_time(80.2)) == [KillWorker(worker=0), Failed(None, BuildError)]
    assert pool.handle_message(80.3, 0, Preparing(seconds=80.1, written=1)) == []
    assert pool.handle_time(200.0) == []


@pytest.mark.parametrize("keys", [("a", "", "b"), ("", "a", "b")])
def test_model_that_is_prepared_agrees_with_one_that_is_not_and_with_itself(
    keys: tuple[str, ...],
) -> None:
    pool = new_pool(3)
    for worker, key in enumerate(keys):
        pool.handle_message(0.0, worker, hello(worker))
        actions = pool.handle_message(0.0, worker, replace(built(), prepared=key))
    assert outline(actions) == [KillWorker(worker=2), Failed(None, BuildError)]


@pytest.mark.parametrize("field", ["inputs", "outputs", "weights", "model"])
def test_worker_that_comes_back_with_another_model_serves_nobody(field: str) -> None:
    pool = ready_pool(2)
    pool.handle_died(1.0, 1, SIGKILL)
    pool.handle_time(1.0)
    pool.handle_started(1, 201)
    pool.handle_message(1.0, 1, hello(1))
    other: Any = "another" if field == "model" else (("other", "float32", (4,)),)
    actions = pool.handle_message(1.0, 1, replace(built(), **{field: other}))
    assert actions == [KillWorker(worker=1)]
    assert "are not those of the others" in pool.statistics()[1].last_error


def test_slow_restart_is_killed_and_tried_again() -> None:
    pool = ready_pool(1)
    pool.handle_died(1.0, 0, SIGSEGV)
    pool.handle_time(1.0)
    pool.handle_started(0, 200)
    end_hung(pool, 31.0, 0)
    assert pool.handle_died(31.0, 0, SIGKILL) == []
    assert "not ready within 30 s (it was spawned)" in pool.statistics()[0].last_error
    assert restarted(pool, 0, 31.5) == []


def test_model_that_became_ready_as_it_was_killed_gets_no_shard() -> None:
    pool = ready_pool(1)
    pool.handle_died(1.0, 0, SIGSEGV)
    pool.handle_request(1.0, 1, (1,), 100.0)
    pool.handle_time(1.0)
    pool.handle_started(0, 200)
    pool.handle_message(30.9, 0, hello(0))
    end_hung(pool, 31.0, 0)
    assert pool.handle_message(31.0, 0, built()) == []


def test_models_that_differ_fail_the_start() -> None:
    pool = new_pool(2)
    finish_build(pool, 0)
    pool.handle_message(1.0, 1, hello(1))
    actions = pool.handle_message(1.0, 1, replace(built(), outputs=()))
    assert outline(actions) == [KillWorker(worker=1), Failed(None, BuildError)]
    assert text(actions) == (
        "worker 1 (cpu:1, pid 101): its model's content, inputs, outputs or weights are not those of "
        "the others"
    )


def test_worker_that_dies_while_others_load_is_no_build_error() -> None:
    pool = new_pool(2)
    finish_build(pool, 0)
    assert pool.handle_died(1.0, 0, SIGSEGV) == []
    assert finish_build(pool, 1) == [PoolStarted()]
    assert restarted(pool, 0, 1.0) == []
    assert pool.serving == 2


# Closing.


def test_idle_pool_closes_when_its_workers_have_exited() -> None:
    pool = ready_pool(2)
    assert pool.handle_close(1.0, 5.0) == [
        Send(worker=0, message=Exit()),
        Send(worker=1, message=Exit()),
    ]
    assert pool.is_exiting(0)
    assert pool.handle_close(1.5, 5.0) == []
    assert pool.handle_died(2.0, 0, describe_exit(0)) == []
    assert pool.handle_died(2.0, 1, describe_exit(0)) == [PoolClosed()]
    assert pool.next_time() is None
    assert pool.statistics()[0].last_error == ""
    with pytest.raises(ClosedError):
        pool.handle_request(3.0, 1, (1,), 10.0)


def test_requests_in_flight_fail_when_the_pool_closes() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1, 1), 10.0)
    pool.handle_request(0.0, 2, (1,), 10.0)
    assert outline(pool.handle_close(1.0, 5.0)) == [
        Failed(1, ClosedError),
        Send(worker=0, message=Cancel(request=1)),
        Failed(2, ClosedError),
        Release(request=2),
        Send(worker=0, message=Exit()),
    ]
    assert (pool.ledger.failed, pool.ledger.in_flight, len(pool.ledger.queue)) == (2, 0, 0)
    assert pool.handle_message(2.0, 0, reply(1)) == [Release(request=1)]
    assert pool.handle_died(2.0, 0, describe_exit(0)) == [PoolClosed()]


def test_run_that_ends_with_its_process_is_released_before_the_pool_is_closed() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_close(1.0, 5.0)
    assert pool.handle_died(2.0, 0, SIGKILL) == [Release(request=1), PoolClosed()]


def test_worker_that_does_not_exit_is_killed_then_abandoned() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_close(1.0, 5.0)
    pool.handle_died(1.1, 1, describe_exit(0))
    assert pool.next_time() == 6.0
    end_hung(pool, 6.0, 0)
    abandoned_at = 1.0 + 5.0 + TIMEOUTS.close + 1.0
    assert pool.next_time() == abandoned_at
    assert pool.handle_time(abandoned_at) == [PoolClosed(abandoned=(0,))]
    assert pool.next_time() is None
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


def test_planned_restarts_are_dropped_when_the_pool_closes() -> None:
    pool = ready_pool(1)
    pool.handle_died(1.0, 0, SIGSEGV)
    assert pool.handle_close(1.0, 5.0) == [PoolClosed()]
    assert pool.handle_time(100.0) == []


# Priorities.


def test_request_of_a_higher_priority_goes_before_those_that_wait() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_request(0.0, 2, (1, 1), 10.0)
    pool.handle_request(0.0, 3, (1,), 10.0, priority=1)
    pool.handle_request(0.0, 4, (1,), 10.0, priority=-1)
    for answered, (request, shard) in zip(
        [(1, 0), (3, 0), (2, 0), (2, 1)], [(3, 0), (2, 0), (2, 1), (4, 0)], strict=True
    ):
        actions = pool.handle_message(1.0, 0, reply(*answered))
        assert actions[-1] == predict(0, (request, shard))


def test_shard_of_a_dead_worker_goes_before_any_priority() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0, priority=-1)
    pool.handle_request(0.0, 2, (1,), 10.0, priority=9)
    pool.handle_died(1.0, 0, SIGSEGV)
    assert restarted(pool, 0, 1.0) == [predict(0, (1, 0))]


# Joined runs.

JOIN = ("key", 1)


def joined_pool(
    workers: int = 1, *, requests: int = 3, timeout: float = 20.0, max_delay: float = 0.0
) -> Pool:
    """A pool whose worker 0 runs requests 1, 2, ... as one; others, if any, are at a request of their own."""
    pool = ready_pool(workers, max_batch_size=8, max_delay=max_delay)
    for worker in range(workers):
        pool.handle_request(0.0, 90 + worker, (1,), 99.0)
    for request in range(1, requests + 1):
        assert pool.handle_request(0.0, request, (1,), timeout, join=JOIN) == []
    actions = pool.handle_message(0.0, 0, reply(90))
    run = predict(0, *((request, 0) for request in range(1, requests + 1)))
    assert actions == [Settle(request=90), Release(request=90), run]
    return pool


def counts(pool: Pool) -> tuple[int, int, int, int]:
    """Succeeded, failed, cancelled, in flight; together they are all that was accepted."""
    ledger = pool.ledger
    found = (ledger.succeeded, ledger.failed, ledger.cancelled, ledger.in_flight)
    assert sum(found) == ledger.accepted
    return found


def test_requests_that_waited_for_a_worker_go_as_one_run_and_its_reply_settles_all() -> None:
    pool = joined_pool()
    assert pool.running(0) == ((1, 0), (2, 0), (3, 0))
    assert pool.handle_message(1.0, 0, reply(1)) == [
        action for n in (1, 2, 3) for action in (Settle(request=n), Release(request=n))
    ]
    assert pool.running(0) == ()
    assert counts(pool) == (4, 0, 0, 0)
    worker = pool.statistics()[0]
    assert (worker.runs, worker.completed, worker.failed) == (2, 4, 0)
    assert worker.busy_seconds == 0.25  # the first one's word was more than there was time for


def test_run_is_joined_up_to_its_most_rows_and_of_one_key() -> None:
    pool = ready_pool(1, max_batch_size=4)
    pool.handle_request(0.0, 1, (1,), 10.0)
    for request, join in enumerate([("a", 2), ("b", 1), ("a", 2), ("a", 1)], 2):
        pool.handle_request(0.0, request, (1,), 10.0, join=join)
    assert pool.handle_message(1.0, 0, reply(1))[-1] == predict(0, (2, 0), (4, 0))
    assert pool.handle_message(1.0, 0, reply(2))[-1] == predict(0, (3, 0))
    assert pool.handle_message(1.0, 0, reply(3))[-1] == predict(0, (5, 0))


def test_joined_run_that_fails_is_run_apart_and_only_the_bad_request_fails() -> None:
    pool = joined_pool()
    pool.handle_request(0.5, 4, (1,), 20.0, priority=9, join=JOIN)
    assert pool.handle_message(1.0, 0, error(1)) == [predict(0, (1, 0))]
    assert pool.statistics()[0].last_error == "bad news"
    assert pool.handle_message(1.0, 0, reply(1)) == [
        Settle(request=1),
        Release(request=1),
        predict(0, (2, 0)),
    ]
    actions = pool.handle_message(1.0, 0, error(2, kind="invalid"))
    assert outline(actions) == [
        Failed(2, InvalidInputError),
        Release(request=2),
        predict(0, (3, 0)),
    ]
    assert text(actions) == "worker 0 (cpu:0, pid 100): bad news"
    actions = pool.handle_message(1.0, 0, reply(3))
    assert actions == [Settle(request=3), Release(request=3), predict(0, (4, 0))]
    assert counts(pool) == (3, 1, 0, 1)


def test_members_of_a_failed_run_go_to_all_who_are_ready() -> None:
    pool = joined_pool(3)
    for worker in (1, 2):
        pool.handle_message(0.5, worker, reply(90 + worker))
    assert pool.handle_message(1.0, 0, error(1)) == [
        predict(0, (1, 0)),
        predict(1, (2, 0)),
        predict(2, (3, 0)),
    ]


def test_worker_that_dies_in_a_joined_run_is_blamed_on_nobody() -> None:
    pool = joined_pool(3)
    pool.handle_message(0.5, 1, reply(91))
    assert pool.handle_died(1.0, 0, SIGSEGV) == [predict(1, (1, 0))]
    assert pool.statistics()[0].failed == 3
    # The first death of its own is not its last.
    assert pool.handle_died(1.1, 1, SIGSEGV) == []
    assert pool.handle_message(1.2, 2, reply(92))[-1] == predict(2, (1, 0))
    actions = pool.handle_died(1.3, 2, SIGSEGV)
    assert outline(actions) == [Failed(1, WorkerDiedError), Release(request=1)]
    assert "worker 1 (cpu:1, pid 101) killed by SIGSEGV; worker 2" in text(actions)
    assert "worker 0" not in text(actions)
    assert pool.handle_time(1.1) == [StartWorker(worker=0), StartWorker(worker=1)]
    pool.handle_started(0, 200)
    assert finish_build(pool, 0, 1.4) == [predict(0, (2, 0))]
    assert pool.handle_message(1.5, 0, reply(2))[-1] == predict(0, (3, 0))
    pool.handle_message(1.6, 0, reply(3))
    assert counts(pool) == (5, 1, 0, 0)


def test_run_goes_on_while_any_of_its_requests_is_wanted_and_is_cancelled_with_the_last() -> None:
    pool = joined_pool()
    assert outline(pool.handle_cancel(0.5, 1)) == [Failed(1, ClosedError)]
    assert outline(pool.handle_cancel(0.5, 3)) == [Failed(3, ClosedError)]
    # The run bears the number of its first member, also when that one is settled.
    assert outline(pool.handle_cancel(0.5, 2)) == [
        Failed(2, ClosedError),
        Send(worker=0, message=Cancel(request=1)),
    ]
    assert counts(pool) == (1, 0, 3, 0)
    assert pool.next_time() == 21.0
    released = pool.handle_message(1.0, 0, error(1, kind="cancelled"))
    assert sorted(released, key=str) == [Release(request=n) for n in (1, 2, 3)]
    assert pool.next_time() is None
    assert pool.statistics()[0].failed == 0


def test_neighbours_of_a_cancelled_request_get_their_answers() -> None:
    pool = joined_pool()
    pool.handle_cancel(0.5, 1)
    assert pool.handle_message(1.0, 0, reply(1)) == [
        Release(request=1),
        Settle(request=2),
        Release(request=2),
        Settle(request=3),
        Release(request=3),
    ]
    assert counts(pool) == (3, 0, 1, 0)


def test_cancelled_member_of_a_run_that_fails_is_not_run_again() -> None:
    pool = joined_pool()
    pool.handle_cancel(0.5, 2)
    assert pool.handle_message(1.0, 0, error(1)) == [Release(request=2), predict(0, (1, 0))]
    assert pool.handle_message(1.0, 0, reply(1))[-1] == predict(0, (3, 0))


def test_members_may_be_cancelled_while_they_wait_to_run_apart() -> None:
    pool = joined_pool()
    pool.handle_message(1.0, 0, error(1))
    assert outline(pool.handle_cancel(0.5, 2)) == [Failed(2, ClosedError), Release(request=2)]
    assert pool.handle_message(1.0, 0, reply(1))[-1] == predict(0, (3, 0))


def late_pool() -> Pool:
    """Worker 0 runs requests 1 (5 s), 2 and 3 (20 s) as one; request 1 has just run out of time."""
    pool = ready_pool(1, max_batch_size=8)
    pool.handle_request(0.0, 90, (1,), 99.0)
    for request, timeout in ((1, 5.0), (2, 20.0), (3, 20.0)):
        pool.handle_request(0.0, request, (1,), timeout, join=JOIN)
    pool.handle_message(0.0, 0, reply(90))
    assert pool.next_time() == 5.0
    actions = pool.handle_time(5.0)
    assert outline(actions) == [
        Failed(1, PredictTimeoutError),
        Send(worker=0, message=Cancel(request=1)),
    ]
    assert "shard 0 ran on worker 0 (cpu:0, pid 100)" in text(actions)
    assert pool.next_time() == 6.0
    return pool


def test_run_that_one_member_has_no_more_time_for_is_stopped_and_the_others_run_apart() -> None:
    pool = late_pool()
    assert pool.handle_message(5.5, 0, error(1, kind="cancelled")) == [
        Release(request=1),
        predict(0, (2, 0)),
    ]
    assert pool.next_time() == 20.0
    assert pool.handle_message(6.0, 0, reply(2))[-1] == predict(0, (3, 0))
    assert pool.handle_message(6.0, 0, reply(3))[0] == Settle(request=3)
    assert counts(pool) == (3, 1, 0, 0)


def test_run_that_hears_nothing_is_killed_after_the_grace_and_the_others_run_apart() -> None:
    pool = late_pool()
    end_hung(pool, 6.0, 0)
    assert pool.handle_died(6.1, 0, SIGKILL) == [Release(request=1)]
    assert restarted(pool, 0, 6.1) == [predict(0, (2, 0))]
    assert pool.handle_message(7.0, 0, reply(2))[-1] == predict(0, (3, 0))
    pool.handle_message(7.0, 0, reply(3))
    assert counts(pool) == (3, 1, 0, 0)


def test_reply_that_crosses_the_cancel_answers_the_others() -> None:
    pool = late_pool()
    assert pool.handle_message(5.5, 0, reply(1)) == [
        Release(request=1),
        Settle(request=2),
        Release(request=2),
        Settle(request=3),
        Release(request=3),
    ]
    assert pool.next_time() is None


def test_request_that_is_cancelled_after_its_neighbours_deadline_does_not_put_off_the_kill() -> (
    None
):
    pool = late_pool()
    pool.handle_cancel(0.5, 3)
    assert outline(pool.handle_cancel(0.5, 2)) == [
        Failed(2, ClosedError),
        Send(worker=0, message=Cancel(request=1)),
    ]
    assert pool.next_time() == 6.0


def test_members_that_ran_out_of_time_together_fail_together() -> None:
    pool = joined_pool()
    actions = pool.handle_time(20.0)
    assert [item for item in outline(actions) if isinstance(item, Failed)] == [
        Failed(request, PredictTimeoutError) for request in (1, 2, 3)
    ]
    assert Send(worker=0, message=Cancel(request=1)) in actions
    assert pool.next_time() == 21.0
    pool.handle_message(20.5, 0, error(1, kind="cancelled"))
    assert counts(pool) == (1, 3, 0, 0)


def test_pool_that_closes_in_a_joined_run_fails_all_and_cancels_once() -> None:
    pool = joined_pool()
    assert outline(pool.handle_close(1.0, 5.0)) == [
        Failed(1, ClosedError),
        Failed(2, ClosedError),
        Failed(3, ClosedError),
        Send(worker=0, message=Cancel(request=1)),
        Send(worker=0, message=Exit()),
    ]
    released = pool.handle_message(2.0, 0, reply(1))
    assert released == [Release(request=n) for n in (1, 2, 3)]
    assert pool.handle_died(2.0, 0, describe_exit(0)) == [PoolClosed()]


def test_worker_that_dies_in_a_joined_run_as_the_pool_closes_releases_all() -> None:
    pool = joined_pool()
    pool.handle_close(1.0, 5.0)
    actions = pool.handle_died(2.0, 0, SIGKILL)
    assert sorted(actions[:3], key=str) == [Release(request=n) for n in (1, 2, 3)]
    assert actions[3:] == [PoolClosed()]


def test_answer_to_another_member_than_the_first_is_refused() -> None:
    pool = joined_pool()
    with pytest.raises(ProtocolError):
        pool.handle_message(1.0, 0, reply(2))
    assert pool.running(0) == ((1, 0), (2, 0), (3, 0))
    assert pool.handle_message(1.0, 0, reply(1))[0] == Settle(request=1)


# Waiting for company.


def test_request_is_held_for_others_while_a_worker_is_ready_and_goes_when_it_is_due() -> None:
    pool = ready_pool(2, max_batch_size=8, max_delay=0.5)
    assert pool.handle_request(0.0, 1, (1,), 10.0, join=JOIN) == []
    assert pool.handle_request(0.2, 2, (1,), 10.0, join=JOIN) == []
    assert pool.next_time() == 0.5
    assert pool.handle_time(0.4) == []
    assert pool.handle_time(0.5) == [predict(0, (1, 0), (2, 0))]
    assert pool.next_time() == 10.0


def test_run_that_is_full_waits_for_nobody() -> None:
    pool = ready_pool(1, max_batch_size=4, max_delay=0.5)
    pool.handle_request(0.0, 1, (1,), 10.0, join=("key", 3))
    assert pool.handle_request(0.0, 2, (1,), 10.0, join=JOIN) == [predict(0, (1, 0), (2, 0))]


def test_request_that_cannot_be_joined_waits_for_nobody() -> None:
    pool = ready_pool(1, max_batch_size=4, max_delay=0.5)
    pool.handle_request(0.0, 1, (1,), 10.0, join=JOIN)
    assert pool.handle_request(0.0, 2, (1,), 10.0) == [predict(0, (2, 0))]


def test_held_requests_wake_nobody_while_no_worker_is_ready() -> None:
    pool = ready_pool(1, max_batch_size=8, max_delay=0.5)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_request(0.0, 2, (1,), 20.0, join=JOIN)
    assert pool.next_time() == 10.0
    assert pool.handle_time(0.5) == []
    assert pool.next_time() == 10.0
    # Its time for company was over while it waited for the worker.
    assert pool.handle_message(1.0, 0, reply(1))[-1] == predict(0, (2, 0))


def test_worker_that_becomes_ready_while_a_request_is_held_waits_for_its_due() -> None:
    pool = ready_pool(1, max_batch_size=8, max_delay=0.5)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_request(0.0, 2, (1,), 20.0, join=JOIN)
    assert pool.handle_message(0.2, 0, reply(1)) == [Settle(request=1), Release(request=1)]
    assert pool.next_time() == 0.5
    assert pool.handle_time(0.5) == [predict(0, (2, 0))]


def test_worker_that_was_killed_is_not_ready_for_those_that_are_held() -> None:
    pool = ready_pool(1, max_batch_size=8, max_delay=0.5)
    pool.handle_request(0.0, 1, (1,), 10.0, join=JOIN)
    pool.handle_killed(0, "breaks the protocol")
    assert pool.next_time() == 10.0
    assert pool.handle_time(0.5) == []
    pool.handle_died(0.6, 0, SIGKILL)
    assert restarted(pool, 0, 0.6) == [predict(0, (1, 0))]


@pytest.mark.parametrize("timeout", [0.2, 0.5, 0.9])
def test_request_in_haste_waits_for_others_half_of_its_time_at_most(timeout: float) -> None:
    pool = ready_pool(1, max_batch_size=8, max_delay=0.5)
    pool.handle_request(0.0, 1, (1,), timeout, join=JOIN)
    assert pool.next_time() == timeout / 2
    assert pool.handle_time(timeout / 2) == [predict(0, (1, 0))]


def test_request_without_a_deadline_is_held_no_longer_than_others() -> None:
    pool = ready_pool(1, max_batch_size=8, max_delay=0.5)
    pool.handle_request(0.0, 1, (1,), math.inf, join=JOIN)
    assert pool.next_time() == 0.5
    assert pool.handle_time(0.5) == [predict(0, (1, 0))]


def test_held_request_may_be_cancelled_and_wakes_nobody_then() -> None:
    pool = ready_pool(1, max_batch_size=8, max_delay=0.5)
    pool.handle_request(0.0, 1, (1,), 10.0, join=JOIN)
    assert outline(pool.handle_cancel(0.5, 1)) == [Failed(1, ClosedError), Release(request=1)]
    assert pool.next_time() is None


def test_held_requests_fail_when_the_pool_closes() -> None:
    pool = ready_pool(1, max_batch_size=8, max_delay=0.5)
    pool.handle_request(0.0, 1, (1,), 10.0, join=JOIN)
    assert outline(pool.handle_close(0.1, 5.0)) == [
        Failed(1, ClosedError),
        Release(request=1),
        Send(worker=0, message=Exit()),
    ]


# Messages that should not be.


def test_message_that_may_not_come_is_refused_and_changes_nothing() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    messages: list[Message] = [hello(0), built(), reply(2), error(1, 1), build_error(), Exit()]
    for message in messages:
        with pytest.raises(ProtocolError):
            pool.handle_message(1.0, 0, message)
    assert pool.handle_message(2.0, 0, reply(1))[0] == Settle(request=1)
    assert pool.statistics()[0].failed == 0


# One given ahead, where runs are short.


def pool_of_short_runs(workers: int = 1) -> Pool:
    """A pool whose workers have each answered a short run; requests from 10 on are the test's."""
    pool = ready_pool(workers)
    for worker in range(workers):
        pool.handle_request(0.0, worker, (1,), 10.0)
    for worker in range(workers):
        pool.handle_message(0.0, worker, reply(worker, seconds=SHORT_RUN))
    return pool


def test_busy_worker_with_short_runs_is_given_one_more() -> None:
    pool = pool_of_short_runs()
    assert pool.handle_request(1.0, 10, (1,), 10.0) == [predict(0, (10, 0))]
    assert pool.handle_request(1.0, 11, (1,), 10.0) == [predict(0, (11, 0))]
    assert pool.handle_request(1.0, 12, (1,), 10.0) == []
    assert pool.running(0) == ((10, 0),)
    assert pool.handle_message(1.5, 0, reply(10, seconds=0.001)) == [
        Settle(request=10),
        Release(request=10),
        predict(0, (12, 0)),
    ]
    assert pool.running(0) == ((11, 0),)


def test_busy_worker_with_long_runs_is_given_nothing_more() -> None:
    pool = pool_of_short_runs()
    pool.handle_request(1.0, 10, (1,), 10.0)
    pool.handle_message(1.5, 0, reply(10, seconds=2 * SHORT_RUN))
    pool.handle_request(2.0, 11, (1,), 10.0)
    assert pool.handle_request(2.0, 12, (1,), 10.0) == []


def test_idle_worker_is_given_before_a_busy_one() -> None:
    pool = pool_of_short_runs(2)
    assert pool.handle_request(1.0, 10, (1,), 10.0) == [predict(0, (10, 0))]
    assert pool.handle_request(1.0, 11, (1,), 10.0) == [predict(1, (11, 0))]


def test_worker_that_began_first_is_given_ahead_first() -> None:
    pool = pool_of_short_runs(2)
    pool.handle_request(1.0, 10, (1,), 10.0)
    pool.handle_request(1.0, 11, (1,), 10.0)
    pool.handle_message(1.001, 0, reply(10, seconds=0.001))
    pool.handle_request(1.002, 12, (1,), 10.0)
    assert pool.handle_request(1.003, 13, (1,), 10.0) == [predict(1, (13, 0))]
    assert pool.handle_request(1.003, 14, (1,), 10.0) == [predict(0, (14, 0))]


def test_shard_given_ahead_to_a_worker_that_dies_is_not_blamed() -> None:
    pool = pool_of_short_runs(2)
    for request in (10, 11, 12):
        pool.handle_request(1.0, request, (1,), 10.0)
    assert pool.running(0) == ((10, 0),)
    assert pool.handle_died(2.0, 0, SIGSEGV) == []  # both of worker 0 are first in the queue
    assert pool.handle_message(2.0, 1, reply(11, seconds=0.001))[2:] == [predict(1, (10, 0))]
    assert outline(pool.handle_died(3.0, 1, SIGSEGV))[0] == Failed(10, WorkerDiedError)
    assert not pool.ledger[12].deaths.get(0)
    assert len(pool.ledger.queue) == 1


def test_shard_given_ahead_that_had_begun_is_blamed_for_the_death() -> None:
    pool = pool_of_short_runs(1)
    pool.handle_request(1.0, 10, (1,), 10.0)
    pool.handle_request(1.0, 11, (1,), 10.0)
    # The answer to the first was lost with the worker.
    pool.handle_died(2.0, 0, SIGSEGV, ahead_begun=True)
    assert not pool.ledger[10].deaths.get(0)
    assert len(pool.ledger[11].deaths[0]) == 1
    assert restarted(pool, 0, 2.0)[-1] == predict(0, (11, 0))


def test_nothing_is_given_behind_a_shard_that_a_worker_died_on() -> None:
    pool = pool_of_short_runs(2)
    pool.handle_request(1.0, 10, (1,), 10.0)
    pool.handle_died(2.0, 0, SIGSEGV)
    assert pool.running(1) == ((10, 0),)
    assert pool.handle_request(2.0, 11, (1,), 10.0) == []


def test_shard_that_a_worker_died_on_is_not_given_behind_another() -> None:
    pool = pool_of_short_runs(2)
    pool.handle_request(1.0, 10, (1,), 10.0)
    pool.handle_request(1.0, 11, (1,), 10.0)
    assert pool.handle_died(2.0, 0, SIGSEGV) == []
    assert len(pool.ledger.queue) == 1


def test_time_of_a_shard_given_ahead_is_over_and_the_run_before_it_goes_on() -> None:
    pool = pool_of_short_runs()
    pool.handle_request(1.0, 10, (1,), 100.0)
    pool.handle_request(1.0, 11, (1,), 1.0)
    actions = pool.handle_time(2.0)
    assert "waited at worker 0" in text(actions)
    assert Send(worker=0, message=Cancel(request=11)) in actions
    assert pool.handle_time(2.0 + TIMEOUTS.cancel_grace) == []  # the other's run is not killed
    assert pool.handle_message(20.0, 0, reply(10))[0] == Settle(request=10)
    # Its turn has come: the worker is to skip it, within the grace.
    assert pool.next_turn() == 20.0 + TIMEOUTS.cancel_grace
    end_hung(pool, 20.0 + TIMEOUTS.cancel_grace, 0)


def test_shard_given_ahead_and_cancelled_is_skipped_by_its_worker() -> None:
    pool = pool_of_short_runs()
    pool.handle_request(1.0, 10, (1,), 100.0)
    pool.handle_request(1.0, 11, (1,), 100.0)
    assert Send(worker=0, message=Cancel(request=11)) in pool.handle_cancel(0.5, 11)
    pool.handle_message(2.0, 0, reply(10, seconds=0.001))
    assert pool.handle_message(2.0, 0, error(11, kind="cancelled")) == [Release(request=11)]
    assert pool.handle_time(100.0) == []


def test_run_that_goes_on_for_long_gets_nothing_more_behind_it() -> None:
    pool = pool_of_short_runs()
    pool.handle_request(1.0, 10, (1,), 10.0)
    assert pool.handle_request(1.0 + 2 * SHORT_RUN, 11, (1,), 10.0) == []


def test_one_long_run_is_remembered_for_some_time() -> None:
    pool = pool_of_short_runs()
    pool.handle_request(1.0, 10, (1,), 10.0)
    pool.handle_message(1.1, 0, reply(10, seconds=3 * SHORT_RUN))
    pool.handle_request(2.0, 11, (1,), 10.0)
    pool.handle_message(2.0, 0, reply(11, seconds=0.001))
    pool.handle_request(3.0, 12, (1,), 10.0)
    assert pool.handle_request(3.0, 13, (1,), 10.0) == []


def test_shard_behind_a_long_run_is_taken_back_and_goes_to_another_worker() -> None:
    pool = pool_of_short_runs(2)
    for request in (10, 11, 12):
        pool.handle_request(1.0, request, (1,), 10.0)
    pool.handle_message(1.001, 1, reply(11, seconds=0.001))
    assert pool.next_time() == pool.next_turn() == 1.0 + LONG_RUN
    assert pool.handle_time(1.0 + LONG_RUN) == [TakeBack(worker=0)]
    assert pool.handle_taken_back(1.1, 0) == [predict(1, (12, 0))]
    assert pool.next_turn() == math.inf
    assert pool.handle_message(1.2, 1, reply(12))[0] == Settle(request=12)
    # The worker comes to it at last, and skips it.
    assert pool.handle_message(3.0, 0, reply(10))[0] == Settle(request=10)
    assert pool.handle_message(3.0, 0, error(12, kind="cancelled")) == []
    assert pool.statistics()[0].failed == 0
    assert pool.handle_time(100.0) == []
    assert len(pool.ledger) == 0


def test_shard_that_had_begun_already_is_not_asked_for_twice() -> None:
    pool = pool_of_short_runs()
    pool.handle_request(1.0, 10, (1,), 10.0)
    pool.handle_request(1.0, 11, (1,), 10.0)
    assert pool.handle_time(1.0 + LONG_RUN) == [TakeBack(worker=0)]
    # Its permit was gone: the answers are on their way.
    assert pool.handle_time(2.0) == []
    assert pool.next_time() == 11.0
    assert pool.handle_message(3.0, 0, reply(10))[0] == Settle(request=10)
    assert pool.handle_message(3.0, 0, reply(11))[0] == Settle(request=11)


def test_shard_taken_back_from_a_hung_worker_is_answered_before_that_one_dies() -> None:
    pool = pool_of_short_runs(2)
    for request, timeout in ((10, 2.0), (11, 100.0), (12, 100.0)):
        pool.handle_request(1.0, request, (1,), timeout)
    pool.handle_message(1.001, 1, reply(11, seconds=0.001))
    pool.handle_time(1.0 + LONG_RUN)
    assert pool.handle_taken_back(1.1, 0) == [predict(1, (12, 0))]
    assert pool.handle_message(1.2, 1, reply(12))[0] == Settle(request=12)
    pool.handle_time(3.0)
    end_hung(pool, 3.0 + TIMEOUTS.cancel_grace, 0)
    assert pool.handle_died(5.0, 0, SIGKILL) == [Release(request=10)]


def test_answer_to_a_run_that_was_taken_back_is_refused() -> None:
    pool = pool_of_short_runs()
    pool.handle_request(1.0, 10, (1,), 10.0)
    pool.handle_request(1.0, 11, (1,), 10.0)
    pool.handle_time(1.0 + LONG_RUN)
    assert pool.handle_taken_back(1.1, 0) == []
    assert len(pool.ledger.queue) == 1
    pool.handle_message(1.2, 0, reply(10))
    with pytest.raises(ProtocolError, match="taken back"):
        pool.handle_message(1.3, 0, reply(11))


def test_worker_that_does_not_skip_what_was_taken_back_is_killed() -> None:
    pool = pool_of_short_runs()
    pool.handle_request(1.0, 10, (1,), 10.0)
    pool.handle_request(1.0, 11, (1,), 10.0)
    pool.handle_time(1.0 + LONG_RUN)
    pool.handle_taken_back(1.1, 0)
    pool.handle_message(2.0, 0, reply(10))
    assert pool.next_turn() == 2.0 + TIMEOUTS.cancel_grace
    end_hung(pool, 2.0 + TIMEOUTS.cancel_grace, 0)


def test_nothing_is_given_ahead_where_requests_are_joined() -> None:
    pool = ready_pool(1, max_batch_size=4)
    pool.handle_request(0.0, 0, (1,), 10.0)
    pool.handle_message(0.0, 0, reply(0, seconds=0.001))
    pool.handle_request(1.0, 10, (1,), 10.0)
    assert pool.handle_request(1.0, 11, (1,), 10.0) == []


# Limits in bytes.


def test_request_beyond_the_limit_in_bytes_is_refused_and_changes_nothing() -> None:
    pool = ready_pool(1, limits=Limits(queue_bytes=100))
    pool.handle_request(0.0, 1, (1,), 10.0, size=60)
    with pytest.raises(QueueFullError, match=r"60 bytes .* this one has 41: .* is 100"):
        pool.handle_request(0.0, 2, (1,), 10.0, size=41)
    assert (pool.ledger.accepted, pool.ledger.in_flight_bytes) == (1, 60)
    pool.handle_request(0.0, 2, (1,), 10.0, size=40)
    assert pool.ledger.in_flight_bytes == 100
    pool.handle_cancel(0.5, 1)
    assert pool.ledger.in_flight_bytes == 40


def test_request_that_is_larger_than_the_limit_is_taken_when_there_is_no_other() -> None:
    pool = ready_pool(1, limits=Limits(queue_bytes=100))
    pool.handle_request(0.0, 1, (1,), 10.0, size=1000)
    with pytest.raises(QueueFullError):
        pool.handle_request(0.0, 2, (1,), 10.0, size=1)
    pool.handle_message(1.0, 0, reply(1))
    pool.handle_request(1.0, 2, (1,), 10.0, size=1)


def test_time_of_a_request_counts_from_its_call() -> None:
    pool = ready_pool(1)
    pool.handle_request(3.0, 1, (1,), 10.0, called=1.0)
    assert pool.next_time() == 11.0
    pool.handle_message(4.0, 0, reply(1))
    assert pool.ledger.latency.snapshot().total == 3.0


# Fairness.


def test_clients_take_turns() -> None:
    pool = ready_pool(1)
    for request in range(5):
        pool.handle_request(0.0, request, (1,), 10.0, client="flood")
    pool.handle_request(0.0, 10, (1, 1), 10.0, client="other")
    order = [(0, 0)]
    for _ in range(4):
        pool.handle_message(1.0, 0, reply(*order[-1]))
        order += pool.running(0)
    assert order == [(0, 0), (1, 0), (10, 0), (2, 0), (10, 1)]


# Draining.


def test_pool_that_drains_takes_nothing_more_and_ends_with_its_last_answer() -> None:
    pool = ready_pool(2)
    pool.handle_request(0.0, 1, (1, 1, 1), 10.0)
    assert pool.handle_drain(1.0, math.inf) == []
    with pytest.raises(ClosedError, match="it finishes what it has"):
        pool.handle_request(1.0, 2, (1,), 10.0)
    with pytest.raises(ClosedError):
        pool.handle_restart(1.0)
    assert pool.health(1.0).state == "closing"
    assert pool.health(1.0).reasons == ("1 requests are still to be answered",)
    assert pool.handle_message(2.0, 0, reply(1, 0)) == [predict(0, (1, 2))]
    assert pool.handle_message(2.0, 1, reply(1, 1)) == []
    assert pool.handle_message(3.0, 0, reply(1, 2)) == [
        Settle(request=1),
        Release(request=1),
        Send(worker=0, message=Exit()),
        Send(worker=1, message=Exit()),
    ]
    assert pool.handle_died(3.1, 0, describe_exit(0)) == []
    assert pool.handle_died(3.1, 1, describe_exit(0)) == [PoolClosed()]
    assert pool.health(4.0).state == "closed"


def test_pool_with_nothing_to_answer_ends_at_once_when_it_drains() -> None:
    pool = ready_pool(1)
    assert pool.handle_drain(1.0, math.inf) == [Send(worker=0, message=Exit())]
    assert pool.handle_drain(1.0, 0.0) == []


def test_what_is_not_answered_in_the_time_for_draining_fails() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 100.0)
    assert pool.handle_drain(1.0, 4.0) == []
    assert pool.next_time() == 5.0
    assert outline(pool.handle_time(5.0)) == [
        Failed(1, ClosedError),
        Send(worker=0, message=Cancel(request=1)),
        Send(worker=0, message=Exit()),
    ]
    assert pool.next_time() == 5.0 + TIMEOUTS.close


@pytest.mark.parametrize("end", ["cancel", "deadline", "error", "lost"])
def test_draining_ends_however_the_last_request_ends(end: str) -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=0))
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_drain(1.0, math.inf)
    if end == "cancel":
        actions = pool.handle_cancel(2.0, 1)
    elif end == "deadline":
        actions = pool.handle_time(10.0)
    elif end == "error":
        actions = pool.handle_message(2.0, 0, error(1))
    else:
        actions = pool.handle_died(2.0, 0, SIGSEGV)
    last = PoolClosed() if end == "lost" else Send(worker=0, message=Exit())
    assert actions[-1] == last


def test_worker_that_dies_while_the_pool_drains_costs_no_request() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_drain(1.0, math.inf)
    assert pool.handle_died(2.0, 0, SIGSEGV) == []
    assert restarted(pool, 0, 2.0) == [predict(0, (1, 0))]
    assert pool.handle_message(3.0, 0, reply(1))[0] == Settle(request=1)


def test_closing_ends_the_draining() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_drain(1.0, math.inf)
    assert outline(pool.handle_close(2.0, 5.0))[0] == Failed(1, ClosedError)
    assert pool.handle_died(2.5, 0, describe_exit(0)) == [Release(request=1), PoolClosed()]


# Replacing.


def replaced(scheduler: Pool, worker: int, now: float) -> list[Action]:
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
    assert [w.restarts for w in pool.statistics()] == [3, 3, 3]
    assert [w.last_error for w in pool.statistics()] == ["", "", ""]


def test_busy_worker_answers_what_it_has_and_is_given_nothing_more_before_it_is_replaced() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_request(0.0, 2, (1,), 10.0)
    assert pool.handle_restart(1.0) == []
    assert pool.serving == 0
    assert pool.handle_message(2.0, 0, reply(1)) == [
        Settle(request=1),
        Release(request=1),
        Send(worker=0, message=Exit()),
    ]
    assert replaced(pool, 0, 3.0) == [WorkersRestarted(), predict(0, (2, 0))]


def test_next_worker_is_replaced_when_all_others_serve() -> None:
    pool = ready_pool(3)
    pool.handle_restart(1.0)
    pool.handle_died(1.5, 2, SIGSEGV)
    pool.handle_died(2.0, 0, describe_exit(0))
    assert pool.handle_time(2.0) == [StartWorker(worker=0), StartWorker(worker=2)]
    assert finish_build(pool, 0, 3.0) == []  # worker 2 is not there yet
    assert finish_build(pool, 2, 4.0) == [Send(worker=1, message=Exit())]


def test_worker_that_does_not_end_when_it_is_replaced_is_killed() -> None:
    pool = ready_pool(1)
    pool.handle_restart(1.0)
    end_hung(pool, 1.0 + TIMEOUTS.close, 0)
    assert replaced(pool, 0, 7.0) == [WorkersRestarted()]


def test_worker_whose_run_hangs_is_replaced_when_the_time_of_its_request_is_over() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    assert pool.handle_restart(1.0) == []
    assert outline(pool.handle_time(10.0))[0] == Failed(1, PredictTimeoutError)
    end_hung(pool, 11.0, 0)
    assert pool.handle_died(12.0, 0, SIGKILL) == [Release(request=1)]
    assert restarted(pool, 0, 12.0) == [WorkersRestarted()]


def test_worker_past_its_budget_is_started_at_once_and_with_a_new_one_when_asked_for() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=1))
    pool.handle_died(1.0, 1, SIGSEGV)
    restarted(pool, 1, 1.0)
    pool.handle_died(2.0, 1, SIGSEGV)
    assert pool.next_time() == 2.0 + RESTART.backoff_limit
    assert pool.handle_restart(2.5) == [Send(worker=0, message=Exit())]
    assert replaced(pool, 0, 2.5) == [StartWorker(worker=1)]
    pool.handle_started(1, 300)
    assert finish_build(pool, 1, 2.6) == [WorkersRestarted()]
    pool.handle_died(2.7, 1, SIGSEGV)
    assert pool.next_time() == 2.7


def test_pool_whose_circuit_is_open_serves_again_when_its_workers_are_replaced() -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=0))
    pool.handle_died(1.0, 0, SIGSEGV)
    assert pool.health(1.0).state == "failed"
    assert pool.handle_restart(1.5) == [StartWorker(worker=0)]
    pool.handle_started(0, 300)
    assert pool.handle_request(1.5, 1, (1,), 10.0) == []
    assert finish_build(pool, 0, 3.0) == [WorkersRestarted(), predict(0, (1, 0))]
    assert pool.health(3.0).state == "ready"


def test_replacing_ends_with_an_error_when_a_fresh_worker_fails_and_the_rest_stays() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0))
    pool.handle_restart(1.0)
    pool.handle_died(1.0, 0, describe_exit(0))
    pool.handle_time(1.0)
    pool.handle_started(0, 300)
    pool.handle_message(1.0, 0, hello(0))
    assert pool.handle_message(1.0, 0, build_error()) == [Send(worker=0, message=Exit())]
    [told] = pool.handle_died(2.0, 0, describe_exit(0))
    assert isinstance(told, WorkersRestarted)
    assert isinstance(told.error, WorkerDiedError)
    assert "no such file" in str(told.error)
    assert restarted(pool, 0, 2.0 + RESTART.backoff_limit) == []
    assert (pool.serving, pool.statistics()[1].restarts) == (2, 0)


def test_replacing_that_nobody_waits_for_any_more_goes_no_further() -> None:
    pool = ready_pool(2)
    pool.handle_restart(1.0)
    pool.handle_restart_abandoned()
    assert replaced(pool, 0, 2.0) == []
    assert pool.next_time() is None
    # And may be asked for again.
    assert pool.handle_restart(3.0) == [Send(worker=0, message=Exit())]


def test_replacing_ends_when_the_pool_closes() -> None:
    pool = ready_pool(2)
    pool.handle_restart(1.0)
    told, *rest = pool.handle_close(2.0, 5.0)
    assert isinstance(told, WorkersRestarted)
    assert isinstance(told.error, ClosedError)
    assert rest == [Send(worker=1, message=Exit())]
    assert pool.handle_died(2.0, 0, describe_exit(0)) == []
    assert pool.handle_died(2.0, 1, describe_exit(0)) == [PoolClosed()]


def test_workers_are_not_replaced_before_the_start() -> None:
    with pytest.raises(ClosedError):
        new_pool(1).handle_restart(1.0)


# Recycling.


def test_worker_is_replaced_after_so_many_requests_and_its_successor_counts_anew() -> None:
    pool = ready_pool(1, restart=replace(RESTART, budget=0, max_requests=2))
    for first in (0, 10):
        for request in (first, first + 1, first + 2):
            pool.handle_request(1.0, request, (1,), 10.0)
        pool.handle_message(1.0, 0, reply(first))
        assert pool.handle_message(1.0, 0, reply(first + 1)) == [
            Settle(request=first + 1),
            Release(request=first + 1),
            Send(worker=0, message=Exit()),
        ]
        assert replaced(pool, 0, 2.0) == [predict(0, (first + 2, 0))]
        pool.handle_message(2.0, 0, reply(first + 2))
        pool.handle_request(2.0, first + 3, (1,), 10.0)
        pool.handle_message(2.0, 0, error(first + 3))
        replaced(pool, 0, 3.0)
    assert pool.statistics()[0].restarts == 4


def test_worn_workers_are_never_away_together() -> None:
    pool = ready_pool(2, restart=replace(RESTART, max_requests=1))
    pool.handle_request(0.0, 1, (1, 1), 10.0)
    assert pool.handle_message(1.0, 0, reply(1, 0)) == [Send(worker=0, message=Exit())]
    assert pool.handle_message(1.0, 1, reply(1, 1)) == [Settle(request=1), Release(request=1)]
    assert pool.handle_request(1.0, 2, (1,), 10.0) == [predict(1, (2, 0))]
    assert pool.handle_message(1.0, 1, reply(2)) == [Settle(request=2), Release(request=2)]
    assert replaced(pool, 0, 2.0) == [Send(worker=1, message=Exit())]


def test_worker_that_has_grown_is_replaced() -> None:
    pool = ready_pool(2, restart=replace(RESTART, max_memory_bytes=1000))
    assert pool.handle_own_memory(1.0, 0, 1000) == []
    assert pool.handle_own_memory(1.0, 0, 1001) == [Send(worker=0, message=Exit())]
    assert pool.handle_own_memory(1.0, 1, 1001) == []
    assert pool.handle_own_memory(2.0, 0, 1001) == []  # it is being replaced already
    assert replaced(pool, 0, 3.0) == [Send(worker=1, message=Exit())]
    assert replaced(pool, 1, 4.0) == []
    assert pool.next_time() is None


def test_worn_worker_that_crashes_has_no_new_budget() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0, max_requests=1))
    pool.handle_request(0.0, 1, (1, 1), 10.0)
    pool.handle_request(0.0, 2, (1,), 10.0)
    pool.handle_message(1.0, 0, reply(1, 0))
    pool.handle_message(1.0, 1, reply(1, 1))  # it is to be replaced next, and at a run till then
    assert pool.running(1) == ((2, 0),)
    assert pool.handle_died(2.0, 1, SIGSEGV) == []
    pool.handle_died(2.0, 0, describe_exit(0))
    assert restarted(pool, 0, 2.0) == [predict(0, (2, 0))]
    assert pool.next_time() == 2.0 + RESTART.backoff_limit


# Health.


def test_health_is_told_when_it_changes() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=1))
    assert [str(health) for health in pool.told] == [
        "starting: 1 of 2 workers serve; worker 1 (cpu:1, pid 101) is starting (spawned)",
        "ready: 2 of 2 workers serve",
    ]
    pool.handle_died(1.0, 0, SIGSEGV)
    assert str(pool.told[-1]) == (
        "degraded: 1 of 2 workers serve; worker 0 (cpu:0) starts again in 0.0 s: "
        "worker 0 (cpu:0, pid 100) killed by SIGSEGV"
    )
    restarted(pool, 0, 1.0)
    assert str(pool.told[-1]) == "ready: 2 of 2 workers serve"
    pool.handle_died(2.0, 0, SIGSEGV)
    pool.handle_died(3.0, 1, SIGKILL)
    assert pool.told[-1].serving == 0
    assert [reason[:16] for reason in pool.told[-1].reasons] == [
        "worker 0 (cpu:0)",
        "worker 1 (cpu:1)",
    ]
    assert " is past its budget of 1 restarts within 60 s, next " in pool.told[-1].reasons[0]
    assert pool.handle_time(3.0) == [StartWorker(worker=0), StartWorker(worker=1)]
    pool.handle_started(1, 201)
    finish_build(pool, 1, 3.0)
    pool.handle_died(4.0, 1, SIGKILL)
    finish_build(pool, 0, 4.5)
    assert [health.state for health in pool.told[1:]] == [
        *("ready", "degraded", "ready", "degraded", "degraded", "degraded", "failed", "degraded"),
    ]


def test_health_says_what_a_worker_that_is_away_is_doing() -> None:
    pool = ready_pool(1)

    def reason(now: float = 1.0) -> str:
        health = pool.health(now)
        assert (health.state, health.serving, len(health.reasons)) == ("degraded", 0, 1)
        return health.reasons[0]

    pool.handle_restart(1.0)
    assert reason() == "worker 0 (cpu:0, pid 100) is being replaced"
    pool.handle_died(1.0, 0, describe_exit(0))
    pool.handle_time(1.0)
    pool.handle_started(0, 200)
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
    assert reason() == "worker 0 (cpu:0, pid 200) is being killed: breaks the protocol"


def test_run_that_nobody_waits_for_any_more_is_a_reason_until_it_ends() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_time(10.0)
    assert pool.health(10.4).state == "ready"  # most stop at once
    health = pool.health(10.5)
    assert (health.state, health.serving) == ("degraded", 1)
    assert "has not stopped a run that nobody waits for" in health.reasons[0]
    pool.handle_message(10.6, 0, error(1, kind="cancelled"))
    assert pool.health(10.6).state == "ready"


def test_health_is_told_when_a_run_has_ended_that_nobody_waited_for() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_time(10.0)
    pool.handle_request(10.7, 2, (1,), 10.0)
    pool.handle_cancel(10.7, 2)
    pool.handle_message(10.8, 0, error(1, kind="cancelled"))
    assert pool.told[-1].state == "ready"


def test_health_is_told_when_a_worn_worker_goes() -> None:
    pool = ready_pool(1, restart=replace(RESTART, max_requests=1))
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_message(1.0, 0, reply(1))
    assert pool.told[-1].state == pool.health(1.0).state == "degraded"


def test_health_of_a_pool_that_starts() -> None:
    pool = new_pool(2)
    finish_build(pool, 1)
    health = pool.health(0.0)
    assert (health.state, health.serving, health.workers) == ("starting", 1, 2)
    assert health.reasons == ("worker 0 (cpu:0, pid 100) is starting (spawned)",)


# Traces.


def test_trace_of_a_request_says_when_what_happened() -> None:
    pool = ready_pool(2, tracing=True)
    pool.handle_request(2.0, 7, (3, 2), 10.0, called=1.0)
    pool.handle_message(3.0, 1, reply(7, 1, seconds=0.5))
    [settle, _] = pool.handle_message(4.0, 0, reply(7, 0, seconds=1.5))
    assert isinstance(settle, Settle)
    assert settle.trace == RequestTrace(
        request=7,
        outcome="succeeded",
        error=None,
        rows=5,
        called=1.0,
        queued=2.0,
        settled=4.0,
        joined=4.0,
        shards=(
            trace_of(0, worker=0, sent=2.0, answered=4.0, seconds=1.5),
            trace_of(1, worker=1, sent=2.0, answered=3.0, seconds=0.5),
        ),
    )


def trace_of(
    shard: int, *, worker: int, sent: float, answered: float, seconds: float, attempts: int = 1
) -> ShardTrace:
    return ShardTrace(
        shard=shard,
        worker=worker,
        device=f"cpu:{worker}",
        pid=100 + worker,
        attempts=attempts,
        sent=sent,
        answered=answered,
        run_seconds=seconds,
    )


def test_trace_of_a_shard_whose_worker_died_is_of_the_run_that_answered_it() -> None:
    pool = ready_pool(2, tracing=True)
    pool.handle_request(0.0, 7, (1,), 10.0)
    pool.handle_died(1.0, 0, SIGSEGV)
    [settle, _] = pool.handle_message(4.0, 1, reply(7))
    assert isinstance(settle, Settle)
    assert settle.trace is not None
    assert settle.trace.shards == (
        trace_of(0, worker=1, sent=1.0, answered=4.0, seconds=0.25, attempts=2),
    )


def test_trace_of_a_request_that_failed_says_why_and_what_was_answered() -> None:
    pool = ready_pool(2, tracing=True)
    pool.handle_request(0.0, 7, (1, 1), 10.0)
    pool.handle_message(3.0, 1, reply(7, 1))
    settle = pool.handle_cancel(4.0, 7)[0]
    assert isinstance(settle, Settle)
    assert settle.trace is not None
    assert settle.trace.outcome == "cancelled"
    assert settle.trace.error is settle.error
    assert [run.shard for run in settle.trace.shards] == [1]


def test_nothing_is_traced_that_nobody_asked_for() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 7, (1,), 10.0)
    assert pool.handle_message(1.0, 0, reply(7))[0] == Settle(request=7, trace=None)


# Anything, in any order.


@dataclass
class _Process:
    """What a worker's process is to the model: messages on their way to it and from it."""

    deaf: bool = False
    alive: bool = True
    asked: bool = False  # for its stacks
    killed: bool = False
    permits: int = 0
    conversation: Conversation = field(default_factory=Conversation)
    inbox: deque[Message] = field(default_factory=deque)
    outbox: deque[Message] = field(default_factory=deque)

    @property
    def ended(self) -> bool:
        """Whether its death can be noticed: by itself, or killed."""
        return self.killed or not self.alive

    def say(self, message: Message) -> None:
        self.conversation.advance(message)
        self.outbox.append(message)


@dataclass
class _Asked:
    """What is known of a request from outside."""

    deadline: float
    rows: tuple[int, ...]
    join: tuple[str, int] | None
    due: float
    called: float
    size: int
    replies: dict[int, Reply] = field(default_factory=dict)
    given: Counter[int] = field(default_factory=Counter)
    settled: bool = False
    released: bool = False

    @property
    def shards(self) -> int:
        return len(self.rows)

    @property
    def runs(self) -> int:
        """How often a worker was given any of it."""
        return self.given.total()


JOINS = st.tuples(st.sampled_from("aaab"), st.integers(1, MOST_ROWS - 1))
_Asking = tuple[int, float, int, tuple[str, int] | None, int, int]
"""Shards, seconds, priority, with what it may be joined, bytes, and client."""


class Pools(RuleBasedStateMachine):
    """A shell with workers that answer, fail, die, hang, and are slow, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.scheduler = Pool([], timeouts=TIMEOUTS, restart=RESTART, limits=Limits())
        self.processes: dict[int, _Process] = {}
        self.running: dict[int, deque[tuple[ShardId, ...]]] = {}
        self.joins = True
        self.max_delay = 0.0
        self.requests: dict[int, _Asked] = {}
        self.died_on: set[ShardId] = set()
        self.started: bool | None = None
        self.is_draining = False
        self.is_closing = False
        self.is_closed = False
        self.deaf_next = False
        self.to_replace: dict[int, _Process] | None = None
        self.died_at: dict[int, float] = {}

    @initialize(
        workers=st.integers(1, 3),
        budget=st.integers(0, 4),
        joins=st.booleans(),
        max_delay=st.sampled_from([0.0, 0.3, 2.0]),
        start_at_once=st.sampled_from([True, True, True, True, False]),
        max_requests=st.sampled_from([None, None, 1, 3]),
    )
    def start(
        self,
        workers: int,
        budget: int,
        joins: bool,
        max_delay: float,
        start_at_once: bool,
        max_requests: int | None,
    ) -> None:
        self.joins = joins
        self.max_delay = max_delay
        self.scheduler = Pool(
            [build(i) for i in range(workers)],
            timeouts=TIMEOUTS,
            restart=replace(
                RESTART, budget=budget, max_requests=max_requests, max_memory_bytes=MOST_BYTES
            ),
            limits=Limits(queue=QUEUE_LIMIT, queue_bytes=MOST_BYTES),
            max_batch_size=MOST_ROWS if joins else 1,
            max_delay=max_delay,
            tracing=True,
        )
        self.carry_out(self.scheduler.handle_start(self.now))
        if start_at_once:
            self.play()
            assert self.started

    # What the shell does.

    def carry_out(self, actions: Sequence[Action]) -> None:
        pending, start_failed = deque(actions), False
        while pending:
            match pending.popleft():
                case StartWorker(worker=worker):
                    assert worker not in self.processes
                    assert not self.is_closing
                    if self.scheduler._workers[worker].spent:
                        probe = self.died_at[worker] + RESTART.backoff_limit
                        assert self.now >= probe, "a start past the budget that is too early"
                    process = _Process(deaf=self.deaf_next)
                    self.deaf_next = False
                    self.processes[worker] = process
                    self.scheduler.handle_started(worker, 100 + worker)
                    process.say(hello(worker))
                case SendPredict(worker=worker, members=members):
                    self.check_run(worker, members)
                    self.running.setdefault(worker, deque()).append(members)
                    request, shard = members[0]
                    message = Predict(request=request, shard=shard, inputs=(), outputs=())
                    self.processes[worker].inbox.append(message)
                    self.processes[worker].permits += 1
                case TakeBack(worker=worker):
                    if self.processes[worker].permits:
                        self.processes[worker].permits -= 1
                        self.running[worker][-1] = ()
                        pending += self.scheduler.handle_taken_back(self.now, worker)
                case Send(worker=worker, message=message):
                    if isinstance(message, Cancel):
                        [members, *_] = [
                            run
                            for run in self.running[worker]
                            if run and run[0][0] == message.request
                        ]
                        settled = [a for a in map(self.asked, members) if a.settled]
                        late = any(asked.deadline <= self.now for asked in settled)
                        assert late or len(settled) == len(members), "others want this run"
                    self.processes[worker].inbox.append(message)
                case DumpStacks(worker=worker):
                    assert not self.processes[worker].asked, "asked for its stacks twice"
                    self.processes[worker].asked = True
                case KillWorker(worker=worker):
                    self.processes[worker].killed = True
                case Settle(request=request, error=exc, trace=trace):
                    asked = self.requests[request]
                    assert not asked.settled, "settled twice"
                    asked.settled = True
                    if exc is None:
                        assert len(asked.replies) == asked.shards
                    assert trace is not None
                    self.check_trace(asked, request, exc, trace)
                case Release(request=request):
                    asked = self.requests[request]
                    assert asked.settled, "released before it was settled"
                    assert not asked.released, "released twice"
                    assert request not in self.written(), "released while a worker may write"
                    asked.released = True
                case PoolStarted(error=exc):
                    assert self.started is None, "started twice"
                    self.started = exc is None
                    if exc is not None:
                        # After what was decided before it, which may be to start a worker.
                        start_failed = True
                        pending += self.scheduler.handle_close(self.now, 1.0)
                case WorkersRestarted(error=exc):
                    assert self.to_replace is not None, "nobody waits for that"
                    before, self.to_replace = self.to_replace, None
                    if exc is None:
                        assert not any(
                            self.processes[index] is old for index, old in before.items()
                        )
                case PoolClosed(abandoned=abandoned):
                    assert self.is_closing or self.is_draining or start_failed
                    assert not self.is_closed, "closed twice"
                    assert sorted(self.processes) == [*abandoned]
                    self.is_closed = True
        drained = self.is_draining and not self.open()
        self.is_closing = self.is_closing or start_failed or drained

    def check_trace(
        self, asked: _Asked, request: int, exc: McinferError | None, trace: RequestTrace
    ) -> None:
        """Fail unless this is what became of the request, as seen from outside."""
        assert (trace.request, trace.error, trace.rows) == (request, exc, sum(asked.rows))
        assert (trace.outcome == "succeeded") == (exc is None)
        assert trace.called == asked.called
        assert trace.called <= trace.queued <= trace.settled == self.now
        assert sorted(run.shard for run in trace.shards) == sorted(asked.replies)
        for run in trace.shards:
            assert trace.queued <= run.sent <= run.answered <= trace.settled
            assert run.attempts == asked.given[run.shard]
            assert run.run_seconds == min(asked.replies[run.shard].seconds, run.answered - run.sent)

    def check_run(self, worker: int, members: tuple[ShardId, ...]) -> None:
        """Fail unless these may go now, and together."""
        ahead = [*self.running.get(worker, ())]
        assert () not in ahead, "a permit for what was taken back"
        assert len(ahead) < 2, "a third PREDICT for a busy worker"
        assert not ahead or not self.joins
        assert not self.processes[worker].killed
        assert not self.processes[worker].asked
        assert len({*members}) == len(members)
        others = {member for runs in self.running.values() for run in runs for member in run}
        if ahead:
            alone = [*members, *ahead[0]]
            assert not any(member in self.died_on for member in alone), "a suspect goes alone"
        for request, shard in members:
            asked = self.requests[request]
            assert not asked.settled
            assert shard not in asked.replies
            assert (request, shard) not in others
            if len(members) > 1:
                assert asked.runs == 0, "a shard that had its turn goes alone"
            asked.given[shard] += 1
        if len(members) > 1:
            joins = [asked.join for asked in map(self.asked, members) if asked.join is not None]
            assert len(joins) == len(members)
            assert len({key for key, _ in joins}) == 1
            assert sum(rows for _, rows in joins) <= MOST_ROWS

    def asked(self, member: ShardId) -> _Asked:
        return self.requests[member[0]]

    def written(self) -> set[int]:
        """The requests that a worker has a shard of."""
        return {r for runs in self.running.values() for run in runs for r, _ in run}

    @property
    def circuit_open(self) -> bool:
        return all(w.spent for w in self.scheduler._workers)

    def open(self) -> set[int]:
        return {number for number, asked in self.requests.items() if not asked.settled}

    def deliver(self, worker: int) -> None:
        """The oldest message of the worker reaches the scheduler."""
        message = self.processes[worker].outbox.popleft()
        members: tuple[ShardId, ...] = ()
        if self.running.get(worker) and isinstance(message, (Reply, Error)):
            members = self.running[worker].popleft()
            if isinstance(message, Reply):
                for request, shard in members:
                    self.requests[request].replies[shard] = message
        before = self.open()
        self.carry_out(self.scheduler.handle_message(self.now, worker, message))
        if len(members) > 1:
            # All are answered, or none: nobody knows which of them was to blame.
            wanted = {request for request, _ in members} if isinstance(message, Reply) else set()
            assert before - self.open() == before & wanted

    def bury(self, worker: int) -> None:
        """The end of the worker's process is noticed; what it sent before and was not read is lost."""
        process = self.processes.pop(worker)
        killed = process.killed
        self.died_at[worker] = self.now
        begun = self.scheduler.has_ahead(worker) and not process.permits
        runs, before = self.running.pop(worker, deque()), self.open()
        members = runs[-1 if begun else 0] if runs else ()
        self.died_on.update(members if len(members) == 1 else ())
        how = SIGKILL if killed else SIGSEGV
        self.carry_out(self.scheduler.handle_died(self.now, worker, how, ahead_begun=begun))
        assert len(members) < 2 or before == self.open() or self.circuit_open

    def work(self, worker: int, fail: str | None = None) -> None:
        """The worker's main loop goes one step on: end its run, or take its next message."""
        process = self.processes[worker]
        running = [request for request, _ in process.conversation.runs]
        if any(isinstance(m, Cancel) and m.request in running for m in process.inbox):
            fail = "cancelled"
        if process.conversation.runs:
            request, shard = process.conversation.runs[0]
            # So short that more is given ahead.
            done = reply(request, shard, seconds=0.001)
            process.say(done if fail is None else error(request, shard, fail))
        elif process.inbox:
            message = process.inbox.popleft()
            process.conversation.advance(message)
            if isinstance(message, Predict):
                if process.permits:
                    process.permits -= 1
                else:
                    process.say(error(message.request, message.shard or 0, "cancelled"))
            if isinstance(message, Build):
                process.say(built() if fail is None else build_error())
            elif isinstance(message, Exit):
                process.alive = False

    def idle(self, worker: int) -> bool:
        process = self.processes[worker]
        at_work = process.inbox or process.conversation.runs
        return process.deaf or process.ended or not at_work

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.scheduler.handle_time(self.now))
        due = self.scheduler.next_time()
        assert due is None or due > self.now, "something that was due was not done"
        health = self.scheduler.health(self.now)
        if health.state not in ("starting", "closing", "closed"):
            told = self.scheduler.told[-1]
            assert (told.state, told.serving) == (health.state, health.serving)

    def play(self) -> None:
        """Workers do what they are told, and time passes, until nothing happens any more."""
        for _ in range(1000):
            busy = False
            for worker in [*self.processes]:
                process = self.processes[worker]
                if process.outbox:
                    self.deliver(worker)
                elif process.ended:
                    self.bury(worker)
                elif not self.idle(worker):
                    self.work(worker)
                else:
                    continue
                busy = True
            due = self.scheduler.next_time()
            if not busy and due is None:
                return
            if not busy and due is not None:
                self.pass_time(max(0.0, due - self.now))
        raise AssertionError("the pool never comes to rest")

    # What may happen. Few rules that do much: Hypothesis leaves some rules out of each run.

    @rule(
        requests=st.lists(
            st.tuples(
                st.integers(1, 5),
                st.sampled_from([20.0, 3.0, 0.4, 0.0, math.inf]),
                st.sampled_from([0, 0, 1, -1]),
                st.none() | JOINS | JOINS,
                st.sampled_from([0, 1, 15, MOST_BYTES + 1]),
                st.integers(0, 2),
            ),
            max_size=5,
        ),
        choices=st.lists(st.integers(0, 11), min_size=1, max_size=12),
        fail=st.sampled_from([None, None, "predict", "invalid"]),
    )
    def pool_goes_on(self, requests: list[_Asking], choices: list[int], fail: str | None) -> None:
        """Requests come, and some of what is under way comes to pass; one run or build may fail."""
        for asking in requests if self.started else ():
            self.request(*asking)
        for choice in choices:
            steps = [partial(self.deliver, w) for w, p in self.processes.items() if p.outbox]
            steps += [partial(self.bury, w) for w, p in self.processes.items() if p.ended]
            steps += [partial(self.work, w, fail) for w in self.processes if not self.idle(w)]
            if steps:
                step = steps[choice % len(steps)]
                step()
                fail = fail if step.func == self.deliver else None

    def request(
        self,
        shards: int,
        timeout: float,
        priority: int,
        join: tuple[str, int] | None,
        size: int,
        client: int,
    ) -> None:
        number = len(self.requests)
        join = join if self.joins else None
        rows = (2,) * shards if join is None else (join[1],)
        due = self.now + min(self.max_delay, timeout / 2)
        taken = sum(self.requests[n].size for n in self.open())
        ends = self.is_closing or self.is_draining
        full = len(self.open()) == QUEUE_LIMIT or (taken and taken + size > MOST_BYTES)
        asked = _Asked(self.now + timeout, rows, join, due, self.now, size)
        self.requests[number] = asked
        try:
            actions = self.scheduler.handle_request(
                self.now,
                number,
                rows,
                timeout,
                size=size,
                client=client,
                priority=priority,
                join=join,
            )
        except ClosedError:
            del self.requests[number]
            assert ends
            return
        except QueueFullError:
            del self.requests[number]
            assert full
            return
        assert not full
        assert not ends
        refused = self.circuit_open
        self.carry_out(actions)
        assert asked.settled or not refused

    @rule(
        trouble=st.sampled_from(
            [
                *("dies", "dies", "dies", "all die", "all die", "hangs", "next hangs"),
                *("cancel", "cancel", "close"),
                *("drain", "restart", "restart", "restart", "abandon", "grows"),
            ]
        ),
        which=st.integers(0, 11),
    )
    def trouble_comes(self, trouble: str, which: int) -> None:
        """A worker dies, or never says anything again; a caller cancels, or closes the pool."""
        alive = [process for process in self.processes.values() if process.alive]
        if trouble == "dies" and alive:
            alive[which % len(alive)].alive = False
        elif trouble == "all die":
            for worker in [*self.processes]:
                self.processes[worker].alive = False
                self.bury(worker)
        elif trouble == "hangs" and alive:
            alive[which % len(alive)].deaf = True
        elif trouble == "next hangs":
            self.deaf_next = True
        elif trouble == "cancel" and self.requests:
            number = len(self.requests) - 1 - which % len(self.requests)
            self.carry_out(self.scheduler.handle_cancel(self.now, number))
            assert self.requests[number].settled
        elif trouble == "close" and which < 3 and not self.is_closing:
            self.close(float(which))
        elif trouble == "drain" and which < 6 and self.started and not self.is_closing:
            self.is_draining = True
            seconds = math.inf if which < 3 else float(which)
            self.carry_out(self.scheduler.handle_drain(self.now, seconds))
        else:
            self.workers_are_replaced(trouble, which)

    def workers_are_replaced(self, trouble: str, which: int) -> None:
        """Somebody wants fresh workers, or does not wait for them any more, or one has grown."""
        if trouble == "restart" and self.started and self.to_replace is None:
            try:
                # One that is replaced already is not replaced twice.
                already = self.scheduler._roster._replacing
                index = None if already is None else already.index
                self.to_replace = {w: p for w, p in self.processes.items() if w != index}
                self.carry_out(self.scheduler.handle_restart(self.now))
            except ClosedError:
                assert self.is_closing or self.is_draining
                self.to_replace = None
        elif trouble == "abandon":
            self.to_replace = None
            self.scheduler.handle_restart_abandoned()
        elif trouble == "grows" and self.processes:
            worker = [*self.processes][which % len(self.processes)]
            size = MOST_BYTES + which % 2
            self.carry_out(self.scheduler.handle_own_memory(self.now, worker, size))

    @rule(seconds=st.sampled_from([None, 0.0, 0.3, 1.0, 5.0, 40.0]))
    def time_passes(self, seconds: float | None) -> None:
        """So many seconds, or until something is due."""
        due = self.scheduler.next_time()
        wait = 0.0 if due is None else max(0.0, due - self.now)
        self.pass_time(wait if seconds is None else seconds)

    def close(self, timeout: float) -> None:
        self.is_closing = True
        self.carry_out(self.scheduler.handle_close(self.now, timeout))
        assert all(asked.settled for asked in self.requests.values())

    # What always holds.

    @invariant()
    def every_request_is_counted_once(self) -> None:
        s = self.scheduler
        assert s.ledger.accepted == len(self.requests)
        assert (
            s.ledger.accepted
            == s.ledger.succeeded + s.ledger.failed + s.ledger.cancelled + s.ledger.in_flight
        )
        assert s.ledger.in_flight == sum(not asked.settled for asked in self.requests.values())

    @invariant()
    def every_open_shard_is_answered_running_or_queued(self) -> None:
        open_requests = {n: asked for n, asked in self.requests.items() if not asked.settled}
        shards = sum(asked.shards - len(asked.replies) for asked in open_requests.values())
        given = [member for runs in self.running.values() for run in runs for member in run]
        running = sum(request in open_requests for request, _ in given)
        assert len(self.scheduler.ledger.queue) == shards - running

    @invariant()
    def nothing_waits_while_a_worker_is_ready_but_what_is_held_for_others(self) -> None:
        states = self.scheduler.statistics()
        ready = [w.index for w in states if w.state == WorkerState.READY]
        free = [self.processes[w] for w in ready]
        if not any(not (process.killed or process.asked) for process in free):
            return
        waiting = [self.requests[number] for number in self.open() - self.written()]
        assert sum(asked.shards for asked in waiting) == len(self.scheduler.ledger.queue)
        rows = Counter[str]()
        for asked in waiting:
            assert asked.join is not None
            assert asked.due > self.now
            assert asked.runs == 0
            rows[asked.join[0]] += asked.join[1]
            due = self.scheduler.next_time()
            assert due is not None
            assert due <= asked.due
        assert all(count < MOST_ROWS for count in rows.values())

    @invariant()
    def memory_is_held_as_long_as_a_worker_may_write_it(self) -> None:
        for number, asked in self.requests.items():
            assert asked.released == (asked.settled and number not in self.written())

    @invariant()
    def health_is_that_of_the_workers(self) -> None:
        health = self.scheduler.health(self.now)
        workers = self.scheduler._workers
        fit = [w for w in workers if w.serves]
        for w in workers:
            has_it = w.state in (WorkerState.READY, WorkerState.BUSY)
            process = self.processes.get(w.index)
            assert not w.serves or (has_it and process and not process.killed)
        assert (health.workers, health.serving) == (
            len(workers),
            0 if self.is_closed else len(fit),
        )
        if self.is_closed:
            assert (health.state, health.reasons) == ("closed", ())
        elif self.is_closing or self.is_draining:
            assert health.state == "closing"
        elif not self.started:
            assert health.state == "starting"
        else:
            soon = self.now + TIMEOUTS.cancel_grace / 2
            late = {w.index for w in fit if w.kill_at is not None and w.kill_at <= soon}
            wrong = [w for w in workers if not w.serves or w.index in late]
            assert len(health.reasons) == len(wrong)
            for w, reason in zip(wrong, health.reasons, strict=True):
                assert reason.startswith(f"worker {w.index} ({w.device}")
            broken = "failed" if self.circuit_open else "degraded"
            assert health.state == (broken if wrong else "ready")

    @invariant()
    def circuit_is_open_while_no_worker_serves_and_no_start_within_the_budget_is_left(self) -> None:
        if self.circuit_open:
            assert not self.open()
            assert self.scheduler.serving == 0
        for w in self.scheduler._workers:
            assert not (w.spent and (w.serves or w.retiring))

    @invariant()
    def worker_that_died_is_always_started_again(self) -> None:
        if self.started and not self.is_closing:
            for w in self.scheduler._workers:
                assert w.state is not WorkerState.GONE or w.restart_at is not None

    @invariant()
    def one_worker_at_a_time_is_replaced(self) -> None:
        retiring = [w for w in self.scheduler._workers if w.retiring]
        assert len(retiring) <= 1

    @invariant()
    def statistics_add_up(self) -> None:
        ledger = self.scheduler.ledger
        waiting = [self.requests[number] for number in self.open()]
        assert ledger.in_flight_bytes == sum(asked.size for asked in waiting)
        assert ledger.not_begun == sum(asked.runs == 0 for asked in waiting)
        assert ledger.latency.snapshot().count == ledger.succeeded
        runs = sum(w.runs for w in self.scheduler.statistics())
        assert self.scheduler.batch_sizes.snapshot().count == runs

    @invariant()
    def no_request_is_open_after_its_deadline_was_acted_on(self) -> None:
        due = self.scheduler.next_time()
        for asked in self.requests.values():
            if not asked.settled and asked.deadline < math.inf:
                assert due is not None
                assert due <= asked.deadline

    def teardown(self) -> None:
        self.play()
        # Only who said so waits for ever: a worker may hang, and nothing else end the request.
        finite = [asked for asked in self.requests.values() if asked.deadline < math.inf]
        assert all(asked.settled for asked in finite)
        if self.to_replace is not None:
            assert not all(asked.settled for asked in self.requests.values())
        if self.started and not self.is_closing and not self.open():
            assert self.scheduler.health(self.now).state == "ready", "the pool did not heal"
        if not self.is_closing:
            self.close(1.0)
            self.play()
        assert self.to_replace is None
        assert self.is_closed
        assert all(asked.settled and asked.released for asked in self.requests.values())
        assert self.scheduler.next_time() is None
        assert (self.scheduler.ledger.in_flight, len(self.scheduler.ledger.queue)) == (0, 0)
        assert len(self.scheduler.ledger) == 0
        assert not self.scheduler.ledger._deadlines
        assert all(
            w.conversation == Conversation(state=WorkerState.GONE) for w in self.scheduler._workers
        )


Pools.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)
test_any_order_of_events_settles_and_releases_every_request_once = Pools.TestCase
