"""Adapters to inference runtimes, one file each; a runtime is imported only when it is opened."""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from mcinfer.engines.base import Engine, EngineRequest, memory_limit
from mcinfer.errors import (
    BuildError,
    EngineError,
    MissingDependencyError,
    quotable,
    shortened,
)
from mcinfer.model_cache.children import Progress
from mcinfer.model_cache.onnx_files import check_regular
from mcinfer.process import give_back_freed_memory

_MAX_NAME_CHARACTERS = 1 << 20
"""Characters in all names of inputs, outputs and replaceable weights, which messages carry."""

_OF_OPENVINO = {
    "precision": "computes in the model's own types; openvino can change them",
    "streams": "has no streams; openvino has, and onnxruntime has concurrent_runs",
}
_ENGINES = ("onnxruntime", "openvino", "mindspore", "mindspore_lite", "fake")


def _adapter(name: str) -> Any:
    if name not in _ENGINES:
        raise BuildError(f"engine: got {name!r}, expected one of {[*_ENGINES]}")
    try:
        return import_module(f"mcinfer.engines._{name}")
    except MissingDependencyError:
        raise
    except (ImportError, AttributeError) as exc:  # the runtime is there, and broken
        raise BuildError(f"engine {name} cannot be imported: {exc}") from exc


def open_engine(name: str, request: EngineRequest, progress: Progress | None = None) -> Engine:
    """Load a model with the engine of this name.

    Args:
        name: Name of the engine.
        request: The model, and how to load it.
        progress: Called if the model is prepared first.

    Raises:
        BuildError: There is no such engine, or it cannot load the model; with the engine's message.
        MissingDependencyError: The runtime's package is not installed; says what to install.
    """
    module = _adapter(name)
    for option, lack in _OF_OPENVINO.items():
        if (got := getattr(request.options, option)) and name != "openvino":
            raise BuildError(f"{option}: got {got!r}, but the engine {name} {lack}")
    with suppress(OSError):  # the engine names a file that does not exist or cannot be read
        check_regular(request.model)

    def load() -> Engine:
        prepared = (module.prepared(request, progress),) if hasattr(module, "prepared") else ()
        engine: Engine = module.load(request, *prepared)
        return engine

    return checked(request.model, load)


def checked(model: str, load: Callable[[], Engine]) -> Engine:
    """The engine that `load` gives for the model at this path; raises `BuildError` as `open_engine` does."""
    try:
        engine = load()
    except EngineError as exc:
        if quotable(exc):
            raise
        raise type(exc)(shortened(str(exc))) from None
    except MemoryError as exc:
        text = str(exc) or "out of memory"
        raise BuildError(f"{model}: {text}{memory_limit()}") from exc
    _check_names(engine)
    give_back_freed_memory()
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
    """What the prepared model would be made from: its identity in the cache. `BuildError` if impossible."""
    module = _adapter(name)
    if not hasattr(module, "prepared") or request.device.kind not in ("cpu", "cuda"):
        raise BuildError(
            f"{request.model}: weights are shared by engine onnxruntime on the CPU and on CUDA devices, got "
            f"{name} on {request.device}"
        )
    try:
        facts: dict[str, Any] = module.facts(request)
        return facts
    except OSError as exc:
        raise BuildError(f"{request.model}: {exc}") from exc
