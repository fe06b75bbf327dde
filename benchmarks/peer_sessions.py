"""What each process of another system does with a request: it runs it in a session of its own.

In a module of its own: those processes import it by its name.
"""

import os
from collections.abc import Mapping
from functools import cache
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from mcinfer.bench.baselines import open_session, providers_of
from mcinfer.bench.way import Arrays
from mcinfer.process import watch_parent

Answer = dict[str, NDArray[Any]]


class LoadedModel:
    """A session, and the time that its runs take.

    Args:
        model: Path of the model.
        threads: Of each run.
        device: Such as ``"cpu:0"``.
        outputs: Names of those that are wanted.
    """

    def __init__(self, model: str, threads: int, device: str, outputs: tuple[str, ...]) -> None:
        self._session = open_session(model, threads, providers_of(device))
        self._outputs = outputs

    def run(self, inputs: Arrays) -> tuple[Answer, float]:
        """The outputs by name, and the run's seconds."""
        begin = perf_counter()
        outputs = self._session.run(self._outputs, inputs)
        seconds = perf_counter() - begin
        return dict(zip(self._outputs, outputs, strict=True)), seconds


# For executors, whose functions have no state but what their process keeps.


@cache
def _loaded(model: str, threads: int, device: str, outputs: tuple[str, ...]) -> LoadedModel:
    return LoadedModel(model, threads, device, outputs)


def load(parent: int, arguments: tuple[Any, ...], ready: Any) -> None:
    """Load the model in this process, which is to end with its parent.

    Args:
        parent: Its pid.
        arguments: Those of `LoadedModel`.
        ready: A semaphore that is released when it is loaded.
    """
    watch_parent(parent, os.eventfd(0))  # there is no channel that hangs up, and this never does
    _loaded(*arguments)
    ready.release()


def run(arguments: tuple[Any, ...], inputs: Mapping[str, NDArray[Any]]) -> tuple[Answer, float]:
    """See `LoadedModel.run`."""
    return _loaded(*arguments).run(inputs)
