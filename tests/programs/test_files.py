"""The programs of docs/howto/files.md that read images, Parquet and CSV, and the commands after them."""

import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
from PIL import Image

from mcinfer.examples import encoder
from tests.command_line import COMMAND
from tests.process.scripts import ROOT, Program, run_documented

PAGE = (ROOT / "docs" / "howto" / "files.md").read_text("utf-8")
FROM_IMAGES, FROM_PARQUET, FROM_CSV = [
    text
    for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    if "import mcinfer" not in text
]

RISK = """
<ir_version: 8, opset_import: ["": 17]>
risk (float[batch, 3] people) => (float[batch, 1] risk) {
    risk = ReduceMean <axes = [1]> (people)
}
"""


def run_command(option: str, folder: Path) -> None:
    """Run the command of the page that has this option."""
    [command] = re.findall(rf"^    mcinfer (run .*{re.escape(option)}.*)$", PAGE, re.MULTILINE)
    with Program(COMMAND, *shlex.split(command), cwd=folder) as program:
        ended = program.wait(100.0)
    assert (ended.status, ended.err) == (0, "")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))


def test_folder_of_images_becomes_embeddings(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    colours = random.integers(0, 256, (5, 3), np.uint8)
    endings = ("png", "JPG", "jpeg", "png", "txt")
    for number, ending in enumerate(endings):
        image = Image.new("RGB", (64, 48), tuple(map(int, colours[number])))
        image.save(tmp_path / "images" / f"{number}.{ending}", "PNG" if ending != "JPG" else "JPEG")
    assert run_documented(FROM_IMAGES, tmp_path) == ""
    pixels = np.load(tmp_path / "images.npy")
    assert pixels.shape == (4, 32, 32, 3)
    assert np.abs(pixels - colours[:4, None, None].astype(int)).max() <= 3  # of JPEG
    (tmp_path / "model.onnx").write_bytes(encoder().read_bytes())
    run_command("--scale", tmp_path)
    image = pixels.transpose(0, 3, 1, 2).astype(np.float32) * np.float32(1 / 255)
    [expected] = onnxruntime.InferenceSession(encoder()).run(None, {"image": image})
    np.testing.assert_allclose(np.load(tmp_path / "embeddings.npy"), expected, atol=1e-5)


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_columns_of_a_table_become_a_column(tmp_path: Path, ending: str) -> None:
    values = np.random.default_rng(1).integers(0, 200, (70_000, 3)) / 4
    people = pd.DataFrame(values, columns=["weight", "age", "height"])
    people.insert(1, "name", "somebody")
    if ending == "parquet":
        people.to_parquet(tmp_path / "people.parquet")  # of more batches than one
    else:
        people.to_csv(tmp_path / "people.csv", index=False)
    assert run_documented(FROM_PARQUET if ending == "parquet" else FROM_CSV, tmp_path) == ""
    columns = ["age", "height", "weight"]
    rows = people[columns].to_numpy(np.float32)
    np.testing.assert_array_equal(np.load(tmp_path / "people.npy"), rows, strict=True)
    onnx.save(onnx.parser.parse_model(RISK), tmp_path / "risk.onnx")
    run_command("risk.csv", tmp_path)
    [expected] = onnxruntime.InferenceSession(tmp_path / "risk.onnx").run(None, {"people": rows})
    risk = pd.read_csv(tmp_path / "risk.csv", dtype=np.float32)
    assert [*risk] == ["risk"]
    np.testing.assert_allclose(risk["risk"], expected[:, 0], rtol=1e-6)
