"""Results in a process that forks: afterwards each process owns them, like ordinary memory.

::

    the thread that forks: no frame may be used again, all are held
            │
           fork ──► child: copies what users may hold, to the same addresses ── a byte ──┐
            │                                                                            │
         parent: waits for that byte, then lets go of the frames ◄───────────────────────┘

The kernel has no copy-on-write for shared pages that both sides may write to. So the child replaces the
frames that users' arrays may lie in by private copies; idle frames, inputs and weights are not copied.

This code takes no lock: another thread may hold it at the fork. `subprocess` runs none of this code.
"""

import ctypes
import functools
import mmap
import os
import select
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from typing import NamedTuple
from weakref import ref

from mcinfer.requests.frames import Frame, Ticket

_LIBC = ctypes.CDLL(None, use_errno=True)
_MAP = _LIBC.mmap
_MAP.restype = ctypes.c_void_p
_MAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MOVE = _LIBC.mremap
_MOVE.restype = ctypes.c_void_p
_MOVE.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]
_ADVISE = _LIBC.madvise
_ADVISE.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAY_MOVE_TO = 3  # MREMAP_MAYMOVE | MREMAP_FIXED
_FAILED = ctypes.c_void_p(-1).value

_PATIENCE = 10.0
_SLOWEST = 100e6
"""Seconds, and bytes a second, that the parent gives a child; one that is stopped takes longer."""

_FEW = 64

_NEVER_IDLE = deque[Ticket](maxlen=0)
"""Of frames that live only while they are in use."""


class _Wait(NamedTuple):
    """What a parent waits for: a byte, or the end of the child that would write it."""

    reading: int
    writing: int
    size: int
    frames: int


class Forks:
    """The frames that users' arrays may lie in, and the forks in progress.

    `held`: by thread that is forking, the frames of that moment and later ones. While there are any, no frame
    may be used for another request.
    """

    __slots__ = ("_frames", "_most", "_numbers", "_waits", "held")

    def __init__(self) -> None:
        self._numbers = count()
        self._most = _FEW
        self._frames: dict[int, tuple[ref[Frame], ref[deque[Ticket]]]] = {}
        self._waits: dict[int, _Wait] = {}
        self.held: dict[int, list[Frame]] = {}
        os.register_at_fork(
            before=self._before,
            after_in_parent=self._after_in_parent,
            after_in_child=self._after_in_child,
        )

    def add(self, frame: Frame, idle: deque[Ticket] = _NEVER_IDLE) -> None:
        """Register a new frame, which is in `idle` when it is not in use."""
        # The end of an array runs no Python code, so those that are gone are looked for now and then.
        if len(self._frames) > self._most:
            # A copy is one step; to list the items makes objects, which may let other threads in between.
            for number, (known, _) in self._frames.copy().items():
                if known() is None:
                    self._frames.pop(number, None)
            self._most = 2 * len(self._frames) + _FEW
        self._frames[next(self._numbers)] = (ref(frame), ref(idle))
        for held in [*self.held.values()]:
            held.append(frame)

    # At a fork.

    def _before(self) -> None:
        thread = threading.get_ident()
        self.held[thread] = held = []
        frames = [*self._frames.values()]
        held += [frame for known, _ in frames if (frame := known()) is not None]
        if held:
            size = sum(end - begin for begin, end in _used(frames))
            with suppress(OSError):  # no descriptor is left: the parent cannot wait
                self._waits[thread] = _Wait(*os.pipe(), size, len(held))

    def _after_in_parent(self) -> None:
        thread = threading.get_ident()
        wait = self._waits.pop(thread, None)
        try:
            if wait is not None:
                os.close(wait.writing)  # so that the end of the child is seen as well
                if wait.size or len(self.held[thread]) > wait.frames:
                    poll = select.poll()
                    poll.register(wait.reading, select.POLLIN)
                    poll.poll((_PATIENCE + wait.size / _SLOWEST) * 1000)
        finally:
            self.held.pop(thread, None)
            if wait is not None:
                os.close(wait.reading)

    def _after_in_child(self) -> None:
        waits, self._waits = self._waits, {}
        parent = waits.get(threading.get_ident())
        try:
            _make_private(_used([*self._frames.values()]))
        finally:
            self._frames = {}
            self.held = {}
            if parent is not None:
                os.write(parent.writing, b".")
            for wait in waits.values():
                os.close(wait.reading)
                os.close(wait.writing)


@functools.cache
def forks() -> Forks:
    """The only one of this process: a registration for forks cannot be undone."""
    return Forks()


def _used(frames: Iterable[tuple["ref[Frame]", "ref[deque[Ticket]]"]]) -> list[tuple[int, int]]:
    """Where the memory of frames begins and ends that are in use."""
    places = []
    for known, waiting in frames:
        frame, idle = known(), waiting()
        if frame is not None and not any(ticket.frame is frame for ticket in idle or ()):
            places.append((frame.slot.address, frame.slot.address + frame.slot.size))
    return places


def _make_private(places: Iterable[tuple[int, int]]) -> None:
    """Replace shared memory by private memory with the same content; whole pages.

    Raises:
        OSError: There is no memory; the rest stays shared.
    """
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted(places):
        begin, end = begin & -mmap.PAGESIZE, (end + mmap.PAGESIZE - 1) & -mmap.PAGESIZE
        if ranges and begin <= ranges[-1][1]:
            begin, last = ranges.pop()
            end = max(end, last)
        ranges.append((begin, end))
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    for begin, end in ranges:
        size = end - begin
        if not size:
            continue
        copy = _MAP(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
        if copy != _FAILED:
            _ADVISE(copy, size, mmap.MADV_HUGEPAGE)  # half of the time is that of page faults
            ctypes.memmove(copy, begin, size)
            copy = _MOVE(copy, size, size, _MAY_MOVE_TO, begin)
        if copy == _FAILED:
            error = ctypes.get_errno()
            text = f"{os.strerror(error)}: this process cannot have the results that it holds"
            raise OSError(error, f"{text}: they stay those of the process that it was forked from")
