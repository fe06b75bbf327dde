"""The examples run as a user runs them, and print what they promise."""

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from tests.process.scripts import ROOT, run_example

SHARING = "weight_sharing/main.py"


@pytest.mark.thorough
def test_example_prints_the_samples_lines() -> None:
    done = run_example("sd_dual_core/main.py", "--size", "tiny", "--steps", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "Success to build model 0" in lines
    assert "Success to build model 1" in lines
    assert lines.count("Receive exit message  and start to exit") == 2
    assert lines[-1] == "=========== success ==========="
    own, session, when = lines[3:6]
    assert re.fullmatch(r"Total predict time =  \d+\.\d+", own)
    assert re.fullmatch(r"One session, all cores, the same steps =  \d+\.\d+", session)
    assert when.startswith("Two workers pay with several devices, or with many clients; ")
    difference = re.search(
        r"^Largest relative difference to one session =  (\S+)$", done.stdout, re.MULTILINE
    )
    assert difference is not None
    assert float(difference[1]) <= 1e-4


@pytest.mark.thorough
def test_replaced_weights_are_those_of_a_model_that_has_them() -> None:
    done = run_example("sd_dual_core/replace_weights.py", "--size", "tiny")
    assert done.returncode == 0, done.stderr
    _, count, *timed, change, error, last = done.stdout.splitlines()
    assert count == "48 weights of 0.1 MB can be replaced"
    for line, what in zip(timed, ("Run 1", "Update", "Run 2", "Update", "Run 3"), strict=True):
        assert re.fullmatch(rf"{what}.*: \d+\.\d+ s", line)
    assert float(change.rpartition("=  ")[2]) > 0.01
    assert float(error.rpartition("=  ")[2]) <= 1e-4
    assert last == "=========== success ==========="


@pytest.mark.thorough
def test_three_processes_share_one_copy_of_the_weights(tmp_path: Path) -> None:
    done = run_example(SHARING, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model, handle, *reports, last = done.stdout.splitlines()
    assert model == "model: 100.7 MB"
    assert re.fullmatch(r"handle: \d+, for the processes \d+, \d+", handle)
    pattern = r"(\w+) (\d+): PSS (\d+\.\d) MB, USS (\d+\.\d) MB, result ([0-9a-f]{16})"
    found = [match for line in reports if (match := re.fullmatch(pattern, line))]
    assert [match[1] for match in found] == ["owner", "other", "other"]
    assert handle.endswith(f"{found[1][2]}, {found[2][2]}")
    assert len({match[5] for match in found}) == 1
    assert all(float(match[4]) < 61 for match in found[1:])
    assert last == "=========== success ==========="
    assert [*tmp_path.iterdir()] == []


# The digits.

DIGITS = "digits/draw.py"


@pytest.mark.thorough
def test_digits_are_those_of_the_documentation(tmp_path: Path) -> None:
    path = tmp_path / "digits.png"
    done = run_example(DIGITS, "--rows", "1", "--output", str(path))
    assert done.returncode == 0, done.stderr
    about, workers, session, difference, written, last = done.stdout.splitlines()
    assert about == "<Master digits.onnx on cpu:0, cpu:1: ready>"
    assert re.fullmatch(r"10 pictures, 50 steps of 20 rows: \d+\.\d\d s", workers)
    assert re.fullmatch(r"One session, all cores, the same steps: \d+\.\d\d s", session)
    assert float(difference.rpartition(": ")[2]) <= 1e-3
    assert (written, last) == (f"Written: {path}", "=========== success ===========")
    # The same noise draws the first row of the picture with eight.
    drawn, documented = _gray(path), _gray(ROOT / "docs" / "digits.png")
    assert documented.shape == (8 * 38 + 6, 10 * 38 + 6)
    assert (
        np.abs(documented[: len(drawn)] - drawn).max() <= 8
    )  # of 255: other processors round otherwise
    columns = drawn[:, 6:].reshape(len(drawn), 10, 38)
    assert all(columns[:, i].min() < 64 for i in range(10))  # there is ink in each


def _gray(path: Path) -> NDArray[np.int16]:
    """A picture of 8 bits without filters, as the example writes it."""
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    start = data.index(b"IDAT")
    (size,) = struct.unpack(">I", data[start - 4 : start])
    lines = np.frombuffer(zlib.decompress(data[start + 4 : start + 4 + size]), np.uint8)
    return lines.reshape(height, width + 1)[:, 1:].astype(np.int16)


# The quick starts.

SINGLE, PARALLEL = "quick_start/main.py", "quick_start_parallel/main.py"
SIDE = 32
IMAGE_BYTES = SIDE * SIDE * 3 * 4


@pytest.mark.thorough
def test_quick_start_gives_the_answer_to_the_file_and_refuses_one_that_does_not_fit(
    tmp_path: Path,
) -> None:
    classifier = tmp_path / "classifier.onnx"
    build = ("--output", str(classifier), "--size", str(SIDE), "--width", "0.35")
    assert run_example("quick_start/build_mobilenet.py", *build).returncode == 0
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
    size = IMAGE_BYTES + 1
    (tmp_path / "input.bin").write_bytes(bytes(size))
    done = run_example(SINGLE, "--model", str(classifier), "--input", str(tmp_path / "input.bin"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert re.match(rf"error: .*input\.bin.* {size} bytes", done.stderr)


@pytest.mark.thorough
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
