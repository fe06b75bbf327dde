"""Tensors in shared memory: how long arrays live, what is copied, and what a full memory does."""

import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mcinfer import ClosedError, Limits, Master, QueueFullError
from mcinfer.requests.tensors import Arrays
from mcinfer.runtime.admission import SPARE_BYTES
from tests.process.models import FakeModel, SharedMaster, assert_answers, fake_master, rows
from tests.process.waiting import pids, running, wait_for_states, wait_until

WIDE = {
    "inputs": (["x", "float32", ["batch", 1024]],),
    "outputs": (["y", "float32", ["batch", 1024], {"from": "x", "scale": 2, "add": 1}],),
}
"""The usual model with rows of 4096 bytes."""


def pages(count: int, value: float = 1.0) -> Arrays:
    """So many rows for `WIDE`."""
    return {"x": np.full((count, 1024), value, np.float32)}


@pytest.fixture(scope="module")
def wide(shared_master: SharedMaster) -> Master:
    """One worker; a run of rows that begin with -5 takes its time."""
    return shared_master(1, acts={"when": {"-5": "sleep:0.2"}, **WIDE})


def test_arrays_stay_as_they_are_after_later_calls_and_after_close(fake_model: FakeModel) -> None:
    with fake_master(fake_model(), 1) as master:
        kept = [(rows(5, 100.0 * i), master.predict(rows(5, 100.0 * i))) for i in range(20)]
        for inputs, outputs in kept:
            assert_answers(outputs, inputs)
        x = master.allocate({"x": (3, 4)})["x"]
    gc.collect()
    for inputs, outputs in kept:
        assert_answers(outputs, inputs)
        outputs["y"] += 1  # they are the caller's, also to write to
    x[...] = 7.0
    assert x.sum() == 84.0
    with pytest.raises(ClosedError):
        master.allocate({"x": (3, 4)})


def test_allocated_inputs_are_sent_without_a_copy(wide: Master) -> None:
    assert wide.statistics().memory_used_bytes == 0
    buffers = wide.allocate({"x": (100, 1024)})
    given = buffers["x"].nbytes
    assert wide.statistics().memory_used_bytes == given
    for value in (1.0, 2.0):
        buffers["x"][...] = value
        outputs = wide.predict(buffers)
        assert_answers(outputs, buffers)
        # The input once, the output once: no copy of the input beside it.
        assert wide.statistics().memory_used_bytes == 2 * given
        assert not np.shares_memory(outputs["y"], buffers["x"])
        del outputs
    # Answers lie in shared memory, so they can go on as inputs just so.
    outputs = wide.predict({"x": wide.predict(buffers)["y"]})
    assert wide.statistics().memory_used_bytes == 2 * given
    np.testing.assert_array_equal(outputs["y"], (buffers["x"] * 2 + 1) * 2 + 1)
    del buffers, outputs
    assert wide.statistics().memory_used_bytes == 0


def test_full_memory_is_waited_for_where_that_is_wanted_until_the_master_is_closed(
    fake_model: FakeModel,
) -> None:
    limits = Limits(memory_bytes=1 << 20, when_full="wait")
    with fake_master(fake_model(**WIDE), 1, limits=limits) as master:
        held = master.allocate({"x": (200, 1024)})
        with pytest.raises(QueueFullError, match="memory_bytes"):
            master.predict(pages(50), timeout=0.2)
        answer: Future[Arrays] = Future()
        asking = threading.Thread(
            target=lambda: answer.set_result(master.predict(pages(50), timeout=20.0))
        )
        asking.start()
        with pytest.raises(TimeoutError):
            answer.result(timeout=0.2)
        del held
        assert_answers(answer.result(timeout=20.0), pages(50))
        asking.join()
        held = master.allocate({"x": (150, 1024)})  # the answer is held as well
        with running(lambda: master.predict(pages(50))) as waits:
            with pytest.raises(TimeoutError):
                waits.result(timeout=0.2)
            master.close()
            assert isinstance(waits.exception(timeout=20.0), ClosedError)
        assert held["x"].shape == (150, 1024)


@pytest.fixture
def collecting() -> Iterator[ModuleType]:
    """The module gc, for tests that switch the collector off."""
    yield gc
    gc.enable()


def test_requests_that_fill_the_memory_wait_for_one_another_and_all_are_answered(
    fake_model: FakeModel, collecting: ModuleType
) -> None:
    """None may hold its inputs while it waits for room for its outputs: all would.

    Nor may a cycle of references hold memory: callers that wait give the collector nothing to do.
    """
    collecting.disable()
    limits = Limits(memory_bytes=1 << 20)
    with (
        fake_master(fake_model(**WIDE), 1, limits=limits) as master,
        ThreadPoolExecutor(8) as threads,
    ):

        def call(i: int) -> None:
            # Its result is let go of at once, as a server does, whichever comes first.
            outputs = master.predict(pages(100, float(i)), timeout=20.0)
            assert_answers(outputs, pages(100, float(i)))

        for future in [threads.submit(call, i) for i in range(40)]:
            future.result(timeout=60.0)


