"""Requests as the planner makes them, and workers that answer them in this process."""

import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import ProtocolError
from mcinfer.logs import PoolLog
from mcinfer.protocol import Predict, Reply, TensorRef, decode, encode
from mcinfer.requests.frames import IdleFrames, Lease
from mcinfer.requests.lent_blocks import LentBlocks
from mcinfer.requests.planner import Allocate, HostPlace, Inbox, Planner
from mcinfer.requests.request import NO_WEIGHTS, Call, Request
from mcinfer.requests.splitting import SplitState, Splitter
from mcinfer.requests.tensors import Inputs
from mcinfer.requests.weights import WeightVersion
from mcinfer.sharding import Axes, SaidAxes
from mcinfer.shm.arena import Arena
from mcinfer.shm.block import Block
from mcinfer.specs import (
    ELEMENT_TYPES,
    Dimension,
    ModelSpec,
    TensorSpec,
    numpy_dtype,
    tensor_bytes,
)

MIB = 1 << 20
LIMIT = 64 * MIB
FIXED_SIZE = [name for name, kind in ELEMENT_TYPES.items() if kind.bits >= 8]

Array = NDArray[Any]
Value = tuple[str, Sequence[Dimension]]


A_POOL = PoolLog("a pool", ["cpu:0"])


def specs(values: Mapping[str, Value]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=name, dtype=numpy_dtype(element_type), shape=tuple(shape))
        for name, (element_type, shape) in values.items()
    )


def model(inputs: Mapping[str, Value], outputs: Mapping[str, Value]) -> ModelSpec:
    return ModelSpec(inputs=specs(inputs), outputs=specs(outputs))


def floats(
    inputs: Mapping[str, Sequence[Dimension]], outputs: Mapping[str, Sequence[Dimension]]
) -> ModelSpec:
    """A model of float32 tensors with these shapes."""
    return model(*({n: ("float32", s) for n, s in sizes.items()} for sizes in (inputs, outputs)))


def known(spec: ModelSpec, inputs: Axes | None = None, outputs: Axes | None = None) -> SplitState:
    """What the user says of a model, and its symbols declare, believed without a check."""
    said = SaidAxes(inputs=inputs or {}, outputs=outputs or {})
    return Splitter(spec, said, A_POOL, verify="never").state


def planner_of(
    spec: ModelSpec,
    arena: Arena,
    max_rows: int = 1,
    weights: Sequence[TensorSpec] = (),
    *,
    allocate: Allocate | None = None,
) -> Planner:
    """A planner that gets memory at once or not at all, and queues nothing."""
    place = HostPlace(arena, allocate or (lambda sizes, _: arena.allocate_all(sizes)), IdleFrames())
    return Planner(spec, place, cast("Inbox", None), max_rows=max_rows, weights=weights, log=A_POOL)


def request_of(
    planner: Planner,
    inputs: Inputs,
    pieces: int,
    known: SplitState | None,
    timeout: float,
    *,
    weights: WeightVersion = NO_WEIGHTS,
    joinable: bool = False,
    outputs_on: Any = None,
    card_timeout: float = 0.0,
) -> Request:
    """The request of a call; with None as what is known it runs whole."""
    call = Call(
        inputs=inputs,
        splitter=_SPLITTER,
        split_state=known or _SPLITTER.state,
        weights=weights,
        pieces=pieces,
        joins=joinable,
        start=0.0,
        timeout=card_timeout,
        outputs_on=outputs_on,
        apart=known is None,
    )
    return planner.request(call, timeout)


def in_use(planner: Planner, arena: Arena) -> int:
    """Bytes of memory that somebody holds: of frames, those that are not idle."""
    planner.place.idle.release()
    return arena.used


PLAIN = model(
    {"x": ("float32", ["batch", 3]), "w": ("float32", [2])}, {"y": ("float32", ["batch", 3])}
)
DECLARED = known(PLAIN)
_SPLITTER = Splitter(PLAIN, SaidAxes(), A_POOL, verify="never")
X = np.ones((4, 3), np.float32)
W = np.ones(2, np.float32)


