"""``mcinfer cache`` as a user runs it: on a terminal or not, until its end or until Ctrl-C."""

import os
import pty
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from onnx import helper

from mcinfer.cli import main
from mcinfer.model_cache.cache import Cache
from tests.command_line import COMMAND, FLOAT, save
from tests.process.scripts import Ended, Program
from tests.process.waiting import all_gone, wait_until

ON_TERMINAL = """
import os, sys
os.dup2(os.open(sys.argv.pop(1), os.O_RDWR | os.O_NOCTTY), 2)
"""
WIDTH = 1024


def stack(path: Path, layers: int) -> Path:
    """Save a model of so many matrices of 4 MB each."""
    rng = np.random.default_rng(0)
    names = ["x", *(f"y{i}" for i in range(layers))]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(layers)]
    weights = dict.fromkeys(
        (f"w{i}" for i in range(layers)), rng.random((WIDTH, WIDTH), np.float32)
    )
    shape: list[int | str] = ["batch", WIDTH]
    return save(path, nodes, [("x", FLOAT, shape)], [(names[-1], FLOAT, shape)], weights)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 100 MB, which takes about a second to prepare."""
    return stack(tmp_path_factory.mktemp("large") / "model.onnx", 24)


@contextmanager
def program_on_terminal(
    *arguments: object, text: str = COMMAND, env: Mapping[str, str] | None = None
) -> Iterator[tuple[Program, bytearray]]:
    """A program whose standard error is a terminal, and the bytes that the terminal has received.

    The terminal has received all of it when the context ends.
    """
    ours, theirs = pty.openpty()
    got = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 4096):
                got.extend(data)
        except OSError:  # EIO: the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        place = os.ttyname(theirs)
        with Program(ON_TERMINAL + text, place, *arguments, env=env) as program:
            yield program, got
    finally:
        os.close(theirs)
        reader.join(10.0)
        os.close(ours)
    assert not reader.is_alive()


def on_terminal(
    *arguments: object, text: str = COMMAND, env: Mapping[str, str] | None = None
) -> tuple[Ended, str]:
    """Run a program to its end: how it ended, and the text on its terminal."""
    with program_on_terminal(*arguments, text=text, env=env) as (program, got):
        ended = program.wait()
    return ended, got.decode()


@pytest.mark.thorough
def test_prepared_model_is_what_workers_use_then_and_a_terminal_gets_a_bar_meanwhile(
    cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = stack(tmp_path / "[red]model.onnx", 5)
    done, terminal = on_terminal("cache", "prepare", model, env={"TERM": "xterm"})
    assert done.status == 0
    assert "preparing [red]model.onnx" in terminal
    assert re.search(r"\d+\.\d MB written", terminal)
    assert "%" not in terminal
    assert terminal.endswith("\x1b[2K")  # the line is wiped
    [info] = cache.entries()
    entry = re.escape(f"{cache.folder / info.key}: {info.bytes / 1e6:.1f} MB")
    assert re.fullmatch(rf"{entry}, prepared in \d+\.\d s\n", done.out)
    assert main(["cache", "prepare", str(model)]) == 0
    again = capsys.readouterr()
    assert again.err == ""
    assert re.fullmatch(rf"{entry}, was there already, prepared in \d+\.\d s\n", again.out)
    assert main(["inspect", str(model)]) == 0
    assert [each.key for each in cache.entries()] == [info.key]


@pytest.mark.parametrize(
    ("command", "number", "status", "text"),
    [
        (["cache", "prepare"], signal.SIGINT, 130, "interrupted"),
        pytest.param(*(["inspect"], signal.SIGTERM, 143, "terminated"), marks=pytest.mark.thorough),
    ],
)
def test_ended_preparation_leaves_no_child_no_entry_and_no_folder(
    cache: Cache,
    large: Path,
    runtime_dir: Path,
    command: list[str],
    number: signal.Signals,
    status: int,
    text: str,
) -> None:
    before = {*runtime_dir.rglob("*")}
    with Program(COMMAND, *command, large) as program:
        process = psutil.Process(program.pid)
        wait_until(lambda: any(cache.folder.glob("tmp-*")))  # which a child is about to fill
        children = [child.pid for child in process.children(recursive=True)]
        if number == signal.SIGINT:
            program.interrupt()
        else:
            program.send_signal(number)
        done = program.wait()
    assert (done.status, done.out, done.err) == (status, "", f"mcinfer: {text}\n")
    wait_until(lambda: all_gone(children))
    assert {*runtime_dir.rglob("*")} == before
    assert cache.entries() == []
    assert cache.clear() == (0, 0)
    assert [*cache.folder.iterdir()] == [cache.folder / "sources"]


WORK = """
from mcinfer.cli.progress import showing_work

with showing_work("working", 4, "turns") as work:
    work.show(3, "on [this]")
"""
COLOUR = re.compile(r"\x1b\[[\d;]*[1-9]\d*m")


@pytest.mark.thorough
@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}], ids=["coloured", "plain"])
def test_progress_bar_is_drawn_and_removed_at_the_end(variables: dict[str, str]) -> None:
    done, terminal = on_terminal(text=WORK, env={"TERM": "xterm", **variables})
    assert (done.status, done.err) == (0, "")
    assert "3 of 4 turns" in re.sub(r"\x1b\[[\d;]*m", "", terminal)
    assert "on [this]" in terminal
    assert bool(COLOUR.search(terminal)) is not bool(variables)
    assert terminal.endswith("\x1b[2K")
    done, terminal = on_terminal(text=WORK, env={"TERM": "dumb"})
    assert (done.status, terminal) == (0, "")  # it cannot be drawn on
