"""A worker on an NVIDIA card: its memory limit, its weights, and the way of tensors to its engine and back.

::

    host block (pinned) ──► staging on the card ──┐              ┌──► staging ──► host block
    block of this card ── its event is waited for ┴─► the run ───┴──────────────► block of this card
    block of another card ──► staging on the card ┘              └──► staging ──► block of another card

An engine says of each tensor whether it wants it on the host or on its card (`Engine.on_host`). What lies on
the wrong side is copied by way of staging memory, before or after the run. All of that is decided when a
layout is bound: a run only does its copies. Whatever is queued is queued on one stream, the engine's, and is
done before the request has its answer or its error: the master may use the memory for others then.

Rows of a tensor on this card may begin anywhere. Those that kernels could not load as they are used to take
the way by staging memory, too.

Ownership: the `CardEngine` owns the staging memory, the slab of weights, which it has made or opened, and the
versions of replaced weights on the card. Blocks of tensors belong to the master.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from weakref import WeakSet

from mcinfer.cards.cuda import ALIGNMENT, LOAD_BYTES, Card, DeviceBlock
from mcinfer.cards.slabs import OpenSlab, filled, layout
from mcinfer.config import CARD_KIND, Device
from mcinfer.engines.adapters import open_engine
from mcinfer.engines.base import (
    BoundRun,
    Buffer,
    Engine,
    EngineAround,
    EngineRequest,
    OutOfDeviceMemoryError,
    Produced,
    StagedRun,
    Strings,
)
from mcinfer.engines.preparation import OWN_COPY
from mcinfer.engines.providers import NAMES, device_error
from mcinfer.errors import (
    BuildError,
    CardError,
    CardLostError,
    CardMemoryError,
    EngineError,
    MissingDependencyError,
    PredictError,
    ProtocolError,
)
from mcinfer.model_cache.children import Progress
from mcinfer.protocol import Build
from mcinfer.shm.arena import AttachedBlocks, OfferedBlock, SharedBlock, align
from mcinfer.shm.block import Block

_LIMIT = "gpu_mem_limit"
_SHARE = 0.9
"""How much of a card its workers take together by default; the rest is for contexts and libraries."""

_aligned = partial(align, step=ALIGNMENT)

_SLAB = -1
"""The number of a slab: the first block that a worker makes."""


class _NoSlabError(BuildError):
    """The weights cannot be shared on the card."""


def open_on_card(
    message: Build,
    request: EngineRequest,
    slab: OfferedBlock | None,
    blocks: AttachedBlocks,
    progress: Progress,
) -> Engine:
    """Load the model on a card, as a `CardEngine`; without a driver, where that may be, on the CPU.

    Args:
        message: The build.
        request: What follows from it, without what is of the card.
        slab: The block that BUILD names as the slab; its descriptor is this function's.
        blocks: The master's, for tensors.
        progress: As for `open_engine`.

    Raises:
        BuildError: The model cannot be loaded; of too little memory, with what is free.
        MissingDependencyError: A package is missing.
        CardLostError: This process cannot use the card any more.
    """
    with closing(_SharedWeights(slab)) as weights:
        try:
            card = Card.open(request.device)
        except (BuildError, MissingDependencyError) as exc:
            engine = open_engine(message.engine, request, progress)
            if engine.on_card:  # which needs its inputs there
                engine.close()
                raise
            if message.shares_weights:
                engine.notes += (f"{OWN_COPY}: {exc}",)
            return engine
        return CardEngine(_open(card, message, request, weights, progress), card, weights, blocks)


def _open(
    card: Card,
    message: Build,
    request: EngineRequest,
    weights: "_SharedWeights",
    progress: Progress,
) -> Engine:
    """The engine on the card's stream, with the weights that are shared there, or with its own."""
    limit = memory_limit(card, message)
    request = replace(request, stream=card.stream, memory_limit=limit)
    try:
        notes: tuple[str, ...] = ()
        if message.shares_weights:
            try:
                given = replace(request, slab=partial(weights.give, card))
                return open_engine(message.engine, given, progress)
            except _NoSlabError as exc:
                notes = (f"{OWN_COPY}: {exc}",)
        engine = open_engine(message.engine, request, progress)
        engine.notes += notes
        return engine
    except EngineError as exc:
        meant = device_error(str(exc))
        if isinstance(meant, OutOfDeviceMemoryError):
            raise BuildError(f"{exc}; {_standing(card)}") from exc
        if meant is not None:
            raise meant from exc
        raise


