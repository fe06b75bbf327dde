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
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from mcinfer import (
    BuildError,
    EngineOptions,
    Limits,
    Master,
    PredictTimeoutError,
    QueueFullError,
    RestartPolicy,
)
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


def test_request_after_an_update_sees_it_on_every_worker(fake_model: FakeModel) -> None:
    with fake_master(fake_model(**TWO_WEIGHTS), 2, options=REPLACEABLE) as master:
        assert [str(spec) for spec in master.weights] == ["w: float32[4]", "v: float32[]"]
        assert master.statistics().weights_version == 0
        for version in range(1, 6):
            assert ask(master, 6) == version - 1
            assert master.update_weights(both(version)) == version
            futures = [master.submit(rows(1)) for _ in range(9)]
            assert ask(master, 6) == version  # split over all
            assert {seen(future.result(timeout=20.0)) for future in futures} == {version}
            assert master.statistics().weights_version == version
        assert min(worker.completed for worker in master.statistics().workers) > 5


def test_no_answer_mixes_versions_nor_is_any_older_than_one_before_it(
    fake_model: FakeModel,
) -> None:
    """Two threads replace the weights, four ask, and one kills workers."""
    versions, stop = {0.0: 0}, threading.Event()
    answers: list[list[tuple[int, float]]] = [[] for _ in range(4)]
    numbers = itertools.count(1)
    options: dict[str, Any] = {"options": REPLACEABLE, "restart": GENEROUS, "max_batch_size": 8}
    with (
        fake_master(fake_model(**TWO_WEIGHTS), 2, **options) as master,
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
                if all(state in ("ready", "busy") for state in states(master)):
                    os.kill(chance.choice(pids(master)), signal.SIGKILL)

        clients = [(0, 8, None), (1, 3, 2), (2, 1, 1), (3, 2, 1)]
        running = [pool.submit(update), pool.submit(update), pool.submit(kill)]
        running += [pool.submit(client, *asks) for asks in clients]
        try:
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


def test_worker_that_is_started_again_serves_the_latest_version(fake_model: FakeModel) -> None:
    with fake_master(fake_model(**TWO_WEIGHTS), 1, options=REPLACEABLE, restart=GENEROUS) as master:
        assert master.update_weights(both(1)) == 1
        assert ask(master) == 1
        assert master.update_weights({"v": 2}) == 2
        assert master.update_weights({"w": [2] * 4}) == 3
        for restarts in (1, 2):
            os.kill(pids(master)[0], signal.SIGKILL)
            wait_until(lambda n=restarts: master.statistics().workers[0].restarts == n)  # type: ignore[misc]
            assert ask(master) == 2
        assert master.statistics().weights_version == 3


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


def test_future_callback_may_update(fake_model: FakeModel) -> None:
    with fake_master(fake_model(**TWO_WEIGHTS), 1, options=REPLACEABLE) as master:
        updated: Future[int] = Future()

        def update(_: object) -> None:
            updated.set_result(master.update_weights(both(3)))

        master.submit(rows(1)).add_done_callback(update)
        assert updated.result(timeout=20.0) == 1
        assert ask(master) == 3


# How a batch is split.

MIXING = """<ir_version: 8, opset_import: ["": 17]>
m (float[batch, 4] x) => (float[batch, 4] y) <float share = {0.0}> {
    mean = ReduceMean <axes = [0], keepdims = 1> (x)
    some = Mul(mean, share)
    y = Sub(x, some)
}"""
"""Rows less a share of their mean."""


def renew(master: Master, share: float) -> None:
    """Replace the share until its version is one with which the split is checked again: 1, 2, 4, 8 …"""
    while master.update_weights({"share": np.float32(share)}).bit_count() > 1:
        continue


def test_split_is_checked_again_with_new_weights_and_never_recorded_for_them(
    onnx_model: OnnxModel,
) -> None:
    path, options = onnx_model(MIXING), EngineOptions(variable_weights=["share"])
    x = np.random.default_rng(0).standard_normal((4, 4), np.float32)

    def check(master: Master, share: float) -> None:
        for _ in range(2):
            y = master.predict({"x": x})["y"]
            np.testing.assert_allclose(y, x - share * x.mean(0), rtol=1e-5, atol=1e-6)
        assert master.split.splits is (share == 0)

    with Master(path, 2, options=options) as master:
        check(master, 0)
        for share in (1, 0, 1):
            renew(master, share)
            check(master, share)
    with Master(path, 2, options=options) as master:
        assert master.split.known == "recorded"
        renew(master, 1)
        check(master, 1)
    with Master(path, 2) as master:
        assert master.split.known == "recorded"
        check(master, 0)


def test_update_in_the_middle_of_a_check_neither_spoils_it_nor_is_judged_by_it(
    fake_model: FakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = (["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": "w"}],)
    weights = [["w", "float32", [4], 0.0]]
    model = fake_model(outputs=outputs, weights=weights, run=f"told:{tmp_path}/run")
    pipe = HeldPipe(tmp_path / "run0")
    options = EngineOptions(variable_weights=["w"])
    with (
        Master(model, 2, engine="fake", options=options) as master,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(master.predict, rows(4))
        pipe.wait()  # the whole run has begun
        master.update_weights({"w": np.full(4, 5, np.float32)})
        pipe.tell("")
        np.testing.assert_array_equal(answer.result(timeout=20.0)["y"], 2 * rows(4)["x"])
        assert not master.split.settled  # of the new weights nothing is known
    assert not [record for record in caplog.records if "requests" in record.getMessage()]


# Memory.

LARGE = 1 << 18
"""Elements of a weight of 1 MiB."""

ONE_LARGE: dict[str, Any] = {
    "inputs": (["x", "float32", ["batch", 1]],),
    "outputs": (["y", "float32", ["batch", LARGE], {"from": "x", "scale": 0, "add": "w"}],),
    "weights": [["w", "float32", [LARGE], 0.0]],
}
ONE = EngineOptions(variable_weights=["w"])


def large(value: float) -> dict[str, Array]:
    return {"w": np.full(LARGE, value, np.float32)}


def test_memory_does_not_grow_with_updates(fake_model: FakeModel) -> None:
    model = fake_model(**ONE_LARGE)
    # Room for two versions and an answer; where more were held, it would be refused.
    limits = Limits(memory_bytes=3 * 4 * LARGE + 4096, when_full="raise")
    with fake_master(model, 1, options=ONE, limits=limits) as master:
        for value in range(1, 20):
            master.update_weights(large(value))
            y = master.predict({"x": np.zeros((1, 1), np.float32)})["y"]
            assert (y == value).all()
            del y
        assert master.statistics().memory_used_bytes == 4 * LARGE


def test_errors_that_are_kept_hold_no_version(fake_model: FakeModel) -> None:
    kept = []
    with fake_master(fake_model(**ONE_LARGE), 1, options=ONE) as master:
        for value in range(1, 5):
            master.update_weights(large(value))
            with pytest.raises(PredictTimeoutError) as late:
                master.predict({"x": np.zeros((1, 1), np.float32)}, timeout=0.0)
            kept.append(late)
        wait_until(lambda: master.statistics().memory_used_bytes == 4 * LARGE)


def test_update_without_memory_waits_for_its_timeout_and_changes_nothing(
    fake_model: FakeModel,
) -> None:
    model = fake_model(**ONE_LARGE)
    limits = Limits(memory_bytes=2 * 4 * LARGE)
    with fake_master(model, 1, options=ONE, limits=limits) as master, ThreadPoolExecutor(1) as pool:
        master.update_weights(large(1))
        held = master.allocate({"x": (LARGE, 1)})
        with pytest.raises(QueueFullError):
            master.update_weights(large(2), timeout=0.05)
        assert master.statistics().weights_version == 1
        later = pool.submit(master.update_weights, large(3), timeout=20.0)
        del held
        assert later.result(timeout=20.0) == 2


# ONNX Runtime.


def _onnx_affine(path: Path, weights: dict[str, Array]) -> Path:
    """Writes y = x·m, and z = x·gᵀ + b, in the type of the weights."""
    kind = helper.np_dtype_to_tensor_dtype(weights["m"].dtype)
    tensors = [
        helper.make_tensor_value_info(name, kind, ["batch", width])
        for name, width in (("x", 16), ("y", 32), ("z", 8))
    ]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "m"], ["y"]),
            helper.make_node("Gemm", ["x", "g", "b"], ["z"], transB=1),
        ],
        "affine",
        tensors[:1],
        tensors[1:],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def _random(seed: int, dtype: str) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    shapes: dict[str, Sequence[int]] = {"m": (16, 32), "g": (8, 16), "b": (8,)}
    return {name: generator.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def test_onnx_model_answers_as_one_that_was_built_with_the_new_weights(
    tmp_path: Path,
) -> None:
    dtype, tolerance = "float16", 2e-2
    old, new = _random(0, dtype), _random(1, dtype)
    inputs = {"x": np.random.default_rng(2).normal(size=(6, 16)).astype(dtype)}

    def assert_same(outputs: Inputs, expected: Inputs) -> None:
        for name, value in expected.items():
            assert outputs[name].dtype == value.dtype
            np.testing.assert_allclose(outputs[name], value, rtol=tolerance, atol=tolerance)

    with Master(_onnx_affine(tmp_path / "new.onnx", new), 1) as fixed:
        expected = fixed.predict(inputs)
    options = EngineOptions(variable_weights=["m", "b", "g"], prepare="never")
    with Master(_onnx_affine(tmp_path / "old.onnx", old), 2, options=options) as master:
        assert [spec.name for spec in master.inputs] == ["x"]
        assert [(spec.name, spec.shape) for spec in master.weights] == [
            ("m", (16, 32)),
            ("b", (8,)),
            ("g", (8, 16)),
        ]
        before = master.predict(inputs)
        assert not np.allclose(before["y"], expected["y"])
        assert master.update_weights({"m": new["m"]}) == 1
        assert_same(master.predict(inputs), {"y": expected["y"], "z": before["z"]})
        assert master.update_weights({"g": new["g"], "b": new["b"]}) == 2
        for future in [master.submit(inputs) for _ in range(6)]:
            assert_same(future.result(timeout=20.0), expected)
        assert master.update_weights(old) == 3
        assert_same(master.predict(inputs), before)


def test_onnx_model_without_such_a_weight_is_a_build_error_that_names_it(tmp_path: Path) -> None:
    model = _onnx_affine(tmp_path / "model.onnx", _random(0, "float32"))
    with pytest.raises(BuildError, match=r"variable.weights.*'none'"):
        Master(model, 1, options=EngineOptions(variable_weights=["m", "none"])).start()
