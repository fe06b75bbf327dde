"""What a server counts: its own figures, or those of all processes that answer at one address.

::

    process 0 ── each second, at a scrape, at its end ──► FOLDER/0 ─┐
    process 1 ──────────────────────────────────────────► FOLDER/1 ─┴─► their sum: metrics, statistics, page

Each process has a place, which is a file and a lock. What takes the place of a process that has ended goes on
counting where that one stopped, so sums never fall; a process that is killed takes along what it counted in
its last second. The multiprocess mode of prometheus_client, which adds up in the same way, has no collectors,
and masters count for themselves.

Ownership: the supervisor has the folder, a process the lock on its place until it ends.
"""

import asyncio
import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from math import isnan
from operator import add
from pathlib import Path
from typing import Any

from msgspec import msgpack

from mcinfer.errors import Refusal
from mcinfer.private import take_lock
from mcinfer.serve.models import Models
from mcinfer.statistics import Health, Histogram, Statistics, WorkerStatistics

_SECONDS = 1.0
"""Between two times that a process writes its figures."""

ALL_SERVE = "all"
"""The file in the folder that says that requests should come: all processes serve, and none is to end."""

_TRIES = 4
"""To take a place: for a moment one that looks for figures may have the lock, too."""

_COUNTS = ("accepted", "succeeded", "failed", "cancelled")
_NOW = (
    "in_flight",
    "in_flight_bytes",
    "queued",
    "queued_shards",
    "memory_bytes",
    "memory_used_bytes",
)
_OF_WORKER = ("restarts", "runs", "completed", "failed", "busy_seconds", "wide")


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Of one version of a model; `last` is when a request last came, in seconds since 1970, or 0."""

    name: str
    version: str
    last: float
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Figures at one moment.

    Attributes:
        models: Those that are served.
        answers: Over HTTP, by model and status.
    """

    models: tuple[ModelFigures, ...] = ()
    answers: tuple[tuple[str, int, int], ...] = ()


class Figures:
    """The figures of this process's models, and of those of the processes beside it.

    Args:
        models: Of this process.
        folder: Where several processes have their figures, or None: there is no other one.

    Attributes:
        place: The number of this process among those that have a folder together.
    """

    def __init__(self, models: Models, folder: Path | None = None) -> None:
        self._models, self._folder, self.place = models, folder, 0
        self._answers: Counter[tuple[str, int]] = Counter()
        self._before = Snapshot()
        if folder is not None:
            for tried in count():
                self.place = tried // _TRIES
                self._lock = take_lock(folder / f"{self.place}.lock")
                if self._lock is not None:
                    break
                time.sleep(0.001)
            self._before = ended(_read(folder / f"{self.place}"))
            self._write(self._before)  # it serves nothing yet

    def count(self, model: str, status: int) -> None:
        """Count an answer; `model` is empty for one that is not there."""
        self._answers[model, status] += 1

    def taken(self) -> Snapshot:
        """The sum over all processes, of which the others' are a second old at most."""
        own = self._own()
        if self._folder is None:
            return own
        self._write(own)
        others = sorted(self._folder.glob("*.lock"))
        return summed(own if lock.stem == f"{self.place}" else _other(lock) for lock in others)

    @property
    def all_serve(self) -> bool:
        """Whether the processes beside this one serve, too, and the supervisor goes on."""
        return self._folder is None or (self._folder / ALL_SERVE).exists()

    @property
    def process(self) -> str:
        """Which of several processes this one is, in words; empty if there is no other one."""
        return f"answered by process {self.place}, pid {os.getpid()}" if self._folder else ""

    async def keep(self) -> None:
        """Write this process's figures for the others, until it is cancelled."""
        try:
            while True:
                self._write(self._own())
                await asyncio.sleep(_SECONDS)
        finally:
            self._write(ended(self._own(), workers=False))

    def _own(self) -> Snapshot:
        models = [
            ModelFigures(
                name,
                each.version,
                each.last,
                _placed(each.master.statistics(), self.place, each.refused),
            )
            for name, each in self._models.loaded()
        ]
        answers = tuple((*of, number) for of, number in self._answers.items())
        served = {(each.name, each.version) for each in models}
        before = [each for each in self._before.models if (each.name, each.version) in served]
        own = Snapshot(tuple(models), answers)
        return summed((replace(self._before, models=tuple(before)), own))

    def _write(self, snapshot: Snapshot) -> None:
        if self._folder is not None:
            new = self._folder / f"{self.place}.new"
            with suppress(OSError):  # the supervisor has ended
                new.write_bytes(msgpack.encode(snapshot))
                new.rename(self._folder / f"{self.place}")


