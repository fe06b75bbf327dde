"""How fast each worker is, and so how many rows of a batch each is to get. Pure, for the scheduler.

::

    answered request ── rows and run seconds of each worker ──► learn: speeds, moving averages
    speeds ── only where the rows should change enough ──► shares ── taken by callers ──► their plans

A speed is relative. What one request shows are the speeds of its workers compared with each other, in that
request: how many rows a second it makes says as much about the size of its rows. So a model that gets small
and large rows in turn keeps one speed for each worker, and a worker that had no part in a request keeps its
own.

*Hysteresis*: callers keep their plans, and the memory laid out for them, for each value of `shares`. It
stays as it is while a batch is expected to take at most `TOLERANCE` longer than with shares that fit exactly.

A worker that gets no rows, because it is slow or new and batches are small, would never be measured again.
Now and then *one* request has a row for it: its run then takes a small part of the time since its last one.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from mcinfer.sharding import Shares

AVERAGED = 5
"""How many measures a moving average goes back; each new one has a weight of one in so many."""

TOLERANCE = 0.05
"""How much longer than with exact shares a batch may be expected to take."""

PROBE_INTERVAL = 5.0
"""Seconds without a measure after which a worker gets a row, to be measured again."""

SUDDEN = 1.25
"""A measure that is off by more than this factor counts as if it were off by that, unless it comes again."""

CONFIRMED = 3
"""After so many of these in a row, all too fast or all too slow, the average starts anew."""

_PROBE_PART = 0.05
"""The most that such rows may take of a worker's time."""

_SHORTEST = 1e-6  # seconds of a run: clocks do not show less
_SLOWEST = 1e-6  # times the usual speed


