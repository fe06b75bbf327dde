"""Every cell of the fault matrix, and the page that shows it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcinfer import EngineOptions, Master
from tests.process.fault_matrix import CELLS, Cell, run_cell
from tests.process.fault_page import PAGE, page
from tests.process.fault_pools import Pool
from tests.process.models import FakeModel


class ConcurrentPool(Pool):
    """Its workers execute two runs at once."""

    concurrent_runs = 2

    def _made(self, fake_model: FakeModel, **options: Any) -> Master:
        runs = EngineOptions(concurrent_runs=self.concurrent_runs)
        return super()._made(fake_model, options=runs, **options)


OF_RUNS = [
    cell
    for cell in CELLS
    if cell.fault.startswith("worker:") and cell.moment in ("idle", "busy", "being restarted")
]


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


@pytest.mark.thorough
@pytest.mark.parametrize("cell", OF_RUNS, ids=str)
def test_fault_ends_alike_where_workers_execute_several_runs_at_once(
    cell: Cell, tmp_path: Path, fake_model: FakeModel
) -> None:
    run_cell(cell, tmp_path, fake_model, ConcurrentPool)


def test_page_shows_what_the_matrix_expects() -> None:
    shown = PAGE.read_text(encoding="utf-8")
    without_times = re.sub(r"\d+\.\d\d s( / \d+\.\d\d s)?", "", shown)
    machine = re.findall(r"^one run on (.*)\.$", shown, re.MULTILINE)[0]
    assert page(shown, {}, machine) == without_times, "run `make faults`"
