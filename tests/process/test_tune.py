"""``mcinfer tune`` as a user runs it, and the pools that it starts."""

import json
import os
import pty
import re
import threading
from pathlib import Path

import psutil

from tests.process.models import AFFINE, OnnxModel
from tests.process.scripts import Ended, Program
from tests.process.waiting import all_gone, wait_until

COMMAND = "import sys; from mcinfer.cli import main; sys.exit(main(sys.argv[1:]))"
ON_ONE_CORE = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}}); {COMMAND}"
ON_TERMINAL = f"""
import os, sys
os.dup2(os.open(sys.argv.pop(1), os.O_RDWR | os.O_NOCTTY), 2)
{ON_ONE_CORE}
"""
LONGEST = 55.0


def tune(*arguments: object, text: str = COMMAND) -> Ended:
    with Program(text, "tune", *arguments) as program:
        return program.wait(LONGEST)


def test_search_recommends_a_pool_and_its_program_has_the_axes_of_the_command_line(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    turned = onnx_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        turned (float[n, 4] x) => (float[4, m] y) { y = Transpose(x) }
        """
    )
    report = tmp_path / "found.json"
    axes = ("--batch-axis", "x=0", "--output-axis", "y=1", "--batch", 2, "--json", report)
    done = tune(turned, *axes, "--goal", "latency", "--budget", 5, text=ON_ONE_CORE)
    assert (done.status, done.err) == (0, "")
    assert "not split" not in done.out
    content = json.loads(report.read_bytes())
    assert content["finished"]
    first, recommended = content["trials"][0], content["recommended"]
    assert first["is_default"]
    assert all(turn["requests"] > 0 for turn in first["turns"])
    assert recommended["program"] in done.out
    assert done.out.splitlines()[-1] == json.dumps(recommended["arguments"])
    assert recommended["arguments"]["batch_axes"] == {"x": 0}
    assert recommended["arguments"]["output_axes"] == {"y": 1}
    assert {'batch_axes={"x": 0}', 'output_axes={"y": 1}'} <= {
        line.strip(" ,") for line in recommended["program"].splitlines()
    }
    assert '"x": np.zeros((2, 4), "float32")' in recommended["program"]
    with Program(recommended["program"] + "\nprint(answer['y'].shape)") as program:
        ran = program.wait()
    assert (ran.status, ran.out) == (0, "(4, 2)\n")


def test_interrupted_search_shows_its_results_and_leaves_nothing(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    report = tmp_path / "found.json"
    report.write_text("of the last time")
    ours, theirs = pty.openpty()
    got = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 4096):
                got.extend(data)
        except OSError:  # EIO: the other end is closed
            pass

    def measured() -> set[bytes]:
        """The pools that had their turns, or have one."""
        return {*re.findall(rb"round 1 of \d+: (\d+ workers?[^\x1b\r\n]*)", got)}

    reader = threading.Thread(target=read)
    terminal = {"TERM": "xterm", "COLUMNS": "200"}
    arguments = ("tune", onnx_model(AFFINE), "--concurrency", 2, "--budget", 20, "--json", report)
    try:
        place = os.ttyname(theirs)
        with Program(ON_TERMINAL, place, *arguments, env=terminal) as program:
            reader.start()
            wait_until(lambda: len(measured()) >= 2, LONGEST)
            process = psutil.Process(program.pid)
            children = [child.pid for child in process.children(recursive=True)]
            program.interrupt()
            done = program.wait()
    finally:
        os.close(theirs)
        reader.join(10.0)
        os.close(ours)
    assert done.status == 130
    assert re.search(r"round 1, interrupted: \d pools? ", done.out)
    assert (
        "import mcinfer" not in done.out
    )  # nothing is recommended that had but a few of its turns
    assert report.read_text() == "of the last time"
    partial = json.loads((tmp_path / "found.partial.json").read_bytes())
    assert (partial["finished"], partial["recommended"]) == (False, None)
    assert partial["trials"][0]["turns"]
    assert "The search was interrupted: these are the results so far." in done.out
    assert b"--json: what is known so far is in " in got
    assert got.endswith(b"mcinfer: interrupted\r\n")
    assert children
    wait_until(lambda: all_gone(children))
