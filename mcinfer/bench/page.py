"""A report as pictures, by matplotlib, and as one HTML page that loads nothing: no script, no font.

The page: the verdict, the speed-up with its spread, memory, a program to copy, plots, tables, and last the
glossary and the versions. Every way has one colour and marker throughout; axes begin at zero.
"""

import base64
import html
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from io import StringIO
from typing import Any

from mcinfer.bench.figures import (
    LoadFigures,
    PoolFigures,
    Spread,
    WayFigures,
    compared_loads,
    gains,
    pools,
    under,
)
from mcinfer.bench.report import Report, dump
from mcinfer.bench.table import Cell, grids
from mcinfer.bench.texts import (
    FLAWED,
    MEGABYTE,
    TIMES,
    busy_text,
    gain_lines,
    latency_unit,
    machine_line,
    marked,
    middle_text,
    model_line,
    notes,
    number,
    printable,
    range_text,
    remarks,
    report_program,
    settings_line,
    verdict,
)
from mcinfer.errors import MissingDependencyError

try:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase
    from matplotlib.font_manager import findfont
    from matplotlib.ft2font import FT2Font
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
except ImportError as exc:
    raise MissingDependencyError(
        f"pages and plots need the package {exc.name}: pip install 'mcinfer[bench]'"
    ) from exc

_TEMPLATE = "page.html.jinja"
_COLUMNS = 3
_WIDTH, _HEIGHT = 4.6, 3.6
"""Inches of a panel: its text is still 11 px high on a screen of 420 px."""
_ROW = 0.34
"""Inches of a row of bars."""
_NAME_CHARACTERS = 24
_WIDEST_LINEAR = 40.0
"""Times the quickest latency up to which an axis is linear."""
_PLACEHOLDER = "#010203"
"""Ink of an SVG until ``currentColor`` replaces it, for a light page and a dark one."""
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.18,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    "text.usetex": False,
    "text.parse_math": False,  # a name may hold dollar signs
}
_INKED = (
    *("text.color", "axes.labelcolor", "axes.edgecolor"),
    *("xtick.color", "ytick.color", "grid.color"),
)
# Colour and marker of each way. Each stands out on white and on near-black, and no two differ by hue alone
# (after Okabe and Ito, https://jfly.uni-koeln.de/color/, the light ones darkened). Baselines are dashed.
_LOOKS = {
    "session": ("#777777", "o"),
    "threads": ("#3a9bdc", "s"),
    "threads-1": ("#0072b2", "D"),
    "pipe": ("#c47f00", "^"),
    "pipe-each": ("#cc79a7", "v"),
    "sharded": ("#009e73", "P"),
    "concurrent": ("#d55e00", "X"),
    "batched": ("#aa4499", "*"),
}
_OTHER_LOOKS = (("#7a8b00", "<"), ("#8a63d2", ">"), ("#a0522d", "h"), ("#3b8686", "p"))
_MARK = {"markersize": 7, "markeredgewidth": 2}
_RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 12,
    "markerfacecolor": "none",
    "linestyle": "",
    "markeredgecolor": "#d03030",
    "markeredgewidth": 1.4,
}
"""Around a throughput whose requests were not all answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture.

    Attributes:
        name: Unique in the report, fit for an id; its kind comes before the first dash.
        height: Inches.
        draw: Draws it into a figure.
    """

    name: str
    title: str
    draw: Callable[[Axes], None]
    height: float = _HEIGHT


def panels(report: Report) -> tuple[Panel, ...]:
    """All pictures of a report; one whose data is missing is left out."""
    looks = _looks(report)
    return (
        *_gain_panels(report),
        *_throughput_panels(report, looks),
        *_latency_panels(report, looks),
        *_scaling_panels(report),
        *_memory_panels(report, looks),
    )


