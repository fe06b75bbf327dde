"""One worker that executes several runs at once: `EngineOptions(concurrent_runs=)`, with real processes."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcinfer import (
    ClosedError,
    EngineOptions,
    Master,
    PredictError,
    PredictTimeoutError,
    Timeouts,
    WorkerDiedError,
)
from tests.process.models import (
    AFFINE,
    FakeModel,
    OnnxModel,
    act,
    assert_answers,
    fake_master,
    rows,
)
from tests.process.waiting import HeldPipe, pids, wait_for_states, wait_until

TWO = EngineOptions(concurrent_runs=2)
HELD, SLOW, BAD, FAILS = -1.0, -2.0, -3.0, -4.0

EITHER = pytest.mark.parametrize("devices", [1, "inline"])


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldPipe]:
    """Holds the run of `HELD`, once."""
    pipe = HeldPipe(tmp_path / "held0")
    yield pipe
    pipe.close()


@pytest.fixture
def acting_model(tmp_path: Path, fake_model: FakeModel) -> Path:
    acts = {"-1": f"told:{tmp_path}/held", "-2": "sleep:60", "-3": "segfault", "-4": "fail"}
    return fake_model(when=acts)


@contextmanager
def holding(model: Path, held: HeldPipe, devices: int | str = 1, **options: Any) -> Iterator[Any]:
    """A master with one worker, and the future of its run that stands still."""
    with fake_master(model, devices, **{"options": TWO, **options}) as master:
        future = master.submit(act(HELD))
        held.wait()
        yield master, future
        held.tell("")


@EITHER
def test_callers_are_answered_while_another_run_of_the_worker_goes_on(
    acting_model: Path, held: HeldPipe, devices: int | str
) -> None:
    with holding(acting_model, held, devices) as (master, future):
        for number in range(30):
            inputs = rows(1 + number % 3, 10.0 * number)
            assert_answers(master.predict(inputs, shards=1), inputs)
        with pytest.raises(PredictError, match="asked to fail"):
            master.predict(act(FAILS))
        assert_answers(master.predict(rows(5)), rows(5))
        assert not future.done()
        held.tell("")
        assert_answers(future.result(timeout=40.0), act(HELD))
        [worker] = master.statistics().workers
        assert (worker.concurrent, worker.failed) == (2, 1)


@EITHER
def test_one_of_two_runs_is_cancelled_and_the_other_goes_on(
    acting_model: Path, held: HeldPipe, devices: int | str
) -> None:
    with holding(acting_model, held, devices) as (master, future):
        before, slow = pids(master), master.submit(act(SLOW))
        wait_until(lambda: master.statistics().queued == 0)
        assert slow.cancel()
        assert_answers(master.predict(rows(1), timeout=40.0), rows(1))  # in its place
        held.tell("")
        assert_answers(future.result(timeout=40.0), act(HELD))
        wait_for_states(master, "ready")
        assert pids(master) == before


def test_run_that_does_not_stop_in_time_ends_the_worker_and_its_neighbour_runs_again(
    tmp_path: Path, fake_model: FakeModel, held: HeldPipe
) -> None:
    """Which is answered by the next process."""
    slow = tmp_path / "slow"
    model = fake_model(when={"-1": f"told:{tmp_path}/held", "-2": f"once:{slow}:sleep:60"})
    timeouts = Timeouts(cancel_grace=0.1)
    with fake_master(model, 1, options=TWO, timeouts=timeouts) as master:
        neighbour = master.submit(act(SLOW), timeout=60.0)
        wait_until(slow.exists)
        late = master.submit(act(HELD), timeout=1.5)
        held.wait()
        with pytest.raises(PredictTimeoutError, match=r"shard 0 ran on worker 0"):
            late.result()
        wait_until(lambda: master.health().serving == 0 or neighbour.done())
        held.tell("")
        assert_answers(neighbour.result(timeout=60.0), act(SLOW))


def test_worker_that_is_killed_in_two_runs_loses_neither(
    tmp_path: Path, fake_model: FakeModel
) -> None:
    when = {f"-{n}": f"once:{tmp_path}/{n}:hang:60" for n in (1, 2)}
    with fake_master(fake_model(when=when), 1, options=TWO) as master:
        futures = {number: master.submit(act(number)) for number in (-1.0, -2.0)}
        wait_until(lambda: all((tmp_path / name).exists() for name in "12"))
        os.kill(pids(master)[0], signal.SIGKILL)
        for number, future in futures.items():
            assert_answers(future.result(timeout=60.0), act(number))


def test_request_that_crashes_its_worker_fails_alone(acting_model: Path, held: HeldPipe) -> None:
    with holding(acting_model, held) as (master, future):
        with pytest.raises(WorkerDiedError, match="given up after 3 workers died"):
            master.predict(act(BAD), timeout=60.0)
        assert_answers(future.result(timeout=60.0), act(HELD))


def test_run_keeps_the_weights_of_its_request_while_others_have_newer_ones(
    tmp_path: Path, held: HeldPipe, fake_model: FakeModel
) -> None:
    model = fake_model(
        outputs=[["y", "float32", ["batch", 4], {"from": "x", "add": "w"}]],
        weights=[["w", "float32", [4], 1.0]],
        when={"-1": f"told:{tmp_path}/held"},
    )
    options = EngineOptions(concurrent_runs=2, variable_weights=["w"])
    with holding(model, held, options=options) as (master, future):
        for value in range(2, 6):
            master.update_weights({"w": np.full(4, value, np.float32)})
            assert (master.predict(act(0.0))["y"] == value).all()
        held.tell("")
        assert (future.result(timeout=40.0)["y"] == 0.0).all()


@EITHER
@pytest.mark.parametrize("drain", [False, True])
def test_close_with_runs_under_way(
    acting_model: Path, held: HeldPipe, devices: int | str, drain: bool
) -> None:
    with holding(acting_model, held, devices) as (master, future):
        beside = master.submit(act(SLOW))
        wait_until(lambda: master.statistics().queued == 0)
        beside.cancel()
        with ThreadPoolExecutor(1) as threads:
            closed = threads.submit(master.close, 20.0, drain=drain)
            if not drain:
                with pytest.raises(ClosedError):
                    future.result(timeout=40.0)
            held.tell("")
            closed.result(timeout=40.0)
        if drain:
            assert_answers(future.result(timeout=40.0), act(HELD))


def test_worker_ends_that_is_told_to_while_a_joined_run_goes_on(
    acting_model: Path, held: HeldPipe
) -> None:
    joining = {"max_batch_size": 2, "max_delay": 20.0}
    with fake_master(acting_model, 1, options=TWO, **joining) as master:
        futures = [master.submit(act(HELD)) for _ in range(2)]
        held.wait()
        with ThreadPoolExecutor(1) as threads:
            closed = threads.submit(master.close, 300.0)
            for future in futures:
                with pytest.raises(ClosedError):
                    future.result(timeout=40.0)
            held.tell("")
            closed.result(timeout=40.0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_threads_of_a_worker_have_cores_of_their_own(fake_model: FakeModel) -> None:
    with fake_master(fake_model(), 1, options=TWO) as master:
        master.predict(rows(2))
        (pid,) = pids(master)

        def is_pinned() -> bool:
            tasks = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
            own = {frozenset(os.sched_getaffinity(task)) for task in tasks}
            halves = [a for a in own for b in own if not a & b]
            return bool(halves) and frozenset.union(*halves) == os.sched_getaffinity(0)

        wait_until(is_pinned)


def many_callers(master: Master, model: Callable[[Any], Any] = lambda x: x * 2 + 1) -> None:
    def ask(thread: int) -> None:
        for call in range(12):
            inputs = rows(1 + (thread + call) % 7, 1000.0 * thread + call)
            assert_answers(master.predict(inputs), inputs, model)
            assert_answers(master.submit(inputs).result(timeout=60.0), inputs, model)

    with ThreadPoolExecutor(12) as threads:
        for done in [threads.submit(ask, number) for number in range(12)]:
            done.result(timeout=120.0)


@pytest.mark.parametrize(("devices", "kind"), [(1, "joined"), ("inline", "unknown shape")])
def test_many_callers_get_each_its_own_answers(
    fake_model: FakeModel, devices: int | str, kind: str
) -> None:
    more: dict[str, Any] = {"batch_axes": {"x": 0}}
    outputs: list[Any] = [["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}]]
    if kind == "unknown shape":
        outputs[0][2] = ["found", 4]  # in blocks of the worker's own
        more["output_axes"] = {"y": 0}
    elif kind == "joined":
        more |= {"max_batch_size": 8}
    options = EngineOptions(concurrent_runs=4)
    with fake_master(fake_model(outputs=outputs), devices, options=options, **more) as master:
        many_callers(master)
        assert {worker.restarts for worker in master.statistics().workers} == {0}


@EITHER
def test_onnx_runtime_runs_one_session_in_several_threads(
    onnx_model: OnnxModel, devices: int | str
) -> None:
    with Master(onnx_model(AFFINE), devices, options=EngineOptions(concurrent_runs=3)) as master:
        many_callers(master)
        [worker] = master.statistics().workers
        assert (worker.concurrent, worker.wide, worker.restarts) == (3, 0, 0)
