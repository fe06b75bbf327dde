"""Replaces the attention weights of a UNet between two runs, as a LoRA does, without a new start.

Two workers serve one UNet. Its attention projections W become W + scale * (B @ A), with B and A of rank 4
(Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"), and then W again. Each time they
are copied to shared memory once, for both workers; no model is loaded anew.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from build_unet import SIZES
from guided_unet import (
    MAX_RELATIVE_ERROR,
    TRAINING_STEPS,
    Array,
    WrongAnswerError,
    finish,
    first_noise,
    guided_batch,
    relative_difference,
    temporary_unet,
)
from onnx import numpy_helper

from mcinfer import EngineOptions, Master

PROJECTION = re.compile(r".*\.to_(q|k|v|out\.0)\.weight")
"""Names of the matrices of attention, as diffusers has them."""

RANK = 4
SCALE = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=[*SIZES], default="small", help="of the UNet to build")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and of B and A")
    options = parser.parse_args(arguments)
    return finish(lambda: _run(options.size, options.seed))


def _run(size: str, seed: int) -> None:
    with temporary_unet(size) as path:
        own = _projections(path)
        adapted = _adapted(own, seed)
        megabytes = sum(array.nbytes for array in own.values()) / 1e6
        with Master(path, 2, options=EngineOptions(variable_weights=[*own])) as master:
            latents, context = first_noise(master.inputs, size, seed)
            inputs = guided_batch(master.inputs, latents, TRAINING_STEPS - 1, context)
            print(f"{len(own)} weights of {megabytes:.1f} MB can be replaced")
            first = _predict("Run 1, the model's own weights", master, inputs)
            _update("W + scale * (B @ A)", master, adapted)
            second = _predict("Run 2, the new weights", master, inputs)
            _update("W again", master, own)
            third = _predict("Run 3, the model's own weights", master, inputs)
        expected = _reference(path, adapted, inputs)
    _check(first, second, third, expected)


def _projections(path: Path) -> dict[str, Array]:
    """The weights to replace, by name: float32[inputs, outputs] each."""
    return {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in onnx.load(path).graph.initializer
        if PROJECTION.fullmatch(tensor.name)
    }


def _adapted(weights: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """W + scale * (B @ A) for each; B and A are random here, and trained elsewhere."""
    rng = np.random.default_rng(seed)
    adapted = {}
    for name, weight in weights.items():
        rows, columns = weight.shape
        b = rng.standard_normal((rows, RANK), np.float32) / np.float32(rows**0.5)
        a = rng.standard_normal((RANK, columns), np.float32)
        adapted[name] = weight + np.float32(SCALE) * (b @ a)
    return adapted


def _predict(what: str, master: Master, inputs: Sequence[Array]) -> Array:
    start = time.perf_counter()
    [output] = master.predict(inputs).values()
    print(f"{what}: {time.perf_counter() - start:.3f} s")
    return output


def _update(what: str, master: Master, weights: Mapping[str, Array]) -> None:
    start = time.perf_counter()
    version = master.update_weights(weights)
    print(f"Update to {what}, version {version}: {time.perf_counter() - start:.3f} s")


def _reference(path: Path, weights: Mapping[str, Array], inputs: Sequence[Array]) -> Array:
    """The answer of one ONNX Runtime session to a model that was written with these weights."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    with tempfile.TemporaryDirectory(prefix="sd_dual_core-") as folder:
        written = Path(folder) / "adapted.onnx"
        onnx.save(model, written, save_as_external_data=True, location="adapted.data")
        session = ort.InferenceSession(written, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    output: Array = session.run(None, dict(zip(names, inputs, strict=True)))[0]
    return output


def _check(first: Array, second: Array, third: Array, expected: Array) -> None:
    """Fail unless the second run had the new weights, and the third the same as the first."""
    error, change = relative_difference(second, expected), relative_difference(second, first)
    print(f"Largest relative difference of run 2 to run 1 =  {change:.3g}")
    print(f"Largest relative difference of run 2 to a model with these weights =  {error:.3g}")
    if not error <= MAX_RELATIVE_ERROR:  # a NaN is none either
        raise WrongAnswerError(
            f"run 2 is {error:.3g} from a model with these weights, expected at most "
            f"{MAX_RELATIVE_ERROR:g}"
        )
    if not change > MAX_RELATIVE_ERROR:
        raise WrongAnswerError(f"run 2 is {change:.3g} from run 1: the new weights change nothing")
    if not np.array_equal(first, third):
        apart = relative_difference(third, first)
        raise WrongAnswerError(
            f"run 3 is {apart:.3g} from run 1, expected every bit to be the same"
        )


if __name__ == "__main__":
    sys.exit(main())
