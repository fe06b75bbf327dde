"""Tests of mcinfer/bench/inputs.py."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZIP_BZIP2, ZipFile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcinfer.bench.inputs import (
    InputOptions,
    examples,
    fixed_batch,
    likely_sizes,
    make_inputs,
    parse_input_options,
)
from mcinfer.errors import InvalidInputError
from mcinfer.sharding import Axes, SaidAxes, Split, cut_batch, first_split
from mcinfer.specs import ELEMENT_TYPES, Dimension, ModelSpec, TensorSpec, numpy_dtype

Inputs = Mapping[str, tuple[str, Sequence[Dimension]]]

RANDOM = parse_input_options([], {})
SQUARES: Inputs = {"x": ("float32", ("batch", 3))}
ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
TOKENS: Inputs = {
    "ids": ("int64", ("batch", "seq")),
    "mask": ("bool", ("batch", "seq")),
    "table": ("float16", (None, 8)),
    "scale": ("float32", ()),
}


def model(inputs: Inputs, output: Sequence[Dimension] = ("batch", 3)) -> ModelSpec:
    """A model with these inputs, and one float32 output of this shape."""
    specs = [
        TensorSpec(name=name, dtype=numpy_dtype(kind), shape=tuple(shape))
        for name, (kind, shape) in {**inputs, "y": ("float32", output)}.items()
    ]
    return ModelSpec(inputs=tuple(specs[:-1]), outputs=tuple(specs[-1:]))


def said(spec: ModelSpec, inputs: Axes | None = None, outputs: Axes | None = None) -> Split:
    """The split that is known before any request."""
    return first_split(spec, SaidAxes(inputs=inputs or {}, outputs=outputs or {}))


def made(spec: ModelSpec, batch: int, options: InputOptions) -> dict[str, NDArray[Any]]:
    """The arrays of a request, if the model's symbols alone define the batch."""
    return make_inputs(spec, said(spec), batch, options)


def with_dims(**dims: int) -> InputOptions:
    return parse_input_options([], dims)


def saved(path: Path, array: NDArray[Any]) -> Path:
    np.save(path, array)
    return path


@pytest.mark.parametrize("kind", ELEMENT_TYPES)
@pytest.mark.parametrize("shape", [("batch", 3), ()], ids=str)
def test_random_arrays_have_type_and_shape(kind: str, shape: tuple[Dimension, ...]) -> None:
    spec = model({"x": (kind, shape), "other": ("float32", ("batch",))})
    inputs = made(spec, 5, RANDOM)
    assert [*inputs] == ["x", "other"]
    x = inputs["x"]
    assert x.dtype == numpy_dtype(kind)
    assert x.shape == tuple(5 if size == "batch" else size for size in shape)
    assert x.flags.c_contiguous
    if kind == "string":
        assert all(type(value) is str for value in x.flat)
    elif kind != "bool":
        wide = x.astype(np.complex128)
        assert np.isfinite(wide).all()
        assert shape == () or len({*wide.flat}) > 1


@given(
    kind=st.sampled_from([kind for kind in ELEMENT_TYPES if "int" in kind]),
    low=st.integers(-(2**65), 2**65),
    count=st.integers(1, 2**66),
)
def test_integers_are_within_bounds_and_type(kind: str, low: int, count: int) -> None:
    options = InputOptions(files={}, archive=None, dims={}, integers=(low, low + count))
    spec = model({"x": (kind, ("batch",))})
    values = [int(value) for value in made(spec, 20, options)["x"]]
    bits = ELEMENT_TYPES[kind].bits
    least, end = (0, 1 << bits) if kind[0] == "u" else (-1 << bits - 1, 1 << bits - 1)
    if low < end and low + count > least:
        assert max(low, least) <= min(values)
        assert max(values) < min(low + count, end)
    else:  # the nearest that it has
        assert {*values} == {least if low < least else end - 1}


def test_dimensions_other_than_the_batch_are_those_of_the_options() -> None:
    inputs = made(model(TOKENS), 2, with_dims(**{"seq": 6, "table:0": 0}))
    shapes = {name: array.shape for name, array in inputs.items()}
    assert shapes == {"ids": (2, 6), "mask": (2, 6), "table": (0, 8), "scale": ()}
    expected = "'ids' .*, dimension 0 of input 'table' .* --dim seq=128 --dim table:0=128$"
    with pytest.raises(InvalidInputError, match=expected):
        made(model(TOKENS), 2, RANDOM)


