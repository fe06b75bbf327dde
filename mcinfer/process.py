"""Child processes: starting them, identifying them, ending them with their parent, and their stacks.

Nothing heavy is imported here: a child starts to watch its parent before its long imports.
"""

import faulthandler
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mcinfer.errors import BuildError
from mcinfer.private import new_memory

# Starting a module of this package as a process, which gets its import path over its own channel.

_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)
_QUIET = {"ORT_DISABLE_TELEMETRY": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Defaults, which the user's variables override. ONNX Runtime from 1.29 on sends telemetry by default (its
docs/Privacy.md). mcinfer does not use NumPy's linear algebra, whose threads were a third of the CPU time of a
start."""


def give_back_freed_memory() -> None:
    """Give memory that was freed back to the system: glibc keeps it (malloc_trim(3))."""
    import ctypes  # not before a child watches its parent

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def without_telemetry() -> None:
    """Let ONNX Runtime send no telemetry from this process, unless a variable of the user's says otherwise.

    Call it before the runtime's first import, which starts a thread for telemetry: a process that is forked
    later lacks the thread, and waits for it at its exit without an end (1.32).
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", _QUIET["ORT_DISABLE_TELEMETRY"])


_REPLACED = (
    ("_thread", "start_new_thread"),
    ("select", "select"),
    ("socket", "socket"),
    ("subprocess", "Popen"),
)
"""Functions that ``monkey.patch_all()`` replaces, of modules with which threads wait and start processes."""


def check_threads(what: str) -> None:
    """Raise `BuildError` where the threads that `what` needs would never run, or are started no more.

    gevent and eventlet make greenlets of threads, which wait for ever for what another thread of the system
    does. The interpreter ends its threads before it calls the handlers of `atexit`.
    """
    for module, name in _REPLACED:
        found = getattr(sys.modules.get(module), name, None)
        patch = getattr(found, "__module__", "").partition(".")[0]
        if patch in ("gevent", "eventlet"):
            raise BuildError(
                f"{patch} has replaced {module}.{name} of this process (monkey patching), and {what} needs "
                f"Python's own: use it in a process without this patch, or {_INLINE}"
            )
    main = threading.main_thread()
    if threading.current_thread() is main and not main.is_alive():
        raise BuildError(
            f"{what} cannot be started in an atexit handler, when the interpreter ends its threads: start it "
            f"before, or {_INLINE}"
        )


_INLINE = "use an inline session, mcinfer.ort.InferenceSession(model) without devices=, which needs no thread"


