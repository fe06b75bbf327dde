"""The models that these tests serve, and what goes in and comes out of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer import Master

FakeModel = Callable[..., Path]
"""The fixture `fake_model`: writes a model of the engine "fake"."""

SharedMaster = Callable[..., Master]
"""The fixture `shared_master`: starts a master of the engine "fake" for the tests of a module."""

OnnxModel = Callable[[str], Path]
"""The fixture `onnx_model`: writes an ONNX model that is given in ONNX's text format."""

AFFINE = """
<ir_version: 8, opset_import: ["": 17]>
affine (float[batch, 4] x) => (float[batch, 4] y) <float two = {2.0}, float one = {1.0}> {
    doubled = Mul(x, two)
    y = Add(doubled, one)
}
"""
"""y = 2x + 1, in ONNX's own text format (https://onnx.ai/onnx/api/parser.html)."""

Inputs = dict[str, NDArray[Any]]


def write_fake_model(
    path: Path,
    *,
    inputs: Sequence[object] = (["x", "float32", ["batch", 4]],),
    outputs: Sequence[object] = (
        ["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}],
    ),
    **acts: object,
) -> Path:
    """Write a model of the engine "fake"; by default y = 2x + 1 on float32[batch, 4]."""
    content = {"inputs": [*inputs], "outputs": [*outputs], **acts}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def fake_master(model: Path, workers: int | str | list[int], **options: Any) -> Master:
    """A master of the engine "fake", which believes what the model declares of its split."""
    return Master(model, workers, engine="fake", verify="never", **options)


def rows(count: int, first: float = 0.0) -> Inputs:
    """So many rows for the input of the usual model, no two alike; `first` begins the first."""
    return {"x": (np.arange(count * 4, dtype=np.float32) + first).reshape(count, 4)}


def act(number: float, count: int = 1) -> Inputs:
    """Rows of one number throughout: for what the model's `when` says of it."""
    return {"x": np.full((count, 4), number, np.float32)}


def assert_answers(
    outputs: Inputs, inputs: Inputs, model: Callable[[NDArray[Any]], Any] = lambda x: x * 2 + 1
) -> None:
    """Fail unless these are the model's outputs for these inputs; by default the usual model's."""
    assert [*outputs] == ["y"]
    assert outputs["y"].dtype == inputs["x"].dtype
    np.testing.assert_array_equal(outputs["y"], model(inputs["x"]))
