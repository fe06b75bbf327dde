"""ONNX Runtime (https://onnxruntime.ai/docs/api/python/): one session, bound onto shared memory.

Tensors are bound by address and ONNX element type; this allows types that ``session.run`` refuses
(bfloat16, float8, int4). Strings cannot be bound: a model with string inputs runs by value instead.
"""

import mmap
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, redirect_stdout
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines import providers
from mcinfer.engines.base import (
    LACKS,
    BoundRun,
    Buffer,
    Engine,
    EngineRequest,
    OutOfMemoryError,
    Produced,
    RunCancelledError,
    Strings,
    array_over,
    delivered,
    memory_limit,
    produced_from,
)
from mcinfer.engines.preparation import (
    FELL_BACK,
    OWN_COPY,
    Preparation,
    Runtime,
    content_of,
    engine_folder,
    facts_of,
    find_or_make,
    limit_files,
    request_of,
)
from mcinfer.errors import (
    BuildError,
    EngineError,
    InvalidInputError,
    McinferError,
    PredictError,
    quotable,
    refused_by_runtime,
    shortened,
)
from mcinfer.extras import requires
from mcinfer.locks import Turn
from mcinfer.model_cache import FOLDER_KEY, onnx_files
from mcinfer.model_cache.cache import MODEL_FILE
from mcinfer.model_cache.children import Progress
from mcinfer.private import ModelInMemory, alone_in
from mcinfer.process import without_telemetry
from mcinfer.specs import (
    ELEMENT_TYPES,
    MOST_COPIED,
    STRING,
    ModelDescription,
    ModelSpec,
    TensorSpec,
    declared_shape,
    numpy_dtype,
    symbol_sizes,
    tensor_bytes,
)

with requires(
    "engine onnxruntime needs ONNX Runtime (for NVIDIA GPUs its package onnxruntime-gpu)",
    "onnxruntime",
    extra="cpu",
):
    without_telemetry()
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

OPTIONS = LACKS.keys() - {"precision", "streams"}

_BLAMES_INPUTS = re.compile(
    r"(Invalid rank|[Ii]nvalid dimensions) for input|Unexpected input data type|"
    r"Failed to find input name|Missing Input|missing from input feed"
)
"""Bound runs raise RuntimeError for all errors (1.31): only its text shows the cause."""

_BLAMES_BOUND_OUTPUT = re.compile(
    r"output OrtValue provided for output|[Ii]nvalid (rank|dimensions) for output|shape verification failed"
)
"""Its message if an output has another shape than was bound (1.31)."""

FAILED: tuple[type[Exception], ...] = (
    *(
        value
        for value in vars(ort_state).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ),
    *(MemoryError, OverflowError, RuntimeError, ValueError),
)
"""The exceptions of the runtime and of its Python layer."""

_SHORT_OF_MEMORY = re.compile(r"bad_alloc|Failed to allocate|Available memory of")

_LACKS_COLLECTIVE = re.compile(
    r"com\.microsoft:(AllReduce|AllGather|AllToAll)\b.* is not a registered|"
    r"No Op registered for DistCollective"
)
"""Its message if a model has collective nodes, for which its packages have no kernels (1.32)."""

_FORMAT = "session.load_model_format"
_OWN_FORMAT = b"ORTM"

_LACKS_FOLDER = re.compile(r"weakly canonical path: /proc/self/fd/\d+\b")
"""Its message if a model in memory has external data (1.32)."""

_SHARED_ARENA = "session.use_env_allocators"
"""The runtime's option for sessions that share one arena, which must exist before."""

RUNTIME = Runtime(
    version=f"onnxruntime {ort.__version__}",
    build=ort.get_build_info(),
    providers=tuple(ort.get_available_providers()),
    ignored=(
        _SHARED_ARENA,
        FOLDER_KEY,
        "session.force_spinning_stop",
        "session.inter_op.allow_spinning",
        "session.intra_op.allow_spinning",
        "session.intra_op_thread_affinities",
    ),
)

