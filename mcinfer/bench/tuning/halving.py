"""Successive halving: which of many candidates is best, when measuring them all for long would take too long.

All are measured for a little while, the worse half is dropped, the others are measured for twice as long, and
so on, until one is left: K. Jamieson, A. Talwalkar, "Non-stochastic Best Arm Identification and
Hyperparameter Optimization", 2016 (https://arxiv.org/abs/1502.07943), whose arms are the candidates here.
Three things differ: a candidate that is far off, or behind by more than the repeats differ, is dropped even
if it is of the better half; the search ends where those that lead are as good as each other; and one
candidate may be *kept*, which is measured in every rung for the others to be compared with.

No clock and no I/O: how much time is left is an argument, what was measured is told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from mcinfer.bench.report import middle

Ending = Literal["one is left", "the leaders are alike", "the time is over", "none is left"]

_HOPELESS = 2.0
"""Times the best at which a candidate is dropped at once, even by the best of its repeats."""
_ALIKE = 1.05
"""Within this factor leaders are alike, where their spreads meet too: then 5 % is the most to be gained.

Beyond it, and beyond all repeats, a candidate is behind.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one repeat of a candidate gave.

    Attributes:
        cost: What is to be small; infinite where nothing was done.
        strain: What has a bound, over that bound: up to 1 keeps it.
    """

    cost: float
    strain: float = 0.0


Results = Mapping[int, Sequence[Result]]
"""The repeats of each candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What is to be measured next.

    Attributes:
        number: From 1.
        of: How many rungs there are at most, as far as can be told.
        candidates: Those to measure, the most promising first, but for the kept one, which is the very first.
        seconds: For each, to measure; what a candidate costs beside that comes on top.
    """

    number: int
    of: int
    candidates: tuple[int, ...]
    seconds: float


class Halving:
    """The state of a search: `plan` says what to measure, `finish` is told what came of it, in turns.

    Args:
        candidates: How many; they are called 0, 1, …. Where there is no time for all, the last are left out.
        kept: The one to compare the others with.
        least: Seconds that a candidate is measured at least.

    Attributes:
        ranking: What was measured in the last rung, the best first.
        contenders: Those that are still in the race, likewise.
        left_out: How many there was no time for.
        ended: Why the search is over; None while it is not.
    """

    def __init__(self, candidates: int, *, kept: int, least: float) -> None:
        self.ranking: tuple[int, ...] = ()
        self.contenders: tuple[int, ...] = tuple(range(candidates))
        self.left_out = 0
        self.ended: Ending | None = None if candidates else "none is left"
        self._kept: int | None = kept
        self._least = least
        self._number = 0

    def plan(self, left: float, overhead: float) -> Rung | None:
        """The next rung; None where the search is over.

        Args:
            left: Seconds that all further rungs may take: this one leaves enough for those after it.
            overhead: Seconds that a candidate costs in each rung beside being measured.
        """
        if self.ended:
            return None
        counts = range(len(self.contenders), 0, -1)
        count = next((n for n in counts if self.needs(n, overhead) <= left), 0)
        if count < min(2, len(self.contenders)):
            self.ended = "the time is over"
            return None
        if not self._number:
            self.left_out = len(self.contenders) - count
        measured, shares = self._sums(count)
        self.contenders = self.contenders[:count]
        seconds = max(self._least, (left - overhead * measured) / shares)
        kept = () if self._kept is None else (self._kept,)
        return Rung(
            number=self._number + 1,
            of=self._number + len(_sizes(count)),
            candidates=(*kept, *(c for c in self.contenders if c != self._kept)),
            seconds=seconds if measured > 1 else self._least,  # alone: there is nothing to find out
        )

    def needs(self, count: int, overhead: float) -> float:
        """Seconds that the search takes at least from here on, with so many contenders."""
        measured, shares = self._sums(count)
        return overhead * measured + self._least * shares

    def _sums(self, count: int) -> tuple[int, int]:
        """How often a candidate will be measured, and for how often the seconds of the next rung."""
        extra = self._kept is not None and self._kept not in self.contenders[:count]
        # Whether the kept one will be among the contenders is not known: it is reckoned with in any case.
        measured = [n + (extra if i == 0 else 1) for i, n in enumerate(_sizes(count))]
        return sum(measured), sum(n << i for i, n in enumerate(measured))

    def hopeless(self, results: Results) -> frozenset[int]:
        """Those that need no further repeat, by what the rung has given so far."""
        ranking = ranked(results)
        if not ranking:
            return frozenset()
        best = results[ranking[0]]
        bound = max(1.0, _strain(best))
        cost = _cost(best)

        def is_hopeless(repeats: Sequence[Result]) -> bool:
            if _violates(repeats):
                return min(r.strain for r in repeats) > _HOPELESS * bound
            return min(r.cost for r in repeats) > _HOPELESS * cost

        return frozenset(c for c in ranking if c != self._kept and is_hopeless(results[c]))

    def finish(self, results: Results) -> None:
        """Take what a rung gave, and drop the worse half.

        Args:
            results: Of the rung's candidates. One that has none, since it failed or could not be measured
                in time, is out.
        """
        self._number += 1
        self.ranking = ranked(results)
        if self._kept not in self.ranking:
            self._kept = None
        contenders = tuple(c for c in self.ranking if c in self.contenders)
        half = contenders[: ceil(len(contenders) / 2)]
        dropped = self.hopeless(results) | _behind(results, contenders)
        self.contenders = tuple(c for c in half if c not in dropped)
        if not self.ranking:
            self.ended = "none is left"
        elif len(self.contenders) < 2:
            self.ended = "one is left"
        elif _alike([results[c] for c in self.contenders]):
            self.ended = "the leaders are alike"


def _sizes(count: int) -> list[int]:
    """How many contend in each rung, from so many on."""
    sizes = [count]
    while sizes[-1] > 2:
        sizes.append(ceil(sizes[-1] / 2))
    return sizes


def _cost(repeats: Sequence[Result]) -> float:
    return middle([r.cost for r in repeats])


def _strain(repeats: Sequence[Result]) -> float:
    return middle([r.strain for r in repeats])


def _violates(repeats: Sequence[Result]) -> bool:
    return _strain(repeats) > 1.0


def ranked(results: Results) -> tuple[int, ...]:
    """Those that were measured, the best first.

    Those that keep the bound go by their cost; behind them are the others, by how far they are from it.
    """

    def key(candidate: int) -> tuple[bool, float, float, int]:
        repeats = results[candidate]
        violates = _violates(repeats)
        return violates, _strain(repeats) if violates else 0.0, _cost(repeats), candidate

    return tuple(sorted((c for c, repeats in results.items() if repeats), key=key))


def _behind(results: Results, contenders: Sequence[int]) -> frozenset[int]:
    """Those that keep the bound, but whose every repeat is worse than every one of the best."""
    if not contenders or len(results[contenders[0]]) < 2:
        return frozenset()
    limit = _ALIKE * max(r.cost for r in results[contenders[0]])
    keeping = [c for c in contenders if not _violates(results[c])]
    return frozenset(c for c in keeping if min(r.cost for r in results[c]) > limit)


def _alike(leaders: Sequence[Sequence[Result]]) -> bool:
    """Whether any of them is as good a choice as the first."""
    if any(map(_violates, leaders)):
        return False
    low = [min(r.cost for r in repeats) for repeats in leaders]
    high = [max(r.cost for r in repeats) for repeats in leaders]
    return max(low) <= high[0] and max(high) <= _ALIKE * low[0]
