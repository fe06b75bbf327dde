"""A report as tables in a terminal, or in a file: nothing is cut off, and nothing needs colours."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcinfer.bench import texts
from mcinfer.bench.figures import (
    FLAWED,
    OF_LOADS,
    OF_WAYS,
    TO,
    Figures,
    Spread,
    Unit,
    difference_text,
    latency_unit,
    middle_text,
    number,
    plus_minus,
    time_unit,
    under,
)
from mcinfer.bench.report import Report, Way
from mcinfer.bench.texts import printable

_NAME_WIDTH = 16
_COMPARED = ("rows/s", "speed-up", "p50", "p90", "p99", "max", "overhead", "cores")

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


def _cells(names: Iterable[str], way: Way, figures: Figures | None, times: Unit) -> Iterator[Cell]:
    for name in names:
        term = OF_WAYS.get(name) or OF_LOADS[name]
        yield term.of(way if name in OF_WAYS else figures), term.unit or times


def _grid(
    title: str, first: str, names: Sequence[str], ways: Sequence[tuple[str, Figures]], times: Unit
) -> Grid:
    """A table of ways under a load, each with its first cell; the unit of latencies is in the title."""
    units = ((OF_WAYS.get(name) or OF_LOADS[name]).unit or Unit() for name in names)
    titles = (f"{name} {unit.sign}".rstrip() for name, unit in zip(names, units, strict=True))
    return Grid(
        title=title,
        header=(first, "n", *titles),
        rows=tuple(
            (start, f"{OF_LOADS['n'].of(f).middle:.0f}", *_cells(names, f.way, f, times))
            for start, f in ways
        ),
        flawed=frozenset(i for i, (_, figures) in enumerate(ways) if not figures.sound),
    )


def grids(report: Report) -> tuple[Grid, ...]:
    """One of each load, and one of what is known of a way whatever the load."""
    found = []
    for load in report.loads:
        compared = under(report, load)
        unit = latency_unit(compared)
        asked = "" if load.rate is None else f"{number(load.rate * load.batch)} rows/s asked for; "
        base = next((figures.other for figures in compared if figures.other), "")
        over = f"speed-up over {printable(base)}; " if base else ""
        title = f"{load} ({asked}{over}latency and overhead in {unit.sign})"
        named = [(texts.marked(figures), figures) for figures in compared]
        found.append(_grid(title, "way", _COMPARED, named, unit))
    ways = [w for w in report.ways if w.start_seconds or w.memory]
    times = time_unit(min(way.start_seconds, default=0.0) for way in ways)
    rows: list[tuple[Cell, ...]] = []
    for way in ways:
        counts = [memory.processes for memory in way.memory] or [0]
        ends = dict.fromkeys((min(counts), max(counts)))
        processes = TO.join(map(str, ends)) if way.memory else TO
        cells = _cells(OF_WAYS, way, None, times)
        rows.append((printable(way.name), *cells, processes, str(way.workers)))
    titles = (f"{name} {(term.unit or times).sign}" for name, term in OF_WAYS.items())
    header: tuple[str, ...] = ("way", *titles, "processes", "workers")
    if any(way.difference is not None for way in ways):
        header += ("difference",)
        rows = [(*row, difference_text(w.difference)) for row, w in zip(rows, ways, strict=True)]
    if rows:
        found.append(Grid(title="start and memory", header=header, rows=tuple(rows)))
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
