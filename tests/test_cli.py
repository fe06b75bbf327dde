"""Tests of mcinfer/cli/: how commands are called, values of options, signals and standard streams."""

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import mcinfer
from mcinfer.cli import main, progress
from mcinfer.cli.app import make_app
from mcinfer.cli.options import (
    parse_counts,
    parse_devices_option,
    parse_dims,
    parse_pause,
    parse_rates,
)
from mcinfer.cli.progress import showing_work
from mcinfer.engines.names import engines_for
from tests.command_line import Capture, only_line, save_double

ROOT = Path(__file__).parents[1]
HEAVY = {"numpy", "zmq", "msgpack", "onnxruntime", "asyncio", "rich", "pydantic"}


def python(
    *arguments: object, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE, **env: str
) -> Any:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=stdout,
        stderr=stderr,
        text=True,
        check=False,
        timeout=50,
    )


def commands(group: Any, names: Sequence[str] = ()) -> Iterator[tuple[list[str], Any]]:
    """Each command and group with the words that call it."""
    yield [*names], group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, [*names, name])


def test_help_names_all_parameters(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    called = []
    for names, command in commands(typer.main.get_command(make_app())):
        if names == ["ort"]:  # another program takes the place of this process
            continue
        assert main([*names, "--help"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert out.startswith(f"Usage: {' '.join(['mcinfer', *names])} ")
        assert max(map(len, out.splitlines())) <= 80
        assert not re.search(r"[<>{]|\[\[|\]\.\.\.\]", re.sub("[<>]=|<=x<=", "", out)), out
        for parameter in command.params:
            takes = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar]
            assert all(f"  {word}" in out or f", {word}" in out for word in takes), names
            assert parameter.help, (names, takes)
            assert all(
                word == word.lower() for word in parameter.opts
            )  # typer 0.27 takes a metavar's case
        called.append(" ".join(names))
    assert {"", "run", "inspect", "devices", "doctor", "cache list", "bench"} < {*called}


def test_page_of_the_server_names_all_its_options() -> None:
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    command = typer.main.get_command(make_app()).commands["serve"]  # type: ignore[attr-defined]
    options = [p.opts[0] for p in command.params if p.param_type_name == "option"]
    assert [option for option in options if not re.search(rf"{option}(?![\w-])", page)] == []


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from mcinfer.cli import main; main(['--help']); print(*sys.modules)"
    given = {*python("-c", code).stdout.split("\n")[-2].split()}
    assert "mcinfer.cli.app" in given
    assert not HEAVY & given


RUN = ["run", "m.onnx", "--input", "x.npz", "--output", "y.npz"]
BENCH, TUNE, SLICE = (["bench", "m.onnx"], ["tune", "m.onnx"], ["slice", __file__])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Missing command"),
        (["cache", "burn"], "No such command 'burn'"),
        (["inspect"], "Missing argument 'MODEL'"),
        (["inspect", "m.onnx", "--probe"], "--probe and --input go together"),
        (["devices", "--devices=0"], "'--devices': devices: got 0, expected a number from 1"),
        (["run", "m.onnx"], "Missing option '--input'"),
        ([*RUN, "--batch", "0"], "--batch"),
        ([*RUN, "--timeout", "-1"], "'--timeout': got '-1', expected seconds, 0 or more"),
        ([*RUN, "--batch-axis", "x=some"], "expected a name and an axis, such as x=0 or x=none"),
        ([*RUN, *["--output-axis", "y=0"] * 2], "--output-axis: got ['y', 'y'], expected each"),
        (
            [*RUN, "--scale", "1/0"],
            "'--scale': got '1/0', expected a number or a fraction other than",
        ),
        ([*RUN, "--scale", "x=nan"], "'--scale': got 'x=nan', expected a number or a fraction"),
        (
            [*RUN, "--layout", "nhwc"],
            "'--layout': got 'nhwc', expected the axes in the file and in",
        ),
        ([*RUN, "--layout", "nhh:hhn"], "'--layout': got 'nhh:hhn', expected the axes in the file"),
        (
            [*RUN, "--cast", "x="],
            "'--cast': got 'x=', expected a type, such as float32 or x=float32",
        ),
        ([*SLICE, "--output", "o"], "--tensor, --pipeline: expected 2 or more for one of them"),
        ([*SLICE, "--tensor", "0", "--output", "o"], "Invalid value for '--tensor'"),
        ([*SLICE, "--tensor", "2"], "Missing option '--output'"),
        ([*BENCH, "--transport", "socketpair"], "No such option"),
        ([*BENCH, "--input", "x=x.raw"], "expected an archive (x.npz), or an input's name"),
        ([*BENCH, "--warmup", "1e9"], "'--warmup': got '1e9', expected"),
        ([*BENCH, "--duration", "0"], "'--duration': got '0', expected seconds, more than 0"),
        ([*BENCH, "--concurrency", "40000"], "'--concurrency': got '40000', expected 4096 clients"),
        ([*BENCH, *["--dim", "a=1"] * 2], "--dim: got ['a', 'a'], expected each name once"),
        ([*RUN, *["--cast", "float32"] * 2], "--cast: got ['no name', 'no name'], expected each"),
        ([*BENCH, "--modes", "fast"], "got 'fast', expected some of "),
        ([*BENCH, "--against", "none", "--modes", "none"], "nothing to measure"),
        ([*TUNE, "--concurrency", "40000"], "equal to 4096"),
        ([*TUNE, "--rate", "5"], "--rate: got 5 with --goal throughput, expected --goal latency"),
        (
            [*TUNE, "--goal", "latency", "--rate", "0.01", "--budget", "10"],
            "--rate: got 0.01 with --budget 10, expected at least 6.0",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_usage_ends_with_status_2(arguments: list[str], text: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: mcinfer")
    assert text in " ".join(err.split())


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_devices_option, "2", 2),
        (parse_devices_option, "cpu:0,cuda:1", ["cpu:0", "cuda:1"]),
        (parse_devices_option, "inline", ["inline"]),
        (parse_pause, "2.5", 2.5),
        (parse_counts, "8,1,2", (8, 1, 2)),
        (parse_rates, "20,0.5", (20.0, 0.5)),
        (parse_dims, "a=b:1=7", ("a=b:1", 7)),
    ],
)
def test_value_is_parsed(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_devices_option, ["", "0", "cpu", "1025", "cpu:0,,cpu:1"]),
        (parse_pause, ["", "-1", "nan", "soon"]),
        (parse_counts, ["", "0", "-1", "1,,2", "1.5", "2,2", "a"]),
        (parse_rates, ["", "0", "-1", "inf", "nan", "2,2.0", "a"]),
        (parse_dims, ["", "seq", "seq=", "=1", "seq=0", "seq=-1", "seq=1.5"]),
    ],
)
@given(st.text("0123456789.,=-eE:cpuinfa ²٣"))
def test_value_of_another_form_is_wrong_usage(
    parse: Callable[[str], object], texts: list[str], any_text: str
) -> None:
    for text in texts:
        with pytest.raises(typer.BadParameter, match=r"got .*, expected "):
            parse(text)
    with suppress(typer.BadParameter):
        parse(any_text)


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("model", {"onnxruntime"}),
        ("m.onnx", {"onnxruntime", "openvino"}),
        ("m.mindir", {"mindspore"}),
        ("m.xml", {"openvino"}),
    ],
)
def test_engine_follows_from_the_files_ending(name: str, engines: set[str]) -> None:
    assert set(engines_for(Path(name))) <= engines


