"""Descriptors: packets that carry them between processes, and one that any thread can make readable.

A packet with descriptors goes over a socket of `SOCK_SEQPACKET`, so that they stay together (unix(7)).
"""

import errno
import os
import socket
import struct
from collections.abc import Sequence

from mcinfer.errors import ProtocolError

_DESCRIPTOR = struct.Struct("=i")
_MAX_DESCRIPTORS = 4
_RIGHTS_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _DESCRIPTOR.size)
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
    connection: socket.socket, most_bytes: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """Receive one packet, as much of it as there is room for.

    Args:
        connection: Where from.
        most_bytes: Room for its bytes.
        flags: As of recvmsg(2), beside those that this needs.

    Returns:
        Its bytes, none if the other side is gone; descriptors, which are the caller's from now on; and
        ``MSG_TRUNC`` or ``MSG_CTRUNC``, or both, where bytes or descriptors were cut off.

    Raises:
        OSError: The connection was reset, or nothing is there and it does not block.
    """
    # Not socket.recv_fds: it drops its flags likewise, and processes that are started later would
    # inherit the descriptors.
    data, rights, said, _ = connection.recvmsg(
        most_bytes, _RIGHTS_BYTES, flags | socket.MSG_CMSG_CLOEXEC
    )
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
            # Those that came did not all fit into this process's table (unix(7)).
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise ProtocolError(
            f"got a packet of more than {most_bytes} bytes or {_MAX_DESCRIPTORS} descriptors"
        )
    return data, descriptors


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in descriptors:
        os.close(fd)


class WakeUp:
    """An eventfd (eventfd(2)) that lives as long as this object.

    A finalizer may call `set` at any moment, also one that runs after this object's own, in a cycle that is
    collected: then it does nothing, and never writes to a descriptor whose number has passed to another file.

    Attributes:
        fd: To poll for reading; -1 once it is closed.
    """

    __slots__ = ("__weakref__", "fd")

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: No descriptor is left.
        """
        self.fd = -1
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        """Close it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def set(self) -> None:
        """Make it readable. Takes no lock and never waits."""
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make it unreadable; the thread that saw it readable calls this."""
        os.eventfd_read(self.fd)
