"""Tests of mcinfer/cards/tensors.py, with workers in this process, over the emulated driver."""

import ctypes
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, cast

import numpy as np
import pytest

from mcinfer.cards.cuda import Card
from mcinfer.cards.tensors import CardMemory, open_memory, place_of
from mcinfer.config import Device
from mcinfer.errors import InvalidInputError, PredictError, PredictTimeoutError
from mcinfer.protocol import TensorRef
from mcinfer.requests.frames import IdleFrames
from mcinfer.requests.planner import HostPlace, Inbox, Planner
from mcinfer.requests.request import Request
from mcinfer.requests.splitting import SplitState
from mcinfer.shm.arena import Arena, BlockNeededError, SharedBlock, Slot
from mcinfer.specs import ModelSpec, tensor_bytes
from tests.emulated_cards import busy, emulated_cards
from tests.planned_requests import (
    A_POOL,
    DECLARED,
    MIB,
    PLAIN,
    Value,
    Worker,
    known,
    model,
    never,
    references,
    replied,
    request_of,
)

LIMIT = 4 * MIB
X = np.arange(12, dtype=np.float32).reshape(4, 3)
W = np.ones(2, np.float32)
PLAIN_X: Value = ("float32", ["batch", 3])


@pytest.fixture(scope="module")
def cupy() -> Iterator[Any]:
    with emulated_cards() as found:
        yield found


