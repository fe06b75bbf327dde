"""Every cell of the fault matrix, and the page that shows it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.fault_matrix import CELLS, Cell, run_cell
from tests.process.fault_page import PAGE, page
from tests.process.models import FakeModel


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[pytest.mark.thorough] * cell.is_thorough) for cell in CELLS],
    ids=str,
)
def test_fault_ends_as_the_matrix_says(
    cell: Cell,
    tmp_path: Path,
    fake_model: FakeModel,
    record_property: Callable[[str, object], None],
) -> None:
    record_property(str(cell), run_cell(cell, tmp_path, fake_model))


def test_page_shows_what_the_matrix_expects() -> None:
    shown = PAGE.read_text(encoding="utf-8")
    without_times = re.sub(r"\d+\.\d\d s( / \d+\.\d\d s)?", "", shown)
    machine = re.findall(r"^one run on (.*)\.$", shown, re.MULTILINE)[0]
    assert page(shown, {}, machine) == without_times, "run `make faults`"
