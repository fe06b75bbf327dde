"""Tests of mcinfer/requests/weights.py: versions of weights in a real arena."""

import gc
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcinfer.errors import ClosedError, InvalidInputError, QueueFullError
from mcinfer.requests.tensors import Copier, unpack
from mcinfer.requests.weights import WeightStore, WeightVersion, check_weights
from mcinfer.shm.arena import Arena, Slot, align
from mcinfer.specs import ELEMENT_TYPES, STRING, TensorSpec, numpy_dtype, tensor_bytes

MIB = 1 << 20

Array = NDArray[Any]


def spec(name: str, element_type: str = "float32", shape: Sequence[int] = (2, 3)) -> TensorSpec:
    return TensorSpec(name=name, dtype=numpy_dtype(element_type), shape=tuple(shape))


SPECS = (spec("w"), spec("b", shape=(3,)), spec("n", "int64", ()))

BEFORE = {"w": np.ones((2, 3), np.float32), "b": np.full(3, 2, np.float32), "n": np.array(3)}
"""What the store of most tests holds at first, as version 1."""

BEFORE_BYTES = sum(align(array.nbytes) for array in BEFORE.values())


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(16 * MIB)
    yield arena
    arena.close()


@pytest.fixture
def store(arena: Arena) -> WeightStore:
    """Three weights, replaced once; its copier's threads begin with large arrays only."""
    store = new_store(arena)
    store.update(BEFORE, 0.0)
    return store


def new_store(arena: Arena, specs: Sequence[TensorSpec] = SPECS) -> WeightStore:
    lock = threading.Lock()  # one thread owns the arena

    def allocate(sizes: Sequence[int], _: float) -> list[Slot]:
        with lock:
            return arena.allocate_all(sizes)

    return WeightStore(specs, allocate, Copier(2))


def values(arena: Arena, version: WeightVersion, specs: Sequence[TensorSpec] = SPECS) -> Any:
    """What a worker finds at a version's references: bytes that are copied, as arrays by name."""
    found = {}
    for weight in specs:
        if weight.name not in version.tensors:
            continue
        name, element_type, shape, number, offset = version.tensors[weight.name]
        assert (name, element_type, shape) == (weight.name, weight.element_type, weight.shape)
        assert number in version.blocks
        block = arena.block(number)
        assert block is not None
        memory = block.memory(offset, tensor_bytes(element_type, prod(shape)))
        found[name] = unpack(memoryview(bytes(memory)), weight, shape)
    assert found.keys() == version.tensors.keys()
    return found


def assert_values(arena: Arena, version: WeightVersion, expected: Mapping[str, Any]) -> None:
    found = values(arena, version)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


# Versions.


def test_first_version_is_the_models_own_weights(arena: Arena) -> None:
    store = new_store(arena)
    assert store.specs == SPECS
    assert (store.current.number, store.current.oldest) == (0, 0)
    assert not store.current.tensors
    assert not store.current.blocks
    assert arena.used == 0


def test_update_has_what_was_given_and_leaves_the_others_to_the_model(arena: Arena) -> None:
    store = new_store(arena)
    assert store.update({"b": [1.5, 2.5, 3.5]}, 0.0) == 1
    assert store.current.number == 1
    assert_values(arena, store.current, {"b": [1.5, 2.5, 3.5]})


def test_partial_update_keeps_the_others_where_they_are(arena: Arena, store: WeightStore) -> None:
    before = store.current
    assert store.update({"b": np.zeros(3, np.float32)}, 0.0) == 2
    after = store.current
    assert_values(arena, after, {**BEFORE, "b": np.zeros(3)})
    for name in ("w", "n"):
        assert after.tensors[name] == before.tensors[name]
    assert after.tensors["b"] != before.tensors["b"]


def test_version_never_changes(arena: Arena, store: WeightStore) -> None:
    first = store.current
    store.update({"w": np.zeros((2, 3), np.float32), "n": 9}, 0.0)
    assert_values(arena, first, BEFORE)
    assert first.number == 1


def test_values_are_copied_before_the_call_returns(arena: Arena, store: WeightStore) -> None:
    given = np.arange(6, dtype=np.float32).reshape(2, 3)
    store.update({"w": given}, 0.0)
    given[...] = -1
    np.testing.assert_array_equal(values(arena, store.current)["w"], [[0, 1, 2], [3, 4, 5]])


def test_oldest_is_the_lowest_version_that_is_still_held(arena: Arena) -> None:
    store = new_store(arena)
    own = store.current

    def update() -> WeightVersion:
        store.update({"n": 1}, 0.0)
        return store.current

    one, two = update(), update()
    assert (one.oldest, two.oldest) == (0, 0)
    del own
    assert update().oldest == 1
    assert update().oldest == 1
    del one
    assert update().oldest == 2
    del two
    # The one before: requests could still take it while the new one was made.
    for _ in range(3):
        before = store.current.number
        assert update().oldest == before


