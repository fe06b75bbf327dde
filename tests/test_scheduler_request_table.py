"""Tests of mcinfer/scheduler/scheduler.py, the request table: the book of requests. Time is a number."""

import math
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mcinfer.scheduler.scheduler import Outcome, RequestTable


def test_request_that_was_answered_stays_until_no_worker_has_a_piece_of_it() -> None:
    table = RequestTable(1)
    entry = table.accept(7, (1, 1), 0.0, 0.0, 10.0, 64)
    table.enqueue(entry, 0, None)
    assert table.take_run(0.0) == ((7, 0),)
    assert not table.strike(entry)
    table.close(entry, "failed", 1.0)
    assert len(table.queue) == 0
    assert not table.strike(entry)
    entry.outstanding -= 1
    assert table.strike(entry)
    assert len(table) == 0


def test_deadlines_of_those_that_were_answered_do_not_pile_up() -> None:
    table = RequestTable(1)
    table.accept(-1, (1,), 0.0, 0.0, 1000.0, 0)
    for number in range(10_000):
        entry = table.accept(number, (1,), 0.0, 0.0, 2000.0, 0)
        table.close(entry, "succeeded", 0.0)
        table.strike(entry)
    assert len(table._deadlines) < 200
    assert table.next_deadline() == 1000.0


class Books(RuleBasedStateMachine):
    """Requests that come, are taken and end in any order, counted from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = RequestTable(1)
        self.sizes: dict[int, int] = {}
        self.deadlines: dict[int, float] = {}
        self.open: set[int] = set()
        self.begun: set[int] = set()
        self.ended: Counter[Outcome] = Counter()

    @rule(
        pieces=st.integers(1, 3),
        size=st.integers(0, 100),
        timeout=st.sampled_from([0.0, 1.0, 5.0, math.inf]),
    )
    def comes(self, pieces: int, size: int, timeout: float) -> None:
        number = len(self.sizes)
        self.sizes[number], self.deadlines[number] = size, self.now + timeout
        self.open.add(number)
        rows = (1,) * pieces
        entry = self.table.accept(number, rows, self.now, self.now, timeout, size)
        self.table.enqueue(entry, 0, None)

    @rule()
    def is_given(self) -> None:
        for number, _ in self.table.take_run(self.now):
            assert number in self.open
            self.begun.add(number)

    @rule(which=st.integers(0, 99), outcome=st.sampled_from(["succeeded", "failed", "cancelled"]))
    def ends(self, which: int, outcome: Outcome) -> None:
        if self.open:
            self.end(sorted(self.open)[which % len(self.open)], outcome)

    def end(self, number: int, outcome: Outcome) -> None:
        entry = self.table[number]
        self.table.close(entry, outcome, self.now)
        self.open.discard(number)
        self.ended[outcome] += 1
        entry.outstanding = 0
        assert self.table.strike(entry)

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = {number for number in self.open if self.deadlines[number] <= self.now}
        for entry in self.table.overdue(self.now):
            due.remove(entry.number)
            self.end(entry.number, "failed")
        assert not due

    @invariant()
    def counts_are_those_seen_from_outside(self) -> None:
        table = self.table
        assert table.accepted == len(self.sizes)
        assert table.in_flight == len(self.open) == len([*table.open()]) == len(table)
        assert table.in_flight_bytes == sum(self.sizes[number] for number in self.open)
        assert table.not_begun == len(self.open - self.begun)
        found = (table.succeeded, table.failed, table.cancelled)
        assert found == (
            self.ended["succeeded"],
            self.ended["failed"],
            self.ended["cancelled"],
        )
        assert table.latency.snapshot().count == table.succeeded

    @invariant()
    def next_deadline_is_the_earliest_of_the_open(self) -> None:
        dues = [self.deadlines[number] for number in self.open]
        assert self.table.next_deadline() == min(dues, default=math.inf)


Books.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
test_any_order_of_events_is_counted = Books.TestCase
