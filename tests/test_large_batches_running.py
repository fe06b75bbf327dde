"""Tests of mcinfer/large_batches/running.py: a batch in several requests, and what is done of it."""

import json
import os
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
    axes = ["--batch-axis", "x=0", "--output-axis", "y=0"]
    assert call(model, source, output, "--batch", rows, *axes) == 0
    assert capsys.readouterr().out == "y: float32[8]\n"
    assert loaded(output)["y"].tolist() == [1, 2] * 4


def test_rows_of_a_model_that_takes_one_are_runs(tmp_path: Path, capsys: Capture) -> None:
    model = save(
        tmp_path / "one.onnx",
        [helper.make_node("CumSum", ["x", "axis"], ["y"])],
        [("x", FLOAT, [1, 2])],
        [("y", FLOAT, [1, 2])],
        {"axis": np.array(0, np.int64)},
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    np.savez(source, x=x)
    assert call(model, source, output, "--batch", "2") == 0
    assert capsys.readouterr() == ("y: float32[5, 2]\n", "")
    np.testing.assert_array_equal(loaded(output)["y"], x)


def test_batch_of_no_rows_gives_none(double: Path, tmp_path: Path, capsys: Capture) -> None:
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.ones((0, 3), np.float32))
    assert call(double, source, output) == 0
    assert capsys.readouterr().out == "y: float32[0, 3]\n"
    assert loaded(output)["y"].shape == (0, 3)


def test_output_that_is_the_same_in_all_requests_is_told(tmp_path: Path, capsys: Capture) -> None:
    model = save(
        tmp_path / "model.onnx",
        [
            helper.make_node("Mul", ["scale", "scale"], ["square"]),
            helper.make_node("Mul", ["x", "scale"], ["y"]),
        ],
        [("x", FLOAT, ["batch"]), ("scale", FLOAT, [1])],
        [("square", FLOAT, [1]), ("y", FLOAT, ["batch"])],
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.array([1, 2, 3, 4], np.float32), scale=np.array([3], np.float32))
    assert call(model, source, output, "--batch", "2") == 0
    line = only_line(capsys.readouterr().err)
    assert line == (
        "mcinfer: output 'square' has no batch dimension: it was the same in all 2 requests, one is written"
    )
    assert loaded(output)["square"].tolist() == [9]
    assert loaded(output)["y"].tolist() == [3, 6, 9, 12]


def test_types_that_numpy_lacks_are_stored_as_raw_bytes(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = TensorProto.BFLOAT16
    model = save(
        tmp_path / "model.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", kind, ["batch"])],
        [("y", kind, ["batch"])],
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.array([1.5, 2], ml_dtypes.bfloat16))
    assert call(model, source, output) == 0
    assert loaded(output)["y"].view(ml_dtypes.bfloat16).tolist() == [1.5, 2]


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

    gather.touch()
    source.touch()
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
    with gather.open("ab") as file:
        file.write(b"\x12\x00")  # whoever made it: nobody
    assert call(gather, source, output, "--batch", "2") == 1
    assert "of other work, with another model, input;" in only_line(capsys.readouterr().err)
    assert not output.exists()

    assert call(gather, source, output, "--batch", "2", "--restart") == 0
    assert loaded(output)["y"].tolist() == [5, 6, 7, 5, 7, 6]
    assert files(tmp_path) == ["gather.onnx", "in.npz", "out.npz"]


def test_work_goes_on_in_as_many_shards_with_fewer_cores(
    gather: Path, tmp_path: Path, capsys: Capture
) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core has one worker")
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, i=np.array([0, 1, 2, 0, 99, 1]))
    words = ["run", str(gather), "--input", str(source), "--output", str(output), "--batch", "2"]
    state = tmp_path / ".out.npz.partial" / "state.json"
    assert main(words) == 1
    shards = json.loads(state.read_bytes())["state"]["shards"]
    assert shards > 1
    capsys.readouterr()
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert main(words) == 1
    finally:
        os.sched_setaffinity(0, cores)
    told, _ = capsys.readouterr().err.splitlines()
    assert told == "mcinfer: going on at row 4 of 6"
    assert json.loads(state.read_bytes())["state"]["shards"] == shards


def test_what_came_of_a_damaged_file_is_not_kept(
    double: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_CHECKED_BYTES", 0)
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.ones((10_000, 3), np.float32))
    content = bytearray(source.read_bytes())
    content[300] ^= 0xFF
    source.write_bytes(content)
    assert call(double, source, output, "--batch", "1000") == 1
    assert f"--input: {source} is not an .npz file: " in only_line(capsys.readouterr().err)
    assert files(tmp_path) == ["double.onnx", "in.npz"]


def test_older_output_stays_until_the_new_one_is_whole(gather: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    output.write_bytes(b"of an earlier run")
    np.savez(source, i=np.array([0, 99]))
    assert call(gather, source, output, "--batch", "1") == 1
    assert output.read_bytes() == b"of an earlier run"
