"""Tests of mcinfer/sharding.py."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.sharding import (
    Axes,
    Cut,
    InputCut,
    JoinError,
    OutputJoin,
    SaidAxes,
    Shape,
    Split,
    batch_symbol,
    candidates,
    check_join,
    cut_batch,
    first_split,
    is_guess,
    offsets,
    rows_of,
    split_evenly,
    split_unevenly,
    why_apart,
)
from mcinfer.specs import Dimension, ModelSpec, TensorSpec
from tests.planned_requests import floats as model

Dimensions = tuple[Dimension, ...]


def said(spec: ModelSpec, inputs: Axes | None = None, outputs: Axes | None = None) -> Split:
    """What is known of a model before any request, where the user says this."""
    return first_split(spec, SaidAxes(inputs=inputs or {}, outputs=outputs or {}))


def planned(
    spec: ModelSpec,
    shapes: Sequence[Shape],
    pieces: int,
    inputs: Axes | None = None,
    outputs: Axes | None = None,
) -> Cut:
    """The cut of a request where the user says this, and that and the model's symbols are believed."""
    return cut_batch(spec, shapes, pieces, said(spec, inputs, outputs))


def joined(axis: int | None, *shapes: Shape) -> OutputJoin:
    """An output of these parts, whose sizes along the axis are known."""
    if axis is None:
        return OutputJoin(axis=None, shapes=shapes, shape=shapes[0])
    lengths = tuple(shape[axis] for shape in shapes)
    whole = (*shapes[0][:axis], sum(lengths), *shapes[0][axis + 1 :])
    return OutputJoin(axis=axis, shapes=shapes, shape=whole, lengths=lengths)


SYMBOLIC = model({"x": ("batch", 3)}, {"y": ("batch", 5)})
FIXED = model({"x": (2, 3)}, {"y": (2, 5)})
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


@pytest.mark.parametrize("symbol", ["N", "BATCH", "unet_batch_1"])
def test_symbol_named_as_a_batch_is_chosen_before_the_first(symbol: str) -> None:
    spec = model({"x": ("rows", symbol), "y": ("rows", 2)}, {"z": ("rows", 1)})
    assert batch_symbol(spec) == symbol


@pytest.mark.parametrize("symbol", ["num_frames", "Time"])
def test_symbol_named_as_a_sequence_is_never_the_batch(symbol: str) -> None:
    spec = model({"x": (symbol, 3)}, {"y": (symbol, 5)})
    assert batch_symbol(spec) is None
    cut = planned(spec, [(8, 3)], 4)
    assert cut.rows == (1,)
    assert cut.inputs == (InputCut(axis=None, shapes=((8, 3),)),)
    assert cut.outputs == (joined(None, (8, 5)),)


def test_rows_that_are_set_against_each_other_are_not_cut() -> None:
    spec = model({"x": ("batch", 3)}, {"similarity": ("batch", "batch")})
    assert batch_symbol(spec) is None
    assert planned(spec, [(4, 3)], 2).outputs[0].shape == (4, 4)
    square = model({"x": ("N", "N")}, {"y": ("N", 1)})
    assert planned(square, [(4, 4)], 2).inputs == (InputCut(axis=None, shapes=((4, 4),)),)


# Axes that the caller names.

NAMELESS = model({"x": (None, 3), "y": (None, 2)}, {"z": (None, 5)})


def test_output_that_nothing_is_known_of_is_refused_before_it_runs() -> None:
    with pytest.raises(InvalidInputError, match=r"output 'z' has no axis.*output_axes=\{'z': 0\}"):
        planned(NAMELESS, [(4, 3), (4, 2)], 2, {"x": 0, "y": 0})
    for rows, pieces in ((1, 2), (4, 1)):
        assert len(planned(NAMELESS, [(rows, 3), (rows, 2)], pieces, {"x": 0, "y": 0}).rows) == 1


def test_input_without_the_axis_is_refused_where_said_whole_where_learned() -> None:
    spec = model({"x": (), "w": (None, 3)}, {"y": ()})
    split = said(spec, {"x": 2, "w": 0}, {"y": 0})
    assert cut_batch(spec, [(5, 6, 4), (4, 3)], 2, split).rows == (2, 2)
    with pytest.raises(InvalidInputError, match=r"'x' has 1 dimensions \[4\], expected an axis 2"):
        cut_batch(spec, [(4,), (4, 3)], 2, split)
    assert cut_batch(spec, [(4,), (4, 3)], 2, replace(split, known="learned")).rows == (1,)


