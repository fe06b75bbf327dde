"""ONNX Runtime (https://onnxruntime.ai/docs/api/python/): one session, bound onto shared memory.

Tensors are bound by address and ONNX element type; this allows types that ``session.run`` refuses
(bfloat16, float8, int4). Strings cannot be bound: a model with string inputs runs by value instead.
"""

import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import (
    Buffer,
    Engine,
    EngineRequest,
    Produced,
    Run,
    RunCancelledError,
    Strings,
    array_over,
    delivered,
    memory_limit,
    produced_from,
)
from mcinfer.engines.preparation import Preparation, Runtime, describe, find_or_make
from mcinfer.errors import (
    BuildError,
    EngineError,
    InvalidInputError,
    McinferError,
    MissingDependencyError,
    PredictError,
    quotable,
    shortened,
)
from mcinfer.model_cache.building import MODEL_FILE, Progress
from mcinfer.model_cache.keys import FOLDER_KEY
from mcinfer.model_cache.onnx_files import added_inputs, chunks, external_files, open_regular, scan
from mcinfer.specs import (
    ELEMENT_TYPES,
    STRING,
    ModelSpec,
    TensorSpec,
    numpy_dtype,
    tensor_bytes,
)

try:
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as ort_state
except ImportError as exc:
    raise MissingDependencyError(
        "engine onnxruntime needs ONNX Runtime: pip install 'mcinfer[cpu]', or 'mcinfer[gpu]' for NVIDIA GPUs"
    ) from exc

_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "ascend": "CANNExecutionProvider",
}
"""By kind of device. Only the first was ever run by the tests."""

_BLAMES_INPUTS = re.compile(
    r"(Invalid rank|[Ii]nvalid dimensions) for input|Unexpected input data type|"
    r"Failed to find input name|Missing Input|missing from input feed"
)
"""Bound runs raise RuntimeError for all errors (1.31): only its text shows the cause."""

_BLAMES_BOUND_OUTPUT = re.compile(
    r"output OrtValue provided for output|[Ii]nvalid (rank|dimensions) for output|shape verification failed"
)
"""Its message if an output has another shape than was bound (1.31)."""

