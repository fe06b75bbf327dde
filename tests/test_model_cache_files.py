"""Tests of mcinfer/model_cache/files.py and texts.py: what is opened, how much is read, what is quoted."""

import os
import socket
from pathlib import Path

import pytest

from mcinfer.engines import model_identity
from mcinfer.errors import BuildError
from mcinfer.model_cache.files import check_regular, chunks, open_regular
from mcinfer.model_cache.texts import quotable, shortened


def test_no_more_is_read_than_a_file_had_at_first(tmp_path: Path) -> None:
    path = tmp_path / "growing"
    path.write_bytes(bytes(range(200)) * 10_000)
    with open_regular(path) as (descriptor, info), path.open("ab") as file:
        read = 0
        for part in chunks(descriptor, info.st_size):
            file.write(bytes(1 << 20))
            file.flush()
            read += len(part)
    assert read == info.st_size < path.stat().st_size


def test_file_that_was_cut_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(b"abc")
    with open_regular(path) as (descriptor, _):
        assert b"".join(bytes(part) for part in chunks(descriptor, 1 << 40)) == b"abc"
        assert [*chunks(descriptor, 0)] == []


def test_what_is_no_regular_file_is_named_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name, kind in [
            ("", "a folder"),
            ("pipe", "a pipe"),
            ("link", "a device"),
            ("socket", "a socket"),
        ]:
            path = tmp_path / name
            with pytest.raises(BuildError, match=f"{path}: got {kind}, expected a regular file"):
                check_regular(path)
            assert model_identity(str(path)) == ""
    with pytest.raises(BuildError, match="null byte"):
        check_regular("a\0b")
    with pytest.raises(FileNotFoundError):
        check_regular(tmp_path / "none")
    assert model_identity("a\0b") == ""


def test_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shortened("short") == "short"
    text = shortened("begin" + "x" * 10_000_000 + "end")
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "[9996008 characters left out]" in text
    assert len(text) < 5000


def test_cause_that_is_too_long_is_left_out() -> None:
    short, long = ValueError("no"), ValueError("no" * 10_000)
    assert quotable(short) is short
    assert quotable(long) is None
