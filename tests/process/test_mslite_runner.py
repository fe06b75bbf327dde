"""Tests of mcinfer/mslite/_runner.py: many clients, on real workers with ONNX Runtime."""

import asyncio
import gc
import os
import random
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser

import mcinfer
from mcinfer import Master
from mcinfer.config import automatic_workers
from mcinfer.machine import whole_cpus
from mcinfer.mslite import Context, DataType, ModelParallelRunner, RunnerConfig, Tensor
from mcinfer.mslite._targets import Attempt
from tests.process.models import AFFINE, FakeModel, OnnxModel
from tests.process.waiting import all_gone, busy_pid, is_alive, pids, wait_for_states, wait_until

HEAD = '<ir_version: 8, opset_import: ["": 17]>'

PLANE = f"""{HEAD}
plane (float[batch, n] x) => (float[batch, n] y) <float two = {{2.0}}, float one = {{1.0}}> {{
    doubled = Mul(x, two)
    y = Add(doubled, one)
}}
"""
"""y = 2x + 1 with both sizes open."""

LOOP = f"""{HEAD}
loop (int64 n, float[batch, 4] x) => (float[batch, 4] y) <bool go = {{1}}> {{
    y = Loop <body = step (int64 i, bool go_in, float[b, 4] v) => (bool go_out, float[b, 4] w) {{
        go_out = Identity(go_in)
        w = Neg(v)
    }}> (n, go, x)
}}
"""
"""Changes the sign n times: as long a run as is wanted."""

TO_ORDER = f"{HEAD} to_order (float[n] x, int64[r] to) => (float[a, b] y) {{ y = Reshape(x, to) }}"
"""Only a run tells the size of the output; it fails where the sizes do not go together."""

WEIGHED = f"""{HEAD}
weighed (float[batch, 2] x) => (float[batch, 2] y) <float[2] w = {{10, 20}}> {{ y = Add(x, w) }}
"""

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


def devices(runner: ModelParallelRunner) -> list[str]:
    return [worker.device for worker in runner.statistics().workers]


def begin_endless(runner: ModelParallelRunner) -> "Future[list[Tensor]]":
    """A run without end on one worker, once it is in it."""
    before = [worker.state for worker in runner.statistics().workers].count("busy")
    future = runner.submit([ENDLESS, floats(1, 4)])
    wait_until(
        lambda: [w.state for w in runner.statistics().workers].count("busy") == before + 1,
    )
    return future


# What is wrong before any worker starts.

ABSENT = "/nowhere/model.onnx"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, 1), "model_path must be str, but got <class 'int'>."),
        ((b"", None), "model_path must be str, but got <class 'bytes'>."),
        ((ABSENT, 1), "context must be Context, but got <class 'int'>."),
    ],
)
def test_wrong_types_are_told_before_a_path_that_is_not_there(
    arguments: tuple[Any, Any], text: str
) -> None:
    with pytest.raises(TypeError) as caught:
        ModelParallelRunner().build_from_file(*arguments)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, 1), "model_path must be str or bytes, but got <class 'int'>."),
        ((ABSENT, Context()), "runner_config must be RunnerConfig, but got "),
        ((b"", 1), "runner_config must be RunnerConfig, but got <class 'int'>."),
    ],
)
def test_wrong_types_of_init_are_told(arguments: tuple[Any, Any], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        ModelParallelRunner().init(*arguments)
    assert str(caught.value).startswith(text)


def test_model_that_is_not_there_is_told() -> None:
    with pytest.raises(RuntimeError) as caught:
        ModelParallelRunner().build_from_file(ABSENT)
    assert str(caught.value) == f"{BUILD}, model_path does not exist!"
    with pytest.raises(RuntimeError) as caught:
        ModelParallelRunner().init(ABSENT)
    assert str(caught.value) == "ModelParallelRunner's init failed, model_path does not exist!"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"context": "cpu"}, TypeError),
        ({"workers_num": "2"}, TypeError),
        ({"workers_num": -1}, ValueError),
        ({"config_info": []}, TypeError),
        ({"config_info": {"a": {"b": 1}}}, TypeError),
        ({"config_path": 1}, TypeError),
        ({"config_path": ABSENT}, ValueError),
        ({"device_ids": 0}, TypeError),
        ({"device_ids": [-1]}, ValueError),
        ({"max_batch_size": 0}, ValueError),
        ({"max_delay": -1.0}, ValueError),
        ({"queue_size": 0}, ValueError),
        ({"timeout": "1"}, ValueError),
    ],
)
def test_wrong_configuration_is_refused_where_it_is_made(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        RunnerConfig(**arguments)
    config = RunnerConfig()
    [(name, value)] = arguments.items()
    with pytest.raises(error):
        setattr(config, name, value)


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
    config.context = Context()
    assert config.context.parallel.workers_num == 0


def test_misspelt_option_is_told() -> None:
    config = RunnerConfig()
    with pytest.warns(UserWarning, match="'worker_num'"):
        config.worker_num = 2


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("get_inputs", lambda runner: runner.get_inputs()),
        ("get_outputs", lambda runner: runner.get_outputs()),
        ("statistics", lambda runner: runner.statistics()),
        ("predict", lambda runner: runner.predict([])),
        ("predict", lambda runner: runner.submit([])),
        ("predict", lambda runner: asyncio.run(runner.predict_async([]))),
    ],
)
def test_runner_that_is_not_built_does_nothing(
    name: str, call: Callable[[ModelParallelRunner], object]
) -> None:
    with pytest.raises(RuntimeError) as caught:
        call(ModelParallelRunner())
    assert str(caught.value) == f"{name} failed! Error is the model is not built"


