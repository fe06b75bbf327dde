"""examples/sd_dual_core/picture.py, from a folder to a PNG."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "sd_dual_core"))

import picture

from tests.process.scripts import run_python

Draw = Callable[..., tuple[int, str, str]]


@pytest.fixture
def draw(capsys: pytest.CaptureFixture[str]) -> Draw:
    """Runs the program; its exit status, and what it wrote to stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = picture.main([*map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def test_picture_of_a_folder_is_that_of_pytorch_and_the_second_needs_no_export(
    example: Any, tmp_path: Path, draw: Draw
) -> None:
    made = example("sd")
    folder, png = tmp_path / "pipeline", tmp_path / "cat.png"
    made.pipe.save_pretrained(folder)
    wishes = ["a cat", "--steps", 3, "--seed", 5, "--output", png]
    status, out, err = draw(folder, *wishes)
    assert status == 0, err
    assert re.search(r"^Exporting the unet to .*model\.onnx$", out, re.MULTILINE)
    assert re.search(r"^Time per step =  \d+\.\d+ s", out, re.MULTILINE)
    assert re.findall(r"^Worker \d on (\S+): 3 runs$", out, re.MULTILINE) == ["cpu:0", "cpu:1"]
    assert "3/3" in err  # diffusers' progress bar
    noise = torch.Generator().manual_seed(5)
    plain = made.pipe("a cat", num_inference_steps=3, generator=noise).images[0]
    first = np.asarray(Image.open(png)).astype(int)
    assert np.abs(first - np.asarray(plain).astype(int)).max() <= 1  # rounded to bytes

    png.unlink()
    status, out, err = draw(folder, *wishes, "--height", 16, "--width", 16)
    assert status == 0, err
    assert "Exporting" not in out
    assert np.array_equal(np.asarray(Image.open(png)), first)

    status, _, err = draw(folder, *wishes, "--height", 17, "--width", 16)
    assert status == 1
    assert err.splitlines()[-1].startswith("error: the pipeline refuses its arguments: ")


def test_folder_that_is_no_pipeline_is_an_error_in_one_line(tmp_path: Path, draw: Draw) -> None:
    status, _, err = draw(tmp_path, "a cat")
    assert status == 1
    assert re.fullmatch(r"error: .*model_index\.json.*\n", err)
    (tmp_path / "model_index.json").write_text("{")
    status, _, err = draw(tmp_path, "a cat")
    assert status == 1
    assert re.fullmatch(r"error: .*model_index\.json: no JSON.*\n", err)


def test_wrong_option_is_an_error_before_pytorch_is_imported(tmp_path: Path) -> None:
    output = tmp_path / "no" / "cat.png"
    command = ("-X", "importtime", picture.__file__, tmp_path, "a cat")
    done = run_python(*command, "--output", output, timeout=600)
    assert done.returncode == 2
    assert "--output: there is no folder" in done.stderr
    assert not re.search(r"\| +(torch|diffusers)$", done.stderr, re.MULTILINE)
