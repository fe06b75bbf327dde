"""From what a user named to a loaded model: the targets in turn, sharing where there is a group.

Ownership: a `Session` belongs to the models that have it. A group (`SharedModels`) only looks on: what the
last of its models lets go of is gone.
"""

import hashlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from mcinfer.config import Device
from mcinfer.engines import open_engine, prepared_facts
from mcinfer.engines.base import EngineRequest
from mcinfer.errors import BuildError
from mcinfer.machine import whole_cpus
from mcinfer.model_cache.keys import FOLDER_KEY
from mcinfer.mslite._configuration import Sections
from mcinfer.mslite._session import Session, pinned
from mcinfer.mslite._sources import ModelBuffer, put_weights, with_dims
from mcinfer.mslite._targets import Attempt, ModelType, attempts, open_first, pinned_cores
from mcinfer.mslite._weights import Sharing, check_same
from mcinfer.mslite.context import Context
from mcinfer.shm.weights import open_weights

_log = logging.getLogger("mcinfer.mslite")

Dims = Mapping[str, Sequence[int]]
"""By input, its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a model was built from, so that it can be built again with other sizes.

    Attributes:
        name: What the model is called.
        model: Absolute path, or content.
        model_type: What kind of model that is.
        context: Where it runs.
        sections: Its configuration.
        weights: The content of its file of weights, where it was given.
        folder: Where its weights lie, where that was named.
        variable_weights: Names of weights that may be replaced.
        sharing: With which processes weights are shared.
    """

    name: str
    model: str | bytes
    model_type: ModelType
    context: Context
    sections: Sections
    weights: bytes | None = None
    folder: str | None = None
    variable_weights: tuple[str, ...] = ()
    sharing: Sharing = field(default_factory=Sharing)


class SharedModels:
    """What the models of a group share.

    Args:
        weights: Whether models of one source have one session.
        workspace: Whether their memory between operators is one arena.
    """

    def __init__(self, *, weights: bool, workspace: bool) -> None:
        self.weights = weights
        self.workspace = workspace
        self._lock = threading.Lock()
        self._sessions: WeakValueDictionary[object, Session] = WeakValueDictionary()

    def load(self, source: Source, dims: Dims | None, attempt: Attempt) -> Session:
        """A session that is there already, or a new one; one thread at a time."""
        with self._lock:
            if not self.weights:
                return _load(source, dims, attempt, workspace=self.workspace)
            key = _identity(source, dims, attempt)
            session = self._sessions.get(key)
            if session is None:
                session = _load(source, dims, attempt, workspace=self.workspace)
                self._sessions[key] = session
            return session


def open_session(
    source: Source, dims: Dims | None, group: SharedModels | None, *, stacklevel: int
) -> Session:
    """Load a model.

    Args:
        source: Where it comes from.
        dims: Other sizes of its inputs; None for its own.
        group: With which others it shares.
        stacklevel: Of the warning of a target that is not here, as of `warnings.warn`, seen from the
            caller.

    Raises:
        McinferError: What the last target's engine said.
        OSError: The system has no memory or descriptor left for a buffer, or the file is gone.
    """
    if dims is not None and source.model_type is not ModelType.ONNX:
        raise BuildError("its sizes are fixed, and can be changed in ONNX models alone")

    def build(attempt: Attempt) -> Session:
        if group is None:
            return _load(source, dims, attempt, workspace=False)
        return group.load(source, dims, attempt)

    groups = attempts(source.context, source.model_type, source.sections)
    return open_first(groups, build, stacklevel=stacklevel + 1)


def _load(source: Source, dims: Dims | None, attempt: Attempt, *, workspace: bool) -> Session:
    cores: Sequence[int] = ()
    if attempt.kind == "cpu":
        [cores] = pinned_cores(source.context, 1) or [()]
    cpus = whole_cpus()
    config = dict(attempt.options.session_config)
    model, folder = source.model, source.folder
    if dims is not None:
        folder = folder or (os.path.dirname(model) if isinstance(model, str) else None)
        model = with_dims(model, dims)
    if workspace and attempt.engine == "onnxruntime":
        config["session.use_env_allocators"] = "1"
    with ExitStack() as opened:
        if isinstance(source.model, bytes) and source.weights is not None:
            if source.model_type is not ModelType.ONNX:
                raise BuildError("weight_bytes: only ONNX models have their weights in such a file")
            folder = put_weights(source.model, source.weights, opened)
        if folder is not None and attempt.engine == "onnxruntime":
            config[FOLDER_KEY] = folder
        if isinstance(model, bytes):
            buffer = ModelBuffer(model)
            opened.callback(buffer.close)
            model = buffer.path
        request = EngineRequest(
            model=model,
            prepare=_preparing(source, dims, attempt),
            variable_weights=source.variable_weights,
            device=Device(attempt.kind, attempt.index),
            threads=attempt.options.threads or min(len(cores) or cpus, cpus),
            inter_op_threads=attempt.options.inter_op_threads,
            session_config=config,
            provider_options=attempt.options.provider_options,
        )
        if source.sharing.handle is not None and dims is None:
            request = _with_shared_weights(attempt.engine, request, source.sharing.handle, opened)
        with pinned(cores) if cores else nullcontext():
            engine = open_engine(attempt.engine, request)
    for note in engine.notes:
        _log.warning("%s: %s", source.name, note)
    return Session(engine, cores)


def _preparing(source: Source, dims: Dims | None, attempt: Attempt) -> str:
    """Whether to prepare the model: of other sizes it is another one, with the same weights once more."""
    if dims is not None:
        return "never"
    return attempt.options.prepare if source.sharing.pids is None else "always"


def _with_shared_weights(
    engine: str, request: EngineRequest, handle: int, opened: ExitStack
) -> EngineRequest:
    """The request for the model that another process has prepared and shares.

    Args:
        engine: The engine's name.
        request: For the same model here.
        handle: The other's.
        opened: Is closed after the model was loaded, which holds it by itself then.

    Raises:
        BuildError: It is for another model, device or engine.
        WeightAccessError: It cannot be had.
    """
    here = prepared_facts(engine, request)
    shared = opened.enter_context(open_weights(handle))
    check_same(shared.facts, here)
    return replace(request, model=shared.model)


def _identity(source: Source, dims: Dims | None, attempt: Attempt) -> object:
    """Equal for models that one loaded model can serve. It holds no content: it lives with the session."""
    content: object
    if isinstance(source.model, str):
        entry = os.stat(source.model)
        content = (entry.st_dev, entry.st_ino, entry.st_size, entry.st_mtime_ns)
    else:
        content = hashlib.sha256(source.model).digest()
    weights = None if source.weights is None else hashlib.sha256(source.weights).digest()
    sizes = None if dims is None else tuple((name, *shape) for name, shape in dims.items())
    cpu = source.context.cpu
    binding = (cpu.thread_affinity_mode, *cpu.thread_affinity_core_list)
    names = source.variable_weights
    return (content, weights, source.folder, sizes, repr(attempt), binding, names, source.sharing)
