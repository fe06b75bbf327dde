"""Models cut by hand into slices for several ranks, and what the whole models give."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from mcinfer.ranks.slicing.plans import METADATA_KEY
from tests.text_models import normal_weights, text_model

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliced:
    """The files of a whole model, and of its slices by rank."""

    whole: Path
    slices: tuple[Path, ...]

    def expected(self, inputs: Arrays) -> list[NDArray[Any]]:
        session = ort.InferenceSession(self.whole, providers=["CPUExecutionProvider"])
        outputs: list[NDArray[Any]] = session.run(None, dict(inputs))
        return outputs


def save(
    path: Path,
    text: str,
    weights: Mapping[str, Any] | None = None,
    *,
    external: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model of `text_model`; with `external`, its weights lie in a file beside it."""
    model = text_model(text, weights)
    if metadata is not None:
        helper.set_model_props(model, {METADATA_KEY: json.dumps(metadata)})
    data = path.with_suffix(".data").name
    onnx.save(model, str(path), save_as_external_data=external, location=data, size_threshold=0)
    return path


def save_ranks(
    folder: Path, text: str, weights: Sequence[Mapping[str, Any]], *, external: bool = False
) -> tuple[Path, ...]:
    """Write a slice of one graph for each rank, with weights of its own."""
    return tuple(
        save(folder / f"model{rank}.onnx", text, own, external=external)
        for rank, own in enumerate(weights)
    )


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


def mlp(folder: Path, ranks: int, *, layers: int = 3, width: int = 16) -> Sliced:
    """Layers of ``x + relu(x W1 + b1) W2 + b2``: W1 cut by columns, W2 by rows, then the sum."""
    hidden = 4 * width
    weights: dict[str, NDArray[Any]] = {}
    for n in range(layers):
        shapes = {
            "up": (width, hidden),
            "rise": (hidden,),
            "down": (hidden, width),
            "fall": (width,),
        }
        weights |= normal_weights(n, **{f"{name}{n}": shape for name, shape in shapes.items()})
    values = ["x", *(f"x{n}" for n in range(1, layers)), "y"]

    def text(operator: str) -> str:
        body = "".join(
            f"""
            raised{n} = MatMul({values[n]}, up{n})  biased{n} = Add(raised{n}, rise{n})
            active{n} = Relu(biased{n})  part{n} = MatMul(active{n}, down{n})
            sum{n} = {operator}(part{n})
            lowered{n} = Add(sum{n}, fall{n})  {values[n + 1]} = Add({values[n]}, lowered{n})"""
            for n in range(layers)
        )
        return f"(float[batch,{width}] x) => (float[batch,{width}] y) {{ {body} }}"

    def slice_of(name: str, array: NDArray[Any], rank: int) -> NDArray[Any]:
        axis = {"up": 1, "rise": 0, "down": 0}.get(name.rstrip("0123456789"))
        return array if axis is None else np.split(array, ranks, axis)[rank].copy()

    own = [{k: slice_of(k, array, rank) for k, array in weights.items()} for rank in range(ranks)]
    slices = save_ranks(folder, text("AllReduce"), own, external=True)
    whole = save(folder / "whole.onnx", text("Identity"), weights)
    return Sliced(whole=whole, slices=slices)


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
        # An index that is outside of the table if the code is this one; it needs the values so far.
        body = "".join(
            f"""
            total{k} = ReduceSum<keepdims=0>({f"sum{k - 1}" if k else given})
            here{k} = Mul(total{k}, zero)  is{k} = Add(here{k}, code)
            index{k} = Equal(is{k}, place{k})  row{k} = Cast<to=7>(index{k})
            one{k} = Gather(table, row{k})  part{k} = Mul({f"sum{k - 1}" if k else given}, one{k})
            {f"sum{k} = AllReduce(part{k})" if k < FRAGILE_PLACES - 1 else ""}"""
            for k in range(FRAGILE_PLACES)
        )
        skips = stages > 2 and stage == last
        end = f"part{FRAGILE_PLACES - 1}"
        body += f"{made} = Add({end}, x1)" if skips else f"{made} = Identity({end})"
        receives = {given: rank - tensor} if stage else {}
        sends = {made: [rank + tensor]} if stage < last else {}
        values = [made]
        if skips:
            receives["x1"] = t
        if stage == 0 and stages > 1:
            body += f"  negative = Neg({made})"
            values.append("negative")
            if stages > 2:
                sends[made].append(last * tensor + t)
        taken = ", ".join(f"float[{width}] {name}" for name in receives or [given])
        results = ", ".join(f"float[{width}] {name}" for name in values)
        numbers = {
            f"place{k}": np.float32(FRAGILE_PLACES * rank + k) for k in range(FRAGILE_PLACES)
        }
        slices.append(
            save(
                folder / f"model{rank}.onnx",
                f"({taken}, float code) => ({results}) {{ {body} }}",
                numbers | {"zero": np.float32(0), "table": np.ones(1, np.float32)},
                metadata=place(
                    rank, outputs, [width], tensor=tensor, pipeline=stages,
                    inputs={"x": [width], "code": []}, receives=receives, sends=sends,
                ),
            )
        )  # fmt: skip
    return slices
