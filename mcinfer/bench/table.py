"""A report as tables in a terminal, or in a file: nothing is cut off, and nothing needs colours."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mcinfer.bench.figures import (
    LoadFigures,
    PoolFigures,
    Spread,
    WayFigures,
    compared_loads,
    pools,
    under,
)
from mcinfer.bench.report import Load, Report
from mcinfer.bench.texts import (
    FLAWED,
    MEGABYTE,
    TO,
    UNKNOWN_TEXT,
    Unit,
    busy_text,
    gain_lines,
    latency_unit,
    machine_line,
    marked,
    middle_text,
    model_line,
    notes,
    number,
    plus_minus,
    printable,
    remarks,
    report_program,
    settings_line,
    spread_text,
    time_unit,
    verdict,
    way_lines,
)
from mcinfer.errors import MissingDependencyError

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as exc:
    raise MissingDependencyError(
        "tables need the package rich: pip install 'mcinfer[bench]'"
    ) from exc

_PLAIN = Unit()
_MEGABYTES = Unit(MEGABYTE, "MB")
_NAME_WIDTH = 16

Cell = str | tuple[Spread, Unit]
"""Text as it is, or a figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table before its width is known; the first column holds names, `flawed` rows are marked."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    flawed: frozenset[int] = frozenset()


def grids(report: Report) -> tuple[Grid, ...]:
    """All tables of a report."""
    by_load = (_load_grid(load, under(report, load)) for load in compared_loads(report))
    ways = [WayFigures(way) for way in report.ways if way.role != "scaling"]
    ways = [figures for figures in ways if figures.start.known or figures.pss.known]
    scaling = pools(report)
    return (
        *by_load,
        *([_way_grid(ways)] if ways else []),
        *([_pool_grid(scaling)] if scaling else []),
    )


def _load_grid(load: Load, all_figures: Sequence[LoadFigures]) -> Grid:
    """All ways under one load."""
    unit = latency_unit(all_figures)
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            marked(figures),
            _whole(figures.per_turn, middle=True),
            (figures.rows, _PLAIN),
            (figures.speedup, _PLAIN),
            *((figures.latency(fraction), unit) for fraction in (0.5, 0.9, 0.99, 1.0)),
            (figures.overhead, unit),
            (figures.cores, _PLAIN),
        )
        for figures in all_figures
    )
    asked = "" if load.rate is None else f"{number(load.rate * load.batch)} rows/s asked for; "
    return Grid(
        title=f"{load} ({asked}latency and overhead in {unit.sign})",
        header=("way", "n", "rows/s", "speed-up", "p50", "p90", "p99", "max", "overhead", "cores"),
        rows=rows,
        flawed=_flawed(all_figures),
    )


def _flawed(all_figures: Iterable[LoadFigures]) -> frozenset[int]:
    return frozenset(i for i, figures in enumerate(all_figures) if not figures.sound)


def _way_grid(ways: Sequence[WayFigures]) -> Grid:
    """Start and memory of each way."""
    unit = time_unit(figures.start.low for figures in ways)
    return Grid(
        title="start and memory",
        header=("way", f"start {unit.sign}", "PSS MB", "USS MB", "processes", "workers"),
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


def _pool_grid(scaling: Sequence[PoolFigures]) -> Grid:
    """Pools of fewer and more workers."""
    all_figures = [pool.figures for pool in scaling]
    unit = latency_unit(all_figures)
    loads = ", ".join(dict.fromkeys(str(figures.load) for figures in all_figures))
    return Grid(
        title=f"scaling: {loads} (latency in {unit.sign})",
        header=("workers", "n", "rows/s", "efficiency %", "p50", "p99", "PSS MB", "USS MB"),
        rows=tuple(
            (
                f"{pool.workers}{'' if pool.figures.sound else ' ' + FLAWED}",
                _whole(pool.figures.per_turn, middle=True),
                (pool.figures.rows, _PLAIN),
                (pool.efficiency, Unit(0.01, "%")),
                (pool.figures.latency(0.5), unit),
                (pool.figures.latency(0.99), unit),
                (pool.of_way.pss, _MEGABYTES),
                (pool.of_way.uss, _MEGABYTES),
            )
            for pool in scaling
        ),
        flawed=_flawed(all_figures),
    )


def _whole(spread: Spread, *, middle: bool = False) -> str:
    """A count: its range, or the median alone."""
    if not spread.known:
        return UNKNOWN_TEXT
    low, high = f"{spread.low:.0f}", f"{spread.high:.0f}"
    if middle:
        return f"{spread.middle:.0f}"
    return low if low == high else f"{low}{TO}{high}"


# Printing.


def show(report: Report, console: Console) -> None:
    """Print a report: the machine, a table for each load, start and memory, the scaling; then the verdict."""
    print_lines((model_line(report), machine_line(report), settings_line(report)), console)
    print_lines(("", *way_lines(report)), console)
    for grid in grids(report):
        console.print()
        show_grid(grid, console)
    warnings = [f"{FLAWED} {text}" for text in (busy_text(report), *remarks(report)) if text]
    for sentences, style in (
        (notes(report), ""),
        (warnings, "yellow"),
        (gain_lines(report), ""),
        ([verdict(report)], "bold"),
    ):
        if sentences:
            print_lines(("", *sentences), console, style)
    if program := report_program(report):
        print_lines(("", "mcinfer's best mode here, as a program:"), console)
        print_program(program, console)


def print_program(program: str, console: Console) -> None:
    """Print a program to copy: it is not wrapped."""
    console.print()
    console.print(Text(program), soft_wrap=True)


def print_lines(lines: Iterable[str], console: Console, style: str = "") -> None:
    """Print lines of text; they are wrapped on a terminal alone."""
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=not console.is_terminal)


def show_grid(grid: Grid, console: Console) -> None:
    """Print one table: the spread beside each figure where there is room, below it where there is not."""
    table = _table(grid, _inline)
    if _width(table, console) > console.width:
        table = _table(grid, _stacked)
    print_whole(table, console)


def print_whole(table: Table, console: Console) -> None:
    """Print a table in its full width, however narrow the terminal is: no figure is cut off."""
    table.width = _width(table, console)
    console.print(table, soft_wrap=True)


def _width(table: Table, console: Console) -> int:
    roomy = console.options.update(width=10_000)
    return console.measure(table, options=roomy).maximum


def _table(grid: Grid, write: Callable[[Cell], str]) -> Table:
    table = new_table(grid.title)
    for index, name in enumerate(grid.header):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for index, row in enumerate(grid.rows):
        style = "red" if index in grid.flawed else ""
        table.add_row(folded(write(row[0])), *(Text(write(cell)) for cell in row[1:]), style=style)
    return table


def new_table(title: str) -> Table:
    """An empty table with its title."""
    return Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def folded(name: str) -> Text:
    """A long name in several lines."""
    return Text("\n".join(name[i : i + _NAME_WIDTH] for i in range(0, len(name), _NAME_WIDTH)))


def _inline(cell: Cell) -> str:
    return cell if isinstance(cell, str) else spread_text(*cell)


def _stacked(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    return f"{middle_text(*cell)}\n{plus_minus(*cell)}".rstrip()
