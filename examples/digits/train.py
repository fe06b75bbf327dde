"""Train a small diffusion model on handwritten digits, in minutes on a CPU, and export it to ONNX.

The digits are the 1,797 of 8 x 8 pixels that scikit-learn brings with it, so nothing is downloaded (Alpaydin
and Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository). Needs torch,
onnxscript and scikit-learn; `draw.py` draws with the result and needs none of them.
"""

import argparse
import copy
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sampling import NO_DIGIT, SIDE, Array, draw, first_noise
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn import functional

from mcinfer import Master, McinferError

WIDTHS = (32, 48)
"""Channels at 8 x 8 and at 4 x 4 pixels."""
CONDITION = 64
"""Width of what the network knows of time and digit."""
GROUPS = 8
"""Of channels, in each normalisation."""

BATCH = 128
RATE = 2e-3
UNASKED = 0.15
"""How often the network learns without the digit: this is what guidance compares with."""
AVERAGED = 0.999
"""How much of the average of the weights remains after a step."""


# The network.


class Block(nn.Module):  # type: ignore[misc]
    """Two convolutions, added to what came in; time and digit scale and shift what is between them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(GROUPS, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1)
        )
        self.norm = nn.GroupNorm(GROUPS, after, affine=False)
        self.condition = nn.Linear(CONDITION, 2 * after)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.condition(condition)[:, :, None, None].chunk(2, dim=1)
        inner = self.norm(self.first(x)) * (1 + scale) + shift
        result: Tensor = self.around(x) + self.second(functional.silu(inner))
        return result


class UNet(nn.Module):  # type: ignore[misc]
    """A UNet of two resolutions, conditioned on time and digit; see `sampling.Model`."""

    def __init__(self) -> None:
        super().__init__()
        wide, deep = WIDTHS
        self.register_buffer("frequencies", math.pi * 2.0 ** torch.arange(-1, 7), persistent=False)
        self.time = nn.Sequential(
            nn.Linear(16, CONDITION), nn.SiLU(), nn.Linear(CONDITION, CONDITION)
        )
        self.digit = nn.Embedding(NO_DIGIT + 1, CONDITION)
        self.first = nn.Conv2d(1, wide, 3, padding=1)
        self.before = Block(wide, wide)
        self.down = nn.Conv2d(wide, deep, 3, stride=2, padding=1)
        self.middle = nn.ModuleList([Block(deep, deep), Block(deep, deep)])
        self.up = nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(deep, wide, 3, padding=1))
        self.after = Block(2 * wide, wide)
        self.last = nn.Sequential(
            nn.GroupNorm(GROUPS, wide), nn.SiLU(), nn.Conv2d(wide, 1, 3, padding=1)
        )

    def forward(self, sample: Tensor, time: Tensor, digit: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies
        condition = self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.digit(digit)
        condition = functional.silu(condition)
        fine = self.before(self.first(sample), condition)
        coarse = self.down(fine)
        for block in self.middle:
            coarse = block(coarse, condition)
        velocity: Tensor = self.last(self.after(torch.cat([self.up(coarse), fine], 1), condition))
        return velocity


# Training.


def train(epochs: int, seed: int) -> UNet:
    """Learn the velocity (see `sampling.draw`) at random times; the average of the last weights."""
    torch.manual_seed(seed)
    pictures, digits = load_digits(return_X_y=True)
    clean_all = torch.tensor(pictures / 8 - 1, dtype=torch.float32).view(-1, 1, SIDE, SIDE)
    digits_all = torch.tensor(digits)
    network = UNet()
    average: UNet = copy.deepcopy(network).eval()
    optimizer = torch.optim.AdamW(network.parameters(), RATE)
    steps = epochs * (len(digits_all) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.05)
    begin = time.perf_counter()
    done = 0
    for epoch in range(epochs):
        losses = []
        for chosen in torch.randperm(len(digits_all)).split(BATCH)[: steps // epochs]:
            loss = _loss(network, clean_all[chosen], digits_all[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
            remains = min(AVERAGED, done / (done + 9))  # the first weights of all are worth nothing
            with torch.no_grad():
                for kept, new in zip(average.parameters(), network.parameters(), strict=True):
                    kept.lerp_(new, 1 - remains)
            losses.append(loss.item())
        if (epoch + 1) % max(1, epochs // 20) == 0:
            seconds = time.perf_counter() - begin
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, {seconds:.0f} s", flush=True)
    return average


def _loss(network: UNet, clean: Tensor, digits: Tensor) -> Tensor:
    when = torch.rand(len(clean))
    angle = (when * math.pi / 2)[:, None, None, None]
    noise = torch.randn_like(clean)
    noisy = angle.cos() * clean + angle.sin() * noise
    velocity = angle.cos() * noise - angle.sin() * clean
    asked = torch.where(torch.rand(len(clean)) < UNASKED, NO_DIGIT, digits)
    return functional.mse_loss(network(noisy, when, asked), velocity)


def export(network: UNet, path: Path) -> None:
    """Write the network to a file of its own, with a symbolic batch."""
    example = (torch.zeros(2, 1, SIDE, SIDE), torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    program = torch.onnx.export(
        network,
        example,
        input_names=["sample", "time", "digit"],
        output_names=["velocity"],
        dynamic_shapes=({0: "batch"}, {0: "batch"}, {0: "batch"}),
        dynamo=True,
        verbose=False,
    )
    model = program.model_proto
    for described in (model.graph, *model.graph.node, *model.graph.input, *model.graph.value_info):
        described.ClearField("metadata_props")  # the exporter's notes, with traces of its stack
    path.write_bytes(model.SerializeToString())


# What the pictures are worth.


def readable(pictures: Array, digits: NDArray[np.int64]) -> tuple[float, float]:
    """How often a classifier reads the digit that was asked for, in drawn pictures and in written ones.

    It learns from the first half of the set, and reads the second half, which others wrote.
    """
    written, truth = load_digits(return_X_y=True)
    half = len(truth) // 2
    reader = SVC(gamma=0.001).fit(written[:half], truth[:half])
    drawn = np.clip(pictures.reshape(len(pictures), -1) + 1, 0, 2) * 8
    return reader.score(drawn, digits), reader.score(written[half:], truth[half:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=200, help="how often to see all pictures")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the noise")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument(
        "--judge", type=int, default=1000, help="how many pictures to draw and read"
    )
    here = Path(__file__).resolve().parent
    parser.add_argument("--output", type=Path, default=here / "digits.onnx", help="the model")
    options = parser.parse_args(arguments)
    for name in ("epochs", "threads", "judge"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}, expected at least 1")
    if not options.output.absolute().parent.is_dir():
        parser.error(f"--output: there is no folder {str(options.output.parent)!r}")
    torch.set_num_threads(options.threads)
    begin, processor = time.perf_counter(), time.process_time()
    network = train(options.epochs, options.seed)
    seconds, processor = time.perf_counter() - begin, time.process_time() - processor
    count = sum(weight.numel() for weight in network.parameters())
    print(f"Trained {count:,} parameters in {seconds:.0f} s ({processor:.0f} s of processor time)")
    export(network, options.output)
    print(f"Written: {options.output}, {options.output.stat().st_size / 1e6:.2f} MB")
    digits = np.arange(options.judge) % 10
    try:
        with Master(options.output, devices=2) as master:
            pictures = draw(
                lambda inputs: master.predict(inputs)["velocity"],
                first_noise(digits.tolist(), options.seed),
                digits.tolist(),
                steps=50,
                guidance=1.5,
            )
    except McinferError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    drawn, written = readable(pictures, digits)
    print(f"A classifier reads {drawn:.1%} of {options.judge} drawn digits as what was asked for")
    print(f"(and {written:.1%} of the digits that people wrote, which it has not seen)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
