"""Pictures of a pipeline with mcinfer's components are those of PyTorch's."""

import copy
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    ControlNetModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)
from PIL import Image

from mcinfer.diffusers import Component, TextEncoder, Transformer2D, UNet, VaeDecoder, export
from tests.diffusers.pipelines import SIZES, image

NEAR = 1e-4
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
KINDS: dict[str, type[Component]] = {
    "unet": UNet,
    "transformer": Transformer2D,
    "vae_decoder": VaeDecoder,
    "text_encoder": TextEncoder,
    "text_encoder_2": TextEncoder,
}


def runs(component: Component) -> list[int]:
    return [worker.runs for worker in component.master.statistics().workers]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("sd", "unet"),
        ("sd", "vae_decoder"),
        ("sd", "text_encoder"),
        ("sdxl", "unet"),
        ("sdxl", "text_encoder_2"),
        ("sd3", "transformer"),
        ("flux", "transformer"),
        ("flux", "text_encoder_2"),
    ],
)
def test_picture_with_a_part_over_two_workers_is_that_of_pytorch(
    example: Any, name: str, part: str
) -> None:
    made = example(name)
    plain = image(made.pipe, 2, **SIZES[name])
    with KINDS[part](made.models[part], devices=2) as component:
        attribute = "vae" if part == "vae_decoder" else part
        parts = {**made.pipe.components, attribute: component}
        ours = image(type(made.pipe)(**parts, **_extra(made.pipe)), 2, **SIZES[name])
        # A text encoder has a row for each prompt: one.
        assert all(runs(component)) or isinstance(component, TextEncoder)
        assert sum(runs(component)) > 0
    assert np.abs(ours - plain).max() <= NEAR


def test_unet_that_replaces_the_pipelines_sends_a_row_of_the_guidance_to_each_worker(
    example: Any,
) -> None:
    made = example("sd")
    plain = image(made.pipe)
    pipe = StableDiffusionPipeline(**made.pipe.components, **_extra(made.pipe))
    with UNet(made.models["unet"], pipe.unet, devices=2) as unet:
        pipe.unet = unet
        assert np.abs(image(pipe) - plain).max() <= NEAR
        assert runs(unet) == [3, 3]  # a row of each of three steps, and no further run
        assert pipe.to("cpu") is pipe
        assert (pipe.device, pipe.dtype) == (torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pipeline_of_16_bits_draws_with_a_unet_of_32(example: Any, dtype: torch.dtype) -> None:
    made = example("sd")
    plain = image(made.pipe)
    parts = {k: copy.deepcopy(part) for k, part in made.pipe.components.items()}
    with UNet(made.models["unet"], devices=1) as unet:
        pipe = StableDiffusionPipeline(**{**parts, "unet": unet}, **_extra(made.pipe))
        assert pipe.to(dtype).dtype == dtype
        assert np.abs(image(pipe) - plain).max() <= 0.1  # the bits of the other parts


def test_saved_pipeline_lacks_the_unet(example: Any, tmp_path: Path) -> None:
    made = example("sd")
    with UNet(made.models["unet"], devices=1) as unet:
        pipe = StableDiffusionPipeline(
            **{**made.pipe.components, "unet": unet}, **_extra(made.pipe)
        )
        pipe.save_pretrained(tmp_path)
        loaded = StableDiffusionPipeline.from_pretrained(tmp_path, unet=None)
        assert loaded.unet is None
        whole = StableDiffusionPipeline(**{**loaded.components, "unet": unet}, **_extra(made.pipe))
        assert np.abs(image(whole) - image(made.pipe)).max() <= NEAR


def test_interrupted_picture_leaves_the_unet_usable(example: Any) -> None:
    made = example("sd")
    plain = image(made.pipe)
    with UNet(made.models["unet"], devices=2) as unet:
        pipe = StableDiffusionPipeline(
            **{**made.pipe.components, "unet": unet}, **_extra(made.pipe)
        )

        def interrupted(*_: object, **__: object) -> None:
            signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            image(pipe, callback_on_step_end=interrupted)
        assert np.abs(image(pipe) - plain).max() <= NEAR


def test_picture_of_another_size_needs_no_other_export(example: Any) -> None:
    made = example("sd")
    plain = image(made.pipe, height=24, width=32)
    with UNet(made.models["unet"], devices=2) as unet:
        pipe = StableDiffusionPipeline(
            **{**made.pipe.components, "unet": unet}, **_extra(made.pipe)
        )
        assert np.abs(image(pipe, height=24, width=32) - plain).max() <= NEAR


def test_picture_from_a_picture_is_that_of_pytorch(example: Any) -> None:
    made = example("sd")
    given = {"image": PICTURE, "strength": 0.7, "num_inference_steps": 4}
    torch_pipe = StableDiffusionImg2ImgPipeline(**made.pipe.components, **_extra(made.pipe))
    plain = image(torch_pipe, **given)
    with UNet(made.models["unet"], devices=2) as unet:
        pipe = StableDiffusionImg2ImgPipeline(
            **{**made.pipe.components, "unet": unet}, **_extra(made.pipe)
        )
        assert np.abs(image(pipe, **given) - plain).max() <= NEAR


def test_residuals_of_a_controlnet_are_inputs_of_the_unet(example: Any, tmp_path: Path) -> None:
    parts = example("sd").pipe.components
    torch.manual_seed(0)
    net = ControlNetModel.from_unet(
        parts["unet"], conditioning_embedding_out_channels=(16, 32)
    ).eval()
    for weight in net.parameters():
        if not weight.any():  # a new ControlNet changes nothing
            torch.nn.init.normal_(weight, std=0.1)
    pipe = StableDiffusionControlNetPipeline(**parts, controlnet=net, requires_safety_checker=False)
    given = {"image": PICTURE, "height": 16, "width": 16}
    plain = image(pipe, **given)
    assert np.abs(plain - image(example("sd").pipe)).max() > 100 * NEAR
    models = export(pipe, tmp_path, **given)
    with UNet(models["unet"], devices=2) as unet:
        pipe.unet = unet
        assert np.abs(image(pipe, **given) - plain).max() <= NEAR
        assert runs(unet) == [3, 3]


def test_picture_is_drawn_although_a_worker_is_killed_at_a_step(example: Any) -> None:
    made = example("sd")
    plain = image(made.pipe, num_inference_steps=6)
    with UNet(made.models["unet"], devices=2) as unet:
        pipe = StableDiffusionPipeline(
            **{**made.pipe.components, "unet": unet}, **_extra(made.pipe)
        )

        def kill(_: object, step: int, __: object, tensors: dict[str, Any]) -> dict[str, Any]:
            pid = unet.master.statistics().workers[0].pid
            if step == 2 and pid is not None:
                os.kill(pid, signal.SIGKILL)
            return tensors

        ours = image(pipe, num_inference_steps=6, callback_on_step_end=kill)
        assert unet.master.statistics().workers[0].restarts == 1
    assert np.abs(ours - plain).max() <= NEAR


def _extra(pipe: Any) -> dict[str, bool]:
    """Arguments of the pipeline's class that are no components."""
    return {"requires_safety_checker": False} if hasattr(pipe, "safety_checker") else {}
