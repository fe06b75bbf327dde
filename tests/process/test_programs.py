"""Whole programs of a user's: how they start, are interrupted, end and die."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.process.models import FakeModel
from tests.process.scripts import PREAMBLE, ROOT, Program
from tests.process.waiting import all_gone, is_alive, wait_until

ASK = """
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
    say_pids(master)
    say(master.predict(X)["y"].sum())
"""
ANSWER = "48.0"
"""Printed by ASK: 16 times 2 * 1 + 1."""


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("master.submit({'x': -X['x']})", id="with a run that goes on"),
        pytest.param("del master", id="garbage"),
    ],
)
def test_program_that_ends_without_close_is_silent_and_leaves_nothing(
    fake_model: FakeModel, runtime_dir: Path, ending: str
) -> None:
    text = f"""
master = mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never").start()
assert master.predict(X)["y"].sum() == {ANSWER}
say_pids(master)
{ending}
"""
    with Program(PREAMBLE + text, fake_model(when={"-1": "sleep:60"})) as program:
        workers = program.pids()
        ended = program.wait()
        assert (ended.status, ended.out, ended.err) == (0, "", "")
        assert all_gone(workers)
        assert [*runtime_dir.iterdir()] == []


def test_worker_that_writes_into_a_full_pipe_waits_for_its_reader(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    text = """
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
    for _ in range(5):
        master.predict(X, timeout=40.0)
        open(sys.argv[2], "a").write("answered ")
"""
    line, answered = "x" * 50_000, tmp_path / "answered"  # a pipe takes 64 KiB
    with Program(PREAMBLE + text, fake_model(run=f"print:{line}"), answered) as program:
        wait_until(answered.exists)
        ended = program.wait()
    assert (ended.status, ended.out, ended.err) == (0, f"{line}\n" * 5, "")
    assert answered.read_text() == "answered " * 5


# What becomes of workers whose master dies.


def test_workers_of_a_dead_master_end_though_its_child_lives_on(
    fake_model: FakeModel, runtime_dir: Path
) -> None:
    """A child that the user forked holds the master's end of every lifeline open."""
    text = """
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
    say_pids(master)
    child = os.fork()
    if not child:
        os.close(1), os.close(2)
        time.sleep(60)
        os._exit(0)
    say("pids", child)
    time.sleep(60)
"""
    with Program(PREAMBLE + text, fake_model()) as program:
        workers, (child,) = program.pids(), program.pids()
        program.send_signal(signal.SIGKILL)
        try:
            wait_until(lambda: all_gone(workers))
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)
    assert [*runtime_dir.iterdir()] == []


# How a program may be written.


def test_script_may_come_from_standard_input_and_needs_no_main_guard(fake_model: FakeModel) -> None:
    with Program(PREAMBLE + ASK, fake_model(), stdin=True) as program:
        assert len(program.pids()) == 1
        assert program.line() == ANSWER
        ended = program.wait()
        assert (ended.status, ended.err) == (0, "")


def test_worker_is_started_again_as_the_first_was_wherever_the_user_has_gone(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    engines = tmp_path / "added" / "mcinfer" / "engines"
    shutil.copytree(ROOT / "mcinfer", engines.parent)
    fake = (engines / "_fake.py").read_text(encoding="utf-8")
    fake = "import beside\n" + fake.replace('("fake",)', "beside.SEEN")
    (engines / "_fake.py").write_text(fake, encoding="utf-8")
    (tmp_path / "added" / "beside.py").write_text(
        "import os\nSEEN = (os.getcwd(), os.environ['PYTHONPATH'])\n", encoding="utf-8"
    )
    (tmp_path / "here").mkdir()
    text = """
import os, signal, sys, time
sys.path[:0] = ["", "../added"]
import mcinfer
master = mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never").start()
print(*master.statistics().workers[0].providers)
for restarts, leave in enumerate([lambda: os.chdir("/"), lambda: os.rmdir(sys.argv[2])], 1):
    leave()
    os.kill(master.statistics().workers[0].pid, signal.SIGKILL)
    while master.statistics().workers[0].restarts < restarts:
        time.sleep(0.001)
    master.wait_ready(20.0)
    print(*master.statistics().workers[0].providers)
"""
    env = {"PYTHONPATH": f"../added{os.pathsep}{ROOT}"}
    here = tmp_path / "here"
    with Program(text, fake_model(), here, cwd=here, env=env) as program:
        ended = program.wait()
    assert ended.status == 0, ended.err
    path = f"{tmp_path / 'added'}{os.pathsep}{ROOT}"
    assert ended.out.splitlines() == [f"{here} {path}", f"{here} {path}", f"/ {path}"]


@pytest.mark.skipif(
    (3, 13) <= sys.version_info < (3, 13, 3),
    reason="imports fail in a folder that is gone: https://github.com/python/cpython/issues/130932",
)
def test_master_in_a_folder_that_is_gone_serves_a_model_of_absolute_path(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    text = """
os.rmdir(os.getcwd())
try:
    mcinfer.Master("model.json", 1, engine="fake")
except mcinfer.InvalidInputError as exc:
    say(exc)
"""
    (tmp_path / "here").mkdir()
    with Program(PREAMBLE + text + ASK, fake_model(), cwd=tmp_path / "here") as program:
        assert "'model.json'" in (said := program.line())
        assert "working folder is gone" in said
        assert len(program.pids()) == 1
        assert program.line() == ANSWER
        assert program.wait().status == 0


def test_module_that_shadows_the_standard_library_in_the_working_directory_is_not_run(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('shadow')\n", encoding="utf-8")
    with Program(
        PREAMBLE + ASK, fake_model(), cwd=tmp_path, command=(sys.executable, "-P")
    ) as program:
        assert len(program.pids()) == 1
        assert program.line() == ANSWER
        assert program.wait().status == 0
