"""A model loaded in this process: an engine, run on arrays.

Ownership: inputs are borrowed for the time of a run, which reads them in place; outputs are new arrays, which
are the caller's. Threads may run at once where the engine allows it, else they take turns.
"""

import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer import sharding
from mcinfer.engines.base import Buffer, Engine, Produced, Strings
from mcinfer.errors import BuildError
from mcinfer.requests.tensors import as_input, string_rows
from mcinfer.requests.weights import check_weights
from mcinfer.sharding import Shape
from mcinfer.specs import ELEMENT_TYPES, STRING, ModelSpec, TensorSpec, numpy_dtype

_MAX_SHAPES = 256


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Bind the calling thread to these cores meanwhile; threads that it starts inherit them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Session:
    """One loaded model. Any thread may call `run`."""

    def __init__(self, engine: Engine, cores: Sequence[int]) -> None:
        """Take the engine over.

        Args:
            engine: A loaded model.
            cores: That the threads of its runs are bound to; none for all.

        Raises:
            BuildError: It has tensors that no array can hold.
        """
        self._engine = engine
        self._cores = tuple(cores)
        self._turns = nullcontext() if engine.concurrent else threading.Lock()
        self._weights: dict[str, NDArray[Any]] = {}
        self._updating = threading.Lock()
        self._outputs: OrderedDict[tuple[Shape, ...], tuple[Shape | None, ...]] = OrderedDict()
        for spec in (*engine.spec.inputs, *engine.spec.outputs, *engine.weights):
            if ELEMENT_TYPES[spec.element_type].bits % 8:
                raise BuildError(
                    f"{spec}: elements of less than a byte cannot be bound to arrays; "
                    "ModelParallelRunner takes them"
                )

    @property
    def spec(self) -> ModelSpec:
        """What the model takes and gives."""
        return self._engine.spec

    @property
    def engine(self) -> Engine:
        """The loaded model; it stays this session's."""
        return self._engine

    @property
    def weights(self) -> Mapping[str, NDArray[Any]]:
        """The weights that were replaced, by name; they do not change any more."""
        return self._weights

    def update_weights(self, weights: Mapping[str, Any]) -> None:
        """Replace weights: runs that have begun finish with those that they began with.

        Args:
            weights: By name, arrays of exactly their dtypes and shapes, which are copied.

        Raises:
            InvalidInputError: One does not fit; nothing was changed.
        """
        arrays = check_weights(weights, {spec.name: spec for spec in self._engine.weights})
        copies = {
            spec.name: np.array(arrays[spec.name], spec.dtype, order="C")
            for spec in self._engine.weights
            if spec.name in arrays
        }
        with self._updating:
            self._weights = {**self._weights, **copies}

    def output_shapes(self, shapes: tuple[Shape, ...]) -> tuple[Shape | None, ...]:
        """The outputs' shapes for inputs of these shapes; None for one that only a run tells.

        Raises:
            InvalidInputError: They do not fit the model.
        """
        known = self._outputs.get(shapes)
        if known is None:
            plan = sharding.plan(self.spec, shapes, 1)
            known = tuple(join.shape if join.shapes else None for join in plan.outputs)
            self._outputs[shapes] = known
            if len(self._outputs) > _MAX_SHAPES:
                self._outputs.popitem(last=False)
        return known

    def run(self, inputs: Sequence[Any]) -> list[NDArray[Any]]:
        """Run the model.

        Args:
            inputs: One for each input, in the model's order: arrays of its dtype and shape.

        Raises:
            InvalidInputError: An input does not fit the model.
            PredictError: The run failed, in the engine's words.
        """
        arrays = [
            np.asarray(as_input(value, spec, spec.element_type), spec.dtype, order="C")
            for value, spec in zip(inputs, self.spec.inputs, strict=True)
        ]
        shapes = self.output_shapes(tuple(array.shape for array in arrays))
        results = {
            spec.name: np.empty(shape, spec.dtype)
            for spec, shape in zip(self.spec.outputs, shapes, strict=True)
            if shape is not None and spec.element_type != STRING
        }
        sources = [
            _source(spec, array) for spec, array in zip(self.spec.inputs, arrays, strict=True)
        ]
        weights = self._weights  # one version throughout, and alive until the run is over
        specs = {spec.name: spec for spec in self._engine.weights}
        sources += [_buffer(specs[name], array) for name, array in weights.items()]
        places = [
            _buffer(spec, results[spec.name]) for spec in self.spec.outputs if spec.name in results
        ]
        with self._turns, pinned(self._cores) if self._cores else nullcontext():
            produced = self._engine.bind(sources, places).execute()
            results.update({item.name: _copied(item) for item in produced})
        return [results[spec.name] for spec in self.spec.outputs]


def _source(spec: TensorSpec, array: NDArray[Any]) -> Buffer | Strings:
    if spec.element_type == STRING:
        whole = sharding.InputCut(axis=None, shapes=(array.shape,))
        return Strings(name=spec.name, shape=array.shape, values=string_rows(array, whole, 0))
    return _buffer(spec, array)


def _buffer(spec: TensorSpec, array: NDArray[Any]) -> Buffer:
    return Buffer(
        name=spec.name,
        element_type=spec.element_type,
        shape=array.shape,
        address=array.__array_interface__["data"][0],
        size=array.nbytes,
    )


def _copied(item: Produced | Strings) -> NDArray[Any]:
    """What the engine made by itself, as an array of its own."""
    if isinstance(item, Strings):
        return np.array(item.values, dtype=object).reshape(item.shape)
    array = np.empty(item.shape, numpy_dtype(item.element_type))
    ctypes.memmove(array.__array_interface__["data"][0], item.address, item.size)
    return array
