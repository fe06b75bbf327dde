"""Optimum's pipelines for ONNX Runtime with sessions of mcinfer.ort."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from optimum.onnxruntime import ORTStableDiffusionPipeline

from mcinfer import ort
from tests.diffusers.pipelines import image

NEAR = 1e-4


def optimum_pipeline(made: Any, unet: Any, **options: Any) -> Any:
    """Optimum's pipeline with this session for the UNet, and plain ones for all else."""
    plain = {
        f"{part}_session": onnxruntime.InferenceSession(made.models[part])
        for part in ("vae_decoder", "text_encoder")
    }
    pipe = made.pipe
    return ORTStableDiffusionPipeline(
        unet_session=unet, scheduler=pipe.scheduler, tokenizer=pipe.tokenizer, **plain, **options
    )


def test_unet_of_optimum_takes_a_session_whose_runs_go_to_two_workers(example: Any) -> None:
    made = example("sd")
    plain = image(made.pipe)
    with ort.InferenceSession(made.models["unet"], devices=2) as session:
        pipe = optimum_pipeline(made, session)
        assert pipe.unet.session is session
        assert np.abs(image(pipe) - plain).max() <= NEAR


def test_unet_of_optimum_binds_its_tensors_to_such_a_session(example: Any) -> None:
    made = example("sd")
    plain = image(made.pipe)
    with ort.InferenceSession(made.models["unet"], devices=2) as session:
        pipe = optimum_pipeline(made, session, use_io_binding=True)
        assert pipe.unet.use_io_binding
        assert np.abs(image(pipe) - plain).max() <= NEAR


def test_every_part_may_be_such_a_session(example: Any) -> None:
    made = example("sd")
    plain = image(made.pipe)
    models: dict[str, Path] = made.models
    with (
        ort.InferenceSession(models["unet"], devices=2) as unet,
        ort.InferenceSession(models["vae_decoder"], devices=1) as decoder,
        ort.InferenceSession(models["text_encoder"], devices=1) as encoder,
    ):
        pipe = ORTStableDiffusionPipeline(
            unet_session=unet,
            vae_decoder_session=decoder,
            text_encoder_session=encoder,
            scheduler=made.pipe.scheduler,
            tokenizer=made.pipe.tokenizer,
        )
        assert np.abs(image(pipe) - plain).max() <= NEAR
