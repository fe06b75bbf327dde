"""Progress of long work, and other lines on standard error.

A bar is drawn where the stream is a terminal that can go back in a line; elsewhere there are lines, seldom.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from mcinfer.logs import writes_json

_NOT_DRAWN_ON = ("dumb", "unknown")
"""Values of TERM for terminals that cannot go back in a line."""

_LINE_SECONDS = 10.0
"""Between two lines, and before the first."""


def megabytes(count: int) -> str:
    """A number of bytes in megabytes (millions), as text."""
    return f"{count / 1e6:.1f} MB"


def counted(number: int, thing: str) -> str:
    """``"1 worker"``, ``"2 workers"``, ``"2 entries"``."""
    several = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{number} {thing if number == 1 else several}"


def say(text: str) -> None:
    """Write a line to standard error, at once: one of JSON where the log has such lines."""
    if writes_json() and logging.lastResort is not None:
        said = {"name": "mcinfer", "levelno": logging.INFO, "levelname": "INFO", "msg": text}
        logging.lastResort.emit(logging.makeLogRecord(said))
        return
    print(f"mcinfer: {text}", file=sys.stderr, flush=True)


def let_workers_tell() -> None:
    """On a terminal, have workers say that they prepare a large model: it takes a while."""
    if sys.stderr.isatty():
        logging.getLogger("mcinfer.worker").setLevel(logging.INFO)


class Work:
    """Shows work on a bar of rich's, if there is one, or else in lines."""

    def __init__(self, what: str, total: float | None, bar: Any = None, task: Any = None) -> None:
        self._what = what
        self._total = total
        self._bar = bar
        self._task = task
        self._due = monotonic() + _LINE_SECONDS

    def show(self, done: float, note: str = "") -> None:
        """Show how much is done, in the unit of the whole, and in few words what is being done now."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif monotonic() >= self._due:
            self._due = monotonic() + _LINE_SECONDS
            part = f" {100 * done / self._total:.0f} %" if self._total else ""
            say(f"{self._what}{part}{note and f': {note}'}")


@contextmanager
def showing_work(what: str, total: float | None = None, unit: str = "") -> Iterator[Work]:
    """A bar with the time left, which is gone at the end; lines now and then where it cannot be drawn.

    Args:
        what: The work, in a word or two.
        total: How much it is, above 0; None if that is not known: the bar shows the time that has passed.
        unit: Unit of the total, such as "rows", to show how much is done; empty shows the percentage.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM", "") in _NOT_DRAWN_ON:
        yield Work(what, total)
        return
    from rich import progress
    from rich.console import Console

    def text(template: str) -> progress.TextColumn:
        return progress.TextColumn(template, markup=False)

    columns: list[Any] = [text("{task.description}"), progress.BarColumn()]
    if total is None:
        columns.append(progress.TimeElapsedColumn())
    else:
        amount = text("{task.completed:.0f} of {task.total:.0f} " + unit)
        columns.append(amount if unit else progress.TaskProgressColumn())
        columns += [progress.TimeRemainingColumn(), text("left")]
    columns.append(text("{task.fields[note]}"))
    console = Console(stderr=True)  # knows of NO_COLOR
    with progress.Progress(*columns, console=console, transient=True) as bar:
        yield Work(what, total, bar, bar.add_task(what, total=total, note=""))