# Arrays of all kinds.


@pytest.mark.parametrize(
    "given",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(3, 2).T.copy().T.T.reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.repeat(np.arange(6, dtype=np.float32), 2)[::2].reshape(2, 3),
        np.arange(12, dtype=">f4").reshape(2, 6)[:, ::2] / 2,
        np.arange(5, -1, -1, dtype=np.float32)[::-1].reshape(2, 3),
        [[0, 1, 2], [3, 4, 5]],
        ((0.0, 1.0, 2.0), (3.0, 4.0, 5.0)),
        [np.arange(3), np.arange(3, 6)],
    ],
    ids=[
        "big-endian",
        "transposed",
        "fortran",
        "strided",
        "strided big-endian",
        "backwards",
        "list",
        "tuple",
        "list of arrays",
    ],
)
def test_any_layout_byte_order_and_list_is_taken(
    arena: Arena, store: WeightStore, given: Any
) -> None:
    expected = np.array(given, np.float32)
    store.update({"w": given}, 0.0)
    np.testing.assert_array_equal(values(arena, store.current)["w"], expected)


@pytest.mark.parametrize("element_type", [name for name in ELEMENT_TYPES if name != STRING])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 2)], ids=str)
def test_every_type_of_fixed_size_is_replaced_bit_for_bit(
    arena: Arena, element_type: str, shape: tuple[int, ...]
) -> None:
    specs = [spec("w", element_type, shape)]
    given = (np.arange(prod(shape)) % 2).reshape(shape).astype(numpy_dtype(element_type))
    store = new_store(arena, specs)
    store.update({"w": given}, 0.0)
    found = values(arena, store.current, specs)["w"]
    assert found.dtype == given.dtype
    assert found.tobytes() == given.tobytes()


def test_large_weight_is_copied_whole(arena: Arena) -> None:
    specs = [spec("w", "uint8", (3 * MIB + 5,))]
    store = new_store(arena, specs)
    given = np.random.default_rng(0).integers(0, 256, 3 * MIB + 5).astype(np.uint8)
    store.update({"w": given}, 0.0)
    assert np.array_equal(values(arena, store.current, specs)["w"], given)


def test_weight_that_lies_in_the_arena_already_is_copied(arena: Arena, store: WeightStore) -> None:
    slot = arena.allocate(24)
    given = np.ndarray((2, 3), np.float32, memoryview(slot.memory))
    given[...] = 8
    store.update({"w": given}, 0.0)
    given[...] = 0
    np.testing.assert_array_equal(values(arena, store.current)["w"], np.full((2, 3), 8))


# What does not fit.

GOOD = {"b": np.zeros(3, np.float32)}


class Unreadable:
    """As a tensor of another library on a device that NumPy does not reach."""

    def __array__(self, *_: object) -> Array:
        raise RuntimeError("lies on a device")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, r"^weights: got None, expected arrays by name$"),
        ([("w", 1)], r"^weights: got \[\('w', 1\)\], expected arrays by name$"),
        ("w", r"^weights: got 'w', expected arrays by name$"),
        (BEFORE["w"], r"^weights: got .*array\(.*, expected arrays by name$"),
        ({}, r"^weights: got \{\}, expected arrays by name$"),
        ({**GOOD, "v": 1}, r"^weights: unknown \['v'\], expected some of \['w', 'b', 'n'\]$"),
        ({"b": GOOD["b"], 3: 1}, r"^weights: unknown \[3\], expected some of \['w', 'b', 'n'\]$"),
        (
            {**GOOD, "w": np.zeros((2, 3))},
            r"^weight 'w' has dtype float64, expected float32 \(w: float32\[2, 3\]\)$",
        ),
        ({**GOOD, "n": 1.5}, r"^weight 'n' has dtype float64, expected int64 "),
        ({**GOOD, "n": 2**63}, r"^weight 'n' "),
        ({**GOOD, "w": "text"}, r"^weight 'w' has dtype <U4, expected float32 "),
        ({**GOOD, "w": None}, r"^weight 'w' has dtype object, expected float32 "),
        ({**GOOD, "w": [[1, 2], [3]]}, r"^weight 'w' is not an array: "),
        ({**GOOD, "w": Unreadable()}, r"^weight 'w' is not an array: lies on a device"),
        (
            {**GOOD, "w": np.zeros((3, 2), np.float32)},
            r"^weight 'w' has shape \[3, 2\], expected w: float32\[2, 3\]$",
        ),
        ({**GOOD, "w": np.zeros(6, np.float32)}, r"^weight 'w' has shape \[6\], expected "),
        ({**GOOD, "w": 1.0}, r"^weight 'w' has shape \[\], expected "),
        ({**GOOD, "n": [1]}, r"^weight 'n' has shape \[1\], expected n: int64\[\]$"),
    ],
)
def test_update_that_does_not_fit_is_refused_by_its_name_and_changes_nothing(
    arena: Arena, store: WeightStore, given: Any, text: str
) -> None:
    before, used = store.current, arena.used
    with pytest.raises(InvalidInputError, match=text):
        store.update(given, 0.0)
    assert store.current is before
    assert_values(arena, before, BEFORE)
    gc.collect()  # an error's traceback holds what it had
    assert arena.used == used
    assert store.update(GOOD, 0.0) == 2


