"""Tests of mcinfer/engines: what every engine promises, and the adapter to ONNX Runtime."""

import ctypes
import gzip
import json
import pickle
import re
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, parser

from mcinfer.config import CoreShare
from mcinfer.engines import _onnxruntime
from mcinfer.engines.adapters import open_engine
from mcinfer.engines.base import (
    ArrayEngine,
    Buffer,
    Engine,
    Produced,
    RunCancelledError,
    Strings,
)
from mcinfer.errors import BuildError, InvalidInputError, MissingDependencyError, PredictError
from mcinfer.model_cache.onnx_files import scan
from mcinfer.specs import (
    ELEMENT_TYPES,
    STRING,
    ModelDescription,
    ModelSpec,
    TensorSpec,
    numpy_dtype,
)
from tests.engine_requests import engine_request
from tests.engine_tensors import buffer, content, packed, rows
from tests.text_models import text_model

HAS_CUDA = "CUDAExecutionProvider" in ort.get_available_providers()
PATIENCE = 20.0

NOT_IN_ONNXRUNTIME = ("complex64", "complex128")
FOUR_BITS = ("int4", "uint4")
BINDABLE = [n for n in ELEMENT_TYPES if n not in (*NOT_IN_ONNXRUNTIME, *FOUR_BITS, STRING)]


def save(path: Path, graph: str, **how: Any) -> str:
    """Write a model of `text_model`; return its path."""
    onnx.save(text_model(graph, **{"opset": 21, **how}), path)
    return str(path)


def type_name(element_type: str) -> str:
    """The name of an element type in ONNX's text format."""
    return str(TensorProto.DataType.Name(ELEMENT_TYPES[element_type].onnx)).lower()


def open_ort(model: str, device: str = "cpu:0", **options: Any) -> Engine:
    return open_engine("onnxruntime", engine_request(model, device, **options))


def open_fake(path: Path, **model: Any) -> Engine:
    path.write_text(json.dumps(model))
    return open_engine("fake", engine_request(str(path)))


# What every engine promises: a model of y = 2 x + 1 and n, whose shape is known only to the engine.


@pytest.fixture
def affine_model(tmp_path: Path) -> str:
    text = """(float[batch, 3] x) => (float[batch, 3] y, float[rows, 3] n)
    <float two = {2}, float one = {1}> { twice = Mul(x, two) y = Add(twice, one) n = Identity(y) }"""
    return save(tmp_path / "affine.onnx", text)


@pytest.fixture(params=["onnxruntime", "fake"])
def affine(request: pytest.FixtureRequest, affine_model: str, tmp_path: Path) -> Engine:
    if request.param == "onnxruntime":
        return open_ort(affine_model)
    rule = {"from": "x", "scale": 2, "add": 1}
    outputs = [["y", "float32", ["batch", 3], rule], ["n", "float32", ["rows", 3], rule]]
    inputs = [["x", "float32", ["batch", 3]]]
    return open_fake(tmp_path / "affine.json", inputs=inputs, outputs=outputs)


def test_run_reads_its_inputs_anew_each_time(affine: Engine) -> None:
    x, y = rows(2), np.empty((2, 3), np.float32)
    run = affine.bind([buffer("x", x)], [buffer("y", y)])
    for start in range(5):
        x[:] = rows(2, start)
        produced = run.execute()
        assert [item.name for item in produced] == ["n"]
        assert np.array_equal(content(produced[0]), 2 * x + 1)
        assert np.array_equal(y, 2 * x + 1)
        assert np.array_equal(x, rows(2, start))


def test_what_was_produced_lives_until_the_next_run_of_the_same_layout(affine: Engine) -> None:
    arrays = [rows(1000, start) for start in range(5)]
    runs = [affine.bind([buffer("x", x)], []) for x in arrays]
    for _ in range(2):
        produced = [run.execute()[0] for run in runs]
        for x, item in zip(arrays, produced, strict=True):
            assert np.array_equal(content(item), 2 * x + 1)
            x += 1


