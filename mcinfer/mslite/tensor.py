"""`Tensor`, as MindSpore Lite has it, and the names that go with it.

Who owns a tensor's data:

- Data that came in as an array or as another tensor is borrowed: it is shared, never written to by
  `Tensor.set_data_from_numpy`, and let go of when that is called.
- Memory that the tensor got for itself (from its model's allocator, or else NumPy's) is its own:
  `Tensor.set_data_from_numpy` copies into it. It is gotten when data is first set or looked at.
- Either way it is C-contiguous, aligned and of native byte order, and lives as long as a tensor or
  an array that looks at it.
"""

import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.mslite._checks import check_shape, check_type
from mcinfer.mslite.datatypes import (
    DataType,
    Format,
    TensorMeta,
    data_type_of,
    element_num_of,
    itemsize_of,
    known_data_type,
    numpy_dtype_of,
)

__all__ = ["DataType", "Format", "Tensor", "TensorMeta", "data_type_of", "numpy_dtype_of"]

DEVICE_KINDS = ("ascend", "cpu", "cuda", "gpu")
"""The kinds of device that `Tensor` takes; upstream takes the first alone."""


def _check_device(device: object) -> None:
    """Check a device's name, and say that the data does not go there.

    Raises:
        TypeError: Not of the form ``"kind"`` or ``"kind:index"``.
    """
    check_type("device", device, str)
    kind, colon, index = str(device).partition(":")
    if ":" in index:
        raise TypeError(f"device must be 'ascend:index', eg: 'ascend:0', but got {device!r}.")
    if kind not in DEVICE_KINDS:
        raise TypeError(f"now only support {', '.join(DEVICE_KINDS)} device, but got {device!r}.")
    if colon and not (index.isascii() and index.isdigit()):
        raise TypeError(f"device id should >= 0, but got {device!r}.")
    if kind != "cpu":
        warnings.warn(
            f"device: a Tensor's data stays in host memory, not on {device!r}",
            UserWarning,
            stacklevel=3,
        )


def _check_same(
    source: str,
    shape: Sequence[int] | None,
    its_shape: Sequence[int],
    dtype: DataType | None,
    its_dtype: DataType,
) -> None:
    """Check that what the user says of the data is so.

    Raises:
        TypeError: It is not.
    """
    if shape is not None and list(shape) != list(its_shape):
        raise TypeError(
            f"user set shape is not equal {source} shape, user shape: {shape}, "
            f"{source} shape is: {its_shape}."
        )
    if dtype is not None and dtype is not its_dtype:
        raise TypeError(
            f"user set dtype is not equal {source} dtype, user dtype: {dtype}, "
            f"{source} dtype is: {its_dtype}."
        )


