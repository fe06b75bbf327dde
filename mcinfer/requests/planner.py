"""From a user's arrays to a request: checks, layout and encoding happen once for each set of shapes.

::

    inputs ── their shapes ──► plan (one look-up) ──► two frames: memory for inputs, and for outputs
           ── copied in (rows a to b of a shard are an offset) ──► Request

Plans keep unused frames. So steady traffic reuses memory that is warm in every process, and references that
are encoded and bound in the workers. Idle frames are limited in number and bytes, and freed when memory is
short (`Planner.release_idle`). Any thread may call a planner: each access to shared state is one step of
the interpreter.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from operator import index
from time import monotonic
from typing import Any, cast
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from mcinfer import sharding
from mcinfer.cards.tensors import (
    CardMemory,
    CardRequest,
    Cards,
    CardTensor,
    check_types,
    is_on_card,
    place,
    read_input,
)
from mcinfer.errors import InvalidInputError, McinferError, QueueFullError
from mcinfer.protocol import TensorRef, encode_references, part_of_joined
from mcinfer.requests.forks import forks
from mcinfer.requests.request import (
    NO_WEIGHTS,
    Arrays,
    Frame,
    Inputs,
    Lease,
    Plan,
    Request,
    Seen,
    Side,
    Ticket,
    lease,
)
from mcinfer.requests.splitting import Known, OutgrownError
from mcinfer.requests.tensors import (
    Copier,
    Layout,
    as_input,
    copy_in,
    lay_input,
    lay_output,
    string_rows,
)
from mcinfer.requests.weights import WeightStore, WeightVersion
from mcinfer.sharding import JoinError
from mcinfer.shm.arena import Arena, Slot, align
from mcinfer.specs import ELEMENT_TYPES, MOST_COPIED, STRING, ModelSpec, TensorSpec

Allocate = Callable[[Sequence[int], float], list[Slot]]
"""Gets slots of so many bytes, within so many seconds: from the loop, which owns the memory."""

_MAX_PLANS = 256

_MAX_SHARES = 3
"""Different shares of which plans for the same shapes are kept, with their memory: the present ones, these
with a row for a worker that is measured again, and those before them."""

_MAX_PLAN_BYTES = 32 << 20  # estimated, for all plans and their idle frames
_REFERENCE_BYTES = 600  # estimate for one tensor of one shard, in a plan or in a frame

_MAX_IDLE_FRAMES = 64
_MAX_IDLE_BYTES = 64 << 20
_MAX_IDLE_REFERENCES = 512
"""Limits of one plan, each for inputs and for outputs; one frame of any size is always kept."""

_MAX_COMMON_BYTES = 4096  # of inputs that all rows share; with larger ones, requests are not joined
_LARGE_BYTES = 1 << 20  # copies from here on may use several threads


class Planner:
    """Checks and lays out requests for one model.

    Attributes:
        weights: The replaceable weights of the model.
        apart: Why a request could not join one run with others; empty until there is such a request.
    """

    def __init__(
        self,
        model: ModelSpec,
        arena: Arena,
        allocate: Allocate,
        max_rows: int = 1,
        weights: Sequence[TensorSpec] = (),
        cards: Cards | None = None,
        *,
        remembers: bool = False,
    ) -> None:
        self._cards = cards
        self._remembers = remembers
        self._max_rows = max_rows
        self._model = model
        self._arena = arena
        self._allocate = allocate
        self._forks = forks()
        self._copier = Copier(len(os.sched_getaffinity(0)))
        self.weights = WeightStore(weights, allocate, self._copier)
        self._names = tuple(spec.name for spec in model.inputs)
        self._has_strings = any(spec.element_type == STRING for spec in model.inputs)
        self._types = tuple((spec, spec.element_type) for spec in model.inputs)
        self._plain = tuple(
            (spec.name, None if spec.element_type == STRING else spec.dtype)
            for spec in model.inputs
        )
        self._plans: dict[tuple[Any, ...], Plan] = {}
        """By shapes, pieces, the number of what is known of the split, how many outputs are opened, and the
        numbers of borrowed inputs."""
        self._forgotten: list[ref[deque[Ticket]]] = []
        """Where frames of forgotten plans go that are still in use."""
        self.apart = ""
        self._opened: set[str] = set()
        """Outputs that had another shape than the model declares: they are not laid out before the run."""

    def request(
        self,
        inputs: Inputs,
        pieces: int | sharding.Shares,
        known: Known | None,
        timeout: float,
        *,
        weights: WeightVersion = NO_WEIGHTS,
        joinable: bool = False,
        outputs_on: CardMemory | None = None,
        card_timeout: float = 0.0,
    ) -> Request:
        """Check a request, cut it, and bring its inputs into shared memory.

        Args:
            inputs: By name, or in the model's order.
            pieces: Most shards, or the rows of each worker.
            known: How to cut it; None is whole.
            timeout: Seconds to wait for memory.
            weights: What it runs with.
            joinable: Whether a request of one shard may join one run with others.
            outputs_on: The card for its outputs; None is the host.
            card_timeout: Seconds to wait for each tensor that goes through the host.

        Raises:
            InvalidInputError: It does not fit the model; names the input.
            QueueFullError: No shared memory was free in time.
            PredictTimeoutError: What is queued on a card before such a tensor took longer.
            OutgrownError: It would be cut, and has more rows than `known.most_rows`.
        """
        arrays = self.arrays(inputs)
        if outputs_on is not None:
            return self._card_request(
                arrays, pieces, known, timeout, card_timeout, weights, outputs_on
            )
        shapes = tuple([array.shape for array in arrays])
        key = (shapes, pieces, 0 if known is None else known.number, len(self._opened))
        plan = self._plans.get(key) or self._new_plan(key, shapes, pieces, known)
        if not plan.cut.rows:
            return self._empty(plan, weights)
        borrowed = None
        for array in arrays:
            # A view of ordinary memory has a base as well, but not one of these.
            if array.base is not None and _is_leased(array):
                if any(type(given) is CardTensor for given in arrays):
                    return self._card_request(arrays, pieces, known, timeout, card_timeout, weights)
                borrowed = self._borrowed(arrays, plan)
                break
        if borrowed is not None:
            longer = (*key, *borrowed)
            plan = self._plans.get(longer) or self._new_plan(
                longer, shapes, pieces, known, borrowed
            )
        laid = plan
        if plan.seen is None:
            held, outputs = self._lease(plan, timeout)
        else:
            laid, held, outputs = self._lease_laid(plan, plan.seen, timeout)
        try:
            if plan.simple_inputs and held is not None:
                frame = held.ticket.frame
                for view, array in zip(frame.views, arrays, strict=True):
                    if view.nbytes < _LARGE_BYTES:
                        np.copyto(view, array, "equiv")
                    else:
                        self._copier.copy(view, array)
                keep: Sequence[object] = (held,)
                bodies: Sequence[bytes] = frame.bodies
                blocks = frame.blocks
            else:
                keep, bodies, blocks = self._place(arrays, plan, borrowed or {}, held)
        except BaseException:
            if held is not None:
                # The copier's threads may still write to this frame: it goes with their views.
                del held.ticket
            raise
        if outputs is not None:
            written = outputs.ticket.frame.blocks
            blocks = blocks if written <= blocks else blocks | written
        request = Request(self._model, laid, keep, bodies, outputs, blocks, weights, self._opened)
        if self._has_strings:
            request.size += sum(map(len, bodies))  # they travel in these
        if joinable and self._max_rows > 1:
            request.join = self._join(arrays, plan, weights)
        return request

    def close(self) -> None:
        """End the threads that copy, and free replaced weights."""
        self._copier.close()
        self.weights.close()
        for key in [*self._plans]:
            self._forget(self._plans.pop(key, None))

    @property
    def idle_bytes(self) -> int:
        """Bytes of shared memory in frames that are not in use."""
        return sum(t.frame.slot.size for idle in self._idle() for t in idle.copy())

    def release_idle(self) -> None:
        """Free the frames that are not in use: memory is short."""
        for idle in self._idle():
            idle.clear()

    def unused(self, now: float) -> "list[tuple[deque[Ticket], Ticket]]":
        """The frames that have been idle since an earlier call: where each is, the longest idle last."""
        found = []
        for idle in self._idle():
            for ticket in idle.copy():
                since = getattr(ticket, "idle_since", None)
                if since is None:
                    ticket.idle_since = now
                else:
                    found.append((since, idle, ticket))
        found.sort(key=lambda item: item[0], reverse=True)
        return [(idle, ticket) for _, idle, ticket in found]

    def _idle(self) -> "list[deque[Ticket]]":
        """Where idle frames are, also those of forgotten plans."""
        idle = [side.idle for plan in [*self._plans.values()] for side in _sides(plan)]
        return idle + [left for found in [*self._forgotten] if (left := found()) is not None]

    def allocate(
        self,
        shapes: Mapping[str, Sequence[int]],
        timeout: float,
        card: CardMemory | None = None,
    ) -> Arrays:
        """Arrays in shared memory, or in a card's."""
        specs = {spec.name: spec for spec in self._model.inputs}
        arrays: Arrays = {}
        if not isinstance(shapes, Mapping):
            raise InvalidInputError(
                f"shapes: got {type(shapes).__name__}, expected a mapping of input names to shapes"
            )
        for name, given in shapes.items():
            if name not in specs:
                raise InvalidInputError(
                    f"shapes: unknown input {name!r}, expected some of {[*specs]}"
                )
            spec = specs[name]
            try:
                shape = tuple(index(size) for size in given)
            except TypeError as exc:
                raise InvalidInputError(
                    f"shapes: got {given!r} for {name!r}, expected {spec}"
                ) from exc
            bits = ELEMENT_TYPES[spec.element_type].bits
            if bits % 8 or not bits:
                raise InvalidInputError(
                    f"shapes: input {spec} cannot lie in shared memory as an array"
                )
            if (spec.shape and len(shape) != len(spec.shape)) or min(shape, default=0) < 0:
                raise InvalidInputError(f"shapes: got {list(shape)} for {name!r}, expected {spec}")
            if card is not None:
                check_types([spec], "shapes")
                arrays[name] = card.empty(spec, shape, timeout)
                continue
            (slot,) = self._allocate([prod(shape) * spec.dtype.itemsize], timeout)
            frame, idle = _frame(slot), deque[Ticket](maxlen=0)
            self._forks.add(frame, idle)
            memory = np.asarray(cast("Any", lease(frame, idle)))
            arrays[name] = np.ndarray(shape, spec.dtype, memory)
        return arrays

    def host_arrays(self, inputs: Inputs, timeout: float) -> list[NDArray[Any]]:
        """As `arrays`; what lies on a card is copied to the host, each within so many seconds."""
        found = self.arrays(inputs)
        return [array.on_host(timeout) if type(array) is CardTensor else array for array in found]

    def copies(self, inputs: Inputs, request: Request | None = None) -> list[Any]:
        """The inputs as they are now, whatever becomes of the caller's arrays; what is borrowed stays so.

        What a new request has taken is not copied again: an array over its memory keeps that.
        """

        def copy(i: int, array: Any) -> Any:
            if _is_leased(array):
                return array
            mine = None if request is None else request.taken(i)
            return np.array(array) if mine is None else mine

        return [copy(i, array) for i, array in enumerate(self.arrays(inputs))]

    def arrays(self, inputs: Inputs) -> list[Any]:
        """The inputs of a request as arrays of the model's types, in its order; shapes are not checked.

        Those on a card are a `CardTensor` each.

        Raises:
            InvalidInputError: One is missing, unknown or of another type; names it.
        """
        if type(inputs) is dict and len(inputs) == len(self._plain):
            arrays = []
            for name, dtype in self._plain:
                array = inputs.get(name)
                if type(array) is not np.ndarray or array.dtype is not dtype:
                    break
                arrays.append(array)
            else:
                return arrays
        return self._converted(inputs)

    def _converted(self, inputs: Inputs) -> list[Any]:
        if isinstance(inputs, Mapping):
            if inputs.keys() != set(self._names):
                unknown = [name for name in inputs if name not in self._names]
                missing = [name for name in self._names if name not in inputs]
                raise InvalidInputError(
                    f"inputs: {f'unknown {unknown}, ' if unknown else ''}"
                    f"{f'missing {missing}, ' if missing else ''}expected {[*self._names]}"
                )
            values = [inputs[name] for name in self._names]
        elif isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
            if len(inputs) != len(self._names):
                raise InvalidInputError(
                    f"inputs: got {len(inputs)}, expected {len(self._names)}: {[*self._names]}"
                )
            values = [*inputs]
        else:
            raise InvalidInputError(
                f"inputs: got {type(inputs).__name__}, expected a mapping by name or a sequence of "
                f"{[*self._names]}"
            )
        return [self._input(v, s, t) for v, (s, t) in zip(values, self._types, strict=True)]

    def _input(self, value: Any, spec: TensorSpec, element_type: str) -> Any:
        if type(value) is CardTensor:
            return value
        if self._cards is not None and is_on_card(value, spec):
            return read_input(value, spec, self._cards)
        return as_input(value, spec, element_type)

    # Tensors on cards.

    def _card_request(
        self,
        arrays: list[Any],
        pieces: int | sharding.Shares,
        known: Known | None,
        timeout: float,
        card_timeout: float,
        weights: WeightVersion,
        outputs_on: CardMemory | None = None,
    ) -> Request:
        """A request with inputs on cards, or outputs; it never joins a run with others.

        Inputs that are cut along an inner axis, or packed, go through the host, and so do outputs that are
        joined by copying, or whose shapes are not known before the run.
        """
        end = monotonic() + timeout
        shapes = tuple([array.shape for array in arrays])
        key = (shapes, pieces, 0 if known is None else known.number, len(self._opened))
        plan = self._plans.get(key) or self._new_plan(key, shapes, pieces, known)
        if not plan.cut.rows:
            request = self._empty(plan, weights)
            if outputs_on is not None:
                request.preset(
                    outputs_on.upload(self._model.outputs, request.value(), card_timeout)
                )
            return request
        tensors: dict[int, CardTensor] = {}
        for i, (array, layout) in enumerate(zip(arrays, plan.inputs.layouts, strict=True)):
            if type(array) is CardTensor:
                if array.memory.is_reached and layout is not None and layout.contiguous:
                    tensors[i] = array
                else:
                    arrays[i] = array.on_host(card_timeout)
        borrowed = self._borrowed(arrays, plan) or {}
        stays = outputs_on is not None and plan.simple_outputs is not None and outputs_on.is_reached
        for_outputs = (outputs_on, plan.outputs.size) if outputs_on is not None and stays else None
        slot = place([*tensors.values()], for_outputs, timeout)
        borrowed |= {i: tensor.place for i, tensor in tensors.items() if tensor.place is not None}
        if borrowed:
            longer = (*key, *borrowed)
            plan = self._plans.get(longer) or self._new_plan(
                longer, shapes, pieces, known, borrowed
            )
        if outputs_on is not None:  # its value is never just a view for NumPy
            side = replace(plan.outputs, is_laid=plan.outputs.is_laid and slot is None)
            plan = replace(plan, outputs=side, simple_outputs=None)
        held, outputs = self._lease(plan, max(0.0, end - monotonic()))
        try:
            keep, bodies, blocks = self._place(arrays, plan, borrowed, held)
        except BaseException:
            if held is not None:
                del held.ticket  # as in `request`
            raise
        if slot is not None:
            frame = _frame(slot, self._output_references(plan, slot))
            outputs = lease(frame, deque(maxlen=0))
        if outputs is not None:
            blocks |= outputs.ticket.frame.blocks
        make = Request if outputs_on is None else partial(CardRequest, outputs_on, slot is not None)
        request = make(self._model, plan, keep, bodies, outputs, blocks, weights, self._opened)
        request.size += sum(tensor.nbytes for tensor in tensors.values())
        return request

    # Plans.

    def _new_plan(
        self,
        key: tuple[Any, ...],
        shapes: tuple[tuple[int, ...], ...],
        pieces: int | sharding.Shares,
        known: Known | None,
        borrowed: Collection[int] = (),
    ) -> Plan:
        """Lay out a request; `borrowed` inputs lie elsewhere, and have no place in a frame."""
        split = None if known is None else known.split
        cut = sharding.cut_batch(self._model, shapes, pieces, split)
        if known is not None and len(cut.rows) > 1 and sum(cut.rows) > known.most_rows:
            raise OutgrownError(f"{sum(cut.rows)} rows")
        inputs = tuple(
            lay_input(spec, shape, part)
            for spec, shape, part in zip(self._model.inputs, shapes, cut.inputs, strict=True)
        )
        outputs = tuple(
            None if spec.name in self._opened else lay_output(spec, join)
            for spec, join in zip(self._model.outputs, cut.outputs, strict=True)
        )
        laid = [None if i in borrowed else layout for i, layout in enumerate(inputs)]
        shards = len(cut.rows)
        reads, writes = _side(inputs, laid, shards), _side(outputs, outputs, shards)
        unlaid = [s for s, lay in zip(self._model.outputs, outputs, strict=True) if lay is None]
        unknown = frozenset(spec.name for spec in unlaid if spec.element_type != STRING)
        frames = 1 + (reads.idle.maxlen or 0) + (writes.idle.maxlen or 0)
        plan = Plan(
            cut=cut,
            shapes=shapes,
            inputs=reads,
            outputs=writes,
            size=sum(layout.size for layout in (*laid, *outputs) if layout is not None),
            cost=_REFERENCE_BYTES * frames * max(len(inputs), len(outputs)) * max(1, shards),
            part=self._part(cut) if self._max_rows > 1 and shards == 1 else 1.0,
            lays_all=None not in outputs,
            simple_inputs=all(layout is not None and layout.contiguous for layout in laid),
            simple_outputs=self._simple_outputs(cut, writes),
            seen=Seen(unknown, shards) if self._remembers and unknown else None,
        )
        plans = self._plans
        plans[key] = plan
        if isinstance(pieces, sharding.Shares):
            self._forget_shares(shapes)
        while len(plans) > 1 and (
            len(plans) > _MAX_PLANS or sum(p.cost for p in [*plans.values()]) > _MAX_PLAN_BYTES
        ):
            self._forget(plans.pop(next(iter([*plans]), ()), None))
        return plan

    def _simple_outputs(
        self, cut: sharding.Cut, writes: Side
    ) -> tuple[tuple[str, tuple[int, ...], np.dtype[Any], int], ...] | None:
        """See `Plan`."""
        simple: list[tuple[str, tuple[int, ...], np.dtype[Any], int]] = []
        rows = zip(self._model.outputs, writes.layouts, cut.outputs, writes.starts, strict=True)
        for spec, layout, join, start in rows:
            if layout is None or not layout.contiguous or join.shape is None:
                return None
            simple.append((spec.name, join.shape, spec.dtype, start))
        return tuple(simple)

    def _lay_seen(self, plan: Plan, seen: Seen) -> Plan:
        """The plan with all outputs laid out by the shapes of its last answers; as it is if that cannot be.

        Only places follow from these shapes. What a run gives in another shape comes in the worker's block,
        and how parts join, and whether requests do, stays as it was.
        """
        by_output = [*zip(*seen.shapes, strict=True)]
        rows = zip(self._model.outputs, plan.cut.outputs, by_output, strict=True)
        try:
            joins = tuple(
                sharding.seen_join(spec.name, join, shapes) if spec.name in seen.names else join
                for spec, join, shapes in rows
            )
        except JoinError:
            seen.give_up()
            return plan
        layouts = tuple(map(lay_output, self._model.outputs, joins))
        laid_anew = zip(layouts, plan.outputs.layouts, strict=True)
        if any(new and not old and new.size > MOST_COPIED for new, old in laid_anew):
            seen.give_up()
            return plan
        side = _side(layouts, layouts, len(plan.cut.rows))
        cut = replace(plan.cut, outputs=joins)
        seen.laid = laid = replace(
            plan,
            cut=cut,
            outputs=side,
            lays_all=None not in layouts,
            simple_outputs=self._simple_outputs(cut, side),
        )
        return laid

    def _forget_shares(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Forget plans by earlier shares for these shapes."""
        keys = [key for key in [*self._plans] if key[0] == shapes]
        keys = [key for key in keys if isinstance(key[1], sharding.Shares)]
        latest = [*dict.fromkeys(key[1] for key in reversed(keys))][:_MAX_SHARES]
        for key in keys:
            if key[1] not in latest:
                self._forget(self._plans.pop(key, None))

    def _forget(self, plan: Plan | None) -> None:
        """Free a plan's idle frames; only `release_idle` finds those that come back later."""
        if plan is None:
            return
        forgotten = self._forgotten
        for side in _sides(plan):
            side.idle.clear()
            # The deque lives as long as a frame that is to come back to it.
            forgotten.append(ref(side.idle, forgotten.remove))
        if plan.seen is not None:
            plan.seen.laid = None  # they hold each other

    def _empty(self, plan: Plan, weights: WeightVersion) -> Request:
        """A batch of no rows needs no run."""
        nowhere = frozenset[int]()
        request = Request(self._model, plan, (), (), None, nowhere, weights, self._opened)
        empty = zip(self._model.outputs, plan.cut.outputs, strict=True)
        request.preset({s.name: np.empty(j.shape or (), s.dtype) for s, j in empty})
        return request

    # Frames.

    def _lease_laid(
        self, plan: Plan, seen: Seen, timeout: float
    ) -> tuple[Plan, Lease | None, Lease | None]:
        """The plan, with all outputs laid out where that can be done, and frames for both sides."""
        laid = seen.laid or (self._lay_seen(plan, seen) if seen.is_steady else plan)
        if laid is not plan:
            try:
                return laid, *self._lease(laid, 0.0)
            except McinferError:  # no memory is free, or it is not enough for both sides
                seen.give_up()
        return plan, *self._lease(plan, timeout)

    def _lease(self, plan: Plan, timeout: float) -> tuple[Lease | None, Lease | None]:
        """Frames for the inputs, if they need one, and for the outputs, if any has a known shape."""
        inputs, outputs = plan.inputs, plan.outputs
        # Not past those who wait for memory.
        free = not self._arena.wanted
        reads = _pop(inputs.idle) if inputs.is_laid and free else None
        writes = _pop(outputs.idle) if outputs.is_laid and free else None
        if writes is not None and self._forks.held:  # after it was taken: so it was before the fork
            writes = None
        new_reads, new_writes = inputs.is_laid and reads is None, outputs.is_laid and writes is None
        if new_reads or new_writes:
            sizes = [inputs.size] * new_reads + [outputs.size] * new_writes
            try:
                both = new_reads is inputs.is_laid and new_writes is outputs.is_laid
                slots = self._allocate(sizes, timeout if both else 0.0)
            except QueueFullError:
                if timeout <= 0 or both:
                    raise
                # Not with one in hand: two requests that each held one would wait for each other.
                reads = writes = None
                new_reads, new_writes = inputs.is_laid, outputs.is_laid
                sizes = [inputs.size] * new_reads + [outputs.size] * new_writes
                slots = self._allocate(sizes, timeout)
            if new_reads:
                reads = self._input_frame(plan, slots[0])
            if new_writes:
                writes = self._output_frame(plan, slots[-1])
        return (
            None if reads is None else lease(reads, inputs.idle),
            None if writes is None else lease(writes, outputs.idle),
        )

    def _input_frame(self, plan: Plan, slot: Slot) -> Frame:
        if not plan.simple_inputs:
            return _frame(slot)
        places = [(slot.block, slot.offset + start) for start in plan.inputs.starts]
        references = self._input_references(plan, places)
        memory = memoryview(slot.memory)
        views = []
        rows = zip(self._model.inputs, plan.shapes, plan.inputs.starts, strict=True)
        for spec, shape, start in rows:
            end = start + prod(shape) * spec.dtype.itemsize
            views.append(np.ndarray(shape, spec.dtype, memory[start:end]))
        return _frame(slot, references, tuple(views))

    def _output_frame(self, plan: Plan, slot: Slot) -> Frame:
        frame = _frame(slot, self._output_references(plan, slot))
        self._forks.add(frame, plan.outputs.idle)
        return frame

    def _output_references(self, plan: Plan, slot: Slot) -> tuple[tuple[TensorRef, ...], ...]:
        """By shard."""
        shards: list[list[TensorRef]] = [[] for _ in plan.cut.rows]
        side = plan.outputs
        rows = zip(self._model.outputs, plan.cut.outputs, side.layouts, side.starts, strict=True)
        for spec, join, layout, start in rows:
            if layout is not None and join.shapes is not None:
                places = [slot.offset + start + offset for offset in layout.offsets]
                for references, shape, place in zip(shards, join.shapes, places, strict=True):
                    references.append((spec.name, spec.element_type, shape, slot.block, place))
        return tuple(map(tuple, shards))

    # Inputs that are strings, packed, cut along an inner axis, or in shared memory already.

    def _borrowed(self, arrays: Sequence[Any], plan: Plan) -> dict[int, tuple[int, int]] | None:
        """By number of the input, where arrays lie in shared memory already, as workers need them."""
        places: dict[int, tuple[int, int]] = {}
        for i, (array, layout) in enumerate(zip(arrays, plan.inputs.layouts, strict=True)):
            if type(array) is CardTensor:
                continue
            flags = array.flags
            fits = flags.c_contiguous and flags.aligned and array.dtype.isnative
            if layout is not None and layout.contiguous and fits and _is_leased(array):
                place = self._arena.find(array.__array_interface__["data"][0], array.nbytes)
                if place is not None:
                    places[i] = place
        return places or None

    def _place(
        self,
        arrays: Sequence[NDArray[Any]],
        plan: Plan,
        borrowed: Mapping[int, tuple[int, int]],
        held: Lease | None,
    ) -> tuple[list[object], Sequence[bytes], frozenset[int]]:
        """The holders of the inputs' memory, their references by shard, and the blocks of these."""
        # What lies in shared memory already is the caller's, and is held until no worker reads it.
        keep: list[object] = [arrays[i] for i in borrowed]
        places = [borrowed.get(i) for i in range(len(arrays))]
        if held is not None:
            keep.append(held)
            slot = held.ticket.frame.slot
            memory = memoryview(slot.memory)
            for i, layout in enumerate(plan.inputs.layouts):
                if layout is not None and i not in borrowed:
                    spec, cut, start = (
                        self._model.inputs[i],
                        plan.cut.inputs[i],
                        plan.inputs.starts[i],
                    )
                    place = memory[start : start + layout.size]
                    copy_in(arrays[i], spec, cut, layout, place, self._copier)
                    places[i] = (slot.block, slot.offset + start)
        references = self._input_references(plan, places, arrays)
        blocks = frozenset(place[0] for place in places if place is not None)
        return keep, tuple(map(encode_references, references)), blocks

    def _input_references(
        self,
        plan: Plan,
        places: Sequence[tuple[int, int] | None],
        arrays: Sequence[NDArray[Any]] = (),
    ) -> tuple[tuple[TensorRef, ...], ...]:
        """By shard; strings have no place and come from the arrays, or are left out without arrays."""
        shards: list[list[TensorRef]] = [[] for _ in plan.cut.rows]
        for i, (spec, element_type) in enumerate(self._types):
            cut, layout, place = plan.cut.inputs[i], plan.inputs.layouts[i], places[i]
            for shard, references in enumerate(shards):
                shape = cut.shapes[shard]
                if layout is not None and place is not None:
                    block, start = place
                    offset = start + layout.offsets[shard]
                    references.append((spec.name, element_type, shape, block, offset))
                elif arrays:
                    values = string_rows(arrays[i], cut, shard)
                    references.append((spec.name, STRING, shape, None, values))
        return tuple(map(tuple, shards))

    # Dynamic batching.

    def _part(self, cut: sharding.Cut) -> float:
        """How much of the message of a joined run a request takes."""
        inputs, outputs = (
            tuple((s.name, s.element_type, c.shapes[0] if c.shapes else (), 0, 0) for s, c in rows)
            for rows in (
                zip(self._model.inputs, cut.inputs, strict=True),
                zip(self._model.outputs, cut.outputs, strict=True),
            )
        )
        return part_of_joined(inputs, outputs)

    def _join(
        self, arrays: Sequence[NDArray[Any]], plan: Plan, weights: WeightVersion
    ) -> tuple[Hashable, int] | None:
        """The key of requests that one run can answer together, and what this one counts for.

        These requests agree in all sizes but the batch's, in the values of inputs that all rows share, and
        in the version of the weights.
        """
        cut = plan.cut
        opened = [s.name for s in self._model.outputs if s.name in self._opened]
        why = sharding.why_apart(self._model, cut)
        if opened:
            why = f"the shape of output {opened[0]!r} is not known before the run"
        if why:
            self.apart = self.apart or why
            return None
        # So that as many as are joined fit one message to a worker.
        rows = max(cut.rows[0], math.ceil(plan.part * self._max_rows))
        if rows >= self._max_rows:
            return None
        common = [a for a, part in zip(arrays, cut.inputs, strict=True) if part.axis is None]
        if sum(array.nbytes for array in common) > _MAX_COMMON_BYTES:
            return None
        sizes = tuple(
            shape if axis is None else (*shape[:axis], -1, *shape[axis + 1 :])
            for shape, axis in zip((a.shape for a in arrays), cut.input_axes, strict=True)
        )
        values = tuple(array.astype(array.dtype.newbyteorder("=")).tobytes() for array in common)
        return (sizes, cut.input_axes, values, weights.number), rows


def _side(layouts: tuple[Layout | None, ...], laid: Sequence[Layout | None], shards: int) -> Side:
    """The side of a plan with these layouts, of which those in `laid` share a frame."""
    starts, size = [], 0
    for layout in laid:
        starts.append(size)
        size += 0 if layout is None else align(layout.size)
    by_references = _MAX_IDLE_REFERENCES // max(len(layouts) * shards, 1)
    most = max(1, min(_MAX_IDLE_FRAMES, _MAX_IDLE_BYTES // max(size, 1), by_references))
    is_laid = any(layout is not None for layout in laid)
    return Side(layouts, tuple(starts), size, is_laid, deque(maxlen=most))


def _sides(plan: Plan) -> tuple[Side, ...]:
    """The sides of a plan that have frames, also those of shapes that were seen."""
    laid = None if plan.seen is None else plan.seen.laid
    return (
        (plan.inputs, plan.outputs) if laid is None else (plan.inputs, plan.outputs, laid.outputs)
    )


def _is_leased(array: Any) -> bool:
    """Whether an array is a view of a frame (NumPy makes views of views those of one array), or on a card."""
    base = array.base
    in_frame = isinstance(base, np.ndarray) and isinstance(base.base, Lease)
    return in_frame or type(array) is CardTensor


def _pop(idle: "deque[Ticket]") -> Frame | None:
    try:
        return idle.pop().frame
    except IndexError:
        return None


def _frame(
    slot: Slot,
    references: tuple[tuple[TensorRef, ...], ...] = (),
    views: tuple[NDArray[Any], ...] = (),
) -> Frame:
    interface = {
        "version": 3,
        "typestr": "|u1",
        "shape": (slot.size,),
        "data": (slot.address, False),
    }
    bodies = tuple(map(encode_references, references))
    return Frame(slot, frozenset((slot.block,)), bodies, references, views, interface)
