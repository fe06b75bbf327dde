"""Whether requests that wait go together in one run, and whether a run waits for more of them. Pure.

* *Whether*: from time to time requests go apart for some runs and together for some, in turns. Where the
  latter are not answered `WORTH` times as fast, requests go apart until the next comparison. What is compared
  is rows over the time that all requests were in flight: by Little's law their latency, and where each caller
  waits for its answer also their rate. Seconds of runs would not say it: a worker may have nothing to do
  while the callers of its run ask again.
* *How many*: an even share of the requests in flight for each run, and one that gathers meanwhile, so that no
  run has all of them while others have none, and the next one can begin at once.
* *When*: requests that one run answered come back together, where callers wait for their answers. So a run
  that could begin waits for its share, `PATIENCE` of a usual run at most.

Where that is not two requests each, as with a single caller, nothing waits. Where runs have company
seldom, nothing is compared: those go together that have to wait anyway.
"""

import math
from statistics import median

WORTH = 1.05
"""How many times as fast requests that join must be answered."""
TURNS = 3, 5
"""Turns of each kind in a comparison: where all of one kind are better, and at the most."""
CLEAR = 1.5
"""How many times as fast they must be answered to need no second turn."""
RUNS = 6
"""Runs of a turn, for each that can go at once, at least."""
TURN = 0.05
"""Seconds of a turn, at least."""
REST = 8, 256
"""How many times as long as a comparison, without lulls, until the next: at first, and at the most. One that
changes nothing doubles it. The next is also due once twice as many requests are in flight."""
PATIENCE = 0.1
"""What part of a usual run a run may wait for company."""

_NEW = 1 / 16  # weight of the latest run in what is usual


class Joining:
    """The policy for requests of one model. Ask `take` before each run, and `learn` from each that succeeded.

    Times are float seconds on any monotonic clock, the same for all calls.

    Args:
        max_requests: Most requests of one run; with 1, none go together.
        at_once: How many runs can go at once: on workers, or in threads.
        waits: Whether a run waits for company, and leaves a share to others; else it takes all that wait.

    Attributes:
        joins: Whether requests that wait may go together now.
        gain: How many times as fast as apart requests were answered together in the last comparison; NaN
            before.
        share: How many requests a run waits for; 1 if it does not wait.
        due: While a run waits for company, when it begins without more; else infinite.
    """

    def __init__(self, max_requests: int, at_once: int = 1, *, waits: bool = True) -> None:
        self.joins = max_requests > 1
        self.gain = math.nan
        self.share = 1
        self.due = math.inf
        self.at_once = at_once
        self._max_requests = max_requests
        self._waits = waits
        self._usual_seconds = 0.0
        self._usual_in_flight = self._then_in_flight = 1.0
        self._company = 0.0  # what part of runs has several requests, while they join
        self._left, self._rest = 0.0, REST[0]  # seconds until the next comparison may begin
        # Of a comparison: how fast each turn apart was, and each turn together; their seconds in all.
        self._rates: tuple[list[float], list[float]] = ([], [])
        self._seconds = 0.0
        # Of a turn: when runs of the one before have ended; its begin, runs, rows and longest run, and for
        # how long requests were in flight, in all.
        self._settled, self._begin = 0.0, math.nan
        self._runs, self._rows, self._longest, self._spent = 0, 0, 0.0, 0.0
        self._end = -math.inf  # of the latest run

    def learn(self, rows: int, requests: int, seconds: float, in_flight: int, now: float) -> None:
        """Learn from a run that has succeeded.

        Args:
            rows: Rows of all its requests.
            requests: How many requests it answered.
            seconds: How long it took.
            in_flight: How many requests were running or waiting as it ended, its own among them.
            now: When it ended.
        """
        if self._max_requests == 1:
            return
        self._usual_seconds += _NEW * (seconds - self._usual_seconds)
        self._usual_in_flight += _NEW * (in_flight - self._usual_in_flight)
        # A mean comes close to what is always so, and does not reach it.
        share = int(self._usual_in_flight / (self.at_once + 1) + 0.1)
        if self.joins:
            self._company += _NEW * ((requests > 1) - self._company)
        if self._usual_in_flight > 2 * (self._then_in_flight + self.at_once):
            self._left, self._then_in_flight = 0.0, self._usual_in_flight
        is_lull = now - self._end > TURN + 4 * max(self._usual_seconds, seconds)
        if self._left <= 0:
            self.joins |= not self._seconds  # a comparison begins with company
            self._spent += max(in_flight, 1) * (now - self._end)
            self._compare(rows, requests, seconds, now, is_lull)
        elif not is_lull:
            self._left -= now - self._end
        self._end = now
        self.share = max(1, min(share, self._max_requests)) if self.joins and self._waits else 1

    def _compare(self, rows: int, requests: int, seconds: float, now: float, is_lull: bool) -> None:
        self._longest = max(self._longest, seconds)
        if math.isnan(self._begin) or is_lull:
            is_usual = self.share > 1 or self._company >= 0.5 if self.joins else requests == 1
            self._begin = now if is_usual and now >= self._settled else math.nan
            self._runs, self._rows, self._spent = 0, 0, 0.0
            return
        self._rows += max(rows, 1)
        self._runs += 1
        elapsed = now - self._begin
        if self._runs < RUNS * self.at_once or elapsed < TURN:
            return
        self._rates[self.joins].append(self._rows / self._spent)
        self._seconds += elapsed
        self.joins, self._settled, self._begin = not self.joins, now + self._longest, math.nan
        self._longest = 0.0
        apart, joined = self._rates
        if len(apart) == len(joined) and (
            len(apart) == TURNS[1]
            or (len(apart) >= TURNS[0] and min(apart) > max(joined))
            or min(joined) > max(apart) * (1 if len(apart) >= TURNS[0] else CLEAR)
        ):
            self._decide()

    def _decide(self) -> None:
        apart, joined = map(median, self._rates)
        paid, self.gain = self.gain >= WORTH, joined / apart
        self.joins = self.gain >= WORTH
        self._rest = min(2 * self._rest, REST[1]) if self.joins == paid else REST[0]
        self._left, self._then_in_flight = self._rest * self._seconds, self._usual_in_flight
        self._rates, self._seconds = ([], []), 0.0

    def take(self, waiting: int, in_flight: int, now: float, *, full: bool = False) -> int:
        """How many of so many waiting requests the next run takes; 0: it waits for more, at most until `due`.

        Call it when a run could begin: again when another request has come, and at `due`. `full`: they have
        all the rows that a run may have.
        """
        if not self.joins or waiting < 1:
            self.due = math.inf
            return min(waiting, 1)
        if waiting < self.share and not full:
            if self.due == math.inf:
                self.due = now + PATIENCE * self._usual_seconds
            if now < self.due:
                return 0
        self.due = math.inf
        even = max(self.share, in_flight // self.at_once) if self._waits else waiting
        return min(waiting, self._max_requests, even)
