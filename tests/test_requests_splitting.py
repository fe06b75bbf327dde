"""Tests of mcinfer/requests/splitting.py: what a request shows of its split. A run is a function."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcinfer.errors import McinferError, PredictError, PredictTimeoutError, WorkerDiedError
from mcinfer.requests import splitting
from mcinfer.requests.splitting import _MAX_PAIRS, Batch, as_record, judge, of_record
from mcinfer.sharding import Axes
from mcinfer.specs import Dimension, ModelSpec
from tests.planned_requests import floats as spec_of
from tests.split_models import Model

Array = NDArray[Any]
Arrays = dict[str, Array]
Dimensions = tuple[Dimension, ...]
Function = Callable[..., Mapping[str, Array]]
Warned = Callable[[], list[str]]


def failing_above(
    rows: int, kind: type[McinferError] = PredictError
) -> Callable[[int, Batch], None]:
    """For `Model.before`: runs of more rows fail, as where one device has no memory for them."""

    def fail(_number: int, arrays: Batch) -> None:
        if len(arrays[0]) > rows:
            raise kind("no memory for so many rows")

    return fail


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Warned:
    """What was logged so far."""
    caplog.set_level(logging.WARNING, "mcinfer.master")
    return lambda: [record.getMessage() for record in caplog.records]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def scalar(value: float) -> Array:
    return np.array(value, np.float32)


DECLARED = spec_of({"x": ("batch", 3)}, {"y": ("batch", 3)})
FREE = spec_of({"x": (None, 3)}, {"y": (None, None)})


def double(x: Array) -> Arrays:
    return {"y": 2 * x}


def center(x: Array) -> Arrays:
    return {"y": x - x.mean(0)}


# Comparing an output of the whole batch with those of its pieces.


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.data(),
)
def test_any_array_is_put_together_from_its_parts_in_one_way(
    sizes: list[int], lengths: list[int], data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, len(sizes) - 1))
    sizes[axis] = sum(lengths)
    whole = random(*sizes)
    parts = np.split(whole, np.cumsum(lengths)[:-1], axis)
    joint = judge(whole, parts, lengths)
    assert (joint.kind, joint.axis, joint.size) == ("axis", axis, 1)
    assert judge(whole, [whole] * len(lengths), lengths).kind == "same"
    other = data.draw(st.integers(0, len(parts) - 1))
    parts[other] = parts[other] + 1
    assert judge(whole, parts, lengths).kind == "mixed"


# What the first request shows.


def test_declared_split_is_checked_by_the_first_request_and_costs_nothing_more() -> None:
    model = Model(DECLARED, double)
    assert (model.split.known, model.split.checked) == ("declared", False)
    assert not model.splitter.known.splits
    for rows, runs in ((5, 3), (4, 2), (1, 1), (8, 2)):
        model.runs = 0
        assert np.array_equal(model.ask(random(rows, 3))["y"], 2 * random(rows, 3))
        assert model.runs == runs
    split = model.split
    assert (split.known, split.checked, split.rows, split.difference) == ("declared", True, 5, 0.0)
    assert model.splitter.known.splits
    assert model.records == [as_record(split)]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(center, id="mean"),
        pytest.param(lambda x: {"y": x[::-1]}, id="reversed"),
        pytest.param(lambda x: {"y": x @ x.T}, id="paired"),
        pytest.param(lambda x: {"y": x.max(0)}, id="maximum"),
        pytest.param(lambda x: {"y": np.array(len(x))}, id="number of rows"),
        pytest.param(lambda x: {"y": 2 * x, "n": np.arange(len(x))}, id="places of rows"),
        pytest.param(lambda x: {"y": x[-1:]}, id="last row"),
        pytest.param(lambda x: {"y": np.cumsum(x, 0)}, id="sum so far"),
        pytest.param(lambda x: {"y": 2 * x, "m": x.mean(0, keepdims=True)}, id="mean beside"),
    ],
)
@pytest.mark.parametrize("symbol", ["batch", None], ids=["declared", "free"])
def test_rows_that_depend_on_each_other_run_whole(
    warnings: Warned, function: Function, symbol: Dimension
) -> None:
    names = [*function(random(2, 3))]
    model = Model(spec_of({"x": (symbol, 3)}, dict.fromkeys(names, (symbol,))), function)
    for seed in range(3):
        x = random(4, 3, seed=seed)
        answer = model.ask(x)
        assert all(np.array_equal(answer[name], function(x)[name]) for name in names)
    assert model.runs == 4 + 2  # whole, two pieces, whole again to see that it is not random
    assert not model.split.splits
    assert model.splitter.known.settled
    assert model.split.checked
    assert model.split.inputs == {"x": None}
    assert len(warnings()) == 1
    assert "requests run whole, on one worker" in warnings()[0]
    assert f"output {names[-1]!r}" in warnings()[0]
    assert model.records == [as_record(model.split)]


def test_pieces_that_cannot_be_run_refute_a_hypothesis() -> None:
    """A table is as long as the batch by chance."""
    spec = spec_of({"x": (None, 4), "table": (None, 4)}, {"y": (None, None)})

    def look_up(x: Array, table: Array) -> Arrays:
        if table.shape != (4, 4):
            raise PredictError("the table has four rows")
        return {"y": x @ table}

    model = Model(spec, look_up)
    model.ask(random(4, 4), random(4, 4, seed=1))
    assert model.split.inputs == {"x": 0, "table": None}


# Requests that show nothing.


@pytest.mark.parametrize("function", [double, center], ids=["independent", "mixing"])
def test_equal_rows_decide_nothing(warnings: Warned, function: Function) -> None:
    model = Model(DECLARED, function)
    for _ in range(2):
        model.ask(np.ones((4, 3), np.float32))
    model.ask(np.tile(random(2, 3), (2, 1)))  # both pieces are equal
    assert model.runs == 3
    assert not model.splitter.known.settled
    assert not model.records
    assert len(warnings()) == 1
    assert "its rows are equal" in warnings()[0]
    model.ask(random(4, 3))
    assert model.split.splits == (function is double)
    # What is decided is said all the same.
    assert len(warnings()) == 1 + (function is center)


def masked(x: Array, mask: Array) -> Arrays:
    """It takes a mask for all rows as well as one for each."""
    return {"y": x * mask[: len(x)]}


MASKED = spec_of({"x": (None, 3), "mask": (None, 3)}, {"y": (None, 3)})


def test_input_of_equal_rows_that_may_be_cut_or_not_decides_nothing(warnings: Warned) -> None:
    model = Model(MASKED, masked)
    x, mask = random(4, 3), np.ones((4, 3), np.float32)
    model.ask(x, mask)
    assert not model.splitter.known.settled
    assert "the rows of input 'mask' are equal" in warnings()[0]
    model.ask(x, random(4, 3, seed=1))
    assert model.split.inputs == {"x": 0, "mask": 0}


def test_output_without_elements_decides_nothing_until_one_has_some(warnings: Warned) -> None:
    model = Model(FREE, lambda x: {"y": x[x[:, 0] > 0]})
    model.ask(-np.abs(random(4, 3)))
    assert not model.splitter.known.settled
    assert "output 'y' is empty" in warnings()[0]
    model.ask(np.abs(random(4, 3)))
    assert model.split.outputs == {"y": 0}
    x = random(5, 3, seed=3)
    assert np.array_equal(model.ask(x)["y"], x[x[:, 0] > 0])


# What the user says.


@pytest.mark.parametrize(
    ("said", "text"),
    [(1, "joins along axis 0, output_axes says 1"), (None, "along axis 0, output_axes says None")],
)
def test_output_axis_that_is_said_wrong_is_found_out(
    warnings: Warned, said: int | None, text: str
) -> None:
    model = Model(DECLARED, double, None, {"y": said})
    for _ in range(2):
        assert np.array_equal(model.ask(random(4, 3))["y"], 2 * random(4, 3))
    assert not model.split.splits
    assert len(warnings()) == 1
    assert text in warnings()[0]


def test_said_axis_counts_for_an_output_without_elements() -> None:
    for said in (0, None):
        spec = spec_of({"x": (None, 3)}, {"y": (None, 3), "found": (None,)})
        model = Model(
            spec, lambda x: {"y": 2 * x, "found": np.zeros(0)}, {"x": 0}, {"y": 0, "found": said}
        )
        model.ask(random(4, 3))
        assert model.split.outputs == {"y": 0, "found": said}
        assert model.split.known == "said"


def test_everything_said_to_go_whole_needs_no_request_and_no_warning(warnings: Warned) -> None:
    model = Model(DECLARED, double, {"x": None})
    assert model.splitter.known.settled
    model.splitter.warn_if_whole()
    model.ask(random(4, 3))
    assert model.runs == 1
    assert model.splitter.relearn(0, [random(4, 3)], 2, model.run_all, 0.0) == model.split
    assert model.runs == 1
    assert not warnings()


# What is believed.


def test_never_runs_whole_what_nothing_is_known_of_and_says_why_once(warnings: Warned) -> None:
    model = Model(FREE, double, verify="never")
    for _ in range(3):
        model.splitter.warn_if_whole()
        model.ask(random(4, 3))
    assert model.runs == 3
    assert len(warnings()) == 1
    assert "no dimension of the inputs is known to be the batch" in warnings()[0]
    assert "not known yet" in str(model.split)


# Random models.


def noisy(rng: np.random.Generator) -> Function:
    return lambda x: {"y": x + rng.standard_normal(x.shape)}


@pytest.mark.parametrize("said", [None, {"x": 0}])
def test_random_model_is_split_only_where_the_user_says_so(
    warnings: Warned, said: Axes | None
) -> None:
    model = Model(DECLARED, noisy(np.random.default_rng(0)), said)
    for _ in range(3):
        model.ask(random(4, 3))
    assert model.splitter.known.splits is (said is not None)
    assert model.splitter.known.settled
    assert not model.split.checked
    assert model.runs == (1 + 2 + 1) + 2 * (2 if said else 1)
    assert not model.records
    assert len(warnings()) == 1
    assert ("without a check" if said else "two runs of the same inputs differ") in warnings()[0]


@pytest.mark.parametrize("said", [None, {"x": 0}])
def test_what_speaks_against_a_split_counts_unless_the_user_says_what_to_split(
    warnings: Warned, said: Axes | None
) -> None:
    recorded = Model(DECLARED, double)
    recorded.ask(random(4, 3))
    model = Model(DECLARED, double, said, whole="node 'n' is random", recorded=recorded.records[0])
    for _ in range(2):
        model.ask(random(4, 3))
        model.splitter.warn_if_whole()
    assert model.splitter.known.splits is (said is not None)
    assert model.runs == (4 if said else 2)
    assert len(warnings()) == 1
    assert "node 'n' is random" in warnings()[0]


# Runs that fail.


def test_declared_split_answers_where_the_whole_run_fails(warnings: Warned) -> None:
    model = Model(DECLARED, double)
    model.before = failing_above(2)
    for _ in range(2):
        assert np.array_equal(model.ask(random(4, 3))["y"], 2 * random(4, 3))
    assert model.runs == (1 + 2) + 2
    assert model.splitter.known.splits
    assert not model.split.checked
    assert not model.records
    assert len(warnings()) == 1
    assert "without a check" in warnings()[0]
    assert "no memory for so many rows" in warnings()[0]


def test_whole_run_that_fails_is_the_callers_error_where_nothing_says_how_to_split() -> None:
    model = Model(FREE, double)
    model.before = failing_above(2)
    with pytest.raises(PredictError, match="no memory"):
        model.ask(random(4, 3))
    assert model.runs == 1
    assert not model.splitter.known.settled
    assert not model.splitter.busy


@pytest.mark.parametrize("number", [2, 3])
def test_worker_that_dies_in_the_check_costs_the_check_and_not_the_request(
    warnings: Warned, number: int
) -> None:
    model = Model(DECLARED, double)

    def die(run: int, _: Batch) -> None:
        if run == number:
            raise WorkerDiedError("worker 1 was killed")

    model.before = die
    assert np.array_equal(model.ask(random(4, 3))["y"], 2 * random(4, 3))
    assert not model.splitter.known.settled
    assert not warnings()
    model.ask(random(4, 3))
    assert model.splitter.known.splits


# One learns at a time.


def test_others_run_whole_while_one_learns() -> None:
    model = Model(DECLARED, double)
    other = random(6, 3, seed=1)

    def meanwhile(run: int, _: Batch) -> None:
        if run == 2:
            assert model.splitter.busy
            assert np.array_equal(model.ask(other)["y"], 2 * other)
            assert model.runs == 3
            with pytest.raises(PredictTimeoutError, match="others were learning"):
                model.splitter.relearn(0, [other], 2, model.run_all, 0.0)
            assert model.runs == 3

    model.before = meanwhile
    model.ask(random(4, 3))
    assert not model.splitter.busy
    assert model.split.rows == 4


# What is forgotten.


def test_split_that_a_request_contradicts_is_withdrawn(warnings: Warned) -> None:
    model = Model(DECLARED, double)
    model.ask(random(4, 3))
    for _ in range(2):
        model.splitter.withdraw("output 'y' joins along axis 0, and did not")
    assert not model.splitter.known.splits
    assert model.splitter.known.settled
    assert not model.split.checked
    assert model.split.reason == "output 'y' joins along axis 0, and did not"
    assert model.records[1:] == [None]
    assert len(warnings()) == 1
    assert "and did not" in warnings()[0]
    model.runs = 0
    model.ask(random(4, 3))
    assert model.runs == 1


def test_example_that_fails_changes_nothing() -> None:
    model = Model(DECLARED, double)
    model.ask(random(4, 3))
    before = model.splitter.known
    model.before = failing_above(0)
    with pytest.raises(PredictError):
        model.splitter.relearn(0, [random(4, 3)], 2, model.run_all, 1.0)
    assert model.splitter.known is before
    assert not model.splitter.busy


# Axes of one size, which may be shared by all rows or be spread over them.


def scaled(x: Array, scale: Array) -> Arrays:
    """With one scale for all, or one for each row."""
    return {"y": x * scale[:, None]}


SCALED = spec_of({"x": ("batch", 3), "scale": ("scales",)}, {"y": ("batch", 3)})


def test_axis_of_one_size_is_looked_at_again_when_it_has_more() -> None:
    model = Model(SCALED, scaled)
    x = random(4, 3)
    for runs in (3, 2):
        model.runs = 0
        assert np.array_equal(model.ask(x, random(1))["y"], scaled(x, random(1))["y"])
        assert model.runs == runs
    assert model.split.inputs == {"x": 0, "scale": None}
    assert model.splitter.known.open
    assert not model.splitter.teaches(model.splitter.known, ((6, 3), (1,)))
    assert model.splitter.teaches(model.splitter.known, ((6, 3), (6,)))
    assert np.array_equal(model.ask(x, random(4))["y"], scaled(x, random(4))["y"])
    assert model.split.inputs == {"x": 0, "scale": 0}


def decoder(tokens: Array, past: Array) -> Arrays:
    """Of each row, its tokens and what came before: first many tokens and no past, then one with a past."""
    return {"y": tokens.sum(1, keepdims=True) + past.sum(1, keepdims=True)}


def test_axes_that_are_narrow_in_turn_are_learned_once_each() -> None:
    spec = spec_of({"tokens": ("batch", None), "past": ("batch", None)}, {"y": ("batch", 1)})
    model = Model(spec, decoder)
    for number in range(20):
        prefill = random(4, 5, seed=number), random(4, 0)
        decode = random(4, 1, seed=number), random(4, 5 + number, seed=number)
        for inputs in (prefill, decode):
            assert np.allclose(model.ask(*inputs)["y"], decoder(*inputs)["y"])
    assert model.runs == (3 + 3) + 38 * 2
    assert len(model.records) == 2
    assert not model.split.narrow


def test_requests_that_keep_showing_other_axes_run_whole(warnings: Warned) -> None:
    def either(x: Array, c: Array) -> Arrays:
        along = x if c.shape[0] == 1 else np.swapaxes(x, 0, 1)
        return {"y": along.sum(1, keepdims=True)}

    spec = spec_of({"x": (None, None), "c": (None, None)}, {"y": (None, 1)})
    model = Model(spec, either)
    for number in range(20):
        x = random(4, 6, seed=number)
        for c in (random(1, 7), random(7, 1)):
            assert np.allclose(model.ask(x, c)["y"], either(x, c)["y"])
    assert not model.split.splits
    assert model.runs < 70
    assert len(warnings()) == 1
    assert "requests of different shapes show different axes" in warnings()[0]


# More rows than the split was learned from.


def neighbours(x: Array) -> Arrays:
    """Each row with the fourth before it."""
    return {"y": x + np.concatenate([np.zeros_like(x[:4]), x])[: len(x)]}


def test_rows_that_are_further_apart_than_the_first_request_was_long_are_found_to_depend() -> None:
    model = Model(DECLARED, neighbours)
    model.ask(random(4, 3))
    assert model.split.splits
    for rows in (15, 16, 64):
        x = random(rows, 3, seed=rows)
        assert np.array_equal(model.ask(x)["y"], neighbours(x)["y"]) is (rows != 15)
    assert not model.split.splits
    assert [record is not None and record["rows"] for record in model.records] == [4, 16]


def test_split_is_checked_again_with_each_fourfold_number_of_rows() -> None:
    model = Model(DECLARED, double)
    for rows, runs in ((2, 3), (7, 2), (8, 3), (31, 2), (31, 2), (40, 3), (159, 2), (160, 3)):
        model.runs = 0
        assert np.array_equal(model.ask(random(rows, 3))["y"], 2 * random(rows, 3))
        assert model.runs == runs, rows
    assert [record is not None and record["rows"] for record in model.records] == [2, 8, 40, 160]
    recorded = Model(DECLARED, double, recorded=model.records[0])
    recorded.ask(random(8, 3))
    assert recorded.runs == 3


def test_more_rows_that_show_nothing_are_compared_a_few_times_only(warnings: Warned) -> None:
    model = Model(DECLARED, double)
    model.ask(random(2, 3))
    for _ in range(20):
        model.ask(np.ones((8, 3), np.float32))
    assert model.runs == 3 + 8 * 1 + 12 * 2
    assert model.splitter.known.splits
    assert not warnings()


# Values that show nothing.


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.0])
def test_outputs_that_do_not_differ_from_row_to_row_decide_nothing(value: float) -> None:
    """So the rows, which do depend on each other, are found to at the first request that shows it."""
    model = Model(
        DECLARED, lambda x: {"y": np.full_like(x, value) if x.max() < 9 else x - x.mean(0)}
    )
    for _ in range(3):
        model.ask(random(4, 3))
    assert not model.splitter.known.settled
    x = 100 * random(4, 3)
    assert np.array_equal(model.ask(x)["y"], x - x.mean(0))
    assert not model.split.splits
    assert model.splitter.known.settled


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_equal_rows_with_nan_decide_nothing(value: float) -> None:
    model = Model(DECLARED, center)
    x = np.repeat(np.array([[1, value, 3]], np.float32), 4, 0)
    with np.errstate(invalid="ignore"):
        model.ask(x)
    assert not model.splitter.known.settled
    model.ask(random(4, 3))
    assert not model.split.splits


def test_outputs_with_some_nan_decide_by_their_numbers() -> None:
    def masked(x: Array) -> Arrays:
        return {"y": np.where(x > 0, x, np.nan)}

    model = Model(DECLARED, masked)
    model.ask(random(4, 3))
    assert model.split.splits
    x = random(6, 3, seed=1)
    assert np.array_equal(model.ask(x)["y"], masked(x)["y"], equal_nan=True)


@pytest.mark.parametrize(("size", "decides"), [("batch", True), (None, False)])
def test_equal_rows_are_enough_where_a_symbol_declares_them(size: Dimension, decides: bool) -> None:
    spec = spec_of({"x": ("batch", 3)}, {"y": ("batch", 3), "count": (size, 1)})
    model = Model(spec, lambda x: {"y": 2 * x, "count": np.full((len(x), 1), 3)})
    model.ask(random(4, 3))
    assert model.splitter.known.settled is decides


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.object_])
def test_outputs_of_any_type_decide_where_their_rows_differ(dtype: type) -> None:
    def labels(x: Array) -> Arrays:
        return {"y": np.where(x > 0, "a", "b").astype(object) if dtype is np.object_ else x > 0}

    model = Model(DECLARED, lambda x: {"y": labels(x)["y"].astype(dtype)})
    model.ask(np.ones((4, 3), np.float32) * np.arange(1, 5, dtype=np.float32)[:, None])
    assert not model.splitter.known.settled
    model.ask(random(4, 3))
    assert model.split.splits


# New weights.


class Reweighed(Model):
    """Rows, and as much of their mean as the weights say."""

    def __init__(self, alpha: float, **options: Any) -> None:
        self.alpha = alpha
        super().__init__(DECLARED, lambda x: {"y": x - self.alpha * x.mean(0)}, **options)


def test_new_weights_have_the_split_checked_again_and_nothing_is_recorded() -> None:
    model = Reweighed(0)
    model.ask(random(4, 3))
    assert model.split.splits
    model.alpha = 1
    for _ in range(2):
        x = random(4, 3, seed=1)
        assert np.array_equal(model.ask(x, rechecks=1)["y"], x - x.mean(0))
    assert not model.split.splits
    model.alpha = 0
    model.ask(random(4, 3), rechecks=2)
    assert model.split.splits
    assert [record is not None and record["reason"] for record in model.records] == [""]


def test_record_of_a_model_is_not_believed_for_other_weights() -> None:
    first = Reweighed(0)
    first.ask(random(4, 3))
    second = Reweighed(1, recorded=first.records[0])
    x = random(4, 3, seed=1)
    assert np.array_equal(second.ask(x, rechecks=1)["y"], x - x.mean(0))
    assert not second.records


def test_check_that_an_update_overtakes_says_nothing_of_the_new_weights() -> None:
    model = Reweighed(0)

    def update(number: int, _: Batch) -> None:
        if number == 2:
            model.splitter.known_for(1)  # as a request with the new weights does

    model.before = update
    model.ask(random(4, 3))
    assert not model.splitter.known.settled
    assert model.splitter.known.rechecks == 1
    assert not model.records
    # A request from before the update runs whole, and shows nothing.
    model.runs = 0
    model.ask(random(4, 3), rechecks=0)
    assert model.runs == 1
    assert not model.splitter.known.settled


def test_more_rows_refute_a_split_also_where_an_input_has_one_row_and_nothing_is_declared() -> None:
    def shifted(x: Array, s: Array) -> Mapping[str, Array]:
        return {"y": x + np.concatenate([np.zeros_like(x[:4]), x[:-4]])[: len(x)] + s}

    free = (None, 3)
    model = Model(spec_of({"x": free, "s": free}, {"y": free}), shifted)
    model.ask(random(4, 3), np.ones((1, 3), np.float32))
    assert model.splitter.known.splits
    model.ask(random(16, 3), np.ones((1, 3), np.float32))
    assert not model.splitter.known.splits


def test_output_that_is_the_same_for_all_does_not_decide() -> None:
    def late(x: Array) -> Mapping[str, Array]:
        return {"y": np.maximum(np.cumsum(x, 0) - 100, 0), "c": np.ones(2, np.float32)}

    model = Model(spec_of({"x": ("batch", 3)}, {"y": ("batch", 3), "c": (2,)}), late)
    for axes in ({}, {"y": 0, "c": None}):
        model = Model(model.spec, late, outputs=axes)
        model.ask(random(4, 3))
        assert not model.splitter.known.settled
        assert not model.records


def test_split_that_was_withdrawn_while_it_was_checked_again_stays_so() -> None:
    model = Model(DECLARED, double)
    model.ask(random(4, 3))

    def withdraw(number: int, _: Batch) -> None:
        if number == model.runs == 5:  # the pieces of a request with more rows
            model.splitter.withdraw("a piece failed")

    model.before = withdraw
    model.ask(random(16, 3))
    assert model.runs > 5
    assert not model.splitter.known.splits
    assert not model.splitter.known_for(1).splits
    assert model.records[-1] is None


def test_split_that_is_withdrawn_after_an_update_is_not_recorded_any_more() -> None:
    model = Model(DECLARED, double)
    model.ask(random(4, 3))
    model.ask(random(4, 3), rechecks=1)
    model.splitter.withdraw("a request from before the update shows it")
    assert model.records[-1] is None
    known = model.splitter.known_for(2)  # and stays so with the next weights
    assert (known.settled, known.splits) == (True, False)


@pytest.mark.parametrize("kind", [PredictTimeoutError, PredictError, WorkerDiedError])
def test_larger_whole_run_that_fails_is_split(kind: type[McinferError]) -> None:
    model = Model(DECLARED, double)
    model.ask(random(4, 3))
    model.before = failing_above(10, kind)
    x = random(20, 3)
    for runs in (3, 2):
        before = model.runs
        assert np.array_equal(model.ask(x)["y"], double(x)["y"])
        assert model.runs - before == runs
    assert model.splitter.known.most_rows == 79
    assert model.split.rows == 4  # that was shown


def test_checks_that_show_nothing_are_put_off_and_not_given_up() -> None:
    model = Model(DECLARED, neighbours)
    model.ask(random(4, 3))
    for _ in range(8):
        assert model.splitter.known.most_rows == 15
        model.ask(np.ones((16, 3), np.float32))
    assert model.splitter.known.most_rows == 63
    model.ask(random(64, 3))
    assert not model.splitter.known.splits


# Requests that may be joined to one run.


MOST = 64
"""Rows of a joined run."""


def offer(model: Model, *arrays: Array) -> bool:
    """A request; whether it was compared, with those before it, with a run of all."""
    known = model.splitter.known
    offered = model.splitter.offer(known, 0, arrays, MOST)
    if offered is None:
        return False
    model.splitter.learn_from_offers(known, offered, model.run_all)
    return True


@pytest.mark.parametrize(("spec", "known"), [(DECLARED, "declared"), (FREE, "learned")])
def test_two_requests_of_one_row_show_that_they_may_be_joined(spec: ModelSpec, known: str) -> None:
    model = Model(spec, double)
    assert not offer(model, random(1, 3))
    assert offer(model, random(1, 3, seed=1))
    assert model.runs == 3
    assert model.splitter.known.splits
    assert (model.split.known, model.split.rows) == (known, 2)
    assert not offer(model, random(1, 3, seed=2))
    assert len(model.records) == 1


@pytest.mark.parametrize(
    "function",
    [center, lambda x: {"y": np.cumsum(x, 0)}, lambda x: {"y": x + len(x)}],
    ids=["mean", "cumsum", "number of rows"],
)
def test_requests_whose_rows_meet_are_not_joined(warnings: Warned, function: Function) -> None:
    model = Model(DECLARED, function)
    offer(model, random(1, 3))
    offer(model, random(1, 3, seed=1))
    assert not model.split.splits
    assert model.splitter.known.settled
    assert len(warnings()) == 1


@pytest.mark.parametrize("kind", [PredictError, PredictTimeoutError, WorkerDiedError])
def test_requests_that_fail_by_themselves_show_nothing(kind: type[McinferError]) -> None:
    def fail(_number: int, _arrays: Batch) -> None:
        raise kind("it failed")

    model = Model(DECLARED, double)
    model.before = fail
    offer(model, random(1, 3))
    assert offer(model, random(1, 3, seed=1))
    assert not model.splitter.known.settled
    assert not model.splitter.busy


def test_joining_is_checked_again_with_more_rows_than_two_requests_had() -> None:
    model = Model(DECLARED, neighbours)
    offered = [offer(model, random(1, 3, seed=number)) for number in range(2 + 8)]
    assert [number for number, compared in enumerate(offered) if compared] == [1, 9]
    assert not model.split.splits
    assert "depend on each other" in model.split.reason


def test_requests_of_other_weights_or_sizes_are_not_compared_with_each_other() -> None:
    model = Model(spec_of({"x": ("batch", None)}, {"y": ("batch", None)}), double)
    known = model.splitter.known
    assert model.splitter.offer(known, 1, [random(1, 3)], MOST) is None
    assert model.splitter.offer(known, 2, [random(1, 3, seed=1)], MOST) is None
    assert model.splitter.offer(known, 2, [random(1, 3, seed=2)], MOST) is not None
    offer(model, random(1, 3))
    offer(model, random(1, 3, seed=1))
    for size in (3, 4):
        compared = [offer(model, random(1, size, seed=number)) for number in range(7)]
        assert not any(compared)
    assert offer(model, random(1, 4))


def test_joining_is_given_up_after_some_trials_and_says_why(warnings: Warned) -> None:
    spec = spec_of({"x": ("batch", 3), "scale": ()}, {"y": ("batch", 3)})
    model = Model(spec, lambda x, scale: {"y": x * scale})
    trials = 0
    for number in range(4 * _MAX_PAIRS):
        trials += offer(model, random(1, 3, seed=number), scalar(number))
    assert trials == _MAX_PAIRS
    assert len(warnings()) == 1
    assert "requests are not joined" in warnings()[0]
    assert "input 'scale' differs between two requests" in warnings()[0]
    assert model.splitter.known.most_joined == np.inf
    # A request that is split may still show it.
    model.ask(random(4, 3), scalar(2))
    assert model.splitter.known.splits


def test_offer_while_another_is_copied_does_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(DECLARED, double)
    known, copy = model.splitter.known, np.array
    first, second, third = (random(1, 3, seed=seed) for seed in range(3))
    others = []

    def array(source: Array) -> Array:
        monkeypatch.setattr(np, "array", copy)
        others.append(model.splitter.offer(known, 0, [third], MOST))
        return copy(source)

    assert model.splitter.offer(known, 0, [first], MOST) is None
    monkeypatch.setattr(np, "array", array)
    model.splitter.offer(known, 0, [second], MOST)
    (other,) = others
    assert other is not None
    assert [len(one[0]) for one in other] == [1, 1]


def test_one_request_is_not_compared_with_itself_nor_more_than_a_joined_run_has() -> None:
    model = Model(DECLARED, double)
    model.ask(random(4, 3))
    for number in range(10):
        assert not offer(model, random(33, 3, seed=number))
    assert model.splitter.known.most_joined == 15
    assert offer(model, random(8, 3))
    assert model.split.rows == 33 + 8


def test_kept_requests_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "_MAX_OFFERED_BYTES", 100)
    model = Model(DECLARED, double)
    model.ask(random(4, 3))
    for number in range(40):
        assert not offer(model, random(1, 3, seed=number))
    assert len(model.splitter._offered[1]) == 8  # of 12 bytes
    assert not offer(model, random(8, 3))
    assert offer(model, random(8, 3, seed=1))  # two are kept, whatever they have


def test_joined_run_that_fails_leaves_what_fewer_rows_have_shown() -> None:
    model = Model(DECLARED, double)
    model.ask(random(4, 3))
    model.before = failing_above(8)
    for number in range(64):
        offer(model, random(8, 3, seed=number))
    assert model.splitter.known.splits
    assert model.splitter.known.most_joined == 63  # it was put off


# Records.


def test_what_was_learned_is_found_again() -> None:
    first = Model(FREE, double)
    first.ask(random(4, 3))
    (record,) = first.records
    second = Model(FREE, double, recorded=json.loads(json.dumps(record)))
    assert second.splitter.known.splits
    assert second.split == replace(first.split, known="recorded")
    assert second.split.sizes == first.split.sizes
    second.ask(random(4, 3))
    assert second.runs == 2


RECORD: dict[str, Any] = {
    "inputs": {"x": 0},
    "outputs": {"y": 0},
    "rows": 4,
    "difference": 0.0,
    "reason": "",
    "sizes": {"y": 1},
    "narrow": [],
    "ranks": {"y": 2},
}


@pytest.mark.parametrize(
    "damage",
    [
        {"inputs": {"z": 0}},
        {"inputs": {"x": 2}},
        {"inputs": {"x": True}},
        {"outputs": {"y": -1}},
        {"outputs": {"y": "no axis"}},
        {"rows": float("nan")},
        {"difference": 10**400},
        {"sizes": {"y": 0}},
        {"narrow": [["z", 1, 1]]},
        {"narrow": [["x", -1, 1]]},
        {"ranks": {"y": 10**12}},
    ],
    ids=str,
)
def test_record_that_is_damaged_is_none(damage: dict[str, Any]) -> None:
    assert of_record(RECORD, DECLARED) is not None
    assert of_record({**RECORD, **damage}, DECLARED) is None
    model = Model(DECLARED, double, recorded={**RECORD, **damage})
    assert model.split.known == "declared"


texts = st.text(max_size=5)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from([*RECORD]), anything))
def test_any_content_is_a_record_that_can_be_used_or_none(damage: dict[str, Any]) -> None:
    model = Model(DECLARED, double, recorded={**RECORD, **damage})
    model.splitter.warn_if_whole()
    assert str(model.split)
    for rows in (1, 4):
        x = random(rows, 3)
        try:
            assert np.array_equal(model.ask(x)["y"], double(x)["y"])
        except PredictError:  # it says that y joins in another way
            assert model.split.outputs != {"y": 0}
