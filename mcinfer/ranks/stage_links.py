"""What the stages of a pipeline pass to each other: values for later stages, outputs for all ranks.

::

    with a layout      one packet, in fixed memory: [0 or 1][values, each at its place]
    0                  the values are in the packet
    1, or no layout    a note follows (its kind and length, then its text), and after a note of shapes the
                       values, one by one

So a rank whose run failed, or found other shapes than the layout has, still sends what the others wait for.
A rank receives all values before its first step and sends all after its last one, in the order of the ranks:
since values only go to later stages, no two ranks wait for each other.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import Buffer, RunCancelledError, Strings, array_over
from mcinfer.errors import CollectiveTimeoutError, PredictError, RankDiedError
from mcinfer.ranks.collectives.base import Collective, Group, PeerFailedError
from mcinfer.ranks.layouts import Layout, Values, owned, side_by_side
from mcinfer.ranks.slicing.plans import RankPlan

_HEADER_BYTES = 64
_SHAPES, _FAILED, _CANCELLED = 0, 1, 2

_T = TypeVar("_T")
_Send = Callable[[NDArray[Any]], object]
_Receive = Callable[[int], NDArray[Any]]


class Meetings:
    """What this rank owes the others until the end of a run: a rank that fails must still take part.

    Attributes:
        tensor: The ranks of this rank's stage.
        whole: All ranks; the same object if there is one stage.
        tensor_waits: Whether the stage's ranks run a further operation in this run.
        whole_waits: Whether all ranks wait to hear how the run went here.
        is_broken: Whether the groups were closed after an error.
    """

    def __init__(self) -> None:
        self.tensor: Group
        self.whole: Group
        self.tensor_waits = False
        self.whole_waits = False
        self.is_broken = False

    def in_tensor(self, operation: Callable[[], _T]) -> _T:
        """Run an operation of the stage's ranks."""
        try:
            return operation()
        except PeerFailedError as exc:
            self.tensor_waits = False
            raise PeerFailedError(self._where(exc), cancelled=exc.cancelled) from exc
        except (RankDiedError, CollectiveTimeoutError) as exc:
            self.is_broken = True
            raise type(exc)(self._where(exc)) from exc
        except BaseException:
            self.is_broken = True
            raise

    def _where(self, exc: Exception) -> str:
        """What the operation's error says; the ranks of a stage have numbers of their own."""
        if self.tensor is self.whole:
            return str(exc)
        stage = self.whole.rank // self.tensor.size
        return f"stage {stage} (from rank {stage * self.tensor.size} on): {exc}"

    def in_whole(self, operation: Callable[[], _T]) -> _T:
        """Run an operation of all ranks, or of two of different stages."""
        try:
            return operation()
        except BaseException:
            self.is_broken = True
            raise

    def agree(self, failure: Exception | None) -> None:
        """Tell all ranks how the run went here; `PeerFailedError` if it failed in another one.

        `Group.fail` would interrupt ranks that wait for values of an earlier stage, while others of their own
        stage wait for them.
        """
        self.whole_waits = False
        whole = self.whole
        # The lowest rank that failed is the nearest to the cause.
        own = 0 if failure is None else 2 * (whole.size - whole.rank) + is_cancelled(failure)
        found = self.in_whole(lambda: whole.all_reduce(np.array([own]), "max"))
        if not found[0]:
            return
        code = int(found[0])
        root = whole.size - code // 2
        if root == whole.rank:
            _write_note(_FAILED, str(failure), partial(self.broadcast, root=root))
        else:
            text = _note(partial(self.hear, root=root))[1]
            if failure is None:
                verb = "was cancelled" if code % 2 else "failed"
                raise PeerFailedError(f"rank {root} {verb}: {text}", cancelled=bool(code % 2))

    def send(self, array: NDArray[Any], to: int) -> None:
        self.in_whole(lambda: self.whole.send(array, to))

    def recv(self, size: int, source: int) -> NDArray[np.uint8]:
        return self.in_whole(lambda: self.whole.recv([size], np.uint8, source))

    def broadcast(self, array: NDArray[Any], root: int) -> NDArray[Any]:
        return self.in_whole(lambda: self.whole.broadcast(array, root))

    def hear(self, size: int, root: int) -> NDArray[Any]:
        """What a root broadcasts."""
        return self.broadcast(np.empty(size, np.uint8), root)


