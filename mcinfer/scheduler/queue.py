"""The shards that wait for a worker: which one goes next, and which go together. Pure bookkeeping.

Order: shards that were already taken once go first, then higher priority, and within one priority first
come, first served. To keep any priority from starving, the oldest shard that is not held goes next once
`PATIENCE` runs in a row passed over it.

Joining: shards that are *joinable* carry a key; those with the same key may go as one run, up to a limit of
rows. A group of them is *ripe* once it has all the rows that a run may have or one of its members is due; a
ripe group goes when its turn comes. Until then it is *held*, and does not block others.

Affinity: a shard may be reserved for its preferred worker. It has the same place in the order as others, and
does not block them. Once it is overdue, some other workers may *steal* it, if they have nothing else to do.
If the preferred worker is gone, `release` makes what is reserved for it free for any.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

PATIENCE = 7  # how many runs in a row may go before the oldest

ShardId = tuple[int, int]  # request and shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Joinable:
    """What lets a shard go together with others of the same key; at `due` it goes, alone if need be.

    `rows` is the shard's weight: its rows, or more where so many of its kind would not fit one message.
    """

    key: Hashable
    rows: int
    due: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """The worker that a shard is reserved for, by its index, and those that may steal it from `until` on."""

    worker: int
    until: float = math.inf
    thieves: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Item:
    shard: ShardId
    priority: float
    place: int
    join: Joinable | None = None
    affinity: Affinity | None = None
    waiting: bool = True
    overdue: bool = False


@dataclass(slots=True)
class _Group:
    items: OrderedDict[int, _Item] = field(default_factory=OrderedDict)
    rows: int = 0
    overdue: int = 0
    off_heap: list[_Item] = field(default_factory=list)


class ShardQueue:
    """The queue; `len` is the number of waiting shards, `items` has them by shard.

    `reserved` has those that are reserved for a worker, by its index, while there are any.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self.items: OrderedDict[ShardId, _Item] = OrderedDict()
        self.reserved: dict[int, list[tuple[float, int, _Item]]] = {}
        self._overdue: dict[int, list[tuple[float, int, _Item]]] = {}  # by thief
        self._heap: list[tuple[float, int, _Item]] = []
        self._groups: dict[Hashable, _Group] = {}
        self._dues: list[tuple[float, int, _Item]] = []
        self._next_place = 0
        self._first_place = 0
        self._passed_over: dict[int | None, int] = {}  # by worker, where it matters which one

    def __len__(self) -> int:
        return len(self.items)

    def add(
        self,
        shard: ShardId,
        priority: int,
        join: Joinable | None = None,
        affinity: Affinity | None = None,
    ) -> None:
        """Put a shard behind those of its priority; one with an affinity is not joined."""
        self._next_place += 1
        item = _Item(shard, priority, self._next_place, join, affinity)
        self.items[shard] = item
        if affinity is not None:
            entry = (-item.priority, item.place, item)
            heapq.heappush(self.reserved.setdefault(affinity.worker, []), entry)
            if affinity.thieves:
                heapq.heappush(self._dues, (affinity.until, item.place, item))
            return
        self._push(item)
        if join is None:
            return
        group = self._groups.setdefault(join.key, _Group())
        group.items[item.place] = item
        group.rows += join.rows
        heapq.heappush(self._dues, (join.due, item.place, item))
        self._unpark_if_ripe(group)

    def add_first(self, shard: ShardId) -> None:
        """Put a shard that was taken before in front of all others; it goes alone."""
        self._first_place -= 1
        item = _Item(shard, math.inf, self._first_place)
        self.items[shard] = item
        self._push(item)

    def discard(self, shard: ShardId) -> None:
        item = self.items.get(shard)
        if item is not None:
            self._remove(item)

    def release(self, worker: int) -> None:
        """Any worker may have what is reserved for this one: it is gone."""
        for _, _, item in self.reserved.pop(worker, ()):
            if item.waiting:
                item.affinity = None
                self._push(item)

    def take(
        self,
        now: float,
        *,
        ahead: bool = False,
        worker: int | None = None,
        steal: bool = False,
    ) -> tuple[ShardId, ...]:
        """Take the shards of the next run; none while all that wait are held, or reserved for others.

        Args:
            now: The time.
            ahead: Whether the run would wait behind another: shards that were taken before do not.
            worker: The index of the worker that is to run it, which gets what is reserved for it, too; None
                while `reserved` is empty.
            steal: Whether it may steal, if it may have nothing else.
        """
        self._look_at_the_clock(now)
        item = self._first()
        if self.reserved:
            item = self._first_for(worker, item, steal=steal)
        if item is None:
            return ()
        oldest = self._oldest(worker)
        passed_over = self._passed_over.get(worker, 0)
        if oldest is not None and passed_over >= PATIENCE:
            item = oldest
        if ahead and item.place < 0:
            return ()
        members = self._members(item)
        for member in members:
            self._remove(member)
        if oldest is not None and oldest.waiting:
            self._passed_over[worker] = passed_over + 1
        elif passed_over:
            self._passed_over.pop(worker, None)
        return tuple(member.shard for member in members)

    def end_holding(self, now: float) -> None:
        """The held shards are due now: there is nothing to wait for."""
        self._dues = [
            (due if item.join is None else min(due, now), place, item)
            for due, place, item in self._dues
        ]
        heapq.heapify(self._dues)

    def next_due(self) -> float:
        """When a held shard becomes due, or a reserved one overdue; infinite without one."""
        while self._dues:
            item = self._dues[0][2]
            if item.waiting and (item.join is not None or item.affinity is not None):
                break
            heapq.heappop(self._dues)
        return self._dues[0][0] if self._dues else math.inf

    def _push(self, item: _Item) -> None:
        heapq.heappush(self._heap, (-item.priority, item.place, item))

    def _look_at_the_clock(self, now: float) -> None:
        while self._dues and self._dues[0][0] <= now:
            item = heapq.heappop(self._dues)[2]
            if item.waiting and item.affinity is not None:
                for worker in item.affinity.thieves:
                    entry = (-item.priority, item.place, item)
                    heapq.heappush(self._overdue.setdefault(worker, []), entry)
            elif item.waiting and item.join is not None:
                item.overdue = True
                group = self._groups[item.join.key]
                group.overdue += 1
                self._unpark_if_ripe(group)

    def _is_ripe(self, group: _Group) -> bool:
        return group.overdue > 0 or group.rows >= self._max_rows

    def _unpark_if_ripe(self, group: _Group) -> None:
        if not self._is_ripe(group):
            return
        for item in group.off_heap:
            self._push(item)
        group.off_heap = []

    def _is_held(self, item: _Item) -> bool:
        return item.join is not None and not self._is_ripe(self._groups[item.join.key])

    def _first(self) -> _Item | None:
        """The first by priority that is not held."""
        while self._heap:
            item = self._heap[0][2]
            if item.waiting and not self._is_held(item):
                return item
            heapq.heappop(self._heap)
            if item.waiting and item.join is not None:
                self._groups[item.join.key].off_heap.append(item)
        return None

    def _first_for(self, worker: int | None, first: _Item | None, *, steal: bool) -> _Item | None:
        """The first of what a worker may have, where `first` is that of what any may have."""
        own = () if worker is None else self.reserved.get(worker)
        if own and (first is None or own[0][:2] < (-first.priority, first.place)):
            return own[0][2]
        if first is not None or worker is None or not steal:
            return first
        overdue = self._overdue.get(worker, [])
        while overdue and not _is_reserved(overdue[0]):
            heapq.heappop(overdue)
        return overdue[0][2] if overdue else None

    def _oldest(self, worker: int | None) -> _Item | None:
        """The first by age that is not held, nor reserved for another worker."""
        for item in self.items.values():
            is_free = item.affinity is None or item.affinity.worker == worker
            if is_free and item.place > 0 and not self._is_held(item):
                return item
        return None

    def _members(self, item: _Item) -> list[_Item]:
        """This shard, and those that go with it, the oldest first."""
        members = [item]
        if item.join is None:
            return members
        rows = item.join.rows
        for other in self._groups[item.join.key].items.values():
            if other is item or other.join is None:
                continue
            rows += other.join.rows
            if rows > self._max_rows:
                break
            members.append(other)
        return members

    def _remove(self, item: _Item) -> None:
        """Take it out; the heaps skip it when they come to it."""
        item.waiting = False
        del self.items[item.shard]
        if not self.items:
            self._passed_over.clear()
        kept = max(len(self._heap), len(self._dues))
        if item.affinity is not None:
            heaps = [self._overdue.get(worker, []) for worker in item.affinity.thieves]
            heaps.append(own := self.reserved[item.affinity.worker])
            while own and not own[0][2].waiting:
                heapq.heappop(own)
            if not own:
                del self.reserved[item.affinity.worker]
            kept = max(kept, *map(len, heaps))
        if item.join is not None:
            group = self._groups[item.join.key]
            del group.items[item.place]
            group.rows -= item.join.rows
            group.overdue -= item.overdue
            if not group.items:
                del self._groups[item.join.key]
            kept = max(kept, len(group.off_heap))
        if kept > 2 * len(self.items) + 64:
            self._compact()

    def _compact(self) -> None:
        """Drop removed items, so that they do not outnumber those that wait."""
        self._heap = [entry for entry in self._heap if entry[2].waiting]
        heapq.heapify(self._heap)
        self._dues = [entry for entry in self._dues if entry[2].waiting]
        heapq.heapify(self._dues)
        for heaps in (self.reserved, self._overdue):
            for worker, entries in heaps.items():
                heaps[worker] = [entry for entry in entries if _is_reserved(entry)]
                heapq.heapify(heaps[worker])
        for group in self._groups.values():
            group.off_heap = [item for item in group.off_heap if item.waiting]


def _is_reserved(entry: tuple[float, int, _Item]) -> bool:
    return entry[2].waiting and entry[2].affinity is not None
