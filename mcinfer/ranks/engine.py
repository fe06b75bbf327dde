"""A group of ranks behind one engine: the leader, which a master's worker loads, and its followers.

::

    worker of the master ── bind, execute ──► LeaderEngine (rank 0)            follow() (ranks 1, 2, …)
                                              copies the inputs ═ the group's ═► reads them in place
                                              Start ─────────── socket ──────► runs its slice
                                              runs its slice  ══ collectives ══  …
    outputs ◄── copied from rank 0, or ◄═════ from the last stage ═════════════  writes them in place
                                              ◄──────────────── socket ─────── Done

A *layout* is the shapes of one kind of run; a *lane* of a layout is its memory and its bound run in every
rank, for one run at a time. Without a pipeline there is one lane. With a pipeline several runs are begun at
once, each on a lane of its own: the leader only runs stage 0 in `begin`, and each follower runs what it is
sent, in that order. So as many stages are busy as there are.

Ownership: a group of its own has the memory of the lanes, which cannot be freed singly. So when there are
`MAX_LAYOUTS` layouts, or a rank could not make a lane that others made, all are forgotten, and a new group
takes the place of that one. The leader decides when; what it sends keeps the ranks in the same order. A lane
is used again when all ranks are done with its last run.

A follower waits for inputs, and never for the leader to take outputs: the leader may wait for it meanwhile.
So all tensors that go from one rank to another in a run are one message, and outputs that have no memory in a
lane come in a block with the answer.

A rank that died, a collective that timed out or a closed group end all ranks: `RankDiedError`,
`CollectiveTimeoutError` and `ClosedError` come out of a run unchanged, and the engine is of no more use.
"""

import ctypes
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import (
    Buffer,
    Engine,
    EngineRequest,
    Produced,
    Run,
    RunCancelledError,
    Strings,
    delivered,
)
from mcinfer.errors import (
    BuildError,
    ClosedError,
    CollectiveTimeoutError,
    McinferError,
    MissingDependencyError,
    PredictError,
    ProtocolError,
    RankDiedError,
    shortened,
)
from mcinfer.model_cache.cache import Cache, CacheUnusableError, Held
from mcinfer.model_cache.children import Progress
from mcinfer.process import LEFT_ALONE, ORPHANED, how_it_ended
from mcinfer.protocol import Message
from mcinfer.ranks.collectives.base import DEFAULT_TIMEOUT, Collective, PeerFailedError
from mcinfer.ranks.collectives.shm import join_sockets
from mcinfer.ranks.layouts import (
    MAX_LAYOUTS,
    all_of,
    check_inputs,
    side_by_side,
    tensor_in,
)
from mcinfer.ranks.messages import (
    ENDINGS,
    FAILURES,
    Bind,
    Bound,
    Channel,
    Done,
    Ended,
    Exit,
    Found,
    Hello,
    Join,
    Load,
    Ready,
    Start,
    kind_of,
)
from mcinfer.ranks.slice_cache import find_or_make_slices, load_slice, overlap
from mcinfer.ranks.slices import RankEngine, check_weights
from mcinfer.shm.block import Block
from mcinfer.shm.descriptors import WakeUp
from mcinfer.specs import STRING, ModelSpec, tensor_bytes

BUILD_FAILED = 1
"""Exit status of a follower that could not load its slice; the leader has the reason."""

_ENDING_SECONDS = 0.1

_ENDINGS = (RankDiedError, CollectiveTimeoutError, ClosedError)
"""Errors of a group that end all its ranks."""

_Shapes = tuple[tuple[int, ...], ...]
_KnownShapes = tuple[tuple[int, ...] | None, ...]
_Message = TypeVar("_Message", bound=Message)


