"""Processes of this package: starting one, telling it from another, ending with its parent, its stacks.

Nothing heavy is imported here: a child begins to watch its parent before the imports that it may be deep in
when that goes.
"""

import faulthandler
import fcntl
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Starting: a module of this package as a process of its own, which gets the import path by its own channel.

_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)
_QUIET = {"ORT_DISABLE_TELEMETRY": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Unless the user says otherwise, no runtime sends anything anywhere: ONNX Runtime from 1.29 on does by
default (its docs/Privacy.md), and starts threads for it in every process. And NumPy's linear algebra, which
no part of mcinfer uses, starts no threads: they were a third of the CPU time of a start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What the children of a master get of it, also those that are started later, when it has gone elsewhere.

    Attributes:
        path: The import path, all absolute.
        pythonpath: The variable PYTHONPATH, likewise; None if it is not set.
        folder: The working folder, absolute; it may be gone by now.
    """

    path: list[str]
    pythonpath: str | None
    folder: str

    @classmethod
    def now(cls) -> "Inherited":
        """As it is at this moment."""
        pythonpath = os.environ.get("PYTHONPATH")
        if pythonpath:  # an empty one is none, while an empty entry is the working folder
            pythonpath = os.pathsep.join(_absolute(pythonpath.split(os.pathsep)))
        folder = [*_absolute([""]), "/"][0]
        return cls(path=import_path(), pythonpath=pythonpath, folder=folder)

    def folder_now(self) -> str:
        """The working folder, or the root where it is gone."""
        return self.folder if os.access(f"{self.folder}/.", os.X_OK) else "/"


def import_path() -> list[str]:
    """`sys.path` as a child needs it: all absolute."""
    return _absolute(sys.path)


def _absolute(entries: Iterable[str]) -> list[str]:
    """Entries of an import path; without relative ones where the working folder is gone."""
    found = []
    for entry in entries:
        with suppress(OSError):
            found.append(os.path.abspath(entry))
    return found


def command(module: str, *arguments: str) -> list[str]:
    """What to run."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """This process's variables, with what the child needs to find this package."""
    return {**_QUIET, **os.environ, "PYTHONPATH": _PACKAGE_PARENT}


# Identity: pids are used again, so a process is one pid and one start time.

_USER_TIME, _SYSTEM_TIME, _START_TIME = 14, 15, 22  # fields as proc_pid_stat(5) counts them
_FIRST_AFTER_NAME = 3


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


def is_own_user_known() -> bool:
    """Whether this process's user has a number in its user namespace (user_namespaces(7)).

    A user without a number appears as the overflow user, as do all other such users.

    Raises:
        OSError: It cannot be found out.
    """
    uid = os.geteuid()
    for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines():
        first, _, count = map(int, line.split())
        if first <= uid < first + count:
            return True
    return False


# Ending with the parent.

ORPHANED = 70
"""Exit status of a process whose parent is gone: EX_SOFTWARE of sysexits.h."""


def watch_parent(pid: int, channel: int) -> None:
    """End this process as soon as its parent is gone; the watching is done by a daemon thread.

    Args:
        pid: The parent's. Its pidfd becomes readable when it ends, also by SIGKILL.
        channel: A descriptor whose other end the parent holds: it hangs up when no process does any more. (A
            child that the parent forked may, so this alone is not enough.) It is never read.
    """
    try:
        parent = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(ORPHANED)
    # Without this a parent that died, and whose number was given to another, would be watched.
    if os.getppid() != pid:
        os._exit(ORPHANED)
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(channel, 0)  # POLLHUP and POLLERR come unasked

    def watch() -> None:
        poll.poll()
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="mcinfer-watch-master", daemon=True).start()


# Stacks: memory that a worker writes to when it crashes or is asked, and its master reads. The interpreter's
# own handler (faulthandler) writes them, and needs neither the interpreter's lock nor any memory for it.

REQUEST = signal.SIGURG
"""Asks for the stacks: a process without a handler ignores it, and few programs use it."""

_BYTES = 256 << 10


class StackReport:
    """The master's side: a sealed memfd of fixed size, to be given to one worker process.

    Attributes:
        fd: Its descriptor; each side has one of its own and closes it.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: No descriptor or memory is left.
        """
        self.fd = os.memfd_create("mcinfer-stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, _BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError:
            os.close(self.fd)
            raise

    def read(self) -> str:
        """What was written so far; empty if nothing was."""
        written = os.pread(self.fd, _BYTES, 0).partition(b"\0")[0]
        return written.decode(errors="replace").strip()

    def close(self) -> None:
        """Give the descriptor up."""
        os.close(self.fd)


def write_stacks_to(fd: int) -> None:
    """The worker's side: from now on crashes and `REQUEST` write to this descriptor, which is taken over."""
    os.set_inheritable(fd, False)
    faulthandler.enable(fd)
    faulthandler.register(REQUEST, file=fd, all_threads=True)
