"""Tensors on NVIDIA cards: inputs that lie there already, and outputs that stay there.

::

    CuPy, torch, … ── DLPack: our stream waits for the producer's ──► CardTensor
        in memory of `allocate`, or of a result     block and offset                     in place
        elsewhere                                   copied to a slot of the card's arena  copied
        on a card that workers do not reach         copied to the host                   through the host
    ── the block's event, on our stream after all of that ──► workers wait for it before they run

Nothing waits in the caller, unless a tensor goes through the host, or memory of the card is to be given back
to make room. The loop never calls the driver, which may wait for the card: callers make the blocks.

Ownership: a `CardTensor` holds the producer's tensor and the slot of a copy; a request holds its inputs until
no worker can read them, and the tensor is held until our stream has read it, even if the request has failed.
Results hold the lease of their memory, as those of the host do. That memory may be
used again while the caller's default stream still reads it, so the next run that writes there waits for what
that stream has queued. Memory of cards is not there in a process that was forked.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from threading import get_ident
from time import monotonic
from typing import Any
from weakref import finalize

import numpy as np

from mcinfer.cards import dlpack
from mcinfer.cards.cuda import ALIGNMENT, LOAD_BYTES, Card, DeviceBlock
from mcinfer.config import CARD_KIND, Device
from mcinfer.errors import (
    BuildError,
    CardError,
    ClosedError,
    InvalidInputError,
    MemoryFullError,
    PredictTimeoutError,
    is_refusal,
)
from mcinfer.extras import requires
from mcinfer.requests.frames import Lease, Plan
from mcinfer.requests.planner import Inbox, Place, Spot, lease, output_frame
from mcinfer.requests.request import Call, Parts, Request, pick
from mcinfer.requests.tensors import Arrays
from mcinfer.shm.arena import Arena, BlockNeededError, Slot
from mcinfer.specs import STRING, TensorSpec
from mcinfer.statistics import CARD_WAYS, CardStatistics, CardWay

__tracebackhide__ = is_refusal

_DEFAULT_STREAM = 1  # cudaStreamLegacy: it waits for all streams that are not made as non-blocking

_CUDA = 2  # kDLCUDA of dlpack.h

_NO_STREAM = -1  # of `__dlpack__`: the consumer wants no order

_RECLAIM_PATIENCE = 1.0  # seconds that any caller waits for memory that is to be given back


def open_memory(
    device: Device,
    limit: int | None,
    queue: Inbox,
    dropped: Callable[[int], None],
    numbers: Iterator[int],
) -> "CardMemory":
    """Open a card, and make an arena for its memory; see `mcinfer.requests.planner.OpenPlace`.

    Raises:
        MissingDependencyError: The package cuda-bindings is not installed.
        BuildError: There is no such card, or no driver.
    """
    card = Card.open(device)
    arena = Arena(
        limit or card.memory()[0] // 2,
        dropped=dropped,
        create=None,
        close=DeviceBlock.drop,
        numbers=numbers,
        alignment=ALIGNMENT,
        name=f"memory of {card.device}",
    )
    return CardMemory(card, arena, queue)


@dataclass(slots=True, eq=False)
class CardMemory:
    """One card's memory for the tensors of one pool: a `mcinfer.requests.planner.Place`."""

    card: Card
    arena: Arena  # of blocks of its memory; the loop owns it
    queue: Inbox
    is_reached: bool = False  # by every worker, which can be given that memory; the loop says so
    # By thread: the loop reads it, and must take no lock that a caller can hold.
    _inputs: dict[int, dict[CardWay, tuple[int, int]]] = field(default_factory=dict)

    def allocate(self, sizes: Sequence[int], timeout: float) -> list[Slot]:
        """Slots of so many bytes, all or none. The caller makes the blocks: the loop may not wait for a card.

        Raises:
            MemoryFullError: The memory was not free in time; or work on the card did not let go of what is to
                be freed, nor within a second.
            CardError: The driver refused, or the card has no room.
        """
        end = monotonic() + timeout
        needed: BlockNeededError | None = None
        block: DeviceBlock | None = None
        try:
            while True:
                try:
                    left = max(0.0, end - monotonic())
                    return self.queue.allocate(sizes, left, self.arena, block)
                except BlockNeededError as exc:
                    needed = exc
                block = self._make_block(needed, end - monotonic())
        finally:
            needed = block = None  # which an error's traceback would hold

    def _make_block(self, needed: BlockNeededError, timeout: float) -> DeviceBlock:
        """A block for the arena, once memory that is not used any more was given back."""
        card = self.card
        if card.unused:
            try:
                card.follow(_DEFAULT_STREAM)
                card.synchronize(max(timeout, _RECLAIM_PATIENCE))
            except TimeoutError as exc:
                raise MemoryFullError(
                    f"{needed.size} bytes of memory of {card.device} wanted, and what is to be freed is in "
                    f"use: {exc}"
                ) from exc
        return card.create(needed.number, needed.size)

    # Inputs.

    def read(self, value: Any, spec: TensorSpec) -> "CardTensor":
        """Take an input that lies on the card, in place, unless it was taken before.

        Raises:
            InvalidInputError: It does not fit; names the input.
        """
        if isinstance(value, CardTensor):
            return value
        try:
            with self.card.current():  # PyTorch gives tensors of the current card alone
                tensor = dlpack.read(value, self.card.stream)
        except Exception as exc:  # a producer raises what it likes
            raise InvalidInputError(f"input {spec.name!r}: {exc}") from exc
        if tensor.element_type != spec.element_type:
            raise InvalidInputError(
                f"input {spec.name!r} has dtype {tensor.element_type}, expected {spec.element_type} ({spec})"
            )
        return CardTensor(tensor, spec, self)

    def bring(
        self, arrays: list[Any], plan: Plan, call: Call, timeout: float
    ) -> tuple[dict[int, Spot], Lease | None]:
        """Bring inputs on all cards to where workers can read them, and get memory for outputs on a card.

        The memory of one card is had at once, and cards come in a fixed order, before the host: requests that
        each held a part, and waited for what another one held, would wait for ever.

        Args:
            arrays: The inputs; those that workers cannot read on a card are on the host afterwards.
            plan: How they are cut.
            call: Says where the outputs go, and how long a copy to the host may take.
            timeout: Seconds to wait for memory.

        Returns:
            By number, where inputs lie on cards; and the outputs' memory, if they are written there.

        Raises:
            MemoryFullError: A card's memory for tensors was not free in time.
            PredictTimeoutError: What is queued before a copy to the host took too long.
        """
        end = monotonic() + timeout
        tensors: dict[int, CardTensor] = {}
        for i, (array, layout) in enumerate(zip(arrays, plan.inputs.layouts, strict=True)):
            if isinstance(array, CardTensor):
                if array.memory.is_reached and layout is not None and layout.contiguous:
                    tensors[i] = array
                else:
                    arrays[i] = array.on_host(call.timeout)
        target: CardMemory | None = call.outputs_on
        if target is not None and (plan.simple_outputs is None or not target.is_reached):
            target = None
        memories = {*(tensor.memory for tensor in tensors.values()), *([target] if target else [])}
        outputs: Lease | None = None
        for memory in sorted(memories, key=lambda memory: memory.card.device.index):
            mine = [tensor for tensor in tensors.values() if tensor.memory is memory]
            left = max(0.0, end - monotonic())
            outputs = memory.take(mine, plan if memory is target else None, left) or outputs
        found = {i: tensor.place for i, tensor in tensors.items() if tensor.place is not None}
        return found, outputs

    def take(
        self, tensors: "Sequence[CardTensor]", plan: Plan | None, timeout: float
    ) -> Lease | None:
        """Have workers read tensors of this card, in place or as copies; memory for a plan's outputs."""
        copied = [tensor for tensor in tensors if not tensor.find()]
        sizes = [tensor.nbytes for tensor in copied]
        if plan is not None:
            sizes.append(plan.outputs.size)
        outputs: Lease | None = None
        if sizes:
            slots = self.allocate(sizes, timeout)
            self.card.follow(_DEFAULT_STREAM)
            for tensor, slot in zip(copied, slots, strict=False):
                tensor.copy_to(slot)
            if plan is not None:
                outputs = lease(output_frame(plan, slots[-1]), deque(maxlen=0))
        blocks = {tensor.place[0] for tensor in tensors if tensor.place is not None}
        if outputs is not None:
            blocks |= outputs.ticket.frame.blocks
        # Workers wait for what our stream has queued, before they touch these blocks.
        for number in blocks:
            block = self.arena.block(number)
            if isinstance(block, DeviceBlock):
                self.card.record(block)
        return outputs

    def count(self, way: CardWay, size: int) -> None:
        """Count an input of so many bytes."""
        mine = self._inputs.setdefault(get_ident(), dict.fromkeys(CARD_WAYS, (0, 0)))
        tensors, total = mine[way]
        mine[way] = tensors + 1, total + size

    def statistics(self) -> CardStatistics:
        """A snapshot, for the arena's owner."""
        threads = [counts.copy() for counts in self._inputs.copy().values()]
        return CardStatistics(
            device=str(self.card.device),
            memory_bytes=self.arena.size,
            memory_used_bytes=self.arena.used,
            inputs={way: sum(counts[way][0] for counts in threads) for way in CARD_WAYS},
            input_bytes={way: sum(counts[way][1] for counts in threads) for way in CARD_WAYS},
        )

    # The end of work.

    def after(self, call: Callable[[], object]) -> None:
        """Make a call once our stream has done what it has queued by now; for the delivery thread.

        Where work has failed, or this process was forked, nothing is read any more.
        """
        with suppress(CardError, ClosedError):
            try:
                self.card.synchronize(0.0)
            except TimeoutError:
                is_done = self.card.mark()

                def attempt() -> bool:
                    with suppress(CardError):
                        if not is_done():
                            return False
                    call()
                    return True

                self.queue.repeat(attempt)
                return
        call()

    def release(self) -> None:
        """Give back what nothing uses, once our stream and the default one have done their work."""
        with suppress(CardError):
            self.card.follow(_DEFAULT_STREAM)
        self.after(self.card.reclaim)

    def finish(self, timeout: float) -> None:
        """Wait for what our stream has queued; raise `PredictTimeoutError` if it takes longer."""
        try:
            self.card.synchronize(timeout)
        except TimeoutError as exc:
            raise PredictTimeoutError(str(exc)) from exc

    # Results.

    def request(self, *given: Any) -> "CardRequest":
        """A request whose outputs are to lie on the card; the arguments are those of `Request`."""
        return CardRequest(*given)

    def array(
        self,
        address: int,
        spec: TensorSpec,
        shape: Sequence[int],
        owner: object,
        ready: Callable[[int | None], object] | None = None,
    ) -> Any:
        """A CuPy array over memory of the card, whose owner it holds; `ready` as in `DlpackTensor`."""
        tensor = dlpack.DlpackTensor(
            address=address,
            shape=tuple(shape),
            element_type=spec.element_type,
            device=self.card.device,
            owner=owner,
            ready=ready,
        )
        return cupy().from_dlpack(tensor)

    def empty(self, spec: TensorSpec, shape: Sequence[int], timeout: float) -> Any:
        """A CuPy array of undefined content, in memory that workers read in place.

        Raises:
            InvalidInputError: CuPy has no such type.
        """
        check_types([spec], "shapes")
        (slot,) = self.allocate([prod(shape) * spec.dtype.itemsize], timeout)

        def follow(stream: int | None) -> None:
            # A copy for a request that failed may still be on its way into this memory.
            if stream != _NO_STREAM:
                self.card.lead(stream or _DEFAULT_STREAM)

        return self.array(slot.address, spec, shape, slot.memory, follow)

    def download(self, address: int, size: int, timeout: float) -> Any:
        """Bytes of the card, in memory of the host.

        Raises:
            PredictTimeoutError: What our stream has queued took longer.
        """
        copy = np.empty(size, np.uint8)
        if size:
            # Host memory is not pinned, so the driver waits for the stream, without an end: we wait before.
            self.finish(timeout)
            self.card.copy(copy.ctypes.data, address, size)
            self.finish(timeout)
        return copy

    def upload(self, specs: Sequence[TensorSpec], arrays: Arrays, timeout: float) -> Arrays:
        """Arrays of the host as CuPy arrays, by name.

        Raises:
            MemoryFullError: The card's memory for tensors is in use.
            PredictTimeoutError: What our stream, or the default one, has queued took longer.
        """
        chosen = [(spec, np.ascontiguousarray(arrays[spec.name])) for spec in specs]
        # Another caller may just be making a block. Not long: this may be the delivery thread.
        patience = min(timeout, _RECLAIM_PATIENCE)
        slots = self.allocate([array.nbytes for _, array in chosen], patience)
        self.card.follow(_DEFAULT_STREAM)
        self.finish(timeout)  # as in `download`
        for (_, array), slot in zip(chosen, slots, strict=True):
            self.card.copy(slot.address, array.ctypes.data, array.nbytes)
        self.finish(timeout)
        return {
            spec.name: self.array(slot.address, spec, arrays[spec.name].shape, slot.memory)
            for (spec, _), slot in zip(chosen, slots, strict=True)
        }


