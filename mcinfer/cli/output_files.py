"""Files that a command writes when its work is done.

They are checked before the work, which may take long. A file is written under another name beside its place
and then moved there, so it is whole or not there. Unfinished results never replace finished ones. Links are
followed, except those of other users, who could choose the file that is replaced (``/tmp`` is open to all);
those in the folders above, too.
"""

import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import typer

from mcinfer.errors import InvalidInputError
from mcinfer.private import OthersError, opened_folder, opened_place


def check_outputs(outputs: Mapping[str, Path | None], *read: Path) -> None:
    """Check that the files of these options can be written, differ, and are none of those that are read.

    None: the option was not given.
    """
    seen = dict.fromkeys((path.resolve() for path in read), "")
    for option, path in outputs.items():
        if path is None:
            continue
        other = seen.setdefault(output_place(option, path), option)
        if other != option:
            what = f"{other} is to be written to" if other else "the command reads"
            raise typer.BadParameter(f"{option}: got {path}, which {what}")


def write_output(option: str, path: Path, content: bytes, *, finished: bool = True) -> None:
    """Write a file, at the end of all links.

    If the content is not `finished`, the file is ``x.partial.json`` instead of ``x.json``, and standard error
    says so.
    """
    target = path if finished else path.with_name(f"{path.stem}.partial{path.suffix}")
    place = output_place(option, target)
    with opened_folder(place.parent, guarded=False) as folder:
        beside = folder / f".mcinfer-{secrets.token_hex(8)}"
        try:
            beside.write_bytes(content)
            beside.replace(folder / place.name)
        finally:
            beside.unlink(missing_ok=True)
    if not finished:
        print(f"mcinfer: {option}: what is known so far is in {target}", file=sys.stderr)


def output_place(option: str, path: Path) -> Path:
    """The absolute path of the file to write, at the end of all links; the file need not exist.

    `InvalidInputError`: it cannot be written, is no regular file, or another user's link leads there.
    """
    try:
        with opened_place(path) as place:
            if place.exists() and not place.is_file():
                raise InvalidInputError(f"{option}: {path} is there and is no regular file")
            if place.exists() and not os.access(place, os.W_OK):
                raise InvalidInputError(
                    f"{option}: {path} cannot be written: it is write-protected"
                )
            with tempfile.TemporaryFile(dir=place.parent):
                pass
            return place.parent.readlink() / place.name
    except OthersError as exc:
        raise InvalidInputError(f"{option}: {exc}") from exc
    except OSError as exc:
        raise InvalidInputError(f"{option}: {path} cannot be written: {exc.strerror}") from exc
