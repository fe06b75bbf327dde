"""Write a conditional UNet of the Stable Diffusion 2.1 kind as an ONNX model.

The graph follows the layout of the denoising network of Stable Diffusion 2.1 (Rombach et al.
2022, "High-Resolution Image Synthesis with Latent Diffusion Models") with the module names of
diffusers' ``UNet2DConditionModel``. The weights are random: scaled so that activations stay of
order one, they cost the same time and memory as trained ones and need no download.

The output is of order one whatever the scale of the input. Sampled as SD 2.1 is, with
v-prediction (Salimans and Ho 2022), the latents therefore stay of order one through a whole
denoising loop; read as noise prediction, random weights let them grow by 1 / sqrt(alpha_bar_T).
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from numpy.random import Generator
from onnx import TensorProto, helper

LATENT_CHANNELS = 4
CONTEXT_TOKENS = 77  # length of a CLIP prompt
MAX_PERIOD = 10_000.0
NORM_EPSILON = 1e-5

# Opset 20 is the first with Gelu; IR version 9 is the one released with it.
OPSET_VERSION = 20
IR_VERSION = 9

# Every residual branch ends in a layer scaled down by this factor, so that the variance of the
# trunk grows slowly with depth (about 1 + 0.25 per branch) instead of doubling at each.
RESIDUAL_GAIN = 0.5
# Spread of biases and of norm scales around their usual 0 and 1: small, but not a no-op.
VECTOR_STD = 0.02
# Offsets in the external data file are multiples of a page, so that runtimes can map them.
DATA_ALIGNMENT = 4096

_Attribute = float | str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetSize:
    """Widths of a conditional UNet.

    Attributes:
        channels: Channels of each resolution level, finest first. All levels but the last have
            transformer blocks; each level halves height and width.
        resnets_per_level: Residual blocks in a down level; an up level has one more.
        head_channels: Channels of one attention head; divides every entry of `channels`.
        context_channels: Channels of `encoder_hidden_states`.
        norm_groups: Groups of the group norms; divides every entry of `channels`.
        latent_side: Height and width of the latents, unless they are left symbolic.
        external_data: Whether the weights go into a data file beside the model. Needed from
            2 GB on, the limit of a protobuf message.
    """

    channels: tuple[int, ...]
    resnets_per_level: int = 2
    head_channels: int = 64
    context_channels: int
    norm_groups: int = 32
    latent_side: int
    external_data: bool = False

    @property
    def parameters(self) -> int:
        """Number of weights, counted by a dry build that draws none of them."""
        graph = _Graph(self, rng=None)
        _unet(graph, None)
        return graph.parameters


SIZES: dict[str, UNetSize] = {
    "tiny": UNetSize(
        channels=(16, 32), head_channels=8, context_channels=32, norm_groups=8, latent_side=16
    ),
    "small": UNetSize(channels=(128, 256, 384), context_channels=256, latent_side=32),
    "sd21": UNetSize(
        channels=(320, 640, 1280, 1280), context_channels=1024, latent_side=64, external_data=True
    ),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An image [batch, channels, side, side], tokens [batch, tokens, channels] or [1, channels].

    All are floats of the model's type; `side` is None if it is symbolic, and tokens keep that of their image.
    """

    name: str
    channels: int
    side: int | None = None


