"""Tests of mcinfer/runtime/folder.py: where a master's socket is made, and who may have a part in that."""

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcinfer.runtime.folder import RuntimeFolder

OTHER_USER = 12345


@pytest.fixture(autouse=True)
def first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty place of first choice; the second one is `second`."""
    place = tmp_path / "first"
    place.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    return place


@pytest.fixture(autouse=True)
def second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "second"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    before = len(os.listdir("/proc/self/fd"))
    yield place
    assert len(os.listdir("/proc/self/fd")) == before


def chosen() -> Path:
    with RuntimeFolder() as folder:
        return folder.place


def test_folder_is_for_its_owner_only_and_goes_at_its_end(first: Path) -> None:
    with RuntimeFolder() as folder:
        (path,) = first.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert os.path.samestat(path.stat(), os.fstat(folder.fd))
        assert not os.get_inheritable(folder.fd)
        with RuntimeFolder():
            assert len([*first.iterdir()]) == 2
    assert [*first.iterdir()] == []


def test_socket_is_reached_by_the_handle_alone(first: Path) -> None:
    with RuntimeFolder() as folder:
        listener, handle = folder.listen()
        (path,) = first.iterdir()
        assert [*path.iterdir()] == []
    assert [*first.iterdir()] == []
    assert not os.get_inheritable(handle)
    with listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(f"/proc/self/fd/{handle}")
        connection, _ = listener.accept()
        connection.close()
    os.close(handle)


# Where it lies.


@pytest.mark.parametrize(
    ("mode", "safe"),
    [(0o2775, False), (0o770, False), (0o702, False), (0o755, True), (0o1777, True)],
)
def test_place_where_others_can_rename_what_is_mine_is_passed_over(
    first: Path, second: Path, mode: int, safe: bool
) -> None:
    first.chmod(mode)
    assert chosen() == (first if safe else second)


def test_place_of_another_user_is_passed_over(first: Path, second: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(first, OTHER_USER, OTHER_USER)
    assert chosen() == second


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_runtime_directory_the_temporary_one_serves(
    monkeypatch: pytest.MonkeyPatch, second: Path, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert chosen() == second


def test_no_place_at_all_is_an_os_error_that_says_of_each_why(
    monkeypatch: pytest.MonkeyPatch, first: Path, second: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    second.chmod(0o2775)
    with pytest.raises(PermissionError) as caught:
        RuntimeFolder()
    text = str(caught.value)
    assert f"{first}: Permission denied; {second}: other users can change it (user" in text
    assert "mode 2775" in text
    assert [*first.iterdir()] == []


# What was made.


def test_folder_that_was_swapped_for_a_link_is_not_used(
    monkeypatch: pytest.MonkeyPatch, second: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    mkdir = os.mkdir

    def swap(name: str, mode: int, *, dir_fd: int) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        if not [*second.iterdir()]:
            os.rmdir(name, dir_fd=dir_fd)
            os.symlink(theirs, name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", swap)
    assert chosen() == second


@pytest.mark.parametrize("fault", ["mode", "owner"])
def test_folder_that_is_not_closed_to_others_is_not_used(
    monkeypatch: pytest.MonkeyPatch, first: Path, second: Path, fault: str
) -> None:
    if fault == "owner" and os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    mkdir = os.mkdir

    def spoil(name: str, mode: int, *, dir_fd: int) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        if [*first.iterdir()]:
            if fault == "mode":
                os.chmod(name, 0o710, dir_fd=dir_fd)  # noqa: S103 what must not be
            else:
                os.chown(name, OTHER_USER, OTHER_USER, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", spoil)
    assert chosen() == second
    assert [*first.iterdir()] == []
    assert [*second.iterdir()] == []


def test_socket_is_made_in_the_folder_that_was_looked_at_though_it_was_swapped(first: Path) -> None:
    with RuntimeFolder() as folder:
        (path,) = first.iterdir()
        path.rename(first / "moved")
        path.mkdir()
        listener, handle = folder.listen()
        assert "moved" in os.readlink(f"/proc/self/fd/{handle}")
        listener.close()
        os.close(handle)
    (first / "moved").rmdir()
