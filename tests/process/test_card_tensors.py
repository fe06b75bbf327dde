"""Tensors on cards between a master and real workers, over the emulated driver; the tests share one pool."""

import gc
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import onnxruntime
import pytest

from mcinfer import (
    EngineOptions,
    Limits,
    Master,
    QueueFullError,
    ort,
)
from mcinfer.cards import dlpack
from mcinfer.cards.cuda import Card
from mcinfer.config import Device
from mcinfer.statistics import CardWay
from tests.emulated_cards import busy, emulated_cards
from tests.process.waiting import wait_until
from tests.text_models import text_model

AFFINE = text_model("""(float[batch, 4] x, float[batch, 4] z) => (float[batch, 4] y, float[batch, 4] v)
    <float two = {2.0}, float one = {1.0}> {
        a = Mul(x, two)  y = Add(a, one)  b = Mul(z, two)  v = Add(b, one)
    }""")
LIMIT = 8 << 20
CARDS = ("cuda:0", "cuda:1")
X = np.arange(24, dtype=np.float32).reshape(6, 4)
Z = X + 100


@pytest.fixture(scope="module")
def cupy() -> Iterator[Any]:
    with emulated_cards() as found:
        # The emulated driver keeps a thread for each stream, and a descriptor for each event.
        for name in CARDS:
            device = Device.parse(name)
            card = Card.open(device)
            card.follow(1)
            blocks = [card.create(number, 1) for number in range(4)]
            for block in blocks:
                block.close()
            with found.cuda.Device(device.index):
                found.asarray(X)
        yield found


@pytest.fixture(scope="module")
def checked(cupy: Any, stream: Any, checked_together: ExitStack) -> ExitStack:
    """What tests of this module share is checked together, and gives the cards' memory back before."""
    assert stream.ptr  # its thread is there before what is checked
    for name in CARDS:
        checked_together.callback(Card.open(Device.parse(name)).reclaim)
    checked_together.callback(cupy.get_default_memory_pool().free_all_blocks)
    checked_together.callback(gc.collect)
    return checked_together


@pytest.fixture(scope="module")
def pool(checked: ExitStack) -> Master:
    options, limits = EngineOptions(allow_fallback=True), Limits(memory_bytes=LIMIT)
    return checked.enter_context(Master(AFFINE, CARDS, options=options, limits=limits))


@pytest.fixture(scope="module")
def stream(cupy: Any) -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def on(cupy: Any, number: int, array: Any) -> Any:
    with cupy.cuda.Device(number):
        return cupy.asarray(array)


def check(outputs: dict[str, Any], x: Any = X, z: Any = Z) -> None:
    assert [*outputs] == ["y", "v"]
    for found, given in zip(outputs.values(), (x, z), strict=True):
        array = found if isinstance(found, np.ndarray) else found.get()
        np.testing.assert_array_equal(array, 2 * given + 1)


def ways(pool: Master, device: str = "cuda:0") -> Mapping[CardWay, int]:
    """How many inputs on a card went which way so far."""
    counts = {card.device: card.inputs for card in pool.statistics().cards}
    return counts.get(device, {})


def came(pool: Master, before: Mapping[CardWay, int], device: str = "cuda:0") -> dict[CardWay, int]:
    after = ways(pool, device)
    return {way: n - before.get(way, 0) for way, n in after.items() if n != before.get(way, 0)}


def test_first_request_teaches_the_split_by_way_of_the_host(pool: Master, cupy: Any) -> None:
    assert not pool.split.checked
    before = ways(pool)
    outputs: Any = pool.predict({"x": on(cupy, 0, X), "z": Z}, outputs_on="cuda:1")
    assert all(array.device.id == 1 for array in outputs.values())
    check(outputs)
    assert pool.split.checked
    assert came(pool, before) == {"through_host": 1}


