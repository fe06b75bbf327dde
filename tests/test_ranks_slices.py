"""Tests of mcinfer/ranks/slices.py: ranks as threads run slices, and give what the whole model gives."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from mcinfer.engines.adapters import open_engine
from mcinfer.engines.base import BoundRun, Engine, Strings
from mcinfer.errors import (
    BuildError,
    ClosedError,
    CollectiveTimeoutError,
    InvalidInputError,
    McinferError,
    PredictError,
)
from mcinfer.ranks import open_slice
from mcinfer.ranks.collectives.base import Group, PeerFailedError
from mcinfer.ranks.layouts import MAX_LAYOUTS
from mcinfer.ranks.slices import RankEngine, prepare
from mcinfer.ranks.slicing.segments import cut_segments
from mcinfer.ranks.slicing.slicer import write_slices
from mcinfer.specs import numpy_dtype
from tests.engine_requests import engine_request
from tests.engine_tensors import buffer, content
from tests.sliced_models import (
    FRAGILE_PLACES,
    Sliced,
    fragile,
    mlp,
    place,
    save,
    save_ranks,
)
from tests.thread_ranks import results

_T = TypeVar("_T")
PATIENCE = 30.0
Arrays = dict[str, NDArray[Any]]
Weights = dict[str, Any]


def run_ranks(size: int, rank: Callable[[Group, ExitStack], _T]) -> list[_T]:
    """What the function returns in each rank; its stack ends before the group does."""

    def body(group: Group) -> _T:
        with ExitStack() as stack:
            return rank(group, stack)

    return results(size, body)


class Bound:
    """A run with arrays of its own for inputs and outputs."""

    def __init__(self, engine: Engine, inputs: Arrays, shapes: Mapping[str, Sequence[int]]) -> None:
        specs = {spec.name: spec for spec in engine.spec.outputs}
        self.inputs = {name: array.copy() for name, array in inputs.items()}
        self.outputs = {
            name: np.full(shape, 77, numpy_dtype(specs[name].element_type))
            for name, shape in shapes.items()
        }
        self.run: BoundRun = engine.bind(
            [buffer(spec.name, self.inputs[spec.name]) for spec in engine.spec.inputs],
            [buffer(name, array) for name, array in self.outputs.items()],
        )

    def __call__(self, inputs: Arrays) -> Arrays:
        """The outputs for inputs of the same shapes: those bound and those that the run produced."""
        for name, array in inputs.items():
            self.inputs[name][...] = array
        produced = {item.name: content(item) for item in self.run.execute()}
        return {name: array.copy() for name, array in self.outputs.items()} | produced


def opened(
    stack: ExitStack,
    group: Group,
    model: Path,
    *,
    folder: Path | None = None,
    deliver_everywhere: bool = True,
    **options: Any,
) -> RankEngine:
    """This rank's engine, closed with the stack."""
    engine = RankEngine(
        engine_request(model, **options), group, folder, deliver_everywhere=deliver_everywhere
    )
    stack.callback(engine.close)
    return engine


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run_all(
    model: Sliced, inputs: Sequence[Arrays], shapes: Sequence[dict[str, Sequence[int]]]
) -> list[list[Arrays]]:
    """Each rank's outputs of several runs, each one executed three times: found, bound, bound again."""

    def rank(group: Group, stack: ExitStack) -> list[Arrays]:
        engine = opened(stack, group, model.slices[group.rank])
        found = []
        for given, bound in zip(inputs, shapes, strict=True):
            run = Bound(engine, given, bound)
            outputs = [run(given) for _ in range(3)]
            for other in outputs[1:]:
                for name, array in outputs[0].items():
                    np.testing.assert_array_equal(array, other[name])
            found.append(outputs[0])
        return found

    return run_ranks(len(model.slices), rank)


def bound_run(
    stack: ExitStack, group: Group, model: Sliced | Sequence[Path], **options: Any
) -> tuple[RankEngine, Bound, Arrays]:
    """This rank's engine of an MLP, a run of it, and what the run is for."""
    slices = model.slices if isinstance(model, Sliced) else model
    engine = opened(stack, group, slices[group.rank], **options)
    given: Arrays = {"x": normal(1, 4, 16)}
    return engine, Bound(engine, given, {"y": (4, 16)}), given


