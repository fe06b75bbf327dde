"""A model to try mcinfer with."""

from pathlib import Path


def encoder() -> Path:
    """The path of a small image encoder in ONNX form, which is part of the package.

    Its input is `image`, float32[batch, 3, 32, 32], its output `embedding`, float32[batch, 64]. Its weights
    are random, so its answers mean nothing. (``examples/build_encoder.py`` in the source wrote it.)
    """
    return Path(__file__).with_name("encoder.onnx")
