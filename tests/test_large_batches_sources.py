"""Tests of mcinfer/large_batches/sources.py: what may be written to, and what a result depends on."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from mcinfer.errors import InvalidInputError
from mcinfer.large_batches.reading import InputFile
from mcinfer.large_batches.sources import Sources, resolve_target
from tests.command_line import save_double


def test_output_is_where_links_lead(tmp_path: Path) -> None:
    for name, target in (("old", tmp_path / "old.bin"), ("new", tmp_path / "new.npz")):
        link = tmp_path / f"{name}-link.npz"
        link.symlink_to(target)
        assert resolve_target(link) == target.resolve()
        (tmp_path / "old.bin").touch()
        assert resolve_target(link) == target.resolve()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pipe.npz", r"pipe\.npz: got a pipe, expected a regular file"),
        ("pipe-link.npz", r"pipe\.npz: got a pipe, expected a regular file"),
        ("folder.npz", r"folder\.npz: got a folder, expected a regular file"),
        ("loop.npz", r"loop\.npz: Too many levels of symbolic links"),
        ("file/y.npz", r"file/y\.npz: Not a directory"),
        ("none/y.npz", r"there is no folder .*none$"),
        ("y.npy", r"got .*y\.npy, expected a name that ends in \.npz"),
        ("y", r"got .*y, expected a name that ends in \.npz"),
    ],
)
def test_output_that_is_or_could_be_no_file_is_refused(
    tmp_path: Path, name: str, text: str
) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "pipe-link.npz").symlink_to("pipe.npz")
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "loop.npz").symlink_to("loop.npz")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match=f"^--output: .*{text}"):
        resolve_target(tmp_path / name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with external data."""
    path = save_double(tmp_path)
    content = onnx.load(path)
    array = np.ones(3000, np.float32)
    content.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    onnx.save(content, path, save_as_external_data=True, location="weights.bin")
    return path


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    path = tmp_path / "in.npz"
    np.savez(path, x=np.ones((5, 3), np.float32))
    return path


@pytest.mark.parametrize(
    ("name", "what"), [("double.onnx", "MODEL"), ("weights.bin", "MODEL"), ("in.npz", "--input")]
)
def test_output_that_is_one_of_the_sources_by_any_name_is_refused(
    model: Path, batch: Path, tmp_path: Path, name: str, what: str
) -> None:
    (tmp_path / "same").hardlink_to(tmp_path / name)
    with InputFile(batch) as file:
        sources = Sources(model, file)
        sources.refuse(tmp_path / "new.npz")
        for path in (tmp_path / name, tmp_path / "same"):
            with pytest.raises(
                InvalidInputError, match=rf"--output: {path} is the file of {what} "
            ):
                sources.refuse(path)


@pytest.mark.parametrize(
    ("name", "what"), [("double.onnx", "model"), ("weights.bin", "model"), ("in.npz", "input")]
)
def test_sources_that_changed_are_told_and_touched_ones_are_not(
    model: Path, batch: Path, tmp_path: Path, name: str, what: str
) -> None:
    with InputFile(batch) as file:
        sources = Sources(model, file)
        (tmp_path / name).touch()
        assert sources.changed() == []
        with (tmp_path / name).open("ab") as other:
            other.write(b"x")
        assert sources.changed() == [what]
        (tmp_path / name).unlink()
        assert sources.changed() == [what]


def test_model_that_is_not_there_is_named(batch: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.onnx"
    with (
        InputFile(batch) as file,
        pytest.raises(InvalidInputError, match=f"^MODEL: {path}: No such file or directory"),
    ):
        Sources(path, file)
