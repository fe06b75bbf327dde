"""``mcinfer run`` as a user runs it: interrupted, killed, twice at once, on a full disk."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import psutil
import pytest
from numpy.typing import NDArray
from onnx import helper, parser

from tests.command_line import COMMAND, FLOAT, files, save, save_double
from tests.process.scripts import Ended, Program
from tests.process.test_cli_cache import on_terminal
from tests.process.waiting import all_gone, wait_until

PRINTS_MEMORY = """
import re, sys
from mcinfer.cli import main
status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
sys.exit(status)
"""
ENDLESS = """
<ir_version: 8, opset_import: ["": 17]>
endless (float[batch] x) => (float[batch] y) <int64 most = {9223372036854775807}, bool yes = {1}> {
    y = Loop (most, yes, x) <body = body (int64 i, bool go, float[batch] a) => (bool on, float[batch] b) {
        on = Identity (go)
        b = Neg (a)
    }>
}
"""
WIDTH = 512
STEP = 32
COUNT = 80
ROWS = COUNT * STEP


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A model that needs some milliseconds for a request."""
    weights = np.random.default_rng(0).normal(0, WIDTH**-0.5, (WIDTH, WIDTH))
    names = ["x", *(f"y{i}" for i in range(20)), "y"]
    return save(
        tmp_path / "slow.onnx",
        [helper.make_node("MatMul", [before, "w"], [after]) for before, after in pairwise(names)],
        [("x", FLOAT, ["batch", WIDTH])],
        [("y", FLOAT, ["batch", WIDTH])],
        {"w": weights.astype(np.float32)},
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.npz"
    np.savez(path, x=np.random.default_rng(1).random((ROWS, WIDTH), np.float32))
    return path


def arguments(model: Path, source: Path, target: Path, batch: int = STEP) -> list[str]:
    where = ["--input", str(source), "--output", str(target), "--force"]
    return ["run", str(model), *where, "--devices", "1", "--batch", str(batch)]


def run(*words: object) -> Ended:
    with Program(COMMAND, *words) as program:
        return program.wait(50.0)


def partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def done(target: Path) -> int:
    """How many requests an unfinished run has saved."""
    try:
        return int.from_bytes(partial(target).read_bytes()[:8], "little")
    except FileNotFoundError:
        return 0


@contextmanager
def in_the_middle(words: list[str], target: Path, least: int = 1) -> Iterator[Program]:
    """A run that has saved at least so many requests, and is not at its end."""
    with Program(COMMAND, *words) as program:
        wait_until(lambda: done(target) >= least, 60.0)
        yield program


@pytest.mark.thorough
def test_killed_run_resumes_on_other_devices_with_the_same_result(
    slow: Path, rows: Path, tmp_path: Path
) -> None:
    whole, target = tmp_path / "whole.npz", tmp_path / "out.npz"
    scale = ("--scale", "1/3")
    ended, terminal = on_terminal(
        *arguments(slow, rows, whole), *scale, env={"TERM": "xterm", "COLUMNS": "120"}
    )
    assert (ended.status, ended.out) == (0, f"y: float32[{ROWS}, {WIDTH}]\n")
    plain = re.sub(r"\x1b\[[\d;]*m", "", terminal)
    assert re.search(rf"\d+ of {ROWS} rows \d:\d\d:\d\d left \(\d+\.\d rows/s\)", plain), plain
    assert terminal.endswith("\x1b[2K")  # the line is wiped

    words = [*arguments(slow, rows, target), *scale]
    with in_the_middle(words, target) as program:
        workers = [child.pid for child in psutil.Process(program.pid).children(recursive=True)]
        program.send_signal(signal.SIGKILL)
        assert program.wait().status == -signal.SIGKILL
    wait_until(lambda: all_gone(workers))
    assert not target.exists()
    killed_at = done(target)
    assert 1 <= killed_at < COUNT

    with in_the_middle([*words, "--devices", "2"], target, killed_at + 1) as program:
        program.interrupt()
        ended = program.wait()
    assert (ended.status, ended.out) == (130, "")
    interrupted_at = done(target)
    assert killed_at < interrupted_at < COUNT
    assert ended.err.splitlines() == [
        f"mcinfer: resuming at row {killed_at * STEP} of {ROWS}",
        f"mcinfer: {interrupted_at * STEP} of {ROWS} rows are kept; run the same command again to "
        "resume",
        "mcinfer: interrupted",
    ]
    assert not target.exists()

    ended = run(*words, "--devices", "inline")
    assert (ended.status, ended.out) == (0, f"y: float32[{ROWS}, {WIDTH}]\n")
    assert ended.err == f"mcinfer: resuming at row {interrupted_at * STEP} of {ROWS}\n"
    assert target.read_bytes() == whole.read_bytes()
    assert files(tmp_path) == ["in.npz", "out.npz", "slow.onnx", "whole.npz"]


@pytest.mark.thorough
def test_interrupted_or_timed_out_first_request_leaves_nothing(tmp_path: Path) -> None:
    model, source, target = tmp_path / "endless.onnx", tmp_path / "in.npy", tmp_path / "out.npz"
    onnx.save(parser.parse_model(ENDLESS), model)  # a model that ends could be done by then
    np.save(source, np.ones(4, np.float32))
    words = arguments(model, source, target)
    with Program(COMMAND, *words) as program:
        process = psutil.Process(program.pid)
        # Before that, Ctrl-C reaches the worker as well.
        wait_until(lambda: any(os.getpgid(w.pid) == w.pid for w in process.children()), 60.0)
        assert partial(target).exists()
        program.interrupt()
        ended = program.wait()
    assert (ended.status, ended.out, ended.err) == (130, "", "mcinfer: interrupted\n")
    ended = run(*words, "--timeout", "1")
    assert (ended.status, ended.out) == (1, "")
    assert " 1 s" in ended.err
    assert "--output" not in ended.err
    assert files(tmp_path) == ["endless.onnx", "in.npy"]


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of so many MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"this container may not mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("small_disk", [3], indirect=True)
def test_full_disk_is_predicted_and_the_run_resumed(small_disk: Path, tmp_path: Path) -> None:
    model = save_double(tmp_path)
    source, target = tmp_path / "in.npy", small_disk / "out.npz"
    x = np.random.default_rng(1).random((200_000, 3), np.float32)
    np.save(source, x)
    words = arguments(model, source, target, 10_000)
    ended = run(*words)
    assert (ended.status, ended.out) == (1, "")
    kept = re.fullmatch(
        r"mcinfer: --output: about \d\.\d MB more than are free will be needed\n"
        rf"mcinfer: --output: {partial(target)}: No space left on device; "
        r"(\d+) of 200000 rows are kept; run the same command again to resume\n",
        ended.err,
    )
    assert kept is not None, ended.err
    assert files(small_disk) == [".out.npz.partial"]
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    ended = run(*words)
    assert (ended.status, ended.err) == (0, f"mcinfer: resuming at row {kept[1]} of 200000\n")
    with np.load(target) as content:
        assert content["y"].tobytes() == (2 * x).tobytes()
    assert files(small_disk) == ["out.npz"]


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    model = save_double(tmp_path)
    source, target = tmp_path / "in", tmp_path / "out.npz"

    def peak(
        save_array: Callable[[IO[bytes], NDArray[Any]], None], count: int, *more: str
    ) -> float:
        """MB of memory at most, for that many rows of 12 bytes, as the model takes them."""
        x = np.zeros((count, 3), np.uint8 if more else np.float32)
        x[0] = x[-1] = 1
        with source.open("wb") as file:
            save_array(file, x)
        words = arguments(model, source, target, 160_000)
        with Program(PRINTS_MEMORY, *words, *more) as program:
            ended = program.wait(50.0)
        assert (ended.status, ended.err) == (0, "")
        with np.load(target) as content:
            assert content["y"].shape == (count, 3)
            assert content["y"][-1].tolist() == [2, 2, 2]
        return int(ended.out.splitlines()[-1]) / 1e3

    small = peak(np.save, 400_000)
    # Stored arrays are read like the one of an .npy file, from another place.
    for save_array in (np.save, lambda file, x: np.savez_compressed(file, x=x)):
        assert peak(save_array, 3_000_000) < small + 16  # of 36 MB, and as much to write
    assert peak(np.save, 3_000_000, "--cast", "float32", "--scale", "1") < small + 16
