"""Slots of shared memory, of the host or of a card, allocated from blocks.

Ownership: a slot belongs to the holders of its `Slot.memory` or of any view of it (a NumPy array, a view of
a view). The slot is free exactly when the last of these is gone, without a call.

A view may end in any thread, inside any allocation, even one of the arena's own. So its end only appends
the slot to a deque, which runs no Python code; `allocate_all` and `reclaim` read the deque.

One thread owns an arena. Other threads may call only `find` and methods that read a number. The lowest free
address is used first: steady traffic reuses the same few slots, whose pages are warm in every process (the
first touch of a page costs more than copying it).
"""

import bisect
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mcinfer.config import Device
from mcinfer.errors import ClosedError, InvalidInputError, MemoryFullError, ProtocolError
from mcinfer.shm.block import Block

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector loads."""

_BLOCK_BYTES = 64 << 20
_BLOCK_ROUNDING = 2 << 20


def align(size: int, step: int = ALIGNMENT) -> int:
    """The next multiple of a power of two."""
    return (size + step - 1) & -step


class SharedBlock(Protocol):
    """What an arena cuts into slots: a `Block`, or a card's `mcinfer.cards.cuda.DeviceBlock`."""

    number: int
    size: int
    address: int
    fd: int
    token: bytes

    @property
    def device(self) -> Device | None: ...

    def memory(self, offset: int, size: int) -> Any: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Slot:
    """A piece of a block.

    The holders of `memory`, or of a view of it, own the slot.
    """

    block: int  # its number
    offset: int  # bytes from the block's start, a multiple of `ALIGNMENT`
    size: int  # the requested bytes
    address: int
    memory: Any  # a ctypes array of c_char; of a card's block: `mcinfer.cards.cuda.DeviceMemory`


class BlockNeededError(Exception):
    """The arena has room for a block, which the caller is to make, and to give to `Arena.add`.

    As long as this object lives, the arena counts the block's bytes.
    """

    def __init__(self, number: int, size: int) -> None:
        super().__init__(number, size)
        self.number = number
        self.size = size


class _SlotEnd(weakref.ref[Any]):
    """The place of a slot (block, offset and bytes there), with a callback at the end of its memory."""

    __slots__ = ("place",)

    place: tuple[int, int, int]


class _Extents:
    """The free bytes of one block: sorted by offset, neighbours joined."""

    __slots__ = ("_free", "block", "free")

    def __init__(self, block: SharedBlock) -> None:
        self.block = block
        self.free = block.size
        self._free = [(0, block.size)]  # offset and bytes of each

    def take(self, size: int) -> int | None:
        """Take bytes from the first extent that is large enough; their offset, or None."""
        for i, (offset, available) in enumerate(self._free):
            if available >= size:
                rest = (offset + size, available - size)
                self._free[i : i + 1] = [rest] if available > size else []
                self.free -= size
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        self.free += size
        i = bisect.bisect(self._free, (offset, 0))
        if i < len(self._free) and offset + size == self._free[i][0]:
            size += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == offset:
            i -= 1
            offset, before = self._free.pop(i)
            size += before
        self._free.insert(i, (offset, size))


