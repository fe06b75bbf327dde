"""A model once more, with the cores of all workers on the CPU, for a run that comes alone.

::

    run, one of many ──► WideEngine ──► the narrow engine, on the worker's own cores
    run that is alone ──► WideEngine ──► the wide engine, on the pool's cores, if it is open and was faster

A worker on the CPU is pinned to its share of the cores, so many requests at once are fast, and one that comes
alone would have a part of the CPU. Weights are mapped, so a second engine on the same model takes little more
than its activations.

* It is opened when the first run comes alone, by a thread of its own. Runs are narrow until then.
* The thread that runs is pinned to the cores of what it runs. The engine's own threads keep those that the
  opening thread had.
* What fails wide runs narrow. If that succeeds, or if memory was short, all others do from then on.
* Models of many small operators take longer with more threads. So runs of one layout are narrow again if wide
  ones were slower than those before the engine was there, or than one after the first wide ones.

Ownership: the thread that runs uses both engines; the opening thread only hands the wide one over.
"""

import logging
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import WeakSet

from mcinfer.config import CoreShare
from mcinfer.engines.base import (
    BoundRun,
    Buffer,
    Engine,
    EngineAround,
    OutOfMemoryError,
    Produced,
    RunCancelledError,
    Strings,
)
from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.machine import format_core_list, whole_cpus
from mcinfer.model_cache import LEAST_PREPARED_BYTES
from mcinfer.model_cache.keys import ModelContent

_TRIALS = 8
_TRIED_AGAIN = 1024
"""Wide runs of a layout before the fastest is compared, and runs after which that is done again."""

_log = logging.getLogger("mcinfer.worker")


class WideEngine(EngineAround):
    """An engine, and another one with more cores, which is opened when it is first of use.

    Args:
        narrow: The worker's own engine.
        share: The worker's own cores, and those of the pool.
        open_wide: Opens another one for these cores.
        content: Of the model's files.

    Attributes:
        alone: Of runs that come alone: the other engine, once it is open; until then the worker's own.
        is_open: Whether there is another one.
        begun: Whether it was asked for.
        on_pool: Whether the thread that runs is pinned to the pool's cores.
    """

    def __init__(
        self,
        narrow: Engine,
        share: CoreShare,
        open_wide: Callable[[CoreShare], Engine],
        content: ModelContent,
    ) -> None:
        super().__init__(narrow)
        self._own, self._wide_cores = share.cores, share.wide_cores
        self._open_wide = open_wide
        self._content = content
        self._opening = threading.Thread(target=self._open, name="mcinfer-wide", daemon=True)
        self._bound: WeakSet[_Run] = WeakSet()  # to the wide engine too
        self._opened = self.alone = narrow
        self.is_open = self.begun = self.on_pool = False

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
        return _Run(self, inputs, outputs)

    def bind_wide(self, run: "_Run") -> BoundRun:
        """Bind what a run is bound to once more, until the wide engine is closed."""
        self._bound.add(run)
        return self.alone.bind(*run.tensors)

    def arm(self) -> None:
        self.engine.arm()
        if self._opened is not self.engine:
            # Here, so that the run and `cancel` see the same.
            self.alone, self.is_open = self._opened, True
            self.alone.arm()

    def cancel(self) -> None:
        self.engine.cancel()
        self.alone.cancel()

    def close(self) -> None:
        self._close_wide()
        super().close()
        self.lingers = self._opening.is_alive()

    def give_up(self, why: str) -> None:
        """Run on the worker's own cores alone from now on; nothing if that was so before."""
        if self.is_open:
            _log.warning("runs use this worker's cores alone from now on: %s", why)
            self._close_wide()

    def _close_wide(self) -> None:
        self.begun, self.is_open = True, False
        for run in self._bound:
            run.unbind_wide()
        opened, self._opened, self.alone = self._opened, self.engine, self.engine
        if opened is not self.engine:
            opened.close()

    def move(self, *, to_pool: bool) -> bool:
        """Pin the calling thread to the pool's cores, or to the worker's own; whether it is on the pool's."""
        with suppress(OSError):  # this process may not use these cores any more
            os.sched_setaffinity(0, self._wide_cores if to_pool else self._own)
            self.on_pool = to_pool
        return self.on_pool

    def begin(self) -> None:
        """Open the wide engine, unless it would be of no use."""
        self.begun = True
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        try:
            if not self.prepared and self._content.size >= LEAST_PREPARED_BYTES:
                why = "a second copy of the weights would be as large as the first"
            elif limit != resource.RLIM_INFINITY and 2 * _memory_bytes() > limit:
                why = "the worker's memory limit may not hold the activations twice"
            else:
                self._opening.start()
                return
        except (OSError, RuntimeError) as exc:  # there is no descriptor or no thread left
            why = str(exc)
        _log.debug("runs use this worker's cores alone: %s", why)

    def _open(self) -> None:
        try:
            try:
                os.sched_setaffinity(
                    0, self._wide_cores
                )  # of this thread, and of those that it starts
            except OSError as exc:
                own = format_core_list(self._wide_cores)
                raise BuildError(f"none of the pool's cores {own} is allowed now") from exc
            threads = min(len(self._wide_cores), whole_cpus())
            engine = self._open_wide(CoreShare(cores=self._wide_cores, threads=threads))
            if engine.prepared != self.prepared or not self._content.unchanged():
                engine.close()
                raise BuildError("the model is not what it was")
            self._opened = engine
        except Exception as exc:  # of any class: it is the runtime's
            _log.warning("runs use this worker's cores alone: %s", exc)


