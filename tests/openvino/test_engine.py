"""Tests of mcinfer/engines/_openvino.py, with OpenVINO in this process."""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import openvino as ov
import pytest
from numpy.typing import NDArray

from mcinfer.config import CoreShare
from mcinfer.engines import _openvino
from mcinfer.engines._openvino import OpenVinoEngine
from mcinfer.engines.adapters import open_engine
from mcinfer.engines.base import (
    BoundRun,
    Buffer,
    EngineRequest,
    RunCancelledError,
    Strings,
    array_of,
    produced_from,
)
from mcinfer.errors import BuildError, InvalidInputError, PredictError
from mcinfer.examples import encoder
from mcinfer.model_cache.cache import MANIFEST, Cache, lock_path
from mcinfer.model_cache.keys import read_content
from mcinfer.private import Descriptor, take_lock
from mcinfer.specs import numpy_dtype
from tests.engine_requests import engine_request
from tests.engine_tensors import buffer, content, rows
from tests.openvino.conftest import SaveModel
from tests.process.scripts import run_python
from tests.process.waiting import wait_until

Array = NDArray[Any]

NEGATED = "(float[n, 3] x) => (float[n, 3] y) { y = Neg(x) }"
PRODUCT = "(float[n, 3] x) => (float[n, 2] y) { y = MatMul(x, w) }"

# Of 8 bits or more, by ONNX's names. OpenVINO's CPU has 32 bits for the last three.
EXACT = {
    "float": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8e4m3fn": "float8_e4m3fn",
    "float8e5m2": "float8_e5m2",
    "bool": "bool",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "uint8": "uint8",
    "uint16": "uint16",
    "uint32": "uint32",
    "int64": "int64",
    "uint64": "uint64",
    "double": "float64",
}


def loaded(model: str | Path, **given: Any) -> OpenVinoEngine:
    engine = open_engine("openvino", engine_request(model, **given))
    assert isinstance(engine, OpenVinoEngine)
    return engine


def run(engine: OpenVinoEngine, *arrays: Array) -> dict[str, Array]:
    return dict(
        zip((spec.name for spec in engine.spec.outputs), engine.compute(arrays), strict=True)
    )


