"""`make test-gpu` and `make bench-gpu`, with programs in the place of the driver's and of Python."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gpu.conftest import HERE

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder that is the PATH: with make and what it starts, and without a driver."""
    for name in ("make", "sh", "test", "echo", "touch"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    return tmp_path


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    path.chmod(0o755)
    return path


def make(path: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=HERE.parents[1],
        env={**os.environ, "PATH": str(path), "MAKEFLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=50,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_without_a_card_one_line_says_so_and_it_fails_unless_that_is_fine(
    target: str, path: Path
) -> None:
    status, said = make(path, target)
    assert status != 0
    assert said.count("\n") == 1
    assert said.startswith(f"{target}: nvidia-smi finds no card")
    assert make(path, target, "NO_CARD=skip") == (0, said)
    program(path, "nvidia-smi", "echo No devices; exit 6")
    assert make(path, target, "NO_CARD=skip") == (0, said)


def test_python_that_has_all_is_used_as_it_is_and_else_is_the_base_of_an_environment(
    path: Path,
) -> None:
    program(path, "nvidia-smi", "echo GPU 0: H200")
    ready = program(path, "ready", '[ "$1" = -c ] || echo "$@"')
    status, said = make(path, "test-gpu", f"PYTHON={ready}")
    assert status == 0
    assert said.startswith("-m pytest -c tests/gpu/on_card.ini ")
    benchmark = "benchmarks/gpu.py --write docs/gpu.md\n"
    assert make(path, "bench-gpu", f"PYTHON={ready}") == (0, benchmark)
    bare = program(path, "bare", '[ "$1" = -c ] && exit 1; echo "$@"; exit 1')
    status, said = make(path, "test-gpu", "--always-make", f"PYTHON={bare}")
    assert status != 0  # the environment is not made
    assert "-m venv .venv-gpu" in said
