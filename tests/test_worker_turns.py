"""Threads of a worker that take turns at its transport."""

import os
import socket
import threading

import pytest

from mcinfer.protocol import Exit, encode
from mcinfer.runtime.transport import WorkerTransport
from mcinfer.worker.turns import Turns

SECONDS = 30.0


class SlowTransport(WorkerTransport):
    """Brings nothing, says that something may have come, and sends when it is let."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0)
        self.sends, self.may_send = threading.Event(), threading.Event()

    def send(self, data: bytes) -> None:
        del data
        self.sends.set()
        self.may_send.wait(SECONDS)

    def receive(self) -> bytes | None:
        return None

    def may_receive(self) -> bool:
        return True

    def close(self) -> None:
        os.close(self.fd)


def test_end_of_a_lane_reaches_a_thread_that_is_about_to_wait() -> None:
    """A lane fails while another one sends: the thread that has the turn comes to two rings at once."""
    transport, (ours, theirs) = SlowTransport(), socket.socketpair()
    fails, waits = threading.Event(), threading.Event()
    got: list[bytes] = []

    def send() -> None:
        turns.send(b"reply")
        assert turns.wait() == encode(Exit())

    def fail() -> None:
        fails.wait(SECONDS)
        raise ValueError("of a lane")

    def wait() -> None:
        waits.set()
        got.append(turns.wait())

    with ours, theirs:
        turns = Turns(transport, ours.fileno())
        turns.start(send)
        turns.start(fail)
        assert transport.sends.wait(SECONDS)

        def go_on() -> None:
            waits.wait(SECONDS)
            fails.set()
            turns.threads[1].join(0.5)  # or it waits for the one that sends
            transport.may_send.set()

        threading.Thread(target=go_on).start()
        watch = threading.Timer(SECONDS / 3, theirs.close)
        watch.start()
        with pytest.raises(ValueError, match="of a lane"):
            turns.serve(wait)
        watch.cancel()
        watch.join()
        turns.close()
    assert got == [encode(Exit())]  # and no hang-up was needed
