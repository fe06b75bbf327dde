"""The soak in short: mixed traffic while workers are killed, stopped and restarted all the time.

It is a program of its own, so that it counts the memory, descriptors and threads of the pool alone.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def soak(folder: Path, *arguments: str) -> dict[str, Any]:
    """What became of the requests of some seconds of it, and that all was as promised."""
    record_file = folder / "soak.json"
    done = subprocess.run(
        [sys.executable, str(SOAK), "--json", str(record_file), *arguments],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-20_000:]
    record: dict[str, Any] = json.loads(record_file.read_text(encoding="utf-8"))
    assert record["findings"] == []
    return record


@pytest.mark.timeout(150)
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
def test_some_seconds_of_mixed_traffic_lose_nothing_and_leave_nothing(
    tmp_path: Path, options: list[str]
) -> None:
    record = soak(tmp_path, *options)
    assert record["requests"]["none: ok"] > 0
    assert record["figures"]["restarts of workers"] > 0


@pytest.mark.timeout(150)
def test_pool_as_it_comes_loses_no_request_to_kills(tmp_path: Path) -> None:
    record = soak(tmp_path, "--seconds", "1", "--kills")
    assert [*record["requests"]] == ["right"]
    assert record["events"]["kills"] > 0
