"""How a batch is cut over workers, and how the answers are joined. Shapes only, no data.

A `Split` gives for each input the axis to cut, and for each output the axis to join. It comes from the user
(`batch_axes`, `output_axes`), from the model's own symbols, or from a request that has shown it
(`mcinfer.requests.splitting`). The code here never guesses a split from the number of rows in an answer.

- The model's *batch symbol* is the symbolic dimension along which rows are likely to be independent. It is
  chosen by name (``batch``, ``batch_size``, ``N``, …), else the leading dimension of most inputs that leads
  an output too, unless its name means a sequence.
- If every input with rows and every output of a model has a fixed first dimension of 1, k rows are k runs.
  Another fixed dimension is the batch only if the user says so.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Literal, TypeVar

from mcinfer.errors import InvalidInputError, PredictError, is_refusal
from mcinfer.specs import STRING, ModelSpec, TensorSpec, symbol_sizes

__tracebackhide__ = is_refusal

Shape = tuple[int, ...]
Axes = Mapping[str, int | None]
"""By name, the axis to cut or join. None: the input goes whole; the output is the same from every worker."""

Origin = Literal["said", "declared", "recorded", "learned", "unknown"]

_BATCH_NAMES = (re.compile(r"\w*batch\w*", re.IGNORECASE), re.compile(r"n|b|bs", re.IGNORECASE))
_SEQUENCE_NAME = re.compile(r"seq|len|time|step|token|frame", re.IGNORECASE)

_MAX_CANDIDATES = 3

MAX_RANK = 64
"""Dimensions that an array may have (NumPy)."""

_T = TypeVar("_T")


class JoinError(PredictError):
    """The answers to the pieces of a batch do not fit together, now or at any later try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a model's batch is split over workers, and how its outputs are joined.

    ``Master(path, batch_axes=split.inputs, output_axes=split.outputs)`` applies it to another master.

    Attributes:
        inputs: By input name, the axis to cut; None: the input goes to every worker whole.
        outputs: By output name, the axis to join; None: the output is the same from every worker; a text:
            why it cannot be joined.
        known: The source: ``"said"`` by the user, ``"declared"`` by the model's symbols, ``"learned"`` from
            a request, ``"recorded"`` in the cache when it was learned before, ``"unknown"``.
        checked: Whether rows ran whole and in pieces, with the same result: a request's, or rows that were
            made out of its own where these could not show it.
        rows: Their number; 0 if there were none.
        difference: The largest difference between both results, relative to the largest element of an
            output.
        reason: Why requests run whole; empty if they are split.
        sizes: By output name, its size along its axis for each row of that request, if all pieces had the
            same. It only estimates how much memory an output needs.
        settled: Whether the split is final; else the next request shows it.
        ranks: By output name, its number of dimensions in that request.
    """

    inputs: Axes
    outputs: Mapping[str, int | str | None]
    known: Origin
    checked: bool = False
    rows: int = 0
    difference: float = 0.0
    reason: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False)
    settled: bool = field(default=False, compare=False)
    ranks: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def splits(self) -> bool:
        """Whether requests may be split: some input is cut, and every output can be joined."""
        cut = any(axis is not None for axis in self.inputs.values())
        return cut and not self.reason and not self.unjoined

    @property
    def unjoined(self) -> tuple[str, ...]:
        """The outputs that cannot be joined."""
        return tuple(name for name, axis in self.outputs.items() if isinstance(axis, str))

    def __str__(self) -> str:
        lines = [
            *(("input", name, _axis_text(a, "whole")) for name, a in self.inputs.items()),
            *(("output", name, _axis_text(a, "the same")) for name, a in self.outputs.items()),
        ]
        width = max((len(name) for _, name, _ in lines), default=0)
        table = [f"{side:<6}  {name:<{width}}  {text}" for side, name, text in lines]
        return "\n".join([*table, self.summary()])

    def summary(self) -> str:
        """How the split is known, and whether requests are split, in one sentence."""
        shows = "the next request shows it"
        how = {
            "said": "as batch_axes and output_axes say",
            "declared": "as the model's symbols say",
            "learned": f"learned from {self.rows} rows",
            "recorded": f"learned from {self.rows} rows, and recorded",
            "unknown": "not known yet",
        }[self.known]
        if self.known == "unknown" and not self.settled:
            return f"{how}: {shows}"
        if self.reason:
            return f"runs whole, on one worker: {self.reason}"
        if self.unjoined:
            return f"{how}; how output {self.unjoined[0]!r} joins is not known: {shows}"
        if not self.checked:
            return how if self.settled else f"{how}; not checked yet: {shows}"
        if self.known in ("said", "declared"):
            how = f"{how}, checked with {self.rows} rows"
        return f"{how} (largest difference {self.difference:.2g})"


_WHOLE = Split(inputs={}, outputs={}, known="unknown")


def _axis_text(axis: int | str | None, none: str) -> str:
    if isinstance(axis, str):
        return f"cannot be joined: {axis}"
    return none if axis is None else f"axis {axis}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCut:
    """How one input goes to the shards: the axis to cut (None: whole), and its shape in each shard."""

    axis: int | None
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputJoin:
    """How one output is joined along an axis (None: all parts must be equal).

    Attributes:
        shapes: Its shape in each shard, or None if it is not known before the run.
        shape: The joined shape, or None if it is not known.
        lengths: The expected size of each shard's part along the axis; None for any size.
        rank: The expected number of dimensions of the parts; None for any number.
    """

    axis: int | None
    shapes: tuple[Shape, ...] | None
    shape: Shape | None
    lengths: tuple[int, ...] | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One request, cut. Inputs and outputs are in the model's order.

    Attributes:
        rows: Batch rows of each shard (for a fixed batch: pieces); empty for a batch of no rows.
        rowwise: Whether rows may also be joined with those of other requests: the batch may have any size,
            and every output has the batch and a shape that is known before the run.
    """

    rows: tuple[int, ...]
    inputs: tuple[InputCut, ...]
    outputs: tuple[OutputJoin, ...]
    rowwise: bool = False

    @property
    def input_axes(self) -> tuple[int | None, ...]:
        return tuple(cut.axis for cut in self.inputs)


