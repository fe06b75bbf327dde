"""Sessions of ONNX Runtime: how they are opened, and how a model is prepared for them."""

import mmap
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from mcinfer.engines.base import EngineRequest, memory_limit
from mcinfer.engines.preparation import Runtime
from mcinfer.errors import (
    BuildError,
    EngineError,
    InvalidInputError,
    McinferError,
    MissingDependencyError,
    PredictError,
)
from mcinfer.model_cache.building import MODEL_FILE
from mcinfer.model_cache.cache import Held
from mcinfer.model_cache.keys import FOLDER_KEY
from mcinfer.model_cache.onnx_files import added_inputs, chunks, external_files, open_regular, scan
from mcinfer.printable import quotable, shortened

try:
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as ort_state
except ImportError as exc:
    raise MissingDependencyError(
        "engine onnxruntime needs the package onnxruntime (or onnxruntime-gpu): "
        "pip install onnxruntime"
    ) from exc

_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "ascend": "CANNExecutionProvider",
}
"""By kind of device. Only the first was ever run by the tests."""

INVALID = (ort_state.InvalidArgument,)
"""The runtime's exceptions that put the blame on the inputs of a run."""

_BLAMES_INPUTS = re.compile(
    r"(Invalid rank|[Ii]nvalid dimensions) for input|Unexpected input data type|"
    r"Failed to find input name|Missing Input|missing from input feed"
)
"""Bound runs raise RuntimeError whatever is wrong (1.31): only its text tells whose fault it is."""

BLAMES_BOUND_OUTPUT = re.compile(
    r"output OrtValue provided for output|[Ii]nvalid (rank|dimensions) for output|shape verification failed"
)
"""What it says where an output comes out in another shape than it was bound with (1.31)."""

FAILED = (
    ort_state.EPFail,
    ort_state.EngineError,
    ort_state.Fail,
    ort_state.InvalidGraph,
    ort_state.InvalidProtobuf,
    ort_state.ModelLoaded,
    ort_state.NoModel,
    ort_state.NoSuchFile,
    ort_state.NotImplemented,
    ort_state.RuntimeException,
    MemoryError,
    OverflowError,
    RuntimeError,
    ValueError,
    # Not in every version.
    *(
        getattr(ort_state, name)
        for name in ("DeviceReset", "ModelLoadCanceled", "ModelRequiresCompilation", "NotFound")
        if hasattr(ort_state, name)
    ),
)
"""All others that it raises: its own, and the plain ones of its Python layer."""

_SHORT_OF_MEMORY = re.compile(r"bad_alloc|Failed to allocate|Available memory of")

_SHARED_ARENA = "session.use_env_allocators"
"""The runtime's option for sessions that share one arena, which has to be there first."""

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
    # The graph as it is optimised for this CPU, with constant weights as its kernels pack them, in
    # one file that sessions map (onnxruntime_session_options_config_keys.h).
    "session.optimized_model_external_initializers_file_name": "weights.bin",
    "session.save_external_prepacked_constant_initializers": "1",
}

_LEAST_BYTES = "session.optimized_model_external_initializers_min_size_in_bytes"
_OUTSIDE = "external tensors"
_MAX_BYTES_INSIDE = (1 << 10, 1 << 16)
"""What is smaller stays in the graph. Shapes have to, since the runtime reads them before it maps anything:
where one is larger than the first of these, and the runtime says `_OUTSIDE`, the second is tried."""

_REGISTERING = threading.Lock()
"""Held while that arena is made."""

SILENT = 4
"""Severity of what the runtime prints: only what is fatal. Its errors reach the caller as exceptions."""


def map_error(exc: Exception, base: type[EngineError]) -> McinferError:
    """Ours for one of the runtime's."""
    text = shortened(f"onnxruntime: {exc}")
    if base is PredictError and (isinstance(exc, INVALID) or _BLAMES_INPUTS.search(text)):
        return InvalidInputError(text)
    if isinstance(exc, MemoryError) or _SHORT_OF_MEMORY.search(text):
        text += memory_limit()
    return base(text)


def _register_shared_arena() -> None:
    """Make the arena that all sessions of this process may share; one for each process."""
    with _REGISTERING:  # `cache` lets first calls in side by side
        _register_arena_once()


@cache
def _register_arena_once() -> None:
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, None)


