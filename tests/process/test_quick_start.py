"""The two quick starts run as a user runs them, and say what they promise to say."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.process.models import OnnxModel

EXAMPLES = Path(__file__).parents[2] / "examples"
SINGLE, PARALLEL = "quick_start", "quick_start_parallel"
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


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / example / "main.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Fail unless the example said in one line what was wrong, and nothing else."""
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quick_start") / "classifier.onnx"
    build = [str(EXAMPLES / SINGLE / "build_mobilenet.py"), "--output", str(path)]
    sizes = ["--size", str(SIDE), "--width", "0.35"]
    subprocess.run([sys.executable, *build, *sizes], check=True, timeout=50, capture_output=True)
    return path


def test_quick_start_gives_the_answer_to_the_file(classifier: Path, tmp_path: Path) -> None:
    image = np.random.default_rng(3).standard_normal((1, SIDE, SIDE, 3), np.float32)
    image.astype("<f4").tofile(tmp_path / "input.bin")
    done = run(SINGLE, "--model", str(classifier), "--input", str(tmp_path / "input.bin"))
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
    done = run(SINGLE, "--model", str(classifier), "--input", str(tmp_path / "input.bin"))
    assert_refused(done, "input.bin", f" {size} bytes", "image", str(IMAGE_BYTES))


def test_parallel_quick_start_prints_each_task_and_the_total() -> None:
    done = run(PARALLEL, "--size", str(SIDE))
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
    done = run(PARALLEL, "--model", str(onnx_model(NOISY)))
    assert done.returncode == 1
    assert "from that of a single model" in done.stderr
    assert "success" not in done.stdout
