"""Tests of mcinfer/engines/preparation.py with ONNX Runtime: prepared models compute what they did before."""

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

from mcinfer.config import EngineOptions
from mcinfer.engines import _onnxruntime, preparation
from mcinfer.engines._onnxruntime import OnnxRuntimeEngine
from mcinfer.engines.base import Engine
from mcinfer.engines.preparation import ensure_prepared
from mcinfer.errors import BuildError
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.model_cache.cache import Cache, Held, entry_key
from mcinfer.model_cache.children import ChildFailedError, run_child
from tests.engine_requests import engine_request
from tests.engine_tensors import buffer, content
from tests.hostile_models import OUTSIDE, SECRET, UNREADABLE, Hostile, growing
from tests.test_engines import open_ort

BATCHES = (1, 2, 5)

pytestmark = pytest.mark.usefixtures("cache")

Array = NDArray[Any]
Weights = Mapping[str, Array]
Model = tuple[str, Weights]
"""A graph in ONNX's text format, and the weights that it names."""

HEADER = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>\n'


def ignore(state: Mapping[str, Any]) -> None:
    """Take no notice of progress."""


def numbers(*shape: int, seed: int = 1) -> Array:
    """Weights that keep sums over all but the first axis near 1."""
    random = np.random.default_rng([seed, *shape])
    scale = np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 1
    return (random.standard_normal(shape) / scale).astype(np.float32)


MATMUL: Model = (
    "g (float[batch, 64] x) => (float[batch, 96] y) { a = MatMul(x, w)  y = Add(a, b) }",
    {"w": numbers(64, 96), "b": numbers(96)},
)
CONV: Model = (
    """g (float[batch, 16, 12, 12] x) => (float[batch, 32, 12, 12] y) {
        a = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w, b)
        r = Relu(a)
        y = Conv<kernel_shape = [1, 1]>(r, w2)
    }""",
    {"w": numbers(32, 16, 3, 3), "b": numbers(32), "w2": numbers(32, 32, 1, 1)},
)

# The runtime (1.31) saves the sizes of the parts outside of the graph, where its shape inference cannot read
# them when it loads the graph again, unless an option keeps larger ones inside.
SPLIT: Model = (
    f"""g (float[batch, 200] x) => (float[batch, 200] y) {{
        {", ".join(f"o{i}" for i in range(200))} = Split<axis = 1>(x, ones)
        y = Concat<axis = 1>({", ".join(f"o{i}" for i in reversed(range(200)))})
    }}""",
    {"ones": np.ones(200, np.int64)},
)

LOOP = "weights of a loop, and outside of it"

MODELS: dict[str, Model] = {
    "a large shape": SPLIT,
    "fused operators": CONV,
    LOOP: (
        """g (float[batch, 32] x) => (float[batch, 32] y) {
            y = Loop<body = b (int64 i, bool go, float[batch, 32] v) => (bool go_on, float[batch, 32] n) {
                go_on = Identity(go)
                m = MatMul(v, inner)
                n = MatMul(m, w)
            }>(three, , x)
        }""",
        {"inner": numbers(32, 32), "w": numbers(32, 32, seed=2), "three": np.array(3, np.int64)},
    ),
    "no weights": ("g (float[batch, 64] x) => (float[batch, 64] y) { y = Relu(x) }", {}),
    "weight that is an output": (
        """g (float[batch, 4] x) => (float[batch, 4] y, float[2, 300] w) {
            s = Shape(x)
            y = ConstantOfShape<value = float[1] {2.5}>(s)
        }""",
        {"w": numbers(2, 300)},
    ),
    "function of the model's own": (
        """g (float[batch, 64] x) => (float[batch, 96] y) { y = own.dense(x, w) }
        <opset_import: ["": 17], domain: "own"> dense (a, b) => (c) { m = MatMul(a, b)  c = Relu(m) }""",
        {"w": numbers(64, 96)},
    ),
}


def write(path: Path, model: Model, **replaced: Array) -> str:
    """Save a model, some of its weights replaced, and give its path."""
    text, weights = model
    header = HEADER.replace("]>", ', "own": 1]>') if "own." in text else HEADER
    made = parser.parse_model(header + text)
    inner = [a.g for node in made.graph.node for a in node.attribute if a.HasField("g")]
    for name, array in {**weights, **replaced}.items():
        graph = inner[0] if name == "inner" else made.graph
        graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(made, path)
    return str(path)


