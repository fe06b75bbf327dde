"""Arguments and options that several commands take, and their parsers.

A parser raises `typer.BadParameter`, so a wrong value is wrong usage, and the message has the option's name.
typer would read some of the values' types in its own way (a tuple: several words). Such an option has the
annotation ``Any``, and its type stands in the parser's signature.
"""

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from mcinfer.checks import check_seconds
from mcinfer.config import parse_devices
from mcinfer.errors import BuildError, InvalidInputError

_T = TypeVar("_T")

_MINDIR = {".mindir": ("mindspore", "mindspore_lite"), ".ms": ("mindspore_lite",)}
"""By ending, the engines that load such files; the first that is installed is used."""


def engine_for(model: Path) -> str:
    """The engine that loads a file of this name's ending."""
    engines = _MINDIR.get(model.suffix, ("onnxruntime",))
    return next((name for name in engines if find_spec(name) is not None), engines[0])


def check_model(model: Path) -> None:
    """Raise `InvalidInputError` if the file cannot be read, before a process is started to load it."""
    from mcinfer.model_cache.onnx_files import (
        open_regular,
    )  # it imports NumPy, and --help needs none

    try:
        with open_regular(model):
            pass
    except (BuildError, OSError) as exc:
        raise InvalidInputError(f"MODEL: {exc}") from exc


def parse_devices_option(text: str) -> int | list[str]:
    """``"2"``: so many devices; ``"cpu:0,cpu:1"``: these."""
    chosen = int(text) if text.isdecimal() else text.split(",")
    try:
        parse_devices(chosen, 1)
    except InvalidInputError as exc:
        raise typer.BadParameter(str(exc)) from exc
    return chosen


def parse_seconds(text: str) -> float:
    """``"2.5"``: seconds, 0 or more."""
    try:
        seconds = float(text)
        check_seconds("seconds", seconds)
    except ValueError as exc:
        raise typer.BadParameter(f"got {text!r}, expected seconds, 0 or more") from exc
    return seconds


def parse_timeout(text: str) -> float:
    """``"2.5"``: seconds, more than 0."""
    seconds = parse_seconds(text)
    if not seconds:
        raise typer.BadParameter(f"got {text!r}, expected seconds, more than 0")
    return seconds


def parse_counts(text: str) -> tuple[int, ...]:
    """``"1,2,8"``: different whole numbers of at least 1, in the given order."""
    return _parse_list(text, _count, "whole numbers of at least 1, such as 1,2,8")


def parse_rates(text: str) -> tuple[float, ...]:
    """``"20,50"``: different numbers above 0, in the given order."""
    return _parse_list(text, _rate, "numbers above 0, such as 20,50")


def parse_dims(text: str) -> tuple[str, int]:
    """``"seq=128"``: the name of a dimension and its size, which is at least 1."""
    name, _, size = text.rpartition("=")
    try:
        if name:
            return name, _count(size)
    except ValueError:
        pass
    raise typer.BadParameter(f"got {text!r}, expected a name and a size, such as seq=128")


def _parse_list(text: str, parse: Callable[[str], _T], expected: str) -> tuple[_T, ...]:
    try:
        values = tuple(parse(word) for word in text.split(","))
    except ValueError as exc:
        raise typer.BadParameter(f"got {text!r}, expected {expected}") from exc
    if len(set(values)) < len(values):
        raise typer.BadParameter(f"got {text!r}, expected each number once")
    return values


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < math.inf:
        raise ValueError(text)
    return rate


ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Path of an ONNX model.", show_default=False)
]

DevicesOption = Annotated[
    Any,
    typer.Option(
        "--devices",
        metavar="DEVICES",
        parser=parse_devices_option,
        help="How many (2), or which (cpu:0,cpu:1), or inline; all of the CPU if not given.",
        show_default=False,
    ),
]


def parse_axis(text: str) -> tuple[str, int | None]:
    """``"x=0"``: a tensor and its axis; ``"x=none"``: the tensor is not split or joined."""
    name, _, axis = text.rpartition("=")
    if name and axis.isdecimal():
        return name, int(axis)
    if name and axis.lower() == "none":
        return name, None
    raise typer.BadParameter(f"got {text!r}, expected a name and an axis, such as x=0 or x=none")


BatchAxisOption = Annotated[
    list[Any] | None,
    typer.Option(
        "--batch-axis",
        metavar="INPUT=AXIS",
        parser=parse_axis,
        help="Axis to split an input along (x=0); x=none: it goes whole. May be repeated.",
        show_default=False,
    ),
]

OutputAxisOption = Annotated[
    list[Any] | None,
    typer.Option(
        "--output-axis",
        metavar="OUTPUT=AXIS",
        parser=parse_axis,
        help="Axis to join an output along (y=0); y=none: all workers give the same. May be repeated.",
        show_default=False,
    ),
]


def axes_of(option: str, given: Sequence[tuple[str, int | None]] | None) -> dict[str, int | None]:
    """The axes that were given, by name; each name may come once."""
    names = [name for name, _ in given or ()]
    if len({*names}) < len(names):
        raise typer.BadParameter(f"{option}: got {names}, expected each name once")
    return dict(given or ())
