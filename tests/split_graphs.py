"""Random small graphs, and whether a batch that is split gives what one session gives for the whole.

A graph keeps, moves, mixes or drops the axis of the rows, and gets several requests of different sizes. Each
answer must be that of ONNX Runtime's session on the whole request, or an error (`McinferError`). `Model` has
the master's parts that decide (`Splitter`, `cut_batch`, `join_parts`), and runs each piece in that session.

A comparison does not prove. So these graphs have no operators that mix rows for rare values alone
(thresholds, rounding, sorting), and none that drop all axes of size 1.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, printer

from mcinfer.engines._onnxruntime import _spec
from mcinfer.errors import McinferError, PredictError
from mcinfer.requests.splitting import Known, Splitter, cut_rows
from mcinfer.requests.tensors import difference, join_parts
from mcinfer.sharding import Axes, JoinError, SaidAxes, Split, cut_batch
from mcinfer.specs import ModelSpec

Arrays = dict[str, NDArray[Any]]
Inputs = Sequence[NDArray[Any]]
Dim = int | str

_ROUNDING = 1e-6
"""Of float32 numbers near one."""

ROWS, OTHER, SHARED = "rows", "other", "shared"
"""Sizes that each request chooses: one entry for each row; of another axis; of an input without rows."""

UNKNOWN = "unknown"


# Graphs.


@dataclass(frozen=True, slots=True)
class Value:
    """A float32 tensor of a graph; sizes are numbers, or what they depend on."""

    name: str
    dims: tuple[Dim, ...]


class Builder:
    """Adds operators to a graph."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.values: list[Value] = []
        self.used: set[str] = set()
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def graph(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> onnx.ModelProto:
        made = helper.make_graph(self._nodes, "random", inputs, outputs, self._weights)
        return helper.make_model(
            made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name=""
        )

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def weight(self, array: Any, dtype: Any = np.float32) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def numbers(self, *numbers: int) -> str:
        return self.weight(numbers, np.int64)

    def size(self, value: Value, axis: int) -> str:
        """The size of an axis, when the graph runs, as one number."""
        shape = self.node("Shape", value.name)
        return self.node("Gather", shape, self.weight(axis, np.int64), axis=0)

    def pick(self, fits: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """A tensor that fits, more likely a late one."""
        found = [value for value in self.values if fits(value)]
        if not found:
            return None
        at = len(found) - 1 - min(int(self.rng.geometric(0.5)) - 1, len(found) - 1)
        self.used.add(found[at].name)
        return found[at]

    def choice(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def keep(self) -> None:
        """Leave the rows where they are."""
        x = self.pick()
        assert x is not None
        name, dims, last = x.name, x.dims, x.dims[-1] if x.dims else UNKNOWN
        match self.rng.integers(5):
            case 0 if isinstance(last, int) and last > 1:
                made = self.node("Softmax", name, axis=-1)
            case 1 if isinstance(last, int):
                matrix = self.rng.standard_normal((last, 3)) * last**-0.5
                made, dims = self.node("MatMul", name, self.weight(matrix)), (*dims[:-1], 3)
            case 2:
                other = self.pick(lambda v: v.dims == x.dims) or x
                made = self.node(self.choice(("Add", "Mul")), name, other.name)
            case 3 if SHARED not in dims and ROWS in dims[:1]:
                common = self.pick(lambda v: v.dims == (SHARED,))
                if common is None:
                    return
                behind = self.numbers(*range(1, len(dims)))
                wide = self.node("Unsqueeze", common.name, behind) if dims[1:] else common.name
                made = self.node("Add", name, wide)  # fails unless it has one size, or the rows'
            case _:
                made = self.node(self.choice(("Sin", "Tanh", "Neg", "LeakyRelu")), name)
        self.values.append(Value(made, dims))

    def move(self) -> None:
        """Have the rows along another axis, or along one with others."""
        x = self.pick(lambda v: len(v.dims) > 0)
        if x is None:
            return
        rank, last = len(x.dims), x.dims[-1]
        match self.rng.integers(4):
            case 0:
                order = [int(i) for i in self.rng.permutation(rank)]
                made, dims = self.node("Transpose", x.name, perm=order), [x.dims[i] for i in order]
            case 1 if rank < 4:
                axis = int(self.rng.integers(rank + 1))
                made = self.node("Unsqueeze", x.name, self.numbers(axis))
                dims = [*x.dims[:axis], 1, *x.dims[axis:]]
            case 2 if rank > 1:  # all axes but the first as one
                made = self.node("Reshape", x.name, self.numbers(0, -1))
                dims = [x.dims[0], _merged(x.dims[1:])]
            case 3 if rank > 1 and isinstance(last, int):  # all axes but the last as one
                made = self.node("Reshape", x.name, self.numbers(-1, last))
                dims = [_merged(x.dims[:-1]), last]
            case _:
                return
        self.values.append(Value(made, tuple(dims)))

    def mix(self) -> None:
        """Have rows depend on others, on their place or on their number; or drop their axis."""
        x = self.pick(lambda v: v.dims.count(ROWS) == 1)
        if x is None:
            return
        name, dims, axis = x.name, x.dims, x.dims.index(ROWS)
        match self.rng.integers(9):
            case 0:
                made = self.node("Softmax", name, axis=axis)
            case 1:
                common = self.node("ReduceMean", name, axes=[axis], keepdims=1)
                made = self.node("Sub", name, common)
            case 2:
                made = self.node("CumSum", name, self.weight(axis, np.int64))
            case 3:  # backwards
                limits = (-1, -(2**62), axis, -1)
                made = self.node("Slice", name, *(self.numbers(limit) for limit in limits))
            case 4:
                made = self.node("Concat", name, name, axis=axis)
                dims = (*dims[:axis], UNKNOWN, *dims[axis + 1 :])
            case 5:
                count = self.node("Cast", self.size(x, axis), to=TensorProto.FLOAT)
                made = self.node("Mul", name, count)
            case 6:
                zero, one = self.weight(0, np.int64), self.weight(1, np.int64)
                places = self.node("Range", zero, self.size(x, axis), one)
                places = self.node("Cast", places, to=TensorProto.FLOAT)
                if len(dims) - axis > 1:
                    behind = self.numbers(*range(1, len(dims) - axis))
                    places = self.node("Unsqueeze", places, behind)
                made = self.node("Add", name, places)
            case 7:  # the first row
                first = (0, 1, axis)
                made = self.node("Slice", name, *(self.numbers(limit) for limit in first))
                dims = (*dims[:axis], 1, *dims[axis + 1 :])
            case _:
                made = self.node("ReduceSum", name, self.numbers(axis), keepdims=0)
                dims = (*dims[:axis], *dims[axis + 1 :])
        self.values.append(Value(made, dims))

    def apart(self) -> None:
        """Numbers that do not depend on the rows: constants, or one for each entry of another axis."""
        x = self.pick(lambda v: OTHER in v.dims)
        if x is None or self.rng.random() < 0.5:
            size = int(self.rng.integers(1, 8))
            noise = self.weight(self.rng.standard_normal(size))
            self.values.append(Value(self.node("Identity", noise), (size,)))
            return
        zero, one = self.weight(0, np.int64), self.weight(1, np.int64)
        count = self.node("Range", zero, self.size(x, x.dims.index(OTHER)), one)
        self.values.append(Value(self.node("Cast", count, to=TensorProto.FLOAT), (OTHER,)))


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


def make_graph(seed: int, number: int) -> tuple[onnx.ModelProto, list[Value]]:
    """The graph of this number, and its inputs."""
    rng = np.random.default_rng((seed, number, 0))
    b = Builder(rng)
    for i in range(int(rng.integers(1, 4))):
        shapes = _SHAPES if i == 0 or rng.random() < 0.5 else _WITHOUT_ROWS
        b.values.append(Value(f"x{i}", b.choice(shapes)))
    b.rng.shuffle(b.values)
    inputs = [*b.values]
    steps = (b.keep, b.move) if rng.random() < 0.5 else (b.keep, b.move, b.mix, b.apart)
    for _ in range(int(rng.integers(2, 8))):
        b.choice(steps)()
    made = [value for value in b.values if value.name.startswith("v")]
    if not made:
        b.keep()
        made = b.values[-1:]
    # Three outputs at most, those first that nothing else is made of.
    outputs = ([value for value in made if value.name not in b.used] or made)[-3:]
    # The rows' axis has a name, or none; or its name is that of another axis.
    names = {ROWS: b.choice(_NAMES), OTHER: "sequence", SHARED: "shared_size"}
    match rng.integers(3):
        case 0:
            names = {}
        case 1:
            names = {ROWS: "width", OTHER: names[ROWS], SHARED: names[ROWS]}

    def info(value: Value, *, shape: bool = True) -> onnx.ValueInfoProto:
        dims = [dim if isinstance(dim, int) else names.get(dim) for dim in value.dims]
        kind = TensorProto.FLOAT
        return helper.make_tensor_value_info(value.name, kind, dims if shape else None)

    declared = [info(value, shape=rng.random() < 0.9) for value in outputs]
    return b.graph([info(value) for value in inputs], declared), inputs


def make_requests(inputs: Sequence[Value], seed: int, number: int) -> Iterator[Arrays]:
    """Six requests for a graph; half of the graphs have such whose sizes may be the same by chance."""
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
        request = {}
        for value in inputs:
            shape = [dim if isinstance(dim, int) else sizes[dim] for dim in value.dims]
            drawn = [
                1 if alike and dim == ROWS else n for dim, n in zip(value.dims, shape, strict=True)
            ]
            array = rng.standard_normal(drawn, np.float32)
            request[value.name] = np.array(np.broadcast_to(array, shape), order="C")
        yield request


# Running.


def open_session(model: onnx.ModelProto) -> Any:
    """A session of one thread, which says nothing."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


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
        self.records: list[dict[str, Any] | None] = []
        self.splitter = Splitter(spec, said, record=self.records.append, **options)
        self.runs = self.split_runs = 0
        self.before: Callable[[int, Inputs], None] = lambda *_: None
        self.spec = spec
        self._function = function

    @property
    def split(self) -> Split:
        """What is known now."""
        return self.splitter.known.split

    def ask(self, *arrays: NDArray[Any], pieces: int = 2, rechecks: int = 0) -> Arrays:
        """Answer a request that is cut in so many pieces at most, with weights after so many rechecks."""
        known = self.splitter.known_for(rechecks)
        shapes = tuple(array.shape for array in arrays)
        if pieces > 1 and self.splitter.teaches(known, shapes):
            return self.splitter.answer(
                known,
                arrays,
                pieces,
                self.run_all,
                lambda known: self._run_split(arrays, known, pieces),
            )
        return self._run_split(arrays, known, pieces) if known.settled else self.run(arrays)

    def run(self, arrays: Inputs) -> Arrays:
        """One run, of the whole request."""
        self.runs += 1
        self.before(self.runs, arrays)
        try:
            answer = self._function(*arrays)
        except ValueError as exc:  # shapes that do not go together
            raise PredictError(str(exc)) from exc
        return {name: np.asarray(array) for name, array in answer.items()}

    def run_all(self, requests: Sequence[Inputs]) -> list[Arrays | McinferError]:
        """What a splitter has run."""
        outcomes: list[Arrays | McinferError] = []
        for arrays in requests:
            try:
                outcomes.append(self.run(arrays))
            except McinferError as exc:
                outcomes.append(exc)
        return outcomes

    def _run_split(self, arrays: Inputs, known: Known, pieces: int) -> Arrays:
        cut = cut_batch(self.spec, [array.shape for array in arrays], pieces, known.split)
        if len(cut.rows) == 1:
            return self.run(arrays)
        answers = [self.run(part) for part in cut_rows(arrays, cut.input_axes, cut.rows)]
        workers = [f"worker {i}" for i in range(len(answers))]
        self.split_runs += 1
        try:
            return {
                spec.name: join_parts(spec, join, [one[spec.name] for one in answers], workers)
                for spec, join in zip(self.spec.outputs, cut.outputs, strict=True)
            }
        except JoinError as exc:
            self.splitter.withdraw(str(exc))
            raise


def model_of(session: Any) -> Model:
    """A model whose runs are a session's."""
    spec = ModelSpec(
        inputs=tuple(_spec(one, "input", "") for one in session.get_inputs()),
        outputs=tuple(_spec(one, "output", "") for one in session.get_outputs()),
    )
    names = [[one.name for one in specs] for specs in (spec.inputs, spec.outputs)]

    def run(*arrays: NDArray[Any]) -> Arrays:
        try:
            answers = session.run(names[1], dict(zip(names[0], arrays, strict=True)))
        except Exception as exc:  # the runtime's own classes
            raise PredictError(str(exc)) from exc
        return dict(zip(names[1], answers, strict=True))

    return Model(spec, run)


# Checking.


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How many requests have the right answer, how many the session refuses, errors, and wrong answers."""

    answered: int = 0
    refused: int = 0
    raised: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def compare(session: Any, model: Model, requests: Iterator[Arrays]) -> Outcome:
    """Give requests to both, one after another."""
    outcome = Outcome()
    names = [one.name for one in session.get_outputs()]
    story: list[str] = []
    for request in requests:
        story.append(", ".join(f"{name} {[*array.shape]}" for name, array in request.items()))
        try:
            want = dict(zip(names, session.run(names, request), strict=True))
        except Exception:  # the runtime's own classes
            outcome.refused += 1
            story.pop()
            continue
        try:
            got = model.ask(*(request[spec.name] for spec in model.spec.inputs))
        except McinferError as exc:
            outcome.raised.append(f"{type(exc).__name__}: {exc}")
            continue
        wrong = [text for name in names if (text := _fault(name, got[name], want[name]))]
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


def check_graphs(numbers: range, seed: int) -> tuple[Counter[str], list[str]]:
    """What came of the graphs of these numbers, counted, and the text of each with a wrong answer."""
    counts, findings = Counter[str](), []
    for number in numbers:
        model, inputs = make_graph(seed, number)
        try:
            session = open_session(model)
        except Exception:  # what the runtime does not load
            counts["not loaded"] += 1
            continue
        pool = model_of(session)
        outcome = compare(session, pool, make_requests(inputs, seed, number))
        known = pool.splitter.known
        counts["undecided" if not known.settled else "split" if known.splits else "whole"] += 1
        counts.update(
            answered=outcome.answered,
            refused=outcome.refused,
            raised=len(outcome.raised),
            in_pieces=pool.split_runs,
        )
        if outcome.wrong:
            wrong = "\n".join(outcome.wrong)
            text = printer.to_text(model)
            findings.append(f"graph {number} of seed {seed}\n{text}\n{known.split}\n{wrong}")
    return counts, findings
