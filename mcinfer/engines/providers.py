"""ONNX Runtime's execution providers: which one a device has, its options, and what its errors mean.

Nothing here needs the runtime, so everything here is the same on a machine without a card. Options have the
runtime's own names (https://onnxruntime.ai/docs/execution-providers/), and reach it as they are; those that
follow from the request are added.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcinfer.config import Device
from mcinfer.engines.base import EngineRequest, OutOfDeviceMemoryError
from mcinfer.errors import BuildError, CardLostError, EngineError, shortened

NAMES = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "cann": "CANNExecutionProvider",
}
"""By the short names of `mcinfer.config.PROVIDERS`."""

_OF_DEVICES = {
    "cpu": ("cpu",),
    "cuda": ("cuda", "tensorrt"),
    "ascend": ("cann",),
}
"""By kind of device, its own first."""

ON_CARDS = (NAMES["cuda"], NAMES["tensorrt"])
"""Providers whose tensors lie in a CUDA device's memory."""

_POINTERS = (
    *("user_compute_stream", "has_user_compute_stream"),
    *("gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache"),
)
"""Options whose values are addresses, which are worth nothing in a worker's process."""

_OF_TENSORRT = "trt_"  # how the names of options begin that TensorRT's provider alone has

_GRAPHS = ("enable_cuda_graph", "trt_cuda_graph_enable")
"""Options that capture a run as a CUDA graph, with the addresses of its tensors."""

