"""``mcinfer devices``: the cores and GPUs of this machine, and the cores of each worker of a pool."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

from mcinfer.cli.doctor import installed_runtime, software_text
from mcinfer.cli.options import DevicesOption
from mcinfer.cli.progress import counted
from mcinfer.config import (
    CARD_KINDS,
    CoreShare,
    Device,
    automatic_workers,
    parse_devices,
    share_cores,
)
from mcinfer.errors import EngineError, InvalidInputError
from mcinfer.machine import (
    Gpu,
    core_siblings,
    cores_near,
    cpu_quota,
    driver_cuda_version,
    format_core_list,
    gpu_order_doubt,
    gpus,
    mps_folder,
    numa_nodes,
    whole_cpus,
)


def devices(devices: DevicesOption = None) -> None:
    """The cores and GPUs of this machine, and the cores of each worker of a pool."""
    cores, cpus = sorted(os.sched_getaffinity(0)), whole_cpus()
    parsed = parse_devices(devices, cpus)
    shares = share_cores(parsed, cores, cpus=cpus, near=cores_near(parsed))
    try:
        found, why = gpus(), ""
    except OSError as exc:
        found, why = (), f"no GPU was found: {exc}"
    for share in shares.values():
        if isinstance(share, InvalidInputError):
            raise share
    for device in parsed:
        if device.kind in CARD_KINDS and device.index >= len(found):
            why = why or f"the last device that was found is {device.kind}:{len(found) - 1}"
            raise InvalidInputError(f"device {device} does not exist: {why}")
    default = counted(automatic_workers(cpus), "worker")
    print(f"{counted(len(cores), 'usable core')}: {format_core_list(cores)}; by default {default}")
    for line in (*_cpu_lines(cores), *_gpu_lines(found, why)):
        print(line)
    for index, device in enumerate(parsed):
        print(f"worker {index}: {_share_text(device, shares.get(index))}")


def _cpu_lines(cores: list[int]) -> list[str]:
    lines = []
    sockets, physical = core_siblings()
    if physical:
        belong = "belongs" if len(cores) == 1 else "belong"
        place = f"{counted(physical, 'physical core')} of {counted(sockets, 'socket')}"
        lines.append(f"  {belong} to {place}")
    nodes = numa_nodes().items()
    lines += [f"  NUMA node {node}: {format_core_list(mine)}" for node, mine in nodes if mine]
    return [*lines, f"  CPU quota: {quota_text(cpu_quota(), len(cores))}"]


def quota_text(quota: float | None, cores: int) -> str:
    """A quota of CPUs' worth of time, and what is left by it of so many cores."""
    if quota is None:
        return "none"
    threads = counted(max(1, int(quota)), "thread")
    left = f"{threads} at a time" if quota < cores else "no fewer than there are cores"
    return f"{quota:g} CPUs, {left}"


def _gpu_lines(found: Sequence[Gpu], why: str) -> Iterator[str]:
    if not found:
        yield why
        return
    yield from map(str, found)
    yield f"  {software_text(found[0].driver, driver_cuda_version(), mps_folder())}"
    if doubt := gpu_order_doubt(len(found)):
        yield f"  {doubt}"
    with suppress(EngineError):
        if text := installed_runtime().without_cuda:
            yield f"  {text}"


def _share_text(device: Device, share: CoreShare | InvalidInputError | None) -> str:
    if not isinstance(share, CoreShare):
        return f"{device}, not pinned to cores"
    cores = f"core{'s' if len(share.cores) > 1 else ''} {format_core_list(share.cores)}"
    threads = counted(share.threads or len(share.cores), "thread")
    return f"{device}, {cores}{', shared' if share.shared else ''}, {threads}"
