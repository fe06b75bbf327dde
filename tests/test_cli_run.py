"""Tests of mcinfer/cli/run.py and batch.py: what is read, refused, cut, written, kept and resumed."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from mcinfer.cli import batch, main
from mcinfer.cli.batch import Requests, plan_requests
from mcinfer.master import Master
from mcinfer.sharding import Axes, SaidAxes, first_split
from mcinfer.specs import Dimension, ModelSpec, TensorSpec
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

ROOT = Path(__file__).parents[1]

# A recurrent model as frameworks export it: no shape of `stateN` says what joins.
STATEFUL = """
<ir_version: 8, opset_import: ["": 17]>
stateful (float[?, M1] input, float[2, ?, 3] state) => (float[N3, 1] output, float[A, B, C] stateN)
<int64[1] last = {-1}> {
    output = ReduceMean <axes = [1], keepdims = 1> (input)
    shape = Shape(state)
    flat = Reshape(state, last)
    doubled = Add(flat, flat)
    stateN = Reshape(doubled, shape)
}
"""

# The end of a detector: its output has the indexes of the selected values.
SELECTING = """
<ir_version: 8, opset_import: ["": 17]>
selecting (float[batch, 4] x) => (int64[selected, 2] where) <float zero = {0.0}> {
    positive = Greater(x, zero)
    found = NonZero(positive)
    where = Transpose(found)
}
"""

DOUBLE = """
<ir_version: 8, opset_import: ["": 17]>
double (float[batch, 4] x) => (float[batch, 4] y) { y = Add(x, x) }
"""

CONSTANT = """
<ir_version: 8, opset_import: ["": 17]>
constant (float[batch, 4] x) => (float[batch, 4] y) <float none = {0.0}> { y = Mul(x, none) }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache: no other test has recorded a model's split there."""
    path = tmp_path_factory.mktemp("cache")
    path.chmod(0o700)
    monkeypatch.setenv("MCINFER_CACHE", str(path))
    return path


@pytest.fixture
def double(tmp_path: Path) -> Path:
    return save_double(tmp_path)


@pytest.fixture
def case(tmp_path: Path, capsys: Capture) -> Case:
    return Case(tmp_path, capsys)


def stateful_rows(count: int) -> Arrays:
    random = np.random.default_rng(1)
    # Multiples of 1/8: sums of them do not depend on their order.
    values = random.integers(-8, 8, (count, 8)) / 8
    states = random.integers(-8, 8, (2, count, 3)) / 8
    return {"input": values.astype(np.float32), "state": states.astype(np.float32)}


def random_rows(count: int) -> Arrays:
    return {"x": np.random.default_rng(2).normal(0, 1, (count, 4)).astype(np.float32)}


WHOLE = "mcinfer: the whole file runs as one request, on one worker: "


def test_axes_are_learned_and_wrong_axes_not_used(case: Case) -> None:
    inputs = ["--batch-axis", "input=0", "--batch-axis", "state=1"]
    assert case.run(STATEFUL, stateful_rows(14), "--batch", "4", *inputs) == ""
    assert case.run(STATEFUL, stateful_rows(14), "--batch", "4", "--output-axis", "stateN=1") == ""
    err = case.run(STATEFUL, stateful_rows(70), *inputs, "--output-axis", "stateN=0")
    assert only_line(err).startswith(WHOLE)
    assert "'stateN' joins along axis 1, output_axes says 0" in err


def test_file_whose_rows_depend_on_each_other_runs_whole(case: Case) -> None:
    for _ in range(2):  # the second run reads the recorded split
        line = only_line(case.run(SELECTING, random_rows(300)))
        assert line.startswith(f"{WHOLE}the rows of a batch depend on each other")
    line = case.fail(SELECTING, random_rows(300), "--batch", "10")
    assert line.startswith("mcinfer: --batch: got 10, but the file cannot be cut: the rows of")
    assert "--batch-axis and --output-axis say" in line


def test_split_that_no_row_shows_is_not_used(case: Case) -> None:
    inputs: Arrays = {"x": np.ones((100, 4), np.float32)}
    line = only_line(case.run(CONSTANT, inputs))
    assert line.startswith(f"{WHOLE}its first 64 rows are equal")
    line = case.fail(CONSTANT, inputs, "--batch", "8")
    assert "--batch: got 8, but the file cannot be cut: its first 8 rows are equal" in line
    assert case.run(CONSTANT, inputs, "--batch-axis", "x=0", "--batch", "8") == ""
    assert case.run(DOUBLE, inputs, "--batch", "20") == ""  # rows made out of these show it


