"""A report as tables in a terminal, or in a file: nothing is cut off, and nothing needs colours."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcinfer.bench import texts
from mcinfer.bench.figures import (
    FLAWED,
    MEGABYTES,
    ONE,
    TO,
    Spread,
    Unit,
    difference_text,
    latency_unit,
    memory,
    middle_text,
    number,
    plus_minus,
    spread_of,
    time_unit,
    under,
)
from mcinfer.bench.report import Report
from mcinfer.bench.texts import printable

_NAME_WIDTH = 16
_OF_LOADS = ("way", "n", "rows/s", "speed-up", "p50", "p90", "p99", "max", "overhead", "cores")

Cell = str | tuple[Spread, Unit]
"""Text as it is, or a figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table before its width is known.

    Attributes:
        flawed: Rows of ways that did not answer all requests, or not as fast as they came.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    flawed: frozenset[int] = frozenset()


def grids(report: Report) -> tuple[Grid, ...]:
    """One of each load, and one of what is known of a way whatever the load."""
    found = []
    for load in report.loads:
        compared = under(report, load)
        unit = latency_unit(compared)
        asked = "" if load.rate is None else f"{number(load.rate * load.batch)} rows/s asked for; "
        base = next((figures.other for figures in compared if figures.other), "")
        over = f"speed-up over {printable(base)}; " if base else ""
        rows: list[tuple[Cell, ...]] = [
            (
                texts.marked(figures),
                f"{spread_of(turn.made for turn in figures.turns).middle:.0f}",
                (figures.rows, ONE),
                (figures.speedup, ONE),
                *((figures.latency(part), unit) for part in (0.5, 0.9, 0.99, 1.0)),
                (figures.overhead, unit),
                (figures.cores, ONE),
            )
            for figures in compared
        ]
        found.append(
            Grid(
                title=f"{load} ({asked}{over}latency and overhead in {unit.sign})",
                header=_OF_LOADS,
                rows=tuple(rows),
                flawed=frozenset(i for i, figures in enumerate(compared) if not figures.sound),
            )
        )
    ways = [w for w in report.ways if w.start_seconds or w.memory]
    times = time_unit(min(way.start_seconds, default=0.0) for way in ways)
    compares = any(way.difference is not None for way in ways)
    rows = []
    for way in ways:
        counts = [each.processes for each in way.memory] or [0]
        ends = dict.fromkeys((min(counts), max(counts)))
        sizes: list[Cell] = [(spread, MEGABYTES) for spread in memory(way)]
        start: Cell = (spread_of(way.start_seconds), times)
        processes = TO.join(map(str, ends)) if way.memory else TO
        difference = [difference_text(way.difference)] * compares
        rows.append((printable(way.name), start, *sizes, processes, str(way.workers), *difference))
    header = ("way", f"start {times.sign}", "PSS MB", "USS MB", "processes", "workers")
    if rows:
        whole = (*header, *["difference"] * compares)
        found.append(Grid(title="start and memory", header=whole, rows=tuple(rows)))
    return tuple(found)


# Printing.


def show(report: Report, console: Console) -> None:
    print_lines(
        (texts.model_line(report), texts.machine_line(report), texts.settings_line(report), ""),
        console,
    )
    print_lines((printable(f"{way.name}: {way.text}") for way in report.ways), console)
    for grid in grids(report):
        console.print()
        show_grid(grid, console)
    remarks = [f"{FLAWED} {text}" for text in report.remarks]
    for sentences, style in ((remarks, "yellow"), ([report.verdict], "bold")):
        if sentences:
            print_lines(("", *sentences), console, style)
    if program := texts.report_program(report):
        print_lines(("", "mcinfer's best mode here, as a program:"), console)
        print_program(program, console)


def print_program(program: str, console: Console) -> None:
    console.print()
    console.print(Text(program), soft_wrap=True)


def print_lines(lines: Iterable[str], console: Console, style: str = "") -> None:
    """Print lines of text; they are wrapped on a terminal alone."""
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=not console.is_terminal)


def show_grid(grid: Grid, console: Console) -> None:
    """Print one table in its full width, however narrow the terminal is: no figure is cut off."""
    table = _table(grid)
    table.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.print(table, soft_wrap=True)


def _table(grid: Grid) -> Table:
    table = Table(
        title=Text(grid.title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for index, name in enumerate(grid.header):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for index, cells in enumerate(grid.rows):
        first, *rest = (cell if isinstance(cell, str) else _written(*cell) for cell in cells)
        folded = (first[i : i + _NAME_WIDTH] for i in range(0, len(first), _NAME_WIDTH))
        style = "red" if index in grid.flawed else ""
        table.add_row(Text("\n".join(folded)), *map(Text, rest), style=style)
    return table


def _written(spread: Spread, unit: Unit) -> str:
    """The median, and below it how far the repeats are from it."""
    return f"{middle_text(spread, unit)}\n{plus_minus(spread, unit)}".rstrip()
