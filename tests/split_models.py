"""A model as the parts of a master see it that split, and random functions in the place of workers.

A function keeps, moves, mixes or drops the axis of the rows, and gets several requests of different sizes.
Each answer must be that of the function for the whole request, or an error (`McinferError`).

A comparison does not prove. So these functions have no operations that mix rows for rare values alone
(thresholds, rounding, sorting), and none that drop all axes of size 1.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import McinferError, PredictError
from mcinfer.requests.comparing import cut_rows
from mcinfer.requests.splitting import SplitState, Splitter
from mcinfer.requests.tensors import difference, join_parts
from mcinfer.sharding import Axes, SaidAxes, Split, cut_batch
from mcinfer.specs import ModelSpec
from tests.planned_requests import A_POOL, floats

Array = NDArray[Any]
Arrays = dict[str, Array]
Inputs = Sequence[Array]
Function = Callable[..., Mapping[str, Array]]
Dim = int | str

_ROUNDING = 1e-6
"""Of float32 numbers near one."""

ROWS, OTHER, SHARED = "rows", "other", "shared"
"""Sizes that each request chooses: one entry for each row; of another axis; of an input without rows."""

UNKNOWN = "unknown"


class Model:
    """The parts of a master that decide, and a function in the place of its workers.

    Attributes:
        splitter: What is known of it.
        runs: How many runs there were.
        split_runs: How many requests were answered in pieces.
        records: What was to be recorded, in order.
        before: Called before each run with its number and inputs; it may raise.
    """

    def __init__(
        self,
        spec: ModelSpec,
        function: Callable[..., Mapping[str, NDArray[Any]]],
        inputs: Axes | None = None,
        outputs: Axes | None = None,
        **options: Any,
    ) -> None:
        said = SaidAxes(inputs=inputs or {}, outputs=outputs or {})
        self.records: list[Split | None] = []
        self.splitter = Splitter(spec, said, A_POOL, record=self.records.append, **options)
        self.runs = self.split_runs = 0
        self.before: Callable[[int, Inputs], None] = lambda *_: None
        self.spec = spec
        self._function = function

    @property
    def split(self) -> Split:
        """What is known now."""
        return self.splitter.state.split

    def ask(self, *arrays: NDArray[Any], pieces: int = 2) -> Arrays:
        """Answer a request that is cut in so many pieces at most."""
        known = self.splitter.state
        if pieces > 1:
            answer = self.splitter.look(
                arrays, self.run, lambda known: self._run_split(arrays, known, pieces)
            )
            if answer is not None:
                return answer
        if not known.split.settled:
            return self.run(arrays)
        try:
            return self._run_split(arrays, known, pieces)
        except PredictError as exc:
            if not known.rescues:
                raise
            answer = self.run(arrays)
            self.splitter.withdraw(str(exc))
            return answer

    def run(self, arrays: Inputs) -> Arrays:
        """One run, of the whole request."""
        self.runs += 1
        self.before(self.runs, arrays)
        try:
            answer = self._function(*arrays)
        except ValueError as exc:  # shapes that do not go together
            raise PredictError(str(exc)) from exc
        return {name: np.asarray(array) for name, array in answer.items()}

    def _run_split(self, arrays: Inputs, known: SplitState, pieces: int) -> Arrays:
        cut = cut_batch(self.spec, [array.shape for array in arrays], pieces, known.split)
        if len(cut.rows) == 1:
            return self.run(arrays)
        answers = [self.run(part) for part in cut_rows(arrays, cut.input_axes, cut.rows)]
        workers = [f"worker {i}" for i in range(len(answers))]
        self.split_runs += 1
        return {
            spec.name: join_parts(spec, join, [one[spec.name] for one in answers], workers)
            for spec, join in zip(self.spec.outputs, cut.outputs, strict=True)
        }


# Random functions.


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An array, and how it follows from the inputs; sizes are numbers, or what they depend on."""

    dims: tuple[Dim, ...]
    compute: Callable[[Inputs], Array]


