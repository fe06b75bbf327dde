"""Actions that the scheduler returns: frozen values, which the loop carries out in order."""

from dataclasses import dataclass

from mcinfer.errors import McinferError
from mcinfer.protocol import Message
from mcinfer.scheduler.queue import ShardId
from mcinfer.statistics import Health, RequestTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a process for this worker; answer with `Scheduler.handle_started` or a death."""

    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPredict:
    """Give the worker these shards as one run: the shell knows where their tensors lie.

    Attributes:
        members: Request and shard of each; the first stands for the run in messages.
        fresh: Whether the outputs are to go to memory of the worker's own, since another worker may still
            write to the request's.
    """

    worker: int
    members: tuple[ShardId, ...]
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message as it is."""

    worker: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """Kill the worker's process at once; its death is reported as any other."""

    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStacks:
    """The worker hangs and will be killed: make it write its stacks first, if it still can."""

    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Answer the request: with what its shards gave, or with an error.

    Attributes:
        request: Which.
        error: Why not, if it failed.
        cancelled: Whether the caller cancelled it.
        trace: What became of it and when, where that is wanted; when it was joined is the shell's to say.
    """

    request: int
    error: McinferError | None = None
    cancelled: bool = False
    trace: RequestTrace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Let the request's memory go: no worker can write to it any more."""

    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStarted:
    """Every worker is ready (error None), or the start failed and the pool is closing."""

    error: McinferError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged:
    """The pool is in another state than before, or another number of workers serves.

    Attributes:
        health: Now.
        planned: Whether nothing is wrong but that a worker is being replaced.
    """

    health: Health
    planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersRestarted:
    """All workers that were to be replaced have been, or one could not be (error)."""

    error: McinferError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolClosed:
    """No worker is left.

    Attributes:
        abandoned: Workers that were killed and yet did not end in time.
    """

    abandoned: tuple[int, ...] = ()


Action = (
    StartWorker
    | SendPredict
    | Send
    | DumpStacks
    | KillWorker
    | Settle
    | Release
    | PoolStarted
    | HealthChanged
    | WorkersRestarted
    | PoolClosed
)
