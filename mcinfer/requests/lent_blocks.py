"""The blocks that a worker makes for outputs without a place, in the master.

::

    worker: fills a block, the smallest that fits ── REPLY ──► lease ──► arrays of the user
        ▲                                                                     │ the last one goes
        └──── its number, with the next PREDICT ◄── take_back ◄── ended ◄─────┘

A block's descriptor comes once, and the block is mapped once: in steady traffic no descriptor is passed, and
nothing is copied.

Ownership: a block belongs to the worker, or to the holders of its lease, never to both. So what a view shows
does not change. What the worker need not keep for later answers is closed on both sides. Views may end in any
thread; the loop's thread does the rest.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from mcinfer.errors import ProtocolError
from mcinfer.protocol import TensorRef
from mcinfer.requests.forks import forks
from mcinfer.requests.frames import Frame, Lease, Ticket
from mcinfer.requests.planner import lease, make_frame
from mcinfer.shm.arena import Slot
from mcinfer.shm.block import Block

MOST_BLOCKS = 16
MOST_BYTES = 64 << 20
"""The most that users hold of a worker's: results beyond are copied. And the most that the worker keeps for
later answers. Each block takes a descriptor on both sides."""


class LentBlocks:
    """The blocks of one worker. To iterate over it gives the tickets of those that are not in use.

    Args:
        receive: Maps a block that the worker has handed over; its exceptions come through.

    Attributes:
        ended: Leases whose holders are gone, until `take_back`.
        size: Bytes of all blocks.
    """

    def __init__(self, receive: Callable[[int], Block]) -> None:
        self.ended: deque[Ticket] = deque()
        self.size = 0
        self._receive = receive
        self._blocks: dict[int, tuple[Block, Frame]] = {}
        self._kept: dict[int, Ticket] = {}  # which the worker may fill
        self._kept_bytes = 0
        self._lost: list[int] = []  # which it has handed over in vain
        self._forks = forks()

    def __iter__(self) -> Iterator[Ticket]:
        return iter([*self.ended.copy(), *self._kept.copy().values()])

    @property
    def is_crowded(self) -> bool:
        """Whether so many blocks are leased that results are to be copied."""
        held = len(self._blocks) - len(self._kept) - len(self.ended)
        return held > MOST_BLOCKS or self.size - self._kept_bytes > MOST_BYTES

    @property
    def used(self) -> int:
        """Bytes of the blocks that users hold."""
        return self.size - sum(ticket.frame.slot.size for ticket in self)

    def lease(self, number: int) -> Lease:
        """Lease a block that the worker has filled.

        Raises:
            ProtocolError: The worker has not handed over such a block, or was not given it back.
            OSError: This process has no descriptor or memory left.
        """
        found = self._blocks.get(number)
        if found is None:
            found = self._add(number)
        elif self._kept.pop(number, None) is None:
            raise ProtocolError(f"block {number} is filled again, and was not given back")
        else:
            self._kept_bytes -= found[0].size
        block, frame = found
        held = lease(frame, self.ended)
        held.block = block
        return held

    def _add(self, number: int) -> tuple[Block, Frame]:
        """Map a block when an answer lies in it for the first time."""
        try:
            block = self._receive(number)
        except OSError:
            self._lost.append(number)
            raise
        block.close()  # the mapping stays
        frame = make_frame(Slot(number, 0, block.size, block.address, None))
        self._forks.add(frame, self)
        self._blocks[number] = block, frame
        self.size += block.size
        return block, frame

    def give_up(self, outputs: Sequence[TensorRef]) -> None:
        """Let go of an answer that no request takes."""
        for number in {reference[3] for reference in outputs}:
            if number is not None and number < 0:
                with suppress(OSError):  # no descriptor is left here: the block is lost
                    self.lease(number)

    def take_back(self) -> tuple[int, list[int]]:
        """The number of a block that the worker may fill again, or 0, and of those that it is to close."""
        closed, self._lost = self._lost, []
        while self.ended:
            ticket = self.ended.popleft()
            if self._forks.held:  # after it was taken: so its views ended before the fork
                self.ended.appendleft(ticket)
                break
            slot = ticket.frame.slot
            if len(self._kept) < MOST_BLOCKS and self._kept_bytes + slot.size <= MOST_BYTES:
                self._kept[slot.block] = ticket
                self._kept_bytes += slot.size
                return slot.block, closed
            del self._blocks[slot.block]
            self.size -= slot.size
            closed.append(slot.block)
        return 0, closed

    def close(self) -> None:
        """The worker has ended: what is leased stays as long as its views."""
        self._blocks.clear()
        self._kept.clear()
        self.size = self._kept_bytes = 0
