"""Weights that are replaced while real workers serve: no answer is ever of two versions."""

import itertools
import os
import random
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer import (
    EngineOptions,
    Limits,
    Master,
    PredictTimeoutError,
    RestartPolicy,
)
from mcinfer.config import INLINE
from tests.process.models import FakeModel, Inputs, OnnxModel, act, fake_master, rows
from tests.process.waiting import (
    HeldPipe,
    busy_pid,
    pids,
    states,
    wait_until,
)

Array = NDArray[Any]

SLOW = -1.0
"""The first number of a request that takes its time."""

GENEROUS = RestartPolicy(budget=1000, backoff=0.0)

TWO_WEIGHTS: dict[str, Any] = {
    "outputs": (
        ["y", "float32", ["batch", 4], {"from": "x", "scale": 0, "add": "w"}],
        ["z", "float32", ["batch", 4], {"from": "x", "scale": 0, "add": "v"}],
    ),
    "weights": [["w", "float32", [4], 0.0], ["v", "float32", [], 0.0]],
}
"""Every row of an answer is the weights: of y the one, of z the other."""

REPLACEABLE = EngineOptions(variable_weights=["w", "v"])


def both(value: float) -> dict[str, Any]:
    """New values for both weights."""
    return {"w": np.full(4, value, np.float32), "v": np.float32(value)}


def seen(outputs: Inputs) -> float:
    """The value of both weights in an answer; fails unless all of its rows show the same."""
    values = {*outputs["y"].ravel().tolist(), *outputs["z"].ravel().tolist()}
    assert len(values) == 1, f"the answer mixes versions: {values}"
    return float(values.pop())


def ask(master: Master, count: int = 1) -> float:
    return seen(master.predict(rows(count)))


# Every worker, every request.


def test_request_after_an_update_sees_it_on_every_worker_also_one_that_is_started_again(
    fake_model: FakeModel,
) -> None:
    options: dict[str, Any] = {"options": REPLACEABLE, "restart": GENEROUS}
    with fake_master(fake_model(**TWO_WEIGHTS), 2, **options) as master:
        assert [str(spec) for spec in master.weights] == ["w: float32[4]", "v: float32[]"]
        assert master.statistics().weights_version == 0
        for version in range(1, 6):
            assert ask(master, 6) == version - 1
            assert master.update_weights(both(version)) == version
            futures = [master.submit(rows(1)) for _ in range(9)]
            assert ask(master, 6) == version  # split over all
            assert {seen(future.result(timeout=20.0)) for future in futures} == {version}
        assert min(worker.completed for worker in master.statistics().workers) > 5
        assert master.update_weights({"v": 9}) == 6
        assert master.update_weights({"w": [9] * 4}) == 7
        updated: Future[int] = Future()
        first = pids(master)[0]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: first not in pids(master) and len(pids(master)) == 2)
        assert ask(master, 6) == 9
        master.submit(rows(1)).add_done_callback(
            lambda _: updated.set_result(master.update_weights(both(8)))
        )
        assert updated.result(timeout=20.0) == 8  # a callback may update
        assert ask(master, 6) == 8
        assert master.statistics().weights_version == 8


@pytest.mark.parametrize("devices", [2, INLINE])
def test_no_answer_mixes_versions_nor_is_any_older_than_one_before_it(
    fake_model: FakeModel, devices: Any
) -> None:
    """Two threads replace the weights, four ask, and one kills workers, if there are some."""
    versions, stop = {0.0: 0}, threading.Event()
    answers: list[list[tuple[int, float]]] = [[] for _ in range(4)]
    numbers = itertools.count(1)
    options: dict[str, Any] = {"options": REPLACEABLE, "restart": GENEROUS, "max_batch_size": 8}
    with (
        fake_master(fake_model(**TWO_WEIGHTS), devices, **options) as master,
        ThreadPoolExecutor(8) as pool,
    ):

        def update() -> None:
            while not stop.is_set():
                value = float(next(numbers))
                versions[value] = master.update_weights(both(value))

        def client(index: int, count: int, shards: int | None) -> None:
            while not stop.is_set():
                returned = max(versions.copy().values())
                outputs = master.predict(rows(count), shards=shards, timeout=20.0)
                answers[index].append((returned, seen(outputs)))

        def kill() -> None:
            chance = random.Random(0)  # noqa: S311 no secret
            while not stop.wait(chance.uniform(0.05, 0.2)):
                if devices != INLINE and all(
                    state in ("ready", "busy") for state in states(master)
                ):
                    os.kill(chance.choice(pids(master)), signal.SIGKILL)

        clients = [(0, 8, None), (1, 3, 2), (2, 1, 1), (3, 2, 1)]
        running = [pool.submit(update), pool.submit(update), pool.submit(kill)]
        running += [pool.submit(client, *asks) for asks in clients]
        try:
            if devices != INLINE:
                wait_until(lambda: any(w.restarts for w in master.statistics().workers))
            before, asked = len(versions), [*map(len, answers)]
            wait_until(lambda: len(versions) > before + 20)
            wait_until(lambda: all(len(s) > n + 5 for s, n in zip(answers, asked, strict=True)))
        finally:
            stop.set()
        for future in running:
            future.result(timeout=40.0)
        statistics = master.statistics()
        assert statistics.failed == 0
        assert statistics.succeeded == sum(map(len, answers))
        assert sorted(versions.values()) == [*range(len(versions))]
        for got in answers:
            last = 0
            for returned, value in got:
                assert versions[value] >= max(returned, last)
                last = versions[value]


