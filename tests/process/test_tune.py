"""``mcinfer tune`` as a user runs it, and the pools that it starts."""

import json
import re
from pathlib import Path

import psutil
import pytest

from mcinfer.bench.report import Load
from mcinfer.bench.tune import Aim, Call, Candidate, Found, Trial, program
from tests.bench_reports import turn
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
print(answer[0].shape, inputs["x"].std() > 0)
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
        best = Trial(group=1, candidate=candidate, turns=[turn(20.0)])
        found = Found(aim=aim, cores=2, batch_axes={}, output_axes={})
        found.arrays = {"x": ("float32", (3, 4))}
        check = AS_MEASURED.format(way=candidate.way, threads=threads, model=model)
        text += program(model, best, found) + check
    with Program(text) as printed:
        ran = printed.wait()
    assert ran.status == 0, ran.err
    lines = iter(ran.out.splitlines())
    for (_, threads, kind), *said in zip(calls, *[lines] * 4, strict=True):
        rate, opened, measured, answers = said
        assert re.fullmatch(r"[\d.]+ requests a second", rate)
        assert opened == measured
        assert opened.startswith(kind)
        assert f" {threads} [" in opened
        assert answers == "(3, 4) True"


@pytest.mark.parametrize(("call", "joined"), [("submit", 4), ("predict", 1)])
def test_printed_programs_of_pools_answer_requests(
    call: Call, joined: int, onnx_model: OnnxModel
) -> None:
    model, aim = str(onnx_model(AFFINE)), Aim(goal="throughput", load=Load(batch=3, clients=4))
    pool = Candidate(workers=2, threads=None, call=call, max_batch_size=joined)
    found = Found(aim=aim, cores=2, batch_axes={}, output_axes={})
    found.arrays = {"x": ("float32", (3, 4))}
    text = program(model, Trial(group=1, candidate=pool, turns=[turn(20.0)]), found)
    check = "\n    assert (answer['y'] == 2 * inputs['x'] + 1).all()\n    print(answer['y'].shape)"
    with Program(text + check) as printed:
        ran = printed.wait()
    assert ran.status == 0, ran.err
    assert re.fullmatch(r"[\d.]+ requests a second\n\(3, 4\)\n", ran.out)


@pytest.mark.thorough
def test_interrupted_search_shows_its_results(onnx_model: OnnxModel, tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    report.write_text("of the last time")
    way = rb"group 1: ((?:\d+ worker|a plain|an inline)[^\x1b\r\n]*)"
    env = {"TERM": "xterm", "COLUMNS": "200"}
    words = ("tune", onnx_model(AFFINE), "--concurrency", 2, "--budget", 20, "--json", report)
    with program_on_terminal(*words, text=ON_ONE_CORE, env=env) as (searching, got):
        wait_until(lambda: len({*re.findall(way, got)}) >= 2, LONGEST)
        process = psutil.Process(searching.pid)
        children = [child.pid for child in process.children(recursive=True)]
        searching.interrupt()
        done = searching.wait()
    assert done.status == 130
    assert "group 1 (p50 and p99 in " in done.out
    assert "import numpy" not in done.out
    assert report.read_text() == "of the last time"
    partial = json.loads((tmp_path / "found.partial.json").read_bytes())
    assert (partial["finished"], partial["recommended"]) == (False, None)
    assert partial["trials"][0]["turns"]
    assert "No verdict. " in done.out
    assert "It was interrupted: these are the results so far." in done.out
    assert b"--json: what is known so far is in " in got
    assert got.endswith(b"mcinfer: interrupted\r\n")
    assert children
    wait_until(lambda: all_gone(children))


def test_short_search_of_a_busy_machine_measures_sessions_and_has_no_verdict(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    """Another program uses a core, as in /proc/stat."""
    words = ("tune", onnx_model(AFFINE), "--budget", "1", "--json", tmp_path / "x.json")
    with Program("while True: pass"), Program(COMMAND, *words) as searching:
        done = searching.wait()
    found = json.loads((tmp_path / "x.json").read_bytes())
    assert done.status == 1
    assert done.err.splitlines()[0].startswith(
        "mcinfer: there will be no verdict. The machine was "
    )
    assert done.err.splitlines()[-1] == f"mcinfer: {found['verdict']}"
    assert found["verdict"].startswith("No verdict. The machine was busy: other programs used ")
    assert found["verdict"] in done.out.splitlines()
    assert "import numpy" not in done.out
    assert (found["recommended"], found["finished"]) == (None, True)
    assert {t["candidate"]["call"] for t in found["trials"][:3]} == {"session", "threads", "inline"}
    assert found["left_out"] > 0
    assert found["needed_seconds"] > 1
