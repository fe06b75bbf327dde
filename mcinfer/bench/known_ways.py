"""The names of the ways, and where each is found. Nothing is imported before a way is wanted."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcinfer.errors import InvalidInputError

BASELINES = {
    "session": "mcinfer.bench.sessions:Session",
    "threads": "mcinfer.bench.sessions:Threads",
    "threads-1": "mcinfer.bench.sessions:SingleThreads",
    "pipe": "mcinfer.bench.pipe_sample:Pipe",
    "pipe-each": "mcinfer.bench.pipe_sample:PipeEach",
}
MODES = {
    "sharded": "mcinfer.bench.pools:Sharded",
    "concurrent": "mcinfer.bench.pools:Concurrent",
    "batched": "mcinfer.bench.pools:Batched",
}


def way_class(name: str) -> Any:
    """The `mcinfer.bench.way.RunningWay` of that name; of one's own, ``path/to/file.py:Class``.

    Raises:
        InvalidInputError: There is none, or the class is no such way.
        Exception: A file of one's own cannot be loaded.
    """
    place, _, attribute = {**BASELINES, **MODES}.get(name, name).rpartition(":")
    module = importlib.import_module(place) if is_known(name) else _load(name, place)
    kind = getattr(module, attribute, None)
    from mcinfer.bench.way import RunningWay

    if not (isinstance(kind, type) and issubclass(kind, RunningWay)):
        raise InvalidInputError(
            f"--against: {name!r}: expected a subclass of mcinfer.bench.way.RunningWay, got {kind!r}"
        )
    return kind


def is_known(name: str) -> bool:
    """Whether it is one of mcinfer's own."""
    return name in BASELINES or name in MODES


def shown_name(name: str) -> str:
    """What reports call it: without the file."""
    return name if is_known(name) else name.rpartition(":")[2]


def check_names(names: Sequence[str]) -> None:
    """Raise `InvalidInputError` unless these are baselines that reports can tell apart.

    Whether a file's class is a way is found out when it is loaded, in a process of its own.
    """
    for name in names:
        path, _, attribute = name.rpartition(":")
        if name in BASELINES:
            continue
        if Path(path).suffix != ".py" or not attribute.isidentifier():
            raise InvalidInputError(
                f"--against: got {name!r}, expected one of {[*BASELINES]}, none, or FILE.py:Class"
            )
        if not Path(path).is_file():
            raise InvalidInputError(f"--against: {name!r}: there is no file {path}")
        if is_known(attribute):
            raise InvalidInputError(
                f"--against: {name!r}: {attribute!r} is the name of one of mcinfer's own ways"
            )
    shown = [shown_name(name) for name in names]
    twice = [name for name, other in zip(names, shown, strict=True) if shown.count(other) > 1]
    if twice:
        raise InvalidInputError(f"--against: got {twice}, expected ways of different names")


def _load(name: str, path: str) -> Any:
    file = Path(path).resolve()
    if not file.is_file():
        raise InvalidInputError(f"--against: {name!r}: there is no file {path}")
    # As when the file is run: what lies beside it can be imported, and processes that it starts find it.
    sys.path.append(str(file.parent))
    if file.stem.isidentifier():
        module = importlib.import_module(file.stem)
        if Path(module.__file__ or "").resolve() == file:
            return module
    raise InvalidInputError(
        f"--against: {name!r}: {file.name} cannot be imported by its name, which is taken or none: "
        "give the file another one"
    )
