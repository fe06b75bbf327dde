"""A report as pictures, by matplotlib, and as one HTML page that loads nothing: no script, no font.

The page: the verdict, the speed-up with its spread, memory, a program to copy, plots, tables, and last the
glossary and the versions. Every way has one colour and marker throughout; axes begin at zero.
"""

import base64
import html
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import resources
from io import StringIO
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from mcinfer.bench.figures import (
    Figures,
    Gain,
    Spread,
    compared_loads,
    gains,
    pools,
    pss,
    under,
)
from mcinfer.bench.report import Report, Way, dump
from mcinfer.bench.table import grids
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
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.18,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "errorbar.capsize": 2,
    "svg.fonttype": "none",
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
_PERCENTILES = (("p50", 0.5, "o"), ("p90", 0.9, "|"), ("p99", 0.99, "D"))


class Panel(NamedTuple):
    """One picture: a unique name, fit for an id, and what draws it; the height is in inches."""

    name: str
    title: str
    draw: Callable[[Axes], None]
    height: float = _HEIGHT


def panels(report: Report) -> Iterator[Panel]:
    own = {way.name for way in report.ways if way.role == "mcinfer"}
    others = [w.name for w in report.ways if w.role != "scaling" and w.name not in _LOOKS]
    more = {name: _OTHER_LOOKS[i % len(_OTHER_LOOKS)] for i, name in enumerate(others)}
    looks = {
        name: {"color": colour, "marker": marker, "linestyle": "-" if name in own else "--"}
        for name, (colour, marker) in {**_LOOKS, **more}.items()
    }
    if known := [gain for gain in gains(report) if gain.ratio.known]:
        draw = partial(_draw_gains, known)
        yield Panel("gain", "speed-up of mcinfer", draw, 1.3 + 1.6 * _ROW * len(known))
    loads = compared_loads(report)
    closed = [load for load in loads if load.rate is None]
    for batch in dict.fromkeys(load.batch for load in closed):
        found = [f for load in closed if load.batch == batch for f in under(report, load)]
        draw = partial(_draw_throughput, found, looks)
        yield Panel(f"throughput-{batch}", f"throughput, batch {batch}", draw)
    for index, load in enumerate(loads):
        if answered := [f for f in under(report, load) if f.latency(0.5).known]:
            draw = partial(_draw_latency, answered, looks)
            height = 1.5 + _ROW * len(answered)
            yield Panel(f"latency-{index}", f"latency, {load}", draw, height)
    scaling = pools(report)
    if len(scaling) > 1:
        title = f"scaling, {scaling[-1].load}"
        yield Panel("scaling", title, partial(_draw_scaling, scaling))
    if ways := [way for way in report.ways if way.role != "scaling" and way.memory]:
        yield Panel("memory", "memory", partial(_draw_memory, ways, looks), 1.2 + _ROW * len(ways))


def _fitted(text: str, width: int = _NAME_CHARACTERS) -> str:
    return textwrap.fill(printable(text), width)


def _errors(values: Sequence[Spread], scale: float = 1.0) -> list[list[float]]:
    """Error bars from the least repeat to the greatest."""
    below = [(spread.middle - spread.low) / scale for spread in values]
    return [below, [(spread.high - spread.middle) / scale for spread in values]]


