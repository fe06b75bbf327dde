"""The check of slices: they run on made-up inputs, and must give what the whole model gives.

::

    child process   the whole model, then the ranks step by step, which exchange values as arrays

A model that quantises values runs without the runtime's optimisations: these quantise further values, which
ones depends on the nodes around, and these are others in a slice.

The whole model is closed before the slices are loaded. Free sizes of the inputs are made up, and others are
tried if the model refuses them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.config import Device, EngineOptions
from mcinfer.engines._onnxruntime import load
from mcinfer.engines.adapters import open_engine
from mcinfer.engines.base import Engine, EngineRequest
from mcinfer.errors import BuildError, EngineError, InvalidInputError, McinferError, shortened
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.model_cache.children import Progress
from mcinfer.ranks.slicing.plans import Exchange, RankPlan, Segment, rank_folder
from mcinfer.ranks.slicing.segments import cut_segments, rounding
from mcinfer.specs import STRING, ModelSpec, TensorSpec, check_whole_bytes

_SIZES = ((2, 8), (2, 16), (2, 64), (1, 8), (1, 64), (1, 1))
"""What free dimensions are tried with: the first of a tensor, and others."""

_RUNS = 6
"""With other inputs each: what a runtime keeps from one run shows only in a later one."""

_TOLERANCE = {"float64": 1e-10, "complex128": 1e-10, "float32": 1e-5, "complex64": 1e-5}
_NARROW_TOLERANCE = 2e-2
"""Of float16, bfloat16 and narrower ones. Other types must be equal."""

_QUANTISED = ("int8", "uint8", "int16", "uint16")
_STEPS = 4
"""How many quantisation steps an answer may be off: a sum in another order may end on another step."""

_MOST_OFF = 0.1
"""However large the steps are; relative to the largest magnitude."""

_WORDS = ("red", "green", "blue", "one", "two", "three")

Array = NDArray[Any]


def check(_: Progress, model: str, folder: str) -> dict[str, Any]:
    """Compare the slices in a folder with their model; in a child.

    Args:
        _: Not called.
        model: Path of the whole model.
        folder: What `write_slices` has written.

    Returns:
        ``difference`` and ``tolerance`` by output: the largest difference relative to the largest magnitude;
        or ``reason`` if no inputs were found that the model takes.

    Raises:
        BuildError: The slices give something else, or cannot be loaded or run.
    """
    # The process that kills this one removes the folder, with what is in it.
    with TemporaryDirectory(prefix="segments-", dir=folder) as temporary:
        places = _segments(Path(folder), Path(temporary))
        plans = [RankPlan.read(place) for place in places]
        rounded = rounding(
            place / step.file
            for plan, place in zip(plans, places, strict=True)
            for step in plan.steps
            if isinstance(step, Segment)
        )
        options = {} if rounded is None else {"graph_optimization_level": "ORT_DISABLE_ALL"}
        whole = open_engine("onnxruntime", _request(model, options))
        spec = whole.spec
        check_whole_bytes((*spec.inputs, *spec.outputs))
        refusals: list[str] = []
        taken: list[tuple[list[Array], list[Array]]] = []  # inputs and outputs
        for batch, size in _SIZES:
            for trial in range(_RUNS):
                inputs = made_up_inputs(spec, batch, size, trial)
                try:
                    taken.append((inputs, [*whole.compute(inputs)]))
                except (EngineError, InvalidInputError) as exc:
                    refusals.append(shortened(str(exc)))
            if taken:
                break
        else:
            return {"reason": f"no made-up inputs fit the model: {refusals[0]}"}
        del whole
        taken = (taken * _RUNS)[:_RUNS]
        engines: list[Mapping[int, Engine]] = []
        for rank, (plan, place) in enumerate(zip(plans, places, strict=True)):
            with _of_rank(rank):
                own = {
                    at: load(_request(str(place / step.file), options, **{FOLDER_KEY: folder}))
                    for at, step in enumerate(plan.steps)
                    if isinstance(step, Segment)
                }
            engines.append(own)
        found = [_run_ranks(plans, engines, inputs) for inputs, _ in taken]
    return _compared(spec, [outputs for _, outputs in taken], found, rounded)


def _segments(folder: Path, temporary: Path) -> list[Path]:
    """The folder of each rank's segments, which are cut now if the slices are files."""
    if (folder / rank_folder(0)).exists():
        return [folder / rank_folder(rank) for rank in range(len([*folder.glob("model*.data")]))]
    places = [temporary / rank_folder(rank) for rank in range(len([*folder.glob("model*.onnx")]))]
    for rank, place in enumerate(places):
        place.mkdir()
        cut_segments(folder / f"model{rank}.onnx", place)
    return places


