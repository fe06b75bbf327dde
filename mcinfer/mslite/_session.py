"""A model loaded in this process: from the user's arguments to an engine, run on arrays.

::

    Source ── targets in turn ──► engine ──► Session     one for the models of a group that shares weights

Ownership: inputs are borrowed during a run, which reads them in place; outputs are new arrays, which belong
to the caller. A `LoadedModel` belongs to its models; a group (`SharedModels`) holds only weak references.
Threads may run at once if the engine allows it, else they take turns.
"""

import ctypes
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer import sharding
from mcinfer.config import CoreShare, Device, PrepareKind
from mcinfer.engines import open_engine, prepared_facts
from mcinfer.engines.base import Buffer, Engine, EngineRequest, Produced, Strings
from mcinfer.errors import BuildError, EngineError, raised_by_handler, requires
from mcinfer.machine import whole_cpus
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.model_cache.onnx_files import scan
from mcinfer.mslite._checks import Sections
from mcinfer.mslite._ranks import Membership, is_slice, place_of
from mcinfer.mslite._targets import Attempt, ModelType, attempts, open_first, pinned_cores
from mcinfer.mslite.context import Context
from mcinfer.private import ModelInMemory, PrivateFolder, in_words, inherited
from mcinfer.ranks import open_slice
from mcinfer.requests.tensors import as_input, string_rows
from mcinfer.requests.weights import check_weights
from mcinfer.sharding import Shape
from mcinfer.shm.weights import SharedWeights, WeightOwner, open_weights
from mcinfer.specs import ELEMENT_TYPES, STRING, ModelSpec, TensorSpec, numpy_dtype

_log = logging.getLogger("mcinfer.mslite")

_MAX_SHAPES = 256

Dims = Mapping[str, Sequence[int]]
"""Shapes by input."""


@contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """Bind the calling thread to these cores, if any; threads that it starts inherit them."""
    before = os.sched_getaffinity(0)
    if not cores:
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class LoadedModel:
    """One loaded model, the engine's owner. Any thread may call `run`.

    Attributes:
        weights: The weights that were replaced, by name; the mapping does not change, it is replaced.
        owner: The owner of its weights, where they are shared on a card.
        output_shapes: From the inputs' shapes to the outputs', None for one that only a run shows;
            InvalidInputError if they do not fit the model.
    """

    def __init__(
        self, engine: Engine, cores: Sequence[int], owner: WeightOwner | None = None
    ) -> None:
        """Take over the engine, which is closed when the session is garbage."""
        self.engine = engine
        self.owner = owner
        self.spec = engine.spec
        self.weights: Mapping[str, NDArray[Any]] = {}
        self.output_shapes = lru_cache(_MAX_SHAPES)(partial(_output_shapes, engine.spec))
        self._cores = tuple(cores)
        self._turns = nullcontext() if engine.concurrent else threading.Lock()
        self._updating = threading.Lock()
        for spec in (*engine.spec.inputs, *engine.spec.outputs, *engine.weights):
            if ELEMENT_TYPES[spec.element_type].bits % 8:
                raise BuildError(
                    f"{spec}: elements of less than a byte cannot be bound to arrays; "
                    "ModelParallelRunner takes them"
                )
        weakref.finalize(self, engine.close)

    def update_weights(self, weights: Mapping[str, Any]) -> None:
        """Replace weights by copies; runs that have begun keep the old ones."""
        specs = {spec.name: spec for spec in self.engine.weights}
        copies = {
            name: np.array(array, specs[name].dtype, order="C")
            for name, array in check_weights(weights, specs).items()
        }
        with self._updating:
            self.weights = {**self.weights, **copies}

    def run(self, inputs: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """Run the model on one array for each input; the outputs by name."""
        arrays = [
            np.asarray(as_input(value, spec, spec.element_type), spec.dtype, order="C")
            for value, spec in zip(inputs, self.spec.inputs, strict=True)
        ]
        shapes = self.output_shapes(tuple(array.shape for array in arrays))
        places = {
            spec.name: np.empty(shape, spec.dtype)
            for spec, shape in zip(self.spec.outputs, shapes, strict=True)
            if shape is not None and spec.element_type != STRING
        }
        weights = self.weights  # one version throughout, and alive until the run is over
        bound = [_bound(spec, array) for spec, array in zip(self.spec.inputs, arrays, strict=True)]
        bound += [_buffer(s, weights[s.name]) for s in self.engine.weights if s.name in weights]
        free = [_buffer(s, places[s.name]) for s in self.spec.outputs if s.name in places]
        with self._turns, _pinned(self._cores):
            produced = self.engine.bind(bound, free).execute()
            results = {**places, **{item.name: _copied(item) for item in produced}}
        return {spec.name: results[spec.name] for spec in self.spec.outputs}


def _output_shapes(spec: ModelSpec, shapes: tuple[Shape, ...]) -> tuple[Shape | None, ...]:
    plan = sharding.cut_batch(spec, shapes, 1)
    return tuple(join.shape if join.shapes else None for join in plan.outputs)


def _bound(spec: TensorSpec, array: NDArray[Any]) -> Buffer | Strings:
    if spec.element_type == STRING:
        whole = sharding.InputCut(axis=None, shapes=(array.shape,))
        return Strings(name=spec.name, shape=array.shape, values=string_rows(array, whole, 0))
    return _buffer(spec, array)


def _buffer(spec: TensorSpec, array: NDArray[Any]) -> Buffer:
    return Buffer(
        name=spec.name,
        element_type=spec.element_type,
        shape=array.shape,
        address=array.__array_interface__["data"][0],
        size=array.nbytes,
    )


def _copied(item: Produced | Strings) -> NDArray[Any]:
    if isinstance(item, Strings):
        return np.array(item.values, dtype=object).reshape(item.shape)
    array = np.empty(item.shape, numpy_dtype(item.element_type))
    ctypes.memmove(array.__array_interface__["data"][0], item.address, item.size)
    return array


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a model was built from, so that it can be built again with other sizes.

    Attributes:
        model: Absolute path, or content.
        weights: Content of its file of weights, if given.
        folder: Folder of its weights, if named.
        pids: Processes that may have the weights; None if they are not shared.
        handle: Handle of the owner that the weights come from; None for the model's own.
    """

    name: str
    model: str | bytes
    model_type: ModelType
    context: Context
    sections: Sections
    weights: bytes | None = None
    folder: str | None = None
    variable_weights: tuple[str, ...] = ()
    pids: tuple[int, ...] | None = None
    handle: int | None = None


class SharedModels:
    """What the models of a group share: sessions (weights), the arena for memory between operators."""

    def __init__(self, *, weights: bool, workspace: bool) -> None:
        self.weights = weights
        self.workspace = workspace
        self._lock = threading.Lock()
        self._sessions: weakref.WeakValueDictionary[object, LoadedModel] = (
            weakref.WeakValueDictionary()
        )

    def load(
        self,
        source: Source,
        dims: Dims | None,
        attempt: Attempt,
        membership: Membership | None,
    ) -> LoadedModel:
        with self._lock:
            key = _identity(source, dims, attempt) if self.weights else None
            session = self._sessions.get(key)
            if session is None:
                session = _load(source, dims, attempt, membership, workspace=self.workspace)
                if self.weights:
                    self._sessions[key] = session
            return session


def open_session(
    source: Source, dims: Dims | None, group: SharedModels | None, *, stacklevel: int
) -> LoadedModel:
    """Load a model, with these sizes of its inputs if given; see `open_first`."""
    if dims is not None and source.model_type is not ModelType.ONNX:
        raise BuildError("its sizes are fixed, and can be changed in ONNX models only")

    membership = _membership(source)
    if membership is not None and dims is not None:
        raise BuildError("its sizes are fixed: it is a slice; slice the model with other sizes")
    if membership is not None and (source.pids is not None or source.handle is not None):
        raise BuildError("weights are shared between processes of whole models, not of slices")

    def build(attempt: Attempt) -> LoadedModel:
        if group is None:
            return _load(source, dims, attempt, membership, workspace=False)
        return group.load(source, dims, attempt, membership)

    groups = attempts(source.context, source.model_type, source.sections)
    try:
        return open_first(groups, build, stacklevel=stacklevel + 1)
    except BaseException:
        if membership is not None:
            membership.close()
        raise


def _membership(source: Source) -> Membership | None:
    """This process's part in the group of ranks that run the model; None if it runs the model alone.

    A launcher may also start processes that have a whole model each.
    """
    ranks = None
    if source.model_type is ModelType.ONNX:
        ranks = place_of(source.context, source.sections)
    if ranks is None:
        return None
    if source.context.device_infos[0] == "gpu":
        with ExitStack() as opened:
            model = source.model
            if isinstance(model, bytes):
                model = opened.enter_context(closing(ModelInMemory(model))).path
            if not is_slice(model):
                return None
    return Membership(ranks)


def _load(
    source: Source,
    dims: Dims | None,
    attempt: Attempt,
    membership: Membership | None,
    *,
    workspace: bool,
) -> LoadedModel:
    cores: Sequence[int] = ()
    if attempt.kind == "cpu":
        [cores] = pinned_cores(source.context, 1) or [()]
    cpus = whole_cpus()
    onnx_runtime = attempt.engine == "onnxruntime"
    config = dict(attempt.options.session_config)
    model, folder = source.model, source.folder
    # A model of other sizes is another one: preparing it would keep the same weights once more.
    prepare: PrepareKind = "never"
    if dims is None:
        prepare = attempt.options.prepare if source.pids is None else "always"
    else:
        folder = folder or (os.path.dirname(model) if isinstance(model, str) else None)
        model = _with_dims(model, dims)
    with ExitStack() as opened:
        if isinstance(model, bytes):
            model = opened.enter_context(closing(ModelInMemory(model))).path
        if source.weights is not None:
            if source.model_type is not ModelType.ONNX:
                raise BuildError("weight_bytes: only ONNX models have their weights in such a file")
            folder = opened.enter_context(PrivateFolder()).path
            _put_weights(model, source.weights, Path(folder))
        if workspace and onnx_runtime:
            config["session.use_env_allocators"] = "1"
        if folder is not None and onnx_runtime:
            config[FOLDER_KEY] = folder
        request = EngineRequest(
            model=model,
            device=Device(attempt.kind, attempt.index),
            options=replace(
                attempt.options,
                prepare=prepare,
                variable_weights=source.variable_weights,
                session_config=config,
            ),
            share=CoreShare(cores=tuple(cores), threads=min(len(cores) or cpus, cpus)),
        )
        owner = None
        if source.pids is not None and dims is None and onnx_runtime and attempt.kind == "cuda":
            owner = _owner_on_card(request)
            request = _with_weights(request, owner.weights)
        if source.handle is not None and dims is None:
            here = prepared_facts(attempt.engine, request)
            shared = opened.enter_context(open_weights(source.handle))
            _check_same(shared.facts, here)
            request = _with_weights(request, shared)
        ranks = None if membership is None else membership.group()
        try:
            with _pinned(cores):
                if ranks is None:
                    engine = open_engine(attempt.engine, request)
                else:
                    engine = open_slice(attempt.engine, request, ranks)
        except EngineError as exc:
            if inherited(request.model):
                exc.args = (in_words(str(exc), request.model),)
            raise
    for note in engine.notes:
        _log.warning("%s: %s", source.name, in_words(note, request.model))
    return LoadedModel(engine, cores, owner)


def _owner_on_card(request: EngineRequest) -> WeightOwner:
    """The owner of a model's weights on a card; this process's own session uses them there, too."""
    return WeightOwner(request.model, options=request.options, device=str(request.device))


def _with_weights(request: EngineRequest, weights: SharedWeights | None) -> EngineRequest:
    """A request for the prepared model that is shared, if any; if its weights are on a card, for those."""
    if weights is None:
        return request
    slab = weights.slab
    if slab is None:
        return replace(request, model=weights.model)
    if slab.device != request.device:
        raise BuildError(
            f"shareable_weight_mem_handle: the owner's weights are on {slab.device}, here the model is "
            f"for {request.device}"
        )
    return replace(request, model=weights.model, slab=lambda _: slab)


def _check_same(facts: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise a BuildError if weights that another process shares are not those of the model built here."""
    if {**facts} == {**here}:
        return
    what = "other options"
    for name, text in (
        ("cpu", "a CPU of other abilities"),
        ("card", "another card"),
        ("engine", "another engine or version"),
        ("device", "another device"),
        ("model", "another model: its content is not that of this model's files"),
    ):
        if facts.get(name) != here.get(name):
            detail = "" if name == "model" else f": {facts.get(name)}, here {here.get(name)}"
            what = f"{text}{detail}"
    raise BuildError(f"shareable_weight_mem_handle: the owner's weights are for {what}")


def _identity(source: Source, dims: Dims | None, attempt: Attempt) -> object:
    """Equal for models that one loaded model can serve. It lives with the session, so it holds no content."""
    content: object
    if isinstance(source.model, str):
        entry = os.stat(source.model)
        content = (entry.st_dev, entry.st_ino, entry.st_size, entry.st_mtime_ns)
    else:
        content = hashlib.sha256(source.model).digest()
    weights = None if source.weights is None else hashlib.sha256(source.weights).digest()
    cpu = source.context.cpu
    affinity = (cpu.thread_affinity_mode, cpu.thread_affinity_core_list)
    sharing = (source.variable_weights, source.pids, source.handle)
    sizes = None if dims is None else [*dims.items()]
    return repr((content, weights, source.folder, sizes, attempt, affinity, sharing))


# Models in memory, and of other sizes.


def _put_weights(model: str, weights: bytes, folder: Path) -> None:
    """Write the content of an ONNX model's one file of weights to a folder."""
    names = scan(model).external
    if len(names) != 1:
        raise BuildError(f"weight_bytes: the model's weights lie in {[*names]}, expected one file")
    path = (folder / names[0]).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise BuildError(
            f"weight_bytes: the model's weights lie in {names[0]!r}, outside of its folder"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(weights)


def _with_dims(source: str | bytes, dims: Dims) -> bytes:
    """An ONNX model with other sizes in place of fixed ones; external weights stay where they are.

    Sizes that are open, and sizes that the graph itself fixes, stay as they are. If these do not go with the
    new ones, the engine refuses the model, except for a Reshape to a constant, which is refused here.
    """
    with requires("changing a model takes the package onnx: pip install 'mcinfer[onnx]'", "onnx"):
        import onnx
        import onnx.shape_inference
    try:
        if isinstance(source, bytes):
            model = onnx.load_model_from_string(source)
        else:
            model = onnx.load(source, load_external_data=False)
        for value in model.graph.input:
            if value.name in dims:
                sizes = value.type.tensor_type.shape.dim
                for size, wanted in zip(sizes, dims[value.name], strict=True):
                    if size.HasField("dim_value"):
                        size.dim_value = wanted
        # The engine infers anew what follows from the sizes.
        del model.graph.value_info[:]
        for value in model.graph.output:
            for i, size in enumerate(value.type.tensor_type.shape.dim):
                if size.HasField("dim_value"):
                    size.dim_param = f"{value.name}_{i}"
        model = onnx.shape_inference.infer_shapes(model)
        content = bytes(model.SerializeToString())
    except Exception as exc:  # protobuf and onnx raise many kinds
        if raised_by_handler(exc):
            raise
        raise BuildError(f"onnx: {type(exc).__name__}: {exc}") from exc
    _check_reshapes(model.graph)
    return content


def _check_reshapes(graph: Any) -> None:
    """Refuse an impossible Reshape: ONNX Runtime (1.31) notices it in the run, not when it loads."""
    shapes = {
        value.name: [size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
        and all(size.HasField("dim_value") for size in value.type.tensor_type.shape.dim)
    }
    for node in graph.node:
        if node.op_type != "Reshape":
            continue
        before, after = shapes.get(node.input[0]), shapes.get(node.output[0])
        if before is not None and after is not None and prod(before) != prod(after):
            raise BuildError(
                f"the Reshape that makes {node.output[0]!r} cannot make {after} of {before}"
            )
