"""`Tensor`, as in MindSpore Lite, the names that go with it, and lists of tensors in and out of a run.

Ownership of a tensor's data:

- Data from an array or another tensor is borrowed: `Tensor.set_data_from_numpy` only releases it.
- Memory that the tensor gets for itself (from its model's allocator, or NumPy's) when data is first set or
  read is its own: `Tensor.set_data_from_numpy` copies into it.
- Either way it is C-contiguous, aligned and of native byte order, and lives as long as a tensor or
  an array that shows it.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError, is_refusal
from mcinfer.mslite._checks import (
    check_elements,
    check_shape,
    check_type,
    raisable,
    typed,
)
from mcinfer.specs import TensorSpec

__tracebackhide__ = is_refusal

DEVICE_KINDS = ("ascend", "cpu", "cuda", "gpu")
"""The kinds of device that `Tensor` takes; upstream takes the first alone."""


class _NamedNumber(IntEnum):
    """An enumeration that prints by name (``DataType.FLOAT32``); an IntEnum prints its number."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class DataType(_NamedNumber):
    """Element types, with upstream's numbers."""

    UNKNOWN, BOOL = 0, 30
    INT8, INT16, INT32, INT64 = 32, 33, 34, 35
    UINT8, UINT16, UINT32, UINT64 = 37, 38, 39, 40
    FLOAT16, FLOAT32, FLOAT64 = 42, 43, 44
    INVALID = 2147483647


class Format(_NamedNumber):
    """The meaning of a tensor's dimensions, with upstream's numbers. It changes nothing here."""

    DEFAULT = -1
    NCHW, NHWC, NHWC4, HWKC, HWCK, KCHW, CKHW, KHWC = 0, 1, 2, 3, 4, 5, 6, 7
    CHWK, HW, HW4, NC, NC4, NC4HW4 = 8, 9, 10, 11, 12, 13
    NCDHW, NWC, NCW, NDHWC, NC8HW8 = 15, 16, 17, 18, 19


_DTYPES: dict[DataType, "np.dtype[Any]"] = {
    member: np.dtype(member.name.lower())
    for member in DataType
    if member not in (DataType.UNKNOWN, DataType.INVALID)
}
_BY_NAME = {dtype.name: member for member, dtype in _DTYPES.items()}


@lru_cache(maxsize=64)
def known_data_type(dtype: "np.dtype[Any]") -> DataType:
    """The number of a NumPy dtype, of any byte order; UNKNOWN if it has none."""
    return _BY_NAME.get(dtype.name, DataType.UNKNOWN)


def data_type_of(dtype: "np.dtype[Any]") -> DataType:
    """The number of a NumPy dtype, of any byte order; a TypeError if it has none (strings, bfloat16, …)."""
    known = known_data_type(dtype)
    if known is DataType.UNKNOWN:
        raise TypeError(f"Unsupported numpy dtype value {dtype}")
    return known


def numpy_dtype_of(dtype: DataType) -> "np.dtype[Any]":
    """The NumPy dtype of a number, of native byte order; a TypeError for UNKNOWN and INVALID."""
    if dtype not in _DTYPES:
        raise TypeError(f"Unsupported dtype value {dtype}")
    return _DTYPES[dtype]


def _fits(shape: Sequence[int], known: Sequence[int]) -> bool:
    """Whether a shape, in which sizes of 0 or less are open, can become a known one."""
    return len(shape) == len(known) and all(
        size <= 0 or size == wanted for size, wanted in zip(shape, known, strict=True)
    )


class _Described:
    """A tensor as it prints itself."""

    __slots__ = ()

    dtype: Any
    shape: Any

    @property
    def element_num(self) -> int:
        """The number of elements: 1 for the shape ``[]``, 0 if a dimension is 0 or less."""
        return 0 if any(size <= 0 for size in self.shape) else prod(self.shape)

    @property
    def data_size(self) -> int:
        """Bytes of all elements; 0 if a dimension is 0 or less, or the dtype has no size."""
        return self.element_num * (_DTYPES[self.dtype].itemsize if self.dtype in _DTYPES else 0)

    def __str__(self) -> str:
        names = ("name", "dtype", "shape", "format", "element_num", "data_size")
        return ",\n".join(f"{name}: {getattr(self, name)}" for name in names) + "."

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TensorMeta(_Described):
    """What a model says about one of its tensors, without data: -1 is a size that is not known."""

    name: str = ""
    dtype: DataType = DataType.UNKNOWN
    shape: list[int] = field(default_factory=list)
    format: Format = Format.DEFAULT


