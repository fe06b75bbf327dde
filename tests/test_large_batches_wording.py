"""Tests of mcinfer/large_batches/wording.py: advice of the Python interface as options say it."""

import logging

import numpy as np
import pytest

from mcinfer import sharding
from mcinfer.errors import InvalidInputError, PredictError
from mcinfer.large_batches.wording import speaking_of_options
from mcinfer.sharding import BatchAxes, OutputJoin
from mcinfer.specs import ModelSpec, TensorSpec
from mcinfer.tensors import join_parts

FLOAT = np.dtype(np.float32)
X = TensorSpec(name="x", dtype=FLOAT, shape=("batch", 4))
TABLE = TensorSpec(name="a table", dtype=FLOAT, shape=("size",))
PAIRS = TensorSpec(name="y", dtype=FLOAT, shape=("rows", "rows"))


@pytest.mark.parametrize(
    ("output", "axes", "text"),
    [
        (
            X,
            {},
            r"with --batch-axis, as in --batch-axis 'a table'=0 \(cut\) or 'a table'=none \(wh",
        ),
        (X, {"x": 7}, r"^--batch-axis 'x': got 7, expected none or an axis from 0 to 1$"),
        (X, {"q": 0}, r"^--batch-axis: got unknown input 'q', expected one of \['x', 'a table'\]$"),
        (PAIRS, {"x": 0, "a table": 0}, r"leave the inputs whole with --batch-axis$"),
    ],
)
def test_advice_for_what_cannot_be_cut_names_the_option(
    output: TensorSpec, axes: BatchAxes, text: str
) -> None:
    same = TensorSpec(name="x", dtype=FLOAT, shape=("rows", 4))
    rows = TensorSpec(name="a table", dtype=FLOAT, shape=("rows",))
    inputs = (same, rows) if output is PAIRS else (X, TABLE)
    spec = ModelSpec(inputs=inputs, outputs=(output,))
    with pytest.raises(InvalidInputError, match=text), speaking_of_options(warn=True):
        sharding.plan(spec, [(7, 4), (7,)], 2, axes)


def test_advice_for_shards_that_do_not_join_names_options() -> None:
    join = OutputJoin(axis=None, shapes=((4,), (4,)), shape=(4,))
    parts = [np.zeros(4, np.float32), np.ones(4, np.float32)]
    text = r"2 shards; --devices 1 and a --batch of all rows have it run in one piece$"
    with pytest.raises(PredictError, match=text), speaking_of_options(warn=True):
        join_parts(X, join, (1, 1), parts)


@pytest.mark.parametrize(("warn", "texts"), [(True, ["'x': see --batch-axis"]), (False, [])])
def test_warnings_name_the_option_as_well_where_they_are_wanted(
    caplog: pytest.LogCaptureFixture, warn: bool, texts: list[str]
) -> None:
    log = logging.getLogger("mcinfer.master")
    with speaking_of_options(warn=warn):
        log.warning("%r: see batch_axes", "x")
    assert caplog.messages == texts
    log.warning("batch_axes")
    assert caplog.messages == [*texts, "batch_axes"]
