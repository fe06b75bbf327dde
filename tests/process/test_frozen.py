"""Programs without a Python of their own: frozen ones (PyInstaller), and those that embed it.

The stand-in for a frozen program is a script that runs the program again, as a bootloader does.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from mcinfer import BuildError
from tests.process.models import FakeModel, fake_master
from tests.process.scripts import PREAMBLE, ROOT

FROZEN = """
import os, sys
with open(sys.argv.pop(1), "a+") as starts:
    starts.write("x")
if os.path.getsize(starts.name) > 16:
    os._exit(9)  # a start without end would outlive the test
sys.frozen, sys.executable = True, sys.argv.pop(1)
sys.path.insert(0, sys.argv.pop(1))
"""

BODY = """
import subprocess
from mcinfer.model_cache.children import run_child
from mcinfer.process import command, environment

say("the program")
try:
    with mcinfer.Master(MODEL, 2, engine="fake") as master:
        say(master.predict(X)["y"].tolist() == (X["x"] * 2 + 1).tolist())
except mcinfer.BuildError as exc:
    say(exc)
else:
    say(run_child("operator:truth", [], id))
    child = command("-c", "import sys; print(sys.argv[1:])", "told")
    say(subprocess.run(child, env=environment(), capture_output=True, text=True).stdout.strip())
"""


def run_frozen(folder: Path, model: Path, handed_on: str) -> "subprocess.CompletedProcess[str]":
    """Run it to its end, with a bootloader that hands these arguments on."""
    program, boot = folder / "program.py", folder / "boot"
    program.write_text(f"{FROZEN}MODEL = {str(model)!r}\n{PREAMBLE}{BODY}", encoding="utf-8")
    words = [sys.executable, program, folder / "starts", boot, ROOT]
    line = " ".join(["exec", *(f"'{word}'" for word in words), handed_on])
    boot.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    boot.chmod(0o755)
    return subprocess.run([boot], capture_output=True, text=True, timeout=50, check=False)


def test_children_of_a_frozen_program_are_no_second_start_of_it(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    done = run_frozen(tmp_path, fake_model(), '"$@"')
    assert done.stdout.splitlines() == ["the program", "True", "True", "['told']"], done.stderr


def test_frozen_program_that_loses_its_arguments_has_one_error_that_says_what_to_do(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    done = run_frozen(tmp_path, fake_model(), "")
    first, error = done.stdout.splitlines()
    assert first == "the program"
    assert "a frozen program has to import mcinfer first thing" in error


@pytest.mark.parametrize("executable", [None, ""])
def test_error_names_the_executable_that_is_missing(
    fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(BuildError, match=f"sys.executable: got {executable!r}, expected"):
        fake_master(fake_model(), 1).start()
