"""Every cell of the fault matrix, and the page that shows it."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.process.fault_matrix import CELLS, OTHER_CELLS, Cell, Measured, run_cell
from tests.process.fault_page import page, without_seconds
from tests.process.models import FakeModel
from tests.process.scripts import ROOT


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_fault_ends_as_the_matrix_says(
    cell: Cell,
    tmp_path: Path,
    fake_model: FakeModel,
    record_property: Callable[[str, object], None],
) -> None:
    measured = run_cell(cell, tmp_path, fake_model)
    # As what tests may be run by several processes can tell: for the page.
    record_property("measured", [str(cell), asdict(measured)])


@pytest.mark.thorough
@pytest.mark.parametrize("cell", OTHER_CELLS, ids=str)
def test_fault_ends_alike_over_the_other_transport(
    cell: Cell, tmp_path: Path, fake_model: FakeModel
) -> None:
    run_cell(cell, tmp_path, fake_model)


def test_page_shows_what_the_matrix_expects() -> None:
    shown = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    expected = page(dict.fromkeys(CELLS, Measured(settled=0.0)), "any")
    assert without_seconds(shown) == without_seconds(expected), "run `make faults`"
