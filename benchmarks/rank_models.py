"""Models to cut over ranks: layers of products, and an encoder of BERT's kind.

The weights are random and seeded: the same seed gives the same bytes with the same NumPy. Their scale keeps
values near 1 through all layers, so a relative difference says the same in each of them.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

OPSET_VERSION = 20  # the first with Gelu
IR_VERSION = 9

MLP_LAYERS = 24
MLP_WIDTH = 2048
"""403 MB of weights."""

BERT_LAYERS = 12
BERT_WIDTH = 768
BERT_HEADS = 12
"""The sizes of BERT-base (Devlin et al. 2018): 340 MB of weights without the embeddings."""

POSITIONS = 512
"""Most tokens of a row, for an encoder with embeddings."""

_PAGE = 4096
"""Bytes at which external weights are aligned, so that they can be mapped."""

Arrays = dict[str, NDArray[Any]]

_Attribute = int | float | list[int]


class _Graph:
    """Collects nodes and weights; the weights go to a data file, where there is one."""

    def __init__(self, seed: int, data: BinaryIO | None, location: str) -> None:
        self._rng = np.random.default_rng(seed)
        self._data = data
        self._location = location
        self._nodes: list[Any] = []
        self._weights: list[TensorProto] = []

    def node(
        self, op: str, name: str, *inputs: str, domain: str = "", **attributes: _Attribute
    ) -> str:
        """Add a node, whose output has its name; the name."""
        node = helper.make_node(op, inputs, [name], name=name, domain=domain)
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
        self._weights.append(
            helper.make_tensor(name, TensorProto.INT64, [len(values)], list(values))
        )
        return name

    def number(self, name: str, value: float) -> str:
        """Add a constant float32[]; its name."""
        self._weights.append(helper.make_tensor(name, TensorProto.FLOAT, [], [value]))
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

    def attention(self, name: str, x: str, width: int, heads: int, mask: str | None) -> str:
        """Add softmax(q k^T / sqrt(width of a head)) v (Vaswani et al. 2017) and its last product.

        `mask` is added to the scores, [batch, heads, sequence, sequence].
        """
        split = self.integers(f"{name}.split", 0, 0, heads, width // heads)
        joined = self.integers(f"{name}.joined", 0, 0, width)
        parts = []
        for part, order in (
            ("query", [0, 2, 1, 3]),
            ("key", [0, 2, 3, 1]),
            ("value", [0, 2, 1, 3]),
        ):
            one = self.linear(f"{name}.{part}", x, width, width)
            one = self.node("Reshape", f"{name}.{part}.heads", one, split)
            parts.append(self.node("Transpose", f"{name}.{part}.turned", one, perm=order))
        query, key, value = parts
        scale = self.number(f"{name}.scale", (width // heads) ** -0.5)
        scores = self.node("MatMul", f"{name}.products", query, key)
        scores = self.node("Mul", f"{name}.scores", scores, scale)
        if mask is not None:
            scores = self.node("Add", f"{name}.masked", scores, mask)
        shares = self.node("Softmax", f"{name}.shares", scores, axis=-1)
        mixed = self.node("MatMul", f"{name}.mixed", shares, value)
        mixed = self.node("Transpose", f"{name}.mixed.turned", mixed, perm=[0, 2, 1, 3])
        mixed = self.node("Reshape", f"{name}.mixed.joined", mixed, joined)
        return self.linear(f"{name}.output", mixed, width, width)

    def encoder_layer(self, name: str, x: str, width: int, heads: int, mask: str | None) -> str:
        """Add attention and a feed-forward layer, each added to its input and normalised after that."""
        y = self.attention(f"{name}.attention", x, width, heads, mask)
        y = self.node("Add", f"{name}.attention.sum", x, y)
        x = self.layer_norm(f"{name}.attention.norm", y, width)
        y = self.linear(f"{name}.inner", x, width, 4 * width)
        y = self.node("Gelu", f"{name}.inner.gelu", y)
        y = self.linear(f"{name}.output", y, 4 * width, width)
        return self.layer_norm(f"{name}.norm", self.node("Add", f"{name}.sum", x, y), width)

    def embedding(self, ids: str, width: int, vocabulary: int) -> str:
        """Add a token's vector and its position's, normalised: float32[batch, sequence, width]."""
        words = self.weight("embeddings.words", vocabulary, width, std=1.0)
        words = self.node("Gather", "embeddings.word", words, ids, axis=0)
        shape = self.node("Shape", "embeddings.shape", ids)
        one = self.integers("embeddings.one", 1)
        length = self.node("Gather", "embeddings.length", shape, one, axis=0)
        table = self.weight("embeddings.positions", POSITIONS, width, std=1.0)
        zero = self.integers("embeddings.zero", 0)
        places = self.node("Slice", "embeddings.position", table, zero, length, zero)
        total = self.node("Add", "embeddings.sum", words, places)
        return self.layer_norm("embeddings.norm", total, width)

    def attention_mask(self, mask: str) -> str:
        """Add what makes of int64[batch, sequence], 1 or 0, a term of the scores: 0 or -10,000."""
        axes = self.integers("mask.axes", 1, 2)
        mask = self.node("Unsqueeze", "mask.wide", mask, axes)
        mask = self.node("Cast", "mask.float", mask, to=TensorProto.FLOAT)
        mask = self.node("Sub", "mask.masked", self.number("mask.one", 1.0), mask)
        return self.node("Mul", "mask.term", mask, self.number("mask.least", -10_000.0))

    def model(self, inputs: Sequence[ValueInfoProto], output: ValueInfoProto) -> ModelProto:
        """All of it as a model; the output is that of the last node."""
        self._nodes[-1].output[0] = output.name
        graph = helper.make_graph(self._nodes, "ranks", inputs, [output], self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET_VERSION)])
        model.ir_version = IR_VERSION
        return model


def _open_data(path: Path, stack: ExitStack, external_data: bool) -> tuple[BinaryIO | None, str]:
    data = path.with_name(f"{path.name}.data")
    return (stack.enter_context(data.open("wb")) if external_data else None), data.name


# Layers of products.


def mlp(
    path: Path,
    *,
    layers: int = MLP_LAYERS,
    width: int = MLP_WIDTH,
    seed: int = 0,
    external_data: bool = False,
) -> Path:
    """x, y float32["batch", width]: a square product, a bias and Relu in each layer, no Relu in the last.

    The variance of the weights keeps the size of values through Relu (He et al. 2015).

    Args:
        path: File to write.
        layers: How many, at least 1.
        width: Of each layer.
        seed: Of the weights.
        external_data: Whether the weights go to `<name>.data` beside it. Memory then holds one at a time.
    """
    with ExitStack() as stack:
        graph = _Graph(seed, *_open_data(path, stack, external_data))
        x = "x"
        for layer in range(layers):
            last = layer == layers - 1
            name = f"layers.{layer}"
            x = graph.linear(name, x, width, width, gain=1.0 if last else math.sqrt(2))
            if not last:
                x = graph.node("Relu", f"{name}.relu", x)
        sides: list[str | int] = ["batch", width]
        described = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, sides) for name in ("x", "y")
        ]
        model = graph.model(described[:1], described[1])
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def mlp_inputs(rows: int = 1, *, width: int = MLP_WIDTH, seed: int = 1) -> Arrays:
    """Inputs of `mlp`."""
    return {"x": np.random.default_rng(seed).standard_normal((rows, width), np.float32)}


# An encoder.


def encoder(
    path: Path,
    *,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    vocabulary: int | None = None,
    seed: int = 0,
    external_data: bool = False,
) -> Path:
    """A BERT-like encoder, of a size for tests; `BERT_LAYERS` and so on are one for benchmarks.

    Without a vocabulary: `x`, float32["batch", "sequence", width]. With one: `input_ids` and
    `attention_mask`, int64["batch", "sequence"], of at most `POSITIONS` tokens. The output is `y`,
    float32["batch", "sequence", width].

    Args:
        path: File to write.
        layers: How many, at least 1.
        width: Channels of a token, a multiple of `heads`.
        heads: Of the attention.
        vocabulary: How many tokens there are; None leaves the embeddings out.
        seed: Of the weights.
        external_data: Whether the weights go to `<name>.data` beside it. Memory then holds one at a time.
    """
    with ExitStack() as stack:
        graph = _Graph(seed, *_open_data(path, stack, external_data))
        sides: list[str | int] = ["batch", "sequence"]
        if vocabulary is None:
            inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*sides, width])]
            x, mask = "x", None
        else:
            inputs = [
                helper.make_tensor_value_info(name, TensorProto.INT64, sides)
                for name in ("input_ids", "attention_mask")
            ]
            x = graph.embedding("input_ids", width, vocabulary)
            mask = graph.attention_mask("attention_mask")
        for layer in range(layers):
            x = graph.encoder_layer(f"layers.{layer}", x, width, heads, mask)
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [*sides, width])
        model = graph.model(inputs, output)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def encoder_inputs(
    rows: int = 1,
    tokens: int = 16,
    *,
    width: int = 64,
    vocabulary: int | None = None,
    seed: int = 1,
) -> Arrays:
    """Inputs of `encoder`; with a vocabulary, the last quarter of the first row is masked."""
    rng = np.random.default_rng(seed)
    if vocabulary is None:
        return {"x": rng.standard_normal((rows, tokens, width), np.float32)}
    mask = np.ones((rows, tokens), np.int64)
    mask[0, tokens - tokens // 4 :] = 0
    return {"input_ids": rng.integers(0, vocabulary, (rows, tokens)), "attention_mask": mask}


# Collectives and little else.


def chain(
    path: Path, *, layers: int, elements: int, ranks: int = 2, collectives: bool = True
) -> Path:
    """x, y float32[1, elements]: in each layer a product with one over the ranks, and a sum over all ranks.

    So y is x. Each rank runs this same file.

    Args:
        path: File to write.
        layers: How many, at least 1.
        elements: Of each value.
        ranks: How many there will be.
        collectives: Whether there are sums at all.
    """
    graph = _Graph(0, None, "")
    part = graph.number("part", 1 / ranks)
    x = "x"
    for layer in range(layers):
        x = graph.node("Mul", f"layers.{layer}.part", x, part)
        if collectives:
            x = graph.node("AllReduce", f"layers.{layer}.sum", x, domain="com.microsoft")
    described = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, elements]) for name in ("x", "y")
    ]
    model = graph.model(described[:1], described[1])
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def chain_inputs(elements: int, *, seed: int = 1) -> Arrays:
    """Inputs of `chain`."""
    return {"x": np.random.default_rng(seed).standard_normal((1, elements), np.float32)}
