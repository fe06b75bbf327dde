"""Optimum's pipelines for ONNX Runtime with sessions of mcinfer.ort."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from diffusers import StableDiffusionPipeline
from optimum.exporters.onnx import main_export
from optimum.onnxruntime import ORTStableDiffusionPipeline

from mcinfer import ort
from mcinfer.diffusers import TextEncoder, UNet, VaeDecoder
from tests.diffusers.pipelines import image
from tests.process.scripts import run_python

NEAR = 1e-4

PROGRAM = """
import sys
import numpy as np
import torch
from optimum.onnxruntime import ORTStableDiffusionPipeline

pipe = ORTStableDiffusionPipeline.from_pretrained(sys.argv[1], local_files_only=True)
print(type(pipe.unet.session).__module__)
noise = torch.Generator().manual_seed(1)
np.save(sys.argv[2], pipe("a cat", num_inference_steps=3, generator=noise, output_type="np").images)
"""
"""A program that knows nothing of mcinfer."""


def test_unet_of_optimum_takes_a_session_whose_runs_go_to_two_workers(example: Any) -> None:
    made = example("sd")
    plain = image(made.pipe)
    with ort.InferenceSession(made.models["unet"], devices=2) as session:
        others = {
            f"{part}_session": onnxruntime.InferenceSession(made.models[part])
            for part in ("vae_decoder", "text_encoder")
        }
        pipe = ORTStableDiffusionPipeline(
            unet_session=session,
            scheduler=made.pipe.scheduler,
            tokenizer=made.pipe.tokenizer,
            **others,
        )
        assert pipe.unet.session is session
        assert np.abs(image(pipe) - plain).max() <= NEAR
        assert all(worker.runs for worker in session.master.statistics().workers)
        # Of the UNet alone: Optimum cannot compute the shape of the VAE's output, whose symbol is 2*height.
        pipe.unet.use_io_binding = True
        assert np.abs(image(pipe) - plain).max() <= NEAR


def test_program_with_optimums_pipeline_runs_on_two_workers_as_it_is(
    example: Any, tmp_path: Path
) -> None:
    made = example("sd")
    folder, program, drawn = tmp_path / "pipeline", tmp_path / "program.py", tmp_path / "drawn.npy"
    made.pipe.save_pretrained(folder)
    shutil.copytree(made.folder, folder, dirs_exist_ok=True)
    program.write_text(PROGRAM)
    command = ("-m", "mcinfer", "ort", "--devices", "2", program, folder, drawn)
    done = run_python(*command, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "mcinfer.ort.session"
    assert np.abs(np.load(drawn) - image(made.pipe)).max() <= NEAR


def test_models_that_optimum_exports_serve_as_they_are(example: Any, tmp_path: Path) -> None:
    pipe = example("sd").pipe
    plain = image(pipe)
    pipe.save_pretrained(tmp_path / "pipeline")
    models = tmp_path / "onnx"
    main_export(
        str(tmp_path / "pipeline"),
        output=models,
        task="text-to-image",
        no_post_process=True,
        do_validation=False,
        local_files_only=True,
    )
    with (
        UNet(models / "unet" / "model.onnx", devices=2) as unet,
        VaeDecoder(models / "vae_decoder" / "model.onnx", devices=1) as decoder,
        TextEncoder(models / "text_encoder" / "model.onnx", devices=1) as encoder,
    ):
        ours = {"unet": unet, "vae": decoder, "text_encoder": encoder}
        mixed = StableDiffusionPipeline(
            **{**pipe.components, **ours}, requires_safety_checker=False
        )
        assert np.abs(image(mixed) - plain).max() <= NEAR
        assert [worker.runs for worker in unet.master.statistics().workers] == [3, 3]
