"""A stand-in for the package of MindSpore Lite, for tests of the adapter and of `mcinfer.mslite`.

It has the documented calls alone, and checks the types of their arguments as documented; what the adapter
calls beyond that fails. Contexts and tensors are those of `mcinfer.mslite`, which has upstream's checks and
warns (an error in tests) of attributes that upstream lacks. Whether the package does what its documentation
says is not tested.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer import mslite
from mcinfer.mslite import Context, DataType, ModelType, TensorMeta
from mcinfer.mslite._checks import (
    Sections,
    check_elements,
    check_list,
    check_sections,
    check_type,
)

ADAPTER = "mcinfer.engines._mindspore_lite"

Array = NDArray[Any]
Described = tuple[str, DataType, list[int]]
Compute = Callable[..., list[Array]]


class Tensor(mslite.Tensor):
    """As upstream's: an array without elements has one dimension."""

    __slots__ = ()

    def get_data_to_numpy(self) -> Array:
        data = super().get_data_to_numpy()
        return data if data.size else data.ravel()


def tensor(described: Described) -> Tensor:
    name, dtype, shape = described
    made = Tensor(None, shape, dtype)
    made.name = name
    return made


def given(part: object) -> dict[str, Any]:
    """What was set of a part of a context."""
    return {name.removeprefix("_"): value for name, value in vars(part).items()}


class Model:
    """y = 2x + 1 on float32[-1, 3] and the positions of what is not 0, unless a test says otherwise."""

    built: "list[Model]" = []
    inputs: list[Described]
    outputs: list[Described]
    compute: Compute
    broken = ""

    def __init__(self) -> None:
        self._tensors: list[Described] = []
        self._memory: list[Array] = []
        self.resized: list[list[list[int]]] = []

    def build_from_file(
        self,
        model_path: str,
        model_type: ModelType,
        context: Context | None = None,
        config_path: str = "",
        config_dict: Sections | None = None,
    ) -> None:
        check_type("model_path", model_path, str)
        self.model_type = check_type("model_type", model_type, ModelType)
        self.context = check_type("context", context, Context)
        check_type("config_path", config_path, str)
        self.config = {} if config_dict is None else check_sections("config_dict", config_dict)
        if not Path(model_path).exists():
            raise RuntimeError("build_from_file failed, model_path does not exist!")
        if self.broken == "build":
            raise RuntimeError("build_from_file failed! Error is Common error code.")
        self._tensors = self.inputs
        Model.built.append(self)

    def get_inputs(self) -> list[Tensor]:
        return [tensor(described) for described in self._tensors]

    def get_outputs(self) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(name=n, dtype=d, shape=shape) for n, d, shape in self.outputs)

    def resize(self, inputs: list[Tensor], dims: list[list[int]]) -> None:
        check_list("inputs", inputs, Tensor)
        for shape in check_list("dims", dims, list):
            check_elements("dims element", shape, int)
            if any(size <= 0 for size in shape):
                raise RuntimeError("resize failed! Error is Input shape is invalid.")
        self.resized.append(dims)
        self._tensors = [(t.name, t.dtype, d) for t, d in zip(inputs, dims, strict=True)]

    def predict(self, inputs: list[Tensor]) -> list[Tensor]:
        check_list("inputs", inputs, Tensor)
        assert len(inputs) == len(self.inputs)
        assert all(tensor.has_data for tensor in inputs)
        if self.broken == "predict":
            raise RuntimeError("predict failed!")
        for memory in self._memory:  # the last run's, which this one may reuse
            memory[...] = 0
        self._memory = type(self).compute(*(tensor.get_data_to_numpy() for tensor in inputs))
        tensors = []
        for array, (name, dtype, _) in zip(self._memory, self.outputs, strict=True):
            if array.dtype.name != dtype.name.lower():
                raise RuntimeError(f"data type not equal! Numpy type: {array.dtype}")
            tensors.append(Tensor(array))
            tensors[-1].name = name
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
