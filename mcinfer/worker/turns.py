"""What a worker needs beside its loop to execute several runs at once: threads that take turns.

::

    turn ──► wait ──► follow a message ──► PREDICT: bind ──► pass the turn on ──► execute ──► REPLY ──► turn …
                           └──► wait                                └──► the next thread waits

The thread that has the turn receives messages, follows them in their order, and binds its run. So blocks,
versions of weights and bound runs need no other lock. Then it passes the turn on, executes, and answers: no
run goes from one thread to another. Each thread has a *lane*: a twin of the engine, with runs bound by it, so
the same tensors may be under way twice.

Ownership: the worker's `Server` owns the lanes, the transport, and the threads.
"""

import os
import threading
from contextlib import AbstractContextManager
from typing import Any

from mcinfer.runtime.transport import WorkerTransport


class SharedTransport(WorkerTransport):
    """A worker's transport, of whose threads the one that has the turn waits for messages while others send.

    ZeroMQ lets one thread at a time use a socket, so a lock is held for each call of it, and none while a
    thread waits: for `fd`, or for `bell`. The descriptor of a socket becomes readable once for what has come
    (zmq_getsockopt(3), ZMQ_FD), and a send may use that up; then the bell rings.

    Args:
        transport: What it takes over.
        lock: Held for each call; one that a thread may take again.
    """

    def __init__(self, transport: WorkerTransport, lock: AbstractContextManager[Any]) -> None:
        self.bell = os.eventfd(0)
        self.fd = transport.fd
        self._transport = transport
        self._lock = lock
        self._rings = False
        # One that knows its holder from the moment when it is taken: an exception may come right after.
        self._turn: Any = threading.RLock()

    def take_turn(self) -> None:
        """Wait for the turn."""
        if not self._turn._is_owned():
            self._turn.acquire()

    def pass_turn_on(self) -> None:
        """Let another thread have the turn; nothing if the calling thread has passed it on before."""
        if self._turn._is_owned():
            self._turn.release()

    def send(self, data: bytes) -> None:
        with self._lock:
            self._transport.send(data)
            if not self._rings and self._transport.may_receive():
                self._rings = True
                os.eventfd_write(self.bell, 1)

    def receive(self) -> bytes | None:
        with self._lock:
            if self._rings:
                self._rings = False
                os.eventfd_read(self.bell)
            return self._transport.receive()

    def wake(self) -> None:
        """End the wait of the thread that has the turn, and every other one from then on."""
        os.eventfd_write(self.bell, 1)

    def close(self) -> None:
        self._transport.close()
        os.close(self.bell)
