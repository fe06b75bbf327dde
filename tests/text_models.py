"""Models as tests write them: a graph in ONNX's text form, weights as arrays."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper, parser

_COLLECTIVE = re.compile(r"(?<![.\w])(AllReduce|AllGather)\b")


def text_model(
    text: str, weights: Mapping[str, Any] | None = None, *, opset: int = 17, functions: str = ""
) -> ModelProto:
    """A model of ``(float[n] x) => (float[n] y) { y = Relu(x) }`` and the like, and of weights by name.

    Args:
        text: The graph; the collectives in it need no domain.
        weights: Arrays, or the shapes of random ones.
        opset: ONNX's.
        functions: Of the domain `own`, as text.
    """
    head = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1, "own": 1]> g '
    model = parser.parse_model(head + _COLLECTIVE.sub(r"com.microsoft.\1", text) + functions)
    for name, value in (weights or {}).items():
        array = (
            normal_weights(sum(name.encode()), w=value)["w"] if isinstance(value, tuple) else value
        )
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return model


def normal_weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, NDArray[np.float32]]:
    """Random weights whose products keep the magnitude."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
