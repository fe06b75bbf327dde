"""A model loaded in this process: an engine, run on arrays in the caller's thread.

Ownership: inputs are borrowed during a run, which reads them in place; outputs are new arrays, which belong
to the caller. A `LoadedModel` belongs to its model.
"""

import logging
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer import sharding
from mcinfer.cards.cuda import model_of
from mcinfer.config import CARD_KIND, CoreShare, Device, PrepareKind
from mcinfer.engines.adapters import open_engine, prepared_facts
from mcinfer.engines.base import Engine, EngineRequest, produced_from
from mcinfer.errors import BuildError, EngineError, InvalidInputError, is_refusal
from mcinfer.extras import requires
from mcinfer.machine import whole_cpus
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.model_cache.onnx_files import scan
from mcinfer.mslite._configuration import weight_sharing
from mcinfer.mslite._ranks import Membership, is_slice, place_of
from mcinfer.mslite._targets import Attempt, Source, pinned_cores
from mcinfer.private import ModelInMemory, PrivateFolder, in_words, inherited
from mcinfer.ranks import open_slice
from mcinfer.requests.tensors import as_input
from mcinfer.requests.weights import check_weights
from mcinfer.sharding import Shape
from mcinfer.specs import ModelSpec, check_whole_bytes
from mcinfer.weight_sharing import WeightOwner, open_weights

__tracebackhide__ = is_refusal

_log = logging.getLogger("mcinfer.mslite")

_MAX_SHAPES = 256

Dims = Mapping[str, Sequence[int]]
"""Shapes by input."""


@contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """Bind the calling thread to these cores, if any is allowed; threads that it starts inherit them."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # none is allowed any more
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with suppress(OSError):  # they were taken meanwhile
            os.sched_setaffinity(0, before)


class LoadedModel:
    """One loaded model, the engine's owner. Any thread may call `run`.

    Attributes:
        weights: The weights that were replaced, by name; the mapping does not change, it is replaced.
        owner: The owner of its weights, where they are shared with other processes.
        output_shapes: From the inputs' shapes to the outputs', None for one that only a run shows;
            InvalidInputError if they do not fit the model.
    """

    def __init__(
        self, attempt: Attempt, engine: Engine, cores: Sequence[int], owner: WeightOwner | None
    ) -> None:
        """Take over the engine, which is closed when this is garbage."""
        self.attempt = attempt
        self.engine = engine
        self.owner = owner
        self.spec = engine.spec
        self.weights: Mapping[str, NDArray[Any]] = {}
        self.output_shapes = lru_cache(_MAX_SHAPES)(partial(_output_shapes, engine.spec))
        self._cores = cores
        check_whole_bytes((*engine.spec.inputs, *engine.spec.outputs, *engine.weights))
        weakref.finalize(self, engine.close)

    def update_weights(self, weights: Mapping[str, Any]) -> None:
        """Replace weights by copies, one call at a time; runs that have begun keep the old ones."""
        specs = {spec.name: spec for spec in self.engine.weights}
        copies = {
            name: np.array(array, specs[name].dtype, order="C")
            for name, array in check_weights(weights, specs).items()
        }
        self.weights = {**self.weights, **copies}

    def run(self, inputs: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """Run the model on one array for each input; the outputs by name."""
        arrays = [
            np.asarray(as_input(value, spec, spec.element_type), spec.dtype, order="C")
            for value, spec in zip(inputs, self.spec.inputs, strict=True)
        ]
        self.output_shapes(tuple(array.shape for array in arrays))  # they fit the model
        own, engine = self.weights, self.engine
        weights = [produced_from(s, own[s.name]) for s in engine.weights if s.name in own]
        with _pinned(self._cores), engine.turn:
            outputs = engine.compute(arrays, weights)
        return dict(zip((spec.name for spec in self.spec.outputs), outputs, strict=True))

    def share(self, pids: Sequence[int], *, stacklevel: int) -> WeightOwner:
        """The owner of the model's weights, which lets these processes have them; warns of absent ones."""
        if self.owner is None:
            held = getattr(self.engine, "held", None)
            if held is None:
                why = "only ONNX models can be prepared, and not for TensorRT"
                raise BuildError(
                    "shareable_weight_pid_list: the weights cannot be shared: "
                    f"{'; '.join(self.engine.notes) or why}"
                )
            self.owner = WeightOwner(held)
        for pid in pids:
            try:
                self.owner.allow(pid)
            except InvalidInputError as exc:
                text = f"shareable_weight_pid_list: {exc}"
                warnings.warn(text, UserWarning, stacklevel=stacklevel + 1)
        return self.owner


def _output_shapes(spec: ModelSpec, shapes: tuple[Shape, ...]) -> tuple[Shape | None, ...]:
    plan = sharding.cut_batch(spec, shapes, 1)
    return tuple(join.shape if join.shapes else None for join in plan.outputs)


def membership(source: Source) -> Membership | None:
    """This process's part in the group of ranks that run the model; None if it runs the model alone."""
    ranks = place_of(source.context, source.sections) if source.is_onnx else None
    if ranks is None:
        return None
    if source.context.device_infos[0] == "gpu":
        # A launcher may also start processes that have a whole model each.
        with ExitStack() as opened:
            model = source.model
            if isinstance(model, bytes):
                model = opened.enter_context(closing(ModelInMemory(model))).path
            if not is_slice(model):
                return None
    if weight_sharing(source.sections) != (None, None):
        raise BuildError("weights are shared between processes of whole models, not of slices")
    return Membership(ranks)