def test_output_bound_with_another_shape_than_it_has_is_produced(affine: Engine) -> None:
    x, other = rows(2), np.full((3, 3), 7, np.float32)
    run = affine.bind([buffer("x", x)], [buffer("y", other)])
    for _ in range(2):
        assert all(np.array_equal(content(item), 2 * x + 1) for item in run.execute()[:1])
        assert [item.name for item in run.execute()] == ["y", "n"]
        x += 1
    assert (other == 7).all()
    right = np.empty((2, 3), np.float32)
    affine.bind([buffer("x", x)], [buffer("y", right)]).execute()
    assert np.array_equal(right, 2 * x + 1)


@pytest.mark.parametrize("declared", ["float[batch, 3]", "float[2, 3]"])
def test_input_that_is_an_output_as_it_is_is_written_to_its_place(
    tmp_path: Path, declared: str
) -> None:
    graph = f"({declared} x) => ({declared} y, {declared} x) {{ y = Add(x, x) }}"
    model = open_ort(save(tmp_path / "passed.onnx", graph))
    x, y, passed = rows(2), np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    run = model.bind([buffer("x", x)], [buffer("y", y), buffer("x", passed)])
    for start in range(3):
        x[:] = rows(2, start)
        assert not run.execute()
        assert np.array_equal(y, 2 * x)
        assert np.array_equal(passed, x)


class Texts(ArrayEngine):
    """An engine of a user's, whose strings are NumPy's own."""

    name = "texts"
    spec = ModelSpec(
        inputs=(), outputs=(TensorSpec(name="y", dtype=numpy_dtype(STRING), shape=(2,)),)
    )

    def __init__(self, made: NDArray[Any]) -> None:
        super().__init__()
        self.made = made

    def run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        return [self.made, *inputs]


@pytest.mark.parametrize("dtype", ["U", "O", "T"])
def test_strings_of_an_engine_may_be_of_each_type_that_numpy_has(dtype: str) -> None:
    engine = Texts(np.array(["a", "b"], dtype))
    assert engine.bind([], []).execute() == [Strings(name="y", shape=(2,), values=("a", "b"))]


OFFERED = ["mindspore", "onnxruntime", "openvino"]
"""The engine "fake" is for tests."""


@pytest.mark.parametrize(
    ("engine", "device", "text"),
    [
        ("onnxruntime", "npu:3", "engine onnxruntime has no device npu:3, expected .*cpu"),
        ("mindspore", "ascend:1", "engine mindspore has no device ascend:1, expected one of .*cpu"),
        (
            "tensorrt",
            "cpu:0",
            rf"engine: got 'tensorrt', expected one of {re.escape(str(OFFERED))}",
        ),
    ],
)
def test_engine_or_device_that_there_is_not_is_a_build_error(
    affine_model: str, engine: str, device: str, text: str
) -> None:
    with pytest.raises(BuildError, match=f"^{text}"):
        open_engine(engine, engine_request(affine_model, device))


def test_model_whose_names_fill_a_message_is_refused(tmp_path: Path) -> None:
    name = "x" * (1 << 20)
    with pytest.raises(
        BuildError, match=r"^got 1048\d+ characters in the names of 2 inputs and outputs"
    ):
        open_fake(
            tmp_path / "model.json",
            inputs=[[name, "float32", ["batch"]]],
            outputs=[["y", "float32", ["batch"], {"from": name}]],
        )


# Cancelling.


def test_threads_take_turns_where_an_engine_runs_in_one_thread(tmp_path: Path) -> None:
    x, y = ["x", "float32", ["n"]], ["y", "float32", ["n"], {"from": "x", "scale": 2}]
    engine: Any = open_fake(tmp_path / "m.json", inputs=[x], outputs=[y], when={"-1": "fail"})
    run, inside, met = engine.run, threading.Lock(), list[str]()

    def run_alone(*arguments: Any) -> Any:
        if not inside.acquire(blocking=False):
            met.append("two runs at once")
            return run(*arguments)
        try:
            time.sleep(0.001)  # so that another would come meanwhile
            return run(*arguments)
        finally:
            inside.release()

    def ask(number: int) -> None:
        value = -1 if number % 5 == 0 else number
        try:
            with engine.turn:
                [y] = engine.compute([np.full(2, value, np.float32)])
            assert y.tolist() == [2 * value] * 2
        except PredictError:
            assert value == -1

    engine.run = run_alone
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(ask, range(40))] == [None] * 40
    assert not met