class Builder:
    """Adds operations to a function."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.values: list[Value] = []
        self.used: set[Value] = set()

    def add(self, dims: Sequence[Dim], operation: Callable[..., Array], *of: Value) -> None:
        self.values.append(
            Value(tuple(dims), lambda inputs: operation(*(one.compute(inputs) for one in of)))
        )

    def weight(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape, np.float32)

    def pick(self, fits: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """An array that fits, more likely a late one."""
        found = [value for value in self.values if fits(value)]
        if not found:
            return None
        at = len(found) - 1 - min(int(self.rng.geometric(0.5)) - 1, len(found) - 1)
        self.used.add(found[at])
        return found[at]

    def choice(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def keep(self) -> None:
        """Leave the rows where they are."""
        x = self.pick()
        assert x is not None
        dims, last = x.dims, x.dims[-1] if x.dims else UNKNOWN
        match self.rng.integers(5):
            case 0 if isinstance(last, int) and last > 1:
                self.add(dims, lambda a: _softmax(a, -1), x)
            case 1 if isinstance(last, int):
                matrix = self.weight(last, 3) * np.float32(last**-0.5)
                self.add((*dims[:-1], 3), lambda a: a @ matrix, x)
            case 2:
                other = self.pick(lambda v: v.dims == x.dims) or x
                self.add(dims, self.choice((np.add, np.multiply)), x, other)
            case 3 if SHARED not in dims and ROWS in dims[:1]:
                common = self.pick(lambda v: v.dims == (SHARED,))
                if common is not None:  # fails unless it has one size, or the rows'
                    self.add(dims, lambda a, c: a + c.reshape(-1, *[1] * (a.ndim - 1)), x, common)
            case _:
                leaky = lambda a: np.maximum(a, 0.01 * a)  # noqa: E731 one of four
                self.add(dims, self.choice((np.sin, np.tanh, np.negative, leaky)), x)

    def move(self) -> None:
        """Have the rows along another axis, or along one with others."""
        x = self.pick(lambda v: len(v.dims) > 0)
        if x is None:
            return
        dims, rank, last = x.dims, len(x.dims), x.dims[-1]
        match self.rng.integers(4):
            case 0:
                order = [int(i) for i in self.rng.permutation(rank)]
                self.add([dims[i] for i in order], lambda a: a.transpose(order), x)
            case 1 if rank < 4:
                axis = int(self.rng.integers(rank + 1))
                shape = (*dims[:axis], 1, *dims[axis:])
                self.add(shape, lambda a: np.expand_dims(a, axis), x)
            case 2 if rank > 1:  # all axes but the first as one
                shape = (dims[0], _merged(dims[1:]))
                self.add(shape, lambda a: a.reshape(len(a), -1), x)
            case 3 if rank > 1 and isinstance(last, int):  # all axes but the last as one
                self.add((_merged(dims[:-1]), last), lambda a: a.reshape(-1, last), x)

    def mix(self) -> None:
        """Have rows depend on others, on their place or on their number; or drop their axis."""
        x = self.pick(lambda v: v.dims.count(ROWS) == 1)
        if x is None:
            return
        axis = x.dims.index(ROWS)
        before, behind = x.dims[:axis], x.dims[axis + 1 :]

        def add_places(a: Array) -> Array:
            places = np.arange(a.shape[axis], dtype=np.float32)
            return a + places.reshape(-1, *[1] * len(behind))

        dims, operation = self.choice(
            [
                (x.dims, lambda a: _softmax(a, axis)),
                (x.dims, lambda a: a - a.mean(axis, keepdims=True)),
                (x.dims, lambda a: np.cumsum(a, axis)),
                (x.dims, lambda a: np.flip(a, axis)),
                ((*before, UNKNOWN, *behind), lambda a: np.concatenate([a, a], axis)),
                (x.dims, lambda a: a * a.shape[axis]),
                (x.dims, add_places),
                ((*before, 1, *behind), lambda a: a.take([0], axis)),
                ((*before, *behind), lambda a: a.sum(axis)),
            ]
        )
        self.add(dims, operation, x)

    def apart(self) -> None:
        """Numbers that do not depend on the rows: constants, or one for each entry of another axis."""
        x = self.pick(lambda v: OTHER in v.dims)
        if x is None or self.rng.random() < 0.5:
            noise = self.weight(int(self.rng.integers(1, 8)))
            self.add(noise.shape, lambda: noise)
            return
        axis = x.dims.index(OTHER)
        self.add((OTHER,), lambda a: np.arange(a.shape[axis], dtype=np.float32), x)


def _softmax(a: Array, axis: int) -> Array:
    powers: Array = np.exp(a - a.max(axis, keepdims=True))
    shares: Array = powers / powers.sum(axis, keepdims=True)
    return shares


def _merged(dims: Sequence[Dim]) -> Dim:
    """The size of several axes as one."""
    dims = [dim for dim in dims if dim != 1]
    if len(dims) == 1:
        return dims[0]
    numbers = [dim for dim in dims if isinstance(dim, int)]
    return int(np.prod(numbers)) if len(numbers) == len(dims) else UNKNOWN


_SHAPES: tuple[tuple[Dim, ...], ...] = (
    *((ROWS, 3), (ROWS, 3), (ROWS, 4, 5), (ROWS, OTHER, 3), (ROWS,), (ROWS, 1, 3)),
    *((3, ROWS), (OTHER, ROWS, 3), (1, ROWS, 3)),
)
_WITHOUT_ROWS: tuple[tuple[Dim, ...], ...] = ((3,), (SHARED,), (SHARED, 3), (), (OTHER, 3))
_NAMES = ("batch", "N", "batch_size", "s0", "num_nodes", "height", "p2o.DynamicDimension.0")


def make_function(seed: int, number: int) -> tuple[ModelSpec, Function, list[tuple[Dim, ...]]]:
    """The function of this number, and the sizes of its inputs."""
    rng = np.random.default_rng((seed, number, 0))
    b = Builder(rng)
    inputs = []
    for i in range(int(rng.integers(1, 4))):
        dims = b.choice(_SHAPES if i == 0 or rng.random() < 0.5 else _WITHOUT_ROWS)
        inputs.append(Value(dims, lambda given, i=i: given[i]))  # type: ignore[misc]
    b.values += [inputs[i] for i in rng.permutation(len(inputs))]
    steps = (b.keep, b.move) if rng.random() < 0.5 else (b.keep, b.move, b.mix, b.apart)
    for _ in range(int(rng.integers(2, 8))):
        b.choice(steps)()
    made = b.values[len(inputs) :]
    if not made:
        b.keep()
        made = b.values[-1:]
    # Three outputs at most, those first that nothing else is made of.
    outputs = ([value for value in made if value not in b.used] or made)[-3:]
    # The rows' axis has a name, or none; or its name is that of another axis.
    names = {ROWS: b.choice(_NAMES), OTHER: "sequence", SHARED: "shared_size"}
    match rng.integers(3):
        case 0:
            names = {}
        case 1:
            names = {ROWS: "width", OTHER: names[ROWS], SHARED: names[ROWS]}

    def declared(letter: str, values: Sequence[Value]) -> dict[str, list[Any]]:
        return {
            f"{letter}{i}": [dim if isinstance(dim, int) else names.get(dim) for dim in value.dims]
            for i, value in enumerate(values)
        }

    def function(*arrays: Array) -> Arrays:
        with np.errstate(all="ignore"):
            return {f"y{i}": value.compute(arrays) for i, value in enumerate(outputs)}

    spec = floats(declared("x", inputs), declared("y", outputs))
    return spec, function, [value.dims for value in inputs]


def make_requests(inputs: Sequence[Sequence[Dim]], seed: int, number: int) -> Iterator[Inputs]:
    """Six requests for a function; half of them have such whose sizes may be the same by chance."""
    rng = np.random.default_rng((seed, number, 1))
    tame = rng.random() < 0.5
    for _ in range(6):
        rows, other, shared = (int(size) for size in rng.choice(range(6, 12), 3, replace=False))
        if not tame:
            rows = int(rng.integers(2, 8)) if rng.random() < 0.9 else 1
            other, shared = ((1, rows, int(rng.integers(1, 8)))[rng.integers(3)] for _ in range(2))
        elif rng.random() < 0.5:
            shared = 1
        sizes: dict[Dim, int] = {ROWS: rows, OTHER: other, SHARED: shared}
        alike = not tame and rng.random() < 0.1
        request = []
        for dims in inputs:
            shape = [dim if isinstance(dim, int) else sizes[dim] for dim in dims]
            drawn = [1 if alike and dim == ROWS else n for dim, n in zip(dims, shape, strict=True)]
            array = rng.standard_normal(drawn, np.float32)
            request.append(np.array(np.broadcast_to(array, shape), order="C"))
        yield request


# Checking.


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How many requests have the right answer, how many the function refuses, errors, and wrong answers."""

    answered: int = 0
    refused: int = 0
    raised: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def compare(model: Model, requests: Iterable[Inputs]) -> Outcome:
    """Give requests to a model and to its function, one after another."""
    outcome = Outcome()
    story: list[str] = []
    for request in requests:
        story.append(", ".join(str([*array.shape]) for array in request))
        try:
            want = model.run(request)
        except PredictError:
            outcome.refused += 1
            story.pop()
            continue
        try:
            got = model.ask(*request)
        except McinferError as exc:
            outcome.raised.append(f"{type(exc).__name__}: {exc}")
            continue
        wrong = [text for name in want if (text := _fault(name, got[name], want[name]))]
        if wrong:
            outcome.wrong.append(f"{'; '.join(wrong)}; requests: {' | '.join(story)}")
        else:
            outcome.answered += 1
    return outcome


