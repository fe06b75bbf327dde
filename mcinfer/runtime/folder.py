"""A private folder in which to bind a master's listening socket, for a moment.

A Unix socket gets its address by a path. mcinfer removes this path and its folder as soon as the socket is
bound. The socket and a *handle* to its file (O_PATH of open(2)) remain. A process that inherits the handle
connects through ``/proc/self/fd``; other processes have no address, and a crash leaves nothing behind.
"""

import os
import socket

from mcinfer.private import PrivateFolder

_MAX_WAITING = 4096
"""Connections that are not accepted yet; the system may allow fewer (net.core.somaxconn)."""


class RuntimeFolder(PrivateFolder):
    """A private folder, in ``$XDG_RUNTIME_DIR`` if that can be used."""

    def __init__(self) -> None:
        super().__init__(os.environ.get("XDG_RUNTIME_DIR"))

    def listen(self) -> tuple[socket.socket, int]:
        """A listening socket, whose path is removed at once, and the handle by which to connect.

        The caller owns both.

        Raises:
            OSError: The system has no descriptor left.
        """
        path = self.opened / "s"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(path))
            try:
                listener.listen(_MAX_WAITING)
                handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            finally:
                path.unlink()
        except OSError:
            listener.close()
            raise
        return listener, handle