@pytest.mark.parametrize("outputs_on", ["host", "device", "cuda:1"])
@pytest.mark.parametrize("inputs", ["host", "card", "mixed", "two cards"])
def test_tensors_of_host_and_cards_go_in_and_come_out(
    inputs: str, outputs_on: str, pool: Master, cupy: Any
) -> None:
    x, z = {
        "host": (X, Z),
        "card": (on(cupy, 0, X), on(cupy, 0, Z)),
        "mixed": (X, on(cupy, 1, Z)),
        "two cards": (on(cupy, 0, X), on(cupy, 1, Z)),
    }[inputs]
    # Rows 0 to 2 run on one card, rows 3 to 5 on the other.
    outputs: Any = pool.predict([x, z], outputs_on=outputs_on)
    check(outputs)
    for array in outputs.values():
        if outputs_on == "host":
            assert isinstance(array, np.ndarray)
        else:
            assert array.device.id == int(outputs_on == "cuda:1")


def test_allocated_memory_and_results_are_passed_in_place(pool: Master) -> None:
    before = ways(pool)
    arrays: Any = pool.allocate({"x": (6, 4), "z": (6, 4)}, device="cuda:0")
    arrays["x"].set(X)
    arrays["z"].set(Z)
    first: Any = pool.predict(arrays, outputs_on="device")
    check(pool.predict([*first.values()]), 2 * X + 1, 2 * Z + 1)
    check(pool.predict([arrays["x"][4:], arrays["z"][4:]]), X[4:], Z[4:])  # a view of rows
    assert came(pool, before) == {"in_place": 6}


def test_request_whose_worker_is_killed_is_answered_from_the_same_memory(
    pool: Master, stream: Any
) -> None:
    """The caller does not wait for its stream, and the worker does."""
    arrays: Any = pool.allocate({"x": (6, 4), "z": (6, 4)}, device="cuda:0")
    arrays["z"].set(Z)
    restarts = sum(worker.restarts for worker in pool.statistics().workers)
    with busy(stream):
        with stream:
            arrays["x"].set(X)
            future = pool.submit(arrays, outputs_on="cuda:1")
        wait_until(lambda: any(w.state == "busy" for w in pool.statistics().workers))
        (victim,) = [w.pid for w in pool.statistics().workers if w.state == "busy"]
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: all(w.pid != victim for w in pool.statistics().workers))
    check(future.result(timeout=60))
    pool.wait_ready(60)
    assert sum(worker.restarts for worker in pool.statistics().workers) == restarts + 1
    check(pool.predict([*arrays.values()]))  # the new worker gets the same blocks


