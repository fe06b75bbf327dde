"""How models' batches are split, kept in the cache: learned once for each model and machine.

A record is a small JSON file in ``ROOT/splits``; its name is a digest of what it depends on. A record that
cannot be read does not count; if the cache cannot be used, nothing is kept.

Programs with real inputs must not use what made-up inputs have shown: `records_in` keeps that elsewhere.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcinfer.errors import McinferError
from mcinfer.model_cache.cache import Cache, entry_key, write_atomically
from mcinfer.private import check_own
from mcinfer.sharding import SaidAxes, Split
from mcinfer.specs import ModelSpec

_VERSION = 3  # version of the record's form and of the learning: increase it when either changes

_MAX_BYTES = 1 << 20

_FOLDER = "MCINFER_SPLITS"
"""The environment's name for a folder in the place of ``ROOT/splits``; for this process and its children."""

_log = logging.getLogger("mcinfer.model_cache")


class SplitRecord:
    """The record of one model, run by one engine, for one set of axes that the user says.

    Args:
        identity: The model's, from a worker; empty if the model cannot be identified.
        about: Everything else that the record depends on: what JSON can say.
    """

    def __init__(self, identity: str, about: Mapping[str, Any]) -> None:
        facts = {"version": _VERSION, "model": identity, **about}
        self._name = f"{entry_key(facts)}.json" if identity else ""

    def read(self, model: ModelSpec) -> Split | None:
        """The split of this model that was kept last, if any."""
        if not self._name:
            return None
        try:
            own = Cache.default().folder / "splits"
            if _FOLDER not in os.environ and not own.exists():
                return None  # a look makes no folder
            with open(_folder() / self._name, "rb") as file:
                return of_record(json.loads(file.read(_MAX_BYTES)), model)
        except (McinferError, OSError, ValueError, RecursionError):
            return None

    def write(self, split: Split | None) -> None:
        """Replace the record; None removes it."""
        if not self._name:
            return
        try:
            path = _folder() / self._name
            if split is None:
                path.unlink(missing_ok=True)
            else:
                write_atomically(path, json.dumps(as_record(split)))
        except (McinferError, OSError) as exc:
            _log.debug("how the batch is split is not kept: %s", exc)


def _integers(values: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(value) for name, value in values.items()}


_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "inputs": dict,
    "outputs": dict,
    "rows": int,
    "difference": float,
    "reason": str,
    "sizes": _integers,
    "ranks": _integers,
}
"""What is kept of a split, and how it is read."""


def as_record(split: Split) -> dict[str, Any]:
    """What is kept of a split, as JSON."""
    return {name: getattr(split, name) for name in _FIELDS}


def of_record(content: Any, model: ModelSpec) -> Split | None:
    """The split that `as_record` wrote; None if it does not fit the model."""
    try:
        read = {name: kind(content[name]) for name, kind in _FIELDS.items()}
        split = Split(**read, known="recorded", checked=True)
        joined = {n: axis for n, axis in split.outputs.items() if not isinstance(axis, str)}
        SaidAxes(inputs=split.inputs, outputs=joined).check(model)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
        return None
    sides = ((split.inputs, model.inputs), (split.outputs, model.outputs))
    fits = all([*axes] == [spec.name for spec in specs] for axes, specs in sides)
    return split if fits and (split.splits or split.reason) else None


def _folder() -> Path:
    if not (folder := os.environ.get(_FOLDER)):
        return Cache.default().notes("splits")
    check_own(Path(folder))
    return Path(folder)


@contextmanager
def records_in(folder: Path) -> Iterator[None]:
    """Read and write records in this folder meanwhile, also in processes that are started.

    The folder must be this user's, and others must not be able to write to it.
    """
    before = os.environ.get(_FOLDER)
    os.environ[_FOLDER] = str(folder)
    try:
        yield
    finally:
        del os.environ[_FOLDER]
        if before is not None:
            os.environ[_FOLDER] = before
