"""Checks of arguments, and failures, with the error texts of MindSpore Lite's Python API.

There every failure is a RuntimeError. An error of mcinfer's that is another one (a time-out is a
TimeoutError) is both here: ``except RuntimeError`` and ``except mcinfer.PredictTimeoutError`` catch it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any, Generic, TypeVar

from mcinfer.errors import McinferError, is_refusal

__tracebackhide__ = is_refusal

T = TypeVar("T")

Sections = dict[str, dict[str, str]]
"""A configuration: sections of entries."""


def check_type(name: str, value: object, cls: type[T], suffix: str = "") -> T:
    """The value, if it is of the class, else a TypeError. A bool is no int here; upstream takes it."""
    if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be {cls.__name__}, but got {type(value)}{suffix}.")
    return value


def check_elements(name: str, values: Iterable[object], cls: type) -> None:
    for i, element in enumerate(values):
        check_type(f"{name} element", element, cls, f" at index {i}")


def check_list(name: str, value: object, cls: type[T]) -> list[T]:
    values = check_type(name, value, list)
    check_elements(name, values, cls)
    return values


def check_shape(name: str, value: object) -> tuple[int, ...]:
    """The value as a shape, if it is a list or tuple of int, of any sign; else a TypeError."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be list or tuple, but got {type(value)}.")
    check_elements(name, value, int)
    return tuple(value)


class Option(Generic[T]):
    """An attribute with a default, checked when it is set. A list goes in and out as a copy.

    Args:
        name: The attribute's name in error texts.
        default: The value until it is set.
        check: Called with name and value; may return another value to keep.
    """

    def __init__(self, name: str, default: T, check: Callable[[str, T], T | None]) -> None:
        self._name = name
        self._default = default
        self._check = check

    def __set_name__(self, owner: type, attribute: str) -> None:
        self._place = f"_{attribute}"

    def __get__(self, part: object | None, owner: type) -> T:
        value: T = getattr(part, self._place, self._default)
        return copy(value) if isinstance(value, list) else value

    def __set__(self, part: object, value: T) -> None:
        kept = self._check(self._name, value)
        value = value if kept is None else kept
        setattr(part, self._place, copy(value) if isinstance(value, list) else value)


def typed(name: str, default: T, cls: type[T]) -> Option[T]:
    """An attribute whose values are of this class."""
    return Option(name, default, lambda name, value: check_type(name, value, cls))


def check_sections(name: str, value: object) -> Sections:
    """A copy of a configuration; a TypeError names the level that is not a dict or str."""
    sections: Sections = {}
    for section, entries in check_type(name, value, dict).items():
        check_type(f"{name}_key", section, str)
        sections[section] = {**check_type(f"{name}_value", entries, dict)}
        for key, text in entries.items():
            check_type(f"{name}_value_key", key, str)
            check_type(f"{name}_value_value", text, str)
    return sections


def check_path(what: str, name: str, path: str) -> None:
    if not os.path.exists(path):
        raise RuntimeError(f"{what} failed, {name} does not exist!")


@cache
def _both(kind: type[Any]) -> type[Any]:
    """The class of errors of this kind that are RuntimeErrors as well."""
    if issubclass(kind, RuntimeError):
        return kind

    def reduced(error: Exception) -> tuple[Any, ...]:
        return raisable, (kind, str(error)), vars(error)

    return type(kind.__name__, (kind, RuntimeError), {"__reduce__": reduced})  # it can be pickled


def raisable(kind: type[McinferError], text: str) -> McinferError:
    """An error of this kind that is a RuntimeError as well."""
    error: McinferError = _both(kind)(text)  # type: ignore[arg-type] # mypy sees the errors' own hash
    return error


def failure(what: str, exc: BaseException) -> Exception:
    """The RuntimeError for another error, also of its class in `mcinfer.errors` if it has one.

    Its text is ``{what} failed! Error is {exc}``; `what` is ``predict``, ``build_from_file``, …
    """
    text = f"{what} failed! Error is {exc}"
    return raisable(type(exc), text) if isinstance(exc, McinferError) else RuntimeError(text)


@contextmanager
def failures(what: str) -> Iterator[None]:
    """Turn each error of mcinfer, of the system, or of a value into a `failure`."""
    try:
        yield
    except (McinferError, OSError, ValueError) as exc:
        raise failure(what, exc) from exc