def test_too_many_workers_are_refused(onnx_model: OnnxModel) -> None:
    most = 5 * len(os.sched_getaffinity(0))
    with pytest.raises(
        RuntimeError, match=rf"^{BUILD}! Error is workers_num: got {most + 1}, expected at most 5"
    ):
        ModelParallelRunner().build_from_file(str(onnx_model(AFFINE)), on_cpu(most + 1))


@pytest.mark.parametrize("listed", [[0], [0, 0, 0]])
def test_core_list_of_another_length_is_refused(onnx_model: OnnxModel, listed: list[int]) -> None:
    context = on_cpu(2)
    context.cpu.thread_num = 1
    context.cpu.thread_affinity_core_list = listed
    text = f"got {len(listed)} cores, expected threads x workers = 1 x 2"
    with pytest.raises(
        RuntimeError, match=f"^{BUILD}! Error is cpu_thread_affinity_core_list: {text}"
    ):
        ModelParallelRunner().build_from_file(str(onnx_model(AFFINE)), context)


# Building.


def test_model_that_does_not_load_fails_the_build_and_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"nothing of the kind")
    runner = ModelParallelRunner()
    with pytest.raises(mcinfer.BuildError, match=rf"^{BUILD}! Error is worker 0 .*onnxruntime"):
        runner.build_from_file(str(path), on_cpu())
    with pytest.raises(mcinfer.BuildError, match=r"^ModelParallelRunner's init failed! Error is "):
        runner.init(b"\x08nothing", RunnerConfig(on_cpu()))


def test_failed_build_can_be_followed_by_a_good_one(onnx_model: OnnxModel, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"nothing of the kind")
    with ModelParallelRunner() as runner:
        with pytest.raises(mcinfer.BuildError):
            runner.build_from_file(str(path), on_cpu())
        runner.build_from_file(str(onnx_model(AFFINE)), on_cpu())
        assert_answer(runner.predict([floats(1, 4)]), floats(1, 4))


def test_second_build_is_refused_and_the_first_stays_whole(onnx_model: OnnxModel) -> None:
    content = onnx_model(AFFINE).read_bytes()
    with ModelParallelRunner() as runner:
        runner.init(content, RunnerConfig(on_cpu()))
        with pytest.raises(
            RuntimeError, match=r"^ModelParallelRunner's init failed! .*built already"
        ):
            runner.init(content)
        with pytest.raises(RuntimeError, match=rf"^{BUILD}! .*built already"):
            runner.build_from_file(str(onnx_model(AFFINE)))
        # A worker that starts again still finds the buffer.
        [pid] = pids(master_of(runner))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
        assert_answer(runner.predict([floats(2, 4)]), floats(2, 4))


def test_runner_says_what_it_serves(onnx_model: OnnxModel) -> None:
    path = onnx_model(AFFINE)
    assert str(ModelParallelRunner()) == "model_path: ."
    with built(path) as runner:
        assert str(runner) == f"model_path: {path}."
        [output] = runner.get_outputs()
        assert isinstance(output, Tensor)
        assert (output.name, output.dtype, output.shape) == ("y", DataType.FLOAT32, [-1, 4])


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


def test_close_fails_what_is_in_flight(onnx_model: OnnxModel) -> None:
    with built(onnx_model(LOOP)) as runner:
        running = begin_endless(runner)
        queued = runner.submit([ONCE, floats(1, 4)])
        runner.close(timeout=0.1)
        for future in (running, queued):
            with pytest.raises(mcinfer.ClosedError, match=r"^predict failed! Error is "):
                future.result(10.0)


def test_runner_that_becomes_garbage_leaves_nothing(onnx_model: OnnxModel) -> None:
    runner = ModelParallelRunner()
    runner.init(onnx_model(AFFINE).read_bytes(), RunnerConfig(on_cpu()))
    assert_answer(runner.predict([floats(1, 4)]), floats(1, 4))
    del runner
    gc.collect()  # the rest is for the fixture to see


def test_closing_in_a_callback_and_in_another_thread_end_both(onnx_model: OnnxModel) -> None:
    with built(onnx_model(LOOP)) as runner:
        running = begin_endless(runner)
        closed = threading.Event()

        def close(_: object) -> None:
            runner.close()
            closed.set()

        running.add_done_callback(close)
        thread = threading.Thread(target=runner.close, args=(0.1,), daemon=True)
        thread.start()
        thread.join(10.0)
        assert not thread.is_alive()
        assert closed.is_set()


def fake_attempts(*_: object) -> list[list[Attempt]]:
    return [[Attempt(target="cpu", engine="fake", kind="cpu")]] * 2


