"""What masters and sessions keep outside of their own memory: models and weights that are given as bytes."""

import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper, parser

from mcinfer import BuildError, EngineOptions, Master, Parallel, mslite
from mcinfer.bench.inputs import InputOptions
from mcinfer.bench.runner import prepared
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.private import IN_MEMORY
from tests.process.models import AFFINE, rows
from tests.process.scripts import PREAMBLE, Program
from tests.process.waiting import all_gone, wait_until

ort = pytest.importorskip("mcinfer.ort")

PROGRAM = (
    PREAMBLE
    + """
model = b'''{"inputs": [["x", "float32", ["batch", 4]]],
             "outputs": [["y", "float32", ["batch", 4], {"from": "x"}]]}'''
master = mcinfer.Master(model, 1, engine="fake").start()
say_pids(master)
if sys.argv[1] == "_exit":
    os._exit(7)
os.kill(os.getpid(), int(sys.argv[1]))
time.sleep(50)
"""
)


def outside(name: str = "w.bin") -> tuple[bytes, bytes]:
    """A model y = xw whose weight lies in another file, and the content of that."""
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> '
        "outside (float[n, 4] x) => (float[n, 4] y) { y = MatMul(x, w) }"
    )
    tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4, 4])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=name)
    return model.SerializeToString(), np.full((4, 4), 2.0, np.float32).tobytes()


def with_weights(content: bytes) -> Any:
    options = ort.SessionOptions()
    options.add_external_initializers_from_files_in_memory(["w.bin"], [content], [len(content)])
    return options


@pytest.mark.parametrize("end", [int(signal.SIGKILL), "_exit"])
def test_nothing_of_a_model_given_as_bytes_stays_however_its_process_ends(
    tmp_path: Path, end: object
) -> None:
    places = [tmp_path / "runtime", tmp_path / "temporary"]
    for place in places:
        place.mkdir(mode=0o700)
    env = dict(zip(("XDG_RUNTIME_DIR", "TMPDIR"), map(str, places), strict=True))
    with Program(PROGRAM, end, env=env) as program:
        workers = [int(pid) for pid in program.line().split()[1:]]
        program.wait()
    assert workers
    wait_until(lambda: all_gone(workers))
    assert [*tmp_path.rglob("*")] == places


# A temporary folder in which any user can put another folder in the place of one.


def serve_bytes(_: Path) -> None:
    with Master(parser.parse_model(AFFINE).SerializeToString(), 1) as master:
        assert master.predict(rows(1))["y"].tolist() == [[1.0, 3.0, 5.0, 7.0]]


def serve_files_in_memory(_: Path) -> None:
    model, content = outside()
    with ort.InferenceSession(model, with_weights(content), devices=1) as session:
        assert session.run(None, {"x": np.ones((1, 4), np.float32)})[0].tolist() == [[8.0] * 4]


def on_cpu() -> mslite.Context:
    context = mslite.Context()
    context.target = ["cpu"]
    return context


def serve_weight_bytes(_: Path) -> None:
    model, content = outside()
    loaded = mslite.Model()
    loaded.build_from_buffer(model, content, mslite.ModelType.ONNX, on_cpu())
    [x] = loaded.get_inputs()
    x.shape = [1, 4]
    x.set_data_from_numpy(np.ones((1, 4), np.float32))
    assert loaded.predict([x])[0].get_data_to_numpy().tolist() == [[8.0] * 4]


def prepare_a_benchmark(folder: Path) -> None:
    model = folder / "model.onnx"
    onnx.save(parser.parse_model(AFFINE), model)
    inputs = InputOptions(files={}, archive=None, dims={})
    axes: dict[str, Any] = {"batch_axes": {}, "output_axes": {}}
    with prepared(model, [2], inputs, axes, lambda _: None, devices=1) as (_, _, files, _):
        assert files[2].stat().st_size


def save_optimised(folder: Path) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    model = parser.parse_model(AFFINE).SerializeToString()
    ort.InferenceSession(model, options, devices=1).close()
    assert (folder / "optimised.onnx").exists()


