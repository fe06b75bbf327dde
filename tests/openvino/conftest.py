"""What these tests share with those of processes. They need OpenVINO: `make test-openvino`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.conftest import onnx_model, prepared_models
from tests.process.conftest import (
    _nothing_is_left,
    checked_together,
    fake_model,
    pytest_runtest_makereport,
    runtime_dir,
)
from tests.text_models import text_model

__all__ = [
    "_nothing_is_left",
    "checked_together",
    "fake_model",
    "onnx_model",
    "prepared_models",
    "pytest_runtest_makereport",
    "runtime_dir",
]

# Tests import OpenVINO themselves, which would send an event.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

SaveModel = Callable[..., str]


@pytest.fixture
def save(tmp_path: Path) -> SaveModel:
    """Writes a model of `text_model`, and gives its path."""
    count = 0

    def write(text: str, name: str = "", **how: Any) -> str:
        nonlocal count
        count += 1
        path = tmp_path / (name or f"model{count}.onnx")
        onnx.save(text_model(text, **{"opset": 21, **how}), path)
        return str(path)

    return write
