"""Random small graphs, and whether a batch that is split gives what one session gives for the whole.

    python -m tests.split_graphs --graphs 5000 --seed 0

A graph keeps, moves, mixes or drops the axis of the rows. It is given several requests, of other rows and
other sizes. Each answer must be that of ONNX Runtime's session on the whole request, or a `McinferError` must
come in its place. `InProcess` has the master's parts that decide (`Splitter`, `plan`, `join_parts`), and a
session in this process in the place of the workers.

Limits: a comparison finds out, it does not prove. A wrong answer is possible where the request that is
learned from does not show what mixes its rows. So these graphs and requests have no

- operators that mix rows for rare values alone: behind thresholds, rounding or saturation, or sorting rows
  that are in order by chance;
- inputs with equal rows beside others with different rows;
- operators that drop whatever axes have size 1 (`Squeeze` without axes).
"""

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, printer

from mcinfer.engines._onnxruntime import _spec
from mcinfer.errors import McinferError, PredictError
from mcinfer.requests.splitting import Known, Splitter, cut_rows
from mcinfer.requests.tensors import difference, join_parts
from mcinfer.sharding import JoinError, SaidAxes, Split, plan
from mcinfer.specs import ModelSpec

Arrays = dict[str, NDArray[Any]]
Inputs = Sequence[NDArray[Any]]

PIECES = 2
"""As many as two workers have."""

_ROUNDING = 1e-6
"""Of float32 numbers near one."""

IDS = 1000
"""Integers that are looked up in a table are below."""

_LARGE = 10**6
"""Other integers of requests are below: the largest of some rows is hardly ever that of others."""

ROWS = "rows"
"""The size of an axis that has one entry for each row."""

LONG = "long"
"""An axis with several for each row, one row's behind the other's."""

OTHER, SHARED = "other", "shared"
"""Sizes that each request chooses: of an axis of inputs with rows, and of an input that all rows share."""

UNKNOWN = "unknown"

Dim = int | str
Kind = Literal["float", "int", "ids"]
State = Literal["rows", "same", "mixed"]


# Graphs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of a graph.

    Attributes:
        name: In the graph.
        kind: ``"ids"`` are integers below `IDS`.
        dims: Numbers, or what the size depends on.
        state: ``"rows"``: one axis has rows, and each depends on that row of the inputs alone; ``"same"``:
            no row has anything to do with it; ``"mixed"``: it depends on several rows, or on where a row is.
    """

    name: str
    kind: Kind
    dims: tuple[Dim, ...]
    state: State

    @property
    def axis(self) -> int | None:
        """That of the rows."""
        return self.dims.index(ROWS) if ROWS in self.dims else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A random graph.

    Attributes:
        model: It.
        inputs: What requests are made for.
        independent: Whether rows do not depend on each other, and the axis of the rows is one that is looked
            at: the first one of the inputs, or one with the name of a batch.
        broadcasts: Whether the size of a shared input may be 1 or that of the batch, and nothing else.
        tame: Whether requests have sizes that differ from each other, and rows that do.
    """

    model: onnx.ModelProto
    inputs: tuple[Value, ...]
    independent: bool
    broadcasts: bool
    tame: bool

    def text(self) -> str:
        """For a person."""
        return str(printer.to_text(self.model))


