"""``mcinfer bench compare``: two reports of benchmarks side by side."""

from pathlib import Path
from typing import Annotated

import typer


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="JSON file of bench")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="JSON file to compare with it")],
) -> None:
    """Show what became faster or slower from report A to report B, with the spread."""
    from rich.console import Console

    from mcinfer.bench.compare import show
    from mcinfer.bench.report import load

    show(load(a), load(b), Console(highlight=False))
