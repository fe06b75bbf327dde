"""Large copies by several threads: one core does not use all of the memory's bandwidth."""

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LARGE_BYTES = 16 << 20
"""From here on several threads are faster: below, the caches of one core are (benchmarks/dispatch.py)."""

_MAX_THREADS = 4


class Copier:
    """Copies arrays, the large ones with a few threads, which start with the first such copy.

    NumPy lets go of the GIL in a copy. The threads hold views of both arrays until their part is
    done, so an interrupted caller takes no memory from under them.
    """

    def __init__(self, cores: int) -> None:
        """Use at most so many cores, the caller's own among them."""
        self._helpers = min(cores, _MAX_THREADS) - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="mcinfer-copy")

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Copy `source` into `target`: the same shape, and the same type but for byte order.

        Args:
            target: C-contiguous.
            source: Any layout; a contiguous one may be copied in parts.
        """
        whole = not self._helpers or target.nbytes < _LARGE_BYTES or not source.flags.c_contiguous
        if whole:
            np.copyto(target, source, casting="equiv")
            return
        into, out_of = target.reshape(-1), source.reshape(-1)
        ends = [into.size * i // (self._helpers + 1) for i in range(self._helpers + 2)]
        mine, *theirs = [slice(start, stop) for start, stop in pairwise(ends)]
        handed: list[Future[None]] = []
        for part in theirs:
            try:
                handed.append(self._pool.submit(np.copyto, into[part], out_of[part], "equiv"))
            except RuntimeError:  # it was closed meanwhile: what is left is ours
                np.copyto(into[part], out_of[part], casting="equiv")
        np.copyto(into[mine], out_of[mine], casting="equiv")
        for part_done in handed:
            part_done.result()

    def close(self) -> None:
        """End the threads; copies that are going on are finished first. It copies alone from then on."""
        self._pool.shutdown()