# What is known before the first request.


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidAxes:
    """Axes from the user: by name, an axis or None; mcinfer decides about other names."""

    inputs: Axes = field(default_factory=dict)
    outputs: Axes = field(default_factory=dict)

    @classmethod
    def of(cls, batch_axes: Axes | None, output_axes: Axes | None) -> "SaidAxes":
        """The axes that two arguments say; raises `InvalidInputError` for what is no mapping."""
        for name, axes in (("batch_axes", batch_axes), ("output_axes", output_axes)):
            if axes is not None and not isinstance(axes, Mapping):
                kind = "inputs" if name == "batch_axes" else "outputs"
                raise InvalidInputError(
                    f"{name}: got {axes!r}, expected a mapping of {kind} to axes"
                )
        return cls(inputs=dict(batch_axes or {}), outputs=dict(output_axes or {}))

    def check(self, model: ModelSpec) -> None:
        """Raise `InvalidInputError` unless the model has such inputs, outputs and axes."""
        sides = (
            ("batch_axes", "input", self.inputs, model.inputs),
            ("output_axes", "output", self.outputs, model.outputs),
        )
        for argument, role, axes, tensors in sides:
            specs = {spec.name: spec for spec in tensors}
            for name, axis in axes.items():
                if name not in specs:
                    raise InvalidInputError(
                        f"{argument}: got unknown {role} {name!r}, expected one of {[*specs]}"
                    )
                # Without a dimension it is a scalar, or of any rank.
                rank = len(specs[name].shape) or MAX_RANK
                if axis is not None and not (type(axis) is int and 0 <= axis < rank):
                    raise InvalidInputError(
                        f"{argument}[{name!r}]: got {axis!r}, expected None or an axis from 0 to "
                        f"{rank - 1}"
                    )


def batch_symbol(model: ModelSpec) -> str | None:
    symbol = _likely_symbol(model)
    # Rows that meet in one tensor (such as similarities, batch by batch) are not independent.
    paired = any(spec.shape.count(symbol) > 1 for spec in (*model.inputs, *model.outputs))
    return None if paired else symbol


