"""Tests of mcinfer/cli/batch.py: how a file is cut into requests, and a run that is resumed."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from mcinfer.cli import batch, main
from mcinfer.cli.batch import Requests, plan_requests
from mcinfer.sharding import Axes, SaidAxes, first_split
from mcinfer.specs import Dimension, ModelSpec, TensorSpec
from tests.command_line import FLOAT, Arrays, Capture, Case, Value, files, loaded, only_line, save

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


GATHER = [helper.make_node("Gather", ["table", "i"], ["y"])]
WHOLE = "mcinfer: the whole file runs as one request, on one worker: "


@pytest.mark.parametrize(
    "words",
    [
        ["--batch", "4", "--batch-axis", "input=0", "--batch-axis", "state=1"],
        ["--batch", "4", "--output-axis", "stateN=1"],
    ],
    ids=["inputs", "outputs"],
)
def test_axes_that_no_shape_says_are_learned(case: Case, words: list[str]) -> None:
    assert case.run(STATEFUL, stateful_rows(14), *words) == ""


def test_output_axis_that_is_wrong_is_not_followed(case: Case) -> None:
    axes = ["--batch-axis", "input=0", "--batch-axis", "state=1", "--output-axis", "stateN=0"]
    line = only_line(case.run(STATEFUL, stateful_rows(70), *axes))
    assert line.startswith(WHOLE)
    assert "'stateN' joins along axis 1, output_axes says 0" in line


def test_file_whose_rows_depend_on_each_other_runs_whole(case: Case) -> None:
    for _ in range(2):  # the second time it is known
        line = only_line(case.run(SELECTING, random_rows(300)))
        assert line.startswith(f"{WHOLE}the rows of a batch depend on each other")
        assert "output 'where' differs" in line
    line = case.fail(SELECTING, random_rows(300), "--batch", "10")
    assert line.startswith("mcinfer: --batch: got 10, but the file cannot be cut: the rows of")
    assert "--batch-axis and --output-axis say" in line


def test_requests_may_give_any_number_of_rows_where_that_was_shown(case: Case) -> None:
    assert case.run(COMPRESSING, random_rows(50), "--batch", "7") == ""


def test_first_rows_that_are_equal_are_followed_by_more(case: Case) -> None:
    x = np.ones((40, 4), np.float32)
    x[3:] = 2
    assert case.run(DOUBLE, {"x": x}, "--batch", "20") == ""


def test_split_that_no_row_shows_is_not_used(case: Case) -> None:
    inputs: Arrays = {"x": np.ones((100, 4), np.float32)}
    axes = ["--batch-axis", "x=0", "--output-axis", "y=0"]
    line = only_line(case.run(DOUBLE, inputs, *axes))
    assert line.startswith(f"{WHOLE}its first 64 rows are equal")
    line = case.fail(DOUBLE, inputs, *axes, "--batch", "8")
    assert "--batch: got 8, but the file cannot be cut: its first 8 rows are equal" in line


def test_random_model_is_split_where_its_symbols_say_so(case: Case) -> None:
    x = np.arange(400, dtype=np.float32).reshape(100, 4)
    line = only_line(case.run(NOISY, {"x": x}, "--batch", "10", equal=False))
    assert line == "mcinfer: requests are split without a check: two runs of the same rows differ"
    np.testing.assert_allclose(loaded(case.output)["y"], x + 0.5, atol=0.5)


def test_input_that_is_as_long_as_the_batch_by_chance_goes_whole(case: Case) -> None:
    inputs: list[Value] = [("i", TensorProto.INT64, ["rows"]), ("table", FLOAT, ["size", 2])]
    model = save(case.folder / "model.onnx", GATHER, inputs, [("y", FLOAT, ["found", 2])])
    arrays: Arrays = {  # the first rows of both do not run together
        "i": np.arange(9)[::-1].copy(),
        "table": np.arange(18, dtype=np.float32).reshape(9, 2),
    }
    assert case.run(model, arrays, "--batch", "4") == ""


def test_bad_first_rows_are_told_with_the_runtimes_words(case: Case) -> None:
    table = {"table": np.arange(3, dtype=np.float32)}
    inputs, outputs = [("i", TensorProto.INT64, ["batch"])], [("y", FLOAT, ["batch"])]
    model = save(case.folder / "model.onnx", GATHER, inputs, outputs, table)
    line = case.fail(model, {"i": np.array([99, 0, 1, 2])}, "--batch", "2")
    assert "--batch: got 2, but the file cannot be cut: its first 2 rows do not run by them" in line
    assert "Gather" in line
    assert files(case.folder) == ["in.npz", "model.onnx"]


def test_requests_that_contradict_the_first_rows_are_an_error_that_says_what_to_do(
    case: Case,
) -> None:
    # An output that is the same for all rows but the last ones.
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Max", ["most", "ten"], ["bound"]),
        helper.make_node("Add", ["x", "x"], ["y"]),
    ]
    outputs: list[Value] = [("bound", FLOAT, []), ("y", FLOAT, ["batch"])]
    ten = {"ten": np.array(10, np.float32)}
    model = save(case.folder / "model.onnx", nodes, [("x", FLOAT, ["batch"])], outputs, ten)
    inputs: Arrays = {"x": np.arange(20, dtype=np.float32)}
    line = case.fail(model, inputs, "--batch", "12")
    assert "output 'bound' is to be the same in all requests: " in line
    assert line.endswith("; --batch-axis INPUT=none for each input runs it whole")
    assert files(case.folder) == ["in.npz", "model.onnx"]
    case.run(model, inputs, "--batch-axis", "x=none")


# Interrupted work.


def progress(output: Path) -> Path:
    return output.with_name(f".{output.name}.partial") / "progress.json"


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


def test_interrupted_work_goes_on_with_its_split_also_where_nothing_is_recorded(
    half: Path, case: Case, cache: Path
) -> None:
    case.fail(half, HALF, "--batch", "2")
    plan = json.loads(progress(case.output).read_bytes())["plan"]
    assert (plan["axes"], plan["outputs"]) == ({"i": 0}, {"y": 1})
    shutil.rmtree(cache / "splits")
    status, err = case.end(half, HALF, "--batch", "2")
    going, failed = err.splitlines()
    assert (status, going) == (1, RESUMED)
    assert failed.endswith("; 4 of 6 rows are kept; run the same command again to resume")


def test_interrupted_work_goes_on_in_requests_of_the_same_size(
    half: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_REQUEST_BYTES", 32)
    case.fail(half, HALF)
    before = json.loads(progress(case.output).read_bytes())
    monkeypatch.setattr(batch, "_REQUEST_BYTES", 1 << 20)
    assert RESUMED in case.end(half, HALF)[1].splitlines()
    assert json.loads(progress(case.output).read_bytes()) == before


def test_run_is_resumed_in_as_many_shards_with_fewer_cores(
    half: Path, case: Case, capsys: Capture
) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core has one worker")
    np.savez(case.folder / "in.npz", allow_pickle=False, **HALF)
    where = ["--input", str(case.folder / "in.npz"), "--output", str(case.output)]
    words = ["run", str(half), *where, "--batch", "2"]
    assert main(words) == 1
    before = json.loads(progress(case.output).read_bytes())
    assert before["plan"]["shards"] > 1
    capsys.readouterr()
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert main(words) == 1
    finally:
        os.sched_setaffinity(0, cores)
    assert capsys.readouterr().err.splitlines()[0] == RESUMED
    assert json.loads(progress(case.output).read_bytes()) == before


def test_whole_file_that_is_done_is_only_written_the_next_time(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.output.mkdir()  # what comes in its place before the end
    with monkeypatch.context() as patch:
        patch.setattr(batch, "_output_place", lambda *_: case.output)
        line = case.fail(DOUBLE, random_rows(5), "--devices", "2")
    case.output.rmdir()
    assert line.endswith("; 5 of 5 rows are kept; run the same command again to resume")
    err = case.run(DOUBLE, random_rows(5), "--devices", "2")
    assert only_line(err) == "mcinfer: resuming at row 5 of 5"


# Requests, by shapes alone.

FLOAT32 = np.dtype(np.float32)


def spec(name: str, *shape: Dimension) -> TensorSpec:
    return TensorSpec(name=name, dtype=FLOAT32, shape=shape)


def described(inputs: Sequence[TensorSpec], *outputs: TensorSpec) -> ModelSpec:
    return ModelSpec(inputs=tuple(inputs), outputs=outputs)


ROWS = described([spec("x", "batch", 4)], spec("y", "batch", 4))


def requests_of(
    model: ModelSpec,
    shapes: dict[str, tuple[int, ...]],
    workers: int,
    rows: int | None,
    inputs: Axes | None = None,
    outputs: Axes | None = None,
) -> Requests:
    """Cut as the model's symbols and the user say."""
    arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    said = SaidAxes(inputs=inputs or {}, outputs=outputs or {})
    return plan_requests(model, arrays, workers, rows, first_split(model, said))


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 9))
def test_requests_have_every_row_once_and_in_order(units: int, rows: int, workers: int) -> None:
    requests = requests_of(ROWS, {"x": (units, 4)}, workers, rows)
    arrays = {"x": np.arange(units)}
    parts = [requests.inputs(arrays, i)["x"] for i in range(requests.count)]
    assert np.concatenate(parts).tolist() == [*range(units)]
    assert {len(part) for part in parts[:-1]} <= {rows}
    assert requests.rows(requests.count) == units


