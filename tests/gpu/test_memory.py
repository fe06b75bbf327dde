"""The contract of `tests.gpu.memory_contract` over the real driver; how like it the emulated one is."""

import enum
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from mcinfer.cards.cuda import MEMORY_VARIABLE, Card
from mcinfer.config import Device
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


def test_emulated_driver_has_calls_and_values_of_the_real_one() -> None:
    spec = spec_from_file_location("emulated", ROOT / "tests/gpu/emulated/cuda/bindings/driver.py")
    assert spec is not None
    assert spec.loader is not None
    emulated = module_from_spec(spec)
    spec.loader.exec_module(emulated)
    real = import_module("cuda.bindings.driver")
    compared = 0
    for name, value in vars(emulated).items():
        if isinstance(value, enum.EnumType) and name.startswith("CU"):
            for key in value.__members__:
                assert int(getattr(value, key)) == int(getattr(getattr(real, name), key)), key
            compared += 1
        elif name.startswith("cu") and callable(value):
            text = getattr(real, name).__doc__.partition("\n")[0]  # its signature
            taken = re.sub(r"\[.*?\]", "", text[text.index("(") + 1 : text.rindex(")")]).split(",")
            count = len(inspect.signature(value).parameters)
            assert len([argument for argument in taken if argument.strip()]) == count, text
            compared += 1
    assert compared > 50
