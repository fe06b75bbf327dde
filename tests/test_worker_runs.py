"""Tests of mcinfer/worker/runs.py, with the fake engine and tensors in ordinary memory."""

import ctypes
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer.engines.adapters import open_engine
from mcinfer.engines.base import BoundRun, Buffer, Engine, Strings
from mcinfer.errors import PredictError, ProtocolError
from mcinfer.specs import element_type_name, numpy_dtype
from mcinfer.worker.runs import _MAX_RUNS, JoinedRuns, Member
from tests.engine_requests import engine_request

Array = NDArray[Any]
Axes = tuple[tuple[int | None, ...], tuple[int, ...]]


class Pool:
    """Joined runs of the fake engine, and the tensors of each run that was bound."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        path.write_text(json.dumps(content))
        request = engine_request(path)
        self.engine: Engine = open_engine("fake", request)
        self.bound: list[tuple[Sequence[Buffer | Strings], Sequence[Buffer]]] = []
        bind = self.engine.bind

        def record(inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
            self.bound.append((inputs, outputs))
            return bind(inputs, outputs)

        self.engine.bind = record  # type: ignore[method-assign]
        self.runs = JoinedRuns(self.engine)

    def run(
        self,
        members: Sequence[Member],
        axes: Axes,
        weights: Sequence[Buffer] = (),
        version: int = 0,
    ) -> None:
        assert self.runs.staged(members, axes, weights, version).execute() == ()

    def check(
        self,
        inputs: Sequence[Array],
        axes: Axes = ((0,), (0, 0)),
        weights: Sequence[Buffer] = (),
        version: int = 0,
        add: Any = 1,
    ) -> None:
        """Run requests with these inputs joined; each has to get its own answer."""
        pairs = [member(x) for x in inputs]
        self.run([one for one, _ in pairs], axes, weights, version)
        for x, (_, answers) in zip(inputs, pairs, strict=True):
            np.testing.assert_array_equal(answers["y"], 2 * x + add)
            np.testing.assert_array_equal(answers["u"], 3 * x)


Start = Callable[[Mapping[str, Any]], Pool]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Open a model's engine; what is open at the end of the test is closed."""
    with ExitStack() as stack:

        def start(content: Mapping[str, Any]) -> Pool:
            pool = Pool(tmp_path / "model.json", content)
            stack.callback(pool.runs.close)
            return pool

        yield start


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


def buffer(name: str, array: Array, element_type: str | None = None) -> Buffer:
    """The place of an array, which must live as long as this."""
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
    """A request, and its arrays: x, and y and u for the answers, which must live as long as it does."""
    arrays = {"x": x, "y": np.zeros_like(x), "u": np.zeros_like(x)}
    outputs = [buffer(name, arrays[name]) for name in ("y", "u")]
    return ([buffer("x", x)], outputs), arrays


def numbers(*shape: int, first: float = 0.0) -> Array:
    return (np.arange(prod(shape)) + first).reshape(shape).astype(np.float32)


# Rows come together, and go back to where they belong.


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("counts", [(3, 1, 2), (1, 0, 2), (1,) * 20], ids=str)
def test_each_member_gets_its_own_answer(start: Start, axis: int, counts: tuple[int, ...]) -> None:
    def shape(count: Any) -> list[Any]:
        return [*(2, 5)[:axis], count, *(2, 5)[axis:]]

    pool = start(content(shape=shape("batch")))
    given = [numbers(*shape(count), first=100 * i) for i, count in enumerate(counts)]
    pool.check(given, ((axis,), (axis, axis)))
    ((inputs, outputs),) = pool.bound
    assert {item.shape for item in (*inputs, *outputs)} == {tuple(shape(sum(counts)))}


def test_input_that_all_have_in_common_is_given_once_and_whole(start: Start) -> None:
    pool = start(
        {
            "inputs": [["t", "float32", [2, 2]], ["x", "float32", ["batch"]]],
            "outputs": [["y", "float32", ["batch"], {"from": "x", "scale": 2}]],
            "when": {"7": "fail"},
        }
    )
    t, inputs = numbers(2, 2, first=6), [numbers(2), numbers(3, first=3)]
    answers = [np.zeros_like(x) for x in inputs]
    members = [
        ([buffer("t", t), buffer("x", x)], [buffer("y", y)])
        for x, y in zip(inputs, answers, strict=True)
    ]
    pool.run(members, ((None, 0), (0,)))
    for x, y in zip(inputs, answers, strict=True):
        np.testing.assert_array_equal(y, 2 * x)
    assert [item.shape for item in pool.bound[0][0]] == [(2, 2), (5,)]
    t[0, 0] = 7  # each run reads the value of its own time: the engine fails on it
    with pytest.raises(PredictError, match="asked to fail"):
        pool.run(members, ((None, 0), (0,)))


