"""Tests of what this process may use of the machine."""

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mcinfer import machine
from mcinfer.machine import oom_kills

CORES = os.sched_getaffinity(0)
V1_GROUPS = "9:cpu,cpuacct:/x\n4:memory:/docker/a\n3:pids:/docker/a\n1:name=systemd:/\n"

Machine = Callable[..., Path]


@pytest.fixture
def of(tmp_path: Path) -> Machine:
    """Writes what the kernel would say of a machine: files by path, under a folder that stands for ``/``."""

    def write(groups: str, **files: str) -> Path:
        for name, text in {"proc/self/cgroup": groups, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="surrogateescape")
        return tmp_path

    return write


def cgroup(**files: str) -> dict[str, str]:
    """Files below the folder of control groups."""
    return {f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()}


# Control groups.


def test_limit_is_that_of_the_tightest_group_above(of: Machine) -> None:
    root = of(
        "0::/user/app\n",
        **cgroup(
            **{
                "user/app/cpu.max": "400000 100000",
                "user/cpu.max": "125000 50000",
                "cpu.max": "max 100000",
                "user/app/memory.max": "max",
                "user/memory.max": "1073741824",
                "memory.max": "2147483648",
                "other/memory.max": "4096",
            }
        ),
    )
    assert machine.cpu_quota(root) == 2.5
    assert machine.memory_limit(root) == 1 << 30
    assert machine.usable_memory(root) == min(1 << 30, psutil.virtual_memory().total)
    # A group of the host that is not visible: its limits are at the top.
    root = of("0::/kubepods/pod1\n", **cgroup(**{"memory.max": "8192", "cpu.max": "150000 100000"}))
    assert machine.memory_limit(root) == 8192
    assert machine.cpu_quota(root) == 1.5
    quotas = {"cpu/x/cpu.cfs_quota_us": "25000", "cpu/x/cpu.cfs_period_us": "100000"}
    assert machine.cpu_quota(of(V1_GROUPS, **cgroup(**quotas))) == 0.25


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("", {}),
        ("0::/\n", {}),
        ("0::/\n", {"memory.max": "max", "cpu.max": "max 100000", "pids.max": "max"}),
        ("0::/\n", {"memory.max": "0", "cpu.max": "100000 0"}),
        (V1_GROUPS, {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}),
        (V1_GROUPS, {"cpu/x/cpu.cfs_quota_us": "100000"}),
    ],
)
def test_file_without_limits_is_none(groups: str, files: dict[str, str], of: Machine) -> None:
    root = of(groups, **cgroup(**files))
    assert machine.memory_limit(root) is None
    assert machine.cpu_quota(root) is None
    assert machine.task_limit(root) is None
    assert machine.usable_cpus(root) == len(CORES)
    assert machine.whole_cpus(root) == len(CORES)


@pytest.mark.parametrize(
    ("quota", "usable", "whole"),
    [
        ("50000 100000", 0.5, 1),
        ("100000 100000", 1.0, 1),
        ("99999900000 100000", len(CORES), len(CORES)),
    ],
)
def test_cpus_are_those_of_the_quota_or_the_cores(
    quota: str, usable: float, whole: int, of: Machine
) -> None:
    root = of("0::/\n", **cgroup(**{"cpu.max": quota}))
    assert machine.usable_cpus(root) == usable
    assert machine.whole_cpus(root) == whole


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        (
            "0::/user/app\n",
            {"user/app/memory.events": "low 0\noom 9\noom_kill 2\n", "memory.events": "oom_kill 5"},
        ),
        ("4:memory:/app\n", {"memory/app/memory.oom_control": "under_oom 0\noom_kill 2"}),
        ("0::/of/the/host\n", {"memory.events": "oom_kill 2\noom_group_kill 7"}),
    ],
)
def test_kills_for_memory_are_of_the_own_group(
    of: Machine, groups: str, files: dict[str, str]
) -> None:
    assert oom_kills(of(groups, **cgroup(**files))) == 2
    assert oom_kills(of("7:pids:/app\n")) == 0


def test_threads_are_limited_by_the_group_with_the_least_room(of: Machine) -> None:
    files = {
        "a/b/pids.max": "100",
        "a/b/pids.current": "10",
        "a/pids.max": "1000",
        "a/pids.current": "950",
    }
    assert machine.task_limit(of("0::/a/b\n", **cgroup(**files))) == (1000, 950)
