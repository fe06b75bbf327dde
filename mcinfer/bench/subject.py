"""A way of running the model in a process of its own, seen from the process that measures.

Ownership: the process belongs to its `Subject`, which ends it, and with it all that the way has started, in
`close`; it also ends by itself with the process that measures. A subject is used by one thread.
"""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from mcinfer.bench.report import Load, Memory, Turn
from mcinfer.bench.way import Setup
from mcinfer.children import command, environment
from mcinfer.errors import McinferError

_READ_BYTES = 1 << 16
_CLOSE_SECONDS = 15.0
_STOP_SECONDS = 5.0
_LAST_WORDS = 500
"""Characters of what a process that died had printed last."""


class WayFailedError(McinferError):
    """A way of running the model could not be started, or failed in its turn; says why."""


class Subject:
    """One way, in a process of its own.

    Args:
        way: Its name, or ``FILE.py:Class``.
        setup: What it is made with.
        inputs: By batch, an .npz file with the arrays of one request.
    """

    def __init__(self, way: str, setup: Setup, inputs: Mapping[int, Path]) -> None:
        self.way = way
        self.workers = 0
        self._setup = setup
        self._inputs = {str(batch): str(path) for batch, path in inputs.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 closed in `close`
        self._rest = b""

    @property
    def alive(self) -> bool:
        """Whether the process can be asked for more."""
        return self._channel is not None

    def start(self, timeout: float) -> float:
        """Start the process and load the model there.

        Args:
            timeout: Seconds for all of it.

        Returns:
            Seconds of the way's own start: runtime imported, processes started, model loaded.

        Raises:
            WayFailedError: It could not.
        """
        self._channel, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(  # noqa: S603 nothing in it comes from outside
                command("mcinfer.bench.driver", str(theirs.fileno())),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for this process to hear
            )
        except OSError as exc:
            raise WayFailedError(f"{self.way}: its process could not be started: {exc}") from exc
        finally:
            theirs.close()
        self._send({"parent": os.getpid(), "path": [os.path.abspath(p) for p in sys.path]})
        started = self._ask(
            timeout, do="start", way=self.way, setup=asdict(self._setup), inputs=self._inputs
        )
        self.workers = int(started["workers"])
        return float(started["seconds"])

    def turn(
        self,
        load: Load,
        *,
        timeout: float,
        seconds: float = 0.0,
        count: int = 0,
        warmup: float = 0.0,
        seed: int = 0,
    ) -> Turn:
        """Make load on the way, after some that is not counted.

        Args:
            load: What is asked of it.
            timeout: Seconds for all of it; the process is killed then.
            seconds: How long the load lasts, if `count` is 0.
            count: Requests in all.
            warmup: Seconds of the load that is not counted; each client makes one request at least.
            seed: Of an open loop's arrivals.

        Raises:
            WayFailedError: No request was answered, or it took too long.
        """
        found = self._ask(
            timeout,
            do="turn",
            load=asdict(load),
            seconds=seconds,
            count=count,
            warmup=warmup,
            seed=seed,
        )
        return Turn(**{**found, "latencies": tuple(found["latencies"])})

    def memory(self) -> Memory:
        """What all processes of the way take.

        Raises:
            WayFailedError: It is gone.
        """
        return Memory(**self._ask(_CLOSE_SECONDS, do="memory"))

    def close(self) -> None:
        """End the process and all that it has started. May be called again."""
        try:
            if self.alive and self._process is not None:
                self._ask(_CLOSE_SECONDS, do="close")
                self._process.wait(_CLOSE_SECONDS)
        except (WayFailedError, subprocess.TimeoutExpired):
            pass  # it is killed below, and its children end with it
        except BaseException:
            self._stop()
            raise
        finally:
            self._kill()
            self._printed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._stop()  # Ctrl-C: whatever it is doing
        self.close()

    def _stop(self) -> None:
        """Have the process end what it has started, and itself, in the middle of whatever it is doing."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        self._kill()

    def _kill(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, timeout: float, **task: Any) -> Any:
        """Have something done; what came of it."""
        self._send(task)
        try:
            line = self._receive(monotonic() + timeout)
        except TimeoutError as exc:
            self._kill()
            raise WayFailedError(
                f"{self.way}: {task['do']} was not done within {timeout:g} s"
            ) from exc
        except OSError as exc:
            raise self._died() from exc
        answer = json.loads(line)
        if "error" in answer:
            raise WayFailedError(f"{self.way}: {answer['error']}")
        return answer["ok"]

    def _send(self, task: Mapping[str, Any]) -> None:
        if self._channel is None:
            raise WayFailedError(f"{self.way}: its process has ended")
        try:
            self._channel.sendall(json.dumps(task).encode() + b"\n")
        except OSError as exc:
            raise self._died() from exc

    def _receive(self, deadline: float) -> bytes:
        """One line.

        Raises:
            TimeoutError: It did not come in time.
            OSError: The process is gone.
        """
        channel = self._channel
        if channel is None:
            raise ConnectionResetError
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        while b"\n" not in self._rest:
            if not poll.poll(max(0.0, deadline - monotonic()) * 1000):
                raise TimeoutError
            data = channel.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _died(self) -> WayFailedError:
        self._kill()
        status = None if self._process is None else self._process.returncode
        self._printed.seek(0)
        words = self._printed.read().decode("utf-8", "replace").split()
        last = " ".join(words)[-_LAST_WORDS:]
        return WayFailedError(
            f"{self.way}: its process ended with status {status}{': ' if last else ''}{last}"
        )
