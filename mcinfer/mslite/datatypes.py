"""Element types, formats, and what a model says about a tensor, as MindSpore Lite has them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np


class _NamedNumber(IntEnum):
    """An enumeration that prints by name (``DataType.FLOAT32``); an IntEnum prints its number."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class DataType(_NamedNumber):
    """Element types, with upstream's numbers."""

    UNKNOWN = 0
    BOOL = 30
    INT8 = 32
    INT16 = 33
    INT32 = 34
    INT64 = 35
    UINT8 = 37
    UINT16 = 38
    UINT32 = 39
    UINT64 = 40
    FLOAT16 = 42
    FLOAT32 = 43
    FLOAT64 = 44
    INVALID = 2147483647


class Format(_NamedNumber):
    """What a tensor's dimensions stand for, with upstream's numbers. It is kept, and changes nothing."""

    DEFAULT = -1
    NCHW = 0
    NHWC = 1
    NHWC4 = 2
    HWKC = 3
    HWCK = 4
    KCHW = 5
    CKHW = 6
    KHWC = 7
    CHWK = 8
    HW = 9
    HW4 = 10
    NC = 11
    NC4 = 12
    NC4HW4 = 13
    NCDHW = 15
    NWC = 16
    NCW = 17
    NDHWC = 18
    NC8HW8 = 19


_DTYPES: dict[DataType, "np.dtype[Any]"] = {
    member: np.dtype(member.name.lower())
    for member in DataType
    if member not in (DataType.UNKNOWN, DataType.INVALID)
}
_BY_NAME = {dtype.name: member for member, dtype in _DTYPES.items()}


@lru_cache(maxsize=64)
def known_data_type(dtype: "np.dtype[Any]") -> DataType:
    """The number of a NumPy dtype, UNKNOWN if it has none."""
    return _BY_NAME.get(dtype.name, DataType.UNKNOWN)


def data_type_of(dtype: "np.dtype[Any]") -> DataType:
    """The number of a NumPy dtype; byte order does not matter.

    Raises:
        TypeError: It has none, such as strings, bfloat16 and types of less than a byte.
    """
    known = known_data_type(dtype)
    if known is DataType.UNKNOWN:
        raise TypeError(f"Unsupported numpy dtype value {dtype}")
    return known


def numpy_dtype_of(dtype: DataType) -> "np.dtype[Any]":
    """The NumPy dtype of a number, of native byte order.

    Raises:
        TypeError: UNKNOWN or INVALID.
    """
    if dtype not in _DTYPES:
        raise TypeError(f"Unsupported dtype value {dtype}")
    return _DTYPES[dtype]


def element_num_of(shape: Sequence[int]) -> int:
    """The number of elements: 1 for the shape ``[]``, 0 if a dimension is 0 or less."""
    return 0 if any(size <= 0 for size in shape) else prod(shape)


def itemsize_of(dtype: DataType) -> int:
    """The bytes of one element; 0 for UNKNOWN and INVALID."""
    return _DTYPES[dtype].itemsize if dtype in _DTYPES else 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TensorMeta:
    """What a model says about one of its tensors, without data.

    Attributes:
        name: As in the model.
        dtype: Element type.
        shape: Sizes of the dimensions, -1 for one that is not known.
        format: What the dimensions stand for.
    """

    name: str = ""
    dtype: DataType = DataType.UNKNOWN
    shape: list[int] = field(default_factory=list)
    format: Format = Format.DEFAULT

    @property
    def element_num(self) -> int:
        """The number of elements; 0 if a dimension is not known."""
        return element_num_of(self.shape)

    @property
    def data_size(self) -> int:
        """Bytes of all elements; 0 if that is not known."""
        return self.element_num * itemsize_of(self.dtype)

    def __str__(self) -> str:
        return (
            f"name: {self.name},\n"
            f"dtype: {self.dtype},\n"
            f"shape: {self.shape},\n"
            f"format: {self.format},\n"
            f"element_num: {self.element_num},\n"
            f"data_size: {self.data_size}."
        )

    def __repr__(self) -> str:
        return str(self)
