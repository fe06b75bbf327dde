"""Tests of mcinfer/engines/_mindspore.py, with models that MindSpore itself exports.

Another process exports them: the first import of MindSpore fixes its threads, and here the adapter must be
the first to import it.
"""

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcinfer.engines.adapters import open_engine
from mcinfer.engines.base import Buffer, Engine, Strings
from mcinfer.errors import BuildError, InvalidInputError, PredictError
from mcinfer.specs import Dimension, TensorSpec
from tests.engine_requests import engine_request
from tests.engine_tensors import buffer, content, rows
from tests.process.scripts import run_python

with_mindspore = pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="MindSpore is not installed"
)

TYPES = ("bool", "int8", "int64", "uint16", "float16", "float32", "complex64")

EXPORT = """
import sys
import numpy as np
import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

folder = sys.argv[1]


def dynamic(*shape, dtype=ms.float32):
    return Tensor(shape=[*shape], dtype=dtype)


def export(name, cell, *inputs):
    cell.set_inputs(*inputs)
    ms.export(cell, *inputs, file_name=f"{folder}/{name}.mindir", file_format="MINDIR")


class Affine(nn.Cell):
    def construct(self, x):
        y = x * 2.0 + 1.0
        return y, y + 0.0


class Static(nn.Cell):
    def construct(self, x):
        return x * 2.0 + 1.0


class Scaled(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((3, 2), np.float32)), name="weight")

    def construct(self, x, scale):
        y = ops.matmul(x, self.weight)
        return [y * scale, ops.cast(x, ms.int32), ops.reduce_sum(y)]


class Found(nn.Cell):
    def construct(self, x):
        return ops.nonzero(x), -x


class Same(nn.Cell):
    def construct(self, x):
        return x


class Assigning(nn.Cell):
    def construct(self, x):
        ops.assign(x, x + 1)
        return x * 2


class Product(nn.Cell):
    def construct(self, x, y):
        return ops.matmul(x, y)


class Unsupported(nn.Cell):
    def construct(self, x):
        return ops.cast(ops.reshape(ops.cast(x, ms.bfloat16), (-1,)), ms.float32)


rows = dynamic(None, 3)
static = Tensor(np.zeros((2, 3), np.float32))
export("affine", Affine(), rows)
export("static", Static(), static)
export("scaled", Scaled(), rows, Tensor(np.float32(0)))
export("found", Found(), rows)
export("assigning", Assigning(), rows)
export("product", Product(), dynamic(None, None), dynamic(None, None))
export("rankless", Static(), Tensor(shape=None, dtype=ms.float32))
export("bfloat16", Same(), dynamic(None, 3, dtype=ms.bfloat16))
export("unsupported", Unsupported(), static)
for dtype in sys.argv[2:]:
    export(f"same_{dtype}", Same(), dynamic(None, 3, dtype=getattr(ms, dtype)))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, by the names in `EXPORT`."""
    folder = tmp_path_factory.mktemp("mindir")
    script = folder / "export.py"
    script.write_text(EXPORT)
    run = run_python(script, folder, *TYPES, cwd=folder, env={"GLOG_v": "3"})
    assert run.returncode == 0, run.stderr
    return folder


def open_model(model: str | Path, device: str = "cpu:0", **options: Any) -> Engine:
    request = engine_request(model, device, **options)
    return open_engine("mindspore", request)


def spec(name: str, dtype: str, *shape: Dimension) -> TensorSpec:
    return TensorSpec(name=name, dtype=np.dtype(dtype), shape=shape)


# What every engine promises.


@pytest.fixture
def affine(models: Path) -> Engine:
    return open_model(models / "affine.mindir")


@with_mindspore
def test_engine_says_what_the_model_takes_and_gives(models: Path, affine: Engine) -> None:
    assert affine.spec.inputs == (spec("x", "float32", None, 3),)
    assert affine.spec.outputs == (
        spec("output_0", "float32", None, 3),
        spec("output_1", "float32", None, 3),
    )
    assert affine.providers == ("CPU",)
    static = open_model(models / "static.mindir").spec
    assert static.inputs == (spec("x", "float32", 2, 3),)
    assert static.outputs == (spec("output_0", "float32", 2, 3),)
    scaled = open_model(models / "scaled.mindir").spec
    assert scaled.inputs == (spec("x", "float32", None, 3), spec("scale", "float32"))
    assert scaled.outputs == (
        spec("output_0", "float32", None, 2),
        spec("output_1", "int32", None, 3),
        spec("output_2", "float32"),
    )


@with_mindspore
@pytest.mark.parametrize("name", ["affine", "static"])
def test_run_reads_its_inputs_anew_each_time(models: Path, name: str) -> None:
    x, y = rows(2), np.empty((2, 3), np.float32)
    run = open_model(models / f"{name}.mindir").bind([buffer("x", x)], [buffer("output_0", y)])
    for start in range(20):
        x[:] = rows(2, start)
        produced = run.execute()
        assert np.array_equal(x, rows(2, start))
        assert np.array_equal(y, 2 * x + 1)
        assert [item.name for item in produced] == ["output_1"] * (name == "affine")


# Memory.


