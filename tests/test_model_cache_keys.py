"""Tests of mcinfer/model_cache/keys.py: what a model's digest depends on, and when it is only recalled."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import onnxruntime as ort
import pytest
from onnx import TensorProto, parser

from mcinfer.errors import BuildError
from mcinfer.model_cache import FOLDER_KEY, keys
from mcinfer.model_cache.keys import ModelContent, read_content, sketch
from mcinfer.model_cache.onnx_files import chunks
from tests.process.waiting import wait_until

FALSE = "f" * 64
"""A digest that no model has: where it comes back, it was recalled and nothing was read."""


def model(*locations: str) -> bytes:
    """y = x, with a weight at each location."""
    names = [f"w{number}" for number in range(len(locations))]
    made = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> '
        f"g (float[2] x) => (float[2] y) {{ y = Sum({', '.join(['x', *names])}) }}"
    )
    for name, location in zip(names, locations, strict=True):
        tensor = made.graph.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=[2])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
    content: bytes = made.SerializeToString()
    return content


def make(folder: Path) -> Path:
    """A model with two files of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.bin").write_bytes(b"\0" * 8)
    (folder / "b.bin").write_bytes(b"\1" * 8)
    path = folder / "model.onnx"
    path.write_bytes(model("a.bin", "b.bin"))
    return path


def runs(path: Path, folder: Path | None = None) -> bool:
    """Whether ONNX Runtime takes a model."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if folder is not None:
        options.add_session_config_entry(FOLDER_KEY, str(folder))
    try:
        ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception:  # its own kinds
        return False
    return True


def test_digest_is_of_contents_and_not_of_places_and_times(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two" / "deeper")
    os.utime(two, (1, 1))
    two = two.rename(two.with_name("other.onnx"))
    sources = [read_content(one), read_content(two)]
    assert sources[0].digest == sources[1].digest
    assert sources[0].size == one.stat().st_size + 16
    named = [Path(stamp.path).name for stamp in sources[1].stamps]
    assert named == ["other.onnx", "a.bin", "b.bin"]


def swapped(folder: Path) -> None:
    (folder / "a.bin").rename(folder / "c.bin")
    (folder / "b.bin").rename(folder / "a.bin")
    (folder / "c.bin").rename(folder / "b.bin")


def shifted(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"\0" * 8 + b"\1")
    (folder / "b.bin").write_bytes(b"\1" * 7)


def test_digest_depends_on_all_bytes_of_all_files(tmp_path: Path) -> None:
    digests = {read_content(make(tmp_path)).digest}
    changes: list[Callable[[Path], object]] = [
        lambda folder: (folder / "b.bin").write_bytes(b"\2" * 8),
        lambda folder: (folder / "model.onnx").write_bytes(model("a.bin", "b.bin") + b"\x12\x01?"),
        swapped,
        shifted,
    ]
    for change in changes:
        path = make(tmp_path)
        change(tmp_path)
        digests.add(read_content(path).digest)
    assert len(digests) == 1 + len(changes)


def overwritten(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\x12\x01?")  # of a model its producer


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replaced_by_its_copy(path: Path) -> None:
    shutil.copy2(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


def test_change_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path)

    def change_and_read(descriptor: int, size: int) -> Iterator[memoryview]:
        touched(tmp_path / "b.bin")
        return chunks(descriptor, size)

    monkeypatch.setattr(keys, "chunks", change_and_read)
    with pytest.raises(BuildError, match=r"model\.onnx changed while it was read"):
        read_content(path)


def test_missing_weights_are_named_with_the_model(tmp_path: Path) -> None:
    path = make(tmp_path)
    source = read_content(path)
    (tmp_path / "b.bin").unlink()
    assert not source.unchanged()
    with pytest.raises(BuildError) as caught:
        read_content(path)
    assert str(path) in str(caught.value)
    assert str(tmp_path / "b.bin") in str(caught.value)
    with pytest.raises(FileNotFoundError):
        read_content(tmp_path / "none.onnx")


def around(folder: Path) -> Path:
    """A model's folder among others; weights lie in it, in one within it, and beside it."""
    inner = folder / "in"
    (inner / "sub").mkdir(parents=True)
    for place in (folder / "w", inner / "w", inner / "sub" / "w"):
        place.write_bytes(b"\0" * 8)
    (inner / "out").symlink_to(folder / "w")
    (inner / "outer").symlink_to(folder)
    (inner / "link").symlink_to("w")
    (inner / "round").symlink_to(inner / "sub" / ".." / "w")
    return inner


