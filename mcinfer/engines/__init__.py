"""Adapters to inference runtimes, one file each; a runtime is imported only when it is opened."""

from importlib import import_module

from mcinfer.engines.base import Engine, EngineRequest
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
    return engine
