"""Putting mcinfer's session in the place of ONNX Runtime's, for programs that cannot be edited."""

import sys
import threading
from typing import Any

from mcinfer.ort.session import InferenceSession, PlainSession

_NAME = "InferenceSession"
_CHANGING = threading.Lock()


def install(**defaults: Any) -> None:
    """Put `InferenceSession` in the place of ``onnxruntime.InferenceSession``, until `uninstall`.

    Modules that import the name from now on get mcinfer's class, and so do ONNX Runtime's own modules that
    have it already. Call it before the program's modules are imported: a module of another package that has
    taken the name keeps the plain class. mcinfer's own plain sessions stay plain.

    Args:
        defaults: Arguments of every session that does not give its own: ``devices``, and further arguments
            of `mcinfer.Master`. A second call replaces those of the first.
    """
    with _CHANGING:
        InferenceSession._defaults = defaults
        _replace(PlainSession, InferenceSession)


def uninstall() -> None:
    """Undo `install`; sessions that are open stay as they are. Safe to call again."""
    with _CHANGING:
        InferenceSession._defaults = {}
        _replace(InferenceSession, PlainSession)


def _replace(old: type, new: type) -> None:
    for name, module in [*sys.modules.items()]:
        package = name.partition(".")[0]
        if package == "onnxruntime" and vars(module).get(_NAME) is old:
            setattr(module, _NAME, new)
