"""A private folder in which to bind a master's listening socket, for a moment.

A Unix socket gets its address by a path. mcinfer removes this path and its folder as soon as the socket is
bound. The socket and a *handle* to its file (O_PATH of open(2)) remain. A process that inherits the handle
connects through ``/proc/self/fd``; other processes have no address, and a crash leaves nothing behind.

The folder is in a place that no other user can change: a user who can rename folders there could redirect
workers to another socket. All operations go through the folder's descriptor, so another folder cannot take
its place.
"""

import os
import secrets
import socket
import stat
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_WAITING = 4096
"""Connections that are not accepted yet; the system may allow fewer (net.core.somaxconn)."""


def _places() -> list[Path]:
    """Where folders may lie, first choice first."""
    places = [os.environ.get("XDG_RUNTIME_DIR")]
    with suppress(FileNotFoundError):  # it finds no folder to write to
        places.append(tempfile.gettempdir())
    places.append("/tmp")  # noqa: S108 the last resort; its owner and mode are checked
    return [Path(place) for place in dict.fromkeys(places) if place]


class RuntimeFolder:
    """A folder of mode 0700 in `place`, open as `fd`; a context manager that removes it.

    Raises:
        OSError: No place can be used; the text says for each place why.
    """

    def __init__(self) -> None:
        self._name = f"mcinfer-{secrets.token_hex(8)}"
        faults: list[str] = []
        failure = OSError()
        for place in _places():
            try:
                self._make(place)
            except OSError as exc:
                failure = exc
                faults.append(f"{place}: {exc.strerror}")
                continue
            self.place = place
            return
        raise OSError(failure.errno, f"no place for a runtime folder: {'; '.join(faults)}")

    def _make(self, place: Path) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with ExitStack() as opened:
            place_fd = os.open(place, flags)
            opened.callback(os.close, place_fd)
            _check_place(os.fstat(place_fd))
            os.mkdir(self._name, 0o700, dir_fd=place_fd)
            opened.callback(self._remove, place_fd)
            self.fd = os.open(self._name, flags | os.O_NOFOLLOW, dir_fd=place_fd)
            opened.callback(os.close, self.fd)
            _check_folder(os.fstat(self.fd))
            self._opened = opened.pop_all()

    def _remove(self, place_fd: int) -> None:
        with suppress(OSError):  # it was removed or replaced meanwhile
            os.rmdir(self._name, dir_fd=place_fd)

    def listen(self) -> tuple[socket.socket, int]:
        """A listening socket, whose path is removed at once, and the handle by which to connect.

        The caller owns both.

        Raises:
            OSError: The system has no descriptor left.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(f"/proc/self/fd/{self.fd}/s")
            try:
                listener.listen(_MAX_WAITING)
                handle = os.open("s", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
            finally:
                os.unlink("s", dir_fd=self.fd)
        except OSError:
            listener.close()
            raise
        return listener, handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def _check_place(info: os.stat_result) -> None:
    """Raise `PermissionError` unless only this user, and root, can rename this user's files there."""
    shared = info.st_mode & _OTHERS_WRITE and not info.st_mode & stat.S_ISVTX
    if shared or info.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            1,
            f"other users can change it (user {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}), "
            f"expected user {os.geteuid()} or 0, and not writable by others unless sticky",
        )


def _check_folder(info: os.stat_result) -> None:
    """Raise `PermissionError` unless the new folder is this user's, and closed to others."""
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o777 != 0o700:
        raise PermissionError(
            1,
            f"the new folder is of user {info.st_uid} and has mode {stat.S_IMODE(info.st_mode):04o}, "
            f"expected {os.geteuid()} and 0700",
        )
