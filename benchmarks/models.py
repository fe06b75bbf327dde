"""Models to measure with, and their inputs; all weights are random and seeded.

The same seed gives the same bytes with the same NumPy. The scale of the weights keeps values near 1 through
all layers, so a relative difference says the same in each of them.
"""

import math
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "sd_dual_core"))

from build_unet import CONTEXT_TOKENS, LATENT_CHANNELS, SIZES, build_unet

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

OPSET_VERSION = 20  # the first with Gelu
IR_VERSION = 9

TOKENS = 32
"""Of a row of the small encoder."""

MLP_LAYERS = 24
MLP_WIDTH = 2048
"""403 MB of weights."""

BERT = {"layers": 12, "width": 768, "heads": 12}
"""The sizes of BERT-base (Devlin et al. 2018): 340 MB of weights without the embeddings."""

_PAGE = 4096
"""Bytes at which external weights are aligned, so that they can be mapped."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to measure with.

    Attributes:
        name: What tables call it.
        path: Its file.
        inputs: One row, or a few where `name` says so.
    """

    name: str
    path: Path
    inputs: Arrays

    @property
    def weight_bytes(self) -> int:
        """Of its files, which are weights but for some KB."""
        files = [self.path, self.path.with_name(f"{self.path.name}.data")]
        return sum(file.stat().st_size for file in files if file.exists())


class _Graph:
    """Collects nodes and weights; the weights go to a data file, where there is one."""

    def __init__(self, data: BinaryIO | None, location: str) -> None:
        self._rng = np.random.default_rng(0)
        self._data = data
        self._location = location
        self._nodes: list[Any] = []
        self._weights: list[TensorProto] = []

    def node(self, op: str, name: str, *inputs: str, **attributes: int | float | list[int]) -> str:
        """Add a node, whose output has its name; the name."""
        node = helper.make_node(op, inputs, [name], name=name)
        node.attribute.extend(helper.make_attribute(*item) for item in attributes.items())
        self._nodes.append(node)
        return name

    def weight(self, name: str, *shape: int, mean: float = 0.0, std: float = 0.02) -> str:
        """Add a float32 weight, drawn from a normal distribution; its name."""
        values = self._rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
        raw = (values + np.float32(mean)).astype("<f4", copy=False).tobytes()
        if self._data is None or len(raw) < _PAGE:
            tensor = helper.make_tensor(name, TensorProto.FLOAT, shape, raw, raw=True)
        else:
            self._data.seek(-self._data.tell() % _PAGE, 1)
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
            tensor.data_location = TensorProto.EXTERNAL
            place = (self._location, self._data.tell(), len(raw))
            for key, value in zip(("location", "offset", "length"), place, strict=True):
                tensor.external_data.add(key=key, value=str(value))
            self._data.write(raw)
        self._weights.append(tensor)
        return name

    def integers(self, name: str, *values: int) -> str:
        """Add a constant int64[len(values)]; its name."""
        tensor = helper.make_tensor(name, TensorProto.INT64, [len(values)], list(values))
        self._weights.append(tensor)
        return name

    def linear(self, name: str, x: str, width: int, out: int, *, gain: float = 1.0) -> str:
        """Map the last axis from `width` to `out`, by weights of the variance gain**2 / fan-in."""
        weight = self.weight(f"{name}.weight", width, out, std=gain / math.sqrt(width))
        product = self.node("MatMul", f"{name}.product", x, weight)
        return self.node("Add", name, product, self.weight(f"{name}.bias", out))

    def layer_norm(self, name: str, x: str, width: int) -> str:
        """Normalise the last axis (Ba et al. 2016)."""
        scale = self.weight(f"{name}.weight", width, mean=1.0)
        bias = self.weight(f"{name}.bias", width)
        return self.node("LayerNormalization", name, x, scale, bias, axis=-1, epsilon=1e-5)

    def attention(self, name: str, x: str, width: int, heads: int) -> str:
        """Add softmax(q k^T / sqrt(width of a head)) v (Vaswani et al. 2017) and its last product."""
        split = self.integers(f"{name}.split", 0, 0, heads, width // heads)
        joined = self.integers(f"{name}.joined", 0, 0, width)
        parts = []
        for part, order in (
            ("query", [0, 2, 1, 3]),
            ("key", [0, 2, 3, 1]),
            ("value", [0, 2, 1, 3]),
        ):
            # The scale of the scores, one over the square root of a head's width, is in the queries.
            gain = (width // heads) ** -0.5 if part == "query" else 1.0
            one = self.linear(f"{name}.{part}", x, width, width, gain=gain)
            one = self.node("Reshape", f"{name}.{part}.heads", one, split)
            parts.append(self.node("Transpose", f"{name}.{part}.turned", one, perm=order))
        query, key, value = parts
        scores = self.node("MatMul", f"{name}.products", query, key)
        weights = self.node("Softmax", f"{name}.softmax", scores, axis=-1)
        mixed = self.node("MatMul", f"{name}.mixed", weights, value)
        mixed = self.node("Transpose", f"{name}.mixed.turned", mixed, perm=[0, 2, 1, 3])
        mixed = self.node("Reshape", f"{name}.mixed.joined", mixed, joined)
        return self.linear(f"{name}.output", mixed, width, width)

    def encoder_layer(self, name: str, x: str, width: int, heads: int) -> str:
        """Add attention and a feed-forward layer, each added to its input and normalised after that."""
        y = self.attention(f"{name}.attention", x, width, heads)
        y = self.node("Add", f"{name}.attention.sum", x, y)
        x = self.layer_norm(f"{name}.attention.norm", y, width)
        y = self.linear(f"{name}.inner", x, width, 4 * width)
        y = self.node("Gelu", f"{name}.inner.gelu", y)
        y = self.linear(f"{name}.output", y, 4 * width, width)
        return self.layer_norm(f"{name}.norm", self.node("Add", f"{name}.sum", x, y), width)

    def model(self, inputs: Sequence[ValueInfoProto], output: ValueInfoProto) -> ModelProto:
        """All of it as a model; the output is that of the last node."""
        self._nodes[-1].output[0] = output.name
        graph = helper.make_graph(self._nodes, "benchmark", inputs, [output], self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET_VERSION)])
        model.ir_version = IR_VERSION
        return model


