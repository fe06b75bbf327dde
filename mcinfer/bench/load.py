"""Making load, and measuring it: closed loops of clients, and open loops of Poisson arrivals.

In a closed loop a slow answer holds up the client that would have asked next, so the times it would have
seen are missing (coordinated omission). In an open loop requests arrive at their moments: latency counts from
the arrival, also where every client is busy by then.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count as counting
from math import ceil, sqrt
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, TypeVar

import msgpack
import numpy as np
import psutil
from numpy.typing import NDArray

from mcinfer.bench.report import QUANTILES, Load, Memory, Turn
from mcinfer.bench.way import Arrays, RunningWay
from mcinfer.specs import STRING, element_type_name, numpy_dtype

MAX_ARRIVALS = 1_000_000
"""Most arrivals of an open loop: more than a Python program makes in an hour."""

_MAX_TEXT = 2000
"""Characters of a failed request's error."""
_CATCH_UP_SECONDS = 1.0

_T = TypeVar("_T")


def rotated(entries: Sequence[_T], repeat: int) -> list[_T]:
    """Each repeat begins with another entry, so that none always follows the same."""
    first = repeat % max(1, len(entries))
    return [*entries[first:], *entries[:first]]


@dataclass(slots=True)
class LoadOutcome:
    """The requests of one turn.

    Attributes:
        answers: For each answered request, when it began (or arrived) and when its answer came.
        errors: The error of each request that failed.
        unfinished: Arrivals that no client had begun with when the turn was over.
        seconds: From the first request to the last answer.
        measured: Latencies by their fraction, where what made the load has measured them.
    """

    answers: list[tuple[float, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unfinished: int = 0
    seconds: float = 0.0
    measured: Mapping[float, float] = field(default_factory=dict)

    @property
    def latencies(self) -> list[float]:
        return sorted(end - begin for begin, end in self.answers)

    def latencies_at(self, parts: Sequence[float]) -> tuple[float, ...]:
        """Those at such fractions; empty without an answer."""
        found = self.latencies
        return tuple(
            self.measured.get(part) or nearest_rank(found, part) for part in parts if found
        )


def offer(
    request: Callable[[], object], load: Load, *, seconds: float, count: int, seed: int
) -> LoadOutcome:
    """Make requests as the load says, from threads of its own; returns when all have been answered.

    The load lasts for `seconds`, or for `count` requests where that is not 0. An open loop that falls behind
    gets as long again to catch up; `seed` is that of its arrivals.
    """
    outcome = LoadOutcome()
    moments = arrivals(load.rate, seconds, count, seed) if load.rate else []
    total = len(moments) or count
    numbers = counting()  # one for all clients: `next` of it is atomic

    def begins() -> Iterator[float]:
        """For one client: when each of its requests begins, or has arrived."""
        if not total:
            yield perf_counter()  # at least one
            while (now := perf_counter()) < started + seconds:
                yield now
            return
        while (number := next(numbers)) < total:
            if not moments:
                yield perf_counter()
                continue
            if perf_counter() > give_up:
                return
            arrival = started + moments[number]
            if (wait := arrival - perf_counter()) > 0:
                sleep(wait)
            yield arrival

    def client() -> None:
        kept: object = None  # the answer, until the next one is there
        for begin in begins():
            try:
                kept = request()
            except BaseException as exc:  # the report shows it, whatever it is
                outcome.errors.append(f"{type(exc).__name__}: {exc}"[:_MAX_TEXT])
            else:
                outcome.answers.append((begin, perf_counter()))
        del kept

    threads = [threading.Thread(target=client, daemon=True) for _ in range(load.clients)]
    started = perf_counter()
    if moments:
        give_up = started + moments[-1] + max(seconds, moments[-1], _CATCH_UP_SECONDS)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.seconds = perf_counter() - started
    outcome.unfinished = max(0, len(moments) - len(outcome.answers) - len(outcome.errors))
    return outcome


def arrivals(rate: float, seconds: float, count: int, seed: int) -> list[float]:
    """Moments of a Poisson process, in seconds from its start: `count` of them, or those within `seconds`.

    There is at least one.
    """
    draw = random.Random(seed)  # noqa: S311 no secret
    moments: list[float] = []
    at = draw.expovariate(rate)
    while len(moments) < count if count else at < seconds:
        moments.append(at)
        at += draw.expovariate(rate)
    return moments or [seconds * draw.random()]


def kept_up(answers: Sequence[tuple[float, float]]) -> bool:
    """Whether requests were answered as fast as they arrived, from when each arrived and was answered.

    By Little's law as many are under way as arrive while one is answered. At the last arrival that is the
    rate times the first quarter's latency; where more are under way, by more than chance brings (three times
    the square root, and a twentieth of all), the queue has grown.
    """
    if len(answers) < 2:
        return True
    ordered = sorted(answers)
    first, last = ordered[0][0], ordered[-1][0]
    rate = len(ordered) / max(last - first, 1e-9)
    early = ordered[: max(1, len(ordered) // 4)]
    usual = sum(end - begin for begin, end in early) / len(early)
    waiting = sum(end > last for _, end in ordered)
    expected = rate * usual
    return waiting <= expected + 3 * sqrt(expected + 1) + len(ordered) / 20


def nearest_rank(ordered: Sequence[float], fraction: float) -> float:
    """The least value that this part of all values does not exceed; it is one of them."""
    # A fraction such as 0.28 times 25 is 7.000000000000001: not the 8th.
    rank = ceil(round(fraction * len(ordered), 9))
    return ordered[max(0, rank - 1)]


# In the process that the way lives in.


def take_turn(
    way: RunningWay,
    inputs: Arrays,
    load: Load,
    *,
    seconds: float = 0.0,
    count: int = 0,
    warmup: float = 0.0,
    seed: int = 0,
    make: Callable[..., LoadOutcome] = offer,
) -> Turn:
    """Warm up, make load, and count; `make` does so as `offer` does.

    The warm-up takes `warmup` seconds, of as many clients as keep the workers busy, each of which makes one
    request at least.
    """
    request = partial(way.run, inputs)
    closed = Load(batch=load.batch, clients=min(load.clients, max(1, 2 * way.workers)))
    offer(request, closed, seconds=warmup, count=0, seed=0)
    runs, run_seconds = way.run_seconds()
    cpu = _cpu_seconds()
    outcome = make(request, load, seconds=seconds, count=count, seed=seed)
    cpu_seconds = max(0.0, _cpu_seconds() - cpu)
    runs_after, run_seconds_after = way.run_seconds()
    done = runs_after - runs
    found = outcome.latencies
    return Turn(
        requests=len(found),
        failed=len(outcome.errors),
        unfinished=outcome.unfinished,
        seconds=outcome.seconds,
        latencies=outcome.latencies_at(QUANTILES),
        mean_latency=sum(found) / max(1, len(found)),
        run_seconds=(run_seconds_after - run_seconds) / done if done else None,
        cpu_seconds=cpu_seconds,
        kept_up=load.rate is None or (not outcome.unfinished and kept_up(outcome.answers)),
        error=next(iter(outcome.errors), ""),
        runs=done,
    )


def _of_all_processes(read: Callable[[psutil.Process], _T]) -> list[_T]:
    """A figure of this process and those below it; without those that have just ended."""
    here = psutil.Process()
    found = []
    for process in (here, *here.children(recursive=True)):
        try:
            found.append(read(process))
        except psutil.NoSuchProcess:
            continue
    return found


def _cpu_seconds() -> float:
    """Processor time so far, also of children that have ended and were waited for."""
    times = _of_all_processes(psutil.Process.cpu_times)
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def memory() -> Memory:
    sizes = _of_all_processes(psutil.Process.memory_full_info)
    return Memory(
        pss=sum(s.pss for s in sizes), uss=sum(s.uss for s in sizes), processes=len(sizes)
    )


# A request in a file, for another process. MessagePack: .npy files hold neither bfloat16 nor strings of any
# length without pickling.


def largest_difference(answer: Arrays, expected: Arrays) -> float | None:
    """The largest difference of an output's values, over the largest expected one; None for other shapes.

    Of the output for which that is the largest. Texts, infinities and NaN are equal or not: 0 or 1.
    """
    largest = 0.0
    for name, right in expected.items():
        found = answer[name]
        if found.shape != right.shape:
            return None
        if right.dtype.kind in "OSU":
            largest = max(largest, float((found != right).any()))
            continue
        kind = np.complex128 if right.dtype.kind == "c" else np.float64
        a, b = found.astype(kind).ravel(), right.astype(kind).ravel()
        finite = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            largest = max(largest, 1.0)
        a, b = a[finite], b[finite]
        gap, size = np.abs(a - b).max(initial=0.0), np.abs(b).max(initial=0.0)
        largest = max(largest, float(gap / size) if size else float(gap > 0))
    return largest


def write_request(path: Path, arrays: Arrays) -> None:
    with path.open("wb") as file:
        for name, array in arrays.items():
            kind = element_type_name(array.dtype)
            data = array.ravel().tolist() if kind == STRING else array.tobytes()
            file.write(msgpack.packb([name, kind, array.shape, data]))


def request_types(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """By input, the element type and the shape of its array in such a file."""
    arrays = read_request(path)
    return {name: (element_type_name(array.dtype), array.shape) for name, array in arrays.items()}


def read_request(path: Path) -> dict[str, NDArray[Any]]:
    arrays = {}
    with path.open("rb") as file:
        limit = max(1, path.stat().st_size)
        for name, kind, shape, data in msgpack.Unpacker(file, max_buffer_size=limit):
            dtype = numpy_dtype(kind)
            flat = np.array(data, dtype) if kind == STRING else np.frombuffer(data, dtype).copy()
            arrays[name] = flat.reshape(shape)
    return arrays
