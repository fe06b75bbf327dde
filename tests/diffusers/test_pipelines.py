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
from tests.diffusers.conftest import PARTS
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


def with_parts(made: Any, kind: Any = None, **components: Any) -> Any:
    """The example's pipeline, or another `kind` of one, with these in the place of its components."""
    extra = {"requires_safety_checker": False} if hasattr(made.pipe, "safety_checker") else {}
    return (kind or type(made.pipe))(**{**made.pipe.components, **components}, **extra)


def assert_near(ours: Any, plain: Any, most: float = NEAR) -> None:
    assert np.abs(ours - plain).max() <= most


@pytest.mark.parametrize(("name", "part"), [(name, part) for name in PARTS for part in PARTS[name]])
def test_picture_with_a_part_over_two_workers_is_that_of_pytorch(
    example: Any, name: str, part: str
) -> None:
    made = example(name)
    with KINDS[part](made.models[part], devices=2) as component:
        attribute = "vae" if part == "vae_decoder" else part
        ours = image(with_parts(made, **{attribute: component}), 2, **SIZES[name])
        # A text encoder has a row for each prompt: one.
        assert all(runs(component)) or isinstance(component, TextEncoder)
        assert sum(runs(component)) > 0
    assert_near(ours, image(made.pipe, 2, **SIZES[name]))


def test_unet_that_replaces_the_pipelines_sends_a_row_of_the_guidance_to_each_worker(
    example: Any, tmp_path: Path
) -> None:
    made = example("sd")
    plain, pipe = image(made.pipe), with_parts(made)
    with UNet(made.models["unet"], pipe.unet, devices=2) as unet:
        pipe.unet = unet
        assert_near(image(pipe), plain)
        assert runs(unet) == [3, 3]  # a row of each of three steps, and no further run
        assert pipe.to("cpu") is pipe
        assert (pipe.device, pipe.dtype) == (torch.device("cpu"), torch.float32)

        # Another size needs no other export.
        sizes = {"height": 24, "width": 32}
        assert_near(image(pipe, **sizes), image(made.pipe, **sizes))

        def interrupted(*_: object, **__: object) -> None:
            signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            image(pipe, callback_on_step_end=interrupted)
        assert_near(image(pipe), plain)

        pipe.save_pretrained(tmp_path)
        loaded = StableDiffusionPipeline.from_pretrained(tmp_path, unet=None)
        assert loaded.unet is None
        parts = {**loaded.components, "unet": unet}
        assert_near(image(with_parts(made, **parts)), plain)

        given = {"image": PICTURE, "strength": 0.7, "num_inference_steps": 4}
        from_picture = StableDiffusionImg2ImgPipeline
        ours = image(with_parts(made, from_picture, unet=unet), **given)
        assert_near(ours, image(with_parts(made, from_picture), **given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pipeline_of_16_bits_draws_with_a_unet_of_32(example: Any, dtype: torch.dtype) -> None:
    made = example("sd")
    parts = {k: copy.deepcopy(part) for k, part in made.pipe.components.items()}
    with UNet(made.models["unet"], devices=1) as unet:
        pipe = with_parts(made, **{**parts, "unet": unet})
        assert pipe.to(dtype).dtype == dtype
        assert_near(image(pipe), image(made.pipe), most=0.1)  # the bits of the other parts


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
        assert_near(image(pipe, **given), plain)
        assert runs(unet) == [3, 3]


def test_picture_is_drawn_although_a_worker_is_killed_at_a_step(example: Any) -> None:
    made = example("sd")
    with UNet(made.models["unet"], devices=2) as unet:

        def kill(_: object, step: int, __: object, tensors: dict[str, Any]) -> dict[str, Any]:
            pid = unet.master.statistics().workers[0].pid
            if step == 2 and pid is not None:
                os.kill(pid, signal.SIGKILL)
            return tensors

        given = {"num_inference_steps": 6}
        ours = image(with_parts(made, unet=unet), **given, callback_on_step_end=kill)
        assert unet.master.statistics().workers[0].restarts == 1
    assert_near(ours, image(made.pipe, **given))
