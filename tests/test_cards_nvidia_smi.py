"""The list of GPUs, from a stand-in for ``nvidia-smi``."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mcinfer.cards.nvidia_smi import _GPU_FIELDS, Gpu, gpus, visible_gpus

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
    assert [*visible_gpus([H200, OTHER], chosen)] == expected


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
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvidia_smi(SMI)
    for bus, node in (("0000:3b:00.0", "1"), ("0000:d8:00.0", "-1")):
        device = tmp_path / "sys/bus/pci/devices" / bus
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n", encoding="ascii")
    first, second, third = gpus(root=tmp_path)
    assert first == Gpu(
        index=0,
        uuid="GPU-a",
        name=f"--query-gpu={_GPU_FIELDS}",
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
    assert gpus() == (replace(second, index=0),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(OSError, match="CUDA_VISIBLE_DEVICES='' leaves none of 3"):
        gpus()


def test_driver_that_fails_is_quoted(nvidia_smi: Callable[[str], None]) -> None:
    with pytest.raises(FileNotFoundError, match="there is no nvidia-smi"):
        gpus()
    nvidia_smi("exit 0")
    with pytest.raises(OSError, match="nvidia-smi names none"):
        gpus()
    nvidia_smi("echo cannot talk to\necho the driver; exit 9")
    with pytest.raises(OSError, match="nvidia-smi: cannot talk to the driver"):
        gpus()
    nvidia_smi("exit 9")
    with pytest.raises(OSError, match="nvidia-smi: status 9"):
        gpus()


def test_driver_that_hangs_is_not_waited_for(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi("while true; do :; done")
    with pytest.raises(TimeoutError, match=r"nvidia-smi gave no answer in 0\.05 s"):
        gpus(0.05)
