"""OpenVINO (https://docs.openvino.ai): a compiled model, whose requests read and write shared memory.

::

    BoundRun ──► an idle `InferRequest` ──► tensors of the layout set ──► start, wait ──► idle again

OpenVINO keeps no names of dynamic dimensions; those of an ONNX model are read from its file.

What OpenVINO (2026.4) does, found by trying:

* With one thread, `InferRequest.infer` swallows the errors of a run and leaves old outputs, and it can crash
  where several models are loaded. So runs are started (`start_async`) and waited for, which costs 10 µs.
* The CPU writes an output of a fixed shape where it is bound. Those of dynamic shapes are copied after the
  run: it would have them in memory of its own, too, and fail if the bound place is too small.
* If a run fails or is cancelled, shapes of it stay in the operators of its stream, where tensors have no
  fixed shapes: a later run with the shapes of an earlier one can fail, or have wrong outputs. See `_Model`.
* The CPU has 32 bits of int64 and uint64: larger numbers lose their upper half, also on their way through.
  It computes float64 as float32, and float16 in what `precision` says.
* Requests that share a stream run one after another, and share the memory between operators. Streams have
  threads of their own, and one copy of the packed weights.
* Strings crash some operators (Reshape), complex numbers are unknown: `BuildError`.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import (
    BoundRun,
    Buffer,
    Engine,
    EngineRequest,
    OutOfMemoryError,
    Produced,
    RunCancelledError,
    Strings,
    array_over,
    memory_limit,
)
from mcinfer.engines.preparation import Runtime, content_of, engine_folder, facts_of
from mcinfer.errors import (
    BuildError,
    EngineError,
    InvalidInputError,
    McinferError,
    PredictError,
    quotable,
    shortened,
)
from mcinfer.extras import requires
from mcinfer.locks import Lock
from mcinfer.model_cache import is_large
from mcinfer.model_cache.cache import ABOUT_FILE, Cache, CacheUnusableError
from mcinfer.model_cache.onnx_files import Shapes, openvino_shapes, scan
from mcinfer.private import alone_in, inherited, model_name
from mcinfer.specs import STRING, ModelDescription, ModelSpec, TensorSpec, numpy_dtype

# With its package for telemetry, each import writes to ~/intel, starts a thread and sends an event
# (openvino/tools/ovc/__init__.py).
if _hidden := "openvino_telemetry" not in sys.modules:
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment] # an import of it then fails
try:
    with requires("engine openvino needs OpenVINO", "openvino", extra="openvino"):
        import openvino as ov
finally:
    if _hidden:
        sys.modules.pop("openvino_telemetry", None)

_PLUGINS = {"cpu": "CPU", "openvino-gpu": "GPU", "npu": "NPU"}
"""OpenVINO's kinds of devices, by those of `mcinfer.config.Device`."""

DEVICES = tuple(_PLUGINS)
OPTIONS = ("session_config", "free_dimensions", "streams", "precision")

