"""OpenVINO (https://docs.openvino.ai): a compiled model, whose requests read and write shared memory.

::

    BoundRun ──► an idle `InferRequest` ──► tensors of the layout set ──► start, wait ──► idle again

Models are ONNX files, or OpenVINO's own IR: a graph (``.xml``) with its weights beside it (``.bin``).
OpenVINO keeps no names of dynamic dimensions; those of an ONNX file are read from the file.

What OpenVINO (2026.4) does, found by trying:

* `InferRequest.infer` of its Python package swallows errors of a run and leaves old outputs, so all runs
  are started (`start_async`) and waited for. That costs some 10 µs more, and `cancel` reaches a run at any
  time.
* The CPU writes an output of a fixed shape where it is bound. It has outputs of dynamic shapes in memory of
  its own and copies them to a place that is bound, or fails if that is too small: they are not bound here,
  and copied to their places after the run.
* The CPU has 32 bits of int64 and uint64, so larger numbers lose their upper half, even on their way
  through; float64 is computed as float32, and float16 in what `precision` says.
* Requests that share a stream run one after another, and share the memory between operators. Streams have
  threads of their own, and one copy of the packed weights.
* Strings crash some operators (Reshape), complex numbers are unknown: `BuildError`.
"""

import ctypes
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import (
    BoundRun,
    Buffer,
    Engine,
    EngineRequest,
    Produced,
    RunCancelledError,
    Strings,
    array_over,
    check_request,
    delivered,
    memory_limit,
)
from mcinfer.engines.preparation import Runtime, engine_folder
from mcinfer.errors import (
    BuildError,
    EngineError,
    InvalidInputError,
    McinferError,
    PredictError,
    quotable,
    requires,
    shortened,
)
from mcinfer.model_cache import is_large
from mcinfer.model_cache.cache import Cache, CacheUnusableError
from mcinfer.model_cache.onnx_files import Shapes, openvino_shapes, scan
from mcinfer.private import alone_in
from mcinfer.specs import (
    STRING,
    ModelDescription,
    ModelSpec,
    TensorSpec,
    numpy_dtype,
)

_TELEMETRY = "openvino_telemetry"


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Import OpenVINO as if its package for telemetry were not installed.

    With it, each import writes to ``~/intel``, starts a thread and sends an event
    (``openvino/tools/ovc/__init__.py``).
    """
    if hidden := _TELEMETRY not in sys.modules:
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment] # an import of it then fails
    try:
        yield
    finally:
        if hidden:
            sys.modules.pop(_TELEMETRY, None)


with (
    requires("engine openvino needs OpenVINO: pip install 'mcinfer[openvino]'", "openvino"),
    _without_telemetry(),
):
    import openvino as ov

_PLUGINS = {"cpu": "CPU", "openvino-gpu": "GPU", "npu": "NPU"}
"""OpenVINO's kinds of devices, by those of `mcinfer.config.Device`."""

