"""The check of slices: they run on made-up inputs, and must give what the whole model gives.

::

    child process   the whole model, then one thread for each rank ── joined by socket pairs

A model that quantises values runs without the runtime's optimisations: these quantise further values, which
ones depends on the nodes around, and these are others in a slice.

The whole model is closed before the slices are loaded. Free sizes of the inputs are made up, and others are
tried if the model refuses them. Each kind of run is tried several times with other inputs: memory that is
used again shows only then what it held before.
"""

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.config import Device
from mcinfer.engines import open_engine
from mcinfer.engines.base import (
    Buffer,
    Engine,
    EngineRequest,
    Produced,
    Run,
    Strings,
    array_over,
    produced_from,
)
from mcinfer.errors import (
    BuildError,
    ClosedError,
    EngineError,
    InvalidInputError,
    McinferError,
    WorkerDiedError,
    shortened,
)
from mcinfer.model_cache.building import Progress
from mcinfer.ranks.collectives.base import PeerFailedError
from mcinfer.ranks.collectives.shm import join_sockets
from mcinfer.ranks.slices import RankEngine
from mcinfer.ranks.slicing.segments import cut_segments, rounding
from mcinfer.specs import ELEMENT_TYPES, STRING, ModelSpec, TensorSpec

_SIZES = ((2, 8), (2, 16), (2, 64), (1, 8), (1, 64), (1, 1))
"""What free dimensions are tried with: the first of a tensor, and others."""

_RUNS = 3
"""Of each kind: with outputs in memory of the engine, and with inputs and outputs that stay bound."""

_TOLERANCE = {"float64": 1e-10, "complex128": 1e-10, "float32": 1e-5, "complex64": 1e-5}
_NARROW_TOLERANCE = 2e-2
"""Of float16, bfloat16 and narrower ones. Other types must be equal."""

_QUANTISED = ("int8", "uint8", "int16", "uint16")
_STEPS = 4
"""How many quantisation steps an answer may be off: a sum in another order may end on another step."""

_MOST_OFF = 0.1
"""However large the steps are; relative to the largest magnitude."""

_PACKED_BITS = 4

_FOLLOWED = (PeerFailedError, WorkerDiedError, ClosedError)
"""Errors of a rank that follow from another rank's."""

_TIMEOUT = 600.0
"""Seconds that a rank waits for the others, which may still load their slices."""

_WORDS = ("red", "green", "blue", "one", "two", "three")

Array = NDArray[Any]


def check(_: Progress, model: str, folder: str) -> dict[str, Any]:
    """Compare the slices in a folder with their model; in a child.

    Args:
        _: Not called.
        model: Path of the whole model.
        folder: Has ``model0.onnx`` and so on, one for each rank.

    Returns:
        ``difference`` and ``tolerance`` by output: the largest difference relative to the largest magnitude;
        or ``reason`` if no inputs were found that the model takes.

    Raises:
        BuildError: The slices give something else, or cannot be loaded or run.
    """
    slices = sorted(Path(folder).glob("model*.onnx"))
    rounded = rounding(slices)
    options = {} if rounded is None else {"graph_optimization_level": "ORT_DISABLE_ALL"}
    whole = open_engine("onnxruntime", _request(model, options))
    spec = whole.spec
    for tensor in spec.inputs:
        if ELEMENT_TYPES[tensor.element_type].bits == _PACKED_BITS:
            return {"reason": f"no elements are made up for input {tensor}"}
    refusals: list[str] = []
    taken: list[tuple[list[Array], list[Array]]] = []  # inputs and outputs
    for batch, size in _SIZES:
        for trial in range(2 * _RUNS):
            inputs = made_up_inputs(spec, batch, size, trial)
            try:
                taken.append((inputs, _run(whole, inputs)))
            except (EngineError, InvalidInputError) as exc:
                refusals.append(shortened(str(exc)))
        if taken:
            break
    else:
        return {"reason": f"no made-up inputs fit the model: {refusals[0]}"}
    del whole
    taken = (taken * 2 * _RUNS)[: 2 * _RUNS]
    # The process that kills this one removes the folder, with what is in it.
    with TemporaryDirectory(prefix="segments-", dir=folder) as segments:
        trials = [inputs for inputs, _ in taken]
        found = _run_ranks(len(slices), Path(segments), options, trials)
    return _compared(spec, [outputs for _, outputs in taken], found, rounded)


