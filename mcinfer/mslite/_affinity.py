"""Which cores threads are bound to: `thread_affinity_mode` and `thread_affinity_core_list`."""

import os
from collections.abc import Mapping
from pathlib import Path

from mcinfer.errors import InvalidInputError

BIG_FIRST = 1
MIDDLE_FIRST = 2


def core_capacities(folder: Path = Path("/sys/devices/system/cpu")) -> dict[int, int]:
    """How strong each core is that this process may use, in whatever unit the kernel has.

    ``cpu_capacity`` where the kernel knows it (Documentation/arch/arm64/cpu-capacity.rst), else the highest
    frequency in kHz; 0 for all where it knows neither.
    """
    capacities = {}
    for core in sorted(os.sched_getaffinity(0)):
        capacities[core] = 0
        for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
            try:
                capacities[core] = int((folder / f"cpu{core}" / name).read_text(encoding="ascii"))
                break
            except (OSError, ValueError):
                continue
    return capacities


def order_cores(capacities: Mapping[int, int], mode: int) -> list[int] | None:
    """The cores in the order in which threads are to take them; None where that is all the same.

    Args:
        capacities: By core.
        mode: 0, any; 1, big ones first, then middle, then little ones; 2, middle ones first, then little
            ones, then big ones. Where there are two kinds only, the weaker one is the middle.
    """
    if not mode:
        return None
    kinds = sorted(set(capacities.values()), reverse=True)
    if len(kinds) < 2:
        return None
    if mode == MIDDLE_FIRST:
        kinds = [*kinds[1:], kinds[0]]
    return [core for kind in kinds for core in sorted(capacities) if capacities[core] == kind]


def deal_cores(cores: list[int], threads: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Each worker's cores: `threads` of them, one worker after another; from the start again at the end."""
    return tuple(
        tuple(dict.fromkeys(cores[(w * threads + t) % len(cores)] for t in range(threads)))
        for w in range(workers)
    )


def check_core_list(cores: list[int], threads: int, workers: int) -> None:
    """Check a list of cores against what is to be bound.

    Raises:
        InvalidInputError: Another length than threads x workers, or a core that cannot be used here.
    """
    if len(cores) != threads * workers:
        raise InvalidInputError(
            f"cpu_thread_affinity_core_list: got {len(cores)} cores, expected threads x workers = "
            f"{threads} x {workers}"
        )
    usable = sorted(os.sched_getaffinity(0))
    absent = [core for core in cores if core not in usable]
    if absent:
        raise InvalidInputError(
            f"cpu_thread_affinity_core_list: got {absent}, expected some of {usable}"
        )
