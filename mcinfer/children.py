"""How a module of this package is started as a process of its own.

It gets the import path of its parent later, by its own channel, and nothing else of the interpreter's state.
"""

import os
import sys
from pathlib import Path

_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)
_QUIET = {"ORT_DISABLE_TELEMETRY": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Unless the user says otherwise, no runtime sends anything anywhere: ONNX Runtime from 1.29 on does by
default (its docs/Privacy.md), and starts threads for it in every process. And NumPy's linear algebra, which
nobody uses here, starts no threads: they were a third of the CPU time of a start."""


def command(module: str, *arguments: str) -> list[str]:
    """What to run."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """This process's variables, with what the child needs to find this package."""
    return {**_QUIET, **os.environ, "PYTHONPATH": _PACKAGE_PARENT}
