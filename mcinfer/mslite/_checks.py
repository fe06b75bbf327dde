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
    """The value, if it is of the class, else a TypeError. A bool is no int here; upstream takes it."""
    if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be {cls.__name__}, but got {type(value)}.")
    return value


def check_elements(name: str, values: Iterable[object], cls: type) -> None:
    """Raise a TypeError, with its index, for an element that is not of the class."""
    for i, element in enumerate(values):
        if not isinstance(element, cls) or (cls is int and isinstance(element, bool)):
            raise TypeError(
                f"{name} element must be {cls.__name__}, but got {type(element)} at index {i}."
            )


def check_list(name: str, value: object, cls: type[T]) -> list[T]:
    """The value, if it is a list of such elements, else a TypeError."""
    values = check_type(name, value, list)
    check_elements(name, values, cls)
    return values


def check_shape(name: str, value: object) -> tuple[int, ...]:
    """The value as a shape, if it is a list or tuple of int, of any sign; else a TypeError."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be list or tuple, but got {type(value)}.")
    check_elements(name, value, int)
    return tuple(value)


def check_sections(name: str, value: object) -> Sections:
    """A copy of a configuration; a TypeError names the level of what is no dict or str."""
    sections: Sections = {}
    for section, entries in check_type(name, value, dict).items():
        check_type(f"{name}_key", section, str)
        sections[section] = {**check_type(f"{name}_value", entries, dict)}
        for key, text in entries.items():
            check_type(f"{name}_value_key", key, str)
            check_type(f"{name}_value_value", text, str)
    return sections


def check_not_negative(name: str, value: object, *, failed: str = "") -> int:
    """The value, if it is an int (else a TypeError) of 0 or more (else an InvalidInputError)."""
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
