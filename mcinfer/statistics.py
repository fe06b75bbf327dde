"""Snapshots of the work and state of a master and its workers, and traces of single requests.

All times are float seconds of `time.monotonic`, which all processes of the machine share.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from mcinfer.errors import REFUSALS, InvalidInputError, McinferError, Refusal, say_once

_RENARD = "1 1.12 1.25 1.4 1.6 1.8 2 2.24 2.5 2.8 3.15 3.55 4 4.5 5 5.6 6.3 7.1 8 9"
"""The preferred numbers R20 of ISO 3: each is 11 to 14.3 % more than the one before."""

LATENCY_BOUNDS = tuple(m * 10.0**e for e in range(-4, 3) for m in map(float, _RENARD.split()))
"""Upper bounds of the latency buckets in seconds.

docs/observability.md says how far a quantile may be from the true one.
"""

ROW_BOUNDS = tuple(float(1 << n) for n in range(13))
"""Upper bounds of the buckets for the rows of runs."""

HealthState = Literal["starting", "ready", "degraded", "failed", "closing", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of a pool at one moment.

    Attributes:
        state: ``"ready"``: every worker serves. ``"degraded"``: `reasons` names workers that do not serve,
            or may not; the others answer requests, or requests wait for a restarted worker. ``"failed"``:
            no worker serves, and all are past their restart budget; requests fail at once with the cause.
            Starts go on, and the first worker that is ready ends this state. ``"starting"``: before
            `Master.start` has returned. ``"closing"``: new requests are refused, accepted ones are still
            answered. ``"closed"``.
        reasons: One sentence for each worker that does not serve, and for any other problem.
        serving: Number of workers that accept requests.
        workers: Number of all workers.
    """

    state: HealthState
    reasons: tuple[str, ...]
    serving: int
    workers: int

    def __str__(self) -> str:
        text = f"{self.state}: {self.serving} of {self.workers} workers serve"
        return "; ".join(filter(None, (text, say_once(self.reasons))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of values by size.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; each bound belongs to its bucket.
        counts: Values in each bucket, and last the values above all bounds.
        total: Sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def quantile(self, fraction: float) -> float:
        """The upper bound of the bucket that holds this quantile: 0.99 is the 99th percentile.

        So it is never less than the true one; docs/observability.md says by how much it may be more.
        NaN if there is no value; infinite for the last bucket, which has no bound.

        Raises:
            InvalidInputError: The argument is not a number from 0 to 1.
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
    """One worker at the moment of the snapshot.

    Attributes:
        index: Its place in the pool; a restarted worker keeps it.
        device: Such as ``"cpu:0"``.
        pid: Its process id; ``None`` while it has no process.
        state: One of ``spawned, connected, building, ready, busy, exiting, gone``.
        restarts: Number of restarts.
        runs: Successful runs of the engine: fewer than `completed` if requests were joined.
        completed: Shards that it answered with a result.
        failed: Shards that it answered with an error, or died on.
        busy_seconds: Time in the engine's own runs; of runs at once, the sum of theirs (see `concurrent`).
        providers: The execution providers in use, by the engine's names; empty until the model is loaded.
        last_error: Why it last died or failed; empty if it never did.
        rank: Its place in its group, if the model is cut over several devices (`mcinfer.Parallel`). The
            ranks of a group run and restart together, so they have the same counts.
        concurrent: How many runs it executes at once; 1 before it has loaded the model.
        wide: Of the `runs`, those that had the cores of all workers, since their request came alone.
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
    rank: int = 0
    concurrent: int = 1
    wide: int = 0


CardWay = Literal["in_place", "copied", "through_host"]
CARD_WAYS: tuple[CardWay, ...] = get_args(CardWay)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardStatistics:
    """The tensors of one master on one card, at the moment of the snapshot.

    Attributes:
        device: Such as ``"cuda:0"``.
        memory_bytes: The card's memory reserved for tensors.
        memory_used_bytes: Of that, in use by requests, or by arrays that you hold.
        inputs: Inputs that lay on this card, by their way to the workers: ``"in_place"`` without a copy,
            ``"copied"`` once on the card, or ``"through_host"``.
        input_bytes: Their bytes, by the same ways.
    """

    device: str
    memory_bytes: int
    memory_used_bytes: int
    inputs: Mapping[CardWay, int]
    input_bytes: Mapping[CardWay, int]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Statistics:
    """A master at the moment of the snapshot. `accepted` is always the sum of the next four.

    Its text is a table: the pool, its requests, its memory, and a line for each worker.

    Attributes:
        accepted: Requests accepted so far.
        succeeded: Requests answered with a result.
        failed: Requests answered with an error.
        cancelled: Requests cancelled by the caller.
        in_flight: Requests not yet answered.
        in_flight_bytes: Bytes of the tensors of requests in flight: inputs, and outputs of known shapes.
        queued: Requests in flight with no piece sent to a worker yet.
        queued_shards: Pieces that wait for a worker.
        latency: Seconds from call to answer, of successful requests.
        batch_sizes: Rows of each successful run of the engine.
        memory_bytes: Shared memory reserved for tensors.
        memory_used_bytes: Shared memory in use by requests, replaced weights, or arrays that you hold.
        weights_version: How often the replaceable weights were updated.
        health: As from `Master.health`.
        workers: One entry per worker, by index.
        cards: One entry per card that requests or `Master.allocate` had tensors on.
        join_gain: How many times as fast as requests apart joined ones were answered in the last comparison,
            for each row; below 1.05 they go apart. NaN before, and without `max_batch_size`.
        refused: Requests that were not accepted, by reason, which are in no other count: ``"queue_full"``
            and ``"memory"`` are the limits (`Limits`), ``"no_worker"``: none serves, and the restart budget
            is spent, ``"too_large"``: more bytes than there may ever be, ``"invalid"``: it does not fit.
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
    cards: tuple[CardStatistics, ...] = ()
    join_gain: float = math.nan
    refused: Mapping[Refusal, int] = field(default_factory=lambda: dict.fromkeys(REFUSALS, 0))

    def __repr__(self) -> str:
        half, most = (self.latency.quantile(part) * 1e3 for part in (0.5, 0.99))
        within = (
            f"; half within {half:.3g} ms, 99 % within {most:.3g} ms" if self.latency.count else ""
        )
        outcomes = f"{self.succeeded} succeeded, {self.failed} failed, {self.cancelled} cancelled"
        waiting = f"{self.in_flight} in flight, {self.queued} of them queued"
        refused = ", ".join(f"{n} {reason}" for reason, n in self.refused.items() if n)
        sizes, gain = self.batch_sizes, self.join_gain
        runs = f"{sizes.count} runs of {sizes.total / (sizes.count or 1):.3g} rows"
        runs += "" if math.isnan(gain) else f"; joined {gain:.2f} times as fast as apart"
        used, reserved = self.memory_used_bytes / 1e6, self.memory_bytes / 1e6
        head = ("worker", "device", "pid", "state", "restarts", "runs", "failed", "busy s")
        rows = [head] + [
            (
                f"{w.index}" if not w.rank else f"{w.index} rank {w.rank}",
                w.device,
                f"{w.pid or '-'}",
                w.state,
                f"{w.restarts}",
                f"{w.runs}",
                f"{w.failed}",
                f"{w.busy_seconds:.3f}",
            )
            for w in self.workers
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(
            (
                str(self.health),
                f"{self.accepted} requests: {outcomes}, {waiting}{within}",
                *([f"refused before: {refused}"] if refused else []),
                runs,
                f"{used:.1f} MB of shared memory in use, {reserved:.1f} MB reserved",
                *lines,
            )
        )


# Traces: the course of one request, for trace hooks.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTrace:
    """The run that answered one piece of a request.

    Attributes:
        shard: Number of the piece, from 0.
        worker: Index of the worker.
        device: Such as ``"cpu:0"``.
        pid: The worker's process id.
        attempts: How often the piece was sent to a worker: more than once if a worker died, or if joined
            requests ran again apart.
        sent: When it was last sent, to this worker.
        answered: When the master received the worker's answer.
        run_seconds: Time of the engine's own run; for joined requests, that of the joint run.
        rows: Rows of the piece, counted as those of the request.
    """

    shard: int
    worker: int
    device: str
    pid: int | None
    attempts: int
    sent: float
    answered: float
    run_seconds: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """One request from its call to its answer.

    Attributes:
        request: Its number, counted from 0 in each master.
        outcome: How the request ended.
        error: Why, if it failed or was cancelled.
        rows: Rows of its batch. For a model with a fixed batch: the number of such batches. 1 if no input
            is cut.
        called: When the call came.
        queued: When the request was accepted, after its inputs were checked and copied.
        settled: When its last piece was answered, or the request failed.
        joined: When its outputs were ready for the caller.
        shards: The run of each piece that was answered.
        label: The model, as the master's log names it.
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
    label: str = ""


TraceHook = Callable[[RequestTrace], None]
"""Called once for each request after its answer, in the context (contextvars) of the call. The thread
that runs callbacks of futures calls it, so a slow hook delays them. A hook may call `submit`; calls that wait
raise. Exceptions of the hook are logged."""
