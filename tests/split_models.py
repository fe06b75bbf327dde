"""Small ONNX models that are split or must not be, and what one session of ONNX Runtime answers.

For `tests/test_split_models.py`, without processes, and `tests/process/test_splitting.py`, with real workers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx as package
import onnxruntime
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


def onnx(body: str, opset: int = 17) -> str:
    """An ONNX model in text format."""
    return f'<ir_version: 9, opset_import: ["": {opset}]>\nm {body}'


def rename(path: Path, names: Mapping[str, str]) -> None:
    """Give dimensions names that ONNX's text format cannot write."""
    model = package.load(path)
    for value in (*model.graph.input, *model.graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            name = names.get(dimension.dim_param)
            if name == "-1":
                dimension.dim_value = -1
            elif name is not None:
                dimension.dim_param = name
    package.save(model, path)


def alone(path: Path, inputs: Arrays) -> dict[str, NDArray[Any]]:
    """What one session answers."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(inputs)), strict=True))


def assert_equal(got: Arrays, want: Arrays) -> None:
    assert [*got] == [*want]
    for name, array in want.items():
        assert got[name].shape == array.shape, name
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def random(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


NO_NAMES = onnx(
    "(float[a, 3, b] x) => (float[c, d] y) { y = ReduceMean <axes = [1], keepdims = 0> (x) }"
)
"""`rename` gives a, b, c and d what an exporter writes in the place of names."""

PADDLE = tuple(f"p2o.DynamicDimension.{number}" for number in (0, 1, 3, 4))
"""What Paddle's exporter writes for the dimensions of `NO_NAMES`."""

MIXING = {
    "softmax": "y = Softmax <axis = 0> (x)",
    "mean": "mean = ReduceMean <axes = [0], keepdims = 1> (x)\n y = Sub(x, mean)",
    "cumsum": "y = CumSum(x, zero)",
    "topk": "y, at = TopK <axis = 0> (x, two)",
    "reversed": "y = Gather(x, back)",
    "output of the mean": "z = ReduceMean <axes = [0], keepdims = 1> (x)\n y = Relu(x)",
    "output of the maximum": "z = ReduceMax <axes = [0], keepdims = 0> (x)\n y = Relu(x)",
    "output of the number": "s = Shape(x)\n z = Gather(s, zero)\n y = Relu(x)",
}
"""Rows that depend on each other: the nodes of `mixing`'s models."""

_SECOND_OUTPUTS = {
    "output of the mean": ", float[?, ?] z",
    "output of the maximum": ", float[?] z",
    "output of the number": ", int64 z",
}


def mixing(name: str, symbol: str) -> str:
    """A model of `MIXING`; the symbol is that of its rows."""
    rows = "k" if name in {"topk", "reversed"} else symbol
    outputs = f"float[{rows}, 4] y{_SECOND_OUTPUTS.get(name, '')}"
    weights = "int64 zero = {0}, int64[1] two = {2}, int64[4] back = {3, 2, 1, 0}"
    return onnx(f"(float[{symbol}, 4] x) => ({outputs}) <{weights}> {{ {MIXING[name]} }}")