_LEAST_BYTES = "session.optimized_model_external_initializers_min_size_in_bytes"
_OUTSIDE = "external tensors"
_MAX_BYTES_INSIDE = (1 << 10, 1 << 16)
"""Smaller weights stay in the graph. Shapes must, since the runtime reads them before it maps anything: if
the first limit is too small for a shape, the runtime names `_OUTSIDE`, and the second limit is tried."""

_REGISTERING = Turn()
"""Held while the shared arena is made: `cache` alone lets first calls in side by side."""

_SILENT = 4
"""The runtime prints fatal errors only. Its other errors reach the caller as exceptions."""

_WARNING = 2
"""The runtime names the given weights that it cannot use where they lie, which it then copies."""

_HOST_MEMORY = ("Cpu", "CudaPinned")  # the runtime's names of memory that the host has

_NAMELESS = (None, "", "?", -1)
"""How the runtime (1.31), and exporters, write a dimension without a name."""


def prepared(
    request: EngineRequest, progress: Progress | None = None, claim: int | None = None
) -> Preparation:
    """The prepared form of a model, made if there is none yet; `BuildError` if it cannot be as requested.

    See `mcinfer.engines.preparation.find_or_make`.
    """
    # Checked before a model is prepared.
    provider, runs = providers.provider_of(request), request.options.concurrent_runs
    if runs > 1 and provider != "cpu":
        raise BuildError(
            f"concurrent_runs: got {runs} for {request.device}, expected 1: with the "
            f"{providers.NAMES[provider]}, a worker executes one run at a time"
        )
    return find_or_make(request, RUNTIME, progress, claim)


def facts(request: EngineRequest) -> dict[str, Any]:
    return facts_of(request, RUNTIME, content_of(request))


def load(request: EngineRequest, preparation: Preparation | None = None) -> "OnnxRuntimeEngine":
    """Load a model, or its prepared form, which the engine owns from now on; `BuildError` if that fails."""
    preparation = preparation or Preparation()
    try:
        with _mapped_errors():
            return OnnxRuntimeEngine(request, preparation)
    except BaseException as exc:
        if preparation.held is not None:
            preparation.held.close()
        if isinstance(exc, BuildError) and (got := onnx_files.looks_like(request.model)):
            raise BuildError(f"{request.model}: got {got}, expected a model: {exc}") from exc
        raise


