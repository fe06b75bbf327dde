"""A worker that was taken over: the real one, but for what it sends.

As a program it is `mcinfer.worker` whose socket to the master deviates in one way, which the environment
variable MCINFER_HOSTILE names. `become` puts it in the place of the workers that a test's pool starts.
Start, build, runs and lifeline are those of the real worker, so the master sees no difference before.
"""

import contextlib
import ctypes
import dataclasses
import os
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest

from mcinfer import protocol
from mcinfer.protocol import (
    REPLY,
    REPLY_HEAD,
    BuildFinish,
    Message,
    Predict,
    Reply,
    TensorFields,
    encode,
)
from mcinfer.runtime import transport
from mcinfer.runtime.cancels import Cancels
from mcinfer.runtime.transport import WorkerTransport
from mcinfer.shm.block import Block
from mcinfer.shm.lifeline import Lifeline
from mcinfer.worker import __main__ as entry
from mcinfer.worker import server as _server  # noqa: F401 which makes a class of the real transport

KIND = "MCINFER_HOSTILE"
FLOOD_MESSAGES = 3000
GIANT_BYTES = 1 << 40
OVERSIZE_BYTES = protocol.MAX_MESSAGE_BYTES + 4096
OWN_BYTES = 4096
SPARSE_BYTES = 3 << 30
ROWS = 4
"""Rows that a reply claims for a block of this worker's own, in float32."""

OWN = -5
"""The number of that block, which the real worker does not come to."""


def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Make the next workers hostile, one for each of `KINDS`; "" stands for an honest one.

    All workers after these are honest.
    """
    for kind in kinds:
        if kind and kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}, expected one of {[*KINDS]}")
    python, here = shlex.quote(sys.executable), shlex.quote(str(Path(__file__).resolve()))
    taken, listed = shlex.quote(str(tmp_path / "taken")), shlex.quote(str(tmp_path / "kinds"))
    (tmp_path / "kinds").write_text("".join(f"{kind}\n" for kind in kinds), encoding="utf-8")
    program = tmp_path / "python"
    # The arguments are those of mcinfer.process.command: -P -m MODULE, and the module's own.
    program.write_text(
        "#!/bin/sh\n"
        'if [ "$3" = mcinfer.worker ]; then\n'
        f"    n=1; while ! mkdir {taken}$n 2>/dev/null; do n=$((n + 1)); done\n"
        f"    kind=$(sed -n ${{n}}p {listed})\n"
        '    if [ -n "$kind" ]; then\n'
        f'        shift 3; {KIND}=$kind exec {python} -P {here} "$@"\n'
        "    fi\n"
        "fi\n"
        f'exec {python} "$@"\n',
        encoding="utf-8",
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


class HostileTransport(WorkerTransport):
    """The worker's end of the transport, around the real one.

    Attributes:
        handle: The descriptor that the worker inherited.
        lifeline: One more hold on the worker's end of the lifeline.
        cancels: The descriptor for cancellations.
        outputs: Of the model.
        last: The last PREDICT.
        kept: Messages to send later.
        connections: Those that `_many_connections` made.
    """

    def __init__(self, real: WorkerTransport, handle: int, kind: str, cancels: int) -> None:
        self._real = real
        self.fd = real.fd
        self.handle = handle
        self.lifeline = Lifeline(socket.socket(fileno=os.dup(int(sys.argv[1]))))
        self.cancels = cancels
        self.outputs: tuple[TensorFields, ...] = ()
        self.last: Predict | None = None
        self.kept: list[bytes] = []
        self.connections: list[socket.socket] = []
        self._moment, self._act = KINDS[kind]

    def wait(self) -> bytes:
        return self._note(self._real.wait())

    def receive(self) -> bytes | None:
        data = self._real.receive()
        return None if data is None else self._note(data)

    def may_receive(self) -> bool:
        return self._real.may_receive()

    def close(self) -> None:
        self._real.close()

    def _note(self, data: bytes) -> bytes:
        message = protocol.decode(data)
        if isinstance(message, Predict):
            self.last = message
        return data

    def send(self, data: bytes) -> None:
        """Send what the real worker would, or something else."""
        message = protocol.decode(data)
        if isinstance(message, BuildFinish):
            self.outputs = message.outputs
        if isinstance(message, self._moment):
            self._act(self, message, data)
        else:
            self._real.send(data)

    def send_as_is(self, data: bytes) -> None:
        self._real.send(data)

    def reply(self, message: Message, references: Sequence[Any]) -> None:
        """Answer a run with these references, which the protocol has not checked."""
        assert isinstance(message, Reply)
        head = REPLY_HEAD.pack(REPLY, message.request, message.shard, 0.25, False)
        self._real.send(head + msgpack.packb([*references], unicode_errors="surrogatepass"))

    def hand_over(self, size: int = OWN_BYTES, number: int = OWN) -> Block:
        """Hand over a block of this worker's own, as a real one does for a result."""
        block = Block.create(number, size)
        memoryview(block.memory(0, OWN_BYTES)).cast("B")[:] = b"\x11" * OWN_BYTES
        self.lifeline.send_block(number, size, block.fd)
        return block

    def reply_from(
        self, message: Message, block: Any, offset: Any, shape: Sequence[Any] = (ROWS, 4)
    ) -> None:
        """Answer that all outputs lie there."""
        self.reply(
            message, [(name, kind, [*shape], block, offset) for name, kind, _ in self.outputs]
        )


