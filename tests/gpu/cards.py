"""What the tests in this folder run on, and pools there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcinfer import EngineOptions, Master


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