@pytest.mark.parametrize("begun", [False, True], ids=["as it begins", "in it"])
def test_closing_during_a_build_makes_it_fail_and_leaves_nothing(
    fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr("mcinfer.mslite._runner.attempts", fake_attempts)
    content = fake_model(build="hang:50").read_bytes()
    for _ in range(1 if begun else 10):
        runner = ModelParallelRunner()
        with ThreadPoolExecutor(1) as pool:
            build = pool.submit(runner.init, content, RunnerConfig(on_cpu(2)))
            wait_until(lambda r=runner: r._starting is not None)  # type: ignore[misc]
            if begun:
                start = runner._starting
                assert start is not None
                wait_until(lambda s=start: len(pids(s)) == 2)  # type: ignore[misc]
            runner.close()
            with pytest.raises(
                RuntimeError, match=r"^ModelParallelRunner's init failed! "
            ) as caught:
                build.result(10.0)
            assert isinstance(caught.value, mcinfer.ClosedError)
            runner.close()
        with pytest.raises(mcinfer.ClosedError):
            runner.init(content)


def test_second_build_during_the_first_is_refused_at_once(
    fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcinfer.mslite._runner.attempts", fake_attempts)
    path = str(fake_model(build="hang:50"))
    with ModelParallelRunner() as runner, ThreadPoolExecutor(1) as pool:
        build = pool.submit(runner.build_from_file, path, on_cpu())
        wait_until(lambda: runner._starting is not None)
        with pytest.raises(mcinfer.BuildError, match="is being built"):
            runner.build_from_file(path, on_cpu())
        runner.close()
        with pytest.raises(mcinfer.ClosedError):
            build.result(10.0)


def test_error_once_the_workers_serve_ends_them(
    onnx_model: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Master):
        def start(self) -> Self:
            super().start()
            raise KeyboardInterrupt

    started = []

    def make(*given: Any, **more: Any) -> Master:
        started.append(Interrupted(*given, **more))
        return started[0]

    with ModelParallelRunner() as runner:
        with monkeypatch.context() as patch:
            patch.setattr("mcinfer.mslite._runner_config.Master", make)
            with pytest.raises(KeyboardInterrupt):
                runner.build_from_file(str(onnx_model(AFFINE)), on_cpu())
        assert {worker.state for worker in started[0].statistics().workers} == {"gone"}
        runner.build_from_file(str(onnx_model(AFFINE)), on_cpu())
        assert_answer(runner.predict([floats(1, 4)]), floats(1, 4))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is in a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_memory_of_a_future_is_free_when_the_last_hold_of_it_is_gone(
    onnx_model: OnnxModel,
) -> None:
    with built(onnx_model(AFFINE)) as runner:
        for _ in range(3):
            future = runner.submit([floats(1000, 4)])
            [output] = future.result(10.0)
            assert_answer([output], floats(1000, 4))
            assert runner.statistics().memory_used_bytes >= 16_000
            del future, output
            wait_until(lambda: runner.statistics().memory_used_bytes == 0)


@pytest.mark.usefixtures("no_collector")
def test_futures_and_tensors_that_are_kept_do_not_keep_the_workers(onnx_model: OnnxModel) -> None:
    runner = built(onnx_model(AFFINE))
    inputs, unused = runner.get_inputs(), runner.get_inputs()
    inputs[0].set_data_from_numpy(floats(2, 4))
    future = runner.submit(inputs)
    answer = runner.predict(inputs)
    future.result(10.0)
    workers = pids(master_of(runner))
    gone = weakref.ref(master_of(runner))
    del runner
    assert gone() is None
    wait_until(lambda: all_gone(workers))
    assert_answer(future.result(), floats(2, 4))
    assert_answer(answer, floats(2, 4))
    np.testing.assert_array_equal(inputs[0].get_data_to_numpy(), floats(2, 4))
    with pytest.raises(RuntimeError, match=r"^allocate failed! Error is the runner is gone$") as e:
        unused[0].set_data_from_numpy(floats(2, 4))
    assert isinstance(e.value, mcinfer.ClosedError)


# How many workers, and where.


def test_number_of_workers_is_upstreams_where_nobody_says_it(onnx_model: OnnxModel) -> None:
    with ModelParallelRunner() as runner:
        runner.build_from_file(str(onnx_model(AFFINE)))
        assert len(devices(runner)) == automatic_workers(whole_cpus())
        assert_answer(runner.predict([floats(3, 4)]), floats(3, 4))


def test_device_ids_go_round(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE), 3, device_ids=[1, 0]) as runner:
        assert devices(runner) == ["cpu:1", "cpu:0", "cpu:1"]


def test_workers_are_bound_to_the_cores_of_the_list(onnx_model: OnnxModel) -> None:
    cores = sorted(os.sched_getaffinity(0))
    listed = [cores[-1], cores[0]]
    context = on_cpu(2)
    context.cpu.thread_num = 1
    context.cpu.thread_affinity_core_list = listed
    with ModelParallelRunner() as runner:
        runner.build_from_file(str(onnx_model(AFFINE)), context)
        bound = [os.sched_getaffinity(pid) for pid in pids(master_of(runner))]
        assert bound == [{core} for core in listed]
        assert_answer(runner.predict([floats(3, 4)]), floats(3, 4))


def warned(path: Path, context: Context, match: str) -> ModelParallelRunner:
    """A runner, and the one warning that its build gave, which points here."""
    runner = ModelParallelRunner()
    with pytest.warns(UserWarning, match=match) as caught:
        runner.build_from_file(str(path), context)
    [warning] = caught
    assert warning.filename == __file__
    return runner


def test_device_that_is_not_here_is_replaced_by_the_cpu_and_told_once(
    onnx_model: OnnxModel,
) -> None:
    context = on_cpu()
    context.target = ["ascend"]
    context.parallel.device_ids = [3]
    text = r"^target ascend cannot be used here \(.*\): the model runs on the cpu$"
    with warned(onnx_model(AFFINE), context, text) as runner:
        assert devices(runner) == ["cpu:0"]
        assert_answer(runner.predict([floats(3, 4)]), floats(3, 4))


def test_cpu_in_the_place_of_a_device_has_as_many_workers_as_a_cpu(
    onnx_model: OnnxModel,
) -> None:
    context = Context()
    context.target = ["gpu"]
    context.parallel.device_ids = [0]
    with warned(onnx_model(AFFINE), context, "the model runs on the cpu") as runner:
        assert len(devices(runner)) == automatic_workers(whole_cpus())


def test_device_that_is_not_here_is_an_error_where_that_is_wanted(
    onnx_model: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCINFER_STRICT_DEVICE", "1")
    context = on_cpu()
    context.target = ["ascend"]
    with pytest.raises(RuntimeError, match=rf"^{BUILD}! Error is worker 0 \(ascend:0"):
        ModelParallelRunner().build_from_file(str(onnx_model(AFFINE)), context)


def test_warning_that_is_an_error_leaves_no_process_and_the_runner_can_be_built(
    onnx_model: OnnxModel,
) -> None:
    context = on_cpu()
    context.target = ["ascend"]
    with ModelParallelRunner() as runner:
        with pytest.raises(UserWarning, match="the model runs on the cpu"):
            runner.build_from_file(str(onnx_model(AFFINE)), context)
        with pytest.raises(UserWarning, match="without an effect"):
            runner.init(
                onnx_model(AFFINE).read_bytes(),
                RunnerConfig(on_cpu(), config_info={"a": {"b": "c"}}),
            )
        runner.build_from_file(str(onnx_model(AFFINE)), on_cpu())
        assert_answer(runner.predict([floats(3, 4)]), floats(3, 4))


def test_entries_without_an_effect_are_told_once(onnx_model: OnnxModel, tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    config.write_text("[a]\nb=1\n", encoding="utf-8")
    context = on_cpu()
    context.parallel.config_path = str(config)
    context.parallel.config_info = {"c": {"d": "1"}}
    with warned(onnx_model(AFFINE), context, r": \[a\] b, \[c\] d$"):
        pass


# Models from memory.


def test_buffer_is_served(onnx_model: OnnxModel) -> None:
    with ModelParallelRunner() as runner:
        runner.init(onnx_model(AFFINE).read_bytes(), RunnerConfig(on_cpu(2)))
        assert str(runner) == "model_path: buffer."
        assert_answer(runner.predict([floats(3, 4)]), floats(3, 4))


@pytest.mark.parametrize("by_file", [False, True])
def test_buffer_finds_its_weights_beside_the_path_that_is_named(
    tmp_path: Path, by_file: bool
) -> None:
    model = parser.parse_model(WEIGHED)
    for weight in model.graph.initializer:  # only raw data can lie outside
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight), weight.name))
    path = tmp_path / "model.onnx"
    onnx.save_model(
        model, path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    config = RunnerConfig(on_cpu())
    if by_file:
        (tmp_path / "config.ini").write_text(f"[model_file]\nmindir_path = '{path}'\n", "utf-8")
        config.config_path = str(tmp_path / "config.ini")
    else:
        config.config_info = {"model_file": {"mindir_path": str(path)}}
    with ModelParallelRunner() as runner:
        runner.init(path.read_bytes(), config)
        [output] = runner.predict([floats(1, 2)])
        assert output.get_data_to_numpy().tolist() == [[11, 22]]


def test_buffer_whose_weights_are_in_no_such_folder_is_refused(onnx_model: OnnxModel) -> None:
    config = RunnerConfig(on_cpu(), config_info={"model_file": {"mindir_path": "/nowhere/x"}})
    with pytest.raises(RuntimeError, match=r"init failed! Error is \[model_file\] mindir_path"):
        ModelParallelRunner().init(onnx_model(AFFINE).read_bytes(), config)


# Requests.


def test_inputs_are_fresh_at_each_call(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE), 2) as runner:
        [first], [second] = runner.get_inputs(), runner.get_inputs()
        assert (first.name, first.dtype, first.shape) == ("x", DataType.FLOAT32, [-1, 4])
        first.set_data_from_numpy(floats(2, 4))
        second.set_data_from_numpy(floats(3, 4) * 5)
        assert (first.shape, second.shape) == ([2, 4], [3, 4])
        assert_answer(runner.predict([first]), floats(2, 4))
        assert_answer(runner.predict([second]), floats(3, 4) * 5)


