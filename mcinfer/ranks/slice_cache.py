"""The slices of a model in the cache: cut and checked once, for all groups of ranks on this machine.

::

    facts (content of the model, slicer, ranks, and of prepared segments: runtime, CPU, options) ──► an entry
        └─ none yet ──► a child: slice_model, checked against the whole model
                        └─ prepared: each segment of each rank optimised and packed

An entry has the report of the slicer, and a folder for each rank (``rank0``, …) with its plan and segments.
Prepared segments have their weights there; all ranks of the same number, in whatever group, map the same
files. The weights of other segments lie in ``model0.data``, …, as the slicer writes them.

Ranks read their slices nowhere but there, so a cache that cannot be used is a `BuildError`.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mcinfer.engines import _onnxruntime
from mcinfer.engines.base import EngineRequest
from mcinfer.engines.preparation import (
    DRAFT,
    OWN_COPY,
    Making,
    content_of,
    facts_of,
    is_transient,
    limit_files,
    request_of,
)
from mcinfer.errors import BuildError, shortened
from mcinfer.model_cache import FOLDER_KEY, is_large
from mcinfer.model_cache.cache import FAILURE_FILE, CacheUnusableError, Held
from mcinfer.model_cache.children import ChildFailedError, Progress
from mcinfer.ranks.collectives.base import Group
from mcinfer.ranks.slices import RankEngine, prepare
from mcinfer.ranks.slicing.plans import REPORT_FILE, rank_folder

_SLOW = "cutting %s into slices once for this machine; later starts are quick"


def find_or_make_slices(
    request: EngineRequest, parallel: tuple[int, int], progress: Progress | None = None
) -> Held:
    """The slices of the request's model; cuts it if there are none yet.

    Args:
        request: The whole model. `prepare` says whether the slices are prepared; ``"auto"`` goes by the size
            of the whole model.
        parallel: Over how many ranks the weights of each layer are cut, and the number of stages.
        progress: Called while the slices are made.

    Raises:
        BuildError: The model cannot be read or cut, the slices do not give what the model gives, or the cache
            cannot be used.
    """
    if folder := request.options.session_config.get(FOLDER_KEY):
        raise BuildError(
            f"{FOLDER_KEY}: got {folder!r}, but a model that is cut has its external data beside it"
        )
    tensor, pipeline = parallel
    try:
        content = content_of(request)
        is_prepared = _is_to_be_prepared(request)
        facts = {
            "engine": "slices",
            **(facts_of(request, _onnxruntime.RUNTIME, content) if is_prepared else {}),
            "model": content.digest,
            "slicer": _slicer(),
            "tensor": tensor,
            "pipeline": pipeline,
        }
        making = Making(
            function=fill,
            arguments=[[tensor, pipeline, is_prepared]],
            request=request,
            content=content,
            slow=_SLOW,
            kind=f", {tensor * pipeline} slices",
            progress=progress,
        )
        return making.open(facts)
    except (CacheUnusableError, ChildFailedError, OSError) as exc:
        text = DRAFT.sub("…", shortened(str(exc)))
        raise BuildError(f"{request.model}: its slices could not be made: {text}") from exc


def _is_to_be_prepared(request: EngineRequest) -> bool:
    if request.device.kind != "cpu" or request.options.prepare == "never":
        return False
    return request.options.prepare == "always" or is_large(request.model, None)


@cache
def _slicer() -> str:
    """The version of the slicer: a digest of its code, any change of which may change the slices."""
    digest = hashlib.sha256()
    code = (file for file in files("mcinfer.ranks.slicing").iterdir() if file.name.endswith(".py"))
    for file in sorted(code, key=lambda file: file.name):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def load_slice(request: EngineRequest, held: Held, group: Group) -> RankEngine:
    """Load this rank's slice; the engine owns the held entry then. Raises what `RankEngine` does."""
    place = held.folder / rank_folder(group.rank)
    engine = RankEngine(
        # The weights of segments that are not prepared lie beside this file.
        replace(request, model=str(held.folder / f"model{group.rank}.onnx")),
        group,
        place,
        deliver_everywhere=False,
    )
    notes = []
    checked = json.loads((held.folder / REPORT_FILE).read_bytes())["check"]
    if checked["state"] != "passed":
        notes.append(f"its slices were not compared with the whole model: {checked['reason']}")
    failure = held.folder / FAILURE_FILE
    if failure.exists():
        text = failure.read_text(encoding="utf-8")
        notes.append(f"{OWN_COPY}: its slices cannot be prepared: {text}")
    elif "cpu" in held.facts:
        engine.prepared = held.key
    engine.notes = tuple(notes)
    engine.entry = held
    return engine


# In the child.


def fill(
    progress: Progress,
    ranks: tuple[int, int, bool],
    request: Mapping[str, Any],
    folder: str,
    most_file_bytes: int,
) -> None:
    """Write checked slices into a folder; in a child.

    Args:
        progress: Called when something was done.
        ranks: Over how many ranks the weights of each layer are cut, the number of stages, and whether the
            slices are prepared.
        request: As JSON.
        folder: The entry's folder.
        most_file_bytes: The size that no file may exceed.

    Raises:
        BuildError: The model cannot be cut, or its slices are not right.
    """
    from mcinfer.ranks.slicing.slicer import slice_model  # imports onnx, which ranks do not need

    tensor, pipeline, is_prepared = ranks
    wanted, target = request_of(request), Path(folder)
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        slices = Path(draft) / "slices"
        try:
            slice_model(
                wanted.model,
                slices,
                tensor=tensor,
                pipeline=pipeline,
                segments=True,
                progress=progress,
            )
            limit_files(most_file_bytes)
            names = [rank_folder(rank) for rank in range(tensor * pipeline)]
            is_prepared = is_prepared and _prepare_all(wanted, slices, target, names, progress)
            for file in slices.iterdir():
                if file.name == REPORT_FILE or not is_prepared:
                    file.rename(target / file.name)
        except BuildError:  # that there is no such model is an OSError, too
            raise
        except OSError as exc:  # such as that of a full disk
            raise BuildError(f"the slices could not be written: {exc}") from exc


def _prepare_all(
    request: EngineRequest, slices: Path, target: Path, names: Sequence[str], progress: Progress
) -> bool:
    """Prepare the segments of all ranks; False, with a note in the entry, if the runtime cannot."""
    try:
        for rank, name in enumerate(names):
            progress({"phase": "preparing", "rank": rank})
            (target / name).mkdir()
            # The weights lie beside this file, or would.
            model = str(slices / f"model{rank}.onnx")
            prepare(replace(request, model=model), slices / name, target / name)
    except BuildError as exc:
        if is_transient(str(exc)):
            raise
        # They run as they are, with more memory.
        for name in names:
            shutil.rmtree(target / name, ignore_errors=True)
        (target / FAILURE_FILE).write_text(str(exc), encoding="utf-8")
        return False
    return True
