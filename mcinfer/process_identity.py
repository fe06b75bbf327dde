"""What tells one process from another that had, or has, the same number.

Pids are used again: a process is one pid and one start time. And a pid means nothing outside its pid
namespace.
"""

import os
from pathlib import Path

_STATE, _USER_TIME, _SYSTEM_TIME, _START_TIME = (
    3,
    14,
    15,
    22,
)  # fields as proc_pid_stat(5) counts them
_FIRST_AFTER_NAME = 3
_ENDED = "ZXx"


def _field(pid: int, number: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # Permission is what a /proc that hides other users' processes (hidepid) refuses with.
        return None
    return text.rpartition(")")[2].split()[number - _FIRST_AFTER_NAME]


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process.

    One that has ended and that its parent has not waited for yet still is one.

    Raises:
        OSError: It cannot be found out: no descriptor is left.
    """
    text = _field(pid, _START_TIME)
    return None if text is None else int(text)


def cpu_time(pid: int) -> int:
    """What a process has had of the processors, in clock ticks; 0 if there is no such process.

    Raises:
        OSError: As of `start_time`.
    """
    return sum(int(_field(pid, number) or 0) for number in (_USER_TIME, _SYSTEM_TIME))


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or nothing of it but what its parent has to wait for.

    Raises:
        OSError: As of `start_time`.
    """
    state = _field(pid, _STATE)
    return state is None or state in _ENDED


def is_own_user_known() -> bool:
    """Whether this process's user has a number in its user namespace (user_namespaces(7)).

    One that has none is seen as the overflow user, and so is everybody else who has none.

    Raises:
        OSError: It cannot be found out.
    """
    uid = os.geteuid()
    for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines():
        first, _, count = map(int, line.split())
        if first <= uid < first + count:
            return True
    return False


def pid_namespace() -> int:
    """The number of the pid namespace that this process is in (pid_namespaces(7))."""
    return os.stat("/proc/self/ns/pid").st_ino