def _fault(name: str, got: NDArray[Any], want: NDArray[Any]) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{name} is {got.dtype}{[*got.shape]}, not {want.dtype}{[*want.shape]}"
    fits, far = difference(got, want)
    if not fits and want.dtype.kind == "f":
        # Where numbers near one cancel out, what is left is the rounding.
        fits = bool(np.all(np.abs(got - want) < _ROUNDING))
    return "" if fits else f"{name} differs by {far:.2g}"


def check_functions(numbers: range, seed: int) -> tuple[Counter[str], list[str]]:
    """What came of the functions of these numbers, counted, and what is wrong of each that is."""
    counts, findings = Counter[str](), []
    for number in numbers:
        spec, function, inputs = make_function(seed, number)
        model = Model(spec, function)
        outcome = compare(model, make_requests(inputs, seed, number))
        splits = model.splitter.state.splits
        counts["split" if splits else "whole" if model.split.settled else "undecided"] += 1
        counts.update(
            answered=outcome.answered,
            refused=outcome.refused,
            raised=len(outcome.raised),
            in_pieces=model.split_runs,
        )
        if outcome.wrong:
            wrong = "\n".join(outcome.wrong)
            findings.append(f"function {number} of seed {seed}\n{spec}\n{model.split}\n{wrong}")
    return counts, findings
