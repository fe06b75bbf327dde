"""Whether requests that wait go together in one run, and whether a run waits for more of them. Pure.

* *Whether*: from time to time some runs have one request and some have several, in turns, under the same
  load. Where a row in company does not cost `WORTH` of one alone at most, requests go apart until the next
  comparison. The longer the answer stays the same, the fewer comparisons there are.
* *How many*: an even share of the requests in flight, so that no run has all of them while others have none.
* *When*: requests that one run answered come back together, where callers wait for their answers. So a run
  that could begin waits for its share as long as `PATIENCE` of a usual run. Where there are fewer requests
  than would fill two for each run, as with a single caller, none waits.
"""

import math
from collections import deque
from statistics import median

WORTH = 0.95
"""What a row in company may cost of one alone, at most."""
SAMPLES = 5
"""Runs of each kind in a comparison."""
REST = 512, 8192
"""Answers between two comparisons: at first, and at the most. Each that changes nothing doubles them."""
PATIENCE = 0.1
"""What part of a usual run a run may wait for company."""

_NEW = 1 / 16  # weight of the latest run in what is usual


class Joining:
    """The policy for requests of one model. Ask `take` before each run, and `learn` from each that succeeded.

    Times are float seconds on any monotonic clock, the same for all calls.

    Args:
        max_requests: Most requests of one run; with 1, none go together.
        at_once: How many runs can go at once: on workers, or in threads.

    Attributes:
        joins: Whether requests that wait may go together now.
        gain: What a row alone cost over what it cost in company, by the last comparison; NaN before.
        share: How many requests a run waits for; 1 if it does not wait.
        due: While a run waits for company, when it begins without more; else infinite.
    """

    def __init__(self, max_requests: int, at_once: int = 1) -> None:
        self.joins = max_requests > 1
        self.gain = math.nan
        self.share = 1
        self.due = math.inf
        self.at_once = at_once
        self._max_requests = max_requests
        self._usual_seconds = 0.0
        self._usual_in_flight = 1.0
        # Seconds for a row, in runs of one request and in runs of several; empty between comparisons.
        self._alone: deque[float] = deque(maxlen=SAMPLES)
        self._joined: deque[float] = deque(maxlen=SAMPLES)
        self._rest, self._next_rest = 0, REST[0]

    def learn(self, rows: int, requests: int, seconds: float, in_flight: int) -> None:
        """Learn from a run that succeeded.

        Args:
            rows: Rows of all its requests.
            requests: How many requests it answered.
            seconds: How long it took.
            in_flight: How many requests were running or waiting as it ended, its own among them.
        """
        if self._max_requests == 1:
            return
        self._usual_seconds += _NEW * (seconds - self._usual_seconds)
        self._usual_in_flight += _NEW * (in_flight - self._usual_in_flight)
        if self._rest > 0:
            self._rest -= requests
            self.joins |= self._rest <= 0
        elif in_flight > 1:  # else it had the machine for itself, as no run of several has
            (self._alone if requests == 1 else self._joined).append(seconds / max(rows, 1))
            if len(self._alone) == len(self._joined) == SAMPLES:
                self._decide()
        # A mean comes close to what is always so, and does not reach it.
        share = int(self._usual_in_flight / self.at_once + 0.1) if self.joins else 1
        self.share = max(1, min(share, self._max_requests))

    def _decide(self) -> None:
        alone, joined, paid = median(self._alone), median(self._joined), self.gain >= 1 / WORTH
        self.gain = alone / joined if joined else math.inf
        self.joins = self.gain >= 1 / WORTH
        self._rest = min(2 * self._next_rest, REST[1]) if self.joins == paid else REST[0]
        self._next_rest = self._rest
        self._alone.clear()
        self._joined.clear()

    def take(self, waiting: int, in_flight: int, now: float) -> int:
        """How many of so many waiting requests the next run takes; 0: it waits for more, at most until `due`.

        Call it when a run could begin: again when another request has come, and at `due`.
        """
        if not self.joins or waiting < 1:
            self.due = math.inf
            return min(waiting, 1)
        if waiting < self.share:
            if self.due == math.inf:
                self.due = now + PATIENCE * self._usual_seconds
            if now < self.due:
                return 0
        self.due = math.inf
        if self._rest <= 0 and len(self._alone) < min(SAMPLES, 1 + len(self._joined)):
            return 1
        return min(waiting, self._max_requests, max(self.share, -(-in_flight // self.at_once)))
