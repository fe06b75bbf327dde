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
from mcinfer.stack_report import REQUEST, StackReport
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
        endpoint: Where it is to connect.
        token: What it must show in HELLO.
        peer: Its ZeroMQ identity, once it has.
        attached: Numbers of the blocks that it was given.
        weights: Versions of the weights that it was told of.
        may_connect: Whether it was let connect.
        outlawed: Whether it broke the protocol: nothing more of what it sends is read.
    """

    def __init__(
        self,
        index: int,
        device: str,
        *,
        endpoint: str,
        token: str,
        output: "OutputForwarder",
        most_memory: int | None = None,
    ) -> None:
        """Start it.

        Args:
            index: Of the worker.
            device: Likewise.
            endpoint: Where it is to connect.
            token: What it is to show there.
            output: For what it prints.
            most_memory: Bytes of its own that it may have; None is no limit.

        Raises:
            OSError: The system cannot start a process.
        """
        self.endpoint = endpoint
        self.token = token
        self.peer: bytes | None = None
        self.attached: set[int] = set()
        self.weights: set[int] = set()
        self.may_connect = False
        self.outlawed = False
        with contextlib.ExitStack() as opened:
            self.permits = Permits.create()
            opened.callback(self.permits.close)
            self._stacks = StackReport()
            opened.callback(self._stacks.close)
            self.lifeline, theirs = Lifeline.pair()
            opened.callback(self.lifeline.close)
            given = [theirs.fileno(), self.permits.fd, self._stacks.fd]
            greeting = {
                "master": os.getpid(),
                "endpoint": endpoint,
                "token": token,
                "permits": self.permits.fd,
                "stacks": self._stacks.fd,
                "most_memory": most_memory,
                "path": [os.path.abspath(entry) for entry in sys.path],
                "pythonpath": os.environ.get("PYTHONPATH"),
                "log_level": logging.getLogger("mcinfer.worker").getEffectiveLevel(),
            }
            with theirs:
                self.lifeline.greet(json.dumps(greeting).encode())
                pipes = [*_pipe(opened), *_pipe(opened)]
                self._process = subprocess.Popen(  # noqa: S603 nothing in it comes from outside
                    command("mcinfer.worker", str(theirs.fileno()), str(index), device),
                    env=environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=pipes[1],
                    stderr=pipes[3],
                    pass_fds=given,
                    process_group=0,
                )
            self.pid = self._process.pid
            try:
                self.pidfd = os.pidfd_open(self.pid)
            except OSError:
                self._process.kill()
                self._process.wait()
                raise
            opened.pop_all()
        os.close(pipes[1])
        os.close(pipes[3])
        mark = f"[worker {index} {device}] "
        output.add(pipes[0], mark, "stdout")
        output.add(pipes[2], mark, "stderr")

    def kill(self) -> None:
        """End it at once (SIGKILL); also one that is stopped."""
        self._process.kill()

    def ask_for_stacks(self) -> None:
        """Have it write where it is, for `stacks`; it is to be killed afterwards."""
        self._process.send_signal(REQUEST)

    def stacks(self) -> str:
        """Where it was when it crashed or was asked; empty if it did not, or could not, say."""
        return self._stacks.read()

    def standing(self) -> str:
        """The state of its main thread, as proc(5) has it: T for stopped, Z for ended, and others."""
        return _read_proc(self.pid, "stat").rpartition(")")[2].split()[0]

    def own_bytes(self) -> int:
        """Memory that is resident and its own: not the tensors and weights that it shares."""
        resident, shared = _read_proc(self.pid, "statm").split()[1:3]
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")

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
        self._stacks.close()


def _pipe(opened: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe that is closed with `opened`."""
    ends = os.pipe()
    for fd in ends:
        opened.callback(os.close, fd)
    return ends


def _read_proc(pid: int, name: str) -> str:
    """A file of a process that was not waited for yet."""
    with open(f"/proc/{pid}/{name}", encoding="ascii", errors="replace") as file:
        return file.read()


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