class _Run(BoundRun):
    """A layout, bound to the narrow engine, and to the wide one once it runs there.

    Attributes:
        tensors: Inputs and outputs.
    """

    def __init__(
        self, engine: WideEngine, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]
    ) -> None:
        self._engine = engine
        self.tensors = inputs, outputs
        self._narrow = engine.engine.bind(inputs, outputs)
        self._wide: BoundRun | None = None
        # Seconds of the fastest run of each kind, and runs since the wide engine was there.
        self._narrow_seconds = self._wide_seconds = math.inf
        self._runs = 0

    def unbind_wide(self) -> None:
        self._wide = None

    def execute(self) -> Sequence[Produced | Strings]:
        self.wide = False
        if self._engine.on_pool:
            self._engine.move(to_pool=False)
        try:
            return self._narrow.execute()
        except (OutOfMemoryError, MemoryError) as exc:
            if not self._engine.is_open:
                raise
            why = str(exc)
        # Outside of the handler: the error would keep what the run had.
        self._engine.give_up(why)
        return self._narrow.execute()

    def execute_alone(self) -> Sequence[Produced | Strings]:
        engine = self._engine
        if not engine.begun:
            engine.begin()
        is_open = engine.is_open
        was_faster = self._wide_seconds < self._narrow_seconds < math.inf
        takes_wide = is_open and (was_faster or self._runs < _TRIALS)
        start = time.perf_counter()
        if takes_wide and (engine.on_pool or engine.move(to_pool=True)):
            produced = self._execute_wide()
        else:
            produced = self.execute()
        seconds = time.perf_counter() - start
        if self.wide:
            self._wide_seconds = min(self._wide_seconds, seconds)
        else:
            self._narrow_seconds = min(self._narrow_seconds, seconds)
        self._runs += is_open
        if self._runs >= _TRIED_AGAIN:
            self._wide_seconds, self._runs = math.inf, 0
        return produced

    def _execute_wide(self) -> Sequence[Produced | Strings]:
        self.wide = True
        try:
            if self._wide is None:
                self._wide = self._engine.bind_wide(self)
            return self._wide.execute()
        except (RunCancelledError, InvalidInputError):
            raise
        except Exception as exc:  # of any class: it is the runtime's
            why, is_memory = str(exc), isinstance(exc, (OutOfMemoryError, MemoryError))
        # Outside of the handler, as above.
        if is_memory:
            self._engine.give_up(why)
        produced = self.execute()
        self._engine.give_up(why)  # it was the wide engine's fault
        return produced


def _memory_bytes() -> int:
    """Bytes of this process that `RLIMIT_DATA` limits; see proc_pid_status(5)."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmData:"))
