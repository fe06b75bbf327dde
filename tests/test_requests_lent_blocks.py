"""Blocks that a worker makes for outputs: lent, given back, and closed where there are too many."""

import errno
import os
from collections.abc import Iterator

import numpy as np
import pytest

from mcinfer.errors import ProtocolError
from mcinfer.requests.forks import forks
from mcinfer.requests.frames import Lease
from mcinfer.requests.lent_blocks import MOST_BLOCKS, MOST_BYTES, LentBlocks
from mcinfer.shm.block import Block
from tests.open_descriptors import no_descriptor_left


class Maker:
    """A worker that hands over a block of any number; `size` is that of the next one."""

    def __init__(self) -> None:
        self.made: dict[int, Block] = {}
        self.size = 4096
        self.lent = LentBlocks(self.receive)

    def receive(self, number: int) -> Block:
        assert number not in self.made  # it is handed over once
        block = self.made[number] = Block.create(number, self.size)
        return Block.attach(number, block.size, os.dup(block.fd))

    def fill(self, number: int, value: int) -> None:
        block = self.made[number]
        memoryview(block.memory(0, block.size)).cast("B")[:] = bytes([value]) * block.size

    def close(self) -> None:
        for block in self.made.values():
            block.close()


@pytest.fixture
def maker() -> Iterator[Maker]:
    maker = Maker()
    yield maker
    maker.close()


def test_block_comes_back_once_its_last_view_is_gone(maker: Maker) -> None:
    lent = maker.lent
    for round_ in range(3):
        lease: Lease | None = lent.lease(-2)
        maker.fill(-2, round_)
        view = np.asarray(lease)[5:10].reshape(5, 1)
        lease = None
        assert lent.take_back() == ([], [])
        assert view.tolist() == [[round_]] * 5
        assert lent.used == lent.size == 4096
        del view
        assert lent.used == 0
        assert lent.take_back() == ([-2], [])
        assert lent.take_back() == ([], [])


def test_block_that_was_not_given_back_is_not_filled_again(maker: Maker) -> None:
    held = maker.lent.lease(-2)
    with pytest.raises(ProtocolError, match="was not given back"):
        maker.lent.lease(-2)
    del held
    with pytest.raises(ProtocolError, match="was not given back"):
        maker.lent.lease(-2)  # the worker does not know yet


def test_so_many_blocks_are_kept_and_the_others_are_closed(maker: Maker) -> None:
    lent, numbers = maker.lent, [*range(-2, -MOST_BLOCKS - 7, -1)]
    with no_descriptor_left():
        held = [lent.lease(number) for number in numbers[:MOST_BLOCKS]]
        assert not lent.is_crowded
        held += [lent.lease(number) for number in numbers[MOST_BLOCKS:]]
        assert lent.is_crowded
        held.clear()
        assert not lent.is_crowded
        kept, closed = lent.take_back()
        assert len(kept) == MOST_BLOCKS
        assert sorted([*closed, *kept]) == sorted(numbers)
        assert lent.size == MOST_BLOCKS * 4096
        lent.close()
        maker.close()
        maker.made.clear()


def test_so_many_bytes_are_kept(maker: Maker) -> None:
    maker.size = MOST_BYTES // 2 + 4096
    held = [maker.lent.lease(-2)]
    assert not maker.lent.is_crowded
    held.append(maker.lent.lease(-3))
    assert maker.lent.is_crowded
    del held[0]
    assert not maker.lent.is_crowded
    assert maker.lent.take_back() == ([-2], [])
    del held[0]
    assert maker.lent.take_back() == ([], [-3])


def test_block_that_cannot_be_taken_is_closed() -> None:
    def fail(_: int) -> Block:
        raise OSError(errno.EMFILE, "no descriptor")

    lent = LentBlocks(fail)
    with pytest.raises(OSError, match="no descriptor"):
        lent.lease(-2)
    lent.give_up([("y", "float32", (1,), -3, 0), ("z", "float32", (1,), 5, 0)])
    assert lent.take_back() == ([], [-2, -3])


def test_blocks_of_an_answer_that_could_not_be_taken_are_given_up_once(maker: Maker) -> None:
    held = maker.lent.lease(-2)
    maker.lent.give_up([("y", "float32", (1,), -2, 0), ("z", "float32", (1,), -3, 0)])
    assert maker.lent.take_back() == ([-3], [])
    del held
    assert maker.lent.take_back() == ([-2], [])
    maker.lent.give_up([("y", "float32", (1,), -3, 0)])  # which was filled again
    assert maker.lent.take_back() == ([-3], [])


def test_nothing_comes_back_while_a_process_forks(maker: Maker) -> None:
    maker.lent.lease(-2)
    forks().held[0] = []
    try:
        assert maker.lent.take_back() == ([], [])
    finally:
        del forks().held[0]
    assert maker.lent.take_back() == ([-2], [])
