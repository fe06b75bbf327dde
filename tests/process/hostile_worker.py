"""A worker that was taken over: ours, but for what it sends.

As a program it is `mcinfer.worker` whose socket to the master deviates in one way, which the environment
variable MCINFER_HOSTILE names; `become` puts it in the place of the workers that a test's pool starts. All
else (start, build, runs, lifeline) is the real one's, so the master has no way to tell them apart before.
"""

import contextlib
import ctypes
import os
import shlex
import socket
import sys
import threading
import time
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
    encode,
)
from mcinfer.runtime import transport
from mcinfer.runtime.cancels import Cancels
from mcinfer.runtime.transport import WorkerTransport
from mcinfer.shm.block import Block
from mcinfer.shm.descriptors import send as send_packet
from mcinfer.shm.lifeline import _HEADER, Lifeline
from mcinfer.validators import TensorFields
from mcinfer.worker import __main__ as entry

KIND = "MCINFER_HOSTILE"
"""The variable that says what to do."""

FLOOD_MESSAGES = 30_000
GIANT_BYTES = 1 << 40
OVERSIZE_BYTES = protocol.MAX_MESSAGE_BYTES + 4096
OWN_BYTES = 4096
SPARSE_BYTES = 3 << 30
ROWS = 4
"""Of what is said of a block of this worker's own, in float32."""

OWN = -5
"""A block's number that the real worker does not come to."""


def become(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *kinds: str, only_first: bool = True
) -> None:
    """Have the workers that are started from now on be hostile.

    Args:
        tmp_path: For the program that stands for the interpreter.
        monkeypatch: The test's, which ends it.
        kinds: For each process that is started, one of `KINDS`, or none if it is empty: that one is honest.
        only_first: Whether all after these are honest; else all are of the first kind.
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
        f"    kind=$(sed -n {'${n}p' if only_first else '1p'} {listed})\n"
        '    if [ -n "$kind" ]; then\n'
        f'        shift 3; {KIND}=$kind exec {python} -P {here} "$@"\n'
        "    fi\n"
        "fi\n"
        f'exec {python} "$@"\n',
        encoding="utf-8",
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


class HostileDealer(WorkerTransport):
    """The transport of such a worker, around that of a real one.

    Attributes:
        handle: The descriptor that it inherited.
        lifeline: One more hold on this worker's end of it.
        lifeline_socket: Its socket.
        cancels: That of this worker's end for cancellations.
        outputs: Those of the model.
        last: The run that was asked for last.
        kept: What is to be sent later.
        connections: More of them, that it made.
    """

    def __init__(self, real: WorkerTransport, handle: int, kind: str, cancels: int) -> None:
        """Take what a real worker has."""
        self._real = real
        self.fd = real.fd
        self.handle = handle
        lifeline = int(sys.argv[1])
        self.lifeline_socket = socket.socket(fileno=os.dup(lifeline))
        self.lifeline = Lifeline(self.lifeline_socket)
        self.cancels = cancels
        self.outputs: tuple[TensorFields, ...] = ()
        self.last: Predict | None = None
        self.kept: list[bytes] = []
        self.connections: list[socket.socket] = []
        self._moment, self._act = KINDS[kind]

    def wait(self) -> bytes:
        return self._heard(self._real.wait())

    def receive(self) -> bytes | None:
        data = self._real.receive()
        return None if data is None else self._heard(data)

    def close(self) -> None:
        self._real.close()

    def _heard(self, data: bytes) -> bytes:
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

    def say(self, *messages: Message) -> None:
        """Send these messages as they are."""
        for message in messages:
            self._real.send(encode(message))

    def say_bytes(self, data: bytes) -> None:
        """Send these bytes as they are."""
        self._real.send(data)

    def reply(self, message: Message, references: Sequence[Any]) -> None:
        """Answer a run with these references, which no check of the protocol's has seen."""
        assert isinstance(message, Reply)
        head = REPLY_HEAD.pack(REPLY, message.request, message.shard, 0.25)
        self.say_bytes(head + msgpack.packb([*references], unicode_errors="surrogatepass"))

    def own_block(self, number: int = OWN, size: int = OWN_BYTES) -> None:
        """Hand a block of this worker's own over, as a real one does for a result."""
        block = Block.create(number, size)
        memoryview(block.memory(0, OWN_BYTES)).cast("B")[:] = b"\x11" * OWN_BYTES
        self.lifeline.send_block(number, size, block.fd)
        block.close()

    def say_all_lie(
        self, message: Message, block: Any, offset: Any, shape: Sequence[Any] = (ROWS, 4)
    ) -> None:
        """Answer that all outputs lie there."""
        self.reply(
            message, [(name, kind, [*shape], block, offset) for name, kind, _ in self.outputs]
        )


Act = Callable[[HostileDealer, Message, bytes], None]


# Messages.


def _twice(dealer: HostileDealer, _: Message, data: bytes) -> None:
    dealer.say_bytes(data)
    dealer.say_bytes(data)


