"""The processes of a pool and their channels: messages, blocks, versions of the weights.

The loop decides which workers to start, send to and kill, and judges their messages. Each start has a random
token, which the worker gets over its lifeline and shows in HELLO. One thread calls the methods.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from mcinfer.config import Limits
from mcinfer.errors import ProtocolError
from mcinfer.machine import check_tasks, usable_memory
from mcinfer.private import inherited
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
from mcinfer.runtime.transport import MasterTransport
from mcinfer.runtime.worker_process import Gang, WorkerProcess
from mcinfer.shm.arena import OfferedBlock, SharedBlock
from mcinfer.shm.descriptors import send

_STANDINGS = {
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
}


DESCRIPTORS_TO_OPEN = 22  # free descriptors of this process that a pool needs for itself
_TASKS_TO_OPEN = 4  # threads of a pool itself: the loop's, of calls, ZeroMQ's (2)


Share = Callable[[int, ExitStack], list[list[int]]]
"""Makes what so many ranks share: the descriptors of each, which the stack closes."""


class Connections:
    """See the module's docstring.

    Attributes:
        transport: Carries the messages, after `open`.
        lost: Called with a worker that does not accept messages, and why; to be killed. Set before the start.
        model: The model, for people.
        builds: By worker, what each of its ranks loads.
        processes: The running processes, by index of the worker.
        peers: The worker and rank of each identified process, by the transport's name for it.
    """

    def __init__(
        self,
        builds: Sequence[Sequence[Build]],
        block: Callable[[int], SharedBlock | None],
        limits: Limits,
        share: Share,
        model: str,
    ) -> None:
        self._share, self.model = share, model
        self.lost: Callable[[Gang, str], None]
        self.processes: dict[int, Gang] = {}
        self.builds = builds
        self._block = block  # of the master's, by its number
        self._most_memory = limits.worker_memory_bytes
        self._all_memory = usable_memory()
        self._inherited = Inherited.now()
        self.peers: dict[bytes, tuple[Gang, int]] = {}

    def open(self) -> None:
        """Make the transport.

        Raises:
            OSError: The system has no descriptor, thread or folder left; nothing stays open.
        """
        processes = sum(map(len, self.builds))
        _check_descriptors(DESCRIPTORS_TO_OPEN + WorkerProcess.descriptors * processes)
        # libzmq ends the process if it cannot start a thread (src/thread.cpp).
        check_tasks(_TASKS_TO_OPEN + sum(map(self._tasks, self.builds)))
        self.transport = MasterTransport()

    def close(self) -> None:
        """End all messages; processes that are left lose their lifelines."""
        for process in self.processes.values():
            process.abandon()
        self.processes.clear()
        self.peers.clear()
        self.transport.close()

    # Processes.

    def start(self, index: int) -> Gang:
        """Start a worker with all its processes, or none of them.

        Raises:
            OSError: The system cannot start a process.
        """
        builds = self.builds[index]
        between = len(builds) * (len(builds) - 1)  # what the ranks share, until all are started
        _check_descriptors(WorkerProcess.descriptors * len(builds) + between)
        check_tasks(self._tasks(builds))
        with ExitStack() as opened, ExitStack() as passed:
            groups = self._share(len(builds), passed) if len(builds) > 1 else [[]]
            processes = []
            for rank, (build, group) in enumerate(zip(builds, groups, strict=True)):
                process = WorkerProcess(
                    self.label(index, rank),
                    connection=self.transport.handle,
                    group=group,
                    model=inherited(build.model),
                    name=self.model,
                    inherited=self._inherited,
                    most_memory=self._limit(build),
                )
                opened.callback(process.reap)
                opened.callback(process.kill)
                processes.append(process)
            opened.pop_all()
        gang = self.processes[index] = Gang(index, processes)
        return gang

    def _tasks(self, builds: Sequence[Build]) -> int:
        """How many threads the processes of a worker have at least, with those of their sessions.

        ONNX Runtime may wait without an end where it cannot start one (1.32).
        """
        sessions = [build for build in builds if build.engine == "onnxruntime"]
        threads = [b.options.threads or b.threads or len(b.cores) or 1 for b in sessions]
        return WorkerProcess.tasks * len(builds) + sum(threads) - len(threads)

    def label(self, index: int, rank: int = 0) -> tuple[int, str]:
        """A rank's number among all of the pool's, and its device."""
        return sum(map(len, self.builds[:index])) + rank, self.builds[index][rank].device

    def _limit(self, build: Build) -> int | None:
        """How much memory of its own a process may have."""
        on_cpu = build.device.startswith("cpu:")
        return self._most_memory or (self._all_memory if on_cpu else None)

    def reap(self, index: int) -> tuple[str, set[int]]:
        """After the end of a worker's processes: free what belongs to them; see `Gang.reap`."""
        self._hear_no_more(self.processes[index])
        return self.processes.pop(index).reap()

    def outlaw(self, index: int) -> None:
        """End a worker, and read none of its messages any more."""
        self._hear_no_more(self.processes[index])
        self.kill(index)

    def _hear_no_more(self, gang: Gang) -> None:
        for process in gang.ranks:
            if process.peer is not None:
                self.peers.pop(process.peer, None)

    def kill(self, index: int) -> None:
        if index in self.processes:
            self.processes[index].kill()

    def standings(self) -> dict[int, str]:
        """By worker, what is wrong with its process though its messages do not show it: stopped, or ended."""
        found = {}
        for index, gang in self.processes.items():
            for rank, process in enumerate(gang.ranks):
                with suppress(OSError):
                    text = _STANDINGS.get(process.standing() or "")
                    if text:
                        found[index] = f"rank {rank} {text}" if gang.is_group else text
        return found

    # What comes.

    def read(self, peer: bytes, data: bytes) -> tuple[int | None, Message | ProtocolError | None]:
        """The worker that sent this, and its message; an error in the place of a malformed message.

        A peer that shows a token is that worker, or that rank of it, from then on. Messages of others, and of
        workers that were outlawed, have no worker. There is no message yet if only some of a worker's
        ranks have sent it.
        """
        gang, rank = self.peers.get(peer, (None, 0))
        if gang is None and len(data) > MAX_HELLO_BYTES:
            return None, ProtocolError(f"{len(data)} bytes of a stranger")
        try:
            message = decode(data)
            gang, rank = (gang, rank) if gang is not None else self._greet(peer, message)
            return (None, message) if gang is None else (gang.index, gang.take(rank, message))
        except ProtocolError as exc:
            return None if gang is None else gang.index, exc

    def _greet(self, peer: bytes, message: Message) -> tuple[Gang | None, int]:
        """The worker whose HELLO this is, and the rank."""
        if isinstance(message, Hello) and message.version == VERSION:
            for gang in self.processes.values():
                for rank, process in enumerate(gang.ranks):
                    known = process.peer is None and message.pid == process.pid
                    if known and message.token == process.token:
                        process.peer = peer
                        gang.note_peers()
                        self.peers[peer] = gang, rank
                        return gang, rank
        return None, 0

    def take_slab(self, index: int, slab: tuple[int, int]) -> None:
        """Keep the block of weights that the worker has made and handed over, for others of its device.

        Raises:
            ProtocolError: It has not handed over such a block.
            OSError: This process has no descriptor left.
        """
        [process] = self.processes[index].ranks
        number, expected = slab
        size, fd, token = process.lifeline.receive_block(number)
        process.slab = OfferedBlock(number=number, size=size, fd=fd, token=token)
        if size != expected:
            raise ProtocolError(f"slab {slab}: the block that was handed over has {size} bytes")

    # What goes.

    def send(self, index: int, message: Message) -> None:
        """Send a message, if the worker's process is there."""
        gang = self.processes.get(index)
        if gang is not None:
            with self._reaching(gang):
                self._send(gang, message)

    @contextmanager
    def _reaching(self, gang: Gang) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self.lost(gang, f"cannot be reached: {exc}")

    def _send(self, gang: Gang, message: Message) -> None:
        if isinstance(message, Cancel):
            # Not in ranks: it would end in some a run that others wait for, or are done with.
            if not gang.is_group:
                send(gang.ranks[0].cancels, encode(message))
        elif isinstance(message, Build) and gang.peers:
            builds = [message] if not gang.is_group else self.builds[gang.index]
            for process, build in zip(gang.ranks, builds, strict=True):
                self.transport.send([process.peer or b""], encode(build))
        else:
            self.transport.send(gang.peers, encode(message))

    def send_run(self, index: int, members: Sequence[tuple[Request, int]], *, wide: bool) -> None:
        """Send shards as one run, after the blocks and the version of the weights that they need."""
        gang = self.processes.get(index)
        if gang is None or gang.killed:
            return
        try:
            for request, _ in members:
                if not request.blocks <= gang.attached:
                    self._attach(gang, request.blocks)
            first, shard = members[0]
            weights = first.weights
            if weights.number and weights.number not in gang.weights:
                self._attach(gang, weights.blocks)
                self.transport.send(gang.peers, weights.message)
                given = {n for n in gang.weights if n >= weights.oldest}
                gang.weights = given | {weights.number}
            if len(members) == 1:
                returned: Sequence[int] = ()
                if gang.blocks.ended or gang.blocks.lost:
                    returned, closed = gang.blocks.take_back()
                    for number in closed:
                        self.transport.send(gang.peers, encode(Detach(block=number)))
                data = first.message(shard, returned, wide=wide)
            else:
                tensors = [request.tensors(shard) for request, shard in members]
                data = encode_predict_joined(
                    first.number, shard, weights.number, tensors, first.axes
                )
            self.transport.send(gang.peers, data)
        except OSError as exc:  # as `_reaching`, which takes longer, for each request
            self.lost(gang, f"cannot be reached: {exc}")

    def build_with(self, index: int, build: Build, *, maker: int) -> None:
        """Have a worker load the model with the weights that another one has made."""
        gang, slab = self.processes.get(index), self.processes[maker].ranks[0].slab
        if gang is None or slab is None:
            return
        with self._reaching(gang):
            self._hand_over(gang, slab, build.device)
            self._send(gang, replace(build, slab=slab.number))

    def _hand_over(self, gang: Gang, block: SharedBlock | OfferedBlock, device: str) -> None:
        for process in gang.ranks:
            process.lifeline.send_block(block.number, block.size, block.fd, block.token)
        self._send(gang, Attach(block=block.number, size=block.size, device=device))

    def detach(self, index: int, number: int) -> None:
        """Have a worker unmap a block that was freed."""
        gang = self.processes.get(index)
        if gang is not None and number in gang.attached:
            gang.attached.discard(number)
            self.send(index, Detach(block=number))

    def _attach(self, gang: Gang, blocks: frozenset[int]) -> None:
        """Give the worker the blocks that it does not have yet."""
        for number in blocks - gang.attached:
            block = self._block(number)
            if block is not None:
                self._hand_over(gang, block, str(block.device or ""))
                gang.attached.add(number)  # else the next run would go without it


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