COUNTING = """(int64 times) => (int64 count) <int64 one = {1}, int64 zero = {0}> {
    count = Loop <body = body (int64 i, bool go, int64 v) => (bool go_on, int64 v_next) {
        go_on = Identity(go)
        v_next = Add(v, one)
    }> (times, , zero)
}"""


def test_cancel_ends_the_run_of_one_twin_and_not_that_of_the_other(tmp_path: Path) -> None:
    path = save(tmp_path / "loop.onnx", COUNTING)
    engines = [open_ort(path, concurrent_runs=2)]
    engines.append(engines[0].twin())
    times = [np.array(2**62, np.int64) for _ in engines]
    runs = [e.bind([buffer("times", t)], []) for e, t in zip(engines, times, strict=True)]
    with ThreadPoolExecutor(2) as threads:
        for engine in engines:
            engine.arm()
        futures = [threads.submit(run.execute) for run in runs]
        for engine, future, other in zip(engines, futures, reversed(futures), strict=True):
            is_last = other.done()
            engine.cancel()
            with pytest.raises(RunCancelledError):
                future.result(timeout=PATIENCE)
            assert other.done() == is_last
    with pytest.raises(RunCancelledError):
        runs[0].execute()  # still cancelled
    for engine, run, count in zip(engines, runs, times, strict=True):
        engine.arm()
        count[...] = 12
        assert content(run.execute()[0]) == 12


def test_card_executes_one_run_at_a_time(affine_model: str) -> None:
    with pytest.raises(BuildError, match="concurrent_runs: got 2 for cuda:0, expected 1"):
        open_ort(affine_model, "cuda:0", concurrent_runs=2, allow_fallback=True)


@pytest.mark.parametrize(
    ("given", "threads"), [({}, 4), ({"concurrent_runs": 3}, 2), ({"concurrent_runs": 9}, 1)]
)
def test_runs_at_once_share_the_threads_of_their_worker(
    affine_model: str, given: dict[str, Any], threads: int
) -> None:
    wanted = engine_request(affine_model, threads=None, **given)
    wanted = replace(wanted, share=CoreShare(cores=(0, 1, 2, 3)))
    engine: Any = open_engine("onnxruntime", wanted)
    assert engine.session.get_session_options().intra_op_num_threads == threads


# ONNX Runtime: element types.


def every_bit_pattern(element_type: str) -> NDArray[np.uint8]:
    """Bytes with all values of small types, NaNs and infinities of all types among them."""
    random: NDArray[np.uint8] = np.random.default_rng(1).integers(0, 256, 1 << 14, np.uint8)
    random[:512] = np.repeat(np.arange(256, dtype=np.uint8), 2)
    random[512:576], random[576:640] = 0, 0xFF
    if element_type == "bool":
        random &= 1
    return random


@pytest.mark.parametrize("element_type", BINDABLE)
def test_tensor_of_every_type_passes_bit_by_bit(tmp_path: Path, element_type: str) -> None:
    kind = type_name(element_type)
    text = f"({kind}[n] x) => ({kind}[n] y, {kind}[n] z) {{ y = Identity(x) z = Identity(x) }}"
    engine = open_ort(save(tmp_path / "identity.onnx", text))
    assert engine.spec.inputs[0].dtype == numpy_dtype(element_type)
    raw = every_bit_pattern(element_type)
    shape = (raw.size * 8 // ELEMENT_TYPES[element_type].bits,)
    out = np.zeros_like(raw)
    x, y = (packed(n, element_type, a, shape) for n, a in (("x", raw), ("y", out)))
    (z,) = engine.bind([x], [y]).execute()
    assert isinstance(z, Produced)
    assert np.array_equal(out, raw)
    assert (z.element_type, z.shape, z.size) == (element_type, shape, raw.size)
    assert ctypes.string_at(z.address, z.size) == raw.tobytes()


@pytest.mark.parametrize("element_type", FOUR_BITS)
def test_four_bit_tensors_lie_two_elements_to_a_byte(tmp_path: Path, element_type: str) -> None:
    kind = type_name(element_type)
    text = f"""({kind}[n] x, float[n] w) => (float[n] wide, {kind}[n] narrow) {{
        wide = Cast <to = 1> (x) narrow = Cast <to = {ELEMENT_TYPES[element_type].onnx}> (w) }}"""
    engine = open_ort(save(tmp_path / "cast.onnx", text))
    values = (
        np.arange(-8, 7) if element_type == "int4" else np.arange(15)
    )  # 15: half a byte is left
    halves = np.append(values, 0).astype(np.int8).view(np.uint8) & 0x0F
    raw = (halves[::2] | (halves[1::2] << 4)).astype(np.uint8)
    floats, wide, narrow = values.astype(np.float32), np.empty(15, np.float32), np.zeros_like(raw)
    inputs = [packed("x", element_type, raw, (15,)), buffer("w", floats)]
    places = [buffer("wide", wide), packed("narrow", element_type, narrow, (15,))]
    engine.bind(inputs, places).execute()
    assert np.array_equal(wide, values)
    narrow[-1] &= 0x0F  # the other half of the last byte means nothing
    assert np.array_equal(narrow, raw)
    produced = engine.bind(inputs, []).execute()[1]
    assert isinstance(produced, Produced)
    assert (produced.element_type, produced.shape, produced.size) == (element_type, (15,), 8)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 1, 1, 1, 1, 1, 1, 1)], ids=str)