# A lane in one rank, alike in the leader and in followers.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """What a rank takes of the whole model's inputs, and which outputs the leader has from it."""

    rank: int
    takes: frozenset[str]
    makes: tuple[str, ...]

    @classmethod
    def of(cls, engine: RankEngine) -> "_Member":
        """All ranks of a stage make the same outputs, some of inputs; the first rank gives them."""
        plan, rank = engine.plan, engine.group.rank
        reads = {*plan.made, *(name for step in plan.steps for name in step.inputs)}
        return cls(
            rank=rank,
            takes=frozenset(spec.name for spec in plan.spec.inputs if spec.name in reads),
            makes=() if rank % engine.tensor else plan.made,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    """Memory and a bound run.

    Attributes:
        layout: The number of its layout.
        number: Among the lanes of the layout.
        places: In the leader: for each input of the model, the addresses that it is copied to.
        inputs: The operations that bring the inputs.
        bound: The inputs of the run, whose memory they keep.
        run: The slice's run.
        outputs: The operations that bring outputs to the leader, by the rank that sends.
        values: The outputs of known shapes: in the leader all, in a follower its own.
    """

    layout: int
    number: int
    places: tuple[tuple[int, ...], ...]
    inputs: tuple[Collective, ...]
    bound: tuple[Produced, ...]
    run: Run
    outputs: Mapping[int, Collective]
    values: Mapping[str, Produced]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packet:
    """Tensors that one operation brings, each at its place: however many, a run sends one message."""

    operation: Collective
    places: Mapping[str, slice]

    @classmethod
    def of(cls, sizes: Mapping[str, int], make: Callable[[int], Collective]) -> "_Packet":
        places, end = side_by_side(sizes)
        return cls(operation=make(max(end, 1)), places=places)


class _Lanes:
    """The lanes of one rank, made by the same operations of the group, in the same order, as in others."""

    def __init__(self, engine: RankEngine, own: _Member, others: Sequence[_Member] = ()) -> None:
        """`others` are the followers; only the leader needs to know them."""
        self._engine = engine
        self._memory = all_of(engine.group)
        self._own = own
        self._others = others
        self._is_one_stage = engine.plan.pipeline == 1
        self._lanes: dict[tuple[int, int], _Lane] = {}

    def get(self, layout: int, number: int) -> _Lane | None:
        return self._lanes.get((layout, number))

    def close(self) -> None:
        self._lanes.clear()
        self._memory.close()
        self._engine.close()

    def make(self, wanted: Bind) -> _Lane:
        """A new lane; raises what `Engine.bind` does, and what ends the group."""
        if wanted.renewed:
            self._lanes.clear()
            old, self._memory = self._memory, all_of(self._engine.group)
            old.close()  # its memory goes with the last arrays
        spec = self._engine.spec
        shapes = dict(zip([x.name for x in spec.inputs], wanted.inputs, strict=True))
        sizes = {x.name: tensor_bytes(x.element_type, prod(shapes[x.name])) for x in spec.inputs}
        packets = self._input_packets(sizes)
        bound, places = [], []
        for tensor in spec.inputs:
            name = tensor.name
            carriers = [packet for packet in packets if name in packet.places]
            written = [packet.operation.input[packet.places[name]] for packet in carriers]
            if name not in self._own.takes:
                memory = _memory(0)  # the slice does not read it, and needs only the shape
            elif self._own.rank or self._is_one_stage:
                memory = carriers[0].operation.output[carriers[0].places[name]]
            else:
                memory = _memory(sizes[name])
                written.append(memory)
            bound.append(tensor_in(memory, name, tensor.element_type, shapes[name]))
            places.append(tuple(array.ctypes.data for array in written))
        outputs, values = self._outputs(wanted.outputs)
        lane = self._lanes[wanted.layout, wanted.lane] = _Lane(
            layout=wanted.layout,
            number=wanted.lane,
            places=tuple(places),
            inputs=tuple(packet.operation for packet in packets),
            bound=tuple(bound),
            run=self._engine.bind(
                bound, [value for name, value in values.items() if name in self._own.makes]
            ),
            outputs=outputs,
            values=values,
        )
        return lane

    def _outputs(self, shapes: _KnownShapes) -> tuple[dict[int, Collective], dict[str, Produced]]:
        """What brings outputs of known shapes to the leader, by rank, and these outputs."""
        spec = self._engine.spec.outputs
        known = {
            tensor.name: (tensor.element_type, shape)
            for tensor, shape in zip(spec, shapes, strict=True)
            if shape is not None
        }
        moved: dict[int, Collective] = {}
        values: dict[str, Produced] = {}
        for member in (self._own, *self._others):
            sizes = {
                name: tensor_bytes(kind, prod(shape))
                for name, (kind, shape) in known.items()
                if name in member.makes
            }
            if sizes and member.rank:
                packet = _Packet.of(sizes, partial(self._transfer, source=member.rank, to=0))
                moved[member.rank] = operation = packet.operation
                all_bytes = operation.input if self._own.rank else operation.output
                memory = {name: all_bytes[place] for name, place in packet.places.items()}
            else:
                memory = {name: _memory(size) for name, size in sizes.items()}
            for name, array in memory.items():
                values[name] = tensor_in(array, name, *known[name])
        return moved, values

    def _input_packets(self, sizes: Mapping[str, int]) -> list[_Packet]:
        # In a pipeline a broadcast would have the first stage wait for the last one.
        if self._is_one_stage:
            return [_Packet.of(sizes, self._broadcast)] if sizes else []
        packets = []
        for member in (self._own, *self._others):
            taken = {name: size for name, size in sizes.items() if name in member.takes}
            if member.rank and taken:
                make = partial(self._transfer, source=0, to=member.rank)
                packets.append(_Packet.of(taken, make))
        return packets

    def _broadcast(self, size: int) -> Collective:
        return self._memory.prepare_broadcast((size,), np.uint8)

    def _transfer(self, size: int, source: int, to: int) -> Collective:
        return self._memory.prepare_transfer((size,), np.uint8, source, to)


def _memory(size: int) -> NDArray[Any]:
    return np.empty(max(size, 1), np.uint8)


# The leader.


@dataclass(slots=True, kw_only=True)
class _Follower:
    """What the leader knows of another rank.

    Attributes:
        pidfd: Readable when its process has ended.
        member: What it takes and gives, once it is ready.
        finished: How many runs it has finished.
        done: Its answers to runs that `LeaderEngine.finish` has not taken yet.
    """

    rank: int
    channel: Channel
    device: str = ""
    pid: int = 0
    pidfd: int = -1
    member: _Member | None = None
    finished: int = 0
    done: "deque[Done]" = field(default_factory=deque)

    def __str__(self) -> str:
        about = f" ({self.device}, pid {self.pid})" if self.pid else ""
        return f"rank {self.rank}{about}"


class _Followers:
    """The other ranks of a group, as their leader talks with them.

    Attributes:
        all: In the order of their ranks.
        timeout: Seconds that one answer may take; None while they start, which the master limits.
    """

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self.all = [
            _Follower(rank=rank, channel=Channel(end)) for rank, end in enumerate(sockets, 1)
        ]
        self.timeout: float | None = None

    def greet(self) -> None:
        """Wait until all processes are there; raises what `expect` does."""
        for follower in self.all:
            hello = self.expect(follower, Hello)
            if hello.rank != follower.rank:
                raise ProtocolError(f"{follower} says it is rank {hello.rank}")
            follower.device, follower.pid = hello.device, hello.pid
            try:
                follower.pidfd = os.pidfd_open(hello.pid)
            except ProcessLookupError:
                self.end(follower)

    def send(self, message: Message) -> None:
        """Send a message to all; raises what `expect` does."""
        for follower in self.all:
            try:
                follower.channel.send(message)
            except OSError as exc:
                self.end(follower, exc)

    def expect(self, follower: _Follower, kind: type[_Message]) -> _Message:
        """The next message of this kind from a follower; the answers to runs that it sends are kept.

        Raises:
            BuildError, MissingDependencyError: A follower cannot load its slice.
            RankDiedError: A follower is gone.
            CollectiveTimeoutError: It did not answer in time, or another rank did not answer a follower.
            ClosedError: A follower has left the group.
        """
        while True:
            self._wait(follower)
            message = follower.channel.receive()
            if message is None:
                self.end(follower)
            if isinstance(message, Done):
                follower.finished += 1
                follower.done.append(message)
            if isinstance(message, kind):
                return message
            if not isinstance(message, Done):
                raise _said(follower, message) or ProtocolError(
                    f"{follower} sent {type(message).__name__}, expected {kind.__name__}"
                )

    def check(self) -> None:
        """Raise what `expect` does, if a process has ended."""
        for follower in self.all:
            if follower.pidfd >= 0 and _is_readable(follower.pidfd):
                self.end(follower)

    def end(self, follower: _Follower, cause: OSError | None = None) -> NoReturn:
        """Raise why a follower is gone."""
        reason = self.reason()
        if reason is None:
            # A process that ends hangs up first.
            is_over = follower.pidfd >= 0 and _is_readable(follower.pidfd, _ENDING_SECONDS)
            how = how_it_ended(follower.pid, follower.pidfd) if is_over else "hung up"
            reason = RankDiedError(f"{follower} {how}")
        raise reason from cause

    def reason(self) -> McinferError | None:
        """What a follower said before it left; the cause of what others saw, if that is the cause."""
        errors = self._last_words(lambda follower: _is_readable(follower.channel.socket.fileno()))
        # A rank that leaves seems to have died to the others.
        return min(errors, key=lambda error: isinstance(error, RankDiedError), default=None)

    def failure(self) -> McinferError | None:
        """Why a follower could not load its slice; all of them end then."""
        return next(iter(self._last_words(lambda _: True)), None)

    def _last_words(self, goes_on: Callable[[_Follower], bool]) -> list[McinferError]:
        """The errors that followers have said."""
        found = []
        for follower in self.all:
            while goes_on(follower) and (message := follower.channel.receive()) is not None:
                found.append(_said(follower, message))
        return [error for error in found if error is not None]

    def close(self) -> None:
        for follower in self.all:
            follower.channel.close()
            if follower.pidfd >= 0:
                os.close(follower.pidfd)
        self.all.clear()

    def _wait(self, follower: _Follower) -> None:
        """Return when there is a message of this follower, or its hang-up."""
        poll = select.poll()
        poll.register(follower.channel.socket, select.POLLIN)
        for other in self.all:
            if other.pidfd >= 0:
                poll.register(other.pidfd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if self.timeout is None else self.timeout * 1000)}
        if not ready:
            raise CollectiveTimeoutError(f"{follower} did not answer within {self.timeout:g} s")
        if follower.channel.socket.fileno() not in ready:
            self.check()


