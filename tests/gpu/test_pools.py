"""Pools on cards from end to end: answers, tensors that stay on a card, one copy of the weights, deaths."""

import os
import signal
from typing import Any

import numpy as np
import pytest

from mcinfer import Master
from tests.emulated_cards import busy
from tests.gpu.cards import IMAGES, Cards, check
from tests.process.waiting import wait_until


def test_workers_of_cards_answer_as_one_session(pool: Master, expected: Any) -> None:
    check(pool.predict({"image": IMAGES}), expected)
    for row in range(len(IMAGES)):
        check(pool.submit({"image": IMAGES[row : row + 1]}).result(), expected[row : row + 1])


def test_tensors_of_a_card_go_in_and_stay_there(pool: Master, expected: Any) -> None:
    import cupy

    allocated: dict[str, Any] = pool.allocate({"image": IMAGES.shape}, device="cuda:0")
    allocated["image"].set(IMAGES)
    for image in (cupy.asarray(IMAGES), allocated["image"], IMAGES):
        for place in ("device", "cuda:0"):
            outputs = pool.predict({"image": image}, outputs_on=place)
            assert isinstance(outputs["embedding"], cupy.ndarray)
            check(outputs, expected)
        check(pool.predict({"image": image}), expected)


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_run_comes_after_what_the_callers_stream_writes(
    device: str, pool: Master, cards: Cards, expected: Any
) -> None:
    import cupy

    index = int(device[-1])
    if index >= cards.count:
        pytest.skip("one card")
    with cupy.cuda.Device(index), cupy.cuda.Stream(non_blocking=True) as stream:
        arrays: dict[str, Any] = pool.allocate({"image": IMAGES.shape}, device=device)
        foreign = cupy.empty(IMAGES.shape, np.float32)
        with busy(stream):
            arrays["image"].set(IMAGES)
            futures = [pool.submit(arrays, outputs_on=device)]
            foreign.set(IMAGES)  # which is copied on the card
            futures.append(pool.submit({"image": foreign}, outputs_on=device))
            wait_until(lambda: any(worker.state == "busy" for worker in pool.statistics().workers))
            assert not any(future.done() for future in futures)
    for future in futures:
        outputs: dict[str, Any] = future.result()
        assert outputs["embedding"].device.id == index
        check(outputs, expected)


@pytest.mark.parametrize("victim", ["last", "first"])
def test_killed_worker_of_a_card_costs_no_request(victim: str, pool: Master, expected: Any) -> None:
    before = pool.statistics().workers
    worker = before[0 if victim == "first" else 1]
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
    assert restarted == ({0, 1} if victim == "first" else {1})  # which has made the weights