class Builder:
    """Adds operators to a graph.

    Attributes:
        rng: Where all choices come from.
        calm: Whether rows are kept and moved alone.
        values: All tensors so far that may be used.
        used: Names of those that something is made of.
        broadcasts: See `Graph`.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.calm = bool(rng.random() < 0.5)
        self.values: list[Value] = []
        self.used: set[str] = set()
        self.broadcasts = False
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def graph(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> onnx.ModelProto:
        """What was built, as a model."""
        made = helper.make_graph(self._nodes, "random", inputs, outputs, self._weights)
        return helper.make_model(
            made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name=""
        )

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """An operator; the name of its first output."""
        name = f"v{len(self._nodes)}"
        count = 2 if operator == "TopK" else 1
        names = [name, *(f"{name}_{i}" for i in range(1, count))]
        self._nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return name

    def weight(self, array: Any, dtype: Any = np.float32) -> str:
        """A constant; its name."""
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def numbers(self, *numbers: int) -> str:
        """Constant integers, such as axes."""
        return self.weight(numbers, np.int64)

    def noise(self, *shape: int) -> str:
        """A constant of random numbers, of such a size that products stay near one."""
        scale = shape[0] ** -0.5 if len(shape) > 1 else 1.0
        return self.weight(self.rng.standard_normal(shape) * scale)

    def size(self, value: Value, axis: int) -> str:
        """The size of an axis, when the graph runs: int64[1]."""
        return self.node("Gather", self.node("Shape", value.name), self.numbers(axis), axis=0)

    def add(
        self, name: str, like: Value, *, dims: Sequence[Dim] | None = None, **changes: Any
    ) -> Value:
        """A tensor that may be used from now on."""
        value = Value(
            name=name,
            kind=changes.get("kind", like.kind),
            dims=tuple(like.dims if dims is None else dims),
            state=changes.get("state", like.state),
        )
        self.values.append(value)
        return value

    def pick(self, fits: Callable[[Value], bool]) -> Value | None:
        """A tensor that fits, rather a late one."""
        found = [value for value in self.values if fits(value)]
        if not found:
            return None
        at = len(found) - 1 - min(int(self.rng.geometric(0.5)) - 1, len(found) - 1)
        self.used.add(found[at].name)
        return found[at]

    def choice(self, options: Sequence[Any]) -> Any:
        """One of them."""
        return options[int(self.rng.integers(len(options)))]


Operator = Callable[[Builder], Value | None]
"""Adds something to the graph, if there is a tensor that it can be added to."""


def _numeric(value: Value) -> bool:
    return value.kind == "float"


def _last(least: int) -> Callable[[Value], bool]:
    """Whether the last axis has a fixed size of so much at least."""

    def fits(value: Value) -> bool:
        last = value.dims[-1] if value.dims else 0
        return _numeric(value) and isinstance(last, int) and last >= least

    return fits


# What keeps the rows where they are.


def _unary(b: Builder) -> Value | None:
    value = b.pick(_numeric)
    if value is None:
        return None
    operator = b.choice(("Sin", "Tanh", "Neg", "Softplus"))
    return b.add(b.node(operator, value.name), value)


def _relu(b: Builder) -> Value | None:
    # Where nothing mixes: a row of negative numbers becomes zeros, and hides what is done with them.
    value = b.pick(_numeric)
    if value is None:
        return None
    return b.add(b.node("Relu" if b.calm else "LeakyRelu", value.name), value)


def _constant_operand(b: Builder) -> Value | None:
    value = b.pick(lambda v: v.kind != "ids")
    if value is None:
        return None
    operator = b.choice(("Add", "Mul"))
    if value.kind == "int":
        constant = b.weight(b.rng.integers(2, 9), np.int64)
    else:
        last = value.dims[-1] if value.dims else 1
        constant = b.noise(last) if isinstance(last, int) else b.noise()
    return b.add(b.node(operator, value.name, constant), value)


def _two_operands(b: Builder) -> Value | None:
    one = b.pick(_numeric)
    if one is None:
        return None
    other = b.pick(lambda v: _numeric(v) and v != one and _broadcast(one, v) is not None)
    if other is None:
        return None
    dims = _broadcast(one, other) or ()
    if any({x, y} == {ROWS, SHARED} for x, y in _aligned(one, other)):
        b.broadcasts = True
    return b.add(
        b.node(b.choice(("Add", "Mul", "Sub")), one.name, other.name),
        one,
        dims=dims,
        state=_common_state(one, other, dims),
    )


def _condition(b: Builder) -> Value | None:
    """Adds to the rows what all have in common, or each its own: one number or as many as rows."""
    value = b.pick(lambda v: _numeric(v) and v.dims[:1] == (ROWS,))
    common = b.pick(lambda v: v.kind == "float" and v.dims == (SHARED,))
    if value is None or common is None:
        return None
    b.broadcasts = True
    name = common.name
    if len(value.dims) > 1:
        name = b.node("Unsqueeze", name, b.numbers(*range(1, len(value.dims))))
    state = _common_state(value, common, value.dims)
    return b.add(b.node(b.choice(("Add", "Mul")), value.name, name), value, state=state)


def _aligned(one: Value, other: Value) -> Iterator[tuple[Dim, Dim]]:
    """The sizes of two tensors from the last one on, the shorter filled up with ones."""
    rank = max(len(one.dims), len(other.dims))
    ones: tuple[Dim, ...] = (1,) * rank
    first, second = ((*ones[len(v.dims) :], *v.dims) for v in (one, other))
    return zip(first, second, strict=True)


def _broadcast(one: Value, other: Value) -> tuple[Dim, ...] | None:
    """The sizes of both together; None where they do not go together."""
    dims: list[Dim] = []
    for x, y in _aligned(one, other):
        if x == 1 or y == 1 or x == y:
            dims.append(y if x == 1 else x)
        elif {x, y} == {ROWS, SHARED}:
            dims.append(ROWS)
        else:
            return None
    return tuple(dims)


def _common_state(one: Value, other: Value, dims: Sequence[Dim]) -> State:
    states = {one.state, other.state}
    places = sum(dim in (ROWS, LONG) for dim in dims)
    if "mixed" in states or UNKNOWN in dims or places > 1:
        return "mixed"
    return "rows" if "rows" in states else "same"


def _matmul(b: Builder) -> Value | None:
    value = b.pick(_last(1))
    if value is None:
        return None
    last, size = int(value.dims[-1]), int(b.rng.integers(2, 6))
    name = b.node("MatMul", value.name, b.noise(last, size))
    return b.add(name, value, dims=(*value.dims[:-1], size))


def _softmax(b: Builder) -> Value | None:
    value = b.pick(_last(2))
    return None if value is None else b.add(b.node("Softmax", value.name, axis=-1), value)


def _layer_norm(b: Builder) -> Value | None:
    value = b.pick(_last(3))  # of two only the sign would be left
    if value is None:
        return None
    last = int(value.dims[-1])
    name = b.node("LayerNormalization", value.name, b.noise(last), b.noise(last), axis=-1)
    return b.add(name, value)


def _gather(b: Builder) -> Value | None:
    value = b.pick(lambda v: any(isinstance(dim, int) and dim > 1 for dim in v.dims))
    if value is None:
        return None
    axis = b.choice([i for i, d in enumerate(value.dims) if isinstance(d, int) and d > 1])
    count = int(b.rng.integers(1, 5))
    indices = b.numbers(*b.rng.integers(0, value.dims[axis], count))
    name = b.node("Gather", value.name, indices, axis=axis)
    return b.add(name, value, dims=_with(value.dims, axis, count))


def _embed(b: Builder) -> Value | None:
    value = b.pick(lambda v: v.kind == "ids")
    if value is None:
        return None
    width = int(b.rng.integers(2, 5))
    table = b.weight(b.rng.standard_normal((IDS, width)))
    name = b.node("Gather", table, value.name, axis=0)
    return b.add(name, value, kind="float", dims=(*value.dims, width))


def _to_float(b: Builder) -> Value | None:
    value = b.pick(lambda v: v.kind != "float")
    if value is None:
        return None
    numbers = b.node("Cast", value.name, to=TensorProto.FLOAT)
    scale = 1 / (IDS if value.kind == "ids" else _LARGE)
    return b.add(b.node("Mul", numbers, b.weight(scale)), value, kind="float")


KEEP: tuple[Operator, ...] = (
    _unary,
    _unary,
    _relu,
    _constant_operand,
    _two_operands,
    _two_operands,
    _condition,
    _matmul,
    _softmax,
    _layer_norm,
    _gather,
    _embed,
    _to_float,
)


# What moves them.


def _with(dims: Sequence[Dim], axis: int, size: Dim) -> tuple[Dim, ...]:
    return (*dims[:axis], size, *dims[axis + 1 :])


def _transpose(b: Builder) -> Value | None:
    value = b.pick(lambda v: len(v.dims) > 1)
    if value is None:
        return None
    order = [int(i) for i in b.rng.permutation(len(value.dims))]
    name = b.node("Transpose", value.name, perm=order)
    return b.add(name, value, dims=[value.dims[i] for i in order])


def _unsqueeze(b: Builder) -> Value | None:
    value = b.pick(lambda v: len(v.dims) < 4)
    if value is None:
        return None
    axis = int(b.rng.integers(len(value.dims) + 1))
    name = b.node("Unsqueeze", value.name, b.numbers(axis))
    return b.add(name, value, dims=(*value.dims[:axis], 1, *value.dims[axis:]))


def _squeeze(b: Builder) -> Value | None:
    value = b.pick(lambda v: len(v.dims) > 1 and 1 in v.dims)
    if value is None:
        return None
    axis = value.dims.index(1)
    name = b.node("Squeeze", value.name, b.numbers(axis))
    return b.add(name, value, dims=(*value.dims[:axis], *value.dims[axis + 1 :]))


def _flatten(b: Builder) -> Value | None:
    """All but the first axis as one."""
    value = b.pick(lambda v: len(v.dims) > 1)
    if value is None:
        return None
    name = b.node("Reshape", value.name, b.numbers(0, -1))
    merged, state = _merged(value.dims[1:], value.state)
    return b.add(name, value, dims=(value.dims[0], merged), state=state)


def _stack(b: Builder) -> Value | None:
    """All axes as one, but for a part of the last."""
    value = b.pick(lambda v: len(v.dims) > 0 and isinstance(v.dims[-1], int))
    if value is None:
        return None
    last = int(value.dims[-1])
    width = b.choice([n for n in range(1, last + 1) if last % n == 0])
    name = b.node("Reshape", value.name, b.numbers(-1, width))
    merged, state = _merged((*value.dims[:-1], last // width), value.state)
    return b.add(name, value, dims=(merged, width), state=state)


def _merged(dims: Sequence[Dim], state: State) -> tuple[Dim, State]:
    """Axes as one: its size, and what becomes of the rows."""
    dims = [dim for dim in dims if dim != 1]
    if len(dims) == 1:
        return dims[0], state
    if all(isinstance(dim, int) for dim in dims):
        return int(np.prod([int(dim) for dim in dims])), state
    if not {ROWS, LONG} & {*dims}:
        return UNKNOWN, state if state == "same" else "mixed" if UNKNOWN in dims else state
    # The rows are one behind the other only where they were so in the outermost of these axes.
    leads = dims[0] in (ROWS, LONG) and not {ROWS, LONG} & {*dims[1:]}
    return (LONG, state) if leads else (UNKNOWN, "mixed")


def _concat(b: Builder) -> Value | None:
    one = b.pick(lambda v: v.kind == "float" and any(isinstance(dim, int) for dim in v.dims))
    if one is None:
        return None
    axis = b.choice([i for i, dim in enumerate(one.dims) if isinstance(dim, int)])

    def fits(value: Value) -> bool:
        dims = value.dims
        return (
            value.kind == "float"
            and len(dims) == len(one.dims)
            and isinstance(dims[axis], int)
            and _with(dims, axis, 0) == _with(one.dims, axis, 0)
        )

    other = b.pick(fits)
    if other is None:
        return None
    name = b.node("Concat", one.name, other.name, axis=axis)
    dims = _with(one.dims, axis, int(one.dims[axis]) + int(other.dims[axis]))
    return b.add(name, one, dims=dims, state=_common_state(one, other, dims))


MOVE: tuple[Operator, ...] = (_transpose, _unsqueeze, _squeeze, _flatten, _stack, _concat)


# What mixes them.


def _has_rows(value: Value) -> bool:
    return _numeric(value) and value.dims.count(ROWS) == 1


def _any_with_rows(value: Value) -> bool:
    return value.dims.count(ROWS) == 1


def _softmax_rows(b: Builder) -> Value | None:
    value = b.pick(_has_rows)
    if value is None:
        return None
    return b.add(b.node("Softmax", value.name, axis=value.axis), value, state="mixed")


def _center(b: Builder) -> Value | None:
    """The rows without what they have in common."""
    value = b.pick(_has_rows)
    if value is None:
        return None
    reduce = b.choice(("ReduceMean", "ReduceMax"))
    common = b.node(reduce, value.name, axes=[value.axis], keepdims=1)
    return b.add(b.node(b.choice(("Add", "Sub")), value.name, common), value, state="mixed")


def _cumulate(b: Builder) -> Value | None:
    value = b.pick(_any_with_rows)
    if value is None:
        return None
    name = b.node("CumSum", value.name, b.weight(value.axis, np.int64))
    kind = "float" if value.kind == "float" else "int"
    return b.add(name, value, kind=kind, state="mixed")


def _sort(b: Builder) -> Value | None:
    """Sorts the rows, those of the negative numbers too: two rows alone are often in order by chance."""
    value = b.pick(_any_with_rows)
    if value is None or value.axis is None:
        return None
    last = b.numbers(len(value.dims))
    both = [b.node("Unsqueeze", n, last) for n in (value.name, b.node("Neg", value.name))]
    some = b.rng.random() < 0.5
    count = b.numbers(2) if some else b.size(value, value.axis)
    name = b.node("TopK", b.node("Concat", *both, axis=-1), count, axis=value.axis)
    dims = _with((*value.dims, 2), value.axis, 2 if some else ROWS)
    return b.add(name, value, kind="float" if _numeric(value) else "int", dims=dims, state="mixed")


def _twice(b: Builder) -> Value | None:
    value = b.pick(_any_with_rows)
    if value is None or value.axis is None:
        return None
    name = b.node("Concat", value.name, value.name, axis=value.axis)
    return b.add(name, value, dims=_with(value.dims, value.axis, LONG), state="mixed")


def _reverse(b: Builder) -> Value | None:
    value = b.pick(_any_with_rows)
    if value is None or value.axis is None:
        return None
    limits = (-1, -(2**62), value.axis, -1)
    name = b.node("Slice", value.name, *(b.numbers(limit) for limit in limits))
    return b.add(name, value, state="mixed")


def _pair(b: Builder) -> Value | None:
    """Each row with each."""
    value = b.pick(lambda v: _last(1)(v) and len(v.dims) == 2 and v.dims[0] == ROWS)
    if value is None:
        return None
    turned = b.node("Transpose", value.name, perm=[1, 0])
    return b.add(b.node("MatMul", value.name, turned), value, dims=(ROWS, ROWS), state="mixed")


def _number_rows(b: Builder) -> Value | None:
    """Adds to each row its place in the batch."""
    value = b.pick(_has_rows)
    if value is None or value.axis is None:
        return None
    count = b.node("Squeeze", b.size(value, value.axis))
    zero, one = b.weight(0, np.int64), b.weight(1, np.int64)
    places = b.node("Cast", b.node("Range", zero, count, one), to=TensorProto.FLOAT)
    behind = len(value.dims) - value.axis - 1
    if behind:
        places = b.node("Unsqueeze", places, b.numbers(*range(1, behind + 1)))
    return b.add(b.node("Add", value.name, places), value, state="mixed")


def _times_rows(b: Builder) -> Value | None:
    value = b.pick(_has_rows)
    if value is None or value.axis is None:
        return None
    count = b.node("Cast", b.size(value, value.axis), to=TensorProto.FLOAT)
    return b.add(b.node("Mul", value.name, count), value, state="mixed")


MIX: tuple[Operator, ...] = (
    _softmax_rows,
    _center,
    _cumulate,
    _sort,
    _twice,
    _reverse,
    _pair,
    _number_rows,
    _times_rows,
)


# What drops them.


def _reduce(b: Builder) -> Value | None:
    value = b.pick(_has_rows)
    if value is None or value.axis is None:
        return None
    dims = (*value.dims[: value.axis], *value.dims[value.axis + 1 :])
    if b.rng.random() < 0.5:
        name = b.node("ReduceSum", value.name, b.numbers(value.axis), keepdims=0)
    else:
        name = b.node(
            b.choice(("ReduceMax", "ReduceMean")), value.name, axes=[value.axis], keepdims=0
        )
    return b.add(name, value, dims=dims, state="mixed")


def _first_row(b: Builder) -> Value | None:
    value = b.pick(_any_with_rows)
    if value is None or value.axis is None:
        return None
    start = b.choice((0, -1))
    limits = (start, 1 if start == 0 else 2**62, value.axis)
    name = b.node("Slice", value.name, *(b.numbers(limit) for limit in limits))
    return b.add(name, value, dims=_with(value.dims, value.axis, 1), state="mixed")


def _shape(b: Builder) -> Value | None:
    value = b.pick(_any_with_rows)
    if value is None:
        return None
    name = b.node("Shape", value.name)
    return b.add(name, value, kind="int", dims=(len(value.dims),), state="mixed")


DROP: tuple[Operator, ...] = (_reduce, _reduce, _first_row, _shape)


# What never had them.


def _constant(b: Builder) -> Value | None:
    size = int(b.rng.integers(1, 8))
    like = Value(name="", kind="float", dims=(size,), state="same")
    return b.add(b.node("Identity", b.noise(size)), like)


def _anchors(b: Builder) -> Value | None:
    """Numbers for an axis that is not that of the rows, as detectors make them of an image's size."""
    value = b.pick(lambda v: OTHER in v.dims)
    if value is None:
        return None
    count = b.node("Squeeze", b.size(value, value.dims.index(OTHER)))
    zero, one = b.weight(0, np.int64), b.weight(1, np.int64)
    name = b.node("Cast", b.node("Range", zero, count, one), to=TensorProto.FLOAT)
    return b.add(name, value, kind="float", dims=(OTHER,), state="same")