# Files.

FIVE: Arrays = {"x": np.arange(15, dtype=np.float32).reshape(5, 3)}


def test_only_output_is_written_as_an_npy_file(double: Path, case: Case, capsys: Capture) -> None:
    source, target = case.folder / "in.npy", case.folder / "out.npy"
    np.save(source, FIVE["x"])
    assert call(double, source, target, "--batch", "2") == 0
    assert capsys.readouterr() == ("y: float32[5, 3]\n", "")
    np.testing.assert_array_equal(np.load(target), 2 * FIVE["x"])
    nodes = [helper.make_node("Add", ["a", "b"], ["y"]), helper.make_node("Neg", ["a"], ["z"])]
    shape: list[int | str] = ["batch", 3]
    ends: list[list[Value]] = [[(name, FLOAT, shape) for name in names] for names in ("ab", "yz")]
    two = save(case.folder / "two.onnx", nodes, ends[0], ends[1])
    assert call(two, source, target) == 1
    line = only_line(capsys.readouterr().err)
    assert line.endswith("out.npy holds one array, expected an .npz file for ['y', 'z']")
    assert call(two, source, case.output) == 1
    line = only_line(capsys.readouterr().err)
    assert line.endswith("in.npy holds one array, expected an .npz file with ['a', 'b']")
    np.testing.assert_array_equal(np.load(target), 2 * FIVE["x"])


def test_batch_of_no_rows_gives_none(double: Path, case: Case) -> None:
    case.run(double, {"x": np.ones((0, 3), np.float32)})
    assert loaded(case.output)["y"].shape == (0, 3)


def test_output_needs_force(double: Path, case: Case, capsys: Capture) -> None:
    case.output.write_bytes(b"of an earlier run")
    words = ["run", str(double), "--input", "none.npz", "--output", str(case.output)]
    assert main(words) == 1
    line = only_line(capsys.readouterr().err)
    assert line == f"mcinfer: --output: {case.output} exists; --force replaces it"
    assert str(case.folder / "none.onnx") in case.fail(case.folder / "none.onnx", FIVE)
    assert case.output.read_bytes() == b"of an earlier run"
    case.run(double, FIVE)  # with --force


@pytest.mark.parametrize(
    ("name", "what"), [("double.onnx", "MODEL"), ("weights.bin", "MODEL"), ("in.npz", "--input")]
)
def test_model_and_input_are_never_written_over(
    double: Path, case: Case, name: str, what: str
) -> None:
    content = onnx.load(double)
    array = np.ones(3000, np.float32)
    content.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    onnx.save(content, double, save_as_external_data=True, location="weights.bin")
    np.savez(case.folder / "in.npz", allow_pickle=False, **FIVE)
    before = (case.folder / name).read_bytes()
    case.output.hardlink_to(case.folder / name)
    assert call(double, case.folder / "in.npz", case.output) == 1
    assert f"is the file of {what} " in only_line(case.capsys.readouterr().err)
    assert (case.folder / name).read_bytes() == before


def test_file_that_cannot_be_read_or_written_is_named(double: Path, case: Case) -> None:
    os.mkfifo(case.folder / "pipe")
    (case.folder / "folder.npz").mkdir()
    before = files(case.folder)
    for source, target in (
        ("none", "out.npz"),
        ("pipe", "out.npz"),
        ("none", "none/y.npz"),
        ("none", "folder.npz"),
        ("none", "y.txt"),
    ):
        assert call(double, case.folder / source, case.folder / target) == 1
        wrong = ("--input", source) if target == "out.npz" else ("--output", target)
        line = only_line(case.capsys.readouterr().err)
        assert line.startswith(f"mcinfer: {wrong[0]}: ")
        assert str(case.folder / wrong[1]) in line
        assert files(case.folder) == before
    np.save(case.folder / "in.npy", np.ones(3, np.float32))
    before = files(case.folder)
    assert call(case.folder / "none.onnx", case.folder / "in.npy", case.output) == 1
    assert str(case.folder / "none.onnx") in only_line(case.capsys.readouterr().err)
    assert files(case.folder) == before


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


