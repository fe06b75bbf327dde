"""``mcinfer tune`` as a user runs it, and the pools that it starts."""

import json
import re
from pathlib import Path

import psutil
import pytest

from mcinfer.bench.report import Load
from mcinfer.bench.tune import Aim, Call, Candidate, Found, program
from tests.command_line import COMMAND
from tests.process.models import AFFINE, OnnxModel
from tests.process.scripts import Program
from tests.process.test_cli_cache import program_on_terminal
from tests.process.waiting import all_gone, wait_until

ON_ONE_CORE = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}}); {COMMAND}"
LONGEST = 55.0


AS_MEASURED = """
from mcinfer.bench import way_class
from mcinfer.bench.way import Setup
from mcinfer.sharding import Split

split = Split(inputs={{"x": 0}}, outputs={{"y": 0}}, known="declared")
setup = Setup(model={model!r}, cores=2, devices=("cpu:0",), threads={threads}, split=split)
way = way_class({way!r})(setup)
for one in (session, way.session):
    print(type(one).__module__, one.get_session_options().intra_op_num_threads, one.get_providers())
print(len(answers), answers[0][0].shape)
"""


def test_printed_programs_open_the_sessions_that_were_measured(onnx_model: OnnxModel) -> None:
    """One after another in one process, whose start takes most of the time."""
    calls: list[tuple[Call, int, str]] = [
        ("session", 2, "onnxruntime."),
        ("threads", 1, "onnxruntime."),
        ("inline", 2, "mcinfer.ort.session"),
    ]
    model, aim = str(onnx_model(AFFINE)), Aim(goal="throughput", load=Load(batch=3, clients=4))
    text = ""
    for call, threads, _ in calls:
        candidate = Candidate(workers=1, threads=threads, call=call)
        found = Found(aim=aim, cores=2, default=candidate, batch_axes={}, output_axes={})
        found.arrays = {"x": ("float32", (3, 4))}
        check = AS_MEASURED.format(way=candidate.way, threads=threads, model=model)
        text += program(model, candidate, found) + check
    with Program(text) as printed:
        ran = printed.wait()
    assert ran.status == 0, ran.err
    lines = iter(ran.out.splitlines())
    for (_, threads, kind), *said in zip(calls, *[lines] * 3, strict=True):
        opened, measured, answers = said
        assert opened == measured
        assert opened.startswith(kind)
        assert f" {threads} [" in opened
        assert answers == "4 (3, 4)"


@pytest.mark.thorough
def test_interrupted_search_shows_its_results(onnx_model: OnnxModel, tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    report.write_text("of the last time")
    way = rb"round 1 of \d+: ((?:\d+ worker|a plain)[^\x1b\r\n]*)"
    env = {"TERM": "xterm", "COLUMNS": "200"}
    words = ("tune", onnx_model(AFFINE), "--concurrency", 2, "--budget", 20, "--json", report)
    with program_on_terminal(*words, text=ON_ONE_CORE, env=env) as (searching, got):
        wait_until(lambda: len({*re.findall(way, got)}) >= 2, LONGEST)
        process = psutil.Process(searching.pid)
        children = [child.pid for child in process.children(recursive=True)]
        searching.interrupt()
        done = searching.wait()
    assert done.status == 130
    assert re.search(r"round 1, interrupted: \d ways? ", done.out)
    assert "import numpy" not in done.out  # ways without all their turns are not recommended
    assert report.read_text() == "of the last time"
    partial = json.loads((tmp_path / "found.partial.json").read_bytes())
    assert (partial["finished"], partial["recommended"]) == (False, None)
    assert partial["trials"][0]["turns"]
    assert "The search was interrupted: these are the results so far." in done.out
    assert b"--json: what is known so far is in " in got
    assert got.endswith(b"mcinfer: interrupted\r\n")
    assert children
    wait_until(lambda: all_gone(children))
