"""A model that is cut over several processes, behind one master: answers, faults in every phase, ends."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from mcinfer import (
    BuildError,
    EngineOptions,
    InvalidInputError,
    Master,
    Parallel,
    PredictTimeoutError,
    RankDiedError,
    RestartPolicy,
    Timeouts,
)
from mcinfer.requests.request import Arrays
from tests.process.waiting import all_gone, is_alive, pids, states, wait_until

WIDTH = 512
LAYERS = 4
LONG_ROWS = 16_384  # a run of a second or so
CUTS = [
    Parallel(tensor=2),
    Parallel(pipeline=2),
    Parallel(tensor=2, pipeline=2),
    Parallel(tensor=2, replicas=2),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlp(tmp_path_factory.mktemp("ranks") / "mlp.onnx", layers=LAYERS, width=WIDTH)


def mlp(path: Path, *, layers: int, width: int) -> Path:
    """x, y float32["batch", width]: a product and a Tanh in each layer."""
    generator = np.random.default_rng(0)
    nodes, weights = [], []
    for layer in range(layers):
        name = f"w{layer}"
        values = generator.standard_normal((width, width), np.float32) / np.float32(width**0.5)
        weights.append(numpy_helper.from_array(values, name))
        before = "x" if layer == 0 else f"t{layer - 1}"
        nodes.append(helper.make_node("MatMul", [before, name], [f"m{layer}"]))
        after = "y" if layer == layers - 1 else f"t{layer}"
        nodes.append(helper.make_node("Tanh", [f"m{layer}"], [after]))
    x, y = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", width])
        for name in "xy"
    )
    graph = helper.make_graph(nodes, "mlp", [x], [y], weights)
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), path)
    return path


def inputs(rows: int) -> Arrays:
    return {"x": np.random.default_rng(1).standard_normal((rows, WIDTH), np.float32)}


def assert_close(answer: Arrays, model: Path, asked: Arrays) -> None:
    (expected,) = ort.InferenceSession(model).run(None, asked)
    assert answer["y"].shape == expected.shape
    assert np.abs(answer["y"] - expected).max() <= 1e-5 * np.abs(expected).max()


def start_long(master: Master) -> "tuple[threading.Thread, Future[Arrays], Arrays]":
    """A long request in a thread of its own, once it is running."""
    asked = inputs(LONG_ROWS)
    answer: Future[Arrays] = Future()

    def ask() -> None:
        try:
            answer.set_result(master.predict(asked, timeout=300.0))
        except Exception as exc:
            answer.set_exception(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: "busy" in states(master))
    return thread, answer, asked


@pytest.mark.parametrize("parallel", CUTS, ids=str)
def test_cut_model_answers_as_the_whole_one(model: Path, parallel: Parallel) -> None:
    asked = inputs(6)
    with Master(model, parallel=parallel) as master:
        for _ in range(3):  # the first shows how a batch is split
            assert_close(master.predict(asked), model, asked)
        futures = [master.submit(asked) for _ in range(8)]
        for future in futures:
            assert_close(future.result(timeout=120.0), model, asked)
        workers = master.statistics().workers
        assert [w.index for w in workers] == [*range(parallel.devices)]
        assert [w.rank for w in workers] == [*range(parallel.ranks)] * parallel.replicas
        assert len({w.pid for w in workers}) == parallel.devices
        assert master.health().workers == parallel.replicas
        ended = pids(master)
    assert all_gone(ended)


def test_pipeline_joins_requests_to_one_run(model: Path) -> None:
    asked = inputs(2)
    with Master(model, parallel=Parallel(pipeline=2), max_batch_size=8, max_delay=0.05) as master:
        futures = [master.submit(asked) for _ in range(32)]
        for future in futures:
            assert_close(future.result(timeout=120.0), model, asked)


@pytest.mark.parametrize("parallel", CUTS[:3], ids=str)
@pytest.mark.parametrize("rank", [0, -1])
def test_rank_killed_in_a_run_restarts_its_group_and_the_request_is_answered(
    model: Path, parallel: Parallel, rank: int
) -> None:
    with Master(model, parallel=parallel) as master:
        before = pids(master)
        thread, answer, asked = start_long(master)
        os.kill(before[rank], signal.SIGKILL)
        assert_close(answer.result(timeout=240.0), model, asked)
        thread.join()
        after = pids(master)
        assert not {*before} & {*after}
        assert all_gone(before)
        assert all(w.restarts == 1 for w in master.statistics().workers)


def test_rank_killed_while_idle_restarts_its_group(model: Path) -> None:
    with Master(model, parallel=Parallel(tensor=2)) as master:
        before = pids(master)
        os.kill(before[1], signal.SIGKILL)
        wait_until(lambda: len(pids(master)) == 2 and not {*before} & {*pids(master)})
        master.wait_ready(timeout=120.0)
        text = master.statistics().workers[0].last_error
        assert f"rank 1 (cpu:1, pid {before[1]}) killed by SIGKILL" in text
        assert_close(master.predict(inputs(2)), model, inputs(2))


def test_request_that_loses_two_groups_names_the_rank_that_died(model: Path) -> None:
    with Master(model, parallel=Parallel(tensor=2)) as master:
        thread, answer, _ = start_long(master)
        for _ in range(2):
            killed = pids(master)
            os.kill(killed[1], signal.SIGKILL)
            wait_until(lambda killed=killed: not {*killed} & {*pids(master)})  # type: ignore[misc]
            wait_until(lambda: answer.done() or "busy" in states(master), timeout=120.0)
        with pytest.raises(
            RankDiedError, match=rf"rank 1 \(cpu:1, pid {killed[1]}\) killed by SIGK"
        ):
            answer.result(timeout=120.0)
        thread.join()
        master.wait_ready(timeout=120.0)
        assert_close(master.predict(inputs(2)), model, inputs(2))


def test_stopped_rank_costs_its_request_the_time_out_and_the_group_comes_back(model: Path) -> None:
    timeouts = Timeouts(cancel_grace=0.2)
    with Master(model, parallel=Parallel(tensor=2), timeouts=timeouts) as master:
        assert_close(master.predict(inputs(2)), model, inputs(2))
        before = pids(master)
        os.kill(before[1], signal.SIGSTOP)
        wait_until(lambda: "rank 1 is stopped by a signal" in str(master.health()))
        with pytest.raises(PredictTimeoutError):
            master.predict(inputs(2), timeout=1.0)
        wait_until(lambda: all_gone(before))
        assert_close(master.predict(inputs(2), timeout=120.0), model, inputs(2))


def test_bad_request_fails_alone(model: Path) -> None:
    with Master(model, parallel=Parallel(tensor=2)) as master:
        before = pids(master)
        with pytest.raises(InvalidInputError):
            master.predict({"x": np.zeros((2, WIDTH + 1), np.float32)})
        assert_close(master.predict(inputs(2)), model, inputs(2))
        assert pids(master) == before


def test_ranks_end_with_a_master_that_is_killed(model: Path, tmp_path: Path) -> None:
    script = f"""
