"""Actions that the scheduler returns: frozen values, which the loop carries out in order."""

from dataclasses import dataclass

from mcinfer.errors import McinferError
from mcinfer.protocol import Message
from mcinfer.scheduler.queue import ShardId
from mcinfer.statistics import Health, RequestTrace


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start this worker's process; `Scheduler.handle_started` or `handle_died` follows."""

    worker: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    worker: int


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """The worker hangs and will be killed: make it write its stacks first, if it still can."""

    worker: int


@dataclass(frozen=True, slots=True)
class Send:
    worker: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSlab:
    """Give the worker the block with the weights of its card, which its leader has made."""

    worker: int
    leader: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPredict:
    """Send the worker these shards as one run; the first stands for the run in messages.

    With `fresh`, the outputs go to memory of the worker's own: another worker may still write to the
    request's.
    """

    worker: int
    members: tuple[ShardId, ...]
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Answer the request with the outputs of its shards, or with an error."""

    request: int
    error: McinferError | None = None
    cancelled: bool = False
    trace: RequestTrace | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Free the request's memory: no worker can write to it any more."""

    request: int


@dataclass(frozen=True, slots=True)
class PoolStarted:
    """Every worker is ready (error None), or the start failed and the pool is closing."""

    error: McinferError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged:
    """The pool's state or its number of serving workers changed; `planned`: only by a replacement."""

    health: Health
    planned: bool = False


@dataclass(frozen=True, slots=True)
class WorkersRestarted:
    """All workers were replaced, or one could not be (error)."""

    error: McinferError | None = None


@dataclass(frozen=True, slots=True)
class PoolClosed:
    """No worker is left, but for those that did not end in time although they were killed."""

    abandoned: tuple[int, ...] = ()


Action = (
    StartWorker
    | SendPredict
    | Send
    | ShareSlab
    | DumpStacks
    | KillWorker
    | Settle
    | Release
    | PoolStarted
    | HealthChanged
    | WorkersRestarted
    | PoolClosed
)