def test_scalars_and_empty_tensors_are_tensors(tmp_path: Path, shape: tuple[int, ...]) -> None:
    kind = f"float{[*shape]}" if shape else "float"
    text = f"({kind} x) => ({kind} y, {kind} z) {{ y = Neg(x) z = Neg(x) }}"
    engine = open_ort(save(tmp_path / "negate.onnx", text))
    assert engine.spec.inputs[0].shape == shape
    x, y = np.full(shape, 3, np.float32), np.zeros(shape, np.float32)
    (z,) = engine.bind([buffer("x", x)], [buffer("y", y)]).execute()
    assert np.array_equal(y, -x)
    assert np.array_equal(content(z), -x)


@pytest.mark.parametrize(
    ("kind", "shape", "values"),
    [
        ("string[a, b]", (2, 2), ("a", "ü€😀", "", "x\x00y")),
        ("string[a, b]", (2, 2), (b"a", "ü€😀".encode(), b"", "mixed")),
        ("string", (), ("scalar",)),
        ("string[a, b]", (0, 2), ()),
    ],
    ids=["text", "bytes", "scalar", "empty"],
)
def test_strings_pass_as_they_are(
    tmp_path: Path, kind: str, shape: tuple[int, ...], values: tuple[str | bytes, ...]
) -> None:
    engine = open_ort(save(tmp_path / "m.onnx", f"({kind} x) => ({kind} y) {{ y = Identity(x) }}"))
    assert engine.spec.inputs[0].element_type == STRING
    run = engine.bind([Strings(name="x", shape=shape, values=values)], [])
    expected = tuple(v.decode() if isinstance(v, bytes) else v for v in values)
    for _ in range(2):
        assert run.execute() == [Strings(name="y", shape=shape, values=expected)]


def test_strings_and_numbers_go_together(tmp_path: Path) -> None:
    """Strings and numbers in, strings and numbers out, one output of a shape not known before."""
    text = """(string[n] s, bfloat16[n] b, float[n] x)
    => (string[n] t, float[n] f, int64[1, found] k, float[n] y)
    { t = Identity(s) f = Cast <to = 1> (b) k = NonZero(x) y = Neg(x) }"""
    engine = open_ort(save(tmp_path / "labels.onnx", text))
    s = Strings(name="s", shape=(3,), values=("a", "b", "c"))
    b, x = np.array([1.5, -2, 0]).astype(numpy_dtype("bfloat16")), np.array([3, 0, 5], np.float32)
    y = np.zeros(3, np.float32)
    run = engine.bind([s, buffer("b", b), buffer("x", x)], [buffer("y", y)])
    for found in ([3, 0, 5], [0, 7, 0], [0, 0, 0], [1, 1, 1]):
        x[:] = found
        produced = run.execute()
        assert [item.name for item in produced] == ["t", "f", "k"]
        assert produced[0] == Strings(name="t", shape=(3,), values=("a", "b", "c"))
        assert np.array_equal(content(produced[1]), [1.5, -2, 0])
        assert np.array_equal(content(produced[2]), [np.flatnonzero(x)])
        assert np.array_equal(y, -x)
    no_text = Strings(name="s", shape=(1,), values=(b"\xff",))
    with pytest.raises(InvalidInputError, match="input 's' is not UTF-8"):
        engine.bind([no_text, buffer("b", b[:1]), buffer("x", x[:1])], [])


