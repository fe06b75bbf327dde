"""Tests of mcinfer/scheduler/queue.py: which shard goes next, and which go together. Time is a number."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mcinfer.scheduler.queue import PATIENCE, Joinable, Meant, ShardId, ShardQueue

LATER = 100.0


def shard(number: int) -> ShardId:
    return (number, 0)


def joinable(rows: int = 1, key: str = "k", due: float = 0.0) -> Joinable:
    return Joinable(key=key, rows=rows, due=due)


# Retried shards.


def test_shard_that_had_its_turn_is_not_given_behind_a_run_and_neither_are_those_behind_it() -> (
    None
):
    queue = ShardQueue(1)
    queue.add(shard(1), 0)
    queue.add_first(shard(2))
    assert queue.take(0.0, ahead=True) == ()
    assert len(queue) == 2
    assert queue.take(0.0) == (shard(2),)
    assert queue.take(0.0, ahead=True) == (shard(1),)
    assert queue.take(0.0, ahead=True) == ()


# Shards that are meant for a worker.


def test_shard_meant_for_a_worker_waits_for_it_and_does_not_block_others() -> None:
    queue = ShardQueue(1)
    queue.add(shard(1), 0, meant=Meant(worker=3, until=10.0))
    queue.add(shard(2), 0)
    assert queue.take(0.0, worker=1) == (shard(2),)
    assert queue.take(0.0, worker=1) == ()
    assert queue.next_due() == 10.0
    assert queue.take(0.0, worker=3) == (shard(1),)
    assert (len(queue), queue.lanes) == (0, {})


def test_worker_gets_what_is_meant_for_it_in_the_order_of_all() -> None:
    queue = ShardQueue(1)
    queue.add(shard(1), 0)
    queue.add(shard(2), 0, meant=Meant(worker=0, until=LATER))
    queue.add(shard(3), 5)
    queue.add(shard(4), 5, meant=Meant(worker=0, until=LATER))
    queue.add(shard(5), 9, meant=Meant(worker=1, until=LATER))
    assert [queue.take(0.0, worker=0) for _ in range(5)] == [
        *[(shard(number),) for number in (3, 4, 1, 2)],
        (),
    ]


def test_shard_that_waited_long_goes_to_a_worker_without_other_work_alone() -> None:
    queue = ShardQueue(1)
    queue.add(shard(1), 9, meant=Meant(worker=0, until=1.0))
    queue.add(shard(2), 0)
    queue.add(shard(3), 0, meant=Meant(worker=1, until=LATER))
    assert queue.take(2.0, worker=1, strays=True) == (shard(2),)
    assert queue.take(2.0, worker=1, strays=True) == (shard(3),)
    assert queue.take(2.0, worker=1) == ()
    assert queue.take(2.0, worker=1, strays=True) == (shard(1),)


def test_shards_of_a_worker_that_is_gone_go_to_any() -> None:
    queue = ShardQueue(1)
    queue.add(shard(1), 0, meant=Meant(worker=0, until=LATER))
    queue.add(shard(2), 1, meant=Meant(worker=0, until=LATER))
    queue.discard(shard(2))
    queue.free(0)
    queue.free(1)
    assert queue.take(0.0, ahead=True) == (shard(1),)


def test_oldest_of_a_worker_is_passed_over_as_often_as_any_other() -> None:
    queue = ShardQueue(1)
    queue.add(shard(0), 0, meant=Meant(worker=0, until=LATER))
    for number in range(1, 40):
        queue.add(shard(number), 1, meant=Meant(worker=number % 2, until=LATER))
    taken = [queue.take(0.0, worker=i % 2) for i in range(2 * PATIENCE + 2)]
    assert taken[-2] == (shard(0),)


# Forgetting.


def kept(queue: ShardQueue) -> int:
    """How much the queue remembers, over all that it has."""
    groups = queue._groups.values()
    return (
        sum(map(len, (queue.items, queue._heap, queue._dues, queue._groups)))
        + sum(map(len, (queue._strays, queue.lanes, *queue.lanes.values())))
        + sum(len(group.items) for group in groups)
        + sum(len(group.off_heap) for group in groups)
    )


@pytest.mark.parametrize(
    "what",
    [
        *(None, joinable(due=LATER), joinable(due=0.0)),
        *(Meant(worker=0, until=LATER), Meant(worker=0, until=0.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("taking", "waiting"), [(False, 10), (True, 0)])
def test_shards_that_come_and_are_forgotten_leave_nothing_behind(
    what: Joinable | Meant | None, taking: bool, waiting: int
) -> None:
    queue = ShardQueue(64)
    most = 0
    for number in range(3_000):
        if isinstance(what, Meant):
            queue.add(shard(number), number % 3, meant=what)
        else:
            queue.add(shard(number), number % 3, what)
        if taking:
            queue.take(0.0, worker=number % 2)
        queue.discard(shard(number - waiting))
        most = max(most, kept(queue)) if number % 10 == 0 else most
    assert len(queue) <= waiting
    assert most < 600


# Anything, in any order.

MAX_ROWS = 5


@dataclass
class _Waiting:
    """What is known of a shard from outside."""

    place: int
    priority: float
    join: Joinable | None = None
    meant: Meant | None = None
    seen_due: bool = False

    def may_go_to(self, worker: int | None) -> bool:
        return self.meant is None or self.meant.worker == worker


_Coming = tuple[int, tuple[str, int, float] | None, tuple[int, float] | None]
"""Priority, what it may be joined with, and the worker that it is meant for."""


class Queues(RuleBasedStateMachine):
    """A queue beside a list that is searched for the right answer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queue = ShardQueue(MAX_ROWS)
        self.waiting: dict[ShardId, _Waiting] = {}
        self.taken: list[ShardId] = []
        self.numbers = 0
        self.passed_over: dict[int | None, tuple[ShardId | None, int]] = {}

    # The right answer.

    def held(self, item: _Waiting) -> bool:
        if item.join is None:
            return False
        joins = [other.join for other in self.waiting.values() if other.join is not None]
        group = [join for join in joins if join.key == item.join.key]
        due = any(join.due <= self.now for join in group)
        return not due and sum(join.rows for join in group) < MAX_ROWS

    def free(self, worker: int | None, *, strays: bool) -> dict[ShardId, _Waiting]:
        """Those that a worker may have: strays, if there are no others."""
        free = {s: item for s, item in self.waiting.items() if not self.held(item)}
        own = {s: item for s, item in free.items() if item.may_go_to(worker)}
        late = {s: i for s, i in free.items() if i.meant and i.meant.until <= self.now}
        return own or (late if strays else {})

    def oldest(self, worker: int | None) -> ShardId | None:
        """Of those that were never taken, are not held, and not meant for another."""
        free = {s: item for s, item in self.waiting.items() if item.place > 0}
        free = {s: i for s, i in free.items() if not self.held(i) and i.may_go_to(worker)}
        return min(free, key=lambda s: free[s].place, default=None)

    def check(self, run: tuple[ShardId, ...], worker: int | None, *, strays: bool) -> None:
        """Fail unless this is a run that may go now."""
        free = self.free(worker, strays=strays)
        if not run:
            assert not free, "a shard waits that is not held"
            return
        head = self.waiting[run[0]]
        assert run[0] in free, "a held shard was taken"
        first = min(free, key=lambda s: (-free[s].priority, free[s].place))
        if run[0] != first:
            assert run[0] == self.oldest(worker), "neither the first nor the oldest"
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
                st.none() | st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0, 5.0])),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def come(self, items: list[_Coming]) -> None:
        for priority, join, wants in items:
            self.numbers += 1
            new = shard(self.numbers)
            fits = meant = None
            if join is not None:
                fits = Joinable(key=join[0], rows=join[1], due=self.now + join[2])
            elif wants is not None:
                meant = Meant(worker=wants[0], until=self.now + wants[1])
            self.waiting[new] = _Waiting(self.numbers, priority, fits, meant)
            self.queue.add(new, priority, fits, meant)

    @rule(worker=st.integers(0, 2))
    def worker_goes(self, worker: int) -> None:
        self.queue.free(worker)
        for item in self.waiting.values():
            if item.may_go_to(worker):
                item.meant = None

    @rule(
        count=st.integers(1, 12),
        workers=st.lists(st.integers(0, 2), min_size=1, max_size=3),
        strays=st.booleans(),
    )
    def take(self, count: int, workers: list[int], strays: bool) -> None:
        for i in range(count):
            worker = workers[i % len(workers)] if self.queue.lanes else None
            oldest = self.oldest(worker)
            run = self.queue.take(self.now, worker=worker, strays=strays)
            for item in self.waiting.values():
                item.seen_due |= self.due_of(item) <= self.now
            assert all(member in self.waiting for member in run), "lost before, or taken twice"
            self.check(run, worker, strays=strays)
            for member in run:
                del self.waiting[member]
            self.taken += run
            # In a row, and by others than older ones that were held.
            before, times = self.passed_over.get(worker, (None, 0))
            times = times if oldest == before else 0
            times += oldest in self.waiting
            self.passed_over[worker] = oldest, times
            assert times <= PATIENCE

    @staticmethod
    def due_of(item: _Waiting) -> float:
        """When it may go to more than before."""
        if item.meant is not None:
            return item.meant.until
        return math.inf if item.join is None else item.join.due

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
        coming = (item for item in self.waiting.values() if not item.seen_due)
        dues = map(self.due_of, coming)
        assert self.queue.next_due() == min(dues, default=math.inf)

    @invariant()
    def little_is_remembered(self) -> None:
        assert kept(self.queue) <= 8 * (2 * len(self.waiting) + 64)

    def teardown(self) -> None:
        self.now = math.inf
        while self.waiting:
            before = len(self.waiting)
            self.take(1, [0], True)
            assert len(self.waiting) < before
        assert self.queue.take(self.now) == ()
        assert not self.queue._groups


Queues.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)
test_any_order_of_events_gives_every_shard_out_once = Queues.TestCase
