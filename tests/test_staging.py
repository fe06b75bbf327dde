"""Tests of mcinfer/staging.py: from arrays to references in the arena, and from replies to arrays."""

import errno
import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError, PredictError, ProtocolError, QueueFullError
from mcinfer.fields import TensorRef
from mcinfer.protocol import Predict, Reply, decode, encode, encode_tensors
from mcinfer.sharding import Axes, JoinError, SaidAxes, Split
from mcinfer.shm.arena import Arena, align
from mcinfer.shm.block import Block
from mcinfer.specs import (
    ELEMENT_TYPES,
    STRING,
    Dimension,
    ModelSpec,
    TensorSpec,
    numpy_dtype,
    tensor_bytes,
)
from mcinfer.splitting import Known, Splitter
from mcinfer.staging import Job, Stager

MIB = 1 << 20
FOUR_BITS = ("int4", "uint4")
FIXED_SIZE = [name for name in ELEMENT_TYPES if name != STRING]

Array = NDArray[Any]
Value = tuple[str, Sequence[Dimension]]


def specs(values: Mapping[str, Value]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=name, dtype=numpy_dtype(element_type), shape=tuple(shape))
        for name, (element_type, shape) in values.items()
    )


def model(inputs: Mapping[str, Value], outputs: Mapping[str, Value]) -> ModelSpec:
    return ModelSpec(inputs=specs(inputs), outputs=specs(outputs))


def known(spec: ModelSpec, inputs: Axes | None = None, outputs: Axes | None = None) -> Known:
    """What the user says of a model, and its symbols declare, believed without a check."""
    said = SaidAxes(inputs=inputs or {}, outputs=outputs or {})
    return Splitter(spec, said, verify="never").known


def random_array(element_type: str, shape: Sequence[int], seed: int = 0) -> Array:
    """Any bits; NaNs and infinities are among them."""
    generator = np.random.default_rng(seed)
    dtype = numpy_dtype(element_type)
    if element_type in FOUR_BITS:
        low = -8 if element_type == "int4" else 0
        return generator.integers(low, low + 16, shape).astype(dtype)
    raw = generator.integers(0, 2 if element_type == "bool" else 256, prod(shape) * dtype.itemsize)
    return raw.astype(np.uint8).view(dtype).reshape(shape)


def raw_bytes(array: Array) -> bytes:
    """An array as it lies in a tensor: the machine's byte order, four-bit elements two to a byte."""
    if array.dtype.name in FOUR_BITS:
        halves = array.astype(np.int8).ravel() & 0x0F
        halves = np.append(halves, [0] * (halves.size % 2)).astype(np.uint8)
        return bytes(halves[::2] | halves[1::2] << 4)
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).tobytes()


def place(arena: Arena, reference: TensorRef) -> memoryview:
    """The memory that a worker finds at a reference."""
    _, element_type, shape, number, offset = reference
    assert number is not None
    block = arena.block(number)
    assert block is not None
    size = tensor_bytes(element_type, prod(shape))
    return memoryview(block.memory(offset, size)).cast("B")


def references(job: Job, shard: int) -> tuple[tuple[TensorRef, ...], tuple[TensorRef, ...]]:
    """Inputs and known outputs of a shard, as the worker reads them in its PREDICT."""
    job.number = 7
    message = decode(job.message(shard))
    assert isinstance(message, Predict)
    assert (message.request, message.shard) == (7, shard)
    return message.inputs, message.outputs


def replied(outputs: Sequence[TensorRef]) -> tuple[TensorRef, ...]:
    """Outputs, as a reply brings them."""
    reply = Reply(request=0, shard=0, outputs=tuple(outputs), seconds=0.0)
    received = decode(encode(reply))
    assert isinstance(received, Reply)
    return received.outputs


def never(number: int) -> Block:
    raise AssertionError(f"block {number} was fetched")


def run(job: Job, arena: Arena, compute: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
    """Answer all shards of a job whose outputs all have a known place, last shard first."""
    for shard in reversed(range(job.shards)):
        inputs, outputs = references(job, shard)
        results = compute({reference[0]: bytes(place(arena, reference)) for reference in inputs})
        for reference in outputs:
            place(arena, reference)[:] = results[reference[0]]
        job.take(shard, replied(outputs), never, shard)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 * MIB)
    yield arena
    arena.close()


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    gc.collect()  # what earlier tests left is not to go now
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# Random models and batches.

ORDERS = ["C", "F", "reversed", "strided", "other byte order", "in the arena"]


@dataclass
class Case:
    """A model of x (cut) and w (whole) to y (joined) and z (the same from all), and a request."""

    model: ModelSpec
    axis: int
    batch: int
    pieces: int
    order: str
    x: Array
    w: Array
    y: Array
    z: Array

    def sizes(self) -> list[int]:
        """Rows of each shard, as `numpy.array_split` cuts."""
        count = min(self.pieces, self.batch)
        return [part.size for part in np.array_split(np.arange(self.batch), count)]

    def parts(self, array: Array) -> list[Array]:
        return np.split(array, np.cumsum(self.sizes())[:-1], self.axis)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    axis = draw(st.integers(0, 2))
    shape: list[int] = draw(
        st.lists(st.sampled_from([1, 1, 2, 3, 5, 0]), min_size=axis, max_size=3)
    )
    batch = draw(st.integers(1, 7))
    types = [draw(st.sampled_from(FIXED_SIZE)) for _ in range(4)]
    full = (*shape[:axis], batch, *shape[axis:])
    symbolic: tuple[Dimension, ...] = (*shape[:axis], "batch", *shape[axis:])
    fixed = draw(st.sampled_from([(), (3,), (2, 0), (5, 1)]))
    seed = draw(st.integers(0, 2**32))
    return Case(
        model=model(
            {"x": (types[0], symbolic), "w": (types[1], fixed)},
            {"y": (types[2], symbolic), "z": (types[3], fixed)},
        ),
        axis=axis,
        batch=batch,
        pieces=draw(st.integers(1, 4)),
        order=draw(st.sampled_from(ORDERS)),
        x=random_array(types[0], full, seed),
        w=random_array(types[1], fixed, seed + 1),
        y=random_array(types[2], full, seed + 2),
        z=random_array(types[3], fixed, seed + 3),
    )


def in_order(array: Array, name: str, order: str, stager: Stager) -> Array:
    """The same values, in another layout, byte order or memory."""
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
        case "in the arena" if array.dtype.name not in FOUR_BITS:
            allocated = stager.allocate({name: array.shape})[name]
            allocated[...] = array
            return allocated
        case _:
            return array