def test_inputs_take_flat_data_once_they_have_a_shape(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE), 2) as runner:
        [tensor] = runner.get_inputs()
        tensor.shape = [2, 4]
        tensor.set_data_from_numpy(floats(8))
        assert_answer(runner.predict([tensor]), floats(2, 4))
        with pytest.raises(RuntimeError, match=r"^data size not equal! "):
            tensor.set_data_from_numpy(floats(9))


def test_inputs_lie_in_shared_memory_until_they_are_garbage(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE), 2) as runner:
        [tensor] = runner.get_inputs()
        assert runner.statistics().memory_used_bytes == 0
        tensor.set_data_from_numpy(floats(1000, 4))
        assert runner.statistics().memory_used_bytes == 16_000
        del tensor
        wait_until(lambda: runner.statistics().memory_used_bytes == 0)


def test_filled_tensor_is_not_copied_again_and_an_array_is(onnx_model: OnnxModel) -> None:
    with built(onnx_model(LOOP)) as slow:
        first = begin_endless(slow)
        _, tensor = slow.get_inputs()
        tensor.set_data_from_numpy(floats(1000, 4))
        array = floats(1000, 4)
        used = slow.statistics().memory_used_bytes
        by_tensor = slow.submit([ONCE, tensor])
        more_for_tensor = slow.statistics().memory_used_bytes - used
        by_array = slow.submit([ONCE, array])
        more_for_array = slow.statistics().memory_used_bytes - used - more_for_tensor
        assert more_for_array - more_for_tensor == 16_000  # the rest is for the output
        # Both wait. What the worker reads is the memory itself of the one, and a copy of the other.
        tensor.get_data_to_numpy()[:] = 7
        array[:] = 7
        first.cancel()
        assert (by_tensor.result(10.0)[0].get_data_to_numpy() == -7).all()
        np.testing.assert_array_equal(
            by_array.result(10.0)[0].get_data_to_numpy(), -floats(1000, 4)
        )


def test_inputs_of_all_kinds_are_served(onnx_model: OnnxModel) -> None:
    with built(onnx_model(LOOP)) as slow:
        kinds: list[Sequence[Tensor | NDArray[Any]]] = [
            [Tensor(ONCE), Tensor(floats(2, 4))],
            (ONCE, floats(2, 4)),
            [ONCE, Tensor(floats(2, 4))],
            [ONCE, np.asfortranarray(floats(2, 4))],
        ]
        for inputs in kinds:
            [output] = slow.predict(inputs)
            assert (output.name, output.dtype, output.shape) == ("y", DataType.FLOAT32, [2, 4])
            np.testing.assert_array_equal(output.get_data_to_numpy(), -floats(2, 4))