@pytest.mark.parametrize(
    ("dims", "error"),
    [
        ({"sequence": 6}, r"--dim: got 'sequence', expected one of \['seq', 'table:0'\]"),
        ({"batch": 6}, "--dim batch: it is the batch, which --batch gives"),
        ({"table:1": 8}, "--dim: got 'table:1'"),
        ({"seq": 1 << 60, "table:0": 1}, r"input ids: int64\[batch, seq\] of shape .* cannot be"),
    ],
)
def test_sizes_that_no_input_has_are_refused(dims: Mapping[str, int], error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        made(model(TOKENS), 2, with_dims(**dims))


def test_fixed_batch_takes_multiples_of_it_and_other_inputs_stay_whole() -> None:
    inputs: Inputs = {"sample": ("float32", (2, 4, 8)), "timestep": ("int64", (1,))}
    spec = model(inputs, (2, 4, 8))
    split = said(spec, {"sample": 0}, {"y": 0})
    assert fixed_batch(spec, split) == 2
    shapes = [array.shape for array in make_inputs(spec, split, 6, RANDOM).values()]
    assert shapes == [(6, 4, 8), (1,)]
    assert cut_batch(spec, shapes, 2, split).rows == (1, 1, 1)
    expected = "--batch: got 3, expected a multiple of the model's fixed batch of 2"
    with pytest.raises(InvalidInputError, match=expected):
        make_inputs(spec, split, 3, RANDOM)


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        (model({"x": ("float32", ("seq", 3))}, ("seq", 5)), {"seq": 4}),
        (model({"x": ("float32", (None, 3))}, (None, 5)), {"x:0": 4}),
        (model({"x": ("float32", (4, 3))}, (4,)), {}),
    ],
    ids=["sequence", "unnamed", "fixed"],
)
def test_unknown_batch_takes_one_request(spec: ModelSpec, dims: Mapping[str, int]) -> None:
    options = with_dims(**dims)
    assert made(spec, 1, options)["x"].shape == (4, 3)
    with pytest.raises(
        InvalidInputError,
        match=r"--batch: got 2, expected 1: the model's batch is not known: .*x: float32.*--batch-axis",
    ):
        made(spec, 2, options)


@pytest.mark.parametrize(
    "array", [ROWS, ROWS.astype(">f4"), np.asfortranarray(ROWS)], ids=["npy", "swapped", "fortran"]
)
def test_rows_of_files_are_cut_or_repeated(tmp_path: Path, array: NDArray[Any]) -> None:
    np.savez(tmp_path / "x.npz", x=array)
    for text in (f"x={saved(tmp_path / 'x.npy', array)}", f"{tmp_path}/x.npz"):
        for batch, rows in ((1, [0]), (5, [0, 1, 0, 1, 0])):
            x = made(model(SQUARES), batch, parse_input_options([text], {}))["x"]
            assert np.array_equal(x, ROWS[rows])
            assert x.dtype == np.dtype("=f4")
            assert x.flags.c_contiguous


