"""The owner's side of shared weights: a socket, a thread, and one packet for each that connects.

The kernel says which process and user has connected (`SO_PEERCRED`), so nobody can pass for another, and
nothing that a client sends is ever read. Nothing waits for a client either.

Ownership: a `Listener` owns its socket and the descriptors that it hands over; its thread closes them when
it is told to end. In a child that the process forks they are closed at once, or the socket's name would
live on with nobody behind it.
"""

import functools
import json
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from contextlib import suppress

from mcinfer.process import start_time
from mcinfer.shm.descriptors import WakeUp, close_all, send

GRANTED = b'{"ok": true}'
"""The answer that comes with the descriptors of the folder and of its lock, in this order."""

NOT_ALLOWED, OTHER_USER, NO_PID = "process", "user", "namespace"
"""Why not: ``{"refused": why, "pid": pid}`` with the client's pid as the owner sees it."""

MAX_ANSWER_BYTES = 128

MAX_HANDLE = (1 << 63) - 1
"""MindSpore Lite's handles travel through signed 64-bit integers."""

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_LAST_ANSWER = 5.0
"""Seconds that `Listener.close` gives to the answer being sent, which takes next to none."""
_BACK_OFF = 0.1
"""Seconds until an owner that had no descriptor left tries to accept again."""


def address(handle: int) -> str:
    """The abstract address (unix(7)) that the owner of a handle listens on.

    A handle is a random number, and nothing else is in it. It is no secret: the kernel says who asks.
    """
    return f"\0mcinfer-weights-{handle:016x}"


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """The pid and the user id of the other side, as of its connect or listen; pid 0 if it has none here."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid


class Allowed:
    """The processes that may map: each is a pid and a start time, since pids are used again.

    Any thread may ask while another one changes it.
    """

    def __init__(self) -> None:
        """Allow none."""
        self._started: dict[int, int] = {}

    def add(self, pid: int, start: int) -> None:
        """Allow the process of that pid that started then, and no other of that pid."""
        self._started[pid] = start

    def remove(self, pid: int) -> None:
        """Allow it no more, if it was."""
        self._started.pop(pid, None)

    def is_allowed(self, pid: int, start: int | None) -> bool:
        """Whether this very process is; None is the start of one that is gone."""
        return start is not None and self._started.get(pid) == start


@functools.cache
def _listeners() -> "weakref.WeakSet[Listener]":
    """All of this process, for the children that it forks.

    Made with the first of them, and once: what is registered for forks stays registered.
    """
    listeners: weakref.WeakSet[Listener] = weakref.WeakSet()

    def leave() -> None:
        for listener in [*listeners]:
            listener.leave_to_parent()

    os.register_at_fork(after_in_child=leave)
    return listeners


class Listener:
    """Answers who connects, until it is told to end.

    It does not know its `WeightOwner`, so that one that is garbage is collected though the thread runs.

    Attributes:
        handle: Its socket's name is made from this.
        is_parents: Whether this process was forked from the one that it belongs to.
    """

    def __init__(self, descriptors: tuple[int, ...], allowed: Allowed) -> None:
        """Listen; no process is answered before `start`.

        Args:
            descriptors: To hand over. They are this object's from now on, whatever comes.
            allowed: Borrowed; it may change.

        Raises:
            OSError: No descriptor is left.
        """
        self.is_parents = False
        self._allowed = allowed
        self._descriptors = descriptors
        self._wakeup: WakeUp | None = None
        self._socket: socket.socket | None = None
        self.handle = 1 + secrets.randbelow(MAX_HANDLE)
        try:
            self._wakeup = WakeUp()
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _listeners().add(self)  # before it has a name, which forked children would keep
            self._socket.bind(address(self.handle))
            self._socket.setblocking(False)
            self._socket.listen(socket.SOMAXCONN)
            self._thread = threading.Thread(
                target=self._serve,
                args=(self._socket, self._wakeup.fd),
                name="mcinfer-weights",
                daemon=True,
            )
        except BaseException:
            self._end()
            raise

    def start(self) -> None:
        """Start answering. Apart from the rest, so that who owns this can see to its end first."""
        try:
            self._thread.start()
        except BaseException:
            if self._thread.ident is None:
                self._end()
            raise

    def stop(self) -> None:
        """Tell the thread to end. Takes no lock and never waits; nothing happens in a forked child."""
        wakeup = self._wakeup
        if wakeup is not None:
            wakeup.set()

    def close(self) -> None:
        """Tell it, and wait until all is gone; likewise."""
        self.stop()
        started = self._thread.ident is not None
        if started and not self.is_parents and threading.current_thread() is not self._thread:
            self._thread.join(_LAST_ANSWER)

    def leave_to_parent(self) -> None:
        """In a forked child: give up what was inherited. The parent's stays as it is."""
        self.is_parents = True
        self._give_up()

    def _serve(self, listening: socket.socket, woken: int) -> None:
        try:
            while True:
                ready = _readable(None, woken, listening.fileno())
                if woken in ready:
                    break
                try:
                    connection, _ = listening.accept()
                except OSError:
                    # No descriptor is left. The client still waits: accepting again at once would
                    # take a whole core.
                    if _readable(_BACK_OFF, woken):
                        break
                    continue
                with (
                    connection,
                    suppress(OSError),
                ):  # the client is gone, or sees that nothing comes
                    self._answer(connection)
        finally:
            self._end()

    def _answer(self, connection: socket.socket) -> None:
        pid, uid = peer_credentials(connection)
        if uid != os.geteuid():
            refused = OTHER_USER
        elif pid == 0:
            refused = NO_PID
        elif not self._allowed.is_allowed(pid, start_time(pid)):
            refused = NOT_ALLOWED
        else:
            send(connection, GRANTED, self._descriptors)
            return
        send(connection, json.dumps({"refused": refused, "pid": pid}).encode())

    def _end(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # it does not listen yet
                # A child forked behind Python's back holds the socket too: this ends it there as well.
                self._socket.shutdown(socket.SHUT_RDWR)
        self._give_up()

    def _give_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._wakeup = None
        descriptors, self._descriptors = self._descriptors, ()
        close_all(descriptors)


def _readable(seconds: float | None, *descriptors: int) -> list[int]:
    """Which of these are, once one is or the time is over."""
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)]
