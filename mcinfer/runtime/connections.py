"""The processes of a pool and their channels: messages, blocks, versions of the weights.

The loop decides which workers to start, send to and kill, and judges their messages. Each start has two
random tokens, which the worker gets over its lifeline. The worker shows one in HELLO and the master shows
the other in BUILD, so neither side serves a stranger. One thread calls the methods.
"""

import hmac
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from mcinfer.config import Limits
from mcinfer.errors import ProtocolError
from mcinfer.machine import usable_memory
from mcinfer.private import inherited, model_name
from mcinfer.process import Inherited
from mcinfer.protocol import (
    MAX_HELLO_BYTES,
    VERSION,
    Attach,
    Build,
    Cancel,
    Detach,
    Hello,
    Message,
    decode,
    encode,
    encode_predict_joined,
)
from mcinfer.requests.request import Request
from mcinfer.runtime.transport import MasterTransport, SendError
from mcinfer.runtime.worker_process import (
    ChildProcess,
    HeldBlock,
    OutputForwarder,
    WorkerProcess,
)
from mcinfer.shm.arena import SharedBlock
from mcinfer.shm.block import Block

_STANDINGS = {
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
}


DESCRIPTORS_TO_OPEN = 24  # free descriptors of this process that a pool needs for itself


class UnreachableError(OSError):
    """A worker does not accept messages and must be killed."""


