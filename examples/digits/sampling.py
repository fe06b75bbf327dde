"""Draw digits with a diffusion model: guided sampling and pictures, in NumPy alone.

The model itself is a function that the caller gives, so workers, a session or a torch module can do its work.
"""

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE = 8
"""Pixels of a picture's side."""

NO_DIGIT = 10
"""What the model gets for a digit where it is to draw any of them."""

Array = NDArray[np.float32]
Inputs = dict[str, NDArray[Any]]

Model = Callable[[Inputs], Array]
"""What one step needs of the network; n rows, one for each picture:

`sample` float32[n, 1, 8, 8], `time` float32[n] from 0 (a picture) to 1 (noise), `digit` int64[n], 0 to 9 or
`NO_DIGIT`, to `velocity` float32[n, 1, 8, 8].
"""


def first_noise(digits: Sequence[int], seed: int) -> Array:
    """Where the drawing of so many pictures begins: float32[n, 1, 8, 8]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((len(digits), 1, SIDE, SIDE), np.float32)


def draw(model: Model, noise: Array, digits: Sequence[int], steps: int, guidance: float) -> Array:
    """Make pictures of noise.

    The schedule is the cosine: a picture of time t is cos(φ) clean + sin(φ) noise with φ = t π / 2, and the
    velocity is cos(φ) noise - sin(φ) clean. The steps are those of DDIM without new noise. (Salimans and Ho
    2022, "Progressive Distillation for Fast Sampling of Diffusion Models", appendix D.)

    Each step runs the model on a batch of 2 n rows, without and with the digits, for classifier-free guidance
    (Ho and Salimans 2022).

    Args:
        model: See `Model`.
        noise: See `first_noise`; one picture for each digit.
        digits: What to draw, 0 to 9 each.
        steps: How many; more are better, and take longer.
        guidance: How much the digits count: 1 is what the model makes of them, 0 leaves them out.

    Returns:
        float32[n, 8, 8], from -1 (paper) to 1 (ink).
    """
    count = len(digits)
    asked = np.array([NO_DIGIT] * count + [*digits], np.int64)
    picture = noise
    for time, later in pairwise(np.linspace(1, 0, steps + 1).tolist()):
        inputs = {
            "sample": np.concatenate([picture, picture]),
            "time": np.full(2 * count, time, np.float32),
            "digit": asked,
        }
        velocity = model(inputs)
        unguided, guided = velocity[:count], velocity[count:]
        velocity = unguided + guidance * (guided - unguided)
        signal, spread = _parts(time)
        # Guidance goes too far where it is strong: no paper is whiter than white.
        clean = np.clip(signal * picture - spread * velocity, -1, 1)
        remaining = (picture - signal * clean) / spread
        signal, spread = _parts(later)
        picture = (signal * clean + spread * remaining).astype(np.float32, copy=False)
    return picture[:, 0]


def _parts(time: float) -> tuple[float, float]:
    """How much of the clean picture, and of the noise, there is at a time."""
    return math.cos(time * math.pi / 2), math.sin(time * math.pi / 2)


# Pictures.

_MAGNIFIED = 4
"""Pixels of the file for each of a picture, across and down."""
_GAP = 6
"""Pixels between pictures, and around all of them."""


def sheet(pictures: Array, columns: int) -> NDArray[np.uint8]:
    """All pictures on one white sheet, row by row: uint8[height, width], 0 is black.

    They are magnified by cubic interpolation (Keys 1981).
    """
    side = SIDE * _MAGNIFIED
    places = (np.arange(side) + 0.5) / _MAGNIFIED - 0.5
    weights = _cubic(np.abs(places[:, None] - np.arange(SIDE)))
    ink = weights @ np.clip((pictures + 1) / 2, 0, 1) @ weights.T
    rows = -(-len(pictures) // columns)
    pitch = side + _GAP
    paper = np.zeros((rows * pitch + _GAP, columns * pitch + _GAP))
    for number, one in enumerate(ink):
        top, left = (_GAP + pitch * place for place in divmod(number, columns))
        paper[top : top + side, left : left + side] = one
    return np.rint(255 * (1 - np.clip(paper, 0, 1))).astype(np.uint8)


def _cubic(distance: NDArray[Any]) -> NDArray[Any]:
    """The weight of a pixel at a distance, in pixels, with Keys's a = -1/2."""
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


def png(gray: NDArray[np.uint8]) -> bytes:
    """The file of a picture, uint8[height, width], by https://www.w3.org/TR/png-3/."""
    height, width = gray.shape
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits of gray, not interlaced
    lines = np.pad(gray, ((0, 0), (1, 0)))  # each line begins with its filter: 0 is none
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
