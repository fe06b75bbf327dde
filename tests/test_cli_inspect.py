"""Tests of mcinfer/cli/inspect.py: what ``mcinfer inspect`` prints about a model."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from mcinfer.cli import inspect, main
from mcinfer.cli.probes import installed_runtime
from mcinfer.engines.preparation import ensure_prepared
from mcinfer.model_cache.cache import FAILURE_FILE, Cache
from mcinfer.model_cache.keys import read_content
from tests.command_line import FLOAT, Capture, Value, only_line, save, save_double

NOT_CHECKED = "as the model's symbols say; not checked yet: the next request shows it"


_asked_once = functools.cache(installed_runtime)


@pytest.fixture(autouse=True)
def runtime_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "installed_runtime", _asked_once)


def said(model: Path, capsys: Capture, *options: str) -> list[str]:
    """The lines that are printed about a model."""
    assert main(["inspect", str(model), *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def inspected(model: Path, capsys: Capture) -> dict[str, Any]:
    found: dict[str, Any] = json.loads("\n".join(said(model, capsys, "--json")))
    return found


def test_inspect_says_what_is_split(tmp_path: Path, capsys: Capture) -> None:
    nodes, path = [helper.make_node("Neg", ["x"], ["y"])], tmp_path / "neg.onnx"
    fixed = save(path, nodes, [("x", FLOAT, [2])], [("y", FLOAT, [2])])
    lines = said(fixed, capsys, "--batch-axis", "x=0", "--output-axis", "y=0")
    assert any(line.startswith("batch: fixed; ") for line in lines), lines
    named = save(path, nodes, [("x", FLOAT, ["length"])], [("y", FLOAT, ["length"])])
    lines = said(named, capsys, "--batch-axis", "x=0")
    assert "batch: as batch_axes and output_axes say" in lines


def test_probe_learns_from_an_example_and_records_the_split(
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
    place = lines.index("batch: learned from 4 rows (largest difference 0)")
    assert lines[place + 1 : place + 3] == ["  split along axis 0: x", "  joined along axis 0: y"]
    again = said(model, capsys)
    assert "batch: learned from 4 rows, and recorded (largest difference 0)" in again
    assert [*(cache.folder / "splits").iterdir()]
    archive = tmp_path / "equal.npz"
    np.savez(archive, x=np.ones((4, 3), np.float32))
    lines = said(model, capsys, "--input", str(archive), "--probe")
    assert "batch: learned from 4 rows (largest difference 0)" in lines  # made out of these
    assert caplog.records == []
    archive.write_bytes(b"PK\x03\x04")
    assert main(["inspect", str(model), "--input", str(archive), "--probe"]) == 1
    assert f"--input {archive}: " in capsys.readouterr().err


@pytest.mark.parametrize("command", [["inspect", "--json"], ["cache", "prepare"]])
def test_missing_model_is_named(tmp_path: Path, capsys: Capture, command: list[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("none.onnx", "No such file"), ("", "a folder"), ("pipe", "a pipe")):
        assert main([*command, str(tmp_path / name)]) == 1
        out, err = capsys.readouterr()
        assert (out, only_line(err).startswith("mcinfer: MODEL: ")) == ("", True)
        assert why in err
        assert str(tmp_path / name) in err


@pytest.mark.usefixtures("cache")
def test_json_has_every_field(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = tmp_path / "nvidia-smi"
    card = "0, GPU-a, 00000000:FF:1F.7, 580.65, Default, 1024, 512, H200"
    driver.write_text(f"#!/bin/sh\necho 'CUDA Version : 13.0'; echo '{card}'\n", encoding="ascii")
    driver.chmod(0o755)
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
    found = inspected(path, capsys)
    assert (found["model"], found["engine"]) == (str(path), "onnxruntime")
    assert found["runtime"]["version"] == ort.__version__
    [gpu] = found["gpus"]
    assert (gpu["uuid"], gpu["memory_bytes"], gpu["bus_id"]) == ("GPU-a", 1 << 30, "0000:ff:1f.7")
    assert found["driver"] == {"version": "580.65", "cuda": "13.0", "mps": None}
    assert found["inputs"] == [
        {"name": "a", "type": "float32", "shape": ["rows", 300]},
        {"name": "b", "type": "float32", "shape": []},
    ]
    split = found["split"]
    assert (split["inputs"], split["outputs"]) == ({"a": 0, "b": None}, {"d": 0})
    assert (split["known"], split["summary"]) == ("declared", NOT_CHECKED)
    assert found["prepared"] == {"state": "no", "key": None, "bytes": None}
    described = found["onnx"]
    assert described["opsets"] == {"ai.onnx": 21, "com.microsoft": 1}
    assert described["operators"][0] == {"domain": "ai.onnx", "type": "Mul", "count": 2}
    assert described["weights"] == {
        "count": 1,
        "constants": 0,
        "bytes": 360_000,
        "external_bytes": 360_000,
        "external_files": ["model.data"],
    }


def test_operators_of_ort_files_are_not_known(tmp_path: Path, capsys: Capture) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "double.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.log_severity_level = 3
    ort.InferenceSession(save_double(tmp_path), options, providers=["CPUExecutionProvider"])
    lines = said(tmp_path / "double.ort", capsys)
    assert lines[1] == "  x: float32[batch, 3]"
    assert "operators and weights: not known; the file is not of ONNX's own format" in lines


@pytest.mark.thorough
def test_state_in_the_cache_is_printed(cache: Cache, tmp_path: Path, capsys: Capture) -> None:
    size = 1 << 22  # large enough that a worker prepares it
    shape: list[int | str] = ["batch", size]
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    constants = {"w": np.ones(size, np.float32)}
    path = tmp_path / "large.onnx"
    large = save(path, nodes, [("x", FLOAT, shape)], [("y", FLOAT, shape)], constants)
    line = said(large, capsys)[-1]
    [entry] = cache.entries()
    place = f"{entry.bytes / 1e6:.1f} MB in the cache, {entry.key[:12]}"
    assert line == f"prepared: yes, just now; {place}"
    assert said(large, capsys)[-1] == f"prepared: yes; {place}"
    itself = inspected(cache.folder / entry.key / "model.onnx", capsys)
    assert itself["prepared"] == {"state": "already", "key": entry.key, "bytes": entry.bytes}

    small = save_double(tmp_path)
    ensure_prepared(small).close()
    line = said(small, capsys)[-1]
    assert line.startswith("prepared: yes, but with default options a worker loads the file")
    cache.clear()

    def fail(folder: Path, _lock: int) -> None:
        (folder / FAILURE_FILE).write_text("why")

    def compile_it(folder: Path, _lock: int) -> None:
        (folder / "1.blob").write_text("")

    facts = {"model": read_content(small).digest}
    cache.make({**facts, "engine": "openvino 2026.4"}, compile_it, wait=5.0).close()
    assert said(small, capsys)[-1] == "prepared: no; a worker loads the file as it is"
    cache.make(facts, fail, wait=5.0).close()
    line = said(small, capsys)[-1]
    assert line == "prepared: no, it cannot be; a worker loads the file as it is"


def test_unloadable_model_is_refused_and_its_file_described(
    tmp_path: Path, capsys: Capture
) -> None:
    nodes = [
        helper.make_node("NoSuchOperator", ["x"], ["a"], domain="own"),
        helper.make_node("Neg", ["a"], ["b"]),
        helper.make_node("Neg", ["b"], ["c"]),
        helper.make_node("Add", ["c", "w"], ["y"]),
    ]
    shape: list[int | str] = ["batch", 30_000]
    constants = {"w": np.ones(30_000, np.float32)}
    model = tmp_path / "model.onnx"
    made = onnx.load(save(model, nodes, [("x", FLOAT, shape)], [("y", FLOAT, shape)], constants))
    made.producer_name = "writer"
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
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["model.onnx", "model.mindir"])
def test_file_that_is_no_model_is_refused(tmp_path: Path, capsys: Capture, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x0a\x050.1.0")
    assert main(["inspect", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert ("mindspore" in only_line(err)) == (name != "model.onnx")
