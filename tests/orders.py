"""Orders of the scheduler, recorded: events in, a list of these out; and what a test's pool is built of."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from mcinfer.config import RestartPolicy, Timeouts
from mcinfer.errors import McinferError
from mcinfer.protocol import Build, BuildFinish, Message
from mcinfer.scheduler.dispatch import Entry, trace_of
from mcinfer.scheduler.queue import ShardId
from mcinfer.scheduler.workers import Run
from mcinfer.statistics import Health, RequestTrace

TIMEOUTS = Timeouts(start=30.0, predict=10.0, cancel_grace=1.0, close=5.0)
RESTART = RestartPolicy(budget=3, window=60.0, backoff=0.5, backoff_limit=1.0)
SPECS = (("x", "float32", ("batch", 3)),)
BUILT = BuildFinish(inputs=SPECS, outputs=SPECS, providers=("CPU",), seconds=0.1)
SLAB = (-1, 64)


def build(index: int, pipeline: int = 1, card: int = 0, tensor: int = 1) -> Build:
    """With `card`, as many workers share one, and its weights."""
    return Build(
        model="/m.onnx",
        engine="fake",
        device=f"cuda:{index // card}" if card else f"cpu:{index}",
        cores=(index,),
        pipeline=pipeline,
        tensor=tensor,
        card_workers=card or 1,
        shares_weights=card > 0,
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


class ShareSlab(NamedTuple):
    worker: int
    leader: int


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
    | ShareSlab
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

    def share_slab(self, worker: int, leader: int) -> None:
        self.orders.append(ShareSlab(worker, leader))

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
