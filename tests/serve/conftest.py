"""Servers that tests share, and a check of what tests leave behind. `make test-serve`."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.process.models import write_fake_model
from tests.process.waiting import wait_until
from tests.serve import models
from tests.serve.servers import Server

Serve = Callable[..., Server]
"""The fixture `serve`: starts a server that ends with the test."""

Held = Callable[..., Path]
"""The fixture `fake_model`: writes a model of the engine "fake"."""


@pytest.fixture(scope="session", autouse=True)
def folders() -> Iterator[Path]:
    """Where servers keep files. Short, as the paths of sockets must be."""
    path = Path(tempfile.mkdtemp(prefix="mcv-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(path))
        patch.setenv("MCINFER_CACHE", str(path / "cache"))
        patch.setenv("ORT_DISABLE_TELEMETRY", "1")
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        resource_tracker.ensure_running()  # a process that stays; clients' shared memory needs it
        yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def _nothing_is_left(folders: Path, server: Server) -> Iterator[None]:  # noqa: ARG001 its processes stay
    """Fail a test that leaves a process, an object in shared memory or a runtime folder behind."""
    before = _possessions(folders)
    yield
    left: list[str] = []

    def none_left() -> bool:
        left[:] = sorted(_possessions(folders) - before)
        return not left

    try:
        wait_until(none_left)
    except AssertionError:
        pytest.fail(f"left behind: {left}")


def _possessions(folders: Path) -> set[str]:
    objects = {str(path) for path in models.SHARED_MEMORY.glob(f"{models.OBJECTS}*")}
    processes = {f"process {process.pid}" for process in psutil.Process().children()}
    return objects | processes | {str(path) for path in folders.glob("mcinfer-*")}


@pytest.fixture(scope="session")
def server(folders: Path) -> Iterator[Server]:
    """A server of the models of `models.write`, for tests that leave it as it was."""
    (folders / "models").mkdir()
    files = models.write(folders / "models")
    with Server(*files, "--devices", 2, "--client-shared-memory-tcp") as running:
        yield running


@pytest.fixture
def serve(server: Server) -> Iterator[Serve]:  # noqa: ARG001 it began before
    """Starts servers, which end after the test."""
    running: list[Server] = []

    def start(*arguments: object, **how: Any) -> Server:
        running.append(Server(*arguments, **how))
        return running[-1]

    yield start
    for one in running:
        one.__exit__()


@pytest.fixture
def fake_model(tmp_path: Path) -> Held:
    """Writes a model of the engine "fake", y = 2x + 1 on float32[batch, 4], with acts of its runs."""

    def write(**content: Any) -> Path:
        return write_fake_model(tmp_path / "fake.json", **content)

    return write
