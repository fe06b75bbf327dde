"""Tests of mcinfer/worker/joined_runs.py: with the fake engine, members' tensors in ordinary memory."""

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer.config import Device
from mcinfer.engines import open_engine
from mcinfer.engines.base import Buffer, Engine, EngineRequest, Run, Strings
from mcinfer.errors import PredictError, ProtocolError
from mcinfer.specs import ELEMENT_TYPES, element_type_name, numpy_dtype
from mcinfer.worker.joined_runs import _MAX_RUNS, JoinedRuns, Member

Array = NDArray[Any]
Axes = tuple[tuple[int | None, ...], tuple[int, ...]]


class Counting:
    """The fake engine, and how often a run was bound."""

    def __init__(self, folder: Path, content: Mapping[str, Any]) -> None:
        path = folder / "model.json"
        path.write_text(json.dumps(content))
        request = EngineRequest(model=str(path), device=Device("cpu", 0), threads=1)
        self.engine: Engine = open_engine("fake", request)
        self.bound: list[tuple[Sequence[Buffer | Strings], Sequence[Buffer]]] = []
        bind = self.engine.bind

        def count(inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> Run:
            self.bound.append((inputs, outputs))
            return bind(inputs, outputs)

        self.engine.bind = count  # type: ignore[method-assign]
        self.runs = JoinedRuns(self.engine)


def content(
    element_type: str = "float32", shape: Sequence[object] = ("batch", 3), **acts: object
) -> dict[str, Any]:
    """y = 2 x + 1, and u = 3 x in the same shape."""
    return {
        "inputs": [["x", element_type, [*shape]]],
        "outputs": [
            ["y", element_type, [*shape], {"from": "x", "scale": 2, "add": 1}],
            ["u", element_type, [*shape], {"from": "x", "scale": 3}],
        ],
        **acts,
    }


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Counting]:
    """Of float32[batch, 3]."""
    counting = Counting(tmp_path, content())
    yield counting
    counting.runs.close()


def buffer(name: str, array: Array, element_type: str | None = None) -> Buffer:
    """Where an array lies; the array is to live as long."""
    return Buffer(
        name=name,
        element_type=element_type or element_type_name(array.dtype),
        shape=array.shape,
        address=int(array.__array_interface__["data"][0]),
        size=array.nbytes,
    )


def read(place: Buffer) -> Array:
    """An array over a buffer."""
    memory = memoryview((ctypes.c_char * place.size).from_address(place.address)).cast("B")
    return np.ndarray(place.shape, numpy_dtype(place.element_type), memory)


def member(x: Array) -> tuple[Member, dict[str, Array]]:
    """A request, and its arrays: x, and y and u for the answers. They are to live as long as it does."""
    arrays = {"x": x, "y": np.zeros_like(x), "u": np.zeros_like(x)}
    outputs = [buffer(name, arrays[name]) for name in ("y", "u")]
    return ([buffer("x", x)], outputs), arrays


def run(
    runs: JoinedRuns,
    members: Sequence[Member],
    axes: Axes,
    weights: Sequence[Buffer] = (),
    version: int = 0,
) -> None:
    joined = runs.bound(members, axes, weights, version)
    joined.gather(members, axes[0])
    assert joined.run.execute() == []
    joined.scatter(members, axes[1])


def numbers(*shape: int, first: float = 0.0, dtype: str = "float32") -> Array:
    return (np.arange(prod(shape)) + first).reshape(shape).astype(numpy_dtype(dtype))


ROWS: Axes = ((0,), (0, 0))


# Rows come together, and go back to where they belong.


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("counts", [(3, 1, 2), (1, 0, 2), (1,) * 20], ids=str)
def test_each_member_gets_the_answer_for_its_own_rows(
    tmp_path: Path, axis: int, counts: tuple[int, ...]
) -> None:
    shape: list[object] = [2, 5]
    shape.insert(axis, "batch")
    counting = Counting(tmp_path, content(shape=shape))
    members, given, answered = [], [], []
    for i, count in enumerate(counts):
        x = numbers(
            *(count if size == "batch" else int(str(size)) for size in shape), first=100 * i
        )
        one, answers = member(x)
        members.append(one)
        given.append(x)
        answered.append(answers)
    run(counting.runs, members, ((axis,), (axis, axis)))
    for x, answers in zip(given, answered, strict=True):
        np.testing.assert_array_equal(answers["y"], 2 * x + 1)
        np.testing.assert_array_equal(answers["u"], 3 * x)
    ((inputs, outputs),) = counting.bound
    whole = tuple(sum(counts) if size == "batch" else size for size in shape)
    assert {item.shape for item in (*inputs, *outputs)} == {whole}
    counting.runs.close()