@given(case=cases())
@settings(deadline=None, max_examples=300)
def test_shards_read_their_part_of_each_input_and_their_outputs_join(case: Case) -> None:
    arena = Arena(2 * MIB)
    stager = Stager(case.model, arena)
    inputs = {
        "x": in_order(case.x, "x", case.order, stager),
        "w": in_order(case.w, "w", case.order, stager),
    }
    job = stager.stage(inputs, case.pieces, known(case.model, None, {"z": None}), 0.0)
    expected = [*zip(case.parts(case.x), case.parts(case.y), strict=True)]
    assert job.shards == len(expected)
    for shard, (x, y) in enumerate(expected):
        read, written = references(job, shard)
        assert {reference[3] for reference in (*read, *written)} <= job.blocks
        assert [reference[0] for reference in read] == ["x", "w"]
        assert [reference[2] for reference in read] == [x.shape, case.w.shape]
        assert bytes(place(arena, read[0])) == raw_bytes(x)
        assert bytes(place(arena, read[1])) == raw_bytes(case.w)
        assert [reference[0] for reference in written] == ["y", "z"]
        assert [reference[2] for reference in written] == [y.shape, case.z.shape]
        place(arena, written[0])[:] = raw_bytes(y)
        place(arena, written[1])[:] = raw_bytes(case.z)
        job.take(shard, replied(written), never, shard)
    # What one shard has written, no other has written over.
    for shard, (x, _) in enumerate(expected):
        assert bytes(place(arena, references(job, shard)[0][0])) == raw_bytes(x)
    result = job.result()
    assert [*result] == ["y", "z"]
    for array, wanted in zip(result.values(), (case.y, case.z), strict=True):
        assert array.dtype == wanted.dtype
        assert array.shape == wanted.shape
        assert raw_bytes(array) == raw_bytes(wanted)
    del job, inputs, result, array
    assert arena.used == 0
    arena.close()


# Copying, or not.

PLAIN = model(
    {"x": ("float32", ["batch", 3]), "w": ("float32", [2])},
    {"y": ("float32", ["batch", 3])},
)
DECLARED = known(PLAIN)


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def test_allocated_input_is_sent_where_it_lies(arena: Arena) -> None:
    stager = Stager(PLAIN, arena)
    inputs = stager.allocate({"x": (5, 3), "w": (2,)})
    job = stager.stage(inputs, 2, DECLARED, 0.0)
    read = [references(job, shard)[0] for shard in range(2)]
    for name, index in (("x", 0), ("w", 1)):
        array = inputs[name]
        assert arena.find(address(array), array.nbytes) == read[0][index][3:]
    assert read[1][0][4] - read[0][0][4] == 3 * 3 * 4  # the rows of the first shard
    assert read[1][1] == read[0][1]


@pytest.mark.parametrize(
    ("cut", "shared"),
    [
        (lambda x: x[2:6], True),
        (lambda x: x[:1], True),
        (lambda x: x[1:][1:3], True),
        (lambda x: x.view(np.int32).view(np.float32), True),
        (lambda x: x[::2], False),
        (lambda x: x[::-1], False),
        (lambda x: x.T.copy().T, False),
        (lambda x: x.copy(), False),
        (lambda x: x.byteswap().view(x.dtype.newbyteorder()), False),
    ],
    ids=["rows", "a row", "of a slice", "views", "strided", "reversed", "F", "copy", "big-endian"],
)
def test_slices_of_allocated_arrays_are_sent_where_they_lie(
    arena: Arena, cut: Callable[[Array], Array], shared: bool
) -> None:
    stager = Stager(PLAIN, arena)
    whole = stager.allocate({"x": (8, 3)})["x"]
    whole[...] = np.arange(24).reshape(8, 3)
    x = cut(whole)
    job = stager.stage({"x": x, "w": [0, 0]}, 1, None, 0.0)
    reference = references(job, 0)[0][0]
    assert (arena.find(address(x), x.nbytes) == reference[3:]) == shared
    assert bytes(place(arena, reference)) == raw_bytes(x)


def test_array_that_is_not_aligned_is_copied_to_where_it_is(arena: Arena) -> None:
    stager = Stager(PLAIN, arena)
    slot = arena.allocate(1000)
    x: Array = np.ndarray((4, 3), np.float32, memoryview(slot.memory)[1:49])
    x[...] = 5
    assert not x.flags.aligned
    job = stager.stage([x, [0, 0]], 1, None, 0.0)
    reference = references(job, 0)[0][0]
    assert reference[4] % 64 == 0
    assert bytes(place(arena, reference)) == raw_bytes(x)


def test_input_in_shared_memory_is_held_as_long_as_the_job(arena: Arena) -> None:
    stager = Stager(PLAIN, arena)
    inputs = stager.allocate({"x": (1000, 3), "w": (2,)})
    inputs["x"][...] = 7
    job = stager.stage(inputs, 1, None, 0.0)
    reference = references(job, 0)[0][0]
    inputs.clear()
    others = [arena.allocate(12_000) for _ in range(3)]
    for slot in others:
        memoryview(slot.memory).cast("B")[:] = b"\x01" * 12_000
    assert np.frombuffer(place(arena, reference), np.float32).tolist() == [7.0] * 3000
    del job, others, slot
    assert arena.used == 0


def test_copied_input_may_be_changed_at_once(arena: Arena) -> None:
    stager = Stager(PLAIN, arena)
    x = np.ones((2, 3), np.float32)
    job = stager.stage([x, [0, 0]], 1, None, 0.0)
    x[...] = 9
    assert np.frombuffer(place(arena, references(job, 0)[0][0]), np.float32).tolist() == [1.0] * 6


def double(inputs: dict[str, bytes]) -> dict[str, bytes]:
    return {"y": (2 * np.frombuffer(inputs["x"], np.float32)).tobytes()}


def test_steady_traffic_of_the_same_places_is_told_the_same(arena: Arena) -> None:
    stager = Stager(PLAIN, arena)
    inputs = stager.allocate({"x": (4, 3), "w": (2,)})
    told = set()
    for number in range(5):
        inputs["x"][...] = number
        job = stager.stage(inputs, 2, DECLARED, 0.0)
        told.add((references(job, 0), references(job, 1)))
        run(job, arena, double)
        assert (job.result()["y"] == 2 * number).all()
        del job
    assert len(told) == 1
    # Other rows of the same array lie elsewhere, and are not mistaken for the first.
    for rows in (inputs["x"][:2], inputs["x"][2:]):
        job = stager.stage([rows, inputs["w"]], 2, DECLARED, 0.0)
        assert references(job, 0)[0][0][3:] == arena.find(address(rows), rows.nbytes)


def test_more_places_than_are_remembered_are_all_right(arena: Arena) -> None:
    stager = Stager(PLAIN, arena)
    x = stager.allocate({"x": (600, 3)})["x"]
    x[...] = np.arange(1800).reshape(600, 3)
    for _ in range(2):
        for row in range(0, 600, 2):
            job = stager.stage([x[row : row + 1], [0, 0]], 1, None, 0.0)
            assert bytes(place(arena, references(job, 0)[0][0])) == x[row].tobytes()


