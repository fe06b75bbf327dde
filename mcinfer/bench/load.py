"""Making load, and measuring it: closed loops of clients, and open loops of Poisson arrivals.

In a closed loop a slow answer holds up the client that would have asked next, so the times it would have
seen are missing (coordinated omission). In an open loop requests arrive at their moments: latency counts from
the arrival, also where every client is busy by then.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, sqrt
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, TypeVar

import msgpack
import numpy as np
import psutil
from numpy.typing import NDArray

from mcinfer.bench.known_ways import WayFailedError
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


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The requests of one turn.

    Attributes:
        answers: Of each answered request: when it began (or arrived), and when its answer came.
        error: The error of one that failed; None if none did.
        failed: How many raised.
        unfinished: Arrivals that no client had begun with when the turn was over.
        seconds: From the first request to the last answer.
    """

    answers: list[tuple[float, float]] = field(default_factory=list)
    error: BaseException | None = None
    failed: int = 0
    unfinished: int = 0
    seconds: float = 0.0

    @property
    def latencies(self) -> list[float]:
        """Seconds of each answered request, ascending."""
        return sorted(end - begin for begin, end in self.answers)


def offer(
    request: Callable[[], object], load: Load, *, seconds: float, count: int, seed: int
) -> Outcome:
    """Make requests as the load says, from threads of its own; returns when all have been answered.

    Args:
        request: Makes one request and waits for its answer; any number of threads call it at once.
        load: The clients; and the rate of an open loop.
        seconds: How long, if `count` is 0. An open loop that falls behind gets as long again to catch up.
        count: How many requests in all.
        seed: Of the arrivals.
    """
    turn = _OpenLoop(load.rate, seconds, count, seed) if load.rate else _ClosedLoop(seconds, count)
    outcome = Outcome()
    lock = threading.Lock()

    def client() -> None:
        answers: list[tuple[float, float]] = []
        error: BaseException | None = None
        failed = 0
        kept: object = None
        for begin in turn.begins():
            try:
                kept = request()
            except BaseException as exc:  # the report shows it, whatever it is
                error = error or exc
                failed += 1
            else:
                answers.append((begin, perf_counter()))
        del kept
        with lock:
            outcome.answers += answers
            outcome.failed += failed
            outcome.error = outcome.error or error

    threads = [threading.Thread(target=client, daemon=True) for _ in range(load.clients)]
    turn.started = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.seconds = perf_counter() - turn.started
    outcome.unfinished = turn.unfinished
    return outcome


class _ClosedLoop:
    """Each client makes its next request when its last one is answered."""

    unfinished = 0
    started = 0.0

    def __init__(self, seconds: float, count: int) -> None:
        self._seconds = seconds
        self._numbers = iter(range(count)) if count else None
        self._lock = threading.Lock()

    def begins(self) -> Iterator[float]:
        """For one client: when each of its requests begins, which is now."""
        if self._numbers is None:
            stop = self.started + self._seconds
            now = perf_counter()
            yield now  # at least one
            while (now := perf_counter()) < stop:
                yield now
            return
        while True:
            with self._lock:
                if next(self._numbers, None) is None:
                    return
            yield perf_counter()


class _OpenLoop:
    """Arrivals of a Poisson process, drawn beforehand; the next free client takes each."""

    started = 0.0

    def __init__(self, rate: float, seconds: float, count: int, seed: int) -> None:
        self._arrivals = arrivals(rate, seconds, count, seed)
        last = self._arrivals[-1]
        self._give_up = last + max(seconds, last, _CATCH_UP_SECONDS)
        self._taken = 0
        self._lock = threading.Lock()

    @property
    def unfinished(self) -> int:
        return len(self._arrivals) - self._taken

    def begins(self) -> Iterator[float]:
        """For one client: the arrivals that it takes, each not before its time."""
        while True:
            with self._lock:
                late = perf_counter() - self.started > self._give_up
                if late or self._taken == len(self._arrivals):
                    return
                arrival = self.started + self._arrivals[self._taken]
                self._taken += 1
            wait = arrival - perf_counter()
            if wait > 0:
                sleep(wait)
            yield arrival


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
    """Whether requests were answered as fast as they arrived.

    By Little's law as many are under way as arrive while one is answered. At the last arrival that is the
    rate times the first quarter's latency; where more are under way, by more than chance brings (three times
    the square root, and a twentieth of all), the queue has grown.

    Args:
        answers: When each arrived, and when it was answered.
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
    seconds: float,
    count: int,
    warmup: float,
    seed: int,
) -> Turn:
    """Warm up, make load, and count.

    Raises:
        WayFailedError: No request was answered; says why.
    """
    request = partial(way.run, inputs)
    # As many clients as keep the workers busy, each with one request at least; at no rate.
    closed = Load(batch=load.batch, clients=min(load.clients, max(1, 2 * way.workers)))
    offer(request, closed, seconds=warmup, count=0, seed=0)
    runs, run_seconds = way.run_seconds()
    cpu = _cpu_seconds()
    outcome = offer(request, load, seconds=seconds, count=count, seed=seed)
    cpu_seconds = max(0.0, _cpu_seconds() - cpu)
    error = f"{type(outcome.error).__name__}: {outcome.error}"[:_MAX_TEXT]
    if not outcome.answers:
        raise WayFailedError(error)
    runs_after, run_seconds_after = way.run_seconds()
    done = runs_after - runs
    latencies = outcome.latencies
    return Turn(
        requests=len(latencies),
        failed=outcome.failed,
        unfinished=outcome.unfinished,
        seconds=outcome.seconds,
        latencies=tuple(nearest_rank(latencies, fraction) for fraction in QUANTILES),
        mean_latency=sum(latencies) / len(latencies),
        run_seconds=(run_seconds_after - run_seconds) / done if done else None,
        cpu_seconds=cpu_seconds,
        kept_up=load.rate is None or (not outcome.unfinished and kept_up(outcome.answers)),
        error=error if outcome.failed else "",
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
    times = _of_all_processes(lambda process: process.cpu_times())
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def memory() -> Memory:
    """The memory of this process and those below it."""
    sizes = _of_all_processes(lambda process: process.memory_full_info())
    return Memory(
        pss=sum(s.pss for s in sizes), uss=sum(s.uss for s in sizes), processes=len(sizes)
    )


# A request in a file, for another process. MessagePack: .npy files hold neither bfloat16 nor strings of any
# length without pickling.


def write_request(path: Path, arrays: Arrays) -> None:
    """Write the arrays, by name."""
    with path.open("wb") as file:
        for name, array in arrays.items():
            kind = element_type_name(array.dtype)
            data = array.ravel().tolist() if kind == STRING else array.tobytes()
            file.write(msgpack.packb([name, kind, array.shape, data]))


def read_request(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays that `write_request` wrote; the caller owns them."""
    arrays = {}
    with path.open("rb") as file:
        limit = max(1, path.stat().st_size)
        for name, kind, shape, data in msgpack.Unpacker(file, max_buffer_size=limit):
            dtype = numpy_dtype(kind)
            flat = np.array(data, dtype) if kind == STRING else np.frombuffer(data, dtype).copy()
            arrays[name] = flat.reshape(shape)
    return arrays
