"""Tests of mcinfer/scheduler/scheduler.py: events in, orders recorded. Time is a number."""

import math
import signal
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mcinfer.config import Limits, RestartPolicy
from mcinfer.errors import (
    BuildError,
    ClosedError,
    McinferError,
    PredictError,
    PredictTimeoutError,
    ProtocolError,
    QueueFullError,
    WorkerDiedError,
)
from mcinfer.protocol import (
    MAX_RUNS,
    VERSION,
    Attach,
    Build,
    BuildFinish,
    Cancel,
    Error,
    Exit,
    Hello,
    Message,
    Predict,
    Reply,
    WorkerState,
)
from mcinfer.scheduler.dispatch import (
    AHEAD_SECONDS,
    SHORT_RUN,
    UNBOUNDED_RUN,
    WIDE_RUN,
    RequestTable,
)
from mcinfer.scheduler.queue import ShardId
from mcinfer.scheduler.scheduler import (
    KILLED_ENDS,
    MAX_TRIES,
    Scheduler,
)
from mcinfer.scheduler.workers import STACKS_SECONDS, Fate, PoolRules, describe_exit
from mcinfer.statistics import Health, RequestTrace
from tests.conversations import Conversation
from tests.orders import (
    BUILT,
    RESTART,
    SLAB,
    TIMEOUTS,
    Announce,
    AskForStacks,
    KillWorker,
    Order,
    PoolClosed,
    PoolStarted,
    Recorded,
    Recorder,
    Release,
    Send,
    SendRun,
    Settle,
    ShareSlab,
    StartWorker,
    WorkersRestarted,
    build,
)

SIGSEGV = describe_exit(-signal.SIGSEGV)
SIGKILL = describe_exit(-signal.SIGKILL)
QUEUE_LIMIT = 9
MAX_BYTES = 40
MAX_ROWS = 4


def hello(worker: int) -> Hello:
    return Hello(version=VERSION, pid=100 + worker, token="secret")  # noqa: S106


def built(slab: tuple[int, int] | None = None, concurrent: int = 1) -> BuildFinish:
    return replace(BUILT, slab=slab, concurrent=concurrent)


def build_error(text: str = "no such file") -> Error:
    return Error(kind="build", text=text)


def reply(request: int, shard: int = 0, seconds: float = 0.25) -> Reply:
    return Reply(request=request, shard=shard, outputs=(), seconds=seconds)


def error(request: int, shard: int = 0, kind: str = "predict") -> Error:
    return Error(request=request, shard=shard, kind=kind, text="bad news")


def predict(worker: int, *members: ShardId) -> SendRun:
    """One run for these requests and shards."""
    return SendRun(worker=worker, members=members)


