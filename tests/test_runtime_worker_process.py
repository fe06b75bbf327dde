"""Tests of mcinfer/runtime/worker_process.py: what several ranks say becomes what one worker says."""

from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from mcinfer.errors import ProtocolError
from mcinfer.protocol import BuildFinish, Error, Hello, Message, Preparing, Reply, TensorRef
from mcinfer.runtime.worker_process import Gang, WorkerProcess
from mcinfer.shm.block import Block
from mcinfer.shm.lifeline import Lifeline


class Rank:
    """A process that does not run; `theirs` is its end of the lifeline."""

    def __init__(self, number: int, status: int = -9) -> None:
        self.pid = 100 + number
        self.label = (number, f"cpu:{number}")
        self.peer: bytes | None = None
        self.status = status
        self.killed = False
        self.lifeline, theirs = Lifeline.pair()
        self.theirs = Lifeline(theirs)

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> int:
        return self.status

    def reap(self) -> int:
        return self.status

    def hand_over(self, number: int) -> None:
        block = Block.create(number, 8)
        self.theirs.send_block(number, block.size, block.fd)
        block.close()

    def close(self) -> None:
        self.lifeline.close()
        self.theirs.close()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    found = [Rank(number) for number in range(3)]
    yield found
    for rank in found:
        rank.close()


@pytest.fixture
def gang(ranks: list[Rank]) -> Gang:
    found = Gang(0, cast("list[WorkerProcess]", ranks))
    assert say(found, [built(), built(), built()])
    return found


def built(*, seconds: float = 1.0, notes: tuple[str, ...] = ()) -> BuildFinish:
    outputs = (("y", "float32", (2,)), ("z", "float32", ("n",)))
    return BuildFinish(inputs=(), outputs=outputs, providers=("CPU",), seconds=seconds, notes=notes)


def reply(*outputs: TensorRef, request: int = 7, seconds: float = 1.0) -> Reply:
    return Reply(request=request, shard=0, outputs=outputs, seconds=seconds)


def error(kind: str, text: str = "", request: int | None = 7) -> Error:
    return Error(request=request, shard=None if request is None else 0, kind=kind, text=text)


def say(gang: Gang, messages: Sequence[Message]) -> Message | None:
    """Each rank says one of these, the last one first; nothing is known before all have."""
    found: Message | None = None
    for rank, message in reversed([*enumerate(messages)]):
        assert found is None
        found = gang.take(rank, message)
    return found


def ref(name: str, block: int) -> TensorRef:
    return (name, "float32", (2,), block, 0)


def test_hello_and_build_are_there_when_all_ranks_have_said_them(gang: Gang) -> None:
    hello = Hello(version=1, pid=5, token="")
    assert say(gang, [hello] * 3) == hello
    found = say(gang, [built(notes=("a",)), built(seconds=3.0, notes=("b",)), built(notes=("a",))])
    assert found == built(seconds=3.0, notes=("a", "b"))


def test_progress_of_any_rank_is_the_groups(gang: Gang) -> None:
    """Any of them may be the one that prepares the slices, while others wait for it."""
    for rank, progress in (
        (1, Preparing(seconds=3.0, written=5)),
        (0, Preparing(seconds=1.0, written=9)),
    ):
        assert gang.take(rank, progress) == progress


def test_reply_takes_the_longest_time(gang: Gang) -> None:
    assert say(gang, [reply(), reply(seconds=4.0), reply()]) == reply(seconds=4.0)


def test_outputs_in_blocks_of_ranks_are_merged(gang: Gang, ranks: list[Rank]) -> None:
    ranks[0].hand_over(-6)
    ranks[2].hand_over(-8)
    placed = ref("y", 3)
    found = say(gang, [reply(ref("y", -6)), reply(), reply(placed, ref("z", -8))])
    assert found == reply(ref("y", -6), ref("z", -8))
    leases = [gang.blocks.lease(number) for number in (-6, -8)]
    with pytest.raises(ProtocolError):
        gang.blocks.lease(-7)  # rank 1 has handed over none
    leases.clear()
    assert sorted(gang.blocks.take_back()[0]) == [-8, -6]