def end(status: int) -> NoReturn:
    """End this process as `sys.exit` does, but without a search for garbage in all that is imported.

    That search takes a sixth of the processor time from a worker's start to its end.
    """
    gc.freeze()
    sys.exit(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What all children of a master inherit, recorded at its start; all paths are absolute.

    `pythonpath` is the variable, or None; the working folder may be gone by now.
    """

    path: list[str]
    pythonpath: str | None
    folder: str

    @classmethod
    def now(cls) -> "Inherited":
        pythonpath = os.environ.get("PYTHONPATH")
        if pythonpath:  # an empty entry is the working folder, but an empty variable is not
            pythonpath = os.pathsep.join(_absolute(pythonpath.split(os.pathsep)))
        folder = [*_absolute([""]), "/"][0]
        return cls(path=import_path(), pythonpath=pythonpath, folder=folder)

    def folder_now(self) -> str:
        """The working folder, or the root if it is gone."""
        return self.folder if os.access(f"{self.folder}/.", os.X_OK) else "/"


def import_path() -> list[str]:
    """`sys.path`, all absolute."""
    return _absolute(sys.path)


def _absolute(entries: Iterable[str]) -> list[str]:
    """The entries of an import path, without relative ones if the working folder is gone."""
    found = []
    for entry in entries:
        with suppress(OSError):
            found.append(os.path.abspath(entry))
    return found


# A frozen program (PyInstaller sets `sys.frozen`) has no Python: its `sys.executable` runs the program again,
# whatever follows. So its children are the program once more, until its `import mcinfer`.
_FROZEN_CHILD = "--mcinfer-child"
_FROZEN_MARK = "MCINFER_CHILD"
"""Set for a child of a frozen program: one that lost its arguments must not be the program once more."""

STRAY = 64
"""Exit status of a child of a frozen program that cannot be one: EX_USAGE of sysexits.h."""

STRAY_REASON = (
    "a frozen program has to import mcinfer first thing, in its main thread, and its executable has to hand "
    "its arguments on (docs/troubleshooting.md)"
)


def _is_frozen() -> bool:
    return bool(getattr(sys, "frozen", False))


def command(how: str, what: str, *arguments: str) -> list[str]:
    """The command of a child, with `environment`: ``"-m"`` and a module, or ``"-c"`` and a program.

    Raises:
        FileNotFoundError: `sys.executable` names nothing.
    """
    if not sys.executable:
        got = repr(sys.executable)
        raise FileNotFoundError(
            f"sys.executable: got {got}, expected the path of a Python interpreter"
        )
    return [sys.executable, _FROZEN_CHILD if _is_frozen() else "-P", how, what, *arguments]


def environment() -> dict[str, str]:
    """This process's variables, and what the child needs to find this package."""
    mark = {_FROZEN_MARK: "1"} if _is_frozen() else {}
    return {**_QUIET, **os.environ, **mark, "PYTHONPATH": _PACKAGE_PARENT}


def run_as_frozen_child() -> None:
    """If this process is a child of a frozen program, do what `command` says, and exit: `import mcinfer`."""
    if os.environ.pop(_FROZEN_MARK, None) is None:
        return
    in_main_thread = threading.current_thread() is threading.main_thread()
    if sys.argv[1:2] != [_FROZEN_CHILD] or not in_main_thread:
        with suppress(OSError):
            os.write(2, f"mcinfer: {STRAY_REASON}\n".encode())
        os._exit(STRAY)  # no exception, which the program may catch
    import runpy

    how, what, *arguments = sys.argv[2:]
    sys.argv[:] = [what, *arguments]
    # What is under way is an import of the package, for which an import in another thread would wait.
    del sys.modules["mcinfer"]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(what, {"__name__": "__main__"})  # noqa: S102 as `python -c`
    end(0)


# Identity: pids are reused, so a pid and a start time identify a process.

# Fields as proc_pid_stat(5) counts them.
STATE, _USER_TIME, _SYSTEM_TIME, _START_TIME, _EXIT_CODE = 3, 14, 15, 22, 52
_FIRST_AFTER_NAME = 3


def field_of(pid: int, number: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # PermissionError: /proc hides other users' processes (hidepid).
        return None
    return text.rpartition(")")[2].split()[number - _FIRST_AFTER_NAME]


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it does not exist.

    A process that has ended exists until its parent has waited for it. `OSError`: no descriptor is left.
    """
    text = field_of(pid, _START_TIME)
    return None if text is None else int(text)


def cpu_time(pid: int) -> int:
    """The CPU time of a process, in clock ticks; 0 if it does not exist. Raises as `start_time` does."""
    return sum(int(field_of(pid, number) or 0) for number in (_USER_TIME, _SYSTEM_TIME))


def how_it_ended(pid: int) -> str:
    """How a process that has ended did so, in words; only a zombie has a status."""
    if field_of(pid, STATE) != "Z":
        return "has ended"
    return describe_exit(os.waitstatus_to_exitcode(int(field_of(pid, _EXIT_CODE) or 0)))


def describe_exit(code: int) -> str:
    """A process's end in words; a negative code is the number of the signal that killed it."""
    names = {known.value: known.name for known in signal.Signals}
    signaled = names.get(-code, f"signal {-code}")
    return f"exited with status {code}" if code >= 0 else f"killed by {signaled}"


# Ending with the parent.

ORPHANED = 70
"""Exit status of a process whose parent is gone: EX_SOFTWARE of sysexits.h."""


def watch_parent(pid: int, channel: int) -> None:
    """Start a daemon thread that ends this process as soon as its parent is gone.

    The parent's pidfd becomes readable when it ends, even by SIGKILL. The channel, never read, hangs up when
    no process holds its other end. (Forked children of the parent may hold it, so this alone is not enough.)
    """
    try:
        parent = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(ORPHANED)
    # The parent may have died before, and another process may have its pid now.
    if os.getppid() != pid:
        os._exit(ORPHANED)
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(channel, 0)  # POLLHUP and POLLERR are always reported

    def watch() -> None:
        poll.poll()
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="mcinfer-watch-master", daemon=True).start()


def becomes_readable(fd: int, seconds: float | None = None) -> bool:
    """Wait until a descriptor is readable, for at most so many seconds; whether it is."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


# Stacks: the interpreter's own handler (faulthandler) writes them to shared memory when the worker crashes or
# gets a signal. It needs neither the interpreter's lock nor memory.

REQUEST = signal.SIGURG
"""The signal that asks for the stacks: processes without a handler ignore it, and few programs use it."""

_BYTES = 256 << 10


class StackReport:
    """The master's side: a memfd of fixed size. Each side closes its own descriptor."""

    def __init__(self) -> None:
        self.fd = new_memory("mcinfer-stacks", _BYTES)

    def read(self) -> str:
        """The stacks so far; empty if there are none."""
        written = os.pread(self.fd, _BYTES, 0).partition(b"\0")[0]
        return written.decode(errors="replace").strip()

    def close(self) -> None:
        os.close(self.fd)


def write_stacks_to(fd: int) -> None:
    """The worker's side: crashes and `REQUEST` write to this descriptor, now owned by the process."""
    os.set_inheritable(fd, False)
    faulthandler.enable(fd)
    faulthandler.register(REQUEST, file=fd, all_threads=True)
