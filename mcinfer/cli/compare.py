"""``mcinfer bench compare``: two reports of benchmarks side by side."""

from pathlib import Path
from typing import Annotated

import typer


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="a report that bench wrote")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="another, to compare with it")],
) -> None:
    """Show what became faster or slower from one report to another, with their spread."""
    from rich.console import Console

    from mcinfer.bench.report import load
    from mcinfer.bench.views import compare as comparing

    comparing.show(comparing.compare(load(a), load(b)), Console(highlight=False))
