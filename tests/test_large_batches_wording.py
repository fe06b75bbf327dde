"""Tests of mcinfer/large_batches/wording.py: advice of the Python interface as options say it."""

import logging

import numpy as np
import pytest

from mcinfer import sharding
from mcinfer.errors import InvalidInputError, PredictError
from mcinfer.large_batches.wording import in_options, silent_about_splits, speaking_of_options
from mcinfer.requests.splitting import Splitter
from mcinfer.sharding import Axes, SaidAxes, first_split
from mcinfer.specs import ModelSpec, TensorSpec

FLOAT = np.dtype(np.float32)
X = TensorSpec(name="x", dtype=FLOAT, shape=("batch", 4))
TABLE = TensorSpec(name="a table", dtype=FLOAT, shape=("size",))
MODEL = ModelSpec(inputs=(X, TABLE), outputs=(TensorSpec(name="y", dtype=FLOAT, shape=("rows",)),))


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        (
            {"a table": 0},
            {},
            r"with --output-axis 'y'=0, or none where every part gives the same$",
        ),
        ({"x": 7}, {}, r"^--batch-axis 'x': got 7, expected none or an axis from 0 to 1$"),
        (
            {"q": 0},
            {},
            r"^--batch-axis: got unknown input 'q', expected one of \['x', 'a table'\]$",
        ),
        ({}, {"y": 7}, r"^--output-axis 'y': got 7, expected none or an axis from 0 to 0$"),
        ({}, {"q": 0}, r"^--output-axis: got unknown output 'q', expected one of \['y'\]$"),
    ],
)
def test_advice_for_what_cannot_be_split_names_the_option(
    inputs: Axes, outputs: Axes, text: str
) -> None:
    said = SaidAxes(inputs=inputs, outputs=outputs)
    with pytest.raises(InvalidInputError, match=text), speaking_of_options():
        sharding.plan(MODEL, [(7, 4), (7,)], 2, first_split(MODEL, said))


def test_reason_why_all_runs_whole_names_the_option() -> None:
    split = first_split(MODEL, SaidAxes(inputs={"x": None, "a table": None}))
    assert in_options(split.reason) == "--batch-axis says that every input goes whole"


def test_errors_that_speak_of_no_argument_stay_as_they_are() -> None:
    error = PredictError("no memory")
    with pytest.raises(PredictError) as caught, speaking_of_options():
        raise error
    assert caught.value is error


def whole_warning() -> None:
    """What the master warns of when it finds that rows depend on each other."""
    splitter = Splitter(MODEL, SaidAxes(inputs={"x": 0}, outputs={"y": 0}))
    splitter.withdraw("output 'y' joins along axis 1, output_axes says None")


def test_warnings_name_the_options_and_those_of_splits_can_be_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with speaking_of_options():
        whole_warning()
        with silent_about_splits():
            whole_warning()
            logging.getLogger("mcinfer.master").warning("%r: see batch_axes", "x")
    texts = [
        "requests run whole, on one worker: output 'y' joins along axis 1, --output-axis says none. "
        "--batch-axis and --output-axis say what to split and join",
        "'x': see --batch-axis",
    ]
    assert caplog.messages == texts
    logging.getLogger("mcinfer.master").warning("batch_axes")
    assert caplog.messages == [*texts, "batch_axes"]
