"""Tests of mcinfer/cli/doctor.py: what ``mcinfer devices`` prints."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mcinfer.cli import main
from mcinfer.cli.doctor import installed_runtime, quota_text
from mcinfer.machine import Gpu, cpu_quota, format_core_list
from tests.command_line import Capture, only_line

CORES = sorted(os.sched_getaffinity(0))

needs_no_quota = pytest.mark.skipif(
    (cpu_quota() or len(CORES)) < len(CORES), reason="a CPU quota leaves fewer threads than cores"
)


@pytest.fixture(autouse=True)
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes a program of that name; no other is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def write(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
        path.chmod(0o755)

    return write


TWO_GPUS = """
[ $1 = --query ] && echo "CUDA Version : 13.0"
for i in 0 1; do echo "$i, GPU-$i, 0:0$i:00.0, 580.65, Default, 1024, 512, A$i"; done
"""


@needs_no_quota
def test_each_worker_has_a_line(nvidia_smi: Callable[[str], None], capsys: Capture) -> None:
    nvidia_smi(TWO_GPUS)
    several = "s" if len(CORES) > 1 else ""
    assert main(["devices", "--devices", "cpu:0,cpu:0,cuda:1"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{len(CORES)} usable core")
    assert f": {format_core_list(CORES)}; by default " in first
    cores, threads = f"core{several} {format_core_list(CORES)}", f"{len(CORES)} thread{several}"
    assert lines[-3:] == [
        f"worker 0: cpu:0, {cores}, shared, {threads}",
        f"worker 1: cpu:0, {cores}, shared, {threads}",
        "worker 2: cuda:1, not pinned to cores",
    ]


@pytest.mark.parametrize(
    ("device", "visible", "why"),
    [
        (f"cpu:{len(CORES)}", "", ""),
        ("cuda:2", "0,1", ": the last device that was found is cuda:1"),
        ("cuda:2", "1", ": the last device that was found is cuda:0"),
        ("cuda:2", "", ": no GPU was found: CUDA_VISIBLE_DEVICES='' leaves none of 2"),
    ],
)
def test_device_that_does_not_exist_is_a_failure(
    device: str,
    visible: str,
    why: str,
    nvidia_smi: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    nvidia_smi(TWO_GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert main(["devices", f"--devices=cpu:0,{device}"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"device {device} does not exist{why}" in only_line(err)


def test_quota_is_printed_with_the_threads_that_it_allows() -> None:
    assert quota_text(None, 8) == "none"
    assert quota_text(0.5, 8) == "0.5 CPUs, 1 thread at a time"
    assert quota_text(2.75, 8) == "2.75 CPUs, 2 threads at a time"
    assert quota_text(8.0, 8) == "8 CPUs, no fewer than there are cores"


def test_memory_that_a_driver_does_not_report_is_left_out() -> None:
    gpu = Gpu(index=1, uuid="GPU-1", name="NVIDIA H200", memory_bytes=141 << 30)
    assert str(gpu) == "cuda:1: NVIDIA H200, 141.0 GiB"
    assert str(replace(gpu, memory_bytes=None)) == "cuda:1: NVIDIA H200"


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("", ["no GPU was found: there is no nvidia-smi"]),
        ("exit 0", ["no GPU was found: nvidia-smi names none"]),
        ("echo no driver >&2; exit 9", ["no GPU was found: nvidia-smi: no driver"]),
        (
            TWO_GPUS,
            [f"cuda:{i}: A{i}, 1.0 GiB, 0.5 GiB free, compute mode Default" for i in range(2)],
        ),
    ],
)
def test_gpus_are_those_of_the_driver(
    script: str, printed: list[str], nvidia_smi: Callable[[str], None], capsys: Capture
) -> None:
    if script:
        nvidia_smi(script)
    assert main(["devices", "--devices", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "no GPU" in line or line.startswith("cuda")] == printed
    several = len(printed) > 1
    software = "  driver 580.65, up to CUDA 13.0; no MPS: processes of one GPU take turns"
    assert (software in lines) is several
    assert any("unless CUDA_DEVICE_ORDER=PCI_BUS_ID" in line for line in lines) is several
    unusable = several and bool(installed_runtime().without_cuda)
    assert any("has no CUDAExecutionProvider" in line for line in lines) is unusable
