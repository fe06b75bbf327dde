"""Tests of the collectives in shared memory, with ranks as threads; no second process."""

import errno
import os
import re
import resource
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.errors import (
    ClosedError,
    CollectiveTimeoutError,
    InvalidInputError,
    ProtocolError,
    RankDiedError,
)
from mcinfer.ranks.collectives import join, meeting
from mcinfer.ranks.collectives.base import Group, PeerFailedError
from mcinfer.ranks.collectives.shm import Area, Shared, inherit
from tests.collective_contract import CONTRACT
from tests.open_descriptors import no_descriptor_left
from tests.process.waiting import wait_until
from tests.thread_ranks import in_threads, results, run_ranks


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Group], None], size: int) -> None:
    with no_descriptor_left():
        results(size, check)


def test_memory_is_valid_after_the_group_is_closed() -> None:
    def body(group: Group) -> Any:
        collective = group.prepare_all_reduce((100_000,), np.float32)
        collective.input[:] = 1
        collective.run()
        group.close()
        return collective.output

    for output in results(2, body):
        assert (output == 2).all()


def test_array_that_is_received_is_not_overwritten_by_the_next_one() -> None:
    """Also where the receiver makes room for more messages with it: it says so after it has read."""
    arrays = [np.full(1 << 20, number) for number in range(2)]

    def body(group: Group) -> None:
        transfer = group.prepare_transfer([1], np.uint8, 0, 1)
        for _ in range(10):
            for _ in range(31):
                transfer.run()
            for array in arrays:
                if group.rank == 0:
                    group.send(array, 1)
                else:
                    np.testing.assert_array_equal(group.recv(array.shape, array.dtype, 0), array)

    results(2, body)


def test_ranks_that_wait_for_room_at_each_other_make_it() -> None:
    def body(group: Group) -> None:
        ours = group.prepare_transfer((1,), np.int32, group.rank, 1 - group.rank)
        theirs = group.prepare_transfer((1,), np.int32, 1 - group.rank, group.rank)
        for transfer in (ours, theirs):
            for _ in range(500):
                transfer.run()
        group.barrier()

    results(2, body)


def test_source_of_many_transfers_gets_room_from_a_rank_that_waits_for_another() -> None:
    def body(group: Group) -> None:
        if group.rank < 2:
            transfer = group.prepare_transfer((1,), np.int32, 0, 1)
            if group.rank == 0:
                for _ in range(500):
                    transfer.run()
        group.barrier()
        if group.rank == 1:
            for _ in range(500):
                transfer.run()

    results(3, body)


def test_forget_voids_what_was_sent_and_not_received() -> None:
    def body(group: Group) -> None:
        for number in range(3):
            if group.rank == 0:
                group.send(np.array([number]), 1)
            if group.rank == 1 and number == 1:
                assert group.recv((1,), np.int64, 0).tolist() == [1]
            group.forget()
        if group.rank == 0:
            group.send(np.array([7]), 1)
        if group.rank == 1:
            assert group.recv((1,), np.int64, 0).tolist() == [7]

    assert run_ranks(3, body, timeout=5.0) == [None] * 3


def test_forget_keeps_what_is_sent_after_it() -> None:
    """Also by ranks that go on while others still forget."""

    def body(group: Group) -> None:
        for number in range(200):
            group.forget()
            if group.rank == 0:
                for other in range(1, group.size):
                    group.send(np.array([number]), other)
            else:
                assert group.recv((1,), np.int64, 0).tolist() == [number]

    assert run_ranks(4, body, timeout=20.0) == [None] * 4


# Errors.


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (
            lambda group: group.all_reduce(np.ones(500_000, np.float32)),
            Group.barrier,
            "rank 0: all_reduce sum float32[500000]; rank 1: barrier",
        ),
        (
            lambda group: group.all_gather(np.ones((2, 2), np.int8), 1),
            lambda group: group.all_gather(np.ones((2, 2), np.int8), 0),
            "rank 0: all_gather int8[2, 2] along axis 1; rank 1: all_gather int8[2, 2] along axis 0",
        ),
    ],
)
def test_operations_that_differ_are_an_error_in_all_ranks(
    one: Callable[[Group], object], other: Callable[[Group], object], texts: str
) -> None:
    def body(group: Group) -> str:
        with pytest.raises(InvalidInputError) as caught:
            (other if group.rank == 1 else one)(group)
        with pytest.raises(ClosedError, match="the group is closed: ranks run different"):
            group.barrier()
        return str(caught.value)

    with no_descriptor_left():
        assert {*results(3, body)} == {f"ranks run different operations: {texts}"}


