"""Options of ``mcinfer bench`` and ``mcinfer tune``: the inputs of requests, times and numbers."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from mcinfer.cli.options import parse_counts, parse_dims, parse_seconds, parse_timeout

MAX_CLIENTS = 4096
"""Most requests under way at once: each is made by a thread of its own."""

_MAX_SECONDS = 86400.0


def parse_pause(text: str) -> float:
    """``"0.3"``: seconds, 0 or more, up to a day."""
    seconds = parse_seconds(text)
    if seconds > _MAX_SECONDS:
        raise typer.BadParameter(f"got {text!r}, expected {_MAX_SECONDS:.0f} seconds at most")
    return seconds


def parse_duration(text: str) -> float:
    """``"60"``: seconds, more than 0, up to a day."""
    parse_timeout(text)
    return parse_pause(text)


def parse_clients(text: str) -> tuple[int, ...]:
    """``"1,4,16"``: different numbers of clients, in the given order."""
    counts = parse_counts(text)
    if max(counts) > MAX_CLIENTS:
        raise typer.BadParameter(f"got {text!r}, expected {MAX_CLIENTS} clients at most")
    return counts


def parse_integers(text: str) -> tuple[int, int]:
    """``"0:10"``: from 0 to 9."""
    low, _, high = text.partition(":")
    try:
        return int(low), int(high)
    except ValueError as exc:
        raise typer.BadParameter(f"got {text!r}, expected LOW:HIGH, such as 0:10") from exc


def parsed(metavar: str, parser: Callable[[str], Any], text: str, **more: Any) -> Any:
    """An option whose text a function parses; `text` is its help."""
    return typer.Option(metavar=metavar, parser=parser, help=text, **more)


InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help="Arrays by name (x.npz), or one input's (x=x.npy); default: random. May be repeated.",
        show_default=False,
    ),
]

DimOption = Annotated[
    list[Any] | None,
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        parser=parse_dims,
        help="Size of a symbolic dimension: seq=128. May be repeated.",
        show_default=False,
    ),
]

IntegersOption = Annotated[
    Any,
    typer.Option(
        metavar="LOW:HIGH", parser=parse_integers, help="Range of random integers, without HIGH."
    ),
]

SeedOption = Annotated[int, typer.Option(min=0, help="Seed of random inputs and arrivals.")]


def input_options(
    files: Sequence[str] | None,
    dims: Sequence[tuple[str, int]] | None,
    integers: tuple[int, int],
    seed: int,
) -> Any:
    """The options as `mcinfer.bench.inputs.InputOptions`, or `typer.BadParameter`."""
    from mcinfer.bench.inputs import parse_input_options
    from mcinfer.errors import InvalidInputError

    sizes = dict(dims or ())
    if len(sizes) < len(dims or ()):
        raise typer.BadParameter("--dim: got a dimension twice, expected each once")
    try:
        return parse_input_options(files or (), sizes, integers, seed)
    except InvalidInputError as exc:
        raise typer.BadParameter(str(exc)) from exc