def test_result_lies_in_shared_memory_and_outlives_the_job(arena: Arena) -> None:
    stager = Stager(PLAIN, arena)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    job = stager.stage([x, [0, 0]], 2, DECLARED, 0.0)
    run(job, arena, double)
    y = job.result()["y"]
    assert arena.find(address(y), y.nbytes) is not None
    assert y.flags.writeable
    del job
    more = stager.stage([x + 1, [0, 0]], 2, DECLARED, 0.0)
    run(more, arena, double)
    assert np.array_equal(y, 2 * x)
    assert np.array_equal(more.result()["y"], 2 * x + 2)
    row = y[1]
    del more, y
    assert arena.used > 0
    del row
    assert arena.used == 0


def test_results_are_copies_where_memory_is_scarce() -> None:
    arena = Arena(MIB)
    stager = Stager(PLAIN, arena)
    held = arena.allocate(600_000)
    x = np.ones((4, 3), np.float32)
    job = stager.stage([x, [0, 0]], 2, DECLARED, 0.0)
    run(job, arena, double)
    y = job.result()["y"]
    assert arena.find(address(y), y.nbytes) is None
    assert np.array_equal(y, 2 * x)
    del held, job
    assert arena.used == 0
    arena.close()


def test_request_that_finds_no_room_holds_none() -> None:
    arena = Arena(MIB)
    stager = Stager(PLAIN, arena)
    held = arena.allocate(600_000)
    x = np.ones((20_000, 3), np.float32)  # 240 kB in, 240 kB out
    used = arena.used
    with pytest.raises(QueueFullError):
        stager.stage([x, [0, 0]], 2, DECLARED, 0.01)
    assert arena.used == used
    with pytest.raises(InvalidInputError, match=r"Limits\.memory_bytes"):
        stager.stage([np.ones((80_000, 3), np.float32), [0, 0]], 2, DECLARED, 0.01)
    del held
    run(stager.stage([x, [0, 0]], 2, DECLARED, 0.0), arena, double)
    arena.close()


def test_batch_of_no_rows_is_answered_without_a_worker(arena: Arena) -> None:
    job = Stager(PLAIN, arena).stage([np.empty((0, 3), np.float32), [0, 0]], 2, DECLARED, 0.0)
    assert job.shards == 0
    assert job.future.result(0)["y"].shape == (0, 3)
    assert arena.used == 0


def test_axes_that_the_caller_names_are_followed(arena: Arena) -> None:
    spec = model({"x": ("int32", ["a", "b"])}, {"y": ("int32", ["a", "b"])})
    stager = Stager(spec, arena)
    x = np.arange(12, dtype=np.int32).reshape(2, 6)
    rows, columns, whole = (known(spec, {"x": axis}) for axis in (0, 1, None))
    for how, shapes in (
        (columns, [(2, 2)] * 3),
        (rows, [(1, 6)] * 2),
        (whole, [(2, 6)]),
        (None, [(2, 6)]),
        (columns, [(2, 2)] * 3),
    ):
        job = stager.stage([x], 3, how, 0.0)
        assert [references(job, shard)[0][0][2] for shard in range(job.shards)] == shapes
        run(job, arena, lambda inputs: {"y": inputs["x"]})
        assert np.array_equal(job.result()["y"], x)


def test_batch_of_no_rows_goes_to_a_worker_where_an_output_does_not_follow(arena: Arena) -> None:
    spec = model({"x": ("float32", ["batch"])}, {"y": ("float32", ["found"])})
    job = Stager(spec, arena).stage([np.empty(0, np.float32)], 2, known(spec, None, {"y": 0}), 0.0)
    assert job.shards == 1
    job.take(0, replied([("y", "float32", (0,), 0, 0)]), never, 0)
    assert job.result()["y"].shape == (0,)


def test_more_shapes_than_are_remembered_are_all_right(arena: Arena) -> None:
    stager = Stager(PLAIN, arena)
    for _ in range(2):
        for count in range(1, 300):
            job = stager.stage([np.full((count, 3), count, np.float32), [0, 0]], 3, DECLARED, 0.0)
            assert sum(references(job, s)[0][0][2][0] for s in range(job.shards)) == count


# What is taken, and what is refused.

TYPED = {
    name: model({"x": (name, ["batch"])}, {"y": (name, ["batch"])})
    for name in ("float32", "float64", "int64", "int8", "uint8", "bool", "bfloat16", "int4", STRING)
}


@pytest.mark.parametrize(
    ("element_type", "value"),
    [
        ("float32", [1, 2]),
        ("float32", [1.5, 2]),
        ("float32", (True, False)),
        ("float32", []),
        ("float64", [10**10, -0.5]),
        ("bfloat16", [1.5, -2]),
        ("int64", [1, -(2**63), 2**63 - 1]),
        ("int64", [True]),
        ("int64", range(5)),
        ("int64", []),
        ("int8", [-128, 127]),
        ("int4", [-8, 7]),
        ("bool", [True, False]),
        ("float32", [np.float32(1), np.float32(2)]),
        ("float32", [np.ones(()), 2]),
    ],
    ids=str,
)
def test_numbers_without_a_type_take_the_inputs(
    arena: Arena, element_type: str, value: Sequence[Any]
) -> None:
    spec = TYPED[element_type]
    job = Stager(spec, arena).stage([value], 1, known(spec), 0.0)
    expected = np.array([*value]).astype(numpy_dtype(element_type))
    if not job.shards:
        assert len(value) == 0
        return
    assert bytes(place(arena, references(job, 0)[0][0])) == raw_bytes(expected)


@pytest.mark.parametrize("value", [3, 3.5, True, np.float32(3.5)])
def test_number_is_a_tensor_without_dimensions(arena: Arena, value: float) -> None:
    scalar = model({"t": ("float32", [])}, {"y": ("float32", [])})
    job = Stager(scalar, arena).stage([value], 4, known(scalar), 0.0)
    (reference,), _ = references(job, 0)
    assert (job.shards, reference[2]) == (1, ())
    assert bytes(place(arena, reference)) == np.float32(value).tobytes()


class HasArray:
    """What another library's tensor is like."""

    dtype = "theirs"

    def __init__(self, array: Array) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.array


def test_tensor_of_another_library_is_taken_as_its_array(arena: Arena) -> None:
    stager = Stager(TYPED["float32"], arena)
    job = stager.stage([HasArray(np.ones(3, np.float32))], 1, None, 0.0)
    assert bytes(place(arena, references(job, 0)[0][0])) == np.ones(3, np.float32).tobytes()
    with pytest.raises(InvalidInputError, match="'x' has dtype float64, expected float32"):
        stager.stage([HasArray(np.ones(3))], 1, None, 0.0)


X32 = r"input 'x' has dtype {}, expected {} \(x: {}\[batch\]\)"