def made_up_inputs(spec: ModelSpec, batch: int, size: int, trial: int = 0) -> list[Array]:
    """Random inputs: normal floats, integers of 0 and 1. A symbol has the same size in all of them.

    Args:
        spec: The model's.
        batch: Size of free dimensions that are the first of an input.
        size: Size of others.
        trial: Others get other elements.
    """
    symbols: dict[str, int] = {}
    arrays = []
    for number, tensor in enumerate(spec.inputs):
        shape = []
        for axis, dimension in enumerate(tensor.shape):
            chosen = dimension if isinstance(dimension, int) else size if axis else batch
            symbol = isinstance(dimension, str) and dimension
            shape.append(symbols.setdefault(symbol, chosen) if symbol else chosen)
        arrays.append(_random(tensor, tuple(shape), [number, trial]))
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


def _request(model: str, options: Mapping[str, str], **config: str) -> EngineRequest:
    device = Device(kind="cpu", index=0)
    engine_options = EngineOptions(
        threads=1, prepare="never", session_options=options, session_config=config
    )
    return EngineRequest(model=model, device=device, options=engine_options)


@contextmanager
def _of_rank(number: int) -> Iterator[None]:
    """Errors name the rank."""
    try:
        yield
    except McinferError as exc:
        raise BuildError(f"the slices do not run: rank {number}: {exc}") from exc


def _run_ranks(
    plans: Sequence[RankPlan],
    engines: Sequence[Mapping[int, Engine]],
    inputs: Sequence[Array],
) -> list[dict[str, Array]]:
    """The outputs of each rank: of a stage all at once, step by step; of stages one after another.

    Args:
        plans: By rank.
        engines: By rank and place of a segment among the steps.
        inputs: Of the whole model.
    """
    names = [tensor.name for tensor in plans[0].spec.inputs]
    values = [dict(zip(names, inputs, strict=True)) for _ in plans]
    size = plans[0].tensor or 1
    for first in range(0, len(plans), size):
        stage = range(first, first + size)
        for rank in stage:
            received = plans[rank].receives.items()
            values[rank].update((name, values[source][name]) for name, source in received)
        for at, step in enumerate(plans[first].steps):
            if isinstance(step, Exchange):
                whole = _exchanged(step, [values[rank][step.input] for rank in stage])
            for rank in stage:
                own = values[rank]
                if isinstance(step, Exchange):
                    own[step.output] = whole
                    continue
                with _of_rank(rank):
                    given = [own[name] for name in step.inputs]
                    outputs = engines[rank][at].compute(given)
                own.update(zip(step.outputs, outputs, strict=True))
    return [
        {name: own[name] for name in plan.made} for plan, own in zip(plans, values, strict=True)
    ]


def _exchanged(exchange: Exchange, parts: Sequence[Array]) -> Array:
    if exchange.kind == "all_gather":
        return np.concatenate(parts, axis=exchange.axis)
    whole: Array = np.sum(np.stack(parts), axis=0, dtype=parts[0].dtype)
    return whole


# Comparison.


def _compared(
    spec: ModelSpec,
    expected: Sequence[Sequence[Array]],
    found: Sequence[Sequence[Mapping[str, Array]]],
    rounded: tuple[str, int] | None,
) -> dict[str, Any]:
    """The answer of `check`; `BuildError` if an output differs too much, or ranks do not agree.

    Args:
        spec: The whole model's.
        expected: By run and output.
        found: By run, rank and name, of the ranks that make an output.
        rounded: The coarsest quantisation, if there is one.
    """
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
            makers = [rank for rank, outputs in enumerate(found[trial]) if tensor.name in outputs]
            first = found[trial][makers[0]][tensor.name]
            for rank in makers:
                if not _is_same(found[trial][rank][tensor.name], first):
                    raise BuildError(
                        f"ranks {makers[0]} and {rank} do not give the same output {tensor.name!r}"
                    )
            largest = max(largest, difference(wanted[number], first))
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

    Sums over ranks are rounded in another order than the model's own. Integers, booleans and strings have to
    be equal.
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