def memory_limit(card: Card, message: Build) -> int | None:
    """The bytes of the card that one of its workers may take; None for all that there is."""
    text = message.options.provider_options.get(_LIMIT)
    if text is None:
        if message.card_workers < 2:
            return None
        whole = int(_SHARE * card.memory()[1])
    else:
        if not (text.isascii() and text.isdigit()) or int(text) < message.card_workers:
            raise BuildError(
                f"provider_options: got {_LIMIT} {text!r}, expected bytes of the card's memory, for all of "
                f"its {message.card_workers} workers together"
            )
        whole = int(text)
    return whole // max(message.card_workers, 1)


def _standing(card: Card) -> str:
    free, total = card.memory()
    return f"{free} of {total} bytes of {card.device} are free"


class _SharedWeights:
    """The weights of a prepared model on the card: made here, or opened if another worker offers them.

    Attributes:
        block: Where they lie, once they were given.
    """

    def __init__(self, offered: OfferedBlock | None) -> None:
        self._offered = offered
        self.block: DeviceBlock | None = None

    def close(self) -> None:
        """Close what was offered, and not opened."""
        offered, self._offered = self._offered, None
        if offered is not None:
            os.close(offered.fd)

    def give(self, card: Card, model: Path) -> OpenSlab:
        """The slab of the prepared model at this path; raises `_NoSlabError` if there can be none."""
        try:
            placed = layout(model)
            if not placed.size:
                raise _NoSlabError(f"no weights of {model.name} lie outside of its graph")
            offered = self._offered
            if offered is None:
                block = filled(card, _SLAB, placed)
            elif offered.size != placed.size:
                raise _NoSlabError(
                    f"got {offered.size} bytes of weights on {card.device}, {model.name} has {placed.size}"
                )
            else:
                self._offered = None
                block = _attach(card, offered, offered.fd)
        except CardLostError:
            raise
        except (CardError, ProtocolError, OSError) as exc:
            raise _NoSlabError(str(exc)) from exc
        self.block = block
        return OpenSlab.within(card, block, placed)


def _attach(card: Card, offered: OfferedBlock, fd: int) -> DeviceBlock:
    """Open what another process made; the descriptor `fd` is this function's. Errors as of `Card.attach`."""
    owner = card.device if offered.device is None else offered.device
    return card.attach(offered.number, offered.size, fd, offered.token, owner)


