"""Worker processes: starting them, and passing on what they print.

Ownership: a `WorkerProcess` owns its pidfd and the master's end of its lifeline until `reap`. The
pipes of its standard streams belong to the `OutputForwarder`, which reads them to their end.
"""

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
from typing import TextIO

from mcinfer.children import command, environment
from mcinfer.permits import Permits
from mcinfer.shm.lifeline import Lifeline
from mcinfer.wakeup import WakeUp

_READ_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 20


class WorkerProcess:
    """One running worker process.

    Attributes:
        pid: Its process id.
        pidfd: Readable once it has ended.
        lifeline: The master's end.
        permits: For the runs that it is sent.
        token: What it must show in HELLO.
        peer: Its ZeroMQ identity, once it has.
        attached: Numbers of the blocks that it was given.
        weights: Versions of the weights that it was told of.
    """

    def __init__(
        self, index: int, device: str, endpoint: str, token: str, output: "OutputForwarder"
    ) -> None:
        """Start it.

        Raises:
            OSError: The system cannot start a process.
        """
        self.token = token
        self.peer: bytes | None = None
        self.attached: set[int] = set()
        self.weights: set[int] = set()
        self.permits = Permits.create()
        try:
            self.lifeline, theirs = Lifeline.pair()
        except OSError:
            self.permits.close()
            raise
        greeting = {
            "master": os.getpid(),
            "endpoint": endpoint,
            "token": token,
            "permits": self.permits.fd,
            "path": [os.path.abspath(entry) for entry in sys.path],
            "pythonpath": os.environ.get("PYTHONPATH"),
            "log_level": logging.getLogger("mcinfer.worker").getEffectiveLevel(),
        }
        pipes: list[int] = []
        try:
            self.lifeline.greet(json.dumps(greeting).encode())
            pipes += os.pipe()
            pipes += os.pipe()
            self._process = subprocess.Popen(  # noqa: S603 nothing in it comes from outside
                command("mcinfer.worker", str(theirs.fileno()), str(index), device),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=pipes[1],
                stderr=pipes[3],
                pass_fds=[theirs.fileno(), self.permits.fd],
                process_group=0,
            )
            self.pid = self._process.pid
            try:
                self.pidfd = os.pidfd_open(self.pid)
            except OSError:
                self._process.kill()
                self._process.wait()
                raise
        except OSError:
            self.lifeline.close()
            self.permits.close()
            for fd in pipes:
                os.close(fd)
            raise
        finally:
            theirs.close()
        os.close(pipes[1])
        os.close(pipes[3])
        mark = f"[worker {index} {device}] "
        output.add(pipes[0], mark, "stdout")
        output.add(pipes[2], mark, "stderr")

    def kill(self) -> None:
        """End it at once (SIGKILL); also one that is stopped."""
        self._process.kill()

    def reap(self) -> int:
        """After its end: its exit status (negative: a signal); gives up what this object owns."""
        code = self._process.wait()
        self.abandon()
        return code

    def abandon(self) -> None:
        """Give up what this object owns; the process, if it still runs, loses its lifeline."""
        os.close(self.pidfd)
        self.lifeline.close()
        self.permits.close()


class OutputForwarder:
    """Writes what workers print to this process's streams, each line with the worker's mark.

    It has a thread of its own, since the user's stream may block: requests must not wait for it.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._poll = select.epoll()
        self._wakeup = WakeUp()
        self._poll.register(self._wakeup.fd, select.EPOLLIN)
        self._sources: dict[int, tuple[str, str, bytearray]] = {}
        self._closing = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mcinfer-output", daemon=True)
        self._thread.start()

    def add(self, fd: int, mark: str, stream: str) -> None:
        """Read a pipe from now on; it is this object's."""
        self._sources[fd] = (mark, stream, bytearray())
        self._poll.register(fd, select.EPOLLIN)

    def close(self, timeout: float) -> None:
        """Pass on what is left, for at most so many seconds, and end the thread.

        A process that a worker left behind may hold a pipe open: its output is not waited for.
        """
        self._closing = True
        self._wakeup.set()
        self._thread.join(timeout)
        self._stopping = True
        self._wakeup.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping and (self._sources or not self._closing):
            for fd, _ in self._poll.poll():
                if fd == self._wakeup.fd:
                    self._wakeup.clear()
                else:
                    self._forward(fd)
        for fd in self._sources:
            os.close(fd)
        self._poll.close()

    def _forward(self, fd: int) -> None:
        mark, stream, rest = self._sources[fd]
        data = os.read(fd, _READ_BYTES)
        rest += data
        end = rest.rfind(b"\n") + 1
        if not data or len(rest) > _MOST_LINE_BYTES:
            end = len(rest)
        lines, rest[:] = bytes(rest[:end]), rest[end:]
        text = "".join(f"{mark}{line}\n" for line in lines.decode(errors="replace").splitlines())
        if text:
            _write(sys.stdout if stream == "stdout" else sys.stderr, text)
        if not data:
            self._poll.unregister(fd)
            del self._sources[fd]
            os.close(fd)  # last: from here on the number may be that of another worker's pipe


def _write(stream: TextIO | None, text: str) -> None:
    """Write to a stream of the user's, which may be closed, full, none at all, or anything with a `write`."""
    if stream is not None:
        # Whatever it raises: workers would stand still on their full pipes if this thread ended.
        with contextlib.suppress(Exception):
            stream.write(text)
            stream.flush()
