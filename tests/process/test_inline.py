"""`Master(model, devices="inline")`: all that a pool does, in this process, and what differs."""

import asyncio
import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import onnx
import onnxruntime
import pytest

from mcinfer import (
    ClosedError,
    EngineOptions,
    InvalidInputError,
    Limits,
    Master,
    PredictError,
    PredictTimeoutError,
    Timeouts,
    inline,
)
from mcinfer.scheduler import dispatch, queue
from tests.interrupts import interrupted_anywhere
from tests.process.models import (
    FakeModel,
    Inputs,
    OnnxModel,
    SharedMaster,
    act,
    assert_answers,
    fake_master,
    rows,
)
from tests.process.scripts import PREAMBLE, Program, run_python
from tests.process.waiting import HeldPipe, no_run, wait_for_states, wait_until
from tests.text_models import text_model

HANGS, FAILS = -1.0, -2.0
"""First numbers of requests whose run lasts until it is cancelled, and whose run fails."""

INLINE = "inline"
THREAD = "mcinfer-inline"

Threads = Callable[[], set[threading.Thread]]


@pytest.fixture(scope="module")
def master(shared_master: SharedMaster) -> Master:
    return shared_master(INLINE, acts={"when": {"-1": "sleep:600", "-2": "fail"}})


def text_of(body: str) -> str:
    """An ONNX model in text format."""
    return f'<ir_version: 9, opset_import: ["": 17]>\nm {body}'


def assert_as_plain(master: Master, path: Path, inputs: Inputs) -> None:
    """Fail unless the answer has the bits of a plain session's."""
    plain = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    answer = master.predict(inputs)
    for name, value in zip(answer, plain.run(None, inputs), strict=True):
        np.testing.assert_array_equal(answer[name], value)


@pytest.fixture
def threads() -> Threads:
    """Gives the threads of pools that were started in this test."""
    known = {*threading.enumerate()}

    def find() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name == THREAD} - known

    return find


# As with a worker's process.


def test_every_way_to_ask_is_answered(master: Master) -> None:
    given = rows(5)
    assert_answers(master.predict(given), given)
    assert_answers(master.predict([given["x"]]), given)
    assert_answers(master.predict(rows(0)), rows(0))
    assert_answers(master.submit(given).result(20.0), given)

    async def ask() -> Any:
        return await master.predict_async(given)

    assert_answers(asyncio.run(ask()), given)
    for i, answer in enumerate(master.map(rows(1, first=i) for i in range(6))):
        assert_answers(answer, rows(1, first=i))
    own = master.allocate({"x": (3, 4)})
    own["x"][:] = rows(3)["x"]
    assert_answers(master.predict(own, outputs=["y"], shards=2), rows(3))


def test_request_that_is_wrong_or_fails_harms_no_other(master: Master) -> None:
    before = master.statistics()
    with pytest.raises(InvalidInputError, match="'x' has size 3"):
        master.predict([rows(2)["x"][:, :3]])
    with pytest.raises(PredictError, match="asked to fail"):
        master.predict(act(FAILS))
    assert_answers(master.predict(rows(1)), rows(1))
    after = master.statistics()
    assert after.accepted - before.accepted == 2
    assert (after.succeeded - before.succeeded, after.failed - before.failed) == (1, 1)
    assert after.workers[0].completed > before.workers[0].completed
    assert str(master.health()) == "ready: 1 of 1 workers serve"


def test_run_that_is_late_or_cancelled_is_ended_and_its_session_kept(master: Master) -> None:
    with pytest.raises(PredictTimeoutError, match=r"no answer within 0\.1 s"):
        master.predict(act(HANGS), timeout=0.1)
    future = master.submit(act(HANGS))
    wait_for_states(master, "busy")
    assert future.cancel()
    assert_answers(master.predict(rows(1), timeout=20.0), rows(1))
    (worker,) = master.statistics().workers
    assert (worker.state, worker.restarts) == ("ready", 0)


