"""Tests of mcinfer/cli/inspect.py: what ``mcinfer inspect`` says of a model."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from mcinfer.cli import main
from mcinfer.model_cache.building import FAILURE_FILE, ensure_prepared
from mcinfer.model_cache.cache import Cache, entry_key
from mcinfer.model_cache.keys import read_source
from tests.command_line import FLOAT, Capture, Value, only_line, save, save_double

OFFERED = f"onnxruntime {ort.__version__} offers: {', '.join(ort.get_available_providers())}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """An empty cache of this test alone."""
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))
    return Cache.default()


NOT_CHECKED = (
    "as the model's symbols say; not checked yet: a request of two different rows shows it"
)


def said(model: Path, capsys: Capture, *options: str) -> list[str]:
    """The lines that are said of a model."""
    assert main(["inspect", str(model), *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def inspected(model: Path, capsys: Capture) -> dict[str, Any]:
    """What ``--json`` gives."""
    assert main(["inspect", str(model), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


def prepared(model: Path, capsys: Capture) -> str:
    """What is said of its place in the cache."""
    line = said(model, capsys)[-1]
    start, _, words = line.partition(": ")
    assert start == "prepared"
    return words


def chain(path: Path, operators: Sequence[str], size: int = 3) -> Path:
    """A model of such operators one after another, of an input and a constant that is added last."""
    names = ["x", *(f"h{i}" for i in range(len(operators)))]
    nodes = [
        helper.make_node(operator, [source], [target])
        for operator, source, target in zip(operators, names, names[1:], strict=False)
    ]
    nodes.append(helper.make_node("Add", [names[-1], "w"], ["y"]))
    shape: list[int | str] = ["batch", size]
    constants = {"w": np.ones(size, np.float32)}
    return save(path, nodes, [("x", FLOAT, shape)], [("y", FLOAT, shape)], constants)


# What is said.


def test_inspect_says_what_a_model_takes_gives_and_holds(
    cache: Cache, tmp_path: Path, capsys: Capture
) -> None:
    assert said(save_double(tmp_path), capsys) == [
        "inputs:",
        "  x: float32[batch, 3]",
        "outputs:",
        "  y: float32[batch, 3]",
        f"batch: {NOT_CHECKED}",
        "  split along axis 0: x",
        "  joined along axis 0: y",
        "runs on: CPUExecutionProvider",
        OFFERED,
        "operators: 1 node of 1 type",
        "  1  Add",
        "weights: 0 initialisers, 0.0 MB",
        "written: IR version 10; opsets ai.onnx 21",
        "prepared: no; a worker loads the file as it is",
    ]
    assert not cache.folder.exists()  # nothing is made for a look at a small model


@pytest.mark.parametrize(
    ("first", "axes", "text"),
    [
        (2, ["--batch-axis", "x=0", "--output-axis", "y=0"], "batch: fixed; "),
        ("length", ["--batch-axis", "x=0"], "batch: as batch_axes and output_axes say; not"),
    ],
)
def test_inspect_says_what_is_split(
    tmp_path: Path, capsys: Capture, first: int | str, axes: list[str], text: str
) -> None:
    model = save(
        tmp_path / "neg.onnx",
        [helper.make_node("Neg", ["x"], ["y"])],
        [("x", FLOAT, [first])],
        [("y", FLOAT, [first])],
    )
    lines = said(model, capsys, *axes)
    assert any(line.startswith(text) for line in lines), lines


def test_probe_learns_from_an_example_and_it_is_recorded(
    cache: Cache, tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    model = save(
        tmp_path / "nameless.onnx",
        [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("ReduceMax", ["x"], ["most"])],
        [("x", FLOAT, [None, 3])],
        [("y", FLOAT, [None, 3])],
    )
    example = tmp_path / "x.npy"
    np.save(example, np.arange(12, dtype=np.float32).reshape(4, 3))
    lines = said(model, capsys, "--input", str(example), "--probe")
    place = lines.index("batch: learned from a request of 4 rows (largest difference 0)")
    assert lines[place + 1 : place + 3] == ["  split along axis 0: x", "  joined along axis 0: y"]
    again = said(model, capsys)
    assert "batch: learned from a request of 4 rows, and recorded (largest difference 0)" in again
    assert [*(cache.folder / "splits").iterdir()]
    archive = tmp_path / "equal.npz"
    np.savez(archive, x=np.ones((4, 3), np.float32))
    lines = said(model, capsys, "--input", str(archive), "--probe")
    assert any(line.startswith("batch: not known yet") for line in lines)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--probe"], "--probe and --input go together"),
        (["--batch-axis", "x"], "expected a name and an axis"),
    ],
)
def test_options_that_make_no_sense_are_wrong_usage(
    tmp_path: Path, capsys: Capture, given: list[str], words: str
) -> None:
    assert main(["inspect", str(save_double(tmp_path)), *given]) == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_example_that_is_no_file_of_arrays_is_named(tmp_path: Path, capsys: Capture) -> None:
    example = tmp_path / "x.npz"
    example.write_bytes(b"PK\x03\x04")
    assert main(["inspect", str(save_double(tmp_path)), "--probe", "--input", str(example)]) == 1
    assert f"--input {example}: " in capsys.readouterr().err


def test_model_that_is_not_there_is_named_at_once(tmp_path: Path, capsys: Capture) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("none.onnx", "No such file"), ("", "a folder"), ("pipe", "a pipe")):
        for command in (["inspect", "--json"], ["cache", "prepare"]):
            assert main([*command, str(tmp_path / name)]) == 1
            out, err = capsys.readouterr()
            line = only_line(err)
            assert (out, line.startswith("mcinfer: MODEL: ")) == ("", True)
            assert why in line
            assert str(tmp_path / name) in line


@pytest.mark.usefixtures("cache")
def test_json_says_the_same_and_leaves_nothing_out(tmp_path: Path, capsys: Capture) -> None:
    nodes = [
        helper.make_node("Gelu", ["a"], ["g"], domain="com.microsoft"),
        helper.make_node("MatMul", ["g", "w"], ["h"]),
        helper.make_node("Mul", ["h", "b"], ["c"]),
        helper.make_node("Mul", ["c", "c"], ["d"]),
    ]
    path = tmp_path / "model.onnx"
    inputs: list[Value] = [("a", FLOAT, ["rows", 300]), ("b", FLOAT, [])]
    constants = {"w": np.ones((300, 300), np.float32)}
    made = onnx.load(save(path, nodes, inputs, [("d", FLOAT, ["rows", 300])], constants))
    made.producer_name, made.producer_version = "writer", "1.2"
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(made, path, save_as_external_data=True, location="model.data")
    assert inspected(path, capsys) == {
        "model": str(path),
        "engine": "onnxruntime",
        "providers": ["CPUExecutionProvider"],
        "runtime": {"version": ort.__version__, "providers": ort.get_available_providers()},
        "inputs": [
            {"name": "a", "type": "float32", "shape": ["rows", 300]},
            {"name": "b", "type": "float32", "shape": []},
        ],
        "outputs": [{"name": "d", "type": "float32", "shape": ["rows", 300]}],
        "split": {
            "inputs": {"a": 0, "b": None},
            "outputs": {"d": 0},
            "known": "declared",
            "splits": True,
            "checked": False,
            "rows": 0,
            "difference": 0.0,
            "reason": "",
            "fixed": False,
            "summary": NOT_CHECKED,
        },
        "prepared": {"state": "no", "key": None, "bytes": None},
        "onnx": {
            "ir_version": 10,
            "producer": "writer 1.2",
            "opsets": {"ai.onnx": 21, "com.microsoft": 1},
            "operators": [
                {"domain": "ai.onnx", "type": "Mul", "count": 2},
                {"domain": "com.microsoft", "type": "Gelu", "count": 1},
                {"domain": "ai.onnx", "type": "MatMul", "count": 1},
            ],
            "weights": {
                "count": 1,
                "constants": 0,
                "bytes": 360_000,
                "external_bytes": 360_000,
                "external_files": ["model.data"],
            },
        },
    }


def test_file_of_the_runtimes_own_format_has_no_operators_that_are_known(
    tmp_path: Path, capsys: Capture
) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "double.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.log_severity_level = 3
    ort.InferenceSession(save_double(tmp_path), options, providers=["CPUExecutionProvider"])
    lines = said(tmp_path / "double.ort", capsys)
    assert lines[1] == "  x: float32[batch, 3]"
    assert "operators and weights: not known; the file is not of ONNX's own format" in lines


# The cache.


def test_large_model_is_prepared_by_the_first_look_and_was_by_the_second(
    cache: Cache, tmp_path: Path, capsys: Capture
) -> None:
    model = chain(tmp_path / "large.onnx", [], size=1 << 22)
    words = prepared(model, capsys)
    [entry] = cache.entries()
    place = f"{entry.bytes / 1e6:.1f} MB in the cache, {entry.key[:12]}"
    assert words == f"yes, just now; {place}"
    assert prepared(model, capsys) == f"yes; {place}"
    itself = inspected(cache.folder / entry.key / "model.onnx", capsys)
    assert itself["prepared"] == {"state": "already", "key": entry.key, "bytes": entry.bytes}


@pytest.mark.usefixtures("cache")
def test_small_model_that_was_prepared_by_hand_is_told_from_one_that_is_used(
    tmp_path: Path, capsys: Capture
) -> None:
    model = save_double(tmp_path)
    ensure_prepared(model).close()
    words = prepared(model, capsys)
    assert words.startswith(
        "yes, but with default options a worker loads the file as it is; 0.0 MB"
    )


def test_model_that_cannot_be_prepared_is_told(
    cache: Cache, tmp_path: Path, capsys: Capture
) -> None:
    model = save_double(tmp_path)

    def fail(folder: Path, _lock: int) -> None:
        (folder / FAILURE_FILE).write_text("why")

    facts = {"model": read_source(model).digest}
    cache.make(entry_key(facts), facts, fail, wait=5.0).close()
    assert prepared(model, capsys) == "no, it cannot be; a worker loads the file as it is"


# What cannot be loaded.


def test_model_that_cannot_be_loaded_is_refused_after_what_its_file_says(
    tmp_path: Path, capsys: Capture
) -> None:
    model = chain(tmp_path / "model.onnx", ["NoSuchOperator", "Neg", "Neg"], size=30_000)
    made = onnx.load(model)
    made.producer_name = "writer"
    made.graph.node[0].domain = "own"
    made.opset_import.append(helper.make_opsetid("own", 3))
    onnx.save(made, model, save_as_external_data=True, location="model.data")
    assert main(["inspect", str(model)]) == 1
    out, err = capsys.readouterr()
    assert "NoSuchOperator" in only_line(err)
    assert out.splitlines() == [
        "operators: 4 nodes of 3 types",
        "  2  Neg",
        "  1  own.NoSuchOperator",
        "  1  Add",
        "weights: 1 initialiser, 0.1 MB, of which 0.1 MB in 1 other file",
        "written: IR version 10; opsets ai.onnx 21, own 3; by writer",
    ]
    assert main(["inspect", str(model), "--json"]) == 1
    out, err = capsys.readouterr()
    assert (out, only_line(err)) == ("", err.strip())


@pytest.mark.parametrize("name", ["model.onnx", "model.mindir"])
def test_file_that_is_no_model_is_refused_in_one_line(
    tmp_path: Path, capsys: Capture, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x0a\x050.1.0")
    assert main(["inspect", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert ("mindspore" in only_line(err)) == (name != "model.onnx")