def _rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_fitted(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def _bars(
    axes: Axes, spreads: Sequence[Spread], colours: Sequence[str], sign: str = "", scale: float = 1
) -> None:
    middles = [spread.middle / scale for spread in spreads]
    places = range(len(spreads))
    errors = _errors(spreads, scale)
    bars = axes.barh(places, middles, 0.6, xerr=errors, color=colours, ecolor="gray")
    axes.bar_label(bars, [f" {number(middle)}{sign}" for middle in middles], padding=3)
    axes.set_xlim(0, 1.3 * max(spread.high for spread in spreads) / scale)


def _ring(axes: Axes, place: float, figures: Figures) -> None:
    """Around a throughput whose requests were not all answered."""
    if not figures.sound:
        style: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": "#d03030"}
        axes.plot(place, figures.rows.middle, "o", markersize=12, markeredgewidth=1.4, **style)


def _draw_gains(found: Sequence[Gain], axes: Axes) -> None:
    colours = [{1: "#009e73", 0: "#888888", -1: "#d55e00"}[gain.clear] for gain in found]
    _bars(axes, [gain.ratio for gain in found], colours, f" {TIMES}")
    axes.axvline(1.0, color="gray", linestyle=":")
    axes.set_xlim(0, max(1.3, axes.get_xlim()[1]))
    _rows(axes, [f"{gain.load}: {gain.own}" for gain in found])
    what = "throughput" if found[0].load.rate is None else "speed of answers"
    axes.set_xlabel(f"{what} over the best baseline")


def _draw_throughput(found: Sequence[Figures], looks: dict[str, Any], axes: Axes) -> None:
    """Rows a second over the number of clients, of closed loops with one batch."""
    clients = sorted({figures.load.clients for figures in found})
    ways = list(dict.fromkeys(figures.way.name for figures in found))
    for index, way in enumerate(ways):
        mine = [figures for figures in found if figures.way.name == way]
        # Side by side, so that no error bar hides another.
        aside = 0.6 * ((index + 0.5) / len(ways) - 0.5)
        places = [clients.index(figures.load.clients) + aside for figures in mine]
        spreads = [figures.rows for figures in mine]
        middles = [spread.middle for spread in spreads]
        style = {"label": _fitted(way), "markersize": 5, **looks[way]}
        axes.errorbar(places, middles, yerr=_errors(spreads), **style)
        for place, figures in zip(places, mine, strict=True):
            _ring(axes, place, figures)
    axes.set_xticks(range(len(clients)), [str(count) for count in clients])
    axes.set_xlim(-0.5, len(clients) - 0.5)
    axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("requests under way at once (steps not to scale)")
    axes.set_ylabel("rows/s")


def _draw_latency(found: Sequence[Figures], looks: dict[str, Any], axes: Axes) -> None:
    """The known percentiles of each way under one load: one of too few requests has no mark."""
    unit = latency_unit(found)
    known = [
        figures.latency(q).middle / unit.scale for figures in found for _, q, _ in _PERCENTILES
    ]
    most = max((value for value in known if math.isfinite(value)), default=1.0)
    least = min((value for value in known if value > 0), default=1.0)
    seen: dict[str, Line2D] = {}
    for row, figures in enumerate(found):
        colour = looks[figures.way.name]["color"]
        places = []
        for name, fraction, marker in _PERCENTILES:
            spread = figures.latency(fraction)
            if spread.known:
                lost = math.isinf(spread.middle)
                places.append(1.15 * most if lost else spread.middle / unit.scale)
                label, shape = ("never answered", ">") if lost else (name, marker)
                style: dict[str, Any] = {
                    "marker": shape,
                    "markersize": 7,
                    "markeredgewidth": 2,
                    "linestyle": "",
                }
                axes.plot(places[-1], row, color=colour, **style)
                seen[label] = Line2D([], [], color="gray", **style)
        axes.plot([places[0], places[-1]], [row, row], color=colour, linewidth=1.5)
    _rows(axes, [marked(figures) for figures in found])
    wide = most > _WIDEST_LINEAR * least
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=6))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(least / 2 if wide else 0, (2 if wide else 1.25) * most)
    axes.set_xlabel(f"latency ({unit.sign}{', logarithmic' if wide else ''})")
    order = sorted(seen, key=lambda label: (label == "never answered", label))
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 4}
    axes.legend([seen[label] for label in order], order, **place)


