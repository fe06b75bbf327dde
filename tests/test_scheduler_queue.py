"""Tests of mcinfer/scheduler/queue.py: which shard goes next, and which go together. Time is a number."""

import gc
import math
import tracemalloc
from dataclasses import dataclass
from time import process_time
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mcinfer.scheduler.queue import PATIENCE, ShardId, ShardQueue

LATER = 100.0


def shard(number: int) -> ShardId:
    return (number, 0)


class Join(NamedTuple):
    """With what a shard may go together, its rows, and when it goes in any case."""

    key: str = "k"
    rows: int = 1
    due: float = 0.0


def take(queue: ShardQueue, now: float = 0.0) -> tuple[ShardId, ...]:
    queue.end_holding(now)
    return queue.take()


def test_shard_that_is_to_be_alone_goes_beside_no_run_and_others_wait_for_it() -> None:
    queue = ShardQueue(1)
    queue.add_first(shard(1))
    queue.add_first(shard(2), alone=True)
    assert queue.take(beside=True) == ()
    assert queue.take() == (shard(2),)
    assert queue.take(beside=True) == (shard(1),)


@pytest.mark.parametrize("what", [None, Join(due=LATER), Join(due=0.0)], ids=str)
@pytest.mark.parametrize(("taking", "waiting"), [(False, 10), (True, 0)])
def test_shards_that_come_and_are_forgotten_leave_nothing_behind(
    what: Join | None, taking: bool, waiting: int
) -> None:
    queue = ShardQueue(64)
    tracemalloc.start()
    try:
        for number in range(3_000):
            queue.add(shard(number), number % 3, *(what or ()))
            if taking:
                take(queue)
            queue.discard(shard(number - waiting))
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(queue) <= waiting
    assert kept < 60_000  # bytes: a tenth of all of them


# Held shards.


@pytest.mark.parametrize("keys", [1, 4_000], ids=["of one key", "each of its own"])
def test_held_shards_cost_nothing_while_others_come(keys: int) -> None:
    queue = ShardQueue(4_001)
    begin = process_time()
    for number in range(4_000):
        queue.add(shard(number), 0, *Join(key=str(number % keys), due=LATER))
        assert take(queue) == ()
    assert (
        process_time() - begin < 2.0
    )  # a tenth of that, and 20 s if each were looked at each time
    assert {one for _ in range(keys) for one in take(queue, LATER)} == set(map(shard, range(4_000)))


def test_shards_that_are_held_without_a_limit_go_when_holding_ends() -> None:
    queue = ShardQueue(4)
    queue.add(shard(1), 0, *Join(due=math.inf))
    assert take(queue, LATER) == ()
    assert take(queue, math.inf) == (shard(1),)


# Anything, in any order.

MAX_ROWS = 5


@dataclass
class _Waiting:
    """What is known of a shard from outside."""

    place: int
    priority: float
    join: Join | None = None
    seen_due: bool = False

    @property
    def due(self) -> float:
        """When it may go in any case, if it may be held until then."""
        return math.inf if self.join is None else self.join.due


_Coming = tuple[int, tuple[str, int, float] | None]
"""Priority, and what it may be joined with until so many seconds from now."""


