"""A model loaded in this process: an engine, run on arrays.

Ownership: inputs are borrowed for the time of a run, which reads them in place; outputs are written into
arrays that the caller gave, or into new ones, which are the caller's. Threads may run at once where the
engine allows it, else they take turns.
"""

import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer import sharding
from mcinfer.engines.base import Buffer, Engine, Produced, Strings
from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.sharding import Shape
from mcinfer.specs import ELEMENT_TYPES, STRING, ModelSpec, TensorSpec, numpy_dtype
from mcinfer.tensors import as_input, string_rows

_MOST_SHAPES = 256


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
        self._whole = {spec.name: None for spec in engine.spec.inputs}
        self._outputs: OrderedDict[tuple[Shape, ...], tuple[Shape | None, ...]] = OrderedDict()
        for spec in (*engine.spec.inputs, *engine.spec.outputs):
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
    def providers(self) -> tuple[str, ...]:
        """What really runs it, in the engine's words."""
        return self._engine.providers

    def output_shapes(self, shapes: tuple[Shape, ...]) -> tuple[Shape | None, ...]:
        """The outputs' shapes for inputs of these shapes; None for one that only a run tells.

        Raises:
            InvalidInputError: They do not fit the model.
        """
        known = self._outputs.get(shapes)
        if known is None:
            plan = sharding.plan(self.spec, shapes, 1, self._whole)
            known = tuple(join.shape if join.shapes else None for join in plan.outputs)
            self._outputs[shapes] = known
            if len(self._outputs) > _MOST_SHAPES:
                self._outputs.popitem(last=False)
        return known

    def run(self, inputs: Sequence[Any], into: Sequence[NDArray[Any] | None]) -> list[NDArray[Any]]:
        """Run the model.

        Args:
            inputs: One for each input, in the model's order: arrays of its dtype and shape.
            into: For each output, an array to write it to, C-contiguous and of native byte order, or None
                for a new one.

        Raises:
            InvalidInputError: An input does not fit the model, or an array of `into` not its output.
            PredictError: The run failed, in the engine's words.
        """
        arrays = [
            np.asarray(as_input(value, spec, spec.element_type), spec.dtype, order="C")
            for value, spec in zip(inputs, self.spec.inputs, strict=True)
        ]
        shapes = self.output_shapes(tuple(array.shape for array in arrays))
        results = [
            _place(spec, shape, given)
            for spec, shape, given in zip(self.spec.outputs, shapes, into, strict=True)
        ]
        sources = [
            _source(spec, array) for spec, array in zip(self.spec.inputs, arrays, strict=True)
        ]
        places = [
            _buffer(spec, array)
            for spec, array in zip(self.spec.outputs, results, strict=True)
            if array is not None
        ]
        with self._turns, pinned(self._cores) if self._cores else nullcontext():
            produced = self._engine.bind(sources, places).execute()
            made = {item.name: _copied(item) for item in produced}
        for i, (spec, given) in enumerate(zip(self.spec.outputs, into, strict=True)):
            if results[i] is not None:
                continue
            array = made[spec.name].astype(spec.dtype, copy=False)
            if given is not None:
                _check_place(spec, array.shape, given)
                given[...] = array
            results[i] = array if given is None else given
        return [array for array in results if array is not None]


def _place(
    spec: TensorSpec, shape: Shape | None, given: NDArray[Any] | None
) -> NDArray[Any] | None:
    """Where the engine is to write an output: None where its shape is not known yet."""
    if shape is None or spec.element_type == STRING:
        return None
    if given is None:
        return np.empty(shape, spec.dtype)
    _check_place(spec, shape, given)
    return given


def _check_place(spec: TensorSpec, shape: Shape, given: NDArray[Any]) -> None:
    if given.dtype != spec.dtype or given.shape != shape or not given.flags.writeable:
        raise InvalidInputError(
            f"output {spec.name!r} is {spec.element_type}{[*shape]}, got a tensor of "
            f"{given.dtype}{[*given.shape]}{'' if given.flags.writeable else ' that is read-only'}"
        )


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