# ONNX Runtime: shapes that only the run knows, and shapes that the model lies about.


LIES = {
    "more rows": "<int64[4] rows = {0, 1, 2, 0}> { y = Gather(x, rows) minus = Neg(x) }",
    "another rank": "<int64[1] flat = {-1}> { y = Reshape(x, flat) minus = Neg(x) }",
    "transposed": "{ y = Transpose(x) minus = Neg(x) }",
    "by its values": "{ z = NonZero(x) y = Cast <to = 1> (z) minus = Neg(x) }",
}


@pytest.mark.parametrize("lie", LIES)
def test_output_that_is_not_as_the_model_declares_is_produced_as_it_is(
    tmp_path: Path, lie: str
) -> None:
    text = f"(float[n, 4] x) => (float[n, 4] y, float[n, 4] minus) {LIES[lie]}"
    engine = open_ort(save(tmp_path / "lie.onnx", text))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    (free, _) = engine.bind([buffer("x", x)], []).execute()
    truth = content(free)
    assert truth.shape != (3, 4)
    places, minus = np.full(100, 7, np.float32), np.zeros((3, 4), np.float32)
    outputs = [buffer("y", places[:12].reshape(3, 4)), buffer("minus", minus)]
    run = engine.bind([buffer("x", x)], outputs)
    for _ in range(2):
        minus[...] = 0
        (y,) = run.execute()
        assert np.array_equal(content(y), truth)
        assert np.array_equal(minus, -x)  # where it was bound: its shape is as declared
    assert (places[12:] == 7).all()


def test_run_that_fails_with_an_output_of_another_shape_is_a_predict_error(tmp_path: Path) -> None:
    """What the runtime says of the shape is not taken for the failure."""
    text = """(int64[n] i) => (int64[3] y, int64[n] z) <int64[3] table = {1, 9, 0}>
    { y = Gather(table, i) z = Gather(table, y) }"""
    model = save(tmp_path / "gather.onnx", text)
    i = np.array([0, 1])
    run = open_ort(model).bind([buffer("i", i)], [buffer("y", np.zeros(3, np.int64))])
    with pytest.raises(PredictError, match=r"(?s)running Gather node.*idx=9"):
        run.execute()
    i[1] = 2
    assert [content(item).tolist() for item in run.execute()] == [[1, 0], [9, 1]]


# ONNX Runtime: whose fault it is.


@pytest.fixture
def double(tmp_path: Path) -> Engine:
    text = "(float[n, 4] x) => (float[n, 4] y) { y = Add(x, x) }"
    return open_ort(save(tmp_path / "double.onnx", text))


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([buffer("x", np.zeros(12, np.float32))], "Invalid rank for input: x Got: 1 Expected: 2"),
        ([buffer("x", np.zeros((3, 5), np.float32))], "index: 1 Got: 5 Expected: 4"),
        ([buffer("x", np.zeros((3, 4)))], r"Actual: \(tensor\(double\)\)"),
        ([buffer("q", np.zeros((3, 4), np.float32))], "q"),
        ([], "Missing Input: x"),
        ([Strings(name="x", shape=(1, 4), values=("a",) * 4)], r"Actual: \(tensor\(string\)\)"),
    ],
    ids=["rank", "size", "type", "name", "none", "strings"],
)
def test_inputs_that_the_runtime_refuses_are_invalid_inputs(
    double: Engine, inputs: list[Buffer | Strings], text: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"(?s)^onnxruntime: .*{text}") as caught:
        double.bind(inputs, []).execute()
    assert caught.value.__cause__ is not None
    x, y = np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32)
    double.bind([buffer("x", x)], [buffer("y", y)]).execute()
    assert (y == 2).all()


