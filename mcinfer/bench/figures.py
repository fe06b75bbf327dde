"""The figures that follow from a report, with their spread over the repeats: how each is computed. Pure.

`OF_LOADS` and `OF_WAYS` are the vocabulary of tables, charts and the glossary; `mcinfer.bench.texts` writes
the figures. Latencies are over all requests that were made: one that failed, or that an open loop never began
counts as infinite: leaving it out would make a way that drops requests look good. A percentile of so
few requests that it would be the slowest of them is not known. A ratio is taken within each repeat, since
other work on the machine disturbs all ways of one repeat.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any, Literal, Self

from mcinfer.bench.report import OTHERS, QUANTILES, Load, Measurement, Report, Turn, Way

SHORTEST_FOR_CORES = 0.5
"""Seconds of a turn in which processor time, in ticks of 10 ms, is known to some percent."""

Kind = Literal["amount", "part", "time", "latency", "bytes"]
"""What a figure is measured in; a time has its own unit, and latencies that of their table."""

_CLEAR_GAIN = 1.02
"""A median gain below this is not worth a word, however small the spread is."""
_BUSY_PART, _BUSY_SPREAD = 0.15, 0.3
"""Part of the cores that others may use, and spread of throughput, until figures are not to be trusted."""
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
        base: The best baseline under this load, if there is one; for a pool of the scaling the pool of one
            worker.
    """

    way: Way
    load: Load
    turns: tuple[Turn, ...]
    base: Measurement | None = None

    @property
    def rows(self) -> Spread:
        return spread_of(self.load.batch * turn.throughput for turn in self.turns)

    @property
    def speedup(self) -> Spread:
        """How many times as fast as the base, within each repeat.

        By throughput; in an open loop, where all that keep up have the same, by median latency. For a pool
        over that of as many pools of one: 1 is ideal.
        """
        base = self.base.turns if self.base else ()
        # A way that answers a part of the requests is not fast.
        if not self.sound or any(turn.failed for turn in base):
            return UNKNOWN
        pairs = zip(self.turns, base, strict=False)  # an interrupted benchmark has more of one
        if self.load.rate is not None:
            return spread_of(latency(other, 0.5) / latency(turn, 0.5) for turn, other in pairs)
        times = self.way.workers if self.way.role == "scaling" else 1
        return spread_of(
            turn.throughput / (times * other.throughput) if other.throughput > 0 else math.nan
            for turn, other in pairs
        )

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
        """Busy cores; unknown where a turn was shorter than `SHORTEST_FOR_CORES`."""
        short = any(turn.seconds < SHORTEST_FOR_CORES for turn in self.turns)
        return UNKNOWN if short else spread_of(turn.cores for turn in self.turns)

    @property
    def made(self) -> int:
        return sum(turn.made for turn in self.turns)

    @property
    def sound(self) -> bool:
        """Whether all requests were answered, and as fast as they came. Only then a figure counts as good."""
        answered = all(kept_up(turn) and not turn.failed for turn in self.turns)
        return self.made > 0 and answered


# The vocabulary.


@dataclass(frozen=True, slots=True)
class Term:
    """A figure that tables and charts name: how it is computed, and what the glossary says of it."""

    kind: Kind
    of: Callable[[Any], Spread]
    says: str = ""


_LATENCY = (
    "the time within which 50, 90, 99, 100 % of all requests were answered; ∞: not all of "
    "them ever were"
)
_MEMORY = "memory with shared pages counted once in all; memory of one process alone"

OF_LOADS = {
    "n": Term(
        "amount", lambda f: Spread(tuple(turn.made for turn in f.turns)), "requests in a turn"
    ),
    "rows/s": Term("amount", attrgetter("rows")),
    "speed-up": Term(
        "amount",
        attrgetter("speedup"),
        "throughput over that of the best baseline under the same load, which the table names, within each "
        "repeat; in an open loop that baseline's median latency over the way's",
    ),
    "p50": Term("latency", lambda f: f.latency(0.5), _LATENCY),
    "p90": Term("latency", lambda f: f.latency(0.9), _LATENCY),
    "p99": Term("latency", lambda f: f.latency(0.99), _LATENCY),
    "max": Term("latency", lambda f: f.latency(1.0), _LATENCY),
    "overhead": Term("latency", attrgetter("overhead"), "mean latency less the engine's own run"),
    "cores": Term("amount", attrgetter("cores"), "busy cores, on average"),
    "efficiency": Term("part", attrgetter("speedup")),
}
"""By name, what is known of `Figures`."""

OF_WAYS = {
    "start": Term("time", lambda way: spread_of(way.start_seconds)),
    "PSS": Term("bytes", lambda way: spread_of(memory.pss for memory in way.memory), _MEMORY),
    "USS": Term("bytes", lambda way: spread_of(memory.uss for memory in way.memory), _MEMORY),
}
"""By name, what is known of a `Way`, whatever the load."""


