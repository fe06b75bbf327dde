"""Tests of mcinfer/bench/table.py and texts.py."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from mcinfer.bench.report import Load, Measurement, Report
from mcinfer.bench.table import show
from mcinfer.bench.texts import judged, program, report_program
from tests.bench_reports import large, report, small, turn, way

HOSTILE = "a\x1b[31m[bold]\nb"


def shown(made: Report, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=False)
    show(judged(made), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_eighty_columns_hold_every_table_whole() -> None:
    lines = shown(large()).splitlines()
    tables = [line for line in lines if "  " in line and ":" not in line and "=" not in line]
    assert max(map(len, tables)) <= 80
    assert not {"…", "\x1b"} & {*"".join(lines)}
    header = ["way", "n", "rows/s", "speed-up", "p50", "p90", "p99", "max", "overhead", "cores"]
    assert [line.split() for line in lines].count(header) == 5


def test_way_that_did_not_answer_everything_is_marked() -> None:
    load = Load(batch=4, clients=9, rate=50.0)
    late = [turn(50.0), turn(30.0, kept_up=False), turn(25.0, kept_up=False, unfinished=50)]
    turns = {("session", load): [turn(50.0)] * 3, (HOSTILE, load): late}
    made = report([way("session"), way(HOSTILE)], turns, name=HOSTILE)
    text = shown(made)
    assert "(200 rows/s asked for; speed-up over session; latency and overhead in ms)" in text
    (remark,) = judged(made).remarks
    assert "did not keep up in 2 of 3 repeats: 30.0 (25.0" in remark
    assert "50 of 260 never begun" in remark
    (row,) = (line.split() for line in text.splitlines() if line.startswith("a?[31m[bold] b ! "))
    assert "\N{EN DASH}" in row  # no speed-up
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("sharded", "text"),
    [
        ([150.0, 152.0], r"Use mcinfer: 1.51 × the throughput of session and about .*\."),  # noqa: RUF001
        ([99.0, 103.0], r"No clear gain in speed; .*; a crash costs no request\."),
        ([50.0, 52.0], r"Keep session: mcinfer has 0.510 × the throughput; .*"),  # noqa: RUF001
    ],
)
def test_verdict_is_one_sentence_the_same_in_the_table(sharded: list[float], text: str) -> None:
    made = small(session=[100.0, 100.0], sharded=sharded)
    said = judged(made).verdict
    assert re.fullmatch(text, said)
    assert said in shown(made, 200).splitlines()


def test_verdict_names_what_answers_one_request_alone_sooner() -> None:
    ways = [way("session"), way("inline"), way("concurrent", workers=2)]
    turns = {
        (name, Load(batch=1, clients=clients)): [turn(rate, slowest=slowest)] * 2
        for name, clients, rate, slowest in (
            ("session", 1, 100.0, 0.05),
            ("inline", 1, 110.0, 0.04),
            ("concurrent", 1, 60.0, 0.1),
            ("session", 4, 100.0, 0.2),
            ("inline", 4, 100.0, 0.2),
            ("concurrent", 4, 180.0, 0.1),
        )
    }
    said = judged(report(ways, turns)).verdict
    assert said.startswith("Use mcinfer: up to 1.80 ")
    assert said.endswith(
        "For the latency of one request: inline (8.50 ms, concurrent 21.3 ms); "
        "2 workers are for many clients."
    )
    alone = {pair: taken for pair, taken in turns.items() if pair[0] != "inline"}
    assert "of one request: session (10.6 ms, " in judged(report(ways, alone)).verdict
    few = small(session=[50.0] * 2, concurrent=[90.0] * 2)
    assert "of one request" not in judged(few).verdict


def test_program_of_the_verdict_makes_the_models_inputs() -> None:
    made = small(session=[100.0], batched=[150.0])
    assert "max_batch_size" not in report_program(made)  # it joined nothing
    assert "requests joined" not in shown(made)
    session, batched = made.measurements
    joined = tuple(replace(turn, runs=turn.requests // 2) for turn in batched.turns)
    made = replace(made, measurements=(session, replace(batched, turns=joined)))
    assert "requests joined up to 16 rows; " in shown(made)
    text = report_program(made)
    compile(text, "program", "exec")
    assert '"latents": np.asarray(random.normal(size=(2, 4, 32, 32)), "float32"),' in text
    assert '"step": np.asarray(random.integers(0, 10, ()), "int64"),' in text
    assert "max_batch_size=16" in text
    assert report_program(small(session=[100.0])) == ""
    made = small(session=[100.0], inline=[150.0])
    made = replace(made, settings=replace(made.settings, devices=("cpu:0", "cpu:1")))
    text = report_program(made)
    compile(text, "program", "exec")
    assert "import mcinfer.ort as onnxruntime\n" in text
    assert '\nsession = onnxruntime.InferenceSession("unet.onnx", providers=[' in text


def test_program_has_the_threads_and_the_axes_that_were_measured() -> None:
    for name, threads, axes in (
        ("sharded", "EngineOptions(threads=3)", 'batch_axes={"latents": 0, "step": None}'),
        ("inline", "options.intra_op_num_threads = 3", ""),
    ):
        made = small(session=[100.0], **{name: [150.0]})
        said = replace(made.settings, threads=3, batch_axes={"latents": 0, "step": None})
        text = " ".join(report_program(replace(made, settings=said)).split())
        assert threads in text
        assert axes in text
    assert report_program(replace(made, settings=replace(said, arrays={}))) == ""


def test_program_can_name_any_file_and_make_inputs_of_any_type() -> None:
    arrays = {"s": ("string", (2,)), "b": ("bfloat16", (1, 2)), "n": ("int64", ())}
    name = 'a "b"\\c\nd\udc80.onnx'
    start, _, rest = program(name, {}, arrays, "submit", 2, 10.0).partition("with ")
    named = rest.partition("Master(")[2].partition(") as")[0]
    assert eval(named) == name  # noqa: S307 our own text
    made: dict[str, dict[str, object]] = {}
    exec(start, made)  # noqa: S102 our own text
    names = [str(array.dtype) for array in made["inputs"].values()]  # type: ignore[attr-defined]
    assert names == ["object", "bfloat16", "int64"]


def test_other_engine_has_its_difference_in_the_table_the_verdict_and_the_program() -> None:
    made = small(session=[100.0, 101.0], sharded=[120.0, 121.0])
    assert "difference" not in shown(made)
    other = replace(
        made.ways[1], name="sharded/openvino:bf16", engine="openvino:bf16", difference=0.0123
    )
    turns = tuple(replace(turn, seconds=turn.seconds / 2) for turn in made.measurements[1].turns)
    faster = Measurement(way=other.name, load=made.measurements[1].load, turns=turns)
    made = replace(made, ways=(*made.ways, other), measurements=(*made.measurements, faster))
    lines = shown(made).splitlines()
    header = next(line for line in lines if line.startswith("way") and "PSS" in line)
    assert header.split()[-1] == "difference"
    assert any(line.startswith("sharded/openvino") and line.endswith("1.2e-2") for line in lines)
    assert "With openvino:bf16, whose answer differs by 1.2e-2" in judged(made).verdict
    text = " ".join(report_program(made).split())
    assert 'engine="openvino"' in text
    assert "EngineOptions(precision=" in text
    assert "master.predict(inputs)" in text