def _likely_symbol(model: ModelSpec) -> str | None:
    everywhere = [size for spec in model.inputs for size in spec.shape if isinstance(size, str)]
    named = [size for pattern in _BATCH_NAMES for size in everywhere if pattern.fullmatch(size)]
    if named:
        return named[0]
    answered = [spec.shape[0] for spec in model.outputs if spec.shape]
    leads = [spec.shape[0] for spec in model.inputs if spec.shape and spec.shape[0] in answered]
    likely = [lead for lead in leads if isinstance(lead, str) and not _SEQUENCE_NAME.search(lead)]
    return max(likely, key=likely.count, default=None)


def takes_one_row(model: ModelSpec) -> bool:
    """Whether each run takes one row, so that k rows are k runs.

    Then the first dimension is a number in every input, 1 in some, and 1 in every output.
    """
    firsts = [spec.shape[0] for spec in model.inputs if spec.shape]
    answers = [spec.shape[0] if spec.shape else None for spec in model.outputs]
    numbers = all(isinstance(size, int) for size in firsts)
    return numbers and 1 in firsts and bool(answers) and all(size == 1 for size in answers)


def first_split(model: ModelSpec, said: SaidAxes) -> Split:
    """The split by the user's axes and the model's symbols; raises as `SaidAxes.check` does."""
    said.check(model)
    symbol = batch_symbol(model)
    inputs = {spec.name: said.inputs.get(spec.name) for spec in model.inputs}
    free = [spec for spec in model.inputs if spec.name not in said.inputs]
    if symbol is not None:
        inputs |= {s.name: s.shape.index(symbol) for s in free if symbol in s.shape}
    cut = _cut_dimensions(model, inputs)
    # If rows lie along another axis, a first dimension of 1 is not the batch.
    ones = takes_one_row(model) and cut <= {(1, 0)}
    if ones:
        inputs |= {spec.name: 0 for spec in free if spec.shape[:1] == (1,)}
        cut = _cut_dimensions(model, inputs)
        ones = bool(cut)
    symbols = {size for size, _ in cut if isinstance(size, str)}
    outputs: dict[str, int | str | None] = {}
    for spec in model.outputs:
        places = [i for i, size in enumerate(spec.shape) if size in symbols]
        if spec.name in said.outputs:
            outputs[spec.name] = said.outputs[spec.name]
        elif len(places) == 1:
            outputs[spec.name] = places[0]
        else:
            outputs[spec.name] = 0 if ones else "its axis is not known"
    known: Origin = "said" if said.inputs or said.outputs else "declared"
    reason = ""
    if not cut and said.inputs and not free:
        reason = "batch_axes says that every input goes whole"
    elif not cut:
        known, reason = "unknown", "no dimension of the inputs is known to be the batch"
    return Split(inputs=inputs, outputs=outputs, known=known, reason=reason)


def _cut_dimensions(model: ModelSpec, inputs: Axes) -> set[tuple[int | str | None, int]]:
    """The size and the number of each axis that is cut."""
    return {
        (spec.shape[axis] if spec.shape else None, axis)
        for spec in model.inputs
        if (axis := inputs[spec.name]) is not None
    }


def is_fixed(model: ModelSpec, split: Split) -> bool:
    """Whether the batch is cut into runs of a fixed number of rows."""
    return any(isinstance(size, int) for size, _ in _cut_dimensions(model, split.inputs))


# Cuts that a request may show.


def rows_of(shapes: Mapping[str, Shape], axes: Axes) -> int | None:
    """The rows of a request along these axes; None if its inputs disagree, or none is cut."""
    sizes = {
        shapes[name][axis] if axis < len(shapes[name]) else -1
        for name, axis in axes.items()
        if axis is not None
    }
    return sizes.pop() if len(sizes) == 1 and -1 not in sizes else None


