"""A report as pictures, by matplotlib: all panels in one figure, or each as an SVG to be set into a page."""

import html
import math
import re
from io import StringIO
from typing import Any

from mcinfer.bench.report import Report
from mcinfer.bench.views.looks import drawable
from mcinfer.bench.views.panels import Panel, panels
from mcinfer.bench.views.texts import machine_line
from mcinfer.errors import MissingDependencyError

try:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
except ImportError as exc:
    raise MissingDependencyError(
        "plots need the package matplotlib: pip install 'mcinfer[bench]'"
    ) from exc

_COLUMNS = 3
_PANEL_INCHES = (5.4, 4.4)
_DPI = 120
_TITLE_INCHES = 0.8
_TITLE_CHARACTERS = 60
"""For each panel that the title is above."""

_INK = "#222222"
_PLACEHOLDER = "#010203"
"""Ink of an SVG until it is replaced by ``currentColor``, so that it suits a light page and a dark one."""

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
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
    "text.color",
    "axes.labelcolor",
    "axes.edgecolor",
    "xtick.color",
    "ytick.color",
    "grid.color",
)


def figure(report: Report) -> Figure:
    """All panels in one figure, to be saved by ``savefig``."""
    drawn = panels(report)
    rows = max(1, math.ceil(len(drawn) / _COLUMNS))
    columns = min(_COLUMNS, len(drawn)) or 1
    width, height = _PANEL_INCHES
    with rc_context(_style(_INK)):
        whole = Figure(
            figsize=(columns * width, rows * height + _TITLE_INCHES), dpi=_DPI, layout="constrained"
        )
        title = (report.model.name, machine_line(report))
        # Not matplotlib's own wrapping: it takes dollar signs for mathematics whatever it is told.
        whole.suptitle("\n".join(drawable(text, columns * _TITLE_CHARACTERS) for text in title))
        places = whole.subfigures(rows, columns, squeeze=False).flat
        for panel, place in zip(drawn, places, strict=False):
            panel.draw(place)
        # Ticks are made when they are first drawn: it has to be in this style.
        whole.draw_without_rendering()
    return whole


def svgs(report: Report) -> dict[str, str]:
    """Each panel as an ``<svg>`` element, by its name, to be set into one page.

    Ids are unique over all of them, text is text, ink is the page's own, and the same report makes the same
    elements.
    """
    return {panel.name: _svg(panel) for panel in panels(report)}


def _style(ink: str) -> Any:
    return {**_STYLE, **dict.fromkeys(_INKED, ink)}


def _svg(panel: Panel) -> str:
    with rc_context({**_style(_PLACEHOLDER), "svg.hashsalt": panel.name}):
        alone = Figure(figsize=_PANEL_INCHES, layout="constrained")
        panel.draw(alone)
        file = StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        alone.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(_PLACEHOLDER, "currentColor")
    text = re.sub(r'(\sid="|\s(?:xlink:)?href="#|url\(#)', rf"\g<1>{panel.name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(panel.title)}" ', 1)