def test_new_shapes_need_no_resize(onnx_model: OnnxModel) -> None:
    with built(onnx_model(PLANE), 2) as runner:
        for shape in ((1, 1), (3, 5), (2, 100), (1, 1), (0, 5)):
            assert_answer(runner.predict([floats(*shape)]), floats(*shape))


def test_inputs_that_do_not_fit_are_told_and_harm_nobody(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE), 2) as runner:
        with pytest.raises(TypeError, match=r"^inputs must be list, but got <class 'NoneType'>\.$"):
            runner.predict(None)  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match=r"^inputs element must be Tensor or numpy.ndarray, but"
        ):
            runner.predict([[1.0]])  # type: ignore[list-item]
        text = "^predict failed! Error is model input len:1 not equal input len:"
        with pytest.raises(RuntimeError, match=f"{text}2!$"):
            runner.predict([floats(1, 4)] * 2)
        with pytest.raises(RuntimeError, match=f"{text}0!$"):
            runner.submit([])
        with pytest.raises(RuntimeError, match=f"{text}0!$"):
            asyncio.run(runner.predict_async(()))
        for data in (floats(1, 5), floats(4), floats(1, 4).astype(np.float64)):
            with pytest.raises(RuntimeError, match=r"^predict failed! Error is .*'x'") as caught:
                runner.predict([data])
            assert isinstance(caught.value, mcinfer.InvalidInputError)
            with pytest.raises(RuntimeError, match=r"^predict failed! Error is .*'x'"):
                runner.submit([data])
        with pytest.raises(RuntimeError, match=r"^predict failed! Error is input 'x' has no data"):
            runner.predict(runner.get_inputs())
        with pytest.raises(RuntimeError, match=r"^predict failed! Error is input '' has no data"):
            runner.predict([Tensor(None, [1, 4], DataType.FLOAT32)])
        assert_answer(runner.predict([floats(1, 4)]), floats(1, 4))
        assert runner.statistics().accepted == 1


def test_run_that_fails_costs_nobody_else(onnx_model: OnnxModel) -> None:
    with built(onnx_model(TO_ORDER)) as runner:
        (pid,) = pids(master_of(runner))
        for _ in range(2):
            with pytest.raises(
                mcinfer.PredictError, match=r"^predict failed! Error is .*onnxruntime"
            ):
                runner.predict([floats(6), np.array([4, 2])])
            [output] = runner.predict([floats(6), np.array([3, 2])])
            assert output.shape == [3, 2]
        assert pids(master_of(runner)) == [pid]


# Outputs that the caller gives.


def test_outputs_that_are_given_are_written_in_place(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE), 2) as runner:
        place = np.zeros((2, 4), np.float32)
        given = [Tensor(place)]
        [output] = runner.predict([floats(2, 4)], given)
        assert output is given[0]
        np.testing.assert_array_equal(place, floats(2, 4) * 2 + 1)


def test_outputs_of_unknown_size_take_that_of_the_result(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE), 2) as runner:
        given = Tensor(None, [-1, 4], DataType.FLOAT32)
        runner.predict([floats(2, 4)], [given])
        assert given.shape == [2, 4]
        assert_answer([given], floats(2, 4))


def read_only() -> NDArray[Any]:
    array = np.full((2, 4), -1, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "places",
    [
        [np.full((2, 4), -1, np.float32)] * 2,
        [np.full((2, 4), -1, np.float64)],
        [np.full((4, 2), -1, np.float32)],
        [np.full(8, -1, np.float32)],
        [read_only()],
    ],
    ids=["two", "float64", "turned", "flat", "read-only"],
)
def test_outputs_that_do_not_fit_fail_the_call_and_are_not_touched(
    onnx_model: OnnxModel, places: list[NDArray[Any]]
) -> None:
    with built(onnx_model(AFFINE), 2) as runner:
        with pytest.raises(RuntimeError, match=r"^predict failed! Error is output"):
            runner.predict([floats(2, 4)], [Tensor(place) for place in places])
        assert all((place == -1).all() for place in places)


def test_empty_list_of_outputs_is_extended_in_place(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE)) as runner:
        outputs: list[Tensor] = []
        assert runner.predict([floats(2, 4)], outputs) is outputs
        assert_answer(outputs, floats(2, 4))


def test_outputs_that_the_runner_gives_are_fresh_and_take_the_results(
    onnx_model: OnnxModel,
) -> None:
    with built(onnx_model(AFFINE)) as runner:
        outputs, others = runner.get_outputs(), runner.get_outputs()
        assert outputs[0] is not others[0]
        for rows, given in ((2, outputs), (3, others)):
            assert runner.predict([floats(rows, 4)], given) is given
            assert_answer(given, floats(rows, 4))


def test_outputs_of_which_one_would_be_written_over_another_are_refused(
    onnx_model: OnnxModel,
) -> None:
    text = f"{HEAD} both (float[n] x) => (float[n] y, float[n] z) {{ y = Neg(x) z = Abs(x) }}"
    memory = np.full(3, -1, np.float32)
    tensor = Tensor(memory)
    with built(onnx_model(text)) as runner:
        with pytest.raises(RuntimeError, match=r"^predict failed! Error is outputs: the tensors"):
            runner.predict([floats(3)], [tensor, Tensor(memory)])
        unknown = Tensor(None, [-1], DataType.FLOAT32)
        with pytest.raises(RuntimeError, match=r"^predict failed! Error is outputs: the tensors"):
            runner.predict([floats(3)], [unknown, unknown])
        assert (memory == -1).all()