def reference(model: str, *arrays: Array) -> list[Array]:
    """What ONNX Runtime says."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    results: list[Array] = session.run(None, dict(zip(names, arrays, strict=True)))
    return results


def spec_text(engine: OpenVinoEngine) -> list[str]:
    return [str(spec) for spec in (*engine.spec.inputs, *engine.spec.outputs)]


# What goes in and comes out.


@pytest.mark.parametrize("element_type", EXACT)
@pytest.mark.parametrize("count", [2, 0])
def test_type_passes_unchanged_and_is_written_in_place(
    save: SaveModel, element_type: str, count: int
) -> None:
    name = EXACT[element_type]
    model = save(
        f"({element_type}[{count}, 4] x, {element_type}[n, 4] v)"
        f" => ({element_type}[{count}, 4] y, {element_type}[n, 4] w)"
        " { y = Concat <axis = 0> (x) w = Concat <axis = 0> (v) }"
    )
    engine = loaded(model)
    assert [spec.element_type for spec in engine.spec.inputs] == [name, name]
    values = np.arange(count * 4).reshape(count, 4) % 2
    x = values.astype(numpy_dtype(name))
    x.flags.writeable = False  # it is read where it is, and never written
    y, w = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    bound = engine.bind([buffer("x", x), buffer("v", x)], [buffer("y", y), buffer("w", w)])
    assert bound.execute() == []
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(w, x)


def test_numbers_of_64_bits_have_32_in_openvino(save: SaveModel) -> None:
    """The page on OpenVINO says so; if this fails, it is out of date."""
    engine = loaded(
        save("(int64[n] i, double[n] d) => (int64[n] j, double[n] e) { j = Neg(i) e = Neg(d) }")
    )
    assert engine.notes == ("OpenVINO computes float64 as float32, which ['d', 'e'] are",)
    outputs = run(engine, np.array([2**31 - 1, 2**32 + 5]), np.array([1 / 3, 1e-300]))
    np.testing.assert_array_equal(outputs["j"], [1 - 2**31, -5])
    np.testing.assert_array_equal(outputs["e"], [-np.float32(1 / 3), 0])


def test_outputs_of_fixed_shapes_are_written_where_they_are_bound(save: SaveModel) -> None:
    engine = loaded(
        save(
            "(float[2, 3] x) => (float[2, 3] y, float s) { y = Neg(x) s = ReduceSum <keepdims = 0> (x) }"
        )
    )
    x, y, s = rows(2), np.zeros((2, 3), np.float32), np.zeros((), np.float32)
    bound = engine.bind([buffer("x", x)], [buffer("y", y), buffer("s", s)])
    for _ in range(2):
        assert bound.execute() == []
        np.testing.assert_array_equal(y, -x)
        assert s == x.sum()
        (idle,) = engine.idle
        for number, place in enumerate((y, s)):
            tensor = idle.native.get_output_tensor(number)
            assert tensor.data.ctypes.data == place.ctypes.data
        x += 1  # the tensors are read where they are


def test_output_that_is_an_input_or_another_output_is_copied(save: SaveModel) -> None:
    engine = loaded(
        save(
            "(float[n, 3] x) => (float[n, 3] a, float[n, 3] b, float[n, 3] c)"
            " { a = Identity(x) b = Neg(x) c = Identity(b) }"
        )
    )
    x = rows(2)
    places = {name: np.empty_like(x) for name in "abc"}
    engine.bind([buffer("x", x)], [buffer(*item) for item in places.items()]).execute()
    for name, sign in (("a", 1), ("b", -1), ("c", -1)):
        np.testing.assert_array_equal(places[name], sign * x)
    outputs = run(engine, x)
    x += 1
    np.testing.assert_array_equal(outputs["a"], rows(2))


def test_shapes_may_change_from_run_to_run(save: SaveModel) -> None:
    engine = loaded(save(NEGATED))
    kept: list[tuple[BoundRun, Array, Array]] = []
    for count in (4, 1, 0, 7, 4):
        x = rows(count)
        y = np.full_like(x, np.nan)
        kept.append((engine.bind([buffer("x", x)], [buffer("y", y)]), x, y))
    for _ in range(2):
        for bound, x, y in kept:
            y[...] = np.nan
            assert bound.execute() == []
            np.testing.assert_array_equal(y, -x)
    assert len(engine.idle) == 1  # all share one request


def test_outputs_of_unknown_shapes_come_back_and_stay_as_long_as_they_are_held(
    save: SaveModel,
) -> None:
    engine = loaded(
        save(
            "(float[n, 3] x) => (int64[m, 2] at, float[n, 3] y)"
            " { a = NonZero(x) at = Transpose(a) y = Neg(x) }"
        )
    )
    x = np.array([[1, 0, 2]], np.float32)
    other = np.array([[0, 0, 3], [4, 0, 0]], np.float32)
    y, at = np.empty_like(x), np.empty((9, 2), np.int64)
    bound = engine.bind([buffer("x", x)], [buffer("at", at), buffer("y", y)])
    (held,) = bound.execute()
    again = run(engine, other)
    np.testing.assert_array_equal(again["at"], [[0, 2], [1, 0]])
    np.testing.assert_array_equal(content(held), [[0, 0], [0, 2]])
    np.testing.assert_array_equal(y, -x)
    np.testing.assert_array_equal(run(engine, np.zeros((1, 3), np.float32))["at"], np.zeros((0, 2)))


def test_wrong_tensors_are_the_callers_error(save: SaveModel) -> None:
    engine = loaded(save(NEGATED))
    wrong: list[Buffer | Strings] = [
        buffer("x", np.zeros((2, 4), np.float32)),
        buffer("x", np.zeros(3, np.float32)),
        buffer("x", np.zeros((2, 3), np.float64)),
        Strings(name="x", shape=(1, 3), values=("a", "b", "c")),
    ]
    for item in wrong:
        with pytest.raises(
            InvalidInputError, match=r"^openvino: input 'x' is .*, expected x: float32\[n, 3\]"
        ):
            engine.bind([item], [])
    np.testing.assert_array_equal(run(engine, rows(2))["y"], -rows(2))


def test_failed_run_is_an_error_and_the_next_one_is_right(save: SaveModel) -> None:
    """`InferRequest.infer` of 2026.4 returned as if nothing had happened, with the old outputs."""
    engine = loaded(save("(float[n, 3] x, float[m, 3] z) => (float[a, 3] y) { y = Add(x, z) }"))
    for _ in range(2):
        with pytest.raises(PredictError, match=r"^openvino: .*Add node with name 'y'") as caught:
            run(engine, rows(2), rows(3))
        assert "src/" not in str(caught.value)
        np.testing.assert_array_equal(run(engine, rows(2), rows(2))["y"], 2 * rows(2))


# Names and shapes.


def test_names_and_symbols_are_those_of_the_model(save: SaveModel) -> None:
    model = save(
        "(float[batch, seq, 3] x, int64[batch, ?] k, float one)"
        " => (float[batch, m] y, float[batch, seq, 3] z)"
        "{ s = Constant <value = int64[2] {0, -1}> () y = Reshape(x, s) z = Mul(x, one) t = Identity(k) }"
    )
    assert spec_text(loaded(model)) == [
        "x: float32[batch, seq, 3]",
        "k: int64[batch, ?]",
        "one: float32[]",
        "y: float32[batch, m]",
        "z: float32[batch, seq, 3]",
    ]


def test_dimensions_may_be_fixed_by_name(save: SaveModel) -> None:
    model = save(
        "(float[batch, seq, 3] x) => (float[batch, seq, 3] y, float[batch, m] p)"
        "{ y = Neg(x) s = Constant <value = int64[2] {0, -1}> () p = Reshape(x, s) }"
    )
    engine = loaded(model, free_dimensions={"batch": 2, "seq": 4})
    assert spec_text(engine) == ["x: float32[2, 4, 3]", "y: float32[2, 4, 3]", "p: float32[2, 12]"]
    x = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    np.testing.assert_array_equal(run(engine, x)["p"], x.reshape(2, 12))
    some = loaded(model, free_dimensions={"batch": 2})
    assert spec_text(some)[0] == "x: float32[2, seq, 3]"
    with pytest.raises(BuildError, match=r"free_dimensions: got \['bach'\], expected some of"):
        loaded(model, free_dimensions={"bach": 2, "seq": 1})


def test_initialiser_that_is_an_input_too_is_a_constant(save: SaveModel) -> None:
    model = save(
        "(float[n, 3] x, float[3] w) => (float[n, 3] y) { y = Add(x, w) }",
        weights={"w": np.array([1, 2, 3], np.float32)},
    )
    engine = loaded(model)
    assert spec_text(engine) == ["x: float32[n, 3]", "y: float32[n, 3]"]
    np.testing.assert_array_equal(run(engine, rows(1))["y"], rows(1) + np.array([1, 2, 3]))


def test_model_of_openvinos_own_format_runs_without_symbols(
    save: SaveModel, tmp_path: Path
) -> None:
    ir = tmp_path / "model.xml"
    model = save(PRODUCT, weights={"w": (3, 2)})
    ov.save_model(ov.Core().read_model(model), ir, compress_to_fp16=False)
    engine = loaded(str(ir))
    assert spec_text(engine) == ["x: float32[?, 3]", "y: float32[?, 2]"]
    np.testing.assert_allclose(run(engine, rows(2))["y"], reference(model, rows(2))[0], rtol=1e-5)
    (tmp_path / "model.bin").unlink()
    with pytest.raises(BuildError, match=r"model\.xml: .*bin file cannot be found"):
        loaded(str(ir))


@pytest.mark.parametrize("weights", ["outside", "itself", "pipe"])
def test_weights_of_an_ir_are_a_file_beside_it(
    save: SaveModel, tmp_path: Path, weights: str
) -> None:
    """OpenVINO would wait for ever for a pipe, and end the process at a link to itself."""
    (folder := tmp_path / "models").mkdir()
    model = save(PRODUCT, weights={"w": (3, 2)})
    ov.save_model(ov.Core().read_model(model), folder / "model.xml")
    place = folder / "model.bin"
    place.rename(tmp_path / "w.bin")
    if weights == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(place if weights == "itself" else tmp_path / "w.bin")
    with pytest.raises(BuildError, match=r"model\.bin"):
        loaded(folder / "model.xml")


@pytest.mark.parametrize("name", ["model.onnx", "model.XML", "model"])
def test_ir_of_another_name_is_refused(save: SaveModel, tmp_path: Path, name: str) -> None:
    """OpenVINO takes it, but nothing else of mcinfer's would know of its weights: not the cache's key."""
    model = save(NEGATED, "plain.onnx")
    ov.save_model(ov.Core().read_model(model), tmp_path / "model.xml")
    (tmp_path / "model.xml").rename(tmp_path / name)
    with pytest.raises(
        BuildError, match=r"got an OpenVINO IR, expected a path that ends with '\.xml'"
    ):
        loaded(tmp_path / name)


def test_model_with_state_is_refused(tmp_path: Path) -> None:
    """Requests share OpenVINO's requests, and a run may be repeated by another worker."""
    x = ov.opset13.parameter([1, 3], np.float32, name="x")
    past = ov.opset6.read_value(x, "past", ov.Type.f32, ov.PartialShape([1, 3]))
    y = ov.opset13.add(past, x)
    kept = ov.opset6.assign(y, "past")
    graph = ov.Model(results=[ov.opset13.result(y)], sinks=[kept], parameters=[x], name="g")
    ov.save_model(graph, tmp_path / "model.xml")
    with pytest.raises(BuildError, match=r"model\.xml keeps \['past'\] from run to run"):
        loaded(tmp_path / "model.xml")


