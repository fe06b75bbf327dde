"""Models cut over ranks: the slicer, the collectives, and the engine of one rank."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mcinfer.errors import BuildError, EngineError, RankDiedError, shortened
from mcinfer.specs import STRING

if TYPE_CHECKING:  # at a run, workers that are ranks alone import it
    from mcinfer.engines.base import Engine, EngineRequest
    from mcinfer.model_cache.children import Progress
    from mcinfer.ranks.collectives.base import Group


def open_rank(
    request: "EngineRequest",
    rank: int,
    parallel: tuple[int, int],
    descriptors: Sequence[int],
    progress: "Progress",
) -> "Engine":
    """Load one rank of a model that a master cuts over several; all ranks call this.

    Args:
        request: The whole model, and how and where to load it.
        rank: The number of this process in its group.
        parallel: Over how many ranks each layer is cut, and the number of stages.
        descriptors: What the master made for the group's collectives; they are this function's from now on.
        progress: Called while the slices are made.

    Raises:
        BuildError: The model cannot be cut, or this rank cannot load its slice.
        MissingDependencyError: A package is missing; says which.
        RankDiedError: Another rank could not load its slice.
        CollectiveTimeoutError: Another rank did not come in time.
    """
    from mcinfer.ranks.collectives.base import PeerFailedError
    from mcinfer.ranks.collectives.shm import inherit
    from mcinfer.ranks.slice_cache import find_or_make_slices, load_slice
    from mcinfer.ranks.slices import break_off, is_of_another_rank

    tensor, pipeline = parallel
    group = inherit(rank, tensor * pipeline, descriptors)

    def report(state: Mapping[str, Any]) -> None:
        group.check()
        progress(state)

    try:
        held = find_or_make_slices(request, parallel, report)
        try:
            engine = load_slice(request, held, group)
        except EngineError as exc:
            if is_of_another_rank(exc):
                raise
            where = f"rank {rank} ({request.device}, pid {os.getpid()})"
            raise type(exc)(shortened(f"{where}: {exc}")) from exc
        specs = (*engine.spec.inputs, *engine.spec.outputs)  # a name may be an input and an output
        strings = dict.fromkeys(spec.name for spec in specs if spec.element_type == STRING)
        if strings:
            raise BuildError(
                f"{[*strings]} are strings, which a model that is cut over ranks cannot have"
            )
    except PeerFailedError as exc:
        raise RankDiedError(str(exc)) from exc
    except Exception as exc:
        if is_of_another_rank(exc):
            raise RankDiedError(str(exc)) from exc
        break_off(group, exc)
        raise
    return engine


def open_slice(engine: str, request: "EngineRequest", group: "Group") -> "Engine":
    """Load this rank's slice of a model in a group that joined itself, once all its ranks have called this.

    Args:
        engine: Name of the engine.
        request: The slice, and how and where to load it.
        group: All ranks of the model; the caller's.

    Raises:
        BuildError: The engine runs no slices, or cannot load this one; with the engine's message.
        MissingDependencyError: A package is missing; says which.
    """
    from mcinfer.engines.adapters import checked
    from mcinfer.ranks.slices import RankEngine

    if engine != "onnxruntime":
        raise BuildError(f"engine {engine} runs no slices of a model, expected onnxruntime")
    return checked(request.model, lambda: RankEngine(request, group))
