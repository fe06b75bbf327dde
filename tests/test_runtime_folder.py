"""Tests of mcinfer/runtime_folder.py: where a master's socket lies, and what becomes of it."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcinfer.runtime_folder import RuntimeFolder
from mcinfer.transport import Dealer, Router

ROOT = Path(__file__).parents[1]
MOST_PATH_BYTES = 107  # unix(7): sun_path, without the zero at its end

MAKE_A_FOLDER = """
import sys
from pathlib import Path
from mcinfer.runtime_folder import RuntimeFolder
if len(sys.argv) > 1:
    Path("/proc/self/comm").write_text(sys.argv[1])  # the name in /proc/PID/stat
print(RuntimeFolder().endpoint(0), flush=True)
sys.stdin.read()
"""


def path_of(folder: RuntimeFolder) -> Path:
    return Path(folder.endpoint(0).removeprefix("ipc://")).parent


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty place of first choice, with a path as short as those on a real machine."""
    with tempfile.TemporaryDirectory(prefix="rf") as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        yield Path(place)


@contextmanager
def another_master(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process with a folder of its own, alive until the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKE_A_FOLDER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        yield process, Path(endpoint.removeprefix("ipc://")).parent
        process.kill()


def test_folder_is_for_its_owner_only_and_goes_with_what_is_in_it(parent: Path) -> None:
    folder = RuntimeFolder()
    path = path_of(folder)
    assert path.parent == parent
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert [*path.iterdir()] == []
    (path / "s").touch()
    (path / "more").mkdir()
    folder.remove()
    assert [*parent.iterdir()] == []
    folder.remove()


def test_folders_of_one_process_are_different_and_leave_each_other_alone(parent: Path) -> None:
    folders = [RuntimeFolder() for _ in range(3)]
    assert len({folder.endpoint(0) for folder in folders}) == 3
    assert len([*parent.iterdir()]) == 3
    for folder in folders:
        folder.remove()


def test_socket_can_be_bound_and_reached_at_the_endpoint() -> None:
    folder = RuntimeFolder()
    router = Router()
    router.open_door(folder.endpoint(3), os.getpid())
    dealer = Dealer(folder.endpoint(3))
    assert path_of(folder).joinpath("s3").is_socket()
    dealer.close()
    router.close()
    folder.remove()


# Where it lies.


def test_place_that_does_not_exist_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, parent: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent / "none"))
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    folder = RuntimeFolder()
    assert path_of(folder).parent == parent
    folder.remove()


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_runtime_directory_the_temporary_one_serves(
    monkeypatch: pytest.MonkeyPatch, parent: Path, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    folder = RuntimeFolder()
    assert path_of(folder).parent == parent
    folder.remove()


@pytest.mark.parametrize("more", [0, 1])
def test_place_whose_paths_are_too_long_for_a_socket_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, parent: Path, more: int
) -> None:
    probe = RuntimeFolder()
    room = MOST_PATH_BYTES - len(os.fsencode(probe.endpoint(99_999_999).removeprefix("ipc://")))
    probe.remove()
    place = parent / ("d" * (room - 1 + more))
    place.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    folder = RuntimeFolder()
    assert path_of(folder).parent == (place if more == 0 else parent)
    router = Router()
    router.open_door(
        folder.endpoint(99_999_999), os.getpid()
    )  # ZeroMQ agrees that it is short enough
    router.close()
    folder.remove()


def test_bytes_count_and_not_characters(monkeypatch: pytest.MonkeyPatch, parent: Path) -> None:
    place = parent / ("ü" * 40)
    place.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    folder = RuntimeFolder()
    assert path_of(folder).parent == parent
    folder.remove()


def test_no_place_at_all_is_an_os_error(monkeypatch: pytest.MonkeyPatch, parent: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        RuntimeFolder()
    assert [*parent.iterdir()] == []


# Sweeping.


def test_folder_of_a_master_that_was_killed_is_swept_by_the_next() -> None:
    with another_master() as (process, path):
        (path / "s").touch()
        RuntimeFolder().remove()
        assert path.is_dir()  # its master lives
        process.kill()
        process.wait()
        RuntimeFolder().remove()
        assert not path.exists()


def test_masters_name_does_not_deceive_the_sweep() -> None:
    with another_master(") S 1 (x y)") as (process, path):
        assert ") S 1" in Path(f"/proc/{process.pid}/stat").read_text()
        RuntimeFolder().remove()
        assert path.is_dir()


def test_folder_of_an_earlier_process_of_the_same_number_is_swept(parent: Path) -> None:
    mine = RuntimeFolder()
    prefix, namespace, pid, start, _ = path_of(mine).name.split("-")
    old = parent / "-".join([prefix, namespace, pid, str(int(start) - 1), "aaaaaa"])
    old.mkdir()
    RuntimeFolder().remove()
    assert not old.exists()
    assert path_of(mine).is_dir()
    mine.remove()


def test_nothing_else_is_swept(parent: Path) -> None:
    probe = RuntimeFolder()
    prefix, namespace, pid, start, _ = path_of(probe).name.split("-")
    probe.remove()
    dead = str(int(start) - 1)
    elsewhere = f"{int(namespace, 16) + 1:x}"
    others = [
        parent / name
        for name in (
            "mcinfer-",
            "mcinfer-cache",
            "mcinfer-1-2",
            "mcinfer-x-y-z",
            f"{prefix}-{elsewhere}-{pid}-{dead}-aaaaaa",  # in another container, on the same /tmp
            f"x{prefix}-{namespace}-{pid}-{dead}-aaaaaa",
        )
    ]
    for other in others:
        other.mkdir()
    file = parent / f"{prefix}-{namespace}-{pid}-{dead}-bbbbbb"
    file.touch()
    target = parent / "precious"
    target.mkdir()
    (target / "data").touch()
    link = parent / f"{prefix}-{namespace}-{pid}-{dead}-cccccc"
    link.symlink_to(target)
    RuntimeFolder().remove()
    assert all(path.exists() for path in (*others, file, link, target / "data"))


def test_folder_of_another_user_is_not_swept(parent: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    probe = RuntimeFolder()
    prefix, namespace, pid, start, _ = path_of(probe).name.split("-")
    probe.remove()
    other = parent / f"{prefix}-{namespace}-{pid}-{int(start) - 1}-aaaaaa"
    other.mkdir()
    os.chown(other, 12345, 12345)
    RuntimeFolder().remove()
    assert other.is_dir()