def is_cancelled(exc: Exception) -> bool:
    """Whether an error of a run says that it was cancelled, here or in another rank."""
    if isinstance(exc, PeerFailedError):
        return exc.cancelled
    return isinstance(exc, RunCancelledError)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Link:
    """Values that go the same way.

    Attributes:
        rank: The other rank, or the one that gives all ranks its outputs.
        names: In the order in which they are sent.
        prepare: Makes a collective of so many bytes.
        turns: How many of these take turns.
        send: Sends bytes without a collective.
        receive: Receives so many bytes without a collective.
    """

    rank: int
    names: tuple[str, ...]
    prepare: Callable[[Group, int], Collective]
    turns: int
    send: _Send
    receive: _Receive


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """A link's memory for one layout: collectives that take turns, and where each value lies in them."""

    turns: tuple[Collective, ...]
    places: Mapping[str, slice]


class StageLinks:
    """The links of one rank.

    Attributes:
        incoming: One for each rank that sends to this one.
        outgoing: One for each rank that this one sends to.
        delivered: One for each rank whose outputs all ranks get; empty if only their makers have them.
        unsent: The outgoing links that were not sent yet in the current run.
    """

    def __init__(
        self,
        plan: RankPlan,
        rank: int,
        delivered: Mapping[str, int],
        meetings: Meetings,
        depth: int,
    ) -> None:
        """`delivered` is the rank of each output that all ranks get; `depth` as `RankEngine` has it."""
        self._rank = rank
        self._meetings = meetings

        def transfers(other: int, names: tuple[str, ...], source: int, to: int) -> Link:
            return Link(
                rank=other,
                names=names,
                prepare=lambda group, size: group.prepare_transfer([size], np.uint8, source, to),
                turns=depth,
                send=partial(meetings.send, to=other),
                receive=partial(meetings.recv, source=other),
            )

        def broadcasts(root: int, names: tuple[str, ...]) -> Link:
            return Link(
                rank=root,
                names=names,
                prepare=lambda group, size: group.prepare_broadcast([size], np.uint8, root),
                turns=2,  # the ranks that read one arrive at the other afterwards
                send=partial(meetings.broadcast, root=root),
                receive=partial(meetings.hear, root=root),
            )

        received = [(source, name) for name, source in plan.receives.items()]
        sent = [(to, name) for name, ranks in plan.sends.items() for to in ranks]
        whole = [(root, name) for name, root in delivered.items()]
        self.incoming = [transfers(one, names, one, rank) for one, names in _by_rank(received)]
        self.outgoing = [transfers(one, names, rank, one) for one, names in _by_rank(sent)]
        self.delivered = [broadcasts(root, names) for root, names in _by_rank(whole)]
        self.unsent: list[Link] = []

    def prepare(self, layout: Layout, group: Group) -> None:
        """Make the packets of a layout; all ranks call this in the same order."""
        for link in (*self.incoming, *self.outgoing, *self.delivered):
            sizes = {name: layout.buffer(name).size for name in link.names}
            places, size = side_by_side(sizes, _HEADER_BYTES)
            turns = tuple(link.prepare(group, size) for _ in range(link.turns))
            layout.packets[link] = Packet(turns=turns, places=places)

    def receive(self, layout: Layout | None, places: Values) -> Values:
        """Before the first step, receive from all earlier stages; the values that did not fit their places.

        Raises:
            PeerFailedError: An earlier stage failed.
        """
        changed: Values = {}
        failure: PeerFailedError | None = None
        for link in self.incoming:
            try:
                changed |= self._take(link, layout, places)
            except PeerFailedError as exc:
                failure = failure or exc
        if failure is not None:
            raise failure
        return changed

    def send(self, layout: Layout | None, values: Values) -> None:
        """After the last step, send to all later stages."""
        for link in self.outgoing:
            self._give(link, layout, _tensors(link, values))
            self.unsent.remove(link)

    def send_failure(self, layout: Layout | None, text: str, *, cancelled: bool) -> None:
        """Send the later stages that wait for values the news that there are none."""
        for link in [*self.unsent]:
            self._give(link, layout, None)
            _write_note(_CANCELLED if cancelled else _FAILED, text, link.send)
            self.unsent.remove(link)

    def check(self, values: Values) -> None:
        """Raise `PredictError` if `deliver` cannot send an output."""
        for link in self.delivered:
            if link.rank == self._rank:
                _tensors(link, values)

    def deliver(self, layout: Layout | None, places: Values, values: Values) -> Values:
        """Give all ranks the outputs; return those that did not fit their places here."""
        changed: Values = {}
        for link in self.delivered:
            if link.rank == self._rank:
                self._give(link, layout, _tensors(link, values))
            else:
                changed |= self._take(link, layout, places)
        return changed

    def _give(self, link: Link, layout: Layout | None, values: list[Buffer] | None) -> None:
        """Send values, or with a layout that there are none in its memory, and then the values without it."""
        if layout is not None:
            packet = layout.packets[link]
            turn = packet.turns[layout.runs % link.turns]
            is_packed = _pack(turn.input, packet, layout, values)
            self._meetings.in_whole(turn.run)
            if is_packed:
                return
        if values is not None:
            shapes = [[value.element_type, value.shape] for value in values]
            _write_note(_SHAPES, json.dumps(shapes), link.send)
            for value in values:
                link.send(_bytes_of(value))

    def _take(self, link: Link, layout: Layout | None, places: Values) -> Values:
        """Receive values to their places; return those that did not come in the layout's memory."""
        if layout is not None:
            packet = layout.packets[link]
            turn = packet.turns[layout.runs % link.turns]
            self._meetings.in_whole(turn.run)
            if not turn.output[0]:
                for name, span in packet.places.items():
                    place = places[name]
                    if isinstance(place, Buffer):
                        _bytes_of(place)[...] = turn.output[span]
                return {}
        kind, text = _note(link.receive)
        if kind != _SHAPES:
            raise PeerFailedError(text, cancelled=kind == _CANCELLED)
        found: Values = {}
        for name, (element_type, shape) in zip(link.names, json.loads(text), strict=True):
            value = owned(name, element_type, shape)
            _bytes_of(value)[...] = link.receive(value.size)
            found[name] = value
        return found


