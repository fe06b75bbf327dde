"""Pools of prepared models: one entry for all workers, made once, whatever happens to those who make it."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from mcinfer import EngineOptions, Master
from mcinfer.engines.adapters import open_engine
from mcinfer.model_cache.cache import Cache
from tests.engine_requests import engine_request
from tests.process.scripts import PREAMBLE, Program
from tests.process.waiting import all_gone, is_alive, pids, wait_until
from tests.test_preparation import write, write_sparse

ALWAYS = EngineOptions(prepare="always")

Array = NDArray[np.float32]

pytestmark = pytest.mark.usefixtures("cache")


def dense(path: Path, size: int = 64, seed: int = 1) -> Path:
    """Save a model of y = x w, with as many rows and columns of weights."""
    graph = f"g (float[batch, {size}] x) => (float[batch, {size}] y) {{ y = MatMul(x, w) }}"
    weights = np.random.default_rng(seed).random((size, size), np.float32)
    return Path(write(path, (graph, {"w": weights})))


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that takes about half a second to prepare, in which much can be done to those who do it: 49 MB."""
    return dense(tmp_path_factory.mktemp("large") / "large.onnx", size=3500)


def answer(master: Master) -> Array:
    """What the model makes of some rows."""
    (spec,) = master.inputs
    size = spec.shape[1]
    assert isinstance(size, int)
    rows = np.random.default_rng(2).random((6, size), np.float32)
    outputs = master.predict({"x": rows})
    return np.array(outputs["y"])


def entry(cache: Cache) -> Path:
    """The folder of the one entry that there is."""
    (info,) = cache.entries()
    return cache.folder / info.key


def maps(pid: int, path: Path) -> bool:
    return str(path) in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the master warned of."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "mcinfer.master" and record.levelno >= logging.WARNING
    ]


def preparing(root: int) -> list[psutil.Process]:
    """The processes that prepare a model below this one."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(root).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "mcinfer.model_cache.children" in process.cmdline():
                    found.append(process)
    return found


@contextmanager
def starting(model: Path) -> Iterator[tuple[Master, psutil.Process, threading.Thread]]:
    """A master, the process that prepares its model, and the thread in which the master starts."""
    master = Master(model, 1, options=ALWAYS)
    thread = threading.Thread(target=master.start)
    thread.start()
    try:
        wait_until(lambda: preparing(os.getpid()))
        (child,) = preparing(os.getpid())
        yield master, child, thread
    finally:
        thread.join()
        master.close()


def test_all_workers_map_one_entry(tmp_path: Path, cache: Cache) -> None:
    with Master(dense(tmp_path / "small.onnx"), 2, options=ALWAYS) as master:
        assert all(maps(pid, entry(cache) / "weights.bin") for pid in pids(master))
        assert answer(master).any()
        assert cache.clear()[1] == 1  # it is in use
    assert cache.clear()[1] == 0


def test_child_that_is_killed_costs_the_shared_copy_of_this_start_alone(
    large_model: Path, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    with starting(large_model) as (master, child, thread):
        child.kill()
        thread.join()
        plain = answer(master)
    (warning,) = warnings(caplog)
    assert f"{large_model.name} on cpu:0: each process has a copy" in warning
    assert "ended with status -9" in warning
    assert cache.entries() == []
    with Master(large_model, 1, options=ALWAYS) as master:
        assert np.array_equal(answer(master), plain)
    assert entry(cache)
    assert len(warnings(caplog)) == 1


def test_worker_that_is_killed_while_it_prepares_takes_the_child_along(
    large_model: Path, cache: Cache
) -> None:
    with starting(large_model) as (master, child, thread):
        worker = child.ppid()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not is_alive(child.pid), timeout=60.0)
        thread.join()
        (pid,) = pids(master)
        assert pid != worker
        assert maps(pid, entry(cache) / "weights.bin")
    assert [*cache.folder.glob("tmp-*")] == []


START = """
try:
    options = mcinfer.EngineOptions(prepare="always")
    with mcinfer.Master(sys.argv[1], 1, options=options):
        say("started")
except KeyboardInterrupt:
    say("interrupted")
"""


def test_ctrl_c_while_a_model_is_prepared_leaves_nothing(large_model: Path, cache: Cache) -> None:
    with Program(PREAMBLE + START, large_model) as program:
        wait_until(lambda: [*cache.folder.glob("tmp-*")] and preparing(program.pid))
        below = [process.pid for process in psutil.Process(program.pid).children(recursive=True)]
        program.interrupt()
        ended = program.wait(timeout=60.0)
        assert (ended.status, ended.out) == (0, "interrupted\n")
        assert "Traceback" not in ended.err
        wait_until(lambda: all_gone(below), timeout=60.0)
    assert cache.entries() == []
    cache.evict()  # what is left of it goes with the next entry that is made
    assert {*os.listdir(cache.folder)} == {"sources"}


def test_preparing_and_waiting_workers_report_progress(large_model: Path, cache: Cache) -> None:
    request = engine_request(large_model, prepare="always")
    reports: list[list[dict[str, Any]]] = [[], []]
    threads = [
        threading.Thread(target=open_engine, args=("onnxruntime", request, states.append))
        for states in reports
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entry(cache)
    for states in reports:
        assert states
        assert [state["seconds"] for state in states] == sorted(s["seconds"] for s in states)
        assert all(state["bytes"] > large_model.stat().st_size // 2 for state in states)
    # A waiting worker may look between two writes; the preparing one reports the end.
    assert max(state["written"] for states in reports for state in states) > 0


def test_model_that_cannot_be_prepared_is_warned_of_once_for_all_workers(
    tmp_path: Path, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(write_sparse(tmp_path / "sparse.onnx"))
    with Master(path, 2, options=ALWAYS):
        pass
    (warning,) = warnings(caplog)  # delivered by the end of the pool
    assert "sparse.onnx" in warning
    assert "it cannot be prepared: onnxruntime: " in warning
    assert entry(cache)
