"""Progress of long work, on a terminal or in a log.

Work of known size has a bar with the time left where the stream is a terminal that can draw it and the
package rich is installed; elsewhere nothing is shown. Preparing a model says a line now and then
elsewhere. How many bytes that comes to is known at its end alone: each weight is written as it is, or
packed for the CPU, or both ways. So twice the model's bytes are what its bar is measured by, and it is
never full.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TextIO

_LINE_SECONDS = 2.0
_MAX_COPIES = 2
_FULLEST = 0.99
_NOT_DRAWN_ON = ("dumb", "unknown")
"""Values of TERM for terminals that cannot go back in a line."""


def megabytes(count: int) -> str:
    """A number of bytes in megabytes (millions), as text."""
    return f"{count / 1e6:.1f} MB"


def let_workers_tell() -> None:
    """Preparing a large model takes a while: have workers say so on a terminal."""
    if sys.stderr.isatty():
        logging.getLogger("mcinfer.worker").setLevel(logging.INFO)


class Display:
    """Shows the preparation of a model, on a bar or as lines, few of them.

    Attributes:
        called: Whether there was any progress to show.
    """

    def __init__(self, stream: TextIO, model: str, bar: Any = None) -> None:
        """Take where to write, the model's name, and a bar of rich's if there is one."""
        self.called = False
        self._stream = stream
        self._model = model
        self._bar = bar
        self._due = _LINE_SECONDS
        if bar is not None:
            self._task = bar.add_task(model, total=None, written="starting")

    def __call__(self, tick: Mapping[str, Any]) -> None:
        """Show what `mcinfer.model_cache.building.Progress` is called with."""
        self.called = True
        seconds, written = tick["seconds"], megabytes(tick["written"])
        if self._bar is not None:
            most = _MAX_COPIES * tick["bytes"]
            done = min(tick["written"], _FULLEST * most)
            self._bar.update(self._task, total=most, completed=done, written=f"{written} written")
        elif seconds >= self._due:
            self._due = seconds + _LINE_SECONDS
            size = megabytes(tick["bytes"])
            text = f"preparing {self._model} ({size}): {seconds:.0f} s, {written} written"
            print(text, file=self._stream, flush=True)


class Work:
    """Shows work of known size on a bar of rich's, if there is one."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar = bar
        self._task = task

    def show(self, done: float, note: str = "") -> None:
        """Show how much is done, in the unit of the whole, and in few words what is being done now."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)


@contextmanager
def showing_work(stream: TextIO, what: str, total: float, unit: str = "") -> Iterator[Work]:
    """A bar with the time left, which is gone at the end; nothing where it cannot be shown.

    Args:
        stream: Where to: standard error, so that output can go elsewhere.
        what: The work, in a word or two.
        total: How much it is, above 0.
        unit: Of the total, such as "rows", to show how much is done; not shown if there is none.
    """
    if not _has_bars(stream):
        yield Work()
        return
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    amount = TextColumn("{task.completed:.0f} of {task.total:.0f} " + unit, markup=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        amount if unit else TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("left", markup=False),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with _bars(stream, *columns) as bar:
        yield Work(bar, bar.add_task(what, total=total, note=""))


@contextmanager
def showing(stream: TextIO, model: str) -> Iterator[Display]:
    """A display: a bar where the stream is a terminal and the package rich is installed, else lines."""
    if not _has_bars(stream):
        yield Display(stream, model)
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("preparing {task.description}", markup=False),
        BarColumn(),  # moves to and fro until the size is known
        TextColumn("{task.fields[written]}", markup=False),
        TimeElapsedColumn(),
    )
    with _bars(stream, *columns) as bar:
        yield Display(stream, model, bar)


def _has_bars(stream: TextIO) -> bool:
    drawn_on = stream.isatty() and os.environ.get("TERM", "") not in _NOT_DRAWN_ON
    return drawn_on and find_spec("rich") is not None


def _bars(stream: TextIO, *columns: Any) -> Any:
    """Bars of rich's; its console knows of NO_COLOR."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(file=stream), transient=True)