def _check_device(device: object) -> None:
    """Check a device's name, ``"kind"`` or ``"kind:index"``, and warn that the data does not go there."""
    kind, colon, index = check_type("device", device, str).partition(":")
    if ":" in index:
        raise TypeError(f"device must be 'ascend:index', eg: 'ascend:0', but got {device!r}.")
    if kind not in DEVICE_KINDS:
        raise TypeError(f"now only support {', '.join(DEVICE_KINDS)} device, but got {device!r}.")
    if colon and not (index.isascii() and index.isdigit()):
        raise TypeError(f"device id should >= 0, but got {device!r}.")
    if kind != "cpu":
        text = f"device: a Tensor's data stays in host memory, not on {device!r}"
        warnings.warn(text, UserWarning, stacklevel=3)


Allocate = Callable[[tuple[int, ...]], NDArray[Any]]
"""Gets memory for a shape."""


class Tensor(_Described):
    """An n-dimensional array in host memory, with a name, a format and a shape that can be set.

    An array that is C-contiguous, aligned and of native byte order is borrowed, any other is copied. The data
    of a tensor is shared, but not its name and format. Without a tensor: the shape and dtype if both are
    given, else one float32, as zeros from the first read.

    Several threads may read one tensor at the same time; only one may change it. Arguments and attributes
    that do not fit are a TypeError.

    Args:
        tensor: ndarray or Tensor.
        shape: list[int]; with a tensor it must be the tensor's own. A size of 0 or less is not known
            yet: `set_data_from_numpy` takes it from the array.
        dtype: DataType; with a tensor it must be the tensor's own.
        device: One of `DEVICE_KINDS`, alone or with ``:index``. The data stays in host memory all
            the same; other than for ``"cpu"`` a UserWarning says so.

    Attributes:
        name: ``""`` by default.
        format: The meaning of the dimensions; setting it moves no data.
    """

    __slots__ = (
        *("__weakref__", "_allocate", "_array", "_dtype", "_format", "_name", "_own", "_shape"),
    )

    name = typed("name", "", str)
    format = typed("format", Format.NCHW, Format)

    def _set(
        self,
        name: str,
        dtype: DataType,
        shape: tuple[int, ...],
        array: NDArray[Any] | None = None,
        allocate: Allocate | None = None,
    ) -> Self:
        self._name = name
        self._dtype = dtype
        self._shape = shape
        self._array = array  # None until memory is allocated
        self._own = False  # whether set_data_from_numpy may write to the array
        self._allocate = allocate  # of this dtype
        return self

    def __init__(
        self,
        tensor: "Tensor | NDArray[Any] | None" = None,
        shape: Sequence[int] | None = None,
        dtype: DataType | None = None,
        device: str | None = None,
    ) -> None:
        if shape is not None:
            check_shape("shape", shape)
        if device is not None:
            _check_device(device)
        if dtype is not None:
            check_type("dtype", dtype, DataType)
        self._set("", DataType.FLOAT32, ())
        if tensor is None:
            if shape is not None and dtype is not None:
                self._dtype, self._shape = dtype, tuple(shape)
            elif shape is not None or dtype is not None:
                alone = "dtype" if shape is None else "shape"
                text = "has no effect: without a tensor, shape and dtype count only together"
                warnings.warn(f"{alone} {text}", UserWarning, stacklevel=2)
            return
        if isinstance(tensor, Tensor):
            source, self.name, self.format = "tensor", tensor.name, tensor.format
            self._dtype, self._shape = tensor._dtype, tensor._shape
        elif isinstance(tensor, np.ndarray):
            source = "numpy"
            self._dtype, self._shape = data_type_of(tensor.dtype), tensor.shape
        else:
            raise TypeError(
                "tensor must be MindSpore Lite's Tensor._tensor or numpy ndarray, "
                f"but got {type(tensor)}."
            )
        said = {"shape": None if shape is None else [*shape], "dtype": dtype}
        for what, value in said.items():
            if value is not None and value != (its := getattr(self, what)):
                raise TypeError(
                    f"user set {what} is not equal {source} {what}, user {what}: {value}, "
                    f"{source} {what} is: {its}."
                )
        if isinstance(tensor, Tensor):
            if tensor.has_data or tensor.element_num > 0:
                self._array = tensor.array
        elif tensor.flags.c_contiguous and tensor.flags.aligned and tensor.dtype.isnative:
            self._array = tensor.view(np.ndarray)
        else:
            self._array = np.array(tensor, dtype=numpy_dtype_of(self._dtype), order="C")
            self._own = True

    @classmethod
    def _of_model(cls, spec: TensorSpec, allocate: Allocate | None = None) -> "Tensor":
        """A tensor of a model, without data; the allocator gives C-contiguous memory of its dtype."""
        return cls.__new__(cls)._set(
            spec.name, known_data_type(spec.dtype), tuple(known_dims(spec)), None, allocate
        )

    @classmethod
    def _of_result(cls, name: str, array: NDArray[Any]) -> "Tensor":
        """A tensor that borrows an array, which is C-contiguous and of native byte order."""
        return cls.__new__(cls)._set(name, known_data_type(array.dtype), array.shape, array)

    @property
    def dtype(self) -> DataType:
        """The element type. A new type drops the data, which is never converted."""
        return self._dtype

    @dtype.setter
    def dtype(self, value: DataType) -> None:
        check_type("dtype", value, DataType)
        if value is not self._dtype:
            self._dtype = value
            self._array = self._allocate = None

    @property
    def shape(self) -> list[int]:
        """Sizes of the dimensions; one of 0 or less is not known yet. A fresh list.

        Setting a shape of as many elements keeps the data, another one drops it.
        """
        return list(self._shape)

    @shape.setter
    def shape(self, value: Sequence[int]) -> None:
        shape = check_shape("shape", value)
        if shape == self._shape:
            return
        if self._array is not None:
            keeps = all(size >= 0 for size in shape) and prod(shape) == self._array.size
            self._array = self._array.reshape(shape) if keeps else None
        self._shape = shape

    @property
    def data_size(self) -> int:
        """Bytes of all elements; 0 if a dimension is 0 or less, or the dtype has no size."""
        if self._array is None:
            return super().data_size
        return self.element_num * self._array.itemsize

    @property
    def device(self) -> str:
        """Where the data is: always ``"None:-1"``, upstream's name for host memory."""
        return "None:-1"

    @property
    def has_data(self) -> bool:
        """Whether data was set or read since the tensor was made or its data was dropped."""
        return self._array is not None

    @property
    def array(self) -> NDArray[Any]:
        """The tensor's data itself, in its shape: what an engine reads. Not to be kept or reshaped.

        If there is none yet: zeroed memory, which becomes the data (a TypeError for UNKNOWN and INVALID);
        or, if a dimension is 0 or less, an empty array with 0 in its place, which does not.
        """
        if self._array is not None:
            return self._array
        if any(size <= 0 for size in self._shape):
            return np.empty([max(size, 0) for size in self._shape], numpy_dtype_of(self._dtype))
        memory = self._new_memory(self._shape)
        memory.fill(0)
        self._array, self._own = memory, True
        return memory

    def _new_memory(self, shape: tuple[int, ...]) -> NDArray[Any]:
        if self._allocate is not None:
            return self._allocate(shape)
        return np.empty(shape, numpy_dtype_of(self._dtype))

    def get_data_to_numpy(self) -> NDArray[Any]:
        """A view of the data (see `array`) in the tensor's shape; writing to it writes to the tensor.

        It is read-only if the array that the tensor was made of is. Later calls of
        `set_data_from_numpy` show in it, unless they or a setter made the tensor get new memory.
        """
        return self.array.view()

    def set_data_from_numpy(self, numpy_obj: NDArray[Any]) -> None:
        """Copy an array's elements, in C order, into the tensor's own memory.

        Args:
            numpy_obj: Of any memory layout and byte order. As many bytes as the tensor, in any shape; or, if
                a dimension of the tensor is not known, an array whose shape fits and becomes the tensor's.

        Raises:
            TypeError: Not an ndarray, or its dtype has no number in `DataType`.
            RuntimeError: Another dtype, or another number of bytes. The tensor is as before.
        """
        if not isinstance(numpy_obj, np.ndarray):
            raise TypeError(f"numpy_obj must be numpy.ndarray, but got {type(numpy_obj)}.")
        if data_type_of(numpy_obj.dtype) is not self._dtype:
            raise RuntimeError(
                f"data type not equal! Numpy type: {numpy_obj.dtype.type}, "
                f"Tensor type: {self._dtype}"
            )
        is_known = all(size > 0 for size in self._shape)
        shape = self._shape if is_known else numpy_obj.shape
        sizes = (numpy_obj.nbytes, self.data_size)
        if sizes[0] != sizes[1] if is_known else not _fits(self._shape, shape):
            text = f"data size not equal! Numpy size: {sizes[0]}, Tensor size: {sizes[1]}"
            if not is_known:
                text += f", Numpy shape: {[*shape]}, Tensor shape: {self.shape}"
            raise RuntimeError(text)
        memory = self._array if self._own and shape == self._shape else None
        if memory is None:
            memory = self._new_memory(shape)
        np.copyto(memory.reshape(numpy_obj.shape), numpy_obj)
        self._array, self._shape, self._own = memory, shape, True

    def __array__(
        self, dtype: "np.dtype[Any] | None" = None, copy: bool | None = None
    ) -> NDArray[Any]:
        return np.array(self.get_data_to_numpy(), dtype=dtype, copy=copy)

    def __str__(self) -> str:
        return f"{super().__str__()}\ndevice: {self.device}."


