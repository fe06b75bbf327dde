"""Tests of the models that examples build: the UNet of the demo and the classifier of the quick starts."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

# Stable Diffusion 1 differs in the widths from 2.1 only by its context of 768 channels:
# https://forums.fast.ai/t/stable-diffusion-parameter-budget-allocation/101515
SD1_PARAMETERS = 859_520_964
# torchvision's mobilenet_v2, which has a scale and an offset for each channel of a batch norm where a
# folded model has one bias:
# https://pytorch.org/vision/stable/models/generated/torchvision.models.mobilenet_v2.html
MOBILENET_PARAMETERS = 3_504_872
SIDE = 64

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
mobilenet = _load("quick_start/build_mobilenet.py")


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


# The UNet.


def _inputs(batch: int, side: int = 16) -> tuple[Array, Array]:
    """Returns standard normal `sample` and `encoder_hidden_states` for the size tiny."""
    rng = np.random.default_rng(1)
    sample = rng.standard_normal((batch, 4, side, side), dtype=np.float32)
    return sample, rng.standard_normal((batch, 77, 32), dtype=np.float32)


def _run(session: ort.InferenceSession, sample: Array, states: Array, timestep: int = 500) -> Array:
    feed = {
        "sample": sample,
        "timestep": np.array([timestep], np.int64),
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


def test_a_denoising_loop_stays_of_order_one(tiny: ort.InferenceSession) -> None:
    """DDIM (Song et al. 2021) with v-prediction and SD's scaled linear schedule of betas."""
    alphas = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    latents, states = _inputs(1)
    steps = [*range(950, -1, -50)]
    for step in steps:
        v = _run(tiny, latents, states, step)
        alpha = alphas[step]
        previous = alphas[step - 50] if step else 1.0
        clean = alpha**0.5 * latents - (1 - alpha) ** 0.5 * v
        noise = alpha**0.5 * v + (1 - alpha) ** 0.5 * latents
        latents = (previous**0.5 * clean + (1 - previous) ** 0.5 * noise).astype(np.float32)
    assert np.isfinite(latents).all()
    assert 0.1 < latents.std() < 10


@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [({"symbolic_latents": True}, np.float32, 1e-4), ({"half": True}, np.float16, 1e-2)],
    ids=["symbolic", "half"],
)
def test_variant_is_the_same_network(
    tiny: ort.InferenceSession,
    tmp_path: Path,
    options: dict[str, bool],
    dtype: Any,
    tolerance: float,
) -> None:
    path = unet.build_unet(tmp_path / "variant.onnx", "tiny", **options)
    onnx.checker.check_model(path, full_check=True)
    session, inputs = _open(path), _inputs(1)
    output = _run(session, inputs[0].astype(dtype), inputs[1].astype(dtype))
    assert output.dtype == dtype
    np.testing.assert_allclose(output, _run(tiny, *inputs), rtol=0, atol=tolerance)
    if "symbolic_latents" in options:  # other sides are taken as well
        assert _shapes(onnx.load(path).graph.output)["out_sample"][1][2:] == ["height", "width"]
        assert _run(session, inputs[0][..., :8], inputs[1]).shape == (1, 4, 16, 8)


def test_external_data_gives_the_same_network(
    tiny: ort.InferenceSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = dataclasses.replace(unet.SIZES["tiny"], external_data=True)
    monkeypatch.setitem(unet.SIZES, "external", size)
    for seed in (1, 0):  # the second build replaces the first
        path = unet.build_unet(tmp_path / "model.onnx", "external", seed=seed)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    onnx.checker.check_model(str(path), full_check=True)
    assert path.stat().st_size < (tmp_path / "model.onnx.data").stat().st_size / 2
    inputs = _inputs(1)
    np.testing.assert_array_equal(_run(_open(path), *inputs), _run(tiny, *inputs))


def test_command_line_reports_parameters_and_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "unet.onnx"
    assert unet.main(["--size", "tiny", "--output", str(path), "--batch", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"{unet.SIZES['tiny'].parameters:,} parameters" in printed
    assert f"{path.stat().st_size:,} bytes" in printed


# The classifier.


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half the width, a small image, any batch."""
    target = tmp_path_factory.mktemp("mobilenet") / "any.onnx"
    built: Path = mobilenet.build_mobilenet(target, batch=None, size=SIDE, width=0.5)
    return built


def test_command_line_writes_a_model_of_the_published_size_for_one_image_of_imagenets_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "default.onnx"
    assert mobilenet.main(["--output", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: {path.stat().st_size:,} bytes\n"
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(path).graph
    kind = onnx.TensorProto.FLOAT
    assert _shapes(graph.input) == {"image": (kind, [1, 224, 224, 3])}
    assert _shapes(graph.output) == {"probabilities": (kind, [1, 1000])}
    weights = [t for t in graph.initializer if t.name.endswith((".weight", ".bias"))]
    normalised = [t for t in weights if t.name.endswith(".bias") and "classifier" not in t.name]
    count = sum(int(np.prod(t.dims)) for t in weights)
    assert count + sum(t.dims[0] for t in normalised) == MOBILENET_PARAMETERS


def test_probabilities_are_sane_and_sum_to_one(path: Path) -> None:
    images = np.random.default_rng(1).standard_normal((3, SIDE, SIDE, 3), dtype=np.float32)
    output: Array = _open(path).run(["probabilities"], {"image": images})[0]
    assert output.shape == (3, 1000)
    np.testing.assert_allclose(output.sum(axis=1), 1.0, atol=1e-5)
    assert output.min() > 0
    assert 2 / 1000 < output.max() < 0.5  # neither all alike nor one alone
