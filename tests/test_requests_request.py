"""Requests: what workers' replies are checked against, and what becomes of the outputs."""

import errno
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from mcinfer.errors import PredictError, ProtocolError
from mcinfer.protocol import TensorRef
from mcinfer.requests.frames import is_leased
from mcinfer.requests.request import Request
from mcinfer.sharding import Axes, JoinError
from mcinfer.shm.arena import Arena
from mcinfer.specs import STRING
from tests.planned_requests import (
    DECLARED,
    LIMIT,
    MIB,
    PLAIN,
    Array,
    W,
    Worker,
    X,
    in_use,
    known,
    model,
    planner_of,
    random_array,
    references,
    replied,
    request_of,
)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 * MIB)
    yield arena
    arena.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


# Outputs in the worker's own blocks.

OPEN = model(
    {"x": ("float32", ["batch", 2])},
    {
        "y": ("float32", ["batch", 2]),
        "u": ("int32", ["found", 3]),
        "h": ("uint8", ["found"]),
        "t": (STRING, ["found"]),
    },
)
FOUND: Axes = {"u": 0, "h": 0, "t": 0}


def found(count: int, seed: int) -> tuple[Array, Array, tuple[str, ...]]:
    """What a shard found: u, h and t of so many rows."""
    texts = tuple(f"{seed}-{row}" for row in range(count))
    return random_array("int32", (count, 3), seed), random_array("uint8", (count,), seed), texts


def answer(request: Request, worker: Worker, shard: int, count: int) -> tuple[TensorRef, ...]:
    """A right reply for a shard of `OPEN`."""
    u, h, t = found(count, shard)
    y = references(request, shard)[1][0]
    own = worker.put(("u", u), ("h", h))
    return replied([y, *own, ("t", STRING, (count,), None, t)])


def stage_open(arena: Arena, outputs: Axes = FOUND) -> Request:
    """A request of four rows in two shards."""
    return request_of(
        planner_of(OPEN, arena), [np.ones((4, 2), np.float32)], 2, known(OPEN, None, outputs), 0.0
    )


def test_outputs_of_unknown_shape_come_and_join(arena: Arena, worker: Worker) -> None:
    request = stage_open(arena)
    assert [[reference[0] for reference in references(request, s)[1]] for s in (0, 1)] == [
        ["y"]
    ] * 2
    for shard in (1, 0):
        request.take(shard, answer(request, worker, shard, 2), worker.lend, shard, LIMIT)
    assert worker.fetched == [-1, -2]  # once for both outputs of a shard
    result = request.value()
    for block in worker.blocks.values():  # they are the worker's again
        memoryview(block.memory(0, block.size)).cast("B")[:] = b"\xff" * block.size
    assert [*result] == ["y", "u", "h", "t"]
    parts = [found(2, 0), found(2, 1)]
    assert np.array_equal(result["u"], np.concatenate([u for u, _, _ in parts]))
    assert np.array_equal(result["h"], np.concatenate([h for _, h, _ in parts]))
    assert result["t"].tolist() == ["0-0", "0-1", "1-0", "1-1"]


def test_split_hears_of_parts_that_do_not_join(arena: Arena, worker: Worker) -> None:
    request = stage_open(arena, {**FOUND, "u": None})
    reasons: list[str] = []
    request.contradicted = reasons.append
    for shard, count in ((0, 3), (1, 5)):
        request.take(shard, answer(request, worker, shard, count), worker.lend, 7 + shard, LIMIT)
    text = r"output 'u' is the same from every worker.*\[3, 3\] from worker 8.*got \[5, 3\]"
    with pytest.raises(JoinError, match=text) as caught:
        request.value()
    assert reasons == [str(caught.value)]


# Outputs that come out in another shape than the plan foresaw, which the runtime only warns of.


def opened(request: Request, worker: Worker, shard: int, array: Array) -> None:
    """Answer a shard of `PLAIN` with this, in the worker's own block."""
    request.take(shard, replied(worker.put(("y", array))), worker.lend, shard, LIMIT)


def test_output_of_another_shape_is_no_more_foreseen(arena: Arena, worker: Worker) -> None:
    planner = planner_of(PLAIN, arena)
    parts = [random_array("float32", (2, 7), seed) for seed in (0, 1)]
    for laid_out in (1, 0, 0):
        request = request_of(planner, [X, W], 2, DECLARED, 0.0)
        assert [len(references(request, shard)[1]) for shard in (0, 1)] == [laid_out] * 2
        for shard, part in enumerate(parts):
            opened(request, worker, shard, part)
        assert request.value()["y"].tobytes() == np.concatenate(parts).tobytes()


# Forged replies: none is taken, none changes anything, none leaves a descriptor.

Forge = Callable[[Request, list[TensorRef]], Sequence[TensorRef]]


def change(index: int, **fields: Any) -> Forge:
    """A reply in which one reference is another."""
    names = ("name", "element_type", "shape", "block", "offset")

    def forge(_: Request, right: list[TensorRef]) -> list[TensorRef]:
        reference = dict(zip(names, right[index], strict=True)) | fields
        changed: Any = tuple(reference.values())
        return [*right[:index], changed, *right[index + 1 :]]

    return forge


