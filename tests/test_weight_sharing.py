"""Tests of shared weights without a second process: handles, who is allowed, descriptors, identities."""

import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mcinfer.config import EngineOptions, ProviderKind
from mcinfer.errors import ClosedError, InvalidInputError, ProtocolError, WeightAccessError
from mcinfer.model_cache.cache import Cache, Held
from mcinfer.process import start_time
from mcinfer.shm.descriptors import close_all, receive, send
from mcinfer.weight_sharing import MAX_HANDLE, WeightOwner, address, open_weights
from tests.open_descriptors import descriptors, no_descriptor_left

FACTS = {"model": "a test's"}
CONTENT = b"graph"
NOBODYS = 1 << 62 | os.getpid()
"""A handle that no owner has, and no other run of these tests."""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    """An entry of a cache, as small as one can be."""

    def fill(folder: Path, _: int) -> None:
        (folder / "model.onnx").write_bytes(CONTENT)

    held = Cache(tmp_path / "cache", 1 << 20).make(FACTS, fill, wait=10)
    yield held
    held.close()


@pytest.fixture
def ended_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


# Who is allowed.


@pytest.mark.parametrize("pids", ["123", 123, [True], [-1], [1.0]])
def test_what_is_no_list_of_pids_is_refused_by_name(held: Held, pids: list[int]) -> None:
    with pytest.raises(InvalidInputError, match=r"pids?: got"):
        WeightOwner(held, pids)


def test_pid_that_nobody_has_is_refused(held: Held, ended_pid: int) -> None:
    with no_descriptor_left():
        with pytest.raises(InvalidInputError, match=f"pid: got {ended_pid}, .* none has it"):
            WeightOwner(held, [os.getpid(), ended_pid])
        with WeightOwner(held) as owner:
            for pid in (ended_pid, 1 << 40):
                with pytest.raises(InvalidInputError, match="none has it"):
                    owner.allow(pid)


@pytest.mark.parametrize(
    ("device", "provider", "text"),
    [
        ("gpu", None, "got 'gpu', expected a device such as"),
        ("cpu:0", None, "device: got 'cpu:0', expected a card such as 'cuda:0'"),
        ("cuda:0", "tensorrt", "options: got the provider 'tensorrt', expected 'cuda'"),
    ],
)
def test_device_that_is_no_card_is_refused(
    held: Held, device: str, provider: ProviderKind | None, text: str
) -> None:
    with no_descriptor_left(), pytest.raises(InvalidInputError, match=text):
        WeightOwner(held, options=EngineOptions(provider=provider), device=device)


# The owner, and this same process as its client.


def test_allowed_process_gets_the_entry(held: Held) -> None:
    before = descriptors()
    with WeightOwner(held, [0, os.getpid()]) as owner, open_weights(owner.handle) as shared:
        owner.allow(0)  # ignored
        assert Path(shared.model).read_bytes() == CONTENT
        assert Path(shared.model).parent == shared.folder == held.folder
        assert shared.facts == FACTS
        assert shared.held.key == held.key
        assert 0 < owner.handle <= MAX_HANDLE
        assert not any(map(os.get_inheritable, descriptors().keys() - before.keys()))
    assert descriptors() == before
    assert "mcinfer-weights" not in [thread.name for thread in threading.enumerate()]
    owner.close()
    with pytest.raises(ClosedError, match="closed"):
        owner.allow(os.getpid())


def test_entry_stays_until_the_last_has_let_go(held: Held, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 1 << 20)
    owner = WeightOwner(held, [os.getpid()])
    shared = open_weights(owner.handle)
    for holder in (held, owner, shared):
        assert cache.clear() == (0, 1)
        holder.close()
    assert cache.clear()[1] == 0
    assert not held.folder.exists()


def test_entry_that_cannot_be_shared_leaves_nothing(held: Held) -> None:
    with no_descriptor_left(), pytest.raises(InvalidInputError, match="model: got 7"):
        WeightOwner(7)  # type: ignore[arg-type]
    held.folder.rename(held.folder.with_name("elsewhere"))
    with no_descriptor_left(), pytest.raises(FileNotFoundError):
        WeightOwner(held)
    held.close()
    with no_descriptor_left(), pytest.raises(ClosedError, match=f"{held.folder} is closed"):
        WeightOwner(held)


# Wrong handles and answers.


@pytest.mark.parametrize(
    ("handle", "timeout", "text"),
    [
        (0, 1, "handle: got 0"),
        (1 << 63, 1, "handle: got"),
        (1, -1, "timeout: got -1"),
    ],
)
def test_invalid_handle_or_timeout_is_refused(handle: int, timeout: float, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        open_weights(handle, timeout)


@pytest.mark.parametrize("handle", [1, MAX_HANDLE])
def test_number_that_nobody_answers_to_says_what_that_may_be(handle: int) -> None:
    text = rf"weights {handle}: no process shares any .* wrong, .* ended or closed .* namespace"
    with no_descriptor_left(), pytest.raises(WeightAccessError, match=text):
        open_weights(handle)


@pytest.mark.parametrize(
    ("data", "count", "error", "text"),
    [
        (b"granted /no-entry", 2, ProtocolError, "got"),
        (b"granted /no-entry\0token", 2, WeightAccessError, r"\d{19}: .*no-entry"),
        (b"weather", 0, ProtocolError, "got"),
        (None, 0, WeightAccessError, "hung up"),
        (b"granted /no-entry", 1, WeightAccessError, r"\d{19}: .*no-entry"),
    ],
)
def test_wrong_answer_is_an_error_and_leaves_nothing_open(
    tmp_path: Path, data: bytes | None, count: int, error: type[Exception], text: str
) -> None:
    def answer() -> None:
        connection, _ = listening.accept()
        with connection, suppress(BrokenPipeError):
            if data is not None:
                send(connection, data, [folder] * count)

    path = tmp_path / "no-entry"
    path.mkdir()
    folder = os.open(path, os.O_RDONLY)
    with no_descriptor_left(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address(NOBODYS))
        listening.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(error, match=text):
            open_weights(NOBODYS)
        thread.join()
    os.close(folder)


@pytest.mark.parametrize("others", [0, 1])
def test_owner_that_does_not_answer_is_not_waited_for_beyond_the_timeout(others: int) -> None:
    """With one client before this one, it cannot even connect."""
    with (
        no_descriptor_left(),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting,
    ):
        listening.bind(address(NOBODYS))
        listening.listen(0)
        if others:
            waiting.connect(address(NOBODYS))
        before = time.monotonic()
        with pytest.raises(WeightAccessError, match=r"did not answer within 0.1 s"):
            open_weights(NOBODYS, 0.1)
        assert 0.1 <= time.monotonic() - before < 5.0


# Packets with descriptors.


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield left, right
    left.close()
    right.close()


def test_packet_brings_its_descriptors_closed_on_exec(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    with path.open("w") as file:
        send(pair[0], b"first", [file.fileno(), file.fileno()])
        send(pair[0], b"second", [file.fileno()])
    data, fds = receive(pair[1], 10)
    assert (data, len(fds)) == (b"first", 2)
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in fds] == [str(path)] * 2
    assert not any(map(os.get_inheritable, fds))
    close_all(fds)
    with no_descriptor_left(), pytest.raises(ProtocolError, match="more than 4 bytes"):
        receive(pair[1], 4)
    pair[0].close()
    assert receive(pair[1], 10) == (b"", [])


def test_start_time_is_not_none_for_want_of_a_descriptor() -> None:
    """Who sweeps what belongs to dead processes would else take the living for dead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            start_time(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
