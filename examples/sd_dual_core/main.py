"""One Stable-Diffusion-shaped UNet batch over several worker processes, joined, checked and timed.

Classifier-free guidance (Ho and Salimans 2022) runs the UNet on a batch of two, an unconditional and a
conditional row; here each row goes to a device of its own. A whole denoising loop runs (DDIM, Song et
al. 2021, with the v-prediction of Salimans and Ho 2022 that Stable Diffusion 2.1 uses), and every step's
joined answer is held against one session that runs the whole batch.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
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

from mcinfer import EngineOptions, ParallelPredictUtils, TensorSpec

UNet = Callable[[list[Array]], Array]

GUIDANCE = 7.5
MAX_ERRORS = {"f32": MAX_RELATIVE_ERROR, "f16": 1e-2, "bf16": 1e-1}
"""By the precision of the workers. A bfloat16 has 8 significant bits, a float16 11."""
WHEN_IT_PAYS = (
    "Two workers pay with several devices, or with many clients; "
    "on one CPU, one session has all cores already."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; its exit status."""
    options = _parse(arguments)
    return finish(lambda: _run(options))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", type=Path, help="a UNet with these inputs; built on the spot if not given"
    )
    parser.add_argument("--size", choices=[*SIZES], default="small", help="of the UNet to build")
    parser.add_argument("--devices", type=int, default=2, help="how many worker processes")
    parser.add_argument("--engine", default="onnxruntime", help="of the workers: openvino, say")
    parser.add_argument(
        "--precision",
        choices=[*MAX_ERRORS],
        default="f32",
        help="of the workers' arithmetic, with engine openvino",
    )
    parser.add_argument("--steps", type=int, default=10, help="denoising steps")
    parser.add_argument("--seed", type=int, default=0, help="of the first noise")
    options = parser.parse_args(arguments)
    if not 1 <= options.steps <= TRAINING_STEPS:
        parser.error(f"--steps: got {options.steps}, expected 1 to {TRAINING_STEPS}")
    if options.devices < 1:
        parser.error(f"--devices: got {options.devices}, expected at least 1")
    return options


def _run(options: argparse.Namespace) -> None:
    own = options.model is not None
    with nullcontext(options.model) if own else temporary_unet(options.size) as model:
        worst = _serve(model, options)
    most = MAX_ERRORS[options.precision]
    if not worst <= most:
        raise WrongAnswerError(
            f"the joined result is {worst:.3g} from that of one session, expected at most {most:g}"
        )


def _serve(model: Path, options: argparse.Namespace) -> float:
    """Run the loop on the workers and on one session; how far they ever were apart."""
    chosen = EngineOptions(precision=None if options.precision == "f32" else options.precision)
    utils = ParallelPredictUtils(model, options.devices, engine=options.engine, options=chosen)
    utils.build_model()
    try:
        for worker in utils.statistics().workers:
            print(f"Success to build model {worker.index}")
        latents, context = first_noise(utils.inputs, options.size, options.seed)
        session = ort.InferenceSession(model)
        # The first request of a model shows how its batch splits: it runs whole, and in pieces.
        utils.predict(guided_batch(utils.inputs, latents, TRAINING_STEPS - 1, context))
        split, single = _Timer(_split(utils)), _Timer(_single(session))
        worst = _denoise(latents, context, utils.inputs, options.steps, split, single)
        print(f"Total predict time =  {split.seconds}")
        print(f"One session, all cores, the same steps =  {single.seconds}")
        print(WHEN_IT_PAYS)
        print(f"Largest relative difference to one session =  {worst:.3g}")
    finally:
        utils.finalize()
    for worker in utils.statistics().workers:
        if worker.state == "gone":
            print("Receive exit message  and start to exit")
    return worst


class _Timer:
    """Calls a UNet and adds up the seconds."""

    def __init__(self, unet: UNet) -> None:
        self._unet = unet
        self.seconds = 0.0

    def __call__(self, inputs: list[Array]) -> Array:
        start = time.perf_counter()
        output = self._unet(inputs)
        self.seconds += time.perf_counter() - start
        return output


def _split(utils: ParallelPredictUtils) -> UNet:
    return lambda inputs: utils.predict(inputs)[0]


def _single(session: ort.InferenceSession) -> UNet:
    """One session on the whole batch; row by row where the model's batch is fixed to one."""
    names = [item.name for item in session.get_inputs()]
    fixed = session.get_inputs()[0].shape[0] == 1

    def run(inputs: list[Array]) -> Array:
        if not fixed:
            output: Array = session.run(None, dict(zip(names, inputs, strict=True)))[0]
            return output
        sample, timestep, context = inputs
        rows = [
            session.run(
                None,
                dict(zip(names, [sample[i : i + 1], timestep, context[i : i + 1]], strict=True)),
            )[0]
            for i in range(len(sample))
        ]
        return np.concatenate(rows)

    return run


def _denoise(
    latents: Array,
    context: Array,
    specs: Sequence[TensorSpec],
    steps: int,
    split: UNet,
    single: UNet,
) -> float:
    """The denoising loop; how far the two ways of running the UNet ever were apart.

    DDIM without noise (Song et al. 2021, equation 12, sigma 0) on the scaled-linear schedule of Stable
    Diffusion; x0 and epsilon from v as in Salimans and Ho 2022, appendix D.
    """
    betas = np.linspace(0.00085**0.5, 0.012**0.5, TRAINING_STEPS) ** 2
    alphas = np.cumprod(1.0 - betas)
    times = np.linspace(TRAINING_STEPS - 1, 0, steps + 1).round().astype(int)
    worst = 0.0
    for now, after in pairwise(times):
        inputs = guided_batch(specs, latents, now, context)
        joined, expected = split(inputs), single(inputs)
        # Not Python's max, which would pass a NaN by.
        worst = float(np.maximum(worst, relative_difference(joined, expected)))
        unconditional, conditional = joined[:1], joined[1:]
        v = unconditional + GUIDANCE * (conditional - unconditional)
        signal, noise = alphas[now] ** 0.5, (1 - alphas[now]) ** 0.5
        clean = signal * latents - noise * v
        epsilon = signal * v + noise * latents
        latents = alphas[after] ** 0.5 * clean + (1 - alphas[after]) ** 0.5 * epsilon
    return worst


if __name__ == "__main__":
    sys.exit(main())
