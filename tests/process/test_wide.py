"""A request that comes alone gets the whole CPU: real workers, each with a core of its own."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from mcinfer import EngineOptions, Master
from tests.process.waiting import wait_until
from tests.text_models import text_model

CORES = len(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(CORES < 2, reason="one core is the whole CPU")

SIDE, LAYERS = 256, 8
ROWS = np.random.default_rng(0).standard_normal((256, SIDE), np.float32)
"""A run takes a millisecond and more on one core: enough for a run with the whole CPU."""


@pytest.fixture
def products(tmp_path: Path) -> Path:
    names = [f"h{i}" for i in range(LAYERS)]
    lines = [
        f"{name} = MatMul({before}, w)" for before, name in zip(["x", *names], names, strict=False)
    ]
    body = "\n".join([*lines, f"y = Relu({names[-1]})"])
    text = f"(float[batch, {SIDE}] x) => (float[batch, {SIDE}] y) {{{body}}}"
    return written(tmp_path / "products.onnx", text, w=(SIDE, SIDE))


def written(path: Path, text: str, **weights: tuple[int, ...]) -> Path:
    path.write_bytes(text_model(text, weights).SerializeToString())
    return path


def ask(master: Master, **options: Any) -> NDArray[np.float32]:
    return np.array(master.predict({"x": ROWS}, shards=1, **options)["y"])


def wide_runs(master: Master) -> int:
    return sum(worker.wide for worker in master.statistics().workers)


def ask_until_wide(master: Master) -> NDArray[np.float32]:
    """The answer of the next wide run."""
    answers, before = [], wide_runs(master)

    def is_wide() -> bool:
        answers.append(ask(master))
        return wide_runs(master) > before

    wait_until(is_wide, timeout=60.0)
    return answers[-1]


def cores_of_main_thread(master: Master) -> set[int]:
    pid = master.statistics().workers[0].pid
    return {*os.sched_getaffinity(pid or 0)}


def test_lone_request_gets_all_cores_and_answers_as_before(products: Path) -> None:
    with Master(products, CORES, verify="never") as master:
        narrow = ask(master)
        assert wide_runs(master) == 0
        own = cores_of_main_thread(master)
        assert len(own) == 1
        wide = ask_until_wide(master)
        np.testing.assert_allclose(wide, narrow, rtol=1e-4, atol=1e-4)
        assert cores_of_main_thread(master) == os.sched_getaffinity(0)
        master.predict({"x": ROWS})  # split over all workers: each has its own core
        assert cores_of_main_thread(master) == own
        assert sum(worker.wide for worker in master.statistics().workers[1:]) == 0


def test_many_callers_get_right_answers_while_some_runs_are_wide(products: Path) -> None:
    with Master(products, 2, verify="never") as master:
        expected = ask(master)
        ask_until_wide(master)
        with ThreadPoolExecutor(8) as callers:
            answers = [*callers.map(lambda _: ask(master), range(64))]
        for answer in answers:
            np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-4)
        statistics = master.statistics()
        assert all(worker.runs > worker.wide for worker in statistics.workers)
        assert statistics.failed == 0


def test_weights_that_are_replaced_are_those_of_wide_runs_too(products: Path) -> None:
    options = EngineOptions(variable_weights=["w"])
    with Master(products, 2, verify="never", options=options) as master:
        before = ask_until_wide(master)
        master.update_weights({"w": np.zeros((SIDE, SIDE), np.float32)})
        assert before.any()
        count = wide_runs(master)
        assert not ask(master).any()
        assert wide_runs(master) == count + 1


def test_wide_run_can_be_cancelled_and_its_worker_serves_on(products: Path) -> None:
    with Master(products, 2, verify="never") as master:
        expected = ask_until_wide(master)
        for _ in range(20):
            master.submit({"x": ROWS}).cancel()
        np.testing.assert_allclose(ask(master), expected, rtol=1e-4, atol=1e-4)
        assert [worker.restarts for worker in master.statistics().workers] == [0, 0]


@pytest.mark.thorough
def test_worker_that_is_killed_in_a_wide_run_costs_no_answer(products: Path) -> None:
    many = np.tile(ROWS, (200, 1))
    with Master(products, 2, verify="never") as master:
        expected = np.tile(ask_until_wide(master), (200, 1))
        answer = master.submit({"x": many})
        wait_until(lambda: master.statistics().workers[0].state == "busy", timeout=60.0)
        psutil.Process(master.statistics().workers[0].pid).kill()
        np.testing.assert_allclose(answer.result()["y"], expected, rtol=1e-4, atol=1e-4)
        wait_until(lambda: master.statistics().workers[0].restarts == 1, timeout=60.0)
        ask_until_wide(master)  # the new process opens the model twice again


@pytest.mark.thorough
def test_worker_that_still_opens_its_model_with_all_cores_ends_as_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mcinfer.master")
    names = [f"h{i}" for i in range(3000)]  # so many take some tenths of a second
    lines = [f"{n} = MatMul({before}, w)" for before, n in zip(["x", *names], names, strict=False)]
    text = f"(float[batch, 8] x) => (float[batch, 8] y) {{{' '.join(lines)} y = Relu({names[-1]})}}"
    path = written(tmp_path / "deep.onnx", text, w=(8, 8))
    for _ in range(3):
        with Master(path, 2, verify="never") as master:
            for _ in range(2):
                master.predict({"x": ROWS[:, :8]}, shards=1)
    ends = [record for record in caplog.messages if "killed" in record or "exited" in record]
    assert len(ends) == 6
    assert all(end.endswith("exited with status 0") for end in ends)
