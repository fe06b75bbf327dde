"""Tests of mcinfer/cli/run.py: what ``mcinfer run`` reads, writes, refuses and keeps."""

import os
import stat
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from mcinfer.cli import main
from tests.command_line import (
    FLOAT,
    Arrays,
    Capture,
    Case,
    Value,
    call,
    files,
    loaded,
    only_line,
    save,
    save_double,
)


@pytest.fixture
def double(tmp_path: Path) -> Path:
    return save_double(tmp_path)


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    path = tmp_path / "in.npz"
    np.savez(path, x=np.arange(15, dtype=np.float32).reshape(5, 3))
    return path


@pytest.fixture
def case(tmp_path: Path, capsys: Capture) -> Case:
    return Case(tmp_path, capsys)


def test_output_follows_a_link(double: Path, batch: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "folder").mkdir()
    link, output = tmp_path / "link.npz", tmp_path / "folder" / "out.npz"
    link.symlink_to(output)
    mask = os.umask(0o027)
    try:
        assert main(["run", str(double), "--input", str(batch), "--output", str(link)]) == 0
    finally:
        os.umask(mask)
    assert capsys.readouterr() == ("y: float32[5, 3]\n", "")
    expected = 2 * np.arange(15, dtype=np.float32).reshape(5, 3)
    np.testing.assert_array_equal(loaded(output)["y"], expected)
    assert link.is_symlink()
    assert stat.S_IMODE(output.stat().st_mode) == 0o640
    assert files(tmp_path / "folder") == ["out.npz"]


def test_only_output_is_written_as_an_npy_file(
    double: Path, batch: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ["--input", str(batch), "--output", str(tmp_path / "out.npy"), "--batch", "2"]
    assert main(["run", str(double), *words]) == 0
    assert capsys.readouterr() == ("y: float32[5, 3]\n", "")
    expected = 2 * np.arange(15, dtype=np.float32).reshape(5, 3)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
    nodes = [helper.make_node("Identity", ["x"], [name]) for name in ("y", "z")]
    outputs: list[Value] = [(name, FLOAT, ["batch", 3]) for name in ("y", "z")]
    both = save(tmp_path / "both.onnx", nodes, [("x", FLOAT, ["batch", 3])], outputs)
    assert main(["run", str(both), *words, "--force"]) == 1
    line = only_line(capsys.readouterr().err)
    assert line.endswith("out.npy holds one array, expected an .npz file for ['y', 'z']")
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_strings_and_what_goes_whole_are_in_each_request(case: Case) -> None:
    pairs = [("s", "text"), ("scale", "same")]
    inputs: list[Value] = [
        ("x", FLOAT, [2, "batch"]),
        ("s", TensorProto.STRING, ["batch"]),
        ("scale", FLOAT, []),
    ]
    outputs: list[Value] = [
        ("file", FLOAT, [2, "batch"]),  # a parameter of NumPy's function that saves
        ("text", TensorProto.STRING, ["batch"]),
        ("same", FLOAT, []),
    ]
    nodes = [helper.make_node("Identity", [source], [target]) for source, target in pairs]
    nodes.append(helper.make_node("Mul", ["x", "scale"], ["file"]))
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    words = np.array(["a", "", "c", "longer", "ü"])
    arrays: Arrays = {"x": x, "s": words, "scale": np.array(3, np.float32)}
    err = case.run(save(case.folder / "model.onnx", nodes, inputs, outputs), arrays, "--batch", "2")
    assert "output 'same' has no batch dimension" in only_line(err)
    assert loaded(case.output)["text"].dtype == np.dtype("<U6")


def test_batch_of_no_rows_gives_none(double: Path, case: Case) -> None:
    case.run(double, {"x": np.ones((0, 3), np.float32)})
    assert loaded(case.output)["y"].shape == (0, 3)


# Failures: status 1, one line; no file is left.


def test_output_needs_force(double: Path, batch: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out.npz"
    output.write_bytes(b"of an earlier run")
    words = ["run", str(double), "--input", str(batch), "--output", str(output), "--devices", "1"]
    assert main(words) == 1
    line = only_line(capsys.readouterr().err)
    assert line == f"mcinfer: --output: {output} exists; --force replaces it"
    assert output.read_bytes() == b"of an earlier run"
    assert main([*words, "--force"]) == 0
    assert loaded(output)["y"].shape == (5, 3)


@pytest.mark.parametrize(
    ("name", "what"), [("double.onnx", "MODEL"), ("weights.bin", "MODEL"), ("in.npz", "--input")]
)
def test_model_and_input_are_never_written_over(
    double: Path, batch: Path, tmp_path: Path, capsys: Capture, name: str, what: str
) -> None:
    content = onnx.load(double)
    array = np.ones(3000, np.float32)
    content.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    onnx.save(content, double, save_as_external_data=True, location="weights.bin")
    before = (tmp_path / name).read_bytes()
    (tmp_path / "same.npz").hardlink_to(tmp_path / name)
    assert call(double, batch, tmp_path / "same.npz") == 1
    assert f"is the file of {what} " in only_line(capsys.readouterr().err)
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize(
    ("model", "source"),
    [("none.onnx", "in.npz"), ("double.onnx", "none"), ("double.onnx", "pipe")],
)
def test_unreadable_file_is_named(
    double: Path, batch: Path, tmp_path: Path, capsys: Capture, model: str, source: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert call(tmp_path / model, tmp_path / source, tmp_path / "out.npz") == 1
    wrong = source if model == double.name else model
    assert str(tmp_path / wrong) in only_line(capsys.readouterr().err)
    assert files(tmp_path) == [double.name, batch.name, "pipe"]


@pytest.mark.parametrize("name", ["none/y.npz", "folder.npz", "y.csv"])
def test_unwritable_output_is_named_first(tmp_path: Path, capsys: Capture, name: str) -> None:
    (tmp_path / "folder.npz").mkdir()
    assert call(tmp_path / "none.onnx", tmp_path / "none.npz", tmp_path / name) == 1
    assert only_line(capsys.readouterr().err).startswith("mcinfer: --output: ")
    assert files(tmp_path) == ["folder.npz"]


def test_single_array_for_several_inputs_is_refused(tmp_path: Path, capsys: Capture) -> None:
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    inputs: list[Value] = [("a", FLOAT, ["batch"]), ("b", FLOAT, ["batch"])]
    model = save(tmp_path / "add.onnx", nodes, inputs, [("y", FLOAT, ["batch"])])
    np.save(tmp_path / "in.npy", np.ones(3, np.float32))
    assert call(model, tmp_path / "in.npy", tmp_path / "out.npz") == 1
    line = only_line(capsys.readouterr().err)
    assert line.endswith("in.npy holds one array, expected an .npz file with ['a', 'b']")


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"q": np.ones((2, 3), np.float32)}, "got arrays ['q'], expected ['x']"),
        ({"x": np.ones((2, 3))}, "input 'x' has dtype float64, expected float32"),
    ],
    ids=["name", "dtype"],
)
def test_wrong_input_keeps_the_old_output(
    double: Path, case: Case, arrays: Arrays, text: str
) -> None:
    case.output.write_bytes(b"of an earlier run")
    assert text in case.fail(double, arrays)
    assert case.output.read_bytes() == b"of an earlier run"
    assert files(case.folder) == ["double.onnx", "in.npz", "out.npz"]


