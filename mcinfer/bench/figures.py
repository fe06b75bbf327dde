"""Figures: how they are computed, and how they are written; docs/bench_report.md says what they mean.

Tables, charts and sentences take them from here. Latencies are over all requests that were made: one that
failed, or that an open loop never began, counts as infinite; without it a way that drops requests would look
good. A percentile of so few requests that it would be the slowest of them is not known. A ratio is taken
within each repeat, since other work on the machine disturbs all ways of one repeat.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median
from typing import Self

from mcinfer.bench.report import QUANTILES, Load, Report, Turn, Way

SHORTEST_FOR_CORES = 0.5
"""Seconds of a turn in which processor time, in ticks of 10 ms, is known to some percent."""
CLEAR_GAIN = 1.02
"""A median gain below this is not worth a word, however small the spread is."""
FLAWED = "!"
"""After the name of a way that did not answer all requests, or not as fast as they came."""
TO = "\N{EN DASH}"
"""Between the least and the greatest; alone: not known."""

_KEPT_DIGITS = 3
_ROUNDED = 9
"""Decimals: 1 / (1 - 0.9) is 10.000000000000002, but 10 requests have a 90th percentile."""


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure that was measured several times; infinite: a latency of requests without an answer."""

    values: tuple[float, ...] = ()

    @property
    def known(self) -> bool:
        return bool(self.values)

    @property
    def middle(self) -> float:
        """The median; NaN of nothing, as are `low` and `high`."""
        return median(self.values) if self.values else math.nan

    @property
    def low(self) -> float:
        return min(self.values, default=math.nan)

    @property
    def high(self) -> float:
        return max(self.values, default=math.nan)

    @property
    def width(self) -> float:
        """The distance of the least and the greatest, as a part of the median."""
        return (self.high - self.low) / self.middle if self.known and self.middle else 0.0

    def over(self, other: "Spread") -> Self:
        return type(self)(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))


UNKNOWN = Spread()


def spread_of(values: Iterable[float]) -> Spread:
    """The spread of one figure for each repeat; those that are NaN are left out."""
    return Spread(tuple(float(value) for value in values if not math.isnan(value)))


# How they are written.


@dataclass(frozen=True, slots=True)
class Unit:
    scale: float = 1.0
    sign: str = ""


ONE, MEGABYTES = Unit(), Unit(1e6, "MB")


def time_unit(seconds: Iterable[float]) -> Unit:
    """The largest unit in which the least of these times is not below a tenth."""
    least = min((s for s in seconds if math.isfinite(s) and s > 0), default=1e-3)
    if least >= 0.1:
        return Unit(1.0, "s")
    return Unit(1e-3, "ms") if least >= 1e-4 else Unit(1e-6, "µs")


def number(value: float, like: float | None = None) -> str:
    """Three digits of a number, or more before the point; with as many after it as `like` would have."""
    if math.isnan(value):
        return TO
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    size = value if like is None or not math.isfinite(like) else like
    # 9.996 is written 10.0, so its digits are counted after rounding.
    rounded = float(f"{abs(size):.{_KEPT_DIGITS - 1}e}")
    whole = 0 if rounded < 1 else 1 + math.floor(math.log10(rounded))
    return f"{value:.{max(0, _KEPT_DIGITS - whole)}f}"


def middle_text(spread: Spread, unit: Unit = ONE) -> str:
    return number(spread.middle / unit.scale)


def range_text(spread: Spread, unit: Unit = ONE) -> str:
    """The least and the greatest, with the digits of the median; empty where they do not differ."""
    middle = spread.middle / unit.scale
    low, high = (number(value / unit.scale, like=middle) for value in (spread.low, spread.high))
    return "" if low == high else f"{low}{TO}{high}"


def spread_text(spread: Spread, unit: Unit = ONE) -> str:
    range_ = range_text(spread, unit)
    return middle_text(spread, unit) + (f" ({range_})" if range_ else "")


def plus_minus(spread: Spread, unit: Unit = ONE) -> str:
    """Such as ``±5``: the farthest repeat from the median; empty where none differs."""
    if not range_text(spread, unit):
        return ""
    infinite = math.isinf(spread.high)
    farthest = (
        math.inf if infinite else max(spread.middle - spread.low, spread.high - spread.middle)
    )
    return f"±{number(farthest / unit.scale, like=spread.middle / unit.scale)}"


def difference_text(difference: float | None) -> str:
    if difference is None:
        return TO
    return f"{difference:.1e}".replace("e-0", "e-") if difference else "0"


def seconds_text(seconds: float) -> str:
    unit = time_unit([seconds])
    return f"{number(seconds / unit.scale)} {unit.sign}"


# How they are computed.


def latency(turn: Turn, fraction: float) -> float:
    """Seconds within which a fraction of all requests of a turn was answered.

    The kept quantile that covers as many requests, so where some were not answered it is rather too high
    than too low. Infinite where fewer than that were ever answered; NaN where none was made.
    """
    if turn.made == 0:
        return math.nan
    if turn.made == turn.requests:
        return turn.latency(fraction)
    wanted = fraction * turn.made / turn.requests if turn.requests else math.inf
    covering = [quantile for quantile in QUANTILES if quantile >= wanted]
    return turn.latency(covering[0]) if covering else math.inf