def test_outputs_that_the_model_does_not_have_break_the_protocol(gang: Gang) -> None:
    with pytest.raises(ProtocolError, match="which are not all outputs"):
        say(gang, [reply(ref("other", 0)), reply(), reply()])


def test_ranks_answer_several_runs_in_their_own_time(gang: Gang) -> None:
    for number in range(3):
        assert gang.take(0, reply(request=number)) is None
        assert gang.take(1, reply(request=number)) is None
    for number in range(3):
        assert gang.take(2, reply(request=number)) == reply(request=number)


def test_request_that_fails_alike_in_all_ranks_fails_alone(gang: Gang) -> None:
    assert say(gang, [error("invalid", "x")] * 3) == error("invalid", "x")
    assert not gang.killed


def test_error_after_a_run_gives_back_the_blocks_of_others(gang: Gang, ranks: list[Rank]) -> None:
    ranks[0].hand_over(-6)
    found = say(gang, [reply(ref("z", -6)), error("predict", "no memory"), reply()])
    assert found == error("predict", "rank 1 (cpu:1, pid 101): no memory")
    assert not gang.killed
    assert gang.blocks.take_back() == ([-6], [])


def test_broken_group_is_ended_at_once_with_the_cause(gang: Gang, ranks: list[Rank]) -> None:
    assert gang.take(1, error("broken", "rank 2 (pid 102) failed: why")) is None
    assert gang.killed
    assert all(rank.killed for rank in ranks)
    assert gang.take(0, error("broken", "rank 2 (pid 102) failed: why")) is None
    assert gang.reap() == ("ended: rank 2 (pid 102) failed: why", set())


def test_build_error_of_one_rank_is_that_of_the_group(gang: Gang) -> None:
    broken, own = error("broken", "rank 1 failed", None), error("build", "rank 1: why", None)
    assert gang.take(0, broken) is None
    assert gang.take(1, own) == own  # at once: the third may wait for it until it is ended
    assert gang.take(2, broken) is None
    assert gang.take(2, built()) is None
    assert not gang.killed


def test_group_that_breaks_in_the_build_without_a_build_error_has_died(gang: Gang) -> None:
    broken = error("broken", "all_gather: rank 1 did not take part", None)
    assert say(gang, [broken, broken, broken]) is None
    assert gang.killed
    assert gang.reap()[0].startswith("ended: all_gather: rank 1 did not")


def test_worker_of_one_process_has_no_group_to_break(ranks: list[Rank]) -> None:
    alone = Gang(0, cast("list[WorkerProcess]", ranks[:1]))
    assert alone.take(0, reply()) == reply()
    with pytest.raises(ProtocolError, match="no rank"):
        alone.take(0, error("broken"))


@pytest.mark.parametrize(
    "messages",
    [
        [reply(), reply(request=8), reply()],
        [reply(), error("predict", request=8), reply()],
        [reply(), built(), reply()],
    ],
)
def test_ranks_that_differ_break_the_protocol(gang: Gang, messages: list[Message]) -> None:
    with pytest.raises(ProtocolError, match="at once"):
        say(gang, messages)


def test_rank_that_says_more_than_it_was_asked_breaks_the_protocol(gang: Gang) -> None:
    for number in range(20):
        gang.take(1, reply(request=number))
    with pytest.raises(ProtocolError, match="more than it was asked"):
        gang.take(1, reply(request=20))


def test_death_of_a_rank_ends_the_others_and_is_named(gang: Gang, ranks: list[Rank]) -> None:
    gang.note_ends(cast("list[WorkerProcess]", ranks[1:2]), asked=False)
    assert gang.killed
    assert gang.reap() == ("ended: rank 1 (cpu:1, pid 101) killed by SIGKILL", {-9})


def test_ranks_that_end_as_asked_are_no_deaths(gang: Gang, ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.status = 0
        gang.note_ends(cast("list[WorkerProcess]", [rank]), asked=True)
    assert not gang.killed
    assert gang.reap() == ("exited with status 0", {0})
