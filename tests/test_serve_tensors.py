"""Tests of mcinfer/serve/tensors.py and documents.py: tensors in JSON and in bytes."""

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.serve.documents import InferDocument, InputDocument, read_document, read_json
from mcinfer.serve.tensors import (
    DATATYPES,
    MAX_DEPTH,
    TensorHead,
    bytes_of,
    from_bytes,
    from_json,
    json_of,
    raw_shape,
)
from mcinfer.specs import ELEMENT_TYPES, STRING, TensorSpec, numpy_dtype

FIXED = [kind for kind, element in ELEMENT_TYPES.items() if element.bits >= 8]
IN_JSON = [kind for kind in (*FIXED, STRING) if "complex" not in kind]


def head_of(kind: str, shape: tuple[int, ...], data: Any = None) -> TensorHead:
    spec = TensorSpec(name="x", dtype=numpy_dtype(kind), shape=(None,) * len(shape))
    return TensorHead(spec, InputDocument("x", DATATYPES[kind], shape, data=data))


def small_numbers(kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Numbers that every type has."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape) % 2
    return numbers.astype(numpy_dtype(kind))


@pytest.mark.parametrize("kind", FIXED)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_bytes_of_each_type_come_back_as_they_were(kind: str, shape: tuple[int, ...]) -> None:
    array = small_numbers(kind, shape)
    back = from_bytes(head_of(kind, shape), bytes(bytes_of(array)))
    assert (back.dtype, back.shape) == (array.dtype, shape)
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("kind", [kind for kind in IN_JSON if kind != STRING])
def test_json_of_each_type_comes_back_as_it_was(kind: str) -> None:
    array = small_numbers(kind, (2, 3))
    text = orjson.dumps(json_of("y", array), option=orjson.OPT_SERIALIZE_NUMPY)
    back = from_json(head_of(kind, (2, 3), json.loads(text)))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@given(hnp.arrays(np.float32, hnp.array_shapes(min_side=0), elements={"allow_infinity": False}))
def test_any_float32_is_the_same_through_json_nested_or_flat(array: NDArray[Any]) -> None:
    text = orjson.dumps(json_of("y", array), option=orjson.OPT_SERIALIZE_NUMPY)
    flat = from_json(head_of("float32", array.shape, json.loads(text)))
    np.testing.assert_array_equal(flat, array)
    nested = json.loads(orjson.dumps(array.tolist()))  # NaN is null
    np.testing.assert_array_equal(from_json(head_of("float32", array.shape, nested)), array)


@given(st.lists(st.binary(max_size=8), max_size=6))
def test_any_strings_are_the_same_through_bytes(values: list[bytes]) -> None:
    array = np.fromiter(values, object, len(values))
    head = head_of(STRING, array.shape)
    assert from_bytes(head, bytes(bytes_of(array))).tolist() == values


@given(st.lists(st.text(), max_size=6))
def test_any_text_is_the_same_through_json(values: list[str]) -> None:
    valid = [v for v in values if v.isprintable()]
    back = from_json(head_of(STRING, (len(valid),), valid))
    assert back.tolist() == valid == json_of("y", back)


def test_strings_have_the_bytes_of_a_message_to_a_worker() -> None:
    with pytest.raises(InvalidInputError, match="got 16777217 bytes of strings, expected at most"):
        from_bytes(head_of(STRING, (1 << 22,)), bytes((1 << 24) + 1))


@given(st.binary(max_size=40), st.integers(0, 5))
def test_random_bytes_are_strings_or_an_error(data: bytes, count: int) -> None:
    head = head_of(STRING, (count,))
    try:
        back = from_bytes(head, data)
    except InvalidInputError:
        return
    assert back.shape == (count,)
    assert bytes(bytes_of(back)) == data


def test_text_of_a_model_s_output_is_its_utf_8_bytes() -> None:
    array = np.array(["é", b"\x00\xff"], object)
    assert (
        bytes(bytes_of(array))
        == struct.pack("<I", 2) + "é".encode() + struct.pack("<I", 2) + b"\x00\xff"
    )
    with pytest.raises(
        InvalidInputError, match="output 'y' is not UTF-8: ask for it as binary data"
    ):
        json_of("y", array)


@pytest.mark.parametrize(
    ("kind", "shape", "data", "text"),
    [
        ("float32", (2,), [1.0], "got 1 elements for shape [2], expected 2"),
        ("float32", (2,), [[1.0], [2.0, 3.0]], "got 3 elements for shape [2], expected 2"),
        ("float32", (2,), [[1.0], 2.0], "expected float32"),
        ("float32", (1,), "1.0", "expected an array"),
        ("float32", (1,), ["1"], "expected float32"),
        ("float32", (1,), [{}], "expected float32"),
        ("int32", (1,), [1.5], "expected int32"),
        ("int32", (1,), [None], "expected int32"),
        ("int8", (1,), [128], "expected int8"),
        ("uint8", (1,), [-1], "expected uint8"),
        ("uint8", (1,), [256], "expected uint8"),
        ("uint64", (2,), [1 << 63, -1], "expected uint64"),
        ("int64", (1,), [1 << 63], "expected int64"),
        ("bool", (1,), [2], "expected bool"),
        (STRING, (2,), ["a", 1], "expected string"),
        (STRING, (2,), [["a"], "b"], "expected string"),
        (STRING, (1,), "a", "expected an array"),
    ],
)
def test_json_of_other_values_is_refused(
    kind: str, shape: tuple[int, ...], data: Any, text: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        from_json(head_of(kind, shape, data))
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in IN_JSON if "float" in kind])
def test_null_is_nan_in_every_type_that_has_it(kind: str) -> None:
    array = from_json(head_of(kind, (2,), [None, 1]))
    assert np.isnan(array.astype(np.float32)).tolist() == [True, False]


