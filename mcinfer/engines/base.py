"""The interface of an engine: a model loaded in this process, run on memory that others own.

Ownership: an engine never owns the tensors that it is bound to. A `BoundRun` has addresses, and its maker
drops it before the memory is freed. Outputs that a run allocates itself (`Produced`) live until the
next run of the same `BoundRun`.
"""

import ctypes
import os
import resource
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcinfer import machine
from mcinfer.config import NOT_PINNED, CoreShare, Device, EngineOptions
from mcinfer.errors import InvalidInputError, McinferError, PredictError
from mcinfer.locks import Turn
from mcinfer.model_cache.keys import ModelContent
from mcinfer.shm.arena import SharedBlock
from mcinfer.specs import STRING, ModelDescription, ModelSpec, TensorSpec, numpy_dtype


def memory_limit() -> str:
    """The memory limits of this process, to append to an error about memory; empty if there is none."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    of_group, text = machine.memory_limit(), ""
    if most not in (resource.RLIM_INFINITY, of_group):
        text += f"; this process may have {most} bytes of memory of its own (Limits.worker_memory_bytes)"
    if of_group is not None:
        text += f"; its container (control group) may have {of_group} bytes in all"
    return text


class RunCancelledError(McinferError):
    """`Engine.cancel` ended the run."""


class OutOfMemoryError(PredictError):
    """A run did not get the memory of its process that it needs; the engine can run on."""


class OutOfDeviceMemoryError(PredictError):
    """A run did not get the memory of its card that it needs; the engine can run on.

    Attributes:
        asked: Bytes that the runtime asked for in vain; None if it does not say.
    """

    def __init__(self, text: str, asked: int | None = None) -> None:
        super().__init__(text)
        self.asked = asked


class Slab(Protocol):
    """The weights of a prepared model in one piece of a card's memory, for all sessions of that card.

    `mcinfer.cards.slabs` makes them; each tensor of it keeps the memory open.
    """

    def tensors(self, *, on_host: bool = False) -> Mapping[str, Any] | None:
        """The weights by name, for consumers of DLPack, with their `size` in bytes.

        They lie on the card, or where the host reads the same memory; None if it cannot.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A model to load, and how.

    Attributes:
        model: Path of the model.
        device: Device to run on.
        options: What the user chose.
        share: The cores of the process that loads it.
        stream: The CUDA stream to run on; None for one of the runtime's own.
        memory_limit: Bytes of the card's memory that the runtime may take for itself; None is all there is.
        content: What was read of the model's files; None to read them when it is needed.
        device_model: Says which model of device it is, on which what is prepared depends; raises `BuildError`
            if the device cannot be used. None where nothing depends on it, as on the CPU.
        slab: Gives the weights of the prepared model at this path, on the card. Called once, in
            `mcinfer.engines.open_engine`, before the session is made; what it raises is raised there. None to
            load the weights from the model's files.
    """

    model: str
    device: Device
    options: EngineOptions = EngineOptions()
    share: CoreShare = NOT_PINNED
    content: ModelContent | None = None
    stream: int | None = None
    memory_limit: int | None = None
    slab: Callable[[Path], Slab] | None = None
    device_model: Callable[[], str] | None = None

    @property
    def threads(self) -> int:
        """Threads of one run, or of one operator of the run."""
        chosen = self.options.threads or self.share.threads or len(self.share.cores)
        return chosen or len(os.sched_getaffinity(0))

    def with_options(self, **changed: Any) -> "EngineRequest":
        """The same request with some options changed."""
        return replace(self, options=replace(self.options, **changed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A tensor in memory of another owner: C-contiguous, the machine's byte order.

    Attributes:
        element_type: A key of `mcinfer.specs.ELEMENT_TYPES`, not strings.
        address: Address of its first byte; four-bit elements are packed two to a byte.
        size: Bytes.
        device: The card whose memory it is; None for the host's.
    """

    name: str
    element_type: str
    shape: tuple[int, ...]
    address: int
    size: int
    device: Device | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strings:
    """A tensor of strings, by value, in C order."""

    name: str
    shape: tuple[int, ...]
    values: tuple[str | bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced(Buffer):
    """An output in memory of the engine, which `owner` keeps alive."""

    owner: object


def produced_from(spec: TensorSpec, array: NDArray[Any]) -> Produced | Strings:
    """A tensor over a C-contiguous array, which the result keeps alive."""
    if spec.element_type == STRING:
        return Strings(name=spec.name, shape=array.shape, values=tuple(array.ravel().tolist()))
    return Produced(
        name=spec.name,
        element_type=spec.element_type,
        shape=array.shape,
        address=array.__array_interface__["data"][0],  # `ctypes.data` takes five times as long
        size=array.nbytes,
        owner=array,
    )


def delivered(
    produced: Sequence[Produced | Strings], places: Mapping[str, Buffer]
) -> list[Produced | Strings]:
    """Copy the outputs to places in the host's memory; return the others, and those of another shape."""
    left = []
    for item in produced:
        place = places.get(item.name)
        on_host = place is not None and place.device is None
        if place and on_host and isinstance(item, Produced) and item.shape == place.shape:
            ctypes.memmove(place.address, item.address, place.size)
        else:
            left.append(item)
    return left


def array_over(buffer: Buffer, dtype: "np.dtype[Any] | None" = None) -> NDArray[Any]:
    """An array over a tensor's memory, which must outlive it; `dtype` replaces the type of the elements."""
    memory = memoryview((ctypes.c_char * buffer.size).from_address(buffer.address)).cast("B")
    return np.ndarray(buffer.shape, dtype or numpy_dtype(buffer.element_type), memory)


def array_of(item: Buffer | Strings) -> NDArray[Any]:
    """A tensor as an array: over its memory, or a new one of its strings."""
    if isinstance(item, Strings):
        return np.array(item.values, dtype=object).reshape(item.shape)
    return array_over(item)


LACKS = {
    "variable_weights": "cannot replace weights; onnxruntime can",
    "provider": "has no execution providers; onnxruntime has",
    "concurrent_runs": "has no such option; onnxruntime has, and openvino has streams",
    "streams": "has no streams; openvino has, and onnxruntime has concurrent_runs",
    "precision": "computes in the model's own types; openvino can change them",
    **dict.fromkeys(("session_config", "provider_options"), "has no such option"),
    **dict.fromkeys(
        ("session_options", "custom_operators", "free_dimensions", "free_denotations"),
        "has no such option; onnxruntime has",
    ),
}
"""By option, what an engine is that does not take it."""


class BoundRun(ABC):
    """One layout of inputs and outputs, bound once and executed many times.

    Attributes:
        wide: Whether the last execution had the cores of all workers.
    """

    wide: bool = False

    @abstractmethod
    def execute(self) -> Sequence[Produced | Strings]:
        """Run the model: read the bound inputs, write the bound outputs.

        Returns:
            The outputs that were not bound, and those that have another shape than was bound, in the
            model's order. They lie in the host's memory. If the runtime did not take a bound place on a card,
            its output is among them too.

        Raises:
            RunCancelledError: `Engine.cancel` was called.
            InvalidInputError: The runtime refuses these inputs.
            PredictError: The run failed, with the runtime's message.
            OutOfDeviceMemoryError: The card has too little memory left.
            OutOfMemoryError: The process has.
            CardLostError: Neither this run nor another one can succeed in this process.
        """

    def execute_alone(self) -> Sequence[Produced | Strings]:
        """Execute, as the one run under way on all workers; raises as `execute` does."""
        return self.execute()


class StagedRun(BoundRun):
    """Copy in, execute, copy out: a run of an engine, and what brings its tensors there and back."""

    __slots__ = ("_after", "_before", "_run")

    def __init__(
        self,
        before: Callable[[], object],
        run: BoundRun,
        after: Callable[[Sequence[Produced | Strings]], Sequence[Produced | Strings]],
    ) -> None:
        """Three steps, of which each may raise what `BoundRun.execute` does; after an error none follows.

        Args:
            before: Brings the inputs to where the run reads them.
            run: Of the engine.
            after: Gets what the run has returned, brings the outputs to their places, and returns the rest.
        """
        self._before = before
        self._run = run
        self._after = after

    def execute(self) -> Sequence[Produced | Strings]:
        self._before()
        return self._after(self._run.execute())


class Engine(ABC):
    """A loaded model. One thread runs it, or several take `turn`; any thread may call `cancel`.

    With `concurrent` above 1, a worker has as many threads that run it at once: each has a `twin` of its own.

    Attributes:
        spec: The model's inputs and outputs.
        providers: The providers in use, first choice first.
        weights: The weights that a run may replace.
        notes: Messages for the user about the load.
        version: The runtime's name and version, if it says so.
        prepared: The key of the prepared model that it maps; empty if it has its own copy of the weights.
        turn: What a thread beside others holds from its run until it has copied what the engine made; it
            does nothing where several threads may execute runs of their own at once.
        concurrent: How many runs it executes at once, 1 to `mcinfer.config.MAX_CONCURRENT_RUNS`.
        pins: Whether it runs them in threads of its own, each kept to its part of the worker's cores.
        widens: Whether a second engine on the same model, with more cores, may take some of its runs.
        broken: Why it cannot run any more; empty if it can.
        lingers: Whether a thread of it may still be in the runtime after `close`; the end of the interpreter
            would abort that.
        gives: Names of the outputs that its runs give; None if they give all. A rank of a group gives some.
        on_card: Whether it runs on a card, on `EngineRequest.stream`; then it takes tensors of that card.
        description: What the runtime says of the model, if the request asks for it.
        reaches: The cards whose memory its tensors may lie in.
        slab: Memory of its card that it has filled with the weights, for the other engines of this card; None
            if there is none, or another process made it.
        on_host: Names of the inputs, outputs and replaceable weights that it takes in the host's memory, and
            all others on its card; None if it takes all on the host.
    """

    spec: ModelSpec
    providers: tuple[str, ...]
    weights: tuple[TensorSpec, ...] = ()
    notes: tuple[str, ...] = ()
    version: str = ""
    prepared: str = ""
    turn: AbstractContextManager[Any]
    broken: str = ""
    lingers: bool = False
    gives: frozenset[str] | None = None
    concurrent: int = 1
    pins: bool = False
    widens: bool = False
    on_card: bool = False
    on_host: frozenset[str] | None = None
    description: ModelDescription = ModelDescription()
    reaches: tuple[str, ...] = ()
    slab: SharedBlock | None = None

    @abstractmethod
    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
        """Bind a layout: all inputs in the model's order, and the outputs whose shape is known.

        Any of `weights` may follow the inputs; the run uses them in place of the model's own.

        Raises:
            InvalidInputError: The runtime refuses such inputs.
            PredictError: The runtime cannot bind them.
        """

    @abstractmethod
    def arm(self) -> None:
        """Forget earlier calls of `cancel`; called before each run."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask the current run to stop; the run may continue until its next operator."""

    def twin(self) -> "Engine":
        """The same loaded model for another thread: `bind`, `arm` and `cancel` are for its runs alone.

        Called `concurrent` - 1 times, before the first run. One thread binds at a time, while others run.
        """
        raise NotImplementedError

    def compute(
        self, inputs: Sequence[NDArray[Any]], weights: Sequence[Buffer | Strings] = ()
    ) -> Sequence[NDArray[Any]]:
        """Run once, in this thread, on arrays of the inputs' types, in the machine's byte order.

        `weights` are as in `bind`.

        Returns:
            All outputs, in the model's order, in arrays that are the caller's.

        Raises:
            See `bind` and `BoundRun.execute`.
        """
        specs = self.spec.inputs
        arrays = [np.asarray(array, order="C") for array in inputs]
        given = [*map(produced_from, specs, arrays), *weights]
        produced = self.bind(given, ()).execute()
        found = {item.name: array_of(item).copy() for item in produced}
        return [found[spec.name] for spec in self.spec.outputs]

    def skip(self, exc: Exception) -> None:  # noqa: B027 which most engines need not know
        """A run that was asked for failed before `execute`, so it is not executed."""

    def placed(self, version: int, weights: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        """A version of replaced weights where runs read them: where they are, unless the engine moves them.

        Raises:
            PredictError: There is no memory for them; a later run may find some.
        """
        del version
        return weights

    def forget(self, oldest: int) -> None:  # noqa: B027 most engines have moved none
        """Free what `placed` has moved for versions below this one; no run is bound to them any more."""

    def close(self) -> None:  # noqa: B027 most engines end with their process
        """End what runs in other processes; the engine and its runs are not used afterwards."""


class EngineAround(Engine):
    """An engine that is as another one, but for what a subclass changes.

    Attributes:
        engine: The other one; closed with this one.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        for name in Engine.__annotations__:
            if hasattr(engine, name):
                setattr(self, name, getattr(engine, name))

    def arm(self) -> None:
        self.engine.arm()

    def cancel(self) -> None:
        self.engine.cancel()

    def close(self) -> None:
        self.engine.close()


class ArrayEngine(Engine):
    """An engine whose runtime takes and returns NumPy arrays, and checks little by itself.

    `cancel` refuses the next run. It cannot stop a current one, so the master kills the worker.

    Attributes:
        name: Name of the engine.
    """

    name: str

    def __init__(self) -> None:
        self.turn = Turn()
        self._stop = threading.Event()

    @abstractmethod
    def run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """The outputs, in the model's order; see `BoundRun.execute`. They stay until the next run."""

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
        arrays = [self._input_array(*pair) for pair in zip(self.spec.inputs, inputs, strict=True)]
        return _ArrayRun(self, arrays, {item.name: item for item in outputs})

    def _input_array(self, spec: TensorSpec, item: Buffer | Strings) -> NDArray[Any]:
        given = STRING if isinstance(item, Strings) else item.element_type
        fits = given == spec.element_type and spec.admits(item.shape)
        if isinstance(item, Strings) or not fits:
            raise InvalidInputError(
                f"{self.name}: input {item.name!r} is {given}{[*item.shape]}, expected {spec}"
            )
        return array_over(item)

    def deliver(
        self, arrays: Sequence[NDArray[Any]], places: Mapping[str, Buffer]
    ) -> list[Produced | Strings]:
        """Write a run's outputs to their places; return those that have none, or one of another shape.

        `PredictError`: one has another type than the model says.
        """
        outputs = [*zip(self.spec.outputs, arrays, strict=True)]
        for spec, array in outputs:
            if spec.element_type != STRING and array.dtype != spec.dtype:  # strings have several
                raise PredictError(f"{self.name}: got {array.dtype}{[*array.shape]} for {spec}")
        return delivered([produced_from(s, np.asarray(a, order="C")) for s, a in outputs], places)

    def arm(self) -> None:
        # It takes no lock, which `cancel` would wait for while a signal's handler runs in here.
        if self._stop.is_set():
            self._stop = threading.Event()

    def cancel(self) -> None:
        self._stop.set()

    def check_armed(self) -> None:
        """Raise `RunCancelledError` after `cancel`."""
        if self._stop.is_set():
            raise RunCancelledError("the run was cancelled before it began")


class _ArrayRun(BoundRun):
    def __init__(
        self,
        engine: ArrayEngine,
        inputs: Sequence[NDArray[Any]],
        places: Mapping[str, Buffer],
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._places = places

    def execute(self) -> Sequence[Produced | Strings]:
        return self._engine.deliver(self._engine.run(self._inputs), self._places)
