"""The blocks that a worker makes for outputs without a place, in the master.

::

    worker: fills a block, the smallest that fits ── REPLY ──► lease ──► arrays of the user
        ▲                                                                     │ the last one goes
        └──── its number, with the next PREDICT ◄── take_back ◄── ended ◄─────┘

A block's descriptor comes once, and the block is mapped once: in steady traffic no descriptor is passed, and
nothing is copied.

Ownership: a block belongs to the worker, or to the holders of its lease, never to both. So what a view shows
does not change. What the worker need not keep for later answers is closed on both sides. A lease holds the
mapping, also after the worker's end. Views may end in any thread; the loop's thread does the rest.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from mcinfer.errors import ProtocolError
from mcinfer.protocol import TensorRef
from mcinfer.requests.forks import forks
from mcinfer.requests.frames import Lease, Ticket, make_frame
from mcinfer.shm.arena import Slot
from mcinfer.shm.block import Block

MOST_BLOCKS = 16
MOST_BYTES = 64 << 20
"""The most that users hold of a worker's: results beyond are copied. And the most that the worker keeps for
later answers. Each block takes a descriptor on both sides."""


class _Ticket(Ticket):
    """Notices the end of a lease of a block, and holds no memory."""

    __slots__ = ("number", "size")

    number: int
    size: int


class LentBlocks:
    """The blocks of one worker.

    Args:
        receive: Maps a block that the worker has handed over; its exceptions come through.

    Attributes:
        ended: Leases whose holders are gone, until `take_back`.
        lost: Blocks that the worker has handed over in vain, until `take_back`.
        size: Bytes of all blocks.
    """

    def __init__(self, receive: Callable[[int], Block]) -> None:
        self.ended: deque[_Ticket] = deque()
        self.lost: list[int] = []
        self.size = 0
        self._receive = receive
        self._blocks: dict[int, Slot] = {}
        self._kept: set[int] = set()  # which the worker may fill
        self._kept_bytes = 0
        self._forks = forks()

    @property
    def is_crowded(self) -> bool:
        """Whether so many blocks are leased that results are to be copied."""
        held = len(self._blocks) - len(self._kept) - len(self.ended)
        return held > MOST_BLOCKS or self.used > MOST_BYTES

    @property
    def used(self) -> int:
        """Bytes of the blocks that users hold."""
        return self.size - self._kept_bytes - sum(ticket.size for ticket in self.ended.copy())

    def lease(self, number: int) -> Lease:
        """Lease a block that the worker has filled.

        Raises:
            ProtocolError: The worker has not handed over such a block, or was not given it back.
            OSError: This process has no descriptor or memory left.
        """
        slot = self._blocks.get(number)
        if slot is None:
            try:
                block = self._receive(number)
            except OSError:
                self.lost.append(number)
                raise
            block.close()  # the mapping stays
            size = block.size
            slot = self._blocks[number] = Slot(
                number, 0, size, block.address, block.memory(0, size)
            )
            self.size += size
        elif number not in self._kept:
            raise ProtocolError(f"block {number} is filled again, and was not given back")
        else:
            self._kept.remove(number)
            self._kept_bytes -= slot.size
        # The lease alone holds the frame: as long as a fork finds it, it is in use, and mapped.
        frame = make_frame(slot)
        self._forks.add(frame)
        held = Lease()
        held.__array_interface__ = frame.interface
        held.frame = frame
        held.ticket = ticket = _Ticket(held, self.ended.append)
        ticket.number, ticket.size = number, slot.size
        return held

    def give_up(self, outputs: Sequence[TensorRef]) -> None:
        """Let go of the blocks of an answer that no request takes, or that one could not take."""
        for number in {reference[3] for reference in outputs}:
            is_taken = number in self._blocks and number not in self._kept
            if number is not None and number < 0 and not (is_taken or number in self.lost):
                with suppress(OSError):  # no descriptor is left here: the block is lost
                    self.lease(number)

    def take_back(self) -> tuple[list[int], list[int]]:
        """The numbers of the blocks that the worker may fill again, and of those that it is to close."""
        returned: list[int] = []
        closed, self.lost = self.lost, []
        while self.ended:
            ticket = self.ended.popleft()
            if self._forks.held:  # after it was taken: so its views ended before the fork
                self.ended.appendleft(ticket)
                break
            number, size = ticket.number, ticket.size
            if len(self._kept) < MOST_BLOCKS and self._kept_bytes + size <= MOST_BYTES:
                self._kept.add(number)
                self._kept_bytes += size
                returned.append(number)
            else:
                del self._blocks[number]
                self.size -= size
                closed.append(number)
        return returned, closed

    def trim(self) -> list[int]:
        """The blocks that the worker is to close, since it would not keep them; it may get no more runs."""
        closed, left = [], MOST_BYTES - self._kept_bytes
        for ticket in self.ended.copy():
            if ticket.size <= left or self._forks.held:
                left -= ticket.size
                continue
            self.ended.remove(ticket)
            del self._blocks[ticket.number]
            self.size -= ticket.size
            closed.append(ticket.number)
        return closed

    def close(self) -> None:
        """The worker has ended: what is leased stays as long as its views."""
        self._blocks.clear()
        self._kept.clear()
        self.size = self._kept_bytes = 0
