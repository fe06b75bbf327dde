"""Tests of mcinfer/cli/run.py: what ``mcinfer run`` reads, writes and refuses."""

import io
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from mcinfer.cli import main
from tests.command_line import FLOAT, Capture, files, only_line, save, save_double
from tests.test_large_batches_running import call


@pytest.fixture
def double(tmp_path: Path) -> Path:
    return save_double(tmp_path)


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    path = tmp_path / "in.npz"
    np.savez(path, x=np.arange(15, dtype=np.float32).reshape(5, 3))
    return path


# What works.


@pytest.mark.parametrize("devices", [[], ["--devices", "2"], ["--devices", "cpu:0"]], ids=str)
def test_run_writes_what_the_model_gives(
    double: Path, batch: Path, tmp_path: Path, capsys: Capture, devices: list[str]
) -> None:
    output = tmp_path / "out.npz"
    arguments = ["run", str(double), "--input", str(batch), "--output", str(output), *devices]
    assert main(arguments) == 0
    assert capsys.readouterr() == ("y: float32[5, 3]\n", "")
    with np.load(output) as content:
        assert [*content] == ["y"]
        assert np.array_equal(content["y"], 2 * np.arange(15, dtype=np.float32).reshape(5, 3))
    assert files(tmp_path) == ["double.onnx", "in.npz", "out.npz"]


def test_outputs_of_any_name_and_strings_can_be_written(tmp_path: Path, capsys: Capture) -> None:
    names = ["file", "args", "allow_pickle", "/layer/0"]
    model = save(
        tmp_path / "names.onnx",
        [helper.make_node("Neg", ["x"], [name]) for name in names]
        + [helper.make_node("Identity", ["s"], ["text"])],
        [("x", FLOAT, ["batch"]), ("s", TensorProto.STRING, ["batch"])],
        [(name, FLOAT, ["batch"]) for name in names] + [("text", TensorProto.STRING, ["batch"])],
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.array([1, 2], np.float32), s=np.array(["ü", "bc"]))
    arguments = ["run", str(model), "--input", str(source), "--output", str(output)]
    assert main([*arguments, "--devices", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "text: string[2]"
    with np.load(output, allow_pickle=False) as content:
        assert [*content] == [*names, "text"]
        assert content["file"].tolist() == [-1, -2]
        assert content["text"].tolist() == ["ü", "bc"]


def test_output_is_a_file_like_any_other_where_a_link_leads(
    double: Path, batch: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    link, output = tmp_path / "out.npz", tmp_path / "folder" / "out.npz"
    link.symlink_to(output)
    mask = os.umask(0o027)
    try:
        arguments = ["run", str(double), "--input", str(batch), "--output", str(link)]
        assert main([*arguments, "--devices", "1"]) == 0
    finally:
        os.umask(mask)
    assert link.is_symlink()
    assert stat.S_IMODE(output.stat().st_mode) == 0o640
    assert files(tmp_path / "folder") == ["out.npz"]


@pytest.mark.parametrize(
    "words",
    [
        ["--batch", "0"],
        ["--timeout", "0"],
        ["--batch-axis", "x"],
        ["--batch-axis", "=0"],
        ["--batch-axis", "x=-1"],
        ["--batch-axis", "x=some"],
        ["--batch-axis", "x=0", "--batch-axis", "x=1"],
        ["--output-axis", "y"],
        ["--output-axis", "y=0", "--output-axis", "y=none"],
    ],
    ids=" ".join,
)
def test_options_that_say_nothing_are_wrong_usage(capsys: Capture, words: list[str]) -> None:
    arguments = ["run", "model.onnx", "--input", "x.npz", "--output", "y.npz", *words]
    assert main(arguments) == 2
    assert words[0] in capsys.readouterr().err


def test_model_of_another_kind_is_loaded_by_its_engine(
    batch: Path, tmp_path: Path, capsys: Capture
) -> None:
    model = tmp_path / "model.ms"
    model.write_bytes(b"of MindSpore Lite")
    assert call(model, batch, tmp_path / "out.npz") == 1
    line = only_line(capsys.readouterr().err).lower()
    assert "mindspore" in line
    assert "onnx" not in line


# Failures: status 1, one line; and nothing is left.


def test_input_is_not_written_over(
    double: Path, batch: Path, tmp_path: Path, capsys: Capture
) -> None:
    content = batch.read_bytes()
    assert call(double, batch, batch) == 1
    assert f"--output: {batch} is the file of --input " in only_line(capsys.readouterr().err)
    assert batch.read_bytes() == content
    assert files(tmp_path) == ["double.onnx", "in.npz"]


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_input_that_is_no_regular_file_is_named(
    double: Path, tmp_path: Path, capsys: Capture, kind: str
) -> None:
    source = tmp_path / "source"
    if kind == "pipe":
        os.mkfifo(source)
    else:
        source.mkdir()
    assert call(double, source, tmp_path / "out.npz") == 1
    assert str(source) in only_line(capsys.readouterr().err)
    assert files(tmp_path) == ["double.onnx", "source"]


def test_single_array_for_several_inputs_is_told(tmp_path: Path, capsys: Capture) -> None:
    model = save(
        tmp_path / "add.onnx",
        [helper.make_node("Add", ["a", "b"], ["y"])],
        [("a", FLOAT, ["batch"]), ("b", FLOAT, ["batch"])],
        [("y", FLOAT, ["batch"])],
    )
    np.save(tmp_path / "in.npy", np.ones(3, np.float32))
    assert call(model, tmp_path / "in.npy", tmp_path / "out.npz") == 1
    line = only_line(capsys.readouterr().err)
    assert line.endswith("in.npy holds one array, expected an .npz file with ['a', 'b']")
    assert files(tmp_path) == ["add.onnx", "in.npy"]


def test_missing_output_folder_is_told_before_the_work(tmp_path: Path, capsys: Capture) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros(3, np.float32))
    output = tmp_path / "none" / "y.npz"
    arguments = ["--input", str(tmp_path / "x.npz"), "--output", str(output)]
    assert main(["run", str(tmp_path / "no-model-either.onnx"), *arguments]) == 1
    assert f"no folder {tmp_path / 'none'}" in only_line(capsys.readouterr().err)


def npz(**arrays: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=True, **arrays)
    return file.getvalue()


def broken_inside() -> bytes:
    """A compressed archive with bits of its data turned over."""
    file = io.BytesIO()
    np.savez_compressed(file, x=np.random.default_rng(1).random(1000))
    data = bytearray(file.getvalue())
    data[100:200] = bytes(100)
    return bytes(data)


def enormous() -> bytes:
    """An array that says it is of petabytes."""
    header = io.BytesIO()
    shape = {"descr": "<f4", "fortran_order": False, "shape": (1 << 50,)}
    np.lib.format.write_array_header_1_0(header, shape)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    return file.getvalue()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: b"", "is not an .npz file"),
        (lambda: b"hello", "is not an .npz file"),
        (lambda: b"PK\x03\x04 cut off", "is not an .npz file"),
        (lambda: npz(x=np.ones(1000))[:-100], "is not an .npz file"),
        (lambda: npz(x=np.array([None])), "is not an .npz file: Object arrays"),
        (broken_inside, "is not an .npz file"),
        (enormous, "is not an .npz file"),
    ],
    ids=["empty", "text", "zip?", "cut off", "pickle", "broken inside", "enormous"],
)
def test_input_that_is_no_npz_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: Capture, make: Callable[[], bytes], text: str
) -> None:
    source = tmp_path / "in.npz"
    source.write_bytes(make())
    output = tmp_path / "out.npz"
    # There is no such model, and it does not come to that.
    assert main(["run", "none.onnx", "--input", str(source), "--output", str(output)]) == 1
    line = only_line(capsys.readouterr().err)
    assert line.startswith(f"mcinfer: --input: {source} {text}")
    assert files(tmp_path) == ["in.npz"]


