"""The other process of `tests.gpu.memory_contract`: it does what each line of its input says.

A line is the JSON of a function's name and its arguments; the answer is that of its value, or of an error's
type and text. Blocks come and go over the lifeline, whose descriptor is the program's argument.
"""

import ctypes
import json
import mmap
import os
import sys
from typing import Any

from mcinfer.cards.cuda import Card, DeviceBlock
from mcinfer.config import Device
from mcinfer.errors import McinferError
from mcinfer.shm.lifeline import Lifeline

PATIENCE = 30.0


class Peer:
    def __init__(self, fd: int) -> None:
        self.lifeline = Lifeline.inherited(fd)
        self.blocks: dict[int, tuple[Card, DeviceBlock]] = {}
        self.card = Card.open(Device("cuda", 0))
        self._pages = mmap.mmap(-1, 1 << 16)
        self.buffer = ctypes.c_char.from_buffer(self._pages)
        self.address = ctypes.addressof(self.buffer)
        self.card.register(self.address, len(self._pages))  # so that copies to it do not wait

    def create(self, number: int, size: int, data: str) -> None:
        """Make a block with this data at its start, and hand it over."""
        block = self.card.create(number, size)
        self.blocks[number] = self.card, block
        self.write(number, 0, data)
        self.card.record(block)
        self.lifeline.send_block(number, size, block.fd, block.token)

    def attach(self, number: int, owner: str, on: str) -> None:
        size, fd, token = self.lifeline.receive_block(number, PATIENCE)
        card = Card.open(Device.parse(on))
        self.blocks[number] = card, card.attach(number, size, fd, token, Device.parse(owner))

    def close(self, number: int) -> None:
        self.blocks.pop(number)[1].close()

    def write(self, number: int, offset: int, data: str) -> None:
        card, block = self.blocks[number]
        ctypes.memmove(self.address, bytes.fromhex(data), len(data) // 2)
        card.copy(block.address + offset, self.address, len(data) // 2)
        card.synchronize()

    def read(self, number: int, offset: int, size: int) -> str:
        self.queue_read(number, offset, size)
        return self.result(number, size)

    def queue_read(self, number: int, offset: int, size: int, *, wait: bool = False) -> None:
        card, block = self.blocks[number]
        if wait:
            card.wait(block)
        card.copy(self.address, block.address + offset, size)

    def queue_read_after_event(self, number: int, offset: int, size: int) -> None:
        self.queue_read(number, offset, size, wait=True)

    def result(self, number: int, size: int) -> str:
        """The bytes that were queued last, once they have come."""
        self.blocks[number][0].synchronize()
        return ctypes.string_at(self.address, size).hex()

    def lose(self) -> None:
        """Read memory that the card does not have any more."""
        block = self.card.create(-1, 1)
        address = block.address
        block.close()
        self.card.copy(self.address, address, 1)
        self.card.synchronize()

    def memory(self) -> tuple[int, int]:
        return self.card.memory()

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def kind(self) -> str:
        return self.card.kind


def main() -> None:
    peer: Any = Peer(int(sys.argv[1]))
    print(json.dumps([True, None]), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = [True, getattr(peer, name)(*arguments)]
        except McinferError as exc:
            answer = [False, f"{type(exc).__name__}: {exc}"]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