def _late(dealer: HostileDealer, _: Message, data: bytes) -> None:
    """The first answer comes after the second."""
    dealer.kept.append(data)
    if len(dealer.kept) > 1:
        for kept in reversed(dealer.kept):
            dealer.say_bytes(kept)
        dealer.kept.clear()


def _wrong_shape(dealer: HostileDealer, message: Message, _: bytes) -> None:
    dealer.own_block()
    dealer.say_all_lie(message, OWN, 0, (ROWS - 1, 5))


def _heir(dealer: HostileDealer, _: Message, data: bytes) -> None:
    """End, and leave processes behind that go on to answer as long as anybody listens."""
    heirs = [os.fork() for _ in range(2)]
    if all(heirs):
        os._exit(0)
    for stream in (0, 1, 2):
        os.close(stream)
    with contextlib.suppress(OSError):
        while True:
            os.write(
                dealer.handle, data
            )  # it has the socket itself, where there is one for each worker
    os._exit(0)


def _garbage(dealer: HostileDealer, _: Message, __: bytes) -> None:
    for _index in range(100):
        dealer.say_bytes(os.urandom(300))


def _huge(dealer: HostileDealer, _: Message, __: bytes) -> None:
    dealer.say_bytes(bytes(OVERSIZE_BYTES))


def _flood(dealer: HostileDealer, _: Message, data: bytes) -> None:
    """Answers without end, of which the first alone was asked for."""
    for _index in range(FLOOD_MESSAGES):
        dealer.say_bytes(data)


def _flood_preparing(dealer: HostileDealer, _: Message, data: bytes) -> None:
    """What a worker may say while it builds, but without an end."""
    progress = encode(protocol.Preparing(seconds=0.5, written=1))
    for _index in range(FLOOD_MESSAGES):
        dealer.say_bytes(progress)
    dealer.say_bytes(data)


def _endless_preparing(dealer: HostileDealer, _: Message, __: bytes) -> None:
    """It says that it prepares, and does not get on."""
    while True:
        dealer.say(protocol.Preparing(seconds=0.5, written=1))
        time.sleep(0.05)


def _big_error(dealer: HostileDealer, message: Message, _: bytes) -> None:
    assert isinstance(message, Reply)
    content: dict[str, Any] = {"id": protocol.Error.ID, "kind": "predict", "traceback": ""}
    content |= {"request": message.request, "shard": message.shard, "text": "E" * (15 << 20)}
    dealer.say_bytes(msgpack.packb(content))


def _many_connections(dealer: HostileDealer, _: Message, data: bytes) -> None:
    """As many as there are descriptors; the answer comes only if the master took none of them."""
    taken: list[socket.socket] = []
    with contextlib.suppress(OSError):
        while len(taken) < 2000:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(f"/proc/self/fd/{dealer.handle}")
            taken.append(connection)
    if not taken:
        dealer.say_bytes(data)
    dealer.connections = taken


# Blocks.


def _lie(block: Any, offset: Any, shape: Sequence[Any] = (ROWS, 4)) -> Act:
    """Answer that all outputs lie there; block `OWN` is one that was handed over."""

    def act(dealer: HostileDealer, message: Message, _: bytes) -> None:
        dealer.own_block()
        dealer.say_all_lie(message, block, offset, shape)

    return act


def _masters(dealer: HostileDealer, message: Message, _: bytes) -> None:
    """Answer that all outputs lie where the inputs do."""
    assert dealer.last is not None
    shape, block, offset = dealer.last.inputs[0][2:]
    dealer.say_all_lie(message, block, offset, shape)


def _overlap(dealer: HostileDealer, message: Message, _: bytes) -> None:
    """Answer that the outputs lie one row further than where they were asked for."""
    assert dealer.last is not None
    moved = [
        (name, kind, shape, block, offset + 16)
        for name, kind, shape, block, offset in dealer.last.outputs
    ]
    dealer.reply(message, moved)


