"""One model on all the devices of a machine, from Python, without a server.

Names are imported when they are first used: a worker imports this package too, and must not pay
for what only a master needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcinfer.config import EngineOptions, Limits, RestartPolicy, Timeouts
    from mcinfer.errors import (
        BuildError,
        ClosedError,
        EngineError,
        InvalidInputError,
        McinferError,
        MissingDependencyError,
        ModelNotFoundError,
        PredictError,
        PredictTimeoutError,
        ProtocolError,
        QueueFullError,
        ReadyTimeoutError,
        WeightAccessError,
        WorkerDiedError,
    )
    from mcinfer.master import Master
    from mcinfer.parallel import ParallelPredictUtils
    from mcinfer.sharding import Split
    from mcinfer.specs import ModelSpec, TensorSpec
    from mcinfer.statistics import (
        Health,
        Histogram,
        RequestTrace,
        ShardTrace,
        Statistics,
        WorkerStatistics,
    )

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "ClosedError",
    "EngineError",
    "EngineOptions",
    "Health",
    "Histogram",
    "InvalidInputError",
    "Limits",
    "Master",
    "McinferError",
    "MissingDependencyError",
    "ModelNotFoundError",
    "ModelSpec",
    "ParallelPredictUtils",
    "PredictError",
    "PredictTimeoutError",
    "ProtocolError",
    "QueueFullError",
    "ReadyTimeoutError",
    "RequestTrace",
    "RestartPolicy",
    "ShardTrace",
    "Split",
    "Statistics",
    "TensorSpec",
    "Timeouts",
    "WeightAccessError",
    "WorkerDiedError",
    "WorkerStatistics",
]

_HOMES = {
    "Master": "master",
    "ParallelPredictUtils": "parallel",
    "Split": "sharding",
    "ModelSpec": "specs",
    "TensorSpec": "specs",
    "Statistics": "statistics",
    "WorkerStatistics": "statistics",
    "Health": "statistics",
    "Histogram": "statistics",
    "RequestTrace": "statistics",
    "ShardTrace": "statistics",
    "EngineOptions": "config",
    "Limits": "config",
    "RestartPolicy": "config",
    "Timeouts": "config",
}
"""The module of each public name; those that are not here are exceptions."""


if not TYPE_CHECKING:  # where it would make any name one of the module's

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"mcinfer.{_HOMES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])
