"""Adapters to inference runtimes, one file each; a runtime is imported only when it is opened."""

import ctypes
from importlib import import_module
from typing import Any

from mcinfer.engines.base import Engine, EngineRequest
from mcinfer.engines.preparation import describe
from mcinfer.errors import BuildError

_ENGINES = {
    "onnxruntime": "mcinfer.engines._onnxruntime",
    "mindspore": "mcinfer.engines._mindspore",
    "mindspore_lite": "mcinfer.engines._mindspore_lite",
    "fake": "mcinfer.engines._fake",
}


def open_engine(name: str, request: EngineRequest) -> Engine:
    """Load a model with the engine of that name.

    Raises:
        BuildError: There is no such engine, or it cannot load the model; the engine's own words.
        MissingDependencyError: The runtime's package is not installed; says what to install.
    """
    if name not in _ENGINES:
        raise BuildError(f"engine: got {name!r}, expected one of {[*_ENGINES]}")
    engine: Engine = import_module(_ENGINES[name]).load(request)
    give_back_memory()
    return engine


def prepared_facts(name: str, request: EngineRequest) -> dict[str, Any]:
    """What the model's prepared form would be made from, and found by.

    Raises:
        BuildError: There is no such thing for this engine or device, or the model cannot be read.
    """
    runtime = getattr(import_module(_ENGINES[name]), "RUNTIME", None)
    if runtime is None or request.device.kind != "cpu":
        raise BuildError(
            f"{request.model}: weights are shared by engine onnxruntime on the CPU, got {name} on "
            f"{request.device}"
        )
    try:
        return describe(request, runtime)
    except OSError as exc:
        raise BuildError(f"{request.model}: {exc}") from exc


def give_back_memory() -> None:
    """Give the system back what loading took and freed: glibc keeps it for later (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
