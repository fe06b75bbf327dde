"""A report as tables, before it is known where they are shown. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcinfer.bench.report import Load, Report
from mcinfer.bench.views.figures import (
    LoadFigures,
    PoolFigures,
    Spread,
    WayFigures,
    compared_loads,
    pools,
    under,
    way_figures,
)
from mcinfer.bench.views.texts import (
    FLAWED,
    MEGABYTE,
    TO,
    UNKNOWN_TEXT,
    Unit,
    latency_unit,
    marked,
    number,
    printable,
    time_unit,
)

_PLAIN = Unit()
_PERCENT = Unit(0.01, "%")
_MEGABYTES = Unit(MEGABYTE, "MB")

Cell = str | tuple[Spread, Unit]
"""Text as it is, or a figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table before it is known how much room there is.

    Attributes:
        title: Above it.
        header: Of the columns; the first holds names.
        rows: Cells by column.
        flawed: Rows to be marked, by index.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    flawed: frozenset[int] = frozenset()


def grids(report: Report) -> tuple[Grid, ...]:
    """All tables of a report."""
    by_load = (load_grid(load, under(report, load)) for load in compared_loads(report))
    ways = [way_figures(way) for way in report.ways if way.role != "scaling"]
    ways = [figures for figures in ways if figures.start.known or figures.pss.known]
    scaling = pools(report)
    return (
        *by_load,
        *([way_grid(ways)] if ways else []),
        *([pool_grid(scaling)] if scaling else []),
    )


def load_grid(load: Load, all_figures: Sequence[LoadFigures]) -> Grid:
    """All ways under one load."""
    unit = latency_unit(all_figures)
    header = ("way", "n", "rows/s", "speed-up", "p50", "p90", "p99", "max", "overhead", "cores")
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            marked(figures),
            _count(figures.per_turn),
            (figures.rows, _PLAIN),
            (figures.speedup, _PLAIN),
            *((latency, unit) for latency in (figures.p50, figures.p90, figures.p99)),
            (figures.longest, unit),
            (figures.overhead, unit),
            (figures.cores, _PLAIN),
        )
        for figures in all_figures
    )
    flawed = frozenset(i for i, figures in enumerate(all_figures) if not figures.sound)
    asked = "" if load.rate is None else f"{number(load.rate * load.batch)} rows/s asked for; "
    title = f"{load} ({asked}latency and overhead in {unit.sign})"
    return Grid(title=title, header=header, rows=rows, flawed=flawed)


def way_grid(ways: Sequence[WayFigures]) -> Grid:
    """Start and memory of each way."""
    unit = time_unit(figures.start.low for figures in ways)
    header = ("way", f"start {unit.sign}", "PSS MB", "USS MB", "processes", "workers")
    return Grid(
        title="start and memory",
        header=header,
        rows=tuple(
            (
                printable(figures.way.name),
                (figures.start, unit),
                (figures.pss, _MEGABYTES),
                (figures.uss, _MEGABYTES),
                _whole(figures.processes),
                str(figures.way.workers),
            )
            for figures in ways
        ),
    )


def pool_grid(scaling: Sequence[PoolFigures]) -> Grid:
    """Pools of fewer and more workers."""
    unit = latency_unit(pool.figures for pool in scaling)
    loads = ", ".join(dict.fromkeys(str(pool.figures.load) for pool in scaling))
    return Grid(
        title=f"scaling: {loads} (latency in {unit.sign})",
        header=("workers", "n", "rows/s", "efficiency %", "p50", "p99", "PSS MB", "USS MB"),
        rows=tuple(
            (
                f"{pool.workers}{'' if pool.figures.sound else ' ' + FLAWED}",
                _count(pool.figures.per_turn),
                (pool.figures.rows, _PLAIN),
                (pool.efficiency, _PERCENT),
                (pool.figures.p50, unit),
                (pool.figures.p99, unit),
                (pool.of_way.pss, _MEGABYTES),
                (pool.of_way.uss, _MEGABYTES),
            )
            for pool in scaling
        ),
        flawed=frozenset(i for i, pool in enumerate(scaling) if not pool.figures.sound),
    )


def _count(spread: Spread) -> str:
    return f"{spread.middle:.0f}" if spread.known else UNKNOWN_TEXT


def _whole(spread: Spread) -> str:
    if not spread.known:
        return UNKNOWN_TEXT
    low, high = f"{spread.low:.0f}", f"{spread.high:.0f}"
    return low if low == high else f"{low}{TO}{high}"
