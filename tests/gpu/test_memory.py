"""The contract of `tests.gpu.memory_contract` over the real driver; test_shm_cuda.py has the other one."""

from collections.abc import Callable, Iterator
from importlib import import_module

import pytest

from mcinfer.config import Device
from mcinfer.shm.cuda import MEMORY_VARIABLE, Card
from tests.gpu.cards import Cards, why_no_card
from tests.gpu.memory_contract import (
    CONTRACT,
    ROOT,
    Processes,
    memory_of_another_card_is_opened_in_place,
)

if why := why_no_card():
    pytest.skip(f"no card: {why}", allow_module_level=True)


@pytest.fixture(scope="module", params=["descriptors", "handles"])
def both(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Card, "_opened", {})
        patch.setenv(MEMORY_VARIABLE, request.param)
        processes = Processes(import_module("cuda.bindings.driver"), {"PYTHONPATH": str(ROOT)})
        yield processes
        processes.close()


@pytest.mark.parametrize("contract", CONTRACT, ids=lambda contract: contract.__name__)
def test_contract(both: Processes, contract: Callable[[Processes], None]) -> None:
    contract(both)
    assert both.blocks_in_use() == 0


def test_memory_of_another_card_is_opened_in_place(both: Processes, cards: Cards) -> None:
    if cards.count < 2 or not both.card.reaches(Device("cuda", 1)):
        pytest.skip("no second card that reaches the first one")
    memory_of_another_card_is_opened_in_place(both)
    assert both.blocks_in_use() == 0
