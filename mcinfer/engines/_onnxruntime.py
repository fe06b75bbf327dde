"""ONNX Runtime (https://onnxruntime.ai/docs/api/python/): one session, bound onto shared memory.

Tensors are bound by address and ONNX element type, which carries types that ``session.run`` refuses
(bfloat16, float8, int4). Strings cannot be bound: a model that takes some is run by value instead.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

# First of all: it says what to install where the package is missing.
from mcinfer.engines._onnxruntime_sessions import (
    BLAMES_BOUND_OUTPUT,
    FAILED,
    INVALID,
    RUNTIME,
    SILENT,
    check,
    map_error,
    mapped_errors,
    open_session,
    prepare,
)
from mcinfer.engines.base import (
    Buffer,
    Engine,
    EngineRequest,
    Produced,
    Run,
    RunCancelledError,
    Strings,
    produced_from,
)
from mcinfer.engines.preparation import Preparation, describe, find_or_make
from mcinfer.errors import BuildError, InvalidInputError, McinferError, PredictError
from mcinfer.model_cache.building import Progress
from mcinfer.model_cache.onnx_files import scan
from mcinfer.printable import quotable
from mcinfer.specs import (
    ELEMENT_TYPES,
    STRING,
    ModelSpec,
    TensorSpec,
    numpy_dtype,
    tensor_bytes,
)

import onnxruntime as ort  # isort: skip

__all__ = ["OnnxRuntimeEngine", "facts", "load", "prepare", "prepared"]

_TYPES = {
    "float": "float32",
    "double": "float64",
    "float8e4m3fn": "float8_e4m3fn",
    "float8e4m3fnuz": "float8_e4m3fnuz",
    "float8e5m2": "float8_e5m2",
    "float8e5m2fnuz": "float8_e5m2fnuz",
}
"""ONNX Runtime's names of element types, where they are not our own."""


_NAMELESS = (None, "", "?", -1)
"""How the runtime (1.31), and exporters, write a dimension without a name."""


def prepared(request: EngineRequest, progress: Progress | None = None) -> Preparation:
    """The prepared form of a model, which is made if there is none yet.

    Raises:
        BuildError: What is asked for cannot be, or the model is one that was prepared for something else.
    """
    check(request)
    return find_or_make("onnxruntime", request, RUNTIME, progress)


def facts(request: EngineRequest) -> dict[str, Any]:
    """What the prepared form of a model is made from; see `mcinfer.engines.preparation.describe`."""
    return describe(request, RUNTIME)


def load(request: EngineRequest, preparation: Preparation | None = None) -> "OnnxRuntimeEngine":
    """Load a model into a session.

    Args:
        request: What to load.
        preparation: Its prepared form, which is the engine's from now on; closed where it does not load. None
            loads it as it is.

    Raises:
        BuildError: The model or the device does not do; the runtime's own words.
    """
    preparation = preparation or Preparation()
    try:
        with mapped_errors():
            return OnnxRuntimeEngine(request, preparation)
    except BaseException:
        if preparation.held is not None:
            preparation.held.close()
        raise