class CardTensor:
    """An input on a card, which is copied to the host only where it has to be.

    Attributes:
        shape: As an array's.
        nbytes: As an array's.
        base: Not None, as in arrays that may lie in shared memory.
        memory: That card's.
        place: Block and offset, once workers can read it on the card.
    """

    __slots__ = (
        *("__weakref__", "_address", "_slot", "_spec"),
        *("base", "memory", "nbytes", "place", "shape"),
    )

    def __init__(self, tensor: dlpack.DlpackTensor, spec: TensorSpec, memory: CardMemory) -> None:
        self.memory = memory
        self.shape = tensor.shape
        self.nbytes = tensor.size
        self.base = memory
        self.place: tuple[int, int] | None = None
        self._address = tensor.address
        self._slot: Slot | None = None
        self._spec = spec
        # The producer's code, which lets go of the tensor, must not run in the loop. A request that failed
        # leaves its copy on the stream; the producer may use its memory again as soon as it is let go.
        let_go = partial(memory.after, [tensor].clear)
        finalize(self, memory.queue.deliver, let_go).atexit = False

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.memory.card.device.index

    def find(self) -> bool:
        """Whether workers can read it where it lies."""
        if self.place is None and self._address % LOAD_BYTES == 0:
            self.place = self.memory.arena.find(self._address, self.nbytes)
            if self.place is not None:
                self.memory.count("in_place", self.nbytes)
        return self.place is not None

    def copy_to(self, slot: Slot) -> None:
        """Queue a copy, which workers will read."""
        self.memory.card.copy(slot.address, self._address, self.nbytes)
        self.memory.count("copied", self.nbytes)
        self._slot, self.place = slot, (slot.block, slot.offset)

    def on_host(self, timeout: float) -> Any:
        """A copy as a NumPy array; raise `PredictTimeoutError` as `CardMemory.download`."""
        copy = self.memory.download(self._address, self.nbytes, timeout)
        self.memory.count("through_host", self.nbytes)
        return np.ndarray(self.shape, self._spec.dtype, copy)