def _by_size(
    model: ModelSpec, shapes: Mapping[str, Shape], said: SaidAxes
) -> Iterator[dict[str, int | None]]:
    """Cuts along free axes of one size. Those of one symbol go together, with axes that have none."""
    specs = {spec.name: spec for spec in model.inputs if spec.name not in said.inputs}
    places = [
        (axis, name, shapes[name][axis], _symbol(spec, axis))
        for name, spec in specs.items()
        for axis in range(len(shapes[name]))
        if is_free(spec, axis)
    ]
    places.sort(key=lambda place: place[0])
    rows = rows_of(shapes, said.inputs)
    if rows is not None:
        places = [place for place in places if place[2] == rows]
        symbols = {
            _symbol(s, a) for s in model.inputs if (a := said.inputs.get(s.name)) is not None
        }
        places = [place for place in places if place[3] in {None, *symbols}]
    leads: dict[tuple[int, str | None], tuple[int, str]] = {}
    for axis, name, size, symbol in places:
        leads.setdefault((size, symbol), (axis, name))
    alike = Counter((axis, size, symbol) for axis, _, size, symbol in places)
    # On one axis, first the sizes that most inputs have; size 1 may mean anything.
    order = sorted(leads, key=lambda at: (leads[at][0], at[0] < 2, -alike[(leads[at][0], *at)]))
    for size, symbol in order:
        axes = {spec.name: said.inputs.get(spec.name) for spec in model.inputs}
        # The leading one of each input, which comes last here.
        axes |= {n: a for a, n, s, its in reversed(places) if s == size and its in (symbol, None)}
        yield axes
        # An input may have the batch's size by chance: then only the leading one is cut.
        lead = leads[size, symbol][1]
        yield {n: axis if n == lead or n in said.inputs else None for n, axis in axes.items()}


def _symbol(spec: TensorSpec, axis: int) -> str | None:
    size = spec.shape[axis] if axis < len(spec.shape) else None
    return size if isinstance(size, str) else None


_TIMES = re.compile(r"(\d+)\s*\*\s*(\w+)|(\w+)\s*\*\s*(\d+)")


def _times(symbol: str | None) -> tuple[int, str | None]:
    """A number and a symbol that a dimension such as ``2*batch`` multiplies; 1 and itself of any other."""
    found = _TIMES.fullmatch(symbol or "")
    return (int(found[1] or found[4]), found[2] or found[3]) if found else (1, symbol)


def is_guess(model: ModelSpec, axes: Axes, said: SaidAxes) -> bool:
    """Whether inputs are cut together of which neither one symbol nor the user says that they belong so."""
    cut = [(s, axis) for s in model.inputs if (axis := axes[s.name]) is not None]
    free = [(spec, axis) for spec, axis in cut if spec.name not in said.inputs]
    symbols = [_symbol(spec, axis) for spec, axis in free]
    groups = len({symbol for symbol in symbols if symbol}) + symbols.count(None)
    return groups + (len(free) < len(cut)) > 1


def candidates(
    model: ModelSpec, shapes: Mapping[str, Shape], first: Split, said: SaidAxes, least_rows: int = 2
) -> Iterator[Axes]:
    """The cuts to try for a request of these shapes, the likeliest first, three at most.

    First the cut that the user or the symbols say. Then axes that are free in the model and have the same
    size in the inputs, leading axes first; axes of different symbols are never cut together. Cuts whose
    inputs disagree in their rows are left out, and the first with too few rows ends the list.
    """
    found: list[Axes] = []
    if any(axis is not None for axis in first.inputs.values()):
        found.append(first.inputs)
    found.extend(_by_size(model, shapes, said))
    different = [axes for i, axes in enumerate(found) if axes not in found[:i]]
    for axes in different[:_MAX_CANDIDATES]:
        rows = rows_of(shapes, axes)
        if rows is not None and rows < least_rows:
            return
        if rows is not None:
            yield axes


def has_single_rows(model: ModelSpec, shapes: Mapping[str, Shape]) -> bool:
    """Whether an input has size 0 or 1 along a leading axis that is free in the model."""
    leads = [spec for spec in model.inputs if shapes[spec.name] and is_free(spec, 0)]
    return any(shapes[spec.name][0] <= 1 for spec in leads)


def has_free_axes(model: ModelSpec) -> bool:
    """Whether requests of this model may have different shapes."""
    return any(not s.shape or not all(isinstance(n, int) for n in s.shape) for s in model.inputs)


def is_free(spec: TensorSpec, axis: int) -> bool:
    return not spec.shape or not isinstance(spec.shape[axis], int)


# Cutting a request.