APART: tuple[Operator, ...] = (_constant, _anchors)


# Names, and the whole graph.

BATCH_NAMES = ("batch", "N", "batch_size", "s0", "num_nodes", "height", "p2o.DynamicDimension.0")
_KNOWN_NAMES = ("batch", "N", "batch_size")
_OTHER_NAMES = ("sequence", "width", "s1", "num_edges")

Style = Literal["named", "nameless", "own", "loose", "misleading"]
STYLES: tuple[Style, ...] = ("named", "nameless", "own", "loose", "misleading")
"""Of the dimensions: one name for the rows; none; one name each; none for fixed sizes either; a batch's name
for another axis."""


class _Names:
    """How dimensions are declared."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.style: Style = STYLES[int(rng.integers(len(STYLES)))]
        self.batch = BATCH_NAMES[int(rng.integers(len(BATCH_NAMES)))]
        other = _OTHER_NAMES[int(rng.integers(len(_OTHER_NAMES)))]
        self._names = {ROWS: self.batch, OTHER: other, SHARED: "shared_size"}
        if self.style == "misleading":
            self._names |= {ROWS: other, OTHER: self.batch, SHARED: self.batch}
        self._count = 0

    def declared(self, dim: Dim) -> Dim | None:
        if isinstance(dim, int):
            return None if self.style == "loose" else dim
        if self.style in ("nameless", "loose"):
            return None
        if self.style == "own" or dim not in self._names:
            self._count += 1
            return f"unk__{self._count}"
        return self._names[dim]

    def info(self, value: Value, *, shape: bool = True) -> onnx.ValueInfoProto:
        element = TensorProto.FLOAT if value.kind == "float" else TensorProto.INT64
        dims = [self.declared(dim) for dim in value.dims] if shape else None
        return helper.make_tensor_value_info(value.name, element, dims)


def make_graph(seed: int, number: int) -> Graph:
    """The graph of this number."""
    rng = np.random.default_rng((seed, number, 0))
    b = Builder(rng)
    names = _Names(rng)
    inputs = _make_inputs(b)
    for _ in range(int(rng.integers(2, 8))):
        operators = b.choice(
            (KEEP, KEEP, MOVE, APART) if b.calm else (KEEP, MOVE, MIX, MIX, DROP, APART)
        )
        b.choice(operators)(b)
    outputs = _choose_outputs(b)
    model = b.graph(
        [names.info(value) for value in inputs],
        [names.info(value, shape=rng.random() < 0.9) for value in outputs],
    )
    cut = [value for value in inputs if value.state == "rows"]
    states = {value.state for value in outputs}
    leads = inputs[0] in cut and all(value.axis == 0 for value in cut)
    if names.style == "named" and (b.broadcasts or not leads):
        found = names.batch in _KNOWN_NAMES
    else:
        found = leads and names.style != "misleading"
    return Graph(
        model=model,
        inputs=inputs,
        independent=found and "rows" in states and "mixed" not in states,
        broadcasts=b.broadcasts,
        tame=rng.random() < 0.5,
    )


def _make_inputs(b: Builder) -> tuple[Value, ...]:
    width, depth = (int(size) for size in b.rng.choice((2, 3, 4, 5, 6), 2, replace=False))
    leading = (
        (ROWS, width),
        (ROWS, width),
        (ROWS, width, depth),
        (ROWS, OTHER, width),
        (ROWS,),
        (ROWS, 1, width),
    )
    second = ((width, ROWS), (OTHER, ROWS, width), (depth, ROWS, width), (1, ROWS, width))
    common = ((width,), (SHARED,), (SHARED, width), (), (OTHER, width), (1, width))
    mostly = second if b.rng.random() < 0.3 else leading
    for i in range(int(b.rng.integers(1, 4))):
        rows = i == 0 or b.rng.random() < 0.5
        dims = b.choice(common)
        if rows:
            dims = b.choice(mostly if b.rng.random() < 0.8 else (*leading, *second))
        kind: Kind = b.choice(("float", "float", "float", "float", "int", "ids"))
        state: State = "rows" if rows else "same"
        b.values.append(Value(name=f"x{i}", kind=kind, dims=dims, state=state))
    b.rng.shuffle(b.values)
    return tuple(b.values)


def _choose_outputs(b: Builder) -> list[Value]:
    """Three at most, those first that nothing else is made of."""
    made = [value for value in b.values if value.name.startswith("v")]
    if not made:
        made = [b.add(b.node("Identity", value.name), value) for value in b.values[:1]]
    ends = [value for value in made if value.name not in b.used]
    return (ends or made)[-3:]


# Requests.


def make_requests(graph: Graph, seed: int, number: int) -> Iterator[Arrays]:
    """Six requests for a graph."""
    rng = np.random.default_rng((seed, number, 1))
    fixed = {dim for value in graph.inputs for dim in value.dims if isinstance(dim, int)}
    for _ in range(6):
        if graph.tame:
            free = [size for size in range(2, 12) if size not in fixed]
            rows, other, shared = (int(size) for size in rng.choice(free, 3, replace=False))
            if graph.broadcasts:
                shared = 1
        else:
            rows = int(rng.integers(2, 8)) if rng.random() < 0.9 else 1
            other, shared = ((1, rows, int(rng.integers(1, 8)))[rng.integers(3)] for _ in range(2))
            if graph.broadcasts and shared != rows:
                shared = 1
        sizes = {ROWS: rows, OTHER: other, SHARED: shared}
        alike = not graph.tame and rng.random() < 0.1
        yield {v.name: _random(v, sizes, rng, alike=alike) for v in graph.inputs}


def _random(
    value: Value, sizes: Mapping[str, int], rng: np.random.Generator, *, alike: bool
) -> NDArray[Any]:
    shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in value.dims)
    drawn = [*shape]
    if alike and value.axis is not None:
        drawn[value.axis] = 1
    if value.kind == "float":
        array: NDArray[Any] = rng.standard_normal(drawn).astype(np.float32)
    elif value.kind == "ids":
        array = rng.integers(0, IDS, drawn)
    else:
        array = rng.integers(-_LARGE, _LARGE, drawn)
    return np.array(np.broadcast_to(array, shape), order="C")


# Running.


def open_session(model: onnx.ModelProto) -> Any:
    """A session of one thread, which says nothing."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