def test_output_may_be_the_memory_of_an_input(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE)) as runner:
        data = floats(2, 4)
        runner.predict([data], [Tensor(data)])
        np.testing.assert_array_equal(data, floats(2, 4) * 2 + 1)


def test_tensor_without_a_type_fails_before_the_run(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE)) as runner:
        for dtype in (DataType.UNKNOWN, DataType.INVALID):
            nothing = Tensor(None, [1, 4], dtype)
            for inputs, outputs in (([nothing], None), ([floats(1, 4)], [nothing])):
                with pytest.raises(RuntimeError, match=r"^predict failed! Error is (in|out)put ''"):
                    runner.predict(inputs, outputs)
        assert runner.statistics().accepted == 0


def test_outputs_of_another_type_are_told(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE), 2) as runner:
        with pytest.raises(TypeError, match=r"^outputs must be list, but got <class 'tuple'>\.$"):
            runner.predict([floats(2, 4)], ())  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match=r"^outputs element must be Tensor, but got <class 'int'> at"
        ):
            runner.predict([floats(2, 4)], [1])  # type: ignore[list-item]


def test_failed_run_leaves_the_outputs_as_they_were(onnx_model: OnnxModel) -> None:
    place = np.full((3, 2), -1, np.float32)
    with built(onnx_model(TO_ORDER)) as runner:
        with pytest.raises(mcinfer.PredictError):
            runner.predict([floats(6), np.array([4, 2])], [Tensor(place)])
        assert (place == -1).all()
        runner.predict([floats(6), np.array([3, 2])], [Tensor(place)])
        np.testing.assert_array_equal(place, floats(3, 2))


# Callbacks.


def test_callbacks_are_called_with_the_run_before_and_after_it(
    onnx_model: OnnxModel,
) -> None:
    with built(onnx_model(AFFINE), 2) as runner:
        told: list[tuple[Any, ...]] = []
        here = threading.current_thread()

        def before(inputs: list[Any], outputs: list[Tensor], what: Any) -> bool:
            assert threading.current_thread() is here
            assert runner.statistics().accepted == 0
            told.append(("before", inputs, outputs, what.node_name, what.node_type))
            return True

        def after(inputs: list[Any], outputs: list[Tensor], what: Any) -> None:
            assert threading.current_thread() is here
            told.append(("after", inputs, outputs, what.node_name, what.node_type))

        data = floats(1, 4)
        answer = runner.predict([data], None, before, after)
        assert [entry[0] for entry in told] == ["before", "after"]
        assert told[0][1][0] is told[1][1][0] is data
        assert told[0][2] == []
        assert told[1][2][0] is answer[0]
        assert {entry[3:] for entry in told} == {(str(runner)[len("model_path: ") : -1], "Model")}


@pytest.mark.parametrize("place", ["before", "after"])
def test_callback_that_fails_fails_its_call_alone(onnx_model: OnnxModel, place: str) -> None:
    with built(onnx_model(AFFINE), 2) as runner:

        def raises(*_: object) -> bool:
            raise LookupError("of the user's own")

        for callback, text in (
            (raises, f"the callback '{place}' raised LookupError: of the user's own"),
            (lambda *_: False, f"the callback '{place}' returned False"),
        ):
            with pytest.raises(RuntimeError) as caught:
                runner.predict([floats(1, 4)], **{place: callback})  # type: ignore[arg-type]
            assert str(caught.value) == f"predict failed! Error is {text}"
        assert runner.statistics().accepted == (0 if place == "before" else 2)
        assert_answer(runner.predict([floats(1, 4)], before=lambda *_: None), floats(1, 4))


def test_data_that_is_set_before_the_run_is_what_runs(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE)) as runner:
        inputs = runner.get_inputs()

        def before(given: list[Any], *_: object) -> None:
            given[0].set_data_from_numpy(floats(2, 4))

        assert_answer(runner.predict(inputs, before=before), floats(2, 4))


def test_inputs_of_another_number_fail_before_the_callback(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE)) as runner:
        for inputs, outputs in (([], None), ([floats(1, 4)], [Tensor(), Tensor()])):
            with pytest.raises(RuntimeError, match=r"^predict failed! "):
                runner.predict(inputs, outputs, lambda *_: pytest.fail("it was called"))


def test_callback_that_fails_after_the_run_leaves_the_answer_in_the_outputs(
    onnx_model: OnnxModel,
) -> None:
    with built(onnx_model(AFFINE)) as runner:
        for outputs in ([], runner.get_outputs()):
            with pytest.raises(RuntimeError, match=r"^predict failed! .*'after' returned False"):
                runner.predict([floats(1, 4)], outputs, after=lambda *_: False)
            assert_answer(outputs, floats(1, 4))


# Time-outs, limits, cancelling, priorities.


def test_run_that_takes_too_long_is_given_up_and_the_worker_serves_on(
    onnx_model: OnnxModel,
) -> None:
    with built(onnx_model(LOOP)) as slow:
        before = pids(master_of(slow))
        with pytest.raises(RuntimeError, match=r"^predict failed! Error is ") as caught:
            slow.predict([ENDLESS, floats(1, 4)], timeout=0.2)
        assert isinstance(caught.value, mcinfer.PredictTimeoutError)
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(mcinfer.PredictTimeoutError, match=r"^predict failed! Error is "):
            slow.submit([ENDLESS, floats(1, 4)], timeout=0.2).result(10.0)
        with pytest.raises(mcinfer.PredictTimeoutError, match=r"^predict failed! Error is "):
            asyncio.run(slow.predict_async([ENDLESS, floats(1, 4)], timeout=0.2))
        [output] = slow.predict([ONCE, floats(1, 4)])
        np.testing.assert_array_equal(output.get_data_to_numpy(), -floats(1, 4))
        assert pids(master_of(slow)) == before