def test_request_has_64_rows_for_each_worker_and_64_mib() -> None:
    assert requests_of(ROWS, {"x": (10_000_000, 4)}, 3, None).step == 3 * 64
    for size, step in ((6, 10), (100, 1)):  # whole pieces of a fixed batch
        fixed = described([spec("x", size)], spec("y", size))
        assert requests_of(fixed, {"x": (size * 99,)}, 3, None, {"x": 0}, {"y": 0}).step == 3 * step
    for width, step in ((1 << 20, 12), (1 << 30, 4)):
        wide = described([spec("x", "batch", 1)], spec("y", "batch", width))
        assert requests_of(wide, {"x": (1000, 1)}, 4, None).step == step
    unknown = described([spec("x", "batch", 1 << 20)], spec("y", None, None))
    assert requests_of(unknown, {"x": (1000, 1 << 20)}, 2, None, outputs={"y": 0}).step == 8


def test_inputs_without_the_batch_go_whole() -> None:
    two = described([spec("x", "seq", "batch"), spec("scale", 3)], spec("y", "seq", "batch"))
    requests = requests_of(two, {"x": (5, 8), "scale": (3,)}, 2, 4)
    assert (requests.axes, requests.sizes) == ({"x": 1, "scale": None}, {"x": 1})
    assert (requests.count, requests.outputs) == (2, {"y": 1})


@pytest.mark.parametrize(("rows", "step"), [(1, 1), (9, 2), (100, 3), (None, 3)])
def test_fixed_batch_is_cut_at_multiples_of_it(rows: int | None, step: int) -> None:
    fixed = described([spec("x", 4, 2), spec("z", 8)], spec("y", 4, 2))
    shapes: dict[str, tuple[int, ...]] = {"x": (12, 2), "z": (24,)}
    requests = requests_of(fixed, shapes, 2, rows, {"x": 0, "z": 0}, {"y": 0})
    assert (requests.units, requests.unit_rows, requests.step) == (3, 4, step)
    assert requests.sizes == {"x": 4, "z": 8}
    assert requests.outputs == {"y": 0 if step < 3 else None}


def test_batch_that_is_not_known_runs_whole() -> None:
    whole = described([spec("x", "length", 4)], spec("y", "other"))
    requests = requests_of(whole, {"x": (1_000_000, 4)}, 2, None)
    assert (requests.axes, requests.count, requests.outputs) == ({"x": None}, 1, {"y": None})
