"""A report as one HTML page that loads nothing: no script, no font, no picture. Bars are boxes of its style.

The page: the verdict, bars of the speed-up and of the memory, a program to copy, tables, and last the
versions. Bars begin at zero.
"""

import base64
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template

from mcinfer.bench import texts
from mcinfer.bench.figures import (
    MEGABYTES,
    ONE,
    Spread,
    Unit,
    gains,
    memory,
    middle_text,
    range_text,
)
from mcinfer.bench.report import Report, dump
from mcinfer.bench.table import Cell, Grid, grids
from mcinfer.bench.texts import printable

Bar = tuple[str, Spread, str]
"""A name, the figure, and a class of the page's style: ``"own"``, ``"other"`` or ``"bad"``."""


def charts(report: Report) -> list[tuple[str, list[Bar], Unit]]:
    """By title: the speed-up, where there may be a verdict, and the memory, as far as they are known."""
    speed: list[Bar] = []  # mcinfer's best way under each load, and the baseline that it is beside
    for gain in () if report.disturbed else gains(report):
        kind = "bad" if gain.clear < 0 else "own"
        speed.append((f"{gain.way.name}, {gain.load}", gain.speedup, kind))
        speed.append((gain.other, Spread((1.0,)), "other"))
    sizes: list[Bar] = [
        (way.name, memory(way)[0], "own" if way.role == "mcinfer" else "other")
        for way in report.ways
    ]
    found = (
        ("speed-up over the best baseline", speed, ONE),
        ("memory of all processes (PSS, MB)", sizes, MEGABYTES),
    )
    known = ((title, [bar for bar in bars if bar[1].known], unit) for title, bars, unit in found)
    return [chart for chart in known if chart[1]]


# HTML. Names and texts of a report are escaped in `_text`, and nowhere else.


def _text(content: object) -> str:
    return escape(printable(content))


def _paragraphs(lines: Iterable[str]) -> str:
    return "\n".join(f"<p>{_text(line)}</p>" for line in lines)


def _terms(terms: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"<dt>{_text(term)}</dt><dd>{_text(what)}</dd>" for term, what in terms)


def _chart(title: str, bars: Sequence[Bar], unit: Unit) -> str:
    known = [spread.middle for _, spread, _ in bars if math.isfinite(spread.middle)]
    most = max(known, default=0.0)
    rows = ""
    for name, spread, kind in bars:
        part = min(1.0, spread.middle / most) if most else 0.0
        rows += (
            f'<tr><th scope="row">{_text(name)}</th>'
            f'<td class="track"><span class="{kind}" style="width: {100 * part:.1f}%"></span></td>'
            f"<td>{_cell((spread, unit))}</td></tr>\n"
        )
    return f'<table class="chart">\n<caption>{_text(title)}</caption>\n{rows}</table>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return _text(cell)
    range_ = range_text(*cell)
    return _text(middle_text(*cell)) + (f"<small>{_text(range_)}</small>" if range_ else "")


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


def render(report: Report) -> str:
    """The page, to be written in UTF-8. Markup in the report's names and texts is shown, not obeyed."""
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    program = texts.report_program(report)
    said = "<p>mcinfer's best mode here, as a program:</p>\n<pre>{}</pre>"
    made = f"{report.made_at}, in {report.took_seconds:.0f} s, by mcinfer {report.mcinfer}"
    facts = {
        "Model": texts.model_line(report),
        "Machine": texts.machine_line(report),
        "Settings": texts.settings_line(report),
        "Made": made,
    }
    return Template(template).substitute(
        name=_text(report.model.name),
        verdict=_text(report.verdict),
        warnings=f'<div class="remarks">\n{_paragraphs(report.remarks)}\n</div>'
        * bool(report.remarks),
        charts="\n".join(_chart(*chart) for chart in charts(report)),
        program=said.format(escape(program)) if program else "",
        tables="\n".join(map(_table, grids(report))),
        data=base64.b64encode(dump(report)).decode("ascii"),
        ways=_terms((way.name, way.text) for way in report.ways),
        facts=_terms(facts.items()),
    )
