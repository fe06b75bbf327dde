"""What the stages of a pipeline pass to each other: values for later stages, outputs for all ranks.

::

    with a layout      one packet, in fixed memory: [0 or 1][values, each at its place]
    0                  the values are in the packet
    1, or no layout    a note follows (its length, then the shapes), and then the values, one by one; a length
                       of -1 says that there are no values, since the stage failed

A rank receives all values before its first step and sends all after its last one, in the order of the ranks:
since values only go to later stages, no two ranks wait for each other. The packets of a link take turns. A
receiver acknowledges each once it has copied the values, and the sender waits for that before it writes the
same memory again: so an earlier stage is at most `_TURNS` runs ahead.
"""

import ctypes
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import Buffer, Strings
from mcinfer.errors import PredictError
from mcinfer.ranks.collectives.base import Collective, Group
from mcinfer.ranks.layouts import PlanMemory, Values, owned, side_by_side
from mcinfer.ranks.slicing.plans import RankPlan

_HEADER_BYTES = 64
_FAILED = -1
_TURNS = 2
"""Packets of a link: while one is read, the next can be written."""


@dataclass(slots=True, kw_only=True, eq=False)
class Link:
    """Values that go the same way.

    Attributes:
        group: All ranks.
        source: The rank that gives them.
        to: The rank that gets them; None if all others do.
        names: In the order in which they are sent.
        acknowledge: Carries the acknowledgements, for a link to one other rank.
        packets: How many went.
    """

    group: Group
    source: int
    to: int | None
    names: tuple[str, ...]
    acknowledge: Collective | None = None
    packets: int = 0

    def prepare(self, size: int) -> Collective:
        """A collective of so many bytes."""
        if self.to is None:
            return self.group.prepare_broadcast([size], np.uint8, self.source)
        return self.group.prepare_transfer([size], np.uint8, self.source, self.to)

    def send(self, data: NDArray[np.uint8]) -> None:
        """Send without a collective."""
        if self.to is None:
            self.group.broadcast(data, self.source)
        else:
            self.group.send(data, self.to)

    def receive(self, size: int) -> NDArray[Any]:
        """Receive so many bytes without a collective."""
        if self.to is None:
            return self.group.broadcast(np.empty(size, np.uint8), self.source)
        return self.group.recv([size], np.uint8, self.source)


class Packet(NamedTuple):
    """A link's memory for one layout: collectives that take turns, and where each value lies in them."""

    turns: tuple[Collective, ...]
    places: Mapping[str, slice]


class StageLinks:
    """The links of one rank, in one group of all ranks.

    Attributes:
        incoming: One for each rank that sends to this one.
        outgoing: One for each rank that this one sends to.
        delivered: One for each rank whose outputs all ranks get; empty if only their makers have them.
    """

    def __init__(self, plan: RankPlan, group: Group, delivered: Mapping[str, int]) -> None:
        """`delivered` is the rank of each output that all ranks get. All ranks call this together."""
        me = group.rank
        received = [(source, name) for name, source in plan.receives.items()]
        sent = [(to, name) for name, ranks in plan.sends.items() for to in ranks]
        whole = [(root, name) for name, root in delivered.items()]
        # In the order of the ranks: two ranks make their operations in the same order.
        self.incoming = [_transfers(group, one, me, names) for one, names in _by_rank(received)]
        self.outgoing = [_transfers(group, me, one, names) for one, names in _by_rank(sent)]
        self.delivered = [
            Link(group=group, source=root, to=None, names=names) for root, names in _by_rank(whole)
        ]

    def prepare(self, layout: PlanMemory) -> None:
        """Make the packets of a layout; all ranks call this in the same order."""
        for link in (*self.incoming, *self.outgoing, *self.delivered):
            sizes = {name: layout.buffer(name).size for name in link.names}
            places, size = side_by_side(sizes, _HEADER_BYTES)
            turns = tuple(link.prepare(size) for _ in range(_TURNS))
            layout.packets[link] = Packet(turns, places)

    def receive(self, layout: PlanMemory | None, places: Values) -> Values | None:
        """Before the first step, receive from all earlier stages.

        Returns:
            What did not fit its place; None if an earlier stage failed.
        """
        found = [_take(link, layout, places) for link in self.incoming]
        changed: Values = {}
        for values in found:
            changed |= values or {}
        return None if None in found else changed

    def send(self, layout: PlanMemory | None, values: Values | None) -> None:
        """After the last step, send to all later stages; None, without a layout, if this one failed."""
        for link in self.outgoing:
            if values is None:
                link.send(_number(_FAILED))
            else:
                _give(link, layout, values)

    def deliver(self, layout: PlanMemory | None, places: Values, values: Values) -> Values:
        """Give all ranks the outputs; return those that did not fit their places here."""
        changed: Values = {}
        for link in self.delivered:
            if link.source == link.group.rank:
                _give(link, layout, values)
            else:
                changed |= _take(link, layout, places) or {}
        return changed