def check_types(specs: Sequence[TensorSpec], name: str) -> None:
    """Raise `InvalidInputError` if CuPy has no arrays of these types."""
    for spec in specs:
        if spec.element_type == STRING or spec.dtype.isbuiltin != 1:
            raise InvalidInputError(f"{name}: got {spec}, which no CuPy array can hold")


def place_of(
    text: object, name: str, specs: Sequence[TensorSpec], pool: Sequence[Device], queue: Inbox
) -> Place:
    """The card that an argument names, for tensors of these types; ``"device"`` is the pool's first.

    Raises:
        InvalidInputError: There is no such card, or CuPy lacks such a type; names the argument.
        MissingDependencyError: The package cuda-bindings or CuPy is not installed.
        ClosedError: The master is closed.
    """
    check_types(specs, name)
    cards = [one for one in pool if one.kind == CARD_KIND]
    device = cards[0] if cards and text == "device" else None
    with suppress(InvalidInputError):
        device = device or Device.parse(text)
    if device is None or device.kind != CARD_KIND:
        raise InvalidInputError(
            f"{name}: got {text!r}, expected a card such as 'cuda:0', or 'device' in a pool with one"
        )
    cupy()
    try:
        return queue.place(device)
    except BuildError as exc:
        raise InvalidInputError(f"{name}: got {text!r}: {exc}") from exc


