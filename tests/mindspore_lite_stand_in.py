"""A stand-in for the package of MindSpore Lite, for tests of the adapter and of what stands on it.

It has the documented calls alone, and checks the types of their arguments as documented; what the adapter
calls beyond that fails. Whether the package does what its documentation says is not tested.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

ADAPTER = "mcinfer.engines._mindspore_lite"

Array = NDArray[Any]


class DataType(IntEnum):
    UNKNOWN = 0
    BOOL = 30
    INT8 = 32
    INT16 = 33
    INT32 = 34
    INT64 = 35
    UINT8 = 37
    UINT16 = 38
    UINT32 = 39
    UINT64 = 40
    FLOAT16 = 42
    FLOAT32 = 43
    FLOAT64 = 44
    INVALID = 2147483647


class ModelType(IntEnum):
    MINDIR = 0
    MINDIR_LITE = 4


def check_type(name: str, value: object, cls: type) -> None:
    if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be {cls}, but got {type(value)}.")


def check_size(name: str, value: object) -> None:
    check_type(name, value, int)
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{name} must be a non-negative int.")


class Part:
    """Part of a context: properties that are ints of 0 or more, and texts."""

    _PREFIX: str
    _SIZES: tuple[str, ...]
    _TEXTS: dict[str, tuple[str, ...]] = {}

    def __init__(self) -> None:
        self.given: dict[str, int | str] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "given":
            if name in self._SIZES:
                check_size(f"{self._PREFIX}_{name}", value)
            elif name in self._TEXTS:
                check_type(f"{self._PREFIX}_{name}", value, str)
                if value not in (self._TEXTS[name] or (value,)):
                    raise ValueError(
                        f"{self._PREFIX}_{name} must be in [{', '.join(self._TEXTS[name])}], but got "
                        f"{value}."
                    )
            else:
                raise AttributeError(name)
            self.given[name] = value
        object.__setattr__(self, name, value)


class Cpu(Part):
    _PREFIX = "cpu"
    _SIZES = ("thread_num", "inter_op_parallel_num")


class Gpu(Part):
    _PREFIX = "gpu"
    _SIZES = ("device_id",)
    _TEXTS = {"precision_mode": ("preferred_fp16", "enforce_fp32"), "provider": ()}


class Ascend(Part):
    _PREFIX = "ascend"
    _SIZES = ("device_id", "rank_id")
    _TEXTS = {
        "precision_mode": (
            *("enforce_fp32", "preferred_fp32", "enforce_fp16"),
            *("enforce_origin", "preferred_optimal"),
        ),
        "provider": (),
    }


class Context:
    __slots__ = ("_target", "ascend", "cpu", "gpu")

    def __init__(self) -> None:
        self._target = ["cpu"]
        self.cpu, self.gpu, self.ascend = Cpu(), Gpu(), Ascend()

    @property
    def target(self) -> list[str]:
        return self._target

    @target.setter
    def target(self, target: list[str]) -> None:
        check_type("target", target, list)
        for element in target:
            check_type("target element", element, str)
            if element.lower() not in ("cpu", "gpu", "ascend"):
                raise ValueError(
                    f"target elements must be in ['cpu', 'gpu', 'ascend'], but got {element}."
                )
        self._target = target or ["cpu"]


class TensorMeta:
    __slots__ = ("_dtype", "_name", "_shape")

    def __init__(self, name: str, dtype: DataType, shape: list[int]) -> None:
        self._name, self._dtype, self._shape = name, dtype, shape

    @property
    def name(self) -> str:
        return self._name

    @property
    def dtype(self) -> DataType:
        return self._dtype

    @property
    def shape(self) -> list[int]:
        return self._shape


class Tensor(TensorMeta):
    __slots__ = ("_data",)

    def __init__(self, name: str, dtype: DataType, shape: list[int]) -> None:
        super().__init__(name, dtype, shape)
        self._data: Array | None = None

    def set_data_from_numpy(self, array: Array) -> None:
        check_type("numpy_obj", array, np.ndarray)
        if DataType[array.dtype.name.upper()] != self.dtype:
            raise RuntimeError(f"data type not equal! Numpy type: {array.dtype}")
        if array.size != np.prod(self.shape, dtype=np.int64):
            raise RuntimeError(f"data size not equal! Numpy size: {array.nbytes}")
        assert array.flags.c_contiguous
        self._data = array.reshape(self.shape)

    def get_data_to_numpy(self) -> Array:
        if any(size <= 0 for size in self.shape):
            return np.empty(0, self.dtype.name.lower())
        assert self._data is not None
        return self._data


Compute = Callable[..., list[Array]]


class Model:
    """y = 2x + 1 on float32[-1, 3] and the positions of what is not 0, unless a test says otherwise."""

    built: "list[Model]" = []
    inputs: list[tuple[str, DataType, list[int]]]
    outputs: list[tuple[str, DataType, list[int]]]
    compute: Compute
    broken = ""

    def __init__(self) -> None:
        self._tensors: list[Tensor] | None = None
        self._memory: list[Array] = []
        self.resized: list[list[list[int]]] = []

    def build_from_file(
        self,
        model_path: str,
        model_type: ModelType,
        context: Context | None = None,
        config_path: str = "",
        config_dict: dict[str, dict[str, str]] | None = None,
    ) -> None:
        check_type("model_path", model_path, str)
        check_type("model_type", model_type, ModelType)
        check_type("context", context, Context)
        assert config_path == ""
        assert config_dict is None
        if not Path(model_path).exists():
            raise RuntimeError("build_from_file failed, model_path does not exist!")
        if self.broken == "build":
            raise RuntimeError("build_from_file failed! Error is Common error code.")
        self.model_type, self.context = model_type, context
        self._tensors = [Tensor(*given) for given in self.inputs]
        Model.built.append(self)

    def get_inputs(self) -> list[Tensor]:
        assert self._tensors is not None
        return [Tensor(t.name, t.dtype, t.shape) for t in self._tensors]

    def get_outputs(self) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(*given) for given in self.outputs)

    def resize(self, inputs: list[Tensor], dims: list[list[int]]) -> None:
        check_type("inputs", inputs, list)
        check_type("dims", dims, list)
        for tensor, shape in zip(inputs, dims, strict=True):
            check_type("inputs element", tensor, Tensor)
            check_type("dims element", shape, list)
            for size in shape:
                check_type("dims element element", size, int)
                if size <= 0:
                    raise RuntimeError("resize failed! Error is Input shape is invalid.")
        self.resized.append(dims)
        self._tensors = [Tensor(t.name, t.dtype, [*d]) for t, d in zip(inputs, dims, strict=True)]

    def predict(self, inputs: list[Tensor], outputs: list[Tensor] | None = None) -> list[Tensor]:
        check_type("inputs", inputs, list)
        assert outputs is None
        if len(inputs) != len(self.inputs):
            raise RuntimeError(
                f"model input len:{len(self.inputs)} not equal input len:{len(inputs)}!"
            )
        if self.broken == "predict":
            raise RuntimeError("predict failed!")
        for memory in self._memory:  # the last run's, which this one may reuse
            memory[...] = 0
        arrays = type(self).compute(*(tensor.get_data_to_numpy() for tensor in inputs))
        self._memory = arrays
        tensors = []
        for array, (name, dtype, _) in zip(arrays, self.outputs, strict=True):
            tensor = Tensor(name, dtype, [*array.shape])
            if array.size:
                tensor.set_data_from_numpy(np.ascontiguousarray(array))
            tensors.append(tensor)
        return tensors


def affine(x: Array) -> list[Array]:
    return [2 * x + 1, np.argwhere(x)]


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in, where the adapter imports the package from; `Model` as its docstring says."""
    module = ModuleType("mindspore_lite")
    for value in (Context, DataType, Model, ModelType, Tensor):
        setattr(module, value.__name__, value)
    monkeypatch.setitem(sys.modules, "mindspore_lite", module)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    monkeypatch.setattr(Model, "inputs", [("x", DataType.FLOAT32, [-1, 3])], raising=False)
    outputs = [("y", DataType.FLOAT32, [-1, 3]), ("where", DataType.INT64, [-1, 2])]
    monkeypatch.setattr(Model, "outputs", outputs, raising=False)
    monkeypatch.setattr(Model, "compute", staticmethod(affine), raising=False)
    Model.built.clear()
    yield module
    # Another import is to meet what is really there.
    sys.modules.pop(ADAPTER, None)
