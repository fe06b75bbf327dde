"""The processes of one worker: one, or the ranks of a group that run each request together.

::

    scheduler ── one message ──► Gang ══ the same bytes, in the same order ══► rank 0, rank 1, …
              ◄── one message ──      ◄════ each rank answers every message, in order ═════

To the scheduler a group is one worker. Its HELLO, BUILD_FINISH, REPLY or ERROR is there when all ranks have
sent theirs; a rank whose build fails speaks for all. All or nothing: if a rank says that its group is broken,
or its process ends, all others are ended, and the worker has died.

Ownership: a `Gang` owns its processes, and a `WorkerProcess` its pidfd and the master's end of its channels,
until `reap`. A worker writes to the standard output and error of this process itself.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from mcinfer.errors import ProtocolError
from mcinfer.logs import fields_of, writes_json
from mcinfer.process import (
    REQUEST,
    STATE,
    Inherited,
    StackReport,
    command,
    describe_exit,
    environment,
    field_of,
)
from mcinfer.protocol import (
    MAX_NOTES,
    MAX_RUNS,
    BuildFinish,
    Error,
    Message,
    Preparing,
    Reply,
    TensorRef,
)
from mcinfer.requests.lent_blocks import LentBlocks
from mcinfer.shm.arena import OfferedBlock
from mcinfer.shm.block import Block
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
            name: The model's label, with which the records of its log are marked.
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
                "log_level": _worker_log.getEffectiveLevel(),
                "mark": f"[{name} worker {label[0]} {label[1]}] ",
                "fields": {**fields_of(name), "worker": label[0], "device": label[1]},
                "json": writes_json(),
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


_MOST_AHEAD = MAX_RUNS + 4
"""Answers of one rank that others have not given yet, at the most: to runs, and to what came before them."""


class Gang:
    """A worker: its one process, or the ranks of its group; see the module's docstring.

    Attributes:
        index: Its number in the scheduler.
        ranks: Its processes.
        peers: The transport's names for all of them; empty before the last HELLO.
        attached: Numbers of the blocks that they were sent.
        blocks: Those that they make themselves.
        weights: Versions of the weights that they know.
        killed: Whether `kill` was called.
        running: How many of its processes have not ended.
    """

    def __init__(self, index: int, ranks: Sequence[WorkerProcess]) -> None:
        self.index = index
        self.ranks = ranks
        self.peers: list[bytes] = []
        self.attached: set[int] = set()
        self.blocks = LentBlocks(self._receive_block)
        self.weights: set[int] = set()
        self.killed = False
        self.running = len(ranks)
        self._said: list[deque[Message]] = [deque() for _ in ranks]
        self._outputs: list[str] = []
        self._build_failed = False
        # Why it ends: ranks that ended by themselves, or what one said.
        self._causes: list[str] = []
        self._statuses: set[int] = set()

    @property
    def is_group(self) -> bool:
        return len(self.ranks) > 1

    @property
    def pid(self) -> int:
        return self.ranks[0].pid

    def note_peers(self) -> None:
        known = [process.peer for process in self.ranks if process.peer is not None]
        self.peers = known if len(known) == len(self.ranks) else []

    # What ranks say.

    def take(self, rank: int, message: Message) -> Message | None:
        """Take a message of one rank; that of the worker, if it is the last that was missing for one.

        Raises:
            ProtocolError: The ranks do not say the same.
        """
        if isinstance(message, Error) and message.kind == "broken":
            if not self.is_group:
                raise ProtocolError("a worker that is no rank says that its group is broken")
            if message.request is not None:
                self._end(message.text)
                return None
        if not self.is_group or isinstance(
            message, Preparing
        ):  # of whichever rank prepares the slices
            return message
        if self._build_failed:
            return None
        if isinstance(message, Error) and message.request is None and message.kind != "broken":
            self._build_failed = True  # the others may wait for this rank, until the group is ended
            return message
        self._said[rank].append(message)
        if len(self._said[rank]) > _MOST_AHEAD:
            raise ProtocolError(f"rank {rank} has said more than it was asked")
        return self._joined([said.popleft() for said in self._said]) if all(self._said) else None

    def _joined(self, messages: Sequence[Message]) -> Message | None:
        first = messages[0]
        errors = [message for message in messages if isinstance(message, Error)]
        about = [(m.request, m.shard) if isinstance(m, Error | Reply) else None for m in messages]
        said = [type(message).__name__ for message in messages]
        if len({*about}) > 1 or (not errors and len({*said}) > 1):
            raise ProtocolError(f"the ranks said {said} of the runs {about} at once")
        if errors:
            for message in messages:
                if isinstance(message, Reply):
                    self.blocks.give_up(message.outputs)
            own = [error for error in errors if error.kind != "broken"]
            if not own:
                self._end(errors[0].text)
                return None
            if len(own) == len(messages):
                return own[0]
            return replace(own[0], text=f"{self._name(messages.index(own[0]))}: {own[0].text}")
        found = [m for m in messages if isinstance(m, BuildFinish | Reply)]
        seconds = max((m.seconds for m in found), default=0.0)
        if isinstance(first, BuildFinish):
            self._outputs = [name for name, _, _ in first.outputs]
            notes = [note for m in found if isinstance(m, BuildFinish) for note in m.notes]
            return replace(first, notes=(*dict.fromkeys(notes),)[:MAX_NOTES], seconds=seconds)
        if isinstance(first, Reply):
            return replace(first, outputs=self._merged(messages), seconds=seconds)
        return first

    def _name(self, rank: int) -> str:
        process = self.ranks[rank]
        return f"rank {rank} ({process.label[1]}, pid {process.pid})"

    def _merged(self, replies: Sequence[Message]) -> tuple[TensorRef, ...]:
        """References to all outputs: where PREDICT said, or in a block of the rank that made one itself."""
        found: dict[str, TensorRef] = {}
        for reply in replies:
            for reference in reply.outputs if isinstance(reply, Reply) else ():
                name, block = reference[0], reference[3]
                if block is not None and block < 0:
                    found[name] = reference
                else:
                    found.setdefault(name, reference)
        if not found.keys() <= {*self._outputs}:
            raise ProtocolError(f"the ranks gave {[*found]}, which are not all outputs")
        return tuple(found[name] for name in self._outputs if name in found)

    def _receive_block(self, number: int) -> Block:
        """Map a block that a rank has handed over; its number says which (`OutputBlocks`)."""
        lifeline = self.ranks[-number % len(self.ranks)].lifeline
        size, fd, _ = lifeline.receive_block(number)
        return Block.attach(number, size, fd)

    # Ends.

    def _end(self, cause: str) -> None:
        """End all processes, since the ranks cannot go on."""
        if not self.killed:
            self._causes.append(cause)
            self.kill()

    def note_ends(self, ended: Sequence[WorkerProcess], *, asked: bool) -> None:
        """Some of its processes have ended, because they were `asked` or not; end the others then."""
        self.running -= len(ended)
        if not self.is_group:
            return
        for rank, process in enumerate(self.ranks):
            if process in ended and not self.killed:
                status = process.wait()
                if not (asked and status == 0):
                    self._causes.append(f"{self._name(rank)} {describe_exit(status)}")
                    self._statuses.add(status)
        if self._causes:
            self.kill()

    def kill(self) -> None:
        """End all its processes at once."""
        self.killed = True
        for process in self.ranks:
            process.kill()

    def reap(self) -> tuple[str, set[int]]:
        """After the end of all processes: free what this object owns.

        Returns:
            How it ended, in words; and the exit statuses that this is of, none if a rank said why.
        """
        self.blocks.close()
        statuses = [process.reap() for process in self.ranks]
        if self._causes:
            return f"ended: {'; '.join(self._causes)}", self._statuses
        return describe_exit(statuses[0]), {statuses[0]}

    def abandon(self) -> None:
        """Free what this object owns; processes that still run lose their lifelines."""
        self.blocks.close()
        for process in self.ranks:
            process.abandon()

    # How it is.

    def ask_for_stacks(self) -> None:
        """Make all processes write their stacks: any of them may be the one that hangs."""
        for process in self.ranks:
            process.ask_for_stacks()

    def stacks(self) -> str:
        """The stacks of all processes that wrote some; those of ranks with the rank."""
        found = [process.stacks() for process in self.ranks]
        if not self.is_group:
            return found[0]
        return "\n".join(f"{self._name(rank)}:\n{text}" for rank, text in enumerate(found) if text)

    def own_bytes(self) -> int:
        """The resident memory of its own of the process that has most."""
        return max(process.own_bytes() for process in self.ranks)
