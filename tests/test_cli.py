"""Tests of mcinfer/cli/: how commands are called, and how their failures are told."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import mcinfer
from mcinfer.cli import main
from mcinfer.cli.app import make_app
from tests.command_line import Capture, only_line, save_double

ROOT = Path(__file__).parents[1]
HEAVY = {"numpy", "zmq", "msgpack", "onnxruntime", "asyncio", "rich", "pydantic"}
HEAVY |= {"matplotlib", "jinja2"}


def python(*arguments: object, stdout: int = subprocess.PIPE, **env: str) -> Any:
    """How Python ended that was called so, as `subprocess.run` tells it."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=50,
    )


# What works.


def test_module_runs_as_the_command_does(tmp_path: Path) -> None:
    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.ones((5, 3), np.float32))
    where = ["--input", source, "--output", target, "--devices", "1"]
    run = python("-m", "mcinfer", "run", save_double(tmp_path), *where)
    assert (run.returncode, run.stdout, run.stderr) == (0, "y: float32[5, 3]\n", "")
    with np.load(target) as content:
        assert content["y"].shape == (5, 3)


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


def test_help_of_all_commands_says_what_each_does(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for names, command in commands(typer.main.get_command(make_app())):
        if command.help and len(names) == 1:
            assert f"  {names[0]} " in out
    assert "  run  " in out
    assert "..." not in out.partition("Commands:")[2]  # no line of it is cut


def test_help_of_the_benchmark_says_that_there_is_compare(capsys: Capture) -> None:
    assert main(["bench", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("Usage: mcinfer bench [OPTIONS]")
    assert "mcinfer bench compare" in out
    assert "./compare" in out


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from mcinfer.cli import main; main(['--help']); print(*sys.modules)"
    run = python("-c", code)
    given = {*run.stdout.split("\n")[-2].split()}
    assert "mcinfer.cli.app" in given
    assert not HEAVY & given


def test_command_that_runs_a_model_imports_no_engine(tmp_path: Path) -> None:
    code = (
        "import sys; from mcinfer.cli import main; main(sys.argv[1:]); "
        "print(*sys.modules, file=sys.stderr)"
    )
    run = python("-c", code, "inspect", save_double(tmp_path))
    assert "inputs:" in run.stdout
    given = run.stderr.split()
    assert "mcinfer.master" in given
    assert "onnxruntime" not in given
    assert not [name for name in given if name.startswith("mcinfer.engines")]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("mcinfer de", ["devices"]),
        ("mcinfer cache ", ["list", "clear", "prepare"]),
        ("mcinfer devices --d", ["--devices"]),
        ("mcinfer bench compare --h", ["--help"]),
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


def test_completion_for_bash_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    # The shell is else found out by what process this one's parent is.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert main(["--show-completion", "bash"]) == 0
    out, err = capsys.readouterr()
    assert "_MCINFER_COMPLETE=complete_bash" in out
    assert out.splitlines()[-1].endswith(" mcinfer")
    assert err == ""


# Wrong usage: status 2.

RUN = ["run", "m.onnx", "--input", "x.npz", "--output", "y.npz"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Missing command"),
        (["fly"], "No such command 'fly'"),
        (["--fly"], "No such option: --fly"),
        (["inspect"], "Missing argument 'MODEL'"),
        (["inspect", "m.onnx", "more"], "more"),
        (["run", "m.onnx"], "Missing option '--input'"),
        (["run", "m.onnx", "--input", "x"], "Missing option '--output'"),
        ([*RUN, "--devices=0"], "'--devices': devices: got 0, expected a number from 1 to 1024"),
        ([*RUN, "--devices="], "devices: got '', expected a device such as 'cpu:0'"),
        ([*RUN, "--devices=cpu"], "devices: got 'cpu'"),
        ([*RUN, "--devices=cpu:0,"], "devices: got ''"),
        ([*RUN, "--devices=-1"], "devices: got '-1'"),
        ([*RUN, "--timeout=-1"], "'--timeout': got '-1', expected seconds, 0 or more"),
        ([*RUN, "--timeout=soon"], "'--timeout': got 'soon', expected seconds, 0 or more"),
        (["devices", "more"], "more"),
        (["cache"], "Missing command"),
        (["cache", "burn"], "No such command 'burn'"),
        (["cache", "prepare"], "Missing argument 'MODEL'"),
        (["cache", "list", "more"], "more"),
        (["bench"], "Missing argument 'MODEL'"),
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


def test_option_without_its_value_is_wrong_usage(capsys: Capture) -> None:
    assert main([*RUN, "--devices"]) == 2
    assert "'--devices' requires an argument" in capsys.readouterr().err.splitlines()[-1]


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


@pytest.mark.parametrize("arguments", [["devices"], ["--help"]], ids=" ".join)
@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_reader_that_has_enough_gets_no_traceback(arguments: list[str], buffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    run = python("-m", "mcinfer", *arguments, stdout=write, PYTHONUNBUFFERED=buffered)
    os.close(write)
    assert (run.returncode, run.stderr) == (1, "")


@pytest.mark.parametrize("arguments", [["devices"], ["--help"]], ids=" ".join)
@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_output_stream_that_is_full_is_a_failure(arguments: list[str], buffered: str) -> None:
    with open("/dev/full", "w") as full:
        run = python("-m", "mcinfer", *arguments, stdout=full.fileno(), PYTHONUNBUFFERED=buffered)
    assert run.returncode == 1
    assert "No space left on device" in only_line(run.stderr)
