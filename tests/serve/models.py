"""The models that tests serve, and values for them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.text_models import text_model

Arrays = Mapping[str, NDArray[Any]]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 where shm_open(3) makes its objects
OBJECTS = f"mcinfer-served-{os.getpid()}-"
"""How the names of the tests' own objects in shared memory begin."""

AFFINE = """(float[batch, 4] x) => (float[batch, 4] y)
<float two = {2.0}, float one = {1.0}> { doubled = Mul(x, two) y = Add(doubled, one) }"""

SCALARS = """(float a, int64 n) => (float b, int64 m) { b = Neg(a) m = Neg(n) }"""

NUMBERS: Mapping[str, Any] = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "FP32": np.float32,
    "FP64": np.float64,
}
"""The protocol's element types but BYTES."""

_OF_ONNX = {"FP16": "FLOAT16", "BF16": "BFLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE"}


def identities(*kinds: str) -> onnx.ModelProto:
    """Gives each input ``in_KIND``, KIND[batch, n], as ``out_KIND``."""
    graph = helper.make_graph(
        [helper.make_node("Identity", [f"in_{kind}"], [f"out_{kind}"]) for kind in kinds],
        "identities",
        [_value(f"in_{kind}", kind) for kind in kinds],
        [_value(f"out_{kind}", kind) for kind in kinds],
    )
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _value(name: str, kind: str) -> onnx.ValueInfoProto:
    number = getattr(TensorProto, _OF_ONNX.get(kind, kind.replace("BYTES", "STRING")))
    return helper.make_tensor_value_info(name, number, ["batch", "n"])


def affine(factor: float) -> onnx.ModelProto:
    """y = factor * x + 1."""
    return text_model(AFFINE.replace("2.0", str(factor)))


def write(folder: Path) -> list[Path]:
    """The files of the models that the shared server has: affine, numbers, scalars, texts."""
    found = {
        "affine": affine(2.0),
        "numbers": identities(*NUMBERS),
        "scalars": text_model(SCALARS),
        "texts": identities("BYTES"),
    }
    paths = [folder / f"{name}.onnx" for name in found]
    for path, model in zip(paths, found.values(), strict=True):
        onnx.save(model, path)
    return paths


def numbers(rows: int = 2, columns: int = 3) -> Arrays:
    """Values of all types of numbers, by input of the model *numbers*; the largest and smallest, too."""
    found = {}
    for kind, dtype in NUMBERS.items():
        values = np.arange(rows * columns).reshape(rows, columns).astype(dtype)
        if values.size and values.dtype.kind in "iu":
            values.flat[:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
        elif values.size and kind != "BOOL":
            values.flat[:2] = -0.1, 3e4
        found[f"in_{kind}"] = values
    return found


TEXTS = np.array([[b"", b"a\0b\0", "ä€\U0001f600".encode()], [b"x" * 70_000, b"\0", b" "]], object)


def rows(count: int, first: float = 0.0) -> NDArray[np.float32]:
    """For the model *affine*: no two rows alike."""
    return (np.arange(count * 4, dtype=np.float32) + np.float32(first)).reshape(count, 4)


def repository(folder: Path, **versions: Mapping[int, onnx.ModelProto]) -> Path:
    """A repository in Triton's layout: by name, the models by their versions."""
    for name, found in versions.items():
        for version, model in found.items():
            add_version(folder, name, version, model)
    return folder


def add_version(folder: Path, name: str, version: int, model: onnx.ModelProto) -> None:
    place = folder / name / str(version)
    place.mkdir(parents=True)
    onnx.save(model, place / "model.onnx")
