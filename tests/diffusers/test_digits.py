"""The example of the digits from its training to a picture. Needs torch, onnxscript and scikit-learn.

`make test` does not collect it; that draws with the example's own model (tests/process/test_examples.py).
"""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcinfer import Master

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "digits"))

import draw as digits
import train
from sampling import Inputs, draw, first_noise
from torch import from_numpy, no_grad, set_num_threads

# PyTorch's exporter gives warnings on itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*axis name:UserWarning"),
]

EPOCHS = 12
DIGITS = [number % 10 for number in range(200)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The network that some epochs make, and its file."""
    set_num_threads(1)
    network = train.train(EPOCHS, seed=0)
    path = tmp_path_factory.mktemp("digits") / "model.onnx"
    train.export(network, path)
    return network, path


def test_workers_draw_what_the_network_draws(trained: tuple[Any, Path]) -> None:
    network, path = trained

    def in_torch(inputs: Inputs) -> Any:
        with no_grad():
            return network(*map(from_numpy, inputs.values())).numpy()

    noise = first_noise(DIGITS, seed=1)
    expected = draw(in_torch, noise, DIGITS, steps=10, guidance=1.5)
    with Master(path, devices=2) as master:
        pictures = draw(
            lambda inputs: master.predict(inputs)["velocity"], noise, DIGITS, steps=10, guidance=1.5
        )
        split = master.split
    assert split.inputs == {"sample": 0, "time": 0, "digit": 0}
    assert split.outputs == {"velocity": 0}
    assert split.checked
    np.testing.assert_allclose(pictures, expected, atol=1e-4)


def test_few_epochs_make_digits_that_can_be_read(trained: tuple[Any, Path]) -> None:
    with Master(trained[1], devices=1) as master:
        pictures = draw(
            lambda inputs: master.predict(inputs)["velocity"],
            first_noise(DIGITS, seed=1),
            DIGITS,
            steps=20,
            guidance=1.5,
        )
    drawn, written = train.readable(pictures, np.array(DIGITS))
    assert drawn > 0.5  # by chance: 0.1
    assert written > 0.9


def test_file_that_the_training_writes_is_one_to_draw_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, picture = tmp_path / "model.onnx", tmp_path / "digits.png"
    assert train.main(["--epochs", "1", "--judge", "10", "--output", str(model)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^Trained 186,961 parameters in \d+ s \(\d+ s of", said, re.MULTILINE)
    assert f"Written: {model}, {model.stat().st_size / 1e6:.2f} MB" in said
    assert re.search(r"^A classifier reads \d+\.\d% of 10 drawn digits", said, re.MULTILINE)
    options = ["--rows", "1", "--steps", "2", "--model", str(model), "--output", str(picture)]
    assert digits.main(options) == 0
    assert f"Written: {picture}" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
