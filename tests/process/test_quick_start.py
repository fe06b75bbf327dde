"""The two quick starts run as a user runs them, and say what they promise to say."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.process.models import OnnxModel
from tests.process.scripts import ROOT, run_example

SINGLE, PARALLEL = "quick_start/main.py", "quick_start_parallel/main.py"
SIDE = 32
IMAGE_BYTES = SIDE * SIDE * 3 * 4

NOISY = """
<ir_version: 8, opset_import: ["": 17]>
noisy (float[1, 4] x) => (float[1, 4] y) {
    noise = RandomUniformLike(x)
    y = Add(x, noise)
}
"""
"""Never gives the same answer twice."""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quick_start") / "classifier.onnx"
    build = [str(ROOT / "examples/quick_start/build_mobilenet.py"), "--output", str(path)]
    sizes = ["--size", str(SIDE), "--width", "0.35"]
    subprocess.run([sys.executable, *build, *sizes], check=True, timeout=50, capture_output=True)
    return path


def test_quick_start_gives_the_answer_to_the_file(classifier: Path, tmp_path: Path) -> None:
    image = np.random.default_rng(3).standard_normal((1, SIDE, SIDE, 3), np.float32)
    image.astype("<f4").tofile(tmp_path / "input.bin")
    done = run_example(SINGLE, "--model", str(classifier), "--input", str(tmp_path / "input.bin"))
    assert done.returncode == 0, done.stderr
    about, line = done.stdout.splitlines()
    assert about == "tensor name is:probabilities tensor size is:4000 tensor elements num is:1000"
    values = line.removeprefix("output data is: ").split()
    assert len(values) == 50
    session = ort.InferenceSession(classifier, providers=["CPUExecutionProvider"])
    expected = session.run(None, {"image": image})[0].flatten()[:50]
    np.testing.assert_allclose(np.array(values, np.float32), expected, rtol=1e-4)


def test_quick_start_refuses_a_file_that_does_not_fit(classifier: Path, tmp_path: Path) -> None:
    size = IMAGE_BYTES + 1
    (tmp_path / "input.bin").write_bytes(bytes(size))
    done = run_example(SINGLE, "--model", str(classifier), "--input", str(tmp_path / "input.bin"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert re.match(rf"error: .*input\.bin.* {size} bytes", done.stderr)


def test_parallel_quick_start_prints_each_task_and_the_total() -> None:
    done = run_example(PARALLEL, "--size", str(SIDE))
    assert done.returncode == 0, done.stderr
    *tasks, total, last = done.stdout.splitlines()
    found = [
        re.fullmatch(r"parallel id: (\d) \| task index: (\d) \| run once time: (\d+\.\d+) s", line)
        for line in tasks
    ]
    matches = [match for match in found if match is not None]
    assert len(matches) == len(tasks)
    pairs = [(int(match[1]), int(match[2])) for match in matches]
    assert sorted(pairs) == [(client, task) for client in range(5) for task in (1, 2)]
    whole = re.fullmatch(r"total run time: (\d+\.\d+) s", total)
    assert whole is not None
    assert max(float(match[3]) for match in matches) <= float(whole[1])
    assert last == "=========== success ==========="


def test_parallel_quick_start_fails_where_an_answer_is_not_that_of_a_single_model(
    onnx_model: OnnxModel,
) -> None:
    done = run_example(PARALLEL, "--model", str(onnx_model(NOISY)))
    assert done.returncode == 1
    assert "from that of a single model" in done.stderr
    assert "success" not in done.stdout
