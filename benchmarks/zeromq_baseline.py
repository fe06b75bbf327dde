"""The floor of a dispatch over ZeroMQ: a small MessagePack message there and back, and nothing else.

Where a request's rows are to be copied, too, they lie in memory that all processes map, as they would for any
dispatch: `transport_floor.py` has that.
"""

import mmap
import multiprocessing
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import msgpack
import zmq

_PATIENCE_MS = 60_000
_LOOKS_MS = 1000
"""How often a process looks whether its parent is still there."""


def _echo(endpoint: str) -> None:
    """A process: a DEALER that answers each message with a small one, until it is told to end.

    It also ends with its parent, which may be killed.
    """
    parent = multiprocessing.parent_process()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.RCVTIMEO, _LOOKS_MS)
    socket.connect(endpoint)
    socket.send(msgpack.packb({"id": 5}))
    memory = mmap.mmap(-1, 1)
    while True:
        try:
            message: dict[str, Any] = msgpack.unpackb(socket.recv())
        except zmq.Again:
            if parent is None or not parent.is_alive():
                break
            continue
        if message["id"] == 4:
            break
        seconds = 0.0
        if "copy" in message:
            begin = perf_counter()
            memory.move(*message["copy"])
            seconds = perf_counter() - begin
        elif "memory" in message:
            memory = _mapped(message["memory"])
        reply = {
            "id": 2,
            "request": message["request"],
            "shard": message["shard"],
            "seconds": seconds,
        }
        socket.send(msgpack.packb(reply))
    socket.close()
    context.term()


def _mapped(path: str) -> mmap.mmap:
    """The whole of a file, to read and write."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


class EchoPool:
    """A ROUTER here and so many DEALER processes, as a context manager; used by one thread at a time."""

    def __init__(self, processes: int) -> None:
        # In the abstract namespace, where nothing is left of it if this process is killed.
        endpoint = f"ipc://@mcinfer-echo-{secrets.token_hex(8)}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        self._socket.bind(endpoint)
        context = multiprocessing.get_context("spawn")
        self._processes = [
            context.Process(target=_echo, args=(endpoint,), daemon=True) for _ in range(processes)
        ]
        for process in self._processes:
            process.start()
        self._peers = [self._socket.recv_multipart()[0] for _ in self._processes]
        self._requests = 0

    def one(self) -> None:
        """There and back, with the first process."""
        self._round_trip(self._peers[:1])

    def all(self) -> None:
        """To all processes, and back from all."""
        self._round_trip(self._peers)

    def attach(self, path: str) -> None:
        """Have all processes map a file in place of the one before; it is open while this runs."""
        self._round_trip(self._peers, repeat({"memory": path}))

    def copy(self, pieces: Sequence[tuple[int, int, int]]) -> float:
        """Have one process for each piece copy it within that file.

        Args:
            pieces: Where to, where from, how many: in bytes, from the file's start. No more than there are
                processes.

        Returns:
            Seconds that the copies took, summed.
        """
        return self._round_trip(self._peers[: len(pieces)], ({"copy": piece} for piece in pieces))

    def _round_trip(
        self, peers: Sequence[bytes], contents: Iterable[Mapping[str, object]] = repeat({})
    ) -> float:
        self._requests += 1
        for shard, (peer, content) in enumerate(zip(peers, contents, strict=False)):
            message = {"id": 1, "request": self._requests, "shard": shard, **content}
            self._socket.send_multipart((peer, msgpack.packb(message)))
        seconds = 0.0
        for _ in peers:
            reply = msgpack.unpackb(self._socket.recv_multipart()[1])
            assert reply["request"] == self._requests
            seconds += reply["seconds"]
        return seconds

    def close(self) -> None:
        """End the processes."""
        for peer in self._peers:
            self._socket.send_multipart((peer, msgpack.packb({"id": 4})))
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
