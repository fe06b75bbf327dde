"""Operators as sums over labelled axes, in the manner of Einstein's notation.

An axis has the same label wherever it runs along the same positions. MatMul is ``mk, kn -> mn``: the rows m
or the columns n of an operand may be cut, and the result is cut there; if k is cut, the result is a partial
sum. An axis along which positions depend on each other (the axis of a Softmax) has no label, so it is never
cut.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcinfer.ranks.slicing.graphs import View, axis_of
from mcinfer.ranks.slicing.placements import Dims

Label = int | str | None
Labels = tuple[Label, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The labels of a node's inputs and outputs; `sums` are the labels that are summed over."""

    inputs: Sequence[Labels]
    outputs: Sequence[Labels]
    sums: frozenset[Label] = frozenset()
    bias: int | None = None
    bias_axis: int | None = None


def _broadcast(dims: Dims, labels: Labels) -> Labels:
    """The last of the labels, for an operand that may have fewer axes, or axes of size 1."""
    last = labels[len(labels) - len(dims) :]
    return tuple(None if dim == 1 else name for dim, name in zip(dims, last, strict=True))


def _elementwise(view: View) -> Axes | str:
    rank = len(view.output_dims())
    return Axes(
        inputs=[
            _broadcast(view.dims(index), tuple(range(rank))) for index in range(len(view.inputs))
        ],
        outputs=[tuple(range(rank)) for _ in view.outputs],
    )


def _dropout(view: View) -> Axes | str:
    if len([name for name in view.outputs if name]) > 1 or view.has(2):
        return "a Dropout that trains"
    return Axes(
        inputs=[tuple(range(len(view.dims(0)))), *(() for _ in view.inputs[1:])],
        outputs=[tuple(range(len(view.dims(0)))) for _ in view.outputs],
    )


def _matmul(view: View) -> Axes | str:
    first, second = view.dims(0), view.dims(1)
    if not first or not second:
        return "an operand has no axes"
    batches: Labels = tuple(range(max(len(first), len(second), 2) - 2))
    one: Labels = ("k",) if len(first) == 1 else (*_broadcast(first[:-2], batches), "m", "k")
    two: Labels = ("k",) if len(second) == 1 else (*_broadcast(second[:-2], batches), "k", "n")
    if view.attribute("transBatchA", 0) or view.attribute("transBatchB", 0):
        return "a FusedMatMul with transposed batches"
    if view.attribute("transA", 0):
        one = (*one[:-2], "k", "m")
    if view.attribute("transB", 0):
        two = (*two[:-2], "n", "k")
    rows: Labels = () if len(first) == 1 else ("m",)
    columns: Labels = () if len(second) == 1 else ("n",)
    return Axes(inputs=[one, two], outputs=[(*batches, *rows, *columns)], sums=frozenset(["k"]))


def _gemm(view: View) -> Axes | str:
    one: Labels = ("k", "m") if view.attribute("transA", 0) else ("m", "k")
    two: Labels = ("n", "k") if view.attribute("transB", 0) else ("k", "n")
    inputs = [one, two]
    if len(view.inputs) == 3:
        inputs.append(_broadcast(view.dims(2), ("m", "n")))
    return Axes(
        inputs=inputs,
        outputs=[("m", "n")],
        sums=frozenset(["k"]),
        bias=2 if view.has(2) else None,
    )


def _einsum(view: View) -> Axes | str:
    equation = view.attribute("equation", b"").decode().replace(" ", "")
    if not re.fullmatch(r"[A-Za-z]+(,[A-Za-z]+)*->[A-Za-z]*", equation):
        return f"equation {equation!r}"
    left, result = equation.split("->")
    inputs: list[Labels] = [tuple(operand) for operand in left.split(",")]
    return Axes(
        inputs=inputs,
        outputs=[tuple(result)],
        sums=frozenset(name for operand in inputs for name in operand if name not in result),
    )


def _convolution(view: View) -> Axes | str:
    rank = len(view.dims(0))
    rest: Labels = (None,) * (rank - 2)
    kernel: Labels = ("i", "o") if view.operator == "ConvTranspose" else ("o", "i")
    inputs: list[Labels] = [("b", "i", *rest), (*kernel, *rest)]
    if len(view.inputs) == 3:
        inputs.append(("o",) if view.has(2) else ())
    return Axes(
        inputs=inputs,
        outputs=[("b", "o", *rest)],
        sums=frozenset(["i"]),
        bias=2 if view.has(2) else None,
        bias_axis=1,
    )


