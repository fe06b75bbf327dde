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

from mcinfer.process import ORPHANED, end, watch_parent

_REST = 0.05
"""Seconds before a turn, in which threads of the way before come to rest."""


class _Driver:
    """The tasks, by name."""

    way: Any = None

    def __init__(self) -> None:
        self._requests: dict[str, Any] = {}  # by batch, its file or its arrays

    def start(
        self,
        way: str,
        setup: dict[str, Any],
        inputs: Mapping[str, str],
        expected: str | None = None,
    ) -> Any:
        begin = perf_counter()
        from mcinfer.bench import way_class
        from mcinfer.bench.way import Setup
        from mcinfer.sharding import Split

        for name in ("devices", "batches"):
            setup[name] = tuple(setup[name])
        self.way = way_class(way)(Setup(**{**setup, "split": Split(**setup["split"])}))
        seconds = perf_counter() - begin
        if not isinstance(self.way.workers, int):
            raise TypeError(f"workers: got {self.way.workers!r}, expected an int")
        self._requests |= inputs
        about = {"seconds": seconds, "workers": self.way.workers, "text": str(self.way.text)}
        return about | {"difference": None if expected is None else self._difference(expected)}

    def turn(self, load: Mapping[str, Any], **more: Any) -> Any:
        from mcinfer.bench.load import take_turn
        from mcinfer.bench.report import Load

        if load["scenario"]:
            from mcinfer.bench.mlperf import offer  # which needs an extra

            more["make"] = offer
        request = self._request(str(load["batch"]))
        sleep(_REST)
        return asdict(take_turn(self.way, request, Load(**load), **more))

    def _request(self, batch: str) -> Any:
        from mcinfer.bench.load import read_request

        if isinstance(self._requests[batch], str):
            self._requests[batch] = read_request(Path(self._requests[batch]))
        return self._requests[batch]

    def _difference(self, expected: str) -> float | None:
        """How far the way's answer to the first request is from the one in a file."""
        from mcinfer.bench.load import largest_difference, read_request

        answer = self.way.run(self._request(next(iter(self._requests))))
        return largest_difference(answer, read_request(Path(expected)))

    def memory(self) -> Any:
        from mcinfer.bench.load import memory

        return asdict(memory())

    def close(self) -> None:
        way, self.way = self.way, None
        if way is not None:
            way.close()


def main() -> int:
    """Do the parent's tasks until it hangs up; the exit status."""
    driver = _Driver()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # Stop the task, and end the way in order: the parent was interrupted. It asks again: an exception can be
    # lost where it is raised, in a finalizer or in an import.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # processes that the way starts must not hold it
    connection = Connection(descriptor)
    try:
        task = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return ORPHANED
    watch_parent(task.pop("parent"), descriptor)
    sys.path[:] = task.pop("path")
    try:
        while True:
            do = task.pop("do")
            try:
                answer = {"ok": getattr(driver, do)(**task)}
            except Exception as exc:  # of any way's own kinds: the parent reports it
                answer = {"error": f"{type(exc).__name__}: {exc}"}
            connection.send_bytes(json.dumps(answer).encode())
            if do == "close":
                return 0
            task = json.loads(connection.recv_bytes())
    except EOFError:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        driver.close()


if __name__ == "__main__":
    end(main())
