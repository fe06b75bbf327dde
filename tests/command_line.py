"""What tests of the command line have in common: models to run, and how failures are to be told."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

FLOAT = TensorProto.FLOAT

Capture = pytest.CaptureFixture[str]
Value = tuple[str, int, Sequence[int | str | None]]


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    constants: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [onnx.numpy_helper.from_array(a, name) for name, a in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def save_double(folder: Path) -> Path:
    """A model that adds its input, float32[batch, 3], to itself."""
    return save(
        folder / "double.onnx",
        [helper.make_node("Add", ["x", "x"], ["y"])],
        [("x", FLOAT, ["batch", 3])],
        [("y", FLOAT, ["batch", 3])],
    )


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def only_line(text: str) -> str:
    """The one line that a failure has to say."""
    (line,) = text.splitlines()
    assert line.startswith("mcinfer: ")
    return line