@pytest.mark.parametrize(
    ("element_type", "value", "text"),
    [
        ("float32", np.ones(3), X32.format("float64", "float32", "float32")),
        ("float32", np.ones(3, ">f8"), X32.format(">f8", "float32", "float32")),
        ("float32", np.ones(3, int), X32.format("int64", "float32", "float32")),
        ("float32", np.float64(1), X32.format("float64", "float32", "float32")),
        ("float32", ["1"], X32.format("<U1", "float32", "float32")),
        ("float32", [None], X32.format("object", "float32", "float32")),
        ("float32", [1j], X32.format("complex128", "float32", "float32")),
        ("float32", None, X32.format("object", "float32", "float32")),
        ("float32", {"a": 1}, X32.format("object", "float32", "float32")),
        ("float32", [np.datetime64(0, "s")], r"input 'x' has dtype datetime64\[s\], expected"),
        ("float32", [[1], [2, 3]], r"input 'x' is not an array: .*inhomogeneous"),
        ("int64", [1.0], X32.format("float64", "int64", "int64")),
        ("int64", [2**70], X32.format("object", "int64", "int64")),
        ("bool", [1], X32.format("int64", "bool", "bool")),
        ("bfloat16", np.ones(3, np.float16), X32.format("float16", "bfloat16", "bfloat16")),
        ("int8", [0, 128], r"'x' has values from 0 to 128, expected -128 to 127 \(x: int8"),
        ("int8", [-129, 0], r"'x' has values from -129 to 0, expected -128 to 127"),
        ("int4", [8], r"'x' has values from 8 to 8, expected -8 to 7"),
        ("int64", [2**63], rf"'x' has values from {2**63} .* to {2**63 - 1} "),
        ("int64", [[1, 2]], r"input 'x' has 2 dimensions \[1, 2\], expected 1: x: int64\[batch\]"),
        ("int64", 1, r"input 'x' has 0 dimensions \[\], expected 1: x: int64\[batch\]"),
        (STRING, [1, 2], X32.format("object", STRING, STRING)),
        (STRING, np.ones(2), X32.format("float64", STRING, STRING)),
        (STRING, ["a", None], X32.format("object", STRING, STRING)),
        (STRING, np.array(["a", 1], object), X32.format("object", STRING, STRING)),
    ],
    ids=str,
)
def test_value_that_does_not_fit_is_refused_with_name_what_came_and_what_was_expected(
    arena: Arena, element_type: str, value: Any, text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        Stager(TYPED[element_type], arena).stage([value], 2, known(TYPED[element_type]), 0.0)
    assert arena.used == 0


X = np.ones((4, 3), np.float32)
W = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"x": X}, r"inputs: missing \['w'\], expected \['x', 'w'\]"),
        ({"x": X, "w": W, "q": 1}, r"inputs: unknown \['q'\], expected \['x', 'w'\]"),
        ({"X": X, "w": W}, r"inputs: unknown \['X'\], missing \['x'\], expected \['x', 'w'\]"),
        ({}, r"inputs: missing \['x', 'w'\]"),
        ({0: X, "w": W}, r"inputs: unknown \[0\], missing \['x'\]"),
        ([X], r"inputs: got 1, expected 2: \['x', 'w'\]"),
        ([X, W, W], r"inputs: got 3, expected 2: \['x', 'w'\]"),
        (X, r"inputs: got ndarray, expected a mapping by name or a sequence of \['x', 'w'\]"),
        ("xw", r"inputs: got str, expected"),
        (None, r"inputs: got NoneType, expected"),
        (iter([X, W]), r"inputs: got \w*iterator, expected"),
        ([X[:, :2], W], r"input 'x' has size 2 in dimension 1, expected 3: x: float32\[batch, 3\]"),
        ([X, W[:1]], r"input 'w' .*\b1\b.*\b2\b"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_what_came_and_what_was_expected(
    arena: Arena, inputs: Any, text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        Stager(PLAIN, arena).stage(inputs, 2, DECLARED, 0.0)
    assert arena.used == 0


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"q": (1,)}, r"shapes: unknown input 'q', expected some of \['x', 's', 'h'\]"),
        ({"x": (1, 2)}, r"shapes: got \[1, 2\] for 'x', expected x: float32\[batch\]"),
        ({"x": ()}, r"shapes: got \[\] for 'x', expected x: float32\[batch\]"),
        ({"x": (-1,)}, r"shapes: got \[-1\] for 'x'"),
        ({"x": 3}, r"shapes: got 3 for 'x', expected x: float32\[batch\]"),
        ({"x": (2.5,)}, r"shapes: got \(2\.5,\) for 'x'"),
        ({"x": ("batch",)}, r"shapes: got \('batch',\) for 'x'"),
        ({"s": (1,)}, r"shapes: input s: string\[batch\] cannot lie in shared memory"),
        ({"h": (1,)}, r"shapes: input h: int4\[batch\] cannot lie in shared memory"),
        ({"x": (2**40,)}, r"Limits.memory_bytes"),
    ],
    ids=repr,
)
def test_allocation_that_does_not_fit_is_refused(arena: Arena, shapes: Any, text: str) -> None:
    inputs: dict[str, Value] = {
        "x": ("float32", ["batch"]),
        "s": (STRING, ["batch"]),
        "h": ("int4", ["batch"]),
    }
    with pytest.raises(InvalidInputError, match=text):
        Stager(model(inputs, {"y": ("float32", ["batch"])}), arena).allocate(shapes)
    assert arena.used == 0


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
def test_input_without_declared_dimensions_is_of_any_rank(
    arena: Arena, shape: tuple[int, ...]
) -> None:
    spec = model({"x": ("float32", [])}, {"y": ("float32", [])})
    stager = Stager(spec, arena)
    x = stager.allocate({"x": shape})["x"]
    assert x.shape == shape
    x[...] = 3
    job = stager.stage([x], 2, known(spec), 0.0)
    assert references(job, 0)[0][0][2] == shape


def test_allocated_arrays_have_the_inputs_types_and_are_writable(arena: Arena) -> None:
    inputs: dict[str, Value] = {
        name: (name, ["batch", 2]) for name in FIXED_SIZE if name not in FOUR_BITS
    }
    stager = Stager(model(inputs, {"y": ("float32", ["batch"])}), arena)
    rows: Any = np.int64(3)  # a size as NumPy gives it
    arrays = stager.allocate(dict.fromkeys(inputs, (rows, 2)))
    for name, array in arrays.items():
        assert (array.dtype, array.shape) == (numpy_dtype(name), (3, 2))
        array[...] = 1
    assert arena.used == sum(align(array.nbytes) for array in arrays.values())


# Strings.


def test_strings_travel_inline_row_by_row(arena: Arena) -> None:
    texts = model({"s": (STRING, ["batch"])}, {"t": (STRING, ["batch"])})
    stager = Stager(texts, arena)
    values = ["a", b"b\x00", "ü\x00", "", np.str_("e")]
    job = stager.stage([values], 2, known(texts), 0.0)
    assert job.blocks == set()
    read = [references(job, shard)[0][0] for shard in range(2)]
    assert read[0] == ("s", STRING, (3,), None, ("a", b"b\x00", "ü\x00"))
    assert read[1] == ("s", STRING, (2,), None, ("", "e"))
    assert references(job, 0)[1] == ()
    for shard, reference in enumerate(read):
        job.take(shard, replied([("t", *reference[1:])]), never, shard)
    assert job.result()["t"].tolist() == ["a", b"b\x00", "ü\x00", "", "e"]
    assert arena.used == 0