def test_errors_that_reach_the_caller_are_not_printed_as_well(
    double: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    run = double.bind([buffer("x", np.zeros((3, 5), np.float32))], [])
    with pytest.raises(InvalidInputError):
        run.execute()
    x = np.zeros((3, 4), np.float32)
    with pytest.raises(PredictError):
        double.bind([buffer("x", x)], [buffer("y", np.zeros((3, 4)))]).execute()
    # Nor is a shape that no error reaches the caller of.
    double.bind([buffer("x", x)], [buffer("y", rows(1))]).execute()
    assert capfd.readouterr() == ("", "")


# ONNX Runtime: building.


def test_file_that_is_no_model_is_a_build_error_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "garbage.onnx"
    with pytest.raises(BuildError, match=r"garbage\.onnx.*doesn't exist"):
        open_ort(str(path))
    path.write_bytes(bytes(1000))
    with pytest.raises(BuildError, match=r"garbage\.onnx"):
        open_ort(str(path))
    with pytest.raises(BuildError, match=re.escape(str(tmp_path))):
        open_ort(str(tmp_path))


LOOKS = {
    "an empty file": b"",
    "text": "a café\n".encode() * 300,
    "an HTML page": b"\n<!DOCTYPE html>\n<html><body>Not found</body></html>",
    "a pointer of Git LFS (git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n",
    "a zip archive": b"PK\x03\x04\x14\0\0\0\0\0model.onnx",
    "a PyTorch checkpoint (torch.onnx.export": b"PK\x03\x04\0\0\x08\x08\0\0archive/data.pkl",
    "a gzip file": gzip.compress(b"model"),
    "a pickle": pickle.dumps({"weight": [1.0]}),
    "safetensors": (64).to_bytes(8, "little")
    + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("look", LOOKS)
def test_file_that_is_no_model_is_called_what_it_looks_like(tmp_path: Path, look: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(LOOKS[look])
    with pytest.raises(BuildError, match=re.escape(f"{path}: got {look}") + ".*, expected a model"):
        open_ort(str(path))
    with pytest.raises(BuildError, match=re.escape(f"{path}: got {look}") + ".*expected an ONNX"):
        scan(path)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (
            "(float[n, 2] x) => (seq(map(int64, float[k])) z)"
            " { z = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 4]> (x) }",
            "output 'z' is of type seq(map(int64,tensor(float)))",
        ),
        (
            "(float[n] x) => (seq(float[k]) s) { s = SplitToSequence(x) }",
            "output 's' is of type seq(tensor(float))",
        ),
        (
            "(seq(float[n]) s) => (float[k] y) { y = ConcatFromSequence <axis = 0> (s) }",
            "input 's' is of type seq(tensor(float))",
        ),
        (
            "(float[n] x) => (optional(float[n]) o) { o = Optional(x) }",
            "output 'o' is of type optional(tensor(float))",
        ),
    ],
)
def test_value_that_is_no_tensor_is_named_with_the_cure(
    graph: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    head = '<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]> g '
    onnx.save(parser.parse_model(head + graph), path)
    with pytest.raises(BuildError, match=re.escape(f"{said}, expected a tensor: ")):
        open_ort(str(path))


@pytest.mark.skipif(HAS_CUDA, reason="this onnxruntime has CUDA")
def test_device_without_its_provider_is_a_build_error_unless_fallback_is_allowed(
    affine_model: str,
) -> None:
    text = "^device cuda:0 needs the CUDAExecutionProvider, .* does not have; it has .*CPU"
    with pytest.raises(BuildError, match=text):
        open_ort(affine_model, "cuda:0")
    engine = open_ort(affine_model, "cuda:0", allow_fallback=True)
    assert engine.providers == ("CPUExecutionProvider",)
    x = rows(2)
    assert np.array_equal(content(engine.bind([buffer("x", x)], []).execute()[0]), 2 * x + 1)


@pytest.mark.parametrize(
    ("shared", "said", "spinning"),
    [(False, None, None), (True, None, "0"), (True, "1", "1")],
    ids=["own cores", "shared cores", "as the user says"],
)
def test_threads_and_spinning_are_as_asked_for(
    affine_model: str, shared: bool, said: str | None, spinning: str | None
) -> None:
    key = "session.intra_op.allow_spinning"
    config = {"session.disable_prepacking": "1"} | ({key: said} if said else {})
    engine = open_ort(affine_model, threads=3, shared_cores=shared, session_config=config)
    assert isinstance(engine, _onnxruntime.OnnxRuntimeEngine)
    options = engine.session.get_session_options()
    assert options.intra_op_num_threads == 3
    assert options.inter_op_num_threads == 1
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    if spinning:
        assert options.get_session_config_entry(key) == spinning
    else:
        with pytest.raises(RuntimeError, match=key):
            options.get_session_config_entry(key)


def test_options_of_the_session_are_as_asked_for(affine_model: str) -> None:
    given = {
        "graph_optimization_level": "ORT_ENABLE_BASIC",
        "execution_order": "PRIORITY_BASED",
        "enable_mem_pattern": "0",
        "use_deterministic_compute": "1",
        "log_severity_level": "3",
        "logid": "tag",
    }
    engine = open_ort(affine_model, session_options=given, free_dimensions={"batch": 2})
    assert engine.spec.inputs[0].shape == (2, 3)
    assert isinstance(engine, _onnxruntime.OnnxRuntimeEngine)
    options = engine.session.get_session_options()
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert options.execution_order == ort.ExecutionOrder.PRIORITY_BASED
    assert options.enable_mem_pattern is False
    assert options.use_deterministic_compute is True
    assert (options.log_severity_level, options.logid) == (3, "tag")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"session_options": {"speed": "9"}},
            r"^session_options: got the name 'speed', expected some of \['graph_opt",
        ),
        (
            {"session_options": {"enable_mem_pattern": "yes"}},
            "^session_options: got 'yes' for enable_mem_pattern",
        ),
        (
            {"session_options": {"graph_optimization_level": "9"}},
            "^session_options: got '9' for graph_optimization_le",
        ),
        ({"custom_operators": ("/no/such/library.so",)}, r"/no/such/library\.so"),
    ],
)
def test_option_that_the_session_does_not_take_is_a_build_error(
    affine_model: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(BuildError, match=text):
        open_ort(affine_model, **options)


def test_model_is_described_on_demand(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17], producer_name: "writer", metadata_props: ["a": "b"]>
    graph (float[n] x, float[2] w) => (float[n] y) <float[2] w = {1, 2}> { y = Mul(x, w) }"""
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(text), path)
    assert open_ort(str(path)).description == ModelDescription()
    described = open_ort(str(path), describe=True).description
    assert (described.about["producer_name"], described.about["graph_name"]) == ("writer", "graph")
    assert described.properties == {"a": "b"}
    assert [(w.name, w.shape) for w in described.overridable] == [("w", (2,))]
    assert described.provider_options == {"CPUExecutionProvider": {}}


def test_dimension_without_a_name_is_none_and_symbols_keep_theirs(tmp_path: Path) -> None:
    """The shape is none that ONNX's text form can write."""
    shape = ["batch", None, "", "?", -1, 3, 0]
    model = text_model("(float x) => (float y) { y = Neg(x) }")
    for value in (*model.graph.input, *model.graph.output):
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, shape))
    onnx.save(model, tmp_path / "names.onnx")
    engine = open_ort(str(tmp_path / "names.onnx"))
    assert engine.spec.inputs[0].shape == ("batch", None, None, None, None, 3, 0)


