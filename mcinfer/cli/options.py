"""Arguments and options that several commands take, and the parsers of all.

A parser reads a text and checks the value (`FieldCheck`). It raises `typer.BadParameter`, so a wrong value is
wrong usage, and the message has the option's name. typer would read some of the values' types in its own way
(a tuple: several words), so parsed options have the annotation ``Any``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from mcinfer.checks import SECONDS, FieldCheck
from mcinfer.config import parse_devices
from mcinfer.errors import BuildError, InvalidInputError

_T = TypeVar("_T")

MAX_CLIENTS = 4096
"""Most requests under way at once: each is made by a thread of its own."""

_MAX_SECONDS = 86400.0


def check_model(model: Path) -> None:
    """Raise `InvalidInputError` if the file cannot be read, before a process is started to load it."""
    from mcinfer.model_cache.onnx_files import open_regular  # it imports NumPy

    try:
        with open_regular(model):
            pass
    except (BuildError, OSError) as exc:
        raise InvalidInputError(f"MODEL: {exc}") from exc


# Parsers.


def _parser(read: Callable[[str], _T], *checks: FieldCheck) -> Callable[[str], _T]:
    """A parser of what `read` makes of a text; where it raises, the first check has failed."""

    def parse(text: str) -> _T:
        try:
            value = read(text)
        except (ValueError, ArithmeticError) as exc:
            raise typer.BadParameter(f"got {text!r}, expected {checks[0].expected}") from exc
        for check in checks:
            if not check.fits(value):
                raise typer.BadParameter(f"got {text!r}, expected {check.expected}")
        return value

    return parse


def _list_of(read: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    return lambda text: tuple(map(read, text.split(",")))


def _named(read: Callable[[str], _T]) -> Callable[[str], tuple[str, _T]]:
    """A name and a value, ``NAME=VALUE``; the name may have such a sign, too."""
    return lambda text: (text.rpartition("=")[0], read(text.rpartition("=")[2]))


def _axis(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _is_layout(text: str) -> bool:
    stored, _, wanted = text.partition(":")
    return stored.isalpha() and len({*stored}) == len(stored) and sorted(stored) == sorted(wanted)


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high)


_LONGER = FieldCheck(bool, "seconds, more than 0")
_DAY = FieldCheck(lambda seconds: seconds <= _MAX_SECONDS, f"{_MAX_SECONDS:.0f} seconds at most")
_COUNTS = FieldCheck(lambda n: min(n) >= 1, "whole numbers of at least 1, such as 1,2,8")
_CLIENTS = FieldCheck(lambda n: max(n) <= MAX_CLIENTS, f"{MAX_CLIENTS} clients at most")
_RATES = FieldCheck(
    lambda rates: all(0 < rate < math.inf for rate in rates), "numbers above 0, such as 20,50"
)
_EACH_ONCE = FieldCheck(lambda values: len({*values}) == len(values), "each number once")
_ONE = FieldCheck(lambda values: len(values) == 1, "one number")
_SIZE = FieldCheck(lambda d: d[0] and d[1] >= 1, "a name and a size, such as seq=128")
_AXIS = FieldCheck(lambda axis: axis[0], "a name and an axis, such as x=0 or x=none")
_LAYOUT = FieldCheck(
    lambda said: _is_layout(said[1]), "the axes in the file and in the model, such as nhwc:nchw"
)
_CAST = FieldCheck(lambda said: said[1], "a type, such as float32 or x=float32")
_SCALE = FieldCheck(
    lambda said: said[1], "a number or a fraction other than 0, such as 0.5, 1/255 or x=1/255"
)
_BOUNDS = FieldCheck(lambda _: True, "LOW:HIGH, such as 0:10")

parse_timeout = _parser(float, SECONDS, _LONGER)
parse_pause = _parser(float, SECONDS, _DAY)
parse_duration = _parser(float, SECONDS, _LONGER, _DAY)
parse_counts = _parser(_list_of(int), _COUNTS, _EACH_ONCE)
parse_clients = _parser(_list_of(int), _COUNTS, _EACH_ONCE, _CLIENTS)
parse_rates = _parser(_list_of(float), _RATES, _EACH_ONCE)
parse_rate = _parser(_list_of(float), _RATES, _ONE)
parse_dims = _parser(_named(int), _SIZE)
parse_axis = _parser(_named(_axis), _AXIS)
parse_layout = _parser(_named(str.lower), _LAYOUT)
parse_cast = _parser(_named(str), _CAST)
parse_scale = _parser(_named(lambda text: float(Fraction(text))), _SCALE)
parse_integers = _parser(_bounds, _BOUNDS)


@contextmanager
def refused_as_usage() -> Iterator[None]:
    """Turn an `InvalidInputError` into wrong usage."""
    try:
        yield
    except InvalidInputError as exc:
        raise typer.BadParameter(str(exc)) from exc


def parse_devices_option(text: str) -> int | list[str]:
    """``"2"``: so many devices; ``"cpu:0,cpu:1"``: these."""
    chosen = int(text) if text.isdecimal() else text.split(",")
    with refused_as_usage():
        parse_devices(chosen, 1)
    return chosen


def parse_switch(text: str) -> bool:
    """``"true"`` or ``"false"``, for options that are on by default."""
    if text not in ("true", "false"):
        raise typer.BadParameter(f"got {text!r}, expected true or false")
    return text == "true"


def by_name(option: str, given: Sequence[tuple[str, _T]] | None) -> dict[str, _T]:
    """The values of an option that was repeated, by name; each name may come once."""
    names = [name or "no name" for name, _ in given or ()]
    if len({*names}) < len(names):
        raise typer.BadParameter(f"{option}: got {names}, expected each name once")
    return dict(given or ())


# Options.


def parsed(metavar: str, parser: Callable[[str], Any], text: str, *names: str, **more: Any) -> Any:
    """An option whose text a function parses; `text` is its help."""
    return typer.Option(*names, metavar=metavar, parser=parser, help=text, **more)


ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Path of an ONNX model.", show_default=False)
]

DevicesOption = Annotated[
    Any,
    parsed(
        "DEVICES",
        parse_devices_option,
        "How many (2), or which (cpu:0,cpu:1), or inline; all of the CPU if not given.",
        "--devices",
    ),
]

BatchAxisOption = Annotated[
    list[Any] | None,
    parsed(
        "INPUT=AXIS",
        parse_axis,
        "Axis to split an input along (x=0); x=none: it goes whole. May be repeated.",
        "--batch-axis",
    ),
]

OutputAxisOption = Annotated[
    list[Any] | None,
    parsed(
        "OUTPUT=AXIS",
        parse_axis,
        "Axis to join an output along (y=0); y=none: all workers give the same. May be repeated.",
        "--output-axis",
    ),
]

InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help="Arrays by name (x.npz), or one input's (x=x.npy); default: random. May be repeated.",
    ),
]

DimOption = Annotated[
    list[Any] | None,
    parsed(
        "NAME=SIZE",
        parse_dims,
        "Size of a symbolic dimension: seq=128. May be repeated.",
        "--dim",
    ),
]

IntegersOption = Annotated[
    Any, parsed("LOW:HIGH", parse_integers, "Range of random integers, without HIGH.")
]

SeedOption = Annotated[
    int, typer.Option("--seed", metavar="SEED", min=0, help="Seed of random inputs and arrivals.")
]


def axes_of(
    batch_axis: Sequence[tuple[str, int | None]] | None,
    output_axis: Sequence[tuple[str, int | None]] | None,
) -> dict[str, Any]:
    """`BatchAxisOption` and `OutputAxisOption` as `mcinfer.Master` takes them."""
    return {
        "batch_axes": by_name("--batch-axis", batch_axis),
        "output_axes": by_name("--output-axis", output_axis),
    }


def input_options(
    files: Sequence[str] | None,
    dims: Sequence[tuple[str, int]] | None,
    integers: tuple[int, int],
    seed: int,
) -> Any:
    """The options as `mcinfer.bench.inputs.InputOptions`, or `typer.BadParameter`."""
    from mcinfer.bench.inputs import parse_input_options

    with refused_as_usage():
        return parse_input_options(files or (), by_name("--dim", dims), integers, seed)
