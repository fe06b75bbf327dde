"""Tests of mcinfer/mslite/tensor.py."""

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from mcinfer.mslite.tensor import DataType, Format, Tensor, data_type_of, numpy_dtype_of
from mcinfer.specs import TensorSpec

NUMBERED = [m for m in DataType if m not in (DataType.UNKNOWN, DataType.INVALID)]
DTYPES = [numpy_dtype_of(member) for member in NUMBERED]


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


def numbers(*shape: int, dtype: str = "float32") -> NDArray[Any]:
    return np.arange(1, math.prod(shape) + 1, dtype=dtype).reshape(shape)


class Pool:
    """An allocator that keeps what it gave, full of a value that no test set."""

    def __init__(self) -> None:
        self.given: list[NDArray[Any]] = []

    def __call__(self, shape: tuple[int, ...]) -> NDArray[Any]:
        self.given.append(np.full(shape, 7, np.float32))
        return self.given[-1]


def of_model(shape: list[int], pool: Pool | None = None) -> Tensor:
    sizes = tuple(size if size > 0 else None for size in shape)
    return Tensor._of_model(TensorSpec(name="x", dtype=np.dtype("float32"), shape=sizes), pool)


@st.composite
def laid_out(draw: st.DrawFn) -> NDArray[Any]:
    """An array of any supported type, in any order of bytes and axes, with any steps."""
    dtype = draw(st.sampled_from(DTYPES)).newbyteorder(draw(st.sampled_from("<>")))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, max_side=4))
    array: NDArray[Any] = draw(hnp.arrays(dtype, shape))
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    steps = tuple(slice(None, None, draw(st.sampled_from([1, -1, 2]))) for _ in array.shape)
    return array[steps] if steps else array


def test_new_tensor_is_one_float32() -> None:
    assert Tensor().get_data_to_numpy() == np.zeros((), "float32")
    tensor = Tensor(shape=(2, 3), dtype=DataType.INT16)
    tensor.shape.append(4)  # a copy
    assert (tensor.shape, tensor.element_num, tensor.data_size) == ([2, 3], 6, 12)
    for arguments in ({"shape": [2, 3]}, {"dtype": DataType.INT8}):  # only together
        with pytest.warns(UserWarning, match="has no effect") as caught:
            tensor = Tensor(**arguments)
        assert caught[0].filename == __file__
        assert (tensor.shape, tensor.dtype) == ([], DataType.FLOAT32)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tensor": [1.0]}, "or numpy ndarray, but got <class 'list'>."),
        ({"shape": 3}, "shape must be list or tuple, but got <class 'int'>."),
        ({"dtype": 43}, "dtype must be DataType, but got <class 'int'>."),
        ({"device": 0}, "device must be str, but got <class 'int'>."),
        ({"device": "npu"}, "now only support ascend"),
        ({"device": "ascend:0:1"}, "device must be 'ascend:index', eg: 'ascend:0'"),
        ({"device": "ascend:-1"}, "device id should >= 0"),
        ({"device": "cuda:²"}, "device id should >= 0"),
    ],
)
def test_argument_that_does_not_fit_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        Tensor(**arguments)


def test_array_is_held_without_a_copy_where_engines_can_read_it() -> None:
    unaligned = np.zeros(9, "u1")[1:].view("f4")
    for array in (numbers(2, 3), numbers(2, 3).T, numbers(4).astype(">f4"), unaligned):
        tensor = Tensor(array)
        held = tensor.array
        assert (tensor.shape, tensor.dtype) == ([*array.shape], DataType.FLOAT32)
        assert held.flags.c_contiguous
        assert held.flags.aligned
        assert held.dtype.isnative
        readable = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
        assert np.shares_memory(held, array) == readable
        assert np.array_equal(held, array)


def test_tensor_of_a_tensor_shares_the_data_and_not_the_rest() -> None:
    first = Tensor(shape=[2, 3], dtype=DataType.FLOAT32)
    first.name, first.format = "x", Format.NHWC
    second = Tensor(first)
    assert (second.name, second.format) == ("x", Format.NHWC)
    first.set_data_from_numpy(numbers(2, 3))
    assert np.array_equal(second.get_data_to_numpy(), numbers(2, 3))
    second.name, second.format, second.shape = "y", Format.NC, [6]
    assert (first.name, first.format, first.shape) == ("x", Format.NHWC, [2, 3])
    second.get_data_to_numpy()[0] = 9
    assert first.get_data_to_numpy()[0, 0] == 9


@pytest.mark.parametrize("device", ["ascend", "gpu:12"])
def test_data_stays_in_host_memory_and_a_warning_says_so(device: str) -> None:
    with pytest.warns(UserWarning, match=f"host memory, not on '{device}'") as caught:
        tensor = Tensor(numbers(2), device=device)
    assert caught[0].filename == __file__
    assert tensor.device == Tensor(device="cpu:0").device == "None:-1"  # without a warning


