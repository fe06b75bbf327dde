"""The models that groups of ranks run, and what they give."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from tests.sliced_models import save, value

Arrays = Mapping[str, NDArray[Any]]


def write_mlp(path: Path, layers: int = 4, width: int = 32) -> Path:
    """Layers of relu(x @ w + b): float32[batch, width], with the weights in a file beside the model."""
    random = np.random.default_rng(7)
    nodes: list[NodeProto] = []
    weights: dict[str, NDArray[Any]] = {}
    for layer in range(layers):
        product, biased, active = (f"{kind}{layer}" for kind in ("product", "sum", "relu"))
        last = "y" if layer == layers - 1 else active
        weights[f"w{layer}"] = random.normal(0, width**-0.5, (width, width)).astype(np.float32)
        weights[f"b{layer}"] = random.normal(0, 0.1, (width,)).astype(np.float32)
        nodes += [
            helper.make_node(
                "MatMul", [f"relu{layer - 1}" if layer else "x", f"w{layer}"], [product]
            ),
            helper.make_node("Add", [product, f"b{layer}"], [biased]),
            helper.make_node("Relu", [biased], [last]),
        ]
    x, y = (value(name, "batch", width) for name in "xy")
    return save(path, nodes, [x], [y], weights, external=True)


def write_lookup(path: Path, width: int = 32) -> Path:
    """An MLP, then rows that the input `index` names: a run with an index out of range fails there."""
    random = np.random.default_rng(8)
    weights = {
        f"w{layer}": random.normal(0, width**-0.5, (width, width)).astype(np.float32)
        for layer in range(4)
    }
    nodes = [
        helper.make_node("MatMul", [f"h{layer}" if layer else "x", f"w{layer}"], [f"h{layer + 1}"])
        for layer in range(4)
    ]
    nodes.append(helper.make_node("Gather", ["h4", "index"], ["y"], axis=0, name="lookup"))
    index = helper.make_tensor_value_info("index", TensorProto.INT64, ["rows"])
    inputs, outputs = [value("x", "batch", width), index], [value("y", "rows", width)]
    return save(path, nodes, inputs, outputs, weights, external=True)


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
