"""Outputs whose shapes only the run knows: views of blocks that workers make, and that come back to them."""

import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from mcinfer import EngineOptions, Limits, Master
from mcinfer.errors import PredictError
from mcinfer.shm.block import Block
from tests.open_descriptors import descriptors
from tests.process.models import OnnxModel
from tests.process.scripts import PREAMBLE, run
from tests.process.waiting import wait_until

PICK = """
<ir_version: 8, opset_import: ["": 18]>
pick (float[batch, k] x, int64[picked] i) => (float[a, b] y, int64[c, d] where, string[e] names)
<string[3] known = {"a", "b", "c"}> {
    y = Gather <axis = 1> (x, i)
    where = NonZero(y)
    names = Gather(known, i)
}
"""
COLUMNS = """
<ir_version: 8, opset_import: ["": 18]>
columns (float[batch, k] x, int64[picked] i) => (float[a, b] y) { y = Gather <axis = 1> (x, i) }
"""
DRAW = """
<ir_version: 8, opset_import: ["": 18]>
draw (float[n] x) => (int64[a, b] where, float[c] found) <float half = {0.5}> {
    drawn = RandomUniformLike <seed = 7.0> (x)
    is_large = Greater(drawn, half)
    where = NonZero(is_large)
    found = Compress(drawn, is_large)
}
"""
X = np.array([[1, 0, 3], [0, 5, 6]], np.float32)
LARGE = 17 << 20  # columns, of which an answer is larger than what a worker keeps
PICKED = [[0, 1]] * 6 + [[0], [0, 1, 2]] * 6 + [[]] * 6 + [[2, 1], [1, 2]] * 4


def picked(columns: Sequence[int] | NDArray[Any], x: NDArray[Any] = X) -> dict[str, NDArray[Any]]:
    return {"x": x, "i": np.array(columns, np.int64)}


def maps_of_size(pid: int | None, size: int) -> int:
    """How many mappings of so many bytes of shared memory a process has."""
    found = 0
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        found += end - begin == size and "memfd:mcinfer" in line
    return found


def shared_bytes(master: Master) -> int:
    return master.statistics().memory_used_bytes


@pytest.mark.parametrize("devices", [1, "inline"])
def test_outputs_have_exactly_the_shapes_and_values_of_their_run(
    onnx_model: OnnxModel, devices: int | str
) -> None:
    with Master(onnx_model(PICK), devices) as master:
        for columns in PICKED:
            outputs = master.predict(picked(columns))
            y = X[:, columns]
            np.testing.assert_array_equal(outputs["y"], y)
            np.testing.assert_array_equal(outputs["where"], np.nonzero(y))
            assert outputs["names"].tolist() == ["abc"[i] for i in columns]
        with pytest.raises(PredictError, match="out of data bounds"):
            master.predict(picked([7, 0]))
        np.testing.assert_array_equal(master.predict(picked([0, 2]))["y"], X[:, [0, 2]])


def test_parts_of_a_batch_have_the_shapes_of_their_runs(onnx_model: OnnxModel) -> None:
    axes: dict[str, Any] = {"batch_axes": {"x": 0, "i": None}, "output_axes": {"y": 0}}
    with Master(onnx_model(COLUMNS), 2, **axes) as master:
        for columns in PICKED:
            np.testing.assert_array_equal(master.predict(picked(columns))["y"], X[:, columns])
        assert {worker.completed for worker in master.statistics().workers} == {len(PICKED)}


def test_outputs_may_have_as_many_bytes_as_shared_memory(onnx_model: OnnxModel) -> None:
    limits = Limits(memory_bytes=1 << 20)
    with Master(onnx_model(COLUMNS), 1, limits=limits) as master:
        for width in [10] * 3 + [10_000] * 3 + [40_000] * 3 + [100_000] * 6 + [10] * 9:
            x = np.arange(2, dtype=np.float32)[:, None]
            y = master.predict(picked([0] * width, x))["y"]
            np.testing.assert_array_equal(y, np.repeat(x, width, axis=1))
        assert master.statistics().failed == 0


@pytest.mark.parametrize("devices", [1, "inline"])
def test_steady_traffic_passes_no_descriptor_and_leaves_nothing(
    onnx_model: OnnxModel, devices: int | str
) -> None:
    with Master(onnx_model(COLUMNS), devices) as master:
        for columns in PICKED:
            master.predict(picked(columns))
        before, size = len(descriptors()), master.statistics().memory_bytes
        for columns in PICKED * 3:
            master.predict(picked(columns))
        assert (len(descriptors()), master.statistics().memory_bytes) == (before, size)
        assert shared_bytes(master) == 0


