"""Tests of mcinfer/sharding.py."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError, PredictError
from mcinfer.sharding import (
    InputCut,
    OutputJoin,
    Plan,
    Shape,
    batch_symbol,
    join_axis,
    offsets,
    plan,
    split_evenly,
)
from mcinfer.specs import Dimension, ModelSpec, TensorSpec

Dimensions = tuple[Dimension, ...]
FLOAT32 = np.dtype(np.float32)


def model(inputs: Mapping[str, Dimensions], outputs: Mapping[str, Dimensions]) -> ModelSpec:
    """A model of float32 tensors with these shapes."""
    return ModelSpec(
        inputs=tuple(TensorSpec(name=n, dtype=FLOAT32, shape=s) for n, s in inputs.items()),
        outputs=tuple(TensorSpec(name=n, dtype=FLOAT32, shape=s) for n, s in outputs.items()),
    )


SYMBOLIC = model({"x": ("batch", 3)}, {"y": ("batch", 5)})
FIXED = model({"x": (2, 3)}, {"y": (2, 5)})
SINGLE = model({"x": (1, 3)}, {"y": (1, 5)})
UNET = model(
    {"sample": ("batch", 4, "h", "w"), "timestep": (1,), "states": ("batch", 77, 768)},
    {"out_sample": ("batch", 4, "h", "w")},
)


# Even parts.


@given(count=st.integers(0, 10_000), pieces=st.integers(1, 300))
def test_even_parts_are_full_and_alike(count: int, pieces: int) -> None:
    parts = split_evenly(count, pieces)
    assert sum(parts) == count
    assert len(parts) == min(count, pieces)
    assert all(parts)
    assert list(parts) == sorted(parts, reverse=True)
    assert not parts or parts[0] - parts[-1] <= 1


# The batch symbol.


@pytest.mark.parametrize(
    "symbol", ["batch", "batch_size", "N", "n", "B", "bs", "Batch", "BATCH", "unet_batch_1"]
)
def test_symbol_named_as_a_batch_is_chosen_before_the_first(symbol: str) -> None:
    spec = model({"x": ("rows", symbol), "y": ("rows", 2)}, {"z": ("rows", 1)})
    assert batch_symbol(spec) == symbol


def test_name_that_says_batch_goes_before_a_letter() -> None:
    assert batch_symbol(model({"x": ("n", "batch")}, {"y": ("n", "batch")})) == "batch"


def test_symbol_first_in_inputs_and_outputs_is_chosen_where_none_says_batch() -> None:
    spec = model({"x": ("w", 2), "a": ("rows", 3), "b": ("rows", 1)}, {"y": ("rows", "w")})
    assert batch_symbol(spec) == "rows"


def test_most_frequent_candidate_is_chosen() -> None:
    inputs: dict[str, Dimensions] = {"x": ("p",), "a": ("q",), "b": ("q",)}
    assert batch_symbol(model(inputs, {"y": ("p",), "z": ("q",)})) == "q"


@pytest.mark.parametrize(
    "symbol", ["seq", "sequence_length", "tokens", "num_frames", "Time", "step"]
)
def test_symbol_named_as_a_sequence_is_never_the_batch(symbol: str) -> None:
    spec = model({"x": (symbol, 3)}, {"y": (symbol, 5)})
    assert batch_symbol(spec) is None
    cut = plan(spec, [(8, 3)], 4)
    assert cut.rows == (1,)
    assert cut.inputs == (InputCut(axis=None, shapes=((8, 3),)),)
    assert cut.outputs == (OutputJoin(axis=None, shapes=((8, 5),), shape=(8, 5)),)


def test_symbol_that_no_output_begins_with_is_no_batch() -> None:
    assert batch_symbol(model({"x": ("points", 3)}, {"y": (7, "points")})) is None


def test_rows_that_are_set_against_each_other_are_not_cut() -> None:
    spec = model({"x": ("batch", 3)}, {"similarity": ("batch", "batch")})
    assert batch_symbol(spec) is None
    assert plan(spec, [(4, 3)], 2).outputs[0].shape == (4, 4)
    square = model({"x": ("N", "N")}, {"y": ("N", 1)})
    assert plan(square, [(4, 4)], 2).inputs == (InputCut(axis=None, shapes=((4, 4),)),)


def test_rows_that_are_set_against_each_other_cannot_be_forced_apart() -> None:
    spec = model({"x": ("batch", 3)}, {"similarity": ("batch", "batch")})
    with pytest.raises(InvalidInputError, match="similarity"):
        plan(spec, [(4, 3)], 2, {"x": 0})
    assert plan(spec, [(4, 3)], 1, {"x": 0}).outputs[0].shape == (4, 4)


# Symbolic batches.


def test_even_batch_is_cut_in_equal_shards() -> None:
    assert plan(SYMBOLIC, [(8, 3)], 4) == Plan(
        rows=(2, 2, 2, 2),
        inputs=(InputCut(axis=0, shapes=((2, 3),) * 4),),
        outputs=(OutputJoin(axis=0, shapes=((2, 5),) * 4, shape=(8, 5)),),
        rowwise=True,
    )


def test_uneven_batch_is_cut_with_the_larger_shards_first() -> None:
    assert plan(SYMBOLIC, [(5, 3)], 2) == Plan(
        rows=(3, 2),
        inputs=(InputCut(axis=0, shapes=((3, 3), (2, 3))),),
        outputs=(OutputJoin(axis=0, shapes=((3, 5), (2, 5)), shape=(5, 5)),),
        rowwise=True,
    )


def test_batch_smaller_than_the_workers_makes_one_shard_a_row() -> None:
    cut = plan(SYMBOLIC, [(3, 3)], 8)
    assert cut.rows == (1, 1, 1)
    assert cut.outputs == (OutputJoin(axis=0, shapes=((1, 5),) * 3, shape=(3, 5)),)


def test_one_row_is_one_shard() -> None:
    assert plan(SYMBOLIC, [(1, 3)], 8).rows == (1,)


def test_inputs_without_the_batch_go_to_every_shard_whole() -> None:
    cut = plan(UNET, [(4, 4, 8, 8), (1,), (4, 77, 768)], 2)
    assert cut.rows == (2, 2)
    assert cut.inputs == (
        InputCut(axis=0, shapes=((2, 4, 8, 8),) * 2),
        InputCut(axis=None, shapes=((1,),) * 2),
        InputCut(axis=0, shapes=((2, 77, 768),) * 2),
    )
    assert cut.outputs == (OutputJoin(axis=0, shapes=((2, 4, 8, 8),) * 2, shape=(4, 4, 8, 8)),)


def test_scalar_goes_to_every_shard_whole() -> None:
    spec = model({"x": ("batch", 3), "scale": ()}, {"y": ("batch", 3)})
    assert plan(spec, [(4, 3), ()], 2).inputs[1] == InputCut(axis=None, shapes=((), ()))


def test_batch_that_does_not_come_first_is_cut_along_its_own_axis() -> None:
    spec = model({"x": (3, "batch"), "y": ("batch", 2)}, {"z": (7, "batch")})
    cut = plan(spec, [(3, 5), (5, 2)], 2)
    assert cut.inputs == (
        InputCut(axis=1, shapes=((3, 3), (3, 2))),
        InputCut(axis=0, shapes=((3, 2), (2, 2))),
    )
    assert cut.outputs == (OutputJoin(axis=1, shapes=((7, 3), (7, 2)), shape=(7, 5)),)


def test_model_without_inputs_runs_once() -> None:
    cut = plan(model({}, {"y": (3,)}), [], 4)
    assert cut == Plan(
        rows=(1,), inputs=(), outputs=(OutputJoin(axis=None, shapes=((3,),), shape=(3,)),)
    )


def test_model_without_a_batch_runs_once() -> None:
    spec = model({"x": (None, 3)}, {"y": (None, 5)})
    cut = plan(spec, [(8, 3)], 4)
    assert cut.rows == (1,)
    assert cut.outputs == (OutputJoin(axis=None, shapes=None, shape=None),)


# Fixed batches.


def test_fixed_batch_of_one_takes_any_number_of_rows() -> None:
    assert plan(SINGLE, [(3, 3)], 2) == Plan(
        rows=(1, 1, 1),
        inputs=(InputCut(axis=0, shapes=((1, 3),) * 3),),
        outputs=(OutputJoin(axis=0, shapes=((1, 5),) * 3, shape=(3, 5)),),
    )


def test_fixed_batch_makes_as_many_pieces_as_it_needs() -> None:
    assert plan(FIXED, [(8, 3)], 2) == Plan(
        rows=(1, 1, 1, 1),
        inputs=(InputCut(axis=0, shapes=((2, 3),) * 4),),
        outputs=(OutputJoin(axis=0, shapes=((2, 5),) * 4, shape=(8, 5)),),
    )


def test_fixed_batch_given_exactly_is_one_shard() -> None:
    cut = plan(FIXED, [(2, 3)], 4)
    assert cut.rows == (1,)
    assert cut.inputs == (InputCut(axis=None, shapes=((2, 3),)),)
    assert cut.outputs[0].shape == (2, 5)


def test_rows_that_are_no_multiple_of_a_fixed_batch_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"input 'x' is given 3 rows.*multiple.*of 2"):
        plan(FIXED, [(3, 3)], 2)


def test_fixed_batch_cuts_the_inputs_that_were_given_more_and_repeats_the_others() -> None:
    spec = model({"x": (1, 3), "timestep": (1,)}, {"y": (1, 3)})
    cut = plan(spec, [(4, 3), (1,)], 2)
    assert cut.inputs == (
        InputCut(axis=0, shapes=((1, 3),) * 4),
        InputCut(axis=None, shapes=((1,),) * 4),
    )


def test_fixed_batches_of_several_sizes_make_the_same_number_of_pieces() -> None:
    spec = model({"x": (2, 3), "y": (4, 3)}, {"z": (2, 1)})
    cut = plan(spec, [(6, 3), (12, 3)], 2)
    assert [item.shapes for item in cut.inputs] == [((2, 3),) * 3, ((4, 3),) * 3]
    with pytest.raises(InvalidInputError, match=r"'x' and 'y' are cut together.*3 pieces.*8 rows"):
        plan(spec, [(6, 3), (8, 3)], 2)


def test_number_that_is_the_fixed_batch_by_chance_is_no_batch_further_back() -> None:
    spec = model({"x": (2, 3)}, {"square": (2, 2), "table": (3, 2), "n": (2,)})
    square, table, n = plan(spec, [(4, 3)], 2).outputs
    assert square == OutputJoin(axis=0, shapes=((2, 2),) * 2, shape=(4, 2))
    assert table == OutputJoin(axis=None, shapes=((3, 2),) * 2, shape=(3, 2))
    assert n == OutputJoin(axis=0, shapes=((2,),) * 2, shape=(4,))


# Axes that the caller names.


def test_named_axis_is_cut_where_the_model_has_no_symbol() -> None:
    spec = model({"x": (None, 3), "y": (None, 2)}, {"z": (None, 5)})
    cut = plan(spec, [(4, 3), (4, 2)], 2, {"x": 0, "y": 0})
    assert cut.rows == (2, 2)
    assert [item.axis for item in cut.inputs] == [0, 0]
    assert cut.outputs == (OutputJoin(axis=None, shapes=None, shape=None, guessed=True),)


def test_named_axis_may_be_any_axis() -> None:
    spec = model({"x": (3, "columns")}, {"y": ("columns", 7)})
    cut = plan(spec, [(3, 5)], 2, {"x": 1})
    assert cut.inputs == (InputCut(axis=1, shapes=((3, 3), (3, 2))),)
    assert cut.outputs == (OutputJoin(axis=0, shapes=((3, 7), (2, 7)), shape=(5, 7)),)


def test_input_said_to_be_whole_is_not_cut() -> None:
    spec = model({"x": ("batch", 3), "mask": ("batch2", 3)}, {"y": ("batch", 3)})
    cut = plan(spec, [(4, 3), (4, 3)], 2, {"mask": None})
    assert cut.inputs == (
        InputCut(axis=0, shapes=((2, 3), (2, 3))),
        InputCut(axis=None, shapes=((4, 3), (4, 3))),
    )


def test_everything_said_to_be_whole_is_one_shard() -> None:
    cut = plan(SYMBOLIC, [(8, 3)], 4, {"x": None})
    assert cut.rows == (1,)
    assert cut.outputs == (OutputJoin(axis=None, shapes=((8, 5),), shape=(8, 5)),)


def test_inputs_that_are_not_named_follow_the_models_symbol() -> None:
    cut = plan(UNET, [(4, 4, 8, 8), (1,), (4, 77, 768)], 2, {"timestep": None})
    assert [item.axis for item in cut.inputs] == [0, None, 0]


def test_inputs_that_are_not_named_follow_the_models_fixed_batch() -> None:
    spec = model({"x": (1, 3), "timestep": (1,)}, {"y": (1, 3)})
    assert plan(spec, [(4, 3), (1,)], 2, {"timestep": None}).rows == (1, 1, 1, 1)


def test_nameless_dimension_that_is_not_named_is_not_cut() -> None:
    spec = model({"x": (None, 3), "table": (7, None)}, {"y": (None, 3)})
    cut = plan(spec, [(4, 3), (7, 4)], 2, {"x": 0})
    assert cut.inputs[1] == InputCut(axis=None, shapes=((7, 4), (7, 4)))


def test_unknown_input_in_batch_axes_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"batch_axes: got unknown input 'z'.*\['x'\]"):
        plan(SYMBOLIC, [(4, 3)], 2, {"z": 0})


@pytest.mark.parametrize("axis", [-1, 2, 1.0, "0", True])
def test_axis_that_the_input_does_not_have_is_refused(axis: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"batch_axes\['x'\]: got .*from 0 to 1"):
        plan(SYMBOLIC, [(4, 3)], 2, {"x": axis})


# What is refused.


def test_wrong_number_of_dimensions_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"input 'x' has 3 dimensions.*expected 2"):
        plan(SYMBOLIC, [(4, 3, 1)], 2)


def test_wrong_fixed_dimension_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"input 'x' has size 5 in dimension 1, expected 3"):
        plan(SYMBOLIC, [(4, 5)], 2)


def test_symbol_of_two_sizes_is_refused_naming_both_inputs() -> None:
    spec = model({"x": ("batch", "w"), "y": ("batch", "w")}, {"z": ("batch", "w")})
    with pytest.raises(InvalidInputError, match=r"symbol 'w' is 3 in input 'x' and 4 in input 'y'"):
        plan(spec, [(2, 3), (2, 4)], 2)


def test_batches_of_two_sizes_are_refused_naming_both_inputs() -> None:
    spec = model({"x": ("batch", 3), "y": ("batch", 2)}, {"z": ("batch", 1)})
    with pytest.raises(InvalidInputError, match=r"'x' and 'y' are cut together.*4 rows.*has 6"):
        plan(spec, [(4, 3), (6, 2)], 2)


@pytest.mark.parametrize("first", ["rows", None])
def test_input_that_may_belong_to_the_batch_is_refused(first: Dimension) -> None:
    spec = model({"x": ("batch", 3), "mask": (first, 2)}, {"y": ("batch", 3)})
    with pytest.raises(InvalidInputError, match=r"input 'mask'.*4 rows.*batch_axes=\{'mask': 0\}"):
        plan(spec, [(4, 3), (4, 2)], 2)
    assert plan(spec, [(4, 3), (5, 2)], 2).inputs[1].axis is None
    assert plan(spec, [(1, 3), (1, 2)], 2).inputs[1].axis is None
    assert plan(spec, [(4, 3), (4, 2)], 2, {"mask": 0}).inputs[1].axis == 0
    assert plan(spec, [(4, 3), (4, 2)], 2, {"mask": None}).inputs[1].axis is None


def test_saying_what_one_input_is_does_not_settle_another() -> None:
    spec = model({"x": ("batch", 3), "a": ("p", 2), "b": ("q", 2)}, {"y": ("batch", 3)})
    with pytest.raises(InvalidInputError, match="input 'b'"):
        plan(spec, [(4, 3), (4, 2), (4, 2)], 2, {"a": None})


# No rows.


def test_batch_of_no_rows_is_answered_without_a_shard() -> None:
    assert plan(SYMBOLIC, [(0, 3)], 4) == Plan(
        rows=(),
        inputs=(InputCut(axis=0, shapes=()),),
        outputs=(OutputJoin(axis=0, shapes=(), shape=(0, 5)),),
    )


def test_fixed_batch_of_no_rows_is_answered_without_a_shard() -> None:
    cut = plan(FIXED, [(0, 3)], 4)
    assert cut.rows == ()
    assert cut.outputs == (OutputJoin(axis=0, shapes=(), shape=(0, 5)),)


def test_shapes_are_checked_in_a_batch_of_no_rows_too() -> None:
    with pytest.raises(InvalidInputError, match="size 4 in dimension 1"):
        plan(SYMBOLIC, [(0, 4)], 2)


@pytest.mark.parametrize("shape", [(5,), ("classes", 5), (None, 5), ("batch", "found")])
def test_batch_of_no_rows_is_refused_where_an_output_does_not_follow(shape: Dimensions) -> None:
    spec = model({"x": ("batch", 3)}, {"y": ("batch", 2), "other": shape})
    with pytest.raises(InvalidInputError, match="batch of 0 rows has no answer here: output other"):
        plan(spec, [(0, 3)], 2)


# Outputs.


def test_output_of_fixed_shape_is_expected_equal_from_every_shard() -> None:
    spec = model({"x": ("batch", 3)}, {"y": ("batch", 3), "labels": (10,), "version": ()})
    _, labels, version = plan(spec, [(4, 3)], 2).outputs
    assert labels == OutputJoin(axis=None, shapes=((10,), (10,)), shape=(10,))
    assert version == OutputJoin(axis=None, shapes=((), ()), shape=())
    assert join_axis("labels", labels, (2, 2), [(10,), (10,)]) is None


def test_output_that_begins_with_another_known_symbol_is_expected_equal() -> None:
    spec = model({"x": ("batch", "seq")}, {"y": ("batch", 1), "positions": ("seq", 8)})
    positions = plan(spec, [(4, 4)], 2).outputs[1]
    assert positions == OutputJoin(axis=None, shapes=((4, 8), (4, 8)), shape=(4, 8))
    assert join_axis("positions", positions, (2, 2), [(4, 8), (4, 8)]) is None


def test_output_with_the_batch_and_an_unknown_size_joins_along_the_batch() -> None:
    spec = model({"x": ("batch", 3)}, {"y": ("batch", "found")})
    join = plan(spec, [(4, 3)], 2).outputs[0]
    assert join == OutputJoin(axis=0, shapes=None, shape=None)
    assert join_axis("y", join, (2, 2), [(2, 9), (2, 9)]) == 0
    with pytest.raises(
        PredictError, match=r"output 'y'.*\[2, 9\], \[2, 8\].*do not join along axis 0"
    ):
        join_axis("y", join, (2, 2), [(2, 9), (2, 8)])


@pytest.mark.parametrize(
    ("shapes", "axis"),
    [
        ([(3, 7), (2, 7)], 0),
        ([(9, 7), (6, 7)], 0),
        ([(3,), (2,)], 0),
        ([(5, 7), (5, 7)], None),
        ([(3, 7), (4, 7)], None),
        ([(6, 7), (2, 7)], None),
        ([(0, 7), (0, 7)], None),
        ([(), ()], None),
    ],
)
def test_unknown_output_joins_where_every_shard_gave_the_same_multiple_of_its_rows(
    shapes: list[Shape], axis: int | None
) -> None:
    spec = model({"x": ("batch", 3)}, {"y": ("unk__7", 7)})
    join = plan(spec, [(5, 3)], 2).outputs[0]
    assert join == OutputJoin(axis=None, shapes=None, shape=None, guessed=True)
    assert join_axis("y", join, (3, 2), shapes) == axis


def test_unknown_outputs_that_differ_elsewhere_do_not_join() -> None:
    join = OutputJoin(axis=None, shapes=None, shape=None, guessed=True)
    with pytest.raises(PredictError, match="output 'y'"):
        join_axis("y", join, (3, 2), [(3, 7), (2, 8)])


def test_output_that_is_not_as_the_model_says_joins_like_an_unknown_one() -> None:
    join = OutputJoin(axis=None, shapes=((1, 7), (1, 7)), shape=(1, 7))
    assert join_axis("y", join, (3, 2), [(1, 7), (1, 7)]) is None
    assert join_axis("y", join, (3, 2), [(3, 7), (2, 7)]) == 0
    assert join_axis("y", join, (3, 2), [(4, 7), (4, 7)]) is None


def test_parts_that_lack_the_axis_do_not_join() -> None:
    join = OutputJoin(axis=1, shapes=None, shape=None)
    with pytest.raises(PredictError, match="do not join along axis 1"):
        join_axis("y", join, (1, 1), [(3,), (3,)])


# Where the parts lie.


def test_parts_behind_a_longer_dimension_are_not_contiguous() -> None:
    assert offsets((2, 4, 3), 1, (2, 2)) is None
    assert offsets((1, 4, 3), 1, (3, 1)) == [0, 9]


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_offsets_are_where_numpy_finds_the_parts(data: st.DataObject, sizes: list[int]) -> None:
    axis = data.draw(st.integers(0, len(sizes) - 1))
    parts = split_evenly(sizes[axis], data.draw(st.integers(1, 5)))
    whole = np.arange(prod(sizes)).reshape(sizes)
    starts = offsets(tuple(sizes), axis, parts)
    cut = np.split(whole, np.cumsum(parts)[:-1], axis)
    if starts is None:
        assert prod(sizes[:axis]) > 1
        return
    assert len(starts) == len(parts)
    for start, part in zip(starts, cut, strict=True):
        assert part.flags.c_contiguous
        assert [*part.flat] == [*range(start, start + part.size)]


# Cutting and joining give back the whole, whatever the model.

SIZES: dict[Dimension, int] = {"height": 4, "width": 3}


@st.composite
def dimensions(draw: st.DrawFn) -> Dimensions:
    """The batch at most once, at any place; a first dimension that cannot be taken for it."""
    rest: list[Dimension] = draw(
        st.lists(st.sampled_from([1, 2, 5, "height", "width"]), max_size=3, unique=True)
    )
    if draw(st.booleans()):
        rest.insert(draw(st.integers(0, len(rest))), "batch")
    elif rest and isinstance(rest[0], str):
        rest[0] = 3
    return tuple(rest)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Models whose batch is a symbol, or that have none."""
    inputs = draw(st.lists(dimensions(), max_size=4))
    outputs = draw(st.lists(dimensions(), min_size=1, max_size=3))
    return model(
        {"image": (1, "height", "width"), **{f"in{i}": shape for i, shape in enumerate(inputs)}},
        {f"out{i}": shape for i, shape in enumerate(outputs)},
    )


