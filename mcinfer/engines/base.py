"""The interface of an engine: a model loaded in this process, run on memory that others own.

Ownership: an engine never owns the tensors that it is bound to. A `Run` is bound to addresses; its maker
drops it before the memory is freed. Outputs that a run allocates itself (`Produced`) live until the next
run of the same `Run`.
"""

import ctypes
import resource
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.config import Device
from mcinfer.errors import BuildError, InvalidInputError, McinferError, PredictError
from mcinfer.specs import STRING, ModelSpec, TensorSpec, numpy_dtype


def memory_limit() -> str:
    """What to add to an error that says that memory was not to be had: how much this process may have."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY:
        return ""
    return f"; this process may have {most} bytes of memory of its own (Limits.worker_memory_bytes)"


class RunCancelledError(McinferError):
    """`Engine.cancel` ended the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What is to be loaded, and how.

    Attributes:
        model: Path of the model.
        device: Where it is to run.
        threads: Threads of one run, or of one operator of it.
        inter_op_threads: Threads that run operators side by side; None for one after another.
        prepare: Whether it is prepared once for all processes: ``"auto"``, ``"always"``, ``"never"``; see
            `mcinfer.config.EngineOptions`.
        variable_weights: Names of weights that runs may replace.
        shared_cores: Whether others run on the same cores: then idle threads must not spin.
        allow_fallback: Whether another device's provider may serve.
        session_config: Configuration entries for the runtime, as they are.
        provider_options: Options for the device's provider, as they are.
    """

    model: str
    device: Device
    threads: int
    inter_op_threads: int | None = None
    prepare: str = "never"
    variable_weights: tuple[str, ...] = ()
    shared_cores: bool = False
    allow_fallback: bool = False
    session_config: Mapping[str, str] = field(default_factory=dict)
    provider_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A tensor in memory of another owner: C-contiguous, the machine's byte order.

    Attributes:
        element_type: A key of `mcinfer.specs.ELEMENT_TYPES`, not strings.
        address: Address of its first byte; four-bit elements are packed two to a byte.
        size: Bytes.
    """

    name: str
    element_type: str
    shape: tuple[int, ...]
    address: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Strings:
    """A tensor of strings, by value, in C order."""

    name: str
    shape: tuple[int, ...]
    values: tuple[str | bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced(Buffer):
    """An output whose place was not given: it lies in the engine's memory.

    Attributes:
        owner: Keeps that memory alive.
    """

    owner: object


def produced_from(spec: TensorSpec, array: NDArray[Any]) -> Produced | Strings:
    """What a run made by itself, as NumPy holds it: C-contiguous, which the result keeps alive."""
    if spec.element_type == STRING:
        return Strings(name=spec.name, shape=array.shape, values=tuple(array.ravel().tolist()))
    return Produced(
        name=spec.name,
        element_type=spec.element_type,
        shape=array.shape,
        address=array.ctypes.data,
        size=array.nbytes,
        owner=array,
    )


def array_over(buffer: Buffer) -> NDArray[Any]:
    """An array over a tensor's memory, which must outlive it.

    Raises:
        MissingDependencyError: NumPy lacks its element type.
    """
    memory = memoryview((ctypes.c_char * buffer.size).from_address(buffer.address)).cast("B")
    return np.ndarray(buffer.shape, numpy_dtype(buffer.element_type), memory)


def input_array(
    engine: str, spec: TensorSpec, item: Buffer | Strings, *, least: int = 0
) -> NDArray[Any]:
    """An input's memory as an array, for a runtime that checks little by itself.

    Args:
        engine: The engine's name, for the error.
        spec: What the model takes there.
        item: What was given; its memory must outlive the array.
        least: Elements that it has to have.

    Raises:
        InvalidInputError: It does not fit the model.
    """
    given = "string" if isinstance(item, Strings) else item.element_type
    fits = len(item.shape) == len(spec.shape) and all(
        expected in (None, size) for expected, size in zip(spec.shape, item.shape, strict=True)
    )
    enough = prod(item.shape) >= least
    if isinstance(item, Strings) or given != spec.element_type or not fits or not enough:
        raise InvalidInputError(
            f"{engine}: input {item.name!r} is {given}{[*item.shape]}, expected {spec}"
            + (f" with {least} element at least" if least else "")
        )
    return array_over(item)


def deliver(
    engine: str,
    specs: Sequence[TensorSpec],
    arrays: Sequence[NDArray[Any]],
    places: Mapping[str, NDArray[Any]],
) -> list[Produced | Strings]:
    """Write the outputs of a run to their places.

    Args:
        engine: The engine's name, for the error.
        specs: The outputs.
        arrays: One for each output; those without a place are C-contiguous and have no other owner.
        places: Memory of the bound outputs, by name.

    Returns:
        The outputs that have no place, or another shape than it.

    Raises:
        PredictError: One is of another type than it was bound as.
    """
    produced = []
    for spec, array in zip(specs, arrays, strict=True):
        place = places.get(spec.name)
        if place is not None and place.dtype != array.dtype:
            raise PredictError(
                f"{engine}: output {spec.name!r} is {array.dtype}{[*array.shape]}, bound as "
                f"{place.dtype}{[*place.shape]}"
            )
        if place is None or place.shape != array.shape:
            produced.append(produced_from(spec, array))
        else:
            place[...] = array
    return produced


def refuse_variable_weights(engine: str, request: EngineRequest) -> None:
    """For engines whose weights are fixed once they are loaded.

    Raises:
        BuildError: The request asks for others.
    """
    if request.variable_weights:
        raise BuildError(
            f"variable_weights: got {[*request.variable_weights]}, but the engine {engine} cannot "
            "replace weights; onnxruntime can"
        )


class Run(ABC):
    """One layout of inputs and outputs, bound once and executed many times."""

    @abstractmethod
    def execute(self) -> Sequence[Produced | Strings]:
        """Run the model: read the bound inputs, write the bound outputs.

        Returns:
            The outputs that were not bound, and those that came out in another shape than was bound, in the
            model's order.

        Raises:
            RunCancelledError: `Engine.cancel` was called.
            InvalidInputError: The runtime refuses these inputs.
            PredictError: The run failed, with the runtime's own words.
        """


class Engine(ABC):
    """A loaded model. One thread runs it, unless it is `concurrent`; `cancel` may be called from any.

    Attributes:
        spec: What it takes and gives.
        providers: What really runs it, first choice first.
        weights: The weights that a run may replace.
        notes: What the user should know about the load.
        prepared: The key of the prepared model that it maps; empty if it has its own copy of the weights.
        concurrent: Whether several threads may execute runs of their own at once.
    """

    spec: ModelSpec
    providers: tuple[str, ...]
    weights: tuple[TensorSpec, ...] = ()
    notes: tuple[str, ...] = ()
    prepared: str = ""
    concurrent: bool = False

    @abstractmethod
    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> Run:
        """Bind a layout: all inputs in the model's order, and the outputs whose shape is known.

        After the inputs, any of `weights` may come: the run is with them, in the place of the model's own.

        Raises:
            InvalidInputError: The runtime refuses such inputs.
            PredictError: It cannot bind them.
        """

    @abstractmethod
    def arm(self) -> None:
        """Forget earlier calls of `cancel`; called before each run."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask the run that is going on to stop; it may take until its next operator."""
