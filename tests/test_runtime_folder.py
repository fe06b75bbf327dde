"""Tests of mcinfer/runtime/folder.py: where a master's socket is made."""

import os
import socket
from pathlib import Path

import pytest

from mcinfer.runtime.folder import RuntimeFolder


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_socket_is_reached_by_the_handle_alone(place: Path) -> None:
    with RuntimeFolder() as folder:
        assert folder.place == place
        listener, handle = folder.listen()
        (path,) = place.iterdir()
        assert [*path.iterdir()] == []
    assert [*place.iterdir()] == []
    assert not os.get_inheritable(handle)
    with listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(f"/proc/self/fd/{handle}")
        connection, _ = listener.accept()
        connection.close()
    os.close(handle)


def test_socket_is_made_in_the_folder_that_was_looked_at_though_it_was_swapped(place: Path) -> None:
    with RuntimeFolder() as folder:
        (path,) = place.iterdir()
        path.rename(place / "moved")
        path.mkdir()
        listener, handle = folder.listen()
        assert "moved" in os.readlink(f"/proc/self/fd/{handle}")
        listener.close()
        os.close(handle)
