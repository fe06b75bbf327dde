"""Tests of mcinfer/specs.py."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import pytest

from mcinfer.errors import InvalidInputError
from mcinfer.specs import (
    ELEMENT_TYPES,
    STRING,
    TensorSpec,
    element_type_name,
    numpy_dtype,
    tensor_bytes,
)

ROOT = Path(__file__).parents[1]
FOUR_BITS = ("int4", "uint4")

# Not in this process: once ml_dtypes was imported, NumPy knows its types by name.
WITHOUT_ML_DTYPES = """
import sys
sys.modules["ml_dtypes"] = None
from mcinfer.errors import MissingDependencyError
from mcinfer.specs import numpy_dtype
assert numpy_dtype("float32").name == "float32"
try:
    numpy_dtype("bfloat16")
except MissingDependencyError as exc:
    print(exc)
"""


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_every_element_type_keeps_its_name_through_numpy(name: str) -> None:
    assert element_type_name(numpy_dtype(name)) == name


@pytest.mark.parametrize("name", ["float32", "int64", "uint16", "complex128"])
@pytest.mark.parametrize("order", ["<", ">", "="])
def test_byte_order_does_not_change_the_name(name: str, order: Literal["<", ">", "="]) -> None:
    assert element_type_name(numpy_dtype(name).newbyteorder(order)) == name


@pytest.mark.parametrize("dtype", [np.dtype("U7"), np.dtype("S3"), np.dtype(object)])
def test_text_bytes_and_objects_are_strings(dtype: "np.dtype[np.generic]") -> None:
    assert element_type_name(dtype) == STRING


@pytest.mark.parametrize("name", ["float31", "", "object", "float8_e3m4", "datetime64"])
def test_unknown_name_is_refused_with_what_came(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"got '{name}'"):
        numpy_dtype(name)


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype("datetime64[ns]"),
        np.dtype("timedelta64[s]"),
        np.dtype([("x", np.float32)]),
        np.dtype("V4"),
        np.dtype(ml_dtypes.float8_e3m4),
    ],
    ids=str,
)
def test_dtype_that_no_model_takes_is_refused_with_what_came(dtype: "np.dtype[np.generic]") -> None:
    with pytest.raises(InvalidInputError, match="dtype: got"):
        element_type_name(dtype)


def test_without_ml_dtypes_the_error_says_what_to_install() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_ML_DTYPES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert "bfloat16 needs the package ml_dtypes: pip install 'mcinfer[ml-dtypes]'" in run.stdout


@pytest.mark.parametrize("name", [n for n in ELEMENT_TYPES if n not in (*FOUR_BITS, STRING)])
def test_tensor_takes_as_many_bytes_as_in_numpy(name: str) -> None:
    assert tensor_bytes(name, 7) == np.empty(7, numpy_dtype(name)).nbytes
    assert tensor_bytes("int4", 7) == 4
    assert tensor_bytes(STRING, 7) == 0


def test_spec_reads_as_name_type_and_dimensions() -> None:
    spec = TensorSpec(name="sample", dtype=np.dtype(np.float16), shape=("batch", 4, None))
    assert spec.element_type == "float16"
    assert str(spec) == "sample: float16[batch, 4, ?]"
