"""Predicates for the fields of messages. They never raise; types are exact (a bool is no count)."""

from collections.abc import Callable
from math import prod
from typing import Any

from mcinfer.specs import ELEMENT_TYPES, STRING, Dimension

TensorFields = tuple[str, str, tuple[Dimension, ...]]
"""A tensor specification on the wire: name, element type, shape with symbols."""

_MOST = 2**63
_MAX_SHARDS = 2**32
_MAX_DIMENSIONS = 64
MAX_SPECS = 1 << 16
_MAX_RANKS = 1024

Check = Callable[[Any], bool]


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def is_shard(value: Any) -> bool:
    """A shard's number, which has four bytes in the heads of messages."""
    return type(value) is int and 0 <= value < _MAX_SHARDS


def is_block(value: Any) -> bool:
    """A block's number; those that a worker made are negative."""
    return type(value) is int and -_MOST < value < _MOST


def is_slab(value: Any) -> bool:
    """The number of a block that a worker made, and its bytes."""
    return (
        type(value) is tuple
        and len(value) == 2
        and is_block(value[0])
        and value[0] < 0
        and is_count(value[1])
        and value[1] > 0
    )


def is_seconds(value: Any) -> bool:
    """A finite number, 0 or more."""
    return type(value) is float and 0.0 <= value < float("inf")


def is_text(value: Any) -> bool:
    return type(value) is str


def is_text_to(most: int) -> Check:
    return lambda value: type(value) is str and len(value) <= most


def is_texts_to(most: int, characters: int) -> Check:
    fits = is_text_to(characters)
    return lambda value: type(value) is tuple and len(value) <= most and all(map(fits, value))


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_ranks(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_RANKS


def is_shape(value: Any) -> bool:
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS:
        return False
    for size in value:  # noqa: SIM110 every request comes here, and a generator costs twice as much
        if type(size) is not int or not 0 <= size < _MOST:
            return False
    return True


def is_values(value: Any, shape: tuple[int, ...]) -> bool:
    """The strings of a tensor of this shape."""
    return (
        type(value) is tuple
        and len(value) == prod(shape)
        and all(type(item) in (str, bytes) for item in value)
    )


def is_reference(value: Any) -> bool:
    if type(value) is not tuple or len(value) != 5:
        return False
    name, element_type, shape, block, where = value
    if type(name) is not str or type(element_type) is not str or not is_shape(shape):
        return False
    if element_type == STRING:
        return block is None and is_values(where, shape)
    return is_block(block) and is_count(where) and element_type in ELEMENT_TYPES


def is_references(value: Any) -> bool:
    return type(value) is tuple and all(map(is_reference, value))


def is_members(value: Any) -> bool:
    """Two or more maps of a run's inputs and outputs."""
    return (
        type(value) is tuple
        and len(value) > 1
        and all(
            type(member) is dict
            and member.keys() == {"inputs", "outputs"}
            and all(is_references(tensors) for tensors in member.values())
            for member in value
        )
    )


def is_axes(value: Any) -> bool:
    return type(value) is tuple and all(item is None or is_count(item) for item in value)


def is_specs(value: Any) -> bool:
    """Tensor specifications with different names."""
    return (
        type(value) is tuple
        and len(value) <= MAX_SPECS
        and all(map(is_spec, value))
        and len({name for name, _, _ in value}) == len(value)
    )


def is_spec(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) == 3
        and type(value[0]) is str
        and type(value[1]) is str
        and value[1] in ELEMENT_TYPES
        and type(value[2]) is tuple
        and len(value[2]) <= _MAX_DIMENSIONS
        and all(
            size is None or type(size) is str or (type(size) is int and 0 <= size < _MOST)
            for size in value[2]
        )
    )


def is_texts(value: Any) -> bool:
    return type(value) is tuple and all(type(item) is str for item in value)


def is_text_map(value: Any) -> bool:
    return type(value) is dict and all(
        type(key) is str and type(item) is str for key, item in value.items()
    )


def is_text_maps(value: Any) -> bool:
    """Maps of texts, by a text."""
    return type(value) is dict and all(
        type(key) is str and is_text_map(item) for key, item in value.items()
    )


def is_count_map(value: Any) -> bool:
    return type(value) is dict and all(
        type(key) is str and is_count(item) for key, item in value.items()
    )


def is_cores(value: Any) -> bool:
    return type(value) is tuple and all(is_count(item) for item in value)


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)
