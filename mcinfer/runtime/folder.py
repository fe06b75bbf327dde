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
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_WAITING = 4096
"""Connections that are not accepted yet; the system may allow fewer (net.core.somaxconn)."""


def _places() -> list[Path]:
    """Where folders may lie, first choice first."""
    places = [os.environ.get("XDG_RUNTIME_DIR")]
    with suppress(FileNotFoundError):  # it finds no folder to write to
        places.append(tempfile.gettempdir())
    places.append("/tmp")  # noqa: S108 the last resort; what it is like is looked at
    return [Path(place) for place in dict.fromkeys(places) if place]


class RuntimeFolder:
    """A folder of mode 0700; a context manager that removes it.

    Attributes:
        place: What it lies in.
        fd: The folder itself.
    """

    def __init__(self) -> None:
        """Make it in the first place that will do.

        Raises:
            OSError: There is none; the text says of each what is wrong with it.
        """
        self._name = f"mcinfer-{secrets.token_hex(8)}"
        faults: list[str] = []
        failure = OSError("no place for a runtime folder")
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
        """Make and hold it.

        Raises:
            OSError: It cannot be made there, or others could change it.
        """
        self._place_fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_place(os.fstat(self._place_fd))
            os.mkdir(self._name, 0o700, dir_fd=self._place_fd)
            try:
                self.fd = os.open(
                    self._name,
                    os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                    dir_fd=self._place_fd,
                )
                try:
                    _check_folder(os.fstat(self.fd))
                except OSError:
                    os.close(self.fd)
                    raise
            except OSError:
                with suppress(OSError):
                    os.rmdir(self._name, dir_fd=self._place_fd)
                raise
        except OSError:
            os.close(self._place_fd)
            raise

    def listen(self) -> tuple[socket.socket, int]:
        """A listening socket in it, which is removed at once, and the handle by which to connect.

        Both are the caller's from now on.

        Raises:
            OSError: The system cannot.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            os.rmdir(self._name, dir_fd=self._place_fd)
        finally:
            os.close(self.fd)
            os.close(self._place_fd)


def _check_place(info: os.stat_result) -> None:
    """Raise `PermissionError` unless only this user, and root, can rename what this user puts there."""
    shared = info.st_mode & _OTHERS_WRITE and not info.st_mode & stat.S_ISVTX
    if shared or info.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            1,
            f"other users can change it (user {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}), "
            f"expected user {os.geteuid()} or 0, and not writable by others unless sticky",
        )


def _check_folder(info: os.stat_result) -> None:
    """Raise `PermissionError` unless it is what was made: this user's, and closed to others."""
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o777 != 0o700:
        raise PermissionError(
            1,
            f"what was made there is of user {info.st_uid} and has mode {stat.S_IMODE(info.st_mode):04o}, "
            f"expected {os.geteuid()} and 0700",
        )
