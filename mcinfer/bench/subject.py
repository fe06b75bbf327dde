"""A way of running the model in a process of its own, seen from the process that measures.

Ownership: the process belongs to its `Subject`, which ends it, and with it all that the way has started, in
`close`; it also ends by itself with the process that measures. A subject is used by one thread.
"""

import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO, Any, Self

from mcinfer.bench.failures import WayFailedError
from mcinfer.bench.report import Load, Memory, Turn
from mcinfer.bench.way import Setup
from mcinfer.process import command, environment, import_path

_READ_BYTES = 1 << 16
_CLOSE_SECONDS = 15.0
_STOP_SECONDS = 6.0
"""For an interrupted process to end its way: a little more than a master gives its workers."""

_ASK_AGAIN_SECONDS = 0.5
_LAST_SECONDS = 1.0
"""For what a process printed last, should another one hold its output open."""

_LAST_WORDS = 500
"""Characters of what a process that died had printed last."""


class Subject:
    """One way, in a process of its own.

    Args:
        way: Its name, or ``FILE.py:Class``.
        setup: What it is made with.
        inputs: By batch, a file with the arrays of one request (`mcinfer.bench.request_file`).
    """

    def __init__(self, way: str, setup: Setup, inputs: Mapping[int, Path]) -> None:
        self.way = way
        self.workers, self.text = 0, way
        self._setup = setup
        self._inputs = {str(batch): str(path) for batch, path in inputs.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._pidfd = -1
        self._status: int | None = None
        self._interrupted = False
        self._printed = _LastWords()
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
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for this process to hear; and all of it is ended at once
            )
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as exc:
            self._kill()
            raise WayFailedError(f"{self.way}: its process could not be started: {exc}") from exc
        finally:
            theirs.close()
        self._printed.listen(self._process)
        self._send({"parent": os.getpid(), "path": import_path()})
        started = self._ask(
            timeout, do="start", way=self.way, setup=self._setup, inputs=self._inputs
        )
        self.workers, self.text = started["workers"], started["text"]
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
            warmup: Seconds of load before it, not counted: of as many clients as keep the workers busy, each
                of which makes one request at least.
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

    def interrupt(self) -> None:
        """Have the process end in the middle of whatever it is doing; `close` waits for that."""
        if self._process is not None and self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            self._interrupted = True

    def close(self) -> None:
        """End the process and all that it has started. May be called again."""
        try:
            if self._interrupted and self._process is not None:
                give_up = monotonic() + _STOP_SECONDS
                while not self._await_end(_ASK_AGAIN_SECONDS) and monotonic() < give_up:
                    self.interrupt()
            elif self.alive:
                with suppress(WayFailedError):  # it is killed below
                    self._ask(_CLOSE_SECONDS, do="close")
                    self._await_end(_CLOSE_SECONDS)
        finally:
            self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.interrupt()  # Ctrl-C
        self.close()

    def _await_end(self, seconds: float) -> bool:
        """Whether the process has ended within so many seconds."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _kill(self) -> None:
        """End what is left of the process, and of those that it has started in its group."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is its own
            self._status = process.wait()
            self._printed.finish(process)
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

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
        try:
            answer = json.loads(line)
            if "error" in answer:
                raise WayFailedError(f"{self.way}: {answer['error']}")
            return answer["ok"]
        except (ValueError, TypeError, KeyError) as exc:  # whatever the way has written there
            self._kill()
            raise WayFailedError(
                f"{self.way}: its process said {line[:_LAST_WORDS]!r}, expected an answer"
            ) from exc

    def _send(self, task: Mapping[str, Any]) -> None:
        if self._channel is None:
            raise WayFailedError(f"{self.way}: its process has ended")
        try:
            self._channel.sendall(json.dumps(task, default=_plain).encode() + b"\n")
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
        # Its death, too: another process may hold the other end of the channel.
        poll.register(self._pidfd, select.POLLIN)
        while b"\n" not in self._rest:
            ready = [fd for fd, _ in poll.poll(max(0.0, deadline - monotonic()) * 1000)]
            if not ready:
                raise TimeoutError
            if channel.fileno() not in ready:
                raise ConnectionResetError
            data = channel.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _died(self) -> WayFailedError:
        self._kill()
        last = " ".join(self._printed.text.split())[-_LAST_WORDS:]
        return WayFailedError(
            f"{self.way}: its process ended with status {self._status}{': ' if last else ''}{last}"
        )


def _plain(value: Any) -> dict[str, Any]:
    """What JSON does not know: our own types, and mappings that cannot be changed."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value)


class _LastWords:
    """What a process printed last; all that came before is thrown away."""

    def __init__(self) -> None:
        self._bytes = b""
        self._reader: threading.Thread | None = None

    @property
    def text(self) -> str:
        return self._bytes.decode("utf-8", "replace")

    def listen(self, process: "subprocess.Popen[bytes]") -> None:
        """Read what it prints until nobody can print there any more."""
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def finish(self, process: "subprocess.Popen[bytes]") -> None:
        """The process has ended: take what is left, for as long as that takes at most."""
        if self._reader is not None:
            self._reader.join(_LAST_SECONDS)
        if process.stdout is not None and (self._reader is None or not self._reader.is_alive()):
            process.stdout.close()

    def _read(self, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), _READ_BYTES):
            self._bytes = (self._bytes + data)[-_READ_BYTES:]