def _x_and_y(sides: Sequence[str | int]) -> list[ValueInfoProto]:
    return [helper.make_tensor_value_info(name, TensorProto.FLOAT, sides) for name in "xy"]


def _write(path: Path, model: ModelProto) -> Path:
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def identity_model(path: Path) -> Path:
    """A model that copies its input: y = x, float32["batch", "elements"]."""
    graph = _Graph(None, "")
    graph.node("Identity", "y", "x")
    x, y = _x_and_y(["batch", "elements"])
    return _write(path, graph.model([x], y))


def mlp(
    path: Path, layers: int = MLP_LAYERS, width: int = MLP_WIDTH, *, external_data: bool = True
) -> Path:
    """x, y float32["batch", width]: a square product, a bias and Relu in each layer, no Relu in the last.

    The variance of the weights keeps the size of values through Relu (He et al. 2015). Those of layer n are
    `layers.n.weight`; with `external_data` they are in `<name>.data`, and memory holds one at a time.
    """
    data = path.with_name(f"{path.name}.data")
    with ExitStack() as stack:
        graph = _Graph(stack.enter_context(data.open("wb")) if external_data else None, data.name)
        x = "x"
        for layer in range(layers):
            last, name = layer == layers - 1, f"layers.{layer}"
            x = graph.linear(name, x, width, width, gain=1.0 if last else math.sqrt(2))
            if not last:
                x = graph.node("Relu", f"{name}.relu", x)
        x, y = _x_and_y(["batch", width])
        return _write(path, graph.model([x], y))


def encoder_model(
    path: Path,
    *,
    layers: int = 2,
    width: int = 256,
    heads: int = 4,
    tokens: int | str = TOKENS,
    external_data: bool = False,
) -> Path:
    """A BERT-like encoder: x, y float32["batch", tokens, width].

    As it comes, one row takes about 1 ms on one thread of a server's processor with AVX-512.
    """
    data = path.with_name(f"{path.name}.data")
    with ExitStack() as stack:
        graph = _Graph(stack.enter_context(data.open("wb")) if external_data else None, data.name)
        x = "x"
        for layer in range(layers):
            x = graph.encoder_layer(f"layers.{layer}", x, width, heads)
        given, made = _x_and_y(["batch", tokens, width])
        return _write(path, graph.model([given], made))


def bert_model(path: Path) -> Path:
    """An encoder of BERT-base's size, its weights in a file beside it, for any number of tokens."""
    return encoder_model(path, **BERT, tokens="sequence", external_data=True)


def normal(*shape: int) -> Arrays:
    """An input `x` of this shape, of normal values."""
    return {"x": np.random.default_rng(1).standard_normal(shape, np.float32)}


def unet_model(path: Path, size: str = "small", *, half: bool = False) -> Path:
    """The example's UNet."""
    return build_unet(path, size, half=half)


def unet_inputs(rows: int, name: str = "small") -> Arrays:
    """Inputs of the example's UNet of a size, of so many rows."""
    size = SIZES[name]
    rng = np.random.default_rng(0)
    side = size.latent_side
    return {
        "sample": rng.standard_normal((rows, LATENT_CHANNELS, side, side), np.float32),
        "timestep": np.array([500], np.int64),
        "encoder_hidden_states": rng.standard_normal(
            (rows, CONTEXT_TOKENS, size.context_channels), np.float32
        ),
    }


def mobilenet_model(path: Path) -> Path:
    """MobileNetV2's structure, as the quick start has it, with any number of rows."""
    builder = runpy.run_path(str(EXAMPLES / "quick_start" / "build_mobilenet.py"))
    builder["build_mobilenet"](path, batch=None)
    return path


def usual_models(folder: Path) -> list[Model]:
    """A UNet, two encoders and a classifier, written into a folder."""
    encoder = encoder_model(folder / "encoder.onnx")
    large = encoder_model(folder / "large.onnx", layers=10, width=512)
    mobilenet = mobilenet_model(folder / "mobilenet.onnx")
    image = np.random.default_rng(0).random((1, 224, 224, 3), np.float32)
    unet = unet_model(folder / "unet.onnx")
    return [
        Model(name="UNet `small`", path=unet, inputs=unet_inputs(1)),
        Model(name="encoder, 1 ms", path=encoder, inputs=normal(1, TOKENS, 256)),
        Model(name="encoder, 20 ms", path=large, inputs=normal(1, TOKENS, 512)),
        Model(name="MobileNetV2's structure", path=mobilenet, inputs={"image": image}),
    ]
