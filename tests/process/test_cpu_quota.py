"""A pool in a control group with a CPU quota, as containers have: all cores are there, time is not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcinfer.machine import format_core_list
from tests.process.control_groups import limited_group
from tests.process.models import AFFINE, OnnxModel

CORES = sorted(os.sched_getaffinity(0))
PERIOD_US = 100_000
QUOTA_US = 150_000

PROGRAM = """
import json, os, sys
from pathlib import Path

group, model = map(Path, sys.argv[1:])
(group / "cgroup.procs").write_text(str(os.getpid()))

from mcinfer import EngineOptions, Master
from mcinfer.cli import main

def look(options):
    with Master(model, options=options) as master:
        pids = [worker.pid for worker in master.statistics().workers]
        cores = [sorted(os.sched_getaffinity(pid)) for pid in pids]
        return cores, [len(os.listdir(f"/proc/{pid}/task")) for pid in pids]

main(["devices"])
print(json.dumps([look(EngineOptions(threads=threads)) for threads in (None, 1, 2)]))
"""


def set_quota(group: Path) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{QUOTA_US} {PERIOD_US}", encoding="ascii")
    elif not (group / "cpu.cfs_quota_us").exists():
        raise FileNotFoundError(f"{group} takes no quota")
    else:
        (group / "cpu.cfs_period_us").write_text(f"{PERIOD_US}", encoding="ascii")
        (group / "cpu.cfs_quota_us").write_text(f"{QUOTA_US}", encoding="ascii")


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with the quota."""
    with limited_group("cpu", set_quota) as group:
        yield group


@pytest.mark.skipif(len(CORES) < 2, reason="a quota below the number of cores takes two")
def test_workers_have_all_cores_and_the_threads_of_the_quota(
    group: Path, onnx_model: OnnxModel
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(group), str(onnx_model(AFFINE))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    *told, looks = done.stdout.splitlines()
    unsaid, one, two = json.loads(looks)
    # One CPU and a half: one worker with one thread, on any of the cores.
    assert [cores for cores, _ in (unsaid, one, two)] == [[CORES]] * 3
    assert unsaid == one
    assert two[1] == [one[1][0] + 1]  # what the user says goes
    listed = format_core_list(CORES)
    assert told[0] == f"{len(CORES)} usable cores: {listed}; by default 1 worker"
    assert "  CPU quota: 1.5 CPUs, 1 thread at a time" in told
    assert told[-1] == f"worker 0: cpu:0, cores {listed}, 1 thread"
