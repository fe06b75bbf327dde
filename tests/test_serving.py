"""Tests of mcinfer/worker/server.py: a worker's loop in a thread, with its real socket and lifeline."""

import gc
import json
import os
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ctypes import c_float
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer.cards.cuda import Card
from mcinfer.config import Device, EngineOptions
from mcinfer.engines.base import BoundRun
from mcinfer.errors import CardLostError
from mcinfer.protocol import (
    PREDICT,
    PREDICT_HEAD,
    VERSION,
    Attach,
    Build,
    BuildFinish,
    Cancel,
    Detach,
    Error,
    Exit,
    Hello,
    Message,
    Predict,
    Reply,
    TensorRef,
    UpdateWeights,
    decode,
    encode,
    encode_references,
)
from mcinfer.runtime.transport import MasterTransport, UnreachableError, WorkerTransport
from mcinfer.shm.block import Block
from mcinfer.shm.descriptors import send
from mcinfer.shm.lifeline import Lifeline
from mcinfer.specs import STRING, numpy_dtype
from mcinfer.worker import runs
from mcinfer.worker.server import CARD_LOST, WorkerLoop
from tests.emulated_cards import emulated_cards
from tests.process.waiting import wait_until

PATIENCE = 20.0
BLOCK_BYTES = 1 << 16
SHOWN = "the token that the worker shows in HELLO"

Array = NDArray[Any]
Answer = TypeVar("Answer", Reply, Error)


