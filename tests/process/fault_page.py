"""Runs all cells of the fault matrix and writes the tables of docs/faults.md."""

import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.process.fault_matrix import CELLS, FAULTS, MOMENTS
from tests.process.scripts import ROOT

PAGE = ROOT / "docs" / "faults.md"


def page(text: str, seconds: Mapping[str, str], machine: str) -> str:
    """The page with new tables: `seconds` is what `run_cell` returned, by the cell's name."""

    def entry(fault: str, moment: str) -> str:
        if moment not in FAULTS[fault].cells:
            return "-"
        hit, worker = FAULTS[fault].cells[moment]
        return f"{hit}; {worker}; {seconds.get(f'{fault}, {moment}', '')}"

    rows = [["fault", *MOMENTS], ["---"] * (1 + len(MOMENTS))]
    rows += [[fault, *(entry(fault, moment) for moment in MOMENTS)] for fault in FAULTS]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    faults = "".join(f"- **{name}**: {fault.words}\n" for name, fault in FAULTS.items())
    for pattern, new in (
        (r"(^\|.*\n)+", table),
        (r"(^- \*\*.*\n)+", faults),
        (r"^one run on .*\n", f"one run on {machine}.\n"),
    ):
        text = re.sub(pattern, new.replace("\\", r"\\"), text, flags=re.MULTILINE)
    return text


class _Collector:
    """A plugin of pytest that keeps what the tests recorded."""

    def __init__(self) -> None:
        self.recorded: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.recorded |= {name: str(value) for name, value in report.user_properties}


def main() -> int:
    """Run every cell and write the page; the exit status."""
    collector = _Collector()
    tests = str(Path(__file__).with_name("test_fault_matrix.py"))
    status = pytest.main(["-q", "-m", "", tests, "-k", "fault_ends"], plugins=[collector])
    left_out = [str(cell) for cell in CELLS if str(cell) not in collector.recorded]
    if status or left_out:
        print(f"not written; no times of {left_out}", file=sys.stderr)
        return int(status) or 1
    cores, python = os.cpu_count(), platform.python_version()
    kernel = ".".join(platform.release().split(".")[:2])
    machine = f"{cores} cores ({platform.machine()}), Linux {kernel}, Python {python}"
    new = page(PAGE.read_text(encoding="utf-8"), collector.recorded, machine)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
