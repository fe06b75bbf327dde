"""The soak in short: mixed traffic while workers are killed, stopped and restarted all the time.

It is a program of its own, so that it counts the memory, descriptors and threads of the pool alone.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--seconds", "1", "--max-batch-size", "8"], id="workers"),
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
    record_file = tmp_path / "soak.json"
    done = subprocess.run(
        [
            sys.executable,
            str(SOAK),
            *options,
            "--json",
            str(record_file),
        ],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-20_000:]
    record = json.loads(record_file.read_text(encoding="utf-8"))
    assert record["findings"] == []
    assert record["requests"]["none: ok"] > 0
    assert record["figures"]["restarts of workers"] > 0
