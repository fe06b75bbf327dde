"""examples/sd_dual_core/picture.py, from a folder to a PNG."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


def draw(*arguments: object) -> "subprocess.CompletedProcess[str]":
    program = ROOT / "examples" / "sd_dual_core" / "picture.py"
    return subprocess.run(
        [sys.executable, str(program), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_picture_of_a_folder_is_that_of_pytorch_and_the_second_needs_no_export(
    example: Any, tmp_path: Path
) -> None:
    made = example("sd")
    folder, png = tmp_path / "pipeline", tmp_path / "cat.png"
    made.pipe.save_pretrained(folder)
    wishes = ["a cat", "--steps", 3, "--seed", 5, "--output", png]
    done = draw(folder, *wishes)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Exporting the unet to .*model\.onnx$", done.stdout, re.MULTILINE)
    assert re.search(r"^Time per step =  \d+\.\d+ s", done.stdout, re.MULTILINE)
    assert re.findall(r"^Worker \d on (\S+): 3 runs$", done.stdout, re.MULTILINE) == [
        "cpu:0",
        "cpu:1",
    ]
    assert "3/3" in done.stderr  # diffusers' progress bar
    noise = torch.Generator().manual_seed(5)
    plain = made.pipe("a cat", num_inference_steps=3, generator=noise).images[0]
    first = np.asarray(Image.open(png)).astype(int)
    assert np.abs(first - np.asarray(plain).astype(int)).max() <= 1  # rounded to bytes

    png.unlink()
    again = draw(folder, *wishes, "--height", 16, "--width", 16)
    assert again.returncode == 0, again.stderr
    assert "Exporting" not in again.stdout
    assert np.array_equal(np.asarray(Image.open(png)), first)


def test_folder_that_is_no_pipeline_is_an_error_in_one_line(tmp_path: Path) -> None:
    done = draw(tmp_path, "a cat")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "model_index.json" in done.stderr
    assert "Traceback" not in done.stderr
