"""What a way of running a model has to do to be measured. Ways of one's own are classes of this kind.

``mcinfer bench MODEL --against my_ways.py:MyWay`` measures a class `MyWay` of the file ``my_ways.py`` beside
the ways that mcinfer brings. Each way lives in a process of its own, which makes one object of the class and
calls it from the threads of its clients.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
"""Arrays by input name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a way is made with.

    Attributes:
        model: Path of the model.
        cores: Cores that it may use in all.
        devices: One for each worker: ``("cpu:0", "cpu:1")``.
        threads: Of each worker, for one run; None is as many as the worker has cores.
        worker_cores: By worker, the cores that it is pinned to; empty for equal shares of all.
        outputs: The outputs' names, in the model's order.
        split: Inputs that have the model's batch as their first dimension; others belong to every row.
        fixed_batch: Rows that one run takes, no more and no less; None where it takes any number.
        max_batch_size: Rows that small requests may be joined to, for a way that joins them.
        max_delay: Seconds that a request may wait for others, likewise.
    """

    model: str
    cores: int
    devices: tuple[str, ...]
    threads: int | None
    outputs: tuple[str, ...]
    split: tuple[str, ...]
    max_batch_size: int
    max_delay: float
    worker_cores: tuple[tuple[int, ...], ...] = ()
    fixed_batch: int | None = None

    @property
    def worker_threads(self) -> int:
        """Threads of a worker's run, for ways that have to be told a number."""
        return self.threads or max(1, self.cores // len(self.devices))


class RunningWay(ABC):
    """A model that is loaded and ready. Making it is the start that is measured.

    Attributes:
        text: What it is, in a few words, for tables.
        workers: Processes, or sessions, that run the model.
    """

    text: ClassVar[str]
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
            What holds the answer; it is kept until the same client's next answer is there, as a program
            that uses it would.
        """

    def run_seconds(self) -> tuple[int, float]:
        """How many runs of the engine there were so far, and their seconds; (0, 0.0) if it cannot tell."""
        return 0, 0.0

    @abstractmethod
    def close(self) -> None:
        """End all that it has started."""
