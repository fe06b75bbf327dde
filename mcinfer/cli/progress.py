"""How far the preparation of a model is, for whoever watches a terminal or reads a log.

How many bytes it comes to is known at its end alone: each weight is written as it is, or packed for the
CPU, or both ways. So twice the model's bytes are what a bar is measured by, and it is never full.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TextIO

_LINE_SECONDS = 2.0
_MOST_COPIES = 2
_FULLEST = 0.99


def megabytes(count: int) -> str:
    """A number of bytes in megabytes (millions), as text."""
    return f"{count / 1e6:.1f} MB"


class Display:
    """Shows what `mcinfer.prepared.ensuring.Progress` is told; this one as lines, few of them.

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
        written_bytes, most = tick["written"], _MOST_COPIES * tick["bytes"]
        self._bar.update(
            self._task,
            total=most,
            completed=min(written_bytes, _FULLEST * most),
            written=f"{megabytes(written_bytes)} written",
        )


@contextmanager
def showing(stream: TextIO, model: str) -> Iterator[Display]:
    """A display: a bar where the stream is a terminal and the package rich is installed, else lines."""
    if not stream.isatty() or find_spec("rich") is None:
        yield Display(stream, model)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("preparing {task.description}", markup=False),
        BarColumn(),  # moves to and fro until the size is known
        TextColumn("{task.fields[written]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        yield _Bar(stream, model, bar, bar.add_task(model, total=None, written="starting"))
