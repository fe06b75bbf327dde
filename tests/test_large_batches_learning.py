"""Tests of mcinfer/large_batches/learning.py: a file is cut only as its first rows have shown."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, parser

from mcinfer.large_batches import requests
from tests.command_line import FLOAT, Capture, files, only_line, save
from tests.test_large_batches_running import call, loaded

Arrays = dict[str, NDArray[Any]]

# As recurrent models are exported: no shape of `stateN` says what joins.
STATEFUL = """
<ir_version: 8, opset_import: ["": 17]>
stateful (float[N1, M1] input, float[2, N2, 3] state) => (float[N3, 1] output, float[A, B, C] stateN)
<int64[1] last = {-1}> {
    output = ReduceMean <axes = [1], keepdims = 1> (input)
    shape = Shape(state)
    flat = Reshape(state, last)
    doubled = Add(flat, flat)
    stateN = Reshape(doubled, shape)
}
"""

# As detectors end: which value of which row is selected.
SELECTING = """
<ir_version: 8, opset_import: ["": 17]>
selecting (float[batch, 4] x) => (int64[selected, 2] where) <float zero = {0.0}> {
    positive = Greater(x, zero)
    found = NonZero(positive)
    where = Transpose(found)
}
"""

# The same without the row's index: what is selected of a row depends on that row alone.
COMPRESSING = """
<ir_version: 8, opset_import: ["": 17]>
compressing (float[batch, 4] x) => (float[selected] values) <float zero = {0.0}, int64[1] all = {-1}> {
    positive = Greater(x, zero)
    flat = Reshape(x, all)
    chosen = Reshape(positive, all)
    values = Compress(flat, chosen)
}
"""

CENTRED = """
<ir_version: 8, opset_import: ["": 17]>
centred (float[batch, 4] x) => (float[batch, 4] y) {
    mean = ReduceMean <axes = [0], keepdims = 1> (x)
    y = Sub(x, mean)
}
"""

DOUBLE = """
<ir_version: 8, opset_import: ["": 17]>
double (float[batch, 4] x) => (float[batch, 4] y) { y = Add(x, x) }
"""

NOISY = """
<ir_version: 8, opset_import: ["": 17]>
noisy (float[batch, 4] x) => (float[batch, 4] y) {
    noise = RandomUniformLike(x)
    y = Add(x, noise)
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone: what others have learned of a model is not known."""
    path = tmp_path_factory.mktemp("cache")
    path.chmod(0o700)
    monkeypatch.setenv("MCINFER_CACHE", str(path))
    return path


def written(folder: Path, text: str) -> Path:
    path = folder / "model.onnx"
    model = parser.parse_model(text)
    # The names of its dimensions were for the parser.
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param and dim.dim_param != "batch":
                dim.ClearField("dim_param")
    onnx.save(model, path)
    return path


def store(path: Path, **arrays: NDArray[Any]) -> None:
    np.savez(path, allow_pickle=False, **arrays)


def whole_run(model: Path, inputs: Arrays) -> Arrays:
    """ONNX Runtime's own answer."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def assert_equal(got: Arrays, expected: Arrays) -> None:
    assert [*got] == [*expected]
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, name)


def stateful_rows(count: int) -> Arrays:
    random = np.random.default_rng(1)
    # Multiples of 1/8: sums of them do not depend on their order.
    values = random.integers(-8, 8, (count, 8)) / 8
    states = random.integers(-8, 8, (2, count, 3)) / 8
    return {"input": values.astype(np.float32), "state": states.astype(np.float32)}


@pytest.mark.parametrize(
    ("devices", "batch"), [("1", ["--batch", "4"]), ("2", [])], ids=["requests", "one"]
)
@pytest.mark.parametrize(
    "axes",
    [
        ["--batch-axis", "input=0", "--batch-axis", "state=1"],
        ["--batch-axis", "input=0", "--batch-axis", "state=1", "--output-axis", "stateN=1"],
        [],
    ],
    ids=["inputs", "outputs", "nothing"],
)
def test_axes_that_no_shape_says_are_learned(
    tmp_path: Path, capsys: Capture, axes: list[str], batch: list[str], devices: str
) -> None:
    model, source, output = written(tmp_path, STATEFUL), tmp_path / "in.npz", tmp_path / "out.npz"
    inputs = stateful_rows(14)
    store(source, **inputs)
    assert call(model, source, output, *axes, *batch, "--devices", devices) == 0
    assert capsys.readouterr().err == ""
    assert_equal(loaded(output), whole_run(model, inputs))