def load(
    source: Source,
    attempt: Attempt,
    ranks: Membership | None = None,
    dims: Dims | None = None,
) -> LoadedModel:
    """Load a model in one way.

    With `ranks`, as a rank of a group; with `dims`, with other sizes of the inputs in place of those that an
    ONNX model fixes.
    """
    cores: Sequence[int] = ()
    if attempt.kind == "cpu":
        [cores] = pinned_cores(source.context, 1) or [()]
    cpus, model = whole_cpus(), source.model
    pids, handle = weight_sharing(source.sections)
    config = dict(attempt.options.session_config)
    prepare: PrepareKind = source.prepare if pids is None else "always"
    if dims is not None:
        # It is another model: preparing it would keep the same weights once more.
        pids, handle, prepare = None, None, "never"
        if isinstance(model, str):
            config[FOLDER_KEY] = os.path.dirname(model)
        model = _with_dims(model, dims)
    with ExitStack() as opened:
        if isinstance(model, bytes):
            model = opened.enter_context(closing(ModelInMemory(model))).path
        if source.weights is not None:
            if not source.is_onnx:
                raise BuildError("weight_bytes: only ONNX models have their weights in such a file")
            config[FOLDER_KEY] = opened.enter_context(PrivateFolder()).path
            _put_weights(model, source.weights, Path(config[FOLDER_KEY]))
        if source.workspace and attempt.engine == "onnxruntime":
            config["session.use_env_allocators"] = "1"
        device = Device(attempt.kind, attempt.index)
        request = EngineRequest(
            model=model,
            device=device,
            options=replace(attempt.options, prepare=prepare, session_config=config),
            share=CoreShare(cores=tuple(cores), threads=min(len(cores) or cpus, cpus)),
            device_model=partial(model_of, device) if attempt.kind == CARD_KIND else None,
        )
        owner, shared = None, None
        on_cuda = attempt.kind == CARD_KIND and attempt.options.provider is None
        if pids is not None and attempt.engine == "onnxruntime" and on_cuda:
            # This process's own session uses the weights on the card, too.
            owner = WeightOwner(model, options=request.options, device=str(request.device))
            shared = owner.weights
        if handle is not None:
            here = prepared_facts(attempt.engine, request)
            shared = opened.enter_context(open_weights(handle))
            _check_same(shared.facts, here)
        slab = None if shared is None else shared.slab
        if slab is not None and slab.device != request.device:
            raise BuildError(
                f"shareable_weight_mem_handle: the owner's weights are on {slab.device}, here the model "
                f"is for {request.device}"
            )
        if shared is not None:
            get_slab = None if slab is None else lambda _: slab
            request = replace(request, model=shared.model, slab=get_slab)
        group = None if ranks is None else ranks.group()
        try:
            with _pinned(cores):
                if group is None:
                    engine = open_engine(attempt.engine, request)
                else:
                    engine = open_slice(attempt.engine, request, group)
        except EngineError as exc:
            if inherited(request.model):
                exc.args = (in_words(str(exc), request.model),)
            raise
    for note in engine.notes:
        _log.warning("%s: %s", source.name, in_words(note, request.model))
    return LoadedModel(attempt, engine, cores, owner)


def _check_same(facts: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise a BuildError if weights that another process shares are not those of the model built here."""
    differs = next((name for name in _ANOTHER if facts.get(name) != here.get(name)), None)
    if differs is None and {**facts} == {**here}:
        return
    text = "other options" if differs is None else _ANOTHER[differs]
    if differs not in (None, "model"):
        text += f": {facts.get(differs)}, here {here.get(differs)}"
    raise BuildError(f"shareable_weight_mem_handle: the owner's weights are for {text}")


_ANOTHER = {
    "model": "another model: its content is not that of this model's files",
    "device": "another device",
    "engine": "another engine or version",
    "card": "another card",
    "cpu": "a CPU of other abilities",
}


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
    new ones, the engine refuses the model, or a run shows it, as with a Reshape to a constant.
    """
    with requires("changing a model takes the package onnx", "onnx", extra="onnx"):
        import onnx
        import onnx.shape_inference
    try:
        if isinstance(source, bytes):
            model = onnx.load_model_from_string(source)
        else:
            model = onnx.load(source, load_external_data=False)
        for value in model.graph.input:
            sizes = value.type.tensor_type.shape.dim
            for size, wanted in zip(sizes, dims.get(value.name, ()), strict=False):
                if size.HasField("dim_value"):
                    size.dim_value = wanted
        # The engine infers anew what follows from the sizes.
        del model.graph.value_info[:]
        for value in model.graph.output:
            for i, size in enumerate(value.type.tensor_type.shape.dim):
                if size.HasField("dim_value"):
                    size.dim_param = f"{value.name}_{i}"
        return bytes(onnx.shape_inference.infer_shapes(model).SerializeToString())
    except Exception as exc:  # protobuf and onnx raise many kinds
        raise BuildError(f"onnx: {type(exc).__name__}: {exc}") from exc