def served(folder: Path) -> list[str]:
    """The names of the models that processes serve, or those whose places they have."""
    found = summed(_read(lock.with_suffix("")) for lock in sorted(folder.glob("*.lock")))
    return [*dict.fromkeys(each.name for each in found.models)]


def _read(file: Path) -> Snapshot:
    with suppress(FileNotFoundError):  # it has just begun
        return msgpack.decode(file.read_bytes(), type=Snapshot)
    return Snapshot()


def _other(lock: Path) -> Snapshot:
    """The figures of another process."""
    found = _read(lock.with_suffix(""))
    fd = take_lock(lock, fcntl.LOCK_SH)
    if fd is None:
        return found
    os.close(fd)
    return ended(found)


def _placed(one: Statistics, place: int, refused: Mapping[str, int]) -> Statistics:
    """With what the server itself has refused; workers of several processes have numbers that differ."""
    workers = (replace(w, index=w.index + place) for w in one.workers)
    return replace(one, workers=tuple(workers), refused=_added_counts(one.refused, refused))


def ended(of: Snapshot, *, workers: bool = True) -> Snapshot:
    """What is left of the figures of a process: what was counted, and its workers if it is to come again."""
    models, none = [], dict.fromkeys(_NOW, 0)
    for each in of.models:
        was = each.statistics
        gone = (replace(w, pid=None, state="gone", restarts=w.restarts + 1) for w in was.workers)
        left = replace(
            was,
            **none,  # type: ignore[arg-type]
            accepted=was.accepted - was.in_flight,
            health=replace(was.health, reasons=(), serving=0, workers=0),
            workers=tuple(gone) if workers else (),
        )
        models.append(replace(each, statistics=left))
    return replace(of, models=tuple(models))


# Sums.


def summed(snapshots: Iterable[Snapshot]) -> Snapshot:
    models: dict[tuple[str, str], ModelFigures] = {}
    answers: Counter[tuple[str, int]] = Counter()
    for snapshot in snapshots:
        for new in snapshot.models:
            if old := models.get((new.name, new.version)):
                both = _added(old.statistics, new.statistics)
                new = replace(new, last=max(old.last, new.last), statistics=both)
            models[new.name, new.version] = new
        for model, status, number in snapshot.answers:
            answers[model, status] += number
    return Snapshot(tuple(models.values()), tuple((*of, n) for of, n in answers.items()))


def _added(old: Statistics, new: Statistics) -> Statistics:
    numbers = {n: getattr(old, n) + getattr(new, n) for n in (*_COUNTS, *_NOW)}
    workers = {worker.index: worker for worker in old.workers}
    for worker in new.workers:
        workers[worker.index] = _added_worker(workers.get(worker.index), worker)
    states = {each.health.state for each in (old, new) if each.health.workers}
    return replace(
        new,
        **numbers,
        refused=_added_counts(old.refused, new.refused),
        latency=_added_histogram(old.latency, new.latency),
        batch_sizes=_added_histogram(old.batch_sizes, new.batch_sizes),
        health=Health(
            state=states.pop() if len(states) == 1 else "degraded",
            reasons=(*old.health.reasons, *new.health.reasons),
            serving=old.health.serving + new.health.serving,
            workers=old.health.workers + new.health.workers,
        ),
        workers=tuple(workers[index] for index in sorted(workers)),
        join_gain=old.join_gain if isnan(new.join_gain) else new.join_gain,
    )


def _added_worker(old: WorkerStatistics | None, new: WorkerStatistics) -> WorkerStatistics:
    if old is None:
        return new
    return replace(new, **{n: getattr(old, n) + getattr(new, n) for n in _OF_WORKER})


def _added_counts(old: Mapping[Refusal, int], new: Mapping[Any, int]) -> dict[Refusal, int]:
    return {reason: number + new.get(reason, 0) for reason, number in old.items()}


def _added_histogram(old: Histogram, new: Histogram) -> Histogram:
    counts = tuple(map(add, old.counts, new.counts))
    return replace(new, counts=counts, total=old.total + new.total)