FILES: dict[str, NDArray[Any]] = {
    "wide": np.ones((2, 4), np.float32),
    "flat": np.ones(3, np.float32),
    "none": np.ones((0, 3), np.float32),
    "double": np.ones((2, 3)),
    "void": np.ones((2, 3), "V4"),
    "objects": np.array([[{}]], object),  # nothing is unpickled
    "q": ROWS,
}
SHAPE = "expected x: float32[batch, 3], with at least one row"
FOREIGN = "not an .npy or .npz file of numbers or text"


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        (["x.npy"], "--input: got 'x.npy', expected an archive"),
        (["x=x.npz"], "--input: got 'x=x.npz', expected"),
        (["a.npz", "b.npz"], "--input: got a.npz and b.npz, expected one archive"),
        (["x=a.npy", "x=b.npy"], "--input: got 'x' twice: a.npy and b.npy"),
        (["x=wide.npy"], f"--input wide.npy: input 'x' has shape [2, 4], {SHAPE}"),
        (["x=flat.npy"], f"--input flat.npy: input 'x' has shape [3], {SHAPE}"),
        (["x=none.npy"], f"--input none.npy: input 'x' has shape [0, 3], {SHAPE}"),
        (["x=double.npy"], "--input double.npy: input 'x' has dtype float64, expected float32"),
        (["x=void.npy"], "--input void.npy: input 'x' has dtype |V4"),
        *(
            ([f"x={name}.npy"], f"--input {name}.npy: {FOREIGN}")
            for name in ("empty", "cut", "text", "objects", "damaged")
        ),
        (["x=zip.npy"], "--input zip.npy: it holds 2 arrays"),
        (["in.npz"], "--input in.npz: got an array for 'q', expected one of ['x']"),
        (["q=q.npy"], "--input q.npy: got an array for 'q', expected one of ['x']"),
        (["gone.npz"], "--input gone.npz: No such file or directory"),
        (["x=gone.npy"], "--input gone.npy: No such file or directory"),
        (["x=pipe.npy"], "--input pipe.npy: it is no regular file"),
    ],
)
def test_options_and_files_that_do_not_fit_are_refused_with_their_place(
    texts: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, array in FILES.items():
        np.save(f"{name}.npy", array)
    np.savez("in.npz", x=ROWS, q=ROWS)
    with ZipFile("bzip2.npz", "w", ZIP_BZIP2) as archive:
        archive.write("q.npy")
    for name, data in (
        ("damaged", Path("bzip2.npz").read_bytes().replace(b"BZh9", b"BZh0")),  # an OSError
        ("empty", b""),
        ("cut", b"PK\x03\x04"),
        ("text", b"text"),
        ("zip", Path("in.npz").read_bytes()),
    ):
        Path(f"{name}.npy").write_bytes(data)
    os.mkfifo("pipe.npy")
    with pytest.raises(InvalidInputError) as caught:
        made(model(SQUARES), 2, parse_input_options(texts, {}))
    assert str(caught.value).startswith(error)


def shown(
    spec: ModelSpec, options: InputOptions = RANDOM, batches: Sequence[int] = (1,), **axes: int
) -> list[dict[str, NDArray[Any]]]:
    return [*examples(spec, said(spec, axes), batches, options)]


@pytest.mark.parametrize("kind", ["float32", "bool", "int8", "string"])
def test_examples_have_rows_that_differ_in_every_input_with_rows(kind: str) -> None:
    spec = model({"x": (kind, ("batch",)), "flag": (kind, ("batch", 1)), "s": (kind, ())})
    for seed in range(8):
        found = shown(spec, parse_input_options([], {}, seed=seed))
        assert len(found) >= 2
        # Of two numbers of rows: inputs that are cut together by chance agree in one.
        for arrays, rows in zip(found[-2:], (3, 4), strict=True):
            assert {arrays[name].shape[0] for name in ("x", "flag")} == {rows}
            assert all(len({*arrays[name].ravel().tolist()}) > 1 for name in ("x", "flag"))


def test_only_the_batch_has_no_likely_size() -> None:
    spec = model({"x": ("float32", ("a", 2)), "w": ("float32", ("batch", "t"))}, ("batch",))
    assert likely_sizes(spec, said(spec, {})) == {"a": 32, "t": 32}
    spec = model({"x": ("float32", (None, None)), "w": ("float32", ("a", 2))}, ())
    assert likely_sizes(spec, said(spec, {})) == {"x:1": 32}


def test_example_has_the_rows_of_files_and_the_sizes_of_options(tmp_path: Path) -> None:
    inputs: Inputs = {"x": ("float32", (None, 3)), "ids": ("int64", (None,))}
    spec = model(inputs, (None, 3))
    texts = [f"x={saved(tmp_path / 'x.npy', ROWS)}"]
    first, *_ = shown(spec, parse_input_options(texts, {}))
    assert np.array_equal(first["x"], ROWS)
    assert first["ids"].shape == (2,)
    # If files disagree, the longest gives the number of rows.
    texts.append(f"ids={saved(tmp_path / 'ids.npy', np.arange(5))}")
    first, *_ = shown(spec, parse_input_options(texts, {}))
    assert (first["x"].tolist(), first["ids"].tolist()) == (ROWS.tolist(), [*range(5)])
    square = model({"x": ("float32", (None, None))}, (None,))
    with pytest.raises(InvalidInputError, match="no size is known for dimension 1 of input 'x'"):
        shown(square)
    first, *_ = shown(square, with_dims(**{"x:0": 3}), x=1)
    assert first["x"].shape == (3, 3)