class OnnxRuntimeEngine(Engine):
    """One session on one device.

    Attributes:
        held: The prepared model that the session maps, owned by this object; None if there is none.
        session: The runtime's session.
    """

    version = RUNTIME.version
    turn = nullcontext()

    def __init__(self, request: EngineRequest, preparation: Preparation) -> None:
        self.held = preparation.held
        self.notes = preparation.notes
        self.prepared = "" if self.held is None else self.held.key
        path = preparation.path if self.held is None else self.held.folder / MODEL_FILE
        given = _given_weights(request, path)
        self.session = _open_session(request, path, given)
        self._given = given  # its values must outlive the session (SessionOptions.add_initializer)
        self.providers = tuple(self.session.get_providers())
        self.on_card = self.providers[0] in providers.ON_CARDS
        self.widens = self.providers[0] == providers.NAMES["cpu"]
        self.concurrent = request.options.concurrent_runs
        uses_given = given is not None and given.on_card == self.on_card
        if request.slab is not None and self.held is not None and not uses_given:
            # A model that is not prepared is small, or its notes say why.
            what = f"onnxruntime {ort.__version__} with the {self.providers[0]}"
            self.notes += (f"{OWN_COPY}: {what} cannot use those on the card",)
        self.spec = ModelSpec(
            inputs=tuple(_spec(arg, "input") for arg in self.session.get_inputs()),
            outputs=tuple(_spec(arg, "output") for arg in self.session.get_outputs()),
        )
        self.weights = self._replaceable(request)
        if request.options.describe:
            self.description = _description(self.session)
        self.on_host = self._tensors_on_host()
        self._names = [[s.name for s in side] for side in (self.spec.inputs, self.spec.outputs)]
        # It takes no arrays of others, and of strings only some; bindings take all.
        specs = (*self.spec.inputs, *self.spec.outputs)
        self._takes_arrays = all(s.dtype.isbuiltin == 1 and s.element_type != STRING for s in specs)
        # The runtime's own: what is around it checks the names again, which takes as long as a small run.
        self._run = self.session._sess.run
        self._run_options = _run_options()
        self._cancelled = False

    def twin(self) -> "OnnxRuntimeEngine":
        other = copy(self)  # any number of threads may run a session
        other._run_options = _run_options()
        other._cancelled = False
        return other

    def _tensors_on_host(self) -> frozenset[str] | None:
        """See `Engine.on_host`. What is bound elsewhere than the runtime has it, the runtime copies."""
        strings = {spec.name for spec in self.spec.outputs if spec.element_type == STRING}
        if not self.on_card or any(spec.element_type == STRING for spec in self.spec.inputs):
            return None
        names = [spec.name for spec in (*self.spec.inputs, *self.spec.outputs)]
        infos = (*self.session.get_input_memory_infos(), *self.session.get_output_memory_infos())
        there = (n for n, info in zip(names, infos, strict=True) if info.name in _HOST_MEMORY)
        return frozenset(strings.union(there))

    def _replaceable(self, request: EngineRequest) -> tuple[TensorSpec, ...]:
        """The specifications of the requested weights; a model prepared before may lack some."""
        names, model = request.options.variable_weights, request.model
        if given := {spec.name for spec in self.spec.outputs} & {*names}:
            # The runtime would return the model's own weights.
            raise BuildError(
                f"variable_weights: got {sorted(given)}, which are outputs of the model"
            )
        found = {
            arg.name: _spec(arg, "weight" if arg.name in names else "initializer")
            for arg in self.session.get_overridable_initializers()
        }
        sizes = [size for name in names if name in found for size in found[name].shape]
        if not all(isinstance(size, int) for size in sizes):
            # For initialisers that are inputs too, exporters may have written symbols there.
            known = onnx_files.scan(model).initializers
            found = {n: replace(found[n], shape=known[n].shape) for n in found if n in known}
        if missing := [name for name in names if name not in found]:
            raise BuildError(
                f"variable_weights: got {missing}, expected some of {[*found]}, which {model} was "
                "loaded with"
            )
        return tuple(found[name] for name in names)

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
        buffers = [item for item in inputs if isinstance(item, Buffer)]
        with _mapped_errors(PredictError):
            if len(buffers) < len(inputs):
                return _ValueRun(self, inputs, outputs)
            return _BindingRun(self, buffers, outputs)

    def compute(
        self, inputs: Sequence[NDArray[Any]], weights: Sequence[Buffer | Strings] = ()
    ) -> Sequence[NDArray[Any]]:
        if weights or not self._takes_arrays:
            return super().compute(inputs, weights)
        takes, gives = self._names
        found: list[NDArray[Any]] = self.run(
            self._run, gives, dict(zip(takes, inputs, strict=False))
        )
        return found

    def arm(self) -> None:
        if self._cancelled:
            self._cancelled = False
            self._run_options.terminate = False

    def cancel(self) -> None:
        self._cancelled = True
        self._run_options.terminate = True

    def run(self, run: Callable[..., Any], *arguments: object) -> Any:
        """Call one of the session's methods that run the model; see `BoundRun.execute` for the errors."""
        try:
            return run(*arguments, self._run_options)
        except FAILED as exc:
            if self._cancelled:
                raise RunCancelledError("the run was cancelled") from quotable(exc)
            if _BLAMES_BOUND_OUTPUT.search(str(exc)):
                raise _OutputShapeError(str(_map_error(exc, PredictError))) from quotable(exc)
            on_card = providers.device_error(f"onnxruntime: {exc}") if self.on_card else None
            raise on_card or _map_error(exc, PredictError) from quotable(exc)


def _run_options() -> Any:
    options = ort.RunOptions()
    options.log_severity_level = _SILENT
    # 0 is its default. If it is not set, each bound run throws and catches a C++ exception to find that out
    # (seen in 1.31), which costs more than a small run.
    options.add_run_config_entry("gpu_graph_id", "0")
    return options