def test_time_out_of_the_configuration_counts_where_the_call_names_none(
    onnx_model: OnnxModel,
) -> None:
    with (
        built(onnx_model(LOOP), timeout=0.2) as runner,
        pytest.raises(mcinfer.PredictTimeoutError),
    ):
        runner.predict([ENDLESS, floats(1, 4)])


def test_full_queue_refuses_and_serves_again_when_it_is_not(onnx_model: OnnxModel) -> None:
    with built(onnx_model(LOOP), queue_size=2) as runner:
        running = begin_endless(runner)
        queued = [runner.submit([ONCE, floats(1, 4)]) for _ in range(2)]
        for refused in (
            lambda: runner.predict([ONCE, floats(1, 4)]),
            lambda: runner.submit([ONCE, floats(1, 4)]),
        ):
            with pytest.raises(RuntimeError, match=r"^predict failed! Error is ") as caught:
                refused()
            assert isinstance(caught.value, mcinfer.QueueFullError)
        running.cancel()
        for future in queued:
            np.testing.assert_array_equal(future.result(10.0)[0].get_data_to_numpy(), -floats(1, 4))
        runner.predict([ONCE, floats(1, 4)])


def test_cancelled_requests_are_forgotten_queued_and_running(onnx_model: OnnxModel) -> None:
    with built(onnx_model(LOOP)) as slow:
        before = pids(master_of(slow))
        running = begin_endless(slow)
        queued, stays = slow.submit([ONCE, floats(1, 4)]), slow.submit([ONCE, floats(2, 4)])
        for future in (queued, running):
            assert future.cancel()
            with pytest.raises(CancelledError):
                future.result(10.0)
            assert future.cancelled()
        assert stays.result(10.0)[0].shape == [2, 4]
        assert not stays.cancel()
        assert not wait_for_futures([queued, running, stays], timeout=10.0).not_done
        statistics = slow.statistics()
        assert (statistics.accepted, statistics.cancelled, statistics.succeeded) == (3, 2, 1)
        assert pids(master_of(slow)) == before


def test_future_tells_its_callbacks_once(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE), 2) as runner:
        told: list[Future[list[Tensor]]] = []
        futures = [runner.submit([floats(i + 1, 4)]) for i in range(20)]
        for future in futures:
            future.add_done_callback(told.append)
        wait_until(lambda: len(told) == 20)
        assert {id(future) for future in told} == {id(future) for future in futures}
        for i, future in enumerate(futures):
            assert_answer(future.result(), floats(i + 1, 4))


def test_waiting_in_a_futures_callback_is_refused(onnx_model: OnnxModel) -> None:
    outcome: Future[list[Tensor]] = Future()

    with built(onnx_model(LOOP)) as slow:

        def ask(_: object) -> None:
            try:
                outcome.set_result(slow.predict([ONCE, floats(1, 4)]))
            except RuntimeError as exc:
                outcome.set_exception(exc)

        # While the one runs the other waits: it is not done before its callback is there.
        running = begin_endless(slow)
        slow.submit([ONCE, floats(1, 4)]).add_done_callback(ask)
        running.cancel()
        with pytest.raises(RuntimeError, match=r"^predict failed! Error is .*use submit\(\) there"):
            outcome.result(10.0)


def test_tasks_get_each_their_own_answers(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE), 2) as runner:

        async def ask_all() -> list[list[Tensor]]:
            return await asyncio.gather(
                *(runner.predict_async([floats(i, 4)]) for i in range(1, 50))
            )

        for i, answer in enumerate(asyncio.run(ask_all()), 1):
            assert_answer(answer, floats(i, 4))


def test_task_that_is_cancelled_cancels_its_request(onnx_model: OnnxModel) -> None:
    with built(onnx_model(LOOP)) as slow:
        before = pids(master_of(slow))

        async def ask() -> list[Tensor]:
            endless = asyncio.create_task(slow.predict_async([ENDLESS, floats(1, 4)]))
            wrapped = asyncio.wrap_future(slow.submit([ENDLESS, floats(1, 4)]))
            await asyncio.sleep(0)
            after = asyncio.create_task(slow.predict_async([ONCE, floats(3, 4)]))
            for task in (endless, wrapped):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            return await after

        assert asyncio.run(ask())[0].shape == [3, 4]
        assert slow.statistics().cancelled == 2
        assert pids(master_of(slow)) == before


def test_requests_of_higher_priority_go_first(onnx_model: OnnxModel) -> None:
    with built(onnx_model(LOOP)) as slow:
        order: list[int] = []
        running = begin_endless(slow)
        futures = []
        for priority in (0, 5, -3, 5, 9):
            future = slow.submit([ONCE, floats(1, 4)], priority=priority)
            future.add_done_callback(lambda _, p=priority: order.append(p))  # type: ignore[misc]
            futures.append(future)
        running.cancel()
        wait_until(lambda: len(order) == 5)
        assert order == [9, 5, 5, 0, -3]


def test_priority_that_is_no_number_is_refused(onnx_model: OnnxModel) -> None:
    with (
        built(onnx_model(AFFINE)) as runner,
        pytest.raises(RuntimeError, match=r"^predict failed! Error is priority: got 'high'"),
    ):
        runner.predict([floats(1, 4)], priority="high")  # type: ignore[arg-type]


def test_statistics_tell_requests_and_workers(onnx_model: OnnxModel) -> None:
    with built(onnx_model(AFFINE), 2) as runner:
        for rows in range(1, 6):
            runner.predict([floats(rows, 4)])
        statistics = runner.statistics()
        assert (statistics.accepted, statistics.succeeded, statistics.in_flight) == (5, 5, 0)
        assert sum(worker.completed for worker in statistics.workers) == 5
        assert [worker.providers for worker in statistics.workers] == [
            ("CPUExecutionProvider",)
        ] * 2