def _changing(dealer: HostileDealer, message: Message, _: bytes) -> None:
    """Write to the block, and punch its pages out, while the master reads it."""
    size = 32 << 20
    block = Block.create(OWN, size)
    memory = memoryview(block.memory(0, size)).cast("B")
    dealer.lifeline.send_block(OWN, size, block.fd)

    piece = bytes(range(256)) * 4096
    for at in range(0, size, len(piece)):
        memory[at : at + len(piece)] = piece

    def change() -> None:
        for _index in range(400):
            memory[: len(piece)] = piece
            _punch_hole(block.fd, len(piece))

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    dealer.say_all_lie(message, OWN, 0, (size // 16, 4))


def _punch_hole(fd: int, size: int) -> None:
    """Take the pages of a memfd away; a later read gives zeros (fallocate(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size_and_punch_hole = 0x01 | 0x02
    libc.fallocate(fd, keep_size_and_punch_hole, ctypes.c_long(0), ctypes.c_long(size))


def _giant(dealer: HostileDealer, message: Message, _: bytes) -> None:
    """A block of 1 TB that takes no memory here, all of which is to be the result."""
    dealer.own_block(size=GIANT_BYTES)
    dealer.say_all_lie(message, OWN, 0, (GIANT_BYTES // 16, 4))


def _sparse_lie(dealer: HostileDealer, message: Message, _: bytes) -> None:
    """A block that takes no memory here, and would take 3 GiB there."""
    block = Block.create(OWN, SPARSE_BYTES)
    dealer.lifeline.send_block(OWN, SPARSE_BYTES, block.fd)
    block.close()
    dealer.say_all_lie(message, OWN, 0, (SPARSE_BYTES // 16, 4))


def _hand_over(make: Callable[[], int]) -> Act:
    """Hand a descriptor over that is no block, and answer that the outputs lie in it."""

    def act(dealer: HostileDealer, message: Message, _: bytes) -> None:
        fd = make()
        dealer.lifeline.send_block(OWN, OWN_BYTES, fd)
        os.close(fd)
        dealer.say_all_lie(message, OWN, 0)

    return act


def _unsealed() -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, OWN_BYTES)
    return fd


def _smaller() -> int:
    block = Block.create(OWN, OWN_BYTES // 2)
    return os.dup(block.fd)  # the block closes its own


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def _descriptors(dealer: HostileDealer, message: Message, _: bytes) -> None:
    """Many blocks that nobody asks for, as many as the lifeline takes."""
    block = Block.create(-1000, OWN_BYTES)
    with contextlib.suppress(OSError):  # it is full
        for number in range(2000):
            dealer.lifeline.send_block(-1000 - number, block.size, block.fd)
    block.close()
    dealer.say_all_lie(message, OWN, 0)


def _packed_descriptors(dealer: HostileDealer, message: Message, _: bytes) -> None:
    """More than one descriptor for a block."""
    block = Block.create(OWN, OWN_BYTES)
    send_packet(dealer.lifeline_socket, _HEADER.pack(OWN, block.size), [block.fd] * 4)
    block.close()
    dealer.say_all_lie(message, OWN, 0)


def _cut_lifeline(dealer: HostileDealer, message: Message, _: bytes) -> None:
    """Bytes that are no header, and no block."""
    send_packet(dealer.lifeline_socket, b"?" * 3)
    dealer.say_all_lie(message, OWN, 0)


# Cancellations.


def _deaf(dealer: HostileDealer, _: Message, __: bytes) -> None:
    """Hear no cancellation, and answer nothing."""
    with socket.socket(fileno=os.dup(dealer.cancels)) as end:
        end.shutdown(socket.SHUT_RDWR)


def _talking(dealer: HostileDealer, _: Message, data: bytes) -> None:
    """Say as much as fits where the master only speaks."""
    with socket.socket(fileno=os.dup(dealer.cancels)) as end, contextlib.suppress(OSError):
        while True:
            end.send(bytes(1000), socket.MSG_DONTWAIT)
    dealer.say_bytes(data)


KINDS: dict[str, tuple[type[Message], Act]] = {
    "twice": (Reply, _twice),
    "late": (Reply, _late),
    "wrong_shape": (Reply, _wrong_shape),
    "garbage": (Reply, _garbage),
    "huge": (Reply, _huge),
    "flood": (Reply, _flood),
    "flood_preparing": (BuildFinish, _flood_preparing),
    "endless_preparing": (BuildFinish, _endless_preparing),
    "big_error": (Reply, _big_error),
    "many_connections": (Reply, _many_connections),
    "forged_block:masters": (Reply, _masters),
    "forged_block:overlap": (Reply, _overlap),
    "changing_block": (Reply, _changing),
    "giant_block": (Reply, _giant),
    "sparse_lie": (Reply, _sparse_lie),
    "open_rank": (Reply, _lie(OWN, 0, (4, 2, 2))),
    "unsealed": (Reply, _hand_over(_unsealed)),
    "smaller": (Reply, _hand_over(_smaller)),
    "pipe": (Reply, _hand_over(_pipe)),
    "descriptors": (Reply, _descriptors),
    "packed_descriptors": (Reply, _packed_descriptors),
    "cut_lifeline": (Reply, _cut_lifeline),
    "deaf": (Reply, _deaf),
    "talking": (Reply, _talking),
    "heir": (Reply, _heir),
}
"""What each kind of worker does, and in the place of which message."""


def main() -> int:
    """Be a worker; its exit status."""
    inherited, connect = Cancels.inherited, transport.connect
    cancels: list[int] = []

    def take_cancels(fd: int) -> Cancels:
        cancels.append(fd)
        return inherited(fd)

    def join(kind: str, fd: int) -> HostileDealer:
        return HostileDealer(connect(kind, fd), fd, os.environ[KIND], cancels[0])

    Cancels.inherited = take_cancels  # type: ignore[method-assign] # that is what this program is for
    transport.connect = join
    return entry.main()


if __name__ == "__main__":
    sys.exit(main())