def random_array(element_type: str, shape: Sequence[int], seed: int = 0) -> Array:
    """Any bits; NaNs and infinities are among them."""
    generator = np.random.default_rng(seed)
    dtype = numpy_dtype(element_type)
    raw = generator.integers(0, 2 if element_type == "bool" else 256, prod(shape) * dtype.itemsize)
    return raw.astype(np.uint8).view(dtype).reshape(shape)


def in_order(array: Array, order: str) -> Array:
    """The same values, in another layout or byte order."""
    match order:
        case "F":
            return array.copy(order="F")
        case "reversed":
            return array[::-1].copy()[::-1] if array.ndim else array
        case "strided":
            wide = np.zeros((*array.shape, 2), array.dtype)
            wide[..., 0] = array
            return wide[..., 0]
        case "other byte order":
            return array.astype(array.dtype.newbyteorder())
        case "read-only":
            array = array.copy()
            array.flags.writeable = False
            return array
        case _:
            return array


def raw_bytes(array: Array) -> bytes:
    """An array as it lies in a tensor: in the machine's byte order."""
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).tobytes()


def place(arena: Arena, reference: TensorRef) -> memoryview:
    """The memory that a worker finds at a reference."""
    _, element_type, shape, number, offset = reference
    assert number is not None
    block = arena.block(number)
    assert block is not None
    size = tensor_bytes(element_type, prod(shape))
    return memoryview(block.memory(offset, size)).cast("B")


def references(request: Request, shard: int) -> tuple[tuple[TensorRef, ...], tuple[TensorRef, ...]]:
    """Inputs and known outputs of a shard, as the worker reads them in its PREDICT."""
    request.number = 7
    message = decode(request.message(shard))
    assert isinstance(message, Predict)
    assert (message.request, message.shard) == (7, shard)
    return message.inputs, message.outputs


def replied(outputs: Sequence[TensorRef]) -> tuple[TensorRef, ...]:
    """Outputs, as a reply brings them."""
    reply = Reply(request=0, shard=0, outputs=tuple(outputs), seconds=0.0)
    received = decode(encode(reply))
    assert isinstance(received, Reply)
    return received.outputs


def never(number: int) -> Lease:
    raise AssertionError(f"block {number} was leased")


def run(
    request: Request, arena: Arena, compute: Callable[[dict[str, bytes]], dict[str, bytes]]
) -> None:
    """Answer all shards of a request whose outputs all have a known place, last shard first."""
    for shard in reversed(range(len(request.rows))):
        inputs, outputs = references(request, shard)
        results = compute({reference[0]: bytes(place(arena, reference)) for reference in inputs})
        for reference in outputs:
            place(arena, reference)[:] = results[reference[0]]
        request.take(shard, replied(outputs), never, shard, LIMIT)


def double(inputs: dict[str, bytes]) -> dict[str, bytes]:
    return {"y": (2 * np.frombuffer(inputs["x"], np.float32)).tobytes()}


class Worker:
    """A worker's own blocks, and which of them were handed over.

    Attributes:
        lend: Leases a block, as the master does.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.fetched: list[int] = []
        self.lent = LentBlocks(self._receive)
        self.lend = self.lent.lease

    def put(self, *tensors: tuple[str, Array]) -> list[TensorRef]:
        """Place tensors one after another in a new block, as `serving` does."""
        contents = [raw_bytes(array) for _, array in tensors]
        block = Block.create(-1 - len(self.blocks), max(1, sum(len(c) + 64 for c in contents)))
        self.blocks[block.number] = block
        references: list[TensorRef] = []
        at = 0
        for (name, array), data in zip(tensors, contents, strict=True):
            memoryview(block.memory(at, len(data))).cast("B")[:] = data
            references.append((name, array.dtype.name, array.shape, block.number, at))
            at += -(-len(data) // 64) * 64
        return references

    def _receive(self, number: int) -> Block:
        self.fetched.append(number)
        block = self.blocks.get(number)
        if block is None:
            raise ProtocolError(f"the descriptor of block {number} did not come")
        return Block.attach(number, block.size, os.dup(block.fd))

    def close(self) -> None:
        for block in self.blocks.values():
            block.close()
