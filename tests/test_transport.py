"""Tests of mcinfer/transport.py: the two sockets, joined in one process."""

import gc
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from mcinfer.protocol import MOST_MESSAGE_BYTES
from mcinfer.transport import Dealer, Router, SendError

PATIENCE = 20.0

T = TypeVar("T")


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 's'}"


@pytest.fixture
def router(endpoint: str) -> Iterator[Router]:
    gc.collect()  # what earlier tests left is not to go now
    before = len(os.listdir("/proc/self/fd"))
    router = opened(endpoint)
    yield router
    router.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def dealer(router: Router, endpoint: str) -> Iterator[Dealer]:  # noqa: ARG001 closed after it
    dealer = Dealer(endpoint)
    yield dealer
    dealer.close()


def opened(endpoint: str, pid: int | None = None) -> Router:
    """A router with a door for a process; None is this one."""
    router = Router()
    router.open_door(endpoint, os.getpid() if pid is None else pid)
    return router


def received(end: Router | Dealer, take: Callable[[], T | None]) -> T:
    """The next message, as the loops wait for it: drain, then wait for the descriptor."""
    until = time.monotonic() + PATIENCE
    while (message := take()) is None:
        readable, _, _ = select.select([end.fd], [], [], until - time.monotonic())
        assert readable
    return message


def greet(router: Router, dealer: Dealer) -> bytes:
    """Make the two know each other; the dealer's identity."""
    dealer.send(b"hello")
    peer, data = received(router, router.receive)
    assert data == b"hello"
    return peer


def test_messages_pass_both_ways_in_order(router: Router, dealer: Dealer) -> None:
    peer = greet(router, dealer)
    for number in range(100):
        router.send(peer, b"%d" % number)
    assert [dealer.wait() for _ in range(100)] == [b"%d" % number for number in range(100)]
    for number in range(100):
        dealer.send(b"%d" % number)
    seen = [received(router, router.receive) for _ in range(100)]
    assert seen == [(peer, b"%d" % number) for number in range(100)]


