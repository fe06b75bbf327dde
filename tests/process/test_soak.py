"""The soak in short: mixed traffic while workers are killed, stopped and restarted all the time.

It is a program of its own, so that it counts the memory, descriptors and threads of the pool alone.
"""

import re

import pytest

from tests.process.scripts import ROOT, run_python


def soak(*arguments: str) -> dict[str, int]:
    """The numbers of some seconds of it, by the first words of their lines; all was as promised."""
    done = run_python(ROOT / "benchmarks" / "soak.py", *arguments, timeout=140)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-20_000:]
    found = re.findall(r"^(\S+(?: \S+)*) +(\d+)", done.stdout, re.MULTILINE)
    return {name: int(number) for name, number in found}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--warm-up", "1", "--seconds", "2", "--max-batch-size", "8"], id="workers"),
        pytest.param(
            ["--seconds", "20", "--max-batch-size", "64", "--parallel", "pipeline=2"],
            id="ranks",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_some_seconds_of_mixed_traffic_lose_nothing_and_leave_nothing(options: list[str]) -> None:
    numbers = soak(*options)
    assert numbers["none"] > 0  # those that nothing is done to: the first column is "ok"
    assert numbers["restarts of workers"] > 0


def test_pool_as_it_comes_loses_no_request_to_kills() -> None:
    numbers = soak("--seconds", "1", "--kills")
    assert numbers["right"] > 0
    assert numbers["kills"] > 0
