"""Models that do harm, in a real pool.

`tests/test_preparation.py` gives the same models to the engine alone, with each way to load them.
"""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mcinfer import BuildError, EngineOptions, Limits, Master, PredictError
from tests.hostile_models import MALFORMED, OUTSIDE, SECRET, UNREADABLE, Hostile, bomb, run_bomb
from tests.process.waiting import pids

ROWS = {"x": np.zeros((2, 4), np.float32)}
MEMORY = 800_000_000
"""For a worker: ONNX Runtime itself needs 150 MB."""

IN_OPEN, IN_ACCESS = 0x20, 0x1
"""See inotify(7)."""


@contextmanager
def untouched(path: Path) -> Iterator[None]:
    """Fail if a process opens or reads the file meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert watch >= 0
    try:
        assert libc.inotify_add_watch(watch, os.fsencode(path), IN_OPEN | IN_ACCESS) >= 0
        yield
        with pytest.raises(BlockingIOError):
            os.read(watch, 4096)
    finally:
        os.close(watch)


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own; afterwards no draft is in it."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MCINFER_CACHE", str(folder))
    yield folder
    assert [*folder.glob("tmp-*")] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The model's folder, and a file beside it that it has no business with."""
    (tmp_path / "secret").write_bytes(np.full(4, SECRET, np.float32).tobytes())
    path = tmp_path / "model"
    path.mkdir()
    return path


def refusal(model: Path, options: EngineOptions) -> str:
    """The error of a pool that does not start."""
    master = Master(model, 1, options=options, limits=Limits(worker_memory_bytes=MEMORY))
    with pytest.raises(BuildError) as caught:
        master.start()
    master.close()
    text = str(caught.value)
    assert text.startswith("worker 0 (cpu:0, pid ")
    assert len(text) < 5000
    return text


def test_external_data_outside_of_the_folder_is_refused_and_not_opened(folder: Path) -> None:
    hostile = OUTSIDE[0]
    model = hostile.write(folder)
    with untouched(folder.parent / "secret"):
        text = refusal(model, EngineOptions(variable_weights=("w",), prepare="always"))
    assert re.search(hostile.error, text), text


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(case, marks=[pytest.mark.thorough] * (number > 1))
        for number, case in enumerate([UNREADABLE[0], *MALFORMED])
    ],
    ids=lambda case: case.name,
)
def test_model_that_is_none_is_refused_by_its_worker(hostile: Hostile, folder: Path) -> None:
    text = refusal(hostile.write(folder), EngineOptions())
    assert re.search(hostile.error, text), text


def test_constant_that_grows_without_end_ends_at_the_workers_memory_limit(
    folder: Path,
) -> None:
    master = Master(
        save(folder / "model.onnx", bomb()),
        1,
        options=EngineOptions(prepare="never"),
        limits=Limits(worker_memory_bytes=MEMORY),
    )
    # A runtime may put off to the run what it cannot compute when it loads.
    with pytest.raises((BuildError, PredictError)) as caught, master:
        master.predict(ROWS)
    assert "worker 0 (cpu:0, pid " in str(caught.value)
    assert f"may have {MEMORY} bytes" in str(caught.value)
    assert "Limits.worker_memory_bytes" in str(caught.value)


def test_run_that_wants_more_than_there_is_fails_alone(folder: Path) -> None:
    limits = Limits(worker_memory_bytes=MEMORY)
    with Master(save(folder / "model.onnx", run_bomb()), 1, limits=limits) as master:
        before = pids(master)
        with pytest.raises(PredictError, match=r"worker 0 \(cpu:0, pid") as caught:
            master.predict({"x": np.full((2, 4), 2.0**40, np.float32)})
        assert f"may have {MEMORY} bytes" in str(caught.value)
        few = np.full((2, 4), 100.0, np.float32)
        np.testing.assert_array_equal(master.predict({"x": few})["y"], few)
        assert pids(master) == before
