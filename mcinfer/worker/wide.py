"""The model of a worker once more, with the cores of all workers on the CPU, for a run that comes alone.

A worker on the CPU is pinned to its share of the cores, so many requests at once are fast, and one that comes
alone would have a part of the CPU. Weights are mapped, so a second engine on the same model takes little more
than its activations.

* It is opened when the first run comes that may be wide, by a thread of its own. Runs are narrow until then.
* The main thread is pinned to the cores of what it runs. The engine's own threads keep those that the opening
  thread had.
* What fails wide runs narrow. If that succeeds, or if memory was short, all others do from then on.
* Models of many small operators take longer with more threads. So runs of one layout are narrow again if wide
  ones were slower than those before the engine was there, or than one after the first wide ones.

Ownership: the main thread uses the engine; the opening thread only hands it over.
"""

import logging
import math
import os
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mcinfer.config import CoreShare
from mcinfer.engines.base import Engine
from mcinfer.errors import BuildError
from mcinfer.machine import format_core_list, whole_cpus
from mcinfer.model_cache import LEAST_PREPARED_BYTES
from mcinfer.model_cache.keys import ModelContent

_TRIALS = 8
_TRIED_AGAIN = 1024
"""Wide runs of a layout before the fastest is compared, and runs after which that is done again."""

_MAX_LAYOUTS, _MAX_LAYOUT_BYTES = 256, 1 << 12
"""That are compared. Those with strings, which may have any length, never come again."""

_log = logging.getLogger("mcinfer.worker")


@dataclass(slots=True)
class _Seconds:
    """Of the fastest narrow and wide run of a layout; `runs` since the wide engine was there."""

    narrow: float = math.inf
    wide: float = math.inf
    runs: int = 0


class WideEngine:
    """Opens an engine with more cores, and pins the main thread to them while it runs.

    Args:
        share: The worker's own cores, and those of the pool.
        narrow: The worker's own engine.
        open_wide: Opens another one for these cores.
        content: Of the model's files.
    """

    def __init__(
        self,
        share: CoreShare,
        narrow: Engine,
        open_wide: Callable[[CoreShare], Engine],
        content: ModelContent,
    ) -> None:
        self._own, self._pool = share.cores, share.pool
        self._narrow = narrow
        self._open_wide = open_wide
        self._content = content
        self._engine: Engine | None = None
        self._begun = False
        self._seconds: dict[bytes, _Seconds] = {}
        self._opening = threading.Thread(target=self._open, name="mcinfer-wide", daemon=True)
        self.on_pool = False

    @property
    def is_open(self) -> bool:
        return self._engine is not None

    @property
    def is_opening(self) -> bool:
        return self._opening.is_alive()

    def engine(self, layout: bytes) -> Engine | None:
        """The engine, with the main thread on its cores; None if it is not there, not yet, or too slow."""
        engine = self._engine
        if engine is None:
            if not self._begun:
                self._begun = True
                try:
                    why = self._why_not()
                    if not why:
                        self._opening.start()
                except (OSError, RuntimeError) as exc:  # there is no descriptor or no thread left
                    why = str(exc)
                if why:
                    _log.debug("runs use this worker's cores alone: %s", why)
            return None
        known = self._seconds.get(layout)
        if known and known.runs >= _TRIALS and not known.wide < known.narrow < math.inf:
            return None
        if not self.on_pool:
            try:
                os.sched_setaffinity(0, self._pool)
            except OSError:  # this process may not use these cores any more
                return None
            self.on_pool = True
        return engine

    def learn(self, layout: bytes, seconds: float, *, wide: bool) -> None:
        """Learn from a run that might be wide, and of this layout, how long it took."""
        if len(layout) > _MAX_LAYOUT_BYTES:
            return
        known = self._seconds[layout] = self._seconds.pop(layout, _Seconds())
        if len(self._seconds) > _MAX_LAYOUTS:  # the least recently used goes
            del self._seconds[next(iter(self._seconds))]
        if wide:
            known.wide = min(known.wide, seconds)
        else:
            known.narrow = min(known.narrow, seconds)
        known.runs += self.is_open
        if known.runs >= _TRIED_AGAIN:
            known.wide, known.runs = math.inf, 0

    def return_cores(self) -> None:
        """Pin the main thread to the worker's own cores again."""
        with suppress(OSError):
            os.sched_setaffinity(0, self._own)
        self.on_pool = False

    def close(self) -> None:
        """Let go of the engine, whose runs are dropped; there will be no other one."""
        self._begun = True
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _why_not(self) -> str:
        if not self._narrow.prepared and self._content.size >= LEAST_PREPARED_BYTES:
            return "a second copy of the weights would be as large as the first"
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if limit != resource.RLIM_INFINITY and 2 * _memory_bytes() > limit:
            return "the worker's memory limit may not hold the activations twice"
        return ""

    def _open(self) -> None:
        try:
            try:
                os.sched_setaffinity(0, self._pool)  # of this thread, and of those that it starts
            except OSError as exc:
                own = format_core_list(self._pool)
                raise BuildError(f"none of the pool's cores {own} is allowed now") from exc
            threads = min(len(self._pool), whole_cpus())
            engine = self._open_wide(CoreShare(cores=self._pool, threads=threads))
            if engine.prepared != self._narrow.prepared or not self._content.unchanged():
                engine.close()
                raise BuildError("the model is not what it was")
            self._engine = engine
        except Exception as exc:  # of any class: it is the runtime's
            _log.warning("runs use this worker's cores alone: %s", exc)


def _memory_bytes() -> int:
    """Bytes of this process that `RLIMIT_DATA` limits; see proc_pid_status(5)."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmData:"))
