"""Worker processes: starting them, and forwarding their output.

Ownership: a `WorkerProcess` owns its pidfd and the master's end of its lifeline until `reap`. The pipes of
its standard streams belong to the `OutputForwarder`, which reads them to their end.
"""

import codecs
import contextlib
import json
import logging
import os
import secrets
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from time import monotonic
from typing import ClassVar, TextIO

from mcinfer.process import REQUEST, Inherited, StackReport, command, environment
from mcinfer.runtime.cancels import Cancels
from mcinfer.shm.arena import OfferedBlock
from mcinfer.shm.descriptors import WakeUp
from mcinfer.shm.lifeline import Lifeline

_log = logging.getLogger("mcinfer.master")
_worker_log = logging.getLogger("mcinfer.worker")
"""Here, since getting one takes a lock that users' code may hold, and the loop starts workers."""

_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 20
_STATUS = "status"
_ERASE = "\r\x1b[K"  # ECMA-48: from the line's begin, erase to its end
_MAX_WAITING_BYTES = 1 << 22  # output beyond this is dropped

_TICK_MS = 100


class WorkerProcess:
    """One running process of `mcinfer.worker`: a worker, or one rank of it.

    Attributes:
        label: What its output is marked with: its number in the pool, and its device.
        pid: Its number.
        pidfd: Readable once the process has ended.
        lifeline: The master's end.
        cancels: The channel for CANCEL.
        hello_token: The worker must show it in HELLO.
        build_token: The master must show it in BUILD.
        peer: The transport's name for it, after its HELLO.
        slab: The weights on its card that it has made for others; closed with it.
        descriptors: Free descriptors of this process for its start. More of them are free again after it than
            the connection needs, for which libzmq must find one, or it ends the process.
        tasks: Threads that it has before a model is loaded: the main one, those of the watch over the master
            and of CANCEL, and ZeroMQ's two.
    """

    descriptors: ClassVar[int] = 14
    tasks: ClassVar[int] = 5
    pid: int
    pidfd: int

    def __init__(
        self,
        label: tuple[int, str],
        *,
        connection: int,
        group: Sequence[int] = (),
        model: Sequence[int] = (),
        output: "OutputForwarder",
        inherited: Inherited,
        most_memory: int | None = None,
    ) -> None:
        """Start it.

        Args:
            label: As the attribute.
            connection: The handle by which it connects to the master's transport.
            group: Descriptors of the group that it is a rank of.
            model: The descriptor of the model, if it is in memory.
            output: Forwards its output.
            inherited: What it has of this process.
            most_memory: Bytes of memory of its own that it may have.

        Raises:
            OSError: The system cannot start a process.
        """
        self.label = label
        self.hello_token = secrets.token_hex(16)
        self.build_token = secrets.token_hex(16)
        self.peer: bytes | None = None
        self.slab: OfferedBlock | None = None  # the descriptor is this object's
        with contextlib.ExitStack() as opened:
            self._stacks = StackReport()
            opened.callback(self._stacks.close)
            self.lifeline, theirs = Lifeline.pair()
            opened.callback(self.lifeline.close)
            self.cancels, listening = Cancels.pair()
            opened.callback(self.cancels.close)
            whole = {
                "connection": connection,
                "hello_token": self.hello_token,
                "build_token": self.build_token,
                "cancels": listening.fd,
                "group": [*group],
                "master": os.getpid(),
                "stacks": self._stacks.fd,
                "most_memory": most_memory,
                "path": inherited.path,
                "pythonpath": inherited.pythonpath,
                "cores_taken": inherited.cores_taken(),
                "log_level": _worker_log.getEffectiveLevel(),
            }
            with theirs, contextlib.closing(listening):
                self.lifeline.greet(json.dumps(whole).encode())
                given = [theirs.fileno(), connection, listening.fd, *group, *model]
                self._launch(given, output, inherited)
            opened.pop_all()

    def _launch(
        self, given: Sequence[int], output: "OutputForwarder", inherited: Inherited
    ) -> None:
        """Start the process, and set `pid` and `pidfd`; the first of the descriptors is its lifeline."""
        index, device = self.label
        with contextlib.ExitStack() as opened:
            pipes = [*_pipe(opened), *_pipe(opened)]
            self._process = subprocess.Popen(  # noqa: S603 nothing in it comes from outside
                command("-m", "mcinfer.worker", str(given[0]), str(index), device),
                cwd=inherited.folder_now(),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=pipes[1],
                stderr=pipes[3],
                pass_fds=[*given, self._stacks.fd],
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
        mark = f"[{output.model} worker {index} {device}] "
        output.add(pipes[0], mark, "stdout")
        output.add(pipes[2], mark, "stderr")

    def kill(self) -> None:
        """End it at once (SIGKILL), even if it is stopped."""
        self._process.kill()

    def ask_for_stacks(self) -> None:
        """Make it write its stacks, for `stacks`; kill it afterwards."""
        self._process.send_signal(REQUEST)

    def stacks(self) -> str:
        """Its stacks when it crashed or was asked; empty without them."""
        return self._stacks.read()

    def standing(self) -> str:
        """The state of its main thread (proc(5)): T for stopped, Z for ended, and others."""
        return _read_proc(self.pid, "stat").rpartition(")")[2].split()[0]

    def own_bytes(self) -> int:
        """Its resident memory without the tensors and weights that it shares."""
        resident, shared = _read_proc(self.pid, "statm").split()[1:3]
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")

    def wait(self) -> int:
        """After its end, or until then: its exit status (negative: a signal)."""
        return self._process.wait()

    def reap(self) -> int:
        """After its end: free what this object owns; its exit status (negative: a signal)."""
        code = self.wait()
        self.abandon()
        return code

    def abandon(self) -> None:
        """Free what this object owns; a process that still runs loses its lifeline."""
        os.close(self.pidfd)
        self.lifeline.close()
        self.cancels.close()
        self._stacks.close()
        if self.slab is not None:
            os.close(self.slab.fd)
            self.slab = None


def _pipe(opened: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for fd in ends:
        opened.callback(os.close, fd)
    return ends


def _read_proc(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/{name}", encoding="ascii", errors="replace") as file:
        return file.read()


class OutputForwarder:
    """Writes what workers print to this process's streams, each line with the worker's mark.

    One thread only reads the workers' pipes, so that no worker waits in a write. Another thread writes as
    fast as the user's streams take it. Output beyond `_MAX_WAITING_BYTES` is dropped. `model` is the model's
    name, for the marks.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._poll = select.epoll()
        self._wakeup = WakeUp()
        self._poll.register(self._wakeup.fd, select.EPOLLIN)
        self._sources: dict[int, tuple[bytes, str, bytearray]] = {}
        self._waiting: SimpleQueue[tuple[str, bytes] | None] = SimpleQueue()
        self._status = ""  # the line that the terminal ends with, of the writer alone
        # Bytes, each counted by one thread alone.
        self._queued = self._dropped = self._written = 0
        self._said = 0
        self._closing = False
        self._stopping = False
        self._writer = threading.Thread(target=self._write, name="mcinfer-print", daemon=True)
        self._reader = threading.Thread(target=self._read, name="mcinfer-output", daemon=True)
        with contextlib.ExitStack() as started:
            # Before the thread is started: Ctrl-C may come when it runs, and before `start` returns.
            started.callback(self._waiting.put, None)
            self._writer.start()
            started.callback(self._end_reading)
            self._reader.start()
            started.pop_all()

    def add(self, fd: int, mark: str, stream: str) -> None:
        """Read a pipe from now on, and own it."""
        self._sources[fd] = (mark.encode(), stream, bytearray())
        self._poll.register(fd, select.EPOLLIN)

    def show(self, status: str) -> None:
        """Show a line at the end of a terminal that the next one replaces; "" removes it.

        Where standard error is no terminal, nothing is shown.
        """
        self._waiting.put((_STATUS, status.encode()))

    def close(self, timeout: float) -> None:
        """Forward what is left, for at most so many seconds, and end the threads.

        A process that a worker left behind may hold a pipe open; its output is not waited for.
        """
        self._closing = True
        for stopping in (False, True):
            self._stopping = stopping
            self._wakeup.set()
            end = monotonic() + timeout
            for thread in (self._reader, self._writer):
                thread.join(max(end - monotonic(), 0.0))

    def _end_reading(self) -> None:
        self._closing = True
        self._wakeup.set()

    def _read(self) -> None:
        while not self._stopping and (self._sources or not self._closing):
            for fd, _ in self._poll.poll():
                if fd == self._wakeup.fd:
                    self._wakeup.clear()
                else:
                    self._queue(fd)
        for fd in self._sources:
            os.close(fd)
        self._poll.close()
        self._waiting.put(None)

    def _queue(self, fd: int) -> None:
        mark, stream, rest = self._sources[fd]
        data = os.read(fd, _READ_BYTES)
        rest += data
        end = rest.rfind(b"\n") + 1
        if not data or len(rest) > _MAX_LINE_BYTES:
            end = len(rest)
        lines, rest[:] = bytes(rest[:end]), rest[end:]
        text = b"".join(b"%b%b\n" % (mark, line) for line in lines.splitlines())
        if self._queued - self._written > _MAX_WAITING_BYTES:
            self._dropped += len(text)
        elif text:
            self._queued += len(text)
            self._waiting.put((stream, text))
        if not data:
            self._poll.unregister(fd)
            del self._sources[fd]
            os.close(fd)  # last: from here on the number may be that of another worker's pipe

    def _write(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for name, text in iter(self._waiting.get, None):
            if name == _STATUS:
                self._write_status(text.decode())
                continue
            self._write_status("")
            begin = 0
            while begin < len(text) and not self._stopping:
                if self._dropped and not self._said:
                    self._say("output of workers is dropped, since it is not read", self._dropped)
                stream = getattr(sys, name)
                if _takes(stream, _TICK_MS):
                    # Whole lines where they fit; a pipe that can be written to takes so much at once.
                    most = begin + select.PIPE_BUF
                    end = text.rfind(b"\n", begin, most) + 1 or most
                    _write(stream, decoder.decode(text[begin:end]))
                    self._written += len(text[begin:end])
                    begin = end
        self._write_status("")
        lost = self._queued + self._dropped - self._written
        if lost:
            self._say("output of workers was dropped, since it was not read: in all", lost)

    def _write_status(self, status: str) -> None:
        if status == self._status or (status and not _is_free_terminal(sys.stderr)):
            return
        self._status = status
        _write(sys.stderr, f"{_ERASE}{status}")

    def _say(self, text: str, size: int) -> None:
        """Log it, unless that could wait for the same reader as the output does."""
        if _takes(sys.stderr, 0):
            self._said = size
            with contextlib.suppress(Exception):  # of a handler
                _log.warning("%s: %d bytes", text, size)


def _is_free_terminal(stream: TextIO | None) -> bool:
    with contextlib.suppress(Exception):  # whatever a stream of the user's raises
        return stream is not None and stream.isatty() and _takes(stream, 0)
    return False


def _takes(stream: TextIO | None, timeout_ms: int) -> bool:
    """Whether a stream can be written to now or soon; a stream without a descriptor is not asked.

    The descriptor stays as it is: O_NONBLOCK would be set for all processes that share it.
    """
    poll = select.poll()
    try:
        poll.register(stream.fileno() if stream is not None else -1, select.POLLOUT)
    except Exception:  # whatever a stream of the user's raises
        return True
    return bool(poll.poll(timeout_ms))


def _write(stream: TextIO | None, text: str) -> None:
    """Write to a stream of the user's: it may be closed, None, or any object with a `write`."""
    if stream is not None:
        # Whatever it raises: nothing more would be written if this thread ended.
        with contextlib.suppress(Exception):
            stream.write(text)
            stream.flush()
