"""mcinfer's own ways."""

from typing import ClassVar

from mcinfer.bench.way import Arrays, RunningWay, Setup
from mcinfer.config import EngineOptions
from mcinfer.master import Master


class _PoolWay(RunningWay):
    """A started master."""

    joins: ClassVar[bool] = False

    def __init__(self, setup: Setup) -> None:
        """Start the workers."""
        max_batch_size = setup.max_batch_size if self.joins else 1
        self.workers = len(setup.devices)
        self._master = Master(
            setup.model,
            setup.devices,
            options=EngineOptions(threads=setup.threads, cores=setup.worker_cores or None),
            max_batch_size=max_batch_size,
            max_delay=setup.max_delay if max_batch_size > 1 else 0.0,
        ).start()

    def run_seconds(self) -> tuple[int, float]:
        """As the workers tell."""
        workers = self._master.statistics().workers
        return sum(w.runs for w in workers), sum(w.busy_seconds for w in workers)

    def close(self) -> None:
        """End the workers."""
        self._master.close()


class Sharded(_PoolWay):
    """Each batch over all workers."""

    text = "mcinfer.predict: each batch split over all workers"

    def run(self, inputs: Arrays) -> object:
        """Over all workers."""
        return self._master.predict(inputs)


class Concurrent(_PoolWay):
    """Each request whole on a free worker."""

    text = "mcinfer.submit: each request whole on a free worker"

    def run(self, inputs: Arrays) -> object:
        """On one worker."""
        return self._master.submit(inputs).result()


class Batched(Concurrent):
    """Requests that come together run together."""

    text = "mcinfer.submit with dynamic batching"
    joins = True