def _draw_scaling(found: Sequence[Figures], axes: Axes) -> None:
    """Throughput over the number of workers, beside that many times one worker's."""
    workers = [pool.way.workers for pool in found]
    if workers[0] == 1:
        most = workers[-1] * found[0].rows.middle
        axes.plot([0, workers[-1]], [0, most], ":", color="gray", label="ideal")
    spreads = [pool.rows for pool in found]
    middles = [spread.middle for spread in spreads]
    style: dict[str, Any] = {"color": "#3b8686", "marker": "o", "label": "pool"}
    axes.errorbar(workers, middles, yerr=_errors(spreads), **style)
    for pool in found:
        _ring(axes, pool.way.workers, pool)
        if pool.speedup.known and pool.way.workers > 1:
            text = f"{number(100 * pool.speedup.middle, like=100.0)} %"
            how: dict[str, Any] = {"xytext": (4, -4), "textcoords": "offset points", "va": "top"}
            axes.annotate(text, (pool.way.workers, pool.rows.low), **how)
    axes.set_xlim(0, workers[-1] + 0.5)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("workers (below: scaling efficiency)")
    axes.set_ylabel("rows/s")


def _draw_memory(ways: Sequence[Way], looks: dict[str, Any], axes: Axes) -> None:
    _bars(axes, [pss(way) for way in ways], [looks[w.name]["color"] for w in ways], scale=MEGABYTE)
    _rows(axes, [way.name for way in ways])
    axes.set_xlabel("memory of all processes (PSS, MB)")


# Pictures.


def _style(ink: str, salt: str = "") -> Any:
    return {**_STYLE, **dict.fromkeys(_INKED, ink), "svg.hashsalt": salt}


def _draw(panel: Panel, place: FigureBase) -> None:
    axes = place.subplots()
    panel.draw(axes)
    handles, _ = axes.get_legend_handles_labels()
    place.suptitle(_fitted(panel.title, 48), fontsize=10, fontweight="bold")
    if axes.get_legend() is None and handles:
        place.legend(handles=handles, loc="outside lower center", ncols=3)


def figure(report: Report) -> Figure:
    drawn = [*panels(report)]
    rows = max(1, math.ceil(len(drawn) / _COLUMNS))
    columns = min(_COLUMNS, len(drawn)) or 1
    with rc_context(_style("#222222")), _any_characters():
        size = (columns * _WIDTH, rows * _HEIGHT + 0.9)
        whole = Figure(figsize=size, layout="constrained")
        title = (verdict(report), report.model.name, machine_line(report))
        whole.suptitle("\n".join(_fitted(text, columns * 46) for text in title))
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
    with rc_context(_style(_PLACEHOLDER, panel.name)), _any_characters():
        alone = Figure(figsize=(_WIDTH, panel.height), layout="constrained")
        _draw(panel, alone)
        file = StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        alone.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(_PLACEHOLDER, "currentColor")
    text = re.sub(r'(\sid="|\s(?:xlink:)?href="#|url\(#)', rf"\g<1>{panel.name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(panel.title)}" ', 1)


@contextmanager
def _any_characters() -> Iterator[None]:
    """Draw a box for a character that the font does not have, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


# The page.


def render(report: Report) -> str:
    """The page, to be written in UTF-8. Markup in the report's names and texts is shown, not obeyed.

    Raises:
        MissingDependencyError: pydantic is not installed.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["printable"] = printable
    template = resources.files(__package__).joinpath("page.html.jinja")
    # matplotlib has made the pictures, and escapes text.
    drawn = {name: Markup(svg) for name, svg in svgs(report).items()}  # noqa: S704
    return environment.from_string(template.read_text(encoding="utf-8")).render(
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
        middle=middle_text,
        spread=range_text,
        notes=notes(report),
        flawed=FLAWED,
        first=[drawn[name] for name in ("gain", "memory") if name in drawn],
        plots=[svg for name, svg in drawn.items() if name not in ("gain", "memory")],
        data=base64.b64encode(dump(report)).decode("ascii"),
    )
