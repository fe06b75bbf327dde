"""Write the small image encoder that the package ships as ``mcinfer/encoder.onnx``.

Four convolutions and a projection, with random weights: enough to try mcinfer with, and of no other use.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CHANNELS = (3, 16, 24, 32, 48)
"""Of the image, and after each convolution, which halves height and width."""
SIZE = 32
FEATURES = 64
GAIN = math.sqrt(2.0)  # for a layer before a ReLU (He et al. 2015, "Delving Deep into Rectifiers")


def build_encoder(path: Path, seed: int = 0) -> None:
    """Writes the encoder: image, float32[batch, 3, 32, 32], to embedding, float32[batch, 64].

    Args:
        path: File to write; one that is there is replaced.
        seed: Seed of the weights.
    """
    rng = np.random.default_rng(seed)
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []

    def weight(name: str, *shape: int) -> str:
        spread = GAIN / math.sqrt(math.prod(shape[1:]))
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(spread)
        weights.append(numpy_helper.from_array(values, name))
        return name

    def node(op: str, *inputs: str, output: str = "", **attributes: int | list[int]) -> str:
        output = output or f"{op}_{len(nodes)}"
        made = helper.make_node(op, inputs, [output], name=output)
        made.attribute.extend(helper.make_attribute(*item) for item in attributes.items())
        nodes.append(made)
        return output

    x = "image"
    for index, (before, after) in enumerate(pairwise(CHANNELS)):
        kernel = weight(f"convolution.{index}.weight", after, before, 3, 3)
        x = node("Relu", node("Conv", x, kernel, pads=[1, 1, 1, 1], strides=[2, 2]))
    x = node("Flatten", node("GlobalAveragePool", x))
    projection = weight("projection.weight", FEATURES, CHANNELS[-1])
    node("Gemm", x, projection, transB=1, output="embedding")
    image = helper.make_tensor_value_info(
        "image", TensorProto.FLOAT, ["batch", CHANNELS[0], SIZE, SIZE]
    )
    embedding = helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", FEATURES])
    graph = helper.make_graph(nodes, "encoder", [image], [embedding], weights)
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, producer_name="mcinfer", opset_imports=opset)
    model.ir_version = 8  # the one released with opset 17
    path.write_bytes(model.SerializeToString(deterministic=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, help="model file to write")
    build_encoder(parser.parse_args(arguments).output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
