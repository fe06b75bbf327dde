"""From a Stable Diffusion folder to a picture, with the denoiser on several devices.

The folder is one of diffusers: model_index.json, unet or transformer, vae, text_encoder and so on. The first
picture exports the denoiser to ONNX; later ones use that file, and PyTorch's weights of it are not loaded.
"""

import argparse
import inspect
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from guided_unet import WrongAnswerError, finish

KINDS = {"unet": "UNet", "transformer": "Transformer2D"}
"""By component of a pipeline, the class of mcinfer.diffusers that takes its place."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; its exit status."""
    options = _parse(arguments)
    return finish(lambda: _draw(options))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a pipeline as diffusers saves it")
    parser.add_argument("prompt", help="what to draw")
    parser.add_argument("--negative", help="what not to draw")
    parser.add_argument("--output", type=Path, default=Path("picture.png"), help="a PNG file")
    parser.add_argument(
        "--onnx", type=Path, help="folder for ONNX; default: onnx in the pipeline's"
    )
    parser.add_argument("--devices", default="2", help="2, or names: cuda:0,cuda:1")
    parser.add_argument("--steps", type=int, default=25, help="denoising steps")
    parser.add_argument("--guidance", type=float, help="default: the pipeline's")
    parser.add_argument("--height", type=int, help="in pixels; default: the pipeline's")
    parser.add_argument("--width", type=int, help="in pixels; with --height")
    parser.add_argument("--seed", type=int, default=0, help="of the first noise")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps: got {options.steps}, expected at least 1")
    if (options.height is None) != (options.width is None):
        # A pipeline of diffusers takes its own size for both where one is missing.
        parser.error("--height and --width: got one of them, expected both or none")
    if options.output.suffix.lower() != ".png":
        parser.error(f"--output: got {str(options.output)!r}, expected a name that ends in .png")
    if not options.output.absolute().parent.is_dir():
        parser.error(f"--output: there is no folder {str(options.output.parent)!r}")
    return options


def _draw(options: argparse.Namespace) -> None:
    # Within: they take seconds, and a missing package is an error like others.
    import torch

    import mcinfer.diffusers

    pipe, name, model = _load(options.folder, options.onnx or options.folder / "onnx")
    devices = int(options.devices) if options.devices.isdigit() else options.devices.split(",")
    with getattr(mcinfer.diffusers, KINDS[name])(model, devices=devices) as denoiser:
        pipe = _with(pipe, name, denoiser)
        print(f"Drawing with {denoiser!r}")
        ends = [time.perf_counter()]

        def note(_pipe: Any, _step: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            ends.append(time.perf_counter())
            return tensors

        wishes = {
            "negative_prompt": options.negative,
            "guidance_scale": options.guidance,
            "height": options.height,
            "width": options.width,
        }
        try:
            picture = pipe(
                options.prompt,
                num_inference_steps=options.steps,
                generator=torch.Generator().manual_seed(options.seed),
                callback_on_step_end=note,
                **{name: value for name, value in wishes.items() if value is not None},
            ).images[0]
        except (TypeError, ValueError) as exc:  # of a size, or an argument that this pipeline lacks
            raise WrongAnswerError(f"the pipeline refuses its arguments: {exc}") from exc
        workers = denoiser.master.statistics().workers
    # The first step also warms up the runtime.
    steps = [after - before for before, after in pairwise(ends)]
    for worker in workers:
        print(f"Worker {worker.index} on {worker.device}: {worker.runs} runs")
    print(f"Time per step =  {median(steps[1:] or steps):.3f} s, the median")
    picture.save(options.output)
    print(f"{options.output}: {picture.width} x {picture.height}")


def _load(folder: Path, onnx: Path) -> tuple[Any, str, Path]:
    """The pipeline, the name of its denoiser, and the path of the denoiser's ONNX model."""
    from diffusers import DiffusionPipeline

    from mcinfer.diffusers import export

    try:
        index = json.loads((folder / "model_index.json").read_bytes())
    except ValueError as exc:
        raise WrongAnswerError(f"{folder / 'model_index.json'}: no JSON: {exc}") from exc
    name = next((name for name in KINDS if name in index), None)
    if name is None:
        raise WrongAnswerError(f"{folder}: its pipeline has neither a unet nor a transformer")
    model = onnx / name / "model.onnx"
    exported = model.exists()
    given: dict[str, Any] = {name: None} if exported else {}
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True, **given)
    if not exported:
        print(f"Exporting the {name} to {model}", flush=True)
        export(pipe, onnx, [name])
    return pipe, name, model


def _with(pipe: Any, name: str, denoiser: Any) -> Any:
    """The pipeline with this denoiser; PyTorch's goes with the old pipeline."""
    components = {**pipe.components, name: denoiser}
    parameters = inspect.signature(type(pipe)).parameters
    options = {k: v for k, v in pipe.config.items() if k in parameters and k not in components}
    return type(pipe)(**components, **options)


if __name__ == "__main__":
    sys.exit(main())
