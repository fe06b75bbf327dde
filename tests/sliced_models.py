"""Models cut by hand into slices for several ranks, and what the whole models give."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from mcinfer.ranks.slicing.plans import METADATA_KEY

Arrays = Mapping[str, NDArray[Any]]
Collective = Callable[..., NodeProto]
"""Makes the node that sums (or gathers, with an axis) a value over the ranks."""

OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliced:
    """The files of a whole model, and of its slices by rank."""

    whole: Path
    slices: tuple[Path, ...]

    def expected(self, inputs: Arrays) -> list[NDArray[Any]]:
        session = ort.InferenceSession(self.whole, providers=["CPUExecutionProvider"])
        outputs: list[NDArray[Any]] = session.run(None, dict(inputs))
        return outputs


def value(name: str, *shape: int | str | None) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def save(
    path: Path,
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    weights: Arrays,
    *,
    external: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model; with `external`, its weights lie in a file beside it."""
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "slice", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=OPSETS, ir_version=10)
    if metadata is not None:
        helper.set_model_props(model, {METADATA_KEY: json.dumps(metadata)})
    onnx.save(
        model,
        str(path),
        save_as_external_data=external,
        location=path.with_suffix(".data").name,
        size_threshold=0,
    )
    return path


def place(
    rank: int,
    outputs: Sequence[str],
    shape: Sequence[int | str],
    *,
    tensor: int = 1,
    pipeline: int = 1,
    inputs: Mapping[str, Sequence[int | str]] | None = None,
    receives: Mapping[str, int] | None = None,
    sends: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """The metadata of a slice; all outputs of the model have one shape, and so has its input `x`."""
    taken = {"x": shape} if inputs is None else inputs
    return {
        "version": 1,
        "rank": rank,
        "tensor": tensor,
        "pipeline": pipeline,
        "inputs": [[name, "float32", [*dims]] for name, dims in taken.items()],
        "outputs": [[name, "float32", [*shape]] for name in outputs],
        "receives": receives or {},
        "sends": sends or {},
    }


def all_reduce(given: str, output: str) -> NodeProto:
    return helper.make_node(
        "AllReduce", [given], [output], name=f"reduce {given}", domain="com.microsoft"
    )


def all_gather(given: str, output: str, ranks: int, axis: int) -> NodeProto:
    return helper.make_node(
        "AllGather",
        [given],
        [output],
        name=f"gather {given}",
        domain="com.microsoft",
        group_size=ranks,
        axis=axis,
    )


def dist_collective(given: str, output: str, operation: str, **attributes: Any) -> NodeProto:
    """As NVIDIA's Polygraphy writes it."""
    values = {"root": -1, "group_size": 0, **attributes}
    return helper.make_node(
        "DistCollective",
        [given],
        [output],
        name=f"collective {given}",
        collective_operation=operation,
        **values,
    )


def mlp(
    folder: Path,
    ranks: int,
    *,
    layers: int = 3,
    width: int = 16,
    dtype: str = "float32",
    collective: Collective = all_reduce,
    external: bool = True,
) -> Sliced:
    """Layers of ``x + relu(x W1 + b1) W2 + b2``: W1 cut by columns, W2 by rows, then the sum."""
    rng = np.random.default_rng(7)
    hidden = 4 * width
    weights: dict[str, NDArray[Any]] = {}
    for layer in range(layers):
        weights |= {
            f"up{layer}": rng.normal(0, width**-0.5, (width, hidden)).astype(dtype),
            f"rise{layer}": rng.normal(0, 0.1, hidden).astype(dtype),
            f"down{layer}": rng.normal(0, hidden**-0.5, (hidden, width)).astype(dtype),
            f"fall{layer}": rng.normal(0, 0.1, width).astype(dtype),
        }

    def nodes(joined: bool) -> list[NodeProto]:
        made = []
        for layer in range(layers):
            x = "x" if layer == 0 else f"x{layer}"
            y = "y" if layer == layers - 1 else f"x{layer + 1}"
            made += [
                helper.make_node("MatMul", [x, f"up{layer}"], [f"raised{layer}"]),
                helper.make_node("Add", [f"raised{layer}", f"rise{layer}"], [f"biased{layer}"]),
                helper.make_node("Relu", [f"biased{layer}"], [f"active{layer}"]),
                helper.make_node("MatMul", [f"active{layer}", f"down{layer}"], [f"part{layer}"]),
                collective(f"part{layer}", f"sum{layer}")
                if joined
                else helper.make_node("Identity", [f"part{layer}"], [f"sum{layer}"]),
                helper.make_node("Add", [f"sum{layer}", f"fall{layer}"], [f"lowered{layer}"]),
                helper.make_node("Add", [x, f"lowered{layer}"], [y]),
            ]
        return made

    def slice_of(name: str, array: NDArray[Any], rank: int) -> NDArray[Any]:
        axis = {"up": 1, "rise": 0, "down": 0}.get(name.rstrip("0123456789"))
        return array if axis is None else np.split(array, ranks, axis)[rank].copy()

    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x, y = (helper.make_tensor_value_info(n, element, ["batch", width]) for n in "xy")
    whole = save(folder / "whole.onnx", nodes(False), [x], [y], weights)
    slices = [
        save(
            folder / f"model{rank}.onnx",
            nodes(True),
            [x],
            [y],
            {name: slice_of(name, array, rank) for name, array in weights.items()},
            external=external,
        )
        for rank in range(ranks)
    ]
    return Sliced(whole=whole, slices=tuple(slices))


def attention(folder: Path, ranks: int, *, heads: int = 4, width: int = 16) -> Sliced:
    """Self-attention; each rank has some of the heads. The queries are gathered, as an output."""
    rng = np.random.default_rng(11)
    weights = {
        name: rng.normal(0, width**-0.5, (width, width)).astype(np.float32) for name in "qkvo"
    }
    weights["bias"] = rng.normal(0, 0.1, width).astype(np.float32)

    def nodes(count: int) -> list[NodeProto]:
        """For so many heads."""
        made = [helper.make_node("Shape", ["x"], ["size"], end=2)]
        for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            made += [
                helper.make_node("MatMul", ["x", name], [f"{name}1"]),
                helper.make_node("Reshape", [f"{name}1", "by_head"], [f"{name}2"]),
                helper.make_node("Transpose", [f"{name}2"], [f"{name}3"], perm=perm),
            ]
        made += [
            helper.make_node("MatMul", ["q3", "k3"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
            helper.make_node("MatMul", ["weights", "v3"], ["mixed"]),
            helper.make_node("Transpose", ["mixed"], ["mixed2"], perm=[0, 2, 1, 3]),
            helper.make_node("Concat", ["size", "rest"], ["joined_shape"], axis=0),
            helper.make_node("Reshape", ["mixed2", "joined_shape"], ["mixed3"]),
            helper.make_node("MatMul", ["mixed3", "o"], ["part"]),
        ]
        if count == heads:
            made += [
                helper.make_node("Identity", ["part"], ["sum"]),
                helper.make_node("Identity", ["q1"], ["queries"]),
            ]
        else:
            made += [all_reduce("part", "sum"), all_gather("q1", "queries", ranks, axis=-1)]
        return [
            *made,
            helper.make_node("Add", ["sum", "bias"], ["biased"]),
            helper.make_node("Add", ["biased", "x"], ["y"]),
        ]

    def parts(rank: int, count: int) -> dict[str, NDArray[Any]]:
        """The weights of a rank with so many heads."""
        own = {"by_head": [0, 0, count, width // heads], "rest": [-1]}
        shapes = {name: np.array(shape, np.int64) for name, shape in own.items()}
        if count == heads:
            return weights | shapes
        columns = {name: np.split(weights[name], ranks, 1)[rank].copy() for name in "qkv"}
        return weights | columns | {"o": np.split(weights["o"], ranks)[rank].copy()} | shapes

    inputs = [value("x", "batch", "length", width)]
    outputs = [value("y", "batch", "length", width), value("queries", "batch", "length", width)]
    whole = save(folder / "whole.onnx", nodes(heads), inputs, outputs, parts(0, heads))
    count = heads // ranks
    slices = [
        save(folder / f"model{rank}.onnx", nodes(count), inputs, outputs, parts(rank, count))
        for rank in range(ranks)
    ]
    return Sliced(whole=whole, slices=tuple(slices))


def pipeline(folder: Path, stages: int, tensor: int = 1, *, width: int = 16) -> Sliced:
    """Three layers in two or three stages. The first layer's result goes to the last stage as well, and is an
    output; each layer is cut by columns and gathered.
    """
    rng = np.random.default_rng(5)
    weights = {
        name: rng.normal(0, width**-0.5, (width, width)).astype(np.float32)
        for name in ("w0", "w1", "w2")
    }

    def layer(number: int, given: str, joined: bool) -> list[NodeProto]:
        part, whole = f"part{number}", f"whole{number}"
        return [
            helper.make_node("MatMul", [given, f"w{number}"], [part]),
            all_gather(part, whole, tensor, 1)
            if joined
            else helper.make_node("Identity", [part], [whole]),
        ]

    def ends(joined: bool) -> list[list[NodeProto]]:
        return [
            [*layer(0, "x", joined), helper.make_node("Relu", ["whole0"], ["first"])],
            [*layer(1, "first", joined), helper.make_node("Relu", ["whole1"], ["second"])],
            [*layer(2, "second", joined), helper.make_node("Add", ["whole2", "first"], ["y"])],
        ]

    outputs = [value("y", "batch", width), value("first", "batch", width)]
    nodes = [node for part in ends(False) for node in part]
    whole = save(folder / "whole.onnx", nodes, [value("x", "batch", width)], outputs, weights)
    first, second, third = ends(tensor > 1)
    parts = {2: [first + second, third], 3: [first, second, third]}[stages]
    last = stages - 1
    # Of each value: the stage that makes it, and those that get it.
    passed = {"first": (0, range(1, stages)), "second": (last - 1, [last])}
    slices = []
    for stage, part in enumerate(parts):
        for t in range(tensor):
            received = {
                name: maker * tensor + t for name, (maker, to) in passed.items() if stage in to
            }
            sent = {
                name: [other * tensor + t for other in to]
                for name, (maker, to) in passed.items()
                if maker == stage
            }
            names = {0: ["first"], last: ["y"]}.get(stage, [])
            own = {name for node in part for name in node.input if name in weights}
            slices.append(
                save(
                    folder / f"model{stage * tensor + t}.onnx",
                    part,
                    [value(name, "batch", width) for name in received or ["x"]],
                    [value(name, "batch", width) for name in dict.fromkeys([*names, *sent])],
                    {name: np.split(weights[name], tensor, 1)[t].copy() for name in sorted(own)},
                    metadata=place(
                        stage * tensor + t,
                        ("y", "first"),
                        ("batch", width),
                        tensor=tensor,
                        pipeline=stages,
                        receives=received,
                        sends=sent,
                    ),
                )
            )
    return Sliced(whole=whole, slices=tuple(slices))


FRAGILE_PLACES = 3
"""Segments of each stage of `fragile`."""


def fragile(folder: Path, stages: int, tensor: int, *, width: int = 4) -> list[Path]:
    """Slices that fail where the input ``code`` says: in segment k of rank r if it is ``3 r + k``.

    Each stage sums its input over its ranks twice; the last one adds the first one's result, if there is one
    between them. Outputs: ``y``, and, in pipelines, the negative first result.
    """
    last = stages - 1
    outputs = ["y", "negative"] if stages > 1 else ["y"]
    slices = []
    for rank in range(stages * tensor):
        stage, t = divmod(rank, tensor)
        given = f"x{stage}" if stage else "x"
        made = f"x{stage + 1}" if stage < last else "y"
        skips = stages > 2 and stage == last
        nodes, current = [], given
        for k in range(FRAGILE_PLACES):
            names = {name: f"{name}{k}" for name in ("total", "here", "is", "index", "row", "one")}
            nodes += [
                # An index that is outside of the table if the code is this one; it needs the values so far.
                helper.make_node("ReduceSum", [current], [names["total"]], keepdims=0),
                helper.make_node("Mul", [names["total"], "zero"], [names["here"]]),
                helper.make_node("Add", [names["here"], "code"], [names["is"]]),
                helper.make_node("Equal", [names["is"], f"place{k}"], [names["index"]]),
                helper.make_node("Cast", [names["index"]], [names["row"]], to=TensorProto.INT64),
                helper.make_node("Gather", ["table", names["row"]], [names["one"]]),
                helper.make_node("Mul", [current, names["one"]], [f"part{k}"]),
            ]
            current = f"part{k}"
            if k < FRAGILE_PLACES - 1:
                nodes.append(all_reduce(current, f"sum{k}"))
                current = f"sum{k}"
        nodes.append(
            helper.make_node("Add", [current, "x1"], [made])
            if skips
            else helper.make_node("Identity", [current], [made])
        )
        receives = {given: rank - tensor} if stage else {}
        sends = {made: [rank + tensor]} if stage < last else {}
        if skips:
            receives["x1"] = t
        if stage == 0 and stages > 1:
            nodes.append(helper.make_node("Neg", [made], ["negative"]))
            if stages > 2:
                sends[made].append(last * tensor + t)
        places = {
            f"place{k}": np.array(FRAGILE_PLACES * rank + k, np.float32)
            for k in range(FRAGILE_PLACES)
        }
        slices.append(
            save(
                folder / f"model{rank}.onnx",
                nodes,
                [*(value(name, width) for name in receives or [given]), value("code")],
                [value(made, width), *([value("negative", width)] if stage == 0 < last else [])],
                places | {"zero": np.array(0, np.float32), "table": np.ones(1, np.float32)},
                metadata=place(
                    rank,
                    outputs,
                    [width],
                    tensor=tensor,
                    pipeline=stages,
                    inputs={"x": [width], "code": []},
                    receives=receives,
                    sends=sends,
                ),
            )
        )
    return slices