def test_a_thousand_calls_grow_nothing(fake_model: FakeModel) -> None:
    """Nor where the shape of an output is not known before."""
    calls = 1000
    filled = {"from": "x", "scale": 2, "add": 1}
    both = [[name, "float32", [name, 4], filled] for name in ("batch", "unheard")]

    def belongings() -> list[int]:
        gc.collect()
        statistics = master.statistics()
        processes = ["self", *(str(worker.pid) for worker in statistics.workers)]
        return [
            *(len(os.listdir(f"/proc/{process}/fd")) for process in processes),
            len(os.listdir("/proc/self/task")),
            statistics.memory_bytes,
            statistics.memory_used_bytes,
        ]

    with fake_master(fake_model(outputs=both), 1) as master:
        inputs = rows(4)
        for _ in range(3):  # an answer that is still held has a block, and the next one another
            outputs = master.predict(inputs)
        del outputs
        before = belongings()
        for _ in range(calls):
            outputs = master.predict(inputs)
        for name in ("batch", "unheard"):
            np.testing.assert_array_equal(outputs[name], inputs["x"] * 2 + 1)
        del outputs
        assert belongings() == before
        assert master.statistics().succeeded == calls + 3


def test_memory_of_a_request_is_free_again_however_it_ends(fake_model: FakeModel) -> None:
    model = fake_model(when={"-1": "fail", "-2": "sleep:60", "-3": "kill"}, **WIDE)
    with fake_master(model, 1) as master:
        for future in (
            master.submit(pages(1, -1.0)),
            master.submit(pages(1, -2.0), timeout=0.1),
            master.submit(pages(1, -3.0)),
        ):
            assert future.exception(timeout=20.0) is not None
        cancelled = master.submit(pages(1, -2.0))
        cancelled.cancel()
        del future
        wait_for_states(master, "ready")
        wait_until(lambda: gc.collect() >= 0 and master.statistics().memory_used_bytes == 0)


def test_memory_that_is_not_in_use_any_more_goes_back_to_the_system(
    fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each set of shapes keeps frames for the next request, of which the pool has none in use."""
    monkeypatch.setattr("mcinfer.runtime.admission._LOOK_INTERVAL", 0.1)
    model = fake_model(
        inputs=(["x", "uint8", ["batch", 1 << 20]],),
        outputs=(["y", "uint8", ["batch", 1 << 20], {"from": "x", "add": 1}],),
    )

    def mapped(pid: int) -> int:
        """Bytes of blocks that a process has mapped."""
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
        ends = [line.split()[0].split("-") for line in maps if "memfd:mcinfer " in line]
        return sum(int(end, 16) - int(begin, 16) for begin, end in ends)

    before = mapped(os.getpid())
    with fake_master(model, 1) as master:
        for count in range(12, 16):
            inputs = {"x": np.full((count, 1 << 20), count, np.uint8)}
            assert_answers(master.predict(inputs), inputs, lambda x: x + np.uint8(1))
        used = 32 << 20  # by the largest of them, rounded up
        wait_until(lambda: master.statistics().memory_bytes <= used + SPARE_BYTES)
        kept = master.statistics().memory_bytes
        wait_until(lambda: mapped(os.getpid()) <= before + kept)
        wait_until(lambda: all(mapped(pid) <= kept for pid in pids(master)))
        assert_answers(master.predict(inputs), inputs, lambda x: x + np.uint8(1))


def test_tensors_of_80_mib_need_no_dev_shm(fake_model: FakeModel) -> None:
    """Containers often have 64 MiB there; nothing of ours may lie in it."""
    model = fake_model(
        inputs=(["x", "uint8", ["batch", 1 << 20]],),
        outputs=(["y", "uint8", ["batch", 1 << 20], {"from": "x", "add": 1}],),
    )
    with fake_master(model, 1) as master:
        buffers = master.allocate({"x": (80, 1 << 20)})
        buffers["x"][...] = np.arange(80, dtype=np.uint8)[:, None]
        y = master.predict(buffers, timeout=50.0)["y"]
        assert y.nbytes == 80 << 20
        np.testing.assert_array_equal(y[:, ::4096], buffers["x"][:, ::4096] + np.uint8(1))
        for pid in (os.getpid(), *pids(master)):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
            assert "/dev/shm" not in maps  # noqa: S108 no file is made there
