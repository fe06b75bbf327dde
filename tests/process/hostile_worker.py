"""A worker that breaks the protocol: the real one, but for what it sends.

As a program it is `mcinfer.worker` whose socket to the master deviates in one way, which the environment
variable MCINFER_HOSTILE names. `become` puts it in the place of the workers that a test's pool starts.
Start, build, runs and lifeline are those of the real worker, so the master sees no difference before.
"""

import dataclasses
import os
import shlex
import socket
import sys
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
from mcinfer.runtime.transport import WorkerTransport
from mcinfer.shm.block import Block
from mcinfer.shm.lifeline import Lifeline
from mcinfer.worker import __main__ as entry
from mcinfer.worker import server as _server  # noqa: F401 which makes a class of the real transport

KIND = "MCINFER_HOSTILE"
GIANT_BYTES = 1 << 40
OWN_BYTES = 4096
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
        lifeline: One more hold on the worker's end of the lifeline.
        outputs: Of the model.
        last: The last PREDICT.
        kept: Messages to send later.
    """

    def __init__(self, real: WorkerTransport, kind: str) -> None:
        self._real = real
        self.fd = real.fd
        self.lifeline = Lifeline(socket.socket(fileno=os.dup(int(sys.argv[1]))))
        self.outputs: tuple[TensorFields, ...] = ()
        self.last: Predict | None = None
        self.kept: list[bytes] = []
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

    def hand_over(self, size: int = OWN_BYTES) -> Block:
        """Hand over a block of this worker's own, as a real one does for a result."""
        block = Block.create(OWN, size)
        memoryview(block.memory(0, OWN_BYTES)).cast("B")[:] = b"\x11" * OWN_BYTES
        self.lifeline.send_block(OWN, size, block.fd)
        return block


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


def _garbage(worker: HostileTransport, _: Message, __: bytes) -> None:
    for _index in range(100):
        worker.send_as_is(os.urandom(300))


def _unasked_slab(worker: HostileTransport, message: Message, _: bytes) -> None:
    """Weights for the other workers of a card, though it has neither a card nor others."""
    assert isinstance(message, BuildFinish)
    block = worker.hand_over()
    slab = (block.number, block.size)
    worker.send_as_is(encode(dataclasses.replace(message, slab=slab)))


# Blocks.


def _giant(worker: HostileTransport, message: Message, _: bytes) -> None:
    """Answer with a block of a terabyte, which takes no memory, all of which is the result."""
    assert isinstance(message, Reply)
    worker.hand_over(GIANT_BYTES).close()
    shape = [GIANT_BYTES // 16, 4]
    worker.reply(message, [(name, kind, shape, OWN, 0) for name, kind, _ in worker.outputs])


def _overlap(worker: HostileTransport, message: Message, _: bytes) -> None:
    """Answer that the outputs lie one row further than where they were asked for."""
    assert worker.last is not None
    moved = [
        (name, kind, shape, block, offset + 16)
        for name, kind, shape, block, offset in worker.last.outputs
    ]
    worker.reply(message, moved)


def _no_blocks(worker: HostileTransport, _: Message, data: bytes) -> None:
    """Take no block from now on."""
    with socket.socket(fileno=os.dup(worker.lifeline.fd)) as end:
        end.shutdown(socket.SHUT_RD)
    worker.send_as_is(data)


KINDS: dict[str, tuple[type[Message], Act]] = {
    "twice": (Reply, _twice),
    "late": (Reply, _late),
    "garbage": (Reply, _garbage),
    "wrong place": (Reply, _overlap),
    "giant block": (Reply, _giant),
    "unasked slab": (BuildFinish, _unasked_slab),
    "no blocks": (BuildFinish, _no_blocks),
}
"""For each kind: the message that is replaced, and what the worker does instead."""


def main() -> int:
    connect = transport.WorkerTransport

    def join(fd: int) -> HostileTransport:
        return HostileTransport(connect(fd), os.environ[KIND])

    transport.WorkerTransport = join  # type: ignore[assignment,misc]
    return entry.main()


if __name__ == "__main__":
    sys.exit(main())