def assert_whole(model: Sliced, inputs: Sequence[Arrays], found: list[list[Arrays]]) -> None:
    """All ranks have the same bits, close to those of the whole model."""
    for number, given in enumerate(inputs):
        expected = model.expected(given)
        for name, wanted in zip(found[0][number], expected, strict=True):
            for outputs in found:
                np.testing.assert_array_equal(outputs[number][name], found[0][number][name])
            difference = np.abs(found[0][number][name] - wanted).max()
            assert difference <= 1e-5 * np.abs(wanted).max()


# Tensor slices.


@pytest.mark.parametrize(
    ("ranks", "width", "batches"),
    [(1, 16, [1, 5, 3, 5]), (2, 16, [1, 5, 3, 5]), (4, 16, [5]), (2, 64, [3000])],
)
def test_ranks_of_an_mlp_give_the_same_bits_close_to_the_whole(
    tmp_path: Path, ranks: int, width: int, batches: list[int]
) -> None:
    model = mlp(tmp_path, ranks, width=width)
    inputs = [{"x": normal(batch, batch, width)} for batch in batches]
    found = run_all(model, inputs, [{"y": given["x"].shape} for given in inputs])
    assert_whole(model, inputs, found)


def dist(operation: str, reduce_op: str = "", **numbers: Any) -> str:
    """A collective as NVIDIA's Polygraphy writes it."""
    numbers = {"root": -1, "group_size": 0, **numbers}
    values = [f'collective_operation="{operation}"']
    values += [f'reduce_op="{reduce_op}"'] if reduce_op else []
    return f"DistCollective<{', '.join(values + [f'{k}={n}' for k, n in numbers.items()])}>"


def test_each_kind_of_collective_gives_its_result(tmp_path: Path) -> None:
    """Six in one phase. Outputs have a place, none, or one of another shape."""
    kinds = {
        "total": dist("all_reduce", "sum"),
        "most": dist("ALL_REDUCE", "MAX"),
        "mean": dist("all_reduce", "avg", groups=[0, 1]),
        "joined": dist("all_gather", group_size=2),
        "share": dist("reduce_scatter", "sum"),
        "second": dist("broadcast", root=1),
    }
    body = "  ".join(f"{name} = {kind}(part)" for name, kind in kinds.items())
    outputs = ", ".join(f"float[?,?] {name}" for name in (*kinds, "again"))
    slices = save_ranks(
        tmp_path,
        f"""(float[n,3] x) => ({outputs}) {{
            part = Mul(x, factor)  {body}  again = AllGather<group_size=2, axis=-1>(share)
        }}""",
        [{"factor": np.float32(1)}, {"factor": np.float32(2)}],
    )

    def rank(group: Group, stack: ExitStack) -> None:
        engine = opened(stack, group, slices[group.rank])
        for rows in (4, 2, 4):
            x = normal(rows, rows, 3)
            shapes = {"second": [rows, 3], "joined": [2 * rows, 3], "mean": [rows + 1, 3]}
            run = Bound(engine, {"x": x}, shapes)
            shares = np.split(3 * x, 2)
            for _ in range(3):
                for name, expected in {
                    "total": 3 * x,
                    "most": np.maximum(x, 2 * x),
                    "mean": 1.5 * x,
                    "joined": np.concatenate([x, 2 * x]),
                    "share": shares[group.rank],
                    "second": 2 * x,
                    "again": np.concatenate(shares, 1),
                }.items():
                    np.testing.assert_allclose(run({"x": x})[name], expected, rtol=1e-6)

    run_ranks(2, rank)


BRANCHES = """
    early = Mul(x, two)  sum = AllReduce(x)
    least = ReduceMin<keepdims=0>(sum)  positive = Greater(least, zero)
    y = If(positive) <
        then_branch = t () => (float[2] p) { p = Add(early, sum) },
        else_branch = e () => (float[2] q) { q = Sub(early, sum) }>"""