_FAILED: tuple[type[Exception], ...] = (
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

_SHARED_ARENA = "session.use_env_allocators"
"""The runtime's option for sessions that share one arena, which must exist before."""

RUNTIME = Runtime(
    version=f"onnxruntime {ort.__version__}",
    build=ort.get_build_info(),
    ignored=frozenset(
        {
            _SHARED_ARENA,
            FOLDER_KEY,
            "session.force_spinning_stop",
            "session.inter_op.allow_spinning",
            "session.intra_op.allow_spinning",
            "session.intra_op_thread_affinities",
        }
    ),
)

_SAVING = {
    # The graph optimised for this CPU, with constant weights as its kernels pack them, in one file
    # that sessions map (onnxruntime_session_options_config_keys.h).
    "session.optimized_model_external_initializers_file_name": "weights.bin",
    "session.save_external_prepacked_constant_initializers": "1",
}

_LEAST_BYTES = "session.optimized_model_external_initializers_min_size_in_bytes"
_OUTSIDE = "external tensors"
_MAX_BYTES_INSIDE = (1 << 10, 1 << 16)
"""Smaller weights stay in the graph. Shapes must, since the runtime reads them before it maps anything: if
the first limit is too small for a shape, the runtime names `_OUTSIDE`, and the second limit is tried."""

_REGISTERING = threading.Lock()
"""Held while the shared arena is made: `cache` alone lets first calls in side by side."""

_SILENT = 4
"""The runtime prints fatal errors only. Its other errors reach the caller as exceptions."""

_TYPES = {
    "float": "float32",
    "double": "float64",
    "float8e4m3fn": "float8_e4m3fn",
    "float8e4m3fnuz": "float8_e4m3fnuz",
    "float8e5m2": "float8_e5m2",
    "float8e5m2fnuz": "float8_e5m2fnuz",
}
"""ONNX Runtime's names of element types that differ from ours."""

_NAMELESS = (None, "", "?", -1)
"""How the runtime (1.31), and exporters, write a dimension without a name."""


def prepared(request: EngineRequest, progress: Progress | None = None) -> Preparation:
    """The prepared form of a model, made if there is none yet; `BuildError` if it cannot be as requested."""
    if request.variable_weights:  # checked before a model is prepared
        try:
            added_inputs(scan(request.model), request.variable_weights)
        except OSError as exc:
            raise BuildError(f"{request.model}: {exc}") from exc
    return find_or_make("onnxruntime", request, RUNTIME, progress)


def facts(request: EngineRequest) -> dict[str, Any]:
    return describe(request, RUNTIME)


def load(request: EngineRequest, preparation: Preparation | None = None) -> "OnnxRuntimeEngine":
    """Load a model, or its prepared form, which the engine owns from now on; `BuildError` if that fails."""
    preparation = preparation or Preparation()
    try:
        with _mapped_errors():
            return OnnxRuntimeEngine(request, preparation)
    except BaseException:
        if preparation.held is not None:
            preparation.held.close()
        raise


class OnnxRuntimeEngine(Engine):
    """One session on one device.

    Attributes:
        held: The prepared model that the session maps, owned by this object; None if there is none.
        session: The runtime's session.
    """

    concurrent = True

    def __init__(self, request: EngineRequest, preparation: Preparation) -> None:
        self.held = preparation.held
        self.notes = preparation.notes
        self.prepared = "" if self.held is None else self.held.key
        path = preparation.path if self.held is None else self.held.opened / MODEL_FILE
        self.session = _open_session(request, path)
        self.providers = tuple(self.session.get_providers())
        self.spec = ModelSpec(
            inputs=tuple(_spec(arg, "input") for arg in self.session.get_inputs()),
            outputs=tuple(_spec(arg, "output") for arg in self.session.get_outputs()),
        )
        self.weights = self._replaceable(request)
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = _SILENT
        # Its default. If it is not set, each bound run throws and catches a C++ exception to find that
        # out (seen in 1.31), which costs more than a small run.
        self._run_options.add_run_config_entry("gpu_graph_id", "0")
        self._cancelled = False

    def _replaceable(self, request: EngineRequest) -> tuple[TensorSpec, ...]:
        """The specifications of the requested weights; a model prepared before may lack some."""
        found = {
            arg.name: _spec(arg, "weight") for arg in self.session.get_overridable_initializers()
        }
        given = {spec.name for spec in self.spec.outputs} & {*request.variable_weights}
        if given:  # the runtime would return the model's own weights
            raise BuildError(
                f"variable_weights: got {sorted(given)}, which are outputs of the model"
            )
        wanted = [found[name] for name in request.variable_weights if name in found]
        if any(not isinstance(size, int) for spec in wanted for size in spec.shape):
            # For initialisers that are inputs too, exporters may have written symbols there.
            known = scan(request.model).initializers
            found = {
                name: replace(spec, shape=known[name].shape)
                for name, spec in found.items()
                if name in known
            }
        missing = [name for name in request.variable_weights if name not in found]
        if missing:
            raise BuildError(
                f"variable_weights: got {missing}, expected some of {[*found]}, which {request.model} "
                "was loaded with"
            )
        return tuple(found[name] for name in request.variable_weights)

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> Run:
        by_value = any(isinstance(item, Strings) for item in inputs)
        with _mapped_errors(PredictError):
            return (_ValueRun if by_value else _BoundRun)(self, inputs, outputs)

    def arm(self) -> None:
        if self._cancelled:
            self._cancelled = False
            self._run_options.terminate = False

    def cancel(self) -> None:
        self._cancelled = True
        self._run_options.terminate = True

    def run(self, run: Callable[..., Any], *arguments: object) -> Any:
        """Call one of the session's methods that run the model; see `Run.execute` for the errors."""
        try:
            return run(*arguments, self._run_options)
        except _FAILED as exc:
            if self._cancelled:
                raise RunCancelledError("the run was cancelled") from quotable(exc)
            if _BLAMES_BOUND_OUTPUT.search(str(exc)):
                raise _OutputShapeError(str(_map_error(exc, PredictError))) from quotable(exc)
            raise _map_error(exc, PredictError) from quotable(exc)


class _OutputShapeError(PredictError):
    """An output has another shape than the memory that it was bound to."""


class _BoundRun(Run):
    """A binding: inputs and known outputs by address, the others left to the runtime."""

    def __init__(
        self,
        engine: OnnxRuntimeEngine,
        inputs: Sequence[Buffer | Strings],
        outputs: Sequence[Buffer],
    ) -> None:
        self._engine = engine
        self._bound = bound = {buffer.name: buffer for buffer in outputs}
        self._names = [spec.name for spec in engine.spec.outputs]
        self._free = [name for name in self._names if name not in bound]
        self._binding = engine.session.io_binding()
        for item in inputs:
            if isinstance(item, Buffer):
                self._binding.bind_input(item.name, "cpu", 0, *_place(item))
        for name in self._names:  # all of them: `get_outputs` has this order
            if name in bound:
                self._binding.bind_output(name, "cpu", 0, *_place(bound[name]))
            else:
                self._binding.bind_output(name, "cpu")

    def execute(self) -> Sequence[Produced | Strings]:
        # A binding keeps the outputs of the last run, and those of this one would have to fit in there.
        for name in self._free:
            self._binding.bind_output(name, "cpu")
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
        values = dict(zip(self._names, self._binding.get_outputs(), strict=True))
        return delivered([_produced(name, values[name]) for name in self._free], self._bound)


class _ValueRun(Run):
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


def _text_array(item: Strings) -> NDArray[Any]:
    try:  # of bytes the runtime would take the ``repr``
        texts = [v.decode() if isinstance(v, bytes) else v for v in item.values]
    except UnicodeDecodeError as exc:
        raise InvalidInputError(f"input {item.name!r} is not UTF-8: {exc}") from exc
    return np.array(texts, dtype=object).reshape(item.shape)


def _value(item: Buffer) -> Any:
    """The runtime's value over memory. NumPy decides only the width of an element: it lacks some types."""
    element_type = ELEMENT_TYPES[item.element_type]
    array = array_over(item, np.dtype(f"u{element_type.bits // 8}"))
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element_type.onnx)