def test_memory_prepared_in_different_orders_is_an_error() -> None:
    def body(group: Group) -> None:
        sizes = [100_000, 200_000] if group.rank else [200_000, 100_000]
        collectives = {size: group.prepare_all_reduce((size,), np.float32) for size in sizes}
        collectives[100_000].run()

    for exc in run_ranks(2, body):
        assert isinstance(exc, InvalidInputError)
        assert "in different orders" in str(exc)


def test_array_of_another_shape_than_was_sent_is_an_error_in_both() -> None:
    def body(group: Group) -> None:
        if group.rank == 0:
            group.send(np.ones(3, np.float32), 1)
        else:
            group.recv((4,), np.float32, 0)
        group.barrier()

    for exc in run_ranks(2, body):
        assert isinstance(exc, InvalidInputError)
        assert "rank 0: send float32[3]" in str(exc)
        assert "rank 1: send float32[4]" in str(exc)


def test_rank_that_does_not_come_is_named_in_all_and_finds_the_group_closed() -> None:
    gone = threading.Semaphore(0)

    def body(group: Group) -> None:
        if group.rank == 1:
            assert gone.acquire(timeout=30)
            assert gone.acquire(timeout=30)
            group.barrier()  # to which the others came
        try:
            group.barrier()
        finally:
            gone.release()

    outcomes = run_ranks(3, body, timeout=0.3)
    assert all(isinstance(exc, CollectiveTimeoutError) for exc in outcomes)
    for rank in (0, 2):
        assert "barrier: rank 1 (pid" in str(outcomes[rank])


def test_rank_that_leaves_ends_what_others_wait_for() -> None:
    def body(group: Group) -> None:
        group.barrier()
        if group.rank != 1:
            group.barrier()

    outcomes = run_ranks(3, body)
    assert outcomes[1] is None
    for exc in (outcomes[0], outcomes[2]):
        assert isinstance(exc, RankDiedError)
        assert "rank 1 (pid" in str(exc)
        assert "closed the group" in str(exc)


def test_rank_that_breaks_off_is_an_error_in_all_that_wait_or_will() -> None:
    def body(group: Group) -> str:
        said = []
        if group.rank == 1:
            group.break_off("rank 1: no such thing")
        for _ in range(2):  # the second: in the rank itself, and in those that have had the error
            try:
                group.recv((3,), np.int8, 1) if group.rank == 0 else group.barrier()
            except (PeerFailedError, ClosedError) as exc:
                said.append(f"{type(exc).__name__}: {exc}")
        return " ".join(said)

    with no_descriptor_left():
        outcomes = results(3, body)
    closed = "ClosedError: the group is closed: rank 1: no such thing"
    assert outcomes[1] == f"{closed} {closed}"
    assert outcomes[0] == outcomes[2] == f"PeerFailedError: rank 1: no such thing {closed}"


def test_rank_that_closes_a_subgroup_ends_what_its_others_wait_for() -> None:
    """Not the whole group: ranks that do not wait for it there do not notice."""
    ended = threading.Event()

    def body(group: Group) -> None:
        pair = group.subgroup([1, 2])
        if group.rank == 0:
            assert ended.wait(30)
            return
        assert pair is not None
        if group.rank == 1:
            pair.close()
            group.send(np.ones(1), 2)
            assert ended.wait(30)
            return
        assert group.recv((1,), np.float64, 1).tolist() == [1]
        try:
            pair.barrier()
        finally:
            ended.set()

    outcomes = run_ranks(3, body)
    assert outcomes[:2] == [None, None]
    assert isinstance(outcomes[2], RankDiedError)
    assert "rank 1 (pid" in str(outcomes[2])
    assert "closed the group" in str(outcomes[2])


def test_group_that_is_closed_holds_no_descriptor() -> None:
    """Also the memory of subgroups, and while the objects live."""
    held: list[Group | None] = []

    def body(group: Group) -> None:
        pair = group.subgroup([0, 1])
        held.extend([group, pair])
        for one in filter(None, (group, pair)):
            one.all_reduce(np.ones(300_000))
            one.prepare_all_gather((100_000,), np.float32).run()
            if one.rank < 2:
                one.send(np.ones(3), 1) if one.rank == 0 else one.recv((3,), np.float64, 0)

    with no_descriptor_left():
        results(3, body)
    assert len(held) == 6


# Joining.