class Pool(Recorded):
    """A scheduler whose events return the orders that they led to, but for announcements.

    Attributes:
        told: The pool's health, as often as another was announced.
    """

    def __init__(self, builds: Sequence[Build], **options: Any) -> None:
        recorder = Recorder()
        scheduler = Scheduler(builds, recorder, recorder, PoolRules(**options))
        super().__init__(
            scheduler, recorder, [n for n in dir(scheduler) if n.startswith("handle_")]
        )

    @property
    def told(self) -> list[Health]:
        return [order.health for order in self.recorder.orders if isinstance(order, Announce)]

    def since(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> list[Order]:
        orders = super().since(call, *args, **kwargs)
        return [order for order in orders if not isinstance(order, Announce)]


def new_pool(
    workers: int,
    builds: Sequence[Build] = (),
    pipeline: int = 1,
    tensor: int = 1,
    **options: Any,
) -> Pool:
    """A pool whose workers all have their process, and have said nothing yet."""
    given = {"timeouts": TIMEOUTS, "restart": RESTART, "limits": Limits(), **options}
    builds = builds or [build(i, pipeline, tensor=tensor) for i in range(workers)]
    scheduler = Pool(builds, **given)
    assert scheduler.handle_start(0.0) == [StartWorker(worker=i) for i in range(workers)]
    for i in range(workers):
        scheduler.handle_started(i, 100 + i)
    return scheduler


def finish_build(
    scheduler: Pool, worker: int, now: float = 0.0, concurrent: int = 1
) -> list[Order]:
    """The worker connects and loads the model; what its BUILD_FINISH led to."""
    wanted = scheduler.workers[worker].build
    assert scheduler.handle_message(now, worker, hello(worker)) == [
        Send(worker=worker, message=wanted)
    ]
    orders: list[Order] = scheduler.handle_message(now, worker, built(concurrent=concurrent))
    return orders


def ready_pool(
    workers: int, builds: Sequence[Build] = (), concurrent: int = 1, **options: Any
) -> Pool:
    """A pool that has started at time 0."""
    scheduler = new_pool(workers, builds, **options)
    actions = [finish_build(scheduler, i, concurrent=concurrent) for i in range(workers)]
    assert actions == [[] for _ in range(workers - 1)] + [[PoolStarted()]]
    return scheduler


def restarted(scheduler: Pool, worker: int, now: float, concurrent: int = 1) -> list[Order]:
    """The worker's restart is due: it starts and loads; what its BUILD_FINISH led to."""
    assert scheduler.handle_time(now) == [StartWorker(worker=worker)]
    scheduler.handle_started(worker, 200 + worker)
    return finish_build(scheduler, worker, now, concurrent)


def end_hung(scheduler: Pool, now: float, worker: int) -> None:
    """The worker is found to hang: it is asked where it is, and killed a moment later."""
    assert scheduler.handle_time(now) == [AskForStacks(worker=worker)]
    due = scheduler.next_time()
    assert due < math.inf
    assert now < due <= now + STACKS_SECONDS
    assert scheduler.handle_time(now + STACKS_SECONDS) == [KillWorker(worker=worker)]


@dataclass(frozen=True)
class Failed:
    """A Settle with an error, or a failed start: exceptions compare by identity, so by their type."""

    request: int | None
    error: type[McinferError]


def outline(actions: Sequence[Order]) -> list[Order | Failed]:
    """The actions, with their errors as `Failed`."""
    shown: list[Order | Failed] = []
    for action in actions:
        if isinstance(action, Settle) and action.error is not None:
            shown.append(Failed(action.request, type(action.error)))
        elif isinstance(action, PoolStarted) and action.error is not None:
            shown.append(Failed(None, type(action.error)))
        else:
            shown.append(action)
    return shown


def text(actions: Sequence[Order]) -> str:
    """The text of the only error among the actions."""
    (exc,) = [a.error for a in actions if isinstance(a, (Settle, PoolStarted)) and a.error]
    return str(exc)


# Giving out shards.


def test_request_beyond_the_queue_limit_is_refused_and_changes_nothing() -> None:
    pool = ready_pool(1, limits=Limits(queue=2, queue_bytes=8))
    pool.handle_request(0.0, 1, (1,), 10.0, size=4)
    with pytest.raises(QueueFullError, match=r"requests with 4 bytes .* this one has 5"):
        pool.handle_request(0.0, 2, (1,), 10.0, size=5)
    pool.handle_request(0.0, 2, (1, 1, 1, 1, 1), 10.0)
    with pytest.raises(QueueFullError, match=r"2 requests .* the limit \(Limits.queue\) is 2"):
        pool.handle_request(0.0, 3, (1,), 10.0)
    assert (pool.table.accepted, pool.table.in_flight, len(pool.queue)) == (2, 2, 5)
    pool.handle_message(1.0, 0, reply(1))
    assert pool.handle_request(1.0, 3, (1,), 10.0) == []


# Requests that come alone.


def wide_pool(workers: int = 2, seconds: float = WIDE_RUN, **options: Any) -> Pool:
    """A pool whose worker 0 has had a run of so many seconds on its own cores."""
    builds = [replace(build(i), wide_cores=(0, 1)) for i in range(workers)]
    pool = ready_pool(workers, builds, **options)
    assert pool.handle_request(0.0, 1, (1,), 10.0, may_be_wide=True) == [predict(0, (1, 0))]
    pool.handle_message(1.0, 0, reply(1, seconds=seconds))
    return pool


def is_wide(orders: Sequence[Order]) -> list[bool]:
    return [order.wide for order in orders if isinstance(order, SendRun)]


def test_request_that_comes_alone_has_the_whole_cpu_and_others_have_their_part() -> None:
    pool = wide_pool(3)
    assert is_wide(pool.handle_request(1.0, 2, (1,), 10.0, may_be_wide=True)) == [True]
    assert is_wide(pool.handle_request(1.0, 3, (1,), 10.0, may_be_wide=True)) == [False]
    pool.handle_message(2.0, 0, replace(reply(2), wide=True))
    assert is_wide(pool.handle_request(2.0, 4, (1,), 10.0, may_be_wide=True)) == [False]
    pool.handle_message(3.0, 0, replace(reply(4), wide=True))  # which it was not to be
    pool.handle_message(3.0, 1, reply(3))
    assert is_wide(pool.handle_request(3.0, 5, (1, 1), 10.0, may_be_wide=True)) == [False, False]
    assert [w.wide for w in pool.lives.statistics()] == [1, 0, 0]


def test_worker_that_did_not_take_the_whole_cpu_is_not_counted() -> None:
    pool = wide_pool()
    assert is_wide(pool.handle_request(1.0, 2, (1,), 10.0, may_be_wide=True)) == [True]
    pool.handle_message(2.0, 0, reply(2))
    assert [(w.runs, w.wide) for w in pool.lives.statistics()] == [(2, 0), (0, 0)]


def test_short_runs_and_those_of_a_check_keep_their_part_of_the_cpu() -> None:
    pool = wide_pool(seconds=0.9 * WIDE_RUN)
    assert is_wide(pool.handle_request(1.0, 2, (1,), 10.0, may_be_wide=True)) == [False]
    pool = wide_pool()
    assert is_wide(pool.handle_request(1.0, 2, (1,), 10.0)) == [False]


def test_worker_whose_wide_runs_become_short_goes_back_to_its_part() -> None:
    pool, widths = wide_pool(), []
    for request in range(2, 20):
        widths += is_wide(pool.handle_request(request, request, (1,), 10.0, may_be_wide=True))
        answer = replace(reply(request, seconds=WIDE_RUN / 4), wide=widths[-1])
        pool.handle_message(request + 0.5, 0, answer)
    assert widths[0]
    assert not any(widths[-3:])


def test_request_whose_worker_died_runs_again_on_its_part_of_the_cpu() -> None:
    pool = wide_pool()
    assert is_wide(pool.handle_request(1.0, 2, (1,), 10.0, may_be_wide=True)) == [True]
    assert is_wide(pool.handle_died(2.0, 0, SIGSEGV)) == [False]


def test_worker_that_dies_of_wide_runs_has_no_more_of_them() -> None:
    pool, widths = wide_pool(), []
    for request in range(2, 12, 2):  # of each two, its process dies in the first
        now = float(request)
        widths += is_wide(pool.handle_request(now, request, (1,), 10.0, may_be_wide=True))
        pool.handle_died(now, 0, SIGKILL)
        pool.handle_message(now, 1, reply(request))
        restarted(pool, 0, now)
        assert not any(is_wide(pool.handle_request(now, request + 1, (1,), 10.0, may_be_wide=True)))
        pool.handle_message(now + 0.5, 0, reply(request + 1, seconds=WIDE_RUN))
    assert widths == [True, True, False, False, False]


def test_request_that_others_wait_behind_has_a_part_of_the_cpu() -> None:
    pool = wide_pool(1, max_batch_size=2, max_delay=1.0)
    join = ("k", 1)
    assert pool.handle_request(2.0, 2, (1,), 10.0, join=join, may_be_wide=True) == []
    assert is_wide(pool.handle_time(3.5)) == [True]
    pool.handle_message(4.0, 0, replace(reply(2), wide=True))
    assert pool.handle_request(5.0, 3, (1,), 10.0, join=join, may_be_wide=True) == []
    assert is_wide(pool.handle_request(5.0, 4, (1,), 10.0, join=join, may_be_wide=True)) == [False]


# Bad requests.


def test_failed_shard_cancels_the_others_and_memory_waits_for_them() -> None:
    pool = ready_pool(3)
    pool.handle_request(0.0, 1, (1, 1, 1, 1, 1), 10.0)
    assert outline(pool.handle_message(1.0, 1, error(1, 1))) == [
        Failed(1, PredictError),
        Send(worker=0, message=Cancel(request=1, shard=0)),
        Send(worker=2, message=Cancel(request=1, shard=2)),
    ]
    assert len(pool.queue) == 0
    assert pool.handle_message(2.0, 2, reply(1, 2)) == []
    assert pool.handle_message(3.0, 0, error(1, 0, "cancelled")) == [Release(request=1)]
    assert (pool.table.accepted, pool.table.failed, pool.table.in_flight) == (1, 1, 0)
    assert [w.failed for w in pool.lives.statistics()] == [0, 1, 0]


# Deaths.


def test_shard_is_given_up_after_three_workers_died_on_it() -> None:
    pool = ready_pool(4)
    pool.handle_request(0.0, 1, (1, 1), 10.0)
    assert pool.handle_died(1.0, 1, SIGSEGV) == [predict(2, (1, 1))]
    assert pool.handle_died(1.5, 2, SIGKILL) == [predict(3, (1, 1))]
    actions = pool.handle_died(2.0, 3, describe_exit(3))
    assert outline(actions) == [
        Failed(1, WorkerDiedError),
        Send(worker=0, message=Cancel(request=1, shard=0)),
    ]
    assert text(actions) == (
        "shard 1 of 2 was given up after 3 workers died on it: "
        "worker 1 (cpu:1, pid 101) killed by SIGSEGV; "
        "worker 2 (cpu:2, pid 102) killed by SIGKILL; "
        "worker 3 (cpu:3, pid 103) exited with status 3"
    )
    assert pool.handle_message(3.0, 0, reply(1, 0)) == [Release(request=1)]


def test_run_that_had_not_begun_is_not_tried_by_the_death_of_its_worker() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    pool.handle_message(0.1, 0, reply(1, seconds=0.0001))
    for request in (2, 3):
        assert pool.handle_request(1.0, request, (1,), 10.0) == [predict(0, (request, 0))]
    pool.handle_died(1.0, 0, SIGSEGV)
    assert [pool.table[request].deaths.get(0, []) for request in (2, 3)] == [
        ["worker 0 (cpu:0, pid 100) killed by SIGSEGV"],
        [],
    ]


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
        Send(worker=0, message=Cancel(request=1, shard=2)),
        Send(worker=1, message=Cancel(request=1, shard=1)),
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
    assert "did not stop in time" in pool.lives.statistics()[1].last_error


def test_request_that_runs_out_of_time_in_the_queue_says_that_it_waited() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 100.0)
    pool.handle_request(0.0, 2, (1,), 10.0)
    actions = pool.handle_time(10.0)
    assert outline(actions) == [Failed(2, PredictTimeoutError), Release(request=2)]
    assert text(actions) == "no answer within 10 s: shard 0 waited for a worker"
    assert len(pool.queue) == 0


def test_grace_counts_from_when_the_deadline_was_noticed() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    assert outline(pool.handle_time(15.0)) == [
        Failed(1, PredictTimeoutError),
        Send(worker=0, message=Cancel(request=1, shard=0)),
    ]
    assert pool.next_time() == 16.0


def test_cancelled_run_without_a_deadline_does_not_keep_its_worker_for_ever() -> None:
    """It did: a restart of all workers then never came to its end."""
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), math.inf)
    pool.handle_cancel(0.5, 1)
    end_hung(pool, 0.5 + UNBOUNDED_RUN + TIMEOUTS.cancel_grace, 0)


