"""A report as one HTML page that needs nothing else: no script, no font, no request goes out."""

import base64
from dataclasses import dataclass
from importlib import resources

from mcinfer.bench.report import Report, dump
from mcinfer.bench.views import plots
from mcinfer.bench.views.tables import Cell, grids
from mcinfer.bench.views.texts import (
    FLAWED,
    machine_line,
    middle_text,
    model_line,
    notes,
    printable,
    range_text,
    remarks,
    settings_line,
    summary,
)
from mcinfer.errors import MissingDependencyError

try:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
except ImportError as exc:
    raise MissingDependencyError(
        "the page needs the package jinja2: pip install 'mcinfer[bench]'"
    ) from exc

_TEMPLATE = "page.html.jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """Plots of one kind.

    Attributes:
        kind: What their names begin with.
        title: Above them.
        text: How to read them.
    """

    kind: str
    title: str
    text: str


_SECTIONS = (
    _Section(
        kind="throughput",
        title="Throughput against concurrency",
        text="Rows answered a second by the number of requests under way at once, in closed loops. Points "
        "of one number stand side by side, so that their bars, from the least repeat to the greatest, can "
        "be told apart. Dashed lines are what else one would do, solid ones are mcinfer. A red ring: not all "
        "requests were answered.",
    ),
    _Section(
        kind="latency",
        title="Latency",
        text="How long the quickest part of all requests took: at 99, one request in a hundred took "
        "longer. Each further nine has the same room, so the tail is seen as it is. Bands reach from the "
        "least repeat to the greatest. A dotted line upwards: from there on, requests were never answered. "
        "A line ends where there were too few requests for a further percentile; the slowest one stands by "
        f"itself then. A way marked {FLAWED} failed requests or did not keep up with an open loop, where "
        "latency is that of a queue which grows as long as the turn lasts.",
    ),
    _Section(
        kind="scaling",
        title="Scaling",
        text="Pools of fewer and more workers, each worker with the share of the cores that it has in the "
        "whole pool. The dotted line is what so many times the pool of one worker would answer.",
    ),
    _Section(
        kind="memory",
        title="Memory",
        text="PSS counts memory that is shared between processes once in all, USS only what one process "
        "has for itself.",
    ),
)


def render(report: Report) -> str:
    """The page, to be written in UTF-8.

    Names and texts of the report are shown as they are, whatever markup they hold.

    Raises:
        MissingDependencyError: pydantic is not installed.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(figure=_figure, spread=_spread, printable=printable)
    source = resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    drawn = plots.svgs(report)
    kinds = {section.kind: section for section in _SECTIONS}
    shown = [
        (section, [Markup(svg) for name, svg in drawn.items() if name.split("-")[0] == kind])  # noqa: S704 made by matplotlib, which escapes text
        for kind, section in kinds.items()
    ]
    return environment.from_string(source).render(
        report=report,
        model=model_line(report),
        machine=machine_line(report),
        settings=settings_line(report),
        summary=summary(report),
        remarks=remarks(report),
        ways=[way for way in report.ways if way.role != "scaling"],
        grids=grids(report),
        notes=notes(report),
        flawed=FLAWED,
        sections=[(section, svgs) for section, svgs in shown if svgs],
        data=base64.b64encode(dump(report)).decode("ascii"),
    )


def _figure(cell: Cell) -> str:
    return cell if isinstance(cell, str) else middle_text(*cell)


def _spread(cell: Cell) -> str:
    return "" if isinstance(cell, str) else range_text(*cell)
