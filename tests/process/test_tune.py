"""``mcinfer tune`` as a user runs it, and the pools that it starts."""

import json
import re
from pathlib import Path

import psutil
import pytest

from tests.command_line import COMMAND
from tests.process.models import AFFINE, OnnxModel
from tests.process.scripts import Program
from tests.process.test_cli_cache import program_on_terminal
from tests.process.waiting import all_gone, wait_until

ON_ONE_CORE = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}}); {COMMAND}"
LONGEST = 55.0


@pytest.mark.thorough
def test_recommended_program_has_the_users_axes(onnx_model: OnnxModel, tmp_path: Path) -> None:
    turned = onnx_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        turned (float[n, 4] x) => (float[4, m] y) { y = Transpose(x) }
        """
    )
    report = tmp_path / "found.json"
    axes = ("--batch-axis", "x=0", "--output-axis", "y=1", "--batch", 2, "--json", report)
    words = ("tune", turned, *axes, "--goal", "latency", "--budget", 5)
    with Program(ON_ONE_CORE, *words) as program:
        done = program.wait(LONGEST)
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


def test_interrupted_search_shows_its_results(onnx_model: OnnxModel, tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    report.write_text("of the last time")
    pool = rb"round 1 of \d+: (\d+ workers?[^\x1b\r\n]*)"
    env = {"TERM": "xterm", "COLUMNS": "200"}
    words = ("tune", onnx_model(AFFINE), "--concurrency", 2, "--budget", 20, "--json", report)
    with program_on_terminal(*words, text=ON_ONE_CORE, env=env) as (program, got):
        wait_until(lambda: len({*re.findall(pool, got)}) >= 2, LONGEST)
        process = psutil.Process(program.pid)
        children = [child.pid for child in process.children(recursive=True)]
        program.interrupt()
        done = program.wait()
    assert done.status == 130
    assert re.search(r"round 1, interrupted: \d pools? ", done.out)
    assert "import mcinfer" not in done.out  # pools without all their turns are not recommended
    assert report.read_text() == "of the last time"
    partial = json.loads((tmp_path / "found.partial.json").read_bytes())
    assert (partial["finished"], partial["recommended"]) == (False, None)
    assert partial["trials"][0]["turns"]
    assert "The search was interrupted: these are the results so far." in done.out
    assert b"--json: what is known so far is in " in got
    assert got.endswith(b"mcinfer: interrupted\r\n")
    assert children
    wait_until(lambda: all_gone(children))
