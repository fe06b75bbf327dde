"""The models that groups of ranks run, and what they give."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tests.sliced_models import save
from tests.text_models import normal_weights

Arrays = Mapping[str, NDArray[Any]]


def write_mlp(path: Path, layers: int = 4, width: int = 32) -> Path:
    """Layers of relu(x @ w + b): float32[batch, width], with the weights in a file beside the model."""
    weights: dict[str, NDArray[Any]] = {}
    for n in range(layers):
        weights |= normal_weights(n, **{f"w{n}": (width, width), f"b{n}": (width,)})
    values = ["x", *(f"relu{n}" for n in range(1, layers)), "y"]
    body = "".join(
        f"product{n} = MatMul({values[n]}, w{n})  sum{n} = Add(product{n}, b{n})"
        f"  {values[n + 1]} = Relu(sum{n})\n"
        for n in range(layers)
    )
    text = f"(float[batch,{width}] x) => (float[batch,{width}] y) {{ {body} }}"
    return save(path, text, weights, external=True)


def write_lookup(path: Path, width: int = 32) -> Path:
    """An MLP, then rows that the input `index` names: a run with an index out of range fails there."""
    text = f"""(float[batch,{width}] x, int64[rows] index) => (float[rows,{width}] y) {{
        a = MatMul(x, w0)  b = MatMul(a, w1)  c = MatMul(b, w2)  d = MatMul(c, w3)
        [lookup] y = Gather<axis=0>(d, index)
    }}"""
    weights = normal_weights(8, **{f"w{n}": (width, width) for n in range(4)})
    return save(path, text, weights, external=True)


def expected(model: Path, inputs: Arrays) -> Arrays:
    """What ONNX Runtime gives for the whole model."""
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def assert_close(got: Arrays, wanted: Arrays) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def rows(count: int, width: int = 32, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
