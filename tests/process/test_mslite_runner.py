"""Tests of mcinfer/mslite/_runner.py: many clients, on real workers with ONNX Runtime.

The core's tests show what workers do; these show that it is reached by MindSpore Lite's names.
"""

import asyncio
import gc
import os
import signal
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mcinfer
from mcinfer import Master
from mcinfer.mslite import Context, DataType, ModelParallelRunner, RunnerConfig, Tensor
from mcinfer.mslite._runner import CallBackParam
from tests.process.models import AFFINE, OnnxModel
from tests.process.waiting import all_gone, is_alive, pids, wait_until

HEAD = '<ir_version: 8, opset_import: ["": 17]>'

LOOP = f"""{HEAD}
loop (int64 n, float[batch, 4] x) => (float[batch, 4] y) <bool go = {{1}}> {{
    y = Loop <body = step (int64 i, bool go_in, float[b, 4] v) => (bool go_out, float[b, 4] w) {{
        go_out = Identity(go_in)
        w = Neg(v)
    }}> (n, go, x)
}}
"""
"""Changes the sign n times: as long a run as is wanted."""

BUILD = "ModelParallelRunner's build from file failed"

ENDLESS = np.array(10**12)
ONCE = np.array(1)


def floats(*shape: int) -> NDArray[np.float32]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


def assert_answer(outputs: list[Tensor], data: NDArray[np.float32]) -> None:
    """Fail unless it is y = 2x + 1."""
    [output] = outputs
    np.testing.assert_array_equal(output.get_data_to_numpy(), data * 2 + 1)


def on_cpu(workers: int = 1) -> Context:
    context = Context()
    context.parallel.workers_num = workers
    return context


def built(path: Path, workers: int = 1, **more: Any) -> ModelParallelRunner:
    """A runner; `more` is for its configuration."""
    runner = ModelParallelRunner()
    runner.init(str(path), RunnerConfig(on_cpu(workers), **more))
    return runner


def master_of(runner: ModelParallelRunner) -> Master:
    assert runner._master is not None
    return runner._master


def begin_endless(runner: ModelParallelRunner) -> "Future[list[Tensor]]":
    """A run without end on one worker, once it is in it."""

    def is_busy() -> bool:
        return runner.statistics().workers[0].state == "busy"

    wait_until(lambda: not is_busy(), timeout=60.0)  # with a run that was given up
    future = runner.submit([ENDLESS, floats(1, 4)], timeout=60.0)
    wait_until(is_busy, timeout=60.0)
    return future


def test_configuration_takes_from_the_context_what_it_does_not_say() -> None:
    context = on_cpu(3)
    context.parallel.device_ids = [1, 0]
    context.parallel.config_info = {"a": {"b": "c"}}
    config = RunnerConfig(context)
    assert (config.workers_num, config.device_ids) == (3, [1, 0])
    assert config.sections == {"a": {"b": "c"}}
    other = RunnerConfig(context, 2, {"a": {"b": "d"}}, device_ids=[0])
    assert (other.workers_num, other.device_ids) == (2, [0])
    assert other.sections == {"a": {"b": "d"}}
    assert context.parallel.sections == {"a": {"b": "c"}}


def test_failed_build_leaves_no_process_and_one_good_build_can_follow(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    broken, path = tmp_path / "broken.onnx", onnx_model(AFFINE)
    broken.write_bytes(b"nothing of the kind")
    content, config = path.read_bytes(), RunnerConfig(on_cpu())
    with ModelParallelRunner() as runner:
        with pytest.raises(mcinfer.BuildError, match=rf"^{BUILD}! Error is worker 0 .*onnxruntime"):
            runner.build_from_file(str(broken), on_cpu())
        runner.init(content, config)
        assert str(runner) == "model_path: buffer."
        with pytest.raises(RuntimeError, match=r"^ModelParallelRunner's init .*built already"):
            runner.init(content, config)
        with pytest.raises(RuntimeError, match=rf"^{BUILD}! .*built already"):
            runner.build_from_file(str(path), on_cpu())
        # A worker that starts again still finds the buffer.
        [pid] = pids(master_of(runner))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), timeout=60.0)
        assert_answer(runner.predict([floats(2, 4)]), floats(2, 4))


def test_closed_runner_refuses_all_and_is_closed_again(onnx_model: OnnxModel) -> None:
    path = onnx_model(AFFINE)
    with built(path) as runner:
        inputs = runner.get_inputs()
        inputs[0].set_data_from_numpy(floats(1, 4))
        answer = runner.predict(inputs)
    runner.close()
    assert_answer(answer, floats(1, 4))
    for refused in (
        lambda: runner.predict(inputs),
        lambda: runner.submit(inputs),
        lambda: asyncio.run(runner.predict_async(inputs)),
    ):
        with pytest.raises(RuntimeError, match=r"^predict failed! Error is .*closed") as caught:
            refused()
        assert isinstance(caught.value, mcinfer.ClosedError)
    with pytest.raises(RuntimeError, match=r"^allocate failed! Error is .*closed"):
        runner.get_inputs()[0].set_data_from_numpy(floats(1, 4))
    with pytest.raises(RuntimeError, match=rf"^{BUILD}! Error is the runner is closed"):
        runner.build_from_file(str(path))
    assert runner.statistics().succeeded == 1


