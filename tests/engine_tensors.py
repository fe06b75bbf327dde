"""Tensors for tests of engines: arrays as an engine gets them, and what it produced as arrays."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import Buffer, Produced, Strings
from mcinfer.specs import numpy_dtype, tensor_bytes

Array = NDArray[Any]


def buffer(name: str, array: Array) -> Buffer:
    """The array's own memory."""
    assert array.flags.c_contiguous
    return packed(name, array.dtype.name, array, array.shape)


def packed(name: str, element_type: str, raw: Array, shape: tuple[int, ...]) -> Buffer:
    """The array's bytes as a tensor of any type and shape."""
    return Buffer(
        name=name, element_type=element_type, shape=shape, address=raw.ctypes.data, size=raw.nbytes
    )


def content(item: Produced | Strings) -> Array:
    """A copy of an output."""
    if isinstance(item, Strings):
        return np.array(item.values, dtype=object).reshape(item.shape)
    elements = int(np.prod(item.shape, dtype=np.int64))
    assert item.size == tensor_bytes(item.element_type, elements)
    raw = ctypes.string_at(item.address, item.size)
    return np.frombuffer(raw, numpy_dtype(item.element_type)).reshape(item.shape)


def rows(count: int, start: int = 0) -> NDArray[np.float32]:
    return np.arange(start, start + 3 * count, dtype=np.float32).reshape(count, 3)
