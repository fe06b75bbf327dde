"""From arrays to requests: what is checked, where tensors lie, and who may use their memory again."""

import os
import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.errors import BuildError, InvalidInputError, QueueFullError
from mcinfer.requests import planner as planning
from mcinfer.requests.planner import Planner
from mcinfer.requests.request import Request
from mcinfer.requests.tensors import Copier
from mcinfer.sharding import Axes
from mcinfer.shm.arena import Arena, Slot, align
from mcinfer.specs import STRING, Dimension, ModelSpec, numpy_dtype
from tests.planned_requests import (
    DECLARED,
    FIXED_SIZE,
    LIMIT,
    MIB,
    PLAIN,
    Array,
    Value,
    W,
    X,
    double,
    in_order,
    in_use,
    known,
    model,
    never,
    place,
    planner_of,
    random_array,
    raw_bytes,
    references,
    replied,
    request_of,
    run,
    specs,
)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 * MIB)
    yield arena
    arena.close()


# Random models and batches.

ORDERS = ["C", "F", "reversed", "strided", "other byte order", "read-only", "in the arena"]


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


@given(case=cases())
def test_shards_read_their_part_of_each_input_and_their_outputs_join(case: Case) -> None:
    arena = Arena(2 * MIB)
    planner = planner_of(case.model, arena)
    inputs = {"x": in_order(case.x, case.order), "w": in_order(case.w, case.order)}
    for name, array in inputs.items():
        if case.order == "in the arena":
            inputs[name] = planner.allocate({name: array.shape}, 0.0)[name]
            inputs[name][...] = array
    request = request_of(planner, inputs, case.pieces, known(case.model, None, {"z": None}), 0.0)
    expected = [*zip(case.parts(case.x), case.parts(case.y), strict=True)]
    assert len(request.rows) == len(expected)
    for shard, (x, y) in enumerate(expected):
        read, written = references(request, shard)
        assert {reference[3] for reference in (*read, *written)} <= request.blocks
        assert [reference[0] for reference in read] == ["x", "w"]
        assert [reference[2] for reference in read] == [x.shape, case.w.shape]
        assert bytes(place(arena, read[0])) == raw_bytes(x)
        assert bytes(place(arena, read[1])) == raw_bytes(case.w)
        assert [reference[0] for reference in written] == ["y", "z"]
        assert [reference[2] for reference in written] == [y.shape, case.z.shape]
        place(arena, written[0])[:] = raw_bytes(y)
        place(arena, written[1])[:] = raw_bytes(case.z)
        request.take(shard, replied(written), never, shard, LIMIT)
    # What one shard has written, no other has written over.
    for shard, (x, _) in enumerate(expected):
        assert bytes(place(arena, references(request, shard)[0][0])) == raw_bytes(x)
    result = request.value()
    assert [*result] == ["y", "z"]
    for array, wanted in zip(result.values(), (case.y, case.z), strict=True):
        assert array.dtype == wanted.dtype
        assert array.shape == wanted.shape
        assert raw_bytes(array) == raw_bytes(wanted)
    del request, inputs, result, array
    assert in_use(planner, arena) == 0
    arena.close()


# Copying, or not.


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize(
    ("cut", "shared"),
    [
        (lambda x: x[2:6], True),
        (lambda x: x[1:][1:3], True),
        (lambda x: x.view(np.int32).view(np.float32), True),
        (lambda x: x[::2], False),
        (lambda x: x[::-1], False),
        (lambda x: x.T.copy().T, False),
        (lambda x: x.copy(), False),
        (lambda x: x.byteswap().view(x.dtype.newbyteorder()), False),
    ],
    ids=["rows", "of a slice", "views", "strided", "reversed", "F", "copy", "big-endian"],
)
def test_slices_of_allocated_arrays_are_sent_where_they_lie(
    arena: Arena, cut: Callable[[Array], Array], shared: bool
) -> None:
    planner = planner_of(PLAIN, arena)
    whole = planner.allocate({"x": (8, 3)}, 0.0)["x"]
    whole[...] = np.arange(24).reshape(8, 3)
    x = cut(whole)
    request = request_of(planner, {"x": x, "w": [0, 0]}, 1, None, 0.0)
    reference = references(request, 0)[0][0]
    assert (arena.find(address(x), x.nbytes) == reference[3:]) == shared
    assert bytes(place(arena, reference)) == raw_bytes(x)


