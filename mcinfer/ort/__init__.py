"""ONNX Runtime's Python API with sessions that share their weights: ``import mcinfer.ort as ort``.

An `InferenceSession` runs in this process, or with ``devices=`` on worker processes.
"""

from typing import Any

from mcinfer.extras import requires
from mcinfer.process import without_telemetry

with requires(
    "mcinfer.ort needs ONNX Runtime (for NVIDIA GPUs its package onnxruntime-gpu)",
    "onnxruntime",
    extra="cpu",
):
    without_telemetry()
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as _native

from mcinfer.ort.arrays import copy_misread_arrays
from mcinfer.ort.options import note_calls, note_default_logger
from mcinfer.ort.session import InferenceSession, install, uninstall

note_calls(_native.SessionOptions)
note_calls(_native.RunOptions)
note_default_logger()
copy_misread_arrays()

__all__ = ["InferenceSession", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    # Type checkers know no name of ONNX Runtime's either, which ships no types.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(onnxruntime, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in dir(onnxruntime) if not name.startswith("_"))})
