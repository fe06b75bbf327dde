"""Tests of mcinfer/large_batches/requests.py: how a large batch becomes requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.errors import InvalidInputError
from mcinfer.large_batches.requests import Requests, plan_requests
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


def spans(requests: Requests) -> list[tuple[int, int]]:
    return [requests.span(i) for i in range(requests.count)]


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 9))
def test_requests_have_every_row_once_and_in_order(units: int, rows: int, workers: int) -> None:
    requests = plan_requests(ROWS, {"x": Array((units, 4))}, workers, rows)
    every = [unit for start, stop in spans(requests) for unit in range(start, stop)]
    assert every == [*range(units)]
    assert {stop - start for start, stop in spans(requests)[:-1]} <= {rows}


def test_request_has_64_rows_for_each_worker_whole_pieces_of_a_fixed_batch() -> None:
    assert plan_requests(ROWS, {"x": Array((10_000_000, 4))}, 3, None).step == 3 * 64
    for batch, step in ((6, 10), (100, 1)):
        fixed = model([spec("x", batch)], spec("y", batch))
        assert plan_requests(fixed, {"x": Array((batch * 1000,))}, 3, None).step == 3 * step


def test_large_rows_make_small_requests() -> None:
    wide = model([spec("x", "batch", 1)], spec("y", "batch", 1 << 20))
    assert plan_requests(wide, {"x": Array((1000, 1))}, 4, None).step == 12
    wider = model([spec("x", "batch", 1)], spec("y", "batch", 1 << 30))
    assert plan_requests(wider, {"x": Array((1000, 1))}, 4, None).step == 4


@pytest.mark.parametrize("output", [spec("y", "batch", "other"), spec("y", None, None)])
def test_output_of_unknown_shape_is_taken_to_be_as_the_inputs(output: TensorSpec) -> None:
    large = model([spec("x", "batch", 1 << 20)], output)
    assert plan_requests(large, {"x": Array((1000, 1 << 20))}, 2, None).step == 8


def test_small_batch_is_one_request() -> None:
    requests = plan_requests(ROWS, {"x": Array((5, 4))}, 2, None)
    assert spans(requests) == [(0, 5)]
    assert (requests.axes, requests.sizes) == ({"x": 0}, {"x": 1})


def test_inputs_without_the_batch_go_whole() -> None:
    two = model([spec("x", "seq", "batch"), spec("scale", 3)], spec("y", "seq", "batch"))
    requests = plan_requests(two, {"x": Array((5, 8)), "scale": Array((3,))}, 2, 4)
    assert (requests.axes, requests.sizes) == ({"x": 1, "scale": None}, {"x": 1})
    assert spans(requests) == [(0, 4), (4, 8)]
    assert requests.joins["y"].axis == 1


@pytest.mark.parametrize(("rows", "step"), [(1, 1), (4, 1), (9, 2), (100, 3), (None, 3)])
def test_fixed_batch_is_cut_at_multiples_of_it(rows: int | None, step: int) -> None:
    fixed = model([spec("x", 4, 2), spec("z", 8)], spec("y", 4, 2))
    requests = plan_requests(fixed, {"x": Array((12, 2)), "z": Array((24,))}, 2, rows)
    assert (requests.units, requests.unit_rows, requests.step) == (3, 4, step)
    assert requests.sizes == {"x": 4, "z": 8}
    assert requests.joins["y"].axis == 0


WHOLE = model([spec("x", "length", 4)], spec("y", "other"))


def test_batch_that_is_not_known_runs_whole() -> None:
    requests = plan_requests(WHOLE, {"x": Array((1_000_000, 4))}, 2, None)
    assert (requests.axes, requests.sizes, spans(requests)) == ({"x": None}, {}, [(0, 1)])


def test_batch_that_is_not_known_is_cut_where_that_is_said() -> None:
    requests = plan_requests(WHOLE, {"x": Array((5, 4))}, 1, 2, {"x": 0})
    assert (requests.axes, spans(requests)) == ({"x": 0}, [(0, 2), (2, 4), (4, 5)])


def test_batch_of_no_rows_is_one_request() -> None:
    requests = plan_requests(ROWS, {"x": Array((0, 4))}, 2, 3)
    assert spans(requests) == [(0, 0)]


TWO = model([spec("x", "batch", 4), spec("z", "batch")], spec("y", "batch"))
TABLE = model([spec("x", "batch", 4), spec("table", "size", 2)], spec("y", "batch"))


@pytest.mark.parametrize(
    ("taken", "arrays", "text"),
    [
        (ROWS, {}, r"inputs: missing \['x'\], expected \['x'\]"),
        (ROWS, {"x": Array((2, 4)), "q": Array(())}, r"inputs: unknown \['q'\], expected"),
        (ROWS, {"x": Array((2, 4), np.dtype(int))}, "'x' has dtype int64, expected float32"),
        (ROWS, {"x": Array((2, 4), np.dtype("V2"))}, r"'x' has dtype \|V2, expected float32"),
        (ROWS, {"x": Array((2, 5))}, "'x' has size 5 in dimension 1, expected 4"),
        (ROWS, {"x": Array((2,))}, "'x' has 1 dimensions"),
        (TWO, {"x": Array((7, 4)), "z": Array((6,))}, "'x' has 7 rows and 'z' has 6"),
        (TABLE, {"x": Array((7, 4)), "table": Array((7, 2))}, "it is not clear whether"),
        (model([spec("x", 4)], spec("y", 4)), {"x": Array((7,))}, "a multiple of .* batch of 4"),
        (model([spec("x", "batch")], spec("y")), {"x": Array((0,))}, "a batch of 0 rows"),
        (WHOLE, {"x": Array((7, 4))}, r"--batch: got 3, but no dimension of \['x'\] is known"),
    ],
    ids=[
        "missing",
        "unknown",
        "dtype",
        "raw",
        "size",
        "rank",
        "rows",
        "doubt",
        "not a multiple",
        "no rows",
        "nothing to cut",
    ],
)
def test_what_does_not_fit_is_told_as_predict_would(
    taken: ModelSpec, arrays: dict[str, Array], text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        plan_requests(taken, arrays, 2, 3)


def test_what_is_in_doubt_may_go_in_one_request_to_one_worker() -> None:
    arrays = {"x": Array((7, 4)), "table": Array((7, 2))}
    assert plan_requests(TABLE, arrays, 1, 7).axes == {"x": 0, "table": None}