def test_shape_of_as_many_elements_keeps_the_data_and_another_or_another_dtype_drops_it() -> None:
    array = numbers(2, 3)
    tensor = Tensor(array)
    tensor.shape = (1, 6, 1)
    assert tensor.shape == [1, 6, 1]
    assert np.shares_memory(tensor.get_data_to_numpy(), array)
    for shape in ([4], [0], [-2, -3], []):
        tensor = Tensor(array)
        tensor.shape = shape
        assert not tensor.has_data
        tensor.shape = [2, 3]
        assert not tensor.get_data_to_numpy().any()
    tensor = Tensor(array)
    tensor.dtype = DataType.INT32  # never a reinterpretation
    data = tensor.get_data_to_numpy()
    assert (tensor.data_size, data.dtype, data.shape) == (24, np.dtype("int32"), (2, 3))
    assert not data.any()
    assert np.array_equal(array, numbers(2, 3))


@given(laid_out(), st.booleans())
def test_data_of_any_layout_is_set_and_read_back(array: NDArray[Any], flat: bool) -> None:
    tensor = Tensor(shape=list(array.shape), dtype=data_type_of(array.dtype))
    tensor.set_data_from_numpy(array.reshape(-1) if flat else array)
    read = tensor.get_data_to_numpy()
    assert read.shape == array.shape
    assert read.dtype.isnative
    assert read.tobytes() == array.astype(array.dtype.newbyteorder("=")).tobytes()


def test_set_data_never_writes_to_a_borrowed_array() -> None:
    array = numbers(2, 3)
    for tensor in (Tensor(array), Tensor(Tensor(array)), Tensor._of_result("y", array)):
        tensor.set_data_from_numpy(numbers(2, 3) * 2)
        assert np.array_equal(tensor.get_data_to_numpy(), numbers(2, 3) * 2)
        assert np.array_equal(array, numbers(2, 3))


@pytest.mark.parametrize("shape", [[0], [2, -1]])
def test_data_of_an_unknown_size_is_an_empty_array(shape: list[int]) -> None:
    tensor = Tensor(shape=shape, dtype=DataType.INT16)
    data = tensor.get_data_to_numpy()
    assert (data.size, data.ndim, data.dtype) == (0, len(shape), np.dtype("int16"))
    assert (tensor.element_num, tensor.data_size) == (0, 0)
    assert tensor.shape == shape
    assert not tensor.has_data


def test_data_that_does_not_fit_is_refused() -> None:
    tensor = Tensor(numbers(2, 3))
    types = "Numpy type: <class 'numpy.int32'>, Tensor type: DataType.FLOAT32"
    cases: list[tuple[Any, type[Exception], str]] = [
        ([1.0], TypeError, "numpy_obj must be numpy.ndarray, but got <class 'list'>."),
        (numbers(2, 3, dtype="int32"), RuntimeError, f"data type not equal! {types}"),
        (numbers(7), RuntimeError, "data size not equal! Numpy size: 28, Tensor size: 24"),
    ]
    for value, error, text in cases:
        with pytest.raises(error, match=exactly(text)):
            tensor.set_data_from_numpy(value)
        assert np.array_equal(tensor.get_data_to_numpy(), numbers(2, 3))


@pytest.mark.parametrize(("known", "given"), [([-1, 3], (4, 3)), ([0, -5], (2, 2)), ([-1], (0,))])
def test_unknown_sizes_are_taken_from_the_array(known: list[int], given: tuple[int, ...]) -> None:
    tensor = of_model(known)
    tensor.set_data_from_numpy(numbers(*given))
    assert tensor.shape == list(given)
    assert np.array_equal(tensor.get_data_to_numpy(), numbers(*given))


def test_memory_is_allocated_late_and_again_for_more_elements_only() -> None:
    pool = Pool()
    tensor = of_model([-1, 3], pool)
    assert not pool.given
    assert not tensor.has_data
    for factor in (1, 2):
        tensor.set_data_from_numpy(numbers(2, 3) * factor)
        assert tensor.array is pool.given[0]
        assert np.array_equal(pool.given[0], numbers(2, 3) * factor)
    tensor.shape = [3, 2]
    assert np.shares_memory(tensor.array, pool.given[0])
    tensor.shape = [4, 3]
    assert len(pool.given) == 1
    tensor.set_data_from_numpy(numbers(4, 3))
    assert [memory.shape for memory in pool.given] == [(2, 3), (4, 3)]
    assert tensor.array is pool.given[1]
    tensor.dtype = DataType.INT8  # which the allocator does not give
    tensor.set_data_from_numpy(numbers(4, 3, dtype="int8"))
    assert len(pool.given) == 2
    assert tensor.array.dtype == np.int8


def test_result_of_a_type_that_has_no_number_can_be_read() -> None:
    array = numbers(3).astype(ml_dtypes.bfloat16)
    tensor = Tensor._of_result("y", array)
    assert tensor.dtype is DataType.UNKNOWN
    assert (tensor.element_num, tensor.data_size) == (3, 6)
    assert np.array_equal(tensor.get_data_to_numpy(), array)
