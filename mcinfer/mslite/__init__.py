"""MindSpore Lite's Python API, on mcinfer: ``import mcinfer.mslite as mslite``.

Names, defaults and errors are those of ``mindspore_lite``; docs/mindspore_lite.md says what is the same,
what is better and what is not there.
"""

from mcinfer.mslite.context import Context
from mcinfer.mslite.model import (
    Model,
    ModelGroup,
    ModelGroupFlag,
    ModelParallelRunner,
    ModelType,
    RunnerConfig,
)
from mcinfer.mslite.tensor import DataType, Format, Tensor, TensorMeta

__all__ = [
    "Context",
    "DataType",
    "Format",
    "Model",
    "ModelGroup",
    "ModelGroupFlag",
    "ModelParallelRunner",
    "ModelType",
    "RunnerConfig",
    "Tensor",
    "TensorMeta",
]
