"""The figures that follow from a report, with their spread over the repeats. Pure; nothing is formatted here.

Latencies are over all requests that were made: one that failed, or that an open loop never began, counts as
infinite, since leaving it out would make a way that drops requests look good. A percentile of so few requests
that it would be the slowest of them is not known. A ratio is taken within each repeat, since other work on
the machine disturbs all ways of one repeat.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from mcinfer.bench.report import OTHERS, QUANTILES, Load, Measurement, Memory, Report, Turn, Way

REFERENCE = "session"
"""The way that speed-up is relative to: one session with all cores."""

SHORTEST_FOR_CORES = 0.5
"""Seconds of a turn in which processor time, in ticks of 10 ms, is known to some percent."""

_CLEAR_GAIN = 1.02
"""A median gain that is not worth a word is below this, however small the spread is."""
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
        """Whether there is a figure at all."""
        return bool(self.values)

    @property
    def count(self) -> int:
        """How often it was measured."""
        return len(self.values)

    @property
    def middle(self) -> float:
        """The median; NaN of nothing, as are `low` and `high`."""
        return median(self.values) if self.values else math.nan

    @property
    def low(self) -> float:
        """The least."""
        return min(self.values, default=math.nan)

    @property
    def high(self) -> float:
        """The greatest."""
        return max(self.values, default=math.nan)

    @property
    def width(self) -> float:
        """The distance of the least and the greatest, as a part of the median."""
        return (self.high - self.low) / self.middle if self.known and self.middle else 0.0

    def over(self, other: "Spread") -> Self:
        """Ratios, value by value."""
        return type(self)(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))


UNKNOWN = Spread()


def spread_of(values: Iterable[float]) -> Spread:
    """The spread of one figure for each repeat; those that are NaN are left out."""
    return Spread(tuple(float(value) for value in values if not math.isnan(value)))


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The figures of one way under one load; `base` has the turns of the way `REFERENCE` under it."""

    way: str
    load: Load
    turns: tuple[Turn, ...]
    base: tuple[Turn, ...] = ()

    @property
    def requests(self) -> Spread:
        """Answered requests a second."""
        return spread_of(turn.throughput for turn in self.turns)

    @property
    def rows(self) -> Spread:
        """Answered rows a second."""
        return spread_of(self.load.batch * turn.throughput for turn in self.turns)

    @property
    def speedup(self) -> Spread:
        """Throughput over that of `REFERENCE`; unknown where requests failed, or it fell behind."""
        return throughput_ratio(self.turns, self.base)

    def latency(self, fraction: float) -> Spread:
        """Seconds within which this part of all requests was answered."""
        return percentile(self.turns, fraction)

    @property
    def overhead(self) -> Spread:
        """Mean latency less the engine's run; unknown where it fell behind, or tells no runs."""
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
    def per_turn(self) -> Spread:
        """Requests that were made in a turn."""
        return spread_of(turn.made for turn in self.turns)

    @property
    def made(self) -> int:
        """Requests that were made or arrived, in all repeats."""
        return sum(turn.made for turn in self.turns)

    @property
    def failed(self) -> int:
        """Requests that raised, in all repeats."""
        return sum(turn.failed for turn in self.turns)

    @property
    def unfinished(self) -> int:
        """Requests that arrived and were never begun, in all repeats."""
        return sum(turn.unfinished for turn in self.turns)

    @property
    def behind(self) -> int:
        """Repeats in which it did not keep up with an open loop."""
        return sum(not kept_up(turn) for turn in self.turns)

    @property
    def errors(self) -> tuple[str, ...]:
        """The errors of failed requests: the first of each repeat, equal ones once."""
        return tuple(dict.fromkeys(turn.error for turn in self.turns if turn.error))

    @property
    def sound(self) -> bool:
        """Whether all requests were answered, and as fast as they came. Only then a figure counts as good."""
        return self.made > 0 and not (self.failed or self.unfinished or self.behind)


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


def load_figures(report: Report, measurement: Measurement) -> LoadFigures:
    """The figures of one way under one load."""
    base = report.find(REFERENCE, measurement.load)
    return LoadFigures(
        measurement.way, measurement.load, measurement.turns, base.turns if base else ()
    )


def under(report: Report, load: Load) -> tuple[LoadFigures, ...]:
    """All ways that were measured under a load, in the report's order; pools of the scaling apart."""
    names = {way.name for way in report.ways if way.role != "scaling"}
    return tuple(
        load_figures(report, measurement)
        for measurement in report.measurements
        if measurement.load == load and measurement.way in names and measurement.turns
    )


def compared_loads(report: Report) -> tuple[Load, ...]:
    """All loads that ways are compared under: closed loops and open ones, without the scaling's."""
    return report.loads("baseline", "mcinfer")


