"""Snapshots of what a master and its workers have done."""

from dataclasses import dataclass


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
        queued_shards: Pieces that wait for a worker.
        memory_bytes: Shared memory reserved for tensors.
        memory_used_bytes: Of it, in use by requests, replaced weights, or arrays that you hold.
        weights_version: Of the replaceable weights: how often they were updated.
        workers: One entry per worker, by index.
    """

    accepted: int
    succeeded: int
    failed: int
    cancelled: int
    in_flight: int
    queued_shards: int
    memory_bytes: int
    memory_used_bytes: int
    weights_version: int
    workers: tuple[WorkerStatistics, ...]
