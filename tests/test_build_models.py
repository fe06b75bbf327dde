"""Tests of the model that an example builds: the UNet of the demo."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

Array = NDArray[np.float32]


def _load(script: str) -> Any:
    path = Path(__file__).parents[1] / "examples" / script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


unet = _load("sd_dual_core/build_unet.py")


def _open(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _shapes(values: Any) -> dict[str, tuple[int, list[int | str]]]:
    """Data type and dimensions, by name, of a model's inputs or outputs."""
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in values
    }


def _inputs(batch: int) -> tuple[Array, Array]:
    """Returns standard normal `sample` and `encoder_hidden_states` for the size tiny."""
    rng = np.random.default_rng(1)
    sample = rng.standard_normal((batch, 4, 16, 16), dtype=np.float32)
    return sample, rng.standard_normal((batch, 77, 32), dtype=np.float32)


def _run(session: ort.InferenceSession, sample: Array, states: Array) -> Array:
    feed = {
        "sample": sample,
        "timestep": np.array([500], np.int64),
        "encoder_hidden_states": states,
    }
    output: Array = session.run(["out_sample"], feed)[0]
    return output


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = unet.build_unet(tmp_path_factory.mktemp("unet") / "tiny.onnx", "tiny")
    return path


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> ort.InferenceSession:
    return _open(tiny_path)


def test_tiny_passes_the_checker_and_has_the_stated_inputs_and_output(tiny_path: Path) -> None:
    onnx.checker.check_model(str(tiny_path), full_check=True)
    graph = onnx.load(tiny_path).graph
    latents = (onnx.TensorProto.FLOAT, ["batch", 4, 16, 16])
    assert _shapes(graph.input) == {
        "sample": latents,
        "timestep": (onnx.TensorProto.INT64, [1]),
        "encoder_hidden_states": (onnx.TensorProto.FLOAT, ["batch", 77, 32]),
    }
    assert _shapes(graph.output) == {"out_sample": latents}


def test_a_row_does_not_depend_on_another(tiny: ort.InferenceSession) -> None:
    sample, states = _inputs(2)
    before = _run(tiny, sample, states)
    sample[1] *= -3
    states[1] += 5
    after = _run(tiny, sample, states)
    np.testing.assert_array_equal(after[0], before[0])
    assert np.abs(after[1] - before[1]).max() > 0.1