def test_input_that_all_have_in_common_is_given_once_and_whole(tmp_path: Path) -> None:
    counting = Counting(
        tmp_path,
        {
            "inputs": [["t", "float32", [2, 2]], ["x", "float32", ["batch"]]],
            "outputs": [["y", "float32", ["batch"], {"from": "x", "scale": 2}]],
            "when": {"7": "fail"},
        },
    )
    t = numbers(2, 2, first=6)
    members, answers = [], []
    for count in (2, 3):
        x = numbers(count, first=count)
        y = np.zeros_like(x)
        members.append(([buffer("t", t), buffer("x", x)], [buffer("y", y)]))
        answers.append((x, y))
    run(counting.runs, members, ((None, 0), (0,)))
    for x, y in answers:
        np.testing.assert_array_equal(y, 2 * x)
    ((inputs, _),) = counting.bound
    assert [item.shape for item in inputs] == [(2, 2), (5,)]
    t[0, 0] = 7  # its value of this time, not of the last: the engine fails on it
    with pytest.raises(PredictError, match="told to fail"):
        run(counting.runs, members, ((None, 0), (0,)))
    counting.runs.close()


WHOLE_BYTES = [name for name, kind in ELEMENT_TYPES.items() if kind.bits and kind.bits % 8 == 0]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("element_type", WHOLE_BYTES)
def test_every_bit_of_every_element_type_is_copied(
    tmp_path: Path, element_type: str, axis: int
) -> None:
    """Also of NaNs, which arithmetic would change: what is gathered is given back unseen."""
    dtype = numpy_dtype(element_type)
    counting = Counting(tmp_path, content(element_type, ("a", "b", 3)))
    generator = np.random.default_rng(axis)
    pairs, raws = [], []
    for count in (1, 4, 2):
        shape = (count, 2, 3) if axis == 0 else (2, count, 3)
        high = 2 if element_type == "bool" else 256
        raw = generator.integers(0, high, prod(shape) * dtype.itemsize).astype(np.uint8)
        pairs.append(member(raw.view(dtype).reshape(shape)))
        raws.append(raw)
    members = [one for one, _ in pairs]
    joined = counting.runs.bound(members, ((axis,), (axis, axis)))
    joined.gather(members, (axis,))
    for place in joined.outputs:
        read(place).reshape(-1).view(np.uint8)[:] = (
            read(joined.inputs[0]).reshape(-1).view(np.uint8)
        )
    joined.scatter(members, (axis, axis))
    for raw, (_, answers) in zip(raws, pairs, strict=True):
        for answer in answers.values():
            np.testing.assert_array_equal(answer.reshape(-1).view(np.uint8), raw)
    counting.runs.close()


# Tensors that do not fit.


def one_of(x: Array, **changes: Any) -> Member:
    """A member whose input, or what `changes` names, differs from the others'."""
    (inputs, outputs), _ = member(x)
    inputs = changes.get("inputs", inputs)
    return inputs, changes.get("outputs", outputs)


X = numbers(2, 3)
BY_NAME = [buffer("z", X)]


