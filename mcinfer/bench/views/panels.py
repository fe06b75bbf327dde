"""What there is to draw of a report, panel by panel, by matplotlib.

Every way has one colour, marker and line throughout. Axes begin at zero; one that does not says that it is
logarithmic. A panel whose data is missing is left out.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcinfer.bench.report import QUANTILES, Measurement, Report
from mcinfer.bench.views.figures import (
    LoadFigures,
    PoolFigures,
    Spread,
    WayFigures,
    compared_loads,
    percentile,
    pools,
    under,
    way_figures,
)
from mcinfer.bench.views.looks import POOL_LOOK, Look, Looks, drawable, key, legend, line, looks_of
from mcinfer.bench.views.texts import MEGABYTE, marked, middle_text, number, time_unit
from mcinfer.errors import MissingDependencyError

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
except ImportError as exc:
    raise MissingDependencyError(
        "plots need the package matplotlib: pip install 'mcinfer[bench]'"
    ) from exc

_WIDEST_LINEAR = 40.0
"""Times that the slowest request may take the quickest median before the axis is logarithmic."""

_ROOM_ABOVE, _ROOM_ABOVE_LOG = 1.06, 1.6
"""Of an axis that is logarithmic the same room takes a greater factor."""

_MAX_PLACE = 3.6
_PERCENTILES = {0.0: "0", 0.5: "50", 0.9: "90", 0.99: "99", 0.999: "99.9", 1.0: "max"}
_RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 12,
    "markerfacecolor": "none",
    "markeredgecolor": "#d03030",
    "markeredgewidth": 1.4,
    "linestyle": "",
}
"""Around a point where not all requests were answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture.

    Attributes:
        name: Unique in the report, fit for an id; what comes before the first dash is its kind.
        title: What it shows.
        draw: Draws it.
    """

    name: str
    title: str
    draw: Callable[[FigureBase], None]


def panels(report: Report) -> tuple[Panel, ...]:
    """All that there is to draw."""
    looks = looks_of(report)
    return (
        *_throughput_panels(report, looks),
        *_latency_panels(report, looks),
        *_scaling_panels(report),
        *_memory_panels(report, looks),
    )


def _throughput_panels(report: Report, looks: Looks) -> Iterator[Panel]:
    """One for each batch: rows a second over the number of clients, of closed loops."""
    loads = [load for load in compared_loads(report) if load.rate is None]
    for batch in dict.fromkeys(load.batch for load in loads):
        clients = sorted({load.clients for load in loads if load.batch == batch})
        found = [f for load in loads if load.batch == batch for f in under(report, load)]
        title = f"throughput, batch {batch}"
        draw = partial(_draw_throughput, title=title, clients=clients, found=found, looks=looks)
        yield Panel(name=f"throughput-{batch}", title=title, draw=draw)


def _draw_throughput(
    place: FigureBase,
    *,
    title: str,
    clients: Sequence[int],
    found: Sequence[LoadFigures],
    looks: Looks,
) -> None:
    axes = place.subplots()
    ways = list(dict.fromkeys(figures.way for figures in found))
    keys = []
    for index, way in enumerate(ways):
        # Side by side, so that no error bar hides another.
        aside = 0.6 * ((index + 0.5) / len(ways) - 0.5)
        mine = [figures for figures in found if figures.way == way]
        places = [clients.index(figures.load.clients) + aside for figures in mine]
        look = looks[way]
        _draw_spreads(axes, places, [f.rows for f in mine], look)
        for at, figures in zip(places, mine, strict=True):
            _ring(axes, at, figures)
        keys.append(key(way, look))
    keys += _ring_keys(found)
    axes.set_xticks(range(len(clients)), [str(count) for count in clients])
    axes.set_xlim(-0.5, len(clients) - 0.5)
    axes.grid(visible=False, axis="x")
    _finish(axes, title, "requests under way at once (steps not to scale)", "rows/s")
    legend(place, keys)


def _draw_spreads(
    axes: Axes, places: Sequence[float], spreads: Sequence[Spread], look: Look, scale: float = 1.0
) -> None:
    """A line through the middles, with a bar from the least repeat to the greatest."""
    middles = [spread.middle / scale for spread in spreads]
    below = [(spread.middle - spread.low) / scale for spread in spreads]
    above = [(spread.high - spread.middle) / scale for spread in spreads]
    axes.errorbar(
        places,
        middles,
        yerr=(below, above),
        color=look.colour,
        capsize=2,
        elinewidth=1,
        **line(look),
    )


def _ring(axes: Axes, at: float, figures: LoadFigures) -> None:
    """Mark a throughput that is not to be taken for speed."""
    if not figures.sound:
        axes.plot(at, figures.rows.middle, **_RING)


def _ring_keys(found: Sequence[LoadFigures]) -> list[Line2D]:
    whole = all(figures.sound for figures in found)
    return [] if whole else [Line2D([], [], label="unanswered", **_RING)]


def _latency_panels(report: Report, looks: Looks) -> Iterator[Panel]:
    """One for each load: how long which part of all requests took."""
    names = {way.name for way in report.ways if way.role != "scaling"}
    for index, load in enumerate(compared_loads(report)):
        found = [m for m in report.measurements if m.load == load and m.way in names and m.turns]
        if any(turn.latencies for m in found for turn in m.turns):
            title = f"latency, {load}"
            labels = {figures.way: marked(figures) for figures in under(report, load)}
            draw = partial(_draw_latency, title=title, found=found, looks=looks, labels=labels)
            yield Panel(name=f"latency-{index}", title=title, draw=draw)


def _draw_latency(
    place: FigureBase,
    *,
    title: str,
    found: Sequence[Measurement],
    looks: Looks,
    labels: Mapping[str, str],
) -> None:
    axes = place.subplots()
    curves = {m.way: [percentile(m.turns, q) for q in QUANTILES] for m in found}
    medians = [curve[QUANTILES.index(0.5)].low for curve in curves.values()]
    # Where one repeat's are never answered, the middle one's may be the highest to be drawn.
    ends = [end for curve in curves.values() for s in curve for end in (s.middle, s.high)]
    slowest = max(value for value in ends if math.isfinite(value))
    unit = time_unit(medians)
    wide = slowest > _WIDEST_LINEAR * min((m for m in medians if m > 0), default=slowest)
    if wide:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    top = (_ROOM_ABOVE_LOG if wide else _ROOM_ABOVE) * slowest / unit.scale
    keys = []
    lost = False
    for way, curve in curves.items():
        lost |= _draw_curve(axes, curve, looks[way], unit.scale, top)
        keys.append(key(labels[way], looks[way]))
    if lost:
        keys.append(Line2D([], [], color="gray", linestyle=":", label="unanswered"))
    axes.set_xticks([_percentile_place(q) for q in _PERCENTILES], list(_PERCENTILES.values()))
    axes.set_xlim(0, _MAX_PLACE + 0.1)
    scale = ", logarithmic" if wide else ""
    across = "percentile of all requests (the tail is stretched)"
    _finish(axes, title, across, f"latency ({unit.sign}{scale})", from_zero=not wide)
    axes.set_ylim(top=top)
    legend(place, keys)


def _percentile_place(fraction: float) -> float:
    """Each further nine takes as much room as the one before; the slowest of all has a place of its own."""
    return _MAX_PLACE if fraction >= 1 else -math.log10(1 - fraction)


def _draw_curve(axes: Axes, curve: Sequence[Spread], look: Look, scale: float, top: float) -> bool:
    """Latency over percentile; whether a part was never answered, which is a line up and out.

    What is not known is a gap: so the slowest stands alone where the percentiles before it are not known.
    """
    lost = [math.isinf(spread.middle) for spread in curve]
    points = [
        (_percentile_place(q), spread.middle / scale, spread.low / scale, spread.high / scale)
        for q, spread, never in zip(QUANTILES, curve, lost, strict=True)
        if not never
    ]
    places, middles, lows, highs = zip(*points, strict=True) if points else ((), (), (), ())
    marked = {_percentile_place(q) for q in (0.5, 0.9, 0.99, 0.999, 1.0)}
    axes.plot(
        places,
        middles,
        color=look.colour,
        markevery=[i for i, at in enumerate(places) if at in marked],
        **line(look),
    )
    axes.fill_between(
        places, lows, [min(high, top) for high in highs], color=look.colour, alpha=0.15, linewidth=0
    )
    if not any(lost):
        return False
    known = [(at, middle) for at, middle, *_ in points if not math.isnan(middle)]
    at, from_ = known[-1] if known else (0.0, 0.0)
    axes.plot([at, at], [from_, top], color=look.colour, linestyle=":", linewidth=1.4)
    return True


def _scaling_panels(report: Report) -> Iterator[Panel]:
    """Throughput over the number of workers, beside what it would be if each added as much as the first."""
    found = pools(report)
    if len(found) > 1:
        title = f"scaling, {found[-1].figures.load}"
        draw = partial(_draw_scaling, title=title, found=found)
        yield Panel(name="scaling", title=title, draw=draw)


def _draw_scaling(place: FigureBase, *, title: str, found: Sequence[PoolFigures]) -> None:
    axes = place.subplots()
    workers = [pool.workers for pool in found]
    keys = [key("pool of so many workers", POOL_LOOK)]
    if found[0].workers == 1:
        most = workers[-1] * found[0].figures.rows.middle
        label = "ideal: so many times one"
        keys += axes.plot([0, workers[-1]], [0, most], ":", color="gray", label=label)
    _draw_spreads(axes, workers, [pool.figures.rows for pool in found], POOL_LOOK)
    for pool in found:
        _ring(axes, pool.workers, pool.figures)
        if pool.efficiency.known and pool.workers > 1:
            axes.annotate(
                f"{number(100 * pool.efficiency.middle, like=100.0)} %",
                (pool.workers, pool.figures.rows.low),
                xytext=(4, -4),
                textcoords="offset points",
                ha="left",
                va="top",
            )
    keys += _ring_keys([pool.figures for pool in found])
    _workers_axis(axes, workers)
    _finish(axes, title, "workers (below: scaling efficiency)", "rows/s")
    legend(place, keys)


def _memory_panels(report: Report, looks: Looks) -> Iterator[Panel]:
    found = [pool.of_way for pool in pools(report) if pool.of_way.pss.known]
    if len(found) > 1:
        title = "memory of pools"
        yield Panel(
            name="memory-workers",
            title=title,
            draw=partial(_draw_memory_of_pools, title=title, found=found),
        )
    ways = [way_figures(way) for way in report.ways if way.role != "scaling"]
    ways = [figures for figures in ways if figures.pss.known]
    if ways:
        title = "memory of ways"
        yield Panel(
            name="memory-ways",
            title=title,
            draw=partial(_draw_memory_of_ways, title=title, found=ways, looks=looks),
        )


def _draw_memory_of_pools(place: FigureBase, *, title: str, found: Sequence[WayFigures]) -> None:
    axes = place.subplots()
    workers = [figures.way.workers for figures in found]
    unique = Look(POOL_LOOK.colour, "s", dashed=True)
    _draw_spreads(axes, workers, [f.pss for f in found], POOL_LOOK, scale=MEGABYTE)
    _draw_spreads(axes, workers, [f.uss for f in found], unique, scale=MEGABYTE)
    _workers_axis(axes, workers)
    _finish(axes, title, "workers", "memory of all processes (MB)")
    legend(place, [key("PSS: really taken", POOL_LOOK), key("USS: shared with nobody", unique)])


def _draw_memory_of_ways(
    place: FigureBase, *, title: str, found: Sequence[WayFigures], looks: Looks
) -> None:
    axes = place.subplots()
    for row, figures in enumerate(found):
        colour = looks[figures.way.name].colour
        for aside, spread, hatch in ((-0.2, figures.pss, ""), (0.2, figures.uss, "////")):
            error = ([spread.middle - spread.low], [spread.high - spread.middle])
            axes.barh(
                row + aside,
                spread.middle / MEGABYTE,
                height=0.36,
                xerr=[[value / MEGABYTE for value in side] for side in error],
                color="none" if hatch else colour,
                edgecolor=colour,
                hatch=hatch,
                ecolor="gray",
                capsize=2,
            )
            axes.annotate(
                middle_text(Spread(spread.middle / MEGABYTE, 0, 0)),
                (spread.high / MEGABYTE, row + aside),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
    axes.set_yticks(range(len(found)), [drawable(figures.way.name) for figures in found])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.12 * max(figures.pss.high for figures in found) / MEGABYTE)
    axes.set_title(title)
    axes.set_xlabel("of all processes (MB); filled: PSS, hatched: USS")


def _workers_axis(axes: Axes, workers: Sequence[int]) -> None:
    axes.set_xlim(0, workers[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _finish(axes: Axes, title: str, across: str, up: str, *, from_zero: bool = True) -> None:
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    if from_zero:
        axes.set_ylim(0, _ROOM_ABOVE * axes.dataLim.y1 if axes.dataLim.y1 > 0 else 1.0)