def test_input_in_shared_memory_is_held_as_long_as_the_request(arena: Arena) -> None:
    planner = planner_of(PLAIN, arena)
    inputs = planner.allocate({"x": (1000, 3), "w": (2,)}, 0.0)
    inputs["x"][...] = 7
    request = request_of(planner, inputs, 1, None, 0.0)
    reference = references(request, 0)[0][0]
    inputs.clear()
    others = [arena.allocate(12_000) for _ in range(3)]
    for slot in others:
        memoryview(slot.memory).cast("B")[:] = b"\x01" * 12_000
    assert np.frombuffer(place(arena, reference), np.float32).tolist() == [7.0] * 3000
    del request, others, slot
    assert in_use(planner, arena) == 0


def test_request_that_finds_no_room_holds_none() -> None:
    arena = Arena(MIB)
    planner = planner_of(PLAIN, arena)
    held = arena.allocate(600_000)
    x = np.ones((20_000, 3), np.float32)  # 240 kB in, 240 kB out
    used = arena.used
    with pytest.raises(QueueFullError):
        request_of(planner, [x, [0, 0]], 2, DECLARED, 0.0)
    assert arena.used == used
    with pytest.raises(InvalidInputError, match=r"Limits\.memory_bytes"):
        request_of(planner, [np.ones((80_000, 3), np.float32), [0, 0]], 2, DECLARED, 0.01)
    del held
    run(request_of(planner, [x, [0, 0]], 2, DECLARED, 0.0), arena, double)
    arena.close()


# Plans.


# Frames.


def answered(planner: Planner, arena: Arena, x: Array = X) -> Request:
    """A request of two shards that are answered, and that no worker has any more."""
    request = request_of(planner, [x, W], 2, DECLARED, 0.0)
    run(request, arena, double)
    request.settle()
    request.release()
    return request


def test_frame_is_used_again_once_the_last_view_of_a_view_is_gone(arena: Arena) -> None:
    planner = planner_of(PLAIN, arena)
    request = answered(planner, arena)
    size = arena.used
    y = request.result()["y"]
    place_of_y = address(y)
    corner = y[1:].T[:2].view(np.int32)
    del request, y
    both = answered(planner, arena)
    assert address(both.result()["y"]) != place_of_y  # the first is held by `corner`
    assert arena.used > size
    corner[...] = 7
    assert (both.result()["y"] == 2).all()
    del corner
    again = answered(planner, arena)
    assert address(again.result()["y"]) == place_of_y
    del both, again
    assert arena.used == planner.place.idle.bytes


def test_plans_and_frames_take_bounded_memory_of_this_process() -> None:
    """A model of 40 outputs, fed with any number of rows: without a bound it is many times as much."""
    shape: list[Dimension] = ["batch", 4]
    outputs = {f"y{i}": ("float32", shape) for i in range(40)}
    spec = model({"x": ("float32", ["batch", 4])}, outputs)
    arena = Arena(1 << 30)
    planner, split = planner_of(spec, arena), known(spec)
    tracemalloc.start()
    try:
        for rows in range(1, 21):
            x = np.ones((rows, 4), np.float32)
            requests = [request_of(planner, [x], 2, split, 0.0) for _ in range(20)]
            requests.clear()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 3 << 20
    planner.close()
    arena.close()


