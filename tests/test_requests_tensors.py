"""Tests of mcinfer/requests/tensors.py: where parts of tensors lie, and how data gets in and out of there."""

import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.requests.tensors import (
    TOLERANCES,
    Copier,
    as_input,
    difference,
    join_parts,
    lay_output,
    string_rows,
)
from mcinfer.sharding import InputCut, JoinError, OutputJoin, Shape
from mcinfer.specs import STRING, TensorSpec, numpy_dtype, tensor_bytes
from tests.planned_requests import FIXED_SIZE, in_order, random_array

Array = NDArray[Any]


def spec(element_type: str, name: str = "x") -> TensorSpec:
    return TensorSpec(name=name, dtype=numpy_dtype(element_type), shape=(None,))


@pytest.mark.parametrize("shards", [1, 3])
def test_output_that_is_not_cut_has_a_place_for_each_shard(shards: int) -> None:
    shape = (3, 5)
    join = OutputJoin(axis=None, shapes=(shape,) * shards, shape=shape)
    layout = lay_output(spec("float32"), join)
    assert layout is not None
    assert len(set(layout.offsets)) == shards
    assert layout.size - max(layout.offsets) >= tensor_bytes("float32", 15)
    assert layout.contiguous == (shards == 1)


@pytest.mark.parametrize("dtype", [object, "U3", "S3"])
def test_strings_of_each_shard_in_order_and_of_pythons_own_types(dtype: Any) -> None:
    array = np.array([["a", "b", "c"], ["d", "e", "f"]]).astype(dtype)
    if dtype is object:
        array[0, 0] = np.str_("a")
    cut = InputCut(axis=1, shapes=((2, 1), (2, 2)))
    shards = string_rows(array, cut)
    expected: list[tuple[str | bytes, ...]] = [("a", "d"), ("b", "c", "e", "f")]
    if dtype == "S3":
        expected = [(b"a", b"d"), (b"b", b"c", b"e", b"f")]
    assert shards == expected
    assert {type(item) for shard in shards for item in shard} == {bytes if dtype == "S3" else str}
    whole = InputCut(axis=None, shapes=((2, 3),) * 2)
    assert string_rows(array, whole) == [tuple(array.ravel().tolist())] * 2


class Torch:
    """Like a tensor of PyTorch, which has no array where the data type is bfloat16."""

    def __init__(self, name: str) -> None:
        self.dtype = f"torch.{name}"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return np.zeros(2, self.dtype.removeprefix("torch."))


def test_refused_type_comes_with_a_cure_in_the_callers_words() -> None:
    wrong = {
        '.astype("float32")': np.zeros(2, np.float64),
        ".to(torch.float32)": Torch("float64"),
        "BFloat16: x.to(torch.float32)": Torch("bfloat16"),
    }
    for cure, value in wrong.items():
        with pytest.raises(InvalidInputError, match=rf"{re.escape(cure)}$"):
            as_input(value, spec("float32"), "float32")
    with pytest.raises(InvalidInputError, match=r"BFloat16$"):  # another type would not help
        as_input(Torch("bfloat16"), spec("bfloat16"), "bfloat16")


def test_whole_numbers_of_pythons_fit_an_unsigned_input_that_can_hold_them() -> None:
    assert as_input([0, 255], spec("uint8"), "uint8").tolist() == [0, 255]
    for values in ([-1], [256]):
        with pytest.raises(InvalidInputError, match="expected 0 to 255"):
            as_input(values, spec("uint8"), "uint8")


# Joining.

WHOLE = OutputJoin(axis=None, shapes=None, shape=None)


def joined(
    parts: Sequence[Array], element_type: str = "float32", join: OutputJoin = WHOLE
) -> Array:
    """An output of these parts; the first comes from worker 1, and so on."""
    workers = [f"worker {i + 1}" for i in range(len(parts))]
    return join_parts(spec(element_type, "z"), join, parts, workers)


@pytest.mark.parametrize("element_type", ["float32", "bool"])
def test_output_that_differs_is_an_error_that_names_it_and_the_worker(element_type: str) -> None:
    zeros = np.zeros((2, 2)).astype(numpy_dtype(element_type))
    other = zeros.copy()
    other[1, 1] = 1
    text = "output 'z' is to be the same from every worker: worker 3 gave others than worker 1"
    with pytest.raises(JoinError, match=text):
        joined([zeros, zeros, other], element_type)


def test_scalars_and_strings_are_compared_as_well() -> None:
    assert joined([np.array(2.0), np.array(2.0)]) == 2.0
    assert np.isnan(joined([np.array(np.nan), np.array(np.nan)]))
    with pytest.raises(JoinError):
        joined([np.array(2.0), np.array(3.0)])
    words = np.array(["a", b"b"], object)
    assert joined([words, words.copy()], STRING).tolist() == ["a", b"b"]
    with pytest.raises(JoinError):
        joined([words, words[::-1]], STRING)


# Comparing.

FLOATS = [n for n in FIXED_SIZE if "float" in n or n.startswith("complex")]
EIGHT_BITS = [n for n in FLOATS if n.startswith("float8")]
EXACT = [n for n in FIXED_SIZE if n not in FLOATS]


def of(element_type: str, *values: float) -> Array:
    return np.array(values).astype(numpy_dtype(element_type))


