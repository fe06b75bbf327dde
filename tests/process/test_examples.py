"""The examples run as a user runs them, and say what they promise to say."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.process.scripts import ROOT, run_example
from tests.process.waiting import all_gone, wait_until

SHARING = "weight_sharing/main.py"


def test_example_prints_the_samples_lines() -> None:
    done = run_example("sd_dual_core/main.py", "--size", "tiny", "--steps", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "Success to build model 0" in lines
    assert "Success to build model 1" in lines
    assert lines.count("Receive exit message  and start to exit") == 2
    assert lines[-1] == "=========== success ==========="
    assert re.search(r"^Total predict time =  \d+\.\d+$", done.stdout, re.MULTILINE)
    difference = re.search(
        r"^Largest relative difference to one session =  (\S+)$", done.stdout, re.MULTILINE
    )
    assert difference is not None
    assert float(difference[1]) <= 1e-4


def test_replaced_weights_are_those_of_a_model_that_has_them() -> None:
    done = run_example("sd_dual_core/replace_weights.py", "--size", "tiny")
    assert done.returncode == 0, done.stderr
    _, count, *timed, change, error, last = done.stdout.splitlines()
    assert count == "48 weights of 0.1 MB can be replaced"
    for line, what in zip(timed, ("Run 1", "Update", "Run 2", "Update", "Run 3"), strict=True):
        assert re.fullmatch(rf"{what}.*: \d+\.\d+ s", line)
    assert float(change.rpartition("=  ")[2]) > 0.01
    assert float(error.rpartition("=  ")[2]) <= 1e-4
    assert last == "=========== success ==========="


def test_three_processes_share_one_copy_of_the_weights(tmp_path: Path) -> None:
    done = run_example(SHARING, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model, handle, *reports, last = done.stdout.splitlines()
    assert model == "model: 100.7 MB"
    assert re.fullmatch(r"handle: \d+, for the processes \d+, \d+", handle)
    pattern = r"(\w+) (\d+): PSS (\d+\.\d) MB, USS (\d+\.\d) MB, result ([0-9a-f]{16})"
    found = [match for line in reports if (match := re.fullmatch(pattern, line))]
    assert [match[1] for match in found] == ["owner", "other", "other"]
    assert handle.endswith(f"{found[1][2]}, {found[2][2]}")
    assert len({match[5] for match in found}) == 1
    assert all(float(match[4]) < 61 for match in found[1:])
    assert last == "=========== success ==========="
    assert [*tmp_path.iterdir()] == []


def test_process_that_dies_is_reported_and_not_waited_for() -> None:
    command = [sys.executable, str(ROOT / "examples" / SHARING)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as owner:
        try:
            owned = psutil.Process(owner.pid)
            wait_until(lambda: len(owned.children()) == 2)
            victim, other = (child.pid for child in owned.children())
            psutil.Process(victim).send_signal(signal.SIGKILL)
            out, err = owner.communicate(timeout=40.0)
        finally:
            owner.kill()
    assert owner.returncode == 1
    assert err == f"error: process {victim} ended early with status -9\n"
    assert "success" not in out
    assert all_gone([victim, other])