TensorLike = Tensor | NDArray[Any]


def known_dims(spec: TensorSpec) -> list[int]:
    """The shape as MindSpore Lite writes it: -1 for a size that is not known."""
    return [size if isinstance(size, int) else -1 for size in spec.shape]


def check_inputs(inputs: object, count: int) -> list[TensorLike]:
    """Check that a run's inputs are a list or tuple of as many tensors or arrays."""
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"inputs must be list, but got {type(inputs)}.")
    for i, value in enumerate(inputs):
        if not isinstance(value, (Tensor, np.ndarray)):
            raise TypeError(
                f"inputs element must be Tensor or numpy.ndarray, but got {type(value)} at index {i}."
            )
    if len(inputs) != count:
        text = f"model input len:{count} not equal input len:{len(inputs)}!"
        raise raisable(InvalidInputError, text)
    return [*inputs]


def input_arrays(inputs: Sequence[TensorLike]) -> list[NDArray[Any]]:
    """The data of a run's inputs; InvalidInputError for a tensor without data."""
    for value in inputs:
        if isinstance(value, Tensor) and not value.has_data:
            raise InvalidInputError(f"input {value.name!r} has no data, set it first")
    return [value.array if isinstance(value, Tensor) else value for value in inputs]


def check_outputs(outputs: object, count: int) -> None:
    """Check the tensors to write to: one for each output, or an empty list for new ones, or None."""
    if outputs is None:
        return
    tensors = check_type("outputs", outputs, list)
    check_elements("outputs", tensors, Tensor)
    if tensors and len(tensors) != count:
        raise InvalidInputError(f"outputs: got {len(tensors)} tensors, expected {count} or none")
    for tensor in tensors:
        if tensor.dtype not in _DTYPES and not tensor.has_data:
            raise InvalidInputError(
                f"output {tensor.name!r} is a tensor of {tensor.dtype}, which has no memory to write to; "
                "give an empty list, or none"
            )