class _OutputShapeError(PredictError):
    """An output has another shape than the memory that it was bound to."""


_HOST = ort_state.OrtDevice(ort_state.OrtDevice.cpu(), ort_state.OrtDevice.default_memory(), 0)


class _BindingRun(BoundRun):
    """A binding: inputs and declared outputs by address, the others left to the runtime.

    On the host, what the runtime makes by itself is copied to its place if it has that shape. An output
    that is bound by another shape ends the run half way, and a second run may draw other random numbers.
    Only large ones are bound without a declared shape: what requests in pieces have shown of them.
    """

    def __init__(
        self, engine: OnnxRuntimeEngine, inputs: Sequence[Buffer], outputs: Sequence[Buffer]
    ) -> None:
        self._engine = engine
        self._bound = bound = {buffer.name: buffer for buffer in outputs}
        self._names = [spec.name for spec in engine.spec.outputs]
        given = {item.name: item.shape for item in inputs}
        specs = engine.spec.inputs
        sizes = symbol_sizes(specs, [given.get(spec.name, ()) for spec in specs])
        # The runtime does not write an output that is an input as it is to the place that it was bound to.
        self._free = [
            spec.name
            for spec in engine.spec.outputs
            if spec.name not in bound
            or spec.name in given
            or not (engine.on_card or _is_bound(spec, sizes, bound[spec.name]))
        ]
        self._binding = engine.session.io_binding()
        # The runtime's own: what is around it looks up and makes a device, for each output of each run.
        self._rebind = self._binding._iobinding.bind_output
        # The runtime copies an input that lies on the wrong side when it is bound, and not in later runs
        # (IOBinding::BindInput in IOBinding.cc), so these are bound for each run.
        self._copied = []
        on_host = engine.on_host
        for item in inputs:
            if on_host is not None and (item.device is None) != (item.name in on_host):
                self._copied.append(item)
            else:
                self._binding.bind_input(item.name, *_place(item))
        for name in self._names:  # all of them: `get_outputs` has this order
            place = ("cpu",) if name in self._free else _place(bound[name])
            self._binding.bind_output(name, *place)

    def execute(self) -> Sequence[Produced | Strings]:
        for item in self._copied:
            self._binding.bind_input(item.name, *_place(item))
        # A binding keeps the outputs of the last run, and those of this one would have to fit in there.
        for name in self._free:
            self._rebind(name, _HOST)
        try:
            self._engine.run(self._engine.session.run_with_iobinding, self._binding)
        except _OutputShapeError:
            if len(self._free) == len(self._names):
                raise
            # An output is not as the model declares. The runtime only warns of that if none is bound.
            self._free = self._names
            return self.execute()
        if not self._free:
            return ()
        values = self._binding.get_outputs_as_ortvaluevector()
        # By index: to iterate over it takes 0.2 ms, since its end is a C++ exception.
        free = [i for i, name in enumerate(self._names) if name in self._free]
        return delivered([_produced(self._names[i], values[i]) for i in free], self._bound)


class _ValueRun(BoundRun):
    """A run that takes strings: the runtime binds none, so its results are copied to their places."""

    def __init__(
        self,
        engine: OnnxRuntimeEngine,
        inputs: Sequence[Buffer | Strings],
        outputs: Sequence[Buffer],
    ) -> None:
        self._engine = engine
        self._bound = {buffer.name: buffer for buffer in outputs}
        self._feeds = {
            item.name: _text_array(item) if isinstance(item, Strings) else _value(item)
            for item in inputs
        }

    def execute(self) -> Sequence[Produced | Strings]:
        specs = self._engine.spec.outputs
        arrays = self._engine.run(self._engine.session.run, None, self._feeds)
        return delivered([*map(produced_from, specs, arrays)], self._bound)


def _is_bound(spec: TensorSpec, sizes: Mapping[str, int], place: Buffer) -> bool:
    """Whether the runtime writes an output to its place; one without dimensions may have any rank."""
    is_declared = bool(spec.shape) and declared_shape(spec, sizes) == place.shape
    return is_declared or place.size > MOST_COPIED