class Queues(RuleBasedStateMachine):
    """A queue beside a list that is searched for the right answer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queue = ShardQueue(MAX_ROWS)
        self.waiting: dict[ShardId, _Waiting] = {}
        self.taken: list[ShardId] = []
        self.numbers = 0
        self.passed_over: tuple[ShardId | None, int] = None, 0

    # The right answer.

    def held(self, item: _Waiting) -> bool:
        if item.join is None:
            return False
        joins = [other.join for other in self.waiting.values() if other.join is not None]
        group = [join for join in joins if join.key == item.join.key]
        due = any(join.due <= self.now for join in group)
        return not due and sum(join.rows for join in group) < MAX_ROWS

    def free(self) -> dict[ShardId, _Waiting]:
        return {s: item for s, item in self.waiting.items() if not self.held(item)}

    def oldest(self) -> ShardId | None:
        """Of those that were never taken and are not held."""
        free = {s: item for s, item in self.free().items() if item.place > 0}
        return min(free, key=lambda s: free[s].place, default=None)

    def check(self, run: tuple[ShardId, ...]) -> None:
        """Fail unless this is a run that may go now."""
        free = self.free()
        if not run:
            assert not free, "a shard waits that is not held"
            return
        head = self.waiting[run[0]]
        assert run[0] in free, "a held shard was taken"
        first = min(free, key=lambda s: (-free[s].priority, free[s].place))
        if run[0] != first:
            assert run[0] == self.oldest(), "neither the first nor the oldest"
        if head.join is None:
            assert len(run) == 1
            return
        # Those of its key, the oldest first, as long as there is room.
        expected, rows = [run[0]], head.join.rows
        for other, item in sorted(self.waiting.items(), key=lambda pair: pair[1].place):
            if other == run[0] or item.join is None or item.join.key != head.join.key:
                continue
            rows += item.join.rows
            if rows > MAX_ROWS:
                break
            expected.append(other)
        assert [*run] == expected

    # What may happen.

    @rule(
        items=st.lists(
            st.tuples(
                st.sampled_from([0, 0, 1, -3, 9]),
                st.none()
                | st.tuples(
                    st.sampled_from("ab"),
                    st.integers(1, MAX_ROWS + 1),
                    st.sampled_from([0.0, 1.0, 5.0]),
                ),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def come(self, items: list[_Coming]) -> None:
        for priority, join in items:
            self.numbers += 1
            new = shard(self.numbers)
            fits = None
            if join is not None:
                fits = Join(key=join[0], rows=join[1], due=self.now + join[2])
            self.waiting[new] = _Waiting(self.numbers, priority, fits)
            self.queue.add(new, priority, *(fits or ()))

    @rule(count=st.integers(1, 12))
    def take(self, count: int) -> None:
        for _ in range(count):
            oldest = self.oldest()
            run = take(self.queue, self.now)
            for item in self.waiting.values():
                item.seen_due |= item.due <= self.now
            assert all(member in self.waiting for member in run), "lost before, or taken twice"
            self.check(run)
            for member in run:
                del self.waiting[member]
            self.taken += run
            # In a row, and by others than older ones that were held.
            before, times = self.passed_over
            times = times if oldest == before else 0
            times += oldest in self.waiting
            self.passed_over = oldest, times
            assert times <= PATIENCE

    @rule(which=st.lists(st.integers(0, 99), min_size=1, max_size=4))
    def come_again(self, which: list[int]) -> None:
        """A run was lost, or failed: its shards go first."""
        for i in which:
            if self.taken:
                again = self.taken.pop(i % len(self.taken))
                least = min((item.place for item in self.waiting.values()), default=0)
                self.waiting[again] = _Waiting(min(least, 0) - 1, math.inf)
                self.queue.add_first(again)

    @rule(which=st.lists(st.integers(0, 99), min_size=1, max_size=4))
    def are_forgotten(self, which: list[int]) -> None:
        for i in which:
            if self.waiting:
                gone = [*self.waiting][i % len(self.waiting)]
                del self.waiting[gone]
                self.queue.discard(gone)
        if self.taken:
            self.queue.discard(self.taken[0])  # it does not wait

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # What always holds.

    @invariant()
    def all_are_counted(self) -> None:
        assert len(self.queue) == len(self.waiting)

    @invariant()
    def next_due_is_the_first_to_come(self) -> None:
        dues = (item.due for item in self.waiting.values() if not item.seen_due)
        assert self.queue.next_due() == min(dues, default=math.inf)

    def teardown(self) -> None:
        self.now = math.inf
        while self.waiting:
            before = len(self.waiting)
            self.take(3)
            assert len(self.waiting) < before
        assert take(self.queue, self.now) == ()


Queues.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)
test_any_order_of_events_gives_every_shard_out_once = Queues.TestCase