def split_evenly(count: int, pieces: int) -> tuple[int, ...]:
    """`count` rows in at most `pieces` parts: none empty, sizes at most one apart, larger first."""
    pieces = min(pieces, count)
    if pieces <= 0:
        return ()
    least, more = divmod(count, pieces)
    return tuple(least + 1 if i < more else least for i in range(pieces))


def split_unevenly(count: int) -> tuple[int, ...]:
    """`count` rows in two parts or three of different sizes, as far as can be: the last is a single row."""
    if count < 4:
        return (count - 1, 1) if count > 1 else (count,)
    third = count // 3
    return (count - 1 - third, third, 1)


def cut_batch(
    model: ModelSpec, shapes: Sequence[Shape], pieces: int, split: Split | None = None
) -> Cut:
    """Check the shapes of a request, and cut it into at most `pieces` (a fixed batch: as many as it needs).

    Raises:
        InvalidInputError: A shape does not fit the model. Or the inputs to cut, as the user says, disagree in
            their rows, or need an output axis that is not known.
    """
    axes, rows, fixed = _shards(model, shapes, pieces, split)
    # Check the shapes of a batch of no rows too, as one shard of 0 rows.
    parts = rows or (0,)
    cuts = [
        _cut(spec, shape, axis, parts)
        for spec, shape, axis in zip(model.inputs, shapes, axes, strict=True)
    ]
    outputs = _joins(model, cuts, parts, split)
    if not rows:
        joined = tuple(
            OutputJoin(axis=join.axis, shapes=(), shape=resized(join.shape, join.axis, 0))
            for join in outputs
            if join.axis is not None and join.shape is not None
        )
        if len(joined) == len(outputs):  # no worker is needed
            empty = tuple(InputCut(axis=cut.axis, shapes=()) for cut in cuts)
            return Cut(rows=(), inputs=empty, outputs=joined)
        if fixed:
            raise InvalidInputError("inputs: got a batch of 0 rows, expected some")
        return cut_batch(model, shapes, 1)  # the runtime may know the outputs
    declared = all(join.axis is not None and join.shapes is not None for join in outputs)
    cut = any(axis is not None for axis in axes)
    rowwise = cut and declared and not fixed and bool(outputs)
    return Cut(rows=rows, inputs=tuple(cuts), outputs=outputs, rowwise=rowwise)


def why_apart(model: ModelSpec, cut: Cut, *, checked: bool) -> str:
    """Why requests that are cut so cannot share a run with others; empty if they can.

    Only the model's declaration says which rows of an output are whose: counts that fit prove nothing. A
    multiple of the batch says how many, so the split must be `checked`.
    """
    for spec in (*model.inputs, *model.outputs):
        if spec.element_type == STRING:  # they do not lie in memory
            return f"{spec.name!r} holds strings"
    sides = zip(model.inputs, cut.inputs, strict=True)
    symbols = {_symbol(s, part.axis) for s, part in sides if part.axis is not None}
    for spec, join in zip(model.outputs, cut.outputs, strict=True):
        if join.axis is None:
            return f"output {spec.name!r} is the same whatever rows there are"
        if join.shapes is None:
            return f"the shape of output {spec.name!r} is not known before the run"
    if not cut.rowwise:
        return "each run takes a fixed number of rows"
    for spec, join in zip(model.outputs, cut.outputs, strict=True):
        times, symbol = _times(_symbol(spec, join.axis or 0))
        if {symbol} != symbols - {None} or (times > 1 and not checked):
            return f"output {spec} does not declare the batch of the inputs along axis {join.axis}"
    return ""