@dataclass
class Pool:
    """What a loop is to the planner, and a worker that answers in this process."""

    cupy: Any
    reached: bool = True
    model: ModelSpec = PLAIN
    limit: int = LIMIT
    delivered: list[Callable[[], object]] = field(default_factory=list)
    repeated: list[Callable[[], bool]] = field(default_factory=list)
    timeout: float = 30.0
    asked: list[tuple[str, list[int]]] = field(default_factory=list)
    memories: dict[Device, CardMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self.arena = Arena(LIMIT, numbers=self._numbers)
        place = HostPlace(self.arena, self.allocate, IdleFrames())
        self.planner = Planner(self.model, place, cast("Inbox", self), max_rows=8, log=A_POOL)

    def allocate(
        self, sizes: Any, _: float, arena: Arena | None = None, block: SharedBlock | None = None
    ) -> list[Slot]:
        arena = arena or self.arena
        if block is not None:
            arena.add(block)
        try:
            slots = arena.allocate_all(sizes)
        except BlockNeededError as exc:
            raise exc.with_traceback(
                None
            ) from None  # which would hold itself, and the caller's frames
        found = [str(device) for device, one in self.memories.items() if one.arena is arena]
        self.asked.append((found[0] if found else "host", [*sizes]))
        return slots

    def place(self, device: Device) -> CardMemory:
        if device not in self.memories:
            Card.open(device).reclaim()  # what earlier tests have left
            queue, dropped = cast("Inbox", self), list[int]().append
            memory = open_memory(device, self.limit, queue, dropped, self._numbers)
            self.memories[device] = memory
            memory.is_reached = self.reached
        return self.memories[device]

    def deliver(self, call: Callable[[], object]) -> None:
        self.delivered.append(call)

    def repeat(self, call: Callable[[], bool]) -> None:
        self.repeated.append(call)

    def request(
        self,
        *inputs: Any,
        on: str | None = None,
        pieces: int = 2,
        how: SplitState | None = DECLARED,
    ) -> Request:
        memory = None if on is None else self.place(Device.parse(on))
        request = request_of(
            self.planner, [*inputs], pieces, how, 1.0, outputs_on=memory, card_timeout=self.timeout
        )
        request.timeout = self.timeout
        return request

    def at(self, reference: TensorRef) -> np.ndarray[Any, Any]:
        """The memory of a reference, once all that is queued on its card is done."""
        _, element_type, shape, number, offset = reference
        assert number is not None
        for arena in (self.arena, *(memory.arena for memory in self.memories.values())):
            block = arena.block(number)
            if block is not None:
                if block.device is not None:
                    Card.open(block.device).synchronize()
                size = tensor_bytes(element_type, int(np.prod(shape)))
                memory: Any = (ctypes.c_char * size).from_address(block.address + offset)
                return np.ndarray(shape, element_type, memory)
        raise AssertionError(f"block {number} is not there")

    def answer(self, request: Request, own: Worker | None = None) -> dict[str, Any]:
        """y = 2x in every shard; in memory of the worker's own, or in its place."""
        for shard in range(len(request.rows)):
            inputs, outputs = references(request, shard)
            y = 2 * self.at(inputs[0])
            if own is None:
                self.at(outputs[0])[...] = y
                request.take(shard, replied(outputs), never, shard, LIMIT)
            else:
                reply = replied(own.put(("y", y)))
                request.take(shard, reply, own.lend, shard, LIMIT)
        request.settled = True
        request.release()
        value = request.value()
        request.let_go()
        return value

    def ways(self, device: str = "cuda:0") -> dict[str, int]:
        return {
            way: count
            for way, count in self.place(Device.parse(device)).statistics().inputs.items()
            if count
        }

    def empty(self, device: str, rows: int = 8) -> Any:
        memory = self.place(Device.parse(device))
        return self.planner.allocate({"x": (rows, 3)}, 0.0, memory)["x"]

    def deliver_all(self) -> None:
        gc.collect()
        while self.delivered:
            self.delivered.pop()()
        for memory in self.memories.values():
            memory.card.synchronize(30)
        while self.repeated:
            assert self.repeated.pop()()

    def close(self) -> None:
        self.deliver_all()
        for memory in self.memories.values():
            assert memory.arena.used == 0
            memory.arena.close()
        self.planner.close()
        self.arena.close()


Make = Callable[..., Pool]


@pytest.fixture
def make(cupy: Any) -> Iterator[Make]:
    made: list[Pool] = []

    def start(**options: Any) -> Pool:
        made.append(Pool(cupy, **options))
        return made[-1]

    yield start
    for pool in made:
        pool.close()


def test_foreign_tensor_is_copied_once_on_its_card(make: Make) -> None:
    pool = make()
    x = pool.cupy.asarray(X)
    request = pool.request(x, W)
    (first, second) = (references(request, shard)[0][0] for shard in (0, 1))
    assert first[3] == second[3]
    assert second[4] - first[4] == X.nbytes // 2  # rows of the same memory
    value = pool.answer(request)
    np.testing.assert_array_equal(value["y"], 2 * X)
    assert pool.ways() == {"copied": 1}
    assert pool.place(Device("cuda", 0)).statistics().input_bytes["copied"] == X.nbytes


def test_outputs_stay_on_the_card_until_their_last_view_is_gone(make: Make) -> None:
    pool = make()
    used = pool.place(Device("cuda", 0)).arena
    value = pool.answer(pool.request(X, W, on="cuda:0"))
    np.testing.assert_array_equal(value["y"].get(), 2 * X)
    address = value["y"].data.ptr
    row = value["y"][1]
    again = pool.answer(pool.request(value.pop("y"), W, on="cuda:0"))["y"]
    assert again.data.ptr != address
    assert pool.ways() == {"in_place": 1}
    np.testing.assert_array_equal(again.get(), 4 * X)
    del again
    assert used.used > 0
    np.testing.assert_array_equal(row.get(), 2 * X[1])
    del row
    pool.deliver_all()
    assert used.used == 0
    assert pool.answer(pool.request(X, W, on="cuda:0"))["y"].data.ptr == address


def test_inputs_and_outputs_of_one_card_get_memory_at_once_and_the_hosts_comes_last(
    make: Make,
) -> None:
    pool = make(model=model({"x": PLAIN_X, "z": PLAIN_X}, {"y": PLAIN_X}))
    how = known(pool.model)
    with pool.cupy.cuda.Device(1):
        x = pool.cupy.asarray(X)
    request = pool.request(x, X, on="cuda:1", how=how)
    assert pool.asked == [("cuda:1", [X.nbytes, 64]), ("host", [64])]
    pool.answer(request)
    pool.asked.clear()
    pool.answer(pool.request(x, X, on="cuda:0", how=how))
    assert [name for name, _ in pool.asked] == ["cuda:0", "cuda:1"]  # the host's frame was idle


def test_card_that_workers_do_not_reach_goes_through_the_host(make: Make) -> None:
    pool = make(reached=False)
    value = pool.answer(pool.request(pool.cupy.asarray(X), W, on="cuda:0"))
    assert isinstance(value["y"], pool.cupy.ndarray)
    np.testing.assert_array_equal(value["y"].get(), 2 * X)
    assert pool.ways() == {"through_host": 1}


def test_input_cut_along_an_inner_axis_goes_through_the_host(make: Make) -> None:
    spec = model({"x": ("float32", [3, "batch"])}, {"y": ("float32", [3, "batch"])})
    pool = make(model=spec)
    x = pool.cupy.asarray(np.ascontiguousarray(X.T))
    how = known(spec, inputs={"x": 1}, outputs={"y": 1})
    value = pool.answer(pool.request(x, on="cuda:0", how=how))
    np.testing.assert_array_equal(value["y"].get(), 2 * X.T)
    assert pool.ways() == {"through_host": 1}


def test_empty_batch_on_a_card_is_answered_there(make: Make) -> None:
    pool = make()
    request = pool.request(pool.cupy.asarray(X[:0]), W, on="cuda:0")
    value: Any = request.value()["y"]
    assert (value.shape, value.dtype) == ((0, 3), np.float32)
    assert isinstance(value, pool.cupy.ndarray)
    del value
    request.let_go()


def test_producer_lets_go_in_the_delivery_thread(make: Make) -> None:
    pool = make()
    x = pool.cupy.asarray(X)
    before = sys.getrefcount(x.view)
    gc.disable()  # nothing waits for the collector
    try:
        pool.answer(pool.request(x, W))
    finally:
        gc.enable()
    held = sys.getrefcount(x.view)  # not within an assertion, which holds what it compares
    (deliver,) = pool.delivered
    pool.delivered.clear()
    deliver()
    del deliver
    after = sys.getrefcount(x.view)
    assert (held, after) == (before + 1, before)


def test_results_memory_is_written_again_only_after_the_default_stream_has_read_it(
    make: Make,
) -> None:
    pool = make()
    card = pool.place(Device("cuda", 0)).card
    value = pool.answer(pool.request(X, W, on="cuda:0"))
    with busy(pool.cupy.cuda.get_current_stream()):
        copy = value.pop("y").copy()
        gc.collect()
        request = pool.request(X + 7, W, on="cuda:0")
        with pytest.raises(TimeoutError):
            card.synchronize(0.0)
    pool.answer(request)
    np.testing.assert_array_equal(copy.get(), 2 * X)


def test_results_are_copied_out_where_callers_hold_much_of_the_limit(make: Make) -> None:
    pool = make(limit=2 * MIB)
    card = pool.place(Device("cuda", 0))
    held = pool.empty("cuda:0", MIB // 12)
    with pool.cupy.cuda.Stream(non_blocking=True) as stream, busy(stream):
        value = pool.answer(pool.request(X, W, on="cuda:0"))["y"]
        assert card.arena.used - held.view.nbytes < 64
        again = pool.request(X + 9, W, on="cuda:0")
        with pytest.raises(TimeoutError):
            card.card.synchronize(0.0)  # the copy comes before what is written there next
    pool.answer(again)
    np.testing.assert_array_equal(value.get(), 2 * X)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda cupy: cupy.asarray(X)[:, :2], r"input 'x': got a tensor of shape .* C-contiguous"),
        (lambda cupy: cupy.asarray(X.astype(np.float64)), "has dtype float64, expected float32"),
        (lambda _: Elsewhere(7), "input 'x' lies on cuda:7, which cannot be used: .* 2 NVIDIA"),
        (lambda _: Elsewhere(0), "input 'x': it requires a gradient"),
    ],
)
def test_tensor_that_does_not_fit_is_refused(
    make: Make, bad: Callable[[Any], Any], text: str
) -> None:
    pool = make()
    with pytest.raises(InvalidInputError, match=text):
        pool.request(bad(pool.cupy), W)


