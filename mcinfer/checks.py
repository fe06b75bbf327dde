"""Checks of what comes from outside: the fields of messages, and the options that users give.

A field of a message has a predicate, which never raises; types are exact (a bool is no count). A field of an
option class (`Options`) has a `FieldCheck`, which also says what is expected, and in which form the value is
kept.
"""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from mcinfer.errors import InvalidInputError, is_refusal

__tracebackhide__ = is_refusal

_MOST = 2**63
MAX_DIMENSIONS = 64

Check = Callable[[Any], bool]


# Fields of messages.


def _is_number(kind: Any, least: float, below: float) -> Check:
    return lambda value: type(value) is kind and least <= value < below


is_count = _is_number(int, 0, _MOST)
is_shard = _is_number(int, 0, 2**32)  # it has four bytes in the heads of messages
is_block = _is_number(int, 1 - _MOST, _MOST)  # those that a worker made are negative
is_ranks = _is_number(int, 1, 1025)
is_seconds = _is_number(float, 0.0, math.inf)
is_flag = _is_number(bool, False, 2)


def is_text(value: Any) -> bool:
    return type(value) is str


def is_text_to(most: int) -> Check:
    return lambda value: type(value) is str and len(value) <= most


def is_tuple_of(fits: Check, most: int = _MOST) -> Check:
    return lambda value: type(value) is tuple and len(value) <= most and all(map(fits, value))


def is_map_to(fits: Check) -> Check:
    """A map, from texts."""
    return lambda value: (
        type(value) is dict and all(map(is_text, value)) and all(map(fits, value.values()))
    )


def is_shape(value: Any) -> bool:
    if type(value) is not tuple or len(value) > MAX_DIMENSIONS:
        return False
    for size in value:  # noqa: SIM110 every request comes here, and a generator costs twice as much
        if type(size) is not int or not 0 <= size < _MOST:
            return False
    return True


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


# Options.


def _shown(value: object) -> str:
    try:
        return repr(value)
    except RecursionError:  # as an intruder's value may be nested
        return reprlib.repr(value)


@dataclass(frozen=True, slots=True)
class FieldCheck:
    """What a value must be.

    Attributes:
        fits: Whether a value is such; it never raises.
        expected: What it says in an error.
        keep: Makes the form in which a value that fits is kept.
    """

    fits: Check
    expected: str
    keep: Callable[[Any], Any] = lambda value: value  # as it is

    def kept(self, name: str, value: Any) -> Any:
        """The value as it is kept; `InvalidInputError`, of `name`, if it does not fit."""
        if not self.fits(value):
            raise InvalidInputError(f"{name}: got {_shown(value)}, expected {self.expected}")
        return self.keep(value)


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _are_core_lists(value: Any) -> bool:
    return (
        _is_list(value)
        and len(value) > 0
        and all(_is_list(cores) and len(cores) > 0 for cores in value)
        and all(type(core) is int and core >= 0 for cores in value for core in cores)
        and all(len({*cores}) == len(cores) for cores in value)
    )


def count(least: int, most: int | None = None) -> FieldCheck:
    if most is None:
        return FieldCheck(lambda value: _is_int(value, least), f"an int of at least {least}")
    return FieldCheck(
        lambda value: _is_int(value, least) and value <= most, f"an int from {least} to {most}"
    )


def choice(*choices: str) -> FieldCheck:
    return FieldCheck(
        lambda value: isinstance(value, str) and value in choices, f"one of {[*choices]}"
    )


def different(what: str) -> FieldCheck:
    return FieldCheck(
        lambda value: (
            _is_list(value)
            and all(isinstance(text, str) for text in value)
            and len({*value}) == len(value)
        ),
        f"a list of different {what}",
        tuple,
    )


def _map_to(fits: Check, expected: str) -> FieldCheck:
    return FieldCheck(
        lambda value: (
            isinstance(value, Mapping)
            and all(isinstance(key, str) and fits(item) for key, item in value.items())
        ),
        expected,
        lambda value: MappingProxyType({**value}),
    )


def optional(check: FieldCheck, expected: str = "") -> FieldCheck:
    """The check of an option that may also be left out."""
    return FieldCheck(
        lambda value: value is None or check.fits(value),
        expected or check.expected,
        lambda value: None if value is None else check.keep(value),
    )


SECONDS = FieldCheck(
    lambda value: _is_int(value, 0) or (isinstance(value, float) and value >= 0),  # no NaN
    "seconds, 0 or more",
)
FLAG = FieldCheck(lambda value: isinstance(value, bool), "True or False")
TEXT_MAP = _map_to(lambda item: isinstance(item, str), "a mapping, text to text")
SIZE_MAP = _map_to(is_count, "a mapping of names to sizes, 0 or more")
CORE_LISTS = FieldCheck(
    _are_core_lists,
    "for each worker a list of different core numbers",
    lambda value: tuple(map(tuple, value)),
)


def check_count(name: str, value: object, least: int) -> None:
    """Raise `InvalidInputError` unless the value is an int of at least `least`."""
    count(least).kept(name, value)


def check_seconds(name: str, value: object) -> None:
    """Raise `InvalidInputError` unless the value is a number of seconds, 0 or more."""
    SECONDS.kept(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of the option classes: each field is annotated with its `FieldCheck`, which a new one passes."""

    CHECKS: ClassVar[dict[str, FieldCheck]]

    def __init_subclass__(cls) -> None:
        hints = cls.__annotations__.items()
        own = {name: hint.__metadata__[0] for name, hint in hints if hasattr(hint, "__metadata__")}
        cls.CHECKS = {**getattr(cls, "CHECKS", {}), **own}

    def __post_init__(self) -> None:
        for name, check in self.CHECKS.items():
            object.__setattr__(self, name, check.kept(name, getattr(self, name)))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is made from the fields, as Python cannot copy or pickle read-only mappings."""
        return partial(type(self), **_plain(self, (item.name for item in fields(self)))), ()


_Options = TypeVar("_Options", bound=Options)


def as_map(options: Options) -> dict[str, Any]:
    """The fields of options as messages and JSON carry them."""
    return _plain(options, options.CHECKS)


def _plain(options: Options, names: Iterable[str]) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in names}
    return {name: dict(v) if isinstance(v, Mapping) else v for name, v in given.items()}


def from_map(kind: type[_Options], given: object) -> _Options:
    """Options from what `as_map` made; `InvalidInputError` if it is not such, by the checks of a user's."""
    if type(given) is not dict or given.keys() != kind.CHECKS.keys():
        got = [*given] if type(given) is dict else given
        raise InvalidInputError(
            f"{kind.__name__}: got {reprlib.repr(got)}, expected a map of {[*kind.CHECKS]}"
        )
    return kind(**given)
