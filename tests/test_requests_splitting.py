"""Tests of mcinfer/requests/splitting.py: what a request shows of its split. A run is a function."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcinfer.errors import (
    ClosedError,
    InvalidInputError,
    McinferError,
    PredictError,
    WorkerDiedError,
)
from mcinfer.model_cache.split_records import as_record, of_record
from mcinfer.requests import splitting
from mcinfer.requests.comparing import Batch, judge, made_rows
from mcinfer.requests.learning import Learner
from mcinfer.requests.planner import Planner
from mcinfer.requests.splitting import Splitter
from mcinfer.requests.waiting_threads import WaitingThreads
from mcinfer.sharding import Axes, SaidAxes
from mcinfer.specs import Dimension
from tests.interrupts import interrupted_anywhere
from tests.planned_requests import A_POOL
from tests.planned_requests import floats as spec_of
from tests.split_models import Model

Array = NDArray[Any]
Arrays = dict[str, Array]
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
    assert not model.splitter.state.splits
    for rows, runs in ((5, 4), (4, 2), (1, 1), (8, 2)):
        model.runs = 0
        assert np.array_equal(model.ask(random(rows, 3))["y"], 2 * random(rows, 3))
        assert model.runs == runs
    split = model.split
    assert (split.known, split.checked, split.rows, split.difference) == ("declared", True, 5, 0.0)
    assert model.splitter.state.splits
    assert model.records == [split]


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
    assert model.runs == 4 + 2  # whole and three pieces, then whole
    assert not model.split.splits
    assert model.split.settled
    assert model.split.checked
    assert model.split.inputs == {"x": None}
    assert len(warnings()) == 1
    assert "requests run whole, on one worker" in warnings()[0]
    assert f"output {names[-1]!r}" in warnings()[0]
    assert model.records == [model.split]


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


# Requests that show nothing by themselves.


@pytest.mark.parametrize("function", [double, center], ids=["independent", "mixing"])
@pytest.mark.parametrize(
    "x",
    [
        random(1, 3),
        np.ones((4, 3), np.float32),
        np.zeros((1, 3), np.float32),
        np.tile(random(1, 3), (4, 1)),
        np.full((2, 3), np.nan, np.float32),
    ],
    ids=["one row", "ones", "one row of zeros", "equal rows", "no number"],
)
def test_rows_that_show_nothing_are_replaced_by_rows_made_of_them(
    function: Function, x: Array
) -> None:
    for spec in (DECLARED, FREE):
        model = Model(spec, function)
        assert np.array_equal(model.ask(x)["y"], function(x)["y"], equal_nan=True)
        assert model.split.checked
        assert model.split.splits == (function is double)
        assert model.split.rows == 4


def test_integers_and_booleans_are_moved_among_the_values_seen() -> None:
    axes = [0, 0, None]
    given = [np.array([[3, 5, 9]]), np.array([[True, False, True]]), np.array([7])]
    ids, mask, same = made_rows(given, axes, 4)
    assert (ids.shape, mask.shape) == ((4, 3), (4, 3))
    assert {*ids.flat} <= {3, 5, 9}
    assert mask.dtype == bool
    assert len({tuple(row) for row in ids.tolist()}) > 1
    assert same is given[2]


def test_texts_and_bytes_of_one_input_are_moved_among_each_other() -> None:
    (rows,) = made_rows([np.array([["a", b"b", "c"]], object)], [0], 4)
    assert rows.shape == (4, 3)
    assert {*rows.flat} <= {"a", b"b", "c"}
    assert len({tuple(row) for row in rows.tolist()}) > 1


@pytest.mark.filterwarnings("error")
def test_rows_are_made_of_huge_values_and_of_none_without_a_word_of_numpy() -> None:
    for array in (np.full((3, 2), 1e308), np.array([[1e308, -1e308]]), np.zeros((1, 0))):
        (rows,) = made_rows([array], [0], 4)
        assert (rows.shape, rows.dtype) == ((4, array.shape[1]), array.dtype)


def test_request_that_shows_nothing_in_three_tries_has_all_run_whole(warnings: Warned) -> None:
    def constant(x: Array) -> Arrays:
        return {"y": np.ones_like(x)}

    model = Model(DECLARED, constant)
    for left in (2, 1, 0):
        assert not model.split.settled
        model.ask(random(4, 3))
        assert model.split.settled == (left == 0)
    model.runs = 0
    model.ask(random(4, 3))
    assert (model.runs, model.split.splits) == (1, False)
    (said,) = warnings()
    assert "output 'y' are equal" in said
    assert "batch_axes" in said
    assert "learn(example)" in said
    # An example is looked at all the same.
    model = Model(DECLARED, double)
    model.splitter.learn([random(4, 3)], model.run, model.splitter)
    assert model.split.splits


def test_rows_that_cannot_be_made_leave_the_next_request_to_show_it() -> None:
    def picky(x: Array) -> Arrays:
        if len(x) > 1 and x.std() < 100:
            raise PredictError("these are no rows of mine")
        return {"y": 2 * x}

    model = Model(DECLARED, picky)
    model.ask(random(1, 3))
    assert not model.split.settled
    model.ask(1000 * np.ones((1, 3), np.float32))
    assert model.split.splits


def test_output_of_equal_rows_joins_where_a_symbol_declares_it() -> None:
    for size, decides in (("batch", True), (None, False)):
        spec = spec_of({"x": ("batch", 3)}, {"y": ("batch", 3), "count": (size, 1)})
        model = Model(spec, lambda x: {"y": 2 * x, "count": np.full((len(x), 1), 3)})
        model.ask(random(4, 3))
        assert model.split.settled is decides


def test_single_row_that_loses_the_batch_has_all_run_whole() -> None:
    model = Model(spec_of({"x": ("n", "a")}, {"y": ()}), lambda x: {"y": np.squeeze(x)})
    for rows in (12, 3, 5):
        x = random(rows, 17)
        assert np.array_equal(model.ask(x, pieces=3)["y"], x)
    assert not model.split.splits


# Inputs whose sizes are the same by chance.


def ragged(tokens: Array, lengths: Array) -> Arrays:
    """The sum of each row's tokens, which lie one after another."""
    ends = np.cumsum(lengths)
    sums = np.concatenate([[0], np.cumsum(tokens)])
    return {
        "y": sums[np.minimum(ends, len(tokens))] - sums[np.minimum(ends - lengths, len(tokens))]
    }