def test_wrong_number_of_descriptors_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"rank 0 of 3 and 1 descriptors, .* 5 descriptors"):
        inherit(0, 3, [5])


def test_what_ranks_inherit_is_let_go_with_the_group() -> None:
    with no_descriptor_left():
        shared = Shared(3)
        for rank in range(3):
            inherit(rank, 3, [*map(os.dup, shared.fds(rank))]).close()
        shared.close()
        shared.close()


def called_by(call: Callable[[socket.socket], object], folder: Path, size: int) -> object:
    """What rank 0, which meets others in this folder, gets when a socket to it does something."""
    found = folder / f"mcinfer-groups-{os.geteuid()}"

    def connected(end: socket.socket) -> bool:
        for name in os.listdir(found) if found.exists() else ():
            fd = os.open(found, os.O_RDONLY)  # the address of a socket is a short one
            try:
                end.connect(f"/proc/self/fd/{fd}/{name}")
            except ConnectionRefusedError:
                continue
            finally:
                os.close(fd)
            return True
        return False

    def body(rank: int) -> object:
        if rank == 0:
            join("key", 0, size, timeout=30.0).close()
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            wait_until(lambda: connected(end))
            call(end)
        return None

    return in_threads(2, body)[0]


def joined(*ranks: tuple[str, int, int], timeout: float = 30.0) -> list[object]:
    """What joining by (key, rank, size) gives in each; a group is used once and closed."""

    def body(number: int) -> object:
        key, rank, size = ranks[number]
        with join(f"test {id(ranks)} {key}", rank, size, timeout=timeout) as group:
            return group.all_reduce(np.ones(2)).tolist()

    with no_descriptor_left():
        return in_threads(len(ranks), body)


def test_ranks_join_by_key() -> None:
    assert joined(("a", 0, 3), ("a", 1, 3), ("a", 2, 3)) == [[3, 3]] * 3
    assert joined(("a", 0, 1)) == [[1, 1]]
    assert joined(("a", 0, 2), ("b", 0, 2), ("b", 1, 2), ("a", 1, 2)) == [[2, 2]] * 4