def write_sparse(path: Path) -> str:
    """A model with a sparse weight, which the runtime (1.31) does not know how to save."""
    text = HEADER + "g (float[batch, 32] x) => (float[batch, 64] y) { y = MatMul(x, w) }"
    made = parser.parse_model(text)
    values = numpy_helper.from_array(numbers(600), "w")
    places = numpy_helper.from_array(np.arange(0, 1200, 2), "places")
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [32, 64]))
    onnx.save(made, path)
    return str(path)


def outside(path: Path, location: str) -> str:
    """Move the weights of a model out of it, to a place beside it."""
    onnx.save(onnx.load(path), path, save_as_external_data=True, location=location)
    assert (path.parent / location).stat().st_size > 1024
    return str(path)


def results(engine: Engine, batch: int = 2, **weights: Array) -> list[Array]:
    """What an engine makes of so many rows, with its own weights or some in their place."""
    (spec,) = engine.spec.inputs
    shape = [batch if isinstance(size, str) else size for size in spec.shape]
    random = np.random.default_rng(batch)
    x = random.standard_normal([size or 1 for size in shape]).astype(spec.dtype)
    given = [buffer("x", x), *(buffer(name, array) for name, array in weights.items())]
    return [content(item) for item in engine.bind(given, []).execute()]


def assert_same(engine: Engine, other: Engine) -> None:
    """Fail unless both make the same of the same, to the last bit."""
    assert engine.spec == other.spec
    for batch in BATCHES:
        got, expected = results(engine, batch), results(other, batch)
        assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in expected]
        assert [a.tobytes() for a in got] == [a.tobytes() for a in expected]
        assert any(a.any() for a in got)


def held(engine: Engine) -> Held | None:
    assert isinstance(engine, OnnxRuntimeEngine)
    return engine.held


def entry(engine: Engine) -> Path:
    """The folder of the prepared model that an engine maps."""
    prepared = held(engine)
    assert prepared is not None, engine.notes
    assert engine.notes == ()
    return prepared.folder


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write(tmp_path / "model.onnx", MATMUL)


@contextmanager
def without_children() -> Iterator[None]:
    """Nothing can be prepared in here: what is, was before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        yield


@pytest.mark.parametrize("name", MODELS)
def test_prepared_model_computes_the_same_bits(tmp_path: Path, cache: Cache, name: str) -> None:
    model = write(tmp_path / "model.onnx", MODELS[name])
    engine = open_ort(model, prepare="always")
    assert_same(engine, open_ort(model))
    assert [info.key for info in cache.entries()] == [entry(engine).name]


def test_folder_of_external_data_may_be_another_one(tmp_path: Path) -> None:
    write(tmp_path / "model.onnx", MATMUL)
    model = outside(tmp_path / "model.onnx", "weights.data")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "weights.data").rename(tmp_path / "elsewhere" / "weights.data")
    config = {FOLDER_KEY: str(tmp_path / "elsewhere")}
    engine = open_ort(model, prepare="always", session_config=config)
    assert entry(engine)
    assert_same(engine, open_ort(model, session_config=config))
    with without_children():  # where they lay changes nothing in what was prepared
        (tmp_path / "elsewhere" / "weights.data").rename(tmp_path / "weights.data")
        assert entry(open_ort(model, prepare="always")) == entry(engine)


def test_engines_of_one_model_map_one_entry_until_the_last_is_gone(
    tmp_path: Path, model: str, cache: Cache
) -> None:
    (tmp_path / "about.json").write_text("{}")  # a file of the user's that is named alike
    spinning = {"session.intra_op.allow_spinning": "0"}  # changes nothing in it
    first = open_ort(model, prepare="always")
    with without_children():
        second = open_ort(model, prepare="always", threads=2, session_config=spinning)
    assert entry(first) == entry(second)
    del first
    assert cache.clear()[1] == 1
    del second
    assert cache.clear()[1] == 0
    assert cache.entries() == []


def test_small_model_is_prepared_on_demand_only(tmp_path: Path, cache: Cache) -> None:
    for prepare in ("auto", "never"):
        engine = open_ort(write(tmp_path / "model.onnx", MATMUL), prepare=prepare)
        assert (held(engine), engine.notes) == (None, ())
    assert not cache.folder.exists()


def test_large_model_is_prepared_by_itself_wherever_its_weights_lie(tmp_path: Path) -> None:
    size = 2100
    text = f"g (float[batch, {size}] x) => (float[batch, {size}] y) {{ y = MatMul(x, w) }}"
    write(tmp_path / "model.onnx", (text, {"w": numbers(size, size)}))
    model = outside(tmp_path / "model.onnx", "weights.data")
    engine = open_ort(model, prepare="wait")
    assert entry(engine)
    assert_same(engine, open_ort(model))


def test_model_that_cannot_be_prepared_is_loaded_as_it_is_and_not_tried_again(
    tmp_path: Path, cache: Cache
) -> None:
    model = write_sparse(tmp_path / "model.onnx")
    engine = open_ort(model, prepare="always")
    assert held(engine) is None
    (note,) = engine.notes
    assert "it cannot be prepared: onnxruntime: " in note
    assert_same(engine, open_ort(model))
    with without_children():
        assert open_ort(model, prepare="always").notes == engine.notes
    assert len(cache.entries()) == 1
    with pytest.raises(BuildError, match="it cannot be prepared: onnxruntime: "):
        ensure_prepared(model)


def test_model_in_the_format_of_the_runtime_is_loaded_as_it_is(tmp_path: Path, model: str) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "model.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    for prepare, notes in (("auto", 0), ("always", 1)):
        engine = open_ort(str(tmp_path / "model.ort"), prepare=prepare)
        assert held(engine) is None
        assert len(engine.notes) == notes
        assert all("expected an ONNX model" in note for note in engine.notes)
        assert_same(engine, open_ort(model))
    with pytest.raises(BuildError, match="expected an ONNX model"):
        ensure_prepared(tmp_path / "model.ort")


@contextmanager
def full_disk() -> Iterator[None]:
    """This process, and those that it starts, can write 16 KiB to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("trouble", "text"), [(without_children, "/nowhere/python"), (full_disk, "/cache")]
)
def test_failure_of_the_moment_is_noted_and_not_remembered(
    model: str, cache: Cache, trouble: Callable[[], AbstractContextManager[None]], text: str
) -> None:
    with trouble():
        engine = open_ort(model, prepare="always")
    assert held(engine) is None
    assert text in engine.notes[0]
    assert_same(engine, open_ort(model))
    assert cache.entries() == []
    assert entry(open_ort(model, prepare="always"))