@pytest.mark.parametrize(
    "use",
    [
        serve_bytes,
        serve_files_in_memory,
        serve_weight_bytes,
        prepare_a_benchmark,
        save_optimised,
    ],
)
def test_temporary_folder_that_others_can_change_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use: Callable[[Path], None]
) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o777)
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    before = place.stat().st_mtime_ns
    use(tmp_path)
    assert place.stat().st_mtime_ns == before


# Every way of serving it.


@pytest.mark.parametrize(
    "way",
    [
        "prepared",
        *(pytest.param(way, marks=pytest.mark.thorough) for way in ("replaceable", "cut")),
    ],
)
def test_model_given_as_bytes_is_served_in_every_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))
    size = 64
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> m (float[n,{size}] x) => (float[n,{size}] y)
        {{ h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v) }}"""
    )
    w, v = np.random.default_rng(0).standard_normal((2, size, size)).astype(np.float32)
    model.graph.initializer.extend(map(numpy_helper.from_array, (w, v), "wv"))
    x = np.ones((3, size), np.float32)
    expected = np.maximum(x @ w, 0) @ v
    options = EngineOptions(
        prepare="always" if way == "prepared" else "never",
        variable_weights=["w"] if way == "replaceable" else [],
    )
    parallel = Parallel(tensor=2) if way == "cut" else None
    with Master(model, 2, options=options, parallel=parallel) as master:
        np.testing.assert_allclose(master.predict({"x": x})["y"], expected, rtol=1e-4, atol=1e-3)
        if way == "replaceable":
            master.update_weights({"w": 2 * w})
            doubled = master.predict({"x": x})["y"]
            np.testing.assert_allclose(doubled, 2 * expected, rtol=1e-4, atol=1e-3)
    named = [json.loads(path.read_bytes())["name"] for path in tmp_path.rglob("about.json")]
    assert named == {"prepared": [IN_MEMORY], "cut": [f"{IN_MEMORY}, 2 slices"]}.get(way, [])


@pytest.mark.parametrize("prepare", ["never", "always"])
def test_error_of_a_model_given_as_bytes_names_no_descriptor(prepare: str) -> None:
    master = Master(b"no model", 1, options=EngineOptions(prepare=prepare))  # type: ignore[arg-type]
    with pytest.raises(BuildError, match=f"Load model from {IN_MEMORY} failed") as caught:
        master.start()
    assert "/proc/" not in str(caught.value)
    with pytest.raises(RuntimeError, match=f"Load model from {IN_MEMORY} failed") as raised:
        mslite.Model().build_from_buffer(b"no model", None, mslite.ModelType.ONNX, on_cpu())
    assert "/proc/" not in str(raised.value)


@pytest.mark.parametrize(("name", "prepare"), [("w.bin", "never"), ("5", "never"), ("5", "always")])
def test_model_given_as_bytes_reads_no_descriptor_of_a_worker_as_its_weights(
    name: str, prepare: str
) -> None:
    model, _ = outside(name)
    master = Master(model, 1, options=EngineOptions(prepare=prepare))  # type: ignore[arg-type]
    with pytest.raises(BuildError, match=f"initializer: w.*{FOLDER_KEY}"):
        master.start()


def test_files_of_a_killed_session_are_removed_by_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, content = outside()
    (tmp_path / "m.onnx").write_bytes(model)
    text = """
import os, sys
import mcinfer.ort as ort
options = ort.SessionOptions()
options.add_external_initializers_from_files_in_memory(["w.bin"], [b"\\0" * 64], [64])
session = ort.InferenceSession(open(sys.argv[1], "rb").read(), options, devices=1)
print(flush=True)
os.kill(os.getpid(), 9)
"""
    with Program(text, tmp_path / "m.onnx", env={"TMPDIR": str(tmp_path)}) as program:
        program.wait()
    [left] = tmp_path.glob("mcinfer-*")
    assert [path.name for path in left.iterdir()] == ["w.bin"]
    with ort.InferenceSession(model, with_weights(content), devices=1):
        [mine] = tmp_path.glob("mcinfer-*")
        assert mine != left
    assert [*tmp_path.glob("mcinfer-*")] == []
    assert os.listdir(tmp_path) == ["m.onnx"]