LENGTHS = ([1] * 16, [2] * 8 + [0] * 8, [3, 1], [1] * 20, [2, 2, 0, 0], [3, 0, 0, 0, 0, 0], [3, 0])


@pytest.mark.parametrize("names", [("n", "b"), ("n", None), (None, None)], ids=str)
@pytest.mark.parametrize("first", range(len(LENGTHS)))
def test_inputs_that_have_one_size_by_chance_are_not_cut_together(
    names: tuple[Dimension, Dimension], first: int
) -> None:
    model = Model(spec_of({"tokens": (names[0],), "lengths": (names[1],)}, {"y": (None,)}), ragged)
    for sizes in (*LENGTHS[first:], *LENGTHS):
        lengths = np.array(sizes)
        tokens = random(int(lengths.sum()))
        assert np.allclose(model.ask(tokens, lengths)["y"], ragged(tokens, lengths)["y"])
    assert not model.split.splits


@pytest.mark.parametrize(("dtype", "requests"), [(np.float32, 1), (np.int64, 3)])
def test_inputs_without_symbols_are_cut_together_when_another_size_agrees(
    dtype: type, requests: int
) -> None:
    """Made rows are enough of numbers to compute with; whole numbers may be lengths or places."""
    free = (None, 3)
    model = Model(spec_of({"x": free, "z": free}, {"y": free}), lambda x, z: {"y": x + z})
    for number, rows in enumerate((4, 4, 5)):
        z: Array = (9 * random(rows, 3, seed=1)).astype(dtype)
        model.ask(random(rows, 3), z)
        assert model.split.settled is (number + 1 >= requests)
    assert model.split.inputs == {"x": 0, "z": 0}
    declared = spec_of({"x": ("n", 3), "z": ("n", 3)}, {"y": free})
    model = Model(declared, lambda x, z: {"y": x + z})
    model.ask(random(4, 3), random(4, 3, seed=1))
    assert model.split.inputs == {"x": 0, "z": 0}


@pytest.mark.parametrize("first", [[1, 2, 3, 4], [4, 3, 2, 1], [1, 2, 2, 5]])
def test_values_that_are_each_given_once_are_not_split(first: list[int]) -> None:
    model = Model(
        spec_of({"x": ("n",)}, {"y": (None,)}),
        lambda x: {"y": np.unique(x)},
        ragged="node 'u' (Unique)",
    )
    for values in (first, [1, 1, 1, 1], [2, 1, 2, 1]):
        x = np.array(values, np.float32)
        assert np.array_equal(model.ask(x)["y"], np.unique(x))