def _channels(view: View) -> Axes | str:
    """Each channel by itself: pooling, and norms over an image; other inputs are one number for a channel."""
    rest: Labels = (None,) * (len(view.dims(0)) - 2)
    if len([name for name in view.outputs if name]) > 1:
        return "it has several outputs"
    others: list[Labels] = [("c",) if name else () for name in view.inputs[1:]]
    return Axes(inputs=[("b", "c", *rest), *others], outputs=[("b", "c", *rest)])


def _transpose(view: View) -> Axes | str:
    rank = len(view.dims(0))
    perm = view.attribute("perm", range(rank - 1, -1, -1))
    return Axes(inputs=[tuple(range(rank))], outputs=[tuple(perm)])


def _all_but(rank: int, axes: Sequence[int]) -> Labels:
    return tuple(None if axis in axes else axis for axis in range(rank))


def _unlabelled(view: View, first: int) -> list[Labels]:
    """For the inputs from one on, which are never cut."""
    return [(None,) * len(view.dims(index)) for index in range(first, len(view.inputs))]


def _softmax(view: View) -> Axes | str:
    rank = len(view.dims(0))
    if view.graph.opset < 13:  # all axes from this one on are one
        labels = _all_but(rank, range(axis_of(view.attribute("axis", 1), rank), rank))
    else:
        labels = _all_but(rank, [axis_of(view.attribute("axis", -1), rank)])
    return Axes(inputs=[labels], outputs=[labels])


def _layer_norm(view: View) -> Axes | str:
    rank = len(view.dims(0))
    labels = _all_but(rank, range(axis_of(view.attribute("axis", -1), rank), rank))
    return Axes(inputs=[labels, *_unlabelled(view, 1)], outputs=[labels for _ in view.outputs])


def _skip_layer_norm(view: View) -> Axes | str:
    rank = len(view.dims(0))
    labels = _all_but(rank, [rank - 1])
    skip = _broadcast(view.dims(1), labels)
    if any(view.outputs[1:3]):
        return "it gives mean and deviation"
    return Axes(
        inputs=[labels, skip, *_unlabelled(view, 2)], outputs=[labels for _ in view.outputs]
    )


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
    keep = view.attribute("keepdims", 1)
    sums = view.operator == "ReduceSum"
    labels: Labels = tuple(range(rank)) if sums else _all_but(rank, axes)
    kept = _all_but(rank, axes)
    result = kept if keep else tuple(name for axis, name in enumerate(kept) if axis not in axes)
    inputs: list[Labels] = [labels, *((None,) for _ in view.inputs[1:])]
    return Axes(inputs=inputs, outputs=[result], sums=frozenset(axes if sums else ()))


def _gather(view: View) -> Axes | str:
    rank = len(view.dims(0))
    axis = axis_of(view.attribute("axis", 0), rank)
    data = _all_but(rank, [axis])
    indices: Labels = tuple(f"i{number}" for number in range(len(view.dims(1))))
    return Axes(inputs=[data, indices], outputs=[(*data[:axis], *indices, *data[axis + 1 :])])


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
    longer = _all_but(rank, [axis_of(axis, rank) for axis in axes])
    shorter = tuple(name for name in longer if name is not None)
    one, other = (shorter, longer) if inserts else (longer, shorter)
    return Axes(inputs=[one, *((None,) for _ in view.inputs[1:])], outputs=[other])


def _unmoved(view: View) -> Axes | str:
    """Only the axes along which nothing moves: Tile, Pad and Resize by constants."""
    rank = len(view.dims(0))
    still: Sequence[bool] | None
    if view.operator == "Tile":
        repeats = view.integers(1)
        still = [repeat == 1 for repeat in repeats or ()]
    elif view.operator == "Pad":
        pads = None if view.has(3) else view.argument("pads", 1)  # with axes, pads are of some only
        still = [not pads[axis] and not pads[axis + rank] for axis in range(rank)] if pads else None
    else:
        scales = view.graph.numbers(view.inputs[2]) if view.has(2) else None
        still = [scale == 1 for scale in scales or ()]
        if view.attribute("axes", None) is not None or view.has(1):
            still = None
    if not still:
        return "what it does along each axis is unknown"
    labels = tuple(axis if fixed else None for axis, fixed in enumerate(still))
    return Axes(inputs=[labels, *_unlabelled(view, 1)], outputs=[labels])


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
    **dict.fromkeys(["Conv", "ConvTranspose"], _convolution),
    **dict.fromkeys(["AveragePool", "GlobalAveragePool", "GlobalMaxPool"], _channels),
    **dict.fromkeys(["BatchNormalization", "InstanceNormalization", "MaxPool"], _channels),
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
