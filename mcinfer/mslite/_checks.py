"""Checks of arguments, with the error texts of MindSpore Lite's Python API.

A bool is refused where an int is wanted; there it passes as one.
"""

from typing import Any

from mcinfer.errors import InvalidInputError


def is_a(value: object, cls: type) -> bool:
    """Whether the value is of the class; a bool is not an int."""
    return isinstance(value, cls) and not (cls is int and isinstance(value, bool))


def check_type(name: str, value: object, cls: type) -> None:
    """Check one value.

    Raises:
        TypeError: ``{name} must be {cls}, but got {type}.``
    """
    if not is_a(value, cls):
        raise TypeError(f"{name} must be {cls.__name__}, but got {type(value)}.")


def check_elements(name: str, value: "list[Any] | tuple[Any, ...]", cls: type) -> None:
    """Check each element of a sequence.

    Raises:
        TypeError: ``{name} element must be {cls}, but got {type} at index {i}.``
    """
    for i, element in enumerate(value):
        if not is_a(element, cls):
            raise TypeError(
                f"{name} element must be {cls.__name__}, but got {type(element)} at index {i}."
            )


def check_list(name: str, value: object, cls: type) -> None:
    """Check a list and its elements.

    Raises:
        TypeError: Not a list, or one of its elements is of another type.
    """
    check_type(name, value, list)
    if isinstance(value, list):
        check_elements(name, value, cls)


def check_shape(name: str, value: object) -> None:
    """Check a shape: a list or tuple of int, of any sign.

    Raises:
        TypeError: ``{name} must be list or tuple, but got {type}.``, or an element is no int.
    """
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be list or tuple, but got {type(value)}.")
    check_elements(name, value, int)


def check_sections(name: str, value: object) -> None:
    """Check a configuration: sections of entries, ``dict[str, dict[str, str]]``.

    Raises:
        TypeError: It names the argument as ``{name}``, ``{name}_key``, ``{name}_value``,
            ``{name}_value_key`` or ``{name}_value_value``, by the level at fault.
    """
    check_type(name, value, dict)
    if not isinstance(value, dict):
        return
    for section, entries in value.items():
        check_type(f"{name}_key", section, str)
        check_type(f"{name}_value", entries, dict)
        for key, text in entries.items():
            check_type(f"{name}_value_key", key, str)
            check_type(f"{name}_value_value", text, str)


def check_not_negative(name: str, value: object, *, failed: str = "") -> None:
    """Check a number that is 0 or more.

    Args:
        name: What the texts call it.
        value: What was given.
        failed: What the text of the InvalidInputError begins with.

    Raises:
        TypeError: Not an int.
        InvalidInputError: ``{name} must be a non-negative int.``
    """
    check_type(name, value, int)
    if isinstance(value, int) and value < 0:
        raise InvalidInputError(f"{failed}{name} must be a non-negative int.")
