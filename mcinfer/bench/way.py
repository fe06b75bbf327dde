"""The interface of a way of running a model. Implement it to measure a way of your own.

``mcinfer bench MODEL --against my_ways.py:MyWay`` measures the class `MyWay` of the file ``my_ways.py``, a
subclass of `RunningWay`. Each way lives in a process of its own, which makes one object of the class and
calls it from its clients' threads.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from mcinfer.engines.names import DEFAULT_ENGINE
from mcinfer.sharding import Axes, Split

Arrays = Mapping[str, NDArray[Any]]
"""Arrays by input name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The arguments that a way is made with.

    Attributes:
        model: Path of the model.
        cores: Cores that the way may use.
        devices: One for each worker: ``("cpu:0", "cpu:1")``.
        engine: Of mcinfer's workers, and after a colon the precision: ``"openvino:bf16"``.
        threads: Threads of a worker's run; None: as many as the worker has cores.
        split: Where a request's rows lie, and how its outputs are joined.
        fixed_batch: The only number of rows that a run takes; None where it takes any.
        batches: Rows of the requests that will come; empty where that is not known.
        batch_axes: The user's, as `mcinfer.Master` takes them; `output_axes` too.
        max_batch_size: Rows that small requests may be joined to, for a way that joins them.
    """

    model: str
    cores: int
    split: Split
    devices: tuple[str, ...] = ()
    engine: str = DEFAULT_ENGINE
    threads: int | None = None
    max_batch_size: int = 1
    fixed_batch: int | None = None
    batches: tuple[int, ...] = ()
    batch_axes: Axes = field(default_factory=dict)
    output_axes: Axes = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(self.split.outputs)

    @property
    def worker_threads(self) -> int:
        return self.threads or max(1, self.cores // len(self.devices))

    def why_uncut(self, split: Split) -> str:
        """Why this split cuts no request over the devices; empty where it cuts some."""
        if not split.splits:
            return why_whole(split)
        if len(self.devices) == 1:
            return "there is one worker"
        one = self.fixed_batch or 1
        if self.batches and max(self.batches) <= one:
            return "each request has one row" if one == 1 else f"each request is one run of {one}"
        return ""


def engine_arguments(engine: str) -> dict[str, Any]:
    """Arguments of `mcinfer.Master` for `Setup.engine`: `engine`, and `options` by name."""
    name, _, precision = engine.partition(":")
    return {"engine": name, "options": {"precision": precision} if precision else {}}


def why_whole(split: Split) -> str:
    """Why requests run whole; empty where they may be split."""
    if split.splits:
        return ""
    if split.reason or not split.unjoined:
        return split.reason or split.summary()
    name = split.unjoined[0]
    return f"output {name!r}: {split.outputs[name]}"


class RunningWay(ABC):
    """A model that is loaded and ready. Making it is the start that is measured.

    Attributes:
        text: A short description for tables; read after the start, so it may depend on the model.
        workers: Processes, or sessions, that run the model.
    """

    text: str
    workers: int = 1

    @abstractmethod
    def __init__(self, setup: Setup) -> None:
        """Load the model; returns when it is ready."""

    @abstractmethod
    def run(self, inputs: Arrays) -> object:
        """Run one request and wait for its answer; any number of threads call it at once.

        Args:
            inputs: One request's arrays, C-contiguous, borrowed until the call returns.

        Returns:
            The answer's owner. The client keeps it until its next answer is there, as a program would.
        """

    def run_seconds(self) -> tuple[int, float]:
        """The engine's runs so far, and their seconds; (0, 0.0) where they are not known."""
        return 0, 0.0

    @abstractmethod
    def close(self) -> None:
        """End everything that the way has started."""