def _place(buffer: Buffer) -> tuple[int, tuple[int, ...], int]:
    return ELEMENT_TYPES[buffer.element_type].onnx, buffer.shape, buffer.address


def _produced(name: str, value: Any) -> Produced | Strings:
    element_type = _element_type(value.data_type())
    shape = tuple(value.shape())
    if element_type == STRING:
        return Strings(name=name, shape=shape, values=tuple(value.numpy().ravel().tolist()))
    elements = int(np.prod(shape, dtype=np.int64))
    return Produced(
        name=name,
        element_type=element_type,
        shape=shape,
        address=value.data_ptr(),
        size=tensor_bytes(element_type, elements),
        owner=value,
    )


def _element_type(text: str) -> str:
    """The name in `ELEMENT_TYPES` of a type that the runtime writes ``tensor(float)``."""
    inner = text.removeprefix("tensor(").removesuffix(")")
    return _TYPES.get(inner, inner)


def _spec(arg: Any, role: str) -> TensorSpec:
    element_type = _element_type(arg.type)
    if not arg.type.startswith("tensor(") or element_type not in ELEMENT_TYPES:
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
        return InvalidInputError(text)
    if _LACKS_COLLECTIVE.search(text):
        text += (
            "; the model is one rank's slice, with collectives: run all ranks together, or give the whole "
            "model to Master(model, parallel=Parallel(…)), which cuts it"
        )
    if isinstance(exc, MemoryError) or _SHORT_OF_MEMORY.search(text):
        text += memory_limit()
    return base(text)