def _said(follower: _Follower, message: Message) -> McinferError | None:
    """The error that a follower ends with; None if the message is none of these."""
    if not isinstance(message, Ended):
        return None
    error = ENDINGS[message.kind]
    return error(message.text if error in _ENDINGS else f"{follower}: {message.text}")


def _is_readable(fd: int, seconds: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def lead(
    request: EngineRequest,
    parallel: tuple[int, int],
    sockets: Sequence[socket.socket],
    progress: Progress | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> "LeaderEngine":
    """Find or make the slices of a model, and start the group that runs them, as its rank 0.

    Args:
        request: The whole model, and how to load it.
        parallel: Over how many ranks each layer is cut, and the number of stages.
        sockets: Connected SOCK_SEQPACKET sockets to ranks 1, 2, …, which are the engine's from now on.
        progress: Called while the slices are made.
        timeout: Seconds that one rank waits for another, in a collective or for its answer.

    Raises:
        BuildError: The model cannot be cut, or a rank cannot load its slice; names the rank.
        MissingDependencyError: A package is missing; says which.
        RankDiedError: A rank ended meanwhile.
        CollectiveTimeoutError: The ranks did not all join.
    """
    with ExitStack() as failed:
        followers = _Followers(sockets)
        failed.callback(followers.close)
        followers.greet()

        def report(state: Mapping[str, Any]) -> None:
            followers.check()
            if progress is not None:
                progress(state)

        check_weights(request)
        held = find_or_make_slices(request, parallel, report)
        failed.callback(held.close)
        tensor, pipeline = parallel
        followers.send(
            Load(cache=str(held.folder.parent), key=held.key, tensor=tensor, pipeline=pipeline)
        )
        for follower in followers.all:
            followers.expect(follower, Found)
        followers.send(Join())
        ends = [one.channel.socket for one in followers.all]
        try:
            group = join_sockets(0, len(ends) + 1, ends, timeout=timeout)
            failed.callback(group.close)
            engine = load_slice(request, held, group, parallel)
            failed.callback(engine.close)
        except _ENDINGS as exc:
            raise followers.reason() or exc from exc
        except BuildError as exc:
            if not _is_of_another_rank(exc):
                raise
            raise followers.failure() or exc from exc
        for follower in followers.all:
            ready = followers.expect(follower, Ready)
            follower.member = _Member(
                rank=follower.rank, takes=frozenset(ready.takes), makes=ready.makes
            )
        leader = LeaderEngine(engine, followers, held)
        failed.pop_all()
        return leader


def _is_of_another_rank(exc: Exception) -> bool:
    """Whether another rank could not load its slice."""
    return isinstance(exc.__context__, PeerFailedError)


def _check_spec(spec: ModelSpec, members: Sequence[_Member]) -> None:
    # A name may be an input and an output.
    both = (*spec.inputs, *spec.outputs)
    strings = dict.fromkeys(item.name for item in both if item.element_type == STRING)
    if strings:
        raise BuildError(
            f"{[*strings]} are strings, which a model that is cut over ranks cannot have"
        )
    made = {name for member in members for name in member.makes}
    missing = [item.name for item in spec.outputs if item.name not in made]
    if missing:
        raise BuildError(f"no rank makes the outputs {missing}")


@dataclass(slots=True, kw_only=True)
class _Begun:
    """A run that is begun.

    Attributes:
        produced: What the leader's part of it gave, and what followers have sent.
        error: Why it failed.
        is_settled: Whether the followers' answers are in.
    """

    run: "_LeaderRun"
    lane: _Lane
    produced: list[Produced | Strings] = field(default_factory=list)
    error: McinferError | None = None
    is_settled: bool = False


class LeaderEngine(Engine):
    """A group of ranks, as one engine.

    `cancel` ends the leader's part of a run, and with it the parts of the ranks that wait for the leader's.
    Ranks of later stages finish a run whose part in the leader is done.
    """

    def __init__(self, engine: RankEngine, followers: _Followers, held: Held) -> None:
        """The engine owns all three from now on."""
        self._engine = engine
        self._held = held
        self._followers = followers
        followers.timeout = engine.group.timeout
        self.spec = engine.spec
        self.providers = engine.providers
        self.notes = engine.notes
        self.prepared = engine.prepared
        own = _Member.of(engine)
        others = [one.member for one in followers.all if one.member is not None]
        _check_spec(self.spec, [own, *others])
        self._lanes = _Lanes(engine, own, others)
        self._layouts: dict[tuple[_Shapes, _KnownShapes], int] = {}  # their numbers
        self._begun: deque[_Begun] = deque()
        self._is_uneven = (
            False  # ranks could not all make a lane: their memory differs from then on
        )
        self._started = 0
        self._last: dict[int, int] = {}  # by lane, the number of its last run
        self._awaited = [one for one in followers.all if one.member and one.member.makes]
        if engine.plan.pipeline > 1:
            self.depth = overlap(engine.plan.pipeline)
            last = followers.all[-engine.tensor]
            if last not in self._awaited:
                self._awaited.append(last)
            self._last_stage = last
            self._answered = WakeUp()
            self._is_ringing = False
            self._poll = select.epoll()
            for fd in (last.channel.socket.fileno(), self._answered.fd):
                self._poll.register(fd, select.EPOLLIN)
            for one in followers.all:
                self._poll.register(one.pidfd, select.EPOLLIN)
            self.fd = self._poll.fileno()

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> Run:
        run = _LeaderRun(self, self.spec, inputs, outputs)
        self._lane(run.layout, 0)
        return run

    def arm(self) -> None:
        self._engine.arm()

    def cancel(self) -> None:
        self._engine.cancel()

    def close(self) -> None:
        """End the followers, and leave the group."""
        for follower in self._followers.all:
            with suppress(OSError):  # it is gone already
                follower.channel.send(Exit())
        self._layouts.clear()
        self._begun.clear()
        self._lanes.close()
        if self.fd >= 0:
            self._poll.close()
            self.fd = -1
        self._followers.close()
        self._held.close()

    def begin(self, run: "_LeaderRun") -> None:
        """See `Run.begin`."""
        if len(self._begun) == self.depth:
            raise PredictError(f"{self.depth} runs are begun, expected one to be finished first")
        busy = {begun.lane.number for begun in self._begun}
        number = next(number for number in range(self.depth) if number not in busy)
        lane = self._lane(run.layout, number)
        self._wait_for_lane(number)
        run.copy_inputs(lane)
        self._followers.send(Start(layout=lane.layout, lane=number))
        self._started += 1
        self._last[number] = self._started
        begun = _Begun(run=run, lane=lane)
        try:
            for operation in lane.inputs:
                operation.run()
            begun.produced += lane.run.execute()
        except _ENDINGS as exc:
            raise self._followers.reason() or exc from exc
        except Exception as exc:  # of any class: a run that raises fails its request only
            begun.error = _own_error(exc)
        self._begun.append(begun)

    def finish(self, run: "_LeaderRun") -> Sequence[Produced | Strings]:
        """See `Run.finish`."""
        if not self._begun or self._begun[0].run is not run:
            raise PredictError("this run is not the oldest one that is begun")
        begun = self._begun[0]
        self._settle(begun)
        self._begun.popleft()
        self._ring()
        if begun.error is not None:
            raise begun.error
        return run.deliver(begun.lane, begun.produced)

    def _lane(self, key: tuple[_Shapes, _KnownShapes], number: int) -> _Lane:
        """A lane of a layout, made in all ranks if it is missing."""
        layout = self._layouts.get(key)
        lane = None if layout is None else self._lanes.get(layout, number)
        if lane is not None and not self._is_uneven:
            return lane
        is_renewed = self._is_uneven or (layout is None and len(self._layouts) == MAX_LAYOUTS)
        if is_renewed:  # the outputs of the runs that are begun come through the old memory
            for begun in self._begun:
                self._settle(begun)
            self._layouts.clear()
        layout = self._layouts.setdefault(key, len(self._layouts))
        inputs, outputs = key
        wanted = Bind(
            layout=layout, lane=number, inputs=inputs, outputs=outputs, renewed=is_renewed
        )
        self._followers.send(wanted)
        error: Exception | None = None
        try:
            lane = self._lanes.make(wanted)
        except _ENDINGS as exc:
            raise self._followers.reason() or exc from exc
        except Exception as exc:  # of any class: it is the runtime's
            error = _own_error(exc)
        for follower in self._followers.all:
            answer = self._followers.expect(follower, Bound)
            if answer.kind and error is None:
                error = FAILURES[answer.kind](answer.text)
        self._ring()
        self._is_uneven = lane is None or error is not None
        if lane is None or error is not None:
            raise error or ProtocolError(f"lane {number} was not made")
        return lane

    def _wait_for_lane(self, number: int) -> None:
        """Wait until all ranks are done with the last run on a lane."""
        last = self._last.get(number, 0)
        for follower in self._followers.all:
            while follower.finished < last:
                self._followers.expect(follower, Done)
            if follower not in self._awaited:
                follower.done.clear()
        self._ring()

    def _settle(self, begun: _Begun) -> None:
        """Wait for the answers to the oldest run that has none yet, and take its outputs."""
        if begun.is_settled:
            return
        answers = []
        for follower in self._awaited:
            while not follower.done:
                self._followers.expect(follower, Done)
            answers.append((follower, follower.done.popleft()))
        begun.is_settled = True
        failed = (FAILURES[answer.kind](answer.text) for _, answer in answers if answer.kind)
        begun.error = begun.error or next(failed, None)
        try:
            for follower, answer in answers:
                if not answer.kind and follower.rank in begun.lane.outputs:
                    begun.lane.outputs[follower.rank].run()
                if answer.produced:
                    begun.produced += self._taken(follower, answer)
        except _ENDINGS as exc:
            raise self._followers.reason() or exc from exc
        except OSError as exc:  # no descriptor or memory is left
            begun.error = begun.error or PredictError(f"outputs cannot be taken: {exc}")

    def _taken(self, follower: _Follower, answer: Done) -> list[Produced]:
        """The outputs that a follower has handed over: those that have no memory in the lane."""
        types = {spec.name: spec.element_type for spec in self.spec.outputs}
        sizes = {name: tensor_bytes(types[name], prod(shape)) for name, shape in answer.produced}
        places, end = side_by_side(sizes)
        block = follower.channel.take_block(max(end, 1))
        return [
            Produced(
                name=name,
                element_type=types[name],
                shape=shape,
                address=block.address + places[name].start,
                size=sizes[name],
                owner=block,
            )
            for name, shape in answer.produced
        ]

    def _ring(self) -> None:
        """Keep `fd` readable while the answer that it stands for was read before it was asked for."""
        if self.depth == 1:
            return
        is_there = bool(self._begun) and (self._begun[0].is_settled or bool(self._last_stage.done))
        if is_there and not self._is_ringing:
            self._answered.set()
        elif not is_there and self._is_ringing:
            self._answered.clear()
        self._is_ringing = is_there


class _LeaderRun(Run):
    """A layout in memory of other owners."""

    def __init__(
        self,
        engine: LeaderEngine,
        spec: ModelSpec,
        inputs: Sequence[Buffer | Strings],
        outputs: Sequence[Buffer],
    ) -> None:
        check_inputs(spec, inputs)
        self._engine = engine
        self._inputs = [item for item in inputs if isinstance(item, Buffer)]  # all: see _check_spec
        self._names = [tensor.name for tensor in spec.outputs]
        self._places = {item.name: item for item in outputs}
        known = tuple(
            self._places[name].shape if name in self._places else None for name in self._names
        )
        self.layout = (tuple(item.shape for item in inputs), known)

    def execute(self) -> Sequence[Produced | Strings]:
        self._engine.begin(self)
        return self._engine.finish(self)

    def begin(self) -> None:
        self._engine.begin(self)

    def finish(self) -> Sequence[Produced | Strings]:
        return self._engine.finish(self)

    def copy_inputs(self, lane: _Lane) -> None:
        for item, places in zip(self._inputs, lane.places, strict=True):
            for place in places:
                ctypes.memmove(place, item.address, item.size)

    def deliver(
        self, lane: _Lane, produced: Sequence[Produced | Strings]
    ) -> Sequence[Produced | Strings]:
        """Write the outputs to their places; those that have none, or have another shape."""
        found = {**lane.values, **{item.name: item for item in produced}}
        return delivered([found[name] for name in self._names], self._places)


def _own_error(exc: Exception) -> McinferError:
    """The error of the leader's own part of a run, as `Run.execute` raises it."""
    if isinstance(exc, PeerFailedError) and exc.cancelled:
        return RunCancelledError(str(exc))
    if isinstance(exc, McinferError):
        return exc
    return PredictError(shortened(f"rank 0: {type(exc).__name__}: {exc}"))


# A follower.


def follow(
    rank: int,
    size: int,
    end: socket.socket,
    request: EngineRequest,
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> int:
    """Load a rank's slice and run what the leader says, until it says that this is the end.

    Args:
        rank: This rank, 1 or more.
        size: How many ranks the group has.
        end: The SOCK_SEQPACKET socket to the leader, which is this function's from now on.
        request: The whole model, and how and where to load it.
        timeout: Seconds that a collective waits for the other ranks.

    Returns:
        The exit status of the process: 0; `BUILD_FAILED`; `LEFT_ALONE` after the end of another rank, or
        a time-out; or `ORPHANED` if the leader is gone.
    """
    channel = Channel(end)
    try:
        channel.send(Hello(rank=rank, pid=os.getpid(), device=str(request.device)))
        load = channel.receive()
        if not isinstance(load, Load):
            return _left(load)
        try:
            held = _hold(load)
            channel.send(Found())
            join = channel.receive()
            if not isinstance(join, Join):
                return _left(join)
            group = join_sockets(rank, size, [end], timeout=timeout)
            engine = load_slice(request, held, group, (load.tensor, load.pipeline))
        except (BuildError, MissingDependencyError) as exc:
            if not _is_of_another_rank(exc):
                _end(channel, exc)
            return BUILD_FAILED
        member = _Member.of(engine)
        channel.send(Ready(takes=tuple(member.takes), makes=member.makes))
        return _FollowedRuns(str(request.device), channel, engine, member).serve()
    except _ENDINGS as exc:
        with suppress(OSError):  # the leader is gone
            _end(channel, exc)
        return LEFT_ALONE
    except ConnectionError:  # the leader has left; it may have said so before
        while isinstance(message := channel.receive(), Start | Bind):
            continue
        return _left(message)
    finally:
        channel.close()


def _end(channel: Channel, exc: McinferError) -> None:
    channel.send(Ended(kind=kind_of(exc, ENDINGS) or "build", text=shortened(str(exc))))


def _left(message: Message | None) -> int:
    """The exit status after what came in place of a message of the start."""
    if message is None:
        return ORPHANED
    if isinstance(message, Exit):
        return 0
    raise ProtocolError(f"the leader sent {type(message).__name__}, which does not fit")


def _hold(load: Load) -> Held:
    try:
        held = Cache(Path(load.cache), 0).open(load.key)
    except CacheUnusableError as exc:
        raise BuildError(f"the slices cannot be read: {exc}") from exc
    if held is None:
        raise BuildError(f"{load.cache}/{load.key} has no sound slices")
    return held


class _FollowedRuns:
    """A follower that is ready."""

    def __init__(self, device: str, channel: Channel, engine: RankEngine, member: _Member) -> None:
        self._name = f"rank {member.rank} ({device})"
        self._channel = channel
        self._engine = engine
        self._makes = member.makes
        self._lanes = _Lanes(engine, member)

    def serve(self) -> int:
        """Do what the leader says, in that order, until it leaves; the exit status."""
        while True:
            message = self._channel.receive()
            match message:
                case Start():
                    lane = self._lanes.get(message.layout, message.lane)
                    if lane is None:
                        raise ProtocolError(f"the leader sent {message}, which no lane is made for")
                    self._run(lane)
                case Bind():
                    self._bind(message)
                case _:
                    return _left(message)

    def _bind(self, message: Bind) -> None:
        kind = text = ""
        try:
            self._lanes.make(message)
        except _ENDINGS:
            raise
        except Exception as exc:  # of any class: it is the runtime's
            kind, text = self._failure(exc)
        self._channel.send(Bound(kind=kind, text=text))

    def _run(self, lane: _Lane) -> None:
        """Run, and answer; nothing here waits for the leader, which may wait for this rank."""
        self._engine.arm()
        try:
            for operation in lane.inputs:
                operation.run()
            produced = [
                item
                for item in lane.run.execute()
                if isinstance(item, Produced) and item.name in self._makes
            ]
            block = _packed(produced) if produced else None
        except _ENDINGS:
            raise
        except Exception as exc:  # of any class: a run that raises fails its request only
            kind, text = self._failure(exc)
            self._channel.send(Done(kind=kind, text=text))
            return
        for operation in lane.outputs.values():
            operation.run()
        shapes = tuple((item.name, item.shape) for item in produced)
        self._channel.send(Done(produced=shapes), block)

    def _failure(self, exc: Exception) -> tuple[str, str]:
        """The kind and the text of an error, which names this rank unless it names another one."""
        text = str(exc) if isinstance(exc, McinferError) else f"{type(exc).__name__}: {exc}"
        if isinstance(exc, PeerFailedError):
            return "cancelled" if exc.cancelled else "predict", shortened(text)
        return kind_of(exc, FAILURES) or "predict", shortened(f"{self._name}: {text}")


def _packed(items: Sequence[Produced]) -> Block:
    """A block with these tensors, one after another."""
    places, end = side_by_side({item.name: item.size for item in items})
    block = Block.create(0, max(end, 1))
    for item in items:
        ctypes.memmove(block.address + places[item.name].start, item.address, item.size)
    return block