class Arena:
    """Shared memory of the host, or of one card, up to a limit.

    Attributes:
        limit: Bytes that all blocks together may have.
        wanted: Whether a caller waits for memory; set by the owner.
        crowded: Whether more than half of the limit is in use, so that results should be copied out.
    """

    def __init__(
        self,
        limit: int,
        *,
        dropped: Callable[[int], None] = lambda _: None,
        create: Callable[[int, int], SharedBlock] | None = Block.create,
        close: Callable[[Any], object] = lambda block: block.close(),
        numbers: Iterator[int] | None = None,
        alignment: int = ALIGNMENT,
        name: str = "shared memory",
    ) -> None:
        self.limit = limit
        self._dropped = dropped  # called with the number of each block that the arena has closed
        self._name = name  # what errors call it
        self._create = create  # makes a block of a number and a size; None: callers do
        self._close = close  # closes one of its blocks
        self._needed = weakref.WeakSet[BlockNeededError]()
        self._numbers = itertools.count() if numbers is None else numbers
        self._alignment = alignment  # of each slot, a power of two
        self._blocks: dict[int, _Extents] = {}
        self._leased: dict[int, _SlotEnd] = {}  # by their `id`
        self._released: deque[Any] = deque()  # of these
        self._taken = 0
        self._closed = False
        self.crowded = False
        self.wanted = False

    @property
    def size(self) -> int:
        return sum(extents.block.size for extents in list(self._blocks.values()))

    @property
    def used(self) -> int:
        """Bytes in slots that are in use."""
        self.reclaim()
        return self._taken

    def block(self, number: int) -> SharedBlock | None:
        extents = self._blocks.get(number)
        return None if extents is None else extents.block

    def find(self, address: int, size: int) -> tuple[int, int] | None:
        """Block number and offset of memory that lies wholly in one block; for any thread."""
        blocks = self._blocks.copy()  # one step: the owner's thread may change it
        for number, extents in blocks.items():
            offset = address - extents.block.address
            if offset >= 0 and offset + size <= extents.block.size:
                return number, offset
        return None

    def allocate(self, size: int) -> Slot:
        return self.allocate_all([size])[0]

    def allocate_all(self, sizes: Sequence[int]) -> list[Slot]:
        """Slots of these sizes in bytes, also 0, with any content.

        All or none: two requests that each held a part and waited for the rest would wait for ever.

        Raises:
            InvalidInputError: They are larger than the limit.
            MemoryFullError: The memory is in use.
            ClosedError: The arena is closed.
            OSError: The system has no memory or descriptor left.
            CardError: The card has no memory left, or the driver refused.
            BlockNeededError: It takes a new block, which the caller is to make.
        """
        step = self._alignment
        wanted = [max((size + step - 1) & -step, step) for size in sizes]
        if sum(wanted) > self.limit:
            raise InvalidInputError(
                f"{sum(sizes)} bytes of tensors do not fit the {self._name} of {self.limit} bytes "
                "(Limits.memory_bytes)"
            ).refusing("too_large")
        if self._closed:
            raise ClosedError("the master is closed")
        self.reclaim()
        places = self._take_all(wanted)
        if places is None:
            raise self.full(sum(sizes))
        slots = [
            self._slot(block, offset, space, size)
            for (block, offset), space, size in zip(places, wanted, sizes, strict=True)
        ]
        self.crowded = self._taken > self.limit // 2
        return slots

    def add(self, block: SharedBlock) -> None:
        """Take a block that a caller has made.

        Raises:
            ClosedError: The arena is closed, as the block is now.
        """
        if self._closed:
            self._close(block)
            raise ClosedError("the master is closed")
        self._blocks[block.number] = _Extents(block)

    def full(self, size: int) -> MemoryFullError:
        """The error that so many bytes are not free."""
        return MemoryFullError(
            f"{size} bytes of {self._name} wanted, all {self.limit} allowed (Limits.memory_bytes) are held "
            "by requests or arrays, or waited for"
        )

    def reclaim(self) -> bool:
        """Put released slots back on the free lists; whether there were any."""
        some = False
        while self._released:
            end: _SlotEnd = self._released.popleft()
            if self._leased.pop(id(end), None) is not None:
                number, offset, space = end.place
                self._taken -= space
                self._blocks[number].give(offset, space)
                some = True
        if some:
            self.crowded = self._taken > self.limit // 2
        return some

    def trim(self, most: int) -> None:
        """Close blocks without slots while all together have more than `most` bytes.

        The smallest that is enough goes, or the largest if none is enough.
        """
        self.reclaim()
        free = sorted(self._free_blocks(), key=lambda block: block.size)
        while free and (excess := self.size - most) > 0:
            enough = (i for i, block in enumerate(free) if block.size >= excess)
            self._drop(free.pop(next(enough, -1)))

    def close(self) -> None:
        """Close all blocks; views that are still held keep their memory."""
        self._closed = True
        for extents in self._blocks.values():
            self._close(extents.block)
        self._blocks.clear()
        # Slots that end from now on need no account.
        self._leased.clear()
        self._released.clear()
        self._taken = 0
        self.crowded = False

    def _take_all(self, wanted: Sequence[int]) -> list[tuple[SharedBlock, int]] | None:
        """Places for all, in the present blocks or together in a new one."""
        found: list[tuple[SharedBlock, int]] = []
        while len(found) < len(wanted) and (place := self._take(wanted[len(found)])):
            found.append(place)
        if len(found) == len(wanted):
            return found
        for (block, offset), space in zip(found, wanted, strict=False):
            self._blocks[block.number].give(offset, space)
        extents = self._grow(sum(wanted))
        if extents is None:
            return None
        starts = [extents.take(space) for space in wanted]
        return [(extents.block, start) for start in starts if start is not None]

    def _take(self, space: int) -> tuple[SharedBlock, int] | None:
        for extents in self._blocks.values():
            if extents.free >= space:
                offset = extents.take(space)
                if offset is not None:
                    return extents.block, offset
        return None

    def _free_blocks(self) -> list[SharedBlock]:
        return [e.block for e in self._blocks.values() if e.free == e.block.size]

    def _drop(self, block: SharedBlock) -> None:
        del self._blocks[block.number]
        self._close(block)
        self._dropped(block.number)

    def _slot(self, block: SharedBlock, offset: int, space: int, size: int) -> Slot:
        memory = block.memory(offset, size)
        end = _SlotEnd(memory, self._released.append)
        end.place = block.number, offset, space
        self._leased[id(end)] = end
        self._taken += space
        return Slot(block.number, offset, size, block.address + offset, memory)

    def _grow(self, wanted: int) -> _Extents | None:
        """A new block; to stay within the limit, blocks without slots are closed."""
        total = sum(extents.block.size for extents in self._blocks.values())
        total += sum(needed.size for needed in self._needed)
        free = self._free_blocks()
        if total - sum(block.size for block in free) + wanted > self.limit:
            return None
        for block in free:
            if total + wanted <= self.limit:
                break
            total -= block.size
            self._drop(block)
        size = min(max(align(wanted, _BLOCK_ROUNDING), _BLOCK_BYTES), self.limit - total)
        number = next(self._numbers)
        if self._create is None:
            needed = BlockNeededError(number, size)
            self._needed.add(needed)
            raise needed
        self.add(self._create(number, size))
        return self._blocks[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedBlock:
    """A block that another process made, not opened yet; the descriptor is the holder's."""

    number: int
    size: int  # its bytes
    fd: int  # what its maker has handed over
    token: bytes = b""  # what came with the descriptor; empty for a block in the host's memory
    device: Device | None = None  # the card whose memory it is; None for the host's


class AttachedBlocks:
    """The other side of a master's arenas: their blocks in one of its workers, by number.

    Those of the host are mapped at once. Those of cards are kept as they were offered, and opened when the
    first tensor lies in them.

    Attributes:
        opened: Blocks that are mapped here.
        card: The worker's `mcinfer.cards.staging.CardEngine`, which opens blocks of cards, and pins those of
            the host; None without a card.
    """

    def __init__(self) -> None:
        self.card: Any = None
        self.opened: dict[int, SharedBlock] = {}
        self._offered: dict[int, OfferedBlock] = {}

    def __contains__(self, number: object) -> bool:
        return number in self.opened or number in self._offered

    def __iter__(self) -> Iterator[int]:
        return iter([*self.opened, *self._offered])

    def add(self, offered: OfferedBlock) -> None:
        """Take a block; its descriptor is this object's, even if that fails.

        Raises:
            ProtocolError: It is a block of the host, and not as it should be (`Block.attach`).
            OSError: This process has no memory or descriptor left.
        """
        number = offered.number
        if offered.device is not None:
            self._offered[number] = offered
            return
        block = self.opened[number] = Block.attach(number, offered.size, offered.fd)
        if self.card is not None:
            self.card.pin(block)

    def find(self, number: int) -> SharedBlock | None:
        """An opened block, or a card's, which is opened now; None if there is none of this number.

        Raises:
            PredictError: The card has no room for the mapping; later there may be some.
            CardError, ProtocolError, OSError: As `Card.attach`.
        """
        if number in self._offered and self.card is not None:
            self.opened[number] = self.card.open_block(self._offered[number])
            os.close(self._offered.pop(number).fd)
        return self.opened.get(number)

    def take(self, number: int) -> OfferedBlock:
        """A block that is not opened yet, now the caller's; `ProtocolError` if there is none."""
        if number not in self._offered:
            raise ProtocolError(f"block {number} of the weights was not attached before BUILD")
        return self._offered.pop(number)

    def drop(self, number: int) -> None:
        """Close a block that nothing is bound to any more; nothing if there is none of this number."""
        offered, block = self._offered.pop(number, None), self.opened.pop(number, None)
        if offered is not None:
            os.close(offered.fd)
        if block is not None:
            if self.card is not None:
                self.card.unpin(block)
            block.close()

    def close(self) -> None:
        """Close what was not opened; the mappings end with what refers to them."""
        self.card = None
        while self._offered:
            os.close(self._offered.popitem()[1].fd)