_ENGINE_CACHE = ("trt_engine_cache_enable", "trt_engine_cache_path")
_OF_RUNS = frozenset(
    {
        *("device_id", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream"),
        *("cudnn_conv_algo_search", "cudnn_conv_use_max_workspace", *_GRAPHS, *_ENGINE_CACHE),
    }
)
"""Options for cards without an effect on the optimised graph, or on what TensorRT builds."""

_TRUE = ("1", "true", "True")  # how the runtime reads a Boolean

Providers = list[tuple[str, dict[str, str]]]


def provider_of(request: EngineRequest) -> str:
    """The short name of the provider that the request is for; `BuildError` if its device has none such."""
    device = request.device
    known = _OF_DEVICES.get(device.kind)
    if known is None:
        raise BuildError(
            f"engine onnxruntime has no device {device}, expected one of "
            f"{[f'{kind}:0' for kind in _OF_DEVICES]}"
        )
    if request.options.provider not in (None, *known):
        raise BuildError(
            f"provider: got {request.options.provider!r} for device {device}, expected one of {[*known]}"
        )
    return request.options.provider or known[0]


def provider_list(request: EngineRequest, engine_folder: str | None = None) -> Providers:
    """The providers of a session and their options, first choice first.

    Args:
        request: What to load.
        engine_folder: Where TensorRT keeps the engines that it builds; None to build them each time.

    Raises:
        BuildError: The device lacks the provider, or an option does not fit it.
    """
    provider = provider_of(request)
    given = dict(request.options.provider_options)
    if provider == "cpu":
        return [(NAMES["cpu"], given)]
    _check_options(provider, request.device, given)
    given.pop("device_id", None)
    common = {"device_id": str(request.device.index)}
    if provider == "cann":
        return [(NAMES["cann"], {**given, **common}), (NAMES["cpu"], {})]
    if request.stream is not None:
        common["user_compute_stream"] = str(request.stream)
    for_cuda = {key: text for key, text in given.items() if not key.startswith(_OF_TENSORRT)}
    if request.memory_limit is not None:
        for_cuda["gpu_mem_limit"] = str(request.memory_limit)
    listed = [(NAMES["cuda"], {**for_cuda, **common}), (NAMES["cpu"], {})]
    if provider == "tensorrt":  # CUDA runs the operators that TensorRT lacks
        own = {key: text for key, text in given.items() if key.startswith(_OF_TENSORRT)}
        if engine_folder is not None and keeps_engines(request):
            own |= dict(zip(_ENGINE_CACHE, ("1", engine_folder), strict=True))
        listed.insert(0, (NAMES["tensorrt"], {**own, **common}))
    return listed


def graph_options(request: EngineRequest) -> dict[str, str]:
    """The provider's options that a prepared model depends on."""
    given, on_cpu = request.options.provider_options, request.device.kind == "cpu"
    return {key: text for key, text in given.items() if on_cpu or key not in _OF_RUNS}


def keeps_engines(request: EngineRequest) -> bool:
    """Whether TensorRT is to keep what it builds in the model cache: unless the user chose otherwise."""
    chosen = any(key in request.options.provider_options for key in _ENGINE_CACHE)
    return provider_of(request) == "tensorrt" and request.options.prepare != "never" and not chosen


def _check_options(provider: str, device: Device, options: Mapping[str, str]) -> None:
    if pointers := [key for key in _POINTERS if key in options]:
        raise BuildError(
            f"provider_options: got {pointers}, whose values are addresses in another process than the "
            "worker's; each worker has a stream and memory of its own"
        )
    for key in _GRAPHS:
        if options.get(key) in _TRUE:
            raise BuildError(
                f"provider_options: got {key!r}, expected it left out: each run has its tensors at other "
                "addresses"
            )
    if options.get("device_id", str(device.index)) != str(device.index):
        raise BuildError(
            f"provider_options: got device_id {options['device_id']!r} for device {device}, expected it left "
            "out: the device says it"
        )
    foreign = [key for key in options if key.startswith(_OF_TENSORRT)]
    if foreign and provider != "tensorrt":
        raise BuildError(
            f"provider_options: got {foreign} for the provider {provider!r}, expected "
            "EngineOptions(provider='tensorrt')"
        )


def check_available(request: EngineRequest, available: Sequence[str], version: str) -> None:
    """Raise `BuildError` if this runtime lacks the provider, unless it may fall back to another one."""
    wanted = NAMES[provider_of(request)]
    if wanted not in available and not request.options.allow_fallback:
        raise BuildError(
            f"device {request.device} needs the {wanted}, which this onnxruntime {version} does not have; "
            f"it has {[*available]}"
        )


def check_got(request: EngineRequest, got: str) -> None:
    """Raise `BuildError` if the runtime fell back to another provider, unless it may."""
    wanted = NAMES[provider_of(request)]
    if got != wanted and not request.options.allow_fallback:
        where = "; its log names the libraries that it lacks" if wanted in ON_CARDS else ""
        raise BuildError(
            f"device {request.device} needs the {wanted}, but the runtime fell back to {got}{where}; "
            "EngineOptions(allow_fallback=True) would accept that"
        )


# Weights on a card.

_REFUSED_TYPE = "dlpack_converter.cc"
"""In the runtime's message about an element type that it does not take (1.31)."""


def runtime_values(tensors: Mapping[str, Any], from_dlpack: Callable[[Any], Any]) -> dict[str, Any]:
    """Tensors of DLPack as values of ONNX Runtime, in place.

    Without those of types that it takes from no other library: before 1.32, Booleans, and elements of eight
    bits or less that are no integers of C. Each session loads these from the file.

    Args:
        tensors: The weights, with their `element_type`.
        from_dlpack: `onnxruntime.OrtValue.from_dlpack`.
    """
    values, refused = {}, set()
    for name, tensor in tensors.items():
        if tensor.element_type in refused:
            continue
        try:
            values[name] = from_dlpack(tensor)
        except RuntimeError as exc:
            if _REFUSED_TYPE not in str(exc):
                raise
            refused.add(tensor.element_type)
    return values


# Errors of a run on a card.

_OUT_OF_MEMORY = re.compile(
    # Of its arenas: bfc_arena.cc, cuda_mempool_arena.cc.
    r"Failed to allocate memory for requested buffer of size (?P<size>\d+)|"
    r"smaller than requested bytes of (?P<bytes>\d+)|"
    r"Failed to find a free memory block despite calling Extend\. rounded_bytes=(?P<rounded>\d+)|"
    r"cudaMallocFromPoolAsync failed.*\(2\), size=(?P<pool>\d+)|"
    # Of CUDA and its libraries: cuda_call.cc, and TensorRT's own.
    r"CUDA (?:failure|error) 2\b|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|"
    r"CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)|"
    r"CUDA_ERROR_OUT_OF_MEMORY|OutOfMemory"
)

_FAILURE = re.compile(r"\b(?:CUDA|Cuda) (?:failure|error):? (\d+)\b")
"""cuda_call.cc: ``CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=…``."""

_LOST = frozenset(
    {
        *(4, 46, 214, 220, 226),  # the driver or the device is gone, or its memory is damaged
        *(700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721),  # the process's context is
        *(806, 810, 911),  # the MPS server, or an external device, has failed
    }
)
"""Of `cudaError_t`: those after which, by its documentation, a process must be ended and started again
("inconsistent state", "terminated and relaunched"), and those of a device or driver that is gone."""


def device_error(text: str) -> EngineError | None:
    """What an error of a run on a card means beyond its text; None if it is the run's own.

    Returns:
        `OutOfDeviceMemoryError` with the bytes that were asked for, or `CardLostError`.
    """
    failure = _FAILURE.search(text)
    if failure and int(failure[1]) in _LOST:
        return CardLostError(shortened(f"the card cannot be used by this process any more: {text}"))
    if (short := _OUT_OF_MEMORY.search(text)) is None:
        return None
    asked = next((int(size) for size in short.groups() if size), None)
    what = "" if asked is None else f", which asked for {asked} bytes"
    return OutOfDeviceMemoryError(
        shortened(f"the card has too little memory left for this run{what}: {text}"), asked
    )
