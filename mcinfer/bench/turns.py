"""Taking a turn, in the process that the way lives in."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from math import ceil
from typing import Any

import psutil

from mcinfer.bench.failures import WayFailedError
from mcinfer.bench.load import Outcome, kept_up, offer
from mcinfer.bench.report import QUANTILES, Load, Memory, Turn
from mcinfer.bench.way import Arrays, RunningWay

_MAX_TEXT = 2000
"""Characters of what a request raised."""


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
        WayFailedError: No request was answered; says why.
    """
    wanted = Load(**load)
    request = partial(way.run, inputs)
    # As many clients as keep the workers busy, each with one request at least; at no rate.
    closed = Load(batch=wanted.batch, clients=min(wanted.clients, max(1, 2 * way.workers)))
    offer(request, closed, seconds=warmup, count=0, seed=0)
    runs, run_seconds = way.run_seconds()
    cpu = _cpu_seconds()
    outcome = offer(request, wanted, seconds=seconds, count=count, seed=seed)
    cpu_seconds = max(0.0, _cpu_seconds() - cpu)
    if not outcome.answers:
        raise WayFailedError(_describe(outcome.error))
    runs_after, run_seconds_after = way.run_seconds()
    done = runs_after - runs
    mean_run = (run_seconds_after - run_seconds) / done if done else None
    return asdict(_turn(outcome, wanted, mean_run, cpu_seconds))


def _turn(outcome: Outcome, load: Load, run_seconds: float | None, cpu_seconds: float) -> Turn:
    latencies = outcome.latencies
    return Turn(
        requests=len(latencies),
        failed=outcome.failed,
        unfinished=outcome.unfinished,
        seconds=outcome.seconds,
        latencies=tuple(nearest_rank(latencies, fraction) for fraction in QUANTILES),
        mean_latency=sum(latencies) / len(latencies),
        run_seconds=run_seconds,
        cpu_seconds=cpu_seconds,
        kept_up=load.rate is None or (not outcome.unfinished and kept_up(outcome.answers)),
        error=_describe(outcome.error) if outcome.failed else "",
    )


def _describe(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT]


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