def test_message_about_a_large_thing_that_is_no_mapping_is_short(store: WeightStore) -> None:
    with pytest.raises(InvalidInputError) as caught:
        store.update([list(range(10_000))] * 1000, 0.0)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 500


def test_model_without_replaceable_weights_says_how_to_have_some(arena: Arena) -> None:
    with pytest.raises(InvalidInputError, match=r"none .* can be replaced.*variable_weights"):
        new_store(arena, ()).update({"w": 1}, 0.0)


def test_strings_cannot_be_replaced(arena: Arena) -> None:
    store = new_store(arena, [spec("b", shape=(3,)), spec("s", STRING, (2,))])
    with pytest.raises(InvalidInputError, match="'s' holds strings"):
        store.update({**GOOD, "s": ["a", "b"]}, 0.0)
    assert store.current.number == 0
    assert arena.used == 0


def test_checked_weights_are_arrays_of_their_types() -> None:
    checked = check_weights({"n": 4, "b": (1, 2, 3)}, {weight.name: weight for weight in SPECS})
    assert [*checked] == ["n", "b"]
    assert [str(array.dtype) for array in checked.values()] == ["int64", "float32"]
    assert [array.tolist() for array in checked.values()] == [4, [1, 2, 3]]


# Memory.


def test_memory_of_an_old_version_is_free_once_nobody_holds_it(
    arena: Arena, store: WeightStore
) -> None:
    assert arena.used == BEFORE_BYTES
    held = store.current
    store.update(BEFORE, 0.0)
    assert arena.used == 2 * BEFORE_BYTES
    store.update(BEFORE, 0.0)  # nobody held the second
    assert arena.used == 2 * BEFORE_BYTES
    assert_values(arena, held, BEFORE)
    del held
    assert arena.used == BEFORE_BYTES


def test_memory_that_versions_have_in_common_is_held_by_each(
    arena: Arena, store: WeightStore
) -> None:
    b = align(BEFORE["b"].nbytes)
    held = store.current
    store.update(GOOD, 0.0)
    assert arena.used == BEFORE_BYTES + b
    del held
    assert arena.used == BEFORE_BYTES
    for _ in range(5):
        store.update(GOOD, 0.0)
        assert arena.used == BEFORE_BYTES
    assert_values(arena, store.current, {**BEFORE, **GOOD})


@pytest.fixture
def narrow() -> Iterator[tuple[Arena, WeightStore]]:
    """An arena that has room for the one weight twice."""
    arena = Arena(2 * MIB)
    yield arena, new_store(arena, [spec("w", "uint8", (MIB,))])
    arena.close()


def whole(value: int) -> dict[str, Array]:
    return {"w": np.full(MIB, value, np.uint8)}


def test_update_without_memory_is_refused_and_changes_nothing(
    narrow: tuple[Arena, WeightStore],
) -> None:
    arena, store = narrow
    store.update(whole(1), 0.0)
    held = store.current
    store.update(whole(2), 0.0)
    with pytest.raises(QueueFullError, match=r"Limits\.memory_bytes"):
        store.update(whole(3), 0.0)
    assert store.current.number == 2
    assert values(arena, store.current, store.specs)["w"][0] == 2
    assert values(arena, held, store.specs)["w"][0] == 1
    del held
    assert store.update(whole(4), 0.0) == 3
    assert values(arena, store.current, store.specs)["w"][0] == 4


def test_update_larger_than_all_memory_is_refused(arena: Arena) -> None:
    store = new_store(arena, [spec("w", "uint8", (17 * MIB,))])
    with pytest.raises(InvalidInputError, match="shared memory"):
        store.update({"w": np.zeros(17 * MIB, np.uint8)}, 0.0)
    assert store.current.number == 0