# Results.


def test_precision_is_float32_unless_another_is_asked_for() -> None:
    images = np.random.default_rng(0).random((2, 3, 32, 32), dtype=np.float32)
    exact = run(loaded(encoder()), images)["embedding"]
    abilities = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    for precision in ("f32", "bf16", "f16"):
        engine = loaded(encoder(), precision=precision)
        got = engine.compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        difference = np.abs(run(engine, images)["embedding"] - exact).max()
        if got == "f32":
            assert difference == 0
        else:
            assert 0 < difference < 0.1
        is_right = precision in ("f32", got)
        assert is_right or engine.notes == (
            f"precision: got '{precision}', but OpenVINO computes in {got} here",
        )
        assert (got == precision) or precision == "f16" or "BF16" not in abilities
        assert not is_right or not engine.notes


def test_external_data_outside_of_the_models_folder_is_refused(
    save: SaveModel, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    model, whole = onnx.load(save(PRODUCT, weights={"w": (3, 2)})), tmp_path / "whole.onnx"
    onnx.save(model, whole, save_as_external_data=True, location="w.bin", size_threshold=0)
    np.testing.assert_allclose(run(loaded(whole), rows(1))["y"], reference(str(whole), rows(1))[0])
    moved = tmp_path / "models" / "model.onnx"
    moved.write_bytes(whole.read_bytes().replace(b"w.bin", b"../ww"))
    with pytest.raises(BuildError, match="external data"):
        loaded(moved)


def test_threads_are_those_of_the_workers_share_unless_a_property_says_others() -> None:
    own = loaded(encoder(), session_config={"INFERENCE_NUM_THREADS": "2"}, threads=1)
    assert own.compiled.get_property("INFERENCE_NUM_THREADS") == 2
    request = EngineRequest(
        model=str(encoder()), device=engine_request(encoder()).device, share=CoreShare(cores=(0, 1))
    )
    engine = open_engine("openvino", request)
    assert isinstance(engine, OpenVinoEngine)
    assert engine.compiled.get_property("INFERENCE_NUM_THREADS") == 2


# Several threads, cancelling.

LAYERS = 300


@pytest.fixture
def slow(save: SaveModel) -> Iterator[tuple[OpenVinoEngine, list[Buffer], Array]]:
    """An engine whose run takes seconds, its inputs, and the first one's array."""
    body = " ".join(f"a{i + 1} = MatMul(a{i}, w)" for i in range(LAYERS))
    size = 1024
    signature = f"(float[n, {size}] a0, float[{size}, {size}] w) => (float[n, {size}] y)"
    text = f"{signature} {{ {body} y = Neg(a{LAYERS}) }}"
    w, a = np.eye(size, dtype=np.float32), np.ones((size, size), np.float32)
    yield loaded(save(text)), [buffer("a0", a), buffer("w", w)], a
    del w  # which the inputs do not keep


# What a failed run leaves behind: OpenVINO keeps its shapes in some operators. For a cancelled one,
# test_pools.py shows that the next run has its own.


MISMATCH = (
    "(float[n, 8] a0, float[m, 8] z) => (float[k, 8] y)"
    f" {{ {' '.join(f'a{i + 1} = MatMul(a{i}, w)' for i in range(40))} s = Add(a40, z) y = Neg(s) }}"
)
"""Its last but one operator fails for different n and m, when those before it have the new shapes."""

EYE = {"w": np.eye(8, dtype=np.float32)}


@pytest.mark.parametrize("threads", [1, 2])
def test_run_after_a_failed_one_has_its_own_shapes(save: SaveModel, threads: int) -> None:
    engine = loaded(save(MISMATCH, weights=EYE), threads=threads)
    good, zeros = np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32)
    for count in (5, 9, 3):
        np.testing.assert_array_equal(run(engine, good, zeros)["y"], -good)
        with pytest.raises(PredictError, match="Add node with name 's'"):
            run(engine, np.ones((count, 8), np.float32), zeros)
    np.testing.assert_array_equal(run(engine, good, zeros)["y"], -good)