# Restarts.


def test_follower_that_grows_while_its_leader_is_past_its_budget_serves_with_the_next_one() -> None:
    """It was to be replaced, which was given up at once; then it served no more."""
    restart = replace(RESTART, budget=0, max_memory_bytes=MAX_BYTES)
    builds = [build(i, card=2) for i in range(2)]
    pool = Pool(builds, timeouts=TIMEOUTS, restart=restart, limits=Limits())
    pool.handle_start(0.0)
    for now in (0.0, 9.0):
        for worker in (0, 1):
            pool.handle_message(now, worker, hello(worker))
        pool.handle_message(now, 0, built(SLAB))
        pool.handle_message(now, 1, built())
        if now == 0.0:
            pool.handle_died(1.0, 0, SIGSEGV)
            pool.handle_died(1.0, 1, SIGKILL)
            assert pool.handle_time(1.0) == [StartWorker(worker=1)]
            pool.handle_own_memory(1.1, 1, MAX_BYTES + 1)
            assert pool.handle_time(5.0) == [StartWorker(worker=0)]
    assert pool.health(9.0).state == "ready"


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


def test_worker_that_could_not_load_the_model_and_does_not_end_says_why_it_could_not() -> None:
    pool = ready_pool(1)
    pool.handle_died(1.0, 0, SIGSEGV)
    pool.handle_time(1.0)
    pool.handle_started(0, 200)
    pool.handle_message(1.0, 0, hello(0))
    pool.handle_message(1.0, 0, build_error())
    end_hung(pool, 1.0 + TIMEOUTS.cancel_grace, 0)
    pool.handle_died(3.0, 0, SIGKILL)
    cause = "worker 0 (cpu:0, pid 200): did not stop in time after: no such file"
    assert pool.lives.statistics()[0].last_error.endswith(f"killed by SIGKILL after: {cause}")


# Starting.


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
    pool.handle_started(1, 201)
    pool.handle_message(1.0, 1, hello(1))
    other: Any = "another" if field == "model" else (("other", "float32", (4,)),)
    actions = pool.handle_message(1.0, 1, replace(built(), **{field: other}))
    assert actions == [KillWorker(worker=1)]
    assert "are not those of the others" in pool.lives.statistics()[1].last_error


# Closing.


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


# Joined runs.

JOIN = ("key", 1)


def test_held_shard_goes_in_time_to_a_worker_that_works_on_several_runs_and_has_one() -> None:
    pool = new_pool(1, pipeline=2, max_batch_size=8, max_delay=0.3)
    finish_build(pool, 0)
    pool.handle_request(0.0, 1, (1,), 20.0, join=JOIN)
    assert pool.handle_time(0.3) == [predict(0, (1, 0))]
    assert pool.handle_request(1.0, 2, (1,), 20.0, join=JOIN) == []
    assert pool.handle_own_memory(1.1, 0, 5) == []  # any event that looks at all again
    assert pool.due == 1.3
    assert pool.handle_time(1.3) == [predict(0, (2, 0))]


def test_runs_of_a_pipeline_that_died_run_again_one_at_a_time() -> None:
    pool = ready_pool(1, pipeline=2)
    pool.handle_request(0.0, 0, (1, 1), 60.0)
    assert pool.handle_died(1.0, 0, SIGKILL) == []
    assert restarted(pool, 0, 1.0) == [predict(0, (0, 0))]
    assert pool.handle_request(1.5, 1, (1,), 60.0) == []  # it is not its turn
    assert pool.handle_message(2.0, 0, reply(0, 0)) == [predict(0, (0, 1)), predict(0, (1, 0))]


def joined_pool(workers: int = 1) -> Pool:
    """Worker 0 runs requests 1, 2 and 3 as one; each other worker has a request of its own."""
    pool = ready_pool(workers, max_batch_size=8)
    for worker in range(workers):
        pool.handle_request(0.0, 90 + worker, (1,), 99.0)
    for request in (1, 2, 3):
        assert pool.handle_request(0.0, request, (1,), 20.0, join=JOIN) == []
    actions = pool.handle_message(0.0, 0, reply(90))
    run = predict(0, (1, 0), (2, 0), (3, 0))
    assert actions == [Settle(request=90), Release(request=90), run]
    return pool


def counts(pool: Pool) -> tuple[int, int, int, int]:
    """Succeeded, failed, cancelled, in flight; together they are all that was accepted."""
    table = pool.table
    found = (table.succeeded, table.failed, table.cancelled, table.in_flight)
    assert sum(found) == table.accepted
    return found


def test_run_goes_on_while_any_of_its_requests_is_wanted_and_is_cancelled_with_the_last() -> None:
    pool = joined_pool()
    assert outline(pool.handle_cancel(0.5, 1)) == [Failed(1, ClosedError)]
    assert outline(pool.handle_cancel(0.5, 3)) == [Failed(3, ClosedError)]
    # The run bears the number of its first member, also when that one is settled.
    assert outline(pool.handle_cancel(0.5, 2)) == [
        Failed(2, ClosedError),
        Send(worker=0, message=Cancel(request=1, shard=0)),
    ]
    assert counts(pool) == (1, 0, 3, 0)
    assert pool.next_time() == 21.0
    released = pool.handle_message(1.0, 0, error(1, kind="cancelled"))
    assert sorted(released, key=str) == [Release(request=n) for n in (1, 2, 3)]
    assert pool.next_time() == math.inf
    assert pool.lives.statistics()[0].failed == 0


def test_requests_whose_worker_died_in_a_joined_run_have_two_more_tries_apart() -> None:
    pool = joined_pool(3)
    pool.handle_message(0.5, 1, reply(91))
    assert pool.handle_died(1.0, 0, SIGSEGV) == [predict(1, (1, 0))]
    assert pool.lives.statistics()[0].failed == 3
    assert pool.handle_died(1.1, 1, SIGSEGV) == []
    assert pool.handle_message(1.2, 2, reply(92))[-1] == predict(2, (1, 0))
    actions = pool.handle_died(1.3, 2, SIGSEGV)
    assert outline(actions) == [Failed(1, WorkerDiedError), Release(request=1)]
    assert "worker 1 (cpu:1, pid 101) killed by SIGSEGV; worker 2" in text(actions)
    assert pool.handle_time(1.1) == [StartWorker(worker=0), StartWorker(worker=1)]
    pool.handle_started(0, 200)
    assert finish_build(pool, 0, 1.4) == [predict(0, (2, 0))]
    assert pool.handle_message(1.5, 0, reply(2))[-1] == predict(0, (3, 0))
    pool.handle_message(1.6, 0, reply(3))
    assert counts(pool) == (5, 1, 0, 0)


def test_run_that_one_member_has_no_more_time_for_is_stopped_and_the_others_run_apart() -> None:
    pool = ready_pool(1, max_batch_size=8)
    pool.handle_request(0.0, 90, (1,), 99.0)
    for request, timeout in ((1, 5.0), (2, 20.0), (3, 20.0)):
        pool.handle_request(0.0, request, (1,), timeout, join=JOIN)
    pool.handle_message(0.0, 0, reply(90))
    assert pool.next_time() == 5.0
    actions = pool.handle_time(5.0)
    assert outline(actions) == [
        Failed(1, PredictTimeoutError),
        Send(worker=0, message=Cancel(request=1, shard=0)),
    ]
    assert "shard 0 ran on worker 0 (cpu:0, pid 100)" in text(actions)
    assert pool.next_time() == 6.0
    assert pool.handle_message(5.5, 0, error(1, kind="cancelled")) == [
        Release(request=1),
        predict(0, (2, 0)),
    ]
    assert pool.next_time() == 20.0
    assert pool.handle_message(6.0, 0, reply(2))[-1] == predict(0, (3, 0))
    assert pool.handle_message(6.0, 0, reply(3))[0] == Settle(request=3)
    assert counts(pool) == (3, 1, 0, 0)