def made_up_inputs(spec: ModelSpec, batch: int, size: int, trial: int = 0) -> list[Array]:
    """Random inputs: normal floats, integers of 0 and 1. A symbol has the same size in all of them.

    Args:
        spec: The model's.
        batch: Size of free dimensions that are the first of an input.
        size: Size of others.
        trial: Others get other elements. Strings stay, since a binding has them by value.
    """
    symbols: dict[str, int] = {}
    arrays = []
    for number, tensor in enumerate(spec.inputs):
        shape = []
        for axis, dimension in enumerate(tensor.shape):
            if isinstance(dimension, int):
                shape.append(dimension)
            else:
                chosen = size if axis else batch
                shape.append(symbols.setdefault(dimension, chosen) if dimension else chosen)
        seed = [number, 0 if tensor.element_type == STRING else trial]
        arrays.append(_random(tensor, tuple(shape), seed))
    return arrays


def _random(tensor: TensorSpec, shape: tuple[int, ...], seed: list[int]) -> Array:
    generator = np.random.default_rng(seed)
    kind = tensor.element_type
    if kind == STRING:
        return np.array(_WORDS, object)[generator.integers(len(_WORDS), size=shape)]
    if "int" in kind or kind == "bool":
        return generator.integers(2, size=shape).astype(tensor.dtype)
    drawn: Array = generator.standard_normal(shape)
    if kind.startswith("complex"):
        drawn = drawn + 1j * generator.standard_normal(shape)
    return np.asarray(drawn).astype(tensor.dtype)


# Runs.


def _request(model: str, options: Mapping[str, str]) -> EngineRequest:
    device = Device(kind="cpu", index=0)
    return EngineRequest(model=model, device=device, threads=1, session_options=options)


def _run(engine: Engine, inputs: Sequence[Array]) -> list[Array]:
    """The outputs, in the model's order; copies."""
    return _executed(engine, engine.bind(_tensors(engine.spec.inputs, inputs), ()))


def _executed(engine: Engine, run: Run, places: Sequence[Buffer] = ()) -> list[Array]:
    """The outputs, some of which have places; copies."""
    engine.arm()
    produced = {item.name: item for item in (*places, *run.execute())}
    return [_array(produced[tensor.name]) for tensor in engine.spec.outputs]


def _run_each(engine: Engine, trials: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """The outputs for each of the inputs: half of them in runs of their own, half in one that stays bound."""
    found = [_run(engine, inputs) for inputs in trials[:_RUNS]]
    inputs = [array.copy() for array in trials[_RUNS]]
    outputs = _tensors(engine.spec.outputs, [np.empty_like(array) for array in found[0]])
    places = [item for item in outputs if isinstance(item, Buffer)]
    run = engine.bind(_tensors(engine.spec.inputs, inputs), places)
    for trial in trials[_RUNS:]:
        for array, elements in zip(inputs, trial, strict=True):
            array[...] = elements
        found.append(_executed(engine, run, places))
    return found


def _tensors(specs: Sequence[TensorSpec], arrays: Sequence[Array]) -> list[Produced | Strings]:
    return [produced_from(spec, array) for spec, array in zip(specs, arrays, strict=True)]


def _array(item: Buffer | Strings) -> Array:
    if isinstance(item, Strings):
        return np.array(item.values, object).reshape(item.shape)
    return array_over(item).copy()


def _run_ranks(
    size: int, segments: Path, options: Mapping[str, str], trials: Sequence[Sequence[Array]]
) -> list[list[list[Array]]]:
    """By rank and trial, the outputs; `segments` is an empty folder beside the slices."""
    folder = segments.parent
    for rank in range(size):
        (segments / str(rank)).mkdir()
        cut_segments(folder / f"model{rank}.onnx", segments / str(rank))
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1, size)]
    ends = [[ours for ours, _ in pairs], *([theirs] for _, theirs in pairs)]

    def run(rank: int) -> list[list[Array]]:
        try:
            with join_sockets(rank, size, ends[rank], timeout=_TIMEOUT) as group:
                request = _request(str(folder / f"model{rank}.onnx"), options)
                with closing(RankEngine(request, group, segments / str(rank))) as engine:
                    outputs = _run_each(engine, trials)
                    group.barrier()  # none leaves before all have their outputs
                    return outputs
        except BaseException:
            for end in ends[rank]:  # others may wait for this rank
                end.shutdown(socket.SHUT_RDWR)
            raise

    with ExitStack() as stack:
        for end in (end for pair in pairs for end in pair):
            stack.enter_context(end)
        pool = stack.enter_context(ThreadPoolExecutor(size))
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = {rank: exc for rank, future in enumerate(futures) if (exc := future.exception())}
    if errors:
        # A rank that fails makes the others fail: the cause is another error than theirs.
        own = {rank: exc for rank, exc in errors.items() if not isinstance(exc, _FOLLOWED)}
        rank, error = next(iter((own or errors).items()))
        if isinstance(error, McinferError):
            raise BuildError(f"the slices do not run: rank {rank}: {error}") from error
        raise error
    return [future.result() for future in futures]


