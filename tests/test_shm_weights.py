"""Tests of shared weights without a second process: handles, who is allowed, descriptors, identities."""

import os
import resource
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcinfer.errors import ClosedError, InvalidInputError, ProtocolError, WeightAccessError
from mcinfer.model_cache.cache import Cache, Held, entry_key
from mcinfer.process import start_time
from mcinfer.shm.descriptors import close_all, receive, send
from mcinfer.shm.weights import MAX_HANDLE, WeightOwner, address, open_weights

FACTS = {"model": "a test's"}
CONTENT = b"graph"
NOBODYS = 1 << 62
"""A handle that no test's owner has."""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    """An entry of a cache, as small as one can be."""

    def fill(folder: Path, _: int) -> None:
        (folder / "model.onnx").write_bytes(CONTENT)

    held = Cache(tmp_path / "cache", 1 << 20).make(entry_key(FACTS), FACTS, fill, wait=10)
    yield held
    held.close()


def descriptors() -> dict[int, str]:
    """All that this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


@pytest.fixture
def ended_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


# Handles.


def test_handles_are_random_and_fit_signed_64_bits(held: Held) -> None:
    handles = []
    for _ in range(20):
        with WeightOwner(held) as owner:
            handles.append(owner.handle)
    assert all(0 < handle <= MAX_HANDLE for handle in handles)
    assert len({*handles}) == len({handle >> 32 for handle in handles}) == 20


# Who is allowed.


@pytest.mark.parametrize("pid", [True, -1, 1.0])
def test_what_is_no_pid_is_refused_by_name(held: Held, pid: int) -> None:
    with pytest.raises(InvalidInputError, match=f"pid: got {pid!r}"):
        WeightOwner(held, [pid])
    with WeightOwner(held) as owner, pytest.raises(InvalidInputError, match=f"pid: got {pid!r}"):
        owner.allow(pid)


def test_pid_that_nobody_has_is_refused(held: Held, ended_pid: int) -> None:
    with no_descriptor_left():
        with pytest.raises(InvalidInputError, match=f"pid: got {ended_pid}, .* none has it"):
            WeightOwner(held, [os.getpid(), ended_pid])
        with WeightOwner(held) as owner:
            for pid in (ended_pid, 1 << 40):
                with pytest.raises(InvalidInputError, match="none has it"):
                    owner.allow(pid)


@pytest.mark.parametrize("pids", ["123", 123])
def test_what_is_no_list_of_pids_is_refused(held: Held, pids: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="allow_pids: got"):
        WeightOwner(held, pids)


def test_pid_0_is_ignored(held: Held) -> None:
    with WeightOwner(held, [0, os.getpid(), 0]) as owner:
        owner.allow(0)
        owner.revoke(0)
        open_weights(owner.handle).close()


# The owner, and this same process as its client.


def test_allowed_process_gets_the_entry(held: Held) -> None:
    with WeightOwner(held, [os.getpid()]) as owner, open_weights(owner.handle) as shared:
        assert Path(shared.model).read_bytes() == CONTENT
        assert Path(shared.model).parent == shared.folder == held.folder
        assert shared.facts == FACTS
        assert shared.held.key == held.key


def test_entry_stays_until_the_last_of_those_who_hold_it_has_let_go(
    held: Held, tmp_path: Path
) -> None:
    cache = Cache(tmp_path / "cache", 1 << 20)
    owner = WeightOwner(held, [os.getpid()])
    shared = open_weights(owner.handle)
    for holder in (held, owner, shared):
        assert cache.clear() == (0, 1)
        holder.close()
    assert cache.clear()[1] == 0
    assert not held.folder.exists()


def test_closed_model_cannot_be_shared(held: Held) -> None:
    held.close()
    with no_descriptor_left(), pytest.raises(ClosedError, match=f"{held.folder} is closed"):
        WeightOwner(held)


def test_what_is_no_model_is_refused() -> None:
    with no_descriptor_left(), pytest.raises(InvalidInputError, match="model: got 7"):
        WeightOwner(7)  # type: ignore[arg-type]


def test_entry_whose_folder_is_gone_leaves_nothing(held: Held) -> None:
    held.folder.rename(held.folder.with_name("elsewhere"))
    with no_descriptor_left(), pytest.raises(FileNotFoundError):
        WeightOwner(held)


def test_after_close_nothing_is_left(held: Held) -> None:
    before = descriptors()
    owner = WeightOwner(held)
    assert len(descriptors()) == len(before) + 3  # socket, folder, lock
    assert "mcinfer-weights" in [thread.name for thread in threading.enumerate()]
    owner.close()
    assert descriptors() == before
    assert "mcinfer-weights" not in [thread.name for thread in threading.enumerate()]
    owner.close()


def test_closed_owner_allows_nobody(held: Held) -> None:
    owner = WeightOwner(held)
    owner.close()
    with pytest.raises(ClosedError, match="closed"):
        owner.allow(os.getpid())
    owner.revoke(os.getpid())


def test_descriptors_are_not_handed_to_programs(held: Held) -> None:
    before = descriptors()
    with WeightOwner(held, [os.getpid()]) as owner, open_weights(owner.handle):
        new = descriptors().keys() - before.keys()
        assert len(new) >= 5  # and, for a moment, the connection that was just answered
        assert not any(map(os.get_inheritable, new))


# What a client makes of wrong handles and answers.


@pytest.mark.parametrize("handle", [0, True, 1.5, 1 << 63])
def test_what_cannot_be_a_handle_is_refused(handle: int) -> None:
    with pytest.raises(InvalidInputError, match=f"handle: got {handle!r}"):
        open_weights(handle)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_what_is_no_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(InvalidInputError, match="timeout: got"):
        open_weights(NOBODYS, timeout)


@pytest.mark.parametrize("handle", [1, MAX_HANDLE])
def test_number_that_nobody_answers_to_says_what_that_may_be(handle: int) -> None:
    text = rf"weights {handle}: no process shares any .* wrong, .* ended or closed .* namespace"
    with no_descriptor_left(), pytest.raises(WeightAccessError, match=text):
        open_weights(handle)


@contextmanager
def false_owner(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Something else with an owner's name; its handle."""
    handle = NOBODYS

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            answer(connection)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address(handle))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield handle
        thread.join()


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b'{"ok": true}', 0),
        (b'{"ok": true}', 3),
        (b'{"ok": 1}', 2),
        (b'{"ok": true, "more": 1}', 2),
        (b'{"ok": true}' + b" " * 300, 2),
        (b"refused process 5", 1),
        (b"weather", 0),
    ],
)
def test_malformed_answer_is_a_protocol_error_and_leaves_nothing_open(
    data: bytes, count: int
) -> None:
    with (
        open(os.devnull) as null,
        no_descriptor_left(),
        false_owner(lambda end: send(end, data, [null.fileno()] * count)) as handle,
        pytest.raises(ProtocolError),
    ):
        open_weights(handle)


