"""Tests of mcinfer/cli/cache.py: what ``cache list`` and ``cache clear`` print."""

import json
import mmap
import os
import re
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest

from mcinfer.cli import main
from mcinfer.model_cache.cache import Cache, Held
from tests.command_line import Capture, only_line


def made(cache: Cache, name: str, *, size: int = 0, fails: bool = False) -> Held:
    """An entry of that many bytes for a model of that name."""

    def fill(folder: Path, _lock: int) -> None:
        if fails:
            (folder / "failure.txt").write_text("no", encoding="utf-8")
        else:
            (folder / "about.json").write_text(json.dumps({"name": name}), encoding="utf-8")
            (folder / "weights.bin").write_bytes(bytes(size))

    facts = {"model": name, "engine": "onnxruntime 1.2"}
    return cache.make(facts, fill, wait=0)


def mapped(held: Held) -> mmap.mmap:
    with (held.folder / "weights.bin").open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def printed(capsys: Capture, command: str) -> list[str]:
    assert main(["cache", command]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


@pytest.fixture(autouse=True)
def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCINFER_CACHE_LIMIT", "50G")


def test_empty_cache_has_a_line_of_its_own(cache: Cache, capsys: Capture) -> None:
    assert printed(capsys, "list") == [
        f"the cache is empty: nothing of at most 53687.1 MB in {cache.folder}"
    ]
    assert printed(capsys, "clear") == ["freed 0.0 MB"]
    assert not cache.folder.exists()


def test_list_has_a_line_for_each_entry_and_the_total(cache: Cache, capsys: Capture) -> None:
    names = ("first.onnx", "a\nb\udc80\x1b[31mü.onnx")
    made(cache, names[0], size=3_000_000).close()
    with closing(made(cache, names[1], size=1_000_000)) as held, mapped(held):
        *lines, total = printed(capsys, "list")
    entries = cache.entries()
    for line, info, model in zip(lines, entries, (names[0], "a?b??[31mü.onnx"), strict=True):
        used = datetime.fromtimestamp(info.used_at).strftime("%Y-%m-%dT%H:%M")
        use = "in use" if info.key == held.key else "not in use"
        expected = [info.key[:12], f"{info.bytes / 1e6:.1f} MB", used, use, model]
        by = f", mapped by {os.getpid()}" if info.key == held.key else ""
        assert re.split("  +", line) == [*expected, f"onnxruntime 1.2{by}"]
    size = sum(info.bytes for info in entries) / 1e6
    assert total == f"2 entries, {size:.1f} MB of at most 53687.1 MB in {cache.folder}"
    made(cache, "bad.onnx", fails=True).close()
    assert any(line.endswith(", cannot be prepared") for line in printed(capsys, "list"))


def test_clear_leaves_entries_that_are_in_use(cache: Cache, capsys: Capture) -> None:
    made(cache, "first.onnx", size=3_000_000).close()
    with closing(made(cache, "second.onnx")) as held:
        expected = ["freed 3.0 MB; left because they are in use: 1 entry"]
        assert printed(capsys, "clear") == expected
        assert [info.key for info in cache.entries()] == [held.key]
    assert printed(capsys, "clear") == ["freed 0.0 MB"]
    assert cache.entries() == []


def test_cache_open_to_others_is_refused(cache: Cache, capsys: Capture) -> None:
    cache.folder.mkdir()
    cache.folder.chmod(0o777)
    for command in ("list", "clear"):
        assert main(["cache", command]) == 1
        line = only_line(capsys.readouterr().err)
        assert line.startswith(f"mcinfer: the cache at {cache.folder} cannot be used: others can")
        assert "mode 0777" in line
