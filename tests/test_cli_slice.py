"""Tests of mcinfer/cli/slice.py: what ``mcinfer slice`` prints, and what is left after failures."""

import re
import signal
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from mcinfer.cli import main
from tests.command_line import COMMAND, FLOAT, Capture, files, only_line, save
from tests.process.scripts import Program
from tests.process.waiting import wait_until

WIDTH = 256


def save_layers(folder: Path) -> Path:
    """Four MatMuls with Relu between them: x, float32[batch, 256]."""
    rng = np.random.default_rng(0)
    nodes = []
    for at, name in enumerate(("a", "b", "c", "d")):
        nodes.append(helper.make_node("MatMul", [f"r{at}" if at else "x", name], [f"m{at}"], name))
        nodes.append(helper.make_node("Relu", [f"m{at}"], ["y" if at == 3 else f"r{at + 1}"]))
    weights = {
        name: (rng.standard_normal((WIDTH, WIDTH)) / 16).astype(np.float32) for name in "abcd"
    }
    shape: list[int | str] = ["batch", WIDTH]
    return save(
        folder / "layers.onnx", nodes, [("x", FLOAT, shape)], [("y", FLOAT, shape)], weights
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_layers(tmp_path)


def test_slices_of_each_layer_are_reported(model: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    assert main(["slice", str(model), "--tensor", "2", "--output", str(output)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *lines, last = out.splitlines()
    assert lines == [
        f"{output}: layers.onnx cut for 2 ranks, each layer over 2",
        "rank  stage  file         weights  share  receives  collectives",
        "0     0      model0.onnx  0.5 MB   50%    -         2, 0.0 MB",
        "1     0      model1.onnx  0.5 MB   50%    -         2, 0.0 MB",
        "bytes that are sent: of one run with batch 1, and 64 for other symbols",
        "cut over 2 ranks: 4 weights, 1.0 MB",
    ]
    assert re.fullmatch(
        r"checked: the slices give what the model gives; largest relative difference \d\.\de-\d\d",
        last,
    )
    assert {"model0.onnx", "model1.onnx", "slices.json"} < {*files(output)}


def test_failure_is_one_line_and_leaves_nothing(
    model: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = ["--output", str(tmp_path / "out")]
    for words, text in (
        (
            [str(model), "--pipeline", "9"],
            "pipeline: got 9 stages, but the model can be cut into 8",
        ),
        ([str(tmp_path / "no.onnx"), "--tensor", "2"], "MODEL: "),
        ([__file__, "--tensor", "2"], "expected an ONNX model"),
    ):
        assert main(["slice", *words, *output]) == 1
        assert text in only_line(capsys.readouterr().err)
    assert files(tmp_path) == ["layers.onnx"]


def test_slices_are_replaced_only_with_force(model: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["slice", str(model), "--output", str(tmp_path / "out"), "--no-check"]
    assert main([*arguments, "--pipeline", "2"]) == 0
    assert main([*arguments, "--pipeline", "3"]) == 1
    line = only_line(capsys.readouterr().err)
    assert "has slices already, expected a new folder, or force (--force)" in line
    assert main([*arguments, "--pipeline", "3", "--force"]) == 0
    assert len(files(tmp_path / "out")) == 7


def save_large(folder: Path) -> Path:
    """A model that takes a while to cut and check: 64 MiB of zeros, in a sparse file."""
    path = save_layers(folder)
    model = onnx.load(path)
    width, size = 2048, 2048 * 2048 * 4
    with (folder / "zeros.bin").open("wb") as file:
        file.truncate(4 * size)
    for at, tensor in enumerate(model.graph.initializer):
        stub = TensorProto(name=tensor.name, data_type=FLOAT, dims=[width, width])
        stub.data_location = TensorProto.EXTERNAL
        for key, text in (("location", "zeros.bin"), ("offset", at * size), ("length", size)):
            stub.external_data.add(key=key, value=str(text))
        tensor.CopyFrom(stub)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_value = width
    path.write_bytes(model.SerializeToString())
    return path


def test_interrupt_ends_with_status_130_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "temporary").mkdir()
    model = save_large(tmp_path / "model")
    before = files(tmp_path)
    command = ["slice", str(model), "--tensor", "2", "--output", str(tmp_path / "out")]
    with Program(COMMAND, *command, env={"TMPDIR": str(tmp_path / "temporary")}) as program:
        wait_until(lambda: [*tmp_path.glob(".out.*.partial/segments-*")])  # the check has begun
        program.send_signal(signal.SIGINT)
        ended = program.wait()
    assert (ended.status, ended.err) == (130, "mcinfer: interrupted\n")
    assert files(tmp_path) == before
    assert files(tmp_path / "temporary") == []
