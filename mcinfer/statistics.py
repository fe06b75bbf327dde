"""Snapshots of what a master and its workers have done and how they are, and traces of single requests.

All times are float seconds of `time.monotonic`, which is one clock for all processes of the machine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mcinfer.errors import InvalidInputError, McinferError

LATENCY_BOUNDS = tuple(m * 10.0**e for e in range(-4, 3) for m in (1.0, 2.5, 5.0))
"""Seconds: upper bounds of the classes that latencies are counted in, from 0.1 ms to 500 s."""

ROW_BOUNDS = tuple(float(1 << n) for n in range(13))
"""Rows: upper bounds of the classes that runs are counted in."""

HealthState = Literal["starting", "ready", "degraded", "failed", "closing", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How a pool is, at the moment it was asked.

    Attributes:
        state: ``"ready"``: every worker serves. ``"degraded"``: some do not, or may not, `reasons` says why;
            requests are answered by the others, or wait for one that is started again. ``"failed"``: no
            worker serves and all are past their budget of restarts, requests fail at once with the cause;
            starts go on, and the first worker that is ready ends this. ``"starting"``: before
            `Master.start` has returned. ``"closing"``: no request is taken any more, those that were are
            still being answered. ``"closed"``.
        reasons: For each worker that does not serve, and whatever else is wrong, one sentence.
        serving: Workers that take requests.
        workers: Workers in all.
    """

    state: HealthState
    reasons: tuple[str, ...]
    serving: int
    workers: int

    def __str__(self) -> str:
        """In one line."""
        text = f"{self.state}: {self.serving} of {self.workers} workers serve"
        return "; ".join([text, *self.reasons])


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How often values of which size came.

    Attributes:
        bounds: Upper bounds of the classes, ascending, each belonging to its class.
        counts: Of each class, and last of all that is larger.
        total: Of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def quantile(self, fraction: float) -> float:
        """The upper bound of the class that holds this quantile: 0.99 is the 99th percentile.

        NaN where there is no value; infinite where it is in the last class, which has no bound.

        Raises:
            InvalidInputError: It is no number from 0 to 1.
        """
        if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise InvalidInputError(f"fraction: got {fraction!r}, expected a number from 0 to 1")
        rank = fraction * self.count
        seen = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            seen += count
            if count and seen >= rank:
                return bound
        return math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """One worker, at the moment of the snapshot.

    Attributes:
        index: Its place in the pool; it keeps it through restarts.
        device: Such as ``"cpu:0"``.
        pid: Of its process; ``None`` while it has none.
        state: One of ``spawned, connected, building, ready, busy, exiting, gone``.
        restarts: How often it was started again.
        runs: Runs of the engine that gave a result: fewer than `completed` where requests were joined.
        completed: Shards that it answered with a result.
        failed: Shards that it answered with an error, or died on.
        busy_seconds: Time spent in the engine's own runs.
        providers: What really runs the model, in the engine's words; empty until it is built.
        last_error: Why it last died or failed; empty if it never did.
    """

    index: int
    device: str
    pid: int | None
    state: str
    restarts: int
    runs: int
    completed: int
    failed: int
    busy_seconds: float
    providers: tuple[str, ...]
    last_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A master, at the moment of the snapshot. `accepted` is always the sum of the four after it.

    Attributes:
        accepted: Requests taken so far.
        succeeded: Of them, answered with a result.
        failed: Of them, answered with an error.
        cancelled: Of them, cancelled by the caller.
        in_flight: Of them, not answered yet.
        in_flight_bytes: Of their tensors: inputs, and outputs of known shapes.
        queued: Requests in flight of which no piece was given to a worker yet.
        queued_shards: Pieces that wait for a worker.
        latency: Seconds from a call to its answer, of the requests that succeeded.
        batch_sizes: Rows of each run of the engine that succeeded.
        memory_bytes: Shared memory reserved for tensors.
        memory_used_bytes: Of it, in use by requests, replaced weights, or arrays that you hold.
        weights_version: Of the replaceable weights: how often they were updated.
        health: As `Master.health` says.
        workers: One entry per worker, by index.
    """

    accepted: int
    succeeded: int
    failed: int
    cancelled: int
    in_flight: int
    in_flight_bytes: int
    queued: int
    queued_shards: int
    latency: Histogram
    batch_sizes: Histogram
    memory_bytes: int
    memory_used_bytes: int
    weights_version: int
    health: Health
    workers: tuple[WorkerStatistics, ...]


# Traces: what became of one request and when, for trace hooks.


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