def given_shape(spec: TensorSpec, rows: int) -> Shape:
    """The shape of a request's input, or of its answer."""
    return tuple(size if isinstance(size, int) else SIZES.get(size, rows) for size in spec.shape)


def numbered(shape: Shape) -> NDArray[np.int64]:
    return np.arange(prod(shape)).reshape(shape)


def cut_by(whole: NDArray[np.int64], axis: int, shapes: Sequence[Shape]) -> list[NDArray[np.int64]]:
    """The parts of an array that a plan speaks of."""
    parts = np.split(whole, np.cumsum([shape[axis] for shape in shapes])[:-1], axis)
    assert [part.shape for part in parts] == [*shapes]
    return parts


@given(models(), st.integers(1, 40), st.integers(1, 12))
def test_shards_of_any_model_join_to_the_whole(spec: ModelSpec, rows: int, pieces: int) -> None:
    cut = plan(spec, [given_shape(item, rows) for item in spec.inputs], pieces)
    has_batch = any("batch" in item.shape for item in spec.inputs)
    assert cut.rows == (split_evenly(rows, pieces) if has_batch else (1,))
    for item, part in zip(spec.inputs, cut.inputs, strict=True):
        shape = given_shape(item, rows)
        assert len(part.shapes) == len(cut.rows)
        assert (part.axis is not None) == ("batch" in item.shape)
        if part.axis is None:
            assert {*part.shapes} == {shape}
            continue
        assert tuple(size[part.axis] for size in part.shapes) == cut.rows
        parts = cut_by(numbered(shape), part.axis, part.shapes)
        assert np.array_equal(np.concatenate(parts, part.axis), numbered(shape))
    for item, join in zip(spec.outputs, cut.outputs, strict=True):
        shape = given_shape(item, rows)
        if "batch" not in item.shape:
            assert (join.axis, join.shape) == (None, shape)
        elif not has_batch:
            assert (join.axis, join.shape, join.shapes) == (None, None, None)
        else:
            assert join.axis is not None
            assert join.shapes is not None
            assert join.shape == shape
            assert join_axis(item.name, join, cut.rows, join.shapes) == join.axis
            parts = cut_by(numbered(shape), join.axis, join.shapes)
            assert np.array_equal(np.concatenate(parts, join.axis), numbered(shape))


