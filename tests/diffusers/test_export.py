"""What `export` writes, and what it refuses."""

import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
from diffusers import StableDiffusionImg2ImgPipeline

from mcinfer import EngineError, InvalidInputError
from mcinfer.diffusers import VaeDecoder, export


def shapes(path: Path) -> dict[str, list[Any]]:
    graph = onnx.load(path, load_external_data=False).graph
    return {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in [*graph.input, *graph.output]
    }


def test_batch_sides_and_tokens_are_symbols(example: Any) -> None:
    made = example("sd")
    unet = shapes(made.models["unet"])
    assert unet["sample"] == ["batch", 4, "height", "width"]
    assert unet["timestep"] == []
    assert unet["encoder_hidden_states"] == ["batch", "tokens", 32]
    assert unet["out_sample"][:2] == ["batch", 4]
    assert shapes(made.models["vae_decoder"])["latent_sample"] == ["batch", 4, "height", "width"]
    assert shapes(made.models["text_encoder"])["input_ids"] == ["batch", "tokens"]


def test_inputs_are_those_of_the_pipelines_call(example: Any) -> None:
    assert [*shapes(example("sdxl").models["unet"])] == [
        "sample",
        "timestep",
        "encoder_hidden_states",
        "text_embeds",
        "time_ids",
        "out_sample",
    ]
    assert {"pooled_projections", "timestep"} < {*shapes(example("sd3").models["transformer"])}
    flux = shapes(example("flux").models["transformer"])
    assert flux["img_ids"] == [flux["hidden_states"][1], 3]
    assert flux["guidance"] == ["batch"]


def test_exports_at_once_replace_their_files_and_leave_others_and_the_pipeline_as_they_are(
    example: Any, tmp_path: Path
) -> None:
    pipe = example("sd").pipe
    folder = tmp_path / "vae_decoder"
    folder.mkdir()
    for name in ("model.onnx", "config.json", "mine.txt"):
        (folder / name).write_text("old")
    pipe.vae.train()
    directory = os.open(folder, os.O_RDONLY)
    try:
        with ThreadPoolExecutor() as pool:
            fcntl.flock(directory, fcntl.LOCK_EX)  # as an export of another process
            exports = [pool.submit(export, pipe, tmp_path, ["vae_decoder"]) for _ in range(2)]
            try:
                deadline = time.monotonic() + 300
                while not [*folder.glob(".mcinfer-*/config.json")]:
                    assert not any(work.done() for work in exports)
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                assert (folder / "model.onnx").read_text() == "old"
            finally:
                fcntl.flock(directory, fcntl.LOCK_UN)
            for work in exports:
                assert work.result() == {"vae_decoder": folder / "model.onnx"}
        assert pipe.vae.training
    finally:
        os.close(directory)
        pipe.vae.eval()
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "mine.txt",
        "model.onnx",
    ]
    assert (folder / "mine.txt").read_text() == "old"
    with VaeDecoder(folder / "model.onnx", devices=1) as decoder:
        assert decoder.config.scaling_factor == pipe.vae.config.scaling_factor
    assert not any(part._forward_pre_hooks for part in (pipe.unet, pipe.text_encoder))


def test_model_that_cannot_be_exported_leaves_no_file(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = example("sd").pipe

    def decode(z: Any, **_: object) -> Any:
        return (z * int(z.sum().item() > 0),)  # depends on values

    monkeypatch.setattr(pipe.vae, "decode", decode)
    with pytest.raises(EngineError, match="PyTorch cannot export vae_decoder"):
        export(pipe, tmp_path, ["vae_decoder"])
    assert not [*(tmp_path / "vae_decoder").iterdir()]


def test_call_that_the_pipeline_refuses_is_an_error_with_its_reason(
    example: Any, tmp_path: Path
) -> None:
    parts = example("sd").pipe.components
    pipe = StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False)
    with pytest.raises(InvalidInputError, match="call: the pipeline needs other arguments than"):
        export(pipe, tmp_path)  # without an image
    assert not [*tmp_path.iterdir()]
