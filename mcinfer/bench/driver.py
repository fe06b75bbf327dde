"""The process that one way of running the model lives in: `python -m mcinfer.bench.driver FD`.

It is told what to do by lines of JSON on the socket that it inherits, and answers each with a line: ``{"ok":
…}`` or ``{"error": text}``. `mcinfer.bench.subject` is the other end. It ends with its parent, and so do the
processes that the way has started: mcinfer's own workers end with their master, the children of
`multiprocessing` when their pipe hangs up.

Nothing heavy is imported before the start that is measured.
"""

import json
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from mcinfer.bench.failures import WayFailedError
from mcinfer.bench.known_ways import way_class
from mcinfer.process import ORPHANED, watch_parent

_REST = 0.05
"""Seconds before a turn, in which whatever the way before left spinning comes to rest."""


class _Driver:
    """What there is to do, by name."""

    def __init__(self) -> None:
        self.ending = False
        self._way: Any = None
        self._files: dict[int, Path] = {}
        self._inputs: dict[int, Mapping[str, Any]] = {}

    def start(self, way: str, setup: Mapping[str, Any], inputs: Mapping[str, str]) -> Any:
        """Load the model; the seconds that it took."""
        begin = perf_counter()
        kind = way_class(way)
        self._way = kind(_setup(setup))
        seconds = perf_counter() - begin
        if not isinstance(self._way.workers, int):
            raise TypeError(f"workers: got {self._way.workers!r}, expected an int")
        self._files = {int(batch): Path(path) for batch, path in inputs.items()}
        return {"seconds": seconds, "workers": self._way.workers, "text": str(self._way.text)}

    def turn(
        self, load: Mapping[str, Any], seconds: float, count: int, warmup: float, seed: int
    ) -> Any:
        """Make load; what came of it."""
        from mcinfer.bench.turns import take_turn

        batch = load["batch"]
        if batch not in self._inputs:
            from mcinfer.bench.request_file import read_request

            self._inputs[batch] = read_request(self._files[batch])
        sleep(_REST)
        return take_turn(
            self._way,
            self._inputs[batch],
            load,
            seconds=seconds,
            count=count,
            warmup=warmup,
            seed=seed,
        )

    def memory(self) -> Any:
        """What all processes of the way take."""
        from mcinfer.bench.turns import memory

        return memory()

    def interrupt(self) -> None:
        """The parent was interrupted: end in the middle of whatever is being done, but end the way, too.

        The parent asks again: an exception can be lost where it is raised, in a finalizer or in an import.
        """
        if not self.ending:
            raise SystemExit

    def close(self) -> Any:
        """End the way."""
        way, self._way = self._way, None
        if way is not None:
            way.close()


def _setup(fields: Mapping[str, Any]) -> Any:
    """The `Setup` that came as JSON."""
    from mcinfer.bench.way import Setup
    from mcinfer.sharding import Split

    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    worker_cores = tuple(tuple(cores) for cores in fields["worker_cores"])
    split = Split(**fields["split"])
    return Setup(**{**fields, **lists, "worker_cores": worker_cores, "split": split})


def main() -> int:
    """Do what the parent says, until it hangs up; the exit status."""
    driver = _Driver()
    # Ctrl-C is for the parent to hear.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: driver.interrupt())
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)  # whatever the way starts must not hold it
    lines = channel.makefile("r", encoding="utf-8")
    greeting = lines.readline()
    if not greeting:
        return ORPHANED
    start = json.loads(greeting)
    watch_parent(start["parent"], channel.fileno())
    sys.path[:] = start["path"]
    try:
        for line in lines:
            task = json.loads(line)
            do = task.pop("do")
            try:
                answer = {"ok": getattr(driver, do)(**task)}
            except WayFailedError as exc:
                answer = {"error": str(exc)}
            except Exception as exc:  # of any way's own kinds: the parent is to say which
                answer = {"error": f"{type(exc).__name__}: {exc}"}
            channel.sendall(json.dumps(answer).encode() + b"\n")
            if do == "close":
                break
    finally:
        driver.ending = True
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