@pytest.mark.parametrize(
    ("text", "x", "expected"),
    [
        # A collective's result, a constant; and collectives of an input and of constants.
        (
            """=> (float[?] total, float[?] gathered, float[?] negative, float[?] constant) {
                constant = Neg(two)  total = AllReduce(x)  gathered = AllGather<group_size=2, axis=0>(two)
                negative = AllReduce(constant)
            }""",
            [3, 4],
            [[6, 8], [2, 2], [-4], [-2]],
        ),
        # A subgraph reads values of an earlier phase.
        (f"=> (float[2] y) {{ {BRANCHES} }}", [1, 2], [[4, 8]]),
        (f"=> (float[2] y) {{ {BRANCHES} }}", [-1, 2], [[0, 0]]),
        # The package onnx does not know the operator, and its result is declared with another shape.
        (
            """=> (float[2,2] y) <float[400,2] part, float[400,2] sum> {
                part = com.microsoft.Inverse(x)  sum = AllReduce(part)  y = Add(part, sum)
            }""",
            [[2, 0], [0, 4]],
            [[[1.5, 0], [0, 0.75]]],
        ),
    ],
)
def test_values_that_cross_segments_are_those_of_the_graph(
    tmp_path: Path, text: str, x: Any, expected: list[Any]
) -> None:
    given = {"x": np.array(x, np.float32)}
    weights = {"two": np.array([2], np.float32), "zero": np.float32(0)}
    used = {name: array for name, array in weights.items() if name in text}
    path = save(tmp_path / "model0.onnx", f"(float{[*given['x'].shape]} x) {text}", used)

    def rank(group: Group, stack: ExitStack) -> None:
        run = Bound(opened(stack, group, path), given, {})
        for _ in range(3):
            assert [array.tolist() for array in run(given).values()] == expected

    run_ranks(2, rank)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16])
def test_other_element_types_are_exchanged(tmp_path: Path, dtype: int) -> None:
    """Types that NumPy lacks come from ml_dtypes."""
    text = f"narrow = Cast<to={dtype}>(x)  sum = AllReduce(narrow)  y = Cast<to=1>(sum)"
    path = save(tmp_path / "m.onnx", f"(float[n] x) => (float[n] y) {{ {text} }}")

    def rank(group: Group, stack: ExitStack) -> None:
        engine = opened(stack, group, path)
        for count in (5, 0, 3):
            x = np.arange(count, dtype=np.float32)
            run = Bound(engine, {"x": x}, {"y": (count,)})
            for _ in range(3):
                np.testing.assert_array_equal(run({"x": x})["y"], 3 * x)

    run_ranks(3, rank)


def test_runs_of_one_collective_do_not_overtake_each_other(tmp_path: Path) -> None:
    """Its memory would be written while the other rank reads that of the run before."""
    text = "(float[?] x) => (float[?] y) { part = Neg(x)  y = AllReduce(part) }"
    path = save(tmp_path / "model0.onnx", text)

    def rank(group: Group, stack: ExitStack) -> None:
        run = Bound(opened(stack, group, path), {"x": normal(0, 20000)}, {"y": (20000,)})
        for number in range(200):
            found = run({"x": np.full(20000, number + group.rank, np.float32)})["y"]
            assert (found == -(2 * number + 1)).all()

    run_ranks(2, rank)


def test_layouts_beyond_the_limit_get_new_memory(tmp_path: Path) -> None:
    model = mlp(tmp_path, 2, layers=1)
    batches = [*range(1, MAX_LAYOUTS + 3), 1, MAX_LAYOUTS + 2, 2]

    def rank(group: Group, stack: ExitStack) -> None:
        engine = opened(stack, group, model.slices[group.rank])
        runs: dict[int, Bound] = {}
        arenas = set()
        for batch in batches:
            given = {"x": normal(batch, batch, 16)}
            run = runs.setdefault(batch, Bound(engine, given, {"y": (batch, 16)}))
            for _ in range(2):
                found = run(given)["y"]
                np.testing.assert_allclose(found, model.expected(given)[0], rtol=1e-4, atol=1e-5)
            arenas.add(id(engine.arena))
            assert len(engine.arena.layouts) <= MAX_LAYOUTS
        assert len(arenas) == 2

    run_ranks(2, rank)