def cupy() -> Any:
    """The package CuPy.

    Raises:
        MissingDependencyError: It is not installed.
    """
    with requires("arrays on a card need the package cupy", "cupy", extra="cupy"):
        import cupy as found
    return found


class CardRequest(Request):
    """A request whose outputs are to lie on a card.

    Attributes:
        memory: That card's.
        in_place: Whether the workers write there; otherwise the outputs come through the host.
    """

    def __init__(
        self,
        plan: Plan,
        call: Call,
        inputs: Sequence[object],
        input_bodies: Sequence[bytes],
        outputs: Lease | None,
        blocks: frozenset[int],
    ) -> None:
        super().__init__(plan, call, inputs, input_bodies, outputs, blocks)
        self.memory: CardMemory = call.outputs_on
        number = None if outputs is None else outputs.ticket.frame.slot.block
        self.in_place = number is not None and self.memory.arena.block(number) is not None
        self._caller = get_ident()

    def preset(self) -> None:
        """As in `Request`, on the card."""
        super().preset()
        specs = [spec for spec in self._model.outputs if spec.name in (self._value or ())]
        value = self.memory.upload(specs, self._value or {}, self.timeout)
        self._value = pick(value, self.wanted)

    @property
    def is_simple(self) -> bool:
        """As in `Request`; results in place are views, unless the card's memory is short."""
        return self.in_place and self._parts is None and not self.memory.arena.crowded

    def _join(self, parts: Parts, outputs: Lease | None) -> Arrays:
        specs = self._model.outputs
        slot = outputs.ticket.frame.slot if self.in_place and outputs is not None else None
        if slot is None or parts:
            memory: Any = outputs
            if slot is not None:  # and some parts in memory of the workers' own
                memory = self.memory.download(slot.address, slot.size, self.timeout)
            joined = super()._join(parts, memory)
            wanted = [s for s in specs if self.wanted is None or s.name in self.wanted]
            return self.memory.upload(wanted, joined, self.timeout)
        rows = zip(specs, self._plan.cut.outputs, self._plan.outputs.starts, strict=True)
        value = {
            spec.name: self.memory.array(slot.address + start, spec, join.shape or (), outputs)
            for spec, join, start in rows
        }
        if self.memory.arena.crowded:
            # Results that a user collects must not take the memory that requests need.
            card, cuda = self.memory.card, cupy().cuda
            with cuda.Device(card.device.index):  # CuPy copies to the current one
                value = {name: array.copy() for name, array in value.items()}
                card.follow(cuda.get_current_stream().ptr or _DEFAULT_STREAM)
            if get_ident() != self._caller:  # the user's streams do not wait for this thread's one
                self.memory.finish(self.timeout)
        return value
