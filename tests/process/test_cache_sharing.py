"""The cache of prepared models among real processes: one makes, all hold, and a crash leaves no entry."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from mcinfer.model_cache.cache import Cache, CacheUnusableError, Held, entry_key
from tests.process.scripts import Program
from tests.process.waiting import is_alive, wait_until

FACTS = {"model": "abc"}
KEY = entry_key(FACTS)

PREAMBLE = """
import logging, os, signal, subprocess, sys
from pathlib import Path
from mcinfer.model_cache.cache import Cache, entry_key
from tests.process.waiting import wait_until

place = Path(sys.argv[1])
cache = Cache(place / "cache", 2**30)
facts = {"model": "abc"}
key = entry_key(facts)

def say(*values):
    print(*values, flush=True)

def fill(folder, lock):
    with (place / "fills").open("a") as log:
        log.write("filled\\n")
    (folder / "weights.bin").write_bytes(b"weights")
"""

HOLD = """
held = cache.make(facts, fill, wait=10)
say((held.folder / "weights.bin").read_text())
signal.pause()
"""


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 2**30)


def fill(folder: Path, lock: int) -> None:
    assert lock >= 0
    (folder / "weights.bin").write_bytes(b"weights")


def make(cache: Cache, wait: float = 0) -> Held:
    return cache.make(FACTS, fill, wait=wait)


def kill(program: Program) -> None:
    program.send_signal(signal.SIGKILL)
    program.wait()


def test_processes_that_come_at_once_make_an_entry_once_and_hold_it_together(
    cache: Cache, tmp_path: Path
) -> None:
    make(cache).close()
    (cache.folder / KEY / "weights.bin").unlink()  # a damaged entry is made again
    text = """
whole = fill

def fill(folder, lock):
    wait_until(lambda: len([*place.glob("ready-*")]) == 3)
    whole(folder, lock)

(place / f"ready-{os.getpid()}").touch()
"""
    with ExitStack() as stack:
        programs = [
            stack.enter_context(Program(PREAMBLE + text + HOLD, tmp_path)) for _ in range(3)
        ]
        assert [program.line() for program in programs] == ["weights"] * 3
        assert (tmp_path / "fills").read_text() == "filled\n"
        assert cache.clear() == (0, 1)
        for program in programs[1:]:
            kill(program)
        assert cache.clear() == (0, 1)
        kill(programs[0])
    freed, in_use = cache.clear()
    assert (freed > 0, in_use) == (True, 0)
    assert os.listdir(cache.folder) == []


FILL_AND_HANG = """
def fill_and_hang(folder, lock):
    fill(folder, lock)
    say(folder.name)
    signal.pause()

cache.make(facts, fill_and_hang, wait=0)
"""


def test_maker_killed_while_it_fills_leaves_no_entry_and_one_that_waits_takes_over_at_once(
    cache: Cache, tmp_path: Path
) -> None:
    log = "logging.basicConfig(level='INFO', stream=sys.stdout)"
    with Program(PREAMBLE + FILL_AND_HANG, tmp_path) as first:
        left = {first.line(), f"{KEY}.lock"}
        with pytest.raises(CacheUnusableError, match="has been preparing it"):
            make(cache)
        assert cache.clear() == (0, 0)
        assert {*os.listdir(cache.folder)} == left
        with Program(PREAMBLE + log + HOLD, tmp_path) as second:
            assert "waiting for another process" in second.line()
            second.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(second.pid).status() == psutil.STATUS_STOPPED)
            kill(first)
            assert {*os.listdir(cache.folder)} == left
            assert cache.open(KEY) is None
            assert cache.entries() == []
            second.send_signal(signal.SIGCONT)
            assert second.line() == "weights"
            assert {*os.listdir(cache.folder)} == {KEY, f"{KEY}.lock"}


def test_child_that_outlives_the_maker_keeps_the_lock(cache: Cache, tmp_path: Path) -> None:
    text = """
def fill_in_a_child(folder, lock):
    child = subprocess.Popen(["sleep", "60"], pass_fds=[lock], stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    say(child.pid)
    signal.pause()

cache.make(facts, fill_in_a_child, wait=0)
"""
    with Program(PREAMBLE + text, tmp_path) as program:
        child = int(program.line())
        kill(program)
    try:
        with pytest.raises(CacheUnusableError, match="has been preparing it"):
            make(cache)
    finally:
        os.kill(child, signal.SIGKILL)
    make(cache, wait=10).close()
    wait_until(lambda: not is_alive(child))