def test_full_card_is_waited_for_until_the_time_is_over(pool: Master) -> None:
    held: Any = pool.allocate({"x": (LIMIT // 16 - 1024, 4)}, device="cuda:1")
    big = np.zeros((2048, 4), np.float32)
    pool.predict(
        [big, big]
    )  # how so many rows split is known then: no check has a part of the time
    with pytest.raises(QueueFullError, match="of memory of cuda:1 wanted"):
        pool.predict([big, big], outputs_on="cuda:1", timeout=0.05)
    check(pool.predict([big, big]), big, big)  # the host's memory is another matter
    held.clear()
    gc.collect()
    check(pool.predict([big, big], outputs_on="cuda:1"), big, big)


def test_results_outlive_the_pool(pool: Master) -> None:
    outputs: Any = pool.predict([X, Z], outputs_on="device")
    pool.close()
    check(outputs)
    outputs["y"].fill(1)
    assert outputs["y"].get().min() == 1


@pytest.mark.usefixtures("cupy")
def test_pool_ends_while_a_card_is_busy_and_gives_its_memory_back_later(stream: Any) -> None:
    card = Card.open(Device("cuda", 0))
    card.reclaim()
    with ExitStack() as gate:
        with Master(AFFINE, ["cuda:0"], options=EngineOptions(allow_fallback=True)) as pool:
            free = card.memory()[0]
            held: Any = pool.allocate({"x": (6, 4)}, device="cuda:0")
            assert card.memory()[0] < free
            held.clear()
            gc.collect()
            gate.enter_context(busy(stream))
            card.follow(stream.ptr)
        assert card.memory()[0] < free
    wait_until(lambda: card.memory()[0] >= free)


# Bindings of ONNX Runtime's.


@pytest.fixture(scope="module")
def session(checked: ExitStack) -> Any:
    """Two workers on two cards; the runtime of this process has no CUDA."""
    options: dict[str, Any] = {"options": EngineOptions(allow_fallback=True), "verify": "never"}
    options |= {"batch_axes": {"x": 0, "z": 0}, "output_axes": {"y": 0, "v": 0}}
    limits, model = Limits(memory_bytes=LIMIT), AFFINE.SerializeToString()
    opened = ort.InferenceSession(model, devices=CARDS, limits=limits, **options)
    return checked.enter_context(opened)


def value_on(array: Any) -> Any:
    """An array of CuPy's as an ``OrtValue``."""
    tensor = dlpack.DlpackTensor(
        address=array.data.ptr,
        shape=array.shape,
        element_type=str(array.dtype),
        device=Device("cuda", array.device.id),
        owner=array,
    )
    return onnxruntime.OrtValue.from_dlpack(tensor)


@pytest.mark.parametrize("number", [0, 1])
def test_bound_memory_of_a_card_is_read_and_written_in_place(
    number: int, session: Any, cupy: Any
) -> None:
    binding = onnxruntime.IOBinding(session)
    x, z = on(cupy, number, X), on(cupy, number, Z)
    y, v = on(cupy, number, np.zeros_like(X)), on(cupy, number, np.zeros_like(X))
    place = ("cuda", number, np.float32, X.shape)
    binding.bind_input("x", *place, x.data.ptr)
    binding.bind_ortvalue_input("z", value_on(z))
    binding.bind_output("y", *place, y.data.ptr)
    binding.bind_ortvalue_output("v", value_on(v))
    for shift in range(3):
        x.set(X + shift)  # which the default stream of the card does when it comes to it
        binding.synchronize_inputs()
        session.run_with_iobinding(binding, ort.RunOptions() if shift else None)
        binding.synchronize_outputs()
        np.testing.assert_array_equal(y.view, 2 * (X + shift) + 1)
        np.testing.assert_array_equal(v.view, 2 * Z + 1)
    check(dict(zip("yv", binding.copy_outputs_to_cpu(), strict=True)), X + 2)
    assert [value.device_name().lower() for value in binding.get_outputs()] == ["cuda"] * 2
    before = session.master.statistics()
    assert {card.device for card in before.cards} >= {f"cuda:{number}"}


def test_outputs_are_left_on_the_card_that_is_bound_alone_and_go_in_again(
    session: Any, cupy: Any
) -> None:
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", value_on(on(cupy, 0, X)))
    binding.bind_cpu_input("z", Z)
    binding.bind_output("y", "cuda", 0)
    binding.bind_output("v")
    session.run_with_iobinding(binding)
    y, v = binding.get_outputs()
    assert (y.device_name().lower(), v.device_name().lower()) == ("cuda", "cpu")
    check(dict(zip("yv", binding.copy_outputs_to_cpu(), strict=True)))
    before = ways(session.master)
    (again, _) = session.run(None, {"x": y, "z": Z})
    np.testing.assert_array_equal(again, 4 * X + 3)
    assert came(session.master, before) == {"in_place": 1}


@pytest.mark.usefixtures("checked")
def test_session_on_the_cpu_takes_memory_of_cards_by_way_of_the_host(cupy: Any) -> None:
    text = "(bool[n, 4] x) => (bool[n, 4] y, bfloat16[n, 4] v) { y = Not(x)  v = Cast<to = 16>(y) }"
    model = text_model(text, opset=21).SerializeToString()
    x, v = on(cupy, 0, X > 5), on(cupy, 0, np.zeros(X.shape, np.uint16))
    with ort.InferenceSession(model, devices=1) as session:
        binding = session.io_binding()
        binding.bind_input("x", "cuda", 0, np.bool_, X.shape, x.data.ptr)
        binding.bind_output("v", "cuda", 0, 16, X.shape, v.data.ptr)
        session.run_with_iobinding(binding)
        binding.bind_output("y", "cuda", 0)
        with pytest.raises(NotImplementedError, match="y: bound to cuda:0 without an address"):
            session.run_with_iobinding(binding)  # since CuPy has no bfloat16 for the other one
        binding.clear_binding_outputs()
        binding.bind_output("y", "cuda", 0)
        session.run_with_iobinding(binding)
        (y,) = binding.copy_outputs_to_cpu()
        np.testing.assert_array_equal(y, X <= 5)
        np.testing.assert_array_equal(v.view, np.where(y, 0x3F80, 0))
        assert binding.get_outputs()[0].data_type() == "tensor(bool)"
        del binding