def _by_rank(pairs: Iterable[tuple[int, str]]) -> Iterable[tuple[int, tuple[str, ...]]]:
    names: dict[int, list[str]] = {}
    for rank, name in sorted(pairs):
        names.setdefault(rank, []).append(name)
    return [(rank, tuple(found)) for rank, found in names.items()]


def _tensors(link: Link, values: Values) -> list[Buffer]:
    found = [values[name] for name in link.names]
    for name, value in zip(link.names, found, strict=True):
        if isinstance(value, Strings):
            raise PredictError(f"value {name!r} is of strings, which ranks do not send each other")
    return [value for value in found if isinstance(value, Buffer)]


def _pack(
    memory: NDArray[np.uint8], packet: Packet, layout: Layout, values: list[Buffer] | None
) -> bool:
    """Copy the values to their places; False if there are none, or of another shape than the layout's."""
    fits = values is not None and all(
        (value.shape, value.element_type) == (like.shape, like.element_type)
        for value, like in zip(values, map(layout.buffer, packet.places), strict=True)
    )
    memory[0] = 0 if fits else 1
    if values is not None and fits:
        for value, span in zip(values, packet.places.values(), strict=True):
            memory[span] = _bytes_of(value)
    return fits


def _bytes_of(value: Buffer) -> NDArray[np.uint8]:
    flat = Buffer(
        name=value.name,
        element_type="uint8",
        shape=(value.size,),
        address=value.address,
        size=value.size,
    )
    return array_over(flat)


# Notes.


def _write_note(kind: int, text: str, send: _Send) -> None:
    encoded = np.frombuffer(text.encode(), np.uint8)
    send(np.array([kind, len(encoded)], np.int64).view(np.uint8))
    send(encoded)


def _note(receive: _Receive) -> tuple[int, str]:
    kind, length = receive(16).view(np.int64).tolist()
    return kind, receive(length).tobytes().decode()
