"""The process that one way of running the model lives in: `python -m mcinfer.bench.driver FD`.

It reads tasks in JSON from the connection that it inherits, and answers each with ``{"ok": …}`` or
``{"error": text}``; `mcinfer.bench.subject` is the other end. It ends with its parent, and so do the
processes that the way has started: mcinfer's workers end with their master, children of `multiprocessing`
when their pipe hangs up. Nothing heavy is imported before the start that is measured, so it is no part of
`subject`.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from mcinfer.bench.known_ways import WayFailedError, way_class
from mcinfer.process import ORPHANED, watch_parent

_REST = 0.05
"""Seconds before a turn, in which threads of the way before come to rest."""


class _Driver:
    """The tasks, by name."""

    def __init__(self) -> None:
        self.ending = False
        self._way: Any = None
        self._files: Mapping[str, str] = {}
        self._inputs: dict[int, Mapping[str, Any]] = {}

    def start(self, way: str, setup: Mapping[str, Any], inputs: Mapping[str, str]) -> Any:
        """Load the model; the seconds that it took."""
        begin = perf_counter()
        kind = way_class(way)
        self._way = kind(_setup(setup))
        seconds = perf_counter() - begin
        if not isinstance(self._way.workers, int):
            raise TypeError(f"workers: got {self._way.workers!r}, expected an int")
        self._files = inputs
        return {"seconds": seconds, "workers": self._way.workers, "text": str(self._way.text)}

    def turn(self, load: Mapping[str, Any], **more: Any) -> Any:
        """Make load; the turn."""
        from mcinfer.bench.load import read_request, take_turn
        from mcinfer.bench.report import Load

        batch = load["batch"]
        if batch not in self._inputs:
            self._inputs[batch] = read_request(Path(self._files[str(batch)]))
        sleep(_REST)
        return asdict(take_turn(self._way, self._inputs[batch], Load(**load), **more))

    def memory(self) -> Any:
        """The memory of all processes of the way."""
        from mcinfer.bench.load import memory

        return asdict(memory())

    def interrupt(self) -> None:
        """The parent was interrupted: stop the task, and end the way in order.

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
    """Do the parent's tasks until it hangs up; the exit status."""
    driver = _Driver()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: driver.interrupt())
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # processes that the way starts must not hold it
    connection = Connection(descriptor)
    try:
        start = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return ORPHANED
    watch_parent(start["parent"], descriptor)
    sys.path[:] = start["path"]
    try:
        while True:
            task = json.loads(connection.recv_bytes())
            do = task.pop("do")
            try:
                answer = {"ok": getattr(driver, do)(**task)}
            except WayFailedError as exc:
                answer = {"error": str(exc)}
            except Exception as exc:  # of any way's own kinds: the parent reports it
                answer = {"error": f"{type(exc).__name__}: {exc}"}
            connection.send_bytes(json.dumps(answer).encode())
            if do == "close":
                break
    except EOFError:
        pass
    finally:
        driver.ending = True
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