def test_texts_among_numbers_are_refused_and_take_no_memory() -> None:
    """As an array of texts they would each be as wide as the longest one: here 4 GB."""
    head = head_of("float32", (100_001,), [1, "x" * 10_000, *[""] * 99_999])
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match="expected float32 as data"):
            from_json(head)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_shape_that_no_array_can_have_is_refused() -> None:
    for shape in ((0, 1 << 61), (1 << 40, 1 << 40)):
        with pytest.raises(InvalidInputError, match="got shape"):
            head_of("float32", shape)


def test_number_that_is_too_large_is_infinite() -> None:
    assert from_json(head_of("float32", (2,), [1e39, -1e39])).tolist() == [np.inf, -np.inf]


def test_json_may_be_nested_so_deep_and_no_deeper() -> None:
    def nested(depth: int) -> Any:
        data: Any = 5
        for _ in range(depth):
            data = [data]
        return data

    assert from_json(head_of("int64", (1, 1), nested(MAX_DEPTH))).tolist() == [[5]]
    for kind in ("int64", STRING):
        with pytest.raises(
            InvalidInputError, match="JSON nesting depth exceeds maximum allowed limit"
        ):
            from_json(head_of(kind, (1, 1), nested(MAX_DEPTH + 1)))


@pytest.mark.parametrize(
    ("shape", "kind", "size", "expected"),
    [
        ((None, 4), "float32", 32, [2, 4]),
        (("batch", "n"), "float32", 32, [1, 8]),
        ((2, 3), "float32", 24, [2, 3]),
        (("batch", 0), "float32", 0, [0, 0]),
        ((None,), STRING, 3, [1]),
        (("batch", 1), STRING, 3, [1, 1]),
    ],
)
def test_shape_of_raw_bytes_follows_from_their_number(
    shape: tuple[Any, ...], kind: str, size: int, expected: list[int]
) -> None:
    assert raw_shape(TensorSpec(name="x", dtype=numpy_dtype(kind), shape=shape), size) == expected


@pytest.mark.parametrize(
    ("shape", "kind", "text"),
    [
        (("batch", "n", "m"), "float16", "more than one variable-sized dimension"),
        (("batch", 2), STRING, "must have input shape [1]"),
    ],
)
def test_raw_bytes_of_an_unknown_shape_are_refused(
    shape: tuple[Any, ...], kind: str, text: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        raw_shape(TensorSpec(name="x", dtype=numpy_dtype(kind), shape=shape), 8)
    assert text in str(caught.value)


def test_head_of_another_type_or_shape_is_refused() -> None:
    spec = TensorSpec(name="x", dtype=np.dtype(np.float32), shape=(None, 4))
    for datatype, shape, text in (
        ("FP64", (1, 4), "got datatype 'FP64', expected FP32"),
        ("FP32", (4,), r"got shape \[4\], expected \[-1, 4\]"),
        ("FP32", (1, 5), r"got shape \[1, 5\]"),
    ):
        with pytest.raises(InvalidInputError, match=text):
            TensorHead(spec, InputDocument("x", datatype, shape))


_FIELDS = ["inputs", "outputs", "id", "parameters", "name", "shape", "data", "datatype"]
_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(st.recursive(_VALUES, lambda v: st.lists(v) | st.dictionaries(st.sampled_from(_FIELDS), v)))
def test_any_json_is_a_request_or_an_invalid_input(document: Any) -> None:
    text = ""
    try:
        read_document(InferDocument, document)
    except InvalidInputError as exc:
        text = str(exc)
    assert not text or text.startswith("the request: ")


def test_further_fields_and_parameters_are_passed_over() -> None:
    text = b'{"inputs": [], "more": 1, "parameters": {"own": {"a": 1}, "priority": 3}}'
    assert read_json(InferDocument, text).parameters.priority == 3