class Balance:
    """The speeds of a pool's workers. They stay through restarts of a worker.

    Only the loop calls it, but for `take_shares` and `give_back`: any thread may call these.

    Args:
        workers: How many.
        pieces: Into how many pieces to cut the rows of one worker for each run that it executes at once.

    Attributes:
        shares: What each worker is to get of a batch; None if all are to get the same, because less than
            two serve, or none was measured.
    """

    def __init__(self, workers: int, pieces: int = 1) -> None:
        self.shares: Shares | None = None
        self._pieces = pieces
        self._at_once = 1
        self._serving: tuple[int, ...] = ()
        self._speeds: dict[int, float] = {}
        self._rates: dict[int, float] = {}
        self._measures = [0] * workers  # that the average is made of
        self._sudden = [0] * workers  # in a row: too fast, or as a negative number too slow
        self._measured = [-math.inf] * workers  # when
        self._learned = 0.0  # when anything was
        self._offered = [-math.inf] * workers  # when a request was to have a row for it
        # Shares with such a row, until a request takes them.
        self._probes: deque[Shares] = deque(maxlen=1)
        self._seconds = [0.0] * workers  # of the last run

    def rows_per_second(self, worker: int) -> float | None:
        """The worker's rows a second in late requests; None if it was not measured yet."""
        return self._rates.get(worker)

    def seconds(self, worker: int, rows: int) -> float:
        """How long a run of so many rows is likely to take there; 0 if it was not measured yet."""
        rate = self._rates.get(worker)
        return rows / rate if rate else 0.0

    def take_shares(self) -> Shares | None:
        """The shares for one request: `shares`, or for one of several with a row that measures a worker."""
        if self._probes:
            with suppress(IndexError):  # another thread was faster
                return self._probes.pop()
        return self.shares

    def give_back(self, shares: Shares) -> None:
        """A request had no row to spare; another one gets what measures a worker, if these shares have it."""
        if shares.probe is not None:
            self._probes.append(shares)

    def serve(self, workers: Sequence[int], at_once: int = 1) -> None:
        """These workers take requests from now on, and no others; in ascending order.

        `at_once`: how many runs one of them executes at once.
        """
        if self._serving != (serving := tuple(workers)) or self._at_once != at_once:
            self._at_once = at_once
            for worker in {*serving} - {*self._serving}:
                if worker in self._speeds:  # it was away, and is as good as measured
                    self._measured[worker] = self._learned
            self._serving = serving
            self._publish()

    def learn(self, runs: Mapping[int, tuple[int, float]], now: float) -> None:
        """A request was answered; by worker, the rows that it ran and the seconds of its runs."""
        rates = {w: rows / max(seconds, _SHORTEST) for w, (rows, seconds) in runs.items()}
        known = [self._speeds[worker] for worker in rates if worker in self._speeds]
        if known:
            pace = sum(rates[w] for w in rates if w in self._speeds) / sum(known)
        else:  # those that are new are together as fast as others
            pace = sum(rates.values()) / len(rates) / self._usual([*self._speeds.values()])
        for worker, rate in rates.items():
            count = self._average(worker, rate / pace)
            usual = self._rates.get(worker, rate)
            self._rates[worker] = usual + (rate - usual) / count
            self._measured[worker] = now
            self._seconds[worker] = runs[worker][1]
        # Only their proportions count. Else they grow without end, and one that is too small becomes zero.
        usual = self._usual([*self._speeds.values()])
        self._speeds = {w: max(s / usual, _SLOWEST) for w, s in self._speeds.items()}
        self._learned = now
        self._publish()

    def _average(self, worker: int, speed: float) -> int:
        """Take a measure into the worker's average; of how many that is made now."""
        before = self._speeds.get(worker)
        if before is None:
            before = speed
        elif self._is_stale(worker):  # what was before counts no more than this
            self._measures[worker] = 1
            self._sudden[worker] = 0
        else:
            side = (speed > before * SUDDEN) - (speed * SUDDEN < before)
            row = self._sudden[worker]
            row = row + side if side * row > 0 else side
            if abs(row) < CONFIRMED:
                speed = min(max(speed, before / SUDDEN), before * SUDDEN)
            else:
                self._measures[worker] = row = 0
            self._sudden[worker] = row
        self._measures[worker] = count = min(self._measures[worker] + 1, AVERAGED)
        self._speeds[worker] = before + (speed - before) / count
        return count

    @staticmethod
    def _usual(speeds: Sequence[float]) -> float:
        """What to expect of a worker that was not measured."""
        return sum(speeds) / len(speeds) if speeds else 1.0

    def _is_stale(self, worker: int) -> bool:
        """Whether others were measured for long, and it was not."""
        return self._learned - self._measured[worker] >= self._interval(worker)

    def _interval(self, worker: int) -> float:
        """After how many seconds it gets a row, to be measured again."""
        return max(PROBE_INTERVAL, self._seconds[worker] / _PROBE_PART)

    def _publish(self) -> None:
        """Set `shares`, as far as what is known has changed enough."""
        serving, before = self._serving, self.shares
        known = [self._speeds[worker] for worker in serving if worker in self._speeds]
        is_left = bool(self._probes)  # no request took the row that was offered
        self._probes.clear()
        if len(serving) < 2 or not known:
            self.shares = None
            return
        usual = self._usual(known)
        speeds = [self._speeds.get(worker, usual) for worker in serving]
        total = sum(speeds)
        weights = tuple(speed / total for speed in speeds)
        if before is not None and before.workers == serving:
            longer = max(old / new for old, new in zip(before.weights, weights, strict=True))
            if longer <= 1 + TOLERANCE:
                weights = before.weights
        pieces = self._pieces * self._at_once
        shares = Shares(workers=serving, weights=weights, pieces=pieces)
        if shares != before:
            self.shares = shares
        # The one that was not measured for longest. A request that took its row may take long, or fail.
        stale = [
            i
            for i, w in enumerate(serving)
            if self._is_stale(w)
            and (is_left or self._learned - self._offered[w] >= self._interval(w))
        ]
        if stale:
            probe = min(stale, key=lambda i: self._measured[serving[i]])
            self._offered[serving[probe]] = self._learned
            self._probes.append(replace(shares, probe=probe))
