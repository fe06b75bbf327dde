"""A model that is cut over several processes, behind one master: answers, faults in every phase, ends."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from mcinfer import (
    EngineOptions,
    InvalidInputError,
    Master,
    Parallel,
    RankDiedError,
    RestartPolicy,
)
from mcinfer.requests.tensors import Arrays
from tests.process.rank_group import assert_close, expected, rows, write_mlp
from tests.process.scripts import PREAMBLE, Program
from tests.process.waiting import all_gone, pids, running, states, stop, wait_until

WIDTH = 512
LONG_ROWS = 16_384  # a run of a second or so


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mlp(tmp_path_factory.mktemp("ranks") / "mlp.onnx", width=WIDTH)


def inputs(rows: int) -> Arrays:
    return {"x": np.random.default_rng(1).standard_normal((rows, WIDTH), np.float32)}


def assert_serves(master: Master, model: Path, rows: int = 2) -> None:
    assert_close(master.predict(inputs(rows), timeout=120.0), expected(model, inputs(rows)))


@contextmanager
def held_request(master: Master) -> Iterator["Future[Any]"]:
    """A request that runs: its group waits for the last rank, which is stopped."""
    stop(pids(master)[-1])
    with running(lambda: master.predict(inputs(2), timeout=300.0)) as answer:
        wait_until(lambda: "busy" in states(master))
        yield answer


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(tensor=2, pipeline=2),
        pytest.param(Parallel(tensor=2, replicas=2), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_cut_model_answers_as_the_whole_one(model: Path, parallel: Parallel) -> None:
    with Master(model, parallel=parallel) as master:
        for _ in range(3):  # the first shows how a batch is split
            assert_serves(master, model, 6)
        futures = [master.submit(inputs(6)) for _ in range(8)]
        for future in futures:
            assert_close(future.result(timeout=120.0), expected(model, inputs(6)))
        workers = master.statistics().workers
        assert [w.index for w in workers] == [*range(parallel.devices)]
        assert [w.rank for w in workers] == [*range(parallel.ranks)] * parallel.replicas
        assert len({w.pid for w in workers}) == parallel.devices
        assert master.health().workers == parallel.replicas
        ended = pids(master)
    assert all_gone(ended)


def test_pipeline_joins_requests_to_one_run_and_a_bad_one_fails_alone(model: Path) -> None:
    with Master(model, parallel=Parallel(pipeline=2), max_batch_size=8, max_delay=0.05) as master:
        before = pids(master)
        assert_serves(master, model)
        stop(before[1])  # the first stage begins runs, and none of them finishes
        futures = [master.submit(inputs(1)) for _ in range(2)]
        wait_until(lambda: "busy" in states(master))
        futures += [master.submit(inputs(2)) for _ in range(32)]  # at once one larger run
        os.kill(before[1], signal.SIGCONT)
        with pytest.raises(InvalidInputError):
            master.predict({"x": np.zeros((2, WIDTH + 1), np.float32)})
        for count, future in zip([1] * 2 + [2] * 32, futures, strict=True):
            assert_close(future.result(timeout=120.0), expected(model, inputs(count)))
        assert pids(master) == before


def test_output_that_is_an_input_is_that_of_its_own_request(tmp_path: Path) -> None:
    """Of stages; of the parts of a layer in tests/test_ranks_slices.py."""
    path = write_mlp(tmp_path / "passing.onnx")
    passing = onnx.load(path, load_external_data=False)
    passing.graph.output.append(passing.graph.input[0])
    onnx.save(passing, path)
    given = [{"x": rows(2, seed=seed)} for seed in range(12)]
    with Master(path, parallel=Parallel(pipeline=2)) as master:
        # The group has seen no such shapes, then has memory for them, then has it again.
        for each in given[:6]:
            assert_close(master.predict(each, timeout=120.0), expected(path, each))
        for each, future in [(each, master.submit(each)) for each in given[6:]]:
            assert_close(future.result(timeout=120.0), expected(path, each))


@pytest.mark.parametrize(
    ("parallel", "rank"), [(Parallel(tensor=2), 0), (Parallel(pipeline=2), 1)], ids=str
)
def test_rank_killed_in_a_run_restarts_its_group_and_the_request_is_answered(
    model: Path, parallel: Parallel, rank: int
) -> None:
    with Master(model, parallel=parallel) as master:
        before = pids(master)
        with held_request(master) as answer:
            os.kill(before[rank], signal.SIGKILL)
            assert_close(answer.result(timeout=240.0), expected(model, inputs(2)))
        assert not {*before} & {*pids(master)}
        assert all_gone(before)
        assert all(w.restarts == 1 for w in master.statistics().workers)


def test_request_that_loses_two_groups_names_the_rank_that_died(model: Path) -> None:
    with Master(model, parallel=Parallel(tensor=2)) as master:
        with running(lambda: master.predict(inputs(LONG_ROWS), timeout=300.0)) as answer:
            wait_until(lambda: "busy" in states(master))
            for _ in range(2):
                killed = pids(master)
                os.kill(killed[1], signal.SIGKILL)
                wait_until(lambda killed=killed: not {*killed} & {*pids(master)})  # type: ignore[misc]
                wait_until(lambda: answer.done() or "busy" in states(master), timeout=120.0)
            with pytest.raises(
                RankDiedError, match=rf"rank 1 \(cpu:1, pid {killed[1]}\) killed by SIGK"
            ):
                answer.result(timeout=120.0)
        master.wait_ready(timeout=120.0)
        assert_serves(master, model)


def test_ranks_end_with_a_master_that_is_killed(model: Path) -> None:
    text = """
with mcinfer.Master(sys.argv[1], parallel=mcinfer.Parallel(tensor=2)) as master:
    say_pids(master)
    signal.pause()
"""
    with Program(PREAMBLE + text, model) as program:
        left = program.pids()
        assert len(left) == 2
        program.send_signal(signal.SIGKILL)
        wait_until(lambda: all_gone(left))


def test_rank_killed_while_it_starts_is_started_once_more(model: Path) -> None:
    master = Master(model, parallel=Parallel(tensor=2))
    starting = threading.Thread(target=master.start)
    starting.start()
    try:
        wait_until(lambda: len(pids(master)) == 2)
        os.kill(pids(master)[1], signal.SIGKILL)
        starting.join(timeout=240.0)
        assert_serves(master, model)
        assert master.statistics().workers[0].restarts == 1
    finally:
        master.close()


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
    with pytest.raises(InvalidInputError, match="a group of at most 64 ranks"):
        Parallel(tensor=33, pipeline=2)


def test_group_killed_while_idle_and_past_its_budget_opens_the_circuit_and_heals(
    model: Path,
) -> None:
    restart = RestartPolicy(budget=0, backoff_limit=1.0)
    with Master(model, parallel=Parallel(tensor=2), restart=restart) as master:
        killed = pids(master)[1]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: master.health().state == "failed")
        text = master.statistics().workers[0].last_error
        assert f"rank 1 (cpu:1, pid {killed}) killed by SIGKILL" in text
        with pytest.raises(RankDiedError, match="no worker serves"):
            master.predict(inputs(2))
        master.wait_ready(timeout=120.0)
        assert_serves(master, model)