@pytest.mark.parametrize("own_folder", [False, True])
def test_weights_outside_of_the_folder_are_refused_as_onnx_runtime_does(
    tmp_path: Path, own_folder: bool
) -> None:
    weights = around(tmp_path)
    path = (tmp_path if own_folder else weights) / "model.onnx"
    folder = weights if own_folder else None
    for location in ("w", "sub/w", "sub/../w", "../in/w", "link", "round"):
        path.write_bytes(model(location))
        assert runs(path, folder)
        read_content(path, folder=folder)
    for location in ("../w", "sub/../../w", "out", "outer/w", str(weights / "w")):
        path.write_bytes(model(location))
        assert not runs(path, folder)
        with pytest.raises(BuildError) as caught:
            read_content(path, folder=folder)
        assert f"{location!r}, expected a relative path that stays within" in str(caught.value)


def test_links_into_the_store_of_a_model_hub_are_followed_as_onnx_runtime_does(
    tmp_path: Path,
) -> None:
    stored = make(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for name in ("model.onnx", "a.bin", "b.bin"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    linked = snapshot / "model.onnx"
    assert runs(linked)
    assert read_content(linked).digest == read_content(stored).digest
    assert not runs(stored, snapshot)
    with pytest.raises(BuildError, match="stays within"):
        read_content(linked, folder=snapshot)


def read_at(clock_ns: int, path: Path, memory: Path) -> ModelContent:
    """Read a model at this time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: clock_ns)
        return read_content(path, memory=memory)


def read_old(path: Path, memory: Path) -> ModelContent:
    """Read a model long after its files have changed: it is remembered."""
    return read_at(time.time_ns() + 60 * 10**9, path, memory)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir(mode=0o700)
    return folder


def remembered(path: Path, memory: Path) -> ModelContent:
    """Read a model, and have a false digest of it remembered."""
    source = read_old(path, memory)
    [notes] = memory.iterdir()
    assert notes.suffix == ".json"
    notes.write_text(json.dumps({**json.loads(notes.read_text()), "digest": FALSE}))
    return source


def test_unchanged_model_is_recalled_and_not_read(tmp_path: Path, memory: Path) -> None:
    path = make(tmp_path)
    source = remembered(path, memory)
    recalled = read_content(path, memory=memory)
    assert recalled.digest == FALSE
    assert recalled.stamps == source.stamps
    assert read_content(path).digest == source.digest


@pytest.mark.parametrize("name", ["model.onnx", "b.bin"])
@pytest.mark.parametrize("change", [overwritten, touched, replaced_by_its_copy])
def test_model_with_a_changed_file_is_read_again_and_too_fresh_to_be_remembered(
    tmp_path: Path, memory: Path, change: Callable[[Path], None], name: str
) -> None:
    path = make(tmp_path)
    old = remembered(path, memory)
    assert old.unchanged()
    change(tmp_path / name)
    assert not old.unchanged()
    assert old.is_still_there() == (change is not overwritten)
    source = read_content(path, memory=memory)
    assert source.digest == read_content(path).digest
    assert (source.digest == old.digest) == (change is not overwritten)
    [notes] = memory.iterdir()
    assert json.loads(notes.read_text())["digest"] == FALSE


def test_fresh_weights_are_not_remembered_however_old_the_model_is(
    tmp_path: Path, memory: Path
) -> None:
    path = make(tmp_path)
    weights = tmp_path / "b.bin"

    def is_newer() -> bool:
        os.utime(weights, (1, 1))  # only ctime shows it
        return weights.stat().st_ctime_ns > path.stat().st_ctime_ns

    wait_until(is_newer)  # the clock of ctime is a coarse one
    two_seconds_later = weights.stat().st_ctime_ns + 2 * 10**9
    read_at(two_seconds_later, path, memory)
    assert [*memory.iterdir()] == []
    read_at(two_seconds_later + 1, path, memory)
    assert len([*memory.iterdir()]) == 1


BEGINNING = f'{{"version": 1, "digest": "{FALSE}", "stamps": '


def test_damaged_memory_is_ignored_and_overwritten(tmp_path: Path, memory: Path) -> None:
    path = make(tmp_path)
    truth = read_old(path, memory)
    [notes] = memory.iterdir()
    good = notes.read_text()
    for damaged in (
        "",
        "[" * 100_000,
        '{"version": 1}',
        '{"version": 1, "digest": 7, "stamps": []}',
        BEGINNING + "[]}",
        BEGINNING + "[[1, 2]]}",
        BEGINNING + '[["\\u0000", 1, 1, 1, 1, 1]]}',
    ):
        notes.write_text(damaged)
        assert read_old(path, memory) == truth
        assert notes.read_text() == good


def test_memory_that_cannot_be_written_is_done_without(tmp_path: Path, memory: Path) -> None:
    path = make(tmp_path)
    truth = read_old(path, memory)
    assert read_old(path, memory / "none") == truth
    [notes] = memory.iterdir()
    notes.unlink()
    notes.mkdir()  # nothing can be put in its place
    assert read_old(path, memory) == truth
    assert [*memory.iterdir()] == [notes]


def test_files_of_other_formats_are_read_as_they_are(tmp_path: Path, memory: Path) -> None:
    other = tmp_path / "other"
    other.write_text("{}")  # no ONNX model
    os.utime(other, (0, 0))
    source = read_content(other, memory=memory, any_format=True)
    assert (source.random, source.size) == ("", 2)
    with pytest.raises(BuildError, match="expected an ONNX model"):
        read_content(other, memory=memory)
    other.write_text("[]")
    assert read_content(other, any_format=True).digest != source.digest
    assert not source.unchanged()
    path = make(tmp_path)
    assert read_content(path, any_format=True) == read_content(path)


def test_weights_of_an_ir_belong_to_its_content(tmp_path: Path, memory: Path) -> None:
    ir, weights = tmp_path / "model.xml", tmp_path / "model.bin"
    ir.write_text("<net/>")
    found = []
    for content in (b"one", b"two", None):
        if content is None:
            weights.unlink()
        else:
            weights.write_bytes(content)
        found.append(read_content(ir, memory=memory, any_format=True))
        assert found[-1].unchanged()
    assert len({source.digest for source in found}) == 3
    assert [source.size for source in found] == [9, 9, 6]


def test_random_nodes_are_remembered_with_the_digest(tmp_path: Path, memory: Path) -> None:
    made = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> '
        "g (float[2] x) => (float[2] y) { [noise] y = RandomUniformLike<seed = 1.0>(x) }"
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(made.SerializeToString())
    for source in (remembered(path, memory), read_content(path, memory=memory)):
        assert source.random == "node 'noise' (RandomUniformLike)"


def test_files_with_an_unknown_sketch_are_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "model")
    whole = read_content(path)
    known = sketch(whole.stamps)
    with monkeypatch.context() as patch:
        patch.setattr(keys, "chunks", refuse)
        new = read_content(path, memory=tmp_path, known={"sketch of another"})
    assert new == replace(whole, digest=known)
    assert not [*tmp_path.glob("*.json")]  # it is no digest to remember
    assert read_content(path, known={known}) == whole
    (path.parent / "b.bin").write_bytes(b"\2" * 8)
    assert read_content(path, known={known}).digest not in {known, whole.digest}


def refuse(*_: object) -> Iterator[bytes]:
    raise AssertionError("a file is read whole")
