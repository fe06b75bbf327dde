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
from mcinfer.large_batches import reading
from tests.command_line import FLOAT, Capture, files, only_line, save, save_double


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


def test_output_is_a_file_like_any_other(double: Path, batch: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"
    mask = os.umask(0o027)
    try:
        arguments = ["run", str(double), "--input", str(batch), "--output", str(output)]
        assert main([*arguments, "--devices", "1"]) == 0
    finally:
        os.umask(mask)
    assert stat.S_IMODE(output.stat().st_mode) == 0o640


# Several requests.


def call(model: Path, source: Path, output: Path, *options: str) -> int:
    arguments = ["run", str(model), "--input", str(source), "--output", str(output)]
    return main([*arguments, "--devices", "1", *options])


def loaded(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path, allow_pickle=False) as content:
        return dict(content)


@pytest.mark.parametrize("form", ["stored", "compressed", "fortran", "npy"])
def test_batch_in_several_requests_gives_what_it_gives_in_one(
    double: Path, tmp_path: Path, capsys: Capture, form: str
) -> None:
    x = np.random.default_rng(1).random((7, 3), np.float32)
    source, output = tmp_path / f"in.{'npy' if form == 'npy' else 'npz'}", tmp_path / "out.npz"
    if form == "npy":
        np.save(source, x)
    else:
        store = np.savez_compressed if form == "compressed" else np.savez
        store(source, x=np.asfortranarray(x) if form == "fortran" else x)
    assert call(double, source, output, "--batch", "3") == 0
    assert capsys.readouterr() == ("y: float32[7, 3]\n", "")
    assert loaded(output)["y"].tobytes() == (2 * x).tobytes()
    assert files(tmp_path) == ["double.onnx", source.name, "out.npz"]


def test_strings_and_what_goes_whole_are_in_each_request(tmp_path: Path) -> None:
    model = save(
        tmp_path / "model.onnx",
        [
            helper.make_node("Mul", ["x", "scale"], ["scaled"]),
            helper.make_node("Identity", ["s"], ["text"]),
            helper.make_node("Identity", ["scale"], ["same"]),
        ],
        [
            ("x", FLOAT, [2, "batch"]),
            ("s", TensorProto.STRING, ["batch"]),
            ("scale", FLOAT, []),
        ],
        [
            ("scaled", FLOAT, [2, "batch"]),
            ("text", TensorProto.STRING, ["batch"]),
            ("same", FLOAT, []),
        ],
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    words = np.array(["a", "", "c", "longer", "ü"])
    np.savez(source, x=x, s=words, scale=np.float32(3))
    assert call(model, source, output, "--batch", "2") == 0
    got = loaded(output)
    np.testing.assert_array_equal(got["scaled"], 3 * x)
    assert (got["text"].tolist(), got["text"].dtype) == (words.tolist(), np.dtype("<U6"))
    assert got["same"] == np.float32(3)


@pytest.mark.parametrize("rows", ["1", "5", "100"])
def test_fixed_batch_runs_in_multiples_of_it(tmp_path: Path, capsys: Capture, rows: str) -> None:
    model = save(
        tmp_path / "fixed.onnx",
        [helper.make_node("CumSum", ["x", "axis"], ["y"])],
        [("x", FLOAT, [2])],
        [("y", FLOAT, [2])],
        {"axis": np.array(0, np.int64)},
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.ones(8, np.float32))
    assert call(model, source, output, "--batch", rows) == 0
    assert capsys.readouterr().out == "y: float32[8]\n"
    assert loaded(output)["y"].tolist() == [1, 2] * 4


def test_model_without_a_known_batch_runs_whole(tmp_path: Path) -> None:
    model = save(
        tmp_path / "cumsum.onnx",
        [helper.make_node("CumSum", ["x", "axis"], ["y"])],
        [("x", FLOAT, ["length"])],
        [("y", FLOAT, ["length"])],
        {"axis": np.array(0, np.int64)},
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.ones(8, np.float32))
    assert call(model, source, output, "--batch", "2") == 0
    assert loaded(output)["y"].tolist() == [*range(1, 9)]


def test_batch_of_no_rows_gives_none(double: Path, tmp_path: Path, capsys: Capture) -> None:
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.ones((0, 3), np.float32))
    assert call(double, source, output) == 0
    assert capsys.readouterr().out == "y: float32[0, 3]\n"
    assert loaded(output)["y"].shape == (0, 3)


def test_output_over_all_rows_is_named_where_it_differs_between_requests(
    tmp_path: Path, capsys: Capture
) -> None:
    model = save(
        tmp_path / "sum.onnx",
        [helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0)],
        [("x", FLOAT, ["batch"])],
        [("total", FLOAT, [])],
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.arange(8, dtype=np.float32))
    assert call(model, source, output, "--batch", "4") == 1
    assert "output 'total' has no batch dimension and differs" in only_line(capsys.readouterr().err)
    assert call(model, source, output, "--batch", "8", "--restart") == 0
    assert loaded(output)["total"] == 28


