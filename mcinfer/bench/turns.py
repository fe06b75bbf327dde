"""Taking a turn, in the process that the way lives in."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from math import ceil
from typing import Any

import psutil

from mcinfer.bench.load import Outcome, offer
from mcinfer.bench.report import QUANTILES, Load, Memory, Turn
from mcinfer.bench.way import Arrays, RunningWay


def take_turn(
    way: RunningWay,
    inputs: Arrays,
    load: Mapping[str, Any],
    *,
    seconds: float,
    count: int,
    warmup: float,
    seed: int,
) -> dict[str, Any]:
    """Warm up, make load, and count; a `Turn` as a mapping.

    Raises:
        Exception: What the first request raised, where none was answered.
    """
    wanted = Load(**load)
    request = partial(way.run, inputs)
    # By the same number of clients, so that all that they need is there; at no rate, which is quicker.
    closed = Load(batch=wanted.batch, clients=wanted.clients)
    offer(request, closed, seconds=warmup, count=0, seed=0)
    runs, run_seconds = way.run_seconds()
    cpu = _cpu_seconds()
    outcome = offer(request, wanted, seconds=seconds, count=count, seed=seed)
    cpu_seconds = max(0.0, _cpu_seconds() - cpu)
    if outcome.errors and not outcome.latencies:
        raise outcome.errors[0]
    runs_after, run_seconds_after = way.run_seconds()
    done = runs_after - runs
    mean_run = (run_seconds_after - run_seconds) / done if done else None
    return asdict(_turn(outcome, mean_run, cpu_seconds))


def _turn(outcome: Outcome, run_seconds: float | None, cpu_seconds: float) -> Turn:
    latencies = sorted(outcome.latencies)
    return Turn(
        requests=len(latencies),
        failed=outcome.failed,
        unfinished=outcome.unfinished,
        seconds=outcome.seconds,
        latencies=tuple(nearest_rank(latencies, fraction) for fraction in QUANTILES)
        if latencies
        else (),
        mean_latency=sum(latencies) / len(latencies) if latencies else 0.0,
        run_seconds=run_seconds,
        cpu_seconds=cpu_seconds,
    )


def nearest_rank(ordered: list[float], fraction: float) -> float:
    """The least value that so large a part of them does not exceed; one that occurred."""
    # A fraction such as 0.28 times 25 is 7.000000000000001: not the 8th.
    rank = ceil(round(fraction * len(ordered), 9))
    return ordered[max(0, rank - 1)]


def _processes() -> list[psutil.Process]:
    here = psutil.Process()
    return [here, *here.children(recursive=True)]


def _cpu_seconds() -> float:
    """Processor time so far of this process and those below it."""
    total = 0.0
    for process in _processes():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        # Of children that have ended and were waited for, too: one that did so meanwhile is not lost.
        total += times.user + times.system + times.children_user + times.children_system
    return total


def memory() -> dict[str, Any]:
    """A `Memory` of this process and those below it, as a mapping."""
    pss = uss = processes = 0
    for process in _processes():
        try:
            sizes = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        pss += sizes.pss
        uss += sizes.uss
        processes += 1
    return asdict(Memory(pss=pss, uss=uss, processes=processes))
