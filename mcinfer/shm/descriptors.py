"""Packets that carry descriptors between processes, and a descriptor that any thread can make readable.

The sockets are `SOCK_SEQPACKET`, so that bytes and descriptors stay together (unix(7)).
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Sequence

from mcinfer.errors import ProtocolError

CREDENTIALS = struct.Struct("=iII")
"""struct ucred: pid, user id, group id."""

eventfd_write = ctypes.PyDLL(None).eventfd_write
"""eventfd_write(3), which keeps the interpreter's lock: `os.eventfd_write` hands it to the thread that this
wakes, and waits for it. It sets no error."""
eventfd_write.argtypes = [ctypes.c_int, ctypes.c_uint64]

_DESCRIPTOR = struct.Struct("=i")
_MAX_DESCRIPTORS = 4
_CUT_OFF = socket.MSG_TRUNC | socket.MSG_CTRUNC


def send(connection: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one packet, without waiting; the sender keeps its own descriptors.

    Raises:
        OSError: The other side is gone, or does not read (BlockingIOError).
    """
    # Not socket.send_fds: in Python 3.11 it drops its flags, and would block.
    packed = b"".join(map(_DESCRIPTOR.pack, descriptors))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if packed else []
    connection.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def take_packet(
    connection: socket.socket,
    most_bytes: int,
    flags: int = 0,
    most_descriptors: int = _MAX_DESCRIPTORS,
) -> tuple[bytes, list[int], int]:
    """Receive one packet; `flags` are of recvmsg(2).

    Returns:
        Its bytes, none if the other side is gone; descriptors, which are the caller's from now on; and
        ``MSG_TRUNC`` or ``MSG_CTRUNC``, or both, if bytes or descriptors were cut off.

    Raises:
        OSError: The connection was reset, or has no packet and does not block.
    """
    # Not socket.recv_fds: it drops its flags too, and processes that are started later would inherit
    # the descriptors.
    space = socket.CMSG_SPACE(most_descriptors * _DESCRIPTOR.size)
    data, rights, said, _ = connection.recvmsg(most_bytes, space, flags | socket.MSG_CMSG_CLOEXEC)
    descriptors = [
        fd
        for level, kind, packed in rights
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _DESCRIPTOR.iter_unpack(packed)
    ]
    return data, descriptors, said & _CUT_OFF


def receive(connection: socket.socket, most_bytes: int) -> tuple[bytes, list[int]]:
    """Receive one whole packet.

    Returns:
        Its bytes, none if the other side is gone, and descriptors, which are the caller's from now on.

    Raises:
        ProtocolError: It has more bytes than that, or more than four descriptors; none is left open.
        OSError: The connection was reset, or no descriptor is left in this process.
    """
    data, descriptors, cut_off = take_packet(connection, most_bytes)
    if cut_off:
        close_all(descriptors)
        if not cut_off & socket.MSG_TRUNC and len(descriptors) < _MAX_DESCRIPTORS:
            # The descriptors did not all fit into this process's table (unix(7)).
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise ProtocolError(
            f"got a packet of more than {most_bytes} bytes or {_MAX_DESCRIPTORS} descriptors"
        )
    return data, descriptors


def close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """The pid and the user id of the other side, as of its connect or listen; pid 0 if it has none here."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(packed)
    return pid, uid


class WakeUp:
    """An eventfd (eventfd(2)) that lives as long as this object; `fd` is -1 once it is closed.

    A finalizer may call `set` at any moment. After this object's own finalizer, as in a cycle that is
    collected, `set` does nothing: the number of the descriptor may belong to another file by then.
    """

    __slots__ = ("__weakref__", "fd")

    def __init__(self) -> None:
        self.fd = -1
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def set(self) -> None:
        """Make it readable. Takes no lock and never waits."""
        if self.fd >= 0:
            eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make it unreadable; the thread that saw it readable calls this."""
        os.eventfd_read(self.fd)