def load_figures(report: Report, measurement: Measurement) -> Figures:
    way, load = report.way(measurement.way), measurement.load
    if way.role == "scaling":
        one = (w.name for w in report.ways if w.role == "scaling" and w.workers == 1)
        base = report.find(next(one, ""), load)
    else:
        base = _best_baseline(report, load)
    return Figures(way, load, measurement.turns, base)


def _best_baseline(report: Report, load: Load) -> Measurement | None:
    """The best of those that answered all requests, as fast as they came."""
    found = [
        (figures, measurement)
        for measurement in report.measurements
        if measurement.load == load and report.way(measurement.way).role == "baseline"
        if (figures := Figures(report.way(measurement.way), load, measurement.turns)).sound
    ]
    return max(found, key=lambda each: _goodness(each[0]))[1] if found else None


def under(report: Report, load: Load) -> tuple[Figures, ...]:
    """All ways that were measured under a load, in the report's order; pools of the scaling apart."""
    found = (load_figures(report, m) for m in report.measurements if m.load == load and m.turns)
    return tuple(figures for figures in found if figures.way.role != "scaling")


def compared_loads(report: Report) -> tuple[Load, ...]:
    """All loads that ways are compared under: closed loops and open ones, without the scaling's."""
    return report.loads("baseline", "mcinfer")


def pools(report: Report) -> tuple[Figures, ...]:
    """The pools of the scaling, the smallest first; those that could not be measured are left out."""
    found = (load_figures(report, measurement) for measurement in report.measurements)
    mine = [figures for figures in found if figures.way.role == "scaling" and figures.turns]
    return tuple(sorted(mine, key=lambda figures: figures.way.workers))


# The verdict.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The best of mcinfer's ways under one load, beside the best baseline there.

    Attributes:
        ratio: Its speed-up (`Figures.speedup`): above 1 where mcinfer is better.
    """

    load: Load
    own: str
    other: str
    ratio: Spread

    @property
    def clear(self) -> int:
        """1 where mcinfer is better in every repeat, -1 where it is worse, 0 where that is not clear."""
        if len(self.ratio.values) < 2:
            return 0
        if self.ratio.low > 1 and self.ratio.middle >= _CLEAR_GAIN:
            return 1
        return -1 if self.ratio.high < 1 and self.ratio.middle <= 1 / _CLEAR_GAIN else 0


def gains(report: Report) -> tuple[Gain, ...]:
    """The gain under each load that mcinfer and a baseline kept up with; under closed loops, if any."""
    found = []
    for load in compared_loads(report):
        own = [each for each in under(report, load) if each.sound and each.way.role == "mcinfer"]
        best = max(own, key=_goodness, default=None)
        if best is not None and best.base is not None:
            gain = Gain(load=load, own=best.way.name, other=best.base.way, ratio=best.speedup)
            found.append(gain)
    closed = tuple(gain for gain in found if gain.load.rate is None)
    return closed or tuple(found)


def _goodness(figures: Figures) -> float:
    """Throughput in a closed loop. In an open one all that keep up have the same, so latency there."""
    if figures.load.rate is None:
        return figures.rows.middle
    return -figures.latency(0.5).middle


def best_gain(report: Report) -> Gain | None:
    return max(gains(report), key=lambda gain: (gain.clear, gain.ratio.middle), default=None)


def memory_beside(report: Report, own: str, other: str) -> float:
    """The memory of one way as a part of another's; NaN where one is not known."""
    first, second = (OF_WAYS["PSS"].of(report.way(name)).middle for name in (own, other))
    return first / second


def quicker_alone(report: Report, own: str) -> tuple[Figures, Figures] | None:
    """A way without several workers that answers one small request sooner, and that way of mcinfer's.

    By the median latency of one client's requests of the fewest rows, in every repeat.
    """
    loads = [load for load in compared_loads(report) if load.rate is None and load.clients == 1]
    least = min(loads, key=lambda load: load.batch, default=None)
    found = [each for each in under(report, least) if each.sound] if least else []
    mine = next((each for each in found if each.way.name == own and each.way.workers > 1), None)
    single = [each for each in found if each.way.workers == 1]
    if mine is None or not single:
        return None
    quickest = min(single, key=lambda each: each.latency(0.5).middle)
    pairs = zip(mine.latency(0.5).values, quickest.latency(0.5).values, strict=False)
    ratio = Spread(tuple(slow / quick for slow, quick in pairs))
    return (quickest, mine) if ratio.low > 1 and ratio.middle >= _CLEAR_GAIN else None


def busy(report: Report) -> tuple[float, float]:
    """Cores that other programs used, and the usual spread of throughput, where that is too much; else 0."""
    others, cores = report.machine.get(OTHERS, 0.0), report.machine.get("cores", 1)
    used = float(others) if isinstance(others, int | float) else 0.0
    limit = _BUSY_PART * (cores if isinstance(cores, int | float) else 1)
    loads = [load for load in compared_loads(report) if load.rate is None]
    widths = [f.rows.width for load in loads for f in under(report, load) if f.sound]
    usual = median(widths) if widths else 0.0
    return used if used > limit else 0.0, usual if usual > _BUSY_SPREAD else 0.0
