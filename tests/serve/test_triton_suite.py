"""The runner of Triton's own programs and tests, on some that are made here."""

import socket
from pathlib import Path

import pytest

from tests.serve import triton_suite

EXAMPLE = """
import argparse, sys
import numpy as np
import tritonclient.http as client

parser = argparse.ArgumentParser()
parser.add_argument("-u", default="localhost:8000")
asked = client.InferenceServerClient(parser.parse_args().u)
inputs = [client.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
for given in inputs:
    given.set_data_from_numpy(np.ones((1, 16), np.int32))
if asked.infer("simple", inputs).as_numpy("OUTPUT0").tolist() != [[2] * 16]:
    sys.exit(1)
"""
SAYS_SO = 'print("PASS: infer")\n'
SILENT = 'if "never" in sys.argv:\n    print("PASS: infer")\n'

HTTP_TEST = """
import sys, unittest

sys.path.append("../common")
import requests
import test_util as tu

URL = "http://localhost:8000/v2/models/onnx_zero_1_float32/infer"


class HttpTest(tu.TestResultCollector):
    def test_raw_binary(self):
        answer = requests.post(URL, data=bytes(8), headers={"Inference-Header-Content-Length": "0"})
        self.assertEqual(200, answer.status_code)

    def test_fails(self):
        self.fail("always")

    def test_negative_dimensions(self):
        self.assertEqual(500, 400, "Expected error code 500 for negative dimension")

    def test_buffer_size_overflow(self):
        self.fail("for another reason")

    def test_load_model(self):
        pass

    def test_loading_large_invalid_model(self):
        self.fail("run")
"""


@pytest.fixture
def free_port() -> int:
    """In place of the one port that Triton's tests know."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port


def groups(verdicts: list[triton_suite.Verdict]) -> dict[str, str]:
    return {one.name: f"{one.group}: {one.words}" for one in verdicts}


def test_examples_pass_unless_they_fail_or_do_not_say_so(tmp_path: Path) -> None:
    for name, text in {
        "simple_http_infer_client.py": EXAMPLE + SAYS_SO,
        "simple_http_silent.py": EXAMPLE + SILENT,
        "simple_http_fails.py": "raise ValueError('no answer')",
        "simple_http_health_metadata.py": "raise SystemExit('FAILED : get_server_metadata')",
        "simple_grpc_health_metadata.py": "",
        "other.py": "raise SystemExit(1)",
    }.items():
        (tmp_path / name).write_text(text, "utf-8")
    reason = "the server's name is mcinfer, not triton"
    assert groups(triton_suite.run_examples(tmp_path, only=".py")) == {
        "simple_grpc_health_metadata.py": f"problem: passes, but is not to: {reason}",
        "simple_http_fails.py": "problem: **fails**: ValueError: no answer",
        "simple_http_health_metadata.py": f"does not pass: does not pass: {reason}",
        "simple_http_infer_client.py": "passes: passes",
        "simple_http_infer_client.py --request-compression-algorithm deflate"
        " --response-compression-algorithm gzip": "problem: **fails**: simple_http_infer_client.py:"
        " error: unrecognized arguments: --request-compression-algorithm deflate"
        " --response-compression-algorithm gzip",
        "simple_http_silent.py": "problem: **fails**: PASS is missing",
    }


def test_tests_pass_unless_they_fail_or_fail_for_another_reason(
    tmp_path: Path, free_port: int
) -> None:
    place = tmp_path / "L0_http"
    place.mkdir()
    text = HTTP_TEST.replace("8000", str(free_port))
    (place / "http_test.py").write_text(text, "utf-8")
    found = groups(triton_suite.run_tests(place, port=free_port))
    assert {name.removeprefix("HttpTest.test_"): words for name, words in found.items()} == {
        "raw_binary": "passes: passes",
        "fails": "problem: **fails**: AssertionError: always",
        "negative_dimensions": "does not pass: does not pass: a negative size is 400, not 500",
        "buffer_size_overflow": "problem: **fails**: AssertionError: for another reason",
        "load_model": "problem: passes, but is not to: models may be loaded, where the test expects a"
        " server that refuses it",
        "loading_large_invalid_model": "not run: not run: its request has 3 GB, and it expects Triton's"
        " words",
    }


def test_port_that_is_taken_and_folder_without_tests_are_named(
    tmp_path: Path, free_port: int
) -> None:
    with pytest.raises(SystemExit, match=r"expected a folder with http_test\.py"):
        triton_suite.run_tests(tmp_path)
    with pytest.raises(SystemExit, match=r"expected a folder with simple_http_\*\.py"):
        triton_suite.run_examples(tmp_path)
    (tmp_path / "L0_http").mkdir()
    (tmp_path / "L0_http" / "http_test.py").write_text(HTTP_TEST, "utf-8")
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(SystemExit, match=f"port {free_port}, which is not free"),
    ):
        triton_suite.run_tests(tmp_path / "L0_http", port=free_port)


def test_page_has_the_table_only_if_all_went_well(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- suite: begin -->\nold\n<!-- suite: end -->\nafter\n", "utf-8")
    examples = tmp_path / "examples"
    examples.mkdir()
    (examples / "simple_http_fails.py").write_text("raise ValueError('a|b')", "utf-8")
    with pytest.raises(SystemExit):
        triton_suite.main(["--client", str(examples), "--write", str(page)])
    assert triton_suite.main(["--client", str(examples)]) == 1
    assert "old" in page.read_text("utf-8")
    verdicts = triton_suite.run_examples(examples)
    assert r"| `simple_http_fails.py` |  | **fails**: ValueError: a\|b |" in triton_suite.table(
        verdicts
    )
