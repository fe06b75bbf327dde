"""Shared memory of clients, for tensors that travel in no request (Triton's extension for shared memory).

A region is part of an object in POSIX shared memory (shm_overview(7)), which a client on this machine has
made and registers by its name. The client can cut it short at any time. So it is not mapped, where that would
end this process by SIGBUS, but read and written.

Ownership: the object is the client's. It is open here until its region is unregistered and no request has it.
"""

import os
import socket
import stat
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

from mcinfer.errors import InvalidInputError
from mcinfer.serve.documents import RegionStatus, Size, TensorParameters
from mcinfer.serve.models import RefusedError
from mcinfer.shm.descriptors import peer_credentials

_MAX_REGIONS = 1024
_FOLDER = "/dev/shm"  # noqa: S108 where shm_open(3) makes its objects


class _Open:
    """A descriptor, which is closed with its last reference."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)


@dataclass(frozen=True, slots=True)
class Region:
    """So many bytes from `offset` of an object: those of a region, or of a tensor in it."""

    key: str
    object: _Open
    offset: int
    size: int

    def part(self, given: TensorParameters) -> "Region":
        """The tensor that these parameters describe."""
        start, size = given.shared_memory_offset, given.shared_memory_byte_size
        if start + size > self.size:
            text = f"shared memory region '{self.key}' has {self.size} bytes"
            raise InvalidInputError(f"{text}, got offset {start} and byte size {size}")
        return replace(self, offset=self.offset + start, size=size)

    def read_into(self, memory: memoryview) -> None:
        """Fill memory of this size; `InvalidInputError` if the object has become shorter."""
        done = 0
        while done < self.size:
            count = os.preadv(self.object.fd, [memory[done:]], self.offset + done)
            if not count:
                raise InvalidInputError(f"shared memory region '{self.key}' has become shorter")
            done += count

    def read(self) -> bytes:
        """All of it; `InvalidInputError` if the object has become shorter."""
        memory = bytearray(self.size)
        self.read_into(memoryview(memory))
        return bytes(memory)

    def write(self, data: memoryview) -> None:
        """Write so many bytes or fewer; `InvalidInputError` if there is no room for them."""
        room = min(self.size, os.fstat(self.object.fd).st_size - self.offset)  # it must not grow
        if len(data) > room:
            text = f"shared memory size specified with the request for output ({room} bytes)"
            text = f"{text} should be at least {len(data)} bytes to hold the results"
            raise InvalidInputError(text).refusing(None)  # the request was accepted
        done = 0
        while done < len(data):
            done += os.pwritev(self.object.fd, [data[done:]], self.offset + done)


class Regions:
    """The regions that clients have registered, by name; `allowed` is whether they may."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self._regions: dict[str, Region] = {}

    def register(
        self,
        user: int | None,
        name: str,
        *,
        key: str,
        byte_size: Size,
        offset: Size = 0,
    ) -> None:
        """Open an object. It must belong to this process's user, and so must the client that asks for it.

        Args:
            user: Of the client, as `user_of` finds it.
            name: Of the region.
            key: The object's name.
            byte_size: Of the part that is meant.
            offset: Where that part begins, in bytes.

        Raises:
            RefusedError: This client may not do that here.
            InvalidInputError: There is no such object, or it is shorter.
        """
        if not self.allowed:
            text = "shared memory of clients is off: start the server with --client-shared-memory"
            raise RefusedError(403, text)
        if user != os.geteuid():
            text = "shared memory is for clients on the server's machine, of the server's user"
            raise RefusedError(403, text)
        own = key.removeprefix("/")
        if own in ("", ".", "..") or "/" in own or "\0" in own:
            raise InvalidInputError(f"key: got {own[:99]!r}, expected a name such as '/input'")
        if name in self._regions or len(self._regions) >= _MAX_REGIONS:
            text = f"shared memory region '{name}' already in manager, or too many are"
            raise InvalidInputError(text)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        text = f"Unable to open shared memory region: '{key}'"
        try:
            opened = _Open(os.open(f"{_FOLDER}/{own}", flags))
        except OSError as exc:
            raise InvalidInputError(text) from exc
        found = os.fstat(opened.fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise InvalidInputError(f"{text} is no object of the server's user")
        if offset + byte_size > found.st_size:
            raise InvalidInputError(f"{text} has {found.st_size} bytes, expected more")
        self._regions[name] = Region(key, opened, offset, byte_size)

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all; one that is not there is no error, as with Triton."""
        for known in [name] if name else [*self._regions]:
            self._regions.pop(known, None)

    def status(self, name: str = "") -> list[RegionStatus]:
        """The regions, or the one of this name."""
        if name and name not in self._regions:
            raise InvalidInputError(f"Unable to find system shared memory region: '{name}'")
        return [
            {"name": known, "key": r.key, "offset": r.offset, "byte_size": r.size}
            for known, r in self._regions.items()
            if name in ("", known)
        ]

    def part(self, given: TensorParameters) -> Region | None:
        """The part of a region that a tensor's parameters name; None if they name none."""
        if (name := given.shared_memory_region) is None:
            return None
        if name not in self._regions:
            raise InvalidInputError(f"Unable to find shared memory region: '{name[:99]}'")
        return self._regions[name].part(given)


def user_of(connection: socket.socket) -> int | None:
    """The user of a client on this machine, None if that cannot be known.

    Of a Unix socket's the kernel has kept it (`SO_PEERCRED`). Over TCP it is by the list of connections of
    proc(5), where the client's end alone would not do: another user's can have the same one, with another
    server.
    """
    if connection.family == socket.AF_UNIX:
        return peer_credentials(connection)[1]
    try:
        client, server = connection.getpeername()[:2], connection.getsockname()[:2]
    except OSError:  # it is gone
        return None
    table = "tcp6" if ":" in client[0] else "tcp"
    ends = (_listed(*client), _listed(*server))
    for line in Path(f"/proc/net/{table}").read_text("ascii").splitlines():
        own, other, state, _, _, _, user = line.split()[1:8]
        if (own, other) == ends and state == "01":  # established
            return int(user)
    return None


def _listed(address: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address.partition("%")[0])
    words = [packed[i : i + 4][::-1] for i in range(0, len(packed), 4)]  # this machine's numbers
    return f"{b''.join(words).hex().upper()}:{port:04X}"