class Peer:
    """The master's side: the test says what to send, and sees what comes."""

    def __init__(self) -> None:
        self.router = MasterTransport()
        connection = WorkerTransport(os.dup(self.router.handle))
        self.lifeline, theirs = Lifeline.pair()
        self.status: object = None
        worker = Lifeline.inherited(theirs.detach())
        self.cancels, listening = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def work() -> None:
            try:
                self.status = WorkerLoop(connection, SHOWN, worker, listening).serve()
            except SystemExit as exc:
                self.status = exc.code
            worker.close()

        self.listening = listening

        self.thread = threading.Thread(target=work)
        self.thread.start()
        self.peer, data = self._receive()
        self.hello = decode(data)
        self.blocks: dict[int, Block] = {}
        self.requests = 0

    def _receive(self) -> tuple[bytes, bytes]:
        while (received := self.router.receive()) is None:
            assert select.select([self.router.fd], [], [], PATIENCE)[0]
        return received

    def last_words(self) -> list[Message]:
        """What the worker still says until it closes."""
        said: list[Message] = []
        self.thread.join(PATIENCE)
        with suppress(UnreachableError):  # the connection has ended, after all that was sent
            while True:
                while received := self.router.receive():
                    said.append(decode(received[1]))
                self.router.send([self.peer], b"")
                select.select([self.router.fd], [], [], 0.01)
        return said

    def receive(self) -> Message:
        return decode(self._receive()[1])

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.router.send([self.peer], encode(message))

    def build(
        self,
        model: str,
        engine: str = "fake",
        variable_weights: tuple[str, ...] = (),
        device: str = "cpu:0",
        concurrent_runs: int = 1,
    ) -> BuildFinish:
        self.send(
            Build(
                model=model,
                engine=engine,
                device=device,
                options=EngineOptions(
                    threads=1,
                    prepare="never",
                    allow_fallback=True,
                    variable_weights=variable_weights,
                    concurrent_runs=concurrent_runs,
                ),
            )
        )
        built = self.receive()
        assert isinstance(built, BuildFinish)
        return built

    def fail_build(self, model: str, concurrent_runs: int = 1) -> Error:
        """Have it load a model, and expect an error."""
        options = EngineOptions(concurrent_runs=concurrent_runs)
        self.send(Build(model=model, engine="fake", device="cpu:0", options=options))
        error = self.receive()
        assert isinstance(error, Error)
        return error

    def attach(self, number: int) -> None:
        block = Block.create(number, BLOCK_BYTES)
        self.blocks[number] = block
        self.lifeline.send_block(number, block.size, block.fd)
        self.send(Attach(block=number, size=block.size))

    def array(self, reference: TensorRef) -> Array:
        """The memory at a reference to one of our blocks."""
        _, element_type, shape, number, offset = reference
        assert number is not None
        dtype = numpy_dtype(element_type)
        memory = self.blocks[number].memory(offset, prod(shape) * dtype.itemsize)
        return np.ndarray(shape, dtype, memoryview(memory))

    def predict(
        self, inputs: Sequence[TensorRef], outputs: Sequence[TensorRef] = (), weights: int = 0
    ) -> int:
        self.requests += 1
        places = tuple(inputs), tuple(outputs)
        self.send(
            Predict(
                request=self.requests, shard=0, weights=weights, inputs=places[0], outputs=places[1]
            )
        )
        return self.requests

    def ask(self, inputs: Sequence[TensorRef], *rest: Any) -> Reply:
        """Run, and expect an answer."""
        return self.answer(self.predict(inputs, *rest))

    def fail(self, inputs: Sequence[TensorRef], *rest: Any) -> Error:
        """Run, and expect an error."""
        return self.error(self.predict(inputs, *rest))

    def answer(self, request: int) -> Reply:
        return self._receive_for(request, Reply)

    def error(self, request: int) -> Error:
        return self._receive_for(request, Error)

    def _receive_for(self, request: int, kind: type[Answer]) -> Answer:
        message = self.receive()
        assert isinstance(message, kind), message
        assert (message.request, message.shard) == (request, 0)
        return message

    def fetch(self, reference: TensorRef) -> Array:
        """What lies in a block of the worker's own."""
        number = reference[3]
        assert number is not None
        size, fd, _ = self.lifeline.receive_block(number)
        self.blocks[number] = Block.attach(number, size, fd)
        return self.array(reference)

    def finish(self) -> object:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        return self.status

    def cancel(self, request: int, shard: int = 0) -> None:
        send(self.cancels, encode(Cancel(request=request, shard=shard)))

    def close(self) -> None:
        if self.thread.is_alive():
            self.send(Exit())
            self.finish()
        for block in self.blocks.values():
            block.close()
        self.router.close()
        self.lifeline.close()
        self.cancels.close()
        for thread in threading.enumerate():
            if thread.name == "mcinfer-cancel":
                thread.join(PATIENCE)
        self.listening.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def fake(folder: Path, **acts: Any) -> str:
    """A model of y = 2 x and u = 3 x, of which the shape is not known before."""
    model = {
        "inputs": [["x", "float32", ["batch"]]],
        "outputs": [
            ["y", "float32", ["batch"], {"from": "x", "scale": 2}],
            ["u", "float32", ["found"], {"from": "x", "scale": 3}],
        ],
        **acts,
    }
    path = folder / "model.json"
    path.write_text(json.dumps(model))
    return str(path)


@pytest.fixture
def served(peer: Peer, tmp_path: Path) -> Peer:
    """A worker that has built the model, and has one block."""
    peer.build(fake(tmp_path))
    peer.attach(0)
    return peer


def at(name: str, offset: int, rows: int = 3, block: int = 0) -> TensorRef:
    return (name, "float32", (rows,), block, offset)


x_at, y_at, u_at = partial(at, "x"), partial(at, "y"), partial(at, "u")


# A worker's life.


def test_worker_says_hello_builds_serves_and_ends(peer: Peer, tmp_path: Path) -> None:
    assert peer.hello == Hello(version=VERSION, pid=os.getpid(), token=SHOWN)
    built = peer.build(fake(tmp_path))
    assert built is not None
    assert built.inputs == (("x", "float32", ("batch",)),)
    assert [spec[0] for spec in built.outputs] == ["y", "u"]
    assert built.providers == ("fake",)
    peer.attach(0)
    peer.array(x_at(0))[:] = [1, 2, 3]
    reply = peer.ask([x_at(0)], [y_at(64)])
    assert reply.outputs[0] == y_at(64)
    assert peer.array(y_at(64)).tolist() == [2, 4, 6]
    assert reply.outputs[1][:3] == ("u", "float32", (3,))
    assert peer.fetch(reply.outputs[1]).tolist() == [3, 6, 9]
    peer.send(Exit())
    assert peer.finish() == 0


