"""A way of running the model in a process of its own, seen from the process that measures.

Ownership: the process belongs to its `Subject`, which ends it and everything that the way has started in
`close`; it also ends by itself with the process that measures. One thread uses a subject.
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import IO, Any, Self

from mcinfer.bench.report import Load, Memory, Turn
from mcinfer.bench.way import Setup
from mcinfer.engines.names import DEFAULT_ENGINE
from mcinfer.errors import McinferError
from mcinfer.process import command, environment, import_path

_MAX_ANSWER_BYTES = 1 << 24
_CLOSE_SECONDS = 15.0
_STOP_SECONDS = 6.0
"""For an interrupted process to end its way: a little more than a master gives its workers."""
_ASK_AGAIN_SECONDS = 0.5
_LAST_SECONDS = 1.0
"""For the last output, should another process hold it open."""
_LAST_WORDS = 500
"""Characters of the last output of a process that died."""


class WayFailedError(McinferError):
    """A way of running the model could not be started, or failed in its turn; says why."""


class Subject:
    """One way, in a process of its own.

    Args:
        way: Its name, or ``FILE.py:Class``.
        setup: The way's arguments.
        inputs: By batch, a file with the arrays of one request (`mcinfer.bench.load.write_request`).
        expected: A file with ONNX Runtime's answer to the first of them, to compare another engine's with.

    Attributes:
        engine: Of the setup.
        difference: Between these answers (`mcinfer.bench.load.largest_difference`), once it has started.
    """

    def __init__(
        self, way: str, setup: Setup, inputs: Mapping[int, Path], expected: Path | None = None
    ) -> None:
        self.way = way
        self.workers, self.text = len(setup.devices), way
        self.engine, self.difference = setup.engine, None
        self._setup = setup
        is_other = setup.engine != DEFAULT_ENGINE
        self._expected = str(expected) if expected is not None and is_other else None
        self._inputs = {str(batch): str(path) for batch, path in inputs.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._pidfd = -1
        self._reader: threading.Thread | None = None
        self._interrupted = False
        self._printed = b""

    @property
    def alive(self) -> bool:
        return self._connection is not None

    def start(self, timeout: float) -> float:
        """Start the process, anew if there is one, and load the model there; seconds of the way's own start.

        Raises:
            WayFailedError: It failed, or took longer than `timeout`.
        """
        self.close()
        self._printed = b""
        self._connection, theirs = Pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 nothing in it comes from outside
                command("-m", "mcinfer.bench.driver", str(theirs.fileno())),
                env={**environment(), "PYTHONUNBUFFERED": "1"},  # for its last words
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for this process to hear; and all of it is ended at once
            )
            reader = threading.Thread(
                target=self._read_output, args=(self._process.stdout,), daemon=True
            )
            reader.start()
            self._reader = reader
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as exc:
            self._kill()
            raise WayFailedError(f"{self.way}: its process could not be started: {exc}") from exc
        finally:
            theirs.close()
        task = {"do": "start", "way": self.way, "setup": self._setup, "inputs": self._inputs}
        task["expected"] = self._expected
        started = self._ask(timeout, parent=os.getpid(), path=import_path(), **task)
        self.workers, self.text = started["workers"], started["text"]
        self.difference = started["difference"]
        return float(started["seconds"])

    def turn(self, load: Load, *, timeout: float, **how: float) -> Turn:
        """Make load on the way (`mcinfer.bench.load.take_turn`); its process is killed after `timeout`.

        Raises:
            WayFailedError: No request was answered, or it took too long.
        """
        found = self._ask(timeout, do="turn", load=asdict(load), **how)
        turn = Turn(**{**found, "latencies": tuple(found["latencies"])})
        if not turn.requests:
            raise WayFailedError(f"{self.way}: {turn.error}")
        return turn

    def memory(self) -> Memory:
        """The memory of all processes of the way.

        Raises:
            WayFailedError: The way is gone.
        """
        return Memory(**self._ask(_CLOSE_SECONDS, do="memory"))

    def interrupt(self) -> None:
        """Have the process stop its task and end; `close` waits for that."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            self._interrupted = True

    def close(self) -> None:
        try:
            if self._interrupted and self._pidfd >= 0:
                give_up = monotonic() + _STOP_SECONDS
                while not wait([self._pidfd], _ASK_AGAIN_SECONDS) and monotonic() < give_up:
                    self.interrupt()
            elif self.alive:
                with suppress(WayFailedError):  # it is killed below
                    self._ask(_CLOSE_SECONDS, do="close")
                    wait([self._pidfd], _CLOSE_SECONDS)
        finally:
            self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.interrupt()  # Ctrl-C
        self.close()

    def _kill(self) -> int | None:
        """End what is left of the process, and of those that it has started in its group; its exit status."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is its own
            process.wait()
            reader, self._reader = self._reader, None
            if reader is not None:
                reader.join(_LAST_SECONDS)
            elif process.stdout is not None:  # Ctrl-C came before there was one
                process.stdout.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return None if process is None else process.returncode

    def _read_output(self, stream: IO[bytes]) -> None:
        """Read everything that the process and its children print; keep the end."""
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                self._printed = (self._printed + data)[-4 * _LAST_WORDS :]

    def _ask(self, timeout: float, **task: Any) -> Any:
        if self._connection is None:
            raise WayFailedError(f"{self.way}: its process has ended")
        connection, data = self._connection, b""
        try:
            connection.send_bytes(json.dumps(task, default=_plain).encode())
            # Its death, too: another process may hold the other end of the connection.
            ready = wait([connection, self._pidfd], timeout)
            if not ready:
                self._kill()
                raise WayFailedError(f"{self.way}: {task['do']} was not done within {timeout:g} s")
            if connection not in ready:
                raise EOFError
            data = connection.recv_bytes(_MAX_ANSWER_BYTES)
            answer = json.loads(data)
            if "error" in answer:
                raise WayFailedError(f"{self.way}: {answer['error']}")
            return answer["ok"]
        except (EOFError, ConnectionError) as exc:
            status = self._kill()
            last = " ".join(self._printed.decode("utf-8", "replace").split())[-_LAST_WORDS:]
            raise WayFailedError(
                f"{self.way}: its process ended with status {status}{': ' if last else ''}{last}"
            ) from exc
        except (OSError, ValueError, TypeError, KeyError) as exc:  # the way has written there
            self._kill()
            raise WayFailedError(
                f"{self.way}: its process sent something else than an answer: {data[:_LAST_WORDS]!r}"
            ) from exc


def _plain(value: Any) -> dict[str, Any]:
    """What JSON does not know: our own types, and mappings that cannot be changed."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value)