def test_runs_beside_failed_ones_are_right(save: SaveModel) -> None:
    """Two streams have one compiled model; a run may get the stream on which another one has just failed."""
    engine = loaded(save(MISMATCH, weights=EYE), streams=2)
    assert engine.concurrent == 2
    twin, zeros, stop = engine.twin(), np.zeros((4, 8), np.float32), threading.Event()

    def fail() -> int:
        count = 0
        while not stop.is_set():
            with pytest.raises(PredictError, match="Add node with name 's'"):
                run(twin, np.ones((5 + count % 7, 8), np.float32), zeros)
            count += 1
        return count

    with ThreadPoolExecutor(1) as threads:
        failing = threads.submit(fail)
        try:
            for i in range(40):
                good = np.full((4, 8), i, np.float32)
                np.testing.assert_array_equal(run(engine, good, zeros)["y"], -good)
        finally:
            stop.set()
        assert failing.result(30)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("same", None),
        ("other", "was changed, and is to be loaded again"),
        ("none", r"model1\.onnx.*No such file|No such file.*model1\.onnx"),
    ],
)
def test_model_that_is_another_one_by_now_does_not_take_the_place_of_the_loaded_one(
    save: SaveModel, change: str, words: str | None
) -> None:
    model = save(MISMATCH, weights=EYE)
    engine = loaded(model, content=read_content(model))
    good, zeros = np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32)
    run(engine, good, zeros)
    if change == "other":
        shutil.copy(
            save("(float[n, 8] a0, float[m, 8] z) => (float[n, 8] y) { y = Neg(z) }"), model
        )
    elif change == "same":
        os.utime(model)
    else:
        os.unlink(model)
    np.testing.assert_array_equal(run(engine, good, zeros)["y"], -good)
    with pytest.raises(PredictError, match="Add node with name 's'"):
        run(engine, good, zeros[:3])
    with pytest.raises(PredictError, match=words) if words else nullcontext():
        np.testing.assert_array_equal(run(engine, good, zeros)["y"], -good)