def written(folder: Path, text: str, tensor: int, pipeline: int, weights: Arrays) -> Sliced:
    """A model, and its slices as the slicer writes them."""
    whole = save(folder / "whole.onnx", text, weights)
    (folder / "slices").mkdir()
    write_slices(whole, folder / "slices", tensor=tensor, pipeline=pipeline)
    slices = [folder / "slices" / f"model{rank}.onnx" for rank in range(tensor * pipeline)]
    return Sliced(whole=whole, slices=tuple(slices))


@pytest.mark.parametrize(
    ("tensor", "pipeline", "everywhere"),
    [(2, 1, False), (1, 2, False), (1, 2, True), (2, 2, False), (2, 2, True)],
)
def test_output_that_is_an_input_is_that_of_its_own_run(
    tmp_path: Path, tensor: int, pipeline: int, everywhere: bool
) -> None:
    weights: Arrays = {name: normal(seed, 32, 32) for seed, name in enumerate(("w0", "w1"))}
    text = """(float[batch,32] x) => (float[batch,32] x, float[batch,32] y) {
        h = MatMul(x, w0)  r = Relu(h)  y = MatMul(r, w1)
    }"""
    slices = written(tmp_path, text, tensor, pipeline, weights).slices
    given = [{"x": normal(seed, 3, 32)} for seed in range(8)]

    def rank(group: Group, stack: ExitStack) -> None:
        engine = opened(stack, group, slices[group.rank], deliver_everywhere=everywhere)
        kept = Bound(engine, given[0], {"x": (3, 32), "y": (3, 32)})
        for inputs in given:
            for run in (kept, Bound(engine, inputs, {}), Bound(engine, inputs, {"x": (3, 32)})):
                found = run(inputs)
                run.inputs["x"][...] = 0  # it is the caller's again
                group.barrier()  # runs do not overlap
                if everywhere or group.rank == len(slices) - tensor:  # the first of the last stage
                    np.testing.assert_array_equal(found["x"], inputs["x"])
                    wanted = np.maximum(inputs["x"] @ weights["w0"], 0) @ weights["w1"]
                    np.testing.assert_allclose(found["y"], wanted, rtol=1e-3, atol=1e-3)

    run_ranks(len(slices), rank)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_input_whose_number_of_axes_the_model_does_not_say_may_have_any(
    tmp_path: Path, tensor: int, pipeline: int
) -> None:
    text = "(float[] x) => (float[] y) { h = Neg(x)  y = Abs(h) }"
    slices = written(tmp_path, text, tensor, pipeline, {}).slices

    def rank(group: Group, stack: ExitStack) -> None:
        engine = opened(stack, group, slices[group.rank])
        for shape in ((3, 2), (4,), (1, 2, 3), (3, 2)):
            given = {"x": -normal(1, *shape)}
            for _ in range(2):
                np.testing.assert_array_equal(Bound(engine, given, {})(given)["y"], abs(given["x"]))

    run_ranks(2, rank)


def test_strings_pass_beside_the_collectives(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx",
        "(float[2] x, string[2] s) => (float[2] y, string[2] t) { t = Identity(s)  y = AllReduce(x) }",
    )

    def rank(group: Group, stack: ExitStack) -> None:
        engine = opened(stack, group, path)
        x = normal(1, 2)
        words = Strings(name="s", shape=(2,), values=("a", "b"))
        y = np.empty(2, np.float32)
        run = engine.bind([buffer("x", x), words], [buffer("y", y)])
        for _ in range(3):
            (produced,) = run.execute()
            assert isinstance(produced, Strings)
            assert produced.values == ("a", "b")
            np.testing.assert_array_equal(y, 2 * x)

    run_ranks(2, rank)


