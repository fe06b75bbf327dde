"""Workers that run OpenVINO, and OpenVINO in the caller's own process."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import psutil
import pytest
from numpy.typing import NDArray

from mcinfer import (
    EngineOptions,
    Limits,
    Master,
    PredictError,
    PredictTimeoutError,
    Timeouts,
)
from mcinfer.cli.cache import list_entries
from mcinfer.examples import encoder
from mcinfer.model_cache.cache import Cache
from mcinfer.statistics import RequestTrace
from tests.openvino.conftest import SaveModel
from tests.process.models import AFFINE, OnnxModel, act, assert_answers, rows
from tests.process.waiting import pids, wait_until

Array = NDArray[Any]

IMAGES = np.random.default_rng(7).random((7, 3, 32, 32), dtype=np.float32)


@pytest.fixture(scope="module")
def expected() -> Array:
    """What one session of ONNX Runtime says of `IMAGES`."""
    session = ort.InferenceSession(str(encoder()), providers=["CPUExecutionProvider"])
    result: Array = session.run(["embedding"], {"image": IMAGES})[0]
    return result


@pytest.mark.parametrize(("devices", "model"), [(2, "path"), ("inline", "bytes")])
def test_batch_over_two_workers_is_that_of_onnx_runtime(
    expected: Array, devices: int | str, model: str
) -> None:
    traces = list[RequestTrace]()
    given = str(encoder()) if model == "path" else Path(encoder()).read_bytes()
    with Master(given, devices, engine="openvino", trace=traces.append) as master:
        assert {worker.providers for worker in master.statistics().workers} == {("CPU",)}
        assert [str(spec) for spec in (*master.inputs, *master.outputs)] == [
            "image: float32[batch, 3, 32, 32]",
            "embedding: float32[batch, 64]",
        ]
        for count in (7, 4, 1):
            outputs = master.predict({"image": IMAGES[:count]})
            np.testing.assert_allclose(outputs["embedding"], expected[:count], rtol=0, atol=1e-5)
    assert {len(trace.shards) for trace in traces if trace.error is None} >= (
        {1, 2} if devices == 2 else {1}
    )


def test_worker_has_its_share_of_the_cores_and_so_many_threads(onnx_model: OnnxModel) -> None:
    options = EngineOptions(describe=True)
    with Master(onnx_model(AFFINE), 2, engine="openvino", options=options) as master:
        cores = [psutil.Process(pid).cpu_affinity() for pid in pids(master)]
        used = master.description.provider_options["CPU"]
        assert used["INFERENCE_NUM_THREADS"] == str(len(cores[0] or ()))
        if len(os.sched_getaffinity(0)) > 1:
            assert cores[0] != cores[1]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two streams want two cores")
def test_streams_are_kept_to_cores_and_the_threads_that_wait_for_them_are_not(
    onnx_model: OnnxModel,
) -> None:
    options = EngineOptions(streams=2, describe=True)
    with Master(onnx_model(AFFINE), 1, engine="openvino", options=options) as master:
        (pid,) = pids(master)
        assert master.description.provider_options["CPU"]["ENABLE_CPU_PINNING"] == "True"
        for i in range(4):
            assert_answers(master.predict(rows(4, first=i)), rows(4, first=i))
        assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)


def test_batch_runs_piece_by_piece_where_its_size_is_fixed(expected: Array) -> None:
    options = EngineOptions(free_dimensions={"batch": 1})
    with Master(encoder(), 2, engine="openvino", options=options) as master:
        assert str(master.inputs[0]) == "image: float32[1, 3, 32, 32]"
        outputs = master.predict({"image": IMAGES})
        np.testing.assert_allclose(outputs["embedding"], expected, rtol=0, atol=1e-5)
        assert sum(worker.runs for worker in master.statistics().workers) == len(IMAGES)


def test_output_whose_shape_only_the_run_knows_joins(save: SaveModel) -> None:
    model = save("(float[n, 4] x) => (int64[m, 2] at) { a = NonZero(x) at = Transpose(a) }")
    with Master(model, 1, engine="openvino", verify="never") as master:
        for x in (rows(3), rows(2), act(0.0), rows(3)):
            np.testing.assert_array_equal(master.predict(x)["at"], np.argwhere(x["x"]))


@pytest.mark.parametrize("devices", [1, "inline"])
def test_run_whose_time_is_over_is_cancelled_and_the_worker_stays(
    save: SaveModel, devices: int | str
) -> None:
    body = " ".join(f"a{i + 1} = MatMul(a{i}, w)" for i in range(400))
    model = save(
        f"(float[n, 512] a0) => (float[n, 512] y) {{ {body} y = Neg(a400) }}",
        weights={"w": np.eye(512, dtype=np.float32)},
    )
    options = EngineOptions(threads=1)
    timeouts = Timeouts(cancel_grace=30.0)  # if it is not cancelled, it runs on
    with Master(
        model, devices, engine="openvino", options=options, timeouts=timeouts, verify="never"
    ) as master:
        before = pids(master)
        small = np.ones((1, 512), np.float32)
        for _ in range(
            2
        ):  # a shape that was there before the run that is cancelled, and comes after it
            np.testing.assert_array_equal(master.predict({"a0": small})["y"], -small)
            with pytest.raises(PredictTimeoutError):
                master.submit({"a0": np.ones((16384, 512), np.float32)}, timeout=0.5).result(30)
        np.testing.assert_array_equal(master.predict({"a0": small})["y"], -small)
        assert pids(master) == before


@pytest.mark.parametrize("devices", [1, "inline"])
def test_worker_with_two_streams_has_two_runs_at_once(save: SaveModel, devices: int | str) -> None:
    body = " ".join(f"a{i + 1} = MatMul(a{i}, w)" for i in range(400))
    model = save(
        f"(float[n, 512] a0) => (float[n, 512] y) {{ {body} y = Neg(a400) }}",
        weights={"w": np.eye(512, dtype=np.float32)},
    )
    options = EngineOptions(streams=2, threads=1)
    timeouts = Timeouts(cancel_grace=30.0)
    with Master(
        model, devices, engine="openvino", options=options, timeouts=timeouts, verify="never"
    ) as master:
        before = pids(master)
        assert master.statistics().workers[0].concurrent == 2
        long = master.submit({"a0": np.ones((16384, 512), np.float32)})
        for i in range(5):  # while the other one goes on
            small = np.full((1 + i, 512), i, np.float32)
            outputs = master.submit({"a0": small}).result(30)
            np.testing.assert_array_equal(outputs["y"], -small)
        assert not long.done()
        assert long.cancel()
        outputs = master.predict({"a0": small})
        np.testing.assert_array_equal(outputs["y"], -small)
        assert pids(master) == before


def test_killed_worker_is_replaced_and_loses_no_request(onnx_model: OnnxModel) -> None:
    with Master(onnx_model(AFFINE), 2, engine="openvino", verify="never") as master:
        for i in range(3):
            inputs = [rows(3, first=10.0 * j) for j in range(20)]
            futures = [master.submit(item) for item in inputs]
            os.kill(pids(master)[i % 2], signal.SIGKILL)
            for item, future in zip(inputs, futures, strict=True):
                assert_answers(future.result(40), item)
            wait_until(lambda: [w.state for w in master.statistics().workers] == ["ready"] * 2)


def test_run_past_the_workers_memory_is_an_error_that_says_the_limit(save: SaveModel) -> None:
    model = save(
        "(float[n, 1] x, float[1, m] z) => (float[s] y)"
        " { p = MatMul(x, z) q = Softmax(p) y = ReduceSum <keepdims = 0> (q, a) }",
        weights={"a": np.array([1])},
    )
    limits = Limits(worker_memory_bytes=1 << 30)
    with Master(model, 1, engine="openvino", limits=limits, verify="never") as master:
        (pid,) = pids(master)
        with pytest.raises(PredictError, match="worker_memory_bytes"):
            master.submit(
                {"x": np.ones((1 << 15, 1), np.float32), "z": np.ones((1, 1 << 14), np.float32)}
            ).result(60)
        small = {"x": np.ones((2, 1), np.float32), "z": np.ones((1, 4), np.float32)}
        np.testing.assert_allclose(master.submit(small).result(20)["y"], [1, 1], rtol=1e-6)
        assert pids(master) == [pid]


def test_workers_that_start_together_compile_once_and_the_list_shows_it(
    save: SaveModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "cache").mkdir(0o700)
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))
    model = save(
        "(float[n, 512] x) => (float[n, 512] y) { y = MatMul(x, w) }", weights={"w": (512, 512)}
    )
    options, built = EngineOptions(prepare="always"), set[tuple[str, int]]()
    for _ in range(2):
        with Master(model, 2, engine="openvino", options=options):
            (blob,) = Cache.default().folder.glob("*/*.blob")
            built.add((str(blob), blob.stat().st_mtime_ns))
    assert len(built) == 1
    with Master(Path(model).read_bytes(), 2, engine="openvino", options=options):
        assert len(Cache.default().entries()) == 2  # one is by the file, and one by the content
    list_entries()
    assert f"{Path(model).name}  openvino 20" in capsys.readouterr().out
