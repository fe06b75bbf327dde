"""The memory and processors that this process may use, within the limits of its control groups.

Functions that read files take the root folder, which tests replace.
"""

import errno
import os
import re
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mcinfer.errors import spans

_ROOT = Path("/")

_EXCEEDS_LIMITS = 1 << 24 | 1 << 21  # CAP_SYS_RESOURCE and CAP_SYS_ADMIN (capabilities(7))

# Memory and processors.


def usable_memory(root: Path = _ROOT) -> int:
    """Bytes of memory: the machine's, or the tightest limit of this process's control groups."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memory_limit(root)
    return total if limit is None else min(total, limit)


def memory_limit(root: Path = _ROOT) -> int | None:
    """Bytes that the tightest control group allows (``memory.max``, cgroup-v2.rst), or None."""
    names = ("memory.max", "memory.limit_in_bytes")
    found = [_read(folder / name) for folder in _groups("memory", root) for name in names]
    limits = [int(text) for text in found if text.isdecimal()]
    return min((limit for limit in limits if limit), default=None)


def oom_kills(root: Path = _ROOT) -> int:
    """How many processes of this process's control group the out-of-memory killer has ended; 0 if unknown.

    ``oom_kill`` in ``memory.events`` (cgroup-v2.rst), or in ``memory.oom_control`` of version 1.
    """
    names = ("memory.events", "memory.oom_control")
    texts = (_read(folder / name) for folder in _groups("memory", root) for name in names)
    found = (re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) for text in texts)
    return next((int(match[1]) for match in found if match), 0)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that the tightest control group allows; None for no limit.

    ``docker run --cpus 1.5`` and a pod's ``limits.cpu`` are such quotas: they leave all cores visible
    (``cpu.max``, admin-guide/cgroup-v2.rst; version 1: scheduler/sched-bwc.rst).
    """
    given = []
    for folder in _groups("cpu", root):
        older = [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        given += [_read(folder / "cpu.max").split(), older]
    # No limit is "max 100000", or a quota of -1 in version 1.
    limits = [pair for pair in given if len(pair) == 2 and all(map(str.isdecimal, pair))]
    return min((int(quota) / int(period) for quota, period in limits if int(period)), default=None)


def usable_cpus(root: Path = _ROOT) -> float:
    """CPUs' worth of time for this process: its cores, or the quota if that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = cpu_quota(root)
    return cores if quota is None else min(cores, quota)


def whole_cpus(root: Path = _ROOT) -> int:
    """How many threads can run all the time: `usable_cpus` rounded down, at least 1.

    One more thread would use up the quota before the end of each period, and then all threads stand still.
    """
    return max(1, int(usable_cpus(root)))


def task_limit(root: Path = _ROOT) -> tuple[int, int] | None:
    """Limit and number of threads of the group with the least room (``pids.max``, cgroup-v2.rst), or None."""
    names, folders = ("pids.max", "pids.current"), _groups("pids", root)
    pairs = [[_read(folder / name) for name in names] for folder in folders]
    limits = [(int(a), int(b)) for a, b in pairs if a.isdecimal() and b.isdecimal()]
    return min(limits, key=lambda limit: limit[0] - limit[1], default=None)


def user_task_limit(root: Path = _ROOT) -> tuple[int, int] | None:
    """Limit and number of threads of this user (RLIMIT_NPROC), or None if it is not limited.

    The kernel counts the threads of all processes of the real user, and lets root exceed the limit, as well
    as who may change such limits (getrlimit(2)).
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    match = re.search(r"^CapEff:\s*(\w+)", _read(root / "proc/self/status"), re.MULTILINE)
    exempt = match is not None and int(match[1], 16) & _EXCEEDS_LIMITS
    if most == resource.RLIM_INFINITY or os.getuid() == 0 or exempt:
        return None
    running = 0
    for process in (root / "proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == os.getuid():
                running += (process / "task").stat().st_nlink - 2  # a folder has one for each in it
    return most, running


def check_tasks(count: int, root: Path = _ROOT) -> None:
    """Raise `OSError` unless so many threads, or processes, can be started; it names the limit.

    Limits of control groups above a container's own are not seen from inside.
    """
    # To count this user's threads takes some milliseconds; those of all users are a file (proc_loadavg(5)).
    everyone = re.search(r"/(\d+)", _read(root / "proc/loadavg"))
    is_far = everyone and int(everyone[1]) + count <= resource.getrlimit(resource.RLIMIT_NPROC)[0]
    for name, limit in (
        ("pids.max of this container (control group)", task_limit(root)),
        ("ulimit -u (RLIMIT_NPROC) of this user", None if is_far else user_task_limit(root)),
    ):
        if limit is not None and count > limit[0] - limit[1]:
            most, running = limit
            raise OSError(
                errno.EAGAIN,
                f"{count} threads are needed and {max(0, most - running)} are left: {name} is {most}",
            )


def _groups(controller: str, root: Path) -> list[Path]:
    """The folders of this process's control group and its parents, for versions 1 and 2."""
    top = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").split("\n"):
        match = re.fullmatch(r"\d+:([^:]*):(.*)", line)
        if match is None:
            continue
        if match[1] == "":
            mounts = [top]
        elif controller in match[1].split(","):
            mounts = [top / controller, top / match[1]]  # the former may be a link
        else:
            continue
        for mount in mounts:
            group = mount / match[2].lstrip("/")
            folders += [place for place in (group, *group.parents) if place.is_relative_to(mount)]
            folders.append(mount)  # in a container the path may be one of the host's
    return [*dict.fromkeys(folders)]


# Cores.


def cpu_model(root: Path = _ROOT) -> str:
    """What the kernel calls the processor, or the architecture where it has no name (proc_cpuinfo(5))."""
    match = re.search(r"^model name\s*:\s*(.*\S)", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1] if match else os.uname().machine


def format_core_list(cores: Sequence[int]) -> str:
    """The cores in the kernel's format, ascending: ``0-3,8``."""
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in spans(cores))


def _read(path: Path) -> str:
    """A file's text, stripped; empty if it cannot be read."""
    try:
        return os.fsdecode(path.read_bytes()).strip()  # paths may have any bytes
    except (OSError, ValueError):
        return ""