def test_frames_that_come_back_to_a_forgotten_plan_are_no_loss_of_memory(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_MAX_PLANS", 1)
    planner = planner_of(PLAIN, arena)
    requests = [answered(planner, arena) for _ in range(8)]
    kept = requests[0].result()["y"]
    answered(planner, arena, np.ones((9, 3), np.float32))
    requests.clear()
    planner.place.idle.release()
    assert arena.used == 64  # what is kept
    assert (kept == 2).all()


def test_copy_that_was_interrupted_writes_to_no_later_request() -> None:
    spec = model({"x": ("uint8", ["batch", 1 << 10])}, {"y": ("uint8", ["batch"])})
    arena = Arena(256 * MIB)
    planner = planner_of(spec, arena)
    planner._copier = Copier(2)
    old, new = (np.full((18 << 10, 1 << 10), value, np.uint8) for value in (1, 2))
    goes_on = threading.Event()
    planner._copier._pool.submit(goes_on.wait, 20.0)  # the copier's thread is busy

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        request_of(planner, [old], 1, None, 0.0)
    timer.join()
    signal.signal(signal.SIGUSR1, before)
    # Of another layout, so that one thread copies it.
    request = request_of(planner, [np.asfortranarray(new)], 1, None, 0.0)
    goes_on.set()
    planner._copier.close()
    [(inputs, _)] = [references(request, 0)]
    assert set(bytes(place(arena, inputs[0]))) == {2}
    del request
    planner.close()
    arena.close()


def test_planner_that_is_short_of_one_frame_does_not_wait_with_the_other_in_hand() -> None:
    """Two that each held one would wait for each other."""
    arena = Arena(MIB)
    asked: list[tuple[int, float, int]] = []

    def allocate(sizes: Sequence[int], timeout: float) -> list[Slot]:
        asked.append((len(sizes), timeout, arena.used))
        return arena.allocate_all(sizes)

    planner = planner_of(PLAIN, arena, allocate=allocate)
    x = np.ones((20_000, 3), np.float32)  # 240 kB in, 240 kB out
    request = answered(planner, arena, x)
    y = request.result()["y"]
    del request  # the frame of its inputs is idle, that of its outputs is not
    held = arena.allocate(450_000)
    with pytest.raises(QueueFullError):
        request_of(planner, [x, W], 2, DECLARED, 5.0)
    assert asked[0][:2] == (2, 0.0)
    (one, at_once, _), (both, waited, used) = asked[1:]
    assert (one, at_once, both, waited) == (1, 0.0, 2, 5.0)
    assert used == align(y.nbytes) + align(held.size)
    arena.close()


# What is taken, and what is refused.


@pytest.mark.parametrize("types", [("int4", "float32"), ("float32", "uint4")], ids=str)
def test_model_with_four_bit_tensors_is_refused_by_their_name(
    arena: Arena, types: tuple[str, str]
) -> None:
    spec = model({"x": (types[0], ["batch"])}, {"y": (types[1], ["batch"])})
    with pytest.raises(
        BuildError, match=r"model: (x: int4|y: uint4)\[batch\] has elements of less"
    ):
        planner_of(spec, arena)


TYPED = {
    name: model({"x": (name, ["batch"])}, {"y": (name, ["batch"])})
    for name in ("float32", "float64", "int64", "int8", "uint8", "bool", "bfloat16", STRING)
}


@pytest.mark.parametrize(
    ("element_type", "value"),
    [
        ("float32", [1, 2]),
        ("int64", [1, -(2**63), 2**63 - 1]),
        ("float32", [np.ones(()), 2]),
    ],
    ids=str,
)
def test_numbers_without_a_type_take_the_inputs(
    arena: Arena, element_type: str, value: Sequence[Any]
) -> None:
    spec = TYPED[element_type]
    request = request_of(planner_of(spec, arena), [value], 1, known(spec), 0.0)
    expected = np.array([*value]).astype(numpy_dtype(element_type))
    assert bytes(place(arena, references(request, 0)[0][0])) == raw_bytes(expected)


class HasArray:
    """What another library's tensor is like."""

    dtype = "theirs"

    def __init__(self, array: Array) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.array


def test_tensor_of_another_library_is_taken_as_its_array(arena: Arena) -> None:
    planner = planner_of(TYPED["float32"], arena)
    request = request_of(planner, [HasArray(np.ones(3, np.float32))], 1, None, 0.0)
    assert bytes(place(arena, references(request, 0)[0][0])) == np.ones(3, np.float32).tobytes()
    text = r"""'x' has dtype float64, expected float32 \(x: .*\): x\.astype\("float32"\)$"""
    with pytest.raises(InvalidInputError, match=text):
        request_of(planner, [HasArray(np.ones(3))], 1, None, 0.0)


X32 = r"input 'x' has dtype {}, expected {} \(x: {}\[batch\]\)"


@pytest.mark.parametrize(
    ("element_type", "value", "text"),
    [
        ("float32", np.ones(3), X32.format("float64", "float32", "float32")),
        ("float32", [[1], [2, 3]], r"input 'x' is not an array: .*inhomogeneous"),
        ("bfloat16", np.ones(3, np.float16), X32.format("float16", "bfloat16", "bfloat16")),
        ("int8", [0, 128], r"'x' has values from 0 to 128, expected -128 to 127 \(x: int8"),
        ("int64", [[1, 2]], r"input 'x' has 2 dimensions \[1, 2\], expected 1: x: int64\[batch\]"),
        (STRING, np.array(["a", 1], object), X32.format("object", STRING, STRING)),
    ],
    ids=str,
)
def test_value_that_does_not_fit_is_refused_with_name_what_came_and_what_was_expected(
    arena: Arena, element_type: str, value: Any, text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        request_of(
            planner_of(TYPED[element_type], arena), [value], 2, known(TYPED[element_type]), 0.0
        )
    assert arena.used == 0


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"x": X}, r"inputs: missing \['w'\], expected \['x', 'w'\]"),
        ({"x": X, "w": W, "q": 1}, r"inputs: unknown \['q'\], expected \['x', 'w'\]"),
        ([X], r"inputs: got 1, expected 2: \['x', 'w'\]"),
        (X, r"inputs: got ndarray, expected a mapping by name or a sequence of \['x', 'w'\]"),
        ([X[:, :2], W], r"input 'x' has size 2 in dimension 1, expected 3: x: float32\[batch, 3\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(arena: Arena, inputs: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        request_of(planner_of(PLAIN, arena), inputs, 2, DECLARED, 0.0)
    assert arena.used == 0


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"q": (1,)}, r"shapes: unknown input 'q', expected some of \['x', 's'\]"),
        ({"x": (1, 2)}, r"shapes: got \[1, 2\] for 'x', expected x: float32\[batch\]"),
        ({"s": (1,)}, r"shapes: input s: string\[batch\] cannot lie in shared memory"),
        ({"x": (2**40,)}, r"Limits.memory_bytes"),
    ],
    ids=repr,
)
def test_allocation_that_does_not_fit_is_refused(arena: Arena, shapes: Any, text: str) -> None:
    inputs: dict[str, Value] = {
        "x": ("float32", ["batch"]),
        "s": (STRING, ["batch"]),
    }
    with pytest.raises(InvalidInputError, match=text):
        planner_of(model(inputs, {"y": ("float32", ["batch"])}), arena).allocate(shapes, 0.0)
    assert arena.used == 0


