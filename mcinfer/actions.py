"""What the scheduler asks of the master's shell: frozen values, carried out in the order given."""

from dataclasses import dataclass

from mcinfer.errors import McinferError
from mcinfer.protocol import Message, Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a process for this worker; answer with `Scheduler.handle_started` or a death."""

    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPredict:
    """Give the worker this shard: the shell knows where its tensors lie."""

    worker: int
    request: int
    shard: int


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
class Settle:
    """Answer the request: with its shards' replies in order, or with an error."""

    request: int
    replies: tuple[Reply, ...] = ()
    error: McinferError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Let the request's memory go: no worker can write to it any more."""

    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStarted:
    """Every worker is ready (error None), or the start failed and the pool is closing."""

    error: McinferError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolClosed:
    """No worker is left.

    Attributes:
        abandoned: Workers that were killed and yet did not end in time.
    """

    abandoned: tuple[int, ...] = ()


Action = StartWorker | SendPredict | Send | KillWorker | Settle | Release | PoolStarted | PoolClosed
