"""One model on all the devices of a machine, from Python, without a server.

Names are imported when they are first used: a worker imports this package too, and needs few of them.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 13) and not sys._is_gil_enabled():
    # The workers inherit the environment, and no options of the interpreter.
    raise ImportError(
        "mcinfer needs the GIL, which this free-threaded Python has switched off: set the environment "
        "variable PYTHON_GIL=1 before it starts (-X gil=1 would not reach the workers), or use another build"
    )

if TYPE_CHECKING:
    from mcinfer.config import EngineOptions, Limits, Parallel, RestartPolicy, Timeouts
    from mcinfer.errors import (
        BuildError,
        CardError,
        CardLostError,
        CardMemoryError,
        ClosedError,
        CollectiveTimeoutError,
        EngineError,
        InvalidInputError,
        McinferError,
        MemoryFullError,
        MissingDependencyError,
        ModelNotFoundError,
        PredictError,
        PredictTimeoutError,
        ProtocolError,
        QueueFullError,
        RankDiedError,
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

__version__ = "0.2.0"

__all__ = [
    "BuildError",
    "CardError",
    "CardLostError",
    "CardMemoryError",
    "ClosedError",
    "CollectiveTimeoutError",
    "EngineError",
    "EngineOptions",
    "Health",
    "Histogram",
    "InvalidInputError",
    "Limits",
    "Master",
    "McinferError",
    "MemoryFullError",
    "MissingDependencyError",
    "ModelNotFoundError",
    "ModelSpec",
    "Parallel",
    "ParallelPredictUtils",
    "PredictError",
    "PredictTimeoutError",
    "ProtocolError",
    "QueueFullError",
    "RankDiedError",
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

_HOMES = ("errors", "config", "specs", "statistics", "sharding", "master", "parallel")
"""The modules of the public names, the cheapest to import first."""


if not TYPE_CHECKING:  # a type checker would take any name for one of the module's

    def __getattr__(name: str) -> Any:
        if name in __all__:
            for home in _HOMES:
                module = import_module(f"mcinfer.{home}")
                if hasattr(module, name):
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])


if getattr(sys, "frozen", False):
    import_module("mcinfer.process").run_as_frozen_child()