@pytest.mark.parametrize("size", [0, 1, 100_000, MOST_MESSAGE_BYTES])
def test_message_of_any_size_comes_whole(router: Router, dealer: Dealer, size: int) -> None:
    peer = greet(router, dealer)
    data = os.urandom(min(size, 1000)) * (size // 1000) + bytes(size % 1000)
    router.send(peer, data)
    assert dealer.wait() == data
    dealer.send(data)
    assert received(router, router.receive) == (peer, data)


def test_nothing_to_receive_is_none(router: Router, dealer: Dealer) -> None:
    peer = greet(router, dealer)
    assert router.receive() is None
    assert dealer.receive() is None
    router.send(peer, b"x")
    assert received(dealer, dealer.receive) == b"x"
    assert dealer.receive() is None


def test_each_peer_is_answered_by_its_own_name(router: Router, endpoint: str) -> None:
    dealers = [Dealer(endpoint) for _ in range(3)]
    peers = [greet(router, dealer) for dealer in dealers]
    assert len(set(peers)) == 3
    for number in (2, 0, 1):
        router.send(peers[number], b"%d" % number)
    assert [dealer.wait() for dealer in dealers] == [b"0", b"1", b"2"]
    for dealer in dealers:
        dealer.close()


def test_dealer_may_connect_before_the_router_is_there(endpoint: str) -> None:
    dealer = Dealer(endpoint)
    dealer.send(b"early")
    router = opened(endpoint)
    assert received(router, router.receive)[1] == b"early"
    dealer.close()
    router.close()


def test_peer_that_is_not_known_cannot_be_sent_to(router: Router) -> None:
    with pytest.raises(SendError, match="Host unreachable") as caught:
        router.send(b"nobody", b"x")
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_peer_that_is_gone_cannot_be_sent_to(router: Router, endpoint: str) -> None:
    dealer = Dealer(endpoint)
    peer = greet(router, dealer)
    dealer.close()
    until = time.monotonic() + PATIENCE
    refused = False
    while not refused and time.monotonic() < until:
        try:
            router.send(peer, b"x")
            router.receive()
        except SendError:
            refused = True
    assert refused


def test_peer_that_does_not_read_is_refused_more_and_nobody_waits(
    router: Router, dealer: Dealer, endpoint: str
) -> None:
    peer = greet(router, dealer)
    start = time.monotonic()
    refused = False
    for _ in range(100_000):
        try:
            router.send(peer, bytes(1000))
        except SendError as exc:
            refused = exc.errno == zmq.EAGAIN
            break
    assert refused
    assert time.monotonic() - start < PATIENCE
    other = Dealer(endpoint)
    router.send(greet(router, other), b"for the other")
    assert other.wait() == b"for the other"
    other.close()


def test_message_of_several_parts_is_an_empty_one(router: Router, endpoint: str) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(endpoint)
    stranger.send_multipart([b"one", b"two"])
    stranger.send_multipart([b"alone"])
    assert received(router, router.receive)[1] == b""
    assert received(router, router.receive)[1] == b"alone"
    stranger.close()
    context.term()


def test_threads_may_take_turns_under_a_lock(router: Router, dealer: Dealer) -> None:
    peer = greet(router, dealer)
    lock = threading.Lock()

    def send(number: int) -> None:
        for _ in range(50):
            with lock:
                router.send(peer, b"%d" % number)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    counts = {b"%d" % number: 0 for number in range(4)}
    for _ in range(200):
        counts[dealer.wait()] += 1
    for thread in threads:
        thread.join()
    assert set(counts.values()) == {50}


@pytest.mark.parametrize("name", ["none/s", "x" * 200], ids=["no folder", "too long"])
def test_endpoint_that_cannot_be_bound_is_an_os_error_and_leaves_nothing(
    tmp_path: Path, name: str
) -> None:
    gc.collect()  # what earlier tests left is not to go now
    before = len(os.listdir("/proc/self/fd"))
    router = Router()
    with pytest.raises(OSError, match="cannot bind ipc://") as caught:
        router.open_door(f"ipc://{tmp_path / name}", os.getpid())
    assert caught.value.errno
    router.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_router_closes_at_once_though_nobody_read(endpoint: str) -> None:
    router = opened(endpoint)
    dealer = Dealer(endpoint)
    peer = greet(router, dealer)
    for _ in range(5):
        router.send(peer, bytes(10_000_000))
    start = time.monotonic()
    router.close()
    assert time.monotonic() - start < 1.0
    dealer.close()


def test_what_a_dealer_sent_last_still_leaves_when_it_closes(router: Router, endpoint: str) -> None:
    dealer = Dealer(endpoint)
    dealer.send(b"last words")
    dealer.close()
    assert received(router, router.receive)[1] == b"last words"


def test_dealer_closes_within_its_second_though_the_master_is_gone(endpoint: str) -> None:
    dealer = Dealer(endpoint)
    dealer.send(b"to nobody")
    start = time.monotonic()
    dealer.close()
    assert time.monotonic() - start < 5.0


# Doors.

CROWDED = """
import os, resource, sys
from mcinfer.transport import Router
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
router = Router()
router.open_door(sys.argv[1], int(sys.argv[2]))
print("open", flush=True)
sys.stdin.readline()
print(len(os.listdir("/proc/self/fd")) < 40, router.receive(), flush=True)
"""


def connect(endpoint: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(endpoint.removeprefix("ipc://"))
    except OSError:
        connection.close()
        raise
    connection.settimeout(PATIENCE)
    return connection


def test_door_is_for_its_process_alone(endpoint: str) -> None:
    router = opened(endpoint, os.getppid())
    with connect(endpoint) as stranger:
        assert stranger.recv(100) == b""
    router.close()


def test_process_outlives_more_strangers_at_its_door_than_it_has_descriptors(endpoint: str) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = [sys.executable, "-c", CROWDED, endpoint, "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        strangers = [connect(endpoint) for _ in range(min(300, most // 2))]
        assert [stranger.recv(1) for stranger in strangers] == [b""] * len(strangers)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True None\n"
        for stranger in strangers:
            stranger.close()
    assert process.returncode == 0


def test_shut_door_lets_nobody_in_and_keeps_who_is(
    router: Router, dealer: Dealer, endpoint: str
) -> None:
    peer = greet(router, dealer)
    router.shut_door(endpoint)
    with pytest.raises(FileNotFoundError):
        connect(endpoint)
    router.send(peer, b"still there")
    assert dealer.wait() == b"still there"
    dealer.send(b"here too")
    assert received(router, router.receive) == (peer, b"here too")
    router.shut_door(endpoint)


def test_door_can_be_opened_again_after_its_worker(router: Router, endpoint: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        if number:
            router.open_door(endpoint, os.getpid())
        dealer = Dealer(endpoint)
        greet(router, dealer)
        router.shut_door(endpoint)
        dealer.close()
        router.remove_door(endpoint)
        router.remove_door(endpoint)
    until = time.monotonic() + PATIENCE
    while len(os.listdir("/proc/self/fd")) > before:  # libzmq closes them in its own thread
        assert time.monotonic() < until
        router.receive()


def test_removing_one_door_leaves_who_came_by_another(router: Router, endpoint: str) -> None:
    router.open_door(f"{endpoint}2", os.getpid())
    first, second = Dealer(endpoint), Dealer(f"{endpoint}2")
    greet(router, first)
    peer = greet(router, second)
    router.remove_door(endpoint)
    first.close()
    second.send(b"x")
    assert received(router, router.receive) == (peer, b"x")
    second.close()


def test_closed_router_leaves_no_door(endpoint: str) -> None:
    opened(endpoint).close()
    with pytest.raises(FileNotFoundError):
        connect(endpoint)