def _text_array(item: Strings) -> NDArray[Any]:
    try:  # of bytes the runtime would take the ``repr``
        texts = [v.decode() if isinstance(v, bytes) else v for v in item.values]
    except UnicodeDecodeError as exc:
        raise InvalidInputError(f"input {item.name!r} is not UTF-8: {exc}") from exc
    return np.array(texts, dtype=object).reshape(item.shape)


def _value(item: Buffer) -> Any:
    """The runtime's value over memory. NumPy decides only the width of an element: it lacks some types."""
    if item.device is not None:
        raise InvalidInputError(
            f"input {item.name!r} lies on {item.device}: beside inputs of strings, expected the host's memory"
        )
    element_type = ELEMENT_TYPES[item.element_type]
    array = array_over(item, np.dtype(f"u{element_type.bits // 8}"))
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element_type.onnx)


def _place(buffer: Buffer) -> tuple[str, int, int, tuple[int, ...], int]:
    """The device, the element type, the shape and the address, as the runtime's bindings take them."""
    device, index = ("cpu", 0) if buffer.device is None else ("cuda", buffer.device.index)
    return device, index, ELEMENT_TYPES[buffer.element_type].onnx, buffer.shape, buffer.address


def _produced(name: str, value: Any) -> Produced | Strings:
    element_type = _element_type(value.data_type())
    shape = tuple(value.shape())
    if element_type == STRING:
        return Strings(name=name, shape=shape, values=tuple(value.numpy().ravel().tolist()))
    return Produced(
        name=name,
        element_type=element_type,
        shape=shape,
        address=value.data_ptr(),
        size=tensor_bytes(element_type, prod(shape)),
        owner=value,
    )


def _element_type(text: str) -> str:
    """The name in `ELEMENT_TYPES` of a type that the runtime writes ``tensor(float)``."""
    inner = text.removeprefix("tensor(").removesuffix(")")
    differing = {"float": "float32", "double": "float64"}
    return differing.get(inner, inner.replace("float8", "float8_"))


def _spec(arg: Any, role: str) -> TensorSpec:
    element_type = _element_type(arg.type)
    if not arg.type.startswith("tensor("):
        cure = (
            "export the model without ZipMap (skl2onnx: options={'zipmap': False})"
            if arg.type.startswith("seq(map(")
            else "SequenceConstruct and ConcatFromSequence, in the model, lead from and to tensors"
        )
        raise BuildError(f"{role} {arg.name!r} is of type {arg.type}, expected a tensor: {cure}")
    if element_type not in ELEMENT_TYPES:
        raise BuildError(
            f"{role} {arg.name!r} is of type {arg.type}, expected a tensor of one of "
            f"{[*ELEMENT_TYPES]}"
        )
    shape = tuple(None if size in _NAMELESS else size for size in arg.shape)
    return TensorSpec(name=arg.name, dtype=numpy_dtype(element_type), shape=shape)


# Errors; opening sessions; preparing a model.


def _map_error(exc: Exception, base: type[EngineError]) -> McinferError:
    text = shortened(f"onnxruntime: {exc}")
    if base is PredictError and (
        isinstance(exc, ort_state.InvalidArgument) or _BLAMES_INPUTS.search(text)
    ):
        return refused_by_runtime(text)
    if _LACKS_COLLECTIVE.search(text):
        text += (
            "; the model is one rank's slice, with collectives: run all ranks together, or give the whole "
            "model to Master(model, parallel=Parallel(…)), which cuts it"
        )
    if _LACKS_FOLDER.search(text):
        text += f"; its external data are in no folder: give the model's path, or name theirs as {FOLDER_KEY}"
    if isinstance(exc, MemoryError) or _SHORT_OF_MEMORY.search(text):
        text += memory_limit()
        if base is PredictError:
            return OutOfMemoryError(text)
    return base(text)


