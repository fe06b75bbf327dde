"""Models whose weights are large: one of square products, and the example's `small` UNet."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bare_processes import unet_inputs
from build_unet import SIZES, build_unet
from numpy.typing import NDArray
from onnx import TensorProto, helper

from mcinfer import EngineOptions, Master
from mcinfer.model_cache.cache import Cache

SIDE = 2048
LAYERS = 24
WEIGHTS = tuple(f"weight_{layer}" for layer in range(LAYERS))
WEIGHT_BYTES = SIDE * SIDE * 4

OPSET_VERSION = 20
IR_VERSION = 9

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeModel:
    """A model to measure with.

    Attributes:
        name: What it is called in tables.
        path: Its file.
        weight_bytes: Of all its weights.
        rows: Of the batch that one worker runs.
        inputs: Inputs of so many rows, by name.
    """

    name: str
    path: Path
    weight_bytes: int
    rows: int
    inputs: Callable[[int], dict[str, NDArray[Any]]]


def large_models(folder: Path) -> tuple[LargeModel, ...]:
    """Both, written into a folder."""
    products = products_model(folder / "products.onnx")
    unet = LargeModel(
        name="small UNet",
        path=build_unet(folder / "unet.onnx", "small"),
        weight_bytes=SIZES["small"].parameters * 4,
        rows=1,
        inputs=unet_inputs,
    )
    return products, unet


# The model of products.


def products_model(path: Path) -> LargeModel:
    """x, y float32["batch", SIDE]: LAYERS times a product with a square weight, then Relu.

    Memory holds one weight at a time; they are in a file beside the model.
    """
    nodes, initializers, last = [], [], "x"
    with _data_file(path).open("wb") as data:
        for layer, weight in enumerate(drawn_weights(0)):
            name, product = WEIGHTS[layer], f"product_{layer}"
            output = "y" if layer == LAYERS - 1 else f"relu_{layer}"
            nodes.append(helper.make_node("MatMul", [last, name], [product]))
            nodes.append(helper.make_node("Relu", [product], [output]))
            initializers.append(_external(name, data.tell(), _data_file(path).name))
            weight.tofile(data)
            last = output
    sides: list[str | int] = ["batch", SIDE]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, sides)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, sides)],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET_VERSION)])
    model.ir_version = IR_VERSION
    path.write_bytes(model.SerializeToString())
    return LargeModel(
        name=f"{LAYERS} MatMul layers",
        path=path,
        weight_bytes=LAYERS * WEIGHT_BYTES,
        rows=8,
        inputs=products_inputs,
    )


def products_inputs(rows: int) -> dict[str, NDArray[Any]]:
    """Inputs of so many rows."""
    return {"x": np.random.default_rng(0).standard_normal((rows, SIDE), np.float32)}


def drawn_weights(seed: int) -> Iterator[Array]:
    """The weights of all layers, one after another; the scale keeps the activations' size through Relu.

    A variance of 2 / fan-in: He et al. 2015, "Delving Deep into Rectifiers".
    """
    rng = np.random.default_rng(seed)
    for _ in range(LAYERS):
        weight = rng.standard_normal((SIDE, SIDE), np.float32)
        weight *= np.float32(math.sqrt(2 / SIDE))
        yield weight


def products_answer(model: LargeModel, x: Array, replaced: Mapping[str, Array]) -> Array:
    """What NumPy makes of it, with some weights replaced."""
    stored = np.memmap(_data_file(model.path), np.float32, "r", shape=(LAYERS, SIDE, SIDE))
    for name, weight in zip(WEIGHTS, stored, strict=True):
        x = np.maximum(x @ replaced.get(name, weight), 0)
    return x


def _data_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _external(name: str, offset: int, location: str) -> TensorProto:
    """A weight that lies in the data file; every one begins at a page, so that it can be mapped."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=(SIDE, SIDE))
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", WEIGHT_BYTES)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


# Pools of it.


def pool(
    model: LargeModel, workers: int, *, prepared: bool, variable_weights: Sequence[str] = ()
) -> Master:
    """A pool, not started yet, of workers with one thread each.

    Args:
        model: What it runs.
        workers: How many.
        prepared: Whether they map one prepared copy, or each load the model for themselves.
        variable_weights: See `EngineOptions`.
    """
    options = EngineOptions(
        threads=1,
        prepare="always" if prepared else "never",
        variable_weights=variable_weights,
    )
    return Master(model.path, workers, options=options)


def check_prepared() -> None:
    """Raise unless some process holds a prepared model: without one, what is measured is another thing."""
    if not any(entry.in_use for entry in Cache.default().entries()):
        raise RuntimeError("no prepared model is in use: it could not be prepared or not be mapped")


def run_every_worker(master: Master, inputs: Mapping[str, NDArray[Any]], runs: int) -> None:
    """Run batches, split over all workers, until each of them has done so many runs more."""
    wanted = [worker.runs + runs for worker in master.statistics().workers]
    for _ in range(10 * runs):
        master.predict(inputs, shards=len(wanted))
        done = [worker.runs for worker in master.statistics().workers]
        if all(a >= b for a, b in zip(done, wanted, strict=True)):
            return
    raise RuntimeError(f"a worker was left out: runs {done}, expected at least {wanted}")
