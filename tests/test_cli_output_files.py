"""Tests of mcinfer/cli/output_files.py, and of wrong usage and failures of ``bench`` and ``tune``."""

import os
from html import escape
from pathlib import Path

import psutil
import pytest
import typer

from mcinfer.bench.report import load
from mcinfer.cli import main
from mcinfer.cli.batch_files import PartialResults
from mcinfer.cli.output_files import check_outputs, write_output
from mcinfer.errors import InvalidInputError, McinferError
from tests.command_line import COMMAND, Capture, files, only_line, save_double
from tests.process.scripts import Program
from tests.process.waiting import all_gone, wait_until


def refused(path: Path) -> str:
    """Why a file is not written: the same error before the work and after it."""
    with pytest.raises(InvalidInputError) as before:
        check_outputs({"--json": path, "--html": None})
    with pytest.raises(InvalidInputError) as after:
        write_output("--json", path, b"new")
    assert str(before.value) == str(after.value)
    return str(before.value)


def test_file_is_replaced_where_a_link_leads_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link.json").symlink_to("far/real.json")
    for content in (b"old", b"new"):
        check_outputs({"--json": tmp_path / "link.json"})
        write_output("--json", tmp_path / "link.json", content)
        assert (tmp_path / "far" / "real.json").read_bytes() == content
    assert (tmp_path / "link.json").is_symlink()
    assert files(tmp_path / "far") == ["real.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_link_of_another_user_is_followed_neither_at_the_end_nor_above(tmp_path: Path) -> None:
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "x.json").write_bytes(b"precious")
    theirs, end = tmp_path / "theirs", tmp_path / "end.json"
    theirs.symlink_to("mine")
    end.symlink_to("mine/x.json")
    (tmp_path / "link").symlink_to("theirs/deep")
    write_output("--json", tmp_path / "link" / "x.json", b"mine")
    for link in (theirs, end):
        os.chown(link, 12345, -1, follow_symlinks=False)
    for path in (theirs / "x.json", theirs / "deep" / "x.json", tmp_path / "link" / "x.json"):
        assert refused(path) == f"--json: {theirs} is a link of another user"
    assert refused(end) == f"--json: {end} is a link of another user"
    with pytest.raises(McinferError, match=f"{theirs} is a link of another user"):
        PartialResults(theirs / "x.npz", {})
    assert (tmp_path / "mine" / "x.json").read_bytes() == b"precious"
    assert (tmp_path / "mine" / "deep" / "x.json").read_bytes() == b"mine"
    assert files(tmp_path / "mine") == ["deep", "x.json"]


def test_only_writable_files_are_replaced(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "null").symlink_to(os.devnull)
    for name in ("pipe", "folder", "null"):
        path = tmp_path / name
        assert refused(path) == f"--json: {path} is there and is no regular file"
    assert Path(os.devnull).is_char_device()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert "none" in refused(tmp_path / "none" / "x.json")
    assert refused(tmp_path / "file" / "x.json").endswith("cannot be written: Not a directory")
    assert "cannot be written: " in refused(tmp_path / "loop")
    assert "cannot be written: " in refused(Path("/proc/x.json"))


def test_unfinished_output_has_a_name_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "x.v1"
    path.write_bytes(b"whole")
    write_output("--html", path, b"part", finished=False)
    partial = tmp_path / "x.partial.v1"
    assert (path.read_bytes(), partial.read_bytes()) == (b"whole", b"part")
    assert only_line(capsys.readouterr().err).endswith(f"what is known so far is in {partial}")


def test_two_options_may_not_name_one_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("x.json")
    with pytest.raises(typer.BadParameter, match=r"--html: got .*, which --json is to be"):
        check_outputs({"--json": tmp_path / "x.json", "--html": tmp_path / "link"})


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_model_is_never_written_over(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.onnx").write_bytes(b"precious")
    (tmp_path / "link.json").symlink_to("model.onnx")
    status = main([command, str(tmp_path / "model.onnx"), "--json", str(tmp_path / "link.json")])
    assert status == 2
    assert "link.json, which the command reads" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "model.onnx").read_bytes() == b"precious"


# The commands.

ONE_WAY = ["--modes", "none", "--devices", "1", "--count", "1", "--concurrency", "1"]
MY_WAYS = """
import os, time
from mcinfer.bench.way import RunningWay

class Hangs(RunningWay):
    text = "hangs when it is started for the second time"

    def __init__(self, setup):
        self.again = os.path.exists("first")
        open("first", "w").close()

    def run(self, inputs):
        if self.again:
            open("second", "w").close()
            time.sleep(1000)

    def close(self):
        pass

class Breaks(Hangs):
    def run(self, inputs):
        raise OSError("no such thing")
"""


@pytest.mark.thorough
def test_interrupted_benchmark_keeps_the_last_report_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "ways.py").write_text(MY_WAYS)
    (tmp_path / "x.json").write_text("of the last time")
    model = save_double(tmp_path)
    options = (*ONE_WAY, "--against", "ways.py:Hangs", "--json", "x.json")
    with Program(COMMAND, "bench", model, *options, cwd=tmp_path) as program:
        wait_until((tmp_path / "second").exists, 60.0)
        started = [each.pid for each in psutil.Process(program.pid).children(recursive=True)]
        program.interrupt()
        done = program.wait()
    assert started
    wait_until(lambda: all_gone(started))
    assert done.status == 130
    assert done.err.endswith(
        "mcinfer: --json: what is known so far is in x.partial.json\nmcinfer: interrupted\n"
    )
    assert (tmp_path / "x.json").read_text() == "of the last time"
    report = load(tmp_path / "x.partial.json")
    assert not report.finished
    assert [len(m.turns) for m in report.measurements] == [1]


@pytest.mark.thorough
def test_page_and_figures_are_written_with_what_the_extra_cli_installs(tmp_path: Path) -> None:
    without = "import sys; sys.modules.update(dict.fromkeys(['jinja2', 'matplotlib']))\n"
    short = ("--modes", "inline", "--duration", "0.05", "--repeat", "1", "--warmup", "0")
    ways = ("--against", "session", "--devices", "1", "--concurrency", "1", *short)
    files_to_write = ("--html", "x.html", "--json", "x.json")
    model = save_double(tmp_path)
    with Program(
        without + COMMAND, "bench", model, *ways, *files_to_write, cwd=tmp_path
    ) as program:
        done = program.wait()
    report = load(tmp_path / "x.json")
    assert done.status == bool(report.disturbed), done.err  # the machine of a test may be busy
    # Before anything is measured.
    assert "mcinfer: measuring takes 0 s and the time of 2 starts\n" in done.err
    verdict = done.out.split("\n\nmcinfer's best mode")[0].splitlines()[-1]
    assert f"<h1>{escape(verdict)}</h1>" in (tmp_path / "x.html").read_text("utf-8")
    assert [way.name for way in report.ways] == ["session", "inline"]


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_output_is_checked_before_the_work(command: str, capsys: Capture) -> None:
    assert main([command, "none.onnx", "--json", os.devnull]) == 1
    line = only_line(capsys.readouterr().err)
    assert line == f"mcinfer: --json: {os.devnull} is there and is no regular file"