def test_group_meets_in_a_folder_of_its_user_alone_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first place others can enter such a folder, and in the last one, too, the second time."""
    name = f"mcinfer-groups-{os.geteuid()}"
    entered, private = (tmp_path / place / name for place in ("entered", "private"))
    for folder in (entered, private):
        folder.parent.mkdir()
    entered.mkdir()
    entered.chmod(0o777)
    groups_meet_in(monkeypatch, entered.parent, private.parent)
    modes = met(private, lambda: [private.stat().st_mode & 0o777])
    assert modes == [0o700]
    sockets = met(private, lambda: [path for path in private.iterdir() if path.is_socket()])
    assert len(sockets) == 1
    assert not [*entered.iterdir()]
    assert not private.exists()

    # A rank 0 that was killed leaves its name, which the next one takes.
    private.mkdir(0o700)
    fd = os.open(private, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(f"/proc/self/fd/{fd}/{sockets[0].name}")
    os.close(fd)
    assert met(private, lambda: [path for path in private.iterdir() if path.is_socket()]) == sockets
    assert not private.exists()

    private.mkdir()
    private.chmod(0o755)
    (exc,) = joined(("a", 0, 2))
    assert isinstance(exc, OSError)
    assert f"{entered} is of user" in str(exc)
    assert f"{private} is of user {os.geteuid()} and has mode 0755, expected" in str(exc)


def groups_meet_in(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    found = [str(place) for place in places]
    monkeypatch.setattr(meeting, "temporary_places", lambda *_: found)


def test_place_that_cannot_be_used_is_passed_over_by_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, private = tmp_path / "taken", tmp_path / "private"
    private.mkdir()
    taken.touch()
    groups_meet_in(monkeypatch, taken, private)
    assert joined(("a", 0, 2), ("a", 1, 2)) == [[2, 2]] * 2
    (exc,) = joined(("a", 1, 2), timeout=0.1)
    assert isinstance(exc, CollectiveTimeoutError)
    assert "no rank 0 of the group" in str(exc)


def test_error_of_rank_0_at_the_end_of_the_meeting_is_one_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: int) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(meeting, "Shared", refuse)
    first, second = joined(("a", 0, 2), ("a", 1, 2))
    assert isinstance(first, OSError)
    assert isinstance(second, RankDiedError)
    assert str(second) == (
        f"rank 0 (pid {os.getpid()}) left before the group was complete: {first}"
    )


def test_ranks_with_other_temporary_folders_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    own = threading.local()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: own.folder)

    def body(rank: int) -> object:
        own.folder = str(tmp_path / str(rank))
        (tmp_path / str(rank)).mkdir()
        with join(f"test {tmp_path}", rank, 2, timeout=10.0) as group:
            return group.all_reduce(np.ones(2)).tolist()

    assert in_threads(2, body) == [[2, 2]] * 2


def met(folder: Path, look: Callable[[], list[Any]]) -> list[Any]:
    """What there is to be seen when another one has connected, and rank 0 waits for it to say its rank."""
    seen: list[Any] = []
    exc = called_by(lambda _: seen.extend(look()), folder.parent, 2)
    assert isinstance(exc, RankDiedError)
    return seen


@pytest.mark.parametrize(
    ("ranks", "timeout", "error", "text"),
    [
        ([("a", 0, 3), ("a", 2, 3)], 1.0, CollectiveTimeoutError, "no rank 1 came"),
        ([("a", 1, 2)], 0.1, CollectiveTimeoutError, "no rank 0"),
        (
            [("a", 0, 3), ("a", 1, 3), ("a", 1, 3)],
            30.0,
            InvalidInputError,
            "both rank 1 of one group",
        ),
        (
            [("a", 0, 2), ("a", 0, 2)],
            30.0,
            InvalidInputError,
            r"both rank 0 of one group; does another group have the same key\?",
        ),
        (
            [("a", 0, 2), ("a", 1, 4)],
            30.0,
            InvalidInputError,
            r"expects 2 ranks, rank 1 \(pid.* expects 4",
        ),
    ],
)
def test_ranks_that_are_no_group_are_an_error_in_all(
    ranks: list[tuple[str, int, int]], timeout: float, error: type[Exception], text: str
) -> None:
    for exc in joined(*ranks, timeout=timeout):
        assert isinstance(exc, error)
        assert re.search(text, str(exc))


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        (b'{"rank": 1, "size": 3}', RankDiedError, "rank 1 hung up before the group was complete"),
        (b'{"rank": 7, "size": 3}', ProtocolError, "says it is rank 7 of 3"),
        (b"GET / HTTP/1.1", ProtocolError, ": got b'GET"),
    ],
)
def test_peer_that_is_no_rank_or_ends_early_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: bytes,
    error: type[Exception],
    text: str,
) -> None:
    groups_meet_in(monkeypatch, tmp_path)
    with no_descriptor_left():
        exc = called_by(lambda end: end.send(said), tmp_path, 3)
    assert isinstance(exc, error)
    assert text in str(exc)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("a", 2, 2, "shm"), "rank: got 2"),
        (("a", -1, 2, "shm"), "rank: got -1"),
        (("a", 0, 0, "shm"), "size: got 0"),
        (("", 0, 1, "shm"), "key: got ''"),
        (("a", 0, 1, "gloo"), "backend: got 'gloo', expected one of"),
    ],
)
def test_arguments_of_join_are_checked(arguments: tuple[str, int, int, str], expected: str) -> None:
    with pytest.raises(InvalidInputError, match=expected):
        join(*arguments)


# Memory.


@given(st.lists(st.integers(0, 40 << 20), max_size=30))
def test_fixed_memory_does_not_overlap(sizes: list[int]) -> None:
    shared = Shared(1)
    area = Area(shared.fds(0)[0], 0, 1 << 40)
    end = 0
    for size in sizes:
        window, offset, number = area.take(size)
        assert number > end
        assert (number - 1) % 64 == 0
        assert offset + size <= len(window)
        end = number - 1 + size
    shared.close()


def test_more_memory_than_there_is_is_refused() -> None:
    shared = Shared(1)
    with pytest.raises(InvalidInputError, match="do not fit the memory of a group"):
        Area(shared.fds(0)[0], 0, 1 << 39).take(1 << 40)
    shared.close()


def test_memory_that_cannot_be_mapped_leaves_room_for_smaller_arrays() -> None:
    shared = Shared(1)
    area = Area(shared.fds(0)[0], 0, 1 << 50)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        area.reuse(1 << 50)  # more than there are addresses
    assert len(area.reuse(1)[0]) == 4 << 20
    shared.close()


def test_a_limit_of_files_that_this_process_may_raise_does_not_keep_ranks_from_meeting() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        summed = results(2, lambda group: group.all_reduce(np.ones(3, np.float32)))
        assert [array.tolist() for array in summed] == [[2.0] * 3] * 2
        assert resource.getrlimit(resource.RLIMIT_FSIZE) == (1 << 20, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
