"""What the examples of this folder have in common: the UNet, what it is run on, and how they end.

Classifier-free guidance (Ho and Salimans 2022) runs a UNet on a batch of two, an unconditional and a
conditional row.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from build_unet import CONTEXT_TOKENS, LATENT_CHANNELS, SIZES, build_unet
from numpy.typing import NDArray

from mcinfer import McinferError, TensorSpec

Array = NDArray[Any]

TRAINING_STEPS = 1000
MAX_RELATIVE_ERROR = 1e-4


class WrongAnswerError(Exception):
    """An answer is not what it should be."""


def finish(work: Callable[[], None]) -> int:
    """Do the work of an example and say how it ended; the exit status."""
    try:
        work()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (McinferError, OSError, WrongAnswerError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    print("=========== success ===========")
    return 0


@contextmanager
def temporary_unet(size: str) -> Iterator[Path]:
    """The path of a UNet of this size, in a temporary folder of its own.

    Its prepared form lies there too: weights that nobody will use again are not for the user's cache.
    """
    with tempfile.TemporaryDirectory(prefix="sd_dual_core-") as folder:
        os.environ["MCINFER_CACHE"] = str(Path(folder) / "cache")
        print(f"Building the {size} UNet: {SIZES[size].parameters:,} parameters")
        yield build_unet(Path(folder) / "unet.onnx", size)


def first_noise(specs: Sequence[TensorSpec], size: str, seed: int) -> tuple[Array, Array]:
    """Latents float32[1, 4, h, w] and text states float32[2, 77, d] (unconditional, conditional).

    Sizes that the model leaves open are those of `size`.
    """
    widths = SIZES[size]
    sample, _, states = (spec.shape for spec in specs)
    side = widths.latent_side
    height, width = (n if isinstance(n, int) else side for n in sample[2:])
    tokens = states[1] if isinstance(states[1], int) else CONTEXT_TOKENS
    channels = states[2] if isinstance(states[2], int) else widths.context_channels
    rng = np.random.default_rng(seed)
    latents = rng.standard_normal((1, LATENT_CHANNELS, height, width), dtype=np.float32)
    context = rng.standard_normal((2, tokens, channels), dtype=np.float32)
    return latents, context


def guided_batch(
    specs: Sequence[TensorSpec], latents: Array, timestep: int, context: Array
) -> list[Array]:
    """The UNet's inputs, in its order and of its dtypes: the same latents in both rows."""
    arrays = [np.concatenate([latents, latents]), np.array([timestep]), context]
    return [array.astype(spec.dtype) for array, spec in zip(arrays, specs, strict=True)]


def relative_difference(got: Array, expected: Array) -> float:
    """The largest difference, in the largest value's terms."""
    scale = float(np.abs(expected).max()) or 1.0
    return float(np.abs(got - expected).max()) / scale
