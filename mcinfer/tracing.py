"""What became of one request and when: what trace hooks are given.

All times are float seconds of `time.monotonic`, which is one clock for all processes of the machine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mcinfer.errors import McinferError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTrace:
    """The run that answered one piece of a request.

    Attributes:
        shard: Which piece, from 0 on.
        worker: Index of the worker.
        device: Such as ``"cpu:0"``.
        pid: Of its process.
        attempts: How often the piece was given to a worker: more than once where one died, or where what
            was joined with others ran again apart.
        sent: When it was given to this worker, for the last time.
        answered: When the worker's answer was taken.
        run_seconds: Of it, the engine's own run. Where requests were joined, that of all of them.
    """

    shard: int
    worker: int
    device: str
    pid: int | None
    attempts: int
    sent: float
    answered: float
    run_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """One request from its call to its answer.

    Attributes:
        request: Its number, counted from 0 in each master.
        outcome: What became of it.
        error: Why, if it failed or was cancelled.
        rows: Of its batch; where the model's is fixed, how many of these; 1 where nothing of it is cut.
        called: When the call came.
        queued: When its inputs were checked and copied, and it was accepted.
        settled: When its last piece was answered, or it failed.
        joined: When its outputs were ready for the caller.
        shards: Of each piece that was answered, its run.
    """

    request: int
    outcome: Literal["succeeded", "failed", "cancelled"]
    error: McinferError | None
    rows: int
    called: float
    queued: float
    settled: float
    joined: float
    shards: tuple[ShardTrace, ...]


TraceHook = Callable[[RequestTrace], None]
"""Called once for each request, after its answer, in the context (contextvars) of the call that made it, in a
thread of mcinfer's own that also calls the callbacks of futures: others wait behind it. It may submit; calls
that wait raise there. What it raises is logged."""