def test_tensor_of_any_rank_has_no_dimensions(tmp_path: Path) -> None:
    engine = open_ort(save(tmp_path / "rank.onnx", "(float[] x) => (float[] y) { y = Neg(x) }"))
    assert [spec.shape for spec in (*engine.spec.inputs, *engine.spec.outputs)] == [(), ()]
    scalar = np.zeros((), np.float32)
    assert not engine.bind([buffer("x", scalar)], [buffer("y", scalar)]).execute()
    for shape in ((2,), (2, 1, 3)):
        x = np.ones(shape, np.float32)
        (y,) = engine.bind([buffer("x", x)], [buffer("y", scalar)]).execute()
        assert y.shape == shape


def test_precision_is_refused_by_engines_that_cannot_change_it(affine_model: str) -> None:
    for name in ("onnxruntime", "fake"):
        words = f"^precision: got 'bf16', but the engine {name} computes in the model's own types"
        with pytest.raises(BuildError, match=words):
            open_engine(name, engine_request(affine_model, precision="bf16"))


@pytest.mark.parametrize(
    ("engine", "command"),
    [
        ("onnxruntime", "onnxruntime-gpu.*pip install .onnxruntime>="),
        ("openvino", "pip install .openvino>="),
        ("mindspore", "pip install .mindspore>="),
    ],
)
def test_without_the_runtime_the_error_says_what_to_install(
    engine: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"mcinfer.engines._{engine}", raising=False)
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(MissingDependencyError, match=f"^engine {engine} needs .*{command}"):
        open_engine(engine, engine_request("model"))