def test_run_that_fails_scatters_nothing(start: Start) -> None:
    pool = start(content(when={"-1": "fail"}))
    request, arrays = member(np.full((2, 3), -1, np.float32))
    arrays["y"][:] = 5
    staged = pool.runs.staged([request], ((0,), (0, 0)))
    with pytest.raises(PredictError, match="asked to fail"):
        staged.execute()
    assert (arrays["y"] == 5).all()
    arrays["x"][:] = 1  # the same run, with inputs of its own time
    staged.execute()
    np.testing.assert_array_equal(arrays["y"], 3)


# Tensors that do not fit.

X = numbers(2, 3)
ONE, _ARRAYS = member(X)
INPUTS, OUTPUTS = ONE
BY_NAME = [buffer("z", X)]


@pytest.mark.parametrize(
    ("other", "axes", "words"),
    [
        pytest.param(member(numbers(2, 4))[0], ((0,), (0, 0)), "'x'.* do not fit", id="sizes"),
        pytest.param(member(numbers(2, 3, 1))[0], ((0,), (0, 0)), "'x'.* do not fit", id="rank"),
        pytest.param(
            ([buffer("x", X, "int32")], OUTPUTS), ((0,), (0, 0)), "'x'.* do not fit", id="type"
        ),
        pytest.param((BY_NAME, OUTPUTS), ((0,), (0, 0)), "'x'.* do not fit", id="name"),
        pytest.param(([], OUTPUTS), ((0,), (0, 0)), "differ in their tensors", id="no input"),
        pytest.param((INPUTS, BY_NAME * 2), ((0,), (0, 0)), "'y'.* do not fit", id="output's name"),
        pytest.param(ONE, ((2,), (0, 0)), "'x' has no axis 2", id="axis of an input"),
        pytest.param(ONE, ((0,), (0, 7)), "'u' has no axis 7", id="axis of an output"),
        pytest.param(ONE, ((), (0, 0)), "differ in their tensors", id="too few axes"),
        pytest.param(member(numbers(3, 3))[0], ((None,), (0, 0)), "'x'.* do not fit", id="common"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(
    start: Start, other: Member, axes: Axes, words: str
) -> None:
    pool = start(content())
    with pytest.raises(ProtocolError, match=words):
        pool.runs.staged([ONE, ONE, other], axes)
    assert not pool.bound
    pool.check([X, X])


# Runs and memory that are kept.


def test_scratch_grows_with_the_largest_run_and_smaller_ones_stay_right(start: Start) -> None:
    pool, sizes = start(content()), []
    for counts in ((1, 1), (50, 50), (1, 1), (2, 1), (100, 900), (1, 1), (50, 50)):
        pool.check([numbers(n, 3, first=n) for n in counts])
        assert pool.runs._scratch is not None
        sizes.append(pool.runs._scratch.size)
    assert sizes == sorted(sizes)
    assert len({*sizes}) == 3
    # With the memory, the runs go that were bound onto it.
    assert [inputs[0].shape[0] for inputs, _ in pool.bound] == [2, 100, 2, 3, 1000, 2, 100]
    pool.runs.close()
    assert pool.runs._scratch is None


def test_more_shapes_than_are_kept_are_all_right(start: Start) -> None:
    pool = start(content())
    for _ in range(2):
        for n in range(_MAX_RUNS + 10, 0, -1):
            pool.check([numbers(rows, 3, first=n) for rows in (1, n)])
            assert len(pool.runs._runs) <= _MAX_RUNS


def test_runs_of_the_same_rows_with_other_weights_are_bound_apart(start: Start) -> None:
    model = content()
    model["outputs"][0][3] = {"from": "x", "scale": 2, "add": "w"}
    pool = start(model | {"weights": [["w", "float32", [3], 1.0]]})
    arrays = [numbers(3, first=100 * version) for version in range(3)]
    for version in (0, 1, 2, 1, 0, 2):
        weights = [buffer("w", arrays[version])] if version else []
        add = arrays[version] if version else 1
        pool.check([numbers(n, 3) for n in (1, 2)], weights=weights, version=version, add=add)
    assert len(pool.bound) == 3
