"""Tests of mcinfer/cli/cache.py and progress.py: what they say of prepared models, and of preparing them."""

import json
import re
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest

from mcinfer.cli import main
from mcinfer.model_cache.cache import Cache, Held, entry_key
from tests.command_line import Capture, only_line


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))
    return Cache.default()


def made(cache: Cache, name: str, *, size: int = 0, about: str | None = None) -> Held:
    """An entry of that many bytes for a model of that name."""

    def fill(folder: Path, _lock: int) -> None:
        text = json.dumps({"name": name}) if about is None else about
        (folder / "about.json").write_text(text, encoding="utf-8")
        (folder / "weights.bin").write_bytes(bytes(size))

    facts = {"model": name, "engine": "onnxruntime 1.2"}
    return cache.make(entry_key(facts), facts, fill, wait=0)


def listed(capsys: Capture) -> list[str]:
    assert main(["cache", "list"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_empty_cache_is_said_to_be_empty(cache: Cache, capsys: Capture) -> None:
    assert listed(capsys) == [
        f"the cache is empty: nothing of at most 53687.1 MB in {cache.folder}"
    ]
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr() == ("freed 0.0 MB\n", "")
    assert not cache.folder.exists()


def test_list_has_a_line_for_each_entry_and_the_total(cache: Cache, capsys: Capture) -> None:
    made(cache, "first.onnx", size=3_000_000).close()
    with closing(made(cache, "second.onnx", size=1_000_000)) as held:
        *lines, total = listed(capsys)
    entries = cache.entries()
    for line, info, model in zip(lines, entries, ("first.onnx", "second.onnx"), strict=True):
        used = datetime.fromtimestamp(info.used_at).strftime("%Y-%m-%dT%H:%M")
        use = "in use" if info.key == held.key else "not in use"
        expected = [info.key[:12], f"{info.bytes / 1e6:.1f} MB", used, use, model]
        assert re.split("  +", line) == [*expected, "onnxruntime 1.2"]
    size = sum(info.bytes for info in entries) / 1e6
    assert total == f"2 entries, {size:.1f} MB of at most 53687.1 MB in {cache.folder}"


def test_any_models_name_is_one_line(cache: Cache, capsys: Capture) -> None:
    made(cache, "a\nb\udc80\x1b[31mü.onnx").close()
    line, _ = listed(capsys)
    assert "  a?b??[31mü.onnx  " in line


def test_model_that_cannot_be_prepared_is_listed_as_such(cache: Cache, capsys: Capture) -> None:
    def fill(folder: Path, _lock: int) -> None:
        (folder / "failure.txt").write_text("no", encoding="utf-8")

    facts = {"model": "bad"}
    cache.make(entry_key(facts), facts, fill, wait=0).close()
    line, _ = listed(capsys)
    assert line.endswith("  ?  ?, cannot be prepared")


def test_clear_leaves_what_is_in_use_and_says_so(cache: Cache, capsys: Capture) -> None:
    made(cache, "first.onnx", size=3_000_000).close()
    with closing(made(cache, "second.onnx")) as held:
        assert main(["cache", "clear"]) == 0
        assert [info.key for info in cache.entries()] == [held.key]
    assert capsys.readouterr() == ("freed 3.0 MB; left because they are in use: 1 entry\n", "")
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "freed 0.0 MB\n"
    assert cache.entries() == []


@pytest.mark.parametrize("command", ["list", "clear"])
def test_cache_that_others_may_write_to_is_refused(
    cache: Cache, capsys: Capture, command: str
) -> None:
    cache.folder.mkdir()
    cache.folder.chmod(0o777)
    assert main(["cache", command]) == 1
    line = only_line(capsys.readouterr().err)
    assert line == f"mcinfer: the cache {cache.folder} is writable by others (mode 0777)"
