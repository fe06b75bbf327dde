"""Adapters to inference runtimes, one module each, by name; a runtime is imported only when it is opened.

A module has a function `load`, which gives an `Engine` for an `EngineRequest`. It may have ``DEVICES`` and
``OPTIONS``: kinds of devices, and those options of `base.LACKS` that it takes. All others are refused before
`load`. docs/engines.md shows one. The adapter of ONNX Runtime also has `prepared`, whose result its `load`
gets, and `facts`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from mcinfer.config import EngineOptions
from mcinfer.engines.base import LACKS, Engine, EngineRequest, memory_limit
from mcinfer.engines.names import ENGINES
from mcinfer.engines.preparation import identity
from mcinfer.errors import (
    BuildError,
    EngineError,
    MissingDependencyError,
    quotable,
    shortened,
)
from mcinfer.model_cache.children import Progress
from mcinfer.model_cache.onnx_files import check_regular
from mcinfer.private import in_words
from mcinfer.process import give_back_freed_memory
from mcinfer.protocol import MAX_NOTE, MAX_NOTES, TensorFields
from mcinfer.specs import TensorSpec

_MAX_NAME_CHARACTERS = 1 << 20
"""Characters in all names of inputs, outputs and replaceable weights, which messages carry."""

ENTRY_POINTS = "mcinfer.engines"
"""The group of entry points whose names are engines."""

_FOR_TESTS = "fake"

OWN = {name: f"mcinfer.engines._{name}" for name in (*ENGINES, _FOR_TESTS)}
"""The engines of mcinfer, as setup.cfg lists them: a worker with one of these reads no package's metadata."""


def _adapter(name: str) -> Any:
    """The module of the engine of this name; raises as `open_engine` does."""
    try:
        module = import_module(OWN[name]) if name in OWN else _installed(name)
    except (MissingDependencyError, BuildError):
        raise
    except Exception as exc:  # of any class: the runtime or the module is there, and broken
        raise BuildError(f"engine {name} cannot be imported: {exc}") from exc
    if not callable(getattr(module, "load", None)):
        raise BuildError(f"engine {name}: {module!r} has no function load")
    return module


def _installed(name: str) -> Any:
    """What another package offers as the engine of this name."""
    from importlib.metadata import entry_points

    offered = entry_points(group=ENTRY_POINTS)
    if name in offered.names:
        return offered[name].load()
    names = sorted({*OWN, *offered.names} - {_FOR_TESTS})
    raise BuildError(f"engine: got {name!r}, expected one of {names}")


def _check_request(name: str, module: Any, request: EngineRequest) -> None:
    """Raise `BuildError` for a device or an option that the engine does not say that it has."""
    kinds = getattr(module, "DEVICES", ())
    if kinds and request.device.kind not in kinds and not request.options.allow_fallback:
        raise BuildError(
            f"engine {name} has no device {request.device}, expected one of "
            f"{[f'{kind}:0' for kind in kinds]}"
        )
    taken, usual = getattr(module, "OPTIONS", ()), EngineOptions()
    for option, lack in LACKS.items():
        got = getattr(request.options, option)
        if option not in taken and got and got != getattr(usual, option):
            said = [*got] if isinstance(got, (tuple, Mapping)) else repr(got)
            raise BuildError(f"{option}: got {said}, but the engine {name} {lack}")


def open_engine(name: str, request: EngineRequest, progress: Progress | None = None) -> Engine:
    """Load a model with the engine of this name.

    Args:
        name: Of mcinfer's own engines, or of an entry point of the group `ENTRY_POINTS`.
        request: The model, and how to load it.
        progress: Called if the model is prepared first.

    Raises:
        BuildError: There is no such engine, or it cannot load the model; with the engine's message.
        MissingDependencyError: The runtime's package is not installed; says what to install.
    """
    module = _adapter(name)
    _check_request(name, module, request)
    with suppress(OSError):  # the engine names a file that does not exist or cannot be read
        check_regular(request.model)

    def load() -> Engine:
        prepared = (module.prepared(request, progress),) if hasattr(module, "prepared") else ()
        engine = module.load(request, *prepared)
        if not isinstance(engine, Engine):
            raise BuildError(f"engine {name}: load gave {type(engine).__name__}, expected Engine")
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
        return dict(module.facts(request))
    except OSError as exc:
        raise BuildError(f"{request.model}: {exc}") from exc


def described(engine: Engine, request: EngineRequest, notes: Sequence[str] = ()) -> dict[str, Any]:
    """What a master learns of a model that an engine has loaded: fields of BUILD_FINISH.

    `notes` are further remarks for the user, before the engine's.

    Raises:
        BuildError: The model's files are others than `EngineRequest.content` says.
    """
    about, content = engine.description, request.content
    facts = {
        "inputs": _fields(engine.spec.inputs),
        "outputs": _fields(engine.spec.outputs),
        "weights": _fields(engine.weights),
        "providers": engine.providers,
        "concurrent": engine.concurrent,
        "reaches": engine.reaches,
        "about": dict(about.about),
        "properties": dict(about.properties),
        "overridable": _fields(about.overridable),
        "provider_options": {n: dict(given) for n, given in about.provider_options.items()},
    }
    if content is not None:
        if not content.unchanged():
            raise BuildError(f"{request.model} was changed while it was loaded")
        facts["model"] = identity(request, content, engine.version)
        facts |= {"random": content.random, "ragged": content.ragged}
    notes = [*notes, *(in_words(note, request.model) for note in engine.notes)]
    facts["notes"] = tuple(note[:MAX_NOTE] for note in notes[:MAX_NOTES])
    return facts


def _fields(specs: Sequence[TensorSpec]) -> tuple[TensorFields, ...]:
    return tuple((spec.name, spec.element_type, spec.shape) for spec in specs)