@pytest.mark.parametrize("name", ["images", "a.PNG", "rows.parquet", "rows.csv"])
def test_what_a_program_has_to_read_names_the_page_with_programs(
    double: Path, case: Case, name: str
) -> None:
    source = case.folder / name
    source.mkdir() if name == "images" else source.write_bytes(b"1,2,3")
    assert call(double, source, case.output) == 1
    line = only_line(case.capsys.readouterr().err)
    assert line.startswith(f"mcinfer: --input: got {source}, expected an .npz or .npy file; ")
    [page] = re.findall(r"docs/\S+\.md", line)
    assert source.suffix.lower() in (ROOT / page).read_text("utf-8")


# Conversions.

PIXELS = np.random.default_rng(3).integers(0, 256, (70, 2, 4, 3), np.uint8)
TO_FLOATS = ("--scale", "1/255", "--layout", "nhwc:nchw", "--cast", "float32")

TOKENS = """
<ir_version: 8, opset_import: ["": 17]>
tokens (float16[batch, 4] x, int64[batch, 4] ids) => (float16[batch, 4] y) {
    typed = Cast <to = 10> (ids)
    y = Add (x, typed)
}
"""


@pytest.mark.parametrize("devices", ["inline", "2"])
def test_pixels_become_what_numpy_makes_of_them(case: Case, devices: str) -> None:
    model = """
    <ir_version: 8, opset_import: ["": 17]>
    images (float[batch, 3, 2, 4] x) => (float[batch, 3, 2, 4] y) { y = Add(x, x) }
    """
    words = (*TO_FLOATS, "--batch", "20", "--devices", devices)
    assert case.run(model, {"x": PIXELS}, *words, equal=False) == ""
    x = PIXELS.transpose(0, 3, 1, 2).astype(np.float32) * np.float32(1 / 255)
    assert loaded(case.output)["y"].tobytes() == (x + x).tobytes()


def test_conversions_are_for_the_inputs_that_they_name_or_fit(case: Case) -> None:
    x, ids = np.ones((3, 4), np.uint8), np.arange(12, dtype=np.int32).reshape(4, 3)
    words = ("--cast", "float16", "--cast", "ids=int64", "--layout", "ids=sn:ns", "--scale", "0.5")
    case.run(TOKENS, {"x": x, "ids": ids}, *words, equal=False)
    np.testing.assert_array_equal(loaded(case.output)["y"], ids.T + np.float16(0.5))
    twice = ("--cast", "float16", "--scale", "0.5", "--scale", "x=2")
    case.run(TOKENS, {"x": x, "ids": ids.T.astype(np.int64)}, *twice, equal=False)
    np.testing.assert_array_equal(loaded(case.output)["y"], ids.T + np.float16(2))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--cast", "flot16"), "--cast: got flot16, expected an input of this type"),
        (("--cast", "z=float16"), "--cast: got z=float16, expected an input of this type"),
        (
            ("--cast", "ids=float16"),
            "numbers for it (for integers, integers): there is x: float16[batch, 4], ids: ",
        ),
        (
            ("--cast", "float16", "--scale", "ids=2"),
            "--scale: got ids=2.0, expected an input of floats",
        ),
        (("--layout", "nhwc:nchw"), "--layout: got nhwc:nchw, expected an array with so many axes"),
        (
            ("--layout", "ab:ba", "--cast", "float16"),
            "input 'x' has size 3 in dimension 1, expected",
        ),
        (("--cast", "float16"), "--cast, --scale: overflow encountered in cast, for x: float16["),
        ((), '(x: float16[batch, 4]): x.astype("float16"); --cast float16 converts numbers'),
    ],
)
def test_conversion_that_does_not_fit_is_refused(
    case: Case, words: tuple[str, ...], text: str
) -> None:
    inputs: Arrays = {"x": np.full((3, 4), 1e9), "ids": np.ones((3, 4), np.int64)}
    assert text in case.fail(TOKENS, inputs, *words)
    assert files(case.folder) == ["in.npz", "model.onnx"]


@pytest.mark.parametrize("scale", ["1e-9", "1e9"])
def test_factor_that_the_type_cannot_hold_is_refused(case: Case, scale: str) -> None:
    inputs: Arrays = {"x": np.ones((3, 4)), "ids": np.ones((3, 4), np.int64)}
    line = case.fail(TOKENS, inputs, "--cast", "float16", "--scale", scale)
    assert line.startswith("mcinfer: --cast, --scale: ")
    assert line.rstrip().endswith(", for x: float16[batch, 4]")


