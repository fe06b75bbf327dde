"""The cache of models that are prepared once and mapped by every process that runs them, and its keys.

Which models are worth it is said here, where nothing else is imported: each session of a small model asks.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

LEAST_PREPARED_BYTES = 16 << 20
"""Least size of a model that is prepared, except by ``prepare="always"``."""

_MOST_COPIED_BYTES = 256 << 20
"""To prepare so many bytes of weights takes some seconds, once on a machine; a pool that did not wait keeps
its copies for as long as it serves."""


def is_waited_for(model: str | os.PathLike[str], folder: str | None, workers: int) -> bool:
    """Whether a pool waits for its prepared model: where its copies beside the first would take too much.

    Raises as `is_large`.
    """
    return workers > 1 and (workers - 1) * model_bytes(model, folder) > _MOST_COPIED_BYTES


FOLDER_KEY = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime's option for models that do not lie beside their external data."""

_LOCATION = b"location"
"""In each model that has external data (``TensorProto.external_data`` of onnx.proto)."""


def is_large(model: str | os.PathLike[str], folder: str | None) -> bool:
    """Whether a model with its external data is worth preparing.

    Args:
        model: Its path.
        folder: The folder of its external data, if it is not the model's.

    Raises:
        BuildError: The model is no regular file.
        OSError: It cannot be reached.
    """
    if os.path.isfile(model):
        if os.path.getsize(model) >= LEAST_PREPARED_BYTES:
            return True
        # An IR has its weights in another file.
        if not os.fspath(model).endswith(".xml") and not has_external_data(model):
            return False
    return model_bytes(model, folder) >= LEAST_PREPARED_BYTES


def model_bytes(model: str | os.PathLike[str], folder: str | None = None) -> int:
    """The size of a model with its external data; arguments and errors are those of `is_large`."""
    from pathlib import Path

    from mcinfer.errors import BuildError
    from mcinfer.model_cache.onnx_files import check_regular, model_files

    size = check_regular(model).st_size
    place = Path(folder).absolute() if folder else None
    with suppress(BuildError):  # a format of the runtime's own, or data that it refuses too
        size = sum(file.stat().st_size for file in model_files(Path(model).absolute(), place))
    return size


def has_external_data(model: str | bytes | os.PathLike[str]) -> bool:
    """Whether a model, by its path or as its bytes, may have external data: a large one always may."""
    if isinstance(model, bytes):
        return _LOCATION in model
    return _names_a_location(*file_states([os.fspath(model)]))


@lru_cache(64)  # each session of a small model asks twice
def _names_a_location(model: "FileState") -> bool:
    if model.size >= LEAST_PREPARED_BYTES:
        return True
    with open(model.path, "rb") as file:
        return _LOCATION in file.read(LEAST_PREPARED_BYTES)


class FileState(NamedTuple):
    """The state of a file as in stat(2), by its absolute path; links are not resolved.

    No program can set a file's ctime back: so while the state is the same, so is the content.
    """

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def file_states(paths: Iterable[str]) -> tuple[FileState, ...]:
    """The states of files; OSError if one is not there."""
    infos = ((path, os.stat(path)) for path in paths)
    return tuple(
        FileState(path, i.st_dev, i.st_ino, i.st_size, i.st_mtime_ns, i.st_ctime_ns)
        for path, i in infos
    )
