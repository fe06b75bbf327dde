"""MindSpore Lite (https://www.mindspore.cn/lite): its own package, on the hosts that have it.

Not verified on hardware: the package was in no registry available for testing. This module uses only the
documented Python API, and the tests check the calls against a stand-in.

Inputs and outputs are copied at each run. `providers` are the requested targets: the package does not say
which of them runs an operator. A run decides the shapes of outputs: a size that is not positive in
`Model.get_outputs` is `None` here.
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from mcinfer.engines.base import ArrayEngine, EngineRequest
from mcinfer.errors import BuildError, PredictError
from mcinfer.extras import requires
from mcinfer.specs import ModelSpec, TensorSpec, numpy_dtype

with requires(
    "engine mindspore_lite needs the package mindspore_lite of MindSpore Lite for this device: "
    "https://www.mindspore.cn/lite",
    "mindspore_lite",
):
    import mindspore_lite as mslite

_TARGETS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "ascend": "ascend"}  # by kind of device

DEVICES = tuple(_TARGETS)
OPTIONS = ("session_config", "provider_options")

_PROVIDER_OPTIONS = {
    "cpu": (),
    "gpu": ("precision_mode", "provider"),
    "ascend": ("precision_mode", "provider", "rank_id", "rank_table_file", "group_info_file"),
}
"""By target, the `EngineOptions.provider_options` that are known: most are set on its part of the context."""

_MODEL_TYPES = ("MINDIR", "MINDIR_LITE")  # what ``session_config["model_type"]`` may be

_TYPES = {
    getattr(mslite.DataType, name.upper()): name
    for name in (
        "bool",
        *("int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}

_FAILED = (RuntimeError, TypeError, ValueError)  # what the package raises


def load(request: EngineRequest) -> "MindSporeLiteEngine":
    try:
        return MindSporeLiteEngine(request)
    except BuildError:
        raise
    except _FAILED as exc:
        raise BuildError(f"mindspore_lite: {exc}") from exc


class MindSporeLiteEngine(ArrayEngine):
    name = "mindspore_lite"
    least_elements = 1  # it cannot run empty tensors
    lends_outputs = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__()
        context = _context(request)
        self._model = mslite.Model()
        self._model.build_from_file(request.model, _model_type(request), context, **_table(request))
        self.spec = ModelSpec(
            inputs=tuple(_spec(tensor, "input") for tensor in self._model.get_inputs()),
            outputs=tuple(_spec(tensor, "output") for tensor in self._model.get_outputs()),
        )
        self.providers = tuple(context.target)

    def run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        self.check_armed()
        try:
            tensors = self._model.get_inputs()
            dims = [[*array.shape] for array in inputs]
            if [[*tensor.shape] for tensor in tensors] != dims:
                self._model.resize(tensors, dims)
                tensors = self._model.get_inputs()
            for tensor, array in zip(tensors, inputs, strict=True):
                tensor.set_data_from_numpy(array)
            return [_array(tensor) for tensor in self._model.predict(tensors)]
        except _FAILED as exc:
            raise PredictError(f"mindspore_lite: {exc}") from exc


def _model_type(request: EngineRequest) -> Any:
    """The kind of file: as the request says, else by the file's name."""
    lite = "MINDIR_LITE" if request.model.endswith(".ms") else "MINDIR"
    name = request.options.session_config.get("model_type", lite)
    if name not in _MODEL_TYPES:
        raise BuildError(
            f"engine mindspore_lite: model_type: got {name!r}, expected one of {[*_MODEL_TYPES]}"
        )
    return getattr(mslite.ModelType, name)


def _context(request: EngineRequest) -> Any:
    target = _TARGETS.get(request.device.kind, "cpu")  # another one may fall back
    known = {"session_config": ("model_type",), "provider_options": _PROVIDER_OPTIONS[target]}
    for name, keys in known.items():
        for key in getattr(request.options, name):
            if key not in keys:
                but = f" but {', '.join(keys)}" if keys else ""
                raise BuildError(f"engine mindspore_lite has no {name}{but}, got the key {key!r}")
    context = mslite.Context()
    context.target = (
        [target, "cpu"] if request.options.allow_fallback and target != "cpu" else [target]
    )
    context.cpu.thread_num = request.threads
    context.cpu.inter_op_parallel_num = request.options.inter_op_threads or 1
    if target != "cpu":
        part = getattr(context, target)
        part.device_id = request.device.index
        for key, text in request.options.provider_options.items():
            if key == "group_info_file":
                context.group_info_file = text
            elif key != "rank_table_file":
                setattr(part, key, int(text) if key == "rank_id" else text)
    return context


def _table(request: EngineRequest) -> dict[str, Any]:
    """The arguments of `build_from_file` that name the rank table, if there is one."""
    path = request.options.provider_options.get("rank_table_file")
    return {"config_dict": {"ascend_context": {"rank_table_file": path}}} if path else {}


def _spec(tensor: Any, role: str) -> TensorSpec:
    if tensor.dtype not in _TYPES:
        raise BuildError(
            f"mindspore_lite: {role} {tensor.name!r} is of type {tensor.dtype}, expected one of "
            f"{[*_TYPES.values()]}"
        )
    shape = tuple(size if size > 0 else None for size in tensor.shape)
    return TensorSpec(name=tensor.name, dtype=numpy_dtype(_TYPES[tensor.dtype]), shape=shape)


def _array(tensor: Any) -> NDArray[Any]:
    """An output; for no elements, the package gives an array of one dimension."""
    array: NDArray[Any] = tensor.get_data_to_numpy()
    return array.reshape(tuple(tensor.shape)) if array.size == 0 else array