def test_arrays_of_text_are_taken_as_they_are(arena: Arena) -> None:
    spec = model({"s": (STRING, ["batch", 2])}, {"t": (STRING, ["batch", 2])})
    stager = Stager(spec, arena)
    text = np.array([["a", "bc"], ["d", ""]])
    for array in (
        text,
        text.astype(object),
        text.astype(np.dtypes.StringDType()),
        text[::-1][::-1],
    ):
        job = stager.stage([array], 2, known(spec), 0.0)
        assert [references(job, shard)[0][0][4] for shard in range(2)] == [("a", "bc"), ("d", "")]
    (reference,), _ = references(stager.stage([text.astype("S")], 1, None, 0.0), 0)
    assert reference[4] == (b"a", b"bc", b"d", b"")


# Outputs in the worker's own blocks.

OPEN = model(
    {"x": ("float32", ["batch", 2])},
    {
        "y": ("float32", ["batch", 2]),
        "u": ("int32", ["found", 3]),
        "h": ("uint4", ["found"]),
        "t": (STRING, ["found"]),
    },
)
FOUND: Axes = {"u": 0, "h": 0, "t": 0}


class Worker:
    """A worker's own blocks, and what of them was fetched."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.fetched: list[int] = []

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

    def fetch(self, number: int) -> Block:
        self.fetched.append(number)
        block = self.blocks.get(number)
        if block is None:
            raise ProtocolError(f"the descriptor of block {number} did not come")
        return Block.attach(number, block.size, os.dup(block.fd))

    def close(self) -> None:
        for block in self.blocks.values():
            block.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def found(count: int, seed: int) -> tuple[Array, Array, tuple[str, ...]]:
    """What a shard found: u, h and t of so many rows."""
    texts = tuple(f"{seed}-{row}" for row in range(count))
    return random_array("int32", (count, 3), seed), random_array("uint4", (count,), seed), texts


def answer(job: Job, worker: Worker, shard: int, count: int) -> tuple[TensorRef, ...]:
    """A right reply for a shard of `OPEN`."""
    u, h, t = found(count, shard)
    y = references(job, shard)[1][0]
    own = worker.put(("u", u), ("h", h))
    return replied([y, *own, ("t", STRING, (count,), None, t)])


def stage_open(arena: Arena, outputs: Axes = FOUND) -> Job:
    """A request of four rows in two shards."""
    return Stager(OPEN, arena).stage(
        [np.ones((4, 2), np.float32)], 2, known(OPEN, None, outputs), 0.0
    )


def test_outputs_of_unknown_shape_come_from_the_workers_blocks_and_join(
    arena: Arena, worker: Worker
) -> None:
    job = stage_open(arena)
    assert [[reference[0] for reference in references(job, s)[1]] for s in (0, 1)] == [["y"]] * 2
    for shard in (1, 0):
        job.take(shard, answer(job, worker, shard, 2), worker.fetch, shard)
    assert worker.fetched == [-1, -2]  # once for both outputs of a shard
    result = job.result()
    for block in worker.blocks.values():  # what the worker does to them is nobody's concern then
        memoryview(block.memory(0, block.size)).cast("B")[:] = b"\xff" * block.size
    assert [*result] == ["y", "u", "h", "t"]
    parts = [found(2, 0), found(2, 1)]
    assert np.array_equal(result["u"], np.concatenate([u for u, _, _ in parts]))
    assert np.array_equal(result["h"], np.concatenate([h for _, h, _ in parts]))
    assert result["t"].tolist() == ["0-0", "0-1", "1-0", "1-1"]


def test_outputs_of_any_number_of_rows_join_along_their_axis(arena: Arena, worker: Worker) -> None:
    job = stage_open(arena)
    for shard, count in ((0, 3), (1, 5)):
        job.take(shard, answer(job, worker, shard, count), worker.fetch, shard)
    result = job.result()
    assert np.array_equal(result["u"], np.concatenate([found(3, 0)[0], found(5, 1)[0]]))
    assert [len(result[name]) for name in ("y", "u", "h", "t")] == [4, 8, 8, 8]


def test_parts_that_do_not_join_are_an_error_that_the_split_hears_of(
    arena: Arena, worker: Worker
) -> None:
    job = stage_open(arena, {**FOUND, "u": None})
    reasons: list[str] = []
    job.contradicted = reasons.append
    for shard, count in ((0, 3), (1, 5)):
        job.take(shard, answer(job, worker, shard, count), worker.fetch, 7 + shard)
    text = r"output 'u' is the same from every worker.*\[3, 3\] from worker 8.*got \[5, 3\]"
    with pytest.raises(JoinError, match=text) as caught:
        job.result()
    assert reasons == [str(caught.value)]


def test_output_without_elements_needs_no_block(arena: Arena) -> None:
    job = stage_open(arena)
    for shard in (0, 1):
        y = references(job, shard)[1][0]
        empty: list[TensorRef] = [("u", "int32", (0, 3), 0, 0), ("h", "uint4", (0,), 0, 0)]
        job.take(shard, replied([y, *empty, ("t", STRING, (0,), None, ())]), never, shard)
    result = job.result()
    assert (result["u"].shape, result["h"].shape, result["t"].shape) == ((0, 3), (0,), (0,))
    assert result["h"].dtype == ml_dtypes.uint4


def test_open_output_may_be_of_another_rank_than_the_model_declares(
    arena: Arena, worker: Worker
) -> None:
    job = stage_open(arena)
    for shard in (0, 1):
        y, _, *others = answer(job, worker, shard, 2)
        own = worker.put(("u", random_array("int32", (5, 2, 1), shard)))
        job.take(shard, replied([y, *own, *others]), worker.fetch, shard)
    assert job.result()["u"].shape == (10, 2, 1)


# Outputs that come out in another shape than the plan foresaw, which the runtime only warns of.


def opened(job: Job, worker: Worker, shard: int, array: Array) -> None:
    """Answer a shard of `PLAIN` with this, in the worker's own block."""
    job.take(shard, replied(worker.put(("y", array))), worker.fetch, shard)


def test_output_of_another_shape_is_taken_and_no_more_foreseen(
    arena: Arena, worker: Worker
) -> None:
    stager = Stager(PLAIN, arena)
    parts = [random_array("float32", (2, 7), seed) for seed in (0, 1)]
    for laid_out in (1, 0, 0):
        job = stager.stage([X, W], 2, DECLARED, 0.0)
        assert [len(references(job, shard)[1]) for shard in (0, 1)] == [laid_out] * 2
        for shard, part in enumerate(parts):
            opened(job, worker, shard, part)
        assert job.result()["y"].tobytes() == np.concatenate(parts).tobytes()