def _shards(
    model: ModelSpec, shapes: Sequence[Shape], pieces: int, split: Split | None
) -> tuple[list[int | None], tuple[int, ...], bool]:
    """The axis to cut of each input, the rows of each shard, and whether the batch is fixed."""
    whole: list[int | None] = [None] * len(shapes)
    axes = whole if split is None else [split.inputs[spec.name] for spec in model.inputs]
    _check_sizes(model, shapes, axes)
    given: dict[str, tuple[int, int | str | None]] = {}
    for spec, shape, axis in zip(model.inputs, shapes, axes, strict=True):
        if split is not None and axis is not None:
            if axis >= len(shape) and split.known != "said":
                return whole, (1,), False
            if axis >= len(shape):
                raise InvalidInputError(
                    f"input {spec.name!r} has {len(shape)} dimensions {list(shape)}, expected an axis "
                    f"{axis} to cut it along"
                )
            given[spec.name] = shape[axis], spec.shape[axis] if spec.shape else None
    if split is None or not given:
        return whole, (1,), False
    fixed = _fixed_pieces(given)
    if fixed == 1:
        return whole, (1,), True
    if fixed is not None:
        if not split.splits:
            raise InvalidInputError(_no_axis(split))
        # An input with its declared size has no rows to cut: every piece takes it whole.
        cut = [
            None if axis is None or given[spec.name][0] == spec.shape[axis] else axis
            for spec, axis in zip(model.inputs, axes, strict=True)
        ]
        return cut, (1,) * fixed, True
    first, (rows, _) = next(iter(given.items()))
    other = next((name for name, (size, _) in given.items() if size != rows), None)
    if other is not None and split.known != "said":
        return whole, (1,), False
    if other is not None:
        raise InvalidInputError(
            f"inputs {first!r} and {other!r} are cut together, but {first!r} has {rows} rows and "
            f"{other!r} has {given[other][0]}"
        )
    if split.splits:
        return axes, split_evenly(rows, pieces), False
    if split.known == "said" and not split.reason and min(rows, pieces) > 1:
        raise InvalidInputError(_no_axis(split))
    return whole, (max(1, rows),), False


def _no_axis(split: Split) -> str:
    name = split.unjoined[0]
    return (
        f"output {name!r} has no axis that is known to join the parts of a batch along; say it with "
        f"output_axes={{{name!r}: 0}}, or None if every part gives the same"
    )


def _check_sizes(model: ModelSpec, shapes: Sequence[Shape], axes: Sequence[int | None]) -> None:
    """Refuse sizes that no run takes; a shape without dimensions is a scalar, or open in the model."""
    for spec, shape, cut in zip(model.inputs, shapes, axes, strict=True):
        if spec.shape and len(shape) != len(spec.shape):
            raise InvalidInputError(
                f"input {spec.name!r} has {len(shape)} dimensions {list(shape)}, expected "
                f"{len(spec.shape)}: {spec}"
            )
        for axis, (expected, given) in enumerate(zip(spec.shape, shape, strict=False)):
            if isinstance(expected, int) and expected != given and axis != cut:
                raise InvalidInputError(
                    f"input {spec.name!r} has size {given} in dimension {axis}, expected "
                    f"{expected}: {spec}"
                )


def _fixed_pieces(sizes: Mapping[str, tuple[int, int | str | None]]) -> int | None:
    """Number of pieces of a fixed batch in the request; None if the batch may have any size."""
    if not any(isinstance(fixed, int) for _, fixed in sizes.values()):
        return None
    counts: dict[str, int] = {}
    for name, (given, fixed) in sizes.items():
        fixed = fixed if isinstance(fixed, int) else 1
        if fixed == 0 or given % fixed:
            raise InvalidInputError(
                f"input {name!r} is given {given} rows, expected a multiple of the model's fixed "
                f"batch of {fixed}"
            )
        counts[name] = given // fixed
    cut = [(name, count) for name, count in counts.items() if count != 1] or [("", 1)]
    first, pieces = cut[0]
    for name, count in cut:
        if count != pieces:
            raise InvalidInputError(
                f"inputs {first!r} and {name!r} are cut together, but {first!r} makes "
                f"{pieces} pieces and {name!r} with {sizes[name][0]} rows (fixed: {sizes[name][1]}) "
                f"does not"
            )
    return pieces


def _cut(spec: TensorSpec, shape: Shape, axis: int | None, rows: tuple[int, ...]) -> InputCut:
    if axis is None:
        return InputCut(axis=None, shapes=(shape,) * len(rows))
    size = spec.shape[axis] if spec.shape else None
    parts = [size if isinstance(size, int) else count for count in rows]
    return InputCut(axis=axis, shapes=tuple(resized(shape, axis, part) for part in parts))


