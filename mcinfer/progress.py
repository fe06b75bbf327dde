"""How far long work is, for whoever watches a terminal or reads a log.

Work of known size has a bar with the time left where the stream is a terminal that can draw it and the
package rich is installed; elsewhere it says nothing. Preparing a model says a line now and then
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
"""What TERM says of terminals that cannot go back in a line."""


def megabytes(count: int) -> str:
    """A number of bytes in megabytes (millions), as text."""
    return f"{count / 1e6:.1f} MB"


def let_workers_tell() -> None:
    """Preparing a large model takes a while: have workers say so to whoever watches."""
    if sys.stderr.isatty():
        logging.getLogger("mcinfer.worker").setLevel(logging.INFO)


class Display:
    """Shows what `mcinfer.model_cache.building.Progress` is told; this one as lines, few of them.

    Attributes:
        called: Whether it was told anything.
    """

    def __init__(self, stream: TextIO, model: str) -> None:
        """Take where to write, and what the model is called."""
        self.called = False
        self._stream = stream
        self._model = model
        self._due = _LINE_SECONDS

    def __call__(self, tick: Mapping[str, Any]) -> None:
        """Show how far it is."""
        self.called = True
        self._show(tick)

    def _show(self, tick: Mapping[str, Any]) -> None:
        seconds = tick["seconds"]
        if seconds < self._due:
            return
        self._due = seconds + _LINE_SECONDS
        print(
            f"preparing {self._model} ({megabytes(tick['bytes'])}): {seconds:.0f} s, "
            f"{megabytes(tick['written'])} written",
            file=self._stream,
            flush=True,
        )


class _Bar(Display):
    """A bar on a terminal."""

    def __init__(self, stream: TextIO, model: str, bar: Any, task: Any) -> None:
        super().__init__(stream, model)
        self._bar = bar
        self._task = task

    def _show(self, tick: Mapping[str, Any]) -> None:
        written_bytes, most = tick["written"], _MAX_COPIES * tick["bytes"]
        self._bar.update(
            self._task,
            total=most,
            completed=min(written_bytes, _FULLEST * most),
            written=f"{megabytes(written_bytes)} written",
        )


class Work:
    """Is told how far work of known size is; this one tells nobody."""

    def show(self, done: float, note: str = "") -> None:
        """Show it.

        Args:
            done: Of the whole, in its unit.
            note: What is being done now, in few words.
        """


class _WorkBar(Work):
    """A bar on a terminal."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task

    def show(self, done: float, note: str = "") -> None:
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
        yield _WorkBar(bar, bar.add_task(what, total=total, note=""))


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
        yield _Bar(stream, model, bar, bar.add_task(model, total=None, written="starting"))


def _has_bars(stream: TextIO) -> bool:
    drawn_on = stream.isatty() and os.environ.get("TERM", "") not in _NOT_DRAWN_ON
    return drawn_on and find_spec("rich") is not None


def _bars(stream: TextIO, *columns: Any) -> Any:
    """Bars of rich's; its console knows of NO_COLOR."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(file=stream), transient=True)
