"""Two models for requests that arrive one by one: an encoder, and one that gains from a batch.

    python benchmarks/encoder.py

prints what a batch of eight costs of each, on one thread, as a multiple of a batch of one. The weights
are random.
"""

import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from measuring import Effort, Ratio, Series, Way, in_turns, ratio_line, series_row, table
from numpy.random import Generator
from onnx import TensorProto, helper

TOKENS = 32
HIDDEN = 256
LAYERS = 2
HEADS = 4
"""Of this size, one row takes about 1 ms on one thread of a server's processor with AVX-512."""

BATCHING_SIDE = 1024
BATCHING_LAYERS = 6
"""25 MB of weights: more than a core's own caches hold, so that they are read anew for each run."""

BATCH = 8

OPSET_VERSION = 20  # the first with Gelu
IR_VERSION = 9

_Attribute = int | float | list[int]


@dataclass(slots=True)
class _Graph:
    """Collects nodes and weights."""

    rng: Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)

    def node(self, op: str, *inputs: str, **attributes: _Attribute) -> str:
        """Adds a node; the name of its output."""
        name = f"{op}_{len(self.nodes)}"
        node = helper.make_node(op, inputs, [name], name=name)
        node.attribute.extend(helper.make_attribute(*item) for item in attributes.items())
        self.nodes.append(node)
        return name

    def weight(self, *shape: int, mean: float = 0.0, std: float = 0.02) -> str:
        """Adds a float32 weight drawn from a normal distribution; its name."""
        values = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
        raw = (values + np.float32(mean)).astype("<f4", copy=False).tobytes()
        name = f"weight_{len(self.weights)}"
        self.weights.append(helper.make_tensor(name, TensorProto.FLOAT, shape, raw, raw=True))
        return name

    def shape(self, *sides: int) -> str:
        """Adds a shape for Reshape; its name."""
        name = f"shape_{len(self.weights)}"
        self.weights.append(helper.make_tensor(name, TensorProto.INT64, [len(sides)], sides))
        return name

    def linear(self, x: str, channels: int, out: int, *, gain: float = 1.0) -> str:
        """Maps the last axis from `channels` to `out`; weights of the variance gain**2 / fan-in."""
        product = self.node("MatMul", x, self.weight(channels, out, std=gain / math.sqrt(channels)))
        return self.node("Add", product, self.weight(out))

    def layer_norm(self, x: str, channels: int) -> str:
        """Normalises the last axis (Ba et al. 2016)."""
        weight, bias = self.weight(channels, mean=1.0), self.weight(channels)
        return self.node("LayerNormalization", x, weight, bias, axis=-1, epsilon=1e-5)

    def save(self, path: Path, name: str, sides: Sequence[str | int]) -> Path:
        """Writes a model from `x` to `y`, both float32 of these sides; `y` is the last output."""
        self.nodes[-1].output[0] = "y"
        body = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, sides)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, sides)],
            self.weights,
        )
        model = helper.make_model(body, opset_imports=[helper.make_opsetid("", OPSET_VERSION)])
        model.ir_version = IR_VERSION
        onnx.save(model, str(path))
        return path


def encoder_model(path: Path, *, layers: int = LAYERS, hidden: int = HIDDEN) -> Path:
    """An encoder of the Transformer's kind: x, y float32["batch", TOKENS, hidden].

    Each layer is attention over the tokens of a row and a feed-forward layer four times as wide (Vaswani
    et al. 2017), each added to its input and normalised after that, GELU inside, as in BERT (Devlin et
    al. 2018).

    Args:
        path: File to write.
        layers: How many, at least 1.
        hidden: Channels of a token, a multiple of HEADS.
    """
    graph = _Graph(np.random.default_rng(0))
    split, joined = graph.shape(0, 0, HEADS, hidden // HEADS), graph.shape(0, 0, hidden)
    x = "x"
    for _ in range(layers):
        # The scale of the scores, one over the square root of a head's channels, is in the queries.
        query = graph.linear(x, hidden, hidden, gain=(hidden // HEADS) ** -0.5)
        key, value = (graph.linear(x, hidden, hidden) for _ in range(2))
        orders = ((query, [0, 2, 1, 3]), (key, [0, 2, 3, 1]), (value, [0, 2, 1, 3]))
        q, k, v = (
            graph.node("Transpose", graph.node("Reshape", part, split), perm=order)
            for part, order in orders
        )
        shares = graph.node("Softmax", graph.node("MatMul", q, k), axis=-1)
        mixed = graph.node("Transpose", graph.node("MatMul", shares, v), perm=[0, 2, 1, 3])
        attention = graph.linear(graph.node("Reshape", mixed, joined), hidden, hidden)
        x = graph.layer_norm(graph.node("Add", x, attention), hidden)
        inner = graph.node("Gelu", graph.linear(x, hidden, 4 * hidden))
        x = graph.layer_norm(graph.node("Add", x, graph.linear(inner, 4 * hidden, hidden)), hidden)
    return graph.save(path, "encoder", ["batch", TOKENS, hidden])


def batching_model(path: Path) -> Path:
    """A model whose time goes into reading its weights: x, y float32["batch", BATCHING_SIDE].

    Each layer is one product with a square matrix: of every weight it reads, a batch of one makes a
    single multiplication, and each further row one more for the same reading.
    """
    graph = _Graph(np.random.default_rng(0))
    x = "x"
    for _ in range(BATCHING_LAYERS):
        x = graph.node("Tanh", graph.linear(x, BATCHING_SIDE, BATCHING_SIDE))
    return graph.save(path, "batching", ["batch", BATCHING_SIDE])


def _runs(path: Path) -> tuple[Way, Way]:
    """Runs of a batch of one and of BATCH, on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    sides = session.get_inputs()[0].shape[1:]
    rows = np.random.default_rng(1).standard_normal((BATCH, *sides), np.float32)
    one = rows[:1].copy()
    return lambda: session.run(None, {"x": one}), lambda: session.run(None, {"x": rows})


def main() -> int:
    """Measure and print; the exit status."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    effort = Effort(rounds=9, seconds=0.25)
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as name:
        os.environ["MCINFER_CACHE"] = str(Path(name) / "cache")  # not the user's
        for build in (encoder_model, batching_model):
            path = build(Path(name) / "model.onnx")
            one, several = _runs(path)
            series = in_turns({"batch 1": one, f"batch {BATCH}": several}, effort)
            rows = [series_row(way, times) for way, times in series.items()]
            print(
                table((f"{build.__name__}, {path.stat().st_size:,} bytes", "p50", "rounds"), rows)
            )
            times: list[Series] = [*series.values()]
            text = f"batch {BATCH} / batch 1"
            print(ratio_line(Ratio(text=text, series=times[1].over(times[0]))), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
