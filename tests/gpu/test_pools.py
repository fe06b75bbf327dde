"""Pools on cards from end to end: answers, tensors that stay on a card, one copy of the weights, deaths."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from mcinfer import Master, PredictError
from mcinfer.config import Device
from mcinfer.examples import encoder
from mcinfer.machine import cores_near, gpus
from tests.gpu.cards import Cards
from tests.process.waiting import wait_until

ROWS = 8
IMAGES = np.random.default_rng(0).standard_normal((ROWS, 3, 32, 32), np.float32)


@pytest.fixture(scope="module")
def expected() -> NDArray[np.float32]:
    """What one session on the CPU says of `IMAGES`."""
    session = ort.InferenceSession(encoder(), providers=["CPUExecutionProvider"])
    result: NDArray[np.float32] = session.run(["embedding"], {"image": IMAGES})[0]
    return result


@pytest.fixture(scope="module")
def pool(cards: Cards) -> Iterator[Master]:
    """Two workers on the first card, and one on the second if there is one."""
    with cards.pool(encoder(), "cuda:0", "cuda:0", *["cuda:1"][: cards.count - 1]) as master:
        yield master


def check(outputs: dict[str, Any], expected: NDArray[np.float32]) -> None:
    """Fail unless these are the embeddings, on the host or on a card, as far as TensorFloat-32 is exact."""
    assert [*outputs] == ["embedding"]
    array = outputs["embedding"]
    found = array if isinstance(array, np.ndarray) else array.get()
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())


def test_workers_of_cards_answer_as_one_session(pool: Master, expected: Any) -> None:
    check(pool.predict({"image": IMAGES}), expected)
    for row in range(ROWS):
        check(pool.submit({"image": IMAGES[row : row + 1]}).result(), expected[row : row + 1])


def test_tensors_of_a_card_go_in_and_stay_there(pool: Master, expected: Any) -> None:
    import cupy

    images = cupy.asarray(IMAGES)
    outputs = pool.predict({"image": images}, outputs_on="device")
    assert isinstance(outputs["embedding"], cupy.ndarray)
    check(outputs, expected)
    check(pool.predict({"image": images}), expected)
    check(pool.predict({"image": IMAGES}, outputs_on="cuda:0"), expected)


def test_memory_of_a_card_is_used_in_place(pool: Master, expected: Any) -> None:
    arrays: dict[str, Any] = pool.allocate({"image": IMAGES.shape}, device="cuda:0")
    arrays["image"].set(IMAGES)
    check(pool.predict(arrays), expected)
    check(pool.predict(arrays, outputs_on="device"), expected)


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_run_comes_after_what_the_callers_stream_writes(
    device: str, pool: Master, cards: Cards, expected: Any
) -> None:
    import cupy

    index = int(device[-1])
    if index >= cards.count:
        pytest.skip("one card")
    gate = threading.Event()
    with cupy.cuda.Device(index), cupy.cuda.Stream(non_blocking=True) as stream:
        arrays: dict[str, Any] = pool.allocate({"image": IMAGES.shape}, device=device)
        stream.launch_host_func(lambda _: gate.wait(30), None)
        arrays["image"].set(IMAGES)
        future = pool.submit(arrays, outputs_on=device)
    try:
        wait_until(lambda: any(worker.state == "busy" for worker in pool.statistics().workers))
        assert not future.done()
    finally:
        gate.set()
    outputs: dict[str, Any] = future.result()
    assert outputs["embedding"].device.id == index
    check(outputs, expected)


@pytest.mark.parametrize("victim", ["follower", "leader"])
def test_killed_worker_of_a_card_costs_no_request(victim: str, pool: Master, expected: Any) -> None:
    before = pool.statistics().workers
    worker = before[0 if victim == "leader" else 1]
    assert worker.pid is not None
    futures = [pool.submit({"image": IMAGES}) for _ in range(8)]
    os.kill(worker.pid, signal.SIGKILL)
    for future in futures:
        check(future.result(), expected)

    def all_again() -> bool:
        after = pool.statistics().workers
        return after[worker.index].restarts > worker.restarts and all(
            one.state in ("ready", "busy") for one in after
        )

    wait_until(all_again, timeout=120)
    check(pool.predict({"image": IMAGES}), expected)
    restarted = {
        new.index
        for new, old in zip(pool.statistics().workers, before, strict=True)
        if new.pid != old.pid
    }
    assert restarted == ({0, 1} if victim == "leader" else {1})


# What only a card can show.


@pytest.mark.usefixtures("card")
def test_session_runs_on_the_card(pool: Master) -> None:
    for worker in pool.statistics().workers:
        assert worker.providers[0] == "CUDAExecutionProvider"


@pytest.mark.usefixtures("card")
def test_callers_stream_is_waited_for(pool: Master, expected: Any) -> None:
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        ones = cupy.ones((8192, 8192), cupy.float32)
        for _ in range(20):
            ones = ones @ ones * np.float32(1 / 8192)
        images = cupy.asarray(IMAGES) * ones[0, 0]  # done long after the call has begun
        outputs = pool.predict({"image": images}, outputs_on="device")
        check({"embedding": outputs["embedding"] * ones[0, 0]}, expected)


def test_weights_lie_on_a_card_once(card: Cards, tmp_path: Path) -> None:
    side, layers = 4096, 4  # 268 MB
    rng = np.random.default_rng(0)
    weights = {
        f"w{layer}": rng.standard_normal((side, side), np.float32) / 64 for layer in range(layers)
    }
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", [f"x{layer}", f"w{layer}"], [f"x{layer + 1}"])
            for layer in range(layers)
        ],
        "products",
        [onnx.helper.make_tensor_value_info("x0", onnx.TensorProto.FLOAT, ["batch", side])],
        [onnx.helper.make_tensor_value_info(f"x{layers}", onnx.TensorProto.FLOAT, ["batch", side])],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [onnx.helper.make_opsetid("", 20)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=9)
    onnx.save(model, str(tmp_path / "model.onnx"))

    def taken(prepare: str) -> int:
        before = gpus()[0].free_bytes
        options = card.options(prepare=prepare)
        with Master(tmp_path / "model.onnx", ["cuda:0"] * 4, options=options) as master:
            master.warm_up({"x0": np.ones((1, side), np.float32)})
            after = gpus()[0].free_bytes
        assert before is not None
        assert after is not None
        return before - after

    saved = taken("never") - taken("always")
    assert saved >= 2.5 * layers * side * side * 4  # three of four copies, but for what else varies


def test_worker_without_memory_for_a_request_lives_on(card: Cards, expected: Any) -> None:
    limit = {"gpu_mem_limit": str(64 << 20)}
    with card.pool(encoder(), "cuda:0", provider_options=limit) as master:
        before = master.statistics().workers[0].pid
        with pytest.raises(PredictError):
            master.predict({"image": np.zeros((20_000, 3, 32, 32), np.float32)}, shards=1)
        check(master.predict({"image": IMAGES}), expected)
        assert master.statistics().workers[0].pid == before


def test_run_is_captured_in_a_graph_and_replayed(card: Cards, expected: Any) -> None:
    with card.pool(encoder(), "cuda:0", provider_options={"enable_cuda_graph": "1"}) as master:
        for _ in range(3):
            check(master.predict({"image": IMAGES}, shards=1), expected)


def test_tensorrt_serves_by_its_name(card: Cards, expected: Any) -> None:
    if "TensorrtExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no TensorRT")
    options = card.options(provider="tensorrt")
    with Master(encoder(), ["cuda:0"], options=options) as master:
        assert master.statistics().workers[0].providers[0] == "TensorrtExecutionProvider"
        check(master.predict({"image": IMAGES}), expected)


@pytest.mark.usefixtures("card")
def test_workers_run_on_the_cores_beside_their_card(pool: Master) -> None:
    near = cores_near([Device("cuda", 0), Device("cuda", 1)])
    if not near:
        pytest.skip("the kernel does not say beside which cores the card is")
    for worker in pool.statistics().workers:
        assert worker.pid is not None
        place = near.get(Device.parse(worker.device).index)
        assert place is None or os.sched_getaffinity(worker.pid) <= {*place}