def test_producer_is_asked_while_its_card_is_the_current_one(make: Make) -> None:
    pool = make()
    driver = import_module("cuda.bindings.driver")

    class OfCurrentCard:
        """As a tensor of PyTorch."""

        def __init__(self, array: Any) -> None:
            self.array = array
            self.__dlpack_device__ = array.__dlpack_device__

        def __dlpack__(self, **options: Any) -> Any:
            current = int(driver.cuCtxGetCurrent()[1])
            assert current == int(driver.cuDevicePrimaryCtxRetain(self.array.device.id)[1])
            return self.array.__dlpack__(**options)

    with pool.cupy.cuda.Device(1):
        x = OfCurrentCard(pool.cupy.asarray(X))
    np.testing.assert_array_equal(pool.answer(pool.request(x, W))["y"], 2 * X)


class Elsewhere:
    """A tensor on a card that cannot be had, as those of PyTorch may be."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._index

    def __dlpack__(self, **_: object) -> object:
        raise BufferError("it requires a gradient")


def test_types_that_cupy_lacks_are_refused() -> None:
    for element_type in ("bfloat16", "string"):
        (spec,) = model({"x": (element_type, [2])}, {}).inputs
        with pytest.raises(InvalidInputError, match=r"outputs_on: got x: .*, which no CuPy array"):
            place_of("device", "outputs_on", [spec], [], cast("Inbox", None))


def test_producers_tensor_is_held_until_the_copy_for_a_failed_request_is_done(make: Make) -> None:
    pool = make()
    card = pool.place(Device("cuda", 0))
    x = pool.cupy.asarray(X)
    card.card.synchronize()
    with pool.cupy.cuda.Stream(non_blocking=True) as stream, busy(stream):
        before = sys.getrefcount(x.view)
        request = pool.request(x, W)
        request.error = PredictError("a worker is gone")
        request.release()
        del request
        while pool.delivered:
            pool.delivered.pop()()  # nothing waits here
        (attempt,) = pool.repeated
        assert not attempt()
        held = sys.getrefcount(x.view)
    assert held == before + 1
    card.card.synchronize()
    del attempt
    pool.deliver_all()
    after = sys.getrefcount(x.view)
    assert after == before


@pytest.mark.parametrize("way", ["in", "out"])
def test_tensor_that_goes_through_the_host_is_not_waited_for_past_the_time_out(
    make: Make, way: str
) -> None:
    pool = make(reached=False, timeout=0.05)
    x = pool.cupy.asarray(X)
    pool.place(Device("cuda", 0))
    request = pool.request(X, W, on="cuda:0")
    with busy(pool.cupy.cuda.get_current_stream()):
        call = partial(pool.request, x, W) if way == "in" else partial(pool.answer, request)
        with pytest.raises(PredictTimeoutError, match=r"cuda:0: the work queued .* than 0\.05 s"):
            call()


def test_allocate_does_not_wait_for_a_busy_stream_but_the_arrays_stream_does(make: Make) -> None:
    pool = make()
    card = pool.place(Device("cuda", 0)).card
    stream = pool.cupy.cuda.Stream(non_blocking=True)
    with busy(stream):
        card.follow(stream.ptr)  # as for a request whose input is not ready
        with pool.cupy.cuda.Stream(non_blocking=True) as mine:
            x = pool.empty("cuda:0", 4)
            x.set(X)
        with pytest.raises(TimeoutError):
            card.synchronize(0.0)
        card.follow(mine.ptr)
    np.testing.assert_array_equal(pool.answer(pool.request(x, W))["y"], 2 * X)


def test_result_that_another_thread_copies_out_is_complete_for_every_stream(make: Make) -> None:
    pool = make(limit=2 * MIB, timeout=0.05)
    held = pool.empty("cuda:0", MIB // 12)
    request = pool.request(X, W, on="cuda:0")
    with busy(pool.cupy.cuda.get_current_stream()), ThreadPoolExecutor(1) as delivery:
        error = delivery.submit(pool.answer, request).exception()
    assert isinstance(error, PredictTimeoutError)
    assert held.shape


@pytest.mark.parametrize("array", [np.float32(3.0), np.zeros((0, 3), np.float32)])
def test_tensor_without_dimensions_or_elements_goes_in_and_out(make: Make, array: Any) -> None:
    shape = [*np.shape(array)]
    value: Value = ("float32", shape)
    pool = make(model=model({"x": value}, {"y": value}))
    request = pool.request(pool.cupy.asarray(np.asarray(array)), on="cuda:0", pieces=1, how=None)
    y: Any = pool.answer(request)["y"]
    np.testing.assert_array_equal(y.get(), 2 * array)
    assert y.shape == tuple(shape)


def test_results_in_place_are_only_views_for_the_delivery_thread(make: Make) -> None:
    pool = make()
    assert pool.request(X, W, on="cuda:0").is_simple
    own = Worker()
    request = pool.request(X, W, on="cuda:0")
    references(request, 0)
    # Of another shape than the model declares.
    request.take(0, replied(own.put(("y", 2 * X[:1]))), own.lend, 0, LIMIT)
    assert not request.is_simple
    own.close()