@given(batch=st.integers(1, 5), count=st.integers(0, 9), pieces=st.integers(1, 4))
def test_shards_of_any_fixed_batch_join_to_the_whole(batch: int, count: int, pieces: int) -> None:
    spec = model({"x": (batch, 3), "y": (batch,)}, {"z": (batch, 7)})
    rows = count * batch
    cut = plan(spec, [(rows, 3), (rows,)], pieces)
    assert cut.rows == (1,) * count
    assert [len(part.shapes) for part in cut.inputs] == [count, count]
    assert cut.outputs[0].shape == (rows, 7)
    assert cut.outputs[0].shapes == ((batch, 7),) * count
    if count > 1:
        for part, shape in zip(cut.inputs, [(rows, 3), (rows,)], strict=True):
            parts = cut_by(numbered(shape), 0, part.shapes)
            assert np.array_equal(np.concatenate(parts), numbered(shape))


@given(batch=st.integers(2, 9), rows=st.integers(1, 100))
def test_rows_fit_a_fixed_batch_exactly_or_are_refused(batch: int, rows: int) -> None:
    spec = model({"x": (batch, 3)}, {"y": (batch, 3)})
    if rows % batch:
        with pytest.raises(InvalidInputError, match="multiple"):
            plan(spec, [(rows, 3)], 2)
    else:
        assert len(plan(spec, [(rows, 3)], 2).rows) == rows // batch