# Shapes that depend on the data.


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def test_shapes_that_change_with_the_data_are_right_each_time(
    tmp_path: Path, ranks: tuple[int, int]
) -> None:
    """y: the positive elements of x, added over the ranks of a layer; z: that many times y."""
    positive = "is_positive = Greater(part, zero)  kept = Compress<axis=0>(part, is_positive)"
    zero = {"zero": np.float32(0)}
    if ranks == (2, 1):
        body = f"half = Mul(x, factor)  part = AllReduce(half)  {positive}  y = AllReduce(kept)"
        text = f"(float[4] x) => (float[k] y, float[k] z) {{ {body}  z = Neg(y) }}"
        own: Weights = zero | {"factor": np.float32(0.5)}
        slices, count = save_ranks(tmp_path, text, [own, own]), 2
    else:
        about = partial(place, outputs=["y", "z"], shape=["k"], inputs={"x": [4]}, pipeline=2)
        paths = [tmp_path / f"model{rank}.onnx" for rank in range(2)]
        first = f"(float[4] x) => (float[k] kept) {{ part = Identity(x)  {positive} }}"
        last = "(float[k] kept) => (float[k] y, float[k] z) { y = Identity(kept)  z = Neg(y) }"
        slices, count = (
            (
                save(paths[0], first, zero, metadata=about(0, sends={"kept": [1]})),
                save(paths[1], last, metadata=about(1, receives={"kept": 0})),
            ),
            1,
        )

    def rank(group: Group, stack: ExitStack) -> None:
        given = {"x": np.array([1, 2, -3, 4], np.float32)}
        run = Bound(opened(stack, group, slices[group.rank]), given, {"y": (3,)})
        for _ in range(2):
            assert run(given)["z"].tolist() == [-1 * count, -2 * count, -4 * count]
        for _ in range(2):
            assert run({"x": -given["x"]})["z"].tolist() == [-3 * count]
            assert run(given)["y"].tolist() == [1 * count, 2 * count, 4 * count]

    run_ranks(2, rank)


# Pipelines.


def stages_of(folder: Path, stages: int, tensor: int = 1) -> Sliced:
    """Three layers. The first one's result is an output, and goes to the last one as well."""
    weights: Arrays = {f"w{seed}": normal(seed, 64, 64) / 8 for seed in range(3)}
    text = """(float[batch,64] x) => (float[batch,64] y, float[batch,64] first) {
        a = MatMul(x, w0)  first = Relu(a)  b = MatMul(first, w1)  c = Relu(b)
        d = MatMul(c, w2)  y = Add(d, first)
    }"""
    return written(folder, text, tensor, stages, weights)


@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (3, 2)])
def test_all_ranks_of_a_pipeline_get_all_outputs(tmp_path: Path, stages: int, tensor: int) -> None:
    model = stages_of(tmp_path, stages, tensor)
    inputs = [{"x": normal(batch, batch, 64)} for batch in (4, 1, 4)]
    shapes: list[dict[str, Sequence[int]]] = [
        {"y": given["x"].shape, "first": given["x"].shape} for given in inputs
    ]
    assert_whole(model, inputs, run_all(model, inputs, shapes))
    assert_whole(model, inputs, run_all(model, inputs, [{} for _ in inputs]))