# Requests that are on their way.


def test_request_in_flight_finishes_with_the_version_that_it_began_with(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    # The engine looks at its weights after it was held: by then their memory must not be another's.
    model = fake_model(**TWO_WEIGHTS, when={"-1": f"told:{tmp_path}/run"})
    pipes = [HeldPipe(tmp_path / f"run{index}") for index in range(2)]
    with fake_master(model, 2, options=REPLACEABLE) as master:
        master.update_weights(both(1))
        slow = [master.submit(act(SLOW, 2)) for _ in range(2)]
        for pipe in pipes:
            pipe.wait()
        waiting = master.submit(rows(3))
        for value in range(2, 12):
            master.update_weights(both(value))
        late = master.submit(rows(3))
        for pipe in pipes:
            pipe.tell("")
        assert [seen(future.result(timeout=20.0)) for future in slow] == [1, 1]
        assert seen(waiting.result(timeout=20.0)) == 1
        assert seen(late.result(timeout=20.0)) == 11


def test_request_whose_worker_died_runs_again_with_the_version_that_it_began_with(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    model = fake_model(**TWO_WEIGHTS, when={"-1": f"once:{tmp_path / 'began'}:hang:60"})
    with fake_master(model, 1, options=REPLACEABLE, restart=GENEROUS) as master:
        master.update_weights(both(1))
        caught = master.submit(act(SLOW))
        pid = busy_pid(master)
        wait_until((tmp_path / "began").exists)
        master.update_weights(both(2))
        os.kill(pid, signal.SIGKILL)
        assert seen(caught.result(timeout=20.0)) == 1
        assert ask(master) == 2


# Memory.


def test_memory_does_not_grow_with_updates_nor_with_errors_that_are_kept(
    fake_model: FakeModel,
) -> None:
    elements = 1 << 18  # 1 MiB
    model = fake_model(
        inputs=(["x", "float32", ["batch", 1]],),
        outputs=(["y", "float32", ["batch", elements], {"from": "x", "scale": 0, "add": "w"}],),
        weights=[["w", "float32", [elements], 0.0]],
    )
    zero, kept = {"x": np.zeros((1, 1), np.float32)}, []
    # Room for two versions and an answer; where more were held, an update would wait in vain.
    limits = Limits(memory_bytes=3 * 4 * elements + 4096)
    options = EngineOptions(variable_weights=["w"])
    with fake_master(model, 1, options=options, limits=limits) as master:
        for value in range(1, 20):
            master.update_weights({"w": np.full(elements, value, np.float32)}, timeout=20.0)
            with pytest.raises(PredictTimeoutError) as late:
                master.predict(zero, timeout=0.0)
            kept.append(late)
            assert (master.predict(zero)["y"] == value).all()
        wait_until(lambda: master.statistics().memory_used_bytes == 4 * elements)


# ONNX Runtime.

TWO_PRODUCTS = """<ir_version: 8, opset_import: ["": 17]>
m (float16[batch, 2] x) => (float16[batch, 3] y, float16[batch, 1] z)
<float16[2, 3] m = {0, 0, 0, 0, 0, 0}, float16[1, 2] g = {0, 0}, float16[1] b = {0}> {
    y = MatMul(x, m)
    z = Gemm <transB = 1> (x, g, b)
}"""


@pytest.mark.parametrize("devices", [2, INLINE])
def test_onnx_model_answers_with_the_new_weights_on_every_worker(
    onnx_model: OnnxModel, devices: Any
) -> None:
    generator = np.random.default_rng(0)
    shapes: dict[str, Sequence[int]] = {"m": (2, 3), "b": (1,), "g": (1, 2)}
    x = generator.normal(size=(6, 2)).astype(np.float16)
    weights = {name: generator.normal(size=shapes[name]).astype(np.float16) for name in shapes}
    m, b, g = weights.values()

    def assert_close(array: Array, expected: Array) -> None:
        assert array.dtype == np.float16
        np.testing.assert_allclose(array, expected, rtol=2e-2, atol=2e-2)

    options = EngineOptions(variable_weights=["m", "b", "g"], prepare="never")
    with Master(onnx_model(TWO_PRODUCTS), devices, options=options) as master:
        assert [spec.name for spec in master.inputs] == ["x"]
        assert [(spec.name, spec.shape) for spec in master.weights] == [*shapes.items()]
        before = master.predict({"x": x})
        assert not before["y"].any()
        assert master.update_weights({"m": m}) == 1
        after = master.predict({"x": x})
        assert_close(after["y"], x @ m)
        np.testing.assert_array_equal(after["z"], before["z"])
        assert master.update_weights({"g": g, "b": b}) == 2
        for future in [master.submit({"x": x}) for _ in range(6)]:
            assert_close(future.result(timeout=20.0)["z"], x @ g.T + b)
