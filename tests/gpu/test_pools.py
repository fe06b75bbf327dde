"""Pools on cards from end to end: answers, tensors that stay on a card, one copy of the weights, deaths."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from mcinfer import Master
from mcinfer.examples import encoder
from tests.gpu.cards import Cards

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


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
    arrays = pool.allocate({"image": IMAGES.shape}, device="cuda:0")
    arrays["image"].set(IMAGES)
    check(pool.predict(arrays), expected)
    check(pool.predict(arrays, outputs_on="device"), expected)


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

    wait_until(all_again)
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
