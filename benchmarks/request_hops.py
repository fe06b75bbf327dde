"""Count what one request passes in the caller's process: Python calls, modules, changes of module.

    python benchmarks/request_hops.py [--rounds REQUESTS]

A `predict` of 8 KB over two workers, once warm; all threads of the process count. The calls of a module say
where the work is; the changes of module say how many a reader has to visit to follow a request. The same
numbers of the request path in its fewest steps (`owned.py`) stand beside them. These are counts, so a busy
machine hardly moves them.
"""

import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import owned
from measuring import Lines, Setting, main, table
from models import identity_model, normal

import mcinfer

WORKERS = 2
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


def count(name: str, hops: Hops, request: Callable[[], object], requests: int) -> Lines:
    """Make requests; what each passes on the average."""
    for _ in range(_WARM_UP):
        request()
    hops.counting = True
    for _ in range(requests):
        request()
    hops.counting = False
    rows = [(module, f"{calls / requests:.1f}") for module, calls in hops.calls.most_common()]
    yield table((f"{name}: module", "calls"), [row for row in rows if row[1] != "0.0"])
    yield (
        f"  a request: {hops.calls.total() / requests:.0f} Python calls, "
        f"{hops.modules(requests / 2)} modules, {hops.changes / requests:.0f} changes of module\n"
    )


def watched(folder: str | None) -> Hops:
    """Have this thread, and all that are started from here on, counted."""
    hops = Hops(Path(folder or "").parent)
    threading.setprofile(hops.note)
    sys.setprofile(hops.note)
    return hops


def measure(setting: Setting) -> Lines:
    """mcinfer, and the path in its fewest steps; a round is a request."""
    inputs = normal(2, 1024)
    model = str(identity_model(setting.folder / "identity.onnx"))
    try:
        hops = watched(mcinfer.__file__)
        with mcinfer.Master(model, WORKERS) as master:
            predict = partial(master.predict, inputs)
            yield from count("mcinfer.predict", hops, predict, setting.rounds)
        for name, full in (("owned, bare", False), ("owned, with all", True)):
            hops = watched(owned.__file__)
            with owned.Owned(model, WORKERS, full=full) as pool:
                yield from count(name, hops, partial(pool.predict, inputs), setting.rounds)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


if __name__ == "__main__":
    sys.exit(main(__doc__, {"hops": measure}, rounds=200))
