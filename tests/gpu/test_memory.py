"""The contract of `tests.gpu.memory_contract` over the real driver."""

from collections.abc import Callable, Iterator
from importlib import import_module

import pytest

from mcinfer.shm.cuda import MEMORY_VARIABLE, Card
from tests.gpu.cards import Cards
from tests.gpu.memory_contract import CONTRACT, ROOT, Processes


@pytest.fixture(scope="module", params=["descriptors", "handles"])
def both(request: pytest.FixtureRequest, cards: Cards) -> Iterator[Processes]:
    if not cards.real:
        pytest.skip("no card: tests/test_shm_cuda.py runs the contract over an emulated driver")
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
