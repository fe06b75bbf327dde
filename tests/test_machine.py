"""Tests of what this process may use of the machine."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer import machine
from mcinfer.machine import Gpu, oom_kills

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


# How the cores lie.


def test_nodes_have_the_usable_cores(of: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 9, 10})
    nodes = "sys/devices/system/node"
    root = of(
        "", **{f"{nodes}/node{i}/cpulist": t for i, t in enumerate(["0-3,8-9", "4-7,10", ""])}
    )
    of("", **{f"{nodes}/node10/cpulist": "11\n", f"{nodes}/online": "0-2,10"})
    assert machine.numa_nodes(root) == {0: (0, 1, 9), 1: (10,), 2: (), 10: ()}
    assert [*machine.numa_nodes(root)] == [0, 1, 2, 10]


@given(st.sets(st.integers(0, 300)))
def test_list_of_cores_can_be_read_again(cores: set[int]) -> None:
    assert machine.parse_core_list(machine.format_core_list([*cores])) == tuple(sorted(cores))


# GPUs.


H200 = Gpu(index=0, uuid="GPU-c0ffee", name="NVIDIA H200", memory_bytes=143771 << 20)
OTHER = Gpu(index=1, uuid="GPU-c0de", name="A, B")


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        ("0,1", [H200, OTHER]),
        ("1, 0", [OTHER, H200]),
        ("GPU-c0de,GPU-c0ffee", [OTHER, H200]),
        ("GPU-c0f", [H200]),
        ("GPU-c0", []),  # which of them
        ("-1", []),
        ("0,2,1", [H200]),
        ("NoDevFiles", []),
    ],
)
def test_gpus_are_those_that_cuda_leaves_in_its_order(chosen: str, left: list[Gpu]) -> None:
    expected = [replace(gpu, index=index) for index, gpu in enumerate(left)]
    assert [*machine.visible_gpus([H200, OTHER], chosen)] == expected


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program of that name in the place of all others."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
        path.chmod(0o755)

    return write


SMI_LINES = (
    "0, GPU-a, 00000000:3B:00.0, 580.65.06, Default, 2, 1, $1",
    "1, GPU-b, 00010000:AF:00.0, [N/A], [N/A], [N/A], [Not Supported], A, B",
    "2, GPU-c, 00000000:D8:00.0, 580.65.06, Exclusive_Process, 2, 2, C",
    "No devices",
)
SMI = "; ".join(f'echo "{line}"' for line in SMI_LINES)


def test_gpus_are_those_that_the_driver_tells_of_and_cuda_leaves(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, of: Machine
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvidia_smi(SMI)
    devices = "sys/bus/pci/devices"
    root = of(
        "", **{f"{devices}/0000:3b:00.0/numa_node": "1", f"{devices}/0000:d8:00.0/numa_node": "-1"}
    )
    first, second, third = machine.gpus(root=root)
    assert first == Gpu(
        index=0,
        uuid="GPU-a",
        name=f"--query-gpu={machine._GPU_FIELDS}",
        memory_bytes=2 << 20,
        free_bytes=1 << 20,
        bus_id="0000:3b:00.0",
        driver="580.65.06",
        compute_mode="Default",
        node=1,
    )
    assert second == Gpu(index=1, uuid="GPU-b", name="A, B", bus_id="0000:af:00.0")
    assert (third.compute_mode, third.node) == ("Exclusive_Process", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert machine.gpus() == (replace(second, index=0),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(OSError, match="CUDA_VISIBLE_DEVICES='' leaves none of 3"):
        machine.gpus()


def test_driver_that_fails_is_quoted(nvidia_smi: Callable[[str], None]) -> None:
    with pytest.raises(FileNotFoundError, match="there is no nvidia-smi"):
        machine.gpus()
    nvidia_smi("exit 0")
    with pytest.raises(OSError, match="nvidia-smi names none"):
        machine.gpus()
    nvidia_smi("echo cannot talk to\necho the driver; exit 9")
    with pytest.raises(OSError, match="nvidia-smi: cannot talk to the driver"):
        machine.gpus()
    nvidia_smi("exit 9")
    with pytest.raises(OSError, match="nvidia-smi: status 9"):
        machine.gpus()


def test_driver_that_hangs_is_not_waited_for(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi("while true; do :; done")
    with pytest.raises(TimeoutError, match=r"nvidia-smi gave no answer in 0\.05 s"):
        machine.gpus(0.05)
