"""The floor of a dispatch over ZeroMQ: a small MessagePack message there and back, and nothing else."""

import multiprocessing
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack
import zmq

_PATIENCE_MS = 60_000


def _echo(endpoint: str) -> None:
    """A process: a DEALER that answers each message with a small one, until it is told to end.

    It also ends when nothing has come for long: its parent may have been killed.
    """
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
    socket.connect(endpoint)
    socket.send(msgpack.packb({"id": 5}))
    while True:
        try:
            message: dict[str, Any] = msgpack.unpackb(socket.recv())
        except zmq.Again:
            break
        if message["id"] == 4:
            break
        reply = {"id": 2, "request": message["request"], "shard": message["shard"], "seconds": 0.0}
        socket.send(msgpack.packb(reply))
    socket.close()
    context.term()


class EchoPool:
    """A ROUTER here and so many DEALER processes, as a context manager."""

    def __init__(self, processes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mcinfer-echo-")
        endpoint = f"ipc://{Path(self._folder.name) / 's'}"
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

    def _round_trip(self, peers: list[bytes]) -> None:
        self._requests += 1
        for shard, peer in enumerate(peers):
            message = {"id": 1, "request": self._requests, "shard": shard}
            self._socket.send_multipart((peer, msgpack.packb(message)))
        for _ in peers:
            reply = msgpack.unpackb(self._socket.recv_multipart()[1])
            assert reply["request"] == self._requests

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for peer in self._peers:
            self._socket.send_multipart((peer, msgpack.packb({"id": 4})))
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._socket.close()
        self._context.term()
        self._folder.cleanup()
