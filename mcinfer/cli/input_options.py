"""What requests are made of: options of ``mcinfer bench`` and ``mcinfer tune``."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mcinfer.cli.options import Dim, parse_dims


def parse_integers(text: str) -> tuple[int, int]:
    """``"0:10"``: from 0 to 9."""
    low, _, high = text.partition(":")
    try:
        return int(low), int(high)
    except ValueError as exc:
        raise typer.BadParameter(
            f"got {text!r}, expected the least and the first that is too large, such as 0:10"
        ) from exc


InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help="Arrays by name (x.npz), or one input's (x=x.npy, x=x.raw); random if not given. Any number.",
        show_default=False,
    ),
]

DimOption = Annotated[
    list[Any] | None,
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        parser=parse_dims,
        help="Size of a symbolic dimension: seq=128. Any number.",
        show_default=False,
    ),
]

IntegersOption = Annotated[
    Any,
    typer.Option(metavar="LOW:HIGH", parser=parse_integers, help="Random integers, HIGH excluded."),
]

SeedOption = Annotated[int, typer.Option(min=0, help="Of random inputs and arrivals.")]


def input_options(
    files: Sequence[str] | None, dims: Sequence[Dim] | None, integers: tuple[int, int], seed: int
) -> Any:
    """`mcinfer.bench.inputs.InputOptions` of what was given.

    Raises:
        BadParameter: It does not fit together.
    """
    from mcinfer.bench.inputs import parse_input_options
    from mcinfer.errors import InvalidInputError

    try:
        return parse_input_options(files or (), dict(dims or ()), integers, seed)
    except InvalidInputError as exc:
        raise typer.BadParameter(str(exc)) from exc