@cache
def _register_arena() -> None:
    """Make the arena that sessions of this process may share; one for each process."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenWeights:
    """The weights of a prepared model on its card, which a session uses where they lie.

    Attributes:
        values: The weights by name, in the card's memory; they must outlive the session.
        on_card: Whether they are for a session on the card, not for one that reads them on the host.
    """

    values: Mapping[str, Any]
    on_card: bool


def _given_weights(request: EngineRequest, model: Path | None) -> _GivenWeights | None:
    """The weights on the request's card, if the model is prepared and this runtime can use them there."""
    if request.slab is None or model is None:
        return None
    on_card = providers.NAMES[providers.provider_of(request)] in ort.get_available_providers()
    tensors = request.slab(model).tensors(on_host=not on_card)
    if tensors is None:  # the runtime falls back to the CPU, which cannot read them
        return None
    values = providers.runtime_values(tensors, ort.OrtValue.from_dlpack)
    return _GivenWeights(values=values, on_card=on_card)


def _open_session(
    request: EngineRequest, prepared: Path | None, given: _GivenWeights | None
) -> Any:
    """A session on the requested device, of the prepared form if there is one; `BuildError` if not."""
    engines = engine_folder(request, RUNTIME) if providers.keeps_engines(request) else None
    listed = _providers(request, engines)
    options = _session_options(request, prepared=prepared is not None, given=given)
    # Workers that start together build an engine once: TensorRT chooses kernels by the time that they take,
    # which others on the card would change, and another process may read an engine while it is written.
    alone = nullcontext() if engines is None else alone_in(engines)
    file = nullcontext(str(prepared)) if prepared else _model_file(request, options)
    with alone, file as path:
        session = _new_session(path, options, listed, fallback=request.options.allow_fallback)
    session.disable_fallback()
    providers.check_got(request, session.get_providers()[0])
    return session


def _providers(request: EngineRequest, engines: str | None = None) -> list[Any]:
    """The providers of a session, with their options; `BuildError` if the device's own is not there."""
    available = ort.get_available_providers()
    listed = providers.provider_list(request, engines)
    providers.check_available(request, available, ort.__version__)
    if request.options.allow_fallback:
        listed = [one for one in listed if one[0] in available]
    if listed[0][0] in providers.ON_CARDS and hasattr(ort, "preload_dlls"):
        # CUDA's libraries where pip installed them. It prints which of them it does not find.
        with redirect_stdout(sys.stderr):
            ort.preload_dlls()
    return listed


def _new_session(path: str, options: Any, listed: list[Any], *, fallback: bool = False) -> Any:
    """A session; without `fallback` the runtime does not try another device by itself."""
    # The runtime's own class, also where `mcinfer.ort.install` has put another one in its place.
    plain = next(c for c in ort.InferenceSession.__mro__ if c.__module__.startswith("onnxruntime."))
    return plain(path, options, providers=listed, enable_fallback=int(fallback))


def prepare(request: EngineRequest, folder: str) -> None:
    """Write the prepared model into a folder, and check that it loads; `BuildError` if not."""
    path = os.path.join(folder, MODEL_FILE)
    listed = _providers(request.with_options(provider_options=providers.graph_options(request)))
    # The optimised graph, with its weights in one file that sessions map, on the CPU as its kernels pack them
    # (onnxruntime_session_options_config_keys.h).
    saving = {"session.optimized_model_external_initializers_file_name": "weights.bin"}
    if request.device.kind == "cpu":
        saving["session.save_external_prepacked_constant_initializers"] = "1"
    for least in _MAX_BYTES_INSIDE:
        options = _session_options(request)
        options.optimized_model_filepath = path
        options.log_severity_level = _SILENT  # it warns that the result is for this device only
        for key, value in {**saving, _LEAST_BYTES: str(least)}.items():
            options.add_session_config_entry(key, value)
        try:
            with _mapped_errors():
                with _model_file(request, options) as model:
                    session = _new_session(model, options, listed)
                got, wanted = session.get_providers()[0], _said(session)
                del session  # and its memory on the card
                if got != listed[0][0]:  # it may run there next time
                    raise BuildError(f"{FELL_BACK} from {listed[0][0]} to {got}")
                options = _session_options(request, prepared=True)
                said = _said(_new_session(path, options, listed))
            if said != wanted:
                raise BuildError(f"its optimised form says {said}, expected {wanted}")
            return
        except BuildError as exc:
            if least == _MAX_BYTES_INSIDE[-1] or _OUTSIDE not in str(exc):
                raise
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))


