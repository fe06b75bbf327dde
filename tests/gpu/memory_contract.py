"""What memory of a card does, as functions over two processes: this one, and `tests.gpu.memory_peer`.

The same functions run over the emulated driver (`tests/test_cards_cuda.py`) and over the real one
(`tests/gpu/test_memory.py`), with descriptors and with handles. They leave no memory in use, which their
callers look at.
"""

import ctypes
import gc
import itertools
import json
import mmap
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mcinfer.cards.cuda import Card, DeviceBlock
from mcinfer.config import Device
from mcinfer.errors import CardError, CardMemoryError, ClosedError, InvalidInputError, ProtocolError
from mcinfer.shm.arena import Arena
from mcinfer.shm.lifeline import Lifeline
from tests.open_descriptors import no_descriptor_left

ROOT = Path(__file__).resolve().parents[2]
BLOCK_BYTES = 64 << 20  # so many that it shows in a card's memory
OWN = Device("cuda", 0)
PATIENCE = 30.0

numbers = itertools.count(1)


class Refused(Exception):  # noqa: N818 what the other process raised
    """The type and text of an error in the other process."""


class Processes:
    """This process's card, and the other process, which `restart` replaces.

    Args:
        driver: The module ``cuda.bindings.driver``.
        environment: Variables of the other process, besides this one's.
    """

    def __init__(self, driver: ModuleType, environment: dict[str, str]) -> None:
        self.driver: Any = driver
        self.card = Card.open(OWN)
        self._environment = environment
        self._host = mmap.mmap(-1, 1 << 16)
        self.host = ctypes.addressof(ctypes.c_char.from_buffer(self._host))
        self.card.register(self.host, len(self._host))
        self._start()
        self._used = self._used_bytes()

    def _start(self) -> None:
        self.lifeline, theirs = Lifeline.pair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/gpu/memory_peer.py"), str(theirs.fileno())],
                env={**os.environ, **self._environment},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.lifeline.close()

    def restart(self) -> None:
        self.kill()
        self._start()

    def close(self) -> None:
        self.kill()
        self.card.unregister(self.host)

    def __call__(self, name: str, *arguments: object) -> Any:
        """Have the other process call a function; raise `Refused` if that raises."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        done, value = json.loads(self.process.stdout.readline())
        if not done:
            raise Refused(value)
        return value

    # Memory.

    def create(self, data: bytes = b"", size: int = BLOCK_BYTES) -> DeviceBlock:
        """A block of this process with this data at its start."""
        block = self.card.create(next(numbers), size)
        self.write(block.address, data)
        self.card.record(block)
        return block

    def give(self, block: DeviceBlock, on: str = "cuda:0") -> None:
        self.lifeline.send_block(block.number, block.size, block.fd, block.token)
        self("attach", block.number, str(block.device), on)

    def close_both(self, block: DeviceBlock) -> None:
        self("close", block.number)
        block.close()

    def read_there(self, block: DeviceBlock, offset: int, size: int) -> bytes:
        return bytes.fromhex(self("read", block.number, offset, size))

    def write(self, address: int, data: bytes) -> None:
        self.queue_write(address, data)
        self.card.synchronize()

    def queue_write(self, address: int, data: bytes) -> None:
        ctypes.memmove(self.host, data, len(data))
        self.card.copy(address, self.host, len(data))

    def read(self, address: int, size: int) -> bytes:
        self.card.copy(self.host, address, size)
        self.card.synchronize()
        return ctypes.string_at(self.host, size)

    def blocks_in_use(self) -> int:
        """Blocks of `BLOCK_BYTES` on the card since the start, to the nearest number."""
        gc.collect()
        self.card.reclaim()
        return round((self._used_bytes() - self._used) / BLOCK_BYTES)

    def _used_bytes(self) -> int:
        free, total = self.card.memory()
        return total - free

    # The driver itself.

    def ask(self, name: str, *arguments: object) -> Any:
        status, *values = getattr(self.driver, name)(*arguments)
        assert status == self.driver.CUresult.CUDA_SUCCESS
        return values[0] if values else None

    @contextmanager
    def context(self) -> Iterator[None]:
        self.ask("cuCtxPushCurrent", self.ask("cuDevicePrimaryCtxRetain", 0))
        yield
        self.ask("cuCtxPopCurrent")

    @contextmanager
    def held(self, stream: int) -> Iterator[Callable[[], None]]:
        """Slow work on a stream, which goes on until the function that is given is called."""
        go_on = threading.Event()
        called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: go_on.wait(PATIENCE) and None)
        address = ctypes.cast(called, ctypes.c_void_p).value
        with self.context():
            self.ask("cuLaunchHostFunc", stream, self.driver.CUhostFn(address), 0)
        try:
            yield go_on.set
        finally:
            go_on.set()
            with self.context():
                self.ask("cuStreamSynchronize", stream)


def what_one_process_writes_the_other_reads(both: Processes) -> None:
    block = both.create(b"from the owner")
    both.give(block)
    assert both.read_there(block, 0, 14) == b"from the owner"
    assert both.read_there(block, 9, 5) == b"owner"
    both("write", block.number, BLOCK_BYTES - 5, b"there".hex())
    assert both.read(block.address + BLOCK_BYTES - 5, 5) == b"there"
    assert (block.device, block.size) == (OWN, BLOCK_BYTES)
    assert not os.get_inheritable(block.fd)
    both.close_both(block)


def slots_of_an_arena_are_read_at_their_offsets(both: Processes) -> None:
    arena = Arena(BLOCK_BYTES, create=both.card.create, numbers=numbers, alignment=256)
    slots = arena.allocate_all([100, 0, 1000])
    assert [slot.offset for slot in slots] == [0, 256, 512]
    block = arena.block(slots[0].block)
    assert isinstance(block, DeviceBlock)
    both.give(block)
    for slot in slots:
        assert (slot.memory.address, slot.memory.size) == (slot.address, slot.size)
        assert slot.address == block.address + slot.offset
        text = f"slot {slot.address}".encode()
        both.write(slot.address, text)
        assert both.read_there(block, slot.offset, len(text)) == text
    assert both.blocks_in_use() == 1
    del slots, slot
    assert arena.allocate(100).offset == 0  # free again, without a call
    both("close", block.number)
    arena.close()
    del block


def memory_stays_until_neither_process_maps_it(both: Processes) -> None:
    first, second = both.create(b"first"), both.create(b"second")
    for block in (first, second):
        both.give(block)
        block.close()
    assert both.blocks_in_use() == 2
    assert both.read_there(first, 0, 5) == b"first"
    both("close", second.number)
    assert both.blocks_in_use() == 1
    assert both.read_there(first, 0, 5) == b"first"
    both("close", first.number)
    assert both.blocks_in_use() == 0


def holders_of_memory_keep_the_mapping_of_a_closed_block(both: Processes) -> None:
    block = both.create(b"kept")
    memory = block.memory(1, 3)
    ended = weakref.ref(memory)
    block.close()
    assert both.blocks_in_use() == 1
    assert both.read(memory.address, 3) == b"ept"
    del memory
    assert ended() is None
    assert both.blocks_in_use() == 0


def closed_block_gives_no_memory(both: Processes) -> None:
    block = both.create()
    for offset, size in ((-1, 1), (0, BLOCK_BYTES + 1), (BLOCK_BYTES, 1), (5, -1)):
        with pytest.raises(InvalidInputError, match="got bytes"):
            block.memory(offset, size)
    block.close()
    block.close()
    assert block.fd == -1
    for call in (both.card.record, both.card.wait, lambda closed: closed.memory(0, 1)):
        with pytest.raises(ClosedError, match=f"block {block.number} of cuda:0 is closed"):
            call(block)


def importer_that_is_killed_holds_no_memory(both: Processes) -> None:
    block = both.create(b"still there")
    both.give(block)
    both("write", block.number, 0, b"STILL".hex())
    both.kill()
    assert both.read(block.address, 11) == b"STILL there"
    block.close()
    both._start()


def memory_of_an_owner_that_is_killed_is_free_once_it_is_closed(both: Processes) -> None:
    number = next(numbers)
    both("create", number, BLOCK_BYTES, b"orphan".hex())
    size, fd, token = both.lifeline.receive_block(number, PATIENCE)
    block = both.card.attach(number, size, fd, token, OWN)
    both.card.wait(block)
    assert both.read(block.address, 6) == b"orphan"
    both.kill()
    if both.card.kind == "descriptors":  # of handles' memory the driver says nothing
        assert both.read(block.address, 6) == b"orphan"
        assert both.blocks_in_use() == 1
    block.close()
    both._start()


def descriptor_alone_keeps_memory_for_processes_that_start_later(both: Processes) -> None:
    """As in a master that has no context on the card: it holds what a worker handed over."""
    number = next(numbers)
    both("create", number, BLOCK_BYTES, b"handed on".hex())
    size, fd, token = both.lifeline.receive_block(number, PATIENCE)
    both("close", number)
    assert both.blocks_in_use() == 1
    block = both.card.attach(number, size, os.dup(fd), token, OWN)
    assert both.read(block.address, 9) == b"handed on"
    block.close()
    os.close(fd)
    both("memory")
    both("create", next(numbers), 1, "")  # the owner looks for importers that are gone
    assert both.blocks_in_use() == 0
    both.restart()


def work_waits_for_the_event_of_another_process(both: Processes) -> None:
    block = both.create(b"old")
    both.give(block)
    with both.held(both.card.stream) as go_on:
        both.queue_write(block.address, b"new")
        both.card.record(block)
        assert both.read_there(block, 0, 3) == b"old"  # nothing waits unless it is asked to
        both("queue_read_after_event", block.number, 0, 3)
        go_on()
        assert both("result", block.number, 3) == b"new".hex()
    with both.held(both.card.stream):
        both("queue_read_after_event", block.number, 0, 3)  # work that came after the mark
        assert both("result", block.number, 3) == b"new".hex()
    both.close_both(block)


def stream_follows_another_stream(both: Processes) -> None:
    block = both.create(b"old")
    with both.context():
        stream = int(both.ask("cuStreamCreate", 1))
    with both.held(stream) as go_on:
        ctypes.memmove(both.host + 64, b"new", 3)
        with both.context():
            both.ask("cuMemcpyAsync", block.address, both.host + 64, 3, stream)
        assert both.read(block.address, 3) == b"old"
        both.card.follow(stream)
        both.card.copy(both.host, block.address, 3)
        go_on()
        both.card.synchronize()
        assert ctypes.string_at(both.host, 3) == b"new"
    both.card.follow(0)
    both.card.synchronize()
    block.close()


def wait_for_the_stream_has_an_end(both: Processes) -> None:
    block = both.create(b"old")
    with both.held(both.card.stream) as go_on:
        both.queue_write(block.address, b"new")
        with pytest.raises(TimeoutError, match=r"cuda:0: the work queued .* longer than 0.01 s"):
            both.card.synchronize(0.01)
        go_on()
        both.card.synchronize(PATIENCE)
    assert both.read(block.address, 3) == b"new"
    block.close()


def work_that_is_queued_is_done_before_its_memory_goes(both: Processes) -> None:
    block = both.create(b"until the end")
    with both.held(both.card.stream) as go_on:
        both.card.copy(both.host, block.address, 13)
        threading.Timer(0.05, go_on).start()
        block.close()
        both.card.synchronize()
    assert ctypes.string_at(both.host, 13) == b"until the end"
    assert both.blocks_in_use() == 0


def card_without_room_says_what_was_asked_and_is_free(both: Processes) -> None:
    total = both.card.memory()[1]
    with no_descriptor_left():
        with pytest.raises(CardMemoryError) as raised:
            both.card.create(next(numbers), 2 * total)
        assert isinstance(raised.value, MemoryError)
        assert f"{2 * total} bytes wanted" in str(raised.value)
        assert f"of {total} are free" in str(raised.value)
    with pytest.raises(InvalidInputError, match="size: got 0"):
        both.card.create(next(numbers), 0)
    block = both.create(b"goes on")
    assert both.read(block.address, 7) == b"goes on"
    block.close()


def what_is_no_token_of_the_block_is_refused(both: Processes) -> None:
    block = both.create()
    token = block.token
    wrong = [
        (b"", "0 bytes that are no token"),
        (token[:-1], "no token"),
        (token + b"x", "no token"),
        (b"x" + token[1:], "no token"),
        (token[:4] + bytes(len(token) - 4), "no token"),
        (token[:32] + bytes(16) + token[48:], "token of another card than cuda:0"),
    ]
    with no_descriptor_left():
        for other, text in wrong:
            with pytest.raises(ProtocolError, match=text):
                both.card.attach(1, block.size, os.dup(block.fd), other, OWN)
        with pytest.raises(ProtocolError, match=f"of {block.size} bytes, expected 64"):
            both.card.attach(1, 64, os.dup(block.fd), token, OWN)
        with pytest.raises(CardError, match="does not reach"):
            both.card.attach(1, block.size, os.dup(block.fd), token, Device("cuda", 99))
    block.close()


def any_thread_uses_the_card_and_keeps_its_own_context(both: Processes) -> None:
    block = both.create(b"main")
    found: list[object] = []

    def use() -> None:
        found.append(int(both.ask("cuCtxGetCurrent")))
        found.append(both.read(block.address, 4))
        found.append(int(both.ask("cuCtxGetCurrent")))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(PATIENCE)
    assert found == [0, b"main", 0]
    block.close()


def forked_process_cannot_use_the_card(both: Processes) -> None:
    block = both.create(b"parent")
    with warnings.catch_warnings(action="ignore"):  # a process of several threads is forked
        child = os.fork()
    if not child:
        try:
            calls = (
                lambda: both.card.memory(),
                lambda: both.card.copy(block.address, both.host, 1),
                lambda: both.card.record(block),
                lambda: Card.open(OWN),
                lambda: both.card.create(1, 1),
            )
            status = 0
            for call in calls:
                try:
                    call()
                    status = 1
                except ClosedError as exc:
                    status |= 0 if "which was forked from" in str(exc) else 2
            block.close()  # its own copy of the descriptor
            os._exit(status)
        finally:
            os._exit(9)
    assert os.waitpid(child, 0)[1] == 0
    assert both.read(block.address, 6) == b"parent"
    block.close()


def host_memory_is_pinned_once_and_never_by_force(both: Processes) -> None:
    pages = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    both.card.unregister(address)
    assert both.card.register(address, mmap.PAGESIZE)
    assert not both.card.register(address, mmap.PAGESIZE)
    both.card.unregister(address)
    assert both.card.register(address, mmap.PAGESIZE)
    both.card.unregister(address)


def host_reads_memory_where_its_address_says(both: Processes) -> None:
    block = both.create(b"seen")
    address = both.card.host_address(block.address)
    if address is not None:
        assert ctypes.string_at(address, 4) == b"seen"
    assert both.card.host_address(ctypes.addressof(ctypes.c_int())) is None
    block.close()


CONTRACT: list[Callable[[Processes], None]] = [
    check
    for check in [*globals().values()]
    if isfunction(check) and check.__module__ == __name__
    if check.__name__ != "__annotate__"  # the module's own, from Python 3.14 on
]


def memory_of_another_card_is_opened_in_place(both: Processes) -> None:
    """For two cards that are peers."""
    block = both.create(b"on the first")
    both.give(block, on="cuda:1")
    assert both.read_there(block, 7, 5) == b"first"
    both("write", block.number, 7, b"other".hex())
    assert both.read(block.address, 12) == b"on the other"
    with both.held(both.card.stream) as go_on:
        both.queue_write(block.address, b"in")
        both.card.record(block)
        both("queue_read_after_event", block.number, 0, 2)
        go_on()
        assert both("result", block.number, 2) == b"in".hex()
    both.close_both(block)