@with_mindspore
@pytest.mark.parametrize("dtype", TYPES)
def test_tensor_of_every_type_passes_bit_by_bit(models: Path, dtype: str) -> None:
    engine = open_model(models / f"same_{dtype}.mindir")
    assert engine.spec.inputs == (spec("x", dtype, None, 3),)
    random = np.random.default_rng(1)
    x, y = np.zeros((8, 3), dtype), np.zeros((8, 3), dtype)
    bound = engine.bind([buffer("x", x)], [buffer("output_0", y)])
    free = engine.bind([buffer("x", x)], [])
    for _ in range(2):
        raw = random.integers(0, 2 if dtype == "bool" else 256, x.nbytes, np.uint8)
        x[...] = raw.view(dtype).reshape(x.shape)
        bound.execute()
        assert y.tobytes() == x.tobytes()
        assert content(free.execute()[0]).tobytes() == x.tobytes()


@with_mindspore
def test_model_that_writes_to_its_inputs_writes_to_copies(models: Path) -> None:
    x = rows(2)
    run = open_model(models / "assigning.mindir").bind([buffer("x", x)], [])
    answers = [content(run.execute()[0]) for _ in range(3)]
    assert np.array_equal(x, rows(2))
    for answer in answers:
        assert np.array_equal(answer, answers[0])
    x += 1
    assert np.array_equal(content(run.execute()[0]), answers[0] + 2)


@with_mindspore
def test_output_of_a_shape_known_only_after_the_run_is_produced(models: Path) -> None:
    engine = open_model(models / "found.mindir")
    assert engine.spec.outputs[0] == spec("output_0", "int64", None, 2)
    x = rows(2)
    run = engine.bind([buffer("x", x)], [])
    for _ in range(2):
        assert np.array_equal(content(run.execute()[0]), np.argwhere(x))
        x[:, 1] = 0


# What is refused.


def bind_wrong(engine: Engine, inputs: Sequence[Buffer | Strings]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        engine.bind(inputs, [])
    return str(caught.value)


@with_mindspore
def test_input_that_does_not_fit_is_refused_though_mindspore_would_run_it(
    models: Path, affine: Engine
) -> None:
    text = bind_wrong(affine, [buffer("x", np.zeros((2, 4), np.float32))])
    assert text == "mindspore: input 'x' is float32[2, 4], expected x: float32[?, 3]"
    assert "float32[3]" in bind_wrong(affine, [buffer("x", np.zeros(3, np.float32))])
    assert "float64[2, 3]" in bind_wrong(affine, [buffer("x", np.zeros((2, 3)))])
    strings = Strings(name="x", shape=(2, 3), values=("",) * 6)
    assert "string[2, 3]" in bind_wrong(affine, [strings])
    static = open_model(models / "static.mindir")
    assert "float32[5, 3]" in bind_wrong(static, [buffer("x", rows(5))])


@with_mindspore
def test_failed_run_is_a_predict_error_and_the_next_one_is_right(models: Path) -> None:
    engine = open_model(models / "product.mindir")
    x, y = rows(2), rows(2)
    with pytest.raises(PredictError, match=r"(?s)^mindspore: .*MatMul") as caught:
        engine.bind([buffer("x", x), buffer("y", y)], []).execute()
    assert "C++ Call Stack" not in str(caught.value)
    fitting = rows(3)
    (item,) = engine.bind([buffer("x", x), buffer("y", fitting)], []).execute()
    assert np.array_equal(content(item), x @ fitting)


@with_mindspore
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rankless", "input 'x' has no fixed number of dimensions"),
        ("bfloat16", "input 'x' is of type BFLOAT16, expected one of"),
        ("unsupported", "unsupported.mindir: .*Reshape"),
    ],
)
def test_model_that_cannot_be_served_is_a_build_error_that_says_why(
    models: Path, name: str, text: str
) -> None:
    with pytest.raises(BuildError, match=f"(?s)^mindspore: .*{text}"):
        open_model(models / f"{name}.mindir")


@pytest.mark.parametrize("name", ["session_config", "provider_options"])
def test_option_that_would_do_nothing_is_a_build_error_that_names_it(name: str) -> None:
    with pytest.raises(
        BuildError, match=rf"^{name}: got \['speed'\], but the engine mindspore has no such option"
    ):
        open_model("model.mindir", "cpu:0", **{name: {"speed": "9"}})


# Models from elsewhere than a file of the right name.


@with_mindspore
def test_model_without_a_name_is_loaded_and_leaves_no_copy(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fd = os.memfd_create("model")
    try:
        os.write(fd, (models / "affine.mindir").read_bytes())
        engine = open_model(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)
    assert [*tmp_path.iterdir()] == []
    x = rows(2)
    assert np.array_equal(content(engine.bind([buffer("x", x)], []).execute()[0]), 2 * x + 1)


# Threads: of a process, so in one of its own.

THREADS = """
import os, sys
from mcinfer.config import Device, EngineOptions
from mcinfer.engines.adapters import open_engine
from mcinfer.engines.base import EngineRequest
from mcinfer.errors import BuildError

def request(**given):
    options = EngineOptions(**{"threads": 2, "inter_op_threads": 1, **given})
    return EngineRequest(model=sys.argv[1], device=Device("cpu", 0), options=options)

open_engine("mindspore", request())
print(os.environ["OMP_NUM_THREADS"], os.environ["GLOG_v"])
open_engine("mindspore", request())
for other in (dict(threads=3), dict(inter_op_threads=7)):
    try:
        open_engine("mindspore", request(**other))
    except BuildError as exc:
        print(exc)
"""


@with_mindspore
def test_threads_are_fixed_for_the_process(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOG_v", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    run = run_python("-c", THREADS, models / "affine.mindir")
    variables, *refused = run.stdout.splitlines()
    assert variables == "2 3"
    assert len(refused) == 2
    assert "threads: got 3" in refused[0]
    assert "can not be set repeatedly" in refused[1]
