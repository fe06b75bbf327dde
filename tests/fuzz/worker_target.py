"""The codec, and the worker's side of a connection."""

import json
import os
import random
import socket
import threading
from collections import deque
from contextlib import suppress
from math import prod
from pathlib import Path

from mcinfer.errors import ProtocolError
from mcinfer.protocol import (
    PREDICT,
    VERSION,
    Attach,
    Cancel,
    Detach,
    Error,
    Exit,
    Hello,
    Predict,
    PredictJoined,
    TensorRef,
    UpdateWeights,
    WorkerState,
    decode,
    encode,
)
from mcinfer.runtime.cancels import Cancels
from mcinfer.runtime.transport import WorkerTransport
from mcinfer.shm.block import Block
from mcinfer.shm.lifeline import Lifeline
from mcinfer.specs import tensor_bytes
from mcinfer.worker.server import WorkerLoop
from tests.fuzz.target import BLOCK_BYTES, INPUTS, ROWS, Violation, build

_PREDICT_ID = bytes([PREDICT])


class KeptAnswers(WorkerTransport):
    """Keeps what the worker sends, without a socket."""

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def receive(self) -> bytes | None:
        return None

    def close(self) -> None: ...


class WorkerTarget:
    """A worker's handling of its master's messages, with real sockets and blocks, and the engine "fake"."""

    def __init__(self, folder: Path) -> None:
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
        self._cores = os.sched_getaffinity(0)
        self._answers = KeptAnswers()
        self._cancels, self._listening = Cancels.pair()
        self._connect()
        self._loop = WorkerLoop(self._answers, "", self._worker_end, self._listening)
        self._blocks = [Block.create(number, BLOCK_BYTES) for number in range(2)]
        self._loop.send(Hello(version=VERSION, pid=100, token=""))
        self._loop.handle(build(self._model, ("w",)))
        self._restore()
        self._answers.sent.clear()  # they are no answers to inputs

    def _connect(self) -> None:
        self._ours_socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours, self._worker_end = Lifeline(self._ours_socket), Lifeline(theirs)

    def _restore(self) -> None:
        """Bring the worker back to one model and two blocks."""
        loop = self._loop
        loop._state = WorkerState.READY
        for number in {*loop._blocks} - {0, 1}:
            loop.handle(Detach(block=number))
        for number, block in enumerate(self._blocks):
            if number not in loop._blocks:
                self._ours.send_block(number, block.size, block.fd)
                loop.handle(Attach(block=number, size=block.size))
        loop.handle(UpdateWeights(version=1, oldest=1, tensors=(_tensor("w", (4,), 1, 0),)))
        [runs] = loop._lanes
        runs._weights = {0: (), 1: runs._weights[1]}
        if loop._engine is None:
            raise Violation("the worker has lost its model")

    def prepare(self, rng: random.Random) -> list[bytes]:
        """Come to some state; messages that are right in it."""
        self._ours.close()
        self._worker_end.close()
        self._connect()
        self._loop._lifeline = self._worker_end
        if rng.random() < 0.01 or {0, 1} != {*self._loop._blocks}:
            self._restore()
        state = rng.choice((WorkerState.READY,) * 6 + (WorkerState.CONNECTED, WorkerState.EXITING))
        self._loop._state = state
        number, block = rng.choice((5, 5, 5, 0, 6, 2**62)), self._blocks[0]
        self._ours.send_block(number, rng.choice((block.size,) * 4 + (1, 2**64 - 1)), block.fd)
        # So that the worker does not wait for a descriptor that does not come.
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
        attach, again = Attach(block=5, size=BLOCK_BYTES), Attach(block=0, size=1)
        others = (weights, Detach(block=1), Exit(), attach, again, Cancel(request=1, shard=0))
        messages = (*(run, joined) * 3, *others, build(self._model, ("w",)))
        return [encode(message) for message in messages]

    def take(self, data: bytes) -> str:
        """Take a message; in a word, what came of it. Raises `Violation` where a promise was broken."""
        lanes = self._loop._lanes
        message = None
        outcome = "refused"
        with suppress(ProtocolError):
            message = decode(data)
            if decode(encode(message)) != message:
                raise Violation(f"{message} does not come back")
        with suppress(ProtocolError):
            if data[:1] == _PREDICT_ID:
                self._loop.predict(data, self._loop._lanes[0])
            else:
                self._loop.handle(decode(data), self._loop._lanes[0])
            outcome = "refused" if message is None else type(message).__name__
        while self._answers.sent:
            answer = decode(self._answers.sent.popleft())  # every answer must be a message
            if message is None and not isinstance(answer, Error):
                raise Violation(f"{answer} is the answer to what is no message")
        if outcome == "Build":
            os.sched_setaffinity(0, self._cores)
            if lanes is not self._loop._lanes:
                lanes[0].close()  # a real worker builds once
        return outcome

    def close(self) -> None:
        self._loop.close()
        self._ours.close()
        self._worker_end.close()
        for block in self._blocks:
            block.close()
        self._cancels.close()
        for thread in threading.enumerate():
            if thread.name == "mcinfer-cancel":
                thread.join()
        self._listening.close()


def _tensor(name: str, shape: tuple[int, ...], block: int, offset: int) -> TensorRef:
    if offset + tensor_bytes("float32", prod(shape)) > BLOCK_BYTES:
        raise ValueError(f"{name} does not fit the block")
    return (name, "float32", shape, block, offset)
