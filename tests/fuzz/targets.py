"""What the fuzzer drives: each target takes one message, and says what came of it.

A target raises `Violation`, or anything but what handling may raise, when a promise is broken.
"""

import json
import os
import random
import socket
from abc import ABC, abstractmethod
from math import prod
from pathlib import Path

import numpy as np

from mcinfer.actions import Settle
from mcinfer.config import Limits, RestartPolicy, Timeouts
from mcinfer.errors import McinferError, ProtocolError
from mcinfer.fields import TensorRef
from mcinfer.permits import Permits
from mcinfer.protocol import (
    VERSION,
    Attach,
    Build,
    BuildFinish,
    Cancel,
    Conversation,
    Detach,
    Error,
    Exit,
    Hello,
    Message,
    Predict,
    PredictJoined,
    Preparing,
    Reply,
    UpdateWeights,
    WorkerState,
    decode,
    encode,
)
from mcinfer.scheduler import Scheduler
from mcinfer.serving import Server
from mcinfer.shm.arena import Arena
from mcinfer.shm.block import Block
from mcinfer.shm.lifeline import Lifeline
from mcinfer.specs import STRING, ModelSpec, TensorSpec, numpy_dtype, tensor_bytes
from mcinfer.staging import Job, Stager
from mcinfer.transport import Dealer, Router

ARENA_BYTES = 1 << 18
BLOCK_BYTES = 1 << 14
ROWS = 4
OUTPUTS = (
    ("y", "float32", ("batch", 4)),
    ("u", "float32", ("found", 4)),
    ("q", "int4", ("found",)),
    ("s", STRING, ("found",)),
)
INPUTS = (("x", "float32", ("batch", 4)),)
SPEC = ModelSpec(
    inputs=tuple(TensorSpec(name=n, dtype=numpy_dtype(t), shape=s) for n, t, s in INPUTS),
    outputs=tuple(TensorSpec(name=n, dtype=numpy_dtype(t), shape=s) for n, t, s in OUTPUTS),
)


class Violation(Exception):  # noqa: N818 what it is called
    """A promise was broken."""


class Target(ABC):
    """Something that takes messages."""

    @abstractmethod
    def prepare(self, rng: random.Random) -> list[bytes]:
        """Get ready for one message; such as are right for the state that this leads to."""

    @abstractmethod
    def take(self, data: bytes) -> str:
        """Take a message; in a word, what came of it.

        Raises:
            Violation: A promise was broken.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up what it holds."""


class DecodeTarget(Target):
    """The codec: bytes are a message that comes back as it was, or a `ProtocolError`."""

    def prepare(self, rng: random.Random) -> list[bytes]:
        """See `Target.prepare`."""
        del rng
        return []

    def take(self, data: bytes) -> str:
        """See `Target.take`."""
        try:
            message = decode(data)
        except ProtocolError:
            return "refused"
        if decode(encode(message)) != message:
            raise Violation(f"{message} does not come back")
        return type(message).__name__

    def close(self) -> None:
        """See `Target.close`."""