# Comparison.


def _compared(
    spec: ModelSpec,
    expected: Sequence[Sequence[Array]],
    found: Sequence[Sequence[Sequence[Array]]],
    rounded: tuple[str, int] | None,
) -> dict[str, Any]:
    """The answer of `check`; `BuildError` if an output differs too much, or ranks do not agree."""
    differences, tolerances = {}, {}
    steps, why = 0.0, ""
    if rounded is not None:
        node, bits = rounded
        steps = min(_STEPS / 2 ** (bits - 1), _MOST_OFF)
        why = (
            f"; {node} quantises to {bits} bits, so a sum in another order may end on another step, "
            "which later nodes may enlarge"
        )
    for number, tensor in enumerate(spec.outputs):
        largest = 0.0
        for trial, wanted in enumerate(expected):
            got = [outputs[trial][number] for outputs in found]
            for rank, array in enumerate(got):
                if not _is_same(array, got[0]):
                    raise BuildError(
                        f"ranks 0 and {rank} do not give the same output {tensor.name!r}"
                    )
            largest = max(largest, difference(wanted[number], got[0]))
        allowed = tolerance(tensor.element_type)
        if tensor.element_type in _QUANTISED or "float" in tensor.element_type:
            allowed = max(allowed, steps)
        if not largest <= allowed:
            raise BuildError(
                f"the slices do not give what the model gives: output {tensor.name!r} differs by "
                f"{largest:.1e} of its largest magnitude, expected at most {allowed:.0e}{why}"
            )
        differences[tensor.name], tolerances[tensor.name] = largest, allowed
    return {"difference": differences, "tolerance": tolerances}


def tolerance(element_type: str) -> float:
    """The largest difference that is allowed, relative to the largest magnitude of an output.

    Sums over ranks are rounded in another order than the model's own: 1e-5 for float32, 1e-10 for float64,
    2e-2 for narrower floats, and nothing for integers, booleans and strings.
    """
    if element_type in _TOLERANCE:
        return _TOLERANCE[element_type]
    return _NARROW_TOLERANCE if "float" in element_type else 0.0


def difference(expected: Array, found: Array) -> float:
    """The largest difference relative to the largest magnitude that is expected; infinity if it has none.

    Elements that are not finite must be the same.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if expected.dtype == object or not expected.size:
        return 0.0 if _is_same(expected, found) else float("inf")
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    one, other = expected.astype(wide), found.astype(wide)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return float("inf")
    largest = float(np.abs(one[finite]).max(initial=0.0))
    apart = float(np.abs(one[finite] - other[finite]).max(initial=0.0))
    if not apart:
        return 0.0
    return apart / largest if largest and np.isfinite(apart) else float("inf")


def _is_same(one: Array, other: Array) -> bool:
    if one.dtype == object:
        return one.shape == other.shape and bool((one == other).all())
    return one.shape == other.shape and one.tobytes() == other.tobytes()
