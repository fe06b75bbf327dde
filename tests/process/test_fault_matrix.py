"""Every cell of the fault matrix, and the page that shows it."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from mcinfer.config import TRANSPORTS
from tests.process.fault_kinds import FAULTS
from tests.process.fault_matrix import (
    CELLS,
    DASHES,
    MOMENTS,
    Cell,
    Measured,
    run_cell,
)
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


def test_every_fault_has_at_every_moment_an_expectation_or_a_reason_why_not() -> None:
    expected = {(cell.fault, cell.moment) for cell in CELLS}
    dashes = {(fault, moment) for fault, row in DASHES.items() for moment in row}
    assert expected | dashes == {(fault, moment) for fault in FAULTS for moment in MOMENTS}
    assert not expected & dashes
    assert len({*map(str, CELLS)}) == len(CELLS)


def test_what_a_transport_has_a_part_in_is_expected_of_each() -> None:
    over = {kind: {c.fault for c in CELLS if c.transport == kind} for kind in TRANSPORTS}
    assert over["zeromq"] == {*FAULTS}
    assert {"worker: SIGKILL", "worker: garbage", "master: SIGKILL"} < over["socketpair"]


def test_page_shows_what_the_matrix_expects() -> None:
    shown = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    expected = page(dict.fromkeys(CELLS, Measured(settled=0.0)), "any")
    assert without_seconds(shown) == without_seconds(expected), "run `make faults`"