import sys, mcinfer
with mcinfer.Master({str(model)!r}, parallel=mcinfer.Parallel(tensor=2)) as master:
    print(*[w.pid for w in master.statistics().workers], flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        left = [*map(int, process.stdout.readline().split())]
        assert len(left) == 2
        assert all(map(is_alive, left))
        process.kill()
        wait_until(lambda: all_gone(left))


def test_rank_killed_while_it_starts_is_started_once_more(model: Path) -> None:
    master = Master(model, parallel=Parallel(tensor=2))
    starting = threading.Thread(target=master.start)
    starting.start()
    try:
        wait_until(lambda: len(pids(master)) == 2)
        os.kill(pids(master)[1], signal.SIGKILL)
        starting.join(timeout=240.0)
        assert_close(master.predict(inputs(2)), model, inputs(2))
        assert master.statistics().workers[0].restarts == 1
    finally:
        master.close()


def test_model_that_cannot_be_cut_is_a_build_error_and_leaves_nothing(tmp_path: Path) -> None:
    small = mlp(tmp_path / "one.onnx", layers=1, width=8)
    with pytest.raises(BuildError, match="stage"):
        Master(small, parallel=Parallel(pipeline=12)).start()
    garbage = tmp_path / "garbage.onnx"
    garbage.write_bytes(b"no model")
    with pytest.raises(BuildError):
        Master(garbage, parallel=Parallel(tensor=2)).start()


def test_arguments_that_do_not_go_with_a_cut_are_refused(model: Path) -> None:
    with pytest.raises(InvalidInputError, match="devices: got 3, expected 2"):
        Master(model, devices=3, parallel=Parallel(tensor=2))
    with pytest.raises(InvalidInputError, match="parallel: got int, expected Parallel"):
        Master(model, parallel=2)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="expected onnxruntime"):
        Master(model, parallel=Parallel(tensor=2), engine="fake")
    options = EngineOptions(variable_weights=["layers.0.weight"])
    with pytest.raises(InvalidInputError, match="variable_weights"):
        Master(model, parallel=Parallel(tensor=2), options=options)
    with pytest.raises(InvalidInputError, match="tensor: got 0"):
        Parallel(tensor=0)


def test_group_past_its_budget_opens_the_circuit_and_heals(model: Path) -> None:
    restart = RestartPolicy(budget=0, backoff_limit=1.0)
    with Master(model, parallel=Parallel(tensor=2), restart=restart) as master:
        os.kill(pids(master)[1], signal.SIGKILL)
        wait_until(lambda: master.health().state == "failed")
        with pytest.raises(RankDiedError, match="no worker serves"):
            master.predict(inputs(2))
        master.wait_ready(timeout=120.0)
        assert_close(master.predict(inputs(2)), model, inputs(2))
