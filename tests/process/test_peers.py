"""Other systems as ways of the benchmark: each answers as a plain session does, and leaves nothing.

Only where they are installed.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.process.models import OnnxModel
from tests.process.scripts import ROOT, run_python

PROGRAM = """
import json, sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime as ort
import psutil
from mcinfer.bench import way_class
from mcinfer.bench.way import Setup
from mcinfer.sharding import Split

kind, model, clients, columns = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
rng = np.random.default_rng(0)
requests = [rng.standard_normal((1 + i % 5, columns), np.float32) for i in range(12)]
expected = [session.run(["y"], {"x": x})[0] for x in requests]
setup = Setup(
    model=model, cores=2, devices=("cpu:0", "cpu:1"), threads=1, max_batch_size=1,
    split=Split(inputs={"x": 0}, outputs={"y": 0}, known="declared"),
)
way = way_class(kind)(setup)
mine = psutil.Process()
errors = []

def client(number):
    try:
        last = None
        for x, y in list(zip(requests, expected))[number:] * 2:
            answer = way.run({"x": x})
            answer = answer["y"] if isinstance(answer, dict) else answer
            assert answer.shape == y.shape and answer.dtype == y.dtype, (answer.shape, answer.dtype)
            np.testing.assert_allclose(answer, y, rtol=1e-4, atol=1e-4)
            if last is not None:  # it is kept until the next one is there
                np.testing.assert_allclose(last[0], last[1], rtol=1e-4, atol=1e-4)
            last = answer, y
    except Exception as exc:
        errors.append(f"{type(exc).__name__}: {exc}")

with ThreadPoolExecutor(clients) as pool:
    pool.map(client, range(clients))
runs, seconds = way.run_seconds()
# The resource tracker of multiprocessing ends with this process.
children = [p for p in mine.children(recursive=True) if "resource_tracker" not in str(p.cmdline())]
way.close()
left = [" ".join(process.cmdline()) for process in psutil.wait_procs(children, timeout=5)[1]]
print(json.dumps({
    "workers": way.workers, "runs": runs, "seconds": seconds, "errors": errors, "left": left,
}))
"""
"""Drives a way as its own process would: the other systems keep threads until a process ends."""

AFFINE = """
<ir_version: 8, opset_import: ["": 17]>
affine (float[batch, n] x) => (float[batch, n] y) <float two = {2.0}, float one = {1.0}> {
    doubled = Mul(x, two)
    y = Add(doubled, one)
}
"""

LARGE = 1 << 17
"""Columns: rows of half a megabyte, which Ray puts into its object store."""


def drive(kind: str, model: Path, clients: int, columns: int) -> Any:
    """The result of the program; the test fails if the program does."""
    path = f"{ROOT / 'benchmarks'}/{kind}"
    done = run_python("-c", PROGRAM, path, model, clients, columns, cwd=ROOT, timeout=55)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("package", "kind"),
    [("ray", "RayActors"), ("loky", "LokyPool"), ("openvino", "OpenVinoAsync")],
)
def test_other_system_answers_several_clients_and_leaves_nothing(
    package: str, kind: str, onnx_model: OnnxModel
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for columns in (4, LARGE):
        found = drive(f"peers.py:{kind}", onnx_model(AFFINE), 3, columns)
        assert found["errors"] == found["left"] == []
        assert found["workers"] == 2
        assert found["runs"] == 2 * (12 + 11 + 10)
        assert found["seconds"] > 0
