"""Several runs at once in one worker: threads that take turns.

::

    turn ──► wait ──► follow a message ──► PREDICT: bind ──► pass the turn on ──► execute ──► REPLY ──► turn …
                           └──► wait                                └──► the next thread waits

The thread that has the turn receives messages, follows them in their order, and binds its run. So blocks,
versions of weights and bound runs need no other lock. Then it passes the turn on, executes, and answers: no
run goes from one thread to another. Each thread has a *lane*: a twin of the engine, with runs bound by it, so
the same tensors may be under way twice.

Ownership: `Turns` owns the transport that it takes over, and the threads.
"""

import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mcinfer.protocol import Exit, encode
from mcinfer.runtime.transport import WorkerTransport

_EXIT = encode(Exit())


class Turns(WorkerTransport):
    """A transport for threads of which the one that has the turn waits for messages, while others send.

    ZeroMQ lets one thread at a time use a socket, so a lock is held for each call of it, and none while a
    thread waits: for `fd`, or for the bell. The descriptor of a socket becomes readable once for what has
    come (zmq_getsockopt(3), ZMQ_FD), and a send may use that up; then the bell rings.

    The thread that makes it has the turn. Once one lane has ended, the others get EXIT. A wait also ends when
    the master hangs up.

    Args:
        transport: What it takes over.
        lifeline: The descriptor that shows the hang-up.

    Attributes:
        threads: Those of all lanes but the first.
    """

    def __init__(self, transport: WorkerTransport, lifeline: int) -> None:
        self.fd = transport.fd
        self.threads: list[threading.Thread] = []
        self._transport = transport
        self._lock = threading.Lock()
        self._bell = os.eventfd(0)
        self._rings = False
        self._lifeline = lifeline
        self._poll = select.poll()
        for descriptor in (self.fd, self._bell):
            self._poll.register(descriptor, select.POLLIN)
        self._poll.register(lifeline, 0)  # a hang-up is always reported
        self._ended = False
        self._failures: list[BaseException] = []
        # One that knows its holder from the moment when it is taken: an exception may come right after.
        self._turn: Any = threading.RLock()
        self._turn.acquire()

    def start(self, lane: Callable[[], None]) -> None:
        """Have a thread serve a lane, once it gets the turn; `RuntimeError` if the system has none left."""
        thread = threading.Thread(target=self._serve, args=(lane,), name="mcinfer-run", daemon=True)
        thread.start()
        self.threads.append(thread)

    def serve(self, lane: Callable[[], None]) -> None:
        """Serve the first lane in this thread; raises what ended any lane, once that one has ended."""
        self._serve(lane)
        if self._failures:
            raise self._failures[0]

    def _serve(self, lane: Callable[[], None]) -> None:
        try:
            lane()
        except BaseException as exc:  # the first lane's thread raises it
            self._failures.append(exc)
        finally:
            self._end()

    def wait(self) -> bytes:
        """The next message, once the calling thread has the turn; EXIT if a lane has ended.

        Raises:
            ConnectionResetError: The master has hung up.
        """
        if not self._turn._is_owned():
            self._turn.acquire()
        while not self._ended:
            data = self.receive()
            if data is not None:
                return data
            if self._lifeline in dict(self._poll.poll()):
                raise ConnectionResetError("the master has hung up")
        return _EXIT

    def pass_on(self) -> None:
        """Let another thread have the turn; nothing if the calling thread has passed it on before."""
        if self._turn._is_owned():
            self._turn.release()

    def send(self, data: bytes) -> None:
        with self._lock:
            self._transport.send(data)
            if self.threads and not self._rings and self._transport.may_receive():
                self._rings = True
                os.eventfd_write(self._bell, 1)

    def receive(self) -> bytes | None:
        with self._lock:
            if self._rings and not self._ended:
                self._rings = False
                os.eventfd_read(self._bell)
            return self._transport.receive()

    def _end(self) -> None:
        # Under the lock, so that the thread that has the turn does not silence the bell, and wait.
        with self._lock:
            self._ended = True
            os.eventfd_write(self._bell, 1)
        self.pass_on()

    def close(self) -> None:
        """End the lanes, whose threads end after their runs, and close."""
        self._end()
        for thread in self.threads:
            thread.join()
        self._transport.close()
        os.close(self._bell)


def pin_to_part(cores: Sequence[int], part: int, parts: int) -> None:
    """Keep the calling thread to its part of these cores, if there are enough.

    Else the system may put two runs on one core for a while, with another one idle.
    """
    if parts <= len(cores):
        start, stop = (number * len(cores) // parts for number in (part, part + 1))
        with suppress(OSError):  # this process may not use them any more
            os.sched_setaffinity(0, cores[start:stop])