def test_equal_rows_of_one_request_are_not_joined_by_what_happens_to_agree(
    tmp_path: Path,
) -> None:
    model, source, output = written(tmp_path, STATEFUL), tmp_path / "in.npz", tmp_path / "out.npz"
    inputs = {"input": np.ones((6, 8), np.float32), "state": np.ones((2, 6, 3), np.float32)}
    store(source, **inputs)
    axes = ["--batch-axis", "input=0", "--batch-axis", "state=1"]
    assert call(model, source, output, *axes, "--devices", "2") == 0
    assert loaded(output)["stateN"].shape == (2, 6, 3)
    assert_equal(loaded(output), whole_run(model, inputs))


def test_output_axis_that_is_wrong_is_not_followed(tmp_path: Path, capsys: Capture) -> None:
    model, source, output = written(tmp_path, STATEFUL), tmp_path / "in.npz", tmp_path / "out.npz"
    inputs = stateful_rows(70)
    store(source, **inputs)
    axes = ["--batch-axis", "input=0", "--batch-axis", "state=1", "--output-axis", "stateN=0"]
    assert call(model, source, output, *axes) == 0
    line = only_line(capsys.readouterr().err)
    assert line.startswith("mcinfer: the whole file runs as one request, on one worker: ")
    assert "'stateN' joins along axis 1, --output-axis says 0" in line
    assert_equal(loaded(output), whole_run(model, inputs))


def random_rows(count: int) -> Arrays:
    return {"x": np.random.default_rng(2).normal(0, 1, (count, 4)).astype(np.float32)}


@pytest.mark.parametrize(
    ("text", "reason"),
    [(SELECTING, "output 'where' differs"), (CENTRED, "output 'y' differs")],
    ids=["index of the row", "mean of the rows"],
)
def test_file_whose_rows_depend_on_each_other_runs_whole(
    tmp_path: Path, capsys: Capture, text: str, reason: str
) -> None:
    model, source, output = written(tmp_path, text), tmp_path / "in.npz", tmp_path / "out.npz"
    store(source, **random_rows(300))
    for devices in ("1", "2"):  # the second time it is known
        assert call(model, source, output, "--devices", devices) == 0
        line = only_line(capsys.readouterr().err)
        assert "as one request, on one worker: the rows of a batch depend on each other" in line
        assert reason in line
        assert line.endswith("; --batch-axis and --output-axis say what to split and join")
        assert_equal(loaded(output), whole_run(model, random_rows(300)))
    assert call(model, source, output, "--batch", "10") == 1
    line = only_line(capsys.readouterr().err)
    assert line.startswith("mcinfer: --batch: got 10, but the file cannot be cut: the rows of")
    assert line.endswith("; --batch-axis and --output-axis say what to split and join")
    assert call(model, source, output, "--batch", "300") == 0
    assert_equal(loaded(output), whole_run(model, random_rows(300)))


def test_requests_may_give_any_number_of_rows_where_that_was_shown(
    tmp_path: Path, capsys: Capture
) -> None:
    model, source, output = (
        written(tmp_path, COMPRESSING),
        tmp_path / "in.npz",
        tmp_path / "out.npz",
    )
    store(source, **random_rows(50))
    assert call(model, source, output, "--batch", "7", "--devices", "2") == 0
    assert capsys.readouterr().err == ""
    assert_equal(loaded(output), whole_run(model, random_rows(50)))


@pytest.mark.parametrize("batch", ["1", "20"])
def test_first_rows_that_are_equal_are_followed_by_more(
    tmp_path: Path, capsys: Capture, batch: str
) -> None:
    model, source, output = written(tmp_path, DOUBLE), tmp_path / "in.npz", tmp_path / "out.npz"
    x = np.ones((40, 4), np.float32)
    x[3:] = 2
    np.savez(source, x=x)
    assert call(model, source, output, "--batch", batch) == 0
    assert capsys.readouterr().err == ""
    np.testing.assert_array_equal(loaded(output)["y"], 2 * x)