@cache
def _register_arena() -> None:
    """Make the arena that sessions of this process may share; one for each process."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, None)


def _open_session(request: EngineRequest, prepared: Path | None) -> Any:
    """A session on the requested device, of the prepared form if there is one; `BuildError` if not."""
    options = _session_options(request, prepared=prepared is not None)
    wanted = _PROVIDERS.get(request.device.kind)
    if wanted is None:
        raise BuildError(
            f"engine onnxruntime has no device {request.device}, expected one of "
            f"{[f'{kind}:0' for kind in _PROVIDERS]}"
        )
    if wanted not in ort.get_available_providers() and not request.allow_fallback:
        raise BuildError(
            f"device {request.device} needs the {wanted}, which this onnxruntime "
            f"{ort.__version__} does not have; it has {ort.get_available_providers()}"
        )
    settings = dict(request.provider_options)
    if request.device.kind != "cpu":
        settings["device_id"] = str(request.device.index)
    providers: list[Any] = [(wanted, settings)]
    if request.device.kind == "tensorrt":  # CUDA runs the operators that TensorRT lacks
        providers.append((_PROVIDERS["cuda"], {"device_id": str(request.device.index)}))
    if wanted != _PROVIDERS["cpu"]:
        providers.append(_PROVIDERS["cpu"])
    if request.allow_fallback:
        available = ort.get_available_providers()
        providers = [p for p in providers if (p if isinstance(p, str) else p[0]) in available]
    with ExitStack() as opened:
        path = (
            str(prepared)
            if prepared is not None
            else opened.enter_context(_source(request, options))
        )
        session = _new_session(path, options, providers, fallback=request.allow_fallback)
    session.disable_fallback()
    got = session.get_providers()[0]
    if got != wanted and not request.allow_fallback:
        raise BuildError(
            f"device {request.device} needs the {wanted}, but the runtime fell back to "
            f"{got}; EngineOptions(allow_fallback=True) would accept that"
        )
    return session


def _new_session(path: str, options: Any, providers: list[Any], *, fallback: bool = False) -> Any:
    """A session; without `fallback` the runtime does not try another device by itself."""
    return ort.InferenceSession(path, options, providers=providers, enable_fallback=int(fallback))


def prepare(request: EngineRequest, folder: str) -> None:
    """Write the prepared model into a folder, and check that it loads; `BuildError` if not."""
    path = os.path.join(folder, MODEL_FILE)
    for least in _MAX_BYTES_INSIDE:
        options = _session_options(request)
        options.optimized_model_filepath = path
        options.log_severity_level = _SILENT  # it warns that the result is for this CPU only
        for key, value in {**_SAVING, _LEAST_BYTES: str(least)}.items():
            options.add_session_config_entry(key, value)
        try:
            with _mapped_errors():
                with _source(request, options) as model:
                    _new_session(model, options, [_PROVIDERS["cpu"]])
                options = _session_options(request, prepared=True)
                _new_session(path, options, [_PROVIDERS["cpu"]])
            return
        except BuildError as exc:
            if least == _MAX_BYTES_INSIDE[-1] or _OUTSIDE not in str(exc):
                raise
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))


@contextmanager
def _mapped_errors(base: type[EngineError] = BuildError) -> Iterator[None]:
    try:
        yield
    except McinferError:
        raise
    except _FAILED as exc:
        raise _map_error(exc, base) from quotable(exc)


def _session_options(request: EngineRequest, *, prepared: bool = False) -> Any:
    options = ort.SessionOptions()
    config = {}
    options.intra_op_num_threads = request.threads
    options.inter_op_num_threads = request.inter_op_threads or 1
    if options.inter_op_num_threads > 1:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    # By default idle threads spin and take cores from others; ours stop when a run ends,
    # and do not spin at all if cores are shared.
    config["session.force_spinning_stop"] = "1"
    if request.shared_cores:
        config["session.intra_op.allow_spinning"] = "0"
    config.update(request.session_config)
    if request.variable_weights or prepared:
        options.log_severity_level = _SILENT  # it warns of each that is not constant
    if prepared:  # already optimised; its weights lie beside it
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        config.pop(FOLDER_KEY, None)
    for key, value in config.items():  # each once: it warns of entries that are set again
        options.add_session_config_entry(key, value)
    if request.session_config.get(_SHARED_ARENA) == "1":
        with _REGISTERING:
            _register_arena()
    return options


@contextmanager
def _source(request: EngineRequest, options: Any) -> Iterator[str]:
    """The path of the model, with replaceable weights among its inputs.

    Constant weights that are inputs too are defaults (onnx.proto, GraphProto.initializer, from IR version 4
    on). Protobuf joins the parts of a message, so inputs are added by writing them after the model's bytes.
    """
    if not request.variable_weights:
        yield request.model
        return
    found = scan(request.model)
    added = added_inputs(found, request.variable_weights)
    with ExitStack() as opened:
        fd = os.memfd_create("mcinfer-model", os.MFD_CLOEXEC)
        opened.callback(os.close, fd)
        with open_regular(request.model) as (model, info), os.fdopen(os.dup(fd), "wb") as target:
            for part in chunks(model, info.st_size):
                target.write(part)
            target.write(added)
        if not request.session_config.get(FOLDER_KEY):
            _add_external_data(request, options, found.external, opened)
        yield f"/proc/self/fd/{fd}"


def _add_external_data(
    request: EngineRequest, options: Any, locations: tuple[str, ...], opened: ExitStack
) -> None:
    """Name the external data of a model that the runtime gets as a file without a folder.

    In the caches of model hubs, files are links to another folder, which the runtime allows only for models
    at their own paths. Then the content of the files is passed, which the runtime (1.31) copies.
    """
    model = Path(request.model).absolute()
    folder = os.path.realpath(model.parent)
    files = external_files(model, None, locations)
    if all(Path(os.path.realpath(path)).is_relative_to(folder) for path in files):
        options.add_session_config_entry(FOLDER_KEY, folder)
        return
    contents: list[Any] = []
    for path in files:
        descriptor, info = opened.enter_context(open_regular(path))
        if info.st_size:  # mapped as long as the session is made
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            contents.append(opened.enter_context(mapped))
        else:
            contents.append(b"")
    options.add_external_initializers_from_files_in_memory(
        [*locations], contents, [*map(len, contents)]
    )
