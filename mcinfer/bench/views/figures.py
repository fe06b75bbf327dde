"""What follows from a report: figures with their spread over the repeats. Pure; nothing is formatted here.

A request that was not answered has no latency, and leaving it out would flatter whoever drops requests. So
latencies are taken over all requests that were made: one that failed, or that an open loop never got to,
counts as infinite. A percentile of so few that it would be the slowest of them is not known. And a ratio is
taken within each repeat, since what disturbs the machine disturbs all ways of one repeat.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mcinfer.bench.report import QUANTILES, Load, Measurement, Memory, Report, Turn, Way, middle

REFERENCE = "session"
"""The way that speed-up is told against: one session with all cores."""

SHORTEST_FOR_CORES = 0.5
"""Seconds of a turn in which processor time, in ticks of 10 ms, can be told to some percent."""

_MEDIAN = 0.5
_ROUNDED = 9
"""Decimals: 1 / (1 - 0.9) is 10.000000000000002, but 10 requests have a 90th percentile."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the repeats.

    Attributes:
        middle: The median. NaN: not known. Infinite: of a latency, the request was never answered.
        low: The least.
        high: The greatest.
        count: Repeats in which it is known.
    """

    middle: float
    low: float
    high: float
    count: int = 1

    @property
    def known(self) -> bool:
        """Whether there is a figure at all."""
        return self.count > 0


UNKNOWN = Spread(math.nan, math.nan, math.nan, 0)


def spread_of(values: Iterable[float]) -> Spread:
    """The spread of one figure for each repeat; those that are NaN are left out."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return UNKNOWN
    return Spread(middle(known), min(known), max(known), len(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """One way under one load.

    Attributes:
        way: Its name.
        load: What was asked of it.
        requests: Answered requests a second.
        rows: Answered rows a second.
        speedup: Answered requests a second over those of the way `REFERENCE` under the same load. Unknown
            where it is not `sound`, or requests of that way failed.
        p50: Seconds within which half of all requests were answered.
        p90: Likewise; unknown where a turn had too few requests for it (`has_percentile`).
        p99: Likewise.
        longest: Seconds of the slowest.
        overhead: Mean latency less the engine's own run, in seconds; unknown where the way does not tell its
            run, and where an open loop did not keep up.
        cores: Busy on average; unknown where a turn was shorter than `SHORTEST_FOR_CORES`.
        per_turn: Requests that were made in a turn.
        answered: Requests, in all repeats.
        failed: That raised, in all repeats.
        unfinished: That arrived and were never begun with, in all repeats.
        behind: Repeats in which it did not keep up with an open loop.
        errors: What failed requests raised: of each repeat the first, equal ones once.
    """

    way: str
    load: Load
    requests: Spread
    rows: Spread
    speedup: Spread
    p50: Spread
    p90: Spread
    p99: Spread
    longest: Spread
    overhead: Spread
    cores: Spread
    per_turn: Spread
    answered: int
    failed: int
    unfinished: int
    behind: int
    errors: tuple[str, ...]

    @property
    def made(self) -> int:
        """Requests that were made or arrived, in all repeats."""
        return self.answered + self.failed + self.unfinished

    @property
    def sound(self) -> bool:
        """Whether all were answered, and as fast as they came. Only then may a figure count as good."""
        return self.answered == self.made > 0 and not self.behind


@dataclass(frozen=True, slots=True, kw_only=True)
class WayFigures:
    """One way, whatever the load.

    Attributes:
        way: What it is.
        start: Seconds from nothing to ready.
        pss: Bytes, summed over its processes.
        uss: Likewise.
        processes: How many there are.
    """

    way: Way
    start: Spread
    pss: Spread
    uss: Spread
    processes: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """A pool of so many workers, each with its share of the whole pool's cores.

    Attributes:
        workers: How many.
        figures: Under the load that pools are measured with.
        efficiency: Its throughput over that of the pool of one worker times `workers`: 1 is ideal. Unknown
            where not all requests were answered.
        of_way: Start and memory.
    """

    workers: int
    figures: LoadFigures
    efficiency: Spread
    of_way: WayFigures


def latency(turn: Turn, fraction: float) -> float:
    """Seconds within which a fraction of all requests of a turn was answered.

    The kept quantile that covers as many requests, so where some were not answered it is rather too high
    than too low.

    Returns:
        Infinite where fewer than that were ever answered; NaN where none was made.
    """
    made = _made(turn)
    if made == 0:
        return math.nan
    if made == turn.requests:
        return turn.latency(fraction)
    wanted = fraction * made / turn.requests if turn.requests else math.inf
    covering = [quantile for quantile in QUANTILES if quantile >= wanted]
    return turn.latency(covering[0]) if covering else math.inf


def has_percentile(turn: Turn, fraction: float) -> bool:
    """Whether enough requests were made that not only the slowest one is slower: 10 for p90, 100 for p99.

    The median and what is below it are those of any requests, and the slowest is the slowest of any.
    """
    made = _made(turn)
    if fraction <= _MEDIAN or fraction == 1:
        return made > 0
    return round(made * (1 - fraction), _ROUNDED) >= 1


def percentile(turns: Sequence[Turn], fraction: float) -> Spread:
    """`latency` over the repeats; unknown unless all of them have such a percentile.

    Those that have it alone would not do: they are the quick ones.
    """
    return _unless(
        any(not has_percentile(turn, fraction) for turn in turns if _made(turn)),
        (latency(turn, fraction) for turn in turns),
    )


def kept_up(turn: Turn) -> bool:
    """Whether requests were answered as fast as they came, and all of them were begun with."""
    return turn.kept_up and not turn.unfinished


def _made(turn: Turn) -> int:
    return turn.requests + turn.failed + turn.unfinished


def _unless(flawed: bool, values: Iterable[float]) -> Spread:
    return UNKNOWN if flawed else spread_of(values)


def load_figures(report: Report, measurement: Measurement) -> LoadFigures:
    """The figures of one way under one load."""
    turns, load = measurement.turns, measurement.load
    reference = report.find(REFERENCE, load)
    requests = [turn.throughput for turn in turns]
    return LoadFigures(
        way=measurement.way,
        load=load,
        requests=spread_of(requests),
        rows=spread_of(load.batch * value for value in requests),
        speedup=_ratio(measurement, reference) if reference else UNKNOWN,
        p50=percentile(turns, _MEDIAN),
        p90=percentile(turns, 0.9),
        p99=percentile(turns, 0.99),
        longest=percentile(turns, 1.0),
        overhead=spread_of(_overhead(turn) for turn in turns),
        cores=_unless(
            any(turn.seconds < SHORTEST_FOR_CORES for turn in turns),
            (turn.cores for turn in turns),
        ),
        per_turn=spread_of(_made(turn) for turn in turns),
        answered=sum(turn.requests for turn in turns),
        failed=sum(turn.failed for turn in turns),
        unfinished=sum(turn.unfinished for turn in turns),
        behind=sum(not kept_up(turn) for turn in turns),
        errors=tuple(dict.fromkeys(turn.error for turn in turns if turn.error)),
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


def way_figures(way: Way) -> WayFigures:
    """Start and memory of a way."""

    def over_repeats(read: Callable[[Memory], int]) -> Spread:
        return spread_of(read(memory) for memory in way.memory)

    return WayFigures(
        way=way,
        start=spread_of(way.start_seconds),
        pss=over_repeats(lambda memory: memory.pss),
        uss=over_repeats(lambda memory: memory.uss),
        processes=over_repeats(lambda memory: memory.processes),
    )


def pools(report: Report) -> tuple[PoolFigures, ...]:
    """The pools of the scaling, the smallest first; those that could not be measured are left out."""
    measured = {m.way: m for m in report.measurements if m.turns}
    ways = [way for way in report.ways if way.role == "scaling" and way.name in measured]
    ways.sort(key=lambda way: way.workers)
    alone = next((measured[way.name] for way in ways if way.workers == 1), None)
    return tuple(
        PoolFigures(
            workers=way.workers,
            figures=load_figures(report, measured[way.name]),
            efficiency=_ratio(measured[way.name], alone, way.workers) if alone else UNKNOWN,
            of_way=way_figures(way),
        )
        for way in ways
    )


def _ratio(measurement: Measurement, base: Measurement, times: int = 1) -> Spread:
    if any(turn.failed or not kept_up(turn) for turn in measurement.turns):
        return UNKNOWN  # what answers only a part, or late, is not quick
    if any(turn.failed for turn in base.turns):
        return UNKNOWN  # nor is it a feat to be quicker than what fails
    # An interrupted benchmark has more repeats of one than of the other.
    pairs = zip(measurement.turns, base.turns, strict=False)
    return spread_of(
        mine.throughput / (times * other.throughput) if other.throughput > 0 else math.nan
        for mine, other in pairs
    )


def _overhead(turn: Turn) -> float:
    overhead = turn.overhead
    return math.nan if overhead is None or not kept_up(turn) else overhead
