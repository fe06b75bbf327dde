"""The folder of a master's socket: mode 0700, gone when the master is closed, swept after a crash.

Its name says whose it is: the process id namespace, the pid, and the process's start time, since pids
are used again. `ipc://` paths end at 107 bytes (unix(7)), so names are short.
"""

import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from mcinfer.process_identity import pid_namespace, start_time

_PREFIX = "mcinfer-"
_MOST_PATH_BYTES = 107
_LONGEST_SOCKET = "s99999999"


def _parents() -> list[Path]:
    """Where folders may lie, first choice first."""
    places = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]  # noqa: S108 the last resort; the folder itself is 0700 and its name not guessed
    return [Path(place) for place in places if place]


def _sweep(parent: Path) -> None:
    """Remove the folders of masters that are dead."""
    for folder in parent.glob(f"{_PREFIX}*"):
        parts = folder.name.removeprefix(_PREFIX).split("-")
        try:
            namespace, pid, start = int(parts[0], 16), int(parts[1]), int(parts[2])
            info, now = folder.lstat(), start_time(pid)
        except (ValueError, IndexError, OSError):
            continue
        ours = info.st_uid == os.getuid() and stat.S_ISDIR(info.st_mode)
        if ours and namespace == pid_namespace() and now != start:
            shutil.rmtree(folder, ignore_errors=True)


class RuntimeFolder:
    """A master's folder."""

    def __init__(self) -> None:
        """Sweep what dead masters left, and make a new folder.

        Raises:
            OSError: No place for it can be written to, or all paths are too long for a socket.
        """
        pid = os.getpid()
        name = f"{_PREFIX}{pid_namespace():x}-{pid}-{start_time(pid)}-{secrets.token_hex(3)}"
        failure: OSError | None = None
        for parent in _parents():
            path = parent / name
            if len(os.fsencode(path / _LONGEST_SOCKET)) > _MOST_PATH_BYTES:
                failure = OSError(f"{path} is too long for a socket's path")
                continue
            try:
                path.mkdir(mode=0o700)
            except OSError as exc:
                failure = exc
                continue
            _sweep(parent)
            self._path = path
            return
        raise failure or OSError("no place for a runtime folder")

    def endpoint(self, start: int) -> str:
        """The ZeroMQ address in it where the worker of that start, counted from 1, is to connect."""
        return f"ipc://{self._path}/s{start}"

    def remove(self) -> None:
        """Remove it with what is in it."""
        try:
            self._path.rmdir()  # which takes no descriptor
        except OSError:
            shutil.rmtree(self._path, ignore_errors=True)
