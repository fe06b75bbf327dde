"""Models to serve, and a check of what tests leave behind."""

import gc
import os
import shutil
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcinfer import Master
from tests.process.models import FakeModel, SharedMaster, fake_master, write_fake_model
from tests.process.waiting import is_alive, wait_until

_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session", autouse=True)
def runtime_dir() -> Iterator[Path]:
    """A place for runtime folders that no other test run on this machine shares.

    Not pytest's own: the path of a socket may have no more than 107 bytes.
    """
    path = Path(tempfile.mkdtemp(prefix="mcp-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(path))
        yield path
    shutil.rmtree(path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember that a test failed: its traceback then holds what the test had."""
    report = yield
    if call.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest, runtime_dir: Path) -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a descriptor or a runtime folder behind.

    Tests that share processes are checked together, by `checked_together`: what they hold grows with use.
    """
    if "checked_together" in request.fixturenames:
        yield
        request.node.funcargs.clear()  # those of the module's last test would hold what is shared
        return
    before = _possessions(runtime_dir)
    yield
    if not request.node.stash.get(_FAILED, False):
        _check_nothing_is_left(runtime_dir, before)


@pytest.fixture(scope="module")
def checked_together(request: pytest.FixtureRequest, runtime_dir: Path) -> Iterator[ExitStack]:
    """Closes what tests of a module share, after the last of them, and checks what is left."""
    failed, before = request.session.testsfailed, _possessions(runtime_dir)
    with ExitStack() as stack:
        yield stack
    if request.session.testsfailed == failed:
        _check_nothing_is_left(runtime_dir, before)


@pytest.fixture(scope="module")
def shared_master(
    checked_together: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> SharedMaster:
    """Starts masters of the engine "fake" for all tests of a module."""

    def start(
        workers: int | list[int], *, acts: dict[str, Any] | None = None, **options: Any
    ) -> Master:
        path = tmp_path_factory.mktemp("shared") / "model.json"
        write_fake_model(path, **(acts or {}))
        return checked_together.enter_context(fake_master(path, workers, **options))

    return start


def _check_nothing_is_left(runtime_dir: Path, before: set[str]) -> None:
    def left() -> list[str]:
        gc.collect()
        return sorted(_possessions(runtime_dir) - before)

    try:
        wait_until(lambda: not left(), timeout=20.0)
    except AssertionError:
        pytest.fail(f"left behind: {left()}")


def _possessions(runtime_dir: Path) -> set[str]:
    """The processes, threads, descriptors and folders of this process, in words."""
    found = {f"folder {path}" for path in runtime_dir.glob("mcinfer-*")}
    for process in psutil.Process().children(recursive=True):
        found.add(f"process {process.pid}{'' if is_alive(process.pid) else ' (not waited for)'}")
    known = {thread.native_id for thread in threading.enumerate()}
    program = _read(Path("/proc/self/comm"))
    for task in Path("/proc/self/task").iterdir():
        # Threads of ZeroMQ are not of Python, but have a name. pytest has a thread for each time-out.
        name = _read(task / "comm")
        if int(task.name) in known or name != program:
            found.add(f"thread {task.name} {name}")
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"descriptor {entry.name} of {os.readlink(entry)}")
        except OSError:
            continue  # that of the listing itself
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return "?"


@pytest.fixture
def fake_model(tmp_path: Path) -> FakeModel:
    """Writes a model of the engine "fake"; by default y = 2x + 1 on float32[batch, 4]."""
    count = 0

    def write(**content: Any) -> Path:
        nonlocal count
        count += 1
        return write_fake_model(tmp_path / f"model{count}.json", **content)

    return write
