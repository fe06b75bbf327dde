"""The names of the ways, and where each is found. Nothing is imported before a way is wanted."""

import importlib
import sys
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

SESSION = "session"
"""What speed-ups are over."""


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


def check_name(name: str) -> None:
    """Raise `InvalidInputError` unless there is such a baseline; a file's class is not looked for."""
    path, _, attribute = name.rpartition(":")
    if name in BASELINES or (Path(path).suffix == ".py" and attribute.isidentifier()):
        return
    raise InvalidInputError(
        f"--against: got {name!r}, expected one of {[*BASELINES]}, none, or FILE.py:Class"
    )


def _load(name: str, path: str) -> Any:
    if not Path(path).is_file():
        raise InvalidInputError(f"--against: {name!r}: there is no file {path}")
    # As when the file is run: what lies beside it can be imported, and processes that it starts find it.
    sys.path.insert(0, str(Path(path).resolve().parent))
    return importlib.import_module(Path(path).stem)