def test_results_are_kept_after_a_failure_and_other_work(tmp_path: Path, capsys: Capture) -> None:
    gather = save(
        tmp_path / "gather.onnx",
        [helper.make_node("Gather", ["table", "i"], ["y"])],  # fails for rows of 3 and more
        [("i", TensorProto.INT64, ["batch"])],
        [("y", FLOAT, ["batch"])],
        {"table": np.array([5, 6, 7], np.float32)},
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    partial = tmp_path / ".out.npz.partial"

    def failure(batch: int = 2) -> list[str]:
        assert call(gather, source, output, "--batch", str(batch)) == 1
        return capsys.readouterr().err.splitlines()

    np.savez(source, i=np.array([0, 1, 2, 0, 99, 1]))
    (line,) = failure()
    assert "Gather" in line
    assert line.endswith("; 4 of 6 rows are kept; run the same command again to resume")
    assert partial.stat().st_mode & 0o777 == 0o600

    gather.touch()
    source.touch()
    resumed, line = failure()
    assert resumed == "mcinfer: resuming at row 4 of 6"
    assert "4 of 6 rows are kept" in line

    (line,) = failure(batch=3)
    assert f"--output: {partial} holds the results of other work, with another --batch;" in line
    np.savez(source, i=np.array([0, 1, 2, 0, 2, 1]))
    (line,) = failure()
    assert "of other work, with another input; --restart" in line
    with gather.open("ab") as file:
        file.write(b"\x12\x00")  # an empty name of the producer
    (line,) = failure()
    assert "of other work, with another model, input;" in line
    assert not output.exists()

    assert call(gather, source, output, "--batch", "2", "--restart") == 0
    assert loaded(output)["y"].tolist() == [5, 6, 7, 5, 7, 6]
    assert files(tmp_path) == ["gather.onnx", "in.npz", "out.npz"]