def test_stages_overlap_and_give_only_what_they_make(tmp_path: Path) -> None:
    """The first stage begins two runs before the last one begins the first."""
    model = stages_of(tmp_path, 2)
    given = [{"x": normal(seed, 3, 64)} for seed in range(6)]
    ahead = threading.Semaphore(0)
    behind = threading.Semaphore(2)

    def rank(group: Group, stack: ExitStack) -> list[Arrays]:
        engine = opened(stack, group, model.slices[group.rank], deliver_everywhere=False)
        run = Bound(engine, given[0], {"y": (3, 64), "first": (3, 64)})
        found = [run(given[0])]
        for number, inputs in enumerate(given[1:]):
            if group.rank == 0:
                assert behind.acquire(timeout=PATIENCE)
                found.append(run(inputs))
                ahead.release()
            else:
                for _ in range(2 if number == 0 else number < len(given) - 2):
                    assert ahead.acquire(timeout=PATIENCE)
                found.append(run(inputs))
                behind.release()
        group.barrier()  # the last stage still acknowledges
        return found

    first, second = run_ranks(2, rank)
    for inputs, early, late in zip(given, first, second, strict=True):
        wanted = model.expected(inputs)
        np.testing.assert_allclose(late["y"], wanted[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(early["first"], wanted[1], rtol=1e-5, atol=1e-6)
        assert (early["y"] == 77).all()
        assert (late["first"] == 77).all()


# Failures.


def failure(run: Bound, given: Arrays) -> PredictError | None:
    try:
        run(given)
    except PredictError as exc:
        return exc
    return None


STAGES = pytest.mark.parametrize(("stages", "tensor"), [(1, 3), (3, 2)])


@STAGES
def test_failure_anywhere_ends_the_group_in_all_ranks(
    tmp_path: Path, stages: int, tensor: int
) -> None:
    """A segment of each rank fails: in the first run, which finds the shapes, or in a later one."""
    slices = fragile(tmp_path, stages, tensor)
    size = stages * tensor

    def rank(group: Group, stack: ExitStack, bad: int) -> str:
        failing, own = bad // FRAGILE_PLACES, group.rank
        try:
            engine = opened(stack, group, slices[own])
        except PeerFailedError as exc:  # others were ready before this rank
            return str(exc)
        for code in [*([-1] * (bad % 3)), bad]:
            given = {"x": np.arange(4, dtype=np.float32), "code": np.array(code, np.float32)}
            run = Bound(engine, given, {"y": (4,)})
            failed = failure(run, given)
            assert (failed is None) == (code < 0)
        assert isinstance(failed, PeerFailedError) == (own != failing)
        with pytest.raises(ClosedError, match=rf"closed: rank {failing} .* out of data"):
            run(given)
        assert engine.broken.startswith(f"rank {failing} (pid {os.getpid()}) failed: ")
        return str(failed)

    for number in range(size):
        bad = FRAGILE_PLACES * number + number % FRAGILE_PLACES
        assert all("out of data bounds" in text for text in run_ranks(size, partial(rank, bad=bad)))


@STAGES
def test_failure_anywhere_leaves_the_ranks_of_a_master_in_step(
    tmp_path: Path, stages: int, tensor: int
) -> None:
    """Each segment of each rank fails, in the first runs and in later ones."""
    slices = fragile(tmp_path, stages, tensor)
    size = stages * tensor
    codes = [code for bad in range(FRAGILE_PLACES * size) for code in (bad, -1)]
    codes = [*codes[:8], *codes[:1:-2], *codes]

    def rank(group: Group, stack: ExitStack) -> list[str]:
        engine = opened(stack, group, slices[group.rank], deliver_everywhere=False)
        failed: list[str] = []
        for number, code in enumerate(codes):
            x = np.arange(4, dtype=np.float32) + number
            given = {"x": x, "code": np.array(code, np.float32)}
            try:
                outputs = Bound(engine, given, {"y": (4,)} if number % 3 else {})(given)
            except PredictError as exc:
                failed.append(str(exc))
                continue
            failed.append("")
            if code < 0 and group.rank == size - tensor:
                expected = x * tensor ** (2 * stages) + (x * tensor**2 if stages > 2 else 0)
                np.testing.assert_array_equal(outputs["y"], expected)
        assert not engine.broken
        group.barrier()  # later stages may still acknowledge
        return failed

    for code, failed in zip(codes, zip(*run_ranks(size, rank), strict=True), strict=True):
        if code < 0:
            assert not any(failed)
        else:
            assert "out of data bounds" in failed[code // FRAGILE_PLACES]


def test_rank_that_does_not_come_is_a_time_out_that_ends_the_group(tmp_path: Path) -> None:
    model = mlp(tmp_path, 2)
    came = threading.Event()

    def rank(group: Group, stack: ExitStack) -> None:
        group.timeout = 0.5
        engine, run, given = bound_run(stack, group, model)
        run(given)
        if group.rank:
            assert came.wait(PATIENCE)
        else:
            with pytest.raises(CollectiveTimeoutError, match=r"rank 1 .* did not take part"):
                run(given)
            came.set()
        with pytest.raises(McinferError):
            run(given)
        assert "rank 1 (pid" in engine.broken

    run_ranks(2, rank)


def test_run_that_is_not_executed_ends_the_group_unless_all_ranks_refuse_it(tmp_path: Path) -> None:
    model = mlp(tmp_path, 2)

    def rank(group: Group, stack: ExitStack) -> None:
        engine, run, given = bound_run(stack, group, model)
        engine.skip(InvalidInputError("of another shape"))
        run(given)
        if group.rank:
            engine.skip(MemoryError("none is left"))
        else:
            with pytest.raises(PeerFailedError, match=r"rank 1 \(pid .* failed: none is left"):
                run(given)

    run_ranks(2, rank)


def test_invalid_inputs_and_cancellation_of_one_rank_change_nothing_and_a_closed_one_says_so(
    tmp_path: Path,
) -> None:
    """A cancellation would end the run in one rank alone, and the group."""
    model = mlp(tmp_path, 2)

    def rank(group: Group, stack: ExitStack) -> None:
        engine, run, given = bound_run(stack, group, model)
        for x in (normal(1, 4, 15), normal(1, 4, 16).astype(np.float64)):
            with pytest.raises(InvalidInputError, match="input 'x': got float"):
                engine.bind([buffer("x", x)], [])
        if group.rank:
            engine.cancel()
        np.testing.assert_allclose(run(given)["y"], model.expected(given)[0], rtol=1e-4, atol=1e-5)
        engine.close()
        with pytest.raises(ClosedError, match="this rank closed it"):
            run(given)

    run_ranks(2, rank)


# Loading.


def failing_loads(slices: Sequence[Path], message: Sequence[str], **options: Any) -> None:
    def rank(group: Group, stack: ExitStack) -> None:
        with pytest.raises(BuildError, match=message[group.rank]):
            opened(stack, group, slices[group.rank], **options)

    run_ranks(len(slices), rank)


def test_slice_that_cannot_be_loaded_fails_in_all_ranks(tmp_path: Path) -> None:
    model = mlp(tmp_path, 2)
    missing = tmp_path / "missing.onnx"
    failing_loads([model.slices[0], missing], ["rank 1.*failed.*missing", "^.*missing"])
    os.mkfifo(missing)
    failing_loads([missing, model.slices[1]], ["got a pipe", "rank 0.*failed.*got a pipe"])


def test_slices_that_do_not_fit_the_group_are_refused(tmp_path: Path) -> None:
    text = "(float[2] x) => (float[8] y) { y = AllGather<group_size=4, axis=0>(x) }"
    path = save(tmp_path / "whole.onnx", text)
    failing_loads([path, path], ["is for 4 ranks, got a group of 2"] * 2)
    stages = stages_of(tmp_path, 2).slices
    failing_loads(
        stages[::-1], [f"the slice of rank {1 - rank}, got rank {rank}" for rank in (0, 1)]
    )
    slices = mlp(tmp_path, 2).slices
    failing_loads(slices, ["weights of a sliced model"] * 2, variable_weights=("up0",))


def test_only_onnxruntime_runs_slices(tmp_path: Path) -> None:
    def rank(group: Group, _stack: ExitStack) -> None:
        with pytest.raises(BuildError, match="engine fake runs no slices"):
            open_slice("fake", engine_request(tmp_path / "m.json"), group)

    run_ranks(1, rank)


@pytest.mark.parametrize(
    "operator", ["AllReduce", "AllGather<group_size=1, axis=0>", dist("all_gather")]
)
def test_slice_without_a_group_is_refused_with_what_it_is(tmp_path: Path, operator: str) -> None:
    path = save(tmp_path / "model0.onnx", f"(float[4] x) => (float[4] y) {{ y = {operator}(x) }}")
    name = operator.partition("<")[0]
    with pytest.raises(BuildError, match=f"{name}.*the model is one rank's slice"):
        open_engine("onnxruntime", engine_request(path))


def test_prepared_segments_give_the_same(tmp_path: Path) -> None:
    model = mlp(tmp_path, 2, width=64)
    folders = [tmp_path / f"rank{rank}" for rank in range(2)]
    for path, folder in zip(model.slices, folders, strict=True):
        folder.mkdir()
        (tmp_path / f"{path.stem} cut").mkdir()
        cut_segments(path, tmp_path / f"{path.stem} cut")
        prepare(engine_request(path), tmp_path / f"{path.stem} cut", folder)
        path.with_suffix(".data").unlink()  # the folder has all weights

    def rank(group: Group, stack: ExitStack) -> Arrays:
        engine = opened(stack, group, model.slices[group.rank], folder=folders[group.rank])
        run = Bound(engine, {"x": normal(1, 4, 64)}, {"y": (4, 64)})
        run({"x": normal(2, 4, 64)})
        return run({"x": normal(1, 4, 64)})

    found = run_ranks(2, rank)
    assert_whole(model, [{"x": normal(1, 4, 64)}], [[outputs] for outputs in found])