def test_example_replaces_what_was_known_and_is_not_refuted_by_it() -> None:
    def turned(x: Array, z: Array) -> Arrays:
        return {"y": x + z if x.shape == z.shape else x + z.sum()}

    free = (None, 3)
    model = Model(spec_of({"x": free, "z": free}, {"y": free}), turned)
    for rows in (4, 5):
        model.ask(random(rows, 3), random(rows, 3, seed=1))
    assert model.split.inputs == {"x": 0, "z": 0}
    fresh = Model(model.spec, turned)
    fresh.splitter.learn([random(4, 3), random(7, 3, seed=1)], fresh.run, model.splitter)
    assert fresh.split.inputs == {"x": 0, "z": None}
    assert fresh.split.settled
    # What was shown before confirms it, where that had another number of rows.
    fresh = Model(model.spec, turned)
    fresh.splitter.learn([random(6, 3), random(6, 3, seed=1)], fresh.run, model.splitter)
    assert fresh.split.inputs == {"x": 0, "z": 0}


def test_look_that_its_caller_cancels_costs_no_try(warnings: Warned) -> None:
    model = Model(DECLARED, double)

    def cancel(run: int, _: Batch) -> None:
        if run % 4 == 2:
            raise ClosedError("the request was cancelled")

    model.before = cancel
    for _ in range(5):
        model.ask(random(4, 3))
    assert not model.split.settled
    assert not warnings()
    model.before = lambda *_: None
    model.ask(random(4, 3))
    assert model.split.splits


def test_size_that_depends_on_data_is_not_expected_of_later_pieces() -> None:
    def hits(x: Array) -> Arrays:
        return {"y": x[x > 0.5]}

    for node, kept in (("", False), ("node 'n' (NonZero)", True)):
        model = Model(spec_of({"x": (None, 3)}, {"y": (None,)}), hits, ragged=node)
        model.ask(np.eye(4, 3, dtype=np.float32) + np.eye(4, 3, -3, np.float32) * random(1, 1) ** 2)
        for seed in range(4):
            x = random(5, 3, seed=seed)
            assert np.array_equal(model.ask(x)["y"], hits(x)["y"])
        if kept:
            assert model.split.splits


# What the user says.


def test_axes_that_are_all_said_need_no_look() -> None:
    model = Model(DECLARED, double, {"x": 0}, {"y": 0})
    assert model.splitter.state.splits
    assert str(model.split).endswith("as batch_axes and output_axes say")
    for _ in range(2):
        assert np.array_equal(model.ask(random(4, 3))["y"], 2 * random(4, 3))
    assert model.runs == 4
    assert not model.records


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


def test_said_inputs_are_believed_where_the_look_shows_nothing(warnings: Warned) -> None:
    spec = spec_of({"x": ("batch", 3), "z": (None, 3)}, {"y": ("batch", 3)})
    model = Model(spec, lambda x, z: {"y": np.ones_like(x) + 0 * len(z)}, {"x": 0})
    model.ask(random(4, 3), random(2, 3))
    assert model.splitter.state.splits
    assert not model.split.checked
    assert "split without a check" in warnings()[0]


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
    assert model.split.settled
    model.splitter.warn_if_whole()
    model.ask(random(4, 3))
    assert model.runs == 1
    assert model.splitter.is_decided
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
    assert "runs whole, on one worker" in str(model.split)


def test_model_that_takes_one_shape_needs_no_request_to_run_whole(warnings: Warned) -> None:
    model = Model(spec_of({"x": (4, 3)}, {"y": (4, 3)}), double)
    assert model.splitter.is_decided
    assert "runs whole, on one worker: every dimension of the inputs is fixed" in str(model.split)
    model.splitter.warn_if_whole()
    model.ask(random(4, 3))
    assert model.runs == 1
    assert "every dimension of the inputs is fixed. batch_axes and output_axes say" in warnings()[0]


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
    assert model.splitter.state.splits is (said is not None)
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
    assert model.splitter.state.splits
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
    assert not model.split.settled
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
    assert not model.split.settled
    assert "its pieces were not answered (worker 1 was killed)" in warnings()[0]
    model.ask(random(4, 3))
    assert model.splitter.state.splits


# One learns at a time.


def test_others_run_whole_while_one_learns() -> None:
    model = Model(DECLARED, double)
    other = random(6, 3, seed=1)

    def meanwhile(run: int, _: Batch) -> None:
        if run == 2:
            assert model.splitter.busy
            assert np.array_equal(model.ask(other)["y"], 2 * other)
            assert model.runs == 3

    model.before = meanwhile
    model.ask(random(4, 3))
    assert not model.splitter.busy
    assert model.split.rows == 4


