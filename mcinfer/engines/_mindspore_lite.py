"""MindSpore Lite (https://www.mindspore.cn/lite): its own package, on the hosts that have it.

Not verified on hardware: the package is in no registry that this was tested with. Only calls of its
documented Python API are made, and the tests check them against a stand-in for it.

Inputs and outputs are copied at each run. `cancel` cannot stop a run that is going on: a supervisor kills
the worker. `providers` are the targets that were asked for: the package does not say which of them runs
an operator. What a model gives may have any shape that its run makes: a size that is not positive
in `Model.get_outputs` is `None` here.
"""

import threading
from collections.abc import Sequence
from typing import Any

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
    produced_from,
)
from mcinfer.errors import (
    BuildError,
    EngineError,
    InvalidInputError,
    MissingDependencyError,
    PredictError,
)
from mcinfer.specs import ModelSpec, TensorSpec, numpy_dtype

try:
    import mindspore_lite as mslite
except ImportError as exc:
    raise MissingDependencyError(
        "engine mindspore_lite needs the package mindspore_lite of MindSpore Lite for this device: "
        "https://www.mindspore.cn/lite"
    ) from exc

_TARGETS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "ascend": "ascend"}
"""By kind of device."""

_TYPES = {
    getattr(mslite.DataType, name.upper()): name
    for name in (
        "bool",
        *("int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}

_FAILED = (RuntimeError, TypeError, ValueError)
"""What the package raises."""


def _map_error(exc: Exception, base: type[EngineError]) -> EngineError:
    return base(f"mindspore_lite: {exc}")


def load(request: EngineRequest) -> "MindSporeLiteEngine":
    """Load a model.

    Raises:
        BuildError: The model, the device or an option does not do; the package's own words.
    """
    try:
        return MindSporeLiteEngine(request)
    except BuildError:
        raise
    except _FAILED as exc:
        raise _map_error(exc, BuildError) from exc


class MindSporeLiteEngine(Engine):
    """One model on one device."""

    def __init__(self, request: EngineRequest) -> None:
        context = _context(request)
        lite = request.model.endswith(".ms")
        model_type = mslite.ModelType.MINDIR_LITE if lite else mslite.ModelType.MINDIR
        self._model = mslite.Model()
        self._model.build_from_file(request.model, model_type, context)
        self.spec = ModelSpec(
            inputs=tuple(_spec(tensor, "input") for tensor in self._model.get_inputs()),
            outputs=tuple(_spec(tensor, "output") for tensor in self._model.get_outputs()),
        )
        self.providers = tuple(context.target)
        self._stop = threading.Event()

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> Run:
        """See `Engine.bind`."""
        arrays = [_input(spec, item) for spec, item in zip(self.spec.inputs, inputs, strict=True)]
        return _MindSporeLiteRun(self, arrays, {item.name: array_over(item) for item in outputs})

    def arm(self) -> None:
        """See `Engine.arm`."""
        self._stop.clear()

    def cancel(self) -> None:
        """Refuse the next run; one that is going on goes on to its end, it cannot be stopped."""
        self._stop.set()

    def run(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the model; see `Run.execute` for what it raises.

        Returns:
            The outputs, in the model's memory: until its next run.
        """
        if self._stop.is_set():
            raise RunCancelledError("the run was cancelled before it began")
        try:
            tensors = self._model.get_inputs()
            dims = [[*array.shape] for array in arrays]
            if [[*tensor.shape] for tensor in tensors] != dims:
                self._model.resize(tensors, dims)
                tensors = self._model.get_inputs()
            for tensor, array in zip(tensors, arrays, strict=True):
                tensor.set_data_from_numpy(array)
            return [_array(tensor) for tensor in self._model.predict(tensors)]
        except _FAILED as exc:
            raise _map_error(exc, PredictError) from exc


class _MindSporeLiteRun(Run):
    def __init__(
        self,
        engine: MindSporeLiteEngine,
        inputs: Sequence[NDArray[Any]],
        places: dict[str, NDArray[Any]],
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._places = places

    def execute(self) -> Sequence[Produced | Strings]:
        """See `Run.execute`."""
        arrays = self._engine.run(self._inputs)
        specs = self._engine.spec.outputs
        if len(arrays) != len(specs):
            raise PredictError(f"mindspore_lite: got {len(arrays)} outputs, expected {len(specs)}")
        produced: list[Produced | Strings] = []
        for spec, array in zip(specs, arrays, strict=True):
            place = self._places.get(spec.name)
            expected = array.shape if place is None else place.shape
            if array.dtype != spec.dtype or array.shape != expected:
                raise PredictError(
                    f"mindspore_lite: output {spec} is {array.dtype} of shape {array.shape}, "
                    f"expected {expected}"
                )
            if place is None:
                produced.append(produced_from(spec, array.copy(order="C")))
            else:
                place[...] = array
        return produced


def _context(request: EngineRequest) -> Any:
    """The package's context for this request."""
    target = _TARGETS.get(request.device.kind)
    if target is None:
        raise BuildError(
            f"engine mindspore_lite has no device {request.device}, expected one of "
            f"{[f'{kind}:0' for kind in _TARGETS]}"
        )
    for name in ("session_config", "provider_options"):
        for key in getattr(request, name):
            raise BuildError(f"engine mindspore_lite has no {name}, got the key {key!r}")
    context = mslite.Context()
    context.target = [target, "cpu"] if request.allow_fallback and target != "cpu" else [target]
    context.cpu.thread_num = request.threads
    context.cpu.inter_op_parallel_num = request.inter_op_threads or 1
    if target == "gpu":
        context.gpu.device_id = request.device.index
    elif target == "ascend":
        context.ascend.device_id = request.device.index
    return context


def _spec(tensor: Any, role: str) -> TensorSpec:
    if tensor.dtype not in _TYPES:
        raise BuildError(
            f"mindspore_lite: {role} {tensor.name!r} is of type {tensor.dtype}, expected one of "
            f"{[*_TYPES.values()]}"
        )
    shape = tuple(size if size > 0 else None for size in tensor.shape)
    return TensorSpec(name=tensor.name, dtype=numpy_dtype(_TYPES[tensor.dtype]), shape=shape)


def _array(tensor: Any) -> NDArray[Any]:
    """A result of a run: for no elements, the package gives an array of one dimension."""
    array: NDArray[Any] = tensor.get_data_to_numpy()
    return array.reshape(tuple(tensor.shape)) if array.size == 0 else array


def _input(spec: TensorSpec, item: Buffer | Strings) -> NDArray[Any]:
    """Its memory as an array.

    Raises:
        InvalidInputError: It does not fit the model, or is empty, which the package cannot run.
    """
    given = "string" if isinstance(item, Strings) else item.element_type
    fits = len(item.shape) == len(spec.shape) and all(
        expected in (None, size) for expected, size in zip(spec.shape, item.shape, strict=True)
    )
    if isinstance(item, Strings) or given != spec.element_type or not fits or 0 in item.shape:
        raise InvalidInputError(
            f"mindspore_lite: input {item.name!r} is {given}{[*item.shape]}, expected {spec} with at "
            f"least one element"
        )
    return array_over(item)
