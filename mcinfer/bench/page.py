"""A report as one HTML page that loads nothing: no script, no font, no picture. Bars are boxes of its style.

The page: the verdict, the speed-up with its spread, memory, a program to copy, bars, tables, and last the
glossary and the versions. Bars begin at zero.
"""

import base64
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import resources
from itertools import groupby
from operator import itemgetter
from string import Template

from mcinfer.bench import texts
from mcinfer.bench.figures import (
    OF_LOADS,
    OF_WAYS,
    Figures,
    Spread,
    compared_loads,
    gains,
    pools,
    under,
)
from mcinfer.bench.report import Report, dump
from mcinfer.bench.table import Cell, Grid, grids
from mcinfer.bench.texts import FLAWED, Unit, printable, unit_of

_LOADS = "requests under way at once in a closed loop; arrivals in an open one"
_FLAW = "not all requests were answered, or not as fast as they came: such throughput is no speed"


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a chart; `kind` is a class of the page's style: ``"own"``, ``"other"`` or ``"bad"``."""

    name: str
    spread: Spread
    kind: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    bars: Sequence[Bar]
    unit: Unit = field(default_factory=Unit)


def charts(report: Report) -> tuple[list[Chart], list[Chart]]:
    """The speed-up and the memory; and all others. Those of which nothing is known are left out."""
    ways = [way for way in report.ways if way.role != "scaling"]
    roles = {way.name: "own" if way.role == "mcinfer" else "other" for way in ways}
    first = [
        Chart(title="speed-up over the best baseline", bars=[*_gains(report)]),
        Chart(
            title="memory of all processes (PSS, MB)",
            bars=[Bar(way.name, OF_WAYS["PSS"].of(way), roles[way.name]) for way in ways],
            unit=unit_of("bytes", Unit()),
        ),
    ]
    more = []
    for load in compared_loads(report):
        found = under(report, load)
        unit = texts.latency_unit(found)
        for name in ("rows/s", "p50", "p99"):
            own = unit_of(OF_LOADS[name].kind, unit)
            sign = f" ({own.sign})" if own.sign else ""
            bars = [_bar(each, OF_LOADS[name].of(each)) for each in found]
            more.append(Chart(title=f"{name}{sign}, {load}", bars=bars, unit=own))
    if scaling := pools(report):
        ideal = [(pool, pool.speedup) for pool in scaling]
        bars = [
            _bar(pool, pool.rows, f"({texts.percent(part.middle)} of ideal)" * part.known)
            for pool, part in ideal
        ]
        more.append(Chart(title=f"scaling: rows/s, {scaling[0].load}", bars=bars))
    return [*_known(first)], [*_known(more)]


def _known(found: Iterable[Chart]) -> Iterator[Chart]:
    for chart in found:
        if bars := [bar for bar in chart.bars if bar.spread.known]:
            yield replace(chart, bars=bars)


def _gains(report: Report) -> Iterator[Bar]:
    """For each load mcinfer's best way, and below it the baseline that it is beside."""
    kinds = {1: "own", 0: "own", -1: "bad"}
    for gain in gains(report):
        yield Bar(f"{gain.own}, {gain.load}", gain.ratio, kinds[gain.clear])
        yield Bar(gain.other, Spread((1.0,)), "other")


def _bar(figures: Figures, spread: Spread, note: str = "") -> Bar:
    kind = "other" if figures.way.role == "baseline" else "own"
    return Bar(texts.marked(figures), spread, kind if figures.sound else "bad", note)


# HTML. Names and texts of a report are escaped in `_text`, and nowhere else.


def _text(content: object) -> str:
    return escape(printable(content))


def _paragraphs(lines: Iterable[str]) -> str:
    return "\n".join(f"<p>{_text(line)}</p>" for line in lines)


def _terms(terms: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"<dt>{_text(term)}</dt><dd>{_text(what)}</dd>" for term, what in terms)


def _chart(chart: Chart) -> str:
    known = [bar.spread.middle for bar in chart.bars if math.isfinite(bar.spread.middle)]
    most = max(known, default=0.0)
    rows = ""
    for bar in chart.bars:
        part = min(1.0, bar.spread.middle / most) if most else 0.0
        rows += (
            f'<tr><th scope="row">{_text(bar.name)}</th>'
            f'<td class="track"><span class="{bar.kind}" style="width: {100 * part:.1f}%"></span></td>'
            f"<td>{_cell((bar.spread, chart.unit), bar.note)}</td></tr>\n"
        )
    return f'<table class="chart">\n<caption>{_text(chart.title)}</caption>\n{rows}</table>'


def _cell(cell: Cell, note: str = "") -> str:
    if isinstance(cell, str):
        return _text(cell)
    range_ = texts.range_text(*cell)
    text = " ".join(filter(None, (texts.middle_text(*cell), note)))
    return _text(text) + (f"<small>{_text(range_)}</small>" if range_ else "")


def _table(grid: Grid) -> str:
    header = "".join(f'<th scope="col">{_text(name)}</th>' for name in grid.header)
    rows = ""
    for index, (first, *rest) in enumerate(grid.rows):
        cells = "".join(f"<td>{_cell(cell)}</td>" for cell in rest)
        flawed = ' class="flawed"' if index in grid.flawed else ""
        rows += f'<tr{flawed}><th scope="row">{_cell(first)}</th>{cells}</tr>\n'
    return (
        f'<div class="scroll"><table>\n<caption>{_text(grid.title)}</caption>\n'
        f"<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>"
    )


def _glossary() -> Iterator[tuple[str, str]]:
    """What the words mean; names that one text explains are together."""
    terms = [(name, term.says) for name, term in (OF_LOADS | OF_WAYS).items() if term.says]
    for says, each in groupby(terms, key=itemgetter(1)):
        yield ", ".join(name for name, _ in each), says
    yield "client, /s", _LOADS
    yield FLAWED, _FLAW


def render(report: Report) -> str:
    """The page, to be written in UTF-8. Markup in the report's names and texts is shown, not obeyed."""
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    first, more = charts(report)
    warnings = [*filter(None, (texts.busy_text(report), *texts.remarks(report)))]
    program = texts.report_program(report)
    said = "<p>mcinfer's best mode here, as a program:</p>\n<pre>{}</pre>"
    made = f"{report.made_at}, in {report.took_seconds:.0f} s, by mcinfer {report.mcinfer}"
    facts = {
        "Model": texts.model_line(report),
        "Machine": texts.machine_line(report),
        "Settings": texts.settings_line(report),
        "Made": made,
    }
    ways = [(way.name, way.text) for way in report.ways if way.role != "scaling"]
    return Template(template).substitute(
        name=_text(report.model.name),
        verdict=_text(texts.verdict(report)),
        warnings=f'<div class="remarks">\n{_paragraphs(warnings)}\n</div>' if warnings else "",
        first="\n".join(map(_chart, first)),
        program=said.format(escape(program)) if program else "",
        charts="\n".join(map(_chart, more)),
        gains=_paragraphs(texts.gain_lines(report)),
        tables="\n".join(map(_table, grids(report))),
        notes=_paragraphs(texts.notes(report)),
        data=base64.b64encode(dump(report)).decode("ascii"),
        ways=_terms(ways),
        glossary=_terms(_glossary()),
        facts=_terms(facts.items()),
    )