def test_input_that_is_not_there_is_named(tmp_path: Path, capsys: Capture) -> None:
    source = str(tmp_path / "none.npz")
    output = str(tmp_path / "out.npz")
    assert main(["run", "none.onnx", "--input", source, "--output", output]) == 1
    line = only_line(capsys.readouterr().err)
    assert line == f"mcinfer: --input: {source}: No such file or directory"


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"q": np.ones((2, 3), np.float32)}, "inputs: unknown ['q'], missing ['x']"),
        ({"x": np.ones((2, 3))}, "input 'x' has dtype float64, expected float32"),
        ({"x": np.ones((2, 4), np.float32)}, "input 'x' has size 4 in dimension 1, expected 3"),
    ],
    ids=["name", "dtype", "shape"],
)
def test_input_that_does_not_fit_the_model_leaves_the_old_output(
    double: Path, tmp_path: Path, capsys: Capture, arrays: dict[str, NDArray[Any]], text: str
) -> None:
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    source.write_bytes(npz(**arrays))
    output.write_bytes(b"of an earlier run")
    arguments = ["run", str(double), "--input", str(source), "--output", str(output)]
    assert main([*arguments, "--devices", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert text in only_line(err)
    assert output.read_bytes() == b"of an earlier run"
    assert files(tmp_path) == ["double.onnx", "in.npz", "out.npz"]


def test_run_that_fails_says_so_and_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    model = save(
        tmp_path / "gather.onnx",
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        [("i", TensorProto.INT64, ["batch"])],
        [("y", FLOAT, ["batch"])],
        {"table": np.ones(3, np.float32)},
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, i=np.array([0, 99]))
    arguments = ["run", str(model), "--input", str(source), "--output", str(output)]
    assert main([*arguments, "--devices", "1"]) == 1
    assert "Gather" in only_line(capsys.readouterr().err)
    assert files(tmp_path) == ["gather.onnx", "in.npz"]


@pytest.mark.parametrize("where", ["none/out.npz", "folder"])
def test_output_that_cannot_be_written_is_named_and_nothing_is_left(
    double: Path, batch: Path, tmp_path: Path, capsys: Capture, where: str
) -> None:
    (tmp_path / "folder" / "full").mkdir(parents=True)
    output = tmp_path / where
    arguments = ["run", str(double), "--input", str(batch), "--output", str(output)]
    assert main([*arguments, "--devices", "1"]) == 1
    assert where.partition("/")[0] in only_line(capsys.readouterr().err)
    assert files(tmp_path) == ["double.onnx", "folder", "in.npz"]
    assert files(tmp_path / "folder") == ["full"]
