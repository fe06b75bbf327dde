"""Files that a command writes when its work is done.

What would keep one from being written is told before the work, which may take long. A file is whole or not
there: it is written under another name beside its place, and then moved there. Results of work that was not
finished never take the place of finished ones.
"""

import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import typer

from mcinfer.errors import InvalidInputError

_OTHER_IMAGES = {".jpg", ".jpeg", ".svg", ".pdf", ".gif", ".webp", ".tif", ".tiff", ".bmp", ".eps"}


def parse_png(text: str) -> Path:
    """A path for an image in PNG: ``"plots.png"``, or without a suffix that says another format."""
    path = Path(text)
    if path.suffix.lower() in _OTHER_IMAGES:
        raise typer.BadParameter(f"got {text!r}, expected a name that ends in .png: it is a PNG")
    return path


def check_outputs(outputs: Mapping[str, Path | None]) -> None:
    """Check that files can be written, before the work that they are for.

    Args:
        outputs: By option; those that were not given are None.

    Raises:
        BadParameter: Two are the same file.
        InvalidInputError: One cannot be written, or there is something else than a file in its place.
    """
    seen: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        other = seen.setdefault(_place(path), option)
        if other != option:
            raise typer.BadParameter(f"{option}: got {path}, which {other} is to be written to")
        _check(option, path)


def write_output(option: str, path: Path, content: bytes, *, finished: bool = True) -> None:
    """Write a file.

    Args:
        option: What it is for.
        path: Where to. A link stays, and the file that it leads to is replaced.
        content: All of it.
        finished: Whether it is what was asked for. If not, it is written beside that, to ``x.partial.json``
            in the place of ``x.json``, and standard error is told.

    Raises:
        InvalidInputError: There is something else than a file in its place by now.
        OSError: It cannot be written.
    """
    target = path if finished else path.with_name(f"{path.stem}.partial{path.suffix}")
    _check(option, target)
    place = _place(target)
    beside = place.with_name(f".mcinfer-{secrets.token_hex(8)}")
    try:
        beside.write_bytes(content)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)
    if not finished:
        print(f"mcinfer: {option}: what is known so far is in {target}", file=sys.stderr)


def _place(path: Path) -> Path:
    """The file that a path leads to; it need not be there."""
    return Path(os.path.realpath(path))


def _check(option: str, path: Path) -> None:
    place = _place(path)
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
        if not place.parent.is_dir():
            raise InvalidInputError(f"{option}: there is no folder {place.parent}") from None
    except OSError as exc:
        raise _refused(option, path, exc) from exc
    else:
        if not os.access(place, os.W_OK):
            raise InvalidInputError(f"{option}: {path} cannot be written: it is write-protected")
    if not stat.S_ISREG(mode):
        raise InvalidInputError(f"{option}: {path} is there and is no regular file")
    try:
        with tempfile.TemporaryFile(dir=place.parent):
            pass
    except OSError as exc:
        raise _refused(option, path, exc) from exc


def _refused(option: str, path: Path, exc: OSError) -> InvalidInputError:
    return InvalidInputError(f"{option}: {path} cannot be written: {exc.strerror}")