def test_requests_are_joined_where_that_is_wanted(onnx_model: OnnxModel) -> None:
    def runs() -> int:
        return runner.statistics().workers[0].runs

    def took() -> int:
        """The runs of four requests, which fill one run."""
        before = runs()
        futures = [runner.submit([floats(2, 3) * i]) for i in range(4)]
        for i, future in enumerate(futures):
            assert_answer(future.result(10.0), floats(2, 3) * i)
        return runs() - before

    with built(onnx_model(PLANE), max_batch_size=8, max_delay=0.5) as runner:
        # The first run apart, two of them once more as one: that shows that it is right.
        wait_until(lambda: took() == 1, timeout=30.0)
    with built(onnx_model(PLANE)) as runner:
        for future in [runner.submit([floats(2, 3)]) for _ in range(4)]:
            future.result(10.0)
        assert runner.statistics().workers[0].runs == 4


# Workers that die.


def test_worker_killed_in_a_run_costs_no_request_and_is_restored(
    onnx_model: OnnxModel,
) -> None:
    turns = np.array(200_001)
    with built(onnx_model(LOOP), 2) as runner:
        futures = [runner.submit([turns, floats(i + 1, 4)]) for i in range(8)]
        wait_until(lambda: any(w.state == "busy" for w in runner.statistics().workers))
        pid = next(w.pid for w in runner.statistics().workers if w.state == "busy")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for i, future in enumerate(futures):
            np.testing.assert_array_equal(
                future.result(30.0)[0].get_data_to_numpy(), -floats(i + 1, 4)
            )
        wait_for_states(master_of(runner), "ready", "ready", timeout=20.0)
        statistics = runner.statistics()
        assert sum(worker.restarts for worker in statistics.workers) == 1
        assert statistics.accepted == statistics.succeeded == 8
        assert pid not in pids(master_of(runner))


def test_only_worker_killed_is_waited_for(onnx_model: OnnxModel) -> None:
    with built(onnx_model(LOOP)) as slow:
        running = begin_endless(slow)
        queued = slow.submit([ONCE, floats(2, 4)])
        pid = busy_pid(master_of(slow))
        running.add_done_callback(lambda _: None)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: slow.statistics().workers[0].restarts == 1)
        wait_until(lambda: slow.statistics().workers[0].state == "busy", timeout=20.0)
        running.cancel()
        assert queued.result(20.0)[0].shape == [2, 4]


THREADS = 200
CALLS = 50
KILLS = 4
"""Of each worker: the facade's budget is five restarts in a minute."""


@pytest.mark.timeout(120)
def test_ten_thousand_requests_of_all_shapes_survive_workers_killed_at_random(
    onnx_model: OnnxModel,
) -> None:
    """200 threads, batching on, a worker killed every 200 ms: each answer right, none lost, none twice."""
    answers: Counter[tuple[int, int]] = Counter()
    lock, over = threading.Lock(), threading.Event()
    kills = [0, 0]

    def answered(key: tuple[int, int], data: NDArray[np.float32], outputs: list[Tensor]) -> None:
        assert_answer(outputs, data)
        with lock:
            answers[key] += 1

    with built(onnx_model(PLANE), 2, max_batch_size=16, max_delay=0.001) as runner:
        together = threading.Barrier(THREADS + 1)

        def ask(thread: int) -> None:
            chance = random.Random(thread)  # noqa: S311 no secret
            together.wait()
            for call in range(CALLS):
                shape = (chance.randint(1, 9), chance.choice((1, 3, 8)))
                data = floats(*shape) + (thread * CALLS + call) * 100
                key = (thread, call)
                how = call % 4
                if how == 0:
                    answered(key, data, runner.predict([data], timeout=60.0))
                elif how == 1:
                    [tensor] = runner.get_inputs()
                    tensor.set_data_from_numpy(data)
                    answered(key, data, runner.predict([tensor], timeout=60.0))
                elif how == 2:
                    given = [Tensor(np.empty_like(data))]
                    answered(key, data, runner.predict([data], given, timeout=60.0))
                else:
                    answered(key, data, runner.submit([data], timeout=60.0).result(60.0))

        def kill() -> None:
            chance = random.Random(7)  # noqa: S311 no secret
            while not over.wait(0.2):
                alive = [
                    worker
                    for worker in runner.statistics().workers
                    if worker.state in ("ready", "busy") and kills[worker.index] < KILLS
                ]
                if alive:
                    worker = chance.choice(alive)
                    assert worker.pid is not None
                    os.kill(worker.pid, signal.SIGKILL)
                    kills[worker.index] += 1

        began = time.monotonic()
        with ThreadPoolExecutor(THREADS + 1) as pool:
            asked = [pool.submit(ask, thread) for thread in range(THREADS)]
            together.wait()
            killer = pool.submit(kill)
            try:
                for done in asked:
                    done.result(timeout=100.0)
            finally:
                over.set()
            killer.result()
        seconds = time.monotonic() - began
        assert len(answers) == answers.total() == THREADS * CALLS
        assert sum(kills) > 0
        wait_until(lambda: [w.restarts for w in runner.statistics().workers] == kills, 20.0)
        wait_for_states(master_of(runner), "ready", "ready", timeout=20.0)
        statistics = runner.statistics()
        # Two that ran apart ran once more as one, to show that joining them is right.
        assert THREADS * CALLS < statistics.accepted <= THREADS * CALLS + 8
        assert statistics.accepted == statistics.succeeded
        assert (statistics.failed, statistics.cancelled, statistics.in_flight) == (0, 0, 0)
        assert sum(worker.runs for worker in statistics.workers) < THREADS * CALLS
        assert_answer(runner.predict([floats(2, 2)]), floats(2, 2))
    assert seconds < 40.0
