"""Tests of mcinfer/requests/weights.py: versions of weights in a real arena."""

import gc
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError, QueueFullError
from mcinfer.requests.tensors import Copier
from mcinfer.requests.weights import WeightStore, WeightVersion
from mcinfer.shm.arena import Arena, Slot, align
from mcinfer.specs import STRING, TensorSpec, numpy_dtype, tensor_bytes

MIB = 1 << 20

Array = NDArray[Any]


def spec(name: str, element_type: str = "float32", shape: Sequence[int] = (2, 3)) -> TensorSpec:
    return TensorSpec(name=name, dtype=numpy_dtype(element_type), shape=tuple(shape))


SPECS = (spec("w"), spec("b", shape=(3,)), spec("n", "int64", ()))

BEFORE = {"w": np.ones((2, 3), np.float32), "b": np.full(3, 2, np.float32), "n": np.array(3)}
"""What the store of most tests holds at first, as version 1."""


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
        found[name] = np.ndarray(shape, weight.dtype, bytes(memory))
    assert found.keys() == version.tensors.keys()
    return found


def assert_values(arena: Arena, version: WeightVersion, expected: Mapping[str, Any]) -> None:
    found = values(arena, version)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


# What does not fit.

GOOD = {"b": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({**GOOD, "v": 1}, r"^weights: unknown \['v'\], expected some of \['w', 'b', 'n'\]$"),
        (
            {**GOOD, "w": np.zeros((2, 3))},
            r"^weight 'w' has dtype float64, expected float32 \(w: float32\[2, 3\]\): w\.astype",
        ),
        (
            {**GOOD, "w": np.zeros((3, 2), np.float32)},
            r"^weight 'w' has shape \[3, 2\], expected w: float32\[2, 3\]$",
        ),
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


def test_update_whose_places_no_message_can_carry_is_refused_and_changes_nothing(
    arena: Arena, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, used = store.current, arena.used
    monkeypatch.setattr("mcinfer.protocol.MAX_MESSAGE_BYTES", 40)
    with pytest.raises(InvalidInputError, match=r"^weights: .* got \d+ bytes, expected at most 40"):
        store.update(GOOD, 0.0)
    assert store.current is before
    gc.collect()
    assert arena.used == used


def test_model_without_replaceable_weights_says_how_to_have_some(arena: Arena) -> None:
    with pytest.raises(InvalidInputError, match=r"none .* can be replaced.*variable_weights"):
        new_store(arena, ()).update({"w": 1}, 0.0)


@pytest.mark.parametrize(("element_type", "value"), [(STRING, ["a", "b"]), ("int4", [1, -2])])
def test_what_is_no_array_of_whole_bytes_cannot_be_replaced(
    arena: Arena, element_type: str, value: list[Any]
) -> None:
    store = new_store(arena, [spec("b", shape=(3,)), spec("s", element_type, (2,))])
    with pytest.raises(InvalidInputError, match=rf"s: {element_type}\[2\] cannot be replaced"):
        store.update({**GOOD, "s": value}, 0.0)
    assert store.current.number == 0
    assert arena.used == 0


# Memory.


@pytest.fixture
def narrow() -> Iterator[tuple[Arena, WeightStore]]:
    """An arena that has room for the one weight twice."""
    arena = Arena(2 * MIB)
    yield arena, new_store(arena, [spec("w", "uint8", (MIB,))])
    arena.close()


def whole(value: int) -> dict[str, Array]:
    return {"w": np.full(MIB, value, np.uint8)}


def test_update_without_memory_changes_nothing(narrow: tuple[Arena, WeightStore]) -> None:
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


# Several threads.


# Any sequence of updates, with versions that are held for a while.

NUMBERS = st.integers(-100, 100)
BAD_UPDATES: list[dict[str, Any]] = [{}, {"w": 1, "b": "bad"}, {"b": 1, "unknown": 3}]
UPDATE = st.dictionaries(st.sampled_from([*BEFORE]), NUMBERS, min_size=1) | st.sampled_from(
    BAD_UPDATES
)


def _given(update: Mapping[str, Any]) -> dict[str, Any]:
    given = {}
    for name, value in update.items():
        like = BEFORE.get(name, BEFORE["w"])
        given[name] = np.zeros((7, 7), like.dtype) if value == "bad" else np.full_like(like, value)
    return given


@given(steps=st.lists(st.tuples(UPDATE, st.booleans(), st.integers(0, 5)), max_size=12))
def test_updates_are_as_in_a_dictionary(steps: list[tuple[dict[str, Any], bool, int]]) -> None:
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
            slot.address: align(slot.size)
            for holder in [*(version for version, _ in held.values()), store.current]
            for slot in holder.slots.values()
        }
        assert arena.used == sum(max(size, 64) for size in slots.values())
    arena.close()
