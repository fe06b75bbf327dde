"""Tests of mcinfer/large_batches/requests.py: how a large batch becomes requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.errors import InvalidInputError
from mcinfer.large_batches.requests import Requests, check_inputs, plan_requests
from mcinfer.sharding import Axes, SaidAxes, first_split
from mcinfer.specs import Dimension, ModelSpec, TensorSpec

FLOAT = np.dtype(np.float32)


@dataclass(frozen=True)
class Array:
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]" = FLOAT


def spec(name: str, *shape: Dimension) -> TensorSpec:
    return TensorSpec(name=name, dtype=FLOAT, shape=shape)


def model(inputs: Sequence[TensorSpec], *outputs: TensorSpec) -> ModelSpec:
    return ModelSpec(inputs=tuple(inputs), outputs=outputs)


ROWS = model([spec("x", "batch", 4)], spec("y", "batch", 4))


def requests_of(
    taken: ModelSpec,
    arrays: dict[str, Array],
    workers: int,
    rows: int | None,
    inputs: Axes | None = None,
    outputs: Axes | None = None,
) -> Requests:
    """Cut as the model's symbols and the user say."""
    said = SaidAxes(inputs=inputs or {}, outputs=outputs or {})
    return plan_requests(taken, arrays, workers, rows, first_split(taken, said))


def spans(requests: Requests) -> list[tuple[int, int]]:
    return [requests.span(i) for i in range(requests.count)]


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 9))
def test_requests_have_every_row_once_and_in_order(units: int, rows: int, workers: int) -> None:
    requests = requests_of(ROWS, {"x": Array((units, 4))}, workers, rows)
    every = [unit for start, stop in spans(requests) for unit in range(start, stop)]
    assert every == [*range(units)]
    assert {stop - start for start, stop in spans(requests)[:-1]} <= {rows}


def test_request_has_64_rows_for_each_worker_whole_pieces_of_a_fixed_batch() -> None:
    assert requests_of(ROWS, {"x": Array((10_000_000, 4))}, 3, None).step == 3 * 64
    for batch, step in ((6, 10), (100, 1)):
        fixed = model([spec("x", batch)], spec("y", batch))
        arrays = {"x": Array((batch * 1000,))}
        assert requests_of(fixed, arrays, 3, None, {"x": 0}, {"y": 0}).step == 3 * step


def test_rows_of_a_model_that_takes_one_are_units() -> None:
    one = model([spec("x", 1, 4)], spec("y", 1))
    requests = requests_of(one, {"x": Array((7, 4))}, 2, 3)
    assert (spans(requests), requests.outputs) == ([(0, 3), (3, 6), (6, 7)], {"y": 0})


def test_large_rows_make_small_requests() -> None:
    wide = model([spec("x", "batch", 1)], spec("y", "batch", 1 << 20))
    assert requests_of(wide, {"x": Array((1000, 1))}, 4, None).step == 12
    wider = model([spec("x", "batch", 1)], spec("y", "batch", 1 << 30))
    assert requests_of(wider, {"x": Array((1000, 1))}, 4, None).step == 4


@pytest.mark.parametrize("output", [spec("y", "batch", "other"), spec("y", None, None)])
def test_output_of_unknown_shape_is_taken_to_be_as_the_inputs(output: TensorSpec) -> None:
    large = model([spec("x", "batch", 1 << 20)], output)
    arrays = {"x": Array((1000, 1 << 20))}
    assert requests_of(large, arrays, 2, None, outputs={"y": 0}).step == 8


def test_small_batch_is_one_request() -> None:
    requests = requests_of(ROWS, {"x": Array((5, 4))}, 2, None)
    assert spans(requests) == [(0, 5)]
    assert (requests.axes, requests.sizes) == ({"x": 0}, {"x": 1})