def test_split_that_no_row_shows_is_not_used(tmp_path: Path, capsys: Capture) -> None:
    model, source, output = written(tmp_path, DOUBLE), tmp_path / "in.npz", tmp_path / "out.npz"
    x = np.ones((100, 4), np.float32)
    np.savez(source, x=x)
    axes = ["--batch-axis", "x=0", "--output-axis", "y=0"]
    assert call(model, source, output, *axes) == 0
    line = only_line(capsys.readouterr().err)
    assert "the whole file runs as one request, on one worker: its first 64 rows are equal" in line
    np.testing.assert_array_equal(loaded(output)["y"], 2 * x)
    assert call(model, source, output, *axes, "--batch", "8") == 1
    line = only_line(capsys.readouterr().err)
    assert "--batch: got 8, but the file cannot be cut: its first 8 rows are equal" in line
    assert call(model, source, output, *axes, "--batch", "100") == 0
    assert capsys.readouterr().err == ""


def test_rows_for_requests_of_what_is_said_to_go_whole_are_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    model, source, output = written(tmp_path, DOUBLE), tmp_path / "in.npz", tmp_path / "out.npz"
    store(source, **random_rows(100))
    assert call(model, source, output, "--batch-axis", "x=none", "--batch", "8") == 1
    line = only_line(capsys.readouterr().err)
    assert line == "mcinfer: --batch: got 8, but --batch-axis says that every input goes whole"
    assert call(model, source, output, "--batch-axis", "x=none") == 0
    assert capsys.readouterr().err == ""
    assert_equal(loaded(output), whole_run(model, random_rows(100)))


def test_random_model_is_split_where_its_symbols_say_so(tmp_path: Path, capsys: Capture) -> None:
    model, source, output = written(tmp_path, NOISY), tmp_path / "in.npz", tmp_path / "out.npz"
    x = np.arange(400, dtype=np.float32).reshape(100, 4)
    np.savez(source, x=x)
    assert call(model, source, output, "--batch", "10") == 0
    line = only_line(capsys.readouterr().err)
    assert line == ("mcinfer: requests are split without a check: two runs of the same rows differ")
    np.testing.assert_allclose(loaded(output)["y"], x + 0.5, atol=0.5)