def test_draining_answers_all(fake_model: FakeModel) -> None:
    pool = fake_master(fake_model(run="sleep:0.01"), INLINE).start()
    futures = [pool.submit(rows(1, first=i)) for i in range(20)]
    pool.close(drain=True)
    for i, future in enumerate(futures):
        assert_answers(future.result(0.0), rows(1, first=i))
    with pytest.raises(ClosedError):
        pool.predict(rows(1))


# By ONNX Runtime, in this process.


def test_models_of_all_kinds_have_the_bits_of_a_plain_session(onnx_model: OnnxModel) -> None:
    fixed = onnx_model(text_of("(float[1, 4] x) => (float[1, 4] y) { y = Softmax(x) }"))
    with Master(fixed, INLINE) as master:
        x = rows(5)["x"] / 7
        answer = master.predict([x])["y"]  # five runs
        plain = onnxruntime.InferenceSession(fixed, providers=["CPUExecutionProvider"])
        for i in range(5):
            np.testing.assert_array_equal(
                answer[i : i + 1], plain.run(None, {"x": x[i : i + 1]})[0]
            )
        assert master.statistics().workers[0].runs == 5
    unknown = onnx_model(text_of("(float[n, 4] x) => (int64[2, found] y) { y = NonZero(x) }"))
    with Master(unknown.read_bytes(), INLINE) as master:
        assert_as_plain(master, unknown, rows(3))
        assert_as_plain(master, unknown, rows(4))
    texts = onnx_model(text_of("(string[n] x) => (string[n] y) { y = Identity(x) }"))
    with Master(texts, INLINE, verify="never") as master:
        assert master.predict({"x": ["", "雪"]})["y"].tolist() == ["", "雪"]


def test_prepared_weights_are_mapped_while_it_is_open(
    tmp_path: Path, prepared_models: Path
) -> None:
    w = np.random.default_rng(0).normal(size=(4, 1 << 14)).astype(np.float32)
    path = tmp_path / "wide.onnx"
    text = f"(float[n, 4] x) => (float[n, {1 << 14}] y) {{ y = MatMul(x, w) }}"
    onnx.save(text_model(text, {"w": w}), path)

    def is_mapped() -> bool:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return any(line.endswith("/weights.bin") and str(prepared_models) in line for line in maps)

    with Master(path, INLINE, options=EngineOptions(prepare="always")) as master:
        assert_as_plain(master, path, rows(3))
        assert is_mapped()
    assert not is_mapped()


# What differs.


def test_worker_is_this_process_and_named_inline(fake_model: FakeModel, threads: Threads) -> None:
    with fake_master(fake_model(), INLINE) as master:
        assert repr(master) == "<Master model1.json on inline: ready>"
        (worker,) = master.statistics().workers
        assert (worker.device, worker.pid) == (INLINE, os.getpid())
        assert len(threads()) == 2  # one runs, one keeps time