class InProcess:
    """The parts of a master with two workers that decide, and one session in the place of its workers.

    Attributes:
        splitter: What is known.
        split_runs: How many requests were answered in pieces.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self.model = ModelSpec(
            inputs=tuple(_spec(one, "input") for one in session.get_inputs()),
            outputs=tuple(_spec(one, "output") for one in session.get_outputs()),
        )
        self.splitter = Splitter(self.model, SaidAxes())
        self.split_runs = 0

    def predict(self, inputs: Arrays) -> Arrays:
        """As `Master.predict`."""
        arrays = [inputs[spec.name] for spec in self.model.inputs]
        known = self.splitter.known
        shapes = tuple(array.shape for array in arrays)
        if self.splitter.known.open and self.splitter.teaches(shapes):
            return self.splitter.answer(
                arrays,
                PIECES,
                self._run_apart,
                lambda known: self._run_split(arrays, known, PIECES),
            )
        return self._run_split(arrays, known, PIECES if known.settled else 1)

    def _run_apart(self, requests: Sequence[Inputs]) -> list[Arrays | McinferError]:
        outcomes: list[Arrays | McinferError] = []
        for arrays in requests:
            try:
                outcomes.append(self._run_split(arrays, None, 1))
            except McinferError as exc:
                outcomes.append(exc)
        return outcomes

    def _run_split(self, arrays: Inputs, known: Known | None, pieces: int) -> Arrays:
        shapes = [array.shape for array in arrays]
        cut = plan(self.model, shapes, pieces, None if known is None else known.split)
        if len(cut.rows) == 1:
            return self._run(arrays)
        answers = [self._run(part) for part in cut_rows(arrays, cut.input_axes, cut.rows)]
        workers = [f"worker {i}" for i in range(len(answers))]
        self.split_runs += 1
        try:
            return {
                spec.name: join_parts(
                    spec, join, [answer[spec.name] for answer in answers], workers
                )
                for spec, join in zip(self.model.outputs, cut.outputs, strict=True)
            }
        except JoinError as exc:
            self.splitter.withdraw(str(exc))
            raise

    def _run(self, arrays: Inputs) -> Arrays:
        names = [spec.name for spec in self.model.outputs]
        feeds = dict(zip((spec.name for spec in self.model.inputs), arrays, strict=True))
        try:
            return dict(zip(names, self._session.run(names, feeds), strict=True))
        except Exception as exc:  # the runtime's own classes
            raise PredictError(str(exc)) from exc


# Checking.

Predict = Callable[[Arrays], Arrays]
End = Literal["split", "whole", "undecided"]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a graph.

    Attributes:
        answered: Requests with the right answer.
        refused: Requests that the session itself refuses.
        raised: What was raised in the place of answers.
        wrong: What is wrong in an answer, and for which requests.
    """

    answered: int = 0
    refused: int = 0
    raised: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def compare(session: Any, predict: Predict, requests: Iterator[Arrays]) -> Outcome:
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
            got = predict(request)
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