Act = Callable[[HostileTransport, Message, bytes], None]


# Messages.


def _twice(worker: HostileTransport, _: Message, data: bytes) -> None:
    worker.send_as_is(data)
    worker.send_as_is(data)


def _late(worker: HostileTransport, _: Message, data: bytes) -> None:
    """The first answer comes after the second."""
    worker.kept.append(data)
    if len(worker.kept) > 1:
        for kept in reversed(worker.kept):
            worker.send_as_is(kept)
        worker.kept.clear()


def _heir(worker: HostileTransport, _: Message, data: bytes) -> None:
    """End, and leave processes behind that answer as long as the master reads."""
    heirs = [os.fork() for _ in range(2)]
    if all(heirs):
        os._exit(0)
    for stream in (0, 1, 2):
        os.close(stream)
    with contextlib.suppress(OSError):
        while True:  # the descriptor is the socket itself if each worker has one
            os.write(worker.handle, data)
    os._exit(0)


def _garbage(worker: HostileTransport, _: Message, __: bytes) -> None:
    for _index in range(100):
        worker.send_as_is(os.urandom(300))


def _huge(worker: HostileTransport, _: Message, __: bytes) -> None:
    worker.send_as_is(bytes(OVERSIZE_BYTES))


def _flood(worker: HostileTransport, _: Message, data: bytes) -> None:
    """Answers without end; only the first one is allowed."""
    for _index in range(FLOOD_MESSAGES):
        worker.send_as_is(data)


def _flood_preparing(worker: HostileTransport, _: Message, data: bytes) -> None:
    """Messages that are allowed while it builds, but without an end."""
    progress = encode(protocol.Preparing(seconds=0.5, written=1))
    for _index in range(FLOOD_MESSAGES):
        worker.send_as_is(progress)
    worker.send_as_is(data)


def _unasked_slab(worker: HostileTransport, message: Message, _: bytes) -> None:
    """Weights for the other workers of a card, though it has neither a card nor others."""
    assert isinstance(message, BuildFinish)
    block = worker.hand_over()
    slab = (block.number, block.size)
    worker.send_as_is(encode(dataclasses.replace(message, slab=slab)))


def _big_error(worker: HostileTransport, message: Message, _: bytes) -> None:
    assert isinstance(message, Reply)
    content: dict[str, Any] = {"id": protocol.Error.ID, "kind": "predict", "traceback": ""}
    content |= {"request": message.request, "shard": message.shard, "text": "E" * (15 << 20)}
    worker.send_as_is(msgpack.packb(content))


def _many_connections(worker: HostileTransport, _: Message, data: bytes) -> None:
    """As many as there are descriptors; the answer comes only if the master took none of them."""
    taken: list[socket.socket] = []
    with contextlib.suppress(OSError):
        while len(taken) < 2000:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(f"/proc/self/fd/{worker.handle}")
            taken.append(connection)
    if not taken:
        worker.send_as_is(data)
    worker.connections = taken


# Blocks.


def _open_rank(worker: HostileTransport, message: Message, _: bytes) -> None:
    """Answer that all outputs have another shape."""
    worker.hand_over()
    worker.reply_from(message, OWN, 0, (4, 2, 2))


