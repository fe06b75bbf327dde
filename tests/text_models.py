"""Models as tests write them: a graph in ONNX's text form, weights as arrays."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper, parser

_COLLECTIVE = re.compile(r"(?<![.\w])(AllReduce|AllGather)\b")


def text_model(
    text: str, weights: Mapping[str, Any] | None = None, *, opset: int = 17, functions: str = ""
) -> ModelProto:
    """A model of ``(float[n] x) => (float[n] y) { y = Relu(x) }`` and the like, and of weights by name.

    Collectives need no domain; `functions` are those of the domain `own`, as text.
    """
    head = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1, "own": 1]> g '
    model = parser.parse_model(head + _COLLECTIVE.sub(r"com.microsoft.\1", text) + functions)
    for name, value in (weights or {}).items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return model
