"""The memory of one rank: where each value of its slice lies, for inputs of given shapes.

::

    segment 0 ──► collective.input │ collective.output ──► segment 1 ──► collective.input │ …
        └────────────── own memory (a value that skips a collective) ──────────────┘

A collective's memory is reused within a run: exchanges of one phase have memory of their own, and phases
alternate between two sets (*parities*). A set is written again only after the exchanges of the phase between,
so that other ranks have read it (see `Collective.input`); a run begins with the parity that the last run of
this rank did not end with. All ranks of a stage have the same sequence of runs, hence the same parities.

Ownership: a `Layouts` owns the layouts. Memory of a group cannot be freed singly. So when there are
`MAX_LAYOUTS` layouts, all ranks forget them at once, and the groups' memory is used for new ones.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import Buffer, Produced, Strings
from mcinfer.errors import InvalidInputError
from mcinfer.ranks.collectives.base import Collective, Group
from mcinfer.ranks.slicing.plans import Exchange, RankPlan, Segment
from mcinfer.shm.arena import ALIGNMENT, align
from mcinfer.specs import STRING, ModelSpec, numpy_dtype, tensor_bytes

MAX_LAYOUTS = 32

_FOR_EVER = 1 << 60

Key = tuple[tuple[int, ...], ...]
"""The shapes of the inputs."""

Values = dict[str, Buffer | Strings]
"""Tensors by the names of the values."""


def owned(name: str, element_type: str, shape: Sequence[int]) -> Produced:
    """A new tensor; it lives as long as this object."""
    return tensor_in(_aligned(tensor_bytes(element_type, prod(shape))), name, element_type, shape)


def tensor_in(memory: NDArray[Any], name: str, element_type: str, shape: Sequence[int]) -> Produced:
    """A tensor at the start of an array, which it keeps alive."""
    return Produced(
        name=name,
        element_type=element_type,
        shape=tuple(shape),
        address=memory.ctypes.data,
        size=tensor_bytes(element_type, prod(shape)),
        owner=memory,
    )


def _aligned(size: int) -> NDArray[np.uint8]:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def side_by_side(sizes: Mapping[str, int], start: int = 0) -> tuple[dict[str, slice], int]:
    """Where tensors of these bytes lie, one after another from a place on, and where they end."""
    places = {}
    for name, size in sizes.items():
        places[name] = slice(start, start + size)
        start += align(size)
    return places, start


def check_inputs(spec: ModelSpec, inputs: Sequence[Buffer | Strings]) -> None:
    """Raise `InvalidInputError` for an input that does not fit the model's.

    A shape without axes says nothing: it also stands for one that the model does not declare.
    """
    for tensor, item in zip(spec.inputs, inputs, strict=True):
        given = STRING if isinstance(item, Strings) else item.element_type
        fits = not tensor.shape or tensor.admits(item.shape)
        if given != tensor.element_type or not fits:
            raise InvalidInputError(
                f"input {tensor.name!r}: got {given}{[*item.shape]}, expected {tensor}"
            )


class Uses:
    """Who needs each value of a plan.

    Attributes:
        phases: How many phases have exchanges.
        straight_in: Inputs of exchanges that a segment can write to the collective.
        straight_out: Outputs of exchanges that the next segments can read from the collective.
    """

    def __init__(self, plan: RankPlan) -> None:
        self._kept = {*plan.made, *plan.sends}
        self._readers: dict[str, list[int]] = defaultdict(list)
        makers: dict[str, Segment | Exchange] = {}
        exchanges: dict[int, Exchange] = {}
        for index, step in enumerate(plan.steps):
            for name in step.inputs:
                self._readers[name].append(index)
            makers.update(dict.fromkeys(step.outputs, step))
            if isinstance(step, Exchange):
                exchanges[index] = step
        self.phases = 1 + max((step.phase for step in exchanges.values()), default=-1)
        self.straight_in = {
            step.input
            for index, step in exchanges.items()
            if isinstance(makers.get(step.input), Segment)
            and self._readers[step.input] == [index]
            and step.input not in self._kept
        }
        self.straight_out = {
            step.output
            for step in exchanges.values()
            if step.output not in self._kept
            and all(
                plan.steps[reader].phase <= step.phase + 1 for reader in self._readers[step.output]
            )
        }

    def last_use(self, name: str) -> int:
        """Place of the last step that reads a value; beyond all steps if it is kept."""
        if name in self._kept:
            return _FOR_EVER
        return max(self._readers[name], default=-1)


def run_once(group: Group, step: Exchange, array: NDArray[Any]) -> NDArray[Any]:
    """Run an exchange on any memory."""
    result: NDArray[Any] = getattr(group, step.kind)(array, **step.options)
    return result


def _without_memory(value: Buffer | Strings) -> Buffer | Strings:
    if isinstance(value, Strings):
        return Strings(name=value.name, shape=value.shape, values=())
    kind, shape = value.element_type, value.shape
    return Buffer(name=value.name, element_type=kind, shape=shape, address=0, size=value.size)


class Layouts:
    """The layouts, and the groups whose memory they use.

    Attributes:
        whole: All ranks.
        tensor: The ranks of this rank's stage; the same object as `whole` if there is one stage.
        layouts: By the shapes of the inputs.
    """

    def __init__(self, whole: Group, tensor: Group) -> None:
        self.whole = whole
        self.tensor = tensor
        self.layouts: dict[Key, PlanMemory] = {}
        self._pool: dict[tuple[Any, ...], Collective] = {}

    def collective(self, step: Exchange, value: Buffer, parity: int, number: int) -> Collective:
        """The collective of one exchange; `number` counts those of its phase with the same memory."""
        signature = (step.kind, step.operation, step.axis, step.root, value.shape)
        key = (*signature, value.element_type, parity, number)
        if key not in self._pool:
            prepare = getattr(self.tensor, f"prepare_{step.kind}")
            dtype = numpy_dtype(value.element_type)
            self._pool[key] = prepare(value.shape, dtype, **step.options)
        return self._pool[key]


class PlanMemory:
    """Memory for the values of a plan, from the shapes that a first run found.

    Attributes:
        values: The type and shape of each value that the first run had.
        memory: This rank's own memory, by the names of values; values share it if they do not live together.
        collectives: For each parity, the collective of each exchange, by its place among the steps.
        packets: Memory for what goes to and from other stages: a `Packet` for each `Link` of `StageLinks`.
        runs: How many runs were begun.
        is_bound: Whether runs use this memory; False once shapes changed though those of the inputs did not.
    """

    def __init__(
        self, plan: RankPlan, uses: Uses, arena: Layouts, values: Mapping[str, Buffer | Strings]
    ) -> None:
        self.values = {name: _without_memory(value) for name, value in values.items()}
        self.packets: dict[Any, Any] = {}
        self.runs = 0
        names = [*plan.receives, *(name for step in plan.steps for name in step.outputs)]
        self.is_bound = not any(isinstance(values[name], Strings) for name in names)
        self.collectives: tuple[dict[int, Collective], dict[int, Collective]] = ({}, {})
        self.memory: dict[str, Produced] = {}
        if self.is_bound:
            self._make_collectives(plan, arena)
            self._place_values(plan, uses)
        else:  # what other stages send still comes in packets
            received = map(self.buffer, plan.receives)
            self.memory = {v.name: owned(v.name, v.element_type, v.shape) for v in received}

    def buffer(self, name: str) -> Buffer:
        value = self.values[name]
        if isinstance(value, Strings):
            raise TypeError(f"{name!r} is of strings, expected a tensor of a fixed size")
        return value

    def _make_collectives(self, plan: RankPlan, arena: Layouts) -> None:
        for parity, found in enumerate(self.collectives):
            numbers: Counter[Any] = Counter()
            for index, step in enumerate(plan.steps):
                if isinstance(step, Exchange):
                    value = self.buffer(step.input)
                    about = (step.phase, step.kind, step.axis, value.shape, value.element_type)
                    found[index] = arena.collective(
                        step, value, (parity + step.phase) % 2, numbers[about]
                    )
                    numbers[about] += 1

    def _place_values(self, plan: RankPlan, uses: Uses) -> None:
        """Give values memory from when they are made until their last use."""
        free: dict[int, list[NDArray[Any]]] = defaultdict(list)
        living: list[tuple[int, NDArray[Any]]] = []

        def place(name: str) -> None:
            if name in plan.made:  # lies where the caller wants it
                return
            like = self.buffer(name)
            memory = free[like.size].pop() if free[like.size] else _aligned(like.size)
            living.append((uses.last_use(name), memory))
            self.memory[name] = tensor_in(memory, name, like.element_type, like.shape)

        for name in plan.receives:
            place(name)
        for index, step in enumerate(plan.steps):
            for _last, memory in [item for item in living if item[0] < index]:
                free[memory.nbytes].append(memory)
            living = [item for item in living if item[0] >= index]
            for name in step.outputs:
                if name not in uses.straight_in and name not in uses.straight_out:
                    place(name)