def test_streams_that_openvino_does_not_open_are_not_counted(save: SaveModel) -> None:
    """A run that waits for another one's stream cannot be cancelled before that one has ended."""
    model = save(NEGATED)
    fewer = loaded(model, streams=2, session_config={"INFERENCE_NUM_THREADS": "1"})
    assert fewer.concurrent == fewer.compiled.get_property("NUM_STREAMS") == 1
    assert fewer.notes == ("streams: got 2, but OpenVINO opens 1 here",)
    np.testing.assert_array_equal(run(fewer, rows(2))["y"], -rows(2))


def test_cancel_ends_runs_of_all_threads(
    slow: tuple[OpenVinoEngine, list[Buffer], Array],
) -> None:
    engine, inputs, _ = slow
    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(engine.bind(inputs, []).execute) for _ in range(3)]
        # The others wait for the stream, or for a request, which OpenVINO makes between runs alone.
        wait_until(lambda: engine.model.running)
        engine.cancel()
        for one in runs:
            with pytest.raises(RunCancelledError):
                one.result(30)
    assert not engine.model.running


def test_twin_has_a_stream_and_cancellations_of_its_own(
    slow: tuple[OpenVinoEngine, list[Buffer], Array], tmp_path: Path
) -> None:
    _, inputs, a = slow
    engine = loaded(tmp_path / "model1.onnx", streams=2, threads=1)
    assert engine.concurrent == 2
    assert engine.compiled.get_property("NUM_STREAMS") == 2
    assert engine.compiled.get_property("INFERENCE_NUM_THREADS") == 2
    twin = engine.twin()
    # The long run is not to end before the small one, however busy the machine is.
    small, many = (np.ones((count, a.shape[1]), np.float32) for count in (2, 16 * len(a)))
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(engine.bind([buffer("a0", many), inputs[1]], []).execute)
        wait_until(lambda: engine.model.running)
        twin.cancel()
        with pytest.raises(RunCancelledError, match="before it began"):
            twin.bind([buffer("a0", small), inputs[1]], []).execute()
        twin.arm()
        (left,) = twin.bind([buffer("a0", small), inputs[1]], []).execute()
        np.testing.assert_array_equal(content(left), -small)
        assert engine.model.running  # the long run had another stream
        engine.cancel()
        with pytest.raises(RunCancelledError):
            run.result(30)


