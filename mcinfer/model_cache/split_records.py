"""How models' batches are split, kept in the cache: learned once for each model and machine.

A record is a small JSON file in ``ROOT/splits``; its name is a digest of what it depends on. A record that
cannot be read does not count; if the cache cannot be used, nothing is kept.

Programs with real inputs must not use what made-up inputs have shown: `records_in` keeps that elsewhere.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from mcinfer.errors import McinferError
from mcinfer.model_cache.cache import Cache
from mcinfer.model_cache.keys import write_atomically
from mcinfer.private import opened_folder

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
        text = json.dumps(facts, sort_keys=True)
        self._name = f"{hashlib.sha256(text.encode()).hexdigest()}.json" if identity else ""

    def read(self) -> Any:
        """The content that was kept last, if any."""
        if not self._name:
            return None
        try:
            own = Cache.default().folder / "splits"
            if _FOLDER not in os.environ and not own.exists():
                return None  # a look makes no folder
            with _folder() as folder, open(folder / self._name, "rb") as file:
                return json.loads(file.read(_MAX_BYTES))
        except (McinferError, OSError, ValueError, RecursionError):
            return None

    def write(self, content: Mapping[str, Any] | None) -> None:
        """Replace the record; None removes it."""
        if not self._name:
            return
        try:
            with _folder() as folder:
                if content is None:
                    (folder / self._name).unlink(missing_ok=True)
                    return
                write_atomically(folder / self._name, json.dumps(content))
        except (McinferError, OSError) as exc:
            _log.debug("how the batch is split is not kept: %s", exc)


def _folder() -> AbstractContextManager[Path]:
    folder = os.environ.get(_FOLDER)
    return opened_folder(Path(folder), own=True) if folder else Cache.default().notes("splits")


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