# Messages that should not be.


def test_message_that_may_not_come_is_refused_and_changes_nothing() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 10.0)
    messages: list[Message] = [hello(0), built(), reply(2), error(1, 1), build_error(), Exit()]
    for message in messages:
        with pytest.raises(ProtocolError):
            pool.handle_message(1.0, 0, message)
    assert pool.handle_message(2.0, 0, reply(1))[0] == Settle(request=1)
    assert pool.lives.statistics()[0].failed == 0


# Several runs of a worker, where they are short.


def pool_of_short_runs(workers: int = 1, *, seconds: float = SHORT_RUN, tensor: int = 1) -> Pool:
    """A pool whose workers have each answered a run of so many seconds; the test's requests begin at 10."""
    pool = ready_pool(workers, tensor=tensor)
    pool.handle_request(0.0, 0, (1,) * workers, 10.0)
    for worker in range(workers):
        pool.handle_message(0.0, worker, reply(0, worker, seconds=seconds))
    return pool


def ask(pool: Pool, now: float, *requests: int, timeout: float = 10.0) -> list[Order]:
    """Requests of one shard each come."""
    return [a for request in requests for a in pool.handle_request(now, request, (1,), timeout)]


@pytest.mark.parametrize(
    ("seconds", "capacity"),
    [(0.25, 1), (0.011, 1), (SHORT_RUN, 2), (0.001, 4), (0.0002, MAX_RUNS), (0.0, MAX_RUNS)],
)
def test_worker_holds_as_many_runs_as_take_some_milliseconds(seconds: float, capacity: int) -> None:
    pool = pool_of_short_runs(seconds=seconds)
    given = ask(pool, 1.0, *range(10, 30))
    assert given == [predict(0, (request, 0)) for request in range(10, 10 + capacity)]
    assert pool.workers[0].runs[0].members == ((10, 0),)
    assert pool.handle_message(1.001, 0, reply(10, seconds=seconds)) == [
        Settle(request=10),
        Release(request=10),
        predict(0, (10 + capacity, 0)),
    ]


def test_seconds_that_a_worker_says_are_no_more_than_there_were() -> None:
    pool = ready_pool(1)
    ask(pool, 0.0, 1)
    pool.handle_answer(0.5, 0, 1, 0, 1e308)
    assert pool.lives.statistics()[0].busy_seconds <= 0.5


# Several runs of a worker at once.


def test_runs_at_once_are_answered_in_any_order() -> None:
    pool = ready_pool(2, concurrent=2)
    # Idle workers come first.
    assert ask(pool, 0.0, 1, 2, 3, 4, 5) == [predict(i % 2, (i + 1, 0)) for i in range(4)]
    assert pool.handle_message(1.0, 0, reply(3)) == [
        Settle(request=3),
        Release(request=3),
        predict(0, (5, 0)),
    ]
    for request in (5, 1):
        assert pool.handle_message(2.0, 0, reply(request))[0] == Settle(request=request)
    assert pool.workers[0].state is WorkerState.READY
    assert [w.busy_seconds for w in pool.lives.statistics()] == [0.75, 0.0]
    assert [w.concurrent for w in pool.lives.statistics()] == [2, 2]


def test_answer_of_a_run_that_cannot_have_begun_is_refused() -> None:
    pool = ready_pool(1, concurrent=2)
    ask(pool, 0.0, 1)
    pool.handle_message(0.0, 0, reply(1, seconds=0.001))
    assert len(ask(pool, 1.0, *range(10, 20))) == 5  # two at once, and as many ahead as take 3 ms
    with pytest.raises(ProtocolError, match=r"\(12, 0\), expected \(10, 0\) or \(11, 0\)"):
        pool.handle_message(1.0, 0, reply(12))
    pool.handle_message(1.001, 0, reply(11, seconds=0.001))
    assert pool.handle_message(1.001, 0, reply(12, seconds=0.001))[0] == Settle(request=12)


def test_group_of_ranks_answers_in_order_whatever_it_says() -> None:
    pool = ready_pool(1, pipeline=2, concurrent=3)
    assert len(ask(pool, 0.0, 1, 2, 3, 4)) == 3
    with pytest.raises(ProtocolError, match=r"\(2, 0\), expected \(1, 0\) in"):
        pool.handle_message(1.0, 0, reply(2))


def test_worker_that_starts_again_has_the_runs_at_once_that_it_then_says() -> None:
    pool = ready_pool(1, concurrent=3)
    pool.handle_died(1.0, 0, SIGKILL)
    restarted(pool, 0, 1.0)
    assert ask(pool, 2.0, 1, 2) == [predict(0, (1, 0))]


def test_death_under_several_runs_counts_for_each_and_they_meet_no_more() -> None:
    pool = ready_pool(1, concurrent=3)
    ask(pool, 0.0, 1, 2, 3, timeout=1000.0)
    now, failed = 1.0, []
    pool.handle_died(now, 0, SIGSEGV)
    given = restarted(pool, 0, now, concurrent=3)
    while given:  # 2 is poison
        [run] = [order for order in given if isinstance(order, SendRun)]
        request, now = run.members[0][0], now + 1.0
        if request == 2:
            given = pool.handle_died(now, 0, SIGSEGV)
            failed += [a.request for a in outline(given) if isinstance(a, Failed)]
            given = restarted(pool, 0, max(now, pool.workers[0].restart_at), concurrent=3)
        else:
            given = pool.handle_message(now, 0, reply(request))
        given = [] if request == 3 else given
    assert failed == [2]
    assert counts(pool) == (2, 1, 0, 0)


def test_requests_that_failed_together_run_apart_beside_others() -> None:
    pool = ready_pool(1, concurrent=3, max_batch_size=2, max_delay=5.0)
    ask(pool, 0.0, 10)
    assert pool.handle_request(0.0, 1, (1,), 20.0, join=JOIN) == []
    assert pool.handle_request(0.0, 2, (1,), 20.0, join=JOIN) == [predict(0, (1, 0), (2, 0))]
    assert pool.handle_message(1.0, 0, error(1)) == [predict(0, (1, 0)), predict(0, (2, 0))]
    assert ask(pool, 1.0, 11) == []
    assert pool.handle_message(1.0, 0, reply(2))[-1] == predict(0, (11, 0))


def test_run_that_does_not_stop_is_not_forgotten_when_others_are_answered() -> None:
    pool = ready_pool(1, concurrent=2)
    ask(pool, 0.0, 1, timeout=5.0)
    assert outline(pool.handle_time(5.0)) == [
        Failed(1, PredictTimeoutError),
        Send(worker=0, message=Cancel(request=1, shard=0)),
    ]
    assert ask(pool, 5.1, 2) == [predict(0, (2, 0))]  # beside it
    assert ask(pool, 5.1, 3) == []
    assert pool.handle_message(5.2, 0, reply(2))[-1] == predict(0, (3, 0))
    assert pool.next_time() == 6.0
    end_hung(pool, 6.0, 0)
    assert pool.handle_died(6.3, 0, SIGKILL) == [Release(request=1)]
    assert restarted(pool, 0, 6.3) == [predict(0, (3, 0))]
    assert pool.handle_message(6.4, 0, reply(3))[0] == Settle(request=3)


@pytest.mark.parametrize("stops", [False, True])
def test_run_that_does_not_stop_in_time_is_alone_to_blame_for_the_end_of_its_worker(
    stops: bool,
) -> None:
    """Also if it stops a moment before that end."""
    pool = ready_pool(1, concurrent=3)
    ask(pool, 0.0, 1, timeout=5.0)
    given = ask(pool, 0.0, *((2,) if stops else (2, 3)), timeout=1000.0)
    pool.handle_time(5.0)
    end_hung(pool, 6.0, 0)
    if stops:
        pool.handle_message(6.25, 0, error(1, kind="cancelled"))
    pool.handle_died(6.3, 0, SIGKILL)
    assert restarted(pool, 0, 6.3, concurrent=3) == given  # beside each other
    assert pool.table[2].deaths == {}