def test_threads_run_side_by_side_and_share_no_memory(save: SaveModel) -> None:
    engine = loaded(
        save(
            "(float[n, 3] x) => (float[n, 3] y, float[m] z)"
            " { y = Mul(x, x) s = Constant <value = int64[1] {-1}> () z = Reshape(y, s) }"
        )
    )
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait(20)
        for _ in range(200):
            x = rng.normal(size=(int(rng.integers(0, 20)), 3)).astype(np.float32)
            y = np.empty_like(x)
            specs = engine.spec.inputs[0], engine.spec.outputs[0]
            given, place = map(produced_from, specs, (x, y))
            assert isinstance(place, Buffer)
            made = engine.bind([given], [place] if seed % 2 else []).execute()
            outputs = {"y": y, **{item.name: array_of(item) for item in made}}
            np.testing.assert_array_equal(outputs["y"], x * x)
            np.testing.assert_array_equal(outputs["z"], (x * x).ravel())

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, seed) for seed in range(4)]:
            done.result(60)
    assert len(engine.idle) <= 4


# What cannot be loaded.


def test_operator_that_openvino_lacks_is_named(save: SaveModel) -> None:
    model = save("(float[n, 3] x) => (float[n, 3] y) { y = com.microsoft.NoSuchThing(x) }")
    with pytest.raises(BuildError, match=r"openvino: .*com\.microsoft\.NoSuchThing"):
        loaded(model)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.onnx", b"", "got an empty file, expected an ONNX model, or an OpenVINO IR"),
        ("a.onnx", b"<html></html>", "got an HTML page, expected an ONNX model, or an OpenVINO IR"),
        (
            "a.xml",
            b"<?xml version='1.0'?><foo/>",
            "got text, expected an ONNX model, or an OpenVINO IR",
        ),
        ("a.pdmodel", b"PK\x03\x04" + b"\0" * 100, "got a zip archive, expected an ONNX model"),
    ],
)
def test_file_that_is_no_model_is_named(
    tmp_path: Path, name: str, data: bytes, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(BuildError, match=re.escape(words)):
        loaded(str(path))
    assert capfd.readouterr().err == ""  # OpenVINO's other front ends would write there


@pytest.mark.parametrize("element_type", ["string", "complex64", "float8e4m3fnuz"])
def test_type_that_openvino_lacks_is_refused_at_build(save: SaveModel, element_type: str) -> None:
    with pytest.raises(
        BuildError, match=r"openvino: .*(of type string, expected one of|Unsupported type)"
    ):
        loaded(save(f"({element_type}[n] x) => ({element_type}[n] y) {{ y = Identity(x) }}"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"variable_weights": ["w"]}, r"variable_weights: got \['w'\], but .* openvino cannot"),
        ({"device": "npu:0", "streams": 2}, "streams: got 2 for npu:0, expected None"),
        ({"device": "cuda:0"}, "no device cuda:0, expected one of .*'npu:0'"),
        ({"session_config": {"FOO": "1"}}, "Unsupported property FOO"),
        ({"concurrent_runs": 2}, "concurrent_runs: got 2, but .* openvino has streams"),
        ({"free_denotations": {"n": 2}}, "free_denotations: got .* openvino has no such option"),
    ],
)
def test_option_that_openvino_lacks_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BuildError, match=words):
        loaded(encoder(), **options)