def _said(session: Any) -> list[Any]:
    """What a session says of its model; an inline session says what its prepared model does."""
    about = session.get_modelmeta()
    sides = (session.get_inputs, session.get_outputs, session.get_overridable_initializers)
    return [
        *([(arg.name, arg.type, arg.shape) for arg in side()] for side in sides),
        *(getattr(about, name) for name in (*_ABOUT, "custom_metadata_map")),
    ]


def fill(_: Progress, request: Mapping[str, Any], folder: str, most_file_bytes: int) -> None:
    """Write the prepared model into the folder of an entry, in a child: see `Making.function`."""
    limit_files(most_file_bytes)
    prepare(request_of(request), folder)


def runtime(_: Progress) -> dict[str, Any]:
    """`RUNTIME`, of a child, for a process that does not import it."""
    return asdict(RUNTIME)


def check(_: Progress, request: Mapping[str, Any]) -> None:
    """Load a model as it is, in a child; `BuildError` if that is impossible."""
    load(request_of(request).with_options(prepare="never"))


def save(_: Progress, plain: Mapping[str, Any], target: str) -> None:
    """Write the optimised form of a model where the user wants it, in a child; `BuildError` if it cannot."""
    request = request_of(plain)
    options = _session_options(request)
    options.optimized_model_filepath = target
    with _mapped_errors(), _model_file(request, options) as model:
        _new_session(model, options, _providers(request), fallback=request.options.allow_fallback)


@contextmanager
def _mapped_errors(base: type[EngineError] = BuildError) -> Iterator[None]:
    try:
        yield
    except McinferError:
        raise
    except FAILED as exc:
        raise _map_error(exc, base) from quotable(exc)


def _session_options(
    request: EngineRequest, *, prepared: bool = False, given: _GivenWeights | None = None
) -> Any:
    options = ort.SessionOptions()
    threads = request.threads
    if not request.options.threads:
        # A session has one pool of threads; beside it, each run has the thread that calls.
        threads = max(1, threads - request.options.concurrent_runs + 1)
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = request.options.inter_op_threads or 1
    if options.inter_op_num_threads > 1:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    # By default idle threads spin and take cores from others; ours stop when a run ends,
    # and do not spin at all if cores are shared.
    config = {"session.force_spinning_stop": "1"}
    if request.share.shared:
        config["session.intra_op.allow_spinning"] = "0"
    config.update(request.options.session_config)
    for name, text in request.options.session_options.items():
        _set_attribute(options, name, text)
    for name, size in request.options.free_dimensions.items():
        options.add_free_dimension_override_by_name(name, size)
    for name, size in request.options.free_denotations.items():
        options.add_free_dimension_override_by_denotation(name, size)
    for path in request.options.custom_operators:
        options.register_custom_ops_library(path)
    if request.options.variable_weights or prepared:
        options.log_severity_level = _SILENT  # it warns of each that is not constant
    if prepared:  # already optimised; its weights lie beside it
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        config.pop(FOLDER_KEY, None)
    if given is not None:
        config["session.disable_prepacking"] = "1"  # the kernels use given weights in place
        if not request.options.variable_weights:
            options.log_severity_level = _WARNING
        for name, weight in given.values.items():
            options.add_initializer(name, weight)
    for key, value in config.items():  # each once: it warns of entries that are set again
        options.add_session_config_entry(key, value)
    if request.options.session_config.get(_SHARED_ARENA) == "1":
        with _REGISTERING:
            _register_arena()
    return options


