"""The master's side: a real loop without its thread, and workers whose every byte the fuzzer chooses.

Loop, scheduler, connections, requests and arena are the real ones. `FedTransport` gives the loop bytes
without a socket; `FedProcess` is a worker's process that never runs. A result must be what the worker wrote
where its reply says, which other code here reads again.
"""

import logging
import random
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from time import monotonic
from typing import Any, NoReturn

import numpy as np

from mcinfer.config import Limits, RestartPolicy, Timeouts
from mcinfer.errors import McinferError, ProtocolError
from mcinfer.protocol import (
    MAX_RUNS,
    REPLY,
    REPLY_HEAD,
    VERSION,
    BuildFinish,
    Error,
    Hello,
    Message,
    Preparing,
    Reply,
    TensorRef,
    decode,
    encode,
)
from mcinfer.requests.request import Request
from mcinfer.requests.splitting import Known
from mcinfer.runtime.cancels import Cancels
from mcinfer.runtime.gang import Gang
from mcinfer.runtime.loop import Loop
from mcinfer.runtime.supervision import Supervision
from mcinfer.runtime.transport import MasterTransport
from mcinfer.runtime.worker_process import WorkerProcess
from mcinfer.scheduler.queue import ShardId
from mcinfer.scheduler.scheduler import Scheduler
from mcinfer.scheduler.workers import PoolRules
from mcinfer.sharding import Split
from mcinfer.shm.block import Block
from mcinfer.shm.lifeline import Lifeline
from mcinfer.specs import STRING, ModelSpec, tensor_bytes
from tests.fuzz.target import (
    INPUTS,
    KNOWN_OUTPUTS,
    KNOWN_SPEC,
    OUTPUTS,
    ROWS,
    SPEC,
    Violation,
    build,
    hello,
)
from tests.planned_requests import planner_of, request_of

ARENA_BYTES = 1 << 18
OWN_BYTES = 16_000
"""Of a worker's own block: no whole pages."""

BIG_BYTES = 1 << 20
"""Of a block that is larger than all of the shared memory may be."""

_HANDED_OVER = (*((-1,),) * 4, *((-1, -2), (-2, -1), (5, -1)) * 2, (), (-9,) * 2)
"""Numbers of blocks that lie on the lifeline."""

_FOREIGN = 0xA5
_WORKERS = 2
_STRANGER = b"stranger"
_SPLIT = Known(
    split=Split(inputs={"x": 0}, outputs={"y": 0}, known="said"),
    settled=True,
    splits=True,
    rescues=False,
    number=1,
)
"""How requests of the model with known outputs are cut in two."""


