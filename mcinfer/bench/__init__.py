"""The benchmark runner: ways of running one model, side by side under the same loads; and their names."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from mcinfer.config import PrecisionKind
from mcinfer.engines import names
from mcinfer.errors import InvalidInputError

BASELINES = {
    "session": "mcinfer.bench.baselines:PlainSession",
    "threads": "mcinfer.bench.baselines:Threads",
    "threads-1": "mcinfer.bench.baselines:SingleThreads",
    "pipe": "mcinfer.bench.baselines:Pipe",
    "pipe-each": "mcinfer.bench.baselines:PipeEach",
}
MODES = {
    "sharded": "mcinfer.bench.pools:SplitBatches",
    "concurrent": "mcinfer.bench.pools:Concurrent",
    "batched": "mcinfer.bench.pools:Batched",
    "inline": "mcinfer.bench.baselines:Inline",
}
_KNOWN = {**BASELINES, **MODES}

ENGINES = tuple(name for name, engine in names.ENGINES.items() if ".onnx" in engine.endings)
"""Engines that load ONNX models; the second one in other precisions, and its own format, too."""


def way_class(name: str) -> Any:
    """The way of that name, or of a user's file: ``path/to/file.py:Class``; imported only when wanted.

    Raises:
        InvalidInputError: There is none, or the class is no such way.
        Exception: A user's file cannot be loaded.
    """
    place, _, attribute = _KNOWN.get(name, name).rpartition(":")
    module = importlib.import_module(place) if name in _KNOWN else _load(name, place)
    kind = getattr(module, attribute, None)
    from mcinfer.bench.way import RunningWay

    if not (isinstance(kind, type) and issubclass(kind, RunningWay)):
        raise InvalidInputError(
            f"--against: {name!r}: expected a subclass of mcinfer.bench.way.RunningWay, got {kind!r}"
        )
    return kind


def shown_name(name: str) -> str:
    return name if name in _KNOWN else name.rpartition(":")[2]


def check_names(names: Sequence[str]) -> None:
    """Raise `InvalidInputError` unless these are baselines that reports can tell apart.

    A user's class is checked when its file is loaded, in a process of its own.
    """
    own = [name for name in names if name not in BASELINES]
    for name in own:
        path, _, attribute = name.rpartition(":")
        if Path(path).suffix != ".py" or not attribute.isidentifier():
            raise InvalidInputError(
                f"--against: got {name!r}, expected one of {[*BASELINES]}, none, or FILE.py:Class"
            )
        if not Path(path).is_file():
            raise InvalidInputError(f"--against: {name!r}: there is no file {path}")
    shown = [*_KNOWN, *map(shown_name, own)]
    if len(set(shown)) < len(shown) or len(set(names)) < len(names):
        raise InvalidInputError(f"--against: got {[*names]}, expected different class names")


def check_engines(engines: Sequence[str]) -> None:
    """Raise `InvalidInputError` unless these are different engines, as `Setup.engine` has them."""
    known = [*ENGINES, *(f"{ENGINES[1]}:{precision}" for precision in get_args(PrecisionKind))]
    for text in engines:
        if text not in known:
            raise InvalidInputError(f"--engine: got {text!r}, expected some of {known}")
    if len({*engines}) < len(engines):
        raise InvalidInputError(f"--engine: got {[*engines]}, expected each once")


def _load(name: str, path: str) -> Any:
    file = Path(path).resolve()
    if not file.is_file():
        raise InvalidInputError(f"--against: {name!r}: there is no file {path}")
    # As when the file is run: its neighbours can be imported, and processes that it starts find it.
    sys.path.append(str(file.parent))
    if file.stem.isidentifier():
        module = importlib.import_module(file.stem)
        if Path(module.__file__ or "").resolve() == file:
            return module
    raise InvalidInputError(
        f"--against: {name!r}: {file.name} cannot be imported under its name: rename the file"
    )