def how_it_ends(split: Split, *, settled: bool) -> End:
    """What is known of a graph after its requests."""
    if not settled:
        return "undecided"
    return "split" if split.splits else "whole"


@dataclass(slots=True, kw_only=True)
class Summary:
    """What came of many graphs.

    Attributes:
        graphs: How many did load.
        ends: How often which end came.
        requests: How many were answered, refused by the session, raised or answered wrong.
        split_runs: Requests that were answered in pieces.
        independent: Graphs whose rows do not depend on each other, with requests that show it.
        unsplit: Numbers of those that are not split in the end.
        findings: Texts on the graphs with wrong answers.
        raised: What was raised, without its numbers, and how often.
    """

    graphs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    split_runs: int = 0
    independent: int = 0
    unsplit: list[int] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    raised: dict[int, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        ends = ", ".join(f"{n} {end}" for end, n in sorted(self.ends.items()))
        requests = ", ".join(f"{n} {kind}" for kind, n in sorted(self.requests.items()))
        return (
            f"{self.graphs} graphs: {ends}; {self.independent} certainly independent, of which "
            f"{len(self.unsplit)} are not split\nrequests: {requests}; {self.split_runs} in pieces"
        )


def check_graphs(numbers: Iterator[int] | range, seed: int) -> Summary:
    """Check the graphs of these numbers."""
    summary = Summary()
    for number in numbers:
        graph = make_graph(seed, number)
        try:
            session = open_session(graph.model)
        except Exception:  # what the runtime does not load
            summary.ends["not loaded"] += 1
            continue
        pool = InProcess(session)
        outcome = compare(session, pool.predict, make_requests(graph, seed, number))
        known = pool.splitter.known
        end = how_it_ends(known.split, settled=known.settled)
        summary.graphs += 1
        summary.ends[end] += 1
        summary.requests.update(
            answered=outcome.answered,
            refused=outcome.refused,
            raised=len(outcome.raised),
            wrong=len(outcome.wrong),
        )
        summary.split_runs += pool.split_runs
        if graph.independent and graph.tame:
            summary.independent += 1
            if end != "split":
                summary.unsplit.append(number)
        if outcome.raised:
            summary.raised[number] = outcome.raised
        if outcome.wrong:
            summary.findings.append(
                f"graph {number} of seed {seed}\n{graph.text()}\n{known.split}\n"
                + "\n".join(outcome.wrong)
            )
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Check graphs and print what came of it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.split_graphs", description=__doc__)
    parser.add_argument("--graphs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this graph alone, in full")
    options = parser.parse_args(arguments)
    logging.getLogger("mcinfer").setLevel(logging.ERROR)  # that a graph runs whole is no news here
    ort.set_default_logger_severity(4)
    numbers = range(options.graphs)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
        print(make_graph(options.seed, options.only).text())
        logging.basicConfig(level=logging.INFO)
        logging.getLogger("mcinfer").setLevel(logging.INFO)
    summary = check_graphs(numbers, options.seed)
    for finding in summary.findings:
        print(f"{finding}\n")
    if summary.unsplit:
        print(f"independent, and not split: {summary.unsplit}")
    for number, raised in summary.raised.items():
        print(f"graph {number} raised: {raised[0]}")
    print(summary)
    return 1 if summary.findings or summary.unsplit else 0


if __name__ == "__main__":
    sys.exit(main())