def test_owner_that_too_many_wait_for_is_not_waited_for_beyond_the_timeout() -> None:
    handle = NOBODYS
    with (
        no_descriptor_left(),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting,
    ):
        listening.bind(address(handle))
        listening.listen(0)
        waiting.connect(address(handle))
        with pytest.raises(WeightAccessError, match=r"did not answer within 0.1 s"):
            open_weights(handle, 0.1)


def test_owner_that_hangs_up_is_called_that() -> None:
    with (
        no_descriptor_left(),
        false_owner(lambda _: None) as handle,
        pytest.raises(WeightAccessError, match="hung up"),
    ):
        open_weights(handle)


def test_descriptors_that_are_not_of_an_entry_are_refused_and_closed(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with (
        no_descriptor_left(),
        false_owner(lambda end: send(end, b'{"ok": true}', [folder, folder])) as handle,
        pytest.raises(WeightAccessError, match=f"{handle}: .*{tmp_path}"),
    ):
        open_weights(handle)
    os.close(folder)


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
        send(pair[0], b"second")
    data, fds = receive(pair[1], 10)
    assert (data, len(fds)) == (b"first", 2)
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in fds] == [str(path)] * 2
    assert not any(map(os.get_inheritable, fds))
    close_all(fds)
    assert receive(pair[1], 10) == (b"second", [])
    pair[0].close()
    assert receive(pair[1], 10) == (b"", [])


def test_packet_that_is_too_long_brings_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    with open(os.devnull) as null:
        send(pair[0], b"12345", [null.fileno()])
    with no_descriptor_left(), pytest.raises(ProtocolError, match="more than 4 bytes"):
        receive(pair[1], 4)


def test_send_does_not_wait_for_who_does_not_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    def fill() -> None:
        while True:
            send(pair[0], bytes(1000))

    with pytest.raises(BlockingIOError):
        fill()


# Processes.


def test_start_time_tells_whether_there_is_such_a_process(ended_pid: int) -> None:
    mine = start_time(os.getpid())
    assert mine is not None
    assert mine == start_time(os.getpid())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        theirs = start_time(process.pid)
        assert theirs is not None
        assert theirs >= mine
    assert start_time(ended_pid) is None
    assert start_time(-1) is None


def test_start_time_is_not_none_for_want_of_a_descriptor() -> None:
    """Who sweeps what belongs to dead processes would else take the living for dead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            start_time(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
