"""``mcinfer bench`` and ``mcinfer tune`` with OpenVINO beside ONNX Runtime."""

import json
from pathlib import Path
from typing import Any

from mcinfer.examples import encoder
from tests.command_line import COMMAND
from tests.process.scripts import Program

ENGINES = "onnxruntime,openvino,openvino:bf16"


def measured(command: str, file: Path, *options: str, engines: str = ENGINES) -> Any:
    """What a command writes to JSON, with the bundled encoder."""
    arguments = [command, str(encoder()), "--json", str(file), "--engine", engines, *options]
    with Program(COMMAND, *arguments) as program:
        ran = program.wait()
    found = json.loads(file.read_text("utf-8"))
    assert ran.status == bool(found["disturbed"]), ran.err  # the machine of a test may be busy
    return found


def test_bench_has_each_mode_with_each_engine_and_how_far_its_answers_are(tmp_path: Path) -> None:
    options = ("--count", "5", "--repeat", "1", "--against", "session", "--batch", "4")
    found = measured("bench", tmp_path / "bench.json", *options, "--modes", "sharded,inline")
    ways = {way["name"]: way for way in found["ways"]}
    assert [*ways] == ["session", "sharded", "inline", "sharded/openvino", "sharded/openvino:bf16"]
    assert not any(way["error"] for way in ways.values())
    assert {m["way"] for m in found["measurements"]} == {*ways}
    differences = {name: way["difference"] for name, way in ways.items()}
    assert [differences[name] for name in ("session", "sharded", "inline")] == [None] * 3
    assert 0 < differences["sharded/openvino"] < 1e-4
    # A processor without bfloat16 computes in float32 all the same.
    assert differences["sharded/openvino"] <= differences["sharded/openvino:bf16"] < 0.1


def test_tune_tries_each_engine_and_names_the_one_of_its_recommendation(tmp_path: Path) -> None:
    # The first of them is tried in any case: how many others, the time decides.
    engines, options = "openvino,openvino:bf16,onnxruntime", ("--budget", "20", "--goal", "latency")
    found = measured("tune", tmp_path / "tune.json", *options, engines=engines)
    assert found["engines"] == engines.split(",")
    tried = {t["candidate"]["engine"]: t for t in found["trials"] if not t["error"]}
    assert "openvino" in tried
    for engine, trial in tried.items():
        assert (trial["difference"] is None) == (engine == "onnxruntime")
    assert found["disturbed"] or found["recommended"]["arguments"]