def test_sequence_as_long_as_the_batch_leaves_no_doubt() -> None:
    model = ModelSpec(
        inputs=(
            TensorSpec(name="x", dtype=np.dtype("float32"), shape=("batch", 3)),
            TensorSpec(name="times", dtype=np.dtype("float32"), shape=("num_timesteps",)),
        ),
        outputs=(TensorSpec(name="y", dtype=np.dtype("float32"), shape=("batch", 3)),),
    )
    cut = plan(model, [(2, 3), (2,)], 2)
    assert cut.inputs[0].axis == 0
    assert cut.inputs[1].axis is None


# Rows that may go together with those of other requests.

PAIRED = model({"x": ("batch", "batch")}, {"y": ("batch", 5)})
TOLD_BY_AXES = model({"x": (None, 3), "w": ("m", 2)}, {"y": ("m", 5)})


@pytest.mark.parametrize(
    ("spec", "shapes", "axes"),
    [
        pytest.param(SYMBOLIC, [(4, 3)], None, id="batch"),
        pytest.param(SYMBOLIC, [(1, 3)], None, id="one row"),
        pytest.param(UNET, [(2, 4, 8, 8), (1,), (2, 77, 768)], None, id="whole input"),
        pytest.param(model({"x": (3, "n")}, {"y": ("n",)}), [(3, 4)], None, id="axis 1"),
        pytest.param(model({"x": ("rows", 3)}, {"y": ("rows",)}), [(2, 3)], None, id="any name"),
        pytest.param(
            model({"x": ("batch", "seq")}, {"y": ("batch", "seq")}), [(2, 7)], None, id="sequence"
        ),
        pytest.param(
            model({"x": ("a", "b")}, {"y": (7, "b")}), [(2, 3)], {"x": 1}, id="named axis"
        ),
        pytest.param(TOLD_BY_AXES, [(4, 3), (4, 2)], {"x": 0, "w": 0}, id="one without a name"),
    ],
)
def test_rows_of_a_batch_of_any_size_may_go_with_others(
    spec: ModelSpec, shapes: Sequence[Shape], axes: dict[str, int] | None
) -> None:
    for pieces in (1, 2):
        cut = plan(spec, shapes, pieces, axes)
        assert cut.rowwise
        assert all(join.axis is not None for join in cut.outputs)
        assert cut.input_axes == tuple(item.axis for item in cut.inputs)


