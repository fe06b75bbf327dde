"""Tests of mcinfer/cli/devices.py: what ``mcinfer devices`` prints."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mcinfer.cli import main
from mcinfer.cli.devices import quota_text
from mcinfer.cli.doctor import installed_runtime
from mcinfer.machine import Gpu, cpu_quota, format_core_list
from tests.command_line import Capture, only_line

CORES = sorted(os.sched_getaffinity(0))

LISTED = f"core{'s' if len(CORES) > 1 else ''} {format_core_list(CORES)}"

needs_no_quota = pytest.mark.skipif(
    (cpu_quota() or len(CORES)) < len(CORES), reason="a CPU quota leaves fewer threads than cores"
)


@pytest.fixture(autouse=True)
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """No such program is found, but the one that this is told to write."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def write(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
        path.chmod(0o755)

    return write


TWO_GPUS = 'echo "0, GPU-a, A, 1024, 512"; echo "1, GPU-b, B, 1024, 512"'


def workers(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("worker ")]


def threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


@needs_no_quota
def test_devices_shows_how_the_cores_are_shared_out(capsys: Capture) -> None:
    assert main(["devices", "--devices", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0].startswith(f"{len(CORES)} usable core")
    assert f": {format_core_list(CORES)}; by default " in out.splitlines()[0]
    assert workers(out) == [f"worker 0: cpu:0, {LISTED}, {threads(len(CORES))}"]
    assert out.splitlines()[-1] == workers(out)[-1]


@needs_no_quota
def test_devices_says_what_is_shared_and_what_is_no_cpu(
    nvidia_smi: Callable[[str], None], capsys: Capture
) -> None:
    nvidia_smi(TWO_GPUS)
    assert main(["devices", "--devices", "cpu:0,cpu:0,cuda:1"]) == 0
    assert workers(capsys.readouterr().out) == [
        f"worker 0: cpu:0, {LISTED}, shared, {threads(len(CORES))}",
        f"worker 1: cpu:0, {LISTED}, shared, {threads(len(CORES))}",
        "worker 2: cuda:1, not a share of the CPU",
    ]


def test_device_that_there_is_not_is_a_failure(capsys: Capture) -> None:
    assert main(["devices", f"--devices=cpu:{len(CORES)}"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"device cpu:{len(CORES)} does not exist" in only_line(err)


@pytest.mark.parametrize(
    ("visible", "why"),
    [
        ("0,1", "the last device that was found is cuda:1"),
        ("1", "the last device that was found is cuda:0"),
        ("", "no GPU was found: CUDA_VISIBLE_DEVICES='' leaves none of 2"),
    ],
)
def test_gpu_that_there_is_not_is_a_failure(
    visible: str,
    why: str,
    nvidia_smi: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    nvidia_smi(TWO_GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert main(["devices", "--devices=cpu:0,cuda:2"]) == 1
    out, err = capsys.readouterr()
    assert (out, only_line(err)) == ("", f"mcinfer: device cuda:2 does not exist: {why}")


@pytest.mark.parametrize(
    ("quota", "cores", "text"),
    [
        (None, 8, "none"),
        (0.5, 8, "0.5 CPUs, 1 thread at a time"),
        (2.75, 8, "2.75 CPUs, 2 threads at a time"),
        (8.0, 8, "8 CPUs, no fewer than there are cores"),
    ],
)
def test_quota_is_told_with_the_threads_that_it_leaves(
    quota: float | None, cores: int, text: str
) -> None:
    assert quota_text(quota, cores) == text


@pytest.mark.parametrize(
    ("size", "free", "text"),
    [
        (141 << 30, 140 << 30, "cuda:1: NVIDIA H200, 141.0 GiB, 140.0 GiB free"),
        (141 << 30, None, "cuda:1: NVIDIA H200, 141.0 GiB"),
        (None, None, "cuda:1: NVIDIA H200"),
    ],
)
def test_gpu_is_told_with_the_memory_that_its_driver_names(
    size: int | None, free: int | None, text: str
) -> None:
    gpu = Gpu(index=1, uuid="GPU-1", name="NVIDIA H200", memory_bytes=size, free_bytes=free)
    assert str(gpu) == text


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (None, ["no GPU was found: there is no nvidia-smi"]),
        ("exit 0", ["no GPU was found: nvidia-smi names none"]),
        ("echo no driver >&2; exit 9", ["no GPU was found: nvidia-smi: no driver"]),
        (TWO_GPUS, ["cuda:0: A, 1.0 GiB, 0.5 GiB free", "cuda:1: B, 1.0 GiB, 0.5 GiB free"]),
    ],
)
def test_gpus_are_those_of_the_driver(
    script: str | None,
    told: list[str],
    nvidia_smi: Callable[[str], None],
    capsys: Capture,
) -> None:
    if script is not None:
        nvidia_smi(script)
    assert main(["devices", "--devices", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "GPU" in line or line.startswith("cuda")] == told
    several = len(told) > 1
    assert any("unless CUDA_DEVICE_ORDER=PCI_BUS_ID" in line for line in lines) is several
    unusable = several and bool(installed_runtime().without_cuda)
    assert any("has no CUDAExecutionProvider" in line for line in lines) is unusable
