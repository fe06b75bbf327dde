"""What the tests in this folder run on, pools there, and what goes into these and comes out of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer import EngineOptions, Master
from mcinfer.cards.nvidia_smi import gpus

IMAGES = np.random.default_rng(0).standard_normal((8, 3, 32, 32), np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """The cards of a test run.

    Attributes:
        real: Whether they are not emulated.
        count: How many there are.
    """

    real: bool
    count: int

    def options(self, **options: Any) -> EngineOptions:
        """Options for a pool; on emulated cards, ONNX Runtime's CPU provider may serve."""
        return EngineOptions(allow_fallback=not self.real, **options)

    def pool(self, model: Path, *devices: str, **options: Any) -> Master:
        """A pool whose workers hold the weights once per card, whatever their size."""
        return Master(model, devices, options=self.options(prepare="always", **options))


def why_no_card() -> str:
    """Why no card can be used; empty if one can."""
    try:
        gpus()
    except OSError as exc:
        return str(exc)
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return f"onnxruntime {onnxruntime.__version__} has no CUDAExecutionProvider"
    try:
        import cupy  # noqa: F401
        from cuda.bindings import driver  # noqa: F401
    except ImportError as exc:
        return str(exc)
    return ""


def check(outputs: dict[str, Any], expected: NDArray[np.float32]) -> None:
    """Fail unless these are the embeddings, on the host or on a card, as far as TensorFloat-32 is exact."""
    assert [*outputs] == ["embedding"]
    array = outputs["embedding"]
    found = array if isinstance(array, np.ndarray) else array.get()
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())