def test_input_that_is_as_long_as_the_batch_by_chance_goes_whole(
    tmp_path: Path, capsys: Capture
) -> None:
    model = save(
        tmp_path / "model.onnx",
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        [("i", TensorProto.INT64, ["rows"]), ("table", FLOAT, ["size", 2])],
        [("y", FLOAT, ["found", 2])],
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    # The first rows of both do not run together.
    inputs: Arrays = {
        "i": np.arange(9)[::-1].copy(),
        "table": np.arange(18, dtype=np.float32).reshape(9, 2),
    }
    store(source, **inputs)
    assert call(model, source, output, "--batch", "4") == 0
    assert capsys.readouterr().err == ""
    assert_equal(loaded(output), whole_run(model, inputs))


def test_bad_first_rows_are_told_with_the_runtimes_words(tmp_path: Path, capsys: Capture) -> None:
    model = save(
        tmp_path / "model.onnx",
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        [("i", TensorProto.INT64, ["batch"])],
        [("y", FLOAT, ["batch"])],
        {"table": np.arange(3, dtype=np.float32)},
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, i=np.array([99, 0, 1, 2]))
    assert call(model, source, output, "--batch", "2") == 1
    line = only_line(capsys.readouterr().err)
    assert "--batch: got 2, but the file cannot be cut: its first 2 rows do not run by them" in line
    assert "Gather" in line
    assert files(tmp_path) == ["in.npz", "model.onnx"]


@pytest.mark.parametrize(
    ("devices", "where"), [("1", "in all requests"), ("2", "from every worker")]
)
def test_requests_that_contradict_the_first_rows_are_an_error_that_says_what_to_do(
    tmp_path: Path, capsys: Capture, devices: str, where: str
) -> None:
    # An output that is the same for all rows but the last ones.
    model = save(
        tmp_path / "model.onnx",
        [
            helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
            helper.make_node("Max", ["most", "ten"], ["bound"]),
            helper.make_node("Add", ["x", "x"], ["y"]),
        ],
        [("x", FLOAT, ["batch"])],
        [("bound", FLOAT, []), ("y", FLOAT, ["batch"])],
        {"ten": np.array(10, np.float32)},
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    inputs = {"x": np.arange(20, dtype=np.float32)}
    store(source, **inputs)
    assert call(model, source, output, "--batch", "12", "--devices", devices) == 1
    line = only_line(capsys.readouterr().err)
    assert f"output 'bound' is to be the same {where}: " in line
    assert line.endswith("; --batch-axis INPUT=none for each input has it run whole")
    assert files(tmp_path) == ["in.npz", "model.onnx"]
    assert call(model, source, output, "--batch-axis", "x=none") == 0
    assert_equal(loaded(output), whole_run(model, inputs))


# Interrupted work.


@pytest.fixture
def half_done(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model, a file with a row on which it fails, and an output of which half is done."""
    model = save(
        tmp_path / "gather.onnx",
        [helper.make_node("Gather", ["table", "i"], ["y"], axis=1)],
        [("i", TensorProto.INT64, ["rows"])],
        [("y", FLOAT, [2, "found"])],
        {"table": np.arange(6, dtype=np.float32).reshape(2, 3)},
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, i=np.array([0, 1, 2, 0, 99, 1]))
    assert call(model, source, output, "--batch", "2") == 1
    return model, source, output


def test_interrupted_work_goes_on_with_its_split_also_where_nothing_is_recorded(
    half_done: tuple[Path, Path, Path], cache: Path, capsys: Capture
) -> None:
    model, source, output = half_done
    state = output.with_name(".out.npz.partial") / "state.json"
    saved = json.loads(state.read_bytes())["state"]
    assert (saved["inputs"], saved["outputs"]["y"]["axis"]) == ({"i": 0}, 1)
    shutil.rmtree(cache / "splits")
    capsys.readouterr()
    assert call(model, source, output, "--batch", "2") == 1
    going, failed = capsys.readouterr().err.splitlines()
    assert going == "mcinfer: going on at row 4 of 6"
    assert "4 of 6 rows are done and kept" in failed


@pytest.mark.parametrize(
    "changes",
    [{"outputs": {"y": 0}}, {"inputs": {"i": None}, "reason": "rows depend on each other"}],
    ids=["axis", "whole"],
)
def test_interrupted_work_does_not_go_on_with_another_split(
    half_done: tuple[Path, Path, Path], cache: Path, capsys: Capture, changes: dict[str, Any]
) -> None:
    model, source, output = half_done
    (record,) = (cache / "splits").iterdir()
    content = json.loads(record.read_bytes())
    record.write_text(json.dumps({**content, **changes}))
    capsys.readouterr()
    assert call(model, source, output, "--batch", "2") == 1
    line = only_line(capsys.readouterr().err)
    assert "holds what was done with another split of the batch" in line
    assert line.endswith("; --restart discards it")


def test_interrupted_work_goes_on_in_requests_of_the_same_size(
    half_done: tuple[Path, Path, Path],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, source, _ = half_done
    output = tmp_path / "other.npz"
    monkeypatch.setattr(requests, "_REQUEST_BYTES", 32)
    assert call(model, source, output) == 1
    state = output.with_name(".other.npz.partial") / "state.json"
    step = json.loads(state.read_bytes())["state"]["step"]
    monkeypatch.setattr(requests, "_REQUEST_BYTES", 1 << 20)
    capsys.readouterr()
    assert call(model, source, output) == 1
    assert "mcinfer: going on at row 4 of 6" in capsys.readouterr().err.splitlines()
    assert json.loads(state.read_bytes())["state"]["step"] == step


def test_checked_split_counts_for_the_sizes_that_it_was_checked_with(
    tmp_path: Path, capsys: Capture
) -> None:
    # What is added to a row's numbers are the numbers of as many other rows.
    model = save(
        tmp_path / "model.onnx",
        [helper.make_node("Add", ["x", "bias"], ["y"])],
        [("x", FLOAT, ["batch", 2]), ("bias", FLOAT, ["rows", 2])],
        [("y", FLOAT, ["out", 2])],
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    for bias in (x[:1], x):
        store(source, x=x, bias=bias)
        assert call(model, source, output, "--batch", "2") == 0
        assert capsys.readouterr().err == ""
        assert_equal(loaded(output), whole_run(model, {"x": x, "bias": bias}))


def test_whole_file_that_is_done_is_only_written_the_next_time(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source, output = written(tmp_path, DOUBLE), tmp_path / "in.npz", tmp_path / "out.npz"
    store(source, **random_rows(5))

    def full(*names: Any) -> None:
        if Path(names[1]) == output:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(*names)

    replace = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert call(model, source, output, "--devices", "2") == 1
    assert "5 of 5 rows are done and kept" in only_line(capsys.readouterr().err)
    # Now the split is recorded, and would be another one.
    assert call(model, source, output, "--devices", "2") == 0
    assert only_line(capsys.readouterr().err) == "mcinfer: going on at row 5 of 5"
    assert_equal(loaded(output), whole_run(model, random_rows(5)))