@pytest.mark.parametrize("element_type", FIXED_SIZE)
@pytest.mark.parametrize("shape", [(100,), (0, 3), ()], ids=str)
def test_array_differs_from_itself_by_nothing(element_type: str, shape: Shape) -> None:
    array = random_array(element_type, shape, 1)
    assert difference(array, array.copy()) == (True, 0.0)


@pytest.mark.parametrize("element_type", [n for n in FLOATS if n not in EIGHT_BITS])
def test_tolerance_is_of_the_element_and_of_the_largest(element_type: str) -> None:
    """The largest is 2, and elements of 0 and 2 may differ by so much of it."""
    tolerance = TOLERANCES[element_type]
    for value, allowed in ((0.0, tolerance), (2.0, 3 * tolerance)):
        want = of(element_type, 2.0, 1.0, value)
        for factor in (0.8, 1.3):
            got = of(element_type, 2.0, 1.0 + tolerance / 2, value + factor * allowed)
            fits, far = difference(got, want)
            assert fits == (factor < 1)
            assert far == pytest.approx(factor * allowed / 2, rel=0.2)


def test_element_that_marks_what_is_masked_out_hides_no_difference() -> None:
    want = of("float32", -1e9, 1.0, 2.0)
    assert difference(of("float32", -1e9, 1.1, 2.0), want)[0] is False
    assert difference(of("float32", -1e9, 1.00001, 2.0), want)[0] is True


@pytest.mark.parametrize("element_type", EXACT)
def test_integers_and_booleans_are_equal_or_differ(element_type: str) -> None:
    assert difference(of(element_type, 1, 0), of(element_type, 1, 0)) == (True, 0.0)
    assert difference(of(element_type, 1, 1), of(element_type, 1, 0)) == (False, 1.0)


@pytest.mark.parametrize("element_type", FLOATS)
def test_a_nan_equals_a_nan_and_nothing_else(element_type: str) -> None:
    nan, zero = of(element_type, 1, np.nan), of(element_type, 1, 0)
    assert difference(nan, nan.copy()) == (True, 0.0)
    assert difference(nan, zero) == (False, np.inf)
    assert difference(zero, nan) == (False, np.inf)


@pytest.mark.parametrize("element_type", ["float16", "bfloat16", "float32", "float64"])
def test_an_infinity_equals_itself_and_makes_no_scale(element_type: str) -> None:
    want = of(element_type, np.inf, -np.inf, 1)
    assert difference(want.copy(), want) == (True, 0.0)
    for got in ((np.inf, np.inf, 1), (np.inf, 5, 1), (np.inf, -np.inf, np.inf)):
        assert difference(of(element_type, *got), want) == (False, np.inf)
    fits, far = difference(of(element_type, np.inf, -np.inf, 2), want)
    assert (fits, far) == (False, 1.0)


@pytest.mark.parametrize("element_type", ["float16", "float32", "float64"])
def test_the_largest_numbers_of_a_type_do_not_allow_for_everything(element_type: str) -> None:
    most = float(np.finfo(element_type).max)
    want = of(element_type, most, most, -most)
    assert difference(want.copy(), want) == (True, 0.0)
    assert difference(of(element_type, most, 0, -most), want) == (False, 1.0)
    assert difference(of(element_type, most, most, most), want) == (False, np.inf)


# Copying, with one thread or several.

LARGE = 18 << 20


@pytest.fixture(params=[1, 16])
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    made = Copier(request.param)
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("mcinfer-copy")]


@pytest.mark.parametrize("order", ["C", "F"])
def test_copy_is_whole_also_without_help(copier: Copier, order: str) -> None:
    for shape in ((0,), (1000,), (3, 5, LARGE // 60)):
        source = random_array("uint32", shape, 1)
        target = np.zeros(shape, np.uint32)
        copier.copy(target, in_order(source, order))
        assert np.array_equal(target, source)
    copier.close()
    target[...] = 0
    copier.copy(target, source)
    assert np.array_equal(target, source)


# What an object's own conversion raises.


class Converting:
    """Raises this where it is converted."""

    def __init__(self, exc: BaseException) -> None:
        self.exc = exc

    def __array__(self, *_: object, **__: object) -> object:
        raise self.exc


@pytest.mark.parametrize("exc", [TimeoutError("late"), RuntimeError("needs grad"), KeyError("x")])
def test_what_is_no_error_of_numpy_comes_out_of_a_conversion_as_it_is(exc: Exception) -> None:
    """An object's own error, or what a signal's handler raises meanwhile."""
    with pytest.raises(type(exc)) as caught:
        as_input(Converting(exc), spec("float32"), "float32")
    assert caught.value is exc


@pytest.mark.parametrize("exc", [TypeError("on a card"), ValueError("x"), OverflowError("x")])
def test_error_of_numpy_in_a_conversion_names_the_input(exc: Exception) -> None:
    with pytest.raises(InvalidInputError, match=r"^input 'x' is not an array") as caught:
        as_input(Converting(exc), spec("float32"), "float32")
    assert caught.value.__cause__ is exc


def test_dlpack_that_numpy_cannot_take_names_the_input() -> None:
    class Old:
        """A producer from before DLPack could say that memory is read-only."""

        def __init__(self) -> None:
            self.array = np.zeros(2, np.float32)
            self.array.flags.writeable = False

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **_: object) -> object:
            return self.array.__dlpack__()

    with pytest.raises(InvalidInputError, match=r"^input 'x' is not an array: Cannot export"):
        as_input(Old(), spec("float32"), "float32")
