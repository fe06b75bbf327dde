"""Groups of ranks at their limits: many outputs, shapes that only a run shows, faults of one rank alone."""

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from mcinfer import (
    EngineOptions,
    Master,
    Parallel,
    PredictTimeoutError,
    RestartPolicy,
    Timeouts,
)
from tests.process.rank_group import assert_close, expected, rows, write_mlp
from tests.process.waiting import all_gone, pids, stop, wait_until
from tests.text_models import text_model

WIDTH = 32
WIDE = 1 << 18


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for the module: the slices of equal models are made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MCINFER_CACHE", str(tmp_path_factory.mktemp("ranks") / "cache"))
        yield


def write_chain(path: Path, ends: Sequence[str], outputs: Sequence[str]) -> Path:
    """x float32["batch", 32] through four products, h1 to h4, then nodes as text."""
    random = np.random.default_rng(3)
    weights = {f"w{n}": random.normal(0, 0.2, (WIDTH, WIDTH)).astype(np.float32) for n in range(4)}
    if any("wide" in end for end in ends):
        weights["wide"] = np.ones((WIDTH, WIDE), np.float32)
    body = "h1 = MatMul(x, w0)  h2 = MatMul(h1, w1)  h3 = MatMul(h2, w2)  h4 = MatMul(h3, w3)"
    text = f"(float[batch,{WIDTH}] x) => ({', '.join(outputs)}) {{ {body}  {'  '.join(ends)} }}"
    onnx.save(text_model(text, weights), str(path))
    return path


def test_stage_with_more_outputs_than_messages_may_wait_answers(tmp_path: Path) -> None:
    names = [f"y{number}" for number in range(70)]
    model = write_chain(
        tmp_path / "many.onnx",
        [f"{name} = Identity(h4)" for name in names],
        [f"float[batch,{WIDTH}] {name}" for name in names],
    )
    with Master(model, parallel=Parallel(pipeline=2)) as master:
        for _ in range(3):
            assert_close(master.predict({"x": rows(3)}), expected(model, {"x": rows(3)}))


@pytest.mark.parametrize("parallel", [Parallel(pipeline=2), Parallel(tensor=2)], ids=str)
def test_outputs_of_unknown_shapes_come_from_the_ranks_that_make_them(
    tmp_path: Path, parallel: Parallel
) -> None:
    model = write_chain(
        tmp_path / "unknown.onnx",
        ["low = NonZero(h1)", "high = NonZero(h4)"],  # made in both stages
        ["int64[2,low] low", "int64[2,high] high"],
    )
    with Master(model, parallel=parallel) as master:
        given = [{"x": rows(1 + number % 7, seed=number)} for number in range(21)]
        futures = [master.submit(each) for each in given]
        for each, future in zip(given, futures, strict=True):
            assert_close(future.result(timeout=60.0), expected(model, each))


def test_outputs_of_other_shapes_than_declared_are_those_of_their_ranks_also_if_empty(
    tmp_path: Path,
) -> None:
    model = write_chain(
        tmp_path / "other.onnx",
        ["r = Relu(h4)", "high = NonZero(r)"],
        ["int64[2,batch] low", "int64[2,batch] high"],
    )
    whole = onnx.load(str(model))
    # Beside the first product, so that the first stage makes it.
    whole.graph.node.insert(1, helper.make_node("NonZero", ["h1"], ["low"]))
    for weight in whole.graph.initializer:
        weight.CopyFrom(numpy_helper.from_array(np.eye(WIDTH, dtype=np.float32), weight.name))
    onnx.save(whole, str(model))
    x = np.zeros((1, WIDTH), np.float32)
    x[0, :7] = -1.0
    with Master(model, parallel=Parallel(pipeline=2), verify="never") as master:
        for given in (x, -x, x):
            answer = master.predict({"x": given})
            assert_close(answer, expected(model, {"x": given}))
            assert answer["high"].shape == (2, 0 if given is x else 7)


@pytest.mark.parametrize(
    ("parallel", "rank"),
    [(Parallel(tensor=2), 1), (Parallel(pipeline=2), 0), (Parallel(pipeline=2), 1)],
    ids=str,
)
def test_stopped_rank_costs_those_that_run_their_time_out_alone(
    tmp_path: Path, parallel: Parallel, rank: int
) -> None:
    model = write_mlp(tmp_path / "mlp.onnx")
    timeouts = Timeouts(cancel_grace=0.2)
    with Master(model, parallel=parallel, timeouts=timeouts) as master:
        master.predict({"x": rows(2)})
        before = pids(master)
        stop(before[rank])
        wait_until(lambda: f"rank {rank} is stopped by a signal" in str(master.health()))
        with pytest.raises(PredictTimeoutError):
            master.predict({"x": rows(2)}, timeout=0.5)
        wait_until(lambda: all_gone(before))
        assert_close(master.predict({"x": rows(3)}), expected(model, {"x": rows(3)}))


def test_cancelled_requests_leave_the_group_in_step(tmp_path: Path) -> None:
    model = write_mlp(tmp_path / "mlp.onnx")
    with Master(model, parallel=Parallel(tensor=2, pipeline=2)) as master:
        before = pids(master)
        given = [{"x": rows(1 + number % 5, seed=number)} for number in range(60)]
        futures = [master.submit(each) for each in given]
        for future in futures[::3]:
            future.cancel()
        for number, (each, future) in enumerate(zip(given, futures, strict=True)):
            if number % 3:
                assert_close(future.result(timeout=60.0), expected(model, each))
        assert pids(master) == before


# A group of a master.


def test_log_has_the_stack_of_a_rank_that_crashed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Master(write_mlp(tmp_path / "mlp.onnx"), parallel=Parallel(tensor=2)) as master:
        crashed = pids(master)[1]
        os.kill(crashed, signal.SIGSEGV)
        wait_until(lambda: crashed not in pids(master))
    said = [record.getMessage() for record in caplog.records]
    [death] = [text for text in said if "where it was" in text]
    where = f"where it was:\nrank 1 (cpu:1, pid {crashed}):\nFatal Python error: Segmentation fault"
    assert where in death


def test_ranks_that_end_when_they_are_asked_are_no_deaths_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mcinfer.master")
    with Master(write_mlp(tmp_path / "mlp.onnx"), parallel=Parallel(tensor=2)) as master:
        leader = pids(master)[0]
    [end] = [r.getMessage() for r in caplog.records if "exited" in r.getMessage()]
    pool = "mlp.onnx on cpu:0, cpu:1"
    assert end == f"{pool}: group 0 of 2 ranks (cpu:0, pid {leader}) exited with status 0"


def test_rank_that_has_grown_has_its_group_recycled(tmp_path: Path) -> None:
    path, outputs = tmp_path / "grown.onnx", [f"float[batch,{WIDE}] y"]
    model = write_chain(path, ["y = MatMul(h4, wide)"], outputs)
    parallel, options = Parallel(pipeline=2), EngineOptions(prepare="never")
    with Master(model, parallel=parallel, options=options) as master:
        sizes = [*map(own_bytes, pids(master))]
    assert sizes[1] > sizes[0] + (16 << 20)
    restart = RestartPolicy(max_memory_bytes=sizes[0] + (8 << 20), budget=0)
    with Master(model, parallel=parallel, options=options, restart=restart) as master:
        before = pids(master)
        wait_until(lambda: not {*before} & {*pids(master)})


def own_bytes(pid: int) -> int:
    """Resident and not shared (statm of proc(5))."""
    resident, shared = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