def test_full_or_lost_card_is_a_failure_of_the_moment() -> None:
    assert preparation.is_transient("CUDA failure 2: out of memory ; GPU=0 ; hostname=h")
    assert preparation.is_transient("CUDA error 719: unspecified launch failure")
    assert not preparation.is_transient("no kernel for com.microsoft:Nothing")


def test_unusable_cache_is_noted_if_it_was_needed(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "model.onnx" / "cache"))
    engine = open_ort(model, prepare="always")
    assert held(engine) is None
    assert "model.onnx/cache" in engine.notes[0]
    without = open_ort(model, prepare="auto")
    assert (held(without), without.notes) == (None, ())
    assert_same(engine, without)


def test_child_that_ends_before_it_reads_its_task_or_takes_too_long_is_a_failure_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ChildFailedError, match="not done within 0 s"):
        run_child(_onnxruntime.fill, [{}, str(tmp_path), 1], ignore, most_seconds=0.0)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    more_than_a_pipe_takes = "x" * (1 << 20)
    with pytest.raises(ChildFailedError, match="ended with status"):
        run_child(_onnxruntime.fill, [more_than_a_pipe_takes], ignore)


@pytest.mark.parametrize(
    ("model", "names"), [(MATMUL, ("w", "b")), (CONV, ("w",))], ids=["matmul", "conv"]
)
def test_replaced_weights_give_what_a_model_with_them_gives(
    tmp_path: Path, model: Model, names: tuple[str, ...]
) -> None:
    constants = model[1]
    path = write(tmp_path / "model.onnx", model)
    engine = open_ort(path, prepare="always", variable_weights=names)
    assert entry(engine)
    assert [(w.name, w.shape) for w in engine.weights] == [(n, constants[n].shape) for n in names]
    plain = open_ort(path, variable_weights=names)
    assert_same(engine, plain)
    weights = {name: 2 * constants[name] for name in names}
    other = open_ort(write(tmp_path / "other.onnx", model, **weights))
    for batch in BATCHES:
        (default,), (expected,) = results(engine, batch), results(open_ort(path), batch)
        assert_near(default, expected)
        (got,), (expected,) = results(engine, batch, **weights), results(other, batch)
        assert_near(got, expected)
        assert np.array_equal(got, results(plain, batch, **weights)[0])
        assert not np.allclose(got, default, rtol=1e-2, atol=1e-4)