def test_cancelled_run_that_stops_frees_its_place_and_leaves_the_others() -> None:
    pool = ready_pool(1, concurrent=2)
    ask(pool, 0.0, 1, 2, 3)
    assert outline(pool.handle_cancel(1.0, 2)) == [
        Failed(2, ClosedError),
        Send(worker=0, message=Cancel(request=2, shard=0)),
    ]
    assert pool.handle_message(1.0, 0, error(2, kind="cancelled")) == [
        Release(request=2),
        predict(0, (3, 0)),
    ]
    assert pool.next_time() == 10.0
    assert pool.workers[0].kill_at == math.inf


def test_of_workers_with_as_many_runs_the_one_that_began_first_is_given_the_next() -> None:
    """It is likely to be free first: requests wait as they would in one line for both."""
    pool = ready_pool(2)
    for worker in (0, 1):
        ask(pool, 0.0, worker)
    for worker in (0, 1):
        pool.handle_message(0.001, worker, reply(worker, seconds=0.001))
    assert ask(pool, 1.0, 10) == [predict(0, (10, 0))]
    assert ask(pool, 1.001, 11) == [predict(1, (11, 0))]
    pool.handle_message(1.001, 0, reply(10, seconds=0.001))
    assert ask(pool, 1.0015, 12) == [predict(0, (12, 0))]
    assert ask(pool, 1.0016, 13) == [predict(1, (13, 0))]


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


def test_pool_that_drains_holds_no_request() -> None:
    pool = ready_pool(2, max_batch_size=8, max_delay=4.0)
    for request in (1, 2):
        assert pool.handle_request(0.0, request, (1,), 100.0, join=JOIN) == []
    assert pool.handle_drain(1.0, math.inf) == [predict(0, (1, 0), (2, 0))]
    actions = pool.handle_request(1.0, 3, (1,), 100.0, join=JOIN, limited=False)
    assert actions == [predict(1, (3, 0))]


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


def test_what_is_not_answered_in_the_time_for_draining_fails() -> None:
    pool = ready_pool(1)
    pool.handle_request(0.0, 1, (1,), 100.0)
    assert pool.handle_drain(1.0, 4.0) == []
    assert pool.next_time() == 5.0
    assert outline(pool.handle_time(5.0)) == [
        Failed(1, ClosedError),
        Send(worker=0, message=Cancel(request=1, shard=0)),
        Send(worker=0, message=Exit()),
    ]
    assert pool.next_time() == 5.0 + TIMEOUTS.close


# Replacing.


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
    assert [w.restarts for w in pool.lives.statistics()] == [3, 3, 3]
    assert [w.last_error for w in pool.lives.statistics()] == ["", "", ""]


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
    assert (pool.lives.health(0.0).serving, pool.lives.statistics()[1].restarts) == (2, 0)


# Recycling.


def test_worn_worker_that_crashes_has_no_new_budget() -> None:
    pool = ready_pool(2, restart=replace(RESTART, budget=0, max_memory_bytes=1000))
    assert pool.handle_own_memory(1.0, 0, 1001) == [Send(worker=0, message=Exit())]
    assert pool.handle_own_memory(1.0, 1, 1001) == []  # it is to be replaced next
    assert pool.handle_died(2.0, 1, SIGSEGV) == []
    pool.handle_died(2.0, 0, describe_exit(0))
    assert restarted(pool, 0, 2.0) == []
    assert pool.next_time() == 2.0 + RESTART.backoff_limit


# Health.


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
    assert reason() == "worker 0 (cpu:0, pid 200) is being ended: breaks the protocol"


# Pipelines.


def test_pipeline_gets_a_run_for_each_stage_and_one_more_however_long_they_take() -> None:
    scheduler = ready_pool(1, pipeline=2)
    rows = (1,) * 5
    assert scheduler.handle_request(0.0, 0, rows, 60.0) == [predict(0, (0, i)) for i in range(3)]
    assert scheduler.handle_message(2.0, 0, reply(0, 0, 2.0)) == [predict(0, (0, 3))]
    assert scheduler.handle_message(3.0, 0, reply(0, 1, 2.0)) == [predict(0, (0, 4))]


def test_pipelines_get_their_first_runs_before_one_of_them_gets_its_second() -> None:
    scheduler = ready_pool(2, pipeline=2)
    given = scheduler.handle_request(0.0, 0, (1,) * 3, 60.0)
    assert given == [predict(0, (0, 0)), predict(1, (0, 1)), predict(0, (0, 2))]


# Anything, in any order.


@dataclass
class _Process:
    """What a worker's process is to the model: messages on their way to it and from it."""

    deaf: bool = False
    alive: bool = True
    asked: bool = False  # for its stacks
    killed: bool = False
    conversation: Conversation = field(default_factory=Conversation)
    inbox: deque[Message] = field(default_factory=deque)
    outbox: deque[Message] = field(default_factory=deque)
    slab_of: "_Process | None" = None  # whose memory of the card it was given
    bereft: bool = False  # that one is gone
    cancels: deque[ShardId] = field(default_factory=deque)  # of a socket of their own
    cancelled: set[ShardId] = field(default_factory=set)

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


@dataclass(eq=False)
class _Given:  # compared by identity
    """A run that a worker was given and has not answered."""

    members: tuple[ShardId, ...]


JOINS = st.tuples(st.sampled_from("aaab"), st.integers(1, MAX_ROWS - 1))
_Asking = tuple[int, float, int, tuple[str, int] | None, int]
"""Shards, seconds, priority, with what it may be joined, and bytes."""