def test_output_of_another_shape_may_come_from_one_worker_alone(
    arena: Arena, worker: Worker
) -> None:
    """Where each row's place is foreseen, and one worker has its rows elsewhere."""
    split = Split(inputs={"x": 0, "w": None}, outputs={"y": 0}, known="learned", sizes={"y": 2})
    spec = model(
        {"x": ("float32", [None, 3]), "w": ("float32", [2])}, {"y": ("float32", [None, 3])}
    )
    how = Known(split=split, settled=True, splits=True, open=False, number=-1)
    job = Stager(spec, arena).stage([X, W], 2, how, 0.0)
    (reference,) = references(job, 0)[1]
    assert reference[2] == (4, 3)
    rows = random_array("float32", (4, 3), 1)
    place(arena, reference)[:] = rows.tobytes()
    job.take(0, (), never, 0)
    more = random_array("float32", (5, 3), 2)
    opened(job, worker, 1, more)
    assert job.result()["y"].tobytes() == np.concatenate([rows, more]).tobytes()


def test_whole_output_of_another_shape_is_taken_as_it_is(arena: Arena, worker: Worker) -> None:
    job = Stager(PLAIN, arena).stage([X, W], 2, None, 0.0)
    opened(job, worker, 0, random_array("float32", (3, 1, 2)))
    assert job.result()["y"].shape == (3, 1, 2)


def test_outputs_of_other_shapes_that_do_not_join_are_an_error_that_names_the_worker(
    arena: Arena, worker: Worker
) -> None:
    job = Stager(PLAIN, arena).stage([X, W], 2, DECLARED, 0.0)
    opened(job, worker, 0, np.ones((2, 7), np.float32))
    opened(job, worker, 1, np.ones((3, 7), np.float32))
    text = r"output 'y' joins along axis 0.*\[2, 7\] from worker 1 \(part 1\), got \[3, 7\]"
    with pytest.raises(JoinError, match=text):
        job.result()


def test_refused_reply_leaves_what_is_foreseen_as_it_is(arena: Arena) -> None:
    stager = Stager(PLAIN, arena)
    job = stager.stage([X, W], 2, DECLARED, 0.0)
    with pytest.raises(ProtocolError):
        job.take(0, replied([("y", "float32", (9, 9), 0, 0)]), never, 0)
    job = stager.stage([X, W], 2, DECLARED, 0.0)
    assert len(references(job, 0)[1]) == 1


# Forged replies: none is taken, none changes anything, none leaves a descriptor.

Forge = Callable[[Job, list[TensorRef]], Sequence[TensorRef]]


def change(index: int, **fields: Any) -> Forge:
    """A reply in which one reference is another."""
    names = ("name", "element_type", "shape", "block", "offset")

    def forge(_: Job, right: list[TensorRef]) -> list[TensorRef]:
        reference = dict(zip(names, right[index], strict=True)) | fields
        changed: Any = tuple(reference.values())
        return [*right[:index], changed, *right[index + 1 :]]

    return forge


def other_shard(job: Job, right: list[TensorRef]) -> list[TensorRef]:
    return [references(job, 1)[1][0], *right[1:]]


