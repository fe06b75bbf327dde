"""Weights that can be replaced while a pool serves: each version is complete and never changes.

::

    update ── check all ──► copy once into shared memory ──► one assignment: `current` is the new version
    a request takes `current` and holds it ──► every shard of it runs with that version

A run's message names its version. Before the first such run a worker gets the place of the version
(`mcinfer.runtime.connections`), also after a restart. A version belongs to the store (the current one) and
to the requests that run with it; when the last of these is gone, its memory is free.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError, ProtocolError
from mcinfer.locks import Turn
from mcinfer.protocol import TensorRef, UpdateWeights, encode
from mcinfer.requests.tensors import Copier, as_input
from mcinfer.shm.arena import Slot
from mcinfer.specs import ELEMENT_TYPES, STRING, TensorSpec, tensor_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class WeightVersion:
    """All replaced weights at one moment, by name; version 0 is the model's own weights.

    `message` is its UPDATE_WEIGHTS, which names the lowest version, `oldest`, that requests could still run
    with when this one was made.
    """

    number: int
    oldest: int = 0
    message: bytes = b""
    tensors: Mapping[str, TensorRef] = field(default_factory=dict)
    slots: Mapping[str, Slot] = field(default_factory=dict)
    blocks: frozenset[int] = frozenset()


class WeightStore:
    """The versions of one model's replaceable weights. Any thread may call it.

    `current` is the version that new requests run with. The caller closes the copier.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        allocate: Callable[[Sequence[int], float], list[Slot]],
        copier: Copier,
    ) -> None:
        self.specs = tuple(specs)
        self._by_name = {spec.name: spec for spec in specs}
        self._allocate = allocate
        self._copier = copier
        self._updating = Turn()
        self.current = WeightVersion(number=0)
        self._alive = WeakValueDictionary({0: self.current})

    def update(self, weights: Mapping[str, Any], timeout: float) -> int:
        """Replace some weights with copies of these; return the number of the new version.

        Raises:
            InvalidInputError: One does not fit, or they are too many for a message; nothing was changed.
            MemoryFullError: No shared memory was free in time; nothing was changed.
        """
        arrays = check_weights(weights, self._by_name)
        for name in arrays:
            spec = self._by_name[name]
            if spec.element_type == STRING or ELEMENT_TYPES[spec.element_type].bits % 8:
                raise InvalidInputError(
                    f"weights: {spec} cannot be replaced, as strings and elements of less than a byte"
                )
        # Not under the lock: an update that waits for memory must not hold up another one.
        sizes = [tensor_bytes(self._by_name[n].element_type, a.size) for n, a in arrays.items()]
        slots = dict(zip(arrays, self._allocate(sizes, timeout), strict=True))
        tensors: dict[str, TensorRef] = {}
        for name, array in arrays.items():
            spec, slot = self._by_name[name], slots[name]
            memory: Any = memoryview(slot.memory)
            self._copier.copy(np.ndarray(array.shape, spec.dtype, memory), array)
            tensors[name] = (name, spec.element_type, array.shape, slot.block, slot.offset)
        with self._updating:
            before = self.current
            slots, tensors = {**before.slots, **slots}, {**before.tensors, **tensors}
            number = before.number + 1
            oldest = min([*self._alive.keys()], default=before.number)  # none is, after `close`
            message = UpdateWeights(version=number, oldest=oldest, tensors=tuple(tensors.values()))
            try:
                data = encode(message)
            except ProtocolError as exc:
                raise InvalidInputError(
                    f"weights: the places of {len(tensors)} do not fit a message to a worker: {exc}"
                ) from exc
            blocks = frozenset(slot.block for slot in slots.values())
            self._alive[number] = self.current = WeightVersion(
                number=number,
                oldest=oldest,
                message=data,
                tensors=tensors,
                slots=slots,
                blocks=blocks,
            )
        return number

    def close(self) -> None:
        """Free the memory of replaced weights."""
        # Not under the lock: a signal's handler, or a finalizer, may come while its own thread holds it.
        now = self.current
        self.current = WeightVersion(number=now.number)


def check_weights(
    weights: Mapping[str, Any], specs: Mapping[str, TensorSpec]
) -> dict[str, NDArray[Any]]:
    """The new weights as arrays, once every one fits.

    Raises:
        InvalidInputError: One does not fit: names it, what came and what was expected.
    """
    if not isinstance(weights, Mapping) or not weights:
        raise InvalidInputError(f"weights: got {reprlib.repr(weights)}, expected arrays by name")
    if not specs:
        raise InvalidInputError(
            "weights: none of this model's can be replaced, they have to be named when it is built "
            "(EngineOptions.variable_weights)"
        )
    unknown = [name for name in weights if name not in specs]
    if unknown:
        raise InvalidInputError(f"weights: unknown {unknown}, expected some of {[*specs]}")
    arrays = {}
    for name, value in weights.items():
        spec = specs[name]
        array = as_input(value, spec, spec.element_type, "weight")
        if array.shape != spec.shape:
            raise InvalidInputError(f"weight {name!r} has shape {[*array.shape]}, expected {spec}")
        arrays[name] = array
    return arrays
