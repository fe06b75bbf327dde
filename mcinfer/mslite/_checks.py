"""Checks of arguments, and failures, with the error texts of MindSpore Lite's Python API.

There every failure is a RuntimeError. What is none in mcinfer's own tree (a bad input is a ValueError, a
time-out a TimeoutError) is both here, so that ``except RuntimeError`` and
``except mcinfer.PredictTimeoutError`` each do.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mcinfer.errors import (
    InvalidInputError,
    McinferError,
    MissingDependencyError,
    PredictTimeoutError,
    WeightAccessError,
)

T = TypeVar("T")

Sections = dict[str, dict[str, str]]
"""A configuration: sections of entries."""


def check_type(name: str, value: object, cls: type[T]) -> T:
    """The value, if it is of the class. A bool is refused where an int is wanted; upstream takes it.

    Raises:
        TypeError: ``{name} must be {cls}, but got {type}.``
    """
    if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be {cls.__name__}, but got {type(value)}.")
    return value


def check_elements(name: str, values: Iterable[object], cls: type) -> None:
    """Check each element of a sequence.

    Raises:
        TypeError: ``{name} element must be {cls}, but got {type} at index {i}.``
    """
    for i, element in enumerate(values):
        if not isinstance(element, cls) or (cls is int and isinstance(element, bool)):
            raise TypeError(
                f"{name} element must be {cls.__name__}, but got {type(element)} at index {i}."
            )


def check_list(name: str, value: object, cls: type[T]) -> list[T]:
    """The value, if it is a list of such elements; else a TypeError as of the two above."""
    values = check_type(name, value, list)
    check_elements(name, values, cls)
    return values


def check_shape(name: str, value: object) -> tuple[int, ...]:
    """A shape: a list or tuple of int, of any sign.

    Raises:
        TypeError: ``{name} must be list or tuple, but got {type}.``, or an element is no int.
    """
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be list or tuple, but got {type(value)}.")
    check_elements(name, value, int)
    return tuple(value)


def check_sections(name: str, value: object) -> Sections:
    """A copy of a configuration, ``dict[str, dict[str, str]]``.

    Raises:
        TypeError: It names the argument as ``{name}``, ``{name}_key``, ``{name}_value``,
            ``{name}_value_key`` or ``{name}_value_value``, by the level at fault.
    """
    sections: Sections = {}
    for section, entries in check_type(name, value, dict).items():
        check_type(f"{name}_key", section, str)
        sections[section] = {**check_type(f"{name}_value", entries, dict)}
        for key, text in entries.items():
            check_type(f"{name}_value_key", key, str)
            check_type(f"{name}_value_value", text, str)
    return sections


def check_not_negative(name: str, value: object, *, failed: str = "") -> int:
    """A number of 0 or more; `failed` begins the text of the ValueError.

    Raises:
        TypeError: Not an int.
        InvalidInputError: ``{name} must be a non-negative int.``
    """
    number = check_type(name, value, int)
    if number < 0:
        raise InvalidInputError(f"{failed}{name} must be a non-negative int.")
    return number


def check_path(what: str, name: str, path: str) -> None:
    """Raise a RuntimeError if there is nothing at the path."""
    if not os.path.exists(path):
        raise RuntimeError(f"{what} failed, {name} does not exist!")


class InvalidRunError(InvalidInputError, RuntimeError):
    """Inputs do not fit the model."""


class RunTimeoutError(PredictTimeoutError, RuntimeError):
    """The request's deadline passed."""


class MissingRuntimeError(MissingDependencyError, RuntimeError):
    """An engine's package is not installed."""


class WeightRefusedError(WeightAccessError, RuntimeError):
    """Shared weights were refused."""


class UnclassifiedError(McinferError, RuntimeError):
    """A failure that has no class of its own in mcinfer."""


_BOTH: dict[type[McinferError], type[McinferError]] = {
    InvalidInputError: InvalidRunError,
    PredictTimeoutError: RunTimeoutError,
    MissingDependencyError: MissingRuntimeError,
    WeightAccessError: WeightRefusedError,
}


def failure(what: str, exc: BaseException) -> Exception:
    """The RuntimeError for another error, of the same class of `mcinfer.errors` where that has one.

    Its text is ``{what} failed! Error is {exc}``; `what` is ``predict``, ``build_from_file``, …
    """
    text = f"{what} failed! Error is {exc}"
    if not isinstance(exc, McinferError):
        return RuntimeError(text)
    kind = _BOTH.get(type(exc), type(exc))
    return kind(text) if issubclass(kind, RuntimeError) else UnclassifiedError(text)


@contextmanager
def failures(what: str) -> Iterator[None]:
    """Raise a `failure` for each error of mcinfer, of the system, or of a value."""
    try:
        yield
    except (McinferError, OSError, ValueError) as exc:
        raise failure(what, exc) from exc