@dataclass(slots=True)
class _Graph:
    """Collects the nodes and weights of a UNet.

    A method that adds a layer with weights takes the layer's name first: the prefix of the names
    of its weights. Nodes are numbered.

    Attributes:
        size: Widths of the UNet.
        rng: Source of the weights, or None to count them without drawing any.
        data: Open file that takes the weights, or None to keep them in `initializers`.
        location: Name of that file, relative to the model.
        nodes: Nodes in topological order.
        initializers: Weights and constants.
        constants: Names of the constants, by data type and values.
        half: Whether weights and activations are float16 and not float32.
        parameters: Number of weights so far, constants not counted.
    """

    size: UNetSize
    rng: Generator | None
    half: bool = False
    data: BinaryIO | None = None
    location: str = ""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)
    constants: dict[tuple[int, tuple[float, ...]], str] = field(default_factory=dict)
    parameters: int = 0

    @property
    def element_type(self) -> int:
        """Of weights and activations, as ONNX numbers types."""
        return TensorProto.FLOAT16 if self.half else TensorProto.FLOAT

    def node(self, op: str, *inputs: str, **attributes: _Attribute) -> str:
        """Adds a node; returns the name of its output."""
        name = f"{op}_{len(self.nodes)}"
        node = helper.make_node(op, inputs, [name], name=name)
        node.attribute.extend(helper.make_attribute(*item) for item in attributes.items())
        self.nodes.append(node)
        return name

    def apply(self, op: str, x: _Tensor, *others: str, **attributes: _Attribute) -> _Tensor:
        """Adds a node with `x` as its first input; returns its output, taken to be like `x`."""
        return replace(x, name=self.node(op, x.name, *others, **attributes))

    def constant(self, *values: float, kind: int | None = None) -> str:
        """Adds a constant [len(values)], int64 or of the model's type, unless the graph has it already."""
        floats = any(isinstance(value, float) for value in values)
        kind = kind or (self.element_type if floats else TensorProto.INT64)
        if (kind, values) not in self.constants:
            name = f"constant_{len(self.constants)}"
            self.constants[kind, values] = name
            self.initializers.append(helper.make_tensor(name, kind, [len(values)], values))
        return self.constants[kind, values]

    def weight(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> str:
        """Adds a weight of this shape, drawn from a normal distribution."""
        self.parameters += math.prod(shape)
        if self.rng is None:
            return name
        values = self.rng.standard_normal(shape, dtype=np.float32)
        values *= np.float32(std)
        values += np.float32(mean)
        stored = "<f2" if self.half else "<f4"  # ONNX stores raw data little-endian
        raw = values.astype(stored, copy=False).tobytes()
        tensor = TensorProto(name=name, data_type=self.element_type, dims=shape)
        if self.data is None:
            tensor.raw_data = raw
        else:
            # Written at once and forgotten: memory holds one weight, not the whole model.
            self.data.write(bytes(-self.data.tell() % DATA_ALIGNMENT))
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=self.location)
            tensor.external_data.add(key="offset", value=str(self.data.tell()))
            tensor.external_data.add(key="length", value=str(len(raw)))
            self.data.write(raw)
        self.initializers.append(tensor)
        return name

    def linear(
        self, name: str, x: _Tensor, channels: int, *, bias: bool = True, gain: float = 1
    ) -> _Tensor:
        """Maps the last axis of `x` from x.channels to `channels`.

        Weights have the variance gain**2 / fan-in, which keeps that of the activations (LeCun
        et al. 1998, "Efficient BackProp").
        """
        std = gain / math.sqrt(x.channels)
        weight = self.weight(f"{name}.weight", (x.channels, channels), std)
        y = replace(self.apply("MatMul", x, weight), channels=channels)
        if bias:
            y = self.apply("Add", y, self.weight(f"{name}.bias", (channels,), gain * VECTOR_STD))
        return y

    def conv(
        self, name: str, x: _Tensor, out: int, *, kernel: int = 3, stride: int = 1, gain: float = 1
    ) -> _Tensor:
        """Convolves an image to `out` channels, padded so that only a stride of 2 halves its side.

        The variance of the weights is that of `linear`, the fan-in x.channels * kernel**2.
        """
        shape = (out, x.channels, kernel, kernel)
        weight = self.weight(f"{name}.weight", shape, gain / math.sqrt(math.prod(shape[1:])))
        bias = self.weight(f"{name}.bias", (out,), gain * VECTOR_STD)
        y = self.apply("Conv", x, weight, bias, pads=[kernel // 2] * 4, strides=[stride] * 2)
        return replace(y, channels=out, side=x.side and x.side // stride)

    def image_shape(self, x: _Tensor) -> str:
        """Returns the shape of the image `x` as an int64 [4] tensor, for Reshape."""
        if x.side is None:
            return self.node("Shape", x.name)
        return self.constant(0, x.channels, x.side, x.side)

    def group_norm(self, name: str, x: _Tensor) -> _Tensor:
        """Normalises each group of channels of an image, then scales each channel.

        Group norm (Wu and He 2018), written as an instance norm with each group flattened to one
        channel: ONNX Runtime runs that twice as fast on a CPU as opset 21's GroupNormalization.
        """
        groups = self.size.norm_groups
        ones, zeros = self.constant(*[1.0] * groups), self.constant(*[0.0] * groups)
        y = self.apply("Reshape", x, self.constant(0, groups, -1))
        y = self.apply("InstanceNormalization", y, ones, zeros, epsilon=NORM_EPSILON)
        y = self.apply("Reshape", y, self.image_shape(x))
        shape = (x.channels, 1, 1)
        y = self.apply("Mul", y, self.weight(f"{name}.weight", shape, VECTOR_STD, mean=1.0))
        return self.apply("Add", y, self.weight(f"{name}.bias", shape, VECTOR_STD))

    def layer_norm(self, name: str, x: _Tensor) -> _Tensor:
        """Normalises each token (layer norm, Ba et al. 2016)."""
        weight = self.weight(f"{name}.weight", (x.channels,), VECTOR_STD, mean=1.0)
        bias = self.weight(f"{name}.bias", (x.channels,), VECTOR_STD)
        return self.apply("LayerNormalization", x, weight, bias, axis=-1, epsilon=NORM_EPSILON)

    def silu(self, x: _Tensor) -> _Tensor:
        """Computes x * sigmoid(x) (Elfwing et al. 2018)."""
        return self.apply("Mul", x, self.node("Sigmoid", x.name))

    def time_embedding(self, name: str, timestep: str) -> _Tensor:
        """Embeds `timestep`, int64 [1], into [1, 4 * channels[0]].

        Sinusoidal embedding (Vaswani et al. 2017, as used in DDPM, Ho et al. 2020), cosines
        first: cos(t * w), sin(t * w) with w_i = MAX_PERIOD**(-i / half), i < half, half being
        channels[0] / 2. A perceptron with one hidden layer follows.
        """
        channels = self.size.channels[0]
        half = channels // 2
        # In float32 in any case: an angle of hundreds of radians in float16 is wrong by tenths.
        frequencies = [MAX_PERIOD ** (-i / half) for i in range(half)]
        rates = self.constant(*frequencies, kind=TensorProto.FLOAT)
        step = self.node("Cast", timestep, to=TensorProto.FLOAT)
        angle = self.node("Mul", self.node("Reshape", step, self.constant(1, 1)), rates)
        waves = self.node("Concat", self.node("Cos", angle), self.node("Sin", angle), axis=1)
        if self.half:
            waves = self.node("Cast", waves, to=TensorProto.FLOAT16)
        x = self.linear(f"{name}.linear_1", _Tensor(waves, channels), 4 * channels)
        return self.linear(f"{name}.linear_2", self.silu(x), 4 * channels)

    def resnet(self, name: str, x: _Tensor, channels: int, time: _Tensor) -> _Tensor:
        """Residual block (He et al. 2016) that gets the time as a bias of each channel.

        Takes an image [batch, x.channels, side, side] and the SiLU of the time embedding,
        [1, 4 * channels[0]]; returns an image [batch, channels, side, side].
        """
        y = self.conv(f"{name}.conv1", self.silu(self.group_norm(f"{name}.norm1", x)), channels)
        bias = self.linear(f"{name}.time_emb_proj", time, channels).name
        y = self.apply("Add", y, self.node("Reshape", bias, self.constant(1, channels, 1, 1)))
        y = self.silu(self.group_norm(f"{name}.norm2", y))
        y = self.conv(f"{name}.conv2", y, channels, gain=RESIDUAL_GAIN)
        if x.channels != channels:
            x = self.conv(f"{name}.conv_shortcut", x, channels, kernel=1)
        return self.apply("Add", x, y.name)

    def heads(self, x: _Tensor, perm: list[int]) -> str:
        """Splits tokens to [batch, tokens, heads, head_channels] and permutes these axes."""
        split = self.node("Reshape", x.name, self.constant(0, 0, -1, self.size.head_channels))
        return self.node("Transpose", split, perm=perm)

    def attention(self, name: str, x: _Tensor, context: _Tensor) -> _Tensor:
        """Multi-head attention, softmax(q k^T / sqrt(head_channels)) v (Vaswani et al. 2017).

        Queries come from `x`, [batch, tokens, x.channels], keys and values from `context`,
        [batch, context tokens, context.channels]; returns a tensor of the shape of `x`.
        """
        q = self.linear(f"{name}.to_q", x, x.channels, bias=False)
        k = self.linear(f"{name}.to_k", context, x.channels, bias=False)
        v = self.linear(f"{name}.to_v", context, x.channels, bias=False)
        # Scaling q costs less than scaling the scores, of which there are tokens**2 per head.
        q = self.apply("Mul", q, self.constant(self.size.head_channels**-0.5))
        scores = self.node("MatMul", self.heads(q, [0, 2, 1, 3]), self.heads(k, [0, 2, 3, 1]))
        shares = self.node("Softmax", scores, axis=-1)
        mixed = self.node("MatMul", shares, self.heads(v, [0, 2, 1, 3]))
        mixed = self.node("Transpose", mixed, perm=[0, 2, 1, 3])
        y = replace(x, name=self.node("Reshape", mixed, self.constant(0, 0, x.channels)))
        return self.linear(f"{name}.to_out.0", y, x.channels, gain=RESIDUAL_GAIN)

    def feed_forward(self, name: str, x: _Tensor) -> _Tensor:
        """Applies a feed-forward layer, value * gelu(gate) inside (GEGLU, Shazeer 2020)."""
        # diffusers has one projection for both; two need no Split, which would copy them.
        value = self.linear(f"{name}.value", x, 4 * x.channels)
        gate = self.linear(f"{name}.gate", x, 4 * x.channels)
        y = self.apply("Mul", value, self.node("Gelu", gate.name))
        return self.linear(f"{name}.out", y, x.channels, gain=RESIDUAL_GAIN)

    def transformer(self, name: str, x: _Tensor, context: _Tensor) -> _Tensor:
        """Transformer block over the pixels of an image, with a residual connection around it.

        Takes and returns an image [batch, x.channels, side, side]; `context` is the encoder's
        states, [batch, CONTEXT_TOKENS, context_channels].
        """
        y = self.group_norm(f"{name}.norm", x)
        y = self.apply("Reshape", y, self.constant(0, x.channels, -1))
        y = self.apply("Transpose", y, perm=[0, 2, 1])
        y = self.linear(f"{name}.proj_in", y, x.channels)
        block = f"{name}.transformer_blocks.0"
        normed = self.layer_norm(f"{block}.norm1", y)
        y = self.apply("Add", y, self.attention(f"{block}.attn1", normed, normed).name)
        normed = self.layer_norm(f"{block}.norm2", y)
        y = self.apply("Add", y, self.attention(f"{block}.attn2", normed, context).name)
        normed = self.layer_norm(f"{block}.norm3", y)
        y = self.apply("Add", y, self.feed_forward(f"{block}.ff", normed).name)
        y = self.linear(f"{name}.proj_out", y, x.channels, gain=RESIDUAL_GAIN)
        y = self.apply("Transpose", y, perm=[0, 2, 1])
        return self.apply("Add", x, self.node("Reshape", y.name, self.image_shape(x)))

    def upsample(self, name: str, x: _Tensor) -> _Tensor:
        """Repeats each pixel twice along height and width, then convolves."""
        scales = self.constant(1.0, 1.0, 2.0, 2.0, kind=TensorProto.FLOAT)
        mode = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        y = self.apply("Resize", x, "", scales, mode="nearest", **mode)
        return self.conv(name, replace(y, side=x.side and 2 * x.side), x.channels)


def _down(graph: _Graph, x: _Tensor, time: _Tensor, context: _Tensor) -> list[_Tensor]:
    """Adds the down levels to `x`; returns all skip features, the last being their output."""
    skips = [x]
    last = len(graph.size.channels) - 1
    for level, channels in enumerate(graph.size.channels):
        name = f"down_blocks.{level}"
        for i in range(graph.size.resnets_per_level):
            x = graph.resnet(f"{name}.resnets.{i}", x, channels, time)
            if level != last:
                x = graph.transformer(f"{name}.attentions.{i}", x, context)
            skips.append(x)
        if level != last:
            x = graph.conv(f"{name}.downsamplers.0.conv", x, channels, stride=2)
            skips.append(x)
    return skips


def _up(
    graph: _Graph, x: _Tensor, skips: list[_Tensor], time: _Tensor, context: _Tensor
) -> _Tensor:
    """Adds the up levels to `x`, using up `skips` from the end; returns their output."""
    last = len(graph.size.channels) - 1
    for level, channels in enumerate(reversed(graph.size.channels)):
        name = f"up_blocks.{level}"
        for i in range(graph.size.resnets_per_level + 1):
            skip = skips.pop()
            x = graph.apply("Concat", x, skip.name, axis=1)
            x = replace(x, channels=x.channels + skip.channels)
            x = graph.resnet(f"{name}.resnets.{i}", x, channels, time)
            if level != 0:
                x = graph.transformer(f"{name}.attentions.{i}", x, context)
        if level != last:
            x = graph.upsample(f"{name}.upsamplers.0.conv", x)
    return x


def _unet(graph: _Graph, side: int | None) -> None:
    """Adds the whole UNet to an empty graph, for latents with this side (None: symbolic)."""
    first, deepest = graph.size.channels[0], graph.size.channels[-1]
    context = _Tensor("encoder_hidden_states", graph.size.context_channels)
    # Every residual block starts from SiLU of the time embedding; computing it once is enough.
    time = graph.silu(graph.time_embedding("time_embedding", "timestep"))
    x = graph.conv("conv_in", _Tensor("sample", LATENT_CHANNELS, side), first)
    skips = _down(graph, x, time, context)
    x = graph.resnet("mid_block.resnets.0", skips[-1], deepest, time)
    x = graph.transformer("mid_block.attentions.0", x, context)
    x = graph.resnet("mid_block.resnets.1", x, deepest, time)
    x = _up(graph, x, skips, time, context)
    graph.conv("conv_out", graph.silu(graph.group_norm("conv_norm_out", x)), LATENT_CHANNELS)
    graph.nodes[-1].output[0] = "out_sample"


def _model(graph: _Graph, batch: int | None, symbolic_latents: bool) -> onnx.ModelProto:
    """Fills an empty graph and wraps it into a model with the UNet's inputs and output."""
    size = graph.size
    _unet(graph, None if symbolic_latents else size.latent_side)
    sides = ["height", "width"] if symbolic_latents else [size.latent_side] * 2
    rows = "batch" if batch is None else batch
    latents = [rows, LATENT_CHANNELS, *sides]
    states = [rows, CONTEXT_TOKENS, size.context_channels]
    inputs = [
        helper.make_tensor_value_info("sample", graph.element_type, latents),
        helper.make_tensor_value_info("timestep", TensorProto.INT64, [1]),
        helper.make_tensor_value_info("encoder_hidden_states", graph.element_type, states),
    ]
    outputs = [helper.make_tensor_value_info("out_sample", graph.element_type, latents)]
    body = helper.make_graph(graph.nodes, "unet", inputs, outputs, graph.initializers)
    opset = [helper.make_opsetid("", OPSET_VERSION)]
    model = helper.make_model(body, producer_name="mcinfer", opset_imports=opset)
    model.ir_version = IR_VERSION
    return model


def build_unet(
    path: str | os.PathLike[str],
    size: str = "small",
    *,
    batch: int | None = None,
    seed: int = 0,
    symbolic_latents: bool = False,
    half: bool = False,
) -> Path:
    """Writes a UNet with random weights; a model already at `path` is replaced.

    The inputs are `sample`, float32 [batch, 4, height, width], `timestep`, int64 [1], and
    `encoder_hidden_states`, float32 [batch, 77, context_channels]; the output is `out_sample`,
    of the shape of `sample`. Each of its rows depends on the same row of the inputs alone.

    No half-written model is ever at `path`. The data of a size with external data is in
    `<name of the model>.data` beside the model.

    Args:
        path: File to write, in a directory that exists.
        size: A name in `SIZES`.
        batch: Fixed batch, or None for the symbolic dimension "batch".
        seed: Seed of the weights; the same seed gives the same bytes with the same NumPy.
        symbolic_latents: Leave height and width symbolic instead of fixing them to the size's
            `latent_side`; they must then be multiples of 2 ** (levels - 1).
        half: Weights, inputs and the output are float16, but for `timestep`.

    Returns:
        The path of the model.

    Raises:
        ValueError: If `size` is unknown, `batch` is below 1 or `seed` is negative.
    """
    if size not in SIZES:
        raise ValueError(f"size: got {size!r}, expected one of {', '.join(map(repr, SIZES))}")
    if batch is not None and batch < 1:
        raise ValueError(f"batch: got {batch}, expected None or an integer of at least 1")
    if seed < 0:
        raise ValueError(f"seed: got {seed}, expected an integer of at least 0")
    widths = SIZES[size]
    path = Path(path)
    data_path = path.with_name(f"{path.name}.data")
    model_part = path.with_name(f".{path.name}.{os.getpid()}.part")
    data_part = path.with_name(f".{data_path.name}.{os.getpid()}.part")
    try:
        with data_part.open("wb") as data:
            file = data if widths.external_data else None
            rng = np.random.default_rng(seed)
            graph = _Graph(widths, rng, half, file, data_path.name)
            model = _model(graph, batch, symbolic_latents)
        model_part.write_bytes(model.SerializeToString(deterministic=True))
        if widths.external_data:
            # Two files cannot be replaced at once. Without the old model, an interruption here
            # leaves no model rather than one with the weights of another.
            path.unlink(missing_ok=True)
            data_part.replace(data_path)
        model_part.replace(path)
    finally:
        model_part.unlink(missing_ok=True)
        data_part.unlink(missing_ok=True)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write a UNet of the Stable Diffusion 2.1 kind.")
    parser.add_argument("--size", choices=SIZES, default="small", help="default: small")
    parser.add_argument("--output", dest="path", required=True, help="model file to write")
    parser.add_argument("--batch", type=int, help="fix the batch (default: left symbolic)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--symbolic-latents", action="store_true", help="leave sides symbolic")
    parser.add_argument("--half", action="store_true", help="float16 in place of float32")
    options = parser.parse_args(arguments)
    try:
        path = build_unet(**vars(options))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    size = SIZES[options.size]
    print(f"{options.size}: {size.parameters:,} parameters")
    files = [path, path.with_name(f"{path.name}.data")] if size.external_data else [path]
    for file in files:
        print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