def test_run_that_hangs_keeps_others_waiting_and_is_said(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    timeouts = Timeouts(cancel_grace=0.1)
    pipe = HeldPipe(tmp_path / "run0")
    model = fake_model(run=f"told:{tmp_path / 'run'}")
    with fake_master(model, INLINE, timeouts=timeouts) as master:
        try:
            future = master.submit(rows(1), timeout=0.2)
            pipe.wait()
            assert isinstance(future.exception(20.0), PredictTimeoutError)
            wait_until(lambda: "did not stop in time" in str(master.health()))
            with pytest.raises(PredictTimeoutError, match=r"waited for a worker.*did not stop"):
                master.predict(rows(1), timeout=0.1)
            waiting = master.submit(rows(1))
            pipe.tell("")
        finally:
            pipe.close()
        assert_answers(waiting.result(20.0), rows(1))
        wait_until(lambda: str(master.health()) == "ready: 1 of 1 workers serve")


def test_run_that_stopped_in_time_is_not_said_to_be_late(fake_model: FakeModel) -> None:
    model = fake_model(when={"-1": "sleep:600"})
    with fake_master(model, INLINE, timeouts=Timeouts(cancel_grace=0.1)) as master:
        with pytest.raises(PredictTimeoutError):
            master.predict(act(HANGS), timeout=0.1)
        until = time.monotonic() + 0.3
        wait_until(lambda: time.monotonic() > until)
        assert str(master.health()) == "ready: 1 of 1 workers serve"


def test_callback_that_waits_leaves_a_thread_to_what_it_waits_for(fake_model: FakeModel) -> None:
    answered = Future[Inputs]()
    with fake_master(fake_model(), INLINE) as master:

        def ask(_: object) -> None:
            answered.set_result(master.submit(rows(1), timeout=10.0).result())

        master.submit(rows(1)).add_done_callback(ask)
        assert_answers(answered.result(20.0), rows(1))


def test_callbacks_are_called_one_after_another_and_after_the_close(onnx_model: OnnxModel) -> None:
    path = onnx_model(text_of("(float[1, 4] x) => (float[1, 4] y) { y = Softmax(x) }"))
    called, other_came = [threading.Event() for _ in range(2)], Future[bool]()
    with Master(path, INLINE, inline_threads=2) as master:
        done = master.submit(rows(1))
        done.result(20.0)

        def wait(_: object) -> None:
            called[0].set()
            other_came.set_result(called[1].wait(0.2))

        master.submit(rows(1)).add_done_callback(wait)
        assert called[0].wait(20.0)
        done.add_done_callback(lambda _: called[1].set())
        assert not other_came.result(20.0)
        assert called[1].wait(20.0)
    late: list[object] = []
    for _ in range(4):  # they get the numbers of the pool's threads
        thread = threading.Thread(target=done.add_done_callback, args=(late.append,))
        thread.start()
        thread.join()
    assert late == [done] * 4


def test_draining_ends_once_the_last_request_is_cancelled_at_the_second_try_too(
    fake_model: FakeModel,
) -> None:
    options = {"max_batch_size": 8, "max_delay": 600.0, "timeouts": Timeouts(predict=600.0)}
    model = fake_model()

    def begin() -> tuple["Future[Inputs]", threading.Thread]:
        master = fake_master(model, INLINE, **options).start()
        future = master.submit(rows(1))
        closer = threading.Thread(target=master.close, kwargs={"drain": True}, daemon=True)
        closer.start()
        wait_until(lambda: master.health().state == "closing")
        return future, closer

    future, closer = begin()

    def cancel() -> None:
        assert future.cancel()

    for _ in interrupted_anywhere(cancel, inline, dispatch, threading):
        cancel()
        closer.join(20.0)
        assert not closer.is_alive()
        future, closer = begin()
    closer.join(20.0)
    assert not closer.is_alive()


def test_there_is_no_worker_to_restart(master: Master) -> None:
    with pytest.raises(InvalidInputError, match="expected workers"):
        master.restart_workers()


def test_exception_from_outside_costs_no_request_and_no_thread(
    fake_model: FakeModel, caplog: pytest.LogCaptureFixture, threads: Threads
) -> None:
    with fake_master(fake_model(when={"-1": "sleep:60"}), INLINE) as master:
        before = threads()

        def wait() -> bool:  # so none is just being started, which would be its end
            frames = sys._current_frames()
            return all(frames[t.ident or 0].f_code.co_name == "wait" for t in before)

        wait_until(wait)
        for thread in before:
            ident = ctypes.c_ulong(thread.ident or 0)
            raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
            assert raised == 1
        assert_answers(master.submit(rows(1), timeout=20.0).result(20.0), rows(1))
        with pytest.raises(PredictTimeoutError):
            master.predict(act(HANGS), timeout=0.1)
        wait_until(lambda: "goes on" in caplog.text)
        assert threads() == before


ENTERING = """
import linecache, sys, threading, time
import numpy as np
import mcinfer

raised = set()

def trace(frame, event, argument):
    if "self._waiters.append" in linecache.getline(frame.f_code.co_filename, frame.f_lineno - 1):
        if event == "line" and threading.current_thread().name == "mcinfer-inline" and len(raised) < 2:
            if threading.get_ident() not in raised:
                raised.add(threading.get_ident())
                raise SystemExit
    return trace

threading.settrace(trace)
master = mcinfer.Master(sys.argv[1], "inline", engine="fake").start()
while len(raised) < 2:
    time.sleep(0.001)
for _ in range(4):
    print(master.submit({"x": np.ones((1, 4), np.float32)}, timeout=20.0).result(20.0)["y"].shape)
master.close()
print("closed")
"""


def test_exception_from_outside_at_the_begin_of_a_wait_costs_no_later_notice(
    fake_model: FakeModel,
) -> None:
    ended = run_python("-c", ENTERING, fake_model())
    assert ended.stdout.split("\n")[:5] == [*["(1, 4)"] * 4, "closed"], ended.stderr


def test_master_that_is_garbage_leaves_no_thread_whatever_it_was_at(
    fake_model: FakeModel, threads: Threads
) -> None:
    master = fake_master(fake_model(when={"-1": "sleep:60"}), INLINE).start()
    future = master.submit(act(HANGS))
    wait_for_states(master, "busy")
    del master
    gc.collect()
    assert isinstance(future.exception(20.0), ClosedError)
    wait_until(lambda: not threads())


def test_threads_rest_once_a_request_that_waited_for_company_is_gone(
    fake_model: FakeModel,
) -> None:
    with fake_master(fake_model(), INLINE, max_batch_size=8) as master:
        pool = master._loop
        assert isinstance(pool, inline.InlinePool)
        with no_run(pool):  # at its end the threads look
            pool._joining.due = time.monotonic()
        before = time.process_time()
        until = time.monotonic() + 0.5
        wait_until(lambda: time.monotonic() > until)
        assert time.process_time() - before < 0.1


def test_event_loop_waits_for_no_place_though_runs_are_quick(fake_model: FakeModel) -> None:
    limits = Limits(queue=1, when_queue_full="wait")
    model = fake_model(when={"-1": "sleep:60"})
    with fake_master(model, INLINE, limits=limits, inline_threads=2) as master:
        for _ in range(200):
            master.predict(rows(1))
        slow = master.submit(act(HANGS))
        wait_for_states(master, "busy")

        async def ask() -> Any:
            task = asyncio.create_task(master.predict_async(rows(1), timeout=20.0))
            await asyncio.sleep(0)
            assert slow.cancel()
            return await task

        assert_answers(asyncio.run(ask()), rows(1))


def test_ctrl_c_anywhere_in_a_call_leaves_a_whole_pool(fake_model: FakeModel) -> None:
    with fake_master(fake_model(), INLINE) as master:
        calls: list[Callable[[], Any]] = [
            lambda: master.predict(rows(1)),
            lambda: master.submit(rows(1)).result(20.0),
        ]
        for call in calls:
            for _ in interrupted_anywhere(call, inline, dispatch, queue):
                wait_until(lambda: master.statistics().in_flight == 0)
                assert_answers(master.submit(rows(1)).result(20.0), rows(1))


def test_futures_that_are_kept_hold_neither_inputs_nor_weights(fake_model: FakeModel) -> None:
    model = fake_model(
        outputs=[["y", "float32", ["batch", 4], {"from": "x", "add": "w"}]],
        weights=[["w", "float32", [4], 0.0]],
    )
    options = EngineOptions(variable_weights=["w"])
    with fake_master(model, INLINE, options=options) as master:
        master.update_weights({"w": [1] * 4})
        version, inputs = ref(master._planner.weights.current), rows(1)
        array = ref(inputs["x"])
        kept = [master.submit(inputs), master.submit(inputs, timeout=0.0)]
        del inputs
        wait_until(lambda: all(future.done() for future in kept) and array() is None)
        master.update_weights({"w": [2] * 4})
        wait_until(lambda: version() is None)


@pytest.mark.thorough
def test_close_does_not_wait_for_a_run_that_never_ends(
    fake_model: FakeModel, tmp_path: Path, threads: Threads
) -> None:
    pipe = HeldPipe(tmp_path / "run0")
    model = fake_model(run=f"told:{tmp_path / 'run'}")
    try:
        master = fake_master(model, INLINE, timeouts=Timeouts(close=0.0)).start()
        future = master.submit(rows(1))
        pipe.wait()
        master.close()  # after KILLED_ENDS of mcinfer/scheduler/scheduler.py
        assert isinstance(future.exception(0.0), ClosedError)
        assert len(threads()) == 1
    finally:
        pipe.close()
    wait_until(lambda: not threads())


def test_program_is_left_as_it_is_and_starts_no_process(
    fake_model: FakeModel, onnx_model: OnnxModel
) -> None:
    text = """
import logging, resource, threading
started = []
sys.addaudithook(lambda event, args: event in (
    "subprocess.Popen", "os.fork", "os.posix_spawn", "os.system") and started.append(event))

def state():
    limits = [resource.getrlimit(n) for n in range(16)]
    handlers = [signal.getsignal(n) for n in signal.valid_signals()]
    return sys.path[:], os.sched_getaffinity(0), limits, handlers, logging.root.handlers[:]

before = state()
with mcinfer.Master(sys.argv[1], "inline", engine="fake", verify="never") as master, mcinfer.Master(
    sys.argv[2], "inline") as other:
    say(master.predict(X)["y"].sum(), other.predict(X)["y"].sum())
    say(state() == before, started)
    child = os.fork()
    if not child:
        try:
            master.predict(X)
        except mcinfer.ClosedError as exc:
            sys.exit(7 if "forked" in str(exc) else 8)
        sys.exit(9)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), master.predict(X)["y"].sum())
BUSY = {"x": np.full((1, 4), -1, np.float32)}
master = mcinfer.Master(sys.argv[1], "inline", engine="fake").start()
master.submit(BUSY)
child = os.fork()  # which holds all ends of all sockets
if not child:
    signal.pause()
master.close(timeout=0)
say([thread.name for thread in threading.enumerate()])
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
never_closed = mcinfer.Master(sys.argv[1], "inline", engine="fake").start()
never_closed.submit(BUSY)
"""
    path = onnx_model(text_of("(float[n, 4] x) => (float[n, 4] y) { y = Neg(x) }"))
    with Program(PREAMBLE + text, fake_model(when={"-1": "sleep:60"}), path) as program:
        ended = program.wait()
        assert (ended.status, ended.err) == (0, "")
        assert ended.out.splitlines() == ["48.0 -16.0", "True []", "7 48.0", "['MainThread']"]


def test_ctrl_c_ends_a_call_and_the_run(fake_model: FakeModel) -> None:
    text = """
import threading

def press():  # again: the first one may come just before the wait, which it does not end then
    while not caught.wait(0.3):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

caught = threading.Event()
with mcinfer.Master(sys.argv[1], "inline", engine="fake", verify="never") as master:
    try:
        threading.Thread(target=press).start()
        master.predict({"x": np.full((1, 4), -1, np.float32)})
    except KeyboardInterrupt:
        caught.set()
    say(master.predict(X, timeout=20.0)["y"].sum(), master.statistics().in_flight)
"""
    with Program(PREAMBLE + text, fake_model(when={"-1": "sleep:60"})) as program:
        assert program.line() == "48.0 0"
        ended = program.wait()
        assert (ended.status, ended.err) == (0, "")
