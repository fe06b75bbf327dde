"""Pools for tests of the scheduler: events in, a list of orders out. Time is a number."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from mcinfer.config import Limits, RestartPolicy, Timeouts
from mcinfer.errors import McinferError
from mcinfer.protocol import VERSION, Build, BuildFinish, Error, Hello, Message, Reply
from mcinfer.scheduler.dispatch import Entry, trace_of
from mcinfer.scheduler.queue import ShardId
from mcinfer.scheduler.scheduler import Scheduler
from mcinfer.scheduler.workers import STACKS_SECONDS, PoolRules, Run
from mcinfer.statistics import Health, RequestTrace

TIMEOUTS = Timeouts(start=30.0, predict=10.0, cancel_grace=1.0, close=5.0)
RESTART = RestartPolicy(budget=3, window=60.0, backoff=0.5, backoff_limit=1.0)
SPECS = (("x", "float32", ("batch", 3)),)
BUILT = BuildFinish(inputs=SPECS, outputs=SPECS, providers=("CPU",), seconds=0.1)
SIGSEGV = "killed by SIGSEGV"
SIGKILL = "killed by SIGKILL"
EXITED = "exited with status 0"


def build(index: int, pipeline: int = 1, tensor: int = 1) -> Build:
    return Build(
        model="/m.onnx",
        engine="fake",
        device=f"cpu:{index}",
        cores=(index,),
        pipeline=pipeline,
        tensor=tensor,
    )


class StartWorker(NamedTuple):
    worker: int


class KillWorker(NamedTuple):
    worker: int


class AskForStacks(NamedTuple):
    worker: int


class Send(NamedTuple):
    worker: int
    message: Message


class SendRun(NamedTuple):
    worker: int
    members: tuple[ShardId, ...]
    wide: bool = False


class Settle(NamedTuple):
    request: int
    error: McinferError | None = None


class Release(NamedTuple):
    request: int


class PoolStarted(NamedTuple):
    error: McinferError | None = None


class Announce(NamedTuple):
    health: Health
    planned: bool = False


class WorkersRestarted(NamedTuple):
    error: McinferError | None = None


class PoolClosed(NamedTuple):
    abandoned: tuple[int, ...] = ()


Order = (
    StartWorker
    | KillWorker
    | AskForStacks
    | Send
    | SendRun
    | Settle
    | Release
    | PoolStarted
    | Announce
    | WorkersRestarted
    | PoolClosed
)


class Recorder:
    """Both sinks of a scheduler; it carries nothing out.

    Attributes:
        orders: All so far.
        traces: By request, the trace of the settled ones.
    """

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.traces: dict[int, RequestTrace] = {}

    def send_run(self, worker: int, run: Run) -> None:
        self.orders.append(SendRun(worker, run.members, run.wide))

    def settle(self, entry: Entry, error: McinferError | None) -> None:
        self.traces[entry.number] = trace_of(entry, error)
        self.orders.append(Settle(entry.number, error))

    def release(self, request: int) -> None:
        self.orders.append(Release(request))

    def start_worker(self, worker: int) -> None:
        self.orders.append(StartWorker(worker))

    def send(self, worker: int, message: Message) -> None:
        self.orders.append(Send(worker, message))

    def ask_for_stacks(self, worker: int) -> None:
        self.orders.append(AskForStacks(worker))

    def kill_worker(self, worker: int) -> None:
        self.orders.append(KillWorker(worker))

    def announce(self, health: Health, planned: bool) -> None:
        self.orders.append(Announce(health, planned))

    def pool_started(self, error: McinferError | None) -> None:
        self.orders.append(PoolStarted(error))

    def workers_restarted(self, error: McinferError | None) -> None:
        self.orders.append(WorkersRestarted(error))

    def pool_closed(self, abandoned: tuple[int, ...]) -> None:
        self.orders.append(PoolClosed(abandoned))


class Recorded:
    """What takes events: these methods of it return the orders that they led to."""

    def __init__(self, inner: object, recorder: Recorder, names: Iterable[str]) -> None:
        self.recorder = recorder
        self._inner = inner
        self._names = frozenset(names)

    def __getattr__(self, name: str) -> Any:  # for each name, what it is in the inner one
        found = getattr(self._inner, name)
        return partial(self.since, found) if name in self._names else found

    def since(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> list[Order]:
        """Make a call; the orders that it led to."""
        before = len(self.recorder.orders)
        call(*args, **kwargs)
        return self.recorder.orders[before:]


# What workers say.


def hello(worker: int) -> Hello:
    return Hello(version=VERSION, pid=100 + worker, token="secret")  # noqa: S106


def built(concurrent: int = 1) -> BuildFinish:
    return replace(BUILT, concurrent=concurrent)


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
        announced: The pool's health, as often as it changed.
    """

    def __init__(self, builds: Sequence[Build], **options: Any) -> None:
        recorder = Recorder()
        scheduler = Scheduler(builds, recorder, recorder, PoolRules(**options))
        super().__init__(
            scheduler, recorder, [n for n in dir(scheduler) if n.startswith("handle_")]
        )

    @property
    def announced(self) -> list[Health]:
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
        scheduler.handle_started(0.0, i, 100 + i)
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


def restarted(scheduler: Pool, worker: int, concurrent: int = 1) -> list[Order]:
    """The worker's restart comes when it is due: it starts and loads; what its BUILD_FINISH led to."""
    return finish_build(scheduler, worker, started_again(scheduler, worker), concurrent)


def started_again(scheduler: Pool, worker: int) -> float:
    """The worker's restart comes when it is due, which is returned; it has not connected yet."""
    now: float = scheduler.next_time()
    assert scheduler.handle_time(now) == [StartWorker(worker=worker)]
    scheduler.handle_started(now, worker, 200 + worker)
    return now


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