def _joins(
    model: ModelSpec, cuts: Sequence[InputCut], rows: Sequence[int], split: Split | None
) -> tuple[OutputJoin, ...]:
    """How each output joins, and its shapes if the symbols or an earlier request give them."""
    shards = [*zip(*(cut.shapes for cut in cuts), strict=True)] or [()]
    bindings = [symbol_sizes(model.inputs, shapes) for shapes in shards]
    if split is None or all(cut.axis is None for cut in cuts):
        split = _WHOLE
    fixed = split is not _WHOLE and is_fixed(model, split)
    return tuple(_join(spec, split, bindings, rows, fixed=fixed) for spec in model.outputs)


def _join(
    spec: TensorSpec,
    split: Split,
    bindings: Sequence[Mapping[str, int]],
    rows: Sequence[int],
    *,
    fixed: bool,
) -> OutputJoin:
    given, size = split.outputs.get(spec.name), split.sizes.get(spec.name)
    axis = given if isinstance(given, int) else None
    known = [tuple(_bound(size, bound) for size in spec.shape) for bound in bindings]
    lengths = None
    if axis is not None and axis < len(spec.shape):
        along: list[int | None] = [shape[axis] for shape in known]
        if isinstance(spec.shape[axis], int) and not fixed:
            along = [None] * len(known)  # the batch has any size, so the declaration is wrong
        if size is not None:
            along = [size * count for count in rows]
        lengths = _all_known(along)
        known = [resized(shape, axis, length) for shape, length in zip(known, along, strict=True)]
    shapes = _all_known([_all_known(shape) for shape in known])
    if axis is not None and axis >= len(spec.shape):
        shapes = None  # the declaration is wrong
    shape = None if shapes is None else _joined(shapes, axis)
    rank = split.ranks.get(spec.name)
    return OutputJoin(axis=axis, shapes=shapes, shape=shape, lengths=lengths, rank=rank)


def _bound(size: int | str | None, sizes: Mapping[str, int]) -> int | None:
    """A declared size as a number, where that of its symbol is known."""
    if not isinstance(size, str) or size in sizes:
        return size if not isinstance(size, str) else sizes[size]
    times, symbol = _times(size)
    return None if symbol is None or symbol not in sizes else times * sizes[symbol]


def _all_known(values: Iterable[_T | None]) -> tuple[_T, ...] | None:
    """The values, or None if one of them is None."""
    found = [*values]
    known = tuple(value for value in found if value is not None)
    return known if len(known) == len(found) else None


def _joined(shapes: Sequence[Shape], axis: int | None) -> Shape:
    """The shape that parts of these shapes have together."""
    if axis is None:
        return shapes[0]
    return resized(shapes[0], axis, sum(shape[axis] for shape in shapes))


def resized(shape: tuple[_T, ...], axis: int, size: _T) -> tuple[_T, ...]:
    """A shape with another size along one axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def check_join(
    name: str, join: OutputJoin, shapes: Sequence[Shape], workers: Sequence[str]
) -> None:
    """Raise `JoinError` unless parts of these shapes, each of one worker, join as the split says."""
    axis, first = join.axis, shapes[0]
    if len(shapes) == 1:
        return
    for i, (shape, worker) in enumerate(zip(shapes, workers, strict=True)):
        expected: list[int | None] = [*first]
        if join.rank is not None and join.rank != len(first):
            expected = [None] * join.rank
        if axis is not None:
            expected += [None] * (axis + 1 - len(expected))
            expected[axis] = None if join.lengths is None else join.lengths[i]
        fits = len(shape) == len(expected) and all(
            want in (size, None) for size, want in zip(shape, expected, strict=True)
        )
        if not fits:
            text = ", ".join("?" if size is None else str(size) for size in expected)
            how = "is the same from every worker" if axis is None else f"joins along axis {axis}"
            raise JoinError(
                f"output {name!r} {how}, as the split says: expected [{text}] from {worker} (part {i}), "
                f"got {list(shape)}"
            )


def offsets(shape: Shape, axis: int, parts: Sequence[int]) -> list[int] | None:
    """Where each part starts, in elements; None unless all dimensions before the axis have size one."""
    if prod(shape[:axis]) != 1:
        return None
    inner = prod(shape[axis + 1 :])
    return [*accumulate((part * inner for part in parts), initial=0)][:-1]