class MasterTarget(Target):
    """A master's handling of what one worker says and hands over, as the supervisor does it."""

    def __init__(self) -> None:
        """A real arena and stager; the workers are this object."""
        self._arena = Arena(ARENA_BYTES)
        self._stager = Stager(SPEC, self._arena)
        self._own = Block.create(-1, BLOCK_BYTES)
        slot = self._arena.allocate(ARENA_BYTES // 2)
        np.frombuffer(memoryview(slot.memory), np.uint8)[:] = 0xA5
        self._foreign = slot
        self._scheduler = _new_scheduler()
        self._jobs: dict[int, Job] = {}
        self._ours, self._theirs = _lifelines()

    def prepare(self, rng: random.Random) -> list[bytes]:
        """A new pool whose first worker has come to some state, and has handed a block over."""
        self._jobs.clear()
        self._ours.close()
        self._theirs.close()
        self._ours, self._theirs = _lifelines()
        for number in rng.choice(((-1,), (-1,), (-1, -2, -3), (-2, -1), (5,), (), (-9,) * 2)):
            size = rng.choice((BLOCK_BYTES,) * 8 + (BLOCK_BYTES * 2, 0, 2**63, 2**64 - 1))
            self._theirs.send_block(number, size, self._own.fd)
        self._scheduler = scheduler = _new_scheduler()
        depth = rng.randrange(6)
        if depth > 0:
            scheduler.handle_message(0.0, 0, _hello())
        if depth > 1:
            for worker in range(2):
                if worker:
                    scheduler.handle_message(0.0, worker, _hello(worker))
                scheduler.handle_message(0.0, worker, _built())
        for number in range((0, 0, 0, 1, 2, 4)[depth]):
            job = self._stager.stage({"x": np.ones((ROWS, 4), np.float32)}, 1, None, 0.0)
            job.number = number
            self._jobs[number] = job
            scheduler.handle_request(0.0, number, (ROWS,), 10.0, size=64)
        if rng.random() < 0.1:
            scheduler.handle_close(0.0, 5.0)
        replies = [
            Reply(request=number, shard=0, outputs=self._outputs(job), seconds=0.1)
            for number, job in self._jobs.items()
        ]
        errors = [
            Error(request=number, shard=0, kind=kind, text="bad news")
            for number in self._jobs
            for kind in ("predict", "invalid", "cancelled")
        ]
        progress = Preparing(seconds=0.5, written=1)
        others = [_hello(), _built(), progress, Error(kind="build", text="bad")]
        return [encode(message) for message in (*replies * 3, *errors, *others)]

    def _outputs(self, job: Job) -> tuple[TensorRef, ...]:
        message = decode(job.message(0))
        if not isinstance(message, Predict):
            raise Violation(f"{message} is no PREDICT")
        return (
            *message.outputs,
            ("u", "float32", (3, 4), -1, 64),
            ("q", "int4", (7,), -1, 128),
            ("s", STRING, (2,), None, ("one", b"two")),
        )

    def take(self, data: bytes) -> str:
        """As the supervisor takes a worker's message."""
        try:
            message = decode(data)
            if isinstance(message, Reply):
                message = self._take_reply(message)
            actions = self._scheduler.handle_message(0.1, 0, message)
        except ProtocolError as exc:
            str(exc)
            outcome = "refused"
        else:
            outcome = type(message).__name__
            for action in actions:
                if isinstance(action, Settle) and action.error is None:
                    self._read(self._jobs[action.request])
        self._check()
        return outcome

    def _take_reply(self, reply: Reply) -> Message:
        members = self._scheduler.running(0)
        if not members or members[0] != (reply.request, reply.shard):
            return reply
        try:
            for request, shard in members:
                self._jobs[request].take(shard, reply.outputs, self._fetch)
        except OSError as exc:
            return Error(request=reply.request, shard=reply.shard, kind="predict", text=repr(exc))
        return reply

    def _fetch(self, number: int) -> Block:
        size, fd = self._ours.receive_block(number)
        return Block.attach(number, size, fd)

    def _read(self, job: Job) -> None:
        """The caller looks at all that it got."""
        try:
            results = job.result()
        except McinferError:
            return
        for array in results.values():
            array.tobytes() if array.dtype != object else array.tolist()

    def _check(self) -> None:
        ledger = self._scheduler.ledger
        counts = (ledger.succeeded, ledger.failed, ledger.cancelled, ledger.in_flight)
        if ledger.accepted != sum(counts):
            raise Violation(f"{ledger.accepted} requests were accepted, {counts} are known")
        foreign = memoryview(self._foreign.memory).cast("B")
        if foreign[::251].tobytes().strip(b"\xa5"):
            raise Violation("memory that is not the request's was written")

    def close(self) -> None:
        """See `Target.close`."""
        self._jobs.clear()
        self._ours.close()
        self._theirs.close()
        self._own.close()
        self._stager.close()
        self._arena.close()


class WorkerTarget(Target):
    """A worker's handling of what its master says, with real sockets and blocks, and the engine "fake"."""

    def __init__(self, folder: Path) -> None:
        """Start a server and have it build a model."""
        model = {
            "inputs": [[*item] for item in INPUTS],
            "outputs": [
                ["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": "w"}],
                ["u", "float32", ["found", 4], {"from": "x", "scale": 3}],
            ],
            "weights": [["w", "float32", [4], 1.0]],
        }
        path = folder / "model.json"
        path.write_text(json.dumps(model), encoding="utf-8")
        self._model = str(path)
        endpoint = f"ipc://{folder / 's'}"
        self._cores = os.sched_getaffinity(0)
        self._router = Router(endpoint)
        self._permits = Permits.create()
        self._connect()
        self._server = Server(Dealer(endpoint), self._worker_end, self._permits)
        self._blocks = [Block.create(number, BLOCK_BYTES) for number in range(2)]
        self._server.send(_hello())
        self._server.handle(self._build())
        self._restore()

    def _connect(self) -> None:
        self._ours_socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours, self._worker_end = Lifeline(self._ours_socket), Lifeline(theirs)

    def _build(self) -> Build:
        return Build(
            model=self._model,
            engine="fake",
            device="cpu:0",
            cores=(),
            shared=False,
            threads=1,
            inter_op_threads=None,
            allow_fallback=False,
            variable_weights=("w",),
            session_config={},
            provider_options={},
        )

    def _restore(self) -> None:
        """Bring the worker back to where it has a model and two blocks, and no more."""
        server = self._server
        server._conversation = Conversation(state=WorkerState.READY)
        server._inbox.clear()
        for number in {*server._blocks} - {0, 1}:
            server.handle(Detach(block=number))
        for number, block in enumerate(self._blocks):
            if number not in server._blocks:
                self._ours.send_block(number, block.size, block.fd)
                server.handle(Attach(block=number, size=block.size))
        server.handle(UpdateWeights(version=1, oldest=1, tensors=(_tensor("w", (4,), 1, 0),)))
        server._weights = {0: (), 1: server._weights[1]}
        if server._engine is None:
            raise Violation("the worker has lost its model")
        while self._permits.take():
            pass

    def prepare(self, rng: random.Random) -> list[bytes]:
        """A worker in some state, and a block on its way to it."""
        self._ours.close()
        self._worker_end.close()
        self._connect()
        self._server._lifeline = self._worker_end
        if rng.random() < 0.01 or {0, 1} != {*self._server._blocks}:
            self._restore()
        state = rng.choice((WorkerState.READY,) * 6 + (WorkerState.CONNECTED, WorkerState.EXITING))
        self._server._conversation = Conversation(state=state)
        self._permits.give()
        number, block = rng.choice((5, 5, 5, 0, 6, 2**62)), self._blocks[0]
        self._ours.send_block(number, rng.choice((block.size,) * 4 + (1, 2**64 - 1)), block.fd)
        # It ends the waiting for a descriptor that does not come, as the end of the master would.
        self._ours_socket.shutdown(socket.SHUT_WR)
        inputs = (_tensor("x", (ROWS, 4), 0, 0),)
        outputs = (_tensor("y", (ROWS, 4), 1, 64),)
        known = (*outputs, _tensor("u", (ROWS, 4), 1, 1024))
        member = {"inputs": inputs, "outputs": known}
        run = Predict(request=1, shard=0, inputs=inputs, outputs=outputs)
        joined = PredictJoined(
            request=1, shard=0, members=(member, member), input_axes=(0,), output_axes=(0, 0)
        )
        weights = UpdateWeights(version=2, oldest=1, tensors=(_tensor("w", (4,), 1, 0),))
        messages = (run, run, run, joined, joined, joined, weights, Detach(block=1), Exit())
        more = (Attach(block=5, size=BLOCK_BYTES), Attach(block=0, size=1), Cancel(request=1))
        return [encode(message) for message in (*messages, *more, self._build())]

    def take(self, data: bytes) -> str:
        """As the worker's loop takes a message."""
        joined = self._server._joined
        try:
            message = decode(data)
            self._server.handle(message)
            outcome = type(message).__name__
        except ProtocolError:
            outcome = "refused"
        answered = 0
        while (received := self._router.receive()) is not None:
            decode(received[1])  # whatever it answers is a message
            answered += 1
        if outcome == "Build":
            os.sched_setaffinity(0, self._cores)
            if joined is not None and joined is not self._server._joined:
                joined.close()  # a real worker builds once
        return outcome

    def close(self) -> None:
        """See `Target.close`."""
        self._server.close()
        self._ours.close()
        self._worker_end.close()
        for block in (*self._blocks, *self._server._blocks.values()):
            block.close()
        self._router.close()
        self._permits.close()