def test_look_that_a_signals_handler_ends_anywhere_leaves_it_to_the_next_request() -> None:
    model = Model(DECLARED, double)

    def ask() -> None:
        nonlocal model
        model = Model(DECLARED, double)
        model.ask(random(4, 3))

    for _ in interrupted_anywhere(ask, splitting):
        model.ask(random(4, 3))
        assert model.split.settled


# What is forgotten.


def test_split_that_a_request_contradicts_is_withdrawn(warnings: Warned) -> None:
    model = Model(DECLARED, double)
    model.ask(random(4, 3))
    for _ in range(2):
        model.splitter.withdraw("output 'y' joins along axis 0, and did not")
    assert not model.splitter.state.splits
    assert model.split.settled
    assert not model.split.checked
    assert model.split.reason == "output 'y' joins along axis 0, and did not"
    assert model.records[1:] == [None]
    assert len(warnings()) == 1
    assert "and did not" in warnings()[0]
    model.runs = 0
    model.ask(random(4, 3))
    assert model.runs == 1


# Values that show nothing.


def test_outputs_with_some_nan_decide_by_their_numbers() -> None:
    def masked(x: Array) -> Arrays:
        return {"y": np.where(x > 0, x, np.nan)}

    model = Model(DECLARED, masked)
    model.ask(random(4, 3))
    assert model.split.splits
    x = random(6, 3, seed=1)
    assert np.array_equal(model.ask(x)["y"], masked(x)["y"], equal_nan=True)


# Weights that are replaced, and axes of single calls.


def learner() -> Learner:
    """One that makes no request."""
    return Learner(
        model=DECLARED,
        planner=cast("Planner", None),
        threads=WaitingThreads(),
        said=SaidAxes(),
        engine="fake",
        identity="",
        joins=False,
        verify="first",
        log=A_POOL,
    )


def look(splitter: Splitter, function: Function = double) -> None:
    assert splitter.look([random(4, 3)], lambda arrays: dict(function(*arrays)))


def test_first_request_after_the_first_update_looks_once_more() -> None:
    known = learner()
    before = known.splitter_for(None, None, updated=False)
    look(before)
    after = known.splitter_for(None, None, updated=True)
    assert not after.state.split.settled
    look(after, center)
    assert (before.state.splits, after.state.splits) == (True, False)
    assert known.splitter is known.splitter_for({}, None, updated=True) is after
    # A request from before the update shows nothing of the new weights.
    assert known.splitter_for(None, None, updated=False).updated is False


def test_split_that_was_withdrawn_stays_so_with_other_weights() -> None:
    known = learner()
    look(known.splitter)
    known.splitter.withdraw("output 'y' joins along axis 0, and did not")
    after = known.splitter_for(None, None, updated=True)
    assert (after.state.split.settled, after.state.splits) == (True, False)


def test_axes_of_a_call_are_learned_by_themselves() -> None:
    known = learner()
    whole = known.splitter_for({"x": None}, None, updated=False)
    assert whole is known.splitter_for({"x": None}, {}, updated=False)
    assert whole is not known.splitter
    assert not whole.state.splits
    with pytest.raises(InvalidInputError, match="batch_axes: got unknown input 'z'"):
        known.splitter_for({"z": 0}, None, updated=False)
    for axis in (True, [0]):
        with pytest.raises(InvalidInputError, match=r"batch_axes\['x'\]: got"):
            known.splitter_for({"x": axis}, None, updated=False)  # type: ignore[dict-item]


# Records.


def test_what_was_learned_is_found_again() -> None:
    first = Model(FREE, double)
    first.ask(random(4, 3))
    record = json.loads(json.dumps(as_record(first.split)))
    second = Model(FREE, double, recorded=of_record(record, FREE))
    assert second.splitter.state.splits
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
    "ranks": {"y": 2},
}


texts = st.text(max_size=5)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from([*RECORD]), anything))
def test_any_content_is_a_record_that_can_be_used_or_none(damage: dict[str, Any]) -> None:
    model = Model(DECLARED, double, recorded=of_record({**RECORD, **damage}, DECLARED))
    model.splitter.warn_if_whole()
    assert str(model.split)
    for rows in (1, 4):
        x = random(rows, 3)
        try:
            assert np.array_equal(model.ask(x)["y"], double(x)["y"])
        except PredictError:  # it says that y joins in another way
            assert model.split.outputs != {"y": 0}