def test_output_of_more_than_the_shared_memory_may_have_is_an_os_error_and_keeps_nothing() -> None:
    arena = Arena(1 << 16)
    stager = Stager(model({"x": ("float32", ["batch"])}, {"u": ("float32", ["found"])}), arena)
    job = stager.stage({"x": np.ones(2, np.float32)}, 1, None, 0.0)
    size = (1 << 16) + 4
    block = Block.create(-1, size)
    memoryview(block.memory(0, size)).cast("B")[:] = bytes(size)

    def fetch(number: int) -> Block:
        return Block.attach(number, size, os.dup(block.fd))

    with no_descriptor_left(), pytest.raises(OSError, match=rf"'u' has {size} bytes") as caught:
        job.take(0, replied([("u", "float32", (size // 4,), -1, 0)]), fetch, 0)
    assert caught.value.errno == errno.EFBIG
    job.take(0, replied([("u", "float32", (size // 4 - 1,), -1, 4)]), fetch, 0)
    assert job.result()["u"].shape == (size // 4 - 1,)
    block.close()
    stager.close()
    arena.close()


def test_strings_that_no_message_can_carry_are_the_callers_mistake(arena: Arena) -> None:
    stager = Stager(model({"s": (STRING, ["batch"])}, {"y": ("float32", ["batch"])}), arena)
    with pytest.raises(InvalidInputError, match="17 strings in a message of 17"):
        stager.stage({"s": np.array(["x" * (1 << 20)] * 17, object)}, 1, None, 0.0)
    stager.close()


FORGED: dict[str, Forge] = {
    "known output in another block": change(0, block=5),
    "known output in the worker's block": change(0, block=-1),
    "known output further on": change(0, offset=64),
    "known output far away": change(0, offset=2**62),
    "known output of another type": change(0, element_type="int32"),
    "known output of another shape": change(0, shape=(4, 1)),
    "known output that is larger": change(0, shape=(1000, 2)),
    "known output that is larger, past the block's end": change(0, shape=(1000, 2), block=-1),
    "known output of another shape in a block that never came": change(
        0, shape=(4, 1), block=-77, offset=0
    ),
    "known output of another shape and type": change(
        0, shape=(4, 1), element_type="int32", block=-1, offset=0
    ),
    "known output as strings": change(
        0, element_type=STRING, shape=(1,), block=None, offset=("a",)
    ),
    "known output of the other shard": other_shard,
    "open output of another type": change(1, element_type="float32"),
    "open output in the master's memory": change(1, block=0),
    "open output in a block that never came": change(1, block=-77),
    "second output in a block that never came": change(2, block=-77),
    "open output past the block's end": change(1, offset=10**6),
    "open output over the block's end": change(2, offset=190),
    "open output far away": change(1, offset=2**63 - 1),
    "open output of an impossible shape": change(1, shape=(2**62, 3)),
    "empty output of an impossible shape": change(1, shape=(0, 2**62)),
    "empty output of many impossible sizes": change(1, shape=(0, *[2**62] * 20)),
    "empty strings of an impossible shape": change(3, shape=(0, 2**62), offset=()),
    "open output as strings": change(1, element_type=STRING, shape=(1,), block=None, offset=("a",)),
    "strings as numbers": change(3, element_type="int32", block=-1, offset=0),
    "renamed": change(1, name="q"),
    "two of one name": change(2, name="u"),
    "in another order": lambda _, right: [*right[:1], *right[:0:-1]],
    "one too few": lambda _, right: right[:-1],
    "one too many": lambda _, right: [*right, right[-1]],
    "none": lambda *_: [],
    # These the protocol refuses already.
    "negative offset": change(1, offset=-4),
    "offset beyond all integers": change(1, offset=2**64),
    "negative size": change(1, shape=(-2, 3)),
    "no block": change(1, block=None),
    "unknown type": change(1, element_type="float31"),
    "offset that is no number": change(1, offset=True),
    "too few strings": change(3, offset=("a",)),
    "strings in a block": change(3, block=-1),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_forged_reply_is_a_protocol_error_and_changes_nothing(
    arena: Arena, worker: Worker, forge: Forge
) -> None:
    job = stage_open(arena)
    right = answer(job, worker, 0, 2)
    with no_descriptor_left(), pytest.raises(ProtocolError):
        job.take(0, replied(forge(job, [*right])), worker.fetch, 0)
    job.take(1, answer(job, worker, 1, 2), worker.fetch, 1)
    with pytest.raises((KeyError, PredictError)):
        job.result()  # nothing of the forged reply was kept
    job.take(0, right, worker.fetch, 0)
    result = job.result()
    assert np.array_equal(result["u"][:2], found(2, 0)[0])
    assert result["t"].tolist() == ["0-0", "0-1", "1-0", "1-1"]


@pytest.mark.parametrize("silent", [True, False])
def test_reply_with_all_as_asked_fetches_nothing(arena: Arena, silent: bool) -> None:
    job = Stager(PLAIN, arena).stage([X, W], 2, DECLARED, 0.0)
    for shard in (0, 1):
        outputs = references(job, shard)[1]
        with pytest.raises(ProtocolError, match=re.escape("expected ['y']")):
            job.take(shard, replied([*outputs, *outputs]), never, shard)
        job.take(shard, () if silent else replied(outputs), never, shard)
    assert job.result()["y"].shape == (4, 3)


# Outputs that are the same from every worker.

MEAN = model({"x": ("float32", ["batch"])}, {"y": ("float32", ["batch"]), "z": ("float32", [2])})


def run_mean(arena: Arena, zs: Sequence[Sequence[float]]) -> Array:
    how = known(MEAN, None, {"z": None})
    job = Stager(MEAN, arena).stage([np.ones(6, np.float32)], len(zs), how, 0.0)
    assert job.shards == len(zs)
    for shard, z in enumerate(zs):
        outputs = references(job, shard)[1]
        place(arena, outputs[1])[:] = np.array(z, np.float32).tobytes()
        job.take(shard, replied(outputs), never, shard)
    return job.result()["z"]


def test_output_that_all_workers_agree_on_is_taken(arena: Arena) -> None:
    assert run_mean(arena, [[1, 2]] * 3).tolist() == [1, 2]
    assert run_mean(arena, [[1, 2]]).tolist() == [1, 2]


def test_nan_of_one_worker_equals_the_nan_of_another(arena: Arena) -> None:
    assert np.array_equal(run_mean(arena, [[1, np.nan]] * 3), [1, np.nan], equal_nan=True)


@pytest.mark.parametrize("last", [[1, 3], [1, np.nan], [-1, 2]])
def test_output_that_differs_is_an_error_that_names_it_and_the_worker(
    arena: Arena, last: list[float]
) -> None:
    text = "output 'z' is to be the same .* worker 2 gave others than worker 0"
    with pytest.raises(JoinError, match=text):
        run_mean(arena, [[1, 2], [1, 2], last])


# Requests that may go in one run with others.

ENCODER = model(
    {"x": ("float32", ["batch", "seq"]), "w": ("int64", ["k"]), "t": ("float64", [])},
    {"y": ("float16", ["batch", "seq"])},
)


def join_of(arena: Arena, spec: ModelSpec, inputs: Any, axes: Axes | None = None) -> Any:
    """What a request has in common with others, and its rows."""
    job = Stager(spec, arena, 8).stage(inputs, 1, known(spec, axes), 0.0, joinable=True)
    return job.join


def encoder_inputs(
    rows: int = 1, width: int = 5, w: Sequence[int] = (1, 2), t: float = 0.5
) -> dict[str, Any]:
    return {"x": np.zeros((rows, width), np.float32), "w": np.array(w), "t": t}


def test_requests_that_differ_in_the_batch_alone_have_the_same_key(arena: Arena) -> None:
    one, three = (join_of(arena, ENCODER, encoder_inputs(rows)) for rows in (1, 3))
    assert one[0] == three[0]
    assert hash(one[0]) == hash(three[0])
    assert (one[1], three[1]) == (1, 3)


def test_values_of_the_batch_do_not_matter_nor_how_inputs_are_given(arena: Arena) -> None:
    inputs = encoder_inputs()
    stager = Stager(ENCODER, arena, 8)
    allocated = stager.allocate({"x": (1, 5)})["x"]
    allocated[...] = 9
    others = [
        {**inputs, "x": np.full((1, 5), 7, ">f4")},
        {**inputs, "x": allocated},
        {**inputs, "w": np.array([1, 2], ">i8"), "t": np.array(0.5, ">f8")},
        {**inputs, "w": [1, 2]},
        [inputs["x"], inputs["w"], inputs["t"]],
    ]
    expected = join_of(arena, ENCODER, inputs)
    assert all(join_of(arena, ENCODER, other) == expected for other in others)


@pytest.mark.parametrize(
    "other",
    [{"width": 6}, {"w": (1, 2, 3)}, {"w": (1, 3)}, {"w": (2, 1)}, {"t": 0.25}, {"t": np.nan}],
    ids=str,
)
def test_requests_of_other_sizes_or_other_common_values_have_another_key(
    arena: Arena, other: dict[str, Any]
) -> None:
    expected = join_of(arena, ENCODER, encoder_inputs())
    assert join_of(arena, ENCODER, encoder_inputs(**other))[0] != expected[0]


def test_common_values_that_move_between_inputs_make_another_key(arena: Arena) -> None:
    spec = model(
        {"x": ("float32", ["batch"]), "v": ("int8", ["n"]), "w": ("int8", ["m"])},
        {"y": ("float32", ["batch"])},
    )
    x = np.zeros(1, np.float32)
    keys = {
        join_of(arena, spec, {"x": x, "v": np.array(v, np.int8), "w": np.array(w, np.int8)})[0]
        for v, w in [([1, 2], [3]), ([1], [2, 3]), ([2, 1], [3]), ([], [1, 2, 3])]
    }
    assert len(keys) == 4


def test_key_knows_along_which_axes_the_batch_lies(arena: Arena) -> None:
    spec = model({"x": ("float32", ["a", "b"])}, {"y": ("float32", ["a", "b"])})
    x = {"x": np.zeros((2, 2), np.float32)}
    rows, columns = (join_of(arena, spec, x, {"x": axis}) for axis in (0, 1))
    assert rows[0] != columns[0]
    assert join_of(arena, spec, x, {"x": None}) is None


def test_axes_of_a_job_are_those_of_its_inputs_and_outputs(arena: Arena) -> None:
    spec = model(
        {"x": ("float32", [3, "batch"]), "w": ("float32", [2]), "v": ("float32", ["batch"])},
        {"y": ("float32", ["batch", 2]), "z": ("float32", [2, 2, "batch"])},
    )
    inputs = {name: np.zeros(shape, np.float32) for name, shape in (("x", (3, 4)), ("w", 2))}
    request = {**inputs, "v": [0.0] * 4}
    job = Stager(spec, arena, 8).stage(request, 1, known(spec), 0.0, joinable=True)
    assert job.axes == ((1, None, 0), (0, 2))
    assert job.join is not None
    assert job.join[1] == 4


def test_tensors_of_a_job_are_those_of_its_message(arena: Arena) -> None:
    job = Stager(PLAIN, arena, 8).stage([[[1.0] * 3] * 4, [0, 0]], 1, DECLARED, 0.0, joinable=True)
    inputs, outputs = references(job, 0)
    assert job.tensors(0) == encode_tensors(inputs, outputs)


@pytest.mark.parametrize(("rows", "joined"), [(1, True), (7, True), (8, False), (9, False)])
def test_requests_that_leave_no_room_for_others_go_alone(
    arena: Arena, rows: int, joined: bool
) -> None:
    assert (join_of(arena, ENCODER, encoder_inputs(rows)) is not None) == joined


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"x": ("float32", ["batch"]), "s": (STRING, [1])}, {"y": ("float32", ["batch"])}),
        ({"x": (STRING, ["batch"])}, {"y": ("float32", ["batch"])}),
        ({"x": ("float32", ["batch"])}, {"y": (STRING, ["batch"])}),
        ({"x": ("int4", ["batch"])}, {"y": ("float32", ["batch"])}),
        ({"x": ("float32", ["batch"])}, {"y": ("uint4", ["batch"])}),
        ({"x": ("float32", ["batch"]), "w": ("int4", [1])}, {"y": ("float32", ["batch"])}),
        ({"x": ("float32", [1])}, {"y": ("float32", [1])}),
        ({"x": ("float32", ["batch"])}, {"y": ("float32", ["found"])}),
        ({"x": ("float32", [None])}, {"y": ("float32", [None])}),
    ],
    ids=str,
)
def test_tensors_whose_rows_cannot_be_put_together_go_alone(
    arena: Arena, inputs: Mapping[str, Value], outputs: Mapping[str, Value]
) -> None:
    spec = model(inputs, outputs)
    arrays = {item.name: np.zeros(1, item.dtype) for item in spec.inputs}
    strings = {n: np.array(["a"]) for n, (kind, _) in inputs.items() if kind == STRING}
    assert join_of(arena, spec, {**arrays, **strings}) is None


@pytest.mark.parametrize(("size", "joined"), [(512, True), (513, False)])
def test_common_inputs_that_are_large_are_not_compared(
    arena: Arena, size: int, joined: bool
) -> None:
    spec = model(
        {"x": ("float32", ["batch"]), "w": ("int64", ["k"])}, {"y": ("float32", ["batch"])}
    )
    inputs = {"x": np.zeros(1, np.float32), "w": np.zeros(size, np.int64)}
    assert (join_of(arena, spec, inputs) is not None) == joined


@pytest.mark.parametrize("element_type", [t for t in FIXED_SIZE if t not in FOUR_BITS])
def test_every_type_of_whole_bytes_may_be_joined(arena: Arena, element_type: str) -> None:
    spec = model(
        {"x": (element_type, ["batch", 2]), "w": (element_type, [3])},
        {"y": (element_type, ["batch"])},
    )
    x, w = (random_array(element_type, shape) for shape in ((2, 2), (3,)))
    assert join_of(arena, spec, {"x": x, "w": w})[1] == 2


@pytest.mark.parametrize(("most", "joinable"), [(1, True), (8, False)])
def test_requests_go_alone_where_joining_is_off(arena: Arena, most: int, joinable: bool) -> None:
    job = Stager(ENCODER, arena, most).stage(
        encoder_inputs(), 1, known(ENCODER), 0.0, joinable=joinable
    )
    assert job.join is None


def test_requests_that_nothing_is_known_of_go_alone(arena: Arena) -> None:
    job = Stager(ENCODER, arena, 8).stage(encoder_inputs(), 1, None, 0.0, joinable=True)
    assert job.join is None


def test_batch_of_no_rows_has_nobody_to_go_with(arena: Arena) -> None:
    assert join_of(arena, PLAIN, [np.zeros((0, 3), np.float32), [0, 0]]) is None


# Weights.

WEIGHTS = specs({"m": ("float32", [3])})


def version_of(job: Job, shard: int) -> int:
    """The version of the weights that the worker reads in a shard's PREDICT."""
    job.number = 7
    message = decode(job.message(shard))
    assert isinstance(message, Predict)
    return message.weights


def test_all_shards_run_with_the_version_of_the_moment_when_they_were_staged(arena: Arena) -> None:
    stager = Stager(PLAIN, arena, weights=WEIGHTS)
    inputs = [np.zeros((4, 3), np.float32), [0, 0]]
    jobs = []
    for number in range(3):
        jobs.append(stager.stage(inputs, 2, DECLARED, 0.0))
        assert stager.weights.update({"m": [0, 0, 0]}, 0.0) == number + 1
    jobs.append(stager.stage(inputs, 2, DECLARED, 0.0))
    assert [[version_of(job, shard) for shard in range(2)] for job in jobs] == [
        [number] * 2 for number in range(4)
    ]


def test_memory_of_a_version_is_held_by_the_jobs_that_run_with_it(arena: Arena) -> None:
    stager = Stager(PLAIN, arena, weights=WEIGHTS)
    stager.weights.update({"m": [1, 2, 3]}, 0.0)
    inputs = stager.allocate({"x": (4, 3), "w": (2,)})
    before = arena.used
    job = stager.stage(inputs, 1, None, 0.0)
    output = arena.used - before
    stager.weights.update({"m": [4, 5, 6]}, 0.0)
    assert arena.used == before + output + align(12)
    assert (
        bytes(place(arena, job.weights.tensors["m"])) == np.array([1, 2, 3], np.float32).tobytes()
    )
    future = job.future  # which a user may keep as long as he likes
    del job
    assert arena.used == before
    assert not future.done()


def test_requests_with_another_version_of_the_weights_have_another_key(arena: Arena) -> None:
    stager, how = Stager(ENCODER, arena, 8, WEIGHTS), known(ENCODER)

    def key() -> Any:
        job = stager.stage(encoder_inputs(), 1, how, 0.0, joinable=True)
        assert job.join is not None
        return job.join[0]

    own = key()
    assert key() == own
    stager.weights.update({"m": [1, 2, 3]}, 0.0)
    first = key()
    assert key() == first
    stager.weights.update({"m": [1, 2, 3]}, 0.0)
    assert len({own, first, key()}) == 3


def test_batch_of_no_rows_is_answered_without_weights(arena: Arena) -> None:
    stager = Stager(PLAIN, arena, weights=WEIGHTS)
    stager.weights.update({"m": [1, 2, 3]}, 0.0)
    job = stager.stage([np.zeros((0, 3), np.float32), [0, 0]], 2, DECLARED, 0.0)
    assert job.future.result(0.0)["y"].shape == (0, 3)
