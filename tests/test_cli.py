"""Tests of mcinfer/cli/: how commands are called, and how their failures are told."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import typer
from onnx import helper

import mcinfer
from mcinfer.cli import main
from mcinfer.cli.app import make_app
from tests.command_line import FLOAT, Capture, only_line, save, save_double

ROOT = Path(__file__).parents[1]
HEAVY = {"numpy", "zmq", "msgpack", "onnxruntime", "asyncio", "rich", "pydantic"}
HEAVY |= {"matplotlib", "jinja2"}


def python(
    *arguments: object, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE, **env: str
) -> Any:
    """How Python ended that was called so, as `subprocess.run` tells it."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=stdout,
        stderr=stderr,
        text=True,
        check=False,
        timeout=50,
    )


# What works.


def test_version_is_the_packages(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"mcinfer {mcinfer.__version__}\n", "")


def commands(group: Any, names: Sequence[str] = ()) -> Iterator[tuple[list[str], Any]]:
    """Each command with the words that it is called by, the groups among them."""
    yield [*names], group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, [*names, *name.split()])


def test_help_of_each_command_names_all_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    called = []
    for names, command in commands(typer.main.get_command(make_app())):
        assert main([*names, "--help"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert out.startswith(f"Usage: {' '.join(['mcinfer', *names])} ")
        assert max(map(len, out.splitlines())) <= 80
        for parameter in command.params:
            takes = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar]
            assert all(f"  {word}" in out or f", {word}" in out for word in takes), names
            assert parameter.help, (names, takes)
        called.append(" ".join(names))
    assert len(called) == len({*called})
    assert {"", "run", "inspect", "devices", "doctor", "cache list", "bench", "bench compare"} < {
        *called
    }


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from mcinfer.cli import main; main(['--help']); print(*sys.modules)"
    run = python("-c", code)
    given = {*run.stdout.split("\n")[-2].split()}
    assert "mcinfer.cli.app" in given
    assert not HEAVY & given


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("mcinfer cache ", ["list", "clear", "prepare"]),
        ("mcinfer bench co", ["compare"]),
        ("mcinfer bench ", []),  # files, which the shell knows
    ],
)
def test_bash_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, typed: str, offered: list[str]
) -> None:
    monkeypatch.setenv("_MCINFER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" ")) - 1))
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert (out.split(), err) == (offered, "")


# Wrong usage: status 2.

RUN = ["run", "m.onnx", "--input", "x.npz", "--output", "y.npz"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Missing command"),
        (["fly"], "No such command 'fly'"),
        (["inspect"], "Missing argument 'MODEL'"),
        (["run", "m.onnx"], "Missing option '--input'"),
        ([*RUN, "--devices=0"], "'--devices': devices: got 0, expected a number from 1 to 1024"),
        ([*RUN, "--devices="], "devices: got '', expected a device such as 'cpu:0'"),
        ([*RUN, "--timeout=-1"], "'--timeout': got '-1', expected seconds, 0 or more"),
        (["cache", "burn"], "No such command 'burn'"),
        (["bench", "compare", "a.json"], "Missing argument"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_usage_ends_with_status_2_and_says_what_is_wrong(
    arguments: list[str], text: str, capsys: Capture
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: mcinfer")
    assert text in err.splitlines()[-1]


# Failures: status 1, one line; and the end that the user makes.


def test_missing_typer_is_told_with_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from mcinfer.cli import main; sys.exit(main())"
    run = python("-c", code, "devices")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        "mcinfer: the command line needs the package typer: pip install 'mcinfer[cli]'\n"
    )


@pytest.mark.parametrize("end", [KeyboardInterrupt, typer.Abort], ids=lambda end: end.__name__)
def test_interrupt_is_told_in_one_line(
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
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    number: signal.Signals,
    status: int,
    text: str,
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
    assert main(["devices"]) == status
    assert capsys.readouterr() == ("", f"mcinfer: {text}\n")
    assert saved
    assert signal.getsignal(number) is signal.SIG_DFL


def test_signal_that_is_ignored_or_handled_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    came = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    original = os.sched_getaffinity

    def work(process: int) -> set[int]:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
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
    assert capsys.readouterr().err == ""


# What the standard streams may be like.


def test_streams_that_are_closed_are_not_written_to(tmp_path: Path) -> None:
    model = save_double(tmp_path)
    shell = ["/bin/sh", "-c", f'exec "$0" -m mcinfer inspect {model} "$@" 2>&- <&-', sys.executable]
    run = subprocess.run(shell, cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=50)
    assert (run.returncode, run.stdout.splitlines()[:1]) == (0, [b"inputs:"])
    failing = 'exec "$0" -m mcinfer devices --devices cpu:9999 2>&-'
    run = subprocess.run(
        ["/bin/sh", "-c", failing, sys.executable], cwd=ROOT, capture_output=True, check=False
    )
    assert (run.returncode, run.stdout) == (1, b"")


def test_error_stream_that_nobody_reads_leaves_the_status_as_it_is() -> None:
    code = """
import os, sys
from mcinfer.cli import main
def interrupt(_process):
    raise KeyboardInterrupt
os.sched_getaffinity = interrupt
sys.exit(main(["devices"]))
"""
    read, write = os.pipe()
    os.close(read)
    run = python("-c", code, stderr=write)
    os.close(write)
    assert (run.returncode, run.stdout) == (130, "")


def test_name_that_the_output_has_no_letters_for_is_written_all_the_same(tmp_path: Path) -> None:
    model = save(
        tmp_path / "model.onnx",
        [helper.make_node("Neg", ["x"], ["é"])],
        [("x", FLOAT, ["batch"])],
        [("é", FLOAT, ["batch"])],
    )
    run = python("-m", "mcinfer", "inspect", model, PYTHONIOENCODING="ascii")
    assert (run.returncode, run.stderr) == (0, "")
    assert "  \\xe9: float32[batch]" in run.stdout.splitlines()


def test_warning_that_is_logged_is_told_as_a_failure_is() -> None:
    code = """
import logging, os, sys
from mcinfer.cli import main
original = os.sched_getaffinity
def warn(process):
    logging.getLogger("mcinfer.master").warning("of %s", "something")
    logging.getLogger("mcinfer.master").info("no more")
    return original(process)
os.sched_getaffinity = warn
main(["devices"])
logging.getLogger("other").warning("as before")
"""
    lines = python("-c", code).stderr.splitlines()
    assert {*lines} == {"mcinfer: of something", "as before"}


@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_reader_that_has_enough_gets_no_traceback(buffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    run = python("-m", "mcinfer", "devices", stdout=write, PYTHONUNBUFFERED=buffered)
    os.close(write)
    assert (run.returncode, run.stderr) == (1, "")


@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_output_stream_that_is_full_is_a_failure(buffered: str) -> None:
    with open("/dev/full", "w") as full:
        run = python("-m", "mcinfer", "devices", stdout=full.fileno(), PYTHONUNBUFFERED=buffered)
    assert run.returncode == 1
    assert "No space left on device" in only_line(run.stderr)