def _looks(report: Report) -> dict[str, dict[str, Any]]:
    """By way, the arguments for matplotlib."""
    own = {way.name for way in report.ways if way.role == "mcinfer"}
    others = [w.name for w in report.ways if w.role != "scaling" and w.name not in _LOOKS]
    more = {name: _OTHER_LOOKS[i % len(_OTHER_LOOKS)] for i, name in enumerate(others)}
    return {
        name: {"color": colour, "marker": marker, "linestyle": "-" if name in own else "--"}
        for name, (colour, marker) in {**_LOOKS, **more}.items()
    }


def drawable(text: str, width: int = _NAME_CHARACTERS) -> str:
    """Text in characters of the font, in lines that are no longer than this."""
    known = FT2Font(findfont("DejaVu Sans")).get_charmap()
    return textwrap.fill("".join(c if ord(c) in known else "?" for c in printable(text)), width)


def _bars(values: Sequence[Spread], scale: float = 1.0) -> list[list[float]]:
    """Error bars from the least repeat to the greatest."""
    below = [(spread.middle - spread.low) / scale for spread in values]
    return [below, [(spread.high - spread.middle) / scale for spread in values]]


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Horizontal bars: one row for each name, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def _gain_panels(report: Report) -> Iterator[Panel]:
    """Mcinfer's speed-up over the best baseline, load by load."""
    found = [gain for gain in gains(report) if gain.ratio.known]
    if not found:
        return

    def draw(axes: Axes) -> None:
        ratios = [gain.ratio for gain in found]
        middles = [ratio.middle for ratio in ratios]
        colours = [{1: "#009e73", 0: "#888888", -1: "#d55e00"}[gain.clear] for gain in found]
        bars = axes.barh(
            range(len(found)), middles, 0.6, xerr=_bars(ratios), color=colours, ecolor="gray"
        )
        labels = [f" {number(middle)} {TIMES}" for middle in middles]
        axes.bar_label(bars, labels, label_type="edge", padding=3)
        axes.axvline(1.0, color="gray", linestyle=":")
        _rows(axes, [drawable(f"{gain.load}: {gain.own}") for gain in found])
        axes.set_xlim(0, 1.3 * max(1.0, *(ratio.high for ratio in ratios)))
        what = "throughput" if found[0].load.rate is None else "speed of answers"
        axes.set_xlabel(f"{what} over the best baseline")

    height = 1.3 + 1.6 * _ROW * len(found)
    yield Panel(name="gain", title="speed-up of mcinfer", draw=draw, height=height)


def _throughput_panels(report: Report, looks: dict[str, Any]) -> Iterator[Panel]:
    """One for each batch: rows a second over the number of clients, of closed loops."""
    loads = [load for load in compared_loads(report) if load.rate is None]
    for batch in dict.fromkeys(load.batch for load in loads):
        found = [f for load in loads if load.batch == batch for f in under(report, load)]
        yield Panel(
            name=f"throughput-{batch}",
            title=f"throughput, batch {batch}",
            draw=partial(_draw_throughput, found=found, looks=looks),
        )


def _draw_throughput(axes: Axes, *, found: Sequence[LoadFigures], looks: dict[str, Any]) -> None:
    clients = sorted({figures.load.clients for figures in found})
    ways = list(dict.fromkeys(figures.way for figures in found))
    for index, way in enumerate(ways):
        mine = [figures for figures in found if figures.way == way]
        # Side by side, so that no error bar hides another.
        aside = 0.6 * ((index + 0.5) / len(ways) - 0.5)
        places = [clients.index(figures.load.clients) + aside for figures in mine]
        spreads = [figures.rows for figures in mine]
        middles = [spread.middle for spread in spreads]
        label = drawable(way)
        axes.errorbar(
            places, middles, yerr=_bars(spreads), capsize=2, label=label, markersize=5, **looks[way]
        )
        for place, figures in zip(places, mine, strict=True):
            if not figures.sound:
                axes.plot(place, figures.rows.middle, **_RING)
    axes.set_xticks(range(len(clients)), [str(count) for count in clients])
    axes.set_xlim(-0.5, len(clients) - 0.5)
    axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("requests under way at once (steps not to scale)")
    axes.set_ylabel("rows/s")