def test_requests_of_no_rows_are_wrong_usage(capsys: Capture) -> None:
    arguments = ["run", "model.onnx", "--input", "x.npz", "--output", "y.npz", "--batch", "0"]
    assert main(arguments) == 2
    assert "--batch" in capsys.readouterr().err


# What is done stays.


@pytest.fixture
def gather(tmp_path: Path) -> Path:
    """Fails for rows of 3 and more."""
    return save(
        tmp_path / "gather.onnx",
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        [("i", TensorProto.INT64, ["batch"])],
        [("y", FLOAT, ["batch"])],
        {"table": np.array([5, 6, 7], np.float32)},
    )


def test_failure_in_the_middle_keeps_what_is_done_and_other_work_does_not_touch_it(
    gather: Path, tmp_path: Path, capsys: Capture
) -> None:
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, i=np.array([0, 1, 2, 0, 99, 1]))
    partial = tmp_path / ".out.npz.partial"
    assert call(gather, source, output, "--batch", "2") == 1
    line = only_line(capsys.readouterr().err)
    assert "Gather" in line
    assert line.endswith("; 4 of 6 rows are done and kept: the same command goes on there")
    assert (partial / "0.rows").read_bytes() == np.array([5, 6, 7, 5], np.float32).tobytes()

    assert call(gather, source, output, "--batch", "2") == 1
    told, line = capsys.readouterr().err.splitlines()
    assert told == "mcinfer: going on at row 4 of 6"
    assert "4 of 6 rows are done and kept" in line

    assert call(gather, source, output, "--batch", "3") == 1
    line = only_line(capsys.readouterr().err)
    assert f"--output: {partial} holds what was done of other work, with another --batch;" in line

    np.savez(source, i=np.array([0, 1, 2, 0, 2, 1]))
    assert call(gather, source, output, "--batch", "2") == 1
    assert "of other work, with another input; --restart" in only_line(capsys.readouterr().err)
    gather.touch()
    assert call(gather, source, output, "--batch", "2") == 1
    assert "of other work, with another model, input;" in only_line(capsys.readouterr().err)
    assert not output.exists()

    assert call(gather, source, output, "--batch", "2", "--restart") == 0
    assert loaded(output)["y"].tolist() == [5, 6, 7, 5, 7, 6]
    assert files(tmp_path) == ["gather.onnx", "in.npz", "out.npz"]


def test_what_came_of_a_damaged_file_is_not_kept(
    double: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_CHECKED_BYTES", 0)
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    content = bytearray(npz(x=np.ones((100, 3), np.float32)))
    content[300] ^= 0xFF
    source.write_bytes(content)
    assert call(double, source, output, "--batch", "20") == 1
    assert f"--input: {source} is not an .npz file: " in only_line(capsys.readouterr().err)
    assert files(tmp_path) == ["double.onnx", "in.npz"]


def test_older_output_stays_until_the_new_one_is_whole(gather: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    output.write_bytes(b"of an earlier run")
    np.savez(source, i=np.array([0, 99]))
    assert call(gather, source, output, "--batch", "1") == 1
    assert output.read_bytes() == b"of an earlier run"


# Failures: status 1, one line; and nothing is left.


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
    assert main(["run", "none.onnx", "--input", source, "--output", "out.npz"]) == 1
    assert only_line(capsys.readouterr().err).endswith(f"No such file or directory: '{source}'")


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