FORGED: dict[str, Forge] = {
    "known output in another block": change(0, block=5),
    "known output of another type": change(0, element_type="int32"),
    "known output of another shape": change(0, shape=(4, 1)),
    "known output as strings": change(
        0, element_type=STRING, shape=(1,), block=None, offset=("a",)
    ),
    "open output of another type": change(1, element_type="float32"),
    "open output in a block that never came": change(1, block=-77),
    "open output past the block's end": change(1, offset=10**6),
    "open output of an impossible shape": change(1, shape=(2**62, 3)),
    "open output as strings": change(1, element_type=STRING, shape=(1,), block=None, offset=("a",)),
    "renamed": change(1, name="q"),
    "in another order": lambda _, right: [*right[:1], *right[:0:-1]],
    "none": lambda *_: [],
    "negative offset": change(1, offset=-4),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_forged_reply_changes_nothing(arena: Arena, worker: Worker, forge: Forge) -> None:
    request = stage_open(arena)
    right = answer(request, worker, 0, 2)
    with pytest.raises(ProtocolError):
        request.take(0, replied(forge(request, [*right])), worker.lend, 0, LIMIT)
    worker.lent.take_back()  # the block that it names, if that was leased
    request.take(1, answer(request, worker, 1, 2), worker.lend, 1, LIMIT)
    request.take(0, right, worker.lend, 0, LIMIT)
    result = request.value()
    assert np.array_equal(result["u"][:2], found(2, 0)[0])
    assert result["t"].tolist() == ["0-0", "0-1", "1-0", "1-1"]


def test_output_of_more_than_the_shared_memory_may_have_is_an_os_error(worker: Worker) -> None:
    with closing(Arena(1 << 16)) as arena:
        spec = model({"x": ("float32", ["batch"])}, {"u": ("uint8", ["found"])})
        request = request_of(planner_of(spec, arena), {"x": np.ones(2, np.float32)}, 1, None, 0.0)
        own = worker.put(("u", np.ones((1 << 16) + 1, np.uint8)))
        with pytest.raises(OSError, match=rf"'u' has {(1 << 16) + 1} bytes") as caught:
            request.take(0, replied(own), worker.lend, 0, arena.limit)
        assert caught.value.errno == errno.EFBIG
        del caught
        assert worker.lent.take_back() == ([-1], [])  # it goes back
        own = worker.put(("u", np.ones(1 << 16, np.uint8)))
        request.take(0, replied(own), worker.lend, 0, arena.limit)
        assert request.value()["u"].shape == (1 << 16,)


def test_whole_answer_in_one_block_is_a_view_of_it_whether_or_not_it_was_seen_before(
    arena: Arena, worker: Worker
) -> None:
    planner = planner_of(model({"x": ("float32", ["batch"])}, {"u": ("int32", ["found"])}), arena)
    [own] = worker.put(("u", np.arange(5, dtype=np.int32)))
    for _ in range(3):
        request = request_of(planner, {"x": np.ones(2, np.float32)}, 1, None, 0.0)
        request.take(0, replied([own]), worker.lend, 0, LIMIT)
        u = request.value()["u"]
        assert u.tolist() == [0, 1, 2, 3, 4]
        assert is_leased(u)
        assert worker.lent.take_back() == ([], [])  # it is in use
        del request, u
        assert worker.lent.take_back() == ([-1], [])


def test_results_are_copied_where_many_are_held(arena: Arena, worker: Worker) -> None:
    planner = planner_of(model({"x": ("float32", ["batch"])}, {"u": ("int32", ["found"])}), arena)
    [own] = worker.put(("u", np.arange(5, dtype=np.int32)))
    for _ in range(2):
        request = request_of(planner, {"x": np.ones(2, np.float32)}, 1, None, 0.0)
        request.take(0, replied([own]), worker.lend, 0, LIMIT)
        request.copies = True
        u = request.value()["u"]
        assert not is_leased(u)
        assert worker.lent.take_back() == ([-1], [])
        assert u.tolist() == [0, 1, 2, 3, 4]


# Results.


def test_answer_to_a_settled_request_is_checked_not_kept(arena: Arena, worker: Worker) -> None:
    request = stage_open(arena)
    right = answer(request, worker, 0, 2)
    request.settle(PredictError("late"))
    request.take(0, right, worker.lend, 0, LIMIT)
    assert worker.lent.take_back() == ([right[1][3]], [])
    with pytest.raises(PredictError, match="late"):
        request.result()


@pytest.mark.parametrize("cancelled", [False, True])
def test_failed_request_that_is_held_holds_no_memory(arena: Arena, cancelled: bool) -> None:
    planner = planner_of(PLAIN, arena)
    request = request_of(planner, [X, W], 2, DECLARED, 0.0)
    request.settle(PredictError("no"), cancelled=cancelled)
    assert in_use(planner, arena) > 0  # a worker may still write to it
    request.release()
    assert in_use(planner, arena) == 0
    with pytest.raises(PredictError, match="no"):
        request.result()


def test_error_of_a_join_keeps_no_memory_and_comes_again(arena: Arena, worker: Worker) -> None:
    planner = planner_of(OPEN, arena)
    request = request_of(planner, [np.ones((4, 2), np.float32)], 2, known(OPEN, None, FOUND), 0.0)
    replies = []
    for shard, width in ((0, 2), (1, 3)):
        y, _, *others = answer(request, worker, shard, 2)
        replies.append(replied([y, *worker.put(("u", np.ones((2, width), np.int32))), *others]))
    for shard, outputs in enumerate(replies):
        request.take(shard, outputs, worker.lend, shard, LIMIT)
    request.settle()
    request.release()
    gc.disable()
    try:
        errors = []
        for _ in range(2):
            with pytest.raises(JoinError) as caught:
                request.result()
            errors.append(caught.value)
        assert errors[0] is errors[1]
        assert in_use(planner, arena) == 0
    finally:
        gc.enable()
