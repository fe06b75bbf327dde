"""Tests of mcinfer/cards/cuda.py over the emulated driver: the contract, and what only an emulation shows."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest

from mcinfer.cards.cuda import Card
from mcinfer.config import Device
from mcinfer.errors import (
    BuildError,
    CardError,
    InvalidInputError,
    MissingDependencyError,
    ProtocolError,
)
from tests.emulated_cards import EMULATED, emulated_cards
from tests.gpu.memory_contract import (
    CONTRACT,
    OWN,
    ROOT,
    Processes,
    Refused,
    memory_of_another_card_is_opened_in_place,
    numbers,
)
from tests.open_descriptors import no_descriptor_left


@contextmanager
def two_processes(**variables: str) -> Iterator[Processes]:
    with emulated_cards(**variables):
        driver = import_module("cuda.bindings.driver")
        both = Processes(driver, {"PYTHONPATH": f"{EMULATED}:{ROOT}"})
        try:
            yield both
        finally:
            both.close()


@pytest.fixture(scope="module", params=["descriptors", "handles"])
def both(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with two_processes(CARD_MEMORY=request.param) as processes:
        assert processes.card.kind == processes("kind") == request.param
        yield processes


@pytest.mark.parametrize(
    "contract",
    [*CONTRACT, memory_of_another_card_is_opened_in_place],
    ids=lambda contract: contract.__name__,
)
def test_contract(both: Processes, contract: Callable[[Processes], None]) -> None:
    contract(both)
    assert both.blocks_in_use() == 0


def test_blocks_that_come_and_go_leave_no_descriptor(both: Processes) -> None:
    def come_and_go() -> int:
        block = both.create()
        both.give(block)
        both("close", block.number)
        block.close()
        both.card.reclaim()
        left: int = both("descriptors")
        return left

    there = come_and_go()  # an event stays, for the next block
    with no_descriptor_left():
        assert [come_and_go() for _ in range(3)] == [there] * 3


def test_card_is_found_by_a_token_of_its_memory(both: Processes) -> None:
    block = both.create()
    assert Card.find(block.token) is both.card
    other = Card.open(Device("cuda", 1)).create(next(numbers), 1)
    assert Card.find(other.token) is Card.open(Device("cuda", 1))
    unknown = block.token.replace(b"emulated-", b"elsewhere")
    assert Card.find(unknown) is None
    with pytest.raises(ProtocolError, match="no token"):
        Card.find(block.token[1:])
    other.close()
    block.close()


def test_descriptor_of_other_memory_is_refused() -> None:
    with two_processes(CARD_MEMORY="descriptors") as both:
        block = both.create()
        fd = os.memfd_create("other")
        with no_descriptor_left(), pytest.raises(CardError, match="cuMemImportFromShareableHandle"):
            both.card.attach(1, block.size, os.dup(fd), block.token, OWN)
        os.close(fd)
        small = both.card.create(next(numbers), 1)
        with no_descriptor_left(), pytest.raises(CardError, match="cuMemMap: CUDA_ERROR_INVALID"):
            both.card.attach(1, block.size, os.dup(small.fd), block.token, OWN)
        small.close()
        block.close()
        assert both.blocks_in_use() == 0


def test_lost_context_says_that_only_a_new_process_helps(both: Processes) -> None:
    for call in ("lose", "memory"):
        with pytest.raises(
            Refused, match=r"CardLostError: cuda:0: .*ILLEGAL_ADDRESS: only a new process"
        ):
            both(call)
    both.restart()
    assert both("memory")[1] == both.card.memory()[1]


def test_cards_that_are_no_peers_share_no_memory() -> None:
    with two_processes(WITHOUT="peers") as both:
        assert not both.card.reaches(Device("cuda", 1))
        assert both.card.reaches(OWN)
        block = both.create()
        with pytest.raises(
            Refused, match=r"CardError: block .* lies on cuda:0, and cuda:1 does not"
        ):
            both.give(block, on="cuda:1")
        block.close()
        assert both.blocks_in_use() == 0


def test_card_without_descriptors_and_events_shares_memory_by_handles_and_waits_itself() -> None:
    with two_processes(WITHOUT="descriptors,events,pinning") as both:
        assert both.card.kind == "handles"
        block = both.create(b"whole")  # recorded: this process has waited
        both.give(block)
        both("queue_read_after_event", block.number, 0, 5)
        assert both("result", block.number, 5) == b"whole".hex()
        assert not both.card.register(both.host, 4096)
        both("close", block.number)
        block.close()
        assert both.blocks_in_use() == 0


def test_reason_why_a_card_cannot_be_used_is_named() -> None:
    with emulated_cards(CARDS="1"):
        with pytest.raises(BuildError, match="cuda:1: this process sees 1 NVIDIA cards"):
            Card.open(Device("cuda", 1))
        assert Card.open(OWN).model() == "Emulated card 0, compute capability 9.0"
        for other in ("cpu", "ascend"):
            assert not Card.open(OWN).reaches(Device(other, 0))
            with pytest.raises(InvalidInputError, match=f"device: got {other}:0"):
                Card.open(Device(other, 0))
    with emulated_cards(CARDS="0"), pytest.raises(BuildError, match="cuInit: CUDA_ERROR_NO_DEVICE"):
        Card.open(OWN)
    with emulated_cards(WITHOUT="driver"), pytest.raises(BuildError, match="driver is not found"):
        Card.open(OWN)
    with (
        emulated_cards(CARD_MEMORY="pages"),
        pytest.raises(InvalidInputError, match="MCINFER_CARD"),
    ):
        Card.open(OWN)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Card, "_opened", {})
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*cuda-bindings>="):
        Card.open(OWN)