def test_inputs_without_the_batch_go_whole() -> None:
    two = model([spec("x", "seq", "batch"), spec("scale", 3)], spec("y", "seq", "batch"))
    requests = requests_of(two, {"x": Array((5, 8)), "scale": Array((3,))}, 2, 4)
    assert (requests.axes, requests.sizes) == ({"x": 1, "scale": None}, {"x": 1})
    assert spans(requests) == [(0, 4), (4, 8)]
    assert requests.outputs == {"y": 1}


@pytest.mark.parametrize(("rows", "step"), [(1, 1), (4, 1), (9, 2), (100, 3), (None, 3)])
def test_fixed_batch_is_cut_at_multiples_of_it(rows: int | None, step: int) -> None:
    fixed = model([spec("x", 4, 2), spec("z", 8)], spec("y", 4, 2))
    arrays = {"x": Array((12, 2)), "z": Array((24,))}
    requests = requests_of(fixed, arrays, 2, rows, {"x": 0, "z": 0}, {"y": 0})
    assert (requests.units, requests.unit_rows, requests.step) == (3, 4, step)
    assert requests.sizes == {"x": 4, "z": 8}
    assert requests.outputs == {"y": 0 if step < 3 else None}


WHOLE = model([spec("x", "length", 4)], spec("y", "other"))
TWO = model([spec("x", "batch", 4), spec("z", "batch")], spec("y", "batch"))


def test_batch_that_is_not_known_runs_whole() -> None:
    requests = requests_of(WHOLE, {"x": Array((1_000_000, 4))}, 2, None)
    assert (requests.axes, requests.sizes, spans(requests)) == ({"x": None}, {}, [(0, 1)])
    assert requests.outputs == {"y": None}


def test_batch_is_cut_and_joined_where_that_is_said() -> None:
    requests = requests_of(WHOLE, {"x": Array((5, 4))}, 1, 2, {"x": 0}, {"y": None})
    assert (requests.axes, spans(requests)) == ({"x": 0}, [(0, 2), (2, 4), (4, 5)])
    assert requests.outputs == {"y": None}


def test_batch_of_no_rows_is_one_request() -> None:
    requests = requests_of(ROWS, {"x": Array((0, 4))}, 2, 3)
    assert spans(requests) == [(0, 0)]


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({}, r"inputs: missing \['x'\], expected \['x'\]"),
        ({"x": Array((2, 4)), "q": Array(())}, r"inputs: unknown \['q'\], expected"),
        ({"x": Array((2, 4), np.dtype(int))}, "'x' has dtype int64, expected float32"),
        ({"x": Array((2, 4), np.dtype("V2"))}, r"'x' has dtype \|V2, expected float32"),
    ],
    ids=["missing", "unknown", "dtype", "raw"],
)
def test_arrays_that_are_not_the_models_are_told_as_predict_would(
    arrays: dict[str, Array], text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        check_inputs(ROWS, arrays)


@pytest.mark.parametrize(
    ("taken", "arrays", "inputs", "text"),
    [
        (ROWS, {"x": Array((2, 5))}, {}, "'x' has size 5 in dimension 1, expected 4"),
        (ROWS, {"x": Array((2,))}, {}, "'x' has 1 dimensions"),
        (
            TWO,
            {"x": Array((7, 4)), "z": Array((6,))},
            {"x": 0, "z": 0},
            "'x' has 7 rows and 'z' has 6",
        ),
        (
            model([spec("x", 4)], spec("y", 4)),
            {"x": Array((7,))},
            {"x": 0},
            "a multiple of .* batch of 4",
        ),
        (
            model([spec("x", 4)], spec("y", 4)),
            {"x": Array((8,))},
            {"x": 0},
            r"output 'y' has no axis .* output_axes=\{'y': 0\}",
        ),
        (model([spec("x", 4)], spec("y", 4)), {"x": Array((8,))}, {}, "'x' has size 8"),
    ],
    ids=["size", "rank", "rows", "not a multiple", "output", "fixed"],
)
def test_shapes_that_do_not_fit_are_told_as_predict_would(
    taken: ModelSpec, arrays: dict[str, Array], inputs: Axes, text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        requests_of(taken, arrays, 2, 3, inputs)