def test_futures_and_tensors_that_are_kept_do_not_keep_the_workers(
    onnx_model: OnnxModel, request: pytest.FixtureRequest
) -> None:
    gc.collect()
    gc.disable()  # what is in a cycle stays
    request.addfinalizer(gc.enable)
    runner = built(onnx_model(AFFINE))
    inputs, unused = runner.get_inputs(), runner.get_inputs()
    inputs[0].set_data_from_numpy(floats(2, 4))
    future = runner.submit(inputs)
    answer = runner.predict(inputs)
    future.result(60.0)
    workers = pids(master_of(runner))
    gone = weakref.ref(master_of(runner))
    del runner
    assert gone() is None
    wait_until(lambda: all_gone(workers), timeout=60.0)
    assert_answer(future.result(), floats(2, 4))
    assert_answer(answer, floats(2, 4))
    np.testing.assert_array_equal(inputs[0].get_data_to_numpy(), floats(2, 4))
    with pytest.raises(RuntimeError, match=r"^allocate failed! Error is the runner is gone$") as e:
        unused[0].set_data_from_numpy(floats(2, 4))
    assert isinstance(e.value, mcinfer.ClosedError)


def test_inputs_are_fresh_at_each_call_and_shared_memory_until_they_are_garbage(
    onnx_model: OnnxModel,
) -> None:
    with built(onnx_model(LOOP)) as runner:
        [n, x], [_, tensor] = runner.get_inputs(), runner.get_inputs()
        assert (n.name, x.name, x.dtype, x.shape) == ("n", "x", DataType.FLOAT32, [-1, 4])
        assert runner.statistics().memory_used_bytes == 0
        n.set_data_from_numpy(ONCE)
        x.shape = [2, 4]
        x.set_data_from_numpy(floats(8))  # flat, as programs do
        assert runner.statistics().memory_used_bytes > 0
        [output] = runner.predict([n, x])
        np.testing.assert_array_equal(output.get_data_to_numpy(), -floats(2, 4))
        # What the worker reads is the memory itself of a filled tensor, and a copy of an array.
        tensor.set_data_from_numpy(floats(3, 4))
        array = floats(3, 4)
        running = begin_endless(runner)
        by_tensor, by_array = runner.submit([ONCE, tensor]), runner.submit([ONCE, array])
        tensor.get_data_to_numpy()[:] = 7
        array[:] = 7
        running.cancel()
        assert (by_tensor.result(60.0)[0].get_data_to_numpy() == -7).all()
        np.testing.assert_array_equal(by_array.result(60.0)[0].get_data_to_numpy(), -floats(3, 4))
        del n, x, tensor, output, _, running, by_tensor, by_array
        wait_until(lambda: runner.statistics().memory_used_bytes == 0, timeout=60.0)


def test_callbacks_are_called_around_the_run_and_what_does_not_fit_fails_its_call_alone(
    onnx_model: OnnxModel,
) -> None:
    with built(onnx_model(AFFINE)) as runner:
        calls: list[tuple[Any, ...]] = []

        def note(inputs: list[Any], outputs: list[Tensor], what: Any) -> None:
            if not calls:
                assert runner.statistics().accepted == 0
                inputs[0].set_data_from_numpy(floats(2, 4))  # what runs
            calls.append((threading.current_thread(), inputs[0], outputs, what))

        def raises(*_: object) -> bool:
            raise LookupError("of the user's own")

        [tensor] = runner.get_inputs()
        answer = runner.predict([tensor], None, note, note)
        assert_answer(answer, floats(2, 4))
        path = str(runner).removeprefix("model_path: ").removesuffix(".")
        what, here = CallBackParam(node_name=path, node_type="Model"), threading.current_thread()
        assert calls == [(here, tensor, [], what), (here, tensor, answer, what)]
        outputs: list[Tensor] = []
        for callbacks, text in (
            ({"before": raises}, "the callback 'before' raised LookupError: of the user's own"),
            ({"after": lambda *_: False}, "the callback 'after' returned False"),
        ):
            with pytest.raises(RuntimeError, match=f"^predict failed! Error is {text}$"):
                runner.predict([floats(1, 4)], outputs, **callbacks)
        assert_answer(outputs, floats(1, 4))  # `after` failed once the answer was there

        with pytest.raises(TypeError, match=r"^inputs .*must be"):
            runner.predict(None)  # type: ignore[arg-type]
        for ask in (
            lambda: runner.predict([], None, lambda *_: pytest.fail("it was called")),
            lambda: runner.submit([]),
            lambda: asyncio.run(runner.predict_async(())),
        ):
            with pytest.raises(RuntimeError, match=r"^predict failed! .*len:1 not equal input l"):
                ask()
        for data in (floats(1, 5), Tensor(None, [1, 4], DataType.FLOAT32)):
            with pytest.raises(
                mcinfer.InvalidInputError, match=r"^predict failed! Error is input "
            ):
                runner.predict([data])
        assert runner.statistics().accepted == 2