_ELEMENT_TYPES = {
    "bf16": "bfloat16",
    "boolean": "bool",
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"i{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (4, 8, 16, 32, 64)},
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
"""Element types by OpenVINO's names."""

_PRECISION = "INFERENCE_PRECISION_HINT"

_PLACES = re.compile(
    r"(Caught exception: )?Exception from \S+:\d+:\s*|Check '[^\n]*' failed at src/\S+:\d+:?"
)
"""The places in OpenVINO's source that its messages name."""

_CANCELLED = "Infer Request was canceled"

_STUCK_SECONDS = 120.0
"""Longest wait for another process that compiles the same model: less than `Timeouts.start`."""

_SEALED = "CPU"
"""The device whose compiled model is written once, and depends on nothing that an entry's key lacks.

Those of others depend on their drivers. A GPU writes to CACHE_DIR as long as it runs: kernels for the shapes
that come, of models without fixed shapes (OpenVINO's kernels_cache.cpp).
"""

_SHORT_OF_MEMORY = re.compile(
    r"bad_alloc|[Ff]ailed to allocate|[Cc]an('t|not) alloc|[Oo]ut of memory|CL_OUT_OF_|"
    r"Resource temporarily unavailable"  # a thread's stack
)

_log = logging.getLogger("mcinfer.model_cache")

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
        input_ports: In the model's order.
        output_ports: In the model's order.
        idle: Requests without a run.
    """

    version = _VERSION
    turn = nullcontext()

    def __init__(self, request: EngineRequest) -> None:
        _check_options(request)
        inputs, outputs = openvino_shapes(request.model, request.options.free_dimensions)
        self.model = _Model(request, inputs)
        compiled = self.compiled
        if not compiled.outputs:  # it goes by the ending of the file's name
            raise BuildError(f"{request.model}: OpenVINO finds no outputs in it, expected *.onnx")
        self.providers = tuple(compiled.get_property("EXECUTION_DEVICES"))
        self.input_ports = _ports("input", compiled.inputs, inputs)
        self.output_ports = _ports("output", compiled.outputs, outputs)
        self.spec = ModelSpec(
            inputs=tuple(port.spec for port in self.input_ports),
            outputs=tuple(port.spec for port in self.output_ports),
        )
        if (runs := request.options.runs_at_once) > 1:
            # Runs that wait for others' streams cannot be cancelled before those have ended.
            self.concurrent = min(runs, compiled.get_property("NUM_STREAMS"))
            self.pins = "CPU" in self.providers and compiled.get_property("ENABLE_CPU_PINNING")
        self.notes = _notes(request, compiled, self.spec, self.concurrent)
        if request.options.describe:
            self.description = _description(request.model, compiled, self.providers)
        self._begin()
        if kept := [state.name for state in self.idle[0].native.query_state()]:
            raise BuildError(
                f"openvino: {request.model} keeps {kept} from run to run, and any worker may have the next "
                "one; export it without state"
            )

    @property
    def compiled(self) -> Any:
        return self.model.compiled()

    def _begin(self) -> None:
        self._cancelled = False
        # One at once: to make another one, OpenVINO waits for runs that are under way.
        self.idle = [_Request(self.compiled)]

    def twin(self) -> "OpenVinoEngine":
        other = copy(self)
        other._begin()
        return other

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
        tensors = [
            port.tensor(port.checked(item))
            for port, item in zip(self.input_ports, inputs, strict=True)
        ]
        return _OpenVinoRun(self, tensors, {place.name: place for place in outputs})

    def take(self) -> "_Request":
        """An idle request, or another one: as many exist as have been under way at once."""
        compiled = self.compiled
        with suppress(IndexError):
            while (request := self.idle.pop()).compiled is not compiled:
                pass  # and forget it
            return request
        return _Request(compiled)

    def run(self, request: "_Request") -> bool:
        """Run it; False if it has to run again, for another run's sake. Errors are OpenVINO's."""
        native, model = request.native, self.model
        with model.lock:
            if self._cancelled:
                raise RunCancelledError("the run was cancelled before it began")
            if model.current is not request.compiled:
                return False
            native.start_async()
            model.running[request] = self
        try:
            native.wait()
        except BaseException as exc:  # a signal's, too: no run may outlive its memory
            native.cancel()
            with suppress(MemoryError, RuntimeError):
                native.wait()
            ended, own = model.end(request, failed=True), isinstance(exc, RuntimeError)
            if ended or not own:
                raise
            return False
        return model.end(request)

    def arm(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        with self.model.lock:
            self._cancelled = True
            for request, engine in self.model.running.items():
                if engine is self:
                    request.native.cancel()

    def close(self) -> None:
        self.idle.clear()


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
        self.is_fixed = self._shape.is_static
        own, said = [*self._shape], declared.get(name, ())
        if len(said) != len(own):
            said = (None,) * len(own)
        shape = tuple(d.get_length() if d.is_static else said[i] for i, d in enumerate(own))
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
        return item

    def tensor(self, buffer: Buffer) -> Any:
        memory: NDArray[Any] = _NOTHING
        if buffer.size:
            memory = array_over(replace(buffer, element_type="uint8", shape=(buffer.size,)))
        return ov.Tensor(memory, ov.Shape([*buffer.shape]), self._type)

    def new_tensor(self, shape: Any = None) -> Any:
        """A tensor of this shape, or the port's fixed one, in memory of its own."""
        return ov.Tensor(self._type, self._shape.to_shape() if shape is None else shape)

    def produced(self, tensor: Any) -> Produced:
        """An output in memory of its own, as `new_tensor` makes it."""
        shape = tensor.shape  # by its indices: an iteration over it takes 40 µs
        return Produced(
            name=self.spec.name,
            element_type=self.spec.element_type,
            shape=tuple([shape[i] for i in range(len(self.spec.shape))]),
            address=tensor.data.__array_interface__["data"][0],
            size=tensor.byte_size,
            owner=tensor,
        )


def _ports(role: str, ports: Sequence[Any], declared: Shapes) -> list[_Port]:
    return [_Port(port, role, number, declared) for number, port in enumerate(ports)]


class _Model:
    """A compiled model, for an engine and its twins; compiled again after a run that has left its shapes.

    Runs that began after that one run again: they may have had its stream.

    Attributes:
        alone: While it is held, no run of others begins.
        current: OpenVINO's; None if it has to be compiled again.
        lock: Of `running`: the requests under way, in the order of their begin, and whose they are.
    """

    def __init__(self, request: EngineRequest, inputs: Shapes) -> None:
        self.lock = Lock()
        self.running: dict[_Request, OpenVinoEngine] = {}
        self._request, self._inputs = request, inputs
        self.alone = Lock()
        self.current: Any = None

    def compiled(self) -> Any:
        """OpenVINO's model. `PredictError` if it is to be compiled again, and its files have changed."""
        with self.alone:
            if self.current is None:
                model, loaded = self._request.model, self._request.content
                if loaded is not None and not loaded.is_still_there():
                    raise PredictError(f"openvino: {model} was changed, and is to be loaded again")
                self.current = _compiled(self._request, self._inputs)
                self._is_fixed = _has_fixed_shapes(self.current)
            return self.current

    def end(self, request: "_Request", *, failed: bool = False) -> bool:
        """Take a run out that has ended; whether its outputs, or its failure, are its own."""
        spoils = failed and not self._is_fixed
        with self.lock:
            others = [other for other in self.running if other.compiled is request.compiled]
            place = others.index(request)
            del self.running[request]
            # The threads of earlier ones may not have said yet that they have failed.
            doubtful = request.doubtful or any(other.has_failed() for other in others[:place])
            is_own, request.doubtful = self._is_fixed or not doubtful, False
            for later in others[place + 1 :]:
                later.doubtful |= spoils
            if (spoils or not is_own) and self.current is request.compiled:
                self.current = None
            return is_own


class _Request:
    """One of OpenVINO's requests."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.native = compiled.create_infer_request()
        self.run: _OpenVinoRun | None = None  # whose tensors are set
        self.doubtful = False  # whether its run may have the stream of one that has failed

    def has_failed(self) -> bool:
        with suppress(MemoryError, RuntimeError):
            self.native.wait_for(0)
            return False
        return True


def _has_fixed_shapes(compiled: Any) -> bool:
    """Whether all tensors have, within the model, too; after a run, they seem to."""
    ports = (*compiled.inputs, *compiled.outputs)
    if all(port.get_partial_shape().is_static for port in ports):
        with suppress(RuntimeError):
            return not compiled.get_runtime_model().is_dynamic()
    return False


class _OpenVinoRun(BoundRun):
    """Tensors over a layout's inputs and outputs. It has no request of its own."""

    def __init__(
        self, engine: OpenVinoEngine, inputs: Sequence[Any], places: Mapping[str, Buffer]
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._bound: dict[int, Any] = {}  # by the output's number
        self._copied: dict[int, Any] = {}
        for number, port in enumerate(engine.output_ports):
            place = places.get(port.spec.name)
            if place is not None and not port.is_fixed:
                self._copied[number] = port.tensor(place)
            elif place is not None and place.shape == port.spec.shape:
                self._bound[number] = port.tensor(place)

    def execute(self) -> Sequence[Produced | Strings]:
        try:
            if (left := self._attempt()) is None:
                with self._engine.model.alone:
                    while (left := self._attempt()) is None:
                        pass
            return left
        except PredictError:
            raise
        except (MemoryError, OSError, RuntimeError) as exc:  # of OpenVINO, whichever step it was
            if _CANCELLED in str(exc):
                raise RunCancelledError("the run was cancelled") from None
            raise _mapped(exc, PredictError) from quotable(exc)

    def _attempt(self) -> Sequence[Produced | Strings] | None:
        request = self._engine.take()
        try:
            own = self._set_in(request)
            return self._outputs(request, own) if self._engine.run(request) else None
        finally:
            if self._engine.model.current is request.compiled:
                self._engine.idle.append(request)

    def _set_in(self, request: _Request) -> dict[int, Any]:
        """Set the tensors; those that are made for this run alone, of outputs without a place."""
        native, own = request.native, {}
        if request.run is not self:
            request.run = None  # until all are set
            for number, tensor in enumerate(self._inputs):
                native.set_input_tensor(number, tensor)
            for number, tensor in self._bound.items():
                native.set_output_tensor(number, tensor)
            request.run = self
        for number, port in enumerate(self._engine.output_ports):
            if port.is_fixed and number not in self._bound:
                own[number] = port.new_tensor()
                native.set_output_tensor(number, own[number])
        return own

    def _outputs(self, request: _Request, own: dict[int, Any]) -> Sequence[Produced | Strings]:
        """Copy what is not bound; the outputs without a place, and those of another shape."""
        ports = self._engine.output_ports
        for number, port in enumerate(ports):
            if port.is_fixed:
                continue
            made, place = request.native.get_output_tensor(number), self._copied.get(number)
            if place is None or place.shape != made.shape:
                place = own[number] = port.new_tensor(made.shape)
            if made.byte_size:  # else it crashes
                made.copy_to(place)
        return [port.produced(own[number]) for number, port in enumerate(ports) if number in own]


# Loading.


def _check_options(request: EngineRequest) -> None:
    if (runs := request.options.streams) and request.device.kind == "npu":
        raise BuildError(f"streams: got {runs} for {request.device}, expected None")
    if (count := request.options.inter_op_threads) is not None:
        raise BuildError(
            f"inter_op_threads: got {count}, but the engine openvino runs one operator after another"
        )


def _compiled(request: EngineRequest, inputs: Shapes) -> Any:
    """The model, compiled or taken from the cache."""
    core = ov.Core()
    model: Any = request.model
    # OpenVINO knows a file again by its path and time, which a model in memory has anew in each program.
    by_path = not (request.options.free_dimensions or inherited(model))
    if not by_path:
        model = core.read_model(model)
    if request.options.free_dimensions:
        ports = enumerate(_ports("input", model.inputs, inputs))
        model.reshape(
            {n: [d if isinstance(d, int) else -1 for d in p.spec.shape] for n, p in ports}
        )
    device = _device(core, request)
    properties = _properties(request, device)

    def compile_model(**more: str) -> Any:
        try:
            return core.compile_model(model, device, {**properties, **more})
        except RuntimeError as exc:
            raise _mapped(exc, BuildError, f"{request.model}: ") from quotable(exc)

    def fill(folder: Path, _: int) -> None:
        built.append(compile_model(CACHE_DIR=str(folder)))
        about = json.dumps({"name": model_name(request.model)})
        (folder / ABOUT_FILE).write_text(about, encoding="utf-8")

    built: list[Any] = []
    kept: dict[str, str] = {}
    with ExitStack() as opened:
        if _is_kept(request):
            runtime = _runtime(core, device)
            try:
                if device == _SEALED:
                    facts = _facts(request, runtime, by_path=by_path)
                    entry = Cache.default().make(facts, fill, wait=_STUCK_SECONDS)
                    kept["CACHE_DIR"] = str(opened.enter_context(closing(entry)).folder)
                elif folder := engine_folder(request, runtime):
                    # Another process may read what is written.
                    opened.enter_context(alone_in(folder))
                    kept["CACHE_DIR"] = folder
            except (CacheUnusableError, OSError) as exc:
                _log.warning("%s: what openvino builds is not kept: %s", request.model, exc)
        compiled = built.pop() if built else compile_model(**kept)
    if kept and device != _SEALED:
        with suppress(CacheUnusableError):
            Cache.default().evict()
    return compiled


def _device(core: Any, request: EngineRequest) -> str:
    """OpenVINO's name of the device; `BuildError` if there is none such here."""
    device = request.device
    # The index of a CPU is the worker's share of the cores. Another kind may fall back.
    if device.kind == "cpu" or device.kind not in _PLUGINS:
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
        # mcinfer keeps the worker to its cores. Several streams would meet on one of them.
        pins = 1 < runs <= len(request.share.cores) and not request.share.shared
        properties["ENABLE_CPU_PINNING"] = pins
    return {**properties, **request.options.session_config}


def _is_kept(request: EngineRequest) -> bool:
    """Whether the compiled model becomes an entry of the cache."""
    options = request.options
    if options.prepare == "never" or "CACHE_DIR" in options.session_config:
        return False
    return options.prepare == "always" or is_large(request.model, None)


def _runtime(core: Any, device: str) -> Runtime:
    build = ov.__version__
    if device != "CPU":
        build += f" {core.get_property(device, 'FULL_DEVICE_NAME')}"
    return Runtime(version=_VERSION, build=build)


def _facts(request: EngineRequest, runtime: Runtime, *, by_path: bool) -> dict[str, Any]:
    """What a compiled model depends on, with what OpenVINO knows its file by."""
    content = content_of(request, any_format=True)
    file = [content.stamps[0].path, content.stamps[0].mtime_ns] if by_path else None
    return {**facts_of(request, runtime, content), "file": file}


def _notes(request: EngineRequest, compiled: Any, spec: ModelSpec, streams: int) -> tuple[str, ...]:
    """What the user asked for and does not get."""
    notes = []
    if (runs := request.options.runs_at_once) > streams:
        notes.append(f"streams: got {runs}, but OpenVINO opens {streams} here")
    wanted = request.options.precision if _PRECISION not in request.options.session_config else None
    if wanted and (got := compiled.get_property(_PRECISION).get_type_name()) != wanted:
        notes.append(f"precision: got {wanted!r}, but OpenVINO computes in {got} here")
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


def _mapped(exc: Exception, kind: type[EngineError], before: str = "") -> EngineError:
    """OpenVINO's error in fewer words."""
    text = " ".join(_PLACES.sub("", str(exc)).split()) or type(exc).__name__
    text = shortened(f"openvino: {before}{text.removeprefix('openvino: ')}")
    if isinstance(exc, MemoryError) or _SHORT_OF_MEMORY.search(text):
        text += memory_limit()
        if kind is PredictError:
            kind = OutOfMemoryError
    return kind(text)
