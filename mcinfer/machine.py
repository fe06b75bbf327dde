"""What of this machine this process may use: the limits of its control group count."""

from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def usable_memory() -> int:
    """Bytes of memory: the machine's, or what the tightest of this process's control groups allows.

    See the kernel's documentation of ``memory.max`` (admin-guide/cgroup-v2.rst) and, for version 1, of
    ``memory.limit_in_bytes`` (admin-guide/cgroup-v1/memory.rst).
    """
    limits = [_read_limit(path) for path in _limit_files(_read("/proc/self/cgroup"))]
    return min([psutil.virtual_memory().total, *(limit for limit in limits if limit)])


def _limit_files(groups: str) -> list[Path]:
    """The files that may hold a limit, of each group in ``/proc/self/cgroup`` and of its parents."""
    files = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = _CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = _CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        files += [folder / name for folder in (group, *group.parents) if folder.is_relative_to(top)]
        files.append(top / name)  # in a container the path may be one of the host's
    return files


def _read_limit(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
