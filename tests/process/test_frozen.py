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

PROGRAM = """
import os, sys
with open(sys.argv[1], "a+") as starts:
    starts.write("x")
if os.path.getsize(starts.name) > 16:
    os._exit(9)  # a start without end would outlive the test
sys.frozen, sys.executable = True, sys.argv[2]
MODEL = sys.argv[3]
"""

BODY = """
say("the program")
try:
    mcinfer.Master(MODEL, 2, engine="fake").start()
except mcinfer.BuildError as exc:
    say(exc)
with mcinfer.Master(MODEL, "inline", engine="fake") as master:
    say(master.predict(X)["y"].tolist() == (X["x"] * 2 + 1).tolist())
"""


def test_frozen_program_has_no_workers_but_sessions_of_its_own(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    program, boot = tmp_path / "program.py", tmp_path / "boot"
    program.write_text(f"{PROGRAM}sys.path.insert(0, {str(ROOT)!r})\n{PREAMBLE}{BODY}", "utf-8")
    words = [sys.executable, program, tmp_path / "starts", boot, fake_model()]
    boot.write_text("#!/bin/sh\n" + " ".join(["exec", *(f"'{word}'" for word in words)]), "utf-8")
    boot.chmod(0o755)
    done = subprocess.run([boot], capture_output=True, text=True, timeout=50, check=False)
    first, error, last = done.stdout.splitlines()
    assert (first, last) == ("the program", "True")
    assert "a frozen program lacks: use devices='inline'" in error


@pytest.mark.parametrize("executable", [None, ""])
def test_error_names_the_executable_that_is_missing(
    fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(BuildError, match=f"sys.executable: got {executable!r}, expected"):
        fake_master(fake_model(), 1).start()