def test_missing_typer_is_an_error_that_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from mcinfer.cli import main; sys.exit(main())"
    run = python("-c", code, "devices")
    assert (run.returncode, run.stdout) == (1, "")
    assert "pip install 'packaging>=" in only_line(run.stderr)


# Signals. `devices` calls `os.sched_getaffinity`, which these tests replace.


@pytest.mark.parametrize("end", [KeyboardInterrupt, typer.Abort], ids=lambda end: end.__name__)
def test_interrupt_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, end: type[BaseException]
) -> None:
    def interrupted(_process: int) -> set[int]:
        raise end

    monkeypatch.setattr(os, "sched_getaffinity", interrupted)
    assert main(["devices"]) == 130
    assert capsys.readouterr() == ("", "mcinfer: interrupted\n")


@pytest.mark.parametrize(
    ("number", "status", "text"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "hung up")],
)
def test_signal_that_ends_a_program_is_an_interrupt_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, number: signal.Signals, status: int, text: str
) -> None:
    saved = []

    def work(_process: int) -> set[int]:
        gc.disable()  # what a handler raises in a callback of a collection is lost
        try:
            signal.raise_signal(number)
        finally:
            gc.enable()
            signal.raise_signal(number)  # a second one does not keep work from being saved
            saved.append(True)
        return set()

    monkeypatch.setattr(os, "sched_getaffinity", work)
    before = signal.signal(number, signal.SIG_DFL)  # nohup(1) has SIGHUP ignored
    try:
        assert main(["devices"]) == status
        assert capsys.readouterr() == ("", f"mcinfer: {text}\n")
        assert saved
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_signal_that_is_ignored_or_handled_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    came = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    original = os.sched_getaffinity

    def work(process: int) -> set[int]:
        for number in before:
            signal.raise_signal(number)
        return original(process)

    monkeypatch.setattr(os, "sched_getaffinity", work)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
        assert main(["devices"]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert {*came} == {signal.SIGTERM}


def test_command_line_runs_outside_of_the_main_thread(capsys: Capture) -> None:
    with ThreadPoolExecutor() as pool:
        assert pool.submit(main, ["--version"]).result(timeout=10) == 0
    assert capsys.readouterr() == (f"mcinfer {mcinfer.__version__}\n", "")


# Standard streams.


def test_closed_streams_are_not_written_to(tmp_path: Path) -> None:
    def shell(words: str) -> tuple[int, list[str]]:
        text = f'exec "$0" -m mcinfer {words} 2>&- <&-'
        run = subprocess.run(
            ["/bin/sh", "-c", text, sys.executable],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=False,
            timeout=50,
        )
        return run.returncode, run.stdout.decode().splitlines()[:1]

    assert shell(f"inspect {save_double(tmp_path)}") == (0, ["inputs:"])
    assert shell("devices --devices cpu:9999") == (1, [])


INTERRUPTED = """
import os, sys
from mcinfer.cli import main
def interrupt(_process):
    raise KeyboardInterrupt
os.sched_getaffinity = interrupt
sys.exit(main(["devices"]))
"""


def test_broken_streams_end_the_command_without_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    run = python("-m", "mcinfer", "devices", stdout=write)
    assert (run.returncode, run.stderr) == (1, "")
    run = python("-c", INTERRUPTED, stderr=write)
    assert (run.returncode, run.stdout) == (130, "")
    os.close(write)
    with open("/dev/full", "w") as full:
        run = python("-m", "mcinfer", "devices", stdout=full.fileno())
    assert run.returncode == 1
    assert "No space left on device" in only_line(run.stderr)


def test_logged_warning_is_printed_with_time_level_and_logger_and_any_name_is_escaped() -> None:
    code = """
import logging, os, sys
from mcinfer.cli import main
original = os.sched_getaffinity
def warn(process):
    print("\\xe9")
    logging.getLogger("mcinfer.master").warning("of %s", "something")
    logging.getLogger("mcinfer.master").info("no more")
    return original(process)
os.sched_getaffinity = warn
main(["devices"])
logging.getLogger("other").warning("as before")
"""
    run = python("-c", code, PYTHONIOENCODING="ascii")
    assert run.stdout.splitlines()[0] == "\\xe9"
    lines = run.stderr.splitlines()
    assert lines[-1] == "as before"
    pattern = r"\d{4}-\d\d-\d\d [\d:,]{12} WARNING mcinfer\.master: of something"
    assert all(re.fullmatch(pattern, line) for line in lines[:-1])
    assert len(lines) > 1


def test_progress_is_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    with showing_work("measuring", 8) as work:
        work.show(1, "the first ten seconds")
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    with showing_work("measuring", 8) as work:
        work.show(2, "sharded")
    with showing_work("cutting") as work:
        work.show(2)
    assert capsys.readouterr().err == "mcinfer: measuring 25 %: sharded\nmcinfer: cutting\n"
