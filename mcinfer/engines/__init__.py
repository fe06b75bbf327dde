"""Adapters to inference runtimes, one file each; a runtime is imported only when it is opened."""

import ctypes
from contextlib import suppress
from importlib import import_module
from typing import Any

from mcinfer.engines.base import Engine, EngineRequest, memory_limit
from mcinfer.errors import BuildError, EngineError, quotable, shortened
from mcinfer.model_cache.building import Progress
from mcinfer.model_cache.onnx_files import check_regular

_MAX_NAME_CHARACTERS = 1 << 20
"""In the names of a model's inputs, outputs and replaceable weights, which messages carry."""

_ENGINES = {
    "onnxruntime": "mcinfer.engines._onnxruntime",
    "mindspore": "mcinfer.engines._mindspore",
    "mindspore_lite": "mcinfer.engines._mindspore_lite",
    "fake": "mcinfer.engines._fake",
}


def open_engine(name: str, request: EngineRequest, progress: Progress | None = None) -> Engine:
    """Load a model with the engine of that name.

    Args:
        name: The engine's.
        request: What to load.
        progress: Called with the progress, if the model is prepared first.

    Raises:
        BuildError: There is no such engine, or it cannot load the model; the engine's own words.
        MissingDependencyError: The runtime's package is not installed; says what to install.
    """
    if name not in _ENGINES:
        raise BuildError(f"engine: got {name!r}, expected one of {[*_ENGINES]}")
    module = import_module(_ENGINES[name])
    with suppress(OSError):  # a file that is not there or may not be read is for the engine to name
        check_regular(request.model)
    try:
        if hasattr(module, "prepared"):
            engine: Engine = module.load(request, module.prepared(request, progress))
        else:
            engine = module.load(request)
    except EngineError as exc:
        if quotable(exc):
            raise
        raise type(exc)(shortened(str(exc))) from None
    except MemoryError as exc:
        text = str(exc) or "out of memory"
        raise BuildError(f"{request.model}: {text}{memory_limit()}") from exc
    _check_names(engine)
    give_back_memory()
    return engine


def _check_names(engine: Engine) -> None:
    specs = (*engine.spec.inputs, *engine.spec.outputs, *engine.weights)
    symbols = [size for spec in specs for size in spec.shape if isinstance(size, str)]
    count = sum(map(len, [*(spec.name for spec in specs), *symbols]))
    if count > _MAX_NAME_CHARACTERS:
        raise BuildError(
            f"got {count} characters in the names of {len(specs)} inputs and outputs, expected at most "
            f"{_MAX_NAME_CHARACTERS}"
        )


def prepared_facts(name: str, request: EngineRequest) -> dict[str, Any]:
    """What the model's prepared form would be made from, and found by.

    Raises:
        BuildError: There is no such thing for this engine or device, or the model cannot be read.
    """
    module = import_module(_ENGINES[name])
    if not hasattr(module, "prepared") or request.device.kind != "cpu":
        raise BuildError(
            f"{request.model}: weights are shared by engine onnxruntime on the CPU, got {name} on "
            f"{request.device}"
        )
    try:
        facts: dict[str, Any] = module.facts(request)
        return facts
    except OSError as exc:
        raise BuildError(f"{request.model}: {exc}") from exc


def give_back_memory() -> None:
    """Give the system back what loading took and freed: glibc keeps it for later (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
