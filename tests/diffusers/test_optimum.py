"""Optimum's pipelines for ONNX Runtime with sessions of mcinfer.ort."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
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

NEAR = 1e-4
ROOT = Path(__file__).resolve().parents[2]

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


def optimum_pipeline(made: Any, unet: Any, **sessions: Any) -> Any:
    """Optimum's pipeline with these sessions, and plain ones for all else."""
    sessions = {part: sessions.get(part) for part in ("vae_decoder", "text_encoder")}
    given = {
        f"{part}_session": session or onnxruntime.InferenceSession(made.models[part])
        for part, session in sessions.items()
    }
    pipe = made.pipe
    return ORTStableDiffusionPipeline(
        unet_session=unet, scheduler=pipe.scheduler, tokenizer=pipe.tokenizer, **given
    )


def test_unet_of_optimum_takes_a_session_whose_runs_go_to_two_workers(example: Any) -> None:
    made = example("sd")
    plain = image(made.pipe)
    with ort.InferenceSession(made.models["unet"], devices=2) as session:
        pipe = optimum_pipeline(made, session)
        assert pipe.unet.session is session
        assert np.abs(image(pipe) - plain).max() <= NEAR
        assert all(worker.runs for worker in session.master.statistics().workers)
        # Of the UNet alone: Optimum cannot compute the shape of the VAE's output, whose symbol is 2*height.
        pipe.unet.use_io_binding = True
        assert np.abs(image(pipe) - plain).max() <= NEAR


def test_every_part_may_be_such_a_session(example: Any) -> None:
    made = example("sd")
    with ExitStack() as opened:
        sessions = {
            part: opened.enter_context(ort.InferenceSession(made.models[part], devices=1))
            for part in ("unet", "vae_decoder", "text_encoder")
        }
        pipe = optimum_pipeline(made, **sessions)
        assert np.abs(image(pipe) - image(made.pipe)).max() <= NEAR


def test_program_with_optimums_pipeline_runs_on_two_workers_as_it_is(
    example: Any, tmp_path: Path
) -> None:
    made = example("sd")
    folder, program, drawn = tmp_path / "pipeline", tmp_path / "program.py", tmp_path / "drawn.npy"
    made.pipe.save_pretrained(folder)
    shutil.copytree(made.folder, folder, dirs_exist_ok=True)
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mcinfer", "ort", "--devices", "2", program, folder, drawn],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
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
