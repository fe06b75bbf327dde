"""A report as tables in a terminal, or in a file: nothing is cut off, and nothing needs colours."""

from collections.abc import Callable, Iterable

from mcinfer.bench.report import Report
from mcinfer.bench.views.tables import Cell, Grid, grids
from mcinfer.bench.views.texts import (
    FLAWED,
    machine_line,
    middle_text,
    model_line,
    notes,
    plus_minus,
    remarks,
    settings_line,
    spread_text,
    summary,
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

_NAME_WIDTH = 16


def show(report: Report, console: Console) -> None:
    """Print a report: the machine, a table for each load, one of start and memory, one of the scaling."""
    print_lines((model_line(report), machine_line(report), settings_line(report)), console)
    print_lines(("", *way_lines(report)), console)
    for grid in grids(report):
        console.print()
        show_grid(grid, console)
    warnings = [f"{FLAWED} {remark}" for remark in remarks(report)]
    for sentences, style in ((notes(report), ""), (warnings, "yellow"), (summary(report), "bold")):
        if sentences:
            print_lines(("", *sentences), console, style)


def print_lines(lines: Iterable[str], console: Console, style: str = "") -> None:
    """Print lines of text, wrapped only where somebody looks at them."""
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=not console.is_terminal)


def show_grid(grid: Grid, console: Console) -> None:
    """Print one table: the spread beside each figure where there is room, below it where there is not."""
    table = _table(grid, _inline)
    if _width(table, console) > console.width:
        table = _table(grid, _stacked)
    print_whole(table, console)


def print_whole(table: Table, console: Console) -> None:
    """Print a table in its full width, however narrow the terminal is: a cell cut off is a figure lost."""
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
