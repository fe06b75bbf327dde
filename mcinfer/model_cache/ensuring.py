"""A prepared model for a process that imports no engine: a child finds or makes it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcinfer.config import EngineOptions
from mcinfer.errors import BuildError
from mcinfer.model_cache.cache import Cache, CacheUnusableError, Held
from mcinfer.model_cache.child import ChildFailedError, run_child
from mcinfer.model_cache.contents import Progress


def ensure_prepared(
    model: str | os.PathLike[str],
    options: EngineOptions = EngineOptions(),
    progress: Progress | None = None,
) -> Held:
    """The prepared form of a model, for the CPU and ONNX Runtime; it is made if there is none yet.

    Args:
        model: Path of an ONNX model.
        options: What the engine that will load it is asked for.
        progress: Is told how far it is.

    Returns:
        The entry of the cache, which is the caller's to close.

    Raises:
        BuildError: It cannot be prepared, in the engine's own words, or the cache cannot be used.
    """
    path = Path(model).absolute()
    request = {
        "model": str(path),
        "device": "cpu:0",
        "threads": 1,
        "prepare": "always",
        "variable_weights": [*options.variable_weights],
        "session_config": dict(options.session_config),
        "provider_options": dict(options.provider_options),
    }

    def tick(state: Mapping[str, Any]) -> None:
        if "seconds" in state and progress is not None:
            progress(state)

    try:
        answer = run_child({"task": "ensure", "engine": "onnxruntime", "request": request}, tick)
    except ChildFailedError as exc:
        raise BuildError(f"{path}: it could not be prepared: {exc}") from exc
    if "error" in answer:
        raise BuildError(answer["error"])
    try:
        held = Cache.default().open(answer["key"])
    except CacheUnusableError as exc:
        raise BuildError(f"{path}: {exc}") from exc
    if held is None:  # its limit is too small, or somebody has just cleared it
        raise BuildError(f"{path}: it was prepared, and is not in the cache any more")
    return held