@pytest.mark.parametrize(("device", "name"), [("openvino-gpu:3", "GPU.3"), ("npu:2", "NPU.2")])
def test_device_that_is_not_there_is_refused_with_those_that_are(device: str, name: str) -> None:
    words = rf"device {device}: openvino [\d.]+ finds no {name} here; it has \[.*'CPU'.*\]"
    with pytest.raises(BuildError, match=words):
        loaded(encoder(), device=device)
    engine = loaded(encoder(), device=device, allow_fallback=True)
    assert engine.providers == ("CPU",)


# What it keeps in the cache.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """An empty cache."""
    folder = tmp_path / "cache"
    folder.mkdir(0o700)
    monkeypatch.setenv("MCINFER_CACHE", str(folder))
    return Cache.default()


def blobs(cache: Cache) -> list[Path]:
    return sorted(cache.folder.glob("*/*.blob"))


def is_from_cache(engine: OpenVinoEngine) -> bool:
    return bool(engine.compiled.get_property("LOADED_FROM_CACHE"))


def test_second_start_takes_the_compiled_model_from_the_cache(
    cache: Cache, save: SaveModel
) -> None:
    model = save("(float[n, 3] x) => (float[n, 3] y) { y = MatMul(x, w) }", weights={"w": (3, 3)})
    first = loaded(model, prepare="always")
    assert not is_from_cache(first)
    (blob,) = blobs(cache)
    assert [info.facts["file"][0] for info in cache.entries()] == [model]
    second = loaded(model, prepare="always", threads=2)
    assert is_from_cache(second)
    assert spec_text(second) == spec_text(first) == ["x: float32[n, 3]", "y: float32[n, 3]"]
    np.testing.assert_array_equal(run(second, rows(2))["y"], run(first, rows(2))["y"])
    # Another content at the same path, another precision, other properties: each its own folder.
    for given in (
        {"precision": "bf16"},
        {"session_config": {"PERF_COUNT": "NO"}},
        {"free_dimensions": {"n": 2}},
    ):
        assert not is_from_cache(loaded(model, prepare="always", **given))
        assert is_from_cache(loaded(model, prepare="always", **given))
    shutil.copy(save(NEGATED), model)
    changed = loaded(model, prepare="always")
    assert not is_from_cache(changed)
    np.testing.assert_array_equal(run(changed, rows(2))["y"], -rows(2))
    assert len(blobs(cache)) == 5
    # Whoever empties the cache takes nothing from those who run.
    cache.clear()
    assert not blobs(cache)
    np.testing.assert_array_equal(run(second, rows(2))["y"], run(first, rows(2))["y"])
    assert blob not in blobs(cache)


def test_small_models_and_those_never_prepared_are_not_kept(cache: Cache, save: SaveModel) -> None:
    small = save(NEGATED)
    large = save(
        "(float[n, 2048] x) => (float[n, 2048] y) { y = MatMul(x, w) }",
        weights={"w": np.ones((2048, 2048), np.float32)},
    )
    loaded(small, prepare="auto")
    loaded(large, prepare="never")
    loaded(large, prepare="auto", session_config={"CACHE_DIR": str(cache.folder.with_name("mine"))})
    assert not blobs(cache)
    loaded(large, prepare="auto")
    assert len(blobs(cache)) == 1


