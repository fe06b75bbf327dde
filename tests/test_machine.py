"""Tests of what this process may use of the machine."""

from pathlib import Path

import psutil

from mcinfer import machine


def test_memory_is_at_most_that_of_the_machine() -> None:
    assert 0 < machine.usable_memory() <= psutil.virtual_memory().total


def test_limits_of_all_groups_above_are_looked_at() -> None:
    top = Path("/sys/fs/cgroup")
    assert machine._limit_files("0::/user/app\n") == [
        top / "user/app/memory.max",
        top / "user/memory.max",
        top / "memory.max",
        top / "memory.max",
    ]
    assert machine._limit_files("9:cpu,cpuacct:/x\n4:memory:/docker/a\n") == [
        top / "memory/docker/a/memory.limit_in_bytes",
        top / "memory/docker/memory.limit_in_bytes",
        top / "memory/memory.limit_in_bytes",
        top / "memory/memory.limit_in_bytes",
    ]


def test_file_without_a_number_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.limit_in_bytes").write_text("1073741824\n")
    assert machine._read_limit(tmp_path / "memory.max") is None
    assert machine._read_limit(tmp_path / "absent") is None
    assert machine._read_limit(tmp_path / "memory.limit_in_bytes") == 1 << 30