def assert_near(got: Array, expected: Array) -> None:
    """Constant weights are packed for vectors, replaceable ones are not: sums come in another order."""
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_prepared_model_can_be_opened_by_its_path(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write(tmp_path / "model.onnx", CONV)
    folder = entry(open_ort(plain, prepare="always"))
    with without_children():
        for prepare in ("never", "auto", "always"):
            engine = open_ort(str(folder / "model.onnx"), prepare=prepare)
            assert entry(engine) == folder
        monkeypatch.chdir(folder)
        assert entry(open_ort("model.onnx")) == folder
    assert_same(engine, open_ort(plain))
    assert len(cache.entries()) == 1
    assert cache.clear()[1] == 1


def test_model_that_was_prepared_elsewhere_is_refused(tmp_path: Path, cache: Cache) -> None:
    folder = entry(open_ort(write(tmp_path / "model.onnx", MATMUL), prepare="always"))
    here = json.loads((folder / "manifest.json").read_bytes())["facts"]

    def fill(draft: Path, _: int) -> None:
        for path in folder.iterdir():
            if path.name != "manifest.json":
                shutil.copy(path, draft / path.name)

    for fact in ("engine", "cpu", "device"):
        facts = {**here, fact: "another one"}
        cache.make(facts, fill, wait=0).close()
        with pytest.raises(BuildError, match=f"for {fact} another one, here is {here[fact]}"):
            open_ort(str(cache.folder / entry_key(facts) / "model.onnx"))
    assert cache.clear()[1] == 0


def test_model_in_a_folder_of_the_users_that_looks_like_an_entry_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / ("0123456789abcdef" * 2)  # as stores that go by the content name them
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    open_ort(write(folder / "model.onnx", MATMUL))


def test_prepared_model_has_the_replaceable_weights_that_it_was_prepared_with(
    model: str,
) -> None:
    for names in ((), ("b",)):
        prepared = entry(open_ort(model, prepare="always", variable_weights=names)) / "model.onnx"
        with pytest.raises(BuildError, match=r"variable_weights: got \['w'\]") as caught:
            open_ort(str(prepared), variable_weights=("w",))
        assert f"expected some of {[*names]}" in str(caught.value)
    engine = open_ort(str(prepared), variable_weights=("b",))
    assert [spec.name for spec in engine.weights] == ["b"]


def test_replaceable_weights_are_checked_before_a_model_is_prepared(
    model: str, cache: Cache
) -> None:
    names = ("none",)
    for path, text in (
        (model, r"got \['none'\], expected names"),
        (f"{model}.none", "No such file"),
    ):
        with pytest.raises(BuildError, match=text):
            open_ort(path, prepare="always", variable_weights=names)
        with pytest.raises(BuildError, match=text):
            ensure_prepared(path, EngineOptions(variable_weights=names))
    assert not cache.entries()  # no failure is remembered


def test_weight_that_is_an_output_cannot_be_replaceable_and_one_that_is_an_input_can(
    tmp_path: Path,
) -> None:
    path, weights = tmp_path / "model.onnx", {"w": numbers(2)}
    output = "g (float[batch, 2] x) => (float[batch, 2] z, float[2] w) { z = Mul(x, w) }"
    with pytest.raises(BuildError, match=r"\['w'\], which are outputs of the model"):
        open_ort(write(path, (output, weights)), variable_weights=("w",))
    symbols = "g (float[batch, 2] x, float[a] w) => (float[batch, 2] z) { z = Mul(x, w) }"
    engine = open_ort(write(path, (symbols, weights)), variable_weights=("w",))
    assert [spec.shape for spec in engine.weights] == [(2,)]  # that of its values


def test_ensured_model_is_in_the_cache_and_is_made_once(model: str, cache: Cache) -> None:
    reported: list[Mapping[str, Any]] = []
    first = ensure_prepared(model, EngineOptions(variable_weights=["w"]), reported.append)
    assert reported
    assert all({*tick} == {"seconds", "written", "bytes"} for tick in reported)
    assert reported[-1]["bytes"] == os.path.getsize(model)
    assert reported[-1]["written"] > 0
    reported.clear()
    second = ensure_prepared(model, EngineOptions(variable_weights=["w"]), reported.append)
    assert first.folder == second.folder
    assert reported == []
    with without_children():
        engine = open_ort(model, prepare="always", variable_weights=("w",))
        assert entry(engine) == first.folder
    for one in (first, second):
        one.close()
    del engine
    assert cache.clear()[1] == 0


# Models made to do harm. Real pools are given them in tests/process/test_hostile_models.py.


@pytest.mark.parametrize("hostile", [*OUTSIDE, *UNREADABLE], ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("prepare", "weights"),
    [
        pytest.param("never", (), id="plain"),
        pytest.param("never", ("w",), id="replaceable"),
        pytest.param("always", ("w",), id="prepared", marks=pytest.mark.thorough),
    ],
)
def test_external_data_that_must_not_be_read_is_refused_however_a_model_is_loaded(
    tmp_path: Path, cache: Cache, hostile: Hostile, prepare: str, weights: tuple[str, ...]
) -> None:
    (tmp_path / "secret").write_bytes(np.full(4, SECRET, np.float32).tobytes())
    (tmp_path / "model").mkdir()
    model = hostile.write(tmp_path / "model")
    with pytest.raises(BuildError, match=hostile.error):
        open_ort(str(model), prepare=prepare, variable_weights=weights)
    assert [*cache.folder.glob("tmp-*")] == []


def test_model_that_would_fill_the_disk_is_not_prepared(tmp_path: Path) -> None:
    model, folder = tmp_path / "model.onnx", tmp_path / "folder"
    model.write_bytes(growing(megabytes=8))
    folder.mkdir()
    request = preparation._plain(engine_request(model))
    task = [request, str(folder)]
    with pytest.raises(BuildError):
        run_child(_onnxruntime.fill, [*task, 1 << 20], ignore)
    assert max(file.stat().st_size for file in folder.iterdir()) <= 1 << 20
    for file in folder.iterdir():
        file.unlink()
    run_child(_onnxruntime.fill, [*task, 1 << 24], ignore)
    assert {file.name for file in folder.iterdir()} >= {"model.onnx"}


# What a model computes.


def identity_of(model: str, **options: Any) -> str:
    request = engine_request(model, **options)
    source = preparation.readable_content(request)
    assert source is not None
    return preparation.identity(request, source, "")


def test_identity_is_of_the_content_wherever_it_lies(tmp_path: Path) -> None:
    inside = identity_of(write(tmp_path / "inside.onnx", MATMUL))
    found = {inside}
    for name, values in (("one", numbers(64, 96)), ("other", numbers(64, 96, seed=2))):
        folder = tmp_path / name
        folder.mkdir()
        write(tmp_path / "model.onnx", MATMUL, w=values)
        outside(tmp_path / "model.onnx", "weights.data")
        (tmp_path / "weights.data").rename(folder / "weights.data")
        config = {FOLDER_KEY: str(folder)}
        elsewhere = identity_of(str(tmp_path / "model.onnx"), session_config=config)
        (folder / "model.onnx").write_bytes((tmp_path / "model.onnx").read_bytes())
        assert identity_of(str(folder / "model.onnx")) == elsewhere
        found.add(elsewhere)
    assert len(found) == 3


OPTIONS: list[tuple[dict[str, Any], bool, bool]] = [
    ({"session_options": {"enable_mem_pattern": "0", "log_severity_level": "3"}}, False, False),
    ({"inter_op_threads": 2, "shared_cores": True, "describe": True}, False, False),
    ({"variable_weights": ("w",)}, True, False),
    ({"provider_options": {"arena_extend_strategy": "1"}}, True, True),
    ({"session_options": {"graph_optimization_level": "ORT_ENABLE_BASIC"}}, True, True),
    ({"session_config": {"session.set_denormal_as_zero": "1"}}, True, True),
    ({"custom_operators": ("libwords.so",)}, True, True),
    ({"free_dimensions": {"batch": 4}}, True, True),
    ({"free_denotations": {"DATA_BATCH": 4}}, True, True),
]
"""Options, whether they need a prepared model of their own, and whether they change values."""


def test_prepared_model_and_identity_are_of_the_options_on_which_they_depend(model: str) -> None:
    def entry_of(**options: Any) -> str:
        request = engine_request(model, **options)
        source = preparation.content_of(request)
        return entry_key(preparation.facts_of(request, _onnxruntime.RUNTIME, source))

    for key_of, changes in (
        (entry_of, [graph for _, graph, _ in OPTIONS]),
        (lambda **options: identity_of(model, **options), [values for _, _, values in OPTIONS]),
    ):
        keys = [key_of(**options) for options, _, _ in OPTIONS]
        assert [key != key_of() for key in keys] == changes
        assert len({*keys}) == 1 + sum(changes)


def test_what_prepares_a_large_model_lets_the_service_load_it_first_for_a_bounded_time() -> None:
    small, large, huge = (
        preparation._loading_seconds(size) for size in (1 << 24, 1 << 28, 1 << 40)
    )
    assert 0.1 < small < 1 < large < huge == preparation._MAX_LOADING_SECONDS
