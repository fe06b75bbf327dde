"""Count what one request passes in the caller's process: Python calls, modules, changes of module.

    python benchmarks/request_hops.py [--requests N]

A `predict` of 8 KB over two workers, once warm; all threads of the process count. The calls of a module say
where the work is; the changes of module say how many a reader has to visit to follow a request. The same
numbers of the request path in its fewest steps (`owned.py`) stand beside them. These are counts, so a busy
machine hardly moves them.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import owned
from measuring import table
from round_trips import BATCH, SIZES, WORKERS, identity_model

import mcinfer

LIMIT = 120
"""Seconds after which something hangs."""
_WARM_UP = 50
_OTHER = "(other Python)"


class Hops:
    """Counts calls of Python functions while `counting`, as a profile function of all threads.

    Attributes:
        counting: Whether calls count.
        calls: Calls by module: a path relative to the folder, or that of another package together.
    """

    def __init__(self, folder: Path) -> None:
        """Modules of this folder count apart."""
        self._root = f"{folder}{os.sep}"
        self._ways: dict[int, list[str]] = defaultdict(list)
        self.counting = False
        self.calls: Counter[str] = Counter()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """What `sys.setprofile` calls."""
        if not self.counting or event != "call":
            return
        name = frame.f_code.co_filename
        if name == __file__:
            return
        if name.startswith(self._root):
            module = name[len(self._root) :]
            self.calls[module] += 1
            self._ways[threading.get_ident()].append(module)
        else:
            self.calls[_OTHER] += 1

    @property
    def changes(self) -> int:
        """How often a thread went on in another module of the folder."""
        return sum(a != b for way in [*self._ways.values()] for a, b in pairwise(way))

    def modules(self, least: float) -> int:
        """How many modules of the folder have so many calls."""
        return sum(calls >= least for name, calls in self.calls.items() if name != _OTHER)


def count(name: str, hops: Hops, request: Callable[[], object], requests: int) -> None:
    """Make requests and print what each passes on the average."""
    for _ in range(_WARM_UP):
        request()
    hops.counting = True
    for _ in range(requests):
        request()
    hops.counting = False
    rows = [(module, f"{calls / requests:.1f}") for module, calls in hops.calls.most_common()]
    print(table((f"{name}: module", "calls"), [row for row in rows if row[1] != "0.0"]))
    print(
        f"  a request: {hops.calls.total() / requests:.0f} Python calls, "
        f"{hops.modules(requests / 2)} modules, {hops.changes / requests:.0f} changes of module\n"
    )


def _watch(hops: Hops) -> None:
    """Have this thread, and all that are started from here on, call it."""
    threading.setprofile(hops.note)
    sys.setprofile(hops.note)


def _give_up(*_: object) -> None:
    raise TimeoutError(f"the count did not end within {LIMIT} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="Count what a request passes.")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="default: 200")
    options = parser.parse_args(arguments)
    if options.requests < 1:
        parser.error(f"--requests: got {options.requests}, expected at least 1")
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(LIMIT)
    rows = np.random.default_rng(0).standard_normal((BATCH, SIZES[0].row_elements), np.float32)
    inputs = {"x": rows}
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as folder:
        os.environ["MCINFER_CACHE"] = str(Path(folder) / "cache")  # not the user's
        model = str(identity_model(Path(folder) / "identity.onnx"))
        try:
            hops = Hops(Path(mcinfer.__file__).parent)
            _watch(hops)
            with mcinfer.Master(model, WORKERS) as master:
                count("mcinfer.predict", hops, partial(master.predict, inputs), options.requests)
            for name, extras in (("owned, bare", owned.BARE), ("owned, with all", owned.ALL)):
                hops = Hops(Path(owned.__file__).parent)
                _watch(hops)
                with owned.Owned(model, WORKERS, extras=extras) as pool:
                    count(name, hops, partial(pool.predict, inputs), options.requests)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    signal.alarm(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
