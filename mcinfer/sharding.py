"""How a batch is cut over workers, and how the answers become one again. Shapes only, no data.

A model's *batch symbol* is the symbolic dimension along which rows are independent. It is chosen by
name (``batch``, ``batch_size``, ``N``, …) or, where no symbol is so named, as the symbol that comes
first in the shapes of both inputs and outputs, unless its name speaks of a sequence. Inputs that have
it are cut along it; all others go to every worker whole. Where there is no batch symbol, an input with
a fixed first dimension that is given k times its rows is cut in k pieces.

That rows are independent is taken from the name: a model that mixes them must be run whole (`batch_axes`
with None, or one piece). Where no name says so nothing is cut, and where cutting some inputs only
could be wrong, the request is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mcinfer.errors import InvalidInputError, PredictError
from mcinfer.specs import ModelSpec, TensorSpec

Shape = tuple[int, ...]
BatchAxes = Mapping[str, int | None]
"""By input name: the axis to cut along, or None for whole."""

_BATCH_NAMES = (re.compile(r"\w*batch\w*", re.IGNORECASE), re.compile(r"n|b|bs", re.IGNORECASE))
_SEQUENCE_NAME = re.compile(r"seq|len|time|step|token|frame", re.IGNORECASE)


class JoinError(PredictError):
    """The answers to the pieces of a batch do not go together: they will not the next time either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCut:
    """How one input goes to the shards.

    Attributes:
        axis: The axis it is cut along; None: every shard takes it whole.
        shapes: Its shape in each shard.
    """

    axis: int | None
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputJoin:
    """How one output comes together.

    Attributes:
        axis: The axis along which the shards' parts follow one another; None: all must be equal.
        shapes: Its shape in each shard, or None where it is not known before the run.
        shape: The joined shape, or None likewise.
        guessed: Whether the axis is to be judged by what comes (see `join_axis`).
    """

    axis: int | None
    shapes: tuple[Shape, ...] | None
    shape: Shape | None
    guessed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One request, cut.

    Attributes:
        rows: Batch rows of each shard (pieces' rows for a fixed batch); empty for a batch of none.
        inputs: In the model's order.
        outputs: In the model's order.
        rowwise: Whether rows may also be put together with those of other requests: the batch is of any
            size, and every output has it and is of a shape known before the run.
    """

    rows: tuple[int, ...]
    inputs: tuple[InputCut, ...]
    outputs: tuple[OutputJoin, ...]
    rowwise: bool = False

    @property
    def input_axes(self) -> tuple[int | None, ...]:
        """By input, the axis that it is cut along."""
        return tuple(cut.axis for cut in self.inputs)


def batch_symbol(model: ModelSpec) -> str | None:
    """The model's batch symbol, or None where it has none."""
    symbol = _likely_symbol(model)
    # Rows that meet each other in one tensor (similarities, batch by batch) are not independent.
    paired = any(spec.shape.count(symbol) > 1 for spec in (*model.inputs, *model.outputs))
    return None if paired else symbol


def _likely_symbol(model: ModelSpec) -> str | None:
    everywhere = [size for spec in model.inputs for size in spec.shape if isinstance(size, str)]
    for pattern in _BATCH_NAMES:
        for symbol in everywhere:
            if pattern.fullmatch(symbol):
                return symbol
    answered = [spec.shape[0] for spec in model.outputs if spec.shape]
    candidates = [
        spec.shape[0]
        for spec in model.inputs
        if spec.shape
        and isinstance(spec.shape[0], str)
        and spec.shape[0] in answered
        and not _SEQUENCE_NAME.search(spec.shape[0])
    ]
    return max(candidates, key=candidates.count, default=None)


def split_evenly(count: int, pieces: int) -> tuple[int, ...]:
    """`count` rows in at most `pieces` parts, none empty, sizes at most one apart, larger first."""
    pieces = min(pieces, count)
    if pieces <= 0:
        return ()
    least, more = divmod(count, pieces)
    return tuple(least + 1 if i < more else least for i in range(pieces))


def plan(
    model: ModelSpec,
    shapes: Sequence[Shape],
    pieces: int,
    batch_axes: BatchAxes | None = None,
) -> Plan:
    """Check the shapes of a request and cut it.

    Args:
        model: What the model takes and gives.
        shapes: The shape given for each input, in the model's order.
        pieces: Into how many shards to cut at most; a fixed batch makes as many as it needs.
        batch_axes: Axes by input name, in the place of what the model's symbols say.

    Raises:
        InvalidInputError: A shape does not fit the model, or it is not clear what the batch is.
    """
    axes = _cut_axes(model, shapes, batch_axes)
    sizes = {
        spec.name: (shape[axis], spec.shape[axis])
        for spec, shape, axis in zip(model.inputs, shapes, axes, strict=True)
        if axis is not None
    }
    fixed_pieces = _fixed_pieces(sizes)
    if fixed_pieces is not None:
        rows = (1,) * fixed_pieces
    else:
        total = _common_rows(sizes)
        rows = (1,) if total is None else split_evenly(total, pieces)
    doubt = _doubt(model, shapes, axes, batch_axes or {})
    if doubt is not None and len(rows) != 1:
        raise InvalidInputError(doubt)
    cuts = []
    for spec, shape, axis in zip(model.inputs, shapes, axes, strict=True):
        if axis is None:
            cuts.append(InputCut(axis=None, shapes=(shape,) * max(1, len(rows))))
            continue
        size = spec.shape[axis]
        # For a batch of no rows, the shapes of one shard of the least size still are to be checked.
        parts = [size if isinstance(size, int) else count for count in rows or (0,)]
        cuts.append(
            InputCut(
                axis=axis,
                shapes=tuple((*shape[:axis], part, *shape[axis + 1 :]) for part in parts),
            )
        )
    bindings = _bind(model.inputs, [*zip(*(cut.shapes for cut in cuts), strict=True)] or [()])
    outputs = _joins(model, cuts, bindings)
    if not rows:
        cuts = [InputCut(axis=cut.axis, shapes=()) for cut in cuts]
        outputs = tuple(
            _empty(spec, join) for spec, join in zip(model.outputs, outputs, strict=True)
        )
    free = bool(rows) and fixed_pieces is None and doubt is None
    rowwise = free and _is_rowwise(model, cuts, outputs)
    return Plan(rows=rows, inputs=tuple(cuts), outputs=outputs, rowwise=rowwise)


def _is_rowwise(model: ModelSpec, cuts: Sequence[InputCut], outputs: Sequence[OutputJoin]) -> bool:
    """Whether rows may go together with those of other requests; see `Plan.rowwise`."""
    axes = [cut.axis for cut in cuts]
    batch = {s.shape[a] for s, a in zip(model.inputs, axes, strict=True) if a is not None}
    if not batch or any(join.axis is None or join.shapes is None for join in outputs):
        return False
    # Once in what is cut and nowhere else: rows that meet in one tensor are not independent.
    expected = [int(axis is not None) for axis in axes] + [1] * len(outputs)
    counts = [
        sum(size is not None and size in batch for size in spec.shape)
        for spec in (*model.inputs, *model.outputs)
    ]
    unnamed = None in batch  # an axis that only `batch_axes` speaks of
    return all(
        count == once or (unnamed and count < once)
        for count, once in zip(counts, expected, strict=True)
    )


def _cut_axes(
    model: ModelSpec, shapes: Sequence[Shape], batch_axes: BatchAxes | None
) -> list[int | None]:
    """The axis to cut each input along; None for whole."""
    for spec, shape in zip(model.inputs, shapes, strict=True):
        if len(shape) != len(spec.shape):
            raise InvalidInputError(
                f"input {spec.name!r} has {len(shape)} dimensions {list(shape)}, expected "
                f"{len(spec.shape)}: {spec}"
            )
    given = {} if batch_axes is None else batch_axes
    _check_given_axes(model, given)
    symbol = batch_symbol(model)
    if symbol is not None:
        axes = [spec.shape.index(symbol) if symbol in spec.shape else None for spec in model.inputs]
    else:
        axes = [_fixed_axis(spec, shape) for spec, shape in zip(model.inputs, shapes, strict=True)]
    return [given.get(spec.name, axis) for spec, axis in zip(model.inputs, axes, strict=True)]


def _check_given_axes(model: ModelSpec, batch_axes: BatchAxes) -> None:
    specs = {spec.name: spec for spec in model.inputs}
    for name, axis in batch_axes.items():
        if name not in specs:
            raise InvalidInputError(
                f"batch_axes: got unknown input {name!r}, expected one of {[*specs]}"
            )
        rank = len(specs[name].shape)
        if axis is not None and not (type(axis) is int and 0 <= axis < rank):
            raise InvalidInputError(
                f"batch_axes[{name!r}]: got {axis!r}, expected None or an axis from 0 to {rank - 1}"
            )


def _fixed_axis(spec: TensorSpec, shape: Shape) -> int | None:
    """Axis 0 of an input with a fixed first dimension that is given another number of rows."""
    fixed = bool(spec.shape) and isinstance(spec.shape[0], int)
    return 0 if fixed and shape[0] != spec.shape[0] else None


def _doubt(
    model: ModelSpec, shapes: Sequence[Shape], axes: Sequence[int | None], given: BatchAxes
) -> str | None:
    """What to say of an input that may or may not be part of the batch, and of which nothing was said.

    It has a first dimension of its own, free and as long as the batch: cutting the others and
    sending this one whole could give a wrong answer without an error. A symbol that speaks of a
    sequence leaves no doubt, whatever its length happens to be.
    """
    rows = {shape[axis] for shape, axis in zip(shapes, axes, strict=True) if axis is not None}
    for spec, shape, axis in zip(model.inputs, shapes, axes, strict=True):
        unsaid = axis is None and spec.name not in given and bool(spec.shape)
        first = spec.shape[0] if unsaid else 0
        free = first is None or (isinstance(first, str) and not _SEQUENCE_NAME.search(first))
        if free and shape[0] > 1 and shape[0] in rows:
            return (
                f"input {spec.name!r} ({spec}) is given {shape[0]} rows, as many as the batch: it is "
                f"not clear whether they belong to it; say so with batch_axes, as in "
                f"batch_axes={{{spec.name!r}: 0}} (cut) or {{{spec.name!r}: None}} (whole)"
            )
    return None


def _common_rows(sizes: Mapping[str, tuple[int, int | str | None]]) -> int | None:
    """The rows that all cut inputs have; None where none is cut."""
    first = next(iter(sizes), None)
    for name, (given, _) in sizes.items():
        if first is not None and given != sizes[first][0]:
            raise InvalidInputError(
                f"inputs {first!r} and {name!r} are cut together, but {first!r} has "
                f"{sizes[first][0]} rows and {name!r} has {given}"
            )
    return None if first is None else sizes[first][0]


def _fixed_pieces(sizes: Mapping[str, tuple[int, int | str | None]]) -> int | None:
    """How many pieces of a fixed batch were given; None where the batch is symbolic."""
    counts: dict[str, int] = {}
    for name, (given, fixed) in sizes.items():
        if not isinstance(fixed, int):
            continue
        if fixed == 0 or given % fixed:
            raise InvalidInputError(
                f"input {name!r} is given {given} rows, expected a multiple of the model's fixed "
                f"batch of {fixed}"
            )
        counts[name] = given // fixed
    if not counts:
        return None
    first = next(iter(counts))
    for name, (given, fixed) in sizes.items():
        if counts.get(name, given) != counts[first]:
            raise InvalidInputError(
                f"inputs {first!r} and {name!r} are cut together, but {first!r} makes "
                f"{counts[first]} pieces and {name!r} with {given} rows (fixed: {fixed}) does not"
            )
    return counts[first]


def _bind(specs: Sequence[TensorSpec], shards: Sequence[Sequence[Shape]]) -> list[dict[str, int]]:
    """Check each shard's shapes against fixed sizes, and what size each symbol has there."""
    bindings = []
    for shapes in shards:
        bound: dict[str, tuple[int, str]] = {}
        for spec, shape in zip(specs, shapes, strict=True):
            for axis, (expected, given) in enumerate(zip(spec.shape, shape, strict=True)):
                if isinstance(expected, int) and expected != given:
                    raise InvalidInputError(
                        f"input {spec.name!r} has size {given} in dimension {axis}, expected "
                        f"{expected}: {spec}"
                    )
                if not isinstance(expected, str):
                    continue
                size, first = bound.setdefault(expected, (given, spec.name))
                if size != given:
                    raise InvalidInputError(
                        f"symbol {expected!r} is {size} in input {first!r} and {given} in input "
                        f"{spec.name!r}, expected one size"
                    )
        bindings.append({symbol: size for symbol, (size, _) in bound.items()})
    return bindings


def _joins(
    model: ModelSpec, cuts: Sequence[InputCut], bindings: Sequence[Mapping[str, int]]
) -> tuple[OutputJoin, ...]:
    """How each output joins, and its shapes where the symbols tell them."""
    cut = [
        spec.shape[cut.axis]
        for spec, cut in zip(model.inputs, cuts, strict=True)
        if cut.axis is not None
    ]
    cut_sizes = {size for size in cut if size is not None}
    joins = []
    for spec in model.outputs:
        # A symbol is the batch wherever it stands; a number only where a batch stands by habit.
        axis = next((i for i, size in enumerate(spec.shape) if size in cut_sizes), None)
        if axis is not None and axis > 0 and isinstance(spec.shape[axis], int):
            axis = None
        size = None if axis is None else spec.shape[axis]
        if isinstance(size, str) and spec.shape.count(size) > 1 and len(bindings) > 1:
            raise InvalidInputError(
                f"output {spec} sets rows of the batch against each other, which cannot be cut; "
                f"leave the inputs whole with batch_axes"
            )
        known = [_resolve(spec, bound) for bound in bindings]
        parts = tuple(shape for shape in known if shape is not None)
        shapes = parts if len(parts) == len(known) else None
        open_ended = bool(spec.shape) and not isinstance(spec.shape[0], int)
        joins.append(
            OutputJoin(
                axis=axis,
                shapes=shapes,
                shape=None if shapes is None else _joined(shapes, axis),
                guessed=axis is None and bool(cut) and open_ended and shapes is None,
            )
        )
    return tuple(joins)


def _joined(parts: Sequence[Shape], axis: int | None) -> Shape:
    if axis is None:
        return parts[0]
    return (*parts[0][:axis], sum(part[axis] for part in parts), *parts[0][axis + 1 :])


def _empty(spec: TensorSpec, join: OutputJoin) -> OutputJoin:
    """An output for a batch of no rows, which no worker is asked for.

    Raises:
        InvalidInputError: Its value does not follow from the shapes alone.
    """
    if join.axis is None or join.shape is None:
        raise InvalidInputError(
            f"a batch of 0 rows has no answer here: output {spec} does not follow from the shapes"
        )
    shape = (*join.shape[: join.axis], 0, *join.shape[join.axis + 1 :])
    return OutputJoin(axis=join.axis, shapes=(), shape=shape)


def _resolve(spec: TensorSpec, bound: Mapping[str, int]) -> Shape | None:
    """The output's shape with its symbols bound; None where one is not, or has no name."""
    sizes = [bound.get(size) if isinstance(size, str) else size for size in spec.shape]
    known = tuple(size for size in sizes if size is not None)
    return known if len(known) == len(sizes) else None


def join_axis(
    name: str, join: OutputJoin, rows: Sequence[int], shapes: Sequence[Shape]
) -> int | None:
    """The axis to join an output along, now that the shards' shapes are known.

    An output whose first dimension has no known name, or whose shape is not what the model says,
    joins along it when every shard gave the same multiple of its rows; otherwise it has no batch
    dimension.

    Raises:
        PredictError: The shards' parts do not fit together.
    """
    axis = join.axis
    unforeseen = join.guessed or (join.shapes is not None and tuple(shapes) != join.shapes)
    if axis is None and unforeseen and all(shapes):
        ratios = {
            shape[0] // count if count and shape[0] % count == 0 else -1
            for shape, count in zip(shapes, rows, strict=True)
        }
        axis = 0 if len(ratios) == 1 and ratios != {-1} and ratios != {0} else None
    if axis is None:
        return None
    rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if len(rest) > 1 or any(len(shape) <= axis for shape in shapes):
        raise JoinError(
            f"output {name!r}: the shards' shapes {[list(shape) for shape in shapes]} do not join "
            f"along axis {axis}"
        )
    return axis


def offsets(shape: Shape, axis: int, parts: Sequence[int]) -> list[int] | None:
    """Where each part starts, in elements, or None where the parts are not contiguous.

    Parts along an axis are contiguous where all dimensions before it have size one.
    """
    if prod(shape[:axis]) != 1:
        return None
    inner = prod(shape[axis + 1 :])
    starts, at = [], 0
    for part in parts:
        starts.append(at)
        at += part * inner
    return starts