class FedTransport(MasterTransport):
    """Gives the loop bytes without a socket, and keeps what it sends."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[bytes, bytes]] = deque()
        self.sent: list[tuple[bytes, bytes]] = []

    def send(self, peers: Sequence[bytes], data: bytes) -> None:
        self.sent += [(peer, data) for peer in peers]

    def receive(self) -> tuple[bytes, bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def may_sleep(self) -> bool:
        return False

    def close(self) -> None: ...


class FedProcess(WorkerProcess):
    """A worker's process that does not run.

    Attributes:
        theirs: The worker's end of the lifeline.
        listening: The worker's end for cancellations.
        killed: Whether it was to end.
        gang: The worker that it is.
    """

    def __init__(self, index: int, pid: int) -> None:
        self.index = index
        self.pid = pid
        self.token = f"{pid:032}"
        self.renew()

    def renew(self) -> None:
        """As if it was started now, with new sockets."""
        self.cancels, self.listening = Cancels.pair()
        self.lifeline, theirs = Lifeline.pair()
        self.theirs = Lifeline(theirs)
        self.peer = None
        self.killed = False
        self.gang = Gang(self.index, [self])

    def standing(self) -> str:
        return "S"

    def ask_for_stacks(self) -> None: ...

    def kill(self) -> None:
        self.killed = True

    def abandon(self) -> None:
        for end in (self.cancels, self.listening, self.lifeline, self.theirs):
            end.close()


class FedSupervision(Supervision):
    """It starts no process; an unexpected error is a violation."""

    def start_worker(self, worker: int) -> None: ...

    def outlaw(self, worker: int, reason: str) -> None:
        if "could not be handled" in reason:
            raise Violation(reason)
        super().outlaw(worker, reason)


class FedLoop(Loop):
    """A loop that was never started; an unexpected error is a violation."""

    def _collapse(self, exc: BaseException) -> NoReturn:
        raise Violation(f"the loop failed: {exc!r}") from exc


class MasterTarget:
    """A master's handling of what a worker, or a stranger, says and hands over."""

    def __init__(self) -> None:
        self._log = logging.getLogger("mcinfer.master")
        self._level = self._log.level
        self._log.setLevel(logging.CRITICAL + 1)
        self._rules = PoolRules(timeouts=Timeouts(), restart=RestartPolicy(), limits=Limits())
        self._builds = [build("/model")] * _WORKERS
        groups = [[build] for build in self._builds]
        self._loop = loop = FedLoop(groups, self._rules, ARENA_BYTES)
        self._connections = loop._connections
        self._router = FedTransport()
        self._connections.transport = loop._transport = self._router
        self._processes = [FedProcess(index, 100 + index) for index in range(_WORKERS)]
        self._planners = {spec: planner_of(spec, loop.arena) for spec in (SPEC, KNOWN_SPEC)}
        self._spec = SPEC
        self._own = _filled(-1, OWN_BYTES)
        self._big = _filled(-2, BIG_BYTES)
        self._foreign = loop.arena.allocate(ARENA_BYTES // 2)
        np.frombuffer(memoryview(self._foreign.memory), np.uint8)[:] = _FOREIGN
        self._requests: list[Request] = []
        self._blocks: dict[int, tuple[int, Block]] = {}
        self._speaker = b""

    # Getting ready.

    def prepare(self, rng: random.Random) -> list[bytes]:
        """Come to some state; messages that are right in it."""
        self._reset()
        self._spec = spec = rng.choice((SPEC, KNOWN_SPEC))
        process = self._processes[0]
        self._hand_over(rng, process)
        depth = rng.choice((0, 1, 2, 3, 3, 3, 3, 4, 4, 5))
        if depth > 0:
            self._say(0, hello(process))
        if depth > 1:
            self._say(1, hello(self._processes[1]))
            for worker in range(_WORKERS):
                self._say(worker, replace(_built(spec), concurrent=rng.choice((1, 1, 2))))
        if rng.random() < 0.3:
            for w in self._scheduler.workers:
                w.capacity = MAX_RUNS
        for number in range((0, 0, 0, 1, 2, 4)[depth]):
            inputs = {"x": np.full((ROWS, 4), number, np.float32)}
            cut = spec is KNOWN_SPEC and rng.random() < 0.4
            known = _SPLIT if cut else None
            request = request_of(self._planners[spec], inputs, 1 + cut, known, 0.0)
            request.called, request.timeout = monotonic(), 10.0
            self._loop.inbox.enter(request, wait=False)
            self._loop._turn()
            self._requests.append(request)
        if rng.random() < 0.3:
            self._answer_of_the_other()
        if rng.random() < 0.05:
            self._loop._end(5.0)
        self._speaker = b"worker 0" if rng.random() < 0.9 else _STRANGER
        return [encode(message) for message in self._messages(rng)] + self._bent(rng)

    def _answer_of_the_other(self) -> None:
        for number, shard in self._running(1):
            if self._spec is KNOWN_SPEC:
                self._write(number)
                self._say(1, Reply(request=number, shard=shard, outputs=(), seconds=0.1))

    def _reset(self) -> None:
        loop = self._loop
        self._requests.clear()
        loop.inbox.items.clear()
        loop.inbox.finished = False
        for planner in self._planners.values():
            planner._opened.clear()
        loop.supervision = FedSupervision(
            self._connections, loop.inbox, loop._delivery, self._rules
        )
        loop.oversee(Scheduler(self._builds, loop, loop.supervision, self._rules))
        loop._delivery._drain()
        self._router.inbox.clear()
        self._router.sent.clear()
        self._connections.peers.clear()
        self._connections.processes.clear()
        self._scheduler.handle_start(monotonic())
        for index, process in enumerate(self._processes):
            process.abandon()
            process.renew()
            self._connections.processes[index] = process.gang
            self._scheduler.handle_started(index, process.pid)

    def _running(self, worker: int) -> tuple[ShardId, ...]:
        runs = self._scheduler.workers[worker].begun()
        return tuple(member for run in runs for member in run.members)

    @property
    def _scheduler(self) -> Scheduler:
        return self._loop._scheduler

    def _say(self, worker: int, message: Message) -> None:
        self._feed(b"worker %d" % worker, encode(message))

    def _feed(self, peer: bytes, data: bytes) -> None:
        self._router.inbox.append((peer, data))
        while self._router.inbox and not self._loop.inbox.finished:
            self._loop._turn()

    def _hand_over(self, rng: random.Random, process: FedProcess) -> None:
        self._blocks.clear()
        for number in rng.choice(_HANDED_OVER):
            block = self._big if number == -2 else self._own
            size = rng.choice((block.size,) * 40 + (block.size * 2, 0, 2**63, 2**64 - 1))
            process.theirs.send_block(number, size, block.fd)
            self._blocks[number] = (size, block)

    def _messages(self, rng: random.Random) -> list[Message]:
        process = self._processes[0]
        replies = [
            Reply(
                request=number, shard=shard, outputs=outputs, seconds=rng.choice((0.1, 0.0, 1e308))
            )
            for number, shard in self._runs()
            for outputs in (self._outputs(number, shard), ())
        ]
        errors = [
            Error(request=number, shard=0, kind=kind, text="bad news")
            for number in range(len(self._requests))
            for kind in ("predict", "invalid", "cancelled")
        ]
        wrong = Hello(version=VERSION, pid=process.pid, token=rng.choice(("", "0" * 32)))
        other = Hello(version=VERSION, pid=process.pid + 1, token=process.token)
        said = [hello(process), wrong, other, _built(self._spec)]
        more = [Preparing(seconds=0.5, written=1), Error(kind="build", text="bad")]
        return [*replies * 2, *errors, *said, *more]

    def _runs(self) -> list[tuple[int, int]]:
        """Requests and shards; those of the first worker the most often."""
        every = [
            (n, i) for n, request in enumerate(self._requests) for i in range(len(request.rows))
        ]
        return [*self._running(0) * 4, *every]

    def _bent(self, rng: random.Random) -> list[bytes]:
        """Replies with one wrong value, at the edges of what is allowed."""
        found = []
        for number, shard in rng.choices(self._runs(), k=6) if self._requests else ():
            seconds = rng.choice((-1.0, float("nan"), float("inf"), -float("inf"), 1e308))
            other = rng.choice((number, number + 1, 2**63, 2**64 - 1))
            part = rng.choice((shard, 1, 2**32 - 1))
            found.append(REPLY_HEAD.pack(REPLY, number, shard, seconds, rng.random() < 0.5))
            found.append(REPLY_HEAD.pack(REPLY, other, part, 0.1, False))
            outputs = [*self._outputs(number, shard)]
            index = rng.randrange(len(outputs))
            outputs[index] = self._bend(rng, outputs[index])
            with suppress(ProtocolError):  # `mutate` makes what cannot be encoded
                reply = Reply(request=number, shard=shard, outputs=tuple(outputs), seconds=0.1)
                found.append(encode(reply))
        return found

    def _bend(self, rng: random.Random, reference: TensorRef) -> TensorRef:
        name, kind, shape, block, place = reference
        if kind == STRING:
            values = ("", "é", b"\xff", "x" * 50)[: rng.randrange(5)]
            return (name, kind, (len(values),), None, values)
        rows = shape[0]
        match rng.randrange(5):
            case 0:
                block = rng.choice((-1, -2, -9, 0, 1, 5))
            case 1:
                place = rng.choice((0, 64, 4, 1, OWN_BYTES - 4, OWN_BYTES - 1, 2**62))
            case 2:
                rows = rng.choice((0, 1, 2, 5, 9, OWN_BYTES // 16, OWN_BYTES // 16 + 1, 2**60))
            case 3:  # larger than all the shared memory may be
                block, place = -2, 0
                rows = rng.choice((ARENA_BYTES, ARENA_BYTES * 2, ARENA_BYTES // 16 + 1))
            case _:  # at the end of the block
                kind = rng.choice(("float32", "int32", "int8", kind))
                size = tensor_bytes(kind, prod(shape))
                block, place = -1, OWN_BYTES - size + rng.choice((-1, 0, 0, 1, 64))
        return (name, kind, (rows, *shape[1:]), block, place)

    def _outputs(self, number: int, shard: int = 0) -> tuple[TensorRef, ...]:
        """What the worker would answer, which has written what was asked for."""
        self._write(number)
        others = (
            ("u", "float32", (3, 4), -1, 64),
            ("q", "int8", (7,), -1, 128),
            ("s", STRING, (2,), None, ("one", b"two")),
        )
        return (*self._asked(number, shard), *(others if self._spec is SPEC else ()))

    def _asked(self, number: int, shard: int) -> tuple[TensorRef, ...]:
        return self._requests[number]._asked[shard]

    def _write(self, number: int) -> None:
        for shard in range(len(self._requests[number].rows)):
            for _, kind, shape, block, offset in self._asked(number, shard):
                held = self._loop.arena.block(block or 0)
                if held is None:
                    raise Violation(f"block {block} is not there")
                memory = held.memory(offset, tensor_bytes(kind, prod(shape)))
                memoryview(memory).cast("B")[:] = bytes([number + 1]) * len(memory)

    # One message.

    def take(self, data: bytes) -> str:
        """Take a message; in a word, what came of it. Raises `Violation` where a promise was broken."""
        settled = {id(request) for request in self._requests if request.settled}
        before = [process.peer for process in self._processes]
        outlawed = self._processes[0].gang.outlawed
        running = self._running(0)
        self._feed(self._speaker, data)
        self._check_who_is_known(before, data)
        self._check_sent()
        outcome = "refused" if self._processes[0].gang.outlawed and not outlawed else "taken"
        for number, request in enumerate(self._requests):
            if request.settled and id(request) not in settled:
                outcome = self._check_result(number, request, data, running)
        if self._processes[0].gang.outlawed:
            self._check_outlaw()
        self._check()
        return "ignored" if self._speaker == _STRANGER else outcome

    def _check_who_is_known(self, before: list[bytes | None], data: bytes) -> None:
        """A peer is taken for a worker by its token alone, and one is outlawed for its own bytes."""
        for process, peer in zip(self._processes, before, strict=True):
            if process.peer != peer:
                message, known = decode(data), (process.pid, process.token)
                if not isinstance(message, Hello) or (message.pid, message.token) != known:
                    raise Violation(f"{message} was taken for that of {process.pid}")
            elif process.gang.outlawed and (
                self._speaker == _STRANGER or process is not self._processes[0]
            ):
                raise Violation(f"{process.pid} is killed for what another one said")
            if process.gang.outlawed and not process.killed:
                raise Violation(f"{process.pid} broke the protocol, and lives")

    def _check_outlaw(self) -> None:
        """Nothing of it is read any more, right or not."""
        waiting = [request for request in self._requests if not request.settled]
        for number, shard in self._running(0):
            outputs = self._outputs(number, shard)
            self._say(0, Reply(request=number, shard=shard, outputs=outputs, seconds=0.1))
            self._say(0, Reply(request=number, shard=shard, outputs=(), seconds=0.1))
        if any(request.settled for request in waiting):
            raise Violation("a worker that broke the protocol was listened to")

    def _check_sent(self) -> None:
        for peer, data in self._router.sent:
            decode(data)
            if peer not in {process.peer for process in self._processes}:
                raise Violation("something was sent to a stranger")

    def _check_result(
        self, number: int, request: Request, data: bytes, running: tuple[tuple[int, int], ...]
    ) -> str:
        """The answer is what lies where the reply says, if it may say so."""
        if request.was_cancelled or request.error is not None:
            if not isinstance(request.error, (McinferError, OSError)):
                raise Violation(f"failed with {request.error!r}")
            return "failed"
        reply = decode(data)
        if not isinstance(reply, Reply) or (reply.request, reply.shard) not in running:
            raise Violation(f"{reply} has answered request {number}, of runs {running}")
        if reply.request != number:
            raise Violation(f"{reply} has answered request {number}")
        try:
            results = request.result()
        except (McinferError, OSError):
            return "failed"
        if [*results] != [spec.name for spec in self._spec.outputs]:
            raise Violation(f"got results {[*results]}")
        asked = {reference[0]: reference for reference in self._asked(number, reply.shard)}
        if not reply.outputs or reply.outputs == self._asked(number, reply.shard):
            if len(asked) != len(self._spec.outputs):
                raise Violation(f"{reply} was taken, of which only {[*asked]} had a place")
            for result in results.values():
                if result.tobytes() != bytes([number + 1]) * result.nbytes or len(result) != ROWS:
                    raise Violation(f"{reply}: the result is not what the workers wrote")
            return "answered"
        total = 0
        for spec, reference in zip(self._spec.outputs, reply.outputs, strict=True):
            name, kind, shape, _, place = reference
            if name != spec.name or kind != spec.element_type:
                raise Violation(f"{reference} was taken for {spec}")
            if results[name].shape != shape:
                raise Violation(f"{reference} for {spec} became {results[name].shape}")
            if reference == asked.get(name):
                expected = bytes([number + 1]) * tensor_bytes(kind, prod(shape))
            elif name in asked and shape == asked[name][2]:
                raise Violation(f"{reference} was taken for {asked[name]}")
            elif kind == STRING:
                if results[name].tolist() != [*place]:
                    raise Violation(f"{results[name]} for {place}")
                continue
            else:
                size = tensor_bytes(kind, prod(shape))
                total += size
                expected = self._own_bytes(reference, size)
            self._compare(results[name], expected, reference)
        if total > ARENA_BYTES:
            raise Violation(f"{total} bytes were taken, of {ARENA_BYTES} that may be")
        return "answered"

    def _own_bytes(self, reference: TensorRef, size: int) -> bytes:
        _, _, _, number, place = reference
        if not size:
            return b""
        if number is None or number >= 0 or number not in self._blocks:
            raise Violation(f"{reference} was taken, of blocks {[*self._blocks]}")
        said, block = self._blocks[number]
        if said != block.size or place + size > block.size:
            raise Violation(f"{reference} was taken, of a block of {block.size}, said {said}")
        return bytes(memoryview(block.memory(place, size)).cast("B"))

    def _compare(self, result: Any, expected: bytes, reference: TensorRef) -> None:
        if result.tobytes() != expected:
            raise Violation(f"{reference}: the result is not what the worker wrote")
        if bytes([_FOREIGN]) * 8 in result.tobytes():
            raise Violation(f"{reference}: the result is of memory that is not the request's")

    def _check(self) -> None:
        table = self._scheduler.table
        counts = (table.succeeded, table.failed, table.cancelled, table.in_flight)
        if table.accepted != sum(counts):
            raise Violation(f"{table.accepted} requests were accepted, {counts} are known")
        foreign = memoryview(self._foreign.memory).cast("B")
        if foreign[::251].tobytes().strip(bytes([_FOREIGN])):
            raise Violation("memory that is not the request's was written")

    def close(self) -> None:
        self._reset()
        for process in self._processes:
            process.abandon()
        self._connections.processes.clear()
        self._own.close()
        self._big.close()
        for planner in self._planners.values():
            planner.close()
        self._loop.arena.close()
        self._log.setLevel(self._level)


def _filled(number: int, size: int) -> Block:
    """A block of bytes that each place has its own of, none of them that of foreign memory."""
    block = Block.create(number, size)
    pattern = np.random.default_rng(size).integers(0, _FOREIGN, size, np.uint8)
    memoryview(block.memory(0, size)).cast("B")[:] = pattern.tobytes()
    return block


def _built(spec: ModelSpec) -> BuildFinish:
    outputs = OUTPUTS if spec is SPEC else KNOWN_OUTPUTS
    return BuildFinish(inputs=INPUTS, outputs=outputs, providers=("fake",), seconds=0.1)
