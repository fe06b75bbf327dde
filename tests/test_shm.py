"""Tests of mcinfer/shm: blocks, the arena, and the lifeline that hands blocks over."""

import contextlib
import ctypes
import errno
import fcntl
import gc
import itertools
import os
import queue
import random
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from mcinfer.config import Device
from mcinfer.errors import ClosedError, InvalidInputError, ProtocolError, QueueFullError
from mcinfer.shm.arena import ALIGNMENT, Arena, AttachedBlocks, OfferedBlock, Slot, align
from mcinfer.shm.block import Block
from mcinfer.shm.descriptors import close_all
from mcinfer.shm.lifeline import Lifeline
from tests.open_descriptors import no_descriptor_left

MIB = 1 << 20
PATIENCE = 20.0
"""Seconds that something may take that takes none; a test that waits for it has failed."""

Bytes = NDArray[np.uint8]


def as_bytes(memory: "ctypes.Array[ctypes.c_char]") -> Bytes:
    return np.ndarray((len(memory),), np.uint8, memoryview(memory))


def view(slot: Slot) -> Bytes:
    return as_bytes(slot.memory)


# Blocks.


def test_block_cannot_be_shrunk_or_grown_by_anyone() -> None:
    block = Block.create(0, 4095)
    for size in (0, 4096, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(block.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(block.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    block.close()


def memfd(size: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("make", "size"),
    [
        pytest.param(partial(memfd, 4096, fcntl.F_SEAL_GROW), 4096, id="may shrink"),
        pytest.param(partial(memfd, 4095), 4096, id="too small"),
        pytest.param(partial(memfd, 4097), 4096, id="too large"),
        pytest.param(
            partial(memfd, 4096, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE), 4096, id="read-only"
        ),
        pytest.param(partial(os.open, __file__, os.O_RDONLY), 4096, id="no memfd"),
        *(pytest.param(partial(memfd, 0), size, id=str(size)) for size in (0, -1, 2**64 - 1)),
    ],
)
def test_descriptor_of_no_block_is_refused_and_closed(make: Callable[[], int], size: int) -> None:
    with no_descriptor_left(), pytest.raises(ProtocolError, match="block 5"):
        Block.attach(5, size, make())


def test_places_outside_of_a_block_are_refused() -> None:
    block = Block.create(0, 100)
    for offset, size in [(0, 101), (101, 0), (100, 1), (-1, 1), (2**60, 1)]:
        with pytest.raises(ValueError, match=r"[Bb]uffer|offset"):
            block.memory(offset, size)
    block.close()


# The other side of an arena.


def offered(number: int, fd: int, size: int = 4096, device: Device | None = None) -> OfferedBlock:
    return OfferedBlock(number=number, size=size, fd=fd, device=device)


def test_block_of_the_host_is_mapped_until_it_is_dropped() -> None:
    with no_descriptor_left():
        theirs, blocks = Block.create(3, 4096), AttachedBlocks()
        blocks.add(offered(3, os.dup(theirs.fd)))
        ours = blocks.find(3)
        assert ours is not None
        as_bytes(ours.memory(0, 4096))[:] = 7
        assert as_bytes(theirs.memory(0, 4096)).tolist() == [7] * 4096
        assert 3 in blocks
        assert [*blocks] == [3]
        blocks.drop(3)
        assert blocks.find(3) is None
        assert 3 not in blocks
        blocks.drop(3)  # there is none
        theirs.close()
        del ours, theirs  # and their mappings


def test_block_that_cannot_be_mapped_leaves_no_descriptor_and_no_number() -> None:
    blocks = AttachedBlocks()
    with no_descriptor_left(), pytest.raises(ProtocolError, match="block 5"):
        blocks.add(offered(5, memfd(4096, 0)))
    assert 5 not in blocks


def test_block_of_a_card_is_kept_closed_until_it_is_taken_dropped_or_left() -> None:
    card = Device("cuda", 0)
    with no_descriptor_left():
        blocks = AttachedBlocks()
        for number in (1, 2, 3):
            blocks.add(offered(number, os.open(os.devnull, os.O_RDONLY), device=card))
            assert number in blocks
            assert blocks.find(number) is None
        taken = blocks.take(1)
        with pytest.raises(ProtocolError, match=r"block 1 .* was not attached"):
            blocks.take(1)
        os.close(taken.fd)
        blocks.drop(2)
        assert [*blocks] == [3]
        blocks.close()
        assert [*blocks] == []


# The arena, as a state machine: whatever is held and dropped in whatever order.

LIMIT = 160 * MIB  # two blocks of 64 MiB and one of the rest; untouched pages take no memory

SIZES = st.one_of(
    st.sampled_from([0, 1, 63, 64, 65, LIMIT // 2, LIMIT - 1, LIMIT, LIMIT + 1]),
    st.integers(0, 500),
    st.integers(0, 5 * MIB),
    st.integers(0, 80 * MIB),
)


@dataclass
class Held:
    """A slot that is owned, by what the test holds of it."""

    block: int
    offset: int
    size: int
    stamp: int
    holders: list[Bytes] = field(default_factory=list)

    @property
    def space(self) -> int:
        return max(align(self.size), ALIGNMENT)


def marks(size: int) -> "slice[int, int, int]":
    """Some bytes of every slot: all of a small one, first and last and a few of a large one."""
    return slice(0, size, max(1, (size - 1) // 3))


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[int] = []
        self.arena = Arena(LIMIT, dropped=self.dropped.append)
        self.held: dict[int, Held] = {}

    @property
    def used(self) -> int:
        return sum(held.space for held in self.held.values())

    @rule(
        sizes=st.one_of(
            st.lists(SIZES, min_size=1, max_size=1),
            st.lists(SIZES, max_size=4),
            st.lists(st.integers(0, 500), max_size=8),
        ),
        stamp=st.integers(0, 255),
    )
    def allocate(self, sizes: list[int], stamp: int) -> None:
        before = self.arena.used
        try:
            slots = self.arena.allocate_all(sizes)
        except InvalidInputError:
            assert sum(max(align(size), ALIGNMENT) for size in sizes) > LIMIT
        except QueueFullError:
            assert self.held  # an empty arena takes everything within the limit
            assert self.arena.used == before
        else:
            assert [slot.size for slot in slots] == sizes
            for slot in slots:
                self.keep(slot, stamp)

    def keep(self, slot: Slot, stamp: int) -> None:
        array = view(slot)
        array[marks(slot.size)] = stamp
        held = Held(slot.block, slot.offset, slot.size, stamp, [array])
        self.held[slot.address] = held
        assert slot.offset % ALIGNMENT == 0
        assert slot.address % ALIGNMENT == 0
        block = self.arena.block(slot.block)
        assert block is not None
        assert slot.address == block.address + slot.offset
        assert slot.offset + held.space <= block.size
        assert self.arena.find(slot.address, slot.size) == (slot.block, slot.offset)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def view_a_view(self, data: st.DataObject) -> None:
        held = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        # By number: hypothesis keeps what it samples from. And no array in hand while it draws: a draw
        # that ends the example by an exception keeps this frame until after the teardown.
        number = data.draw(st.integers(0, len(held.holders) - 1))
        kind = data.draw(st.sampled_from(["slice", "reverse", "bytes", "another library"]))
        length = data.draw(st.integers(0, held.size))
        array = held.holders[number]
        match kind:
            case "slice":
                array = array[:length]
            case "reverse":
                array = array[::-1]
            case "bytes":
                array = array.view(np.int8).view(np.uint8)
            case _:
                array = np.from_dlpack(array).view(np.uint8)
        held.holders.append(array)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop_a_view(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[place]
        del held.holders[data.draw(st.integers(0, len(held.holders) - 1))]
        if not held.holders:
            del self.held[place]

    @rule()
    def reclaim(self) -> None:
        self.arena.reclaim()

    @rule(most=st.integers(0, LIMIT))
    def trim(self, most: int) -> None:
        self.arena.trim(most)
        in_use = {held.block for held in self.held.values()}
        blocks = [number for number in range(1000) if self.arena.block(number) is not None]
        assert self.arena.size <= most or {*blocks} <= in_use

    @invariant()
    def slots_never_overlap(self) -> None:
        places = sorted((h.block, h.offset, h.offset + h.space) for h in self.held.values())
        for (block, _, end), (other, start, _) in itertools.pairwise(places):
            assert block != other or end <= start

    @invariant()
    def what_was_written_is_still_there(self) -> None:
        for held in self.held.values():
            block = self.arena.block(held.block)
            assert block is not None
            memory = as_bytes(block.memory(held.offset, held.size))
            assert (memory[marks(held.size)] == held.stamp).all()

    @invariant()
    def used_is_what_is_held_and_size_is_within_the_limit(self) -> None:
        assert self.arena.used == self.used
        assert self.used <= self.arena.size <= LIMIT
        assert self.arena.crowded == (self.used > LIMIT // 2)

    @invariant()
    def dropped_blocks_are_gone_and_nobody_held_them(self) -> None:
        assert len(set(self.dropped)) == len(self.dropped)
        assert all(self.arena.block(number) is None for number in self.dropped)
        assert not {held.block for held in self.held.values()} & set(self.dropped)

    def teardown(self) -> None:
        for held in self.held.values():
            held.holders.clear()
        try:
            self.all_is_free_again()
        finally:
            self.arena.close()

    def all_is_free_again(self) -> None:
        assert self.arena.used == 0
        # Each block is one piece again: slots as large as the blocks fit, without a new block.
        blocks = [self.arena.block(number) for number in range(1000)]
        sizes = sorted((block.size for block in blocks if block is not None), reverse=True)
        dropped = len(self.dropped)
        slots = [self.arena.allocate(size) for size in sizes]
        assert [slot.offset for slot in slots] == [0] * len(sizes)
        assert self.arena.used == self.arena.size == sum(sizes)
        assert len(self.dropped) == dropped


def test_arena_keeps_its_promises_whatever_is_held_and_dropped() -> None:
    with no_descriptor_left():
        run_state_machine_as_test(
            ArenaMachine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
        )


# The arena: single promises.


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(MIB)
    yield arena
    arena.close()


def test_wholly_free_blocks_make_room_for_a_larger_one_if_that_is_enough() -> None:
    dropped: list[int] = []
    arena = Arena(128 * MIB, dropped=dropped.append)
    slots = arena.allocate_all([60 * MIB]) + arena.allocate_all([60 * MIB])
    first, second = (slot.block for slot in slots)
    assert first != second
    del slots[0]
    with pytest.raises(QueueFullError):
        arena.allocate(100 * MIB)
    assert dropped == []
    assert arena.block(first) is not None
    slots.clear()
    large = arena.allocate(100 * MIB)
    assert sorted(dropped) == sorted([first, second])
    assert large.block not in dropped
    assert arena.block(first) is None
    assert 100 * MIB <= arena.size <= 128 * MIB
    arena.close()


def test_find_knows_only_memory_that_lies_wholly_in_the_arena(arena: Arena) -> None:
    slot = arena.allocate(4096)
    block = arena.block(slot.block)
    assert block is not None
    assert arena.find(slot.address + 100, 10) == (slot.block, slot.offset + 100)
    assert arena.find(block.address, block.size) == (slot.block, 0)
    assert arena.find(block.address, block.size + 1) is None
    assert arena.find(block.address - 1, 2) is None
    assert arena.find(np.zeros(10).ctypes.data, 80) is None


def test_views_dropped_by_many_threads_all_come_back() -> None:
    """One thread allocates, as the loop does; others drop what it gave, whenever they like."""
    arena = Arena(64 * MIB)
    failures: list[str] = []
    given: queue.SimpleQueue[tuple[int, Bytes] | None] = queue.SimpleQueue()

    def work(seed: int) -> None:
        generator = random.Random(seed)  # noqa: S311 the same in every run is what is wanted
        held: list[tuple[int, Bytes]] = []
        while (item := given.get()) is not None:
            held.append(item)
            del item
            if len(held) > 10:
                stamp, array = held.pop(generator.randrange(len(held)))
                if (array != stamp).any():
                    failures.append(f"{stamp} was written over")
                del array

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1200):
        array = view(arena.allocate(number * 7919 % 20_000))
        array[:] = number % 256
        given.put((number % 256, array[::2]))
        del array
    for _ in threads:
        given.put(None)
    for thread in threads:
        thread.join()
    assert failures == []
    assert arena.used == 0
    arena.close()


def test_closed_arena_refuses_and_views_outlive_it() -> None:
    with no_descriptor_left():
        arena = Arena(MIB)
        array = view(arena.allocate(1000))
        array[:] = 5
        arena.close()
        with pytest.raises(ClosedError):
            arena.allocate(1)
        assert (arena.size, arena.used) == (0, 0)
        rest = array[900:]
        del array
        gc.collect()
        rest += 1
        assert rest.sum() == 600
        del rest
        arena.close()


def test_arena_that_finds_no_memory_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(200 * MIB)
    held = arena.allocate(60 * MIB)

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            arena.allocate_all([MIB, 100 * MIB])
    assert arena.used == held.size
    assert arena.allocate(100 * MIB).size == 100 * MIB
    arena.close()


# The lifeline.


@pytest.fixture
def lifelines() -> Iterator[tuple[Lifeline, Lifeline]]:
    """The master's end and the worker's."""
    with no_descriptor_left():
        master, theirs = Lifeline.pair()
        worker = Lifeline.inherited(theirs.detach())
        yield master, worker
        master.close()
        worker.close()


Ends = tuple[Lifeline, Lifeline]


TOKEN = bytes(range(256)) * 2


def send_blocks(lifeline: Lifeline, *numbers: int) -> None:
    for number in numbers:
        block = Block.create(number, 64 + abs(number))
        lifeline.send_block(number, block.size, block.fd, *([TOKEN] if number == 3 else []))
        os.fstat(block.fd)  # the sender keeps its own
        block.close()


@pytest.mark.parametrize("from_master", [True, False])
def test_blocks_pass_both_ways_in_order(lifelines: Ends, from_master: bool) -> None:
    sender, receiver = lifelines if from_master else lifelines[::-1]
    send_blocks(sender, 0, 3, -4, 1)  # the fixture sees whether the descriptor of 1 is left
    for number in (0, 3, -4):
        size, fd, token = receiver.receive_block(number)
        assert token == (TOKEN if number == 3 else b"")
        assert size == os.fstat(fd).st_size == 64 + abs(number)
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_block_that_is_late_is_waited_for_and_one_never_sent_is_an_error(lifelines: Ends) -> None:
    master, worker = lifelines
    sender = threading.Timer(0.05, send_blocks, (master, 3))
    sender.start()
    os.close(worker.receive_block(3, timeout=PATIENCE)[1])
    sender.join()
    with pytest.raises(ProtocolError, match="descriptor of block 1 did not come"):
        worker.receive_block(1, timeout=0.01)
    master.close()
    with pytest.raises(ProtocolError, match="got 0 bytes"):
        worker.receive_block(1, timeout=PATIENCE)


def test_block_without_a_free_descriptor_is_an_os_error(lifelines: Ends) -> None:
    master, worker = lifelines
    block = Block.create(0, 100)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with no_descriptor_left():
        master.send_block(1, 100, block.fd)
        master.send_block(2, 100, block.fd)
        highest = max(int(entry) for entry in os.listdir("/proc/self/fd"))
        taken: list[int] = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(block.fd))
            with pytest.raises(OSError, match="Too many open files"):
                worker.receive_block(1)
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(worker.receive_block(2)[1])
    block.close()


HEADER = (1).to_bytes(8, "little") + (64).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("data", "count"),
    [(HEADER + bytes(513), 1), (HEADER, 0), (HEADER, 2), (HEADER, 1)],
    ids=["long", "no descriptor", "two", "another block"],
)
def test_what_is_not_the_block_leaves_no_descriptor(data: bytes, count: int) -> None:
    with no_descriptor_left():
        lifeline, theirs = Lifeline.pair()
        fds = [os.memfd_create("test") for _ in range(count)]
        socket.send_fds(theirs, [data], fds)
        close_all(fds)
        with pytest.raises(ProtocolError, match="got"):
            lifeline.receive_block(2)
        theirs.close()
        lifeline.close()


def test_full_lifeline_refuses_at_once(lifelines: Ends) -> None:
    master, _ = lifelines
    block = Block.create(1, 64)
    numbers = itertools.count()
    with pytest.raises(BlockingIOError):  # noqa: PT012 which send is one too many, the system says
        while True:
            master.send_block(next(numbers), 64, block.fd)
    block.close()


WITHOUT_SIGPIPE = """
import signal, socket
from mcinfer.shm.descriptors import send
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
theirs.close()
try:
    send(ours, b"CANCEL")
except OSError as exc:
    print(exc.strerror)
"""


def test_program_that_wants_to_end_by_sigpipe_does_not_by_a_worker() -> None:
    command = [sys.executable, "-c", WITHOUT_SIGPIPE]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "Broken pipe\n"


def test_greeting_comes_whole_and_before_any_block(lifelines: Ends) -> None:
    master, worker = lifelines
    text = random.Random(1).randbytes(100_000)  # noqa: S311 more than a long PYTHONPATH
    master.greet(text)
    send_blocks(master, 1)
    assert worker.greeting() == text
    os.close(worker.receive_block(1)[1])