@dataclass(frozen=True, slots=True)
class WayFigures:
    """Start and memory of one way, whatever the load."""

    way: Way

    @property
    def start(self) -> Spread:
        """Seconds from nothing to ready."""
        return spread_of(self.way.start_seconds)

    @property
    def pss(self) -> Spread:
        """Bytes, summed over its processes."""
        return self._memory(lambda memory: memory.pss)

    @property
    def uss(self) -> Spread:
        """Likewise."""
        return self._memory(lambda memory: memory.uss)

    @property
    def processes(self) -> Spread:
        """How many there are."""
        return self._memory(lambda memory: memory.processes)

    def _memory(self, read: Callable[[Memory], int]) -> Spread:
        return spread_of(read(memory) for memory in self.way.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """A pool of so many workers, each with its share of the whole pool's cores.

    Attributes:
        efficiency: Its throughput over `workers` times that of the pool of one: 1 is ideal.
    """

    workers: int
    figures: LoadFigures
    efficiency: Spread
    of_way: WayFigures


def pools(report: Report) -> tuple[PoolFigures, ...]:
    """The pools of the scaling, the smallest first; those that could not be measured are left out."""
    measured = {m.way: m for m in report.measurements if m.turns}
    ways = [way for way in report.ways if way.role == "scaling" and way.name in measured]
    ways.sort(key=lambda way: way.workers)
    one = next((measured[way.name].turns for way in ways if way.workers == 1), ())
    return tuple(
        PoolFigures(
            workers=way.workers,
            figures=load_figures(report, measured[way.name]),
            efficiency=throughput_ratio(measured[way.name].turns, one, way.workers),
            of_way=WayFigures(way),
        )
        for way in ways
    )


# The verdict.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The best of mcinfer's ways under one load, beside the best baseline there.

    Attributes:
        ratio: Above 1 where mcinfer is better, within each repeat: of throughput in a closed loop, of the
            baseline's median latency over mcinfer's in an open one.
    """

    load: Load
    own: str
    other: str
    ratio: Spread

    @property
    def clear(self) -> int:
        """1 where mcinfer is better in every repeat, -1 where it is worse, 0 where that is not clear."""
        if self.ratio.count < 2:
            return 0
        if self.ratio.low > 1 and self.ratio.middle >= _CLEAR_GAIN:
            return 1
        return -1 if self.ratio.high < 1 and self.ratio.middle <= 1 / _CLEAR_GAIN else 0


def gains(report: Report) -> tuple[Gain, ...]:
    """The gain under each load that mcinfer and a baseline kept up with; under closed loops, if any."""
    roles = {way.name: way.role for way in report.ways}
    found = []
    for load in compared_loads(report):
        sound = [figures for figures in under(report, load) if figures.sound]
        own = [figures for figures in sound if roles[figures.way] == "mcinfer"]
        others = [figures for figures in sound if roles[figures.way] == "baseline"]
        if not own or not others:
            continue
        best, other = (max(each, key=_goodness) for each in (own, others))
        if load.rate is None:
            ratio = throughput_ratio(best.turns, other.turns)
        else:
            pairs = zip(best.turns, other.turns, strict=False)
            ratio = spread_of(latency(b, 0.5) / latency(a, 0.5) for a, b in pairs)
        found.append(Gain(load=load, own=best.way, other=other.way, ratio=ratio))
    closed = tuple(gain for gain in found if gain.load.rate is None)
    return closed or tuple(found)


def _goodness(figures: LoadFigures) -> float:
    """Throughput in a closed loop. In an open one all that keep up have the same, so latency there."""
    if figures.load.rate is None:
        return figures.rows.middle
    return -figures.latency(0.5).middle


def best_gain(report: Report) -> Gain | None:
    """The gain that the verdict is about: the clearest and greatest."""
    return max(gains(report), key=lambda gain: (gain.clear, gain.ratio.middle), default=None)


def memory_beside(report: Report, own: str) -> tuple[str, float] | None:
    """A baseline, and mcinfer's memory as a part of the baseline's.

    The baseline with as many processes that run the model, if there is one; else the smallest.
    """
    mine = report.way(own)
    others = [way for way in report.ways if way.role == "baseline" and way.memory]
    if not mine.memory or not others:
        return None
    same = [way for way in others if way.workers == mine.workers] or others
    other = min(same, key=lambda way: WayFigures(way).pss.middle)
    return other.name, WayFigures(mine).pss.middle / WayFigures(other).pss.middle


def busy(report: Report) -> tuple[float, float]:
    """Cores that other programs used, and the usual spread of throughput, where that is too much; else 0."""
    others, cores = report.machine.get(OTHERS, 0.0), report.machine.get("cores", 1)
    used = float(others) if isinstance(others, int | float) else 0.0
    limit = _BUSY_PART * (cores if isinstance(cores, int | float) else 1)
    loads = [load for load in compared_loads(report) if load.rate is None]
    widths = [f.rows.width for load in loads for f in under(report, load) if f.sound]
    usual = median(widths) if widths else 0.0
    return used if used > limit else 0.0, usual if usual > _BUSY_SPREAD else 0.0
