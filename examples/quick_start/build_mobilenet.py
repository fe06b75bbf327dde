"""Write an image classifier of MobileNetV2's structure as an ONNX model.

The layers are those of Sandler et al. 2018, "MobileNetV2: Inverted Residuals and Linear Bottlenecks"
(https://arxiv.org/abs/1801.04381), table 2, each batch norm folded into the convolution before it. The
weights are random, scaled so that activations keep their size: they cost the same time and memory as
trained ones and need no download.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from numpy.random import Generator
from onnx import TensorProto, helper

BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Table 2 of the paper: expansion, output channels, repetitions, stride of the first of them."""
STEM_CHANNELS = 32
HEAD_CHANNELS = 1280
CLASSES = 1000
LIMITS = {"zero": 0.0, "six": 6.0}
"""Of ReLU6: constants by name."""

OPSET_VERSION = 17
IR_VERSION = 8  # the one released with opset 17

# The gain for a layer before a ReLU (He et al. 2015, "Delving Deep into Rectifiers"); others have 1.
RELU_GAIN = math.sqrt(2.0)
# A block that is added to its input is scaled down, so that the sum grows slowly with depth.
RESIDUAL_GAIN = 0.5
# Spread of the biases: small, but not a no-op.
BIAS_STD = 0.02

_Attribute = int | float | list[int]


@dataclass(slots=True)
class _Graph:
    """Collects nodes and weights; `x` is the name of the latest output, `channels` its channels.

    Images are float32[batch, channels, side, side].
    """

    rng: Generator
    x: str
    channels: int = 3
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)

    def node(self, op: str, *inputs: str, **attributes: _Attribute) -> None:
        """Adds a node that takes `x` and these inputs; its output is the new `x`."""
        name = f"{op}_{len(self.nodes)}"
        node = helper.make_node(op, [self.x, *inputs], [name], name=name)
        node.attribute.extend(helper.make_attribute(*item) for item in attributes.items())
        self.nodes.append(node)
        self.x = name

    def weight(self, name: str, shape: tuple[int, ...], std: float) -> str:
        """Adds a float32 weight drawn from a normal distribution with the mean 0."""
        values = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
        raw = values.astype("<f4", copy=False).tobytes()  # ONNX stores raw data little-endian
        self.weights.append(helper.make_tensor(name, TensorProto.FLOAT, shape, raw, raw=True))
        return name

    def conv(
        self,
        name: str,
        channels: int,
        *,
        kernel: int = 1,
        stride: int = 1,
        depthwise: bool = False,
        gain: float = RELU_GAIN,
    ) -> None:
        """Convolves to `channels`; only a stride of 2 changes the side: to half, rounded up."""
        groups = self.channels if depthwise else 1
        shape = (channels, self.channels // groups, kernel, kernel)
        weight = self.weight(f"{name}.weight", shape, gain / math.sqrt(math.prod(shape[1:])))
        bias = self.weight(f"{name}.bias", (channels,), BIAS_STD)
        pads, strides = [kernel // 2] * 4, [stride] * 2
        self.node("Conv", weight, bias, group=groups, pads=pads, strides=strides)
        self.channels = channels

    def relu6(self) -> None:
        """Cuts values to 0 … 6."""
        self.node("Clip", "zero", "six")

    def block(self, name: str, expansion: int, channels: int, stride: int) -> None:
        """Inverted residual block (table 1): expand, filter each channel, project linearly.

        Where neither side nor channels change, the block's input is added to its output.
        """
        start, residual = self.x, stride == 1 and channels == self.channels
        hidden = expansion * self.channels
        if expansion != 1:
            self.conv(f"{name}.expand", hidden)
            self.relu6()
        self.conv(f"{name}.depthwise", hidden, kernel=3, stride=stride, depthwise=True)
        self.relu6()
        self.conv(f"{name}.project", channels, gain=RESIDUAL_GAIN if residual else 1.0)
        if residual:
            self.node("Add", start)


def _scaled(channels: int, width: float) -> int:
    """Channels at this width: the nearest multiple of 8, one more if that is under nine tenths.

    So rounds the authors' code: https://github.com/tensorflow/models, research/slim/nets/mobilenet.
    """
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * wanted else rounded


def _classifier(graph: _Graph, width: float) -> None:
    """Adds all layers, from the image in NHWC to the probabilities."""
    graph.node("Transpose", perm=[0, 3, 1, 2])
    graph.conv("stem", _scaled(STEM_CHANNELS, width), kernel=3, stride=2)
    graph.relu6()
    index = 0
    for expansion, channels, repetitions, first_stride in BLOCKS:
        for repetition in range(repetitions):
            stride = 1 if repetition else first_stride
            graph.block(f"blocks.{index}", expansion, _scaled(channels, width), stride)
            index += 1
    graph.conv("head", _scaled(HEAD_CHANNELS, max(1.0, width)))
    graph.relu6()
    graph.node("GlobalAveragePool")
    graph.node("Flatten")
    std = RELU_GAIN / math.sqrt(graph.channels)
    weight = graph.weight("classifier.weight", (CLASSES, graph.channels), std)
    graph.node("Gemm", weight, graph.weight("classifier.bias", (CLASSES,), BIAS_STD), transB=1)
    graph.node("Softmax", axis=-1)
    graph.nodes[-1].output[0] = "probabilities"


def build_mobilenet(
    path: str | os.PathLike[str],
    *,
    batch: int | None = 1,
    size: int = 224,
    width: float = 1.0,
    seed: int = 0,
) -> Path:
    """Writes a classifier with random weights; a model already at `path` is replaced.

    The input is `image`, float32[batch, size, size, 3], the output `probabilities`,
    float32[batch, 1000], each row of which depends on the same row of the input alone and sums to 1.

    Args:
        path: File to write, in a directory that exists.
        batch: Fixed batch, or None for the symbolic dimension "batch".
        size: Height and width of the image.
        width: The paper's width multiplier, by which the channels of all layers are scaled.
        seed: Seed of the weights; the same seed gives the same bytes with the same NumPy.

    Returns:
        The path of the model.

    Raises:
        ValueError: If `batch` or `size` is below 1, `width` is not above 0 or `seed` is negative.
        OSError: If the file cannot be written.
    """
    if batch is not None and batch < 1:
        raise ValueError(f"batch: got {batch}, expected None or an integer of at least 1")
    if size < 1:
        raise ValueError(f"size: got {size}, expected an integer of at least 1")
    if not 0 < width < math.inf:
        raise ValueError(f"width: got {width}, expected a finite number above 0")
    if seed < 0:
        raise ValueError(f"seed: got {seed}, expected an integer of at least 0")
    graph = _Graph(np.random.default_rng(seed), "image")
    _classifier(graph, width)
    limits = [helper.make_tensor(n, TensorProto.FLOAT, [], [v]) for n, v in LIMITS.items()]
    rows = "batch" if batch is None else batch
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [rows, size, size, 3])
    output = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [rows, CLASSES])
    body = helper.make_graph(
        graph.nodes, "mobilenet_v2", [image], [output], [*graph.weights, *limits]
    )
    opset = [helper.make_opsetid("", OPSET_VERSION)]
    model = helper.make_model(body, producer_name="mcinfer", opset_imports=opset)
    model.ir_version = IR_VERSION
    path = Path(path)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", dest="path", required=True, help="model file to write")
    parser.add_argument("--size", type=int, default=224, help="side of the image (default: 224)")
    parser.add_argument("--width", type=float, default=1.0, help="of the layers (default: 1.0)")
    options = parser.parse_args(arguments)
    try:
        path = build_mobilenet(**vars(options))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