@pytest.mark.parametrize(
    "message",
    [
        Cancel(request=0, shard=0),
        Predict(request=0, shard=0, inputs=(), outputs=()),
        Reply(request=1, shard=0, outputs=(), seconds=0.0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_message_before_build_ends_the_worker(peer: Peer, message: Message) -> None:
    peer.send(message)
    assert peer.finish() == 1
    assert not peer.last_words()


# Cards.


def test_slab_that_was_not_attached_ends_the_worker_with_status_1(peer: Peer) -> None:
    peer.send(Build(model="/m", engine="fake", device="cuda:0", slab=-1))
    assert peer.finish() == 1


def test_cards_are_served_until_one_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with emulated_cards(WITHOUT="events"):  # a process cannot open its own, and is both sides here
        card = Card.open(Device("cuda", 0))
        blocks = [card.create(0, 64), Card.open(Device("cuda", 1)).create(1, 64)]
        peer = Peer()
        try:
            built = peer.build(fake(tmp_path), device="cuda:0")
            assert built is not None
            assert (built.slab, built.reaches) == (None, ("cuda:0", "cuda:1"))
            for block in blocks:
                peer.lifeline.send_block(block.number, block.size, block.fd, block.token)
                peer.send(Attach(block=block.number, size=block.size, device=str(block.device)))
            near, far = ((c_float * 3).from_address(block.address) for block in blocks)
            near[:] = [1, 2, 3]
            reply = peer.ask([x_at(0)], [y_at(0, block=1)])
            assert [*far] == [2, 4, 6]
            assert peer.fetch(reply.outputs[1]).tolist() == [3, 6, 9]
            unmapped = card.create(2, 64)
            address = unmapped.address
            unmapped.close()
            card.copy(address, address, 64)
            peer.predict([x_at(0)], [y_at(0, block=1)])
            assert peer.finish() == CARD_LOST
        finally:
            peer.close()
            for block in blocks:
                with suppress(CardLostError):
                    block.close()
    assert "only a new process can use the card again; this worker ends" in caplog.text


# Runs.


def test_run_fails_by_its_kind_and_the_next_is_served(peer: Peer, tmp_path: Path) -> None:
    peer.build(fake(tmp_path, when={"-1": "fail", "-2": "invalid", "-3": "refuse"}))
    peer.attach(0)
    x = peer.array(x_at(0))
    for first, kind, text in (
        (-1, "predict", "asked to fail"),
        (-2, "invalid", "invalid input"),
        (-3, "refused", "asked to refuse"),
    ):
        x[0] = first
        error = peer.fail([x_at(0)], [y_at(64)])
        assert error.kind == kind
        assert text in error.text
        assert "Traceback" in error.traceback
    x[0] = 5
    peer.ask([x_at(0)], [y_at(64)])
    assert peer.array(y_at(64))[0] == 10


@pytest.mark.parametrize(
    "reference",
    [x_at(0, block=1), x_at(BLOCK_BYTES - 11), x_at(2**62), x_at(0, rows=2**61), x_at(0, 3, -1)],
    ids=["unknown block", "over the end", "far away", "too large", "the worker's"],
)
def test_tensor_outside_its_block_is_refused(served: Peer, reference: TensorRef) -> None:
    assert f"tensor 'x' does not lie in block {reference[3]}" in served.fail([reference]).text
    output: TensorRef = ("y", *reference[1:])
    assert "tensor 'y'" in served.fail([x_at(0)], [output]).text
    served.ask([x_at(0)], [y_at(64)])


# Blocks.


def test_block_in_the_place_of_another_is_read(peer: Peer, tmp_path: Path) -> None:
    peer.build(fake(tmp_path))
    for values in ([1, 2, 3], [4, 5, 6]):
        peer.attach(7)
        peer.array(x_at(0, block=7))[:] = values
        for _ in range(2):
            peer.ask([x_at(0, block=7)], [y_at(64, block=7)])
            assert np.array_equal(peer.array(y_at(64, block=7)), 2 * np.array(values))
        peer.blocks.pop(7).close()
        peer.send(Detach(block=7))
    assert "does not lie in block 7" in peer.fail([x_at(0, block=7)]).text


# Cancelling.


def test_cancelled_run_ends_and_the_next_is_served(peer: Peer, tmp_path: Path) -> None:
    started = tmp_path / "started"
    peer.build(fake(tmp_path, when={"1": f"once:{started}:sleep:60"}))
    peer.attach(0)
    peer.array(x_at(0))[:] = 1
    request = peer.predict([x_at(0)], [y_at(64)])
    wait_until(started.exists)
    peer.cancel(request + 1000)  # of another request: nothing
    peer.cancel(request, 1)  # of another shard: nothing
    peer.cancel(request)
    assert peer.error(request).kind == "cancelled"
    peer.ask([x_at(0)], [y_at(64)])
    assert peer.array(y_at(64)).tolist() == [2, 2, 2]


def test_run_cancelled_before_it_begins_is_skipped(peer: Peer, tmp_path: Path) -> None:
    peer.build(fake(tmp_path, when={"1": "sleep:0.2"}))
    peer.attach(0)
    peer.array(x_at(0))[:] = 1
    first = peer.predict([x_at(0)], [y_at(64)])
    peer.cancel(first + 1)
    second = peer.predict([x_at(0)], [y_at(128)])
    peer.answer(first)
    assert peer.error(second).kind == "cancelled"
    assert peer.array(y_at(128)).tolist() == [0, 0, 0]
    peer.ask([x_at(0)], [y_at(128)])
    assert peer.array(y_at(128)).tolist() == [2, 2, 2]


def test_cancellations_that_concern_no_run_are_forgotten(served: Peer) -> None:
    for number in range(10_000, 20_000):
        while True:
            try:
                served.cancel(number)
                break
            except BlockingIOError:
                wait_until(lambda: is_read(served.listening))
    wait_until(lambda: is_read(served.listening))
    served.ask([x_at(0)], [y_at(64)])
    served.requests = 10_000 - 1
    served.ask([x_at(0)], [y_at(64)])  # the first of them is so long ago that it counts no more


def is_read(end: socket.socket) -> bool:
    """Whether the canceller has taken all that was sent to it."""
    return not select.select([end], [], [], 0)[0]


# Several runs at once.


def test_worker_that_gets_no_thread_for_its_runs_says_so(peer: Peer, tmp_path: Path) -> None:
    before = threading.stack_size(1 << 46)  # no address space has room for it
    try:
        error = peer.fail_build(fake(tmp_path), 2)
    finally:
        threading.stack_size(before)
    assert (error.kind, error.text) == ("build", "RuntimeError: can't start new thread")
    peer.send(Exit())
    assert peer.finish() == 0


@pytest.mark.parametrize("fault", ["message", "run"])
def test_worker_that_ends_by_a_fault_of_one_thread_answers_no_run_as_cancelled(
    peer: Peer, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """The master would fail their requests, which another worker is to answer."""
    started = tmp_path / "started"
    peer.build(
        fake(tmp_path, when={"1": f"once:{started}:sleep:60", "2": "quit"}), concurrent_runs=3
    )
    peer.attach(0)
    peer.array(x_at(0))[:] = 1
    peer.array(x_at(512))[:] = 2
    peer.predict([x_at(0)], [y_at(64)])
    wait_until(started.exists)
    if fault == "run":
        peer.predict([x_at(512)], [y_at(64)])
    else:
        peer.router.send([peer.peer], b"no message")
    assert peer.finish() == (3 if fault == "run" else 1)
    assert peer.last_words() == []
    assert ("the master's message does not fit" in caplog.text) == (fault == "message")


# Heads.


def test_body_that_is_no_references_fails_its_run(served: Peer) -> None:
    inputs, outputs = encode_references((x_at(0),)), encode_references((y_at(64),))
    good = inputs + outputs
    served.ask([x_at(0)], [y_at(64)])  # bound from here on
    bad = [(0, good), (len(good), good), (len(inputs) - 1, good), (2**32 - 1, good), (0, b"")]
    bad += [(len(inputs), good + b"\xc0"), (len(inputs), inputs), (1, b"\x90\x91\x90")]
    for size, body in bad:
        served.requests += 1
        head = PREDICT_HEAD.pack(PREDICT, served.requests, 0, 0, size, False, 0)
        served.router.send([served.peer], head + body)
        assert served.error(served.requests).kind == "predict"
    served.ask([x_at(0)], [y_at(64)])


def test_bound_runs_are_no_more_than_allowed_by_number_and_bytes(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [["y", "float32", ["batch"], {"from": "x"}]]
    peer.build(fake(tmp_path, outputs=outputs))
    peer.attach(0)
    monkeypatch.setattr(runs, "_MAX_LAYOUTS", 5)
    for rows in (*range(1, 20), *range(1, 20)):
        peer.ask([x_at(0, rows)], [y_at(4096, rows)])
    assert bound_runs() <= 5
    size = len(encode_references((x_at(0),)) + encode_references((y_at(64),)))
    monkeypatch.setattr(runs, "_MAX_LAYOUT_BYTES", 3 * size + 2)
    for rows in range(20, 40):
        peer.ask([x_at(0, rows)], [y_at(4096, rows)])
        assert bound_runs() <= 3


# Weights.

REPLACEABLE = [["w", "float32", [3], 1.0], ["v", "float32", [3], 10.0], ["k", "float32", [], 0.0]]


def built_with_weights(peer: Peer, folder: Path, **acts: Any) -> None:
    """A worker of y = x + w and u = x + v, of which w and v can be replaced, x = 0 and one block."""
    outputs = [
        ["y", "float32", ["batch"], {"from": "x", "add": "w"}],
        ["u", "float32", ["batch"], {"from": "x", "add": "v"}],
    ]
    model = fake(folder, outputs=outputs, weights=REPLACEABLE, **acts)
    built = peer.build(model, variable_weights=("v", "w"))
    assert built is not None
    assert built.weights == (("v", "float32", (3,)), ("w", "float32", (3,)))
    peer.attach(0)


def update(peer: Peer, version: int, *tensors: TensorRef, oldest: int = 0) -> None:
    peer.send(UpdateWeights(version=version, oldest=oldest, tensors=tensors))


def ask_both(peer: Peer, version: int) -> tuple[list[float], list[float]]:
    """y and u of that version."""
    outputs = [y_at(64), u_at(128)]
    peer.ask([x_at(0)], outputs, version)
    y, u = (peer.array(reference).tolist() for reference in outputs)
    return y, u


def bound_runs() -> int:
    """How many runs are bound: the worker is a thread of this process."""
    gc.collect()
    return sum(isinstance(item, BoundRun) for item in gc.get_objects())


def test_run_is_with_the_version_that_it_names(peer: Peer, tmp_path: Path) -> None:
    built_with_weights(peer, tmp_path)
    w, w2, v = at("w", 1024), at("w", 2048), at("v", 3072)
    for reference, value in ((w, 2), (w2, 3), (v, 20)):
        peer.array(reference)[:] = value
    update(peer, 1, w)
    update(peer, 2, w2, v)
    for _ in range(2):  # bound, then from the cache
        assert ask_both(peer, 0) == ([1] * 3, [10] * 3)
        assert ask_both(peer, 1) == ([2] * 3, [10] * 3)
        assert ask_both(peer, 2) == ([3] * 3, [20] * 3)


def test_old_versions_are_forgotten_with_their_runs(peer: Peer, tmp_path: Path) -> None:
    built_with_weights(peer, tmp_path)
    places = [at("w", 1024 * (1 + version)) for version in range(5)]
    for version in (1, 2, 3):
        peer.array(places[version])[:] = version
        update(peer, version, places[version])
        assert ask_both(peer, version)[0] == [version] * 3
    assert bound_runs() == 3
    update(peer, 4, places[4], oldest=3)
    for version in (1, 2):  # also where the run was bound
        error = peer.fail([x_at(0)], [y_at(64), u_at(128)], version)
        assert f"version {version} of the weights is not known" in error.text
    assert bound_runs() == 1
    assert ask_both(peer, 3)[0] == [3] * 3
    assert ask_both(peer, 4)[0] == [0] * 3


@pytest.mark.parametrize(
    "reference",
    [at("w", 0, block=1), ("w", STRING, (1,), None, ("text",))],
    ids=["unknown block", "strings"],
)
def test_weights_outside_their_block_end_it(
    peer: Peer, tmp_path: Path, reference: TensorRef
) -> None:
    built_with_weights(peer, tmp_path)
    update(peer, 1, at("v", 0), reference)
    assert peer.finish() == 1


def test_outputs_that_are_all_empty_come_without_a_block(served: Peer) -> None:
    for rows in (0, 0, 3):  # the block of the last one is the next on the lifeline
        reply = served.ask([x_at(0, rows)])
    assert [reference[3] for reference in reply.outputs] == [-2, -2]
    assert served.fetch(reply.outputs[0]).shape == (3,)


def test_answer_that_no_message_can_carry_fails_its_run_and_hands_over_no_block(
    peer: Peer, tmp_path: Path
) -> None:
    outputs = [[name, STRING, ["batch"], {"from": "x"}] for name in ("y", "z")]
    outputs += [[name, "float32", ["rows"], {"from": "w"}] for name in ("u", "v")]
    inputs = [["x", STRING, ["batch"]], ["w", "float32", ["rows"]]]
    peer.build(fake(tmp_path, inputs=inputs, outputs=outputs))
    peer.attach(0)

    def given(text: str, count: int, rows: int) -> list[TensorRef]:
        return [("x", STRING, (count,), None, (text,) * count), ("w", "float32", (rows,), 0, 0)]

    error = peer.fail(given("x" * (1 << 20), 9, 1))
    assert error.kind == "predict"
    assert "does not fit a message" in error.text
    for rows in (1000, 1):  # the block that was made for it is not large enough, and then it is
        reply = peer.ask(given("a", 1, rows))
        assert reply.outputs[0][4] == ("a",)
        assert peer.fetch(reply.outputs[2]).shape == (rows,)


@pytest.mark.parametrize("concurrent_runs", [1, 3])
def test_model_of_which_too_much_is_to_be_said_is_a_build_error(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, concurrent_runs: int
) -> None:
    for module in ("protocol", "worker.server"):
        monkeypatch.setattr(f"mcinfer.{module}.MAX_SPECS", 100)
    inputs = [[f"{number}", "int8", []] for number in range(101)]
    path = fake(tmp_path, inputs=inputs, outputs=[["y", "int8", [], {"from": "0"}]])
    error = peer.fail_build(path, concurrent_runs)
    assert error.kind == "build"
    assert "(at most 100 inputs" in error.text
    assert "BuildFinish.inputs does not fit: got 101 items" in error.text
    peer.send(Exit())
    assert peer.finish() == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "mcinfer-run"]


def test_block_that_is_attached_twice_ends_the_worker(served: Peer) -> None:
    served.lifeline.send_block(0, BLOCK_BYTES, served.blocks[0].fd)
    served.send(Attach(block=0, size=BLOCK_BYTES))
    assert served.finish() == 1
