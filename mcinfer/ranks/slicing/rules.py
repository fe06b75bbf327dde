"""What an operator makes of inputs that are cut: the rules of each operator.

Most operators are described by the labels of their axes (`LABELS`), the others have a rule of their own.
What has no rule here runs whole in every rank.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from onnx import TensorProto

from mcinfer.ranks.slicing.graphs import BITS, View, axis_of
from mcinfer.ranks.slicing.placements import (
    PARTIAL,
    REPLICATED,
    Dims,
    Placement,
    Sharded,
    divides,
    reshaped,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run a node in every rank.

    Attributes:
        needs: How it takes each input.
        gives: How it gives each output.
        attributes: New values of attributes; None removes one.
        vectors: Constants of integers that replace inputs, by the input's index.
        patches: Elements of an input, a vector that a run makes, that are replaced: value by position.
        bias: Index of an input that is added after the reduction of the output's partial sums.
        bias_axis: Axis of the output that this input runs along; None if it is broadcast as it is.
        scale: What the output, integers, is multiplied with.
    """

    needs: tuple[Placement, ...]
    gives: tuple[Placement, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    vectors: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    patches: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    bias: int | None = None
    bias_axis: int | None = None
    scale: tuple[int, ...] | int | None = None


Forms = Sequence[tuple[Placement, ...] | None]
"""How each input is there already; None for constants, which can be there in every way."""


def whole(view: View) -> Choice:
    """Every rank runs the node on whole values."""
    needs, gives = (REPLICATED,) * len(view.inputs), (REPLICATED,) * len(view.outputs)
    return Choice(needs=needs, gives=gives)


def cut(view: View, index: int, form: Sharded, forms: Forms) -> Choice | str:
    """The way to run the node with one input cut so; or why there is none."""
    rule = RULES.get(view.operator)
    if rule is None:
        return f"{view.operator} runs whole"
    if not view.ranks_known():
        return "its shapes are unknown"
    dims = view.dims(index)
    if form.axis >= len(dims) or dims[form.axis] != form.size:
        return "the size of the axis is unknown"
    if not divides(view.ranks, form.blocks):
        return _undivided(view, form)
    choice = rule(view, index, form, forms) if rule is _concat else rule(view, index, form)
    if isinstance(choice, Choice):
        return _checked(view, choice)
    return choice


def _checked(view: View, choice: Choice) -> Choice | str:
    for index, need in enumerate(choice.needs):
        if not isinstance(need, Sharded):
            continue
        dims = view.dims(index)
        if need.axis >= len(dims) or dims[need.axis] != need.size:
            return f"input {index} may be broadcast"
        if not divides(view.ranks, need.blocks):
            return _undivided(view, need)
        if BITS.get(view.graph.element_type(view.inputs[index]), 0) < 8:
            return f"the elements of input {index} cannot be cut"
    if any(view.graph.element_type(name) == TensorProto.STRING for name in view.outputs):
        return "its outputs are strings"
    return choice


def _undivided(view: View, form: Sharded) -> str:
    blocks = " + ".join(map(str, form.blocks))
    return f"axis {form.axis} of {blocks} is not divisible by {view.ranks}"


def partial(view: View, forms: Forms) -> Iterator[Choice]:
    """Ways to run the node on partial sums, where it is linear."""
    if not all(view.graph.element_type(name) for name in view.outputs if name):
        return  # the terms' type follows from it
    there = [form is not None and PARTIAL in form for form in forms]
    if view.operator in ("Shape", "Size") and there[0]:
        yield Choice(needs=(PARTIAL,), gives=(REPLICATED,))
    if view.operator in _LINEAR_IN_ALL and all(there[: len(view.inputs)]):
        yield _linear(view, range(len(view.inputs)))
    if view.operator == "Div" and view.graph.element_type(view.outputs[0]) not in _FLOATS:
        return  # a division of integers rounds
    for index in _LINEAR_IN_ONE.get(view.operator, ()):
        if index < len(view.inputs) and there[index] and _keeps_finite(view, index):
            yield _linear(view, [index])


def _keeps_finite(view: View, index: int) -> bool:
    """Whether no finite input becomes infinite: infinite terms of different signs have no sum.

    A product's other factor is to be a constant of finite elements, and a divisor one that is not 0.
    """
    if view.operator not in ("Div", "Mul"):
        return True
    other = view.inputs[1 - index]
    if view.operator == "Mul":
        return view.graph.is_finite(other)
    numbers = view.graph.numbers(other)
    return numbers is not None and all(numbers)


def _linear(view: View, indices: Sequence[int]) -> Choice:
    numbers = range(len(view.inputs))
    needs = tuple(PARTIAL if number in indices else REPLICATED for number in numbers)
    return Choice(needs=needs, gives=(PARTIAL,) * len(view.outputs))


def _first(view: View, cut: Sharded) -> tuple[Placement, ...]:
    """The first input is cut, and the others are whole."""
    return (cut, *(REPLICATED,) * (len(view.inputs) - 1))


Rule = Callable[..., Choice | str]
"""Of a node's view, the number of an input, and how it is cut; `_concat` takes all forms, too."""

_FLOATS = frozenset(
    [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16]
)
_LINEAR_IN_ALL = frozenset(["Add", "Concat", "Sub", "Sum"])
_LINEAR_IN_ONE = {
    **dict.fromkeys(
        ["Div", "Expand", "Flatten", "Gather", "Identity", "Neg", "ReduceSum", "Reshape"], (0,)
    ),
    **dict.fromkeys(["Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"], (0,)),
    "Mul": (0, 1),
}


# Operators as sums over labelled axes, in the manner of Einstein's notation.
#
# An axis has the same label wherever it runs along the same positions. MatMul is ``mk, kn -> mn``: the rows m
# or the columns n of an operand may be cut, and the result is cut there. A label that the result lacks is
# summed over: if k is cut, the result is a partial sum. An axis along which positions depend on each other
# (the axis of a Softmax) has no label, so it is never cut.

Label = int | str | None
Labels = tuple[Label, ...]
Axes = tuple[Sequence[Labels], Labels]
"""The labels of a node's inputs, and of each of its outputs."""

# A star is all other axes, without labels. There may be fewer inputs.
_EQUATIONS = {
    "Conv": "bi*,oi*,o->bo*",
    "ConvTranspose": "bi*,io*,o->bo*",
    # Each channel by itself: pooling, and norms over an image; other inputs are one number for a channel.
    **dict.fromkeys(
        [
            *("AveragePool", "BatchNormalization", "GlobalAveragePool", "GlobalMaxPool"),
            *("InstanceNormalization", "MaxPool"),
        ],
        "bc*,c,c,c,c->bc*",
    ),
}

_BIAS_AXES = {"Conv": 1, "ConvTranspose": 1, "Gemm": None}
"""Operators whose third input is added to the sum, and the axis of the output that it runs along."""


def _numbered(rank: int, but: Sequence[int] = ()) -> Labels:
    """A label for each axis but some."""
    return tuple(None if axis in but else axis for axis in range(rank))


def _broadcast(dims: Dims, labels: Labels) -> Labels:
    """The last of the labels, for an operand that may have fewer axes, or axes of size 1."""
    last = labels[len(labels) - len(dims) :]
    return tuple(None if dim == 1 else name for dim, name in zip(dims, last, strict=True))


def _unlabelled(view: View, first: int) -> list[Labels]:
    """For the inputs from one on, which are never cut."""
    return [(None,) * len(view.dims(index)) for index in range(first, len(view.inputs))]


def _equation(view: View, text: str) -> Axes:
    rest: Labels = (None,) * (len(view.dims(0)) - 2)
    *inputs, output = (
        (*part.rstrip("*"), *(rest if part.endswith("*") else ()))
        for part in text.replace("->", ",").split(",")
    )
    return inputs, output


def _by_equation(view: View) -> Axes | str:
    if len([name for name in view.outputs if name]) > 1:
        return "it has several outputs"
    return _equation(view, _EQUATIONS[view.operator])


def _einsum(view: View) -> Axes | str:
    text = view.attribute("equation", b"").decode().replace(" ", "")
    if not re.fullmatch(r"[A-Za-z]+(,[A-Za-z]+)*->[A-Za-z]*", text):
        return f"equation {text!r}"
    return _equation(view, text)


def _elementwise(view: View) -> Axes | str:
    labels = _numbered(len(view.output_dims()))
    return [_broadcast(view.dims(index), labels) for index in range(len(view.inputs))], labels


def _dropout(view: View) -> Axes | str:
    if len([name for name in view.outputs if name]) > 1 or view.has(2):
        return "a Dropout that trains"
    labels = _numbered(len(view.dims(0)))
    return [labels, *_unlabelled(view, 1)], labels


def _matmul(view: View) -> Axes | str:
    first, second = view.dims(0), view.dims(1)
    if not first or not second:
        return "an operand has no axes"
    if view.attribute("transBatchA", 0) or view.attribute("transBatchB", 0):
        return "a FusedMatMul with transposed batches"
    batches = _numbered(max(len(first), len(second), 2) - 2)
    rows: Labels = ("m",) if len(first) > 1 else ()
    columns: Labels = ("n",) if len(second) > 1 else ()
    one, two = _transposed(view, (*rows, "k"), ("k", *columns))
    return (
        [(*_broadcast(first[:-2], batches), *one), (*_broadcast(second[:-2], batches), *two)],
        (*batches, *rows, *columns),
    )


def _gemm(view: View) -> Axes | str:
    operands = _transposed(view, ("m", "k"), ("k", "n"))
    return [*operands, _broadcast(view.dims(2), ("m", "n"))], ("m", "n")


def _transposed(view: View, one: Labels, two: Labels) -> tuple[Labels, Labels]:
    """The labels of two operands that the node may transpose."""
    return (
        one[::-1] if view.attribute("transA", 0) else one,
        two[::-1] if view.attribute("transB", 0) else two,
    )


def _transpose(view: View) -> Axes | str:
    rank = len(view.dims(0))
    return [_numbered(rank)], tuple(view.attribute("perm", range(rank - 1, -1, -1)))


def _layer_norm(view: View, default: int = -1) -> Axes | str:
    """Norms over all axes from one on."""
    rank = len(view.dims(0))
    labels = _numbered(rank, range(axis_of(view.attribute("axis", default), rank), rank))
    return [labels, *_unlabelled(view, 1)], labels


def _softmax(view: View) -> Axes | str:
    if view.graph.opset < 13:
        return _layer_norm(view, 1)
    rank = len(view.dims(0))
    labels = _numbered(rank, [axis_of(view.attribute("axis", -1), rank)])
    return [labels], labels


def _skip_layer_norm(view: View) -> Axes | str:
    if any(view.outputs[1:3]):
        return "it gives mean and deviation"
    rank = len(view.dims(0))
    labels = _numbered(rank, [rank - 1])
    return [labels, _broadcast(view.dims(1), labels), *_unlabelled(view, 2)], labels


def _reduce(view: View) -> Axes | str:
    rank = len(view.dims(0))
    given = view.argument("axes", 1)
    if given is None and view.has(1):
        return "its axes are no constant"
    if not given:
        if view.attribute("noop_with_empty_axes", 0):
            return "it reduces nothing"
        given = tuple(range(rank))
    axes = [axis_of(axis, rank) for axis in given]
    kept = _numbered(rank, axes)
    labels = _numbered(rank) if view.operator == "ReduceSum" else kept
    if not view.attribute("keepdims", 1):
        kept = tuple(name for name in kept if name is not None)
    return [labels, *_unlabelled(view, 1)], kept


def _gather(view: View) -> Axes | str:
    rank = len(view.dims(0))
    axis = axis_of(view.attribute("axis", 0), rank)
    data = _numbered(rank, [axis])
    indices = tuple(f"i{number}" for number in range(len(view.dims(1))))
    return [data, indices], (*data[:axis], *indices, *data[axis + 1 :])


def _squeeze(view: View) -> Axes | str:
    """Squeeze and Unsqueeze."""
    inserts = view.operator == "Unsqueeze"
    rank = len(view.output_dims() if inserts else view.dims(0))
    axes = view.argument("axes", 1)
    if axes is None:
        if inserts or view.has(1):
            return "its axes are no constant"
        if not all(isinstance(dim, int) for dim in view.dims(0)):
            return "its axes depend on unknown sizes"
        axes = tuple(axis for axis, dim in enumerate(view.dims(0)) if dim == 1)
    longer = _numbered(rank, [axis_of(axis, rank) for axis in axes])
    shorter = tuple(name for name in longer if name is not None)
    one, other = (shorter, longer) if inserts else (longer, shorter)
    return [one, *_unlabelled(view, 1)], other


def _unmoved(view: View) -> Axes | str:
    """Only the axes along which nothing moves: Tile, Pad and Resize by constants."""
    rank = len(view.dims(0))
    still: list[bool] = []
    if view.operator == "Tile":
        still = [repeat == 1 for repeat in view.integers(1) or ()]
    elif view.operator == "Pad":
        pads = None if view.has(3) else view.argument("pads", 1)  # with axes, pads are of some only
        still = [not any(pads[axis::rank]) for axis in range(rank)] if pads else []
    elif view.has(2) and not view.has(1) and view.attribute("axes", None) is None:
        still = [scale == 1 for scale in view.graph.numbers(view.inputs[2]) or ()]
    if not still:
        return "what it does along each axis is unknown"
    labels = tuple(axis if fixed else None for axis, fixed in enumerate(still))
    return [labels, *_unlabelled(view, 1)], labels


# fmt: off
_ELEMENTWISE = [
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift",
    "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Celu", "Clip",
    "Cos", "Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu",
    "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not",
    "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign",
    "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh",
    "ThresholdedRelu", "Where", "Xor", "com.microsoft::BiasGelu", "com.microsoft::FastGelu",
    "com.microsoft::Gelu", "com.microsoft::QuickGelu",
]
# fmt: on

LABELS: dict[str, Callable[[View], Axes | str]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(["MatMul", "com.microsoft::FusedMatMul"], _matmul),
    **dict.fromkeys(_EQUATIONS, _by_equation),
    **dict.fromkeys(["Softmax", "LogSoftmax", "Hardmax"], _softmax),
    **dict.fromkeys(["LayerNormalization", "RMSNormalization"], _layer_norm),
    "SimplifiedLayerNormalization": _layer_norm,
    "com.microsoft::SkipLayerNormalization": _skip_layer_norm,
    "com.microsoft::SkipSimplifiedLayerNormalization": _skip_layer_norm,
    **dict.fromkeys(["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"], _reduce),
    **dict.fromkeys(["ReduceSumSquare", "ReduceProd", "ReduceL1"], _reduce),
    **dict.fromkeys(["Squeeze", "Unsqueeze"], _squeeze),
    **dict.fromkeys(["Pad", "Resize", "Tile"], _unmoved),
    "Dropout": _dropout,
    "Einsum": _einsum,
    "Gather": _gather,
    "Gemm": _gemm,
    "Transpose": _transpose,
}


def _labelled(view: View, index: int, cut: Sharded) -> Choice | str:
    """The rule of every operator that is described by labels."""
    axes = LABELS[view.operator](view)
    if isinstance(axes, str):
        return axes
    inputs, output = axes
    found = inputs[index][cut.axis] if index < len(inputs) else None
    if found is None:
        return f"{view.operator} joins the positions of axis {cut.axis}"
    if any(labels.count(found) > 1 for labels in inputs):
        return "an axis is repeated"
    needs = tuple(
        cut.at(labels.index(found)) if name and found in labels else REPLICATED
        for name, labels in zip(view.inputs, inputs, strict=False)
    )
    if found in output:
        form: Placement = cut.at(output.index(found))
    elif view.operator in _BIAS_AXES and view.has(2):
        axis = _BIAS_AXES[view.operator]
        return Choice(needs=needs, gives=(REPLICATED,), bias=2, bias_axis=axis)
    else:
        form = PARTIAL
    return Choice(needs=needs, gives=(form,) * len(view.outputs))


# Operators with a rule of their own.


def _grouped_convolution(view: View, index: int, cut: Sharded) -> Choice | str:
    """A convolution of groups of channels is cut between groups; one of one group, by its labels."""
    groups = view.attribute("group", 1)
    if groups == 1:
        return _labelled(view, index, cut)
    before, after = view.dims(0)[1], view.output_dims()[1]
    is_transposed = view.operator == "ConvTranspose"
    if is_transposed or not isinstance(before, int) or not isinstance(after, int):
        return "channels in groups"
    channels = before if index == 0 else after
    if cut.axis != (1 if index == 0 else 0) or cut.size != channels:
        return f"{groups} groups of channels"
    counts = _cut_groups(view, cut, groups, channels)
    if isinstance(counts, str):
        return counts
    one = Sharded(1, tuple(count * (before // groups) for count in counts))
    other = Sharded(0, tuple(count * (after // groups) for count in counts))
    needs = (one, *(other if name else REPLICATED for name in view.inputs[1:]))
    return Choice(needs=needs, gives=(other.at(1),), attributes={"group": groups // view.ranks})


def _group_norm(view: View, index: int, cut: Sharded) -> Choice | str:
    groups, channels = view.attribute("num_groups", 1), view.dims(0)[1]
    if index != 0 or cut.axis != 1 or not isinstance(channels, int):
        return f"{view.operator} joins the positions of axis {cut.axis}"
    counts = _cut_groups(view, cut, groups, channels)
    if isinstance(counts, str):
        return counts
    vector = cut.at(0)
    if view.dims(1) == (groups,) and groups != channels:  # before opset 21, one number for a group
        vector = Sharded(0, counts)
    return Choice(
        needs=(cut, vector, vector), gives=(cut,), attributes={"num_groups": groups // view.ranks}
    )


def _cut_groups(view: View, cut: Sharded, groups: int, channels: int) -> tuple[int, ...] | str:
    """How many groups of channels each block has; or why they cannot be cut."""
    each = channels // groups
    if any(block % (each * view.ranks) for block in cut.blocks):
        return f"{groups} groups of channels cannot be cut in {view.ranks}"
    return tuple(block // each for block in cut.blocks)


def _reshape(view: View, index: int, cut: Sharded) -> Choice | str:
    """Reshape and Flatten: the size of the cut axis is that of a part."""
    if index != 0:
        return "it is a shape"
    source, target = view.dims(0), view.output_dims()
    moved = reshaped(source, target, cut, view.ranks)
    if moved is None:
        return (
            f"axis {cut.axis} of {_text(source)}, cut in {view.ranks}, is no cut of {_text(target)}"
        )
    if view.operator == "Flatten":
        return Choice(needs=(cut,), gives=(moved,))
    fixed = {moved.axis: moved.size // view.ranks}
    if cut.axis != moved.axis and cut.axis < len(target):
        # Zero means the size of the input's axis, which is now that of a part.
        size = target[cut.axis]
        given = view.integers(1)
        if given is None or given[cut.axis] == 0:
            if not isinstance(size, int):
                return f"the size of axis {cut.axis} of the output is unknown"
            fixed[cut.axis] = size
    return _sized(view, 1, cut, moved, fixed)


def _resize(view: View, index: int, cut: Sharded) -> Choice | str:
    """Resize to sizes, where the cut axis keeps its own; one by constant scales, by its labels."""
    if not view.has(3):
        return _labelled(view, index, cut)
    plain = view.attribute("axes", None) is None and not view.has(1)
    plain &= view.attribute("keep_aspect_ratio_policy", b"stretch") == b"stretch"
    if index != 0 or not plain or view.output_dims()[cut.axis] != cut.size:
        return f"Resize joins the positions of axis {cut.axis}"
    return _sized(view, 3, cut, cut, {cut.axis: cut.size // view.ranks})


def _expand(view: View, index: int, cut: Sharded) -> Choice | str:
    if index != 0:
        return "it is a shape"
    rank, shape = len(view.output_dims()), view.dims(1)
    moved = cut.at(cut.axis + rank - len(view.dims(0)))
    if not shape or not isinstance(shape[0], int):
        return "the number of axes is unknown"
    position = moved.axis - (rank - shape[0])
    if position < 0:
        return Choice(needs=(cut, REPLICATED), gives=(moved,))
    return _sized(view, 1, cut, moved, {position: moved.size // view.ranks})


def _sized(
    view: View, index: int, cut: Sharded, moved: Sharded, fixed: Mapping[int, int]
) -> Choice:
    """A node whose shape, an input, has the sizes of a part."""
    needs, given = _first(view, cut), view.integers(index)
    if given is None:
        return Choice(needs=needs, gives=(moved,), patches={index: fixed})
    sizes = tuple(fixed.get(position, size) for position, size in enumerate(given))
    return Choice(needs=needs, gives=(moved,), vectors={index: sizes})


def _concat(view: View, index: int, cut: Sharded, forms: Forms) -> Choice | str:
    """Along another axis all inputs are cut alike; along this one, each has its own blocks."""
    axis = axis_of(view.attribute("axis", 0), len(view.output_dims()))
    if cut.axis != axis:
        return Choice(needs=tuple(cut for _ in view.inputs), gives=(cut,))
    needs: list[Sharded] = []
    for other, form in enumerate(forms[: len(view.inputs)]):
        own = [x for x in form or () if isinstance(x, Sharded) and x.axis == axis]
        size = view.dims(other)[axis]
        if other == index:
            needs.append(cut)
        elif own:
            needs.append(own[0])
        elif isinstance(size, int) and divides(view.ranks, [size]):
            needs.append(Sharded(axis, (size,)))
        else:
            return f"axis {axis} of input {other} cannot be cut in {view.ranks}"
    return Choice(
        needs=tuple(needs),
        gives=(Sharded(axis, tuple(block for need in needs for block in need.blocks)),),
    )


def _split(view: View, index: int, cut: Sharded) -> Choice | str:
    """Along the axis that is split, each output has some whole blocks."""
    if index != 0:
        return "it is a list of sizes"
    axis = axis_of(view.attribute("axis", 0), len(view.dims(0)))
    needs = _first(view, cut)
    if cut.axis != axis:
        return Choice(needs=needs, gives=tuple(cut for _ in view.outputs))
    sizes = split_sizes(view)
    if sizes is None or sum(sizes) != cut.size:
        return "the sizes of its outputs are unknown"
    found = [cut.between(*ends) for ends in pairwise([0, *accumulate(sizes)])]
    gives = tuple(form for form in found if form)
    if len(gives) < len(found):
        return f"outputs of sizes {sizes} do not begin and end with blocks {cut.blocks}"
    local = tuple(size // view.ranks for size in sizes)
    if view.graph.opset < 13:
        return Choice(needs=needs, gives=gives, attributes={"split": local})
    attributes = {"num_outputs": None}
    needs = (cut, REPLICATED)
    return Choice(needs=needs, gives=gives, attributes=attributes, vectors={1: local})


def split_sizes(view: View) -> tuple[int, ...] | None:
    """The sizes of a Split's outputs along its axis; None if they are unknown."""
    given = view.argument("split", 1)
    if given is not None or view.has(1):
        return given
    dims = view.dims(0)
    size = dims[axis_of(view.attribute("axis", 0), len(dims))] if dims else None
    if not isinstance(size, int):
        return None
    each = -(-size // len(view.outputs))
    return tuple(min(each, size - each * index) for index in range(len(view.outputs)))


def slice_bounds(view: View) -> dict[int, tuple[int, int, int, int]] | None:
    """For each axis that a Slice cuts: start, stop, step, and the position in its lists; None if unknown."""
    dims = view.graph.dims(view.inputs[0])
    starts, ends, axes, steps = (
        view.argument(name, index)
        for index, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    unknown = (axes is None and view.has(3)) or (steps is None and view.has(4))
    if dims is None or starts is None or ends is None or unknown:
        return None
    found = {}
    for position, axis in enumerate(axes if axes is not None else range(len(starts))):
        size = dims[axis_of(axis, len(dims))]
        start, end = starts[position], ends[position]
        if isinstance(size, int):
            start = min(max(start + size if start < 0 else start, 0), size)
            end = min(max(end + size if end < 0 else end, 0), size)
        found[axis_of(axis, len(dims))] = (start, end, steps[position] if steps else 1, position)
    return found


def _slice(view: View, index: int, cut: Sharded) -> Choice | str:
    """Along a cut axis, whole blocks can be taken."""
    needs = _first(view, cut)
    axes = view.argument("axes", 3)
    if axes is not None and cut.axis not in [axis_of(axis, len(view.dims(0))) for axis in axes]:
        return Choice(needs=needs, gives=(cut,))
    bounds = slice_bounds(view)
    if index != 0 or bounds is None:
        return "what it takes is unknown"
    if cut.axis not in bounds:
        return Choice(needs=needs, gives=(cut,))
    start, end, step, position = bounds[cut.axis]
    given = cut.between(start, end)
    if step != 1 or given is None or start >= end:
        return f"{start}:{end}:{step} does not begin and end with blocks {cut.blocks}"
    new = {}
    for place, (name, value) in enumerate((("starts", start), ("ends", end)), 1):
        values = list(view.argument(name, place) or ())
        values[position] = value // view.ranks
        new[name] = tuple(values)
    if view.has(1):
        return Choice(needs=needs, gives=(given,), vectors={1: new["starts"], 2: new["ends"]})
    return Choice(needs=needs, gives=(given,), attributes=new)


def _shape(view: View, index: int, cut: Sharded) -> Choice | str:
    """Shape and Size of a part, scaled to those of the whole."""
    del index
    if view.operator == "Size":
        return Choice(needs=(cut,), gives=(REPLICATED,), scale=view.ranks)
    rank = len(view.dims(0))
    scale = [view.ranks if axis == cut.axis else 1 for axis in range(rank)]
    start = axis_of(view.attribute("start", 0), rank)
    end = axis_of(view.attribute("end", rank), rank)
    wanted = tuple(scale[max(start, 0) : max(end, 0)])
    return Choice(needs=(cut,), gives=(REPLICATED,), scale=wanted if set(wanted) - {1} else None)


def _attention(view: View, index: int, cut: Sharded) -> Choice | str:
    """Attention by heads, of [batch, tokens, heads * size] or [batch, heads, tokens, size].

    A rank has the queries that belong to its keys.
    """
    own, of_keys, bias, past, others = _ATTENTION[view.operator]
    known = {0, 1, 2, bias, *past, *others}
    given = {number for number in range(len(view.inputs)) if view.has(number)}
    if given - known or not {0, 1, 2} <= given:
        return "only attention on queries, keys and values can be cut"
    ranks = {len(view.dims(number)) for number in (0, 1, 2)}
    if ranks not in ({3}, {4}):
        return "queries, keys and values that are packed"
    axis = 2 if ranks == {3} else 1
    widths = [view.dims(number)[axis] for number in (0, 1, 2)]
    sizes = [width for width in widths if isinstance(width, int)]
    if index > 2 or len(sizes) < 3 or cut != Sharded(axis, (sizes[index],)):
        return "its heads are not cut"
    heads = view.attribute(own, 0) or (sizes[0] if axis == 1 else 0)
    keys = view.attribute(of_keys, 0) or (sizes[1] if axis == 1 else heads)
    if not heads or heads % view.ranks or keys % view.ranks:
        return f"{heads} heads, of keys {keys}, cannot be cut in {view.ranks}"
    needs: list[Placement] = [REPLICATED] * len(view.inputs)
    needs[:3] = [Sharded(axis, (size,)) for size in sizes]
    for number in given.intersection(past):
        needs[number] = Sharded(1, (keys,))
    if view.has(bias) and len(view.dims(bias)) > 2:
        if len(view.dims(bias)) != 4:
            return "what is added to its scores has no axis of heads"
        if view.dims(bias)[1] != 1:
            needs[bias] = Sharded(1, (heads,))
    if view.operator == "com.microsoft::MultiHeadAttention" and view.has(3):
        needs[3] = Sharded(0, tuple(sizes))
    # The result, keys and values for the next run, and scores.
    gives = [Sharded(axis, (heads * (sizes[2] // keys) if axis == 2 else heads,))]
    gives += [Sharded(1, (keys,)), Sharded(1, (keys,)), Sharded(1, (heads,))]
    names = [name for name in (own, of_keys) if view.attribute(name, 0)]
    return Choice(
        needs=tuple(needs),
        gives=tuple(gives[: len(view.outputs)]),
        attributes={name: view.attribute(name, 0) // view.ranks for name in names},
    )


_ATTENTION: dict[str, tuple[str, str, int, tuple[int, ...], tuple[int, ...]]] = {
    "Attention": ("q_num_heads", "kv_num_heads", 3, (4, 5), (6,)),
    "com.microsoft::GroupQueryAttention": (
        "num_heads",
        "kv_num_heads",
        10,
        (3, 4),
        (*range(5, 10),),
    ),
    "com.microsoft::MultiHeadAttention": ("num_heads", "num_heads", 5, (6, 7), (3, 4)),
}
"""The attributes that count the heads of queries and of keys; then the inputs that are added to the scores,
that are keys and values of earlier runs, and all others that are taken."""


def _rotary(view: View, index: int, cut: Sharded) -> Choice | str:
    """Each head by itself, of [batch, tokens, heads * size] or [batch, heads, tokens, size]."""
    heads = view.attribute("num_heads", 0)
    axis = 2 if len(view.dims(0)) == 3 else 1
    if index != 0 or len(cut.blocks) > 1 or cut.axis != axis:
        return "its heads are not cut"
    if heads % view.ranks or (axis == 2 and not heads):
        return f"{heads} heads cannot be cut in {view.ranks}"
    return Choice(
        needs=_first(view, cut),
        gives=(cut,),
        attributes={"num_heads": heads // view.ranks} if heads else {},
    )


def _text(dims: Dims) -> str:
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in dims) + "]"


RULES: dict[str, Rule] = {
    **dict.fromkeys(LABELS, _labelled),
    **dict.fromkeys(["Conv", "ConvTranspose"], _grouped_convolution),
    "Concat": _concat,
    "Expand": _expand,
    "GroupNormalization": _group_norm,
    **dict.fromkeys(["Flatten", "Reshape"], _reshape),
    "Resize": _resize,
    "Shape": _shape,
    "Size": _shape,
    "Slice": _slice,
    "Split": _split,
    **dict.fromkeys(_ATTENTION, _attention),
    **dict.fromkeys(["RotaryEmbedding", "com.microsoft::RotaryEmbedding"], _rotary),
}

WEIGHTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(["MatMul", "Gemm", "com.microsoft::FusedMatMul"], (0, 1)),
    **dict.fromkeys(["Conv", "ConvTranspose"], (1,)),
    "Einsum": (0, 1),
    "Gather": (0,),
}
"""The inputs whose cut may start a chain, where they are constants."""
