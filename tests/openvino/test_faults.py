"""The fault matrix's rows on workers, with workers that run OpenVINO."""

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser

from mcinfer import Master
from tests.process.fault_matrix import CELLS, Cell, run_cell
from tests.process.fault_pools import Pool
from tests.process.models import AFFINE, FakeModel

HELD = """
import os, sys
folder = os.path.dirname(__file__)
sys.path.remove(folder)
del sys.modules[__name__]
import openvino
from mcinfer.engines import _fake

index = sys.argv[2]  # of the worker


def held(name, method):
    def run(*arguments, **named):
        result = method(*arguments, **named)
        # What the engine "fake" does in its builds and runs, each by the name of its act.
        stand_in = object.__new__(_fake.FakeEngine)
        stand_in._device_index = index
        stand_in._act(f"told:{FOLDER}/{name}", RuntimeError)
        return result
    return run


openvino.Core.compile_model = held("build", openvino.Core.compile_model)
openvino.InferRequest.wait = held("run", openvino.InferRequest.wait)
"""
"""In the place of openvino, which the engine imports: the real one, whose builds and runs read pipes."""


class OpenVinoPool(Pool):
    """Two workers that run y = 2x + 1 with OpenVINO."""

    def _made(self, fake_model: FakeModel, **options: Any) -> Master:
        del fake_model
        shim = self._folder / "shim"
        shim.mkdir()
        text = HELD.replace("{FOLDER}", str(self._folder))
        (shim / "openvino.py").write_text(text, encoding="utf-8")
        onnx.save(parser.parse_model(AFFINE), self._folder / "model.onnx")
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.syspath_prepend(str(shim))  # the master reads the path when it is made
        return Master(self._folder / "model.onnx", 2, engine="openvino", verify="never", **options)


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if cell.fault.startswith("worker: ")], ids=str
)
def test_fault_ends_as_the_matrix_says(cell: Cell, tmp_path: Path, fake_model: FakeModel) -> None:
    run_cell(cell, tmp_path, fake_model, OpenVinoPool)