@pytest.mark.parametrize("axis", [-1, 2, 1.0, True])
def test_axis_that_does_not_exist_is_refused(axis: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"batch_axes\['x'\]: got .*from 0 to 1"):
        said(SYMBOLIC, {"x": axis})
    with pytest.raises(InvalidInputError, match=r"output_axes\['y'\]: got .*from 0 to 1"):
        said(SYMBOLIC, None, {"y": axis})


# What is refused.

TWO = model({"x": ("batch", 3), "y": ("batch", 2)}, {"z": ("batch", 1)})
TWO_FIXED = model({"x": (2, 3), "y": (4, 3)}, {"z": (2, 1)})


@pytest.mark.parametrize(
    ("spec", "shapes", "axes", "text"),
    [
        (SYMBOLIC, [(4, 5)], (), r"input 'x' has size 5 in dimension 1, expected 3"),
        (TWO, [(4, 3), (6, 2)], ({"x": 0, "y": 0},), r"'x' and 'y' .* together.*4 rows.*has 6"),
        (FIXED, [(7, 3)], ({"x": 0}, {"y": 0}), "multiple"),
        (FIXED, [(8, 3)], ({"x": 0},), r"output 'y' has no axis.*output_axes=\{'y': 0\}"),
        (
            TWO_FIXED,
            [(6, 3), (8, 3)],
            ({"x": 0, "y": 0}, {"z": 0}),
            r"'x' and 'y'.*3 pieces.*8 rows",
        ),
        (SYMBOLIC, [(4, 3)], ({"z": 0},), r"batch_axes: got unknown input 'z'.*\['x'\]"),
        (SYMBOLIC, [(4, 3)], ({}, {"x": 0}), r"output_axes: got unknown output 'x'.*\['y'\]"),
    ],
)
def test_request_that_does_not_fit_is_refused(
    spec: ModelSpec, shapes: Sequence[Shape], axes: tuple[Axes, ...], text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        planned(spec, shapes, 2, *axes)


# No rows.


def test_batch_of_no_rows_is_answered_without_a_shard() -> None:
    assert not planned(SYMBOLIC, [(0, 3)], 1).rowwise
    assert planned(SYMBOLIC, [(0, 3)], 4) == Cut(
        rows=(),
        inputs=(InputCut(axis=0, shapes=()),),
        outputs=(OutputJoin(axis=0, shapes=(), shape=(0, 5)),),
    )


@pytest.mark.parametrize("shape", [(5,), ("classes", 5), (None, 5), ("batch", "found")])
def test_batch_of_no_rows_runs_whole_where_an_output_does_not_follow(shape: Dimensions) -> None:
    spec = model({"x": ("batch", 3)}, {"y": ("batch", 2), "other": shape})
    cut = planned(spec, [(0, 3)], 2)
    assert cut.rows == (1,)
    assert cut.inputs == (InputCut(axis=None, shapes=((0, 3),)),)
    assert cut.outputs[0] == joined(None, (0, 2))


def test_fixed_batch_of_no_rows_is_refused_where_an_output_does_not_follow() -> None:
    spec = model({"x": (2, 3)}, {"y": (2, 5), "table": (7,)})
    with pytest.raises(InvalidInputError, match="got a batch of 0 rows"):
        planned(spec, [(0, 3)], 2, {"x": 0}, {"y": 0, "table": None})


# Outputs.


THREE = ["worker 4", "worker 0", "worker 2"]


def unknown(axis: int | None, **known: Any) -> OutputJoin:
    """An output whose shapes are not known before the run."""
    return OutputJoin(axis=axis, shapes=None, shape=None, **known)


@pytest.mark.parametrize(
    ("join", "shapes", "text"),
    [
        (
            joined(0, (3, 7), (2, 7)),
            [(3, 7), (3, 7)],
            r"axis 0, .*\[2, 7\] from worker 0 .*\[3, 7\]",
        ),
        (joined(0, (3,), (2,)), [(3,), (2, 1)], r"\[2\] from worker 0 .* got \[2, 1\]"),
        (unknown(0), [(2, 9), (2, 8)], r"\[\?, 9\] from worker 0 .*, got \[2, 8\]"),
        (unknown(0, rank=2), [(3, 9, 1), (2, 9, 1)], r"\[\?, \?\] from worker 4 .*\[3, 9, 1\]"),
        (unknown(0), [(), ()], r"expected \[\?\] .* got \[\]"),
        (unknown(None), [(1, 7), (1, 7), (3, 7)], r"the same .*\[1, 7\] from worker 2 .*\[3, 7\]"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_named(join: OutputJoin, shapes: list[Shape], text: str) -> None:
    with pytest.raises(JoinError, match=f"output 'y' .*{text}"):
        check_join("y", join, shapes, THREE[: len(shapes)])


# Where the parts lie.


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
    """The parts of an array that a cut speaks of."""
    parts = np.split(whole, np.cumsum([shape[axis] for shape in shapes])[:-1], axis)
    assert [part.shape for part in parts] == [*shapes]
    return parts


@given(models(), st.integers(1, 40), st.integers(1, 12))
def test_shards_of_any_model_join_to_the_whole(spec: ModelSpec, rows: int, pieces: int) -> None:
    shared: Axes = {item.name: None for item in spec.outputs if "batch" not in item.shape}
    shapes = [given_shape(item, rows) for item in spec.inputs]
    cut = planned(spec, shapes, pieces, None, shared)
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
            assert join.lengths == cut.rows
            check_join(item.name, join, join.shapes, [f"worker {i}" for i in range(len(cut.rows))])
            parts = cut_by(numbered(shape), join.axis, join.shapes)
            assert np.array_equal(np.concatenate(parts, join.axis), numbered(shape))


@given(batch=st.integers(1, 5), count=st.integers(0, 9), pieces=st.integers(1, 4))
def test_shards_of_any_fixed_batch_join_to_the_whole(batch: int, count: int, pieces: int) -> None:
    spec = model({"x": (batch, 3), "y": (2 * batch,)}, {"z": (batch, 7)})
    rows = count * batch
    cut = planned(spec, [(rows, 3), (2 * rows,)], pieces, {"x": 0, "y": 0}, {"z": 0})
    assert cut.rows == (1,) * count
    assert [len(part.shapes) for part in cut.inputs] == [count, count]
    assert cut.outputs[0].shape == (rows, 7)
    assert cut.outputs[0].shapes == ((batch, 7),) * count
    if count > 1:
        for part, shape in zip(cut.inputs, [(rows, 3), (2 * rows,)], strict=True):
            parts = cut_by(numbered(shape), 0, part.shapes)
            assert np.array_equal(np.concatenate(parts), numbered(shape))


# Rows that may share a run with rows of other requests.


PAIRED = model({"x": ("n", 3)}, {"y": ("n", "n")})


@pytest.mark.parametrize(
    ("spec", "shape", "axes"),
    [
        pytest.param(SYMBOLIC, (4, 3), (), id="batch"),
        pytest.param(model({"x": (3, "n")}, {"y": ("n",)}), (3, 4), (), id="axis 1"),
        pytest.param(PAIRED, (4, 3), ({"x": 0}, {"y": 1}), id="paired output, said"),
        pytest.param(UNET, (2, 4, 8, 8), (), id="whole input"),
    ],
)
def test_rows_of_a_batch_of_any_size_may_go_with_others(
    spec: ModelSpec, shape: Shape, axes: tuple[Axes, ...]
) -> None:
    shapes = [shape, (1,), (2, 77, 768)][: len(spec.inputs)]
    for pieces in (1, 2):
        cut = planned(spec, shapes, pieces, *axes)
        assert cut.rowwise
        assert all(join.axis is not None for join in cut.outputs)
        assert cut.input_axes == tuple(item.axis for item in cut.inputs)


@pytest.mark.parametrize(
    ("inputs", "output", "axes"),
    [
        pytest.param((2, 3), (2, 3), ({"x": 0}, {"y": 0}), id="fixed batch, several"),
        pytest.param(("batch", 3), ("batch", 3), ({"x": None},), id="said to be whole"),
        pytest.param(("batch", 3), (4,), (), id="no batch in y"),
        pytest.param(("batch", 3), (4,), (None, {"y": None}), id="the same for all"),
        pytest.param(("batch", 3), ("batch", "found"), (), id="unknown size"),
        pytest.param(("batch", 3), ("batch+1", 3), (), id="expression"),
        pytest.param(("n", 3), ("n", "n"), ({"x": 0},), id="paired output"),
        pytest.param((None, 3), (None, 5), (), id="no batch"),
        pytest.param(("seq", 3), ("seq", 3), (), id="sequence"),
    ],
)
def test_rows_that_are_not_known_to_be_independent_go_alone(
    inputs: Dimensions, output: Dimensions, axes: tuple[Axes, ...]
) -> None:
    assert not planned(model({"x": inputs}, {"y": output}), [(4, 3)], 1, *axes).rowwise


# What a request may be cut along.


def guesses(
    spec: ModelSpec, shapes: Mapping[str, Shape], inputs: Axes | None = None
) -> list[dict[str, int | None]]:
    """What a request of these shapes may be cut along."""
    axes = SaidAxes(inputs=inputs or {})
    found = candidates(spec, shapes, said(spec, inputs), axes, least_rows=0)
    return [dict(axes) for axes in found]


def test_axes_that_are_said_stand_and_the_others_follow_their_rows() -> None:
    spec = model({"x": (None, None), "w": (None,), "v": (None, None)}, {"y": (None,)})
    shapes = {"x": (4, 6), "w": (6,), "v": (4, 6)}
    assert guesses(spec, shapes, {"x": 1}) == [
        {"x": 1, "w": None, "v": None},
        {"x": 1, "w": 0, "v": 1},
        {"x": 1, "w": 0, "v": None},
    ]
    assert guesses(spec, shapes, {"x": None, "v": None}) == [{"x": None, "w": 0, "v": None}]
    assert guesses(spec, shapes, {"x": None, "w": None, "v": None}) == []


@given(st.data())
def test_hypotheses_are_few_differ_and_cut_inputs_of_one_size(data: st.DataObject) -> None:
    sizes = st.lists(st.sampled_from([1, 2, 3]), max_size=3)
    shapes = {f"in{i}": tuple(data.draw(sizes)) for i in range(data.draw(st.integers(1, 3)))}
    names: st.SearchStrategy[Dimension] = st.sampled_from([None, "batch", "seq", "a"])
    inputs = {
        name: tuple(data.draw(names | st.just(size)) for size in shape)
        for name, shape in shapes.items()
    }
    spec = model(inputs, {"y": (None,)})
    found = guesses(spec, shapes)
    declared = dict(said(spec).inputs)
    assert len(found) <= 3
    for i, axes in enumerate(found):
        assert axes not in found[:i]
        assert [*axes] == [*shapes]
        if axes != declared:
            assert rows_of(shapes, axes) is not None
            for name, axis in axes.items():
                assert axis is None or not isinstance(inputs[name][axis], int)
    if not found:
        assert all(isinstance(size, int) for shape in inputs.values() for size in shape)


def test_axes_of_different_symbols_are_never_cut_together() -> None:
    spec = model({"tokens": ("n",), "lengths": ("b",), "more": (None,)}, {"y": (None,)})
    found = guesses(spec, {"tokens": (16,), "lengths": (16,), "more": (16,)})
    assert {"tokens": None, "lengths": 0, "more": 0} in found
    for axes in found:
        assert axes["tokens"] is None or axes["lengths"] is None


def test_cut_of_inputs_that_no_symbol_ties_is_a_guess() -> None:
    spec = model({"x": ("n", 3), "y": ("n",), "z": (None, 4)}, {"o": (None,)})
    nobody = SaidAxes()
    assert not is_guess(spec, {"x": 0, "y": 0, "z": None}, nobody)
    assert not is_guess(spec, {"x": None, "y": None, "z": 0}, nobody)
    assert is_guess(spec, {"x": 0, "y": 0, "z": 0}, nobody)
    assert is_guess(spec, {"x": 0, "y": 0, "z": 0}, SaidAxes(inputs={"z": 0}))
    assert not is_guess(spec, {"x": 0, "y": 0, "z": 0}, SaidAxes(inputs={"x": 0, "y": 0, "z": 0}))


@given(st.integers(0, 100))
def test_uneven_parts_end_with_a_single_row(count: int) -> None:
    parts = split_unevenly(count)
    assert sum(parts) == count
    assert len(parts) == {0: 1, 1: 1, 2: 2, 3: 2}.get(count, 3)
    assert parts[-1] == min(count, 1)
    assert all(parts) or not count


@pytest.mark.parametrize("size", ["batch", "2*batch", "batch * 3"])
def test_output_of_a_multiple_of_the_batch_has_its_shape_before_the_run(size: str) -> None:
    spec = model({"x": ("batch", 3)}, {"y": (size, 3)})
    cut = cut_batch(spec, [(5, 3)], 2, replace(said(spec), outputs={"y": 0}))
    times = {"batch": 1, "2*batch": 2, "batch * 3": 3}[size]
    assert cut.outputs[0].shapes == ((3 * times, 3), (2 * times, 3))
    assert why_apart(spec, cut, checked=True) == ""
    assert bool(why_apart(spec, cut, checked=False)) is (times > 1)


@pytest.mark.parametrize("size", [None, "hits", 5])
def test_requests_go_apart_where_the_model_does_not_declare_the_batch_of_an_output(
    size: Dimension,
) -> None:
    spec = model({"x": ("batch", 3)}, {"y": (size, 3)})
    shown = replace(said(spec), outputs={"y": 0}, sizes={"y": 1})
    assert "y" in why_apart(spec, cut_batch(spec, [(5, 3)], 1, shown), checked=True)
