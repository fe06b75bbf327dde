"""Tests of examples/quick_start/build_mobilenet.py, the classifier of the quick starts."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

SCRIPT = Path(__file__).parents[1] / "examples" / "quick_start" / "build_mobilenet.py"
# Of torchvision's mobilenet_v2, which has a scale and an offset for each channel of a batch norm where a
# folded model has one bias:
# https://pytorch.org/vision/stable/models/generated/torchvision.models.mobilenet_v2.html
PUBLISHED_PARAMETERS = 3_504_872
SIDE = 64

Array = NDArray[np.float32]


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("build_mobilenet", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mobilenet = _load()


def _open(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _images(batch: int, side: int = SIDE) -> Array:
    return np.random.default_rng(1).standard_normal((batch, side, side, 3), dtype=np.float32)


def _run(session: ort.InferenceSession, images: Array) -> Array:
    output: Array = session.run(["probabilities"], {"image": images})[0]
    return output


def _shape(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The full width, a small image, any batch."""
    target = tmp_path_factory.mktemp("mobilenet") / "any.onnx"
    built: Path = mobilenet.build_mobilenet(target, batch=None, size=SIDE)
    return built


@pytest.fixture(scope="module")
def graph(path: Path) -> onnx.GraphProto:
    return onnx.load(path).graph


@pytest.fixture(scope="module")
def session(path: Path) -> ort.InferenceSession:
    return _open(path)


def test_default_passes_the_checker_and_takes_one_image_of_imagenets_size(tmp_path: Path) -> None:
    path = mobilenet.build_mobilenet(tmp_path / "default.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(path).graph
    assert [(v.name, _shape(v)) for v in graph.input] == [("image", [1, 224, 224, 3])]
    assert [(v.name, _shape(v)) for v in graph.output] == [("probabilities", [1, 1000])]
    for value in (*graph.input, *graph.output):
        assert value.type.tensor_type.elem_type == TensorProto.FLOAT


def test_parameters_are_the_published_ones_with_batch_norms_folded(graph: onnx.GraphProto) -> None:
    weights = [t for t in graph.initializer if t.name.endswith((".weight", ".bias"))]
    normalised = [t for t in weights if t.name.endswith(".bias") and "classifier" not in t.name]
    count = sum(int(np.prod(t.dims)) for t in weights)
    assert count + sum(t.dims[0] for t in normalised) == PUBLISHED_PARAMETERS


def test_probabilities_are_sane_and_sum_to_one(session: ort.InferenceSession) -> None:
    output = _run(session, _images(3))
    assert output.shape == (3, 1000)
    assert np.isfinite(output).all()
    np.testing.assert_allclose(output.sum(axis=1), 1.0, atol=1e-5)
    assert output.min() > 0
    assert 2 / 1000 < output.max() < 0.5  # neither all alike nor one alone


def test_seed_determines_the_bytes(path: Path, tmp_path: Path) -> None:
    arguments = {"batch": None, "size": SIDE}
    same = mobilenet.build_mobilenet(tmp_path / "same.onnx", seed=0, **arguments)
    other = mobilenet.build_mobilenet(tmp_path / "other.onnx", seed=1, **arguments)
    assert same.read_bytes() == path.read_bytes()
    assert other.read_bytes() != path.read_bytes()


def test_command_line_writes_the_model_and_says_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.onnx"
    assert mobilenet.main(["--output", str(path), "--size", "96", "--width", "0.5"]) == 0
    assert capsys.readouterr().out == f"{path}: {path.stat().st_size:,} bytes\n"
    assert _shape(onnx.load(path).graph.input[0]) == [1, 96, 96, 3]