def _set_attribute(options: Any, name: str, text: str) -> None:
    """Set an attribute of the runtime's options, or of its default logger; `BuildError` for others."""
    try:
        if name in _DEFAULT_LOGGER:
            _DEFAULT_LOGGER[name](int(text))
        elif name in _ATTRIBUTES:
            kind = type(getattr(options, name))
            words = {"0": False, "1": True} if kind is bool else getattr(kind, "__members__", None)
            setattr(options, name, words[text] if words else kind(text))
        else:
            names = [*_ATTRIBUTES, *_DEFAULT_LOGGER]
            raise BuildError(f"session_options: got the name {name!r}, expected some of {names}")
    except (ValueError, KeyError, TypeError, OverflowError) as exc:
        raise BuildError(
            f"session_options: got {text!r} for {name}, which the runtime does not take: {exc!r}"
        ) from exc


_ATTRIBUTES = (
    *("graph_optimization_level", "execution_order", "enable_cpu_mem_arena", "enable_mem_pattern"),
    *("enable_mem_reuse", "use_deterministic_compute", "log_severity_level", "log_verbosity_level"),
    "logid",
)
"""The `EngineOptions.session_options` of a session, each with a value of the type that it has before."""

_DEFAULT_LOGGER: Mapping[str, Callable[[int], None]] = {
    "default_logger_severity": ort.set_default_logger_severity,
    "default_logger_verbosity": ort.set_default_logger_verbosity,
}
"""Those that are for all sessions of the process."""


_ABOUT = ("producer_name", "graph_name", "domain", "description", "graph_description", "version")


def _description(session: Any) -> ModelDescription:
    """What the session says of its model, beside the inputs and outputs."""
    about = session.get_modelmeta()
    return ModelDescription(
        about={name: str(getattr(about, name)) for name in _ABOUT},
        properties={str(key): str(text) for key, text in about.custom_metadata_map.items()},
        overridable=tuple(
            _spec(arg, "initializer") for arg in session.get_overridable_initializers()
        ),
        provider_options={
            name: {str(key): str(text) for key, text in options.items()}
            for name, options in session.get_provider_options().items()
        },
    )


@contextmanager
def _model_file(request: EngineRequest, options: Any) -> Iterator[str]:
    """The path of the model, with replaceable weights among its inputs.

    Constant weights that are inputs too are defaults (onnx.proto, GraphProto.initializer, from IR version 4
    on). Protobuf joins the parts of a message, so inputs are added by writing them after the model's bytes.
    """
    # By the content (fbs::utils::IsOrtFormatModelBytes), which the runtime looks at only for models that are
    # given as bytes; it tells files by their names.
    own_format = onnx_files.bytes_at(request.model, 4, len(_OWN_FORMAT)) == _OWN_FORMAT
    if own_format and _FORMAT not in request.options.session_config:
        options.add_session_config_entry(_FORMAT, "ORT")
    if not request.options.variable_weights:
        yield request.model
        return
    found = onnx_files.scan(request.model)
    added = onnx_files.added_inputs(found, request.options.variable_weights)
    with ExitStack() as opened:
        file = opened.enter_context(closing(ModelInMemory()))
        with onnx_files.open_regular(request.model) as (model, info):
            file.write(chain(onnx_files.chunks(model, info.st_size), (added,)))
        if not request.options.session_config.get(FOLDER_KEY):
            _add_external_data(request, options, found.external, opened)
        yield file.path


def _add_external_data(
    request: EngineRequest, options: Any, locations: tuple[str, ...], opened: ExitStack
) -> None:
    """Name the external data of a model that the runtime gets as a file without a folder.

    In the caches of model hubs, files are links to another folder, which the runtime allows only for models
    at their own paths. Then the content of the files is passed, which the runtime (1.31) copies.
    """
    model = Path(request.model).absolute()
    folder = os.path.realpath(model.parent)
    files = onnx_files.external_files(model, None, locations)
    if all(Path(os.path.realpath(path)).is_relative_to(folder) for path in files):
        options.add_session_config_entry(FOLDER_KEY, folder)
        return
    contents: list[Any] = [b""] * len(files)
    for i, path in enumerate(files):
        descriptor, info = opened.enter_context(onnx_files.open_regular(path))
        if info.st_size:  # mapped as long as the session is made
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            contents[i] = opened.enter_context(mapped)
    options.add_external_initializers_from_files_in_memory(
        [*locations], contents, [*map(len, contents)]
    )
