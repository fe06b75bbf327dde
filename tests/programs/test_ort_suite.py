"""The runner of ONNX Runtime's own tests, on tests that are made here."""

from pathlib import Path

import pytest

from tests.programs import ort_suite

TESTS = """
import os, sys, unittest
import numpy as np
import onnxruntime
from helper import get_name

x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=np.float32)


def opened():
    return onnxruntime.InferenceSession(get_name("mul_1.onnx"), providers=["CPUExecutionProvider"])


class TestSession(unittest.TestCase):
    def test_0_product(self):
        for factor in (1, 2):
            with self.subTest(factor=factor):
                self.assertEqual(opened().run(None, {"X": factor * x})[0].sum(), factor * 91)

    def test_1_plain_alone(self):
        self.assertIs(type(opened()).__module__.startswith("onnxruntime"), True)

    def test_2_ends_its_process(self):
        if hasattr(opened(), "master"):
            os._exit(3)

    def test_3_skips(self):
        self.skipTest("no such device")

    def test_4_fails(self):
        with self.subTest():
            self.fail("always")

    def test_5_without_a_session(self):
        pass

    def test_sequence_length(self):
        opened()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from onnxruntime.datasets import get_example

    tests = tmp_path / "python"
    (tests / "testdata").mkdir(parents=True)
    (tests / ort_suite.FILES[0]).write_text(TESTS, "utf-8")
    (tests / "helper.py").write_text(
        "def get_name(name):\n    return 'testdata/' + name\n", "utf-8"
    )
    (tests / "testdata" / "mul_1.onnx").write_bytes(Path(get_example("mul_1.onnx")).read_bytes())
    return tests


def test_each_test_is_compared_and_one_that_ends_its_process_keeps_none_behind_it(
    folder: Path,
) -> None:
    plain, inline, workers = [ort_suite.run_way(way, folder) for way in ort_suite.WAYS]
    assert plain.keys() == inline.keys() == workers.keys()
    compared = ort_suite.compare(plain, inline, workers)
    found = [(one.group, one.sessions, one.words) for one in compared]
    assert found == [
        ("passes", 2, "passes"),
        ("problem", 1, "**fails** inline: AssertionError: False is not True"),
        ("problem", 1, "**fails**: its process ended with status 3"),
        ("not comparable", 0, "skips itself: no such device"),
        ("not comparable", 0, "fails with a plain session too: AssertionError: always"),
        ("no session", 0, "passes"),
        (
            "problem",
            1,
            f"passes, but is to fail: {ort_suite.CANNOT_HOLD['test_sequence_length']}",
        ),
    ]