def open_session(request: EngineRequest, held: Held | None) -> Any:
    """A session on the device that was asked for.

    Args:
        request: What is to be loaded.
        held: Its prepared form, where there is one, which must outlive the session.

    Raises:
        BuildError: There is no such device here, or the runtime fell back to another.
        Exception: The runtime's own, for `mapped_errors`.
    """
    options = _session_options(request, prepared=held is not None)
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
    if request.device.kind == "tensorrt":  # what it cannot run the other one on the same GPU may
        providers.append((_PROVIDERS["cuda"], {"device_id": str(request.device.index)}))
    if wanted != _PROVIDERS["cpu"]:
        providers.append(_PROVIDERS["cpu"])
    if request.allow_fallback:
        available = ort.get_available_providers()
        providers = [p for p in providers if (p if isinstance(p, str) else p[0]) in available]
    if held is not None:
        path = str(held.opened / MODEL_FILE)
        session = _new_session(path, options, providers, fallback=request.allow_fallback)
    else:
        with _source(request, options) as path:
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
    """A session; without `fallback` the runtime does not try once more on another device by itself."""
    return ort.InferenceSession(path, options, providers=providers, enable_fallback=int(fallback))


def check(request: EngineRequest) -> None:
    """Refuse what no session can be opened with, before a model is prepared for it.

    Raises:
        BuildError: A weight that is to be replaceable cannot be.
    """
    if request.variable_weights:
        try:
            added_inputs(scan(request.model), request.variable_weights)
        except OSError as exc:
            raise BuildError(f"{request.model}: {exc}") from exc


def prepare(request: EngineRequest, folder: str) -> None:
    """Write the prepared model into a folder, and see that it loads.

    Raises:
        BuildError: It cannot be written, or not be loaded then; the runtime's own words.
    """
    for least in _MAX_BYTES_INSIDE:
        try:
            with mapped_errors():
                _prepare(request, folder, least)
            return
        except BuildError as exc:
            if least == _MAX_BYTES_INSIDE[-1] or _OUTSIDE not in str(exc):
                raise
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))


def _prepare(request: EngineRequest, folder: str, least: int) -> None:
    path = os.path.join(folder, MODEL_FILE)
    options = _session_options(request)
    options.optimized_model_filepath = path
    options.log_severity_level = SILENT  # it warns that the result is for this CPU alone
    for key, value in {**_SAVING, _LEAST_BYTES: str(least)}.items():
        options.add_session_config_entry(key, value)
    with _source(request, options) as model:
        _new_session(model, options, [_PROVIDERS["cpu"]])
    options = _session_options(request, prepared=True)
    _new_session(path, options, [_PROVIDERS["cpu"]])


@contextmanager
def mapped_errors() -> Iterator[None]:
    try:
        yield
    except McinferError:
        raise
    except (*INVALID, *FAILED) as exc:
        raise map_error(exc, BuildError) from quotable(exc)


def _session_options(request: EngineRequest, *, prepared: bool = False) -> Any:
    options = ort.SessionOptions()
    config = {}
    options.intra_op_num_threads = request.threads
    options.inter_op_num_threads = request.inter_op_threads or 1
    if options.inter_op_num_threads > 1:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    # Idle threads spin by default and take cores from others; ours stop when a run ends,
    # and do not spin at all where cores are shared.
    config["session.force_spinning_stop"] = "1"
    if request.shared_cores:
        config["session.intra_op.allow_spinning"] = "0"
    config.update(request.session_config)
    if request.variable_weights or prepared:
        options.log_severity_level = SILENT  # it warns of each that it is not constant
    if prepared:  # it was optimised before, and its weights lie beside it
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        config.pop(FOLDER_KEY, None)
    for key, value in config.items():  # each once: it warns of those that are set again
        options.add_session_config_entry(key, value)
    if request.session_config.get(_SHARED_ARENA) == "1":
        _register_shared_arena()
    return options


@contextmanager
def _source(request: EngineRequest, options: Any) -> Iterator[str]:
    """The path of the model as it was given, with replaceable weights among its inputs.

    Constant weights that are inputs as well are defaults (onnx.proto, GraphProto.initializer, from IR version
    4 on). Protobuf joins a message's parts, so an input is added by writing it behind the model's own bytes.
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

    In the caches of model hubs a model's files are links that lead out of its folder, to that of the model's
    own target, which the runtime allows for none but models at their own paths: then the files' content is
    handed over, which the runtime (1.31) copies, and takes for all tensors but those of subgraphs.

    Raises:
        BuildError: The data lies elsewhere, or is no regular file.
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