def _latency_panels(report: Report, looks: dict[str, Any]) -> Iterator[Panel]:
    """One for each load: the known percentiles of each way."""
    for index, load in enumerate(compared_loads(report)):
        found = [figures for figures in under(report, load) if figures.latency(0.5).known]
        if found:
            yield Panel(
                name=f"latency-{index}",
                title=f"latency, {load}",
                draw=partial(_draw_latency, found=found, looks=looks),
                height=1.5 + _ROW * len(found),
            )


def _draw_latency(axes: Axes, *, found: Sequence[LoadFigures], looks: dict[str, Any]) -> None:
    unit = latency_unit(found)
    # A percentile of too few requests is not known, and has no mark.
    marks = (("p50", 0.5, "o"), ("p90", 0.9, "|"), ("p99", 0.99, "D"))
    known = [figures.latency(q).middle for figures in found for _, q, _ in marks]
    most = max((v for v in known if math.isfinite(v)), default=unit.scale) / unit.scale
    never = 1.15 * most
    seen = {}
    for row, figures in enumerate(found):
        colour = looks[figures.way]["color"]
        places = []
        for name, fraction, marker in marks:
            spread = figures.latency(fraction)
            if not spread.known:
                continue
            lost = math.isinf(spread.middle)
            at = never if lost else spread.middle / unit.scale
            places.append(at)
            shape = ">" if lost else marker
            style: dict[str, Any] = {"marker": shape, "linestyle": "", **_MARK}
            axes.plot(at, row, color=colour, **style)
            seen["never answered" if lost else name] = Line2D([], [], color="gray", **style)
        axes.plot([places[0], places[-1]], [row, row], color=colour, linewidth=1.5)
    _rows(axes, [drawable(marked(figures)) for figures in found])
    least = min((v for v in known if v > 0), default=unit.scale) / unit.scale
    wide = most > _WIDEST_LINEAR * least
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(least / 2 if wide else 0, (2 if wide else 1.25) * most)
    axes.set_xlabel(f"latency ({unit.sign}{', logarithmic' if wide else ''})")
    order = [label for label in (*(name for name, *_ in marks), "never answered") if label in seen]
    axes.legend(
        [seen[label] for label in order],
        order,
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        ncols=4,
    )


def _scaling_panels(report: Report) -> Iterator[Panel]:
    """Throughput over the number of workers, beside that many times one worker's."""
    found = pools(report)
    if len(found) > 1:
        title = f"scaling, {found[-1].figures.load}"
        yield Panel(name="scaling", title=title, draw=partial(_draw_scaling, found=found))


def _draw_scaling(axes: Axes, *, found: Sequence[PoolFigures]) -> None:
    workers = [pool.workers for pool in found]
    if found[0].workers == 1:
        most = workers[-1] * found[0].figures.rows.middle
        axes.plot([0, workers[-1]], [0, most], ":", color="gray", label="ideal")
    spreads = [pool.figures.rows for pool in found]
    middles = [spread.middle for spread in spreads]
    axes.errorbar(
        workers, middles, yerr=_bars(spreads), capsize=2, color="#3b8686", marker="o", label="pool"
    )
    for pool in found:
        if not pool.figures.sound:
            axes.plot(pool.workers, pool.figures.rows.middle, **_RING)
        if pool.efficiency.known and pool.workers > 1:
            text = f"{number(100 * pool.efficiency.middle, like=100.0)} %"
            place = (pool.workers, pool.figures.rows.low)
            how = {"xytext": (4, -4), "textcoords": "offset points", "va": "top"}
            axes.annotate(text, place, **how)  # type: ignore[arg-type]
    axes.set_xlim(0, workers[-1] + 0.5)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("workers (below: scaling efficiency)")
    axes.set_ylabel("rows/s")