@pytest.mark.parametrize(
    ("spec", "shapes", "axes"),
    [
        pytest.param(FIXED, [(4, 3)], None, id="fixed batch, several"),
        pytest.param(FIXED, [(2, 3)], None, id="fixed batch, as it is"),
        pytest.param(SYMBOLIC, [(0, 3)], None, id="no rows"),
        pytest.param(SYMBOLIC, [(4, 3)], {"x": None}, id="said to be whole"),
        pytest.param(model({"x": ("batch", 3)}, {"y": (3,)}), [(4, 3)], None, id="no batch in y"),
        pytest.param(
            model({"x": ("batch", 3)}, {"y": ("batch", 3), "z": ()}), [(4, 3)], None, id="nor in z"
        ),
        pytest.param(
            model({"x": ("batch", 3)}, {"y": ("batch", "found")}), [(4, 3)], None, id="unknown size"
        ),
        pytest.param(
            model({"x": ("batch", 3)}, {"y": ("batch", None)}), [(4, 3)], None, id="without a name"
        ),
        pytest.param(
            model({"x": ("batch", 3)}, {"y": ("2*batch", 3)}), [(4, 3)], None, id="expression"
        ),
        pytest.param(PAIRED, [(4, 4)], None, id="paired input"),
        pytest.param(PAIRED, [(4, 4)], {"x": 0}, id="paired input, cut all the same"),
        pytest.param(
            model({"x": ("n", 3)}, {"y": ("n", "n")}), [(4, 3)], {"x": 0}, id="paired output"
        ),
        pytest.param(
            model({"x": ("n", 3), "w": (3, "n")}, {"y": ("n", 3)}),
            [(4, 3), (3, 4)],
            {"w": None},
            id="whole input of as many rows",
        ),
        pytest.param(model({"x": (None, 3)}, {"y": (None, 5)}), [(4, 3)], None, id="no batch"),
        pytest.param(model({"x": (None, 3)}, {"y": (None, 5)}), [(4, 3)], {"x": 0}, id="unnamed"),
        pytest.param(model({"x": (None, 3)}, {"y": (4, 5)}), [(4, 3)], {"x": 0}, id="by chance"),
        pytest.param(
            TOLD_BY_AXES, [(4, 3), (2, 2)], {"x": 0, "w": None}, id="unnamed beside a whole one"
        ),
        pytest.param(model({}, {"y": (3,)}), [], None, id="no inputs"),
        pytest.param(model({"x": ("seq", 3)}, {"y": ("seq", 3)}), [(4, 3)], None, id="sequence"),
    ],
)
def test_rows_that_are_not_known_to_be_independent_go_alone(
    spec: ModelSpec, shapes: Sequence[Shape], axes: dict[str, int | None] | None
) -> None:
    assert not plan(spec, shapes, 1, axes).rowwise
