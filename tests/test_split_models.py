"""Models of ONNX Runtime, as they are exported: what of them is split, without processes.

Each request is compared with one session that has the whole batch. `tests/process/test_splitting.py` has some
of them with real workers.
"""

from pathlib import Path

import numpy as np
import onnx as package
import pytest
from onnx import parser

from mcinfer import Split
from tests.process.models import OnnxModel
from tests.split_graphs import Arrays, InProcess, open_session
from tests.split_models import (
    MIXING,
    NO_NAMES,
    PADDLE,
    alone,
    assert_equal,
    mixing,
    onnx,
    random,
    rename,
)


@pytest.fixture
def onnx_model(tmp_path: Path) -> OnnxModel:
    """Writes an ONNX model that is given in ONNX's text format."""

    def write(text: str) -> Path:
        path = tmp_path / "model.onnx"
        package.save(parser.parse_model(text), path)
        return path

    return write


class Pool(InProcess):
    """What decides in a master with two workers."""

    def __init__(self, path: Path) -> None:
        super().__init__(open_session(package.load(path)))

    @property
    def split(self) -> Split:
        return self.splitter.known.split

    def splits(self, inputs: Arrays) -> bool:
        """Whether a request runs in pieces."""
        before = self.split_runs
        self.predict(inputs)
        return self.split_runs > before


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        pytest.param(PADDLE, 4, id="Paddle"),
        pytest.param(("unk__214", "unk__215", "unk__216", "unk__217"), 5, id="tf2onnx"),
        pytest.param(("?", "?", "?", "?"), 3, id="question marks"),
        pytest.param(("-1", "-1", "-1", "-1"), 2, id="minus one"),
    ],
)
def test_model_without_names_is_split_from_the_second_request_on(
    onnx_model: OnnxModel, sizes: tuple[str, ...], count: int
) -> None:
    path = onnx_model(NO_NAMES)
    rename(path, dict(zip("abcd", sizes, strict=True)))
    master = Pool(path)
    first = {"x": random((count, 3, 7))}
    assert_equal(master.predict(first), alone(path, first))
    assert master.splits({"x": random((4, 3, 6))})
    later = {"x": random((5, 3, 9), 2)}
    assert_equal(master.predict(later), alone(path, later))


def test_model_of_any_rank_is_run_and_split(onnx_model: OnnxModel) -> None:
    path = onnx_model(onnx("(float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }"))
    model = package.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    package.save(model, path)
    master = Pool(path)
    for shape in ((4, 3), (5, 3), (6, 2, 2)):
        x = {"x": random(shape)}
        assert_equal(master.predict(x), alone(path, x))
    assert master.splits({"x": random((4, 3))})


# Rows that depend on each other.


@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        *((name, "batch") for name in MIXING),
        ("mean", "s0"),
        ("output of the maximum", "?"),
    ],
)
def test_model_that_mixes_its_rows_runs_whole(
    onnx_model: OnnxModel, name: str, symbol: str
) -> None:
    path = onnx_model(mixing(name, symbol))
    master = Pool(path)
    for seed in range(3):
        x = {"x": random((4, 4), seed)}
        assert_equal(master.predict(x), alone(path, x))
    assert not master.split.splits
    assert not master.splits({"x": random((4, 4))})


def test_time_of_a_recurrent_model_is_no_batch(onnx_model: OnnxModel) -> None:
    text = onnx("""(float[sequence_length, 2] x) => (float[sequence_length, 3] y, float[1, 3] last)
    <float[1, 12, 2] w = {WEIGHTS24}, float[1, 12, 3] r = {WEIGHTS36},
     int64[1] one = {1}, int64[1] zero = {0}> {
        wide = Unsqueeze(x, one)
        states, h, c = LSTM <hidden_size = 3> (wide, w, r)
        flat = Squeeze(states, one)
        y = Squeeze(flat, one)
        last = Squeeze(h, zero)
    }""")
    for count in (24, 36):
        values = np.random.default_rng(count).standard_normal(count).round(3)
        text = text.replace(f"WEIGHTS{count}", ", ".join(map(str, values)))
    path = onnx_model(text)
    master = Pool(path)
    for seed in range(2):
        x = {"x": random((6, 2), seed)}
        assert_equal(master.predict(x), alone(path, x))
    assert not master.split.splits
