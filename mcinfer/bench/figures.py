"""The figures that follow from a report, with their spread over the repeats. Pure; nothing is formatted here.

Latencies are over all requests that were made: one that failed, or that an open loop never began, counts as
infinite, since leaving it out would make a way that drops requests look good. A percentile of so few requests
that it would be the slowest of them is not known. A ratio is taken within each repeat, since other work on
the machine disturbs all ways of one repeat.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, Self

from mcinfer.bench.report import OTHERS, QUANTILES, Load, Measurement, Report, Turn, Way

SHORTEST_FOR_CORES = 0.5
"""Seconds of a turn in which processor time, in ticks of 10 ms, is known to some percent."""

Kind = Literal["rate", "part", "time", "bytes", "amount"]
"""The kind of a figure: for a rate or a part more is better, for all others less."""

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


def throughput_ratio(turns: Sequence[Turn], base: Sequence[Turn], times: int = 1) -> Spread:
    """Throughput over that of the base, or of so many times the base, within each repeat.

    Unknown where requests of either failed, or the turns fell behind: a way that answers a part of the
    requests is not fast.
    """
    if any(turn.failed or not kept_up(turn) for turn in turns) or any(t.failed for t in base):
        return UNKNOWN
    # An interrupted benchmark has more repeats of one than of the other.
    return spread_of(
        mine.throughput / (times * other.throughput) if other.throughput > 0 else math.nan
        for mine, other in zip(turns, base, strict=False)
    )


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
        if self.load.rate is None:
            times = self.way.workers if self.way.role == "scaling" else 1
            return throughput_ratio(self.turns, base, times)
        if not self.sound:
            return UNKNOWN
        pairs = zip(self.turns, base, strict=False)
        return spread_of(latency(other, 0.5) / latency(turn, 0.5) for turn, other in pairs)

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

    def columns(self) -> dict[str, tuple[Spread, Kind]]:
        scaling = self.way.role == "scaling"
        marks = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
        return {
            "rows/s": (self.rows, "rate"),
            **(
                {"efficiency": (self.speedup, "part")}
                if scaling
                else {"speed-up": (self.speedup, "rate")}
            ),
            **{name: (self.latency(fraction), "time") for name, fraction in marks},
            "overhead": (self.overhead, "time"),
            "cores": (self.cores, "amount"),
        }

    @property
    def made(self) -> int:
        return sum(turn.made for turn in self.turns)

    @property
    def sound(self) -> bool:
        """Whether all requests were answered, and as fast as they came. Only then a figure counts as good."""
        answered = all(kept_up(turn) and not turn.failed for turn in self.turns)
        return self.made > 0 and answered


def way_columns(way: Way) -> dict[str, tuple[Spread, Kind]]:
    """The start and the memory of a way, whatever the load, by their names in tables."""
    return {
        "start": (spread_of(way.start_seconds), "time"),
        "PSS": (spread_of(memory.pss for memory in way.memory), "bytes"),
        "USS": (spread_of(memory.uss for memory in way.memory), "bytes"),
    }


def pss(way: Way) -> Spread:
    return way_columns(way)["PSS"][0]


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
    return pss(report.way(own)).middle / pss(report.way(other)).middle


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
