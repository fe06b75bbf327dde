"""The shards that wait for a worker: which one goes next, and which go together. Pure bookkeeping.

Order: shards that were already taken once go first, then higher priority, and within one priority first
come, first served. To keep any priority from starving, the oldest shard that is not held goes next once
`PATIENCE` runs in a row passed over it.

Joining: shards that are *joinable* carry a key; those with the same key may go as one run, up to a limit of
rows. A group of them is *ripe* once it has all the rows that a run may have or one of its members is due; a
ripe group goes when its turn comes, or as much of it as `Joining` says. Until then it is *held*, and does not
block others.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

PATIENCE = 7  # how many runs in a row may go before the oldest

ShardId = tuple[int, int]  # request and shard


@dataclass(slots=True, eq=False)
class _Item:
    shard: ShardId
    priority: float
    place: int
    key: Hashable = None
    rows: int = 0
    due: float = math.inf
    overdue: bool = False
    alone: bool = False

    @property
    def entry(self) -> tuple[float, int, "_Item"]:
        """It in a line: by priority, then by place."""
        return -self.priority, self.place, self


_Line = list[tuple[float, int, _Item]]
"""Sorted. To insert or delete anywhere in some thousands of these costs a few microseconds."""


@dataclass(slots=True)
class _Group:
    items: OrderedDict[int, _Item] = field(default_factory=OrderedDict)
    rows: int = 0
    overdue: int = 0
    is_held: bool = True  # and in no line: who looks for the next run does not meet its items


class ShardQueue:
    """The queue; `len` is the number of waiting shards, `items` has them by shard."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self.items: OrderedDict[ShardId, _Item] = OrderedDict()
        self._free: _Line = []
        self._groups: dict[Hashable, _Group] = {}
        self._dues: _Line = []  # by time
        self._places = 0
        self._passed_over = 0

    def __len__(self) -> int:
        return len(self.items)

    def add(
        self,
        shard: ShardId,
        priority: int,
        key: Hashable = None,
        rows: int = 0,
        due: float = math.inf,
    ) -> None:
        """Put a shard behind those of its priority.

        With a key, it may go together with others of this key; at `due` it goes, alone if need be.
        """
        self._places += 1
        item = self.items[shard] = _Item(shard, priority, self._places, key, rows, due)
        if key is None:
            insort(self._free, item.entry)
            return
        group = self._groups.setdefault(key, _Group())
        group.items[item.place] = item
        group.rows += rows
        if not group.is_held:
            insort(self._free, item.entry)
        self._hold_or_free(group)
        insort(self._dues, (due, item.place, item))

    def add_first(self, shard: ShardId, *, alone: bool = False) -> None:
        """Put a shard that was taken before in front of all others; it is not joined with any.

        `alone`: it goes to a worker that has nothing else.
        """
        self._places += 1
        item = self.items[shard] = _Item(shard, math.inf, -self._places, alone=alone)
        insort(self._free, item.entry)

    def discard(self, shard: ShardId) -> None:
        item = self.items.get(shard)
        if item is not None:
            self._remove(item)

    def end_holding(self, until: float) -> None:
        """Hold the shards that were due until then no longer."""
        while self._dues and self._dues[0][0] <= until:
            item = self._dues.pop(0)[2]
            item.overdue = True
            group = self._groups[item.key]
            group.overdue += 1
            self._hold_or_free(group)

    def take(
        self, *, beside: bool = False, most: Callable[[int, bool], int] | None = None
    ) -> tuple[ShardId, ...]:
        """Take the shards of the next run; none while all that wait are held.

        `beside`: the worker has others. `most`: how many of so many that may go together are to do so, or 0
        if the run waits for more; it is also given whether these have all the rows that a run may have. None
        is all.
        """
        if not self._free:
            return ()
        item, oldest = self._free[0][2], self._oldest()
        if oldest is not None and self._passed_over >= PATIENCE:
            item = oldest
        if beside and item.alone:
            return ()
        limit = len(self.items)
        if most is not None and item.key is not None:
            group = self._groups[item.key]
            limit = most(len(group.items), group.rows >= self._max_rows)
        if not limit:
            return ()
        members = self._members(item, limit)
        for member in members:
            self._remove(member)
        is_passed_over = oldest is not None and oldest not in members
        self._passed_over = self._passed_over + 1 if is_passed_over else 0
        return tuple(member.shard for member in members)

    def next_due(self) -> float:
        """When a held shard becomes due; infinite without one."""
        return self._dues[0][0] if self._dues else math.inf

    def _is_held(self, item: _Item) -> bool:
        return item.key is not None and self._groups[item.key].is_held

    def _hold_or_free(self, group: _Group) -> None:
        """Its rows, or those that are overdue, have changed."""
        is_held = group.rows < self._max_rows and not group.overdue
        if is_held == group.is_held:
            return
        group.is_held = is_held
        for item in group.items.values():
            if is_held:
                _delete(self._free, item)
            else:
                insort(self._free, item.entry)

    def _oldest(self) -> _Item | None:
        """The first by age that is not held."""
        for item in self.items.values():
            if item.place > 0 and not self._is_held(item):
                return item
        return None

    def _members(self, item: _Item, most: int) -> list[_Item]:
        """This shard, and those that go with it, the oldest first; so many in all at most."""
        members, rows = [item], item.rows
        others = () if item.key is None else self._groups[item.key].items.values()
        for other in others:
            if other is item:
                continue
            rows += other.rows
            if rows > self._max_rows or len(members) >= most:
                break
            members.append(other)
        return members

    def _remove(self, item: _Item) -> None:
        del self.items[item.shard]
        if not self._is_held(item):
            _delete(self._free, item)
        if item.key is not None:
            if not item.overdue:
                del self._dues[bisect_left(self._dues, (item.due, item.place, item))]
            group = self._groups[item.key]
            del group.items[item.place]
            group.rows -= item.rows
            group.overdue -= item.overdue
            self._hold_or_free(group)
            if not group.items:
                del self._groups[item.key]


def _delete(line: _Line, item: _Item) -> None:
    del line[0 if line[0][2] is item else bisect_left(line, item.entry)]