def percentile(turns: Sequence[Turn], fraction: float) -> Spread:
    """`latency` over the repeats; unknown unless each has enough requests: 10 for p90, 100 for p99.

    It would be the slowest of fewer. Repeats that have enough are the quick ones: they alone would not do.
    """
    inner = 0.5 < fraction < 1
    if inner and any(0 < round(t.made * (1 - fraction), _ROUNDED) < 1 for t in turns):
        return UNKNOWN
    return spread_of(latency(turn, fraction) for turn in turns)


def kept_up(turn: Turn) -> bool:
    """Whether requests were answered as fast as they came, and all of them were begun with."""
    return turn.kept_up and not turn.unfinished


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one way under one load.

    Attributes:
        base: The best baseline under this load, if there is one.
    """

    way: Way
    load: Load
    turns: tuple[Turn, ...]
    base: "Figures | None" = None

    @property
    def rows(self) -> Spread:
        return spread_of(self.load.batch * turn.throughput for turn in self.turns)

    @property
    def speedup(self) -> Spread:
        """How many times as fast as the base, within each repeat.

        By throughput; in an open loop, where all that keep up have the same, by median latency.
        """
        base = self.base.turns if self.base else ()
        # A way that answers a part of the requests is not fast.
        if not self.sound or any(turn.failed for turn in base):
            return UNKNOWN
        pairs = zip(self.turns, base, strict=False)  # an interrupted benchmark has more of one
        if self.load.rate is not None:
            return spread_of(latency(other, 0.5) / latency(turn, 0.5) for turn, other in pairs)
        return spread_of(
            turn.throughput / other.throughput if other.throughput > 0 else math.nan
            for turn, other in pairs
        )

    @property
    def other(self) -> str:
        """The name of the base."""
        return self.base.way.name if self.base else ""

    @property
    def clear(self) -> int:
        """1 if it is better than the base in every repeat, -1 if it is worse, 0 if that is not clear."""
        ratio = self.speedup
        if len(ratio.values) < 2:
            return 0
        if ratio.low > 1 and ratio.middle >= CLEAR_GAIN:
            return 1
        return -1 if ratio.high < 1 and ratio.middle <= 1 / CLEAR_GAIN else 0

    @property
    def goodness(self) -> float:
        """Throughput in a closed loop. In an open one all that keep up have the same, so latency there."""
        closed = self.load.rate is None
        return self.rows.middle if closed else -self.latency(0.5).middle

    @property
    def joined(self) -> bool:
        """Whether the engine ran several requests as one."""
        return any(0 < turn.runs < turn.requests for turn in self.turns)

    def latency(self, fraction: float) -> Spread:
        return percentile(self.turns, fraction)

    @property
    def overhead(self) -> Spread:
        """Mean latency less the engine's run; unknown where the way fell behind, or counts no runs."""
        return spread_of(
            math.nan if turn.overhead is None or not kept_up(turn) else turn.overhead
            for turn in self.turns
        )

    @property
    def cores(self) -> Spread:
        short = any(turn.seconds < SHORTEST_FOR_CORES for turn in self.turns)
        return UNKNOWN if short else spread_of(turn.cores for turn in self.turns)

    @property
    def made(self) -> int:
        return sum(turn.made for turn in self.turns)

    @property
    def sound(self) -> bool:
        """Whether all requests were answered, and as fast as they came. Only then a figure counts as good."""
        return self.made > 0 and all(kept_up(turn) and not turn.failed for turn in self.turns)


def latency_unit(all_figures: Iterable[Figures]) -> Unit:
    return time_unit(figures.latency(0.5).low for figures in all_figures)


def under(report: Report, load: Load) -> tuple[Figures, ...]:
    """All ways that were measured under a load, in the report's order."""
    found = [
        Figures(report.way(m.way), load, m.turns)
        for m in report.measurements
        if m.load == load and m.turns
    ]
    bases = [f for f in found if f.way.role == "baseline" and f.sound]
    base = max(bases, key=attrgetter("goodness"), default=None)
    return tuple(replace(figures, base=base) for figures in found)


def gains(report: Report) -> tuple[Figures, ...]:
    """Mcinfer's best way under each load that it and a baseline kept up with; under closed loops, if any."""
    found = []
    for load in report.loads:
        own = [each for each in under(report, load) if each.sound and each.way.role == "mcinfer"]
        best = max(own, key=attrgetter("goodness"), default=None)
        if best is not None and best.base is not None:
            found.append(best)
    return tuple(gain for gain in found if gain.load.rate is None) or tuple(found)


def best_gain(report: Report) -> Figures | None:
    return max(gains(report), key=lambda gain: (gain.clear, gain.speedup.middle), default=None)


def memory(way: Way) -> tuple[Spread, Spread]:
    """Its proportional and its unique set sizes, in bytes."""
    return spread_of(m.pss for m in way.memory), spread_of(m.uss for m in way.memory)
