"""Successive halving: which of many candidates is best, when measuring them all for long would take too long.

All are measured for a little while, the worse half is dropped, the others are measured for twice as long, and
so on, until one is left: K. Jamieson, A. Talwalkar, "Non-stochastic Best Arm Identification and
Hyperparameter Optimization", 2016 (https://arxiv.org/abs/1502.07943), whose arms are the candidates here.
Four things differ: a candidate that is far off, or behind by more than the repeats differ, is dropped even
if it is of the better half; the search ends where those that lead are as good as each other; one candidate is
*kept*, and measured in every heat for the others to be compared with; and where the last rung was too short
to be trusted, the winner and the kept one are measured once more, for long enough.

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
        of: How many rungs there are, as far as can be told.
        heats: Those to measure beside each other, the most promising first, but for the kept one, which is
            the first of every heat.
        seconds: For each, in each of its heats; what a candidate costs beside that comes on top.
    """

    number: int
    of: int
    heats: tuple[tuple[int, ...], ...]
    seconds: float

    @property
    def candidates(self) -> tuple[int, ...]:
        """All that are measured, each once."""
        return tuple(dict.fromkeys(c for heat in self.heats for c in heat))


class Halving:
    """The state of a search: `plan` says what to measure, `finish` is told what came of it, in turns.

    Args:
        candidates: How many; they are called 0, 1, …. Where there is no time for all, the last are left out.
        kept: The one to compare the others with.
        heat: How many are measured beside each other, the kept one among them; 2 or more.
        least: Seconds that a candidate is measured at least.
        enough: Seconds after which what was measured can be trusted. The last rung is so long where there is
            time for it.

    Attributes:
        ranking: What was measured in the last rung, the best first.
        contenders: Those that are still in the race, likewise.
        left_out: How many there was no time for.
        ended: Why the search is over; None while it is not.
    """

    def __init__(
        self, candidates: int, *, kept: int, heat: int, least: float, enough: float = 0.0
    ) -> None:
        self.ranking: tuple[int, ...] = ()
        self.contenders: tuple[int, ...] = tuple(range(candidates))
        self.left_out = 0
        self.ended: Ending | None = None if candidates else "none is left"
        self._kept: int | None = kept
        self._heat = heat
        self._least = least
        self._enough = enough
        self._number = 0
        self._seconds = 0.0
        self._reserved = 0.0
        self._to_confirm: Ending | None = None

    def plan(self, left: float, overhead: float) -> Rung | None:
        """The next rung; None where the search is over.

        Args:
            left: Seconds that all further rungs may take: this one leaves enough for those after it.
            overhead: Seconds that a candidate costs in each heat beside being measured.
        """
        if self.ended:
            return None
        if self._to_confirm:
            return self._plan_confirming(self._to_confirm, left, overhead)
        spare = left - self._reserve(left, overhead)
        counts = range(len(self.contenders), 0, -1)
        count = next((n for n in counts if self.needs(n, overhead) <= spare), 0)
        if count < min(2, len(self.contenders)):
            self.ended = "the time is over"
            return None
        if not self._number:
            self.left_out = len(self.contenders) - count
        measured, shares = self._sums(count)
        self.contenders = self.contenders[:count]
        seconds = max(self._least, (spare - overhead * measured) / shares)
        if measured == 1:  # alone: there is nothing to find out but whether it keeps the bound
            seconds = max(self._least, min(self._enough, left - overhead))
        return self._rung(len(_sizes(count)), seconds)

    def needs(self, count: int, overhead: float) -> float:
        """Seconds that the search takes at least from here on, with so many contenders."""
        measured, shares = self._sums(count)
        return overhead * measured + self._least * shares

    def needs_to_confirm(self, overhead: float) -> float:
        """Seconds for the winner and the kept one to be measured for long enough at the end."""
        return 2 * (overhead + self._enough) if self._enough > self._least else 0.0

    def _reserve(self, left: float, overhead: float) -> float:
        """Seconds to leave for that: at most half of all, and none that two contenders need."""
        if not self._number:
            self._reserved = min(self.needs_to_confirm(overhead), left / 2)
        needed = self.needs(min(2, len(self.contenders)), overhead)
        return max(0.0, min(self._reserved, left - needed))

    def _plan_confirming(self, why: Ending, left: float, overhead: float) -> Rung | None:
        """The winner and the kept one once more, if that can be for longer than before."""
        self.contenders = self.contenders[:1]
        measured, _ = self._sums(1)
        seconds = min(self._enough, (left - overhead * measured) / measured)
        if seconds <= self._seconds:
            self.ended = why
            return None
        return self._rung(1, seconds)

    def _rung(self, more: int, seconds: float) -> Rung:
        """The next rung, of all contenders: it, and those after it, are so many."""
        self._seconds = seconds
        kept = () if self._kept is None else (self._kept,)
        others = [c for c in self.contenders if c != self._kept]
        beside = self._heat - len(kept)
        starts = range(0, max(1, len(others)), beside)
        return Rung(
            number=self._number + 1,
            of=self._number + more,
            heats=tuple((*kept, *others[start : start + beside]) for start in starts),
            seconds=seconds,
        )

    def _sums(self, count: int) -> tuple[int, int]:
        """How often a candidate will be measured, and for how often the seconds of the next rung."""
        # Whether the kept one will be among later contenders is not known: it is reckoned without.
        among = self._kept in self.contenders[:count]
        others = [n - (among and i == 0) for i, n in enumerate(_sizes(count))]
        measured = [n + self._heats(n) for n in others]
        return sum(measured), sum(n << i for i, n in enumerate(measured))

    def _heats(self, others: int) -> int:
        """How often the kept one is measured beside so many others."""
        return 0 if self._kept is None else max(1, ceil(others / (self._heat - 1)))

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
        if self._to_confirm or not self.ranking:
            self.ended = self._to_confirm if self.ranking else "none is left"
            return
        over = self._over(results)
        if self._seconds < self._enough:
            self._to_confirm = over
        else:
            self.ended = over

    def _over(self, results: Results) -> Ending | None:
        if len(self.contenders) < 2:
            return "one is left"
        return "the leaders are alike" if _alike([results[c] for c in self.contenders]) else None


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