# Strings.


# Requests that may go in one run with others.

ENCODER = model(
    {"x": ("float32", ["batch", "seq"]), "w": ("int64", ["k"]), "t": ("float64", [])},
    {"y": ("float16", ["batch", "seq"])},
)


def join_of(arena: Arena, spec: ModelSpec, inputs: Any, axes: Axes | None = None) -> Any:
    """What a request has in common with others, and its rows."""
    request = request_of(
        planner_of(spec, arena, 8), inputs, 1, known(spec, axes), 0.0, joinable=True
    )
    return request.join


def encoder_inputs(
    rows: int = 1, width: int = 5, w: Sequence[int] = (1, 2), t: float = 0.5
) -> dict[str, Any]:
    return {"x": np.zeros((rows, width), np.float32), "w": np.array(w), "t": t}


def test_requests_of_so_many_references_that_their_run_fits_no_message_go_apart(
    arena: Arena,
) -> None:
    names = [f"{number:03}" for number in range(300)]
    wide = model({name: ("int8", ["batch"]) for name in names}, {"y": ("int8", ["batch"])})
    for most, joins in ((8, True), (100_000, False)):
        planner = planner_of(wide, arena, most)
        inputs = dict.fromkeys(names, np.zeros(1, np.int8))
        request = request_of(planner, inputs, 1, known(wide), 0.0, joinable=True)
        assert (request.join is not None) is joins


def test_values_of_the_batch_do_not_matter_nor_how_inputs_are_given(arena: Arena) -> None:
    inputs = encoder_inputs()
    planner = planner_of(ENCODER, arena, 8)
    allocated = planner.allocate({"x": (1, 5)}, 0.0)["x"]
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
    "other", [{"width": 6}, {"w": (1, 2, 3)}, {"w": (2, 1)}, {"t": np.nan}], ids=str
)
def test_other_sizes_or_common_values_are_another_key(arena: Arena, other: dict[str, Any]) -> None:
    expected = join_of(arena, ENCODER, encoder_inputs())
    assert join_of(arena, ENCODER, encoder_inputs(**other))[0] != expected[0]


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"x": ("float32", ["batch"]), "s": (STRING, [1])}, {"y": ("float32", ["batch"])}),
        ({"x": ("float32", ["batch"])}, {"y": (STRING, ["batch"])}),
        ({"x": ("float32", [1])}, {"y": ("float32", [1])}),
        ({"x": ("float32", ["batch"])}, {"y": ("float32", ["found"])}),
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
def test_large_common_inputs_are_not_compared(arena: Arena, size: int, joined: bool) -> None:
    spec = model(
        {"x": ("float32", ["batch"]), "w": ("int64", ["k"])}, {"y": ("float32", ["batch"])}
    )
    inputs = {"x": np.zeros(1, np.float32), "w": np.zeros(size, np.int64)}
    assert (join_of(arena, spec, inputs) is not None) == joined


# Weights.

WEIGHTS = specs({"m": ("float32", [3])})


def test_requests_with_another_version_of_the_weights_have_another_key(arena: Arena) -> None:
    planner, how = planner_of(ENCODER, arena, 8, WEIGHTS), known(ENCODER)

    def key() -> Any:
        now = planner.weights.current
        request = request_of(planner, encoder_inputs(), 1, how, 0.0, weights=now, joinable=True)
        assert request.join is not None
        return request.join[0]

    own = key()
    assert key() == own
    planner.weights.update({"m": [1, 2, 3]}, 0.0)
    first = key()
    assert key() == first
    planner.weights.update({"m": [1, 2, 3]}, 0.0)
    assert len({own, first, key()}) == 3
