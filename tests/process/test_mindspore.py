"""Workers that run MindSpore: as any others, each with a MindSpore of its own."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer import Master
from mcinfer.statistics import RequestTrace
from tests.process.scripts import run_python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="MindSpore is not installed"
)

EXPORT = """
import sys
import mindspore as ms
from mindspore import Tensor, nn


class Affine(nn.Cell):
    def construct(self, x):
        return x * 2.0 + 1.0


x, cell = Tensor(shape=[None, 4], dtype=ms.float32), Affine()
cell.set_inputs(x)
ms.export(cell, x, file_name=sys.argv[1], file_format="MINDIR")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = 2x + 1 on float32[?, 4]."""
    path = tmp_path_factory.mktemp("mindir") / "affine.mindir"
    script = path.with_name("export.py")  # MindSpore reads the source
    script.write_text(EXPORT)
    run = run_python(script, path, cwd=path.parent, env={"GLOG_v": "3"})
    assert run.returncode == 0, run.stderr
    return path


def rows(count: int) -> NDArray[np.float32]:
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4)


def test_batch_is_cut_over_two_workers_where_the_caller_says_so(model: Path) -> None:
    traces = list[RequestTrace]()
    with Master(model, devices=2, engine="mindspore", trace=traces.append) as master:
        assert [worker.providers for worker in master.statistics().workers] == [("CPU",)] * 2
        for count in (6, 5, 2, 1):
            x = rows(count)
            outputs = master.predict({"x": x}, batch_axes={"x": 0})
            assert [*outputs] == ["output_0"]
            np.testing.assert_array_equal(outputs["output_0"], 2 * x + 1)
    # The first one runs whole, and in pieces that are compared with it: it shows how outputs are joined.
    assert [len({shard.worker for shard in trace.shards}) for trace in traces] == [1, 2, 2, 1]
