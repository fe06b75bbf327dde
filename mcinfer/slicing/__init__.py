"""Cutting one ONNX model into a slice for each rank. Only this package imports `onnx`."""

from mcinfer.errors import MissingDependencyError

try:
    import onnx  # noqa: F401 the modules of this package need it
except ImportError as exc:
    raise MissingDependencyError(
        "cutting a model needs the package onnx: pip install 'mcinfer[onnx]'"
    ) from exc