class Connections:
    """See the module's docstring.

    Attributes:
        transport: Carries the messages, after `open`.
        processes: The running processes, by index of the worker.
        peers: The identified workers, by the transport's name for them.
    """

    def __init__(
        self,
        builds: Sequence[Sequence[Build]],
        block: Callable[[int], SharedBlock | None],
        limits: Limits,
        worker: type[WorkerProcess] = WorkerProcess,
    ) -> None:
        self._worker = worker
        self.processes: dict[int, WorkerProcess] = {}
        self._builds = builds
        self._block = block  # of the master's, by its number
        self._most_memory = limits.worker_memory_bytes
        self._all_memory = usable_memory()
        self._inherited = Inherited.now()
        self.peers: dict[bytes, WorkerProcess] = {}

    def open(self) -> None:
        """Make the transport, and the threads that forward output.

        Raises:
            OSError: The system has no descriptor, thread or folder left; nothing stays open.
        """
        _check_descriptors(
            DESCRIPTORS_TO_OPEN + self._worker.descriptors * sum(map(len, self._builds))
        )
        with ExitStack() as opened:
            self.transport = MasterTransport()
            opened.callback(self.transport.close)
            self.output = OutputForwarder(model_name(self._builds[0][0].model))
            opened.pop_all()

    def close_socket(self) -> None:
        """End all messages; processes that are left lose their lifelines."""
        for process in self.processes.values():
            process.abandon()
        self.processes.clear()
        self.peers.clear()
        self.transport.close()

    def close(self, seconds: float) -> None:
        """After `close_socket`: forward the last output, for at most so many seconds."""
        self.output.close(seconds)

    # Processes.

    def start(self, index: int) -> WorkerProcess:
        """Start a worker with all its ranks, or none of them.

        Raises:
            OSError: The system cannot start a process.
        """
        builds = self._builds[index]
        _check_descriptors(self._worker.descriptors * len(builds))
        with ExitStack() as opened, ExitStack() as passed:
            pairs = []
            for _ in builds[1:]:  # a star: rank 0 has a socket to each of the others
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                pairs.append([passed.enter_context(end).fileno() for end in pair])
            process = self._worker(
                index,
                self.label(index),
                connection=self.transport.handle,
                hello_token=secrets.token_hex(16),
                build_token=secrets.token_hex(16),
                ranks=[ours for ours, _ in pairs],
                model=inherited(builds[0].model),
                output=self.output,
                inherited=self._inherited,
                most_memory=self._limit(builds[0]),
            )
            opened.callback(process.reap)
            opened.callback(process.kill)
            for rank, (build, (_, theirs)) in enumerate(zip(builds[1:], pairs, strict=True), 1):
                greeting = {
                    "rank": rank,
                    "socket": theirs,
                    "build": encode(build).decode("latin-1"),
                }
                follower = ChildProcess(
                    self.label(index, rank),
                    greeting,
                    [theirs, *inherited(build.model)],
                    output=self.output,
                    inherited=self._inherited,
                    most_memory=self._limit(build),
                )
                process.followers.append(follower)
            opened.pop_all()
        self.processes[index] = process
        return process

    def label(self, index: int, rank: int = 0) -> tuple[int, str]:
        """A rank's number among all of the pool's, and its device."""
        return sum(map(len, self._builds[:index])) + rank, self._builds[index][rank].device

    def _limit(self, build: Build) -> int | None:
        """How much memory of its own a process may have."""
        on_cpu = build.device.startswith("cpu:")
        return self._most_memory or (self._all_memory if on_cpu else None)

    def remove(self, index: int) -> None:
        """Forget a process that has ended; the caller reaps it."""
        process = self.processes.pop(index)
        if process.peer is not None:
            del self.peers[process.peer]

    def kill(self, index: int) -> None:
        if index in self.processes:
            self.processes[index].kill()

    def standings(self) -> dict[int, str]:
        """By worker, what is wrong with its process though its messages do not show it: stopped, or ended."""
        found = {}
        for index, process in self.processes.items():
            for rank, child in enumerate(process.ranks):
                with suppress(OSError):
                    text = _STANDINGS.get(child.standing(), "")
                    if text:
                        found[index] = f"rank {rank} {text}" if process.followers else text
        return found

    # What comes.

    def read(self, peer: bytes, data: bytes) -> tuple[int | None, Message | ProtocolError]:
        """The worker that sent this, and the message; an error in the place of a malformed message.

        A peer that shows a worker's token is that worker from then on. Messages of others, and of workers
        that broke the protocol, have no worker.
        """
        process = self.peers.get(peer)
        if process is None and len(data) > MAX_HELLO_BYTES:
            return None, ProtocolError(f"{len(data)} bytes of a stranger")
        if process is not None and process.outlawed:
            return None, ProtocolError("more of a worker that broke the protocol")
        try:
            message = decode(data)
        except ProtocolError as exc:
            return None if process is None else process.index, exc
        return self._greet(peer, message) if process is None else process.index, message

    def _greet(self, peer: bytes, message: Message) -> int | None:
        """The worker whose HELLO this is."""
        if isinstance(message, Hello) and message.version == VERSION:
            token = message.token.encode(errors="surrogatepass")  # whatever text it may be
            for index, process in self.processes.items():
                known = process.peer is None and message.pid == process.pid
                if known and hmac.compare_digest(token, process.hello_token.encode()):
                    process.peer = peer
                    self.peers[peer] = process
                    return index
        return None

    def fetch(self, index: int, number: int) -> Block:
        """A block that the worker has made and handed over.

        Raises:
            ProtocolError: The worker has not handed over such a block.
            OSError: This process has no descriptor or memory left.
        """
        size, fd, _ = self.processes[index].lifeline.receive_block(number)
        return Block.attach(number, size, fd)

    def take_slab(self, index: int, slab: tuple[int, int]) -> None:
        """Keep the slab that the worker has made and handed over, for the others of its card.

        Raises:
            ProtocolError: It was not asked for one, or has not handed over such a block.
            OSError: This process has no descriptor left.
        """
        process = self.processes[index]
        if not self._builds[index][0].shares_weights or process.slab is not None:
            raise ProtocolError(f"slab {slab} was not asked for")
        number, expected = slab
        size, fd, token = process.lifeline.receive_block(number)
        process.slab = HeldBlock(number=number, size=size, fd=fd, token=token)
        if size != expected:
            raise ProtocolError(f"slab {slab}: the block that was handed over has {size} bytes")

    # What goes.

    def send(self, index: int, message: Message) -> None:
        """Send a message, if the worker's process is there.

        Raises:
            UnreachableError: The worker does not accept messages; kill it.
        """
        process = self.processes.get(index)
        if process is None:
            return
        if isinstance(message, Cancel):
            try:
                process.cancels.send(message.request, message.shard)
            except OSError as exc:
                raise UnreachableError(f"cannot be reached: {exc}") from exc
        elif process.peer is not None:
            if isinstance(message, Build):
                message = replace(message, token=process.build_token)
            self._send(process.peer, encode(message))

    def _send(self, peer: bytes, data: bytes) -> None:
        try:
            self.transport.send(peer, data)
        except SendError as exc:
            raise UnreachableError(f"cannot be reached: {exc}") from exc

    def send_run(
        self, index: int, members: Sequence[tuple[Request, int]], *, fresh: bool = False
    ) -> None:
        """Send shards as one run, after the blocks and the version of the weights that they need.

        Raises:
            UnreachableError: As `send`.
        """
        process = self.processes.get(index)
        if process is None or process.peer is None:
            return
        for request, _ in members:
            if not request.blocks <= process.attached:
                self._attach(index, process, request.blocks)
        first, shard = members[0]
        weights = first.weights
        if weights.number and weights.number not in process.weights:
            self._attach(index, process, weights.blocks)
            self._send(process.peer, weights.message)
            given = {n for n in process.weights if n >= weights.oldest}
            process.weights = given | {weights.number}
        if len(members) == 1:
            data = first.message(shard, fresh=fresh)
        else:
            tensors = [request.tensors(shard) for request, shard in members]
            data = encode_predict_joined(first.number, shard, weights.number, tensors, first.axes)
        self._send(process.peer, data)

    def share_slab(self, index: int, leader: int) -> None:
        """Give a worker the slab of another one.

        Raises:
            UnreachableError: As `send`.
        """
        process, slab = self.processes.get(index), self.processes[leader].slab
        if process is None or slab is None:
            return
        self._hand_over(process, slab)
        device = self._builds[leader][0].device
        self.send(index, Attach(block=slab.number, size=slab.size, device=device))

    def _hand_over(self, process: WorkerProcess, block: SharedBlock | HeldBlock) -> None:
        try:
            process.lifeline.send_block(block.number, block.size, block.fd, block.token)
        except OSError as exc:
            raise UnreachableError(f"does not take a block: {exc}") from exc

    def detach(self, index: int, number: int) -> None:
        """Have a worker unmap a block that was freed."""
        process = self.processes.get(index)
        if process is not None and number in process.attached:
            process.attached.discard(number)
            self.send(index, Detach(block=number))

    def _attach(self, index: int, process: WorkerProcess, blocks: frozenset[int]) -> None:
        """Give the worker the blocks that it does not have yet."""
        for number in blocks - process.attached:
            block = self._block(number)
            if block is None:
                continue
            self._hand_over(process, block)
            process.attached.add(number)
            device = "" if block.device is None else str(block.device)
            self.send(index, Attach(block=number, size=block.size, device=device))


def _check_descriptors(count: int) -> None:
    """Raise `OSError` unless this process can open so many descriptors."""
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened += [os.eventfd(0)]
    except OSError as exc:
        raise OSError(
            exc.errno,
            f"{count} descriptors are needed and {len(opened)} are left (ulimit -n): {exc.strerror}",
        ) from exc
    finally:
        for fd in opened:
            os.close(fd)