@pytest.mark.parametrize(
    ("other", "axes", "words"),
    [
        pytest.param(one_of(numbers(2, 4)), ROWS, "'x'.* do not fit together", id="other sizes"),
        pytest.param(one_of(numbers(2, 3, 1)), ROWS, "'x'.* do not fit together", id="rank"),
        pytest.param(
            one_of(X, inputs=[buffer("x", X, "int32")]), ROWS, "'x'.* do not fit", id="type"
        ),
        pytest.param(one_of(X, inputs=BY_NAME), ROWS, "'x'.* do not fit together", id="name"),
        pytest.param(one_of(X, inputs=[]), ROWS, "differ in their tensors", id="no input"),
        pytest.param(
            one_of(X, outputs=BY_NAME * 2), ROWS, "'y'.* do not fit together", id="output's name"
        ),
        pytest.param(one_of(X), ((2,), (0, 0)), "'x' has no axis 2", id="axis of an input"),
        pytest.param(one_of(X), ((0,), (0, 7)), "'u' has no axis 7", id="axis of an output"),
        pytest.param(one_of(X), ((), (0, 0)), "differ in their tensors", id="too few axes"),
        pytest.param(one_of(numbers(3, 3)), ((None,), (0, 0)), "'x'.* do not fit", id="in common"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(
    plain: Counting, other: Member, axes: Axes, words: str
) -> None:
    first, _ = member(X)
    for members in ([first, other], [first, first, other]):
        with pytest.raises(ProtocolError, match=words):
            plain.runs.bound(members, axes)
    assert not plain.bound
    pairs = [member(numbers(n, 3)) for n in (1, 2)]
    run(plain.runs, [one for one, _ in pairs], ROWS)


# What is kept.


def test_scratch_grows_with_the_largest_run_and_smaller_ones_stay_right(plain: Counting) -> None:
    sizes = []
    for counts in ((1, 1), (50, 50), (1, 1), (2, 1), (100, 900), (1, 1), (50, 50)):
        pairs = [member(numbers(n, 3, first=n)) for n in counts]
        run(plain.runs, [one for one, _ in pairs], ROWS)
        for n, (_, answers) in zip(counts, pairs, strict=True):
            np.testing.assert_array_equal(answers["y"], 2 * numbers(n, 3, first=n) + 1)
        assert plain.runs._scratch is not None
        sizes.append(plain.runs._scratch.size)
    assert sizes == sorted(sizes)
    assert len({*sizes}) == 3
    # Bound onto other memory, the runs of before had to go with it.
    assert [inputs[0].shape[0] for inputs, _ in plain.bound] == [2, 100, 2, 3, 1000, 2, 100]


def test_more_shapes_than_are_kept_are_all_right(plain: Counting) -> None:
    for _ in range(2):
        for n in range(_MAX_RUNS + 10, 0, -1):
            pairs = [member(numbers(rows, 3, first=n)) for rows in (1, n)]
            run(plain.runs, [one for one, _ in pairs], ROWS)
            np.testing.assert_array_equal(pairs[1][1]["u"], 3 * numbers(n, 3, first=n))
            assert len(plain.runs._runs) <= _MAX_RUNS


def test_run_that_fails_leaves_the_next_one_right(tmp_path: Path) -> None:
    counting = Counting(tmp_path, content(when={"-1": "fail"}))
    bad = [member(np.full((1, 3), value, np.float32)) for value in (5, -1)]
    with pytest.raises(PredictError, match="told to fail"):
        run(counting.runs, [one for one, _ in bad], ROWS)
    pairs = [member(numbers(1, 3, first=i)) for i in range(2)]
    run(counting.runs, [one for one, _ in pairs], ROWS)
    np.testing.assert_array_equal(pairs[1][1]["y"], 2 * numbers(1, 3, first=1) + 1)
    counting.runs.close()


def test_closing_lets_the_memory_go_and_may_come_twice(plain: Counting) -> None:
    pairs = [member(numbers(n, 3)) for n in (1, 2)]
    run(plain.runs, [one for one, _ in pairs], ROWS)
    plain.runs.close()
    assert plain.runs._scratch is None
    assert not plain.runs._runs
    plain.runs.close()


# Weights.


def test_runs_of_the_same_rows_with_other_weights_are_bound_apart(tmp_path: Path) -> None:
    rules = {"y": {"from": "x", "add": "w"}, "u": {"from": "x", "scale": 3}}
    outputs = [[name, "float32", ["batch", 3], rule] for name, rule in rules.items()]
    own = [["w", "float32", [3], 1.0]]
    counting = Counting(tmp_path, content() | {"outputs": outputs, "weights": own})
    arrays = [numbers(3, first=100 * version) for version in range(3)]
    for version in (0, 1, 2, 1, 0, 2):
        pairs = [member(numbers(n, 3, first=version)) for n in (1, 2)]
        weights = [buffer("w", arrays[version])] if version else []
        run(counting.runs, [one for one, _ in pairs], ROWS, weights, version)
        for n, (_, answers) in zip((1, 2), pairs, strict=True):
            x = numbers(n, 3, first=version)
            np.testing.assert_array_equal(answers["y"], x + (arrays[version] if version else 1))
            np.testing.assert_array_equal(answers["u"], 3 * x)
    assert len(counting.bound) == 3
    counting.runs.close()