class Tensor:
    """An n-dimensional array in host memory, with a name, a format and a shape that can be set.

    An array that is C-contiguous, aligned and of native byte order is held as it is, any other as a
    copy. Of a tensor, the data is shared; name and format start as they are there and then go their
    own way. Without a tensor: the shape and dtype if both are given, else one float32. It has no data
    then; the first look at it makes zeros.

    One tensor must not be used by several threads at a time, unless they all only read.

    Args:
        tensor: ndarray or Tensor.
        shape: list[int]; with a tensor it must be the tensor's own. A size of 0 or less is not known
            yet: `set_data_from_numpy` takes it from the array.
        dtype: DataType; with a tensor it must be the tensor's own.
        device: One of `DEVICE_KINDS`, alone or with ``:index``. The data stays in host memory all
            the same, and other than for ``"cpu"`` a UserWarning says so.

    Raises:
        TypeError: An argument is of another type, does not fit the tensor, or its dtype has no
            number in `DataType`.
    """

    __slots__ = (
        "__weakref__",
        "_allocate",
        "_array",
        "_dtype",
        "_format",
        "_model_dtype",
        "_name",
        "_own",
        "_shape",
    )

    _name: str
    _dtype: DataType
    _shape: tuple[int, ...]
    _format: Format
    _array: NDArray[Any] | None  # None until memory is gotten
    _own: bool  # whether the array is memory that set_data_from_numpy may write to
    _allocate: Callable[[tuple[int, ...]], NDArray[Any]] | None
    _model_dtype: DataType  # what the allocator gives

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
        self._name = ""
        self._format = Format.NCHW
        self._array = None
        self._own = False
        self._allocate = None
        self._model_dtype = DataType.UNKNOWN
        if tensor is None:
            self._describe(shape, dtype)
        elif isinstance(tensor, Tensor):
            _check_same("tensor", shape, tensor.shape, dtype, tensor.dtype)
            self._share(tensor)
        elif isinstance(tensor, np.ndarray):
            data_type = data_type_of(tensor.dtype)
            _check_same("numpy", shape, tensor.shape, dtype, data_type)
            self._hold(tensor, data_type)
        else:
            raise TypeError(
                "tensor must be MindSpore Lite's Tensor._tensor or numpy ndarray, "
                f"but got {type(tensor)}."
            )

    def _describe(self, shape: Sequence[int] | None, dtype: DataType | None) -> None:
        if (shape is None) != (dtype is None):
            name = "dtype" if shape is None else "shape"
            warnings.warn(
                f"{name} has no effect: without a tensor, shape and dtype count only together",
                UserWarning,
                stacklevel=3,
            )
        if shape is None or dtype is None:
            shape, dtype = (), DataType.FLOAT32
        self._shape = tuple(shape)
        self._dtype = dtype

    def _share(self, other: "Tensor") -> None:
        self._name = other._name
        self._format = other._format
        self._dtype = other._dtype
        self._shape = other._shape
        if other.has_data or other.element_num > 0:
            self._array = other.array

    def _hold(self, array: NDArray[Any], dtype: DataType) -> None:
        self._dtype = dtype
        self._shape = array.shape
        if array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative:
            self._array = array.view(np.ndarray)
        else:
            self._array = np.array(array, dtype=numpy_dtype_of(dtype), order="C")
            self._own = True

    @classmethod
    def _of_model(
        cls,
        name: str,
        dtype: DataType,
        shape: Sequence[int],
        *,
        allocate: Callable[[tuple[int, ...]], NDArray[Any]] | None = None,
    ) -> "Tensor":
        """A tensor without data, for an input of a model.

        Args:
            name: As in the model.
            dtype: Element type; UNKNOWN for one that has no number (only an allocator can give
                memory for it then).
            shape: Sizes of the dimensions, -1 for one that is not known.
            allocate: Gives memory for a shape: a writable, C-contiguous array of it and of the
                model's element type, with any content. It may raise, which changes nothing here.
                The tensor calls it when it needs memory for data and has none of that shape, and
                holds the array until it needs another or is gone. It is not called while `dtype` is
                set to another element type. ``None`` is NumPy's own memory.
        """
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._dtype = tensor._model_dtype = dtype
        tensor._shape = tuple(shape)
        tensor._format = Format.NCHW
        tensor._array = None
        tensor._own = False
        tensor._allocate = allocate
        return tensor

    @classmethod
    def _of_result(cls, name: str, array: NDArray[Any]) -> "Tensor":
        """A tensor that holds an array as it is; unlike the constructor it checks nothing.

        Args:
            name: As in the model.
            array: C-contiguous, of native byte order and of any dtype; the tensor's is UNKNOWN if
                it has no number. Borrowed, and its shape must not be set in place from here on.
        """
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._dtype = tensor._model_dtype = known_data_type(array.dtype)
        tensor._shape = array.shape
        tensor._format = Format.NCHW
        tensor._array = array
        tensor._own = False
        tensor._allocate = None
        return tensor

    @property
    def name(self) -> str:
        """The name, ``""`` by default.

        Raises:
            TypeError: Set to something other than a str.
        """
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        check_type("name", value, str)
        self._name = value

    @property
    def dtype(self) -> DataType:
        """The element type. Data is never reinterpreted or converted: a new type drops it.

        The next look at the data, or the next `set_data_from_numpy`, gets memory of the new type.

        Raises:
            TypeError: Set to something other than a DataType.
        """
        return self._dtype

    @dtype.setter
    def dtype(self, value: DataType) -> None:
        check_type("dtype", value, DataType)
        if value is not self._dtype:
            self._dtype = value
            self._array = None

    @property
    def shape(self) -> list[int]:
        """Sizes of the dimensions; one of 0 or less is not known yet. A fresh list.

        Setting a shape of as many elements keeps the data and looks at it in that shape. Another
        number of elements drops the data; the next use gets memory of the new size.

        Raises:
            TypeError: Set to something other than a list (or tuple) of int.
        """
        return list(self._shape)

    @shape.setter
    def shape(self, value: Sequence[int]) -> None:
        check_shape("shape", value)
        shape = tuple(value)
        if shape == self._shape:
            return
        if self._array is not None:
            keeps = all(size >= 0 for size in shape) and prod(shape) == self._array.size
            self._array = self._array.reshape(shape) if keeps else None
        self._shape = shape

    @property
    def format(self) -> Format:
        """What the dimensions stand for; setting it moves no data.

        Raises:
            TypeError: Set to something other than a Format.
        """
        return self._format

    @format.setter  # noqa: A003 the attribute's name
    def format(self, value: Format) -> None:
        check_type("format", value, Format)
        self._format = value

    @property
    def element_num(self) -> int:
        """The number of elements: 1 for the shape ``[]``, 0 if a dimension is 0 or less."""
        return element_num_of(self._shape)

    @property
    def data_size(self) -> int:
        """Bytes of all elements; 0 if a dimension is 0 or less."""
        itemsize = itemsize_of(self._dtype) if self._array is None else self._array.itemsize
        return self.element_num * itemsize

    @property
    def device(self) -> str:
        """Where the data is: always ``"None:-1"``, upstream's name for host memory."""
        return "None:-1"

    @property
    def has_data(self) -> bool:
        """Whether data was set or looked at since the tensor was made or its data was dropped."""
        return self._array is not None

    @property
    def array(self) -> NDArray[Any]:
        """The tensor's data itself, in its shape: what an engine reads. Not to be kept or reshaped.

        If there is none yet: zeroed memory, which becomes the data; or, if a dimension is 0 or less,
        an empty array with 0 in its place, which does not.

        Raises:
            TypeError: There is no data, and the dtype is UNKNOWN or INVALID.
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
        if self._allocate is not None and self._dtype is self._model_dtype:
            return self._allocate(shape)
        return np.empty(shape, numpy_dtype_of(self._dtype))

    def get_data_to_numpy(self) -> NDArray[Any]:
        """A view of the data in the tensor's shape; writing to it writes to the tensor.

        It is read-only if the array that the tensor was made of is. Later calls of
        `set_data_from_numpy` show in it, unless they or a setter made the tensor get new memory.

        Returns:
            The data; if there is none yet, as `array` says.

        Raises:
            TypeError: There is no data, and the dtype is UNKNOWN or INVALID.
        """
        return self.array.view()

    def set_data_from_numpy(self, numpy_obj: NDArray[Any]) -> None:
        """Copy an array's elements into the tensor's own memory, in C order.

        Any memory layout and byte order will do. The array is not kept. Where the tensor's shape has
        a dimension of 0 or less, the array's shape becomes the tensor's.

        Args:
            numpy_obj: As many bytes as the tensor, in any shape; or, where a dimension of the tensor
                is not known, of the tensor's rank and equal to it in the known ones.

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
        shape = self._shape_for(numpy_obj)
        memory = self._array if self._own and shape == self._shape else None
        if memory is None:
            memory = self._new_memory(shape)
        np.copyto(memory.reshape(numpy_obj.shape), numpy_obj)
        self._array, self._shape, self._own = memory, shape, True

    def _shape_for(self, array: NDArray[Any]) -> tuple[int, ...]:
        """The shape that this tensor has with the array's data; RuntimeError if it does not fit."""
        if all(size > 0 for size in self._shape):
            if array.nbytes != self.data_size:
                raise RuntimeError(
                    f"data size not equal! Numpy size: {array.nbytes}, Tensor size: {self.data_size}"
                )
            return self._shape
        fits = array.ndim == len(self._shape) and all(
            known <= 0 or known == size
            for size, known in zip(array.shape, self._shape, strict=True)
        )
        if not fits:
            raise RuntimeError(
                f"data size not equal! Numpy size: {array.nbytes}, Tensor size: {self.data_size}, "
                f"Numpy shape: {list(array.shape)}, Tensor shape: {self.shape}"
            )
        return array.shape

    def __array__(
        self, dtype: "np.dtype[Any] | None" = None, copy: bool | None = None
    ) -> NDArray[Any]:
        return np.array(self.get_data_to_numpy(), dtype=dtype, copy=copy)

    def __str__(self) -> str:
        return (
            f"name: {self.name},\n"
            f"dtype: {self.dtype},\n"
            f"shape: {self.shape},\n"
            f"format: {self.format},\n"
            f"element_num: {self.element_num},\n"
            f"data_size: {self.data_size}.\n"
            f"device: {self.device}."
        )

    def __repr__(self) -> str:
        return str(self)