def test_update_that_waits_for_memory_does_not_keep_others_waiting(arena: Arena) -> None:
    begun, go = threading.Event(), threading.Event()

    def allocate(sizes: Sequence[int], timeout: float) -> list[Slot]:
        if timeout:
            begun.set()
            assert go.wait(timeout)
        return arena.allocate_all(sizes)

    store = WeightStore(SPECS, allocate, Copier(2))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(store.update, {"b": [1, 2, 3]}, 20.0)
        assert begun.wait(20.0)
        assert store.update({"n": 5}, 0.0) == 1
        go.set()
        assert waits.result(20.0) == 2
    assert_values(arena, store.current, {"b": [1, 2, 3], "n": 5})


def test_close_in_the_middle_of_an_update_of_its_own_thread_does_not_wait(
    store: WeightStore,
) -> None:
    """As by a signal's handler, or a finalizer."""

    def close_once(frame: FrameType, *_: object) -> None:
        if frame.f_code.co_name == "_commit":
            sys.setprofile(None)
            store.close()

    def update() -> None:
        sys.setprofile(close_once)
        store.update({"n": 4}, 0.0)

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive()


def test_update_of_a_closed_arena_is_refused(arena: Arena, store: WeightStore) -> None:
    arena.close()
    with pytest.raises(ClosedError):
        store.update(GOOD, 1.0)
    assert store.current.number == 1


# Several threads.


def test_updates_from_many_threads_are_numbered_one_after_another(arena: Arena) -> None:
    names = [f"w{i}" for i in range(4)]
    store = new_store(arena, [spec(name, "int64", (64,)) for name in names])
    start = threading.Barrier(4)
    rounds = 100

    def update(name: str) -> list[int]:
        start.wait()
        return [store.update({name: np.full(64, i)}, 5.0) for i in range(rounds)]

    def look() -> None:
        """Every version is complete, and what it says stays true while it is held."""
        last: dict[str, int] = {}
        seen = 0
        while seen < rounds * len(names):
            version = store.current
            assert version.number >= seen
            assert version.oldest <= version.number
            seen = version.number
            found = {}
            for name, value in values(arena, version, store.specs).items():
                assert (value == value[0]).all()
                found[name] = int(value[0])
            assert {name: max(found[name], number) for name, number in last.items()} == {
                name: found[name] for name in last
            }
            last = found

    with ThreadPoolExecutor(5) as pool:
        looking = pool.submit(look)
        numbers = [future.result(30.0) for future in [pool.submit(update, n) for n in names]]
        looking.result(30.0)
    assert all(given == sorted(given) for given in numbers)
    assert sorted(n for given in numbers for n in given) == [*range(1, rounds * 4 + 1)]
    assert store.current.number == rounds * 4
    final = values(arena, store.current, store.specs)
    assert {name: int(final[name][0]) for name in names} == dict.fromkeys(names, rounds - 1)
    assert arena.used == len(names) * 512


# Any sequence of updates, with versions that are held for a while.

NUMBERS = st.integers(-100, 100)
BAD_UPDATES: list[dict[str, Any]] = [
    {},
    {"unknown": 1},
    {"w": 1, "b": "bad"},
    {"b": 1, "n": 2, "unknown": 3},
]
UPDATE = st.dictionaries(st.sampled_from([*BEFORE]), NUMBERS, min_size=1) | st.sampled_from(
    BAD_UPDATES
)


def _given(update: Mapping[str, Any]) -> dict[str, Any]:
    given = {}
    for name, value in update.items():
        like = BEFORE.get(name, BEFORE["w"])
        given[name] = np.zeros((7, 7), like.dtype) if value == "bad" else np.full_like(like, value)
    return given


@given(
    steps=st.lists(st.tuples(UPDATE, st.booleans(), st.integers(0, 5)), max_size=12),
)
@settings(deadline=None, max_examples=150)
def test_any_updates_give_what_a_dictionary_would(
    steps: list[tuple[dict[str, Any], bool, int]],
) -> None:
    arena = Arena(2 * MIB)
    store = new_store(arena)
    model: dict[str, Any] = {}
    held: dict[int, tuple[WeightVersion, dict[str, Any]]] = {0: (store.current, {})}
    number = 0
    for update, keep, drop in steps:
        alive = min([*held, number])
        if update not in BAD_UPDATES:
            number += 1
            assert store.update(_given(update), 0.0) == number
            assert store.current.oldest == alive
            model = {**model, **_given(update)}
        else:
            with pytest.raises(InvalidInputError):
                store.update(_given(update), 0.0)
        assert store.current.number == number
        if keep:
            held[number] = (store.current, model)
        held.pop(drop, None)
        for version, expected in [*held.values(), (store.current, model)]:
            assert_values(arena, version, expected)
        del version
        slots = {
            slot.generation: align(slot.size)
            for holder in [*(version for version, _ in held.values()), store.current]
            for slot in holder.slots.values()
        }
        assert arena.used == sum(max(size, 64) for size in slots.values())
    arena.close()
