"""How a module of this package is started as a process of its own.

It gets the import path of its parent later, by its own channel, and nothing else of the interpreter's state.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)
_QUIET = {"ORT_DISABLE_TELEMETRY": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Unless the user says otherwise, no runtime sends anything anywhere: ONNX Runtime from 1.29 on does by
default (its docs/Privacy.md), and starts threads for it in every process. And NumPy's linear algebra, which
nobody uses here, starts no threads: they were a third of the CPU time of a start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What the children of a master get of it, also those that are started later, when it has gone elsewhere.

    Attributes:
        path: Of its imports, all absolute.
        pythonpath: The variable PYTHONPATH, likewise; None where it is not set.
        folder: The working folder, absolute; it may be gone by now.
    """

    path: list[str]
    pythonpath: str | None
    folder: str

    @classmethod
    def now(cls) -> "Inherited":
        """As it is at this moment."""
        pythonpath = os.environ.get("PYTHONPATH")
        if pythonpath:  # an empty one is none, while an empty entry is the working folder
            pythonpath = os.pathsep.join(_absolute(pythonpath.split(os.pathsep)))
        folder = [*_absolute([""]), "/"][0]
        return cls(path=import_path(), pythonpath=pythonpath, folder=folder)

    def folder_now(self) -> str:
        """The working folder, or the root where it is gone."""
        return self.folder if os.access(f"{self.folder}/.", os.X_OK) else "/"


def import_path() -> list[str]:
    """`sys.path` as a child needs it: all absolute."""
    return _absolute(sys.path)


def _absolute(entries: Iterable[str]) -> list[str]:
    """Entries of an import path; without relative ones where the working folder is gone."""
    found = []
    for entry in entries:
        with suppress(OSError):
            found.append(os.path.abspath(entry))
    return found


def command(module: str, *arguments: str) -> list[str]:
    """What to run."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """This process's variables, with what the child needs to find this package."""
    return {**_QUIET, **os.environ, "PYTHONPATH": _PACKAGE_PARENT}
