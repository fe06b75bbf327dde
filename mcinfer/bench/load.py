"""Making load: closed loops of so many clients, and open loops of arrivals that wait for nobody.

In a closed loop a slow answer holds up the client that would have asked next, so the times it would have
seen are missing (coordinated omission). In an open loop requests arrive when they arrive: latency counts from
the arrival, also where every client is busy by then.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from time import perf_counter, sleep

from mcinfer.bench.report import Load

Request = Callable[[], object]


MAX_ARRIVALS = 1_000_000
"""Of one open loop: more than a Python program makes in an hour."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of the requests of one turn.

    Attributes:
        answers: Of those that were answered, when each began (or arrived) and when its answer came.
        error: What one of the others raised; None if none did.
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


def offer(request: Request, load: Load, *, seconds: float, count: int, seed: int) -> Outcome:
    """Make requests as the load says, from threads of its own; returns when all have been answered.

    Args:
        request: Makes one request and waits for its answer; any number of threads call it at once.
        load: How many clients, and at which rate if that is given.
        seconds: How long, if `count` is 0. An open loop that falls behind is given as long again to catch up.
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
            except BaseException as exc:  # whatever the way raises is for the report
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
    turn.start()
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

    def __init__(self, seconds: float, count: int) -> None:
        self._seconds = seconds
        self._count = count
        self._made = 0
        self._lock = threading.Lock()
        self.started = 0.0

    def start(self) -> None:
        self.started = perf_counter()

    def begins(self) -> Iterator[float]:
        """For one client: when each of its requests begins, which is now."""
        if self._count:
            while self._next():
                yield perf_counter()
        else:
            stop = self.started + self._seconds
            now = perf_counter()
            yield now  # at least one
            while (now := perf_counter()) < stop:
                yield now

    def _next(self) -> bool:
        with self._lock:
            self._made += 1
            return self._made <= self._count


class _OpenLoop:
    """Arrivals of a Poisson process, drawn beforehand: each is taken by the next client that is free."""

    def __init__(self, rate: float, seconds: float, count: int, seed: int) -> None:
        self._arrivals = arrivals(rate, seconds, count, seed)
        last = self._arrivals[-1]
        self._give_up = last + max(seconds, last, 1.0)
        self._taken = 0
        self._lock = threading.Lock()
        self.started = 0.0

    @property
    def unfinished(self) -> int:
        return len(self._arrivals) - self._taken

    def start(self) -> None:
        self.started = perf_counter()

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

    The gaps between them are drawn from an exponential distribution. There is at least one.
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

    By Little's law as many are under way as arrive while one is answered. Had the first quarter's latency
    lasted, so many would be under way at the last arrival; where there are more, by more than chance brings
    (three times the square root, and a twentieth of all), the queue has grown.

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
