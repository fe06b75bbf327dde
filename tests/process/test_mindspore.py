"""Workers that run MindSpore: as any others, each with a MindSpore of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer import BuildError, EngineOptions, InvalidInputError, Master, PredictError
from mcinfer.statistics import RequestTrace

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="MindSpore is not installed"
)

EXPORT = """
import sys
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops


class Picked(nn.Cell):
    def construct(self, x, row):
        return x * 2.0 + 1.0 + ops.gather(x, row, 0) * 0.0


def export(name, size):
    inputs = (
        Tensor(shape=[None, 4], dtype=ms.float32)
        if size is None
        else Tensor(np.zeros((size, 4), np.float32)),
        Tensor(np.zeros(1, np.int32)),
    )
    cell = Picked()
    cell.set_inputs(*inputs)
    ms.export(cell, *inputs, file_name=f"{sys.argv[1]}/{name}.mindir", file_format="MINDIR")


export("dynamic", None)
export("fixed", 2)
"""
"""y = 2x + 1 on float32[?, 4] or float32[2, 4]; it fails where x has no such row."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the two models."""
    folder = tmp_path_factory.mktemp("mindir")
    script = folder / "export.py"
    script.write_text(EXPORT)
    run = subprocess.run(
        [sys.executable, str(script), str(folder)],
        cwd=folder,
        env={**os.environ, "GLOG_v": "3"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert run.returncode == 0, run.stderr
    return folder


def rows(count: int) -> NDArray[np.float32]:
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4)


FIRST = np.array([0], np.int32)
NOWHERE = np.array([99], np.int32)
AXES: dict[str, int | None] = {"x": 0, "row": None}


def test_batch_is_cut_over_two_workers_where_the_caller_says_so(models: Path) -> None:
    path, traces = models / "dynamic.mindir", list[RequestTrace]()
    with Master(path, devices=2, engine="mindspore", trace=traces.append) as master:
        assert [worker.providers for worker in master.statistics().workers] == [("CPU",)] * 2
        for count in (6, 5, 2, 1):
            x = rows(count)
            outputs = master.predict({"x": x, "row": FIRST}, batch_axes=AXES)
            assert [*outputs] == ["output_0"]
            np.testing.assert_array_equal(outputs["output_0"], 2 * x + 1)
    # The first one runs whole, and in pieces that are compared with it: it shows how outputs are joined.
    assert [len({shard.worker for shard in trace.shards}) for trace in traces] == [1, 2, 2, 1]


def test_fixed_batch_is_cut_in_as_many_pieces_as_it_takes_where_the_caller_says_so(
    models: Path,
) -> None:
    with Master(models / "fixed.mindir", devices=2, engine="mindspore") as master:
        inputs = {"x": rows(10), "row": FIRST}
        with pytest.raises(InvalidInputError, match="'x' has size 10 in dimension 0, expected 2"):
            master.predict(inputs)
        outputs = master.predict(inputs, batch_axes=AXES, output_axes={"output_0": 0})
        np.testing.assert_array_equal(outputs["output_0"], 2 * inputs["x"] + 1)
        assert sum(worker.completed for worker in master.statistics().workers) == 5


def test_failed_run_fails_its_request_alone(models: Path) -> None:
    with Master(models / "dynamic.mindir", devices=1, engine="mindspore") as master:
        x = rows(3)
        for _ in range(2):
            with pytest.raises(PredictError, match=r"mindspore: For 'Gather'.*99"):
                master.predict({"x": x, "row": NOWHERE})
            outputs = master.predict({"x": x, "row": FIRST})
            np.testing.assert_array_equal(outputs["output_0"], 2 * x + 1)
        assert [worker.restarts for worker in master.statistics().workers] == [0]


def test_option_that_mindspore_does_not_have_fails_the_build_by_name(models: Path) -> None:
    options = EngineOptions(session_config={"speed": "9"})
    master = Master(models / "fixed.mindir", 2, engine="mindspore", options=options)
    with pytest.raises(BuildError, match="'speed'"):
        master.start()
    master.close()