def test_integers_that_the_type_cannot_hold_are_refused(case: Case) -> None:
    inputs: Arrays = {"x": np.ones((3, 4)), "ids": np.full((3, 4), 2**63, np.uint64)}
    words = ("--cast", "float16", "--cast", "ids=int64")
    line = case.fail(TOKENS, inputs, *words)
    assert "input 'ids' has values from 9223372036854775808 to" in line
    line = case.fail(TOKENS, {**inputs, "ids": np.ones((3, 4))}, *words)
    assert "--cast: got ids=int64, expected an input of this type" in line
    line = case.fail(TOKENS, {**inputs, "ids": np.ones((3, 4))}, *words[:2])
    assert "input 'ids' has dtype float64, expected int64" in line
    assert "converts numbers" not in line


# Columns.


def test_one_number_a_row_is_written_as_a_csv_file(double: Path, case: Case) -> None:
    model = """
    <ir_version: 8, opset_import: ["": 17]>
    score (float[batch, 3] x) => (float[batch, 1] score) {
        score = ReduceMean <axes = [1], keepdims = 1> (x)
    }
    """
    source, target = case.folder / "in.npy", case.folder / "out.csv"
    x = np.random.default_rng(4).normal(0, 1, (50, 3)).astype(np.float32)
    np.save(source, x)
    assert call(case.written(model), source, target, "--batch", "20") == 0
    assert case.capsys.readouterr() == ("score: float32[50, 1]\n", "")
    head, *lines = target.read_text("utf-8").splitlines()
    session = onnxruntime.InferenceSession(case.folder / "model.onnx")
    [expected] = session.run(None, {"x": x})
    assert (head, lines) == ("score", [str(number) for number in expected[:, 0]])
    assert np.array(lines, np.float32).tobytes() == expected.tobytes()
    assert call(double, source, target) == 1
    line = only_line(case.capsys.readouterr().err)
    assert "a .csv file has one number a row, got output 'y' of float32, (batch, 3)" in line


# Interrupted work.


def progress(output: Path) -> Any:
    """The file of partial results: how far it is, and which work it is."""
    content = output.with_name(f".{output.name}.partial").read_bytes()
    return {"head": content[:16], **json.loads(content[16:].partition(b"\n")[0])}


HALF: Arrays = {"i": np.array([0, 1, 2, 0, 99, 1])}
"""Rows on which `half` fails after four."""

RESUMED = "mcinfer: resuming at row 4 of 6"


@pytest.fixture
def half(tmp_path: Path) -> Path:
    return save(
        tmp_path / "gather.onnx",
        [helper.make_node("Gather", ["table", "i"], ["y"], axis=1)],
        [("i", TensorProto.INT64, ["rows"])],
        [("y", FLOAT, [2, "found"])],
        {"table": np.arange(6, dtype=np.float32).reshape(2, 3)},
    )


