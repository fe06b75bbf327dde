"""Worker processes: starting them, what they inherit, and their end.

Ownership: a `WorkerProcess` owns its pidfd and the master's end of its lifeline until `reap`. A worker writes
to the standard output and error of this process itself.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from mcinfer.process import (
    REQUEST,
    STATE,
    Inherited,
    StackReport,
    command,
    environment,
    field_of,
)
from mcinfer.shm.arena import OfferedBlock
from mcinfer.shm.lifeline import Lifeline

_worker_log = logging.getLogger("mcinfer.worker")
"""Here, since getting one takes a lock that users' code may hold, and the loop starts workers."""


class WorkerProcess:
    """One running process of `mcinfer.worker`: a worker, or one rank of it.

    Attributes:
        label: Its number in the pool, and its device.
        pid: Its number.
        pidfd: Readable once the process has ended.
        lifeline: The master's end.
        cancels: The master's end of the channel for CANCEL.
        token: The worker must show it in HELLO.
        peer: The transport's name for it, after its HELLO.
        slab: The weights on its card that it has made for others; closed with it.
        descriptors: Free descriptors of this process for its start. More of them are free again after it than
            the connection needs, for which libzmq must find one, or it ends the process.
        tasks: Threads that it has before a model is loaded: the main one, those of the watch over the master
            and of CANCEL, and ZeroMQ's two.
    """

    descriptors: ClassVar[int] = 12
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
        name: str,
        inherited: Inherited,
        most_memory: int | None = None,
    ) -> None:
        """Start it.

        Args:
            label: As the attribute.
            connection: The handle by which it connects to the master's transport.
            group: Descriptors of the group that it is a rank of.
            model: The descriptor of the model, if it is in memory.
            name: The model's name, with which the records of its log are marked.
            inherited: What it has of this process.
            most_memory: Bytes of memory of its own that it may have.

        Raises:
            OSError: The system cannot start a process.
        """
        self.label = label
        self.token = secrets.token_hex(16)
        self.peer: bytes | None = None
        self.slab: OfferedBlock | None = None  # the descriptor is this object's
        with contextlib.ExitStack() as opened:
            self._stacks = StackReport()
            opened.callback(self._stacks.close)
            self.lifeline, theirs = Lifeline.pair()
            opened.callback(self.lifeline.close)
            self.cancels, listening = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.callback(self.cancels.close)
            self.cancels.setblocking(
                False
            )  # whatever a program gives to `socket.setdefaulttimeout`
            whole = {
                "connection": connection,
                "token": self.token,
                "cancels": listening.fileno(),
                "group": [*group],
                "master": os.getpid(),
                "stacks": self._stacks.fd,
                "most_memory": most_memory,
                "path": inherited.path,
                "pythonpath": inherited.pythonpath,
                "cores_taken": inherited.cores_taken(),
                "log_level": _worker_log.getEffectiveLevel(),
                "mark": f"[{name} worker {label[0]} {label[1]}] ",
            }
            with theirs, listening:
                self.lifeline.greet(json.dumps(whole).encode())
                given = [theirs.fileno(), connection, listening.fileno(), *group, *model]
                self._launch(given, inherited)
            opened.pop_all()

    def _launch(self, given: Sequence[int], inherited: Inherited) -> None:
        """Start the process, and set `pid` and `pidfd`; the first of the descriptors is its lifeline."""
        index, device = self.label
        self._process = subprocess.Popen(  # noqa: S603 nothing in it comes from outside
            command("-m", "mcinfer.worker", str(given[0]), str(index), device),
            cwd=inherited.folder_now(),
            env=environment(),
            stdin=subprocess.DEVNULL,
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

    def kill(self) -> None:
        """End it at once (SIGKILL), even if it is stopped."""
        self._process.kill()

    def ask_for_stacks(self) -> None:
        """Make it write its stacks, for `stacks`; kill it afterwards."""
        self._process.send_signal(REQUEST)

    def stacks(self) -> str:
        """Its stacks when it crashed or was asked; empty without them."""
        return self._stacks.read()

    def standing(self) -> str | None:
        """The state of its main thread (proc(5)): T for stopped, Z for ended, and others."""
        return field_of(self.pid, STATE)

    def own_bytes(self) -> int:
        """Its resident memory without the tensors and weights that it shares."""
        resident, shared = Path(f"/proc/{self.pid}/statm").read_text("ascii").split()[1:3]
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