def _sparse(size: int) -> Act:
    """Answer with a block that takes no memory here, all of which is the result."""

    def act(worker: HostileTransport, message: Message, _: bytes) -> None:
        worker.hand_over(size).close()
        worker.reply_from(message, OWN, 0, (size // 16, 4))

    return act


def _masters(worker: HostileTransport, message: Message, _: bytes) -> None:
    """Answer that all outputs lie where the inputs do."""
    assert worker.last is not None
    shape, block, offset = worker.last.inputs[0][2:]
    worker.reply_from(message, block, offset, shape)


def _overlap(worker: HostileTransport, message: Message, _: bytes) -> None:
    """Answer that the outputs lie one row further than where they were asked for."""
    assert worker.last is not None
    moved = [
        (name, kind, shape, block, offset + 16)
        for name, kind, shape, block, offset in worker.last.outputs
    ]
    worker.reply(message, moved)


def _changing(worker: HostileTransport, message: Message, _: bytes) -> None:
    """Write to the block, and punch its pages out, while the master reads it."""
    size = 32 << 20
    block = worker.hand_over(size)
    memory = memoryview(block.memory(0, size)).cast("B")
    piece = bytes(range(256)) * 4096
    for at in range(0, size, len(piece)):
        memory[at : at + len(piece)] = piece

    libc = ctypes.CDLL(None)
    keep_size_and_punch_hole = 0x01 | 0x02  # fallocate(2): later reads of these pages give zeros

    def change() -> None:
        for _index in range(400):
            memory[: len(piece)] = piece
            libc.fallocate(block.fd, keep_size_and_punch_hole, *map(ctypes.c_long, (0, len(piece))))

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    worker.reply_from(message, OWN, 0, (size // 16, 4))


def _unsealed(worker: HostileTransport, message: Message, _: bytes) -> None:
    """A block that this worker could make smaller."""
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, OWN_BYTES)
    worker.lifeline.send_block(OWN, OWN_BYTES, fd)
    os.close(fd)
    worker.reply_from(message, OWN, 0)


def _descriptors(worker: HostileTransport, message: Message, _: bytes) -> None:
    """As many blocks as the lifeline takes, none of which the master asks for."""
    with contextlib.suppress(OSError):  # it is full
        for number in range(-1000, 1000):
            worker.hand_over(number=number).close()
    worker.reply_from(message, OWN, 0)


def _no_blocks(worker: HostileTransport, _: Message, data: bytes) -> None:
    """Take no block from now on."""
    with socket.socket(fileno=os.dup(worker.lifeline.fd)) as end:
        end.shutdown(socket.SHUT_RD)
    worker.send_as_is(data)


# Cancellations.


def _deaf(_worker: HostileTransport, _: Message, __: bytes) -> None:
    """Answer nothing; `main` has seen to it that no cancellation is received."""


def _talking(worker: HostileTransport, _: Message, data: bytes) -> None:
    """Send as much as fits where only the master sends."""
    with socket.socket(fileno=os.dup(worker.cancels)) as end, contextlib.suppress(OSError):
        while True:
            end.send(bytes(1000), socket.MSG_DONTWAIT)
    worker.send_as_is(data)


KINDS: dict[str, tuple[type[Message], Act]] = {
    "twice": (Reply, _twice),
    "late": (Reply, _late),
    "garbage": (Reply, _garbage),
    "huge": (Reply, _huge),
    "flood": (Reply, _flood),
    "flood_preparing": (BuildFinish, _flood_preparing),
    "unasked_slab": (BuildFinish, _unasked_slab),
    "no_blocks": (BuildFinish, _no_blocks),
    "big_error": (Reply, _big_error),
    "many_connections": (Reply, _many_connections),
    "forged_block:masters": (Reply, _masters),
    "forged_block:overlap": (Reply, _overlap),
    "changing_block": (Reply, _changing),
    "giant_block": (Reply, _sparse(GIANT_BYTES)),
    "sparse_lie": (Reply, _sparse(SPARSE_BYTES)),
    "open_rank": (Reply, _open_rank),
    "unsealed": (Reply, _unsealed),
    "descriptors": (Reply, _descriptors),
    "deaf": (Reply, _deaf),
    "talking": (Reply, _talking),
    "heir": (Reply, _heir),
}
"""For each kind: the message that is replaced, and what the worker does instead."""


def main() -> int:
    inherited, connect = Cancels.inherited, transport.WorkerTransport
    cancels: list[int] = []

    def take_cancels(fd: int) -> Cancels:
        cancels.append(fd)
        return inherited(fd)

    def join(fd: int) -> HostileTransport:
        return HostileTransport(connect(fd), fd, os.environ[KIND], cancels[0])

    if os.environ[KIND] == "deaf":
        Cancels.wait = lambda _: threading.Event().wait()  # type: ignore[assignment,method-assign,return-value]
    Cancels.inherited = take_cancels  # type: ignore[method-assign] # that is what this program is for
    transport.WorkerTransport = join  # type: ignore[assignment,misc]
    return entry.main()


if __name__ == "__main__":
    sys.exit(main())
