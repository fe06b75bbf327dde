"""Reading the files that a model is made of, which may be anything that somebody gave this name to.

Only regular files are opened: a pipe waits for its writer, a device has no end, and to open one may set
something going. Of a file that grows while it is read, no more is read than it had.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcinfer.errors import BuildError

_CHUNK_BYTES = 1 << 20

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """What a file looks like, which is not opened for that.

    Raises:
        BuildError: It is no regular file, or its name is none that a file can have.
        OSError: There is none, or it cannot be reached.
    """
    try:
        info = os.stat(path)
    except ValueError as exc:  # a zero in the path
        raise BuildError(f"{os.fspath(path)!r}: {exc}, expected the path of a file") from exc
    _check_kind(os.fspath(path), info)
    return info


def _check_kind(name: str, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "something else")
        raise BuildError(f"{name}: got {kind}, expected a regular file")


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor of a file, closed at the end, and what that file looks like.

    Raises:
        BuildError: It is no regular file.
        OSError: It cannot be opened.
    """
    check_regular(path)
    # Not blocking: by now a pipe may be in its place.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        info = os.fstat(descriptor)
        _check_kind(os.fspath(path), info)
        yield descriptor, info
    finally:
        os.close(descriptor)


def chunks(descriptor: int, size: int) -> Iterator[memoryview]:
    """What a file holds from its beginning on, in parts: of at most so many bytes.

    Yields:
        A part, which the next one overwrites.
    """
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(size, 1))))
    at = 0
    while at < size and (count := os.preadv(descriptor, [buffer[: size - at]], at)):
        yield buffer[:count]
        at += count


def external_files(model: Path, folder: Path | None, locations: tuple[str, ...]) -> list[Path]:
    """The files of a model's external data, as ONNX Runtime (1.29 to 1.31) finds them, and has them.

    Args:
        model: Absolute path of the model.
        folder: Absolute path of the folder where the data is said to lie; None is beside the model.
        locations: As written in the model.

    Returns:
        Their paths, in the same order; links are not resolved.

    Raises:
        BuildError: One is missing, is no regular file, or lies outside of the folder: by an absolute path, by
            ``..`` or through a link. Where the model itself is a link, as in the caches of model hubs, its
            target's folder is allowed as well.
    """
    base = model.parent if folder is None else folder
    allowed = _allowed(model, folder)
    paths = []
    for location in locations:
        path = base / location
        try:
            real = Path(os.path.realpath(path))
            inside = not os.path.isabs(location) and any(map(real.is_relative_to, allowed))
            if not inside:
                raise BuildError(
                    f"{model}: got external data at {location!r}, expected a relative path that "
                    f"stays within {base}"
                )
            _check_kind(f"{model}: external data {path}", os.stat(path))
        except (OSError, ValueError) as exc:  # a zero in the path is a ValueError
            reason = exc.strerror if isinstance(exc, OSError) else exc  # not the path once more
            raise BuildError(f"{model}: external data {path} cannot be read: {reason}") from exc
        paths.append(path)
    return paths


def _allowed(model: Path, folder: Path | None) -> list[str]:
    """The folders in which external data may lie."""
    if folder is not None:
        return [os.path.realpath(folder)]
    target = os.path.realpath(model)
    folders = [os.path.realpath(model.parent)]
    if os.path.exists(target):  # a memfd's is a name without a file, as if it lay in the root
        folders.append(os.path.dirname(target))
    return folders