_ELEMENT_TYPES = {
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "bf16": "bfloat16",
    "boolean": "bool",
    **{f"i{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (4, 8, 16, 32, 64)},
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
"""Element types by OpenVINO's names."""

_PRECISION = "INFERENCE_PRECISION_HINT"
_FOLDER = "CACHE_DIR"

_PLACES = re.compile(
    r"(Caught exception: )?Exception from \S+:\d+:\s*|Check '[^\n]*' failed at src/\S+:\d+:?"
)
"""The places in OpenVINO's source that its messages name."""

_CANCELLED = "Infer Request was canceled"

_STUCK_SECONDS = 120.0
"""Longest wait for another process that compiles the same model: less than `Timeouts.start`."""

_SHORT_OF_MEMORY = re.compile(
    r"bad_alloc|[Ff]ailed to allocate|[Cc]an('t|not) alloc|[Oo]ut of memory|CL_OUT_OF_|"
    r"Resource temporarily unavailable"  # a thread's stack
)

_VERSION = f"openvino {ov.__version__.partition('-')[0]}"

_NOTHING = np.zeros(1, np.uint8)
"""The memory of tensors without elements: OpenVINO takes no null."""


def load(request: EngineRequest) -> "OpenVinoEngine":
    try:
        return OpenVinoEngine(request)
    except McinferError:
        raise
    except OSError as exc:
        raise BuildError(f"{request.model}: {exc}") from exc
    except (MemoryError, RuntimeError, TypeError, ValueError) as exc:
        # OpenVINO has no exceptions of its own.
        raise _mapped(exc, BuildError, f"{request.model}: ") from quotable(exc)


class OpenVinoEngine(Engine):
    """A model compiled for one device, with a stream for each run at once.

    Attributes:
        compiled: OpenVINO's.
        input_ports: In the model's order.
        output_ports: In the model's order.
    """

    version = _VERSION
    turn = nullcontext()

    def __init__(self, request: EngineRequest) -> None:
        _check_options(request)
        inputs, outputs = openvino_shapes(request.model)
        self.compiled = _compiled(request)
        if not self.compiled.outputs:  # it goes by the ending of the file's name
            raise BuildError(f"{request.model}: OpenVINO finds no outputs in it, expected *.onnx")
        self.providers = tuple(self.compiled.get_property("EXECUTION_DEVICES"))
        self.input_ports = [
            _Port(port, "input", number, inputs) for number, port in enumerate(self.compiled.inputs)
        ]
        self.output_ports = [
            _Port(port, "output", number, outputs)
            for number, port in enumerate(self.compiled.outputs)
        ]
        self.spec = ModelSpec(
            inputs=tuple(port.spec for port in self.input_ports),
            outputs=tuple(port.spec for port in self.output_ports),
        )
        self.notes = _notes(request, self.compiled, self.spec)
        if request.options.describe:
            self.description = _description(request.model, self.compiled, self.providers)
        self.concurrent = request.options.runs_at_once
        self._begin()
        if kept := [state.name for state in self._idle[0].native.query_state()]:
            raise BuildError(
                f"openvino: {request.model} keeps {kept} from run to run, and any worker may have the next "
                "one; export it without state"
            )

    def _begin(self) -> None:
        self._lock = threading.Lock()  # of the next two
        self._cancelled = False
        self._running: set[Any] = set()
        # One at once: to make another one, OpenVINO waits for runs that are under way.
        self._idle = [_Request(self.compiled.create_infer_request())]

    def twin(self) -> "OpenVinoEngine":
        other = copy(self)
        other._begin()
        return other

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
        tensors = [
            port.tensor(port.checked(item))
            for port, item in zip(self.input_ports, inputs, strict=True)
        ]
        places = {place.name: place for place in outputs if place.device is None}
        return _OpenVinoRun(self, tensors, places)

    def take(self) -> "_Request":
        """An idle request, or another one: as many exist as have been under way at once."""
        try:
            return self._idle.pop()
        except IndexError:
            return _Request(self.compiled.create_infer_request())

    def give_back(self, request: "_Request") -> None:
        """Make it idle, whatever became of its run."""
        self._idle.append(request)

    def run(self, native: Any) -> None:
        """Run one of OpenVINO's requests; see `BoundRun.execute` for the errors."""
        with self._lock:
            if self._cancelled:
                raise RunCancelledError("the run was cancelled before it began")
            native.start_async()
            self._running.add(native)
        ended = False
        try:
            native.wait()
            ended = True
        except (MemoryError, RuntimeError) as exc:
            ended = True
            if _CANCELLED in str(exc):
                raise RunCancelledError("the run was cancelled") from None
            raise _mapped(exc, PredictError) from quotable(exc)
        finally:
            with self._lock:
                self._running.discard(native)
            if not ended:  # a signal's handler raised: the run must not outlive its memory
                native.cancel()
                with suppress(RuntimeError):
                    native.wait()

    def arm(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            for native in self._running:
                native.cancel()

    def close(self) -> None:
        self._idle.clear()


class _Port:
    """An input or output of a compiled model.

    Attributes:
        spec: As mcinfer has it.
        is_fixed: Whether its shape is known before a run.
    """

    def __init__(self, port: Any, role: str, number: int, declared: Shapes) -> None:
        names = port.get_names()
        name = next((name for name in declared if name in names), "")
        # An IR may have no names of tensors.
        name = name or (port.get_any_name() if names else f"{role}_{number}")
        self._type, self._shape = port.get_element_type(), port.get_partial_shape()
        element_type = _ELEMENT_TYPES.get(self._type.get_type_name())
        if element_type is None:
            raise BuildError(
                f"openvino: {role} {name!r} is of type {self._type.get_type_name()}, expected one of "
                f"{[*_ELEMENT_TYPES]}"
            )
        if self._shape.rank.is_dynamic:
            raise BuildError(f"openvino: {role} {name!r} has no fixed number of dimensions")
        self.is_fixed = self._shape.is_static
        own = [size.get_length() if size.is_static else None for size in self._shape]
        given = declared.get(name, ())
        if len(given) != len(own):
            given = (None,) * len(own)
        shape = tuple(
            size if size is not None else said for size, said in zip(own, given, strict=True)
        )
        self.spec = TensorSpec(name=name, dtype=numpy_dtype(element_type), shape=shape)

    def checked(self, item: Buffer | Strings) -> Buffer:
        """The tensor, if it is one for this input; else `InvalidInputError`."""
        got = STRING if isinstance(item, Strings) else item.element_type
        fits = got == self.spec.element_type and self._shape.compatible(
            ov.PartialShape([*item.shape])
        )
        if isinstance(item, Strings) or not fits:
            raise InvalidInputError(
                f"openvino: input {item.name!r} is {got}{[*item.shape]}, expected {self.spec} (OpenVINO's "
                f"shape {self._shape})"
            )
        if item.device is not None:
            raise InvalidInputError(
                f"openvino: input {item.name!r} lies on {item.device}, expected the host's memory"
            )
        return item

    def tensor(self, buffer: Buffer) -> Any:
        """OpenVINO's tensor over this memory."""
        memory: NDArray[Any] = _NOTHING
        if buffer.size:
            flat = Buffer(
                name=buffer.name,
                element_type="uint8",
                shape=(buffer.size,),
                address=buffer.address,
                size=buffer.size,
            )
            memory = array_over(flat)
        return ov.Tensor(memory, ov.Shape([*buffer.shape]), self._type)

    def new_tensor(self) -> Any:
        """A tensor of this port's fixed shape in memory of its own."""
        return ov.Tensor(self._type, self._shape.to_shape())

    def produced(self, tensor: Any, owner: object) -> Produced:
        """An output in OpenVINO's memory."""
        shape = tensor.shape  # by its indices: an iteration over it takes 40 µs
        return Produced(
            name=self.spec.name,
            element_type=self.spec.element_type,
            shape=tuple([shape[i] for i in range(len(self.spec.shape))]),
            address=tensor.data.__array_interface__["data"][0],
            size=tensor.byte_size,
            owner=owner,
        )


@dataclass(slots=True, eq=False)
class _Request:
    """One of OpenVINO's requests, and the run whose tensors are set in it."""

    native: Any
    run: "_OpenVinoRun | None" = None


class _OpenVinoRun(BoundRun):
    """Tensors over a layout's inputs and its outputs of fixed shapes. It has no request of its own.

    A request has an output of a dynamic shape in memory of its own, which is copied to its place.
    """

    def __init__(
        self, engine: OpenVinoEngine, inputs: Sequence[Any], places: Mapping[str, Buffer]
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._places = places
        self._bound: dict[int, Any] = {}
        for number, port in enumerate(engine.output_ports):
            place = places.get(port.spec.name)
            if port.is_fixed and place is not None and place.shape == port.spec.shape:
                self._bound[number] = port.tensor(place)

    def execute(self) -> Sequence[Produced | Strings]:
        request = self._engine.take()
        try:
            return self._execute(request)
        finally:
            self._engine.give_back(request)

    def _execute(self, request: "_Request") -> Sequence[Produced | Strings]:
        native, ports = request.native, self._engine.output_ports
        own = {}
        try:
            if request.run is not self:
                request.run = None  # until all are set
                for number, tensor in enumerate(self._inputs):
                    native.set_input_tensor(number, tensor)
                for number, tensor in self._bound.items():
                    native.set_output_tensor(number, tensor)
                request.run = self
            for number, port in enumerate(ports):
                if port.is_fixed and number not in self._bound:
                    own[number] = port.new_tensor()
                    native.set_output_tensor(number, own[number])
        except RuntimeError as exc:
            raise _mapped(exc, PredictError) from quotable(exc)
        self._engine.run(native)
        made = []
        for number, port in enumerate(ports):
            if number in own:
                made.append(port.produced(own[number], own[number]))
            elif number not in self._bound:
                made.append(port.produced(native.get_output_tensor(number), request))
        left = delivered(made, self._places)
        return [
            _copied(item) if isinstance(item, Produced) and item.owner is request else item
            for item in left
        ]


def _copied(item: Produced) -> Produced:
    """An output in memory of its own: the next run of the request writes to that of OpenVINO."""
    memory = np.empty(item.size, np.uint8)
    address = memory.__array_interface__["data"][0]
    ctypes.memmove(address, item.address, item.size)
    return replace(item, address=address, owner=memory)


# Loading.


def _check_options(request: EngineRequest) -> None:
    check_request("openvino", request.with_options(session_config={}, streams=None))
    if (runs := request.options.streams) and request.device.kind == "npu":
        raise BuildError(f"streams: got {runs} for {request.device}, expected None")
    if (count := request.options.inter_op_threads) is not None:
        raise BuildError(
            f"inter_op_threads: got {count}, but the engine openvino runs one operator after another"
        )


def _compiled(request: EngineRequest) -> Any:
    """The model, compiled or taken from the cache."""
    core = ov.Core()
    device = _device(core, request)
    properties = _properties(request, device)
    folder = _cache_folder(request, core, device)
    # OpenVINO takes the right to write to a file once it is complete.
    is_built = folder is not None and any(
        not file.stat().st_mode & 0o222 for file in folder.glob("*.blob")
    )
    if folder is not None:
        properties[_FOLDER] = str(folder)
    with ExitStack() as alone:
        if folder is not None and not is_built:
            # Workers that start together build it once. If one of them stands still, or the folder was
            # removed meanwhile, the others build it, too.
            with suppress(OSError):
                alone.enter_context(alone_in(folder, _STUCK_SECONDS))
        try:
            compiled = core.compile_model(request.model, device, properties)
        except RuntimeError as exc:
            if lacking := _lacking(core, request.model, device):
                raise BuildError(
                    f"{_mapped(exc, BuildError)}; {device} lacks the operators {lacking}"
                ) from quotable(exc)
            raise
    if folder is not None and not is_built:
        with suppress(CacheUnusableError):
            Cache.default().evict()
    return compiled


def _device(core: Any, request: EngineRequest) -> str:
    """OpenVINO's name of the device; `BuildError` if there is none such here."""
    device = request.device
    if device.kind not in _PLUGINS:
        raise BuildError(
            f"engine openvino has no device {device}, expected one of "
            f"{[f'{kind}:0' for kind in _PLUGINS]}"
        )
    if device.kind == "cpu":  # whose index is the worker's share of the cores
        return "CPU"
    plugin, available = _PLUGINS[device.kind], core.available_devices
    names = [f"{plugin}.{device.index}", *([plugin] if device.index == 0 else [])]
    if found := [name for name in names if name in available]:
        return found[0]
    if request.options.allow_fallback:
        return "CPU"
    raise BuildError(f"device {device}: {_VERSION} finds no {names[0]} here; it has {[*available]}")


def _properties(request: EngineRequest, device: str) -> dict[str, Any]:
    """The properties of the compiled model; those that the user names come last."""
    properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    precision = request.options.precision or ("" if device.startswith("NPU") else "f32")
    if precision:
        properties[_PRECISION] = precision
    if precision == "f32":
        # Else the activations of compressed weights are quantized.
        properties["EXECUTION_MODE_HINT"] = "ACCURACY"
    runs = request.options.runs_at_once
    if not device.startswith("NPU"):
        properties["NUM_STREAMS"] = runs
    if device == "CPU":
        chosen = request.options.threads  # of each stream; OpenVINO wants those of all
        threads = chosen * runs if chosen else max(request.threads, runs)
        properties["INFERENCE_NUM_THREADS"] = threads
        properties["ENABLE_CPU_PINNING"] = False  # mcinfer pins the worker
    return {**properties, **request.options.session_config}


def _cache_folder(request: EngineRequest, core: Any, device: str) -> Path | None:
    """Where to keep the compiled model; None if it is not to be kept, or cannot."""
    options = request.options
    if options.prepare == "never" or _FOLDER in options.session_config:
        return None
    if options.prepare == "auto" and not is_large(request.model, None):
        return None
    build = ov.__version__
    if device != "CPU":
        build += f" {core.get_property(device, 'FULL_DEVICE_NAME')}"
    folder = engine_folder(request, Runtime(version=_VERSION, build=build, ignored=frozenset()))
    return None if folder is None else Path(folder)


def _lacking(core: Any, model: str, device: str) -> list[str]:
    """The types of the model's operators that a device does not have, as far as OpenVINO says it."""
    with suppress(RuntimeError):
        graph = core.read_model(model)
        known = core.query_model(graph, device)
        return sorted(
            {
                operator.get_type_name()
                for operator in graph.get_ops()
                if operator.get_friendly_name() not in known
            }
        )
    return []


def _notes(request: EngineRequest, compiled: Any, spec: ModelSpec) -> tuple[str, ...]:
    """What the user asked for and does not get."""
    notes = []
    wanted = request.options.precision
    if wanted is not None and _PRECISION not in request.options.session_config:
        got = compiled.get_property(_PRECISION).get_type_name()
        if got != wanted:
            notes.append(
                f"precision: got {wanted!r}, but OpenVINO computes in {got} on this device"
            )
    if wide := [s.name for s in (*spec.inputs, *spec.outputs) if s.element_type == "float64"]:
        notes.append(f"OpenVINO computes float64 as float32, which {wide} are")
    return tuple(notes)


def _description(model: str, compiled: Any, devices: Sequence[str]) -> ModelDescription:
    """What is known of the model, and the properties with which it was compiled."""
    properties: dict[str, str] = {}
    with suppress(BuildError):  # an IR
        properties = scan(model).metadata
    used = {}
    for name in compiled.get_property("SUPPORTED_PROPERTIES"):
        with suppress(RuntimeError):
            used[str(name)] = str(compiled.get_property(name))
    return ModelDescription(
        about={"graph_name": used.get("NETWORK_NAME", "")},
        properties=properties,
        provider_options=dict.fromkeys(devices, used),
    )


def _mapped(exc: Exception, kind: type[EngineError], prefix: str = "") -> EngineError:
    """OpenVINO's error in fewer words."""
    text = " ".join(_PLACES.sub("", str(exc)).split()) or type(exc).__name__
    text = shortened(f"openvino: {prefix}{text}")
    if isinstance(exc, MemoryError) or _SHORT_OF_MEMORY.search(text):
        text += memory_limit()
    return kind(text)