class _Staging:
    """Memory on one side, host or card, that the runs of a worker share, since one runs at a time.

    It is as large as the largest layout needs. When it grows, the runs on it are bound anew. `make` gives a
    block of so many bytes, and `leave` is called before one is closed.
    """

    def __init__(
        self, make: Callable[[int], SharedBlock], leave: Callable[[SharedBlock], None]
    ) -> None:
        self._make = make
        self._leave = leave
        self._block: SharedBlock | None = None
        self._runs: WeakSet[_CardRun] = WeakSet()

    def addresses(self, sizes: Sequence[int], run: "_CardRun") -> list[int]:
        """Where tensors of these sizes can lie for a run; it is unbound when that is another place."""
        size = max(sum(map(_aligned, sizes)), 1)
        if self._block is None or self._block.size < size:
            for bound in self._runs:
                bound.unbind()
            self.close()
            self._block = self._make(size)
        self._runs.add(run)
        return [*accumulate(map(_aligned, sizes), initial=self._block.address)][:-1]

    def close(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            self._leave(block)
            block.close()


class CardEngine(EngineAround):
    """An engine of a worker on a card, which takes tensors of the host and of any card that it reaches.

    Attributes:
        engine: The one that is wrapped.
        card: The worker's.
        blocks: The master's, which tensors lie in.
        staging: Memory for tensors on the wrong side, of the host (True) and of the card.
        alignment: Bytes to which the address of a tensor on the card must be aligned.
    """

    def __init__(
        self,
        engine: Engine,
        card: Card,
        weights: _SharedWeights | None = None,
        blocks: AttachedBlocks | None = None,
    ) -> None:
        """Wrap an engine on the card's stream, or on the CPU, and the weights that it was given."""
        super().__init__(engine)
        self.concurrent = 1  # runs share the staging memory
        self.card = card
        block = None if weights is None else weights.block
        if block is not None and not (engine.on_card or card.host_address(block.address)):
            block.close()  # the engine fell back to the CPU, which cannot read it
            block = None
        self._weights = block
        self.slab = block if block is not None and block.token else None  # else another one made it
        # TensorRT wants bound addresses "aligned to at least 256 bytes" (setTensorAddress).
        is_tensorrt = self.providers[:1] == (NAMES["tensorrt"],)
        self.alignment = ALIGNMENT if is_tensorrt else LOAD_BYTES
        others = (Device(CARD_KIND, index) for index in range(card.count))
        self.reaches = tuple(str(other) for other in others if card.reaches(other))
        self.blocks = blocks or AttachedBlocks()
        self.blocks.card = self
        self._versions: dict[int, tuple[tuple[Buffer, ...], DeviceBlock]] = {}
        # By whether it is the host's.
        self.staging = {
            False: _Staging(partial(card.create, 0), self.unpin),
            True: _Staging(self._make_pinned, self.unpin),
        }

    def wants_on_host(self, name: str) -> bool:
        """Whether the engine takes this tensor in the host's memory."""
        on_host = self.engine.on_host
        return on_host is None or name in on_host

    def _make_pinned(self, size: int) -> Block:
        block = Block.create(0, size)
        self.pin(block)
        return block

    # Blocks.

    def open_block(self, offered: OfferedBlock) -> DeviceBlock:
        """Open a card's block, whose descriptor stays the caller's; errors as of `AttachedBlocks.find`."""
        with _short_of_memory(self.card, f"block {offered.number} of {offered.device}"):
            return _attach(self.card, offered, os.dup(offered.fd))

    def pin(self, block: SharedBlock) -> None:
        """Pin memory of the host, if the engine copies from it; a refusal only makes copies slower."""
        if self.on_card:
            self.card.register(block.address, block.size)

    def unpin(self, block: SharedBlock) -> None:
        """Before it is closed; nothing if it is not pinned."""
        if block.device is None:
            self.card.unregister(block.address)

    def block_around(self, buffer: Buffer) -> DeviceBlock | None:
        """The block that a tensor on a card lies in."""
        for block in self.blocks.opened.values():
            is_in = 0 <= buffer.address - block.address < block.size
            if is_in and isinstance(block, DeviceBlock) and block.device == buffer.device:
                return block
        return None

    # Weights that were replaced.

    def placed(self, version: int, weights: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        found = self._versions.get(version)
        if found is not None:
            return found[0]
        moved = [buffer for buffer in weights if not self.wants_on_host(buffer.name)]
        if not moved:
            return weights
        size = sum(_aligned(buffer.size) for buffer in moved)
        with _short_of_memory(self.card, f"version {version} of the weights"):
            block = self.card.create(0, size)
            places, at = {}, block.address
            for buffer in moved:
                self.card.copy(at, buffer.address, buffer.size)
                places[buffer.name] = replace(buffer, address=at, device=self.card.device)
                at += _aligned(buffer.size)
            self.card.synchronize()  # the master may use their memory for others
        result = tuple(places.get(buffer.name, buffer) for buffer in weights)
        self._versions[version] = result, block
        return result

    def forget(self, oldest: int) -> None:
        for version in [version for version in self._versions if version < oldest]:
            self._versions.pop(version)[1].close()

    # Runs.

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
        tensors = [item for item in (*inputs, *outputs) if isinstance(item, Buffer)]
        if all(item.device is None and self.wants_on_host(item.name) for item in tensors):
            return self.engine.bind(inputs, outputs)
        with _short_of_memory(self.card, "the tensors of a run"):
            return _CardRun(self, inputs, outputs)

    def close(self) -> None:
        super().close()
        with suppress(CardLostError):  # then nothing is pinned any more
            self.staging[True].close()
        self.staging[False].close()
        self.forget(max(self._versions, default=0) + 1)


@contextmanager
def _short_of_memory(card: Card, what: str) -> Iterator[None]:
    """Raise `PredictError` with what is free if the card's memory does not suffice for `what`."""
    try:
        yield
    except OutOfDeviceMemoryError as exc:
        raise PredictError(f"{exc}; {_standing(card)}") from exc
    except CardMemoryError as exc:
        raise PredictError(f"no memory for {what}: {exc}") from exc


class _CardRun(BoundRun):
    """A layout with tensors on the wrong side, or in blocks of a card that must be waited for."""

    def __init__(
        self, engine: CardEngine, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._outputs = outputs
        self._staged: StagedRun | None = None
        self._bind()

    def _bind(self) -> StagedRun:
        engine = self._engine
        card = engine.card
        tensors = [item for item in (*self._inputs, *self._outputs) if isinstance(item, Buffer)]
        # Outputs too: what the caller's stream reads of an earlier result must not be overwritten.
        blocks = [engine.block_around(buffer) for buffer in tensors if buffer.device]
        waits = {block.number: block for block in blocks if block is not None}.values()
        by_value = any(isinstance(item, Strings) for item in self._inputs)
        moved: dict[str, Buffer] = {}  # by name, as the engine gets it
        copies: dict[bool, list[tuple[Buffer, Buffer]]] = {False: [], True: []}  # by whether in
        inputs = {*map(id, self._inputs)}
        settles = False
        staged: dict[bool, list[Buffer]] = {False: [], True: []}
        for buffer in tensors:
            on_host = by_value or engine.wants_on_host(buffer.name)
            if on_host and buffer.device is not None:
                address = card.host_address(buffer.address)
                settles = True
                if address is not None:
                    moved[buffer.name] = replace(buffer, address=address, device=None)
                    continue
            elif on_host or (
                buffer.device == card.device and buffer.address % engine.alignment == 0
            ):
                continue
            staged[on_host].append(buffer)
        for on_host, buffers in staged.items():
            if not buffers:
                continue
            addresses = engine.staging[on_host].addresses([b.size for b in buffers], self)
            for buffer, address in zip(buffers, addresses, strict=True):
                device = None if on_host else card.device
                there = moved[buffer.name] = replace(buffer, address=address, device=device)
                copies[id(buffer) in inputs].append((buffer, there))
        run = engine.engine.bind(
            [moved.get(item.name, item) for item in self._inputs],
            [moved.get(item.name, item) for item in self._outputs],
        )

        def copy_in() -> None:
            for block in waits:
                card.wait(block)
            for buffer, there in copies[True]:
                card.copy(there.address, buffer.address, buffer.size)
            if settles:  # the host reads what the card has written
                card.synchronize()

        def copy_out(produced: Sequence[Produced | Strings]) -> Sequence[Produced | Strings]:
            for buffer, there in copies[False]:
                card.copy(buffer.address, there.address, buffer.size)
            if copies[False] or engine.on_card:
                card.synchronize()  # the answer says that the outputs are there
            return produced

        self._staged = StagedRun(copy_in, run, copy_out)
        return self._staged

    def unbind(self) -> None:
        """Let go of the staging memory; the next `execute` binds anew."""
        self._staged = None

    def execute(self) -> Sequence[Produced | Strings]:
        card = self._engine.card
        with _short_of_memory(card, "the tensors of a run"):
            staged = self._staged or self._bind()
            try:
                return staged.execute()
            except BaseException:
                # Or work of this run would touch tensors of another one. It raises `CardLostError` of a dead
                # context, which CUDA's libraries name by texts of their own, such as "CUBLAS failure 13".
                card.synchronize()
                raise