class OnnxRuntimeEngine(Engine):
    """One session on one device.

    Attributes:
        held: The prepared model that it maps, which is this object's to hold; None where it has its own copy.
    """

    concurrent = True

    def __init__(self, request: EngineRequest, preparation: Preparation) -> None:
        self.held = preparation.held
        self.notes = preparation.notes
        self.prepared = "" if self.held is None else self.held.key
        self._session = open_session(request, preparation.held)
        self.providers = tuple(self._session.get_providers())
        self.spec = ModelSpec(
            inputs=tuple(_spec(arg, "input") for arg in self._session.get_inputs()),
            outputs=tuple(_spec(arg, "output") for arg in self._session.get_outputs()),
        )
        self.weights = self._replaceable(request)
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = SILENT
        # Its default. Where it is not set, each bound run looks it up, and throws and catches a C++
        # exception to find that out (seen in 1.31), which costs more than a small run.
        self._run_options.add_run_config_entry("gpu_graph_id", "0")
        self._cancelled = False

    def _replaceable(self, request: EngineRequest) -> tuple[TensorSpec, ...]:
        """The weights that were asked for, which a model that was prepared before may not have."""
        found = {
            arg.name: _spec(arg, "weight") for arg in self._session.get_overridable_initializers()
        }
        given = {spec.name for spec in self.spec.outputs} & {*request.variable_weights}
        if given:  # the runtime would answer with the model's own
            raise BuildError(
                f"variable_weights: got {sorted(given)}, which are outputs of the model"
            )
        wanted = [found[name] for name in request.variable_weights if name in found]
        if any(not isinstance(size, int) for spec in wanted for size in spec.shape):
            # Where initialisers are inputs as well, exporters may have written symbols there.
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
        """See `Engine.bind`."""
        by_value = any(isinstance(item, Strings) for item in inputs)
        try:
            return (_ValueRun if by_value else _BoundRun)(self, inputs, outputs)
        except McinferError:
            raise
        except (*INVALID, *FAILED) as exc:
            raise map_error(exc, PredictError) from quotable(exc)

    def arm(self) -> None:
        """See `Engine.arm`."""
        if self._cancelled:
            self._cancelled = False
            self._run_options.terminate = False

    def cancel(self) -> None:
        """See `Engine.cancel`: the session stops at its next operator and lives on."""
        self._cancelled = True
        self._run_options.terminate = True

    def run_bound(self, binding: Any) -> None:
        """Run the session on a binding; see `Run.execute` for what it raises."""
        self._run(self._session.run_with_iobinding, binding)

    def run_values(self, feeds: dict[str, Any]) -> list[NDArray[Any]]:
        """Run the session on values by name; likewise."""
        arrays: list[NDArray[Any]] = self._run(self._session.run, None, feeds)
        return arrays

    def _run(self, run: Callable[..., Any], *arguments: object) -> Any:
        try:
            return run(*arguments, self._run_options)
        except (*INVALID, *FAILED) as exc:
            if self._cancelled:
                raise RunCancelledError("the run was cancelled") from quotable(exc)
            if BLAMES_BOUND_OUTPUT.search(str(exc)):
                raise _OutputShapeError(str(map_error(exc, PredictError))) from quotable(exc)
            raise map_error(exc, PredictError) from quotable(exc)

    def new_binding(self) -> Any:
        """An empty binding of the session."""
        return self._session.io_binding()


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
        self._binding = engine.new_binding()
        for item in inputs:
            if isinstance(item, Buffer):
                self._binding.bind_input(item.name, "cpu", 0, *_place(item))
        for name in self._names:  # all of them here: their order is that of `get_outputs`
            if name in bound:
                self._binding.bind_output(name, "cpu", 0, *_place(bound[name]))
            else:
                self._binding.bind_output(name, "cpu")

    def execute(self) -> Sequence[Produced | Strings]:
        """See `Run.execute`."""
        # A binding keeps what the last run made, and this one would have to fit in there.
        for name in self._free:
            self._binding.bind_output(name, "cpu")
        try:
            self._engine.run_bound(self._binding)
        except _OutputShapeError:
            if len(self._free) == len(self._names):
                raise
            # An output is not as the model declares it, which the runtime only warns of where none is bound.
            self._free = self._names
            return self.execute()
        if not self._free:
            return ()
        values = dict(zip(self._names, self._binding.get_outputs(), strict=True))
        produced = [_produced(name, values[name]) for name in self._free]
        return [item for item in produced if not _moved(item, self._bound.get(item.name))]


class _ValueRun(Run):
    """A run that takes strings: the runtime binds none, so its results are copied to their places.

    An output of a type that NumPy lacks fails here, in the runtime's words.
    """

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
        """See `Run.execute`."""
        produced: list[Produced | Strings] = []
        arrays = self._engine.run_values(self._feeds)
        for spec, array in zip(self._engine.spec.outputs, arrays, strict=True):
            place = self._bound.get(spec.name)
            if place is None or place.shape != array.shape:
                produced.append(produced_from(spec, array))
            else:
                ctypes.memmove(place.address, array.ctypes.data, place.size)
        return produced


def _text_array(item: Strings) -> NDArray[Any]:
    """An array of text: of bytes the runtime would take the ``repr``."""
    try:
        texts = [v.decode() if isinstance(v, bytes) else v for v in item.values]
    except UnicodeDecodeError as exc:
        raise InvalidInputError(f"input {item.name!r} is not UTF-8: {exc}") from exc
    return np.array(texts, dtype=object).reshape(item.shape)


def _value(item: Buffer) -> Any:
    """The runtime's value over memory; NumPy's part in it is only the width of an element."""
    element_type = ELEMENT_TYPES[item.element_type]
    memory = memoryview((ctypes.c_char * item.size).from_address(item.address)).cast("B")
    array = np.ndarray(item.shape, f"u{element_type.bits // 8}", memory)
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


def _moved(item: Produced | Strings, place: Buffer | None) -> bool:
    """Whether an output that was left to the runtime fits in the place that it has, and was copied there."""
    if place is None or isinstance(item, Strings) or item.shape != place.shape:
        return False
    ctypes.memmove(place.address, item.address, place.size)
    return True


def _element_type(text: str) -> str:
    """Our name of an element type that the runtime writes ``tensor(float)``."""
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
