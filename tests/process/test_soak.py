"""The soak in short: mixed traffic while workers are killed, stopped and restarted all the time.

It runs as a program of its own, so that what it counts (memory, descriptors, threads) is the pool's alone.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"

SEEN = (
    "none: ok",
    "cancel: cancelled",
    "time-out: PredictTimeoutError",
    "bad: InvalidInputError",
    "fail: PredictError",
    "crash: WorkerDiedError",
    "hang: PredictTimeoutError",
)
"""What was done to requests and how they ended, each of which is to be among the traffic."""


@pytest.mark.timeout(150)
def test_some_seconds_of_mixed_traffic_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    record_file = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, str(SOAK), "--seconds", "2", "--json", str(record_file)],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-20_000:]
    record = json.loads(record_file.read_text(encoding="utf-8"))
    assert record["findings"] == []
    assert [name for name in SEEN if name not in record["requests"]] == []
    assert record["figures"]["requests"] > 20
    assert record["figures"]["restarts of workers"] > 0
    assert record["events"]["sent SIGKILL"] > 0