def _memory_panels(report: Report, looks: dict[str, Any]) -> Iterator[Panel]:
    ways = [WayFigures(way) for way in report.ways if way.role != "scaling" and way.memory]
    if not ways:
        return

    def draw(axes: Axes) -> None:
        spreads = [figures.pss for figures in ways]
        middles = [spread.middle / MEGABYTE for spread in spreads]
        bars = axes.barh(
            range(len(ways)),
            middles,
            0.6,
            xerr=_bars(spreads, MEGABYTE),
            color=[looks[figures.way.name]["color"] for figures in ways],
            ecolor="gray",
        )
        axes.bar_label(bars, [number(middle) for middle in middles], padding=3)
        _rows(axes, [drawable(figures.way.name) for figures in ways])
        axes.set_xlim(0, 1.25 * max(spread.high for spread in spreads) / MEGABYTE)
        axes.set_xlabel("memory of all processes (PSS, MB)")

    height = 1.2 + _ROW * len(ways)
    yield Panel(name="memory", title="memory", draw=draw, height=height)


# Pictures.


def _style(ink: str) -> Any:
    return {**_STYLE, **dict.fromkeys(_INKED, ink)}


def _draw(panel: Panel, place: FigureBase) -> None:
    axes = place.subplots()
    panel.draw(axes)
    legend = axes.get_legend()
    handles, _ = axes.get_legend_handles_labels()
    place.suptitle(drawable(panel.title, 48), fontsize=10, fontweight="bold")
    if legend is None and handles:
        place.legend(handles=handles, loc="outside lower center", ncols=3)


def figure(report: Report) -> Figure:
    """All panels in one figure, to be saved by ``savefig``."""
    drawn = panels(report)
    rows = max(1, math.ceil(len(drawn) / _COLUMNS))
    columns = min(_COLUMNS, len(drawn)) or 1
    with rc_context(_style("#222222")):
        size = (columns * _WIDTH, rows * _HEIGHT + 0.9)
        whole = Figure(figsize=size, layout="constrained")
        title = (verdict(report), report.model.name, machine_line(report))
        whole.suptitle("\n".join(drawable(text, columns * 46) for text in title))
        places = whole.subfigures(rows, columns, squeeze=False).flat
        for panel, place in zip(drawn, places, strict=False):
            _draw(panel, place)
        # Ticks are made when they are first drawn: it has to be in this style.
        whole.draw_without_rendering()
    return whole


def svgs(report: Report) -> dict[str, str]:
    """Each panel as an ``<svg>`` element, by its name, to be set into one page.

    Ids are unique over all of them, text is text, ink is the page's own, and the same report makes the same
    elements.
    """
    return {panel.name: _svg(panel) for panel in panels(report)}


def _svg(panel: Panel) -> str:
    with rc_context({**_style(_PLACEHOLDER), "svg.hashsalt": panel.name}):
        alone = Figure(figsize=(_WIDTH, panel.height), layout="constrained")
        _draw(panel, alone)
        file = StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        alone.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(_PLACEHOLDER, "currentColor")
    text = re.sub(r'(\sid="|\s(?:xlink:)?href="#|url\(#)', rf"\g<1>{panel.name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(panel.title)}" ', 1)


# The page.


def render(report: Report) -> str:
    """The page, to be written in UTF-8. Markup in the report's names and texts is shown, not obeyed.

    Raises:
        MissingDependencyError: pydantic is not installed.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(figure=_figure, spread=_spread, printable=printable)
    source = resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    drawn = svgs(report)
    return environment.from_string(source).render(
        report=report,
        verdict=verdict(report),
        busy=busy_text(report),
        gains=gain_lines(report),
        program=report_program(report),
        model=model_line(report),
        machine=machine_line(report),
        settings=settings_line(report),
        remarks=remarks(report),
        ways=[way for way in report.ways if way.role != "scaling"],
        grids=grids(report),
        notes=notes(report),
        flawed=FLAWED,
        first=[Markup(drawn[name]) for name in ("gain", "memory") if name in drawn],  # noqa: S704 made by matplotlib, which escapes text
        plots=[Markup(svg) for name, svg in drawn.items() if name not in ("gain", "memory")],  # noqa: S704 likewise
        data=base64.b64encode(dump(report)).decode("ascii"),
    )


def _figure(cell: Cell) -> str:
    return cell if isinstance(cell, str) else middle_text(*cell)


def _spread(cell: Cell) -> str:
    return "" if isinstance(cell, str) else range_text(*cell)