def test_device_that_goes_on_writing_has_a_folder_that_is_not_sealed(
    cache: Cache, save: SaveModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_openvino, "_SEALED", "")  # as on a GPU
    model = save(NEGATED)
    assert not is_from_cache(loaded(model, prepare="always"))
    (blob,) = cache.folder.glob("engines/*/*.blob")
    (blob.parent / "1.cl_cache").write_bytes(b"kernels")
    engine = loaded(model, prepare="always")
    assert is_from_cache(engine)
    np.testing.assert_array_equal(run(engine, rows(2))["y"], -rows(2))
    assert not cache.entries()
    assert not caplog.records
    monkeypatch.setenv("MCINFER_CACHE_LIMIT", "1")
    loaded(model, prepare="always")
    assert not Cache.default().engine_bytes()


@pytest.mark.parametrize("damage", ["a byte", "cut short", "a byte, and no record"])
def test_build_that_was_damaged_is_made_again(cache: Cache, save: SaveModel, damage: str) -> None:
    text = "(float[n, 512] x) => (float[n, 512] y) { y = MatMul(x, w) }"
    model = save(text, weights={"w": np.eye(512, dtype=np.float32)})
    loaded(model, prepare="always")
    (blob,) = blobs(cache)
    blob.chmod(0o600)
    with blob.open("r+b") as file:  # in the middle of the weights
        file.seek(blob.stat().st_size // 2)
        if damage == "cut short":
            file.truncate()
        else:
            file.write(np.ones(16384, np.float32).tobytes())
    if "no record" in damage:
        (blob.parent / MANIFEST).unlink()
    x = np.ones((1, 512), np.float32)
    for is_known in (False, True):
        engine = loaded(model, prepare="always")
        assert is_from_cache(engine) is is_known
        np.testing.assert_array_equal(run(engine, x)["y"], x)


@pytest.mark.parametrize("gone", ["build", "folder"])
def test_build_that_another_process_removes_is_made_again(
    cache: Cache, save: SaveModel, gone: str
) -> None:
    """As when the cache is emptied between two looks at it."""
    model = save(NEGATED)
    loaded(model, prepare="always")
    (blob,) = blobs(cache)
    blob.unlink()
    if gone == "build":
        blob.symlink_to("none")  # it is listed, and not there
    else:
        shutil.rmtree(blob.parent)
    np.testing.assert_array_equal(run(loaded(model, prepare="always"), rows(2))["y"], -rows(2))


def test_build_that_stands_still_keeps_no_other_worker_waiting(
    cache: Cache, save: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(NEGATED)
    loaded(model, prepare="always")
    (blob,) = blobs(cache)
    blob.unlink()
    monkeypatch.setattr(_openvino, "_STUCK_SECONDS", 0.2)
    lock = take_lock(lock_path(blob.parent))
    with closing(Descriptor(lock or 0)):
        engine = loaded(model, prepare="always")
    np.testing.assert_array_equal(run(engine, rows(2))["y"], -rows(2))


def test_cache_that_cannot_be_used_leaves_openvino_without(
    monkeypatch: pytest.MonkeyPatch, save: SaveModel, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MCINFER_CACHE", "/proc/none")
    engine = loaded(save(NEGATED), prepare="always")
    np.testing.assert_array_equal(run(engine, rows(2))["y"], -rows(2))
    assert "what openvino builds is not kept" in caplog.text


# The import.


def test_import_sends_nothing_and_writes_nothing(tmp_path: Path) -> None:
    program = """
import os, sys, threading
import mcinfer.engines._openvino
import openvino
assert "openvino_telemetry" not in sys.modules, "telemetry"
assert threading.active_count() == 1, threading.enumerate()
assert not os.listdir(os.environ["HOME"]), os.listdir(os.environ["HOME"])
openvino.convert_model
"""
    done = run_python("-c", program, env={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