def _transfers(group: Group, source: int, to: int, names: tuple[str, ...]) -> Link:
    acknowledge = group.prepare_transfer([1], np.uint8, to, source)
    return Link(group=group, source=source, to=to, names=names, acknowledge=acknowledge)


def _give(link: Link, layout: PlanMemory | None, values: Values) -> None:
    """Send values: with a layout in its memory, or if their shapes do not fit that, behind it."""
    given = [_tensor(name, values) for name in link.names]
    if layout is not None:
        if link.acknowledge is not None and link.packets >= _TURNS:
            link.acknowledge.run()  # of the packet whose turn this is
        link.packets += 1
        packet = layout.packets[link]
        turn = packet.turns[layout.runs % _TURNS]
        fits = all(
            (value.shape, value.element_type) == (like.shape, like.element_type)
            for value, like in zip(given, map(layout.buffer, packet.places), strict=True)
        )
        turn.input[0] = 0 if fits else 1
        if fits:
            for value, span in zip(given, packet.places.values(), strict=True):
                turn.input[span] = _bytes_of(value)
        turn.run()
        if fits:
            return
    text = json.dumps([[value.element_type, value.shape] for value in given]).encode()
    link.send(_number(len(text)))
    link.send(np.frombuffer(text, np.uint8))
    for value in given:
        link.send(_bytes_of(value))


def _take(link: Link, layout: PlanMemory | None, places: Values) -> Values | None:
    """Receive values to their places; return those that did not fit, or None if the sender has failed."""
    if layout is not None:
        packet = layout.packets[link]
        turn = packet.turns[layout.runs % _TURNS]
        turn.run()
        is_packed = not turn.output[0]
        if is_packed:
            for name, span in packet.places.items():
                place = places[name]
                if isinstance(place, Buffer):
                    _bytes_of(place)[...] = turn.output[span]
        if link.acknowledge is not None:
            link.acknowledge.run()
        if is_packed:
            return {}
    [length] = link.receive(8).view(np.int64)
    if length == _FAILED:
        return None
    found: Values = {}
    shapes = json.loads(link.receive(int(length)).tobytes())
    for name, (element_type, shape) in zip(link.names, shapes, strict=True):
        value = owned(name, element_type, shape)
        _bytes_of(value)[...] = link.receive(value.size)
        found[name] = value
    return found


def _by_rank(pairs: Iterable[tuple[int, str]]) -> Iterable[tuple[int, tuple[str, ...]]]:
    names: dict[int, list[str]] = defaultdict(list)
    for rank, name in sorted(pairs):
        names[rank].append(name)
    return [(rank, tuple(found)) for rank, found in names.items()]


def _tensor(name: str, values: Values) -> Buffer:
    value = values[name]
    if isinstance(value, Strings):
        raise PredictError(f"value {name!r} is of strings, which ranks do not send each other")
    return value


def _number(number: int) -> NDArray[np.uint8]:
    return np.array([number], np.int64).view(np.uint8)


def _bytes_of(value: Buffer) -> NDArray[np.uint8]:
    memory = (ctypes.c_char * value.size).from_address(value.address)
    return np.frombuffer(memoryview(memory).cast("B"), np.uint8)
