"""Shared by tests of the command line: models, runs of batches, and the text of failures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, parser

from mcinfer.cli import main

FLOAT = TensorProto.FLOAT
COMMAND = "import sys; from mcinfer.cli import main; sys.exit(main(sys.argv[1:]))"

Arrays = dict[str, NDArray[Any]]
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
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    shape: list[int | str] = ["batch", 3]
    return save(folder / "double.onnx", nodes, [("x", FLOAT, shape)], [("y", FLOAT, shape)])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def only_line(text: str) -> str:
    """The one line of a failure."""
    (line,) = text.splitlines()
    assert line.startswith("mcinfer: ")
    return line


def call(model: Path, source: Path, output: Path, *options: str) -> int:
    """Run in this process unless the options name devices; an existing file is replaced."""
    arguments = ["run", str(model), "--input", str(source), "--output", str(output)]
    return main([*arguments, "--devices", "inline", "--force", *options])


def loaded(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as content:
        return dict(content)


class Case:
    """Runs batches, and compares the output with ONNX Runtime's own answer."""

    def __init__(self, folder: Path, capsys: Capture) -> None:
        self.folder, self.capsys = folder, capsys
        self.output = folder / "out.npz"

    def run(self, model: str | Path, inputs: Arrays, *words: str, equal: bool = True) -> str:
        """The standard error of a run that succeeds."""
        path = self.written(model)
        status, err = self.end(path, inputs, *words)
        assert status == 0, err
        if equal:
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            names = [output.name for output in session.get_outputs()]
            got = loaded(self.output)
            assert [*got] == names
            for name, array in zip(names, session.run(names, inputs), strict=True):
                np.testing.assert_array_equal(got[name], array, name)
        return err

    def fail(self, model: str | Path, inputs: Arrays, *words: str) -> str:
        """The line of a run that fails."""
        status, err = self.end(model, inputs, *words)
        assert status == 1
        return only_line(err)

    def end(self, model: str | Path, inputs: Arrays, *words: str) -> tuple[int, str]:
        np.savez(self.folder / "in.npz", allow_pickle=False, **inputs)
        status = call(self.written(model), self.folder / "in.npz", self.output, *words)
        return status, self.capsys.readouterr().err

    def written(self, model: str | Path) -> Path:
        """A model's file; the text of a model names dimensions only for the parser."""
        if isinstance(model, Path):
            return model
        parsed = parser.parse_model(model)
        for value in (*parsed.graph.input, *parsed.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param and dim.dim_param != "batch":
                    dim.ClearField("dim_param")
        onnx.save(parsed, self.folder / "model.onnx")
        return self.folder / "model.onnx"
