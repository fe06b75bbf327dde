"""What a process has, memory, descriptors, threads and children, to be compared with what it had."""

import ctypes
import gc
import os
from dataclasses import dataclass

import psutil

from mcinfer import Statistics

_LARGE_BYTES = 1 << 20

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
"""Of mallopt(3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What the master's process has.

    Attributes:
        own_bytes: Resident memory that it shares with no file and no other process.
        rss_bytes: All resident memory, tensors and libraries, too.
        pss_bytes: The same, what is shared only in part.
        tensor_bytes: Shared memory in use for tensors.
        reserved_bytes: Shared memory that is reserved for them.
        descriptors: Without those of the shared memory, which grows and shrinks by blocks.
        threads: Of all kinds.
        processes: Its children.
    """

    own_bytes: int
    rss_bytes: int
    pss_bytes: int
    tensor_bytes: int
    reserved_bytes: int
    descriptors: int
    threads: int
    processes: int


def holdings(statistics: Statistics | None) -> Holdings:
    """What this process has now, with a pool of those figures or none."""
    process = psutil.Process()
    memory = process.memory_full_info()
    return Holdings(
        own_bytes=memory.rss - memory.shared,
        rss_bytes=memory.rss,
        pss_bytes=memory.pss,
        tensor_bytes=0 if statistics is None else statistics.memory_used_bytes,
        reserved_bytes=0 if statistics is None else statistics.memory_bytes,
        descriptors=_descriptors(),
        threads=len(os.listdir("/proc/self/task")),
        processes=len(process.children(recursive=True)),
    )


def _descriptors() -> int:
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}") != "/memfd:mcinfer (deleted)"
        except OSError:
            continue  # that of the listing itself
    return count


def keep_no_freed_memory() -> None:
    """Have large arrays mapped one by one, and one heap for all threads, which can be trimmed.

    glibc would raise its threshold with the arrays that are freed, and keep as much in a heap per thread.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def tidy() -> None:
    """Let go of garbage, and give the pages of freed memory back, so that what is left is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