def answered(outputs: list[Tensor] | None, results: Mapping[str, NDArray[Any]]) -> list[Tensor]:
    """A run's results as tensors: new ones, or copied to the caller's, to all of them or none.

    The caller's are as `check_outputs` takes them, and share no memory with the results; a size that is not
    known becomes the result's.
    """
    if not outputs:
        outputs = [] if outputs is None else outputs
        outputs += [Tensor._of_result(name, array) for name, array in results.items()]
        return outputs
    for tensor, (name, array) in zip(outputs, results.items(), strict=True):
        shape = tensor.shape
        known = all(size > 0 for size in shape)
        fits = tensor.dtype is known_data_type(array.dtype) and _fits(shape, array.shape)
        writeable = not known or tensor.array.flags.writeable
        if not fits or not writeable:
            raise InvalidInputError(
                f"output {name!r} is {known_data_type(array.dtype)}{[*array.shape]}, got a tensor of "
                f"{tensor.dtype}{shape}{'' if writeable else ' that is read-only'}"
            )
    for (i, one), (j, other) in combinations(enumerate(outputs), 2):
        shares = one.has_data and other.has_data and np.may_share_memory(one.array, other.array)
        if one is other or shares:
            raise InvalidInputError(f"outputs: the tensors {i} and {j} have the same memory")
    for tensor, array in zip(outputs, results.values(), strict=True):
        tensor.shape = array.shape
    # All memory is allocated before the first is written, as that may fail.
    places = [tensor.array for tensor in outputs]
    for place, array in zip(places, results.values(), strict=True):
        place[...] = array
    return outputs