def test_run_is_resumed_with_its_own_split_and_request_size(
    half: Path, case: Case, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_REQUEST_BYTES", 32)
    case.fail(half, HALF)
    before = progress(case.output)
    assert (before["plan"]["axes"], before["plan"]["outputs"]) == ({"i": 0}, {"y": 1})
    shutil.rmtree(cache / "splits")
    monkeypatch.setattr(batch, "_REQUEST_BYTES", 1 << 20)
    status, err = case.end(half, HALF)
    resumed, failed = err.splitlines()
    assert (status, resumed) == (1, RESUMED)
    assert failed.endswith("; 4 of 6 rows are kept; run the same command again to resume")
    assert progress(case.output) == before


def test_results_are_kept_after_a_failure_and_for_the_same_work_alone(
    half: Path, case: Case
) -> None:
    partial = case.output.with_name(".out.npz.partial")
    line = case.fail(half, HALF, "--batch", "2")
    assert "Gather" in line
    assert line.endswith("; 4 of 6 rows are kept; run the same command again to resume")
    assert partial.stat().st_mode & 0o777 == 0o600
    half.touch()
    for devices in ("inline", "cpu:0,cpu:1"):
        status, err = case.end(half, HALF, "--batch", "2", "--devices", devices)
        assert (status, err.splitlines()[0]) == (1, RESUMED)
    line = case.fail(half, HALF, "--batch", "3", "--scale", "2")
    assert (
        f"--output: {partial} holds the results of other work, with another --scale, --batch;"
        in line
    )
    begun = partial.read_bytes()
    partial.write_bytes(begun.replace(b'["cpu"]', b'["gpu"]'))
    line = case.fail(half, HALF, "--batch", "2")
    assert "of other work, with another kind of --devices; --restart" in line
    partial.write_bytes(begun)
    good: Arrays = {"i": np.array([0, 1, 2, 0, 2, 1])}
    line = case.fail(half, good, "--batch", "2")
    assert "of other work, with another input; --restart" in line
    with half.open("ab") as file:
        file.write(b"\x12\x00")  # an empty name of the producer
    assert "with another model, input;" in case.fail(half, good, "--batch", "2")
    assert not case.output.exists()
    assert case.run(half, good, "--batch", "2", "--restart") == ""
    assert files(case.folder) == ["gather.onnx", "in.npz", "out.npz"]


def test_resumed_run_has_work_for_all_its_workers(
    half: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.array([0, 1, 2, 0, 99, *range(3), *range(3)])
    case.fail(half, {"i": rows}, "--batch", "1")
    together, predict = Barrier(3), Master.predict

    def wait(master: Master, *args: Any, **named: Any) -> Any:
        together.wait(20.0)  # fails unless so many are under way
        return predict(master, *args, **named)

    monkeypatch.setattr(Master, "predict", wait)
    status, err = case.end(half, {"i": rows}, "--batch", "1", "--devices", "2")
    assert (status, err.splitlines()[0]) == (1, "mcinfer: resuming at row 4 of 11")


# Requests, by shapes alone.

Shapes = dict[str, tuple[Dimension, ...]]


def requests_of(
    inputs: Shapes,
    outputs: Shapes,
    sizes: Sequence[tuple[int, ...]],
    workers: int,
    rows: int | None = None,
    **said: Axes,
) -> Requests:
    """The requests for arrays of these sizes, cut as the model's symbols and the user say."""
    specs = [
        tuple(TensorSpec(name=n, dtype=np.dtype("f4"), shape=shape) for n, shape in shapes.items())
        for shapes in (inputs, outputs)
    ]
    model = ModelSpec(inputs=specs[0], outputs=specs[1])
    arrays = {n: np.broadcast_to(np.float32(0), s) for n, s in zip(inputs, sizes, strict=True)}
    axes = SaidAxes(inputs=said.get("x_axes", {}), outputs=said.get("y_axes", {}))
    return plan_requests(model, arrays, workers, rows, first_split(model, axes))


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 9))
def test_requests_have_every_row_once_and_in_order(units: int, rows: int, workers: int) -> None:
    requests = requests_of({"x": ("batch", 4)}, {"y": ("batch", 4)}, [(units, 4)], workers, rows)
    arrays = {"x": np.arange(units)}
    parts = [requests.inputs(arrays, i)["x"] for i in range(requests.count)]
    assert np.concatenate(parts).tolist() == [*range(units)]
    assert {len(part) for part in parts[:-1]} <= {rows}
    assert requests.rows(requests.count) == units


@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "workers", "step"),
    [
        (("batch", 4), ("batch", 4), (10_000_000, 4), 3, 3 * 64),
        ((6,), (6,), (6 * 99,), 3, 3 * 10),  # whole pieces of a fixed batch
        ((100,), (100,), (100 * 99,), 3, 3),
        (("batch", 1), ("batch", 1 << 20), (1000, 1), 4, 12),
        (("batch", 1), ("batch", 1 << 30), (1000, 1), 4, 4),
        (("batch", 1 << 20), (None, None), (1000, 1 << 20), 2, 8),
    ],
)
def test_request_has_64_rows_for_each_worker_and_64_mib(
    inputs: tuple[Dimension, ...],
    outputs: tuple[Dimension, ...],
    size: tuple[int, ...],
    workers: int,
    step: int,
) -> None:
    found = requests_of(
        {"x": inputs}, {"y": outputs}, [size], workers, x_axes={"x": 0}, y_axes={"y": 0}
    )
    assert found.step == step


@pytest.mark.parametrize(("rows", "step"), [(1, 1), (9, 2), (None, 3)])
def test_fixed_batch_is_cut_at_multiples_of_it(rows: int | None, step: int) -> None:
    inputs: Shapes = {"x": (4, 2), "z": (8,), "scale": (3,)}
    sizes = [(12, 2), (24,), (3,)]
    requests = requests_of(
        inputs, {"y": (4, 2)}, sizes, 2, rows, x_axes={"x": 0, "z": 0}, y_axes={"y": 0}
    )
    assert (requests.units, requests.unit_rows, requests.step) == (3, 4, step)
    assert requests.sizes == {"x": 4, "z": 8}  # "scale" has no batch: it goes whole
    assert requests.outputs == {"y": 0 if step < 3 else None}
