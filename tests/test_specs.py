"""Tests of mcinfer/specs.py."""

import ml_dtypes  # noqa: F401 NumPy knows its types by name once it is imported
import numpy as np
import pytest

from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.specs import (
    ELEMENT_TYPES,
    STRING,
    ModelSpec,
    TensorSpec,
    element_type_name,
    numpy_dtype,
    tensor_bytes,
)
from tests.process.scripts import printed

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
    if name not in FOUR_BITS and name != STRING:
        assert tensor_bytes(name, 7) == np.empty(7, numpy_dtype(name)).nbytes


def test_other_numpy_types_of_an_element_type_have_its_name() -> None:
    assert [element_type_name(np.dtype(text)) for text in ("U7", "S3", "O")] == [STRING] * 3
    for text in ("<i8", ">i8", "=i8"):
        assert element_type_name(np.dtype(text)) == "int64"
    assert tensor_bytes("int4", 7) == 4
    assert tensor_bytes(STRING, 7) == 0
    spec = TensorSpec(name="sample", dtype=np.dtype(np.float16), shape=("batch", 4, None))
    assert str(spec) == "sample: float16[batch, 4, ?]"


def test_model_with_one_name_for_two_outputs_is_refused() -> None:
    x, y = (TensorSpec(name=name, dtype=np.dtype(np.float32), shape=()) for name in "xy")
    assert ModelSpec(inputs=(x, y), outputs=(y, x)).outputs == (y, x)
    with pytest.raises(BuildError, match=r"declares the outputs \['y'\] more than once"):
        ModelSpec(inputs=(x,), outputs=(y, x, y))
    with pytest.raises(BuildError, match=r"declares the inputs \['x'\] more than once"):
        ModelSpec(inputs=(x, x), outputs=())


@pytest.mark.parametrize("name", ["", "object", "float8_e3m4", "datetime64"])
def test_unknown_type_is_refused_with_what_came(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"got '{name}'"):
        numpy_dtype(name)
    if name not in ("", "object"):  # names that NumPy knows
        with pytest.raises(InvalidInputError, match="dtype: got"):
            element_type_name(np.dtype(name))


@pytest.mark.parametrize("dtype", [np.dtype("V4"), np.dtype([("x", np.float32)])], ids=str)
def test_dtype_without_a_number_is_refused(dtype: "np.dtype[np.generic]") -> None:
    with pytest.raises(InvalidInputError, match="dtype: got"):
        element_type_name(dtype)


def test_without_ml_dtypes_the_error_says_what_to_install() -> None:
    said = "bfloat16 needs the package ml_dtypes: pip install 'ml_dtypes>=0.5'"
    assert said in printed(WITHOUT_ML_DTYPES)