def test_large_block_is_freed_also_at_a_worker_that_gets_no_more_requests(
    onnx_model: OnnxModel,
) -> None:
    x = np.zeros((1, 1), np.float32)
    with Master(onnx_model(COLUMNS), 1) as master:
        [worker] = master.statistics().workers
        y = master.predict(picked(np.zeros(LARGE, np.int64), x))["y"]
        assert maps_of_size(os.getpid(), y.nbytes) == maps_of_size(worker.pid, y.nbytes) == 1
        del y
        wait_until(lambda: not maps_of_size(os.getpid(), 4 * LARGE))
        wait_until(lambda: not maps_of_size(worker.pid, 4 * LARGE))


def test_results_that_users_hold_do_not_change(onnx_model: OnnxModel) -> None:
    with Master(onnx_model(COLUMNS), 1) as master:
        held = []
        for i in range(100):
            y = master.predict(picked([i % 3] * (1 + i % 5)))["y"]
            if i % 2:
                held.append((i, y))
        for i, y in held:
            np.testing.assert_array_equal(y, X[:, [i % 3] * (1 + i % 5)])
        assert shared_bytes(master) < 1 << 20
    for i, y in held:  # the workers have ended
        np.testing.assert_array_equal(y, X[:, [i % 3] * (1 + i % 5)])


def test_many_requests_at_once_get_their_own_results(onnx_model: OnnxModel) -> None:
    options = EngineOptions(concurrent_runs=3)
    with Master(onnx_model(COLUMNS), 2, options=options) as master:
        for _ in range(3):
            asked = [[i % 3] * (1 + i % 7) for i in range(200)]
            futures = [master.submit(picked(columns)) for columns in asked]
            for columns, future in zip(asked, futures, strict=True):
                np.testing.assert_array_equal(future.result()["y"], X[:, columns])


def test_results_outlive_a_worker_that_is_killed(onnx_model: OnnxModel) -> None:
    with Master(onnx_model(COLUMNS), 1) as master:
        before = len(descriptors())
        y = master.predict(picked([0, 1]))["y"]
        [worker] = master.statistics().workers
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        for columns in PICKED:
            np.testing.assert_array_equal(master.predict(picked(columns))["y"], X[:, columns])
        np.testing.assert_array_equal(y, X[:, [0, 1]])
        del y
        assert len(descriptors()) <= before + 3  # of the blocks that the new worker has


def test_results_of_a_worker_that_has_ended_are_the_childs_own(onnx_model: OnnxModel) -> None:
    text = """
import gc
def pick(columns):
    inputs = {"x": np.eye(3, dtype=np.float32), "i": np.array(columns, np.int64)}
    return master.predict(inputs)["y"]
with mcinfer.Master(sys.argv[1], 1) as master:
    dropped, kept = pick([0, 1]), pick([2])
del master
gc.collect()
del dropped
child = os.fork()
if not child:
    kept[:] = 5
    os._exit(int(kept.sum()))
say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), kept.tolist())
"""
    ended = run(PREAMBLE + text, onnx_model(COLUMNS))
    expected = "15 [[0.0], [0.0], [1.0]]\n"
    assert (ended.status, ended.out, ended.err) == (0, expected, "")


def test_worker_closes_the_blocks_of_answers_that_could_not_be_taken(
    onnx_model: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int, size: int, fd: int) -> Block:
        os.close(fd)
        raise OSError(errno.ENFILE, f"no room for {size} bytes of block {number}")

    with Master(onnx_model(COLUMNS), 1) as master, monkeypatch.context() as patch:
        [worker] = master.statistics().workers
        patch.setattr(Block, "attach", fail)
        for _ in range(20):
            with pytest.raises(PredictError, match="cannot take the answer"):
                master.predict(picked([0]))
        maps = Path(f"/proc/{worker.pid}/maps").read_text(encoding="utf-8")
        # Of the arena, and of the last answer.
        assert maps.count("memfd:mcinfer") <= 2


def test_random_numbers_are_drawn_once_for_each_request(onnx_model: OnnxModel) -> None:
    """Counts that differ from the last one's are no reason for a second run, which would draw the next."""
    model: Path = onnx_model(DRAW)
    plain = ort.InferenceSession(model)
    x = {"x": np.zeros(5, np.float32)}
    with Master(model, 1) as master:
        for _ in range(40):
            where, found = plain.run(None, x)
            outputs = master.predict(x)
            np.testing.assert_array_equal(outputs["where"], where)
            np.testing.assert_array_equal(outputs["found"], found)
