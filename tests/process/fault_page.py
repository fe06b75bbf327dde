"""The page of the fault matrix: what is expected in every cell, and what it took.

``python -m tests.process.fault_page --write docs/faults.md`` runs all cells and writes it.
"""

import argparse
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.process.fault_kinds import FAULTS
from tests.process.fault_matrix import CELLS, MOMENTS, Cell, Measured
from tests.process.fault_pools import CLOSE

_SECONDS = re.compile(r"\d+\.\d\d s( / \d+\.\d\d s)?")

_TOP = """# Faults

What callers get when something goes wrong, by fault and by moment. Every cell is a test with real processes
(`tests/process/test_fault_matrix.py`). This command runs the tests and writes this page:

    make faults

Each test has two workers of the engine "fake", with requests in flight and queued at that moment, and more
requests directly after. A cell shows the result of the call that the fault hits, what happens to the worker,
and one or two times. The call is a request; while the pool starts, the call is the start; for a fault of the
master, it is the master's program. The first time is from the fault until every caller had an answer. The
time after the slash is from the fault until both workers served again. For a program, the time is until all
its processes had ended. All cells run with ZeroMQ. Times after a · are for the same cell with
`transport="socketpair"`, where messages or processes matter. A dash means that the fault cannot occur, or
ends like the cell beside it. The times are from
one run on {machine}.

All other callers get right answers, unless the pool is closed or its start failed (*none left*). No cell
leaves a process, thread, descriptor, memory file or runtime folder behind. Each test calls `Master.health`
at that moment and afterwards, and checks the result.

"""

_EXPECTATIONS = f"""
## What is expected

- A worker that dies costs no request: another worker runs its requests, and the worker is started again. In
  the first start, a worker that dies is started once more.
- A worker that hangs in a run or is stopped costs its current request, when that request times out. The
  worker is killed after `Timeouts.cancel_grace`, unless it continues before. In a start, it fails the start
  after `Timeouts.start`.
- A run that raises or finds no memory fails its request alone, and the worker continues. In a build, such a
  failure is a `BuildError`; in the restart of a worker, it counts as one more death.
- A worker that sends a message that is not allowed is killed; another worker runs its requests.
- `Master.close` answers requests in flight with `ClosedError`, waits for `Timeouts.close` ({CLOSE:g} s here),
  and kills the remaining workers.
- The workers of a program that has ended end by themselves. `KeyboardInterrupt` and `SystemExit` pass
  through a with statement, which closes the pool.
- If this process has no descriptors or no shared memory, the call raises an error that says so; accepted
  requests are not lost.
- No code depends on the time of day.
"""


def page(measured: Mapping[Cell, Measured], machine: str) -> str:
    """The page, in Markdown.

    Args:
        measured: What every cell took.
        machine: What it was measured on.
    """

    def entry(fault: str, moment: str) -> str:
        cells = [cell for cell in CELLS if (cell.fault, cell.moment) == (fault, moment)]
        if not cells:
            return "-"
        seconds = [_seconds(measured[cell]) for cell in cells]
        return f"{cells[0].hit}; {cells[0].worker}; {' · '.join(seconds)}"

    rows = [["fault", *MOMENTS], ["---"] * (1 + len(MOMENTS))]
    rows += [[fault, *(entry(fault, moment) for moment in MOMENTS)] for fault in FAULTS]
    text = _TOP.format(machine=machine) + "".join(f"| {' | '.join(row)} |\n" for row in rows)
    text += "\n## The faults\n\n"
    text += "".join(f"- **{name}**: {fault.words}\n" for name, fault in FAULTS.items())
    return text + _EXPECTATIONS


def without_seconds(text: str) -> str:
    """A page without what was measured, and on what."""
    return re.sub(r"one run on .*", "one run", _SECONDS.sub("", text))


def _seconds(measured: Measured) -> str:
    text = f"{measured.settled:.2f} s"
    return text if measured.whole is None else f"{text} / {measured.whole:.2f} s"


class _Collector:
    """A plugin of pytest's that keeps what the cells measured."""

    def __init__(self) -> None:
        self.measured: dict[Cell, Measured] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take it from a test that is over."""
        for name, value in report.user_properties:
            if name == "measured" and isinstance(value, list):
                name, seconds = value
                [cell] = [cell for cell in CELLS if str(cell) == name]
                self.measured[cell] = Measured(**seconds)


def main() -> int:
    """Run every cell and write the page; the exit status."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", type=Path, required=True, help="the page")
    path = parser.parse_args().write
    collector = _Collector()
    tests = str(Path(__file__).with_name("test_fault_matrix.py"))
    status = pytest.main(["-q", tests, "-k", "fault_ends"], plugins=[collector])
    left_out = [str(cell) for cell in CELLS if cell not in collector.measured]
    if status or left_out:
        print(f"not written; nothing was measured of {left_out}", file=sys.stderr)
        return int(status) or 1
    cores, python = os.cpu_count(), platform.python_version()
    kernel = ".".join(platform.release().split(".")[:2])
    machine = f"{cores} cores ({platform.machine()}), Linux {kernel}, Python {python}"
    path.write_text(page(collector.measured, machine), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