def _new_scheduler() -> Scheduler:
    """A pool of two workers that both have their process."""
    build = Build(
        model="/model",
        engine="fake",
        device="cpu:0",
        cores=(0,),
        shared=False,
        threads=None,
        inter_op_threads=None,
        allow_fallback=False,
        session_config={},
        provider_options={},
    )
    scheduler = Scheduler(
        [build, build], timeouts=Timeouts(), restart=RestartPolicy(), limits=Limits()
    )
    scheduler.handle_start(0.0)
    for worker in range(2):
        scheduler.handle_started(worker, 100 + worker)
    return scheduler


def _hello(worker: int = 0) -> Hello:
    return Hello(version=VERSION, pid=100 + worker, token="secret")  # noqa: S106 no secret


def _built() -> BuildFinish:
    return BuildFinish(inputs=INPUTS, outputs=OUTPUTS, providers=("fake",), seconds=0.1)


def _tensor(name: str, shape: tuple[int, ...], block: int, offset: int) -> TensorRef:
    if offset + tensor_bytes("float32", prod(shape)) > BLOCK_BYTES:
        raise ValueError(f"{name} does not fit the block")
    return (name, "float32", shape, block, offset)


def _lifelines() -> tuple[Lifeline, Lifeline]:
    ours, theirs = Lifeline.pair()
    return ours, Lifeline(theirs)
