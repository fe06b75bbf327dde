"""What goes on beside the clients of a pool: kills, restarts, new weights, and a watch over its figures.

Each runs in a thread of its own until its scene ends.
"""

import os
import signal
from contextlib import suppress
from random import Random
from time import monotonic

import numpy as np
from books import COLUMNS, SLACK
from traffic import Scene

from mcinfer import QueueFullError, ReadyTimeoutError, Statistics, WorkerDiedError

_SIGNALS = {signal.SIGKILL: 60, signal.SIGSTOP: 20, signal.SIGSEGV: 10, signal.SIGABRT: 10}
"""And of a hundred acts, how many."""

_UPDATE_PERIOD = 0.4
_RESTART_PERIOD = 6.0
_RESTART_PATIENCE = 10.0
_INTERVAL = 0.02
_ALIVE = ("ready", "degraded")


def kill_at_random(scene: Scene) -> None:
    """Now and then one act against one worker; in the end all that are stopped go on."""
    chance = Random(f"{scene.seed}/killer")  # noqa: S311 no secret
    stopped: list[tuple[float, int]] = []
    while not scene.stop.wait(scene.kill_period):
        due = [pid for at, pid in stopped if at <= monotonic()]
        stopped = [item for item in stopped if item[1] not in due]
        for pid in due:
            _send(scene, pid, signal.SIGCONT)
        workers = [worker for worker in scene.master.statistics().workers if worker.pid]
        if not workers:
            continue
        worker = chance.choice(workers)
        pid = worker.pid or 0
        [number] = chance.choices([*_SIGNALS], [*_SIGNALS.values()])
        _send(scene, pid, number)
        scene.books.count(f"acts against rank {worker.rank}")
        if number == signal.SIGSTOP and chance.random() < scene.continue_share:
            stopped.append((monotonic() + chance.uniform(0.0, 1.0), pid))
    for worker in scene.master.statistics().workers:
        if worker.pid:
            _send(scene, worker.pid, signal.SIGCONT)


def _send(scene: Scene, pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        scene.books.count(f"sent {number.name}")


def update_weights(scene: Scene) -> None:
    """New weights again and again: version n of them is n throughout."""
    books = scene.books
    while not scene.stop.wait(_UPDATE_PERIOD):
        version = books.updated + 1
        books.updating = version
        try:
            number = scene.master.update_weights(
                {"w": np.full(COLUMNS, version, np.float32)}, timeout=_UPDATE_PERIOD
            )
        except QueueFullError:
            books.count("updates without memory")
            continue
        books.updated = version
        books.count("updates")
        if number != version:
            books.find(f"version {version} of the weights is number {number}")


def restart_workers(scene: Scene) -> None:
    """All workers replaced, now and then; amid kills that may come to nothing."""
    while not scene.stop.wait(_RESTART_PERIOD):
        try:
            scene.master.restart_workers(timeout=_RESTART_PATIENCE)
            scene.books.count("restart_workers: done")
        except (ReadyTimeoutError, WorkerDiedError) as exc:
            scene.books.count(f"restart_workers: {type(exc).__name__}")


def watch(scene: Scene) -> None:
    """Ask for statistics and health all the time: they agree with themselves, and nothing goes back."""
    before = scene.master.statistics()
    while not scene.stop.wait(_INTERVAL):
        began = monotonic()
        now = scene.master.statistics()
        health = scene.master.health()
        seconds = monotonic() - began
        scene.books.count("looks")
        if seconds > SLACK:
            scene.books.find(f"statistics() and health() took {seconds:.1f} s")
        for fault in (*_faults(before, now), *_faults_of_health(health.state, now)):
            scene.books.find(fault)
        before = now


def _faults(before: Statistics, now: Statistics) -> list[str]:
    counts = ("accepted", "succeeded", "failed", "cancelled", "weights_version")
    faults = [
        f"statistics: {name} went from {getattr(before, name)} to {getattr(now, name)}"
        for name in counts
        if getattr(now, name) < getattr(before, name)
    ]
    settled = now.succeeded + now.failed + now.cancelled
    if now.accepted != settled + now.in_flight:
        faults.append(
            f"statistics: {now.accepted} requests accepted, {settled} settled and {now.in_flight} in flight"
        )
    if now.memory_used_bytes < 0 or now.in_flight_bytes < 0 or now.queued > now.in_flight:
        faults.append(f"statistics: {now}")
    for old, new in zip(before.workers, now.workers, strict=True):
        if new.restarts < old.restarts or new.completed < old.completed:
            faults.append(f"statistics: worker {new.index} went from {old} to {new}")
    return faults


def _faults_of_health(state: str, now: Statistics) -> list[str]:
    faults = []
    if state not in _ALIVE or now.health.state not in _ALIVE:
        faults.append(f"the health of a pool that has restarts left is {now.health}, then {state}")
    serving = sum(worker.state in ("ready", "busy") for worker in now.workers)
    if now.health.serving > serving:
        faults.append(f"{now.health}, and {serving} are ready or busy")
    return faults