class Pools(RuleBasedStateMachine):
    """A shell with workers that answer, fail, die, hang, and are slow, in any order."""

    # What is drawn for each example.
    joins = False
    pipeline, card, concurrent = 1, 0, 1
    slab: tuple[int, int] | None = SLAB
    max_delay, seconds = 0.0, 0.001
    limits = Limits()
    at_once = 1

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.scheduler = Pool([], timeouts=TIMEOUTS, restart=RESTART, limits=Limits())
        self.processes: dict[int, _Process] = {}
        self.running: dict[int, deque[_Given]] = {}
        self.began: dict[int, float] = {}
        self.events = 0
        self.requests: dict[int, _Asked] = {}
        self.errors: dict[int, str] = {}
        self.poison: set[int] = set()
        self.deaths = Counter[ShardId]()  # of workers that had begun it
        self.started: bool | None = None
        self.is_draining = self.is_closing = self.is_closed = self.deaf_next = False
        self.to_replace: dict[int, _Process] | None = None
        self.died_at: dict[int, float] = {}

    @initialize(
        workers=st.integers(1, 3),
        start_at_once=st.sampled_from([True, True, True, True, True, False]),
        restart=st.builds(
            partial(replace, RESTART, max_memory_bytes=MAX_BYTES),
            budget=st.sampled_from([0, 1, 4, 99]),
            max_requests=st.sampled_from([None, None, None, None, 1, 3]),
        ),
        drawn=st.fixed_dictionaries(
            {
                "joins": st.sampled_from([False, False, False, True]),
                "max_delay": st.sampled_from([0.0, 0.3, 2.0]),
                "seconds": st.sampled_from([0.0, 0.001, 0.001, 0.01, 0.25]),
                "limits": st.builds(
                    partial(Limits, queue=QUEUE_LIMIT),
                    queue_bytes=st.sampled_from([None, None, None, MAX_BYTES]),
                ),
                "pipeline": st.sampled_from([1, 1, 1, 2, 3]),
                "concurrent": st.sampled_from([1, 1, 2, 3]),
                "card": st.sampled_from([0, 0, 0, 2, 3]),
                "slab": st.sampled_from([SLAB, SLAB, SLAB, None]),
            }
        ),
    )
    def start(
        self, workers: int, start_at_once: bool, restart: RestartPolicy, drawn: dict[str, Any]
    ) -> None:
        vars(self).update(drawn)
        self.pipeline = 1 if self.card else self.pipeline
        self.at_once = self.concurrent if self.pipeline == 1 else 1
        self.scheduler = Pool(
            [build(i, self.pipeline, self.card) for i in range(workers)],
            timeouts=TIMEOUTS,
            restart=restart,
            limits=self.limits,
            max_batch_size=MAX_ROWS if self.joins else 1,
            max_delay=self.max_delay,
            tracing=True,
        )
        self.carry_out(self.scheduler.handle_start(self.now))
        if start_at_once:
            self.play()
            assert self.started
            self.request(workers)  # and it is known how long runs take
            self.play()

    # What the shell does.

    def carry_out(self, actions: Sequence[Order]) -> None:
        self.events += 1
        pending, start_failed = deque(actions), False
        while pending:
            match pending.popleft():
                case StartWorker(worker=worker):
                    assert worker not in self.processes
                    assert not self.is_closing
                    if self.scheduler.workers[worker].budget.spent:
                        probe = self.died_at[worker] + RESTART.backoff_limit
                        assert self.now >= probe, "a start past the budget that is too early"
                    process = _Process(deaf=self.deaf_next)
                    self.deaf_next = False
                    self.processes[worker] = process
                    self.scheduler.handle_started(worker, 100 + worker)
                    process.say(hello(worker))
                case SendRun(worker=worker, members=members):
                    self.check_run(worker, members)
                    runs = self.running.setdefault(worker, deque())
                    if not runs:
                        self.began[worker] = self.now
                    runs.append(_Given(members))
                    request, shard = members[0]
                    message = Predict(request=request, shard=shard, inputs=(), outputs=())
                    self.processes[worker].inbox.append(message)
                case Send(worker=worker, message=Cancel() as message):
                    self.note_cancel(worker, message)
                    self.processes[worker].cancels.append((message.request, message.shard))
                case Send(worker=worker, message=message):
                    self.check_build_or_exit(worker, message)
                    self.processes[worker].inbox.append(message)
                case ShareSlab(worker=worker, leader=leader):
                    process, owner = self.processes[worker], self.processes[leader]
                    assert process.slab_of is None
                    assert not owner.killed, "its memory is about to go"
                    assert not owner.asked, "its memory is about to go"
                    assert self.scheduler.workers[leader].slab == self.slab
                    process.slab_of = owner
                    process.inbox.append(Attach(block=-1, size=64, device=f"cuda:{leader}"))
                case AskForStacks(worker=worker):
                    assert not self.processes[worker].asked, "asked for its stacks twice"
                    self.processes[worker].asked = True
                case KillWorker(worker=worker):
                    self.processes[worker].killed = True
                case Settle(request=request, error=exc):
                    asked = self.requests[request]
                    assert not asked.settled, "settled twice"
                    asked.settled = True
                    self.errors[request] = str(exc)
                    if exc is None:
                        assert len(asked.replies) == asked.shards
                    trace = self.scheduler.recorder.traces[request]
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
                            self.processes.get(index) is old for index, old in before.items()
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
            assert run.rows == asked.rows[run.shard]
            assert run.run_seconds == min(asked.replies[run.shard].seconds, run.answered - run.sent)

    def check_build_or_exit(self, worker: int, message: Message) -> None:
        """Fail unless a leader comes before its followers, and ends after them."""
        process = self.processes[worker]
        if isinstance(message, Build):
            leader = worker - worker % self.card if self.card else worker
            if leader == worker:
                assert not any(other.bereft for other in self.processes.values())
            assert message.slab == (None if process.slab_of is None else -1)
            if leader != worker and message.shares_weights:
                assert self.scheduler.workers[leader].state in (WorkerState.READY, WorkerState.BUSY)
                assert message.slab is not None
        elif isinstance(message, Exit) and not self.is_closing:
            assert all(other.slab_of is not process for other in self.processes.values())

    def check_run(self, worker: int, members: tuple[ShardId, ...]) -> None:
        """Fail unless these may go now, and together."""
        ahead = [*self.running.get(worker, ())]
        if ahead:
            assert len(ahead) < min(MAX_RUNS, self.scheduler.workers[worker].capacity)
            if len(ahead) >= self.depth:
                assert not self.joins
                usual = self.scheduler.workers[worker].usual_seconds
                assert self.now - self.began[worker] <= usual + AHEAD_SECONDS
            assert not any(map(self.deaths.get, members)), (
                "beside others, where a worker died on it"
            )
        assert not self.processes[worker].killed
        assert not self.processes[worker].asked
        assert len({*members}) == len(members)
        others = [run for runs in self.running.values() for run in runs]
        at_work = {member for run in others for member in run.members}
        for request, shard in members:
            asked = self.requests[request]
            assert not asked.settled
            assert shard not in asked.replies
            assert (request, shard) not in at_work
            if len(members) > 1:
                assert asked.runs == 0, "a shard that had its turn goes alone"
            asked.given[shard] += 1
        if len(members) > 1:
            joins = [asked.join for asked in map(self.asked, members) if asked.join is not None]
            assert len(joins) == len(members)
            assert len({key for key, _ in joins}) == 1
            assert sum(rows for _, rows in joins) <= MAX_ROWS

    def note_cancel(self, worker: int, message: Cancel) -> None:
        """Fail unless the run is not wanted any more, or a request that was joined in it is out of time."""
        key = (message.request, message.shard)
        [run] = [run for run in self.running[worker] if run.members[0] == key]
        settled = [asked for asked in map(self.asked, run.members) if asked.settled]
        if len(settled) < len(run.members):
            assert any(asked.deadline <= self.now for asked in settled), "others want this run"

    @property
    def depth(self) -> int:
        """How many runs a worker works on at a time."""
        return self.at_once if self.pipeline == 1 else self.pipeline + 1

    def asked(self, member: ShardId) -> _Asked:
        return self.requests[member[0]]

    def written(self) -> set[int]:
        """The requests that a worker has a shard of."""
        return {r for runs in self.running.values() for run in runs for r, _ in run.members}

    @property
    def circuit_open(self) -> bool:
        return all(w.is_given_up for w in self.scheduler.workers)

    def open(self) -> set[int]:
        return {number for number, asked in self.requests.items() if not asked.settled}

    def deliver(self, worker: int) -> None:
        """The oldest message of the worker reaches the scheduler."""
        message = self.processes[worker].outbox.popleft()
        run = _Given(())
        if self.running.get(worker) and isinstance(message, (Reply, Error)):
            key = (message.request, message.shard)
            begun = [*self.running[worker]][: self.at_once]
            [run] = [run for run in begun if run.members[0] == key]
            self.running[worker].remove(run)
            self.began[worker] = self.now
            if isinstance(message, Reply):
                for request, shard in run.members:
                    self.requests[request].replies[shard] = message
        before = self.open()
        self.carry_out(self.scheduler.handle_message(self.now, worker, message))
        settled = before - self.open()
        if getattr(message, "kind", "") == "cancelled":
            assert not settled
        elif run.members:
            # All that were joined are answered, or none: it is not known which of them was to blame.
            wanted = {request for request, _ in run.members}
            many = len(run.members) > 1
            assert settled <= wanted
            assert not many or settled == (before & wanted if isinstance(message, Reply) else set())

    def bury(self, worker: int) -> None:
        """The end of the worker's process is noticed; what it sent before and was not read is lost."""
        process = self.processes.pop(worker)
        self.died_at[worker] = self.now
        runs, before = self.running.pop(worker, deque()), self.open()
        blamed: set[int] = set()
        for other in self.processes.values():
            other.bereft |= other.slab_of is process and not (other.killed or other.asked)
        if not (process.bereft or process.asked):
            # Else the one whose memory it had is to blame, and its run; or the run that did not stop.
            for run in [*runs][: self.depth]:
                self.deaths.update(run.members)
                blamed |= {member[0] for member in run.members if self.deaths[member] == MAX_TRIES}
        how = SIGKILL if process.killed else SIGSEGV
        self.carry_out(self.scheduler.handle_died(self.now, worker, how))
        for other in self.processes.values():
            assert other.slab_of is not process or other.killed or self.is_closing
        # The circuit may be closed again by now: a worker that is to be replaced has a new budget.
        lost = {n for n in before - self.open() if "budget is spent" not in self.errors[n]}
        assert lost <= blamed or self.is_closing

    def work(self, worker: int, fail: str | None = None) -> None:
        """The worker's main loop goes one step on: end its run, or take its next message."""
        process = self.processes[worker]
        if process.conversation.runs:
            begun = [*process.conversation.runs][: self.at_once]
            request, shard = key = begun[self.events % len(begun)]
            if key in process.cancelled:
                process.cancelled.discard(key)
                fail = "cancelled"
            elif request in self.poison:
                process.alive = False
                return
            answer = reply(request, shard, seconds=self.seconds)
            process.say(answer if fail in (None, "slab") else error(request, shard, fail))
        elif process.inbox:
            while process.inbox:  # all that is there: runs wait in the worker
                message = process.inbox.popleft()
                process.conversation.advance(message)
                if isinstance(message, Build):
                    makes = message.shares_weights and message.slab is None and fail != "slab"
                    done = built(self.slab if makes else None, self.at_once)
                    process.say(done if fail in (None, "slab") else build_error())
                elif isinstance(message, Exit):
                    process.alive = False

    def hear(self, worker: int) -> None:
        """The worker's canceller takes the next; one that comes after the answer is kept."""
        process = self.processes[worker]
        process.cancelled.add(process.cancels.popleft())

    def idle(self, worker: int) -> bool:
        process = self.processes[worker]
        at_work = process.inbox or process.conversation.runs
        return process.deaf or process.ended or not at_work

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.scheduler.handle_time(self.now))
        due = self.scheduler.next_time()
        assert due > self.now, "something that was due was not done"
        assert self.scheduler.due == due
        health = self.scheduler.health(self.now)
        if health.state not in ("starting", "closing", "closed"):
            told = self.scheduler.told[-1]
            assert (told.state, told.serving) == (health.state, health.serving)

    def play(self) -> None:
        """Workers do what they are told, and time passes, until nothing happens any more."""
        for _ in range(2000):
            busy = False
            for worker in [*self.processes]:
                process = self.processes[worker]
                if process.outbox:
                    self.deliver(worker)
                elif process.ended:
                    self.bury(worker)
                elif process.cancels and not process.deaf:
                    self.hear(worker)
                elif not self.idle(worker):
                    self.work(worker)
                else:
                    continue
                busy = True
            due = self.scheduler.next_time()
            if not busy and due == math.inf:
                return
            if not busy:
                self.pass_time(max(0.0, due - self.now))
        raise AssertionError("the pool never comes to rest")

    # What may happen. Few rules that do much: Hypothesis leaves some rules out of each run.

    @rule(
        requests=st.lists(
            st.tuples(
                st.sampled_from([1, 1, 1, 2, 5]),
                st.sampled_from([20.0, 3.0, 0.4, 0.03, 0.0, math.inf]),
                st.sampled_from([0, 0, 1, -1]),
                st.none() | JOINS | JOINS,
                st.sampled_from([0, 1, 15, MAX_BYTES + 1]),
            ),
            max_size=8,
        ),
        choices=st.lists(st.integers(0, 11), min_size=1, max_size=12),
        fail=st.sampled_from([None, None, "predict", "invalid", "slab"]),
    )
    def pool_goes_on(self, requests: list[_Asking], choices: list[int], fail: str | None) -> None:
        """Requests come, and some of what is under way comes to pass; one run or build may fail."""
        for asking in requests if self.started else ():
            self.request(*asking)
        for choice in choices:
            alive = self.processes.items()
            steps = [partial(self.deliver, w) for w, p in alive if p.outbox]
            steps += [partial(self.bury, w) for w, p in alive if p.ended]
            steps += [partial(self.hear, w) for w, p in alive if p.cancels and not p.deaf]
            steps += [partial(self.work, w, fail) for w in self.processes if not self.idle(w)]
            if steps:
                step = steps[choice % len(steps)]
                step()
                fail = None if step.func == self.work else fail

    def request(
        self,
        shards: int,
        timeout: float = 20.0,
        priority: int = 0,
        join: tuple[str, int] | None = None,
        size: int = 0,
    ) -> None:
        number = len(self.requests)
        join = join if self.joins else None
        rows = (2,) * shards if join is None else (join[1],)
        due = self.now + min(self.max_delay, timeout / 2)
        taken = sum(self.requests[n].size for n in self.open())
        most = math.inf if self.limits.queue_bytes is None else self.limits.queue_bytes
        limited = number % 4 > 0
        ends = self.is_closing or (self.is_draining and limited)
        full = len(self.open()) >= self.limits.queue or (taken and taken + size > most)
        full = full and limited
        asked = _Asked(self.now + timeout, rows, join, due, self.now, size)
        self.requests[number] = asked
        options = {
            "size": size,
            "priority": priority,
            "join": join,
            "limited": limited,
        }
        try:
            actions = self.scheduler.handle_request(self.now, number, rows, timeout, **options)
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

    @precondition(lambda self: self.started)
    @rule(
        shards=st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=1, max_size=6),
        is_slow=st.booleans(),
        order=st.lists(st.integers(0, 5), max_size=12),
    )
    def all_is_well(self, shards: list[int], is_slow: bool, order: list[int]) -> None:
        """Requests come, runs may take long, and workers answer."""
        for count in shards:
            self.request(count)
        if is_slow:
            self.pass_time(2 * SHORT_RUN)
            self.request(1)  # which is put behind none of them
        for choice in order:
            steps = [w for w, p in self.processes.items() if p.outbox or not self.idle(w)]
            if steps:
                worker = steps[choice % len(steps)]
                process = self.processes[worker]
                if process.outbox:
                    self.deliver(worker)
                elif process.cancels and choice % 2:
                    self.hear(worker)
                else:
                    self.work(worker)

    @rule(
        trouble=st.sampled_from(
            [
                *("dies", "dies", "dies", "all die", "hangs", "next hangs", "poison", "poison"),
                *("cancel", "cancel", "close"),
                *("drain", "restart", "restart", "abandon", "grows"),
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
        elif trouble == "poison" and self.requests:
            self.poison.add(len(self.requests) - 1 - which % len(self.requests))
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
                already = {w.index for w in self.scheduler.lives._replacing}
                self.to_replace = {w: p for w, p in self.processes.items() if w not in already}
                self.carry_out(self.scheduler.handle_restart(self.now))
            except ClosedError:
                assert self.is_closing or self.is_draining
                self.to_replace = None
        elif trouble == "abandon":
            self.to_replace = None
            self.carry_out(self.scheduler.handle_restart_abandoned(self.now))
        elif trouble == "grows" and self.processes:
            worker = [*self.processes][which % len(self.processes)]
            size = MAX_BYTES + which % 2
            self.carry_out(self.scheduler.handle_own_memory(self.now, worker, size))

    @rule(seconds=st.sampled_from([None, 0.0, 0.005, 0.06, 0.3, 1.0, 5.0, 40.0]))
    def time_passes(self, seconds: float | None) -> None:
        """So many seconds, or until something is due."""
        due = self.scheduler.next_time()
        wait = 0.0 if due == math.inf else max(0.0, due - self.now)
        self.pass_time(wait if seconds is None else seconds)

    def close(self, timeout: float) -> None:
        self.is_closing = True
        self.carry_out(self.scheduler.handle_close(self.now, timeout))
        assert all(asked.settled for asked in self.requests.values())

    # What always holds.

    @invariant()
    def shell_looks_in_time(self) -> None:
        due = self.scheduler.next_time()
        assert self.scheduler.due <= due

    @invariant()
    def calm_is_what_it_stands_for(self) -> None:
        lives = self.scheduler.lives
        replacing = bool(lives._replacing or lives._to_replace)
        assert lives.calm == (not replacing and lives._announced[0] == "ready")

    @invariant()
    def every_request_is_counted_once(self) -> None:
        s = self.scheduler
        assert s.table.accepted == len(self.requests)
        assert (
            s.table.accepted
            == s.table.succeeded + s.table.failed + s.table.cancelled + s.table.in_flight
        )
        assert s.table.in_flight == len(self.open())

    @invariant()
    def every_open_shard_is_answered_running_or_queued(self) -> None:
        open_requests = {n: self.requests[n] for n in self.open()}
        shards = sum(asked.shards - len(asked.replies) for asked in open_requests.values())
        given = [run for runs in self.running.values() for run in runs]
        running = sum(request in open_requests for run in given for request, _ in run.members)
        assert len(self.scheduler.queue) == shards - running

    @invariant()
    def nothing_waits_while_a_worker_is_ready_but_what_is_held_for_others(self) -> None:
        # A leader that is to be replaced waits until its followers have ended.
        ready = [w for w in self.scheduler.workers if w.state is WorkerState.READY]
        free = [self.processes[w.index] for w in ready if w.fate is not Fate.RETIRES]
        # Or it has a place beside other runs, unless one that goes beside none comes first.
        alone = any(map(self.deaths.get, self.scheduler.queue.items))
        is_free = any(not (process.killed or process.asked) for process in free)
        if not (is_free or (self.has_place() and not alone)):
            return
        due = self.scheduler.next_time()
        rows = Counter[str]()
        for asked in map(self.asked, self.scheduler.queue.items):
            assert asked.join is not None
            assert asked.due > self.now
            assert asked.runs == 0
            rows[asked.join[0]] += asked.join[1]
            assert due < math.inf
            assert due <= asked.due
        assert all(count < MAX_ROWS for count in rows.values())

    def has_place(self) -> bool:
        """Whether a worker executes fewer runs than it could."""
        busy = [w for w in self.scheduler.workers if w.state is WorkerState.BUSY and w.serves]
        return any(len(w.runs) < w.concurrent for w in busy)

    @invariant()
    def held_shards_go_in_time_to_workers_that_work_on_several_runs(self) -> None:
        busy = [w for w in self.scheduler.workers if w.state is WorkerState.BUSY and w.serves]
        free = [w for w in busy if len(w.runs) < w.depth and w.kill_at == math.inf]
        if free:
            for asked in map(self.asked, self.scheduler.queue.items):
                if asked.join is not None and not asked.runs and asked.due > self.now:
                    assert self.scheduler.due <= asked.due

    @invariant()
    def memory_is_held_as_long_as_a_worker_may_write_it(self) -> None:
        written = self.written()
        for number, asked in self.requests.items():
            assert asked.released == (asked.settled and number not in written)

    @invariant()
    def workers_have_the_runs_that_they_were_given(self) -> None:
        for w in self.scheduler.workers:
            given = [run.members for run in self.running.get(w.index, ())]
            assert [run.members for run in w.runs] == given
            assert len(given) <= MAX_RUNS

    @invariant()
    def run_that_no_caller_waits_for_ends_in_time_or_its_worker_does(self) -> None:
        for w in self.scheduler.workers:
            if w.state is WorkerState.BUSY and not w.doomed:
                assert w.kill_at == min([w.end_by, *(run.stop_by for run in w.runs)])
                for run in w.begun():
                    assert run.stop_by < math.inf or not self.scheduler.table.is_over(run)

    @invariant()
    def health_is_that_of_the_workers(self) -> None:
        health = self.scheduler.health(self.now)
        workers = self.scheduler.workers
        fit = [w for w in workers if w.serves]
        for w in workers:
            has_it = w.state in (WorkerState.READY, WorkerState.BUSY)
            process = self.processes.get(w.index)
            assert not w.serves or (has_it and process and not process.killed)
        assert (health.workers, health.serving) == (len(workers), 0 if self.is_closed else len(fit))
        if self.is_closed:
            assert (health.state, health.reasons) == ("closed", ())
        elif self.is_closing or self.is_draining:
            assert health.state == "closing"
        elif not self.started:
            assert health.state == "starting"
        else:
            soon = self.now + TIMEOUTS.cancel_grace / 2
            slow = {w.index for w in fit if w.kill_at <= soon}
            wrong = [w for w in workers if not w.serves or w.index in slow]
            assert len(health.reasons) == len(wrong)
            for w, reason in zip(wrong, health.reasons, strict=True):
                what = "worker" if self.pipeline == 1 else "group"
                assert reason.startswith(f"{what} {w.index} ")
                assert f"({w.device}" in reason
            broken = "failed" if self.circuit_open else "degraded"
            assert health.state == (broken if wrong else "ready")

    @invariant()
    def circuit_is_open_while_no_worker_serves_and_no_start_within_the_budget_is_left(self) -> None:
        if self.circuit_open:
            assert not self.open()
            assert not any(w.serves for w in self.scheduler.workers)
        for w in self.scheduler.workers:
            assert not (w.budget.spent and (w.serves or w.fate is Fate.RETIRES))

    @invariant()
    def worker_that_died_is_always_started_again(self) -> None:
        if self.started and not self.is_closing:
            for w in self.scheduler.workers:
                assert w.state is not WorkerState.GONE or w.restart_at < math.inf

    @invariant()
    def one_worker_at_a_time_is_replaced_or_one_card(self) -> None:
        retiring = [w for w in self.scheduler.workers if w.fate is Fate.RETIRES]
        assert len(retiring) <= 1 or (self.card and len({w.device for w in retiring}) == 1)

    @invariant()
    def statistics_add_up(self) -> None:
        table = self.scheduler.table
        waiting = [self.requests[number] for number in self.open()]
        assert table.in_flight_bytes == sum(asked.size for asked in waiting)
        assert table.not_begun == sum(asked.runs == 0 for asked in waiting)
        assert table.latency.snapshot().count == table.succeeded
        runs = sum(w.runs for w in self.scheduler.lives.statistics())
        assert self.scheduler.batch_sizes.snapshot().count == runs

    @invariant()
    def no_request_is_open_after_its_deadline_was_acted_on(self) -> None:
        due = self.scheduler.next_time()
        for number in self.open():
            if self.requests[number].deadline < math.inf:
                assert due < math.inf
                assert due <= self.requests[number].deadline

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
        assert self.scheduler.next_time() == math.inf
        assert (self.scheduler.table.in_flight, len(self.scheduler.queue)) == (0, 0)
        assert len(self.scheduler.table) == 0
        assert not self.scheduler.table._deadlines
        assert all(w.state is WorkerState.GONE and not w.runs for w in self.scheduler.workers)


Pools.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)
test_any_order_of_events_settles_and_releases_every_request_once = Pools.TestCase


def test_deadlines_of_answered_requests_do_not_pile_up() -> None:
    table = RequestTable()
    table.accept(-1, (1,), 0.0, 0.0, 1000.0, 0)
    for number in range(10_000):
        entry = table.accept(number, (1,), 0.0, 0.0, 2000.0, 0)
        table.close(entry, "succeeded", 0.0)
        del table.entries[number]
    assert len(table._deadlines) < 200
    assert table.next_deadline() == 1000.0
